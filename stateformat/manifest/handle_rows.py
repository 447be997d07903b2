"""Compares what handles say of their segment's rows with the segment (SPEC.md 4.3 and 5.5).

A thousand handles may cut one segment. They are judged as arrays, a few hundred at a time, with
their positions laid end to end on one axis. Only a wrong handle is looked at by itself, for the
message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import pyarrow as pa

from .rules import Ints, Mask, integers, lists, spread

_TOGETHER: Final = 256
"""Handles judged at once. Each has fewer than 2**53 rows, so their sum fits int64."""


@dataclass(frozen=True, slots=True)
class HandleRows:
    """The handles of one segment that have groups, one entry each.

    ``counts[begin:end]`` are the rows of the groups from ``first_group`` on. ``subtask`` may be -1.
    """

    subtask: Ints
    row_start: Ints
    rows: Ints
    first_group: Ints
    begin: Ints
    end: Ints
    counts: Ints

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: Any) -> HandleRows:
        """Return some handles, by mask, slice or positions."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        return HandleRows(**{name: part if name == "counts" else part[chosen] for name, part in parts.items()})

    def batches(self) -> Iterator[HandleRows]:
        """Yield a few handles at a time, in order."""
        for start in range(0, len(self), _TOGETHER):
            yield self.take(slice(start, start + _TOGETHER))

    def spread(self) -> tuple[Ints, Ints, Ints]:
        """Return every group of every handle: the handle's position, the group, its rows."""
        owner, nth = spread(self.end - self.begin)
        return owner, self.first_group[owner] + nth, self.counts[self.begin[owner] + nth]


def handle_rows(handles: pa.Table) -> HandleRows:
    """Return the handles of one segment (a manifest's planning columns) that have groups."""
    begin, end, counts = lists(handles["rows_per_group"].combine_chunks())
    first = integers(handles["first_group"])
    row_start, rows, subtask = (integers(handles[name]) for name in ("row_start", "rows", "subtask"))
    found = HandleRows(subtask, row_start, rows, first, begin, end, counts)
    return found.take((end > begin) & (first >= 0))


def row_group_faults(group_rows: Sequence[int], handles: HandleRows) -> Iterator[str]:
    """Yield the first row group that holds parts of several key groups (SPEC.md section 5.5).

    ``group_rows`` are the rows of the file's row groups, in order.
    """
    stops = np.cumsum(np.asarray(group_rows, np.int64))
    starts = stops - np.asarray(group_rows, np.int64)
    for some in handles.batches():
        at = _mixed_row_group(starts, stops, some)
        if at is not None:
            yield f"row group {at}, rows {starts[at]} to {stops[at] - 1}, holds a part of a key group and more"
            return


def _mixed_row_group(starts: Ints, stops: Ints, handles: HandleRows) -> int | None:
    """Return the first row group that begins or ends within a key group and holds others too."""
    owner, _, counts = handles.spread()
    held = np.bincount(owner, counts, len(handles)).astype(np.int64)
    # Positions of group ends on one axis, on which each handle begins above the one before it.
    lift = np.cumsum(held + 1) - (held + 1)
    before = np.cumsum(counts) - counts
    opens = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    ends = before + counts - before[opens][owner] + lift[owner]
    bounds = np.sort(np.concatenate([lift, ends]), kind="stable")
    # Every pair of a handle and a row group that holds rows of it.
    first = np.searchsorted(stops, handles.row_start, "right")
    pairs = np.maximum(np.searchsorted(starts, handles.row_start + held, "left") - first, 0)
    mine, nth = spread(pairs)
    group = first[mine] + nth
    base = lift[mine] - handles.row_start[mine]
    low = np.maximum(starts[group], handles.row_start[mine]) + base
    high = np.minimum(stops[group], (handles.row_start + held)[mine]) + base
    whole = _among(bounds, low) & _among(bounds, high)
    alone = np.searchsorted(bounds, low, "right") == np.searchsorted(bounds, high - 1, "right")
    wrong = (low < high) & ~whole & ~alone
    return int(group[wrong.argmax()]) if wrong.any() else None


def _among(bounds: Ints, values: Ints) -> Mask:
    found: Mask = bounds[np.minimum(np.searchsorted(bounds, values), len(bounds) - 1)] == values
    return found


def group_faults(counts: Ints, handles: HandleRows, *, whole: bool) -> Iterator[tuple[int, str]]:
    """Yield handles whose rows are of other groups than they say (SPEC.md section 4.3).

    ``counts``: the rows of every group in the segment, which is sorted by group.
    ``whole``: a handle has all rows of its groups or none.

    Yields the subtask, and the rest of a sentence that begins with the segment.
    """
    ends = np.cumsum(counts)
    starts = ends - counts
    for some in handles.batches():
        for one in np.flatnonzero(_suspects(starts, ends, some, whole=whole)).tolist():
            yield from _fault(starts, ends, some.take(slice(one, one + 1)), whole=whole)


def _suspects(starts: Ints, ends: Ints, handles: HandleRows, *, whole: bool) -> Mask:
    owner, group, said = handles.spread()
    beyond = group >= len(ends)
    group = np.where(beyond, 0, group)
    first, stop = handles.row_start, handles.row_start + handles.rows
    held = np.maximum(np.minimum(ends[group], stop[owner]) - np.maximum(starts[group], first[owner]), 0)
    wrong = beyond | (held != said)
    if whole:
        wrong |= (held > 0) & (held != ends[group] - starts[group])
    found = np.bincount(owner, wrong, len(handles)) > 0
    # Rows beyond those are of groups that the handle does not name.
    rows = np.maximum(np.minimum(stop, ends[-1]) - np.maximum(first, 0), 0)
    found |= np.bincount(owner, held, len(handles)).astype(np.int64) != rows
    return found


def _fault(starts: Ints, ends: Ints, handle: HandleRows, *, whole: bool) -> Iterator[tuple[int, str]]:
    row_start, rows, first = (int(column[0]) for column in (handle.row_start, handle.rows, handle.first_group))
    stop, total = row_start + rows, ends - starts
    held = np.maximum(np.minimum(ends, stop) - np.maximum(starts, row_start), 0)
    said = np.zeros(len(held), np.int64)
    counts = handle.counts[int(handle.begin[0]) : int(handle.end[0])][: len(held) - first]
    said[first : first + len(counts)] = counts
    wrong = held != said
    if whole:
        wrong |= (held > 0) & (held != total)
    if wrong.any():
        group, subtask = int(wrong.argmax()), int(handle.subtask[0])
        what = (
            f"has {total[group]} rows of group {group}, {held[group]} of them in rows {row_start} to {stop - 1}; the "
            f"handle of subtask {None if subtask < 0 else subtask} says {said[group]}"
        )
        yield subtask, what
