"""The files of one partition of a state store, written from entries that were read elsewhere.

For the default store one ``V.snapshot``; for RocksDB ``V.zip`` and its tables, a database with
nothing else in it. Entries are passed on as *pieces*: for the default store whole compressed
frames, so a file is its pieces one after another; for RocksDB batches of keys and values.

Tables and manifest are RocksDB 9.8's, which Spark 4.3 has: block-based tables of ``format_version``
5 with a plain binary-search index, LZ4 blocks and XXH3 checksums; a manifest is a log of version
edits. No bloom filter: RocksDB makes one when it compacts. Loops go over blocks, never over
entries.

RocksDB keys of stores with ``numColsPrefixKey`` are two rows, the first columns and the rest. An
``UnsafeRow`` is null bits, a word for each column, and the bytes that do not fit in a word, in the
order of the columns: both parts take adjacent bytes of each region, and only offsets change.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from stateformat.errors import StorageError
from stateformat.storage import Storage

from ...byte_strings import ByteStrings, Octets, cut, from_arrow
from ...framing import crc32c, spark_encode, spark_joined

Mask = npt.NDArray[np.bool_]


def split_rows(rows: ByteStrings, columns: int, first: int, by_offset: Sequence[bool]) -> tuple[pa.Array, pa.Array]:
    """Return the rows of the first columns, and those of the rest, as ``binary``.

    Args:
        rows: whole rows of ``columns`` columns, each judged by a decoder before.
        columns: how many columns they have.
        first: how many of them the first part has; at least one, and not all.
        by_offset: for each column whether its word is an offset and a size.
    """
    bits = _null_bits(rows, columns)
    words = _words(rows, columns)
    head = _fixed_size(columns)
    offsets = [words[:, at] >> 32 for at in range(columns)]
    # Where the rest begins: at the first of its columns that has bytes.
    border = rows.length.copy()
    for at in range(first, columns):
        if by_offset[at]:
            border = np.where(offsets[at] > 0, np.minimum(border, offsets[at]), border)
    start = np.full(len(rows), head, np.int64)
    parts = []
    for chosen, begin, end in ((slice(0, first), start, border), (slice(first, columns), border, rows.length)):
        count = chosen.stop - chosen.start
        kept = words[:, chosen].copy()
        for at, moves in enumerate(by_offset[chosen]):
            if moves:
                shift = _fixed_size(count) - begin
                kept[:, at] += np.where(kept[:, at] >> 32 > 0, shift << 32, 0)
        fixed = np.concatenate([_packed(bits[:, chosen]), kept.view(np.uint8).reshape(len(rows), -1)], axis=1)
        beyond = ByteStrings(rows.data, rows.start + begin, end - begin)
        parts.append(_joined(fixed, beyond))
    return parts[0], parts[1]


def prefixed_keys(rows: ByteStrings, columns: int, first: int, by_offset: Sequence[bool]) -> pa.Array:
    """Return keys as Spark's RocksDB store has them if ``first`` columns are a prefix.

    Size (little-endian) of the prefix row with its version byte, a version byte, the prefix row; a
    version byte, the row of the rest.
    """
    if first == columns:
        raise ValueError("all columns are prefix columns")
    head, rest = split_rows(rows, columns, first, by_offset)
    size = pc.binary_length(head).to_numpy() + 1
    sizes = pa.Array.from_buffers(pa.binary(4), len(rows), [None, pa.py_buffer(size.astype("<i4"))])
    version = pa.scalar(b"\0", pa.binary())
    return pc.binary_join_element_wise(sizes.cast(pa.binary()), version, head, version, rest, b"")


def _fixed_size(columns: int) -> int:
    return 8 * (-(-columns // 64) + columns)


def _null_bits(rows: ByteStrings, columns: int) -> Mask:
    size = 8 * -(-columns // 64)
    taken = rows.data[rows.start[:, None] + np.arange(size)]
    return np.unpackbits(taken, axis=1, bitorder="little")[:, :columns].astype(np.bool_)


def _packed(bits: Mask) -> Octets:
    size = 8 * -(-bits.shape[1] // 64)
    packed = np.packbits(bits, axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, size - packed.shape[1])))


def _words(rows: ByteStrings, columns: int) -> npt.NDArray[np.int64]:
    begin = rows.start + 8 * -(-columns // 64)
    taken = rows.data[begin[:, None] + np.arange(8 * columns)]
    return np.ascontiguousarray(taken).view("<i8").reshape(len(rows), columns)


def _joined(fixed: Octets, beyond: ByteStrings) -> pa.Array:
    width = fixed.shape[1]
    whole = pa.py_buffer(np.ascontiguousarray(fixed))
    head = pa.Array.from_buffers(pa.binary(width), len(fixed), [None, whole]).cast(pa.binary())
    return pc.binary_join_element_wise(head, beyond.to_arrow(), b"")


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
    ends_of_keys = [keys.bytes(at) + trailer for at in (0, len(keys) - 1)]
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


FRAMES: Final = pa.schema([pa.field("frames", pa.binary(), nullable=False)])
"""Pieces of the default store: a row is a stream of frames, compressed."""
ENTRIES: Final = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
"""Pieces of RocksDB: its own keys and values."""
PIECE_BYTES: Final = 16 << 20
"""The most that one row of frames, or one batch of entries, has before compression."""
TABLE_BYTES: Final = 32 << 20
"""How many bytes of entries one table takes into memory."""
END: Final = struct.pack(">i", -1)
"""What a chain of entries ends with."""
_FIRST_TABLE: Final = 10
_MANIFEST: Final = 5
_EPOCH: Final = (1980, 1, 1, 0, 0, 0)


def framed(keys: ByteStrings, values: ByteStrings) -> ByteStrings:
    """Return entries as the default store frames them: a size and the key, a size and the value.

    If they are already framed like that in one buffer, nothing is copied.
    """
    whole = _where_they_stand(keys, values)
    if whole is not None:
        return whole
    sizes = [_big_endian(some.length) for some in (keys, values)]
    parts = [sizes[0], keys.to_arrow(), sizes[1], values.to_arrow()]
    large = [part.cast(pa.large_binary()) for part in parts]
    joined = pc.binary_join_element_wise(*large, pa.scalar(b"", pa.large_binary()))
    length = keys.length + values.length + 8
    return ByteStrings(np.frombuffer(joined.buffers()[2], np.uint8), np.cumsum(length) - length, length)


def _where_they_stand(keys: ByteStrings, values: ByteStrings) -> ByteStrings | None:
    same = keys.data.ctypes.data == values.data.ctypes.data and len(keys.data) == len(values.data)
    if not (same and len(keys) and int(keys.start.min()) >= 4):
        return None
    if not np.array_equal(keys.start + keys.length + 4, values.start):
        return None
    before = [ByteStrings(some.data, some.start - 4, some.length).fixed(0, ">i4") for some in (keys, values)]
    if not (np.array_equal(before[0], keys.length) and np.array_equal(before[1], values.length)):
        return None
    return ByteStrings(keys.data, keys.start - 4, keys.length + values.length + 8)


def _big_endian(numbers: npt.NDArray[np.int64]) -> pa.Array:
    return pa.Array.from_buffers(pa.binary(4), len(numbers), [None, pa.py_buffer(numbers.astype(">i4"))]).cast(
        pa.binary()
    )


def frame_pieces(
    rows: ByteStrings, targets: npt.NDArray[np.int64], codec: str
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Sort framed entries by target; yields target, number of entries, and :data:`FRAMES`."""
    # Up to 16 bits numpy sorts by radix.
    order = np.argsort(targets.astype(np.uint16), kind="stable")
    data = rows.take(order).packed()
    ends = np.cumsum(rows.length[order])
    present, starts = np.unique(targets[order], return_index=True)
    stops = [*starts[1:].tolist(), len(order)]
    for target, start, stop in zip(present.tolist(), starts.tolist(), stops, strict=True):
        begin, end = int(ends[start - 1]) if start else 0, int(ends[stop - 1])
        for at in range(begin, end, PIECE_BYTES):
            frames = spark_encode(codec, data[at : min(at + PIECE_BYTES, end)])
            batch = pa.record_batch([pa.array([frames], pa.binary())], schema=FRAMES)
            yield target, stop - start if at == begin else 0, batch


