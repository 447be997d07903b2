"""What a task gets for an epoch, and what it reports."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import AttemptId, CheckpointId, Mode
from stateformat.snapshot import Snapshot, WriteContext

from ...dataflow import events as ev
from ...dataflow.chained_operator import ReportedProgress
from ...dataflow.compile import Job
from ...dataflow.source_reader import Holder
from ...runtime import Mail, Queue, Worker
from . import frames
from .remote_errors import pack_error
from .restore_point import RestorePoint

ChannelsByEdge = Mapping[str, tuple[ev.Channel, ...]]


@dataclass(frozen=True)
class Setup:
    """What all tasks of a run share, in every epoch."""

    run: str
    job: Job
    context: WriteContext
    levels: Mapping[str, int]
    last_level: int
    inputs: Mapping[ev.TaskId, ChannelsByEdge]
    outputs: Mapping[ev.TaskId, ChannelsByEdge]
    cache_bytes: int
    loop_bytes_max: int

    def pickled(self) -> bytes:
        """Return the setup as bytes for workers. ``InvalidInput`` if a step cannot be pickled."""
        from pyspark import cloudpickle

        try:
            return bytes(cloudpickle.dumps(self))
        except Exception:
            for uid, step in self.job.flow.steps.items():
                try:
                    cloudpickle.dumps(step.logic)
                except Exception as error:
                    raise InvalidInput(
                        f"{uid!r} goes to Spark's workers and cannot be pickled: {type(error).__name__}: "
                        f"{error}. Leave out what belongs to this process (locks, connections, the session), and make "
                        "it in open.",
                        kind=ErrorKind.UNSUPPORTED_TYPE,
                        operator=uid,
                    ) from error
            raise

    def level_of(self, channel: ev.Channel) -> int:
        edge = self.job.graph.by_edge[channel.edge]
        return self.last_level if edge.feedback else self.levels[self.job.vertex_of(edge.target).id]

    def queues(self, task: ev.TaskId) -> dict[ev.Channel, Queue]:
        channels = (channel for of_edge in self.inputs[task].values() for channel in of_edge)
        return {channel: Queue(channel, capacity=None) for channel in channels}


@dataclass(frozen=True)
class Epoch:
    """What all tasks of one epoch share."""

    version: int
    """The version of the states that they write."""
    checkpoint_id: CheckpointId
    attempt_id: AttemptId
    read_rows: int | None
    """The most rows that a source reads, unless its rows come as frames; None: no limit."""
    read_us: int | None
    """For how long such a source reads at most; None: no limit."""
    processing_time_us: int
    """The wall-clock time for everything in the epoch, the same in each try."""
    gone: frozenset[ev.TaskId]
    """The tasks that have left the job."""
    live: frozenset[str]
    """The runs for which workers keep their caches."""


@dataclass(frozen=True)
class Spec:
    """What one task gets for one epoch."""

    task: ev.TaskId
    core: bytes
    """Its state machine, pickled."""
    mail: tuple[Mail, ...]
    triggered: ev.Triggered | None
    """The coordinator's trigger, delivered after the task has read its input."""
    restore_point: RestorePoint | None
    """None if its chain has ended."""
    tokens: Mapping[bytes, int]
    """Accepted reports' tokens and versions: the last reports, and those that left copies."""
    started: bool
    """Whether its core was started in an earlier epoch."""
    number: int
    """The last barrier that it took (``Worker.snapshot_taken``)."""
    reads_frames: bool
    """Whether it is a source whose rows come as frames."""
    active: Mapping[str, int]
    """When its reader, and each split, last had rows."""


