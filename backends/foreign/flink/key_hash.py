"""Flink's key groups: Java's ``hashCode`` of a key, mixed by a murmur, as a stateformat key hash.

Known for the types whose ``hashCode`` Java or Flink defines: whole numbers, booleans, floats,
strings and tuples of these. For types that users define (POJOs) or whose hash differs from run to
run (enums), only Java knows it: such operators name ``flink-user-hashcode``, which nothing here can
compute. Source: Flink 2.3, ``KeyGroupRangeAssignment`` and ``MathUtils``; Java's own documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.keys import hash_keys, normalize_key_column, register_key_hash

from ..byte_strings import ByteStrings

FLINK_KEY_HASH: Final = "flink-java-hashcode-murmur"
"""Over one key column of a type that :func:`is_hashable` knows; a struct is a tuple."""
USER_KEY_HASH: Final = "flink-user-hashcode"
"""For keys whose ``hashCode`` is the user's own code, or differs between runs. Only a user who
knows that code can register it.
"""

_U32 = npt.NDArray[np.uint32]
_I32 = npt.NDArray[np.int32]

_WHOLE: Final = (pa.int8(), pa.int16(), pa.int32())
_BLOCK: Final = 1 << 20


def is_hashable(dtype: pa.DataType) -> bool:
    """Return whether the hash of an Arrow type is known, if it stands for the Java type of its
    name.
    """
    if pa.types.is_struct(dtype):
        return dtype.num_fields > 0 and all(is_hashable(field.type) for field in dtype)
    return dtype in (*_WHOLE, pa.int64(), pa.bool_(), pa.float32(), pa.float64(), pa.string())


def java_hash_codes(values: pa.Array) -> _I32:
    """Return Java's ``hashCode`` of each value; 0 for null. −0.0 is not 0.0 to Java."""
    dtype = values.type
    if pa.types.is_struct(dtype):
        codes = np.zeros(len(values), np.uint32)
        for index in range(dtype.num_fields):
            # As Flink's tuples: the first one alone, then 31 × the result so far + the next.
            codes *= np.uint32(31)
            codes += java_hash_codes(values.field(index)).view(np.uint32)
    elif dtype == pa.string():
        codes = _text_codes(values)
    elif pa.types.is_boolean(dtype):
        truth = values.fill_null(False).to_numpy(zero_copy_only=False)
        codes = np.where(truth, np.uint32(1231), np.uint32(1237))
    elif dtype in _WHOLE:
        codes = values.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int32).view(np.uint32)
    elif dtype == pa.float32():
        plain = values.fill_null(0).to_numpy(zero_copy_only=False)
        codes = np.where(np.isnan(plain), np.uint32(0x7FC00000), plain.view(np.uint32))
    else:
        plain = values.fill_null(0).to_numpy(zero_copy_only=False)
        bits = plain.view(np.uint64)
        if dtype == pa.float64():
            bits = np.where(np.isnan(plain), np.uint64(0x7FF8 << 48), bits)
        codes = (bits ^ (bits >> np.uint64(32))).astype(np.uint32)
    if values.null_count:
        codes = np.where(values.is_valid().to_numpy(zero_copy_only=False), codes, np.uint32(0))
    return np.ascontiguousarray(codes).view(np.int32)


def binary_row_codes(rows: ByteStrings) -> _I32:
    """Return ``hashCode`` of Flink SQL's binary rows (multiples of 4 bytes): a murmur of their
    words with seed 42, which is stateformat's default hash of the bytes.
    """
    return hash_keys([rows.to_arrow()])


def murmur(codes: _I32) -> _I32:
    """Return Flink's murmur of hash codes; never negative. Its remainder is the key group."""
    k: _U32 = codes.view(np.uint32) * np.uint32(0xCC9E2D51)
    k = _rotated(k, 15) * np.uint32(0x1B873593)
    h = _rotated(k, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    h ^= np.uint32(4)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h ^= h >> np.uint32(shift)
        h *= np.uint32(factor)
    h ^= h >> np.uint32(16)
    found = h.view(np.int32)
    # The smallest number has no negative; Flink takes 0 for it.
    return np.where(found == np.iinfo(np.int32).min, np.int32(0), np.abs(found))


def _rotated(words: _U32, bits: int) -> _U32:
    return (words << np.uint32(bits)) | (words >> np.uint32(32 - bits))


def _text_codes(values: pa.Array) -> _U32:
    """Hash texts of UTF-8 as polynomials of their UTF-16 units."""
    ends = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, values.offset * 4).astype(np.int64)
    raw = values.buffers()[2]
    octets = np.frombuffer(raw, np.uint8)[ends[0] : ends[-1]] if raw is not None else np.zeros(0, np.uint8)
    ends -= ends[0]
    units: npt.NDArray[Any] = octets
    if len(octets) and octets.max() >= 0x80:
        # A character has one unit, or two if UTF-8 takes four bytes.
        count = ((octets & 0xC0) != 0x80).astype(np.int64) + (octets >= 0xF0)
        ends = np.append(0, np.cumsum(count))[ends]
        units = np.frombuffer(octets.tobytes().decode().encode("utf-16-le"), "<u2")
    return _polynomials(units, ends)


def _polynomials(units: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> _U32:
    """Return for each stretch of ``units`` the polynomial of 31, in 32 bits.

    31 has an inverse there, so sums over stretches are differences of one running sum.
    """
    size = len(units)
    inverse = np.uint32(pow(31, -1, 1 << 32))
    total = np.zeros(size + 1, np.uint32)
    powers = np.cumprod(np.full(min(size, _BLOCK), inverse, np.uint32), dtype=np.uint32)
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        scale = np.uint32(pow(int(inverse), start, 1 << 32))
        weighted = units[start:stop].astype(np.uint32) * powers[: stop - start] * scale
        np.cumsum(weighted, dtype=np.uint32, out=total[start + 1 : stop + 1])
        total[start + 1 : stop + 1] += total[start]
    differences = total[ends[1:]] - total[ends[:-1]]
    return differences * _power(np.uint32(31), ends[1:])


def _power(base: np.uint32, exponents: npt.NDArray[np.int64]) -> _U32:
    """Return ``base`` to each exponent, in 32 bits, by squaring."""
    found = np.ones(len(exponents), np.uint32)
    square = int(base)
    for bit in range(int(exponents.max()).bit_length() if len(exponents) else 0):
        found *= np.where(exponents >> bit & 1 == 1, np.uint32(square), np.uint32(1))
        square = square * square & 0xFFFFFFFF
    return found


def flink_key_hash(columns: Sequence[Any]) -> _I32:
    """The registered function: one column, where a struct is a tuple; several are one tuple."""
    whole = [column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column for column in columns]
    whole = [pa.concat_arrays(item.chunks) if isinstance(item, pa.ChunkedArray) else item for item in whole]
    refused = [str(item.type) for item in whole if not is_hashable(item.type)]
    if refused:
        raise InvalidInput(
            f"the Java hash code of {', '.join(refused)} is not known; import with `--key-hash rehash`",
            kind=ErrorKind.UNSUPPORTED_KEY_TYPE,
        )
    plain = [normalize_key_column(item) for item in whole]
    if len(plain) == 1:
        return murmur(java_hash_codes(plain[0]))
    return murmur(java_hash_codes(pa.StructArray.from_arrays(plain, [f"f{i}" for i in range(len(plain))])))


register_key_hash(FLINK_KEY_HASH, flink_key_hash)
