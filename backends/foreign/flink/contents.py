"""What one checkpoint contains: its graph, and its states by subtask, from metadata and headers.

Headers are at the beginning of the streams; only they are read. Operator state is lists whose
entries begin where the metadata says, and broadcast maps. An entry ends where the next one of the
stream begins, so entries that are not decoded are kept exactly. In compressed streams each state
has a framed stream of its own, and every entry begins a frame.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.graph import JobGraph, Operator, SubtaskSet
from stateformat.keys import DEFAULT_KEY_HASH, key_group_range
from stateformat.model import State
from stateformat.schema import segment_schema
from stateformat.states import broadcast_state, coordinator_state, even_split_state, union_state

from ..byte_strings import ByteStrings, Positions, cut
from ..framing import SNAPPY_HEAD, snappy_streams_decode
from ..limits import ENTRIES, check
from ..source import Note, Part
from .compound import element_lanes
from .headers import ADVICE, Described, OperatorHeader, StateInfo, describe, read_keyed_header, read_operator_header
from .keyed import (
    CanonicalReader,
    Database,
    Extents,
    HeapReader,
    KeyedReader,
    TableSource,
    TimersReader,
    are_timers,
    is_heap,
    open_database,
    read_services,
)
from .kryo_columns import LOOKED_AT, LOOKED_LEAST, KryoTypes
from .lanes import Lanes, Opaque, Serializer
from .layouts import Form, count_elements, form_of, prefix_size, rows_of
from .metadata import (
    BROADCAST,
    UNION,
    Channel,
    Incremental,
    KeyGroups,
    Metadata,
    Operator as Saved,
    OperatorPartitions,
    OperatorStates,
    Subtask,
)
from .streams import Place, Places
from .walk import Entries

_RANGE_BYTES: Final = 32 << 20
KRYO_2: Final = 4
"""The last version of metadata with values of Kryo 2: Flink 2 has another Kryo."""
NOTHING: Final = Opaque()


@dataclass(frozen=True, slots=True)
class OperatorForm:
    """How the entries of one state become rows. ``key`` is only set for broadcast maps."""

    state: State
    value: Serializer
    key: Serializer | None = None
    raw: bool = False
    """Entries are kept as their bytes."""
    stored: str = ""
    """Its name in Flink."""


def operator_form(
    operator: str, name: str, mode: int, value: Serializer | None, key: Serializer | None, stored: str | None = None
) -> tuple[OperatorForm, list[Note]]:
    """Declare one state as ``name``; ``stored`` is its name in Flink, if that is another.

    Serializers are None if the header does not give them.
    """
    stored = stored or name
    notes: list[Note] = []
    subject = f"{operator}/{name}"
    if name != stored:
        notes.append(Note("renamed", subject, f"it is {stored!r} in Flink, as another state of the operator"))
    value = NOTHING if value is None else value
    opaque = tuple(dict.fromkeys((*(key.opaque if key else ()), *value.opaque)))
    declare = {BROADCAST: broadcast_state, UNION: union_state}.get(mode, even_split_state)
    raw = mode == BROADCAST and (key is None or key.takes_rest or value.takes_rest)
    columns = {"value": pa.binary() if raw else value.arrow_type}
    if key is not None and not raw:
        columns = {"key": key.arrow_type, **columns}
    try:
        state = declare(operator, name, columns=columns)
    except InvalidInput:
        raw, state = True, declare(operator, name, columns={"value": pa.binary()})
        notes.append(Note("opaque", subject, "entries have a type that cannot be stored; `value` has their bytes"))
    if opaque:
        notes.append(Note("opaque", subject, f"not decoded, and kept as bytes: {', '.join(opaque)}"))
    elif value is NOTHING:
        message = "the header does not say how entries are written; `value` has their bytes"
        notes.append(Note("opaque", subject, message))
    if raw and mode == BROADCAST:
        notes.append(Note("opaque", subject, "entries of the map end nowhere: `value` has the bytes of the whole map"))
    return OperatorForm(state, value, None if raw else key, raw, stored), notes


@dataclass(frozen=True)
class OperatorReader:
    """The operator state of one subtask."""

    place: Place
    handle: OperatorStates
    compressed: bool

    def partitions(self, name: str) -> OperatorPartitions | None:
        """Return where the entries of a state begin; None if the subtask has none."""
        return next((found for found in self.handle.states if found.name == name), None)

    def batches(self, form: OperatorForm) -> Iterator[pa.RecordBatch]:
        """Stream the entries of a state in stored order."""
        found = self.partitions(form.stored)
        if found is None or not len(found.offsets):
            return
        ends = self._ends(found.offsets)
        for at, stop in cut(ends - found.offsets, _RANGE_BYTES):
            entries = self._read(found.offsets[at:stop], ends[at:stop])
            batch = self._batch(form, found.mode, entries)
            if batch.num_rows:
                yield batch

    def look(self, form: OperatorForm, most: int) -> None:
        """Read the first entries of a state for what their serializers note."""
        found = self.partitions(form.stored)
        if found is not None and len(found.offsets):
            ends = self._ends(found.offsets)
            self._batch(form, found.mode, self._read(found.offsets[:most], ends[:most]))

    def rows(self, form: OperatorForm) -> int:
        """Count the entries of a state."""
        found = self.partitions(form.stored)
        if found is None:
            return 0
        if found.mode != BROADCAST or form.raw:
            return len(found.offsets)
        return sum(batch.num_rows for batch in self.batches(form))

    def _ends(self, offsets: Positions) -> Positions:
        """Return where entries end. Raises ``DamagedCheckpoint`` for offsets outside the stream."""
        every = np.sort(np.concatenate([found.offsets for found in self.handle.states]))
        if every[0] < 0 or every[-1] > self.place.size:
            raise DamagedCheckpoint(
                f"entries of operator state begin at bytes {every[0]} to {every[-1]} of {self.place.path}, which has "
                f"{self.place.size} bytes; take another checkpoint or savepoint",
                kind=ErrorKind.DAMAGED_RECORD,
                path=self.place.path,
            )
        # Of equal offsets all but the last entry are empty.
        every = np.append(every, self.place.size)
        ends: Positions = every[np.searchsorted(every, offsets, "right").clip(max=len(every) - 1)]
        return ends

    def _read(self, offsets: Positions, ends: Positions) -> ByteStrings:
        """Read the entries at ``offsets`` … ``ends``."""
        first, last = int(offsets.min()), int(ends.max())
        if last - first <= 2 * int((ends - offsets).sum()) + 4096:
            data = self.place.read(first, last - first)
            start = offsets - first
        else:
            pieces = [self.place.read(at, end - at) for at, end in zip(offsets.tolist(), ends.tolist(), strict=True)]
            data = np.concatenate(pieces)
            start = np.cumsum(ends - offsets) - (ends - offsets)
        size = ends - offsets
        if not self.compressed:
            return ByteStrings(data, start, size)
        # A frame begins with every entry: each is a stream once the stream mark is put before it.
        head = np.frombuffer(SNAPPY_HEAD, np.uint8)
        places = zip(start.tolist(), size.tolist(), strict=True)
        whole = np.concatenate([part for at, length in places for part in (head, data[at : at + length])])
        ends = np.cumsum(size + len(head))
        begins = ends - size - len(head)
        data, stops = snappy_streams_decode(whole, begins.tolist(), ends.tolist(), self.place.path)
        begin = np.append(0, stops[:-1]).astype(np.int64)
        return ByteStrings(data, begin, stops - begin)

    def _batch(self, form: OperatorForm, mode: int, entries: ByteStrings) -> pa.RecordBatch:
        schema = segment_schema(form.state)
        path = self.place.path
        if form.raw:
            columns = {"value": entries.to_arrow()}
        elif form.key is None or mode != BROADCAST:
            columns = {"value": form.value.read_all(entries, path)}
        else:
            columns = self._pairs(form.key, form.value, Lanes.of(entries, path))
        arrays = [columns[field.name] for field in schema]
        arrays = [
            array if array.type.equals(field.type, check_metadata=True) else array.cast(field.type)
            for array, field in zip(arrays, schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    @staticmethod
    def _pairs(key: Serializer, value: Serializer, lanes: Lanes) -> dict[str, pa.Array]:
        """Read the entries of maps: their count, then keys and values in turn."""

        def skip(some: Lanes) -> None:
            key.skip(some)
            value.skip(some)

        fixed = key.fixed_length is not None and value.fixed_length is not None
        width = (key.fixed_length or 0) + (value.fixed_length or 0) if fixed else None
        counts = lanes.counts(key.least_length + value.least_length)
        entries = element_lanes(lanes, counts, skip, width)
        lanes.finish()
        return {"key": key.read(entries), "value": value.read(entries)}


COORDINATOR = "coordinator"
RAW_KEYED, RAW_OPERATOR, IN_FLIGHT = "raw-keyed-state", "raw-operator-state/", "in-flight-records"
UNNAMED = "keyed-states-without-names"
"""What is called so, for Flink gives it no name; a raw operator state's own name follows."""

