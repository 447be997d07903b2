"""What becomes of the schema of a state whose rows are all written anew: ids, nullability, defaults
and the schemas that are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from stateformat.errors import InvalidInput
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.model import Field, State
from stateformat.rules.graph import check_states
from stateformat.schema import KEY_GROUP, children, segment_schema
from stateformat.states import declare, rewritten

LONG, INT, TEXT, FLOAT, DOUBLE = pa.int64(), pa.int32(), pa.string(), pa.float32(), pa.float64()
STRICT = pa.struct(
    [pa.field("x", INT, nullable=False), pa.field("y", pa.list_(pa.field("element", TEXT, nullable=False)))]
)
VALUES = [
    pa.field("n", INT, nullable=False),
    pa.field("s", STRICT),
    pa.field("m", pa.map_(TEXT, pa.field("value", FLOAT, nullable=False))),
    pa.field("d", pa.decimal128(8, 2)),
]
FIRST = declare.value_state("op", "s", keys={"k": TEXT}, values=VALUES)
STATE = declare.value_state(
    "op", "s", keys={"k": TEXT}, values=[*VALUES, pa.field("t", TEXT)], previous=FIRST, defaults={"t": "none"}
)


def seen(state: State) -> pa.Schema:
    """The columns as a function sees them: all nullable."""
    return pa.schema([item.remove_metadata() for item in segment_schema(state) if item.name != KEY_GROUP.name])


def changed(**types: Any) -> pa.Schema:
    """The columns of ``STATE`` with other types; None leaves one out, a new name comes last."""
    known = {item.name: item for item in seen(STATE)} | {
        name: None if kind is None else pa.field(name, kind) if isinstance(kind, pa.DataType) else kind
        for name, kind in types.items()
    }
    return pa.schema([item for item in known.values() if item is not None])


def ids(state: State) -> dict[str, int]:
    return {item.name: item.id for item in state.current.fields}


def nullable(fields: tuple[Field, ...], above: str = "") -> Iterator[str]:
    """The full names of the fields that may hold nulls."""
    for item in fields:
        if item.nullable:
            yield above + item.name
        yield from nullable(children(item), f"{above}{item.name}.")


def test_columns_as_a_function_sees_them_are_the_same_state() -> None:
    assert rewritten(STATE, seen(STATE)) is STATE
    assert [schema.id for schema in STATE.schemas] == [1, 2]


@pytest.mark.parametrize(
    ("types", "new", "schemas"),
    [
        ({"n": LONG}, set(), [1, 2, 3]),
        ({"d": pa.decimal128(12, 2)}, set(), [1, 2, 3]),
        ({"t": None}, set(), [1, 2, 3]),
        ({"n": pa.int16()}, {"n"}, [1, 2, 3]),
        ({"n": TEXT, "t": None}, {"n"}, [1, 2, 3]),
        ({"s": pa.struct([("x", TEXT)])}, {"s"}, [1, 2, 3]),
        ({"s": pa.struct([("x", LONG), ("y", pa.list_(TEXT))])}, set(), [1, 2, 3]),
        ({"s": pa.struct([("x", INT), ("y", pa.list_(TEXT)), ("z", TEXT)])}, set(), [1, 2, 3]),
        ({"m": pa.map_(TEXT, DOUBLE)}, set(), [1, 2, 3]),
        ({"m": pa.map_(INT, FLOAT)}, {"m"}, [1, 2, 3]),
        # A name that is new, and what older schemas cannot be read as, begin the history anew.
        ({"u": TEXT}, {"u"}, [3]),
        ({"u": TEXT, "t": None}, {"u"}, [3]),
        ({"t": pa.field("t", TEXT, nullable=False)}, set(), [3]),
        ({"n": pa.field("n", TEXT, nullable=False)}, {"n"}, [3]),
    ],
)
def test_a_column_keeps_its_id_where_its_type_is_equal_or_widens(
    types: dict[str, Any], new: set[str], schemas: list[int]
) -> None:
    found = rewritten(STATE, changed(**types))
    before, after = ids(STATE), ids(found)
    assert {name for name, field_id in after.items() if before.get(name) != field_id} == new
    assert all(after[name] > STATE.last_field_id for name in new)
    assert found.last_field_id >= max(after.values())
    assert [schema.id for schema in found.schemas] == schemas
    # What held no nulls still holds none, at any depth, and defaults stay.
    kept = {name for name in after if name not in new and not isinstance(types.get(name), pa.Field)}
    strict = {"n", "s.x", "s.y.element", "m.key", "m.value"}
    assert not {name for name in nullable(found.current.fields) if name in strict and name.partition(".")[0] in kept}
    defaults = {item.name: item.default for item in found.current.fields}
    assert defaults == {name: "none" if name == "t" and "t" not in new else None for name in after}
    graph = JobGraph((Operator(OperatorId("op"), 1, 8, key_hash="spark-murmur3-seed42"),))
    assert list(check_states(graph, [found])) == []


def test_renames_that_are_told_keep_ids_and_a_key_may_have_another_name() -> None:
    names = {"n": "t", "t": "n"}
    columns = pa.schema([item.with_name(names.get(item.name, item.name)) for item in seen(STATE)])
    found = rewritten(STATE, columns, renames=names)
    assert ids(found) == {**ids(STATE), "n": ids(STATE)["t"], "t": ids(STATE)["n"]}
    assert len(found.schemas) == 3
    columns = pa.schema([item.with_name("key" if item.name == "k" else item.name) for item in seen(STATE)])
    found = rewritten(STATE, columns, renames={"k": "key"})
    assert (found.key_columns, ids(found)["key"]) == (("key",), ids(STATE)["k"])
    assert len(found.schemas) == 1
    with pytest.raises(InvalidInput, match="cannot rename 'zz'"):
        rewritten(STATE, columns, renames={"zz": "key"})
