"""What a run takes from the checkpoint that it goes on from: what has finished, what is committed first, states, time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import CollectSink
from stateformat.backends.dataflow import (
    BroadcastState,
    Dataflow,
    Descriptor,
    ListState,
    MapState,
    OperatorContext,
    Output,
    SplitList,
    Stream,
    Timers,
    UnionList,
    ValueState,
)
from stateformat.backends.dataflow.events import MAX_WATERMARK, MIN_WATERMARK, TaskId
from stateformat.backends.dataflow.operators import BroadcastJoin, TumblingWindow
from stateformat.backends.local import JobOutcome, LocalRun, RunDiscarded
from stateformat.errors import RestoreRefused
from tests.local_jobs import KEY, ROWS, Bench, Count, Out, Tap, Told, rows, settle, state_of, to_end, until, until_read


class Bounded:
    """A bounded table that is broadcast to a stream that goes on: the table's part finishes, the rest does not."""

    def __init__(self, bench: Bench, parallelism: int = 2) -> None:
        self.table = Tap([rows(0, 1, 2, 3)])
        self.stream = Tap([rows(n) for n in range(0, 40, 2)], [rows(n) for n in range(1, 40, 2)], shut=True)
        self.out = Out(bench.log)
        self.parallelism = parallelism
        self.bench = bench

    def flow(self) -> Dataflow:
        flow = Dataflow("job", parallelism=self.parallelism)
        table = flow.source(self.table, uid="table", event_time="at").apply(
            Told(self.bench.log), uid="names", chain=False
        )
        stream = flow.source(self.stream, uid="stream", event_time="at").key_by("key")
        stream.apply(Join(self.bench.log), table.broadcast(), uid="join").apply(self.out, uid="out", chain=False)
        return flow


class Join(Told):
    """Sets a timer for every row of the stream, one further on, and emits the row with the time it fires."""

    opened_at = MIN_WATERMARK

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [Timers("wake", KEY), BroadcastState("table", {"value": pa.int64()})]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self.tell(f"opens at {'min' if context.watermark == MIN_WATERMARK else context.watermark}")

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        if input == 1:
            self.tell("process 1: table")
            self.context.entries("table").append(batch.select(["value"]))
            return None
        self.tell(f"process 0: {batch['value'][0]}")
        for row in batch.to_pylist():
            self.context.timers("wake").set_one((row["key"],), row["at"] + 1)
        return None

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        known = self.context.entries("table").rows().num_rows
        times = [time - 1 for time in timers["_timestamp"].to_pylist()]
        assert known == 4, known
        return rows(*times)


def finished_part(bench: Bench) -> Bounded:
    """A job whose table has finished before its newest checkpoint; the first rows of the stream have been processed."""
    job = Bounded(bench)
    run = bench.begin(job.flow())
    until(run, lambda: state_of(run, "names", 1) == "waiting")
    until(run, lambda: all(bench.log.of(f"join/{i}", "end_input") for i in range(2)))
    bench.checkpoint(run)
    until(run, lambda: bench.log.of("names/1", "close"))
    job.stream.let(0, 5)
    job.stream.let(1, 5)
    until(run, lambda: run.rows_read == 4 + 10)
    settle(run, 100)
    bench.checkpoint(run)
    return job


def test_a_part_that_has_ended_stands_in_the_checkpoint_as_fully_finished() -> None:
    bench = Bench()
    finished_part(bench)
    for uid in ("table", "names"):
        assert bench.status(uid) == ([0, 1], []), uid
        assert bench.newest.graph.operator(uid).status == "fully_finished"
    assert bench.newest.graph.operator("stream").status == "running"
    assert "finished_operators" in bench.newest.required_features


@pytest.mark.parametrize("parallelism", [2, 3, 1])
def test_a_part_that_is_fully_finished_is_not_started_again_and_holds_nobody_up(parallelism: int) -> None:
    bench = Bench()
    job = finished_part(bench)
    bench.log.clear()
    job.parallelism = parallelism
    run = bench.begin(job.flow())
    assert {task.vertex for task in run.tasks} == {"stream", "join", "out"}
    job.stream.let(0)
    job.stream.let(1)
    to_end(run)
    assert not [call for call in bench.log.calls if call.startswith(("table", "names"))]
    # Time has gone on: every timer but the last ones fired before the end of time, with the whole table there.
    assert job.out.seen == list(range(40))
    for subtask in range(parallelism):
        assert bench.log.of(f"join/{subtask}", "end_input", "finish") == ["end_input 0", "finish"]
    assert not [call for call in bench.log.calls if "process 1" in call]


