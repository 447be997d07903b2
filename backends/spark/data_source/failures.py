"""How errors of a read reach the user through Spark's workers: as one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stateformat.errors import CheckpointError

from ..worker_process import settle

_NO_TRACEBACK: Final = "SPARK_HIDE_TRACEBACK"
"""What Spark's workers look at before they send an error to the JVM."""


@contextmanager
def without_traceback() -> Iterator[None]:
    """Let Spark show errors of ours as a sentence on a line of its own, without a traceback.

    For code in Spark's workers only: one that has failed ends, and with it the environment that is
    changed here. Any other error is a fault of the program and keeps its traceback.
    """
    settle()
    try:
        yield
    except (CheckpointError, OSError) as error:
        os.environ[_NO_TRACEBACK] = "1"
        if isinstance(error, CheckpointError):
            error.args = (f"\n{error.args[0]}",)
        raise
