"""What users see of a job: progress, the cost of failures, how it ended, and if it restarts."""

from __future__ import annotations

import json
import logging
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, TextIO

from stateformat.errors import CheckpointError, ErrorKind
from stateformat.graph import brief
from stateformat.model import FAILURES_PROPERTY, Stop
from stateformat.words import age, label, plural, precise_moment, size

from ..dataflow.chained_operator import OperatorError, chain_of, is_for_good, may_pass, signature
from ..dataflow.source_reader import Holder

_TOLD_MAX: Final = 2**53 - 1


@dataclass(frozen=True)
class FailureCost:
    """The cost of all failures since the program began to run the job."""

    failures: int = 0
    """Runs that were lost, and tries of epochs on Spark."""
    lost_us: int = 0
    """From the newest checkpoint, or the beginning of a failed try, until the job went on."""
    rows_again: int = 0
    """Rows that were read after the newest checkpoint, as far as known."""

    def plus(self, lost_us: int, rows_again: int, failures: int = 1) -> FailureCost:
        """Return the cost with one more failure."""
        return FailureCost(self.failures + failures, self.lost_us + lost_us, self.rows_again + rows_again)

    @property
    def words(self) -> str:
        """Return the cost in words; empty without a failure."""
        if not self.failures:
            return ""
        count = "1 failure" if self.failures == 1 else f"{self.failures:,} failures"
        again = "1 row" if self.rows_again == 1 else f"{self.rows_again:,} rows"
        return f"{count} cost {self.lost_us / 1e6:.1f} s and {again} read again"

    @property
    def properties(self) -> dict[str, str]:
        """Return the property of the records that follow a failure."""
        return {FAILURES_PROPERTY: json.dumps(asdict(self), separators=(",", ":"))} if self.failures else {}


def cost_in(properties: dict[str, str]) -> FailureCost:
    """The cost that a record tells; none where it tells nothing, or nothing that can be read."""
    try:
        found = json.loads(properties.get(FAILURES_PROPERTY, "{}"))
        told = [found[name] for name in ("failures", "lost_us", "rows_again")]
    except (ValueError, TypeError, KeyError, RecursionError):
        return FailureCost()
    # A property is text that anybody may have written.
    sound = all(type(number) is int and 0 <= number <= _TOLD_MAX for number in told)
    return FailureCost(*told) if sound else FailureCost()


HELD_US: Final = 60_000_000
"""How long an input must have held back event time to be worth a warning."""
LOOK_EVERY_US: Final = 5_000_000


class TimeWatch:
    """Looks for the input that is behind the others, which have gone on.

    ``idle_after_us``: the value that the user gave for each source with event time, by uid.
    """

    def __init__(self, idle_after_us: Mapping[str, int | None]) -> None:
        self.sources = idle_after_us
        self.next_us = 0
        """When to look again, by the executor's clock."""
        self._held: tuple[str, str | None, int | None] | None = None
        """The source and split that is behind, and its watermark."""
        self._since_us = 0
        self._furthest_us = 0
        """Where the others were at that time."""
        self._told: tuple[str, str | None] | None = None

    def look(self, now_us: int, readers: Iterable[tuple[str, Holder]]) -> str | None:
        """Return a warning if the input that is behind is not the one of the last time.

        ``readers``: those that run and are not idle, with the uid of their source.
        """
        self.next_us = now_us + LOOK_EVERY_US
        known = list(readers)
        if not known:
            return None
        uid, last = min(known, key=lambda item: _time(item[1].watermark))
        furthest_us = max(_time(max(each.furthest, each.watermark, key=_time)) for _, each in known)
        held = (uid, last.split, last.watermark)
        if held != self._held or furthest_us <= _time(last.watermark):
            self._held, self._since_us, self._furthest_us = held, now_us, furthest_us
            return None
        gone_on = last.watermark is None or furthest_us > self._furthest_us
        if now_us - self._since_us < HELD_US or not gone_on or self._told == held[:2]:
            return None
        self._told = held[:2]
        return self._words(uid, last, furthest_us, age(0, now_us - self._since_us))

    def _words(self, uid: str, last: Holder, furthest_us: int, long: str) -> str:
        what = f"source {uid!r}" if last.split is None else f"split {label(last.split)!r} of source {uid!r}"
        if last.watermark is None:
            stands, why = f"Event time has not begun for {long}", "has had no row"
        else:
            stands, why = f"Event time has stood at {precise_moment(last.watermark)} for {long}", "has had no later row"
        idle_after_us = self.sources.get(uid)
        advice = (
            "If it may be without rows, give the source idle_after=."
            if idle_after_us is None
            else f"It does so until it has been without rows for {age(0, idle_after_us)}."
        )
        return (
            f"{stands}: {what} {why}, and others are at {precise_moment(furthest_us)}. Windows and "
            f"timers wait for it. {advice}"
        )


