"""Runs a dataflow to its end. A run is what all executors share; a job is its runs and restarts."""

from __future__ import annotations

import datetime
import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

import pyarrow as pa

from stateformat.errors import CheckpointError, InvalidInput, RestoreRefused
from stateformat.graph import brief
from stateformat.model import CheckpointKind, StopMode
from stateformat.publication import CommitPermit
from stateformat.requests import JobRequest, RequestAnswer, RequestKind
from stateformat.rescaling import lasting_stop
from stateformat.storage import absolute, as_url
from stateformat.store import CheckpointStore

from ..dataflow import events as ev
from ..dataflow.api import TwoPhaseCommitSink
from ..dataflow.coordinator import Coordinator
from ..dataflow.flow import Dataflow
from ..dataflow.graph import COMMITTABLES, parallelism_of
from ..dataflow.source_reader import Holder
from ..dataflow.task import Task
from ..origin import origin_properties
from .clock import Clock, SystemClock
from .commits import clean, commit, commit_rest, pending_committables, sinks_of
from .driver import FATAL, Driver, InFlightCheckpoint, TaskMessenger
from .ending import GRACE_SECONDS, SoonStop
from .options import Options, Schedule
from .reports import FailureCost, JobOutcome, JobPaused, Progress, RestartPolicy, RunDiscarded, TimeWatch, late_words
from .requests import (
    Places,
    RequestService,
    answer_request,
    end_finished,
    end_stopped,
    save_stop,
    unexpired,
    waiting_requests,
)
from .rescales import Rescales, parallelism_words
from .restore import Restored, at_parallelism, restore
from .starting import decide_keep, start

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


logger = logging.getLogger(__name__)

RunT = TypeVar("RunT", bound=Run)


@dataclass
class _Start:
    """What the runs of one start of a job have in common."""

    resumes_to: int | None = None
    """The job resumes from stops up to this checkpoint; later ones, made while it ran, end it."""
    schedule: Schedule | None = None
    """The schedule of the options, with ``keep`` as :func:`decide_keep` set it at this start."""
    origin: Mapping[str, str] | None = None
    """Who runs the job, as in records; None before the first run."""
    rescales: Rescales = field(default_factory=Rescales)
    cost: FailureCost = field(default_factory=FailureCost)
    """What failures have cost."""
    failed_at_us: int | None = None
    """When a run was lost, until the next one begins."""
    parallelism_said: bool = False
    """Whether the log already says that the program's parallelism is not the record's."""
    job_warned: bool = False
    """Whether a run has shown the warnings about the job."""


