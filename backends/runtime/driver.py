"""The driver of a run: it carries out the coordinator's commands, and accesses the store.

It begins, publishes and expires checkpoints, and lets sinks commit with the permit. It also holds
the coordinators of operators and the enumerators of sources.

What enumerators remember for ever is a log (:class:`EnumeratorLogs`): a checkpoint writes only what
is new.

Theory of operation. A log is an even-split state of the source, in several segments, oldest first.
A checkpoint writes at most one: what is new, joined with the *tail*, the newest segment, as long as
that is short. A tail that has grown long is joined with the segment before it if that is not much
longer, and so on, so each row is rewritten about log2(rows / ``TAIL_ROWS``) times in total, and
there are no more segments than that. Handles name all other segments again, and all of them if
nothing is new.

An enumerator that no longer needs most of its log returns the rest, which replaces all segments.

Workers report that they have no rows of the state. The driver adds the handles to those of the
first subtask that continues. What is not published is kept for the next checkpoint. A run begins
with one segment of all rows.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from stateformat import errors as er
from stateformat.manifest import handles_table
from stateformat.model import LATE_PROPERTY, Handle, Mode, Stop
from stateformat.publication import CommitPermit, PendingCheckpoint
from stateformat.schema import segment_schema
from stateformat.segments import WriteOptions
from stateformat.states import as_schema
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from ..dataflow.api import NoSplit, OperatorCoordinator, Sender, Source, Split, SplitEnumerator, checked_message
from ..dataflow.casting import cast_to_schema
from ..dataflow.chained_operator import Guard, OperatorError
from ..dataflow.compile import Vertex
from ..dataflow.coordinator import Coordinator
from ..dataflow.events import CheckpointPlan
from ..dataflow.graph import COMMITTABLES, ENUMERATOR_LOG
from .clock import Clock, ProcessingTime
from .commits import commit, commit_rest, left_words, pending_committables, sinks_of
from .options import Schedule
from .reports import GraceExceeded, RunDiscarded
from .restore import Restored
from .starting import keep_count, keep_properties
from .worker import Mail, MessageToSubtask, SplitAssigned


@dataclass
class InFlightCheckpoint:
    """One checkpoint from beginning to end; without ``checkpoint``, one round of the loops."""

    barrier: ev.Barrier
    plan: CheckpointPlan
    begun_us: int
    checkpoint: PendingCheckpoint | None = None
    coordinators: dict[str, pa.Table] = field(default_factory=dict)
    """What the operators' coordinators returned for their snapshots, by uid."""
    messages: dict[str, list[tuple[int, bytes]]] = field(default_factory=lambda: defaultdict(list))
    """What subtasks have sent to them since, before their own snapshots."""
    overdue: bool = False
    """Whether its barrier was turned unaligned."""
    unchanged: bool = False
    """Whether it is not published, because nothing has moved since the newest one."""
    timed_out: bool = False
    """Whether the coordinator was told that it takes too long."""

    def coordinator_rows(self, uid: str, schema: pa.Schema) -> pa.Table:
        """The state of a coordinator: its own rows, then the messages that it has to get again."""
        own = self.coordinators[uid]
        messages = self.messages.get(uid, [])
        columns = {name: [None] * len(messages) for name in schema.names if name not in ("message_from", "message")}
        sent = pa.table({**columns, "message_from": [n for n, _ in messages], "message": [m for _, m in messages]})
        missing = [name for name in schema.names if name not in own.column_names]
        for name in missing:
            own = own.append_column(schema.field(name), pa.nulls(own.num_rows, schema.field(name).type))
        return pa.concat_tables([own.select(schema.names).cast(schema), sent.select(schema.names).cast(schema)])


TAIL_ROWS = 512
"""How many rows the segment that every checkpoint adds to may have."""


class _Segment(NamedTuple):
    rows: pa.Table
    handle: Handle


