"""Publishing into a store with many checkpoints: on local storage two listings of names grow.

On S3 (Ceph RGW, where it is installed) a listing begins behind the parent's record, so nothing
grows. Processor times there are those of this process, without the server's.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

import stateformat as sf
from benchmarks.measuring import Row, compare, own_cost
from benchmarks.scale_stores import publish_keyed
from stateformat.model import CheckpointId
from stateformat.paths import record_path
from stateformat.record import encode_record

ROWS = pa.table({"key": np.arange(1000), "sum": np.arange(1000)})
MANY, FEW = 10_000, 5
LOCAL = f"publish with {MANY:,} records kept, on a local folder"
S3 = f"publish with {MANY:,} records kept, on S3"
BUCKET, THREADS = "publish", 8


def publisher(url: str, kept: int, **options: Any) -> Callable[[], None]:
    """Publishes one more checkpoint into a store that has ``kept`` records."""
    store = sf.open(url, **options)
    publish_keyed(store, ROWS, 1, options=None)
    first = store.open().record

    def add(number: int) -> None:
        record = replace(first, checkpoint_id=CheckpointId(number))
        store.storage.create(record_path(record.checkpoint_id), encode_record(record))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(add, range(2, kept + 1)))
    newest = [store.start("bench")]

    def once() -> None:
        newest[0] = publish_keyed(store, ROWS, 1, parent=newest[0], options=None)

    return once


def local() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-publish-") as folder:
        many, few = (publisher(f"{folder}/{kept}", kept, durable=False) for kept in (MANY, FEW))
        yield compare(LOCAL, many, few, label=f"with {FEW}", budget="≤ 1.6 ×", rounds=41)


def s3() -> Iterator[Row]:
    from tests.servers.rgw import available, running_rgw

    if why := available():
        print(f"S3 is left out: {why}")
        return
    with running_rgw() as server:
        server.client.create_bucket(Bucket=BUCKET)
        many, few = (publisher(f"s3://{BUCKET}/{kept}", kept, **server.options()) for kept in (MANY, FEW))
        yield compare(S3, many, few, label=f"with {FEW}", budget="≤ 1.2 ×", rounds=21, measured=own_cost)


def measure(line: str = "") -> Iterator[Row]:
    if line in LOCAL:
        yield from local()
    if line in S3:
        yield from s3()
