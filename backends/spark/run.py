"""One run of a job on Spark, epoch after epoch: from a restore to its end, failure, or stop.

:meth:`SparkRun.step` is one epoch. The driver assigns splits and fixes ranges
(:class:`SplitAssignment`), the coordinator begins its barrier, and one Spark job runs. The
coordinator gets the events of the job's reports, in order of levels; it publishes, and sinks
commit. Completion is the first mail of the next epoch.

A finished task no longer needs its operators; neither does a task stopped at a barrier. The driver
delivers their mail between epochs, so that a job needs no epoch to end (:meth:`SparkRun._settle`).

An epoch whose checkpoint is not published is still a consistent cut: the run goes on from it, and
what its sinks have prepared goes into the next checkpoint.

A run that must stop soon cancels the job of its epoch when its grace period is used up. The run's
own thread is waiting for Spark then, and a signal handler must not call the JVM in the middle of
that call. So a separate thread cancels the job (:class:`Cancelling`).
"""

from __future__ import annotations

import logging
import math
import pickle
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.model import Mode
from stateformat.publication import PendingCheckpoint
from stateformat.snapshot import WriteContext
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from ..dataflow.api import NoSplit, Source
from ..dataflow.chained_operator import FailsAgain
from ..dataflow.compile import Job
from ..dataflow.graph import COMMITTABLES
from ..dataflow.source_reader import Holder
from ..runtime import (
    Clock,
    Driver,
    EpochProgress,
    Mail,
    MessageToCoordinator,
    MessageToSubtask,
    Restored,
    Run,
    RunDiscarded,
    SoonStop,
    SplitAssigned,
    merge_snapshot,
    receiver_of,
    sender_of,
    tasks_of,
)
from .epoch import EpochJob, first_line, levels_of, refused_by_spark
from .frames import DataFrameInput, InputEncoder
from .messages import (
    ENDED,
    DriverTask,
    Epoch,
    RestorePoint,
    Setup,
    Spec,
    TaskReport,
    is_for_core,
    is_work,
    read_task,
    restore_points,
    unpack_error,
)
from .sessions import SparkOptions
from .source import RangeEnumerator, SparkSource

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import SparkSession


AGAIN_SECONDS: Final = 0.2
"""Cancelling is repeated after this time, for a job submitted after the grace period."""


class Cancelling:
    """A context manager for each Spark job of a run. Its thread sleeps until it must stop soon."""

    def __init__(self, spark: SparkSession, soon: SoonStop, clock: Clock, tag: str) -> None:
        self._context = spark.sparkContext
        self._soon = soon
        self._clock = clock
        self._tag = tag
        self._news: SimpleQueue[bool] = SimpleQueue()
        """True: the job must stop soon. False: the run has ended."""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="cancels an epoch", daemon=True)
            self._thread.start()
            self._soon.tell(self._news)
        self._context.addJobTag(self._tag)

    def __exit__(self, *_: object) -> None:
        try:
            self._context.removeJobTag(self._tag)
        except Exception as error:  # The session may be gone. The epoch reports that better.
            logger.debug("the tag of a job stays: %s", error)

    def close(self) -> None:
        """End the thread, as the run has ended."""
        self._news.put(False)

    def _watch(self) -> None:
        goes_on = self._news.get()
        while goes_on and self._soon.until_us is not None:
            left_us = self._soon.until_us - self._clock.now_us()
            try:
                goes_on = self._news.get(timeout=max(left_us / 1e6, AGAIN_SECONDS))
            except Empty:
                if self._soon.is_over:
                    self._cancel()

    def _cancel(self) -> None:
        try:
            self._context.cancelJobsWithTag(self._tag)
        except Exception as error:
            logger.warning("the epoch under way could not be cancelled: %s", error)


SPLITS_AHEAD_MAX: Final = 64
"""The most splits a reader gets at once. One that used up all gets twice as many next time."""


