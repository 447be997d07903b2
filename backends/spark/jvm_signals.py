"""Handles SIGTERM to the JVM of a Spark driver, which would stop Spark during a job's checkpoint.

Under ``spark-submit``, a user or a scheduler ends the JVM. Python is its child and gets no signal.
In other programs the JVM is a child of Python, and gets signals sent to the whole group (systemd).
Spark's own handler stops Spark at once. So a handler in the JVM replaces it and calls Python, which
decides what happens to the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)


class _Handler:
    """A ``sun.misc.SignalHandler`` in Python."""

    def __init__(self, heard: Callable[[], None]) -> None:
        self._heard = heard

    def handle(self, number: Any) -> None:  # noqa: ARG002 - there is one signal
        self._heard()

    class Java:
        implements = ("sun.misc.SignalHandler",)


def forward_sigterm(spark: SparkSession, heard: Callable[[], None]) -> Callable[[], None]:
    """Call ``heard``, in a thread, for each SIGTERM to the JVM, instead of Spark's handler.

    Returns a function that restores Spark's handler. A JVM that allows no other handler keeps it.
    """
    from pyspark.java_gateway import ensure_callback_server_started

    context = spark.sparkContext
    try:
        ensure_callback_server_started(context._gateway)
        misc = context._jvm.sun.misc
        term = misc.Signal("TERM")
        before = misc.Signal.handle(term, _Handler(heard))
    except Exception as error:
        logger.warning("SIGTERM to the JVM of Spark will end the job without a checkpoint: %s", error)
        return lambda: None

    def undo() -> None:
        try:
            misc.Signal.handle(term, before)
        except Exception as error:  # The session may be gone, and the JVM with it.
            logger.debug("the JVM keeps its handler: %s", error)

    return undo
