"""The program ``ckpt``: takes interrupts from the first moment, then imports the rest."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

_NOTHING_DONE: Final = b"ckpt: interrupted; nothing was changed\n"
_INTERRUPTED: Final = 130


def main(program: str = "ckpt") -> int:
    """Run ``ckpt``, which the user calls ``program``; return its exit status.

    Ctrl-C ends it with a sentence, even during imports.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    from .main import main as run

    status = run(program=program)
    if signal.getsignal(signal.SIGINT) is _leave:
        # All is done and said: an interrupt now could only spoil the exit status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def _leave(*_: object) -> None:
    os.write(2, _NOTHING_DONE)
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
