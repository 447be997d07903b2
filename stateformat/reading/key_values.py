"""Convert keys that a user names, in Python or as JSON, to the types of a state's key columns.

Nothing is cast silently: text is not a number, and neither ``True`` nor 1.5 is an integer. A value
can be null: null is a key.

==================  ====================================  =====================================
type                Python                                JSON
==================  ====================================  =====================================
bool                ``bool``                              ``true``
integers            ``int``                               ``42``
float, double       ``float``, or an ``int`` of the same  a number, or text: ``"NaN"``,
                    value                                 ``"Infinity"``
decimal             ``Decimal``, ``int``                  ``"12.30"`` or ``12.30``
utf8                ``str``                               text
binary              ``bytes``                             hexadecimal text
date32              ``datetime.date``                     ``"2026-11-22"``
timestamps          ``datetime.datetime``, with a time    ISO 8601, with ``Z`` or an offset
                    zone where the column has one         where the column has a time zone
struct              a mapping of all its fields           an object of all its fields
==================  ====================================  =====================================
"""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa

from ..errors import ErrorKind, InvalidInput, InvalidState
from ..model import State, known_names
from ..schema import segment_schema
from ..segments import normalize_keys

_is = pa.types


@runtime_checkable
class ArrowStreamable(Protocol):
    """An object with the Arrow C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a PyCapsule of an ArrowArrayStream."""
        ...


Keys: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]] | ArrowStreamable


class _WrongValue(Exception):
    """A value is not of the type. The text says what it must be."""


def key_table(state: State, keys: Keys) -> pa.Table:
    """Return keys as a normalized table of the key columns, in their types, one row per key.

    ``keys``: a mapping from key column to value, several mappings, or a table of any library with
    the Arrow C stream interface. A column of a table may have another type if every value stays the
    same: int64 where int32 is stored.

    Raises ``InvalidInput`` for a state without keys, for other columns, and for values that are not
    of their column's type.
    """
    schema = _key_schema(state)
    if isinstance(keys, ArrowStreamable):
        try:
            table = pa.table(keys)
        except (pa.ArrowException, TypeError):
            # Some libraries export a column by itself.
            raise _no_key(state, schema, keys) from None
        _check_columns(state, table.column_names)
    else:
        listed: Any = [keys] if isinstance(keys, Mapping) else keys
        if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence):
            raise _no_key(state, schema, listed)
        table = _table(state, schema, listed, _checked)
    try:
        columns = normalize_keys(table, state, where=f"keys of {_where(state)}")
    except InvalidState as error:
        raise InvalidInput(str(error), kind=ErrorKind.SCHEMA_MISMATCH) from error
    return pa.Table.from_arrays(columns, schema=schema)


def keys_from_json(state: State, given: object, *, many: bool = False) -> pa.Table:
    """Return the key that JSON names, as :func:`key_table` does; with ``many``, several.

    ``given`` is JSON text (a ``str``), or the parsed value. A key is an object by key column, an
    array of the values in the order of the key columns, or just the value if there is one key
    column. With ``many`` an array is a list of keys, and anything else is one key. The text of a
    key with one column of text, bytes or time needs no quotes, but where it begins like JSON
    (``"``, ``[``, ``{``) or is ``null``.

    Raises ``InvalidInput`` for text that is not JSON, and as :func:`key_table` does.
    """
    schema = _key_schema(state)
    plain = isinstance(given, str) and _is_plain(schema, given)
    value = _parsed(state, schema, given) if isinstance(given, str) and not plain else given
    keys = value if many and isinstance(value, list) else [value]
    by_column = [_by_column(state, schema, key) for key in keys]
    return key_table(state, _table(state, schema, by_column, lambda item, kind: _checked(_from_json(item, kind), kind)))


def _no_key(state: State, schema: pa.Schema, given: object) -> InvalidInput:
    """Return the error for a value that is neither a mapping nor a table."""
    return _mismatch(state, f"{_shown(given)} is no key; give a value for each of {_named(schema)}: {_example(schema)}")


def _key_schema(state: State) -> pa.Schema:
    if not state.key_columns:
        raise _mismatch(state, f"it is {state.mode} and has no keys; read its rows without a key")
    schema = segment_schema(state)
    return pa.schema([schema.field(name).remove_metadata() for name in state.key_columns])


def _is_plain(schema: pa.Schema, text: str) -> bool:
    """Return whether a text is a key as it is: no JSON, and the one key column has text in JSON."""
    kind = schema.field(0).type
    quoted = _is.is_string(kind) or _is.is_binary(kind) or _is.is_temporal(kind)
    return len(schema) == 1 and quoted and text.strip()[:1] not in ("", '"', "[", "{") and text.strip() != "null"


