"""What a task hears: its edges and channels, how far time has come on each, and what of it has ended.

Theory of operation. Three ends are kept apart. A *channel's data* has ended with ``EndOfData``, drained or stopped; the channel
itself with ``EndOfPartition``. An *input* (one or more edges with the same index) has ended, in the sense of ``end_input``, when
the data of all its channels has ended drained. Time on an edge is the least of its channels', but never falls behind what a
checkpoint said; a channel whose data has drained, and an edge of which nobody sends any more, have come to the end of time. A
stopped channel stays where it was. Feedback channels have no time and no end.

What an end does to time is *released* at the next barrier, behind all records of the epoch, or when everything has drained. So which
records are late does not depend on whether the end of one channel came before or behind the records of another. ``by_epoch``: a task
that hears several channels releases all of its time so, watermarks too; for executors in which channels overtake one another
freely within an epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

from backends.dataflow.events import MAX_WATERMARK, MIN_WATERMARK, Channel, EndOfData

_HEAP_SLACK: Final = 64


class InputEdge(NamedTuple):
    """An edge into a task, as one subtask sees it.

    ``channels``: from the senders that run; none where the whole predecessor has finished. ``overtakable``: unaligned barriers pass
    what lies in its channels. ``inside``: not a feedback edge, but it comes from another vertex of the loop that this is a
    head of. ``watermark`` and ``ended``: what the restored checkpoint's ``progress`` says of it.
    """

    id: str
    input: int
    channels: tuple[Channel, ...]
    feedback: bool = False
    overtakable: bool = False
    inside: bool = False
    watermark: int = MIN_WATERMARK
    ended: bool = False


class _Least:
    """The least of the watermarks of an edge's channels. Each only rises; what one rise costs does not grow with their number."""

    def __init__(self, channels: int) -> None:
        self._counts = {MIN_WATERMARK: channels} if channels else {}
        self._heap = [*self._counts]
        """Every watermark that a channel is at, and some that none is at any more."""

    def rise(self, before: int, after: int) -> None:
        """One channel goes from a watermark to a greater one."""
        counts = self._counts
        counts[before] -= 1
        if not counts[before]:
            del counts[before]
        if after in counts:
            counts[after] += 1
            return
        counts[after] = 1
        heappush(self._heap, after)
        if len(self._heap) > 2 * len(counts) + _HEAP_SLACK:
            self._heap = sorted(counts)

    @property
    def watermark(self) -> int:
        """The least; the end of time where there is no channel."""
        heap = self._heap
        while heap and heap[0] not in self._counts:
            heappop(heap)
        return heap[0] if heap else MAX_WATERMARK


@dataclass(slots=True)
class _Heard:
    """What came on a channel. ``drained`` None: its data has not ended."""

    edge: InputEdge
    watermark: int = MIN_WATERMARK
    drained: bool | None = None
    gone: bool = False


class Inputs:
    """Everything that one task has heard."""

    def __init__(self, edges: Sequence[InputEdge], *, by_epoch: bool = False) -> None:
        self.edges = tuple(edge for edge in edges if not edge.feedback)
        self.feedback = tuple(edge for edge in edges if edge.feedback)
        self.channels = tuple(channel for edge in self.edges for channel in edge.channels)
        """Those that count, in order of edges: without feedback."""
        self._heard = {channel: _Heard(edge) for edge in edges for channel in edge.channels}
        self._least = {edge.id: _Least(len(edge.channels)) for edge in self.edges}
        self._undrained = Counter({edge.id: len(edge.channels) for edge in edges})
        self._numbers = sorted({edge.input for edge in self.edges})
        self._silent: dict[Channel, None] = {}
        self._by_epoch = by_epoch and len(self.channels) > 1
        self._held: dict[Channel, int] = {}
        """How far channels have come whose time has not been released."""
        self._present = len(self.channels)
        self.ended = {edge.input for edge in self.edges} - {edge.input for edge in self.edges if not edge.ended}
        """Inputs of which ``end_input`` was called, before the checkpoint or since."""

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._heard

    @property
    def are_none(self) -> bool:
        """Whether there is no edge at all: a source."""
        return not self.edges and not self.feedback

    def is_feedback(self, channel: Channel) -> bool:
        """Whether a channel belongs to a feedback edge."""
        return self._heard[channel].edge.feedback

    def is_overtakable(self, channel: Channel) -> bool:
        """Whether an unaligned barrier passes what lies in a channel."""
        return self._heard[channel].edge.overtakable

    # What comes ---------------------------------------------------------------------------------------------------------

    def advance(self, channel: Channel, timestamp: int) -> None:
        """A watermark came. One that falls back has no effect."""
        if self._by_epoch:
            self._held[channel] = max(self._held.get(channel, timestamp), timestamp)
        else:
            self._advance(channel, timestamp)

    def _advance(self, channel: Channel, timestamp: int) -> None:
        heard = self._heard[channel]
        if timestamp > heard.watermark and not heard.edge.feedback:
            self._least[heard.edge.id].rise(heard.watermark, timestamp)
            heard.watermark = timestamp

    def release_time(self) -> None:
        """All records of the epoch have come: what ended in it holds time up no longer."""
        for channel, timestamp in self._held.items():
            self._advance(channel, timestamp)
        self._held.clear()

    def end_data(self, channel: Channel, element: EndOfData) -> None:
        """The data of a channel has ended."""
        heard = self._heard[channel]
        heard.drained = element.drain
        if element.drain:
            self._undrained[heard.edge.id] -= 1
            self._held[channel] = MAX_WATERMARK
        if not heard.edge.feedback:
            self._silent[channel] = None

    def end_partition(self, channel: Channel) -> None:
        """A channel has ended."""
        heard = self._heard[channel]
        heard.gone = True
        self._present -= not heard.edge.feedback

    # What follows from it -----------------------------------------------------------------------------------------------

    def data_has_ended(self, channel: Channel) -> bool:
        """Whether no record may follow on a channel."""
        return self._heard[channel].drained is not None

    def is_gone(self, channel: Channel) -> bool:
        """Whether nothing may follow on a channel."""
        return self._heard[channel].gone

    @property
    def silent(self) -> Collection[Channel]:
        """Channels whose data has ended."""
        return self._silent.keys()

    @property
    def all_data_ended(self) -> bool:
        """Whether no record will come, drained or stopped."""
        return len(self._silent) == len(self.channels)

    @property
    def all_gone(self) -> bool:
        """Whether every sender has left."""
        return not self._present

    def drained(self, edges: Sequence[InputEdge]) -> bool:
        """Whether the data of all channels of these edges has ended, drained."""
        return not any(self._undrained[edge.id] for edge in edges)

    @property
    def drained_inputs(self) -> list[int]:
        """Inputs that have ended drained, in order."""
        running = {edge.input for edge in self.edges if self._undrained[edge.id]}
        return [number for number in self._numbers if number not in running]

    def watermark_of(self, edge: InputEdge) -> int:
        """How far time has come on an edge."""
        return max(edge.watermark, self._least[edge.id].watermark)

    @property
    def watermark(self) -> int:
        """How far time has come on all edges."""
        return min((self.watermark_of(edge) for edge in self.edges), default=MIN_WATERMARK)

    @property
    def restored_watermark(self) -> int:
        """How far it had come at the restored checkpoint."""
        return min((edge.watermark for edge in self.edges), default=MIN_WATERMARK)
