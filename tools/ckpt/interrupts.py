"""Ctrl-C always ends a command, and never looks like a fault; so do SIGTERM and SIGHUP.

Two things would spoil this. Python handles a signal between two instructions: one that comes just
before a blocking read waits until the read ends, maybe forever. And an interrupted import may raise
an ImportError. So :class:`Interrupts` repeats unhandled signals and remembers that there was one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any, Final

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
