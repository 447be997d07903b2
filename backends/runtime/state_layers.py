"""The layers of the keyed states of each subtask: a base, and deltas on it (SPEC.md section 5.4).

The snapshot of a task names what was written: whole segments, or a delta on layers that stay.
:func:`merge_snapshot` adds the handles of these layers, so it names everything. Each layer has the
*version* of the state that wrote it; layers of the restored checkpoint have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from stateformat.model import ON_TOP, Handle
from stateformat.reading import ReadTask
from stateformat.snapshot import Snapshot
from stateformat.states import Layer

from ..dataflow.events import TaskId
from .restore import Restored

Versions = Mapping[str, tuple[int | None, ...]]
"""The versions of the layers of each keyed state, lowest first."""


class OperatorState(NamedTuple):
    """The state of one operator in one subtask."""

    snapshot: Snapshot
    versions: Versions
    tasks: Mapping[str, ReadTask] | None = None
    """How to read each state after a restore; None: as the snapshot says."""


def layers_of(state: OperatorState) -> Mapping[str, Sequence[Layer]]:
    """Return the layers of each keyed state, lowest first."""
    return {
        name: [
            Layer(version, sum(handle.rows for handle in some), sum(_share(handle) for handle in some))
            for version, some in zip(versions, by_layer(state.snapshot, name), strict=True)
        ]
        for name, versions in state.versions.items()
    }


def _share(handle: Handle) -> int:
    return handle.size_bytes * handle.rows // handle.segment_rows if handle.segment_rows else 0


def by_layer(snapshot: Snapshot, state: str) -> list[list[Handle]]:
    """Return the handles of a state, layer by layer, lowest first."""
    mine = sorted((handle for handle in snapshot.handles if handle.state == state), key=lambda handle: handle.layer)
    return [list(some) for _, some in groupby(mine, key=lambda handle: handle.layer)]


def merge_snapshot(
    snapshot: Snapshot, kept: Mapping[str, int], before: OperatorState | None, version: int
) -> OperatorState:
    """The reported snapshot of a task, with the handles of the layers that stay, and all versions.

    ``kept``: by keyed state, how many of the lowest layers stay (``SubtaskStates.snapshot``).
    """
    underneath: list[Handle] = []
    versions: dict[str, tuple[int | None, ...]] = {}
    own: list[Handle] = []
    by_state: dict[str, list[Handle]] = {name: [] for name in kept}
    for handle in snapshot.handles:
        if handle.state in by_state:
            by_state[handle.state].append(handle)
        else:
            own.append(handle)
    for state, count in kept.items():
        lower = by_layer(before.snapshot, state)[:count] if before is not None and count else []
        underneath += [handle for some in lower for handle in some]
        top = lower[-1][0].layer + 1 if lower else 0
        written = [handle._replace(layer=top) if handle.layer == ON_TOP else handle for handle in by_state[state]]
        own += written
        below = before.versions[state][:count] if before is not None and count else ()
        versions[state] = (*below, version) if written else below
    full = Snapshot(snapshot.operator, snapshot.subtask, (*underneath, *own), (), snapshot.finishing, snapshot.times)
    return OperatorState(full, versions)


def restored_states(restored: Restored) -> Iterator[tuple[TaskId, Mapping[str, OperatorState]]]:
    """Yield what each task of a run starts from, by operator; nothing on a first run."""
    if restored.permit is None or restored.plan is None:
        return
    carried: dict[tuple[str, int], list[Handle]] = defaultdict(list)
    for row in restored.permit.checkpoint().carried(restored.plan).to_pylist():
        carried[row["operator"], row["subtask"]].append(Handle(**row))
    for vertex in restored.job.vertices:
        for subtask in () if vertex.id in restored.finished else range(vertex.parallelism):
            states = {}
            for uid, tasks in restored.states(vertex, subtask).items():
                handles = sorted(carried[uid, subtask], key=lambda handle: (handle.state, handle.layer))
                snapshot = Snapshot(uid, subtask, tuple(handles))
                names = {handle.state for handle in handles}
                versions = {name: (None,) * len(by_layer(snapshot, name)) for name in names}
                states[uid] = OperatorState(snapshot, versions, tasks)
            yield TaskId(vertex.id, subtask), states
