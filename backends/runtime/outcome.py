"""How runs and jobs end."""

from __future__ import annotations

from dataclasses import dataclass

from stateformat.errors import CheckpointError
from stateformat.model import Stop


@dataclass(frozen=True)
class JobOutcome:
    """A job has ended: FINISHED.

    ``checkpoint_id``: the newest of its store, None where none was taken. ``stop``: by whose request it ended there, None for a
    job whose input has ended. ``savepoint``: where the copy of a stop lies; None with a ``stop`` says that it could not be made,
    and ``sentence`` why. ``restarts``: how often failures made it start again.
    """

    checkpoint_id: int | None
    sentence: str
    stop: Stop | None = None
    savepoint: str | None = None
    restarts: int = 0


class JobFailed(CheckpointError):
    """A job has failed more often than it may, or in a way in which it would fail again. Its store is as whole as before: run it
    again when the cause is mended. ``__cause__`` is what failed last: an ``OperatorError``, whose cause is what user code raised.
    """


class RunDiscarded(CheckpointError):
    """One run of a job is given up, and the job goes on from its newest checkpoint. ``counted``: it was a failure of the job."""

    def __init__(self, message: str, *, counted: bool) -> None:
        super().__init__(message, counted=counted)

    @property
    def counted(self) -> bool:
        """Whether it counts against the restarts that are allowed."""
        return bool(self.details["counted"])
