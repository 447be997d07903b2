"""Channels: queues between two tasks of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import pyarrow as pa

from ..dataflow.events import Barrier, Channel, Element, Records

CAPACITY = 8
"""Elements that a channel holds before its sender waits. Feedback channels hold any number: the loop must turn."""


def _nobody(_: Queue) -> None:
    """Nobody waits for it."""


class Queue:
    """One channel: first in, first out. ``logged_for``: the number of the unaligned barrier for whose snapshot its receiver logs
    what is put in, until that barrier is; None: nothing is logged.

    ``filled``, ``room``: called with it when it becomes full, and when it no longer is; ``found``, ``emptied``: when something lies in it,
    and when nothing does. So whoever waits for it need not look at it again and again.
    """

    __slots__ = ("capacity", "channel", "elements", "emptied", "filled", "found", "logged_for", "room")

    def __init__(self, channel: Channel, *, capacity: int | None) -> None:
        self.channel = channel
        self.capacity = capacity
        self.elements: deque[Element] = deque()
        self.logged_for: int | None = None
        self.filled: Callable[[Queue], object] = _nobody
        self.room: Callable[[Queue], object] = _nobody
        self.found: Callable[[Queue], object] = _nobody
        self.emptied: Callable[[Queue], object] = _nobody

    @property
    def full(self) -> bool:
        """Whether its sender has to wait."""
        return self.capacity is not None and len(self.elements) >= self.capacity

    def put(self, element: Element) -> None:
        """Put in an element."""
        self.elements.append(element)
        count = len(self.elements)
        if count == 1:
            self.found(self)
        if count == self.capacity:
            self.filled(self)

    def get(self) -> Element:
        """Take the oldest."""
        element = self.elements.popleft()
        count = len(self.elements)
        if not count:
            self.emptied(self)
        if self.capacity is not None and count == self.capacity - 1:
            self.room(self)
        return element

    def records_before(self, number: int) -> Iterator[pa.RecordBatch]:
        """The batches that lie before the barrier of this number, or all where it is not there."""
        for element in self.elements:
            if isinstance(element, Records):
                yield element.batch
            elif isinstance(element, Barrier) and element.number == number:
                return

    def replace_barrier(self, barrier: Barrier) -> bool:
        """Put a barrier in the place of the one of the same number. Whether that lies in it."""
        for at, element in enumerate(self.elements):
            if isinstance(element, Barrier) and element.number == barrier.number:
                self.elements[at] = barrier
                return True
        return False

    def holds_barrier(self, number: int) -> bool:
        """Whether the barrier of this number lies in it."""
        return any(isinstance(element, Barrier) and element.number == number for element in self.elements)
