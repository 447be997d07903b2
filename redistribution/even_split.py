"""Even-split state: a list of entries per subtask, put together and dealt out in contiguous chunks.

Where the parallelism stays and nobody is finished or finishing, everyone keeps its own. Otherwise, for each state of an
operator in byte order of names: the entries of the reporting subtasks, in subtask order, are cut into *p* contiguous
chunks, of which the first ``entries mod p`` are one longer. Chunks go to subtasks start, start + 1, … modulo *p*. The start
of an operator's first state is 0; it moves on by ``entries mod p`` from state to state, and that is what evens out the
remainders of several short lists. (Flink's repartitioner deals likewise, but takes the names in the order of a hash map,
and never deals again at unchanged parallelism.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .tables import Handles, Ints, Slices, States, before, spread


@dataclass(frozen=True, slots=True)
class Chunks:
    """Contiguous parts of units: entries ``offset`` … ``offset + rows - 1`` of ``unit`` go to ``subtask``.

    Only chunks with entries, sorted by (unit, offset).
    """

    unit: Ints
    offset: Ints
    rows: Ints
    subtask: Ints


def deal(rows: Ints, sharer: Ints, parallelism: Ints) -> Chunks:
    """Units of ``rows`` entries cut into ``parallelism`` chunks each, the longer first, with a running start.

    Units with equal ``sharer`` stand together and have one parallelism; the start runs on from one to the next.
    """
    base, longer = rows // parallelism, rows % parallelism
    passed = before(longer)[:-1]
    opens = np.ones(len(rows), dtype=np.bool_)
    opens[1:] = sharer[1:] != sharer[:-1]
    since = passed[np.maximum.accumulate(np.where(opens, np.arange(len(rows)), 0))] if len(rows) else passed
    start = (passed - since) % parallelism
    unit, nth = spread(np.minimum(rows, parallelism))
    return Chunks(
        unit=unit,
        offset=nth * base[unit] + np.minimum(nth, longer[unit]),
        rows=base[unit] + (nth < longer[unit]),
        subtask=(start[unit] + nth) % parallelism[unit],
    )


def split_evenly(handles: Handles, states: States) -> Slices:
    """Own entries for states that are settled, chunks for the others, in the order of the entries."""
    handles = handles.where(handles.rows > 0)
    settled = states.settled[handles.state]
    own = handles.where(settled)
    return Slices.concat([Slices.whole(own, own.subtask), _split(handles.where(~settled), states)])


def _split(handles: Handles, states: States) -> Slices:
    if not len(handles):
        return Slices.none()
    # All entries of all states lie on one axis, in manifest order; handles and chunks both tile it.
    handle_start = before(handles.rows)[:-1]
    first = np.flatnonzero(np.append(True, handles.state[1:] != handles.state[:-1]))
    state = handles.state[first]
    totals = np.add.reduceat(handles.rows, first)
    chunks = deal(totals, states.operator[state], states.parallelism[state])
    chunk_start = handle_start[first][chunks.unit] + chunks.offset
    # Both are ascending, and a stable sort merges two runs.
    start = np.sort(np.concatenate([handle_start, chunk_start]), kind="stable")
    start = start[np.append(True, start[1:] != start[:-1])]
    handle = np.searchsorted(handle_start, start, side="right") - 1
    chunk = np.searchsorted(chunk_start, start, side="right") - 1
    part = Slices.part(
        handles,
        handle,
        subtask=0,
        row_start=handles.row_start[handle] + start - handle_start[handle],
        rows=np.diff(np.append(start, handle_start[-1] + handles.rows[-1])),
    )
    return part.to(chunks.subtask[chunk])
