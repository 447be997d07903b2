"""Rows that user code returns, in the columns that it has declared."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.segments import cast_kept, kept, plain_type


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
        return columns_kept(table, schema)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidState(f"{what} returned other types than declared: {error}") from error


def columns_kept(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema; ``ArrowException`` or ``ValueError`` for other values."""
    columns = []
    for field in schema:
        try:
            columns.append(cast_kept(table[field.name], field.type))
        except pa.ArrowException as error:
            raise pa.ArrowInvalid(f"column {field.name!r}, {table[field.name].type}: {error}") from error
    # The cast of the whole refuses nulls where none may be.
    return pa.Table.from_arrays(columns, names=schema.names).cast(schema)


def check_columns(what: str, schema: pa.Schema) -> None:
    """Raise ``InvalidInput`` for columns of one name, and for types that Arrow cannot deal out."""
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InvalidInput(
            f"{what} has {schema.names.count(twice[0])} columns named {twice[0]!r}. Give each a name of its own, or "
            "select one",
            kind=ErrorKind.SCHEMA_MISMATCH,
            column=twice[0],
        )
    for field in schema:
        try:
            pa.nulls(0, field.type).take(pa.array([], pa.int64()))
        except pa.ArrowException as error:
            raise InvalidInput(
                f"column {field.name!r} of {what} is {field.type}, of which Arrow cannot take single rows. Cast it to "
                f"{plain_type(field.type)}",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                column=field.name,
            ) from error


def plain_schema(schema: pa.Schema, known: pa.Schema | None = None) -> pa.Schema:
    """Return the same columns with plain types. Times in ns stay so if ``known`` has them."""
    nanoseconds = {(field.name, field.type) for field in known or () if getattr(field.type, "unit", None) == "ns"}
    return pa.schema(
        [
            field if (field.name, field.type) in nanoseconds else field.with_type(plain_type(field.type))
            for field in schema
        ]
    )


def fits_plain(given: pa.Schema, wanted: pa.Schema) -> bool:
    """Return whether rows become those of a plain schema as :func:`made_plain` does it."""
    return given.names == wanted.names and all(
        (pa.types.is_null(a.type) or b.type in (a.type, plain_type(a.type))) and a.nullable == b.nullable
        for a, b in zip(given, wanted, strict=True)
    )


def made_plain(what: str, rows: Any, schema: pa.Schema) -> Any:
    """Return a table or batch in its plain schema. ``InvalidInput`` for a value it cannot hold."""
    advice = "Cast it first; pyarrow.compute.floor_temporal(column, unit='microsecond') rounds times"
    columns = [
        plain_column(f"column {field.name!r} of {what}", column, field.type, advice)
        for field, column in zip(schema, rows.columns, strict=True)
    ]
    return type(rows).from_arrays(columns, schema=schema)


def plain_column(what: str, column: Any, wanted: pa.DataType, advice: str) -> Any:
    """Return a column cast to another type. ``InvalidInput`` for a value that this has not."""
    try:
        return kept(column, wanted)
    except pa.ArrowException as error:
        raise InvalidInput(
            f"{what} is {column.type}, and not every value of it fits {wanted}: {error}. {advice}",
            kind=ErrorKind.SCHEMA_MISMATCH,
        ) from error


def columns_text(schema: pa.Schema) -> str:
    """Columns for an error, on one line: ``city string, n int64 not null``, or ``none``."""
    return ", ".join(f"{item.name} {item.type}{'' if item.nullable else ' not null'}" for item in schema) or "none"
