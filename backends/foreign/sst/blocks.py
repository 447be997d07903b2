"""Blocks of a table file, found, checked and decompressed; and the entries of many blocks at once.

Layout: RocksDB, ``table/format`` and ``table/block_based/block_builder``. A block is its bytes, one
byte that names the compression, and four bytes of checksum. Loops run over blocks, never over
entries: every restart point of a block is a lane, and all lanes advance in lock-step.

An entry is the number of bytes that its key shares with the previous key, the number of bytes that
follow, the length of the value (not in delta-encoded index blocks), the key's own bytes and the
value. At restart points the whole key is stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from stateformat.errors import ErrorKind, UnsupportedFormat

from ..byte_strings import ByteStrings, Octets, Positions, at_every_byte
from ..framing import crc32c, damaged
from ..limits import DECODED_FLOOR, FILE_BYTES, META_FLOOR, Decoded, check

ReadRange: TypeAlias = Callable[[int, int], Any]
"""Takes an offset and a length; returns that many bytes of the file in any buffer, fewer at its
end.
"""

TRAILER: Final = 5
PAD: Final = 4096
"""Zero bytes after decompressed blocks, so that windows of a fixed width stay in the buffer."""
FOOTER: Final = 53
_MAGIC: Final = 0x88E241B785F4CFF7
_FOREIGN_MAGIC: Final = {
    0x8242229663BF9564: "a plain table",
    0x4F3418EB7A8F13B8: "a plain table",
    0x926789D0C5F17873: "a cuckoo table",
}
_LEGACY_MAGIC: Final = 0xDB4775248B80FB57
_LEGACY_FOOTER: Final = 48
_EXTENDED: Final = b"\x3e\x00\x7a\x00"
_CHECKSUMS: Final = ("none", "CRC32C", "xxHash", "xxHash64", "XXH3")
_NONE, _CRC32C, _XXH32, _XXH64, _XXH3 = range(5)
_PRIME: Final = 0x6B9083D9
_CODECS: Final = {0: "none", 1: "snappy", 2: "zlib", 3: "bzip2", 4: "LZ4", 5: "LZ4HC", 6: "Xpress", 7: "zstd"}
_RATIO: Final = {"snappy": 32, "zlib": 1040, "LZ4": 255, "LZ4HC": 255, "zstd": 1 << 16}
"""One byte never decompresses to more than this many."""
BLOCK_MAX: Final = 1 << 30
_SPAN: Final = 1 << 26


class Handles(NamedTuple):
    """Where blocks are in their file; sizes without the trailer."""

    offset: Positions
    size: Positions

    def part(self, first: int, last: int) -> Handles:
        """Return handles ``first`` … ``last - 1``."""
        return Handles(self.offset[first:last], self.size[first:last])


class Blocks(NamedTuple):
    """Decompressed blocks one after another; :data:`PAD` zero bytes follow."""

    data: Octets
    start: Positions
    end: Positions

    def bytes(self, index: int) -> bytes:
        """Return one block."""
        return self.data[self.start[index] : self.end[index]].tobytes()


def unsupported(path: str, what: str, **details: Any) -> UnsupportedFormat:
    """Return the error for a table; ``what`` says what it has that is not supported."""
    return UnsupportedFormat(
        f"{path}: {what}, which is not read here; take a canonical savepoint (Flink), or let the query go on with "
        "RocksDB's usual options (Spark)",
        kind=ErrorKind.UNSUPPORTED_FEATURE,
        path=path,
        **details,
    )


@dataclass(frozen=True)
class TableFile:
    """A table file whose footer has been read."""

    read: ReadRange
    size: int
    path: str
    version: int
    checksum: int
    context: int
    """Mixed into the checksums of format version 6; 0 before version 6."""
    metaindex: tuple[int, int]
    index: tuple[int, int] | None
    """None if the metaindex has it."""

    def load(self, handles: Handles) -> Blocks:
        """Read, check and decompress blocks, as :func:`load`: those of the index and the like."""
        return load([(self, handles)], META_FLOOR)

    def fits(self, place: tuple[int, int], octets: bytes) -> bool:
        """Return whether a stored block with its trailer has the checksum given in the trailer."""
        if self.checksum == _NONE:
            return True
        length = np.array([len(octets) - TRAILER])
        found = _sums(self.checksum, np.frombuffer(octets, np.uint8), np.zeros(1, np.int64), length)
        found = found + _context(self.context, np.array([place[0]]))
        return int(found[0]) == int.from_bytes(octets[-4:], "little")


def open_file(read: ReadRange, size: int, path: str) -> TableFile:
    """Read the footer."""
    if size < FOOTER:
        raise damaged(path, f"it has {size} bytes, fewer than the footer of a table")
    footer = bytes(read(size - FOOTER, FOOTER))
    if len(footer) != FOOTER:
        raise damaged(path, f"its last {FOOTER} bytes cannot be read, {len(footer)} came; it shall have {size}")
    magic, version = int.from_bytes(footer[45:], "little"), int.from_bytes(footer[41:45], "little")
    if magic in _FOREIGN_MAGIC:
        raise unsupported(path, f"it is {_FOREIGN_MAGIC[magic]}")
    if magic == _LEGACY_MAGIC:
        # Format version 0 (Flink 1.13): two handles, and checksums are always CRC32C.
        place, at = handle_at(footer, FOOTER - _LEGACY_FOOTER, path)
        index, _ = handle_at(footer, at, path)
        return TableFile(read, size, path, 0, _CRC32C, 0, place, index)
    if magic != _MAGIC:
        raise damaged(path, f"it ends in {footer[45:].hex()}, not as a table of RocksDB")
    if not 2 <= version <= 6:
        raise unsupported(path, f"it has format version {version}; 2 to 6 are known", version=version)
    checksum = footer[0]
    if checksum >= len(_CHECKSUMS):
        raise unsupported(path, f"its checksums are of type {checksum}", checksum=checksum)
    if version < 6:
        place, at = handle_at(footer, 1, path)
        index, _ = handle_at(footer, at, path)
        return TableFile(read, size, path, version, checksum, 0, place, index)
    if footer[1:5] != _EXTENDED:
        raise damaged(path, f"its footer has {footer[1:5].hex()} where version 6 has {_EXTENDED.hex()}")
    stored, context, length = (int.from_bytes(footer[at : at + 4], "little") for at in (5, 9, 13))
    if footer[33:41] != bytes(8):
        raise unsupported(path, "its footer uses a feature of the future")
    if checksum != _NONE:
        blank = np.frombuffer(footer[:5] + bytes(4) + footer[9:], np.uint8)
        sums = _sums(checksum, blank, np.zeros(1, np.int64), np.array([FOOTER - 1]))
        found = int((sums + _context(context, np.array([size - FOOTER])))[0])
        if found != stored:
            raise damaged(path, f"its footer has checksum {stored:#x}, its bytes {found:#x}")
    place = (size - FOOTER - TRAILER - length, length)
    return TableFile(read, size, path, version, checksum, context, place, None)


def handle_at(octets: bytes, at: int, path: str) -> tuple[tuple[int, int], int]:
    """Read one handle; returns it and where the bytes after it begin."""
    offset, at = varint_at(octets, at, path)
    size, at = varint_at(octets, at, path)
    return (offset, size), at


def varint_at(octets: bytes, at: int, path: str) -> tuple[int, int]:
    """Read one varint of 64 bits; returns it and where the bytes after it begin."""
    value = shift = 0
    for byte in octets[at : at + 10]:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if byte < 0x80 and value < 1 << 63:
            return value, at
    raise damaged(path, f"a varint at byte {at} of a block or footer has no end, or 64 bits")


def single(place: tuple[int, int]) -> Handles:
    """Return handles of one block."""
    return Handles(np.array([place[0]], np.int64), np.array([place[1]], np.int64))


def load(wanted: Sequence[tuple[TableFile, Handles]], floor: int | None = None) -> Blocks:
    """Read, check and decompress blocks of several files into one buffer, in the order given.

    ``floor``: what they may be decompressed to, however small they are. Raises
    ``DamagedCheckpoint`` and ``UnsupportedFormat``.
    """
    pieces: list[Any] = []
    # In Python's numbers: what a file says need not fit 64 bits together.
    stored = sum(sum(handles.size.tolist()) for _, handles in wanted)
    for file, _ in wanted[:1]:
        check(file.path, "the blocks of it and of what is read with it", stored, FILE_BYTES)
    decoded = Decoded(stored, floor)
    for file, handles in wanted:
        if len(handles.offset):
            pieces += _decompressed(file, handles, decoded)
    sizes = np.array([len(piece) for piece in pieces], np.int64)
    data = np.frombuffer(b"".join([*pieces, bytes(PAD)]), np.uint8)
    end = np.cumsum(sizes)
    return Blocks(data, end - sizes, end)


def _fetch(file: TableFile, handles: Handles) -> tuple[memoryview, Positions]:
    """Read blocks with their trailers; returns the bytes and where in them each block begins."""
    offset, size = handles
    ends = offset + size + TRAILER
    wrong = np.flatnonzero((offset < 0) | (size < 0) | (size > file.size) | (offset > file.size) | (ends > file.size))
    if len(wrong):
        at = int(wrong[0])
        raise damaged(file.path, f"a block shall have {size[at]} bytes at {offset[at]}; the file has {file.size}")
    if (offset[1:] < ends[:-1]).any():
        raise damaged(file.path, "blocks overlap or are out of order")
    # Blocks with small gaps between them are read together.
    cuts = np.flatnonzero(offset[1:] - ends[:-1] > 1 << 16) + 1
    firsts, lasts = [0, *cuts.tolist()], [*cuts.tolist(), len(offset)]
    pieces, starts, taken = [], np.empty(len(offset), np.int64), 0
    for first, last in zip(firsts, lasts, strict=True):
        begin, end = int(offset[first]), int(ends[last - 1])
        for at in range(begin, end, _SPAN):
            piece = file.read(at, min(_SPAN, end - at))
            if len(piece) != min(_SPAN, end - at):
                raise damaged(file.path, f"{end - at} bytes at {at} cannot be read; the file has become shorter")
            pieces.append(piece)
        starts[first:last] = offset[first:last] - begin + taken
        taken += end - begin
    return memoryview(pieces[0] if len(pieces) == 1 else b"".join(pieces)).cast("B"), starts


def _decompressed(file: TableFile, handles: Handles, decoded: Decoded) -> list[Any]:
    """Return the blocks' bytes, one buffer for each."""
    view, starts = _fetch(file, handles)
    raw = np.frombuffer(view, np.uint8)
    size = handles.size
    kinds = raw[starts + size]
    if file.checksum != _NONE:
        stored = np.ascontiguousarray(raw[(starts + size + 1)[:, None] + np.arange(4)]).view("<u4").reshape(-1)
        found = _sums(file.checksum, raw, starts, size) + _context(file.context, handles.offset)
        wrong = np.flatnonzero(stored != found)
        if len(wrong):
            at = int(wrong[0])
            raise damaged(
                file.path,
                f"the block of {size[at]} bytes at {handles.offset[at]} has {_CHECKSUMS[file.checksum]} checksum "
                f"{int(stored[at]):#x}, its bytes {int(found[at]):#x}",
                offset=int(handles.offset[at]),
            )
    pieces: list[Any] = [view[at : at + length] for at, length in zip(starts.tolist(), size.tolist(), strict=True)]
    for kind in np.unique(kinds).tolist():
        if kind:
            _decompress(file, pieces, np.flatnonzero(kinds == kind).tolist(), kind, decoded)
    return pieces


