"""Strings and characters: UTF-16 units with 7 bits per byte, decoded to UTF-8, many at once."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

from ...byte_strings import ByteStrings, Octets, Positions
from .lanes import Lanes
from .serializer import Serializer

_BLOCK: Final = 1 << 22
"""Units of strings beyond ASCII that are decoded at once: each costs about 40 bytes."""


class Text(Serializer):
    """``String``: its length in UTF-16 units + 1, 0 for null; then the units. ``StringValue`` has
    the length itself, and no null.

    Arrow's text is UTF-8, which has no form for half a surrogate pair: a string with one is refused
    (``UnsupportedFormat``), so that no value is changed.
    """

    arrow_type = pa.string()
    java_hash = "String"

    def __init__(self, *, nullable: bool = True) -> None:
        self.nullable = nullable

    def read(self, lanes: Lanes) -> pa.Array:
        units, present = lengths(lanes, self.nullable)
        lanes.require(units)
        begin = lanes.position.copy()
        # First read as if all were ASCII: one byte per unit.
        raw = ByteStrings(lanes.data, begin, units).to_arrow()
        offsets = np.frombuffer(raw.buffers()[1], np.int32, len(raw) + 1)
        octets = np.frombuffer(raw.buffers()[2] or b"", np.uint8)[: offsets[-1]]
        lanes.position += units
        valid = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
        text = pa.Array.from_buffers(pa.string(), len(raw), [valid, *raw.buffers()[1:]])
        if not len(octets) or octets.max() < 0x80:
            return text
        # A string that is not ASCII has the top bit set in at least one of its first ``units``
        # bytes.
        high = np.zeros(len(octets) + 1, np.int32)
        np.cumsum(octets >= 0x80, out=high[1:])
        wide = np.flatnonzero(np.diff(high[offsets]))
        lanes.position[wide] = begin[wide]
        sub = lanes.take(wide)
        decoded = _decoded(sub, units[wide])
        lanes.put(wide, sub)
        if len(wide) == len(raw):
            return decoded
        source = np.arange(len(raw))
        source[wide] = len(raw) + np.arange(len(wide))
        return pa.concat_arrays([text, decoded]).take(pa.array(source))

    def skip(self, lanes: Lanes) -> None:
        units, _ = lengths(lanes, self.nullable)
        lanes.require(units)
        _skip_numbers(lanes, units)


class Character(Serializer):
    """``Character``: one UTF-16 unit, read as text of one character."""

    arrow_type = pa.string()
    fixed_length = least_length = 2
    java_hash = "Character"

    def read(self, lanes: Lanes) -> pa.Array:
        begin = lanes.position.copy()
        units = lanes.fixed(">u2")
        return to_utf8(units, np.ones(len(units), np.int64), lanes.at(begin, lanes.end))


def lengths(lanes: Lanes, nullable: bool) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """Take the lengths in units; return them, and which are not null."""
    found = lanes.fixed("u1").astype(np.int64)
    going = np.flatnonzero(found >= 0x80)
    found[going] &= 0x7F
    for shift in (7, 14, 21, 28):
        if not len(going):
            break
        sub = lanes.take(going)
        octet = sub.fixed("u1").astype(np.int64)
        lanes.put(going, sub)
        found[going] |= (octet & 0x7F) << shift
        going = going[octet >= 0x80]
    if len(going) or (len(found) and found.max() >= 1 << 31):
        lane = int(going[0]) if len(going) else int(found.argmax())
        lanes.damaged(lane, "the length of a string has more than 31 bits")
    if not nullable:
        return found, np.ones(len(found), np.bool_)
    return np.maximum(found - 1, 0), found > 0


def _skip_numbers(lanes: Lanes, units: Positions) -> None:
    """Move each lane past that many numbers with 7 bits per byte."""
    before = lanes.continued()
    begin = lanes.position
    # Start with one byte per number. Add one for each of these bytes that is not the last of its
    # number (its top bit is set), until the length no longer changes.
    behind = begin + units
    while True:
        over = behind > lanes.end
        if over.any():
            lanes.damaged(int(np.flatnonzero(over)[0]), "a string reaches over the end")
        further = begin + units + (before[behind] - before[begin])
        if (further == behind).all():
            break
        behind = further
    lanes.position[:] = behind


def _decoded(lanes: Lanes, units: Positions) -> pa.Array:
    """Decode strings that are not ASCII, in blocks."""
    first, pieces = 0, []
    room = np.cumsum(units)
    while first < len(units):
        taken = int(room[first - 1]) if first else 0
        last = max(int(np.searchsorted(room, taken + _BLOCK, "right")), first + 1)
        chosen = np.arange(first, last)
        sub = lanes.take(chosen)
        begin = sub.position.copy()
        _skip_numbers(sub, units[first:last])
        lanes.put(chosen, sub)
        pieces.append(to_utf8(_units(lanes.data, begin, sub), units[first:last], lanes.at(begin, sub.end)))
        first = last
    return pa.concat_arrays(pieces) if pieces else pa.array([], pa.string())


def _units(data: Octets, begin: Positions, behind: Lanes) -> npt.NDArray[np.uint16]:
    """Return the numbers in the bytes from ``begin`` to the lanes' positions, in one array."""
    sizes = behind.position - begin
    octets = np.frombuffer(ByteStrings(data, begin, sizes).to_arrow().buffers()[2] or b"", np.uint8)[: sizes.sum()]
    last = np.flatnonzero(octets < 0x80)
    width = np.diff(last, prepend=-1)
    value = octets[last].astype(np.uint32)
    for place in (1, 2):
        longer = np.flatnonzero(width > place)
        value[longer] = value[longer] << 7 | octets[last[longer] - place] & 0x7F
    wrong = (width > 3) | (value > 0xFFFF)
    if wrong.any():
        at = int(last[np.flatnonzero(wrong)[0]])
        lane = int(np.searchsorted(np.cumsum(sizes), at, "right"))
        behind.damaged(lane, "a character before it has more than 16 bits")
    return value.astype(np.uint16)


