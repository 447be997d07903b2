"""A request that a job end soon, at its next checkpoint, by a program that was told to end.

Any thread may make it, and so may a signal handler, which can interrupt any line of the run itself.
So it takes no lock: it sets a number, and what it wakes is reentrant.
"""

from __future__ import annotations

import datetime
from queue import SimpleQueue
from typing import Final, Protocol

from stateformat.errors import InvalidInput

from ..reports import GraceExceeded, JobOutcome

GRACE_SECONDS: Final = 25.0
"""Kubernetes kills a container 30 seconds after it has asked it to end."""


def grace_seconds(grace: float | datetime.timedelta) -> float:
    """Return the grace in seconds. Raises ``InvalidInput`` if it is not a length of time."""
    seconds = grace.total_seconds() if isinstance(grace, datetime.timedelta) else grace
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        raise InvalidInput(f"grace is {grace!r}; it is a number of seconds, at least 0, or a timedelta")
    return seconds


class Wakeable(Protocol):
    """What is needed of the run's clock."""

    def now_us(self) -> int:
        pass

    def wake(self) -> None:
        pass


class SoonStop:
    """Whether a job must end soon, and until when it may take a checkpoint."""

    def __init__(self, clock: Wakeable) -> None:
        self._clock = clock
        self._grace_us = 0
        self.until_us: int | None = None
        """When grace is over, by the clock; None: the job goes on."""
        self._listeners: list[SimpleQueue[bool]] = []

    @property
    def is_asked(self) -> bool:
        """Whether the job must end soon."""
        return self.until_us is not None

    def ask(self, grace: float | datetime.timedelta) -> None:
        """Ask the job to end soon. A later call changes nothing."""
        seconds = grace_seconds(grace)
        if self.until_us is None:
            self._grace_us = int(1e6 * seconds)
            self.until_us = self._clock.now_us() + self._grace_us
            for listener in tuple(self._listeners):
                listener.put(True)
            self._clock.wake()

    def tell(self, listener: SimpleQueue[bool]) -> None:
        """Put True into a queue when this is requested, or now if it already was."""
        self._listeners.append(listener)
        if self.until_us is not None:
            listener.put(True)

    @property
    def is_over(self) -> bool:
        """Whether it was requested, and grace is over."""
        return self.until_us is not None and self._clock.now_us() >= self.until_us

    def check(self, newest: int | None) -> None:
        """Raise ``GraceExceeded`` if grace is over. ``newest``: the job's newest checkpoint."""
        if self.is_over:
            goes_on = f"the newest is {newest}, and the next start goes on from it"
            raise GraceExceeded(
                f"the job was asked to stop soon but took no checkpoint within {self._grace_us / 1e6:g} s, so it has "
                f"ended without one; {goes_on if newest else 'there is none, and the next start begins anew'}",
                checkpoint_id=newest,
                grace_us=self._grace_us,
            )

    def outcome(self, newest: int | None, *, taken: bool, left: str = "") -> JobOutcome:
        """Return the outcome of a job that has ended this way.

        ``taken``: a run of the job has taken the newest checkpoint. ``left``: what is not committed
        yet, as the end of a sentence.
        """
        if newest is None:
            sentence = (
                "the job was asked to stop soon, and did so before its first checkpoint; the next start begins anew"
            )
        else:
            is_there = "is published and committed" if not left else f"is published; {left}"
            since = "" if taken else ", and nothing was read after it"
            sentence = (
                f"the job was asked to stop soon, and did: checkpoint {newest} {is_there}{since}. The next start goes "
                "on from it, without any option"
            )
        return JobOutcome(newest, sentence, interrupted=True)
