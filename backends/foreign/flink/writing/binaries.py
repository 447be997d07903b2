"""Byte strings of many values at once, as Arrow ``binary`` arrays without nulls.

Every encoder returns one byte string per value; Arrow joins the parts of each. The encoders are
those of ``BigInteger`` and ``BigDecimal`` (from the text that Java's ``toString`` writes), of
strings (UTF-16 units with 7 bits per byte), and of Flink SQL's binary rows, arrays and maps: values
that do not fit in a word of 8 bytes follow the words, in order, padded to 8 bytes.
"""

from __future__ import annotations

import decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput

from ...byte_strings import Positions, from_arrow
from ..binary_rows import DecimalData, Framed, ManyData, RowData, TextData, TimestampData
from ..compound import ROW_KINDS
from ..sql_types import Logical

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
    return of_lengths(strings.tight(), lengths)


def grouped(found: pa.Array, counts: Positions) -> pa.Array:
    """Join the first ``counts[0]`` strings into one, the next ``counts[1]`` into another, etc."""
    strings = from_arrow(found)
    ends = np.append(0, np.cumsum(strings.length))
    last = np.cumsum(counts)
    return of_lengths(strings.tight(), ends[last] - ends[last - counts])


def comma_joined(found: pa.Array, counts: Positions) -> pa.Array:
    """As :func:`grouped`, with a comma between any two that are joined."""
    last = np.zeros(len(found), np.bool_)
    last[np.cumsum(counts)[counts > 0] - 1] = True
    commas = pa.array(np.where(last, b"", b","), pa.binary())
    return grouped(joined(found, commas), counts)


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


_DIGITS = 76
"""How many digits Arrow's widest decimal holds."""
_PATTERN = r"^(?P<sign>[-+]?)(?P<whole>[0-9]+)(?:\.(?P<part>[0-9]*))?(?:[eE](?P<exponent>[-+]?[0-9]+))?$"


def encode_big_integer(values: pa.Array) -> pa.Array:
    """Encode whole numbers: 0 for null, else the number of bytes + 4, and the bytes."""
    chosen = present(values)
    return _with_lengths(_fewest_of_digits(values.filter(pa.array(chosen))), chosen)


def encode_big_decimal(values: pa.Array) -> pa.Array:
    """Encode decimal numbers: the digits as a whole number, then, unless null, the scale."""
    chosen = present(values)
    some = values.filter(pa.array(chosen))
    parts = pc.extract_regex(some, _PATTERN)
    if parts.null_count:
        raise _refused(some, parts)
    sign, whole, part, exponent = (parts.field(i).fill_null("") for i in range(4))
    exponents = pc.if_else(pc.equal(exponent, ""), "0", pc.replace_substring(exponent, "+", ""))
    scale = pc.utf8_length(part).cast(pa.int64()).to_numpy(zero_copy_only=False)
    scale = scale - exponents.cast(pa.int64()).to_numpy(zero_copy_only=False)
    digits = pc.binary_join_element_wise(pc.replace_substring(sign, "+", ""), whole, part, "")
    scales = scattered(of_numbers(scale, ">i4"), chosen)
    return joined(_with_lengths(_fewest_of_digits(digits), chosen), scales)


def _with_lengths(octets: pa.Array, chosen: npt.NDArray[np.bool_]) -> pa.Array:
    """Put the number of bytes + 4 before the bytes of each chosen value; write 0 for the others.

    The numbers 0, 1 and 10 have a code of their own (1, 2 and 3), and no bytes.
    """
    small = pc.fill_null(pc.index_in(octets, pa.array([b"\0", b"\1", b"\n"])), -1).to_numpy(zero_copy_only=False)
    code = np.zeros(len(chosen), np.int64)
    code[chosen] = np.where(small < 0, 4 + pc.binary_length(octets).to_numpy(zero_copy_only=False), 1 + small)
    octets = pc.if_else(pa.array(small < 0), octets, pa.scalar(b""))
    return joined(of_numbers(code, ">i4"), scattered(octets, chosen))


def _fewest_of_digits(digits: pa.Array) -> pa.Array:
    """Return whole numbers as the fewest bytes of big-endian two's complement."""
    if not len(digits):
        return repeated(b"", 0)
    rare = pc.utf8_length(digits).to_numpy(zero_copy_only=False) > _DIGITS
    usual = pc.if_else(pa.array(rare), "0", digits) if rare.any() else digits
    try:
        found = pc.cast(usual, pa.decimal256(_DIGITS, 0))
    except pa.ArrowInvalid as error:
        raise _refused(usual, pc.extract_regex(usual, _PATTERN)) from error
    if isinstance(found, pa.ChunkedArray):
        found = found.combine_chunks()
    raw = np.frombuffer(found.buffers()[1], np.uint8)[32 * found.offset : 32 * (found.offset + len(found))]
    wide = raw.reshape(-1, 32)[:, ::-1]
    octets = fewest_octets(wide)
    if not rare.any():
        return octets
    # More digits than any Arrow decimal holds. Such numbers are rare, so encode them one by one.
    places = np.flatnonzero(rare)
    long = pa.array([_one(str(text)) for text in digits.take(pa.array(places)).to_pylist()], pa.binary())
    source = np.arange(len(digits))
    source[places] = len(digits) + np.arange(len(places))
    return pa.concat_arrays([octets, long]).take(pa.array(source))


def _one(text: str) -> bytes:
    number = int(decimal.Decimal(text)) if len(text) < 4000 else _long(text)
    return number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True)


def _long(text: str) -> int:
    """Parse digits in pieces: Python limits how many it converts at once."""
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    number = 0
    for first in range(0, len(digits), 4000):
        piece = digits[first : first + 4000]
        number = number * 10 ** len(piece) + int(piece)
    return sign * number


def _refused(values: pa.Array, parts: pa.Array) -> InvalidInput:
    odd = values.filter(parts.is_null())
    shown = odd[0].as_py()[:40] if len(odd) else values[0].as_py()[:40]
    return InvalidInput(
        f"{shown!r} is no number as Java writes it, and its column was a BigInteger or BigDecimal of Flink's; write "
        "digits, with a point or an exponent",
        kind=ErrorKind.UNSUPPORTED_TYPE,
    )


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
    octets = strings.tight()
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
