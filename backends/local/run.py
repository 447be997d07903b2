"""One run of a job in this process, and the runtime of one process.

Theory of operation. A run is a set of actors: a worker for each task, and the driver. Each
:meth:`LocalRun.step` lets one actor that is ready do one thing. The seed draws which one, so the
same seed, store and clock give the same run. Nothing runs in the background: between two steps the
caller may kill a task, drop the run, or begin another.

Ready workers are kept in a set, from which one is drawn without asking all workers at each step
(:class:`ReadySet`). A worker becomes ready when mail or an element arrives, when an output has room
again, when its time has come, or by its own step. All but the last :meth:`~ReadySet.wake` it; after
a step it stays a candidate. So the candidates are all ready workers, and some that were ready. A
drawn candidate that is not ready is removed and another is drawn, which gives each ready one the
same chance. So the cost of a step does not grow with the number of tasks.

Nothing refers to what an aborted checkpoint has written: the next one writes all changes since the
newest checkpoint (:class:`TaskLayers`).
"""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import groupby
from typing import Unpack

import pyarrow as pa

from stateformat.errors import CheckpointError, InvalidInput
from stateformat.graph import Edge, brief
from stateformat.publication import PendingCheckpoint
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.store import CheckpointStore

from .. import runtime as rt
from ..dataflow import events as ev
from ..dataflow.api import Source
from ..dataflow.chain import OperatorChain, in_flight_batches
from ..dataflow.compile import Router
from ..dataflow.source_reader import Holder
from ..dataflow.task_states import TaskState
from ..runtime import (
    Clock,
    OperatorState,
    Options,
    Progress,
    Restored,
    Runtime,
    RuntimeOptions,
    Worker,
    layers_of,
    merge_snapshot,
)
from ..state import SubtaskStates

_FIRST_VERSION = 1


class TaskLayers:
    """The layers of the states of one task.

    Made before these are restored: it begins their versions.
    """

    def __init__(self, states: Mapping[str, SubtaskStates], restored: Mapping[str, OperatorState]) -> None:
        self._states = states
        self._newest = dict(restored)
        self._taken: dict[str, OperatorState] = {}
        self._number = 0
        for uid, of_operator in states.items():
            of_operator.begin(_FIRST_VERSION)
            of_operator.layers = layers_of(self._newest[uid]) if uid in self._newest else {}

    def take(self, number: int, snapshots: Sequence[Snapshot]) -> list[Snapshot]:
        """Return the snapshots of a barrier, with the layers that stay below."""
        self._number, self._taken = number, {}
        for snapshot in snapshots:
            states = self._states.get(snapshot.operator)
            if states is not None and not snapshot.finishing:
                before = self._newest.get(snapshot.operator)
                self._taken[snapshot.operator] = merge_snapshot(snapshot, states.layers_kept, before, states.version)
        return [self._taken[each.operator].snapshot if each.operator in self._taken else each for each in snapshots]

    def complete(self, number: int) -> None:
        """Note that a barrier's checkpoint is published: the next deltas go on top of it."""
        if number != self._number:
            return
        self._newest.update(self._taken)
        for uid, state in self._taken.items():
            self._states[uid].layers = layers_of(state)
        self._taken = {}


class ReadySet:
    """The workers that may have something to do."""

    def __init__(self) -> None:
        self._candidates: list[Worker] = []
        self._place: dict[Worker, int] = {}
        self._timed: list[tuple[int, int, Worker]] = []
        self._until: dict[Worker, int] = {}
        self._count = 0

    def wake(self, worker: Worker) -> None:
        """Note that a worker may have become ready."""
        if worker not in self._place:
            self._place[worker] = len(self._candidates)
            self._candidates.append(worker)

    def draw(self, choose: random.Random, now_us: int, *, others: int = 0) -> Worker | None:
        """One of the ready workers; None without any, or if one of so many ``others`` is drawn."""
        while self._timed and self._timed[0][0] <= now_us:
            at_us, _, worker = heappop(self._timed)
            if self._until.get(worker) == at_us:
                del self._until[worker]
            self.wake(worker)
        while self._candidates:
            drawn = int(choose.random() * (len(self._candidates) + others))
            if drawn >= len(self._candidates):
                return None
            worker = self._candidates[drawn]
            if worker.ready(now_us):
                return worker
            self._put_away(worker, now_us)
        return None

    def _put_away(self, worker: Worker, now_us: int) -> None:
        place, last = self._place.pop(worker), self._candidates.pop()
        if last is not worker:
            self._candidates[place] = last
            self._place[last] = place
        at_us = worker.idle_until_us
        if at_us is not None and at_us > now_us and self._until.get(worker) != at_us:
            self._until[worker] = at_us
            self._count += 1
            heappush(self._timed, (at_us, self._count, worker))

    @property
    def next_us(self) -> int | None:
        """Return when to ask the first worker that waits for the clock again."""
        return self._timed[0][0] if self._timed else None


