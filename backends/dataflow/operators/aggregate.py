"""Keyed running aggregates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.graph import brief

from ..api import Operator, OperatorContext, ValueState
from .accumulators import Aggregation, distinct, in_batches
from .row_steps import check_columns

_GATHERED_ROWS_MAX: Final = 262_144
_GATHERED_BYTES_MAX: Final = 64 << 20
_COMBINED_ROWS_MIN: Final = 1024
"""Combining fewer rows is not worth it."""
_SAMPLED_ROWS: Final = 4096
_ROWS_PER_KEY_MIN: Final = 2
"""A batch is combined if its first rows have at least this many per key."""


class Aggregate(Operator):
    """Counts, sums, minima, maxima and means by key, over all rows so far.

    Example::

        delays = flights.key_by("tailnum").apply(
            Aggregate("tailnum", {"delay": ("dep_delay", "mean")}), uid="delays"
        )

    - ``keys``: the columns that its input is keyed by, in that order.
    - ``aggregates``: a new column → (column, ``"sum"``, ``"count"``, ``"min"``, ``"max"`` or
      ``"mean"``); ``("*", "count")`` counts rows. Nulls are skipped: without any value, a count is
      0 and all else null. A sum of integers is int64, of floats double, of
      decimals decimal(38); one that does not fit fails the job. A mean is double.
    - ``emit="updates"``: emits the totals so far after every batch, for each key in it.
      ``emit="end"``: emits the totals of every key once, when the input has ended.

    Emits the key columns, then the new columns. Keeps the state ``totals``. Raises ``InvalidInput``
    for what cannot be aggregated, when the dataflow is built.
    """

    def __init__(
        self, keys: str | Sequence[str], aggregates: Mapping[str, tuple[str, str]], *, emit: str = "updates"
    ) -> None:
        self._keys = key_names(keys)
        self._aggregation = Aggregation(aggregates)
        if emit not in ("updates", "end"):
            raise InvalidInput(f"emit is {emit!r}. Give 'updates' or 'end'.")
        taken = sorted(set(self._keys) & set(aggregates))
        if taken:
            raise InvalidInput(f"{taken} are key columns and new columns. Give the new ones other names.")
        self._updates = emit == "updates"
        self._used = list(dict.fromkeys([*self._keys, *self._aggregation.columns]))
        self._accumulators = pa.schema([])
        self._combined = self._output = pa.schema([])
        self._reset()

    def __repr__(self) -> str:
        return brief(self, *self._keys)

    def states(self, *inputs: pa.Schema) -> list[ValueState]:
        """``totals``: the accumulators of each key."""
        self._learn(inputs[0])
        return [ValueState("totals", [plain(inputs[0].field(name)) for name in self._keys], self._accumulators)]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the keys, and the new columns."""
        self._learn(inputs[0])
        return self._output

    def _learn(self, schema: pa.Schema) -> None:
        check_columns(schema, self._keys, "an aggregate")
        self._accumulators = self._aggregation.accumulators(schema)
        keys = [plain(schema.field(name)) for name in self._keys]
        self._combined = pa.schema([*keys, *self._accumulators])
        self._output = pa.schema([*keys, *self._aggregation.results(self._accumulators)])

    def open(self, context: OperatorContext) -> None:
        """Reset the buffer; the totals are in keyed state."""
        super().open(context)
        self._reset()

    def _reset(self) -> None:
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_rows = self._gathered_bytes = 0

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002 - there is one
        """Merge a batch into the totals; with ``emit="end"``, gather several and merge them."""
        if not batch.num_rows:
            return None
        if self._updates:
            return self._merge(batch)
        self._gathered.append(batch.select(self._used))
        self._gathered_rows += batch.num_rows
        self._gathered_bytes += self._gathered[-1].nbytes
        if self._gathered_rows >= _GATHERED_ROWS_MAX or self._gathered_bytes >= _GATHERED_BYTES_MAX:
            self._merge_gathered()
        return None

    def combined_schema(self, input: int) -> pa.Schema:  # noqa: ARG002 - there is one
        """Return the keys and accumulators, as in the state ``totals``."""
        return self._combined

    def combine(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002
        """Return the accumulators of a batch; None if it has few rows, or too many keys."""
        if batch.num_rows < _COMBINED_ROWS_MIN:
            return None
        some = batch.slice(0, _SAMPLED_ROWS)
        if distinct([some.column(name) for name in self._keys]) * _ROWS_PER_KEY_MIN > some.num_rows:
            return None
        columns, found = self._grouped(batch)
        return pa.RecordBatch.from_arrays([*columns, *found.columns], schema=self._combined)

    def process_combined(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002
        """Merge accumulators into the totals."""
        keys, values = batch.columns[: len(self._keys)], batch.columns[len(self._keys) :]
        accumulated = pa.RecordBatch.from_arrays(values, schema=self._accumulators)
        totals = self._merge_groups(*self._aggregation.regroup(keys, accumulated))
        return totals if self._updates else None

    def _merge_gathered(self) -> None:
        if self._gathered:
            self._merge(pa.concat_batches(self._gathered))
        self._reset()

    def _merge(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Merge a batch into the totals; return the totals of its keys."""
        return self._merge_groups(*self._grouped(batch))

    def _grouped(self, batch: pa.RecordBatch) -> tuple[list[pa.Array], pa.RecordBatch]:
        return self._aggregation.group([batch.column(name) for name in self._keys], batch, self._accumulators)

    def _merge_groups(self, columns: list[pa.Array], new: pa.RecordBatch) -> pa.RecordBatch:
        aggregation, totals = self._aggregation, new

        def merged(old: pa.RecordBatch, found: object) -> pa.RecordBatch:  # noqa: ARG001 - null where there is none
            nonlocal totals
            totals = aggregation.merge(old, new)
            return totals

        self.context.value_state("totals").update(pa.RecordBatch.from_arrays(columns, self._keys), merged)
        return pa.RecordBatch.from_arrays([*columns, *aggregation.finish(totals.columns)], schema=self._output)

    def snapshot(self) -> None:
        """Merge what is buffered into the totals."""
        self._merge_gathered()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """Emit all totals, unless they were emitted as updates."""
        if self._updates:
            return
        self._merge_gathered()
        for batch in in_batches(self.context.value_state("totals").rows()):
            values = self._aggregation.finish([batch.column(name) for name in self._accumulators.names])
            keys = [batch.column(name) for name in self._keys]
            yield pa.RecordBatch.from_arrays([*keys, *values], schema=self._output)


def key_names(keys: str | Sequence[str]) -> list[str]:
    """Return the names of key columns. Raises ``InvalidInput`` if there is none."""
    names = [keys] if isinstance(keys, str) else list(keys)
    if not names:
        raise InvalidInput("no key column is given. Name those that the input is keyed by.")
    return names


def plain(field: pa.Field) -> pa.Field:
    """Return a column as an operator emits it: nullable, without metadata."""
    return pa.field(field.name, field.type)
