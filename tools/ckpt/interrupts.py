"""Ctrl-C always ends a command, and never looks like a fault.

Two things would spoil this. Python handles a signal between two instructions: one that comes just
before a blocking read waits until the read ends, maybe forever. And an interrupted import may raise
an ImportError. So :class:`Interrupts` repeats unhandled signals and remembers that there was one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any, Final

AGAIN_SECONDS: Final = 0.1
"""An unhandled signal is sent again after this time."""


class Interrupts:
    """A context, for the main thread, in which SIGINT raises ``KeyboardInterrupt``.

    An ignored SIGINT (a background job of a script) stays ignored. In other threads it does
    nothing.
    """

    def __init__(self) -> None:
        self.seen = False
        """Whether there was a SIGINT."""
        self._before: Any = None
        self._ends: tuple[int, int] | None = None

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return self
        self._ends = os.pipe()
        os.set_blocking(self._ends[1], False)
        self._before = signal.signal(signal.SIGINT, self._raise)
        signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        threading.Thread(target=self._insist, args=(self._ends[0],), daemon=True, name="ckpt-interrupts").start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGINT, self._before)
            os.close(self._ends[1])

    def _raise(self, *_: object) -> None:
        self.seen = True
        raise KeyboardInterrupt

    def _insist(self, read_end: int) -> None:
        main = threading.main_thread()
        pause = threading.Event()
        while number := os.read(read_end, 1):
            while number[0] == signal.SIGINT and not pause.wait(AGAIN_SECONDS) and not self.seen:
                # This interrupts the system call in which the main thread waits.
                with contextlib.suppress(OSError, RuntimeError):
                    signal.pthread_kill(main.ident or 0, signal.SIGINT)
        os.close(read_end)
