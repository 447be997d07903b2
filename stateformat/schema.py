"""The Arrow schemas of all that the format stores; :data:`PRIMITIVES` lists all simple types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import pyarrow as pa

from .errors import ErrorKind, InvalidInput
from .model import Field, FieldType, Kind, Mode, State

PRIMITIVES: Final[Mapping[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "utf8": pa.string(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "timestamp_us": pa.timestamp("us"),
    "timestamp_us_utc": pa.timestamp("us", tz="UTC"),
}
_NAMES = {arrow: name for name, arrow in PRIMITIVES.items()}
_DECIMAL = re.compile(r"decimal\((\d{1,2}),(\d{1,2})\)")
INTEGERS: Final = ("int8", "int16", "int32", "int64")
_DECIMAL_TEXT = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_DEFAULTS: Final = {
    **dict.fromkeys((*INTEGERS, "timestamp_us", "timestamp_us_utc"), re.compile(r"-?[0-9]+")),
    **dict.fromkeys(("float", "double"), re.compile(r"NaN|-?Infinity|-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")),
    "date32": re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
}
"""How the default of a column is written."""
MAX_NESTING = 8


def _required(**types: pa.DataType) -> tuple[pa.Field, ...]:
    return tuple(pa.field(name, kind, nullable=False) for name, kind in types.items())


MANIFEST_SCHEMA: Final = pa.schema(
    [
        *_required(operator=pa.string(), state=pa.string(), mode=pa.string()),
        pa.field("subtask", pa.int32()),
        *_required(layer=pa.int32()),
        pa.field("edge", pa.string()),
        *_required(schema_id=pa.int32()),
        pa.field("path", pa.string()),
        *_required(row_start=pa.int64(), rows=pa.int64(), segment_rows=pa.int64()),
        *_required(size_bytes=pa.int64(), uncompressed_bytes=pa.int64(), footer_bytes=pa.int32()),
        pa.field("digest", pa.binary(16)),
        pa.field("footer_digest", pa.binary(16)),
        pa.field("first_group", pa.int32()),
        pa.field("last_group", pa.int32()),
        pa.field("rows_per_group", pa.list_(*_required(element=pa.int64()))),
        pa.field("inline", pa.binary()),
    ]
)
"""The manifest (SPEC.md section 4.1). Planning reads every column but the last."""

PLANNING_COLUMNS: Final = tuple(MANIFEST_SCHEMA.names[:-1])

_NAME: Final = pa.dictionary(pa.int32(), pa.string())

SLICE_SCHEMA: Final = pa.schema(
    [
        *_required(operator=_NAME, state=_NAME, mode=_NAME),
        pa.field("subtask", pa.int32()),
        *_required(layer=pa.int32(), handle=pa.int64(), row_start=pa.int64(), rows=pa.int64()),
        pa.field("first_group", pa.int32()),
        pa.field("last_group", pa.int32()),
        *_required(bytes=pa.int64()),
    ]
)
"""Slices of a restore plan, sorted by (operator, state, subtask, layer, order of reading).

Rows row_start … row_start + rows − 1 of the segment of manifest row ``handle`` go to the new
``subtask``. It is null for the driver, and in a compact plan for what every subtask gets. ``bytes``
is the stored size in proportion to the rows. A slice with groups has whole groups, or a part of one
sender's. The texts are dictionaries: there may be millions of slices.
"""

KEY_GROUP = pa.field("_key_group", pa.int32(), nullable=False)
OP = pa.field("_op", pa.int8(), nullable=False)
UPSERT = 0
"""``_op`` of a row that a delta writes."""
DELETE = 1
"""``_op`` of a row key that a delta removes."""
CLEAR = 2
"""``_op`` of a key whose older rows a delta removes, before its upserts."""
OPERATIONS: Final = f"{UPSERT} upsert, {DELETE} delete this row or {CLEAR} clear this key"
"""What the values of ``_op`` mean, for messages (SPEC.md section 5.4)."""

_OWN: Final[Mapping[Mode | Kind, tuple[pa.Field, ...]]] = {
    Kind.LIST: (pa.field("_index", pa.int64()),),
    Kind.TIMERS: (pa.field("_timestamp", pa.int64()), pa.field("_tag", pa.string())),
    Mode.COMMITTABLES: _required(_checkpoint_id=pa.int64(), _attempt_id=pa.string()),
    Mode.PROGRESS: _required(_edge=pa.string(), _watermark=pa.int64(), _ended=pa.bool_()),
    Mode.IN_FLIGHT: _required(_sender=pa.int32(), _receiver=pa.int32(), _seq=pa.int64()),
}


def has_key_groups(state: State) -> bool:
    """Return whether rows have ``_key_group``: in keyed state, and in flight on hash edges."""
    return state.mode is Mode.KEYED or (state.mode is Mode.IN_FLIGHT and bool(state.key_columns))


def segment_schema(state: State, schema_id: int | None = None, *, delta: bool = False) -> pa.Schema:
    """Return a segment's Arrow schema (SPEC.md 5.1): own columns, then fields, all nullable."""
    version = state.current if schema_id is None else state.by_schema_id.get(schema_id)
    if version is None:
        raise InvalidInput(
            f"state {state.name!r} of {state.operator!r} has no schema {schema_id}; it has "
            f"{', '.join(map(str, state.by_schema_id))}",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )
    own = [KEY_GROUP] if has_key_groups(state) else []
    if delta:
        own.append(OP)
    own += _OWN.get(state.kind or state.mode, ())
    return pa.schema([*own, *(arrow_field(item) for item in version.fields)])


