"""Canonical savepoints of one keyed state, written byte by byte for the benchmarks."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from stateformat.backends.foreign.flink.metadata import (
    KeyGroups,
    Metadata,
    Operator,
    Relative,
    Subtask,
    encode_metadata,
)

GROUPS = 128
STREAM = "stream"
_BASE = "org.apache.flink.api.common.typeutils.base"
_MAGIC = 0x4F2C69A3D70


def utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def simple(name: str) -> bytes:
    """The snapshot of a serializer of one of Java's own types."""
    return utf(f"{_BASE}.{name}Serializer${name}SerializerSnapshot") + struct.pack(">i", 3)


def pojo(fields: dict[str, str]) -> bytes:
    """The snapshot of a POJO's serializer."""
    found = utf("org.apache.flink.api.java.typeutils.runtime.PojoSerializerSnapshot") + struct.pack(">i", 2)
    found += utf("example.Account") + struct.pack(">qi", _MAGIC, len(fields))
    for name, kind in fields.items():
        blob = simple(kind) if kind else kryo("java.util.List")
        found += utf(name) + b"\0\1" + struct.pack(">i", len(blob)) + blob
    return found + 2 * struct.pack(">qi", _MAGIC, 0)


def kryo(name: str) -> bytes:
    """The snapshot of Flink 1's serializer for a class that it does not know."""
    found = utf("org.apache.flink.api.java.typeutils.runtime.kryo.KryoSerializerSnapshot") + struct.pack(">i", 2)
    return found + utf(name) + 3 * struct.pack(">qi", _MAGIC, 0)


def header(key: bytes, value: bytes) -> bytes:
    """The header of a stream with the value state ``state``."""
    namespace = utf("org.apache.flink.runtime.state.VoidNamespaceSerializer$VoidNamespaceSerializerSnapshot")
    roles = {"NAMESPACE_SERIALIZER": namespace + struct.pack(">i", 3), "VALUE_SERIALIZER": value}
    found = struct.pack(">ib", 6, 0) + struct.pack(">i", 2) + key + struct.pack(">H", 1)
    found += utf("state") + struct.pack(">ii", 0, 1) + utf("KEYED_STATE_TYPE") + utf("VALUE")
    found += struct.pack(">i", len(roles))
    return found + b"".join(utf(role) + struct.pack(">i", 2) + snapshot for role, snapshot in roles.items())


def text(value: str) -> bytes:
    """An ASCII string of up to 126 characters, as Flink writes it."""
    return bytes([len(value) + 1]) + value.encode()


def account(number: int) -> bytes:
    """A POJO of five fields."""
    owner, city = text(f"owner {number}"), text("city" * (number % 7))
    fields = struct.pack(">q", number), owner, struct.pack(">d", number / 8), struct.pack(">i", number % 99), city
    return b"\x02" + b"".join(b"\0" + field for field in fields)


def tagged(number: int) -> bytes:
    """A POJO of a number, a string and an ``ArrayList`` of three strings, which Kryo writes."""
    tags = [f"tag {number % 97}", f"label {number % 1009}", f"mark {number}"]
    written = b"".join(b"\3\1" + tag[:-1].encode() + bytes([ord(tag[-1]) | 0x80]) for tag in tags)
    listed = b"\1\0java.util.ArrayLis" + bytes([ord("t") | 0x80]) + b"\1\3" + written
    return b"\2" + b"".join(b"\0" + field for field in (struct.pack(">q", number), text(f"owner {number}"), listed))


LISTED = "string → POJO of a long, a string and a list of three, in Kryo"
KINDS = {
    "long → long": (simple("Long"), simple("Long")),
    "string → string": (simple("String"), simple("String")),
    "string → POJO of five fields": (
        simple("String"),
        pojo({"number": "Long", "owner": "String", "balance": "Double", "rate": "Int", "city": "String"}),
    ),
    LISTED: (simple("String"), pojo({"number": "Long", "owner": "String", "tags": ""})),
}


def entries(kind: str, count: int) -> list[tuple[bytes, bytes]]:
    """Keys and values as bytes; sizes of strings differ."""
    draw = np.random.default_rng(0)
    numbers = draw.integers(0, 1 << 40, count).tolist()
    if kind == "long → long":
        return [(struct.pack(">q", number), struct.pack(">q", number * 3)) for number in numbers]
    keys = [text(f"key-{number}") for number in numbers]
    if kind == "string → string":
        return [(key, text("v" * (60 + number % 60))) for key, number in zip(keys, numbers, strict=True)]
    if kind == LISTED:
        return [(key, tagged(number)) for key, number in zip(keys, numbers, strict=True)]
    return [(key, account(number)) for key, number in zip(keys, numbers, strict=True)]


def write_savepoint(folder: Path, kind: str, count: int) -> None:
    """Write a savepoint of one operator with one subtask, its entries evenly over key groups."""
    stream = bytearray(header(*KINDS[kind]))
    every = entries(kind, count)
    offsets = []
    for group in range(GROUPS):
        some = every[group * count // GROUPS : (group + 1) * count // GROUPS]
        offsets.append(len(stream))
        stream += b"\0\0"
        for key, value in some[:-1]:
            stream += struct.pack(">ib", len(key) + 2, group) + key + b"\0" + struct.pack(">i", len(value)) + value
        key, value = some[-1]
        stream += struct.pack(">iB", len(key) + 2, group | 0x80) + key + b"\0"
        stream += struct.pack(">i", len(value)) + value + b"\xff\xff"
    folder.mkdir()
    (folder / STREAM).write_bytes(stream)
    handle = KeyGroups(7, 0, np.array(offsets, np.int64), Relative(STREAM, len(stream)))
    subtask = Subtask(0, managed_keyed=handle)
    operator = Operator(bytes(16), "operator", "operator", 1, GROUPS, None, False, (subtask,))
    metadata = Metadata(4 if kind == LISTED else 6, 1, (), (operator,), b"")
    (folder / "_metadata").write_bytes(encode_metadata(metadata))
