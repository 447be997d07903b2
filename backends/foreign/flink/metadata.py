"""From the bytes of ``_metadata`` to :class:`Metadata` (versions 2 to 6).

Every count is checked against the remaining bytes; any error is a ``DamagedCheckpoint`` of kind
``DAMAGED_RECORD`` with the offset, or ``UnsupportedFormat`` for an unknown version or code.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..cursor import Cursor
from ..limits import ENTRIES, SUBTASKS, check
from ..source import FLINK_VERSIONS
from .handles import (
    Changelog,
    ChangelogBytes,
    ChangelogFiles,
    Channel,
    EmptySegment,
    File,
    Incremental,
    Inline,
    Keyed,
    KeyGroups,
    MasterState,
    Metadata,
    Offsets,
    Operator,
    OperatorPartitions,
    OperatorStates,
    Relative,
    Segment,
    Stream,
    Subtask,
)

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
