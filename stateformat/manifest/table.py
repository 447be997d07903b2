"""The manifest in memory: one row per handle (SPEC.md section 4).

A :class:`Manifest` holds the planning columns. It reads the inline bytes, which are the last
column, when a caller first asks for them. Handles that share an inline segment carry the same
bytes; when read, they stay a dictionary as long as possible, so that a small file cannot fill the
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedCheckpoint, ErrorKind
from ..findings import Finding
from ..model import Handle, Totals
from ..schema import MANIFEST_SCHEMA, PLANNING_COLUMNS
from .columns import Ints, integers, take_rows
from .rules import first_unsorted
from .segment_rules import codes_of, inline_faults

INLINE_BYTES_MAX: Final = 4 << 20
"""Bytes of all distinct inline segments of a manifest (SPEC.md section 4.4)."""
INLINE_EXPANDED_BYTES_MAX: Final = 256 << 20
"""Inline bytes summed over handles, shared segments once per handle."""


class Manifest:
    """All handles of a checkpoint. Thread-safe.

    ``read_inline`` reads the ``inline`` column if ``handles`` lacks it; without it all are null.
    """

    def __init__(self, handles: pa.Table, *, read_inline: Callable[[], pa.ChunkedArray] | None = None) -> None:
        self.handles: pa.Table = handles.select(PLANNING_COLUMNS)
        self._read_inline = read_inline
        self._lock = Lock()
        self._inline: pa.ChunkedArray | None = None
        self._by_path: Mapping[str, pa.Buffer] | None = None
        if "inline" in handles.column_names:
            self._inline = handles["inline"]

    def __repr__(self) -> str:
        return f"Manifest({self.handles.num_rows} handles)"

    def inline(self, path: str) -> pa.Buffer | None:
        """Return the unverified bytes of an inline segment; None for a segment in an object."""
        with self._lock:
            if self._by_path is None:
                self._by_path = self._buffers(self._column())
            return self._by_path.get(path)

    def full(self) -> pa.Table:
        """Return every column (``schema.MANIFEST_SCHEMA``), in the manifest's order.

        Raises ``DamagedCheckpoint`` (LIMIT_EXCEEDED) if inline bytes would take over 256 MiB.
        """
        with self._lock:
            column = self._column()
        return _with_inline(self.handles, column)

    def rows(self, indices: pa.Array | pa.ChunkedArray) -> pa.Table:
        """Return some rows with every column, in the order of ``indices``."""
        with self._lock:
            column = self._column()
            if self.handles["rows"].num_chunks > 1:
                # Every subtask that restores from this manifest takes rows of it.
                self.handles = self.handles.combine_chunks()
        return _with_inline(take_rows(self.handles, indices), column.take(indices))

    def is_inline(self) -> pa.ChunkedArray:
        """Return for each handle whether its segment is in the manifest."""
        with self._lock:
            return pc.is_valid(self._column())

    def inline_bytes(self) -> int:
        """Return the bytes of the distinct inline segments, before the manifest compresses them."""
        return self.inline_faults()[0]

    def inline_faults(self) -> tuple[int, list[Finding]]:
        """Return the bytes of the distinct inline segments, and the broken rules of section 4.4."""
        with self._lock:
            column = self._column()
        encoded = (column if pa.types.is_dictionary(column.type) else pc.dictionary_encode(column)).combine_chunks()
        codes, values = integers(encoded.indices), encoded.dictionary
        lengths = integers(pc.binary_length(values), null=0)
        used = np.bincount(codes[codes >= 0], minlength=len(lengths)) > 0
        return int(lengths[used].sum()), inline_faults(self.handles, codes, values)

    def _column(self) -> pa.ChunkedArray:
        if self._inline is None:
            read = self._read_inline
            self._inline = read() if read else pa.chunked_array([pa.nulls(self.handles.num_rows, pa.binary())])
        return self._inline

    def _buffers(self, column: pa.ChunkedArray) -> Mapping[str, pa.Buffer]:
        if column.null_count == len(column):
            return {}
        present = pc.indices_nonzero(pc.and_(pc.is_valid(column), pc.is_valid(self.handles["path"])))
        paths = pc.dictionary_encode(self.handles["path"].take(present).combine_chunks())
        _, first = np.unique(integers(paths.indices), return_index=True)
        values = _plain(column.take(present.take(pa.array(first))))
        return dict(zip(paths.dictionary.to_pylist(), (value.as_buffer() for value in values), strict=True))


def _with_inline(handles: pa.Table, column: pa.ChunkedArray) -> pa.Table:
    return pa.table([*handles.columns, _plain(column)], schema=MANIFEST_SCHEMA)


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return inline bytes as plain binary, or raise if sharing would make them too large."""
    if not pa.types.is_dictionary(column.type):
        return column
    expanded = sum(_expanded_bytes(chunk) for chunk in column.chunks)
    if expanded > INLINE_EXPANDED_BYTES_MAX:
        raise DamagedCheckpoint(
            f"the inline segments of these handles would take {expanded:,} bytes of memory; at most "
            f"{INLINE_EXPANDED_BYTES_MAX:,} are read",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
    return column.cast(pa.binary())


def _expanded_bytes(chunk: pa.DictionaryArray) -> int:
    lengths = integers(pc.binary_length(chunk.dictionary), null=0)
    codes = integers(chunk.indices)
    return int(lengths[codes[codes >= 0]].sum()) if len(lengths) else 0


def handles_table(handles: Iterable[Handle]) -> pa.Table:
    """Return handles as a table (``schema.MANIFEST_SCHEMA``), in the order given."""
    columns = list(zip(*handles, strict=True)) or [()] * len(MANIFEST_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, MANIFEST_SCHEMA, strict=True)]
    return pa.table(arrays, schema=MANIFEST_SCHEMA)


