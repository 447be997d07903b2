"""The events and commands of the runtime core, as values: use it as ``events as ev``.

``Task`` and ``Coordinator`` take **events** and return **commands**. They decide, an executor acts:
it carries the commands out, in the order given, before it delivers the next event. Read

1. what travels in channels;
2. the events and commands of a task;
3. the plan of a checkpoint, and the events and commands of the coordinator.

Barrier numbers ascend within a run, one for each trigger; they are never ids of checkpoints.
Timestamps are int64 microseconds of event time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum, StrEnum
from functools import cached_property
from itertools import repeat
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.model import StopMode

MIN_WATERMARK: Final = -(2**63)
"""No watermark yet."""
MAX_WATERMARK: Final = 2**63 - 1
"""The end of time: every timer fires."""


class TaskId(NamedTuple):
    """One subtask of one chain. ``vertex`` is the uid of the chain's first operator."""

    vertex: str
    subtask: int

    def __str__(self) -> str:
        return f"{self.vertex}[{self.subtask}]"


class Channel(NamedTuple):
    """A first-in-first-out connection between two subtasks."""

    edge: str
    sender: int
    receiver: int


class BarrierKind(StrEnum):
    """What a barrier is for."""

    CHECKPOINT = "checkpoint"
    STOP_DRAIN = "stop_drain"
    """The savepoint of a stop with drain. The logic of every task has ended before it."""
    STOP_NO_DRAIN = "stop_no_drain"
    """The savepoint of a stop without drain. Nothing is emitted behind it."""
    ROUND = "round"
    """One turn of the loops of a draining job. Aligned; nothing is written or published."""


class Records(NamedTuple):
    """A batch in the schema of its edge; or ``combined`` (``Operator.combine``)."""

    batch: pa.RecordBatch
    combined: bool = False


class Watermark(NamedTuple):
    """Only late records below this time follow on this channel."""

    timestamp: int


class Idle(NamedTuple):
    """The sender has had no rows for long: its channel holds no time up. ``idle`` False: it does
    again.
    """

    idle: bool = True


class Barrier(NamedTuple):
    """The border between two epochs of a channel."""

    number: int
    purpose: BarrierKind = BarrierKind.CHECKPOINT
    unaligned: bool = False


class EndOfData(NamedTuple):
    """No record follows, but barriers do. ``drain`` False: the sender was stopped."""

    drain: bool = True


class EndOfPartition(NamedTuple):
    """The sender has left: nothing follows."""


Element = Records | Watermark | Idle | Barrier | EndOfData | EndOfPartition


class Received(NamedTuple):
    """The next element of a channel that is not blocked."""

    channel: Channel
    element: Element


class Announced(NamedTuple):
    """An unaligned barrier was put into a channel that it may overtake.

    The channel still holds what lies before the barrier. The executor delivers this event before it
    delivers anything else of the channel.
    """

    channel: Channel
    barrier: Barrier


class Triggered(NamedTuple):
    """The coordinator triggers this task directly."""

    barrier: Barrier


class LoopStep(Enum):
    """What the head of a quiet loop does next."""

    MAX_WATERMARK = "max_watermark"
    """Send the end of time round the loop."""
    END = "end"
    """End: nothing is left in the loop."""


class Completed(NamedTuple):
    """The checkpoint (or round) of a barrier is complete: published, and committed by the sinks."""

    number: int
    loop: LoopStep | None = None


class Aborted(NamedTuple):
    """The checkpoint of a barrier will not be. Barriers up to this number mean nothing any more."""

    number: int


class Answered(NamedTuple):
    """The operator has received the answers to all it had sent before :class:`AskCoordinator`."""


class SourceEnded(NamedTuple):
    """The reader of a source has read everything. Only for tasks without inputs."""


class SourceIdle(NamedTuple):
    """The reader has had no rows for long, or (``idle`` False) it has some again."""

    idle: bool


class SourceAdvanced(NamedTuple):
    """The reader of a source has reached this event time. Only for tasks without inputs."""

    timestamp: int


class EndSource(NamedTuple):
    """The job is drained: end as if the input had ended. Only for tasks without inputs."""


class DataProcessed(NamedTuple):
    """The receiver of this output channel has processed all of its data."""

    channel: Channel


