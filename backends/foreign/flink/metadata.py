"""The ``_metadata`` file: its contents as values, from bytes (versions 2 to 6), and back to them.

Names of files are as Flink wrote them. Every count is checked against the remaining bytes; any
error is a ``DamagedCheckpoint`` of kind ``DAMAGED_RECORD`` with the offset, or
``UnsupportedFormat`` for an unknown version or code. Decoded metadata is encoded unchanged.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from stateformat.errors import ErrorKind, InvalidInput, UnsupportedFormat

from ..cursor import Cursor
from ..framing import encode_modified_utf8
from ..limits import ENTRIES, SUBTASKS, check
from ..source import FLINK_VERSIONS

Offsets: TypeAlias = "npt.NDArray[np.int64]"

SPLIT, UNION, BROADCAST = range(3)
"""Modes of operator state."""
CANONICAL: Final = 7
"""The code of :class:`KeyGroups` in savepoints, which have the canonical layout. Under the codes 3
and 12 lies a heap's own layout or, in full checkpoints of RocksDB, the canonical one.
"""


@dataclass(frozen=True, slots=True)
class Inline:
    """Code 1: bytes within the metadata."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class File:
    """Code 2: a file, by its full URI."""

    uri: str
    size: int


@dataclass(frozen=True, slots=True)
class Relative:
    """Code 6: a file beside the metadata."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Code 15: part of a file that several handles share (Flink 1.20 and later)."""

    uri: str
    start: int
    size: int
    scope: int
    logical_id: str


@dataclass(frozen=True, slots=True)
class EmptySegment:
    """Code 16: part of a shared file, without any bytes."""

    @property
    def size(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, eq=False)
class KeyGroups:
    """Codes 3, 7 and 12: one stream, with an offset for each key group from ``first_group`` on."""

    code: int
    first_group: int
    offsets: Offsets
    stream: Stream | None
    handle_id: str | None = None
    """With code 12 only."""

    @property
    def groups(self) -> int:
        return len(self.offsets)

    @property
    def size(self) -> int:
        return self.stream.size if self.stream else 0


Stream: TypeAlias = Inline | File | Relative | Segment | EmptySegment | KeyGroups


@dataclass(frozen=True, slots=True)
class Incremental:
    """Codes 5 and 11: RocksDB's own files, and the meta stream with the header."""

    code: int
    checkpoint_id: int
    backend_id: str
    first_group: int
    groups: int
    checkpointed_size: int | None
    """With code 11 only, as ``handle_id``."""
    meta: Stream | None
    shared: tuple[tuple[str, Stream | None], ...]
    """The name that RocksDB gave, and where the file is."""
    private: tuple[tuple[str, Stream | None], ...]
    handle_id: str | None = None

    @property
    def size(self) -> int:
        files = [self.meta, *(stream for _, stream in (*self.shared, *self.private))]
        return sum(stream.size for stream in files if stream)


@dataclass(frozen=True, slots=True)
class ChangelogBytes:
    """Code 9: changes within the metadata; those of key group −1 describe states."""

    first_group: int
    groups: int
    first_change: int
    last_change: int
    changes: tuple[tuple[int, bytes], ...]
    handle_id: str


@dataclass(frozen=True, slots=True)
class ChangelogFiles:
    """Codes 10 and 13: files of changes, each from an offset on."""

    code: int
    first_group: int
    groups: int
    files: tuple[tuple[int, Stream | None], ...]
    state_size: int
    checkpointed_size: int
    handle_id: str
    storage: str | None
    """With code 13 only."""


@dataclass(frozen=True, slots=True)
class Changelog:
    """Codes 8 and 14: materialized state and the changes since."""

    code: int
    first_group: int
    groups: int
    checkpointed_size: int
    materialized: tuple[Keyed | None, ...]
    changes: tuple[Keyed | None, ...]
    materialization_id: int
    checkpoint_id: int | None
    """With code 14 only."""
    handle_id: str


Keyed: TypeAlias = KeyGroups | Incremental | Changelog | ChangelogBytes | ChangelogFiles


@dataclass(frozen=True, slots=True, eq=False)
class OperatorPartitions:
    """One state within a stream of operator state: where each of its entries begins."""

    name: str
    mode: int
    """``SPLIT``, ``UNION`` or ``BROADCAST``."""
    offsets: Offsets