def _decompress(file: TableFile, pieces: list[Any], chosen: list[int], kind: int, decoded: Decoded) -> None:
    """Replace blocks of one compression by their decompressed bytes."""
    name = _CODECS.get(kind, f"number {kind}")
    ratio = _RATIO.get(name)
    if ratio is None:
        raise unsupported(file.path, f"blocks are compressed by {name}", codec=name)
    if file.version < 2 and name != "snappy":
        raise unsupported(file.path, f"blocks are compressed by {name} in format version {file.version}", codec=name)
    codec = None if name == "zlib" else pa.Codec({"snappy": "snappy", "zstd": "zstd"}.get(name, "lz4_raw"))
    for index in chosen:
        body = pieces[index]
        raw_size, at = varint_at(body[:10], 0, file.path)
        if raw_size > ratio * len(body) + 64:
            raise damaged(file.path, f"a block of {len(body)} bytes compressed by {name} declares {raw_size:,} bytes")
        check(file.path, f"a block of {len(body):,} bytes compressed by {name}", raw_size, BLOCK_MAX)
        decoded.take(file.path, raw_size)
        try:
            if codec is None:
                inflated = zlib.decompressobj(-15)
                pieces[index] = found = inflated.decompress(body[at:], raw_size + 1)
                if len(found) != raw_size or not inflated.eof:
                    raise OSError(f"{raw_size} bytes are declared, at least {len(found)} are there")
            else:
                # Raw snappy contains its own size.
                pieces[index] = codec.decompress(pa.py_buffer(body if name == "snappy" else body[at:]), raw_size)
        except (OSError, zlib.error, pa.ArrowException) as error:
            raise damaged(file.path, f"a block does not decompress by {name} ({error})") from error


