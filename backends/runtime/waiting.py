"""The inputs of a task that hold elements, so that a step costs the same however many there are."""

from __future__ import annotations

import random

from ..dataflow.task import Task
from .channels import Queue


class ReadyInputs:
    """The channels of one task that hold elements.

    A blocked channel is put aside when it is found, until the task releases channels again.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._open: list[Queue] = []
        self._place: dict[Queue, int] = {}
        self._aside: dict[Queue, None] = {}
        self._releases = task.releases

    def add(self, queue: Queue) -> None:
        self._place[queue] = len(self._open)
        self._open.append(queue)

    def remove(self, queue: Queue) -> None:
        if queue in self._aside:
            del self._aside[queue]
            return
        place, last = self._place.pop(queue), self._open.pop()
        if last is not queue:
            self._open[place] = last
            self._place[last] = place

    def any_open(self) -> bool:
        self._check_releases()
        while self._open:
            if not self._task.is_blocked(self._open[-1].channel):
                return True
            self._put_aside(self._open[-1])
        return False

    def draw(self, choose: random.Random) -> Queue:
        """One of the open channels, each with the same chance."""
        self._check_releases()
        while True:
            queue = self._open[int(choose.random() * len(self._open))]
            if not self._task.is_blocked(queue.channel):
                return queue
            self._put_aside(queue)

    def _put_aside(self, queue: Queue) -> None:
        self.remove(queue)
        self._aside[queue] = None

    def _check_releases(self) -> None:
        if self._releases != self._task.releases:
            self._releases = self._task.releases
            for queue in self._aside:
                self.add(queue)
            self._aside.clear()
