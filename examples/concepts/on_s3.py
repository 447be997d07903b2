"""A store on S3: python on_s3.py s3://bucket/prefix. Credentials come from the environment, never
from the URL.

The server must know conditional writes (`If-None-Match: *`); one that does not is refused at the
first checkpoint.
"""

import sys

import pyarrow as pa

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime

store = stateformat.open(sys.argv[1])  # AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as everywhere

flow = Dataflow("on-s3")
rows = flow.source(MemorySource(pa.table({"k": ["a", "b", "a"]})), uid="rows")
rows.key_by("k").aggregate({"n": ("*", "count")}, emit="end", uid="counted").apply(out := CollectSink(), uid="out")
print(LocalRuntime(store).run(flow).sentence)
print(out.table().sort_by("k").to_pylist())

# It prints:
# the job has finished: every input has ended; its last checkpoint is 1
# [{'k': 'a', 'n': 2}, {'k': 'b', 'n': 1}]
