"""How runs and jobs end, and whether a job starts again after a failure."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from stateformat.errors import CheckpointError, ErrorKind
from stateformat.model import Stop

from ...dataflow.chained_operator import OperatorError, chain_of, is_for_good, may_pass, signature

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
