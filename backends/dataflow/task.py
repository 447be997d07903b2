"""The core of a task: events go in, commands come out.

1. *States.* The table of ``task_states`` says what may happen in which state. It, channels and
   barrier numbers are checked first, so an illegal event leaves the task as it was. The fault is
   always in the executor, the coordinator, or an operator that emits into a loop that has ended.
2. *What is due.* :meth:`Task._due` alone handles watermarks and ends. After any event it looks at
   all inputs and returns what is due now. While the task runs: ends of inputs, then the watermark,
   so that what an end releases is never late. At its end: the end of time, the ends of inputs,
   ``finish``, and ``EndOfData``, which implies the end of time. The answers of an operator's
   coordinator come before the ends of inputs.
3. *Snapshots.* ``Alignment`` says when one is due and what is logged with it, ``LoopBuffer`` what a
   loop head logs besides (both in ``task_inputs``). The task acknowledges when both are whole.
4. *Heads of loops* hold back the end of time, and their own end, until the coordinator finds the
   loop quiet. Then the end of time goes around the loop: timers fire, and inputs from outside end.
   After that only ``finish`` is left. Records that the loop emits into itself then could not be
   processed, so they are refused.
5. *Leaving.* A task whose logic has ended leaves when (a) a checkpoint that it took part in since
   then is complete (after a stop: the stop's own savepoint); (b) every consumer has processed all
   of its data; (c) its producers have left. By (c) no checkpoint is in flight then: the end of the
   last channel completed it.
6. *A stop without drain* stops the task at its snapshot. If the savepoint is complete and all
   inputs have ended, the task tells its consumers and leaves. If the savepoint is aborted, what
   came in the meantime becomes due, and the task goes on.

The executor delivers nothing from a blocked channel, and control events before channel elements. It
delivers :class:`~stateformat.backends.dataflow.events.DataProcessed` once for every output channel:
when the receiver confirms it or has ended, whichever is first. This may be before the logic of this
task has ended.

Equal elements of many channels are handled in one step: a wide task gets a barrier per channel.
Among equal elements of several channels, all but the last usually change only what the inputs and
the alignment know; the consequences follow from the last. So the others are noted at once, and the
last one is handled as if it had come alone. If this is not certain, each is handled alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from stateformat.errors import ErrorKind, InvalidState

from . import events as ev
from .events import MAX_WATERMARK, MIN_WATERMARK, BarrierKind, Channel, LoopStep, TaskCommand
from .task_inputs import Alignment, InputEdge, Inputs, LoopBuffer
from .task_states import LEGAL, EventKind, TaskState, TaskStateMachine, kind_of

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


ANSWER_ROUNDS_MAX: Final = 1000
"""How often a task asks its coordinator again because an answer made the operator send."""
_STOPS = (BarrierKind.STOP_DRAIN, BarrierKind.STOP_NO_DRAIN)


class Task:
    """One task of a run: call :meth:`start` once, then :meth:`handle` for every event.

    - ``inputs``: its incoming edges. Without any it is a source; with feedback, a loop head.
    - ``outputs``: the channels to receivers that run, feedback channels too.
    - ``replayed``: in-flight records were processed before :meth:`start`.
    - ``asks``: its operator has a coordinator. Such an operator is the first of its chain.
    - ``by_epoch``: see ``inputs.py``.

    Raises ``InvalidInput`` (kind ``ILLEGAL_EVENT``) for an illegal event; then nothing has
    changed.
    """

    def __init__(
        self,
        task: ev.TaskId,
        inputs: Sequence[InputEdge],
        outputs: Iterable[Channel],
        *,
        replayed: bool = False,
        asks: bool = False,
        by_epoch: bool = False,
    ) -> None:
        self.id = task
        self._asks = asks
        self._asked = 0
        self._sent = False
        """The operator has sent to its coordinator since the last question."""
        self._inputs = Inputs(inputs, by_epoch=by_epoch)
        self._machine = TaskStateMachine(task)
        overtakable = [channel for edge in inputs if edge.overtakable for channel in edge.channels]
        self._alignment = Alignment(self._inputs.channels, overtakable)
        feedback = self._inputs.feedback
        self._loop = LoopBuffer((channel for edge in feedback for channel in edge.channels), replayed=replayed)
        self._guard = EventGuard(self._machine, self._inputs, self._alignment, self._loop)
        self._unprocessed = set(outputs)
        self.together = Together(self, self._machine, self._inputs, self._alignment, self._loop, self._unprocessed)
        self.is_source = self._inputs.are_none
        self.is_loop_head = bool(feedback)
        self._watermark = MIN_WATERMARK
        self._idle = False
        """Its consumers know that it does not hold back event time."""
        self._allowed = dict.fromkeys(LoopStep, not self.is_loop_head)
        """The steps that a loop head may take; all of them for other tasks."""
        self._acknowledgement: ev.Acknowledge | None = None
        self._snapshots: dict[int, bool] = {}
        """Numbers whose outcome is not known, and whether the logic had ended."""
        self._stop: int | None = None
        self._stop_is_complete = False
        self._may_leave = False
        """A checkpoint that was taken since the logic ended is complete."""
        self._resumes_in = TaskState.RUNNING
        """The state to go on in if a stop is aborted."""

    # What an executor asks ------------------------------------------------------------------------

    @property
    def state(self) -> TaskState:
        """Where it is in its life."""
        return self._machine.state

    @property
    def watermark(self) -> int:
        """The last ``AdvanceWatermark``."""
        return self._watermark

    @property
    def is_idle(self) -> bool:
        """Whether it does not hold back event time."""
        return self._idle

    @property
    def restored_watermark(self) -> int:
        """The watermark at the restored checkpoint: what was late must be late again."""
        return self._inputs.restored_watermark

    @property
    def may_read(self) -> bool:
        """Whether the reader of a source may be asked for records."""
        return self.is_source and self.state is TaskState.RUNNING

    @property
    def may_fire(self) -> bool:
        """Whether timers of processing time may fire: its logic runs, and no stop holds it."""
        return self.state in (TaskState.RUNNING, TaskState.DRAINING, TaskState.ASKING)

    @property
    def blocked(self) -> frozenset[Channel]:
        """Channels from which nothing may be delivered now."""
        return frozenset((*self._alignment.blocked, *self._loop.blocked))

    def is_blocked(self, channel: Channel) -> bool:
        """Return whether nothing may be delivered from this channel now."""
        # Most of the time nothing is blocked, and then no channel needs to be hashed.
        aligned, looped = self._alignment.blocked, self._loop.blocked
        return bool((aligned and channel in aligned) or (looped and channel in looped))

    def processes(self, channel: Channel) -> bool:
        """Return whether records of this channel are processed as they are, with nothing to decide.

        An executor then needs no event for them. If False, :meth:`handle` decides about them.
        """
        inputs = self._inputs
        return (
            self.state is TaskState.RUNNING
            and channel in inputs
            and not (inputs.is_feedback(channel) or inputs.data_has_ended(channel) or inputs.is_gone(channel))
            and not self.is_blocked(channel)
        )

    @property
    def releases(self) -> int:
        """How often channels were unblocked. While it is unchanged, blocked channels stay so."""
        return self._alignment.releases + self._loop.releases

    def progress(self) -> tuple[dict[str, int], dict[str, bool]]:
        """Per edge: the watermark, and whether ``end_input`` was called.

        A loop head that holds back the end of time reports its own watermark. No edge is reported
        behind the task, not even an idle one: what was late must be late again.
        """
        edges = self._inputs.edges
        holds_back = self._inputs.watermark == MAX_WATERMARK and not self._allowed[LoopStep.MAX_WATERMARK]
        ceiling = self._watermark if holds_back else MAX_WATERMARK
        return (
            {edge.id: min(max(self._inputs.watermark_of(edge), self._watermark), ceiling) for edge in edges},
            {edge.id: edge.input in self._inputs.ended for edge in edges},
        )

    # Events ---------------------------------------------------------------------------------------

    def message_sent(self) -> None:
        """Its operator has sent to the coordinator, which answers before the last input ends."""
        self._sent = True

    def start(self) -> list[TaskCommand]:
        """Begin, once its operators are open: emit the watermark, end inputs without senders."""
        self._machine.check(EventKind.START, "start")
        self._machine.admit(EventKind.START, "start")
        self._machine.move(TaskState.RUNNING)
        commands: list[TaskCommand] = []
        if self.is_loop_head:
            # The checkpoint has the end of time only if it had been sent around the loop.
            restored = self.restored_watermark
            self._allowed[LoopStep.MAX_WATERMARK] = restored == MAX_WATERMARK
            commands = self._advance(restored)
        return commands + self._due()

    def handle(self, event: ev.TaskEvent) -> list[TaskCommand]:
        """Handle an event; return the commands to carry out, in order."""
        kind = self._guard.check(event, stop=self._stop, end_of_time_told=self._allowed[LoopStep.MAX_WATERMARK])
        self._machine.admit(kind, event)
        if self.state in (TaskState.CANCELED, TaskState.ENDED):
            return []
        commands = self._handle(event)
        return commands + self._leave()

    def _handle(self, event: ev.TaskEvent) -> list[TaskCommand]:
        match event:
            case ev.Received(channel, element) if self._inputs.is_feedback(channel):
                return self._receive_feedback(channel, element)
            case ev.Received(channel, element):
                return self._receive(channel, element)
            case ev.Announced(channel, barrier):
                commands = self._subsume(barrier) + self._alignment.announce(channel, barrier)
                return commands + self._snapshot()
            case ev.Triggered(barrier):
                commands = self._subsume(barrier)
                self._alignment.trigger(barrier)
                return commands + self._snapshot()
            case ev.Completed(number, step):
                return self._complete(number, step)
            case ev.Aborted(number):
                return self._abort(number)
            case ev.Answered():
                return self._ask() if self._sent else self._end()
            case ev.SourceAdvanced(timestamp):
                return self._advance(timestamp)
            case ev.SourceIdle(idle):
                return self._become_idle(idle)
            case ev.SourceEnded() | ev.EndSource():
                return self._end_source()
            case ev.DataProcessed(channel):
                self._unprocessed.discard(channel)
            case ev.Canceled():
                self._machine.move(TaskState.CANCELED)
        return []

    def _receive(self, channel: Channel, element: ev.Element) -> list[TaskCommand]:
        match element:
            case ev.Records(batch, combined):
                return [ev.Process(channel, batch, combined)]
            case ev.Watermark(timestamp):
                self._inputs.advance(channel, timestamp)
                return self._advance_inputs()
            case ev.Idle(idle):
                self._inputs.set_idle(channel, idle)
                return self._advance_inputs()
            case ev.Barrier():
                commands = self._subsume(element) + self._alignment.receive(channel, element)
                return commands + self._snapshot()
            case ev.EndOfData():
                self._inputs.end_data(channel, element)
                return [*self._due(), *self._stop_if_due(), ev.ConfirmProcessed(channel)]
            case ev.EndOfPartition():
                self._inputs.end_partition(channel)
                return self._alignment.end(channel) + self._snapshot()

    def _receive_feedback(self, channel: Channel, element: ev.Element) -> list[TaskCommand]:
        match element:
            case ev.Records(batch):
                return self._loop.receive(channel, batch, hold=self.state is TaskState.STOPPED_AT_BARRIER)
            case ev.Barrier(number):
                self._loop.barrier(channel, number, passed=self._alignment.passed)
            case ev.EndOfData():
                self._inputs.end_data(channel, element)
                return [ev.ConfirmProcessed(channel)]
            case ev.EndOfPartition():
                self._inputs.end_partition(channel)
                self._loop.end(channel)
            case ev.Watermark() | ev.Idle():
                pass  # Time does not go around a loop.
        return self._acknowledge()

    # Watermarks and ends --------------------------------------------------------------------------

    def _advance(self, timestamp: int) -> list[TaskCommand]:
        if timestamp <= self._watermark:
            return []
        self._watermark = timestamp
        return [ev.AdvanceWatermark(timestamp), ev.Emit(ev.Watermark(timestamp))]

    def _due(self) -> list[TaskCommand]:
        """Return what watermarks and ends have made due: nothing for a source or after the end."""
        if self.is_source or self.state not in (TaskState.RUNNING, TaskState.DRAINING):
            return []
        time_may_end, may_end = self._allowed[LoopStep.MAX_WATERMARK], self._allowed[LoopStep.END]
        all_drained = self._inputs.drained(self._inputs.edges)
        if all_drained:
            self._inputs.release_time()
        if all_drained and may_end:
            return self._end_of_time() + (self._ask() if self._asks else self._end())
        commands: list[TaskCommand] = []
        if not all_drained:
            # End an input before advancing to the time that it held back, so that what it releases
            # is not late.
            commands += self._end_inputs(self._inputs.drained_inputs) + self._advance_inputs()
        elif time_may_end:
            commands += self._advance_inputs() + self._end_inputs(self._inputs.drained_inputs)
        if self.state is TaskState.RUNNING and self.is_loop_head and self._nothing_from_outside:
            self._machine.move(TaskState.DRAINING)
            commands.append(ev.ReportInputsEnded())
        return commands

    def _ask(self) -> list[TaskCommand]:
        """Ask for the answers to what was sent. An answer may make the operator send again."""
        if self._asked == ANSWER_ROUNDS_MAX:
            raise InvalidState(
                f"operator {self.id.vertex!r} has sent messages to its coordinator for {self._asked} rounds since its "
                "inputs ended, each time when it received an answer. Its input cannot end like that: let receive() "
                "stop sending at some point.",
                kind=ErrorKind.LIMIT_EXCEEDED,
                operator=self.id.vertex,
            )
        self._machine.move(TaskState.ASKING)
        self._asked += 1
        self._sent = False
        return [ev.AskCoordinator()]

    def _end(self) -> list[TaskCommand]:
        feedback = sorted({edge.input for edge in self._inputs.feedback})
        return self._end_inputs([*self._inputs.drained_inputs, *feedback]) + self._end_logic()

    def _advance_inputs(self) -> list[TaskCommand]:
        """Advance to the watermark of the inputs; tell the consumers if idleness changes.

        A loop head holds back the end of time.
        """
        timestamp, idle = self._inputs.watermark, self._inputs.idle
        if timestamp == MAX_WATERMARK and not self._allowed[LoopStep.MAX_WATERMARK]:
            return []
        if not (idle or self._idle):
            return self._advance(timestamp)
        # An input that holds back time again does so before it continues, and vice versa.
        told = self._become_idle(idle)
        return self._advance(timestamp) + told if idle else told + self._advance(timestamp)

    def _become_idle(self, idle: bool) -> list[TaskCommand]:
        if idle == self._idle:
            return []
        self._idle = idle
        return [ev.Emit(ev.Idle(idle))]

    def _end_of_time(self) -> list[TaskCommand]:
        """Advance to the end of time; it is not emitted, as a later ``EndOfData`` implies it."""
        if self._watermark == MAX_WATERMARK:
            return []
        self._watermark = MAX_WATERMARK
        return [ev.AdvanceWatermark(MAX_WATERMARK, ending=True)]

    @property
    def _nothing_from_outside(self) -> bool:
        return self._inputs.drained([edge for edge in self._inputs.edges if not edge.inside])

    def _end_inputs(self, inputs: Iterable[int]) -> list[TaskCommand]:
        due = [number for number in inputs if number not in self._inputs.ended]
        self._inputs.ended.update(due)
        return [ev.EndInput(number) for number in due]

    def _end_source(self) -> list[TaskCommand]:
        if self.state is TaskState.WAITING:
            return []  # It was asked to end after it had ended.
        return self._end_of_time() + self._end_logic()

    def _end_logic(self) -> list[TaskCommand]:
        self._machine.move(TaskState.WAITING)
        self._loop.close()
        ending: list[TaskCommand] = [ev.Finish(), ev.Emit(ev.EndOfData(drain=True)), ev.ReportLogicEnded()]
        return ending + self._acknowledge()  # Nothing more comes around the loop for a log to wait for.

    # Snapshots ------------------------------------------------------------------------------------

    def _subsume(self, barrier: ev.Barrier) -> list[TaskCommand]:
        """Abort an older checkpoint in flight that this barrier subsumes."""
        older = self._alignment.subsumes(barrier)
        if older is None:
            return []
        reason = f"barrier {barrier.number} came to {self.id} before it had acknowledged {older}"
        return [*self._void(older), ev.Decline(older, reason)]

    def _snapshot(self) -> list[TaskCommand]:
        """Take the snapshot if it is due, and acknowledge if it is whole."""
        if not self._alignment.is_due:
            return self._acknowledge()
        assert self._alignment.current is not None
        barrier = self._alignment.current.barrier
        finishing = self.state is TaskState.WAITING
        stops = barrier.purpose is BarrierKind.STOP_NO_DRAIN and not finishing
        commands: list[TaskCommand] = [ev.HoldSource(hold=True)] if stops and self.is_source else []
        if not (stops or self.is_source) and self.state in (TaskState.RUNNING, TaskState.DRAINING):
            self._inputs.release_time()
            commands += self._advance_inputs()
        if barrier.purpose is not BarrierKind.ROUND:
            commands.append(ev.Snapshot(barrier, finishing, *self.progress()))
            self._snapshots[barrier.number] = finishing
        commands += self._alignment.take(self._inputs.data_ended)
        commands.append(ev.Emit(barrier))
        self._acknowledgement = ev.Acknowledge(barrier.number, finishing)
        if self.is_loop_head:
            if not finishing:
                self._loop.begin(barrier)
            self._acknowledgement = self._acknowledgement._replace(
                inputs_ended=finishing or self._nothing_from_outside,
                max_watermark_sent=finishing or self._watermark == MAX_WATERMARK,
            )
        # A checkpoint after a stop shows that the stop has failed.
        self._stop, self._stop_is_complete = (barrier.number if barrier.purpose in _STOPS else None), False
        if stops:
            self._resumes_in = self.state
            self._machine.move(TaskState.STOPPED_AT_BARRIER)
        return commands + self._acknowledge()

    def _acknowledge(self) -> list[TaskCommand]:
        if not (self._alignment.is_whole and self._loop.is_whole):
            return []
        assert self._acknowledgement is not None
        assert self._alignment.current is not None
        quiet = self._acknowledgement.finishing or not self.is_loop_head
        if not quiet:
            # A barrier that overtook records proves nothing about the loop.
            quiet = self._loop.is_quiet and not self._alignment.current.barrier.unaligned
        self._alignment.acknowledge()
        return [self._acknowledgement._replace(quiet=quiet)]

    # Outcomes -------------------------------------------------------------------------------------

    def _complete(self, number: int, step: LoopStep | None) -> list[TaskCommand]:
        commands: list[TaskCommand] = []
        finishing = self._snapshots.get(number)
        if finishing is not None:
            commands.append(ev.NotifyComplete(number))
            self._may_leave = self._may_leave or finishing
            self._stop_is_complete = self._stop_is_complete or number == self._stop
            self._snapshots = {later: ends for later, ends in self._snapshots.items() if later > number}
        if step is not None:
            self._allowed[step] = True
            commands += self._due()
        return commands + self._stop_if_due()

    def _stop_if_due(self) -> list[TaskCommand]:
        """Stop if the savepoint is complete and all inputs have ended."""
        stopped = self.state is TaskState.STOPPED_AT_BARRIER
        if not (stopped and self._stop_is_complete and self._inputs.all_data_ended):
            return []
        self._machine.move(TaskState.STOPPING)
        self._loop.close()
        return [ev.Emit(ev.EndOfData(drain=False))]

    def _abort(self, number: int) -> list[TaskCommand]:
        commands = self._void(number)
        if self._stop is not None and self._stop <= number and not self._stop_is_complete:
            self._stop = None
        if self.state is TaskState.STOPPED_AT_BARRIER and self._stop is None:
            self._machine.move(self._resumes_in)
            if self.is_source:
                commands.append(ev.HoldSource(hold=False))
            commands += self._loop.abort(number)
            commands += self._due()
        return commands + self._snapshot()

    def _void(self, number: int) -> list[TaskCommand]:
        """Note that checkpoints up to this number will never exist."""
        commands = self._alignment.abort(number)
        if self.state is not TaskState.STOPPED_AT_BARRIER:
            commands += self._loop.abort(number)
        void = [taken for taken in self._snapshots if taken <= number]
        for taken in void:
            del self._snapshots[taken]
        return commands + [ev.NotifyAborted(taken) for taken in void]

    def _leave(self) -> list[TaskCommand]:
        stopping = self.state is TaskState.STOPPING
        if not stopping and self.state is not TaskState.WAITING:
            return []
        may_leave = stopping or (self._may_leave if self._stop is None else self._stop_is_complete)
        if not may_leave or self._unprocessed or not self._inputs.all_gone:
            return []
        assert self._alignment.current is None, "the last channel that ended completed it"
        self._machine.move(TaskState.ENDED)
        return [ev.Close(), ev.Emit(ev.EndOfPartition()), ev.Ended()]
