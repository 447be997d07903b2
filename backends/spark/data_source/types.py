"""Columns and batches as Spark wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def spark_columns(schema: pa.Schema) -> StructType:
    """Return the Spark columns of Arrow columns; timestamps without a zone are ``timestamp_ntz``.

    Raises ``InvalidInput`` for two names that differ in case only: Spark would not tell them apart.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    seen: dict[str, str] = {}
    for name in schema.names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise InvalidInput(
                f"columns {other!r} and {name!r} differ in case only, and Spark would not tell them apart; name one of "
                "them, and the others you need, in the option columns",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
    columns: StructType = from_arrow_schema(
        pa.schema([pa.field(field.name, _bare(field.type), field.nullable) for field in schema])
    )
    return columns


def arrow_columns(columns: StructType) -> pa.Schema:
    """Return the Arrow columns that Spark expects of a source with these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema

    schema: pa.Schema = to_arrow_schema(columns, timezone="UTC")
    return schema


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch in exactly this schema; its columns have the same names and like types.

    Values are copied only where Spark has another width (binary of a fixed size).
    """
    pairs = zip(batch.columns, schema, strict=True)
    columns = [column if column.type == field.type else column.cast(field.type) for column, field in pairs]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _bare(kind: pa.DataType) -> pa.DataType:
    """A type without the metadata of its fields, which Spark would take for its own."""

    def field(inner: pa.Field) -> pa.Field:
        return pa.field(inner.name, _bare(inner.type), inner.nullable)

    if pa.types.is_struct(kind):
        return pa.struct([field(inner) for inner in kind])
    if pa.types.is_list(kind):
        return pa.list_(field(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(field(kind.key_field), field(kind.item_field))
    return kind
