"""One task in one epoch, at its level, in a Python worker of Spark: from its base and its mail to its report.

Theory of operation. The task core comes from the driver; the activation is the one that this worker has kept, or is opened from the
base. What had been fed back into a loop, then mail, then records are processed, by the same ``Worker`` as in every executor; its
channels end in frames. When nothing more can come, the barrier has been passed everywhere; the snapshot is written, and the core, the
snapshot and whatever the coordinator must know leave in the report. An epoch whose barrier writes nothing, or that has none, is a cut
all the same, since nothing is under way between tasks when it ends: the states are written as they are then.

The head of a loop goes on at the last level, with a snapshot that is still open (``loop_end.py``).
"""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from backends.dataflow import events as ev
from backends.dataflow.activation import OpenSnapshot, OperatorChain, in_flight_batches
from backends.dataflow.routing import Router
from backends.dataflow.task import Task
from backends.running.channels import Queue
from backends.running.wiring import receiver_of
from backends.running.worker import Give, Worker
from backends.spark.base import Base
from backends.spark.cache import Cache, Kept
from backends.spark.feeds import feed_channel
from backends.spark.loop_end import Suspended
from backends.spark.mail import Header, Inbox, Outbox, elements
from backends.spark.mailbox import Mailbox
from backends.spark.reports import Report, ReportLink, Setup, Spec
from backends.spark.resting import ENDED
from backends.spark.travelling import packed, unpacked
from backends.state import SubtaskStates
from stateformat.errors import InvalidInput, InvalidState
from stateformat.model import Mode
from stateformat.snapshot import WriteContext

logger = logging.getLogger(__name__)


class _Way(Queue):
    """The sending end of a channel whose other end is in another worker."""

    __slots__ = ("level", "outbox", "receiver")

    def __init__(self, channel: ev.Channel, outbox: Outbox | None, receiver: ev.TaskId, level: int) -> None:
        super().__init__(channel, capacity=None)
        self.outbox, self.receiver, self.level = outbox, receiver, level

    def put(self, element: ev.Element) -> None:
        """Send an element; nowhere, if the receiver is gone."""
        if self.outbox is not None:
            self.outbox.put(self.receiver, self.level, self.channel, element)


class _Outside:
    """What an activation reaches (``activation.ChainOutput``): the worker of this epoch, while the activation outlives epochs."""

    worker: Worker

    def emit(self, edge_id: str, batch: pa.RecordBatch) -> None:
        self.worker.emit(edge_id, batch)

    def send(self, uid: str, message: bytes) -> None:
        self.worker.send(uid, message)

    def now_us(self) -> int:
        return self.worker.now_us()