def _parsed(state: State, schema: pa.Schema, text: str) -> Any:
    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise _mismatch(state, f"the key {_shown(text)} names a member twice; name each once")
        return found

    try:
        return json.loads(text, parse_float=Decimal, object_pairs_hook=members)
    except (ValueError, RecursionError) as error:
        alone = len(state.key_columns) == 1 and len(text) < 60
        example = json.dumps(text, ensure_ascii=False) if alone else _template(schema)
        raise _mismatch(
            state, f"the key {_shown(text)} is not JSON ({error}); write text in double quotes: {example}"
        ) from error


def _by_column(state: State, schema: pa.Schema, key: Any) -> Mapping[str, Any]:
    names: list[str] = schema.names
    if isinstance(key, Mapping):
        # If the one key column is a struct, an object may be its value, or the whole key.
        alone = len(names) == 1 and _is.is_struct(schema.field(0).type) and {*key} != {*names}
        return {names[0]: key} if alone else key
    values = key if isinstance(key, list) else [key]
    if len(values) != len(names):
        raise _mismatch(state, f"the key {_shown(key)} has {len(values)} values; give one for each of {_named(schema)}")
    return dict(zip(names, values, strict=True))


def _table(state: State, schema: pa.Schema, keys: Sequence[Any], convert: Callable[[Any, Any], Any]) -> pa.Table:
    """Make a table of mappings; ``convert`` turns each value into what Arrow takes for its type."""
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for key in keys:
        if not isinstance(key, Mapping):
            raise _no_key(state, schema, key)
        _check_columns(state, list(key))
        for field in schema:
            value = key[field.name]
            try:
                columns[field.name].append(convert(value, field.type))
            except _WrongValue as error:
                raise _wrong(state, field, value, str(error)) from None
    arrays = []
    for field in schema:
        try:
            arrays.append(pa.array(columns[field.name], field.type))
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise _mismatch(
                state, f"its key column {field.name!r} is {field.type}, and a value is not: {error}"
            ) from error
    return pa.Table.from_arrays(arrays, schema=schema)


def _check_columns(state: State, names: Sequence[Any]) -> None:
    columns = state.key_columns
    for name in names:
        if name not in columns or list(names).count(name) > 1:
            raise _mismatch(
                state,
                f"{_shown(name)} is {'named twice' if name in columns else 'none of its key columns'}; "
                f"{known_names(columns, str(name))}",
            )
    for name in columns:
        if name not in names:
            raise _mismatch(state, f"the key has no value for key column {name!r}; name {', '.join(columns)}")


# ---- values --------------------------------------------------------------------------------------


def _checked(value: Any, kind: Any) -> Any:
    """Return a Python value of type ``kind``. Raises ``_WrongValue`` for any other."""
    if value is None:
        return None
    if _is.is_struct(kind):
        names = [field.name for field in kind]
        if not isinstance(value, Mapping) or {*value} != {*names}:
            raise _WrongValue(f"an object of {', '.join(names)}")
        return {field.name: _checked(value[field.name], field.type) for field in kind}
    for holds, check in _CHECKS:
        if holds(kind):
            return check(value, kind)
    raise _WrongValue(f"a value of type {kind}")


def _bool(value: Any, _: Any) -> Any:
    if not isinstance(value, (bool, np.bool_)):
        raise _WrongValue("true or false")
    return bool(value)


def _integer(value: Any, kind: Any) -> Any:
    low, high = -(1 << kind.bit_width - 1), (1 << kind.bit_width - 1) - 1
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not low <= value <= high:
        raise _WrongValue(f"an integer from {low} to {high}")
    return int(value)


def _float(value: Any, kind: Any) -> Any:
    single = kind.bit_width == 32
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer and not isinstance(value, (float, np.floating)):
        raise _WrongValue("a number, like 1.5")
    with np.errstate(over="ignore"):
        try:
            found = float(np.float32(value) if single else value)
        except OverflowError:
            found = math.inf
    if math.isinf(found) and (is_integer or not math.isinf(value)):
        raise _WrongValue(f"a number that a {kind} holds")
    if is_integer and int(found) != value:
        raise _WrongValue(f"a number that a {kind} holds exactly")
    return found


