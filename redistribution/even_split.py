"""Even-split state: lists of entries, put together and cut into contiguous chunks.

If the parallelism stays the same and every subtask runs, each keeps its own entries. Otherwise, for
each state of an operator in byte order of names: the entries of all reporters, in subtask order,
are cut into *p* chunks, of which the first ``entries mod p`` are one longer. Chunks go to subtasks
start, start + 1, … modulo *p*. The start of an operator's first state is 0 and moves on by
``entries mod p`` from state to state, so the remainders of several short lists go to different
subtasks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stateformat.manifest import Ints, before, spread

from .tables import Handles, Slices, States, run_starts


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
