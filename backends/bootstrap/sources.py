"""The states of a source that begins behind a position: its splits, and its enumerator."""

from __future__ import annotations

from collections.abc import Iterator

from stateformat.model import State
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.states import coordinator_state, even_split_state
from stateformat.tables import table_from_python

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
        rows = ({"split_id": split.id, "payload": split.payload, "position": split.position} for split in mine)
        with context.subtask(uid, subtask) as reader:
            reader.write(SPLITS, table_from_python(rows, SPLITS_SCHEMA, f"the splits of {uid!r}"))
        yield reader.snapshot()
