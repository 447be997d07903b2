"""Converts Arrow to Spark's ``UnsafeRow``, many rows at once: what ``unsafe_row`` reads, written.

Rows, arrays and maps are *containers* of cells: a head, null bits, a slot for each cell, and behind
them what does not fit its slot, each piece at a multiple of eight bytes. Where each piece lies
follows from sizes alone, so all containers are filled at once; nothing loops over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..byte_strings import ByteStrings, Octets, Positions, at_every_byte, from_arrow, ramp
from .schemas import SparkField, SparkType, has_values
from .unsafe_row import FIXED, LONG_DIGITS, row_size, width_of

_KEPT: Final = np.array([(1 << 8 * size) - 1 for size in range(1, 8)] + [(1 << 64) - 1], np.uint64)
"""By the length of a word's content, less one: which of its bytes belong to it."""


class _Cells(NamedTuple):
    """Values of one type, as they are put into containers."""

    null: npt.NDArray[np.bool_]
    slot: npt.NDArray[Any]
    """What is in the slots; of what lies outside, the size."""
    outside: ByteStrings | None = None
    room: Positions | None = None
    """The bytes that each takes outside, a multiple of eight."""


def encode_rows(columns: Sequence[pa.Array], fields: Sequence[SparkField], count: int, *, key: bool) -> ByteStrings:
    """Return ``count`` rows of these columns, one after another in one buffer.

    Args:
        columns: one for each field, of its Arrow type; any for fields without values.
        fields: the columns of the row.
        count: how many rows, as there may be no column.
        key: whether rows are compared by their bytes. Spark then has one zero and one NaN.
    """
    cells = [_cells(column, field.type, count, key) for column, field in zip(columns, fields, strict=True)]
    head = row_size(len(fields))
    length = np.full(count, head, np.int64)
    for cell in cells:
        length += 0 if cell.room is None else cell.room
    start = np.cumsum(length) - length
    data = np.zeros(int(length.sum()), np.uint8)
    beyond = start + head
    for index, cell in enumerate(cells):
        place = start + head - 8 * (len(fields) - index)
        at = start + (index >> 3)
        data[at] |= cell.null.astype(np.uint8) << np.uint8(index & 7)
        beyond = _put(data, cell, place, start, beyond)
    return ByteStrings(data, start, length)


