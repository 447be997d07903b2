"""What every run of a job has, whichever executor carries it: a driver, a clock, and what stops it."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import pyarrow as pa

from stateformat.model import StopMode
from stateformat.storage import as_url
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from ..dataflow.coordinator import Coordinator
from .clock import Clock
from .driver import Driver
from .in_flight_checkpoint import InFlightCheckpoint
from .options import Schedule
from .outcome import JobOutcome
from .progress import Progress, late_words
from .restore import Restored
from .retention import keep_count, keep_properties
from .stop_requests import StopService
from .worker import Mail

PROGRESS_EVERY_US = 500_000


class Run(ABC):
    """One run, from a restore to its end, its failure, or its stop. Step it until :attr:`outcome` is there.

    :meth:`step` raises ``RunDiscarded`` when the run is given up and the job is to go on from its newest checkpoint, and what
    publishing raises when another run has the job. Either way, the run is over; :meth:`close` lets operators release what they
    hold, as far as this process goes on.
    """

    def __init__(
        self,
        store: CheckpointStore,
        restored: Restored,
        schedule: Schedule,
        retries: Mapping[str, pa.Table],
        clock: Clock,
    ) -> None:
        self.job = restored.job
        self.outcome: JobOutcome | None = None
        self._clock = clock
        self._schedule = schedule
        self._begun_us = clock.now_us()
        self._all_tasks = sum(vertex.parallelism for vertex in self.job.vertices)
        self._coordinator = Coordinator(
            self.job,
            finished=restored.finished,
            tolerable_failures=schedule.tolerable_failures,
            loop_rounds_max=schedule.loop_rounds_max,
            begins_aligned=schedule.unaligned_after_us is not None,
        )
        self._driver = Driver(
            store,
            self.job,
            restored.permit,
            self._coordinator,
            self,
            clock.now_us,
            keep=keep_count(schedule),
            properties=keep_properties(schedule),
            retries=retries,
        )
        self._stop_service = StopService(
            store,
            self._driver,
            clock,
            every_us=schedule.requests_every_us,
            restored_from=restored.permit,
            savepoint_options=schedule.savepoint_options,
        )

    @abstractmethod
    def step(self) -> bool:
        """Do the next thing. False: the job has ended, and :attr:`outcome` says how."""

    @abstractmethod
    def close(self) -> None:
        """Give up the run: what its operators hold in this process is released. What closing raises is logged."""

    @abstractmethod
    def mail(self, task: ev.TaskId, mail: Mail) -> None:
        """Put mail into a task's box (``driver.TaskMessenger``)."""

    @abstractmethod
    def drop_in_flight(self) -> None:
        """Nothing is logged any more (``driver.TaskMessenger``)."""

    @abstractmethod
    def overtake(self, barrier: ev.Barrier) -> None:
        """The barrier in flight turns unaligned (``driver.TaskMessenger``)."""

    @abstractmethod
    def progress(self) -> Progress:
        """How far it has come."""

    def has_progress(self, told_us: int) -> bool:
        """Whether it is time to tell progress again; ``told_us``: when it was told last."""
        return self._clock.now_us() - told_us >= PROGRESS_EVERY_US

    def _check_end(self) -> None:
        if self._driver.ended is not None and self.outcome is None:
            self._driver.commit_rest(self._clock)
            outcome = self._stop_service.outcome(self._driver.ended)
            if self.late_rows:
                outcome = replace(outcome, sentence=f"{outcome.sentence}; {late_words(self.late_rows)}")
            self.outcome = outcome

    @property
    @abstractmethod
    def late_rows(self) -> int:
        """Rows that operators have dropped as late since the job began, as far as checkpoints know of earlier runs."""

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

    def request_stop(self, mode: StopMode, savepoint: str | os.PathLike[str] | None = None) -> str:
        """Ask for a stop with a savepoint, as `ckpt stop` does from outside; returns the request's id."""
        request = secrets.token_hex(16)
        self._stop_service.request_stop(request, mode, None if savepoint is None else as_url(savepoint))
        return request

    def _watermarks(self, times: Mapping[ev.TaskId, int]) -> dict[str, int | None]:
        """How far each source has come: the least of its tasks; None without event time, or before it is known."""
        found: dict[str, int | None] = {}
        for vertex in self.job.vertices:
            if vertex.is_source:
                own = [time for task, time in times.items() if task.vertex == vertex.id]
                least = min(own, default=ev.MAX_WATERMARK)
                timed = self.job.step(vertex.id).event_time is not None
                found[vertex.id] = least if timed and least != ev.MIN_WATERMARK else None
        return found

    def _progress(self, *, rows_read: int, running: int, times: Mapping[ev.TaskId, int]) -> Progress:
        permit = self._driver.permit
        warnings, self._driver.warnings = tuple(self._driver.warnings), []
        watermarks = self._watermarks(times)
        timed = [watermarks[uid] for uid in watermarks if self.job.step(uid).event_time is not None]
        known = [time for time in timed if time is not None]
        return Progress(
            job_id=self.job.flow.job_id,
            elapsed_us=self._clock.now_us() - self._begun_us,
            rows_read=rows_read,
            checkpoint_id=permit.ref.checkpoint_id if permit else None,
            state_rows=permit.record.totals.rows if permit else 0,
            state_bytes=permit.record.totals.bytes if permit else 0,
            running=running,
            finished=self._all_tasks - running,
            watermark=min(known) if known and len(known) == len(timed) else None,
            watermarks=watermarks,
            late_rows=self.late_rows,
            warnings=warnings,
        )


__all__ = ["Run"]
