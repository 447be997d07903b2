"""The worker of one task: it delivers events to the :class:`Task` and carries out its commands."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa

from stateformat.model import Mode
from stateformat.snapshot import Snapshot, WriteContext

from ..dataflow import events as ev
from ..dataflow.api import NoSplit, Split
from ..dataflow.chain import OpenSnapshot, OperatorChain
from ..dataflow.chained_operator import OperatorError
from ..dataflow.compile import Router, Vertex
from ..dataflow.task import Task
from ..dataflow.task_states import TaskState
from .channels import Outputs, Queue, ReadyInputs, ReceivingEnd, SendingEnd, is_wide


class SplitAssigned(NamedTuple):
    """The enumerator's answer to a reader, and how long it took by the clock."""

    split: Split | NoSplit
    took_us: int = 0


class MessageToSubtask(NamedTuple):
    """A message of an operator's coordinator to a subtask."""

    uid: str
    message: bytes | None
    """None: the subtask's marker comes back, after all answers to what it sent before."""
    behind: int = 0
    """The barrier for which the coordinator had given its snapshot when it wrote; 0: none. What it
    wrote before is in that snapshot, so it belongs before the barrier.
    """


class AllProcessed(NamedTuple):
    """All receivers of these output channels have processed all of their data."""

    channels: tuple[ev.Channel, ...]


Mail = ev.TaskEvent | SplitAssigned | MessageToSubtask | AllProcessed


