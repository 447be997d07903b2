"""How tasks end: the order of calls, the one final checkpoint, what is still emitted and what is not late."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from stateformat.backends.connectors import CollectSink
from stateformat.backends.dataflow import Dataflow, Descriptor, Output, Stream, Timers
from stateformat.backends.dataflow.events import MAX_WATERMARK
from stateformat.backends.dataflow.operators import BroadcastJoin, TumblingWindow
from stateformat.backends.local import JobFailed
from tests.local_jobs import KEY, Bench, Out, Tap, Told, rows, settle, state_of, to_end, until


class Timed(Told):
    """Sets a timer at the end of time for the first row that it gets. ``again``: sets another one whenever it fires."""

    again = 0

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [Timers("wake", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        self.context.timers("wake").set_one((batch["key"][0].as_py(),), MAX_WATERMARK)
        return super().process(batch, input)

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        output = super().on_timer(timers, name)
        if self.again:
            self.again -= 1
            self.context.timers("wake").set_one((timers["key"][0].as_py(),), MAX_WATERMARK)
        return output


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
    bench = Bench()
    flow = Dataflow("job")
    out = Out(bench.log)
    op = Timed(bench.log, on_timer=lambda _: rows(20), end_input=lambda _: rows(30), finish=lambda _: rows(40))
    flow.source(Tap([rows(1, 2)]), uid="in", event_time="at").key_by("key").apply(op, uid="op").apply(
        out, uid="out", chain=False
    )
    bench.run(flow)
    assert bench.log.of("op/0") == [
        "open",
        "process 0: 1 2",
        "timers: end",
        "end_input 0",
        "finish",
        "complete",
        "close",
    ]
    assert bench.log.of("out/0") == [
        "open",
        "process 0: 1 2",
        "process 0: 20",
        "process 0: 30",
        "process 0: 40",
        "end_input 0",
        "finish",
        "prepare 1",
        "complete",
        "close",
    ]
    assert out.seen == [1, 2, 20, 30, 40]


def test_committing_stands_between_preparing_and_being_told_and_nothing_is_snapshotted_of_a_logic_that_has_ended() -> (
    None
):
    bench = Bench()
    flow, _ = one_by_one(bench, 1)
    bench.run(flow)
    about = [
        call for call in bench.log.calls if call.split()[1] in ("prepare", "commit", "committed", "complete", "close")
    ]
    assert about == ["sink0/0 prepare 1", "out commit 1", "out committed 1", "sink0/0 complete", "sink0/0 close"]
    assert not bench.log.of("sink0/0", "snapshot")


def test_each_operator_of_a_chain_comes_to_its_end_before_the_end_of_the_next_begins() -> None:
    bench = Bench()
    flow = Dataflow("job")
    stream = flow.source(Tap([rows(1, 2)]), uid="in", event_time="at").key_by("key")
    stream.apply(Timed(bench.log, finish=lambda _: rows(9)), uid="first").apply(Told(bench.log), uid="second").apply(
        Out(bench.log), uid="out"
    )
    run = bench.begin(flow)
    assert run.job.vertex("first").operators == ("first", "second", "out")
    to_end(run)
    calls = bench.log.calls[bench.log.calls.index("first/0 timers: end") :]
    assert calls[:9] == [
        "first/0 timers: end",
        "first/0 end_input 0",
        "first/0 finish",
        "second/0 process 0: 9",
        "out/0 process 0: 9",
        "second/0 end_input 0",
        "second/0 finish",
        "out/0 end_input 0",
        "out/0 finish",
    ]


@pytest.mark.parametrize("length", [1, 3, 6])
def test_sinks_behind_one_another_end_with_one_final_checkpoint_that_begins_at_once(length: int) -> None:
    bench = Bench(checkpoint_interval_us=None)
    flow, sinks = one_by_one(bench, length)
    outcome = bench.run(flow)
    assert outcome.checkpoint_id == bench.newest_id == 1
    assert [sink.seen for sink in sinks] == [[1, 2, 3]] * length
    assert [len(sink.permits) for sink in sinks] == [1] * length
    assert bench.clock.now_us() < 200_000, "it has waited for something"


def test_the_tasks_of_a_chain_that_waits_all_wait_at_the_same_time() -> None:
    bench = Bench()
    flow, _ = one_by_one(bench, 3)
    run = bench.begin(flow)
    until(run, lambda: run.in_flight)
    assert {state_of(run, uid) for uid in ("in", "sink0", "sink1", "sink2")} == {"waiting"}


def two_inputs(bench: Bench, first: Tap, second: Tap) -> Dataflow:
    flow = Dataflow("job")
    one = flow.source(first, uid="one", event_time="at").key_by("key")
    two = flow.source(second, uid="two", event_time="at").key_by("key")
    one.apply(Timed(bench.log), two, uid="op")
    return flow


def test_two_inputs_that_end_at_different_times_are_ended_one_by_one_and_the_logic_with_the_last() -> None:
    bench = Bench()
    later = Tap([rows(2), rows(6), rows(14)], shut=True)
    run = bench.begin(two_inputs(bench, Tap([rows(10)]), later))
    until(run, lambda: "op/0 end_input 0" in bench.log.calls)
    settle(run)
    assert bench.log.of("op/0") == ["open", "process 0: 10", "end_input 0"]
    assert state_of(run, "op") == "running"
    later.let(0)
    to_end(run)
    assert bench.log.of("op/0")[3:] == [
        "process 1: 2",
        "process 1: 6",
        "process 1: 14",
        "timers: end",
        "end_input 1",
        "finish",
        "complete",
        "close",
    ]


def test_the_input_that_ended_first_is_called_ended_whichever_it_is() -> None:
    bench = Bench()
    later = Tap([rows(10)], shut=True)
    run = bench.begin(two_inputs(bench, later, Tap([rows(1)])))
    until(run, lambda: "op/0 end_input 1" in bench.log.calls)
    later.let(0)
    to_end(run)
    assert bench.log.of("op/0", "end_input", "finish") == ["end_input 1", "end_input 0", "finish"]


def test_an_input_is_told_to_have_ended_before_the_time_that_it_held_up_goes_on() -> None:
    bench = Bench()

    class Early(Timed):
        def process(self, batch: pa.RecordBatch, input: int) -> Output:
            self.context.timers("wake").set_one((7,), 50)
            return Told.process(self, batch, input)

    flow = Dataflow("job")
    slow = Tap([rows(10)], shut=True)
    one = flow.source(slow, uid="one", event_time="at").key_by("key")
    two = flow.source(Tap([rows(99)], endless=True), uid="two", event_time="at").key_by("key")
    one.apply(Early(bench.log), two, uid="op")
    run = bench.begin(flow)
    until(run, lambda: "op/0 process 1: 99" in bench.log.calls)
    slow.let(0)
    until(run, lambda: "op/0 end_input 0" in bench.log.calls)
    bench.checkpoint(run)
    assert bench.log.of("op/0", "end_input", "timers") == ["end_input 0", "timers: 50"]


def windowed(bench: Bench, stream: Stream, out: CollectSink) -> None:
    stream.key_by("key").apply(TumblingWindow("key", 10, "at", {"n": ("*", "count")}), uid="window").apply(
        out, uid="out"
    )


def late_records(bench: Bench) -> int:
    return sum(row["late_records"] for row in bench.state("window", "dropped"))


@pytest.mark.parametrize("seed", range(12))
def test_rows_that_a_join_holds_back_until_its_table_has_ended_are_late_for_no_window_behind_it(seed: int) -> None:
    bench = Bench(seed=seed, parallelism=1 + seed % 3)
    flow, out = Dataflow("job"), CollectSink()
    table = Tap([rows(0, 1, 2, 3)], shut=True)
    stream = Tap([rows(*range(n, n + 8)) for n in range(0, 64, 8)], [rows(*range(64, 80))])
    names = flow.source(table, uid="table", event_time="at").broadcast()
    joined = flow.source(stream, uid="in", event_time="at").apply(
        BroadcastJoin("key", columns=[]), names, uid="join", chain=False
    )
    windowed(bench, joined, out)
    run = bench.begin(flow)
    settle(run, 150)
    table.let(0)
    to_end(run)
    counted: dict[tuple[int, int], int] = {}
    for value in range(80):
        counted[value % 4, value // 10 * 10] = counted.get((value % 4, value // 10 * 10), 0) + 1
    got = {(row["key"], row["window_start"]): row["n"] for row in out.table().to_pylist()}
    assert got == counted


@pytest.mark.parametrize("chained", [True, False])
@pytest.mark.parametrize("hook", ["on_timer", "end_input", "finish"])
def test_what_an_operator_emits_at_its_end_is_late_for_no_window_behind_it(hook: str, chained: bool) -> None:
    bench = Bench(parallelism=1)
    flow, out = Dataflow("job"), CollectSink()
    op = Timed(bench.log, **{hook: lambda _: rows(105, 115)})
    stream = flow.source(Tap([rows(99)]), uid="in", event_time="at").key_by("key").apply(op, uid="op")
    (stream if chained else stream.rebalance()).apply(Told(bench.log), uid="then", chain=chained)
    windowed(bench, stream, out)
    bench.run(flow)
    assert sorted(out.table()["window_start"].to_pylist()) == [90, 100, 110]


def test_a_timer_that_sets_timers_at_the_end_of_time_fires_until_there_is_none() -> None:
    bench = Bench()
    flow = Dataflow("job")
    op = Timed(bench.log)
    op.again = 5
    flow.source(Tap([rows(1)]), uid="in").key_by("key").apply(op, uid="op")
    bench.run(flow)
    assert bench.log.of("op/0", "timers", "finish") == ["timers: end"] * 6 + ["finish"]


def test_a_timer_that_is_set_again_for_ever_fails_the_job_with_the_name_of_its_operator() -> None:
    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    op = Timed(bench.log)
    op.again = 10**9
    flow.source(Tap([rows(1)]), uid="in").key_by("key").apply(op, uid="rearms")
    with pytest.raises(JobFailed, match=r"timers of operator 'rearms' have set timers .* for 1000 rounds"):
        bench.run(flow)
    assert "rearms/0 finish" not in bench.log.calls


def test_an_empty_source_ends_the_job_as_any_other_does() -> None:
    bench = Bench()
    flow, out = Dataflow("job", parallelism=2), Out(bench.log)
    flow.source(Tap(), uid="in").key_by("key").apply(Told(bench.log), uid="op").apply(out, uid="out")
    outcome = bench.run(flow)
    assert outcome.stop is None
    assert out.seen == []
    assert bench.log.of("op/1") == ["open", "end_input 0", "finish", "complete", "close"]


def test_a_subtask_that_has_ended_leaves_with_the_next_checkpoint_while_the_others_run_on() -> None:
    bench = Bench(parallelism=2)
    flow, out = Dataflow("job"), Out(bench.log)
    tap = Tap([rows(1)], [rows(2)], shut=True)
    flow.source(tap, uid="in").apply(Told(bench.log), uid="op", chain=False).apply(out, uid="out")
    run = bench.begin(flow)
    tap.let(0)
    until(run, lambda: "op/0 finish" in bench.log.calls)
    settle(run)
    assert state_of(run, "op", 0) == "waiting"
    assert state_of(run, "op", 1) == "running"
    bench.checkpoint(run)
    assert bench.status("op") == ([], [0])
    until(run, lambda: "op/0 close" in bench.log.calls)
    assert out.seen == [1]
    settle(run)
    bench.checkpoint(run)
    assert bench.status("op") == ([0], [])
    tap.let(1)
    to_end(run)
    assert out.seen == [1, 2]
    assert bench.log.of("op/1") == ["open", "snapshot", "complete", "snapshot", "complete", "process 0: 2", *ENDED]


ENDED = ["end_input 0", "finish", "complete", "close"]


def test_a_task_that_waits_prepares_nothing_twice() -> None:
    bench = Bench()
    flow, out = Dataflow("job"), Out(bench.log)
    fast, slow = Tap([rows(1, 2)]), Tap([rows(3)], shut=True)
    flow.source(fast, uid="fast").apply(out, uid="out")
    flow.source(slow, uid="slow").apply(Told(bench.log), uid="op")
    run = bench.begin(flow)
    until(run, lambda: "out/0 finish" in bench.log.calls)
    bench.checkpoint(run)
    until(run, lambda: "out/0 close" in bench.log.calls)
    slow.let(0)
    to_end(run)
    assert bench.log.of("out/0", "prepare") == ["prepare 1"]
    assert bench.log.of("out", "commit") == ["commit 1"]
    assert out.seen == [1, 2]
