"""Rows become the state of a job: of every kind, from every tool, refused where they do not fit.

A source that begins behind a position reads exactly what comes after it, in every run. The guide
and the example run as they stand.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.bootstrap import Rows, bootstrap, columns_of
from stateformat.backends.connectors import CollectSink, CsvSource, MemorySource, ParquetSource, RateSource
from stateformat.backends.connectors.sources.basic import ListEnumerator
from stateformat.backends.local import LocalRuntime
from stateformat.backends.spark import DirectoryFrames, OffsetTable, SparkSource
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, InvalidState, JobMismatch, StorageError
from stateformat.model import Mode
from stateformat.segments import WriteOptions
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tables import ArrowStream
from stateformat.ttl import NO_TIME_US, TTL_COLUMN, Ttl
from stateformat.validation import validate
from tests.bootstrap.history_jobs import orders, plain, shop_flow, shop_states, world_flow
from tests.servers.server import BUCKET, S3Server
from tests.worlds import data as data_world
from tests.worlds.local import Faulty

OBJECTS = WriteOptions(inline_bytes_max=0)


def totals_flow(*, parallelism: int = 3, **types: pa.DataType) -> df.Dataflow:
    """``totals/totals``: key → total int64 (not null), seen timestamp[us]."""
    rows = pa.schema([("key", types.get("key", pa.int64())), ("total", pa.int64())]).empty_table()
    flow = df.Dataflow("totals", parallelism=parallelism)
    flow.source(MemorySource(rows), uid="orders").key_by("key").apply(Totals(rows.schema.field("key")), uid="totals")
    return flow


class Totals(df.Operator):
    def __init__(self, key: pa.Field) -> None:
        self._key = key

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        values = [pa.field("total", pa.int64(), nullable=False), pa.field("seen", pa.timestamp("us"))]
        return [
            df.ValueState("totals", [self._key], values),
            df.ListState("log", [self._key], {"total": pa.int64()}),
            df.SplitList("entries", {"total": pa.int64()}),
            df.UnionList("shared", {"total": pa.int64()}),
        ]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return None


def totals(count: int = 10, **more: Any) -> pa.Table:
    seen = pa.array([1_767_225_600_000_000] * count, pa.timestamp("us"))
    return pa.table({"key": list(range(count)), "total": [7 * n for n in range(count)], "seen": seen, **more})


def state(store: CheckpointStore | Path, name: str) -> list[dict[str, Any]]:
    """The rows of a state, by an order of their own."""
    found = store if isinstance(store, CheckpointStore) else open_store(str(store))
    return sorted(found.open().state(*name.split("/")).table().to_pylist(), key=repr)


@pytest.mark.parametrize("parallelism", [1, 5])
@pytest.mark.parametrize("options", [None, OBJECTS])
def test_the_states_of_another_checkpoint_arrive_whole_whatever_their_kind(
    tmp_path: Path, parallelism: int, options: WriteOptions | None
) -> None:
    flow, names = world_flow(parallelism)
    history = data_world.data_store(f"memory://bootstrap-world-{tmp_path.name}").open()
    done = bootstrap(tmp_path / "new", flow, {new: history.state(*old) for new, old in names.items()}, options=options)
    store = open_store(str(tmp_path / "new"))
    assert not validate(store, level="full").problems
    for new, old in names.items():
        found, wanted = store.open().state(*new.split("/")).table(), data_world.expected(*old)
        assert data_world.same_rows(found, wanted), new
        assert done.rows[new] == len(wanted) * (parallelism if old[1] == "rates" else 1)
    assert done.record.properties == {"bootstrap.states": ", ".join(names)}


@pytest.mark.parametrize(("parallelism", "unaligned"), [(1, False), (3, True), (4, False)])
def test_a_run_that_begins_with_history_ends_as_one_that_has_seen_it(
    tmp_path: Path, parallelism: int, unaligned: bool
) -> None:
    """The rows behind the position come to a state as the history left it."""
    every, seen = orders(300), orders(180)
    wanted, found = CollectSink(), CollectSink()
    LocalRuntime(open_store(str(tmp_path / "whole")), parallelism=parallelism).run(shop_flow(every, wanted))
    flow, store = shop_flow(every, found), open_store(str(tmp_path / "begun"))
    bootstrap(store, flow, shop_states(seen), positions={"Orders": 180, "rates": 2})
    LocalRuntime(store, parallelism=parallelism, unaligned=unaligned).run(flow)
    assert plain(found) == plain(wanted)


def test_the_first_checkpoint_is_like_that_of_a_run(tmp_path: Path) -> None:
    """The same graph, the same states but for those with which sources begin, the same places."""
    stores = [open_store(str(tmp_path / name)) for name in ("run", "begun")]
    LocalRuntime(stores[0]).begin(shop_flow(orders(0), CollectSink()))
    runs = LocalRuntime(stores[0]).begin(shop_flow(orders(10), CollectSink()))
    assert runs is not None
    record = bootstrap(stores[1], shop_flow(orders(10), CollectSink()), shop_states(orders(10))).record
    LocalRuntime(stores[0]).run(shop_flow(orders(10), CollectSink()))
    first = stores[0].history()[-1]
    assert record.kind == first.kind == "checkpoint"
    assert [(o.uid, o.name, o.parallelism, o.max_parallelism, o.chain, o.key_hash) for o in record.graph.operators] == [
        (o.uid, o.name, o.parallelism, o.max_parallelism, o.chain, o.key_hash) for o in first.graph.operators
    ]
    assert record.graph.edges == first.graph.edges
    assert not any(operator.done for operator in record.graph.operators)
    of_sources = {("orders", "splits"), ("orders", "enumerator"), ("rates", "splits"), ("rates", "enumerator")}
    mine = {(one.operator, one.name): one for one in record.states}
    assert mine == {key: one for key, one in first.by_state.items() if key not in of_sources}
    places = stores[1].open().handles.select(["operator", "state", "subtask"]).to_pylist()
    owed = [one for one in record.states if one.mode is not Mode.COMMITTABLES]
    assert len(places) == sum(record.graph.operator(one.operator).parallelism for one in owed)


def forms(directory: Path) -> dict[str, Callable[[], Any]]:
    """The same rows as each tool has them; those of the dataset lie in several files."""
    rows = totals(1000)
    directory.mkdir()
    for number in range(3):
        pq.write_table(rows.slice(400 * number, 400), directory / f"{number}.parquet")
    return {
        "table": lambda: rows,
        "batch": lambda: rows.combine_chunks().to_batches()[0],
        "reader": lambda: pa.RecordBatchReader.from_batches(rows.schema, rows.to_batches(max_chunksize=37)),
        "dataset": lambda: pyarrow.dataset.dataset(directory),
        "duckdb": lambda: duckdb.sql(f"from '{directory}/*.parquet'"),
        "polars": lambda: polars.from_arrow(rows),
        "pandas": lambda: rows.to_pandas(),
        "without rows": lambda: rows.slice(0, 0),
    }


@pytest.mark.parametrize("form", ["table", "batch", "reader", "dataset", "duckdb", "polars", "pandas", "without rows"])
def test_whatever_speaks_arrow_is_taken(tmp_path: Path, form: str) -> None:
    given = forms(tmp_path / "rows")[form]()
    bootstrap(tmp_path / "s", totals_flow(), {"totals/totals": given})
    assert state(tmp_path / "s", "totals/totals") == (
        [] if form == "without rows" else sorted(totals(1000).to_pylist(), key=repr)
    )


@pytest.mark.parametrize("categorical", [False, True])
@pytest.mark.parametrize("tool", ["polars", "pandas"])
def test_text_of_every_tool_is_a_key(tmp_path: Path, tool: str, categorical: bool) -> None:
    names = ["Oslo", None, "Łódź", ""]
    rows: Any
    if tool == "polars":
        rows = polars.DataFrame({"key": names, "total": [1, 2, 3, 4], "seen": None})
        rows = rows.cast({"key": polars.Categorical}) if categorical else rows
    else:
        rows = pandas.DataFrame({"key": names, "total": [1, 2, 3, 4], "seen": None})
        rows = rows.astype({"key": "category"}) if categorical else rows
    bootstrap(tmp_path, totals_flow(key=pa.string()), {"totals/totals": rows})
    assert {row["key"]: row["total"] for row in state(tmp_path, "totals/totals")} == dict(
        zip(names, [1, 2, 3, 4], strict=True)
    )


@pytest.mark.s3
def test_it_writes_to_s3_in_a_request_for_each_object(moto: S3Server) -> None:
    """Besides, it lists to see that the store is empty and that nobody else has published."""
    store = open_store(f"s3://{BUCKET}/bootstrap", **moto.options())
    bootstrap(
        store, totals_flow(), {"totals/totals": totals(50_000), "totals/log": totals(10).select(["key", "total"])}
    )
    assert not validate(store, level="full").problems
    assert len(state(store, "totals/totals")) == 50_000


def test_the_columns_of_a_state_can_be_asked_for() -> None:
    found = columns_of(totals_flow())
    assert found["totals/totals"] == pa.schema(
        [("key", pa.int64()), pa.field("total", pa.int64(), nullable=False), ("seen", pa.timestamp("us"))]
    )
    assert [*found] == ["totals/totals", "totals/log", "totals/entries", "totals/shared"]


TWICE = totals(10, key=[0, 1, 1, 2, 2, 2, 3, 3, 4, None])
FEW = totals(3)
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str, ErrorKind]] = [
    ("unknown state", {"totals/total": FEW}, {}, "declares no state 'totals/total'; did you mean 'totals/totals'",
     ErrorKind.UNKNOWN_STATE),
    ("unknown operator", {"tatals/totals": FEW}, {}, "declares no state 'tatals/totals'", ErrorKind.UNKNOWN_OPERATOR),
    ("a runtime's state", {"totals/progress": FEW}, {}, "is the runtime's own", ErrorKind.STATE_NOT_ALLOWED),
    ("a source's state", {"orders/splits": FEW}, {}, "positions of sources", ErrorKind.STATE_NOT_ALLOWED),
    ("missing", {"totals/totals": FEW.drop_columns(["seen"])}, {}, "they lack 'seen'", ErrorKind.SCHEMA_MISMATCH),
    ("more", {"totals/totals": FEW.append_column("x", [[1, 2, 3]])}, {}, "they have besides 'x'",
     ErrorKind.SCHEMA_MISMATCH),
    ("type", {"totals/totals": totals(3, total=["a", "b", "c"])}, {}, "'total' is string and should be int64",
     ErrorKind.SCHEMA_MISMATCH),
    ("everything at once", {"totals/totals": pa.table({"key": [1.5], "toal": [1]})}, {},
     "they lack 'total', 'seen'; they have besides 'toal'; 'key' is double and should be int64",
     ErrorKind.SCHEMA_MISMATCH),
    ("too large", {"totals/totals": totals(1, total=pa.array([2**63], pa.uint64()))}, {},
     "not every value of it is a int64", ErrorKind.SCHEMA_MISMATCH),
    ("null", {"totals/totals": totals(3, total=[1, None, 3])}, {}, "'total' is declared without nulls and holds 1",
     ErrorKind.NULL_NOT_ALLOWED),
    ("equal keys", {"totals/totals": TWICE}, {},
     r"several rows with one key: (\{'key': \d\} \(\d rows\)(, )?){3} and perhaps more", ErrorKind.DUPLICATE_ROW_KEY),
    ("two equal keys", {"totals/totals": TWICE.slice(0, 3)}, {}, r"key: \{'key': 1\} \(2 rows\)\. Keep the row that",
     ErrorKind.DUPLICATE_ROW_KEY),
    ("equal places", {"totals/log": pa.table({"key": [1, 1], "_index": [5, 5], "total": [1, 2]})}, {},
     r"\{'key': 1, '_index': 5\} \(2 rows\)", ErrorKind.DUPLICATE_ROW_KEY),
    ("last without order", {"totals/totals": FEW}, {"on_duplicate": "last"}, "needs order_by",
     ErrorKind.INVALID_ARGUMENT),
    ("last of a list", {"totals/log": Rows(FEW, "total", "last")}, {}, "it is a list, which keeps every row",
     ErrorKind.INVALID_ARGUMENT),
    ("last of entries", {"totals/shared": Rows(FEW, "total", "last")}, {}, "it is union state",
     ErrorKind.INVALID_ARGUMENT),
    ("no such order", {"totals/totals": FEW}, {"order_by": "at"}, "ordered by 'at', but have no columns",
     ErrorKind.SCHEMA_MISMATCH),
    ("order of words", {"totals/totals": totals(2, at=["a", "b"])}, {"order_by": "at", "on_duplicate": "last"},
     "column 'at' is string and says the order", ErrorKind.SCHEMA_MISMATCH),
    ("order of nulls", {"totals/totals": totals(2, at=[1, None])}, {"order_by": "at", "on_duplicate": "last"},
     "column 'at' says the order of rows and is null in 1 of 2", ErrorKind.NULL_NOT_ALLOWED),
    ("two orders of a list", {"totals/log": pa.table({"key": [1], "_index": [1], "total": [1]})},
     {"order_by": "total"}, "says it again", ErrorKind.INVALID_ARGUMENT),
    ("undecided", {"totals/totals": totals(3, key=[1, 1, 2], at=[4, 4, 1])}, {"order_by": "at", "on_duplicate": "last"},
     r"several last rows by 'at': \{'key': 1\} \(2 rows\)\. Order them", ErrorKind.DUPLICATE_ROW_KEY),
    ("an option", {"totals/totals": FEW}, {"on_duplicate": "first"}, "Give 'refuse' or 'last'",
     ErrorKind.INVALID_ARGUMENT),
    ("no rows at all", {"totals/totals": [1, 2]}, {}, "of type list, which does not support the Arrow C stream",
     ErrorKind.INVALID_ARGUMENT),
    ("given twice", {"totals/totals": FEW, "Totals/totals": FEW}, {}, "declares no state 'Totals/totals'",
     ErrorKind.UNKNOWN_OPERATOR),
    ("too parallel", {}, {"parallelism": 40_000}, "parallelism", ErrorKind.INVALID_PARALLELISM),
    ("no mapping", {}, {"positions": [3]}, r"the positions are \[3\]", ErrorKind.INVALID_ARGUMENT),
    ("no states", [FEW], {}, "the states are list. Give a mapping", ErrorKind.INVALID_ARGUMENT),
    ("no such source", {}, {"positions": {"ordrs": 3}}, "is no source of dataflow 'totals'?; did you mean 'orders'",
     ErrorKind.UNKNOWN_OPERATOR),
    ("beyond its end", {}, {"positions": {"orders": 3}}, "source 'orders' cannot begin behind 3: the MemorySource has 0",
     ErrorKind.INVALID_ARGUMENT),
    ("no position", {}, {"positions": {"orders": "x"}}, "source 'orders' cannot begin behind 'x'",
     ErrorKind.INVALID_ARGUMENT),
]  # fmt: skip


@pytest.mark.parametrize(
    ("states", "options", "words", "kind"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_what_does_not_fit_is_refused_in_a_sentence_and_nothing_is_published(
    states: dict[str, Any], options: dict[str, Any], words: str, kind: ErrorKind
) -> None:
    store = open_store("memory://bootstrap-refused")
    with pytest.raises(InvalidInput, match=words) as caught:
        bootstrap(store, totals_flow(), states, **options)
    assert caught.value.kind is kind
    assert not [*store.storage.list("checkpoints/")]


def test_text_that_is_not_utf_8_is_refused_and_nothing_is_published() -> None:
    store = open_store("memory://bootstrap-text")
    bad = totals(1, key=pa.array([b"\xff\xfe"]).view(pa.string()))
    with pytest.raises(InvalidState, match=r"column 'key' of state 'totals' of .* holds text that is not UTF-8"):
        bootstrap(store, totals_flow(key=pa.string()), {"totals/totals": bad})
    assert not [*store.storage.list("checkpoints/")]


def test_int96_of_a_dataset_is_refused_until_it_is_read_in_microseconds(tmp_path: Path) -> None:
    """A dataset reads it in nanoseconds, which hold the years 1677 to 2262 alone."""
    seen = pa.array([dt.datetime(9999, 12, 31)], pa.timestamp("us"))  # noqa: DTZ001 - as the file
    rows = totals(1, seen=seen)
    pq.write_table(rows, tmp_path / "a.parquet", use_deprecated_int96_timestamps=True)
    store = tmp_path / "store"
    with pytest.raises(InvalidInput, match=r"'seen' as INT96.*ParquetFileFormat.coerce_int96_timestamp_unit='us'"):
        bootstrap(store, totals_flow(), {"totals/totals": pa.dataset.dataset(tmp_path / "a.parquet")})
    read = pa.dataset.dataset(
        tmp_path / "a.parquet", format=pa.dataset.ParquetFileFormat(coerce_int96_timestamp_unit="us")
    )
    bootstrap(store, totals_flow(), {"totals/totals": read})
    assert state(store, "totals/totals") == rows.to_pylist()


def test_a_store_with_a_checkpoint_and_that_of_another_job_are_refused(tmp_path: Path) -> None:
    bootstrap(tmp_path / "s", totals_flow(), {})
    with pytest.raises(InvalidInput, match=r"already holds checkpoint 1 of job 'totals'") as caught:
        bootstrap(tmp_path / "s", totals_flow(), {})
    assert caught.value.kind is ErrorKind.STORE_NOT_EMPTY
    with pytest.raises(JobMismatch, match="belongs to job 'totals'"):
        bootstrap(tmp_path / "s", shop_flow(orders(3), CollectSink()), {})
    with pytest.raises(InvalidInput, match="the dataflow is 'totals'"):
        bootstrap(tmp_path / "t", "totals", {})  # type: ignore[arg-type]


def test_if_the_second_state_fails_nothing_is_published_and_a_second_try_succeeds(tmp_path: Path) -> None:
    bad = {"totals/totals": totals(2000), "totals/log": pa.table({"key": ["x"], "total": [1]})}
    worse = {"totals/totals": totals(2000), "totals/log": Broken(KeyboardInterrupt())}
    worst = {"totals/totals": totals(2000), "totals/entries": pa.table({"total": pa.array([2**63], pa.uint64())})}
    for states, error in ((bad, InvalidState), (worst, InvalidState), (worse, KeyboardInterrupt)):
        with pytest.raises(error):
            bootstrap(tmp_path / "s", totals_flow(), states, options=OBJECTS)
        assert not [*open_storage(str(tmp_path / "s")).list("checkpoints/")]
    left = len([*(tmp_path / "s" / "segments").rglob("*.parquet")])
    assert left == 6  # three subtasks, and twice the second state failed behind the first
    bootstrap(tmp_path / "s", totals_flow(), {"totals/totals": totals(2000)}, options=OBJECTS)
    store = open_store(str(tmp_path / "s"))
    assert len(store.collect_garbage(delete=True).segments) == left
    assert not validate(store, level="full").problems
    assert state(store, "totals/totals") == sorted(totals(2000).to_pylist(), key=repr)


class Broken(ArrowStream):
    """Rows that end in an error."""

    schema = pa.schema([("key", pa.int64()), ("total", pa.int64())])

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def batches(self) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"key": [1], "total": [2]}, schema=self.schema)
        raise self._error


def test_rows_that_cannot_be_read_are_told_of_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    pq.write_table(totals(100_000), tmp_path / "rows" / "1.parquet", row_group_size=1000)
    data = bytearray((tmp_path / "rows" / "1.parquet").read_bytes())
    data[5000:900_000] = b"x" * 895_000
    (tmp_path / "rows" / "1.parquet").write_bytes(data)
    rows = pyarrow.dataset.dataset(tmp_path / "rows")
    with pytest.raises(
        InvalidInput, match="the rows of state 'totals' of operator 'totals' cannot be read: "
    ) as caught:
        bootstrap(tmp_path / "s", totals_flow(), {"totals/totals": rows})
    assert "\n" not in str(caught.value)


def test_rows_of_a_reader_in_python_fail_without_its_traceback(tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield totals(1).to_batches()[0]
        raise ValueError("the file of Tuesday is gone")

    rows = pa.RecordBatchReader.from_batches(totals(1).schema, batches())
    with pytest.raises(InvalidInput, match=r"the file of Tuesday is gone\. Nothing was published") as caught:
        bootstrap(tmp_path / "s", totals_flow(), {"totals/totals": rows})
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("path", ["segments/", "manifests/"])
def test_a_storage_that_fails_leaves_the_store_without_a_checkpoint(tmp_path: Path, path: str) -> None:
    storage = Faulty(open_storage(str(tmp_path)))
    store = CheckpointStore(storage, sleep=lambda _: None)
    storage.down = False
    storage.order("write", path, "refuse")
    storage.order("open_write", path, "refuse")
    storage.order("create", path, "refuse")
    with pytest.raises((StorageError, CheckpointError)):
        bootstrap(store, totals_flow(), {"totals/totals": totals(2000)}, options=OBJECTS)
    assert not [*storage.inner.list("checkpoints/")]


@pytest.mark.parametrize("held_bytes", [None, 30_000])
@pytest.mark.parametrize("seed", range(4))
def test_the_last_of_several_rows_is_what_a_window_function_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, held_bytes: int | None
) -> None:
    """In memory, and by way of a file."""
    if held_bytes:
        monkeypatch.setattr("stateformat.backends.bootstrap.inputs.HELD_BYTES", held_bytes)
    generator = np.random.default_rng(seed)
    count = 20_000
    at = generator.permutation(count).astype(["int64", "float64", "datetime64[us]", "uint32"][seed]) - (
        np.float64(count / 2) if seed == 1 else 0
    )
    keys = pa.array(generator.integers(0, 3000, count), mask=generator.random(count) < 0.01)
    rows = pa.table({"key": keys, "total": generator.integers(0, 10**6, count), "seen": pa.nulls(count), "at": at})
    wanted = duckdb.sql(
        'select key, total from rows qualify row_number() over (partition by key order by "at" desc) = 1'
    ).to_arrow_table()
    # The same rows again change nothing: they are equal to what is the last already.
    twice = pa.concat_tables([rows, rows.slice(5000)])
    bootstrap(tmp_path / "s", totals_flow(), {"totals/totals": twice}, order_by="at", on_duplicate="last")
    found = [(row["key"], row["total"]) for row in state(tmp_path / "s", "totals/totals")]
    assert sorted(found, key=repr) == sorted(((r["key"], r["total"]) for r in wanted.to_pylist()), key=repr)


def test_a_list_is_in_order_of_arrival_of_a_column_or_of_its_index(tmp_path: Path) -> None:
    rows = pa.table({"key": [1, 2, 1, 1, 2], "total": [30, 7, 10, 20, 8], "at": [3.5, -1.0, -2.5, 0.0, -0.5]})
    cases: dict[str, tuple[Any, list[int]]] = {
        "arrival": (rows.drop_columns(["at"]), [30, 10, 20]),
        "column": (Rows(rows, order_by="at"), [10, 20, 30]),
        "own column": (Rows(rows.drop_columns(["at"]), order_by="total"), [10, 20, 30]),
        "index": (rows.drop_columns(["at"]).append_column("_index", [[0, 0, 9, -4, 1]]), [20, 30, 10]),
    }
    for name, (given, wanted) in cases.items():
        bootstrap(tmp_path / name, totals_flow(), {"totals/log": given})
        found = sorted(state(tmp_path / name, "totals/log"), key=lambda row: row["_index"])
        assert [row["total"] for row in found if row["key"] == 1] == wanted, name


@pytest.mark.parametrize("run_bytes", [None, 50_000])
def test_a_long_list_is_sorted_by_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int | None
) -> None:
    """In memory, and by runs in a file; entries of equal order stay as they came."""
    if run_bytes:
        monkeypatch.setattr(sys.modules["stateformat.backends.bootstrap.bootstrap"], "_RUN_BYTES", run_bytes)
    generator = np.random.default_rng(3)
    keys, at = generator.integers(0, 40, 20_000), generator.integers(-500, 500, 20_000)
    rows = pa.table({"key": keys, "total": range(20_000), "at": at})
    bootstrap(
        tmp_path / "s",
        totals_flow(),
        {"totals/log": Rows(rows, "at"), "totals/shared": Rows(rows.drop_columns(["key"]), "at")},
    )
    found = sorted(state(tmp_path / "s", "totals/log"), key=lambda row: row["_index"])
    for key in range(40):
        wanted = sorted(np.flatnonzero(keys == key).tolist(), key=lambda n: (at[n], n))
        assert [row["total"] for row in found if row["key"] == key] == wanted
    shared = open_store(str(tmp_path / "s")).open().read("totals", "shared", 0).table()["total"].to_pylist()
    assert shared == sorted(range(20_000), key=lambda n: (at[n], n))


def test_entries_are_dealt_evenly_and_keep_their_order(tmp_path: Path) -> None:
    rows = pa.table({"total": list(range(10)), "at": list(range(10, 0, -1))})
    states = {"totals/entries": rows.select(["total"]), "totals/shared": Rows(rows, order_by="at")}
    bootstrap(tmp_path / "s", totals_flow(), states)
    checkpoint = open_store(str(tmp_path / "s")).open()
    parts = [checkpoint.read("totals", "entries", subtask).table()["total"].to_pylist() for subtask in range(3)]
    assert [*chain.from_iterable(parts)] == list(range(10))
    assert sorted(map(len, parts)) == [3, 3, 4]
    assert checkpoint.read("totals", "shared", 0).table()["total"].to_pylist() == list(range(9, -1, -1))


def test_parallelism_properties_and_progress_are_as_asked(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    done = bootstrap(
        open_store(str(tmp_path)),
        totals_flow(),
        {"totals/totals": totals(1000)},
        parallelism=7,
        per_operator={"orders": 2},
        properties={"made by": "me"},
        progress=lambda *now: seen.append(now),
    )
    assert {one.uid: one.parallelism for one in done.record.graph.operators} == {"orders": 2, "totals": 7}
    assert done.record.properties["made by"] == "me"
    assert {name for name, _ in seen} == {"totals/totals"}
    assert sum(rows for _, rows in seen) == 1000 == done.rows["totals/totals"]
    with pytest.raises(InvalidInput, match=r"begins with 'stateformat\.'"):
        bootstrap(tmp_path / "t", totals_flow(), {}, properties={"stateformat.x": "1"})


class Seen(df.Operator):
    """States whose rows expire by either clock."""

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        key, values = [inputs[0].field("key")], {"total": pa.int64()}
        return [
            df.ValueState("by_watermark", key, values, ttl=Ttl(10)),
            df.ListState("by_wall", key, values, ttl=Ttl(86_400_000_000, "processing_time")),
        ]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return None


def test_rows_that_say_no_last_access_begin_to_live_now(tmp_path: Path) -> None:
    rows = pa.schema([("key", pa.int64()), ("total", pa.int64())]).empty_table()
    flow = df.Dataflow("seen", parallelism=2)
    flow.source(MemorySource(rows), uid="orders").key_by("key").apply(Seen(), uid="seen")
    given = pa.table({"key": [1, 2], "total": [3, 4]})
    old = given.append_column(TTL_COLUMN, pa.array([5, 6], pa.timestamp("us")))
    bootstrap(str(tmp_path / "a"), flow, {"seen/by_watermark": given, "seen/by_wall": given})
    bootstrap(str(tmp_path / "b"), flow, {"seen/by_watermark": old, "seen/by_wall": old})
    fresh, past = (open_store(str(tmp_path / name)).open() for name in "ab")
    assert fresh.record.optional_features == ("ttl",)
    times = {
        name: fresh.state("seen", name).table()[TTL_COLUMN].cast(pa.int64()).to_pylist()
        for name in ("by_watermark", "by_wall")
    }
    assert times["by_watermark"] == [NO_TIME_US, NO_TIME_US]
    now_us = fresh.record.state("seen", "by_wall").ttl_now_us
    assert now_us is not None
    assert len({*times["by_wall"]}) == 1
    assert 0 <= now_us - times["by_wall"][0] < 3_600_000_000
    # Event time has not begun, and 1970 is long ago.
    assert past.state("seen", "by_watermark").table().num_rows == 2
    assert past.state("seen", "by_wall").table().num_rows == 0
    assert past.state("seen", "by_wall").with_expired().table().num_rows == 2


def test_rows_of_a_text_that_may_be_two_states_go_to_none(tmp_path: Path) -> None:
    class Named(Totals):
        def __init__(self, name: str) -> None:
            self._name = name

        def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
            return [df.ValueState(self._name, {"key": pa.int64()}, {"total": pa.int64()})]

    flow = df.Dataflow("twins")
    keyed = flow.source(MemorySource(totals(1)), uid="orders").key_by("key")
    keyed.apply(Named("b/c"), uid="a")
    keyed.apply(Named("c"), uid="a/b")
    with pytest.raises(
        InvalidInput, match=r"'a/b/c' may be state 'b/c' of operator 'a' or state 'c' of operator 'a/b'"
    ):
        bootstrap(tmp_path / "store", flow, {"a/b/c": totals().drop_columns("seen")})
    with pytest.raises(InvalidInput, match="'a/b/c' may be"):
        columns_of(flow)


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


REFUSED_POSITIONS: list[tuple[str, Callable[[Path], df.Source], Any, str]] = [
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
    ("make", "position", "words"), [case[1:] for case in REFUSED_POSITIONS], ids=[case[0] for case in REFUSED_POSITIONS]
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


ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "bootstrap.md"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import history_begins

    yield history_begins
    del sys.modules["history_begins"]


def test_a_job_begins_with_the_history_of_a_year(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.go_on(tmp_path)
    assert "the job begins with 7 cities, behind 6 files\n" in capsys.readouterr().out
    assert example.committed(tmp_path / "totals") == example.wanted()


def test_the_guide_runs_as_it_stands(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The orders of 2026 come between the bootstrap and the run."""
    monkeypatch.chdir(tmp_path)
    Path("orders").mkdir()
    names: dict[str, Any] = {}
    text = PAGE.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    for number, block in enumerate(blocks):
        year = {0: 2025, 2: 2026}.get(number)
        for day in example.DAYS.get(year, ()):
            pq.write_table(example.orders(year, day), f"orders/{year}-{day}.parquet")
        if year == 2026:
            Path("orders/_END").touch()
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    found = {row["city"]: row["amount"] for row in pq.read_table("totals").to_pylist()}
    assert found == {city: amount for city, (_, amount) in example.wanted().items()}
    assert f"It prints:\n\n```text\n{capsys.readouterr().out}```" in text
    assert open_store("store").history()[-1].properties["bootstrap.source.orders"] == "behind 6 files"
