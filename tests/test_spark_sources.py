"""Sources of DataFrames: ranges that are exact whatever grows and whoever restarts, types, and the way to the reader."""

from __future__ import annotations

import copy
import datetime
import json
import os
import pickle
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.backends.dataflow import EventTime, NoSplit, Split
from stateformat.backends.dataflow.chain.source_reader import SourceReader
from stateformat.backends.spark.protocol import DataFrameInput, InputEncoder
from stateformat.backends.spark.protocol.frames import REPORT, elements, unpack
from stateformat.backends.spark.sources import Range, RangeEnumerator, RowBuffer, SparkSource, to_arrow
from stateformat.backends.spark.sources.arrow import arrow_schema_of
from stateformat.backends.spark.sources.files import DirectoryFrames
from stateformat.backends.spark.sources.offset_table import OffsetTable
from stateformat.backends.spark.sources.offsets import Offsets, Position
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, InvalidState
from tests.dataflow_fakes import Chunks, rows

pytestmark = pytest.mark.spark

PAGE = Path(__file__).resolve().parent.parent / "docs" / "spark-sources.md"
ROWS = pa.schema([("n", pa.int64())])
DAY_MS = 24 * 3600 * 1000
NOON_MS = 1_700_000_000_000


@pytest.fixture(scope="module", name="spark")
def quick(spark: Any) -> Any:
    """A session for hundreds of jobs of a few rows: nothing is compiled, and nothing planned again."""
    session = spark.newSession()
    for name, value in {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.leafNodeDefaultParallelism": "1",
    }.items():
        session.conf.set(name, value)
    return session


