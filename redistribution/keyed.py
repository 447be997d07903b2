"""Keyed state goes to the owners of its key groups.

Subtask *i* of *p* owns the key groups ⌈i·max/p⌉ … ⌈(i+1)·max/p⌉ − 1 (SPEC.md section 5.3). The rows
of a handle are sorted by key group, so a new subtask gets one range of its rows. All layers of a
state are cut alike and stay apart. In-flight records on a hash edge are cut in the same way.
"""

from __future__ import annotations

import numpy as np

from stateformat.keys import MAX_PARALLELISM_LIMIT, range_bounds
from stateformat.manifest import Ints, before, spread

from .tables import GroupRows, Handles, Slices, States, damaged, run_starts

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
