"""A store's states in our words: key columns, column families, declared states, rows.

The first columns of a store's key row determine its partition; how many depends on the operator.
Spark partitions rows by ``pmod(murmur3(columns, seed 42), partitions)``, which is stateformat's
default key hash.

Stores of joins since format 3, and of ``transformWithState``, have column *families*. In Spark
their keys may be nested (a struct of the grouping columns, then the key of a map, or a time); here
they are flat, and begin with the columns that Spark hashes. Some families are derived from others,
such as an index by time: they are *hidden*, but a copy of a checkpoint must include them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, UnsupportedFormat
from stateformat.keys import check_key_types, hash_keys, key_groups
from stateformat.model import Mode, State, TimerClock
from stateformat.schema import segment_schema
from stateformat.states import list_state, map_state, timers, value_state

from ..byte_strings import saturated_microseconds
from ..framing import damaged
from ..source import Note
from .logs import OperatorInfo, StoreInfo
from .schemas import SparkField, SparkType, StoreSchema, arrow_fields, distinct, has_values
from .stores import KeyLayout
from .unsafe_row import decode_rows
from .unsafe_writing import encode_rows

NESTED_KEY_HASH: Final = "spark-murmur3-seed42-nested"
"""For operators whose keys have arrays or maps, which stateformat's key hash does not support."""
UNKNOWN_KEY_HASH: Final = "spark-murmur3-seed42-unknown-columns"
"""For operators whose columns no file names (Spark before 3.1)."""
_LONGEST_ARRAY: Final = 4096
_EXPANDED_ROWS: Final = 1 << 15

JOIN_STORES: Final = (
    "left-keyToNumValues",
    "left-keyWithIndexToValue",
    "right-keyToNumValues",
    "right-keyWithIndexToValue",
)
_WHOLE_KEY: Final = (
    "stateStoreSave",
    "dedupe",
    "dedupeWithinWatermark",
    "flatMapGroupsWithState",
    "applyInPandasWithState",
    "globalLimit",
)
_GROUPED_BY_USER: Final = (
    "transformWithStateExec",
    "transformWithStateInPandasExec",
    "transformWithStateInPySparkExec",
)


def hashed_columns(operator: OperatorInfo, store: StoreInfo, schema: StoreSchema) -> int:
    """Return how many columns of the key row, from the first on, determine its partition.

    0 if the operator has no keys: one partition has everything. Raises ``UnsupportedFormat`` for an
    unknown operator, by its name.
    """
    count = len(schema.key)
    if not schema.known:
        return count
    if not 0 <= store.prefix_columns <= count:
        raise damaged(
            operator.path or f"state/{operator.id}",
            f"store {store.name!r} has {store.prefix_columns} prefix columns, and its key has {count}",
            kind=ErrorKind.DAMAGED_MANIFEST,
        )
    if operator.name in _WHOLE_KEY:
        return _non_empty(schema.key, count)
    if operator.name == "sessionWindowStateStoreSaveExec":
        return store.prefix_columns or count - 1
    if operator.name == "symmetricHashJoin":
        name = schema.family if schema.family in JOIN_STORES else store.name
        return count - 1 if name.endswith("keyWithIndexToValue") else count
    if operator.name in _GROUPED_BY_USER:
        return _non_empty(schema.key, count)
    raise UnsupportedFormat(
        f"operator {operator.id} is {operator.name!r}, which is not known: which columns its keys are dealt by is not "
        "known either. Use a newer stateformat",
        kind=ErrorKind.UNSUPPORTED_FEATURE,
        operator=operator.uid,
    )


def spark_hashes(columns: Sequence[pa.Array]) -> npt.NDArray[np.int32]:
    """Return Spark's hash of each row, over the columns that determine its partition.

    Supports types that Spark can hash and stateformat keys cannot have: arrays and maps, at any
    depth.
    """
    if not any(pa.types.is_nested(column.type) for column in columns):
        return hash_keys(columns)
    rows = len(columns[0])
    # An array becomes as many columns as it has items, so rows are processed in pieces.
    starts = range(0, rows, _EXPANDED_ROWS) or (0,)
    slices = ([column.slice(start, _EXPANDED_ROWS) for column in columns] for start in starts)
    return np.concatenate([hash_keys([part for column in some for part in _expanded(column)]) for some in slices])


def partitions_of(columns: Sequence[pa.Array], partitions: int) -> npt.NDArray[np.int32]:
    """Return the partition of each row: its hash, floor-mod the number of partitions."""
    return key_groups(spark_hashes(columns), partitions)


