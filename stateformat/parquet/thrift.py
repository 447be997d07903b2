"""Thrift's compact protocol, as far as Parquet's metadata needs it, without building objects.

Functions take bytes and a position, and return a value and the position after it. They raise
``IndexError`` for bytes that end too soon, :class:`FooterFault` for any other fault.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final

# Types of fields in Thrift's compact protocol.
_BYTE, _INTEGERS, I32, I64, _DOUBLE, BINARY, LISTS, _MAP, STRUCT = 3, (4, 5, 6), 5, 6, 7, 8, (9, 10), 11, 12
_BOOLEANS: Final = (1, 2)
_LIST: Final = 9
_DEPTH_MAX: Final = 16


class FooterFault(ValueError):
    """Why a footer or page header is refused: the rest of a sentence."""


NUMBER: Final = rb"[\x80-\xff]{0,8}[\x00-\x7f]"
SMALL: Final = rb"[\x00-\x7f]"


@functools.cache
def short_string() -> bytes:
    """Return a pattern of strings below 128 bytes, as Thrift stores them. Patterns cannot count."""
    return b"(?:" + b"|".join(b"\\x%02x.{%d}" % (length, length) for length in range(128)) + b")"


class LazyPattern:
    """A pattern for the usual form of a structure, compiled after ``after`` calls without a match.

    Compiling takes as long as walking some hundred structures.
    """

    def __init__(self, source: Callable[[], bytes], after: int = 128) -> None:
        self._source = source
        self._left = after
        self._pattern: re.Pattern[bytes] | None = None

    def match(self, data: Any, at: int, end: int) -> re.Match[bytes] | None:
        """Return the match of ``data`` from ``at``, ending before ``end``; None until compiled."""
        if self._pattern is None:
            # Two threads may lose a count or compile twice; neither changes what is read.
            if self._left > 0:
                self._left -= 1
                return None
            self._pattern = re.compile(self._source(), re.DOTALL)
        return self._pattern.match(data, at, end)


def number(coded: bytes) -> int:
    """Return a number from its bytes; −1 for one below 0."""
    value = 0
    for byte in reversed(coded):
        value = value << 7 | byte & 127
    return -1 if value & 1 else value >> 1


def next_field(data: bytes, at: int, before: int) -> tuple[int, int]:
    """Return the id of the field whose header is at ``at``, and the position after the header."""
    delta = data[at] >> 4
    return (before + delta, at + 1) if delta else long_field(data, at + 1)


def long_field(data: bytes, at: int) -> tuple[int, int]:
    """Return the id of a field whose header does not contain it."""
    coded, at = varint(data, at)
    if coded > 0xFFFF:
        raise FooterFault("a field has a number that is none")
    return (coded >> 1) ^ -(coded & 1), at


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of at most 64 bits, still in zigzag."""
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 63:
            raise FooterFault("a number takes too many bytes")
    if value >> 64:
        raise FooterFault("a number is too large")
    return value, at


def integer(data: bytes, at: int, kind: int, due: int) -> tuple[int, int]:
    """Return an integer of exactly the type ``due``."""
    if kind != due:
        raise FooterFault("a number is stored as another type")
    coded, at = varint(data, at)
    if due == I32 and coded >> 32:
        raise FooterFault("a number is too large")
    return (coded >> 1) ^ -(coded & 1), at


def list_header(data: bytes, at: int, kind: int, element: int, most: int, what: str) -> tuple[int, int]:
    """Return the number of elements of a list, and where they begin."""
    if kind != _LIST:
        raise FooterFault(f"{what} are no list")
    head = data[at]
    count, at = varint(data, at + 1) if head >> 4 == 15 else (head >> 4, at + 1)
    if count and head & 15 != element:
        raise FooterFault(f"{what} are of another type")
    if count > most or count > len(data) - at:
        raise FooterFault(f"it has {count:,} {what}; at most {most:,} are read, and each takes a byte")
    return count, at


def skip(data: bytes, at: int, kind: int, depth: int, *, element: bool = False) -> int:
    """Return the position after a value of this type."""
    if kind in _INTEGERS:
        while data[at] > 127:
            at += 1
        return at + 1
    if kind == BINARY:
        length, at = varint(data, at)
        return at + length
    if kind == STRUCT:
        if depth > _DEPTH_MAX:
            raise FooterFault("its structures are nested too deep")
        while head := data[at]:
            at += 1
            if head < 16:
                _, at = varint(data, at)
            at = skip(data, at, head & 15, depth + 1)
        return at + 1
    if kind in _BOOLEANS:
        return at + int(element)  # As a field, its value is its type.
    if kind == _BYTE:
        return at + 1
    if kind == _DOUBLE:
        return at + 8
    if depth > _DEPTH_MAX or kind not in (*LISTS, _MAP):
        raise FooterFault(f"its structures are nested too deep, or of no type of Thrift's: {kind}")
    head = data[at]
    if kind == _MAP:
        count, at = varint(data, at)
        kinds = data[at] if count else 0
        inner: tuple[int, ...] = (kinds >> 4, kinds & 15)
        at += bool(count)
    else:
        count, at = varint(data, at + 1) if head >> 4 == 15 else (head >> 4, at + 1)
        inner = (head & 15,)
    if count > len(data) - at:
        raise FooterFault("a list has more elements than bytes are left")
    for _ in range(count):
        for each in inner:
            at = skip(data, at, each, depth + 1, element=True)
    return at