class Folder:
    """A directory to which files of a few numbers are added, with times that the test chooses."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(exist_ok=True)
        self.numbers: dict[str, list[int]] = {}

    def add(self, name: str, modified_ms: int, numbers: Sequence[int]) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'{{"n": {n}}}\n' for n in numbers))
        os.utime(path, ns=(0, modified_ms * 1_000_000))
        self.numbers[name] = list(numbers)

    def source(self, **options: Any) -> SparkSource:
        files = DirectoryFrames(self.path, "json", schema="n bigint", **options)
        return SparkSource(files, transform=lambda rows: rows.select("n"), schema=ROWS)


class Numbers(Offsets):
    """The numbers up to what ``there`` says, ``step`` at a time. Counts how often it is asked."""

    def __init__(self, there: list[int], *, end: int | None = None, step: int = 10) -> None:
        self.there = there
        self.end = end
        self.step = step
        self.bounded = end is not None

    def sample(self, spark: Any) -> Any:
        return spark.range(0).selectExpr("id as n")

    def first(self, spark: Any) -> Position:
        return {"to": 0}

    def latest(self, spark: Any, position: Position) -> Position:
        return {"to": min(self.there[0], int(position["to"]) + self.step)}

    def ended(self, position: Position) -> bool:
        return position["to"] == self.end

    def frame(self, spark: Any, start: Position, stop: Position) -> Any:
        return spark.range(start["to"], stop["to"]).selectExpr("id as n")


def numbers(spark: Any, found: Range | NoSplit) -> list[int]:
    assert isinstance(found, Range)
    return sorted(row[0] for row in found.frame(spark).collect())


def names(spark: Any, found: Range | NoSplit) -> list[str]:
    """The files of a range: no job runs."""
    assert isinstance(found, Range)
    return sorted(os.path.basename(path) for path in found.frame(spark).inputFiles())  # noqa: PTH119


def ranges(spark: Any, enumerator: RangeEnumerator) -> Iterator[Range]:
    while isinstance(found := enumerator.next_range(spark), Range):
        yield found


def restored(source: SparkSource, rows: pa.Table) -> RangeEnumerator:
    enumerator = source.enumerator()
    enumerator.restore(rows)
    return enumerator


# Ranges of any kind ----------------------------------------------------------------------------------------------------


def test_a_source_that_goes_on_has_nothing_now_and_then_more(spark: Any) -> None:
    there = [15]
    enumerator = SparkSource(Numbers(there), schema=ROWS).enumerator()
    assert [numbers(spark, found) for found in ranges(spark, enumerator)] == [list(range(10)), list(range(10, 15))]
    assert enumerator.next_range(spark) is NoSplit.LATER
    there[0] = 17
    assert numbers(spark, enumerator.next_range(spark)) == [15, 16]
    assert enumerator.next_split(0, 4) is NoSplit.LATER


def test_readers_are_told_of_the_end_only_when_the_epoch_of_the_last_range_is_over(spark: Any) -> None:
    source = SparkSource(Numbers([20], end=20), schema=ROWS)
    assert source.bounded
    enumerator = source.enumerator()
    for expected in (list(range(10)), list(range(10, 20))):
        assert numbers(spark, enumerator.next_range(spark)) == expected
        assert enumerator.next_split(0, 1) is NoSplit.LATER
    again = restored(source, enumerator.snapshot())
    for each in (enumerator, again):
        assert each.next_split(0, 1) is NoSplit.LATER
        assert each.next_range(spark) is NoSplit.NEVER
        assert each.next_split(0, 1) is NoSplit.NEVER


def test_the_checkpoint_behind_a_range_has_the_position_behind_it(spark: Any) -> None:
    enumerator = SparkSource(Numbers([15]), schema=ROWS).enumerator()
    assert enumerator.snapshot().num_rows == 0
    enumerator.next_range(spark)
    assert enumerator.snapshot().to_pylist() == [
        {"name": None, "number": 1, "text": None},
        {"name": "to", "number": 10, "text": None},
    ]
    assert enumerator.snapshot().schema == RangeEnumerator.columns


def kinds(tmp_path: Path) -> Mapping[str, Callable[[], SparkSource]]:
    """Sources that end, with 40 numbers each."""
    folder = Folder(tmp_path / "files")
    for index in range(8):
        folder.add(f"{index}.json", NOON_MS + (index * 7 % 5) * 1000, range(index * 5, index * 5 + 5))
    (folder.path / "_DONE").touch()
    table = tmp_path / "table.parquet"
    pq.write_table(pa.table({"n": range(40), "at": [n // 3 for n in range(40)]}), table)
    read = lambda spark: spark.read.parquet(str(table))  # noqa: E731

    def ordered(**options: Any) -> SparkSource:
        return SparkSource(OffsetTable(read, "at", **options), transform=lambda rows: rows.select("n"), schema=ROWS)

    return {
        "files": lambda: folder.source(files_per_epoch=3),
        "growing": lambda: folder.source(files_per_epoch=3, grows=True, until="_DONE"),
        "forgetting": lambda: folder.source(files_per_epoch=3, grows=True, until="_DONE", window=datetime.timedelta(0)),
        "rows": lambda: ordered(rows_per_epoch=16),
        "steps": lambda: ordered(step=4, until=13),
        "numbers": lambda: SparkSource(Numbers([40], end=40), schema=ROWS),
    }


@pytest.mark.parametrize("kind", ["files", "growing", "forgetting", "rows", "steps", "numbers"])
def test_whoever_goes_on_from_any_checkpoint_reads_what_is_left_and_every_range_is_the_same_again(
    kind: str, spark: Any, tmp_path: Path
) -> None:
    make = kinds(tmp_path)[kind]
    enumerator = make().enumerator()
    snapshots, found = [enumerator.snapshot()], []
    for part in ranges(spark, enumerator):
        found.append(numbers(spark, part))
        assert len(found) > 2 or found[-1] == numbers(spark, part)
        snapshots.append(enumerator.snapshot())
    assert sorted(chain(*found)) == list(range(40))
    assert len(found) >= 3
    for read, snapshot in enumerate(snapshots[:-1]):
        again = restored(make(), snapshot)
        rest = again.next_range(spark)
        assert again.snapshot().equals(snapshots[read + 1])
        # Rows are a matter of the two positions; once is enough.
        assert read != 1 or numbers(spark, rest) == found[read]
    assert restored(make(), snapshots[-1]).next_range(spark) is NoSplit.NEVER


# Directories -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_every_file_of_a_directory_that_grows_is_read_once_whatever_comes_goes_and_restarts(
    seed: int, spark: Any, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    folder = Folder(tmp_path / "in")
    window = datetime.timedelta(milliseconds=draw.choice([50, 400, 5000]))
    source = folder.source(grows=True, files_per_epoch=draw.choice([None, 1, 3]), window=window)
    enumerator, read, clock_ms = source.enumerator(), Counter[str](), NOON_MS
    for step in range(25):
        clock_ms += draw.randrange(200)
        for each in range(draw.choice([0, 0, 1, 4])):
            # Late, but less than the window behind the newest that there ever was.
            late_ms = draw.randrange(window // datetime.timedelta(milliseconds=1))
            folder.add(f"{draw.randrange(1000)}-{step}-{each}.json", clock_ms - late_ms, [1])
        for _ in range(draw.choice([0, 1, 2])):
            found = enumerator.next_range(spark)
            if isinstance(found, Range):
                read.update(names(spark, found))
        if read and draw.random() < 0.3:
            (folder.path / draw.choice(sorted(read))).unlink(missing_ok=True)
        if draw.random() < 0.3:
            enumerator = restored(source, enumerator.snapshot())
        assert max(read.values(), default=1) == 1
    for found in ranges(spark, enumerator):
        read.update(names(spark, found))
    assert read == Counter(folder.numbers.keys())
    kept = enumerator.snapshot().filter(pa.compute.is_valid(enumerator.snapshot()["text"]))["text"].to_pylist()
    newest = max(int(text.split("@")[1]) for text in kept)
    assert newest - min(int(text.split("@")[1]) for text in kept) <= max(window.total_seconds() * 1000, 200 * 25)


def test_what_is_there_at_the_start_is_read_in_order_of_time_and_nothing_that_comes_later(
    spark: Any, tmp_path: Path
) -> None:
    folder = Folder(tmp_path / "in")
    for name, seconds in (("b", 1), ("a", 3), ("c", 1), ("d", 2), ("_hidden", 0), (".temporary", 0)):
        folder.add(f"{name}.json", NOON_MS + seconds * 1000, [ord(name[0])])
    source = folder.source(files_per_epoch=2)
    assert source.bounded
    enumerator = source.enumerator()
    first = names(spark, enumerator.next_range(spark))
    folder.add("late.json", NOON_MS, [0])
    assert [first, *(names(spark, each) for each in ranges(spark, enumerator))] == [
        ["b.json", "c.json"],
        ["a.json", "d.json"],
    ]
    assert enumerator.next_range(spark) is NoSplit.NEVER


def test_an_epoch_takes_so_many_bytes_but_one_file_in_any_case(spark: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in")
    for index, count in enumerate([1, 1, 50, 1, 1, 1]):
        folder.add(f"{index}.json", NOON_MS + index, [0] * count)
    enumerator = folder.source(bytes_per_epoch=20).enumerator()
    assert [len(names(spark, each)) for each in ranges(spark, enumerator)] == [2, 1, 2, 1]


def test_an_empty_directory_has_ended_unless_it_grows(spark: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in")
    assert folder.source().enumerator().next_range(spark) is NoSplit.NEVER
    growing = folder.source(grows=True, until="_DONE").enumerator()
    assert growing.next_range(spark) is NoSplit.LATER
    folder.add("1.json", NOON_MS, [7])
    (folder.path / "_DONE").touch()
    assert numbers(spark, growing.next_range(spark)) == [7]
    assert growing.next_range(spark) is NoSplit.NEVER
    assert not folder.source(grows=True).bounded


def test_a_directory_that_is_not_there_is_told_of_when_it_is_read_and_not_before(spark: Any, tmp_path: Path) -> None:
    files = DirectoryFrames(tmp_path / "in", "json", schema="n bigint")
    source = SparkSource(files, transform=lambda rows: rows.selectExpr("n", "_metadata.file_path as of"), spark=spark)
    assert source.schema == pa.schema([("n", pa.int64()), ("of", pa.string())])
    with pytest.raises(InvalidInput, match="does not exist, or is no directory"):
        source.enumerator().next_range(spark)


def test_the_file_that_tells_of_the_end_is_no_input_whatever_it_is_called(spark: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in")
    folder.add("1.json", NOON_MS, [7])
    growing = folder.source(grows=True, until="DONE").enumerator()
    assert names(spark, growing.next_range(spark)) == ["1.json"]
    (folder.path / "DONE").write_text("yes")
    assert growing.next_range(spark) is NoSplit.NEVER


@pytest.mark.parametrize("how", ["grown", "touched", "replaced"])
def test_a_file_that_was_read_and_is_written_again_is_refused(how: str, spark: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in")
    folder.add("1.json", NOON_MS, [1])
    enumerator = folder.source(grows=True).enumerator()
    assert numbers(spark, enumerator.next_range(spark)) == [1]
    folder.add("1.json", NOON_MS + (0 if how == "grown" else 1), [1, 2] if how == "grown" else [3])
    with pytest.raises(InvalidInput, match=r"'1\.json'.*was found with 9 bytes.*stay as they are") as caught:
        enumerator.next_range(spark)
    assert caught.value.kind is ErrorKind.OBJECT_SIZE_DIFFERS


@pytest.mark.parametrize("grows", [True, False])
def test_a_file_that_changes_between_two_tries_of_an_epoch_is_refused(grows: bool, spark: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in")
    folder.add("1.json", NOON_MS, [1])
    found = folder.source(grows=grows).enumerator().next_range(spark)
    assert numbers(spark, found) == [1]
    folder.add("1.json", NOON_MS, [1, 2])
    with pytest.raises(InvalidInput, match="has 18 bytes"):
        numbers(spark, found)
    (folder.path / "1.json").unlink()
    with pytest.raises(InvalidInput, match="is gone"):
        numbers(spark, found)


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_that_comes_later_than_the_window_allows_is_never_passed_over(
    restart: bool, spark: Any, tmp_path: Path
) -> None:
    folder = Folder(tmp_path / "in")
    source = folder.source(grows=True, window=datetime.timedelta(days=1))
    enumerator = source.enumerator()
    folder.add("old.json", NOON_MS, [1])
    enumerator.next_range(spark)
    folder.add("new.json", NOON_MS + 2 * DAY_MS, [2])
    assert names(spark, enumerator.next_range(spark)) == ["new.json"]
    assert enumerator.snapshot().to_pylist()[1:] == [
        {"name": "new.json", "number": None, "text": f"9@{NOON_MS + 2 * DAY_MS}"},
        {"name": "/floor", "number": NOON_MS + DAY_MS, "text": None},
        {"name": "/forgotten", "number": 1, "text": None},
    ]
    assert enumerator.next_range(spark) is NoSplit.LATER
    if restart:
        enumerator = restored(source, enumerator.snapshot())
        assert enumerator.next_range(spark) is NoSplit.LATER
    else:
        # One goes and one comes: their number says nothing, but this process has seen who was there.
        (folder.path / "old.json").unlink()
    folder.add("late.json", NOON_MS + 5, [4])
    with pytest.raises(InvalidInput, match="window of 1 day") as caught:
        enumerator.next_range(spark)
    assert caught.value.kind is ErrorKind.LIMIT_EXCEEDED
    if restart:
        with pytest.raises(InvalidInput, match=r"has 2 files from before 2023-11-15 .* of which 1 were read"):
            restored(source, enumerator.snapshot()).next_range(spark)


def test_a_forgotten_file_that_is_written_again_is_refused_where_it_is_known(spark: Any, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "in")
    enumerator = folder.source(grows=True, window=datetime.timedelta(0)).enumerator()
    for index in range(3):
        folder.add(f"{index}.json", NOON_MS + index * 1000, [index])
        assert numbers(spark, enumerator.next_range(spark)) == [index]
    assert enumerator.next_range(spark) is NoSplit.LATER
    folder.add("0.json", NOON_MS + 5000, [0, 9])
    with pytest.raises(InvalidInput, match=r"'0\.json'.*was found with 9 bytes"):
        enumerator.next_range(spark)


@pytest.mark.parametrize("how", ["late", "again"])
def test_a_file_that_was_refused_is_refused_again_when_the_job_starts_again_and_read_when_it_was_mended(
    how: str, spark: Any, tmp_path: Path
) -> None:
    folder = Folder(tmp_path / "in")
    source = folder.source(grows=True, window=datetime.timedelta(0))
    enumerator = source.enumerator()
    for index in range(3):
        folder.add(f"{index}.json", NOON_MS + index * 1000, [index])
        assert numbers(spark, enumerator.next_range(spark)) == [index]
    assert enumerator.next_range(spark) is NoSplit.LATER
    (folder.path / "0.json").unlink()  # One goes and one comes: only who was there before says so.
    name = "late.json" if how == "late" else "1.json"
    folder.add(name, NOON_MS + (500 if how == "late" else 5000), [8, 9])
    for _ in range(3):
        with pytest.raises(
            InvalidInput, match="window of 0:00:00" if how == "late" else r"'1\.json'.*was found with 9"
        ):
            enumerator.next_range(spark)
        enumerator = restored(source, enumerator.snapshot())
    folder.add(name, NOON_MS + 9000, [8, 9])
    assert numbers(spark, enumerator.next_range(spark)) == [8, 9]


ODD = ["a b.json", "[x]{1}*?.json", "é.json", "%20.json", "back\\slash.json", "x/y z/c.json", "x/d.json"]


def test_spark_lists_the_same_files_as_we_do_whatever_they_are_called(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path / "in [1]")
    for index, name in enumerate([*ODD, "_no.json", ".no.json", "x/_no/x.json", "no.csv", "no.json._COPYING_"]):
        folder.add(name, NOON_MS + index, [index])
    options: dict[str, Any] = {"recursive": True, "pattern": "*.json", "grows": True, "until": "no.csv"}
    ours = folder.source(**options).enumerator()
    found = [numbers(spark, each) for each in ranges(spark, ours)]
    assert found == [list(range(len(ODD)))]
    monkeypatch.setattr(DirectoryFrames, "_local", lambda self, spark: None)
    theirs = folder.source(**options).enumerator()
    part = theirs.next_range(spark)
    assert numbers(spark, part) == numbers(spark, part) == found[0]
    assert theirs.next_range(spark) is NoSplit.NEVER
    assert theirs.snapshot().equals(ours.snapshot())
    assert {"x/y z/c.json", "[x]{1}*?.json"} <= set(theirs.snapshot()["name"].to_pylist())
    with pytest.raises(InvalidInput, match="does not exist, or is no directory"):
        SparkSource(DirectoryFrames(tmp_path / "nowhere", schema="n bigint"), schema=ROWS).enumerator().next_range(
            spark
        )


def test_columns_come_from_the_files_that_are_there_and_from_the_names_of_folders(spark: Any, tmp_path: Path) -> None:
    for day in (1, 2):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"n": [day * 10]}), tmp_path / f"day={day}" / "x.parquet")
    day_of = "cast(regexp_extract(_metadata.file_path, 'day=([0-9]+)', 1) as int) as day"
    source = SparkSource(
        DirectoryFrames(tmp_path, recursive=True),
        transform=lambda rows: rows.selectExpr("n", day_of).where("day > 1"),
        spark=spark,
    )
    assert source.schema == pa.schema([("n", pa.int64()), ("day", pa.int32())])
    (found,) = ranges(spark, source.enumerator())
    assert [tuple(row) for row in found.frame(spark).collect()] == [(20, 2)]
    with pytest.raises(InvalidInput, match="has no files yet"):
        SparkSource(DirectoryFrames(tmp_path, pattern="*.none"), spark=spark)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"until": "_DONE"}, "Give grows=True too"),
        ({"files_per_epoch": 0}, "files_per_epoch is 0"),
        ({"window": datetime.timedelta(-1)}, "must be at least 0"),
    ],
)
def test_a_directory_refuses_options_that_say_nothing(options: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        DirectoryFrames("in", **options)


# Tables ----------------------------------------------------------------------------------------------------------------


def table_of(spark: Any, offsets: pa.Array) -> Callable[[Any], Any]:
    frame = spark.createDataFrame(pa.table({"n": pa.array(range(len(offsets)), pa.int64()), "at": offsets}))
    return lambda spark: frame


UTC = datetime.UTC
DAYS = [datetime.date(1969, 12, 30) + datetime.timedelta(days=n // 2) for n in range(8)]
# In New York the clock went from two to three, and back from two to one.
WALL = datetime.datetime.fromisoformat
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
def test_offsets_of_every_type_part_a_table_exactly(kind: str, spark: Any) -> None:
    read = table_of(spark, TYPES[kind])
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        source = SparkSource(
            OffsetTable(read, "at", rows_per_epoch=3), transform=lambda rows: rows.select("n"), schema=ROWS
        )
        enumerator, found = source.enumerator(), []
        while isinstance(part := enumerator.next_range(spark), Range):
            found.append(numbers(spark, part))
            enumerator = restored(source, enumerator.snapshot())
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
    assert part is NoSplit.NEVER
    assert [*chain(*found)] == list(range(8))
    same = TYPES[kind].to_pylist()
    ends = [part[-1] for part in found[:-1]]
    assert all(same[end] != same[end + 1] for end in ends)
    assert 2 <= len(found) <= 3


@pytest.mark.parametrize("seed", range(3))
def test_every_row_of_a_table_that_grows_is_read_once(seed: int, spark: Any) -> None:
    draw = random.Random(seed)
    offsets: list[int] = []
    options = [{"rows_per_epoch": 5}, {"step": 4}, {}][seed]
    source = SparkSource(
        OffsetTable(
            lambda spark: table_of(spark, pa.array(offsets, pa.int64()))(spark), "at", grows=True, lag=3, **options
        ),
        transform=lambda rows: rows.select("n"),
        schema=ROWS,
    )
    enumerator, read = source.enumerator(), []
    for _ in range(5):
        top = max(offsets, default=0)
        # Behind the greatest by less than the lag, and far above.
        offsets += [max(1, top + draw.randrange(-2, 40)) for _ in range(draw.randrange(6))]
        found = enumerator.next_range(spark)
        if isinstance(found, Range):
            read += numbers(spark, found)
        enumerator = restored(source, enumerator.snapshot())
    for found in ranges(spark, enumerator):
        read += numbers(spark, found)
    assert sorted(read) == [n for n, offset in enumerate(offsets) if offset <= max(offsets) - 3]


def test_a_table_ends_where_it_is_told_once_it_has_come_so_far(spark: Any) -> None:
    offsets = [3, 5]
    source = SparkSource(
        OffsetTable(lambda spark: table_of(spark, pa.array(offsets))(spark), "at", since=3, until=10),
        schema=pa.schema([("n", pa.int64()), ("at", pa.int64())]),
    )
    enumerator = source.enumerator()
    assert numbers(spark, enumerator.next_range(spark)) == [1]
    assert enumerator.next_range(spark) is NoSplit.LATER
    offsets += [11, 9]
    assert numbers(spark, enumerator.next_range(spark)) == [3]
    assert enumerator.next_range(spark) is NoSplit.NEVER
    offsets[:] = [4, 20]
    late = source.enumerator()
    assert numbers(spark, late.next_range(spark)) == [0]
    assert late.next_range(spark) is NoSplit.NEVER


@pytest.mark.parametrize(("since", "expected"), [(None, []), (3, []), (99, [])])
def test_a_table_of_nothing_has_ended(since: int | None, expected: list[int], spark: Any) -> None:
    read = table_of(spark, pa.array([] if since != 99 else [1, 2], pa.int64()))
    enumerator = SparkSource(OffsetTable(read, "at", since=since), spark=spark).enumerator()
    assert enumerator.next_range(spark) is NoSplit.NEVER


@pytest.mark.parametrize(
    ("options", "sentence"),
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
def test_a_table_refuses_what_cannot_be_read_exactly(options: dict[str, Any], sentence: str, spark: Any) -> None:
    frame = spark.sql("select 1L as at, 1.5D as price, cast(null as bigint) as gap")
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        SparkSource(
            OffsetTable(lambda spark: frame, **{"offset": "at", **options}), spark=spark
        ).enumerator().next_range(spark)


# Columns ---------------------------------------------------------------------------------------------------------------

EVERYTHING = """
    select timestamp'2024-03-10 07:00:00.000001Z' as instant, timestamp_ntz'2024-03-10 02:30:00' as wall, date'1969-12-31' as day,
    cast('-12345678901234567890.123' as decimal(38, 3)) as money, cast(1.5 as float) as f, -1.5D as d, cast(-1 as tinyint) as b,
    true as yes, 'é' as text, x'00ff' as bytes, array(timestamp'1960-01-01 00:00:00Z', null) as times, map('k', 1, 'l', null) as counts,
    named_struct('x', 1, 'at', timestamp'2024-11-03 05:30:00Z', 'inner', array('a')) as pair
