"""Rules for the handles of one segment: the facts they must share, and the rows that they name.

A thousand handles may name parts of one segment. They must agree on its facts (SPEC.md sections
4.1, 4.4 and 5.6). Their rows and key groups are compared with the segment (sections 4.3 and 5.5) as
arrays, a few hundred handles at a time, with their positions laid end to end on one axis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from ..findings import Finding
from .columns import BATCH_ROWS, Ints, Mask, integers, lists, one_chunk, spread
from .rules import Broken

_STATE: Final = ("operator", "state", "schema_id")
_OF_SEGMENT: Final = ("segment_rows", "size_bytes", "uncompressed_bytes", "footer_bytes", "digest", "footer_digest")
_TOGETHER: Final = 256
"""Handles checked at once. Each has fewer than 2**53 rows, so their sum fits int64."""


def first_uses(codes: Ints) -> Ints:
    """Return the row at which each code of :func:`codes_of` first appears."""
    if not len(codes):
        return codes
    highest = np.maximum.accumulate(codes)
    found: Ints = np.flatnonzero(np.append(codes[0] >= 0, highest[1:] > highest[:-1]))
    return found


def codes_of(column: pa.ChunkedArray) -> tuple[Ints, int]:
    """Number the distinct values in order of appearance, null as -1, and count them."""
    encoded = pc.dictionary_encode(column)
    codes = np.concatenate([np.zeros(0, np.int64), *(integers(chunk.indices) for chunk in encoded.chunks)])
    return codes, len(encoded.chunk(encoded.num_chunks - 1).dictionary) if encoded.num_chunks else 0


def sharing_faults(handles: pa.Table) -> list[Finding]:
    """Return where handles of one segment disagree in sizes, digests, state, schema or bytes."""
    codes, count = codes_of(handles["path"])
    if count == np.count_nonzero(codes >= 0):
        return []
    first = first_uses(codes)
    faults = []
    for name in (name for name in (*_STATE, *_OF_SEGMENT, "inline") if name in handles.column_names):
        differing = _unlike_first(one_chunk(handles[name]), codes, first)
        if len(differing):
            clause = "SPEC 4.4" if name == "inline" else "SPEC 5.6" if name in _STATE else "SPEC 4.1"
            message = f"handles of one segment agree in {name}"
            faults.append(Broken(clause, message, int(differing[0]), len(differing)).finding(handles))
    return faults


def _unlike_first(column: pa.Array, codes: Ints, first: Ints) -> Ints:
    """Return the rows whose value differs from that of the first row with the same code."""
    found = [np.zeros(0, np.int64)]
    for start in range(0, len(codes), BATCH_ROWS):
        rows = start + np.flatnonzero(codes[start : start + BATCH_ROWS] >= 0)
        beside = first[codes[rows]]
        rows, beside = rows[beside < rows], beside[beside < rows]
        one, other = column.take(pa.array(beside)), column.take(pa.array(rows))
        if not one.equals(other):
            same = pc.or_kleene(pc.equal(one, other), pc.and_(pc.is_null(one), pc.is_null(other)))
            found.append(rows[~pc.fill_null(same, False).to_numpy(zero_copy_only=False)])
    return np.concatenate(found)


def inline_faults(handles: pa.Table, codes: Ints, values: pa.Array) -> list[Finding]:
    """Compare inline bytes with paths (SPEC 4.4); ``codes`` index ``values``, -1 for none."""
    inline = codes >= 0
    if not inline.any():
        return []
    faults = []
    named = pc.is_valid(handles["path"]).to_numpy()
    if (inline & ~named).any():
        row, count = int((inline & ~named).argmax()), int((inline & ~named).sum())
        faults.append(Broken("SPEC 4.1", "inline is null where path is", row, count).finding(handles))
    # A foreign writer's dictionary may hold equal bytes twice, so compare digests.
    digests = pa.array([xxhash.xxh3_128_digest(value.as_buffer()) for value in values], pa.binary())
    same = np.append(integers(pc.dictionary_encode(digests).indices), -1)[codes]
    paths, _ = codes_of(handles["path"])
    order = np.lexsort((same, paths))
    differs = (paths[order][1:] == paths[order][:-1]) & (same[order][1:] != same[order][:-1]) & named[order][1:]
    if differs.any():
        row = int(order[1:][differs.argmax()])
        message = "handles of one segment agree in inline"
        faults.append(Broken("SPEC 4.4", message, row, int(differs.sum())).finding(handles))
    return faults


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
    # Positions of group ends on one axis, on which each handle begins after the one before it.
    lift = np.cumsum(held + 1) - (held + 1)
    before = np.cumsum(counts) - counts
    opens = np.flatnonzero(np.append(True, owner[1:] != owner[:-1]))
    ends = before + counts - before[opens][owner] + lift[owner]
    bounds = np.sort(np.concatenate([lift, ends]), kind="stable")
    # Every pair of a handle and a row group that holds some of its rows.
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
    """Yield handles whose rows are in groups other than they say (SPEC.md section 4.3).

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
    # Rows beyond those are in groups that the handle does not name.
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
