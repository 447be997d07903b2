"""The smallest job: rows in, a sum for each key, rows out. Run it twice: the second run has nothing
to do.
"""

import pyarrow as pa

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime

sales = pa.table({"city": ["Oslo", "Rome", "Oslo"], "n": [3, 1, 4]})

flow = Dataflow("hello", parallelism=2)
totals = (
    flow.source(MemorySource(sales), uid="sales").key_by("city").aggregate({"n": ("n", "sum")}, emit="end", uid="n")
)
totals.apply(out := CollectSink(), uid="out")

print(LocalRuntime(stateformat.open("hello-store")).run(flow).sentence)
print(out.table().sort_by("city").to_pylist())

# It prints:
# the job has finished: every input has ended; its last checkpoint is 1
# [{'city': 'Oslo', 'n': 7}, {'city': 'Rome', 'n': 1}]
