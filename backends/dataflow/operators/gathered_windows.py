"""Rows for open windows that are not in state yet.

Theory of operation. A window is needed when it ends, and in a snapshot. Until then the accumulators
of its batches are only collected, by where the window begins. They are merged when they have become
twice as many rows as the last merge left. So they take no more than a few times the memory of the
merged rows, and a row is merged a few times, however many come.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from .accumulators import Aggregation

_ROWS_MIN: Final = 262_144
_PIECES_MAX: Final = 256


class _Window:
    """The accumulators of one window, in pieces."""

    def __init__(self) -> None:
        self.pieces: list[pa.RecordBatch] = []
        self.rows = 0
        self.merged = 0
        """The number of rows that the last merge left."""


class GatheredWindows:
    """Rows of key columns and accumulators, by where their windows begin."""

    def __init__(self, aggregation: Aggregation, key_count: int) -> None:
        self._aggregation = aggregation
        self._key_count = key_count
        self._windows: dict[int, _Window] = {}

    def add(self, start: int, rows: pa.RecordBatch) -> bool:
        """Take rows of a window; return whether none of it were held."""
        window = self._windows.get(start)
        is_new = window is None
        if window is None:
            window = self._windows[start] = _Window()
        window.pieces.append(rows)
        window.rows += len(rows)
        if window.rows > max(_ROWS_MIN, 2 * window.merged) or len(window.pieces) == _PIECES_MAX:
            window.pieces = [self.merged(window.pieces)]
            window.rows = window.merged = len(window.pieces[0])
        return is_new

    def take(self, last: int | None = None) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
        """Yield and forget windows, by where they begin: all, or those up to ``last``."""
        for start in sorted(self._windows):
            if last is not None and start > last:
                return
            yield start, self._windows.pop(start).pieces

    def merged(self, pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
        """Return the rows of one window, each key once."""
        if len(pieces) == 1:
            return pieces[0]
        rows = pa.concat_batches(pieces)
        keys, accumulated = rows.columns[: self._key_count], rows.select(rows.schema.names[self._key_count :])
        keys, accumulated = self._aggregation.regroup(keys, accumulated)
        return pa.RecordBatch.from_arrays([*keys, *accumulated.columns], schema=rows.schema)