def sort_handles(table: pa.Table) -> pa.Table:
    """Sort by (operator, state, subtask with null first, layer), strings by bytes (SPEC.md 4.2).

    Stable: handles that are equal in these keep the order of their entries.
    """
    if table.num_rows < 2 or first_unsorted(table) is None:
        return table
    return take_rows(table, pa.array(handle_order(table)))


def handle_order(table: pa.Table) -> Ints:
    """Return the rows of a table in the order of :func:`sort_handles`."""
    keys = (integers(table["layer"]), integers(table["subtask"]), _ranks(table["state"]), _ranks(table["operator"]))
    return np.lexsort(keys)


def _ranks(column: pa.ChunkedArray) -> Ints:
    encoded = pc.dictionary_encode(column.combine_chunks())
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks[integers(encoded.indices)]


def totals(table: pa.Table) -> Totals:
    """Count handles, rows, and the distinct segments with their bytes (SPEC.md section 3.2)."""
    codes, count = codes_of(table["path"])
    sizes = np.zeros(count, np.int64)
    sizes[codes[codes >= 0]] = integers(table["size_bytes"])[codes >= 0]
    rows = pc.sum(table["rows"]).as_py() or 0
    return Totals(handles=table.num_rows, rows=rows, segments=count, bytes=int(sizes.sum()))


def spill_inline(table: pa.Table, limit: int = INLINE_BYTES_MAX) -> list[str]:
    """Return the paths of inline segments that must become objects, largest first (SPEC.md 4.4).

    The distinct segments that stay have at most ``limit`` bytes together, and at most 64 times as
    many if each is counted once for every handle that shares it.
    """
    inline = table.select(["path", "inline"]).filter(pc.is_valid(table["inline"]))
    if not inline.num_rows:
        return []
    paths = pc.dictionary_encode(inline["path"].combine_chunks())
    codes = integers(paths.indices)
    lengths = integers(pc.binary_length(_plain(inline["inline"])))
    sizes = np.zeros(len(paths.dictionary), np.int64)
    sizes[codes] = lengths
    shared = sizes * np.bincount(codes, minlength=len(sizes))
    order = np.argsort(-sizes, kind="stable")
    # The bytes that remain without the k largest, for every k.
    left = sizes.sum() - np.cumsum(sizes[order]) + sizes[order]
    left_shared = shared.sum() - np.cumsum(shared[order]) + shared[order]
    spilled = order[(left > limit) | (left_shared > limit * 64)]
    found: list[str] = paths.dictionary.take(pa.array(spilled)).to_pylist()
    return found
