"""Cut, join and gather tables by bytes, so that neither memory nor 32-bit offsets overflow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from threading import local
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

BATCH_BYTES: Final = 16 << 20
"""Bytes of a batch that readers return and writers take, unless one row has more."""

_RELEASE_BYTES: Final = 32 << 20
_MANY_COLUMNS: Final = 64
TAKEN_BYTES: Final = 256 << 20
"""The most that is gathered into one array."""

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


class _Passed(local):
    """Bytes processed by this thread since Arrow last gave memory back, and the least memory that
    was in use meanwhile.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.size_bytes, self.used_bytes = 0, pa.total_allocated_bytes()


_PASSED: Final = _Passed()


def release_memory_after(size_bytes: int) -> None:
    """Note rows that this thread has processed; now and then give back its share of the memory that
    Arrow has freed. Rows still in use have freed none, and pages given back must be mapped again.
    """
    used_bytes = pa.total_allocated_bytes()
    _PASSED.size_bytes += size_bytes
    _PASSED.used_bytes = min(_PASSED.used_bytes, used_bytes)
    if _PASSED.size_bytes - (used_bytes - _PASSED.used_bytes) >= _RELEASE_BYTES:
        _PASSED.begin()
        pa.default_memory_pool().release_unused()


def keep_memory() -> None:
    """Note that this thread is about to reuse memory that was freed before."""
    _PASSED.begin()


def cut(rows: Rows, rows_max: int, bytes_max: int) -> Iterator[Rows]:
    """Yield slices of at most ``rows_max`` rows and ``bytes_max`` bytes; a row is never cut."""
    return (piece for piece, _ in _cut(rows, rows_max, bytes_max))


