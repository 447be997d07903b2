"""Sends the rows of a DataFrame to the readers of their source, as frames.

Every Spark partition of a range sends its batches to the subtasks in turn, whatever their event
time. At the end it sends all subtasks the greatest event time it has seen, and reports like a task.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import CheckpointError

from ...dataflow import events as ev
from ...dataflow.chained_operator import OperatorError
from ..sources.arrow import to_arrow
from ..sources.source import Range
from . import frames

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


PARTS: Final = pa.schema([("part", pa.binary())])


class InputReport(NamedTuple):
    """The last thing that a partition sends: its token, and how many frames each task gets."""

    name: str
    token: bytes
    sent: dict[ev.TaskId, int]


def input_channel(uid: str, subtask: int) -> ev.Channel:
    """Return the channel that brings Spark's rows to a reader. It belongs to no edge of the job."""
    return ev.Channel(f"rows of {uid}", 0, subtask)


@dataclass(frozen=True)
class InputEncoder:
    """Turns the rows of one partition into frames."""

    uid: str
    parallelism: int
    event_time: str | None
    schema: pa.Schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Turn batches, with columns ordered as ``schema``, into rows of ``frames.keyed``."""
        for sent in self._sent(batches):
            yield pa.record_batch([pa.array([*frames.keyed(sent)], pa.binary())], schema=PARTS)

    def _sent(self, batches: Iterator[pa.RecordBatch]) -> Iterator[list[frames.Sent]]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        partition = context.partitionId()
        name, token = f"{self.uid}, partition {partition}", os.urandom(16)
        outbox = frames.Outbox(name, token)
        newest_us: int | None = None
        filled = (batch.rename_columns(self.schema.names) for batch in batches if batch.num_rows)
        for turn, batch in enumerate(filled, start=partition):
            records = to_arrow(batch, self.schema)
            self._put(outbox, turn % self.parallelism, ev.Records(records))
            if self.event_time is not None:
                found = pc.max(records.column(self.event_time)).cast(pa.int64()).as_py()
                if found is not None:
                    newest_us = found if newest_us is None else max(found, newest_us)
            if outbox.is_large:
                yield [*outbox.flush()]
        if newest_us is not None:
            for subtask in range(self.parallelism):
                self._put(outbox, subtask, ev.Watermark(newest_us))
        sent = [*outbox.flush()]
        report = InputReport(name, token, dict(outbox.sent))
        yield [*sent, (partition % self.parallelism, frames.pack_report(report))]

    def _put(self, outbox: frames.Outbox, subtask: int, element: ev.Element) -> None:
        outbox.put(ev.TaskId(self.uid, subtask), 0, input_channel(self.uid, subtask), element)


@dataclass(frozen=True)
class DataFrameInput:
    """The range that one source reads in one epoch."""

    range: Range
    encoder: InputEncoder

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the frames of its rows (:data:`PARTS`), built again for each try.

        Raises ``OperatorError`` for errors of the user's code; errors of Spark stay as they are.
        """
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        try:
            rows = self.range.frame(spark)
        except (CheckpointError, PySparkException, Py4JError):
            raise
        except Exception as error:
            raise OperatorError.of(error, operator=self.encoder.uid, subtask=None, hook="the range") from error
        # PySpark looks up columns by unquoted names, in which a dot would mean a field.
        numbered = rows.toDF(*(f"c{number}" for number in range(len(rows.columns))))
        return numbered.mapInArrow(self.encoder, "part binary")
