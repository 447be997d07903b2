"""The core of a task: what happens to it goes in as events, what is to be done comes out as commands.

Theory of operation.

1. *TaskStateMachine.* Where a task is, and what may happen to it there, is the table of ``life.py``; it is asked before anything changes, so
   an event that cannot be leaves the task as it was.
2. *What is due.* Watermarks and ends are handled in one place (:meth:`Task._due`): whatever came, it looks at all that was heard
   and gives what is due now. While something goes on: the ends of inputs, then the watermark, so that what an end releases is late
   for nobody. Time that an end releases waits for the next barrier (``inputs.py``). At the end: the end of time, the ends of inputs, ``finish``, and only then ``EndOfData``, which implies the end of time
   for the consumers. Where the operator has a coordinator, its answers to what was sent come before the ends of inputs.
   A restore, an end of data and a stop that was aborted all go through it, so no order of ends is forgotten.
3. *Snapshots.* ``alignment.py`` says when one is due and what is logged with it, ``iteration.py`` what a loop head logs besides.
   The task acknowledges when both are whole.
4. *Heads of loops* hold the end of time back, and their own end, until the coordinator has found the loop quiet. Whatever could
   still set something going is done when the end of time is sent round: timers, ``end_input`` of what comes from outside. Then
   only ``finish`` is left. What a loop emits into itself later cannot be processed any more, and is refused with a sentence.
5. *Leaving.* A task whose logic has ended leaves when (a) a checkpoint that it took part in since then is complete, or, if the
   last was the savepoint of a stop, that very one; (b) every consumer has processed all of its data; (c) its own producers have
   left, so that what has ended is always closed upstream. By (c) nothing is pending then: a checkpoint that has begun here is
   complete with the end of the last channel, and was acknowledged first.
6. *A stop without drain* holds the task at its snapshot. Complete, and all that it hears ended: it says so to its consumers and
   leaves. Aborted: whatever came in the meantime becomes due, and it goes on.

The executor delivers nothing of a blocked channel, and control mail before elements of channels. It tells
:class:`~backends.dataflow.events.DataProcessed` once for every output channel: when the receiver confirms it, or when the receiver
has ended (a loop head can end before its tail), whichever is first; also before the logic of this task has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from backends.dataflow import events
from backends.dataflow.admission import EventGuard
from backends.dataflow.alignment import Alignment
from backends.dataflow.events import (
    MAX_WATERMARK,
    MIN_WATERMARK,
    Acknowledge,
    AdvanceWatermark,
    AskCoordinator,
    Barrier,
    Channel,
    Close,
    ConfirmProcessed,
    Decline,
    Emit,
    Ended,
    EndInput,
    EndOfData,
    EndOfPartition,
    Finish,
    HoldSource,
    LoopStep,
    NotifyAborted,
    NotifyComplete,
    Process,
    Purpose,
    Records,
    ReportInputsEnded,
    Snapshot,
    TaskCommand,
    TaskEvent,
    TaskId,
    TellLogicEnded,
    Watermark,
)
from backends.dataflow.inputs import InputEdge, Inputs
from backends.dataflow.iteration import LoopBuffer
from backends.dataflow.life import EventKind, TaskState, TaskStateMachine
from stateformat.errors import ErrorKind, InvalidState

ANSWER_ROUNDS_MAX: Final = 1000
"""So often a task asks its coordinator again because an answer made the operator send once more."""
_STOPS = (Purpose.STOP_DRAIN, Purpose.STOP_NO_DRAIN)


class Task:
    """One task of a run: :meth:`start` once, then :meth:`handle` for every event; the commands are carried out in order.

    ``inputs``: every edge into it. Without any it is a source; with a feedback edge, the head of a loop. ``outputs``: the channels
    to receivers that run, feedback channels too. ``replayed``: in-flight records were processed before :meth:`start`. ``asks``: its
    operator has a coordinator; such an operator is the first of its chain (``flow_graph``). ``by_epoch``: see ``inputs.py``.

    Raises ``InvalidInput`` (kind ``ILLEGAL_EVENT``) for an event that cannot be; nothing has changed then.
    """

    def __init__(
        self,
        task: TaskId,
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
        """The operator has sent to its coordinator since it was asked."""
        self._inputs = Inputs(inputs, by_epoch=by_epoch)
        self._life = TaskStateMachine(task)
        self._alignment = Alignment(
            self._inputs.channels, [channel for edge in inputs if edge.overtakable for channel in edge.channels]
        )
        feedback = self._inputs.feedback
        self._loop = LoopBuffer((channel for edge in feedback for channel in edge.channels), replayed=replayed)
        self._admission = EventGuard(self._life, self._inputs, self._alignment, self._loop)
        self._unprocessed = set(outputs)
        self.is_source = self._inputs.are_none
        self.is_loop_head = bool(feedback)
        self._watermark = MIN_WATERMARK
        self._told = {LoopStep.MAX_WATERMARK: not self.is_loop_head, LoopStep.END: not self.is_loop_head}
        self._acknowledgement: Acknowledge | None = None
        self._snapshots: dict[int, bool] = {}
        """Numbers whose outcome is not known, and whether the logic had ended."""
        self._stop: int | None = None
        self._stop_is_complete = False
        self._may_leave = False
        """A checkpoint that was taken since the logic ended is complete."""
        self._resumes_in = TaskState.RUNNING
        """Where a task that is held goes on if the stop is aborted."""

    # What an executor asks ----------------------------------------------------------------------------------------------

    @property
    def state(self) -> TaskState:
        """Where it is in its life."""
        return self._life.state

    @property
    def watermark(self) -> int:
        """How far time has come for it: the last ``AdvanceWatermark``."""
        return self._watermark

    @property
    def restored_watermark(self) -> int:
        """How far time had come at the restored checkpoint: what is late must be late again, in-flight records too."""
        return self._inputs.restored_watermark

    @property
    def may_read(self) -> bool:
        """Whether the reader of a source may be asked for records."""
        return self.is_source and self.state is TaskState.RUNNING

    @property
    def blocked(self) -> frozenset[Channel]:
        """Channels of which nothing may be delivered now."""
        return frozenset((*self._alignment.blocked, *self._loop.blocked))

    def is_blocked(self, channel: Channel) -> bool:
        """Whether nothing of this channel may be delivered now."""
        # Nothing is blocked most of the time, and then no channel need be hashed.
        aligned, looped = self._alignment.blocked, self._loop.blocked
        return bool((aligned and channel in aligned) or (looped and channel in looped))

    @property
    def releases(self) -> int:
        """How often blocked channels were freed: as long as it stays the same, whatever was blocked is."""
        return self._alignment.releases + self._loop.releases

    def progress(self) -> tuple[dict[str, int], dict[str, bool]]:
        """Per edge: the watermark, and whether ``end_input`` was called. While a head holds the end of time back, it has not come."""
        edges = self._inputs.edges
        holds_back = self._inputs.watermark == MAX_WATERMARK and not self._told[LoopStep.MAX_WATERMARK]
        ceiling = self._watermark if holds_back else MAX_WATERMARK
        return (
            {edge.id: min(self._inputs.watermark_of(edge), ceiling) for edge in edges},
            {edge.id: edge.input in self._inputs.ended for edge in edges},
        )

    # Events -------------------------------------------------------------------------------------------------------------

    def message_sent(self) -> None:
        """Its operator has sent to the coordinator. The answer belongs before the end of the last input."""
        self._sent = True

    def start(self) -> list[TaskCommand]:
        """Its operators are open, and in-flight records replayed: emit what time it is, and end what has ended already."""
        self._life.check(EventKind.START, "start")
        self._life.admit(EventKind.START, "start")
        self._life.move(TaskState.RUNNING)
        commands: list[TaskCommand] = []
        if self.is_loop_head:
            # The end of time stands in the checkpoint only if it had been sent round.
            restored = self.restored_watermark
            self._told[LoopStep.MAX_WATERMARK] = restored == MAX_WATERMARK
            commands = self._advance(restored)
        return commands + self._due()

    def handle(self, event: TaskEvent) -> list[TaskCommand]:
        """Something has happened. Returns what is to be done, in order."""
        fact = self._admission.check(event, stop=self._stop, end_of_time_told=self._told[LoopStep.MAX_WATERMARK])
        self._life.admit(fact, event)
        if self.state in (TaskState.CANCELED, TaskState.ENDED):
            return []
        commands = self._handle(event)
        return commands + self._leave()

    def _handle(self, event: TaskEvent) -> list[TaskCommand]:
        match event:
            case events.Received(channel, element) if self._inputs.is_feedback(channel):
                return self._fed_back(channel, element)
            case events.Received(channel, element):
                return self._received(channel, element)
            case events.Announced(channel, barrier):
                commands = self._make_way(barrier) + self._alignment.announce(channel, barrier)
                return commands + self._snapshot()
            case events.Triggered(barrier):
                commands = self._make_way(barrier)
                self._alignment.trigger(barrier)
                return commands + self._snapshot()
            case events.Completed(number, step):
                return self._completed(number, step)
            case events.Aborted(number):
                return self._aborted(number)
            case events.Answered():
                return self._ask() if self._sent else self._end()
            case events.SourceAdvanced(timestamp):
                return self._advance(timestamp)
            case events.SourceEnded() | events.EndSource():
                return self._end_source()
            case events.DataProcessed(channel):
                self._unprocessed.discard(channel)
            case events.Canceled():
                self._life.move(TaskState.CANCELED)
        return []

    def _received(self, channel: Channel, element: events.Element) -> list[TaskCommand]:
        match element:
            case Records(batch):
                return [Process(channel, batch)]
            case Watermark(timestamp):
                self._inputs.advance(channel, timestamp)
                return self._time()
            case Barrier():
                commands = self._make_way(element) + self._alignment.receive(channel, element)
                return commands + self._snapshot()
            case EndOfData():
                self._inputs.end_data(channel, element)
                return [*self._due(), *self._stopped(), ConfirmProcessed(channel)]
            case EndOfPartition():
                self._inputs.end_partition(channel)
                return self._alignment.end(channel) + self._snapshot()

    def _fed_back(self, channel: Channel, element: events.Element) -> list[TaskCommand]:
        match element:
            case Records(batch):
                return self._loop.receive(channel, batch, hold=self.state is TaskState.STOPPED_AT_BARRIER)
            case Barrier(number):
                self._loop.barrier(channel, number, passed=self._alignment.passed)
            case EndOfData():
                self._inputs.end_data(channel, element)
                return [ConfirmProcessed(channel)]
            case EndOfPartition():
                self._inputs.end_partition(channel)
                self._loop.end(channel)
            case Watermark():
                pass  # Time does not go round.
        return self._acknowledge()

    # Watermarks and ends ------------------------------------------------------------------------------------------------

    def _advance(self, timestamp: int) -> list[TaskCommand]:
        if timestamp <= self._watermark:
            return []
        self._watermark = timestamp
        return [AdvanceWatermark(timestamp), Emit(Watermark(timestamp))]

    def _due(self) -> list[TaskCommand]:
        """What watermarks and ends have made due. Nothing for a source; nothing while held, or when the logic has ended."""
        if self.is_source or self.state not in (TaskState.RUNNING, TaskState.DRAINING):
            return []
        time_may_end, may_end = self._told[LoopStep.MAX_WATERMARK], self._told[LoopStep.END]
        all_drained = self._inputs.drained(self._inputs.edges)
        if all_drained:
            self._inputs.release_time()
        if all_drained and may_end:
            return self._end_of_time() + (self._ask() if self._asks else self._end())
        commands: list[TaskCommand] = []
        if not all_drained:
            # What the end of an input releases comes before the time that this input held up: it is not late for anybody.
            commands += self._end_inputs(self._inputs.drained_inputs) + self._time()
        elif time_may_end:
            commands += self._time() + self._end_inputs(self._inputs.drained_inputs)
        if self.state is TaskState.RUNNING and self.is_loop_head and self._nothing_from_outside:
            self._life.move(TaskState.DRAINING)
            commands.append(ReportInputsEnded())
        return commands

    def _ask(self) -> list[TaskCommand]:
        """The last input ends behind the answers to what was sent before; an answer may make the operator send again."""
        if self._asked == ANSWER_ROUNDS_MAX:
            raise InvalidState(
                f"operator {self.id.vertex!r} has sent messages to its coordinator for {self._asked} rounds since its inputs ended, "
                "each time when it received an answer. Its input cannot end like that: let receive() stop sending at some point",
                kind=ErrorKind.LIMIT_EXCEEDED,
                operator=self.id.vertex,
            )
        self._life.move(TaskState.ASKING)
        self._asked += 1
        self._sent = False
        return [AskCoordinator()]

    def _end(self) -> list[TaskCommand]:
        feedback = sorted({edge.input for edge in self._inputs.feedback})
        return self._end_inputs([*self._inputs.drained_inputs, *feedback]) + self._end_logic()

    def _time(self) -> list[TaskCommand]:
        """The watermark that is due. A head holds the end of time back until it is told."""
        timestamp = self._inputs.watermark
        if timestamp == MAX_WATERMARK and not self._told[LoopStep.MAX_WATERMARK]:
            return []
        return self._advance(timestamp)

    def _end_of_time(self) -> list[TaskCommand]:
        """The logic ends with it. The consumers learn of it by ``EndOfData``, behind what ``finish`` has emitted."""
        if self._watermark == MAX_WATERMARK:
            return []
        self._watermark = MAX_WATERMARK
        return [AdvanceWatermark(MAX_WATERMARK, ending=True)]

    @property
    def _nothing_from_outside(self) -> bool:
        return self._inputs.drained([edge for edge in self._inputs.edges if not edge.inside])

    def _end_inputs(self, inputs: Iterable[int]) -> list[TaskCommand]:
        due = [number for number in inputs if number not in self._inputs.ended]
        self._inputs.ended.update(due)
        return [EndInput(number) for number in due]

    def _end_source(self) -> list[TaskCommand]:
        if self.state is TaskState.WAITING:
            return []  # Asked to end when it had ended.
        return self._end_of_time() + self._end_logic()

    def _end_logic(self) -> list[TaskCommand]:
        self._life.move(TaskState.WAITING)
        self._loop.close()
        ending: list[TaskCommand] = [Finish(), Emit(EndOfData(drain=True)), TellLogicEnded()]
        return ending + self._acknowledge()  # Nothing more will come round that a log could wait for.

    # Snapshots ----------------------------------------------------------------------------------------------------------

    def _make_way(self, barrier: Barrier) -> list[TaskCommand]:
        """A barrier puts an end to an older checkpoint that is pending."""
        older = self._alignment.subsumes(barrier)
        if older is None:
            return []
        reason = f"barrier {barrier.number} came to {self.id} before it had acknowledged {older}"
        return [*self._void(older), Decline(older, reason)]

    def _snapshot(self) -> list[TaskCommand]:
        """Take the snapshot if it is due, and acknowledge if it is whole."""
        if not self._alignment.is_due:
            return self._acknowledge()
        assert self._alignment.pending is not None
        barrier = self._alignment.pending.barrier
        finishing = self.state is TaskState.WAITING
        holds = barrier.purpose is Purpose.STOP_NO_DRAIN and not finishing
        commands: list[TaskCommand] = [HoldSource(hold=True)] if holds and self.is_source else []
        if not (holds or self.is_source) and self.state in (TaskState.RUNNING, TaskState.DRAINING):
            self._inputs.release_time()
            commands += self._time()
        if barrier.purpose is not Purpose.ROUND:
            commands.append(Snapshot(barrier, finishing, *self.progress()))
            self._snapshots[barrier.number] = finishing
        commands += self._alignment.take(self._inputs.silent)
        commands.append(Emit(barrier))
        self._acknowledgement = Acknowledge(barrier.number, finishing)
        if self.is_loop_head and not finishing:
            self._loop.begin(barrier)
            self._acknowledgement = self._acknowledgement._replace(
                inputs_ended=self._nothing_from_outside, max_watermark_sent=self._watermark == MAX_WATERMARK
            )
        elif self.is_loop_head:
            self._acknowledgement = self._acknowledgement._replace(inputs_ended=True, max_watermark_sent=True)
        # A checkpoint behind a stop shows that the stop came to nothing.
        self._stop, self._stop_is_complete = (barrier.number if barrier.purpose in _STOPS else None), False
        if holds:
            self._resumes_in = self.state
            self._life.move(TaskState.STOPPED_AT_BARRIER)
        return commands + self._acknowledge()

    def _acknowledge(self) -> list[TaskCommand]:
        if not (self._alignment.is_whole and self._loop.is_whole):
            return []
        assert self._acknowledgement is not None
        assert self._alignment.pending is not None
        quiet = self._acknowledgement.finishing or not self.is_loop_head
        if not quiet:
            # A barrier that overtook records proves nothing about the loop.
            quiet = self._loop.is_quiet and not self._alignment.pending.barrier.unaligned
        self._alignment.acknowledge()
        return [self._acknowledgement._replace(quiet=quiet)]

    # Outcomes -----------------------------------------------------------------------------------------------------------

    def _completed(self, number: int, step: LoopStep | None) -> list[TaskCommand]:
        commands: list[TaskCommand] = []
        finishing = self._snapshots.get(number)
        if finishing is not None:
            commands.append(NotifyComplete(number))
            self._may_leave = self._may_leave or finishing
            self._stop_is_complete = self._stop_is_complete or number == self._stop
            self._snapshots = {later: ends for later, ends in self._snapshots.items() if later > number}
        if step is not None:
            self._told[step] = True
            commands += self._due()
        return commands + self._stopped()

    def _stopped(self) -> list[TaskCommand]:
        """Held, the savepoint complete, and nothing more to hear: stop."""
        if (
            self.state is not TaskState.STOPPED_AT_BARRIER
            or not self._stop_is_complete
            or not self._inputs.all_data_ended
        ):
            return []
        self._life.move(TaskState.STOPPING)
        self._loop.close()
        return [Emit(EndOfData(drain=False))]

    def _aborted(self, number: int) -> list[TaskCommand]:
        commands = self._void(number)
        if self._stop is not None and self._stop <= number and not self._stop_is_complete:
            self._stop = None
        if self.state is TaskState.STOPPED_AT_BARRIER and self._stop is None:
            self._life.move(self._resumes_in)
            if self.is_source:
                commands.append(HoldSource(hold=False))
            commands += self._loop.abort(number)
            commands += self._due()
        return commands + self._snapshot()

    def _void(self, number: int) -> list[TaskCommand]:
        """Checkpoints up to this number will never be."""
        commands = self._alignment.abort(number)
        if self.state is not TaskState.STOPPED_AT_BARRIER:
            commands += self._loop.abort(number)
        void = [taken for taken in self._snapshots if taken <= number]
        for taken in void:
            del self._snapshots[taken]
        return commands + [NotifyAborted(taken) for taken in void]

    def _leave(self) -> list[TaskCommand]:
        stopping = self.state is TaskState.STOPPING
        if not stopping and self.state is not TaskState.WAITING:
            return []
        may_leave = stopping or (self._may_leave if self._stop is None else self._stop_is_complete)
        if not may_leave or self._unprocessed or not self._inputs.all_gone:
            return []
        assert self._alignment.pending is None, "the last channel that ended completed it"
        self._life.move(TaskState.ENDED)
        return [Close(), Emit(EndOfPartition()), Ended()]
