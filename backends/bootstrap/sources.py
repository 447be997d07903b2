"""The states of a source that begins behind a position: its splits, and its enumerator."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from stateformat.model import State
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.states import coordinator_state, even_split_state

from ..dataflow.api import StartingPoint
from ..dataflow.graph import ENUMERATOR, SPLITS, SPLITS_SCHEMA


def source_states(uid: str, start: StartingPoint) -> tuple[State, State]:
    """Return the states of a source: the splits of its readers, and its enumerator's."""
    return (
        even_split_state(uid, SPLITS, columns=SPLITS_SCHEMA),
        coordinator_state(uid, ENUMERATOR, columns=start.enumerator.schema),
    )


def source_snapshots(context: WriteContext, uid: str, start: StartingPoint) -> Iterator[Snapshot]:
    """Write the states of a source; yield the snapshots of its coordinator and each reader."""
    with context.coordinator(uid) as coordinator:
        coordinator.write(ENUMERATOR, start.enumerator)
    yield coordinator.snapshot()
    parallelism = context.graph.operator(uid).parallelism
    for subtask in range(parallelism):
        mine = start.splits[subtask::parallelism]
        rows = {
            "split_id": [split.id for split in mine],
            "payload": [split.payload for split in mine],
            "position": [split.position for split in mine],
            "watermark": [None] * len(mine),
        }
        with context.subtask(uid, subtask) as reader:
            reader.write(SPLITS, pa.table(rows, schema=SPLITS_SCHEMA))
        yield reader.snapshot()