@dataclass
class TaskReport:
    """What a task reports about one epoch."""

    task: ev.TaskId
    token: bytes = field(default_factory=lambda: os.urandom(16))
    core: bytes = b""
    number: int = 0
    """The last barrier that it took (``Worker.snapshot_taken``)."""
    barrier: int = 0
    """The barrier of ``snapshots``; 0 if no barrier asked for them."""
    checkpoint_id: int = 0
    snapshots: tuple[Snapshot, ...] = ()
    replays: bool = False
    presses: bool = False
    """Whether so much was fed back to this head that it must process that before sources read."""
    ended: bool = False
    events: list[ev.CoordinatorEvent] = field(default_factory=list)
    errors: list[tuple[str, bytes]] = field(default_factory=list)
    """The reasons in ``events``, each with its exception (``pack_error``)."""
    messages: list[tuple[str, bytes | None, int]] = field(default_factory=list)
    """Messages to coordinators: uid, message (None: a marker), the sender's last barrier."""
    lost: set[str] = field(default_factory=set)
    """Operators to which a coordinator's message came too late."""
    confirmed: list[ev.Channel] = field(default_factory=list)
    wants_split: bool = False
    ran_dry: bool = False
    """Whether a source has read everything that was there."""
    kept: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """By uid and keyed state, how many of the lower layers are kept."""
    reported: dict[str, ReportedProgress] = field(default_factory=dict)
    """By uid, the progress of its inputs."""
    pickled: dict[str, bytes] = field(default_factory=dict)
    """By uid, the pickled operators that continue in the next epoch (``operator_pickling``)."""
    sent: dict[ev.TaskId, int] = field(default_factory=dict)
    consumed: dict[frames.Address, tuple[bytes, int]] = field(default_factory=dict)
    rows_read: int = 0
    late_rows: int = 0
    sent_bytes: int = 0
    wakes_at_us: int | None = None
    """The processing time at which a timer is due, or its reader becomes idle; None: neither."""
    holder: Holder | None = None
    """The split of its reader that is behind the others."""
    active: dict[str, int] = field(default_factory=dict)
    """When its reader, and each split, last had rows (``SourceReader.active``)."""
    opened: str = ""
    """How it got its chain: ``kept``, ``caught_up`` or ``restored``; empty if it needs none."""

    copied: bool = False
    """Whether its worker has left a copy of the states for others."""

    @property
    def wrote_base(self) -> bool:
        """Whether it has written a keyed state in full."""
        return any(
            handle.mode == Mode.KEYED and handle.rows and not self.kept.get(handle.operator, {}).get(handle.state, 0)
            for snapshot in self.snapshots
            for handle in snapshot.handles
        )

    def sent_on(self) -> frames.Sent:
        """Return the report as a payload that the remaining levels pass on."""
        return self.task.subtask, frames.pack_report(self)

    @property
    def failure(self) -> ev.TaskFailed | None:
        return next((event for event in self.events if isinstance(event, ev.TaskFailed)), None)


class EpochLink:
    """The ``WorkerEnvironment`` of an epoch: it puts everything into the report."""

    def __init__(self, report: TaskReport, epoch: Epoch, context: WriteContext) -> None:
        self.report = report
        self._epoch = epoch
        self._context = context

    def tell(self, event: ev.CoordinatorEvent) -> None:
        self.report.events.append(event)

    def note(self, reason: str, error: Exception) -> None:
        self.report.errors.append((reason, pack_error(error)))

    def message(self, uid: str, subtask: int, message: bytes | None, snapshot_taken: int) -> None:  # noqa: ARG002
        self.report.messages.append((uid, message, snapshot_taken))

    def lost(self, uid: str, subtask: int) -> None:  # noqa: ARG002 - the report's
        self.report.lost.add(uid)

    def request_split(self, task: ev.TaskId) -> None:  # noqa: ARG002 - the report's
        """Ask the enumerator, which answers before the next epoch."""
        self.report.wants_split = True

    def context(self, number: int) -> WriteContext:  # noqa: ARG002 - an epoch has one
        return self._context

    def add(self, number: int, snapshots: Sequence[Snapshot]) -> None:
        self.report.snapshots = tuple(snapshots)
        self.report.barrier, self.report.checkpoint_id = number, int(self._context.checkpoint_id)

    def awaits_snapshot(self, task: ev.TaskId, number: int) -> bool:  # noqa: ARG002
        """Return False: what coordinators sent before the epoch comes before its barrier."""
        return False

    def confirm(self, channels: Iterable[ev.Channel]) -> None:
        self.report.confirmed.extend(channels)

    def current_form(self, barrier: ev.Barrier) -> ev.Barrier:
        """Return the barrier itself: barriers of epochs are aligned."""
        return barrier

    def announce(self, channel: ev.Channel, barrier: ev.Barrier) -> None:
        """Never called: barriers of epochs are aligned."""
        raise AssertionError(f"barrier {barrier.number} overtakes on {channel}")

    def log_arrival(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        """Never called: barriers of epochs are aligned."""
        raise AssertionError(f"{batch.num_rows} records are logged on {channel}")

    def ended(self, task: ev.TaskId) -> None:
        self.report.ended = True
        self.report.events.append(ev.TaskEnded(task))

    def wake(self, worker: Worker) -> None:
        """Do nothing: no worker sleeps in an epoch."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def processing_time_us(self) -> int:
        return self._epoch.processing_time_us

    def clock_at(self, time_us: int) -> int:
        """Return when the clock would show this time. It stands still here; the driver waits."""
        return self.now_us() + time_us - self._epoch.processing_time_us