def test_the_end_of_a_finished_input_does_not_hold_time_back_after_a_restore() -> None:
    bench = Bench()
    job = finished_part(bench)
    committed = len(job.out.seen)
    run = bench.begin(job.flow())
    job.stream.let(0, 10)
    job.stream.let(1, 10)
    settle(run, 400)
    bench.checkpoint(run)
    assert len(job.out.seen) > committed, "the timers wait for a table that has ended long ago"
    assert state_of(run, "join") == "running"


def test_time_does_not_fall_back_at_a_restore() -> None:
    bench = Bench()
    job = finished_part(bench)
    saved = {row["_edge"]: row["_watermark"] for row in bench.state("join", "progress")}
    assert saved["names->join.1"] == MAX_WATERMARK
    stream = saved["stream->join.0"]
    assert 0 < stream < 40
    bench.log.clear()
    run = bench.begin(job.flow())
    for subtask in range(2):
        assert bench.log.of(f"join/{subtask}", "opens") == [f"opens at {stream}"]
        assert run.tasks[TaskId("join", subtask)].watermark == stream


class Times(Told):
    """Keeps something, and tells what time it was when it was opened."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [SplitList("some", {"value": pa.int64()})]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self.tell(f"opens at {context.watermark}")


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_the_time_of_subtasks_that_are_merged_is_the_least_of_theirs(parallelism: int, ahead: int) -> None:
    bench = Bench()
    taps = [[rows(5), rows(300)], [rows(5), rows(300)]]
    taps[ahead] = [rows(100), rows(300)]
    tap = Tap(*taps, shut=True)

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        stream = made.source(tap, uid="in", event_time="at").apply(Times(bench.log), uid="op", chain=False)
        stream.apply(Times(bench.log), uid="behind")
        return made

    run = bench.begin(flow(2))
    tap.let(0, 1)
    tap.let(1, 1)
    until_read(run, 2)
    settle(run, 100)
    bench.checkpoint(run)
    assert [run.tasks[TaskId("op", subtask)].watermark for subtask in (ahead, 1 - ahead)] == [100, 5]
    bench.log.clear()
    run = bench.begin(flow(parallelism))
    for subtask in range(parallelism):
        assert bench.log.of(f"op/{subtask}", "opens") == ["opens at 5"]
        assert bench.log.of(f"behind/{subtask}", "opens") == ["opens at 5"]
        assert run.tasks[TaskId("op", subtask)].watermark == 5


def test_late_rows_are_late_again_after_a_restore() -> None:
    bench = Bench()
    tap = Tap([rows(100), rows(3, at=3), rows(200)], shut=True)
    out = CollectSink()

    def flow() -> Dataflow:
        made = Dataflow("job")
        stream = made.source(tap, uid="in", event_time="at").key_by("key")
        stream.apply(TumblingWindow("key", 10, "at", {"n": ("*", "count")}), uid="window").apply(out, uid="out")
        return made

    run = bench.begin(flow())
    tap.let(0, 1)
    until(run, lambda: run.rows_read == 1)
    settle(run)
    bench.checkpoint(run)
    tap.let(0)
    bench.run(flow())
    assert sorted(out.table()["window_start"].to_pylist()) == [100, 200]


# Partially finished ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallelism", [3, 2, 1, 4])
def test_a_source_that_has_finished_in_part_is_read_on_at_any_parallelism_and_nothing_twice(parallelism: int) -> None:
    bench = Bench()
    tap = Tap([rows(0), rows(2)], [rows(n) for n in (1, 3, 5, 7)], shut=True)
    out = Out(bench.log)

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        stream = made.source(tap, uid="in").key_by("key")
        stream.apply(Count(bench.log), uid="count").apply(out, uid="out", chain=False)
        return made

    run = bench.begin(flow(2))
    tap.let(0)
    tap.let(1, 2)
    until(run, lambda: state_of(run, "in", 0) == "waiting" and run.rows_read == 4)
    settle(run, 100)
    bench.checkpoint(run)
    assert bench.status("in") == ([], [0])
    settle(run)
    bench.checkpoint(run)
    assert bench.status("in") == ([0], [])
    assert bench.newest.graph.operator("in").status == "partially_finished"
    bench.log.clear()
    tap.let(1)
    run = bench.begin(flow(parallelism))
    assert sum(task.vertex == "in" for task in run.tasks) == parallelism
    to_end(run)
    processed = [call for call in bench.log.calls if call.startswith("count") and " process " in call]
    assert sorted(call.split(": ")[1] for call in processed) == ["5", "7"]
    # Two rows of the keys 0 and 2 (one each), four of 1 and 3 (two each).
    assert out.seen == [1, 1, 2, 2]


# What is committed first -------------------------------------------------------------------------------------------------


def counted_job(bench: Bench, tap: Tap, out: Out, parallelism: int = 2) -> Dataflow:
    flow = Dataflow("job", parallelism=parallelism)
    flow.source(tap, uid="in").apply(Told(bench.log), uid="op", chain=False).apply(out, uid="out", chain=False)
    return flow


@pytest.mark.parametrize("parallelism", [2, 3, 1])
@pytest.mark.parametrize("done", [False, True])
def test_what_a_checkpoint_prepared_is_committed_before_anything_opens(done: bool, parallelism: int) -> None:
    bench = Bench()
    tap, out = Tap([rows(0), rows(2)], [rows(1), rows(3)], shut=True), Out(bench.log)
    run = bench.begin(counted_job(bench, tap, out))
    tap.let(0, 1)
    tap.let(1, 1)
    until(run, lambda: {"out/0 process 0: 0", "out/1 process 0: 1"} <= set(bench.log.calls))
    bench.log.failing.append("out committed 1" if done else "out commit 1")
    bench.due(run)
    with pytest.raises(RunDiscarded, match="commit of 'out' failed: Boom: out commit"):
        settle(run)
    assert out.seen == ([0, 1] if done else [])
    assert bench.newest_id == 1
    bench.log.clear()
    tap.let(0)
    tap.let(1)
    run = bench.begin(counted_job(bench, tap, out, parallelism))
    assert bench.log.calls[:3] == ["out commit 1", "out committed 1", "out clean 1"]
    assert "op/0 open" in bench.log.calls
    assert out.seen == [0, 1]
    to_end(run)
    assert out.seen == [0, 1, 2, 3]


def test_a_run_that_fails_to_commit_what_it_found_opens_nothing() -> None:
    bench = Bench()
    tap, out = Tap([rows(0)], shut=True), Out(bench.log)
    run = bench.begin(counted_job(bench, tap, out))
    tap.let(0, 1)
    until(run, lambda: "out/0 process 0: 0" in bench.log.calls)
    bench.checkpoint(run)
    bench.log.clear()
    bench.log.failing += ["out commit 1"]
    tap.let(0)
    outcome = bench.run(counted_job(bench, tap, out))
    assert outcome.restarts == 1
    assert bench.log.calls[:2] == ["out commit 1", "out commit 1"]
    assert out.seen == [0]


def test_a_job_of_which_everything_has_finished_returns_at_once_and_starts_nothing() -> None:
    bench = Bench()
    tap, out = Tap([rows(0), rows(2)], [rows(1)]), Out(bench.log)
    first = bench.run(counted_job(bench, tap, out))
    for parallelism in (2, 3):
        bench.log.clear()
        outcome = bench.runtime().begin(counted_job(bench, tap, out, parallelism))
        assert isinstance(outcome, JobOutcome)
        assert outcome.checkpoint_id == first.checkpoint_id
        assert (
            outcome.sentence
            == "the job had finished: in checkpoint 1 every operator has ended, and nothing was started"
        )
        assert not [call for call in bench.log.calls if "/" in call]
        assert out.seen == [0, 1, 2]


def test_a_job_that_died_between_its_last_publication_and_the_commit_is_committed_and_has_finished() -> None:
    bench = Bench()
    tap, out = Tap([rows(0), rows(2)], [rows(1)]), Out(bench.log)
    bench.log.failing.append("out commit 1")
    run = bench.begin(counted_job(bench, tap, out))
    with pytest.raises(RunDiscarded):
        to_end(run)
    bench.log.clear()
    outcome = bench.run(counted_job(bench, tap, out))
    assert bench.log.calls == ["out commit 1", "out committed 1", "out clean 1"]
    assert out.seen == [0, 1, 2]
    assert outcome.restarts == 0


# States at another parallelism -------------------------------------------------------------------------------------------


class Everything(Told):
    """Has a state of every kind, each filled by the rows in a way that tells them all."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        value = {"value": pa.int64()}
        return [
            ValueState("sum", KEY, value),
            MapState("map", KEY, pa.int64(), value),
            ListState("list", KEY, value),
            Timers("timers", KEY),
            SplitList("split", value),
            UnionList("union", value),
            BroadcastState("broadcast", value),
        ]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        for name in ("split", "union", "broadcast"):
            self.tell(f"{name}: {sorted(context.entries(name).rows()['value'].to_pylist())}")
        self.own: list[int] = context.entries("split").rows()["value"].to_pylist()
        self.union: list[int] = []
        if context.subtask == 0:
            self.union = context.entries("union").rows()["value"].to_pylist()

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        context = self.context
        if input == 1:
            context.entries("broadcast").append(batch.select(["value"]))
            return None
        for row in batch.to_pylist():
            key, value = row["key"], row["value"]
            old = context.value_state("sum").get_one(key)
            context.value_state("sum").put_one((key,), value=value + (old["value"] if old else 0))
            context.map_state("map").put_one((key,), value, value=value * value)
            context.list_state("list").append_one((key,), value=value)
            context.timers("timers").set_one((key,), value + 1000)
            self.own.append(value)
            self.union.append(value)
        return None

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        return rows(*(time - 1000 for time in timers["_timestamp"].to_pylist()))

    def snapshot(self) -> None:
        self.context.entries("split").replace(pa.table({"value": pa.array(self.own, pa.int64())}))
        self.context.entries("union").replace(pa.table({"value": pa.array(self.union, pa.int64())}))


