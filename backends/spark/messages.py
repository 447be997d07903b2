"""What a task gets for an epoch, what it reports, and what the driver keeps for it in between.

A snapshot names everything that it consists of (``merge_snapshot``), so the next
:class:`RestorePoint` follows from the reports alone; no manifest is read. Each layer of keyed state
has the *version* of the epoch that wrote it; the layers of a restored checkpoint have none. A
worker that has the state of version v reads only the layers above v. If even the lowest layer is
above v, the worker cannot catch up and reads them all.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, TypeGuard

import pyarrow as pa
import pyarrow.compute as pc

from stateformat import model
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.manifest import handles_table
from stateformat.model import AttemptId, CheckpointId, Mode
from stateformat.reading import ReadTask, SegmentTask, whole_slices
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.states import Layer

from ..dataflow import events as ev
from ..dataflow.api import NoSplit
from ..dataflow.chained_operator import ReportedProgress, chain_of
from ..dataflow.compile import Job
from ..dataflow.source_reader import Holder
from ..dataflow.task import Task
from ..dataflow.task_states import TaskState
from ..runtime import (
    Mail,
    MessageToSubtask,
    OperatorState,
    Queue,
    Restored,
    SplitAssigned,
    TaskChannels,
    Worker,
    by_layer,
    layers_of,
    restored_states,
)
from . import frames


class RemoteError(Exception):
    """Replaces an exception of a worker that cannot be pickled, and names its type."""


def pack_error(error: BaseException) -> bytes:
    """Return an error, its causes and its trace as bytes. What cannot be pickled becomes text."""
    trace = "".join(traceback.format_exception(error))
    return pickle.dumps(([_pickle(each) for each in chain_of(error)], trace), protocol=5)


def _pickle(error: BaseException) -> tuple[bytes | None, str]:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    try:
        data = pickle.dumps(error, protocol=5)
        pickle.loads(data)  # noqa: S301 - pickled just now. Many exceptions can be pickled but not unpickled.
    except Exception:
        return None, text
    return data, text


def unpack_error(data: bytes) -> BaseException:
    """Return the error that was packed; its innermost cause has the worker's trace as a note."""
    pickled, trace = pickle.loads(data)  # noqa: S301 - from our own workers
    found = [_unpickle(*each) for each in pickled]
    for error, cause in pairwise(found):
        error.__cause__ = cause
    found[-1].add_note(f"In the worker:\n{trace.rstrip()}")
    return found[0]


def _unpickle(data: bytes | None, text: str) -> BaseException:
    try:
        error = None if data is None else pickle.loads(data)  # noqa: S301 - from our own workers
    except Exception:  # Its class can be imported only in the worker.
        error = None
    return error if isinstance(error, BaseException) else RemoteError(text)


@dataclass(frozen=True)
class RestorePoint:
    """What a task begins an epoch from. Picklable."""

    operators: Mapping[str, OperatorState] = field(default_factory=dict)
    """By uid."""
    reported: Mapping[str, ReportedProgress] = field(default_factory=dict)
    """By uid, the progress of its inputs that the operator last wrote in this run."""
    barrier: int = 0
    """The barrier of the snapshot; 0 if no barrier asked for it."""
    checkpoint_id: int = 0
    replays: bool = False
    """Whether the snapshot has in-flight records, which the task processes first."""
    pickled: Mapping[str, bytes] = field(default_factory=dict)
    """By uid, the pickled operators that continue (``task_cache``)."""

    def layers(self, uid: str) -> Mapping[str, Sequence[Layer]]:
        """Return the layers of the keyed states of an operator, lowest first."""
        return layers_of(self.operators[uid]) if uid in self.operators else {}

    def read_tasks(self, context: WriteContext, uid: str, *, above: int | None = None) -> Mapping[str, ReadTask]:
        """Return how to read an operator's states; of keyed ones, only versions above ``above``."""
        operator = self.operators.get(uid)
        if operator is None:
            return {}
        if operator.tasks is not None:
            return operator.tasks
        handles: dict[str, list[model.Handle]] = defaultdict(list)
        for handle in operator.snapshot.handles:
            handles[handle.state].append(handle)
        if above is not None:
            for name, versions in operator.versions.items():
                layers = zip(by_layer(operator.snapshot, name), versions, strict=True)
                handles[name] = [handle for layer, version in layers if _is_after(version, above) for handle in layer]
        return _ReadTasks(context, uid, handles, dict(operator.snapshot.times))

    @property
    def has_layers(self) -> bool:
        """Whether there is keyed state."""
        return any(any(operator.versions.values()) for operator in self.operators.values())

    def can_catch_up(self, version: int) -> bool:
        """Return whether the layers after this version turn each of its states into the current."""
        return all(
            not versions or not _is_after(versions[0], version)
            for operator in self.operators.values()
            for versions in operator.versions.values()
        )


