"""A loop: records go round until they are odd. A checkpoint may be taken while they do."""

import pyarrow as pa
import pyarrow.compute as pc

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow, Operator, Output
from stateformat.backends.local import LocalRuntime

N = pa.schema({"n": pa.int64()})


class Halve(Operator):
    """Halves even numbers."""

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        n = batch["n"]
        return pa.record_batch({"n": pc.if_else(is_odd(batch), n, pc.divide(n, 2))})


def is_odd(batch: pa.RecordBatch) -> pa.Array:
    return pc.equal(pc.bit_wise_and(batch["n"], 1), 1)


flow = Dataflow("halves")
loop = flow.loop(N)
numbers = flow.source(MemorySource(pa.table({"n": [12, 7, 40]})), uid="numbers")
halved = flow.apply(Halve(), numbers.rebalance(), loop.rebalance(), uid="halve")
loop.close(halved.filter(lambda batch: pc.invert(is_odd(batch)), uid="even"))
halved.filter(is_odd, uid="odd").apply(out := CollectSink(), uid="out")
LocalRuntime(stateformat.open("memory://loop")).run(flow)
print(sorted(out.table()["n"].to_pylist()))

# It prints:
# [3, 5, 7]
