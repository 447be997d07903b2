"""Who gets what: one rule for each mode, from handles to slices, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.keys import MAX_PARALLELISM_LIMIT, range_bounds
from stateformat.manifest import Ints, Mask, before, spread

from .tables import EVERY, GroupRows, Handles, Slices, States, damaged, run_starts

# ---- union ---------------------------------------------------------------------------------------
#
# Union state: every new subtask gets every entry, in the order of the old subtasks.
#
# The plan lists each handle once, for all. No operator with finished subtasks may have union state,
# because any of them may have been the only one with an entry: ``rules.checkpoint`` refuses it.


def share_union(handles: Handles) -> Slices:
    """Give each handle with rows to every new subtask, in manifest order."""
    return Slices.whole(handles, EVERY)


# ---- progress ------------------------------------------------------------------------------------
#
# Progress: the watermark of each input of a subtask, and whether the input has ended.
#
# A subtask keeps its own progress if it is settled (same parallelism, all subtasks run, no rescale
# in between) and so is everything upstream of it over forward and rescale edges. Otherwise each new
# subtask gets the rows of all, and its reader takes for each input the least watermark, ended only
# if ended in all (SPEC.md section 6.2).
#
# Upstream counts because, over a point-to-point edge, a subtask knows the watermark of a few
# producers only. A producer that takes over splits from a slower one may send older records, which
# would be dropped as late.


def share_progress(handles: Handles, states: States) -> Slices:
    """Give subtasks their own handle of undisturbed states, and all handles of the others."""
    own = states.undisturbed[handles.state]
    kept = handles.where(own)
    return Slices.concat([Slices.whole(kept, kept.subtask), Slices.whole(handles.where(~own), EVERY)])


# ---- broadcast -----------------------------------------------------------------------------------
#
# Broadcast state: every new subtask gets exactly one copy, and all copies are equal.
#
# New subtask *i* gets its own copy if old subtask *i* reported one, otherwise that of the running
# reporter number *i* mod *k* of *k*. An empty copy is a copy.


def copy_broadcast(handles: Handles, states: States) -> Slices:
    """Give each new subtask all handles of one reporter, which are one copy.

    ``handles`` include those without rows, which say that their subtask reported.
    """
    if not len(handles):
        return Slices.none()
    first = np.flatnonzero(run_starts(handles.state, handles.subtask))
    held = np.diff(np.append(first, len(handles)))
    state, subtask = handles.state[first], handles.subtask[first]
    reporters = np.bincount(state, minlength=len(states.operator))
    first_reporter = np.cumsum(reporters) - reporters

    # Pairs of a state with reporters and a new subtask, and the reporter whose copy the subtask
    # gets.
    target_state, target = spread(np.where(reporters > 0, states.parallelism, 0))
    widest = int(max(subtask.max(), target.max(initial=0))) + 1
    reporter_key, target_key = state * widest + subtask, target_state * widest + target
    own = np.minimum(np.searchsorted(reporter_key, target_key), len(reporter_key) - 1)
    other = first_reporter[target_state] + target % np.maximum(reporters[target_state], 1)
    source = np.where(reporter_key[own] == target_key, own, other)

    copy, nth = spread(held[source])
    chosen = first[source[copy]] + nth
    filled = handles.rows[chosen] > 0
    return Slices.part(handles, chosen[filled], target[copy][filled])


# ---- even split ----------------------------------------------------------------------------------
#
# Even-split state: lists of entries, put together and cut into contiguous chunks.
#
# If the parallelism stays the same and every subtask runs, each keeps its own entries. Otherwise,
# for each state of an operator in byte order of names: the entries of all reporters, in subtask
# order, are cut into *p* chunks, of which the first ``entries mod p`` are one longer. Chunks go to
# subtasks start, start + 1, … modulo *p*. The start of an operator's first state is 0 and moves on
# by ``entries mod p`` from state to state, so the remainders of several short lists go to different
# subtasks.


@dataclass(frozen=True, slots=True)
class Chunks:
    """Non-empty parts of units, sorted: entries ``offset`` … of ``unit`` go to ``subtask``."""

    unit: Ints
    offset: Ints
    rows: Ints
    subtask: Ints


def distribute_evenly(rows: Ints, sharer: Ints, parallelism: Ints) -> Chunks:
    """Cut units of ``rows`` entries into ``parallelism`` chunks each, the longer chunks first.

    Units with equal ``sharer`` are neighbors; the start moves on from one to the next.
    """
    base, longer = rows // parallelism, rows % parallelism
    passed = before(longer)[:-1]
    first_of_sharer = np.maximum.accumulate(np.where(run_starts(sharer), np.arange(len(rows)), 0))
    since = passed[first_of_sharer]
    start = (passed - since) % parallelism
    unit, nth = spread(np.minimum(rows, parallelism))
    return Chunks(
        unit=unit,
        offset=nth * base[unit] + np.minimum(nth, longer[unit]),
        rows=base[unit] + (nth < longer[unit]),
        subtask=(start[unit] + nth) % parallelism[unit],
    )


def split_evenly(handles: Handles, states: States) -> Slices:
    """Give subtasks their own entries of settled states, and chunks of the others."""
    handles = handles.where(handles.rows > 0)
    settled = states.settled[handles.state]
    own = handles.where(settled)
    return Slices.concat([Slices.whole(own, own.subtask), _split(handles.where(~settled), states)])


def _split(handles: Handles, states: States) -> Slices:
    if not len(handles):
        return Slices.none()
    # Both handles and chunks cover the axis of all entries of all states, without gaps or overlaps.
    handle_start = before(handles.rows)[:-1]
    first = np.flatnonzero(run_starts(handles.state))
    state = handles.state[first]
    totals = np.add.reduceat(handles.rows, first)
    chunks = distribute_evenly(totals, states.operator[state], states.parallelism[state])
    chunk_start = handle_start[first][chunks.unit] + chunks.offset
    start = np.sort(np.concatenate([handle_start, chunk_start]), kind="stable")
    start = start[run_starts(start)]
    handle = np.searchsorted(handle_start, start, side="right") - 1
    chunk = np.searchsorted(chunk_start, start, side="right") - 1
    return Slices.part(
        handles,
        handle,
        chunks.subtask[chunk],
        row_start=handles.row_start[handle] + start - handle_start[handle],
        rows=np.diff(np.append(start, handle_start[-1] + handles.rows[-1])),
    )


# ---- keyed ---------------------------------------------------------------------------------------
#
# Keyed state goes to the owners of its key groups.
#
# Subtask *i* of *p* owns the key groups ⌈i·max/p⌉ … ⌈(i+1)·max/p⌉ − 1 (SPEC.md section 5.3). The
# rows of a handle are sorted by key group, so a new subtask gets one range of its rows. All layers
# of a state are cut alike and stay apart. In-flight records on a hash edge are cut in the same way.


_LIFT = 2 * MAX_PARALLELISM_LIMIT
_WALK = 8


def cut_keyed(handles: Handles, states: States) -> Slices:
    """Cut each handle at the borders of the new subtasks' ranges; parts without rows make no slice.

    A slice has whole key groups and begins and ends with one that has rows. The slices of a handle
    ascend by key group. Raises ``DamagedCheckpoint`` if the rows per group do not add up.
    """
    handles = handles.where(handles.rows > 0)
    owner_first, owner_last, bounds, bounds_start = _owners(handles, states)
    if not bool((owner_last > owner_first).any()):
        return Slices.part(handles, np.arange(len(handles)), owner_first)
    chosen, nth = spread(owner_last - owner_first + 1)
    owner = owner_first[chosen] + nth
    border = bounds_start[handles.state[chosen]] + owner
    first = np.maximum(handles.first_group[chosen], bounds[border])
    last = np.minimum(handles.last_group[chosen], bounds[border + 1] - 1)
    return _pieces(handles, chosen, owner, first, last)


def _owners(handles: Handles, states: States) -> tuple[Ints, Ints, Ints, Ints]:
    """Return the new owners of each handle's first and last group, all bounds, and their starts."""
    shapes: dict[tuple[int, int], int] = {}
    tables: list[Ints] = []
    shape_of = np.zeros(len(states.operator), dtype=np.int64)
    for state in np.flatnonzero(np.bincount(handles.state)).tolist():
        shape = (int(states.parallelism[state]), int(states.max_parallelism[state]))
        if shape not in shapes:
            shapes[shape] = len(tables)
            tables.append(range_bounds(*shape))
        shape_of[state] = shapes[shape]
    sizes = np.array([len(table) for table in tables], dtype=np.int64)
    bounds = np.concatenate([*tables, np.zeros(1, dtype=np.int64)])
    bounds_start = before(sizes)[shape_of] if tables else shape_of
    # One search for all: each table of bounds, and its groups, is shifted above the one before it.
    lifted = bounds[:-1] + np.repeat(np.arange(len(tables)), sizes) * _LIFT
    lift, start = shape_of[handles.state] * _LIFT, bounds_start[handles.state]
    first = np.searchsorted(lifted, handles.first_group + lift, side="right") - 1 - start
    last = np.searchsorted(lifted, handles.last_group + lift, side="right") - 1 - start
    wrong = np.flatnonzero(last >= states.parallelism[handles.state])
    if len(wrong):
        row = int(wrong[0])
        ceiling = states.max_parallelism[handles.state[row]]
        what = f"has key group {handles.last_group[row]}, but the max parallelism of its operator is {ceiling}"
        raise damaged(int(handles.number[row]), what)
    return first, last, bounds, bounds_start


