"""Checks of whether an event is legal for a task now: by its state, channels and barrier numbers.

A task checks before anything changes, so a refused event leaves it as it was. The fault is always
in the executor, the coordinator, or an operator that emits into a loop that has ended.
"""

from __future__ import annotations

from .. import events as ev
from .alignment import Alignment
from .inputs import Inputs
from .loop_buffer import LoopBuffer
from .states import EventKind, TaskState, TaskStateMachine, kind_of

_OF_SOURCES = frozenset({EventKind.SOURCE_ADVANCED, EventKind.SOURCE_ENDED, EventKind.END_SOURCE})
# Tuples for ``isinstance``: making a union of types costs as much as all other checks together.
_ON_CHANNELS = (ev.Received, ev.Announced)
_DATA = (ev.Records, ev.Watermark, ev.Idle, ev.EndOfData)


class EventGuard:
    """Refuses events that are illegal for a task now. Changes nothing."""

    def __init__(self, machine: TaskStateMachine, inputs: Inputs, alignment: Alignment, loop: LoopBuffer) -> None:
        self._machine = machine
        self._inputs = inputs
        self._alignment = alignment
        self._loop = loop

    def check(self, event: ev.TaskEvent, *, stop: int | None, end_of_time_told: bool) -> EventKind:
        """Return the kind of an event. Raises ``InvalidInput`` if it is illegal now.

        ``stop``: the savepoint whose outcome the task awaits. ``end_of_time_told``: the task may
        send the end of time around its loop.
        """
        machine = self._machine
        channel = event.channel if isinstance(event, _ON_CHANNELS) else None
        if channel is not None and channel not in self._inputs:
            machine.refuse(event, "it has no such channel")
        kind = kind_of(event, feedback=channel is not None and self._inputs.is_feedback(channel))
        if kind is EventKind.FED_BACK and machine.state is TaskState.WAITING:
            machine.refuse(
                event,
                "its loop has ended. An operator of a loop may emit into it when timers fire at the end of time, but "
                "not in finish(), not in end_input() of what the head of the loop sends, and not in receive() of what "
                "answers these",
            )
        if kind in _OF_SOURCES and not self._inputs.are_none:
            machine.refuse(event, f"{kind.value} cannot happen to a task with inputs")
        machine.check(kind, event)
        if machine.state is TaskState.CANCELED:
            return kind
        if channel is not None:
            self._check_channel(event, channel)
        barrier = _barrier_of(event)
        if barrier is not None and kind is not EventKind.FEEDBACK_MARK:
            self._check_barrier(event, barrier, stop)
        if isinstance(event, ev.Completed):
            self._check_completed(event, end_of_time_told)
        return kind

    def _check_channel(self, event: ev.TaskEvent, channel: ev.Channel) -> None:
        refuse = self._machine.refuse
        if self._inputs.is_gone(channel):
            refuse(event, "its sender has left")
        if isinstance(event, ev.Announced):
            if not (event.barrier.unaligned and self._inputs.is_overtakable(channel)):
                refuse(event, "only an unaligned barrier is announced, and only where it may overtake")
            return
        assert isinstance(event, ev.Received)
        aligned, looped = self._alignment.blocked, self._loop.blocked
        if (aligned and channel in aligned) or (looped and channel in looped):
            refuse(event, "the channel is blocked")
        ended = self._inputs.data_has_ended(channel)
        if ended and isinstance(event.element, _DATA):
            refuse(event, "the data of the channel has ended")
        if not ended and isinstance(event.element, ev.EndOfPartition):
            refuse(event, "its sender left without an end of its data")
        stopped = self._machine.state is TaskState.STOPPED_AT_BARRIER
        if stopped and isinstance(event.element, ev.Records) and not self._loop.expects_barrier(channel):
            refuse(event, "nothing is emitted behind the barrier of a stop without drain")

    def _check_barrier(self, event: ev.TaskEvent, barrier: ev.Barrier, stop: int | None) -> None:
        machine = self._machine
        if barrier.unaligned and barrier.purpose is not ev.BarrierKind.CHECKPOINT:
            machine.refuse(event, "savepoints and rounds are aligned")
        if not self._alignment.counts(barrier):
            return
        if machine.state is TaskState.STOPPED_AT_BARRIER and barrier.number != stop:
            machine.refuse(event, f"barrier {stop} has stopped it, and its outcome is not known")
        if barrier.purpose is ev.BarrierKind.STOP_DRAIN and machine.state is not TaskState.WAITING:
            machine.refuse(event, "a job that is drained stops when the logic of every task has ended")

    def _check_completed(self, event: ev.Completed, end_of_time_told: bool) -> None:
        refuse = self._machine.refuse
        if event.number > self._alignment.passed:
            refuse(event, "this task has not acknowledged it")
        if event.loop is None:
            return
        if self._machine.state is not TaskState.DRAINING:
            refuse(event, "only the head of a loop with nothing left but its loop is told what to do with it")
        if event.loop is ev.LoopStep.END and not end_of_time_told:
            refuse(event, "the end of time has not gone round yet")


def _barrier_of(event: ev.TaskEvent) -> ev.Barrier | None:
    match event:
        case ev.Received(_, ev.Barrier() as barrier) | ev.Announced(_, barrier) | ev.Triggered(barrier):
            return barrier
    return None
