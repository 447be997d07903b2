"""The checkpoint plan of one million subtasks against that of 100,000.

Five vertices joined by ALL_TO_ALL edges, and the same with POINTWISE edges between different
parallelisms. The source has finished, every second task of the others runs. Walking the tasks to
trigger, as an executor does, is counted in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.measuring import Row, compare
from stateformat.backends.dataflow.task_tracker import make_plan
from stateformat.graph import Edge, OperatorId, Partitioner

VERTICES = 5


def job(subtasks: int, partitioner: Partitioner) -> Any:
    vertices = []
    for number in range(VERTICES):
        source, target = OperatorId(f"v{number - 1}"), OperatorId(f"v{number}")
        uneven = number % 2 * (partitioner is Partitioner.RESCALE)
        vertices.append(
            SimpleNamespace(
                id=f"v{number}",
                operators=(f"v{number}",),
                parallelism=subtasks // VERTICES - uneven,
                inputs=(Edge(f"e{number}", source, target, partitioner),) if number else (),
                feedback=(),
            )
        )
    return SimpleNamespace(vertices=tuple(vertices), states=(), unaligned=False)


def planning(subtasks: int, partitioner: Partitioner) -> Callable[[], object]:
    of = job(subtasks, partitioner)
    running = {vertex.id: np.arange(vertex.parallelism) % 2 == 0 for vertex in of.vertices}
    running["v0"][:] = False
    return lambda: deque(make_plan(of, running).trigger, maxlen=0)


def measure() -> list[Row]:
    kinds = {"ALL_TO_ALL": (Partitioner.HASH, "≤ 12 ×"), "POINTWISE": (Partitioner.RESCALE, "–")}
    return [
        compare(
            f"checkpoint plan, 1M subtasks, {name}",
            planning(1_000_000, partitioner),
            planning(100_000, partitioner),
            label="100k subtasks",
            budget=budget,
            rounds=15,
        )
        for name, (partitioner, budget) in kinds.items()
    ]
