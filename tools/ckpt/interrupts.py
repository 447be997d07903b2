"""How signals end a command: always, without looking like a fault, also within a user's SQL.

Ctrl-C, SIGTERM and SIGHUP: two things would spoil it. Python handles a signal between two
instructions: one that comes just before a blocking read waits until the read ends, maybe forever.
And an interrupted import may raise an ImportError. So :class:`Interrupts` repeats unhandled signals
and remembers that there was one.

Commands with a user's SQL run it in a child process that can be stopped, and that has a limit.
DuckDB does not look at signals inside one call of a function, and its own limit does not count the
texts that such a call makes. So the parent, which does nothing else, ends the child when a signal
does not, and when its memory grows beyond :data:`MEMORY_BYTES`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from .exit_status import MISUSE, PROBLEMS, Failure, interrupted

AGAIN_SECONDS: Final = 0.1
"""An unhandled signal is sent again after this time."""
ONCE_SECONDS: Final = 1.0
"""``timeout`` sends its signal twice; the second must not interrupt what the first made the command
clean up."""
ENDING: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Interrupts:
    """A context, for the main thread, in which :data:`ENDING` raise ``KeyboardInterrupt``.

    A signal that is ignored (SIGINT in a background job of a script, SIGHUP under ``nohup``) stays
    ignored. In other threads it does nothing.
    """

    def __init__(self) -> None:
        self.seen = 0
        """The number of the signal that came first; 0: none has."""
        self._seen_at = 0.0
        self._before: dict[int, Any] = {}
        self._ends: tuple[int, int] | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        heard = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
        if heard:
            self._ends = os.pipe()
            os.set_blocking(self._ends[1], False)
            self._before = {number: signal.signal(number, self._raise) for number in heard}
            signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
            threading.Thread(target=self._insist, args=(self._ends[0],), daemon=True, name="ckpt-interrupts").start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends is not None:
            signal.set_wakeup_fd(-1)
            for number, before in self._before.items():
                signal.signal(number, before)
            os.close(self._ends[1])

    def _raise(self, number: int, _frame: object) -> None:
        again = self.seen and number != signal.SIGINT and time.monotonic() - self._seen_at < ONCE_SECONDS
        if not again:
            self.seen, self._seen_at = self.seen or number, time.monotonic()
            raise KeyboardInterrupt

    def _insist(self, read_end: int) -> None:
        main = threading.main_thread()
        pause = threading.Event()
        while got := os.read(read_end, 1):
            number = got[0]
            # A job has a handler of its own for SIGTERM.
            ours = number == signal.SIGINT or signal.getsignal(number) == self._raise
            while number in self._before and ours and not pause.wait(AGAIN_SECONDS) and not self.seen:
                # This interrupts the system call in which the main thread waits.
                with contextlib.suppress(OSError, RuntimeError):
                    signal.pthread_kill(main.ident or 0, number)
        os.close(read_end)


MEMORY_BYTES: Final = 768 << 20
"""What the child may hold that is no file of a disk; looked at :data:`LOOK_SECONDS` apart."""
LOOK_SECONDS: Final = 0.02
PASSED_ON_SECONDS: Final = 0.5
"""A signal is passed on if the child has not ended by then: a terminal sends it to both."""
KILLED_SECONDS: Final = 3.0
"""The child is killed if it has not ended by then after a signal."""


def runs_sql(arguments: Sequence[str]) -> bool:
    """Whether a command line has SQL of the user's; where this cannot be: False."""
    asks = "sql" in arguments[:1] or any(one == "--where" or one.startswith("--where=") for one in arguments)
    return asks and hasattr(os, "fork") and threading.active_count() == 1


def confined() -> int | Failure | None:
    """Return None in a child, which is to run the command; in the parent how the child has ended:
    its exit status, or why it was killed.
    """
    mine, other = os.pipe(), os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if not child:
        os.close(mine[0])  # `mine[1]` stays open as long as the child lives.
        os.close(other[1])
        threading.Thread(target=_end_with, args=(other[0],), daemon=True, name="ckpt-parent").start()
        return None
    os.close(mine[1])
    os.close(other[0])
    try:
        return _watched(child, mine[0])
    finally:
        os.close(mine[0])
        os.close(other[1])


def _end_with(read_end: int) -> None:
    """End this process when its parent has."""
    os.read(read_end, 1)
    os._exit(1)


def _watched(child: int, read_end: int) -> int | Failure:
    heard: list[tuple[int, float]] = []
    before = {
        number: signal.signal(number, lambda number, _: heard.append((number, time.monotonic())))
        for number in ENDING
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    passed_on = too_large = False
    try:
        while not select.select([read_end], [], [], LOOK_SECONDS)[0]:
            since = time.monotonic() - heard[0][1] if heard else 0.0
            if since >= PASSED_ON_SECONDS and not passed_on:
                passed_on = True
                os.kill(child, heard[0][0])
            too_large = _memory_bytes(child) > MEMORY_BYTES
            if too_large or since >= KILLED_SECONDS:
                os.kill(child, signal.SIGKILL)
                break
        _, status = os.waitpid(child, 0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    if heard:
        return interrupted("nothing was changed", heard[0][0])
    if too_large:
        return Failure(
            MISUSE,
            "limit_exceeded",
            f"the query took more than {MEMORY_BYTES >> 20} MiB of memory and was stopped. Let it make smaller "
            "values and keep fewer rows at once, or write the states with `ckpt export`",
        )
    name = signal.Signals(os.WTERMSIG(status)).name
    return Failure(PROBLEMS, "internal_error", f"the process that ran the query was ended by {name}")


def _memory_bytes(process: int) -> int:
    """The anonymous memory of a process; 0 where the system does not tell."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as status:  # noqa: PTH123 - often
            return int(status.read().partition("RssAnon:")[2].split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
