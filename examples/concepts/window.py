"""A window of event time: rows of each minute, counted by shop when the minute is over."""

from datetime import datetime

import pyarrow as pa

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime

MINUTE_US = 60_000_000
times = [datetime(2026, 1, 1, 12, 0, 5), datetime(2026, 1, 1, 12, 0, 59), datetime(2026, 1, 1, 12, 1)]
orders = pa.table({"shop": ["a", "b", "a"], "at": pa.array(times, pa.timestamp("us"))})

flow = Dataflow("window")
stream = flow.source(MemorySource(orders), uid="orders", event_time="at")
counted = stream.key_by("shop").window(MINUTE_US, "at", {"orders": ("*", "count")}, uid="per minute")
counted.apply(out := CollectSink(), uid="out")
LocalRuntime(stateformat.open("memory://window")).run(flow)
for row in out.table().sort_by([("window_start", "ascending"), ("shop", "ascending")]).to_pylist():
    print(row["window_start"].time(), row["shop"], row["orders"])

# It prints:
# 12:00:00 a 1
# 12:00:00 b 1
# 12:01:00 a 1
