"""What a task begins an epoch from: where the epoch before left its states, published or not.

A snapshot names everything that it consists of (``state_layers.merge_snapshot``), so the next
restore point follows from the reports alone; no manifest is read. Each layer of keyed state has the
*version* of the epoch that wrote it; the layers of a restored checkpoint have none. A worker that
has the state of version v reads only the layers above v. If even the lowest layer is above v, the
worker cannot catch up and reads them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow.compute as pc

from stateformat import model
from stateformat.manifest import handles_table
from stateformat.reading import ReadTask, whole_slices
from stateformat.snapshot import WriteContext
from stateformat.states import Layer

from ...dataflow import events as ev
from ...dataflow.chained_operator import ReportedProgress
from ...runtime import OperatorState, Restored, by_layer, layers_of, restored_states


@dataclass(frozen=True)
class RestorePoint:
    """What a task begins an epoch from. Picklable."""

    operators: Mapping[str, OperatorState] = field(default_factory=dict)
    """By uid."""
    reported: Mapping[str, ReportedProgress] = field(default_factory=dict)
    """By uid, the progress of its inputs that the operator last wrote in this run."""
    barrier: int = 0
    """The barrier of the snapshot; 0 if no barrier asked for it."""
    checkpoint_id: int = 0
    replays: bool = False
    """Whether the snapshot has in-flight records, which the task processes first."""
    pickled: Mapping[str, bytes] = field(default_factory=dict)
    """By uid, the pickled operators that continue (``operator_pickling``)."""

    def layers(self, uid: str) -> Mapping[str, Sequence[Layer]]:
        """Return the layers of the keyed states of an operator, lowest first."""
        return layers_of(self.operators[uid]) if uid in self.operators else {}

    def read_tasks(self, context: WriteContext, uid: str, *, above: int | None = None) -> Mapping[str, ReadTask]:
        """Return how to read an operator's states; of keyed ones, only versions above ``above``."""
        operator = self.operators.get(uid)
        if operator is None:
            return {}
        if operator.tasks is not None:
            return operator.tasks
        handles: dict[str, list[model.Handle]] = defaultdict(list)
        for handle in operator.snapshot.handles:
            handles[handle.state].append(handle)
        if above is not None:
            for name, versions in operator.versions.items():
                layers = zip(by_layer(operator.snapshot, name), versions, strict=True)
                handles[name] = [handle for layer, version in layers if _is_after(version, above) for handle in layer]
        return _ReadTasks(context, uid, handles, dict(operator.snapshot.times))

    @property
    def has_layers(self) -> bool:
        """Whether there is keyed state."""
        return any(any(operator.versions.values()) for operator in self.operators.values())

    def can_catch_up(self, version: int) -> bool:
        """Return whether the layers after this version turn each of its states into the current."""
        return all(
            not versions or not _is_after(versions[0], version)
            for operator in self.operators.values()
            for versions in operator.versions.values()
        )


class _ReadTasks(Mapping[str, ReadTask]):
    """By state, how to read what an operator wrote in this run. Tasks are made on request."""

    def __init__(
        self,
        context: WriteContext,
        uid: str,
        handles: Mapping[str, Sequence[model.Handle]],
        times: Mapping[str, int],
    ) -> None:
        self._context, self._uid, self._handles, self._times = context, uid, handles, times
        others = (model.Mode.COMMITTABLES, model.Mode.COORDINATOR)
        self._names = [state.name for state in context.states if state.operator == uid and state.mode not in others]

    def __getitem__(self, name: str) -> ReadTask:
        if name not in self._names:
            raise KeyError(name)
        return read_task(self._context, self._uid, name, self._handles.get(name, ()), self._times.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _is_after(version: int | None, other: int) -> bool:
    return version is not None and version > other


_NO_MANIFEST: Final = model.ManifestRef("", 0, "", 0)


def read_task(
    context: WriteContext, uid: str, name: str, handles: Sequence[model.Handle], ttl_now_us: int | None = None
) -> ReadTask:
    """Return a task that reads what was written in this run, published or not.

    ``ttl_now_us``: the time of the clock by which rows of the state expire, when it was written.
    """
    state = next(item for item in context.states if (item.operator, item.name) == (uid, name))
    state = replace(state, ttl_now_us=ttl_now_us)
    record = model.Record(
        checkpoint_id=context.checkpoint_id,
        attempt_id=context.attempt_id,
        kind=model.CheckpointKind.CHECKPOINT,
        job_id=context.job_id,
        graph=model.JobGraph((context.graph.operator(uid),)),
        states=(state,),
        manifest=_NO_MANIFEST,
        totals=model.Totals(),
        created_at_us=0,
    )
    table = handles_table(handles)
    table = table.filter(pc.greater(table["rows"], 0))
    return ReadTask(context.storage, record, table, whole_slices(table))


def restore_points(restored: Restored) -> Mapping[ev.TaskId, RestorePoint]:
    """Return what each task of a run begins from, given its restore. Empty on a first run."""
    return {
        task: RestorePoint(parts, replays=bool(restored.in_flight(restored.job.vertex(task.vertex), task.subtask)))
        for task, parts in restored_states(restored)
    }
