"""DataFrames as sources: Spark's own streaming sources, directories and tables."""

from __future__ import annotations

import copy
import datetime
import json
import pickle
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from stateformat.backends.dataflow import EventTime, NoSplit, Split
from stateformat.backends.dataflow.source_reader import SourceReader
from stateformat.backends.spark import frames as mail
from stateformat.backends.spark.arrow import arrow_schema_of, check_fits, to_arrow
from stateformat.backends.spark.epoch import column_of
from stateformat.backends.spark.files import DirectoryFrames
from stateformat.backends.spark.frames import DataFrameInput, InputEncoder
from stateformat.backends.spark.offsets import OffsetTable, Position
from stateformat.backends.spark.source import Range, RangeEnumerator, RowBuffer, SparkSource
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, InvalidState
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


# ---- directories as sources of DataFrames: every file once, whatever comes, goes and restarts

DAY_MS = 24 * 3600 * 1000


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An empty directory."""
    return Folder(tmp_path / "in")


@pytest.mark.parametrize("seed", range(5))
def test_every_file_is_read_once_whatever_comes_goes_and_restarts(seed: int, quick: Any, folder: Folder) -> None:
    draw = random.Random(seed)
    window_ms = draw.choice([50, 400, 5000])
    window = datetime.timedelta(milliseconds=window_ms)
    source = folder.source(grows=True, files_per_epoch=draw.choice([None, 1, 3]), window=window)
    enumerator, read, clock_ms = source.enumerator(), Counter[str](), NOON_MS
    for step in range(20):
        clock_ms += draw.randrange(200)
        for each in range(draw.choice([0, 0, 1, 4])):
            # Late, but less than the window behind the newest that there ever was.
            folder.add(f"{draw.randrange(1000)}-{step}-{each}.json", clock_ms - draw.randrange(window_ms), [1])
        for _ in range(draw.choice([0, 1, 2])):
            found = enumerator.next_range(quick)
            if isinstance(found, Range):
                read.update(names(quick, found))
        if read and draw.random() < 0.3:
            (folder.path / draw.choice(sorted(read))).unlink(missing_ok=True)
        if draw.random() < 0.3:
            enumerator = restored(source, enumerator.whole())
        assert max(read.values(), default=1) == 1
    for found in ranges(quick, enumerator):
        read.update(names(quick, found))
    assert read == Counter(folder.numbers.keys())
    kept = pc.drop_null(enumerator.whole()["text"]).to_pylist()
    times = [int(text.split("@")[1]) for text in kept]
    assert max(times) - min(times) <= max(window_ms, 200 * 20)


def test_what_is_there_at_the_start_is_read_in_order_of_time_and_nothing_else(quick: Any, folder: Folder) -> None:
    for name, seconds in (("b", 1), ("a", 3), ("c", 1), ("d", 2), ("_hidden", 0), (".temporary", 0)):
        folder.add(f"{name}.json", NOON_MS + seconds * 1000, [ord(name[0])])
    source = folder.source(files_per_epoch=2)
    assert source.bounded
    enumerator = source.enumerator()
    first = names(quick, enumerator.next_range(quick))
    folder.add("late.json", NOON_MS, [0])
    rest = [names(quick, each) for each in ranges(quick, enumerator)]
    assert [first, *rest] == [["b.json", "c.json"], ["a.json", "d.json"]]
    assert enumerator.next_range(quick) is NoSplit.NEVER


def test_an_epoch_takes_so_many_bytes_but_one_file_in_any_case(quick: Any, folder: Folder) -> None:
    for index, count in enumerate([1, 1, 50, 1, 1, 1]):
        folder.add(f"{index}.json", NOON_MS + index, [0] * count)
    enumerator = folder.source(bytes_per_epoch=20).enumerator()
    assert [len(names(quick, each)) for each in ranges(quick, enumerator)] == [2, 1, 2, 1]


@pytest.mark.parametrize("until", ["_DONE", "DONE"])
def test_an_empty_directory_has_ended_unless_it_grows_until_a_file(until: str, quick: Any, folder: Folder) -> None:
    assert folder.source().enumerator().next_range(quick) is NoSplit.NEVER
    assert not folder.source(grows=True).bounded
    growing = folder.source(grows=True, until=until).enumerator()
    assert growing.next_range(quick) is NoSplit.LATER
    folder.add("1.json", NOON_MS, [7])
    (folder.path / until).write_text("yes")
    assert names(quick, growing.next_range(quick)) == ["1.json"]
    assert growing.next_range(quick) is NoSplit.NEVER


def test_a_directory_that_is_not_there_is_told_of_when_it_is_read_and_not_before(quick: Any, tmp_path: Path) -> None:
    files = DirectoryFrames(tmp_path / "in", "json", schema="n bigint")
    source = SparkSource(files, transform=lambda rows: rows.selectExpr("n", "_metadata.file_path as of"), spark=quick)
    assert source.schema == pa.schema([("n", pa.int64()), ("of", pa.string())])
    with pytest.raises(InvalidInput, match=r"does not exist, or is no directory\. Make it"):
        source.enumerator().next_range(quick)


@pytest.mark.parametrize(("later_ms", "again"), [(0, [1, 2]), (1, [3]), (1, [1])], ids=["grown", "replaced", "touched"])
def test_a_file_that_is_written_again_is_refused(later_ms: int, again: list[int], quick: Any, folder: Folder) -> None:
    folder.add("1.json", NOON_MS, [1])
    enumerator = folder.source(grows=True).enumerator()
    assert names(quick, enumerator.next_range(quick)) == ["1.json"]
    folder.add("1.json", NOON_MS + later_ms, again)
    with pytest.raises(InvalidInput, match=r"'1\.json'.*had 9 bytes.*stay as they are") as caught:
        enumerator.next_range(quick)
    assert caught.value.kind is ErrorKind.OBJECT_SIZE_DIFFERS


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_changes_between_two_tries_of_an_epoch_is_refused(grows: bool, quick: Any, folder: Folder) -> None:
    folder.add("1.json", NOON_MS, [1])
    found = folder.source(grows=grows).enumerator().next_range(quick)
    assert numbers(quick, found) == [1]
    folder.add("1.json", NOON_MS, [1, 2])
    with pytest.raises(InvalidInput, match="has 18 bytes"):
        names(quick, found)
    (folder.path / "1.json").unlink()
    with pytest.raises(InvalidInput, match="is gone"):
        names(quick, found)


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_changes_while_spark_reads_it_is_refused_before_its_rows_are_published(
    grows: bool, quick: Any, folder: Folder
) -> None:
    folder.add("1.json", NOON_MS, [1])
    found = folder.source(grows=grows).enumerator().next_range(quick)
    assert isinstance(found, Range)
    frame = found.frame(quick)
    folder.add("1.json", NOON_MS, [1, 2, 3])
    # Spark knows the length that the file had, reads the line that begins there, and says nothing.
    assert [row.n for row in frame.collect()] == [1, 2]
    with pytest.raises(InvalidInput, match=r"had 9 bytes of .* and has 27 bytes"):
        found.check(quick)
    folder.add("1.json", NOON_MS, [1])
    found.check(quick)


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_that_comes_later_than_the_window_allows_is_refused(restart: bool, quick: Any, folder: Folder) -> None:
    source = folder.source(grows=True, window=datetime.timedelta(days=1))
    enumerator = source.enumerator()
    folder.add("old.json", NOON_MS, [1])
    enumerator.next_range(quick)
    folder.add("new.json", NOON_MS + 2 * DAY_MS, [2])
    assert names(quick, enumerator.next_range(quick)) == ["new.json"]
    assert enumerator.whole().to_pylist()[1:] == [
        {"name": "new.json", "number": None, "text": f"9@{NOON_MS + 2 * DAY_MS}"},
        {"name": "/floor", "number": NOON_MS + DAY_MS, "text": None},
        {"name": "/forgotten", "number": 1, "text": None},
    ]
    assert enumerator.next_range(quick) is NoSplit.LATER
    if restart:
        enumerator = restored(source, enumerator.whole())
        assert enumerator.next_range(quick) is NoSplit.LATER
    else:
        # One goes and one comes: their number says nothing, but this process has seen who was
        # there.
        (folder.path / "old.json").unlink()
    folder.add("late.json", NOON_MS + 5, [4])
    with pytest.raises(InvalidInput, match="window of 1 day") as caught:
        enumerator.next_range(quick)
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED
    if restart:
        with pytest.raises(InvalidInput, match=r"has 2 files from before 2023-11-15 .* of which 1 were read"):
            restored(source, enumerator.whole()).next_range(quick)


@pytest.mark.parametrize(
    ("gone", "name", "later_ms", "words"),
    [
        (None, "0.json", 5000, r"'0\.json'.*had 9 bytes"),
        # One goes and one comes: only who was there before says so.
        ("0.json", "late.json", 500, "window of 0:00:00"),
        ("0.json", "1.json", 5000, r"'1\.json'.*had 9"),
    ],
    ids=["again", "late", "again for another that went"],
)
def test_a_file_is_refused_after_each_restart_until_it_is_mended(
    gone: str | None, name: str, later_ms: int, words: str, quick: Any, folder: Folder
) -> None:
    source = folder.source(grows=True, window=datetime.timedelta(0))
    enumerator = source.enumerator()
    for index in range(3):
        folder.add(f"{index}.json", NOON_MS + index * 1000, [index])
        assert names(quick, enumerator.next_range(quick)) == [f"{index}.json"]
    assert enumerator.next_range(quick) is NoSplit.LATER
    if gone is not None:
        (folder.path / gone).unlink()
    folder.add(name, NOON_MS + later_ms, [8, 9])
    for _ in range(3):
        with pytest.raises(InvalidInput, match=words):
            enumerator.next_range(quick)
        enumerator = restored(source, enumerator.whole())
    folder.add(name, NOON_MS + 9000, [8, 9])
    assert names(quick, enumerator.next_range(quick)) == [name]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"until": "_DONE"}, "Give grows=True too"),
        ({"files_per_epoch": 0}, "files_per_epoch is 0"),
        ({"window": datetime.timedelta(-1)}, "must be at least 0"),
    ],
)
def test_a_directory_refuses_options_that_say_nothing(options: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(words)):
        DirectoryFrames("in", **options)


@pytest.mark.parametrize("path", ["../secret.json", "below/../../secret.json", ".."])
def test_a_position_that_leaves_the_directory_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="does not lie in its directory"):
        DirectoryFrames(tmp_path).latest(None, {"1.json": "5@1", path: "5@1"})  # type: ignore[arg-type]


ODD = ["a b.json", "[x]{1}*?.json", "é.json", "%20.json", "back\\slash.json", "x/y z/c.json", "x/d.json"]


def test_spark_lists_the_same_files_whatever_their_names(
    quick: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path / "in [1]")
    for index, name in enumerate([*ODD, "_no.json", ".no.json", "x/_no/x.json", "no.csv", "no.json._COPYING_"]):
        folder.add(name, NOON_MS + index, [index])
    options: dict[str, Any] = {"recursive": True, "pattern": "*.json", "grows": True, "until": "no.csv"}
    ours = folder.source(**options).enumerator()
    assert [numbers(quick, each) for each in ranges(quick, ours)] == [list(range(len(ODD)))]
    monkeypatch.setattr(DirectoryFrames, "_local", lambda self, spark: None)
    theirs = folder.source(**options).enumerator()
    part = theirs.next_range(quick)
    assert numbers(quick, part) == numbers(quick, part) == list(range(len(ODD)))
    assert theirs.next_range(quick) is NoSplit.NEVER
    assert theirs.whole().equals(ours.whole())
    assert {"x/y z/c.json", "[x]{1}*?.json"} <= set(theirs.whole()["name"].to_pylist())
    nowhere = SparkSource(DirectoryFrames(tmp_path / "nowhere", schema="n bigint"), schema=ROWS)
    with pytest.raises(InvalidInput, match="does not exist, or is no directory"):
        nowhere.enumerator().next_range(quick)


def test_columns_come_from_the_files_that_are_there_and_from_the_names_of_folders(quick: Any, tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"n": [day * 10]}), tmp_path / f"day={day}" / "x.parquet")
    day_of = "cast(regexp_extract(_metadata.file_path, 'day=([0-9]+)', 1) as int) as day"
    source = SparkSource(
        DirectoryFrames(tmp_path, recursive=True),
        transform=lambda rows: rows.selectExpr("n", day_of).where("day > 1"),
        spark=quick,
    )
    assert source.schema == pa.schema([("n", pa.int64()), ("day", pa.int32())])
    (found,) = ranges(quick, source.enumerator())
    assert [tuple(row) for row in found.frame(quick).collect()] == [(20, 2)]
    with pytest.raises(InvalidInput, match="has no files yet"):
        SparkSource(DirectoryFrames(tmp_path, pattern="*.none"), spark=quick)


# ---- tables as sources of DataFrames: ranges that leave no row out, columns as declared

UTC = datetime.UTC
WALL = datetime.datetime.fromisoformat


def table_of(spark: Any, offsets: pa.Array) -> Callable[[Any], Any]:
    frame = spark.createDataFrame(pa.table({"n": pa.array(range(len(offsets)), pa.int64()), "at": offsets}))
    return lambda spark: frame


DAYS = [datetime.date(1969, 12, 30) + datetime.timedelta(days=n // 2) for n in range(8)]
# In New York the clock went from two to three, and back from two to one.
WALLS = [WALL("2024-03-10T01:59:59.999999"), WALL("2024-03-10T02:30:00")] + [
    WALL("2024-11-03T01:30:00") + datetime.timedelta(microseconds=n // 2) for n in range(6)
]
TYPES = {
    "tinyint": pa.array([-128, -1, 0, 0, 1, 5, 5, 127], pa.int8()),
    "bigint": pa.array([-(2**63), -1, 0, 0, 1, 5, 5, 2**63 - 1], pa.int64()),
    "date": pa.array(DAYS, pa.date32()),
    "timestamp": pa.array([day.replace(tzinfo=UTC) for day in WALLS], pa.timestamp("us", "UTC")),
    "timestamp_ntz": pa.array(WALLS, pa.timestamp("us")),
    "string": pa.array(["", "9", "A", "A", "a", "é", "é", "\U0001f600"]),
    "decimal": pa.array([Decimal(n) for n in ("-10.00", "-9.00", "0.05", "0.05", "9.00", "10.00", "10.00", "123.45")]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_offsets_of_every_type_part_a_table_exactly(kind: str, quick: Any) -> None:
    session = quick.newSession()
    table = OffsetTable(table_of(session, TYPES[kind]), "at", rows_per_epoch=3)
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    source = SparkSource(table, transform=only_n, schema=ROWS)
    enumerator, found = source.enumerator(), []
    while isinstance(part := enumerator.next_range(session), Range):
        found.append(numbers(session, part))
        enumerator = restored(source, enumerator.snapshot())
    assert part is NoSplit.NEVER
    assert [*chain(*found)] == list(range(8))
    same = TYPES[kind].to_pylist()
    assert all(same[part[-1]] != same[part[-1] + 1] for part in found[:-1])
    assert 2 <= len(found) <= 3


@pytest.mark.parametrize("options", [{"rows_per_epoch": 5}, {"step": 4}, {}], ids=["rows", "steps", "all"])
def test_every_row_of_a_table_that_grows_is_read_once(options: Any, quick: Any) -> None:
    draw = random.Random(len(str(options)))
    offsets: list[int] = []
    table = OffsetTable(
        lambda spark: table_of(spark, pa.array(offsets, pa.int64()))(spark), "at", grows=True, lag=3, **options
    )
    source = SparkSource(table, transform=only_n, schema=ROWS)
    enumerator, read = source.enumerator(), []
    for _ in range(4):
        top = max(offsets, default=0)
        # Behind the greatest by less than the lag, and far above.
        offsets += [max(1, top + draw.randrange(-2, 20)) for _ in range(draw.randrange(1, 6))]
        found = enumerator.next_range(quick)
        if isinstance(found, Range):
            read += numbers(quick, found)
        enumerator = restored(source, enumerator.snapshot())
    for found in ranges(quick, enumerator):
        read += numbers(quick, found)
    assert sorted(read) == [n for n, offset in enumerate(offsets) if offset <= max(offsets) - 3]


def test_a_table_ends_where_it_is_told_once_it_has_come_so_far(quick: Any) -> None:
    offsets = [3, 5]
    table = OffsetTable(lambda spark: table_of(spark, pa.array(offsets))(spark), "at", since=3, until=10)
    source = SparkSource(table, schema=pa.schema([("n", pa.int64()), ("at", pa.int64())]))
    enumerator = source.enumerator()
    assert numbers(quick, enumerator.next_range(quick)) == [1]
    assert enumerator.next_range(quick) is NoSplit.LATER
    offsets += [11, 9]
    assert numbers(quick, enumerator.next_range(quick)) == [3]
    assert enumerator.next_range(quick) is NoSplit.NEVER
    offsets[:] = [4, 20]
    late = source.enumerator()
    assert numbers(quick, late.next_range(quick)) == [0]
    assert late.next_range(quick) is NoSplit.NEVER


@pytest.mark.parametrize(("since", "offsets"), [(None, []), (3, []), (99, [1, 2])])
def test_a_table_of_nothing_has_ended(since: int | None, offsets: list[int], quick: Any) -> None:
    table = OffsetTable(table_of(quick, pa.array(offsets, pa.int64())), "at", since=since)
    assert SparkSource(table, spark=quick).enumerator().next_range(quick) is NoSplit.NEVER


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows_per_epoch": 1, "step": 1}, "both say how much"),
        ({"rows_per_epoch": 0}, "rows_per_epoch is 0"),
        ({"until": 1, "grows": True}, "until=1"),
        ({"lag": 1}, "for a table that grows"),
        ({"since": "x"}, "since='x' is not an offset"),
        ({"since": 9, "until": 9}, "not below until=9"),
        ({"step": 0}, "step=0 cannot be counted"),
        ({"offset": "none"}, "has 0 columns of that name"),
        ({"offset": "price"}, "is of type double"),
        ({"offset": "gap"}, "1 rows of the table of offset 'gap' have no offset"),
    ],
)
def test_a_table_refuses_what_cannot_be_read_exactly(options: dict[str, Any], words: str, quick: Any) -> None:
    frame = quick.sql("select 1L as at, 1.5D as price, cast(null as bigint) as gap")
    read = lambda spark: frame  # noqa: E731
    with pytest.raises(InvalidInput, match=re.escape(words)):
        SparkSource(OffsetTable(read, **{"offset": "at", **options}), spark=quick).enumerator().next_range(quick)


EVERYTHING = """
    select timestamp'2024-03-10 07:00:00.000001Z' as instant, timestamp_ntz'2024-03-10 02:30:00' as wall,
    date'1969-12-31' as day, cast('-12345678901234567890.123' as decimal(38, 3)) as money, cast(1.5 as float) as f,
    -1.5D as d, cast(-1 as tinyint) as b, true as yes, 'é' as text, x'00ff' as bytes,
    array(timestamp'1960-01-01 00:00:00Z', null) as times, map('k', 1, 'l', null) as counts,
    named_struct('x', 1, 'at', timestamp'2024-11-03 05:30:00Z', 'inner', array('a')) as pair
