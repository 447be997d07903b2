"""The files of one partition of a state store, written from entries that were read elsewhere.

For the default store one ``V.snapshot``; for RocksDB ``V.zip`` and its tables, a database with
nothing else in it. Entries are passed on as *pieces*: for the default store whole compressed
frames, so a file is its pieces one after another; for RocksDB batches of keys and values.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import StorageError
from stateformat.storage import Storage

from ...byte_strings import ByteStrings, Octets, from_arrow
from ...framing import spark_encode, spark_joined
from .table_files import TableFile, manifest, table_file

FRAMES: Final = pa.schema([pa.field("frames", pa.binary(), nullable=False)])
"""Pieces of the default store: a row is a stream of frames, compressed."""
ENTRIES: Final = pa.schema([pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())])
"""Pieces of RocksDB: its own keys and values."""
PIECE_BYTES: Final = 16 << 20
"""The most that one row of frames, or one batch of entries, has before compression."""
TABLE_BYTES: Final = 32 << 20
"""How many bytes of entries one table takes into memory."""
_END: Final = struct.pack(">i", -1)
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


def gathered(strings: ByteStrings, order: npt.NDArray[np.int64]) -> Octets:
    """Return the strings in this order, one after another."""
    if not len(order):
        return np.zeros(0, np.uint8)
    chosen = strings.take(order)
    width = int(chosen.length[0])
    if width and (chosen.length == width).all():
        # As items of one width at every byte: one copy for each.
        items = np.ndarray(len(strings.data) - width + 1, f"V{width}", np.ascontiguousarray(strings.data), strides=(1,))
        return items[chosen.start].view(np.uint8)
    large = _as_large(chosen)
    return np.frombuffer(large.buffers()[2], np.uint8, int(chosen.length.sum()))


def _as_large(strings: ByteStrings) -> pa.Array:
    """Return them as ``large_binary``: together they may exceed two GiB."""
    pieces = [part.to_arrow().cast(pa.large_binary()) for part in _cut(strings, 1 << 30)]
    return pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces)


def _cut(strings: ByteStrings, most: int) -> Iterator[ByteStrings]:
    part = np.cumsum(strings.length) // most
    borders = [0, *(np.flatnonzero(part[1:] != part[:-1]) + 1).tolist(), len(strings)]
    for start, stop in pairwise(borders):
        yield ByteStrings(strings.data, strings.start[start:stop], strings.length[start:stop])


def frame_pieces(
    rows: ByteStrings, targets: npt.NDArray[np.int64], codec: str
) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Sort framed entries by target; yields target, number of entries, and :data:`FRAMES`."""
    # Up to 16 bits numpy sorts by radix.
    order = np.argsort(targets.astype(np.uint16), kind="stable")
    data = gathered(rows, order)
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
        part = (np.cumsum(keys.length[chosen] + values.length[chosen])) // PIECE_BYTES
        borders = [0, *(np.flatnonzero(part[1:] != part[:-1]) + 1).tolist(), len(chosen)]
        for first, last in pairwise(borders):
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
        yield spark_encode(codec, _END)

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
