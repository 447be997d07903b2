"""Reads small big-endian values one after another, never beyond their end."""

from __future__ import annotations

import struct
from typing import Any, NoReturn

from stateformat.errors import DamagedCheckpoint, ErrorKind

from .framing import modified_utf8
from .limits import SHARED_NODES, Nodes, too_large

DEPTH_MAX = 32
"""How deep structures may be nested; nothing real comes near it."""

NAME_MAX = 1024
"""The most characters of a class, field or constant name; Java allows more, but nobody uses
them.
"""


class Cursor:
    """A position in bytes that moves forward. Every failure is a ``DamagedCheckpoint`` with path
    and offset.
    """

    def __init__(
        self,
        data: bytes | memoryview,
        path: str,
        *,
        kind: ErrorKind = ErrorKind.DAMAGED_SEGMENT,
        position: int = 0,
        end: int | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self.data = memoryview(data)
        self.path = path
        self.kind = kind
        self.position = position
        self.end = len(self.data) if end is None else end
        self.nodes = nodes or Nodes(max(SHARED_NODES, len(self.data)))
        """Of all types that are read from here."""
        self.context: Any = None
        """What the readers of nested parts share."""

    @property
    def left(self) -> int:
        return self.end - self.position

    def damaged(self, what: str) -> NoReturn:
        """Raise ``DamagedCheckpoint`` for the cursor's position."""
        raise DamagedCheckpoint(
            f"{self.path} is damaged at byte {self.position}: {what}; take another checkpoint or savepoint",
            kind=self.kind,
            path=self.path,
            offset=self.position,
        )

    def deeper(self, what: str, depth: int, limit: int = DEPTH_MAX) -> None:
        """Raise ``UnsupportedFormat`` if ``what`` stands more than ``limit`` deep in itself."""
        if depth > limit:
            raise too_large(self.path, f"at byte {self.position} {what} in one another", depth, limit, "levels")

    def take(self, size: int) -> memoryview:
        """Take ``size`` bytes; they are not copied."""
        if not 0 <= size <= self.left:
            self.damaged(f"{size} bytes should follow and {self.left} are left")
        found = self.data[self.position : self.position + size]
        self.position += size
        return found

    def u8(self) -> int:
        return self.take(1)[0]

    def u16(self) -> int:
        return int.from_bytes(self.take(2), "big")

    def i32(self) -> int:
        return int.from_bytes(self.take(4), "big", signed=True)

    def i64(self) -> int:
        return int.from_bytes(self.take(8), "big", signed=True)

    def f64(self) -> float:
        return float(struct.unpack(">d", self.take(8))[0])

    def flag(self, what: str) -> bool:
        """Take a byte that is 0 or 1."""
        found = self.u8()
        if found > 1:
            self.position -= 1
            self.damaged(f"{what} is {found} and may be 0 or 1")
        return found == 1

    def count(self, least: int, what: str) -> int:
        """Take an i32 count of items of at least ``least`` bytes each, which must fit."""
        return self.fitting(self.i32(), least, what)

    def fitting(self, count: int, least: int, what: str) -> int:
        """Return ``count`` if that many items of ``least`` bytes can follow."""
        if not 0 <= count * max(least, 1) <= self.left:
            self.damaged(f"{count} {what} should follow in {self.left} bytes")
        return count

    def utf(self) -> str:
        """Take Java's ``UTF``: u16 length, modified UTF-8."""
        return self.text(self.u16())

    def text(self, size: int) -> str:
        """Take ``size`` bytes of modified UTF-8: NUL is C0 80, a character beyond U+FFFF two
        surrogates of three bytes each. Half of a pair is refused.
        """
        raw = bytes(self.take(size))
        if raw.isascii() and 0 not in raw:
            return raw.decode("ascii")
        try:
            return modified_utf8(raw, self.path)
        except DamagedCheckpoint:
            self.position -= size
            self.damaged("a name is not modified UTF-8")

    def name(self, what: str) -> str:
        """Take a ``UTF`` that is printable and short, so that it may appear in messages and
        values.
        """
        begin = self.position
        found = self.utf()
        if not found.isprintable() or len(found) > NAME_MAX:
            self.position = begin
            self.damaged(f"{what} is none that a name can be: {found[:80]!r}, {len(found)} characters")
        return found

    def finish(self, what: str) -> None:
        """Check that nothing of ``what`` is left."""
        if self.left:
            self.damaged(f"{what} should end here, and {self.left} bytes are left")
