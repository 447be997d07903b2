"""How much memory the pages of a Parquet file take, found out before they are decoded (SPEC.md section 7.4).

Theory of operation. A page says in its header how large it becomes and how many values it has, and the footer says it too;
Arrow believes the one and never compares it with the other. A few bytes can so become gigabytes: by a codec, by run lengths,
by a dictionary with one long value that every row names. So the headers of the pages that are wanted are walked first, from
the places that the footer gives, and what they say is added up: against what the footer (and so the manifest) declared, and
against what a reader takes at most. Nothing is decompressed for it, but a dictionary that could make the difference.

Small chunks of plain numbers are left alone. What they can become follows from their bytes, and it is little.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from stateformat.footer import Chunk, Footer, Leaf
from stateformat.thrift import I32, NUMBER, SMALL, STRUCT, FooterFault, integer, number, short_string, skip

DECODED_BYTES_MAX: Final = 128 << 20
"""What pieces that are decoded at a time may take in memory, whatever they are stored in."""
DECODED_RATIO_MAX: Final = 4
"""They may take more: up to so many times what they declare (uncompressed, encoded) …"""
STORED_RATIO_MAX: Final = 64
"""… and up to so many times the bytes in which they are stored."""
SEGMENT_BYTES_MAX: Final = 2 << 30
"""What a whole segment may take, decoded, where it is not large itself."""
SEGMENT_RATIO_MAX: Final = 1024
"""How many times its size a segment may take, decoded, where that is more."""

_BYTE_ARRAY, _FIXED = 6, 7
# Bytes in memory of a value, by Parquet's number of the physical type.
_WIDTHS: Final = {0: 1, 1: 4, 2: 8, 3: 8, 4: 4, 5: 8, _BYTE_ARRAY: 4}
_CODECS: Final = {0: None, 1: "snappy", 5: "lz4_hadoop_raw", 6: "zstd", 7: "lz4_raw"}
CODEC_NAMES: Final = {
    0: "UNCOMPRESSED",
    1: "SNAPPY",
    2: "GZIP",
    3: "LZO",
    4: "BROTLI",
    5: "LZ4",
    6: "ZSTD",
    7: "LZ4_RAW",
}
ENCODING_NAMES: Final = {
    0: "PLAIN",
    2: "PLAIN_DICTIONARY",
    3: "RLE",
    4: "BIT_PACKED",
    5: "DELTA_BINARY_PACKED",
    6: "DELTA_LENGTH_BYTE_ARRAY",
    7: "DELTA_BYTE_ARRAY",
    8: "RLE_DICTIONARY",
    9: "BYTE_STREAM_SPLIT",
}
_ZSTD: Final = 6
# LZ4 never expands a byte to more than 255, and Snappy to fewer.
_EXPANSION_MAX: Final = 255
_SMALL_CHUNK_BYTES: Final = (96 << 20) // _EXPANSION_MAX
_HOLE_BYTES_MAX: Final = 64 << 10
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
# Of each kind of page: the field of its header, and in it that of the encoding.
_HEADERS: Final = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}


class Span(NamedTuple):
    """Bytes of a file: where they begin, and what they are."""

    start: int
    data: pa.Buffer


class HeldFile:
    """Parts of an object that are in memory, as a file."""

    closed = False

    def __init__(self, held: Sequence[Span], size_bytes: int) -> None:
        self._held = held
        self._size_bytes = size_bytes
        self._position = 0

    def read(self, length: int = -1) -> pa.Buffer:
        """The next bytes; ``OSError`` where they are not held."""
        start = self._position
        stop = self._size_bytes if length < 0 else start + length
        for span in self._held:
            if span.start <= start and stop <= span.start + span.data.size:
                self._position = stop
                return span.data.slice(start - span.start, stop - start)
        raise OSError(f"bytes {start} to {stop} belong to no column")

    def seek(self, position: int, whence: int = 0) -> int:
        """As of any file."""
        self._position = position + (0, self._position, self._size_bytes)[whence]
        return self._position

    def tell(self) -> int:
        """As of any file."""
        return self._position

    def close(self) -> None:
        """Nothing; pyarrow calls it."""


class LimitFault(FooterFault):
    """More than a reader takes."""


def decoded_bytes(footer: Footer) -> list[int]:
    """What each row group takes in memory at least, by its footer: values of fixed width, null ones too."""
    widths = _leaf_widths(footer)
    return [
        sum(width * chunk.values for width, chunk in zip(widths, group.chunks, strict=True))
        for group in footer.row_groups
    ]


def check_columns(
    footer: Footer, codecs: frozenset[str], encodings: frozenset[str], *, clause: str = "SPEC.md section 5.5"
) -> None:
    """Codecs and encodings of every chunk, and values of flat columns, by the footer alone. Raises ``FooterFault``."""
    known = {(chunk.codec, chunk.encodings) for group in footer.row_groups for chunk in group.chunks}
    wrong = {
        (codec, coded)
        for codec, coded in known
        if CODEC_NAMES.get(codec) not in codecs
        or any(ENCODING_NAMES.get(enumerated(value), "") not in encodings for value in coded)
    }
    flat = [leaf.flat for leaf in footer.leaves]
    for group in footer.row_groups:
        for leaf, single, chunk in zip(footer.leaves, flat, group.chunks, strict=True):
            if wrong and (chunk.codec, chunk.encodings) in wrong:
                named = ", ".join(ENCODING_NAMES.get(enumerated(value), "an unknown one") for value in chunk.encodings)
                raise FooterFault(
                    f"column {leaf.path} is stored by {CODEC_NAMES.get(chunk.codec, f'codec {chunk.codec}')} and {named}, "
                    f"which {clause} does not list"
                )
            if single and chunk.values != group.rows:
                raise FooterFault(
                    f"column {leaf.path} has {chunk.values:,} values in a row group of {group.rows:,} rows"
                )


def spans(footer: Footer, first: int, last: int) -> list[tuple[int, int]]:
    """(start, length) of the bytes of row groups first … last, those with small holes between them as one."""
    chunks = sorted(
        (chunk.start, chunk.start + chunk.size_bytes)
        for group in footer.row_groups[first : last + 1]
        for chunk in group.chunks
    )
    found: list[list[int]] = []
    for start, stop in chunks:
        if found and start - found[-1][1] <= _HOLE_BYTES_MAX:
            found[-1][1] = max(found[-1][1], stop)
        else:
            found.append([start, stop])
    return [(start, stop - start) for start, stop in found]


def check_pages(
    footer: Footer,
    first: int,
    last: int,
    held: Sequence[Span],
    *,
    limit: int | None = None,
    kept_encoded: frozenset[str] = frozenset(),
) -> int:
    """Walk the pages of row groups first … last; the bytes that they will take in memory, at most.

    ``held``: the bytes in which they lie, by where they begin. ``limit``: of these bytes, where it does not follow from what
    the row groups declare. ``kept_encoded``: columns that are read as dictionaries.
    Raises ``FooterFault`` where pages and footer disagree, and ``LimitFault`` where they would take too much.
    """
    groups = footer.row_groups[first : last + 1]
    declared = sum(group.uncompressed_bytes for group in groups)
    stored = sum(chunk.size_bytes for group in groups for chunk in group.chunks)
    if limit is None:
        limit = max(DECODED_BYTES_MAX, min(DECODED_RATIO_MAX * declared, STORED_RATIO_MAX * stored))
    widths = _leaf_widths(footer)
    taken = 0
    for group in groups:
        pages_bytes = 0
        for leaf, width, chunk in zip(footer.leaves, widths, group.chunks, strict=True):
            taken += width * chunk.values
            if not chunk.values:
                continue  # Nothing of it is read, and what its footer says of its place need not be true.
            if (
                leaf.flat
                and leaf.type != _BYTE_ARRAY
                and chunk.size_bytes <= _SMALL_CHUNK_BYTES
                and chunk.codec != _ZSTD
            ):
                continue
            size_bytes, more = _walk(leaf, chunk, held, keep=leaf.path in kept_encoded)
            pages_bytes, taken = pages_bytes + size_bytes, taken + more
            if pages_bytes > group.uncompressed_bytes:
                raise LimitFault(
                    f"the pages of a row group have {pages_bytes:,} uncompressed bytes and more by their headers, its "
                    f"footer says {group.uncompressed_bytes:,}"
                )
            if taken > limit:
                break
    if taken > limit:
        raise LimitFault(
            f"{sum(group.rows for group in groups):,} of its rows would take {taken:,} bytes of memory and more; at most "
            f"{limit:,} are taken for {declared:,} encoded and {stored:,} stored bytes"
        )
    return taken


def enumerated(coded: int) -> int:
    """A small number, as Thrift codes it."""
    return (coded >> 1) ^ -(coded & 1)


def check_size(size_bytes: int, rows: int, decoded: int) -> None:
    """Refuse a segment whose rows take many times its size. ``decoded``: the bytes that they take at least."""
    limit = max(SEGMENT_BYTES_MAX, SEGMENT_RATIO_MAX * size_bytes)
    if decoded > limit:
        raise LimitFault(
            f"its {rows:,} rows would take {decoded:,} bytes; at most {limit:,} are taken for {size_bytes:,} stored ones"
        )


def _leaf_widths(footer: Footer) -> list[int]:
    return [_WIDTHS.get(leaf.type, max(leaf.length, 16)) for leaf in footer.leaves]


def _walk(leaf: Leaf, chunk: Chunk, held: Sequence[Span], *, keep: bool) -> tuple[int, int]:
    """(uncompressed bytes of all pages, bytes in memory beside the fixed width) of a chunk."""
    base, data = _within(chunk, held)
    at, end = chunk.start - base, chunk.start - base + chunk.size_bytes
    values = pages_bytes = longest = 0
    is_text = leaf.type == _BYTE_ARRAY
    for page in _pages(data, at, end):
        pages_bytes += page.size_bytes
        if page.kind == _DICTIONARY:
            width = 4 if is_text else max(leaf.length, 1) if leaf.type == _FIXED else max(_WIDTHS.get(leaf.type, 1), 1)
            if values or longest or page.values * width > page.size_bytes:
                raise FooterFault(f"column {leaf.path} has a dictionary in the wrong place, or of too many values")
            longest = page.size_bytes
            if is_text and not keep and longest * chunk.values > DECODED_BYTES_MAX // 4:
                longest = _longest(chunk, page, data)
        values += page.values if page.kind != _DICTIONARY else 0
        if values >= chunk.values:
            break
    if values != chunk.values:
        raise FooterFault(f"the pages of column {leaf.path} have {values:,} values, its footer says {chunk.values:,}")
    if not is_text:
        return pages_bytes, 0
    return pages_bytes, pages_bytes + (0 if keep else longest * chunk.values)


def _within(chunk: Chunk, held: Sequence[Span]) -> tuple[int, Any]:
    at = bisect_right(held, chunk.start, key=lambda span: span.start) - 1
    if at < 0 or chunk.start + chunk.size_bytes > held[at].start + held[at].data.size:
        raise FooterFault("a column chunk lies beyond the file, or in its footer")
    return held[at].start, held[at].data


class _Page(NamedTuple):
    kind: int
    size_bytes: int
    stored_bytes: int
    values: int
    encoding: int
    start: int
    """Where its header ends."""


def _pages(data: Any, at: int, end: int) -> Iterator[_Page]:
    """The pages between two places, by their headers."""
    usual = _usual_page()
    while at < end:
        found = usual.match(data, at, end)
        if found is not None:
            size_bytes, stored, values, encoding = found.groups()
            page = _Page(
                _DATA, number(size_bytes), number(stored), number(values), enumerated(encoding[0]), found.end()
            )
        else:
            page = _header(data, at, end)
        if min(page.size_bytes, page.stored_bytes, page.values) < 0 or page.stored_bytes > end - page.start:
            raise FooterFault("a page is larger than the column chunk in which it lies, or less than nothing")
        if page.encoding not in ENCODING_NAMES:
            raise FooterFault("a page has an encoding that nobody knows")
        yield page._replace(size_bytes=max(page.size_bytes, page.stored_bytes)) if not page.size_bytes else page
        at = page.start + page.stored_bytes


@functools.cache
def _usual_page() -> re.Pattern[bytes]:
    """The header of a data page as Arrow writes it, with or without checksum and statistics."""
    numbers = b"\\x15(%b)\\x15(%b)(?:\\x15%b\\x1c|\\x2c)\\x15(%b)" % (NUMBER, NUMBER, NUMBER, NUMBER)
    statistics = (
        rb"(?:\x1c(?:[\x18\x28]" + short_string() + rb"|[\x16\x26]" + NUMBER + rb"|[\x11\x12\x21\x22])*+\x00)?+"
    )
    kinds = b"\\x15(%b)\\x15%b\\x15%b" % (SMALL, SMALL, SMALL)
    return re.compile(rb"\x15\x00" + numbers + kinds + statistics + rb"\x00\x00", re.DOTALL)


_HEADER_BYTES_MAX: Final = 64 << 10


def _header(data: Any, at: int, end: int) -> _Page:
    """A page header of any form, walked."""
    window = bytes(memoryview(data)[at : min(end, at + _HEADER_BYTES_MAX)])
    try:
        numbers, inner, length = _structure(window, 0, {5, 7, 8})
    except IndexError:
        raise FooterFault("a page header is cut short, or too long") from None
    kind = numbers.get(1, -1)
    field, encoding = _HEADERS.get(kind, (0, 0))
    if not {2, 3} <= numbers.keys() or set(inner) != {field} or not {1, encoding} <= inner[field].keys():
        raise FooterFault("a page header is none of a data page or a dictionary, or lacks a number")
    found = inner[field]
    return _Page(kind, numbers[2], numbers[3], found[1], found[encoding], at + length)


def _structure(data: bytes, at: int, deeper: set[int]) -> tuple[dict[int, int], dict[int, dict[int, int]], int]:
    """The 32-bit numbers of a structure by field, those of the structures in it that are wanted, and where it ends."""
    numbers: dict[int, int] = {}
    inner: dict[int, dict[int, int]] = {}
    field = 0
    while head := data[at]:
        at += 1
        if head < 16:
            raise FooterFault("a page header is written in an unusual way")
        field += head >> 4
        kind = head & 15
        if kind == I32:
            numbers[field], at = integer(data, at, kind, I32)
        elif kind == STRUCT and field in deeper:
            inner[field], _, at = _structure(data, at, set())
        else:
            at = skip(data, at, kind, 1)
    return numbers, inner, at + 1


def _longest(chunk: Chunk, page: _Page, data: Any) -> int:
    """The length of the longest value of a dictionary of strings."""
    stored = memoryview(data)[page.start : page.start + page.stored_bytes]
    codec = _CODECS.get(chunk.codec)
    try:
        plain = stored if codec is None else memoryview(pa.Codec(codec).decompress(stored, page.size_bytes))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise FooterFault(f"a dictionary cannot be decompressed: {error}") from None
    at = longest = 0
    for _ in range(page.values):
        if at + 4 > len(plain):
            raise FooterFault("a dictionary ends within a value")
        length = int.from_bytes(plain[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return longest


__all__ = ["HeldFile", "LimitFault", "Span", "check_columns", "check_pages", "check_size", "decoded_bytes", "spans"]
