"""Asks how far the next epoch reads while one runs: a thread of its own, with its own connection.

The answer is a little older than one that is asked for when it is needed, and is right all the
same: it depends on the position and on what was there. Where nothing was there, it is asked again.
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
"""How often a question under way is cancelled when a run ends, and after what time again."""


class LookAhead:
    """The one question of a run that is under way."""

    def __init__(self, offsets: Offsets, spark: SparkSession) -> None:
        self._offsets = offsets
        self._spark = spark
        self._tag = f"stateformat-ahead-{secrets.token_hex(8)}"
        self._asked: tuple[Position, Future[Position]] | None = None
        self._questions: SimpleQueue[tuple[Position, Future[Position]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="looks ahead", daemon=True)
        self._thread.start()

    def ask(self, position: Position) -> None:
        """Ask how far the epoch reads that begins there. Returns at once."""
        self._asked = position, Future()
        self._questions.put(self._asked)

    def answer(self, position: Position) -> Position | None:
        """Wait for the answer, once. None: this was not asked. Raises what ``latest`` raised."""
        asked, self._asked = self._asked, None
        return asked[1].result() if asked is not None and asked[0] is position else None

    def close(self) -> None:
        """The run has ended. A question under way is cancelled, and not waited for for long."""
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
            except Exception as error:  # The session may be gone, and the question with it.
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
