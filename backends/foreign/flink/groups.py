"""One subtask's keyed state in one stream of key groups, read by ranges of them.

The handle gives the beginning of each key group. Ranges of some megabytes are read at a time, never
a whole stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind

from ..byte_strings import Octets, Positions
from ..framing import snappy_streams_decode
from .handles import CANONICAL, KeyGroups
from .layouts import (
    PADDING,
    Form,
    Frames,
    HeapEntries,
    Stored,
    count_elements,
    frame_compressed,
    frame_groups,
    frame_heap,
    rows_of,
    rows_of_heap,
)
from .streams import Place

RANGE_BYTES: Final = 8 << 20
"""How many stored bytes of key groups are read at once, unless one group is larger."""

_SNAPPY_HEAD: Final = b"\xff\x06\x00\x00sNaPpY"
_PROBED: Final = 8
_MANY_STATES: Final = 256
"""With more states than this the entries of all are found at once and kept for the next one: the
time would grow with the square of the states.
"""


class KeyedReader(Protocol):
    """What one subtask has of its keyed states, whatever the layout."""

    def batches(self, form: Form, first: int, last: int) -> Iterator[pa.RecordBatch]:
        """Stream the rows of a state in key groups ``first`` … ``last``, by key group."""

    def rows(self, form: Form, first: int, last: int) -> npt.NDArray[np.int64]:
        """Count the rows of a state in each of these key groups."""


@dataclass(frozen=True, slots=True)
class Extents:
    """Where key groups are in a stream; those without any bytes are left out."""

    groups: npt.NDArray[np.int32]
    start: Positions
    end: Positions
    open_end: bool
    """Whether the last one may end before its ``end``."""

    @classmethod
    def of(cls, handle: KeyGroups, size: int, path: str, absent: int = 0) -> Extents:
        """Return the places of a handle's key groups; ``absent`` is the offset of those without
        any. Raises ``DamagedCheckpoint``.
        """
        offsets = handle.offsets
        present = np.flatnonzero(offsets != absent)
        start = offsets[present]
        order = np.argsort(start, kind="stable")
        ends = np.append(start[order][1:], size)
        if len(start) and (start.min() < 0 or (ends <= start[order]).any()):
            raise DamagedCheckpoint(
                f"the metadata names {path} with {size} bytes and offsets of key groups from {start.min()} to "
                f"{start.max()}, of which some are equal or lie outside; take another checkpoint or savepoint",
                kind=ErrorKind.DAMAGED_RECORD,
                path=path,
            )
        end = np.empty_like(start)
        end[order] = ends
        return cls((handle.first_group + present).astype(np.int32), start, end, True)

    def header(self, place: Place) -> bytes:
        """Return what precedes the first key group."""
        return place.head(int(self.start.min(initial=place.size)))

    def between(self, first: int, last: int) -> Extents:
        """Return the places of key groups ``first`` … ``last``."""
        chosen = (self.groups >= first) & (self.groups <= last)
        return self.take(np.flatnonzero(chosen))

    def take(self, chosen: Positions) -> Extents:
        """Return some of the places. Only the one at the end of the stream may end early."""
        last = len(self.end) and self.end[chosen].max(initial=0) == self.end.max()
        return Extents(self.groups[chosen], self.start[chosen], self.end[chosen], self.open_end and bool(last))

    def ranges(self, limit: int = RANGE_BYTES) -> Iterator[Extents]:
        """Cut them into ranges of about ``limit`` bytes, at least one key group each."""
        total = np.cumsum(self.end - self.start)
        at = 0
        while at < len(total):
            before = int(total[at - 1]) if at else 0
            stop = max(at + 1, int(np.searchsorted(total, before + limit, "right")))
            yield self.take(np.arange(at, stop))
            at = stop

    def read(self, place: Place) -> tuple[Octets, Positions, Positions]:
        """Read them. Returns one buffer with ``PADDING`` at its end, and where each begins and ends
        in it.
        """
        order = np.argsort(self.start, kind="stable")
        start, end = self.start[order], self.end[order]
        # Adjacent key groups are one read.
        cuts = np.flatnonzero(start[1:] != end[:-1]) + 1
        pieces, moved = [], np.empty_like(start)
        size = 0
        for some in np.split(np.arange(len(start)), cuts):
            first, last = int(start[some[0]]), int(end[some[-1]])
            moved[some] = size - first
            pieces.append(place.read(first, last - first, 0 if len(cuts) else PADDING))
            size += last - first
        data = pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.zeros(PADDING, np.uint8)])
        shift = np.empty_like(moved)
        shift[order] = moved
        return data, self.start + shift, self.end + shift


class _Last:
    """What was found last in a range of key groups, entries or an error. One for the process."""

    def __init__(self) -> None:
        self._kept: tuple[object, tuple[int, ...], Any] = None, (), None

    def of(self, reader: object, some: Extents, find: Callable[[Extents], Any]) -> Any:
        mark = (int(some.start[0]), len(some.start))
        kept = self._kept
        if kept[0] is not reader or kept[1] != mark:
            try:
                found: Any = find(some)
            except CheckpointError as error:
                found = error
            self._kept = kept = reader, mark, found
        if isinstance(kept[2], CheckpointError):
            raise kept[2]
        return kept[2]


_LAST: Final = _Last()


def is_heap(handle: KeyGroups, place: Place, extents: Extents, prefix: int) -> bool:
    """Return whether a stream has the hash-map backend's own layout; otherwise it is canonical.

    Only savepoints say so. A checkpoint of RocksDB that is not incremental (until Flink 1.14) has
    the canonical layout under a heap's code. The hash-map backend writes every key group, the empty
    ones too, and first its number; a canonical one begins with the number of a state and the length
    of a key, and if it is compressed, with a snappy stream.
    """
    if handle.code == CANONICAL or len(extents.groups) < handle.groups:
        return False
    if not handle.groups:
        return True
    # In the highest key group only a key of 64 KiB times its number could look like that number.
    which = int(np.argmax(extents.groups))
    group, start = int(extents.groups[which]), int(extents.start[which])
    end = int(extents.end[which])
    said = place.read(start, min(4, end - start)).tobytes()
    return int.from_bytes(said, "big", signed=True) == group and not _begins_canonical(place, group, start, end, prefix)


def _begins_canonical(place: Place, group: int, start: int, end: int, prefix: int) -> bool:
    """Return whether the first entries of a key group are framed, with keys of this group."""
    at = start + 2
    mine = group.to_bytes(prefix, "big")
    for _ in range(_PROBED):
        if end - at < 10 + prefix:
            return False
        head = place.read(at, 4 + prefix).tobytes()
        key = int.from_bytes(head[:4], "big")
        last = head[4] & 0x80
        if key < prefix or bytes([head[4] & 0x7F]) + head[5:] != mine or end - at < 10 + key:
            return False
        at += 4 + key
        value = int.from_bytes(place.read(at, 4).tobytes(), "big")
        at += 4 + value
        if end - at < 2:
            return False
        if last:
            return True
    return True


@dataclass(frozen=True)
class CanonicalReader:
    """The canonical layout: framed entries, whichever backend wrote them."""

    place: Place
    extents: Extents
    numbers: Mapping[str, int]
    """The number of each state in this stream."""
    unnamed: bool
    """Whether there are states whose names cannot be read."""
    prefix: int
    compressed: bool

    def batches(self, form: Form, first: int, last: int) -> Iterator[pa.RecordBatch]:
        number = self.numbers.get(form.parts.name)
        if number is None:
            return
        for some in self.extents.between(first, last).ranges(self._limit):
            entries = self.frames(some).of(number)
            if len(entries):
                yield rows_of(form, entries, self.prefix, self.place.path)

    def rows(self, form: Form, first: int, last: int) -> npt.NDArray[np.int64]:
        number = self.numbers.get(form.parts.name)
        counts = np.zeros(last - first + 1, np.int64)
        if number is None:
            return counts
        for some in self.extents.between(first, last).ranges(self._limit):
            frames = self.frames(some)
            if form.spreads:
                entries = frames.of(number)
                rows = count_elements(form, entries, self.place.path)
                np.add.at(counts, entries.groups - first, rows)
            else:
                counts += frames.rows(number, np.arange(first, last + 1, dtype=np.int32))
        return counts

    @property
    def _limit(self) -> int:
        return RANGE_BYTES // 4 if self.compressed else RANGE_BYTES

    def frames(self, some: Extents) -> Frames:
        """Read key groups and find their entries; states by number must be known."""
        if len(self.numbers) > _MANY_STATES:
            found: Frames = _LAST.of(self, some, self._frames)
            return found
        return self._frames(some)

    def _frames(self, some: Extents) -> Frames:
        data, start, end = some.read(self.place)
        open_end = some.open_end
        if self.compressed:
            if open_end and len(end):
                last = int(np.argmax(end))
                end[last] = stream_starts(data, int(start[last]), int(end[last]), self.place.path)[1]
            data, ends = snappy_streams_decode(data, start.tolist(), end.tolist(), self.place.path)
            start, end, open_end = np.append(0, ends[:-1]), ends, False
            data = np.concatenate([data, np.zeros(PADDING, np.uint8)])
        where = self.place.path
        found = frame_groups(data, start, end, some.groups, self.prefix, where=where, open_end=open_end)
        unknown = np.setdiff1d(found.state, list(self.numbers.values()))
        if len(unknown) and not self.unnamed:
            raise DamagedCheckpoint(
                f"{where} has entries of state number {unknown[0]}, and its header names {len(self.numbers)} states; "
                "take another checkpoint or savepoint",
                path=where,
            )
        return found


@dataclass(frozen=True)
class HeapReader:
    """The layout of the hash-map backend: entries without frames."""

    place: Place
    extents: Extents
    numbers: Mapping[str, int]
    stored: Mapping[int, Stored]
    """States by number, except those that are opaque."""
    compressed: bool
    unnamed: int = 0
    """How many states there are besides."""

    def batches(self, form: Form, first: int, last: int) -> Iterator[pa.RecordBatch]:
        number = self.numbers.get(form.parts.name)
        if number is None:
            return
        entry = self.stored[number]
        for some in self.extents.between(first, last).ranges(RANGE_BYTES // 4 if self.compressed else RANGE_BYTES):
            entries = self._of(some, number)
            if len(entries):
                batch = rows_of_heap(form, entry, entries)
                if batch.num_rows:
                    yield batch

    def rows(self, form: Form, first: int, last: int) -> npt.NDArray[np.int64]:
        counts = np.zeros(last - first + 1, np.int64)
        if form.spreads:
            for batch in self.batches(form, first, last):
                np.add.at(counts, batch.column("_key_group").to_numpy() - first, 1)
            return counts
        number = self.numbers.get(form.parts.name)
        if number is not None:
            for some in self.extents.between(first, last).ranges():
                np.add.at(counts, self._of(some, number).groups - first, 1)
        return counts

    def _of(self, some: Extents, number: int) -> HeapEntries:
        """Read key groups and find the entries of one state."""
        if len(self.numbers) <= _MANY_STATES:
            return self.entries(some, number)[number]
        found: HeapEntries = _LAST.of(self, some, lambda every: self.entries(every, None))[number]
        return HeapEntries(found.groups, found.lanes.at(found.lanes.position.copy(), found.lanes.end))

    def entries(self, some: Extents, wanted: int | None) -> dict[int, HeapEntries]:
        """Read key groups and find their entries, of all states or of one."""
        data, start, end = some.read(self.place)
        where = self.place.path
        if not self.compressed:
            return frame_heap(
                data, start, end, some.groups, self.stored, where=where, wanted=wanted, open_end=some.open_end
            )
        begins, ends, owner = [], [], []
        for index, (first, last) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
            said = int.from_bytes(data[first : first + 4].tobytes(), "big", signed=True)
            if said != some.groups[index]:
                raise DamagedCheckpoint(
                    f"key group {some.groups[index]} should begin at byte {some.start[index]} of {where}, and it says "
                    f"{said}; take another checkpoint or savepoint",
                    path=where,
                )
            cuts = stream_starts(data, first + 4, last, where)[: len(self.numbers) + self.unnamed + 1]
            begins += cuts[:-1]
            ends += cuts[1:]
            owner += [index] * (len(cuts) - 1)
        data, stops = snappy_streams_decode(data, begins, ends, where)
        return frame_compressed(
            data,
            np.append(0, stops[:-1]).astype(np.int64) if len(stops) else np.zeros(0, np.int64),
            stops,
            np.array(owner, np.int64),
            some.groups,
            self.stored,
            where=where,
            wanted=wanted,
        )


def stream_starts(data: Octets, start: int, end: int, path: str) -> list[int]:
    """Return where consecutive framed snappy streams begin, and the end."""
    view, at, found = memoryview(data.data), start, []
    while at < end:
        if bytes(view[at : at + 10]) == _SNAPPY_HEAD:
            found.append(at)
        size = int.from_bytes(view[at + 1 : at + 4], "little")
        if not found or at + 4 + size > end:
            raise DamagedCheckpoint(
                f"{path}: no framed snappy stream of whole frames lies at bytes {start} to {end} of what was read; "
                "take another checkpoint or savepoint",
                path=path,
            )
        at += 4 + size
    return [*found, end]
