"""Descriptions of Flink's that are small and would be large if they were followed, by hand."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tests.foreign.flink_written import RUNTIME, avro_snapshot, nested, pack, simple, top, utf, versioned

SQL = "org.apache.flink.table.runtime.typeutils."
LOGICAL = "org.apache.flink.table.types.logical."
LONG = simple("LongSerializer")
VOID = versioned("org.apache.flink.runtime.state.VoidNamespaceSerializer$VoidNamespaceSerializerSnapshot", 3)


def header(states: list[tuple[str | bytes, bytes]], key: bytes = LONG) -> bytes:
    """A header of value states, by names and snapshots."""
    found = bytearray(pack("ib", 6, 0) + top(key) + pack("H", len(states)))
    for name, snapshot in states:
        raw = name if isinstance(name, bytes) else name.encode()
        found += pack("H", len(raw)) + raw + pack("ii", 0, 1) + utf("KEYED_STATE_TYPE") + utf("VALUE") + pack("i", 2)
        found += utf("NAMESPACE_SERIALIZER") + top(VOID) + utf("VALUE_SERIALIZER") + top(snapshot)
    return bytes(found)


def files(stream: bytes, offsets: list[int], size: int | None = None, **operator: Any) -> dict[str, bytes]:
    """A savepoint of one subtask, whose keyed state is in the hash-map backend's layout."""
    said = len(stream) if size is None else size
    groups = pack("b", 3) + pack("ii", 0, len(offsets)) + pack(f"{len(offsets)}q", *offsets)
    keyed = groups + pack("b", 6) + utf("stream") + pack("q", said)
    return {"_metadata": metadata([one_operator(keyed, limit=len(offsets), **operator)]), "stream": stream}


def one_operator(
    keyed: bytes, limit: int = 1, parallelism: int = 1, identity: int = 7, uid: bytes = b"op", name: bytes = b"x"
) -> bytes:
    """An operator of which one subtask reported."""
    subtask = pack("iii", 0, 0, 0) + keyed + b"\0" + pack("ii", 0, 0)
    named = pack("H", len(name)) + name + pack("H", len(uid)) + uid
    return named + pack("qqii", 0, identity, parallelism, limit) + b"\0" + pack("i", 1) + subtask


def metadata(operators: list[bytes], version: int = 6) -> bytes:
    """A whole ``_metadata``."""
    return pack("Iiqii", 0x4960672D, version, 1, 0, len(operators)) + b"".join(operators)


class _Java:
    """A Java object stream of which types are made."""

    def __init__(self) -> None:
        self.out = bytearray(b"\xac\xed\0\5")
        self.handles = 0
        self.classes: dict[str, int] = {}

    def handle(self) -> int:
        self.handles += 1
        return 0x7E0000 + self.handles - 1

    def begin(self, name: str, fields: list[str], flags: int = 2) -> int:
        self.out += b"\x73"
        if name in self.classes:
            self.out += b"\x71" + pack("i", self.classes[name])
            return self.handle()
        self.out += b"\x72" + utf(name) + bytes(8)
        self.classes[name] = self.handle()
        self.out += bytes([flags]) + pack("H", len(fields))
        for field in fields:
            self.out += b"L" + utf(field) + b"\x74" + utf("Lx;")
            self.handle()
        self.out += b"\x78\x70"
        return self.handle()

    def text(self, text: str) -> None:
        self.out += b"\x74" + utf(text)
        self.handle()

    def row(self, level: int, width: int) -> int:
        """A row of which all fields are one object, a row of the level below."""
        if not level:
            return self.begin(LOGICAL + "IntType", [])
        mine = self.begin(LOGICAL + "RowType", ["fields"])
        self.begin("java.util.ArrayList", [], 3)
        below = 0
        for number in range(width):
            self.begin(LOGICAL + "RowField", ["name", "type"])
            self.text(f"f{number}")
            if number:
                self.out += b"\x71" + pack("i", below)
            else:
                below = self.row(level - 1, width)
        self.out += b"\x78"
        return mine


def shared_rows(levels: int, width: int = 2) -> bytes:
    """A SQL row whose type has ``width ** levels`` columns, in some 40 bytes a level and field."""
    java = _Java()
    java.row(levels, width)
    return versioned(
        SQL + "RowDataSerializer$RowDataSerializerSnapshot", 3, pack("i", 1) + bytes(java.out) + nested(LONG)
    )


def shared_records(levels: int, width: int = 2) -> bytes:
    """An Avro record that names the record before it ``width`` times, level upon level."""
    made = [{"name": "R0", "type": "record", "fields": [{"name": "x", "type": "int"}]}]
    for level in range(1, levels):
        fields = [{"name": f"f{number}", "type": f"R{level - 1}"} for number in range(width)]
        made.append({"name": f"R{level}", "type": "record", "fields": fields})
    fields = [{"name": f"f{number}", "type": one} for number, one in enumerate(made)]
    return avro_snapshot({"name": "T", "type": "record", "fields": fields})


def many_subclasses(count: int) -> bytes:
    """A POJO of which each subclass has a field of one name and another type."""
    magic = struct.pack(">q", 0x4F2C69A3D70)

    def described(name: str, field: str, serializer: bytes) -> bytes:
        fields = magic + pack("i", 1) + utf(field) + b"\0\1" + pack("i", len(serializer)) + serializer
        empty = magic + pack("i", 0)
        return versioned(RUNTIME + "PojoSerializerSnapshot", 2, utf(name) + fields + 2 * empty)

    entries = b""
    for number in range(count):
        inner = described(f"a.I{number}", f"i{number}", LONG)
        whole = described(f"a.C{number}", "same", inner)
        entries += utf(f"a.C{number}") + b"\0\1" + pack("i", len(whole)) + whole
    body = utf("a.Base") + magic + pack("i", 0) + magic + pack("i", count) + entries + magic + pack("i", 0)
    return versioned(RUNTIME + "PojoSerializerSnapshot", 2, body)


SHAPES: dict[str, Callable[[int], bytes]] = {
    "rows that share": shared_rows,
    "wide rows that share": lambda levels: shared_rows(levels, 9),
    "records that share": shared_records,
    "wide records that share": lambda levels: shared_records(levels, 7),
    "records beside one another": lambda levels: shared_records(levels, 1),
    "subclasses": lambda levels: many_subclasses(8 * levels),
}
"""By a number of levels."""
