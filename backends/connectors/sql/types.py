"""Arrow columns as columns of a database: which types, which values, and in what form.

docs/sinks.md has the table of types. A row that a database refuses would fail the commit of its
checkpoint, and every repeat of it. So types are checked when the job is put together, and values in
the subtask, before anything is promised. The driver then converts whole columns. SQLite has no
times and decimals: it gets ISO 8601, which compares as times do, and all digits of a decimal, as
text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput, InvalidState

SQLITE: Final = "SQLite"
POSTGRESQL: Final = "PostgreSQL"

_DAYS: Final = (-719_162, 2_932_896)
"""0001-01-01 and 9999-12-31 in days since 1970."""
_DAY_US: Final = 86_400_000_000
_TIMES: Final = (_DAYS[0] * _DAY_US, (_DAYS[1] + 1) * _DAY_US - 1)


class SqlType(NamedTuple):
    """How a database declares a column."""

    declared: str
    also: tuple[str, ...] = ()
    """Other declarations, in a table that exists, that hold the same values."""


_INTEGERS: Final = {
    pa.int8(): SqlType("smallint", ("integer", "bigint", "numeric")),
    pa.int16(): SqlType("smallint", ("integer", "bigint", "numeric")),
    pa.int32(): SqlType("integer", ("bigint", "numeric")),
    pa.int64(): SqlType("bigint", ("numeric",)),
}
_PLAIN: Final[dict[pa.DataType, SqlType]] = {
    **_INTEGERS,
    pa.bool_(): SqlType("boolean"),
    pa.float32(): SqlType("real"),
    pa.float64(): SqlType("double precision"),
    pa.string(): SqlType("text", ("character varying",)),
    pa.binary(): SqlType("bytea"),
    pa.date32(): SqlType("date"),
    pa.timestamp("us"): SqlType("timestamp without time zone"),
    pa.timestamp("us", "UTC"): SqlType("timestamp with time zone"),
}
_TEXT: Final = SqlType("TEXT", ("BLOB",))
# Only the affinity of SQLite's declared types counts, and that of BLOB converts nothing.
_SQLITE: Final[dict[pa.DataType, SqlType]] = {
    **dict.fromkeys(_INTEGERS, SqlType("INTEGER", ("NUMERIC", "BLOB"))),
    pa.bool_(): SqlType("BOOLEAN", ("NUMERIC", "INTEGER", "BLOB")),
    pa.float32(): SqlType("REAL", ("BLOB",)),
    pa.float64(): SqlType("REAL", ("BLOB",)),
    pa.string(): _TEXT,
    pa.binary(): SqlType("BLOB"),
    pa.date32(): _TEXT,
    pa.timestamp("us"): _TEXT,
    pa.timestamp("us", "UTC"): _TEXT,
}


def sql_type(database: str, type_: pa.DataType) -> SqlType | None:
    """The column type for an Arrow type; None where there is none."""
    type_ = _small(type_)
    if pa.types.is_decimal128(type_) and 0 <= type_.scale <= type_.precision:
        return _TEXT if database == SQLITE else SqlType(f"numeric({type_.precision},{type_.scale})", ("numeric",))
    return (_SQLITE if database == SQLITE else _PLAIN).get(type_)


def _small(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(type_):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(type_) else type_


def check_columns(database: str, what: str, schema: pa.Schema, keys: Sequence[str]) -> None:
    """Raise ``InvalidInput`` where the database can have no table of these columns and this key."""
    if not len(schema):
        raise InvalidInput(f"{what} is given rows without columns, and a table has at least one. Select some")
    names = [name.lower() if database == SQLITE else name for name in schema.names]
    if len(set(names)) < len(names):
        raise InvalidInput(f"{what} is given columns {schema.names}, two of which {database} takes for one. Rename one")
    for name in schema.names:
        check_name(database, f"column {name!r} of {what}", name)
    for field in schema:
        if sql_type(database, field.type) is None:
            raise InvalidInput(
                f"column {field.name!r} of {what} is {field.type}, for which there is no {database} type. Cast it "
                "before the sink to one of bool, int8 to int64, float32, float64, string, binary, date32, "
                "timestamp[us] (without zone or UTC) or decimal128, or make columns of its parts",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                column=field.name,
            )
    missing = [key for key in keys if key not in schema.names]
    if missing:
        raise InvalidInput(
            f"{what} has the key {list(keys)} and is given columns {schema.names}, which lack {missing[0]!r}. Add it"
        )
    for key in keys:
        if pa.types.is_floating(schema.field(key).type):
            raise InvalidInput(
                f"key column {key!r} of {what} is {schema.field(key).type}, whose rounding errors make no key. Cast it "
                "to a decimal",
                kind=ErrorKind.UNSUPPORTED_KEY_TYPE,
                column=key,
            )


def check_name(database: str, what: str, name: str) -> None:
    """Raise ``InvalidInput`` for a name that the database would cut, or not take."""
    if not name or "\0" in name or (database == POSTGRESQL and len(name.encode(errors="surrogatepass")) > 63):
        most = " of at most 63 bytes in UTF-8, which PostgreSQL would cut off" if database == POSTGRESQL else ""
        raise InvalidInput(f"{what} cannot have this name. It needs one without U+0000{most}")


def check_values(database: str, what: str, rows: pa.Table, keys: Sequence[str]) -> None:
    """Raise ``InvalidState`` for a value that the database would refuse, or change."""
    try:
        rows.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidState(
            f"{what} is given rows that are no valid Arrow data: {error}. Mend the operator that makes them"
        ) from error
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if column.null_count and (field.name in keys or not field.nullable):
            kind = "a key column" if field.name in keys else "declared without nulls"
            raise InvalidState(
                f"column {field.name!r} of {what} is {kind} and has {column.null_count} nulls in {rows.num_rows} rows. "
                "Drop or fill them before the sink",
                kind=ErrorKind.NULL_NOT_ALLOWED,
                column=field.name,
            )
        wrong, why = _wrong_values(database, column)
        if wrong is not None and pc.any(wrong).as_py():
            found = column.filter(wrong)
            first = _number(found)[0] if pa.types.is_temporal(field.type) else found[0]
            unit = " (in Arrow's unit since 1970)" if pa.types.is_temporal(field.type) else ""
            raise InvalidState(
                f"column {field.name!r} of {what} has {first.as_py()!r}{unit}, and {why}. Replace it before the sink",
                kind=ErrorKind.INVALID_ARGUMENT,
                column=field.name,
            )


def _wrong_values(database: str, column: pa.ChunkedArray) -> tuple[pa.ChunkedArray | None, str]:
    type_ = _small(column.type)
    if pa.types.is_floating(type_) and database == SQLITE:
        return pc.is_nan(column), "SQLite would make it a null"
    if pa.types.is_string(type_) and database == POSTGRESQL:
        return pc.match_substring(column, "\0"), "text in PostgreSQL holds no U+0000"
    if pa.types.is_date32(type_):
        return _outside(_number(column), _DAYS), "dates are those of the years 1 to 9999"
    if pa.types.is_timestamp(type_):
        return _outside(_number(column), _TIMES), "times are those of the years 1 to 9999"
    return None, ""


def _number(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64()).cast(pa.int64())


def _outside(numbers: pa.ChunkedArray, limits: tuple[int, int]) -> pa.ChunkedArray:
    return pc.or_(pc.less(numbers, limits[0]), pc.greater(numbers, limits[1]))


def last_of_each_key(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The last row of each key, in their order."""
    places = pa.array(np.arange(rows.num_rows), pa.int64())
    names = [f"key{number}" for number in range(len(keys))]
    keyed = pa.table([*(rows[key] for key in keys), places], names=[*names, "place"])
    last = keyed.group_by(names).aggregate([("place", "max")])["place_max"]
    return rows if len(last) == rows.num_rows else rows.take(last.take(pc.sort_indices(last)))