def _decimal(value: Any, kind: Any) -> Any:
    if not isinstance(value, (int, Decimal)) or isinstance(value, bool):
        raise _WrongValue("a decimal")
    try:
        pa.scalar(Decimal(value), kind)
    except (pa.ArrowException, ValueError) as error:
        raise _WrongValue(f"a number of {kind.precision} digits, {kind.scale} of them behind the point") from error
    return Decimal(value)


def _text(value: Any, _: Any) -> Any:
    if not isinstance(value, str):
        raise _WrongValue('text, like "abc"')
    return str(value)


def _bytes(value: Any, _: Any) -> Any:
    if not isinstance(value, (bytes, bytearray, memoryview)):
        raise _WrongValue("bytes")
    return bytes(value)


def _date(value: Any, _: Any) -> Any:
    if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
        raise _WrongValue("a date")
    return value


def _timestamp(value: Any, kind: Any) -> Any:
    if not isinstance(value, datetime.datetime) or bool(getattr(value, "nanosecond", False)):
        raise _WrongValue("a time in microseconds")
    if (value.tzinfo is None) is not (kind.tz is None):
        raise _WrongValue("a time without a time zone" if kind.tz is None else "a time with a time zone")
    return value


_CHECKS: Final[tuple[tuple[Callable[[Any], bool], Callable[[Any, Any], Any]], ...]] = (
    (_is.is_boolean, _bool),
    (_is.is_integer, _integer),
    (_is.is_floating, _float),
    (_is.is_decimal, _decimal),
    (_is.is_string, _text),
    (_is.is_binary, _bytes),
    (_is.is_date, _date),
    (_is.is_timestamp, _timestamp),
)


_NAMED_FLOATS: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_NANOSECONDS: Final = re.compile(r"[.,]\d{7}")


def _from_json(value: Any, kind: Any) -> Any:
    """Return a JSON value as a Python value. Raises ``_WrongValue`` for text of another type."""
    if value is None:
        return None
    if _is.is_struct(kind) and isinstance(value, Mapping):
        kinds = {field.name: field.type for field in kind}
        return {name: _from_json(item, kinds[name]) if name in kinds else item for name, item in value.items()}
    if _is.is_floating(kind):
        value = float(value) if isinstance(value, Decimal) else value
        return _NAMED_FLOATS.get(value, value) if isinstance(value, str) else value
    for holds, parse, due in _FROM_TEXT:
        if holds(kind) and (isinstance(value, str) or parse is not Decimal):
            try:
                return parse(value)
            except (TypeError, ValueError, InvalidOperation):
                raise _WrongValue(due) from None
    return value


def _time(text: str) -> datetime.datetime:
    if _NANOSECONDS.search(text):
        raise ValueError("the type ends at microseconds")
    return datetime.datetime.fromisoformat(text)


_FROM_TEXT: Final[tuple[tuple[Callable[[Any], bool], Callable[[Any], Any], str], ...]] = (
    (_is.is_binary, bytes.fromhex, 'hexadecimal text, like "00ff"'),
    (_is.is_date, datetime.date.fromisoformat, 'a date, like "2026-11-22"'),
    (_is.is_timestamp, _time, 'a time, like "2026-11-22T14:30:00"'),
    (_is.is_decimal, Decimal, 'a decimal, like "12.30"'),
)


# ---- errors --------------------------------------------------------------------------------------


def _wrong(state: State, field: pa.Field, value: Any, due: str) -> InvalidInput:
    return _mismatch(
        state,
        f"its key column {field.name!r} is {field.type}, and {_shown(value)} is {type(value).__name__}; give {due}",
        column=field.name,
    )


def _mismatch(state: State, why: str, **details: Any) -> InvalidInput:
    message = f"a key of {_where(state)}: {why}"
    return InvalidInput(message, kind=ErrorKind.SCHEMA_MISMATCH, operator=state.operator, state=state.name, **details)


def _where(state: State) -> str:
    return f"state {state.name!r} of {state.operator!r}"


def _named(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)


def _example(schema: pa.Schema) -> str:
    return "{" + ", ".join(f"{name!r}: …" for name in schema.names) + "}"


def _template(fields: Iterable[pa.Field]) -> str:
    """Return the JSON of a key or a struct, with … for its values."""

    def of(kind: pa.DataType) -> str:
        if _is.is_struct(kind):
            return _template(kind)
        return "…" if _is.is_integer(kind) or _is.is_floating(kind) or _is.is_boolean(kind) else '"…"'

    members = (f"{json.dumps(field.name, ensure_ascii=False)}: {of(field.type)}" for field in fields)
    return "{" + ", ".join(members) + "}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
