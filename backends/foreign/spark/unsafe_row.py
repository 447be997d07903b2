"""Converts Spark's ``UnsafeRow`` to Arrow, many rows at once.

A row is a null bit per field in words of 64, a word of 8 bytes per field, and then the values
without a fixed size, found by (offset << 32 | size) in their words. An array has a count, null
bits, then items in their own width, and the values that they refer to. Here both are *cells*: a
slot at a place in the buffer, in a container that every offset is relative to and must stay within.
Columns are decoded one after another, each for all rows; nothing loops over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import DamagedCheckpoint

from ..byte_strings import ByteStrings, Octets, Positions, at_every_byte, ramp
from ..framing import damaged
from .schemas import SparkField, SparkType, has_values

_Mask = npt.NDArray[np.bool_]

FIXED: Final = {
    "byte": "<i1",
    "short": "<i2",
    "integer": "<i4",
    "date": "<i4",
    "year_month": "<i4",
    "long": "<i8",
    "timestamp": "<i8",
    "timestamp_ntz": "<i8",
    "day_time": "<i8",
    "time": "<i8",
    "float": "<f4",
    "double": "<f8",
}
LONG_DIGITS: Final = 18
"""Up to this many digits a decimal is a long; with more, it is outside its slot."""
_INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True)
class _Cells:
    """Values of one column: where their slots are, and what they may refer to."""

    data: Octets
    slot: Positions
    base: Positions
    """Where each one's container begins."""
    size: Positions
    """The container's bytes."""
    valid: _Mask | None
    """None if nothing is null."""
    budget: int
    """The bytes of all containers together: values outside of slots cannot be larger."""
    path: str

    def __len__(self) -> int:
        return len(self.slot)

    def gather(self, dtype: str) -> npt.NDArray[Any]:
        """Return the values in the slots."""
        return _at(self.data, self.slot, dtype)

    def wrong(self, what: str) -> DamagedCheckpoint:
        """Return the error for a row with an illegal offset or size."""
        return damaged(self.path, f"a row {what}")


def decode_rows(rows: ByteStrings, fields: Sequence[SparkField], path: str) -> list[pa.Array]:
    """Return an array per field, of the field's Arrow type; ``null`` for fields without values.

    Raises ``DamagedCheckpoint``, naming ``path``, if an offset, size or text is impossible.
    """
    if [item.type.kind for item in fields] == ["row"]:
        return [rows.to_arrow()]
    return _columns(_Rows(rows, path), fields)


def row_size(fields: int) -> int:
    """Return the minimum bytes of a row: its null bits, and a word per field."""
    return 8 * ((fields + 63) // 64) + 8 * fields


class _Rows:
    """Rows of one type, none of them null."""

    def __init__(self, rows: ByteStrings, path: str) -> None:
        self.data, self.start, self.length, self.path = rows.data, rows.start, rows.length, path

    def cells(self, index: int, head: int) -> _Cells:
        bits = _at(self.data, self.start + (index >> 3), "<u1")
        null = (bits >> (index & 7)) & 1 == 1
        valid = ~null if null.any() else None
        budget = int(self.length.sum())
        return _Cells(self.data, self.start + head + 8 * index, self.start, self.length, valid, budget, self.path)


def _columns(rows: _Rows, fields: Sequence[SparkField]) -> list[pa.Array]:
    head = 8 * ((len(fields) + 63) // 64)
    least = row_size(len(fields))
    if len(rows.start) and int(rows.length.min()) < least:
        raise damaged(rows.path, f"a row has {int(rows.length.min())} bytes, and {len(fields)} fields take {least}")
    if not len(rows.start):
        return [pa.array([], item.type.arrow) for item in fields]
    return [
        _decode(item.type, rows.cells(index, head)) if has_values(item.type) else pa.nulls(len(rows.start))
        for index, item in enumerate(fields)
    ]


def _at(data: Octets, places: Positions, dtype: str) -> npt.NDArray[Any]:
    """Return the values of ``dtype`` at these places, aligned or not; all must be within the
    buffer.
    """
    found: npt.NDArray[Any] = at_every_byte(data, dtype)[places]
    return found


def _bitmap(valid: _Mask | None) -> Any:
    return None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))


