"""Channels: queues between two tasks of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import pyarrow as pa

from ..dataflow import events as ev

CAPACITY = 8
"""Elements that a channel holds before its sender waits.

Feedback channels have no limit, so that loops turn.
"""


def _ignore(_: Queue) -> None:
    pass


class Queue:
    """One channel: first in, first out. It calls back when it becomes full or empty or stops so."""

    __slots__ = ("capacity", "channel", "elements", "logged_for", "on_element", "on_empty", "on_full", "on_room")

    def __init__(self, channel: ev.Channel, *, capacity: int | None) -> None:
        self.channel = channel
        self.capacity = capacity
        self.elements: deque[ev.Element] = deque()
        self.logged_for: int | None = None
        """The unaligned barrier for whose snapshot the receiver logs what comes in, if any."""
        self.on_full: Callable[[Queue], object] = _ignore
        self.on_room: Callable[[Queue], object] = _ignore
        self.on_element: Callable[[Queue], object] = _ignore
        self.on_empty: Callable[[Queue], object] = _ignore

    @property
    def full(self) -> bool:
        return self.capacity is not None and len(self.elements) >= self.capacity

    def put(self, element: ev.Element) -> None:
        self.elements.append(element)
        count = len(self.elements)
        if count == 1:
            self.on_element(self)
        if count == self.capacity:
            self.on_full(self)

    def get(self) -> ev.Element:
        element = self.elements.popleft()
        count = len(self.elements)
        if not count:
            self.on_empty(self)
        if self.capacity is not None and count == self.capacity - 1:
            self.on_room(self)
        return element

    def records_before(self, number: int) -> Iterator[pa.RecordBatch]:
        """The batches before the barrier of this number, or all where it is not there."""
        for element in self.elements:
            if isinstance(element, ev.Records):
                yield element.batch
            elif isinstance(element, ev.Barrier) and element.number == number:
                return

    def replace_barrier(self, barrier: ev.Barrier) -> bool:
        """Replace the barrier of the same number; returns whether there is one."""
        for at, element in enumerate(self.elements):
            if isinstance(element, ev.Barrier) and element.number == barrier.number:
                self.elements[at] = barrier
                return True
        return False

    def holds_barrier(self, number: int) -> bool:
        return any(isinstance(element, ev.Barrier) and element.number == number for element in self.elements)
