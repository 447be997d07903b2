"""What an epoch begins from: where the states of every task lie after the epoch before, published or not.

Theory of operation. The report of a task names what it has written: whole segments, and for keyed states *layers* on top of what
stays underneath. ``state_layers.merge_snapshot`` puts the two together, so a snapshot names everything that it consists of, and the base of the
next epoch follows from the reports alone; no manifest is read. Each layer has the *version* of the epoch that wrote it. A worker
that holds the state of version v needs only the layers above v; where the lowest layer is younger than v, the state was written
whole since, and is read whole.

The first epoch of a run begins from a checkpoint, of which a restore plan says what each task gets; layers are older than any
version then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow.compute as pc

from backends.dataflow.events import TaskId
from backends.dataflow.member import ReportedProgress
from backends.running.restore import Restored
from backends.running.state_layers import OperatorState, by_layer, layers_of, restored_states
from backends.state import Layer
from stateformat.checkpoint import ReadTask, whole_slices
from stateformat.manifest import handles_table
from stateformat.model import (
    CheckpointKind,
    Handle,
    JobGraph,
    ManifestRef,
    Mode,
    Record,
    Totals,
)
from stateformat.snapshot import WriteContext


@dataclass(frozen=True)
class Base:
    """What a task begins an epoch from, by operator. Picklable.

    ``reported``: the progress of inputs that its operators wrote last in this run. ``taken``: the barrier of the snapshot, 0 for
    none; ``taken_id``: the id of its checkpoint. ``replays``: whether its in-flight records are to be processed first. ``travelling``: operators that go on as they were
    (``travelling.py``).
    """

    parts: Mapping[str, OperatorState] = field(default_factory=dict)
    reported: Mapping[str, ReportedProgress] = field(default_factory=dict)
    taken: int = 0
    taken_id: int = 0
    replays: bool = False
    travelling: Mapping[str, bytes] = field(default_factory=dict)

    def layers(self, uid: str) -> Mapping[str, Sequence[Layer]]:
        """The layers of the keyed states of an operator, lowest first."""
        part = self.parts.get(uid)
        if part is None:
            return {}
        return layers_of(part)

    def tasks(self, context: WriteContext, uid: str, *, above: int | None = None) -> Mapping[str, ReadTask]:
        """How to read the states of an operator; with ``above``, of keyed states only the layers of later versions."""
        part = self.parts.get(uid)
        if part is None:
            return {}
        if part.tasks is not None:
            return part.tasks
        found: dict[str, list[Handle]] = {}
        for handle in part.snapshot.handles:
            found.setdefault(handle.state, []).append(handle)
        if above is not None:
            for name, versions in part.versions.items():
                layers = by_layer(part.snapshot, name)
                late = [some for some, version in zip(layers, versions, strict=True) if _after(version, above)]
                found[name] = [handle for some in late for handle in some]
        return _Tasks(context, uid, found)

    def may_catch_up(self, version: int) -> bool:
        """Whether a state of this version becomes the present one by layers on top: none was written whole since."""
        return all(
            not versions or not _after(versions[0], version)
            for part in self.parts.values()
            for versions in part.versions.values()
        )


class _Tasks(Mapping[str, ReadTask]):
    """How to read the states of an operator that were written in this run. Each task is made when it is asked for: few are."""

    def __init__(self, context: WriteContext, uid: str, handles: Mapping[str, Sequence[Handle]]) -> None:
        self._context, self._uid, self._handles = context, uid, handles
        self._names = [
            state.name
            for state in context.states
            if state.operator == uid and state.mode not in (Mode.COMMITTABLES, Mode.COORDINATOR)
        ]

    def __getitem__(self, name: str) -> ReadTask:
        if name not in self._names:
            raise KeyError(name)
        return read_task(self._context, self._uid, name, self._handles.get(name, ()))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _after(version: int | None, other: int) -> bool:
    return version is not None and version > other


_NO_MANIFEST: Final = ManifestRef("", 0, "", 0)


def read_task(context: WriteContext, uid: str, name: str, handles: Sequence[Handle]) -> ReadTask:
    """A task to read what was written in this run, though no published checkpoint may name it yet."""
    state = next(item for item in context.states if (item.operator, item.name) == (uid, name))
    record = Record(
        checkpoint_id=context.checkpoint_id,
        attempt_id=context.attempt_id,
        kind=CheckpointKind.CHECKPOINT,
        job_id=context.job_id,
        graph=JobGraph((context.graph.operator(uid),)),
        states=(state,),
        manifest=_NO_MANIFEST,
        totals=Totals(),
        created_at_us=0,
    )
    table = handles_table(handles)
    return ReadTask(
        context.storage, record, table, whole_slices(table, pc.indices_nonzero(pc.greater(table["rows"], 0)))
    )


def restored_bases(restored: Restored) -> Mapping[TaskId, Base]:
    """What each task of a run begins from: the slices of a restore plan. Empty on a first run."""
    return {
        task: Base(parts, replays=bool(restored.in_flight(restored.job.vertex(task.vertex), task.subtask)))
        for task, parts in restored_states(restored)
    }


__all__ = ["Base", "read_task", "restored_bases"]
