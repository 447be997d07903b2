"""Between an executor and one task: what it is told, and what is to be done. See ``events``."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import pyarrow as pa

from backends.dataflow.elements import Barrier, Channel, Element


class Received(NamedTuple):
    """The next element of a channel that is not blocked."""

    channel: Channel
    element: Element


class Announced(NamedTuple):
    """An unaligned barrier was put into a channel that it may overtake (hash, rebalance); the channel still holds what
    lies before it. The executor tells it at once, before it delivers anything else of that channel.
    """

    channel: Channel
    barrier: Barrier


class Triggered(NamedTuple):
    """The coordinator triggers this task directly."""

    barrier: Barrier


class LoopStep(Enum):
    """What a loop head is told when its loop was found quiet."""

    MAX_WATERMARK = "max_watermark"
    """Send the end of time round."""
    END = "end"
    """Nothing is left to turn: end."""


class Completed(NamedTuple):
    """The checkpoint (or round) of a barrier is complete: published, and committed by the sinks."""

    number: int
    loop: LoopStep | None = None


class Aborted(NamedTuple):
    """The checkpoint of a barrier will never be. Barriers up to this number mean nothing any more."""

    number: int


class Answered(NamedTuple):
    """The coordinator has answered every message that was sent before :class:`AskCoordinator`, and the operator has received
    the answers.
    """


class SourceEnded(NamedTuple):
    """The reader of a source has read all that there is. Only for tasks without inputs."""


class SourceAdvanced(NamedTuple):
    """The reader of a source has come to this event time. Only for tasks without inputs; never goes back in effect."""

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
    | EndSource
    | DataProcessed
    | Canceled
)


class Process(NamedTuple):
    """Let the operators process a batch. ``channel`` tells the input."""

    channel: Channel
    batch: pa.RecordBatch


class AdvanceWatermark(NamedTuple):
    """Time has come to ``timestamp`` for the task: fire the timers up to it, operator by operator.

    ``ending``: the logic ends with it. Then the first operator alone comes to this time, the others when they :class:`Finish`, behind
    what the one before has emitted last.
    """

    timestamp: int
    ending: bool = False


class AskCoordinator(NamedTuple):
    """Send a marker to the operator's coordinator, behind all messages. It comes back behind the answers, as :class:`Answered`."""


class EndInput(NamedTuple):
    """All records of an input of the first operator have been processed."""

    input: int


class Finish(NamedTuple):
    """End the logic of every operator of the chain, first to last: the inner ones come to the end of time, their input ends, and each
    finishes before the next one does.
    """


class Emit(NamedTuple):
    """Put an element into every output channel, feedback channels too. An unaligned barrier overtakes where it may."""

    element: Element


class Snapshot(NamedTuple):
    """Write the states of every operator, as of now. ``finishing``: the logic has ended, committables only.

    For the rows of ``progress``: ``watermarks`` and ``ended`` per edge into the chain's first operator.
    """

    barrier: Barrier
    finishing: bool
    watermarks: Mapping[str, int]
    ended: Mapping[str, bool]


class LogQueued(NamedTuple):
    """Put what lies in a channel (before its barrier, if that is in it) into the in-flight state of the snapshot; with
    ``arriving``, whatever records arrive until :class:`StopLog` too. The records stay in the channel.
    """

    channel: Channel
    arriving: bool


class StopLog(NamedTuple):
    """Records that arrive on this channel are logged no more."""

    channel: Channel


class LogRecords(NamedTuple):
    """Put one batch of a feedback channel into the in-flight state of the snapshot."""

    channel: Channel
    batch: pa.RecordBatch


class Acknowledge(NamedTuple):
    """The snapshot is whole: report it. ``quiet``: of a loop head, nothing was logged and nothing forwarded from feedback
    since the barrier before. ``inputs_ended``: of a loop head, nothing comes from outside of the loop any more.
    ``max_watermark_sent``: of a loop head, the end of time has gone round.
    """

    number: int
    finishing: bool
    quiet: bool = True
    inputs_ended: bool = False
    max_watermark_sent: bool = False


class Decline(NamedTuple):
    """This task cannot take part; the checkpoint is to be aborted. Does not count as a failure."""

    number: int
    reason: str


class ConfirmProcessed(NamedTuple):
    """Tell the sender of an input channel that all of its data has been processed."""

    channel: Channel


class TellLogicEnded(NamedTuple):
    """Tell the coordinator that no record will come from this task any more."""


class ReportInputsEnded(NamedTuple):
    """Tell the coordinator that this loop head has nothing left but its loop."""


class HoldSource(NamedTuple):
    """Read nothing from the source until told otherwise: the job stops without drain."""

    hold: bool


class NotifyComplete(NamedTuple):
    """Tell the operators that a checkpoint is complete."""

    number: int


class NotifyAborted(NamedTuple):
    """The snapshot of this barrier is void: forget what was collected for it."""

    number: int


class Close(NamedTuple):
    """Release what the operators hold."""


class Ended(NamedTuple):
    """The task has ended: tell the coordinator, and deliver nothing to it any more."""


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
    | TellLogicEnded
    | ReportInputsEnded
    | HoldSource
    | NotifyComplete
    | NotifyAborted
    | Close
    | Ended
)
