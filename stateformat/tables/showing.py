"""Rows as Python objects, for messages."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def python_rows(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any]]:
    """Return ``rows.to_pylist()``; if Python has no object for some value, all times are text.

    It has none for dates and timestamps before the year 1 and after 9999. For a few rows only: they
    are copied.
    """
    try:
        found: list[dict[str, Any]] = rows.to_pylist()
    except (OverflowError, ValueError):
        whole = pa.table(rows.columns, names=rows.schema.names)
        columns = [_with_texts(pa.concat_arrays(column.chunks)) for column in whole.itercolumns()]
        found = pa.table(columns, names=rows.schema.names).to_pylist()
    return found


def _with_texts(values: pa.Array) -> pa.Array:
    kind = values.type
    if pa.types.is_temporal(kind):
        return values.cast(pa.string())
    if not pa.types.is_struct(kind):
        return values
    children = [_with_texts(child) for child in values.flatten()]
    return pa.StructArray.from_arrays(children, names=[field.name for field in kind], mask=values.is_null())
