"""The output channels of one task."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ...dataflow import events as ev
from .edge_log import EdgeLog, SendingEnd
from .queue import Queue


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