def _time(watermark: int | None) -> int:
    return -(2**63) if watermark is None else watermark


logger = logging.getLogger(__name__)

CHECKPOINTS_TO_FORGIVE = 10
"""After so many a failure is no longer counted.

One would not do: what fails again and again may publish in between.
"""


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended: FINISHED."""

    checkpoint_id: int | None
    """The newest checkpoint of its store; None if none was taken."""
    sentence: str
    stop: Stop | None = None
    """The stop that ended it; None for a job whose input ended."""
    savepoint: str | None = None
    """The URL of the stop's savepoint.

    None with a ``stop``: the copy failed; ``sentence`` says why.
    """
    restarts: int = 0
    """How often it restarted after a failure."""
    interrupted: bool = False
    """Whether :meth:`.Runtime.stop_soon` ended it; a start without any option resumes it."""


class JobPaused(JobOutcome):
    """No end: a run has stopped, and the next one goes on from there, at another parallelism."""


class JobFailed(CheckpointError):
    """A job failed too often, or in a way that would repeat.

    Its store is intact: run the job again once the cause is fixed. ``__cause__`` is the last
    failure; if user code raised it, an ``OperatorError`` with that exception as its cause.
    """


class GraceExceeded(CheckpointError):
    """A job that was to stop soon ended without a new checkpoint when its time was up.

    Its store is intact. ``details`` has ``checkpoint_id``, the newest (None if there is none), and
    ``grace_us``.
    """

    default_kind = ErrorKind.TIME_IS_UP


class RunDiscarded(CheckpointError):
    """A run is discarded, and the job resumes from its newest checkpoint."""

    def __init__(self, message: str, *, counted: bool) -> None:
        super().__init__(message, counted=counted)

    @property
    def counted(self) -> bool:
        return bool(self.details["counted"])


class RestartPolicy:
    """Counts the failures of one job; the ``counted`` ones count against ``max_restarts`` now."""

    def __init__(self, job_id: str, max_restarts: int) -> None:
        self.counted = 0
        self._job_id = job_id
        self._max_restarts = max_restarts
        self._forgiven_at = 0
        self._last: tuple[str, ...] | None = None
        self._last_published = 0

    def on_failure(self, error: Exception, published: int) -> JobFailed | None:
        """Returns the job's failure, with its cause, unless the job is to start again.

        ``published``: how many checkpoints the job's runs had published. Logs an operator's
        exception with its trace, once.
        """
        if published >= self._forgiven_at:
            self.counted = 0
        if isinstance(error, RunDiscarded) and not error.counted:
            logger.warning("job %r starts again from its newest checkpoint: %s", self._job_id, error)
            return None
        self.counted += 1
        self._forgiven_at = published + CHECKPOINTS_TO_FORGIVE
        cause = error.__cause__ if isinstance(error, RunDiscarded) and error.__cause__ is not None else error
        found, before = signature(cause), (self._last, self._last_published)
        same = before == (found, published)
        self._last, self._last_published = found, published
        if not same and any(isinstance(one, OperatorError) for one in chain_of(cause)):
            logger.error("job %r: %s", self._job_id, error, exc_info=cause)
        sentence = self._verdict(error, cause, same=same)
        if sentence is None:
            logger.warning("job %r starts again from its newest checkpoint: %s", self._job_id, error)
            return None
        said = f"job {self._job_id!r} {sentence}".removesuffix(".")
        failed = JobFailed(f"{said}. What it has published stands: fix the cause and run it again")
        failed.__cause__ = cause
        return failed

    def _verdict(self, error: Exception, cause: BaseException, *, same: bool) -> str | None:
        """Return why the job must not start again; None if it may."""
        if is_for_good(cause):
            return f"failed, and retrying cannot help: {error}"
        # A run that was discarded without a cause says nothing of what was raised: time ran out, or
        # a publication failed.
        known = not isinstance(cause, RunDiscarded)
        if same and known and not may_pass(cause):
            return f"failed twice in the same way with no checkpoint in between, so it is not tried again: {error}"
        if self.counted > self._max_restarts:
            return (
                f"failed {self.counted} times within a few checkpoints, and {self._max_restarts} restarts are allowed; "
                f"the last time: {error}"
            )
        return None


@dataclass(frozen=True)
class Progress:
    """The state of a job at one moment."""

    job_id: str
    elapsed_us: int
    """The time since the run began, by the executor's clock."""
    rows_read: int
    """The rows that all sources have read in this run."""
    checkpoint_id: int | None
    """The newest published checkpoint; None before the first."""
    state_rows: int
    """The rows of state in that checkpoint."""
    state_bytes: int
    running: int
    """The number of running tasks."""
    finished: int
    """The number of finished tasks."""
    watermark: int | None
    """The lowest of all sources with event time, µs; None while one is unknown, or without any."""
    watermarks: Mapping[str, int | None] = field(default_factory=dict)
    """By uid of a source, the lowest watermark of its tasks, µs.

    None without event time, or before it is known.
    """
    late_rows: int = 0
    """The late rows that operators have dropped since the job began."""
    warnings: tuple[str, ...] = ()
    """The warnings since the last progress."""
    news: tuple[str, ...] = ()
    """What happened to the job since the last progress, such as a rescale."""
    parallelism: int = 0
    """The highest of all operators."""
    failures: int = 0
    """Runs and attempts of epochs that failed since the program started."""
    lost_us: int = 0
    """The time lost by these failures."""
    rows_again: int = 0
    """Rows that had to be read again because of them, as far as known."""

    def line(self) -> str:
        checkpoint = "no checkpoint yet" if self.checkpoint_id is None else f"checkpoint {self.checkpoint_id}"
        return (
            f"{self.job_id}: {self.elapsed_us / 1e6:.1f} s, {plural(self.rows_read, 'row')} read, {checkpoint} "
            f"({plural(self.state_rows, 'row')}, {size(self.state_bytes)}), "
            f"{plural(self.running, 'task')} run{self._rest}"
        )

    @property
    def _rest(self) -> str:
        ended = f", {self.finished} finished" if self.finished else ""
        cost = FailureCost(self.failures, self.lost_us, self.rows_again).words
        late = late_words(self.late_rows) if self.late_rows else ""
        return ended + "".join(f", {each}" for each in (late, cost) if each)


