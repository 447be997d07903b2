"""From the rows of a DataFrame to Arrow batches of a declared schema.

Theory of operation. Two schemas meet: what Spark computes and what the source declares. They are compared in the driver before
anything runs (:func:`check_fits`), and only one thing may differ: how Arrow writes the same value. Spark hands a ``timestamp``
over as microseconds since 1970 in UTC with the time zone of the session written on it, so the zone is replaced, never the
number; lists have another name for their items; strings may be large ones. What is really another type (a wider integer, a
decimal of another scale, a timestamp without a zone) is refused: a cast belongs into the SQL, where its author sees it.

Spark's idea of what may be null is looser than its data: columns of files are nullable whatever they hold. So a declared "not
null" is checked in every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

Encode = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""What makes frames of the rows of one Spark partition."""


def arrow_schema_of(what: str, columns: StructType) -> pa.Schema:
    """The Arrow schema of Spark's columns: all nullable, timestamps in UTC, in order.

    ``what`` is named in messages. ``InvalidInput`` for two columns of one name, and for a type that Arrow has not
    (``void``, intervals of months, variants): the fault of whoever chose the columns.
    """
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import NullType, VariantType

    names = columns.fieldNames()
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInput(f"{what} has two columns named {twice[0]!r}; rename one", kind=ErrorKind.SCHEMA_MISMATCH)
    for column in columns:
        for kind in _kinds(column.dataType):
            if isinstance(kind, NullType | VariantType):
                raise InvalidInput(
                    f"column {column.name!r} of {what} is {'' if kind is column.dataType else 'made of '}{kind.simpleString()}, which is "
                    "no type to keep; cast it",
                    kind=ErrorKind.UNSUPPORTED_TYPE,
                )
    try:
        schema = to_arrow_schema(columns, timezone="UTC")
    except PySparkException as error:
        raise InvalidInput(
            f"{what} has a column of a type that Arrow has not: {error}; cast it or leave it out",
            kind=ErrorKind.UNSUPPORTED_TYPE,
        ) from error
    return pa.schema([field.with_nullable(True).remove_metadata() for field in schema])


def _kinds(kind: DataType) -> Iterator[DataType]:
    """A type of Spark, and those that it is made of."""
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
        yield from _kinds(each)


def check_fits(what: str, columns: StructType, schema: pa.Schema) -> None:
    """Raise ``InvalidInput`` unless Spark's columns are those of ``schema``, in any order, of the same types.

    Lossless is not enough, see the module. ``what`` is named in messages.
    """
    found = arrow_schema_of(what, columns)
    if sorted(found.names) != sorted(schema.names):
        raise InvalidInput(
            f"{what} has columns {found.names} and its source declares {schema.names}; select those in the transformation",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )
    for field in schema:
        given = found.field(field.name).type
        if _plain(given) != _plain(field.type):
            raise InvalidInput(
                f"column {field.name!r} of {what} is {given} and its source declares {field.type}; cast it in the "
                "transformation, or declare what it is",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )


def conformed(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch that Spark handed over, in exactly this schema. ``InvalidInput`` for a null where none is declared."""
    columns = []
    for field in schema:
        column = batch.column(field.name)
        _check_nulls(field.name, column, field)
        # Nested types compare equal whatever their items are called.
        plain = column.type == field.type and not pa.types.is_nested(field.type)
        columns.append(column if plain else column.cast(field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def frames_of(rows: DataFrame, schema: pa.Schema, encode: Encode, frame_columns: str | StructType) -> DataFrame:
    """Frames of the rows of a DataFrame, made beside the JVM, partition by partition.

    ``rows`` has the columns of ``schema``, in any order (:func:`check_fits`). ``encode`` is called once for each Spark partition, those
    without rows too, with its rows in batches of exactly ``schema``, at most as long as
    ``spark.sql.execution.arrow.maxRecordsPerBatch``, and yields batches of ``frame_columns``. It is pickled: let it be importable.
    """
    names = rows.columns
    # PySpark looks the columns up by names that it does not quote: a dot in one would mean a field.
    numbered = rows.toDF(*(f"c{number}" for number in range(len(names))))
    return numbered.mapInArrow(_Conforming(names, schema, encode), frame_columns)


class _Conforming:
    """The function that Spark runs. A class of a module, so that it goes to workers by name, not by value.

    ``names``: those of the columns that come, in order.
    """

    def __init__(self, names: Sequence[str], schema: pa.Schema, encode: Encode) -> None:
        self._names = list(names)
        self._schema = schema
        self._encode = encode

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        named = (batch.rename_columns(self._names) for batch in batches if batch.num_rows)
        yield from self._encode(conformed(batch, self._schema) for batch in named)


def _plain(kind: pa.DataType) -> pa.DataType:
    """A type without what does not matter: the zone of an instant, names of items, size of offsets, nullability."""
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
            f"column {name!r} has {column.null_count} nulls among {len(column)} rows and is declared not null; filter them out in "
            "the transformation, or declare it nullable",
            kind=ErrorKind.NULL_NOT_ALLOWED,
        )
    for inner, values in _inside(column, field.type):
        _check_nulls(f"{name}.{inner.name}", values, inner)


def _inside(column: pa.Array, kind: pa.DataType) -> Iterator[tuple[pa.Field, Any]]:
    """The fields of a nested type with their values, of places that are not null themselves."""
    if pa.types.is_struct(kind):
        values = column.filter(pc.is_valid(column))
        for index in range(kind.num_fields):
            yield kind.field(index), values.field(index)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield kind.value_field, column.flatten()
    elif pa.types.is_map(kind):
        values = column.filter(pc.is_valid(column))
        yield kind.item_field, values.items


__all__ = ["Encode", "arrow_schema_of", "check_fits", "conformed", "frames_of"]
