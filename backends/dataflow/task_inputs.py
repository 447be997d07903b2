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

*Alignment* says when a task takes its snapshot, what it logs with it, and when the snapshot is
whole.

1. At most one checkpoint is in flight. A barrier or a direct trigger begins it. It needs the
   channels that are open then: those without an ``EndOfPartition``. A channel that ends meanwhile
   is *in*, like one that has brought the barrier.
2. Aligned: the snapshot is due when all needed channels are in. A channel whose barrier was
   consumed is blocked until then. A direct trigger blocks nothing: the senders have left, so all
   channels will end. ``EndOfData`` does not count, for a sender that has not left puts its barrier
   behind its data.
3. Unaligned: channels that may not be overtaken are aligned as above; then the snapshot is due. For
   every other channel the task logs what is in it, and what arrives until its barrier or its end.
   Nothing arrives if the barrier was already put into the channel (announced) or the sender has
   left. Nothing is logged for a channel whose data has ended.
4. The snapshot is whole, and acknowledged, when no channel is logged any more.
5. A checkpoint may become unaligned once, when its barrier or a trigger comes as unaligned. What
   was in stays in.
6. A higher number subsumes the checkpoint in flight. Numbers up to one that was acknowledged,
   aborted or subsumed are ignored: such barriers are consumed and do nothing.

Alignment knows no feedback channels.

*The loop buffer* of a head has what is fed back between a checkpoint's barrier and its return. A
feedback channel does not count for alignment, watermarks or ends. Records inside the loop when a
head takes its snapshot would be missing from all states. So the head logs each feedback channel
from its own snapshot until *that channel's* barrier, and processes the records as usual. Rules:

1. A channel may bring the barrier *before* the head's snapshot, if another head of the loop was
   faster. It is blocked until then. That cannot last: the snapshot waits for no feedback channel.
2. *Quiet*: nothing was logged for this barrier, and nothing was forwarded from feedback since the
   one before (replayed records count). When all heads are quiet at one aligned barrier, the loop is
   empty.
3. During a stop without drain, records are logged and *held*. They are processed if the stop is
   aborted.
4. The head does not wait for channels that have ended. When its logic has ended it logs and blocks
   none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

import pyarrow as pa

from .events import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    Barrier,
    BarrierKind,
    Channel,
    EndOfData,
    LogQueued,
    LogRecords,
    Process,
    StopLog,
    TaskCommand,
)


@dataclass
class BarrierAlignment:
    """How far the checkpoint in flight has come at one task."""

    barrier: Barrier
    needed: tuple[Channel, ...]
    """In the order of the task's channels."""
    lacking: set[Channel]
    """Channels that are not in yet but must be before the snapshot is taken."""
    arrived: set[Channel] = field(default_factory=set)
    """Channels that are in."""
    complete: set[Channel] = field(default_factory=set)
    """Channels that already hold everything to be logged from them."""
    logging: set[Channel] = field(default_factory=set)
    taken: bool = False


class Alignment:
    """Aligns the barriers of one task. Unaligned ones overtake the ``overtakable`` channels."""

    def __init__(self, channels: Iterable[Channel], overtakable: Collection[Channel]) -> None:
        self._open = dict.fromkeys(channels)
        self._overtakable = frozenset(overtakable)
        self.current: BarrierAlignment | None = None
        self.passed = -1
        """Barriers up to this number are ignored."""
        self.blocked: set[Channel] = set()
        self.releases = 0
        """How often blocked channels were freed."""

    def counts(self, barrier: Barrier) -> bool:
        """Return whether a barrier belongs to the checkpoint in flight, or begins one."""
        return barrier.number > self.passed and (self.current is None or barrier.number >= self.current.barrier.number)

    def subsumes(self, barrier: Barrier) -> int | None:
        """Return the number of the checkpoint in flight, if this barrier subsumes it."""
        current = self.current
        return current.barrier.number if current and barrier.number > current.barrier.number else None

    def receive(self, channel: Channel, barrier: Barrier) -> list[TaskCommand]:
        """Take a barrier that was consumed from a channel."""
        if not self.counts(barrier):
            return []
        current = self._begin(barrier)
        current.arrived.add(channel)
        current.lacking.discard(channel)
        if not current.taken:
            self.blocked.add(channel)
        return self._stop_logs(current, channel)

    def receive_all(self, channels: Sequence[Channel], barrier: Barrier, lacking: Channel) -> bool:
        """As :meth:`receive` for each channel's barrier, if no command follows from it.

        That is the case if the barrier is aligned, its checkpoint is in flight, and the channel
        ``lacking`` has not brought it yet. Otherwise returns False, and nothing has changed.
        """
        current = self.current
        if current is None or current.barrier != barrier or current.barrier.unaligned or current.taken:
            return False
        if lacking not in current.lacking:
            return False
        current.arrived.update(channels)
        current.lacking.difference_update(channels)
        self.blocked.update(channels)
        return True

    def end_all(self, channels: Iterable[Channel]) -> None:
        """As :meth:`end` for each channel, while no checkpoint is in flight."""
        for channel in channels:
            del self._open[channel]

    def announce(self, channel: Channel, barrier: Barrier) -> list[TaskCommand]:
        """Note that an unaligned barrier was put into a channel, after what is in it."""
        if not self.counts(barrier):
            return []
        current = self._begin(barrier)
        current.complete.add(channel)
        return self._stop_logs(current, channel)

    def trigger(self, barrier: Barrier) -> None:
        """Trigger the task directly: this begins a checkpoint, or makes one unaligned."""
        if not self.counts(barrier):
            return
        begun = self.current is not None
        current = self._begin(barrier)
        if not begun:
            current.complete.update(self._open)

    def end(self, channel: Channel) -> list[TaskCommand]:
        """End a channel: it is in, now and for every later checkpoint."""
        del self._open[channel]
        if self.current is None:
            return []
        self.current.arrived.add(channel)
        self.current.lacking.discard(channel)
        return self._stop_logs(self.current, channel)

    def abort(self, number: int) -> list[TaskCommand]:
        """Ignore numbers up to this one from now on."""
        self.passed = max(self.passed, number)
        current = self.current
        if current is None or current.barrier.number > number:
            return []
        self.current = None
        self._unblock()
        return self._stop_logs(current, *current.needed)

    @property
    def is_due(self) -> bool:
        """Whether the snapshot is to be taken now."""
        return self.current is not None and not self.current.taken and not self.current.lacking

    def take(self, data_ended: Collection[Channel]) -> list[TaskCommand]:
        """Note that the snapshot is taken: unblock all channels, return what to log with it."""
        current = self.current
        assert current is not None
        current.taken = True
        self._unblock()
        commands: list[TaskCommand] = []
        if current.arrived.issuperset(current.needed):
            return commands
        for channel in current.needed:
            if channel in current.arrived or channel in data_ended:
                continue
            arriving = channel not in current.complete
            commands.append(LogQueued(channel, arriving=arriving))
            if arriving:
                current.logging.add(channel)
        return commands

    @property
    def is_whole(self) -> bool:
        """Whether a snapshot was taken and nothing more is to be logged with it."""
        return self.current is not None and self.current.taken and not self.current.logging

    def acknowledge(self) -> None:
        """Note that the checkpoint was acknowledged: none is in flight."""
        assert self.current is not None
        self.passed = self.current.barrier.number
        self.current = None

    def _begin(self, barrier: Barrier) -> BarrierAlignment:
        if self.current is None:
            self.current = BarrierAlignment(barrier, tuple(self._open), set(self._open))
        assert self.current.barrier.number == barrier.number, "the older checkpoint is aborted first"
        if barrier.unaligned and not self.current.taken:
            self.current.barrier = barrier
            self.current.lacking -= self._overtakable
        return self.current

    def _unblock(self) -> None:
        if self.blocked:
            self.blocked.clear()
            self.releases += 1

    def _stop_logs(self, current: BarrierAlignment, *channels: Channel) -> list[TaskCommand]:
        stopped = [channel for channel in channels if channel in current.logging]
        current.logging.difference_update(stopped)
        return [StopLog(channel) for channel in stopped]


