"""Sources of DataFrames: exact ranges, transformations, and the way to the reader."""

from __future__ import annotations

import copy
import datetime
import json
import pickle
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from stateformat.backends.dataflow import EventTime, NoSplit, Split
from stateformat.backends.dataflow.chain.source_reader import SourceReader
from stateformat.backends.spark.sources.arrow import check_fits, to_arrow
from stateformat.backends.spark.sources.offset_table import OffsetTable
from stateformat.backends.spark.sources.offsets import Position
from stateformat.backends.spark.sources.row_buffer import RowBuffer
from stateformat.backends.spark.sources.source import Range, RangeEnumerator, SparkSource
from stateformat.errors import CheckpointError, InvalidInput, InvalidState
from tests.spark.spark_ranges import NOON_MS, ROWS, Folder, Numbers, names, numbers, only_n, ranges, restored
from tests.worlds.dataflow import Chunks, rows

pytestmark = pytest.mark.spark

PAGE = Path(__file__).resolve().parents[2] / "docs" / "spark-sources.md"


def test_a_source_that_goes_on_has_nothing_now_and_then_more(quick: Any) -> None:
    there = [15]
    enumerator = SparkSource(Numbers(there), schema=ROWS).enumerator()
    assert [numbers(quick, found) for found in ranges(quick, enumerator)] == [list(range(10)), list(range(10, 15))]
    assert enumerator.next_range(quick) is NoSplit.LATER
    there[0] = 17
    assert numbers(quick, enumerator.next_range(quick)) == [15, 16]
    assert enumerator.next_split(0, 4) is NoSplit.LATER


@pytest.mark.parametrize(
    ("given", "declared", "fits"),
    [
        (pa.array([1, None], pa.int32()), pa.int64(), True),
        (pa.array([1, None], pa.int64()), pa.int16(), True),
        (pa.array([0.5], pa.float32()), pa.float64(), True),
        (pa.array([[1], None], pa.list_(pa.int32())), pa.list_(pa.int64()), True),
        (pa.array([0], pa.timestamp("us", "UTC")), pa.timestamp("us", "Europe/Paris"), True),
        (pa.array([1, 70_000], pa.int64()), pa.int16(), False),
    ],
)
def test_rows_are_cast_to_the_declared_types_if_that_changes_no_value(
    given: pa.Array, declared: pa.DataType, fits: bool
) -> None:
    schema = pa.schema({"n": declared})
    batch = pa.record_batch({"n": given})
    check_fits("rows", from_arrow_schema(batch.schema), schema)
    if fits:
        assert to_arrow(batch, schema).schema == schema
        assert to_arrow(batch, schema)["n"].to_pylist() == given.cast(declared).to_pylist()
    else:
        with pytest.raises(InvalidInput, match=r"column 'n' of a Spark source is int64.*70000.*Cast it"):
            to_arrow(batch, schema)


@pytest.mark.parametrize("declared", [pa.string(), pa.float32(), pa.timestamp("us")])
def test_types_that_a_cast_would_change_are_refused(declared: pa.DataType) -> None:
    with pytest.raises(InvalidInput, match="Column 'n' of rows is int64, and its source declares"):
        check_fits("rows", from_arrow_schema(pa.schema({"n": pa.int64()})), pa.schema({"n": declared}))


def test_readers_are_told_of_the_end_only_when_the_epoch_of_the_last_range_is_over(quick: Any) -> None:
    source = SparkSource(Numbers([20], end=20), schema=ROWS)
    assert source.bounded
    enumerator = source.enumerator()
    for _ in range(2):
        assert isinstance(enumerator.next_range(quick), Range)
        assert enumerator.next_split(0, 1) is NoSplit.LATER
    for each in (enumerator, restored(source, enumerator.snapshot())):
        assert each.next_split(0, 1) is NoSplit.LATER
        assert each.next_range(quick) is NoSplit.NEVER
        assert each.next_split(0, 1) is NoSplit.NEVER