def _decode(kind: SparkType, cells: _Cells) -> pa.Array:
    if kind.kind in FIXED:
        values = cells.gather(FIXED[kind.kind])
        return pa.Array.from_buffers(kind.arrow, len(cells), [_bitmap(cells.valid), pa.py_buffer(values)])
    if kind.kind == "boolean":
        bits = np.packbits(cells.gather("<u1") != 0, bitorder="little")
        return pa.Array.from_buffers(kind.arrow, len(cells), [_bitmap(cells.valid), pa.py_buffer(bits)])
    if kind.kind == "decimal" and kind.arrow.precision <= LONG_DIGITS:
        return _short_decimals(kind, cells)
    start, size = _outside(cells)
    if kind.kind == "decimal":
        return _long_decimals(kind, cells, start, size)
    if kind.kind in ("string", "binary", "variant"):
        return _text(kind, cells, start, size)
    decode = {"struct": _structs, "array": _arrays, "map": _maps, "interval": _intervals}[kind.kind]
    if cells.valid is None:
        return decode(kind, cells, start, size, cells.budget)
    # The values that are not null are decoded, and spread over the column.
    chosen = np.flatnonzero(cells.valid)
    found = decode(kind, cells, start[chosen], size[chosen], cells.budget)
    places = np.full(len(cells), -1, np.int64)
    places[chosen] = np.arange(len(chosen))
    return found.take(pa.array(places, mask=~cells.valid))


def _outside(cells: _Cells) -> tuple[Positions, Positions]:
    """Return where the values that slots refer to begin, and their sizes; 0 bytes for nulls."""
    words = cells.gather("<u8")
    offset, size = (words >> np.uint64(32)).astype(np.int64), (words & np.uint64(0xFFFFFFFF)).astype(np.int64)
    if cells.valid is not None:
        offset, size = np.where(cells.valid, offset, 0), np.where(cells.valid, size, 0)
    beyond = offset + size > cells.size
    if beyond.any():
        row = int(np.argmax(beyond))
        raise cells.wrong(
            f"points to {int(size[row])} bytes at {int(offset[row])}, and has {int(cells.size[row])} (its number is "
            f"{row} of {len(cells)})"
        )
    if int(size.sum()) > cells.budget:
        raise cells.wrong(f"has values of {int(size.sum())} bytes in {cells.budget}: they lie over one another")
    return cells.base + offset, size


def _short_decimals(kind: SparkType, cells: _Cells) -> pa.Array:
    unscaled = cells.gather("<i8")
    if cells.valid is not None:
        unscaled = np.where(cells.valid, unscaled, 0)
    limit = 10**kind.arrow.precision
    if len(unscaled) and not (-limit < int(unscaled.min()) and int(unscaled.max()) < limit):
        raise cells.wrong(f"has a decimal of more than {kind.arrow.precision} digits")
    wide = np.empty((len(cells), 2), np.int64)
    wide[:, 0], wide[:, 1] = unscaled, unscaled >> 63
    return pa.Array.from_buffers(kind.arrow, len(cells), [_bitmap(cells.valid), pa.py_buffer(wide)])


def _long_decimals(kind: SparkType, cells: _Cells, start: Positions, size: Positions) -> pa.Array:
    """Return the decimals of big-endian two's complement of at most 16 bytes."""
    used = size > 0
    if len(size) and (int(size.max()) > 16 or (cells.valid is not None and np.any(used != cells.valid))):
        raise cells.wrong("has a decimal of no bytes, or of more than 16")
    if cells.valid is None and not used.all():
        raise cells.wrong("has a decimal of no bytes")
    wide = ByteStrings(cells.data, start, size).wide(16)
    found = pa.Array.from_buffers(kind.arrow, len(cells), [_bitmap(cells.valid), pa.py_buffer(wide)])
    try:
        found.validate(full=True)
    except pa.ArrowInvalid as error:
        raise cells.wrong(f"has a decimal of more than {kind.arrow.precision} digits ({error})") from error
    return found


def _text(kind: SparkType, cells: _Cells, start: Positions, size: Positions) -> pa.Array:
    strings = ByteStrings(cells.data, start, size)
    try:
        found = strings.to_text() if kind.kind == "string" else strings.to_arrow()
    except pa.ArrowInvalid as error:
        raise cells.wrong(f"has a text that is not UTF-8 ({error})") from error
    if cells.valid is None:
        return found
    _, offsets, data = found.buffers()
    return pa.Array.from_buffers(found.type, len(found), [_bitmap(cells.valid), offsets, data])


