"""The driver of a run: carries out what the coordinator commands, and speaks with the store.

Checkpoints are begun, published and expired here, and sinks commit here, with the permit. Segments are written by tasks
(``worker.py``); requests of users and savepoints are in ``stopping.py``. The coordinators of operators and the enumerators of
sources live here too.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from stateformat.errors import (
    CheckpointExpired,
    ErrorKind,
    InvalidState,
    JobMismatch,
    OutcomeUnknown,
    PublishConflict,
    StorageError,
)
from stateformat.model import LATE_PROPERTY, Mode, Stop
from stateformat.publication import CommitPermit, PendingCheckpoint
from stateformat.schema import segment_schema
from stateformat.segments import WriteOptions
from stateformat.states import as_schema
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from ..dataflow.api import NoSplit, OperatorCoordinator, Sender, Source, Split, SplitEnumerator
from ..dataflow.casting import cast_to_schema
from ..dataflow.chain import Guard, OperatorError, checked_message
from ..dataflow.coordinator import Coordinator
from ..dataflow.graph import COMMITTABLES, Job
from .clock import Clock
from .commits import commit, commit_rest, pending_committables, sinks_of
from .in_flight_checkpoint import InFlightCheckpoint
from .outcome import RunDiscarded
from .worker import Mail, MessageToSubtask, SplitAssigned

logger = logging.getLogger(__name__)

_OPTIONS = WriteOptions(check_unique=False, trust_key_groups=True)
"""The running state holds a key once, and computes key groups as the format does."""

FATAL = (PublishConflict, JobMismatch, CheckpointExpired)
"""Another run has the job: this one stops, and says by what."""


@dataclass(frozen=True)
class MessageToCoordinator:
    """A subtask writes to its operator's coordinator, having taken its snapshot for ``snapshot_taken`` last. ``message`` None: a
    marker, which goes back to the subtask behind the answers to all that it wrote before.
    """

    uid: str
    subtask: int
    message: bytes | None
    snapshot_taken: int


@dataclass(frozen=True)
class SplitRequested:
    """A reader asks for a split."""

    task: ev.TaskId


class TaskMessenger(Protocol):
    """How the driver reaches tasks."""

    def mail(self, task: ev.TaskId, mail: Mail) -> None:
        """Put mail into a task's box. A task that is gone needs none; a message of a coordinator to it is :meth:`Driver.lost`."""

    def overtake(self, barrier: ev.Barrier) -> None:
        """The barrier in flight turns unaligned, in the channels where it lies and where it is still to come."""

    @property
    def late_rows(self) -> int:
        """Rows that operators have dropped as late since the job began."""

    def drop_in_flight(self) -> None:
        """Nothing is logged in any channel any more."""


def late_rows_of(permit: CommitPermit | None) -> int:
    """What the record of a checkpoint says of rows that were dropped as late; 0 where it says nothing that is a number."""
    said = permit.record.properties.get(LATE_PROPERTY, "") if permit is not None else ""
    return int(said) if said.isdecimal() and len(said) < 19 else 0


