"""Information that only Flink has, kept so that a savepoint can be written again: headers and
metadata.

Snapshots of serializers are Flink's own and are kept unchanged. An import that keeps key groups
stores the template as coordinator state of a separate operator. Rewrite and repair carry it along.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Operator as OurOperator
from stateformat.model import Capability, State
from stateformat.reading import Checkpoint
from stateformat.states import coordinator_state

from ..contents import operator_header_end
from ..headers import KEYED_VERSION, KeyedHeader, OperatorHeader, StateInfo, read_keyed_header, read_operator_header
from ..keyed import Extents, HeapReader, are_timers, read_services
from ..kryo_columns import KryoTypes, types_in
from ..metadata import Incremental, KeyGroups, Metadata, Operator, Subtask, decode_metadata, encode_metadata
from ..source import FlinkSource

TEMPLATE_OPERATOR: Final = "flink-savepoint"
"""The uid of the operator that holds the template."""
TEMPLATE_STATE: Final = "template"
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
    hidden: Mapping[bytes, tuple[str, ...]] = field(default_factory=dict)
    """By operator id: the operator states that stand behind a class that is not known in the
    header, and the one that has it. Their part of the header is kept as a whole.
    """
    heaps: frozenset[bytes] = frozenset()
    """Ids of operators whose keyed state had the hash-map backend's own layout: bytes kept from it
    may differ from those in a canonical stream.
    """
    kryo: Mapping[tuple[bytes, bool], KryoTypes] = field(default_factory=dict)
    """By operator id, and whether they are of keyed state: the types of Kryo's values."""

    def table(self) -> pa.Table:
        """Return the template as rows, which :func:`template_in` reads."""
        rows = [(_METADATA, encode_metadata(self.metadata))]
        rows += [(f"keyed/{identity.hex()}", header) for identity, header in self.keyed.items()]
        rows += [(f"operator/{identity.hex()}", header) for identity, header in self.lists.items()]
        rows += [(f"hidden/{identity.hex()}", json.dumps(names).encode()) for identity, names in self.hidden.items()]
        rows += [(f"heap/{identity.hex()}", b"") for identity in sorted(self.heaps)]
        for (identity, keyed), types in self.kryo.items():
            rows.append((f"{'kryo' if keyed else 'kryo-operator'}/{identity.hex()}", types.text()))
        names, values = zip(*rows, strict=True)
        return pa.table([list(names), list(values)], schema=COLUMNS)


KEEP: Final = "import the savepoint again (`ckpt import SAVEPOINT --key-hash keep --to STORE`)"
"""What makes of Flink's savepoint a store that can become one again."""


def without(place: str) -> str:
    """What leaves ``UID`` or ``UID/STATE`` out of the savepoint that is written."""
    return f"import the savepoint again without it (`ckpt import SAVEPOINT --key-hash keep --drop {place} --to STORE`)"


def template_operator() -> OurOperator:
    """Return the operator that holds a template."""
    return OurOperator(TEMPLATE_OPERATOR, 1, 128, coordinator=True)


def template_state() -> State:
    """Return the state that holds a template."""
    return coordinator_state(TEMPLATE_OPERATOR, TEMPLATE_STATE, columns=COLUMNS)


def template_of(source: FlinkSource) -> Template:
    """Make a template from the metadata and the stream headers of a Flink checkpoint."""
    keyed, lists, hidden = {}, {}, {}
    heaps = {uid for uid, _, reader, _ in source.contents.streams if isinstance(reader, HeapReader)}
    for operator in source.metadata.operators:
        header = _keyed_header(source, operator)
        if header is not None:
            keyed[operator.id] = header
        found = _operator_header(source, operator)
        if found is not None:
            lists[operator.id], behind = found
            if behind:
                hidden[operator.id] = behind
    operators = tuple(replace(operator, subtasks=()) for operator in source.metadata.operators)
    uids = {operator.uid or operator.id.hex(): operator.id for operator in operators}
    ids = frozenset(identity for uid, identity in uids.items() if uid in heaps)
    kryo = {(uids[uid], of_keyed): types for (uid, of_keyed), types in source.contents.kryo.items()}
    return Template(replace(source.metadata, operators=operators), keyed, lists, hidden, ids, kryo)


