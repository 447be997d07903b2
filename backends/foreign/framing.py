"""Streams of compressed frames, and Java's text, as Flink and Spark write them.

Spark: the four codecs of ``spark.sql.streaming.stateStore.compression.codec``. Flink: the framed
snappy stream. Every length is checked before memory is allocated for it, every checksum is
compared, and a stream that ends early or continues after its end is damaged. Loops run over frames,
never over entries.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from stateformat.errors import DamagedCheckpoint, ErrorKind, UnsupportedFormat

from .byte_strings import Octets
from .limits import Decoded

_LZ4_MAGIC: Final = b"LZ4Block"
_LZ4_HEAD: Final = struct.Struct("<8sBiiI")
_LZ4_SEED: Final = 0x9747B28C
_LZ4_STORED, _LZ4_PACKED = 0x10, 0x20
_LZ4_FRAME: Final = 1 << 15
_LZ4_LEVEL: Final = 5
"""A frame contains 2 ** (10 + level) bytes."""
_LZ4_FRAME_MAX: Final = 1 << 25
_XERIAL_HEAD: Final = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
SNAPPY_HEAD: Final = b"\xff\x06\x00\x00sNaPpY"
_SNAPPY_FRAME: Final = 1 << 16
_HALF: Final = re.compile("[\ud800-\udfff]")
_ESCAPED_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
_SPARK_CODECS: Final = {
    "lz4": "lz4",
    "snappy": "snappy",
    "zstd": "zstd",
    "lzf": "lzf",
    "org.apache.spark.io.LZ4CompressionCodec": "lz4",
    "org.apache.spark.io.SnappyCompressionCodec": "snappy",
    "org.apache.spark.io.ZStdCompressionCodec": "zstd",
    "org.apache.spark.io.LZFCompressionCodec": "lzf",
}


DAMAGED_ADVICE: Final = ": put the file back from a copy, or read another checkpoint (`ckpt history` lists them)"


def damaged(path: str, what: str, *, kind: ErrorKind = ErrorKind.DAMAGED_SEGMENT, **details: Any) -> DamagedCheckpoint:
    """Return the error for bytes that are not what the engine wrote; ``what`` is a sentence."""
    torn = "" if kind is ErrorKind.OBJECT_MISSING else "; the file is damaged or torn"
    return DamagedCheckpoint(
        f"{path}: {what}{torn}{DAMAGED_ADVICE}",
        kind=kind,
        path=path,
        **details,
    )


def spark_codec(name: str) -> str:
    """Return the codec's short name. Raises ``UnsupportedFormat`` for ``lzf`` and all unknown
    ones.
    """
    known = _SPARK_CODECS.get(name) or _SPARK_CODECS.get(name.lower())
    if known is None or known == "lzf":
        raise UnsupportedFormat(
            f"state is compressed by {name!r}; lz4, snappy and zstd can be read. Let the query run once more with "
            "spark.sql.streaming.stateStore.compression.codec of another name in a new checkpoint",
            kind=ErrorKind.UNSUPPORTED_FEATURE,
            codec=name,
        )
    return known


def spark_decode(codec: str, data: Any, path: str, decoded: Decoded | None = None) -> Octets:
    """Return what Spark compressed with ``codec`` (:func:`spark_codec`) into one file.

    ``decoded`` is what it and the files that are read with it may have together.
    """
    view = memoryview(data).cast("B")
    decode = {"lz4": _lz4_decode, "snappy": _xerial_decode, "zstd": _zstd_decode}[spark_codec(codec)]
    return decode(view, path, decoded or Decoded(len(view)))


def spark_encode(codec: str, data: Any) -> bytes:
    """Compress bytes into one file as Spark would, so that Spark reads it."""
    view = memoryview(data).cast("B")
    return {"lz4": _lz4_encode, "snappy": _xerial_encode, "zstd": _zstd_encode}[spark_codec(codec)](view)


def spark_joined(codec: str, files: Iterable[Any]) -> Iterator[Any]:
    """Yield the bytes of one file with the content of several that :func:`spark_encode`
    returned.
    """
    known = spark_codec(codec)
    end = b""
    for number, data in enumerate(files):
        view = memoryview(data).cast("B")
        if known == "lz4":
            end = bytes(view[-_LZ4_HEAD.size :])
            view = view[: -_LZ4_HEAD.size]
        elif known == "snappy" and number:
            view = view[len(_XERIAL_HEAD) :]
        yield view
    yield end


class _Frames:
    """Decompressed frames in one growing buffer."""

    def __init__(self, path: str, decoded: Decoded, expected: int = 1 << 16) -> None:
        """Room for ``expected`` bytes is allocated at once; they have not been verified to come."""
        self.path, self.decoded = path, decoded
        self.data: Octets = np.empty(expected, np.uint8)
        self.size = 0

    def add(self, frame: Any) -> None:
        piece = np.frombuffer(frame, np.uint8)
        end = self.size + len(piece)
        self.decoded.take(self.path, len(piece))
        if end > len(self.data):
            grown = np.empty(max(end, 2 * len(self.data)), np.uint8)
            grown[: self.size] = self.data[: self.size]
            self.data = grown
        self.data[self.size : end] = piece
        self.size = end

    def whole(self) -> Octets:
        return self.data[: self.size]


def _unpack(codec: pa.Codec, body: Any, size: int, path: str, at: int) -> Any:
    try:
        return codec.decompress(pa.py_buffer(body), size)
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, f"the frame at byte {at} does not decompress ({error})", offset=at) from error


def _lz4_decode(view: memoryview, path: str, decoded: Decoded) -> Octets:
    frames, codec, at, ended = _Frames(path, decoded, _lz4_room(view)), pa.Codec("lz4_raw"), 0, False
    while at < len(view):
        if ended:
            raise damaged(path, f"{len(view) - at} bytes follow the end of the stream", offset=at)
        if len(view) - at < _LZ4_HEAD.size:
            raise damaged(path, f"it ends within the head of the frame at byte {at}", offset=at)
        magic, token, packed, raw, check = _LZ4_HEAD.unpack_from(view, at)
        method, most = token & 0xF0, min(1 << (10 + (token & 0x0F)), _LZ4_FRAME_MAX)
        body = at + _LZ4_HEAD.size
        if magic != _LZ4_MAGIC or method not in (_LZ4_STORED, _LZ4_PACKED):
            raise damaged(path, f"no LZ4Block frame stands at byte {at}", offset=at)
        # One byte of LZ4 expands to 255 bytes at most.
        if not (0 <= packed <= len(view) - body and 0 <= raw <= most and raw <= 255 * packed):
            raise damaged(
                path,
                f"the frame at byte {at} declares {packed} bytes for {raw}, and {len(view) - body} are left",
                offset=at,
            )
        if raw == 0:
            if packed or check:
                raise damaged(path, f"the end mark at byte {at} has {packed} bytes and checksum {check}", offset=at)
            ended = True
        else:
            content = view[body : body + packed]
            if method == _LZ4_STORED and packed != raw:
                raise damaged(path, f"the frame at byte {at} stores {raw} bytes as {packed}", offset=at)
            piece = content if method == _LZ4_STORED else _unpack(codec, content, raw, path, at)
            found = xxhash.xxh32_intdigest(piece, _LZ4_SEED) & 0x0FFFFFFF
            if found != check:
                raise damaged(path, f"the frame at byte {at} has checksum {check:#x}, its bytes {found:#x}", offset=at)
            frames.add(piece)
        at = body + packed
    if not ended:
        raise damaged(path, f"it ends after {at} bytes without an end mark", offset=at)
    return frames.whole()


def _lz4_room(view: memoryview) -> int:
    """Return the size that the headers of frames declare, at most 16 times that of the file."""
    at, total = 0, 0
    while len(view) - at >= _LZ4_HEAD.size:
        _, _, packed, raw, _ = _LZ4_HEAD.unpack_from(view, at)
        if packed < 0 or raw < 0:
            break
        total += raw
        at += _LZ4_HEAD.size + packed
    return min(total, 16 * len(view))


def _lz4_encode(view: memoryview) -> bytes:
    codec, parts = pa.Codec("lz4_raw"), []
    for at in range(0, len(view), _LZ4_FRAME):
        piece = view[at : at + _LZ4_FRAME]
        check = xxhash.xxh32_intdigest(piece, _LZ4_SEED) & 0x0FFFFFFF
        packed = codec.compress(pa.py_buffer(piece), asbytes=True)
        method, body = (_LZ4_PACKED, packed) if len(packed) < len(piece) else (_LZ4_STORED, bytes(piece))
        parts += [_LZ4_HEAD.pack(_LZ4_MAGIC, method | _LZ4_LEVEL, len(body), len(piece), check), body]
    parts.append(_LZ4_HEAD.pack(_LZ4_MAGIC, _LZ4_STORED | _LZ4_LEVEL, 0, 0, 0))
    return b"".join(parts)


def _snappy_size(body: memoryview, path: str, at: int) -> int:
    """Return the size that raw snappy declares, checked against what its bytes can contain."""
    size = shift = 0
    for byte in body[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            # A copy of 64 bytes takes three bytes.
            if size <= 32 * len(body):
                return size
            break
    raise damaged(path, f"the frame at byte {at} has {len(body)} bytes and no size that fits them", offset=at)


def _xerial_decode(view: memoryview, path: str, decoded: Decoded) -> Octets:
    frames, codec, at = _Frames(path, decoded), pa.Codec("snappy"), len(_XERIAL_HEAD)
    if bytes(view[:at]) != _XERIAL_HEAD:
        raise damaged(path, "it does not begin as a snappy stream of version 1", offset=0)
    while at < len(view):
        if len(view) - at < 4:
            raise damaged(path, f"it ends within the size of the frame at byte {at}", offset=at)
        (size,) = struct.unpack_from(">i", view, at)
        if not 0 < size <= len(view) - at - 4:
            raise damaged(
                path, f"the frame at byte {at} declares {size} bytes, {len(view) - at - 4} are left", offset=at
            )
        body = view[at + 4 : at + 4 + size]
        frames.add(_unpack(codec, body, _snappy_size(body, path, at), path, at))
        at += 4 + size
    return frames.whole()


def _xerial_encode(view: memoryview) -> bytes:
    codec, parts = pa.Codec("snappy"), [_XERIAL_HEAD]
    for at in range(0, len(view), _LZ4_FRAME):
        packed = codec.compress(pa.py_buffer(view[at : at + _LZ4_FRAME]), asbytes=True)
        parts += [struct.pack(">i", len(packed)), packed]
    return b"".join(parts)


def _zstd_decode(view: memoryview, path: str, decoded: Decoded) -> Octets:
    frames = _Frames(path, decoded)
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(view)), "zstd") as stream:
            while piece := stream.read(1 << 20):
                frames.add(piece)
    except (OSError, pa.ArrowException) as error:
        raise damaged(path, f"it does not decompress ({error})") from error
    return frames.whole()


def _zstd_encode(view: memoryview) -> bytes:
    return bytes(pa.Codec("zstd").compress(pa.py_buffer(view), asbytes=True))


def snappy_frames_decode(data: Any, path: str) -> Octets:
    """Return what one framed snappy stream contains (Flink's compressed state)."""
    return snappy_streams_decode(data, [0], [memoryview(data).nbytes], path)[0]


def snappy_streams_decode(
    data: Any, starts: Sequence[int], ends: Sequence[int], path: str
) -> tuple[Octets, npt.NDArray[np.int64]]:
    """Decode framed snappy streams ``data[start:end]``, one after another into one buffer.

    Returns the buffer, and where in it each stream's bytes end. All checksums (CRC-32C) are
    compared at once, which is much cheaper than one stream at a time.
    """
    view, codec = memoryview(data).cast("B"), pa.Codec("snappy")
    frames = _Frames(path, Decoded(len(view)))
    bounds: list[int] = []
    places: list[int] = []
    checks: list[int] = []
    sizes: list[int] = []
    for start, end in zip(starts, ends, strict=True):
        if not 0 <= start <= end <= len(view):
            raise damaged(path, f"a stream shall be at bytes {start} to {end} of {len(view)}", offset=start)
        if end - start < len(SNAPPY_HEAD) or bytes(view[start : start + len(SNAPPY_HEAD)]) != SNAPPY_HEAD:
            raise damaged(path, f"no framed snappy stream begins at byte {start}", offset=start)
        at = start
        while at < end:
            at, body, kind = _snappy_chunk(view, at, end, path)
            if kind == 0xFF or kind >= 0x80:
                continue
            (check,) = struct.unpack_from("<I", body)
            size = _snappy_size(body[4:], path, at) if kind == 0 else len(body) - 4
            if size > _SNAPPY_FRAME:
                raise damaged(path, f"the frame before byte {at} holds {size} bytes, more than 65,536", offset=at)
            frames.add(_unpack(codec, body[4:], size, path, at) if kind == 0 else body[4:])
            places.append(at)
            checks.append(check)
            sizes.append(size)
        bounds.append(frames.size)
    whole = frames.whole()
    found = _masked(crc32c(whole, np.array(sizes, np.int64)))
    wrong = np.flatnonzero(found != np.array(checks, np.uint32))
    if len(wrong):
        at = places[int(wrong[0])]
        raise damaged(
            path,
            f"the frame before byte {at} has checksum {checks[int(wrong[0])]:#x}, its bytes {int(found[wrong[0]]):#x}",
            offset=at,
        )
    return whole, np.array(bounds, np.int64)


def _snappy_chunk(view: memoryview, at: int, end: int, path: str) -> tuple[int, memoryview, int]:
    """Return where the next chunk begins, and this one's body and kind."""
    if end - at < 4:
        raise damaged(path, f"it ends within the head of the frame at byte {at}", offset=at)
    kind, size = view[at], int.from_bytes(view[at + 1 : at + 4], "little")
    body = view[at + 4 : at + 4 + size]
    if size > end - at - 4:
        raise damaged(path, f"the frame at byte {at} declares {size} bytes, {end - at - 4} are left", offset=at)
    if kind == 0xFF:
        if bytes(body) != SNAPPY_HEAD[4:]:
            raise damaged(path, f"the stream mark at byte {at} is wrong", offset=at)
    elif kind <= 1:
        if size < 4:
            raise damaged(path, f"the frame at byte {at} has {size} bytes, too few for its checksum", offset=at)
    elif kind < 0x80:
        raise damaged(path, f"the frame at byte {at} is of the unknown kind {kind:#x}", offset=at)
    return at + 4 + size, body, kind


def snappy_frames_encode(data: Any) -> bytes:
    """Compress bytes into one framed snappy stream, as Flink writes it."""
    view, codec, parts = memoryview(data).cast("B"), pa.Codec("snappy"), [SNAPPY_HEAD]
    pieces = [view[at : at + _SNAPPY_FRAME] for at in range(0, len(view), _SNAPPY_FRAME)]
    whole = np.frombuffer(view, np.uint8) if len(view) else np.zeros(0, np.uint8)
    checks = _masked(crc32c(whole, np.array([len(piece) for piece in pieces], np.int64)))
    for piece, check in zip(pieces, checks.tolist(), strict=True):
        packed = codec.compress(pa.py_buffer(piece), asbytes=True)
        kind, body = (0, packed) if len(packed) < len(piece) else (1, bytes(piece))
        parts += [struct.pack("<I", kind | (len(body) + 4) << 8), struct.pack("<I", check), body]
    return b"".join(parts)


def _masked(sums: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return checksums as the snappy framing stores them."""
    return ((sums >> np.uint32(15)) | (sums << np.uint32(17))) + np.uint32(0xA282EAD8)


def modified_utf8(data: Any, path: str) -> str:
    """Return the text of Java's modified UTF-8: NUL is C0 80, high characters two surrogates.

    Names come from here, or from :func:`json_value`. Java has names with half a surrogate pair;
    they are refused, since no text of ours could show, store or look for one.
    """
    octets = bytes(data)
    try:
        if b"\x00" in octets or any(byte >= 0xF0 for byte in octets):
            raise ValueError("a byte that it never has")
        halves = octets.replace(b"\xc0\x80", b"\x00").decode("utf-8", "surrogatepass")
        found = halves.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    except ValueError as error:
        raise damaged(path, f"{octets[:40]!r} is no text of Java's DataOutput.writeUTF ({error})") from error
    if _HALF.search(found):
        raise UnsupportedFormat(
            f"{path}: the name {found[:40]!a} has half a surrogate pair, which no UTF-8 can have; give it another name "
            "in the job, and take another checkpoint or savepoint",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            path=path,
        )
    return found


def json_value(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ``ValueError``; also for numbers that 64 bits do not hold, for NaN and infinities, for
    half a surrogate pair, and for what is nested too deep.
    """
    try:
        found = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if _ESCAPED_HALF.search(text):
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _whole(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 64:
        raise ValueError(f"the number {text[:20]}… does not fit 64 bits")
    return int(text)


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text[:20]} is no number")
    return found


def encode_modified_utf8(text: str) -> bytes:
    """Return the bytes of Java's ``DataOutput.writeUTF``, without the length in front of them."""
    units = np.frombuffer(text.encode("utf-16-le", "surrogatepass"), "<u2")
    halves = "".join(map(chr, units.tolist()))
    return halves.encode("utf-8", "surrogatepass").replace(b"\x00", b"\xc0\x80")


# CRC-32C by lanes. The checksum is linear over GF(2): long strings are cut into lanes of equal
# length, all lanes advance by two bytes at once, and neighbours are joined with tables that shift a
# checksum past the bytes of the right one.
_Table = npt.NDArray[np.uint32]
_LANE: Final = 128
_tables: dict[int, _Table] = {}


def crc32c(data: Octets, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Return the CRC-32C of each of the strings of ``sizes`` that make up ``data``."""
    found = np.zeros(len(sizes), np.uint32)
    ends = np.cumsum(sizes)
    # Strings of similar length are processed together, at most a few MiB at once.
    classes = np.ceil(np.log2(np.maximum(sizes, _LANE) / _LANE)).astype(np.int64)
    for level in np.unique(classes):
        width = _LANE << int(level)
        chosen = np.flatnonzero(classes == level)
        for first in range(0, len(chosen), max(1, (1 << 22) // width)):
            some = chosen[first : first + max(1, (1 << 22) // width)]
            found[some] = _crc_padded(data, ends[some], sizes[some], width)
    return found ^ np.uint32(0xFFFFFFFF)


def _crc_padded(
    data: Octets, ends: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], width: int
) -> npt.NDArray[np.uint32]:
    # Leading zeros change nothing when the checksum starts at zero.
    padded = np.zeros((len(ends), width), np.uint8)
    for row, (end, size) in enumerate(zip(ends.tolist(), sizes.tolist(), strict=True)):
        padded[row, width - size :] = data[end - size : end]
    # By columns, so that a step reads neighbouring bytes.
    lanes = np.ascontiguousarray(padded.reshape(-1, _LANE // 2, 2).view("<u2")[:, :, 0].T)
    pairs, sums = _pair_table(), np.zeros(lanes.shape[1], np.uint32)
    for step in lanes:
        sums = (sums >> np.uint32(16)) ^ pairs[(sums & np.uint32(0xFFFF)) ^ step]
    shift = _LANE
    while len(sums) > len(ends):
        sums = _shifted(sums[0::2], shift) ^ sums[1::2]
        shift *= 2
    # What the start value, all ones, becomes after the string's own bytes.
    begun = np.full(len(ends), 0xFFFFFFFF, np.uint32)
    for bit in range(int(sizes.max()).bit_length() if len(sizes) else 0):
        ahead = (sizes >> bit) & 1 == 1
        begun[ahead] = _shifted(begun[ahead], 1 << bit)
    return sums ^ begun


def _byte_table() -> _Table:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(0x82F63B78), table >> np.uint32(1))
    return table


def _pair_table() -> _Table:
    if 0 not in _tables:
        one, pairs = _byte_table(), np.arange(1 << 16, dtype=np.uint32)
        for _ in range(2):
            pairs = (pairs >> np.uint32(8)) ^ one[pairs & np.uint32(0xFF)]
        _tables[0] = pairs
    return _tables[0]


def _shifted(sums: _Table, count: int) -> _Table:
    """Return the checksums after ``count`` zero bytes; ``count`` is a power of two."""
    table = _tables.get(count)
    if table is None:
        single = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
        if count == 1:
            moved = (single >> np.uint32(8)) ^ _byte_table()[single & np.uint32(0xFF)]
        else:
            moved = _shifted(_shifted(single, count // 2), count // 2)
        # Four tables of a byte each instead of 32 bits: sums of the bits' images.
        table = np.zeros((4, 256), np.uint32)
        for bit in range(32):
            has = (np.arange(256) >> (bit & 7)) & 1 == 1
            table[bit >> 3, has] ^= moved[bit]
        _tables[count] = table
    octets = sums[:, None] >> np.array([0, 8, 16, 24], np.uint32) & np.uint32(0xFF)
    joined: _Table = np.bitwise_xor.reduce(table[np.arange(4), octets], axis=1)
    return joined
