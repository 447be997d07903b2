"""The plan of a checkpoint, as a value: what each task does in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .elements import TaskId

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
