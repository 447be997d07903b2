"""Many byte strings in one buffer: what the readers of files pass to the decoders of rows.

Nothing here loops over strings in Python.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class ByteStrings:
    """Byte strings within one buffer, in order; they may overlap, repeat and leave gaps."""

    data: Octets
    start: Positions
    length: Positions

    def __len__(self) -> int:
        return len(self.start)

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
        kind = np.dtype(dtype)
        if not len(self):
            return np.zeros(0, kind)
        # A view of the buffer with a value beginning at every byte: one gather, no copies.
        every = np.ndarray((len(self.data) - kind.itemsize + 1,), kind, np.ascontiguousarray(self.data), strides=(1,))
        return every[self.start + offset]

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
        low = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))[start] & _LOW[length]
        high = np.ndarray((len(padded) - 3,), "<u4", padded, strides=(1,))[start + 8] & _HIGH[length]
        views[chosen, 1:3] = low.view(np.int32).reshape(-1, 2)
        views[chosen, 3] = high.view(np.int32)
    # Buffers of a view are addressed with 32 bits.
    if longer.any():
        start = strings.start[longer]
        views[longer, 1] = np.ndarray((len(data) - 3,), "<i4", data, strides=(1,))[start]
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
