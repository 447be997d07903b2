"""Information that only Flink has, kept so that a savepoint can be written again: headers and
metadata.

Snapshots of serializers are Flink's own and are kept unchanged. An import that keeps key groups
stores the template as coordinator state of a separate operator. Rewrite and repair carry it along.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Operator as OurOperator
from stateformat.model import State
from stateformat.reading import Checkpoint
from stateformat.states import coordinator_state

from ..contents import operator_header_end
from ..groups import Extents, HeapReader
from ..handles import Incremental, KeyGroups, Metadata, Operator, Subtask
from ..header import KEYED_VERSION, KeyedHeader, OperatorHeader, StateInfo, read_keyed_header, read_operator_header
from ..heap_timers import are_timers, read_services
from ..metadata import decode_metadata
from ..metadata_writing import encode_metadata
from ..source import FlinkSource

OPERATOR: Final = "flink-savepoint"
"""The uid of the operator that holds the template."""
STATE: Final = "template"
COLUMNS: Final = pa.schema([pa.field("name", pa.string()), pa.field("value", pa.binary())])
_METADATA: Final = "metadata"


@dataclass(frozen=True)
class Template:
    """The metadata without its subtasks, and a header of each kind for each operator."""

    metadata: Metadata
    keyed: Mapping[bytes, bytes]
    """By operator id: all keyed states that any subtask describes."""
    lists: Mapping[bytes, bytes]
    """By operator id: all operator states."""
    heaps: frozenset[bytes] = frozenset()
    """Ids of operators whose keyed state had the hash-map backend's own layout: bytes kept from it
    may differ from those in a canonical stream.
    """

    def table(self) -> pa.Table:
        """Return the template as rows, which :func:`template_in` reads."""
        rows = [(_METADATA, encode_metadata(self.metadata))]
        rows += [(f"keyed/{identity.hex()}", header) for identity, header in self.keyed.items()]
        rows += [(f"operator/{identity.hex()}", header) for identity, header in self.lists.items()]
        rows += [(f"heap/{identity.hex()}", b"") for identity in sorted(self.heaps)]
        names, values = zip(*rows, strict=True)
        return pa.table([list(names), list(values)], schema=COLUMNS)


KEEP: Final = "import the savepoint again (`ckpt import SAVEPOINT --key-hash keep --to STORE`)"
"""What makes of Flink's savepoint a store that can become one again."""


def without(place: str) -> str:
    """What leaves ``UID`` or ``UID/STATE`` out of the savepoint that is written."""
    return f"import the savepoint again without it (`ckpt import SAVEPOINT --key-hash keep --drop {place} --to STORE`)"


def template_operator() -> OurOperator:
    """Return the operator that holds a template."""
    return OurOperator(OPERATOR, 1, 128, coordinator=True)


def template_state() -> State:
    """Return the state that holds a template."""
    return coordinator_state(OPERATOR, STATE, columns=COLUMNS)


def template_of(source: FlinkSource) -> Template:
    """Make a template from the metadata and the stream headers of a Flink checkpoint."""
    keyed, lists = {}, {}
    heaps = {uid for uid, _, reader, _ in source.contents.streams if isinstance(reader, HeapReader)}
    for operator in source.metadata.operators:
        header = _keyed_header(source, operator)
        if header is not None:
            keyed[operator.id] = header
        header = _operator_header(source, operator)
        if header is not None:
            lists[operator.id] = header
    operators = tuple(replace(operator, subtasks=()) for operator in source.metadata.operators)
    ids = frozenset(operator.id for operator in operators if (operator.uid or operator.id.hex()) in heaps)
    return Template(replace(source.metadata, operators=operators), keyed, lists, ids)


def template_in(checkpoint: Checkpoint) -> Template:
    """Return the template that one of our checkpoints holds; ``InvalidInput`` if it has none."""
    names = {(state.operator, state.name) for state in checkpoint.states}
    if checkpoint.system is not None:
        raise InvalidInput(
            f"{checkpoint.storage.url} is {checkpoint.system}; a savepoint is made of what came from Flink only",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
        )
    if (OPERATOR, STATE) not in names:
        raise InvalidInput(
            f"checkpoint {checkpoint.id} has no template of a savepoint ({OPERATOR}/{STATE}): its serializers are not "
            f"known; {KEEP}, which keeps one",
            kind=ErrorKind.UNKNOWN_STATE,
        )
    table = checkpoint.read(OPERATOR, STATE).table()
    rows = dict(zip(table["name"].to_pylist(), table["value"].to_pylist(), strict=True))
    by_kind: dict[str, dict[bytes, bytes]] = {"keyed": {}, "operator": {}, "heap": {}}
    for name, value in rows.items():
        kind, _, identity = name.partition("/")
        if kind in by_kind:
            by_kind[kind][bytes.fromhex(identity)] = value
    metadata = decode_metadata(rows[_METADATA], _METADATA)
    return Template(metadata, by_kind["keyed"], by_kind["operator"], frozenset(by_kind["heap"]))


