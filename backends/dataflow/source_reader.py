"""The reader of a source in one subtask: it reads its splits in turn and tracks event time.

A split's watermark is the greatest event time read from it, minus how far records may be out of
order. The reader's watermark is the lowest of its splits', once each has one, and never goes back.
A split that ends no longer counts. A reader without a limit on its splits waits until it has been
assigned all that exist now: the next one may begin in the past. For an unordered source, only
splits that have ended count.

With ``idle_after_us``, a split without rows for that long, in processing time, does not hold back
event time. If no split does, their greatest watermark counts, and the reader itself is idle.

A reader may be assigned more splits than it has room for. They wait unread, but are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import InvalidState
from stateformat.segments import check_text
from stateformat.tables import table_from_python

from .api import Chunk, EventTime, NoSplit, ReaderContext, Source, Split
from .chained_operator import Guard
from .events import MAX_WATERMARK, MIN_WATERMARK
from .graph import SPLITS_SCHEMA


class ReadResult(NamedTuple):
    """The result of one read of a source."""

    rows: int
    """How many rows were read and processed."""
    wants_split: bool
    """There is room for another split, and there may be one."""
    idle: bool
    """There is nothing now: no split, or none with anything to read."""
    ended: bool
    """Every split is read and there will be no more."""
    watermark: int | None
    """The event time reached, µs; None if unknown or if the source has none."""
    holds_none: bool = False
    """There is no split, but more may come: until then there is nothing to read."""
    is_idle: bool = False
    """It has had no rows for so long that it does not hold back event time."""
    idle_at_us: int | None = None
    """The processing time at which it or one of its splits becomes idle, if no rows come."""


class Holder(NamedTuple):
    """Which split of a reader is behind the others."""

    split: str | None
    """The split; None: no split holds back event time."""
    watermark: int | None
    """Its watermark; None: it has had no row."""
    furthest: int | None
    """The greatest watermark of the splits."""


class _OpenSplit:
    """A split that is being read or waits to be read."""

    def __init__(self, split: Split, watermark: int | None, now_us: int) -> None:
        self.split = split
        self.active_us = now_us
        """The processing time at which it began, or its last rows came."""
        self.position = split.position
        self.watermark = watermark
        self.chunks: Iterator[Chunk] | None = None


class SourceReader:
    """Reads the splits of one subtask, chunk by chunk. ``emit`` takes batches to the chain."""

    def __init__(
        self,
        uid: str,
        source: Source,
        event_time: EventTime | None,
        subtask: int,
        clock: Callable[[], int],
        emit: Callable[[pa.RecordBatch], None],
        *,
        idle_after_us: int | None = None,
        processing_time: Callable[[], int] = lambda: 0,
    ) -> None:
        self._guard = Guard(uid, subtask)
        self._uid = uid
        self._source = source
        self._event_time = event_time
        self._context = ReaderContext(subtask, clock)
        self._emit = emit
        self._idle_after_us = idle_after_us
        self._processing_time = processing_time
        self._active_us = 0
        """When it was opened, or when its last rows came."""
        self._open: deque[_OpenSplit] = deque()
        """The open splits, the next one to read first."""
        self._waiting: deque[_OpenSplit] = deque()
        """Splits not begun; they are not read while there is no room."""
        self._no_more = False
        self._has_all = source.splits_per_reader is not None
        """It has been assigned all the splits that exist now, or has a limit on its splits."""
        self._empty_reads = 0
        """How many reads in a row returned no rows."""
        self._watermark: int | None = None
        self._watermark_of_ended: int | None = None
        """The greatest watermark of the splits that have ended."""

    def open(self) -> None:
        """Start measuring the time without rows."""
        self._active_us = self._processing_time()

    def assign(self, split: Split | NoSplit) -> None:
        """Take the enumerator's answer. Raises ``InvalidState`` for a split it already has."""
        if isinstance(split, NoSplit):
            self._no_more = self._no_more or split is NoSplit.NEVER
            self._has_all = True
            return
        self._add(split, None)

    def _add(self, split: Split, watermark: int | None) -> None:
        if any(other.split.id == split.id for other in (*self._open, *self._waiting)):
            raise InvalidState(
                f"the enumerator of source {self._uid!r} gave split {split.id!r} to a reader that holds one of that "
                "id; ids of splits are unique"
            )
        begun = watermark is not None or split.position != 0
        splits = self._open if begun or self._has_room else self._waiting
        splits.append(_OpenSplit(split, watermark, self._processing_time()))
        self._empty_reads = 0

    @property
    def _has_room(self) -> bool:
        room = self._source.splits_per_reader
        return room is None or len(self._open) < room

    def read(self) -> ReadResult:
        """Read one chunk of the next split. Raises ``OperatorError`` if the source raises."""
        rows = 0
        if self._open:
            split = self._open[0]
            chunk = self._next(split)
            self._open.popleft()
            if chunk is not None:
                self._open.append(split)
                rows = self._take(split, chunk)
                self._empty_reads = 0 if rows else self._empty_reads + 1
            elif split.watermark is not None:
                self._watermark_of_ended = _greatest(split.watermark, self._watermark_of_ended)
        while self._waiting and self._has_room:
            self._open.append(self._waiting.popleft())
            self._empty_reads = 0
        ended = self._no_more and not self._open
        return ReadResult(
            rows=rows,
            wants_split=not self._no_more and self._has_room,
            idle=not rows and self._empty_reads >= len(self._open) and not ended,
            ended=ended,
            watermark=self._advance(),
            holds_none=not (self._open or self._waiting or self._no_more),
            is_idle=not ended and self._is_idle(),
            idle_at_us=self.idle_at_us,
        )

    def _is_idle(self) -> bool:
        if self._idle_after_us is None or self._waiting:
            return False
        return not self._holding() and self._processing_time() - self._active_us >= self._idle_after_us

    def _holding(self) -> list[_OpenSplit]:
        """Return the open splits that are not idle."""
        if self._idle_after_us is None:
            return list(self._open)
        since_us = self._processing_time() - self._idle_after_us
        return [split for split in self._open if split.active_us > since_us]

    @property
    def idle_at_us(self) -> int | None:
        """The processing time at which something becomes idle, if no rows come."""
        if self._idle_after_us is None:
            return None
        times = [split.active_us for split in self._holding()] or ([] if self._is_idle() else [self._active_us])
        return min(times) + self._idle_after_us if times else None

    @property
    def holder(self) -> Holder:
        """Return the split that is behind the others, the first in order if there are several."""
        known = [split.watermark for split in self._open if split.watermark is not None]
        holding = self._holding()
        unknown = next((split for split in holding if split.watermark is None), None)
        last = unknown or min(holding, key=lambda split: split.watermark or 0, default=None)
        return Holder(
            last.split.id if last else None,
            last.watermark if last else self._watermark,
            max((*known, self._watermark_of_ended), key=lambda time: MIN_WATERMARK if time is None else time),
        )

    def active(self) -> dict[str, int]:
        """Return when rows last came, by split; the name ``""`` is the reader itself."""
        return {"": self._active_us, **{split.split.id: split.active_us for split in (*self._open, *self._waiting)}}

    def go_on(self, active: Mapping[str, int]) -> None:
        """Take what :meth:`active` of a reader of the same run returned."""
        self._active_us = active.get("", self._active_us)
        for split in (*self._open, *self._waiting):
            split.active_us = active.get(split.split.id, split.active_us)

    def _next(self, split: _OpenSplit) -> Chunk | None:
        """Return the next chunk; None if the split has ended."""
        with self._guard("read"):
            if split.chunks is None:
                split.chunks = iter(self._source.read(split.split._replace(position=split.position), self._context))
            return next(split.chunks, None)

    def _take(self, split: _OpenSplit, chunk: Chunk) -> int:
        if not isinstance(chunk, Chunk):
            raise InvalidState(f"read of source {self._uid!r} gave {type(chunk).__name__}; it gives a Chunk")
        batch = chunk.batch
        rows = 0 if batch is None else batch.num_rows
        if rows:
            check_text(batch, f"split {split.split.id!r} of source {self._uid!r}")
            self._emit(batch)
        if rows or chunk.newest_us is not None:
            split.active_us = self._active_us = self._processing_time()
        if self._event_time is not None:
            times = [chunk.newest_us]
            if batch is not None and rows:
                times.append(pc.max(batch.column(self._event_time.column)).cast(pa.int64()).as_py())
            for newest_us in times:
                if newest_us is not None:
                    # MAX_WATERMARK is the end of all input, and no row's time.
                    time = newest_us - self._event_time.out_of_order_us
                    time = min(max(time, MIN_WATERMARK), MAX_WATERMARK - 1)
                    split.watermark = _greatest(time, split.watermark)
        # After the rows: a snapshot shows what has been emitted.
        split.position = chunk.position
        return rows

    def _advance(self) -> int | None:
        if self._source.unordered:
            if not self._open and self._watermark_of_ended is not None:
                self._watermark = _greatest(self._watermark_of_ended, self._watermark)
            return self._watermark
        holding = self._holding()
        known = [split.watermark for split in holding or self._open if split.watermark is not None]
        if known and self._has_all and (not holding or len(known) == len(holding)):
            self._watermark = _greatest(min(known) if holding else max(known), self._watermark)
        return self._watermark

    def rows(self) -> pa.Table:
        """Return its splits, in the columns of ``SPLITS_SCHEMA``."""
        rows = (
            {
                "split_id": split.split.id,
                "payload": split.split.payload,
                "position": split.position,
                "watermark": split.watermark,
            }
            for split in (*self._open, *self._waiting)
        )
        return table_from_python(rows, SPLITS_SCHEMA, f"the splits of {self._source!r}")

    def restore(self, rows: pa.Table) -> None:
        """Take the splits that :meth:`rows` of this or other readers returned."""
        for row in rows.to_pylist():
            self._add(Split(row["split_id"], row["payload"], row["position"]), row["watermark"])

    def close(self) -> None:
        """Close the generators of ``read``."""
        while self._open:
            end = getattr(self._open.popleft().chunks, "close", None)
            if end is not None:
                with self._guard("read"):
                    end()


def _greatest(time: int, other: int | None) -> int:
    return time if other is None else max(time, other)
