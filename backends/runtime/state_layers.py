"""In which layers the keyed states of each subtask lie: a base, and deltas on it (SPEC.md section 5.4).

A snapshot names what was written: whole segments, or a delta on what stays underneath. :func:`merge_snapshot` adds the handles of
the layers below, so a snapshot names everything that it consists of. Each layer has the *version* of the state that wrote it
(``SubtaskStates.begin``); layers of the checkpoint that a run was restored from have none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from stateformat.model import Handle
from stateformat.reading import ReadTask
from stateformat.snapshot import ON_TOP, Snapshot
from stateformat.states import Layer

from ..dataflow.events import TaskId
from .restore import Restored

Versions = Mapping[str, tuple[int | None, ...]]
"""By keyed state: the versions of its layers, lowest first."""


class OperatorState(NamedTuple):
    """What one operator has in one subtask. ``tasks``: how to read each state, after a restore; else the snapshot says it."""

    snapshot: Snapshot
    versions: Versions
    tasks: Mapping[str, ReadTask] | None = None


def layers_of(part: OperatorState) -> Mapping[str, Sequence[Layer]]:
    """The layers of the keyed states of a part by state, lowest first."""
    return {
        state: [
            Layer(version, sum(handle.rows for handle in some), sum(_share(handle) for handle in some))
            for version, some in zip(part.versions[state], by_layer(part.snapshot, state), strict=True)
        ]
        for state in part.versions
    }


def _share(handle: Handle) -> int:
    return handle.size_bytes * handle.rows // handle.segment_rows if handle.segment_rows else 0


def by_layer(snapshot: Snapshot, state: str) -> list[list[Handle]]:
    """The handles of a state, layer by layer, lowest first."""
    mine = sorted((handle for handle in snapshot.handles if handle.state == state), key=lambda handle: handle.layer)
    return [list(some) for _, some in groupby(mine, key=lambda handle: handle.layer)]


def merge_snapshot(
    snapshot: Snapshot, kept: Mapping[str, int], before: OperatorState | None, version: int
) -> OperatorState:
    """A snapshot as a task has reported it, with what stays underneath its layers named; and the versions of all layers.

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
    full = Snapshot(snapshot.operator, snapshot.subtask, (*underneath, *own), (), snapshot.finishing)
    return OperatorState(full, versions)


def restored_states(restored: Restored) -> Iterator[tuple[TaskId, Mapping[str, OperatorState]]]:
    """What each task of a run begins from, by operator: the slices of a restore plan. Nothing on a first run."""
    if restored.permit is None or restored.plan is None:
        return
    carried: dict[tuple[str, int], list[Handle]] = defaultdict(list)
    for row in restored.permit.checkpoint().carried(restored.plan).to_pylist():
        carried[row["operator"], row["subtask"]].append(Handle(**row))
    for vertex in restored.job.vertices:
        for subtask in () if vertex.id in restored.finished else range(vertex.parallelism):
            parts = {}
            for uid, tasks in (restored.states(vertex, subtask) or {}).items():
                handles = sorted(carried[uid, subtask], key=lambda handle: (handle.state, handle.layer))
                snapshot = Snapshot(uid, subtask, tuple(handles))
                states = {handle.state for handle in handles}
                versions = {state: (None,) * len(by_layer(snapshot, state)) for state in states}
                parts[uid] = OperatorState(snapshot, versions, tasks)
            yield TaskId(vertex.id, subtask), parts


__all__ = ["OperatorState", "Versions", "by_layer", "layers_of", "merge_snapshot", "restored_states"]