def _cut(rows: Rows, rows_max: int, bytes_max: int, row_bits: int | None = None) -> Iterator[tuple[Rows, int]]:
    """Yield the slices and the bytes of each. ``row_bits``: those of every row, if known."""
    count = len(rows)
    size_bytes = rows.nbytes if row_bits is None else -(-count * row_bits // 8)
    if count < 2 or (count <= rows_max and size_bytes <= bytes_max):
        yield rows, size_bytes
        return
    parts = max(1, -(-size_bytes // bytes_max))
    step = max(1, min(rows_max, -(-count // parts), count - 1))
    for start in range(0, count, step):
        yield from _cut(rows.slice(start, step), rows_max, bytes_max, row_bits)


def _row_bits(schema: pa.Schema) -> int | None:
    """Return the bits of a row of many columns of numbers, with one per column for validity.

    Asking Arrow adds up all buffers each time. None if the columns are few or the rows differ.
    """
    if len(schema) < _MANY_COLUMNS or not all(map(pa.types.is_primitive, schema.types)):
        return None
    bits: int = sum(kind.bit_width + 1 for kind in schema.types)
    return bits


def rebatch(
    tables: Iterable[pa.Table], schema: pa.Schema, rows_max: int, bytes_max: int = BATCH_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the rows as batches of at most so many rows and bytes. Only small ones are joined."""
    waiting: list[pa.RecordBatch] = []
    held = held_bytes = 0
    row_bits = _row_bits(schema)
    for table in tables:
        pieces = (_cut(whole, rows_max, bytes_max, row_bits) for whole in table.to_batches())
        for batch, size_bytes in chain.from_iterable(pieces):
            count = len(batch)
            if not count:
                continue
            if waiting and (held + count > rows_max or held_bytes + size_bytes > bytes_max):
                yield concat_batches(waiting, schema)
                waiting, held, held_bytes = [], 0, 0
            if not waiting and (8 * count > rows_max or 8 * size_bytes > bytes_max):
                yield with_schema(batch, schema)
                continue
            waiting.append(batch)
            held, held_bytes = held + count, held_bytes + size_bytes
    if waiting:
        yield concat_batches(waiting, schema)


def with_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the same columns under this schema.

    A batch that already has it is returned untouched: with many columns, converting takes a while.
    """
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def concat_batches(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return one batch of all rows, which must have less than 2 GiB together."""
    columns = [pa.concat_arrays(column) for column in zip(*(batch.columns for batch in batches), strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def copy_rows(table: pa.Table) -> pa.Table:
    """Return the same rows in new memory, so that a small slice does not keep a large table."""
    columns = [
        pa.chunked_array([pa.concat_arrays([c]) for c in column.chunks], column.type) for column in table.columns
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def take_rows(column: pa.ChunkedArray, rows: npt.NDArray[Any]) -> pa.Array:
    """Return these rows of a column, in this order, as one array. It may have over 2 GiB."""
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    if not chunks:
        return pa.nulls(len(rows), column.type)
    if len(chunks) == 1:
        return pc.take(chunks[0], pa.array(rows), boundscheck=False)
    starts = np.cumsum([0, *map(len, chunks)])
    place = np.searchsorted(starts, rows, "right") - 1
    order = np.argsort(place, kind="stable")
    cuts = np.searchsorted(place[order], np.arange(len(chunks) + 1))
    sorted_rows = rows[order].astype(np.int64)
    gathered = []
    for number in np.flatnonzero(np.diff(cuts)).tolist():
        within = sorted_rows[cuts[number] : cuts[number + 1]] - starts[number]
        gathered.append(pc.take(chunks[number], pa.array(within), boundscheck=False))
    if not gathered:
        return pa.nulls(0, column.type)
    together = pa.concat_arrays(gathered) if len(gathered) > 1 else gathered[0]
    if (order[1:] > order[:-1]).all():
        return together
    back = np.empty(len(order), np.int64)
    back[order] = np.arange(len(order))
    return pc.take(together, pa.array(back), boundscheck=False)


def take_table(table: pa.Table, rows: npt.NDArray[Any], bytes_max: int = TAKEN_BYTES) -> pa.Table:
    """Return these rows of a table, in this order, in chunks of about ``bytes_max`` bytes."""
    step = max(1, bytes_max * len(table) // max(1, table.nbytes))
    windows = [rows[start : start + step] for start in range(0, len(rows), step)][::-1]
    found = [table.schema.empty_table()]
    while windows:
        window = windows.pop()
        try:
            columns = [take_rows(column, window) for column in table.columns]
        except (pa.ArrowInvalid, pa.ArrowCapacityError):
            # Some rows are far larger than the others, and 32-bit offsets end at 2 GiB.
            if len(window) == 1:
                raise
            windows += [window[len(window) // 2 :], window[: len(window) // 2]]
            continue
        found.append(pa.Table.from_arrays(columns, schema=table.schema))
    return pa.concat_tables(found)


def row_sizes(columns: Sequence[pa.ChunkedArray]) -> tuple[int, npt.NDArray[np.int64] | None]:
    """Return the bytes of a row: a fixed part, and what strings and lists add per row, or None."""
    fixed = 0
    varying: npt.NDArray[np.int64] | None = None
    for column in columns:
        width = _fixed_bytes(column.type)
        if width is not None:
            fixed += width
            continue
        sizes = np.concatenate([np.zeros(0, np.int64), *map(_sizes, column.chunks)])
        varying = sizes if varying is None else varying + sizes
    return fixed, varying


def _fixed_bytes(kind: Any) -> int | None:
    """Return the bytes of a value of this type; None if they depend on the value."""
    if pa.types.is_struct(kind):
        widths = [_fixed_bytes(field.type) for field in kind]
        return None if None in widths else sum(width or 0 for width in widths)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return 0 if pa.types.is_null(kind) else None


def _sizes(array: Any) -> npt.NDArray[np.int64]:
    kind = array.type
    width = _fixed_bytes(kind)
    if width is not None:
        return np.full(len(array), width, np.int64)
    if pa.types.is_struct(kind):
        return _sum(array.flatten())
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        values = [array.values] if pa.types.is_list(kind) else [array.keys, array.items]
        offsets = array.offsets.to_numpy()
        # All entries in memory; the offsets choose some of them.
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(_sum(values))])
        within: npt.NDArray[np.int64] = ends[offsets[1:]] - ends[offsets[:-1]] + 4
        return within
    lengths = pc.fill_null(pc.binary_length(array), 0).to_numpy(zero_copy_only=False)
    found: npt.NDArray[np.int64] = lengths.astype(np.int64) + 4
    return found


def _sum(arrays: Sequence[Any]) -> npt.NDArray[np.int64]:
    total = np.zeros(len(arrays[0]) if arrays else 0, np.int64)
    for array in arrays:
        total += _sizes(array)
    return total
