"""Directories as sources of DataFrames: every file once, whatever comes, goes and restarts."""

from __future__ import annotations

import datetime
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from stateformat.backends.dataflow import NoSplit
from stateformat.backends.spark.sources.files import DirectoryFrames
from stateformat.backends.spark.sources.source import Range, SparkSource
from stateformat.errors import ErrorKind, InvalidInput
from tests.spark.spark_ranges import NOON_MS, ROWS, Folder, names, numbers, ranges, restored

pytestmark = pytest.mark.spark

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