@dataclass(frozen=True)
class EpochProgress(Progress):
    """A job after an epoch on Spark."""

    epoch: int = 0
    """The number of the epoch in this run, from 1."""
    rows_epoch: int = 0
    """Rows that sources have read in it."""
    sent_bytes: int = 0
    """Bytes of frames between tasks."""
    written_bytes: int = 0
    """Bytes of new segments in its checkpoint."""
    kept: int = 0
    """Tasks that found their state in their worker."""
    caught_up: int = 0
    """Tasks that found an older state there."""
    restored: int = 0
    """Tasks that read their state."""
    tries: int = 1
    """How often the epoch was run."""
    planning_us: int = 0
    """Before Spark's job."""
    spark_us: int = 0
    publish_us: int = 0
    commit_us: int = 0

    def line(self) -> str:
        checkpoint = "no checkpoint" if self.checkpoint_id is None else f"checkpoint {self.checkpoint_id}"
        took = (self.planning_us + self.spark_us + self.publish_us + self.commit_us) / 1e6
        return (
            f"{self.job_id}: epoch {self.epoch}, {plural(self.rows_epoch, 'row')} in {took:.1f} s, {checkpoint} "
            f"({plural(self.state_rows, 'row')}, +{size(self.written_bytes)}), "
            f"{plural(self.running, 'task')}{self._rest}"
        )


def late_words(count: int) -> str:
    """Return the number of late rows in words."""
    return f"{count:,} late {'row' if count == 1 else 'rows'} dropped"


class ProgressLog:
    """Writes progress as JSON lines with all fields (docs/json.md)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, progress: Progress) -> None:
        self._stream.write(json.dumps({"kind": type(progress).__name__, **asdict(progress)}) + "\n")
        self._stream.flush()


COLUMNS: Final = 78
"""The longest line on a terminal."""


class ProgressLine:
    """Writes progress: on a terminal one changing line, elsewhere a line per checkpoint."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._shown: int | None = None

    def __repr__(self) -> str:
        return brief(self)

    def __call__(self, progress: Progress) -> None:
        start = "\r\x1b[K" if self._live else ""
        said = [f"warning: {warning}" for warning in progress.warnings]
        for sentence in [*said, *(f"{progress.job_id}: {news}" for news in progress.news)]:
            lines = textwrap.wrap(sentence, COLUMNS, break_long_words=False, break_on_hyphens=False)
            self._stream.write(start + "\n".join(lines if self._live else [sentence]) + "\n")
        if self._live:
            line = progress.line()
            self._stream.write("\r\x1b[K" + (line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"))
        elif progress.checkpoint_id != self._shown:
            self._stream.write(progress.line() + "\n")
        self._shown = progress.checkpoint_id
        self._stream.flush()

    def end(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