class SplitAssigner:
    """Assigns splits to readers and fixes the ranges of DataFrames. Called between epochs."""

    def __init__(self, job: Job, driver: Driver, spark: SparkSession) -> None:
        self._job = job
        self._driver = driver
        self._spark = spark
        self._next: dict[str, int] = {}
        """By source, the subtask that gets the next split first."""
        self.waits = False
        """Whether the job's loops hold so much that no source may read in the next epoch."""

    def close(self) -> None:
        """Close the enumerators of ranges, as the run has ended."""
        for enumerator in self._driver.enumerators.values():
            if isinstance(enumerator, RangeEnumerator):
                enumerator.close()

    def rows_for_each(self, readers: int, rows: int | None) -> int | None:
        """Return how many of ``rows`` each reader may read in the next epoch; None: any number."""
        if self.waits:
            return 0
        return None if rows is None else math.ceil(rows / max(readers, 1))

    def assign(self, running: Sequence[DriverTask]) -> list[DataFrameInput]:
        """Mail splits to the readers among these tasks. Return the ranges of the next epoch."""
        inputs: list[DataFrameInput] = []
        for vertex in () if self.waits else self._job.vertices:
            readers = [task for task in running if task.wired.vertex is vertex and task.may_read]
            logic = self._job.logic(vertex.id)
            if readers and isinstance(logic, SparkSource):
                inputs += self._fix_range(vertex.id, logic, readers)
            elif readers and isinstance(logic, Source):
                self._assign_splits(vertex.id, readers)
        return inputs

    def _fix_range(self, uid: str, source: SparkSource, readers: Sequence[DriverTask]) -> list[DataFrameInput]:
        enumerator = self._driver.enumerators[uid]
        assert isinstance(enumerator, RangeEnumerator)
        try:
            found = enumerator.next_range(self._spark)
        except Exception as error:
            logger.debug("the next range of %s", uid, exc_info=error)
            reason = f"source {uid!r} has no next range: {first_line(error)}"
            if isinstance(error, InvalidInput) or refused_by_spark(error) is not None:
                failure = FailsAgain(reason)
                failure.__cause__ = error
                self._driver.note(reason, failure)
            self._driver.inbox.append(ev.TaskFailed(None, reason))
            return []
        if isinstance(found, NoSplit):
            for reader in readers:
                reader.mail.append(SplitAssigned(found))
            return []
        enumerator.look_ahead(self._spark)
        event_time = self._job.step(uid).event_time
        column = event_time.column if event_time is not None else None
        parallelism = self._job.vertex(uid).parallelism
        return [DataFrameInput(found, InputEncoder(uid, parallelism, column, source.schema))]

    def _assign_splits(self, uid: str, readers: Sequence[DriverTask]) -> None:
        """Assign splits to the readers in turn. The next epoch begins with the next reader.

        Otherwise, splits that appear one by one would all go to the first reader, while event time
        waits for the others.
        """
        for reader in readers:
            reader.was_deferred = False
            if reader.no_more_splits:
                reader.mail.append(SplitAssigned(NoSplit.NEVER))
        parallelism, next_ = self._job.vertex(uid).parallelism, self._next.get(uid, 0)
        asking = [task for task in readers if task.wants_split and not task.no_more_splits]
        asking.sort(key=lambda task: (task.core.id.subtask - next_) % parallelism)
        for number in range(max((task.splits_ahead for task in asking), default=0)):
            for reader in [task for task in asking if number < task.splits_ahead]:
                answer = self._driver.assign_split(reader.core.id)
                if isinstance(answer, NoSplit):
                    reader.no_more_splits, reader.was_deferred = answer is NoSplit.NEVER, answer is NoSplit.LATER
                    asking.remove(reader)
                else:
                    self._next[uid] = reader.core.id.subtask + 1


logger = logging.getLogger(__name__)

WAIT_MAX_US: Final = 1_000_000
"""A job that waits for its next epoch checks for a stop at least this often."""
_LIVE: Final[WeakValueDictionary[str, SparkRun]] = WeakValueDictionary()
"""The active runs of this process, in any session, by id."""


