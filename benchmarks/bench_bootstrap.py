"""``bootstrap`` against what a user would write: 5M rows (int64, int64), parallelism 4.

On Spark the other side sends rows to the subtask that owns their key group, sorts each partition by
it, writes a Parquet file with pyarrow, and collects the names. In this process it hashes with
DuckDB, sorts each part and writes it with pyarrow. Neither looks for keys that stand on several
rows, verifies anything, or makes a checkpoint of it.
"""

from __future__ import annotations

import itertools
import tempfile
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import Row, compare
from stateformat.backends import bootstrap as local
from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.spark import bootstrap, local_session
from stateformat.store import CheckpointStore, open

ROWS = 5_000_000
PARALLELISM = 4
GROUPS = 128
PARTITIONS = 4
WARM_UPS = 4
STATE = "totals/totals"


def flow() -> Dataflow:
    """A running sum by key, of which the state is ``key``, ``total``."""
    made = Dataflow("bench", parallelism=PARALLELISM)
    orders = pa.schema([("key", pa.int64()), ("amount", pa.int64())]).empty_table()
    made.source(MemorySource(orders), uid="orders").key_by("key").aggregate({"total": ("amount", "sum")}, uid="totals")
    return made


def write_part(folder: str, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sort a partition by key group and write it."""
    given = list(batches)
    if given:
        rows = pa.Table.from_batches(given).sort_by("_key_group")
        path = f"{folder}/{uuid.uuid4().hex}.parquet"
        pq.write_table(rows, path, compression="lz4")
        yield pa.record_batch({"path": [path], "rows": [len(rows)]})


def by_spark(frame: Any, folder: str) -> None:
    """What a user would write on Spark."""
    Path(folder).mkdir()
    groups = frame.selectExpr(f"pmod(hash(key), {GROUPS}) as _key_group", "key", "total")
    owner = (groups["_key_group"] * PARALLELISM / GROUPS).cast("int")
    written = groups.repartitionById(PARALLELISM, owner).mapInArrow(
        partial(write_part, folder), "path string, rows long"
    )
    assert len(written.collect()) == PARALLELISM


def by_hand(rows: pa.Table, folder: str) -> None:
    """What a user would write without Spark; the hash is DuckDB's own."""
    import duckdb

    Path(folder).mkdir()
    database = duckdb.connect()
    database.register("rows", rows)
    grouped = f"select cast(hash(key) % {GROUPS} as int) as _key_group, key, total from rows"
    for part in range(PARALLELISM):
        first, after = part * GROUPS // PARALLELISM, (part + 1) * GROUPS // PARALLELISM
        mine = f"from ({grouped}) where _key_group >= {first} and _key_group < {after} order by _key_group"
        pq.write_table(database.sql(mine).to_arrow_table(), f"{folder}/{part}.parquet", compression="lz4")


def measure(rows: int = ROWS) -> list[Row]:
    """On Spark, and in this process."""
    with tempfile.TemporaryDirectory(prefix="bench-bootstrap-") as scratch:
        numbers = itertools.count()

        def place() -> str:
            return f"{scratch}/{next(numbers)}"

        def new_store() -> CheckpointStore:
            return open(place(), durable=False)  # Neither does the other side sync.

        generator = np.random.default_rng(1)
        data = pa.table({"key": generator.permutation(rows), "total": generator.integers(0, 10**6, rows)})
        for part in range(PARTITIONS):
            share = data.slice(part * rows // PARTITIONS, rows // PARTITIONS)
            pq.write_table(share, f"{scratch}/history-{part}.parquet")
        spark = local_session("bench bootstrap", **{"spark.driver.memory": "4g"})
        history = spark.read.parquet(f"{scratch}/history-*.parquet")
        # The JVM compiles for a while; both sides are slower until it has, and not by the same
        # factor.
        for _ in range(WARM_UPS):
            bootstrap(new_store(), flow(), {STATE: history})
            by_spark(history, place())
        on_spark = compare(
            f"`bootstrap` of {rows:,} rows on Spark, parallelism {PARALLELISM}",
            lambda: bootstrap(new_store(), flow(), {STATE: history}),
            lambda: by_spark(history, place()),
            label="repartition, sort, `pq.write_table` by hand",
            budget="≤ 1 ×",
        )
        spark.stop()
        here = compare(
            f"`bootstrap` of {rows:,} rows in this process, parallelism {PARALLELISM}",
            lambda: local.bootstrap(new_store(), flow(), {STATE: data}),
            lambda: by_hand(data, place()),
            label="DuckDB and `pq.write_table` by hand",
            budget="–",
        )
    return [on_spark, here]
