"""Checkpoints that come to nothing: who ended too early, what failed, what counts as a failure of
the job.

Checkpoints of the in-process executor hold what has changed: deltas, whatever becomes of the
checkpoints between. Two-phase commit through the executor: nothing is visible before it is
published, everything once afterwards.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import stateformat as sf
from stateformat.backends.dataflow import Dataflow, Descriptor, Output, UnionList, ValueState, events as ev
from stateformat.backends.dataflow.graph import SPLITS
from stateformat.backends.local import JobFailed, LocalRun, LocalRuntime, RunDiscarded, VirtualClock
from stateformat.errors import PublishConflict
from stateformat.model import StopMode
from tests.worlds.local import (
    KEY,
    Bench,
    Line,
    Out,
    Tap,
    Told,
    rows,
    settle,
    state_of,
    to_end,
    until,
    until_read,
    until_told,
)

Caplog = pytest.LogCaptureFixture


def aborted(caplog: Caplog) -> list[str]:
    """Why checkpoints were aborted."""
    told = [record.getMessage() for record in caplog.records]
    return [line.split(": ", 1)[1] for line in told if line.startswith("aborted the checkpoint")]


@pytest.fixture(autouse=True)
def _all_of_the_log(caplog: Caplog) -> None:
    caplog.set_level(logging.INFO)


def fail_one(line: Line, run: LocalRun) -> None:
    line.bench.due(run)
    until(run, lambda: run.in_flight is None)


def test_a_task_that_ends_between_the_plan_and_its_trigger_voids_the_checkpoint_and_that_is_no_failure(
    caplog: Caplog,
) -> None:
    bench = Bench(tolerable_failures=0)
    flow, out = Dataflow("job"), Out(bench.log)
    slow = Tap([rows(2)], shut=True)
    flow.source(Tap([rows(1)]), uid="fast").apply(out, uid="out", chain=False)
    flow.source(slow, uid="slow").apply(Told(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "out") == "waiting")
    bench.due(run)
    fast = run.tasks[ev.TaskId("fast", 0)]
    until(run, lambda: run.in_flight is None and fast.mailbox)
    # The next checkpoint is due before the coordinator hears that the source has left.
    bench.clock.wait_until(bench.clock.now_us() + 2 * bench.options["checkpoint_interval_us"])
    run.step()
    if not fast.gone:
        fast.step(random.Random(0))
    assert fast.gone
    until(run, lambda: aborted(caplog))
    assert aborted(caplog) == ["fast[0] ended before it had acknowledged"]
    assert run.outcome is None
    settle(run)
    bench.checkpoint(run)
    assert bench.status("fast") == ([0], [])
    slow.let(0)
    to_end(run)
    assert out.seen == [1]


def test_a_job_whose_tasks_end_while_checkpoints_begin_comes_to_its_end_in_any_order(caplog: Caplog) -> None:
    for seed in range(10):
        splits = [rows(n) for n in range(6)], [rows(10)]
        line = Line(*splits, parallelism=2, seed=seed, checkpoint_interval_us=10_000, max_restarts=0)
        line.run()
        assert line.out.seen == [0, 1, 2, 3, 4, 5, 10]
    reasons = aborted(caplog)
    assert reasons, "none of the seeds has tried it"
    assert all(reason.endswith("ended before it had acknowledged") for reason in reasons)


def test_tolerated_failures_are_counted_in_a_row(caplog: Caplog) -> None:
    line = Line(endless=True, tolerable_failures=2)
    run = line.begin()
    until_told(run, line.log, "out/0 process 0: 1")
    for successes in range(3):
        for _ in range(2):
            line.log.failing.append("op/0 snapshot")
            fail_one(line, run)
        line.bench.checkpoint(run)
        assert line.bench.newest_id == successes + 1
    line.log.failing += ["op/0 snapshot"] * 3
    fail_one(line, run)
    fail_one(line, run)
    line.bench.due(run)
    with pytest.raises(RunDiscarded, match=r"the snapshot of op\[0\] failed: .*Boom"):
        settle(run)
    assert len(aborted(caplog)) == 8


def test_what_a_sink_prepared_for_a_checkpoint_that_came_to_nothing_is_committed_with_the_next() -> None:
    line = Line([rows(1), rows(2), rows(3)], shut=True, tolerable_failures=9)
    run = line.begin()
    for number in (1, 2):
        line.let(run, number)
        line.bench.storage.down = True
        fail_one(line, run)
        line.bench.storage.down = False
    assert line.log.of("out/0", "prepare") == ["prepare 1", "prepare 1"]
    line.let(run, 3)
    line.bench.checkpoint(run)
    assert line.out.seen == [1, 2, 3]
    # Each under what it was prepared under: three attempts at checkpoint 1.
    assert len({attempt for _, attempt, _ in line.out.committed}) == 3
    assert {checkpoint for checkpoint, _, _ in line.out.committed} == {1}
    line.tap.let(0)
    to_end(run)
    assert line.out.seen == [1, 2, 3]


def test_a_checkpoint_that_takes_too_long_is_aborted_and_counts(caplog: Caplog) -> None:
    line = Line(endless=True, tolerable_failures=1, timeout_us=5_000_000)
    run = line.begin()
    settle(run)
    for _ in range(2):
        line.bench.due(run)
        line.bench.clock.wait_until(line.bench.clock.now_us() + 5_000_001)
        if not aborted(caplog):
            until(run, lambda: run.in_flight is None)
            assert aborted(caplog) == ["barrier 1 took longer than allowed"]
    with pytest.raises(RunDiscarded, match="barrier 2 took longer than allowed"):
        settle(run)
    assert line.bench.newest_id == 0


def test_a_checkpoint_that_was_published_does_not_time_out() -> None:
    line = Line(shut=True, timeout_us=5_000_000)
    run = line.begin()
    line.bench.due(run)
    until(run, lambda: line.bench.newest_id == 1)
    line.bench.clock.wait_until(line.bench.clock.now_us() + 5_000_001)
    settle(run)
    line.tap.let(0)
    to_end(run)
    assert line.out.seen == [1]


def test_a_checkpoint_is_due_after_so_many_rows() -> None:
    line = Line([rows(n) for n in range(50)], checkpoint_interval_us=None, checkpoint_rows=10)
    run = line.begin()
    newest, read = 0, [0]
    while run.step():
        if run.in_flight is not None and run.in_flight.barrier.number > newest:
            newest = run.in_flight.barrier.number
            read.append(run.rows_read)
    assert len(read) >= 4
    # The last is the final one. Each begins a little after it is due.
    assert all(count >= 10 * turn for turn, count in enumerate(read[:-1]))
    assert line.out.seen == list(range(50))


def test_a_checkpoint_is_due_after_so_much_time_since_the_last_was() -> None:
    line = Line(endless=True, checkpoint_interval_us=100_000)
    run = line.begin()
    until(run, lambda: line.bench.clock.now_us() > 1_050_000)
    assert 8 <= line.bench.newest_id <= 10


class Union(Told):
    """Has union state."""

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        return [UnionList("all", {"n": pa.int64()})]


def test_union_state_that_may_prevent_checkpoints_is_warned_of_when_the_job_starts() -> None:
    run = Line([rows(1)], [rows(2)], op=Union, shut=True, parallelism=2).begin()
    (warning,) = run.progress().warnings
    assert warning.startswith("operator 'op' keeps union state and its subtasks may end long after one another")
    assert run.progress().warnings == ()


@pytest.mark.parametrize(("rows_apart", "fails"), [(50, False), (3, True)])
def test_failures_with_ten_checkpoints_in_between_do_not_add_up_and_with_one_they_do(
    rows_apart: int, fails: bool, caplog: Caplog
) -> None:
    line = Line([rows(n) for n in range(130)], max_restarts=1, checkpoint_rows=1, checkpoint_interval_us=None)
    line.log.failing += [f"op/0 process 0: {10 + rows_apart * n}" for n in range(3)]
    if fails:
        with pytest.raises(JobFailed, match=r"failed 2 times within a few checkpoints, and 1 .* allowed; .*'op'.*Boom"):
            line.run()
        return
    assert line.run().restarts == 3
    assert caplog.text.count("job 'job' starts again from its newest checkpoint: ") == 3
    assert line.log.failing == []
    assert line.out.seen == list(range(130))


@pytest.mark.parametrize(("failing", "opened"), [("op/0 process 0: 2", "op/0"), ("out/1 open", "op/1")])
def test_operators_that_were_opened_are_closed_before_the_next_run_opens(failing: str, opened: str) -> None:
    line = Line([rows(1), rows(2)], parallelism=2)
    line.log.failing += [failing, f"{opened} close"]
    assert line.run().restarts == 1
    assert line.log.failing == [], "one that raises while it is closed is closed too"
    for who in (opened, "op/0", "out/0"):
        assert line.log.of(who, "open", "close") == ["open", "close", "open", "close"]
    assert line.out.seen == [1, 2]


KEYS, CHANGED, ROUNDS = 4000, 40, 14


class Keeps(Told):
    """Keeps the last value of each key; a value that 7 divides removes its key."""

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        return [ValueState("last", KEY, {"value": pa.int64()})]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        last = self.context.value_state("last")
        gone = pc.equal(pc.multiply(pc.divide(batch["value"], 7), 7), batch["value"])
        last.delete(batch.filter(gone).select(["key"]))
        put = batch.filter(pc.invert(gone))
        last.put(put.select(["key"]), put.select(["value"]))
        return None


class Job:
    """A job whose source reads one batch more for each round.

    ``expected``: the state of all rows that were let so far.
    """

    def __init__(self, seed: int, url: str = "memory://bench", **options: Any) -> None:
        self.choose = random.Random(seed)
        base = pa.record_batch({"key": range(KEYS), "value": [7 * key + 1 for key in range(KEYS)], "at": [0] * KEYS})
        self.batches = [base.cast(rows(0).schema), *(self._changes() for _ in range(ROUNDS))]
        self.bench = Bench(url, tolerable_failures=100, **options)
        self.tap = Tap(self.batches, shut=True)
        self.let = 0
        self.expected: dict[int, int] = {}
        self.run = self.begin(2)

    def _changes(self) -> pa.RecordBatch:
        keys = self.choose.sample(range(KEYS + 10), CHANGED)
        batches = [rows(self.choose.randrange(1000), key=key) for key in keys]
        return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]

    def begin(self, parallelism: int) -> LocalRun:
        """Begin a run from the newest checkpoint."""
        flow = Dataflow("job", parallelism=parallelism)
        source = flow.source(self.tap, uid="in", parallelism=1)
        source.key_by("key").apply(Keeps(self.bench.log), uid="op")
        self.run = self.bench.begin(flow)
        self.read()
        return self.run

    def read(self) -> None:
        """Let everything be processed that was let before this run began."""
        position = self.bench.state("in", SPLITS)[0]["position"] if self.bench.newest_id else 0
        until_read(self.run, sum(batch.num_rows for batch in self.batches[position : self.let]))
        self._process()

    def _process(self) -> None:
        until(self.run, lambda: not any(worker.queued for worker in self.run.tasks.values()))

    def saved(self) -> Any:
        """A checkpoint of one round more."""
        self.round()
        return self.bench.checkpoint(self.run)

    def round(self) -> None:
        """One batch more."""
        batch = self.batches[self.let]
        for key, value in zip(batch["key"].to_pylist(), batch["value"].to_pylist(), strict=True):
            self.expected.pop(key, None)
            if value % 7:
                self.expected[key] = value
        self.let += 1
        self.tap.let(0, self.let)
        until_read(self.run, self.run.rows_read + self.batches[self.let - 1].num_rows)
        self._process()

    def fail(self) -> None:
        """Let a checkpoint begin and be given up, in one of three ways."""
        self.bench.due(self.run)
        how = self.choose.randrange(3)
        if how == 0:
            self.bench.log.failing.append(f"op/{self.choose.randrange(len(self.run.tasks) - 1)} snapshot")
        else:
            self.bench.storage.order("write", "manifests/", "refuse" if how == 1 else "lose")
        newest = self.bench.newest_id
        until(self.run, lambda: self.run.in_flight is None)
        until(self.run, lambda: not any(worker.mailbox for worker in self.run.tasks.values()))
        self.bench.log.failing.clear()
        self.bench.storage.orders.clear()
        assert self.bench.newest_id == newest

    def check(self) -> None:
        """The newest checkpoint has what is expected."""
        state = self.bench.state("op", "last")
        assert {row["key"]: row["value"] for row in state} == self.expected
        assert len(state) == len(self.expected)

    def layers(self) -> int:
        """The number of layers of the newest checkpoint."""
        layers = self.bench.store.open().handles["layer"]
        return 1 + int(pc.max(layers).as_py())


@pytest.mark.parametrize("unaligned", [False, True], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("seed", [*range(1), *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(1, 8))])
def test_a_checkpoint_holds_what_has_changed_whatever_became_of_those_before(seed: int, unaligned: bool) -> None:
    job = Job(seed, unaligned=unaligned)
    job.saved()
    deepest = 0
    for _ in range(ROUNDS):
        job.round()
        match job.choose.randrange(5):
            case 0:
                job.fail()
            case 1:
                job.bench.checkpoint(job.run)
                job.run.close()
                job.begin(job.choose.choice([1, 2, 3]))
            case _:
                job.bench.checkpoint(job.run)
                job.check()
                deepest = max(deepest, job.layers())
    job.bench.checkpoint(job.run)
    job.check()
    assert deepest > 1


def test_a_delta_costs_what_has_changed_and_not_what_there_is() -> None:
    job = Job(1)
    whole, delta = job.saved().totals, job.saved()
    newest = job.bench.store.open().handles
    written = newest.filter(pc.equal(newest["layer"], 1))
    assert pc.sum(written["rows"]).as_py() == CHANGED
    assert pc.sum(written["size_bytes"]).as_py() < whole.bytes / 4
    assert delta.totals.segments > whole.segments


def test_what_a_checkpoint_that_was_given_up_had_written_is_in_the_next_delta() -> None:
    job = Job(2)
    job.saved()
    job.round()
    job.fail()
    job.saved()
    job.check()
    handles = job.bench.store.open().handles
    assert CHANGED < pc.sum(handles.filter(pc.equal(handles["layer"], 1))["rows"]).as_py() <= 2 * CHANGED


def test_a_crash_that_loses_a_run_goes_on_from_layers_at_another_parallelism() -> None:
    job = Job(3)
    job.saved()
    job.saved()
    job.round()  # Lost with the run, and read again.
    job.begin(3)
    job.bench.checkpoint(job.run)
    job.check()
    assert job.layers() == 3, "a delta on the layers as the restore has cut them"


def test_the_savepoint_of_a_stop_holds_all_layers_itself(tmp_path: Any) -> None:
    job = Job(4)
    job.saved()
    job.round()
    url = str(tmp_path / "savepoint")
    job.run.request_stop(StopMode.NO_DRAIN, url)
    to_end(job.run)
    assert job.layers() == 2
    for path in [item.path for item in job.bench.storage.inner.list("segments/")]:
        job.bench.storage.inner.delete([path])
    found = sf.open(url).open().read("op", "last").table()
    assert dict(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True)) == job.expected


@pytest.mark.parametrize(("every", "batch"), [(100, 26), (20, 50)])
def test_barriers_go_when_they_are_due_by_rows(every: int, batch: int) -> None:
    bench = Bench(checkpoint_rows=every)
    count = 2000
    chunks = [rows(*range(first, min(first + batch, count))) for first in range(0, count, batch)]
    readers = [chunks[number::4] for number in range(4)]
    flow = Dataflow("job", parallelism=4)
    flow.source(Tap(*readers), uid="in").key_by("key").apply(Keeps(bench.log), uid="op")
    bench.run(flow)
    # Each reader may be one batch further when the barrier goes.
    assert count // (every + batch) <= bench.newest_id <= count // every + 2 + count // batch


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
