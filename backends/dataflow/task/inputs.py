"""The inputs of a task: edges, channels, their watermarks, and which have ended.

Three ends are kept apart. The *data* of a channel ends with ``EndOfData``, drained or stopped; the
*channel* ends with ``EndOfPartition``; an *input* (one or more edges with the same index) ends, in
the sense of ``end_input``, when the data of all its channels has ended drained.

The watermark of an edge is the least of its channels', but never less than what the restored
checkpoint said. A channel whose data has drained, and an edge without senders, are at the end of
time. A stopped channel stays where it was. Feedback channels have no watermark and no end.

An idle channel does not hold back time: it is ignored as long as another one, of any edge, is
neither idle nor drained. If there is no other, the greatest watermark of the idle ones counts,
whatever the order in which they became idle. So the watermark of the inputs goes back when a
channel that is behind becomes active again; that of the task stays.

The end of a channel advances time only at the next barrier, after all records of the epoch, or
when everything has drained (:meth:`Inputs.release_time`). So which records are late does not depend
on how channels interleave. ``by_epoch``: watermarks of a task with several channels are released
the same way, for executors that reorder channels within an epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from ..events import MAX_WATERMARK, MIN_WATERMARK, Channel, EndOfData

_HEAP_SLACK: Final = 64


class InputEdge(NamedTuple):
    """An edge into a task, as one subtask sees it."""

    id: str
    input: int
    channels: tuple[Channel, ...]
    """From the senders that run; none if the whole predecessor has finished."""
    feedback: bool = False
    overtakable: bool = False
    """Unaligned barriers overtake what is in its channels."""
    inside: bool = False
    """Not a feedback edge, but an edge from another vertex of the loop that this task heads."""
    watermark: int = MIN_WATERMARK
    """As the restored checkpoint's ``progress`` says, like ``ended``."""
    ended: bool = False


class _LeastWatermark:
    """The lowest watermark of an edge's channels. A rise costs the same however many there are."""

    def __init__(self, channels: int) -> None:
        self._counts = {MIN_WATERMARK: channels} if channels else {}
        self._heap = [*self._counts]
        """Every channel's watermark, and some that no channel has any more."""

    def rise(self, before: int, after: int, channels: int = 1) -> None:
        """Raise this many channels from one watermark to a greater one."""
        counts = self._counts
        counts[before] -= channels
        if not counts[before]:
            del counts[before]
        if after in counts:
            counts[after] += channels
            return
        counts[after] = channels
        heappush(self._heap, after)
        if len(self._heap) > 2 * len(counts) + _HEAP_SLACK:
            self._heap = sorted(counts)

    def leave(self, watermark: int) -> None:
        """Stop counting a channel at this watermark."""
        self._counts[watermark] -= 1
        if not self._counts[watermark]:
            del self._counts[watermark]

    def join(self, watermark: int) -> None:
        """Count a channel at this watermark again."""
        if watermark not in self._counts:
            heappush(self._heap, watermark)
        self._counts[watermark] = self._counts.get(watermark, 0) + 1

    @property
    def watermark(self) -> int:
        """The lowest watermark; the end of time if there is no channel."""
        heap = self._heap
        while heap and heap[0] not in self._counts:
            heappop(heap)
        return heap[0] if heap else MAX_WATERMARK


