"""The headers of pages, which no checksum covers (SPEC.md section 7.2), against the footer, which a digest does.

Theory of operation. Whoever reads a few row groups cannot verify the digest of the segment. The footer has a digest of its
own and every page a checksum; but Parquet's checksum is of what follows the header of a page. One flipped bit in a header
gives a page another number of values, two turn BYTE_STREAM_SPLIT into PLAIN, and Arrow reads other rows from bytes whose
checksum is right. So everything in a header that says how its bytes are to be read must be what the footer says of the
column chunk: encoding, values in all, sizes, and that pages fill the chunk. And the checksum must be there: Arrow passes
over pages without one.

Data pages 2.0 say in their header how long their levels are, where the footer has nothing to compare with. Segments that
have them (this library writes none) can only be verified whole.
"""

from __future__ import annotations

import functools
import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from stateformat.footer import Chunk, Footer
from stateformat.pages import Span
from stateformat.thrift import I32, NUMBER, SMALL, STRUCT, FooterFault, integer, next_field, number, short_string, skip

_HEADER_BYTES_MAX: Final = 64 << 10
_UNCOMPRESSED: Final = 0
# Fields of a page header; kinds of pages; and by kind the field of its own header, and in that the one of its encoding.
_KIND, _SIZE, _STORED, _CHECKSUM = 1, 2, 3, 4
_DATA, _DICTIONARY, _DATA_V2 = 0, 2, 3
_OWN: Final = {_DATA: (5, 2), _DICTIONARY: (7, 2), _DATA_V2: (8, 4)}


class _Header(NamedTuple):
    """What is compared. ``coded``: the number of the encoding as Thrift stores it. ``end``: where the header ends."""

    kind: int
    size_bytes: int
    stored_bytes: int
    values: int
    coded: int
    end: int


def check_headers(footer: Footer, first: int, last: int, held: Sequence[Span]) -> bool:
    """Compare the headers of all pages of row groups first … last with the footer. Raises ``FooterFault``.

    True: with checksums that fit, rows are those that were written. False where nothing but the digest can say so.
    ``held``: the bytes in which the row groups lie, by where they begin. Costs a few microseconds for each page.
    """
    sure = True
    for group in footer.row_groups[first : last + 1]:
        for leaf, chunk in zip(footer.leaves, group.chunks, strict=True):
            try:
                sure &= _check_chunk(chunk, held)
            except IndexError:
                raise FooterFault(f"a page header of column {leaf.path} is cut short") from None
            except FooterFault as fault:
                raise FooterFault(f"column {leaf.path}: {fault}") from None
    return sure


def _check_chunk(chunk: Chunk, held: Sequence[Span]) -> bool:
    span = held[max(0, bisect_right(held, chunk.start, key=lambda item: item.start) - 1)]
    at, end = chunk.start - span.start, chunk.start - span.start + chunk.size_bytes
    if at < 0 or end > span.data.size:
        raise FooterFault("it lies beyond the file, or in its footer")
    values, sure = 0, True
    while at < end:
        header = _header(span.data, at, end)
        if header.coded not in chunk.encodings:
            raise FooterFault(f"a page says an encoding (number {header.coded >> 1}) that its footer does not list")
        if chunk.codec == _UNCOMPRESSED and header.size_bytes != header.stored_bytes:
            raise FooterFault(
                f"a page has {header.stored_bytes:,} bytes, is not compressed, and says {header.size_bytes:,}"
            )
        values += header.values
        sure &= header.kind != _DATA_V2
        at = header.end + header.stored_bytes
    if (at, values) != (end, chunk.values):
        raise FooterFault(
            f"its pages have {values:,} values and {at - end:+,} bytes more than its footer says, {chunk.values:,} values"
        )
    return sure


def _header(data: Any, at: int, end: int) -> _Header:
    usual = _usual_page().match(data, at, end)
    if usual is not None:
        size_bytes, stored_bytes, values, coded = usual.groups()
        return _Header(_DATA, number(size_bytes), number(stored_bytes), number(values), coded[0], usual.end())
    window = bytes(memoryview(data)[at : min(end, at + _HEADER_BYTES_MAX)])
    numbers, own, length = _structure(window, 0)
    field, encoding = _OWN.get(numbers.get(_KIND, -1), (0, 0))
    found = own.get(field, {})
    if not {_SIZE, _STORED} <= numbers.keys() or not {1, encoding} <= found.keys() or len(own) != 1:
        raise FooterFault("a page header is none of a data page or a dictionary, or lacks a number")
    if _CHECKSUM not in numbers:
        raise FooterFault("a page has no checksum, which section 5.5 of SPEC.md asks for")
    if min(numbers[_SIZE], numbers[_STORED], found[1], found[encoding]) < 0:
        raise FooterFault("a page header has less than no bytes or values")
    values = 0 if numbers[_KIND] == _DICTIONARY else found[1]
    return _Header(numbers[_KIND], numbers[_SIZE], numbers[_STORED], values, found[encoding] << 1, at + length)


@functools.cache
def _usual_page() -> re.Pattern[bytes]:
    """The header of a data page as Arrow writes it, with checksum, and with statistics or without."""
    numbers = b"\\x15(%b)\\x15(%b)\\x15%b\\x1c\\x15(%b)" % (NUMBER, NUMBER, NUMBER, NUMBER)
    # Levels by RLE, its number being 3.
    encodings = b"\\x15(%b)\\x15\\x06\\x15\\x06" % SMALL
    statistics = (
        rb"(?:\x1c(?:[\x18\x28]" + short_string() + rb"|[\x16\x26]" + NUMBER + rb"|[\x11\x12\x21\x22])*+\x00)?+"
    )
    return re.compile(rb"\x15\x00" + numbers + encodings + statistics + rb"\x00\x00", re.DOTALL)


def _structure(data: bytes, at: int, *, deeper: bool = True) -> tuple[dict[int, int], dict[int, dict[int, int]], int]:
    """The 32-bit numbers of a structure by field, those of the structures in it, and where it ends."""
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


__all__ = ["check_headers"]