def kept(bench: Bench) -> dict[str, Any]:
    """What the newest checkpoint says of the states of ``op``, whoever has it."""
    found: dict[str, Any] = {
        "sum": {row["key"]: row["value"] for row in bench.state("op", "sum")},
        "map": {(row["key"], row["_map_key"]): row["value"] for row in bench.state("op", "map")},
        "timers": sorted((row["key"], row["_timestamp"]) for row in bench.state("op", "timers")),
        "split": sorted(row["value"] for row in bench.state("op", "split")),
        "union": sorted(row["value"] for row in bench.state("op", "union")),
    }
    lists: dict[int, list[int]] = {}
    for row in sorted(bench.state("op", "list"), key=lambda row: row["_index"]):
        lists.setdefault(row["key"], []).append(row["value"])
    return found | {"list": lists}


def told(values: Iterable[int]) -> dict[str, Any]:
    """What the states have to say after these values, worked out without any."""
    values = list(values)
    keys = {value % 4 for value in values}
    by_key = {key: [value for value in values if value % 4 == key] for key in keys}
    return {
        "sum": {key: sum(own) for key, own in by_key.items()},
        "map": {(value % 4, value): value * value for value in values},
        "timers": sorted((value % 4, value + 1000) for value in values),
        "split": sorted(values),
        "union": sorted(values),
        "list": by_key,
    }


