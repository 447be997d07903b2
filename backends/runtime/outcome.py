"""How runs and jobs end."""

from __future__ import annotations

from dataclasses import dataclass

from stateformat.errors import CheckpointError
from stateformat.model import Stop


@dataclass(frozen=True)
class JobOutcome:
    """A job has ended: FINISHED."""

    checkpoint_id: int | None
    """The newest checkpoint of its store; None where none was taken."""
    sentence: str
    stop: Stop | None = None
    """The stop at which it ended; None for a job whose input has ended."""
    savepoint: str | None = None
    """The URL of a stop's savepoint.

    None with a ``stop``: copying failed, ``sentence`` says why.
    """
    restarts: int = 0
    """How often it started again after a failure."""


class JobFailed(CheckpointError):
    """A job has failed too often, or in a way in which it would fail again.

    Its store is as sound as before: run it again once the cause is fixed. ``__cause__`` is the last
    failure, an ``OperatorError`` whose cause is what user code raised.
    """


class RunDiscarded(CheckpointError):
    """A run is discarded, and the job goes on from its newest checkpoint."""

    def __init__(self, message: str, *, counted: bool) -> None:
        super().__init__(message, counted=counted)

    @property
    def counted(self) -> bool:
        return bool(self.details["counted"])