class _Log:
    """The log of one enumerator."""

    def __init__(self, rows: pa.Table) -> None:
        self.new = rows
        self.is_anew = False
        """Whether ``new`` replaces all segments."""
        self.segments: list[_Segment] = []
        """As the newest checkpoint of the run has them, oldest first."""
        self.written: list[_Segment] = []
        """As the checkpoint has them that is being published."""

    @property
    def staying(self) -> list[_Segment]:
        """The segments to which new rows are added."""
        return [] if self.is_anew else [*self.segments]

    def joined(self) -> tuple[int, pa.Table]:
        """Return how many segments stay, and the rows of the one after them."""
        kept, rows = len(self.staying), self.new
        while kept:
            before = self.segments[kept - 1].rows
            if len(before) > TAIL_ROWS and (len(rows) <= TAIL_ROWS or len(before) > 2 * len(rows)):
                break
            rows, kept = pa.concat_tables([before, rows]), kept - 1
        return kept, rows.combine_chunks()


class EnumeratorLogs:
    """The logs of all enumerators that have one. ``restored``: that of a source's uid, if any."""

    def __init__(self, restored: Callable[[str], pa.Table | None]) -> None:
        self._restored = restored
        self._logs: dict[str, _Log] = {}

    def open(self, uid: str, enumerator: SplitEnumerator) -> None:
        """Give a new enumerator the log of the checkpoint, if both have one."""
        if enumerator.log_columns is None:
            return
        rows = self._restored(uid)
        if rows is not None:
            enumerator.restore_log(rows)
        self._logs[uid] = _Log(as_schema(enumerator.log_columns).empty_table() if rows is None else rows)

    def take(self, enumerators: Mapping[str, SplitEnumerator]) -> None:
        """Take what is new. Raises what ``logged`` raises, and for rows of other columns."""
        for uid, log in self._logs.items():
            rows = cast_to_schema(f"log of the enumerator of {uid!r}", enumerators[uid].logged(), log.new.schema)
            if enumerators[uid].log_is_anew:
                log.new, log.is_anew = rows, True
            elif rows.num_rows:
                log.new = pa.concat_tables([log.new, rows])

    def write(self, checkpoint: PendingCheckpoint, ended: Collection[ev.TaskId]) -> None:
        """Write what is new, and add all handles. ``ended``: also those that are ending."""
        for uid, log in self._logs.items():
            parallelism = checkpoint.context.graph.operator(uid).parallelism
            running = (number for number in range(parallelism) if ev.TaskId(uid, number) not in ended)
            owner = next(running, None)
            if owner is None:
                continue  # The source has been read to its end.
            log.written = log.staying
            if log.new.num_rows:
                kept, rows = log.joined()
                handle = checkpoint.context.subtask(uid, owner).write(ENUMERATOR_LOG, rows)
                log.written[kept:] = [_Segment(rows, handle)]
            handles = [segment.handle._replace(subtask=owner) for segment in log.written]
            if handles:
                checkpoint.add_handles(handles_table(handles))

    def published(self) -> None:
        """Note that the checkpoint written last exists."""
        for log in self._logs.values():
            log.segments, log.new, log.is_anew = log.written, log.new.slice(0, 0), False


logger = logging.getLogger(__name__)

EXPIRED_IN = 10
"""How many times per retention period (``keep_for_us``) the store is searched for older
checkpoints."""

_OPTIONS = WriteOptions(check_unique=False, trust_key_groups=True)
"""Running state holds each key once, and computes key groups as the format does."""

FATAL = (er.PublishConflict, er.JobMismatch, er.CheckpointExpired, GraceExceeded)
"""Errors that end the job: another run has taken it over, or this run's grace period is over."""


@dataclass(frozen=True)
class MessageToCoordinator:
    """A message of a subtask to its operator's coordinator."""

    uid: str
    subtask: int
    message: bytes | None
    """None: a marker, which returns to the subtask after the answers to all earlier messages."""
    snapshot_taken: int
    """The last barrier for which the subtask had taken its snapshot."""


