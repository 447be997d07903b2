"""Passes the rows of a DataFrame from a task to the reader of its source.

A task makes a :class:`RowBuffer` for one reader and one epoch, and gives the reader its ``split``.
Then the task adds batches and the reader reads them, in turn, until the task closes the buffer.
Then the split ends, and the reader's watermark comes after all of its rows (``Source.unordered``).
A split finds its buffer by a token, in this process only, and is never part of a checkpoint.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator
from weakref import WeakValueDictionary

import pyarrow as pa

from stateformat.errors import InvalidState

from ...dataflow.api import Chunk, Split


class RowBuffer:
    """Rows for one reader in one epoch. Its split can be read as long as this object lives."""

    def __init__(self, split_id: str) -> None:
        self.split = Split(split_id, uuid.uuid4().bytes)
        """The split for the reader. The reader must not have had its id: use the epoch's number."""
        self._batches: deque[pa.RecordBatch] = deque()
        self._newest_us: int | None = None
        self._closed = False
        self.is_read = False
        _OPEN[self.split.payload] = self

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows, in the schema of the source. ``InvalidState`` after :meth:`close`."""
        if self._closed:
            raise InvalidState(f"Rows came for split {self.split.id!r} after its buffer was closed.")
        if batch.num_rows:
            self._batches.append(batch)

    def observe(self, newest_us: int) -> None:
        """Take the greatest event time, in µs, of rows of the epoch, even of other subtasks."""
        self._newest_us = newest_us if self._newest_us is None else max(self._newest_us, newest_us)

    def close(self) -> None:
        self._closed = True

    def chunks(self) -> Iterator[Chunk]:
        """Yield what has been added, each batch once, and empty chunks while there is nothing."""
        position = 0
        while self._batches or not self._closed:
            batch = self._batches.popleft() if self._batches else None
            position += 0 if batch is None else batch.num_rows
            yield Chunk(batch, position)
        if self._newest_us is not None:
            yield Chunk(None, position, self._newest_us)
        self.is_read = True

    @property
    def has_rows(self) -> bool:
        return bool(self._batches)


def chunks_of(split: Split) -> Iterator[Chunk]:
    """Read the buffer of a split. ``InvalidState`` without one, or if the split was begun."""
    buffer = _OPEN.get(split.payload)
    if buffer is None or split.position:
        why = "this process does not have its rows" if buffer is None else "the rows before were given already"
        raise InvalidState(
            f"Split {split.id!r} cannot be read from row {split.position}: {why}. The rows of a DataFrame come once "
            "in an epoch, in which their split begins and ends."
        )
    return buffer.chunks()


_OPEN: WeakValueDictionary[bytes, RowBuffer] = WeakValueDictionary()
