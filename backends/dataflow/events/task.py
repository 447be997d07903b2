"""What an executor tells a task (events), and what the task tells it to do (commands)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import pyarrow as pa

from .elements import Barrier, Channel, Element


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