def _keyed_header(source: FlinkSource, operator: Operator) -> bytes | None:
    """Return one header with the states of all subtasks; None if there are none."""
    key = b""
    states: dict[str, bytes] = {}
    for path, data in _headers(source, operator):
        header = read_keyed_header(data, path)
        if header.key is None:
            continue
        key = data[5 : _states_begin(header)]
        for name, described in _described(header.states, header, data):
            states.setdefault(name, described)
    return keyed_header(key, states) if key else None


def _headers(source: FlinkSource, operator: Operator) -> Iterator[tuple[str, bytes]]:
    """Return the headers of keyed state; timers on the heap of a job on RocksDB have one, too."""
    for subtask in operator.subtasks:
        handle, raw = subtask.managed_keyed, subtask.raw_keyed
        if isinstance(handle, Incremental):
            place = source.places.of(handle.meta)
            yield place.path, place.read(0, place.size).tobytes()
        elif isinstance(handle, KeyGroups):
            place = source.places.of(handle)
            yield place.path, Extents.of(handle, place.size, place.path).header(place)
        if isinstance(raw, KeyGroups):
            place = source.places.of(raw)
            if are_timers(place, raw):
                yield place.path, read_services(place, raw).header


def keyed_header(key: bytes, states: Mapping[str, bytes]) -> bytes:
    """Return the header of an uncompressed stream; states are numbered in their order."""
    return struct.pack(">iB", KEYED_VERSION, 0) + key + struct.pack(">H", len(states)) + b"".join(states.values())


def key_and_states(header: bytes) -> tuple[bytes, KeyedHeader, dict[str, bytes]]:
    """Take a keyed header apart: the key's snapshot, the header as read, states by name."""
    read = read_keyed_header(header, OPERATOR)
    return header[5 : _states_begin(read)], read, dict(_described(read.states, read, header))


def _states_begin(header: KeyedHeader) -> int:
    """Return the offset of the number of states."""
    return (header.states[0].begin if header.states else header.end) - 2


def _described(
    states: Iterable[StateInfo], header: KeyedHeader | OperatorHeader, data: bytes
) -> list[tuple[str, bytes]]:
    """Return states with the bytes that describe them, except one where reading stopped."""
    whole = [state for state in states if header.stopped is None or state.end < header.end]
    return [(state.name, data[state.begin : state.end]) for state in whole]


def _operator_header(source: FlinkSource, operator: Operator) -> bytes | None:
    version = 0
    lists: dict[str, bytes] = {}
    broadcasts: dict[str, bytes] = {}
    for subtask in operator.subtasks:
        found = _operator_stream(source, subtask)
        if found is None:
            continue
        data, header = found
        version = header.version
        for name, described in _described(header.lists, header, data):
            lists.setdefault(name, described)
        for name, described in _described(header.broadcasts, header, data):
            broadcasts.setdefault(name, described)
    return operator_header(version, lists, broadcasts) if version else None


def _operator_stream(source: FlinkSource, subtask: Subtask) -> tuple[bytes, OperatorHeader] | None:
    handle = subtask.managed_operator
    if handle is None or not handle.states:
        return None
    place = source.places.of(handle.stream)
    data = place.read(0, operator_header_end(handle, place)).tobytes()
    return data, read_operator_header(data, place.path)


def operator_header(version: int, lists: Mapping[str, bytes], broadcasts: Mapping[str, bytes]) -> bytes:
    """Return the header of an uncompressed stream of operator state."""
    head = struct.pack(">iB", version, 0) if version >= 6 else struct.pack(">i", version)
    parts = (struct.pack(">H", len(states)) + b"".join(states.values()) for states in (lists, broadcasts))
    return head + b"".join(parts)


def lists_and_broadcasts(header: bytes) -> tuple[OperatorHeader, dict[str, bytes], dict[str, bytes]]:
    """Take an operator header apart: as read, list states by name, broadcast states by name."""
    read = read_operator_header(header, OPERATOR)
    return read, dict(_described(read.lists, read, header)), dict(_described(read.broadcasts, read, header))
