"""Rows that user code returns, in the columns that it has declared."""

from __future__ import annotations

import pyarrow as pa

from stateformat.errors import InvalidState


def cast_to_schema(what: str, rows: object, schema: pa.Schema, *, declared: str = "columns") -> pa.Table:
    """The rows as a table of exactly this schema.

    Raises ``InvalidState``, the fault of ``what``'s author, for other columns or types.
    ``declared``: the name under which the author has declared the schema.
    """
    if not isinstance(rows, pa.Table | pa.RecordBatch):
        raise InvalidState(f"{what} returned {type(rows).__name__}. Return a table or a record batch.")
    table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
    if sorted(table.column_names) != sorted(schema.names):
        raise InvalidState(f"{what} returned columns {table.column_names}; its {declared} are {schema.names}")
    try:
        return table.select(schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidState(f"{what} returned other types than declared: {error}") from error


def columns_text(schema: pa.Schema) -> str:
    """Columns for an error, on one line: ``city string, n int64 not null``, or ``none``."""
    return ", ".join(f"{item.name} {item.type}{'' if item.nullable else ' not null'}" for item in schema) or "none"
