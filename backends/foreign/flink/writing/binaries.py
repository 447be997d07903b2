"""Byte strings of many values at once, as Arrow ``binary`` arrays without nulls.

Every encoder returns one byte string per value. Arrow joins the parts of each value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...byte_strings import ByteStrings, Positions, from_arrow

Mask = npt.NDArray[np.bool_]


def of_numbers(values: npt.NDArray[Any], dtype: str) -> pa.Array:
    """Return the bytes of each number as a ``dtype`` (``">i8"`` …)."""
    octets = np.ascontiguousarray(values.astype(dtype)).view(np.uint8)
    return of_rows(octets.reshape(len(values), np.dtype(dtype).itemsize))


def of_rows(octets: npt.NDArray[np.uint8]) -> pa.Array:
    """Return the rows of a matrix of bytes."""
    count, width = octets.shape
    offsets = (np.arange(count + 1) * width).astype(np.int32)
    data = np.ascontiguousarray(octets)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def of_lengths(data: npt.NDArray[np.uint8], lengths: Positions) -> pa.Array:
    """Cut ``data`` into strings of these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def repeated(octets: bytes, count: int) -> pa.Array:
    """Return the same bytes ``count`` times."""
    return pa.repeat(pa.scalar(octets, pa.binary()), count)


def joined(*parts: pa.Array) -> pa.Array:
    """Return the parts of each value, joined."""
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.binary()))


def scattered(found: pa.Array, chosen: Mask) -> pa.Array:
    """Return ``found`` at the places that ``chosen`` marks, and no bytes elsewhere."""
    if chosen.all():
        return found
    lengths = np.zeros(len(chosen), np.int64)
    strings = from_arrow(found)
    lengths[chosen] = strings.length
    return of_lengths(_tight(strings), lengths)


def grouped(found: pa.Array, counts: Positions) -> pa.Array:
    """Join the first ``counts[0]`` strings into one, the next ``counts[1]`` into another, etc."""
    strings = from_arrow(found)
    ends = np.append(0, np.cumsum(strings.length))
    last = np.cumsum(counts)
    return of_lengths(_tight(strings), ends[last] - ends[last - counts])


def comma_joined(found: pa.Array, counts: Positions) -> pa.Array:
    """As :func:`grouped`, with a comma between any two that are joined."""
    last = np.zeros(len(found), np.bool_)
    last[np.cumsum(counts)[counts > 0] - 1] = True
    commas = pa.array(np.where(last, b"", b","), pa.binary())
    return grouped(joined(found, commas), counts)


def _tight(strings: ByteStrings) -> npt.NDArray[np.uint8]:
    """Return the bytes of strings that are stored one after another."""
    if not len(strings):
        return np.zeros(0, np.uint8)
    first = int(strings.start[0])
    return strings.data[first : int(strings.start[-1] + strings.length[-1])]


def present(values: pa.Array) -> Mask:
    """Return which values are not null."""
    found: Mask = values.is_valid().to_numpy(zero_copy_only=False)
    return found


def flags(chosen: Mask) -> pa.Array:
    """Return a byte 1 where ``chosen``, else 0."""
    return of_rows(chosen.astype(np.uint8).reshape(-1, 1))


def numbers(values: pa.Array, zero: Any = 0) -> npt.NDArray[Any]:
    """Return numbers as a numpy array, with ``zero`` for nulls."""
    filled = values.fill_null(zero) if values.null_count else values
    found: npt.NDArray[Any] = filled.to_numpy(zero_copy_only=False)
    return found


def varints(values: Positions) -> pa.Array:
    """Encode with 7 bits per byte, low bits first; the top bit is set on all but the last byte."""
    width = np.ones(len(values), np.int64)
    for bits in (7, 14, 21, 28):
        width += values >= 1 << bits
    places = np.arange(5)
    octets = (values[:, None] >> (7 * places)) & 0x7F
    octets |= np.where(places < width[:, None] - 1, 0x80, 0)
    kept = places < width[:, None]
    return of_lengths(octets[kept].astype(np.uint8), width)


def children(values: pa.Array) -> list[pa.Array]:
    """Return the fields of structs, null where a struct is null."""
    found: list[pa.Array] = values.flatten()
    return found


def fewest_octets(wide: npt.NDArray[np.uint8]) -> pa.Array:
    """Return big-endian numbers in two's complement, each in as few bytes as possible."""
    lengths = _fewest(wide)
    width = wide.shape[1]
    return of_lengths(wide[np.arange(width) >= width - lengths[:, None]], lengths)


def _fewest(wide: npt.NDArray[np.uint8]) -> Positions:
    """Return how many bytes each number needs, at least one."""
    extension = np.where(wide[:, :1] >= 0x80, 0xFF, 0).astype(np.uint8)
    needless = np.cumprod(wide == extension, axis=1).sum(axis=1)
    width = wide.shape[1]
    left = np.minimum(needless, width - 1)
    # The first byte that is kept must have the sign in its top bit.
    first = wide[np.arange(len(wide)), left]
    back = (needless > 0) & ((first >= 0x80) != (extension[:, 0] >= 0x80)) & (left > 0)
    fewest: Positions = (width - left + back).astype(np.int64)
    return fewest
