"""What Spark runs in a Python worker: the tasks of one level of an epoch, in one slot.

A slot (:class:`Level`) runs every task of the level whose subtask is the slot's number, and passes
on payloads for other levels. It reads frames one by one, and sends output whenever enough has
gathered.

A :class:`TaskRun` is one task in one epoch: from its restore point and mail to its report. The
operator chain is the one that this worker has cached, or a new one opened from the restore point. A
``Worker``, as in every executor, first processes what was fed back into a loop, then mail, then
records; its channels end in frames. When all input has arrived, the barrier has passed, and the
snapshot is written. An epoch without a barrier that writes is a consistent cut as well, since
nothing is in flight when it ends: the states are written as they are at its end.

The head of a loop writes its states at its own level and sends the barrier into its loop. Then it
sends itself to the last level as a frame, with a snapshot that is still open. There, everything
that was fed back in the epoch becomes the snapshot's in-flight state (FLIP-16), which the next
epoch processes first (:class:`LoopEnd`).
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from stateformat.errors import InvalidInput, InvalidState
from stateformat.model import Mode
from stateformat.snapshot import WriteContext

from ..dataflow import events as ev
from ..dataflow.chain import OpenSnapshot, OperatorChain, in_flight_batches
from ..dataflow.chained_operator import Combiner, FailsAgain, combiners_of
from ..dataflow.compile import Router
from ..dataflow.task import Task
from ..runtime import LoopFill, Mail, Queue, SplitAssigned, Worker, receiver_of
from ..state import SubtaskStates
from . import frames
from .frames import EpochBroken, input_channel
from .messages import ENDED, Epoch, EpochLink, RestorePoint, Setup, Spec, TaskReport, pack_error
from .source import RowBuffer
from .task_cache import WORKER_CACHE, CachedTask, TaskCache, pickle_operators, unpickle_operators
from .worker_process import settle

if TYPE_CHECKING:
    from pyspark import Broadcast


_ITSELF = -1
"""The frame number of a head that sends itself."""


class Suspended(NamedTuple):
    """A head on its way to the last level."""

    report: TaskReport
    snapshot: OpenSnapshot | None
    is_own: bool
    """Whether a barrier that writes asked for the snapshot."""

    def sent_on(self, level: int) -> frames.Sent:
        task = self.report.task
        header = frames.Header(task, task, self.report.token, _ITSELF, ())
        return task.subtask, frames.pack(level, header, ()) + pickle.dumps(self, protocol=5)


class NoChain:
    """Stands in for an operator chain. It holds no batches, and ignores news of checkpoints."""

    def flush(self) -> None:
        pass

    def notify_complete(self, number: int) -> None:
        pass

    def notify_aborted(self, number: int) -> None:
        pass


class _NextEpoch(NoChain):
    """Stands in for the chain, and collects what the next epoch is to process.

    It ignores ``edge_id`` and ``combined``: the snapshot keeps batches by channel, and what is fed
    back is never combined.
    """

    def __init__(self, fill: LoopFill) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.fill = fill

    def process(self, edge_id: str, batch: pa.RecordBatch, *, combined: bool) -> None:  # noqa: ARG002 - see above
        self.fill.add(batch)
        self.batches.append(batch)


class LoopEnd:
    """One head at the last level. Call :meth:`receive` for every frame, then :meth:`finish`."""

    def __init__(self, setup: Setup, epoch: Epoch, task: ev.TaskId, context: WriteContext) -> None:
        self._setup = setup
        self._epoch = epoch
        self._task = task
        self._context = context
        self._inbox = frames.Inbox(task)
        self._frames: list[tuple[frames.Header, pa.Buffer]] = []
        self._head: Suspended | None = None

    def receive(self, header: frames.Header, rest: pa.Buffer) -> Iterator[frames.Sent]:
        """Take a frame, or the head itself. Sends nothing before :meth:`finish`."""
        if header.number != _ITSELF:
            self._frames += self._inbox.take(header, rest)
        elif self._head is None:
            self._head = pickle.loads(rest)  # noqa: S301 - from a worker of ours
        else:
            raise frames.EpochBroken(f"{self._task} came to the last level twice")
        yield from ()

    def finish(self) -> Iterator[frames.Sent]:
        """Send the head's report; nothing if it failed at its own level and reported there."""
        self._inbox.check()
        if self._head is None:
            return
        report, snapshot, is_own = self._head
        core: Task = pickle.loads(report.core)  # noqa: S301 - from a worker of ours
        worker = Worker(
            self._task,
            self._setup.job.vertex(self._task.vertex),
            core,
            list(self._setup.queues(self._task).values()),
            {},
            frozenset(),
            EpochLink(report, self._epoch, self._context),
            number=report.number,
            snapshot=snapshot if is_own else None,
        )
        later: Any = _NextEpoch(LoopFill(self._task, self._setup.loop_bytes_max))
        worker.operators = later
        # If no barrier asked for the snapshot, it is written here, not by the worker.
        own = None if is_own else snapshot
        try:
            for header, rest in self._frames:
                for channel, element in () if report.ended else frames.elements(header, rest, self._setup.job.schemas):
                    known = len(later.batches)
                    worker.deliver(ev.Received(channel, element))
                    if own is not None:
                        for batch in later.batches[known:]:
                            own.log(channel, batch)
            if own is not None:
                report.snapshots = tuple(own.close())
        except Exception as error:
            worker.fail(error)
        if not (report.snapshots or report.failure or report.ended):
            worker.fail(RuntimeError("the barrier did not come round its loop in its epoch"))
        report.replays, report.presses = bool(later.batches), later.fill.presses
        for sender, (token, count) in self._inbox.consumed.items():
            before = report.consumed.get(sender, (token, 0))
            if before[0] != token:
                raise frames.EpochBroken(f"{self._task} got frames of two attempts of {sender}")
            report.consumed[sender] = (token, before[1] + count)
        report.core = pickle.dumps(core, protocol=5)
        yield report.sent_on()


