"""SIGTERM to the JVM of a Spark driver, which would stop Spark under a job that takes a checkpoint.

Under ``spark-submit`` the process that a user or a scheduler ends is the JVM, and Python is its
child, which hears nothing. In other programs the JVM is a child of Python, and hears what is sent
to the whole group (systemd). Spark's own answer is to stop at once. So a handler in the JVM takes
its place, which tells Python; what becomes of the job is decided there.
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
    """Call ``heard``, in a thread, for each SIGTERM to the JVM, instead of what Spark does.

    Returns what puts Spark's own handler back. A JVM that allows no handler keeps Spark's.
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
