"""The manifest in memory: one row per handle (SPEC.md section 4).

A :class:`Manifest` holds the planning columns. It reads the inline bytes, which are the last
column, when a caller first asks for them. Handles that share an inline segment carry the same
bytes; when read, they stay a dictionary as long as possible, so that a small file cannot fill the
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedCheckpoint, ErrorKind, InvalidInput, InvalidState
from ..findings import Finding
from ..model import ON_TOP, Handle, Mode, State, SubtaskSet, Totals
from ..schema import MANIFEST_SCHEMA, PLANNING_COLUMNS
from .rules import (
    Ints,
    Mask,
    before,
    codes_of,
    first_unsorted,
    inline_faults,
    integers,
    lists,
    one_chunk,
    spread,
    take_rows,
)

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


# ---- slicing -------------------------------------------------------------------------------------
#
# Cut handles for new owners: the rows of a manifest that slices name, trimmed to the slices.
#
# A handle is cut, never copied: the segment stays, and only rows, groups and owner of the handle
# change. So a rescale costs the same for 1 MB and 1 TB of state.


_ZERO_WITHOUT_ROWS = ("segment_rows", "size_bytes", "uncompressed_bytes", "footer_bytes")
_NULL_WITHOUT_ROWS = ("path", "digest", "footer_digest", "inline")
_TOGETHER: Final = 131_072
_OF_SEGMENT = (*_ZERO_WITHOUT_ROWS, *_NULL_WITHOUT_ROWS)


def cut_handles(handles: pa.Table, slices: pa.Table) -> pa.Table:
    """Return one handle per slice, in the order of ``slices``, with the columns of ``handles``.

    ``handles``: a manifest's table, with or without ``inline``. ``slices``: a
    ``schema.SLICE_SCHEMA`` table whose ``handle`` numbers rows of ``handles``. A slice holds whole
    groups; one of in-flight state may be a part of a single sender's rows.

    A new handle has the slice's subtask, layer and rows, and the slice's groups without empty ones
    at either end. A slice without rows becomes an empty handle (SPEC.md section 4.1).

    Raises ``InvalidInput``, the planner's fault, for a slice that is not part of its handle.
    """
    chosen = integers(slices["handle"])
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= handles.num_rows):
        raise InvalidInput(f"slices name handle {chosen.max()} of a manifest with {handles.num_rows}")
    tables = []
    for start in range(0, len(chosen), _TOGETHER):
        numbers = chosen[start : start + _TOGETHER]
        low = int(numbers.min())
        near = handles.slice(low, int(numbers.max()) - low + 1)
        tables.append(_cut(near, slices.slice(start, _TOGETHER).combine_chunks(), numbers - low, start))
    return pa.concat_tables(tables or [handles.slice(0, 0)])


def _cut(handles: pa.Table, slices: pa.Table, chosen: Ints, start: int) -> pa.Table:
    """Cut handles by some slices. Slice ``start + i`` of all cuts the handle at ``chosen[i]``."""
    rows = integers(slices["rows"])
    empty = rows == 0
    row_start = np.where(empty, 0, integers(slices["row_start"]))
    _check_rows(handles, chosen, row_start, rows, empty, start)
    first, last, counts = _cut_groups(handles, slices, chosen, row_start, empty, start)
    columns: dict[str, Any] = {
        "operator": slices["operator"].cast(pa.string()),
        "state": slices["state"].cast(pa.string()),
        "subtask": slices["subtask"],
        "layer": slices["layer"],
        "row_start": pa.array(row_start),
        "rows": pa.array(rows),
        "first_group": first,
        "last_group": last,
        "rows_per_group": counts,
    }
    # A slice without rows keeps nothing of the segment.
    filled = pa.array(chosen, mask=empty) if empty.any() else pa.array(chosen)
    rest = [name for name in handles.column_names if name not in columns]
    taken = take_rows(handles.select([name for name in rest if name not in _OF_SEGMENT]), pa.array(chosen))
    of_segment = take_rows(handles.select([name for name in rest if name in _OF_SEGMENT]), filled)
    columns |= {name: taken[name] for name in taken.column_names}
    columns |= {
        name: of_segment[name] if name in _NULL_WITHOUT_ROWS else pc.fill_null(of_segment[name], 0)
        for name in of_segment.column_names
    }
    return pa.table([columns[name] for name in handles.column_names], schema=handles.schema)


def _check_rows(handles: pa.Table, chosen: Ints, row_start: Ints, rows: Ints, empty: Mask, offset: int) -> None:
    start = integers(handles["row_start"])[chosen]
    end = start + integers(handles["rows"])[chosen]
    wrong = ~empty & ((rows < 0) | (row_start < start) | (row_start + rows > end))
    if wrong.any():
        at = int(wrong.argmax())
        path = handles["path"][int(chosen[at])].as_py()
        raise InvalidInput(
            f"slice {offset + at} is rows {row_start[at]} to {row_start[at] + rows[at] - 1} of {path}, but the "
            f"handle that it cuts holds rows {start[at]} to {end[at] - 1}"
        )


def _cut_groups(
    handles: pa.Table, slices: pa.Table, chosen: Ints, row_start: Ints, empty: Mask, offset: int
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return ``first_group``, ``last_group`` and ``rows_per_group`` of the new handles."""
    starts, ends, counts = lists(one_chunk(handles["rows_per_group"]))
    grouped = ~empty & (ends > starts)[chosen]
    rows_before = before(counts)
    base = integers(handles["first_group"])[chosen]
    # Positions in ``counts`` of the slice's first group and after its last.
    low, high = starts[chosen], ends[chosen]
    begin = np.clip(low + integers(slices["first_group"]) - base, low, high)
    end = np.clip(low + integers(slices["last_group"]) - base + 1, begin, high)
    # Leave out empty groups at either end.
    filled = np.flatnonzero(counts)
    inner_first = np.searchsorted(filled, begin)
    inner_last = np.searchsorted(filled, end) - 1
    held = rows_before[end] - rows_before[begin]
    rows = integers(slices["rows"])
    expected = integers(handles["row_start"])[chosen] + rows_before[begin] - rows_before[low]
    # A part of one channel need not hold whole groups.
    in_flight = pc.equal(slices["mode"], Mode.IN_FLIGHT.value).to_numpy()
    part = grouped & in_flight & (end - begin == 1) & (expected <= row_start) & (row_start + rows <= expected + held)
    wrong = grouped & ~part & ((held != rows) | (expected != row_start))
    if wrong.any():
        at = int(wrong.argmax())
        found = f"slice {offset + at} is {rows[at]} rows from {row_start[at]}"
        raise InvalidInput(f"{found}, but its groups are {held[at]} rows from {expected[at]}")
    begin = np.where(grouped, filled[np.where(grouped, inner_first, 0)] if len(filled) else 0, 0)
    end = np.where(grouped, filled[np.where(grouped, inner_last, 0)] + 1 if len(filled) else 0, 0)
    sizes = end - begin
    offsets = before(sizes)
    owner, nth = spread(sizes)
    cut_counts = counts[begin[owner] + nth]
    cut_counts[offsets[:-1][part]] = rows[part]
    groups = base + begin - low
    nullable_offsets = pa.array(offsets.astype(np.int32), mask=np.append(~grouped, False))
    lists_of_counts = pa.ListArray.from_arrays(nullable_offsets, pa.array(cut_counts))
    return (
        pa.array(groups.astype(np.int32), mask=~grouped),
        pa.array((groups + sizes - 1).astype(np.int32), mask=~grouped),
        lists_of_counts.cast(handles.schema.field("rows_per_group").type),
    )


