"""Alignment: when a task takes its snapshot, what it logs with it, and when the snapshot is whole.

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

Feedback channels are not known here; see ``loop_buffer.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..events import Barrier, Channel, LogQueued, StopLog, TaskCommand


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
