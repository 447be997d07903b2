"""The rows of DataFrames on their way to the readers of their sources, as frames.

Every Spark partition of an epoch's range deals its batches to the subtasks of the source in turn, and tells all of them the greatest
event time that it has seen: the rows are dealt without regard to time. A partition reports as a task does, since Spark may run it
again: its token, and how many frames it has sent to whom.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from backends.dataflow import events as ev
from backends.dataflow.failures import OperatorError
from backends.spark.conforming import frames_of
from backends.spark.mail import DDL, REPORT, Outbox, row, together
from backends.spark.sources import Range
from stateformat.errors import CheckpointError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class FeedReport(NamedTuple):
    """What a partition says when it has sent its rows."""

    name: str
    token: bytes
    sent: dict[ev.TaskId, int]


def feed_channel(uid: str, subtask: int) -> ev.Channel:
    """The channel on which rows of Spark come to a reader: no edge of the job."""
    return ev.Channel(f"rows of {uid}", 0, subtask)


@dataclass(frozen=True)
class Encoder:
    """Makes frames of the rows of one partition. ``event_time``: the column, None without."""

    uid: str
    parallelism: int
    event_time: str | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Batches in the schema of the source; rows of ``mail.ROWS``."""
        return together(self._rows(batches))

    def _rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        name, token = f"{self.uid}, partition {partition}", os.urandom(16)
        outbox = Outbox(name, token)
        newest_us: int | None = None
        for turn, batch in enumerate(batches, start=partition):
            self._put(outbox, turn % self.parallelism, ev.Records(batch))
            if self.event_time is not None:
                found = pc.max(batch.column(self.event_time)).cast(pa.int64()).as_py()
                if found is not None:
                    newest_us = found if newest_us is None else max(found, newest_us)
            if outbox.is_large:
                yield from outbox.flush()
        if newest_us is not None:
            for subtask in range(self.parallelism):
                self._put(outbox, subtask, ev.Watermark(newest_us))
        yield from outbox.flush()
        report = FeedReport(name, token, dict(outbox.sent))
        yield row(partition % self.parallelism, REPORT, pickle.dumps(report, protocol=5))

    def _put(self, outbox: Outbox, subtask: int, element: ev.Element) -> None:
        outbox.put(ev.TaskId(self.uid, subtask), 0, feed_channel(self.uid, subtask), element)


@dataclass(frozen=True)
class Feed:
    """The range of one source in one epoch."""

    range: Range
    schema: pa.Schema
    encoder: Encoder

    def frame(self, spark: SparkSession) -> DataFrame:
        """The frames of its rows, in the columns of ``mail.ROWS``; built anew for each try. What the user's code raises is an
        ``OperatorError``, but for what Spark does, which may be tried again.
        """
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        try:
            rows = self.range.frame(spark)
        except (CheckpointError, PySparkException, Py4JError):
            raise
        except Exception as error:
            raise OperatorError.of(error, operator=self.encoder.uid, subtask=None, hook="the range") from error
        return frames_of(rows, self.schema, self.encoder, DDL)


__all__ = ["Encoder", "Feed", "FeedReport", "feed_channel"]