class Canceled(NamedTuple):
    """The run is given up. Nothing is emitted or acknowledged from here on."""


TaskEvent = (
    Received
    | Announced
    | Triggered
    | Completed
    | Aborted
    | Answered
    | SourceEnded
    | SourceAdvanced
    | SourceIdle
    | EndSource
    | DataProcessed
    | Canceled
)


class Process(NamedTuple):
    """Let the operators process a batch, which came on ``channel``."""

    channel: Channel
    batch: pa.RecordBatch
    combined: bool = False


class AdvanceWatermark(NamedTuple):
    """Event time of the task is ``timestamp`` now: fire the timers up to it, operator by operator.

    ``ending``: the logic ends with it. Then only the first operator fires; the others do in
    :class:`Finish`, behind what the one before them has emitted last.
    """

    timestamp: int
    ending: bool = False


class AskCoordinator(NamedTuple):
    """Send a marker to the operator's coordinator, behind all messages.

    It comes back behind the answers, as :class:`Answered`.
    """


class EndInput(NamedTuple):
    """All records of an input of the first operator have been processed."""

    input: int


class Finish(NamedTuple):
    """End the logic of every operator of the chain, first to last.

    Each inner operator reaches the end of time, its input ends, and it finishes, before the next
    does.
    """


class Emit(NamedTuple):
    """Put an element into every output channel, feedback too. Unaligned barriers overtake."""

    element: Element


class Snapshot(NamedTuple):
    """Write the states of every operator, as of now.

    ``finishing``: the logic has ended, so write committables only. ``watermarks`` and ``ended``,
    per edge into the chain's first operator, become the rows of ``progress``.
    """

    barrier: Barrier
    finishing: bool
    watermarks: Mapping[str, int]
    ended: Mapping[str, bool]


class LogQueued(NamedTuple):
    """Add the records of a channel, up to its barrier, to the snapshot's in-flight state.

    The records stay in the channel. ``arriving``: add what arrives until :class:`StopLog` too.
    """

    channel: Channel
    arriving: bool


class StopLog(NamedTuple):
    """Stop logging records that arrive on this channel."""

    channel: Channel


class LogRecords(NamedTuple):
    """Add a batch of a feedback channel to the snapshot's in-flight state."""

    channel: Channel
    batch: pa.RecordBatch


class Acknowledge(NamedTuple):
    """Report the snapshot, which is whole. The last three fields are of loop heads.

    ``quiet``: since the barrier before, nothing was logged or forwarded from feedback.
    ``inputs_ended``: nothing comes from outside of the loop any more. ``max_watermark_sent``: the
    end of time has gone round.
    """

    number: int
    finishing: bool
    quiet: bool = True
    inputs_ended: bool = False
    max_watermark_sent: bool = False


class Decline(NamedTuple):
    """This task cannot take part: the checkpoint is aborted, which is no failure."""

    number: int
    reason: str


class ConfirmProcessed(NamedTuple):
    """Tell the sender of an input channel that all of its data has been processed."""

    channel: Channel


class ConfirmAllProcessed(NamedTuple):
    """As :class:`ConfirmProcessed`, of several channels of one edge."""

    channels: tuple[Channel, ...]


class ReportLogicEnded(NamedTuple):
    """Tell the coordinator that this task emits no more records."""


class ReportInputsEnded(NamedTuple):
    """Tell the coordinator that this loop head has nothing left but its loop."""


class HoldSource(NamedTuple):
    """Pause reading from the source (``hold``), or go on: the job stops without drain."""

    hold: bool


class NotifyComplete(NamedTuple):
    """Tell the operators that a checkpoint is complete."""

    number: int


class NotifyAborted(NamedTuple):
    """The snapshot of this barrier is void: drop what was collected for it."""

    number: int


class Close(NamedTuple):
    """Release what the operators hold."""


class Ended(NamedTuple):
    """The task has ended: tell the coordinator, and deliver nothing to the task any more."""


TaskCommand = (
    Process
    | AdvanceWatermark
    | AskCoordinator
    | EndInput
    | Finish
    | Emit
    | Snapshot
    | LogQueued
    | StopLog
    | LogRecords
    | Acknowledge
    | Decline
    | ConfirmProcessed
    | ConfirmAllProcessed
    | ReportLogicEnded
    | ReportInputsEnded
    | HoldSource
    | NotifyComplete
    | NotifyAborted
    | Close
    | Ended
)


