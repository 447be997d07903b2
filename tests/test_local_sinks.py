"""Two-phase commit through the executor: nothing is visible before it is published, everything once afterwards."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from stateformat.backends.connectors import FileSink
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import JobFailed, JobOutcome, LocalRun, LocalRuntime, RunDiscarded, VirtualClock
from stateformat.errors import PublishConflict
from stateformat.model import StopMode
from tests.local_jobs import Bench, Out, Tap, Told, rows, settle, to_end, until


def job(bench: Bench, tap: Tap, out: Out, parallelism: int = 1) -> Dataflow:
    flow = Dataflow("job", parallelism=parallelism)
    flow.source(tap, uid="in").apply(Told(bench.log), uid="op", chain=False).apply(out, uid="out", chain=False)
    return flow


def test_nothing_is_visible_before_its_checkpoint_is_published() -> None:
    bench = Bench(checkpoint_interval_us=20_000)
    out = Out(bench.log)
    published_at_commit: list[int] = []
    commit = out.commit

    def watched(permit, committables):  # type: ignore[no-untyped-def]
        published_at_commit.append(bench.newest_id)
        assert permit.ref.checkpoint_id == bench.newest_id
        return commit(permit, committables)

    out.commit = watched  # type: ignore[method-assign]
    run = bench.begin(job(bench, Tap([rows(n) for n in range(30)]), out))
    while run.step():
        if bench.newest_id == 0:
            assert out.seen == []
    assert published_at_commit
    assert published_at_commit == sorted(published_at_commit)
    assert out.seen == list(range(30))


def test_what_is_committed_is_left_out_of_the_next_checkpoint() -> None:
    bench = Bench()
    tap, out = Tap([rows(1), rows(2)], shut=True), Out(bench.log)
    run = bench.begin(job(bench, tap, out))
    tap.let(0, 1)
    until(run, lambda: "out/0 process 0: 1" in bench.log.calls)
    bench.checkpoint(run)
    assert [row["values"] for row in bench.state("out", "committables")] == ["1"]
    bench.checkpoint(run)
    assert bench.state("out", "committables") == []
    assert "committables" not in bench.newest.required_features


def test_what_a_sink_puts_off_comes_again_with_the_next_checkpoint_under_its_own_ids() -> None:
    bench = Bench()
    tap, out = Tap([rows(1), rows(2)], [rows(11), rows(12)], shut=True), Out(bench.log)
    run = bench.begin(job(bench, tap, out, parallelism=2))
    out.later = [1, 1]
    tap.let(0, 1)
    tap.let(1, 1)
    until(run, lambda: {"out/0 process 0: 1", "out/1 process 0: 11"} <= set(bench.log.calls))
    bench.checkpoint(run)
    first = bench.state("out", "committables")
    assert len(first) == 2
    assert len(out.seen) == 1
    bench.checkpoint(run)
    assert len(out.seen) == 1
    (again,) = bench.state("out", "committables")
    assert again in first
    assert (again["_checkpoint_id"], again["_attempt_id"]) == (1, first[0]["_attempt_id"])
    bench.checkpoint(run)
    assert out.seen == [1, 11]
    bench.checkpoint(run)
    assert bench.state("out", "committables") == []
    tap.let(0)
    tap.let(1)
    to_end(run)
    assert out.seen == [1, 2, 11, 12]


def test_what_a_sink_has_put_off_is_not_lost_by_a_restart() -> None:
    bench = Bench()
    tap, out = Tap([rows(1), rows(2)], shut=True), Out(bench.log)
    run = bench.begin(job(bench, tap, out))
    out.later = [1]
    tap.let(0, 1)
    until(run, lambda: "out/0 process 0: 1" in bench.log.calls)
    bench.checkpoint(run)
    assert out.seen == []
    out.later = [1]
    run = bench.begin(job(bench, tap, out, parallelism=2))
    assert out.seen == []
    bench.checkpoint(run)
    assert out.seen == [1]
    tap.let(0)
    to_end(run)
    assert out.seen == [1, 2]


@pytest.mark.parametrize("stop", [None, StopMode.DRAIN, StopMode.NO_DRAIN])
def test_a_job_does_not_end_before_what_its_sinks_put_off_is_committed(stop: StopMode | None) -> None:
    bench = Bench()
    tap, out = Tap([rows(1)], endless=stop is not None), Out(bench.log)
    run = bench.begin(job(bench, tap, out))
    out.later = [1, 1, 0]
    if stop is not None:
        until(run, lambda: "out/0 process 0: 1" in bench.log.calls)
        run.request_stop(stop)
    to_end(run)
    assert out.seen == [1]


def test_a_sink_that_puts_off_for_ever_fails_the_job_rather_than_losing_anything() -> None:
    bench = Bench(max_restarts=1)
    out = Out(bench.log)
    out.later = [1] * 100
    flow = job(bench, Tap([rows(1)]), out)
    with pytest.raises(JobFailed, match=r"sink 'out' has put off 1 committable"):
        bench.run(flow)
    assert out.seen == []
    out.later = []
    outcome = bench.run(flow)
    assert outcome.stop is None
    assert out.seen == [1]


@pytest.mark.parametrize("when", ["out commit 1", "out committed 1"])
def test_a_commit_that_fails_restarts_the_job_which_commits_again_first(when: str) -> None:
    bench = Bench(checkpoint_interval_us=20_000)
    out = Out(bench.log)
    bench.log.failing.append(when)
    outcome = bench.run(job(bench, Tap([rows(n) for n in range(10)]), out))
    assert outcome.restarts == 1
    failed = bench.log.calls.index(when)
    # What the lost run had open is closed; then the commit comes before anything else.
    after = [call for call in bench.log.calls[failed + 1 :] if not call.endswith(" close")]
    assert after[:3] == ["out commit 1", "out committed 1", "out clean 1"]
    assert out.seen == list(range(10))


# Two runs on one store ---------------------------------------------------------------------------------------------------


def test_a_run_that_was_overtaken_is_told_so_at_its_next_publication_and_commits_nothing() -> None:
    bench = Bench()
    tap, out = Tap([rows(n) for n in range(6)], shut=True), Out(bench.log)
    zombie = bench.begin(job(bench, tap, out))
    tap.let(0, 2)
    until(zombie, lambda: "out/0 process 0: 1" in bench.log.calls)
    bench.checkpoint(zombie)
    assert out.seen == [0, 1]
    tap.let(0, 4)
    settle(zombie, 60)
    again = Out(bench.log)
    again.committed = out.committed
    run = bench.begin(job(bench, tap, again))
    until(run, lambda: run.rows_read == 2)
    settle(run, 60)
    bench.checkpoint(run)
    assert again.seen == [0, 1, 2, 3]
    permits = len(out.permits)
    bench.due(zombie)
    with pytest.raises(PublishConflict):
        settle(zombie, 500)
    assert len(out.permits) == permits
    assert bench.newest_id == 2
    tap.let(0)
    to_end(run)
    assert again.seen == list(range(6))


def test_a_runtime_that_was_overtaken_does_not_start_again() -> None:
    bench = Bench(checkpoint_interval_us=20_000, max_restarts=5)
    out = Out(bench.log)
    flow = job(bench, Tap([rows(n) for n in range(200)]), out)

    opened: list[LocalRun] = []

    def overtake(_: object) -> None:
        if not opened:
            opened.append(bench.begin(flow))
            bench.checkpoint(opened[0])

    # Its progress is shown every few steps, and at the first sight of it another run takes the job.
    bench.clock = VirtualClock(60_000)
    runtime = LocalRuntime(bench.store, clock=bench.clock, progress=overtake, checkpoint_interval_us=5_000_000)
    with pytest.raises(PublishConflict):
        runtime.run(flow)
    assert bench.log.calls.count("op/0 open") == 2
    assert opened


@pytest.mark.parametrize("seed", range(3))
def test_two_runs_that_go_on_side_by_side_commit_every_row_once(seed: int) -> None:
    bench = Bench(checkpoint_interval_us=30_000)
    tap, out = Tap([rows(n) for n in range(40)]), Out(bench.log)
    runs = [bench.begin(job(bench, tap, out), seed=seed), bench.begin(job(bench, tap, out, 2), seed=seed + 1)]
    ends: list[object] = []
    while runs:
        for run in list(runs):
            try:
                if not run.step():
                    ends.append(run.outcome)
                    runs.remove(run)
            except (PublishConflict, RunDiscarded) as error:
                ends.append(error)
                runs.remove(run)
    conflicts = [end for end in ends if isinstance(end, PublishConflict)]
    assert len(conflicts) == 1
    outcome = bench.run(job(bench, tap, out))
    assert isinstance(outcome, JobOutcome)
    assert out.seen == list(range(40))


# Files -------------------------------------------------------------------------------------------------------------------


def visible(folder: Path) -> list[int]:
    return sorted(value for path in folder.glob("*.parquet") for value in pq.read_table(path)["value"].to_pylist())


def test_files_of_a_job_that_is_killed_and_resumed_on_a_local_store_hold_every_row_once(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path / "store"), checkpoint_interval_us=40_000)
    folder = tmp_path / "out"
    tap = Tap([rows(n) for n in range(0, 60, 2)], [rows(n) for n in range(1, 60, 2)])

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        made.source(tap, uid="in").key_by("key").apply(Told(bench.log), uid="op").apply(FileSink(folder), uid="files")
        return made

    shown: list[int] = []
    for kill in range(3):
        begun = bench.begin(flow(2 + kill % 2), seed=kill)
        for _ in range(90):
            assert begun.step()
            now = visible(folder) if folder.exists() else []
            assert set(shown) <= set(now)
            assert len(now) == len(set(now))
            assert bench.newest_id or not now
            shown = now
    bench.run(flow(1))
    assert visible(folder) == list(range(60))
