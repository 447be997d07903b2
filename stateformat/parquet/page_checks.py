"""Checks the pages of a Parquet file before Arrow may decode them (SPEC.md section 7.4)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from .footer import (
    I32,
    NUMBER,
    SMALL,
    STRUCT,
    ColumnChunk,
    Footer,
    FooterFault,
    LazyPattern,
    Leaf,
    RowGroup,
    integer,
    next_field,
    number,
    short_string,
    skip,
)

# ---- page headers --------------------------------------------------------------------------------
#
# The headers of the pages of a Parquet file, parsed without Arrow.


DATA: Final = 0
DICTIONARY: Final = 2
DATA_V2: Final = 3
"""Kinds of pages."""
_HEADER_BYTES_MAX: Final = 64 << 10
# Fields of a page header; then, for each kind of page, the field of its own header and, within
# that, the field of its encoding.
_KIND, _SIZE, _STORED, _CHECKSUM = 1, 2, 3, 4
_OWN: Final = {DATA: (5, 2), DICTIONARY: (7, 2), DATA_V2: (8, 4)}


class Page(NamedTuple):
    """A page by its header: decompressed size, Parquet's encoding number, start of the body."""

    kind: int
    size_bytes: int
    stored_bytes: int
    values: int
    encoding: int
    has_checksum: bool
    start: int


def pages(data: Any, at: int, end: int) -> Iterator[Page]:
    """Yield the pages that fill the bytes from ``at`` to ``end``. Raises ``FooterFault``."""
    while at < end:
        found = _USUAL_PAGE.match(data, at, end)
        if found is None:
            page = _walked(data, at, end)
        else:
            size_bytes, stored, values, encoding = map(number, found.group("size", "stored", "values", "encoding"))
            page = Page(DATA, size_bytes, stored, values, encoding, found["checksum"] is not None, found.end())
        if min(page.size_bytes, page.stored_bytes, page.values) < 0 or page.stored_bytes > end - page.start:
            raise FooterFault("a page is larger than the column chunk in which it lies, or less than nothing")
        yield page
        at = page.start + page.stored_bytes


def _usual_page() -> bytes:
    """Return a pattern of a data page's header as Arrow writes it; levels by RLE, number 3."""
    return b"".join(
        (
            rb"\x15\x00\x15(?P<size>%b)\x15(?P<stored>%b)" % (NUMBER, NUMBER),
            rb"(?:\x15(?P<checksum>%b)\x1c|\x2c)\x15(?P<values>%b)" % (NUMBER, NUMBER),
            rb"\x15(?P<encoding>%b)\x15\x06\x15\x06" % SMALL,
            rb"(?:\x1c(?:[\x18\x28]%b|[\x16\x26]%b|[\x11\x12\x21\x22])*+\x00)?+" % (short_string(), NUMBER),
            rb"\x00\x00",
        )
    )


_USUAL_PAGE: Final = LazyPattern(_usual_page)


def _walked(data: Any, at: int, end: int) -> Page:
    """Return a page header of any form."""
    window = bytes(memoryview(data)[at : min(end, at + _HEADER_BYTES_MAX)])
    try:
        numbers, own, length = _structure(window, 0)
    except IndexError:
        raise FooterFault("a page header is cut short, or too long") from None
    kind = numbers.get(_KIND, -1)
    field, encoding = _OWN.get(kind, (0, 0))
    if not {_SIZE, _STORED} <= numbers.keys() or set(own) != {field} or not {1, encoding} <= own[field].keys():
        raise FooterFault("a page header is none of a data page or a dictionary, or lacks a number")
    found = own[field]
    return Page(kind, numbers[_SIZE], numbers[_STORED], found[1], found[encoding], _CHECKSUM in numbers, at + length)


