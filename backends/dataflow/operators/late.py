"""The base of operators that drop rows by event time: late ones, and those without a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput

from ..api import Operator, OperatorContext, SplitList


class DropsLate(Operator):
    """Counts what it drops, in the state ``dropped``: a row per subtask."""

    def __init__(self) -> None:
        self.late_records = 0
        self.untimed_records = 0
        """Rows whose event time is null."""

    @staticmethod
    def dropped() -> SplitList:
        """Return the state of the counts."""
        return SplitList("dropped", {"late_records": pa.int64(), "untimed_records": pa.int64()})

    @staticmethod
    def check_time(schema: pa.Schema, time: str) -> pa.DataType:
        """Return the type of a column with event time; ``InvalidInput`` for another type."""
        kind = schema.field(time).type
        if kind != pa.int64() and not (pa.types.is_timestamp(kind) and kind.unit == "us"):
            raise InvalidInput(
                f"the event time {time!r} is {kind}. Cast it to timestamp[us] or int64 (µs) before.",
                kind=ErrorKind.UNSUPPORTED_TYPE,
            )
        return kind

    def open(self, context: OperatorContext) -> None:
        """Restore the counts. After rescaling, they may be those of several subtasks, or none."""
        super().open(context)
        counted = context.entries("dropped").rows()
        self.late_records = pc.sum(counted["late_records"]).as_py() or 0
        self.untimed_records = pc.sum(counted["untimed_records"]).as_py() or 0

    def timed(self, batch: pa.RecordBatch, time: str) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """Return the rows that have an event time, and the times (µs). Counts the others."""
        times = batch.column(time).view(pa.int64())
        if times.null_count:
            batch = batch.filter(times.is_valid())
            self.untimed_records += times.null_count
            times = times.drop_null()
        return batch, times.to_numpy()

    def in_time(
        self, batch: pa.RecordBatch, times: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
        """Return the rows where the mask is true, and their times. Counts the others as late."""
        if mask.all():
            return batch, times
        self.late_records += int(len(mask) - mask.sum())
        return batch.filter(pa.array(mask)), times[mask]

    def snapshot(self) -> None:
        """Put the counts into the state."""
        counts = {"late_records": [self.late_records], "untimed_records": [self.untimed_records]}
        self.context.entries("dropped").replace(pa.record_batch(counts))