@dataclass(frozen=True, slots=True)
class OperatorStates:
    """Codes 4 and 17: the operator state of a subtask."""

    states: tuple[OperatorPartitions, ...]
    stream: Stream | None
    merged_folders: tuple[str, str, bool] | None = None
    """With code 17: the folders of task-owned and shared files, and whether they are empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Channel:
    """In-flight records of one channel, or merged ones of many (Flink 2)."""

    code: int
    """0 before version 6; then 1 input, 2 output, 3 merged inputs, 4 merged outputs."""
    subtask: int
    size: int
    stream: Stream | None
    channel: tuple[int, int] | None
    """Gate and channel, or partition and subpartition; None if merged."""
    offsets: Offsets | None
    merged: bytes | None = None


@dataclass(frozen=True, slots=True)
class Subtask:
    """What one subtask has; nothing, if it had finished."""

    index: int
    finished: bool = False
    managed_operator: OperatorStates | None = None
    raw_operator: OperatorStates | None = None
    managed_keyed: Keyed | None = None
    raw_keyed: Keyed | None = None
    inputs: tuple[Channel, ...] = ()
    outputs: tuple[Channel, ...] = ()
    duration: int = -1
    """Version 2 has one, and it is not used."""


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator, with the subtasks that reported."""

    id: bytes
    """16 bytes."""
    name: str | None
    """From version 5 on, as ``uid``."""
    uid: str | None
    parallelism: int
    max_parallelism: int
    coordinator: Inline | None
    fully_finished: bool
    subtasks: tuple[Subtask, ...]
    """In the order of the file; none if all had finished."""
    chain_length: int = 1
    """Version 2 has one, and it is not used."""


@dataclass(frozen=True, slots=True)
class MasterState:
    """State of a hook of the job master: opaque."""

    name: str
    version: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Metadata:
    """One ``_metadata`` file."""

    version: int
    checkpoint_id: int
    master_states: tuple[MasterState, ...]
    operators: tuple[Operator, ...]
    properties: bytes
    """A Java object stream that is kept but not read; empty before version 4."""


FILE_NAME: Final = "_metadata"
MAGIC: Final = 0x4960672D
MASTER_MAGIC: Final = 0xC96B1696
VERSIONS: Final = range(2, 7)
GROUPS_MAX: Final = 32768


def decode_metadata(data: bytes | memoryview, path: str = FILE_NAME) -> Metadata:
    """Decode a whole file. Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``."""
    at = Cursor(data, path, kind=ErrorKind.DAMAGED_RECORD)
    if not at.left:
        at.damaged("it is empty: Flink did not complete this checkpoint, or the file was cut")
    if not MAGIC.to_bytes(4, "big").startswith(bytes(data[:4])):
        raise UnsupportedFormat(
            f"{path} begins with {bytes(data[:4]).hex(' ')}, and Flink's metadata with 49 60 67 2d: it is another "
            "file. Check the address, or put Flink's file back",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            path=path,
        )
    at.take(4)
    version = at.i32()
    if version not in VERSIONS:
        raise UnsupportedFormat(
            f"{path}: metadata of version {version} is not known; known are {VERSIONS[0]} to {VERSIONS[-1]} "
            f"({FLINK_VERSIONS}): take a savepoint with one of these",
            path=path,
            version=version,
        )
    checkpoint_id = at.i64()
    if checkpoint_id < 0:
        at.damaged(f"the checkpoint's id is {checkpoint_id}")
    masters = tuple(_master_state(at) for _ in range(at.count(8, "master states")))
    reader = _Reader(at, version)
    operators = tuple(reader.operator() for _ in range(at.count(24, "operators")))
    subtasks = sum(operator.parallelism for operator in operators)
    check(path, "the subtasks of all operators", subtasks, SUBTASKS, "entries")
    ids = [operator.id for operator in operators]
    if len(set(ids)) != len(ids):
        at.damaged("an operator id stands twice")
    if version < 4:
        at.finish("the metadata")
    return Metadata(version, checkpoint_id, masters, operators, bytes(at.take(at.left)))