PartKey = tuple[str, str, int | None]
OperatorReaders: TypeAlias = "dict[int, tuple[OperatorReader, dict[str, StateInfo]]]"
"""By subtask: what reads its operator state, and how states are described."""
_Streams = TypeVar("_Streams")


@dataclass(frozen=True)
class RocksReader:
    """Reads RocksDB's own files, which are opened by the first read."""

    database: Callable[[], Database]
    prefix: int
    path: str

    def batches(self, form: Form, first: int, last: int) -> Iterator[pa.RecordBatch]:
        for entries in self._entries(form, first, last):
            if len(entries):
                yield rows_of(form, entries, self.prefix, self.path)

    def rows(self, form: Form, first: int, last: int) -> npt.NDArray[np.int64]:
        counts = np.zeros(last - first + 1, np.int64)
        for entries in self._entries(form, first, last):
            np.add.at(counts, entries.groups - first, count_elements(form, entries, self.path))
        return counts

    def look(self, form: Form, most: int) -> None:
        database = self.database()
        for entries in self._entries(form, database.first_group, database.last_group):
            if most > 0 and len(entries):
                rows_of(form, entries.head(most), self.prefix, self.path)
            most -= len(entries)
            if most <= 0:
                return

    def _entries(self, form: Form, first: int, last: int) -> Iterator[Entries]:
        return self.database().entries(form.parts.name, first, last)


