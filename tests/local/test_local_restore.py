"""What a run takes from its checkpoint: what has finished, what is committed first, time.

What parallelism counts at a start: what the program says, else what the checkpoint says.
"""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.connectors import CollectSink
from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.graph import parallelism_of
from stateformat.backends.dataflow.operators.join import BroadcastJoin
from stateformat.backends.local import LocalRun, RunDiscarded
from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.model import Mode, Record
from stateformat.reading import ReadTask
from tests.worlds.dataflow import Chunks, Pass
from tests.worlds.local import (
    KEY,
    ROWS,
    Bench,
    Count,
    Line,
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


class Bounded(Line):
    """A bounded table that is broadcast to a stream that goes on: the table's part finishes, the
    rest does not.
    """

    def __init__(self, **options: Any) -> None:
        splits = [[rows(n) for n in range(start, 40, 2)] for start in (0, 1)]
        super().__init__(*splits, op=Join, shut=True, parallelism=2, **options)
        self.table = Tap([rows(0, 1, 2, 3)])

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> df.Dataflow:
        flow = df.Dataflow(job, parallelism=parallelism or self.parallelism)
        table = flow.source(self.table, uid="table", event_time="at")
        names = table.apply(Told(self.log), uid="names", chain=False).broadcast()
        stream = flow.source(self.tap, uid="stream", event_time="at").key_by("key")
        stream.apply(self.op, names, uid="join").apply(self.out, uid="out", chain=False)
        return flow

    def let_both(self, chunks: int | None = None) -> None:
        self.tap.let(0, chunks)
        self.tap.let(1, chunks)


class Join(Told):
    """Sets a timer for every row of the stream, one further on, and emits the row with the time it
    fires.
    """

    opened_at = ev.MIN_WATERMARK

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        return [df.Timers("wake", KEY), df.BroadcastState("table", {"value": pa.int64()})]

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        self.tell(f"opens at {'min' if context.watermark == ev.MIN_WATERMARK else context.watermark}")

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        if input == 1:
            self.tell("process 1: table")
            self.context.entries("table").append(batch.select(["value"]))
            return None
        self.tell(f"process 0: {batch['value'][0]}")
        for row in batch.to_pylist():
            self.context.timers("wake").set_one((row["key"],), row["at"] + 1)
        return None

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        known = self.context.entries("table").rows().num_rows
        times = [time - 1 for time in timers["_timestamp"].to_pylist()]
        assert known == 4, known
        return rows(*times)


def finished_part() -> Bounded:
    """A job whose table has finished before its newest checkpoint; the first rows of the stream
    have been processed.
    """
    job = Bounded()
    bench, run = job.bench, job.begin()
    until(run, lambda: state_of(run, "names", 1) == "waiting")
    until(run, lambda: all(bench.log.of(f"join/{subtask}", "end_input") for subtask in range(2)))
    bench.checkpoint(run)
    until_told(run, bench.log, "names/1 close")
    job.let_both(5)
    until_read(run, 4 + 10)
    settle(run, 100)
    bench.checkpoint(run)
    bench.log.clear()
    return job


@pytest.mark.parametrize("parallelism", [2, 3, 1])
def test_a_part_that_is_fully_finished_is_not_started_again_and_holds_back_nothing(parallelism: int) -> None:
    job = finished_part()
    for uid in ("table", "names"):
        assert job.bench.status(uid) == ([0, 1], []), uid
        assert job.bench.newest.graph.operator(uid).status == "fully_finished"
    assert job.bench.newest.graph.operator("stream").status == "running"
    assert "finished_operators" in job.bench.newest.required_features
    run = job.begin(parallelism)
    assert {task.vertex for task in run.tasks} == {"stream", "join", "out"}
    job.let_both()
    to_end(run)
    assert not [call for call in job.log.calls if call.startswith(("table", "names"))]
    # Time has gone on: every timer but the last ones fired before the end of time, with the whole
    # table there.
    assert job.out.seen == list(range(40))
    for subtask in range(parallelism):
        assert job.log.of(f"join/{subtask}", "end_input", "finish") == ["end_input 0", "finish"]
    assert not [call for call in job.log.calls if "process 1" in call]


def test_the_end_of_a_finished_input_does_not_hold_time_back_after_a_restore() -> None:
    job = finished_part()
    committed, run = len(job.out.seen), job.begin()
    job.let_both(10)
    settle(run, 400)
    job.bench.checkpoint(run)
    assert len(job.out.seen) > committed, "the timers wait for a table that has ended long ago"
    assert state_of(run, "join") == "running"


def test_time_does_not_fall_back_at_a_restore() -> None:
    job = finished_part()
    saved = {row["_edge"]: row["_watermark"] for row in job.bench.state("join", "progress")}
    assert saved["names->join.1"] == ev.MAX_WATERMARK
    stream = saved["stream->join.0"]
    assert 0 < stream < 40
    run = job.begin()
    for subtask in range(2):
        assert job.log.of(f"join/{subtask}", "opens") == [f"opens at {stream}"]
        assert run.tasks[ev.TaskId("join", subtask)].watermark == stream


class Times(Told):
    """Keeps something, and tells what time it was when it was opened."""

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        return [df.SplitList("some", {"value": pa.int64()})]

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        self.tell(f"opens at {context.watermark}")


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_the_time_of_subtasks_that_are_merged_is_the_least_of_theirs(parallelism: int, ahead: int) -> None:
    taps = [[rows(5), rows(300)], [rows(5), rows(300)]]
    taps[ahead] = [rows(100), rows(300)]
    line = Line(*taps, op=Times, timed=True, shut=True, parallelism=2)

    def flow(parallelism: int) -> df.Dataflow:
        made = line.flow(parallelism)
        df.Stream(made, made.steps["out"].inputs[0]).apply(Times(line.log), uid="behind")
        return made

    run = line.bench.begin(flow(2))
    line.tap.let(0, 1)
    line.tap.let(1, 1)
    until_read(run, 2)
    settle(run, 100)
    line.bench.checkpoint(run)
    assert [run.tasks[ev.TaskId("op", subtask)].watermark for subtask in (ahead, 1 - ahead)] == [100, 5]
    line.log.clear()
    run = line.bench.begin(flow(parallelism))
    for subtask in range(parallelism):
        assert line.log.of(f"op/{subtask}", "opens") == ["opens at 5"]
        assert line.log.of(f"behind/{subtask}", "opens") == ["opens at 5"]
        assert run.tasks[ev.TaskId("op", subtask)].watermark == 5


@pytest.mark.parametrize("parallelism", [3, 2, 1, 4])
def test_a_source_that_has_finished_in_part_is_read_on_at_any_parallelism_and_nothing_twice(parallelism: int) -> None:
    splits = [rows(0), rows(2)], [rows(n) for n in (1, 3, 5, 7)]
    line = Line(*splits, op=Count, how="key_by", parallelism=2, shut=True)
    bench, run = line.bench, line.begin()
    line.tap.let(0)
    line.tap.let(1, 2)
    until(run, lambda: state_of(run, "in", 0) == "waiting" and run.rows_read == 4)
    settle(run, 100)
    bench.checkpoint(run)
    assert bench.status("in") == ([], [0])
    settle(run)
    bench.checkpoint(run)
    assert bench.status("in") == ([0], [])
    assert bench.newest.graph.operator("in").status == "partially_finished"
    bench.log.clear()
    line.tap.let(1)
    run = line.begin(parallelism)
    assert sum(task.vertex == "in" for task in run.tasks) == parallelism
    to_end(run)
    processed = [call for call in bench.log.calls if call.startswith("op") and " process " in call]
    assert sorted(call.split(": ")[1] for call in processed) == ["5", "7"]
    # Two rows of the keys 0 and 2 (one each), four of 1 and 3 (two each).
    assert line.out.seen == [1, 1, 2, 2]


@pytest.mark.parametrize("parallelism", [2, 3, 1])
@pytest.mark.parametrize("done", [False, True])
def test_what_a_checkpoint_prepared_is_committed_before_anything_opens(done: bool, parallelism: int) -> None:
    line = Line([rows(0), rows(2)], [rows(1), rows(3)], shut=True, parallelism=2)
    run = line.begin()
    line.let(run, 1)
    line.let(run, 1, split=1)
    line.log.failing.append("out committed 1" if done else "out commit 1")
    line.bench.due(run)
    with pytest.raises(RunDiscarded, match="commit of 'out' failed: Boom: out commit"):
        settle(run)
    assert line.out.seen == ([0, 1] if done else [])
    assert line.bench.newest_id == 1
    line.log.clear()
    line.tap.let(0)
    line.tap.let(1)
    run = line.begin(parallelism)
    assert line.log.calls[:3] == ["out commit 1", "out committed 1", "out clean 1"]
    assert "op/0 open" in line.log.calls
    assert line.out.seen == [0, 1]
    to_end(run)
    assert line.out.seen == [0, 1, 2, 3]


def test_a_job_that_died_between_its_last_publication_and_the_commit_is_committed_and_has_finished() -> None:
    line = Line([rows(0), rows(2)], [rows(1)], parallelism=2)
    line.log.failing.append("out commit 1")
    with pytest.raises(RunDiscarded):
        to_end(line.begin())
    line.log.clear()
    assert line.run().restarts == 0
    assert line.log.calls == ["out commit 1", "out committed 1", "out clean 1"]
    assert line.out.seen == [0, 1, 2]


def keyed(bench: Bench, tap: Tap, uid: str = "count", **more: Any) -> df.Dataflow:
    flow = df.Dataflow("job")
    flow.source(tap, uid="in").key_by("key").apply(Count(bench.log), uid=uid, **more)
    return flow


def test_a_job_that_cannot_go_on_from_its_checkpoint_is_refused_before_anything_opens() -> None:
    bench, tap = Bench(), Tap([rows(1)], endless=True)
    run = bench.begin(keyed(bench, tap))
    until_told(run, bench.log, "count/0 process 0: 1")
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


def test_a_new_step_behind_a_finished_input_learns_that_it_has_ended() -> None:
    job = finished_part()
    flow = job.flow()
    df.Stream(flow, flow.steps["join"].inputs[0]).rebalance().apply(Told(job.log), uid="new")
    run = job.bench.begin(flow)
    job.let_both()
    to_end(run)
    assert len([call for call in job.log.calls if call.startswith("new") and " process " in call]) == 30
    assert job.out.seen == list(range(40))


def test_a_table_that_ended_in_the_checkpoint_joins_at_once_after_a_restore() -> None:
    bench, out = Bench(), CollectSink()
    table, stream = Tap([rows(0, 1, 2, 3)]), Tap([rows(*range(20))], shut=True)

    def flow(parallelism: int) -> df.Dataflow:
        made = df.Dataflow("job", parallelism=parallelism)
        names, join = made.source(table, uid="table").broadcast(), BroadcastJoin("key", columns=[])
        made.source(stream, uid="in").apply(join, names, uid="join").apply(out, uid="out")
        return made

    run = bench.begin(flow(2))
    for _ in range(2):
        settle(run)
        bench.checkpoint(run)
    assert bench.newest.graph.operator("table").status == "fully_finished"
    run = bench.begin(flow(3))
    stream.let(0, 1)
    until_read(run, 20)
    settle(run, 100)
    bench.checkpoint(run)
    assert sorted(out.table()["value"].to_pylist()) == list(range(20))
    assert out.table().schema.names == ROWS.names


def counted(*, failing: str = "") -> Line:
    """A job that counts 20 rows by key, whose run was lost after two checkpoints."""
    splits = [rows(n) for n in range(20)]
    line = Line(
        splits, op=Count, how="key_by", timed=True, endless=True, checkpoint_rows=2, checkpoint_interval_us=None
    )
    run = line.begin()
    until(run, lambda: run.published >= 2)
    line.log.failing += [failing] if failing else []
    line.tap.bounded = True
    return line


def test_state_that_is_dropped_at_the_start_is_not_dropped_again_by_a_restart() -> None:
    line = counted(failing="op/0 process 0: 17")
    dropped = sum(row["n"] for row in line.bench.state("op", "count"))
    assert line.run(drop=("op/count",)).restarts == 1
    assert sum(line.out.seen) == 20 - dropped


@pytest.mark.parametrize(("drop", "failing"), [(("op",), "other/0 process 0: 17"), ("op", "")])
def test_an_operator_that_was_dropped_may_be_named_without_a_list_and_does_not_prevent_a_restart(
    drop: Any, failing: str
) -> None:
    line = counted(failing=failing)
    flow = df.Dataflow("job")
    flow.source(line.tap, uid="in", event_time="at").apply(Told(line.log), uid="other", chain=False).apply(
        line.out, uid="out", chain=False
    )
    assert line.bench.run(flow, drop=drop).restarts == bool(failing)


def test_what_all_subtasks_read_alike_is_read_once_at_another_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    line = Line(*[[rows(n)] for n in range(6)], op=Count, how="key_by", timed=True, parallelism=6, endless=True)
    line.bench.checkpoint(line.begin())
    read: list[str] = []
    batches = ReadTask.batches

    def counting(task: ReadTask, **options: Any) -> Any:
        if task.state.mode is Mode.PROGRESS:
            read.append(str(task.state.operator))
        return batches(task, **options)

    monkeypatch.setattr(ReadTask, "batches", counting)
    line.tap.bounded = True
    run = line.begin(4)
    assert sorted(read) == ["op", "out"]
    to_end(run)
    assert sum(line.out.seen) == 6


class Spread(Line):
    """A source that does not end, a counter by key and a sink; ``job.steps``: what steps say."""

    def __init__(self, **options: Any) -> None:
        super().__init__([rows(n) for n in range(8)], op=Count, parallelism=None, **options)
        self.steps: dict[str, int] = {}

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> df.Dataflow:
        flow = df.Dataflow(job, parallelism=parallelism or self.parallelism)
        stream = flow.source(self.tap, uid="in", parallelism=self.steps.get("in"))
        counted = stream.key_by("key").apply(self.op, uid="op", parallelism=self.steps.get("op"))
        counted.apply(self.out, uid="out", chain=False, parallelism=self.steps.get("out"))
        return flow

    def after_a_checkpoint(self, **options: Any) -> Record:
        """The newest checkpoint, after a run that was left behind."""
        run = self.begin(**options)
        self.tap.let(0, 2)
        return self.bench.checkpoint(run)


def sizes(run: LocalRun | Record) -> dict[str, int]:
    graph = run.job.graph if isinstance(run, LocalRun) else run.graph
    return {operator.uid: operator.parallelism for operator in graph.operators}


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "nothing is said, so the record counts": ({}, {"in": 1, "op": 3, "out": 2}),
    "of one operator alone": ({"options": {"per_operator": {"out": 4}}}, {"in": 1, "op": 3, "out": 4}),
    "of every operator": ({"options": {"parallelism": 2}}, {"in": 2, "op": 2, "out": 2}),
    "by the dataflow": ({"flow": 1}, {"in": 1, "op": 1, "out": 1}),
    "by a step": ({"steps": {"op": 2}}, {"in": 1, "op": 2, "out": 2}),
    "by a step and the options": ({"steps": {"op": 1}, "options": {"parallelism": 4}}, {"in": 4, "op": 1, "out": 4}),
}


