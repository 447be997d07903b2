"""Writes RocksDB's files: a table of sorted entries, and the manifest that names tables.

Format: RocksDB 9.8, which Spark 4.3 has: block-based tables of ``format_version`` 5 with a plain
binary-search index, LZ4 blocks and XXH3 checksums; a manifest is a log of version edits. No bloom
filter: RocksDB makes one when it compacts. Loops go over blocks, never over entries.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ...byte_strings import ByteStrings, Octets
from ...framing import crc32c

BLOCK_BYTES: Final = 16 << 10
_MAGIC: Final = 0x88E241B785F4CFF7
_FORMAT_VERSION: Final = 5
_XXH3: Final = 4
_LZ4, _STORED = 4, 0
_PUT: Final = 1
_RESTART_ENTRIES: Final = 16
_LAST_BYTE: Final = 0x6B9083D9
_LANES_MAX: Final = 16
COMPARATOR: Final = b"leveldb.BytewiseComparator"


@dataclass(frozen=True)
class TableFile:
    """A table, and its description in a manifest."""

    data: bytes
    """Empty if only the description is left."""
    size: int
    smallest: bytes
    largest: bytes
    """The first and the last internal key."""
    sequence: int
    """The sequence number of all entries."""

    def described(self) -> TableFile:
        """Return what a manifest needs of it."""
        return replace(self, data=b"")


def table_file(keys: ByteStrings, values: ByteStrings, sequence: int) -> TableFile:
    """Return a table of entries, written with one sequence number; at least one entry.

    ``keys`` may be in any order, each once.
    """
    order = sorted_by_bytes(keys)
    keys, values = keys.take(order), values.take(order)
    trailer = struct.pack("<Q", sequence << 8 | _PUT)
    entries, sizes = _entries(keys, values, trailer)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    # An entry belongs to the block that its first byte is in.
    block = starts // BLOCK_BYTES
    lasts = np.flatnonzero(np.append(block[1:] != block[:-1], True))
    data, places, lasts_in = bytearray(), [], keys.take(lasts).to_arrow()
    begin = first = 0
    for last in lasts.tolist():
        end = int(ends[last])
        restarts = starts[first : last + 1 : _RESTART_ENTRIES] - begin
        places.append(_append(data, _block(entries[begin:end], restarts)))
        begin, first = end, last + 1
    index = [(key.as_py() + trailer, _handle(place)) for key, place in zip(lasts_in, places, strict=True)]
    size_of_data = len(data)
    index_at = _append(data, _block_of(index), pack=False)
    about = _properties(keys, values, size_of_data, index_at[1], len(places))
    properties_at = _append(data, _block_of(about), pack=False)
    metaindex_at = _append(data, _block_of([(b"rocksdb.properties", _handle(properties_at))]), pack=False)
    handles = _handle(metaindex_at) + _handle(index_at)
    data += bytes([_XXH3]) + handles.ljust(40, b"\0") + struct.pack("<IQ", _FORMAT_VERSION, _MAGIC)
    ends_of_keys = [keys.take(np.array([at])).to_arrow()[0].as_py() + trailer for at in (0, len(keys) - 1)]
    return TableFile(bytes(data), len(data), ends_of_keys[0], ends_of_keys[1], sequence)


def sorted_by_bytes(keys: ByteStrings) -> npt.NDArray[np.int64]:
    """Return the ascending order of byte strings, all different."""
    width = int(keys.length[0]) if len(keys) else 0
    if not width or width > _LANES_MAX * 8 or (keys.length != width).any():
        order: npt.NDArray[np.int64] = pc.sort_indices(keys.to_arrow()).to_numpy().astype(np.int64)
        return order
    # Of one length, as big-endian numbers; most words of rows are the same in all keys.
    lanes = np.zeros((len(keys), -(-width // 8) * 8), np.uint8)
    lanes[:, :width] = keys.data[keys.start[:, None] + np.arange(width)]
    words = lanes.view(">u8").astype(np.uint64).T
    different = [word for word in words if (word != word[0]).any()]
    if len(different) <= 1:
        return np.argsort(different[0] if different else np.zeros(len(keys)), kind="stable")
    return np.lexsort(different[::-1])


def manifest(tables: Sequence[TableFile], numbers: Sequence[int], own_number: int) -> bytes:
    """Return the bytes of the ``MANIFEST`` of a database of these tables, all on level 0."""
    next_number = max([own_number, *numbers]) + 1
    last = max([0, *(table.sequence for table in tables)])
    edits = [
        b"\x01" + _sized(COMPARATOR),
        b"\x02" + varint(0) + b"\x03" + varint(next_number) + b"\x04" + varint(last),
    ]
    for table, number in zip(tables, numbers, strict=True):
        sequences = varint(table.sequence) * 2
        described = varint(0) + varint(number) + varint(table.size)
        edits.append(varint(100) + described + _sized(table.smallest) + _sized(table.largest) + sequences)
    return log_file(edits)


def log_file(records: Iterable[bytes]) -> bytes:
    """Return records in RocksDB's log format: blocks of 32 KiB, records cut where a block ends."""
    data = bytearray()
    for record in records:
        rest, begun = record, False
        while True:
            room = 32768 - len(data) % 32768
            if room < 7:
                data += bytes(room)
                continue
            piece, rest = rest[: room - 7], rest[room - 7 :]
            kind = {(False, False): 1, (False, True): 2, (True, True): 3, (True, False): 4}[begun, bool(rest)]
            checked = bytes([kind]) + piece
            check = int(crc32c(np.frombuffer(checked, np.uint8), np.array([len(checked)], np.int64))[0])
            masked = ((check >> 15 | check << 17) + 0xA282EAD8) & 0xFFFFFFFF
            data += struct.pack("<IHB", masked, len(piece), kind) + piece
            begun = True
            if not rest:
                break
    return bytes(data)