def test_every_kind_of_state_goes_along_to_another_parallelism() -> None:
    bench = Bench()
    values = list(range(60))
    stream, table = Tap([rows(n) for n in values], shut=True), Tap([rows(100, 200)], shut=True)
    out = Out(bench.log)

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        one = made.source(stream, uid="in", parallelism=1).key_by("key")
        two = made.source(table, uid="table", parallelism=1).broadcast()
        one.apply(Everything(bench.log), two, uid="op").apply(out, uid="out", chain=False)
        return made

    table.let(0, 1)
    for turn, parallelism in enumerate((2, 3, 1, 4)):
        bench.log.clear()
        run = bench.begin(flow(parallelism))
        done = list(range(turn * 10))
        for subtask in range(parallelism):
            opened = dict(call.split(": ") for call in bench.log.of(f"op/{subtask}", "union", "broadcast"))
            assert opened["union"] == str(done)
            assert opened["broadcast"] == str([100, 200] if turn else [])
        dealt = [
            len(eval(call.split(": ")[1])) for i in range(parallelism) for call in bench.log.of(f"op/{i}", "split")
        ]
        assert sum(dealt) == len(done)
        assert max(dealt) - min(dealt) <= 1
        stream.let(0, (turn + 1) * 10)
        until_read(run, 10 + (0 if turn else 2))
        settle(run, 100)
        bench.checkpoint(run)
        assert kept(bench) == told(range((turn + 1) * 10))
    stream.let(0)
    table.let(0)
    outcome = bench.run(flow(2))
    assert outcome.checkpoint_id == bench.newest_id
    assert out.seen == values


