"""From :class:`Metadata` to the bytes of ``_metadata``; decoded metadata is encoded unchanged."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import TypeVar

from stateformat.errors import InvalidInput

from ..framing import encode_modified_utf8
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
from .metadata import MAGIC, MASTER_MAGIC, VERSIONS

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
