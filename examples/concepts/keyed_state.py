"""An operator with a row of state for each key, read and written for a whole batch at a time."""

from collections.abc import Sequence

import pyarrow as pa

from stateformat.backends.dataflow import Descriptor, Operator, Output, ValueState
from stateformat.backends.dataflow.testing import OperatorHarness


class Totals(Operator):
    """Emits the total of each city that a batch has rows of."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [ValueState("total", {"city": pa.string()}, {"n": pa.int64()})]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        total = self.context.value_state("total")
        total.add(batch.select(["city"]), batch, {"n": "sum"})
        cities = pa.record_batch({"city": batch["city"].unique()})
        values, _ = total.get(cities)
        return pa.record_batch({"city": cities["city"], "n": values["n"]})


totals = OperatorHarness(Totals(), {"city": pa.string(), "n": pa.int64()}, key_by="city", parallelism=2)
totals.push([{"city": "Oslo", "n": 3}]).push([{"city": "Oslo", "n": 4}])
print(totals.take_output().to_pylist())

at_three = OperatorHarness.restore(totals.snapshot(), parallelism=3)  # the state moves to the key's new subtask
print(at_three.push([{"city": "Oslo", "n": 1}]).take_output().to_pylist())

# It prints:
# [{'city': 'Oslo', 'n': 3}, {'city': 'Oslo', 'n': 7}]
# [{'city': 'Oslo', 'n': 8}]
