"""Starts the Python workers of Spark, and prepares each before our tasks.

In a session of ours it is PySpark's daemon, from which workers are forked: where the driver finds
modules comes last on their ``sys.path``. So a function of a module beside the program is found, as
in plain PySpark, and a folder there shadows nothing.

A worker is prepared once, before our first task in it, and before each later task.

After every task of a reused worker, PySpark's daemon runs a full garbage collection. It visits
every object of the process, some 90,000 of them from imported modules, and takes 25 to 40 ms, ten
times as long as a task with one row. The jobs of a session add more objects. So before each task,
objects that survived a collection are frozen, and the collection after the task only visits what
the task has made. Every hundredth collection visits all objects, in case frozen ones have become
garbage, such as cycles in a user's operator. Our own operator chains have no cycles.

The JVM sends a task in several small writes. Over TCP, the second waits until the first is
acknowledged, and Linux delays acknowledgements by 40 ms on a socket that has been used for a while.
So a worker asks for immediate acknowledgements. It does so before each task, since the system
forgets it as soon as something is sent.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import IO, Any, Final

from stateformat.errors import CheckpointError

PATH_VARIABLE: Final = "STATEFORMAT_PATH"
"""The environment variable of workers with what comes last on their ``sys.path``."""

_NO_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""The environment variable that Spark's workers check before they send an error to the JVM."""

Main = Callable[[IO[bytes], IO[bytes]], None]
"""The function that PySpark's daemon calls per task, with both files of the worker's socket."""

LOOK_EVERY = 100
"""After every this many tasks, the collection visits all objects."""


@cache
def settle() -> None:
    """Prepare this worker. Only the first call has an effect, and only in a reused worker."""
    if "SPARK_REUSE_WORKER" not in os.environ:
        return
    # For each task, the daemon looks it up again in the module that it was started with.
    module: Any = sys.modules.get(sys.argv[1]) if len(sys.argv) > 1 else None
    if hasattr(module, "main"):
        module.main = prepared(module.main)
    gc.collect()
    gc.freeze()


def prepared(main: Main) -> Main:
    """Wrap ``main``: freeze existing objects before it, and use a socket without delays: it neither
    waits for acknowledgements nor delays its own.
    """
    tasks = itertools.count(1)

    def wrapped(infile: IO[bytes], outfile: IO[bytes]) -> None:
        if next(tasks) % LOOK_EVERY:
            gc.freeze()
        else:
            gc.unfreeze()
        # Unix sockets and pipes refuse these options, and do not need them.
        with (
            contextlib.suppress(OSError),
            socket.fromfd(infile.fileno(), socket.AF_INET, socket.SOCK_STREAM) as sock,
        ):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if sys.platform == "linux":
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        main(infile, outfile)

    return wrapped


@contextlib.contextmanager
def without_traceback() -> Iterator[None]:
    """Make Spark show our errors as a sentence on its own line, without a traceback.

    Use it only in Spark's workers: it changes the environment of the process, and a worker that
    failed exits. Any other error is a bug in the program and keeps its traceback.
    """
    settle()
    try:
        yield
    except (CheckpointError, OSError) as error:
        os.environ[_NO_TRACEBACK] = "1"
        if isinstance(error, CheckpointError):
            error.args = (f"\n{error.args[0]}",)
        raise


if __name__ == "__main__":
    sys.path += [
        place for place in os.environ.get(PATH_VARIABLE, "").split(os.pathsep) if place and place not in sys.path
    ]
    runpy.run_module("pyspark.daemon", run_name="__main__")
