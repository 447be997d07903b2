"""What travels in channels, and the names of tasks and channels."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

import pyarrow as pa

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