def _master_state(at: Cursor) -> MasterState:
    if at.i32() & 0xFFFFFFFF != MASTER_MAGIC:
        at.damaged("a master state should begin with C9 6B 16 96")
    whole = at.take(at.i32())
    inner = Cursor(whole, at.path, kind=at.kind)
    version, name = inner.i32(), inner.utf()
    data = bytes(inner.take(inner.i32()))
    inner.finish("a master state")
    return MasterState(name, version, data)


class _Reader:
    """Reads operators of one version."""

    def __init__(self, at: Cursor, version: int) -> None:
        self.at = at
        self.version = version
        self.streams = 0

    def operator(self) -> Operator:
        at = self.at
        name = uid = None
        if self.version >= 5:
            name, uid = at.utf() or None, at.utf() or None
        identity = bytes(at.take(16))
        parallelism, limit = at.i32(), at.i32()
        if not 1 <= parallelism <= GROUPS_MAX or not 1 <= limit <= GROUPS_MAX:
            at.damaged(f"an operator has parallelism {parallelism} of {limit}; both are 1 to {GROUPS_MAX}")
        coordinator, chain = None, 1
        if self.version == 2:
            chain = at.i32()
        else:
            found = self.stream()
            if found is not None and not isinstance(found, Inline):
                at.damaged("the state of a coordinator does not lie in the metadata")
            coordinator = found
        count = at.i32()
        finished = count == -1 and self.version >= 3
        if finished and coordinator is not None:
            at.damaged("an operator that has finished has a coordinator's state")
        subtasks = () if finished else tuple(self.subtask() for _ in range(at.fitting(count, 4, "subtasks")))
        indexes = [subtask.index for subtask in subtasks]
        if any(not 0 <= index < parallelism for index in indexes) or len(set(indexes)) != len(indexes):
            at.damaged(f"subtasks {sorted(indexes)} of an operator with parallelism {parallelism}")
        return Operator(identity, name, uid, parallelism, limit, coordinator, finished, subtasks, chain)

    def subtask(self) -> Subtask:
        at = self.at
        index = at.i32()
        if index < 0 and self.version >= 3:
            return Subtask(-index - 1, finished=True)
        duration = -1
        if self.version == 2:
            duration = at.i64()
            if at.i32():
                at.damaged("it has state of Flink 1.1, which nothing reads any more")
        managed, raw = self.operator_states(), self.operator_states()
        keyed, raw_keyed = self.keyed(), self.keyed()
        inputs: tuple[Channel, ...] = ()
        outputs: tuple[Channel, ...] = ()
        if self.version >= 3:
            inputs = tuple(self.channel((1, 3)) for _ in range(at.count(17, "input channels")))
            outputs = tuple(self.channel((2, 4)) for _ in range(at.count(17, "output channels")))
        return Subtask(index, False, managed, raw, keyed, raw_keyed, inputs, outputs, duration)

    def operator_states(self) -> OperatorStates | None:
        at = self.at
        count = at.i32()
        if count == 0:
            return None
        code = at.u8() if count == 1 else 0
        if count != 1 or code not in (4, 17):
            raise self.unknown("operator state", code if count == 1 else count)
        states = []
        for _ in range(at.count(7, "operator states")):
            name, mode = at.utf(), at.u8()
            if mode > 2:
                at.damaged(f"state {name!r} has mode {mode}; known are 0 to 2")
            states.append(OperatorPartitions(name, mode, self.offsets(at.count(8, "offsets"))))
        folders = None
        if code == 17:
            folders = (at.utf(), at.utf(), at.flag("whether folders are empty"))
        return OperatorStates(tuple(states), self.stream(), folders)

    def offsets(self, count: int) -> Offsets:
        return np.frombuffer(self.at.take(8 * count), ">i8").astype(np.int64)

    def groups(self) -> tuple[int, int]:
        first, count = self.at.i32(), self.at.i32()
        if not (count >= 0 and 0 <= first <= GROUPS_MAX - count):
            self.at.damaged(f"key groups {first} to {first + count - 1}; they are 0 to {GROUPS_MAX - 1}")
        return first, count

    def key_groups(self, code: int, depth: int) -> KeyGroups:
        first, count = self.groups()
        offsets = self.offsets(self.at.fitting(count, 8, "offsets"))
        stream = self.stream(depth)
        return KeyGroups(code, first, offsets, stream, self.at.utf() if code == 12 else None)

    def keyed(self, depth: int = 0) -> Keyed | None:
        at = self.at
        at.deeper("handles", depth)
        code = at.u8()
        if code == 0:
            return None
        if code in (3, 7, 12):
            return self.key_groups(code, depth + 1)
        if code in (5, 11):
            return self.incremental(code)
        if code in (8, 14):
            return self.changelog(code, depth + 1)
        if code == 9:
            groups = self.groups()
            first, last = at.i64(), at.i64()
            changes = tuple((at.i32(), bytes(at.take(at.i32()))) for _ in range(at.count(8, "changes")))
            return ChangelogBytes(*groups, first, last, changes, at.utf())
        if code in (10, 13):
            groups = self.groups()
            files = tuple((at.i64(), self.stream()) for _ in range(at.count(9, "files of changes")))
            sizes = at.i64(), at.i64()
            return ChangelogFiles(code, *groups, files, *sizes, at.utf(), at.utf() if code == 13 else None)
        raise self.unknown("keyed state", code)

    def incremental(self, code: int) -> Incremental:
        at = self.at
        checkpoint_id, backend = at.i64(), at.utf()
        groups = self.groups()
        size = at.i64() if code == 11 else None
        meta = self.stream()
        shared, private = self.files(), self.files()
        handle_id = at.utf() if code == 11 else None
        return Incremental(code, checkpoint_id, backend, *groups, size, meta, shared, private, handle_id)

    def files(self) -> tuple[tuple[str, Stream | None], ...]:
        return tuple((self.at.utf(), self.stream()) for _ in range(self.at.count(3, "files")))

    def changelog(self, code: int, depth: int) -> Changelog:
        at = self.at
        groups, size = self.groups(), at.i64()
        materialized = tuple(self.keyed(depth) for _ in range(at.count(1, "materialized handles")))
        changes = tuple(self.keyed(depth) for _ in range(at.count(1, "handles of changes")))
        materialization = at.i64()
        checkpoint_id = at.i64() if code == 14 else None
        return Changelog(code, *groups, size, materialized, changes, materialization, checkpoint_id, at.utf())

    def channel(self, codes: tuple[int, int]) -> Channel:
        at = self.at
        code = at.u8() if self.version >= 6 else 0
        if self.version >= 6 and code not in codes:
            raise self.unknown("channel state", code)
        subtask = at.i32()
        if code in (3, 4):
            size, stream = at.i64(), self.stream()
            return Channel(code, subtask, size, stream, None, None, bytes(at.take(at.i32())))
        channel = at.i32(), at.i32()
        offsets = self.offsets(at.count(8, "offsets"))
        size = at.i64()
        return Channel(code, subtask, size, self.stream(), channel, offsets)

    def stream(self, depth: int = 0) -> Stream | None:
        at = self.at
        self.streams += 1
        check(at.path, "its streams", self.streams, ENTRIES, "entries")
        at.deeper("handles", depth)
        code = at.u8()
        if code == 0:
            return None
        if code == 1:
            return Inline(at.utf(), bytes(at.take(at.i32())))
        if code == 2:
            size = self.size()
            return File(at.utf(), size)
        if code == 3:
            return self.key_groups(code, depth + 1)
        if code == 6:
            path = at.utf()
            return Relative(path, self.size())
        if code == 15:
            start, size, scope = self.size(), self.size(), at.i32()
            return Segment(at.utf(), start, size, scope, at.utf())
        if code == 16:
            return EmptySegment()
        raise self.unknown("stream", code)

    def size(self) -> int:
        found = self.at.i64()
        if found < 0:
            self.at.damaged(f"a size or an offset is {found}")
        return found

    def unknown(self, what: str, code: int) -> UnsupportedFormat:
        return UnsupportedFormat(
            f"{self.at.path}: at byte {self.at.position} stands {what} of the unknown kind {code}: the file is damaged "
            f"or of a newer Flink; take a savepoint with {FLINK_VERSIONS}",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            path=self.at.path,
            code=code,
        )