class WorkerEnvironment(Protocol):
    """What a worker calls on its run."""

    def tell(self, event: ev.CoordinatorEvent) -> None:
        """Send an event to the coordinator."""

    def note(self, reason: str, error: Exception) -> None:
        """Keep the exception for a reason that is given to the coordinator."""

    def message(self, uid: str, subtask: int, message: bytes | None, snapshot_taken: int) -> None:
        """Send to an operator's coordinator; None is a marker, which comes back as a
        :class:`Message`.

        ``snapshot_taken``: the last barrier for which the sender took a snapshot.
        """

    def lost(self, uid: str, subtask: int) -> None:
        """A message of an operator's coordinator came to a subtask whose logic had ended."""

    def request_split(self, task: ev.TaskId) -> None:
        """Ask the source's enumerator for a split."""

    def context(self, number: int) -> WriteContext:
        """Return what writers of the checkpoint of a barrier need."""

    def add(self, number: int, snapshots: Sequence[Snapshot]) -> None:
        """Take the snapshots of a task."""

    def awaits_snapshot(self, task: ev.TaskId, number: int) -> bool:
        """Return whether this barrier's checkpoint is in flight and lacks the task's snapshot."""

    def confirm(self, channels: Iterable[ev.Channel]) -> None:
        """Tell the senders of channels that their data has been processed."""

    def current_form(self, barrier: ev.Barrier) -> ev.Barrier:
        """Return the barrier to put into channels: unaligned if it has become so meanwhile."""

    def announce(self, channel: ev.Channel, barrier: ev.Barrier) -> None:
        """Tell the receiver of a channel that a barrier overtakes records."""

    def log_arrival(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        """Have the receiver of a channel log a batch that arrived."""

    def ended(self, task: ev.TaskId) -> None:
        """Note that a task has ended."""

    def wake(self, worker: Any) -> None:
        """Note that a worker may have become ready."""

    def now_us(self) -> int:
        """Return the time by the executor's clock."""

    def processing_time_us(self) -> int:
        """Return the wall-clock time of the current step or epoch."""

    def clock_at(self, time_us: int) -> int:
        """Return what :meth:`now_us` will be when the wall clock shows this time."""


logger = logging.getLogger(__name__)

IDLE_US = 5_000
"""How long a source that found nothing waits before it reads again."""
_ASKING_SHARE: Final = 50
_ASKING_WAIT_MAX_US: Final = 2_000_000
"""All readers together ask an enumerator without splits so rarely that this takes a fiftieth of the
time, but at least every two seconds, since one slow answer says little."""
_MOVES: Final = (ev.Process, ev.AdvanceWatermark, ev.EndInput, ev.Finish)
"""What changes the states of a task's operators."""
_SAY_MORE: Final = (Mode.KEYED, Mode.COMMITTABLES, Mode.IN_FLIGHT)
"""The modes of which a snapshot has rows only if they are new: other states are written whole."""
_UNTIL_MAIL: Final = 2**63
"""A time to read again that means: when the enumerator has answered."""


class Worker:
    """One task with its decisions (``task``), its operators and its channels.

    ``inputs`` and ``outputs``: its channels, except those of wide edges; ``hears`` and ``tells``
    are its ends of these. ``number``, ``snapshot``: its last barrier and open snapshot, if it
    continues another worker.
    """

    operators: OperatorChain
    """Set by the executor before :meth:`start`, and deleted when the task has ended."""

    def __init__(
        self,
        task_id: ev.TaskId,
        vertex: Vertex,
        task: Task,
        inputs: Sequence[Queue],
        outputs: Mapping[str, Sequence[Queue]],
        overtaken: frozenset[str],
        environment: WorkerEnvironment,
        *,
        hears: Mapping[str, ReceivingEnd] | None = None,
        tells: Mapping[str, SendingEnd] | None = None,
        number: int = 0,
        snapshot: OpenSnapshot | None = None,
    ) -> None:
        self.id = task_id
        self.vertex = vertex
        self.task = task
        self.routers: Mapping[str, Router] = {}
        self.inputs: dict[ev.Channel, Queue] = {}
        """The channels that have a queue."""
        self.mailbox: deque[Mail] = deque()
        self.rows = 0
        """Rows that its source has read."""
        self._late_before = self._late_at_end = 0
        self.gone = False
        self.paused = False
        """Its source reads nothing for now, because a checkpoint comes first."""
        self._closed = False
        self._outputs = Outputs(
            outputs,
            tells or {},
            overtaken=overtaken,
            announce=environment.announce,
            on_room=self._wake,
        )
        self._hears = hears or {}
        self._ready_inputs = ReadyInputs(task)
        self._environment = environment
        self.open_snapshot = snapshot
        """The snapshot not yet acknowledged."""
        self.snapshot_taken = number
        """The last barrier for which it took a snapshot, or that it passed on in a round."""
        self._source_held = self._reads = False
        self._moved = self._moved_before = False
        """Whether it has done something since its last snapshot; and before, since the last that it
        has acknowledged."""
        self._late_messages: deque[MessageToSubtask] = deque()
        self._asked = False
        self._ask_at_us = 0
        self._idle_until_us = 0
        self.fires_timers = False
        """Whether timers of processing time fire in steps of their own."""
        self._timer_at: tuple[int, int] = (0, 0)
        """A wall-clock time, and the same by the executor's clock."""
        # The channels call back, so checking whether a task is ready costs the same however many it
        # has.
        self._calls = self._find, self._ready_inputs.remove  # Made once: queues may be very many.
        for queue in inputs:
            self._take_from(queue)
        for hearing in self._hears.values():
            hearing.on_queue, hearing.on_told = self._take_from, self._wake
            self._ready_inputs.told.append(hearing)
        self._is_wide = is_wide(len(inputs) + sum(len(hearing.channels) for hearing in self._hears.values()))

    def _take_from(self, queue: Queue) -> None:
        self.inputs[queue.channel] = queue
        queue.on_element, queue.on_empty = self._calls
        self._ready_inputs.fill = queue.fill or self._ready_inputs.fill

    def _wake(self) -> None:
        self._environment.wake(self)

    def _find(self, queue: Queue) -> None:
        if self._ready_inputs.add(queue):
            self._environment.wake(self)

    @property
    def queued(self) -> int:
        """How many elements are in its channels."""
        told = sum(hearing.waiting for hearing in self._hears.values())
        return told + sum(len(queue.elements) for queue in self.inputs.values())

    def count_late_rows(self) -> None:
        """Begin to count late rows; its operators may have counted in an earlier run."""
        self._late_before = self.operators.late_records

    @property
    def late_rows(self) -> int:
        """Rows that its operators have dropped as late since :meth:`count_late_rows`."""
        counted = self.operators.late_records if hasattr(self, "operators") else self._late_at_end
        return counted - self._late_before

    @property
    def watermark(self) -> int:
        return self.task.watermark

    @property
    def idle_until_us(self) -> int | None:
        """When its source reads again or a timer is due; None if it waits only for events."""
        if self.gone:
            return None
        reads = self.vertex.is_source and self._may_read and self._idle_until_us < _UNTIL_MAIL
        waits = [self._idle_until_us] if reads else []
        if self._has_timers:
            waits.append(self._timer_at_us())
        return min(waits, default=None)

    @property
    def _has_timers(self) -> bool:
        if not (self.fires_timers and self.task.may_fire):
            return False
        return self.operators.next_timer_us() < ev.MAX_WATERMARK

    def _timer_at_us(self) -> int:
        """Return when the next timer is due by the executor's clock; constant as time passes."""
        due_us, now_us = self.operators.next_timer_us(), self.now_us()
        if self._timer_at[0] != due_us or self._timer_at[1] <= now_us:
            self._timer_at = (due_us, max(self._environment.clock_at(due_us), now_us + 1))
        return self._timer_at[1]

    @property
    def _timer_is_due(self) -> bool:
        return self._has_timers and self.operators.next_timer_us() <= self.processing_time_us()

    @property
    def _may_read(self) -> bool:
        return not (self._source_held or self.paused) and self.task.may_read

    def ready(self, now_us: int) -> bool:
        if self.gone:
            return False
        if self.mailbox:
            return True
        if self._outputs.full:
            return False
        if self.fires_timers and self._timer_is_due:
            return True
        if self.vertex.is_source:
            return self._may_read and now_us >= self._idle_until_us
        return self._ready_inputs.any_open()

    def step(self, choose: random.Random) -> None:
        """Do one thing, control before data. Report errors of user code."""
        try:
            if self.mailbox:
                mail = self.mailbox.popleft()
                if isinstance(mail, ev.DataProcessed):
                    self._data_processed(mail)
                else:
                    self._open_mail(mail)
            elif self.fires_timers and self._timer_is_due:
                self._moved = True
                self.operators.fire_timers()
            elif self.vertex.is_source:
                self._read()
            else:
                drawn = self._ready_inputs.draw(choose)
                if isinstance(drawn, Queue):
                    self._take(drawn)
                else:
                    self._receive_together(*drawn.take(self.task))
        except Exception as error:
            self.fail(error)

    def _take(self, queue: Queue) -> None:
        element = queue.get()
        if not isinstance(element, ev.Records):
            self._receive(queue, element)
        elif self.task.processes(queue.channel):
            self._moved = True
            self.operators.process(queue.channel.edge, element.batch, combined=element.combined)
        else:
            self.deliver(ev.Received(queue.channel, element))

    def _receive(self, queue: Queue, element: ev.Element) -> None:
        """Deliver an element other than records, with equal ones at the heads of other channels.

        If there are few channels, one after another, in random order.
        """
        if self._is_wide:
            channels, elements = self._ready_inputs.take_alike(queue, element)
            self._receive_together([queue.channel, *channels], [element, *elements])
        else:
            self.deliver(ev.Received(queue.channel, element))

    def _receive_together(self, channels: Sequence[ev.Channel], elements: Sequence[ev.Element]) -> None:
        """Deliver equal elements of several channels, or of one or none."""
        if len(channels) > 1:
            self._carry_out(self.task.together.receive(channels, elements))
        elif channels:
            self.deliver(ev.Received(channels[0], elements[0]))

    def _data_processed(self, mail: ev.DataProcessed) -> None:
        """Deliver all that receivers have confirmed, in one step."""
        channels = [mail.channel]
        while self.mailbox and isinstance(self.mailbox[0], ev.DataProcessed):
            channels.append(self.mailbox.popleft().channel)  # type: ignore[union-attr]
        self._carry_out(self.task.together.processed(channels))

    def fail(self, error: Exception) -> None:
        """Report that the task, and so the run, is lost."""
        self.gone = True
        self._environment.note(str(error), error)
        # An operator's error names operator and subtask; a task is named after its chain's head.
        self._environment.tell(ev.TaskFailed(None if isinstance(error, OperatorError) else self.id, str(error)))

    def release(self) -> None:
        """Close its operators if they are open, since the run is lost."""
        opened, self._closed, self.gone = hasattr(self, "operators") and not self._closed, True, True
        if opened:
            try:
                self.operators.close()
            except Exception as error:
                logger.warning("task %s could not be closed after its run was lost: %s", self.id, error)

    def start(self) -> None:
        try:
            self._carry_out(self.task.start())
        except Exception as error:
            self.fail(error)

    def fire_timers(self) -> None:
        """Fire the timers of processing time that are due, if the epoch decides when."""
        try:
            if self.task.may_fire and self.operators.is_timed:
                self._moved |= self.operators.next_timer_us() <= self.processing_time_us()
                self.operators.fire_timers()
        except Exception as error:
            self.fail(error)

    def deliver(self, event: ev.TaskEvent) -> None:
        """Deliver an event and carry out what follows."""
        self._carry_out(self.task.handle(event))

    def log(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        """Add records to the in-flight state of the open snapshot."""
        if self.open_snapshot is not None:
            self.open_snapshot.log(channel, batch)

    def emit(self, edge_id: str, batch: pa.RecordBatch, *, combined: bool = False) -> None:
        if self._reads and self.task.is_idle:
            self.deliver(ev.SourceIdle(idle=False))  # Before the rows that hold time up again.
        queue_to = self._outputs.queue_to[edge_id]
        for receiver, part in self.routers[edge_id].route(batch):
            queue = queue_to(receiver)
            queue.put(ev.Records(part, combined))
            if queue.logged_for is not None:
                self._environment.log_arrival(queue.channel, part)

    def send(self, uid: str, message: bytes) -> None:
        self.task.message_sent()
        self._environment.message(uid, self.id.subtask, message, self.snapshot_taken)

    def now_us(self) -> int:
        return self._environment.now_us()

    def processing_time_us(self) -> int:
        return self._environment.processing_time_us()

    def _carry_out(self, commands: Sequence[ev.TaskCommand]) -> None:
        for command in commands:
            self._carry(command, self.operators)

    def _carry(self, command: ev.TaskCommand, operators: OperatorChain) -> None:
        if isinstance(command, ev.AskCoordinator | ev.Snapshot):
            operators.flush()
        self._moved |= isinstance(command, _MOVES)
        match command:
            case ev.Process(channel, batch, combined):
                operators.process(channel.edge, batch, combined=combined)
            case ev.Emit(element):
                self._emit(element)
            case ev.AdvanceWatermark(timestamp, ending):
                operators.advance_watermark(timestamp, ending=ending)
            case ev.EndInput(number):
                operators.end_input(number)
            case ev.AskCoordinator():
                self._environment.message(self.vertex.id, self.id.subtask, None, self.snapshot_taken)
            case ev.Finish():
                operators.finish()
            case ev.Snapshot():
                self._take_snapshot(command)
            case ev.Acknowledge():
                self._acknowledge(command)
            case ev.NotifyComplete(number):
                operators.notify_complete(number)
            case ev.NotifyAborted(number):
                self._forget(number)
            case ev.Close():
                self._closed = True
                operators.close()
            case ev.Ended():
                self._end()
            case ev.HoldSource(hold):
                self._source_held = hold
            case ev.LogQueued() | ev.LogRecords() | ev.StopLog():
                self._log(command)
            case ev.Decline(number, reason):
                self._environment.tell(ev.Declined(self.id, number, reason))
            case ev.ConfirmProcessed(channel):
                self._environment.confirm((channel,))
            case ev.ConfirmAllProcessed(channels):
                self._environment.confirm(channels)
            case ev.ReportLogicEnded():
                self._environment.tell(ev.LogicEnded(self.id))
            case ev.ReportInputsEnded():
                self._environment.tell(ev.InputsEnded(self.id))

    def _end(self) -> None:
        self.gone = True
        for mail in self.mailbox:
            if isinstance(mail, MessageToSubtask):
                self._environment.lost(mail.uid, self.id.subtask)
        self.mailbox.clear()
        self._late_at_end = self.operators.late_records
        del self.operators  # Their state may be large, and the job may run for long.
        self._environment.ended(self.id)

    def _open_mail(self, mail: Mail) -> None:
        if isinstance(mail, SplitAssigned):
            self._asked = False
            self._moved |= not isinstance(mail.split, NoSplit)
            self.operators.assign(mail.split)
            if mail.split is NoSplit.LATER:
                # An answer may take longer and longer, as listing a growing directory does.
                rarely_us = min(_ASKING_SHARE * self.vertex.parallelism * mail.took_us, _ASKING_WAIT_MAX_US)
                self._ask_at_us = self.now_us() + max(IDLE_US, rarely_us)
                self._idle_until_us = min(self._idle_until_us, self._ask_at_us)
            else:
                self._idle_until_us = 0
        elif isinstance(mail, AllProcessed):
            self._carry_out(self.task.together.processed(mail.channels))
        elif not isinstance(mail, MessageToSubtask):
            self.deliver(mail)
            if isinstance(mail, ev.Aborted):
                self._release_messages()  # The barrier may never have reached this task.
        elif self._environment.awaits_snapshot(self.id, mail.behind) or self.task.state is TaskState.STOPPED_AT_BARRIER:
            self._late_messages.append(mail)
        elif mail.message is None:
            self.deliver(ev.Answered())
        elif self.task.state in (TaskState.RUNNING, TaskState.DRAINING, TaskState.ASKING):
            self._moved = True
            self.operators.receive(mail.uid, mail.message)
        else:
            self._environment.lost(mail.uid, self.id.subtask)

    def _release_messages(self) -> None:
        """Deliver, after the barrier, what came while the checkpoint was in flight."""
        self.mailbox.extendleft(reversed(self._late_messages))
        self._late_messages.clear()

    def _read(self) -> None:
        self._reads = True
        try:
            reading = self.operators.read()
        finally:
            self._reads = False
        self.rows += reading.rows
        self._moved |= reading.rows > 0
        if self.task.is_idle and not reading.is_idle:
            self.deliver(ev.SourceIdle(idle=False))
        if reading.watermark is not None:
            self.deliver(ev.SourceAdvanced(reading.watermark))
        if reading.is_idle and not self.task.is_idle:
            self.deliver(ev.SourceIdle(idle=True))
        if reading.wants_split and not self._asked and self.now_us() >= self._ask_at_us:
            self._asked = True
            self._environment.request_split(self.id)
        if reading.ended:
            self.deliver(ev.SourceEnded())
        elif reading.holds_none and self._asked:
            self._idle_until_us = _UNTIL_MAIL
            if reading.idle_at_us is not None:
                self._idle_until_us = max(self._environment.clock_at(reading.idle_at_us), self.now_us() + 1)
        elif reading.idle:
            self._idle_until_us = self.now_us() + IDLE_US

    def _emit(self, element: ev.Element) -> None:
        self._moved |= isinstance(element, ev.Watermark)
        if isinstance(element, ev.Barrier):
            element = self._environment.current_form(element)
        self._outputs.put(element)

    def _take_snapshot(self, command: ev.Snapshot) -> None:
        self.snapshot_taken = command.barrier.number
        self._moved_before, self._moved = self._moved_before or self._moved, False
        try:
            self.open_snapshot = self.operators.snapshot(command, self._environment.context(self.snapshot_taken))
        except Exception as error:
            self._snapshot_failed(error)
        self._release_messages()

    def _snapshot_failed(self, error: Exception) -> None:
        self.open_snapshot = None
        self._environment.note(str(error), error)
        self._environment.tell(ev.SnapshotFailed(self.id, self.snapshot_taken, str(error)))

    def _log(self, command: ev.LogQueued | ev.LogRecords | ev.StopLog) -> None:
        hearing = self._hears.get(command.channel.edge)
        queue = self.inputs[command.channel] if hearing is None else hearing.queue_from(command.channel.sender)
        match command:
            case ev.LogRecords(channel, batch):
                self.log(channel, batch)
            case ev.StopLog():
                queue.logged_for = None
            case ev.LogQueued(channel, arriving):
                for batch in queue.records_before(self.snapshot_taken):
                    self.log(channel, batch)
                arriving = arriving and not queue.holds_barrier(self.snapshot_taken)
                queue.logged_for = self.snapshot_taken if arriving else None

    def _acknowledge(self, command: ev.Acknowledge) -> None:
        snapshot, self.open_snapshot = self.open_snapshot, None
        moved = self._moved_before or bool(self.vertex.feedback)
        if snapshot is not None:
            try:
                closed = snapshot.close()
                handles = (handle for each in closed for handle in each.handles)
                moved = moved or any(handle.rows and handle.mode in _SAY_MORE for handle in handles)
                self._environment.add(command.number, closed)
            except Exception as error:
                self._snapshot_failed(error)
                return
        elif self.snapshot_taken == command.number:
            return  # Its snapshot failed, and the coordinator knows.
        self.snapshot_taken = command.number
        self._moved_before = False
        self._environment.tell(ev.Acknowledged(self.id, command, moved))

    def _forget(self, number: int) -> None:
        self.open_snapshot = None
        for queue in self.inputs.values():
            queue.logged_for = None
        self.operators.notify_aborted(number)
