"""Errors of a read pass through Spark's workers and reach the user as one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stateformat.errors import CheckpointError

from ..worker_process import settle

_NO_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""The environment variable that Spark's workers check before they send an error to the JVM."""


@contextmanager
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
