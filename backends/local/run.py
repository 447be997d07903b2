"""One run of a job in this process: from a restore to its end, its failure, or its stop.

Theory of operation. A run is a set of actors: one :class:`~backends.local.worker.Worker` for each task that runs, and the
:class:`~backends.local.driver.Driver`. :meth:`LocalRun.step` lets one that has something to do do one thing; which one is drawn
from the seed, so the same seed, store and clock give the same run. Nothing runs beside it. Between two steps the caller may do
whatever an unkind world does: kill a task, lose the whole run, begin another.
"""

from __future__ import annotations

import logging
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from backends.dataflow import events as ev
from backends.dataflow.activation import Activation, in_flight_batches
from backends.dataflow.compile import Vertex
from backends.dataflow.coordinator import LOOP_ROUNDS_MAX, Coordinator
from backends.dataflow.inputs import InputEdge
from backends.dataflow.life import State
from backends.dataflow.loops import loops_of
from backends.dataflow.routing import Router
from backends.dataflow.task import Task
from backends.local.channels import CAPACITY, Queue
from backends.local.checks import check_whole
from backends.local.clock import Clock
from backends.local.driver import Driver, SplitWanted, ToCoordinator
from backends.local.outcome import JobOutcome
from backends.local.pending import InFlight
from backends.local.progress import Progress
from backends.local.readiness import Readiness
from backends.local.restore import Restored
from backends.local.stopping import Stopping
from backends.local.worker import Mail, Worker
from stateformat.errors import CheckpointError
from stateformat.model import Edge, StopMode
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.store import CheckpointStore

logger = logging.getLogger(__name__)

RETRY_US = 1_000_000
"""After which time a checkpoint that tasks wait for, and that was given up, is tried again where there is no interval."""


@dataclass(frozen=True)
class Schedule:
    """When what is due, and what goes with it. Times in µs of the executor's clock; None: never.

    A checkpoint begins ``checkpoint_interval_us`` after the last one, or after ``checkpoint_rows`` rows that sources have read,
    whichever comes first; ``timeout_us`` after its begin it is given up. The store is looked at for requests every
    ``requests_every_us``. ``tolerable_failures`` in a row are no failure of the job.
    ``keep``: so many checkpoints are kept, None for all. ``savepoint_options``: with what the store of a savepoint is opened.
    ``loop_rounds_max``: how often a loop whose input has ended is turned before the run fails.
    """

    checkpoint_interval_us: int | None = 10_000_000
    checkpoint_rows: int | None = None
    timeout_us: int | None = 600_000_000
    requests_every_us: int | None = 1_000_000
    tolerable_failures: int = 0
    keep: int | None = None
    savepoint_options: Mapping[str, Any] = field(default_factory=dict)
    loop_rounds_max: int = LOOP_ROUNDS_MAX

    def __post_init__(self) -> None:
        """Raises ``InvalidInput`` for a number that means nothing."""
        check_whole(
            self,
            checkpoint_interval_us=1,
            checkpoint_rows=1,
            timeout_us=1,
            requests_every_us=1,
            tolerable_failures=0,
            keep=1,
            loop_rounds_max=1,
        )


