"""Which tasks a checkpoint triggers, waits for, and takes as finished.

Theory of operation. A barrier enters the job at its *roots*: the running tasks none of whose predecessors runs, feedback
edges aside. At first these are the sources; when sources have finished, tasks behind them become roots (FLIP-147). A plan is
made per checkpoint from one fact, which tasks run, and never changes afterwards: a task that ends later does not alter it, it
fails the checkpoint.

Cost is linear in tasks: of an ALL_TO_ALL edge only "does any upstream task run?" is asked, never the n × m pairs, and a
POINTWISE edge is one vectorised look at ranges of upstream tasks, which hold each of them once or at most twice the larger
side. So sets of tasks are boolean arrays per vertex, a byte a task, and one million subtasks are a matter of milliseconds;
:class:`TaskSet` shows them as a set of :class:`~backends.dataflow.events.TaskId`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from backends.dataflow.elements import TaskId

if TYPE_CHECKING:
    from backends.dataflow.compile import Job

Mask: TypeAlias = npt.NDArray[np.bool_]
"""One boolean per subtask of a vertex."""


class TaskSet(Set[TaskId]):
    """An immutable set of tasks: a boolean array per vertex. Iterates vertex by vertex, subtasks ascending.

    Equal to any set of the same tasks. ``in`` is constant, ``len`` is counted once.
    """

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        """Take the arrays over; they are made read-only."""
        for mask in masks.values():
            mask.setflags(write=False)
        self.masks: Mapping[str, Mask] = masks
        """The arrays, by vertex."""

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

    def subtasks(self, vertex: str) -> npt.NDArray[np.int64]:
        """The subtasks of one vertex that are in it, ascending."""
        mask = self.masks.get(vertex)
        return np.zeros(0, np.int64) if mask is None else np.flatnonzero(mask).astype(np.int64)


@dataclass(frozen=True)
class CheckpointPlan:
    """The part of every task in one checkpoint. ``wait`` and ``finished`` are disjoint and together are all tasks."""

    trigger: TaskSet
    """Roots: they run and nothing in front of them does. Each is told directly."""
    wait: TaskSet
    """All that run. Each acknowledges, and is told of the completion or the end."""
    finished: TaskSet
    """Those that had ended: they contribute nothing."""
    fully_finished: frozenset[str]
    """Vertices of which no task runs."""


def make_plan(job: Job, running: Mapping[str, Mask]) -> CheckpointPlan:
    """The plan of a checkpoint that begins now. ``running``: an array per vertex, as long as its parallelism; copied.

    A vertex of which nothing runs may have a parallelism that does not fit its neighbours (a fully finished operator keeps
    the one that it had): none of its edges is looked at.
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
                    roots &= ~fed_by_running(running[source], vertex.parallelism)
        trigger[vertex.id] = roots
    return CheckpointPlan(
        TaskSet(trigger),
        TaskSet({vertex.id: running[vertex.id].copy() for vertex in job.vertices}),
        TaskSet({vertex.id: ~running[vertex.id] for vertex in job.vertices}),
        frozenset(vertex for vertex, runs in any_runs.items() if not runs),
    )


def fed_by_running(upstream: Mask, parallelism: int) -> Mask:
    """Which of ``parallelism`` subtasks behind a POINTWISE edge have a running producer."""
    if upstream.all():
        return np.ones(parallelism, np.bool_)
    first, end = pointwise_producers(len(upstream), parallelism)
    counted = np.concatenate(([0], np.cumsum(upstream)))
    return np.asarray(counted[end] > counted[first], np.bool_)


def pointwise_producers(upstream: int, downstream: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The producers of each downstream subtask over a POINTWISE edge, as half-open ranges ``first`` and ``end``.

    Producers are ⌊i·u/d⌋ … ⌊(i+1)·u/d⌋ − 1 where there are at least as many upstream, else the one ⌊i·u/d⌋ (which feeds
    ⌈p·d/u⌉ … ⌈(p+1)·d/u⌉ − 1). Equal parallelisms give i ← i, which is FORWARD.
    """
    subtask = np.arange(downstream, dtype=np.int64)
    first = subtask * upstream // downstream
    return first, np.maximum((subtask + 1) * upstream // downstream, first + 1)
