"""What a worker is sent, and what it calls of the run that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from stateformat.snapshot import Snapshot, WriteContext

from ..dataflow import events as ev
from ..dataflow.api import NoSplit, Split


class SplitAssigned(NamedTuple):
    """The enumerator's answer to a reader, and what it took, by the clock."""

    split: Split | NoSplit
    took_us: int = 0


class MessageToSubtask(NamedTuple):
    """A message of an operator's coordinator to a subtask."""

    uid: str
    message: bytes | None
    """None: the marker of the subtask comes back, behind all answers to what it sent before."""
    behind: int = 0
    """The barrier for which the coordinator had given its snapshot when it wrote; 0: none. What it
    wrote before is in that snapshot, so it belongs before the barrier.
    """


class AllProcessed(NamedTuple):
    """All receivers of these output channels have processed all of their data."""

    channels: tuple[ev.Channel, ...]


Mail = ev.TaskEvent | SplitAssigned | MessageToSubtask | AllProcessed


class WorkerEnvironment(Protocol):
    """What a worker calls of the run that it belongs to."""

    def tell(self, event: ev.CoordinatorEvent) -> None:
        """Send an event to the coordinator."""

    def note(self, reason: str, error: Exception) -> None:
        """Keep the exception behind a reason that the coordinator gets."""

    def message(self, uid: str, subtask: int, message: bytes | None, snapshot_taken: int) -> None:
        """Send to an operator's coordinator; None is a marker, which comes back as a
        :class:`Message`.

        ``snapshot_taken``: the last barrier for which the sender took a snapshot.
        """

    def lost(self, uid: str, subtask: int) -> None:
        """A message of an operator's coordinator came to a subtask whose logic had ended."""

    def request_split(self, task: ev.TaskId) -> None:
        """Ask the source's enumerator for a split."""

    def context(self, number: int) -> WriteContext:
        """What writers of the checkpoint of a barrier need."""

    def add(self, number: int, snapshots: Sequence[Snapshot]) -> None:
        """Take the snapshots of a task."""

    def awaits_snapshot(self, task: ev.TaskId, number: int) -> bool:
        """Whether this barrier's checkpoint is in flight and lacks the task's snapshot."""

    def confirm(self, channels: Iterable[ev.Channel]) -> None:
        """Tell the senders of channels that their data has been processed."""

    def current_form(self, barrier: ev.Barrier) -> ev.Barrier:
        """The barrier to put into channels: unaligned if it has turned so meanwhile."""

    def announce(self, channel: ev.Channel, barrier: ev.Barrier) -> None:
        """Tell the receiver of a channel that a barrier overtakes."""

    def log_arrival(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        """Let the receiver of a channel log what came in."""

    def ended(self, task: ev.TaskId) -> None:
        """A task has ended."""

    def wake(self, worker: Any) -> None:
        """A worker may have become ready."""

    def now_us(self) -> int:
        """The time by the executor's clock."""

    def processing_time_us(self) -> int:
        """The wall-clock time, of the step or epoch that is under way."""

    def clock_at(self, time_us: int) -> int:
        """What :meth:`now_us` will be when the wall clock shows this time."""