"""
COLUMNS = pa.schema(
    [
        ("instant", pa.timestamp("us", "UTC")),
        ("wall", pa.timestamp("us")),
        ("day", pa.date32()),
        ("money", pa.decimal128(38, 3)),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("b", pa.int8()),
        pa.field("yes", pa.bool_(), nullable=False),
        ("text", pa.string()),
        ("bytes", pa.large_binary()),
        ("times", pa.list_(pa.timestamp("us", "UTC"))),
        ("counts", pa.map_(pa.string(), pa.int32())),
        ("pair", pa.struct([("x", pa.int32()), ("at", pa.timestamp("us", "UTC")), ("inner", pa.list_(pa.string()))])),
    ]
)


def arrived(spark: Any, rows: Any, schema: pa.Schema) -> list[pa.RecordBatch]:
    """What the frames of a DataFrame hold, in the order of its partitions."""
    sent = DataFrameInput(Range(lambda _: rows, "rows"), InputEncoder("in", 1, None, schema)).frame(spark)
    frames = [unpack(pa.py_buffer(row["payload"])) for row in sent.where(f"level < {REPORT}").collect()]
    found = [element for head, rest in frames for _, element in elements(head, rest, {"rows of in": schema})]
    return [element.batch for element in found]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_rows_arrive_in_exactly_the_declared_columns_whatever_the_session_says(zone: str, spark: Any) -> None:
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", zone)
    rows = session.sql(EVERYTHING)
    assert [field.type for field in arrow_schema_of("rows", rows.schema)][:2] == [
        pa.timestamp("us", "UTC"),
        pa.timestamp("us"),
    ]
    table = OffsetTable(lambda session: rows.select("*").withColumn("n", rows.b.cast("int")), "n")
    source = SparkSource(table, transform=lambda rows: rows.drop("n").select(*reversed(COLUMNS.names)), schema=COLUMNS)
    (found,) = ranges(session, source.enumerator())
    (table_found,) = arrived(session, found.frame(session), COLUMNS)
    assert table_found.schema.equals(COLUMNS, check_metadata=True)
    assert str(table_found.schema) == str(COLUMNS)
    utc = lambda *parts: datetime.datetime(*parts, tzinfo=UTC)  # noqa: E731
    assert table_found.to_pylist() == [
        {
            "instant": utc(2024, 3, 10, 7, 0, 0, 1),
            "wall": WALL("2024-03-10T02:30:00"),
            "day": datetime.date(1969, 12, 31),
            "money": Decimal("-12345678901234567890.123"),
            "f": 1.5,
            "d": -1.5,
            "b": -1,
            "yes": True,
            "text": "é",
            "bytes": b"\x00\xff",
            "times": [utc(1960, 1, 1), None],
            "counts": [("k", 1), ("l", None)],
            "pair": {"x": 1, "at": utc(2024, 11, 3, 5, 30), "inner": ["a"]},
        }
    ]


def test_columns_are_called_what_they_are_called(spark: Any) -> None:
    called = pa.schema([(name, pa.int64()) for name in ("a.b", "a", "b`q", "*", "ä ö")])
    rows = spark.range(1, 2).selectExpr(
        *(f"id * {n} as `{name.replace('`', '``')}`" for n, name in enumerate(called.names))
    )
    table = OffsetTable(lambda session: rows, "a")
    (found,) = ranges(spark, SparkSource(table, schema=called).enumerator())
    (arriving,) = arrived(spark, found.frame(spark), called)
    assert arriving.to_pylist() == [{"a.b": 0, "a": 1, "b`q": 2, "*": 3, "ä ö": 4}]


@pytest.mark.parametrize(
    ("declared", "sentence"),
    [
        ([("n", pa.int32())], r"Column 'n' of .* is int64, and its source declares int32\. Cast it"),
        ([("n", pa.timestamp("us", "UTC"))], "is int64"),
        ([("n", pa.int64()), ("more", pa.int64())], r"has columns \['n'\], and its source declares \['n', 'more'\]"),
        ([("m", pa.int64())], "Select those"),
    ],
)
def test_other_columns_than_declared_are_refused_before_anything_runs(declared: Any, sentence: str, spark: Any) -> None:
    found = SparkSource(Numbers([5]), schema=pa.schema(declared)).enumerator().next_range(spark)
    assert isinstance(found, Range)
    with pytest.raises(InvalidInput, match=sentence) as caught:
        found.frame(spark)
    assert caught.value.kind is ErrorKind.SCHEMA_MISMATCH


def test_an_instant_is_no_wall_clock_time(spark: Any) -> None:
    rows = spark.sql("select timestamp_ntz'2024-01-01 00:00:00' as at, 1 as n")
    source = SparkSource(
        OffsetTable(lambda spark: rows, "n"), schema={"at": pa.timestamp("us", "UTC"), "n": pa.int32()}
    )
    with pytest.raises(
        InvalidInput, match=re.escape("is timestamp[us], and its source declares timestamp[us, tz=UTC]")
    ):
        next(ranges(spark, source.enumerator())).frame(spark)


@pytest.mark.parametrize(
    ("kind", "values", "where"),
    [
        (pa.field("c", pa.int64(), nullable=False), [1, None], "'c' has 1 nulls among 2"),
        (
            pa.field("c", pa.struct([pa.field("x", pa.int64(), nullable=False)])),
            [None, {"x": 1}, {"x": None}],
            "'c.x' has 1 nulls among 2",
        ),
        (
            pa.field("c", pa.list_(pa.field("item", pa.int64(), nullable=False))),
            [None, [1], [2, None]],
            "'c.item' has 1 nulls",
        ),
        (
            pa.field("c", pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))),
            [None, [("a", 1)], [("b", None)]],
            "'c.value' has 1 nulls",
        ),
    ],
)
def test_a_null_where_none_is_declared_is_refused(kind: pa.Field, values: list[Any], where: str) -> None:
    loose = {
        "struct": pa.struct([("x", pa.int64())]),
        "list": pa.list_(pa.int64()),
        "map": pa.map_(pa.string(), pa.int64()),
    }
    given = pa.record_batch({"c": pa.array(values, loose.get(str(kind.type).split("<")[0], pa.int64()))})
    with pytest.raises(InvalidInput, match=where) as caught:
        to_arrow(given, pa.schema([kind]))
    assert caught.value.kind is ErrorKind.NULL_NOT_ALLOWED
    assert to_arrow(given.slice(0, 1 if kind.nullable is False else 2), pa.schema([kind])).schema == pa.schema([kind])


def test_the_columns_that_spark_has_are_taken_where_none_are_declared(spark: Any) -> None:
    doubled = SparkSource(Numbers([1]), transform=lambda rows: rows.selectExpr("n", "n * 2 as twice"), spark=spark)
    assert doubled.schema == pa.schema([("n", pa.int64()), ("twice", pa.int64())])
    assert SparkSource(Numbers([1])).schema == ROWS


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (lambda rows: rows.selectExpr("n", "rand() as r"), "computes something else each time"),
        (lambda rows: rows.selectExpr("n", "null as nothing"), "'nothing' of Numbers is void"),
        (lambda rows: rows.selectExpr("n", "array(null) as nothing"), "'nothing' of Numbers is made of void"),
        (lambda rows: rows.selectExpr("n", "map() as nothing"), "'nothing' of Numbers is made of void"),
        (lambda rows: rows.selectExpr("parse_json('1') as some"), "'some' of Numbers is variant"),
        (lambda rows: rows.selectExpr("struct(parse_json('1')) as some"), "'some' of Numbers is made of variant"),
        (lambda rows: rows.selectExpr("n", "n"), "two columns named 'n'"),
        (lambda rows: rows.selectExpr("make_ym_interval(1, 1) as i"), "a type that Arrow does not have"),
        (lambda rows: None, "returned NoneType"),
        (lambda rows: rows.sparkSession.readStream.format("rate").load(), "is a streaming DataFrame"),
    ],
)
def test_a_transformation_that_cannot_be_run_again_or_kept_is_refused(
    transform: Any, sentence: str, spark: Any
) -> None:
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        SparkSource(Numbers([1]), transform=transform, spark=spark)


@pytest.mark.parametrize("position", [[("a", 1)], {"a": 1.5}, {1: 1}, {"a": None}, {"a": True}, {"a": 2**63}])
def test_a_position_that_cannot_be_kept_is_refused(position: Any) -> None:
    class Wrong(Numbers):
        def first(self, spark: Any) -> Position:
            return position  # type: ignore[no-any-return]

    with pytest.raises(InvalidInput, match="a position"):
        SparkSource(Wrong([1]), schema=ROWS).enumerator().next_range(None)  # type: ignore[arg-type]


# To the reader ---------------------------------------------------------------------------------------------------------

TIMED = pa.schema([("at", pa.int64())])


def timed(*times: int) -> pa.RecordBatch:
    return pa.record_batch({"at": pa.array(times, pa.int64())})


class Reader:
    """A reader of a source of times, with what it has emitted."""

    def __init__(self, out_of_order_us: int = 0) -> None:
        self.emitted: list[int] = []
        source = SparkSource(Numbers([0]), schema=TIMED)
        self.reader = SourceReader(
            "source",
            pickle.loads(pickle.dumps(source)),
            EventTime("at", out_of_order_us),
            0,
            lambda: 0,
            lambda batch: self.emitted.extend(batch["at"].to_pylist()),
        )

    def read(self) -> tuple[int, int | None]:
        reading = self.reader.read()
        return reading.rows, reading.watermark


def test_the_watermark_comes_behind_all_rows_of_a_range_in_every_epoch() -> None:
    reader = Reader(out_of_order_us=1)
    for epoch, (first, second) in enumerate([((30, 10), (20,)), ((60, 40), (35,))]):
        before = None if epoch == 0 else 29
        mailbox = RowBuffer(f"epoch-{epoch}")
        reader.reader.give(mailbox.split)
        assert reader.read() == (0, before)
        mailbox.add(timed(*first))
        assert [reader.read(), reader.read()] == [(2, before), (0, before)]
        reader.reader.give(NoSplit.LATER)
        mailbox.add(timed(*second))
        mailbox.close()
        assert [reader.read(), reader.read()] == [(1, before), (0, [29, 59][epoch])]
        assert reader.reader.rows().num_rows == 0
    assert reader.emitted == [30, 10, 20, 60, 40, 35]
    reader.reader.give(NoSplit.NEVER)
    assert reader.reader.read().ended


def test_a_reader_that_got_no_rows_is_told_how_far_the_range_has_come() -> None:
    reader = Reader()
    mailbox = RowBuffer("epoch")
    reader.reader.give(mailbox.split)
    for newest in (7, 50, 20):
        mailbox.observe(newest)
    mailbox.add(timed())
    mailbox.close()
    assert [reader.read() for _ in range(2)] == [(0, None), (0, 50)]


def test_time_stands_still_while_any_unordered_split_is_held() -> None:
    source = Chunks(splits_per_reader=None, a=[rows([5])], b=[rows([1]), rows([9])])
    source.unordered = True
    reader = SourceReader("source", source, EventTime("value"), 0, lambda: 0, lambda batch: None)
    reader.give(Split("a", b""))
    reader.give(Split("b", b""))
    reader.give(NoSplit.LATER)
    assert [reader.read().watermark for _ in range(5)] == [None, None, None, None, 9]


def test_a_mailbox_is_read_once_and_here_only() -> None:
    mailbox = RowBuffer("epoch")
    source = SparkSource(Numbers([0]), schema=TIMED)
    mailbox.add(timed(1, 2))
    mailbox.close()
    assert [(chunk.batch.num_rows, chunk.position) for chunk in source.read(mailbox.split, None)] == [(2, 2)]  # type: ignore[arg-type]
    with pytest.raises(InvalidState, match="after its buffer was closed"):
        mailbox.add(timed(3))
    with pytest.raises(InvalidState, match="the rows before were given already"):
        source.read(mailbox.split._replace(position=2), None)  # type: ignore[arg-type]
    split = mailbox.split
    del mailbox
    with pytest.raises(InvalidState, match="this process does not have its rows"):
        source.read(Split(split.id, split.payload), None)  # type: ignore[arg-type]


def test_a_source_goes_to_workers_without_anything_of_spark_or_of_the_user(spark: Any) -> None:
    lock = threading.Lock()  # what no pickle takes
    source = SparkSource(
        OffsetTable(lambda _: (lock, spark)[1].range(3).toDF("n"), "n"),
        transform=lambda rows: rows if lock else None,
        spark=spark,
    )
    sent = pickle.loads(pickle.dumps(source))
    assert (sent.schema, sent.bounded, sent.unordered) == (source.schema, True, True)
    assert sent.enumerator().columns == source.enumerator().columns
    assert sent.enumerator().snapshot().num_rows == 0
    with pytest.raises(InvalidInput, match="Ask the one in the driver"):
        sent.enumerator().next_range(spark)
    assert numbers(spark, copy.copy(source).enumerator().next_range(spark)) == [0, 1, 2]


def test_a_source_without_columns_and_session_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    def nothing() -> None:
        raise PySparkRuntimeError("NO_ACTIVE_OR_DEFAULT_SESSION", {})

    monkeypatch.setattr(SparkSession, "active", nothing)
    with pytest.raises(CheckpointError, match="no session is active"):
        SparkSource(Numbers([1]))


# The page --------------------------------------------------------------------------------------------------------------


class StandIn:
    """A session whose reader understands what Spark's reader of Kafka does. ``log``: the values of each partition of ``orders``."""

    def __init__(self, session: Any, log: Mapping[str, Sequence[str]]) -> None:
        self.session = session
        self.log = log
        self.given: dict[str, str] = {}

    @property
    def read(self) -> StandIn:
        return self

    def format(self, name: str) -> StandIn:
        assert name == "kafka"
        return self

    def option(self, name: str, value: str) -> StandIn:
        self.given[name] = value
        return self

    def options(self, **options: str) -> StandIn:
        self.given |= options
        return self

    def load(self) -> Any:
        assert self.given["kafka.bootstrap.servers"] == "broker:9092"
        topic = self.given["subscribe"]
        start, end = (json.loads(self.given[name])[topic] for name in ("startingOffsets", "endingOffsets"))
        assert start.keys() == end.keys()
        values = [value for name, values in self.log.items() for value in values[start.get(name, 0) : end.get(name, 0)]]
        return self.session.createDataFrame(
            pa.table({"value": pa.array([value.encode() for value in values], pa.binary())})
        )


