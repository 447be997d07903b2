"""Channels: queues between two tasks of one process, and the tasks of a run with their channels."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from stateformat.errors import ErrorKind
from stateformat.graph import Edge

from ..dataflow import events as ev
from ..dataflow.chain import FailsAgain
from ..dataflow.graph import Job, Vertex, loops_of
from ..dataflow.task import InputEdge, Task
from .restore import Restored

CAPACITY = 8
"""Elements that a channel holds before its sender waits.

Feedback channels have no limit, so that loops turn.
"""


_LOOKS_A_STEP, _LOOKS_A_FIND, _WORTH_MAX = 8, 16, 1 << 16
"""Looks at heads of channels that a step may cost, and those that cost as much as a step saved."""


class LoopFill:
    """How much was fed back to one subtask of a loop's head, and waits there.

    Nothing may hold a loop up, or it would wait for itself. So what is fed back always has room,
    and from half of ``bytes_max`` on it goes before what comes from outside. A loop that grows all
    the same feeds back more than it takes in: with more than ``bytes_max`` it fails.
    """

    def __init__(self, head: ev.TaskId, bytes_max: int) -> None:
        self._head = head
        self._bytes_max = bytes_max
        self.size_bytes = 0

    @property
    def presses(self) -> bool:
        """Whether the head is to take nothing but what was fed back."""
        return 2 * self.size_bytes > self._bytes_max

    def add(self, batch: pa.RecordBatch) -> None:
        """Raises ``FailsAgain`` of kind ``LIMIT_EXCEEDED`` if that is too much."""
        self.size_bytes += _size_of(batch)
        if self.size_bytes > self._bytes_max:
            raise FailsAgain(
                f"more than {self._bytes_max:,} bytes of records wait to go round the loop of operator "
                f"{self._head.vertex!r} (subtask {self._head.subtask}): the loop feeds back more than it lets go. Let "
                "each record leave it in the end, or raise loop_bytes_max",
                kind=ErrorKind.LIMIT_EXCEEDED,
                operator=self._head.vertex,
            )

    def remove(self, batch: pa.RecordBatch) -> None:
        self.size_bytes -= _size_of(batch)


def _size_of(batch: pa.RecordBatch) -> int:
    """Bytes of a batch; many of one row take more than their rows do."""
    return int(batch.nbytes) + 1024


def _ignore(_: Queue) -> None:
    pass


class Queue:
    """One channel: first in, first out. It calls back when it becomes full or empty or stops so."""

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
        """Of a feedback channel, that of its head."""
        self.capacity = capacity
        # Few elements lie in a list, of which a new one is much smaller: channels may be very many.
        self.elements: list[ev.Element] | deque[ev.Element] = deque() if capacity is None else []
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
        """Looks at channels that have paid, or are still to pay where it is below zero."""
        self._releases = task.releases
        self.fill: LoopFill | None = None
        """Of the head of a loop."""

    def add(self, queue: Queue) -> bool:
        """Returns whether it is the only one that may be open, so that the task may have become
        ready.
        """
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
        self._check_releases()
        while self._open:
            if not self._task.is_blocked(self._open[-1].channel):
                return True
            self._put_aside(self._open[-1])
        return False

    def draw(self, choose: random.Random) -> Queue:
        """One of the open channels, each with the same chance; of a loop that presses, its own."""
        self._check_releases()
        if self.fill is not None and self.fill.presses:
            fed = [each for each in self._open if each.fill is not None and not self._task.is_blocked(each.channel)]
            if fed:
                return fed[int(choose.random() * len(fed))]
        while True:
            queue = self._open[int(choose.random() * len(self._open))]
            if not self._task.is_blocked(queue.channel):
                return queue
            self._put_aside(queue)

    def take_alike(self, drawn: Queue, element: ev.Element) -> tuple[list[ev.Channel], list[ev.Element]]:
        """Take what is like an element that was drawn, no records, from the heads of the other open
        channels of its edge: all watermarks, or the same barrier or end.

        Looks at all channels, but not where that has found too little of late.
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
        # As get() does, but for the channels that are empty now.
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


