"""``--verbose``: log lines on standard error, and at the end what the command took."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import click

from stateformat import words

from .output import complain

if TYPE_CHECKING:
    from stateformat.storage import Stats

LOGGER: Final = logging.getLogger("stateformat")
_LEVELS: Final[list[int]] = []
"""The level before each call that has not ended; the last to end restores that of the first."""
_LOCK: Final = threading.Lock()


class Watch:
    """Watches one call of ``ckpt``, from before it reads its command line until it ends.

    Without ``--verbose`` it counts nothing and imports nothing.
    """

    def __init__(self) -> None:
        self.level = 0
        """0 is silent; 1 logs events and prints a table; 2 also logs each request to a storage."""
        self.stats: Stats | None = None
        self.effect = "nothing was changed"
        """What an interruption now leaves behind, as the end of a sentence."""
        self._start = time.perf_counter()
        self._command = ""
        # With no handler at all Python would print warnings; commands report what matters
        # themselves.
        self._handler: logging.Handler = logging.NullHandler()
        with _LOCK:
            _LEVELS.append(LOGGER.level)
        self._listen(logging.WARNING)

    def begin(self, level: int, command: str) -> None:
        """Start to watch ``command``, once its command line is read."""
        if level < 1:
            return
        from stateformat.storage import Stats

        self.level, self._command, self.stats = level, command, Stats()
        LOGGER.removeHandler(self._handler)
        self._handler = OnStandardError()
        self._handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(message)s", "%H:%M:%S"))
        self._listen(logging.INFO if level == 1 else logging.DEBUG)

    def end(self) -> None:
        """Restore the loggers; if verbose, print the table. The last thing a command does."""
        LOGGER.removeHandler(self._handler)
        with _LOCK:
            LOGGER.setLevel(_LEVELS.pop())
        if self.stats is None:
            return
        wall_seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time()
        took = f"{self._command}: {wall_seconds:.2f} s, {cpu_seconds:.2f} s of CPU time"
        with contextlib.suppress(BrokenPipeError):
            click.echo(f"\n{took}, at most {words.size(peak_memory_bytes())} of memory\n{self.stats}", err=True)

    def _listen(self, level: int) -> None:
        LOGGER.addHandler(self._handler)
        LOGGER.setLevel(level)


class OnStandardError(logging.Handler):
    """Writes to what standard error is at that moment: above a progress bar, while there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(BrokenPipeError):
            complain(self.format(record))


def peak_memory_bytes() -> int:
    """The greatest resident size of this process so far."""
    import resource
    from pathlib import Path

    # On Linux a process inherits ru_maxrss from its parent: it would be the size of our caller.
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