def varint(number: int) -> bytes:
    """Return a number as RocksDB's varint: seven bits a byte, low ones first."""
    octets = bytearray()
    while number > 0x7F:
        octets.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*octets, number])


def varints(numbers: npt.NDArray[np.int64]) -> ByteStrings:
    """Return each number as a varint."""
    lanes, length = np.zeros((len(numbers), 10), np.uint8), np.ones(len(numbers), np.int64)
    rest = numbers.astype(np.uint64)
    for at in range(10):
        lanes[:, at] = (rest & np.uint64(0x7F)).astype(np.uint8)
        rest >>= np.uint64(7)
        more = rest > 0
        if not more.any():
            break
        lanes[more, at] |= 0x80
        length[more] += 1
    return ByteStrings(lanes.reshape(-1), np.arange(len(numbers), dtype=np.int64) * 10, length)


def _entries(keys: ByteStrings, values: ByteStrings, trailer: bytes) -> tuple[Octets, npt.NDArray[np.int64]]:
    """Return the entries of a table, no key sharing a prefix, and the size of each."""
    key_size, value_size = varints(keys.length + len(trailer)), varints(values.length)
    sizes = 1 + key_size.length + value_size.length + keys.length + len(trailer) + values.length
    total = int(sizes.sum())
    # Offsets of 32 bits are enough for nearly all tables, and save a copy of everything.
    kind = pa.binary() if total < 1 << 31 else pa.large_binary()
    begin, end = pa.scalar(b"\0", kind), pa.scalar(b"", kind)
    parts = [
        one if isinstance(one, pa.Scalar) else one.to_arrow().cast(kind)
        for one in (begin, key_size, value_size, keys, pa.scalar(trailer, kind), values)
    ]
    joined = pc.binary_join_element_wise(*parts, end)
    return np.frombuffer(joined.buffers()[2], np.uint8, total), sizes


def _block(content: Octets | bytes, restarts: npt.NDArray[Any]) -> bytes:
    return bytes(content) + restarts.astype("<u4").tobytes() + struct.pack("<I", len(restarts))


def _block_of(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return a small block; every entry is a restart point."""
    content, starts = bytearray(), []
    for key, value in entries:
        starts.append(len(content))
        content += b"\0" + varint(len(key)) + varint(len(value)) + key + value
    return _block(bytes(content), np.array(starts or [0]))


def _append(data: bytearray, block: bytes, *, pack: bool = True) -> tuple[int, int]:
    """Append a block with its trailer. Returns its place: offset and size."""
    kind, body = _STORED, block
    if pack:
        packed = varint(len(block)) + pa.Codec("lz4_raw").compress(block, asbytes=True)
        if len(packed) < len(block):
            kind, body = _LZ4, packed
    check = xxhash.xxh3_64_intdigest(body) & 0xFFFFFFFF ^ (kind * _LAST_BYTE & 0xFFFFFFFF)
    place = len(data), len(body)
    data += body + struct.pack("<BI", kind, check)
    return place


def _handle(place: tuple[int, int]) -> bytes:
    return varint(place[0]) + varint(place[1])


def _sized(data: bytes) -> bytes:
    return varint(len(data)) + data


def _properties(
    keys: ByteStrings, values: ByteStrings, data_size: int, index_size: int, blocks: int
) -> list[tuple[bytes, bytes]]:
    """Return the properties of a table, ascending by name."""
    numbers = {
        "column.family.id": 0,
        "data.size": data_size,
        "deleted.keys": 0,
        "filter.size": 0,
        "fixed.key.length": 0,
        "format.version": 0,
        "index.key.is.user.key": 0,
        "index.size": index_size,
        "index.value.is.delta.encoded": 0,
        "merge.operands": 0,
        "num.data.blocks": blocks,
        "num.entries": len(keys),
        "num.range-deletions": 0,
        "raw.key.size": int(keys.length.sum()) + 8 * len(keys),
        "raw.value.size": int(values.length.sum()),
    }
    texts = {
        "block.based.table.index.type": struct.pack("<I", 0),
        "block.based.table.prefix.filtering": b"0",
        "block.based.table.whole.key.filtering": b"1",
        "column.family.name": b"default",
        "comparator": COMPARATOR,
        "compression": b"LZ4",
        "merge.operator": b"StringAppendOperator",
        "prefix.extractor.name": b"nullptr",
        "property.collectors": b"[]",
    }
    found = {**{name: varint(number) for name, number in numbers.items()}, **texts}
    return sorted((f"rocksdb.{name}".encode(), value) for name, value in found.items())
