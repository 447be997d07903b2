"""Savepoints of keyed state written by hand, in the canonical layout and in that of the heap.

States are described by the kinds of ``flink_written``; only snappy and the metadata's bytes are the
product's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flink_written import BASE, Kind, composite, pack, simple, top, utf

from stateformat.backends.foreign.flink.metadata import (
    KeyGroups,
    Metadata,
    Operator,
    Relative,
    Subtask,
    encode_metadata,
)
from stateformat.backends.foreign.framing import snappy_frames_encode

STATE = "org.apache.flink.runtime.state."
WINDOW = "org.apache.flink.streaming.api.windowing.windows.TimeWindow$Serializer$TimeWindowSerializerSnapshot"
VOID = simple("VoidNamespaceSerializer", STATE)
TIMER = "org.apache.flink.streaming.api.operators.TimerSerializerSnapshot"


@dataclass
class State:
    """One keyed state. Entries: key group, key, namespace, then what the layout has.

    ``value``: a value. ``map``: key and value. ``list``: a list. ``timers``: a moment in ms.
    """

    name: str
    layout: str
    value: Kind | None = None
    map_key: Kind | None = None
    namespace: Kind | None = None
    fixed: bool = True
    """Whether the namespace has a length in Flink."""
    entries: list[tuple[int, Any, Any, Any]] = field(default_factory=list)
    snapshot: bytes | None = None
    """Of the value serializer, where it is not the one that follows from the kinds."""

    def value_snapshot(self, key: Kind) -> bytes:
        if self.snapshot is not None:
            return self.snapshot
        if self.layout == "timers":
            return composite(TIMER, [key.snapshot, self.space_snapshot])
        assert self.value is not None
        if self.layout == "map":
            assert self.map_key is not None
            return composite(f"{BASE}MapSerializerSnapshot", [self.map_key.snapshot, self.value.snapshot])
        if self.layout == "list":
            return composite(f"{BASE}ListSerializerSnapshot", [self.value.snapshot])
        return self.value.snapshot

    @property
    def space_snapshot(self) -> bytes:
        return VOID if self.namespace is None else self.namespace.snapshot

    def space(self, namespace: Any) -> bytes:
        return b"\0" if self.namespace is None else self.namespace.write(namespace)


def header(key: Kind, states: Sequence[State], *, compressed: bool) -> bytes:
    """The header of a stream of keyed state, version 6."""
    found = pack("ib", 6, compressed) + top(key.snapshot) + pack("H", len(states))
    for state in states:
        timers = state.layout == "timers"
        found += utf(state.name) + pack("i", 3 if timers else 0)
        options = {} if timers else {"KEYED_STATE_TYPE": state.layout.upper()}
        found += pack("i", len(options)) + b"".join(utf(name) + utf(text) for name, text in options.items())
        roles = {"VALUE_SERIALIZER": state.value_snapshot(key)}
        if not timers:
            roles = {"NAMESPACE_SERIALIZER": state.space_snapshot, **roles}
        found += pack("i", len(roles)) + b"".join(utf(role) + top(snapshot) for role, snapshot in roles.items())
    return found


def moment(milliseconds: int) -> bytes:
    """A timer's time, which sorts by its bytes."""
    return pack("Q", milliseconds + (1 << 63))


def length(data: bytes) -> bytes:
    """A length as it stands behind keys: bytes, low first, at least one."""
    size, found = len(data), bytearray()
    while True:
        found.append(size & 0xFF)
        size >>= 8
        if not size:
            return bytes(found)


def canonical_entries(state: State, key: Kind, group: int, *, fixed_key: bool) -> list[tuple[bytes, bytes]]:
    """Keys without the number of their key group, and values."""
    found = []
    apart = not (fixed_key or state.fixed)
    for owner, own, namespace, content in state.entries:
        if owner != group:
            continue
        if state.layout == "timers":
            found.append((moment(content) + key.write(own) + state.space(namespace), b""))
            continue
        first, second = key.write(own), state.space(namespace)
        whole = first + (length(first) if apart else b"") + second + (length(second) if apart else b"")
        assert state.value is not None
        if state.layout == "map":
            assert state.map_key is not None
            inner, value = content
            written = b"\1" if value is None else b"\0" + state.value.write(value)
            found.append((whole + state.map_key.write(inner), written))
        elif state.layout == "list":
            found.append((whole, b",".join(state.value.write(item) for item in content)))
        else:
            found.append((whole, state.value.write(content)))
    return found


def canonical(key: Kind, states: Sequence[State], groups: int, *, fixed_key: bool, compressed: bool) -> Stream:
    """One stream in the canonical layout, and where key groups begin in it."""
    out, offsets = bytearray(header(key, states, compressed=compressed)), []
    size = 1 if groups <= 128 else 2
    for group in range(groups):
        present = [(n, canonical_entries(state, key, group, fixed_key=fixed_key)) for n, state in enumerate(states)]
        present = [(number, entries) for number, entries in present if entries]
        offsets.append(len(out) if present else 0)
        inner = bytearray()
        for place, (number, entries) in enumerate(present):
            if not place:
                inner += pack("h", number)
            for own, value in entries:
                whole = bytearray(group.to_bytes(size, "big") + own)
                last = own is entries[-1][0] and value is entries[-1][1]
                whole[0] |= 0x80 if last else 0
                inner += pack("i", len(whole)) + whole + pack("i", len(value)) + value
                if last:
                    inner += pack("h", present[place + 1][0] if place + 1 < len(present) else -1)
        out += snappy_frames_encode(bytes(inner)) if compressed and inner else inner
    return bytes(out), offsets


def heap(key: Kind, states: Sequence[State], groups: int, *, compressed: bool) -> Stream:
    """One stream in the layout of the hash-map backend."""
    out, offsets = bytearray(header(key, states, compressed=compressed)), []
    for group in range(groups):
        offsets.append(len(out))
        out += pack("i", group)
        for number, state in enumerate(states):
            entries = heap_entries(state, key, group)
            inner = pack("hi", number, len(entries)) + b"".join(entries)
            out += snappy_frames_encode(inner) if compressed else inner
    return bytes(out), offsets


def heap_entries(state: State, key: Kind, group: int) -> list[bytes]:
    found = []
    maps: dict[bytes, list[bytes]] = {}
    for owner, own, namespace, content in state.entries:
        if owner != group:
            continue
        before = state.space(namespace) + key.write(own)
        if state.layout == "timers":
            found.append(moment(content) + key.write(own) + state.space(namespace))
            continue
        assert state.value is not None
        if state.layout == "map":
            assert state.map_key is not None
            inner, value = content
            written = b"\1" if value is None else b"\0" + state.value.write(value)
            maps.setdefault(before, []).append(state.map_key.write(inner) + written)
        elif state.layout == "list":
            found.append(before + pack("i", len(content)) + b"".join(map(state.value.write, content)))
        else:
            found.append(before + state.value.write(content))
    return found + [before + pack("i", len(entries)) + b"".join(entries) for before, entries in maps.items()]


Stream = tuple[bytes, list[int]]


def savepoint(folder: Path, stream: Stream, code: int, groups: int) -> Path:
    """A savepoint of one operator with one subtask, which has this stream."""
    data, offsets = stream
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stream").write_bytes(data)
    handle = KeyGroups(code, 0, np.array(offsets, np.int64), Relative("stream", len(data)))
    operator = Operator(b"\7" * 16, "operator", "op", 1, groups, None, False, (Subtask(0, managed_keyed=handle),))
    (folder / "_metadata").write_bytes(encode_metadata(Metadata(6, 1, (), (operator,), b"")))
    return folder
