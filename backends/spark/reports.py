"""What a task gets for an epoch, and what it says of it."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from backends.dataflow import events as ev
from backends.dataflow.compile import Job
from backends.dataflow.member import ReportedProgress
from backends.running.channels import Queue
from backends.running.worker import Mail, Worker
from backends.spark.base import Base
from backends.spark.mail import REPORT, Address, row
from backends.spark.remote_errors import pack
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.snapshot import Snapshot, WriteContext


@dataclass(frozen=True)
class Setup:
    """What all tasks of a run share, in every epoch. ``levels``: by vertex; ``last_level``: where heads of loops end their epochs.

    ``inputs`` and ``outputs``: the channels of each task, by edge.
    """

    run: str
    job: Job
    context: WriteContext
    levels: Mapping[str, int]
    last_level: int
    inputs: Mapping[ev.TaskId, Mapping[str, tuple[ev.Channel, ...]]]
    outputs: Mapping[ev.TaskId, Mapping[str, tuple[ev.Channel, ...]]]
    cache_bytes: int

    def pickled(self) -> bytes:
        """As it goes to workers. ``InvalidInput``, the fault of the job's author, for a step that cannot be pickled."""
        from pyspark import cloudpickle

        try:
            return bytes(cloudpickle.dumps(self))
        except Exception:
            for uid, step in self.job.flow.steps.items():
                try:
                    cloudpickle.dumps(step.logic)
                except Exception as error:
                    raise InvalidInput(
                        f"{uid!r} goes to Spark's workers and cannot be pickled: {type(error).__name__}: {error}. Leave out what belongs "
                        "to this process (locks, connections, the session), and make it in open",
                        kind=ErrorKind.UNSUPPORTED_TYPE,
                        operator=uid,
                    ) from error
            raise

    def level_of(self, channel: ev.Channel) -> int:
        """At which level a channel is read."""
        edge = self.job.graph.by_edge[channel.edge]
        return self.last_level if edge.feedback else self.levels[self.job.vertex_of(edge.target).id]

    def queues(self, task: ev.TaskId) -> dict[ev.Channel, Queue]:
        """The receiving ends of the channels of a task."""
        channels = (channel for some in self.inputs[task].values() for channel in some)
        return {channel: Queue(channel, capacity=None) for channel in channels}


class Spec(NamedTuple):
    """What one task gets for one epoch.

    ``base`` None: its activation has ended. ``tokens``: of its accepted reports, with their versions. ``started``: its core has been.
    ``number``: the last barrier it took; ``version``: that of what it writes now. ``triggered``: the coordinator triggers it, when it
    has read. ``fed``: it is a source whose rows come as frames; else it reads ``read_rows`` at most, and ``read_us``. ``gone``:
    receivers that have left.
    """

    task: ev.TaskId
    core: bytes
    mail: tuple[Mail, ...]
    triggered: ev.Triggered | None
    base: Base | None
    tokens: Mapping[bytes, int]
    started: bool
    number: int
    version: int
    fed: bool
    read_rows: int | None
    read_us: int | None
    gone: frozenset[ev.TaskId]