class _EndedOperators:
    """In place of the activation of a task whose logic has ended in an epoch before: there is nothing to keep."""

    def __init__(self, setup: Setup, task: ev.TaskId) -> None:
        self._operators = setup.job.vertex(task.vertex).operators
        self._subtask = task.subtask

    def snapshot(self, command: ev.Snapshot, context: WriteContext) -> OpenSnapshot:  # noqa: ARG002 - it is finishing
        return OpenSnapshot([context.subtask(uid, self._subtask, finishing=True) for uid in self._operators], [])

    late_records = 0

    def notify_complete(self, number: int) -> None:
        pass

    def notify_aborted(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass


class TaskRun:
    """One task. :meth:`begin`, :meth:`receive` for every frame, :meth:`finish`; each gives rows to send on."""

    def __init__(self, setup: Setup, spec: Spec, context: WriteContext, cache: Cache) -> None:
        self.spec = spec
        self.report = Report(spec.task, number=spec.number)
        self._setup = setup
        self._context = context
        self._cache = cache
        self._core: Task = pickle.loads(spec.core)  # noqa: S301 - from our own driver
        self._vertex = setup.job.vertex(spec.task.vertex)
        self._outbox = Outbox(spec.task, self.report.token)
        self._inbox = Inbox(spec.task)
        self._queues = setup.queues(spec.task)
        self._feed = feed_channel(self._vertex.id, spec.task.subtask)
        # The range of the epoch counts as read: a source that is asked to end does so behind it.
        self._last = [mail for mail in spec.mail if spec.fed and isinstance(mail, ev.EndSource)]
        self._schemas = setup.job.schemas
        if spec.fed:
            self._schemas = {**self._schemas, self._feed.edge: setup.job.step(self._vertex.id).schema}
        self._outside = _Outside()
        self._choose = random.Random(0)  # noqa: S311 - which of the channels that have something comes first
        self._worker = Worker(
            spec.task,
            self._vertex,
            self._core,
            list(self._queues.values()),
            self._ways(),
            frozenset(),
            ReportLink(self.report, context),
            number=spec.number,
        )
        self._worker.routers = {edge.id: Router(setup.job, edge, spec.task.subtask) for edge in self._vertex.outputs}

    def _ways(self) -> dict[str, list[_Way]]:
        ways: dict[str, list[_Way]] = {}
        for edge_id, channels in self._setup.outputs[self.spec.task].items():
            ways[edge_id] = []
            for channel in channels:
                receiver = receiver_of(self._setup.job, channel)
                outbox = None if receiver in self.spec.gone else self._outbox
                ways[edge_id].append(_Way(channel, outbox, receiver, self._setup.level_of(channel)))
        return ways

    # The epoch -----------------------------------------------------------------------------------------------------------

    def begin(self) -> Iterator[pa.RecordBatch]:
        """Open, process what had been fed back, and mail; a source reads."""
        worker = self._worker
        try:
            self._open()
            worker.count_late_rows()
            if self.spec.base is not None and self.spec.base.replays:
                self._replay(self.spec.base)
        except Exception as error:
            worker.fail(error)
        if not (self.spec.started or worker.gone):
            worker.start()
        self._take_mail(*(mail for mail in self.spec.mail if mail not in self._last))
        yield from self._flush_if_large()
        if self._vertex.is_source and not self.spec.fed:
            yield from self._read()
        elif self.spec.fed and not self._worker.gone:
            self._mailbox = Mailbox(f"epoch {self.spec.version}")
            self._take_mail(Give(self._mailbox.split))

    def receive(self, header: Header, rest: pa.Buffer) -> Iterator[pa.RecordBatch]:
        """A frame has come."""
        for head, body in self._inbox.take(header, rest):
            for channel, element in elements(head, body, self._schemas):
                if self._worker.gone:
                    continue
                if channel == self._feed:
                    self._push(element)
                else:
                    self._queues[channel].put(element)
                    self._process()
                yield from self._flush_if_large()

    def _push(self, element: ev.Element) -> None:
        """Let the reader have what has come of a DataFrame."""
        if isinstance(element, ev.Watermark):
            self._mailbox.observe(element.timestamp)
        elif isinstance(element, ev.Records):
            self._mailbox.push(element.batch)
        while self._mailbox.has_rows and not self._worker.gone:
            self._worker.step(self._choose)

    def finish(self) -> Iterator[pa.RecordBatch]:
        """No frame will come. What is left is written and sent on: the report, or, for the last level, the head of a loop."""
        self._inbox.check()
        if self.spec.fed and not self._worker.gone:
            self._mailbox.close()
            while not (self._mailbox.is_read or self._worker.gone):
                self._worker.step(self._choose)
            self.report.ran_dry = True
        self._take_mail(*self._last)
        if self.spec.triggered is not None:
            self._take_mail(self.spec.triggered)
        self.report.late_rows = 0 if self._worker.gone else self._worker.late_rows
        snapshot, is_own = self._write()
        yield from self._outbox.flush()
        report = self.report
        report.rows_read = self._worker.rows
        report.sent, report.sent_bytes = dict(self._outbox.sent), self._outbox.sent_bytes
        report.consumed = self._inbox.consumed
        report.core = pickle.dumps(self._core, protocol=5)
        if self._vertex.feedback and report.failure is None:
            yield Suspended(report, snapshot, is_own).rows(self._setup.last_level)
        else:
            yield report.rows()

    def _take_mail(self, *mail: Any) -> None:
        self._worker.mailbox.extend(mail)
        while self._worker.mailbox and not self._worker.gone:
            self._worker.step(self._choose)
        self._process()

    def _process(self) -> None:
        while not self._vertex.is_source and self._worker.ready(0):
            self._worker.step(self._choose)

    def _read(self) -> Iterator[pa.RecordBatch]:
        """Let a source read until its share of the epoch is over, or nothing is there."""
        worker, spec = self._worker, self.spec
        end_us = None if spec.read_us is None else worker.now_us() + spec.read_us
        while worker.ready(worker.now_us()):
            worker.step(self._choose)
            yield from self._flush_if_large()
            if spec.read_rows is not None and worker.rows >= spec.read_rows:
                return
            if end_us is not None and worker.now_us() >= end_us:
                return
        self.report.ran_dry = True

    def _flush_if_large(self) -> Iterator[pa.RecordBatch]:
        if self._outbox.is_large:
            yield from self._outbox.flush()

    # States --------------------------------------------------------------------------------------------------------------

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self._setup.run, self.spec.task)

    def _open(self) -> None:
        base = self.spec.base
        if base is None:
            self._worker.operators = _EndedOperators(self._setup, self.spec.task)  # type: ignore[assignment]
            return
        kept = self._cache.take(self._key, self.spec.tokens)
        if kept is not None and kept.activation is not None and kept.version == max(self.spec.tokens.values()):
            self.report.opened, activation, self._outside = "kept", kept.activation, kept.outside
        else:
            activation = self._restored(kept, base)
        self._outside.worker = self._worker
        self._worker.operators = activation
        for uid, states in activation.states.items():
            states.begin(self.spec.version)
            states.layers = base.layers(uid)
        if self.report.opened != "kept":
            tasks = {uid: base.tasks(self._context, uid) for uid in base.parts}
            going_on = unpacked(activation, base.travelling)
            activation.open(
                tasks or None,
                taken=base.taken or None,
                taken_id=base.taken_id,
                going_on=going_on,
                reported=base.reported,
            )

    def _restored(self, kept: Kept | None, base: Base) -> OperatorChain:
        """A new activation: of the states that were kept, with what has changed since, or of none, to be read."""
        job, subtask, vertex = self._setup.job, self.spec.task.subtask, self._vertex
        if kept is None or not base.may_catch_up(kept.version):
            if kept is not None:
                kept.give_up()
            self.report.opened = "restored"
            return OperatorChain(job, vertex, subtask, self._outside)
        uids = vertex.operators[1:] if vertex.is_source else vertex.operators
        empty = {uid: SubtaskStates(job.graph.operator(uid), subtask, job.states_of(uid)) for uid in uids}
        try:
            found = kept.states(empty)
        except InvalidInput as error:
            kept.give_up()
            logger.warning("states on the local disk are read from the store again: %s", error)
            return self._restored(None, base)
        kept.give_up()  # The operators may hold what is out of date; the states go on.
        for uid, states in found.items():
            layers = {
                name: [layer for layer in some if layer.version is not None and layer.version > kept.version]
                for name, some in base.layers(uid).items()
            }
            states.catch_up(base.tasks(self._context, uid, above=kept.version), layers)
        self.report.opened = "caught_up"
        return OperatorChain(job, vertex, subtask, self._outside, found)

    def _replay(self, base: Base) -> None:
        """Process what had been fed back, or was in flight, when the base was taken."""
        for task in base.tasks(self._context, self._vertex.id).values():
            edge = task.state.edge
            if task.state.mode is Mode.IN_FLIGHT and edge is not None and task.slices.num_rows:
                for _, batch in in_flight_batches(task, self._setup.job.schemas[edge]):
                    self._worker.operators.process(edge, batch)

    def _write(self) -> tuple[OpenSnapshot | None, bool]:
        """Have written what no barrier has, and let go of the activation. Of a loop head, the snapshot that is open still, and whether
        a barrier has asked for it.
        """
        worker, report = self._worker, self.report
        snapshot = worker.open_snapshot
        is_own = snapshot is not None
        if not worker.gone:
            try:
                if not (report.snapshots or is_own):
                    snapshot = worker.operators.snapshot(_no_barrier(self._core), self._context)
                if snapshot is not None and not self._vertex.feedback:
                    report.snapshots = tuple(snapshot.close())
            except Exception as error:
                worker.fail(error)
        if worker.gone:
            worker.release()
            return None, False
        report.number = worker.snapshot_taken
        self._let_go()
        return snapshot, is_own

    def _let_go(self) -> None:
        """The activation is kept for the next epoch, or ends where its logic has ended."""
        if self.spec.base is None:
            return
        activation = self._worker.operators
        self.report.kept = {uid: dict(states.layers_kept) for uid, states in activation.states.items()}
        if self._core.state in ENDED:
            self._worker.release()
            return
        self.report.reported = {uid: member.reported for uid, member in activation.operators.items() if member.reported}
        activation.hand_over()
        try:
            self.report.travelling = packed(self._setup.job, activation)
        except InvalidState as error:
            self._worker.fail(error)
            self._worker.release()
            return
        if any(isinstance(event, ev.SnapshotFailed) for event in self.report.events):
            # It was written once more, so the version that its states are at is not that of the epoch.
            self._worker.release()
            return
        kept = Kept(self.report.token, self.spec.version, activation, self._outside)
        self._cache.keep(self._key, kept, limit_bytes=self._setup.cache_bytes)


def _no_barrier(core: Task) -> ev.Snapshot:
    """The command to write the states of a task as they are, which no barrier has given."""
    return ev.Snapshot(ev.Barrier(0), core.state in ENDED, *core.progress())


__all__ = ["TaskRun"]
