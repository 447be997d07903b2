"""Two-phase commit through the executor: nothing is visible before it is published, everything once
afterwards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.connectors import FileSink
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import JobFailed, LocalRun, LocalRuntime, RunDiscarded, VirtualClock
from stateformat.errors import PublishConflict
from stateformat.model import StopMode
from tests.local_jobs import Bench, Line, Out, Tap, Told, rows, settle, to_end, until, until_told


def test_nothing_is_visible_before_its_checkpoint_is_published() -> None:
    line = Line([rows(n) for n in range(30)], checkpoint_interval_us=20_000)
    published: list[int] = []
    commit = line.out.commit

    def watched(permit: Any, committables: pa.Table) -> pa.Table | None:
        published.append(line.bench.newest_id)
        assert permit.ref.checkpoint_id == line.bench.newest_id
        return commit(permit, committables)

    line.out.commit = watched  # type: ignore[method-assign]
    run = line.begin()
    while run.step():
        assert line.bench.newest_id or line.out.seen == []
    assert published
    assert published == sorted(published)
    assert line.out.seen == list(range(30))


def test_what_is_committed_is_left_out_of_the_next_checkpoint() -> None:
    line = Line([rows(1), rows(2)], shut=True)
    run = line.begin()
    line.let(run, 1)
    line.bench.checkpoint(run)
    assert [row["values"] for row in line.bench.state("out", "committables")] == ["1"]
    line.bench.checkpoint(run)
    assert line.bench.state("out", "committables") == []
    assert "committables" not in line.bench.newest.required_features


def test_what_a_sink_puts_off_comes_again_with_the_next_checkpoint_under_its_own_ids() -> None:
    line = Line([rows(1), rows(2)], [rows(11), rows(12)], shut=True, parallelism=2)
    bench, out, run = line.bench, line.out, line.begin()
    out.later = [1, 1]
    line.let(run, 1)
    line.let(run, 1, split=1)
    bench.checkpoint(run)
    first = bench.state("out", "committables")
    assert (len(first), len(out.seen)) == (2, 1)
    bench.checkpoint(run)
    assert len(out.seen) == 1
    (again,) = bench.state("out", "committables")
    assert again in first
    assert (again["_checkpoint_id"], again["_attempt_id"]) == (1, first[0]["_attempt_id"])
    bench.checkpoint(run)
    assert out.seen == [1, 11]
    bench.checkpoint(run)
    assert bench.state("out", "committables") == []
    line.tap.let(0)
    line.tap.let(1)
    to_end(run)
    assert out.seen == [1, 2, 11, 12]


def test_what_a_sink_has_put_off_is_not_lost_by_a_restart() -> None:
    line = Line([rows(1), rows(2)], shut=True)
    run = line.begin()
    line.out.later = [1]
    line.let(run, 1)
    line.bench.checkpoint(run)
    line.out.later = [1]
    run = line.begin(2)
    assert line.out.seen == []
    line.bench.checkpoint(run)
    assert line.out.seen == [1]
    line.tap.let(0)
    to_end(run)
    assert line.out.seen == [1, 2]


@pytest.mark.parametrize("stop", [None, *StopMode])
def test_a_job_does_not_end_before_what_its_sinks_put_off_is_committed(stop: StopMode | None) -> None:
    line = Line(endless=stop is not None)
    run = line.begin()
    line.out.later = [1, 1, 0]
    if stop is not None:
        until_told(run, line.log, "out/0 process 0: 1")
        run.request_stop(stop)
    to_end(run)
    assert line.out.seen == [1]


def test_a_sink_that_puts_off_for_ever_fails_the_job_rather_than_losing_anything() -> None:
    line = Line(max_restarts=1)
    line.out.later = [1] * 100
    with pytest.raises(JobFailed, match=r"sink 'out' has put off 1 committable"):
        line.run()
    assert line.out.seen == []
    line.out.later = []
    assert line.run().stop is None
    assert line.out.seen == [1]


@pytest.mark.parametrize("when", ["out commit 1", "out committed 1"])
def test_a_commit_that_fails_restarts_the_job_which_commits_again_first(when: str) -> None:
    line = Line([rows(n) for n in range(10)], checkpoint_interval_us=20_000)
    line.log.failing.append(when)
    assert line.run().restarts == 1
    # What the lost run had open is closed; then the commit comes before anything else.
    after = [call for call in line.log.calls[line.log.calls.index(when) + 1 :] if not call.endswith(" close")]
    assert after[:3] == ["out commit 1", "out committed 1", "out clean 1"]
    assert line.out.seen == list(range(10))


@pytest.mark.parametrize("returned", [[1], pa.table({"q": [1]})])
def test_a_commit_that_returns_what_is_no_committable_fails_with_a_sentence(returned: Any) -> None:
    line = Line(max_restarts=0)
    line.out.commit = lambda permit, committables: returned  # type: ignore[method-assign]
    with pytest.raises(JobFailed, match=r"commit of 'out' failed: .*it returned .* not rows of what it was given"):
        line.run()


def test_a_run_that_was_overtaken_notices_at_its_next_publication_and_commits_nothing() -> None:
    line = Line([rows(n) for n in range(6)], shut=True)
    bench, out, zombie = line.bench, line.out, line.begin()
    line.let(zombie, 2)
    bench.checkpoint(zombie)
    assert out.seen == [0, 1]
    line.tap.let(0, 4)
    settle(zombie, 60)
    line.out = again = Out(line.log)
    again.committed = out.committed
    run = line.begin()
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
    line.tap.let(0)
    to_end(run)
    assert again.seen == list(range(6))


def test_a_runtime_that_was_overtaken_does_not_start_again() -> None:
    line = Line([rows(n) for n in range(200)], checkpoint_interval_us=20_000, max_restarts=5)
    opened: list[LocalRun] = []

    def overtake(_: object) -> None:
        if not opened:
            opened.append(line.begin())
            line.bench.checkpoint(opened[0])

    # Its progress is shown every few steps, and at the first sight of it another run takes the job.
    line.bench.clock = VirtualClock(60_000)
    runtime = LocalRuntime(
        line.bench.store, clock=line.bench.clock, progress=overtake, checkpoint_interval_us=5_000_000
    )
    with pytest.raises(PublishConflict):
        runtime.run(line.flow())
    assert line.log.calls.count("op/0 open") == 2
    assert opened


@pytest.mark.parametrize("seed", range(3))
def test_two_runs_that_go_on_side_by_side_commit_every_row_once(seed: int) -> None:
    line = Line([rows(n) for n in range(40)], checkpoint_interval_us=30_000)
    runs = [line.begin(seed=seed), line.begin(2, seed=seed + 1)]
    ends: list[object] = []
    while runs:
        for run in list(runs):
            try:
                if run.step():
                    continue
                ends.append(run.outcome)
            except (PublishConflict, RunDiscarded) as error:
                ends.append(error)
            runs.remove(run)
    assert sum(isinstance(end, PublishConflict) for end in ends) == 1
    line.run()
    assert line.out.seen == list(range(40))


def test_files_of_a_job_that_is_killed_and_resumed_on_a_local_store_hold_every_row_once(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path / "store"), checkpoint_interval_us=40_000)
    folder = tmp_path / "out"
    tap = Tap([rows(n) for n in range(0, 60, 2)], [rows(n) for n in range(1, 60, 2)])

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        made.source(tap, uid="in").key_by("key").apply(Told(bench.log), uid="op").apply(FileSink(folder), uid="files")
        return made

    def visible() -> list[int]:
        return sorted(value for path in folder.glob("*.parquet") for value in pq.read_table(path)["value"].to_pylist())

    shown: list[int] = []
    for kill in range(3):
        begun = bench.begin(flow(2 + kill % 2), seed=kill)
        for _ in range(90):
            assert begun.step()
            now = visible()
            assert set(shown) <= set(now)
            assert len(now) == len(set(now))
            assert bench.newest_id or not now
            shown = now
    bench.run(flow(1))
    assert visible() == list(range(60))
