"""Tables of RocksDB for tests: an encoder that goes entry by entry, with bytes and loops alone."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import pyarrow as pa
import xxhash

from stateformat.backends.foreign.sst.table import Table, open_table

DELETE, PUT, MERGE, SINGLE_DELETE, RANGE = 0, 1, 2, 7, 15
Record = tuple[bytes, int, int, bytes]
"""Key, sequence number, type, value."""


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def internal(key: bytes, sequence: int, kind: int) -> bytes:
    return key + struct.pack("<Q", sequence << 8 | kind)


def block(pairs: Iterable[tuple[bytes, bytes]], interval: int = 16) -> bytes:
    body, restarts, last = bytearray(), [], b""
    for number, (key, value) in enumerate(pairs):
        shared = 0
        if number % interval == 0:
            restarts.append(len(body))
        else:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        body += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        last = key
    restarts = restarts or [0]
    return bytes(body) + struct.pack(f"<{len(restarts)}I", *restarts) + struct.pack("<I", len(restarts))


class Writer:
    """Appends blocks to a file: XXH3 checksums, format version 5."""

    def __init__(self, compression: int = 4) -> None:
        self.file = bytearray()
        self.compression = compression

    def add(self, raw: bytes, compression: int | None = None) -> bytes:
        kind = self.compression if compression is None else compression
        if kind == 4:
            body = varint(len(raw)) + pa.Codec("lz4_raw").compress(raw, asbytes=True)
        elif kind == 1:
            body = pa.Codec("snappy").compress(raw, asbytes=True)
        elif kind == 7:
            body = varint(len(raw)) + pa.Codec("zstd").compress(raw, asbytes=True)
        else:
            body = raw
        handle = varint(len(self.file)) + varint(len(body))
        check = xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF ^ kind * 0x6B9083D9 & 0xFFFFFFFF
        self.file += body + bytes([kind]) + struct.pack("<I", check)
        return handle


def table(
    records: Sequence[Record],
    *,
    family: str = "default",
    per_block: int = 7,
    interval: int = 3,
    compression: int = 4,
    ranges: Sequence[tuple[bytes, bytes, int]] = (),
    says: dict[str, int] | None = None,
    version: int = 5,
    merge: str = "StringAppendTESTOperator",
    writer: type[Writer] | None = None,
) -> bytes:
    """Encode records; they are sorted here. ``says`` replaces numbers of the properties."""
    ordered = sorted(records, key=lambda record: (record[0], -record[1]))
    out = (writer or Writer)(compression)
    index = []
    for first in range(0, len(ordered), per_block):
        some = [
            (internal(key, sequence, kind), value) for key, sequence, kind, value in ordered[first : first + per_block]
        ]
        index.append((some[-1][0], out.add(block(some, interval))))
    meta = {}
    if ranges:
        stones = sorted((internal(start, sequence, RANGE), end) for start, end, sequence in ranges)
        meta[b"rocksdb.range_del"] = out.add(block(stones, 1), 0)
    kinds = [kind for _, _, kind, _ in ordered]
    numbers = {
        "num.entries": len(ordered) + len(ranges),
        "deleted.keys": kinds.count(DELETE) + kinds.count(SINGLE_DELETE) + len(ranges),
        "merge.operands": kinds.count(MERGE),
        "num.range-deletions": len(ranges),
        "index.key.is.user.key": 0,
    }
    properties = {f"rocksdb.{name}".encode(): varint(number) for name, number in (numbers | (says or {})).items()}
    properties[b"rocksdb.column.family.name"] = family.encode()
    properties[b"rocksdb.merge.operator"] = merge.encode()
    properties[b"rocksdb.comparator"] = b"leveldb.BytewiseComparator"
    meta[b"rocksdb.properties"] = out.add(block(sorted(properties.items()), 1000), 0)
    places = out.add(block(index, 1)) if index else out.add(block([], 1), 0)
    metaindex = out.add(block(sorted(meta.items()), 1), 0)
    footer = bytes([4]) + (metaindex + places).ljust(40, b"\0") + struct.pack("<IQ", version, 0x88E241B785F4CFF7)
    return bytes(out.file) + footer


def opened(octets: bytes, path: str = "000001.sst") -> Table:
    """Open a table that lies in memory."""
    return open_table(lambda at, length: octets[at : at + length], len(octets), path)


def model(records: Iterable[Record], ranges: Iterable[tuple[bytes, bytes, int]] = ()) -> dict[bytes, bytes]:
    """What RocksDB says of records: one after another by sequence number, in a dict."""
    steps = [(sequence, kind, key, value) for key, sequence, kind, value in records]
    steps += [(sequence, RANGE, start, end) for start, end, sequence in ranges]
    found: dict[bytes, bytes] = {}
    for _, kind, key, value in sorted(steps):
        if kind == PUT:
            found[key] = value
        elif kind == MERGE:
            found[key] = found[key] + b"," + value if key in found else value
        elif kind == RANGE:
            for other in [other for other in found if key <= other < value]:
                del found[other]
        else:
            found.pop(key, None)
    return dict(sorted(found.items()))
