"""What the coordinator knows about the tasks of a run, and the questions that its rules ask.

Facts are only added. Each is a :class:`TaskMask`, so the time to note a fact or answer a question
does not depend on the number of tasks. A task is *released* when a checkpoint that it acknowledged
as finishing is complete: it needs no further checkpoint, and ends by itself once its consumers have
confirmed its data.

*Planning* chooses the tasks that a checkpoint triggers, waits for, and counts as finished. A
barrier enters the job at its *roots*: running tasks without running predecessors, not counting
feedback edges. At first these are the sources. When sources have finished, tasks after them become
roots (FLIP-147). A plan never changes: a task that ends later makes the checkpoint fail.

Planning is linear in tasks, so a million subtasks take milliseconds. For an ALL_TO_ALL edge it
checks only whether any upstream task runs, never the n x m pairs; for a POINTWISE edge, ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from stateformat.model import Mode

from .compile import Job, loops_of
from .events import CheckpointPlan, Mask, TaskId, TaskSet


def make_plan(job: Job, running: Mapping[str, Mask]) -> CheckpointPlan:
    """Return the plan of a checkpoint that begins now. ``running`` has an array for every vertex.

    The edges of a vertex without running tasks are ignored: a fully finished operator keeps its old
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
    """Return which of ``parallelism`` subtasks after a POINTWISE edge have a running producer.

    Who sends to whom is as in ``Job.senders``.
    """
    if upstream.all():
        return np.ones(parallelism, np.bool_)
    subtask = np.arange(parallelism, dtype=np.int64)
    first = subtask * len(upstream) // parallelism
    end = np.maximum((subtask + 1) * len(upstream) // parallelism, first + 1)
    counted = np.concatenate(([0], np.cumsum(upstream)))
    return np.asarray(counted[end] > counted[first], np.bool_)


class TaskMask:
    """A set of tasks that only grows, with its size per vertex and in total."""

    def __init__(self, parallelism: dict[str, int], full: Iterable[str] = ()) -> None:
        """Begin with every task of the vertices ``full``."""
        self.masks: dict[str, Mask] = {vertex: np.zeros(count, np.bool_) for vertex, count in parallelism.items()}
        self.count = dict.fromkeys(parallelism, 0)
        for vertex in full:
            self.masks[vertex][:] = True
            self.count[vertex] = parallelism[vertex]
        self.total = sum(self.count.values())

    def __contains__(self, task: TaskId) -> bool:
        return bool(self.masks[task.vertex][task.subtask])

    def add(self, task: TaskId) -> bool:
        """Add a task; return False if it was there."""
        if task in self:
            return False
        self.masks[task.vertex][task.subtask] = True
        self.count[task.vertex] += 1
        self.total += 1
        return True


class TrackedLoop(NamedTuple):
    """A loop, with what the coordinator needs to know about it."""

    heads: tuple[str, ...]
    vertices: frozenset[str]
    """All its vertices, including the heads."""
    outside: frozenset[str]
    """Vertices outside it with an edge into it."""


class TaskTracker:
    """The tasks of one run. ``finished``: vertices that had fully finished and were not started."""

    def __init__(self, job: Job, finished: Iterable[str] = ()) -> None:
        self.job = job
        self.parallelism = {vertex.id: vertex.parallelism for vertex in job.vertices}
        done = tuple(finished)
        self.ended = TaskMask(self.parallelism, done)
        self.logic_ended = TaskMask(self.parallelism, done)
        self.released = TaskMask(self.parallelism, done)
        self.inputs_ended = TaskMask(self.parallelism, done)
        """Loop heads that get nothing more from outside the loop."""
        self.ending_heads: set[str] = set()
        """Heads that were told to end. Their loops need no more turns."""
        self.total = sum(self.parallelism.values())
        self.sources = tuple(vertex.id for vertex in job.vertices if not vertex.inputs and not vertex.feedback)
        self.heads = tuple(vertex.id for vertex in job.vertices if vertex.feedback)
        self.loops = _tracked_loops(job)
        union = {str(state.operator) for state in job.states if state.mode is Mode.UNION}
        self.union = {
            vertex.id: uids
            for vertex in job.vertices
            if (uids := tuple(uid for uid in vertex.operators if uid in union))
        }
        """Operators with union state, by vertex."""

    def knows(self, task: TaskId) -> bool:
        """Return whether the job has this task."""
        return 0 <= task.subtask < self.parallelism.get(task.vertex, 0)

    def release(self, tasks: Iterable[TaskId]) -> None:
        """Note that these tasks have the checkpoint that they waited for."""
        for task in tasks:
            self.logic_ended.add(task)
            self.released.add(task)

    def end_logic(self, tasks: Iterable[TaskId]) -> bool:
        """Note that these tasks emit no more records; return False if that was known of all."""
        return sum(self.logic_ended.add(task) for task in tasks) > 0

    def end(self, task: TaskId) -> bool:
        """Note that a task, its inputs and its logic have ended; return False if it was known."""
        self.inputs_ended.add(task)
        self.release((task,))
        return self.ended.add(task)

    def plan(self) -> CheckpointPlan:
        """Return the plan of a checkpoint that begins now."""
        return make_plan(self.job, {vertex: ~mask for vertex, mask in self.ended.masks.items()})

    def working(self, vertices: Iterable[str]) -> Iterator[TaskId]:
        """Yield the tasks of these vertices whose logic has not ended."""
        for vertex in vertices:
            for subtask in np.flatnonzero(~self.logic_ended.masks[vertex]).tolist():
                yield TaskId(vertex, subtask)

    @property
    def all_ended(self) -> bool:
        """Whether every task has ended."""
        return self.ended.total == self.total

    @property
    def all_released(self) -> bool:
        """Whether every task has ended or is about to, so that no checkpoint is needed."""
        return self.released.total == self.total

    @property
    def some_are_leaving(self) -> bool:
        """Whether a task is released and has not ended.

        What would begin at once waits for it: a task that ends during a checkpoint makes it void.
        """
        return self.released.total > self.ended.total

    @property
    def final(self) -> bool:
        """Whether every logic has ended and all tasks left wait for one and the same checkpoint."""
        return self.logic_ended.total == self.total and not self.some_are_leaving and not self.all_ended

    def logic_is_over(self, vertices: Iterable[str]) -> bool:
        """Return whether the logic of every task of these vertices has ended."""
        return all(self.logic_ended.count[vertex] == self.parallelism[vertex] for vertex in vertices)

    @property
    def closed_loops(self) -> list[TrackedLoop]:
        """Return the loops that get nothing more from outside."""
        return [loop for loop in self.loops if self.logic_is_over(loop.outside)]

    @property
    def draining_heads(self) -> tuple[str, ...]:
        """Return heads whose tasks all have only their loop left, and were not told to end."""
        return tuple(
            head
            for head in self.heads
            if head not in self.ending_heads
            and self.logic_ended.count[head] < self.parallelism[head] == self.inputs_ended.count[head]
        )

    @property
    def turning_heads(self) -> tuple[str, ...]:
        """Return the draining heads, once only turning their loops can move the job on."""
        return self.draining_heads if self.logic_is_over(self.sources) and not self.some_are_leaving else ()

    def partial_union(self) -> str | None:
        """Return an operator with union state whose logic has ended in only some subtasks."""
        for vertex, uids in self.union.items():
            if 0 < self.logic_ended.count[vertex] < self.parallelism[vertex]:
                return uids[0]
        return None

    def endangered_unions(self) -> Iterator[str]:
        """Yield operators with union state whose subtasks may end long after one another.

        After an ALL_TO_ALL edge all subtasks see the end of data at about the same time.
        """
        for vertex in self.job.vertices:
            together = any(edge.partitioner.all_to_all for edge in vertex.inputs)
            if vertex.parallelism > 1 and not together and self.ended.count[vertex.id] < vertex.parallelism:
                yield from self.union.get(vertex.id, ())


def _tracked_loops(job: Job) -> list[TrackedLoop]:
    vertex_of = {uid: vertex.id for vertex in job.vertices for uid in vertex.operators}
    found = []
    for loop in loops_of(job.vertices):
        inside = [vertex for vertex in job.vertices if vertex.id in loop]
        heads = tuple(vertex.id for vertex in inside if vertex.feedback)
        senders = {vertex_of[edge.source] for vertex in inside for edge in vertex.inputs}
        found.append(TrackedLoop(heads, loop, frozenset(senders - loop)))
    return found