class LoopBuffer:
    """The feedback channels of one head. Without any, it is always whole and always quiet."""

    def __init__(self, channels: Iterable[Channel], *, replayed: bool) -> None:
        self._open = dict.fromkeys(channels)
        self._early: dict[Channel, int] = {}
        """Channels that have brought a barrier before the head's snapshot."""
        self._logging: set[Channel] = set()
        self._held: list[TaskCommand] = []
        self._number = -1
        self._writes = False
        self._forwarded = replayed
        self._logged = False
        self._was_forwarded = False
        self._over = False
        self.releases = 0
        """How often blocked channels were freed."""

    @property
    def blocked(self) -> Collection[Channel]:
        """Channels from which nothing may be delivered before the head's own snapshot."""
        return self._early

    @property
    def is_whole(self) -> bool:
        """Whether every channel has brought the barrier back, or ended."""
        return not self._logging

    @property
    def is_quiet(self) -> bool:
        """Whether the loop did nothing from the previous barrier to the return of this one."""
        return not self._logged and not self._was_forwarded

    def expects_barrier(self, channel: Channel) -> bool:
        """Return whether the barrier still has to come back on this channel."""
        return channel in self._logging

    def begin(self, barrier: Barrier) -> None:
        """Begin when the head takes its snapshot (or, in a round, passes the barrier on)."""
        self._number = barrier.number
        self._writes = barrier.purpose is not BarrierKind.ROUND
        self._was_forwarded, self._forwarded, self._logged = self._forwarded, False, False
        self._logging = {channel for channel in self._open if self._early.get(channel) != barrier.number}
        self._release(barrier.number)

    def receive(self, channel: Channel, batch: pa.RecordBatch, *, hold: bool) -> list[TaskCommand]:
        """Take records that were fed back. ``hold``: only log them."""
        commands: list[TaskCommand] = []
        if channel in self._logging:
            self._logged = True
            if self._writes:
                commands.append(LogRecords(channel, batch))
        if hold:
            self._held.append(Process(channel, batch))
        else:
            self._forwarded = True
            commands.append(Process(channel, batch))
        return commands

    def barrier(self, channel: Channel, number: int, *, passed: int) -> None:
        """Take a barrier that came back. ``passed``: numbers up to this one are ignored."""
        if number == self._number:
            self._logging.discard(channel)
        elif number > max(self._number, passed) and not self._over:
            self._early[channel] = number

    def end(self, channel: Channel) -> None:
        """Note that a channel has ended."""
        self._open.pop(channel, None)
        self._logging.discard(channel)

    def abort(self, number: int) -> list[TaskCommand]:
        """Abort numbers up to this one; return what was held, to be processed now."""
        self._release(number)
        if self._number > number:
            return []
        self._logging.clear()
        held, self._held = self._held, []
        self._forwarded = self._forwarded or bool(held)
        return held

    def close(self) -> None:
        """Note that the logic of the head has ended."""
        self._over = True
        self._release(max(self._early.values(), default=-1))
        self._logging.clear()

    def _release(self, number: int) -> None:
        early = {channel: brought for channel, brought in self._early.items() if brought > number}
        self.releases += len(early) < len(self._early)
        self._early = early


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
