"""The plan of a checkpoint: which tasks it triggers, waits for, and takes as finished.

A barrier enters the job at its *roots*: running tasks none of whose predecessors runs, feedback
edges aside. At first these are the sources. When sources have finished, tasks behind them become
roots (FLIP-147). A plan never changes: a task that ends later makes the checkpoint fail.

Planning is linear in tasks, so a million subtasks take milliseconds. Sets of tasks are boolean
arrays, one per vertex. Of an ALL_TO_ALL edge it asks only whether any upstream task runs, never the
n x m pairs; of a POINTWISE edge it looks at ranges of upstream tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .elements import TaskId

if TYPE_CHECKING:
    from ..graph import Job

Mask: TypeAlias = npt.NDArray[np.bool_]
"""One boolean per subtask of a vertex."""


class TaskSet(Set[TaskId]):
    """An immutable set of tasks, equal to any set of the same tasks.

    Iterates vertex by vertex, subtasks ascending. ``in`` takes constant time.
    """

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        """Take the arrays over, by vertex; they become read-only."""
        for mask in masks.values():
            mask.setflags(write=False)
        self.masks: Mapping[str, Mask] = masks

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return frozenset(it)

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, TaskId):
            return False
        mask = self.masks.get(task.vertex)
        return mask is not None and 0 <= task.subtask < len(mask) and bool(mask[task.subtask])

    def __iter__(self) -> Iterator[TaskId]:
        for vertex, mask in self.masks.items():
            yield from map(TaskId, repeat(vertex), np.flatnonzero(mask).tolist())

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
        return sum(int(np.count_nonzero(mask)) for mask in self.masks.values())

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"TaskSet({{{', '.join(map(str, self))}}})" if len(self) <= 20 else f"TaskSet({len(self)} tasks)"


@dataclass(frozen=True)
class CheckpointPlan:
    """Who does what in one checkpoint. Every task is in ``wait`` or in ``finished``."""

    trigger: TaskSet
    """The roots, which are triggered directly."""
    wait: TaskSet
    """Tasks that run. Each acknowledges, and hears how the checkpoint ends."""
    finished: TaskSet
    """Tasks that have ended. They contribute nothing."""
    fully_finished: frozenset[str]
    """Vertices of which no task runs."""


def make_plan(job: Job, running: Mapping[str, Mask]) -> CheckpointPlan:
    """The plan of a checkpoint that begins now. ``running`` has an array for every vertex.

    The edges of a vertex of which nothing runs are ignored: a fully finished operator keeps its old
    parallelism, which need not fit its neighbors.
    """
    vertex_of = {uid: vertex.id for vertex in job.vertices for uid in vertex.operators}
    any_runs = {vertex.id: bool(running[vertex.id].any()) for vertex in job.vertices}
    trigger: dict[str, Mask] = {}
    for vertex in job.vertices:
        roots = running[vertex.id].copy()
        if any_runs[vertex.id]:
            upstream = [(edge, vertex_of[edge.source]) for edge in vertex.inputs]
            alive = [(edge, source) for edge, source in upstream if any_runs[source]]
            if any(edge.partitioner.all_to_all for edge, _ in alive):
                roots[:] = False
            else:
                for _, source in alive:
                    roots &= ~_fed_by_running(running[source], vertex.parallelism)
        trigger[vertex.id] = roots
    return CheckpointPlan(
        TaskSet(trigger),
        TaskSet({vertex.id: running[vertex.id].copy() for vertex in job.vertices}),
        TaskSet({vertex.id: ~running[vertex.id] for vertex in job.vertices}),
        frozenset(vertex for vertex, runs in any_runs.items() if not runs),
    )


def _fed_by_running(upstream: Mask, parallelism: int) -> Mask:
    """Which of ``parallelism`` subtasks behind a POINTWISE edge have a running producer."""
    if upstream.all():
        return np.ones(parallelism, np.bool_)
    first, end = pointwise_producers(len(upstream), parallelism)
    counted = np.concatenate(([0], np.cumsum(upstream)))
    return np.asarray(counted[end] > counted[first], np.bool_)


def pointwise_producers(upstream: int, downstream: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The producers of each downstream subtask, as half-open ranges ``first`` and ``end``.

    The rule is that of ``Job.senders``; equal parallelisms give subtask i to subtask i (FORWARD).
    """
    subtask = np.arange(downstream, dtype=np.int64)
    first = subtask * upstream // downstream
    return first, np.maximum((subtask + 1) * upstream // downstream, first + 1)