def test_the_checkpoint_behind_a_range_has_the_position_behind_it(quick: Any) -> None:
    enumerator = SparkSource(Numbers([15]), schema=ROWS).enumerator()
    assert enumerator.snapshot().num_rows == 0
    enumerator.next_range(quick)
    assert enumerator.snapshot().to_pylist() == [
        {"name": None, "number": 1, "text": None},
        {"name": "to", "number": 10, "text": None},
    ]
    assert enumerator.snapshot().schema == RangeEnumerator.columns


Read = Callable[[Any, Range], list[int]]


def a_source_of(kind: str, tmp_path: Path) -> tuple[Callable[[], SparkSource], Read]:
    """A source of 24 numbers that ends, and how to look at its ranges."""
    if kind == "numbers":
        return lambda: SparkSource(Numbers([24], end=24, step=6), schema=ROWS), numbers
    if kind in ("rows", "steps"):
        path = tmp_path / "table.parquet"
        pq.write_table(pa.table({"n": range(24), "at": [n // 3 for n in range(24)]}), path)
        options = {"rows": {"rows_per_epoch": 8}, "steps": {"step": 3, "until": 7}}[kind]

        def table() -> SparkSource:
            offsets = OffsetTable(lambda spark: spark.read.parquet(str(path)), "at", **options)
            return SparkSource(offsets, transform=only_n, schema=ROWS)

        return table, numbers
    folder = Folder(tmp_path / "files")
    for index in range(8):
        folder.add(f"{index}.json", NOON_MS + (index * 7 % 5) * 1000, range(index * 3, index * 3 + 3))
    (folder.path / "_DONE").touch()
    grows = {} if kind == "files" else {"grows": True, "until": "_DONE"}
    window = {"window": datetime.timedelta(0)} if kind == "forgetting" else {}
    return (
        lambda: folder.source(files_per_epoch=3, **grows, **window),
        lambda spark, found: [n for name in names(spark, found) for n in folder.numbers[name]],
    )


@pytest.mark.parametrize("kind", ["files", "growing", "forgetting", "rows", "steps", "numbers"])
def test_any_checkpoint_leads_to_what_is_left_in_the_same_ranges(kind: str, quick: Any, tmp_path: Path) -> None:
    make, read = a_source_of(kind, tmp_path)
    enumerator = make().enumerator()
    snapshots, found = [enumerator.whole()], []
    for part in ranges(quick, enumerator):
        found.append(read(quick, part))
        snapshots.append(enumerator.whole())
    assert found[-1] == read(quick, part)
    assert sorted(chain(*found)) == list(range(24))
    assert len(found) >= 3
    for number, snapshot in enumerate(snapshots[:-1]):
        again = restored(make(), snapshot)
        rest = again.next_range(quick)
        assert again.whole().equals(snapshots[number + 1])
        assert isinstance(rest, Range)
        # Rows are a matter of the two positions; once is enough.
        assert number != 1 or read(quick, rest) == found[number]
    assert restored(make(), snapshots[-1]).next_range(quick) is NoSplit.NEVER


@pytest.mark.parametrize("position", [[("a", 1)], {"a": 1.5}, {1: 1}, {"a": None}, {"a": True}, {"a": 2**63}])
def test_a_position_that_cannot_be_kept_is_refused(position: Any) -> None:
    class Wrong(Numbers):
        def first(self, spark: Any) -> Position:
            return position  # type: ignore[no-any-return]

    with pytest.raises(InvalidInput, match="a position"):
        SparkSource(Wrong([1]), schema=ROWS).enumerator().next_range(None)  # type: ignore[arg-type]


def test_the_columns_that_spark_has_are_taken_where_none_are_declared(quick: Any) -> None:
    doubled = SparkSource(Numbers([1]), transform=lambda rows: rows.selectExpr("n", "n * 2 as twice"), spark=quick)
    assert doubled.schema == pa.schema([("n", pa.int64()), ("twice", pa.int64())])
    assert SparkSource(Numbers([1])).schema == ROWS


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (["n", "rand() as r"], "computes something else each time"),
        (["n", "null as nothing"], "'nothing' of Numbers is void"),
        (["n", "array(null) as nothing"], "'nothing' of Numbers is made of void"),
        (["n", "map() as nothing"], "'nothing' of Numbers is made of void"),
        (["parse_json('1') as some"], "'some' of Numbers is variant"),
        (["struct(parse_json('1')) as some"], "'some' of Numbers is made of variant"),
        (["n", "n"], "two columns named 'n'"),
        (["make_ym_interval(1, 1) as i"], "a type that Arrow does not have"),
        (lambda rows: None, "returned NoneType"),
        (lambda rows: rows.sparkSession.readStream.format("rate").load(), "is a streaming DataFrame"),
    ],
)
def test_a_transformation_that_cannot_be_run_again_or_kept_is_refused(transform: Any, words: str, quick: Any) -> None:
    by = transform if callable(transform) else lambda rows: rows.selectExpr(*transform)
    with pytest.raises(InvalidInput, match=re.escape(words)):
        SparkSource(Numbers([1]), transform=by, spark=quick)


def test_a_source_without_columns_and_session_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    def nothing() -> None:
        raise PySparkRuntimeError("NO_ACTIVE_OR_DEFAULT_SESSION", {})

    monkeypatch.setattr(SparkSession, "active", nothing)
    with pytest.raises(CheckpointError, match="no session is active"):
        SparkSource(Numbers([1]))


TIMED = pa.schema([("at", pa.int64())])


def timed(*times: int) -> pa.RecordBatch:
    return pa.record_batch({"at": pa.array(times, pa.int64())})


class Reader:
    """A reader of a source of times, with what it has emitted."""

    def __init__(self, out_of_order_us: int = 0) -> None:
        self.emitted: list[int] = []
        source = pickle.loads(pickle.dumps(SparkSource(Numbers([0]), schema=TIMED)))
        emit = lambda batch: self.emitted.extend(batch["at"].to_pylist())  # noqa: E731
        self.reader = SourceReader("source", source, EventTime("at", out_of_order_us), 0, lambda: 0, emit)

    def read(self) -> tuple[int, int | None]:
        reading = self.reader.read()
        return reading.rows, reading.watermark


def test_the_watermark_comes_behind_all_rows_of_a_range_in_every_epoch() -> None:
    reader = Reader(out_of_order_us=1)
    for epoch, (first, second) in enumerate([((30, 10), (20,)), ((60, 40), (35,))]):
        before = None if epoch == 0 else 29
        buffer = RowBuffer(f"epoch-{epoch}")
        reader.reader.assign(buffer.split)
        assert reader.read() == (0, before)
        buffer.add(timed(*first))
        assert [reader.read(), reader.read()] == [(2, before), (0, before)]
        reader.reader.assign(NoSplit.LATER)
        buffer.add(timed(*second))
        buffer.close()
        assert [reader.read(), reader.read()] == [(1, before), (0, [29, 59][epoch])]
        assert reader.reader.rows().num_rows == 0
    assert reader.emitted == [30, 10, 20, 60, 40, 35]
    reader.reader.assign(NoSplit.NEVER)
    assert reader.reader.read().ended


def test_a_reader_that_got_no_rows_is_told_how_far_the_range_has_come() -> None:
    reader, buffer = Reader(), RowBuffer("epoch")
    reader.reader.assign(buffer.split)
    for newest in (7, 50, 20):
        buffer.observe(newest)
    buffer.add(timed())
    buffer.close()
    assert [reader.read() for _ in range(2)] == [(0, None), (0, 50)]


def test_time_stands_still_while_any_unordered_split_is_held() -> None:
    source = Chunks(splits_per_reader=None, a=[rows([5])], b=[rows([1]), rows([9])])
    source.unordered = True
    reader = SourceReader("source", source, EventTime("value"), 0, lambda: 0, lambda batch: None)
    for split in (Split("a", b""), Split("b", b""), NoSplit.LATER):
        reader.assign(split)
    assert [reader.read().watermark for _ in range(5)] == [None, None, None, None, 9]


def test_a_buffer_is_read_once_and_here_only() -> None:
    buffer = RowBuffer("epoch")
    source: Any = SparkSource(Numbers([0]), schema=TIMED)
    buffer.add(timed(1, 2))
    buffer.close()
    assert [(chunk.batch.num_rows, chunk.position) for chunk in source.read(buffer.split, None)] == [(2, 2)]
    with pytest.raises(InvalidState, match="after its buffer was closed"):
        buffer.add(timed(3))
    with pytest.raises(InvalidState, match="the rows before were given already"):
        source.read(buffer.split._replace(position=2), None)
    split = buffer.split
    del buffer
    with pytest.raises(InvalidState, match="this process does not have its rows"):
        source.read(split, None)


def test_a_source_goes_to_workers_without_anything_of_spark_or_of_the_user(quick: Any) -> None:
    lock = threading.Lock()  # what no pickle takes
    table = OffsetTable(lambda _: (lock, quick)[1].range(3).toDF("n"), "n")
    source = SparkSource(table, transform=lambda rows: rows if lock else None, spark=quick)
    sent = pickle.loads(pickle.dumps(source))
    assert (sent.schema, sent.bounded, sent.unordered) == (source.schema, True, True)
    assert sent.enumerator().columns == source.enumerator().columns
    assert sent.enumerator().snapshot().num_rows == 0
    with pytest.raises(InvalidInput, match="Ask the one in the driver"):
        sent.enumerator().next_range(quick)
    assert numbers(quick, copy.copy(source).enumerator().next_range(quick)) == [0, 1, 2]


class StandIn:
    """A session whose reader does what Kafka's does. ``log``: the values of each partition."""

    def __init__(self, session: Any, log: Mapping[str, Sequence[str]]) -> None:
        self.session = session
        self.log = log
        self.given: dict[str, str] = {}
        self.read = self

    def format(self, name: str) -> StandIn:
        assert name == "kafka"
        return self

    def option(self, name: str, value: str) -> StandIn:
        return self.options(**{name: value})

    def options(self, **options: str) -> StandIn:
        self.given |= options
        return self

    def load(self) -> Any:
        assert self.given["kafka.bootstrap.servers"] == "broker:9092"
        topic = self.given["subscribe"]
        start, end = (json.loads(self.given[name])[topic] for name in ("startingOffsets", "endingOffsets"))
        assert start.keys() == end.keys()
        values = [value for name, values in self.log.items() for value in values[start.get(name, 0) : end.get(name, 0)]]
        column = pa.array([value.encode() for value in values], pa.binary())
        return self.session.createDataFrame(pa.table({"value": column}))


def test_the_kafka_source_of_the_page_reads_each_offset_once(quick: Any) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    page: dict[str, Any] = {}
    exec(next(code for code in blocks if "class KafkaTopic" in code), page)
    log = {"0": ["a", "b", "c", "d"], "1": ["x"], "2": ["y"]}
    there = {0: 2, 1: 1}
    estimates = []

    class Topic(page["KafkaTopic"]):  # type: ignore[misc,name-defined]
        def _edges(self, spark: Any, *, end: bool) -> dict[int, int]:
            return dict(there) if end else dict.fromkeys(there, 0)

        def _read(self, session: Any, starting: str, ending: str) -> Any:
            return super()._read(StandIn(session, log), starting, ending)

        def rows_estimate(self, start: Position, stop: Position) -> Any:
            estimates.append(super().rows_estimate(start, stop))
            return estimates[-1]

    source = SparkSource(
        Topic("broker:9092", "orders", rows_per_partition=1),
        transform=lambda rows: rows.selectExpr("cast(value as string) as value"),
        schema={"value": pa.string()},
    )
    enumerator, found = source.enumerator(), []
    while len(found) < 5 and isinstance(part := enumerator.next_range(quick), Range):
        found.append(sorted(row[0] for row in part.frame(quick).collect()))
        enumerator = restored(source, enumerator.snapshot())
        if len(found) == 2:
            there |= {0: 4, 2: 1}
    assert found == [["a", "x"], ["b"], ["c", "y"], ["d"]]
    assert estimates == [2, 1, 2, 1]
    assert enumerator.next_range(quick) is NoSplit.LATER
    assert not source.bounded
