"""The channels between tasks of one process, and which of them a task may take from now.

A channel is a :class:`Queue`. On a *wide* edge, what a sender sends to all receivers is stored
once, not once per receiver (:class:`EdgeLog`).

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

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

import pyarrow as pa

from stateformat.errors import ErrorKind

from ..dataflow import events as ev
from ..dataflow.chained_operator import FailsAgain
from ..dataflow.task import Task

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


class Outputs:
    """The output channels of one task, by edge: queues, or the task's end of a wide edge.

    ``overtaken``: edges on which unaligned barriers overtake records; ``announce`` tells receivers
    of such a barrier. ``on_room`` is called when a full channel has room again.
    """

    def __init__(
        self,
        queues: Mapping[str, Sequence[Queue]],
        wide: Mapping[str, SendingEnd],
        *,
        overtaken: Collection[str],
        announce: Callable[[ev.Channel, ev.Barrier], object],
        on_room: Callable[[], object],
    ) -> None:
        self._queues = queues
        self._wide = wide
        self._overtaken = overtaken
        self._announce = announce
        self._on_room = on_room
        self._filled: dict[Queue | EdgeLog, None] = {}
        self.queue_to: dict[str, Callable[[int], Queue]] = {
            edge: {queue.channel.receiver: queue for queue in some}.__getitem__ for edge, some in queues.items()
        }
        """By edge, the queue to a receiver, for records."""
        self._calls = self._fill, self._make_room  # Made once, as there may be very many queues.
        for some in queues.values():
            for queue in some:
                self._watch(queue)
        for edge, end in wide.items():
            end.on_queue, (end.on_full, end.on_room) = self._watch, self._calls
            self.queue_to[edge] = end.queue_to

    @property
    def full(self) -> bool:
        """Whether some channel may have no room for what the task would emit."""
        return bool(self._filled)

    def put(self, element: ev.Element) -> None:
        """Put an element other than records into all channels."""
        for edge, queues in self._queues.items():
            self._put(edge, queues, element)
        for edge, end in self._wide.items():
            if isinstance(element, ev.Barrier) and element.unaligned and edge in self._overtaken:
                self._put(edge, [end.queue_to(channel.receiver) for channel in end.channels], element)
                continue
            end.tell(element)
            if isinstance(element, ev.Barrier):
                _end_logs(end.queues, element.number)

    def _put(self, edge: str, queues: Sequence[Queue], element: ev.Element) -> None:
        for queue in queues:
            queue.put(element)
        if isinstance(element, ev.Barrier):
            _end_logs(queues, element.number)
            if element.unaligned and edge in self._overtaken:
                for queue in queues:
                    self._announce(queue.channel, element)

    def _watch(self, queue: Queue) -> None:
        queue.on_full, queue.on_room = self._calls

    def _fill(self, full: Queue | EdgeLog) -> None:
        self._filled[full] = None

    def _make_room(self, full: Queue | EdgeLog) -> None:
        self._filled.pop(full, None)
        self._on_room()


def _end_logs(queues: Iterable[Queue], number: int) -> None:
    """End logging: what follows a barrier does not belong to the epoch before it.

    The barrier of an aborted checkpoint may come late. It does not end a later checkpoint's log.
    """
    for queue in queues:
        if queue.logged_for == number:
            queue.logged_for = None


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
