"""One run of a job on Spark: epoch after epoch, from a restore to its end, its failure, or its stop.

Theory of operation. :meth:`SparkRun.step` is one epoch: splits are dealt and ranges fixed, the coordinator's barrier begins, one Spark
job runs, and what its reports say happens to the coordinator in order of levels; it publishes, sinks commit, and completion is the first
mail of the next epoch. Nothing is decided here that the local executor would not leave to the coordinator and the cores.

Between epochs the cores are here. A task whose logic has ended needs its operators no more, nor does one that is held by a stop: what is
left of its life is between cores (its consumers have processed everything, its producers leave, it leaves), and is delivered here, so a
job does not need an epoch to fall asleep (:meth:`SparkRun._settle`).

An epoch whose checkpoint is not published is a cut all the same (``base.py``). The run goes on from it; what its sinks had prepared goes
into the next checkpoint.
"""

from __future__ import annotations

import logging
import math
import pickle
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import pyarrow as pa

from backends.dataflow import events as ev
from backends.dataflow.flow_states import COMMITTABLES
from backends.running.clock import Clock
from backends.running.driver import ToCoordinator
from backends.running.outcome import RunDiscarded
from backends.running.progress import EpochProgress
from backends.running.restore import Restored
from backends.running.run import Run
from backends.running.state_layers import merge_snapshot
from backends.running.wiring import receiver_of, sender_of, tasks_of
from backends.running.worker import Mail, Message
from backends.spark.base import Base, read_task, restored_bases
from backends.spark.dealing import SPLITS_AHEAD_MAX, Dealer
from backends.spark.epoch import EpochJob, first_line, levels_of
from backends.spark.feeds import Feed
from backends.spark.options import SparkOptions
from backends.spark.remote_errors import unpack
from backends.spark.reports import Report, Setup, Spec
from backends.spark.resting import ENDED, Resting, concerns_the_core, is_work
from stateformat.model import Mode
from stateformat.snapshot import WriteContext
from stateformat.store import CheckpointStore, PendingCheckpoint

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

WAIT_MAX_US: Final = 1_000_000
"""So long a job that waits for its next epoch does not look for a stop."""
_LIVE: Final[WeakValueDictionary[str, SparkRun]] = WeakValueDictionary()
"""The runs of this process that go on, in whatever session."""
TOKENS_KEPT: Final = 64
"""So many epochs a worker may be behind and still catch up."""


def live_runs() -> frozenset[str]:
    """The ids of the runs for which workers keep what they have."""
    return frozenset(_LIVE)