def row_schema(state: State) -> pa.Schema:
    """Return the columns of a state's rows as users see them: without ``_key_group`` and field ids.

    Nested fields have no ids either: writers of other tools would keep half of them.
    """
    return pa.schema([_without_ids(item) for item in segment_schema(state) if item.name != KEY_GROUP.name])


def _without_ids(item: pa.Field) -> pa.Field:
    kind = item.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_without_ids(inner) for inner in kind])
    elif pa.types.is_list(kind):
        kind = pa.list_(_without_ids(kind.value_field))
    elif pa.types.is_map(kind):
        kind = pa.map_(_without_ids(kind.key_field), _without_ids(kind.item_field))
    return pa.field(item.name, kind, item.nullable)


def arrow_field(item: Field) -> pa.Field:
    """Return a field of a segment: nullable, with its id where Parquet keeps field ids."""
    return pa.field(item.name, arrow_type(item.type), metadata={"PARQUET:field_id": str(item.id)})


def arrow_type(kind: FieldType) -> pa.DataType:
    """Return the Arrow type of a field type.

    Raises ``InvalidInput`` (UNSUPPORTED_TYPE) for an unknown name.
    """
    if isinstance(kind, str):
        if kind in PRIMITIVES:
            return PRIMITIVES[kind]
        match = _DECIMAL.fullmatch(kind)
        if match and 1 <= int(match[1]) <= 38 and int(match[2]) <= int(match[1]):
            return pa.decimal128(int(match[1]), int(match[2]))
        raise InvalidInput(f"unknown type {kind!r}; see SPEC.md section 3.7", kind=ErrorKind.UNSUPPORTED_TYPE)
    if kind[0] == "struct":
        return pa.struct([arrow_field(item) for item in cast("tuple[Field, ...]", kind[1])])
    # Elements of lists and maps have the names that Parquet gives them.
    if kind[0] == "list":
        return pa.list_(arrow_field(cast("Field", kind[1])).with_name("element"))
    key, value = (arrow_field(item) for item in cast("tuple[str, Field, Field]", kind)[1:])
    return pa.map_(key.with_name("key").with_nullable(False), value.with_name("value"))


@dataclass
class _Ids:
    """Assigns field ids. ``known`` ids are kept, by the path of names from the outermost on."""

    last: int
    known: Mapping[tuple[str, ...], int]

    def take(self, path: tuple[str, ...]) -> int:
        if path in self.known:
            return self.known[path]
        self.last += 1
        return self.last


