"""Rewriting under other names, of operators, states and columns, and with another key hash."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.rewrite import RewriteSpec, rewrite
from stateformat.errors import DamagedCheckpoint, InvalidInput
from stateformat.graph import JobGraph, Operator
from stateformat.keys import DEFAULT_KEY_HASH, key_hash, register_key_hash
from stateformat.reading import Checkpoint
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.rewrite.rewrite_jobs import new_store

BACKWARDS = "test-murmur3-backwards"


def _backwards(columns: Any) -> Any:
    return np.bitwise_not(key_hash(DEFAULT_KEY_HASH)(columns))


register_key_hash(BACKWARDS, _backwards)

KEY = pa.struct([pa.field("f0", pa.string()), pa.field("f1", pa.int64())])
VALUE = pa.struct([pa.field("count", pa.int64()), pa.field("sum", pa.float64()), pa.field("kept", pa.bool_())])
ROWS: list[dict[str, Any]] = [
    {
        "key": {"f0": f"k{i}", "f1": None if i == 3 else i},
        "value": None if i == 7 else {"count": i, "sum": i / 2, "kept": i % 2 == 0},
    }
    for i in range(40)
]


def published(store: CheckpointStore, parallelism: int = 2, *, wrong: bool = False) -> Checkpoint:
    """One state of structs; with ``wrong`` its rows lie in other key groups than their keys'."""
    graph = JobGraph((Operator("old", parallelism, 16),))
    state = declare.value_state("old", "accState", keys={"key": KEY}, values={"value": VALUE})
    options = WriteOptions(trust_key_groups=wrong)
    pending = store.begin(job_id="j", graph=graph, states=[state], parent=None, options=options)
    data = pa.Table.from_pylist(ROWS, pa.schema([pa.field("key", KEY), pa.field("value", VALUE)]))
    owners = pending.context.owners("old", "accState", data)
    for subtask in range(parallelism):
        mine = data.filter(pa.array(owners == subtask))
        if wrong:
            first = subtask * 8
            mine = mine.add_column(0, "_key_group", pa.array(np.full(len(mine), first, np.int32)))
        with pending.context.subtask("old", subtask) as writer:
            writer.write("accState", mine)
        pending.add(writer)
    pending.publish()
    return store.open()


def rows_of(checkpoint: Checkpoint, operator: str, state: str) -> list[dict[str, Any]]:
    found = checkpoint.read(operator, state).table().drop_columns(["_key_group"]).to_pylist()
    return sorted(found, key=repr)


@pytest.mark.parametrize("max_parallelism", [None, 64])
def test_states_and_columns_get_other_names_and_fields_of_structs_become_columns(
    tmp_path: Path, max_parallelism: int | None
) -> None:
    store = new_store(tmp_path)
    place = ("old", "accState")
    columns = {"key.f0": "word", "key.f1": "number", "value.count": "rows", "value.sum": "total"}
    spec = RewriteSpec(
        renames={"old": "new"}, states={place: "totals"}, columns={place: columns}, max_parallelism=max_parallelism
    )
    rewrite(store, published(store), spec)
    after = store.open()
    state = after.record.state("new", "totals")
    assert state.key_columns == ("word", "number")
    assert [item.name for item in state.current.fields] == ["word", "number", "value", "rows", "total"]
    assert rows_of(after, "new", "totals") == sorted(
        (
            {
                "word": row["key"]["f0"],
                "number": row["key"]["f1"],
                "value": row["value"] and {"kept": row["value"]["kept"]},
                "rows": row["value"] and row["value"]["count"],
                "total": row["value"] and row["value"]["sum"],
            }
            for row in ROWS
        ),
        key=repr,
    )
    assert [problem.message for problem in validate(store, level="full").problems] == []


def test_a_struct_of_which_every_field_became_a_column_is_gone(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    columns = {"key": "id", "value.count": "rows", "value.sum": "total", "value.kept": "kept"}
    rewrite(store, published(store), RewriteSpec(columns={("old", "accState"): columns}))
    state = store.open().record.state("old", "accState")
    assert [item.name for item in state.current.fields] == ["id", "rows", "total", "kept"]
    assert rows_of(store.open(), "old", "accState")[0]["id"] == {"f0": "k0", "f1": 0}


def test_another_key_hash_deals_every_key_anew(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    before = published(store, 4)
    wanted = rows_of(before, "old", "accState")
    done = rewrite(store, before, RewriteSpec(key_hash=BACKWARDS))
    after = store.open()
    assert done.rehashed == (("old", "accState"),)
    assert after.graph.operator("old").key_hash == BACKWARDS
    assert rows_of(after, "old", "accState") == wanted
    assert [problem.message for problem in validate(store, level="full").problems] == []
    # The same hash again moves nothing.
    assert rewrite(store, after, RewriteSpec(key_hash=BACKWARDS)).rehashed == ()


@pytest.mark.parametrize("change", [{}, {"max_parallelism": 32}], ids=["moved", "rehashed"])
def test_key_groups_that_are_not_those_of_their_keys_are_noticed_if_asked_for(
    tmp_path: Path, change: dict[str, int]
) -> None:
    store = new_store(tmp_path)
    before = published(store, wrong=True)
    with pytest.raises(DamagedCheckpoint, match=r"key \{'key': \{'f0': 'k\d+'.* lies in key group \d+, but its hash"):
        rewrite(store, before, RewriteSpec(verify_keys=True, **change))
    assert store.open().id == 1


REFUSED: list[tuple[Callable[[], RewriteSpec], str]] = [
    (lambda: RewriteSpec(states={("old", "totals"): "x"}), "no state 'totals'; it has 'accState'"),
    (lambda: RewriteSpec(states={("older", "accState"): "x"}), "no operator 'older'"),
    (lambda: RewriteSpec(states={("old", "accState"): ""}), "cannot have an empty name"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"values": "x"}}), "did you mean 'value'"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"value.counts": "x"}}), "did you mean 'value.count'"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"value.count.x": "x"}}), "no column 'value.count.x'"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"value": "key"}}), "two columns 'key'"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"value.count": "_index"}}), "belong to the format"),
    (lambda: RewriteSpec(columns={("old", "accState"): {"_key_group": "x"}}), "no column '_key_group'"),
    (lambda: RewriteSpec(key_hash="md5"), "unknown key hash 'md5'"),
]


@pytest.mark.parametrize(("spec", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_names_that_are_not_there_or_cannot_be_are_refused(
    tmp_path: Path, spec: Callable[[], RewriteSpec], said: str
) -> None:
    store = new_store(tmp_path)
    before = published(store)
    with pytest.raises(InvalidInput) as refused:
        rewrite(store, before, spec())
    assert said in str(refused.value)
    assert store.open().id == 1


def test_a_field_of_a_struct_that_may_be_null_becomes_no_key(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    graph = JobGraph((Operator("old", 1, 16),))
    state = declare.value_state("old", "s", keys={"key": KEY}, values={"n": pa.int64()})
    pending = store.begin(job_id="j", graph=graph, states=[state], parent=None)
    with pending.context.subtask("old", 0) as writer:
        rows = [{"key": None, "n": 1}, {"key": {"f0": None, "f1": None}, "n": 2}]
        writer.write("s", pa.Table.from_pylist(rows, pa.schema([pa.field("key", KEY), pa.field("n", pa.int64())])))
    pending.add(writer)
    pending.publish()
    with pytest.raises(InvalidInput, match="two keys would be one"):
        rewrite(store, store.open(), RewriteSpec(columns={("old", "s"): {"key.f0": "a", "key.f1": "b"}}))