"""
INSTANT = pa.timestamp("us", "UTC")
COLUMNS = pa.schema(
    [
        ("instant", INSTANT),
        ("wall", pa.timestamp("us")),
        ("day", pa.date32()),
        ("money", pa.decimal128(38, 3)),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("b", pa.int8()),
        pa.field("yes", pa.bool_(), nullable=False),
        ("text", pa.string()),
        ("bytes", pa.large_binary()),
        ("times", pa.list_(INSTANT)),
        ("counts", pa.map_(pa.string(), pa.int32())),
        ("pair", pa.struct([("x", pa.int32()), ("at", INSTANT), ("inner", pa.list_(pa.string()))])),
    ]
)
VALUES = {
    "instant": datetime.datetime(2024, 3, 10, 7, 0, 0, 1, UTC),
    "wall": WALL("2024-03-10T02:30:00"),
    "day": datetime.date(1969, 12, 31),
    "money": Decimal("-12345678901234567890.123"),
    "f": 1.5,
    "d": -1.5,
    "b": -1,
    "yes": True,
    "text": "é",
    "bytes": b"\x00\xff",
    "times": [datetime.datetime(1960, 1, 1, tzinfo=UTC), None],
    "counts": [("k", 1), ("l", None)],
    "pair": {"x": 1, "at": datetime.datetime(2024, 11, 3, 5, 30, tzinfo=UTC), "inner": ["a"]},
}


def arrived(spark: Any, found: Range, schema: pa.Schema) -> list[pa.RecordBatch]:
    """What the frames of a range hold."""
    sent = DataFrameInput(found, InputEncoder("in", 1, None, schema)).frame(spark)
    payloads = column_of(sent).collect()[1::2]
    frames = [mail.unpack(payload) for payload in payloads if mail.level_of(payload) == 0]
    elements: list[Any] = [element for frame in frames for _, element in mail.elements(*frame, {"rows of in": schema})]
    return [element.batch for element in elements]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_rows_arrive_in_exactly_the_declared_columns_whatever_the_session_says(zone: str, quick: Any) -> None:
    session = quick.newSession()
    session.conf.set("spark.sql.session.timeZone", zone)
    rows = session.sql(EVERYTHING)
    assert arrow_schema_of("rows", rows.schema).types[:2] == [INSTANT, pa.timestamp("us")]
    table = OffsetTable(lambda session: rows.select("*").withColumn("n", rows.b.cast("int")), "n")
    source = SparkSource(table, transform=lambda rows: rows.select(*reversed(COLUMNS.names)), schema=COLUMNS)
    (found,) = ranges(session, source.enumerator())
    (batch,) = arrived(session, found, COLUMNS)
    assert batch.schema.equals(COLUMNS, check_metadata=True)
    assert str(batch.schema) == str(COLUMNS)
    assert batch.to_pylist() == [VALUES]


def test_columns_are_called_what_they_are_called(quick: Any) -> None:
    called = pa.schema([(name, pa.int64()) for name in ("a.b", "a", "b`q", "*", "ä ö")])
    rows = quick.range(1, 2).selectExpr(
        *(f"id * {n} as `{name.replace('`', '``')}`" for n, name in enumerate(called.names))
    )
    (found,) = ranges(quick, SparkSource(OffsetTable(lambda session: rows, "a"), schema=called).enumerator())
    (batch,) = arrived(quick, found, called)
    assert batch.to_pylist() == [{"a.b": 0, "a": 1, "b`q": 2, "*": 3, "ä ö": 4}]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"n": pa.string()}, "Column 'n' of Numbers is int64, and its source declares string. Cast it"),
        ({"n": INSTANT}, "is int64"),
        ({"n": pa.int64(), "more": pa.int64()}, "has columns ['n'], and its source declares ['n', 'more']"),
        ({"m": pa.int64()}, "Select those"),
    ],
)
def test_other_columns_than_declared_are_refused_before_anything_runs(declared: Any, words: str, quick: Any) -> None:
    found = SparkSource(Numbers([5]), schema=declared).enumerator().next_range(quick)
    assert isinstance(found, Range)
    with pytest.raises(InvalidInput, match=re.escape(words)) as caught:
        found.frame(quick)
    assert caught.value.kind is ErrorKind.SCHEMA_MISMATCH


def test_an_instant_is_no_wall_clock_time(quick: Any) -> None:
    rows = quick.sql("select timestamp_ntz'2024-01-01 00:00:00' as at, 1 as n")
    source = SparkSource(OffsetTable(lambda spark: rows, "n"), schema={"at": INSTANT, "n": pa.int32()})
    words = "is timestamp[us], and its source declares timestamp[us, tz=UTC]"
    with pytest.raises(InvalidInput, match=re.escape(words)):
        next(ranges(quick, source.enumerator())).frame(quick)


def not_null(name: str) -> pa.Field:
    return pa.field(name, pa.int64(), nullable=False)


@pytest.mark.parametrize(
    ("field", "loose", "values", "words"),
    [
        (not_null("c"), pa.int64(), [1, None], "'c' has 1 nulls among 2"),
        (
            pa.field("c", pa.struct([not_null("x")])),
            pa.struct([("x", pa.int64())]),
            [None, {"x": 1}, {"x": None}],
            "'c.x' has 1 nulls among 2",
        ),
        (
            pa.field("c", pa.list_(not_null("item"))),
            pa.list_(pa.int64()),
            [None, [1], [2, None]],
            "'c.item' has 1 nulls",
        ),
        (
            pa.field("c", pa.map_(pa.string(), not_null("value"))),
            pa.map_(pa.string(), pa.int64()),
            [None, [("a", 1)], [("b", None)]],
            "'c.value' has 1 nulls",
        ),
    ],
    ids=["column", "struct", "list", "map"],
)
def test_a_null_where_none_is_declared_is_refused(field: pa.Field, loose: Any, values: list[Any], words: str) -> None:
    given, schema = pa.record_batch({"c": pa.array(values, loose)}), pa.schema([field])
    with pytest.raises(InvalidInput, match=words) as caught:
        to_arrow(given, schema)
    assert caught.value.kind is ErrorKind.NULL_NOT_ALLOWED
    assert to_arrow(given.slice(0, len(values) - 1), schema).schema == schema
