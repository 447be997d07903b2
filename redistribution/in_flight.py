"""In-flight records: what a barrier overtook on an edge, and what a loop had sent back.

They belong to the receiver, under the state of their edge. By the edge's partitioner:

- *hash*: they go to the owner of the key group, as keyed state does.
- *rebalance*, and feedback edges that are forward or rescale: if the receiver's parallelism stays
  the same and all its subtasks run, each keeps its own. Otherwise each old channel (sender to
  receiver) is cut into chunks as even-split state is. The start moves on over the channels of an
  operator: edges in byte order of their states' names, then receivers, then senders.
- *broadcast*, allowed only for feedback edges: each keeps its own; another parallelism is refused.

No other edge may hold records (``compatibility`` refuses). On edges that are not hash edges groups
are senders (SPEC.md section 4.3), so the manifest knows the length of every channel.

After a rescale several handles may name parts of one channel's segment, and another restore may
give a subtask a later part before an earlier one. :func:`in_segment_order` sorts them by their
place in the segment, along which the rows of a channel ascend.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.manifest import Mask, before, spread

from .even_split import distribute_evenly
from .keyed import cut_keyed
from .tables import Handles, Slices, States


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
