"""Alignment: when a task takes its snapshot, what it logs, and when the snapshot is whole.

Theory of operation.

1. At most one checkpoint is in flight. Only a barrier or a direct trigger begins one; what it *needs* are the channels that are
   open then. A channel is open until its ``EndOfPartition``; one that ended before is not needed, one that ends while the
   checkpoint is pending is *in*. In is a set: a barrier and an end of one channel count once.
2. Aligned: the snapshot is due when all needed channels are in. A channel whose barrier was consumed is blocked until then. A
   direct trigger blocks nothing: the senders are gone, so what still lies in the open channels comes, and then their end. It is
   ``EndOfPartition`` that counts and not ``EndOfData``: a sender that has not left puts its barrier behind its data, so the
   first alone says that no barrier of this number is on its way.
3. Unaligned: channels that may not be overtaken are aligned as above. The snapshot is due when these are in. Of each other
   channel what lies in it is logged; if its barrier has been put into it already (announced), or its sender is gone (direct
   trigger), that is all, else what arrives until its barrier or its end is logged too. Nothing is logged of a channel whose data
   has ended: no record follows.
4. The snapshot is whole, and acknowledged, when no channel is logged any more.
5. A checkpoint that began aligned may turn unaligned, once: when its barrier, or a direct trigger, comes as unaligned. What was in
   stays in; the rest goes on as in 3.
6. A higher number subsumes a pending one. Numbers up to one that was acknowledged, aborted or subsumed mean nothing any more:
   such barriers are consumed and do nothing, also when the abort came before them.

Feedback channels are not known here; see ``iteration.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from backends.dataflow.events import Barrier, Channel, LogQueued, StopLog, TaskCommand


@dataclass
class Pending:
    """The checkpoint in flight. ``needed`` in the order of the task's channels."""

    barrier: Barrier
    needed: tuple[Channel, ...]
    lacking: set[Channel]
    """Channels that must be in before the snapshot is taken, and are not."""
    arrived: set[Channel] = field(default_factory=set)
    held_by_queue: set[Channel] = field(default_factory=set)
    """Channels of which everything that is to be logged lies in the channel already."""
    logging: set[Channel] = field(default_factory=set)
    taken: bool = False


class Alignment:
    """Which channels have delivered the barrier of the checkpoint in flight. ``overtakable``: those an unaligned one passes."""

    def __init__(self, channels: Iterable[Channel], overtakable: Collection[Channel]) -> None:
        self._open = dict.fromkeys(channels)
        self._overtakable = frozenset(overtakable)
        self.pending: Pending | None = None
        self.passed = -1
        """Barriers up to this number mean nothing any more."""
        self.blocked: set[Channel] = set()
        self.releases = 0
        """How often blocked channels were freed."""

    def counts(self, barrier: Barrier) -> bool:
        """Whether a barrier means anything: it belongs to the pending checkpoint, or begins one."""
        return barrier.number > self.passed and (self.pending is None or barrier.number >= self.pending.barrier.number)

    def subsumes(self, barrier: Barrier) -> int | None:
        """The number of the pending checkpoint that this barrier puts an end to."""
        pending = self.pending
        return pending.barrier.number if pending and barrier.number > pending.barrier.number else None

    def receive(self, channel: Channel, barrier: Barrier) -> list[TaskCommand]:
        """A barrier was consumed."""
        if not self.counts(barrier):
            return []
        pending = self._begin(barrier)
        pending.arrived.add(channel)
        pending.lacking.discard(channel)
        if not pending.taken:
            self.blocked.add(channel)
        return self._stop_logs(pending, channel)

    def announce(self, channel: Channel, barrier: Barrier) -> list[TaskCommand]:
        """An unaligned barrier was put into a channel, behind what lies in it."""
        if not self.counts(barrier):
            return []
        pending = self._begin(barrier)
        pending.held_by_queue.add(channel)
        return self._stop_logs(pending, channel)

    def trigger(self, barrier: Barrier) -> None:
        """The task is triggered directly. If barriers have begun the checkpoint, they will complete it. A second trigger of a
        checkpoint can only turn it unaligned.
        """
        if not self.counts(barrier):
            return
        begun = self.pending is not None
        pending = self._begin(barrier)
        if not begun:
            pending.held_by_queue.update(self._open)

    def end(self, channel: Channel) -> list[TaskCommand]:
        """A channel has ended: it is in, now and for every later checkpoint."""
        del self._open[channel]
        if self.pending is None:
            return []
        self.pending.arrived.add(channel)
        self.pending.lacking.discard(channel)
        return self._stop_logs(self.pending, channel)

    def abort(self, number: int) -> list[TaskCommand]:
        """Numbers up to this one mean nothing any more."""
        self.passed = max(self.passed, number)
        pending = self.pending
        if pending is None or pending.barrier.number > number:
            return []
        self.pending = None
        self._unblock()
        return self._stop_logs(pending, *pending.needed)

    @property
    def is_due(self) -> bool:
        """Whether the snapshot is to be taken now."""
        return self.pending is not None and not self.pending.taken and not self.pending.lacking

    def take(self, data_ended: Collection[Channel]) -> list[TaskCommand]:
        """The snapshot is taken: what is to be logged with it. All channels are free again."""
        pending = self.pending
        assert pending is not None
        pending.taken = True
        self._unblock()
        commands: list[TaskCommand] = []
        for channel in pending.needed:
            if channel in pending.arrived or channel in data_ended:
                continue
            arriving = channel not in pending.held_by_queue
            commands.append(LogQueued(channel, arriving=arriving))
            if arriving:
                pending.logging.add(channel)
        return commands

    @property
    def is_whole(self) -> bool:
        """Whether a snapshot was taken and nothing more is to be logged with it."""
        return self.pending is not None and self.pending.taken and not self.pending.logging

    def acknowledge(self) -> None:
        """The pending checkpoint was acknowledged: nothing is in flight."""
        assert self.pending is not None
        self.passed = self.pending.barrier.number
        self.pending = None

    def _begin(self, barrier: Barrier) -> Pending:
        if self.pending is None:
            self.pending = Pending(barrier, tuple(self._open), set(self._open))
        assert self.pending.barrier.number == barrier.number, "the older checkpoint is aborted first"
        if barrier.unaligned and not self.pending.taken:
            self.pending.barrier = barrier
            self.pending.lacking -= self._overtakable
        return self.pending

    def _unblock(self) -> None:
        if self.blocked:
            self.blocked.clear()
            self.releases += 1

    def _stop_logs(self, pending: Pending, *channels: Channel) -> list[TaskCommand]:
        stopped = [channel for channel in channels if channel in pending.logging]
        pending.logging.difference_update(stopped)
        return [StopLog(channel) for channel in stopped]