@dataclass
class Report:
    """What a task says of an epoch.

    ``core``: as it is now. ``number``: the last barrier that it took, ``taken``: that of these ``snapshots``, 0 where no barrier asked
    for them, and ``taken_id`` the id of its checkpoint; ``messages``: to coordinators, markers too; ``lost``: operators that a message of theirs came to too late; ``kept``: by
    operator and keyed state, how many layers stay underneath; ``reported``: by operator, the progress of
    its inputs. ``replays``: records have been fed back, and are
    in the snapshot. ``travelling``: operators that go on as they were. ``errors``: exceptions behind the
    sentences of ``events``, packed (``remote_errors.pack``). ``sent``, ``consumed``: frames. ``opened``: how the activation
    was come by: ``kept``, ``caught_up``, ``restored``, or nothing where it needs none.
    """

    task: ev.TaskId
    token: bytes = field(default_factory=lambda: os.urandom(16))
    core: bytes = b""
    number: int = 0
    taken: int = 0
    taken_id: int = 0
    replays: bool = False
    ended: bool = False
    events: list[ev.CoordinatorEvent] = field(default_factory=list)
    errors: list[tuple[str, bytes]] = field(default_factory=list)
    messages: list[tuple[str, bytes | None, int]] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)
    confirmed: list[ev.Channel] = field(default_factory=list)
    wants_split: bool = False
    ran_dry: bool = False
    snapshots: tuple[Snapshot, ...] = ()
    kept: dict[str, Mapping[str, int]] = field(default_factory=dict)
    reported: dict[str, ReportedProgress] = field(default_factory=dict)
    travelling: dict[str, bytes] = field(default_factory=dict)
    sent: dict[ev.TaskId, int] = field(default_factory=dict)
    consumed: dict[Address, tuple[bytes, int]] = field(default_factory=dict)
    rows_read: int = 0
    late_rows: int = 0
    sent_bytes: int = 0
    opened: str = ""

    def rows(self) -> pa.RecordBatch:
        """As the row of an exchange: it is passed on through all levels, to the driver."""
        return row(self.task.subtask, REPORT, pickle.dumps(self, protocol=5))

    @property
    def failure(self) -> ev.TaskFailed | None:
        """Why the task was lost; None where it was not."""
        return next((event for event in self.events if isinstance(event, ev.TaskFailed)), None)


class ReportLink:
    """What a worker reaches (``worker.WorkerEnvironment``): everything goes into the report; the driver sees to it after the epoch."""

    def __init__(self, report: Report, context: WriteContext) -> None:
        self.report = report
        self._context = context

    def tell(self, event: ev.CoordinatorEvent) -> None:
        """For the coordinator."""
        self.report.events.append(event)

    def note(self, reason: str, error: Exception) -> None:
        """For the driver, in a form that travels."""
        self.report.errors.append((reason, pack(error)))

    def message(self, uid: str, subtask: int, message: bytes | None, snapshot_taken: int) -> None:  # noqa: ARG002 - the report's
        """For an operator's coordinator."""
        self.report.messages.append((uid, message, snapshot_taken))

    def lost(self, uid: str, subtask: int) -> None:  # noqa: ARG002 - the report's
        """For the driver."""
        self.report.lost.add(uid)

    def request_split(self, task: ev.TaskId) -> None:  # noqa: ARG002 - the report's
        """For the enumerator, which answers before the next epoch."""
        self.report.wants_split = True

    def context(self, number: int) -> WriteContext:  # noqa: ARG002 - an epoch has one
        """What writers need."""
        return self._context

    def add(self, number: int, snapshots: Sequence[Snapshot]) -> None:
        """The snapshot of a barrier is whole."""
        self.report.snapshots = tuple(snapshots)
        self.report.taken, self.report.taken_id = number, int(self._context.checkpoint_id)

    def awaits_snapshot(self, task: ev.TaskId, number: int) -> bool:  # noqa: ARG002 - true of all
        """What coordinators have sent before the epoch lies before its barrier."""
        return False

    def confirm(self, channel: ev.Channel) -> None:
        """For the sender of a channel."""
        self.report.confirmed.append(channel)

    def current_form(self, barrier: ev.Barrier) -> ev.Barrier:
        """Barriers of epochs are aligned."""
        return barrier

    def announce(self, channel: ev.Channel, barrier: ev.Barrier) -> None:
        """Barriers of epochs are aligned."""
        raise AssertionError(f"barrier {barrier.number} overtakes on {channel}")

    def log_arrival(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        """Barriers of epochs are aligned."""
        raise AssertionError(f"{batch.num_rows} records are logged on {channel}")

    def ended(self, task: ev.TaskId) -> None:
        """For the coordinator, and for whoever sends to it."""
        self.report.ended = True
        self.report.events.append(ev.TaskEnded(task))

    def wake(self, worker: Worker) -> None:
        """Nobody sleeps."""

    def now_us(self) -> int:
        """The clock of this machine."""
        return time.time_ns() // 1000


__all__ = ["Report", "ReportLink", "Setup", "Spec"]
