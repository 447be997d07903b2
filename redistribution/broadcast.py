"""Broadcast state: every new subtask gets exactly one copy, and all copies are equal.

New subtask *i* gets its own copy if old subtask *i* reported one, otherwise that of the running
reporter number *i* mod *k* of *k*. An empty copy is a copy.
"""

from __future__ import annotations

import numpy as np

from stateformat.manifest import spread

from .tables import Handles, Slices, States, run_starts


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