logger = logging.getLogger(__name__)


class _SendingEnd(Queue):
    """The sending end of a channel whose receiver runs in another worker."""

    __slots__ = ("level", "outbox", "receiver")

    def __init__(self, channel: ev.Channel, outbox: frames.Outbox | None, receiver: ev.TaskId, level: int) -> None:
        super().__init__(channel, capacity=None)
        self.outbox, self.receiver, self.level = outbox, receiver, level

    def put(self, element: ev.Element) -> None:
        if self.outbox is None:
            return
        channel = self.channel
        if isinstance(element, ev.Records) and element.combined:
            channel = channel._replace(edge=_combined(channel.edge))
        self.outbox.put(self.receiver, self.level, channel, element)


def _combined(edge_id: str) -> str:
    """Return the edge id for sending combined rows of an edge; no edge of the job has it."""
    return f"combined rows of {edge_id}"


class _Output:
    """A chain's ``ChainOutput``. It leads to the worker of the epoch, which the chain outlives."""

    worker: Worker

    def __init__(self, combiners: Mapping[str, Combiner]) -> None:
        self._combiners = combiners

    def emit(self, edge_id: str, batch: pa.RecordBatch) -> None:
        combiner = self._combiners.get(edge_id)
        combined = None if combiner is None else combiner.combine(batch)
        if combined is None:
            self.worker.emit(edge_id, batch)
        else:
            self.worker.emit(edge_id, combined, combined=True)

    def send(self, uid: str, message: bytes) -> None:
        self.worker.send(uid, message)

    def now_us(self) -> int:
        return self.worker.now_us()

    def processing_time_us(self) -> int:
        return self.worker.processing_time_us()


class _EndedChain(NoChain):
    """Stands in for the chain of a task whose logic ended in an earlier epoch."""

    late_records = 0

    def __init__(self, setup: Setup, task: ev.TaskId) -> None:
        self._operators = setup.job.vertex(task.vertex).operators
        self._subtask = task.subtask

    def snapshot(self, command: ev.Snapshot, context: WriteContext) -> OpenSnapshot:  # noqa: ARG002 - it is finishing
        return OpenSnapshot([context.subtask(uid, self._subtask, finishing=True) for uid in self._operators], [])

    def close(self) -> None:
        pass


