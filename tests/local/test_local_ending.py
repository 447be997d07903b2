"""How tasks end: the order of calls, the one final checkpoint, what is still emitted and what is
not late.

Loops: records that go round are neither lost nor repeated, and the loop ends once empty.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.connectors import CollectSink
from stateformat.backends.dataflow import Dataflow, Descriptor, Output, Stream, Timers, events as ev
from stateformat.backends.dataflow.events import MAX_WATERMARK
from stateformat.backends.dataflow.operators.join import BroadcastJoin
from stateformat.backends.dataflow.operators.row_steps import Filter, Map
from stateformat.backends.dataflow.operators.window import TumblingWindow
from stateformat.backends.local import JobFailed, LocalRun, RunDiscarded
from stateformat.model import StopMode
from tests.worlds.local import (
    KEY,
    ROWS,
    Bench,
    Count,
    Line,
    Log,
    Out,
    Tap,
    Told,
    in_flight,
    rows,
    settle,
    state_of,
    to_end,
    until,
    until_told,
)

LEFT = ["complete", "close"]


class Timed(Told):
    """Sets a timer at the end of time for the first row that it gets."""

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        return [Timers("wake", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        self.context.timers("wake").set_one((batch["key"][0].as_py(),), ev.MAX_WATERMARK)
        return super().process(batch, input)


class Through(Out):
    """A sink in the middle: passes on what it will commit."""

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return inputs[0]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:  # type: ignore[override]
        super().process(batch, input)
        return batch


def one_by_one(bench: Bench, length: int) -> tuple[Dataflow, list[Through]]:
    """A source and so many sinks behind one another, each in a task of its own."""
    flow = Dataflow("job")
    stream: Stream = flow.source(Tap([rows(1, 2), rows(3)]), uid="in")
    sinks = [Through(bench.log) for _ in range(length)]
    for number, sink in enumerate(sinks):
        stream = stream.apply(sink, uid=f"sink{number}", chain=False)
    return flow, sinks


def test_a_task_that_ends_fires_its_timers_ends_its_input_finishes_waits_for_a_checkpoint_and_closes() -> None:
    emits = {hook: lambda _, n=n: rows(n) for hook, n in (("on_timer", 20), ("end_input", 30), ("finish", 40))}
    line = Line([rows(1, 2)], op=lambda log: Timed(log, **emits), how="key_by", timed=True)
    line.run()
    assert line.log.of("op/0") == ["open", "process 0: 1 2", "timers: end", "end_input 0", "finish", *LEFT]
    given = [f"process 0: {values}" for values in ("1 2", 20, 30, 40)]
    assert line.log.of("out/0") == ["open", *given, "end_input 0", "finish", "prepare 1", *LEFT]
    assert line.out.seen == [1, 2, 20, 30, 40]


def test_a_logic_that_has_ended_prepares_commits_and_closes_and_takes_no_snapshot() -> None:
    bench = Bench()
    bench.run(one_by_one(bench, 1)[0])
    about = ("prepare", "commit", "committed", "complete", "close")
    calls = [call for call in bench.log.calls if call.split()[1] in about]
    assert calls == ["sink0/0 prepare 1", "out commit 1", "out committed 1", "sink0/0 complete", "sink0/0 close"]
    assert not bench.log.of("sink0/0", "snapshot")


@pytest.mark.parametrize("length", [1, 3, 6])
def test_sinks_behind_one_another_end_with_one_final_checkpoint_that_begins_at_once(length: int) -> None:
    bench = Bench(checkpoint_interval_us=None)
    flow, sinks = one_by_one(bench, length)
    run = bench.begin(flow)
    until(run, lambda: run.in_flight)
    assert {task.task.state.value for task in run.tasks.values()} == {"waiting"}
    assert to_end(run).checkpoint_id == bench.newest_id == 1
    assert [sink.seen for sink in sinks] == [[1, 2, 3]] * length
    assert [len(sink.permits) for sink in sinks] == [1] * length
    assert bench.clock.now_us() < 200_000, "it has waited for something"


def two_inputs(bench: Bench, first: Tap, second: Tap, op: Timed) -> Dataflow:
    flow = Dataflow("job")
    one = flow.source(first, uid="one", event_time="at").key_by("key")
    one.apply(op, flow.source(second, uid="two", event_time="at").key_by("key"), uid="op")
    return flow


def test_two_inputs_that_end_at_different_times_are_ended_one_by_one_and_the_logic_with_the_last() -> None:
    bench = Bench()
    later = Tap([rows(2), rows(6), rows(14)], shut=True)
    run = bench.begin(two_inputs(bench, Tap([rows(10)]), later, Timed(bench.log)))
    until_told(run, bench.log, "op/0 end_input 0")
    settle(run)
    assert bench.log.of("op/0") == ["open", "process 0: 10", "end_input 0"]
    assert state_of(run, "op") == "running"
    later.let(0)
    to_end(run)
    given = [f"process 1: {n}" for n in (2, 6, 14)]
    assert bench.log.of("op/0")[3:] == [*given, "timers: end", "end_input 1", "finish", *LEFT]


def test_the_input_that_ended_first_is_called_ended_whichever_it_is() -> None:
    bench = Bench()
    later = Tap([rows(10)], shut=True)
    run = bench.begin(two_inputs(bench, later, Tap([rows(1)]), Timed(bench.log)))
    until_told(run, bench.log, "op/0 end_input 1")
    later.let(0)
    to_end(run)
    assert bench.log.of("op/0", "end_input", "finish") == ["end_input 1", "end_input 0", "finish"]


def test_an_input_has_ended_before_the_time_that_it_held_back_goes_on() -> None:
    class Early(Timed):
        def process(self, batch: pa.RecordBatch, input: int) -> Output:
            self.context.timers("wake").set_one((7,), 50)
            return Told.process(self, batch, input)

    bench = Bench()
    slow = Tap([rows(10)], shut=True)
    run = bench.begin(two_inputs(bench, slow, Tap([rows(99)], endless=True), Early(bench.log)))
    until_told(run, bench.log, "op/0 process 1: 99")
    slow.let(0)
    until_told(run, bench.log, "op/0 end_input 0")
    bench.checkpoint(run)
    assert bench.log.of("op/0", "end_input", "timers") == ["end_input 0", "timers: 50"]


def windowed(stream: Stream) -> CollectSink:
    window = TumblingWindow("key", 10, "at", {"n": ("*", "count")})
    stream.key_by("key").apply(window, uid="window").apply(out := CollectSink(), uid="out")
    return out


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_a_join_holds_back_until_its_table_has_ended_are_late_for_no_window_behind_it(seed: int) -> None:
    bench, flow = Bench(seed=seed, parallelism=1 + seed % 3), Dataflow("job")
    table = Tap([rows(0, 1, 2, 3)], shut=True)
    stream = Tap([rows(*range(n, n + 8)) for n in range(0, 64, 8)], [rows(*range(64, 80))])
    names = flow.source(table, uid="table", event_time="at").broadcast()
    join = BroadcastJoin("key", columns=[])
    out = windowed(flow.source(stream, uid="in", event_time="at").apply(join, names, uid="join", chain=False))
    run = bench.begin(flow)
    settle(run, 150)
    table.let(0)
    to_end(run)
    got = {(row["key"], row["window_start"]): row["n"] for row in out.table().to_pylist()}
    assert got == Counter((value % 4, value // 10 * 10) for value in range(80))


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("hook", ["on_timer", "end_input", "finish"])
def test_what_an_operator_emits_at_its_end_is_late_for_no_window_behind_it(hook: str, chained: bool) -> None:
    bench, flow = Bench(parallelism=1), Dataflow("job")
    op = Timed(bench.log, **{hook: lambda _: rows(105, 115)})
    stream = flow.source(Tap([rows(99)]), uid="in", event_time="at").key_by("key").apply(op, uid="op")
    (stream if chained else stream.rebalance()).apply(Told(bench.log), uid="then", chain=chained)
    out = windowed(stream)
    bench.run(flow)
    assert sorted(out.table()["window_start"].to_pylist()) == [90, 100, 110]


def test_an_empty_source_ends_the_job_as_any_other_does() -> None:
    line = Line([], how="key_by", parallelism=2)
    assert line.run().stop is None
    assert line.out.seen == []
    assert line.log.of("op/1") == ["open", "end_input 0", "finish", *LEFT]


def test_a_subtask_that_has_ended_leaves_with_the_next_checkpoint_while_the_others_run_on() -> None:
    line = Line([rows(1)], [rows(2)], shut=True, parallelism=2)
    bench, run = line.bench, line.begin()
    line.tap.let(0)
    until_told(run, line.log, "op/0 finish")
    settle(run)
    assert [state_of(run, "op", subtask) for subtask in (0, 1)] == ["waiting", "running"]
    bench.checkpoint(run)
    assert bench.status("op") == ([], [0])
    until_told(run, line.log, "op/0 close")
    assert line.out.seen == [1]
    settle(run)
    bench.checkpoint(run)
    assert bench.status("op") == ([0], [])
    line.tap.let(1)
    to_end(run)
    assert line.out.seen == [1, 2]
    saved = ["snapshot", "complete"] * 2
    assert line.log.of("op/1") == ["open", *saved, "process 0: 2", "end_input 0", "finish", *LEFT]


def test_a_task_that_waits_prepares_nothing_twice_and_frees_its_state_when_it_leaves() -> None:
    bench = Bench()
    flow, out = Dataflow("job"), Out(bench.log)
    slow = Tap([rows(3)], shut=True)
    flow.source(Tap([rows(1, 2)]), uid="fast").apply(out, uid="out")
    flow.source(Tap([rows(1)]), uid="table").key_by("key").apply(Count(bench.log), uid="count", chain=False)
    flow.source(slow, uid="slow").apply(Told(bench.log), uid="op")
    run = bench.begin(flow)
    count = run.tasks[ev.TaskId("count", 0)]
    state = weakref.ref(count.operators)
    until(run, lambda: "out/0 finish" in bench.log.calls and count.task.state.value == "waiting")
    bench.checkpoint(run)
    until(run, lambda: "out/0 close" in bench.log.calls and count.gone)
    gc.collect()
    assert state() is None
    bench.checkpoint(run)
    assert bench.newest.graph.operator("count").status == "fully_finished"
    slow.let(0)
    to_end(run)
    assert bench.log.of("out/0", "prepare") == ["prepare 1"]
    assert bench.log.of("out", "commit") == ["commit 1"]
    assert out.seen == [1, 2]


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