@dataclass(frozen=True)
class SplitRequested:
    """A reader's request for a split."""

    task: ev.TaskId


class TaskMessenger(ABC):
    """How the driver reaches tasks."""

    @abstractmethod
    def mail(self, task: ev.TaskId, mail: Mail) -> None:
        """Put mail into a task's mailbox. Pass messages to an ended task to :meth:`Driver.lost`."""

    @abstractmethod
    def overtake(self, barrier: ev.Barrier) -> None:
        """Make the barrier in flight unaligned in all channels, even where it has yet to arrive."""

    @property
    @abstractmethod
    def late_rows(self) -> int:
        """Rows dropped as late since the job began; of earlier runs, as recorded in checkpoints."""

    @abstractmethod
    def drop_in_flight(self) -> None:
        """Stop logging in all channels."""


class Driver:
    """Carries out the commands of the run's :class:`Coordinator`."""

    def __init__(
        self,
        store: CheckpointStore,
        restored: Restored,
        coordinator: Coordinator,
        messenger: TaskMessenger,
        clock: Clock,
        schedule: Schedule,
        retries: Mapping[str, pa.Table],
    ) -> None:
        self.inbox: deque[ev.CoordinatorEvent | MessageToCoordinator | SplitRequested] = deque()
        self.permit = restored.permit
        self.published = self.forgone = 0
        """How many checkpoints were published, and how many not, because nothing had changed."""
        self.publish_us = self.commit_us = 0
        """How long publishing and committing have taken, in total."""
        self.in_flight: InFlightCheckpoint | None = None
        self.ended: ev.JobEnded | ev.JobInterrupted | None = None
        self.warnings: list[str] = []
        self.news: list[str] = []
        self.failed_stops: list[ev.StopFailed] = []
        self.stop_properties: dict[str, dict[str, str]] = {}
        self.savepoints: list[tuple[CommitPermit, str]] = []
        """Checkpoints to copy, each with its request."""
        self.failed_savepoints: list[ev.SavepointFailed] = []
        self.copied: set[int] = set()
        """Checkpoints that are being copied. Expiry keeps them and all later ones."""
        self._unpublished: set[str] = set()
        """The segments of the last checkpoint that was not published because nothing had moved."""
        self._store = store
        self._job = restored.job
        self._coordinator = coordinator
        self._messenger = messenger
        self._clock = clock
        self.processing_time = ProcessingTime(clock, restored.processing_time_us)
        """What operators see as wall-clock time."""
        self._keep = keep_count(schedule)
        self._keep_for_us = schedule.keep_for_us
        self._expires_at_us = 0
        self._own_properties = {**keep_properties(schedule), **restored.origin}
        self.late_rows_before = restored.late_rows
        """``Run.late_rows`` when this run began."""
        self._retries: Mapping[str, pa.Table] = retries
        """Committables of sinks that go into the next checkpoint, by uid."""
        self.enumerators: dict[str, SplitEnumerator] = {}
        self._logs = EnumeratorLogs(restored.enumerator_log)
        self.coordinators: dict[str, OperatorCoordinator] = {}
        self._errors: dict[str, BaseException] = {}
        """Exceptions, by the reason given to the coordinator."""
        self._lost: set[str] = set()
        """Operators for which a lost message has been reported."""
        self.sinks = sinks_of(restored.job.flow)
        self._carry: Mapping[type, Callable[[Any], None]] = {
            ev.Begin: self._begin,
            ev.Overtake: self._overtake,
            ev.Publish: self._publish,
            ev.Commit: self._commit,
            ev.Notify: self._notify,
            ev.Abort: self._abort,
            ev.EndSources: self._end_sources,
            ev.Restart: self._restart,
            ev.StopFailed: self.failed_stops.append,
            ev.SavepointReady: self._savepoint_ready,
            ev.SavepointFailed: self.failed_savepoints.append,
            **dict.fromkeys((ev.JobEnded, ev.JobInterrupted), lambda command: setattr(self, "ended", command)),
            ev.Warn: lambda command: self.warn(command.sentence),
        }

    def open_coordinators(self, restored: Mapping[str, pa.Table], finished: Collection[str]) -> None:
        """Make the coordinators of all operators except those of ``finished`` vertices.

        ``restored``: the rows of each, by uid. In-flight messages are delivered first. Raises
        ``OperatorError`` for what a coordinator raises.
        """
        for vertex in self._job.vertices:
            for uid in () if vertex.id in finished else vertex.operators:
                with Guard(uid, None)("the coordinator"):
                    self._open_coordinator(uid, vertex, restored.get(uid))

    def _open_coordinator(self, uid: str, vertex: Vertex, rows: pa.Table | None) -> None:
        logic = self._job.logic(uid)
        if isinstance(logic, Source):
            enumerator = logic.enumerator()
            self._logs.open(uid, enumerator)
            if rows is not None:
                enumerator.restore(rows)
            self.enumerators[uid] = enumerator
            return
        coordinator = logic.coordinator()
        if coordinator is None:
            return
        self.coordinators[uid] = coordinator
        coordinator.open(self._sender(uid, vertex))
        if rows is not None:
            own = rows.filter(rows["message"].is_null())
            coordinator.restore(own.drop_columns(["message_from", "message"]))
            for row in rows.filter(rows["message"].is_valid()).select(["message_from", "message"]).to_pylist():
                # With a smaller parallelism, another subtask may have taken over from the sender.
                coordinator.receive(row["message_from"] % vertex.parallelism, row["message"])

    def _sender(self, uid: str, vertex: Vertex) -> Sender:
        parallelism = vertex.parallelism

        def send(subtask: int, message: bytes) -> None:
            checked_message(f"the coordinator of operator {uid!r}", message)
            if not 0 <= subtask < parallelism:
                raise er.InvalidState(
                    f"the coordinator of operator {uid!r} sent to subtask {subtask}. The operator has subtasks 0 to "
                    f"{parallelism - 1} in this run."
                )
            self.carry_out(self._coordinator.handle(ev.MessageSent(vertex.id)))
            self._messenger.mail(ev.TaskId(vertex.id, subtask), MessageToSubtask(uid, message, self._behind))

        return send

    @property
    def _behind(self) -> int:
        """The barrier of the checkpoint in flight, after which coordinators write; 0 for none."""
        current = self.in_flight
        return current.barrier.number if current is not None and current.checkpoint is not None else 0

    def lost(self, uid: str, subtask: int) -> None:
        """Warn, once per operator, of a coordinator's message to a subtask whose logic had ended.

        After a stop without drain, the message is not lost: the next run sends it again.
        """
        if uid in self._lost or self._coordinator.is_suspended:
            return
        self._lost.add(uid)
        self.warn(
            f"The coordinator of operator {uid!r} sent a message to subtask {subtask}, whose input had ended, so the "
            "message is lost. A subtask receives every answer to what it sent before its last input ended. Send "
            "nothing else to a subtask that may have ended."
        )

    def warn(self, sentence: str) -> None:
        logger.warning("%s", sentence)
        self.warnings.append(sentence)

    def tell(self, sentence: str) -> None:
        """Show what has happened to the job, in the log and next to its progress."""
        logger.info("%s", sentence)
        self.news.append(sentence)

    def note(self, reason: str, error: BaseException) -> None:
        """Keep an exception as the cause, in case the run is discarded for this reason."""
        self._errors[reason] = error

    def step(self) -> None:
        """Handle the oldest item in the inbox."""
        item = self.inbox.popleft()
        if isinstance(item, SplitRequested):
            self.assign_split(item.task)
        elif isinstance(item, MessageToCoordinator):
            self._receive(item)
        else:
            self.carry_out(self._coordinator.handle(item))

    def carry_out(self, commands: Iterable[ev.CoordinatorCommand]) -> None:
        for command in commands:
            self._carry[type(command)](command)

    def assign_split(self, task: ev.TaskId) -> Split | NoSplit:
        """Ask the enumerator for a split and mail the answer; ``LATER`` if it fails."""
        vertex, begun_us = self._job.vertex(task.vertex), self._clock.now_us()
        try:
            split = self.enumerators[vertex.id].next_split(task.subtask, vertex.parallelism)
            if not isinstance(split, Split | NoSplit):
                raise er.InvalidState(f"next_split returned {type(split).__name__}; it returns a Split or NoSplit")
        except Exception as error:
            self._failed(vertex.id, f"the enumerator of source {vertex.id!r}", error)
            split = NoSplit.LATER
        self._messenger.mail(task, SplitAssigned(split, self._clock.now_us() - begun_us))
        return split

    def _receive(self, item: MessageToCoordinator) -> None:
        if item.message is None:
            task = ev.TaskId(self._job.vertex_of(item.uid).id, item.subtask)
            self._messenger.mail(task, MessageToSubtask(item.uid, None, self._behind))
            return
        current = self.in_flight
        if current is not None and current.checkpoint is not None and item.snapshot_taken < current.barrier.number:
            current.messages[item.uid].append((item.subtask, item.message))
        try:
            self.coordinators[item.uid].receive(item.subtask, item.message)
        except Exception as error:
            self._failed(item.uid, f"the coordinator of operator {item.uid!r}", error)

    def _failed(self, uid: str, what: str, error: Exception) -> None:
        reason = f"{what} failed: {error}"
        self._note_failure(reason, uid, what, error)
        self.inbox.append(ev.TaskFailed(None, reason))

    def _note_failure(self, reason: str, uid: str, hook: str, error: Exception) -> None:
        failure = OperatorError(reason, operator=uid, subtask=None, hook=hook)
        failure.__cause__ = error
        self.note(reason, failure)

    def _begin(self, command: ev.Begin) -> None:
        # What tasks sent before they knew of this checkpoint is received before it begins.
        for item in [item for item in self.inbox if isinstance(item, MessageToCoordinator)]:
            self.inbox.remove(item)
            self._receive(item)
        number = command.barrier.number
        current = InFlightCheckpoint(command.barrier, command.plan, self._clock.now_us())
        self.in_flight = current
        if command.barrier.purpose is not ev.BarrierKind.ROUND:
            current.checkpoint = self.new_checkpoint(command.stop)
            try:
                owners: dict[str, SplitEnumerator | OperatorCoordinator] = {**self.enumerators, **self.coordinators}
                for uid, owner in owners.items():
                    current.coordinators[uid] = cast_to_schema(
                        f"snapshot of the coordinator of {uid!r}", owner.snapshot(), as_schema(owner.columns)
                    )
                self._logs.take(self.enumerators)
            except Exception as error:
                reason = f"that of operator {uid!r}: {error}"
                self._note_failure(reason, uid, "snapshot of the coordinator", error)
                self.inbox.append(ev.SnapshotFailed(None, number, reason))
                return
        for task in command.plan.trigger:
            self._messenger.mail(task, ev.Triggered(command.barrier))

    def _overtake(self, command: ev.Overtake) -> None:
        self._messenger.overtake(command.barrier)
        for task in sorted(command.tasks):
            self._messenger.mail(task, ev.Triggered(command.barrier))

    def new_checkpoint(self, stop: ev.StopOf | None = None) -> PendingCheckpoint:
        """Begin a checkpoint on top of the newest. Until it is published, it does not exist."""
        return self._store.begin(
            job_id=self._job.flow.job_id,
            job_name=self._job.flow.name,
            graph=self._job.graph,
            states=self._job.states,
            parent=self.permit,
            stop=Stop(stop.mode, stop.request) if stop else None,
            options=_OPTIONS,
            properties={**self._own_properties, **(self.stop_properties.get(stop.request, {}) if stop else {})},
        )

    def add_committables(self, uid: str, committables: pa.Table) -> None:
        """Add to the next checkpoint what a sink prepared for one that was not published."""
        before = self._retries.get(uid)
        if before is not None:
            committables = pa.concat_tables([before, committables.select(before.column_names)])
        self._retries = {**self._retries, uid: committables}

    def _publish(self, command: ev.Publish) -> None:
        current = self.in_flight
        assert current is not None
        assert current.checkpoint is not None
        number = command.number
        if not command.moved and self._is_settled:
            self._forgo(current, current.checkpoint)
            self.inbox.append(ev.Unchanged(number))
            return
        try:
            begun = time.perf_counter()
            finished = self._mark(current, command)
            self._add_coordinators(current, finished)
            self._logs.write(current.checkpoint, {*current.plan.finished, *command.finishing})
            for uid in {state.operator for state in self._job.states if state.by_processing_time}:
                current.checkpoint.set_now(uid, processing_time_us=self.processing_time.now_us)
            if self._messenger.late_rows:
                current.checkpoint.set_property(LATE_PROPERTY, str(self._messenger.late_rows))
            self.permit = current.checkpoint.publish()
            self.publish_us += int(1e6 * (time.perf_counter() - begun))
        except FATAL:
            raise
        except er.InvalidState as error:
            counted = error.kind is not er.ErrorKind.UNION_PARTIALLY_FINISHED
            self.inbox.append(ev.PublishRefused(number, str(error), counted))
        except (er.OutcomeUnknown, er.StorageError, OSError) as error:
            self.note(str(error), error)
            self.inbox.append(ev.PublishFailed(number, str(error), unknown=isinstance(error, er.OutcomeUnknown)))
        else:
            self._retries, self._unpublished = {}, set()
            self._logs.published()
            self._errors.clear()
            self.published += 1
            self.inbox.append(ev.Published(number))

    def _forgo(self, current: InFlightCheckpoint, checkpoint: PendingCheckpoint) -> None:
        """Delete what the one before this one has written, if that was not published either.

        A run on Spark may still read what this one has written; nobody else knows any of it.
        """
        self.forgone += 1
        current.unchanged = True
        before, self._unpublished = self._unpublished, checkpoint.written()
        void = sorted(before - self._unpublished)
        if void:
            try:
                self._store.storage.delete(void)
            except (er.StorageError, OSError) as error:
                logger.warning("segments of a checkpoint that was not published could not be deleted: %s", error)

    @property
    def _is_settled(self) -> bool:
        """Whether nothing is left to commit or to end, and the newest checkpoint says so."""
        if self.permit is None or self._retries or "committables" in self.permit.record.required_features:
            return False
        return not any(operator.finishing for operator in self.permit.record.graph.operators)

    def _mark(self, current: InFlightCheckpoint, command: ev.Publish) -> frozenset[str]:
        """Mark the subtasks that had ended before. Return the fully finished operators."""
        assert current.checkpoint is not None
        finished: dict[str, list[int]] = defaultdict(list)
        for task in current.plan.finished:
            finished[task.vertex].append(task.subtask)
        finishing = Counter(task.vertex for task in command.finishing)
        done: set[str] = set()
        for vertex in self._job.vertices:
            for uid in vertex.operators:
                current.checkpoint.mark_finished(uid, finished[vertex.id])
            if len(finished[vertex.id]) + finishing[vertex.id] == vertex.parallelism:
                done.update(vertex.operators)
        return frozenset(done)

    def _add_coordinators(self, current: InFlightCheckpoint, done: frozenset[str]) -> None:
        """Write the state of running coordinators, and what sinks have yet to commit."""
        checkpoint = current.checkpoint
        assert checkpoint is not None
        for uid in self._job.graph.by_uid:
            kept = uid in current.coordinators and uid not in done
            if not kept and uid not in self._retries:
                continue
            writer = checkpoint.context.coordinator(uid, finished=uid in done)
            for state in self._job.states:
                if kept and state.operator == uid and state.mode is Mode.COORDINATOR:
                    writer.write(state.name, current.coordinator_rows(uid, segment_schema(state)))
            if uid in self._retries:
                writer.write(COMMITTABLES, self._retries[uid])
            checkpoint.add(writer)

    def _commit(self, command: ev.Commit) -> None:
        assert self.permit is not None
        begun = time.perf_counter()
        try:
            self._retries = commit(self.permit, self.sinks, pending_committables(self.permit, self._job, self.sinks))
        except Exception as error:
            self.note(str(error), error)
            self.inbox.append(ev.CommitFailed(command.number, str(error)))
        else:
            self.commit_us += int(1e6 * (time.perf_counter() - begun))
            self.inbox.append(ev.Committed(command.number))

    def commit_rest(self, until_us: int | None = None) -> str:
        """Commit what sinks have put off. Return in words what is left at ``until_us``, or ""."""
        if self.permit is not None:
            self._retries = commit_rest(self.permit, self.sinks, self._retries, self._clock, until_us)
        return left_words(self._retries)

    def _notify(self, command: ev.Notify) -> None:
        current, self.in_flight = self.in_flight, None
        for task, loop in command.tasks.items():
            self._messenger.mail(task, ev.Completed(command.number, loop))
        if current is None or current.checkpoint is None:
            return
        self._notify_coordinators(self.coordinators, lambda coordinator: coordinator.checkpoint_complete())
        self._expire()

    def _expire(self) -> None:
        """Remove checkpoints past retention. If it is a time, this looks only now and then, since
        each look reads the record of every kept checkpoint.
        """
        now_us = self._clock.now_us()
        if self._keep is None or now_us < self._expires_at_us:
            return
        if self._keep_for_us is not None:
            self._expires_at_us = now_us + self._keep_for_us // EXPIRED_IN
        try:
            newest = self.permit.ref.checkpoint_id if self.permit else 0
            keep = max(self._keep, *(newest - held + 1 for held in self.copied), 1)
            self._store.expire(keep, older_than_us=self._keep_for_us)
        except (er.StorageError, OSError) as error:
            logger.warning("old checkpoints could not be removed; the next checkpoint tries again: %s", error)
            self._expires_at_us = 0

    def _abort(self, command: ev.Abort) -> None:
        current, self.in_flight = self.in_flight, None
        level = logging.DEBUG if current is not None and current.unchanged else logging.INFO
        logger.log(level, "aborted the checkpoint of barrier %d: %s", command.number, command.reason)
        self._messenger.drop_in_flight()
        for task in sorted(command.tasks):  # In the same order in every process, so that a seed reproduces a run.
            self._messenger.mail(task, ev.Aborted(command.number))
        if current is not None and current.checkpoint is not None:
            checkpoint_id = int(current.checkpoint.checkpoint_id)
            kept = [uid for uid in self.coordinators if uid in current.coordinators]
            self._notify_coordinators(kept, lambda coordinator: coordinator.checkpoint_aborted(checkpoint_id))

    def _notify_coordinators(self, uids: Iterable[str], notify: Callable[[OperatorCoordinator], None]) -> None:
        for uid in uids:
            try:
                notify(self.coordinators[uid])
            except Exception as error:
                self._failed(uid, f"the coordinator of operator {uid!r}", error)

    def _savepoint_ready(self, command: ev.SavepointReady) -> None:
        assert self.permit is not None
        self.savepoints += [(self.permit, request) for request in command.requests]
        self.copied.add(self.permit.ref.checkpoint_id)

    def _end_sources(self, command: ev.EndSources) -> None:
        for task in sorted(command.tasks):
            self._messenger.mail(task, ev.EndSource())

    def _restart(self, command: ev.Restart) -> None:
        known = [reason for reason in self._errors if reason and reason in command.reason]
        cause = self._errors[max(known, key=len)] if known else None
        raise RunDiscarded(command.reason, counted=command.counted) from cause
