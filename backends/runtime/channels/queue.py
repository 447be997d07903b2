"""One channel: a queue between two tasks of one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

import pyarrow as pa

from stateformat.errors import ErrorKind

from ...dataflow import events as ev
from ...dataflow.chained_operator import FailsAgain

CAPACITY = 8
"""How many elements a channel holds before its sender waits.

Feedback channels have no limit, so that loops do not block.
"""


class LoopFill:
    """How much data was fed back to one subtask of a loop's head and waits there.

    Nothing may block a loop, or it would wait for itself. So there is always room for what is fed
    back, and once it exceeds half of ``bytes_max``, it is taken before input from outside. A loop
    that still grows feeds back more than it takes in; above ``bytes_max``, it fails.
    """

    def __init__(self, head: ev.TaskId, bytes_max: int) -> None:
        self._head = head
        self._bytes_max = bytes_max
        self.size_bytes = 0

    @property
    def presses(self) -> bool:
        """Whether the head must take only what was fed back."""
        return 2 * self.size_bytes > self._bytes_max

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch. Raises ``FailsAgain`` of kind ``LIMIT_EXCEEDED`` above the limit."""
        self.size_bytes += _size_of(batch)
        if self.size_bytes > self._bytes_max:
            raise FailsAgain(
                f"more than {self._bytes_max:,} bytes of records wait in the loop of operator "
                f"{self._head.vertex!r} (subtask {self._head.subtask}): more is fed back than leaves it. Make "
                "every record leave the loop eventually, or raise loop_bytes_max",
                kind=ErrorKind.LIMIT_EXCEEDED,
                operator=self._head.vertex,
            )

    def remove(self, batch: pa.RecordBatch) -> None:
        self.size_bytes -= _size_of(batch)


def _size_of(batch: pa.RecordBatch) -> int:
    """Return the bytes of a batch, with its overhead, which matters for batches of one row."""
    return int(batch.nbytes) + 1024


def _ignore(_: Queue) -> None:
    pass


class Queue:
    """One channel, first in, first out. It calls back when it becomes full, empty, or neither."""

    __slots__ = (
        "capacity",
        "channel",
        "elements",
        "fill",
        "logged_for",
        "on_element",
        "on_empty",
        "on_full",
        "on_room",
    )

    def __init__(self, channel: ev.Channel, *, capacity: int | None, fill: LoopFill | None = None) -> None:
        self.channel = channel
        self.fill = fill
        """The fill of the head, for a feedback channel."""
        self.capacity = capacity
        # A list for few elements: a new one is much smaller, and there may be very many channels.
        self.elements: list[ev.Element] | deque[ev.Element] = deque() if capacity is None else []
        self.logged_for: int | None = None
        """The unaligned barrier, if any, for whose snapshot the receiver logs arriving records."""
        self.on_full: Callable[[Queue], object] = _ignore
        self.on_room: Callable[[Queue], object] = _ignore
        self.on_element: Callable[[Queue], object] = _ignore
        self.on_empty: Callable[[Queue], object] = _ignore

    @property
    def full(self) -> bool:
        return self.capacity is not None and len(self.elements) >= self.capacity

    def put(self, element: ev.Element) -> None:
        if self.fill is not None and isinstance(element, ev.Records):
            self.fill.add(element.batch)
        self.elements.append(element)
        count = len(self.elements)
        if count == 1:
            self.on_element(self)
        if count == self.capacity:
            self.on_full(self)

    def get(self) -> ev.Element:
        elements = self.elements
        element = elements.pop(0) if isinstance(elements, list) else elements.popleft()
        if self.fill is not None and isinstance(element, ev.Records):
            self.fill.remove(element.batch)
        count = len(self.elements)
        if not count:
            self.on_empty(self)
        if self.capacity is not None and count == self.capacity - 1:
            self.on_room(self)
        return element

    def records_before(self, number: int) -> Iterator[pa.RecordBatch]:
        """Yield the batches before the barrier of this number, or all if it is not there."""
        for element in self.elements:
            if isinstance(element, ev.Records):
                yield element.batch
            elif isinstance(element, ev.Barrier) and element.number == number:
                return

    def replace_barrier(self, barrier: ev.Barrier) -> bool:
        """Replace the barrier of the same number; return whether there is one."""
        for at, element in enumerate(self.elements):
            if isinstance(element, ev.Barrier) and element.number == barrier.number:
                self.elements[at] = barrier
                return True
        return False

    def holds_barrier(self, number: int) -> bool:
        return any(isinstance(element, ev.Barrier) and element.number == number for element in self.elements)