def _context(base: int, offset: Positions) -> npt.NDArray[np.uint32]:
    """Return what format version 6 adds to the checksum of a block at an offset."""
    if not base:
        return np.zeros(len(offset), np.uint32)
    folded = (offset & 0xFFFFFFFF) + (offset >> 32)
    return (folded & 0xFFFFFFFF).astype(np.uint32) ^ np.uint32(base)


def _sums(kind: int, raw: Octets, starts: Positions, sizes: Positions) -> npt.NDArray[np.uint32]:
    """Return the checksums of blocks, each with the one byte after it."""
    view = raw.data
    spans = list(zip(starts.tolist(), (starts + sizes).tolist(), strict=True))
    if kind == _CRC32C:
        joined = np.frombuffer(b"".join([view[at : end + 1] for at, end in spans]), np.uint8)
        plain = crc32c(joined, sizes + 1)
        masked: npt.NDArray[np.uint32] = ((plain >> np.uint32(15)) | (plain << np.uint32(17))) + np.uint32(0xA282EAD8)
        return masked
    if kind == _XXH3:
        digest = xxhash.xxh3_64_intdigest
        whole = np.array([digest(view[at:end]) & 0xFFFFFFFF for at, end in spans], np.uint64)
        last = raw[starts + sizes].astype(np.uint64) * np.uint64(_PRIME)
        mixed: npt.NDArray[np.uint32] = (whole ^ (last & np.uint64(0xFFFFFFFF))).astype(np.uint32)
        return mixed
    digest = xxhash.xxh32_intdigest if kind == _XXH32 else xxhash.xxh64_intdigest
    sums: npt.NDArray[np.uint32] = np.array([digest(view[at : end + 1]) & 0xFFFFFFFF for at, end in spans], np.uint32)
    return sums


