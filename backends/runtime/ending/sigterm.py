"""What a program does when it is told to end (SIGTERM): a checkpoint, and then its end.

The library installs no handler by itself. A program that wants one runs its job within
:func:`stop_soon_on_sigterm`::

    with stop_soon_on_sigterm(runtime):
        outcome = runtime.run(flow)

Theory of operation. Python runs a handler between two instructions of the main thread, which may
lie in a native call for long. So the handler does nothing. The interpreter writes the number of
each signal into a pipe at once, and a thread reads it: at the first SIGTERM it calls ``stop_soon``,
at the second, and when grace is over and the run has not ended by itself, it ends the process. What
had the pipe before (``ckpt`` has one for Ctrl-C) gets every signal, too.

Signals that came by another process (the JVM of a Spark job) are counted by themselves: one SIGTERM
to a whole group of processes is one, not two.
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
from typing import Any, Final, Protocol

from .stop_soon import GRACE_SECONDS, grace_seconds

TERMINATED: Final = 128 + signal.SIGTERM
"""The exit status of a program that was told to end, and ended without a new checkpoint."""
LAST_SECONDS: Final = 2.0
"""So long after grace the process is ended, if the run has not ended itself."""
_ELSEWHERE: Final = 255
"""In the pipe: a SIGTERM that another process has got."""


def _complain(sentence: str) -> None:
    os.write(sys.stderr.fileno(), f"{sentence}\n".encode())


class Endable(Protocol):
    """What is asked of a runtime."""

    @property
    def newest(self) -> int | None:
        """The newest checkpoint of the job."""

    def stop_soon(self, *, grace: float | datetime.timedelta) -> None:
        pass

    def forward_sigterm(self, heard: Callable[[], None]) -> Callable[[], None]:
        """Call ``heard`` for a SIGTERM to another process, until what is returned is called."""


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
            self._leave(f"what waits for SIGTERM has failed, so the job has ended at once: {error!r}")

    def _watch(self, read_end: int) -> None:
        heard: Counter[int] = Counter()
        until: float | None = None
        while True:
            left = None if until is None else max(until - time.monotonic(), 0)
            if not select.select([read_end], [], [], left)[0]:
                self._leave(
                    f"the job was told to end, and {self._grace:g} s were not enough for a checkpoint and its commits"
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
                self._leave("the job was told to end twice, so it has ended at once")
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
    """Make SIGTERM stop the job of a runtime soon, within a ``with``; Ctrl-C stays as it is.

    The first SIGTERM is :meth:`.Runtime.stop_soon`. A second one, or a run that does not end when
    ``grace`` (seconds, or a timedelta) is over, ends the process at once with status 143, after one
    sentence that says what the newest checkpoint is. ``last_words`` shows it; by default on
    standard error. Raises ``InvalidInput`` if ``grace`` is no such time, or negative.
    """
    return SigtermWatch(runtime, grace=grace, last_words=last_words)