def entry_pieces(
    keys: ByteStrings, values: ByteStrings, targets: npt.NDArray[np.int64]
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Sort entries of RocksDB by target; yields target, number of entries, :data:`ENTRIES`."""
    order = np.argsort(targets.astype(np.uint16), kind="stable")
    present, starts = np.unique(targets[order], return_index=True)
    stops = [*starts[1:].tolist(), len(order)]
    for target, start, stop in zip(present.tolist(), starts.tolist(), stops, strict=True):
        chosen = order[start:stop]
        for first, last in cut(keys.length[chosen] + values.length[chosen], PIECE_BYTES):
            some = chosen[first:last]
            batch = pa.record_batch([keys.take(some).to_arrow(), values.take(some).to_arrow()], schema=ENTRIES)
            yield target, len(some), batch


def write_snapshot(
    folder: Storage, place: str, version: int, codec: str, pieces: Iterable[pa.RecordBatch]
) -> tuple[int, int]:
    """Write ``place/V.snapshot`` from pieces; returns how many files and bytes."""
    streams = (row.as_buffer() for piece in pieces for row in piece["frames"])

    def whole() -> Iterator[Any]:
        yield from streams
        yield spark_encode(codec, END)

    return 1, write_file(folder, f"{place}/{version}.snapshot", spark_joined(codec, whole()))


def write_database(
    folder: Storage,
    place: str,
    name: str,
    pieces: Iterable[pa.RecordBatch],
    about: Mapping[str, Any],
    internal: Sequence[int],
    unique: UUID,
) -> tuple[int, int]:
    """Write ``place/NAME.zip`` and its tables, from pieces of entries; returns files and bytes.

    Args:
        folder: where to write.
        place: the folder of the partition.
        name: ``V``, or ``V_<id>`` in checkpoint format 2.
        pieces: batches of :data:`ENTRIES`; no key twice.
        about: members of Spark's metadata beside the tables: number of keys, column families.
        internal: the numbers of the column families whose keys Spark counts apart.
        unique: from which the names of the tables in the checkpoint are made.
    """
    tables: list[TableFile] = []
    listed, size, apart = [], 0, 0
    for batch in _gathered_entries(pieces):
        keys, values = (from_arrow(batch.column(at)) for at in (0, 1))
        apart += int(np.isin(keys.fixed(0, "<u2"), internal).sum()) if internal else 0
        number = _FIRST_TABLE + len(tables)
        table = table_file(keys, values, len(tables) + 1)
        stored = f"{number:06}-{UUID(int=unique.int ^ number)}.sst"
        size += write_file(folder, f"{place}/SSTs/{stored}", [table.data])
        listed.append({"localFileName": f"{number:06}.sst", "dfsSstFileName": stored, "sizeBytes": len(table.data)})
        tables.append(table.described())
    numbers = [_FIRST_TABLE + at for at in range(len(tables))]
    counts = {"numKeys": about["numKeys"] - apart, **({"numInternalKeys": apart} if "numInternalKeys" in about else {})}
    metadata = json.dumps({"sstFiles": listed, **about, **counts}, separators=(",", ":"))
    files = {
        f"MANIFEST-{_MANIFEST:06}": manifest(tables, numbers, _MANIFEST),
        "CURRENT": f"MANIFEST-{_MANIFEST:06}\n".encode(),
        "metadata": f"v1\n{metadata}".encode(),
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for inside, data in files.items():
            archive.writestr(zipfile.ZipInfo(inside, _EPOCH), data, zipfile.ZIP_DEFLATED)
    size += write_file(folder, f"{place}/{name}.zip", [packed.getvalue()])
    return 1 + len(tables), size


def write_file(folder: Storage, path: str, parts: Iterable[Any]) -> int:
    """Write a file and return its size. One that an earlier attempt has written stays."""
    size = 0
    try:
        with folder.open_output(path) as output:
            for part in parts:
                size += output.write(part)
    except StorageError:
        # A task that runs twice writes the same bytes.
        if not size or _size_of(folder, path) != size:
            raise
    return size


def _size_of(folder: Storage, path: str) -> int:
    try:
        return folder.size(path)
    except FileNotFoundError:
        return -1


def _gathered_entries(pieces: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches of about :data:`TABLE_BYTES`."""
    waiting: list[pa.RecordBatch] = []
    held = 0
    for piece in pieces:
        if not piece.num_rows:
            continue
        waiting.append(piece)
        held += piece.nbytes
        if held >= TABLE_BYTES:
            yield pa.concat_batches(waiting)
            waiting, held = [], 0
    if waiting:
        yield pa.concat_batches(waiting)
