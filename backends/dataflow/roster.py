"""What the coordinator knows of the tasks of a run: facts that only grow, and the questions that rules ask of them.

Theory of operation. Each fact is a :class:`TaskMask`, one boolean per task with running counts, so that a fact and a question cost
O(1) or O(vertices), never O(tasks). A task is *released* when a checkpoint that it acknowledged as finishing is complete: it
will end by itself as soon as its consumers have confirmed its data, and needs no further checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from backends.dataflow.checkpoint_plan import CheckpointPlan, Mask, make_plan
from backends.dataflow.compile import Job
from backends.dataflow.events import TaskId
from backends.dataflow.loops import loops_of
from stateformat.model import Mode


class TaskMask:
    """A set of tasks that only grows, with its size per vertex and in all."""

    def __init__(self, parallelism: dict[str, int], full: Iterable[str] = ()) -> None:
        """Every task of the vertices ``full`` is in it."""
        self.masks: dict[str, Mask] = {vertex: np.zeros(count, np.bool_) for vertex, count in parallelism.items()}
        self.count = dict.fromkeys(parallelism, 0)
        for vertex in full:
            self.masks[vertex][:] = True
            self.count[vertex] = parallelism[vertex]
        self.total = sum(self.count.values())

    def __contains__(self, task: TaskId) -> bool:
        return bool(self.masks[task.vertex][task.subtask])

    def add(self, task: TaskId) -> bool:
        """Put a task in; False if it was."""
        if task in self:
            return False
        self.masks[task.vertex][task.subtask] = True
        self.count[task.vertex] += 1
        self.total += 1
        return True


class Loop(NamedTuple):
    """A loop: its heads, all of its vertices, and the vertices outside of it from which an edge leads into it."""

    heads: tuple[str, ...]
    vertices: frozenset[str]
    outside: frozenset[str]


class TaskTracker:
    """The tasks of one run. ``finished``: vertices that are fully finished already and were not started."""

    def __init__(self, job: Job, finished: Iterable[str] = ()) -> None:
        self.job = job
        self.parallelism = {vertex.id: vertex.parallelism for vertex in job.vertices}
        done = tuple(finished)
        self.ended = TaskMask(self.parallelism, done)
        self.logic_ended = TaskMask(self.parallelism, done)
        self.inputs_ended = TaskMask(self.parallelism, done)
        """Of loop heads: nothing comes from outside of the loop any more."""
        self.ending_heads: set[str] = set()
        """Heads that were told to end: their loops need no more turns, and they end by themselves."""
        self.released = TaskMask(self.parallelism, done)
        self.total = sum(self.parallelism.values())
        self.sources = tuple(vertex.id for vertex in job.vertices if not vertex.inputs and not vertex.feedback)
        self.heads = tuple(vertex.id for vertex in job.vertices if vertex.feedback)
        self.loops = _loops(job)
        union = {str(state.operator) for state in job.states if state.mode is Mode.UNION}
        self.union = {
            vertex.id: uids
            for vertex in job.vertices
            if (uids := tuple(uid for uid in vertex.operators if uid in union))
        }
        """Operators with union state, by vertex."""

    def knows(self, task: TaskId) -> bool:
        """Whether the job has this task."""
        return 0 <= task.subtask < self.parallelism.get(task.vertex, 0)

    def release(self, tasks: Iterable[TaskId]) -> None:
        """These tasks have the checkpoint that they waited for: they end when they can."""
        for task in tasks:
            self.logic_ended.add(task)
            self.released.add(task)

    def end_logic(self, tasks: Iterable[TaskId]) -> bool:
        """No record comes from these tasks any more; False if that was known."""
        return sum(self.logic_ended.add(task) for task in tasks) > 0

    def end(self, task: TaskId) -> bool:
        """A task is gone, and whatever is said of tasks that end is true of it; False if that was known."""
        self.inputs_ended.add(task)
        self.release((task,))
        return self.ended.add(task)

    def plan(self) -> CheckpointPlan:
        """The plan of a checkpoint that begins now."""
        return make_plan(self.job, {vertex: ~mask for vertex, mask in self.ended.masks.items()})

    def working(self, vertices: Iterable[str]) -> Iterator[TaskId]:
        """Tasks of these vertices whose logic has not ended."""
        for vertex in vertices:
            for subtask in np.flatnonzero(~self.logic_ended.masks[vertex]).tolist():
                yield TaskId(vertex, subtask)

    @property
    def all_ended(self) -> bool:
        """No task is left."""
        return self.ended.total == self.total

    @property
    def all_released(self) -> bool:
        """Every task has ended or is about to: no checkpoint is needed any more."""
        return self.released.total == self.total

    @property
    def someone_leaves(self) -> bool:
        """A task is released and has not ended yet. Once all sources have ended it will soon, whatever else happens, so what is
        triggered at once waits for it: a task that ends in the middle of a checkpoint makes it void.
        """
        return self.released.total > self.ended.total

    @property
    def final(self) -> bool:
        """Every logic has ended, and all tasks that are left wait for one and the same checkpoint."""
        return self.logic_ended.total == self.total and not self.someone_leaves and not self.all_ended

    def logic_is_over(self, vertices: Iterable[str]) -> bool:
        """Whether the logic of every task of these vertices has ended."""
        return all(self.logic_ended.count[vertex] == self.parallelism[vertex] for vertex in vertices)

    @property
    def closed_loops(self) -> list[Loop]:
        """The loops into which nothing comes from outside any more."""
        return [loop for loop in self.loops if self.logic_is_over(loop.outside)]

    @property
    def draining_heads(self) -> tuple[str, ...]:
        """Heads of loops all of whose tasks have nothing left but their loop, and have neither ended nor been told to."""
        return tuple(
            head
            for head in self.heads
            if head not in self.ending_heads
            and self.logic_ended.count[head] < self.parallelism[head] == self.inputs_ended.count[head]
        )

    @property
    def turning_heads(self) -> tuple[str, ...]:
        """The draining heads, once nothing else moves the job: their loops are turned at once, without an interval."""
        return self.draining_heads if self.logic_is_over(self.sources) and not self.someone_leaves else ()

    def partial_union(self) -> str | None:
        """An operator with union state of which some subtasks, but not all, have ended their logic."""
        for vertex, uids in self.union.items():
            if 0 < self.logic_ended.count[vertex] < self.parallelism[vertex]:
                return uids[0]
        return None

    def endangered_unions(self) -> Iterator[str]:
        """Operators with union state whose subtasks may end long after one another.

        Over an ALL_TO_ALL edge all subtasks of an operator see the end of data at about the same time; sources and those behind
        POINTWISE edges only do not.
        """
        for vertex in self.job.vertices:
            together = any(edge.partitioner.all_to_all for edge in vertex.inputs)
            if vertex.parallelism > 1 and not together and self.ended.count[vertex.id] < vertex.parallelism:
                yield from self.union.get(vertex.id, ())


def _loops(job: Job) -> list[Loop]:
    vertex_of = {uid: vertex.id for vertex in job.vertices for uid in vertex.operators}
    return [
        Loop(
            tuple(vertex.id for vertex in job.vertices if vertex.feedback and vertex.id in loop),
            loop,
            frozenset(vertex_of[edge.source] for vertex in job.vertices if vertex.id in loop for edge in vertex.inputs)
            - loop,
        )
        for loop in loops_of(job.vertices)
    ]
