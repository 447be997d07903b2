"""One run of a job in this process: from a restore to its end, its failure, or its stop.

Theory of operation. A run is a set of actors: one :class:`~stateformat.backends.runtime.worker.Worker` for each task that runs, and the
:class:`~stateformat.backends.runtime.driver.Driver`. :meth:`LocalRun.step` lets one that has something to do do one thing; which one is drawn
from the seed, so the same seed, store and clock give the same run. Nothing runs beside it. Between two steps the caller may do
whatever an unkind world does: kill a task, lose the whole run, begin another.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence

import pyarrow as pa

from stateformat.errors import CheckpointError
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from ..dataflow.chain import OperatorChain, in_flight_batches
from ..dataflow.graph import Router
from ..dataflow.task import TaskState
from ..runtime import (
    CAPACITY,
    Clock,
    Mail,
    MessageToCoordinator,
    MessageToSubtask,
    Progress,
    Queue,
    Restored,
    Run,
    Schedule,
    SplitRequested,
    Worker,
    receiver_of,
    restored_states,
    sender_of,
    tasks_of,
)
from .layers import TaskLayers
from .ready_set import ReadySet

logger = logging.getLogger(__name__)

RETRY_US = 1_000_000
"""After which time a checkpoint that tasks wait for, and that was given up, is tried again where there is no interval."""


class LocalRun(Run):
    """One run in this process, of actors that are stepped one at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        restored: Restored,
        schedule: Schedule,
        retries: Mapping[str, pa.Table],
        *,
        seed: int,
        clock: Clock,
    ) -> None:
        super().__init__(store, restored, schedule, retries, clock)
        self._choose = random.Random(seed)  # noqa: S311 - an order of events, not a secret
        self._due_us = self._begun_us
        self._next_checkpoint()
        self._rows_read = self._rows_at_checkpoint = 0
        self._asked = self._paused = False
        self._ready = ReadySet()
        self._overtaking: ev.Barrier | None = None
        """The last barrier that has turned unaligned while it was under way."""
        self._workers: dict[ev.TaskId, Worker] = {}
        self._layers: dict[ev.TaskId, TaskLayers] = {}
        self._channels: dict[ev.Channel, Queue] = {}
        self._connect(restored)
        try:
            self._driver.open_coordinators(restored.coordinators, restored.finished)
            self._open(restored)
            self._driver.carry_out(self._coordinator.start())
        except BaseException:
            self.close()
            raise
        self._check_end()

    # Building ------------------------------------------------------------------------------------------------------------

    def _connect(self, restored: Restored) -> None:
        self._overtaken = frozenset(edge.id for edge in self.job.graph.edges if self.job.overtakable(edge))
        every = list(tasks_of(restored))
        for item in every:
            for edge_id, channels in item.inputs.items():
                capacity = None if self.job.graph.by_edge[edge_id].feedback else CAPACITY
                self._channels.update({channel: Queue(channel, capacity=capacity) for channel in channels})
        for vertex, core, inputs, outputs in every:
            queues = [self._channels[channel] for channels in inputs.values() for channel in channels]
            leaving = {edge_id: [self._channels[channel] for channel in some] for edge_id, some in outputs.items()}
            worker = Worker(core.id, vertex, core, queues, leaving, self._overtaken, self)
            worker.routers = {edge.id: Router(self.job, edge, core.id.subtask) for edge in vertex.outputs}
            self._workers[core.id] = worker
            self.wake(worker)
        self._sources = [worker for worker in self._workers.values() if worker.vertex.is_source]

    def _open(self, restored: Restored) -> None:
        parts = dict(restored_states(restored))
        for worker in self._workers.values():
            own = parts.get(worker.id, {})
            worker.operators = OperatorChain(self.job, worker.vertex, worker.id.subtask, worker)
            self._layers[worker.id] = TaskLayers(worker.operators.states, own)
            worker.operators.open({uid: part.tasks or {} for uid, part in own.items()} or None)
        for worker in self._workers.values():
            worker.count_late_rows()
        # What was in flight is processed before anything else, and after everybody is open to receive what comes of it.
        for worker in self._workers.values():
            for edge_id, task in restored.in_flight(worker.vertex, worker.id.subtask).items():
                for _, batch in in_flight_batches(task, self.job.schemas[edge_id]):
                    worker.operators.process(edge_id, batch)
        for worker in self._workers.values():
            worker.start()

    # Stepping ------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one actor do one thing. False: the job has ended, and :attr:`outcome` says how."""
        if self.outcome is not None:
            return False
        try:
            now_us = self._look_at_clock()
            worker = self._ready.draw(self._choose, now_us, others=len(self._driver.inbox))
            if worker is not None:
                read = worker.rows
                worker.step(self._choose)
                self._rows_read += worker.rows - read
                self._clock.tick()
            elif self._driver.inbox:
                if isinstance(self._driver.inbox[0], ev.CheckpointDue):
                    self._asked = False
                self._driver.step()
                self._clock.tick()
            else:
                self._wait()
        finally:
            if self._driver.failed_stops:
                self._stop_service.answer_failures()
        self._check_end()
        return self.outcome is None

    def _look_at_clock(self) -> int:
        """Let begin what is due; returns what time it is."""
        now_us = self._clock.now_us()
        in_flight, schedule = self._driver.in_flight, self._schedule
        rows = schedule.checkpoint_rows
        by_rows = rows is not None and self._rows_read - self._rows_at_checkpoint >= rows
        self._pause(by_rows or self._asked)
        if in_flight is None and not self._asked:
            if by_rows or (schedule.checkpoint_interval_us is not None and now_us >= self._due_us):
                self._next_checkpoint()
                self._rows_at_checkpoint = self._rows_read
                self._driver.inbox.append(ev.CheckpointDue())
                self._asked = True
        elif (
            in_flight is not None
            and schedule.timeout_us is not None
            and in_flight.is_late(now_us - schedule.timeout_us)
        ):
            self._driver.inbox.append(ev.TimedOut(in_flight.barrier.number))
        elif in_flight is not None and self._overtakes_at_us is not None and now_us >= self._overtakes_at_us:
            in_flight.overdue = True
            self._driver.inbox.append(ev.Overdue(in_flight.barrier.number))
        if self._stop_service.is_due(now_us):
            self._stop_service.poll()
        return now_us

    def _pause(self, paused: bool) -> None:
        """Let sources wait until the barrier that is due has begun; so rows are read between two as ``checkpoint_rows`` says."""
        if paused != self._paused:
            self._paused = paused
            for worker in self._sources:
                worker.paused = paused
                self.wake(worker)

    @property
    def _overtakes_at_us(self) -> int | None:
        """When the barrier in flight is to overtake; None where it is not, or was told to."""
        in_flight, after_us = self._driver.in_flight, self._schedule.unaligned_after_us
        if in_flight is None or after_us is None or in_flight.overdue:
            return None
        return in_flight.begun_us + after_us

    def _next_checkpoint(self) -> None:
        if self._schedule.checkpoint_interval_us is not None:
            self._due_us = self._clock.now_us() + self._schedule.checkpoint_interval_us

    def _wait(self) -> None:
        """Nobody has anything to do: wait for the clock."""
        waits = [self._ready.next_us, self._overtakes_at_us]
        if self._schedule.checkpoint_interval_us is not None and self._driver.in_flight is None:
            waits.append(self._due_us)
        if self._driver.in_flight is not None and self._schedule.timeout_us is not None:
            waits.append(self._driver.in_flight.begun_us + self._schedule.timeout_us + 1)
        waits.append(self._stop_service.next_us)
        if self._driver.in_flight is None and self._schedule.checkpoint_interval_us is None and self._awaited:
            # A checkpoint that tasks wait for was given up, and nobody else would ask for the next.
            self._clock.wait_until(self._clock.now_us() + RETRY_US)
            self._driver.inbox.append(ev.CheckpointDue())
            return
        known = [at_us for at_us in waits if at_us is not None]
        if not known:
            raise CheckpointError(
                f"job {self.job.flow.job_id!r} cannot go on: nobody has anything to do. {self.describe()}"
            )
        self._clock.wait_until(min(known))

    @property
    def _awaited(self) -> bool:
        states = {worker.task.state for worker in self._workers.values() if not worker.gone}
        return TaskState.WAITING in states or TaskState.DRAINING in states

    def describe(self) -> str:
        """What everybody is at, in words."""
        in_flight = self._driver.in_flight
        lines = [
            f"checkpoint in flight: barrier {in_flight.barrier.number}" if in_flight else "no checkpoint in flight"
        ]
        lines += [
            f"{worker.id}: {'gone' if worker.gone else worker.task.state.value}, mail {len(worker.mailbox)}, queued "
            f"{sum(len(queue.elements) for queue in worker.inputs.values())}"
            for worker in self._workers.values()
        ]
        return "; ".join(lines)

    # What users and tests ask --------------------------------------------------------------------------------------------

    @property
    def rows_read(self) -> int:
        """Rows that sources have read in this run."""
        return self._rows_read

    @property
    def tasks(self) -> Mapping[ev.TaskId, Worker]:
        """The tasks that were started."""
        return self._workers

    def fail_task(self, task: ev.TaskId, reason: str = "it was killed") -> None:
        """Kill a task."""
        self._workers[task].fail(RuntimeError(reason))

    def close(self) -> None:
        """Give up the run: every operator that has been opened and not closed is closed. What closing raises is logged."""
        for worker in self._workers.values():
            worker.release()

    def progress(self) -> Progress:
        """How far it has come."""
        running = [worker for worker in self._workers.values() if not worker.gone]
        times = {worker.id: worker.watermark for worker in running}
        return self._progress(rows_read=self.rows_read, running=len(running), times=times)

    @property
    def late_rows(self) -> int:
        """Rows that were dropped as late since the job began."""
        return self._driver.late_rows_before + sum(worker.late_rows for worker in self._workers.values())

    # What workers and the driver reach (worker.WorkerEnvironment, driver.TaskMessenger) ----------------------------------------------------------

    def tell(self, event: ev.CoordinatorEvent) -> None:
        """An event for the coordinator."""
        self._driver.inbox.append(event)

    def note(self, reason: str, error: Exception) -> None:
        """The exception behind a sentence."""
        self._driver.note(reason, error)

    def message(self, uid: str, subtask: int, message: bytes | None, snapshot_taken: int) -> None:
        """A message, or a marker, for an operator's coordinator."""
        self._driver.inbox.append(MessageToCoordinator(uid, subtask, message, snapshot_taken))

    def lost(self, uid: str, subtask: int) -> None:
        """A message of an operator's coordinator came too late."""
        self._driver.lost(uid, subtask)

    def request_split(self, task: ev.TaskId) -> None:
        """A reader's question."""
        self._driver.inbox.append(SplitRequested(task))

    def context(self, number: int) -> WriteContext:
        """What writers of a checkpoint need."""
        in_flight = self._driver.in_flight
        if in_flight is None or in_flight.checkpoint is None or in_flight.barrier.number != number:
            raise CheckpointError(f"checkpoint of barrier {number} is not in flight any more")
        return in_flight.checkpoint.context

    def add(self, number: int, snapshots: Sequence[Snapshot]) -> None:
        """The snapshots of a task."""
        in_flight = self._driver.in_flight
        if in_flight is not None and in_flight.checkpoint is not None and in_flight.barrier.number == number:
            task = ev.TaskId(self.job.vertex_of(snapshots[0].operator).id, snapshots[0].subtask or 0)
            for snapshot in self._layers[task].take(number, snapshots):
                in_flight.checkpoint.add(snapshot)

    def awaits_snapshot(self, task: ev.TaskId, number: int) -> bool:
        """Whether the checkpoint in flight is that of this barrier, and has not come to this task."""
        in_flight = self._driver.in_flight
        if in_flight is None or in_flight.checkpoint is None or in_flight.barrier.number != number:
            return False
        return self._workers[task].snapshot_taken < number

    def confirm(self, channel: ev.Channel) -> None:
        """The receiver of a channel has processed its data."""
        self.mail(sender_of(self.job, channel), ev.DataProcessed(channel))

    def announce(self, channel: ev.Channel, barrier: ev.Barrier) -> None:
        """A barrier overtakes what lies in a channel."""
        self.mail(receiver_of(self.job, channel), ev.Announced(channel, barrier))

    def log_arrival(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        """Records have come in on a channel that is being logged."""
        self._workers[receiver_of(self.job, channel)].log(channel, batch)

    def ended(self, task: ev.TaskId) -> None:
        """A task is gone: nobody need wait for it to process anything."""
        for channel in self._workers[task].inputs:
            self.confirm(channel)
        del self._layers[task]
        self.tell(ev.TaskEnded(task))

    def now_us(self) -> int:
        """The clock."""
        return self._clock.now_us()

    def mail(self, task: ev.TaskId, mail: Mail) -> None:
        """Put mail into a task's box."""
        worker = self._workers.get(task)
        if worker is None:
            return
        if not worker.gone:
            if isinstance(mail, ev.Completed):
                self._layers[task].complete(mail.number)
            worker.mailbox.append(mail)
            self.wake(worker)
        elif isinstance(mail, MessageToSubtask):
            self._driver.lost(mail.uid, task.subtask)

    def wake(self, worker: Worker) -> None:
        """A task may have become ready."""
        self._ready.wake(worker)

    def overtake(self, barrier: ev.Barrier) -> None:
        """A barrier that is under way overtakes from here on."""
        self._overtaking = barrier
        for channel, queue in self._channels.items():
            if queue.replace_barrier(barrier) and channel.edge in self._overtaken:
                self.announce(channel, barrier)

    def current_form(self, barrier: ev.Barrier) -> ev.Barrier:
        """A barrier as it is put into channels."""
        turned = self._overtaking
        return turned if turned is not None and turned.number == barrier.number else barrier

    def drop_in_flight(self) -> None:
        """Nothing is logged any more."""
        for queue in self._channels.values():
            queue.logged_for = None


__all__ = ["LocalRun"]