def test_the_kafka_source_of_the_page_reads_each_offset_once(spark: Any) -> None:
    block = next(
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "class KafkaTopic" in code
    )
    page: dict[str, Any] = {}
    exec(block, page)
    log = {"0": ["a", "b", "c", "d"], "1": ["x"], "2": ["y"]}
    there = {0: 2, 1: 1}

    class Topic(page["KafkaTopic"]):  # type: ignore[misc,name-defined]
        def _edges(self, spark: Any, *, end: bool) -> dict[int, int]:
            return dict(there) if end else dict.fromkeys(there, 0)

        def _read(self, session: Any, starting: str, ending: str) -> Any:
            return super()._read(StandIn(session, log), starting, ending)

    source = SparkSource(
        Topic("broker:9092", "orders", rows_per_partition=1),
        transform=lambda rows: rows.selectExpr("cast(value as string) as value"),
        schema={"value": pa.string()},
    )
    enumerator, found = source.enumerator(), []
    while len(found) < 5 and isinstance(part := enumerator.next_range(spark), Range):
        found.append(sorted(row[0] for row in part.frame(spark).collect()))
        enumerator = restored(source, enumerator.snapshot())
        if len(found) == 2:
            there |= {0: 4, 2: 1}
    assert found == [["a", "x"], ["b"], ["c", "y"], ["d"]]
    assert enumerator.next_range(spark) is NoSplit.LATER
    assert not source.bounded


def test_a_position_that_leaves_the_directory_is_refused(tmp_path: Path) -> None:
    files = DirectoryFrames(tmp_path / "in", "json", schema="n bigint")
    for path in ("../secret.json", "below/../../secret.json", ".."):
        with pytest.raises(InvalidInput, match="does not lie in its directory"):
            files.latest(None, {"1.json": "5@1", path: "5@1"})
