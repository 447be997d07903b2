"""The last row of each key, by an order; in bounded memory.

Rows whose key and order are equal are one row if all their columns are equal. Otherwise nothing
says which is the last, and the key is undecided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.segments import REPEATED_SHOWN, row_key_codes
from stateformat.tables import HELD_BYTES, Spill, buckets_of, python_rows, split_by_bucket

_BUCKETS: Final = 256


class Latest:
    """Takes rows with an order column, and gives the last of each key."""

    def __init__(self, row_key: Sequence[str], order: str) -> None:
        self._row_key = list(row_key)
        self._order = order
        self.undecided: list[str] = []
        """Up to :data:`REPEATED_SHOWN` keys of which several rows are the last, as text."""

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The last rows, without the order column."""
        held: list[pa.Table] = []
        held_bytes = 0
        buckets: Spill[int] | None = None
        for batch in batches:
            held.append(pa.Table.from_batches([batch]))
            held_bytes += batch.nbytes
            if held_bytes >= HELD_BYTES:
                buckets = buckets or Spill()
                self._set_aside(buckets, held)
                held, held_bytes = [], 0
        if buckets is None:
            yield from self._decided(self._last(pa.concat_tables(held)) if held else None)
            return
        with buckets:
            self._set_aside(buckets, held)
            for bucket in range(_BUCKETS):
                yield from self._decided(self._last_of_bucket(buckets.read(bucket)))

    def _set_aside(self, buckets: Spill[int], held: Sequence[pa.Table]) -> None:
        for rows in held:
            keys = [rows[name] for name in self._row_key]
            for bucket, chosen in split_by_bucket(rows, buckets_of(keys, _BUCKETS, 0)):
                buckets.add(bucket, chosen)

    def _last_of_bucket(self, batches: Iterable[pa.RecordBatch]) -> pa.Table | None:
        """Of a key with more rows than memory holds, only those that may be the last are kept."""
        kept: list[pa.Table] = []
        fresh_bytes = 0
        for batch in batches:
            kept.append(pa.Table.from_batches([batch]))
            fresh_bytes += batch.nbytes
            if fresh_bytes >= HELD_BYTES:
                kept, fresh_bytes = [self._last(pa.concat_tables(kept))], 0
        return self._last(pa.concat_tables(kept)) if kept else None

    def _last(self, rows: pa.Table) -> pa.Table:
        """The different rows of each key with the greatest order."""
        keys = row_key_codes([rows[name] for name in self._row_key])
        orders = rows[self._order].to_numpy()
        by_order = np.lexsort((orders, keys))
        keys, orders = keys[by_order], orders[by_order]
        ends = np.flatnonzero(np.append(keys[1:] != keys[:-1], len(keys) > 0))
        chosen = by_order[ends]
        greatest = np.repeat(orders[ends], np.diff(ends, prepend=-1))
        tied = np.flatnonzero(orders == greatest)
        if len(tied) > len(ends):
            chosen = self._different(rows, by_order[tied], keys[tied])
        return rows.take(pa.array(np.sort(chosen)))

    def _different(self, rows: pa.Table, tied: npt.NDArray[Any], keys: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The rows among these that no other one equals in key and values."""
        rest = [name for name in rows.column_names if name not in (*self._row_key, self._order)]
        columns = [pa.array(keys), *(rows[name].take(pa.array(tied)) for name in rest)]
        try:
            codes = row_key_codes(columns)
        except pa.ArrowException:
            # Lists and maps cannot be compared: each row counts as different.
            return tied
        _, first = np.unique(codes, return_index=True)
        return tied[first]

    def _decided(self, rows: pa.Table | None) -> Iterator[pa.RecordBatch]:
        if rows is None:
            return
        keys = row_key_codes([rows[name] for name in self._row_key])
        _, first, counts = np.unique(keys, return_index=True, return_counts=True)
        several = np.flatnonzero(counts > 1)
        named = several[: REPEATED_SHOWN - len(self.undecided)]
        found = python_rows(rows.select(self._row_key).take(pa.array(first[named])))
        self.undecided += [f"{key!r} ({count} rows)" for key, count in zip(found, counts[named].tolist(), strict=True)]
        yield from rows.drop_columns([self._order]).to_batches()
