"""A wide edge: what a sender sends to all receivers is stored once, not once per receiver.

Theory of operation. If every sender reaches every receiver, watermarks, barriers and ends go to all
receivers alike. A sender appends them to the edge's one log, and a receiver reads on in the log at
its next step. A channel has its own queue only if something must wait there: rows, and elements
that follow rows or a barrier that blocks. So the elements of a channel are, in this order: those in
its queue, those that the receiver has read but not taken, and its sender's in the rest of the log.

1. Rows go into the queue. Earlier entries of their sender are moved there first, to stay before
   them (:meth:`SendingEnd.queue_to`).
2. If a channel is blocked or its queue holds something, the entries that its receiver reads go into
   the queue (:meth:`ReceivingEnd.take`). Other entries are taken, equal ones of all channels in one
   step.
3. An entry is kept until every receiver has taken it. A sender with ``CAPACITY`` of them waits.
4. If channels must be visited one by one, as for an unaligned barrier, all goes into the queues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ...dataflow import events as ev
from ...dataflow.task import Task
from .queue import CAPACITY, Queue

TOGETHER_MIN: Final = 16
"""A task with this many channels takes watermarks, barriers and ends of all channels at once."""


def is_wide(channels: int) -> bool:
    """Return whether a task with this many channels takes equal elements of them in one step."""
    return channels >= TOGETHER_MIN


def _no_queue(_: Queue) -> None:
    raise AssertionError("a queue was made before both its workers were")


class EdgeLog:
    """All channels of an edge on which every sender reaches every receiver."""

    def __init__(self, leaving: Sequence[tuple[ev.Channel, ...]], arriving: Sequence[tuple[ev.Channel, ...]]) -> None:
        """``leaving``: the channels of each sender; ``arriving``: of each receiver; in order."""
        self.senders: list[int] = []
        """The sender of each kept entry, parallel to ``elements``."""
        self.elements: list[ev.Element] = []
        self.first = 0
        """The number of the first kept entry."""
        self.end = 0
        """The number of the next entry."""
        self.sending = [SendingEnd(self, sender, channels) for sender, channels in enumerate(leaving)]
        self.receiving = [ReceivingEnd(self, receiver, channels) for receiver, channels in enumerate(arriving)]
        self.told = [0] * len(leaving)
        """By sender, the number after its last entry."""
        self._kept = [0] * len(leaving)
        """By sender, how many entries are kept."""
        self.full: set[int] = set()
        """The senders that wait for room."""
        self.asleep = list(self.receiving)
        """The receivers that have taken everything."""
        self._unconfirmed = [len(arriving)] * len(leaving)
        """By sender, how many receivers have not processed all of its data."""

    def tell(self, sender: int, element: ev.Element) -> None:
        """Append an element that a sender sends to all receivers."""
        self.senders.append(sender)
        self.elements.append(element)
        self.end += 1
        self.told[sender] = self.end
        self._kept[sender] += 1
        awoken, self.asleep = self.asleep, []
        for receiving in awoken:
            receiving.awake = True
            receiving.on_told()
        if self._kept[sender] >= CAPACITY:
            self.trim()
            if self._kept[sender] >= CAPACITY and sender not in self.full:
                self.full.add(sender)
                self.sending[sender].on_full(self)

    def trim(self) -> None:
        """Drop the entries that every receiver has taken, and wake senders that have room."""
        count = min(receiving.taken for receiving in self.receiving) - self.first
        for sender in self.senders[:count]:
            self._kept[sender] -= 1
        del self.senders[:count], self.elements[:count]
        self.first += count
        for sender in [sender for sender in self.full if self._kept[sender] < CAPACITY]:
            self.full.remove(sender)
            self.sending[sender].on_room(self)

    def confirm(self, channels: Iterable[ev.Channel]) -> list[int]:
        """Note that receivers have processed all data of these channels.

        Returns the senders whose data has now been processed by all receivers.
        """
        done: list[int] = []
        for _, sender, _ in channels:
            self._unconfirmed[sender] -= 1
            if not self._unconfirmed[sender]:
                done.append(sender)
        return done


class SendingEnd:
    """One sender's end of a wide edge."""

    def __init__(self, log: EdgeLog, sender: int, channels: tuple[ev.Channel, ...]) -> None:
        self.channels = channels
        self.queues: list[Queue] = []
        """The queues of its channels that exist."""
        self.on_queue: Callable[[Queue], object] = _no_queue
        """Called with every queue that is made."""
        self.on_full: Callable[[EdgeLog], object]
        self.on_room: Callable[[EdgeLog], object]
        self._log = log
        self._sender = sender

    def tell(self, element: ev.Element) -> None:
        """Send an element to all receivers."""
        self._log.tell(self._sender, element)

    def queue_to(self, receiver: int) -> Queue:
        """Return the queue of a channel, with all its untaken entries moved into it."""
        return self._log.receiving[receiver].queue_from(self._sender)


