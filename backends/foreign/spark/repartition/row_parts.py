"""A row of Spark cut in two: the first columns, and the rest, each a row of its own.

RocksDB keys of stores with ``numColsPrefixKey`` consist of such parts. An ``UnsafeRow`` is null
bits, a word for each column, and the bytes that do not fit in a word, in the order of the columns:
both parts take adjacent bytes of each region, and only offsets change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...byte_strings import ByteStrings, Octets

Mask = npt.NDArray[np.bool_]


def split_rows(rows: ByteStrings, columns: int, first: int, by_offset: Sequence[bool]) -> tuple[pa.Array, pa.Array]:
    """Return the rows of the first columns, and those of the rest, as ``binary``.

    Args:
        rows: whole rows of ``columns`` columns, each judged by a decoder before.
        columns: how many columns they have.
        first: how many of them the first part has; at least one, and not all.
        by_offset: for each column whether its word is an offset and a size.
    """
    bits = _null_bits(rows, columns)
    words = _words(rows, columns)
    head = _fixed_size(columns)
    offsets = [words[:, at] >> 32 for at in range(columns)]
    # Where the rest begins: at the first of its columns that has bytes.
    border = rows.length.copy()
    for at in range(first, columns):
        if by_offset[at]:
            border = np.where(offsets[at] > 0, np.minimum(border, offsets[at]), border)
    start = np.full(len(rows), head, np.int64)
    parts = []
    for chosen, begin, end in ((slice(0, first), start, border), (slice(first, columns), border, rows.length)):
        count = chosen.stop - chosen.start
        kept = words[:, chosen].copy()
        for at, moves in enumerate(by_offset[chosen]):
            if moves:
                shift = _fixed_size(count) - begin
                kept[:, at] += np.where(kept[:, at] >> 32 > 0, shift << 32, 0)
        fixed = np.concatenate([_packed(bits[:, chosen]), kept.view(np.uint8).reshape(len(rows), -1)], axis=1)
        beyond = ByteStrings(rows.data, rows.start + begin, end - begin)
        parts.append(_joined(fixed, beyond))
    return parts[0], parts[1]


def prefixed_keys(rows: ByteStrings, columns: int, first: int, by_offset: Sequence[bool]) -> pa.Array:
    """Return keys as Spark's RocksDB store has them if ``first`` columns are a prefix.

    Size (little-endian) of the prefix row with its version byte, a version byte, the prefix row; a
    version byte, the row of the rest.
    """
    if first == columns:
        raise ValueError("all columns are prefix columns")
    head, rest = split_rows(rows, columns, first, by_offset)
    size = pc.binary_length(head).to_numpy() + 1
    sizes = pa.Array.from_buffers(pa.binary(4), len(rows), [None, pa.py_buffer(size.astype("<i4"))])
    version = pa.scalar(b"\0", pa.binary())
    return pc.binary_join_element_wise(sizes.cast(pa.binary()), version, head, version, rest, b"")


def _fixed_size(columns: int) -> int:
    return 8 * (-(-columns // 64) + columns)


def _null_bits(rows: ByteStrings, columns: int) -> Mask:
    size = 8 * -(-columns // 64)
    taken = rows.data[rows.start[:, None] + np.arange(size)]
    return np.unpackbits(taken, axis=1, bitorder="little")[:, :columns].astype(np.bool_)


def _packed(bits: Mask) -> Octets:
    size = 8 * -(-bits.shape[1] // 64)
    packed = np.packbits(bits, axis=1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, size - packed.shape[1])))


def _words(rows: ByteStrings, columns: int) -> npt.NDArray[np.int64]:
    begin = rows.start + 8 * -(-columns // 64)
    taken = rows.data[begin[:, None] + np.arange(8 * columns)]
    return np.ascontiguousarray(taken).view("<i8").reshape(len(rows), columns)


def _joined(fixed: Octets, beyond: ByteStrings) -> pa.Array:
    width = fixed.shape[1]
    whole = pa.py_buffer(np.ascontiguousarray(fixed))
    head = pa.Array.from_buffers(pa.binary(width), len(fixed), [None, whole]).cast(pa.binary())
    return pc.binary_join_element_wise(head, beyond.to_arrow(), b"")
