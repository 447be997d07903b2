"""Encode ``BigInteger`` and ``BigDecimal`` from the text that Java's ``toString`` writes."""

from __future__ import annotations

import decimal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput

from .binaries import fewest_octets, joined, of_numbers, present, repeated, scattered

_DIGITS = 76
"""How many digits Arrow's widest decimal holds."""
_PATTERN = r"^(?P<sign>[-+]?)(?P<whole>[0-9]+)(?:\.(?P<part>[0-9]*))?(?:[eE](?P<exponent>[-+]?[0-9]+))?$"


def encode_big_integer(values: pa.Array) -> pa.Array:
    """Encode whole numbers: 0 for null, else the number of bytes + 4, and the bytes."""
    chosen = present(values)
    return _with_lengths(_unscaled(values.filter(pa.array(chosen))), chosen)


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
    return joined(_with_lengths(_unscaled(digits), chosen), scales)


def _with_lengths(octets: pa.Array, chosen: npt.NDArray[np.bool_]) -> pa.Array:
    """Put the number of bytes + 4 before the bytes of each chosen value; write 0 for the others.

    The numbers 0, 1 and 10 have a code of their own (1, 2 and 3), and no bytes.
    """
    small = pc.fill_null(pc.index_in(octets, pa.array([b"\0", b"\1", b"\n"])), -1).to_numpy(zero_copy_only=False)
    code = np.zeros(len(chosen), np.int64)
    code[chosen] = np.where(small < 0, 4 + pc.binary_length(octets).to_numpy(zero_copy_only=False), 1 + small)
    octets = pc.if_else(pa.array(small < 0), octets, pa.scalar(b""))
    return joined(of_numbers(code, ">i4"), scattered(octets, chosen))


def _unscaled(digits: pa.Array) -> pa.Array:
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
