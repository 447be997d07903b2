"""Finds the keys to read from filters on all key columns.

Spark still applies every filter itself. So a read may return too many rows, but never too few, and
any filter that is in doubt here is left to Spark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import EqualNullSafe, EqualTo, Filter, In, IsNull

from stateformat.errors import InvalidInput
from stateformat.reading import StateRows

from .streams import Readable

KEYS_MAX: Final = 10_000
"""If the filters allow more keys than this, everything is read: that costs less."""


def with_keys_of(rows: Readable, filters: Sequence[Filter]) -> Readable:
    """Return only the rows whose keys can pass all filters; all rows if that is in doubt."""
    if not isinstance(rows, StateRows) or rows.keys is not None:
        return rows
    types = {field.name: field.type for field in rows.task.schema}
    allowed = [_values(name, filters) for name in rows.state.key_columns if not pa.types.is_struct(types[name])]
    found = [values for values in allowed if values is not None]
    if not found or len(found) < len(rows.state.key_columns) or prod(map(len, found)) > KEYS_MAX:
        return rows
    keys: list[Mapping[str, Any]] = [dict(zip(rows.state.key_columns, key, strict=True)) for key in product(*found)]
    try:
        return rows.at_keys(keys)
    except InvalidInput:
        return rows  # In Python, the value of a filter may have another type.


def _values(name: str, filters: Sequence[Filter]) -> Sequence[Any] | None:
    """Return the values that the strictest filter allows for a column; None if none limits it."""
    fewest: Sequence[Any] | None = None
    for one in filters:
        if getattr(one, "attribute", None) != (name,):
            continue
        match one:
            case EqualTo(value=value):
                values: Sequence[Any] = [] if value is None else [value]
            case EqualNullSafe(value=value):
                values = [value]
            case In(value=value):
                values = [item for item in value if item is not None]
            case IsNull():
                values = [None]
            case _:
                continue
        fewest = values if fewest is None or len(values) < len(fewest) else fewest
    return fewest