def _pieces(handles: Handles, chosen: Ints, owner: Ints, first: Ints, last: Ints) -> Slices:
    """Return slices of the groups ``first`` … ``last``, which cover the ``chosen`` handles."""
    shift = handles.group_start[chosen] - handles.first_group[chosen]
    first, last = first + shift, last + shift
    rows = handles.group_rows.sums(first, last + 1)
    opens = np.flatnonzero(run_starts(chosen))
    sums = before(rows)
    stated = np.diff(sums[np.append(opens, len(rows))])
    wrong = np.flatnonzero(stated != handles.rows)
    if len(wrong):
        row = int(wrong[0])
        raise damaged(int(handles.number[row]), f"has {handles.rows[row]} rows, but its groups have {stated[row]}")
    row_start = sums[:-1] + (handles.row_start - sums[opens])[chosen]
    full = rows > 0
    if not bool(full.all()):
        first, last, rows, row_start = first[full], last[full], rows[full], row_start[full]
        shift, chosen, owner = shift[full], chosen[full], owner[full]
    return Slices.part(
        handles,
        chosen,
        owner,
        row_start=row_start,
        rows=rows,
        first_group=_trim(handles.group_rows, first, 1) - shift,
        last_group=_trim(handles.group_rows, last, -1) - shift,
    )