class ReceivingEnd:
    """One receiver's end of a wide edge."""

    def __init__(self, log: EdgeLog, receiver: int, channels: tuple[ev.Channel, ...]) -> None:
        self.channels = channels
        self.on_queue: Callable[[Queue], object] = _no_queue
        """Called with every queue that is made."""
        self.on_told: Callable[[], object]
        """Called when there is something to take again."""
        self.awake = False
        """Whether there is something to take."""
        self.taken = 0
        """Entries before this number have been taken, or are in queues."""
        self._log = log
        self._receiver = receiver
        self._queues: dict[int, Queue] = {}
        """The queues that exist, by sender."""
        self._read = 0
        """Entries before this number have been read."""
        self._senders: list[int] = []
        """The sender of each entry read but not taken, parallel to ``_elements``."""
        self._elements: list[ev.Element] = []

    @property
    def waiting(self) -> int:
        """How many entries it has not taken."""
        return len(self._elements) + self._log.end - self._read

    def queue_from(self, sender: int) -> Queue:
        """Return the queue of a channel, with all its untaken entries moved into it."""
        queue = self._queue(sender)
        if self._log.told[sender] > self.taken:
            self._read_on()
            own = [element for of, element in zip(self._senders, self._elements, strict=True) if of == sender]
            if own:
                self._elements = [
                    element for of, element in zip(self._senders, self._elements, strict=True) if of != sender
                ]
                self._senders = [of for of in self._senders if of != sender]
                for element in own:
                    queue.put(element)
                self._settle()
        return queue

    def to_queues(self) -> None:
        """Move everything that waits into the queues."""
        self._read_on()
        for sender, element in zip(self._senders, self._elements, strict=True):
            self._queue(sender).put(element)
        self._senders, self._elements = [], []
        self._settle()

    def take(self, task: Task) -> tuple[list[ev.Channel], list[ev.Element]]:
        """Take the first element that may be taken now, and those like it from other channels: all
        watermarks, or the same barrier or end. Move what must wait into its channel's queue.
        """
        self._read_on()
        channels = [*map(self.channels.__getitem__, self._senders)]
        first = self._elements[0]
        any_queued = any(queue.elements for queue in self._queues.values())
        if not any_queued and _all_alike(self._elements, first) and not task.together.blocks_any(channels):
            taken, self._senders, self._elements = self._elements, [], []
        else:
            channels, taken = self._take_some(task)
        self._settle()
        return channels, taken

    def _take_some(self, task: Task) -> tuple[list[ev.Channel], list[ev.Element]]:
        """Do the same as :meth:`take`, entry by entry."""
        entries = zip(self._senders, self._elements, strict=True)
        self._senders, self._elements = [], []
        left: set[int] = set()
        channels: list[ev.Channel] = []
        taken: list[ev.Element] = []
        for sender, element in entries:
            channel, queue = self.channels[sender], self._queues.get(sender)
            if (queue is not None and queue.elements) or task.is_blocked(channel):
                self._queue(sender).put(element)
            elif sender not in left and (not taken or _alike(element, taken[0])):
                channels.append(channel)
                taken.append(element)
            else:
                left.add(sender)
                self._senders.append(sender)
                self._elements.append(element)
        return channels, taken

    def _queue(self, sender: int) -> Queue:
        queue = self._queues.get(sender)
        if queue is None:
            queue = self._queues[sender] = Queue(self.channels[sender], capacity=CAPACITY)
            sending = self._log.sending[sender]
            sending.queues.append(queue)
            sending.on_queue(queue)
            self.on_queue(queue)
        return queue

    def _read_on(self) -> None:
        log = self._log
        if self._read < log.end:
            at = self._read - log.first
            self._senders += log.senders[at:]
            self._elements += log.elements[at:]
            self._read = log.end

    def _settle(self) -> None:
        """After something was taken, release log entries that are no longer needed."""
        if self._elements or self.taken == self._read:
            return
        self.taken = self._read
        if self.taken == self._log.end:
            self.awake = False
            self._log.asleep.append(self)
        if self._log.full:
            self._log.trim()


def _alike(element: ev.Element, other: ev.Element) -> bool:
    return type(element) is type(other) and (isinstance(element, ev.Watermark) or element == other)


def _all_alike(elements: Sequence[ev.Element], first: ev.Element) -> bool:
    count = len(elements)
    return [*map(type, elements)].count(type(first)) == count and (
        isinstance(first, ev.Watermark) or elements.count(first) == count
    )