def template_in(checkpoint: Checkpoint) -> Template:
    """Return the template that one of our checkpoints holds; ``InvalidInput`` if it has none."""
    names = {(state.operator, state.name) for state in checkpoint.states}
    if Capability.CARRY not in checkpoint.capabilities:
        raise InvalidInput(
            f"{checkpoint.storage.url} is {checkpoint.system}; a savepoint is made of what came from Flink only",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
        )
    if (TEMPLATE_OPERATOR, TEMPLATE_STATE) not in names:
        raise InvalidInput(
            f"checkpoint {checkpoint.id} has no template of a savepoint ({TEMPLATE_OPERATOR}/{TEMPLATE_STATE}): its "
            "serializers are not known. Only what came from Flink so can go back: "
            "`ckpt import SAVEPOINT --key-hash keep --to STORE`",
            kind=ErrorKind.UNKNOWN_STATE,
        )
    table = checkpoint.read(TEMPLATE_OPERATOR, TEMPLATE_STATE).table()
    rows = dict(zip(table["name"].to_pylist(), table["value"].to_pylist(), strict=True))
    kinds = ("keyed", "operator", "hidden", "heap", "kryo", "kryo-operator")
    by_kind: dict[str, dict[bytes, bytes]] = {kind: {} for kind in kinds}
    for name, value in rows.items():
        kind, _, identity = name.partition("/")
        if kind in by_kind:
            by_kind[kind][bytes.fromhex(identity)] = value
    metadata = decode_metadata(rows[_METADATA], _METADATA)
    hidden = {identity: tuple(json.loads(names)) for identity, names in by_kind["hidden"].items()}
    kryo = {(identity, True): types_in(text) for identity, text in by_kind["kryo"].items()}
    kryo |= {(identity, False): types_in(text) for identity, text in by_kind["kryo-operator"].items()}
    return Template(metadata, by_kind["keyed"], by_kind["operator"], hidden, frozenset(by_kind["heap"]), kryo)


def _keyed_header(source: FlinkSource, operator: Operator) -> bytes | None:
    """Return one header with the states of all subtasks; None if there are none.

    One in which reading stopped comes last, with all that stands behind it in its header.
    """
    key = tail = b""
    behind = 0
    states: dict[str, bytes] = {}
    for path, data in _headers(source, operator):
        header = read_keyed_header(data, path)
        if header.key is None:
            continue
        key = data[5 : _states_begin(header)]
        for name, described in _described(header.states, header, data):
            states.setdefault(name, described)
        if header.stopped is not None and not tail:
            tail, behind = data[header.states[-1].begin :], header.declared - len(header.states)
    return keyed_header(key, [*states.values(), *([tail] if tail else [])], behind) if key else None


def _headers(source: FlinkSource, operator: Operator) -> Iterator[tuple[str, bytes]]:
    """Return the headers of keyed state; timers on the heap of a job on RocksDB have one, too."""
    for subtask in operator.subtasks:
        handle, raw = subtask.managed_keyed, subtask.raw_keyed
        if isinstance(handle, Incremental):
            place = source.places.of(handle.meta)
            yield place.path, place.head(place.size)
        elif isinstance(handle, KeyGroups):
            place = source.places.of(handle)
            yield place.path, Extents.of(handle, place.size, place.path).header(place)
        if isinstance(raw, KeyGroups):
            place = source.places.of(raw)
            services = read_services(place, raw) if are_timers(place, raw) else None
            if services is not None and all(service.framed for service in services.found):
                yield place.path, services.header


