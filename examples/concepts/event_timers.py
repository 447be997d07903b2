"""Timers: an operator that reports keys of which nothing was heard for ten seconds of event
time.
"""

from collections.abc import Sequence

import pyarrow as pa

from stateformat.backends.dataflow import Descriptor, Operator, Output, Timers, ValueState
from stateformat.backends.dataflow.testing import OperatorHarness

KEY = {"sensor": pa.string()}
TEN_SECONDS = 10_000_000


class Silent(Operator):
    """Sets a timer with each row, and deletes the one before."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [Timers("alarm", KEY), ValueState("due", KEY, {"at": pa.int64()})]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema({"silent": pa.string()})

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        alarm, due = self.context.timers("alarm"), self.context.value_state("due")
        for row in batch.to_pylist():
            if (before := due.get_one(row["sensor"])) is not None:
                alarm.delete_one(row["sensor"], before["at"])
            alarm.set_one(row["sensor"], row["at"] + TEN_SECONDS)
            due.put_one(row["sensor"], at=row["at"] + TEN_SECONDS)
        return None

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        return pa.record_batch({"silent": timers["sensor"]})


silent = OperatorHarness(Silent(), {"sensor": pa.string(), "at": pa.int64()}, key_by="sensor")
silent.push([{"sensor": "a", "at": 0}, {"sensor": "b", "at": 0}, {"sensor": "b", "at": 5_000_000}])
print(silent.advance(9_999_999).take_output().to_pylist())
print(silent.advance(10_000_000).take_output().to_pylist())
print(silent.advance(15_000_000).take_output().to_pylist())

# It prints:
# []
# [{'silent': 'a'}]
# [{'silent': 'b'}]