def _structure(data: bytes, at: int, *, deeper: bool = True) -> tuple[dict[int, int], dict[int, dict[int, int]], int]:
    """Return 32-bit numbers of a structure by field, those of inner structures, and its end."""
    numbers: dict[int, int] = {}
    own: dict[int, dict[int, int]] = {}
    field = 0
    while head := data[at]:
        field, at = next_field(data, at, field)
        kind = head & 15
        if field in numbers or field in own:
            raise FooterFault("a page header says something twice")
        if kind == I32:
            numbers[field], at = integer(data, at, kind, I32)
        elif kind == STRUCT and deeper:
            own[field], _, at = _structure(data, at, deeper=False)
        else:
            at = skip(data, at, kind, 1)
    return numbers, own, at + 1


# ---- page checks ---------------------------------------------------------------------------------
#
# Check pages of a Parquet file before Arrow decodes them (SPEC.md 7.2, 7.4).
#
# Theory of operation. Arrow never compares page headers with the footer, so this module does.
# *Memory*: codecs, run lengths and dictionaries turn few bytes into gigabytes; what headers declare
# must fit the footer and the limits of readers. *Truth*: a reader of some row groups cannot verify
# the digest of the whole file, and page checksums do not cover the headers, so these must agree
# with the footer. Data pages 2.0 hold lengths that the footer lacks; such files are verified whole.


DECODED_BYTES_MAX: Final = 128 << 20
"""Memory that pieces decoded at a time may always take. Beyond it they may take …"""
DECODED_RATIO_MAX: Final = 4
"""… this many times the uncompressed bytes they declare, …"""
STORED_RATIO_MAX: Final = 64
"""… but at most this many times their stored bytes."""
SEGMENT_BYTES_MAX: Final = 2 << 30
"""Memory that a whole decoded segment may take; more only within the next ratio."""
SEGMENT_RATIO_MAX: Final = 1024
_BYTE_ARRAY, _FIXED = 6, 7
# Bytes of a value in memory, by Parquet's number of the physical type.
_WIDTHS: Final = {0: 1, 1: 4, 2: 8, 3: 8, 4: 4, 5: 8, _BYTE_ARRAY: 4}
_CODECS: Final = {0: None, 1: "snappy", 5: "lz4_hadoop_raw", 6: "zstd", 7: "lz4_raw"}
CODEC_NAMES: Final = dict(enumerate(("UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW")))
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
# The encodings by a dictionary, as Thrift codes their numbers.
_REPEATING: Final = frozenset({2 << 1, 8 << 1})
_ZSTD: Final = 6
# LZ4 never expands a byte to more than 255 bytes, and Snappy to fewer.
_EXPANSION_MAX: Final = 255
_SMALL_CHUNK_BYTES: Final = (96 << 20) // _EXPANSION_MAX
HOLE_BYTES_MAX: Final = 64 << 10
"""Bytes between two ranges that are cheaper to read than to skip."""


class ByteRange(NamedTuple):
    """Bytes of a file, and the position where they begin."""

    start: int
    data: pa.Buffer