class Runtime(ABC, Generic[RunT]):
    """Runs dataflows on a store. Runtimes on one store fence each other, like any two runs.

    Keyword arguments are the fields of ``options_class`` and of :class:`.Schedule`.
    """

    options_class: type[Options] = Options

    def __init__(
        self,
        store: CheckpointStore,
        *,
        clock: Clock | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: object,
    ) -> None:
        of_schedule = {name: options.pop(name) for name in tuple(options) if name in Schedule.__dataclass_fields__}
        unknown = set(options) - set(self.options_class.__dataclass_fields__)
        if unknown:
            known = sorted({*self.options_class.__dataclass_fields__, *Schedule.__dataclass_fields__} - {"schedule"})
            raise InvalidInput(f"there is no option {min(unknown)!r}; there are {', '.join(known)}")
        schedule = options.pop("schedule", Schedule())
        if not isinstance(schedule, Schedule):
            raise InvalidInput(f"schedule is {schedule!r}; it is a Schedule, or give its fields by name")
        if not isinstance(store, CheckpointStore):
            raise InvalidInput(f"the store is {store!r}; open it first: stateformat.open(url)")
        self.store = store
        self.options = self.options_class(**options, schedule=replace(schedule, **of_schedule))  # type: ignore[arg-type]
        self._clock = clock or SystemClock()
        self._progress = progress
        self._runs = 0
        self._published = 0
        self._start = _Start()
        self._soon = SoonStop(self._clock)
        self._newest: int | None = None
        self._current: RunT | None = None

    def __repr__(self) -> str:
        return brief(self, self.store.url)

    def run(self, flow: Dataflow) -> JobOutcome:
        """Run a dataflow until it ends or stops; after failures, resume from the newest checkpoint.

        A rescale requested while it runs does not end it: the job continues from there.

        An empty store begins with the content of ``start_from``, if given. Raises ``InvalidInput``
        for an unclaimed savepoint, ``JobFailed`` after too many failures, with the last as its
        cause, ``RestoreRefused`` if the newest checkpoint does not fit, and ``PublishConflict`` if
        another run has taken over the job.
        """
        try:
            return self._run(flow)
        finally:
            self._soon = SoonStop(self._clock)

    def stop_soon(self, *, grace: float | datetime.timedelta = GRACE_SECONDS) -> None:
        """Ask the running job to take a checkpoint now, commit it and end.

        Any thread or signal handler may call it; it returns at once, and calling it again changes
        nothing. The checkpoint is an ordinary one: :meth:`run` returns an outcome with
        ``interrupted``, and a start without any option resumes. If there is no checkpoint within
        ``grace`` (seconds, or a timedelta), :meth:`run` raises ``GraceExceeded``, which names the
        newest one. A stop or end that is under way comes first. Called before :meth:`run`, it ends
        the next run at its start.
        """
        self._soon.ask(grace)

    def forward_sigterm(self, heard: Callable[[], None]) -> Callable[[], None]:  # noqa: ARG002 - other executors do
        """Call ``heard`` for each SIGTERM that a process of the executor gets instead of this one.

        Returns a function that ends this. Called by the main thread, before the job runs.
        """
        return lambda: None

    @property
    def newest(self) -> int | None:
        """The newest checkpoint that the runtime knows of its job; None before the first."""
        run = self._current
        return self._newest if run is None else run.newest

    def _run(self, flow: Dataflow) -> JobOutcome:
        restarts = 0
        failures = RestartPolicy(flow.job_id, self.options.max_restarts)
        self._start = self._new_start(flow)
        while True:
            try:
                outcome = self._once(flow)
                if not isinstance(outcome, JobPaused):
                    return replace(outcome, restarts=restarts)
            except FATAL:
                raise
            except (CheckpointError, OSError) as error:
                self._soon.check(self.newest)
                self._note_cost()
                if self._fell_back(error):
                    continue
                refused = isinstance(error, InvalidInput | RestoreRefused)
                failed = error if refused else failures.on_failure(error, self._published)
                if failed is not None:
                    for answer in self._start.rescales.end_failed(failed):
                        answer_request(self.store, answer)
                    raise failed from failed.__cause__
                restarts += 1
                delay_us = self.options.restart_delay_us * 2 ** max(failures.counted - 1, 0)
                if not self._soon.is_asked:
                    self._clock.wait_until(self._clock.now_us() + delay_us)

    def _once(self, flow: Dataflow) -> JobOutcome:
        begun = self._begin(flow)
        if isinstance(begun, JobOutcome):
            return begun
        shown_us = self._clock.now_us()
        try:
            while begun.step():
                if self._progress is not None and begun.has_progress(shown_us):
                    shown_us = self._clock.now_us()
                    self._progress(begun.progress())
        except BaseException:
            begun.close()
            raise
        else:
            if self._progress is not None:
                self._progress(begun.progress())
        finally:
            self._published += begun.published
            # End the changing line before anybody else writes to the terminal.
            getattr(self._progress, "end", lambda: None)()
        assert begun.outcome is not None
        return begun.outcome

    def begin(self, flow: Dataflow) -> RunT | JobOutcome:
        """Begin one run, which the caller steps. Raises as :meth:`run`, without starting again.

        Returns an outcome if the newest checkpoint is that of a stop, or everything had finished.
        If the outcome of a run is a ``JobPaused``, begin the next: it goes on after a rescale.
        """
        if self._current is not None and self._current.outcome is not None:
            self._soon = SoonStop(self._clock)
        self._start = self._new_start(flow)
        return self._begin(flow)

    def _new_start(self, flow: Dataflow) -> _Start:
        this = _Start()
        this.rescales = Rescales(lambda permit, sizes: self._restore(flow, permit, this, sizes))
        return this

    def _restore(self, flow: Dataflow, permit: CommitPermit | None, this: _Start, sizes: Mapping[str, int]) -> Restored:
        """Compile the job as it starts from a checkpoint, at these parallelisms by uid."""
        options = at_parallelism(self.options, flow, sizes)
        begins_here = permit is None or permit.ref.checkpoint_id == this.resumes_to
        return restore(flow, permit, options, again=not begins_here)

    def _begin(self, flow: Dataflow) -> RunT | JobOutcome:
        """Begin a run; one that cannot begin after a rescale goes on at the old parallelism."""
        try:
            return self._begin_run(flow)
        except FATAL:
            raise
        except (CheckpointError, OSError) as error:
            if not self._fell_back(error):
                raise
            return self._begin_run(flow)

    def _fell_back(self, error: Exception) -> bool:
        """Whether a rescale has failed by this error, so that the job goes on as before it."""
        discarded = isinstance(error, RunDiscarded) and not error.counted
        return not discarded and self._start.rescales.fell_back(error)

    def _begin_run(self, flow: Dataflow) -> RunT | JobOutcome:
        options, this = self.options, self._start
        if this.origin is None:
            this.origin = origin_properties(
                options.program, host_and_user=options.origin, spark_application=self._spark_application()
            )
        permit = start(self.store, flow, options, this.origin)
        if this.schedule is None:
            this.schedule = decide_keep(self.store, permit, options.schedule, claim=options.claim)
        if this.resumes_to is None:
            this.resumes_to = permit.ref.checkpoint_id if permit else 0
        places = Places.of(self.store, flow, options.schedule)
        sizes = partial(parallelism_of, flow, parallelism=options.parallelism, per_operator=options.per_operator)
        this.rescales.begin(
            permit, lambda stop: save_stop(self.store, stop, places), lambda record: sizes(previous=record)
        )
        restored = self._restore(flow, permit, this, this.rescales.in_force)
        since_us = 0 if this.failed_at_us is None else self._clock.now_us() - this.failed_at_us
        origin = {**this.origin, **this.cost.plus(since_us, 0, 0).properties}
        restored = replace(restored, origin=origin, rescales=this.rescales)
        self._current, self._newest = None, permit.ref.checkpoint_id if permit else None
        sinks = sinks_of(flow)
        retries = self._commit_before_start(permit, restored, sinks)
        outcome = self._ended_before(permit, restored, sinks, retries)
        if outcome is not None:
            return outcome
        if self._soon.is_asked:
            return self._soon.outcome(self._newest, taken=False)
        self._say_parallelism(permit, restored)
        self._runs += 1
        run = self._make_run(restored, replace(options, schedule=this.schedule), retries)
        run.cost = this.cost
        for sentence in () if this.job_warned else restored.job.warnings:
            run.warn(sentence)
        this.job_warned = True
        if this.failed_at_us is not None:
            run.cost = this.cost = this.cost.plus(self._clock.now_us() - this.failed_at_us, 0, 0)
            this.failed_at_us = None
            run.say(
                f"the job goes on from {f'checkpoint {self._newest}' if self._newest else 'its begin'}; since it "
                f"was started, {this.cost.words}"
            )
        self._current = run
        return run

    def _note_cost(self) -> None:
        """Note the cost of a lost run until now."""
        run, this = self._current, self._start
        if run is not None and this.failed_at_us is None:
            this.cost, this.failed_at_us = run.cost_of_failure(), self._clock.now_us()

    def _say_parallelism(self, permit: CommitPermit | None, restored: Restored) -> None:
        """Log, once per start, how the program's parallelism differs from the record's."""
        said = parallelism_words(permit.record, restored.job.graph) if permit is not None else ""
        if said and not self._start.parallelism_said and not self._start.rescales.in_force:
            self._start.parallelism_said = True
            logger.warning("job %r: %s", restored.job.flow.job_id, said)

    @abstractmethod
    def _make_run(self, restored: Restored, options: Options, retries: Mapping[str, pa.Table]) -> RunT:
        """Make a run with these options; ``retries``: what sinks have put off, by uid."""

    def _spark_application(self) -> str | None:
        """Return the id of the Spark application that runs the job, if one does."""
        return None

    def _commit_before_start(
        self, permit: CommitPermit | None, restored: Restored, sinks: Mapping[str, TwoPhaseCommitSink]
    ) -> Mapping[str, pa.Table]:
        """Commit what the newest checkpoint holds, then let sinks remove what none does."""
        carried = pending_committables(
            permit, restored.job, [uid for uid in sinks if not restored.drops(uid, COMMITTABLES)]
        )
        retries = {} if permit is None else commit(permit, sinks, carried)
        clean(self.store, permit, restored.job, sinks, carried)
        return retries

    def _ended_before(
        self,
        permit: CommitPermit | None,
        restored: Restored,
        sinks: Mapping[str, TwoPhaseCommitSink],
        retries: Mapping[str, pa.Table],
    ) -> JobOutcome | None:
        if permit is None:
            return None
        stop, places = lasting_stop(permit.record), Places.of(self.store, restored.job.flow, self.options.schedule)
        # A job started on a claimed savepoint must go on from there.
        if stop is not None and permit.record.kind is not CheckpointKind.SAVEPOINT:
            resumes = self.options.resume and permit.ref.checkpoint_id == self._start.resumes_to
            if stop.mode is StopMode.DRAIN or not resumes:
                commit_rest(permit, sinks, retries, self._clock)
                self._answer_expired()
                outcome = end_stopped(self.store, permit, stop, places)
                if stop.mode is StopMode.DRAIN:
                    return outcome
                return replace(outcome, sentence=outcome.sentence + ". Run it with resume=True to go on")
            logger.info("job goes on after its stop at checkpoint %s", permit.ref.checkpoint_id)
        if len(restored.finished) == len(restored.job.vertices):
            commit_rest(permit, sinks, retries, self._clock)
            self._answer_expired()
            return end_finished(self.store, permit, places, before=True)
        return None

    def _answer_expired(self) -> None:
        unexpired(self.store, waiting_requests(self.store), self._clock.wall_us(), partial(logger.warning, "%s"))