def _put(data: Octets, cell: _Cells, place: Positions, base: Positions, beyond: Positions) -> Positions:
    """Fill slots, and what lies outside of them; return where the next of that lies."""
    if cell.outside is None or cell.room is None:
        kept = np.where(cell.null, np.zeros((), cell.slot.dtype), cell.slot) if cell.null.any() else cell.slot
        data.view(kept.dtype)[place // kept.dtype.itemsize] = kept
        return beyond
    words = (beyond - base) << 32 | cell.slot
    words[cell.null & (cell.room == 0)] = 0
    data.view(np.int64)[place >> 3] = words
    _copy(data, beyond, cell.outside)
    return beyond + cell.room


def _copy(data: Octets, place: Positions, strings: ByteStrings) -> None:
    """Copy strings to places that are multiples of eight; the last word of each is filled up."""
    counts = (strings.length + 7) >> 3
    owner = np.repeat(np.arange(len(strings)), counts)
    if not len(owner):
        return
    nth = ramp(counts)
    words = at_every_byte(np.concatenate([strings.data, np.zeros(8, np.uint8)]), "<u8")
    left = np.minimum(strings.length[owner] - 8 * nth, 8)
    data.view(np.uint64)[(place[owner] >> 3) + nth] = words[strings.start[owner] + 8 * nth] & _KEPT[left - 1]


def _cells(column: pa.Array, kind: SparkType, count: int, key: bool) -> _Cells:
    if not has_values(kind):
        return _Cells(np.ones(count, np.bool_), np.zeros(count, np.int64))
    null = np.zeros(count, np.bool_)
    if not count:
        return _Cells(null, np.zeros(0, np.int64))
    if column.null_count:
        null = column.is_null().to_numpy(zero_copy_only=False)
    if kind.kind in FIXED or kind.kind == "boolean":
        return _Cells(null, _numbers(column, kind, key))
    if kind.kind == "decimal":
        return _decimals(column, kind, null)
    if kind.kind == "interval":
        parts = [one.fill_null(0).to_numpy() for one in column.flatten()]
        raw = np.zeros(count, [("months", "<i4"), ("days", "<i4"), ("microseconds", "<i8")])
        for name, part in zip(("months", "days", "microseconds"), parts, strict=True):
            raw[name] = part
        sixteen = np.full(count, 16, np.int64)
        return _Cells(null, sixteen, ByteStrings(raw.view(np.uint8), 16 * np.arange(count), sixteen), sixteen)
    found = _outside(column, kind, null, key)
    length = np.where(null, 0, found.length)
    return _Cells(null, length, ByteStrings(found.data, found.start, length), (length + 7) & ~7)


def _numbers(column: pa.Array, kind: SparkType, key: bool) -> npt.NDArray[Any]:
    if kind.kind == "boolean":
        bits: npt.NDArray[Any] = column.fill_null(False).to_numpy(zero_copy_only=False).astype(np.uint8)
        return bits
    dtype = np.dtype(FIXED[kind.kind])
    storage = {1: pa.int8(), 2: pa.int16(), 4: pa.int32(), 8: pa.int64()}[dtype.itemsize]
    if dtype.kind == "f":
        # NumPy keeps the bits of each NaN.
        found: npt.NDArray[Any] = np.frombuffer(column.buffers()[1], dtype, len(column), column.offset * dtype.itemsize)
        return np.where(np.isnan(found), np.array(np.nan, dtype), found + np.zeros((), dtype)) if key else found
    plain = column if column.type == storage else column.view(storage)
    return np.frombuffer(plain.buffers()[1], dtype, len(plain), plain.offset * dtype.itemsize)


def _decimals(column: pa.Array, kind: SparkType, null: npt.NDArray[np.bool_]) -> _Cells:
    count = len(column)
    wide = np.frombuffer(column.buffers()[1], np.uint8, 16 * count, 16 * column.offset).reshape(count, 16)
    if kind.arrow.precision <= LONG_DIGITS:
        return _Cells(null, wide[:, :8].copy().view(np.int64)[:, 0])
    # The fewest bytes of the two's complement, big-endian, in sixteen that are there for any.
    big = np.ascontiguousarray(wide[:, ::-1])
    sign = np.where(big[:, :1] >= 0x80, 0xFF, 0).astype(np.uint8)
    same = np.logical_and.accumulate(big == sign, axis=1)
    lead = same.sum(axis=1)
    first = big[np.arange(count), np.minimum(lead, 15)]
    lead -= (lead == 16) | ((first >= 0x80) != (sign[:, 0] == 0xFF))
    length = np.where(null, 0, 16 - lead)
    return _Cells(
        null, length, ByteStrings(big.reshape(-1), 16 * np.arange(count) + lead, length), np.full(count, 16, np.int64)
    )


def _outside(column: pa.Array, kind: SparkType, null: npt.NDArray[np.bool_], key: bool) -> ByteStrings:
    """Return the bytes of values that have no fixed size; any for nulls."""
    count = len(column)
    if kind.kind in ("string", "binary", "variant", "row"):
        return from_arrow(column)
    if kind.kind == "struct":
        parts = iter(column.flatten())
        children = [next(parts) if has_values(item.type) else pa.nulls(count) for item in kind.children]
        return encode_rows(children, kind.children, count, key=key)
    if null.any():
        # What lies below a null does not count.
        filled = column.take(pa.array(np.flatnonzero(~null)))
        found = _outside(filled, kind, np.zeros(len(filled), np.bool_), key)
        start, length = np.zeros(count, np.int64), np.zeros(count, np.int64)
        start[~null], length[~null] = found.start, found.length
        return ByteStrings(found.data, start, length)
    offsets = column.offsets.to_numpy().astype(np.int64)
    counts, first, size = (
        np.diff(offsets),
        int(offsets[0]) if count else 0,
        int(offsets[-1] - offsets[0]) if count else 0,
    )
    if kind.kind == "array":
        return _arrays(column.values.slice(first, size), kind.children[0].type, counts, key)
    keys, items = (
        _arrays(values.slice(first, size), child.type, counts, key)
        for values, child in zip((column.keys, column.items), kind.children, strict=True)
    )
    length = 8 + keys.length + items.length
    start = np.cumsum(length) - length
    data = np.zeros(int(length.sum()), np.uint8)
    data.view(np.int64)[start >> 3] = keys.length
    _copy(data, start + 8, keys)
    _copy(data, start + 8 + keys.length, items)
    return ByteStrings(data, start, length)


def _arrays(values: pa.Array, kind: SparkType, counts: Positions, key: bool) -> ByteStrings:
    cells, width = _cells(values, kind, len(values), key), width_of(kind)
    heads = 8 + 8 * ((counts + 63) // 64)
    slots = (counts * width + 7) & ~7
    owner, index = np.repeat(np.arange(len(counts)), counts), ramp(counts)
    room = np.zeros(len(values), np.int64) if cells.room is None else cells.room
    before = np.cumsum(np.append(0, room))
    ends = np.cumsum(counts)
    length = heads + slots + before[ends] - before[ends - counts]
    start = np.cumsum(length) - length
    data = np.zeros(int(length.sum()), np.uint8)
    data.view(np.int64)[start >> 3] = counts
    nulls = np.flatnonzero(cells.null)
    bits = np.left_shift(1, index[nulls] & 7).astype(np.uint8)
    np.bitwise_or.at(data, start[owner[nulls]] + 8 + (index[nulls] >> 3), bits)
    base = start[owner]
    beyond = base + (heads + slots)[owner] + before[:-1] - before[(ends - counts)[owner]]
    _put(data, cells, base + heads[owner] + index * width, base, beyond)
    return ByteStrings(data, start, length)


def prefixed(lead: bytes | pa.Array, strings: ByteStrings) -> ByteStrings:
    """Return each string behind other bytes, the same for all or one for each."""
    first = pa.scalar(lead, pa.binary()) if isinstance(lead, bytes) else lead
    return from_arrow(pc.binary_join_element_wise(first, strings.to_arrow(), b""))
