"""One run of a job: what all executors share."""

from __future__ import annotations

import datetime
import os
import secrets
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import pyarrow as pa

from stateformat.model import StopMode
from stateformat.requests import JobRequest, RequestAnswer, RequestKind
from stateformat.storage import absolute, as_url
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from ..dataflow.coordinator import Coordinator
from ..dataflow.source_reader import Holder
from ..dataflow.task import Task
from .clock import Clock
from .driver import Driver, TaskMessenger
from .ending import GRACE_SECONDS, SoonStop
from .in_flight_checkpoint import InFlightCheckpoint
from .options import Schedule
from .reports import FailureCost, JobOutcome, Progress, TimeWatch, late_words
from .requests import RequestService
from .restore import Restored

PROGRESS_EVERY_US = 500_000


class Run(TaskMessenger):
    """One run, from a restore to its end, failure or stop. Step it until there is an
    :attr:`outcome`.

    :meth:`step` raises ``RunDiscarded`` if the job must resume from its newest checkpoint, and what
    publishing raises if another run has taken the job. Then :meth:`close` the run.
    """

    def __init__(
        self,
        store: CheckpointStore,
        restored: Restored,
        schedule: Schedule,
        retries: Mapping[str, pa.Table],
        clock: Clock,
        soon: SoonStop,
    ) -> None:
        self.job = restored.job
        self.outcome: JobOutcome | None = None
        self._clock = clock
        self._schedule = schedule
        self._soon = soon
        self._is_told_soon = False
        self._is_current = False
        """Whether the newest checkpoint holds all that the run has done."""
        self.cost = FailureCost()
        """What failures have cost the job before this run, and in it."""
        self._barrier = self._covered = (0, clock.now_us(), 0)
        """Number, time, rows read: at the last barrier's begin, and at the newest checkpoint's."""
        self._noted = 0
        self._begun_us = clock.now_us()
        self._coordinator = Coordinator(
            self.job,
            finished=restored.finished,
            tolerable_failures=schedule.tolerable_failures,
            loop_rounds_max=schedule.loop_rounds_max,
            begins_aligned=schedule.unaligned_after_us is not None,
        )
        self._driver = Driver(store, restored, self._coordinator, self, clock, schedule, retries)
        sources = (self.job.step(vertex.id) for vertex in self.job.vertices if vertex.is_source)
        self._time_watch = TimeWatch({step.uid: step.idle_after for step in sources if step.event_time is not None})
        behind = self._driver.processing_time.behind_words
        if behind:
            self._driver.warn(behind)
        self._requests = RequestService(store, self._driver, clock, schedule, restored)

    @abstractmethod
    def step(self) -> bool:
        """Do the next thing; return False if the job has ended."""

    @abstractmethod
    def close(self) -> None:
        """Release what operators hold in this process; log what closing raises."""

    @abstractmethod
    def progress(self) -> Progress:
        """Return the progress of the run."""

    def has_progress(self, shown_us: int) -> bool:
        """Return whether to show progress now; it was last shown at ``shown_us``."""
        return self._clock.now_us() - shown_us >= PROGRESS_EVERY_US

    def _watch_time(self, now_us: int) -> None:
        """Warn now and then about an input that has held back event time for long."""
        if now_us >= self._time_watch.next_us and self._time_watch.sources:
            warning = self._time_watch.look(now_us, self._readers())
            if warning is not None:
                self._driver.warn(warning)

    @abstractmethod
    def _readers(self) -> Iterable[tuple[str, Holder]]:
        """Return the readers that may hold back event time, with the uids of their sources."""

    def _check_end(self) -> None:
        ended = self._driver.ended
        if isinstance(ended, ev.JobInterrupted):
            until_us = self._soon.until_us or 0
            left = self._driver.commit_rest(until_us)
            self._requests.interrupted(until_us)
            self.outcome = self._soon.outcome(self.newest, taken=self.published > 0, left=left)
            self.close()
        elif ended is not None and self.outcome is None:
            self._driver.commit_rest()
            outcome = self._requests.outcome(ended)
            if self.late_rows:
                outcome = replace(outcome, sentence=f"{outcome.sentence}; {late_words(self.late_rows)}")
            self.outcome = outcome

    def _tell_of_soon_stop(self) -> None:
        """Tell the coordinator if the job is to stop soon. Raises ``GraceExceeded``."""
        self._soon.check(self.newest)
        if not self._is_told_soon:
            self._is_told_soon = True
            self._driver.inbox.append(ev.SoonStopRequested(self._is_current))

    def _note_checkpoint(self) -> None:
        """Note the progress of the newest checkpoint, after the driver did something."""
        current = self._driver.in_flight
        if current is not None and current.barrier.number != self._barrier[0]:
            self._barrier = (current.barrier.number, current.begun_us, self.rows_read)
        if self._settled != self._noted:
            self._noted, self._covered = self._settled, self._barrier

    @property
    def _settled(self) -> int:
        """How often the newest checkpoint has held all that the run had done."""
        return self._driver.published + self._driver.forgone

    def cost_of_failure(self) -> FailureCost:
        """Return the cost, if the run is lost now."""
        _, since_us, rows = self._covered
        return self.cost.plus(self._clock.now_us() - since_us, max(self.rows_read - rows, 0))

    def say(self, sentence: str) -> None:
        """Show what has happened to the job, in the log and beside its progress."""
        self._driver.tell(sentence)

    def warn(self, sentence: str) -> None:
        """Show what is wrong with the job, in the log and beside its progress."""
        self._driver.warn(sentence)

    @property
    def newest(self) -> int | None:
        """The newest checkpoint that the run knows; None before the first."""
        return self._driver.permit.ref.checkpoint_id if self._driver.permit else None

    @property
    @abstractmethod
    def rows_read(self) -> int:
        """Rows that sources have read in this run."""

    @property
    def published(self) -> int:
        """How many checkpoints this run has published."""
        return self._driver.published

    @property
    def in_flight(self) -> InFlightCheckpoint | None:
        """The checkpoint in flight."""
        return self._driver.in_flight

    def stop_soon(self, *, grace: float | datetime.timedelta = GRACE_SECONDS) -> None:
        """As :meth:`.Runtime.stop_soon`, for whoever steps a run."""
        self._soon.ask(grace)

    def request_stop(self, mode: StopMode, savepoint: str | os.PathLike[str] | None = None) -> str:
        """Request a stop with a savepoint, as `ckpt stop` does; return the request's id."""
        request = secrets.token_hex(16)
        self._requests.request_stop(request, mode, None if savepoint is None else absolute(as_url(savepoint)))
        return request

    def request_savepoint(self, savepoint: str | os.PathLike[str] | None = None) -> str:
        """Request a savepoint, as `ckpt savepoint` does; return the request's id.

        The job goes on. :meth:`request_answer` has what became of it.
        """
        permit = self._driver.permit
        newest = permit.ref.checkpoint_id if permit else 0
        request = JobRequest(
            RequestKind.SAVEPOINT,
            secrets.token_hex(16),
            newest,
            None if savepoint is None else absolute(as_url(savepoint)),
        )
        self._requests.request_savepoint(request)
        return request.id

    def request_answer(self, request: str) -> RequestAnswer | None:
        """Return what became of a request that this run has answered; None until then."""
        return self._requests.answers.get(request)

    def _times(self, running: Sequence[Task]) -> dict[ev.TaskId, int]:
        """The watermarks of running tasks; an idle reader is at least where others hold time up."""
        times = {task.id: task.watermark for task in running}
        timed = [task for task in running if task.id.vertex in self._time_watch.sources]
        holding = min((task.watermark for task in timed if not task.is_idle), default=ev.MIN_WATERMARK)
        return times | {task.id: max(task.watermark, holding) for task in timed if task.is_idle}

    def _progress(self, *, rows_read: int, running: Sequence[Task]) -> Progress:
        """Return the progress, by the watermarks of the running tasks."""
        times = self._times(running)
        permit = self._driver.permit
        warnings, self._driver.warnings = tuple(self._driver.warnings), []
        news, self._driver.news = tuple(self._driver.news), []
        watermarks: dict[str, int | None] = {}
        known: list[int | None] = []
        for vertex in self.job.vertices:
            if vertex.is_source:
                own = [time for task, time in times.items() if task.vertex == vertex.id]
                least = min(own, default=ev.MAX_WATERMARK)
                timed = self.job.step(vertex.id).event_time is not None
                watermarks[vertex.id] = least if timed and least != ev.MIN_WATERMARK else None
                known += [watermarks[vertex.id]] if timed else []
        least_known = [time for time in known if time is not None]
        return Progress(
            job_id=self.job.flow.job_id,
            elapsed_us=self._clock.now_us() - self._begun_us,
            rows_read=rows_read,
            checkpoint_id=permit.ref.checkpoint_id if permit else None,
            state_rows=(permit.record.totals.rows or 0) if permit else 0,
            state_bytes=permit.record.totals.bytes if permit else 0,
            running=len(running),
            finished=sum(vertex.parallelism for vertex in self.job.vertices) - len(running),
            watermark=min(least_known) if known and len(least_known) == len(known) else None,
            watermarks=watermarks,
            late_rows=self.late_rows,
            warnings=warnings,
            news=news,
            **asdict(self.cost),
            parallelism=max(vertex.parallelism for vertex in self.job.vertices),
        )
