"""Layers merged, schemas evolved and keys hashed anew, against models in plain Python.

How a program that writes deltas by the library alone keeps its layers few, and what many cost. What
an open checkpoint restores by a plan, and which plans, operators and subtasks it refuses.
"""

from __future__ import annotations

import decimal
import logging
import math
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import stateformat
import stateformat as sf
from stateformat.backends.rewrite import RewriteSpec, rewrite
from stateformat.errors import ErrorKind, InvalidState
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.manifest import cut_handles
from stateformat.model import Field, SchemaVersion, State
from stateformat.reading import overlay, rekey
from stateformat.reading.merge import evolve_table, merge_layers
from stateformat.reading.overlay import Keys, merged_piecewise
from stateformat.redistribution import rescale
from stateformat.schema import CLEAR, DELETE, UPSERT, segment_schema
from stateformat.segments import WriteOptions, row_key_codes
from stateformat.states import UNKNOWN_MAX, Layer, declare, should_fold, value_state
from stateformat.states.delta_policy import LAYERS_MAX
from stateformat.tables import SizedCall
from tests.worlds.segments import CountingStorage, table
from tests.worlds.stores import counts_job, counts_store, operator

VALUE = declare.value_state("op", "value", keys={"k": pa.int64()}, values={"v": pa.int64()})
MAP = declare.map_state("op", "map", keys={"k": pa.string()}, map_key=pa.float64(), values={"v": pa.int64()})
Row = dict[str, Any]
Layers = list[list[Row]]

KEYS = st.sampled_from(["a", "", None, "b"])
MAP_KEYS = st.sampled_from([0.0, -0.0, 1.5, math.nan, None])


