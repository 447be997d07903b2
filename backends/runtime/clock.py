"""The clock of an executor: the system's, or a virtual one."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from stateformat.graph import brief

VIRTUAL_ORIGIN_US: Final = 1_767_225_600_000_000
"""What the wall clock of a virtual clock shows when it begins: 1 January 2026, UTC."""
LOOK_EVERY_US = 50_000
"""How often a run with nothing else to do checks on work in a thread."""


BEHIND_US: Final = 60_000_000
"""How far a clock must be behind its checkpoint to be worth a warning."""


class Work(Protocol):
    """Work done in the background of a run."""

    @property
    def looked_at_us(self) -> int:
        """When to check again whether it is done."""

    def is_done(self) -> bool:
        pass

    def finish(self) -> None:
        """Return when it is done."""


class Clock(Protocol):
    """A monotonic clock in µs, with an arbitrary origin; and the wall clock."""

    def now_us(self) -> int:
        pass

    def wall_us(self) -> int:
        """Return µs since 1970, UTC. May go back if somebody sets the clock."""

    def wait_until(self, at_us: int) -> None:
        """Return at ``at_us``, or earlier if woken."""

    def wake(self) -> None:
        """End a wait of the run early. Any thread or signal handler may call it."""

    def tick(self) -> None:
        """Count an event; called after each one."""

    def beside(self, work: Callable[[], None]) -> Work:
        """Do work in the background of the run. ``work`` must not raise."""


class ProcessingTime:
    """The wall-clock time as operators see it: it never goes back.

    ``seen_us``: the latest time that the restored checkpoint has seen. The time stands still while
    the wall clock is behind it.
    """

    def __init__(self, clock: Clock, seen_us: int = 0) -> None:
        self._clock = clock
        self._behind_us = max(seen_us - clock.wall_us(), 0)
        self.now_us = max(seen_us, clock.wall_us())
        """The time of the current step or epoch."""

    def advance(self) -> int:
        """Begin the next step or epoch; return its time."""
        self.now_us = max(self.now_us, self._clock.wall_us())
        return self.now_us

    @property
    def behind_words(self) -> str:
        """Return a warning if the wall clock was far behind at the start; empty otherwise."""
        if self._behind_us < BEHIND_US:
            return ""
        return (
            f"This machine's clock is {self._behind_us / 1e6:,.0f} s behind what the checkpoint has seen. Processing "
            "time stands still, and no timer of it fires, until the clock has caught up. Set the clock."
        )

    def clock_at(self, time_us: int) -> int:
        """Return what ``Clock.now_us`` will be when the wall clock shows this time."""
        return self._clock.now_us() + max(time_us - self._clock.wall_us(), 0)


class _Thread:
    """Work in a thread."""

    def __init__(self, work: Callable[[], None], clock: Clock) -> None:
        self._clock = clock
        self._thread = threading.Thread(target=work, name="beside a run", daemon=True)
        self._thread.start()

    @property
    def looked_at_us(self) -> int:
        return self._clock.now_us() + LOOK_EVERY_US

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join()


class _Later:
    """Work that a later step of the run itself does."""

    def __init__(self, work: Callable[[], None], clock: Clock, at_us: int) -> None:
        self._work: Callable[[], None] | None = work
        self._clock = clock
        self.looked_at_us = at_us

    def is_done(self) -> bool:
        if self._clock.now_us() >= self.looked_at_us:
            self.finish()
        return self._work is None

    def finish(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


class SystemClock:
    """The system's monotonic clock. Background work runs in a thread of its own."""

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __repr__(self) -> str:
        return brief(self)

    def now_us(self) -> int:
        return time.monotonic_ns() // 1000

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    def wait_until(self, at_us: int) -> None:
        with contextlib.suppress(queue.Empty):
            self._wakes.get(timeout=max(at_us - self.now_us(), 0) / 1e6)

    def wake(self) -> None:
        self._wakes.put(None)  # Reentrant, unlike an Event: a handler may interrupt the wait itself.

    def tick(self) -> None:
        pass

    def beside(self, work: Callable[[], None]) -> Work:
        return _Thread(work, self)


class VirtualClock:
    """Advances by a fixed time for each event and skips waits, so that runs are repeatable.

    Background work takes ``us_per_work``; the run does it at the end of that time.
    """

    def __init__(self, us_per_event: int = 1000, us_per_work: int = 20_000) -> None:
        self._now_us = 0
        self._us_per_event = us_per_event
        self._us_per_work = us_per_work

    def __repr__(self) -> str:
        return brief(self, f"{self._now_us:,} us")

    def now_us(self) -> int:
        return self._now_us

    def wall_us(self) -> int:
        return VIRTUAL_ORIGIN_US + self._now_us

    def wait_until(self, at_us: int) -> None:
        self._now_us = max(self._now_us, at_us)

    def wake(self) -> None:
        pass

    def tick(self) -> None:
        self._now_us += self._us_per_event

    def beside(self, work: Callable[[], None]) -> Work:
        return _Later(work, self, self._now_us + self._us_per_work)
