"""Loops: records that go round are neither lost nor repeated, and the loop ends once empty."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.dataflow import Dataflow, Descriptor, Output, Timers
from stateformat.backends.dataflow.events import MAX_WATERMARK
from stateformat.backends.dataflow.operators.row_steps import Filter, Map
from stateformat.backends.local import JobFailed, JobOutcome, LocalRun, RunDiscarded
from stateformat.model import StopMode
from tests.local_jobs import KEY, ROWS, Line, Log, Told, in_flight, rows, settle, state_of, to_end, until


def laps(*keys: int, left: int) -> pa.RecordBatch:
    """Rows that have so many laps to go."""
    return pa.RecordBatch.from_pylist([{"key": key, "value": left, "at": 0} for key in keys], ROWS)


class Body(Told):
    """Takes one lap off each row; while ``spins``, takes none off."""

    def __init__(self, log: Log, spins: list[bool]) -> None:
        super().__init__(log)
        self.spins = spins

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        less = pa.array(batch["value"].to_numpy() - (not self.spins[0]))
        return pa.record_batch([batch["key"], less, batch["at"]], ROWS)


class Late(Told):
    """A head with a timer at the end of time for its first row, which sends two more rows round."""

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        return [Timers("wake", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        if batch["key"][0].as_py() == 0:
            self.context.timers("wake").set_one((0,), MAX_WATERMARK)
        return super().process(batch, input)

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        super().on_timer(timers, name)
        return laps(100, 101, left=3)


class Job(Line):
    """in → head → body → (again → head) and (done → out), all by key, in parallel."""

    all = sorted([*range(8), *range(10, 18)])

    def __init__(self, *chunks: pa.RecordBatch, head: type[Told] = Told, spins: bool = False, **options: Any) -> None:
        super().__init__(chunks or [laps(n, n + 10, left=1 + n % 5) for n in range(8)], op=head, **options)
        self.spins = [spins]
        self.parallel = (2, 2)

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> Dataflow:
        flow = Dataflow(job, parallelism=self.parallel[0])
        loop = flow.loop(ROWS)
        stream = flow.source(self.tap, uid="in", parallelism=1, event_time="at").key_by("key")
        head = stream.apply(self.op, loop.key_by("key"), uid="head")
        body = head.rebalance().apply(Body(self.log, self.spins), uid="body", parallelism=self.parallel[1])
        loop.close(body.apply(Filter(lambda batch: pc.greater(batch["value"], 0)), uid="again"))
        done = body.apply(Filter(lambda batch: pc.less_equal(batch["value"], 0)), uid="done")
        named = done.apply(Map(lambda batch: batch.set_column(1, "value", batch["key"])), uid="named")
        named.apply(self.out, uid="out")
        return flow

    def ends(self, run: LocalRun) -> bool:
        """Let the loop come to its end; whether every record is out once."""
        self.spins[0] = False
        to_end(run)
        return self.out.seen == self.all


@pytest.mark.parametrize("parallelism", [(1, 1), (2, 2), (3, 2), (1, 3)])
def test_a_loop_turns_until_it_is_empty_and_then_the_job_ends(parallelism: tuple[int, int]) -> None:
    job = Job()
    bench = job.bench
    job.parallel = parallelism
    outcome = job.run()
    assert outcome.restarts == 0
    assert job.out.seen == job.all
    for subtask in range(parallelism[0]):
        ends = bench.log.of(f"head/{subtask}", "end_input", "finish", "close")
        assert ends == ["end_input 0", "end_input 1", "finish", "close"]
        calls = bench.log.of(f"head/{subtask}")
        assert not [call for call in calls[calls.index("end_input 0") :] if call.startswith("process")]


def test_checkpoints_go_on_while_the_source_has_ended_and_the_loop_still_turns() -> None:
    job = Job(spins=True, checkpoint_interval_us=None)
    bench = job.bench
    run = job.begin()
    until(run, lambda: bench.newest_id >= 5)
    assert bench.status("in") in (([], [0]), ([0], []))
    assert state_of(run, "head", 0) == state_of(run, "head", 1) == "draining"
    assert bench.newest.graph.operator("head").status == "running"
    assert job.out.seen == []
    assert in_flight(bench)
    assert job.ends(run)


@pytest.mark.parametrize("parallelism", [(2, 2), (3, 1), (1, 4)])
def test_what_was_on_its_way_round_is_replayed_at_any_parallelism_and_nothing_twice(
    parallelism: tuple[int, int],
) -> None:
    job = Job(spins=True, checkpoint_interval_us=None)
    bench = job.bench
    run = job.begin()
    until(run, lambda: bench.newest_id >= 3)
    rows_in_flight = len(in_flight(bench))
    assert 0 < rows_in_flight <= 16
    job.parallel = parallelism
    bench.log.clear()
    again = job.begin()
    # Replayed before anything else happens.
    replayed = [call for call in bench.log.calls if call.startswith("head") and " process 1" in call]
    assert sum(len(call.split(": ")[1].split()) for call in replayed) == rows_in_flight
    assert job.ends(again)


def test_the_end_of_time_goes_round_before_the_end() -> None:
    job = Job(head=Late)
    bench = job.bench
    job.run()
    assert job.out.seen == [*job.all, 100, 101]
    calls = [call for call in bench.log.calls if call.startswith("head")]
    fired = next(index for index, call in enumerate(calls) if "timers: end" in call)
    assert [call for call in calls[fired:] if " process 1" in call], "what the timer sent round was never processed"
    assert [call for call in calls if "finish" in call] == [call for call in calls[-10:] if "finish" in call]


def test_a_job_is_drained_with_its_loop() -> None:
    job = Job(head=Late, spins=True)
    bench = job.bench
    run = job.begin()
    settle(run, 100)
    run.request_stop(StopMode.DRAIN)
    settle(run, 100)
    assert bench.newest_id == 0 or bench.newest.stop is None
    job.spins[0] = False
    outcome = to_end(run)
    assert outcome.stop is not None
    assert outcome.checkpoint_id == bench.newest_id
    assert in_flight(bench) == []
    assert {operator.status for operator in bench.newest.graph.operators} == {"fully_finished"}
    assert set(job.out.seen) <= {*job.all, 100, 101}
    assert {100, 101} <= set(job.out.seen)
    assert len(job.out.seen) == run.rows_read + 2


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("source_ended", [False, True])
def test_a_stop_without_drain_keeps_what_is_on_its_way_round(seed: int, source_ended: bool) -> None:
    job = Job(spins=True, seed=seed)
    bench = job.bench
    if not source_ended:
        job.tap.let(0, 5)
    run = job.begin()
    until(run, lambda: run.rows_read == (16 if source_ended else 10))
    settle(run, 30 + seed)
    # What turns now turns until it is stopped.
    run.request_stop(StopMode.NO_DRAIN)
    outcome = to_end(run)
    assert outcome.stop is not None
    assert in_flight(bench)
    assert job.out.seen == []
    assert not [call for call in bench.log.calls if "end_input" in call or "finish" in call]
    job.spins[0] = False
    job.tap.let(0)
    job.parallel = (3, 2)
    job.run(resume=True)
    assert job.out.seen == job.all


def test_a_stop_without_drain_that_fails_lets_the_loop_turn_on_with_what_it_held() -> None:
    job = Job()
    bench = job.bench
    job.tap.let(0, 5)
    run = job.begin()
    until(run, lambda: run.rows_read == 10)
    bench.log.failing.append("out/0 prepare")
    run.request_stop(StopMode.NO_DRAIN)
    until(run, lambda: any("the stop has failed" in warning for warning in run.progress().warnings))
    job.tap.let(0)
    assert to_end(run).stop is None
    assert job.out.seen == job.all


@pytest.mark.parametrize("drained", [False, True])
def test_a_loop_that_does_not_come_to_an_end_fails_with_the_name_of_its_head(drained: bool) -> None:
    job = Job(spins=True, loop_rounds_max=20, max_restarts=0)
    run = job.begin()
    if drained:
        settle(run, 100)
        run.request_stop(StopMode.DRAIN)
    sentence = "the loop of 'head' ran 20 rounds after its inputs ended, and still has records in it"
    with pytest.raises(RunDiscarded, match=sentence):
        to_end(run)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("unaligned", [False, True])
def test_a_loop_that_is_killed_anywhere_and_goes_on_at_other_parallelisms_comes_to_the_same(
    seed: int, unaligned: bool
) -> None:
    job = Job(head=Late, checkpoint_interval_us=25_000, unaligned=unaligned)
    bench = job.bench
    for kill in range(5):
        begun = bench.runtime(seed=seed * 100 + kill).begin(job.flow())
        if isinstance(begun, JobOutcome):
            break
        settle(begun, 50 + 25 * kill + 7 * seed)
        job.parallel = (1 + (kill + seed) % 3, 1 + kill % 2)
    job.run(seed=seed)
    assert job.out.seen == [*job.all, 100, 101]


def test_an_operator_may_not_emit_into_its_loop_when_it_has_finished() -> None:
    class Wrong(Told):
        def finish(self) -> Output:
            super().finish()
            return laps(200, left=5)

    job = Job(laps(1, left=2), head=Wrong, max_restarts=0)
    job.parallel = (1, 1)
    with pytest.raises(JobFailed, match=r"its loop has ended. An operator of a loop may emit into it when timers fire"):
        job.run()
    assert job.out.seen == [1]


def test_rows_that_a_source_lets_in_late_join_a_loop_that_turns() -> None:
    job = Job(rows(4, key=1), laps(2, left=2), laps(3, left=9))
    bench = job.bench
    job.tap.let(0, 0)
    run = job.begin()
    for chunk in (1, 2, None):
        job.tap.let(0, chunk)
        settle(run, 80)
        if chunk:
            bench.checkpoint(run)
    to_end(run)
    assert job.out.seen == [1, 2, 3]
