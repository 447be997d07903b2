"""The reader of a source in one subtask: the splits that it holds, read in turn, and how far event time has come.

The watermark of a split is the greatest event time read of it, less by how much records may be out of order; that of the reader
is the least of those it holds, once every one has some, and never goes back. A split that ends no longer counts. A reader that
holds as many splits as it is given waits until it has been given all there are now: the next one may begin in the past. Where the
rows of a split come in any order, its watermark says nothing before its end: the reader's moves when it holds none.

A reader may be given more splits than it holds at a time: they wait, unread, as if nobody had dealt them yet, and are kept all the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import InvalidState

from ..api import Chunk, NoSplit, Source, Split
from ..api.source import EventTime
from ..events import MIN_WATERMARK
from ..graph import SPLITS_SCHEMA
from .errors import Guard


class ReadResult(NamedTuple):
    """What came of one look at a source."""

    rows: int
    """How many were read and processed."""
    wants_split: bool
    """There is room for another split, and there may be one."""
    idle: bool
    """Nothing is there now: no split, or none of those held has anything."""
    ended: bool
    """Every split is read and there will be no other."""
    watermark: int | None
    """How far event time has come, µs; None where that is not known, or the source has no event time."""
    holds_none: bool = False
    """No split is held and more may come: without another one there is nothing to read."""


class _Held:
    """A split under way."""

    def __init__(self, split: Split, watermark: int | None) -> None:
        self.split = split
        self.position = split.position
        self.watermark = watermark
        self.chunks: Iterator[Chunk] | None = None


class _ReaderContext:
    """What reading may ask (``api.ReaderContext``)."""

    def __init__(self, subtask: int, clock: Callable[[], int]) -> None:
        self._subtask = subtask
        self._clock = clock

    @property
    def subtask(self) -> int:
        return self._subtask

    @property
    def now_us(self) -> int:
        return self._clock()


class SourceReader:
    """Reads the splits of one subtask, one chunk at a time. ``emit`` takes each batch to the chain."""

    def __init__(
        self,
        uid: str,
        source: Source,
        event_time: EventTime | None,
        subtask: int,
        clock: Callable[[], int],
        emit: Callable[[pa.RecordBatch], None],
    ) -> None:
        self._guard = Guard(uid, subtask)
        self._uid = uid
        self._source = source
        self._event_time = event_time
        self._context = _ReaderContext(subtask, clock)
        self._emit = emit
        self._held: deque[_Held] = deque()
        self._waiting: deque[_Held] = deque()
        """Given ahead: nothing of them is read while enough others are held."""
        self._no_more = False
        self._given_all = source.splits_per_reader is not None
        self._nothing_in_a_row = 0
        self._watermark: int | None = None
        self._over: int | None = None
        """The greatest watermark of the splits that have ended."""

    def give(self, split: Split | NoSplit) -> None:
        """Take the enumerator's answer. ``InvalidState`` for a split that is held already."""
        if isinstance(split, NoSplit):
            self._no_more = self._no_more or split is NoSplit.NEVER
            self._given_all = True
            return
        self._hold(split, None)

    def _hold(self, split: Split, watermark: int | None) -> None:
        if any(held.split.id == split.id for held in (*self._held, *self._waiting)):
            raise InvalidState(
                f"the enumerator of source {self._uid!r} gave split {split.id!r} to a reader that holds one of that id; ids of "
                "splits are unique"
            )
        begun = watermark is not None or split.position != 0
        if begun or self._has_room:
            self._held.append(_Held(split, watermark))
        else:
            self._waiting.append(_Held(split, None))
        self._nothing_in_a_row = 0

    @property
    def _has_room(self) -> bool:
        room = self._source.splits_per_reader
        return room is None or len(self._held) < room

    def read(self) -> ReadResult:
        """Read one chunk of the split whose turn it is. ``OperatorError`` for what the source raises."""
        rows = 0
        if self._held:
            held = self._held[0]
            chunk = self._next(held)
            self._held.popleft()
            if chunk is not None:
                self._held.append(held)
                rows = self._take(held, chunk)
                self._nothing_in_a_row = 0 if rows else self._nothing_in_a_row + 1
            elif held.watermark is not None:
                self._over = held.watermark if self._over is None else max(held.watermark, self._over)
        while self._waiting and self._has_room:
            self._held.append(self._waiting.popleft())
            self._nothing_in_a_row = 0
        return ReadResult(
            rows=rows,
            wants_split=not self._no_more and self._has_room,
            idle=bool(not rows and self._nothing_in_a_row >= len(self._held) and not self._ended),
            ended=self._ended,
            watermark=self._advanced(),
            holds_none=not (self._held or self._waiting or self._no_more),
        )

    @property
    def _ended(self) -> bool:
        return self._no_more and not self._held

    def _next(self, held: _Held) -> Chunk | None:
        """The next chunk; None where the split has ended."""
        with self._guard("read"):
            if held.chunks is None:
                held.chunks = iter(self._source.read(held.split._replace(position=held.position), self._context))
            return next(held.chunks, None)

    def _take(self, held: _Held, chunk: Chunk) -> int:
        if not isinstance(chunk, Chunk):
            raise InvalidState(f"read of source {self._uid!r} gave {type(chunk).__name__}; it gives a Chunk")
        batch = chunk.batch
        rows = 0 if batch is None else batch.num_rows
        if rows:
            self._emit(batch)
            self._observe(held, batch)
        if chunk.newest_us is not None and self._event_time is not None:
            self._come_to(held, chunk.newest_us, self._event_time)
        # Behind the rows: what is snapshotted is what has been emitted.
        held.position = chunk.position
        return rows

    def _observe(self, held: _Held, batch: pa.RecordBatch) -> None:
        if self._event_time is None:
            return
        newest = pc.max(batch.column(self._event_time.column)).cast(pa.int64()).as_py()
        if newest is not None:
            self._come_to(held, newest, self._event_time)

    def _come_to(self, held: _Held, newest_us: int, event_time: EventTime) -> None:
        time = max(newest_us - event_time.out_of_order_us, MIN_WATERMARK)
        held.watermark = time if held.watermark is None else max(held.watermark, time)

    def _advanced(self) -> int | None:
        if self._source.unordered:
            if not self._held and self._over is not None:
                self._watermark = max(self._over, self._watermark if self._watermark is not None else self._over)
            return self._watermark
        known = [held.watermark for held in self._held if held.watermark is not None]
        if known and self._given_all and len(known) == len(self._held):
            self._watermark = max(min(known), self._watermark if self._watermark is not None else min(known))
        return self._watermark

    def rows(self) -> pa.Table:
        """The splits held, in the columns of ``SPLITS_SCHEMA``."""
        return pa.Table.from_pylist(
            [
                {
                    "split_id": held.split.id,
                    "payload": held.split.payload,
                    "position": held.position,
                    "watermark": held.watermark,
                }
                for held in (*self._held, *self._waiting)
            ],
            schema=SPLITS_SCHEMA,
        )

    def restore(self, rows: pa.Table) -> None:
        """Hold what :meth:`rows` gave, of this reader or of others."""
        for row in rows.to_pylist():
            self._hold(Split(row["split_id"], row["payload"], row["position"]), row["watermark"])

    def close(self) -> None:
        """Let go of what is being read: the generators of ``read`` are closed."""
        while self._held:
            end = getattr(self._held.popleft().chunks, "close", None)
            if end is not None:
                with self._guard("read"):
                    end()


__all__ = ["ReadResult", "SourceReader"]
