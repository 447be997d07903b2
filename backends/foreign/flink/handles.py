"""The contents of a ``_metadata`` file, as values. Names of files are as Flink wrote them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

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