Mask: TypeAlias = npt.NDArray[np.bool_]
"""One boolean per subtask of a vertex."""


class TaskSet(Set[TaskId]):
    """An immutable set of tasks, equal to any set of the same tasks.

    Iterates vertex by vertex, subtasks ascending. ``in`` takes constant time.
    """

    def __init__(self, masks: Mapping[str, Mask]) -> None:
        """Take the arrays over, by vertex; they become read-only."""
        for mask in masks.values():
            mask.setflags(write=False)
        self.masks: Mapping[str, Mask] = masks

    @classmethod
    def _from_iterable(cls, it: Any) -> Any:
        return frozenset(it)

    def __contains__(self, task: object) -> bool:
        if not isinstance(task, TaskId):
            return False
        mask = self.masks.get(task.vertex)
        return mask is not None and 0 <= task.subtask < len(mask) and bool(mask[task.subtask])

    def __iter__(self) -> Iterator[TaskId]:
        for vertex, mask in self.masks.items():
            yield from map(TaskId, repeat(vertex), np.flatnonzero(mask).tolist())

    def __len__(self) -> int:
        return self._count

    @cached_property
    def _count(self) -> int:
        return sum(int(np.count_nonzero(mask)) for mask in self.masks.values())

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"TaskSet({{{', '.join(map(str, self))}}})" if len(self) <= 20 else f"TaskSet({len(self)} tasks)"


@dataclass(frozen=True)
class CheckpointPlan:
    """Who does what in one checkpoint. Every task is in ``wait`` or in ``finished``."""

    trigger: TaskSet
    """The roots, which are triggered directly."""
    wait: TaskSet
    """Tasks that run. Each acknowledges, and hears how the checkpoint ends."""
    finished: TaskSet
    """Tasks that have ended. They contribute nothing."""
    fully_finished: frozenset[str]
    """Vertices of which no task runs."""


class CheckpointDue(NamedTuple):
    """It is time for a checkpoint. Ignored while a barrier is in flight or the job stops."""


class StopRequested(NamedTuple):
    """A user asks the job to stop with a savepoint."""

    mode: StopMode
    request: str


class SavepointRequested(NamedTuple):
    """Users ask for savepoints, for which the next checkpoint begins; the job goes on."""

    requests: tuple[str, ...]


class SoonStopRequested(NamedTuple):
    """The run is to end at a checkpoint that begins now; the job goes on at its next start.

    ``is_current``: the newest checkpoint holds all that the tasks have done.
    """

    is_current: bool


class Acknowledged(NamedTuple):
    """A task has reported its snapshot. Late and duplicate reports are ignored.

    ``moved``: the task has done something since its last snapshot, or the snapshot has something
    that no earlier one has.
    """

    task: TaskId
    acknowledgement: Acknowledge
    moved: bool = True


class Declined(NamedTuple):
    """A task cannot take part."""

    task: TaskId
    number: int
    reason: str


class LogicEnded(NamedTuple):
    """A task has emitted all that it ever will."""

    task: TaskId


class InputsEnded(NamedTuple):
    """A loop head has nothing left but its loop."""

    task: TaskId


class MessageSent(NamedTuple):
    """The coordinator of an operator in this vertex has sent a message to a subtask."""

    vertex: str


class TaskEnded(NamedTuple):
    """A task has ended."""

    task: TaskId


class TaskFailed(NamedTuple):
    """User code, or reading or writing state, failed in a task. None: ``reason`` says where."""

    task: TaskId | None
    reason: str


class SnapshotFailed(NamedTuple):
    """A task (None: an operator's coordinator) could not write its snapshot. Tolerable."""

    task: TaskId | None
    number: int
    reason: str


class TimedOut(NamedTuple):
    """A checkpoint took longer than allowed."""

    number: int


class Overdue(NamedTuple):
    """The barrier has been in flight for so long that it is to overtake records."""

    number: int


class Published(NamedTuple):
    """The checkpoint exists, and its permit is held."""

    number: int


class Unchanged(NamedTuple):
    """The checkpoint would say what the newest one says, so it is not published."""

    number: int


