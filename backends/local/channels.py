"""Channels of the in-process executor: queues between two tasks, bounded for records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pyarrow as pa

from backends.dataflow.events import Barrier, Channel, Element, Records

CAPACITY = 8
"""Batches that a channel holds before its sender waits. Feedback channels hold any number: the loop must turn."""


class Queue:
    """One channel: first in, first out. ``arriving`` logs what comes in, for an unaligned checkpoint."""

    __slots__ = ("arriving", "capacity", "channel", "elements")

    def __init__(self, channel: Channel, *, capacity: int | None) -> None:
        self.channel = channel
        self.capacity = capacity
        self.elements: deque[Element] = deque()
        self.arriving = False

    @property
    def full(self) -> bool:
        """Whether its sender has to wait."""
        return self.capacity is not None and len(self.elements) >= self.capacity

    def put(self, element: Element) -> None:
        """Put in an element."""
        self.elements.append(element)

    def get(self) -> Element:
        """Take the oldest."""
        return self.elements.popleft()

    def records_before(self, number: int) -> Iterator[pa.RecordBatch]:
        """The batches that lie before the barrier of this number, or all where it is not there."""
        for element in self.elements:
            if isinstance(element, Records):
                yield element.batch
            elif isinstance(element, Barrier) and element.number == number:
                return

    def holds_barrier(self, number: int) -> bool:
        """Whether the barrier of this number lies in it."""
        return any(isinstance(element, Barrier) and element.number == number for element in self.elements)