def keyed_header(key: bytes, states: Collection[bytes], behind: int = 0) -> bytes:
    """Return the header of an uncompressed stream; states are numbered in their order.

    ``behind``: how many more states the bytes of the last one have.
    """
    return struct.pack(">iB", KEYED_VERSION, 0) + key + struct.pack(">H", len(states) + behind) + b"".join(states)


def key_and_states(header: bytes, types: KryoTypes | None = None) -> tuple[bytes, KeyedHeader, dict[str, bytes]]:
    """Take a keyed header apart: the key's snapshot, the header as read, states by name."""
    read = read_keyed_header(header, TEMPLATE_OPERATOR, types)
    described = dict(_described(read.states, read, header))
    if read.stopped is not None and read.states:
        described[read.states[-1].name] = header[read.states[-1].begin :]
    return header[5 : _states_begin(read)], read, described


def _states_begin(header: KeyedHeader) -> int:
    """Return the offset of the number of states."""
    return (header.states[0].begin if header.states else header.end) - 2


def _described(
    states: Iterable[StateInfo], header: KeyedHeader | OperatorHeader, data: bytes
) -> list[tuple[str, bytes]]:
    """Return states with the bytes that describe them, except one where reading stopped."""
    whole = [state for state in states if header.stopped is None or state.end < header.end]
    return [(state.name, data[state.begin : state.end]) for state in whole]


def _operator_header(source: FlinkSource, operator: Operator) -> tuple[bytes, tuple[str, ...]] | None:
    """Return one header with the states of all subtasks, and the names of those that it hides.

    If reading stops, it is the header of the subtask that names most states.
    """
    version, most = 0, 0
    lists: dict[str, bytes] = {}
    broadcasts: dict[str, bytes] = {}
    whole: tuple[bytes, tuple[str, ...]] | None = None
    for subtask in operator.subtasks:
        found = _operator_stream(source, subtask)
        if found is None:
            continue
        data, header, names = found
        version = header.version
        _, known, others = lists_and_broadcasts(data)
        for name, described in known.items():
            lists.setdefault(name, described)
        for name, described in others.items():
            broadcasts.setdefault(name, described)
        if header.stopped is not None and len(names) > most:
            most = len(names)
            plain = data[:4] + b"\0" + data[5:] if version >= 6 else data
            whole = plain, tuple(name for name in names if name not in known and name not in others)
    return whole or ((operator_header(version, lists, broadcasts), ()) if version else None)


def _operator_stream(source: FlinkSource, subtask: Subtask) -> tuple[bytes, OperatorHeader, list[str]] | None:
    handle = subtask.managed_operator
    if handle is None or not handle.states:
        return None
    place = source.places.of(handle.stream)
    data = place.head(operator_header_end(handle, place))
    return data, read_operator_header(data, place.path), [item.name for item in handle.states]


def operator_header(
    version: int, lists: Mapping[str, bytes], broadcasts: Mapping[str, bytes], hiding: OperatorHeader | None = None
) -> bytes:
    """Return the header of an uncompressed stream of operator state.

    ``hiding``: the header of which all is kept from the state on where reading stopped.
    """
    head = struct.pack(">iB", version, 0) if version >= 6 else struct.pack(">i", version)
    more = hiding.behind + 1 if hiding is not None else 0
    if hiding is not None and not hiding.broadcasts:
        return head + struct.pack(">H", len(lists) + more) + b"".join([*lists.values(), hiding.tail])
    head += struct.pack(">H", len(lists)) + b"".join(lists.values()) + struct.pack(">H", len(broadcasts) + more)
    return head + b"".join([*broadcasts.values(), hiding.tail if hiding is not None else b""])


def lists_and_broadcasts(
    header: bytes, types: KryoTypes | None = None
) -> tuple[OperatorHeader, dict[str, bytes], dict[str, bytes]]:
    """Take an operator header apart: as read, list states by name, broadcast states by name."""
    read = read_operator_header(header, TEMPLATE_OPERATOR, types)
    return read, dict(_described(read.lists, read, header)), dict(_described(read.broadcasts, read, header))
