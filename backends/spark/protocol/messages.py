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
from ...dataflow.chain import Holder, ReportedProgress
from ...dataflow.graph import Job
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
        """As it goes to workers. ``InvalidInput`` if a step cannot be pickled."""
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
    """That of the states which they write."""
    checkpoint_id: CheckpointId
    attempt_id: AttemptId
    read_rows: int | None
    """How many rows a source reads at most, unless they come as frames; then, how long."""
    read_us: int | None
    processing_time_us: int
    """The wall-clock time for all that it does, the same in each try."""
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
    """The coordinator's trigger, delivered when the task has read."""
    restore_point: RestorePoint | None
    """None: its chain has ended."""
    tokens: Mapping[bytes, int]
    """Of its accepted reports, with their versions: the last ones, and those that left copies."""
    started: bool
    """Whether its core was started in an earlier epoch."""
    number: int
    """The last barrier that it took."""
    reads_frames: bool
    """Whether it is a source whose rows come as frames."""
    active: Mapping[str, int]
    """When its reader, and each split, had rows last."""


@dataclass
class TaskReport:
    """What a task reports of one epoch."""

    task: ev.TaskId
    token: bytes = field(default_factory=lambda: os.urandom(16))
    core: bytes = b""
    number: int = 0
    """The last barrier that it took."""
    barrier: int = 0
    """That of ``snapshots``; 0: no barrier asked for them."""
    checkpoint_id: int = 0
    snapshots: tuple[Snapshot, ...] = ()
    replays: bool = False
    presses: bool = False
    """Of a head: so much was fed back that it is to be processed before more is read."""
    ended: bool = False
    events: list[ev.CoordinatorEvent] = field(default_factory=list)
    errors: list[tuple[str, bytes]] = field(default_factory=list)
    """By the sentences in ``events``, the exceptions behind them (``pack_error``)."""
    messages: list[tuple[str, bytes | None, int]] = field(default_factory=list)
    """To coordinators: the uid, the message (None: a marker), the sender's last barrier."""
    lost: set[str] = field(default_factory=set)
    """Operators to which a coordinator's message came too late."""
    confirmed: list[ev.Channel] = field(default_factory=list)
    wants_split: bool = False
    ran_dry: bool = False
    """Whether a source read all that it could."""
    kept: dict[str, Mapping[str, int]] = field(default_factory=dict)
    """By uid and keyed state, how many layers stay underneath."""
    reported: dict[str, ReportedProgress] = field(default_factory=dict)
    """By uid, the progress of its inputs."""
    pickled: dict[str, bytes] = field(default_factory=dict)
    """By uid, the operators that go on as they are (``operator_pickling``)."""
    sent: dict[ev.TaskId, int] = field(default_factory=dict)
    consumed: dict[frames.Address, tuple[bytes, int]] = field(default_factory=dict)
    rows_read: int = 0
    late_rows: int = 0
    sent_bytes: int = 0
    wakes_at_us: int | None = None
    """The processing time at which a timer is due, or its reader idle; None: neither."""
    holder: Holder | None = None
    """Which split of its reader is behind the others."""
    active: dict[str, int] = field(default_factory=dict)
    """When its reader, and each split, had rows last (``SourceReader.active``)."""
    opened: str = ""
    """How it got its chain: ``kept``, ``caught_up``, ``restored``; empty if it needs none."""

    copied: bool = False
    """Whether its worker has left a copy of the states for others."""

    @property
    def wrote_base(self) -> bool:
        """Whether it has written a keyed state whole."""
        return any(
            handle.mode == Mode.KEYED and handle.rows and not self.kept.get(handle.operator, {}).get(handle.state, 0)
            for snapshot in self.snapshots
            for handle in snapshot.handles
        )

    def sent_on(self) -> frames.Sent:
        """As it goes through the rest of the epoch."""
        return self.task.subtask, frames.pack_report(self)

    @property
    def failure(self) -> ev.TaskFailed | None:
        return next((event for event in self.events if isinstance(event, ev.TaskFailed)), None)


class EpochLink:
    """A worker's environment (``WorkerEnvironment``) in an epoch: all goes into the report."""

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
        """To the enumerator, which answers before the next epoch."""
        self.report.wants_split = True

    def context(self, number: int) -> WriteContext:  # noqa: ARG002 - an epoch has one
        return self._context

    def add(self, number: int, snapshots: Sequence[Snapshot]) -> None:
        self.report.snapshots = tuple(snapshots)
        self.report.barrier, self.report.checkpoint_id = number, int(self._context.checkpoint_id)

    def awaits_snapshot(self, task: ev.TaskId, number: int) -> bool:  # noqa: ARG002
        """False: what coordinators sent before the epoch lies before its barrier."""
        return False

    def confirm(self, channels: Iterable[ev.Channel]) -> None:
        self.report.confirmed.extend(channels)

    def current_form(self, barrier: ev.Barrier) -> ev.Barrier:
        """Return the same: barriers of epochs are aligned."""
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
        """Nothing: no worker sleeps in an epoch."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def processing_time_us(self) -> int:
        return self._epoch.processing_time_us

    def clock_at(self, time_us: int) -> int:
        """In no epoch: its wall-clock time stands still, and the driver waits."""
        return self.now_us() + time_us - self._epoch.processing_time_us
