"""What a declaration may not say is refused when it is made, and found in what others have stored."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.model import Field, SchemaVersion, State
from stateformat.rules import check_states

GRAPH = sf.JobGraph((sf.Operator("op", 2, 8, key_hash="spark-murmur3-seed42"),))
VALUES = sf.value_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()})


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
        (
            replace(with_fields(VALUES, Field(1, "_k", "int64")), key_columns=("_k",)),
            "such names belong to the format",
        ),
        (replace(VALUES, key_columns=("k", "k")), "has a key column twice"),
        (with_fields(sf.progress_state("op"), Field(1, "x", "int64")), "is progress and has fields"),
        (
            with_fields(VALUES, Field(1, "k", "int64"), nested(9)),
            "nested deeper than 8",
        ),
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
        (sf.list_state("op", "s", keys={"k": pa.int64()}, values={"v": pa.int64()}), {"_index": [0, None]}),
        (sf.timers("op", "s", keys={"k": pa.int64()}), {"_timestamp": [1, None], "_tag": ["a", "b"]}),
        (sf.timers("op", "s", keys={"k": pa.int64()}), {"_timestamp": [1, 2], "_tag": ["a", None]}),
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
