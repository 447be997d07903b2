"""Many byte strings in one buffer: what the readers of files pass to the decoders of rows.

Nothing here loops over strings in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, UnsupportedFormat

Octets: TypeAlias = "npt.NDArray[np.uint8]"
Positions: TypeAlias = "npt.NDArray[np.int64]"

_LOW = np.array([(1 << 8 * min(size, 8)) - 1 for size in range(13)], np.uint64)
_HIGH = np.array([(1 << 8 * max(size - 8, 0)) - 1 for size in range(13)], np.uint32)
"""By the length of a short string: which of its first eight bytes, and of the next four, belong to
it.
"""


def at_every_byte(data: Octets, dtype: str) -> npt.NDArray[Any]:
    """Return the value of ``dtype`` that begins at every byte of ``data``, without a copy."""
    kind = np.dtype(dtype)
    return np.ndarray((max(len(data) - kind.itemsize + 1, 0),), kind, np.ascontiguousarray(data), strides=(1,))


def ramp(counts: Positions) -> Positions:
    """Return 0 … counts[0] − 1, 0 … counts[1] − 1, and so on, in one array."""
    total = int(counts.sum())
    first = np.cumsum(counts) - counts
    return np.arange(total, dtype=np.int64) - np.repeat(first, counts)


def cut(sizes: npt.NDArray[Any], limit: int) -> Iterator[tuple[int, int]]:
    """Cut items of these sizes into ranges of about ``limit`` together, at least one item each."""
    ends = np.cumsum(sizes)
    first = 0
    while first < len(ends):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + limit, "right")))
        yield first, last
        first = last


def saturated_microseconds(milliseconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ms as µs; values out of range become the least or the greatest."""
    limits = np.iinfo(np.int64)
    most = limits.max // 1000
    found = np.clip(milliseconds, -most, most) * 1000
    found[milliseconds > most] = limits.max
    found[milliseconds < -most] = limits.min
    return found


