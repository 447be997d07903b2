"""The loop buffer of a head: what is fed back between a checkpoint's barrier and its return.

A feedback channel does not count for alignment, watermarks or ends. Records inside the loop when a
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

from collections.abc import Collection, Iterable

import pyarrow as pa

from ..events import Barrier, BarrierKind, Channel, LogRecords, Process, TaskCommand


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
