"""Cancels the Spark job of an epoch when a run that must stop soon has used up its grace period.

The run's own thread is waiting for Spark, and a signal handler must not call the JVM in the middle
of that call. So a separate thread cancels the job.
"""

from __future__ import annotations

import logging
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from ...runtime import Clock, SoonStop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 0.2
"""Cancelling is repeated after this time, for a job submitted after the grace period."""


class Cancelling:
    """A context manager for each Spark job of a run. Its thread sleeps until it must stop soon."""

    def __init__(self, spark: SparkSession, soon: SoonStop, clock: Clock, tag: str) -> None:
        self._context = spark.sparkContext
        self._soon = soon
        self._clock = clock
        self._tag = tag
        self._news: SimpleQueue[bool] = SimpleQueue()
        """True: the job must stop soon. False: the run has ended."""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="cancels an epoch", daemon=True)
            self._thread.start()
            self._soon.tell(self._news)
        self._context.addJobTag(self._tag)

    def __exit__(self, *_: object) -> None:
        try:
            self._context.removeJobTag(self._tag)
        except Exception as error:  # The session may be gone. The epoch reports that better.
            logger.debug("the tag of a job stays: %s", error)

    def close(self) -> None:
        """End the thread, as the run has ended."""
        self._news.put(False)

    def _watch(self) -> None:
        goes_on = self._news.get()
        while goes_on and self._soon.until_us is not None:
            left_us = self._soon.until_us - self._clock.now_us()
            try:
                goes_on = self._news.get(timeout=max(left_us / 1e6, AGAIN_SECONDS))
            except Empty:
                if self._soon.is_over:
                    self._cancel()

    def _cancel(self) -> None:
        try:
            self._context.cancelJobsWithTag(self._tag)
        except Exception as error:
            logger.warning("the epoch under way could not be cancelled: %s", error)