_HASHED: Final = 1 << 31
_FEATURES: Final = 0x70000000
_NUMBER_MAX: Final = 1 << 60
_SHARED_MAX: Final = 64
"""Keys, which share their beginnings in a block, take no more than so many times the block."""
_STEPS_MAX: Final = 1 << 16
"""No restart point has so many entries; RocksDB's usual number is 16."""


class Entries(NamedTuple):
    """Entries in the order of their blocks."""

    key: ByteStrings
    value: ByteStrings
    block: Positions
    """The number of the block that each entry is in."""


class Measure(Protocol):
    """Finds the ends of values that have no length in front of them."""

    def __call__(self, lanes: Positions, shared: Positions, at: Positions) -> Positions:
        """Take lanes, what their keys share, where their values begin; return where they end."""


def gather(data: Octets, at: Positions, width: int) -> Octets:
    """Return ``width`` bytes from each position, as an array of (positions, width)."""
    found: Octets = at_every_byte(data, f"V{width}")[at].view(np.uint8).reshape(len(at), width)
    return found


def varints(data: Octets, at: Positions) -> tuple[Positions, Positions]:
    """Read a varint at each position: values, and where the next bytes begin."""
    first = data[at]
    value = first.astype(np.int64)
    after = at + 1
    more = np.flatnonzero(first >= 0x80)
    if len(more):
        value[more] &= 0x7F
        shift = 7
        while len(more) and shift < 63:
            byte = data[after[more]].astype(np.int64)
            value[more] |= (byte & 0x7F) << shift
            after[more] += 1
            more = more[byte >= 0x80]
            shift += 7
        # Longer than any length: no sum of two may overflow.
        value[more] = _NUMBER_MAX
        np.minimum(value, _NUMBER_MAX, out=value)
    return value, after