def to_utf8(units: npt.NDArray[np.uint16], counts: Positions, place: Lanes) -> pa.Array:
    """Return strings of ``counts`` UTF-16 units each; ``place`` has where each begins.

    Raises ``UnsupportedFormat`` for half a surrogate pair.
    """
    ends = np.cumsum(counts)
    # Halves of a pair in two different strings do not make a pair.
    last = units[ends[counts > 0] - 1]
    split = np.flatnonzero((last & 0xFC00) == 0xD800)
    at = int(ends[counts > 0][split[0]] - 1) if len(split) else -1
    try:
        octets = units.astype("<u2").tobytes().decode("utf-16-le").encode()
    except UnicodeDecodeError as error:
        at = error.start // 2 if at < 0 else min(at, error.start // 2)
    if at >= 0:
        lane = int(np.searchsorted(ends, at, "right"))
        raise UnsupportedFormat(
            f"{place.path or 'state'}: the string at byte {int(place.position[lane])} has half a surrogate pair "
            f"(U+{int(units[at]):04X}), which UTF-8 text cannot hold; change the value in the job",
            kind=ErrorKind.UNSUPPORTED_TYPE,
            path=place.path,
        )
    # Each half of a surrogate pair counts for two of the pair's four bytes in UTF-8.
    width = 1 + (units >= 0x80) + ((units >= 0x800) & ((units & 0xF800) != 0xD800))
    behind = np.zeros(len(units) + 1, np.int64)
    np.cumsum(width, out=behind[1:])
    offsets = np.zeros(len(counts) + 1, np.int32)
    offsets[1:] = behind[ends]
    return pa.Array.from_buffers(pa.string(), len(counts), [None, pa.py_buffer(offsets), pa.py_buffer(octets)])


TEXT = Text()
TEXT_VALUE = Text(nullable=False)
CHARACTER = Character()
