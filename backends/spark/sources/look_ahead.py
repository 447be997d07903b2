"""Finds where the next epoch's range ends while an epoch runs, in a thread with its own connection.

The answer may be slightly out of date when it is used, but it is still valid: it depends only on
the position and on what existed then. If nothing new existed, the caller asks again.
"""

from __future__ import annotations

import logging
import secrets
import threading
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from .offsets import Offsets, Position

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

CANCEL_SECONDS: Final = 0.2
CANCELS: Final = 5
"""When a run ends, a running query is cancelled up to this often, ``CANCEL_SECONDS`` apart."""


class LookAhead:
    """Runs one such query at a time, for one run."""

    def __init__(self, offsets: Offsets, spark: SparkSession) -> None:
        self._offsets = offsets
        self._spark = spark
        self._tag = f"stateformat-ahead-{secrets.token_hex(8)}"
        self._asked: tuple[Position, Future[Position]] | None = None
        self._questions: SimpleQueue[tuple[Position, Future[Position]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="looks ahead", daemon=True)
        self._thread.start()

    def ask(self, position: Position) -> None:
        """Ask where the epoch that begins at this position ends. Returns at once."""
        self._asked = position, Future()
        self._questions.put(self._asked)

    def answer(self, position: Position) -> Position | None:
        """Wait for the answer, once. None if this was not asked. Raises what ``latest`` raised."""
        asked, self._asked = self._asked, None
        return asked[1].result() if asked is not None and asked[0] is position else None

    def close(self) -> None:
        """End the thread, as the run has ended. Cancels a running query, and waits only briefly."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked[1].cancel()
        self._questions.put(None)
        for _ in range(CANCELS):
            self._thread.join(0 if asked is None else CANCEL_SECONDS)
            if asked is None or not self._thread.is_alive():
                return
            try:
                self._spark.sparkContext.cancelJobsWithTag(self._tag)
            except Exception as error:  # The session may be gone, and the query with it.
                logger.debug("what comes next is still asked for: %s", error)

    def _work(self) -> None:
        is_tagged = False
        while (question := self._questions.get()) is not None:
            position, answer = question
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                if not is_tagged:
                    self._spark.sparkContext.addJobTag(self._tag)
                    is_tagged = True
                found = self._offsets.latest(self._spark, position)
            except BaseException as error:
                answer.set_exception(error)
            else:
                answer.set_result(found)
