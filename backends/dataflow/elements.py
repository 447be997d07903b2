"""What travels in channels, and the names of tasks and channels. See ``events``."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

import pyarrow as pa

MIN_WATERMARK: Final = -(2**63)
"""No watermark yet."""
MAX_WATERMARK: Final = 2**63 - 1
"""Time has ended: every timer fires."""


class TaskId(NamedTuple):
    """A task: one subtask of one chain, which bears the uid of its first operator."""

    vertex: str
    subtask: int

    def __str__(self) -> str:
        return f"{self.vertex}[{self.subtask}]"


class Channel(NamedTuple):
    """One first-in-first-out connection between two subtasks."""

    edge: str
    sender: int
    receiver: int


class Purpose(StrEnum):
    """What a barrier is for."""

    CHECKPOINT = "checkpoint"
    STOP_DRAIN = "stop_drain"
    """The savepoint of a stop with drain: the logic of every task has ended before it."""
    STOP_NO_DRAIN = "stop_no_drain"
    """The savepoint of a stop without: nothing is emitted behind it."""
    ROUND = "round"
    """One turn of the loops while a job is drained. Aligned like any barrier; nobody writes, nothing is published."""


class Records(NamedTuple):
    """A batch in the schema of its edge."""

    batch: pa.RecordBatch


class Watermark(NamedTuple):
    """No record below this time follows on this channel, but late ones."""

    timestamp: int


class Barrier(NamedTuple):
    """The border between two epochs of a channel."""

    number: int
    purpose: Purpose = Purpose.CHECKPOINT
    unaligned: bool = False


class EndOfData(NamedTuple):
    """The sender's logic has ended: no record follows. Barriers still do. ``drain`` False: it was told to stop."""

    drain: bool = True


class EndOfPartition(NamedTuple):
    """The sender is gone: nothing follows."""


Element = Records | Watermark | Barrier | EndOfData | EndOfPartition
