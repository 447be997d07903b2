"""The set of ready workers, from which one is drawn without asking all workers at each step.

Theory of operation. A worker becomes ready when mail or an element arrives, when an output has room
again, when its time has come, or by its own step. All but the last :meth:`~ReadySet.wake` it; after
a step it stays a candidate. So the candidates are all ready workers, and some that were ready. A
drawn candidate that is not ready is removed and another is drawn, which gives each ready one the
same chance. So the cost of a step does not grow with the number of tasks.
"""

from __future__ import annotations

import random
from heapq import heappop, heappush

from ..runtime import Worker


class ReadySet:
    """The workers that may have something to do."""

    def __init__(self) -> None:
        self._candidates: list[Worker] = []
        self._place: dict[Worker, int] = {}
        self._timed: list[tuple[int, int, Worker]] = []
        self._until: dict[Worker, int] = {}
        self._count = 0

    def wake(self, worker: Worker) -> None:
        """Note that a worker may have become ready."""
        if worker not in self._place:
            self._place[worker] = len(self._candidates)
            self._candidates.append(worker)

    def draw(self, choose: random.Random, now_us: int, *, others: int = 0) -> Worker | None:
        """One of the ready workers; None without any, or if one of so many ``others`` is drawn."""
        while self._timed and self._timed[0][0] <= now_us:
            at_us, _, worker = heappop(self._timed)
            if self._until.get(worker) == at_us:
                del self._until[worker]
            self.wake(worker)
        while self._candidates:
            drawn = int(choose.random() * (len(self._candidates) + others))
            if drawn >= len(self._candidates):
                return None
            worker = self._candidates[drawn]
            if worker.ready(now_us):
                return worker
            self._put_away(worker, now_us)
        return None

    def _put_away(self, worker: Worker, now_us: int) -> None:
        place, last = self._place.pop(worker), self._candidates.pop()
        if last is not worker:
            self._candidates[place] = last
            self._place[last] = place
        at_us = worker.idle_until_us
        if at_us is not None and at_us > now_us and self._until.get(worker) != at_us:
            self._until[worker] = at_us
            self._count += 1
            heappush(self._timed, (at_us, self._count, worker))

    @property
    def next_us(self) -> int | None:
        """Return when to ask the first worker that waits for the clock again."""
        return self._timed[0][0] if self._timed else None
