"""What handles say of the rows of their segment, group by group, beside what the segment holds (SPEC.md sections 4.3, 5.5).

Theory of operation. After a rescale a thousand handles and more cut one segment, so they are judged together, as arrays: a
few hundred handles at a time, whose positions are laid end to end on one axis. Only of a handle that is wrong is anything
looked at by itself, for the words of the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import pyarrow as pa

from .rules import integers, lists

if TYPE_CHECKING:
    import numpy.typing as npt

_Ints: TypeAlias = "npt.NDArray[np.int64]"
_Mask: TypeAlias = "npt.NDArray[np.bool_]"

_TOGETHER: Final = 256
"""Handles judged at once. Rows of a handle are below 2**53, so those of all of them fit one axis of int64."""


@dataclass(frozen=True, slots=True)
class HandleRows:
    """The handles of one segment that know their groups: rows ``row_start`` … ``row_start + rows - 1`` of it.

    The rows of the groups from ``first_group`` on are ``counts[begin:end]``. ``subtask`` is -1 for none.
    """

    subtask: _Ints
    row_start: _Ints
    rows: _Ints
    first_group: _Ints
    begin: _Ints
    end: _Ints
    counts: _Ints

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, chosen: Any) -> HandleRows:
        """Some of them, by mask, slice or positions."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        return HandleRows(**{name: part if name == "counts" else part[chosen] for name, part in parts.items()})

    def batches(self) -> Iterator[HandleRows]:
        """A few at a time, in order."""
        for start in range(0, len(self), _TOGETHER):
            yield self.take(slice(start, start + _TOGETHER))

    def spread(self) -> tuple[_Ints, _Ints, _Ints]:
        """Every group of every handle: the handle's position, the group, its rows."""
        sizes = self.end - self.begin
        owner = np.repeat(np.arange(len(self)), sizes)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return owner, self.first_group[owner] + nth, self.counts[self.begin[owner] + nth]


def handle_rows(handles: pa.Table) -> HandleRows:
    """The handles of one segment (a manifest's planning columns) that have groups."""
    begin, end, counts = lists(handles["rows_per_group"].combine_chunks())
    first = integers(handles["first_group"])
    row_start, rows, subtask = (integers(handles[name]) for name in ("row_start", "rows", "subtask"))
    found = HandleRows(subtask, row_start, rows, first, begin, end, counts)
    return found.take((end > begin) & (first >= 0))


def row_group_faults(group_rows: Sequence[int], handles: HandleRows) -> Iterator[str]:
    """Row groups that hold parts of several groups (SPEC.md section 5.5), as far as the handles know the groups.

    ``group_rows`` are the rows of the file's row groups, in order. Tells the first.
    """
    stops = np.cumsum(np.asarray(group_rows, np.int64))
    starts = stops - np.asarray(group_rows, np.int64)
    for some in handles.batches():
        at = _mixed_row_group(starts, stops, some)
        if at is not None:
            yield f"row group {at}, rows {starts[at]} to {stops[at] - 1}, holds a part of a group and more than that"
            return


def _mixed_row_group(starts: _Ints, stops: _Ints, handles: HandleRows) -> int | None:
    """The first row group that begins or ends within a group and is not within that group alone."""
    owner, _, counts = handles.spread()
    held = np.bincount(owner, counts, len(handles)).astype(np.int64)
    # Positions of group ends relative to the handle's first row; each handle is lifted above the one before it.
    lift = np.cumsum(held + 1) - (held + 1)
    before = np.cumsum(counts) - counts
    opens = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    ends = before + counts - before[opens][owner] + lift[owner]
    bounds = np.sort(np.concatenate([lift, ends]), kind="stable")
    # Row groups that a handle has rows of, one pair each.
    first = np.searchsorted(stops, handles.row_start, "right")
    pairs = np.maximum(np.searchsorted(starts, handles.row_start + held, "left") - first, 0)
    mine = np.repeat(np.arange(len(handles)), pairs)
    group = first[mine] + np.arange(len(mine)) - np.repeat(np.cumsum(pairs) - pairs, pairs)
    base = lift[mine] - handles.row_start[mine]
    low = np.maximum(starts[group], handles.row_start[mine]) + base
    high = np.minimum(stops[group], (handles.row_start + held)[mine]) + base
    whole = _among(bounds, low) & _among(bounds, high)
    alone = np.searchsorted(bounds, low, "right") == np.searchsorted(bounds, high - 1, "right")
    wrong = (low < high) & ~whole & ~alone
    return int(group[wrong.argmax()]) if wrong.any() else None


def _among(bounds: _Ints, values: _Ints) -> _Mask:
    found: _Mask = bounds[np.minimum(np.searchsorted(bounds, values), len(bounds) - 1)] == values
    return found


def group_faults(counts: _Ints, handles: HandleRows, *, whole: bool) -> Iterator[tuple[int, str]]:
    """Handles whose rows are not of the groups that they say (SPEC.md section 4.3): the subtask, and what is wrong.

    ``counts`` are the rows of every group in the segment, which is sorted by group, so they lie where each begins and ends.
    ``whole``: a handle has all rows of its groups or none.
    """
    ends = np.cumsum(counts)
    starts = ends - counts
    for some in handles.batches():
        for one in np.flatnonzero(_suspects(starts, ends, some, whole=whole)).tolist():
            yield from _fault(starts, ends, some.take(slice(one, one + 1)), whole=whole)


def _suspects(starts: _Ints, ends: _Ints, handles: HandleRows, *, whole: bool) -> _Mask:
    owner, group, said = handles.spread()
    beyond = group >= len(ends)
    group = np.where(beyond, 0, group)
    first, stop = handles.row_start, handles.row_start + handles.rows
    held = np.maximum(np.minimum(ends[group], stop[owner]) - np.maximum(starts[group], first[owner]), 0)
    wrong = beyond | (held != said)
    if whole:
        wrong |= (held > 0) & (held != ends[group] - starts[group])
    found = np.bincount(owner, wrong, len(handles)) > 0
    # What is not of the groups that it says is of others.
    rows = np.maximum(np.minimum(stop, ends[-1]) - np.maximum(first, 0), 0)
    found |= np.bincount(owner, held, len(handles)).astype(np.int64) != rows
    return found


def _fault(starts: _Ints, ends: _Ints, handle: HandleRows, *, whole: bool) -> Iterator[tuple[int, str]]:
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
            f"has {total[group]} rows of group {group}, {held[group]} of them in rows {row_start} to {stop - 1}; the handle "
            f"of subtask {None if subtask < 0 else subtask} says {said[group]}"
        )
        yield subtask, what