class PublishRefused(NamedTuple):
    """The content may not be published, and was not.

    ``counted`` False: only time can mend it (union state in a partially finished operator).
    """

    number: int
    reason: str
    counted: bool


class PublishFailed(NamedTuple):
    """The storage did not take the checkpoint.

    ``unknown``: it may have; this run cannot go on, and a restart finds out.
    """

    number: int
    reason: str
    unknown: bool


class Committed(NamedTuple):
    """Every sink has committed what the checkpoint of this barrier holds."""

    number: int


class CommitFailed(NamedTuple):
    """A sink could not commit."""

    number: int
    reason: str


CoordinatorEvent = (
    CheckpointDue
    | StopRequested
    | SavepointRequested
    | SoonStopRequested
    | Acknowledged
    | Declined
    | LogicEnded
    | InputsEnded
    | MessageSent
    | TaskEnded
    | TaskFailed
    | SnapshotFailed
    | TimedOut
    | Overdue
    | Published
    | Unchanged
    | PublishRefused
    | PublishFailed
    | Committed
    | CommitFailed
)


class StopOf(NamedTuple):
    """What the record of the checkpoint at which a job stops says of the stop."""

    mode: StopMode
    request: str


class Begin(NamedTuple):
    """Begin a checkpoint: snapshot the operators' coordinators, then trigger ``plan.trigger``.

    To trigger is to deliver :class:`Triggered`. A round is begun by the triggers alone.
    """

    barrier: Barrier
    plan: CheckpointPlan
    stop: StopOf | None


class Overtake(NamedTuple):
    """The barrier in flight becomes unaligned, wherever it is.

    Put ``barrier`` in its place in every channel, announce it where it may overtake, and put it
    into every channel in which it is still to come. Trigger ``tasks`` again.
    """

    barrier: Barrier
    tasks: frozenset[TaskId]


class Publish(NamedTuple):
    """Publish; ``finishing`` are the tasks that acknowledged as such.

    Answer with :class:`Published`, :class:`PublishRefused` or :class:`PublishFailed`; or, unless
    something has ``moved`` since the newest checkpoint, with :class:`Unchanged`.
    """

    number: int
    finishing: frozenset[TaskId]
    moved: bool = True


class Commit(NamedTuple):
    """Let every sink commit what the published checkpoint holds.

    Answer with :class:`Committed` or :class:`CommitFailed`.
    """

    number: int


class Notify(NamedTuple):
    """Deliver :class:`Completed` to these tasks, each with what its loop is to do."""

    number: int
    tasks: Mapping[TaskId, LoopStep | None]


class Abort(NamedTuple):
    """Give up a checkpoint: forget what was collected, deliver :class:`Aborted` to these tasks."""

    number: int
    tasks: frozenset[TaskId]
    reason: str
    counted: bool


class EndSources(NamedTuple):
    """The job is drained: deliver :class:`EndSource` to these tasks."""

    tasks: frozenset[TaskId]


class Restart(NamedTuple):
    """Give up this run and start from the newest checkpoint. ``counted``: the job has failed."""

    reason: str
    counted: bool


class StopFailed(NamedTuple):
    """A stop has failed. With ``goes_on`` the job runs as if nothing had been asked."""

    request: str
    reason: str
    goes_on: bool


class SavepointReady(NamedTuple):
    """The newest checkpoint, which is committed, is what these requests are for: copy it."""

    requests: tuple[str, ...]


class SavepointFailed(NamedTuple):
    """There is no checkpoint for a request. ``refused``: none was begun.

    Without ``goes_on`` the run ends with it, and the job starts again.
    """

    request: str
    reason: str
    refused: bool
    goes_on: bool


class JobEnded(NamedTuple):
    """Every task has ended. ``stop``: by that request, at the last checkpoint."""

    stop: StopOf | None


class JobInterrupted(NamedTuple):
    """The run ends here, at the newest checkpoint: give up its tasks."""


class Warn(NamedTuple):
    """A sentence for the user."""

    sentence: str


CoordinatorCommand = (
    Begin
    | Overtake
    | Publish
    | Commit
    | Notify
    | Abort
    | EndSources
    | Restart
    | StopFailed
    | SavepointReady
    | SavepointFailed
    | JobEnded
    | JobInterrupted
    | Warn
)