@dataclass(frozen=True, slots=True)
class ByteStrings:
    """Byte strings within one buffer, in order; they may overlap, repeat and leave gaps."""

    data: Octets
    start: Positions
    length: Positions

    @classmethod
    def joined(cls, parts: Sequence[ByteStrings]) -> ByteStrings:
        """Return all strings of the parts, over one buffer; none without parts."""
        shifts = np.cumsum([0, *(len(part.data) for part in parts)])
        start = [part.start + shift for part, shift in zip(parts, shifts, strict=False)]
        return cls(
            np.concatenate([np.zeros(0, np.uint8), *(part.data for part in parts)]),
            np.concatenate([np.zeros(0, np.int64), *start]),
            np.concatenate([np.zeros(0, np.int64), *(part.length for part in parts)]),
        )

    def __len__(self) -> int:
        return len(self.start)

    def slice(self, first: int, stop: int) -> ByteStrings:
        """Return the strings ``first`` … ``stop`` − 1."""
        return ByteStrings(self.data, self.start[first:stop], self.length[first:stop])

    def bytes(self, at: int) -> bytes:
        """Return one string."""
        start = int(self.start[at])
        return self.data[start : start + int(self.length[at])].tobytes()

    def take(self, chosen: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> ByteStrings:
        """Return some of them, by index or mask; the buffer is shared."""
        return ByteStrings(self.data, self.start[chosen], self.length[chosen])

    def without_prefix(self, size: int) -> ByteStrings:
        """Return each without its first ``size`` bytes; none may be shorter."""
        return ByteStrings(self.data, self.start + size, self.length - size)

    def fixed(self, offset: int, dtype: str) -> npt.NDArray[Any]:
        """Return the value of ``dtype`` (``"<i8"``, ``">u2"`` …) at ``offset`` bytes of each.

        No string may be too short for it: check lengths first.
        """
        found: npt.NDArray[Any] = at_every_byte(self.data, dtype)[self.start + offset]
        return found

    def wide(self, width: int) -> Octets:
        """Return numbers of at most ``width`` bytes, big-endian in two's complement, as rows of
        little-endian ones; 0 for no bytes.
        """
        data, some = np.ascontiguousarray(self.data), self.length > 0
        sign = np.zeros(len(self), np.uint8)
        sign[some] = np.where(data[self.start[some]] >= 0x80, 0xFF, 0)
        found = np.repeat(sign, width).reshape(-1, width)
        lane, place = np.repeat(np.arange(len(self)), self.length), ramp(self.length)
        found[lane, self.length[lane] - 1 - place] = data[self.start[lane] + place]
        return found

    def tight(self) -> Octets:
        """Return the bytes of strings that lie one after another, without a copy."""
        if not len(self):
            return np.zeros(0, np.uint8)
        return self.data[int(self.start[0]) : int(self.start[-1] + self.length[-1])]

    def packed(self) -> Octets:
        """Return the bytes of all, one after another, in a buffer of their own."""
        width = int(self.length[0]) if len(self) else 0
        if width and (self.length == width).all():
            # As items of one width at every byte: one copy for each.
            items: Octets = at_every_byte(self.data, f"V{width}")[self.start].view(np.uint8)
            return items
        # Arrow's offsets have 32 bits.
        pieces = [from_arrow(self.slice(*some).to_arrow()).tight() for some in cut(self.length, 1 << 30)]
        return np.concatenate([np.zeros(0, np.uint8), *pieces])

    def to_arrow(self) -> pa.Array:
        """Return them as an Arrow ``binary`` array, copied into a buffer of its own."""
        return _gathered(self, pa.binary())

    def to_text(self) -> pa.Array:
        """Return them as a ``string`` array; raises ``pa.ArrowInvalid`` if one is not UTF-8."""
        found = _gathered(self, pa.string())
        found.validate(full=True)
        return found


def from_arrow(values: pa.Array) -> ByteStrings:
    """Return the strings of a ``binary`` or ``string`` array without nulls; shares its buffer."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32, len(values) + 1, values.offset * 4).astype(np.int64)
    octets = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return ByteStrings(octets, ends[:-1], np.diff(ends))


def _gathered(strings: ByteStrings, kind: pa.DataType) -> pa.Array:
    """Copy through Arrow views: 16 bytes a string, and one gather inside Arrow."""
    count = len(strings)
    view_type = pa.string_view() if pa.types.is_string(kind) else pa.binary_view()
    if not count:
        return pa.array([], kind)
    total = int(strings.length.sum())
    if total >= 1 << 31:
        raise UnsupportedFormat(
            f"strings of {total} bytes are to be read at once, and a column of Arrow holds 2147483647; read fewer key "
            "groups or partitions at once",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
    views = np.zeros((count, 4), np.int32)
    views[:, 0] = strings.length
    short = strings.length <= 12
    longer = ~short
    data = np.ascontiguousarray(strings.data)
    # A view contains the first four bytes of a long string, or all of a short one.
    if short.any():
        chosen = slice(None) if short.all() else short
        start, length = strings.start[chosen], strings.length[chosen]
        padded = data
        if int(start.max()) + 12 > len(data):
            padded = np.concatenate([data, np.zeros(12, np.uint8)])
        low = at_every_byte(padded, "<u8")[start] & _LOW[length]
        high = at_every_byte(padded, "<u4")[start + 8] & _HIGH[length]
        views[chosen, 1:3] = low.view(np.int32).reshape(-1, 2)
        views[chosen, 3] = high.view(np.int32)
    # Buffers of a view are addressed with 32 bits.
    if longer.any():
        start = strings.start[longer]
        views[longer, 1] = at_every_byte(data, "<i4")[start]
        views[longer, 2] = start >> 30
        views[longer, 3] = start & ((1 << 30) - 1)
        crossing = int(start.max()) >> 30
    else:
        crossing = 0
    whole = pa.py_buffer(data)
    # Buffer i begins at i GiB and extends to the end, so no string is cut.
    buffers = [whole.slice(i << 30) for i in range(crossing + 1)]
    found = pa.Array.from_buffers(view_type, count, [None, pa.py_buffer(views), *buffers])
    return found.cast(kind)
