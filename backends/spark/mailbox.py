"""How rows that Spark brings to a worker get to the reader of their source.

Theory of operation. A range of a DataFrame arrives at the subtasks of its source batch by batch, in any order. Whoever takes
the batches in (the runner) makes a :class:`Mailbox` for one reader and one epoch, gives the reader its ``split``, pushes
batches and lets the reader read, in turns, and closes the mailbox when all has come. Then the split ends, and the reader's
watermark comes behind all of its rows (``Source.unordered``). Such a split begins and ends between two barriers: it is never
part of a checkpoint, and nobody else could read it.

A split finds its mailbox by a token, in this process only. One thread pushes and reads.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Iterator
from weakref import WeakValueDictionary

import pyarrow as pa

from backends.dataflow.api import Chunk, Split
from stateformat.errors import InvalidState


class Mailbox:
    """Rows for one reader in one epoch. It is open as long as somebody holds it, and reads while it is not closed."""

    def __init__(self, split_id: str) -> None:
        self.split = Split(split_id, uuid.uuid4().bytes)
        """What the reader is to be given. Its id must be new to the reader: the epoch's number, say."""
        self._batches: deque[pa.RecordBatch] = deque()
        self._newest_us: int | None = None
        self._closed = False
        self.is_read = False
        """Whether its reader has come to the end."""
        _OPEN[self.split.payload] = self

    def push(self, batch: pa.RecordBatch) -> None:
        """Add rows, in the schema of the source. ``InvalidState`` after :meth:`close`."""
        if self._closed:
            raise InvalidState(
                f"rows came for split {self.split.id!r} after its mailbox was closed; close it behind them"
            )
        if batch.num_rows:
            self._batches.append(batch)

    def observe(self, newest_us: int | None) -> None:
        """The greatest event time of some of the epoch's rows, whoever got them, µs.

        The rows of a range are dealt to subtasks without regard to time. If each saw only its own, one that gets none would
        hold the time of the job up.
        """
        if newest_us is not None:
            self._newest_us = newest_us if self._newest_us is None else max(self._newest_us, newest_us)

    def close(self) -> None:
        """All has come: the split ends behind it."""
        self._closed = True

    def chunks(self) -> Iterator[Chunk]:
        """What has been pushed, each once; empty chunks while nothing is there; the end when the mailbox is closed."""
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
        """Whether rows wait to be read."""
        return bool(self._batches)


def chunks_of(split: Split) -> Iterator[Chunk]:
    """Read the mailbox to which a split belongs. ``InvalidState`` where there is none in this process, or where it was begun."""
    mailbox = _OPEN.get(split.payload)
    if mailbox is None or split.position:
        raise InvalidState(
            f"split {split.id!r} is to be read from row {split.position} and "
            f"{'nobody in this process has its rows' if mailbox is None else 'its rows were handed out'}; rows of a DataFrame "
            "come once in an epoch, in which their split begins and ends"
        )
    return mailbox.chunks()


_OPEN: WeakValueDictionary[bytes, Mailbox] = WeakValueDictionary()


__all__ = ["Mailbox", "chunks_of"]