def _expanded(column: pa.Array) -> list[pa.Array]:
    """Return columns that together have the hash of one.

    Spark hashes the items of an array one after another, each seeded by the one before, and a null
    not at all: as it hashes columns. So an array is a column for each position, null where the
    array is shorter; a map is an array of keys and values by turns.
    """
    kind = column.type
    if pa.types.is_struct(kind):
        return [part for field in column.flatten() for part in _expanded(field)]
    if not (pa.types.is_list(kind) or pa.types.is_map(kind)):
        return [column]
    offsets = column.offsets.to_numpy().astype(np.int64)
    starts = offsets[:-1]
    lengths = np.where(column.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets), 0)
    items = [column.keys, column.items] if pa.types.is_map(kind) else [column.values]
    longest = int(lengths.max()) if len(lengths) else 0
    if longest > _LONGEST_ARRAY:
        raise UnsupportedFormat(
            f"a key holds an array of {longest} items; keys of up to {_LONGEST_ARRAY} can be compared with their "
            "partition",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
    if not longest:
        # Nothing to hash: like a column of nulls.
        return [pa.nulls(len(column), pa.int8())]
    found = []
    for index in range(longest):
        places = pa.array(starts + index, mask=index >= lengths)
        found += [part for values in items for part in _expanded(values.take(places))]
    return found


def _non_empty(key: tuple[SparkField, ...], count: int) -> int:
    # The key of a limit is one column of the type void.
    return count if any(has_values(item.type) for item in key) else 0


def infer_operator(operator: int, stores: dict[str, StoreSchema], partitions: int) -> OperatorInfo:
    """Return the operator for Spark 3.5, which writes no operator metadata, from its stores and
    schemas.
    """
    names = tuple(sorted(stores))
    prefix = 0
    missing = sorted({*JOIN_STORES} - stores.keys()) if stores.keys() & {*JOIN_STORES} else []
    if missing:
        path = f"state/{operator}/0/{missing[0]}/_metadata/schema"
        raise damaged(path, "it is missing, and other stores of the join are there", kind=ErrorKind.OBJECT_MISSING)
    if names == tuple(sorted(JOIN_STORES)):
        kind = "symmetricHashJoin"
    else:
        schema = stores.get("default") or next(iter(stores.values()))
        key, value = [item.name for item in schema.key], [item.name for item in schema.value]
        kind = "stateStoreSave" if schema.known else ""
        if key and key[-1] == "sessionStartTime" and value[:1] == ["session_window"]:
            kind, prefix = "sessionWindowStateStoreSaveExec", len(key) - 1
        elif value == ["expiresAtMicros"]:
            kind = "dedupeWithinWatermark"
        elif value == ["__dummy__"]:
            kind = "dedupe"
        elif value and value[0] == "groupState":
            kind = "flatMapGroupsWithState"
        elif len(key) == 1 and not has_values(schema.key[0].type):
            kind = "globalLimit"
    infos = tuple(StoreInfo(name, prefix, partitions) for name in names)
    return OperatorInfo(operator, kind, infos, None, {}, {})


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


NO_KEY = "no_key"
"""The key column of an operator without keys; always 0."""
PRESENT = "present"
"""The value column of a store whose values hold nothing; always true."""


_BYTES = SparkType("binary", pa.binary())
_NO_STATE = State("", "", Mode.KEYED, ())


@dataclass(frozen=True)
class StateShape:
    """A store as a state of stateformat."""

    state: State
    hashed: int
    """How many of Spark's key columns, from the first on, determine a key's partition."""
    schema: StoreSchema
    notes: tuple[Note, ...]
    kind: Kind = "value"
    tag: str = ""
    """For timers: ``event`` or ``processing``."""
    opaque: tuple[int, ...] = ()
    """Positions of key columns of types that stateformat cannot hash: they are kept as Spark's
    bytes.
    """

    @property
    def stored(self) -> StoreSchema:
        """The schema in which opaque key columns decode to bytes."""
        kept = enumerate(self.schema.key)
        key = tuple(SparkField(item.name, _BYTES) if at in self.opaque else item for at, item in kept)
        return replace(self.schema, key=key)

    def key_columns(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Return, of columns as a reader returns them, those that determine the partition."""
        chosen = zip(self.schema.key[: self.hashed], columns, strict=False)
        return [column for item, column in chosen if has_values(item.type)]

    def batch(
        self, columns: Sequence[pa.Array], group: int, stored: Sequence[pa.Array] | None = None
    ) -> pa.RecordBatch:
        """Return the rows of one partition, in the schema of the state's segments.

        ``stored`` are the columns by :attr:`stored`, if something is opaque.
        """
        rows = len(columns[0]) if columns else 0
        schema = segment_schema(self.state)
        count = len(self.schema.key)
        names = stored if self.opaque and stored is not None else columns
        keys = self.key_columns(names) or [pa.array(np.zeros(rows, np.int8))]
        rest = _kept(self.schema.key[self.hashed :], names[self.hashed : count])
        values = [*(columns[at] for at in self.opaque), *_kept(self.schema.value, columns[count:])]
        values = values or [pa.array(np.ones(rows, np.bool_))]
        own: list[pa.Array] = []
        if self.kind == "list":
            own, rest = rest, []
        elif self.kind == "timers":
            moments = saturated_microseconds(rest[0].to_numpy(zero_copy_only=False))
            own, rest, values = [pa.array(moments), pa.array([self.tag] * rows, pa.string())], [], []
        if len(rest) > 1:
            rest = [pa.Array.from_buffers(schema.field("_map_key").type, rows, [None], children=rest)]
        made = [pa.array(np.full(rows, group, np.int32)), *own, *keys, *rest, *values]
        fitted = [_fit(column, field.type) for column, field in zip(made, schema, strict=True)]
        return pa.RecordBatch.from_arrays(fitted, schema=schema)

    def stored_columns(
        self, columns: Sequence[pa.Array], rows: int, where: str
    ) -> tuple[list[pa.Array], list[pa.Array]]:
        """Return the columns of keys, by :attr:`stored`, and of values: what :meth:`batch` takes.

        ``columns`` are those of the state's segments without the key group. Raises
        ``InvalidInput`` about ``where`` for what Spark has in other columns otherwise.
        """
        given = iter(columns)
        own = [next(given)] if self.kind in ("list", "timers") else []
        if self.kind == "timers":
            _check_made("_tag", self.tag, next(given), where)
        fields = self.stored.key
        keys = _spread(fields[: self.hashed], given, rows)
        if not any(has_values(item.type) for item in fields[: self.hashed]):
            _check_made(NO_KEY, 0, next(given), where)
        wanted = [item for item in fields[self.hashed :] if has_values(item.type)]
        if self.kind == "list":
            rest = own
        elif self.kind == "timers":
            rest = [_milliseconds(own[0], where)]
        else:
            rest = next(given).flatten() if len(wanted) > 1 else [next(given)] if wanted else []
        keys += _spread(fields[self.hashed :], iter(rest), rows)
        shown = [next(given) for _ in self.opaque]
        values = _spread(self.schema.value, given, rows)
        for at, column in zip(self.opaque, shown, strict=True):
            _check_shown(self.schema.key[at], keys[at], column, where)
        for column in given:
            _check_made(segment_schema(self.state).names[-1], True, column, where)
        return keys, values


def shape_of(operator: OperatorInfo, store: StoreInfo, family: Family) -> StateShape:
    """Return the state of a store or of a column family.

    Raises ``UnsupportedFormat`` for one that cannot be a state of stateformat.
    """
    schema, hashed, name = family.schema, family.hashed, family.name
    subject = f"{operator.uid}/{name}"
    opaque = tuple(at for at, item in enumerate(schema.key) if has_values(item.type) and not _hashable(item))
    shape = StateShape(_NO_STATE, hashed, schema, (), family.kind, family.tag, opaque)
    stored = shape.stored.key
    keys = [item for item in stored[:hashed] if has_values(item.type)]
    rest = [item for item in stored[hashed:] if has_values(item.type)]
    values = [*(schema.key[at] for at in opaque), *(item for item in schema.value if has_values(item.type))]
    _check_collations(schema.key[:hashed], subject)
    names, notes = _names([*keys, *values], subject)
    for at, item in enumerate(values[: len(opaque)]):
        message = (
            f"key column {item.name} is of type {item.type.arrow}, which no key of ours is: it is kept as Spark's "
            f"bytes, and column {names[len(keys) + at]} has what they say"
        )
        notes.append(Note("opaque", subject, message))
    key_fields = _named(keys, names[: len(keys)]) or [pa.field(NO_KEY, pa.int8())]
    value_fields = _named(values, names[len(keys) :]) or [pa.field(_free(PRESENT, names), pa.bool_())]
    if not keys:
        notes.append(Note("renamed", subject, f"the operator has no key: column {NO_KEY} is 0 in its one partition"))
    dropped = [item.name for item in (*schema.key, *schema.value) if not has_values(item.type)]
    if dropped and family.kind != "timers":
        message = f"column {', '.join(map(repr, dropped))} of the type void holds nothing and is left out"
        notes.append(
            Note("omitted", subject, message if values else f"{message}; {value_fields[0].name} stands for it")
        )
    try:
        if family.kind == "list":
            state = list_state(operator.uid, name, keys=key_fields, values=pa.schema(value_fields))
        elif family.kind == "timers":
            notes.append(Note("renamed", subject, f"Spark's {family.family} is {name}"))
            clock: TimerClock = "processing_time" if family.tag == "processing" else "event_time"
            state = timers(operator.uid, name, keys=key_fields, clock=clock)
        elif rest:
            map_key = rest[0].type.arrow if len(rest) == 1 else pa.struct(arrow_fields(rest))
            listed = ", ".join(item.name for item in rest)
            notes.append(Note("renamed", subject, f"the key's further column {listed} is _map_key"))
            state = map_state(operator.uid, name, keys=key_fields, map_key=map_key, values=pa.schema(value_fields))
        else:
            state = value_state(operator.uid, name, keys=key_fields, values=pa.schema(value_fields))
    except CheckpointError as error:
        raise UnsupportedFormat(
            f"store {store.name!r} of {operator.uid} ({operator.name}) cannot be a state: {error}",
            kind=error.kind,
            operator=operator.uid,
            state=name,
        ) from error
    return replace(shape, state=state, notes=tuple(notes))


def _spread(fields: Sequence[SparkField], columns: Iterator[pa.Array], rows: int) -> list[pa.Array]:
    """Return a column for each field, of nulls for those without values."""
    return [next(columns) if has_values(item.type) else pa.nulls(rows) for item in fields]


def _milliseconds(moments: pa.Array, where: str) -> pa.Array:
    found = moments.cast(pa.int64()).to_numpy()
    broken = np.flatnonzero(found % 1000)
    if len(broken):
        raise InvalidInput(
            f"{where} would have a timer at {int(found[broken[0]])} µs, and timers of Spark are at whole milliseconds: "
            "round it",
            kind=ErrorKind.TRANSFORM_FAILED,
        )
    return pa.array(found // 1000)


def _check_made(name: str, wanted: Any, column: pa.Array, where: str) -> None:
    """Raise ``InvalidInput`` if a column that Spark does not have is not what it always is."""
    changed = [one for one in column.unique().to_pylist() if one != wanted]
    if changed:
        raise InvalidInput(
            f"{where}: column {name!r} would be {changed[0]!r}, and it is {wanted!r} in every row, as Spark does not "
            "keep it: return it as it is",
            kind=ErrorKind.TRANSFORM_FAILED,
        )


def _check_shown(item: SparkField, stored: pa.Array, shown: pa.Array, where: str) -> None:
    """Raise ``InvalidInput`` if a column that shows an opaque key does not say what the key is."""
    rows = encode_rows([stored], [SparkField(item.name, _BYTES)], len(stored), key=True)
    if not decode_rows(rows, [item], where)[0].equals(shown.cast(item.type.arrow)):
        raise InvalidInput(
            f"{where}: column {item.name} shows what is in the key, whose bytes are kept. Such keys cannot be changed; "
            "return both columns as they are",
            kind=ErrorKind.TRANSFORM_FAILED,
        )


def _hashable(item: SparkField) -> bool:
    try:
        check_key_types([pa.field(item.name, item.type.arrow)])
    except CheckpointError:
        return False
    return True


def _check_collations(keys: Sequence[SparkField], subject: str) -> None:
    for item in keys:
        if item.type.collation not in ("", "UTF8_BINARY"):
            raise UnsupportedFormat(
                f"key column {item.name!r} of {subject} has the collation {item.type.collation}: Spark deals such keys "
                "by what they compare as, which is not stored",
                kind=ErrorKind.UNSUPPORTED_KEY_TYPE,
            )


def _names(fields: Sequence[SparkField], subject: str) -> tuple[list[str], list[Note]]:
    """Return stateformat's names of columns, and what was renamed."""
    cleaned = [
        SparkField(item.name.lstrip("_") or f"column_{index + 1}", item.type) for index, item in enumerate(fields)
    ]
    names = distinct(cleaned)
    changed = [
        f"{item.name!r} (column {index + 1}) is {name}"
        for index, (item, name) in enumerate(zip(fields, names, strict=True))
        if item.name != name
    ]
    changed += [text for item in fields for text in _nested_renames(item, item.name)]
    notes = [Note("renamed", subject, f"names repeat or begin with an underscore: {'; '.join(changed)}")]
    return names, notes if changed else []


def _nested_renames(item: SparkField, path: str) -> list[str]:
    inner = item.type.children
    found = [text for child in inner for text in _nested_renames(child, f"{path}.{child.name}")]
    if item.type.kind == "struct":
        kept = [child for child in inner if has_values(child.type)]
        pairs = zip(kept, distinct(kept), strict=True)
        found += [f"{path}.{child.name} is {name}" for child, name in pairs if child.name != name]
    return found


def _free(name: str, taken: Sequence[str]) -> str:
    number = 1
    found = name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _named(fields: Sequence[SparkField], names: Sequence[str]) -> list[pa.Field]:
    return [pa.field(name, item.type.arrow) for item, name in zip(fields, names, strict=True)]


def _kept(fields: Sequence[SparkField], columns: Sequence[pa.Array]) -> list[pa.Array]:
    return [column for item, column in zip(fields, columns, strict=True) if has_values(item.type)]


def _fit(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return the column with the field ids of nested fields that the format requires."""
    if column.type.equals(wanted, check_metadata=True):
        return column
    return column.cast(wanted)
