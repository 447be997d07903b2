"""The ready-made sources: the same rows from every position, and splits that are dealt once."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import os
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from stateformat.backends.connectors import CsvSource, ListEnumerator, MemorySource, ParquetSource, RateSource
from stateformat.backends.connectors.sources import files
from stateformat.backends.dataflow import Chunk, NoSplit, Source, Split, SplitEnumerator
from stateformat.errors import InvalidInput, StorageError


class Clock:
    """What a reader is told of its place and of time."""

    subtask = 0
    now_us = 0


def table_of(first: int = 0, rows: int = 257) -> pa.Table:
    """Rows with nulls, letters of many bytes, quotes and line breaks."""
    numbers = range(first, first + rows)
    texts = [None if n % 5 == 0 else f'é"日{n},\n' if n % 7 == 0 else f"x{n}" for n in numbers]
    return pa.table(
        {
            "n": pa.array(numbers, pa.int64()),
            "text": pa.array(texts, pa.string()),
            "real": pa.array([None if n % 3 == 0 else n / 8 for n in numbers], pa.float64()),
            "at": pa.array(numbers, pa.int64()).cast(pa.timestamp("us")),
        }
    )


def dealt(enumerator: SplitEnumerator, subtasks: int = 1) -> list[list[Split]]:
    """Who gets what when subtasks ask in turn until nothing is left."""
    given: list[list[Split]] = [[] for _ in range(subtasks)]
    asking = list(range(subtasks))
    while asking:
        for subtask in list(asking):
            answer = enumerator.next_split(subtask, subtasks)
            if isinstance(answer, NoSplit):
                asking.remove(subtask)
            else:
                given[subtask].append(answer)
    return given


def read(source: Source, split: Split, position: int = 0) -> list[Chunk]:
    return list(source.read(split._replace(position=position), Clock()))


def joined(source: Source, chunks: Iterable[Chunk]) -> pa.Table:
    return pa.Table.from_batches([chunk.batch for chunk in chunks if chunk.batch is not None], source.schema)


def all_rows(source: Source) -> pa.Table:
    [splits] = dealt(source.enumerator())
    return pa.concat_tables([joined(source, read(source, split)) for split in splits] or [source.schema.empty_table()])


def check_every_position(source: Source) -> pa.Table:
    """Read each split from every row on, and check rows and positions. Returns all rows."""
    [splits] = dealt(source.enumerator())
    for split in splits:
        whole = joined(source, read(source, split))
        for position in range(whole.num_rows + 1):
            chunks = read(source, split, position)
            assert joined(source, chunks).equals(whole.slice(position))
            at = position
            for chunk in chunks:
                assert chunk.batch is not None
                at += chunk.batch.num_rows
                assert chunk.position == at
        with pytest.raises(InvalidInput, match="is to be read from row"):
            read(source, split, whole.num_rows + 1)
    return all_rows(source)


# Dealing


def three_splits() -> list[Split]:
    return [Split(name, name.encode()) for name in "abc"]


@pytest.mark.parametrize(("shared_out", "expected"), [(False, [["a", "c"], ["b"]]), (True, [["a", "c"], ["b"]])])
def test_a_list_is_dealt_in_order_and_once(shared_out: bool, expected: list[list[str]]) -> None:
    enumerator = ListEnumerator(three_splits, shared_out=shared_out)
    assert [[split.id for split in part] for part in dealt(enumerator, 2)] == expected
    assert enumerator.snapshot().num_rows == 0


@pytest.mark.parametrize("shared_out", [False, True])
@pytest.mark.parametrize("taken", range(4))
def test_what_was_not_dealt_is_dealt_after_a_restore(shared_out: bool, taken: int) -> None:
    enumerator = ListEnumerator(three_splits, shared_out=shared_out)
    first = [enumerator.next_split(number, 3) for number in range(taken)]
    restored = ListEnumerator(lambda: pytest.fail("the list is made again"), shared_out=shared_out)
    snapshot = enumerator.snapshot()
    assert snapshot.schema == enumerator.columns
    restored.restore(snapshot)
    rest = [split for part in dealt(restored, 2) for split in part]
    assert sorted(split.id for split in (*first, *rest) if isinstance(split, Split)) == ["a", "b", "c"]


def test_shared_out_splits_are_each_for_one_subtask_whoever_asks_first() -> None:
    enumerator = ListEnumerator(three_splits, shared_out=True)
    assert enumerator.next_split(1, 2) == Split("b", b"b")
    assert enumerator.next_split(1, 2) is NoSplit.NEVER
    assert [split.id for split in dealt(enumerator, 2)[0]] == ["a", "c"]


def test_two_splits_of_one_id_are_refused() -> None:
    with pytest.raises(InvalidInput, match="'a'"):
        ListEnumerator(lambda: [Split("a", b""), Split("a", b"")]).snapshot()


# Memory and rate


@pytest.mark.parametrize(("splits", "batch_rows"), [(1, 1000), (1, 10), (4, 7), (300, 2)])
def test_memory_gives_the_same_rows_from_every_position(splits: int, batch_rows: int) -> None:
    table = table_of(rows=60)
    source = MemorySource(table, splits=splits, batch_rows=batch_rows)
    assert check_every_position(source).equals(table)
    sizes = {len(joined(source, read(source, split))) for split in dealt(source.enumerator())[0]}
    assert max(sizes) - min(sizes) <= 1


def test_memory_takes_batches_and_tables_without_rows() -> None:
    batches = table_of().to_batches(max_chunksize=100)
    assert all_rows(MemorySource(iter(batches))).equals(table_of())
    assert all_rows(MemorySource(batches[0])).equals(table_of(rows=100))
    empty = MemorySource(table_of(rows=0))
    assert (all_rows(empty).num_rows, empty.schema) == (0, table_of().schema)
    with pytest.raises(InvalidInput, match="the columns are unknown"):
        MemorySource([])


def test_a_rate_source_gives_each_shard_its_share_of_a_total() -> None:
    source = RateSource(rows_per_read=7, total=50, shards=4, start_us=100, step_us=10)
    table = check_every_position(source)
    expected = [(shard, n, 100 + 10 * n) for shard, rows in enumerate([13, 13, 12, 12]) for n in range(rows)]
    times = table["at"].cast(pa.int64()).to_pylist()
    assert list(zip(table["shard"].to_pylist(), table["n"].to_pylist(), times, strict=True)) == expected
    assert (source.bounded, source.splits_per_reader) == (True, None)


def test_a_rate_source_waits_for_its_clock_and_never_ends_without_a_total() -> None:
    source = RateSource(rows_per_second=100, shards=2)
    assert not source.bounded
    clock, [[split, _]] = Clock(), dealt(source.enumerator())
    reading = source.read(split, clock)
    assert next(reading).position == 1
    assert next(reading) == Chunk(None, 1)
    clock.now_us = 100_000
    # 50 rows a second of this shard: five in a tenth of one.
    chunk = next(reading)
    assert chunk.position == 6
    assert chunk.batch is not None
    assert chunk.batch["at"].cast(pa.int64()).to_pylist() == [20_000 * n for n in range(1, 6)]
    assert next(reading) == Chunk(None, 6)
    clock.now_us = 10_000_000
    assert [next(reading).position - 6 for _ in range(3)] == [50, 100, 150]


def test_a_rate_source_goes_on_at_its_rate_from_where_it_was() -> None:
    source = RateSource(rows_per_second=10)
    clock, [[split]] = Clock(), dealt(source.enumerator())
    clock.now_us = 77_000_000
    reading = source.read(split._replace(position=1000), clock)
    assert next(reading).position == 1001
    assert next(reading) == Chunk(None, 1001)


@pytest.mark.parametrize(
    "wrong", [{"rows_per_second": 1, "rows_per_read": 1}, {"shards": 0}, {"total": -1}, {"rows_per_second": 0}]
)
def test_a_rate_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        RateSource(**wrong)


# Parquet


def write(directory: Path, name: str, table: pa.Table, **options: Any) -> Path:
    path = directory / name
    pq.write_table(table, path, **options)
    return path


@pytest.mark.parametrize("batch_rows", [1, 10, 64, 1000])
def test_parquet_gives_the_same_rows_from_every_position(tmp_path: Path, batch_rows: int) -> None:
    table = table_of(rows=50)
    for number, first in enumerate(range(0, 50, 20)):
        write(tmp_path, f"part-{number}.parquet", table.slice(first, 20), row_group_size=6)
    for name in ("_hidden.parquet", ".hidden.parquet"):
        write(tmp_path, name, table)
    assert check_every_position(ParquetSource(tmp_path, batch_rows=batch_rows)).equals(table)


def test_a_large_parquet_file_is_cut_between_row_groups(tmp_path: Path) -> None:
    table = table_of()
    path = write(tmp_path, "large.parquet", table, row_group_size=10)
    source = ParquetSource(path, split_bytes=path.stat().st_size // 4)
    assert 3 <= len(dealt(source.enumerator())[0]) <= 6
    assert check_every_position(source).equals(table)
    assert all_rows(ParquetSource(path, split_bytes=1)).equals(table)


def test_parquet_columns_are_read_in_the_order_asked_for_and_made_plain(tmp_path: Path) -> None:
    table = table_of(rows=20)
    text = table["text"]
    fancy = table.set_column(1, "text", text.dictionary_encode()).set_column(2, "real", text.cast(pa.large_string()))
    path = write(tmp_path, "fancy.parquet", fancy)
    source = ParquetSource(str(tmp_path / "f*.parquet"), columns=["real", "text", "n"])
    assert source.schema == pa.schema([("real", pa.string()), ("text", pa.string()), ("n", pa.int64())])
    assert all_rows(source)["real"].to_pylist() == all_rows(source)["text"].to_pylist() == text.to_pylist()
    with pytest.raises(InvalidInput, match="no columns"):
        ParquetSource(path, columns=["nowhere"])


def test_times_of_int96_are_what_was_written_whatever_the_year(tmp_path: Path) -> None:
    """Spark writes INT96 by default. In nanoseconds it would hold the years 1677 to 2262 alone."""
    times = [dt.datetime.min, dt.datetime.max, None]  # noqa: DTZ901 - without a zone, as the file
    kinds = {"at": pa.timestamp("us"), "all": pa.list_(pa.timestamp("us")), "of": pa.struct({"at": pa.timestamp("us")})}
    rows = [{"at": time, "all": [time, time], "of": {"at": time}} for time in times]
    written = pa.Table.from_pylist(rows, pa.schema(kinds))
    source = ParquetSource(write(tmp_path, "a.parquet", written, use_deprecated_int96_timestamps=True))
    assert source.schema.types == [*kinds.values()]
    assert all_rows(source).to_pylist() == rows


@pytest.mark.parametrize(("pattern", "expected"), [("*", 2), ("**", 4), ("**/*.parquet", 4), ("f*/*", 2)])
def test_a_pattern_passes_folders_over_but_none_with_the_name_of_a_file(
    tmp_path: Path, pattern: str, expected: int
) -> None:
    for folder in (tmp_path, tmp_path / "folder"):
        folder.mkdir(exist_ok=True)
        for name in ("a.parquet", "b.parquet", "_c.parquet"):
            write(folder, name, table_of(rows=3))
    assert all_rows(ParquetSource(tmp_path / pattern)).num_rows == 3 * expected
    (tmp_path / "d.parquet").mkdir()
    with pytest.raises(StorageError, match=r"d\.parquet cannot be read"):
        all_rows(ParquetSource(tmp_path / "*.parquet"))


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        (table_of(rows=5).rename_columns(["m", "o", "p", "q"]), "b.parquet has no column 'n'"),
        (table_of(rows=0).drop_columns("real"), "b.parquet has no column 'real'"),
        (
            table_of(rows=5).set_column(0, "n", pa.array(["1"] * 5)),
            "column 'n' of .*b.parquet is string and should be int64",
        ),
    ],
    ids=["names", "no rows", "types"],
)
def test_files_that_differ_are_refused_with_a_sentence(tmp_path: Path, columns: pa.Table, sentence: str) -> None:
    write(tmp_path, "a.parquet", table_of(rows=5))
    write(tmp_path, "b.parquet", columns)
    with pytest.raises(InvalidInput, match=sentence):
        all_rows(ParquetSource(tmp_path))


def utc(*micros: int, zone: str = "UTC", unit: str = "us") -> pa.Array:
    return pa.array(micros, pa.timestamp("us", zone)).cast(pa.timestamp(unit, zone))


SAFE: list[tuple[Any, pa.DataType]] = [
    (pa.nulls(2), pa.int64()),
    (pa.nulls(2), pa.list_(pa.string())),
    (pa.array([1, -5], pa.int32()), pa.int64()),
    (pa.array([1, 255], pa.uint8()), pa.int16()),
    (pa.array([0.5, -1], pa.float32()), pa.float64()),
    (utc(0, 10**15, zone="Europe/Oslo"), pa.timestamp("us", "UTC")),
    (utc(0, 10**15, unit="ns"), pa.timestamp("us", "UTC")),
    (pa.array([[1], None], pa.list_(pa.int32())), pa.list_(pa.int64())),
    (pa.array([Decimal("1.5")], pa.decimal128(5, 1)), pa.decimal128(9, 3)),
    (pa.array([3], pa.int64()), pa.int8()),
]


@pytest.mark.parametrize(("column", "declared"), SAFE, ids=[f"{column.type} as {kind}" for column, kind in SAFE])
def test_a_declared_type_takes_what_it_can_hold(tmp_path: Path, column: pa.Array, declared: pa.DataType) -> None:
    write(tmp_path, "a.parquet", pa.table({"c": column}))
    source = ParquetSource(tmp_path, schema={"c": declared})
    found = all_rows(source)
    assert found.schema.types == [declared]
    assert found["c"].to_pylist() == column.to_pylist()


def narrow(value: Any, kind: pa.DataType) -> pa.Table:
    return pa.table({"c": pa.array([value], kind)})


@pytest.mark.parametrize(
    ("first", "second", "told", "advised"),
    [
        (narrow(1, pa.int8()), narrow(300, pa.int64()), "is int64, and not every value of it fits int8", pa.int64()),
        (narrow(None, pa.null()), narrow(1, pa.int64()), "is int64 and should be string", pa.int64()),
        (narrow(0.5, pa.float32()), narrow(0.1, pa.float64()), "is double and should be float", pa.float64()),
        (narrow(0, pa.timestamp("us")), narrow(1, pa.timestamp("ns")), "is timestamp.ns., and not", pa.timestamp("ns")),
    ],
)
def test_a_file_with_a_wider_type_is_refused_until_the_schema_says_it(
    tmp_path: Path, first: pa.Table, second: pa.Table, told: str, advised: pa.DataType
) -> None:
    write(tmp_path, "a.parquet", first)
    write(tmp_path, "b.parquet", second, version="2.6")
    shown = str(advised).replace("[", ".").replace("]", ".")
    with pytest.raises(InvalidInput, match=rf"column 'c' of .*b\.parquet {told}.*a schema in which 'c' is {shown}"):
        all_rows(ParquetSource(tmp_path))
    found = all_rows(ParquetSource(tmp_path, schema={"c": advised}))
    assert found["c"].to_pylist() == [*first["c"].to_pylist(), *second["c"].to_pylist()]


def test_the_first_file_is_compared_with_the_schema_before_the_job_starts(tmp_path: Path) -> None:
    path = write(tmp_path, "a.parquet", table_of(rows=2))
    with pytest.raises(
        InvalidInput, match=r"column 'text' of .*a\.parquet is string and should be int64, as the schema"
    ):
        ParquetSource(tmp_path, schema={"text": pa.int64()})
    with pytest.raises(InvalidInput, match=r"a\.parquet has no column 'nowhere'"):
        ParquetSource(tmp_path, schema={"nowhere": pa.int64()})
    path.unlink()
    # Read, and removed before the job was started again.
    assert ParquetSource(path, schema={"text": pa.int64()}).schema.names == ["text"]


def test_times_finer_than_a_microsecond_pass_if_the_schema_says_so_and_others_become_microseconds(
    tmp_path: Path,
) -> None:
    write(tmp_path, "a.parquet", pa.table({"at": pa.array([1000, None], pa.timestamp("ns"))}), version="2.6")
    assert all_rows(ParquetSource(tmp_path))["at"].cast(pa.int64()).to_pylist() == [1, None]
    assert ParquetSource(tmp_path, schema={"at": pa.timestamp("ns")}).schema.types == [pa.timestamp("ns")]
    for rows, kind in ((1000, pa.timestamp("us")), (1001, None)):
        table = pa.table({"at": pa.array([rows], pa.timestamp("ns"))})
        if kind is not None:
            assert MemorySource(table).schema.types == [kind]
        else:
            with pytest.raises(InvalidInput, match=r"column 'at' of a MemorySource is timestamp\[ns\]"):
                MemorySource(table)
            # What it advises.
            rounded = pc.floor_temporal(table["at"], unit="microsecond")
            assert all_rows(MemorySource(pa.table({"at": rounded})))["at"].cast(pa.int64()).to_pylist() == [1]


@pytest.mark.parametrize("modified_us", [-(1 << 62), -1, 0, 1 << 62])
def test_a_file_of_another_time_is_told_whatever_the_time_is(modified_us: int) -> None:
    was = files.FileStat(modified_us, 3)
    was.check("it", "a", was)
    with pytest.raises(
        InvalidInput, match=r"it had 3 bytes of .* when the job found it, and has 3 bytes of 1970-01-01T"
    ):
        was.check("it", "a", files.FileStat(7, 3))


TWICE = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array(["x"])], ["n", "n", "b"])


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv named"])
def test_a_column_of_a_name_that_occurs_twice_is_refused_and_others_are_read(tmp_path: Path, kind: str) -> None:
    named = {"column_names": ["n", "n", "b"]} if kind == "csv named" else {}
    if kind == "parquet":
        pq.write_table(TWICE, tmp_path / "a.parquet")
    else:
        (tmp_path / "a.csv").write_text("1,2,x\n" if named else "\nn,n,b\n1,2,x\n")
    made: Any = ParquetSource if kind == "parquet" else CsvSource
    for options in (
        {},
        {"columns": ["n"]},
        {"schema": {"n": pa.int64()}},
        {"schema": {"n": pa.int64(), "b": pa.string()}},
    ):
        with pytest.raises(InvalidInput, match=r"a\.\w+ has 2 columns 'n'\. It has n, n, b\."):
            made(tmp_path, **options, **named)
    for options in ({"columns": ["b"]}, {"schema": {"b": pa.string()}}):
        assert all_rows(made(tmp_path, **options, **named)).to_pylist() == [{"b": "x"}]


def test_a_later_csv_file_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(b"n,n\n1,2\n"))
    with pytest.raises(InvalidInput, match=r"b\.csv\.gz has 2 columns 'n'"):
        all_rows(CsvSource([tmp_path / "a.csv", tmp_path / "b.csv.gz"], schema={"n": pa.int64()}))


def test_memory_has_plain_columns_whatever_it_is_given(tmp_path: Path) -> None:
    texts = ["a", None, "bé"]
    given = {
        "view": pa.array(texts, pa.string_view()),
        "large": pa.array(texts, pa.large_string()),
        "words": pa.array(texts).dictionary_encode(),
        "words of views": pa.DictionaryArray.from_arrays([1, None, 0], pa.array(["b", "a"], pa.string_view())),
        "runs": pc.run_end_encode(pa.array(texts)),
        "bytes": pa.array([b"a", None, b""], pa.binary_view()),
        "nothing": pa.nulls(3),
        "id": pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
        "of": pa.array([{"a": ["x"]}, None, {"a": None}], pa.struct({"a": pa.large_list(pa.large_string())})),
    }
    source = MemorySource(pa.table(given))
    plain = [*[pa.string()] * 5, pa.binary(), pa.string(), pa.binary(16), pa.struct({"a": pa.list_(pa.string())})]
    assert source.schema.types == plain
    storage = {**given, "id": given["id"].storage}
    assert all_rows(source).to_pydict() == {name: column.to_pylist() for name, column in storage.items()}
    with pytest.raises(InvalidInput, match="a MemorySource has 2 columns named 'n'"):
        MemorySource(TWICE)


def test_a_file_that_changed_or_went_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path, "a.parquet", table_of(rows=5))
    source = ParquetSource(path)
    [[split]] = dealt(source.enumerator())
    write(tmp_path, "a.parquet", table_of(rows=50))
    with pytest.raises(InvalidInput, match="when the job found it"):
        read(source, split)
    path.write_bytes(b"x" * 1000)
    with pytest.raises(InvalidInput, match="cannot be read as Parquet"):
        ParquetSource(path)
    path.unlink()
    with pytest.raises(StorageError, match="No such file"):
        read(source, split)
    with pytest.raises(InvalidInput, match="has no file"):
        ParquetSource(tmp_path)


def rewritten(kind: str, path: Path, first: int) -> None:
    """Ten rows in a file of its own, put in the place of another of the same size."""
    hidden = path.with_name(".hidden")
    if kind == "parquet":
        pq.write_table(pa.table({"n": range(first, first + 10)}), hidden)
    else:
        hidden.write_text("n\n" + "".join(f"{n}\n" for n in range(first, first + 10)))
    hidden.rename(path)


def source_of(kind: str, paths: Path, **options: Any) -> Source:
    made = {"parquet": ParquetSource, "csv": CsvSource}[kind]
    return made(paths, schema={"n": pa.int64()}, **options)


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_file_replaced_by_one_of_the_same_size_is_not_read_on_from_its_middle(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    rewritten(kind, path, 10)
    source = source_of(kind, path, batch_rows=4)
    [[split]] = dealt(source.enumerator())
    reading = source.read(split, Clock())
    assert next(reading).position == 4
    size, times = path.stat().st_size, path.stat().st_mtime_ns
    rewritten(kind, path, 20)
    assert path.stat().st_size == size
    with pytest.raises(InvalidInput, match=rf"a\.{kind} had {size} bytes of .* and has {size} bytes of"):
        read(source, split, 4)
    # A checkpoint of an earlier release has the size alone.
    old = {name: value for name, value in json.loads(split.payload).items() if name != "modified_us"}
    earlier = split._replace(payload=json.dumps(old).encode())
    assert joined(source, read(source, earlier, 4))["n"].to_pylist() == [*range(24, 30)]
    # What the refusal advises: the old rows, at their time.
    rewritten(kind, path, 10)
    os.utime(path, ns=(times, times))
    assert joined(source, read(source, split, 4))["n"].to_pylist() == [*range(14, 20)]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_file_that_changes_while_it_is_read_gives_none_of_its_new_rows(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"a.{kind}"
    rewritten(kind, path, 10)
    source = source_of(kind, path)
    [[split]] = dealt(source.enumerator())
    # After the reader has looked at it for the first time, and before it opens it.
    open_ = source._opened  # type: ignore[attr-defined]

    def opened(*arguments: Any) -> Any:
        rewritten(kind, path, 20)
        return open_(*arguments)

    source._opened = opened  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match="when the job found it"):
        read(source, split)


# CSV


def write_csv(path: Path, table: pa.Table) -> Path:
    """As a spreadsheet would; strings quoted, so that the empty field is null."""
    lines = [",".join(table.column_names)]
    for row in table.to_pylist():
        quoted = ['"' + v.replace('"', '""') + '"' if isinstance(v, str) else v for v in row.values()]
        lines.append(",".join("" if value is None else str(value) for value in quoted))
    path.write_text("\n".join(lines) + "\n", newline="")
    return path


@pytest.mark.parametrize("batch_rows", [1, 16, 1000])
def test_csv_gives_the_same_rows_from_every_position(tmp_path: Path, batch_rows: int) -> None:
    table = table_of(1, rows=50)
    write_csv(tmp_path / "a.csv", table.slice(0, 30))
    write_csv(tmp_path / "b.csv", table.slice(30))
    assert check_every_position(CsvSource(tmp_path, schema=table.schema, batch_rows=batch_rows)).equals(table)


def test_csv_over_several_blocks_has_every_row_once(tmp_path: Path) -> None:
    rows = 60_000
    table = pa.table({"n": pa.array(range(rows)), "text": [f"a text of some length, number {n}" for n in range(rows)]})
    source = CsvSource(write_csv(tmp_path / "a.csv", table))
    assert (tmp_path / "a.csv").stat().st_size > 2**21
    [[split]] = dealt(source.enumerator())
    for position in (0, 1, 29_999, 30_000, rows - 1, rows):
        assert joined(source, read(source, split, position)).equals(table.slice(position))


def test_csv_types_are_inferred_once_and_hold_for_every_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("n,when,none,flag\n1,2013-01-01 05:00:00,NA,true\nNA,NA,NA,false\n")
    (tmp_path / "b.csv").write_text("n,when,none,flag\n2,2013-01-02 05:00:00,text,true\n")
    source = CsvSource(tmp_path, nulls=["NA"])
    assert source.schema.types == [pa.int64(), pa.timestamp("us"), pa.string(), pa.bool_()]
    table = all_rows(source)
    assert table["n"].to_pylist() == [1, None, 2]
    assert table["none"].to_pylist() == [None, None, "text"]
    (tmp_path / "c.csv").write_text("n,when,none,flag\nmany,NA,NA,true\n")
    with pytest.raises(InvalidInput, match=r"c\.csv cannot be read as CSV: .*many"):
        all_rows(CsvSource(tmp_path, nulls=["NA"]))


def test_csv_without_a_header_compressed_and_with_some_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress("1;ä;x\n2;;y\n".encode()))
    source = CsvSource(path, column_names=["a", "b", "c"], columns=["c", "b"], delimiter=";")
    assert all_rows(source).to_pylist() == [{"c": "x", "b": "ä"}, {"c": "y", "b": None}]


@pytest.mark.parametrize("header", ["n,text", '"n",text'])
def test_a_byte_order_mark_before_the_header_of_a_csv_file_is_part_of_no_name(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\n1,é\n", "utf-8-sig")
    for source in (CsvSource(tmp_path), CsvSource(tmp_path, schema={"n": pa.int64(), "text": pa.string()})):
        assert all_rows(source).to_pylist() == [{"n": 1, "text": "é"}]


def test_csv_types_that_are_given_are_made_plain(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b,c\nx,y,2024-02-29 12:00:00\n")
    given = {"a": pa.large_string(), "b": pa.dictionary(pa.int32(), pa.string()), "c": pa.timestamp("s")}
    source = CsvSource(tmp_path, schema=given)
    assert source.schema == pa.schema([("a", pa.string()), ("b", pa.string()), ("c", pa.timestamp("us"))])
    assert [str(value) for value in all_rows(source).to_pylist()[0].values()] == ["x", "y", "2024-02-29 12:00:00"]


def test_csv_files_without_rows_give_none_and_without_anything_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n")
    assert all_rows(CsvSource(tmp_path)).num_rows == 0
    for text, words in (("a,c\n1,2\n", r"b\.csv.*'b'"), ("", r"b\.csv cannot be read as CSV")):
        (tmp_path / "b.csv").write_text(text)
        with pytest.raises(InvalidInput, match=words):
            all_rows(CsvSource(tmp_path))


# A directory that grows


def test_a_directory_that_grows_gives_every_file_once_in_order_of_names(tmp_path: Path) -> None:
    source = ParquetSource(tmp_path, schema=table_of().schema, grows=True, until="_END")
    enumerator = source.enumerator()
    assert enumerator.next_split(0, 2) is NoSplit.LATER
    write(tmp_path, "b.parquet", table_of(rows=3))
    write(tmp_path, "c.parquet", table_of(3, 3))
    given = [enumerator.next_split(0, 2)]
    snapshot = enumerator.snapshot()
    assert snapshot.schema == enumerator.columns
    restored = source.enumerator()
    restored.restore_log(enumerator.logged())
    restored.restore(snapshot)
    assert enumerator.logged().num_rows == 0
    write(tmp_path, "d.parquet", table_of(6, 3))
    write(tmp_path, ".e.parquet", table_of(9, 3))
    given += [restored.next_split(1, 2), restored.next_split(0, 2)]
    assert restored.next_split(0, 2) is NoSplit.LATER
    (tmp_path / ".e.parquet").rename(tmp_path / "e.parquet")
    (tmp_path / "_END").touch()
    given.append(restored.next_split(1, 2))
    assert [restored.next_split(subtask, 2) for subtask in range(2)] == [NoSplit.NEVER] * 2
    tables = [joined(source, read(source, split)) for split in given if isinstance(split, Split)]
    assert pa.concat_tables(tables).equals(table_of(rows=12))
    assert source.bounded


@pytest.mark.parametrize("kind", ["parquet", "csv"])
@pytest.mark.parametrize("how", ["replaced", "appended", "shortened", "made anew"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_file_that_was_read_and_changed_is_refused_at_the_next_listing(
    tmp_path: Path, kind: str, how: str, restarted: bool
) -> None:
    path = tmp_path / f"a.{kind}"
    rewritten(kind, path, 10)
    source = source_of(kind, tmp_path, grows=True)
    enumerator = source.enumerator()
    assert isinstance(enumerator.next_split(0, 1), Split)
    assert enumerator.next_split(0, 1) is NoSplit.LATER
    if restarted:
        again = source.enumerator()
        again.restore_log(enumerator.logged())
        again.restore(enumerator.snapshot())
        enumerator = again
    content, time_ns = path.read_bytes(), path.stat().st_mtime_ns
    if how == "replaced":
        rewritten(kind, path, 20)
    elif how == "made anew":
        path.unlink()
        assert enumerator.next_split(0, 1) is NoSplit.LATER, "what was read may go"
        rewritten(kind, path, 20)
    else:
        path.write_bytes(content + content if how == "appended" else content[:-3])
    now = path.stat().st_size
    for _ in range(2):
        with pytest.raises(InvalidInput, match=rf"a\.{kind} had {len(content)} bytes of .* and has {now} bytes of"):
            enumerator.next_split(0, 1)
    # What the refusal advises: the old bytes at their time, and new rows under another name.
    path.write_bytes(content)
    os.utime(path, ns=(time_ns, time_ns))
    rewritten(kind, tmp_path / f"b.{kind}", 20)
    assert isinstance(enumerator.next_split(0, 1), Split)


def test_listings_look_at_many_files_in_turn_and_the_last_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "SEEN_FILES", 3)
    for number in range(8):
        rewritten("csv", tmp_path / f"{number}.csv", 10)
    for changed in range(8):
        enumerator = source_of("csv", tmp_path, grows=True).enumerator()
        assert len(dealt(enumerator)[0]) == 8
        rewritten("csv", tmp_path / f"{changed}.csv", 20 + changed)
        with pytest.raises(InvalidInput, match=rf"{changed}\.csv had"):
            [enumerator.next_split(0, 1) for _ in range(3)]
    enumerator = source_of("csv", tmp_path, grows=True, until="_END").enumerator()
    assert len(dealt(enumerator)[0]) == 8
    rewritten("csv", tmp_path / "0.csv", 40)
    (tmp_path / "_END").touch()
    with pytest.raises(InvalidInput, match=r"0\.csv had"):
        enumerator.next_split(0, 1)


def test_files_of_a_log_without_sizes_are_those_that_are_found_first(tmp_path: Path) -> None:
    """An earlier release kept names alone; so does a query of Spark that goes on here."""
    for name in "ab":
        rewritten("csv", tmp_path / f"{name}.csv", 10)
    source = source_of("csv", tmp_path, grows=True)
    enumerator = source.enumerator()
    named = pa.table(
        {"file": [f"{tmp_path}/a.csv", "/elsewhere/c.csv"], "size_bytes": pa.nulls(2), "modified_us": pa.nulls(2)}
    )
    enumerator.restore_log(named.cast(enumerator.log_columns))
    enumerator.restore(enumerator.columns.empty_table())
    assert [split.id for split in dealt(enumerator)[0]] == [f"{tmp_path}/b.csv"]
    log = enumerator.logged()
    assert sorted(log["file"].to_pylist()) == [f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"]
    rewritten("csv", tmp_path / "a.csv", 20)
    again = source.enumerator()
    # In any order.
    again.restore_log(pa.concat_tables([log, named.cast(log.schema)]))
    for each in (enumerator, again):
        with pytest.raises(InvalidInput, match=r"a\.csv had"):
            each.next_split(0, 1)


def test_a_directory_that_grows_is_there_and_its_columns_are_known(tmp_path: Path) -> None:
    for path, options, words in (
        (tmp_path, {"grows": True}, "Give the schema"),
        (tmp_path / "nowhere", {"grows": True}, "is no directory"),
        (tmp_path, {"until": "_END"}, "grows=True"),
    ):
        with pytest.raises(InvalidInput, match=words):
            CsvSource(path, **options)  # type: ignore[arg-type]
    assert not CsvSource(tmp_path, grows=True, schema={"a": pa.int64()}).bounded


@pytest.mark.parametrize("grows", [False, True])
def test_a_split_of_a_file_elsewhere_is_refused(tmp_path: Path, grows: bool) -> None:
    for folder in ("in", "secret", "in/below"):
        (tmp_path / folder).mkdir()
        os.utime(write(tmp_path / folder, "data.parquet", table_of()), (1, 1))
    (tmp_path / "link").symlink_to(tmp_path / "in")
    source = ParquetSource(tmp_path / "in", grows=grows)
    split = source.enumerator().next_split(0, 1)
    assert isinstance(split, Split)

    def forged(path: str) -> Split:
        payload = {**json.loads(split.payload), "path": f"{tmp_path}/{path}"}
        return split._replace(payload=json.dumps(payload).encode())

    for path in ("secret/data.parquet", "in/../secret/data.parquet", "in/below/data.parquet", "in/.", "in/"):
        with pytest.raises(InvalidInput, match="lies in none of the folders that it reads"):
            read(source, forged(path))
    # The same folder by another name is no other folder.
    assert len(read(source, forged("link/data.parquet"))) == len(read(source, split)) > 0
    # Files of several folders, of which one is named by nothing else any more.
    both = ParquetSource([tmp_path / "in" / "data.parquet", tmp_path / "secret"])
    assert read(both, forged("secret/data.parquet"))