_Item = TypeVar("_Item")


def encode_metadata(metadata: Metadata) -> bytes:
    """Encode a whole file in the version that the value names.

    Raises ``InvalidInput`` for another version, and for what the version cannot hold.
    """
    if metadata.version not in VERSIONS:
        raise InvalidInput(f"metadata of version {metadata.version} cannot be written; give one of {list(VERSIONS)}")
    if metadata.properties and metadata.version < 4:
        raise InvalidInput(f"metadata of version {metadata.version} has no properties; give 4 or more")
    writer = _Writer(metadata.version)
    writer.pack(">Iiq", MAGIC, metadata.version, metadata.checkpoint_id)
    writer.each(metadata.master_states, writer.master_state)
    writer.each(metadata.operators, writer.operator)
    return bytes(writer.out) + metadata.properties


class _Writer:
    """Writes operators of one version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.out = bytearray()

    def pack(self, form: str, *values: int) -> None:
        try:
            self.out += struct.pack(form, *values)
        except struct.error as error:
            raise InvalidInput(f"a number does not fit in the metadata: {values}") from error

    def utf(self, text: str | None) -> None:
        octets = encode_modified_utf8(text or "")
        self.pack(">H", len(octets))
        self.out += octets

    def blob(self, data: bytes) -> None:
        self.pack(">i", len(data))
        self.out += data

    def each(self, items: Collection[_Item], write: Callable[[_Item], None]) -> None:
        self.pack(">i", len(items))
        for item in items:
            write(item)

    def offsets(self, offsets: Offsets) -> None:
        self.out += offsets.astype(">i8").tobytes()

    def master_state(self, state: MasterState) -> None:
        inner = _Writer(self.version)
        inner.pack(">i", state.version)
        inner.utf(state.name)
        inner.blob(state.data)
        self.pack(">I", MASTER_MAGIC)
        self.blob(bytes(inner.out))

    def operator(self, operator: Operator) -> None:
        if self.version >= 5:
            self.utf(operator.name)
            self.utf(operator.uid)
        self.out += operator.id
        self.pack(">ii", operator.parallelism, operator.max_parallelism)
        if self.version == 2:
            self.pack(">i", operator.chain_length)
            if operator.coordinator or operator.fully_finished:
                raise InvalidInput("metadata of version 2 has no coordinators and nothing finished; give 3 or more")
        else:
            self.stream(operator.coordinator)
        if operator.fully_finished:
            self.pack(">i", -1)
        else:
            self.each(operator.subtasks, self.subtask)

    def subtask(self, subtask: Subtask) -> None:
        if subtask.finished:
            if self.version == 2:
                raise InvalidInput("metadata of version 2 has no finished subtasks; give 3 or more")
            self.pack(">i", -subtask.index - 1)
            return
        self.pack(">i", subtask.index)
        if self.version == 2:
            self.pack(">qi", subtask.duration, 0)
        self.operator_states(subtask.managed_operator)
        self.operator_states(subtask.raw_operator)
        self.keyed(subtask.managed_keyed)
        self.keyed(subtask.raw_keyed)
        if self.version >= 3:
            self.each(subtask.inputs, self.channel)
            self.each(subtask.outputs, self.channel)

    def operator_states(self, found: OperatorStates | None) -> None:
        if found is None:
            self.pack(">i", 0)
            return
        self.pack(">iB", 1, 17 if found.merged_folders else 4)
        self.each(found.states, self.partitions)
        if found.merged_folders:
            own, shared, empty = found.merged_folders
            self.utf(own)
            self.utf(shared)
            self.pack(">?", empty)
        self.stream(found.stream)

    def partitions(self, state: OperatorPartitions) -> None:
        self.utf(state.name)
        self.pack(">Bi", state.mode, len(state.offsets))
        self.offsets(state.offsets)

    def keyed(self, handle: Keyed | None) -> None:
        match handle:
            case None:
                self.pack(">B", 0)
            case KeyGroups():
                self.key_groups(handle)
            case Incremental():
                self.incremental(handle)
            case Changelog():
                self.changelog(handle)
            case ChangelogBytes():
                self.pack(">Biiqq", 9, handle.first_group, handle.groups, handle.first_change, handle.last_change)
                self.each(handle.changes, self.change)
                self.utf(handle.handle_id)
            case ChangelogFiles():
                self.pack(">Bii", handle.code, handle.first_group, handle.groups)
                self.each(handle.files, self.change_file)
                self.pack(">qq", handle.state_size, handle.checkpointed_size)
                self.utf(handle.handle_id)
                if handle.code == 13:
                    self.utf(handle.storage)

    def key_groups(self, handle: KeyGroups) -> None:
        self.pack(">Bii", handle.code, handle.first_group, handle.groups)
        self.offsets(handle.offsets)
        self.stream(handle.stream)
        if handle.code == 12:
            self.utf(handle.handle_id)

    def incremental(self, handle: Incremental) -> None:
        self.pack(">Bq", handle.code, handle.checkpoint_id)
        self.utf(handle.backend_id)
        self.pack(">ii", handle.first_group, handle.groups)
        if handle.code == 11:
            self.pack(">q", handle.checkpointed_size or 0)
        self.stream(handle.meta)
        self.each(handle.shared, self.named)
        self.each(handle.private, self.named)
        if handle.code == 11:
            self.utf(handle.handle_id)

    def changelog(self, handle: Changelog) -> None:
        self.pack(">Biiq", handle.code, handle.first_group, handle.groups, handle.checkpointed_size)
        self.each(handle.materialized, self.keyed)
        self.each(handle.changes, self.keyed)
        self.pack(">q", handle.materialization_id)
        if handle.code == 14:
            self.pack(">q", handle.checkpoint_id or 0)
        self.utf(handle.handle_id)

    def change(self, change: tuple[int, bytes]) -> None:
        self.pack(">i", change[0])
        self.blob(change[1])

    def change_file(self, file: tuple[int, Stream | None]) -> None:
        self.pack(">q", file[0])
        self.stream(file[1])

    def named(self, file: tuple[str, Stream | None]) -> None:
        self.utf(file[0])
        self.stream(file[1])

    def channel(self, channel: Channel) -> None:
        if (channel.code == 0) != (self.version < 6):
            raise InvalidInput(f"channel state of kind {channel.code} does not stand in metadata {self.version}")
        if channel.code:
            self.pack(">B", channel.code)
        self.pack(">i", channel.subtask)
        if channel.channel is None or channel.offsets is None:
            self.pack(">q", channel.size)
            self.stream(channel.stream)
            self.blob(channel.merged or b"")
            return
        self.pack(">iii", *channel.channel, len(channel.offsets))
        self.offsets(channel.offsets)
        self.pack(">q", channel.size)
        self.stream(channel.stream)

    def stream(self, stream: Stream | None) -> None:
        match stream:
            case None:
                self.pack(">B", 0)
            case Inline(name, data):
                self.pack(">B", 1)
                self.utf(name)
                self.blob(data)
            case File(uri, size):
                self.pack(">Bq", 2, size)
                self.utf(uri)
            case Relative(path, size):
                self.pack(">B", 6)
                self.utf(path)
                self.pack(">q", size)
            case Segment(uri, start, size, scope, logical_id):
                self.pack(">Bqqi", 15, start, size, scope)
                self.utf(uri)
                self.utf(logical_id)
            case EmptySegment():
                self.pack(">B", 16)
            case KeyGroups():
                self.key_groups(stream)


def streams_of(metadata: Metadata) -> Iterator[tuple[str, int, Stream]]:
    """Return every stream that the metadata names: operator, subtask, stream."""

    def keyed(handle: Keyed | None) -> Iterator[Stream | None]:
        if isinstance(handle, KeyGroups):
            yield handle.stream
        elif isinstance(handle, Incremental):
            yield handle.meta
            yield from (stream for _, stream in (*handle.shared, *handle.private))
        elif isinstance(handle, Changelog):
            for inner in (*handle.materialized, *handle.changes):
                yield from keyed(inner)
        elif isinstance(handle, ChangelogFiles):
            yield from (stream for _, stream in handle.files)

    for operator in metadata.operators:
        uid = operator.uid or operator.id.hex()
        for subtask in operator.subtasks:
            found = [*keyed(subtask.managed_keyed), *keyed(subtask.raw_keyed)]
            found += [states.stream for states in (subtask.managed_operator, subtask.raw_operator) if states]
            found += [channel.stream for channel in (*subtask.inputs, *subtask.outputs)]
            for stream in found:
                while isinstance(stream, KeyGroups):
                    stream = stream.stream
                if stream is not None:
                    yield uid, subtask.index, stream
