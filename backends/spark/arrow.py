"""Converts the rows of a DataFrame to Arrow batches of a declared schema.

Types may differ from the declared ones in how Arrow represents a value (the time zone of an
instant, the names of items, the size of offsets), and where a cast changes no value or fails, as
from int to bigint. Any other type is refused: such a cast belongs in the SQL. Spark reports all
columns of files as nullable, so every batch is checked for nulls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.segments import keeps_values

from ..dataflow.casting import plain_column

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType


def arrow_schema_of(what: str, columns: StructType) -> pa.Schema:
    """Return the Arrow schema of Spark's columns, in order: all nullable, timestamps in UTC.

    Raises ``InvalidInput``, naming ``what``, for two columns of the same name, and for a type that
    Arrow does not have (``void``, intervals of months, variants).
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import NullType, VariantType

    names = columns.fieldNames()
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInput(f"{what} has two columns named {twice[0]!r}. Rename one.", kind=ErrorKind.SCHEMA_MISMATCH)
    for column in columns:
        for kind in _types_in(column.dataType):
            if isinstance(kind, NullType | VariantType):
                made_of = "" if kind is column.dataType else "made of "
                raise InvalidInput(
                    f"Column {column.name!r} of {what} is {made_of}{kind.simpleString()}, which cannot be stored. Cast "
                    "it.",
                    kind=ErrorKind.UNSUPPORTED_TYPE,
                )
    try:
        schema = to_arrow_schema(columns, timezone="UTC")
    except PySparkException as error:
        raise InvalidInput(
            f"{what} has a column of a type that Arrow does not have: {error}. Cast it or leave it out.",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        ) from error
    return pa.schema([field.with_nullable(True).remove_metadata() for field in schema])


def _types_in(kind: DataType) -> Iterator[DataType]:
    from pyspark.sql.types import ArrayType, MapType, StructType

    yield kind
    match kind:
        case StructType():
            inner = [field.dataType for field in kind]
        case ArrayType():
            inner = [kind.elementType]
        case MapType():
            inner = [kind.keyType, kind.valueType]
        case _:
            inner = []
    for each in inner:
        yield from _types_in(each)


def check_fits(what: str, columns: StructType, schema: pa.Schema) -> None:
    """Raise ``InvalidInput`` unless Spark's columns match ``schema``, in any order."""
    found = arrow_schema_of(what, columns)
    if sorted(found.names) != sorted(schema.names):
        raise InvalidInput(
            f"{what} has columns {found.names}, and its source declares {schema.names}. Select those in the "
            "transformation.",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )
    for field in schema:
        given = found.field(field.name).type
        if _plain(given) != _plain(field.type) and not keeps_values(_plain(given), field.type):
            raise InvalidInput(
                f"Column {field.name!r} of {what} is {given}, and its source declares {field.type}. Cast it in the "
                "transformation, or declare what it is.",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )


def to_arrow(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Convert a batch to exactly this schema. ``InvalidInput`` for a null in a not-null column."""
    columns = []
    for field in schema:
        column = batch.column(field.name)
        _check_nulls(field.name, column, field)
        # Nested types compare equal even if the names of their items differ.
        if column.type == field.type:
            columns.append(column.cast(field.type) if pa.types.is_nested(field.type) else column)
        else:
            what = f"column {field.name!r} of a Spark source"
            columns.append(
                plain_column(what, column, field.type, "Cast it in the transformation, or declare what it is")
            )
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _plain(kind: pa.DataType) -> pa.DataType:
    """Remove what may differ: time zone, names of items, size of offsets, nullability."""
    types = pa.types
    if types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if types.is_large_string(kind):
        return pa.string()
    if types.is_large_binary(kind):
        return pa.binary()
    if types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, _plain(field.type)) for field in kind])
    return kind


def _check_nulls(name: str, column: pa.Array, field: pa.Field) -> None:
    if not field.nullable and column.null_count:
        raise InvalidInput(
            f"Column {name!r} has {column.null_count} nulls among {len(column)} rows and is declared not null. Filter "
            "them out in the transformation, or declare it nullable.",
            kind=ErrorKind.NULL_NOT_ALLOWED,
        )
    for inner, values in _inside(column, field.type):
        _check_nulls(f"{name}.{inner.name}", values, inner)


def _inside(column: pa.Array, kind: pa.DataType) -> Iterator[tuple[pa.Field, Any]]:
    """Yield the fields of a nested type with their values, where the column is not null."""
    if pa.types.is_struct(kind):
        values = column.filter(pc.is_valid(column))
        for index in range(kind.num_fields):
            yield kind.field(index), values.field(index)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield kind.value_field, column.flatten()
    elif pa.types.is_map(kind):
        yield kind.item_field, column.filter(pc.is_valid(column)).items
