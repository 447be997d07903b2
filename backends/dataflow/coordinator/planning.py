"""Choose the tasks that a checkpoint triggers, waits for, and counts as finished.

A barrier enters the job at its *roots*: running tasks without running predecessors, not counting
feedback edges. At first these are the sources. When sources have finished, tasks after them become
roots (FLIP-147). A plan never changes: a task that ends later makes the checkpoint fail.

Planning is linear in tasks, so a million subtasks take milliseconds. For an ALL_TO_ALL edge it
checks only whether any upstream task runs, never the n x m pairs; for a POINTWISE edge, ranges.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..events import CheckpointPlan, Mask, TaskSet
from ..graph import Job


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