RETRY_US = 1_000_000
"""Without an interval, an aborted checkpoint that tasks wait for begins again after this time."""


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Disable Python's garbage collector for a block that makes very many channels and tasks.

    None of them is garbage, and it would visit all of them several times.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class LocalRun(rt.Run):
    """One run in this process; its actors are stepped one at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        restored: rt.Restored,
        schedule: rt.Schedule,
        retries: Mapping[str, pa.Table],
        *,
        seed: int,
        clock: rt.Clock,
        soon: rt.SoonStop | None = None,
    ) -> None:
        super().__init__(store, restored, schedule, retries, clock, soon or rt.SoonStop(clock))
        self._choose = random.Random(seed)  # noqa: S311 - an order of events, not a secret
        self._due_us: int | None
        """When the next checkpoint begins by the interval."""
        self._schedule_checkpoint()
        self._rows_read = self._rows_at_checkpoint = 0
        self._asked = self._paused = False
        self._ready = ReadySet()
        self._overtaking: ev.Barrier | None = None
        """The last barrier that became unaligned in flight."""
        self._workers: dict[ev.TaskId, rt.Worker] = {}
        self._layers: dict[ev.TaskId, TaskLayers] = {}
        with _without_collection():
            self._connect(restored)
        try:
            self._driver.open_coordinators(restored.coordinators, restored.finished)
            self._open(restored)
            self._driver.carry_out(self._coordinator.start())
        except BaseException:
            self.close()
            raise
        self._check_end()

    def __repr__(self) -> str:
        return brief(self)

    def _connect(self, restored: rt.Restored) -> None:
        self._overtaken = frozenset(edge.id for edge in self.job.graph.edges if self.job.overtakable(edge))
        known = rt.channels_of(restored)
        self._logs = {
            edge.id: rt.EdgeLog(*known[edge.id])
            for edge in self.job.graph.edges
            if edge.id in known and self._is_wide(edge, len(known[edge.id].leaving))
        }
        """Of wide edges."""
        every = list(rt.tasks_of(restored, known))
        queues: dict[ev.Channel, rt.Queue] = {}
        for item in every:
            fill = rt.LoopFill(item.core.id, self._schedule.loop_bytes_max)
            for edge_id, channels in item.inputs.items():
                feedback = self.job.graph.by_edge[edge_id].feedback
                capacity, own = (None, fill) if feedback else (rt.CAPACITY, None)
                if edge_id not in self._logs:
                    queues.update({channel: rt.Queue(channel, capacity=capacity, fill=own) for channel in channels})
        for item in every:
            worker = self._worker(item, queues)
            self._workers[worker.id] = worker
            self.wake(worker)
        of_vertex: dict[str, dict[int, rt.Worker]] = {}
        for name, worker in self._workers.items():
            of_vertex.setdefault(name.vertex, {})[name.subtask] = worker
        self._senders = {
            edge.id: of_vertex.get(self.job.vertex_of(edge.source).id, {}) for edge in self.job.graph.edges
        }
        """The tasks at the source of each edge."""
        self._sources = [worker for worker in self._workers.values() if worker.vertex.is_source]

    def _is_wide(self, edge: Edge, senders: int) -> bool:
        all_to_all = edge.partitioner.all_to_all and not edge.feedback
        return all_to_all and self.job.vertex_of(edge.target).id == edge.target and rt.is_wide(senders)

    def _worker(self, item: rt.TaskChannels, queues: Mapping[ev.Channel, rt.Queue]) -> rt.Worker:
        (vertex, core, inputs, outputs), logs, subtask = item, self._logs, item.core.id.subtask
        worker = rt.Worker(
            core.id,
            vertex,
            core,
            [queues[channel] for edge, channels in inputs.items() if edge not in logs for channel in channels],
            {edge: [queues[channel] for channel in some] for edge, some in outputs.items() if edge not in logs},
            self._overtaken,
            self,
            hears={edge: logs[edge].receiving[subtask] for edge in inputs if edge in logs},
            tells={edge: logs[edge].sending[subtask] for edge in outputs if edge in logs},
        )
        worker.routers = {edge.id: Router(self.job, edge, subtask) for edge in vertex.outputs}
        return worker

    def _open(self, restored: rt.Restored) -> None:
        with _without_collection():
            self._open_chains(dict(rt.restored_states(restored)))
        for worker in self._workers.values():
            worker.count_late_rows()
        # In-flight records are processed first, once all operators are open for the results.
        for worker in self._workers.values():
            for edge_id, task in restored.in_flight(worker.vertex, worker.id.subtask).items():
                for batch in in_flight_batches(task, self.job.schemas[edge_id]):
                    worker.operators.process(edge_id, batch)
        for worker in self._workers.values():
            worker.start()

    def _open_chains(self, parts: Mapping[ev.TaskId, Mapping[str, rt.OperatorState]]) -> None:
        for worker in self._workers.values():
            own = parts.get(worker.id, {})
            worker.operators = OperatorChain(self.job, worker.vertex, worker.id.subtask, worker)
            worker.fires_timers = worker.operators.is_timed
            self._layers[worker.id] = TaskLayers(worker.operators.states, own)
            worker.operators.open({uid: part.tasks or {} for uid, part in own.items()} or None)

    def step(self) -> bool:
        if self.outcome is not None:
            return False
        try:
            now_us = self._begin_what_is_due()
            self._watch_time(now_us)
            self._driver.processing_time.advance()
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
                self._note_checkpoint()
                self._clock.tick()
            else:
                self._wait()
        finally:
            self._requests.settle()
        self._check_end()
        return self.outcome is None

    def _begin_what_is_due(self) -> int:
        """Pass the driver what is due; return the time."""
        now_us = self._clock.now_us()
        in_flight, rows = self._driver.in_flight, self._schedule.checkpoint_rows
        by_rows = rows is not None and self._rows_read - self._rows_at_checkpoint >= rows
        if self._soon.until_us is not None:
            self._tell_of_soon_stop()
        self._pause(by_rows or self._asked or (self._is_told_soon and not self._coordinator.must_go_on))
        if in_flight is None:
            if not self._asked and (by_rows or (self._due_us is not None and now_us >= self._due_us)):
                self._schedule_checkpoint()
                self._rows_at_checkpoint = self._rows_read
                self._driver.inbox.append(ev.CheckpointDue())
                self._asked = True
        elif self._times_out_at_us is not None and now_us >= self._times_out_at_us:
            in_flight.timed_out = True
            self._driver.inbox.append(ev.TimedOut(in_flight.barrier.number))
        elif self._overtakes_at_us is not None and now_us >= self._overtakes_at_us:
            in_flight.overdue = True
            self._driver.inbox.append(ev.Overdue(in_flight.barrier.number))
        self._requests.poll()
        return now_us

    def _pause(self, paused: bool) -> None:
        """Pause sources until the barrier that is due has begun, to respect ``checkpoint_rows``."""
        if paused != self._paused:
            self._paused = paused
            for worker in self._sources:
                worker.paused = paused
                self.wake(worker)

    @property
    def _times_out_at_us(self) -> int | None:
        in_flight, timeout_us = self._driver.in_flight, self._schedule.timeout_us
        if in_flight is None or timeout_us is None or in_flight.timed_out:
            return None
        return in_flight.begun_us + timeout_us + 1

    @property
    def _overtakes_at_us(self) -> int | None:
        in_flight, after_us = self._driver.in_flight, self._schedule.unaligned_after_us
        if in_flight is None or after_us is None or in_flight.overdue:
            return None
        return in_flight.begun_us + after_us

    def _schedule_checkpoint(self) -> None:
        interval_us = self._schedule.checkpoint_interval_us
        self._due_us = None if interval_us is None else self._clock.now_us() + interval_us

    def _wait(self) -> None:
        """Wait for the clock, as no actor can do anything."""
        in_flight = self._driver.in_flight
        if in_flight is None and self._due_us is None and self._awaited:
            # A checkpoint that tasks wait for was aborted, and nothing else would begin the next.
            self._clock.wait_until(self._clock.now_us() + RETRY_US)
            self._driver.inbox.append(ev.CheckpointDue())
            return
        checkpoint_us = self._due_us if in_flight is None else self._times_out_at_us
        waits = (self._ready.next_us, self._overtakes_at_us, checkpoint_us, self._requests.next_us)
        known = [at_us for at_us in waits if at_us is not None]
        if not known:
            raise CheckpointError(
                f"job {self.job.flow.job_id!r} cannot go on: no task can do anything. {self.describe()}"
            )
        self._clock.wait_until(min(known))

    @property
    def _awaited(self) -> bool:
        states = {worker.task.state for worker in self._workers.values() if not worker.gone}
        return TaskState.WAITING in states or TaskState.DRAINING in states

    def _readers(self) -> Iterator[tuple[str, Holder]]:
        for worker in self._sources:
            if not worker.gone and worker.task.may_read and not worker.task.is_idle:
                reader = worker.operators.reader
                if worker.vertex.id in self._time_watch.sources and reader is not None:
                    yield worker.vertex.id, reader.holder

    def describe(self) -> str:
        """Return what every actor is doing, as text."""
        in_flight = self._driver.in_flight
        lines = [
            f"checkpoint in flight: barrier {in_flight.barrier.number}" if in_flight else "no checkpoint in flight"
        ]
        lines += [
            f"{worker.id}: {'gone' if worker.gone else worker.task.state.value}, mail {len(worker.mailbox)}, queued "
            f"{worker.queued}"
            for worker in self._workers.values()
        ]
        return "; ".join(lines)

    @property
    def rows_read(self) -> int:
        return self._rows_read

    @property
    def tasks(self) -> Mapping[ev.TaskId, rt.Worker]:
        """The tasks that have been started."""
        return self._workers

    def close(self) -> None:
        self._requests.close()
        for worker in self._workers.values():
            worker.release()

    def progress(self) -> rt.Progress:
        running = [worker.task for worker in self._workers.values() if not worker.gone]
        return self._progress(rows_read=self.rows_read, running=running)

    @property
    def late_rows(self) -> int:
        return self._driver.late_rows_before + sum(worker.late_rows for worker in self._workers.values())

    # What workers call (worker.WorkerEnvironment)

    def tell(self, event: ev.CoordinatorEvent) -> None:
        self._driver.inbox.append(event)

    def note(self, reason: str, error: Exception) -> None:
        self._driver.note(reason, error)

    def message(self, uid: str, subtask: int, message: bytes | None, snapshot_taken: int) -> None:
        self._driver.inbox.append(rt.MessageToCoordinator(uid, subtask, message, snapshot_taken))

    def lost(self, uid: str, subtask: int) -> None:
        self._driver.lost(uid, subtask)

    def request_split(self, task: ev.TaskId) -> None:
        self._driver.inbox.append(rt.SplitRequested(task))

    def _checkpoint(self, number: int) -> PendingCheckpoint | None:
        """Return the checkpoint of this barrier, if it is in flight."""
        in_flight = self._driver.in_flight
        return in_flight.checkpoint if in_flight is not None and in_flight.barrier.number == number else None

    def context(self, number: int) -> WriteContext:
        checkpoint = self._checkpoint(number)
        if checkpoint is None:
            raise CheckpointError(f"checkpoint of barrier {number} is not in flight any more")
        return checkpoint.context

    def add(self, number: int, snapshots: Sequence[Snapshot]) -> None:
        checkpoint = self._checkpoint(number)
        if checkpoint is not None:
            task = ev.TaskId(self.job.vertex_of(snapshots[0].operator).id, snapshots[0].subtask or 0)
            for snapshot in self._layers[task].take(number, snapshots):
                checkpoint.add(snapshot)

    def awaits_snapshot(self, task: ev.TaskId, number: int) -> bool:
        return self._checkpoint(number) is not None and self._workers[task].snapshot_taken < number

    def confirm(self, channels: Iterable[ev.Channel]) -> None:
        for edge, some in groupby(channels, lambda channel: channel.edge):
            log, senders = self._logs.get(edge), self._senders[edge]
            if log is not None:
                for sender in log.confirm(some):
                    self.mail(senders[sender].id, rt.AllProcessed(log.sending[sender].channels))
                continue
            for channel in some:
                if channel.sender in senders:
                    self.mail(senders[channel.sender].id, ev.DataProcessed(channel))

    def announce(self, channel: ev.Channel, barrier: ev.Barrier) -> None:
        self.mail(rt.receiver_of(self.job, channel), ev.Announced(channel, barrier))

    def log_arrival(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        self._workers[rt.receiver_of(self.job, channel)].log(channel, batch)

    def ended(self, task: ev.TaskId) -> None:
        # No sender needs to wait for it; those from outside its loop had left before.
        feedback = {edge.id for edge in self._workers[task].vertex.feedback}
        if feedback:
            self.confirm(channel for channel in self._workers[task].inputs if channel.edge in feedback)
        del self._layers[task]
        self.tell(ev.TaskEnded(task))

    def now_us(self) -> int:
        return self._clock.now_us()

    def processing_time_us(self) -> int:
        return self._driver.processing_time.now_us

    def clock_at(self, time_us: int) -> int:
        return self._driver.processing_time.clock_at(time_us)

    def wake(self, worker: rt.Worker) -> None:
        self._ready.wake(worker)

    def current_form(self, barrier: ev.Barrier) -> ev.Barrier:
        turned = self._overtaking
        return turned if turned is not None and turned.number == barrier.number else barrier

    # What the driver calls (driver.TaskMessenger)

    def mail(self, task: ev.TaskId, mail: rt.Mail) -> None:
        worker = self._workers.get(task)
        if worker is None:
            return
        if not worker.gone:
            if isinstance(mail, ev.Completed):
                self._layers[task].complete(mail.number)
            worker.mailbox.append(mail)
            self.wake(worker)
        elif isinstance(mail, rt.MessageToSubtask):
            self._driver.lost(mail.uid, task.subtask)

    def overtake(self, barrier: ev.Barrier) -> None:
        self._overtaking = barrier
        for log in self._logs.values():
            for end in log.receiving:
                end.to_queues()
        for queue in self._queues:
            if queue.replace_barrier(barrier) and queue.channel.edge in self._overtaken:
                self.announce(queue.channel, barrier)

    def drop_in_flight(self) -> None:
        for queue in self._queues:
            queue.logged_for = None

    @property
    def _queues(self) -> Iterator[rt.Queue]:
        """The channels that have a queue."""
        return (queue for worker in self._workers.values() for queue in worker.inputs.values())


class LocalRuntime(Runtime[LocalRun]):
    """Runs dataflows on a store, in one thread. Keyword arguments: see :class:`.Runtime`."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        clock: Clock | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Unpack[RuntimeOptions],
    ) -> None:
        super().__init__(store, clock=clock, progress=progress, **options)

    def _make_run(self, restored: Restored, options: Options, retries: Mapping[str, pa.Table]) -> LocalRun:
        _check_sources(restored)
        seed = options.seed + 1_000_003 * (self._runs - 1)
        return LocalRun(self.store, restored, options.schedule, retries, seed=seed, clock=self._clock, soon=self._soon)


def _check_sources(restored: Restored) -> None:
    """Refuse sources of another executor, which would make the run wait for ever."""
    for vertex in restored.job.vertices:
        if vertex.is_source and vertex.id not in restored.finished:
            source = restored.job.logic(vertex.id)
            read_by = source.read_by if isinstance(source, Source) else None
            if read_by not in (None, LocalRuntime.__name__):
                raise InvalidInput(
                    f"source {vertex.id!r} is a {type(source).__name__}, which only {read_by} reads. "
                    f"Run the dataflow with {read_by}.",
                    operator=vertex.id,
                )