def test_nothing_is_lost_or_repeated_wherever_the_run_is_killed() -> None:
    expected = None
    kill_every: int | None
    for kill_every in (None, 37, 61, 103):
        bench = Bench(checkpoint_interval_us=25_000)
        job = Bounded(bench)
        job.stream.let(0)
        job.stream.let(1)
        if kill_every is None:
            bench.run(job.flow())
            expected = job.out.seen
            assert expected == list(range(40))
            continue
        kills, steps = 0, kill_every
        begun = bench.runtime(seed=kill_every).begin(job.flow())
        while isinstance(begun, LocalRun) and begun.outcome is None:
            for _ in range(steps):
                if not begun.step():
                    break
            else:
                kills += 1
                # Later kills come later, or the job would never come to its first checkpoint.
                steps += 20
                job.parallelism = 1 + kills % 3
                begun = bench.runtime(seed=kills).begin(job.flow())
        assert kills >= 3
        assert job.out.seen == expected


# What is refused ---------------------------------------------------------------------------------------------------------


def keyed(bench: Bench, tap: Tap, uid: str = "count", **more: Any) -> Dataflow:
    flow = Dataflow("job")
    flow.source(tap, uid="in").key_by("key").apply(Count(bench.log), uid=uid, **more)
    return flow


def test_a_job_that_cannot_go_on_from_its_checkpoint_is_refused_before_anything_opens() -> None:
    bench = Bench()
    tap = Tap([rows(1)], endless=True)
    run = bench.begin(keyed(bench, tap))
    until(run, lambda: "count/0 process 0: 1" in bench.log.calls)
    bench.checkpoint(run)
    bench.log.clear()
    for flow, why in (
        (keyed(bench, tap, "renamed"), "count"),
        (keyed(bench, tap, max_parallelism=64), "max"),
        (keyed(bench, tap, parallelism=200), "200"),
    ):
        with pytest.raises(RestoreRefused, match=why):
            bench.run(flow)
    assert bench.log.calls == []
    run = bench.begin(keyed(bench, tap, "renamed"), drop=["count"])
    settle(run)
    assert bench.log.of("renamed/0") == ["open"]


def test_a_step_behind_that_was_not_there_is_told_that_its_finished_input_has_ended() -> None:
    bench = Bench()
    job = finished_part(bench)
    bench.log.clear()

    def longer() -> Dataflow:
        flow = job.flow()
        Stream(flow, flow.steps["join"].inputs[0]).rebalance().apply(Told(bench.log), uid="new")
        return flow

    run = bench.begin(longer())
    job.stream.let(0)
    job.stream.let(1)
    to_end(run)
    processed = [call for call in bench.log.calls if call.startswith("new") and " process " in call]
    assert len(processed) == 30
    assert job.out.seen == list(range(40))


def test_a_table_that_ended_in_the_checkpoint_joins_at_once_after_a_restore() -> None:
    bench = Bench()
    table, stream = Tap([rows(0, 1, 2, 3)]), Tap([rows(*range(20))], shut=True)
    out = CollectSink()

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        names = made.source(table, uid="table").broadcast()
        joined = made.source(stream, uid="in").apply(BroadcastJoin("key", columns=[]), names, uid="join")
        joined.apply(out, uid="out")
        return made

    run = bench.begin(flow(2))
    settle(run)
    bench.checkpoint(run)
    settle(run)
    bench.checkpoint(run)
    assert bench.newest.graph.operator("table").status == "fully_finished"
    run = bench.begin(flow(3))
    stream.let(0, 1)
    until(run, lambda: run.rows_read == 20)
    settle(run, 100)
    bench.checkpoint(run)
    assert sorted(out.table()["value"].to_pylist()) == list(range(20))
    assert out.table().schema.names == ROWS.names
