"""A task in a legal world, in which a caller picks the next step: its senders, its consumers and a
coordinator.

The oracle is written the other way round than the task: it knows where in each channel the barrier
of a checkpoint was *put*, and what the task has processed and logged when it acknowledges; the two
together must be exactly what was put before the barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stateformat.backends.dataflow import events as ev
from stateformat.backends.dataflow.task import Task
from stateformat.backends.dataflow.task_states import TaskState
from tests.dataflow.task_scripts import edges_of

OUT = ev.Channel("out", 0, 0)
DRAIN, STOP, END = ev.EndOfData(drain=True), ev.EndOfData(drain=False), ev.EndOfPartition()
BarrierKind = ev.BarrierKind


@dataclass
class Sender:
    """One end of a channel. ``ended``: what it said of its data; ``final``: the first barrier that
    it put behind it.
    """

    channel: ev.Channel
    feedback: bool
    overtakable: bool
    queue: list[Any] = field(default_factory=list)
    put: int = 0
    time: int = ev.MIN_WATERMARK
    heard: int = ev.MIN_WATERMARK
    drained: bool = False
    ended: Any = None
    final: int | None = None
    left: bool = False
    barriers: dict[int, int] = field(default_factory=dict)
    """How many records were put before each barrier."""


class World:
    """``steps`` tells what may happen next. Everything that a task must never do is asserted as it
    happens.
    """

    def __init__(self, shape: str, *, unaligned: bool, first: int = 0) -> None:
        edges = edges_of(shape)
        self.task = Task(ev.TaskId("task", 0), edges, (OUT,))
        self.senders = {
            channel: Sender(channel, edge.feedback, edge.overtakable) for edge in edges for channel in edge.channels
        }
        self.unaligned = unaligned
        self.inputs = {edge.input for edge in edges}
        self.first = first
        self.pending: ev.Barrier | None = None
        self.acknowledged: ev.Acknowledge | None = None
        self.number = 0
        self.completed = 0
        self.stopped = False
        self.processed: dict[ev.Channel, list[str]] = {channel: [] for channel in self.senders}
        self.at_snapshot: dict[ev.Channel, list[str]] = {}
        self.logged: dict[ev.Channel, list[str]] = {}
        self.arriving: set[ev.Channel] = set()
        self.told: list[Any] = []
        self.kinds: set[type] = set()
        self.times: list[int] = []
        self.taken: list[int] = []
        self.emitted: list[ev.Barrier] = []
        self.ended: set[int] = set()
        self.said_end: ev.EndOfData | None = None
        self.watermark = ev.MIN_WATERMARK
        self.steps_told: set[ev.LoopStep] = set()
        self.data_processed = False
        self.carry_out(self.task.start())

    @property
    def normal(self) -> list[Sender]:
        return [sender for sender in self.senders.values() if not sender.feedback]

    # What may happen ------------------------------------------------------------------------------

    def steps(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if self.task.state is TaskState.ENDED:
            return found
        for sender in self.senders.values():
            if sender.queue and not self.task.is_blocked(sender.channel):
                found.append(lambda sender=sender: self.deliver(sender))  # type: ignore[misc]
            if not sender.left:
                found += self.of_sender(sender)
        if self.pending is None and not self.stopped:
            found.append(self.begin)
        elif self.pending is not None:
            found.append(self.abort)
            if self.may_complete:
                found.append(self.complete)
        if self.said_end is not None:
            found.append(self.process_data)
        return found

    def of_sender(self, sender: Sender) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        at = self.pending.number if self.pending else None
        due = at is not None and at not in sender.barriers
        if due:
            found.append(lambda: self.put_barrier(sender))
        held = self.pending is not None and self.pending.purpose is BarrierKind.STOP_NO_DRAIN and not due
        if sender.ended is None and not held and not self.stopped:
            if not (sender.feedback and (self.steps_told or self.task.state is TaskState.WAITING)):
                found.append(lambda: self.put_record(sender))
            if not sender.feedback:
                found.append(lambda: self.put_watermark(sender))
                if sender.put % 4 == 3:
                    found.append(lambda: self.end_data(sender))
        if sender.ended is None and self.may_end_by_itself(sender):
            found.append(lambda: self.end_data(sender))
        if sender.ended is not None and self.may_leave(sender) and not due:
            found.append(lambda: self.leave(sender))
        return found

    def may_end_by_itself(self, sender: Sender) -> bool:
        return self.stopped or (sender.feedback and self.said_end is not None)

    def may_leave(self, sender: Sender) -> bool:
        return self.stopped or sender.feedback or (sender.final is not None and sender.final <= self.completed)

    @property
    def may_complete(self) -> bool:
        assert self.pending is not None
        number = self.pending.number
        return self.acknowledged is not None and all(
            sender.left or number in sender.barriers for sender in self.senders.values()
        )

    # Steps ----------------------------------------------------------------------------------------

    def put_record(self, sender: Sender) -> None:
        record = f"{sender.put}"
        sender.put += 1
        sender.queue.append(record)
        if sender.channel in self.arriving:
            self.logged[sender.channel].append(record)

    def put_watermark(self, sender: Sender) -> None:
        sender.time = max(sender.time, 0) + 3
        sender.queue.append(ev.Watermark(sender.time))

    def end_data(self, sender: Sender) -> None:
        sender.ended = STOP if self.stopped else DRAIN
        sender.queue.append(sender.ended)

    def leave(self, sender: Sender) -> None:
        sender.left = True
        sender.queue.append(END)

    def put_barrier(self, sender: Sender) -> None:
        barrier = self.pending
        assert barrier is not None
        sender.barriers[barrier.number] = sender.put
        if sender.ended is not None and sender.final is None and barrier.purpose is not BarrierKind.ROUND:
            sender.final = barrier.number
        sender.queue.append(barrier)
        if barrier.unaligned and sender.overtakable:
            self.tell(ev.Announced(sender.channel, barrier))

    def begin(self) -> None:
        self.number += 1
        purposes = [*[BarrierKind.CHECKPOINT] * 2, BarrierKind.ROUND, BarrierKind.CHECKPOINT, BarrierKind.STOP_NO_DRAIN]
        purpose = purposes[(self.number + self.first) % len(purposes)]
        self.pending = ev.Barrier(self.number, purpose, self.unaligned and purpose is BarrierKind.CHECKPOINT)
        self.acknowledged, self.at_snapshot, self.logged, self.arriving = None, {}, {}, set()
        if all(sender.left for sender in self.normal):
            self.tell(ev.Triggered(self.pending))

    def abort(self) -> None:
        assert self.pending is not None
        number, self.pending = self.pending.number, None
        self.tell(ev.Aborted(number))
        assert not self.arriving

    def complete(self) -> None:
        barrier, said = self.pending, self.acknowledged
        assert barrier is not None
        assert said is not None
        self.pending = None
        if barrier.purpose is not BarrierKind.ROUND:
            self.completed = barrier.number
        self.stopped = barrier.purpose is BarrierKind.STOP_NO_DRAIN
        step = None
        if self.task.is_loop_head and self.task.state is TaskState.DRAINING and said.inputs_ended and said.quiet:
            lies = any(isinstance(element, str) for sender in self.senders.values() for element in sender.queue)
            step = None if lies else ev.LoopStep.END if said.max_watermark_sent else ev.LoopStep.MAX_WATERMARK
        if step is not None:
            self.steps_told.add(step)
        self.tell(ev.Completed(barrier.number, step))

    def process_data(self) -> None:
        self.data_processed = True
        self.tell(ev.DataProcessed(OUT))

    def deliver(self, sender: Sender) -> None:
        element = sender.queue.pop(0)
        if isinstance(element, ev.Watermark):
            sender.heard = element.timestamp
        elif isinstance(element, ev.EndOfData) and element.drain and not sender.feedback:
            sender.drained = True
        self.tell(ev.Received(sender.channel, ev.Records(element) if isinstance(element, str) else element))

    # What the task does ---------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        if self.task.state is TaskState.ENDED:
            return
        before = self.task.state
        self.carry_out(self.task.handle(event))
        if before is not TaskState.STOPPED_AT_BARRIER or self.task.state in (TaskState.RUNNING, TaskState.DRAINING):
            self.check_time()

    def check_time(self) -> None:
        if all(sender.drained for sender in self.normal):
            self.release()
        time = min((sender.heard for sender in self.normal), default=ev.MIN_WATERMARK)
        if self.task.state in (TaskState.STOPPED_AT_BARRIER, TaskState.STOPPING):
            return
        if not (
            self.task.is_loop_head and time == ev.MAX_WATERMARK and ev.LoopStep.MAX_WATERMARK not in self.steps_told
        ):
            self.watermark = max(self.watermark, time)
        assert self.task.watermark == self.watermark

    def carry_out(self, commands: list[Any]) -> None:
        for command in commands:
            self.check_order(command)
            self.told.append(command)
            match command:
                case ev.Process(channel, batch):
                    assert batch == str(len(self.processed[channel])), "every record, once, in order"
                    self.processed[channel].append(batch)  # type: ignore[arg-type]
                case ev.Snapshot():
                    self.snapshot()
                case ev.Emit(ev.Barrier(_, BarrierKind.ROUND)):
                    self.snapshot()
                case ev.LogQueued(channel, arriving):
                    self.log_queued(channel, arriving=arriving)
                case ev.StopLog(channel):
                    self.arriving.remove(channel)
                case ev.LogRecords(channel, batch):
                    self.logged[channel].append(batch)  # type: ignore[arg-type]
                case ev.Acknowledge():
                    self.acknowledge(command)

    def release(self) -> None:
        """An end holds time up until the next barrier."""
        for sender in self.normal:
            if sender.drained:
                sender.heard = ev.MAX_WATERMARK

    def snapshot(self) -> None:
        assert self.pending is not None
        if self.pending.purpose is not BarrierKind.STOP_NO_DRAIN:
            self.release()
        self.at_snapshot = {channel: list(records) for channel, records in self.processed.items()}
        self.logged = {channel: [] for channel in self.senders}

    def log_queued(self, channel: ev.Channel, *, arriving: bool) -> None:
        queue = self.senders[channel].queue
        end = queue.index(self.pending) if self.pending in queue else len(queue)
        self.logged[channel] += [element for element in queue[:end] if isinstance(element, str)]
        if arriving:
            assert self.pending not in queue
            self.arriving.add(channel)

    def acknowledge(self, command: ev.Acknowledge) -> None:
        assert self.pending is not None
        assert command.number == self.pending.number
        assert not self.arriving
        self.acknowledged = command
        if command.finishing:
            assert not any(self.logged.values())
            return
        if self.pending.purpose is BarrierKind.ROUND and self.task.is_loop_head:
            return  # What is on its way in a loop is counted and not written.
        for channel, sender in self.senders.items():
            if command.number not in sender.barriers:
                assert sender.ended is not None, f"{channel} was not waited for"
            before = sender.barriers.get(command.number, sender.put)
            found = self.at_snapshot[channel] + self.logged[channel]
            assert found == [str(number) for number in range(before)], channel

    def check_order(self, command: Any) -> None:
        assert ev.Ended not in self.kinds
        match command:
            case ev.Process() | ev.AdvanceWatermark() | ev.EndInput() | ev.Finish():
                assert ev.Finish not in self.kinds, "nothing happens behind finish"
                assert self.said_end is None
                assert self.task.state is not TaskState.STOPPED_AT_BARRIER
        match command:
            case ev.EndInput(number):
                assert number not in self.ended, "an input ends once"
                self.ended.add(number)
            case ev.Finish():
                assert self.ended == self.inputs
            case ev.AdvanceWatermark(timestamp):
                assert timestamp > max(self.times, default=ev.MIN_WATERMARK)
                self.times.append(timestamp)
            case ev.Snapshot(barrier):
                assert barrier.number > max(self.taken, default=0)
                self.taken.append(barrier.number)
            case ev.Acknowledge():
                assert self.pending in self.emitted, "its barrier is on its way"
            case ev.Emit(ev.Barrier() as barrier):
                assert barrier not in self.emitted
                self.emitted.append(barrier)
            case ev.Emit(ev.EndOfData() as element):
                assert self.said_end is None, "the end of data is told once"
                self.said_end = element
            case ev.Ended():
                assert self.completed > 0
                assert self.data_processed
                assert self.acknowledged is not None or not self.has_begun
                assert all(END not in sender.queue and sender.left for sender in self.normal)
        self.kinds.add(type(command))

    @property
    def has_begun(self) -> bool:
        """Whether the task has seen the pending barrier."""
        return self.pending is not None and any(
            self.pending.number in sender.barriers and self.pending not in sender.queue for sender in self.normal
        )

    # To the end -----------------------------------------------------------------------------------

    def run_out(self) -> None:
        """Everything that is due happens, until the task has ended."""
        for _ in range(400):
            if self.task.state is TaskState.ENDED:
                return
            for sender in self.senders.values():
                while sender.queue and not self.task.is_blocked(sender.channel):
                    self.deliver(sender)
                if sender.left:
                    continue
                if self.pending is not None and self.pending.number not in sender.barriers:
                    self.put_barrier(sender)
                elif sender.ended is None and (not sender.feedback or self.may_end_by_itself(sender)):
                    if self.pending is None:
                        self.end_data(sender)
                elif sender.ended is not None and self.may_leave(sender):
                    self.leave(sender)
            if self.pending is None and not self.stopped:
                self.begin()
            elif self.pending is not None and self.may_complete:
                self.complete()
            if self.said_end is not None:
                self.process_data()
        raise AssertionError(f"the task never ends: {self.task.state}, {self.told[-20:]}")
