"""What an executor tells the coordinator (events), and what it is told to do (commands)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from stateformat.model import StopMode

from .elements import Barrier, TaskId
from .plan import CheckpointPlan
from .task import Acknowledge, LoopStep


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
