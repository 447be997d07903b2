"""One subtask's keyed state, read by ranges of key groups, from any of three places.

*Streams* of key groups: the handle gives the beginning of each. Ranges of some megabytes are read
at a time, never a whole stream.

*RocksDB's table files*: a column family is a state, of the same name. Keys begin with their key
group. After a rescale, files hold keys of groups that other subtasks own: only the handle's groups
are read. The handle lists the live files, so no manifest is needed.

*Timers* that a job on RocksDB keeps on the heap are raw keyed state. A key group has a mark and a
version, how many timer services there are, and of each its name, the snapshots of the serializers
of keys and namespaces, and its timers: first those in event time, then those in processing time.
A timer is a key, a namespace and a time; nothing is framed. Raw keyed state of the user's own lies
in the same place, in any form: the mark tells them apart.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import CheckpointError, DamagedCheckpoint, ErrorKind

from ..byte_strings import Octets, Positions, cut
from ..cursor import Cursor
from ..framing import SNAPPY_HEAD, damaged, snappy_streams_decode
from ..sst.blocks import ReadRange
from ..sst.merge import merged
from ..sst.table import Counter, Table, open_table, read_run
from .compound import Timer, element_lanes
from .headers import KEYED_VERSION, TIMERS, UnknownClass, read_top, read_versioned
from .lanes import Lanes, Serializer
from .layouts import (
    TIMER_STATES,
    Form,
    HeapEntries,
    Rows,
    Stored,
    batch_of,
    count_elements,
    frame_compressed,
    frame_heap,
    rows_of,
    rows_of_heap,
    tags,
    timer_key,
    timer_namespace,
)
from .metadata import CANONICAL, KeyGroups
from .streams import Place
from .walk import PADDING, Entries, Frames, frame_groups

RANGE_BYTES: Final = 8 << 20
"""How many stored bytes of key groups are read at once, unless one group is larger."""

_LOOKED_BYTES: Final = 1 << 16
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

    def look(self, form: Form, most: int) -> None:
        """Read the first entries of a state, about ``most``, for what their serializers note."""


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
        for at, stop in cut(self.end - self.start, limit):
            yield self.take(np.arange(at, stop))

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

    def look(self, form: Form, most: int) -> None:
        number = self.numbers.get(form.parts.name)
        for some in self.extents.ranges(_LOOKED_BYTES):
            if number is None or most <= 0:
                return
            entries = self.frames(some).of(number)
            if len(entries):
                rows_of(form, entries.head(most), self.prefix, self.place.path)
            most -= len(entries)

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

    def look(self, form: Form, most: int) -> None:
        number = self.numbers.get(form.parts.name)
        if number is None or number not in self.stored:
            return
        for some in self.extents.ranges(_LOOKED_BYTES):
            if most > 0:
                entries = self.entries(some, number)[number]
                rows_of_heap(form, self.stored[number], entries)
                most -= len(entries)

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
        if bytes(view[at : at + 10]) == SNAPPY_HEAD:
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


BLOCKS_BYTES: Final = 1 << 24
"""How many stored bytes of key groups are read at once; one key group may have more."""


class TableSource(NamedTuple):
    """A table file of a handle."""

    path: str
    """The file, for people."""
    size: int
    read: ReadRange


@dataclass(frozen=True)
class Database:
    """The tables of one subtask, by column family. Picklable if their ``read`` is."""

    tables: Mapping[str, Sequence[Table]]
    prefix: int
    """How many bytes the key group's number takes in a key."""
    first_group: int
    last_group: int

    def stored_bytes(self, state: str) -> int:
        """Return the stored bytes of a state's data blocks."""
        return sum(table.stored_bytes for table in self.tables.get(state, ()))

    def entries(self, state: str, first_group: int | None = None, last_group: int | None = None) -> Iterator[Entries]:
        """Stream the entries of a state, by key group and key, some key groups at once.

        Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``. A state without a table has none.
        """
        first = self.first_group if first_group is None else max(first_group, self.first_group)
        last = self.last_group if last_group is None else min(last_group, self.last_group)
        tables = self.tables.get(state, ())
        if not tables or first > last:
            return
        for low, high in self._ranges(tables, first, last):
            keys, values = merged(tables, self._key(low), self._key(high + 1))
            if not len(keys):
                continue
            if int(keys.length.min()) < self.prefix:
                raise damaged(tables[0].path, f"a key of state {state!r} is shorter than the number of its key group")
            groups = keys.fixed(0, ">u2" if self.prefix == 2 else "u1").astype(np.int32)
            yield Entries(groups, keys, values)

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every block of every table, and compare its contents with the table's own counts.

        ``progress`` is called with the stored bytes read. Raises as :meth:`entries`.
        """
        for tables in self.tables.values():
            for table in tables:
                counted = Counter(table)
                for first, last in cut(table.blocks.size, BLOCKS_BYTES):
                    counted.add(read_run([(table, first, last)]).stamp)
                    if progress is not None:
                        progress(int(table.blocks.size[first:last].sum()))
                counted.compare()

    def _key(self, group: int) -> bytes | None:
        """Return the least key of a key group; None above all numbers."""
        return group.to_bytes(self.prefix, "big") if group < 1 << 8 * self.prefix else None

    def _ranges(self, tables: Sequence[Table], first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut key groups into ranges of about :data:`BLOCKS_BYTES`."""
        sizes = np.zeros(last - first + 1, np.int64)
        for table in tables:
            # A block counts for the group of the key that ends it, which is approximately where it
            # is.
            group = table.separator_prefixes(self.prefix)
            inside = (group >= first) & (group <= last)
            np.add.at(sizes, group[inside] - first, table.blocks.size[inside])
        for low, stop in cut(sizes, BLOCKS_BYTES):
            yield first + low, first + stop - 1