def read_entries(
    blocks: Blocks, path: Callable[[int], str], measure: Callable[[int], Measure] | None = None
) -> Entries:
    """Decode all entries of blocks. ``path`` names the file of a block, for errors.

    ``measure`` takes the number of lanes; without it, values are stored with their lengths in
    front.
    """
    start, end, lane_block = _lanes(blocks, path)

    def broken(lane: int, what: str) -> Exception:
        block = int(lane_block[lane])
        return damaged(path(block), f"{what} in a block of {int(blocks.end[block] - blocks.start[block])} bytes")

    steps, counts = _walk(blocks.data, start, end, broken, None if measure is None else measure(len(start)))
    first = np.cumsum(counts) - counts
    total = int(counts.sum())
    shared, own, key_at, value_at, value_size = (np.empty(total, np.int64) for _ in range(5))
    for number, step in enumerate(steps):
        place = first[step.lane] + number
        shared[place], own[place], key_at[place] = step.shared, step.own, step.key_at
        value_at[place], value_size[place] = step.value_at, step.value_size
    length = shared + own
    if total:
        check(path(0), "its keys", int(length.sum()), max(DECODED_FLOOR, _SHARED_MAX * len(blocks.data)))
    # No key shares more than the length of the previous key; the first of a lane shares nothing.
    before = np.zeros(total, np.int64)
    before[1:] = length[:-1]
    before[first[counts > 0]] = 0
    wrong = np.flatnonzero(shared > before)
    if len(wrong):
        lane = int(np.searchsorted(first, wrong[0], "right")) - 1
        raise broken(lane, f"a key shares {int(shared[wrong[0]])} bytes with one of {int(before[wrong[0]])}")
    keys = _keys(blocks.data, first, counts, shared, key_at, length)
    return Entries(keys, ByteStrings(blocks.data, value_at, value_size), np.repeat(lane_block, counts))


def _lanes(blocks: Blocks, path: Callable[[int], str]) -> tuple[Positions, Positions, Positions]:
    """Find the restart points: where lanes begin and end, and the block of each."""
    data, start, end = blocks
    short = np.flatnonzero(end - start < 8)
    if len(short):
        raise damaged(path(int(short[0])), f"a block of {int((end - start)[short[0]])} bytes has no restart points")
    packed = gather(data, end - 4, 4).view("<u4").reshape(-1).astype(np.int64)
    odd = np.flatnonzero(packed & _FEATURES)
    if len(odd):
        raise unsupported(path(int(odd[0])), f"blocks have the features {int(packed[odd[0]]) >> 28 & 7:#x}")
    foot, count = end - 4, packed & ~_HASHED
    hashed = np.flatnonzero(packed & _HASHED)
    if len(hashed):
        # A hash index of one byte a bucket, and the number of buckets, follow the restart points.
        foot[hashed] -= 2 + gather(data, foot[hashed] - 2, 2).view("<u2").reshape(-1)
    base = foot - 4 * count
    wrong = np.flatnonzero((count < 1) | (base < start))
    if len(wrong):
        raise damaged(
            path(int(wrong[0])), f"a block declares {int(count[wrong[0]])} restart points, more than it holds"
        )
    block = np.repeat(np.arange(len(start)), count)
    nth = np.arange(len(block)) - np.repeat(np.cumsum(count) - count, count)
    at = start[block] + gather(data, base[block] + 4 * nth, 4).view("<u4").reshape(-1)
    until = np.empty_like(at)
    until[:-1] = at[1:]
    lasts = np.cumsum(count) - 1
    until[lasts] = base
    wrong = np.flatnonzero((until < at) | (nth == 0) & (at != start[block]))
    if len(wrong):
        raise damaged(path(int(block[wrong[0]])), "restart points of a block are out of order")
    return at, until, block


class _Step(NamedTuple):
    """The n-th entries of all lanes that have that many."""

    lane: Positions
    shared: Positions
    own: Positions
    key_at: Positions
    value_at: Positions
    value_size: Positions


