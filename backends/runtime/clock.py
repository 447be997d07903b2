"""What time it is for an executor: the system's, or one that goes on by itself."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Microseconds since an origin of its own; never goes back."""

    def now_us(self) -> int:
        """Now."""

    def wait_until(self, at_us: int) -> None:
        """Return not before ``at_us``."""

    def tick(self) -> None:
        """One event has been dealt with."""


class SystemClock:
    """The system's monotonic clock."""

    def now_us(self) -> int:
        """Now."""
        return time.monotonic_ns() // 1000

    def wait_until(self, at_us: int) -> None:
        """Sleep."""
        time.sleep(max(at_us - self.now_us(), 0) / 1e6)

    def tick(self) -> None:
        """Time goes on without us."""


class VirtualClock:
    """A clock that goes on by a fixed time for each event and jumps over what is waited for: the same run, the same times."""

    def __init__(self, us_per_event: int = 1000) -> None:
        self._now_us = 0
        self._us_per_event = us_per_event

    def now_us(self) -> int:
        """Now."""
        return self._now_us

    def wait_until(self, at_us: int) -> None:
        """Jump."""
        self._now_us = max(self._now_us, at_us)

    def tick(self) -> None:
        """Go on."""
        self._now_us += self._us_per_event
