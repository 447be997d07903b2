"""Keyed state goes to the owners of its key groups.

Subtask *i* of *p* owns the key groups ⌈i·max/p⌉ … ⌈(i+1)·max/p⌉ − 1 (SPEC.md section 5.3). The rows of a handle are
sorted by key group and the manifest has the rows of each group, so what a new subtask gets of a handle is one range of
rows: a handle is cut, never copied. All layers of a state are cut alike; they stay apart, lowest first. Who owned a handle
before does not matter, so neither does it who has finished.

The same cut serves in-flight records on a hash edge, whose groups are key groups too.
"""

from __future__ import annotations

import numpy as np

from stateformat.keys import MAX_PARALLELISM_LIMIT, range_bounds

from .tables import GroupRows, Handles, Ints, Slices, States, before, damaged, spread

_LIFT = 2 * MAX_PARALLELISM_LIMIT
_WALK = 8


def cut_keyed(handles: Handles, states: States) -> Slices:
    """Each handle cut at the borders of the new subtasks' ranges; a part without rows is no slice.

    ``first_group`` and ``last_group`` of a slice are the first and last key group with rows in it, and its rows are
    those of whole key groups. The slices of a handle ascend by key group. Raises ``DamagedCheckpoint`` where the rows per
    group do not add up to the rows of their handle.
    """
    handles = handles.where(handles.rows > 0)
    owner_first, owner_last, bounds, bounds_start = _owners(handles, states)
    if not bool((owner_last > owner_first).any()):
        return Slices.part(handles, np.arange(len(handles)), subtask=owner_first)
    chosen, nth = spread(owner_last - owner_first + 1)
    owner = owner_first[chosen] + nth
    border = bounds_start[handles.state[chosen]] + owner
    first = np.maximum(handles.first_group[chosen], bounds[border])
    last = np.minimum(handles.last_group[chosen], bounds[border + 1] - 1)
    return _pieces(handles, chosen, owner, first, last)


def _owners(handles: Handles, states: States) -> tuple[Ints, Ints, Ints, Ints]:
    """The new owners of each handle's first and last group; all range bounds in a row; where those of a state begin."""
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
    # One search for all: each table of bounds is lifted above the one before it, and every group with it.
    lifted = bounds[:-1] + np.repeat(np.arange(len(tables)), sizes) * _LIFT
    lift, start = shape_of[handles.state] * _LIFT, bounds_start[handles.state]
    first = np.searchsorted(lifted, handles.first_group + lift, side="right") - 1 - start
    last = np.searchsorted(lifted, handles.last_group + lift, side="right") - 1 - start
    wrong = np.flatnonzero(last >= states.parallelism[handles.state])
    if len(wrong):
        row = int(wrong[0])
        raise damaged(
            int(handles.number[row]),
            f"has key group {handles.last_group[row]}, but the max parallelism of its operator is "
            f"{states.max_parallelism[handles.state[row]]}",
        )
    return first, last, bounds, bounds_start


def _pieces(handles: Handles, chosen: Ints, owner: Ints, first: Ints, last: Ints) -> Slices:
    """Slices of the groups ``first`` … ``last`` of the ``chosen`` handles, trimmed to groups with rows.

    The pieces of a handle are next to each other and tile it.
    """
    shift = handles.group_start[chosen] - handles.first_group[chosen]
    first, last = first + shift, last + shift
    rows = handles.group_rows.sums(first, last + 1)
    opens = np.flatnonzero(np.append(True, chosen[1:] != chosen[:-1]))
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
        subtask=0,
        row_start=row_start,
        rows=rows,
        first_group=_trim(handles.group_rows, first, 1) - shift,
        last_group=_trim(handles.group_rows, last, -1) - shift,
    ).to(owner)


def _trim(group_rows: GroupRows, end: Ints, step: int) -> Ints:
    """One end of each range, moved inwards to the first group with rows; every range has one."""
    bare = np.flatnonzero(group_rows.at(end) == 0)
    if not len(bare):
        return end
    end = end.copy()
    # Most empty stretches are short and walking is cheapest; a search through all groups ends the long ones.
    for _ in range(_WALK):
        end[bare] += step
        bare = bare[group_rows.at(end[bare]) == 0]
        if not len(bare):
            return end
    end[bare] = group_rows.held(end[bare], step)
    return end