def _walk(
    data: Octets,
    start: Positions,
    end: Positions,
    broken: Callable[[int, str], Exception],
    measure: Measure | None,
) -> tuple[list[_Step], Positions]:
    """Take one step after another; returns them, and how many each lane has taken."""
    steps: list[_Step] = []
    counts = np.zeros(len(start), np.int64)
    lane = np.flatnonzero(start < end)
    at, until = start[lane], end[lane]
    while len(lane):
        shared, at = varints(data, at)
        own, at = varints(data, at)
        value_size, key_at = varints(data, at) if measure is None else (np.zeros_like(own), at)
        # Lengths are checked one by one before they are added: a sum may exceed 64 bits.
        wrong = np.flatnonzero((shared > len(data)) | (own > until - key_at) | (value_size > until - key_at - own))
        if len(wrong):
            raise broken(int(lane[wrong[0]]), "an entry passes its end")
        value_at = key_at + own
        after = value_at + value_size if measure is None else measure(lane, shared, value_at)
        if measure is not None:
            value_size = after - value_at
            wrong = np.flatnonzero(after > until)
        if len(wrong):
            raise broken(int(lane[wrong[0]]), "an entry passes its end")
        if len(steps) == _STEPS_MAX:
            raise broken(int(lane[0]), f"a restart point has more than {_STEPS_MAX} entries")
        steps.append(_Step(lane, shared, own, key_at, value_at, value_size))
        counts[lane] += 1
        more = after < until
        if more.all():
            at = after
        else:
            lane, at, until = lane[more], after[more], until[more]
    return steps, counts


def _keys(
    data: Octets, first: Positions, counts: Positions, shared: Positions, key_at: Positions, length: Positions
) -> ByteStrings:
    """Rebuild all keys, by classes of lanes with keys of similar width; zeros follow each key."""
    total = len(length)
    lanes = np.flatnonzero(counts)
    if not total:
        return ByteStrings(np.zeros(PAD, np.uint8), length, length)
    widest = np.maximum.reduceat(length, first[lanes])
    # One class if that wastes little, otherwise classes by powers of two.
    top = int(widest.max())
    if top <= 64 or top * total <= 2 * int(length.sum()):
        classes = np.zeros(len(lanes), np.int64)
    else:
        classes = np.ceil(np.log2(np.maximum(widest, 64))).astype(np.int64)
    if top > PAD:
        data = np.concatenate([data, np.zeros(top, np.uint8)])
    buffers, start, taken = [], np.empty(total, np.int64), 0
    for some in np.unique(classes):
        members = lanes[classes == some]
        width = max(int(widest[classes == some].max()), 8)
        rows, matrix = _class_keys(data, first[members], counts[members], shared, key_at, width)
        if (length[rows] != width).any():
            matrix[np.arange(width) >= length[rows][:, None]] = 0
        start[rows] = taken + width * np.arange(len(rows))
        buffers.append(matrix.reshape(-1))
        taken += matrix.size
    return ByteStrings(np.concatenate([*buffers, np.zeros(PAD, np.uint8)]), start, length)


def _class_keys(
    data: Octets, first: Positions, counts: Positions, shared: Positions, key_at: Positions, width: int
) -> tuple[Positions, npt.NDArray[np.uint8]]:
    """Rebuild the keys of some lanes: the entries' numbers, and their keys in rows of ``width``."""
    place = np.cumsum(counts) - counts
    rows = np.repeat(first - place, counts) + np.arange(int(counts.sum()))
    # Lanes with more entries first: those that continue are always the first ones.
    order = np.argsort(-counts, kind="stable")
    first, counts, place = first[order], counts[order], place[order]
    matrix = np.empty((len(rows), width), np.uint8)
    out = matrix.view(f"V{width}").reshape(-1)
    key: Octets = np.zeros((len(first), width), np.uint8)
    columns = np.arange(width, dtype=np.int32)
    active = len(first)
    for step in range(int(counts[0])):
        active = int(np.searchsorted(-counts[:active], -step, "left"))
        entry = first[:active] + step
        kept = shared[entry]
        window = gather(data, key_at[entry] - kept, width)
        if step == 0:
            key = window.copy()
        else:
            key = key[:active]
            np.copyto(key, window, where=columns >= kept.astype(np.int32)[:, None])
        out[place[:active] + step] = key.view(f"V{width}").reshape(-1)
    return rows, matrix
