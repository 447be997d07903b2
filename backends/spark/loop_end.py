"""The head of a loop at the last level of an epoch: where what was fed back comes to it.

Theory of operation. At its own level a head has processed the epoch's records, written its states and sent the barrier into its loop.
It then travels on, as mail to itself: its core and a snapshot that is still open. At the last level, when every other task has had its
turn, all that was fed back in the epoch is there, and the barrier behind it. It becomes the in-flight state of the snapshot (FLIP-16),
and is processed first in the next epoch; so a loop is turned once an epoch.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow as pa

from backends.dataflow import events as ev
from backends.dataflow.activation import OpenSnapshot
from backends.dataflow.task import Task
from backends.running.worker import Worker
from backends.spark.mail import EpochBroken, Header, Inbox, elements, pack, row
from backends.spark.reports import Report, ReportLink, Setup
from stateformat.snapshot import WriteContext

_ITSELF = -1
"""The number of the frame that is a head."""


class Suspended(NamedTuple):
    """A head on its way. ``snapshot``: None where it was closed; ``is_own``: a barrier that writes has asked for it."""

    report: Report
    snapshot: OpenSnapshot | None
    is_own: bool

    def rows(self, level: int) -> pa.RecordBatch:
        """As mail to itself."""
        task = self.report.task
        header = Header(task, task, self.report.token, _ITSELF, ())
        return row(task.subtask, level, pack(header, ()) + pickle.dumps(self, protocol=5))


class _NextEpoch:
    """In place of the activation: takes what is to be processed in the next epoch."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def process(self, edge_id: str, batch: pa.RecordBatch) -> None:  # noqa: ARG002 - the snapshot has it by channel
        self.batches.append(batch)

    def notify_complete(self, number: int) -> None:
        pass

    def notify_aborted(self, number: int) -> None:
        pass


class LoopEnd:
    """One head at the last level. :meth:`receive` for every frame, also the one that is the head; then :meth:`finish`."""

    def __init__(self, setup: Setup, task: ev.TaskId, context: WriteContext) -> None:
        self._setup = setup
        self._task = task
        self._context = context
        self._inbox = Inbox(task)
        self._frames: list[tuple[Header, pa.Buffer]] = []
        self._head: Suspended | None = None

    def receive(self, header: Header, rest: pa.Buffer) -> Iterator[pa.RecordBatch]:
        """A frame has come. Nothing is sent on before the end."""
        if header.number != _ITSELF:
            self._frames += self._inbox.take(header, rest)
        elif self._head is None:
            self._head = pickle.loads(rest)  # noqa: S301 - from a worker of ours
        else:
            raise EpochBroken(f"{self._task} came to the last level twice")
        yield from ()

    def finish(self) -> Iterator[pa.RecordBatch]:
        """The report of the head; nothing of one that failed at its own level, which has reported already."""
        self._inbox.check()
        if self._head is None:
            return
        report, snapshot, is_own = self._head
        core: Task = pickle.loads(report.core)  # noqa: S301 - from a worker of ours
        queues = self._setup.queues(self._task)
        worker = Worker(
            self._task,
            self._setup.job.vertex(self._task.vertex),
            core,
            list(queues.values()),
            {},
            frozenset(),
            ReportLink(report, self._context),
            number=report.number,
            snapshot=snapshot if is_own else None,
        )
        later = _NextEpoch()
        worker.operators = later  # type: ignore[assignment]
        try:
            for header, rest in self._frames:
                for channel, element in () if report.ended else elements(header, rest, self._setup.job.schemas):
                    known = len(later.batches)
                    worker.deliver(ev.Received(channel, element))
                    if snapshot is not None and not is_own:
                        for batch in later.batches[known:]:
                            snapshot.log(channel, batch)
            if snapshot is not None and not is_own:
                report.snapshots = tuple(snapshot.close())
        except Exception as error:
            worker.fail(error)
        if not (report.snapshots or report.failure or report.ended):
            worker.fail(RuntimeError("the barrier did not come round its loop in its epoch"))
        report.replays = bool(later.batches)
        for sender, (token, count) in self._inbox.consumed.items():
            before = report.consumed.get(sender, (token, 0))
            if before[0] != token:
                raise EpochBroken(f"{self._task} got frames of two attempts of {sender}")
            report.consumed[sender] = (token, before[1] + count)
        report.core = pickle.dumps(core, protocol=5)
        yield report.rows()


__all__ = ["LoopEnd", "Suspended"]
