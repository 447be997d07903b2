"""Readers that share no code with the library read what it reads; SPEC.md must be enough for them.

Small and inline, large and in objects, in layers, evolved, and rescaled, where handles are cuts.
"""

from __future__ import annotations

import ast
import decimal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stateformat
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.manifest import cut_handles
from stateformat.model import CheckpointKind, Mode
from stateformat.reading import Checkpoint
from stateformat.redistribution import rescale
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.stateformat import independent_readers
from tests.stateformat.independent_readers import JsonAndParquet, Rows, Sql
from tests.worlds.stores import Job, flights_job, flights_store, owned


def rescaled(store: CheckpointStore, parallelism: int) -> CheckpointStore:
    """The store with its newest checkpoint dealt out to another parallelism."""
    source = store.open()
    dealt = rescale(source, source.plan_restore(source.graph.at(parallelism)))
    pending = store.begin(
        job_id=source.record.job_id,
        graph=dealt.graph,
        states=dealt.states,
        parent=store.start(source.record.job_id),
        kind=CheckpointKind.RESCALE,
        source=source.record.ref,
        rescaled_from=dealt.rescaled_from,
    )
    pending.add_handles(cut_handles(source.manifest.full(), dealt.slices))
    pending.publish()
    return store


WORK = Operator(OperatorId("work"), 3, 64)
TYPES = {
    "b": pa.bool_(),
    "i8": pa.int8(),
    "i16": pa.int16(),
    "f": pa.float32(),
    "text": pa.string(),
    "raw": pa.binary(),
    "day": pa.date32(),
    "at": pa.timestamp("us"),
    "utc": pa.timestamp("us", tz="UTC"),
    "money": pa.decimal128(12, 2),
    "place": pa.struct([pa.field("x", pa.float64()), pa.field("tags", pa.list_(pa.string()))]),
    "counts": pa.map_(pa.string(), pa.int64()),
}


def typed_rows(count: int) -> pa.Table:
    """Rows of every type, every third of them null, with a null string key and NaN as double
    keys.
    """
    keys = {
        "k": pa.array([None, *(f"key-{i}" for i in range(1, count))], pa.string()),
        "d": pa.array([float("nan") if i % 5 == 0 else i / 8 for i in range(count)]),
    }
    values = {
        name: pa.array([None if i % 3 == 2 else value(name, i) for i in range(count)], kind)
        for name, kind in TYPES.items()
    }
    return pa.table(keys | values)


def value(name: str, i: int) -> Any:
    micros = 1_700_000_000_000_000 + 1_000_001 * i
    values: dict[str, Any] = {
        "b": i % 2 == 0,
        "text": f"text {i} é",
        "raw": bytes([i % 256, 0, 255]),
        "day": 19_000 + i,
        "at": micros,
        "utc": micros,
        "money": decimal.Decimal(i) / 4,
        "place": {"x": i / 2, "tags": ["a", None, str(i)] if i % 2 else []},
        "counts": [("one", i), ("two", None)],
        "f": i / 2,
    }
    return values.get(name, i % 100)


# DuckDB knows BYTE_STREAM_SPLIT for floats and integers, and not for the bytes of decimals.
PLAIN = WriteOptions(encoding="plain")
ROW_GROUPS = WriteOptions(encoding="plain", inline_bytes_max=0, row_group_rows=500, codec="zstd")


def typed_store(url: str, count: int = 40, options: WriteOptions = PLAIN) -> CheckpointStore:
    store = stateformat.open(url)
    state = declare.value_state("work", "typed", keys={"k": pa.string(), "d": pa.float64()}, values=TYPES)
    rows = typed_rows(count)
    job = Job("typed", JobGraph((WORK,)), (state,), {("work", "typed"): lambda i: owned(rows, ["k", "d"], WORK, i)})
    job.publish(store, None, options=options)
    return store


def large_store(url: str) -> CheckpointStore:
    """Thousands of rows in objects of several row groups."""
    return typed_store(url, 4000, ROW_GROUPS)