class TaskRun:
    """One task. Call :meth:`begin`, :meth:`receive` for every frame, then :meth:`finish`.

    Each yields what to send.
    """

    def __init__(self, setup: Setup, epoch: Epoch, spec: Spec, context: WriteContext, cache: TaskCache) -> None:
        self.spec = spec
        self.report = TaskReport(spec.task, number=spec.number)
        self._setup = setup
        self._epoch = epoch
        self._context = context
        self._cache = cache
        self._core: Task = pickle.loads(spec.core)  # noqa: S301 - from our own driver
        self._vertex = setup.job.vertex(spec.task.vertex)
        self._outbox = frames.Outbox(spec.task, self.report.token)
        self._inbox = frames.Inbox(spec.task)
        self._queues = setup.queues(spec.task)
        self._input = input_channel(self._vertex.id, spec.task.subtask)
        # A source that reads frames ends, if asked to, only after the range of the epoch.
        self._last_mail = [item for item in spec.mail if spec.reads_frames and isinstance(item, ev.EndSource)]
        combiners = combiners_of(setup.job, self._vertex.inputs)
        self._combined = {_combined(edge_id): edge_id for edge_id in combiners}
        self._schemas = {**setup.job.schemas, **{_combined(edge_id): of.schema for edge_id, of in combiners.items()}}
        if spec.reads_frames:
            self._schemas[self._input.edge] = setup.job.step(self._vertex.id).schema
            self._rows = RowBuffer(f"epoch {epoch.version}")
        self._output = _Output(combiners_of(setup.job, self._vertex.outputs))
        self._choose = random.Random(0)  # noqa: S311 - which channel with elements is next
        self._worker = Worker(
            spec.task,
            self._vertex,
            self._core,
            list(self._queues.values()),
            self._sending_ends(),
            frozenset(),
            EpochLink(self.report, epoch, context),
            number=spec.number,
        )
        self._worker.routers = {edge.id: Router(setup.job, edge, spec.task.subtask) for edge in self._vertex.outputs}

    def _sending_ends(self) -> dict[str, list[_SendingEnd]]:
        ends: dict[str, list[_SendingEnd]] = {}
        for edge_id, channels in self._setup.outputs[self.spec.task].items():
            ends[edge_id] = []
            for channel in channels:
                receiver = receiver_of(self._setup.job, channel)
                outbox = None if receiver in self._epoch.gone else self._outbox
                ends[edge_id].append(_SendingEnd(channel, outbox, receiver, self._setup.level_of(channel)))
        return ends

    def begin(self) -> Iterator[frames.Sent]:
        """Open, then process what was fed back, timers of processing time, and mail.

        A source whose rows do not come as frames also reads.
        """
        worker = self._worker
        try:
            self._open()
            worker.count_late_rows()
            if self.spec.restore_point is not None and self.spec.restore_point.replays:
                self._replay(self.spec.restore_point)
        except Exception as error:
            worker.fail(error)
        if not (self.spec.started or worker.gone):
            worker.start()
        if not worker.gone:
            worker.fire_timers()
        self._take_mail(*(item for item in self.spec.mail if item not in self._last_mail))
        yield from self._flush_if_large()
        if self.spec.reads_frames:
            self._take_mail(SplitAssigned(self._rows.split))
        elif self._vertex.is_source:
            yield from self._read()

    def receive(self, header: frames.Header, rest: pa.Buffer) -> Iterator[frames.Sent]:
        for head, body in self._inbox.take(header, rest):
            for channel, element in frames.elements(head, body, self._schemas):
                if self._worker.gone:
                    continue
                if channel == self._input:
                    self._read_rows(element)
                else:
                    self._put(channel, element)
                    self._process()
                yield from self._flush_if_large()

    def _put(self, channel: ev.Channel, element: ev.Element) -> None:
        if channel.edge in self._combined and isinstance(element, ev.Records):
            channel = channel._replace(edge=self._combined[channel.edge])
            element = ev.Records(element.batch, combined=True)
        self._queues[channel].put(element)

    def _read_rows(self, element: ev.Element) -> None:
        if isinstance(element, ev.Watermark):
            self._rows.observe(element.timestamp)
        elif isinstance(element, ev.Records):
            self._rows.add(element.batch)
        while self._rows.has_rows and not self._worker.gone:
            self._worker.step(self._choose)

    def finish(self) -> Iterator[frames.Sent]:
        """Send the report, or a loop's head to the last level. Call it after the last frame."""
        self._inbox.check()
        if self.spec.reads_frames and not self._worker.gone:
            self._rows.close()
            while not (self._rows.is_read or self._worker.gone):
                self._worker.step(self._choose)
            self.report.ran_dry = True
        self._take_mail(*self._last_mail)
        if self.spec.triggered is not None:
            self._take_mail(self.spec.triggered)
        self._process_held()
        report = self.report
        report.late_rows = 0 if self._worker.gone else self._worker.late_rows
        snapshot, is_own = self._write()
        yield from self._outbox.flush()
        report.rows_read = self._worker.rows
        report.sent, report.sent_bytes = dict(self._outbox.sent), self._outbox.sent_bytes
        report.consumed = self._inbox.consumed
        report.core = pickle.dumps(self._core, protocol=5)
        if self._vertex.feedback and report.failure is None:
            yield Suspended(report, snapshot, is_own).sent_on(self._setup.last_level)
        else:
            yield report.sent_on()

    def _take_mail(self, *items: Mail) -> None:
        self._worker.mailbox.extend(items)
        while self._worker.mailbox and not self._worker.gone:
            self._worker.step(self._choose)
        self._process()

    def _process(self) -> None:
        while not self._vertex.is_source and self._worker.ready(0):
            self._worker.step(self._choose)

    def _process_held(self) -> None:
        """Let operators process the batches that they have gathered: the epoch is over."""
        if not self._worker.gone:
            try:
                self._worker.operators.flush()
            except Exception as error:
                self._worker.fail(error)

    def _read(self) -> Iterator[frames.Sent]:
        """Let a source read until its share of the epoch is used up, or nothing is left to read."""
        worker, epoch = self._worker, self._epoch
        end_us = None if epoch.read_us is None else worker.now_us() + epoch.read_us
        while epoch.read_rows != 0 and worker.ready(worker.now_us()):
            worker.step(self._choose)
            yield from self._flush_if_large()
            if epoch.read_rows is not None and worker.rows >= epoch.read_rows:
                return
            if end_us is not None and worker.now_us() >= end_us:
                return
        self.report.ran_dry = epoch.read_rows != 0

    def _flush_if_large(self) -> Iterator[frames.Sent]:
        if self._outbox.is_large:
            yield from self._outbox.flush()

    @property
    def _key(self) -> tuple[str, ev.TaskId]:
        return self._setup.run, self.spec.task

    def _open(self) -> None:
        point = self.spec.restore_point
        if point is None:
            ended: Any = _EndedChain(self._setup, self.spec.task)
            self._worker.operators = ended
            return
        cached = self._cache.take(self._key, self.spec.tokens)
        if cached is None or not point.can_catch_up(cached.version):
            if cached is not None:
                cached.release()
            cached = self._cache.copy_of(self._key, self.spec.tokens)
        if cached is not None and cached.chain is not None and cached.version == max(self.spec.tokens.values()):
            self.report.opened, chain, self._output = "kept", cached.chain, cached.output
        else:
            chain = self._restored(cached, point)
        self._output.worker = self._worker
        self._worker.operators = chain
        for uid, states in chain.states.items():
            states.begin(self._epoch.version)
            states.layers = point.layers(uid)
        if self.report.opened != "kept":
            tasks = {uid: point.read_tasks(self._context, uid) for uid in point.operators}
            chain.open(
                tasks or None,
                taken=point.barrier or None,
                taken_id=point.checkpoint_id,
                going_on=unpickle_operators(chain, point.pickled),
                reported=point.reported,
            )
            if chain.reader is not None:
                chain.reader.go_on(self.spec.active)

    def _restored(self, cached: CachedTask | None, point: RestorePoint) -> OperatorChain:
        """Return a new chain: with cached states brought up to date, or without, to be restored."""
        job, subtask, vertex = self._setup.job, self.spec.task.subtask, self._vertex
        self.report.opened = "restored"
        if cached is None:
            return OperatorChain(job, vertex, subtask, self._output, gathers=True)
        found = None
        if point.can_catch_up(cached.version):
            uids = vertex.operators[1:] if vertex.is_source else vertex.operators
            empty = {uid: SubtaskStates(job.graph.operator(uid), subtask, job.states_of(uid)) for uid in uids}
            try:
                found = cached.states(empty)
            except InvalidInput as error:
                logger.warning("States on the local disk are read from the store again: %s", error)
        cached.release()  # Its operators may hold outdated values. Its states are used again.
        if found is None:
            return OperatorChain(job, vertex, subtask, self._output, gathers=True)
        for uid, states in found.items():
            layers = {
                name: [layer for layer in of_state if layer.version is not None and layer.version > cached.version]
                for name, of_state in point.layers(uid).items()
            }
            states.catch_up(point.read_tasks(self._context, uid, above=cached.version), layers)
        self.report.opened = "caught_up"
        return OperatorChain(job, vertex, subtask, self._output, found, gathers=True)

    def _replay(self, point: RestorePoint) -> None:
        for task in point.read_tasks(self._context, self._vertex.id).values():
            edge = task.state.edge
            if task.state.mode is Mode.IN_FLIGHT and edge is not None and task.slices.num_rows:
                for batch in in_flight_batches(task, self._setup.job.schemas[edge]):
                    self._worker.operators.process(edge, batch)

    def _write(self) -> tuple[OpenSnapshot | None, bool]:
        """Write the snapshot, unless a barrier has had it written, and cache the chain.

        Returns the snapshot of a loop head, which stays open, and whether a barrier asked for it.
        """
        worker, report = self._worker, self.report
        snapshot = worker.open_snapshot
        is_own = snapshot is not None
        if not worker.gone:
            try:
                if not (report.snapshots or is_own):
                    ended = self._core.state in ENDED
                    command = ev.Snapshot(ev.Barrier(0), ended, *self._core.progress())
                    snapshot = worker.operators.snapshot(command, self._context)
                if snapshot is not None and not self._vertex.feedback:
                    report.snapshots = tuple(snapshot.close())
            except Exception as error:
                worker.fail(error)
        if worker.gone:
            worker.release()
            return None, False
        report.number = worker.snapshot_taken
        if self.spec.restore_point is not None:
            self._put_away()
        return snapshot, is_own

    def _put_away(self) -> None:
        """Cache the chain for the next epoch, or release it if its logic has ended."""
        chain, report = self._worker.operators, self.report
        report.kept = {uid: dict(states.layers_kept) for uid, states in chain.states.items()}
        if self._core.state in ENDED:
            self._worker.release()
            return
        report.reported = {uid: member.reported for uid, member in chain.operators.items() if member.reported}
        report.wakes_at_us = chain.wakes_at_us
        if chain.reader is not None:
            report.active, report.holder = chain.reader.active(), chain.reader.holder
        chain.hand_over()
        try:
            report.pickled = pickle_operators(self._setup.job, chain)
        except InvalidState as error:
            self._worker.fail(error)
        if report.failure or any(isinstance(event, ev.SnapshotFailed) for event in report.events):
            # After a failed snapshot, the states were written again, so they are not at the epoch's
            # version.
            self._worker.release()
            return
        self._leave_copy(chain)
        cached = CachedTask(report.token, self._epoch.version, chain, self._output)
        self._cache.keep(self._key, cached, limit_bytes=self._setup.cache_bytes)

    def _leave_copy(self, chain: OperatorChain) -> None:
        """Copy states for other workers if this epoch read or wrote them in full."""
        report, shared, point = self.report, self._cache.shared, self.spec.restore_point
        was_read = report.opened == "restored" and point is not None and point.has_layers
        if shared is None or not (was_read or report.wrote_base):
            return
        report.copied = shared.add(
            *self._key,
            (report.token, self._epoch.version),
            chain.states,
            tokens=self.spec.tokens,
            limit_bytes=self._setup.cache_bytes,
        )


