"""Accumulators of open windows that are not in the state yet.

Theory of operation. The rows of a window are needed only when it ends, and in a snapshot. Until
then the accumulators of its batches are collected by window start. They are merged when they have
twice as many rows as the last merge left. So they take no more than a few times the memory of the
merged rows, and a row is merged only a few times, however many arrive.
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
        """Number of rows that the last merge left."""


class GatheredWindows:
    """Rows of key columns and accumulators, by window start."""

    def __init__(self, aggregation: Aggregation, key_count: int) -> None:
        self._aggregation = aggregation
        self._key_count = key_count
        self._windows: dict[int, _Window] = {}

    def add(self, start: int, rows: pa.RecordBatch) -> bool:
        """Take rows of a window; return whether the window is new."""
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
        """Yield windows ordered by start, and forget them: all, or starts up to ``last``."""
        for start in sorted(self._windows):
            if last is not None and start > last:
                return
            yield start, self._windows.pop(start).pieces

    def merged(self, pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
        """Merge the rows of one window, so that each key occurs once."""
        if len(pieces) == 1:
            return pieces[0]
        rows = pa.concat_batches(pieces)
        keys, accumulated = rows.columns[: self._key_count], rows.select(rows.schema.names[self._key_count :])
        keys, accumulated = self._aggregation.regroup(keys, accumulated)
        return pa.RecordBatch.from_arrays([*keys, *accumulated.columns], schema=rows.schema)
