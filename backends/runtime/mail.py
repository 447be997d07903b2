"""What is sent to a worker, and what the worker calls on its run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from stateformat.snapshot import Snapshot, WriteContext

from ..dataflow import events as ev
from ..dataflow.api import NoSplit, Split


class SplitAssigned(NamedTuple):
    """The enumerator's answer to a reader, and how long it took by the clock."""

    split: Split | NoSplit
    took_us: int = 0


class MessageToSubtask(NamedTuple):
    """A message of an operator's coordinator to a subtask."""

    uid: str
    message: bytes | None
    """None: the subtask's marker comes back, after all answers to what it sent before."""
    behind: int = 0
    """The barrier for which the coordinator had given its snapshot when it wrote; 0: none. What it
    wrote before is in that snapshot, so it belongs before the barrier.
    """


class AllProcessed(NamedTuple):
    """All receivers of these output channels have processed all of their data."""

    channels: tuple[ev.Channel, ...]


Mail = ev.TaskEvent | SplitAssigned | MessageToSubtask | AllProcessed


class WorkerEnvironment(Protocol):
    """What a worker calls on its run."""

    def tell(self, event: ev.CoordinatorEvent) -> None:
        """Send an event to the coordinator."""

    def note(self, reason: str, error: Exception) -> None:
        """Keep the exception for a reason that is given to the coordinator."""

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
        """Return what writers of the checkpoint of a barrier need."""

    def add(self, number: int, snapshots: Sequence[Snapshot]) -> None:
        """Take the snapshots of a task."""

    def awaits_snapshot(self, task: ev.TaskId, number: int) -> bool:
        """Return whether this barrier's checkpoint is in flight and lacks the task's snapshot."""

    def confirm(self, channels: Iterable[ev.Channel]) -> None:
        """Tell the senders of channels that their data has been processed."""

    def current_form(self, barrier: ev.Barrier) -> ev.Barrier:
        """Return the barrier to put into channels: unaligned if it has become so meanwhile."""

    def announce(self, channel: ev.Channel, barrier: ev.Barrier) -> None:
        """Tell the receiver of a channel that a barrier overtakes records."""

    def log_arrival(self, channel: ev.Channel, batch: pa.RecordBatch) -> None:
        """Have the receiver of a channel log a batch that arrived."""

    def ended(self, task: ev.TaskId) -> None:
        """Note that a task has ended."""

    def wake(self, worker: Any) -> None:
        """Note that a worker may have become ready."""

    def now_us(self) -> int:
        """Return the time by the executor's clock."""

    def processing_time_us(self) -> int:
        """Return the wall-clock time of the current step or epoch."""

    def clock_at(self, time_us: int) -> int:
        """Return what :meth:`now_us` will be when the wall clock shows this time."""
