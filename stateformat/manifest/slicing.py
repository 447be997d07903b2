"""Cut handles for new owners: the rows of a manifest that slices name, trimmed to the slices (SPEC.md section 4.3).

What rescale, rollback and carried layers share. A handle is cut, never copied: the segment stays what it was, only rows,
groups and owner of the handle change. Pure and vectorised: it costs the same for 1 MB and 1 TB of state. Some slices are
cut at a time, beside the handles that they name, so that what lies between is never much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import InvalidInput
from ..model import Mode
from .rules import integers, lists, one_chunk, take_rows

if TYPE_CHECKING:
    import numpy.typing as npt

_Ints: TypeAlias = "npt.NDArray[np.int64]"
_Mask: TypeAlias = "npt.NDArray[np.bool_]"

_ZERO_WITHOUT_ROWS = ("segment_rows", "size_bytes", "uncompressed_bytes", "footer_bytes")
_NULL_WITHOUT_ROWS = ("path", "digest", "footer_digest", "inline")
_TOGETHER: Final = 131_072
_OF_SEGMENT = (*_ZERO_WITHOUT_ROWS, *_NULL_WITHOUT_ROWS)


def cut_handles(handles: pa.Table, slices: pa.Table) -> pa.Table:
    """One handle per slice, in the order of ``slices``, with the columns of ``handles``.

    ``handles`` is a manifest's table, with or without ``inline``; ``slices`` is a ``schema.SLICE_SCHEMA`` table whose
    ``handle`` numbers rows of it. A new handle has the slice's ``subtask``, ``layer``, ``row_start`` and ``rows``; its
    groups are those of the slice that have rows in the handle, without empty ones at either end. A slice holds whole
    groups, save that one of in-flight state may be a part of a single sender's rows. A slice of no rows becomes a handle
    that says so (SPEC.md section 4.1).

    Raises ``InvalidInput`` for a slice that is no part of its handle: the planner's fault, or that of the manifest.
    """
    chosen = integers(slices["handle"])
    if len(chosen) and (chosen.min() < 0 or chosen.max() >= handles.num_rows):
        raise InvalidInput(f"slices name handle {chosen.max()} of a manifest with {handles.num_rows}")
    tables = []
    for start in range(0, len(chosen), _TOGETHER):
        numbers = chosen[start : start + _TOGETHER]
        low = int(numbers.min())
        near = handles.slice(low, int(numbers.max()) - low + 1)
        tables.append(_cut(near, slices.slice(start, _TOGETHER), numbers - low, start))
    return pa.concat_tables(tables or [handles.slice(0, 0)])


def _cut(handles: pa.Table, slices: pa.Table, chosen: _Ints, start: int) -> pa.Table:
    """Slices from ``start`` on of all, of which each cuts the handle at its place in ``chosen``."""
    rows = integers(slices["rows"])
    empty = rows == 0
    row_start = np.where(empty, 0, integers(slices["row_start"]))
    _check_rows(handles, chosen, row_start, rows, empty, start)
    first, last, counts = _cut_groups(handles, slices, chosen, row_start, empty, start)
    columns: dict[str, Any] = {
        "operator": slices["operator"],
        "state": slices["state"],
        "subtask": slices["subtask"],
        "layer": slices["layer"],
        "row_start": pa.array(row_start),
        "rows": pa.array(rows),
        "first_group": first,
        "last_group": last,
        "rows_per_group": counts,
    }
    # Of a slice without rows nothing of the segment is left.
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


def _check_rows(handles: pa.Table, chosen: _Ints, row_start: _Ints, rows: _Ints, empty: _Mask, offset: int) -> None:
    """Rows of a slice lie within the rows of its handle."""
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
    handles: pa.Table, slices: pa.Table, chosen: _Ints, row_start: _Ints, empty: _Mask, offset: int
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """``first_group``, ``last_group`` and ``rows_per_group`` of the new handles."""
    starts, ends, counts = lists(one_chunk(handles["rows_per_group"]))
    grouped = ~empty & (ends > starts)[chosen]
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    base = integers(handles["first_group"])[chosen]
    # Positions in ``counts`` of the slice's first group and behind its last, within those of the handle.
    low, high = starts[chosen], ends[chosen]
    begin = np.clip(low + integers(slices["first_group"]) - base, low, high)
    end = np.clip(low + integers(slices["last_group"]) - base + 1, begin, high)
    # Trim groups without rows: between two positions of groups that have some.
    filled = np.flatnonzero(counts)
    inner_first = np.searchsorted(filled, begin)
    inner_last = np.searchsorted(filled, end) - 1
    held = before[end] - before[begin]
    rows = integers(slices["rows"])
    expected = integers(handles["row_start"])[chosen] + before[begin] - before[low]
    # A part of one channel: the one slice with groups that does not hold whole groups.
    in_flight = pc.equal(slices["mode"], Mode.IN_FLIGHT.value).to_numpy()
    part = grouped & in_flight & (end - begin == 1) & (expected <= row_start) & (row_start + rows <= expected + held)
    wrong = grouped & ~part & ((held != rows) | (expected != row_start))
    if wrong.any():
        at = int(wrong.argmax())
        raise InvalidInput(
            f"slice {offset + at} is {rows[at]} rows from {row_start[at]}, but its groups are {held[at]} rows from {expected[at]}"
        )
    begin = np.where(grouped, filled[np.where(grouped, inner_first, 0)] if len(filled) else 0, 0)
    end = np.where(grouped, filled[np.where(grouped, inner_last, 0)] + 1 if len(filled) else 0, 0)
    sizes = end - begin
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    gathered = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], sizes)
    cut_counts = counts[gathered]
    cut_counts[offsets[:-1][part]] = rows[part]
    groups = base + begin - low
    element = handles.schema.field("rows_per_group").type
    lists_of = pa.ListArray.from_arrays(
        pa.array(np.append(offsets[:-1], offsets[-1]).astype(np.int32), mask=np.append(~grouped, False)),
        pa.array(cut_counts),
    )
    return (
        pa.array(groups.astype(np.int32), mask=~grouped),
        pa.array((groups + sizes - 1).astype(np.int32), mask=~grouped),
        lists_of.cast(element),
    )
