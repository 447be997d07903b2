"""What sources read in an epoch: fixed before its barrier begins, so that what enumerators keep in the checkpoint is what they have not
given.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from backends.dataflow import events as ev
from backends.dataflow.api import NoSplit, Source
from backends.dataflow.compile import Job
from backends.running.driver import Driver
from backends.running.worker import Give
from backends.spark.epoch import first_line
from backends.spark.feeds import Encoder, Feed
from backends.spark.resting import Resting
from backends.spark.sources import RangeEnumerator, SparkSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

SPLITS_AHEAD_MAX: Final = 64
"""So many splits at most are given to a reader at once. It asks once an epoch; one that came to the end of what it was given gets
twice as many the next time.
"""


class Dealer:
    """Gives readers splits, and fixes the ranges of DataFrames. Called between epochs, while no barrier is under way."""

    def __init__(self, job: Job, driver: Driver, spark: SparkSession) -> None:
        self._job = job
        self._driver = driver
        self._spark = spark

    def deal(self, running: Sequence[Resting]) -> list[Feed]:
        """Mail splits to the readers among the tasks that run. Returns what DataFrames feed sources in the next epoch."""
        feeds = []
        for vertex in self._job.vertices:
            readers = [task for task in running if task.wired.vertex is vertex and task.may_read]
            logic = self._job.logic(vertex.id)
            if readers and isinstance(logic, SparkSource):
                feeds += self._fix_range(vertex.id, logic, readers)
            elif readers and isinstance(logic, Source):
                for reader in readers:
                    self._deal_splits(reader)
        return feeds

    def _fix_range(self, uid: str, source: SparkSource, readers: Sequence[Resting]) -> list[Feed]:
        enumerator = self._driver.enumerators[uid]
        assert isinstance(enumerator, RangeEnumerator)
        try:
            found = enumerator.next_range(self._spark)
        except Exception as error:
            logger.debug("the next range of %s", uid, exc_info=error)
            self._driver.inbox.append(ev.TaskFailed(None, f"source {uid!r} has no next range: {first_line(error)}"))
            return []
        if isinstance(found, NoSplit):
            for reader in readers:
                reader.mail.append(Give(found))
            return []
        event_time = self._job.step(uid).event_time
        column = event_time.column if event_time is not None else None
        return [Feed(found, source.schema, Encoder(uid, self._job.vertex(uid).parallelism, column))]

    def _deal_splits(self, reader: Resting) -> None:
        reader.told_later = False
        if reader.no_more_splits:
            reader.mail.append(Give(NoSplit.NEVER))
        elif reader.wants_split:
            for _ in range(reader.splits_ahead):
                answer = self._driver.assign_split(reader.core.id)
                if isinstance(answer, NoSplit):
                    reader.no_more_splits, reader.told_later = answer is NoSplit.NEVER, answer is NoSplit.LATER
                    return


__all__ = ["SPLITS_AHEAD_MAX", "Dealer"]
