"""A program that is told to end (SIGTERM): a checkpoint, and then the end of its job.

:class:`SoonStop` is the request that a job end soon, at its next checkpoint. Any thread may make
it, and so may a signal handler, which can interrupt any line of the run itself. So it takes no
lock: it sets a number, and what it wakes is reentrant.

The library installs no handler by itself. A program that wants one runs its job within
:func:`stop_soon_on_sigterm`::

    with stop_soon_on_sigterm(runtime):
        outcome = runtime.run(flow)

Theory of operation. Python runs a handler between two instructions of the main thread, which may be
in a native call for long. So the handler does nothing. The interpreter writes the number of each
signal into a pipe at once, and a thread reads it: at the first SIGTERM it calls ``stop_soon``; at
the second, or when grace is over and the run has not ended by itself, it ends the process. A
previous owner of the pipe (``ckpt`` has one for Ctrl-C) gets every signal too.

Signals that came through another process (the JVM of a Spark job) are counted separately: one
SIGTERM to a whole group of processes is one, not two.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Protocol

from stateformat.errors import InvalidInput

from .reports import GraceExceeded, JobOutcome

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


TERMINATED: Final = 128 + signal.SIGTERM
"""The exit status of a program that was told to end, and ended without a new checkpoint."""
LAST_SECONDS: Final = 2.0
"""How long after grace the process is ended, if the run has not ended by itself."""
_ELSEWHERE: Final = 255
"""The byte in the pipe for a SIGTERM that another process got."""


def _complain(sentence: str) -> None:
    os.write(sys.stderr.fileno(), f"{sentence}\n".encode())


class Endable(Protocol):
    """What is needed of a runtime."""

    @property
    def newest(self) -> int | None:
        """The newest checkpoint of the job."""

    def stop_soon(self, *, grace: float | datetime.timedelta) -> None:
        pass

    def forward_sigterm(self, heard: Callable[[], None]) -> Callable[[], None]:
        """Call ``heard`` for SIGTERMs to other processes until the returned function is called."""


class SigtermWatch:
    """A context, for the main thread, in which SIGTERM makes a runtime stop soon.

    In other threads it does nothing. ``last_words``: shows why the process is ended at once.
    """

    def __init__(
        self,
        runtime: Endable,
        *,
        grace: float | datetime.timedelta = GRACE_SECONDS,
        last_words: Callable[[str], None] = _complain,
    ) -> None:
        self._runtime = runtime
        self._grace = grace_seconds(grace)
        self._last_words = last_words
        self._ends: tuple[int, int] | None = None
        self._before: Any = None
        self._pipe_before = -1
        self._undo: Callable[[], None] = lambda: None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SigtermWatch:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._ends = os.pipe()
        os.set_blocking(self._ends[1], False)
        self._before = signal.signal(signal.SIGTERM, lambda *_: None)
        self._pipe_before = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        self._undo = self._runtime.forward_sigterm(self._heard_elsewhere)
        self._thread = threading.Thread(target=self._keep_watch, args=(self._ends[0],), daemon=True, name="sigterm")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends is not None and self._thread is not None:
            self._undo()
            signal.set_wakeup_fd(self._pipe_before)
            signal.signal(signal.SIGTERM, self._before)
            write_end, self._ends = self._ends[1], None
            os.close(write_end)
            self._thread.join()

    def _heard_elsewhere(self) -> None:
        ends = self._ends
        if ends is not None:
            with contextlib.suppress(OSError):
                os.write(ends[1], bytes([_ELSEWHERE]))

    def _keep_watch(self, read_end: int) -> None:
        """Watch; if that fails, end the process: the handler does nothing, so nobody else would."""
        try:
            self._watch(read_end)
        except Exception as error:
            self._leave(f"the SIGTERM watcher failed, so the job ended at once: {error!r}")

    def _watch(self, read_end: int) -> None:
        heard: Counter[int] = Counter()
        until: float | None = None
        while True:
            left = None if until is None else max(until - time.monotonic(), 0)
            if not select.select([read_end], [], [], left)[0]:
                self._leave(
                    f"the job was asked to end, but {self._grace:g} s were not enough for a checkpoint and its commits"
                )
                continue
            number = os.read(read_end, 1)
            if not number:
                break
            if number[0] != _ELSEWHERE and self._pipe_before >= 0:
                with contextlib.suppress(OSError):
                    os.write(self._pipe_before, number)
            if number[0] not in (signal.SIGTERM, _ELSEWHERE):
                continue
            heard[number[0]] += 1
            if until is None:
                until = time.monotonic() + self._grace + LAST_SECONDS
                self._runtime.stop_soon(grace=self._grace)
            elif heard[number[0]] > 1:
                self._leave("the job was asked to end twice, so it ended at once")
        os.close(read_end)

    def _leave(self, why: str) -> None:
        newest = self._runtime.newest
        goes_on = "there is no checkpoint, and the next start begins anew"
        if newest is not None:
            goes_on = f"the newest checkpoint is {newest}, and the next start goes on from it"
        try:
            self._last_words(f"{why}; {goes_on}")
        finally:
            os._exit(TERMINATED)


def stop_soon_on_sigterm(
    runtime: Endable,
    *,
    grace: float | datetime.timedelta = GRACE_SECONDS,
    last_words: Callable[[str], None] = _complain,
) -> SigtermWatch:
    """Return a context manager in which SIGTERM stops a runtime's job soon; Ctrl-C is unchanged.

    The first SIGTERM calls :meth:`.Runtime.stop_soon`. A second one, or a run that has not ended
    after ``grace`` (seconds, or a timedelta), ends the process at once with status 143, after one
    sentence that names the newest checkpoint. ``last_words`` shows it, by default on standard
    error. Raises ``InvalidInput`` if ``grace`` is not such a time, or negative.
    """
    return SigtermWatch(runtime, grace=grace, last_words=last_words)
