"""What a Python worker of Spark does once, before our first task in it, and before each task.

PySpark's daemon collects all garbage after every task of a worker that it uses again. That looks at
each object of the process, among them some 90,000 of imported modules, and takes 25 to 40 ms: ten
times what a task with a row takes; the jobs of a session add theirs. So what has survived a
collection is put aside before the next task: the one after it looks at what that task has made.
Behind one of many tasks everything is looked at, for what was put aside and is garbage by now:
cycles in a user's operator, say. Operator chains of ours have none.

The JVM sends a task in several small writes, and over TCP the second one waits until the first one
is acknowledged. Linux puts that off for 40 ms on a socket that has been used for a while. So a
worker asks for acknowledgements at once, before each task, since the system forgets it as soon as
something is sent.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import socket
import sys
from collections.abc import Callable
from functools import cache
from typing import IO, Any

Main = Callable[[IO[bytes], IO[bytes]], None]
"""What PySpark's daemon calls for each task of a worker, with both ends of its socket."""

LOOK_EVERY = 100
"""Behind one of so many tasks, garbage is looked for everywhere."""


@cache
def settle() -> None:
    """Prepare this worker. Only the first call does anything, and none outside of workers that are
    used again.
    """
    if "SPARK_REUSE_WORKER" not in os.environ:
        return
    # The daemon looks for it anew for each task, in the module that it was started with.
    module: Any = sys.modules.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if hasattr(module, "main"):
        module.main = prepared(module.main)
    gc.collect()
    gc.freeze()


def prepared(main: Main) -> Main:
    """Return the same, with what is there put aside before it, on a socket that neither waits for
    acknowledgements nor lets others wait.
    """
    tasks = itertools.count(1)

    def wrapped(infile: IO[bytes], outfile: IO[bytes]) -> None:
        if next(tasks) % LOOK_EVERY:
            gc.freeze()
        else:
            gc.unfreeze()
        # Unix sockets and pipes refuse, and need none of it.
        with (
            contextlib.suppress(OSError),
            socket.fromfd(infile.fileno(), socket.AF_INET, socket.SOCK_STREAM) as sock,
        ):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        main(infile, outfile)

    return wrapped
