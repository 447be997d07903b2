"""Which rows are late does not depend on the order in which the rows of an epoch arrive."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow, EventTime, Operator, Output, Stream, events as ev
from stateformat.backends.dataflow.operators.join import BroadcastJoin
from stateformat.backends.runtime import Progress
from tests.conformance import Gated, Stage, plain, to_end, until
from tests.local_jobs import ROWS
from tests.played_stage import PlayedStage
from tests.spark_in_process import Ranges, RangeSource, Stand

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
