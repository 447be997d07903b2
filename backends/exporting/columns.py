"""The columns of an exported table: types that a format lacks are widened, names it refuses are
changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import pyarrow as pa

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.model import Field, State
from stateformat.schema import children


class Format(StrEnum):
    """The format of tables."""

    ICEBERG = "iceberg"
    DELTA = "delta"


@dataclass(frozen=True)
class Note:
    """A column that is not in the table as it is in the state."""

    column: str
    """Its name in the state; nested ones with dots."""
    message: str


@dataclass(frozen=True)
class Column:
    """A column of a table, or a field in one."""

    key: str
    """Its permanent name: ``#7`` for the field with id 7 of the state, else its name."""
    name: str
    type: pa.DataType
    """With the names in the table, without field ids."""
    children: tuple[Column, ...] = ()


@dataclass(frozen=True)
class Columns:
    """The columns of a table, in the order of the stream, and what the user must know about
    them.
    """

    all: tuple[Column, ...]
    notes: tuple[Note, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns of the table; all are nullable."""
        return pa.schema([pa.field(column.name, column.type) for column in self.all])

    def convert(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return rows of the stream as rows of the table.

        Raises ``DamagedCheckpoint`` for text that is not UTF-8, which readers of tables would fail
        on.
        """
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise DamagedCheckpoint(
                f"some values are not valid for their type and cannot be in a table: {error}. `ckpt validate --level "
                "full` says where; an export to Parquet keeps their bytes",
                kind=ErrorKind.DAMAGED_SEGMENT,
            ) from error
        schema = self.schema
        arrays = [as_type(array, item.type) for array, item in zip(batch.columns, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


_LABELS: Final = {Format.ICEBERG: "Iceberg", Format.DELTA: "Delta"}
_REFUSED: Final = {Format.ICEBERG: re.compile(r"[.]"), Format.DELTA: re.compile(r"[ ,;{}()\n\t=]")}
"""Characters that a name may not have. Readers of Iceberg take a dot as the path to a nested
column.
"""


def plan_columns(state: State, stream: pa.Schema, file_format: Format) -> Columns:
    """Return the columns that a table of this format has for a stream of a state's rows."""
    planner = _Planner(file_format)
    fields = {item.name: item for item in state.current.fields}
    found = planner.columns(list(stream), [fields.get(name) for name in stream.names], ())
    return Columns(found, tuple(planner.notes))


class _Planner:
    """Names and types of one table, and the notes on them."""

    def __init__(self, file_format: Format) -> None:
        self.notes: list[Note] = []
        self._format = file_format

    def columns(
        self, items: Sequence[pa.Field], fields: Sequence[Field | None], path: tuple[str, ...]
    ) -> tuple[Column, ...]:
        """Return the columns of one level."""
        names = list(self._names([item.name for item in items], path))
        return tuple(
            self._column(item, field, name, path) for item, field, name in zip(items, fields, names, strict=True)
        )

    def _names(self, given: Sequence[str], path: tuple[str, ...]) -> Iterator[str]:
        # A name that can stay is kept, wherever a name that must change is.
        used: set[str] = set()
        kept = []
        for name in given:
            stays = not _REFUSED[self._format].search(name) and name.lower() not in used
            kept.append(stays)
            if stays:
                used.add(name.lower())
        for name, stays in zip(given, kept, strict=True):
            if stays:
                yield name
                continue
            plain = _REFUSED[self._format].sub("_", name)
            new = next(option for option in _numbered(plain) if option.lower() not in used)
            used.add(new.lower())
            self.notes.append(Note(".".join((*path, name)), f"is named {new!r}: {self._why(name)}"))
            yield new

    def _why(self, name: str) -> str:
        refused = _REFUSED[self._format].search(name)
        if refused:
            return f"{_LABELS[self._format]} has no {refused[0]!r} in names"
        return "another column has this name for tools that ignore case"

    def _column(self, item: pa.Field, field: Field | None, name: str, path: tuple[str, ...]) -> Column:
        here = (*path, item.name)
        key = ".".join(here) if field is None else f"#{field.id}"
        inner = _inner(item.type)
        if not inner:
            return Column(key, name, self._widened(item.type, here))
        known = children(field) if field is not None else ()
        below = known if len(known) == len(inner) else [None] * len(inner)
        if pa.types.is_struct(item.type):
            parts = self.columns(inner, below, here)
        else:
            parts = tuple(self._column(one, of, one.name, here) for one, of in zip(inner, below, strict=True))
        return Column(key, name, nested(item.type, [part.type for part in parts], [part.name for part in parts]), parts)

    def _widened(self, kind: pa.DataType, path: tuple[str, ...]) -> pa.DataType:
        plain = _PLAIN.get(kind, kind)
        if self._format is Format.ICEBERG and plain in (pa.int8(), pa.int16()):
            self.notes.append(Note(".".join(path), f"is int instead of {plain}: Iceberg has no {plain}"))
            return pa.int32()
        if self._format is Format.DELTA and plain == pa.timestamp("us"):
            self.notes.append(Note(".".join(path), "is timestamp_ntz, which needs a reader of Delta's version 3"))
        return plain


_PLAIN: Final = {
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
}
"""Types that another tool's stream may have in place of the format's own types."""


def _numbered(name: str) -> Iterator[str]:
    yield name
    number = 2
    while True:
        yield f"{name}_{number}"
        number += 1


def _inner(kind: Any) -> list[pa.Field]:
    """Return the fields of a nested type, in the order of ``schema.children``."""
    if pa.types.is_struct(kind):
        return list(kind)
    if pa.types.is_map(kind):
        return [kind.key_field.with_name("key"), kind.item_field.with_name("value")]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [kind.value_field.with_name("element")]
    return []


def nested(kind: Any, types: Sequence[pa.DataType], names: Sequence[str], ids: Sequence[int] = ()) -> pa.DataType:
    """Return a nested type of the same sort with other fields, named as in Parquet."""
    parts = [
        pa.field(name, inner, metadata={"PARQUET:field_id": str(ids[i])} if ids else None)
        for i, (name, inner) in enumerate(zip(names, types, strict=True))
    ]
    if pa.types.is_struct(kind):
        return pa.struct(parts)
    if pa.types.is_map(kind):
        return pa.map_(parts[0].with_name("key").with_nullable(False), parts[1].with_name("value"))
    return pa.list_(parts[0].with_name("element"))


def as_type(array: Any, kind: Any) -> Any:
    """Return the same values in a type that may have other names and wider integers inside.

    Raises ``InvalidInput`` for values that do not fit.
    """
    if array.type == kind and _same_names(array.type, kind):
        return array
    if pa.types.is_large_list(array.type):
        array = array.cast(pa.list_(array.type.value_field))
    if pa.types.is_struct(kind):
        parts = [as_type(array.field(i), kind.field(i).type) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=array.is_null())
    if pa.types.is_list(kind):
        return _rebuilt(array, kind, as_type(array.values, kind.value_type))
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays(
            [as_type(array.keys, kind.key_type), as_type(array.items, kind.item_type)],
            fields=[kind.key_field, kind.item_field],
        )
        return _rebuilt(array, kind, entries)
    try:
        return array.cast(kind)
    except pa.ArrowException as error:
        raise InvalidInput(
            f"values of {array.type} do not fit in {kind}: {error}", kind=ErrorKind.SCHEMA_MISMATCH
        ) from error


def _same_names(one: Any, other: Any) -> bool:
    """Return whether nested types have the same names: Arrow ignores names when it compares
    lists.
    """
    inner, there = _fields(one), _fields(other)
    return [item.name for item in inner] == [item.name for item in there] and all(
        _same_names(a.type, b.type) for a, b in zip(inner, there, strict=True)
    )


def _fields(kind: Any) -> list[pa.Field]:
    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_nested(kind) else []


def _rebuilt(array: Any, kind: Any, entries: Any) -> Any:
    """Return a list or map array with other entries."""
    validity, offsets = array.buffers()[:2]
    return pa.Array.from_buffers(
        kind, len(array), [validity, offsets], null_count=array.null_count, offset=array.offset, children=[entries]
    )
