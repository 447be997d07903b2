"""Broadcast state: every new subtask gets exactly one copy. Never none, never two merged.

All copies are equal where nothing went wrong. New subtask *i* gets its own where old subtask *i* reported one; otherwise
that of the running reporter number *i* mod *k* of *k*. An empty copy is a copy. (Flink reads two copies into one map where some subtasks have finished, and
never looks whether its own is there where the parallelism has changed.)
"""

from __future__ import annotations

import numpy as np

from .tables import Handles, Slices, States, spread


def copy_broadcast(handles: Handles, states: States) -> Slices:
    """For each new subtask all handles of one reporter, whole.

    ``handles`` include those without rows, which say that their subtask reported. Handles of one reporter of one state
    stand together and are one copy.
    """
    if not len(handles):
        return Slices.none()
    opens = np.append(True, (handles.state[1:] != handles.state[:-1]) | (handles.subtask[1:] != handles.subtask[:-1]))
    first = np.flatnonzero(opens)
    held = np.diff(np.append(first, len(handles)))
    state, subtask = handles.state[first], handles.subtask[first]
    reporters = np.bincount(state, minlength=len(states.operator))
    first_reporter = np.cumsum(reporters) - reporters

    # Every pair of a state with reporters and a new subtask of it, and the reporter from whom it gets its copy.
    target_state, target = spread(np.where(reporters > 0, states.parallelism, 0))
    widest = int(max(subtask.max(), target.max(initial=0))) + 1
    reporter_key, target_key = state * widest + subtask, target_state * widest + target
    own = np.minimum(np.searchsorted(reporter_key, target_key), len(reporter_key) - 1)
    other = first_reporter[target_state] + target % np.maximum(reporters[target_state], 1)
    source = np.where(reporter_key[own] == target_key, own, other)

    copy, nth = spread(held[source])
    chosen = first[source[copy]] + nth
    filled = handles.rows[chosen] > 0
    return Slices.part(handles, chosen[filled], subtask=0).to(target[copy][filled])
