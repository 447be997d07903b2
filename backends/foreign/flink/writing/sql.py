"""Encode Arrow values as Flink SQL's binary rows, arrays and maps: the inverse of ``serializers``.

Values that do not fit in a word of 8 bytes follow the words, in order, padded to 8 bytes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...byte_strings import Positions, from_arrow
from ..serializers import ROW_KINDS, DecimalData, Framed, Logical, ManyData, RowData, TextData, TimestampData
from .binaries import Mask, fewest_octets, grouped, joined, numbers, of_lengths, of_numbers, of_rows, present, scattered

_INLINE: Final = 7
"""Bytes of text that a word holds."""

Matrix = npt.NDArray[np.uint8]


def encode_row_data(serializer: RowData, values: pa.Array) -> pa.Array:
    """Encode rows with their frames; a key has the row kind +I."""
    columns = values.flatten()
    kinds = np.zeros(len(values), np.uint8)
    if not serializer.key:
        kinds = numbers(pc.index_in(columns[-1], pa.array(ROW_KINDS))).astype(np.uint8)
    return _framed(_row(serializer.kind, columns, kinds))


def encode_framed(_serializer: Framed, values: pa.Array) -> pa.Array:
    """Encode values that were kept as bytes."""
    return _framed(values.cast(pa.binary()))


def encode_text_data(_serializer: TextData, values: pa.Array) -> pa.Array:
    """Encode text as UTF-8 with its length."""
    return _framed(values.fill_null("").cast(pa.binary()))


def encode_many_data(serializer: ManyData, values: pa.Array) -> pa.Array:
    """Encode arrays or maps with their frames."""
    return _framed(_nested(serializer.kind, values))


def encode_decimal_data(serializer: DecimalData, values: pa.Array) -> pa.Array:
    """Encode decimals: up to 18 digits as an i64, else as bytes after their length."""
    wide = _unscaled(values)
    if serializer.kind.precision <= 18:
        return of_numbers(wide.view("<i8").reshape(-1, 2)[:, 0], ">i8")
    return _framed(fewest_octets(wide[:, ::-1]))


def encode_timestamp_data(serializer: TimestampData, values: pa.Array) -> pa.Array:
    """Encode timestamps: ms, and from precision 4 on the nanoseconds within the ms."""
    millis, nanos = _moments(serializer.kind, values)
    found = of_numbers(millis, ">i8")
    return found if serializer.kind.precision <= 3 else joined(found, of_numbers(nanos, ">i4"))


def _framed(found: pa.Array) -> pa.Array:
    return joined(of_numbers(from_arrow(found).length, ">i4"), found)


def _padded(found: pa.Array, sizes: Positions) -> pa.Array:
    """Add zeros up to whole words."""
    rest = -sizes % 8
    return joined(found, of_lengths(np.zeros(int(rest.sum()), np.uint8), rest))


def _row(kind: Logical, columns: list[pa.Array], kinds: npt.NDArray[np.uint8]) -> pa.Array:
    """Return rows without frames: kinds and null bits, words, then what does not fit in them."""
    count, rows = len(kind.children), len(kinds)
    width = (count + 8 + 63) // 64 * 8
    head = np.zeros((rows, width), np.uint8)
    head[:, 0] = kinds
    offset = np.full(rows, width + 8 * count, np.int64)
    words, tails = [], []
    for i, (child, column) in enumerate(zip(kind.children, columns, strict=False)):
        chosen = present(column)
        head[:, (i + 8) // 8] |= (~chosen).astype(np.uint8) << np.uint8((i + 8) % 8)
        behind, sizes = _behind(child, column, chosen, reserve=True)
        words.append(_words(child, column, chosen, offset, sizes))
        tails.append(behind)
        offset = offset + from_arrow(behind).length
    fixed = of_rows(np.concatenate([head, *words], axis=1))
    return joined(fixed, *tails)


def _list(element: Logical, counts: Positions, values: pa.Array) -> pa.Array:
    """Return arrays: a count, null bits in 4-byte words, elements, then what does not fit there."""
    chosen = present(values)
    owner = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    header = 4 + (counts + 31) // 32 * 4
    widest = int(header.max()) if len(header) else 4
    head = np.zeros((len(counts), widest), np.uint8)
    head[:, :4] = counts.astype("<i4").view(np.uint8).reshape(-1, 4)
    null = np.flatnonzero(~chosen)
    bits = np.left_shift(1, place[null] % 8).astype(np.uint8)
    np.bitwise_or.at(head, (owner[null], 4 + place[null] // 8), bits)
    heads = of_lengths(head[np.arange(widest) < header[:, None]], header)
    behind, sizes = _behind(element, values, chosen, reserve=False)
    lengths = from_arrow(behind).length
    before = np.cumsum(lengths) - lengths
    first = np.append(before, lengths.sum())[np.cumsum(counts) - counts]
    fixed = header + counts * element.width
    start = fixed + -fixed % 8
    words = _words(element, values, chosen, start[owner] + before - first[owner], sizes)[:, : element.width]
    slots = _padded(joined(heads, grouped(of_rows(words), counts)), fixed)
    return joined(slots, grouped(behind, counts))


def _nested(kind: Logical, values: pa.Array) -> pa.Array:
    """Return rows, arrays, maps or raw values, none null, without frames."""
    if kind.kind == "raw":
        return values.cast(pa.binary())
    if kind.kind == "row":
        return _row(kind, values.flatten(), np.zeros(len(values), np.uint8))
    if kind.kind == "list":
        counts = numbers(pc.list_value_length(values)).astype(np.int64)
        return _list(kind.children[0], counts, values.flatten())
    pairs = values.cast(pa.list_(pa.struct([values.type.key_field, values.type.item_field])))
    counts = numbers(pc.list_value_length(pairs)).astype(np.int64)
    keys, items = (
        _list(child, counts, column) for child, column in zip(kind.children, pairs.flatten().flatten(), strict=True)
    )
    return joined(of_numbers(from_arrow(keys).length, "<i4"), keys, items)


def _behind(kind: Logical, values: pa.Array, chosen: Mask, *, reserve: bool) -> tuple[pa.Array, Positions]:
    """Return what follows the words, padded, and the size that the word of each value has.

    For long timestamps that size is the nanoseconds. With ``reserve``, nulls of long decimals and
    timestamps get room too, as they do in rows.
    """
    sizes = np.zeros(len(values), np.int64)
    some = values if chosen.all() else values.filter(pa.array(chosen))
    if kind.kind == "decimal" and kind.precision > 18:
        found = fewest_octets(_unscaled(some)[:, ::-1])
        sizes[chosen] = from_arrow(found).length
        room = np.where(chosen | reserve, 16 - sizes, 0)
        return joined(scattered(found, chosen), of_lengths(np.zeros(int(room.sum()), np.uint8), room)), sizes
    if kind.kind == "time" and kind.precision > 3:
        millis, nanos = _moments(kind, some)
        sizes[chosen] = nanos
        room = np.where(~chosen & reserve, 8, 0)
        zeros = of_lengths(np.zeros(int(room.sum()), np.uint8), room)
        return joined(scattered(of_numbers(millis, "<i8"), chosen), zeros), sizes
    if kind.kind in ("text", "octets"):
        octets = some.cast(pa.binary())
        sizes[chosen] = from_arrow(octets).length
        long = sizes > _INLINE
        found = scattered(octets.filter(pa.array(long[chosen])), long)
        return _padded(found, np.where(long, sizes, 0)), sizes
    if kind.kind in ("row", "list", "map", "raw"):
        found = scattered(_nested(kind, some), chosen)
        sizes = from_arrow(found).length
        return _padded(found, sizes), sizes
    return of_lengths(np.zeros(0, np.uint8), sizes), sizes


def _words(kind: Logical, values: pa.Array, chosen: Mask, offset: Positions, sizes: Positions) -> Matrix:
    """Return the word of each value. Narrow array elements use only its first bytes."""
    count = len(values)
    if kind.kind == "number":
        return _in_words(_numbers(values, chosen), kind.dtype)
    if kind.kind == "bool":
        return _in_words(numbers(values, False).astype(np.uint8), "u1")
    if kind.kind == "null":
        return np.zeros((count, 8), np.uint8)
    if kind.kind == "decimal" and kind.precision <= 18:
        found = np.zeros(count, np.int64)
        found[chosen] = _unscaled(values.filter(pa.array(chosen))).view("<i8").reshape(-1, 2)[:, 0]
        return _in_words(found, "<i8")
    if kind.kind == "time" and kind.precision <= 3:
        found = np.zeros(count, np.int64)
        found[chosen] = _moments(kind, values.filter(pa.array(chosen)))[0]
        return _in_words(found, "<i8")
    reserved = chosen | (kind.kind in ("decimal", "time"))
    words = _in_words(np.where(reserved, offset << 32 | sizes, 0), "<i8")
    if kind.kind in ("text", "octets"):
        short = np.flatnonzero(chosen & (sizes <= _INLINE))
        octets = from_arrow(values.take(pa.array(short)).cast(pa.binary()))
        words[short] = 0
        data, place = octets.data, np.arange(_INLINE)
        inside = place < octets.length[:, None]
        at = np.minimum(octets.start[:, None] + place, max(len(data) - 1, 0))
        if len(data):
            words[short, :_INLINE] = np.where(inside, data[at], 0)
        words[short, 7] = 0x80 | octets.length.astype(np.uint8)
    return words


def _numbers(values: pa.Array, chosen: Mask) -> npt.NDArray[Any]:
    if pa.types.is_date32(values.type):
        values = values.cast(pa.int32())
    return np.where(chosen, numbers(values), 0)


def _in_words(found: npt.NDArray[Any], dtype: str) -> Matrix:
    """Return numbers in the low bytes of words."""
    width = np.dtype(dtype).itemsize
    words = np.zeros((len(found), 8), np.uint8)
    words[:, :width] = np.ascontiguousarray(found.astype(dtype)).view(np.uint8).reshape(-1, width)
    return words


def _unscaled(values: pa.Array) -> Matrix:
    """Return 16 bytes per decimal, little-endian. No value may be null."""
    raw = np.frombuffer(values.buffers()[1] or b"", np.uint8)
    return raw[16 * values.offset : 16 * (values.offset + len(values))].reshape(-1, 16)


def _moments(kind: Logical, values: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return ms since 1970, and the nanoseconds within the ms. No value may be null."""
    beyond: npt.NDArray[np.int64] = np.zeros(len(values), np.int64)
    if kind.precision > 6:
        values, nanos = values.flatten()
        beyond = numbers(nanos).astype(np.int64)
    micros = numbers(values.cast(pa.int64()))
    return micros // 1000, micros % 1000 * 1000 + beyond
