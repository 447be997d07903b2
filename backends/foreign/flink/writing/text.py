"""Strings as Flink writes them: UTF-16 units with 7 bits per byte."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ...byte_strings import Positions, from_arrow
from .binaries import joined, of_lengths, of_rows, present, varints


def encode_text(values: pa.Array, more: int = 1) -> pa.Array:
    """Encode strings: their length in units + ``more``, 0 for null, then the units."""
    units, counts = units_of(values)
    lengths = varints(np.where(present(values), counts + more, 0))
    if not len(units) or units.max() < 0x80:
        return joined(lengths, of_lengths(units.astype(np.uint8), counts))
    each = varints(units.astype(np.int64))
    offsets = np.append(0, np.cumsum(from_arrow(each).length))
    last = np.cumsum(counts)
    return joined(lengths, of_lengths(from_arrow(each).data, offsets[last] - offsets[last - counts]))


def encode_character(values: pa.Array) -> pa.Array:
    """Encode strings of one unit each."""
    units, _ = units_of(values)
    return of_rows(units.astype(">u2").view(np.uint8).reshape(-1, 2))


def units_of(values: pa.Array) -> tuple[npt.NDArray[np.uint16], Positions]:
    """Return the UTF-16 units of all strings, and how many each has; none for null."""
    strings = from_arrow(values.fill_null("").cast(pa.binary()))
    if not len(strings):
        return np.zeros(0, np.uint16), np.zeros(0, np.int64)
    octets = strings.data[int(strings.start[0]) : int(strings.start[-1] + strings.length[-1])]
    if not len(octets) or octets.max() < 0x80:
        return octets.astype(np.uint16), strings.length
    begins = np.flatnonzero((octets & 0xC0) != 0x80)
    lead = octets[begins].astype(np.uint32)
    width = 1 + (lead >= 0xC0) + (lead >= 0xE0) + (lead >= 0xF0)
    code = np.choose(width - 1, [lead, lead & 0x1F, lead & 0x0F, lead & 0x07])
    for place in (1, 2, 3):
        longer = width > place
        code[longer] = (code[longer] << 6) | (octets[begins[longer] + place] & 0x3F)
    pairs = code >= 0x10000
    size = 1 + pairs
    first = np.cumsum(size) - size
    units = np.empty(int(size.sum()), np.uint16)
    units[first] = np.where(pairs, 0xD800 + ((code - 0x10000) >> 10), code)
    units[first[pairs] + 1] = 0xDC00 + ((code[pairs] - 0x10000) & 0x3FF)
    owner = np.repeat(np.arange(len(strings)), strings.length)[begins]
    counts = np.bincount(owner, size, len(strings)).astype(np.int64)
    return units, counts
