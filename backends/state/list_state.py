"""State without keys: a list of rows that is replaced or appended to."""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa

from stateformat.graph import brief
from stateformat.model import State
from stateformat.tables import rebatch

from .keyed_value import one_values
from .rows import RowNormalizer

_BATCHES_MAX: Final = 64
_JOINED_ROWS: Final = 1 << 18


class Entries:
    """Rows of an even-split, union or broadcast state, in order (SPEC.md section 3.6).

    Batches have the declared columns; nullable ones may be missing. Others raise ``InvalidState``,
    and the state is unchanged.
    """

    def __init__(self, state: State) -> None:
        self._normalizer = RowNormalizer(state, [item.name for item in state.current.fields], only=True)
        self._table = self._normalizer.schema.empty_table()

    def __repr__(self) -> str:
        return brief(self, f"{self._table.num_rows:,} rows")

    def __len__(self) -> int:
        return len(self._table)

    def rows(self) -> pa.Table:
        """Return all rows, in order."""
        return self._table

    def replace(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Replace all rows."""
        self._table = self._fitted(rows)

    def append(self, rows: pa.Table | pa.RecordBatch) -> None:
        """Append rows."""
        table = pa.concat_tables([self._table, self._fitted(rows)])
        if max((column.num_chunks for column in table.columns), default=0) > _BATCHES_MAX:
            table = pa.Table.from_batches(rebatch([table], table.schema, _JOINED_ROWS), schema=table.schema)
        self._table = table

    def append_one(self, **values: Any) -> None:
        """Append one row; ``InvalidInput`` for an unknown column or a value of another type."""
        self.append(one_values(self._normalizer, values))

    def clear(self) -> None:
        """Delete all rows."""
        self._table = self._normalizer.schema.empty_table()

    def _fitted(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
        schema = self._normalizer.schema
        return pa.Table.from_batches(
            [pa.RecordBatch.from_arrays(self._normalizer.fit(batch), schema=schema) for batch in batches], schema=schema
        )
