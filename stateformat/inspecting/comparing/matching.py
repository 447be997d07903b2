"""What two checkpoints share, by metadata alone: rows of one segment on both sides.

A *run* is the rows of one key group in one handle. A key group is a sequence of runs, lowest layer
first. Runs are equal if their segments (by digest) and rows are. The runs with which both sides
begin are common; the rest of each side is above them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...manifest import Ints, Mask, before, codes_of, integers, lists, one_chunk, spread, take_rows
from ...reading import ReadTask
from ...schema import SLICE_SCHEMA
from .sides import Side

_POSITIONS: Final = 1 << 40
"""More rows than a segment can have."""


class Runs(NamedTuple):
    """Rows of handles of a task; for keyed state by (group, layer, handle)."""

    group: Ints
    """-1 if the rows are not of one key group."""
    handle: Ints
    segment: Ints
    start: Ints
    rows: Ints
    size_bytes: Ints
    """Approximate size in memory."""

    def of(self, mask: Mask) -> Runs:
        """Return some of the runs."""
        return Runs(*(column[mask] for column in self))


def segment_codes(old: Side | None, new: Side | None) -> tuple[Ints, Ints] | None:
    """Return a number per handle, equal for segments with equal bytes that are read in the same
    way.

    None if segments have no digest, or rows are reshaped before they are compared.
    """
    sides = [side for side in (old, new) if side is not None]
    if any(side.shape is not None for side in sides):
        return None
    chunks = [chunk for side in sides for chunk in side.handles["digest"].chunks]
    codes, _ = codes_of(pa.chunked_array(chunks, pa.binary(16)))
    if (codes < 0).any():
        return None
    numbers: dict[object, int] = {}
    readings = []
    for side in sides:
        known = side.readings()
        ids, found = np.unique(integers(side.handles["schema_id"]), return_inverse=True)
        # A handle with an undeclared schema is damage, which reading reports.
        each = [numbers.setdefault(known.get(number, number), len(numbers)) for number in ids.tolist()]
        readings.append(np.array(each, np.int64)[found])
    codes = codes * max(1, len(numbers)) + np.concatenate(readings)
    count = 0 if old is None else len(old.handles)
    return codes[:count], codes[count:]


def keyed_runs(handles: pa.Table, segments: Ints, row_bytes: int) -> Runs:
    """Return the runs of keyed state. ``row_bytes``: how much memory a row takes at least."""
    starts, ends, counts = lists(one_chunk(handles["rows_per_group"]))
    owner, nth = spread(ends - starts)
    place = starts[owner] + nth
    above = before(counts)
    group = integers(handles["first_group"])[owner] + nth
    start = integers(handles["row_start"])[owner] + above[place] - above[starts[owner]]
    sizes = counts[place] * _row_bytes(handles, row_bytes)[owner]
    order = np.lexsort((owner, integers(handles["layer"])[owner], group))
    runs = Runs(group, owner, segments[owner], start, counts[place], sizes)
    return Runs(*(column[order] for column in runs)).of(counts[place][order] > 0)


def _row_bytes(handles: pa.Table, least: int) -> Ints:
    stored = integers(handles["uncompressed_bytes"]) // np.maximum(1, integers(handles["segment_rows"]))
    return np.maximum(stored, least)


def common(old: Runs, new: Runs) -> tuple[Mask, Mask]:
    """Return the runs with which a key group begins on both sides."""
    places = _places(old.group), _places(new.group)
    width = 1 + max(int(place.max(initial=0)) for place in places)
    mine, theirs = old.group * width + places[0], new.group * width + places[1]
    at = np.searchsorted(theirs, mine)
    found = at < len(theirs)
    found[found] = theirs[at[found]] == mine[found]
    here = at[found]
    found[found] = (
        (old.segment[found] == new.segment[here])
        & (old.start[found] == new.start[here])
        & (old.rows[found] == new.rows[here])
    )
    # After the first run that differs, nothing is common.
    differing = np.cumsum(~found)
    first = np.arange(len(found)) - places[0]
    shared: Mask = differing - (differing - ~found)[first] == 0
    also = np.zeros(len(new.group), np.bool_)
    also[at[shared]] = True
    return shared, also


def _places(groups: Ints) -> Ints:
    """Return how many entries before each one are of its group; ``groups`` ascend."""
    place = np.arange(len(groups))
    begins = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    return place - np.maximum.accumulate(np.where(begins, place, 0))


def row_runs(handles: pa.Table, segments: Ints, others: pa.Table, other_segments: Ints) -> Runs:
    """Return the rows of handles, cut wherever a handle of either side begins or ends."""
    cuts = []
    for table, codes in ((handles, segments), (others, other_segments)):
        start = codes * _POSITIONS + integers(table["row_start"])
        cuts += [start, start + integers(table["rows"])]
    edges = np.unique(np.concatenate(cuts))
    low, high = np.searchsorted(edges, cuts[0]), np.searchsorted(edges, cuts[1])
    owner, nth = spread(high - low)
    begin = edges[low[owner] + nth]
    rows = edges[low[owner] + nth + 1] - begin
    return Runs(np.full_like(owner, -1), owner, segments[owner], begin % _POSITIONS, rows, rows)


def unmatched(old: Runs, new: Runs) -> tuple[Mask, Mask]:
    """Return the runs that one side has more often than the other."""
    numbers = np.concatenate([runs.segment * _POSITIONS + runs.start for runs in (old, new)])
    codes = np.unique(numbers, return_inverse=True)[1]
    first, second = codes[: len(old.start)], codes[len(old.start) :]
    return surplus(first, second)


def surplus(first: Ints, second: Ints) -> tuple[Mask, Mask]:
    """Return masks of the codes that each side has more often than the other: of a code, the last
    ones.
    """
    count = 1 + int(max(first.max(initial=-1), second.max(initial=-1)))
    return (
        _occurrence(first) >= np.bincount(second, minlength=count)[first],
        _occurrence(second) >= np.bincount(first, minlength=count)[second],
    )


def _occurrence(codes: Ints) -> Ints:
    """Return how many rows before each one have its code."""
    order = np.argsort(codes, kind="stable")
    found = np.empty(len(codes), np.int64)
    found[order] = _places(codes[order])
    return found


def cut_side(side: Side, runs: Runs) -> Side:
    """Return the side with only these runs."""
    return side.of(cut_task(side.task, runs))


def cut_task(task: ReadTask, runs: Runs) -> ReadTask:
    """Return a task that reads these runs: owners by key group, each with its runs in order."""
    slices = _slices(task.handles, runs)
    numbers = pc.dictionary_encode(slices["handle"]).combine_chunks()
    column = slices.schema.get_field_index("handle")
    slices = slices.set_column(column, SLICE_SCHEMA.field("handle"), numbers.indices.cast(pa.int64()))
    return replace(task, handles=take_rows(task.handles, numbers.dictionary), slices=slices)


def _slices(handles: pa.Table, runs: Runs) -> pa.Table:
    order = np.lexsort((runs.start, runs.handle))
    group, handle, start, rows = (column[order] for column in (runs.group, runs.handle, runs.start, runs.rows))
    # Consecutive runs in one handle are one slice.
    goes_on = (handle[1:] == handle[:-1]) & (start[1:] == start[:-1] + rows[:-1])
    begins = np.flatnonzero(np.append(True, ~goes_on)[: len(handle)])
    ends = np.append(begins[1:], len(handle)) - 1
    chosen = handle[begins]
    length = start[ends] + rows[ends] - start[begins]
    share = length / np.maximum(1, integers(handles["segment_rows"]))[chosen]
    stored = np.rint(share * integers(handles["size_bytes"])[chosen]).astype(np.int64)
    first, last = (integers(handles[name])[chosen] for name in ("first_group", "last_group"))
    grouped, whole = first >= 0, group[begins] < 0
    first, last = np.where(whole, first, group[begins]), np.where(whole, last, group[ends])
    table = pa.table(
        [
            *(handles[name].take(pa.array(chosen)) for name in ("operator", "state", "mode", "subtask", "layer")),
            pa.array(chosen),
            pa.array(start[begins]),
            pa.array(length),
            pa.array(first.astype(np.int32), mask=~grouped),
            pa.array(last.astype(np.int32), mask=~grouped),
            pa.array(stored),
        ],
        schema=SLICE_SCHEMA,
    )
    return table.take(pa.array(_by_owner(table)))


def _by_owner(slices: pa.Table) -> Ints:
    owner, first = integers(slices["subtask"]) + 1, integers(slices["first_group"])
    lowest = np.full(int(owner.max(initial=0)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(lowest, owner, first)
    return np.lexsort((integers(slices["row_start"]), integers(slices["handle"]), owner, lowest[owner]))
