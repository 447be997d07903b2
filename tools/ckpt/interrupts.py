"""Ctrl-C in a command: it always ends the command, and never looks like a fault.

Python handles a signal between two instructions, so one that comes just before a blocking read waits until that read ends,
which may be never (a pipe that nobody writes to). And where it comes while a module is imported, the import may turn it into
an ImportError. :class:`Interrupts` sends a signal that was not handled again, and remembers that there was one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from typing import Any, Final

AGAIN_SECONDS: Final = 0.1
"""How long a signal may stay without being handled before it is sent again."""


class Interrupts:
    """A context in the main thread in which SIGINT raises ``KeyboardInterrupt``; ``seen`` once there was one.

    Where SIGINT is ignored, as in a background job of a script, it stays ignored. In other threads it does nothing.
    """

    def __init__(self) -> None:
        self.seen = False
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
                # It interrupts the system call in which the main thread waits.
                with contextlib.suppress(OSError, RuntimeError):
                    signal.pthread_kill(main.ident or 0, signal.SIGINT)
        os.close(read_end)
