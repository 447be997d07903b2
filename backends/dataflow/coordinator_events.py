"""Between an executor and the coordinator of a run: what it is told, and what is to be done. See ``events``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from backends.dataflow.checkpoint_plan import CheckpointPlan
from backends.dataflow.elements import Barrier, TaskId
from backends.dataflow.task_events import Acknowledge, LoopStep
from stateformat.model import StopMode


class CheckpointDue(NamedTuple):
    """The interval has passed, or enough records have. Ignored while one is pending or the job stops."""


class StopRequested(NamedTuple):
    """A user asks the job to stop with a savepoint."""

    mode: StopMode
    request: str


class Acknowledged(NamedTuple):
    """A task has reported its snapshot. Late and duplicate ones are ignored."""

    task: TaskId
    acknowledgement: Acknowledge


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
    """The coordinator of an operator in this vertex has sent to a subtask."""

    vertex: str


class TaskEnded(NamedTuple):
    """A task is gone."""

    task: TaskId


class TaskFailed(NamedTuple):
    """User code, or reading or writing state, failed in a task, or a sentence says what else."""

    task: TaskId | None
    reason: str


class SnapshotFailed(NamedTuple):
    """A task (None: a coordinator of an operator) could not write its snapshot. Counts against the tolerated number."""

    task: TaskId | None
    number: int
    reason: str


class TimedOut(NamedTuple):
    """A checkpoint took longer than allowed."""

    number: int


class Overdue(NamedTuple):
    """The barrier of this number has been under way for so long that it is to overtake records."""

    number: int


class Published(NamedTuple):
    """The checkpoint exists, and its permit is held."""

    number: int


class PublishRefused(NamedTuple):
    """The content may not be published: nothing was. ``counted`` False for what only time can mend (union state in a partially
    finished operator).
    """

    number: int
    reason: str
    counted: bool


class PublishFailed(NamedTuple):
    """The storage did not take it, or will not say. ``unknown``: the run cannot go on, a restart sees the truth."""

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
    | PublishRefused
    | PublishFailed
    | Committed
    | CommitFailed
)


class StopOf(NamedTuple):
    """What goes into the record of a checkpoint at which the job stops."""

    mode: StopMode
    request: str


class Begin(NamedTuple):
    """Begin a checkpoint: take snapshots of the operators' coordinators, then deliver :class:`Triggered` to every task of
    ``plan.trigger``. A round is begun by the triggers alone.
    """

    barrier: Barrier
    plan: CheckpointPlan
    stop: StopOf | None


class Overtake(NamedTuple):
    """The barrier in flight turns unaligned, wherever it is: put ``barrier`` in its place in every channel, announce it where it
    may overtake, and put it into every channel in which it is still to come. Deliver :class:`Triggered` to these tasks again.
    """

    barrier: Barrier
    tasks: frozenset[TaskId]


class Publish(NamedTuple):
    """Publish. ``finishing``: tasks that acknowledged as such; the finished ones stand in the plan. Answer with
    :class:`Published`, :class:`PublishRefused` or :class:`PublishFailed`.
    """

    number: int
    finishing: frozenset[TaskId]


class Commit(NamedTuple):
    """Let every sink commit what the published checkpoint holds. Answer with :class:`Committed` or :class:`CommitFailed`."""

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
    """Deliver :class:`EndSource` to these tasks: the job is drained."""

    tasks: frozenset[TaskId]


class Restart(NamedTuple):
    """Give up this run and start again from the newest checkpoint. ``counted``: it is a failure of the job."""

    reason: str
    counted: bool


class StopFailed(NamedTuple):
    """What a user asked for has not come to be. With ``goes_on`` the job runs as if nothing had been asked."""

    request: str
    reason: str
    goes_on: bool


class JobEnded(NamedTuple):
    """Every task has ended. ``stop``: by that request, at the last checkpoint."""

    stop: StopOf | None


class Warn(NamedTuple):
    """A sentence for the user."""

    sentence: str


CoordinatorCommand = (
    Begin | Overtake | Publish | Commit | Notify | Abort | EndSources | Restart | StopFailed | JobEnded | Warn
)