class _ReadTasks(Mapping[str, ReadTask]):
    """By state, how to read what an operator wrote in this run. Tasks are made on request."""

    def __init__(
        self,
        context: WriteContext,
        uid: str,
        handles: Mapping[str, Sequence[model.Handle]],
        times: Mapping[str, int],
    ) -> None:
        self._context, self._uid, self._handles, self._times = context, uid, handles, times
        others = (model.Mode.COMMITTABLES, model.Mode.COORDINATOR)
        self._names = [state.name for state in context.states if state.operator == uid and state.mode not in others]

    def __getitem__(self, name: str) -> ReadTask:
        if name not in self._names:
            raise KeyError(name)
        return read_task(self._context, self._uid, name, self._handles.get(name, ()), self._times.get(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _is_after(version: int | None, other: int) -> bool:
    return version is not None and version > other


_NO_MANIFEST: Final = model.ManifestRef("", 0, "", 0)


def read_task(
    context: WriteContext, uid: str, name: str, handles: Sequence[model.Handle], ttl_now_us: int | None = None
) -> ReadTask:
    """Return a task that reads what was written in this run, published or not.

    ``ttl_now_us``: the time of the clock by which rows of the state expire, when it was written.
    """
    state = next(item for item in context.states if (item.operator, item.name) == (uid, name))
    state = replace(state, ttl_now_us=ttl_now_us)
    record = model.Record(
        checkpoint_id=context.checkpoint_id,
        attempt_id=context.attempt_id,
        kind=model.CheckpointKind.CHECKPOINT,
        job_id=context.job_id,
        graph=model.JobGraph((context.graph.operator(uid),)),
        states=(state,),
        manifest=_NO_MANIFEST,
        totals=model.Totals(),
        created_at_us=0,
    )
    table = handles_table(handles)
    table = table.filter(pc.greater(table["rows"], 0))
    return SegmentTask(context.storage, record, table, whole_slices(table))


def restore_points(restored: Restored) -> Mapping[ev.TaskId, RestorePoint]:
    """Return what each task of a run begins from, given its restore. Empty on a first run."""
    return {
        task: RestorePoint(parts, replays=bool(restored.in_flight(restored.job.vertex(task.vertex), task.subtask)))
        for task, parts in restored_states(restored)
    }


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
    """By uid, the pickled operators that continue in the next epoch (``task_cache``)."""
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


TOKENS_KEPT: Final = 64
"""How many epochs behind a worker may be and still catch up."""
ENDED: Final = (TaskState.WAITING, TaskState.STOPPING, TaskState.ENDED)
"""The states of a task whose logic has ended, and with it its chain."""


@dataclass(eq=False)
class DriverTask:
    """One task between two epochs."""

    wired: TaskChannels
    restore_point: RestorePoint | None
    """None if its chain has ended."""
    mail: deque[Mail] = field(default_factory=deque)
    tokens: dict[bytes, int] = field(default_factory=dict)
    """The tokens of its last accepted reports, with their versions."""
    copies: dict[bytes, int] = field(default_factory=dict)
    """The tokens, with versions, of accepted reports that left a copy which can still catch up."""
    started: bool = False
    number: int = 0
    """The last barrier that it took (``Worker.snapshot_taken``)."""
    wakes_at_us: int | None = None
    """The processing time at which a timer is due, or its reader becomes idle."""
    holder: Holder | None = None
    """The split of its reader that was behind the others at the end of its last epoch."""
    active: dict[str, int] = field(default_factory=dict)
    """When its reader, and each split, last had rows."""
    gone: bool = False
    no_more_splits: bool = False
    wants_split: bool = True
    was_deferred: bool = False
    """Whether its reader was told that a split may come later."""
    splits_ahead: int = 1
    """How many splits its reader is given at once."""

    def forget_tokens(self) -> None:
        while len(self.tokens) > TOKENS_KEPT:
            del self.tokens[next(iter(self.tokens))]

    def know_copies(self, token: bytes | None, version: int) -> None:
        """Add a copy, if there is a token, and forget those that can no longer catch up."""
        if token is not None:
            self.copies[token] = version
        point = self.restore_point
        usable = [token for token, of in self.copies.items() if point is not None and point.can_catch_up(of)]
        self.copies = {token: self.copies[token] for token in usable[-TOKENS_KEPT:]}

    @property
    def core(self) -> Task:
        return self.wired.core

    @property
    def may_read(self) -> bool:
        return self.core.may_read or (self.core.is_source and not self.started)

    @property
    def needs_no_operators(self) -> bool:
        """Whether the driver can deliver its mail: its logic has ended, or a stop holds it."""
        state = self.core.state
        aborted = any(isinstance(mail, ev.Aborted) for mail in self.mail)
        return state in ENDED or (state is TaskState.STOPPED_AT_BARRIER and not aborted)


def is_work(mail: Mail) -> bool:
    """Return whether mail gives a task work. The end of an epoch and the lack of a split do not."""
    if isinstance(mail, ev.Completed):
        return mail.loop is not None
    return not isinstance(mail, ev.Aborted) and not (
        isinstance(mail, SplitAssigned) and isinstance(mail.split, NoSplit)
    )


def is_for_core(mail: Mail) -> TypeGuard[ev.TaskEvent]:
    """Return whether mail is only for the core, so that it can be delivered without operators."""
    return not isinstance(mail, SplitAssigned | MessageToSubtask | ev.Triggered)
