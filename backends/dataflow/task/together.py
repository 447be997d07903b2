"""Handle equal elements of many channels in one step: a wide task gets a barrier per channel.

Theory of operation. Among equal elements of several channels, all but the last usually change only
what the inputs and the alignment know; the consequences follow from the last. So the others are
noted at once, and the last one is handled as if it had come alone. If this is not certain, each is
handled alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .. import events as ev
from ..events import Channel, TaskCommand
from .alignment import Alignment
from .inputs import Inputs
from .loop_buffer import LoopBuffer
from .states import LEGAL, TaskStateMachine, kind_of


class _Handles(Protocol):
    """A task, as it is used here."""

    @property
    def releases(self) -> int: ...

    def handle(self, event: ev.TaskEvent) -> list[TaskCommand]: ...


class Together:
    """Handles equal elements of several channels of one task."""

    def __init__(
        self,
        task: _Handles,
        machine: TaskStateMachine,
        inputs: Inputs,
        alignment: Alignment,
        loop: LoopBuffer,
        unprocessed: set[Channel],
    ) -> None:
        self._task = task
        self._machine = machine
        self._inputs = inputs
        self._alignment = alignment
        self._loop = loop
        self._unprocessed = unprocessed

    def blocks_any(self, channels: Sequence[Channel]) -> bool:
        """Return whether any of these channels may be blocked; False is certain."""
        aligned = self._alignment.blocked
        return bool(self._loop.blocked or (aligned and not aligned.isdisjoint(channels)))

    def processed(self, channels: Sequence[Channel]) -> list[TaskCommand]:
        """As ``handle`` with a ``DataProcessed`` for each of these output channels."""
        self._unprocessed.difference_update(channels[1:])
        return self._task.handle(ev.DataProcessed(channels[0]))

    def receive(self, channels: Sequence[Channel], elements: Sequence[ev.Element]) -> list[TaskCommand]:
        """As ``handle`` for one element from each of these channels of one edge, in turn: all
        watermarks, or all the same barrier, end of data or end of partition.

        For watermarks only the last outcome is emitted.
        """
        commands: list[TaskCommand] = []
        first, middle, last = 0, channels[:-1], len(channels) - 1
        if self._may_come(channels, elements[0]):
            state, releases = self._machine.state, self._task.releases
            if isinstance(elements[0], ev.Barrier):
                # The first one may begin a checkpoint, or end another.
                commands += self._task.handle(ev.Received(channels[0], elements[0]))
                first, middle = 1, channels[1:-1]
            unchanged = self._machine.state is state and self._task.releases == releases
            if unchanged and self._receive_quietly(middle, elements, channels[-1]):
                if isinstance(elements[0], ev.EndOfData):
                    commands.append(ev.ConfirmAllProcessed(tuple(middle)))
                first = last
        for channel, element in zip(channels[first:], elements[first:], strict=True):
            commands += self._task.handle(ev.Received(channel, element))
        return commands

    def _may_come(self, channels: Sequence[Channel], element: ev.Element) -> bool:
        """Return whether the element is legal on each channel now. If not, the guard says why."""
        inputs = self._inputs
        if not inputs.has_all(channels) or inputs.is_feedback(channels[0]) or self.blocks_any(channels):
            return False
        if kind_of(ev.Received(channels[0], element), feedback=False) not in LEGAL[self._machine.state]:
            return False
        ends = None if isinstance(element, ev.Barrier) else isinstance(element, ev.EndOfPartition)
        return inputs.all_may_bring(channels, ended=ends)

    def _receive_quietly(self, middle: Sequence[Channel], elements: Sequence[ev.Element], last: Channel) -> bool:
        """Take the elements of all but the last channel, if nothing becomes due before that comes.

        False: something may become due, and nothing has changed.
        """
        match elements[0]:
            case ev.Watermark():
                for channel, element in zip(middle, elements, strict=False):
                    assert isinstance(element, ev.Watermark)
                    self._inputs.advance(channel, element.timestamp)
                return True
            case ev.Barrier() as barrier:
                return self._alignment.receive_all(middle, barrier, last)
            case ev.EndOfData(drain) if drain:
                self._inputs.drain_all(middle)
                return True
            case ev.EndOfPartition() if self._alignment.current is None:
                self._inputs.end_partitions(middle)
                self._alignment.end_all(middle)
                return True
        return False