@dataclass(frozen=True)
class KeyedPart:
    """What one subtask has of one keyed state; nothing if there is no reader."""

    form: Form
    first: int
    last: int
    reader: KeyedReader | None = None


@dataclass(frozen=True)
class OperatorPart:
    """What one subtask has of one operator state."""

    form: OperatorForm
    reader: OperatorReader | None = None


@dataclass(frozen=True)
class Bytes:
    """A coordinator's state."""

    data: bytes


@dataclass
class Contents:
    """All of a checkpoint that can be read, and notes on the rest."""

    graph: JobGraph
    states: list[State] = field(default_factory=list)
    parts: dict[PartKey, tuple[Part, KeyedPart | OperatorPart | Bytes]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    keys: dict[str, str | None] = field(default_factory=dict)
    """For operators with keyed state: whose ``hashCode`` the keys have; None if unknown."""
    streams: list[tuple[str, int, KeyedReader | OperatorReader, Described | None]] = field(default_factory=list)
    """Every stream: operator, subtask, reader."""
    kryo: dict[tuple[str, bool], KryoTypes] = field(default_factory=dict)
    """Types of Kryo's values, by operator, and whether they are of keyed state."""


def contents_of(metadata: Metadata, places: Places) -> Contents:
    """Read the headers of all streams. Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``."""
    found = Contents(JobGraph(()))
    kryo = metadata.version <= KRYO_2
    operators = [_OperatorReader(saved, places, found, kryo).read() for saved in metadata.operators]
    found.graph = JobGraph(tuple(operators))
    found.states.sort(key=lambda state: (state.operator, state.name))
    # A coordinator has a state by itself, so None is never compared with a number.
    found.parts = dict(sorted(found.parts.items()))
    found.notes += places.notes()
    return found


@dataclass(frozen=True)
class _KeyedStream:
    """The keyed state of one subtask."""

    subtask: int
    first: int
    last: int
    size: int
    path: str | None
    described: Described
    reader: KeyedReader
    heap: bool


class _OperatorReader:
    """Reads what the metadata has for one operator."""

    def __init__(self, saved: Saved, places: Places, found: Contents, kryo: bool) -> None:
        self.saved, self.places, self.found, self.kryo = saved, places, found, kryo
        self.uid = saved.uid or saved.id.hex()
        self.running: list[Subtask] = []
        self.key_hash = DEFAULT_KEY_HASH
        self.taken: set[str] = set()

    def read(self) -> Operator:
        saved = self.saved
        if saved.parallelism > saved.max_parallelism:
            raise DamagedCheckpoint(
                f"operator {self.uid} has parallelism {saved.parallelism} and max parallelism {saved.max_parallelism}; "
                "take another checkpoint or savepoint",
                kind=ErrorKind.DAMAGED_RECORD,
            )
        finished = SubtaskSet.of(subtask.index for subtask in saved.subtasks if subtask.finished)
        if saved.fully_finished:
            finished = SubtaskSet.all(saved.parallelism)
        reported = {subtask.index: subtask for subtask in saved.subtasks}
        # A subtask that reported nothing had nothing, and continues.
        nothing = saved.fully_finished
        self.running = [
            found
            for index in range(0 if nothing else saved.parallelism)
            if not (found := reported.get(index) or Subtask(index)).finished
        ]
        self._keyed()
        self._operator_state()
        if saved.coordinator is not None:
            self._coordinator(saved.coordinator.data)
        self._raw_operator()
        self._in_flight()
        return Operator(
            uid=self.uid,
            parallelism=saved.parallelism,
            max_parallelism=saved.max_parallelism,
            name=saved.name or "",
            key_hash=self.key_hash,
            finished=finished,
            coordinator=saved.coordinator is not None,
        )

    def _note(self, kind: str, message: str, state: str = "") -> None:
        subject = f"{self.uid}/{state}" if state else self.uid
        self.found.notes.append(Note(kind, subject, message))  # type: ignore[arg-type]

    def _add(self, part: Part, content: KeyedPart | OperatorPart | Bytes) -> None:
        self.found.parts[part.operator, part.state, part.subtask] = part, content
        check(part.operator, "the states of all subtasks", len(self.found.parts), ENTRIES, "entries")

    def _declare(self, state: State) -> None:
        self.found.states.append(state)
        self.taken.add(state.name)

    def _coordinator(self, data: bytes) -> None:
        name = self._free(COORDINATOR)
        self._declare(coordinator_state(self.uid, name, columns={"value": pa.binary()}))
        self._add(Part(self.uid, name, None, len(data), rows=1), Bytes(data))

    def _free(self, name: str) -> str:
        """Return a name that no state of the operator has: keyed and operator state may share a
        name.
        """
        found, number = name, 1
        while found in self.taken:
            number += 1
            found = f"{name}_{number}"
        return found

    # Keyed state

    def _typed(
        self, keyed: bool, opened: Callable[[KryoTypes | None], _Streams], look: Callable[[KryoTypes, _Streams], None]
    ) -> _Streams:
        """Return what ``opened`` does; if there are values of Kryo's, once their types are known.

        They are looked into again until all classes that cannot be read are known.
        """
        if not self.kryo:
            return opened(None)
        types = KryoTypes(looking=True)
        streams = opened(types)
        if not types.met:
            return streams
        before = -1
        while types.unreadable != before:
            before = types.unreadable
            types.shapes.clear()
            look(types, streams)
            streams = opened(types)
        types.looking = False
        self.found.kryo[self.uid, keyed] = types
        return opened(types)

    def _look_into_keyed(self, types: KryoTypes, streams: list[_KeyedStream]) -> None:
        most = max(LOOKED_LEAST, LOOKED_AT // max(1, len(streams)))
        for stream in streams[:: -(-len(streams) * LOOKED_LEAST // LOOKED_AT) or 1]:
            every = stream.described.parts
            for parts in [every[name] for name in every if name in types.met or "" in types.met]:
                with types.noting(parts.name):
                    stream.reader.look(form_of(self.uid, parts)[0], most)

    def _look_into_operator(self, types: KryoTypes, readers: OperatorReaders) -> None:
        for reader, infos in readers.values():
            for info in [info for info in infos.values() if info.name in types.met]:
                mode = next((one.mode for one in reader.handle.states if one.name == info.name), None)
                if mode is not None:
                    form = operator_form(self.uid, info.name, mode, info.value, info.key)[0]
                    with types.noting(info.name):
                        reader.look(form, max(LOOKED_LEAST, LOOKED_AT // len(readers)))

    def _keyed_streams(self, types: KryoTypes | None) -> list[_KeyedStream]:
        """Return the streams of all subtasks; none if one is refused."""
        streams = [*self._raw_keyed()]
        for subtask in self.running:
            handle = subtask.managed_keyed
            if handle is None:
                continue
            if not isinstance(handle, (KeyGroups, Incremental)):
                self._note(
                    "refused",
                    "its keyed state lies in a changelog, which is not read: take a savepoint, which has all state "
                    "whatever the backend",
                )
                return []
            streams.append(self._stream(subtask.index, handle, types))
        return streams

    def _keyed(self) -> None:
        streams = self._typed(True, self._keyed_streams, self._look_into_keyed)
        if not streams:
            return
        self.key_hash = streams[0].described.key_hash
        self.found.keys[self.uid] = streams[0].described.key_java
        self.found.streams += [(self.uid, item.subtask, item.reader, item.described) for item in streams]
        names = sorted({name for stream in streams for name in stream.described.numbers})
        for name in names:
            if self._readable(name, streams):
                self._state(name, streams)
        unnamed = max(stream.described.unnamed for stream in streams)
        if unnamed:
            why = next(stream.described.stopped for stream in streams if stream.described.unnamed)
            size = sum(stream.size for stream in streams)
            self._note("refused", f"there are at least {unnamed}, in {size} bytes of all states: {why}", UNNAMED)

    def _owned(self, index: int, handle: KeyGroups | Incremental) -> tuple[int, int]:
        saved = self.saved
        first, last = key_group_range(index, parallelism=saved.parallelism, max_parallelism=saved.max_parallelism)
        if (handle.first_group, handle.groups) != (first, last - first + 1):
            raise DamagedCheckpoint(
                f"subtask {index} of {self.uid} owns key groups {first} to {last}, and its handle has "
                f"{handle.first_group} to {handle.first_group + handle.groups - 1}; take another savepoint",
                kind=ErrorKind.DAMAGED_RECORD,
            )
        return first, last

    def _stream(self, index: int, handle: KeyGroups | Incremental, types: KryoTypes | None) -> _KeyedStream:
        first, last = self._owned(index, handle)
        prefix = prefix_size(self.saved.max_parallelism)
        if isinstance(handle, Incremental):
            place = self.places.of(handle.meta)
            described = describe(read_keyed_header(place.head(place.size), place.path, types))
            reader: KeyedReader = self._rocks(handle, prefix, first, last, place.path)
            return _KeyedStream(index, first, last, handle.size, place.path, described, reader, False)
        place = self.places.of(handle)
        extents = Extents.of(handle, place.size, place.path)
        described = describe(read_keyed_header(extents.header(place), place.path, types))
        heap = is_heap(handle, place, extents, prefix)
        if heap:
            reader = HeapReader(
                place, extents, described.numbers, described.stored, described.compressed, described.unnamed
            )
        else:
            reader = CanonicalReader(
                place, extents, described.numbers, described.unnamed > 0, prefix, described.compressed
            )
        return _KeyedStream(index, first, last, place.size, _file(place), described, reader, heap)

    def _raw_keyed(self) -> Iterator[_KeyedStream]:
        """Return timers that RocksDB's operators keep on the heap; raw state of other forms is
        refused.
        """
        unknown: list[tuple[int, Place]] = []
        for subtask in self.running:
            handle = subtask.raw_keyed
            if not isinstance(handle, KeyGroups):
                continue
            place = self.places.of(handle)
            if not place.size:
                continue
            if not are_timers(place, handle):
                unknown.append((subtask.index, place))
                continue
            first, last = self._owned(subtask.index, handle)
            services = read_services(place, handle)
            described = describe(read_keyed_header(services.header, place.path))
            if services.hidden:
                stopped = described.stopped or f"timers of {services.found[-1].states[0]} before them end nowhere"
                described = replace(described, unnamed=2 * services.hidden, stopped=stopped)
            reader = TimersReader(place, services.extents, services.found)
            yield _KeyedStream(subtask.index, first, last, place.size, _file(place), described, reader, True)
        if unknown:
            size = sum(place.size for _, place in unknown)
            self._note(
                "refused",
                f"{size} bytes of raw keyed state of {_subtasks(unknown)}, in {unknown[0][1].path}: only the "
                "operator's own code can read it",
                RAW_KEYED,
            )

    def _rocks(self, handle: Incremental, prefix: int, first: int, last: int, path: str) -> RocksReader:
        every = [(name, self.places.of(stream)) for name, stream in (*handle.shared, *handle.private)]
        tables = [place for name, place in every if name.endswith(".sst")]

        @functools.cache
        def opened() -> Database:
            sources = [TableSource(place.path, place.size, _reading(place)) for place in tables]
            return open_database(sources, prefix, first, last)

        return RocksReader(opened, prefix, path)

    def _readable(self, name: str, streams: list[_KeyedStream]) -> bool:
        """Report what is refused of a state, and return whether it can be read completely."""
        for stream in streams:
            described = stream.described
            where = f"subtask {stream.subtask}"
            if name not in described.numbers:
                if described.unnamed:
                    why = described.stopped
                    self._note("refused", f"{where} may have it, but its header cannot be read: {why}", name)
                    return False
                continue
            if not stream.heap:
                continue
            opaque = described.unframed
            classes = sorted({item for other in opaque for item in described.parts[other].opaque})
            why = ", ".join(classes) or described.stopped
            if name in opaque:
                where = "in the hash-map backend's own layout"
                self._note("refused", f"its values end nowhere {where} ({why}); {ADVICE}", name)
                return False
            if (opaque or described.unnamed) and not described.compressed:
                self._note(
                    "refused",
                    f"it cannot be told from {', '.join(opaque) or 'other states'} beside it, which is not decoded "
                    f"({why}); {ADVICE}",
                    name,
                )
                return False
        return True

    def _state(self, name: str, streams: list[_KeyedStream]) -> None:
        forms = {}
        notes: list[Note] = []
        for stream in streams:
            if name in stream.described.parts:
                forms[stream.subtask], said = form_of(self.uid, stream.described.parts[name])
                notes = notes or said
        form = next(iter(forms.values()))
        differing = [index for index, other in forms.items() if other.state != form.state]
        if differing:
            self._note(
                "refused",
                f"subtask {differing[0]} describes it as {forms[differing[0]].schema.remove_metadata()}, and others as "
                f"{form.schema.remove_metadata()}; restore the job and take another savepoint",
                name,
            )
            return
        self.found.notes += notes
        self._declare(form.state)
        by_subtask = {stream.subtask: stream for stream in streams if name in stream.described.numbers}
        for subtask in self.running:
            self._keyed_part(form, forms, subtask.index, by_subtask.get(subtask.index))

    def _keyed_part(self, form: Form, forms: dict[int, Form], index: int, stream: _KeyedStream | None) -> None:
        name = form.parts.name
        limits = self.saved.parallelism, self.saved.max_parallelism
        first, last = key_group_range(index, parallelism=limits[0], max_parallelism=limits[1])
        if stream is None or index not in forms:
            part = Part(self.uid, name, index, 0, None, 0, first, last)
            self._add(part, KeyedPart(form, first, last))
            return
        share = stream.size // max(1, len(stream.described.numbers))
        part = Part(self.uid, name, index, share, stream.path, None, first, last)
        self._add(part, KeyedPart(forms[index], first, last, stream.reader))

    # Operator state

    def _operator_state(self) -> None:
        readers = self._typed(False, self._operator_readers, self._look_into_operator)
        self.found.streams += [(self.uid, index, reader, None) for index, (reader, _) in readers.items()]
        names = sorted({item.name for reader, _ in readers.values() for item in reader.handle.states})
        for name in names:
            self._operator_parts(name, readers)

    def _operator_readers(self, types: KryoTypes | None) -> OperatorReaders:
        handles = ((subtask.index, subtask.managed_operator) for subtask in self.running)
        return {index: self._operator_stream(handle, types) for index, handle in handles if handle and handle.states}

    def _operator_stream(
        self, handle: OperatorStates, types: KryoTypes | None
    ) -> tuple[OperatorReader, dict[str, StateInfo]]:
        place = self.places.of(handle.stream)
        end = operator_header_end(handle, place)
        header: OperatorHeader = read_operator_header(place.head(end), place.path, types)
        infos = {info.name: info for info in (*header.lists, *header.broadcasts)}
        return OperatorReader(place, handle, header.compressed), infos

    def _operator_parts(self, stored: str, readers: OperatorReaders, prefix: str = "") -> str:
        """Declare a state of the name ``prefix`` + ``stored``; return the name that it got."""
        name = self._free(prefix + stored)
        forms: list[tuple[OperatorForm, list[Note]]] = []
        for reader, infos in readers.values():
            partitions = reader.partitions(stored)
            if partitions is not None:
                info = infos.get(stored)
                value, key = (info.value, info.key) if info else (None, None)
                forms.append(operator_form(self.uid, name, partitions.mode, value, key, stored))
                mode = partitions.mode
        form, notes = forms[0]
        if any(other.state != form.state for other, _ in forms):
            # One header may have stopped before it, or know other subclasses: its bytes are
            # complete.
            form, notes = operator_form(self.uid, name, mode, None, None, stored)
        if not prefix:
            self.found.notes += notes
        self._declare(form.state)
        for subtask in self.running:
            found = readers.get(subtask.index)
            partitions = found[0].partitions(stored) if found else None
            if found is None or partitions is None:
                self._add(Part(self.uid, name, subtask.index, 0, rows=0), OperatorPart(form))
                continue
            reader = found[0]
            rows = None if partitions.mode == BROADCAST and not form.raw else len(partitions.offsets)
            path = _file(reader.place)
            share = reader.place.size // len(reader.handle.states)
            self._add(Part(self.uid, name, subtask.index, share, path, rows), OperatorPart(form, reader))
        return name

    # What Flink itself does not describe

    def _raw_operator(self) -> None:
        """Keep raw operator state as bytes: the metadata says where its entries begin."""
        readers: OperatorReaders = {
            subtask.index: (
                OperatorReader(self.places.of(subtask.raw_operator.stream), subtask.raw_operator, False),
                {},
            )
            for subtask in self.running
            if subtask.raw_operator is not None and subtask.raw_operator.states
        }
        for stored in sorted({item.name for reader, _ in readers.values() for item in reader.handle.states}):
            name = self._operator_parts(stored, readers, RAW_OPERATOR)
            self._note("opaque", "only the operator's own code can read it; `value` has the bytes of an entry", name)

    def _in_flight(self) -> None:
        channels: list[Channel] = [one for subtask in self.running for one in (*subtask.inputs, *subtask.outputs)]
        if channels:
            self._note(
                "refused",
                f"{sum(channel.size for channel in channels)} bytes on {len(channels)} channels of an unaligned "
                "checkpoint: they are network buffers of Flink's; take a savepoint, which has none",
                IN_FLIGHT,
            )


def _file(place: Place) -> str | None:
    return None if place.data is not None else place.path


def _subtasks(found: list[tuple[int, Place]]) -> str:
    numbers = ", ".join(str(index) for index, _ in found[:8])
    return f"subtask{'s' if len(found) > 1 else ''} {numbers}{' and more' if len(found) > 8 else ''}"


def operator_header_end(handle: OperatorStates, place: Place) -> int:
    """Return where the first entry of operator state begins. Raises ``DamagedCheckpoint``."""
    offsets = np.concatenate([np.zeros(0, np.int64), *(item.offsets for item in handle.states)])
    end = place.size if not len(offsets) else int(offsets.min())
    if not 0 <= end <= place.size:
        raise DamagedCheckpoint(
            f"operator state begins at byte {end} of {place.path}, which has {place.size}; take another checkpoint",
            kind=ErrorKind.DAMAGED_RECORD,
            path=place.path,
        )
    return end


def _reading(place: Place) -> Callable[[int, int], bytes]:
    def read(offset: int, length: int) -> bytes:
        return place.read(offset, min(length, place.size - offset)).tobytes()

    return read


def job_id_of(metadata: Metadata) -> str:
    """Return a name for the job, the same for all checkpoints of one topology."""
    digest = hashlib.sha256(b"".join(sorted(operator.id for operator in metadata.operators)))
    return f"flink-{digest.hexdigest()[:16]}"
