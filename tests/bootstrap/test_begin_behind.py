"""A source that begins behind a position reads exactly what comes after it, in every run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.bootstrap import bootstrap
from stateformat.backends.connectors import CollectSink, CsvSource, MemorySource, ParquetSource, RateSource
from stateformat.backends.connectors.sources.enumerators import ListEnumerator
from stateformat.backends.local import LocalRuntime
from stateformat.backends.spark import DirectoryFrames, OffsetTable, SparkSource
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.store import open as open_store
from stateformat.validation import validate

ROWS = pa.table({"n": pa.array(range(100), pa.int64())})


def files(folder: Path, suffix: str = "parquet") -> Path:
    """Ten files of ten rows, ``0`` to ``9``, and the file that ends a directory that grows."""
    folder.mkdir()
    for number in range(10):
        part, path = ROWS.slice(10 * number, 10), folder / f"{number}.{suffix}"
        if suffix == "csv":
            pyarrow.csv.write_csv(part, path)
        else:
            pq.write_table(part, path, row_group_size=4)
    (folder / "_END").touch()
    return folder


Case = tuple[Callable[[Path], tuple[Any, Any]], list[int]]
CASES: dict[str, Case] = {
    "memory": (lambda _: (MemorySource(ROWS), 37), [*range(37, 100)]),
    "memory in parts": (lambda _: (MemorySource(ROWS, splits=7, batch_rows=9), 37), [*range(37, 100)]),
    "memory at its end": (lambda _: (MemorySource(ROWS, splits=3), 100), []),
    "memory at its beginning": (lambda _: (MemorySource(ROWS, splits=3), 0), [*range(100)]),
    "rate": (lambda _: (RateSource(total=50), 20), [*range(20, 50)]),
    "rate in shards": (lambda _: (RateSource(total=50, shards=3), [16, 17, 0]), [16, *range(16)]),
    "a directory that grows": (
        lambda at: (ParquetSource(files(at / "in"), grows=True, until="_END"), at / "in" / "[0-3].parquet"),
        [*range(40, 100)],
    ),
    "some of its files": (
        lambda at: (ParquetSource(files(at / "in"), grows=True, until="_END"), [at / "in/9.parquet", at / "in/0.parquet"]),
        [*range(10, 90)],
    ),
    "a directory": (lambda at: (ParquetSource(files(at / "in")), [at / "in" / "0.parquet"]), [*range(10, 100)]),
    "all of a directory": (lambda at: (ParquetSource(files(at / "in")), at / "in"), []),
    "csv": (lambda at: (CsvSource(files(at / "in", "csv")), at / "in" / "[5-9].csv"), [*range(50)]),
}  # fmt: skip


def flow_of(source: df.Source, out: CollectSink, parallelism: int) -> df.Dataflow:
    flow = df.Dataflow("behind", parallelism=parallelism)
    flow.source(source, uid="numbers", name="Numbers").select("n", uid="n").apply(out, uid="out")
    return flow


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("begun", "run"), [(1, 1), (3, 2)])
def test_a_run_reads_what_comes_behind_the_position(tmp_path: Path, case: str, begun: int, run: int) -> None:
    make, wanted = CASES[case]
    source, position = make(tmp_path)
    out, store = CollectSink(), open_store(str(tmp_path / "store"))
    done = bootstrap(store, flow_of(source, out, begun), {}, positions={"Numbers": position})
    assert not validate(store, level="full").problems
    assert done.record.properties["bootstrap.source.numbers"] == done.positions["numbers"]
    LocalRuntime(store, parallelism=run).run(flow_of(source, out, begun))
    assert Counter(out.table()["n"].to_pylist() if out.table().num_columns else []) == Counter(wanted)


def test_a_source_without_a_position_begins_when_the_job_does(tmp_path: Path) -> None:
    """Files that come between the bootstrap and the run are read: nothing is kept of the source."""
    (tmp_path / "in").mkdir()
    pq.write_table(ROWS.slice(0, 10), tmp_path / "in" / "0.parquet")
    out, store = CollectSink(), open_store(str(tmp_path / "store"))
    record = bootstrap(store, flow_of(ParquetSource(tmp_path / "in"), out, 2), {}).record
    assert [state.name for state in record.states if state.operator == "numbers"] == []
    pq.write_table(ROWS.slice(10, 10), tmp_path / "in" / "1.parquet")
    LocalRuntime(store).run(flow_of(ParquetSource(tmp_path / "in"), out, 2))
    assert sorted(out.table()["n"].to_pylist()) == [*range(20)]


class Own(df.Source):
    """A source of a user, which does not say how it begins behind a position."""

    @property
    def schema(self) -> pa.Schema:
        return ROWS.schema

    def enumerator(self) -> df.SplitEnumerator:
        return ListEnumerator(lambda: [df.Split("all", b"")])

    def read(self, split: df.Split, context: df.ReaderContext) -> Iterator[df.Chunk]:
        yield df.Chunk(ROWS.to_batches()[0].slice(split.position), 100)


class Behind(Own):
    """It says so."""

    def behind(self, position: int) -> df.StartingPoint:
        table = ListEnumerator.keeping({})
        return df.StartingPoint(table, (df.Split("all", b"", position),), f"behind {position} numbers")


def test_a_source_of_ones_own_says_where_it_begins(tmp_path: Path) -> None:
    out, store = CollectSink(), open_store(str(tmp_path / "store"))
    with pytest.raises(InvalidInput, match=r"source 'numbers' cannot begin behind 60: Own cannot begin behind a posi"):
        bootstrap(store, flow_of(Own(), out, 1), {}, positions={"numbers": 60})
    bootstrap(store, flow_of(Behind(), out, 1), {}, positions={"numbers": 60})
    LocalRuntime(store).run(flow_of(Behind(), out, 1))
    assert out.table()["n"].to_pylist() == [*range(60, 100)]


def _table(_: Any) -> Any:
    return None


REFUSED: list[tuple[str, Callable[[Path], df.Source], Any, str]] = [
    ("too many rows", lambda _: MemorySource(ROWS), 101, "has 100 rows, and cannot begin behind 101"),
    ("fewer than none", lambda _: MemorySource(ROWS), -1, "takes a whole number, at least 0"),
    ("rows as text", lambda _: MemorySource(ROWS), "5", "takes a whole number"),
    ("one of three shards", lambda _: RateSource(shards=3), 7, "7 is the position of 1 shards, and the RateSource has 3"),
    ("beyond a shard", lambda _: RateSource(total=9, shards=3), [1, 4, 1], "'shard-00001' of the RateSource has 3 rows"),
    ("no such file", lambda at: ParquetSource(files(at / "in")), "in/x.parquet", "which it does not read"),
    ("files elsewhere", lambda at: ParquetSource(files(at / "in"), grows=True), __file__, "which it does not read"),
    ("a number of files", lambda at: ParquetSource(files(at / "in")), 3, "cannot begin behind 3"),
    ("no files", lambda at: ParquetSource(files(at / "in")), "in/*.x", "has no file that ends with"),
    ("a table without its end", lambda _: SparkSource(OffsetTable(_table, "n"), schema=ROWS.schema), {"read": 3},
     "has read. Give read and until"),
    ("a table by number", lambda _: SparkSource(OffsetTable(_table, "n", grows=True), schema=ROWS.schema), 3,
     "gave int for a position"),
    ("an offset of no type", lambda _: SparkSource(OffsetTable(_table, "n", grows=True), schema=ROWS.schema),
     {"read": 1.5}, "'read': 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "position", "words"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_a_position_that_a_source_cannot_have_is_refused(
    tmp_path: Path, make: Callable[[Path], df.Source], position: Any, words: str
) -> None:
    store = open_store("memory://begin-behind")
    with pytest.raises(InvalidInput, match=words) as caught:
        bootstrap(store, flow_of(make(tmp_path), CollectSink(), 1), {}, positions={"numbers": position})
    assert str(caught.value).startswith("source 'numbers' cannot begin behind")
    assert caught.value.kind in (ErrorKind.INVALID_ARGUMENT, ErrorKind.INVALID_PATH)
    assert not [*store.storage.list("checkpoints/")]


def test_a_source_over_frames_keeps_its_position(tmp_path: Path) -> None:
    """As its enumerator would: what a run on Spark makes of it, tests/spark says."""
    offsets = OffsetTable(_table, "n", grows=True)
    rows = SparkSource(offsets, schema=ROWS.schema).behind({"read": 41}).enumerator.to_pylist()
    assert rows == [{"name": None, "number": 0, "text": None}, {"name": "read", "number": 41, "text": None}]
    directory = SparkSource(DirectoryFrames(str(tmp_path), schema="n bigint", grows=True), schema=ROWS.schema)
    assert directory.behind({}).enumerator.to_pylist() == [{"name": None, "number": 0, "text": None}]


class Halve(df.Operator):
    """Halves even numbers."""

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return pa.record_batch({"n": [n if n % 2 else n // 2 for n in batch["n"].to_pylist()]}, schema=batch.schema)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_job_with_a_loop_begins_with_nothing_on_its_way(tmp_path: Path, parallelism: int) -> None:
    out, flow = CollectSink(), df.Dataflow("halves", parallelism=parallelism)
    loop = flow.loop(ROWS.schema)
    numbers = flow.source(MemorySource(pa.table({"n": [16, 12, 7, 40]}, schema=ROWS.schema)), uid="numbers")
    halved = flow.apply(Halve(), numbers.rebalance(), loop.rebalance(), uid="halve")
    loop.close(halved.filter(lambda batch: pc.equal(pc.bit_wise_and(batch["n"], 1), 0), uid="even"))
    halved.filter(lambda batch: pc.equal(pc.bit_wise_and(batch["n"], 1), 1), uid="odd").apply(out, uid="out")
    store = open_store(str(tmp_path))
    bootstrap(store, flow, {}, positions={"numbers": 1})
    assert not validate(store, level="full").problems
    LocalRuntime(store).run(flow)
    assert sorted(out.table()["n"].to_pylist()) == [3, 5, 7]
