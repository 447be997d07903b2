"""In-flight records: what a barrier overtook on an edge, and what a loop had sent back.

They belong to the receiver, under the state of their edge. By the edge's partitioner:

- *hash*: to the owner of the key group, as keyed state; a key's records stay together and in order.
- *rebalance*, and feedback edges that are forward or rescale: where the receiver's parallelism stays and nobody of it is
  finished or finishing, everyone keeps its own. Otherwise each old channel (sender *s* to receiver *r*) is cut into
  contiguous chunks, as even as possible, longer first, dealt as even-split state with a start that runs on over the channels of an
  operator: edges in byte order of their states' names, receivers in order, then senders. Any receiver may get any record
  of such an edge; each gets its part of a channel in the order in which it was sent.
- *broadcast*, which only a feedback edge may be: everyone keeps its own, and another parallelism is refused.

After a rescale several handles, also of several subtasks, name parts of one channel's segment, and dealing those again may give a
subtask a later part before an earlier one. :func:`in_segment_order` puts that right. The rows of a channel ascend along its
segment (SPEC.md section 5.2), so the place in the segment is all that has to be known.

No other edge may hold records (compatibility refuses). Groups on edges that are not hash edges are senders (SPEC.md section
4.3), so the manifest knows the length of every channel and no record has to be read to deal it out.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .even_split import deal
from .keyed import cut_keyed
from .tables import Flags, Handles, Slices, States, before, spread


def deal_in_flight(handles: Handles, states: States, *, by_key: Flags, stays: Flags) -> Slices:
    """Slices of in-flight handles; ``by_key`` and ``stays`` say per state whether it is dealt by key or not dealt at all.

    A slice that is no hash edge's may be a part of a channel. Its ``first_group`` and ``last_group`` are then both that
    sender, and its rows are fewer than the sender's rows in the handle: the one case of a slice with groups that does not
    hold whole groups.
    """
    keyed = by_key[handles.state]
    own = ~keyed & (states.settled | stays)[handles.state]
    kept = handles.where(own)
    return Slices.concat(
        [
            cut_keyed(handles.where(keyed), states),
            Slices.whole(kept, kept.subtask),
            _deal_channels(handles.where(~keyed & ~own), states),
        ]
    )


def in_segment_order(slices: Slices, table: pa.Table) -> Slices:
    """In-flight slices such that what a subtask reads of one segment ascends: each channel in the order in which it was sent.

    ``table`` is the manifest. Segments follow each other as they first stand in it. Slices of handles that share no segment
    are returned as they are.
    """
    if not len(slices):
        return slices
    low = int(slices.handle.min())
    handle = slices.handle - low
    named = np.bincount(handle)
    used, table = np.flatnonzero(named), table.slice(low, len(named))
    # Who has a whole segment shares it with nobody: the usual case, in which no path is looked at.
    if bool((table["rows"].to_numpy()[used] == table["segment_rows"].to_numpy()[used]).all()):
        return slices
    segments = pc.dictionary_encode(table["path"].take(pa.array(used)).combine_chunks())
    if len(segments.dictionary) == len(used):
        return slices
    segment = np.empty(table.num_rows, dtype=np.int64)
    segment[used] = segments.indices.to_numpy()
    return slices.take(np.lexsort((slices.row_start, segment[handle], slices.subtask, slices.state)))


def _deal_channels(handles: Handles, states: States) -> Slices:
    handles = handles.where(handles.rows > 0)
    if not len(handles):
        return Slices.none()
    handle, nth = spread(handles.last_group - handles.first_group + 1)
    rows = handles.group_rows.at(handles.group_start[handle] + nth)
    # Where each channel begins in its handle: all channels lie on one axis, handle after handle.
    offset = before(rows)[:-1]
    offset = offset - offset[np.searchsorted(handle, np.arange(len(handles)))][handle]
    filled = rows > 0
    handle, sender, rows, offset = (
        handle[filled],
        (handles.first_group[handle] + nth)[filled],
        rows[filled],
        offset[filled],
    )
    state = handles.state[handle]
    chunks = deal(rows, states.operator[state], states.parallelism[state])
    chosen = handle[chunks.unit]
    return Slices.part(
        handles,
        chosen,
        subtask=0,
        row_start=handles.row_start[chosen] + offset[chunks.unit] + chunks.offset,
        rows=chunks.rows,
        first_group=sender[chunks.unit],
        last_group=sender[chunks.unit],
    ).to(chunks.subtask)