class SparkRun(Run):
    """One run on Spark. Each step is an epoch."""

    def __init__(
        self,
        spark: SparkSession,
        store: CheckpointStore,
        restored: Restored,
        options: SparkOptions,
        retries: Mapping[str, pa.Table],
        clock: Clock,
        soon: SoonStop | None = None,
    ) -> None:
        super().__init__(store, restored, options.schedule, retries, clock, soon or SoonStop(clock))
        self._spark = spark
        self._options = options
        self._id = secrets.token_hex(8)
        _LIVE[self._id] = self
        self._shared: tuple[Setup, Broadcast[bytes]] | None = None
        self._version = 0
        self._rows_read = self._late_rows = 0
        self._is_idle = False
        """Whether the last epoch found nothing to do."""
        self._turns_loops = False
        """Whether the last epoch fed records back."""
        self._next_us = 0
        """When the next epoch may begin, if it would only bring rows."""
        self._timers_us = 0
        """When the next epoch may begin, if a timer of processing time is due."""
        self._metrics: dict[str, Any] = {}
        self._told = 0
        points = restore_points(restored)
        self._tasks = {
            item.core.id: DriverTask(item, points.get(item.core.id, RestorePoint()))
            for item in tasks_of(restored, by_epoch=True)
        }
        self._is_current = restored.permit is not None
        self._cancelling = Cancelling(spark, self._soon, clock, f"stateformat-{self._id}")
        self._levels, self._last_level = levels_of(self.job.vertices, restored.finished)
        self._assigner = SplitAssigner(self.job, self._driver, spark)
        self._driver.open_coordinators(restored.coordinators, restored.finished)
        self._driver.carry_out(self._coordinator.start())
        self._check_end()

    def step(self) -> bool:
        """Run one epoch. False: the job has ended, and :attr:`outcome` says how."""
        if self.outcome is not None:
            return False
        try:
            self._step()
            self._watch_time(self._clock.now_us())
        finally:
            self._requests.settle()
        self._check_end()
        if self._driver.ended is None:
            return True
        self.close()
        return False

    def _step(self) -> None:
        begun = time.perf_counter()
        inputs: list[DataFrameInput] = []
        if self._soon.until_us is not None:
            self._tell_of_soon_stop()
        # Also while a loop runs, where each barrier begins when the one before is complete.
        self._requests.poll()
        if self.in_flight is None:
            if self._wait():
                return
            inputs = [] if self._is_told_soon else self._assigner.assign(self._running)
            if self._is_idle and not (inputs or self._driver.inbox or self._has_work or self._timer_is_due):
                self._next_us = self._clock.now_us() + self._options.idle_us
                self._is_idle = False
                return
            if not self._driver.inbox:
                self._driver.inbox.append(ev.CheckpointDue())
            self._deliver()
        if self._driver.ended is None:
            self._epoch(inputs, begun)

    def _wait(self) -> bool:
        """Wait if the next epoch is not due and could only bring rows. Return whether it waited."""
        now_us, next_us = self._clock.now_us(), self._next_us
        timer_us = self._next_timer_us
        if timer_us is not None:
            next_us = min(next_us, max(self._driver.processing_time.clock_at(timer_us), self._timers_us))
        if now_us >= next_us or self._driver.inbox or self._has_work or self._turns_loops:
            return False
        self._clock.wait_until(min(next_us, now_us + WAIT_MAX_US))
        return True

    @property
    def _next_timer_us(self) -> int | None:
        """When the next timer of processing time is due, or a reader becomes idle."""
        due = (task.wakes_at_us for task in self._running if task.core.may_fire)
        return min((time for time in due if time is not None), default=None)

    @property
    def _timer_is_due(self) -> bool:
        timer_us = self._next_timer_us
        return timer_us is not None and timer_us <= self._driver.processing_time.advance()

    def _readers(self) -> Iterator[tuple[str, Holder]]:
        for task in self._running:
            reads = task.core.may_read and not task.core.is_idle and task.core.id.vertex in self._time_watch.sources
            if reads and task.holder is not None:
                yield task.core.id.vertex, task.holder

    @property
    def _running(self) -> list[DriverTask]:
        return [task for task in self._tasks.values() if not task.gone]

    @property
    def _has_work(self) -> bool:
        return any(is_work(mail) for task in self._running for mail in task.mail)

    def _epoch(self, inputs: Sequence[DataFrameInput], begun: float) -> None:
        in_flight = self.in_flight
        checkpoint = in_flight.checkpoint if in_flight is not None else None
        writing = checkpoint or self._driver.new_checkpoint()
        self._version += 1
        self._next_us = self._timers_us = self._clock.now_us() + self._options.least_epoch_us
        settled, spent = self._settled, (self._driver.publish_us, self._driver.commit_us)
        job = self._job_of(writing, inputs)
        ready = time.perf_counter()
        reports = self._run_job(job)
        self.cost = self.cost.plus(job.lost_us, 0, job.tries - 1)
        done = time.perf_counter()
        self._accept(reports, checkpoint)
        self._deliver()
        self._metrics = {
            "tries": job.tries,
            "planning_us": int(1e6 * (ready - begun)),
            "spark_us": int(1e6 * (done - ready)),
            "publish_us": self._driver.publish_us - spent[0],
            "commit_us": self._driver.commit_us - spent[1],
            **_sums(reports.values()),
        }
        if self.in_flight is not None and self.in_flight is in_flight:
            raise RunDiscarded(f"barrier {self.in_flight.barrier.number} did not come through its epoch", counted=True)
        self._is_current = self._settled > settled
        if self._is_current:
            self._covered = (0, self._clock.now_us(), self._rows_read)
        else:
            self._keep_committables(reports, writing.context)

    def _job_of(self, writing: PendingCheckpoint, inputs: Sequence[DataFrameInput]) -> EpochJob:
        rows, readers = self._options.schedule.checkpoint_rows, sum(task.may_read for task in self._running)
        by_frames = {each.encoder.uid for each in inputs}
        barrier = self.in_flight.barrier if self.in_flight else None
        writes = barrier is not None and barrier.purpose is not ev.BarrierKind.ROUND
        what = f"checkpoint {writing.checkpoint_id}" if writes else "no checkpoint"
        labels = [each.range.label for each in inputs]
        setup, broadcast = self._setup(writing)
        return EpochJob(
            spark=self._spark,
            setup=setup,
            broadcast=broadcast,
            epoch=Epoch(
                version=self._version,
                checkpoint_id=writing.checkpoint_id,
                attempt_id=writing.attempt_id,
                read_rows=self._assigner.rows_for_each(readers, rows),
                read_us=0 if self._is_told_soon else self._options.schedule.checkpoint_interval_us,
                processing_time_us=self._driver.processing_time.advance(),
                gone=frozenset(name for name, task in self._tasks.items() if task.gone),
                live=frozenset(_LIVE),
            ),
            is_over=lambda: self._soon.is_over,
            specs=[self._spec(task, by_frames) for task in self._running],
            inputs=inputs,
            description=", ".join([f"{self.job.flow.job_id}: epoch {self._version}", what, *labels]),
        )

    def _run_job(self, job: EpochJob) -> dict[ev.TaskId, TaskReport]:
        try:
            with self._cancelling:
                return job()
        except Exception as error:
            self._soon.check(self.newest)
            reason = f"epoch {self._version} could not be run: {first_line(error)}"
            self._driver.note(reason, error)
            self._driver.inbox.append(ev.TaskFailed(None, reason))
            self._deliver()
            raise RunDiscarded(reason, counted=True) from error

    def _setup(self, writing: PendingCheckpoint) -> tuple[Setup, Broadcast[bytes]]:
        if self._shared is None:
            setup = Setup(
                run=self._id,
                job=self.job,
                context=writing.context,
                levels=self._levels,
                last_level=self._last_level,
                inputs={name: task.wired.inputs for name, task in self._tasks.items()},
                outputs={name: task.wired.outputs for name, task in self._tasks.items()},
                cache_bytes=self._options.cache_bytes,
                loop_bytes_max=self._options.schedule.loop_bytes_max,
            )
            self._shared = setup, self._spark.sparkContext.broadcast(setup.pickled())
        return self._shared

    def _spec(self, task: DriverTask, by_frames: set[str]) -> Spec:
        mail, task.mail = task.mail, deque()
        return Spec(
            task=task.core.id,
            core=pickle.dumps(task.core, protocol=5),
            mail=tuple(item for item in mail if not isinstance(item, ev.Triggered)),
            triggered=next((item for item in reversed(mail) if isinstance(item, ev.Triggered)), None),
            restore_point=task.restore_point,
            tokens=task.copies | task.tokens,
            started=task.started,
            number=task.number,
            reads_frames=task.core.id.vertex in by_frames,
            active=task.active,
        )

    def _accept(self, reports: Mapping[ev.TaskId, TaskReport], checkpoint: PendingCheckpoint | None) -> None:
        """Apply the reports of an epoch, and put their events into the driver's inbox."""
        for report in reports.values():
            for reason, packed in report.errors:
                self._driver.note(reason, unpack_error(packed))
        failure = next((report.failure for report in reports.values() if report.failure is not None), None)
        if failure is not None:
            self._driver.inbox.append(failure)
            self._rows_read += sum(report.rows_read for report in reports.values())
            self._deliver()
            raise RunDiscarded(failure.reason, counted=True)
        for task in self._running:
            report = reports[task.core.id]
            subtask = task.core.id.subtask
            self._apply_report(task, report)
            if checkpoint is not None:
                point = task.restore_point
                whole = None if point is None else [operator.snapshot for operator in point.operators.values()]
                for snapshot in report.snapshots if whole is None else whole:
                    checkpoint.add(snapshot)
            # Messages first: the last acknowledgement publishes, and messages sent before it are
            # part of the checkpoint.
            for uid, message, taken in report.messages:
                self._driver.inbox.append(MessageToCoordinator(uid, subtask, message, taken))
            for uid in report.lost:
                self._driver.lost(uid, subtask)
            self._driver.inbox.extend(report.events)
            for channel in report.confirmed:
                self.mail(sender_of(self.job, channel), ev.DataProcessed(channel))
        read = sum(report.rows_read for report in reports.values())
        self._rows_read += read
        self._late_rows += sum(report.late_rows for report in reports.values())
        self._turns_loops = any(report.replays for report in reports.values())
        self._assigner.waits = any(report.presses for report in reports.values())
        self._is_idle = not read and not self._turns_loops

    def _apply_report(self, task: DriverTask, report: TaskReport) -> None:
        task.wired = task.wired._replace(core=pickle.loads(report.core))  # noqa: S301 - from our own workers
        task.started = True
        task.number = report.number
        task.holder = report.holder
        task.wakes_at_us, task.active = report.wakes_at_us, report.active
        task.wants_split = report.wants_split or task.was_deferred  # A reader that was deferred does not ask again.
        if report.ran_dry and report.wants_split:
            task.splits_ahead = min(2 * task.splits_ahead, SPLITS_AHEAD_MAX)
        task.tokens[report.token] = self._version
        task.forget_tokens()
        before = task.restore_point.operators if task.restore_point is not None else {}
        if report.ended:
            self._finish_task(task)
        if task.core.state in ENDED:
            task.restore_point = None
            return
        operators = {
            snapshot.operator: merge_snapshot(
                snapshot, report.kept.get(snapshot.operator, {}), before.get(snapshot.operator), self._version
            )
            for snapshot in report.snapshots
        }
        task.restore_point = RestorePoint(
            operators, report.reported, report.barrier, report.checkpoint_id, report.replays, report.pickled
        )
        task.know_copies(report.token if report.copied else None, self._version)

    def _keep_committables(self, reports: Mapping[ev.TaskId, TaskReport], context: WriteContext) -> None:
        """Keep what sinks have prepared for the next checkpoint, as this one was not published."""
        for report in reports.values():
            for snapshot in report.snapshots:
                handles = [handle for handle in snapshot.handles if handle.mode == Mode.COMMITTABLES and handle.rows]
                if handles:
                    task = read_task(context, snapshot.operator, COMMITTABLES, handles)
                    self._driver.add_committables(snapshot.operator, task.table())

    def _deliver(self) -> None:
        """Deliver all events of the coordinator, and all mail of cores that need no operators."""
        while True:
            while self._driver.inbox:
                self._driver.step()
            if self._driver.ended is not None or not self._settle():
                return

    def _settle(self) -> bool:
        """Deliver mail to cores that need no operators. Return whether there was any."""
        found = False
        for task in self._running:
            while task.needs_no_operators and not task.gone:
                event = next((item for item in task.mail if is_for_core(item)), None)
                if event is None:
                    break
                task.mail.remove(event)
                found = True
                for command in task.core.handle(event):
                    self._carry(task, command)
        return found

    def _carry(self, task: DriverTask, command: ev.TaskCommand) -> None:
        name = task.core.id
        match command:
            case ev.Emit(element):
                for channels in task.wired.outputs.values():
                    for channel in channels:
                        self.mail(receiver_of(self.job, channel), ev.Received(channel, element))
            case ev.ConfirmProcessed(channel):
                self.mail(sender_of(self.job, channel), ev.DataProcessed(channel))
            case ev.ReportLogicEnded():
                self._driver.inbox.append(ev.LogicEnded(name))
            case ev.ReportInputsEnded():
                self._driver.inbox.append(ev.InputsEnded(name))
            case ev.Ended():
                self._finish_task(task)
                self._driver.inbox.append(ev.TaskEnded(name))
            case ev.NotifyComplete() | ev.NotifyAborted() | ev.Close() | ev.HoldSource():
                pass  # Its chain has ended, or ends with the run.
            case _:
                raise AssertionError(f"{name} is to {command} without its operators")

    def _finish_task(self, task: DriverTask) -> None:
        """Remove a task from the job, and tell its senders that it has processed everything."""
        task.gone = True
        task.mail.clear()
        task.restore_point = None
        for channels in task.wired.inputs.values():
            for channel in channels:
                self.mail(sender_of(self.job, channel), ev.DataProcessed(channel))

    def mail(self, task: ev.TaskId, mail: Mail) -> None:
        receiver = self._tasks.get(task)
        if receiver is None:
            return
        if not receiver.gone:
            receiver.mail.append(mail)
        elif isinstance(mail, MessageToSubtask):
            self._driver.lost(mail.uid, task.subtask)

    def overtake(self, barrier: ev.Barrier) -> None:
        """Never called: barriers of epochs are aligned."""
        raise AssertionError(f"barrier {barrier.number} overtakes")

    def drop_in_flight(self) -> None:
        pass

    @property
    def rows_read(self) -> int:
        return self._rows_read

    @property
    def late_rows(self) -> int:
        return self._driver.late_rows_before + self._late_rows

    def close(self) -> None:
        """End the run. Workers release what they cached for it when they serve another run."""
        self._requests.close()
        self._cancelling.close()
        self._assigner.close()
        _LIVE.pop(self._id, None)
        shared, self._shared = self._shared, None
        if shared is not None:
            try:
                shared[1].destroy()
            except Exception as error:  # The session may be gone. Why the run ended matters more.
                logger.warning("The job's broadcast variable could not be destroyed: %s", first_line(error))

    def has_progress(self, told_us: int) -> bool:  # noqa: ARG002 - each epoch is told, once
        return self._version > self._told

    def progress(self) -> EpochProgress:
        self._told = self._version
        known = self._progress(rows_read=self._rows_read, running=[task.core for task in self._running])
        return EpochProgress(**vars(known), epoch=self._version, **self._metrics)


def _sums(reports: Iterable[TaskReport]) -> dict[str, int]:
    found: Counter[str] = Counter(rows_epoch=0, sent_bytes=0, written_bytes=0, kept=0, caught_up=0, restored=0)
    for report in reports:
        sizes = {handle.path: handle.size_bytes for snapshot in report.snapshots for handle in snapshot.handles}
        found.update(rows_epoch=report.rows_read, sent_bytes=report.sent_bytes, written_bytes=sum(sizes.values()))
        if report.opened:
            found[report.opened] += 1
    return dict(found)