def carried_handles(table: pa.Table, operator: str, state: str, subtasks: list[int | None]) -> pa.Table:
    """Return the rows of a state and these subtasks. Raises ``InvalidState`` if one has none."""
    mine = pc.and_(pc.equal(table["operator"], operator), pc.equal(table["state"], state))
    found = table.filter(pc.and_(mine, pc.is_in(table["subtask"], value_set=pa.array(subtasks, pa.int32()))))
    missing = set(subtasks) - set(pc.unique(found["subtask"]).to_pylist())
    if missing:
        raise InvalidState(
            f"subtask {SubtaskSet.of(i for i in missing if i is not None) or 'of the coordinator'} of {operator!r} "
            f"carries state {state!r}, but what the run holds has no handle of it; write the state whole",
            kind=ErrorKind.STATE_MISSING,
            operator=operator,
            state=state,
        )
    return found.select(MANIFEST_SCHEMA.names).cast(MANIFEST_SCHEMA)


def carried_by_plan(
    handles: pa.Table, slices: pa.Table, states: Iterable[State], parallelism: Mapping[str, int]
) -> pa.Table:
    """Return keyed handles cut by a restore plan's slices; a subtask without one gets an empty one.

    ``handles`` is the whole manifest, ``parallelism`` that of the operators to start. There are no
    slices without rows, but every subtask must report each state (SPEC.md section 4.6).
    """
    keyed = [state for state in states if state.mode is Mode.KEYED and state.operator in parallelism]
    wanted = slices.filter(pc.equal(slices["mode"], Mode.KEYED.value))
    bases = wanted.filter(pc.equal(wanted["layer"], 0))
    empty: list[Handle] = []
    for state in keyed:
        mine = pc.and_(pc.equal(bases["operator"], state.operator), pc.equal(bases["state"], state.name))
        has_base = np.zeros(parallelism[state.operator], np.bool_)
        has_base[bases["subtask"].filter(mine).to_numpy()] = True
        blank = Handle(state.operator, state.name, state.mode, None, 0, None, state.current.id)
        empty += [blank._replace(subtask=subtask) for subtask in np.flatnonzero(~has_base).tolist()]
    return pa.concat_tables([cut_handles(handles, wanted), handles_table(empty)])