class LocalRun:
    """One run. Step it until :attr:`outcome` is there.

    :meth:`step` raises ``RunDiscarded`` when the run is given up and the job is to go on from its newest checkpoint, and what
    publishing raises when another run has the job. Either way, the run is over; :meth:`close` lets operators release what they
    hold, as far as this process goes on.
    """

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
        self.job = restored.job
        self.outcome: JobOutcome | None = None
        self._choose = random.Random(seed)  # noqa: S311 - an order of events, not a secret
        self._clock = clock
        self._schedule = schedule
        self._begun_us = clock.now_us()
        self._due_us = self._begun_us
        self._next_checkpoint()
        self._rows_at_checkpoint = 0
        self._readiness = Readiness()
        self._workers: dict[ev.TaskId, Worker] = {}
        self._channels: dict[ev.Channel, Queue] = {}
        self._all_tasks = sum(vertex.parallelism for vertex in self.job.vertices)
        coordinator = Coordinator(
            self.job,
            finished=restored.finished,
            tolerable_failures=schedule.tolerable_failures,
            loop_rounds_max=schedule.loop_rounds_max,
        )
        self._driver = Driver(
            store, self.job, restored.permit, coordinator, self, clock.now_us, keep=schedule.keep, retries=retries
        )
        self._stopping = Stopping(
            store,
            self._driver,
            clock,
            every_us=schedule.requests_every_us,
            held=restored.permit,
            savepoint_options=schedule.savepoint_options,
        )
        self._loops = loops_of(self.job.vertices)
        running = [vertex for vertex in self.job.vertices if vertex.id not in restored.finished]
        self._connect(running, restored)
        try:
            self._driver.open_coordinators(restored.coordinators, restored.finished)
            self._open(restored)
            self._driver.carry_out(coordinator.start())
        except BaseException:
            self.close()
            raise
        self._see_end()

    # Building ------------------------------------------------------------------------------------------------------------

    def _connect(self, running: Sequence[Vertex], restored: Restored) -> None:
        alive = {vertex.id for vertex in running}
        overtaken = frozenset(edge.id for edge in self.job.graph.edges if self.job.overtakable(edge))
        for vertex in running:
            for edge in (*vertex.inputs, *vertex.feedback):
                if self.job.vertex_of(edge.source).id not in alive:
                    continue
                for receiver in range(vertex.parallelism):
                    for sender in self.job.senders(edge.id, receiver):
                        channel = ev.Channel(edge.id, sender, receiver)
                        self._channels[channel] = Queue(channel, capacity=None if edge.feedback else CAPACITY)
        for vertex in running:
            for subtask in range(vertex.parallelism):
                task_id = ev.TaskId(vertex.id, subtask)
                inputs = {
                    edge.id: [
                        self._channels[channel]
                        for sender in self.job.senders(edge.id, subtask)
                        if (channel := ev.Channel(edge.id, sender, subtask)) in self._channels
                    ]
                    for edge in (*vertex.inputs, *vertex.feedback)
                }
                outputs = {
                    edge.id: [
                        self._channels[ev.Channel(edge.id, subtask, receiver)]
                        for receiver in self.job.receivers(edge.id, subtask)
                    ]
                    for edge in vertex.outputs
                    if self.job.vertex_of(edge.target).id in alive
                }
                task = self._task(vertex, task_id, inputs, outputs, restored)
                queues = [queue for some in inputs.values() for queue in some]
                worker = Worker(task_id, vertex, task, queues, outputs, overtaken, self)
                worker.routers = {edge.id: Router(self.job, edge, subtask) for edge in vertex.outputs}
                self._workers[task_id] = worker
                self.wake(worker)
        self._sources = [worker for worker in self._workers.values() if worker.vertex.is_source]

    def _task(
        self,
        vertex: Vertex,
        task_id: ev.TaskId,
        inputs: Mapping[str, Sequence[Queue]],
        outputs: Mapping[str, Sequence[Queue]],
        restored: Restored,
    ) -> Task:
        watermarks, ended = restored.progress(vertex, task_id.subtask)
        edges = [
            InputEdge(
                edge.id,
                edge.input,
                tuple(queue.channel for queue in inputs[edge.id]),
                feedback=edge.feedback,
                overtakable=self.job.overtakable(edge),
                inside=not edge.feedback and self._in_one_loop(vertex, edge),
                watermark=watermarks.get(edge.id, ev.MIN_WATERMARK),
                ended=edge.id in ended,
            )
            for edge in (*vertex.inputs, *vertex.feedback)
        ]
        channels = [queue.channel for some in outputs.values() for queue in some]
        replayed = bool(restored.in_flight(vertex, task_id.subtask))
        return Task(task_id, edges, channels, replayed=replayed)

    def _in_one_loop(self, head: Vertex, edge: Edge) -> bool:
        source = self.job.vertex_of(edge.source).id
        return bool(head.feedback) and any(head.id in loop and source in loop for loop in self._loops)

    def _open(self, restored: Restored) -> None:
        for worker in self._workers.values():
            vertex, subtask = worker.vertex, worker.id.subtask
            worker.operators = Activation(self.job, vertex, subtask, worker)
            worker.operators.open(restored.states(vertex, subtask))
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
        self._look_at_clock()
        now_us = self._clock.now_us()
        worker = self._readiness.draw(self._choose, now_us, others=bool(self._driver.inbox))
        try:
            if worker is not None:
                worker.step(self._choose)
                self._clock.tick()
            elif self._driver.inbox:
                self._driver.step()
                self._clock.tick()
            else:
                self._wait()
        finally:
            self._stopping.tell_failures()
        self._see_end()
        return self.outcome is None

    def _look_at_clock(self) -> None:
        now_us = self._clock.now_us()
        in_flight, schedule = self._driver.in_flight, self._schedule
        if in_flight is None:
            rows = schedule.checkpoint_rows
            by_rows = rows is not None and self.rows_read - self._rows_at_checkpoint >= rows
            if by_rows or (schedule.checkpoint_interval_us is not None and now_us >= self._due_us):
                self._next_checkpoint()
                self._rows_at_checkpoint = self.rows_read
                self._driver.inbox.append(ev.CheckpointDue())
        elif schedule.timeout_us is not None and in_flight.is_late(now_us - schedule.timeout_us):
            self._driver.inbox.append(ev.TimedOut(in_flight.barrier.number))
        self._stopping.look()

    def _next_checkpoint(self) -> None:
        if self._schedule.checkpoint_interval_us is not None:
            self._due_us = self._clock.now_us() + self._schedule.checkpoint_interval_us

    def _wait(self) -> None:
        """Nobody has anything to do: wait for the clock."""
        waits = [self._readiness.next_us]
        if self._schedule.checkpoint_interval_us is not None and self._driver.in_flight is None:
            waits.append(self._due_us)
        if self._driver.in_flight is not None and self._schedule.timeout_us is not None:
            waits.append(self._driver.in_flight.begun_us + self._schedule.timeout_us + 1)
        waits.append(self._stopping.next_us)
        if self._driver.in_flight is None and self._schedule.checkpoint_interval_us is None and self._awaited:
            # A checkpoint that tasks wait for was given up, and nobody else would ask for the next.
            self._clock.wait_until(self._clock.now_us() + RETRY_US)
            self._driver.inbox.append(ev.CheckpointDue())
            return
        known = [at_us for at_us in waits if at_us is not None]
        if not known:
            raise CheckpointError(
                f"job {self.job.flow.job_id!r} cannot go on: nobody has anything to do. {self.story()}"
            )
        self._clock.wait_until(min(known))

    @property
    def _awaited(self) -> bool:
        states = {worker.task.state for worker in self._workers.values() if not worker.gone}
        return State.WAITING in states or State.DRAINING in states

    def _see_end(self) -> None:
        if self._driver.ended is not None and self.outcome is None:
            self._driver.commit_rest(self._clock)
            self.outcome = self._stopping.outcome(self._driver.ended)

    def story(self) -> str:
        """What everybody is at, in words."""
        in_flight = self._driver.in_flight
        lines = [
            f"checkpoint in flight: barrier {in_flight.barrier.number}" if in_flight else "no checkpoint in flight"
        ]
        lines += [
            f"{worker.id}: {'gone' if worker.gone else worker.task.state.value}, mail {len(worker.mail)}, queued "
            f"{sum(len(queue.elements) for queue in worker.inputs.values())}"
            for worker in self._workers.values()
        ]
        return "; ".join(lines)

    # What users and tests ask --------------------------------------------------------------------------------------------

    @property
    def rows_read(self) -> int:
        """Rows that sources have read in this run."""
        return sum(worker.rows for worker in self._sources)

    @property
    def published(self) -> int:
        """How many checkpoints this run has published."""
        return self._driver.published

    @property
    def tasks(self) -> Mapping[ev.TaskId, Worker]:
        """The tasks that were started."""
        return self._workers

    @property
    def in_flight(self) -> InFlight | None:
        """The checkpoint in flight."""
        return self._driver.in_flight

    def request_stop(self, mode: StopMode, savepoint: str | None = None) -> str:
        """Ask for a stop with a savepoint, as `ckpt stop` does from outside; returns the request's id."""
        request = secrets.token_hex(16)
        self._stopping.ask(request, mode, savepoint)
        return request

    def fail_task(self, task: ev.TaskId, reason: str = "it was killed") -> None:
        """Kill a task."""
        self._workers[task].fail(RuntimeError(reason))

    def close(self) -> None:
        """Give up the run: every operator that has been opened and not closed is closed. What closing raises is logged."""
        for worker in self._workers.values():
            worker.give_up()

    def progress(self) -> Progress:
        """How far it has come."""
        permit = self._driver.permit
        running = [worker for worker in self._workers.values() if not worker.gone]
        warnings, self._driver.warnings = tuple(self._driver.warnings), []
        return Progress(
            job_id=self.job.flow.job_id,
            elapsed_us=self._clock.now_us() - self._begun_us,
            rows_read=self.rows_read,
            checkpoint_id=permit.ref.checkpoint_id if permit else None,
            state_rows=permit.record.totals.rows if permit else 0,
            state_bytes=permit.record.totals.bytes if permit else 0,
            running=len(running),
            finished=self._all_tasks - len(running),
            watermark=min((worker.watermark for worker in running), default=ev.MAX_WATERMARK),
            warnings=warnings,
        )

    # What workers and the driver reach (worker.Link, driver.Post) ----------------------------------------------------------

    def tell(self, event: ev.CoordinatorEvent) -> None:
        """An event for the coordinator."""
        self._driver.inbox.append(event)

    def message(self, uid: str, subtask: int, message: bytes, snapshot_taken: int) -> None:
        """A message for an operator's coordinator."""
        self._driver.inbox.append(ToCoordinator(uid, subtask, message, snapshot_taken))

    def want_split(self, task: ev.TaskId) -> None:
        """A reader's question."""
        self._driver.inbox.append(SplitWanted(task))

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
            for snapshot in snapshots:
                in_flight.checkpoint.add(snapshot)

    def awaits_snapshot(self, task: ev.TaskId) -> bool:
        """Whether the checkpoint in flight has not come to this task."""
        in_flight = self._driver.in_flight
        if in_flight is None or in_flight.checkpoint is None:
            return False
        return self._workers[task].snapshot_taken < in_flight.barrier.number

    def confirm(self, channel: ev.Channel) -> None:
        """The receiver of a channel has processed its data."""
        self.mail(self._sender_of(channel), ev.DataProcessed(channel))

    def announce(self, channel: ev.Channel, barrier: ev.Barrier) -> None:
        """A barrier overtakes what lies in a channel."""
        self.mail(self._receiver_of(channel), ev.Announced(channel, barrier))

    def log_arrival(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        """Records have come in on a channel that is being logged."""
        self._workers[self._receiver_of(channel)].log(channel, batch)

    def ended(self, task: ev.TaskId) -> None:
        """A task is gone: nobody need wait for it to process anything."""
        for channel in self._workers[task].inputs:
            self.confirm(channel)
        self.tell(ev.TaskEnded(task))

    def now_us(self) -> int:
        """The clock."""
        return self._clock.now_us()

    def mail(self, task: ev.TaskId, mail: Mail) -> None:
        """Put mail into a task's box."""
        worker = self._workers.get(task)
        if worker is not None and not worker.gone:
            worker.mail.append(mail)
            self.wake(worker)

    def wake(self, worker: Worker) -> None:
        """A task may have become ready."""
        self._readiness.wake(worker)

    def drop_in_flight(self) -> None:
        """Nothing is logged any more."""
        for queue in self._channels.values():
            queue.logged_for = None

    def _sender_of(self, channel: ev.Channel) -> ev.TaskId:
        return ev.TaskId(self.job.vertex_of(self.job.graph.by_edge[channel.edge].source).id, channel.sender)

    def _receiver_of(self, channel: ev.Channel) -> ev.TaskId:
        return ev.TaskId(self.job.vertex_of(self.job.graph.by_edge[channel.edge].target).id, channel.receiver)


__all__ = ["LocalRun", "Schedule"]