def _structs(kind: SparkType, cells: _Cells, start: Positions, size: Positions, budget: int) -> pa.Array:  # noqa: ARG001
    rows = _Rows(ByteStrings(cells.data, start, size), cells.path)
    columns = _columns(rows, kind.children)
    kept = [column for column, item in zip(columns, kind.children, strict=True) if has_values(item.type)]
    return pa.Array.from_buffers(kind.arrow, len(start), [None], children=kept)


def _intervals(kind: SparkType, cells: _Cells, start: Positions, size: Positions, budget: int) -> pa.Array:  # noqa: ARG001
    if len(size) and int(size.min()) < 16:
        raise cells.wrong(f"has an interval of {int(size.min())} bytes, not 16")
    parts = [pa.array(_at(cells.data, start + at, dtype)) for at, dtype in ((0, "<i4"), (4, "<i4"), (8, "<i8"))]
    return pa.Array.from_buffers(kind.arrow, len(start), [None], children=parts)


def _arrays(kind: SparkType, cells: _Cells, start: Positions, size: Positions, budget: int) -> pa.Array:
    offsets, values = _items(kind.children[0].type, cells, start, size, budget)
    return pa.Array.from_buffers(kind.arrow, len(start), [None, pa.py_buffer(offsets)], children=[values])


def _maps(kind: SparkType, cells: _Cells, start: Positions, size: Positions, budget: int) -> pa.Array:
    if len(size) and int(size.min()) < 8:
        raise cells.wrong(f"has a map of {int(size.min())} bytes, less than the 8 of its head")
    keys = _at(cells.data, start, "<i8")
    if np.any((keys < 0) | (keys > size - 8)):
        raise cells.wrong("has a map whose keys take more bytes than the map")
    offsets, names = _items(kind.children[0].type, cells, start + 8, keys, budget)
    others, values = _items(kind.children[1].type, cells, start + 8 + keys, size - 8 - keys, budget)
    if not np.array_equal(offsets, others):
        raise cells.wrong("has a map with another number of keys than of values")
    if names.null_count:
        raise cells.wrong("has a map with a key that is null")
    entry = pa.struct([kind.arrow.key_field, kind.arrow.item_field])
    items = pa.Array.from_buffers(entry, len(names), [None], children=[names, values])
    return pa.Array.from_buffers(kind.arrow, len(start), [None, pa.py_buffer(offsets)], children=[items])


def width_of(kind: SparkType) -> int:
    """Return the bytes of an item of an array."""
    if kind.kind == "boolean":
        return 1
    return np.dtype(FIXED[kind.kind]).itemsize if kind.kind in FIXED else 8


def _items(
    kind: SparkType, cells: _Cells, start: Positions, size: Positions, budget: int
) -> tuple[npt.NDArray[np.int32], pa.Array]:
    """Return the offsets and the items of arrays."""
    if len(size) and int(size.min()) < 8:
        raise cells.wrong(f"has an array of {int(size.min())} bytes, less than the 8 of its head")
    counts = _at(cells.data, start, "<i8")
    width = width_of(kind)
    heads = 8 + 8 * ((np.clip(counts, 0, _INT32_MAX) + 63) // 64)
    if np.any((counts < 0) | (counts > size) | (heads + counts * width > size)):
        raise cells.wrong("has an array of more items than its bytes can hold")
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    if total > _INT32_MAX:
        raise cells.wrong(f"is one of many with {total} items together, too many to decode at once")
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    owner = np.repeat(np.arange(len(start)), counts)
    index = ramp(counts)
    base = start[owner]
    bits = _at(cells.data, base + 8 + (index >> 3), "<u1")
    null = (bits >> (index & 7).astype(np.uint8)) & 1 == 1
    inner = _Cells(
        cells.data,
        base + heads[owner] + index * width,
        base,
        size[owner],
        ~null if null.any() else None,
        budget,
        cells.path,
    )
    return offsets, _decode(kind, inner) if total else pa.array([], kind.arrow)