def _trim(group_rows: GroupRows, end: Ints, step: int) -> Ints:
    """Move one end of each range inwards to the first group with rows; every range has one."""
    bare = np.flatnonzero(group_rows.at(end) == 0)
    if not len(bare):
        return end
    end = end.copy()
    # Most runs of empty groups are short, so walking is cheapest; a search ends the long ones.
    for _ in range(_WALK):
        end[bare] += step
        bare = bare[group_rows.at(end[bare]) == 0]
        if not len(bare):
            return end
    end[bare] = group_rows.held(end[bare], step)
    return end


# ---- in flight -----------------------------------------------------------------------------------
#
# In-flight records: what a barrier overtook on an edge, and what a loop had sent back.
#
# They belong to the receiver, under the state of their edge. By the edge's partitioner:
#
# - *hash*: they go to the owner of the key group, as keyed state does.
# - *rebalance*, and feedback edges that are forward or rescale: if the receiver's parallelism stays
#   the same and all its subtasks run, each keeps its own. Otherwise each old channel (sender to
#   receiver) is cut into chunks as even-split state is. The start moves on over the channels of an
#   operator: edges in byte order of their states' names, then receivers, then senders.
# - *broadcast*, allowed only for feedback edges: each keeps its own; another parallelism is
#   refused.
#
# No other edge may hold records (``rules`` refuses). On edges that are not hash edges
# groups are senders (SPEC.md section 4.3), so the manifest knows the length of every channel.
#
# After a rescale several handles may name parts of one channel's segment, and another restore may
# give a subtask a later part before an earlier one. :func:`in_segment_order` sorts them by their
# place in the segment, along which the rows of a channel ascend.


def distribute_in_flight(handles: Handles, states: States, *, by_key: Mask, stays: Mask) -> Slices:
    """Return slices of in-flight handles.

    ``by_key`` and ``stays`` say of each state whether it is distributed by key group or kept as it
    is. A slice may be part of a channel: then its groups are one sender, and it has fewer rows than
    that group.
    """
    keyed = by_key[handles.state]
    own = ~keyed & (states.settled | stays)[handles.state]
    kept = handles.where(own)
    return Slices.concat(
        [
            cut_keyed(handles.where(keyed), states),
            Slices.whole(kept, kept.subtask),
            _distribute_channels(handles.where(~keyed & ~own), states),
        ]
    )


def in_segment_order(slices: Slices, table: pa.Table) -> Slices:
    """Sort in-flight slices so that each subtask reads a segment, and so each channel, in order.

    ``table`` is the manifest. Segments are in the order in which they first appear in it.
    """
    if not len(slices):
        return slices
    low = int(slices.handle.min())
    handle = slices.handle - low
    named = np.bincount(handle)
    used, table = np.flatnonzero(named), table.slice(low, len(named))
    # Usually each handle is a whole segment that no other handle shares.
    if bool((table["rows"].to_numpy()[used] == table["segment_rows"].to_numpy()[used]).all()):
        return slices
    segments = pc.dictionary_encode(table["path"].take(pa.array(used)).combine_chunks())
    if len(segments.dictionary) == len(used):
        return slices
    segment = np.empty(table.num_rows, dtype=np.int64)
    segment[used] = segments.indices.to_numpy()
    return slices.take(np.lexsort((slices.row_start, segment[handle], slices.subtask, slices.state)))


def _distribute_channels(handles: Handles, states: States) -> Slices:
    handles = handles.where(handles.rows > 0)
    if not len(handles):
        return Slices.none()
    handle, nth = spread(handles.last_group - handles.first_group + 1)
    rows = handles.group_rows.at(handles.group_start[handle] + nth)
    # Where each channel begins in its handle: all channels are on one axis, handle after handle.
    offset = before(rows)[:-1]
    offset = offset - offset[np.searchsorted(handle, np.arange(len(handles)))][handle]
    sender, filled = handles.first_group[handle] + nth, rows > 0
    handle, sender, rows, offset = (column[filled] for column in (handle, sender, rows, offset))
    state = handles.state[handle]
    chunks = distribute_evenly(rows, states.operator[state], states.parallelism[state])
    chosen = handle[chunks.unit]
    return Slices.part(
        handles,
        chosen,
        chunks.subtask,
        row_start=handles.row_start[chosen] + offset[chunks.unit] + chunks.offset,
        rows=chunks.rows,
        first_group=sender[chunks.unit],
        last_group=sender[chunks.unit],
    )
