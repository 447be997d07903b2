"""The headers of the pages of a Parquet file, parsed without Arrow; ``page_checks`` judges them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from .thrift import (
    I32,
    NUMBER,
    SMALL,
    STRUCT,
    FooterFault,
    LazyPattern,
    integer,
    next_field,
    number,
    short_string,
    skip,
)

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
