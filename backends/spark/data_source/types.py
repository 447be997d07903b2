"""Columns and batches in the form that Spark needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def spark_columns(schema: pa.Schema) -> StructType:
    """Return the Spark columns for Arrow columns; timestamps without a zone are ``timestamp_ntz``.

    Raises ``InvalidInput`` for two names that differ only in case: Spark would confuse them.
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
    columns: StructType = from_arrow_schema(schema)
    return columns


def arrow_columns(columns: StructType) -> pa.Schema:
    """Return the Arrow columns that Spark expects from a source with these columns."""
    from pyspark.sql.pandas.types import to_arrow_schema

    schema: pa.Schema = to_arrow_schema(columns, timezone="UTC")
    return schema


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with exactly this schema, whose columns have the same names in this order.

    Values are copied only where Spark uses another width (binary of a fixed size).
    """
    pairs = zip(batch.columns, schema, strict=True)
    columns = [column if column.type == field.type else column.cast(field.type) for column, field in pairs]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