def open_database(sources: Iterable[TableSource], prefix: int, first_group: int, last_group: int) -> Database:
    """Open the table files of a handle (those among its files whose name ends in ``.sst``).

    Reads footers, properties and indexes. Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``.
    """
    tables: dict[str, list[Table]] = {}
    for source in sources:
        table = open_table(source.read, source.size, source.path)
        family = table.properties.column_family
        if family is None:
            raise damaged(source.path, "its properties name no column family, which is the name of a state")
        tables.setdefault(family, []).append(table)
    return Database(tables, prefix, first_group, last_group)


NO_OFFSET: Final = -1
"""Of a key group that nothing was written for."""
MARK: Final = b"\xf1\xcd\x85\x9f\0\0\0\2"
"""What Flink's versioned data begins with, and the version of timers since Flink 1.8."""
DOMAINS: Final = ("event", "processing")
_SNAPSHOT: Final = "org.apache.flink.streaming.api.operators.TimerSerializerSnapshot"


class Service(NamedTuple):
    """One timer service of a stream."""

    head: bytes
    """What precedes its timers, the same in every key group."""
    states: tuple[str, ...]
    """One for each of :data:`DOMAINS`."""
    timer: Serializer
    """A :class:`Timer`, unless timers end nowhere."""

    @property
    def framed(self) -> bool:
        """Whether the ends of its timers are known."""
        return isinstance(self.timer, Timer) and not self.timer.takes_rest


class Services(NamedTuple):
    """The timer services of a stream."""

    header: bytes
    """The header of a stream of managed keyed state with these timers: two states for each service,
    which ends where a class is not known.
    """
    found: tuple[Service, ...]
    hidden: int
    """How many services lie behind timers that end nowhere."""
    extents: Extents


def are_timers(place: Place, handle: KeyGroups) -> bool:
    """Return whether raw keyed state is Flink's timers. Reads a few bytes."""
    start = int(handle.offsets[handle.offsets >= 0].min(initial=place.size))
    return start + len(MARK) <= place.size and place.read(start, len(MARK)).tobytes() == MARK