_SETUPS: Final[dict[str, Setup]] = {}
"""The setups that this process has unpickled, by run."""


def _setup_of(run: str, data: Callable[[], bytes], live: Collection[str]) -> Setup:
    """Return the setup of a run, and release ended runs. ``FailsAgain`` if it cannot be loaded."""
    ended = [other for other in _SETUPS if other not in live and other != run]
    if ended:
        for other in ended:
            del _SETUPS[other]
        WORKER_CACHE.drop_others({run, *live})
    if run not in _SETUPS:
        settle()
        pickled = data()
        try:
            _SETUPS[run] = pickle.loads(pickled)  # noqa: S301 - from our own driver
        except Exception as error:
            raise FailsAgain(
                f"A worker of Spark cannot load the job: {type(error).__name__}: {error}. What the job's steps are "
                "made of must be importable there: install it, or give it to Spark (spark-submit --py-files, "
                "sparkContext.addPyFile)."
            ) from error
    return _SETUPS[run]


@dataclass(frozen=True)
class Level:
    """One level of an epoch: a function that Spark runs on the payloads of each slot."""

    run: str
    setup: Broadcast[bytes]
    epoch: Epoch
    number: int
    specs: Mapping[int, bytes]
    """By slot, the pickled specs of its tasks."""
    heads: Mapping[int, tuple[ev.TaskId, ...]]
    """By slot, the heads of loops, which end the epoch at this level; only at the last level."""

    def __call__(self, slot: int, received: Iterator[bytes]) -> Iterator[bytes]:
        """Turn payloads into slots and payloads. Spark tries again on ``EpochBroken``."""
        return frames.keyed(self._sent(slot, received))

    def _sent(self, slot: int, received: Iterator[bytes]) -> Iterator[frames.Sent]:
        specs: list[Spec] = pickle.loads(self.specs[slot]) if slot in self.specs else []  # noqa: S301 - from our driver
        try:
            setup = _setup_of(self.run, lambda: self.setup.value, self.epoch.live)
        except FailsAgain as error:
            # Reported, not raised: Spark would retry an error as often as it is allowed to.
            for spec in specs:
                events: list[ev.CoordinatorEvent] = [ev.TaskFailed(None, str(error))]
                yield TaskReport(spec.task, events=events, errors=[(str(error), pack_error(error))]).sent_on()
            yield from ((slot, payload) for payload in received if frames.level_of(payload) != self.number)
            return
        epoch = self.epoch
        writing = replace(setup.context, checkpoint_id=epoch.checkpoint_id, attempt_id=epoch.attempt_id)
        tasks = {spec.task: TaskRun(setup, epoch, spec, writing, WORKER_CACHE) for spec in specs}
        for task in tasks.values():
            yield from task.begin()
        heads = {task: LoopEnd(setup, epoch, task, writing) for task in self.heads.get(slot, ())}
        receivers: dict[ev.TaskId, TaskRun | LoopEnd] = {**tasks, **heads}
        for payload in received:
            if frames.level_of(payload) != self.number:
                yield slot, payload
                continue
            header, rest = frames.unpack(payload)
            receiver = receivers.get(header.receiver)
            if receiver is None:
                raise EpochBroken(
                    f"slot {slot} of level {self.number} got a frame for {header.receiver}, which is not there"
                )
            yield from receiver.receive(header, rest)
        for receiver in receivers.values():
            yield from receiver.finish()