@pytest.mark.parametrize(("said", "found"), CASES.values(), ids=CASES)
def test_what_the_program_says_counts_and_else_the_record(said: dict[str, Any], found: dict[str, int]) -> None:
    job = Spread()
    assert sizes(job.after_a_checkpoint(per_operator={"op": 3, "out": 2})) == {"in": 1, "op": 3, "out": 2}
    job.steps = said.get("steps", {})
    assert sizes(job.bench.begin(job.flow(said.get("flow")), **said.get("options", {}))) == found


def test_a_first_run_of_which_nothing_is_said_has_one_subtask_of_each_operator() -> None:
    assert set(sizes(Spread().begin()).values()) == {1}


def test_the_record_counts_for_a_job_that_begins_with_a_savepoint_and_for_restarts() -> None:
    job = Spread()
    job.after_a_checkpoint(parallelism=3)
    job.bench.options["start_from"] = job.bench.store.url
    job.bench = Bench("memory://moved", **job.bench.options)
    run = job.begin()
    assert set(sizes(run).values()) == {3}
    job.bench.checkpoint(run)
    assert set(sizes(job.begin()).values()) == {3}


def test_no_row_is_lost_at_the_records_parallelism() -> None:
    job = Spread()
    job.after_a_checkpoint(parallelism=3)
    job.tap.let(0)
    to_end(job.begin())
    assert job.out.seen == [2, 2, 2, 2]
    assert {operator.parallelism for operator in job.bench.newest.graph.operators} == {3}