def layered_store(url: str) -> CheckpointStore:
    """A base and two deltas of a list state: upserts, deletes, clears, and rows written again after
    a clear.
    """
    store = stateformat.open(url)
    state = declare.list_state("work", "items", keys={"k": pa.int64()}, values={"v": pa.string()})

    def layer(entries: list[tuple[int, int | None, str | None, int]]) -> Any:
        types = {"k": pa.int64(), "_index": pa.int64(), "v": pa.string(), "_op": pa.int8()}
        columns = zip(*entries, strict=True)
        table = pa.table({n: pa.array(c, kind) for (n, kind), c in zip(types.items(), columns, strict=True)})
        return lambda i: owned(table, ["k"], WORK, i)

    base = layer([(k, j, f"base {k}.{j}", 0) for k in range(50) for j in range(3)])
    deltas = [
        [*((k, 0, f"new {k}", 0) for k in range(10)), *((k, 1, None, 1) for k in range(5, 15))]
        + [(k, None, None, 2) for k in range(20, 30)]
        + [(k, 7, f"after the clear {k}", 0) for k in range(25, 35)],
        [(k, 7, None, 1) for k in range(25, 28)] + [(k, 0, "again", 0) for k in range(5, 8)]
        + [(k, None, None, 2) for k in range(3)],
    ]  # fmt: skip
    job = Job("layers", JobGraph((WORK,)), (state,), {("work", "items"): lambda i: base(i).drop_columns(["_op"])})
    permit = job.publish(store, None)
    for entries in deltas:
        permit = job.publish(store, permit, deltas={("work", "items"): layer(entries)})
    return store


def evolved_store(url: str) -> CheckpointStore:
    """A base in one schema, a delta in the next: renamed, dropped, new (with default or not),
    widened.
    """
    store = stateformat.open(url)
    keys, graph = {"k": pa.int64()}, JobGraph((WORK,))
    old = {"old": pa.int32(), "gone": pa.string(), "f": pa.float32()}
    new = [
        pa.field("f", pa.float64()),
        pa.field("new", pa.int64()),
        pa.field("flag", pa.bool_(), nullable=False),
        pa.field("price", pa.decimal128(8, 2)),
        pa.field("note", pa.string()),
    ]
    before = declare.value_state("work", "s", keys=keys, values=old)
    evolution: Any = {"previous": before, "renames": {"old": "new"}, "defaults": {"flag": "true", "price": "9.50"}}
    after = declare.value_state("work", "s", keys=keys, values=new, **evolution)
    values = {
        "old": pa.array(range(30), pa.int32()),
        "gone": ["x"] * 30,
        "f": pa.array(np.arange(30) / 2, pa.float32()),
    }
    base = pa.table({"k": range(30), **values})
    row = {"new": 2**40, "flag": False, "price": None, "note": "n", "f": 0.25, "_op": 0}
    types = pa.schema([("k", pa.int64()), *new, ("_op", pa.int8())])
    delta = pa.Table.from_pylist([{"k": k} | row for k in range(5)], types)
    first = Job("evolved", graph, (before,), {("work", "s"): lambda i: owned(base, ["k"], WORK, i)})
    deltas = {("work", "s"): lambda i: owned(delta, ["k"], WORK, i)}
    Job("evolved", graph, (after,)).publish(store, first.publish(store, None), deltas=deltas)
    return store


def first_flights(url: str) -> CheckpointStore:
    """Every mode, all running, all segments in objects."""
    store = stateformat.open(url)
    flights_job().publish(store, None, options=WriteOptions(inline_bytes_max=0))
    return store


STORES: dict[str, Any] = {
    "every mode, inline, layered, part finished": flights_store,
    "every mode, in objects": first_flights,
    "every type": typed_store,
    "large": large_store,
    "layers with clears": layered_store,
    "evolved": evolved_store,
    "every mode at 3": lambda url: rescaled(first_flights(url), 3),
    "every mode at 7": lambda url: rescaled(first_flights(url), 7),
    "inline at 6": lambda url: rescaled(flights_store(url), 6),
    "large at 5, then 2": lambda url: rescaled(rescaled(large_store(url), 5), 2),
    "layers with clears at 4": lambda url: rescaled(layered_store(url), 4),
    "evolved at 5": lambda url: rescaled(evolved_store(url), 5),
}


UNMERGED = ("every mode, in objects", "every type", "large", "large at 5, then 2")


def comparable(rows: Rows, *, ordered: bool) -> list[str]:
    """Rows as text, which holds NaN equal to NaN; sorted where the format promises no order within
    a key group.
    """
    texts = [repr(sorted((name, plain(value)) for name, value in row.items())) for row in rows]
    return texts if ordered else sorted(texts)


