"""Merge sorted streams of tables into one, in bounded memory."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from .pieces import take_table

_JOINED_BYTES_MAX: Final = 32 << 20
"""Up to this, rows are joined into one chunk before they are gathered, which is faster."""


def merge_sorted(streams: Sequence[Iterator[pa.Table]], keys: Sequence[str]) -> Generator[pa.Table, None, None]:
    """Yield the rows of sorted streams, sorted by ``keys``, integer columns without nulls.

    Among equal rows, those of the earlier stream come first. One table of each stream is in memory.
    A stream that is not sorted, which only damage can cause, loses no row.
    """
    heads = [head for head in (_Head(stream, keys) for stream in streams) if head.refill()]
    while heads:
        # No unread row comes before the least of the last rows.
        least = min(heads, key=lambda head: head.last)
        taken = [head.take(least.last, everything=head is least) for head in heads]
        table = pa.concat_tables(rows for rows, _ in taken if len(rows))
        order = np.lexsort(np.concatenate([part for _, part in taken], axis=1)[::-1])
        if (order[1:] > order[:-1]).all():
            yield table
        elif table.nbytes <= _JOINED_BYTES_MAX:
            yield table.combine_chunks().take(pa.array(order))
        else:
            yield take_table(table, order)
        heads = [head for head in heads if head.refill()]


class _Head:
    """The rows of a stream that come next; ``last`` are the keys of the last of them."""

    def __init__(self, stream: Iterator[pa.Table], keys: Sequence[str]) -> None:
        self._stream = stream
        self._keys = keys
        self._rows: pa.Table | None = None
        self._columns: npt.NDArray[np.int64] = np.zeros((len(keys), 0), np.int64)
        self.last: tuple[int, ...] = ()

    def refill(self) -> bool:
        """Read on if all rows were taken; return False at the end of the stream."""
        while not self._columns.shape[1]:
            self._rows = rows = next(self._stream, None)
            if rows is None:
                return False
            self._columns = np.stack([rows[name].to_numpy().astype(np.int64) for name in self._keys])
            if len(rows):
                self.last = tuple(self._columns[:, -1].tolist())
        return True

    def take(self, bound: tuple[int, ...], *, everything: bool) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        """Remove and return the rows up to ``bound``, and their keys."""
        assert self._rows is not None
        rows, columns = self._rows, self._columns
        start, stop = 0, columns.shape[1]
        if not everything:
            for column, value in zip(columns, bound, strict=True):
                equal = column[start:stop]
                low, high = equal.searchsorted(value), equal.searchsorted(value, "right")
                start, stop = start + int(low), start + int(high)
        self._rows, self._columns = rows.slice(stop), columns[:, stop:]
        return rows.slice(0, stop), columns[:, :stop]
