"""The keys with most rows or bytes, against DuckDB; with memory for few sums, and with hot keys."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from stateformat.graph import JobGraph
from stateformat.inspecting import top as module, top_document
from stateformat.inspecting.top import BYTES, ROWS, HotKeys, even_keys, hot_keys
from stateformat.model import State
from stateformat.reading import Checkpoint, StateRows
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import open as open_store
from tests.stores import Job, operator, owned

OPERATOR = operator("op", 2)


def checkpoint_of(folder: Path, state: State, *layers: pa.Table) -> Checkpoint:
    """A checkpoint of one state, whole and then with deltas, at two subtasks."""
    store = open_store(str(folder), durable=False)
    keys = list(state.key_columns)
    rows = {("op", state.name): lambda subtask: owned(layers[0], keys, OPERATOR, subtask)}
    job = Job("hot", JobGraph((OPERATOR,)), (state,), rows)
    options = WriteOptions(row_group_rows=1000)
    permit = job.publish(store, None, options=options)
    for layer in layers[1:]:
        delta = {("op", state.name): lambda subtask, layer=layer: owned(layer, keys, OPERATOR, subtask)}
        permit = job.publish(store, permit, deltas=delta, options=options)
    return store.open()


def skewed(count: int, keys: int, seed: int) -> pa.Table:
    """Entries of lists: a tenth of all stands under key 7, other keys have a few each."""
    random = np.random.default_rng(seed)
    key = np.where(random.random(count) < 0.1, 7, random.integers(0, keys, count))
    table = pa.table({"k": key, "n": pa.array(range(count), pa.int64())})
    text = "select k, row_number() over (partition by k order by n) - 1 as _index, repeat('x', n % 40) as t from rows"
    return duckdb.from_arrow(table).query("rows", text).to_arrow_table()


def wanted(rows: StateRows, measure: str, limit: int) -> tuple[list[int], int, int, int]:
    """The greatest values, and keys, rows and bytes in all, by DuckDB."""
    table = rows.table()
    columns = [name for name in table.column_names if str(table.schema.field(name).type) == "string"]
    fixed = sum(8 for name in table.column_names if name not in columns)
    # A text takes its bytes and the four of its offset.
    size = " + ".join([str(fixed), *(f"coalesce(strlen({name}), 0) + 4" for name in columns)])
    keys = ", ".join(rows.state.key_columns)
    found = duckdb.from_arrow(table).query(
        "rows", f"select count(*) as {ROWS}, sum({size})::bigint as {BYTES} from rows group by {keys}"
    )
    sums = found.query("sums", f"select {measure}, {ROWS}, {BYTES} from sums order by 1 desc").fetchall()
    return [row[0] for row in sums[:limit]], len(sums), sum(row[1] for row in sums), sum(row[2] for row in sums)


def figures(found: HotKeys, measure: str) -> tuple[list[int], int, int, int]:
    return found.keys[measure].to_pylist(), found.key_count, found.rows, found.size_bytes


@pytest.mark.parametrize("held_bytes", [32 << 20, 8000, 500])
@pytest.mark.parametrize("by_group", [True, False])
@pytest.mark.parametrize("limit", [1, 100_000])
def test_the_greatest_keys_are_those_that_duckdb_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes: int, by_group: bool, limit: int
) -> None:
    """Whether all sums are held, complete groups leave, or sums are set aside in buckets."""
    monkeypatch.setattr(module, "HELD_BYTES", held_bytes)
    state = declare.list_state("op", "log", keys={"k": pa.int64()}, values={"t": pa.string()})
    rows = checkpoint_of(tmp_path, state, skewed(6000, 800, 1)).state(state)
    found = hot_keys(rows, ROWS, limit, by_group=by_group)
    greatest, keys, count, _ = wanted(rows, ROWS, limit)
    assert figures(found, ROWS)[:3] == (greatest, keys, count)
    assert found.keys["k"][0].as_py() == 7
    assert figures(hot_keys(rows, BYTES, limit, by_group=by_group), BYTES) == wanted(rows, BYTES, limit)


def test_layers_are_merged_before_rows_are_counted(tmp_path: Path) -> None:
    state = declare.map_state("op", "log", keys={"k": pa.string()}, map_key=pa.int64(), values={"v": pa.int64()})
    base = {"k": ["a"] * 5 + ["b"] * 3 + [None], "_map_key": [0, 1, 2, 3, 4, 0, 1, 2, 0], "v": [0] * 9}
    gone = {"k": ["a"] * 4 + ["b"], "_map_key": [0, 1, 2, 3, 7], "_op": pa.array([1, 1, 1, 1, 0], pa.int8())}
    gone["v"] = pa.array([None, None, None, None, 7], pa.int64())
    rows = checkpoint_of(tmp_path, state, pa.table(base), pa.table(gone)).state(state)
    found = hot_keys(rows, ROWS, 9, by_group=True)
    told = dict(zip(found.keys["k"].to_pylist(), found.keys[ROWS].to_pylist(), strict=True))
    assert told == {"b": 4, "a": 1, None: 1}
    assert found.key_count == 3


PAIR = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.string())])


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.float64(), [0.0, -0.0, float("nan"), None, 1.5]),
        (pa.bool_(), [True, False, None, True, True]),
        (pa.binary(), [b"\x00", b"", None, b"\xff", b""]),
        (PAIR, [{"a": 1, "b": "x"}, {"a": 1, "b": None}, None, {"a": None, "b": None}, {"a": 1, "b": "x"}]),
    ],
    ids=str,
)
def test_keys_of_every_type_are_summed_up(tmp_path: Path, kind: Any, values: list[Any]) -> None:
    state = declare.list_state("op", "log", keys={"k": kind}, values={"v": pa.int64()})
    count = len(values)
    table = pa.table(
        {"k": pa.array(values, kind), "_index": pa.array(range(count), pa.int64()), "v": pa.array(range(count))}
    )
    rows = checkpoint_of(tmp_path, state, table).state(state)
    found = hot_keys(rows, ROWS, 10, by_group=True)
    keys = {repr(0.0 if value == 0 and kind == pa.float64() else value) for value in values}
    assert (found.key_count, found.rows) == (len(keys), count)


@pytest.mark.parametrize(
    ("values", "by", "each"),
    [
        ({"v": pa.int64()}, ROWS, 1),
        ({"v": pa.int64()}, BYTES, 16),
        ({"t": pa.string()}, ROWS, 1),
        ({"t": pa.string()}, BYTES, None),
    ],
)
def test_what_every_key_has_is_known_without_reading(
    tmp_path: Path, values: Mapping[str, Any], by: str, each: int | None
) -> None:
    state = declare.value_state("op", "one", keys={"k": pa.int64()}, values=dict(values))
    empty = pa.table({"k": pa.array([], pa.int64()), **{name: pa.array([], kind) for name, kind in values.items()}})
    rows = checkpoint_of(tmp_path, state, empty).state(state)
    assert even_keys(rows, by) == each
    found = hot_keys(rows, by, 3, by_group=True)
    assert (found.keys.num_rows, found.key_count) == (0, 0)


def test_key_groups_and_subtasks_are_counted_by_the_manifest(tmp_path: Path) -> None:
    state = declare.list_state("op", "log", keys={"k": pa.int64()}, values={"t": pa.string()})
    checkpoint = checkpoint_of(tmp_path, state, skewed(30_000, 4000, 1))
    task = checkpoint.read("op", "log")
    table = task.table().append_column("one", pa.array(np.ones(30_000)))
    groups = (
        duckdb.from_arrow(table)
        .query("rows", "select _key_group, count(*) from rows group by 1 order by 2 desc, 1")
        .fetchall()
    )
    reads = sum(counts.calls for counts in checkpoint.storage.stats.operations.values())  # type: ignore[attr-defined]
    (found,) = top_document(checkpoint, [state], by="rows", limit=4, keys=False)
    assert sum(counts.calls for counts in checkpoint.storage.stats.operations.values()) == reads  # type: ignore[attr-defined]
    told = found["key_groups"]
    assert [(entry["key_group"], entry["rows"]) for entry in told["greatest"]] == groups[:4]
    assert (told["count"], told["with_rows"]) == (128, len(groups))
    assert told["skew"] == round(groups[0][1] * 128 / 30_000, 2)
    assert sum(entry["rows"] for entry in found["subtasks"]["greatest"]) == 30_000
    assert found["keys"] is None
