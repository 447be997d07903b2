"""What a declaration may not say is refused when it is made, and found in what others have
stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.model import Field, SchemaVersion, State
from stateformat.rules.graph import check_states
from stateformat.states import list_state, progress_state, timers, value_state

GRAPH = sf.JobGraph((sf.Operator("op", 2, 8, key_hash="spark-murmur3-seed42"),))
VALUES = value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()})


def with_fields(state: State, *fields: Field) -> State:
    return replace(state, schemas=(SchemaVersion(1, fields),), last_field_id=100)


def messages(state: State) -> str:
    return "; ".join(problem.message for problem in check_states(GRAPH, [state]))


def nested(depth: int) -> Field:
    item = Field(100, "element", "int64")
    for level in range(depth):
        item = Field(99 - level, "element", ("list", item))
    return replace(item, name="deep", id=2)


def test_a_good_declaration_has_no_problem() -> None:
    assert messages(VALUES) == ""
    assert messages(with_fields(VALUES, Field(1, "k", "int64"), nested(8))) == ""


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (replace(with_fields(VALUES, Field(1, "_k", "int64")), key_columns=("_k",)), "such names belong to the format"),
        (replace(VALUES, key_columns=("k", "k")), "has a key column twice"),
        (with_fields(progress_state("op"), Field(1, "x", "int64")), "is progress and has fields"),
        (with_fields(VALUES, Field(1, "k", "int64"), nested(9)), "nested deeper than 8"),
        (
            with_fields(
                VALUES,
                Field(1, "k", "int64"),
                Field(2, "s", ("struct", (Field(3, "a", "int64"), Field(4, "a", "int64")))),
            ),
            "two fields of one name in 's'",
        ),
        (
            with_fields(
                VALUES, Field(1, "k", "int64"), Field(2, "s", ("struct", (Field(3, "a", "int64", default="1"),)))
            ),
            "a default in the nested field s.a",
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_stored_declaration_that_breaks_a_rule_is_a_problem(state: State, message: str) -> None:
    assert message in messages(state)


@pytest.mark.parametrize(
    ("state", "columns"),
    [
        (list_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()}), {"_index": [0, None]}),
        (timers("op", "s", keys={"k": pa.int64()}), {"_timestamp": [1, None], "_tag": ["a", "b"]}),
        (timers("op", "s", keys={"k": pa.int64()}), {"_timestamp": [1, 2], "_tag": ["a", None]}),
    ],
)
def test_the_formats_own_part_of_a_row_key_is_not_null(state: State, columns: dict[str, list[object]]) -> None:
    graph = sf.JobGraph((sf.Operator("op", 1, 8),))
    pending = sf.open("memory://declarations").begin(job_id="j", graph=graph, states=[state], parent=None)
    rows = {"k": [1, 2], **({"v": [1, 2]} if state.kind is sf.Kind.LIST else {}), **columns}
    with pytest.raises(sf.InvalidState, match="null") as caught:
        pending.context.subtask("op", 0).write("s", pa.table(rows))
    assert caught.value.kind is sf.ErrorKind.NULL_NOT_ALLOWED


@pytest.mark.parametrize("rows", [None, {"k": [1], "v": [1]}, [pa.table({"k": [1], "v": [1]})], 7, "rows"])
def test_rows_that_are_not_arrow_are_refused_by_what_they_are(rows: object) -> None:
    graph = sf.JobGraph((sf.Operator("op", 1, 8),))
    pending = sf.open("memory://declarations").begin(job_id="j", graph=graph, states=[VALUES], parent=None)
    with pytest.raises(sf.InvalidInput, match="rows are an Arrow table"):
        pending.context.subtask("op", 0).write("s", rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [2.5, "2", True])
def test_a_parallelism_is_an_integer(number: object) -> None:
    with pytest.raises(sf.InvalidInput, match="a parallelism is"):
        GRAPH.at(number)  # type: ignore[arg-type]


# ---- a declaration after another -----------------------------------------------------------------

INT = pa.int64()
X = pa.struct([("x", pa.int32())])


def value(previous: State | None = None, *, values: Any, **evolution: Any) -> State:
    return value_state("o", "s", keys={"k": INT}, values=values, previous=previous, **evolution)


@pytest.mark.parametrize(("kind", "one", "two"), [(INT, 10, 100), (X, {"x": 1}, {"x": 2})], ids=["flat", "nested"])
def test_a_column_renamed_to_the_name_of_a_dropped_one_keeps_its_own_rows(kind: Any, one: Any, two: Any) -> None:
    old = value(values={"a": kind, "b": kind})
    new = value(old, values={"b": kind}, renames={"a": "b"})
    store, permit = sf.open(f"memory://rename-{kind}"), None
    rows = pa.table({"k": [1], "a": pa.array([one], kind), "b": pa.array([two], kind)})
    for state in (old, new):
        graph = sf.JobGraph((sf.Operator("o", 1, 128),))
        pending = store.begin(job_id="j", graph=graph, states=[state], parent=permit)
        with pending.context.subtask("o", 0) as writer:
            writer.write("s", rows) if state is old else writer.carry("s")
        pending.add(writer)
        permit = pending.publish()
    assert store.open().read("o", "s").table()["b"].to_pylist() == [one]


def test_columns_whose_dotted_names_look_nested_keep_ids_of_their_own() -> None:
    old = value(values={"a": pa.struct([("b", pa.int32())]), "a.b": pa.int32()})
    new = value(old, values={"a": pa.struct([("b", INT)]), "a.b": pa.int32()})
    assert new.current.fields[2] == old.current.fields[2]
    assert new.current.fields[1].id == old.current.fields[1].id


AB = value(values={"a": INT, "b": INT})
WITH_DEFAULT = value(value(values={"a": INT}), values={"a": INT, "b": INT}, defaults={"b": "0"})


@pytest.mark.parametrize(
    ("previous", "declared", "error", "words"),
    [
        (AB, {"values": {"c": INT}, "renames": {"a": "elsewhere"}}, sf.InvalidInput, "cannot rename"),
        (AB, {"values": {"c": INT}, "renames": {"a": "c", "b": "c"}}, sf.InvalidInput, "one name"),
        (
            WITH_DEFAULT,
            {"values": {"a": INT, "b": INT}, "defaults": {"b": "7"}},
            sf.InvalidState,
            "has the default '0' in rows from before it and would have '7'",
        ),
        (
            value(values={"a": INT}),
            {"values": [pa.field("a", INT, nullable=False)]},
            sf.InvalidState,
            "may hold nulls and would be declared without",
        ),
        (
            value(values={"a": X}),
            {"values": {"a": pa.struct([pa.field("x", pa.int32(), nullable=False)])}},
            sf.InvalidState,
            "may hold nulls and would be declared without",
        ),
    ],
    ids=["rename-to-nothing", "renames-collide", "default-changes", "strict", "strict-nested"],
)
def test_a_declaration_that_cannot_follow_another_is_refused(
    previous: State, declared: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        value(previous, **declared)


def test_a_declaration_may_lose_columns_and_allow_nulls() -> None:
    assert value(WITH_DEFAULT, values={"b": INT}).current.fields[1].default == "0"
    for kind in (INT, X):
        strict = value(values=[pa.field("a", kind, nullable=False)])
        assert value(strict, values=[pa.field("a", kind)]).current.id == 2


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.int8(), "1_0"), (pa.int32(), " 5 "), (INT, "٣"), (pa.float64(), "inf"), (pa.float32(), "1e300"),
        (pa.date32(), "20200101"), (pa.decimal128(5, 2), "1e2"),
    ],
)  # fmt: skip
def test_a_default_that_other_readers_would_not_understand_is_refused(kind: pa.DataType, text: str) -> None:
    with pytest.raises(sf.InvalidInput, match="is no default for type"):
        value(value(values={"a": INT}), values={"a": INT, "b": kind}, defaults={"b": text})


def test_a_state_does_not_evolve_from_another_state() -> None:
    with pytest.raises(sf.InvalidInput, match="which is another state"):
        value_state("o", "other", keys={"k": INT}, values={"a": INT}, previous=value(values={"a": INT}))
