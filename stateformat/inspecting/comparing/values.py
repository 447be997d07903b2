"""Values compared by their bits, nested ones too; all NaNs are equal.

Unlike in keys, 0.0 and -0.0 are two values. The entries of a map are compared in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...keys import hash_keys, mixed_hashes
from ...segments import one_array, row_key_codes

_Mask = npt.NDArray[np.bool_]
_FLOATS = {pa.float32(): (pa.int32(), np.float32, np.int32), pa.float64(): (pa.int64(), np.float64, np.int64)}
_PRIME = np.uint64(0x9E3779B97F4A7C15)


def equal_values(left: pa.Array, right: pa.Array) -> _Mask:
    """Return whether each value of one array equals that of another, of the same type and
    length.
    """
    kind = left.type
    if pa.types.is_nested(kind):
        codes = value_codes([pa.chunked_array([left, right])])
        found: _Mask = codes[: len(left)] == codes[len(left) :]
        return found
    if kind in _FLOATS:
        left, right = _bits(left), _bits(right)
    if not (left.null_count or right.null_count):
        return _mask(pc.equal(left, right))
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return _mask(pc.or_(pc.fill_null(pc.equal(left, right), False), both_null))


def value_codes(columns: Sequence[pa.ChunkedArray]) -> npt.NDArray[np.int64]:
    """Return a number per row, equal exactly for rows with equal values in all ``columns``."""
    return row_key_codes([_comparable(one_array(column)) for column in columns])


def value_buckets(columns: Sequence[pa.ChunkedArray], count: int, level: int) -> npt.NDArray[np.int64]:
    """Return one of ``count`` buckets for each row, by its values and the ``level``; for any
    type.
    """
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashes = hashes * _PRIME + _hashes(one_array(column))
    folded = (hashes ^ (hashes >> np.uint64(32))).astype(np.uint32).view(np.int32)
    return (mixed_hashes(folded, level).astype(np.int64) * count) >> 32


def row_hashes(columns: Sequence[pa.ChunkedArray]) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each row, equal for rows with equal values; for any type."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        array = one_array(column)
        hashes = hashes * _PRIME + _hashes(_bits(array) if array.type in _FLOATS else array)
    # Spread over all bits: a single column of numbers has a 32-bit hash.
    hashes *= np.uint64(0x9FB21C651E98DF25)
    return hashes ^ (hashes >> np.uint64(28))


def _mask(found: Any) -> _Mask:
    mask: _Mask = found.to_numpy(zero_copy_only=False)
    return mask


def _bits(array: pa.Array) -> pa.Array:
    """Return the bits of floats as integers."""
    kind, floats, integers = _FLOATS[array.type]
    values = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    bits = values.view(integers)
    odd = np.isnan(values)
    if odd.any():
        bits = np.where(odd, np.array(np.nan, floats).view(integers), bits)
    return pa.array(bits, kind, mask=_mask(array.is_null()) if array.null_count else None)


def _comparable(array: pa.Array) -> pa.Array:
    """Return the values as keys that are equal if these are: floats as integers, lists as bytes."""
    kind = array.type
    if kind in _FLOATS:
        return _bits(array)
    if pa.types.is_struct(kind):
        children = [_comparable(child) for child in array.flatten()]
        fields = [pa.field(str(number), child.type) for number, child in enumerate(children)]
        valid = pa.py_buffer(np.packbits(_mask(array.is_valid()), bitorder="little"))
        return pa.Array.from_buffers(pa.struct(fields), len(array), [valid], -1, children=children)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        entries = _as_list(array)
        codes = row_key_codes([_comparable(entries.flatten())]) if len(entries) else np.zeros(0, np.int64)
        ends = 8 * np.cumsum(_lengths(entries))
        offsets = pa.py_buffer(np.concatenate([np.zeros(1, np.int64), ends]))
        valid = pa.py_buffer(np.packbits(_mask(array.is_valid()), bitorder="little"))
        return pa.Array.from_buffers(pa.large_binary(), len(array), [valid, offsets, pa.py_buffer(codes)])
    return array


def _as_list(array: pa.Array) -> pa.Array:
    """Return a map as a list of its entries; a list as it is."""
    if not pa.types.is_map(array.type):
        return array
    entries = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    buffers = array.buffers()[:2]
    return pa.Array.from_buffers(pa.list_(entries.type), len(array), buffers, -1, array.offset, children=[entries])


def _lengths(lists: pa.Array) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = (
        pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return lengths


def _hashes(array: pa.Array) -> npt.NDArray[np.uint64]:
    kind = array.type
    valid = _mask(array.is_valid()).astype(np.uint64)
    found: npt.NDArray[np.uint64]
    if pa.types.is_struct(kind):
        found = valid
        for child in array.flatten():
            found = found * _PRIME + _hashes(child)
        return found
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        entries = _as_list(array)
        lengths = _lengths(entries)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        place = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
        values = (_hashes(entries.flatten()) + _PRIME) * (2 * place.astype(np.uint64) + np.uint64(1))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
        found = sums[ends[1:]] - sums[ends[:-1]]
        found *= _PRIME
        found += lengths.astype(np.uint64) * np.uint64(2) + valid
        return found
    found = hash_keys([array]).view(np.uint32).astype(np.uint64)
    return found