def plain(value: Any) -> Any:
    """One spelling for what Arrow and SQL spell differently: map entries, and the time zone of
    instants.
    """
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "tzinfo") and value.tzinfo is not None:
        return f"{value.timestamp():.6f} UTC"
    return value


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of each store, which is written once."""

    @cache
    def build(name: str) -> Path:
        root = tmp_path_factory.mktemp("stores") / "store"
        STORES[name](str(root))
        return root

    return build


@pytest.mark.parametrize("name", STORES)
def test_json_and_parquet_are_enough(name: str, built: Callable[[str], Path]) -> None:
    store = stateformat.open(str(built(name)))
    checkpoint, reader = store.open(), JsonAndParquet(built(name))
    compared = compare(checkpoint, reader, reader)
    # Layers hide rows, and progress is merged; elsewhere every row of the manifest has been
    # compared.
    everything = checkpoint.record.totals.rows
    assert compared == everything if name in UNMERGED else 0 < compared <= everything
    assert validate(store, level="full").findings == ()


@pytest.mark.parametrize("name", [name for name in STORES if "evolved" not in name])
def test_sql_is_enough(name: str, built: Callable[[str], Path], tmp_path: Path) -> None:
    root = built(name)
    assert compare(stateformat.open(str(root)).open(), Sql(root, tmp_path), JsonAndParquet(root)) > 0


def compare(checkpoint: Checkpoint, reader: JsonAndParquet | Sql, names: JsonAndParquet) -> int:
    """Every state of every subtask against the library; how many rows that were."""
    count = 0
    assert names.record["checkpoint_id"] == checkpoint.id
    for state in checkpoint.states:
        ordered = state.mode is not Mode.KEYED
        subtasks = [subtask for subtask in names.subtasks(state.operator, state.name) if subtask is not None]
        for subtask in [None] if state.mode is Mode.COORDINATOR else subtasks:
            theirs = reader.read(state.operator, state.name, subtask)
            ours = checkpoint.read(state.operator, state.name, subtask).table().to_pylist()
            assert comparable(theirs, ordered=ordered) == comparable(ours, ordered=ordered), (state.name, subtask)
            count += len(theirs)
    return count


@pytest.mark.parametrize("parallelism", [1, 2, 5, 64])
@pytest.mark.parametrize("name", ["large", "layers with clears", "evolved"])
def test_a_subtask_of_another_parallelism_owns_the_rows_of_its_key_groups(
    name: str, parallelism: int, built: Callable[[str], Path]
) -> None:
    # Section 11, last sentence, by the independent reader, against a restore plan of the library.
    checkpoint, reader = stateformat.open(str(built(name))).open(), JsonAndParquet(built(name))
    (state,) = checkpoint.states
    rows = [row for i in reader.subtasks("work", state.name) for row in reader.read("work", state.name, i)]
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism))
    for subtask in range(0, parallelism, 7):
        first, behind = -(-subtask * 64 // parallelism), -(-(subtask + 1) * 64 // parallelism)
        mine = [row for row in rows if first <= row["_key_group"] < behind]
        restored = checkpoint.restore(plan, "work", subtask)[state.name].table().to_pylist()
        assert comparable(mine, ordered=False) == comparable(restored, ordered=False)


def test_the_oracles_see_what_the_stores_hold(built: Callable[[str], Path]) -> None:
    # Said here by hand, so that two readers that agree on nothing at all would be noticed.
    reader = JsonAndParquet(built("layers with clears"))
    items = {(r["k"], r["_index"]): r["v"] for i in range(3) for r in reader.read("work", "items", i)}
    assert [items.get((k, 0)) for k in (0, 3, 5, 9, 10)] == [None, "new 3", "again", "new 9", "base 10.0"]
    assert [items.get((k, 1)) for k in (4, 5, 14, 15)] == ["base 4.1", None, None, "base 15.1"]
    assert [items.get((22, j)) for j in (0, 1, 7)] == [None, None, None]
    assert [items.get((k, 7)) for k in (27, 28, 34)] == [None, "after the clear 28", "after the clear 34"]
    assert [items.get((k, 2)) for k in (29, 30)] == [None, "base 30.2"]


def test_the_readers_import_nothing_of_ours() -> None:
    source = Path(independent_readers.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) < 220
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {str(getattr(node, "module", None) or node.names[0].name).split(".")[0] for node in nodes}
    assert modules == {
        "__future__",
        "base64",
        "collections",
        "decimal",
        "duckdb",
        "io",
        "json",
        "pathlib",
        "pyarrow",
        "typing",
    }