class Inputs:
    """What one task has received from its inputs."""

    def __init__(self, edges: Sequence[InputEdge], *, by_epoch: bool = False) -> None:
        self.edges = tuple(edge for edge in edges if not edge.feedback)
        self.feedback = tuple(edge for edge in edges if edge.feedback)
        self.channels = tuple(channel for edge in self.edges for channel in edge.channels)
        """Those of ``edges``, in order, so without feedback."""
        self._edges = {edge.id: edge for edge in edges}
        # Not one object per channel: there may be very many, and Python's garbage collector would
        # visit each of them.
        self._watermarks = dict.fromkeys((channel for edge in edges for channel in edge.channels), MIN_WATERMARK)
        self._drained: dict[Channel, bool] = {}
        """Channels whose data has ended, drained or not."""
        self._gone: set[Channel] = set()
        self._least = {edge.id: _LeastWatermark(len(edge.channels)) for edge in self.edges}
        self._undrained = Counter({edge.id: len(edge.channels) for edge in edges})
        self._numbers = sorted({edge.input for edge in self.edges})
        self._data_ended: dict[Channel, None] = {}
        self._by_epoch = by_epoch and len(self.channels) > 1
        self._unreleased: dict[Channel, int] = {}
        """Watermarks of channels that do not count before :meth:`release_time`."""
        self._unreleased_ends: dict[str, list[Channel]] = {}
        """By edge, channels whose data has ended, drained, and whose time ends with
        :meth:`release_time`.
        """
        self._unreleased_idle: dict[Channel, bool] = {}
        """The same for channels that become idle or active."""
        self._idle: dict[str, dict[Channel, None]] = {}
        """The idle channels, by edge."""
        self._present = len(self.channels)
        self.ended = {edge.input for edge in self.edges} - {edge.input for edge in self.edges if not edge.ended}
        """Inputs whose ``end_input`` was called, before the checkpoint or since."""

    def __contains__(self, channel: Channel) -> bool:
        return channel in self._watermarks

    @property
    def are_none(self) -> bool:
        """Whether there is no edge at all: a source."""
        return not self.edges and not self.feedback

    def is_feedback(self, channel: Channel) -> bool:
        """Return whether a channel belongs to a feedback edge."""
        return self._edges[channel.edge].feedback

    def is_overtakable(self, channel: Channel) -> bool:
        """Return whether an unaligned barrier overtakes what is in a channel."""
        return self._edges[channel.edge].overtakable

    # What comes -----------------------------------------------------------------------------------

    def advance(self, channel: Channel, timestamp: int) -> None:
        """Take a watermark. One lower than before has no effect."""
        if self._by_epoch:
            self._unreleased[channel] = max(self._unreleased.get(channel, timestamp), timestamp)
        else:
            self._advance(channel, timestamp)

    def _advance(self, channel: Channel, timestamp: int) -> None:
        before, edge = self._watermarks[channel], self._edges[channel.edge]
        if timestamp > before and not edge.feedback:
            self._watermarks[channel] = timestamp
            if self._is_idle(channel):
                if timestamp < MAX_WATERMARK:
                    return
                self._hold_again(channel, before)  # Its data has ended.
            self._least[edge.id].rise(before, timestamp)

    def set_idle(self, channel: Channel, idle: bool) -> None:
        """Note that a channel has become idle, or is active again."""
        if self._by_epoch:
            self._unreleased_idle[channel] = idle
        else:
            self._set_idle(channel, idle=idle)

    def _is_idle(self, channel: Channel) -> bool:
        return bool(self._idle) and channel in self._idle.get(channel.edge, ())

    def _set_idle(self, channel: Channel, *, idle: bool) -> None:
        watermark = self._watermarks[channel]
        if self._is_idle(channel) == idle or self.is_feedback(channel) or watermark == MAX_WATERMARK:
            return
        if idle:
            self._least[channel.edge].leave(watermark)
            self._idle.setdefault(channel.edge, {})[channel] = None
        else:
            self._hold_again(channel, watermark)

    def _hold_again(self, channel: Channel, watermark: int) -> None:
        """Note that a channel is no longer idle: it holds back time at this watermark."""
        self._least[channel.edge].join(watermark)
        del self._idle[channel.edge][channel]
        if not self._idle[channel.edge]:
            del self._idle[channel.edge]

    def release_time(self) -> None:
        """Note that all records of the epoch have come: let time advance past what ended in it."""
        for channel, idle in self._unreleased_idle.items():
            self._set_idle(channel, idle=idle)
        self._unreleased_idle.clear()
        for channel, timestamp in self._unreleased.items():
            self._advance(channel, timestamp)
        self._unreleased.clear()
        for edge_id, channels in self._unreleased_ends.items():
            self._end_time(self._edges[edge_id], channels)
        self._unreleased_ends.clear()

    def _end_time(self, edge: InputEdge, channels: Sequence[Channel]) -> None:
        """As :meth:`_advance` for channels, to the end of time."""
        if edge.id in self._idle:
            for channel in channels:
                self._advance(channel, MAX_WATERMARK)
            return
        for before, count in Counter(map(self._watermarks.__getitem__, channels)).items():
            if before < MAX_WATERMARK:
                self._least[edge.id].rise(before, MAX_WATERMARK, count)
        self._watermarks.update(dict.fromkeys(channels, MAX_WATERMARK))

    def end_data(self, channel: Channel, element: EndOfData) -> None:
        """Note that the data of a channel has ended."""
        self._drained[channel] = element.drain
        feedback = self._edges[channel.edge].feedback
        if element.drain:
            self._undrained[channel.edge] -= 1
            if not feedback:
                self._unreleased_ends.setdefault(channel.edge, []).append(channel)
        if not feedback:
            self._data_ended[channel] = None

    def end_partition(self, channel: Channel) -> None:
        """Note that a channel has ended."""
        self._gone.add(channel)
        self._present -= not self._edges[channel.edge].feedback

    def has_all(self, channels: Collection[Channel]) -> bool:
        """Return whether all these are channels of the task."""
        return all(map(self._watermarks.__contains__, channels))

    def all_may_bring(self, channels: Collection[Channel], *, ended: bool | None) -> bool:
        """Return whether these channels may bring something.

        ``ended``: after the end of their data, or before it.
        """
        if self._gone and not self._gone.isdisjoint(channels):
            return False
        if ended is None:
            return True
        if ended:
            return all(map(self._drained.__contains__, channels))
        return not self._drained or self._drained.keys().isdisjoint(channels)

    def drain_all(self, channels: Sequence[Channel]) -> None:
        """As :meth:`end_data`, drained, for channels of one edge that is not a feedback edge."""
        self._drained.update(dict.fromkeys(channels, True))
        self._data_ended.update(dict.fromkeys(channels))
        if channels:
            self._undrained[channels[0].edge] -= len(channels)
            self._unreleased_ends.setdefault(channels[0].edge, []).extend(channels)

    def end_partitions(self, channels: Sequence[Channel]) -> None:
        """As :meth:`end_partition`, for channels of one edge that is not a feedback edge."""
        self._gone.update(channels)
        self._present -= len(channels)

    # What follows from it -------------------------------------------------------------------------

    def data_has_ended(self, channel: Channel) -> bool:
        """Return whether no record may follow on a channel."""
        return channel in self._drained

    def is_gone(self, channel: Channel) -> bool:
        """Return whether nothing may follow on a channel."""
        return channel in self._gone

    @property
    def data_ended(self) -> Collection[Channel]:
        """Channels whose data has ended."""
        return self._data_ended.keys()

    @property
    def all_data_ended(self) -> bool:
        """Whether no record will come, drained or stopped."""
        return len(self._data_ended) == len(self.channels)

    @property
    def all_gone(self) -> bool:
        """Whether every sender has left."""
        return not self._present

    def drained(self, edges: Sequence[InputEdge]) -> bool:
        """Return whether the data of all channels of these edges has ended, drained."""
        return not any(self._undrained[edge.id] for edge in edges)

    @property
    def drained_inputs(self) -> list[int]:
        """Inputs that have ended drained, in order."""
        running = {edge.input for edge in self.edges if self._undrained[edge.id]}
        return [number for number in self._numbers if number not in running]

    def watermark_of(self, edge: InputEdge) -> int:
        """Return the watermark of an edge."""
        least = self._least[edge.id].watermark
        if least == MAX_WATERMARK and edge.id in self._idle:
            least = max(self._watermarks[channel] for channel in self._idle[edge.id])
        return max(edge.watermark, least)

    def _holds(self, edge: InputEdge) -> bool:
        return self._least[edge.id].watermark < MAX_WATERMARK

    @property
    def idle(self) -> bool:
        """Whether no input holds back time, and not all have ended."""
        return bool(self._idle) and not any(self._holds(edge) for edge in self.edges)

    @property
    def watermark(self) -> int:
        """The lowest watermark of all edges."""
        if not self._idle:
            return min((self.watermark_of(edge) for edge in self.edges), default=MIN_WATERMARK)
        holding = [self.watermark_of(edge) for edge in self.edges if self._holds(edge)]
        if holding:
            return min(holding)
        return max(self.watermark_of(edge) for edge in self.edges if edge.id in self._idle)

    @property
    def restored_watermark(self) -> int:
        """The lowest watermark of all edges at the restored checkpoint."""
        return min((edge.watermark for edge in self.edges), default=MIN_WATERMARK)
