"""Mergeable aggregates, and the accumulators that are kept in state for them.

An aggregate is stored as *accumulators*: columns of state with one row per group. A mean has a sum
and a count, every other aggregate has one column. Each batch is first aggregated on its own, so the
state sees each group once per batch. Then its accumulators are merged into those of the state, row
by row.

Nulls are skipped. For a group without values the count is 0 and everything else is null. Sums of
integers are int64 and wrap around like Arrow's. Sums of floats are double, of decimals decimal(38).
A mean is double.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import InvalidInput
from stateformat.keys import normalize_key_column
from stateformat.segments import one_array, row_key_codes

from .row_steps import check_columns

ROWS: Final = "*"
"""Stands for a column in an aggregate that counts rows."""

EMIT_ROWS: Final = 65_536
"""Most rows in a batch that is made from state."""


def _add(old: pa.Array, new: pa.Array) -> pa.Array:
    if pa.types.is_decimal(old.type):
        # The sum of two decimals(38) may need 39 digits, so Arrow refuses to add the types,
        # whatever the values. Add them in a wider type.
        wide = pa.decimal256(39, old.type.scale)
        added = pc.add(old.cast(wide), new.cast(wide)).cast(old.type)
    else:
        added = pc.add(old, new)
    return pc.coalesce(added, old, new)


_MERGES: Final[Mapping[str, Callable[[pa.Array, pa.Array], pa.Array]]] = {
    "sum": _add,
    "count": _add,
    "min": pc.min_element_wise,
    "max": pc.max_element_wise,
}
_KINDS: Final = (*_MERGES, "mean")


@dataclass(frozen=True)
class _Accumulator:
    name: str
    column: str
    kind: str


class Aggregation:
    """Named aggregates of columns: ``{"delay": ("dep_delay", "mean")}``.

    Raises ``InvalidInput`` for an unknown aggregate.
    """

    def __init__(self, aggregates: Mapping[str, tuple[str, str]]) -> None:
        if not aggregates:
            raise InvalidInput("no aggregate is given. Give at least one, like {'rows': ('*', 'count')}.")
        self._parts: dict[str, list[int]] = {}
        self._accumulators: list[_Accumulator] = []
        for name, (column, kind) in _pairs(aggregates):
            if kind not in _KINDS or (column == ROWS and kind != "count"):
                raise InvalidInput(
                    f"aggregate {name!r} is {kind!r} of {column!r}. There are {', '.join(_KINDS)} of a column, and "
                    "'count' of '*', the rows."
                )
            parts = (("sum_of_", "sum"), ("count_of_", "count")) if kind == "mean" else (("", kind),)
            self._parts[name] = [len(self._accumulators) + number for number in range(len(parts))]
            self._accumulators += [_Accumulator(prefix + name, column, part) for prefix, part in parts]

    @property
    def columns(self) -> list[str]:
        """The columns that are aggregated, each once."""
        return list(dict.fromkeys(item.column for item in self._accumulators if item.column != ROWS))

    def accumulators(self, schema: pa.Schema) -> pa.Schema:
        """Return the columns kept per group.

        Raises ``InvalidInput`` for a column that is missing or cannot be aggregated.
        """
        check_columns(schema, self.columns, "an aggregate")
        fields = []
        for item in self._accumulators:
            kind = pa.int64() if item.column == ROWS else schema.field(item.column).type
            empty = pa.table({"g": pa.array([], pa.int8()), "v": pa.array([], kind)})
            try:
                found = empty.group_by("g").aggregate([("v", item.kind)]).schema.field(f"v_{item.kind}").type
                found = pa.int64() if found == pa.uint64() and item.kind == "sum" else found
                _MERGES[item.kind](pa.array([], found), pa.array([], found))
            except pa.ArrowException as error:
                raise InvalidInput(
                    f"there is no {item.kind!r} of column {item.column!r}, which is {kind}: {error}. Cast it before."
                ) from error
            fields.append(pa.field(item.name, found))
        return pa.schema(fields)

    def results(self, accumulators: pa.Schema) -> list[pa.Field]:
        """Return the columns that :meth:`finish` gives."""
        return [
            pa.field(name, accumulators.field(parts[0]).type if len(parts) == 1 else pa.float64())
            for name, parts in self._parts.items()
        ]

    def group(
        self, keys: Sequence[pa.Array], batch: pa.RecordBatch, accumulators: pa.Schema
    ) -> tuple[list[pa.Array], pa.RecordBatch]:
        """Return the groups of a batch, each once: their keys, and their accumulators."""
        values = [
            None if item.column == ROWS else (batch.column(item.column), item.kind) for item in self._accumulators
        ]
        found, columns = _grouped([normalize_key_column(key) for key in keys], values, len(batch))
        # Unsigned sums become int64, and wrap around as all others do.
        columns = [
            column if column.type == field.type else column.cast(field.type, safe=False)
            for column, field in zip(columns, accumulators, strict=True)
        ]
        return found, pa.RecordBatch.from_arrays(columns, schema=accumulators)

    def regroup(self, keys: Sequence[pa.Array], accumulated: pa.RecordBatch) -> tuple[list[pa.Array], pa.RecordBatch]:
        """Merge rows with equal keys. Takes and returns them in the form of :meth:`group`."""
        schema = accumulated.schema
        columns = [
            # A wider type, as in _add: a sum of more than 38 digits fails and does not wrap around.
            column.cast(pa.decimal256(57, column.type.scale)) if pa.types.is_decimal(column.type) else column
            for column in accumulated.columns
        ]
        kinds = ["sum" if item.kind == "count" else item.kind for item in self._accumulators]
        found, merged = _grouped(keys, list(zip(columns, kinds, strict=True)), len(accumulated))
        merged = [column.cast(field.type) for column, field in zip(merged, schema, strict=True)]
        return found, pa.RecordBatch.from_arrays(merged, schema=schema)

    def merge(self, old: pa.RecordBatch, new: pa.RecordBatch) -> pa.RecordBatch:
        """Merge accumulators row by row; all null in ``old`` means nothing so far."""
        columns = [
            _MERGES[item.kind](before, more)
            for item, before, more in zip(self._accumulators, old.columns, new.columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(columns, schema=new.schema)

    def finish(self, accumulated: Sequence[pa.Array]) -> list[pa.Array]:
        """Return the columns that users see, from columns of accumulators."""
        return [
            accumulated[parts[0]] if len(parts) == 1 else _mean(accumulated[parts[0]], accumulated[parts[1]])
            for parts in self._parts.values()
        ]


def _grouped(
    keys: Sequence[pa.Array], values: Sequence[tuple[pa.Array, str] | None], rows: int
) -> tuple[list[pa.Array], list[pa.Array]]:
    """Return each distinct key once, in the order of first rows, and the aggregate of each value.

    A value of None counts rows.
    """
    named = {f"k{number}": key for number, key in enumerate(keys)}
    # Arrow cannot group by nested types, so group by a number that stands for the row's key.
    by_code = any(pa.types.is_nested(key.type) for key in keys)
    if by_code:
        named = {"k0": pa.array(row_key_codes(keys)), "row": pa.array(np.arange(rows))}
    group_by = [name for name in named if name != "row"]
    wanted: list[tuple[Any, str]] = [("row", "min")] if by_code else []
    for number, value in enumerate(values):
        if value is None:
            wanted.append(([], "count_all"))
        else:
            named[f"v{number}"], kind = value
            wanted.append((f"v{number}", kind))
    grouped = pa.table(named).group_by(group_by, use_threads=False).aggregate(wanted).combine_chunks()
    columns = [one_array(column) for column in grouped.columns]
    first = len(group_by)
    if by_code:
        return [key.take(columns[first]) for key in keys], columns[first + 1 :]
    return columns[:first], columns[first:]


def distinct(keys: Sequence[pa.Array]) -> int:
    """Return how many different keys there are."""
    found, _ = _grouped([normalize_key_column(key) for key in keys], [], len(keys[0]))
    return len(found[0])


def _pairs(aggregates: object) -> list[tuple[str, tuple[str, str]]]:
    pairs: list[tuple[Any, Any]] = list(aggregates.items()) if isinstance(aggregates, Mapping) else [(aggregates, None)]
    wrong = [pair for pair in pairs if not isinstance(pair[1], tuple | list) or len(pair[1]) != 2]
    if wrong:
        raise InvalidInput(
            f"aggregates are {aggregates!r}. Give a mapping like {{'rows': ('*', 'count'), "
            "'delay': ('dep_delay', 'mean')}."
        )
    return pairs


def _mean(total: pa.Array, count: pa.Array) -> pa.Array:
    # Null where there is no value, because the sum is null.
    return pc.divide(total.cast(pa.float64(), safe=False), count.cast(pa.float64(), safe=False))


def in_batches(table: pa.Table, rows: int = EMIT_ROWS) -> Iterator[pa.RecordBatch]:
    """Yield a table's rows in batches of at most ``rows``; no batch for an empty table."""
    for first in range(0, table.num_rows, rows):
        yield from table.slice(first, rows).combine_chunks().to_batches()