class PartialFile:
    """A file with only some ranges in memory; reads outside of them raise ``OSError``."""

    closed = False

    def __init__(self, held: Sequence[ByteRange], size_bytes: int) -> None:
        self._held = held
        self._size_bytes = size_bytes
        self._position = 0

    def read(self, length: int = -1) -> pa.Buffer:
        start = self._position
        stop = self._size_bytes if length < 0 else start + length
        for span in self._held:
            if span.start <= start and stop <= span.start + span.data.size:
                self._position = stop
                return span.data.slice(start - span.start, stop - start)
        raise OSError(f"bytes {start} to {stop} belong to no column")

    def seek(self, position: int, whence: int = 0) -> int:
        self._position = position + (0, self._position, self._size_bytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        """Does nothing; pyarrow calls it."""


class LimitFault(FooterFault):
    """The data exceeds a limit of readers."""


def decoded_bytes(footer: Footer, leaves: Sequence[int] | None = None) -> list[int]:
    """Return the least memory each row group takes by its footer: its fixed-width values.

    ``leaves``, here and below: the numbers of the leaves that are read; None: all.
    """
    widths = _leaf_widths(footer)
    if leaves is not None:
        return [sum(widths[at] * group.chunks[at].values for at in leaves) for group in footer.row_groups]
    return [
        sum(width * chunk.values for width, chunk in zip(widths, group.chunks, strict=True))
        for group in footer.row_groups
    ]


def stored_bytes(footer: Footer, leaves: Sequence[int] | None = None) -> list[int]:
    """Return the bytes of each row group in the file."""
    chosen = range(len(footer.leaves)) if leaves is None else leaves
    return [sum(group.chunks[at].size_bytes for at in chosen) for group in footer.row_groups]


def have_string_dictionary(footer: Footer, leaves: Sequence[int] | None = None) -> list[bool]:
    """Return whether each row group has strings in a dictionary.

    They may take more memory than it declares.
    """
    chosen = range(len(footer.leaves)) if leaves is None else leaves
    texts = [number for number in chosen if footer.leaves[number].type == _BYTE_ARRAY]
    return [any(_REPEATING.intersection(group.chunks[at].encodings) for at in texts) for group in footer.row_groups]


def string_bytes(footer: Footer, group: Any) -> int:
    """Return the most that strings add: the size of their pages by pyarrow's metadata."""
    return sum(
        group.column(number).total_uncompressed_size
        for number, leaf in enumerate(footer.leaves)
        if leaf.type == _BYTE_ARRAY
    )


def check_columns(
    footer: Footer, codecs: frozenset[str], encodings: frozenset[str], *, clause: str = "SPEC.md section 5.5"
) -> None:
    """Check codecs, encodings and values of flat columns by the footer. Raises ``FooterFault``."""
    known = {(chunk.codec, chunk.encodings) for group in footer.row_groups for chunk in group.chunks}
    wrong = {
        (codec, coded)
        for codec, coded in known
        if CODEC_NAMES.get(codec) not in codecs
        or any(ENCODING_NAMES.get(zigzag(value), "") not in encodings for value in coded)
    }
    flat = [leaf.flat for leaf in footer.leaves]
    for group in footer.row_groups:
        for leaf, single, chunk in zip(footer.leaves, flat, group.chunks, strict=True):
            if wrong and (chunk.codec, chunk.encodings) in wrong:
                named = ", ".join(ENCODING_NAMES.get(zigzag(value), "an unknown one") for value in chunk.encodings)
                codec = CODEC_NAMES.get(chunk.codec, f"codec {chunk.codec}")
                raise FooterFault(f"column {leaf.path} is stored by {codec} and {named}, which {clause} does not list")
            if single and chunk.values != group.rows:
                raise FooterFault(
                    f"column {leaf.path} has {chunk.values:,} values in a row group of {group.rows:,} rows"
                )


def byte_ranges(
    footer: Footer, first: int, last: int, leaves: Sequence[int] | None = None, *, hole_bytes: int = HOLE_BYTES_MAX
) -> list[tuple[int, int]]:
    """Return (start, length) of row groups first … last in the file, joined over small gaps."""
    chunks = sorted(
        (chunk.start, chunk.start + chunk.size_bytes)
        for group in footer.row_groups[first : last + 1]
        for chunk in (group.chunks if leaves is None else [group.chunks[at] for at in leaves])
    )
    found: list[list[int]] = []
    for start, stop in chunks:
        if found and start - found[-1][1] <= hole_bytes:
            found[-1][1] = max(found[-1][1], stop)
        else:
            found.append([start, stop])
    return [(start, stop - start) for start, stop in found]


def check_pages(
    footer: Footer,
    first: int,
    last: int,
    held: Sequence[ByteRange],
    *,
    leaves: Sequence[int] | None = None,
    limit: int | None = None,
    kept_encoded: frozenset[str] = frozenset(),
    is_verified: bool = True,
) -> bool:
    """Check the pages of row groups first … last; return False if only the file's digest can.

    ``held`` are their bytes; ``kept_encoded`` are columns read as dictionaries; ``limit`` replaces
    the memory limit. ``is_verified``: a digest has verified the bytes, so only memory is checked,
    except for small chunks of plain numbers. Raises ``FooterFault`` or ``LimitFault``.
    """
    groups = footer.row_groups[first : last + 1]
    limit = _limit(groups) if limit is None else limit
    widths = _leaf_widths(footer)
    # The leaves whose pages need no check if a digest has verified them and they are small.
    plain = [is_verified and leaf.flat and leaf.type != _BYTE_ARRAY for leaf in footer.leaves]
    every = [*zip(footer.leaves, widths, plain, strict=True)]
    chosen = [*range(len(every))] if leaves is None else leaves
    taken, sure = 0, True
    for group in groups:
        pages_bytes = 0
        for at in chosen:
            (leaf, width, is_plain), chunk = every[at], group.chunks[at]
            taken += width * chunk.values
            if not chunk.values:
                continue  # It is not read, so its place according to the footer need not be right.
            if is_plain and chunk.size_bytes <= _SMALL_CHUNK_BYTES and chunk.codec != _ZSTD:
                continue
            try:
                found = _walk(leaf, chunk, held, is_kept=leaf.path in kept_encoded, is_verified=is_verified)
            except FooterFault as fault:
                raise FooterFault(f"column {leaf.path}: {fault}") from None
            pages_bytes, taken, sure = pages_bytes + found[0], taken + found[1], sure and found[2]
            if pages_bytes > group.uncompressed_bytes:
                raise LimitFault(
                    f"the pages of a row group have {pages_bytes:,} uncompressed bytes and more by their headers, its "
                    f"footer says {group.uncompressed_bytes:,}"
                )
            if taken > limit:
                break
    _check_taken(groups, taken, limit)
    return sure


def check_row_group(group: RowGroup, taken: int) -> None:
    """Refuse a row group that takes ``taken`` bytes of memory, as readers would."""
    _check_taken([group], taken, _limit([group]))


def _limit(groups: Sequence[RowGroup]) -> int:
    declared = sum(group.uncompressed_bytes for group in groups)
    return max(DECODED_BYTES_MAX, min(DECODED_RATIO_MAX * declared, STORED_RATIO_MAX * _stored(groups)))


def _stored(groups: Sequence[RowGroup]) -> int:
    return sum(chunk.size_bytes for group in groups for chunk in group.chunks)


def _check_taken(groups: Sequence[RowGroup], taken: int, limit: int) -> None:
    if taken > limit:
        rows, encoded = sum(group.rows for group in groups), sum(group.uncompressed_bytes for group in groups)
        raise LimitFault(
            f"{rows:,} of its rows would take {taken:,} bytes of memory and more; at most {limit:,} are taken for "
            f"{encoded:,} encoded and {_stored(groups):,} stored bytes"
        )


def zigzag(coded: int) -> int:
    """Return a small number as Thrift encodes it."""
    return (coded >> 1) ^ -(coded & 1)


def check_size(size_bytes: int, rows: int, decoded: int) -> None:
    """Refuse a segment whose rows take at least ``decoded`` bytes, many times its size."""
    limit = max(SEGMENT_BYTES_MAX, SEGMENT_RATIO_MAX * size_bytes)
    if decoded > limit:
        raise LimitFault(
            f"its {rows:,} rows would take {decoded:,} bytes; at most {limit:,} are taken for {size_bytes:,} stored"
            " ones"
        )


def _leaf_widths(footer: Footer) -> list[int]:
    return [_WIDTHS.get(leaf.type, max(leaf.length, 16)) for leaf in footer.leaves]


def _walk(
    leaf: Leaf, chunk: ColumnChunk, held: Sequence[ByteRange], *, is_kept: bool, is_verified: bool
) -> tuple[int, int, bool]:
    base, data = _within(chunk, held)
    at = chunk.start - base
    values = pages_bytes = longest = 0
    is_text, sure = leaf.type == _BYTE_ARRAY, True
    for page in pages(data, at, at + chunk.size_bytes):
        if page.encoding not in ENCODING_NAMES:
            raise FooterFault("a page has an encoding that nobody knows")
        if not is_verified:
            _compare(chunk, page)
            sure &= page.kind != DATA_V2
        size_bytes = page.size_bytes or page.stored_bytes
        pages_bytes += size_bytes
        if page.kind == DICTIONARY:
            width = 4 if is_text else max(leaf.length, 1) if leaf.type == _FIXED else max(_WIDTHS.get(leaf.type, 1), 1)
            if values or longest or page.values * width > size_bytes:
                raise FooterFault("it has a dictionary in the wrong place, or of too many values")
            longest = size_bytes
            if is_text and not is_kept and longest * chunk.values > DECODED_BYTES_MAX // 4:
                longest = _longest(chunk, page, data)
            continue
        values += page.values
        if is_verified and values >= chunk.values:
            break
    if values != chunk.values:
        raise FooterFault(f"its pages have {values:,} values, its footer says {chunk.values:,}")
    if not is_text:
        return pages_bytes, 0, sure
    return pages_bytes, pages_bytes + (0 if is_kept else longest * chunk.values), sure


def _compare(chunk: ColumnChunk, page: Page) -> None:
    if not page.has_checksum:
        raise FooterFault("a page has no checksum, which section 5.5 of SPEC.md asks for")
    if page.encoding << 1 not in chunk.encodings:
        raise FooterFault(f"a page says an encoding, {ENCODING_NAMES[page.encoding]}, that its footer does not list")
    if not chunk.codec and page.size_bytes != page.stored_bytes:
        raise FooterFault(f"a page has {page.stored_bytes:,} bytes, is not compressed, and says {page.size_bytes:,}")


def _within(chunk: ColumnChunk, held: Sequence[ByteRange]) -> tuple[int, Any]:
    at = bisect_right(held, chunk.start, key=lambda span: span.start) - 1
    if at < 0 or chunk.start + chunk.size_bytes > held[at].start + held[at].data.size:
        raise FooterFault("a column chunk lies beyond the file, or in its footer")
    return held[at].start, held[at].data


def _longest(chunk: ColumnChunk, page: Page, data: Any) -> int:
    """Return the longest value of a dictionary of strings, in bytes."""
    stored = memoryview(data)[page.start : page.start + page.stored_bytes]
    codec = _CODECS.get(chunk.codec)
    try:
        plain = stored if codec is None else memoryview(pa.Codec(codec).decompress(stored, page.size_bytes))
    except (pa.ArrowException, ValueError, OSError) as error:
        raise FooterFault(f"a dictionary cannot be decompressed: {error}") from None
    guessed = _longest_of_short(plain, page.values)
    if guessed is not None:
        return guessed
    at = longest = 0
    for _ in range(page.values):
        if at + 4 > len(plain):
            raise FooterFault("a dictionary ends within a value")
        length = int.from_bytes(plain[at : at + 4], "little")
        longest = max(longest, length)
        at += 4 + length
    return longest


def _longest_of_short(plain: memoryview, values: int) -> int | None:
    """Return the longest of ``values`` texts, or None if they are not as guessed.

    Each text is guessed to be below 64 KiB and without zero bytes. A length takes four bytes, and
    the last two are 0. Their positions are guesses: a guess counts only if each text ends where the
    next length begins.
    """
    import numpy as np

    data = np.frombuffer(plain, np.uint8)
    if len(data) < 4 or not values:
        return None
    at = np.flatnonzero((data[2:-1] | data[3:]) == 0)
    # If the length has zeros before them too, the last such position counts.
    at = at[np.append(at[1:] != at[:-1] + 1, True)] if len(at) else at
    if len(at) != values or at[0]:
        return None
    lengths = data[at].astype(np.int64) | data[at + 1].astype(np.int64) << 8
    ends = at + 4 + lengths
    return int(lengths.max()) if (ends[:-1] == at[1:]).all() and ends[-1] <= len(data) else None
