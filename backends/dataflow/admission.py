"""What may be told to a task now: the table of its life, and what of an event depends on its channels and numbers.

Everything here is asked before anything changes, so a refused event leaves a task as it was. A refusal is always somebody else's
mistake: that of the executor or of the coordinator, or of an operator that emits into a loop which has ended.
"""

from __future__ import annotations

from backends.dataflow import events
from backends.dataflow.alignment import Alignment
from backends.dataflow.events import Barrier, Channel, EndOfData, EndOfPartition, LoopStep, Purpose, Records, Watermark
from backends.dataflow.inputs import Inputs
from backends.dataflow.iteration import LoopBuffer
from backends.dataflow.life import EventKind, TaskState, TaskStateMachine, kind_of

_OF_SOURCES = frozenset({EventKind.SOURCE_ADVANCED, EventKind.SOURCE_ENDED, EventKind.END_SOURCE})
# Made once: to make a union of types takes as long as all else that is asked of most events.
_ON_CHANNELS = (events.Received, events.Announced)
_DATA = (Records, Watermark, EndOfData)


class EventGuard:
    """Refuses what cannot happen to a task. Reads what the task is made of and changes nothing."""

    def __init__(self, life: TaskStateMachine, inputs: Inputs, alignment: Alignment, loop: LoopBuffer) -> None:
        self._life = life
        self._inputs = inputs
        self._alignment = alignment
        self._loop = loop

    def check(self, event: events.TaskEvent, *, stop: int | None, end_of_time_told: bool) -> EventKind:
        """Which fact the event is; raises ``InvalidInput`` if it cannot be. ``stop``: the savepoint whose outcome the task awaits.
        ``end_of_time_told``: a loop head was told to send it round.
        """
        channel = event.channel if isinstance(event, _ON_CHANNELS) else None
        if channel is not None and channel not in self._inputs:
            self._life.refuse(event, "it has no such channel")
        fact = kind_of(event, feedback=channel is not None and self._inputs.is_feedback(channel))
        if fact is EventKind.FED_BACK and self._life.state is TaskState.WAITING:
            self._life.refuse(
                event,
                "its loop has ended. An operator of a loop may emit into it when timers fire at the end of time, but not in "
                "finish(), not in end_input() of what the head of the loop sends, and not in receive() of what answers these",
            )
        if fact in _OF_SOURCES and not self._inputs.are_none:
            self._life.refuse(event, f"{fact.value} cannot happen to a task with inputs")
        self._life.check(fact, event)
        if self._life.state is TaskState.CANCELED:
            return fact
        if channel is not None:
            self._check_channel(event, channel)
        barrier = _barrier_of(event)
        if barrier is not None and fact is not EventKind.FEEDBACK_MARK:
            self._check_barrier(event, barrier, stop)
        if isinstance(event, events.Completed):
            self._check_completed(event, end_of_time_told)
        return fact

    def _check_channel(self, event: events.TaskEvent, channel: Channel) -> None:
        if self._inputs.is_gone(channel):
            self._life.refuse(event, "its sender has left")
        if isinstance(event, events.Announced):
            if not (event.barrier.unaligned and self._inputs.is_overtakable(channel)):
                self._life.refuse(event, "only an unaligned barrier is announced, and only where it may overtake")
            return
        assert isinstance(event, events.Received)
        aligned, looped = self._alignment.blocked, self._loop.blocked
        if (aligned and channel in aligned) or (looped and channel in looped):
            self._life.refuse(event, "the channel is blocked")
        ended = self._inputs.data_has_ended(channel)
        if ended and isinstance(event.element, _DATA):
            self._life.refuse(event, "the data of the channel has ended")
        if not ended and isinstance(event.element, EndOfPartition):
            self._life.refuse(event, "its sender left without an end of its data")
        if (
            isinstance(event.element, Records)
            and self._life.state is TaskState.STOPPED_AT_BARRIER
            and not self._loop.expects_barrier(channel)
        ):
            self._life.refuse(event, "nothing is emitted behind the barrier of a stop without drain")

    def _check_barrier(self, event: events.TaskEvent, barrier: Barrier, stop: int | None) -> None:
        if barrier.unaligned and barrier.purpose is not Purpose.CHECKPOINT:
            self._life.refuse(event, "savepoints and rounds are aligned")
        if not self._alignment.counts(barrier):
            return
        if self._life.state is TaskState.STOPPED_AT_BARRIER and barrier.number != stop:
            self._life.refuse(event, f"barrier {stop} has stopped it, and its outcome is not known")
        if barrier.purpose is Purpose.STOP_DRAIN and self._life.state is not TaskState.WAITING:
            self._life.refuse(event, "a job that is drained stops when the logic of every task has ended")

    def _check_completed(self, event: events.Completed, end_of_time_told: bool) -> None:
        if event.number > self._alignment.passed:
            self._life.refuse(event, "this task has not acknowledged it")
        if event.loop is None:
            return
        if self._life.state is not TaskState.DRAINING:
            self._life.refuse(
                event, "only the head of a loop with nothing left but its loop is told what to do with it"
            )
        if event.loop is LoopStep.END and not end_of_time_told:
            self._life.refuse(event, "the end of time has not gone round yet")


def _barrier_of(event: events.TaskEvent) -> Barrier | None:
    match event:
        case events.Received(_, Barrier() as barrier) | events.Announced(_, barrier) | events.Triggered(barrier):
            return barrier
    return None
