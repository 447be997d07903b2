"""Timers that a job on RocksDB keeps on the heap: the raw keyed state of its checkpoints.

A key group has a mark and a version, how many timer services there are, and of each its name, the
snapshots of the serializers of keys and namespaces, and its timers: first those in event time, then
those in processing time. A timer is a key, a namespace and a time; nothing is framed. Raw keyed
state of the user's own lies in the same place, in any form: the mark tells them apart.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..byte_strings import Positions
from ..cursor import Cursor
from .groups import Extents
from .handles import KeyGroups
from .header import KEYED_VERSION, TIMERS
from .layouts import TIMER_STATES, Form, Rows, batch_of, tags, timer_key, timer_namespace
from .serializers import Lanes, Serializer, Timer, UnknownClass, element_lanes, read_top, read_versioned
from .streams import Place

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