class SparkRun(Run):
    """One run on Spark, of which each step is an epoch."""

    def __init__(
        self,
        spark: SparkSession,
        store: CheckpointStore,
        restored: Restored,
        options: SparkOptions,
        retries: Mapping[str, pa.Table],
        clock: Clock,
    ) -> None:
        super().__init__(store, restored, options.schedule, retries, clock)
        self._spark = spark
        self._options = options
        self._id = secrets.token_hex(8)
        _LIVE[self._id] = self
        self._broadcast: Broadcast[bytes] | None = None
        self._version = 0
        self._rows_read = self._late_rows = 0
        self._idle = self._turns = False
        self._next_us = 0
        self._news: dict[str, Any] = {}
        self._told = 0
        bases = restored_bases(restored)
        self._tasks = {
            item.core.id: Resting(item, bases.get(item.core.id, Base())) for item in tasks_of(restored, by_epoch=True)
        }
        self._levels, self._last_level = levels_of(self.job.vertices, restored.finished)
        self._dealer = Dealer(self.job, self._driver, spark)
        self._driver.open_coordinators(restored.coordinators, restored.finished)
        self._driver.carry_out(self._coordinator.start())
        self._check_end()

    # An epoch ------------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one epoch. False: the job has ended, and :attr:`outcome` says how."""
        if self.outcome is not None:
            return False
        try:
            self._step()
        finally:
            self._stop_service.answer_failures()
        return not self._is_over()

    def _is_over(self) -> bool:
        self._check_end()
        if self.outcome is None:
            return False
        self.close()
        return True

    def _step(self) -> None:
        begun = time.perf_counter()
        feeds: list[Feed] = []
        # Also while a loop is turned, where one barrier begins when the one before is complete.
        self._stop_service.poll()
        if self.in_flight is None:
            if self._wait():
                return
            feeds = self._dealer.deal(self._running)
            if self._idle and not (feeds or self._driver.inbox or self._has_mail):
                self._next_us = self._clock.now_us() + self._options.idle_us
                self._idle = False
                return
            if not self._driver.inbox:
                self._driver.inbox.append(ev.CheckpointDue())
            self._deliver()
        if self._driver.ended is None:
            self._epoch(feeds, begun)

    def _wait(self) -> bool:
        """Let time go on where the next epoch is not due and rows are all that it could bring. Whether it did."""
        now_us = self._clock.now_us()
        if now_us >= self._next_us or self._driver.inbox or self._has_mail or self._turns:
            return False
        self._clock.wait_until(min(self._next_us, now_us + WAIT_MAX_US))
        return True

    @property
    def _running(self) -> list[Resting]:
        return [held for held in self._tasks.values() if not held.gone]

    @property
    def _has_mail(self) -> bool:
        return any(is_work(mail) for held in self._running for mail in held.mail)

    def _epoch(self, feeds: Sequence[Feed], begun: float) -> None:
        in_flight = self.in_flight
        checkpoint = in_flight.checkpoint if in_flight is not None else None
        writing = checkpoint or self._driver.new_checkpoint()
        self._version += 1
        self._next_us = self._clock.now_us() + self._options.least_epoch_us
        published, spent = self.published, (self._driver.publish_us, self._driver.commit_us)
        job = self._job_of(writing, feeds)
        ready = time.perf_counter()
        reports = self._run_job(job)
        done = time.perf_counter()
        self._accept(reports, checkpoint)
        self._deliver()
        self._news = {
            "tries": job.tries,
            "planning_us": int(1e6 * (ready - begun)),
            "spark_us": int(1e6 * (done - ready)),
            "publish_us": self._driver.publish_us - spent[0],
            "commit_us": self._driver.commit_us - spent[1],
            **_counts(reports.values()),
        }
        if self.in_flight is not None and self.in_flight is in_flight:
            raise RunDiscarded(f"barrier {self.in_flight.barrier.number} did not come through its epoch", counted=True)
        if self.published == published:
            self._hold_committables(reports, writing.context)

    def _job_of(self, writing: PendingCheckpoint, feeds: Sequence[Feed]) -> EpochJob:
        fed = {feed.encoder.uid for feed in feeds}
        gone = frozenset(task for task, held in self._tasks.items() if held.gone)
        rows, readers = self._options.schedule.checkpoint_rows, sum(held.may_read for held in self._running)
        share = None if rows is None else math.ceil(rows / max(readers, 1))
        specs = [self._spec(held, fed=held.core.id.vertex in fed, read_rows=share, gone=gone) for held in self._running]
        heads = [spec.task for spec in specs if self.job.vertex(spec.task.vertex).feedback]
        barrier = self.in_flight.barrier if self.in_flight else None
        what = (
            f"checkpoint {writing.checkpoint_id}"
            if barrier and barrier.purpose is not ev.Purpose.ROUND
            else "no checkpoint"
        )
        return EpochJob(
            spark=self._spark,
            run=self._id,
            live=live_runs(),
            setup=self._setup(writing),
            specs=specs,
            levels=self._levels,
            last_level=self._last_level,
            heads=heads,
            checkpoint_id=writing.checkpoint_id,
            attempt_id=writing.attempt_id,
            feeds=feeds,
            description=", ".join(
                [f"{self.job.flow.job_id}: epoch {self._version}", what, *(feed.range.label for feed in feeds)]
            ),
        )

    def _run_job(self, job: EpochJob) -> dict[ev.TaskId, Report]:
        try:
            return job()
        except Exception as error:
            reason = f"epoch {self._version} could not be run: {first_line(error)}"
            self._driver.note(reason, error)
            self._driver.inbox.append(ev.TaskFailed(None, reason))
            self._deliver()
            raise RunDiscarded(reason, counted=True) from error

    def _setup(self, writing: PendingCheckpoint) -> Broadcast[bytes]:
        if self._broadcast is None:
            setup = Setup(
                run=self._id,
                job=self.job,
                context=writing.context,
                levels=self._levels,
                last_level=self._last_level,
                inputs={task: held.wired.inputs for task, held in self._tasks.items()},
                outputs={task: held.wired.outputs for task, held in self._tasks.items()},
                cache_bytes=self._options.cache_bytes,
            )
            self._broadcast = self._spark.sparkContext.broadcast(setup.pickled())
        return self._broadcast

    def _spec(self, held: Resting, *, fed: bool, read_rows: int | None, gone: frozenset[ev.TaskId]) -> Spec:
        mail, held.mail = held.mail, deque()
        triggered = next((item for item in reversed(mail) if isinstance(item, ev.Triggered)), None)
        return Spec(
            task=held.core.id,
            core=pickle.dumps(held.core, protocol=5),
            mail=tuple(item for item in mail if not isinstance(item, ev.Triggered)),
            triggered=triggered,
            base=held.base,
            tokens=dict(held.tokens),
            started=held.started,
            number=held.number,
            version=self._version,
            fed=fed,
            read_rows=read_rows,
            read_us=self._options.schedule.checkpoint_interval_us,
            gone=gone,
        )

    # What comes of it ----------------------------------------------------------------------------------------------------

    def _accept(self, reports: Mapping[ev.TaskId, Report], checkpoint: PendingCheckpoint | None) -> None:
        """Let the coordinator, and whoever else is concerned, hear what an epoch's tasks report, in order of their levels."""
        for report in reports.values():
            for reason, packed in report.errors:
                self._driver.note(reason, unpack(packed))
        failure = next((report.failure for report in reports.values() if report.failure is not None), None)
        if failure is not None:
            self._driver.inbox.append(failure)
            self._deliver()
            raise RunDiscarded(failure.reason, counted=True)
        read = 0
        for held in self._running:
            report = reports[held.core.id]
            read += report.rows_read
            self._late_rows += report.late_rows
            self._take_back(held, report)
            if checkpoint is not None and held.base is not None:
                for part in held.base.parts.values():
                    checkpoint.add(part.snapshot)
            elif checkpoint is not None:
                for snapshot in report.snapshots:
                    checkpoint.add(snapshot)
            # Messages first: the last acknowledgement publishes, and what was sent before it is part of the checkpoint.
            for uid, message, taken in report.messages:
                self._driver.inbox.append(ToCoordinator(uid, held.core.id.subtask, message, taken))
            for uid in report.lost:
                self._driver.lost(uid, held.core.id.subtask)
            self._driver.inbox.extend(report.events)
            for channel in report.confirmed:
                self.mail(sender_of(self.job, channel), ev.DataProcessed(channel))
        self._rows_read += read
        self._turns = any(report.replays for report in reports.values())
        self._idle = not read and not self._turns

    def _take_back(self, held: Resting, report: Report) -> None:
        held.wired = held.wired._replace(core=pickle.loads(report.core))  # noqa: S301 - from our own workers
        held.started = True
        held.number = report.number
        held.wants_split = report.wants_split or held.told_later  # Whom we told so asked for nothing since.
        if report.ran_dry and report.wants_split:
            held.splits_ahead = min(2 * held.splits_ahead, SPLITS_AHEAD_MAX)
        held.tokens[report.token] = self._version
        while len(held.tokens) > TOKENS_KEPT:
            del held.tokens[next(iter(held.tokens))]
        before = held.base.parts if held.base is not None else {}
        if report.ended:
            self._see_off(held)
        if held.core.state in ENDED:
            held.base = None
            return
        parts = {
            snapshot.operator: merge_snapshot(
                snapshot, report.kept.get(snapshot.operator, {}), before.get(snapshot.operator), self._version
            )
            for snapshot in report.snapshots
        }
        held.base = Base(parts, report.reported, report.taken, report.taken_id, report.replays, report.travelling)

    def _hold_committables(self, reports: Mapping[ev.TaskId, Report], context: WriteContext) -> None:
        """The checkpoint of these reports was not published: what sinks have prepared is part of the next one."""
        for report in reports.values():
            for snapshot in report.snapshots:
                handles = [handle for handle in snapshot.handles if handle.mode == Mode.COMMITTABLES and handle.rows]
                if handles:
                    task = read_task(context, snapshot.operator, COMMITTABLES, handles)
                    self._driver.add_committables(snapshot.operator, task.table())

    # Between epochs ------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Until nothing is left to say: let the coordinator hear its events, and cores that need no operators theirs."""
        while True:
            while self._driver.inbox:
                self._driver.step()
            if self._driver.ended is not None or not self._settle():
                return

    def _settle(self) -> bool:
        """Deliver mail to the cores that live here. Whether there was any."""
        found = False
        for held in self._running:
            while held.lives_here and not held.gone:
                event = next((item for item in held.mail if concerns_the_core(item)), None)
                if event is None:
                    break
                held.mail.remove(event)
                found = True
                for command in held.core.handle(event):
                    self._carry(held, command)
        return found

    def _carry(self, held: Resting, command: ev.TaskCommand) -> None:
        task = held.core.id
        match command:
            case ev.Emit(element):
                for channels in held.wired.outputs.values():
                    for channel in channels:
                        self.mail(receiver_of(self.job, channel), ev.Received(channel, element))
            case ev.ConfirmProcessed(channel):
                self.mail(sender_of(self.job, channel), ev.DataProcessed(channel))
            case ev.TellLogicEnded():
                self._driver.inbox.append(ev.LogicEnded(task))
            case ev.ReportInputsEnded():
                self._driver.inbox.append(ev.InputsEnded(task))
            case ev.Ended():
                self._see_off(held)
                self._driver.inbox.append(ev.TaskEnded(task))
            case ev.NotifyComplete() | ev.NotifyAborted() | ev.Close() | ev.HoldSource():
                pass  # Its activation has ended, or does with the run.
            case _:
                raise AssertionError(f"{task} is to {command} without its operators")

    def _see_off(self, held: Resting) -> None:
        """A task has ended: whoever sends to it need not wait for it."""
        held.gone = True
        held.mail.clear()
        held.base = None
        for channels in held.wired.inputs.values():
            for channel in channels:
                self.mail(sender_of(self.job, channel), ev.DataProcessed(channel))

    def mail(self, task: ev.TaskId, mail: Mail) -> None:
        """Put mail into a task's box: the first thing in the next epoch."""
        held = self._tasks.get(task)
        if held is None:
            return
        if not held.gone:
            held.mail.append(mail)
        elif isinstance(mail, Message):
            self._driver.lost(mail.uid, task.subtask)

    def overtake(self, barrier: ev.Barrier) -> None:
        """Barriers of epochs are aligned."""
        raise AssertionError(f"barrier {barrier.number} overtakes")

    def drop_in_flight(self) -> None:
        """Nothing is logged between epochs."""

    # What users and tests ask --------------------------------------------------------------------------------------------

    @property
    def rows_read(self) -> int:
        """Rows that sources have read in this run."""
        return self._rows_read

    @property
    def late_rows(self) -> int:
        """Rows that were dropped as late since the job began."""
        return self._driver.late_rows_before + self._late_rows

    def close(self) -> None:
        """Give up the run: workers let go of what they kept for it when they serve another."""
        _LIVE.pop(self._id, None)
        broadcast, self._broadcast = self._broadcast, None
        if broadcast is not None:
            try:
                broadcast.destroy()
            except Exception as error:  # The session may be gone, and then why the run has ended is what matters.
                logger.warning("what workers share of the job could not be destroyed: %s", first_line(error))

    def has_progress(self, told_us: int) -> bool:  # noqa: ARG002 - each epoch is told, once
        """Whether an epoch has ended since progress was told."""
        return self._version > self._told

    def progress(self) -> EpochProgress:
        """How far it has come, and what the last epoch has cost."""
        self._told = self._version
        running = self._running
        times = {held.core.id: held.core.watermark for held in running}
        known = self._progress(rows_read=self._rows_read, running=len(running), times=times)
        return EpochProgress(**vars(known), epoch=self._version, **self._news)


def _counts(reports: Iterable[Report]) -> dict[str, int]:
    """What the reports of an epoch say of it, in sum (``EpochProgress``)."""
    found: Counter[str] = Counter(rows_epoch=0, sent_bytes=0, written_bytes=0, kept=0, caught_up=0, restored=0)
    for report in reports:
        sizes = {handle.path: handle.size_bytes for snapshot in report.snapshots for handle in snapshot.handles}
        found.update(rows_epoch=report.rows_read, sent_bytes=report.sent_bytes, written_bytes=sum(sizes.values()))
        if report.opened:
            found[report.opened] += 1
    return dict(found)


__all__ = ["SparkRun"]