def test_a_start_at_another_parallelism_says_so_once_and_a_start_at_the_records_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Spread()
    job.after_a_checkpoint(parallelism=3)
    caplog.set_level(logging.WARNING)
    job.begin()
    job.begin(parallelism=3)
    assert not caplog.messages
    job.begin(parallelism=2, per_operator={"op": 1})
    (said,) = caplog.messages
    assert said == (
        "job 'job': the program sets another parallelism than checkpoint 1, and the program takes precedence: "
        "'in', 'out' at 2, not 3; 'op' at 1, not 3"
    )


def test_a_new_step_takes_the_parallelism_that_the_silent_ones_share() -> None:
    job = Spread()
    record = job.after_a_checkpoint(parallelism=3)
    flow = job.flow()
    flow.source(Chunks(), uid="new").apply(Pass(), uid="other", parallelism=5)
    assert parallelism_of(flow, previous=record) == {"in": 3, "op": 3, "out": 3, "new": 3, "other": 5}
    mixed = job.after_a_checkpoint(per_operator={"op": 2})
    assert parallelism_of(flow, previous=mixed)["new"] == 1
    assert parallelism_of(flow, per_operator={"op": 3}, previous=mixed)["new"] == 3


class TwoInputs(Line):
    """A source that ends and one that does not, both forward into one operator."""

    def __init__(self) -> None:
        super().__init__([rows(1)], [rows(3)], parallelism=None, endless=True)
        self.ending = Tap([rows(2)])

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> df.Dataflow:
        flow = df.Dataflow(job, parallelism=parallelism)
        other = flow.source(self.ending, uid="ends").forward()
        flow.source(self.tap, uid="goes on").forward().apply(self.op, other, uid="op").apply(self.out, uid="out")
        return flow


def test_a_finished_operator_keeps_its_parallelism_behind_a_forward_edge_whatever_the_others_do() -> None:
    job = TwoInputs()
    run = job.begin(2)
    until(run, lambda: job.bench.checkpoint(run) and job.bench.status("ends")[0] == [0, 1])
    again = job.begin(per_operator={"goes on": 3, "op": 3, "out": 3})
    assert sizes(again) == {"ends": 2, "goes on": 3, "op": 3, "out": 3}
    with pytest.raises(InvalidInput, match="sends forward"):
        TwoInputs().begin(per_operator={"goes on": 3, "op": 3, "out": 3})
