"""Whether the pages of a Parquet file may be decoded: judged by their headers before Arrow sees them (SPEC.md 7.2, 7.4).

Theory of operation. A page says in its header how large it becomes and how many values it has, and the footer says it too;
Arrow believes the one and never compares it with the other. So the headers of the pages that are wanted are walked first, from
the places that the footer gives, once, and two questions are asked of each.

*How much memory?* A few bytes can become gigabytes: by a codec, by run lengths, by a dictionary with one long value that
every row names. What headers say is added up, against what the footer (and so the manifest) declared, and against what a
reader takes at most. Nothing is decompressed for it, but a dictionary that could make the difference.

*Is it what was written?* Whoever reads a few row groups cannot verify the digest of the whole. The footer has a digest of its
own and every page a checksum; but Parquet's checksum is of what follows the header of a page. One flipped bit in a header
gives a page another number of values, two turn BYTE_STREAM_SPLIT into PLAIN, and Arrow reads other rows from bytes whose
checksum is right. So everything in a header that says how its bytes are to be read must be what the footer says of the
column chunk; and the checksum must be there: Arrow passes over pages without one. Data pages 2.0 say in their header how
long their levels are, where the footer has nothing to compare with: segments that have them (this library writes none) can
only be verified whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa

from .footer import ColumnChunk, Footer, Leaf, RowGroup
from .page_headers import DATA_V2, DICTIONARY, Page, pages
from .thrift import FooterFault

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
# The encodings by a dictionary, as Thrift codes their numbers.
_REPEATING: Final = frozenset({2 << 1, 8 << 1})
_ZSTD: Final = 6
# LZ4 never expands a byte to more than 255, and Snappy to fewer.
_EXPANSION_MAX: Final = 255
_SMALL_CHUNK_BYTES: Final = (96 << 20) // _EXPANSION_MAX
_HOLE_BYTES_MAX: Final = 64 << 10


class ByteRange(NamedTuple):
    """Bytes of a file: where they begin, and what they are."""

    start: int
    data: pa.Buffer


class PartialFile:
    """Parts of an object that are in memory, as a file."""

    closed = False

    def __init__(self, held: Sequence[ByteRange], size_bytes: int) -> None:
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


def have_string_dictionary(footer: Footer) -> list[bool]:
    """Of each row group whether it has strings in a dictionary: then they can take more than it declares."""
    texts = [number for number, leaf in enumerate(footer.leaves) if leaf.type == _BYTE_ARRAY]
    return [any(_REPEATING.intersection(group.chunks[at].encodings) for at in texts) for group in footer.row_groups]


def string_bytes(footer: Footer, group: Any) -> int:
    """What strings take beside: at most the pages of their columns. ``group``: its metadata, as pyarrow has it."""
    return sum(
        group.column(number).total_uncompressed_size
        for number, leaf in enumerate(footer.leaves)
        if leaf.type == _BYTE_ARRAY
    )


def check_columns(
    footer: Footer, codecs: frozenset[str], encodings: frozenset[str], *, clause: str = "SPEC.md section 5.5"
) -> None:
    """Codecs and encodings of every chunk, and values of flat columns, by the footer alone. Raises ``FooterFault``."""
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
                raise FooterFault(
                    f"column {leaf.path} is stored by {CODEC_NAMES.get(chunk.codec, f'codec {chunk.codec}')} and {named}, "
                    f"which {clause} does not list"
                )
            if single and chunk.values != group.rows:
                raise FooterFault(
                    f"column {leaf.path} has {chunk.values:,} values in a row group of {group.rows:,} rows"
                )


def byte_ranges(footer: Footer, first: int, last: int) -> list[tuple[int, int]]:
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
    held: Sequence[ByteRange],
    *,
    limit: int | None = None,
    kept_encoded: frozenset[str] = frozenset(),
    is_verified: bool = True,
) -> bool:
    """Judge the pages of row groups first … last; whether their rows are those that were written, if checksums fit.

    False where only the digest of the whole can say so. ``held``: the bytes in which they lie, by where they begin.
    ``limit``: of the bytes in memory, where it does not follow from what the row groups declare. ``kept_encoded``: columns
    that are read as dictionaries. ``is_verified``: a digest vouches for the bytes; then only memory is in question, and
    small chunks of plain numbers are left alone: what they can become follows from their bytes, and it is little.
    Raises ``FooterFault`` where pages and footer disagree, and ``LimitFault`` where they would take too much.
    """
    groups = footer.row_groups[first : last + 1]
    limit = _limit(groups) if limit is None else limit
    widths = _leaf_widths(footer)
    # Which leaves need no look at their pages, where a digest vouches for them and they are small.
    plain = [is_verified and leaf.flat and leaf.type != _BYTE_ARRAY for leaf in footer.leaves]
    taken, sure = 0, True
    for group in groups:
        pages_bytes = 0
        for leaf, width, is_plain, chunk in zip(footer.leaves, widths, plain, group.chunks, strict=True):
            taken += width * chunk.values
            if not chunk.values:
                continue  # Nothing of it is read, and what its footer says of its place need not be true.
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
    """Refuse a row group that readers refuse. ``taken``: the bytes of memory that it takes."""
    _check_taken([group], taken, _limit([group]))


def _limit(groups: Sequence[RowGroup]) -> int:
    declared = sum(group.uncompressed_bytes for group in groups)
    return max(DECODED_BYTES_MAX, min(DECODED_RATIO_MAX * declared, STORED_RATIO_MAX * _stored(groups)))


def _stored(groups: Sequence[RowGroup]) -> int:
    return sum(chunk.size_bytes for group in groups for chunk in group.chunks)


def _check_taken(groups: Sequence[RowGroup], taken: int, limit: int) -> None:
    if taken > limit:
        raise LimitFault(
            f"{sum(group.rows for group in groups):,} of its rows would take {taken:,} bytes of memory and more; at most "
            f"{limit:,} are taken for {sum(group.uncompressed_bytes for group in groups):,} encoded and "
            f"{_stored(groups):,} stored bytes"
        )


def zigzag(coded: int) -> int:
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


def _walk(
    leaf: Leaf, chunk: ColumnChunk, held: Sequence[ByteRange], *, is_kept: bool, is_verified: bool
) -> tuple[int, int, bool]:
    """Of a chunk: the uncompressed bytes of all pages, bytes in memory beside the fixed width, and whether it is sure."""
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
    """A page of which nothing is known but its checksum, with the chunk that the footer describes."""
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
