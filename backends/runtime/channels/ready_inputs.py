"""The channels of a task from which something can be taken now."""

from __future__ import annotations

import random

from ...dataflow import events as ev
from ...dataflow.task import Task
from .edge_log import ReceivingEnd
from .queue import LoopFill, Queue

_LOOKS_A_STEP, _LOOKS_A_FIND, _WORTH_MAX = 8, 16, 1 << 16
"""How many looks at channel heads one step may cost, and how many each step saved is worth."""


class ReadyInputs:
    """The channels of one task that hold elements.

    A blocked channel is put aside when it is found, until the task releases channels again.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._open: list[Queue] = []
        self._place: dict[Queue, int] = {}
        self._aside: dict[Queue, None] = {}
        self._worth = 0
        """The balance of looks at channels: what they saved, less what they cost."""
        self._releases = task.releases
        self.fill: LoopFill | None = None
        """How much waits at the head of a loop, if the task is one."""
        self.told: list[ReceivingEnd] = []
        """The ends of wide edges, which hold the elements of channels without a queue."""

    def add(self, queue: Queue) -> bool:
        """Add a channel. Return whether no other may be open, so the task may have become ready."""
        place = len(self._open)
        self._place[queue] = place
        self._open.append(queue)
        return not place

    def remove(self, queue: Queue) -> None:
        if queue in self._aside:
            del self._aside[queue]
            return
        place, last = self._place.pop(queue), self._open.pop()
        if last is not queue:
            self._open[place] = last
            self._place[last] = place

    def any_open(self) -> bool:
        for end in self.told:
            if end.awake:
                return True
        self._check_releases()
        while self._open:
            if not self._task.is_blocked(self._open[-1].channel):
                return True
            self._put_aside(self._open[-1])
        return False

    def draw(self, choose: random.Random) -> Queue | ReceivingEnd:
        """Draw an open channel, all with the same chance; if a loop presses, only its feedback.

        For a channel of a wide edge without a queue, return the receiving end of that edge.
        """
        self._check_releases()
        if self.fill is not None and self.fill.presses:
            fed = [each for each in self._open if each.fill is not None and not self._task.is_blocked(each.channel)]
            if fed:
                return fed[int(choose.random() * len(fed))]
        others = 0
        for end in self.told:
            others += end.waiting if end.awake else 0
        while True:
            drawn = int(choose.random() * (len(self._open) + others))
            if drawn >= len(self._open):
                return self._told_at(drawn - len(self._open))
            queue = self._open[drawn]
            if not self._task.is_blocked(queue.channel):
                return queue
            self._put_aside(queue)

    def _told_at(self, number: int) -> ReceivingEnd:
        """Return the end that holds the entry of this number, counting all waiting entries."""
        for end in self.told:
            if number < end.waiting:
                return end
            number -= end.waiting
        raise AssertionError("no entry of this number waits")

    def take_alike(self, drawn: Queue, element: ev.Element) -> tuple[list[ev.Channel], list[ev.Element]]:
        """Take elements like one that was drawn from the heads of the edge's other open channels:
        all watermarks, or the same barrier or end. ``element`` is never records.

        Looks at all channels, unless that has recently found too little.
        """
        if self._worth < 0:
            self._worth += _LOOKS_A_STEP
            return [], []
        edge, kind, any_value = drawn.channel.edge, type(element), isinstance(element, ev.Watermark)
        found = [
            queue
            for queue in self._open
            if type(head := queue.elements[0]) is kind
            and (head is element or any_value or head == element)
            and queue.channel.edge == edge
            and queue is not drawn
            and not self._task.is_blocked(queue.channel)
        ]
        self._worth = min(self._worth + _LOOKS_A_FIND * len(found) - len(self._open), _WORTH_MAX)
        if 4 * len(found) < len(self._open):
            return [queue.channel for queue in found], [queue.get() for queue in found]
        # Like get(), but emptied channels are removed all at once.
        elements = []
        for queue in found:
            behind = queue.elements
            elements.append(behind.pop(0) if isinstance(behind, list) else behind.popleft())
            if len(behind) + 1 == queue.capacity:
                queue.on_room(queue)
        self._open = [queue for queue in self._open if queue.elements]
        self._place = {queue: place for place, queue in enumerate(self._open)}
        return [queue.channel for queue in found], elements

    def _put_aside(self, queue: Queue) -> None:
        self.remove(queue)
        self._aside[queue] = None

    def _check_releases(self) -> None:
        if self._releases != self._task.releases:
            self._releases = self._task.releases
            for queue in self._aside:
                self.add(queue)
            self._aside.clear()