def as_sqlite(array: pa.Array) -> pa.Array:
    """A column as SQLite stores it: numbers, text or bytes."""
    type_ = array.type
    if pa.types.is_boolean(type_):
        return array.cast(pa.int8())
    if pa.types.is_timestamp(type_):
        return _time_text(array, "+00:00")
    if pa.types.is_date32(type_):
        return array.cast(pa.string())
    return _decimal_text(array) if pa.types.is_decimal128(type_) else array


def as_text(array: pa.Array) -> pa.Array:
    """A column as the text that PostgreSQL reads."""
    type_ = array.type
    if pa.types.is_timestamp(type_):
        return _time_text(array, "+00")
    if pa.types.is_decimal128(type_):
        return _decimal_text(array)
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return _hexadecimal(array)
    return array.cast(pa.large_string())


def _time_text(array: pa.Array, zone: str) -> pa.Array:
    text = array.cast(pa.int64()).cast(pa.timestamp("us")).cast(pa.string())
    return text if array.type.tz is None else _joined(text, zone)


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


def _decimal_text(array: pa.Array) -> pa.Array:
    """All digits of decimals. Arrow's cast writes small ones with an exponent."""
    scale = array.type.scale
    whole = pa.Array.from_buffers(
        pa.decimal128(array.type.precision, 0), len(array), array.buffers(), offset=array.offset
    ).cast(pa.string())
    if not scale:
        return whole
    sign = pc.if_else(pc.starts_with(whole, "-"), "-", "")
    digits = pc.utf8_lpad(pc.utf8_ltrim(whole, "-"), scale + 1, "0")
    return _joined(sign, pc.utf8_slice_codeunits(digits, 0, -scale), ".", pc.utf8_slice_codeunits(digits, -scale))


def _hexadecimal(array: pa.Array) -> pa.Array:
    """Bytes as ``\\x`` and two digits for each."""
    array = array.cast(pa.large_binary())
    if not len(array):
        return pa.array([], pa.large_string())
    offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = array.buffers()[2]
    digits = b"" if data is None else memoryview(data)[first:last].hex().encode()
    digits_of = pa.LargeStringArray.from_buffers(len(array), pa.py_buffer((offsets - first) * 2), pa.py_buffer(digits))
    prefix, nothing = (pa.scalar(text, pa.large_string()) for text in ("\\x", ""))
    return pc.if_else(pc.is_valid(array), pc.binary_join_element_wise(prefix, digits_of, nothing), None)