def read_services(place: Place, handle: KeyGroups) -> Services:
    """Read the smallest key group, which names every service. Raises ``DamagedCheckpoint``."""
    extents = Extents.of(handle, place.size, place.path, absent=NO_OFFSET)
    which = int(np.argmin(extents.end - extents.start))
    start = int(extents.start[which])
    data = place.read(start, int(extents.end[which]) - start)
    at = Cursor(data.tobytes(), place.path)
    at.take(len(MARK))
    count = at.count(14, "timer services")
    begin, key = 0, b""
    states: list[bytes] = []
    found: list[Service] = []
    for _ in range(count):
        name = at.utf()
        names = tuple(f"{TIMER_STATES}{domain}_{name}" for domain in DOMAINS)
        own, snapshot, stopped = _snapshots(at)
        key = key or own
        states += [_described(one, snapshot) for one in names]
        if stopped:
            break
        service = Service(bytes(at.data[begin : at.position]), names, read_top(Cursor(snapshot, place.path)))
        found.append(service)
        lanes = Lanes(data, np.array([at.position]), np.array([at.end]), place.path)
        if service.framed:
            for _ in DOMAINS:
                _timers(lanes, service.timer)
        elif data[at.position : at.position + 8].any():
            break
        else:
            lanes.skip(8)
        begin = at.position = int(lanes.position[0])
    header = struct.pack(">iB", KEYED_VERSION, 0) + struct.pack(">i", 2) + key + struct.pack(">H", len(states))
    return Services(header + b"".join(states), tuple(found), count - len(states) // len(DOMAINS), extents)


def _snapshots(at: Cursor) -> tuple[bytes, bytes, bool]:
    """Read the snapshots of key and namespace.

    Returns that of the key, that of a timer of both in the form that headers have, and whether they
    have an unknown class: then there is no more than what precedes it.
    """
    begin = middle = at.position
    try:
        read_versioned(at, 0)
        middle = at.position
        read_versioned(at, 0)
    except UnknownClass:
        at.position = at.end
    stopped = at.position == at.end
    pair = bytes(at.data[begin : at.position])
    nested = struct.pack(">iiiii", 911108, 2, 1333245, 1, 2) + pair
    timer = struct.pack(">i", 2) + _utf(_SNAPSHOT) + struct.pack(">i", 3) + nested
    return bytes(at.data[begin : middle if middle > begin else at.end]), timer, stopped


def _described(name: str, snapshot: bytes) -> bytes:
    """Return a state of timers as a header describes it."""
    return _utf(name) + struct.pack(">iii", TIMERS, 0, 1) + _utf("VALUE_SERIALIZER") + snapshot


def _utf(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack(">H", len(data)) + data


def _timers(lanes: Lanes, timer: Serializer) -> tuple[Positions, Lanes]:
    """Take a count from each lane, and move past so many timers; where each of them begins."""
    assert isinstance(timer, Timer)

    def skip(some: Lanes) -> None:
        timer.key.skip(some)
        timer.namespace.skip(some)
        some.skip(8)

    counts = lanes.counts(timer.least_length)
    return counts, element_lanes(lanes, counts, skip, timer.fixed_length)


@dataclass(frozen=True)
class TimersReader:
    """The timers of one subtask."""

    place: Place
    extents: Extents
    services: tuple[Service, ...]

    def batches(self, form: Form, first: int, last: int) -> Iterator[pa.RecordBatch]:
        for groups, lanes in self._entries(form, first, last):
            key = timer_key(form, lanes)
            namespace, raw = timer_namespace(form, lanes)
            moments = lanes.fixed(">i8")
            tag = tags(form.parts.name, namespace, raw, len(groups))
            yield batch_of(form, Rows(groups, key, milliseconds=moments, tag=tag))

    def rows(self, form: Form, first: int, last: int) -> npt.NDArray[np.int64]:
        counts = np.zeros(last - first + 1, np.int64)
        for groups, _ in self._entries(form, first, last):
            counts += np.bincount(groups - first, minlength=len(counts))
        return counts

    def look(self, form: Form, most: int) -> None:
        """Timers of Kryo's keys end nowhere."""

    def _entries(self, form: Form, first: int, last: int) -> Iterator[tuple[npt.NDArray[np.int32], Lanes]]:
        """Yield the timers of one state and their key groups."""
        for some in self.extents.between(first, last).ranges():
            data, start, end = some.read(self.place)
            lanes = Lanes(data, start.copy(), end.copy(), self.place.path)
            for service in self.services:
                self._take_head(lanes, some, service.head)
                for name in service.states:
                    counts, timers = _timers(lanes, service.timer)
                    if name == form.parts.name and len(timers):
                        yield np.repeat(some.groups, counts), timers
            lanes.finish()

    def _take_head(self, lanes: Lanes, some: Extents, head: bytes) -> None:
        begin = lanes.position.copy()
        lanes.skip(len(head))
        found = lanes.data[begin[:, None] + np.arange(len(head))]
        wrong = np.flatnonzero((found != np.frombuffer(head, np.uint8)).any(axis=1))
        if len(wrong):
            lanes.position[wrong] = begin[wrong]
            group = some.groups[wrong[0]]
            lanes.damaged(int(wrong[0]), f"key group {group} names other timer services than the others")
