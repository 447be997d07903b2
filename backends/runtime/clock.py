"""The clock of an executor: the system's, or a virtual one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Microseconds since an origin of its own; never goes back."""

    def now_us(self) -> int:
        pass

    def wait_until(self, at_us: int) -> None:
        """Return not before ``at_us``."""

    def tick(self) -> None:
        """Called after each event."""


class SystemClock:
    """The system's monotonic clock."""

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wait_until(self, at_us: int) -> None:
        time.sleep(max(at_us - self.now_us(), 0) / 1e6)

    def tick(self) -> None:
        pass


class VirtualClock:
    """Advances by a fixed time for each event and jumps over waits, so runs can be repeated."""

    def __init__(self, us_per_event: int = 1000) -> None:
        self._now_us = 0
        self._us_per_event = us_per_event

    def now_us(self) -> int:
        return self._now_us

    def wait_until(self, at_us: int) -> None:
        self._now_us = max(self._now_us, at_us)

    def tick(self) -> None:
        self._now_us += self._us_per_event
