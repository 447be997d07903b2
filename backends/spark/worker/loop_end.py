"""The head of a loop at the last level of an epoch, where it receives what was fed back.

At its own level, a head writes its states and sends the barrier into its loop. Then it sends itself
to the last level as a frame, with a snapshot that is still open. There, everything that was fed
back in the epoch becomes the snapshot's in-flight state (FLIP-16), which the next epoch processes
first.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from stateformat.snapshot import WriteContext

from ...dataflow import events as ev
from ...dataflow.chain import OpenSnapshot
from ...dataflow.task import Task
from ...runtime import LoopFill, Worker
from ..protocol import frames
from ..protocol.messages import Epoch, EpochLink, Setup, TaskReport

_ITSELF = -1
"""The frame number of a head that sends itself."""


class Suspended(NamedTuple):
    """A head on its way to the last level."""

    report: TaskReport
    snapshot: OpenSnapshot | None
    is_own: bool
    """Whether a barrier that writes asked for the snapshot."""

    def sent_on(self, level: int) -> frames.Sent:
        task = self.report.task
        header = frames.Header(task, task, self.report.token, _ITSELF, ())
        return task.subtask, frames.pack(level, header, ()) + pickle.dumps(self, protocol=5)


class NoChain:
    """Stands in for an operator chain. It holds no batches, and ignores news of checkpoints."""

    def flush(self) -> None:
        pass

    def notify_complete(self, number: int) -> None:
        pass

    def notify_aborted(self, number: int) -> None:
        pass


class _NextEpoch(NoChain):
    """Stands in for the chain, and collects what the next epoch is to process.

    It ignores ``edge_id`` and ``combined``: the snapshot keeps batches by channel, and what is fed
    back is never combined.
    """

    def __init__(self, fill: LoopFill) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.fill = fill

    def process(self, edge_id: str, batch: pa.RecordBatch, *, combined: bool) -> None:  # noqa: ARG002 - see above
        self.fill.add(batch)
        self.batches.append(batch)


class LoopEnd:
    """One head at the last level. Call :meth:`receive` for every frame, then :meth:`finish`."""

    def __init__(self, setup: Setup, epoch: Epoch, task: ev.TaskId, context: WriteContext) -> None:
        self._setup = setup
        self._epoch = epoch
        self._task = task
        self._context = context
        self._inbox = frames.Inbox(task)
        self._frames: list[tuple[frames.Header, pa.Buffer]] = []
        self._head: Suspended | None = None

    def receive(self, header: frames.Header, rest: pa.Buffer) -> Iterator[frames.Sent]:
        """Take a frame, or the head itself. Sends nothing before :meth:`finish`."""
        if header.number != _ITSELF:
            self._frames += self._inbox.take(header, rest)
        elif self._head is None:
            self._head = pickle.loads(rest)  # noqa: S301 - from a worker of ours
        else:
            raise frames.EpochBroken(f"{self._task} came to the last level twice")
        yield from ()

    def finish(self) -> Iterator[frames.Sent]:
        """Send the head's report; nothing if it failed at its own level and reported there."""
        self._inbox.check()
        if self._head is None:
            return
        report, snapshot, is_own = self._head
        core: Task = pickle.loads(report.core)  # noqa: S301 - from a worker of ours
        worker = Worker(
            self._task,
            self._setup.job.vertex(self._task.vertex),
            core,
            list(self._setup.queues(self._task).values()),
            {},
            frozenset(),
            EpochLink(report, self._epoch, self._context),
            number=report.number,
            snapshot=snapshot if is_own else None,
        )
        later: Any = _NextEpoch(LoopFill(self._task, self._setup.loop_bytes_max))
        worker.operators = later
        # If no barrier asked for the snapshot, it is written here, not by the worker.
        own = None if is_own else snapshot
        try:
            for header, rest in self._frames:
                for channel, element in () if report.ended else frames.elements(header, rest, self._setup.job.schemas):
                    known = len(later.batches)
                    worker.deliver(ev.Received(channel, element))
                    if own is not None:
                        for batch in later.batches[known:]:
                            own.log(channel, batch)
            if own is not None:
                report.snapshots = tuple(own.close())
        except Exception as error:
            worker.fail(error)
        if not (report.snapshots or report.failure or report.ended):
            worker.fail(RuntimeError("the barrier did not come round its loop in its epoch"))
        report.replays, report.presses = bool(later.batches), later.fill.presses
        for sender, (token, count) in self._inbox.consumed.items():
            before = report.consumed.get(sender, (token, 0))
            if before[0] != token:
                raise frames.EpochBroken(f"{self._task} got frames of two attempts of {sender}")
            report.consumed[sender] = (token, before[1] + count)
        report.core = pickle.dumps(core, protocol=5)
        yield report.sent_on()
