"""stateformat's names for the columns of a store: a declared state, and rows as in a segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind, UnsupportedFormat
from stateformat.keys import check_key_types
from stateformat.model import Mode, State, TimerClock
from stateformat.schema import segment_schema
from stateformat.states import list_state, map_state, timers, value_state

from ..source import Note
from .families import Family, Kind
from .logs import OperatorInfo, StoreInfo
from .schemas import SparkField, SparkType, StoreSchema, arrow_fields, distinct, has_values

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
            own, rest, values = [_microseconds(rest[0]), pa.array([self.tag] * rows, pa.string())], [], []
        if len(rest) > 1:
            rest = [pa.Array.from_buffers(schema.field("_map_key").type, rows, [None], children=rest)]
        made = [pa.array(np.full(rows, group, np.int32)), *own, *keys, *rest, *values]
        fitted = [_fit(column, field.type) for column, field in zip(made, schema, strict=True)]
        return pa.RecordBatch.from_arrays(fitted, schema=schema)


def _microseconds(column: pa.Array) -> pa.Array:
    """Return ms as µs; values out of range become the greatest or least of the range."""
    moments = column.to_numpy(zero_copy_only=False)
    most = (2**63 - 1) // 1000
    beyond = np.where(moments > 0, 2**63 - 1, -(2**63))
    return pa.array(np.where(np.abs(moments) > most, beyond, np.clip(moments, -most, most) * 1000))


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