class Driver:
    """Coordinator, operators' coordinators, and the store, of one run."""

    def __init__(
        self,
        store: CheckpointStore,
        job: Job,
        permit: CommitPermit | None,
        coordinator: Coordinator,
        messenger: TaskMessenger,
        clock: Callable[[], int],
        *,
        keep: int | None,
        properties: Mapping[str, str],
        retries: Mapping[str, pa.Table],
    ) -> None:
        self.inbox: deque[ev.CoordinatorEvent | MessageToCoordinator | SplitRequested] = deque()
        self.permit = permit
        self.published = 0
        self.publish_us = self.commit_us = 0
        """How long publishing and committing have taken in all."""
        self.in_flight: InFlightCheckpoint | None = None
        self.ended: ev.JobEnded | None = None
        self.warnings: list[str] = []
        self.failed_stops: list[ev.StopFailed] = []
        self.stop_properties: dict[str, dict[str, str]] = {}
        self._store = store
        self._job = job
        self._coordinator = coordinator
        self._messenger = messenger
        self._clock = clock
        self._keep = keep
        self._own_properties = properties
        self.late_rows_before = late_rows_of(permit)
        """As of ``Run.late_rows``, when this run began."""
        self._retries: Mapping[str, pa.Table] = retries
        self.enumerators: dict[str, SplitEnumerator] = {}
        self.coordinators: dict[str, OperatorCoordinator] = {}
        self._errors: dict[str, BaseException] = {}
        """What was raised, by the sentence that the coordinator was told."""
        self._lost: set[str] = set()
        """Operators of which it was said that a message was lost."""
        self.sinks = sinks_of(job.flow)
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
            ev.JobEnded: lambda command: setattr(self, "ended", command),
            ev.Warn: lambda command: self.warn(command.sentence),
        }

    def open_coordinators(self, restored: Mapping[str, pa.Table], finished: Collection[str]) -> None:
        """Make the coordinators of the operators that run: of all vertices but the ``finished``. ``restored``: what each kept, by
        uid. Messages that were on their way are delivered first. Raises ``OperatorError`` for what they raise.
        """
        for vertex in self._job.vertices:
            for uid in () if vertex.id in finished else vertex.operators:
                with Guard(uid, None)("the coordinator"):
                    self._open_coordinator(uid, vertex.id, restored.get(uid))

    def _open_coordinator(self, uid: str, vertex: str, rows: pa.Table | None) -> None:
        logic = self._job.logic(uid)
        if isinstance(logic, Source):
            enumerator = logic.enumerator()
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
            self._give_back(coordinator, rows, self._job.vertex(vertex).parallelism)

    def _give_back(self, coordinator: OperatorCoordinator, rows: pa.Table, parallelism: int) -> None:
        own = rows.filter(rows["message"].is_null())
        coordinator.restore(own.drop_columns(["message_from", "message"]))
        for row in rows.filter(rows["message"].is_valid()).select(["message_from", "message"]).to_pylist():
            # At a smaller parallelism the sender may be gone, and the answer is to reach somebody.
            coordinator.receive(row["message_from"] % parallelism, row["message"])

    def _sender(self, uid: str, vertex: str) -> Sender:
        parallelism = self._job.vertex(vertex).parallelism

        def send(subtask: int, message: bytes) -> None:
            checked_message(f"the coordinator of operator {uid!r}", message)
            if not 0 <= subtask < parallelism:
                raise InvalidState(
                    f"the coordinator of operator {uid!r} sent to subtask {subtask}. The operator has subtasks 0 to {parallelism - 1} "
                    "in this run."
                )
            self.carry_out(self._coordinator.handle(ev.MessageSent(vertex)))
            self._messenger.mail(ev.TaskId(vertex, subtask), MessageToSubtask(uid, message, self._behind))

        return send

    @property
    def _behind(self) -> int:
        """Behind which barrier the coordinators of operators write now."""
        current = self.in_flight
        return current.barrier.number if current is not None and current.checkpoint is not None else 0

    def lost(self, uid: str, subtask: int) -> None:
        """A message of a coordinator came to a subtask whose logic had ended: warn, once per operator. After a stop without drain the
        message is not lost, since the run that goes on sends it again.
        """
        if uid in self._lost or self._coordinator.is_suspended:
            return
        self._lost.add(uid)
        self.warn(
            f"The coordinator of operator {uid!r} sent a message to subtask {subtask}, whose input had ended, so the message is lost. A "
            "subtask receives every answer to what it sent before its last input ended; send nothing else to a subtask that may "
            "have ended."
        )

    def warn(self, sentence: str) -> None:
        """A sentence for the user."""
        logger.warning("%s", sentence)
        self.warnings.append(sentence)

    def note(self, reason: str, error: BaseException) -> None:
        """Keep an exception, whose ``reason`` the coordinator is told: if the run is given up for it, it is the cause."""
        self._errors[reason] = error

    def step(self) -> None:
        """Deal with the oldest thing in the inbox."""
        self._handle(self.inbox.popleft())

    def _handle(self, item: ev.CoordinatorEvent | MessageToCoordinator | SplitRequested) -> None:
        if isinstance(item, SplitRequested):
            self.assign_split(item.task)
        elif isinstance(item, MessageToCoordinator):
            self._receive(item)
        else:
            self.carry_out(self._coordinator.handle(item))

    def carry_out(self, commands: Iterable[ev.CoordinatorCommand]) -> None:
        """Do what the coordinator commands, in order."""
        for command in commands:
            self._carry[type(command)](command)

    # Coordinators of operators -----------------------------------------------------------------------------------------

    def assign_split(self, task: ev.TaskId) -> Split | NoSplit:
        """Ask the enumerator for a split for a reader, and mail it the answer. ``LATER`` where the enumerator failed, and the run does."""
        vertex = self._job.vertex(task.vertex)
        try:
            split = self.enumerators[vertex.id].next_split(task.subtask, vertex.parallelism)
            if not isinstance(split, Split | NoSplit):
                raise InvalidState(f"next_split returned {type(split).__name__}; it returns a Split or NoSplit")
        except Exception as error:
            self._failed(vertex.id, f"the enumerator of source {vertex.id!r}", error)
            split = NoSplit.LATER
        self._messenger.mail(task, SplitAssigned(split))
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
        failure = OperatorError(f"{what} failed: {error}", operator=uid, subtask=None, hook=what)
        failure.__cause__ = error
        self.note(str(failure), failure)
        self.inbox.append(ev.TaskFailed(None, str(failure)))

    # Checkpoints -------------------------------------------------------------------------------------------------------

    def _begin(self, command: ev.Begin) -> None:
        # What tasks sent before they could know of this checkpoint is not on its way any more when it begins.
        for item in [item for item in self.inbox if isinstance(item, MessageToCoordinator)]:
            self.inbox.remove(item)
            self._receive(item)
        number = command.barrier.number
        current = InFlightCheckpoint(command.barrier, command.plan, self._clock())
        self.in_flight = current
        if command.barrier.purpose is not ev.BarrierKind.ROUND:
            current.checkpoint = self.new_checkpoint(command.stop)
            try:
                owners: dict[str, SplitEnumerator | OperatorCoordinator] = {**self.enumerators, **self.coordinators}
                for uid, owner in owners.items():
                    current.coordinators[uid] = cast_to_schema(
                        f"snapshot of the coordinator of {uid!r}", owner.snapshot(), as_schema(owner.columns)
                    )
            except Exception as error:
                reason = f"that of operator {uid!r}: {error}"
                failure = OperatorError(reason, operator=uid, subtask=None, hook="snapshot of the coordinator")
                failure.__cause__ = error
                self.note(reason, failure)
                self.inbox.append(ev.SnapshotFailed(None, number, reason))
                return
        for task in command.plan.trigger:
            self._messenger.mail(task, ev.Triggered(command.barrier))

    def _overtake(self, command: ev.Overtake) -> None:
        self._messenger.overtake(command.barrier)
        for task in sorted(command.tasks):
            self._messenger.mail(task, ev.Triggered(command.barrier))

    def new_checkpoint(self, stop: ev.StopOf | None = None) -> PendingCheckpoint:
        """Begin a checkpoint on top of the newest. One that nobody publishes is none, but what it wrote may become part of the next."""
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
        """What a sink has prepared in a checkpoint that was not published becomes part of the next one."""
        held = self._retries.get(uid)
        self._retries = {
            **self._retries,
            uid: committables if held is None else pa.concat_tables([held, committables.select(held.column_names)]),
        }

    def _publish(self, command: ev.Publish) -> None:
        current = self.in_flight
        assert current is not None
        assert current.checkpoint is not None
        number = command.number
        try:
            begun = time.perf_counter()
            finished = self._mark(current, command)
            self._add_coordinators(current, finished)
            if self._messenger.late_rows:
                current.checkpoint.set_property(LATE_PROPERTY, str(self._messenger.late_rows))
            self.permit = current.checkpoint.publish()
            self.publish_us += int(1e6 * (time.perf_counter() - begun))
        except FATAL:
            raise
        except InvalidState as error:
            counted = error.kind is not ErrorKind.UNION_PARTIALLY_FINISHED
            self.inbox.append(ev.PublishRefused(number, str(error), counted))
        except OutcomeUnknown as error:
            self.inbox.append(ev.PublishFailed(number, str(error), unknown=True))
        except (StorageError, OSError) as error:
            self.inbox.append(ev.PublishFailed(number, str(error), unknown=False))
        else:
            self._retries = {}
            self._errors.clear()
            self.published += 1
            self.inbox.append(ev.Published(number))

    def _mark(self, current: InFlightCheckpoint, command: ev.Publish) -> frozenset[str]:
        """Say which subtasks had ended before; returns the operators of which every subtask has ended."""
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
        """Write what the operators' coordinators kept, and what sinks are still to commit; nothing of the former for an operator
        that is fully finished.
        """
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

    def commit_rest(self, clock: Clock) -> None:
        """The job ends: see :func:`commit_rest`."""
        if self.permit is not None:
            commit_rest(self.permit, self.sinks, self._retries, clock)

    def _notify(self, command: ev.Notify) -> None:
        current, self.in_flight = self.in_flight, None
        for task, loop in command.tasks.items():
            self._messenger.mail(task, ev.Completed(command.number, loop))
        if current is None or current.checkpoint is None:
            return
        self._tell_coordinators(self.coordinators, lambda coordinator: coordinator.checkpoint_complete())
        if self._keep is not None:
            try:
                self._store.expire(self._keep)
            except (StorageError, OSError) as error:
                logger.warning("old checkpoints could not be removed, the next one will try again: %s", error)

    def _abort(self, command: ev.Abort) -> None:
        current, self.in_flight = self.in_flight, None
        logger.info("gave up checkpoint of barrier %d: %s", command.number, command.reason)
        self._messenger.drop_in_flight()
        for task in sorted(command.tasks):  # In the same order in every process: a seed decides the rest.
            self._messenger.mail(task, ev.Aborted(command.number))
        if current is not None and current.checkpoint is not None:
            checkpoint_id = int(current.checkpoint.checkpoint_id)
            kept = [uid for uid in self.coordinators if uid in current.coordinators]
            self._tell_coordinators(kept, lambda coordinator: coordinator.checkpoint_aborted(checkpoint_id))

    def _tell_coordinators(self, uids: Iterable[str], tell: Callable[[OperatorCoordinator], None]) -> None:
        for uid in uids:
            try:
                tell(self.coordinators[uid])
            except Exception as error:
                self._failed(uid, f"the coordinator of operator {uid!r}", error)

    def _end_sources(self, command: ev.EndSources) -> None:
        for task in sorted(command.tasks):
            self._messenger.mail(task, ev.EndSource())

    def _restart(self, command: ev.Restart) -> None:
        known = [reason for reason in self._errors if reason and reason in command.reason]
        cause = self._errors[max(known, key=len)] if known else None
        raise RunDiscarded(command.reason, counted=command.counted) from cause


__all__ = ["FATAL", "Driver", "MessageToCoordinator", "SplitRequested"]
