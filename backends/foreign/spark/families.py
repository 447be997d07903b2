"""Column families of a store as states: of joins since format 3, and of ``transformWithState``.

In Spark the keys of families may be nested (a struct of the grouping columns, then the key of a
map, or a time); here they are flat, and begin with the columns that Spark hashes. Some families are
derived from others, such as an index by time: they are *hidden*, but a copy of a checkpoint must
include them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..framing import damaged
from .key_columns import hashed_columns
from .logs import OperatorInfo, StoreInfo
from .schemas import SparkField, SparkType, StoreSchema
from .stores import KeyLayout

Kind = Literal["value", "list", "timers", "hidden"]
TIMERS: Final = "timers"
"""The name of the state that an operator's timers are."""
INDEX: Final = SparkField("index", SparkType("long", pa.int64()))
"""If keys have several values: the position of each."""
_KEY_TO_TIME: Final = {"$eventTimers_keyToTimestamp": "event", "$procTimers_keyToTimestamp": "processing"}
_COUNTER: Final = "$rowCounter_"
_JOIN_LISTS: Final = ("left-keyWithTsToValues", "right-keyWithTsToValues")
_JOIN_TIMES: Final = ("left-tsWithKey", "right-tsWithKey")


class Family(NamedTuple):
    """A column family, or a store that has none."""

    name: str
    """The state's name in stateformat."""
    family: str
    """Spark's name for it."""
    schema: StoreSchema
    """Flat: the hashed columns first."""
    hashed: int
    kind: Kind = "value"
    layout: KeyLayout | None = None
    """How the keys are stored, if not as the schema has them."""
    multiple: bool = False
    tag: str = ""
    """For timers: which time they are in."""


def families_of(operator: OperatorInfo, store: StoreInfo, schemas: Sequence[StoreSchema]) -> Iterator[Family]:
    """Return what a store contains. Raises ``UnsupportedFormat`` for unknown families."""
    if len(schemas) == 1 and schemas[0].family == "default":
        yield Family(store.name, "default", schemas[0], hashed_columns(operator, store, schemas[0]))
        return
    kinds = _variables(operator)
    names = {schema.family for schema in schemas}
    for schema in schemas:
        if schema.family.startswith(_COUNTER) and schema.family.replace(_COUNTER, "$count_") in names:
            # A list with a time to live counts its rows elsewhere; Spark 4.3 makes no such family.
            continue
        if kinds is None:
            yield _of_join(operator, store, schema)
        else:
            yield _of_user(operator, schema, kinds, names)


def _variables(operator: OperatorInfo) -> Mapping[str, str] | None:
    """Return the kinds of the state variables of a user's function; None if there is no
    function.
    """
    found: Any = operator.properties.get("stateVariables")
    if found is None:
        return None
    try:
        return {str(one["stateName"]): str(one["stateVariableType"]) for one in found}
    except (TypeError, KeyError) as error:
        raise damaged(
            operator.path or operator.uid, "its stateVariables cannot be read", kind=ErrorKind.DAMAGED_MANIFEST
        ) from error


def _of_join(operator: OperatorInfo, store: StoreInfo, schema: StoreSchema) -> Family:
    name = schema.family
    if name not in (*_JOIN_LISTS, *_JOIN_TIMES):
        return Family(name, name, schema, hashed_columns(operator, store, schema))
    # The key ends with the row's time.
    hashed = len(schema.key) - 1
    if name in _JOIN_TIMES:
        return Family(name, name, schema, hashed, "hidden", multiple=True)
    flat = replace(schema, key=(*schema.key, INDEX))
    return Family(name, name, flat, hashed, layout=_layout(schema, [(at,) for at in range(hashed + 1)]), multiple=True)


def _of_user(operator: OperatorInfo, schema: StoreSchema, kinds: Mapping[str, str], names: set[str]) -> Family:
    name, kind = schema.family, kinds.get(schema.family, "")
    if kind == "ListState":
        flat = replace(schema, key=(*schema.key, INDEX))
        paths = [(at,) for at in range(len(schema.key))]
        return Family(name, name, flat, len(schema.key), "list", _layout(schema, paths), multiple=True)
    if kind == "MapState" or name in _KEY_TO_TIME:
        grouping = [(0, at) for at in range(len(_struct(operator, schema, 0)))]
        rest = [(1,)] if name in _KEY_TO_TIME else [(1, at) for at in range(len(_struct(operator, schema, 1)))]
        found = _flat(schema, grouping, rest)
        if name not in _KEY_TO_TIME:
            return found
        given = TIMERS if TIMERS not in names else name.strip("$")
        return found._replace(name=given, kind="timers", tag=_KEY_TO_TIME[name])
    if kind == "ValueState":
        return Family(name, name, schema, len(schema.key))
    if not name.startswith("$") or kind not in ("", "TimerState"):
        raise UnsupportedFormat(
            f"{operator.uid} has the state {name!r} of kind {kind or 'none'}, which is not known. Use a newer "
            "stateformat",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            operator=operator.uid,
            state=name,
        )
    return _hidden(operator, schema, kinds)


def _hidden(operator: OperatorInfo, schema: StoreSchema, kinds: Mapping[str, str]) -> Family:
    """A family that Spark derives: the grouping columns are the key, or part of it."""
    labels = [one.name for one in schema.key]
    grouping: list[tuple[int, ...]]
    rest: list[tuple[int, ...]]
    if schema.family.endswith("_timestampToKey"):
        grouping = [(1, at) for at in range(len(_struct(operator, schema, 1)))]
        return _flat(schema, grouping, [(0,)])._replace(kind="hidden")
    if schema.family.startswith("$ttl_") and labels == ["expirationMs", "elementKey"]:
        inner = _struct(operator, schema, 1)
        if kinds.get(schema.family.removeprefix("$ttl_")) == "MapState" and len(inner) == 2:
            grouping = [(1, 0, at) for at in range(len(inner[0].type.children))]
            rest = [(0,), *((1, 1, at) for at in range(len(inner[1].type.children)))]
        else:
            grouping, rest = [(1, at) for at in range(len(inner))], [(0,)]
        return _flat(schema, grouping, rest)._replace(kind="hidden")
    return Family(schema.family, schema.family, schema, len(schema.key), "hidden")


def _struct(operator: OperatorInfo, schema: StoreSchema, at: int) -> Sequence[SparkField]:
    """Return the fields of a nested key column."""
    if at >= len(schema.key) or schema.key[at].type.kind != "struct":
        raise UnsupportedFormat(
            f"keys of the column family {schema.family!r} of {operator.uid} are not laid out as is known: "
            f"{', '.join(f'{one.name} {one.type.kind}' for one in schema.key)}. Use a newer stateformat",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            operator=operator.uid,
        )
    return schema.key[at].type.children


def _layout(schema: StoreSchema, paths: Sequence[tuple[int, ...]]) -> KeyLayout:
    return KeyLayout(schema.key, tuple(paths))


def _flat(schema: StoreSchema, grouping: Sequence[tuple[int, ...]], rest: Sequence[tuple[int, ...]]) -> Family:
    paths = (*grouping, *rest)
    fields = []
    for first, *others in paths:
        field = schema.key[first]
        for at in others:
            field = field.type.children[at]
        fields.append(field)
    flat = replace(schema, key=tuple(fields))
    return Family(schema.family, schema.family, flat, len(grouping), layout=KeyLayout(schema.key, paths))
