"""Operators of the tests of time, which workers of Spark import."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from stateformat.backends import dataflow as df
from tests.conformance import Calls
from tests.local_jobs import KEY

SECOND_US = 1_000_000
FIRED = pa.schema({"key": pa.int64(), "value": pa.int64(), "set": pa.int64(), "now": pa.int64()})


class Reminders(df.Operator):
    """Sets a timer for each row, ``value`` seconds after it came, and says when it fired.

    One with a value above 100 sets another, a second later. What is left at the end fires at 0.
    """

    def __init__(self, clock: str = "processing_time") -> None:
        self.clock = clock

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [df.Timers("reminders", KEY, {"value": pa.int64(), "set": pa.int64()}, clock=self.clock)]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return FIRED

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        for row in batch.to_pylist():
            self._set(row["key"], row["value"], self.context.processing_time_us)
        return None

    def _set(self, key: int, value: int, now_us: int) -> None:
        self.context.timers("reminders").set_one(
            key, now_us + value % 100 * SECOND_US, str(value), value=value, set=now_us
        )

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        for row in timers.to_pylist():
            if row["value"] > 100:
                self._set(row["key"], 1, self.context.processing_time_us)
        return self._said(timers, self.context.processing_time_us)

    def end_input(self, input: int) -> df.Output:
        left = self.context.timers("reminders").due(2**63 - 1)
        return None if left is None else self._said(left, 0)

    def _said(self, timers: pa.RecordBatch, now_us: int) -> pa.RecordBatch:
        now = pa.array([now_us] * len(timers), pa.int64())
        return pa.record_batch([timers["key"], timers["value"], timers["set"], now], schema=FIRED)


class Losing(Reminders):
    """The same, and a test may let it fail when timers fire."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        self.calls.tell(f"{self.context.uid}/{self.context.subtask}", "fires")
        return super().on_timer(timers, name)


class Union(df.Operator):
    """Passes on both of its inputs."""

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return batch
