"""Which rows are late does not depend on the order in which the rows of an epoch arrive.

Time at the inputs of a task, of which some are idle: against a model that knows no shortcut.
Duplicates are removed for a while: against a loop over the rows.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow, Deduplicate, EventTime, Operator, Output, Stream, events as ev
from stateformat.backends.dataflow.operators.join import BroadcastJoin
from stateformat.backends.dataflow.task import Task
from stateformat.backends.dataflow.task_inputs import InputEdge
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.backends.runtime import Progress
from stateformat.errors import InvalidInput
from tests.worlds.local import ROWS
from tests.worlds.spark import Ranges, RangeSource, Stand
from tests.worlds.stages import Gated, PlayedStage, Stage, plain, to_end, until

COUNTS = {"n": ("*", "count"), "total": ("value", "sum")}
SIZE_US = 100
NAMED = pa.schema([("id", pa.int64()), ("name", pa.string())])
Rows = list[dict[str, int]]


def stream(ranges: int, step_us: int, behind_us: int) -> list[Rows]:
    """Ranges of rows of which every third happened ``behind_us`` before the others."""
    return [
        [
            {"key": n % 5, "value": n, "at": 10_000 + step_us * n - (behind_us if n % 3 == 1 else 0)}
            for n in range(12 * number, 12 * number + 12)
        ]
        for number in range(ranges)
    ]


def source(schema: pa.Schema, ranges: list[Any]) -> RangeSource:
    """What reads these ranges, in two partitions each, of small batches."""
    laid = [
        [
            [pa.RecordBatch.from_pylist(some[start : start + 2], schema=schema) for start in range(half, len(some), 4)]
            for half in (0, 2)
        ]
        for some in ranges
    ]
    return RangeSource(Ranges(laid), schema=schema)


NAMES = [[{"id": n, "name": f"name {n}"}] for n in range(3)]
"""A table of three ranges: it ends in the fourth epoch."""


class Union(Operator):
    """Passes on both of its inputs."""

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        return batch


def windows(rows: Stream, out: CollectSink) -> None:
    rows.key_by("key").window(SIZE_US, "at", COUNTS, uid="window").apply(out, uid="out")


def joined(out: CollectSink, ranges: list[Rows]) -> Dataflow:
    """A stream, joined with a table that ends while the stream goes on."""
    flow = Dataflow("joined", parallelism=2)
    read = flow.source(source(ROWS, ranges), uid="in", event_time=EventTime("at"))
    table = flow.source(source(NAMED, NAMES), uid="names").broadcast()
    windows(read.rebalance().apply(BroadcastJoin({"key": "id"}, how="left"), table, uid="join"), out)
    return flow


def united(out: CollectSink, one: list[Rows], two: list[Rows]) -> Dataflow:
    """Two streams, one of which is behind the other."""
    flow = Dataflow("united", parallelism=2)
    first = flow.source(source(ROWS, one), uid="one", event_time=EventTime("at"))
    second = flow.source(source(ROWS, two), uid="two", event_time=EventTime("at"))
    windows(first.rebalance().apply(Union(), second.rebalance(), uid="union"), out)
    return flow


def expected(epochs: list[tuple[Rows, float]]) -> Counter[tuple[Any, ...]]:
    """What windows come of rows by epoch, each judged by how far time had come when its epoch
    began.
    """
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rows, time in epochs:
        for row in rows:
            begin = row["at"] // SIZE_US * SIZE_US
            if begin + SIZE_US > time:
                found[row["key"], begin].append(row["value"])
    return Counter((key, begin, begin + SIZE_US, len(own), sum(own)) for (key, begin), own in found.items())


def newest(ranges: list[Rows], epoch: int) -> float:
    """How far a stream has come when this epoch begins, from 0; the end of time where it has ended
    before.
    """
    if epoch > len(ranges):
        return float("inf")
    return max((row["at"] for some in ranges[:epoch] for row in some), default=float("-inf"))


def run(stage: Stage, monkeypatch: Any, flow: Dataflow, seed: int) -> None:
    """Run it to its end, what is sent in an epoch in an order of this seed."""
    Stand(monkeypatch, workers=2, seed=seed).runtime(stage.store).run(flow)


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(2, 12))])
def test_on_spark_the_end_of_a_table_lets_time_go_on_behind_all_rows_of_its_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    ranges, out = stream(8, 10, 300), CollectSink()
    run(Stage(tmp_path, lambda: None), monkeypatch, joined(out, ranges), seed)
    ends = len(NAMES)
    judged = [(rows, newest(ranges, n) if n > ends else float("-inf")) for n, rows in enumerate(ranges)]
    wanted = expected(judged)
    assert plain(out.table()) == wanted
    assert wanted != expected([(rows, float("-inf")) for rows in ranges]), "some are late"


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(2, 12))])
def test_on_spark_time_of_two_streams_goes_on_behind_all_rows_of_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    one, two, out = stream(8, 10, 300), stream(5, 7, 250), CollectSink()
    run(Stage(tmp_path, lambda: None), monkeypatch, united(out, one, two), seed)
    judged = [(rows, min(newest(one, n), newest(two, n))) for some in (one, two) for n, rows in enumerate(some)]
    wanted = expected(judged)
    assert plain(out.table()) == wanted
    assert wanted != expected([(rows, float("-inf")) for rows in (*one, *two)]), "some are late"


def test_in_process_the_end_of_a_table_lets_time_go_on_at_the_barrier_in_every_order(tmp_path: Path) -> None:
    events = pa.Table.from_pylist([row for some in stream(12, 10, 300) for row in some], schema=ROWS)
    names = pa.Table.from_pylist([row for some in NAMES for row in some], schema=NAMED)
    found = []
    for seed in range(4):
        out = CollectSink()
        flow = Dataflow("joined", parallelism=1)
        read = flow.source(MemorySource(events, batch_rows=4), uid="in", event_time="at")
        table = flow.source(MemorySource(names, batch_rows=8), uid="names").broadcast()
        windows(read.rebalance().apply(BroadcastJoin({"key": "id"}, how="left"), table, uid="join"), out)
        Stage(tmp_path / str(seed), lambda: None).run("local", flow, checkpoint_rows=63, seed=seed)
        found.append(plain(out.table()))
    assert all(one == found[0] for one in found)
    assert sum(row[3] * count for row, count in found[0].items()) < events.num_rows, "some are late"


# What a job says of late rows and of time ---------------------------------------------------------


@pytest.mark.parametrize("executor", ["local", "spark"])
def test_late_rows_are_in_progress_in_the_record_and_in_the_last_sentence_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    stage, out, seen = PlayedStage(tmp_path, monkeypatch), CollectSink(), list[Progress]()
    ranges = stream(10, 10, 300)
    flow = Dataflow("late", parallelism=1)
    split = [pa.RecordBatch.from_pylist(some, schema=ROWS) for some in ranges]
    gate = Gated(tmp_path / "in", split, shut=True)
    read = flow.source(gate, uid="in", event_time="at")
    flow.source(MemorySource(pa.table({"id": [1]})), uid="untimed").apply(CollectSink(), uid="rest")
    windows(read, out)
    gate.let(0, 6)
    often = {"checkpoint_rows": 24} if executor == "spark" else {}
    first = stage.begin(executor, flow, **often)
    until(first, lambda: first.rows_read == 73 and first.in_flight is None)
    before = first.published
    until(first, lambda: first.published > before)
    told = first.progress()
    first.close()
    assert told.late_rows > 0
    assert told.watermarks == {"in": told.watermark, "untimed": None}
    assert told.watermark == newest(ranges, 6)
    record = stage.newest
    assert record.properties["stateformat.late_rows"] == str(told.late_rows)
    assert f", {told.late_rows} late rows dropped" in told.line()

    gate.let(0)
    outcome = stage.run(executor, flow, progress=seen.append, **often)
    in_windows = sum(row[3] * count for row, count in plain(out.table()).items())
    late = 120 - in_windows
    assert late > told.late_rows
    assert outcome.sentence.endswith(f"; {late} late rows dropped")
    assert seen[-1].late_rows == late
    assert stage.newest.properties["stateformat.late_rows"] == str(late)


def test_time_of_the_job_is_not_known_while_that_of_a_source_is_not(tmp_path: Path) -> None:
    stage, out = Stage(tmp_path, lambda: None), CollectSink()
    shut = Gated(tmp_path / "shut", [pa.RecordBatch.from_pylist(stream(1, 10, 0)[0], schema=ROWS)], shut=True)
    quick = Gated(tmp_path / "quick", [pa.RecordBatch.from_pylist(stream(1, 10, 0)[0], schema=ROWS)])
    flow = Dataflow("two", parallelism=1)
    one, two = (flow.source(gate, uid=uid, event_time="at") for gate, uid in ((shut, "shut"), (quick, "quick")))
    windows(one.rebalance().apply(Union(), two.rebalance(), uid="union"), out)
    run = stage.begin("local", flow)
    until(run, lambda: run.rows_read == 12)
    until(run, lambda: run.progress().watermarks["quick"] is not None)
    told = run.progress()
    assert (told.watermark, told.watermarks["shut"], told.late_rows) == (None, None, 0)
    shut.let(0)
    to_end(run)
    assert run.progress().watermark == ev.MAX_WATERMARK


@dataclass
class Sender:
    """What a channel has said."""

    edge: str
    time: int = ev.MIN_WATERMARK
    idle: bool = False
    ended: bool = False


def expected_time(senders: list[Sender]) -> int:
    """The least of those that hold time up; of idle ones alone the greatest."""
    holding = [sender.time for sender in senders if not (sender.idle or sender.ended)]
    idle = [sender.time for sender in senders if sender.idle and not sender.ended]
    return min(holding) if holding else max(idle, default=ev.MAX_WATERMARK)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("by_epoch", [False, True])
def test_time_is_that_of_a_model_and_never_goes_back(seed: int, by_epoch: bool) -> None:
    choose = random.Random(seed)
    edges = ["one"] * choose.randrange(1, 4) + ["two"] * choose.randrange(3)
    channels = [ev.Channel(edge, number, 0) for number, edge in enumerate(edges)]
    inputs = [
        InputEdge(edge, number, tuple(channel for channel in channels if channel.edge == edge))
        for number, edge in enumerate(dict.fromkeys(edges))
    ]
    task = Task(ev.TaskId("op", 0), inputs, [], by_epoch=by_epoch)
    task.start()
    senders = [Sender(edge) for edge in edges]
    reached, said = ev.MIN_WATERMARK, False
    for number in range(1, 60):
        sender, channel = choose.choice([pair for pair in zip(senders, channels, strict=True) if not pair[0].ended])
        what = choose.choice(["time", "time", "idle", "back", "end"])
        if what == "end" and sum(not one.ended for one in senders) == 1:
            what = "time"  # Something is always open.
        element: ev.Element
        if what == "time":
            sender.time = max(sender.time, choose.randrange(100))
            element = ev.Watermark(sender.time)
        elif what == "end":
            sender.ended, element = True, ev.EndOfData()
        else:
            sender.idle, element = what == "idle", ev.Idle(what == "idle")
        commands = task.handle(ev.Received(channel, element))
        # The barrier lets all count that the epoch has brought.
        for each in channels:
            commands += task.handle(ev.Received(each, ev.Barrier(number)))
        commands += task.handle(ev.Completed(number))
        emitted = [command.element for command in commands if isinstance(command, ev.Emit)]
        times = [one.timestamp for one in emitted if isinstance(one, ev.Watermark)]
        reached = max(reached, expected_time(senders))
        assert task.watermark == reached
        assert times == sorted(set(times))
        idle = all(one.idle or one.ended for one in senders)
        assert task.is_idle is idle
        assert [one.idle for one in emitted if isinstance(one, ev.Idle)] == ([idle] if idle is not said else [])
        said = idle
        # Whoever goes on from here begins at the same time.
        restored = [edge._replace(watermark=task.progress()[0][edge.id]) for edge in inputs]
        assert Task(ev.TaskId("op", 0), restored, []).restored_watermark == reached


COLUMNS = {"k": pa.int64(), "n": pa.int64(), "at": pa.int64()}
SEEDS = [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(3, 16))]


def expected_rows(rows: list[dict[str, Any]], within_us: int) -> list[int]:
    """The numbers of the rows that pass."""
    last: dict[int, int] = {}
    passed = []
    for row in rows:
        if row["k"] not in last or row["at"] >= last[row["k"]] + within_us:
            last[row["k"]] = row["at"]
            passed.append(row["n"])
    return passed


@pytest.mark.parametrize("within_us", [1, 7, 40, 10**15])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_passes_depends_on_the_rows_of_a_key_alone(seed: int, within_us: int) -> None:
    chance = random.Random(seed)
    rows = [
        {"k": chance.randrange(4), "n": n, "at": 1_000 + n // 2 - chance.randrange(chance.choice([1, 12]))}
        for n in range(400)
    ]
    harness = OperatorHarness(
        Deduplicate("k", within=within_us, time="at"), COLUMNS, key_by="k", parallelism=chance.choice([1, 3])
    )
    at, came = 0, []
    while at < len(rows):
        # Rows in any pieces, watermarks behind the rows to come, restarts at any parallelism.
        size = chance.choice([1, 5, 60])
        harness.push(rows[at : at + size])
        at += size
        if at < len(rows) and chance.random() < 0.6:
            harness.advance(min(row["at"] for row in rows[at:]))
        if chance.random() < 0.1:
            came += harness.take_output()["n"].to_pylist()
            harness = OperatorHarness.restore(harness.snapshot(), parallelism=chance.choice([1, 2, 3]))
    assert sorted([*came, *harness.output["n"].to_pylist()]) == expected_rows(rows, within_us)
    assert harness.operator().late_records == 0


def test_what_passes_does_not_depend_on_batches_at_the_ends_of_int64_either() -> None:
    times = [0, 2**53, 2**53 + 90, 2**63 - 1, 2**63 - 1]
    rows = [{"k": 0, "n": n, "at": at} for n, at in enumerate(times)]
    for size in (1, 2, 5):
        harness = OperatorHarness(Deduplicate("k", within=50, time="at"), COLUMNS, key_by="k")
        for first in range(0, len(rows), size):
            harness.push(rows[first : first + size])
        assert harness.output["n"].to_pylist() == [0, 1]
    # Before all of them is late once event time has begun.
    harness.advance(-(2**63) + 5).push([{"k": 0, "n": 9, "at": -(2**63)}, {"k": 1, "n": 9, "at": -(2**63) + 1}])
    assert harness.operator().late_records == 2


def test_the_state_has_the_keys_that_may_still_have_duplicates() -> None:
    harness = OperatorHarness(Deduplicate("k", within=100, time="at"), COLUMNS, key_by="k")
    for n in range(50):
        harness.push([{"k": n, "n": n, "at": 10 * n}]).advance(10 * n)
    assert sorted(harness.state("seen")["k"].to_pylist()) == [*range(40, 50)]


def test_rows_behind_the_watermark_and_rows_without_a_time_are_dropped_and_counted() -> None:
    harness = OperatorHarness(Deduplicate("k", within=100, time="at"), COLUMNS, key_by="k")
    harness.advance(1_000).push(
        [{"k": 1, "n": 1, "at": 999}, {"k": 2, "n": 2, "at": None}, {"k": 3, "n": 3, "at": 1_000}]
    )
    assert harness.output["n"].to_pylist() == [3]
    again = OperatorHarness.restore(harness.snapshot())
    operator = again.operator()
    assert isinstance(operator, Deduplicate)
    assert (operator.late_records, operator.untimed_records) == (1, 1)


def test_without_a_time_it_is_that_of_the_clock() -> None:
    within = timedelta(microseconds=100)
    harness = OperatorHarness(Deduplicate("k", within=within), COLUMNS, key_by="k")
    start = harness.context().processing_time_us
    for n, after_us in enumerate([0, 50, 99, 100, 150, 199, 200, 350]):
        harness.advance_processing_time(start + after_us).push([{"k": 1, "n": n, "at": None}])
    # A row that is dropped does not keep the next one from passing.
    assert harness.output["n"].to_pylist() == [0, 3, 6, 7]


def test_keys_that_were_known_for_ever_count_from_the_restart_on() -> None:
    harness = OperatorHarness(Deduplicate("k"), COLUMNS, key_by="k")
    harness.push([{"k": k, "n": k, "at": 1} for k in range(3)]).advance(500)
    again = OperatorHarness.restore(harness.snapshot(), Deduplicate("k", within=100, time="at"))
    again.push([{"k": 0, "n": 10, "at": 599}, {"k": 1, "n": 11, "at": 600}])
    assert again.output["n"].to_pylist() == [11]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"time": "at"}, "needs within"),
        ({"within": 0, "time": "at"}, "within of removing duplicates is 0"),
        ({"within": 1.5}, "within of removing duplicates is 1.5"),
        ({"within": 5, "time": "nothing"}, "nothing"),
        ({"within": 5, "time": "word"}, "event time 'word' is string"),
    ],
)
def test_what_is_no_time_is_refused_when_the_dataflow_is_built(arguments: Any, message: str) -> None:
    rows = pa.table({"k": [1], "at": [1], "word": ["a"]})
    stream = Dataflow("job").source(MemorySource(rows), uid="rows").key_by("k")
    with pytest.raises(InvalidInput, match=message):
        stream.deduplicate(uid="once", **arguments)


def test_a_hot_key_with_many_rows_that_pass_takes_no_loop() -> None:
    rows = pa.record_batch({"k": pa.array([1] * 200_000), "at": pa.array(range(200_000))})
    driven = OperatorHarness(Deduplicate("k", within=2, time="at"), rows.schema, key_by="k")
    driven.push(rows)
    assert driven.output["at"].to_pylist() == [*range(0, 200_000, 2)]