def _field_type(dtype: pa.DataType, path: tuple[str, ...], ids: _Ids, depth: int) -> FieldType:
    if depth > MAX_NESTING:
        raise InvalidInput(
            f"column {'.'.join(path)!r} is nested deeper than {MAX_NESTING}", kind=ErrorKind.UNSUPPORTED_TYPE
        )
    if dtype in _NAMES:
        return _NAMES[dtype]
    if pa.types.is_large_string(dtype):
        return "utf8"
    if pa.types.is_large_binary(dtype):
        return "binary"
    if pa.types.is_decimal128(dtype) and 0 <= dtype.scale <= dtype.precision:
        return f"decimal({dtype.precision},{dtype.scale})"
    if pa.types.is_timestamp(dtype) and dtype.unit == "us":
        return "timestamp_us_utc"
    if pa.types.is_struct(dtype) and dtype.num_fields:
        return ("struct", tuple(_nested(dtype.field(i), path, ids, depth) for i in range(dtype.num_fields)))
    if pa.types.is_list(dtype) or pa.types.is_large_list(dtype):
        return ("list", _nested(dtype.value_field.with_name("element"), path, ids, depth))
    if pa.types.is_map(dtype):
        key = _nested(dtype.key_field.with_name("key"), path, ids, depth)
        return ("map", key, _nested(dtype.item_field.with_name("value"), path, ids, depth))
    raise InvalidInput(
        f"column {'.'.join(path)!r} has type {dtype}, which the format does not hold; use one of "
        f"{', '.join(PRIMITIVES)}, decimal128, struct, list or map (SPEC.md section 3.7), or keep opaque bytes in a "
        "binary column",
        kind=ErrorKind.UNSUPPORTED_TYPE,
        column=".".join(path),
        type=str(dtype),
    )


def _nested(item: pa.Field, path: tuple[str, ...], ids: _Ids, depth: int = -1) -> Field:
    inner = (*path, item.name)
    field_id = ids.take(inner)
    return Field(field_id, item.name, _field_type(item.type, inner, ids, depth + 1), nullable=item.nullable)


def children(item: Field) -> tuple[Field, ...]:
    """Return the nested fields of a field, in order."""
    if isinstance(item.type, str):
        return ()
    if item.type[0] == "struct":
        return cast("tuple[Field, ...]", item.type[1])
    return cast("tuple[Field, ...]", item.type[1:])


def nesting(kind: FieldType, inner: tuple[Field, ...]) -> FieldType:
    """Return the struct, list or map type with other nested fields."""
    return ("struct", inner) if kind[0] == "struct" else cast("FieldType", (kind[0], *inner))


def make_fields(
    columns: pa.Schema,
    *,
    defaults: Mapping[str, str],
    last_field_id: int = 0,
    known_ids: Mapping[tuple[str, ...], int] | None = None,
) -> tuple[tuple[Field, ...], int]:
    """Return fields for Arrow columns, and the greatest id; ``known_ids`` are kept, by path."""
    ids = _Ids(last_field_id, known_ids or {})
    fields = []
    for column in columns:
        item = _nested(column, (), ids)
        fields.append(replace(item, default=defaults.get(column.name)))
    for name, text in defaults.items():
        if name not in columns.names:
            raise InvalidInput(f"default for {name!r}, which is no column; columns are {columns.names}")
        default_scalar(text, next(item.type for item in fields if item.name == name))
    return tuple(fields), ids.last


def default_scalar(text: str, kind: FieldType) -> pa.Scalar:
    """Return the value of a default's text (SPEC 3.7). Raises ``InvalidInput`` if it has none."""
    import base64
    import datetime
    import decimal

    parse: Mapping[str, Any] = {
        "bool": {"true": True, "false": False}.__getitem__,
        "utf8": str,
        "binary": lambda value: base64.b64decode(value, validate=True),
        "date32": datetime.date.fromisoformat,
        "float": float,
        "double": float,
        **dict.fromkeys((*INTEGERS, "timestamp_us", "timestamp_us_utc"), int),
    }
    try:
        if not isinstance(kind, str):
            raise ValueError("nested types have no default")
        written = _DEFAULTS.get(kind, _DECIMAL_TEXT if kind.startswith("decimal") else None)
        if written is not None and not written.fullmatch(text):
            raise ValueError("it is not written as SPEC.md section 3.7 says")
        value = parse[kind](text) if kind in parse else decimal.Decimal(text)
        found = pa.scalar(value, arrow_type(kind))
        if kind == "float" and abs(value) != float("inf") and abs(found.as_py()) == float("inf"):
            raise ValueError("it is too large")
        return found
    except (ValueError, KeyError, ArithmeticError, pa.ArrowException) as error:
        raise InvalidInput(
            f"{text!r} is no default for type {kind}: {error}", kind=ErrorKind.SCHEMA_MISMATCH
        ) from error
