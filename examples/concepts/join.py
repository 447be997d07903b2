"""A small table joins a stream: every subtask has the whole table, and the stream waits for it."""

import pyarrow as pa

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import BroadcastJoin, Dataflow
from stateformat.backends.local import LocalRuntime

flights = pa.table({"carrier": ["AA", "UA", "AA"], "delay": [2, 4, 11]})
carriers = pa.table({"carrier": ["AA", "UA"], "name": ["American", "United"]})

flow = Dataflow("join", parallelism=2)
stream = flow.source(MemorySource(flights, splits=2), uid="flights")
table = flow.source(MemorySource(carriers), uid="carriers", parallelism=1)
flow.apply(BroadcastJoin("carrier"), stream, table.broadcast(), uid="named").apply(out := CollectSink(), uid="out")
LocalRuntime(stateformat.open("memory://join")).run(flow)
for row in out.table().sort_by("delay").to_pylist():
    print(*row.values())

# It prints:
# AA 2 American
# UA 4 United
# AA 11 American
