"""Decides what sources read in an epoch, before its barrier begins."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from stateformat.errors import InvalidInput

from ...dataflow import events as ev
from ...dataflow.api import NoSplit, Source
from ...dataflow.chained_operator import FailsAgain
from ...dataflow.compile import Job
from ...runtime import Driver, SplitAssigned
from ..protocol.dataframe_input import DataFrameInput, InputEncoder
from ..protocol.driver_task import DriverTask
from ..sources.source import RangeEnumerator, SparkSource
from .epoch import first_line, refused_by_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

SPLITS_AHEAD_MAX: Final = 64
"""The most splits a reader gets at once. One that used up all gets twice as many next time."""


class SplitAssigner:
    """Assigns splits to readers and fixes the ranges of DataFrames. Called between epochs."""

    def __init__(self, job: Job, driver: Driver, spark: SparkSession) -> None:
        self._job = job
        self._driver = driver
        self._spark = spark
        self._next: dict[str, int] = {}
        """By source, the subtask that gets the next split first."""
        self.waits = False
        """Whether the job's loops hold so much that no source may read in the next epoch."""

    def close(self) -> None:
        """Close the enumerators of ranges, as the run has ended."""
        for enumerator in self._driver.enumerators.values():
            if isinstance(enumerator, RangeEnumerator):
                enumerator.close()

    def rows_for_each(self, readers: int, rows: int | None) -> int | None:
        """Return how many of ``rows`` each reader may read in the next epoch; None: any number."""
        if self.waits:
            return 0
        return None if rows is None else math.ceil(rows / max(readers, 1))

    def assign(self, running: Sequence[DriverTask]) -> list[DataFrameInput]:
        """Mail splits to the readers among these tasks. Return the ranges of the next epoch."""
        inputs: list[DataFrameInput] = []
        for vertex in () if self.waits else self._job.vertices:
            readers = [task for task in running if task.wired.vertex is vertex and task.may_read]
            logic = self._job.logic(vertex.id)
            if readers and isinstance(logic, SparkSource):
                inputs += self._fix_range(vertex.id, logic, readers)
            elif readers and isinstance(logic, Source):
                self._assign_splits(vertex.id, readers)
        return inputs

    def _fix_range(self, uid: str, source: SparkSource, readers: Sequence[DriverTask]) -> list[DataFrameInput]:
        enumerator = self._driver.enumerators[uid]
        assert isinstance(enumerator, RangeEnumerator)
        try:
            found = enumerator.next_range(self._spark)
        except Exception as error:
            logger.debug("the next range of %s", uid, exc_info=error)
            reason = f"source {uid!r} has no next range: {first_line(error)}"
            if isinstance(error, InvalidInput) or refused_by_spark(error) is not None:
                failure = FailsAgain(reason)
                failure.__cause__ = error
                self._driver.note(reason, failure)
            self._driver.inbox.append(ev.TaskFailed(None, reason))
            return []
        if isinstance(found, NoSplit):
            for reader in readers:
                reader.mail.append(SplitAssigned(found))
            return []
        enumerator.look_ahead(self._spark)
        event_time = self._job.step(uid).event_time
        column = event_time.column if event_time is not None else None
        parallelism = self._job.vertex(uid).parallelism
        return [DataFrameInput(found, InputEncoder(uid, parallelism, column, source.schema))]

    def _assign_splits(self, uid: str, readers: Sequence[DriverTask]) -> None:
        """Assign splits to the readers in turn. The next epoch begins with the next reader.

        Otherwise, splits that appear one by one would all go to the first reader, while event time
        waits for the others.
        """
        for reader in readers:
            reader.was_deferred = False
            if reader.no_more_splits:
                reader.mail.append(SplitAssigned(NoSplit.NEVER))
        parallelism, next_ = self._job.vertex(uid).parallelism, self._next.get(uid, 0)
        asking = [task for task in readers if task.wants_split and not task.no_more_splits]
        asking.sort(key=lambda task: (task.core.id.subtask - next_) % parallelism)
        for number in range(max((task.splits_ahead for task in asking), default=0)):
            for reader in [task for task in asking if number < task.splits_ahead]:
                answer = self._driver.assign_split(reader.core.id)
                if isinstance(answer, NoSplit):
                    reader.no_more_splits, reader.was_deferred = answer is NoSplit.NEVER, answer is NoSplit.LATER
                    asking.remove(reader)
                else:
                    self._next[uid] = reader.core.id.subtask + 1