def plain(value: Any) -> Hashable:
    """A value such that equal keys of the format are equal in Python."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value + 0.0
    return tuple(sorted((k, plain(v)) for k, v in value.items())) if isinstance(value, dict) else value


def model(layers: Sequence[Sequence[Row]], state: State) -> dict[Any, Any]:
    """SPEC.md section 5.4, a row at a time: row key → v of what stands."""
    found: dict[Any, Any] = {}
    for layer in layers:
        for row in layer:
            if row.get("_op") == CLEAR:
                wanted = tuple(plain(row[name]) for name in state.key_columns)
                found = {name: value for name, value in found.items() if name[: len(wanted)] != wanted}
        for row in layer:
            name = tuple(plain(row[column]) for column in state.row_key)
            if row.get("_op", UPSERT) == UPSERT:
                found[name] = row["v"]
            elif row["_op"] == DELETE:
                found.pop(name, None)
    return found


def as_model(merged: pa.Table, state: State) -> dict[Any, Any]:
    rows = merged.to_pylist()
    found = {tuple(plain(row[column]) for column in state.row_key): row["v"] for row in rows}
    assert len(found) == len(rows), "a row key stands twice"
    return found


def merge(tables: Sequence[pa.Table], state: State, *, includes_base: bool = True) -> pa.Table:
    return merge_layers(tables, state.row_key, state.key_columns, includes_base=includes_base)


def tables_of(layers: Layers, state: State = MAP) -> list[pa.Table]:
    """A base and the deltas above it."""
    schemas = [segment_schema(state, delta=number > 0) for number in range(len(layers))]
    return [pa.Table.from_pylist(rows, schema) for rows, schema in zip(layers, schemas, strict=True)]


def key_group(row: Row) -> int:
    """Any function of the key will do: groups are given, not computed."""
    return sum(map(ord, row["k"] or "")) % 7


@st.composite
def map_layers(draw: st.DrawFn) -> Layers:
    """A base and up to four deltas of a map state, each row key at most once in a layer."""
    layers: Layers = []
    pairs = st.lists(st.tuples(KEYS, MAP_KEYS), max_size=12, unique_by=lambda pair: tuple(map(plain, pair)))
    for number in range(draw(st.integers(1, 5))):
        rows = [
            {"k": key, "_map_key": inner, "v": draw(st.integers(0, 9)), "_op": UPSERT} for key, inner in draw(pairs)
        ]
        if number:
            rows = [row | {"_op": draw(st.sampled_from([UPSERT, DELETE]))} for row in rows]
            cleared = draw(st.lists(KEYS, max_size=2, unique=True))
            rows += [{"k": key, "_map_key": None, "v": None, "_op": CLEAR} for key in cleared]
        rows = [{"_key_group": key_group(row)} | row for row in draw(st.permutations(rows))]
        layers.append(sorted(rows, key=lambda row: row["_key_group"]))
    return layers


@settings(max_examples=100, deadline=None)
@given(map_layers())
def test_layers_merge_as_a_dictionary_would(layers: Layers) -> None:
    merged = merge(tables_of(layers), MAP)
    assert merged.schema.equals(segment_schema(MAP))
    assert as_model(merged, MAP) == model(layers, MAP)
    groups = merged["_key_group"].to_pylist()
    assert groups == sorted(groups) == [key_group(row) for row in merged.to_pylist()]


@settings(max_examples=100, deadline=None)
@given(map_layers(), st.data())
def test_deltas_merged_among_themselves_do_to_a_base_what_they_did_apart(layers: Layers, data: st.DataObject) -> None:
    tables = tables_of(layers)
    first = data.draw(st.integers(1, len(layers)), label="first delta")
    last = data.draw(st.integers(first, len(layers)), label="behind the last")
    if first < last:
        merged = merge(tables[first:last], MAP, includes_base=False)
        assert merged.schema.equals(segment_schema(MAP, delta=True))
        tables[first:last] = [merged]
        clears = [row["k"] for row in merged.to_pylist() if row["_op"] == CLEAR]
        assert len(clears) == len(set(clears))
    assert as_model(merge(tables, MAP), MAP) == model(layers, MAP)


@pytest.mark.parametrize("above", [1, 300, 4000])
def test_a_large_base_under_small_deltas_merges_the_same(above: int) -> None:
    # Rows of the base whose keys no delta touches go another way than the rest.
    rng = np.random.default_rng(above)

    def delta() -> list[Row]:
        keys = sorted(set(rng.integers(0, 5000, above).tolist()), key=lambda k: k % 128)
        drawn = rng.choice([UPSERT, DELETE, CLEAR], len(keys)).tolist()
        return [
            {"_key_group": k % 128, "_op": op, "k": k, "v": None if op == CLEAR else -k}
            for k, op in zip(keys, drawn, strict=True)
        ]

    base = [{"_key_group": k % 128, "k": k, "v": k} for k in sorted(range(4000), key=lambda k: k % 128)]
    layers = [base, delta(), delta()]
    tables = tables_of(layers, VALUE)
    merged = merge(tables, VALUE)
    assert as_model(merged, VALUE) == model(layers, VALUE)
    assert merged["_key_group"].to_pylist() == sorted(merged["_key_group"].to_pylist())
    again = merge([tables[0], merge(tables[1:], VALUE, includes_base=False)], VALUE)
    assert as_model(again, VALUE) == model(layers, VALUE)


@pytest.mark.parametrize(
    "bounds", [{}, {"HELD_BYTES": -1}, {"HELD_BYTES": -1, "_BUCKET_BYTES": 100, "_LARGE_BUCKET": 1}]
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(map_layers(), st.integers(1, 5))
def test_layers_merge_piece_by_piece_as_they_do_together(bounds: dict[str, int], layers: Layers, rows: int) -> None:
    layers = layers if len(layers) > 1 else [*layers, []]
    pieces = []
    for layer in tables_of(layers):
        parts = [layer.slice(start, rows) for start in range(0, len(layer), rows)] or [layer]
        pieces.append([SizedCall(lambda part=part: part, part.nbytes) for part in parts])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in bounds.items():
            patch.setattr(overlay, name, value)
        merged = [call() for call in merged_piecewise(pieces, Keys(MAP.row_key, MAP.key_columns))]
    found = pa.concat_tables([segment_schema(MAP).empty_table(), *merged])
    assert as_model(found, MAP) == model(layers, MAP)


def test_struct_keys_and_a_column_of_everything_are_merged() -> None:
    kind = pa.struct([("a", pa.int64()), ("b", pa.float64())])
    state = declare.list_state("op", "s", keys={"k": kind}, values={"v": pa.list_(pa.string())})
    nan = {"a": 1, "b": math.nan}
    base = [
        {"_key_group": 0, "k": None, "_index": 0, "v": ["null"]},
        {"_key_group": 0, "k": {"a": None, "b": None}, "_index": 0, "v": ["nulls"]},
        {"_key_group": 1, "k": nan, "_index": 0, "v": ["nan"]},
        {"_key_group": 1, "k": nan, "_index": 1, "v": None},
    ]
    delta = [
        {"_key_group": 0, "_op": UPSERT, "k": None, "_index": 0, "v": []},
        {"_key_group": 1, "_op": DELETE, "k": nan, "_index": 0, "v": None},
    ]
    merged = merge(tables_of([base, delta], state), state).to_pylist()
    found = [(row["_key_group"], row["_index"], row["v"]) for row in merged]
    assert found == [(0, 0, ["nulls"]), (0, 0, []), (1, 1, None)]


def test_a_clear_in_a_layer_spares_what_the_same_layer_writes() -> None:
    base = [{"_key_group": 0, "k": "a", "_map_key": float(n), "v": n} for n in range(3)]
    stays = {"_key_group": 0, "k": "a", "_map_key": 1.0, "v": 10}
    delta = [stays | {"_op": UPSERT}, {"_key_group": 0, "_op": CLEAR, "k": "a", "_map_key": None, "v": None}]
    assert merge(tables_of([base, delta]), MAP).to_pylist() == [stays]


def test_a_single_layer_is_given_back_as_it_is_where_it_is_of_the_kind_that_is_asked_for() -> None:
    row = {"_key_group": 0, "k": 1, "v": 1}
    base, delta = tables_of([[row], [row | {"_op": DELETE, "v": None}]], VALUE)
    assert merge([base], VALUE) is base
    assert merge([delta], VALUE, includes_base=False) is delta
    assert merge([delta], VALUE).num_rows == 0
    assert merge([base], VALUE, includes_base=False).to_pylist() == [row | {"_op": UPSERT}]
    assert merge(tables_of([[], []], VALUE), VALUE).num_rows == 0


# ---- row keys as numbers -------------------------------------------------------------------------

SCALARS = st.one_of(st.none(), st.integers(-2, 2))
STRUCTS = st.one_of(st.none(), st.fixed_dictionaries({"x": SCALARS, "y": MAP_KEYS}))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(SCALARS, MAP_KEYS, STRUCTS), min_size=1, max_size=30))
def test_row_keys_have_the_same_number_exactly_if_they_are_equal(rows: list[tuple[Any, ...]]) -> None:
    types = [pa.int8(), pa.float32(), pa.struct([("x", pa.int16()), ("y", pa.float64())])]
    columns = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    codes = row_key_codes(columns).tolist()
    keys = [tuple(map(plain, row)) for row in rows]
    assert sorted(set(codes)) == list(range(len(set(keys))))
    assert len(set(zip(keys, codes, strict=True))) == len(set(keys))


def test_chunks_with_nulls_have_one_numbering() -> None:
    column = pa.chunked_array([pa.array([None, "a"]), pa.array(["b", None]), pa.array(["a"])])
    assert row_key_codes([column]).tolist() == [0, 1, 2, 0, 1]


def test_many_columns_of_many_values_do_not_overflow() -> None:
    columns = [pa.array(np.random.default_rng(seed).integers(0, 10**12, 5000)) for seed in range(8)]
    codes = row_key_codes([pa.chunked_array([column, column]) for column in columns])
    assert len(np.unique(codes)) == 5000
    assert codes[:5000].tolist() == codes[5000:].tolist()


# ---- evolution -----------------------------------------------------------------------------------


def version(number: int, *fields: Field) -> SchemaVersion:
    return SchemaVersion(number, (Field(1, "k", "int64"), *fields))


def state_of(*fields: Field) -> State:
    return State("op", "s", VALUE.mode, (version(1, *fields),), VALUE.kind, ("k",))  # type: ignore[arg-type]


def evolved(state: State, rows: list[Row], *fields: Field, delta: bool = False) -> list[Row]:
    """The rows under a schema of the key and these fields, whose names and types are checked."""
    new = version(2, *fields)
    result = evolve_table(table(state, rows, delta=delta), state.current, new)
    target = State(state.operator, state.name, state.mode, (new,), state.kind, state.key_columns)
    due = [field for field in segment_schema(target, delta=delta) if field.name in result.column_names]
    assert [(name, column.type) for name, column in zip(result.column_names, result.columns, strict=True)] == [
        (field.name, field.type) for field in due
    ]
    found: list[Row] = result.to_pylist()
    return found


@pytest.mark.parametrize(
    ("before", "after", "value"),
    [
        ("int8", "int16", -7),
        ("int16", "int32", 300),
        ("int8", "int64", -128),
        ("float", "double", 0.5),
        ("decimal(5,2)", "decimal(30,2)", decimal.Decimal("1.25")),
    ],
)
def test_types_widen(before: str, after: str, value: Any) -> None:
    rows = [{"k": 1, "v": value}, {"k": 2, "v": None}]
    assert evolved(state_of(Field(2, "v", before)), rows, Field(2, "v", after)) == rows


def test_fields_are_matched_by_id_not_by_name() -> None:
    old = state_of(Field(2, "a", "int64"), Field(3, "b", "utf8"), Field(4, "c", "utf8"))
    # a is renamed to b, b is dropped, c comes first, and a field named a is new.
    new = Field(4, "c", "utf8"), Field(2, "b", "int64"), Field(5, "a", "int32")
    found = evolved(old, [{"k": 1, "a": 10, "b": "old", "c": "x"}], *new)
    assert [*found[0].items()] == [("k", 1), ("c", "x"), ("b", 10), ("a", None)]
    # A column that was dropped and came back starts anew.
    assert evolved(state_of(Field(2, "v", "int64")), [{"k": 1, "v": 5}], Field(3, "v", "int64")) == [
        {"k": 1, "v": None}
    ]


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int64", "-3", -3),
        ("utf8", "none yet", "none yet"),
        ("bool", "true", True),
        ("decimal(4,1)", "2.5", decimal.Decimal("2.5")),
    ],
)
def test_a_new_column_has_its_default_in_old_rows(kind: str, text: str, value: Any) -> None:
    new = Field(2, "v", kind, nullable=False, default=text)
    assert evolved(state_of(), [{"k": 1}], new) == [{"k": 1, "v": value}]


def test_a_default_is_for_upserts_only() -> None:
    rows = [{"_key_group": 0, "_op": op, "k": op} for op in (UPSERT, DELETE, CLEAR)]
    found = evolved(state_of(), rows, Field(2, "v", "int64", default="9"), delta=True)
    assert [row["v"] for row in found] == [9, None, None]


def test_nested_fields_evolve_by_id_too() -> None:
    def nested(inner: str, *point: Field) -> tuple[Field, ...]:
        return (
            Field(10, "s", ("struct", (Field(11, "east", inner), *point))),
            Field(20, "l", ("list", Field(21, "element", ("struct", (Field(22, "n", inner),))))),
            Field(30, "m", ("map", Field(31, "key", "utf8", nullable=False), Field(32, "value", inner))),
        )

    old, new = state_of(*nested("int32", Field(12, "gone", "utf8"))), nested("int64", Field(13, "new", "bool"))
    rows: list[Row] = [
        {"k": 0, "s": {"east": 0, "gone": ""}, "l": [{"n": 0}], "m": [("z", 0)]},
        {"k": 1, "s": {"east": 1, "gone": "g"}, "l": [{"n": 1}, None, {"n": None}], "m": [("a", 1), ("b", None)]},
        {"k": 2, "s": None, "l": None, "m": None},
        {"k": 3, "s": {"east": None, "gone": None}, "l": [], "m": []},
        {"k": 4, "s": {"east": 4, "gone": "h"}, "l": [{"n": 4}], "m": [("d", 4)]},
    ]
    expected = [{**row, "s": row["s"] and {"east": row["s"]["east"], "new": None}} for row in rows]
    assert evolved(old, rows, *new) == expected
    # Sliced arrays have offsets of their own.
    sliced = table(old, rows).slice(1, 3)
    assert evolve_table(sliced, old.current, version(2, *new)).to_pylist() == expected[1:4]
    chunked = pa.concat_tables([sliced, table(old, rows).slice(4)])
    assert evolve_table(chunked, old.current, version(2, *new)).to_pylist() == expected[1:]


def test_the_same_fields_are_not_touched() -> None:
    old = state_of(Field(2, "v", "int64"))
    rows = table(old, [{"k": 1, "v": 1}])
    assert evolve_table(rows, old.current, SchemaVersion(2, old.current.fields)) is rows


X, Y = Field(3, "x", "int64"), Field(4, "y", "int64", nullable=False)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Field(2, "v", "int64"), Field(2, "v", "int8")),
        (Field(2, "v", "int64"), Field(2, "v", ("list", Field(3, "element", "int64")))),
        (Field(9, "w", "int64"), Field(2, "v", "int64", nullable=False)),
        (Field(2, "v", ("struct", (X,))), Field(2, "v", ("struct", (Y,)))),
    ],
)
def test_what_cannot_evolve_is_refused(before: Field, after: Field) -> None:
    old = state_of(before)
    rows = table(old, [{"k": 1, before.name: 1000 if before.type == "int64" else {"x": 1}}])
    with pytest.raises(InvalidState) as raised:
        evolve_table(rows, old.current, version(2, after))
    assert raised.value.kind is ErrorKind.SCHEMA_CANNOT_EVOLVE


# ---- new key groups ------------------------------------------------------------------------------


def test_rekeying_gives_the_groups_of_another_max_parallelism() -> None:
    rows = pa.table({"k": np.arange(1000), "v": np.arange(1000)})
    fine = rekey(rows, VALUE, 128, DEFAULT_KEY_HASH)
    coarse = rekey(fine, VALUE, 16, DEFAULT_KEY_HASH)
    assert fine.column_names == coarse.column_names == ["_key_group", "k", "v"]
    # 16 divides 128, so the new group is the old one modulo 16.
    expected = {row["k"]: row["_key_group"] % 16 for row in fine.to_pylist()}
    assert {row["k"]: row["_key_group"] for row in coarse.to_pylist()} == expected
    for found in (fine, coarse):
        assert found["_key_group"].to_pylist() == sorted(found["_key_group"].to_pylist())
        assert found["k"].to_pylist() == found["v"].to_pylist()


def test_rekeying_keeps_records_in_flight_in_the_order_of_their_channel() -> None:
    state = declare.in_flight_state("op", "f", edge="e", columns={}, keys={"k": pa.int64()})
    rows = [{"_sender": n % 3, "_receiver": 0, "_seq": 100 - n, "k": n % 5} for n in range(100)]
    found = rekey(table(state, rows), state, 4, DEFAULT_KEY_HASH).to_pylist()
    order = [(row["_key_group"], row["_sender"], row["_seq"]) for row in found]
    assert order == sorted(order)
    columns = ("_sender", "_seq", "k")
    assert sorted(tuple(r[c] for c in columns) for r in found) == sorted(tuple(r[c] for c in columns) for r in rows)


def test_what_op_means_stands_wherever_the_author_of_a_runtime_looks() -> None:
    assert (UPSERT, DELETE, CLEAR) == (0, 1, 2)
    folder = Path(stateformat.__file__).resolve().parent
    for text in (
        (folder.parent / "docs/library.md").read_text(),
        stateformat.SnapshotWriter.write.__doc__ or "",
        (folder / "SPEC.md").read_text(),
    ):
        words = " ".join(text.split())
        assert re.search(
            r"\b0\W+(sf\.|stateformat\.)?upsert\b.*\b1\W+(sf\.)?delete\b.*\b2\W+(sf\.)?clear\b", words, re.I
        )


GRAPH = JobGraph((Operator(OperatorId("op"), 1, 128),))
STATE = value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()})


def epoch(store: Any, parent: Any, number: int, *, rows: int, whole: bool) -> Any:
    pending = store.begin(job_id="j", graph=GRAPH, states=[STATE], parent=parent)
    with pending.context.subtask("op", 0) as writer:
        if whole:
            writer.write("s", pa.table({"k": range(rows), "v": [number] * rows}))
        else:
            writer.write("s", pa.table({"k": [number], "v": [number], "_op": pa.array([0], pa.int8())}), delta=True)
    pending.add(writer)
    return pending.publish()


@pytest.mark.parametrize(
    ("layers", "rows", "folds"),
    [
        ([], 1, True),
        ([1000], 0, False),
        ([1000], 10, False),
        ([1000], 500, True),
        ([1000, 200, 200], 50, False),
        ([1000, 200, 200], 200, True),
        ([10**9] + [1] * (UNKNOWN_MAX - 1), 1, False),
        ([10**9] + [1] * UNKNOWN_MAX, 1, True),
    ],
)
def test_a_state_is_folded_when_deltas_come_to_half_of_the_base_or_are_many(
    layers: list[int], rows: int, folds: bool
) -> None:
    for row_bytes in (0, 10):
        assert should_fold([Layer(None, count, count * row_bytes) for count in layers], rows) is folds


def test_a_program_that_asks_keeps_its_layers_few_and_its_rows() -> None:
    store = sf.open("memory://folding")
    parent, most = epoch(store, None, 0, rows=500, whole=True), 0
    for number in range(1, 60):
        whole = parent.checkpoint().should_fold("op", "s", 0, rows=1)
        parent = epoch(store, parent, number, rows=500, whole=whole)
        most = max(most, len(parent.checkpoint().layers("op", "s", 0)))
    assert 1 < most <= UNKNOWN_MAX + 1
    assert parent.checkpoint().read("op", "s").table().num_rows == 500
    assert sum(layer.rows for layer in parent.checkpoint().layers("op", "s", 0)) >= 500


def test_more_layers_than_are_advised_are_told_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    store = sf.open("memory://many-layers")
    parent = epoch(store, None, 0, rows=100, whole=True)
    with caplog.at_level(logging.WARNING):
        for number in range(1, LAYERS_MAX + 3):
            parent = epoch(store, parent, number, rows=0, whole=False)
    [told] = [record.getMessage() for record in caplog.records]
    assert "'s' of operator 'op' lies in 65 layers" in told
    assert "should_fold" in told
    # What is carried is not kept in a chunk for every checkpoint that wrote some of it.
    assert parent.checkpoint().handles["path"].num_chunks <= 8
    # What it advises.
    rewrite(store, store.open(), RewriteSpec())
    assert len(store.open().layers("op", "s", 0)) == 1


def test_the_plan_of_another_checkpoint_restores_nothing() -> None:
    store = counts_store("memory://other-plan", checkpoints=2)
    old, new = store.open(1), store.open(2)
    with pytest.raises(sf.InvalidInput, match="the plan is for checkpoint 1"):
        new.restore(old.plan_restore(old.graph), "counter", 0)


def test_an_operator_that_the_checkpoint_does_not_know_starts_with_nothing() -> None:
    checkpoint = counts_store("memory://new-operator").open()
    graph = sf.JobGraph((*checkpoint.graph.operators, operator("new", 3)), checkpoint.graph.edges)
    plan = checkpoint.plan_restore(graph)
    assert checkpoint.restore(plan, "new", 2) == {}
    with pytest.raises(sf.InvalidInput, match="nor the topology has an operator 'neither'"):
        checkpoint.restore(plan, "neither", 0)


@pytest.mark.parametrize("subtask", [-1, 2, 7])
def test_a_subtask_that_is_not_planned_is_refused_rather_than_empty(subtask: int) -> None:
    checkpoint = counts_store(f"memory://subtask{subtask}").open()
    with pytest.raises(sf.InvalidInput, match="planned at parallelism 2"):
        checkpoint.restore(checkpoint.plan_restore(checkpoint.graph), "counter", subtask)


def test_layers_go_on_at_a_parallelism_at_which_some_subtasks_have_no_rows() -> None:
    store = counts_store("memory://carried", keys=5)
    permit = store.start("counts")
    assert permit is not None
    checkpoint = permit.checkpoint()
    plan = checkpoint.plan_restore(checkpoint.graph.at(parallelism=20))
    pending = store.begin(
        job_id="counts", graph=plan.topology, states=checkpoint.states, parent=permit, carried=checkpoint.carried(plan)
    )
    change = pa.table({"word": [f"w{i}" for i in range(3, 9)], "n": [0] * 6, "_op": pa.array([0] * 6, pa.int8())})
    owners = pending.context.owners("counter", "counts", change)
    for subtask in range(20):
        pending.add(pending.context.subtask("lines", subtask))
        with pending.context.subtask("counter", subtask) as writer:
            writer.write("counts", change.filter(pa.array(owners == subtask)), delta=True)
        pending.add(writer)
    pending.publish()
    rows = store.open().read("counter", "counts").table()
    found = dict(zip(rows["word"].to_pylist(), rows["n"].to_pylist(), strict=True))
    assert found == {"w0": 0, "w1": 1, "w2": 2, **{f"w{i}": 0 for i in range(3, 9)}}
    assert sf.validate(store, level="full").problems == ()


def test_what_a_rescale_has_cut_for_many_is_read_at_once_by_few() -> None:
    storage = CountingStorage("many-cuts")
    store = sf.CheckpointStore(storage)
    counts_job(1, 500).publish(store, None, options=WriteOptions(inline_bytes_max=0))
    checkpoint = store.open()
    dealt = rescale(checkpoint, checkpoint.plan_restore(checkpoint.graph.at(parallelism=128)))
    pending = store.begin(
        job_id="counts",
        graph=dealt.graph,
        states=dealt.states,
        parent=store.start("counts"),
        kind=sf.CheckpointKind.RESCALE,
        rescaled_from=dealt.rescaled_from,
    )
    pending.add_handles(cut_handles(checkpoint.manifest.full(), dealt.slices))
    pending.publish()
    many = store.open()
    plan = many.plan_restore(many.graph.at(parallelism=1))
    before = storage.reads
    rows = many.restore(plan, "counter", 0)["counts"].table()
    assert sorted(rows["n"].to_pylist()) == list(range(500))
    assert len(plan.slices_of("counter", 0)) > 100
    # One request: the segment, whole.
    assert storage.reads - before == 1