class TaskChannels(NamedTuple):
    """One task with its channels by edge, in the order of the vertex's edges."""

    vertex: Vertex
    core: Task
    inputs: Mapping[str, tuple[ev.Channel, ...]]
    """Channels from tasks that run, feedback too."""
    outputs: Mapping[str, tuple[ev.Channel, ...]]
    """Channels to tasks that run."""


def tasks_of(restored: Restored, *, by_epoch: bool = False) -> Iterator[TaskChannels]:
    """The tasks that a run starts: all but those of finished vertices.

    ``by_epoch``: see :class:`Task`.
    """
    job = restored.job
    loops = loops_of(job.vertices)
    # Both ends of a channel have the same object: there may be very many.
    known = {
        edge.id: _channels_of(job, edge)
        for edge in job.graph.edges
        if restored.finished.isdisjoint((job.vertex_of(edge.source).id, job.vertex_of(edge.target).id))
    }
    for vertex in job.vertices:
        if vertex.id in restored.finished:
            continue
        for subtask in range(vertex.parallelism):
            inputs = {
                edge.id: known[edge.id][1][subtask] if edge.id in known else ()
                for edge in (*vertex.inputs, *vertex.feedback)
            }
            outputs = {edge.id: known[edge.id][0][subtask] for edge in vertex.outputs if edge.id in known}
            edges = _input_edges(restored, vertex, subtask, inputs, loops)
            channels = [channel for some in outputs.values() for channel in some]
            replayed = bool(restored.in_flight(vertex, subtask))
            asks = job.graph.operator(vertex.id).coordinator and not vertex.is_source
            core = Task(ev.TaskId(vertex.id, subtask), edges, channels, replayed=replayed, asks=asks, by_epoch=by_epoch)
            yield TaskChannels(vertex, core, inputs, outputs)


def _channels_of(job: Job, edge: Edge) -> tuple[list[tuple[ev.Channel, ...]], list[tuple[ev.Channel, ...]]]:
    """The channels of an edge by sender, and by receiver, each in order."""
    senders, receivers = (job.graph.operator(uid).parallelism for uid in (edge.source, edge.target))
    leaving = [
        tuple(ev.Channel(edge.id, sender, receiver) for receiver in job.receivers(edge.id, sender))
        for sender in range(senders)
    ]
    arriving: list[list[ev.Channel]] = [[] for _ in range(receivers)]
    for some in leaving:
        for channel in some:
            arriving[channel.receiver].append(channel)
    return leaving, [tuple(some) for some in arriving]


def _input_edges(
    restored: Restored,
    vertex: Vertex,
    subtask: int,
    inputs: Mapping[str, tuple[ev.Channel, ...]],
    loops: Sequence[frozenset[str]],
) -> list[InputEdge]:
    watermarks, ended = restored.progress(vertex, subtask)
    return [
        InputEdge(
            edge.id,
            edge.input,
            inputs[edge.id],
            feedback=edge.feedback,
            overtakable=restored.job.overtakable(edge),
            inside=not edge.feedback and _in_one_loop(restored.job, vertex, edge, loops),
            watermark=watermarks.get(edge.id, ev.MIN_WATERMARK),
            ended=edge.id in ended,
        )
        for edge in (*vertex.inputs, *vertex.feedback)
    ]


def _in_one_loop(job: Job, head: Vertex, edge: Edge, loops: Sequence[frozenset[str]]) -> bool:
    source = job.vertex_of(edge.source).id
    return bool(head.feedback) and any(head.id in loop and source in loop for loop in loops)


def sender_of(job: Job, channel: ev.Channel) -> ev.TaskId:
    """The task that sends on a channel."""
    return ev.TaskId(job.vertex_of(job.graph.by_edge[channel.edge].source).id, channel.sender)


def receiver_of(job: Job, channel: ev.Channel) -> ev.TaskId:
    """The task that a channel leads to."""
    return ev.TaskId(job.vertex_of(job.graph.by_edge[channel.edge].target).id, channel.receiver)