def place_on_top(own: pa.Table, underneath: Mapping[tuple[str, str], pa.Table]) -> pa.Table:
    """Return ``own`` with each layer :data:`ON_TOP` set to one above the highest layer carried.

    Raises ``InvalidState`` for a delta of a state that its subtask does not carry.
    """
    pending = pc.equal(own["layer"], ON_TOP)
    if not pc.any(pending).as_py():
        return own
    layers = own["layer"].to_numpy().copy()
    subtasks = pc.fill_null(own["subtask"], -1).to_numpy()
    for (operator, state), table in underneath.items():
        mine = pc.and_(pc.and_(pending, pc.equal(own["operator"], operator)), pc.equal(own["state"], state))
        rows = np.flatnonzero(mine.to_numpy())
        below = pc.fill_null(table["subtask"], -1).to_numpy()
        highest = np.full(1 + max(below.max(initial=-1), subtasks[rows].max(initial=-1)) + 1, -1, np.int32)
        np.maximum.at(highest, below + 1, table["layer"].to_numpy())
        layers[rows] = highest[subtasks[rows] + 1] + 1
    if (layers == ON_TOP).any():
        row = own.slice(int(np.flatnonzero(layers == ON_TOP)[0]), 1).to_pylist()[0]
        raise InvalidState(
            f"subtask {row['subtask']} of {row['operator']!r} has written a delta of state {row['state']!r} but "
            "carries nothing underneath it; name the state as carried, or write it whole",
            kind=ErrorKind.STATE_NOT_ALLOWED,
        )
    return own.set_column(own.schema.get_field_index("layer"), MANIFEST_SCHEMA.field("layer"), pa.array(layers))


def with_spilled(handles: pa.Table, new_paths: Mapping[str, str]) -> pa.Table:
    """Return ``handles`` with some inline segments removed and their paths replaced by new ones."""
    at = pc.index_in(handles["path"], value_set=pa.array(list(new_paths), pa.string()), skip_nulls=True)
    moved = pc.is_valid(at)
    names = pa.array(list(new_paths.values()), pa.string()).take(at.combine_chunks())
    path = pc.if_else(moved, names, handles["path"].combine_chunks())
    inline = pc.if_else(moved, pa.scalar(None, pa.binary()), handles["inline"].cast(pa.binary()))
    schema = handles.schema
    handles = handles.set_column(schema.get_field_index("path"), MANIFEST_SCHEMA.field("path"), path)
    return handles.set_column(schema.get_field_index("inline"), MANIFEST_SCHEMA.field("inline"), inline)
