"""``rewrite`` on Spark against a hand-written PySpark job that reads, repartitions and writes the same Parquet.

5M (int64, int64) rows, 4 subtasks to 6. First with max parallelism 128 to 256, so every key is hashed again and every row
shuffled, which is what the job written by hand does too; then without, where nothing needs to be shuffled.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row, compare
from stateformat.backends.rewrite import RewriteSpec, rewrite
from stateformat.backends.spark.rewrite import SparkEngine
from stateformat.backends.spark.sessions import local_session
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.states import value_state
from stateformat.store import CheckpointStore, open

ROWS = 5_000_000
SHUFFLED = RewriteSpec(parallelism=6, max_parallelism=256)
WARM_UPS = 4
BUDGET = "≤ 0.5 ×"


def publish(store: CheckpointStore, rows: int) -> None:
    """A checkpoint with one keyed state of ``rows`` rows in four subtasks."""
    graph = JobGraph((Operator(OperatorId("sums"), 4, 128),))
    state = value_state("sums", "total", keys={"k": pa.int64()}, values={"v": pa.int64()})
    pending = store.begin(job_id="bench", graph=graph, states=[state], parent=None)
    generator = np.random.default_rng(1)
    data = pa.table({"k": generator.permutation(rows), "v": generator.integers(0, 10**6, rows)})
    owners = pending.context.owners("sums", "total", data)
    for subtask in range(4):
        with pending.context.subtask("sums", subtask) as writer:
            writer.write("total", data.filter(pa.array(owners == subtask)))
        pending.add(writer)
    pending.publish()


def by_hand(spark: Any, segments: str, target: str) -> None:
    """What one would write without this library: the same rows, by key into six files."""
    spark.read.parquet(segments).repartition(6, "k").write.parquet(target)


def measure(rows: int = ROWS) -> list[Row]:
    """Both rows of the table."""
    with tempfile.TemporaryDirectory(prefix="bench-rewrite-") as scratch:
        spark = local_session("bench rewrite", **{"spark.driver.memory": "4g"})
        numbers = itertools.count()

        def new_store() -> CheckpointStore:
            return open(f"{scratch}/{next(numbers)}", durable=False)  # Spark does not sync either

        store = new_store()
        publish(store, rows)
        source = store.open()
        segments = str(Path(scratch) / "0" / "segments" / f"{source.id:020d}")
        # The JVM compiles for a while; both sides are slower until it has, and not by the same factor.
        for _ in range(WARM_UPS):
            by_hand(spark, segments, f"{scratch}/{next(numbers)}")
            rewrite(store, source, SHUFFLED, engine=SparkEngine(spark), target=new_store())
        lines = [
            compare(
                f"`rewrite` on Spark, {rows:,} rows, 4 → 6 subtasks, max parallelism 128 → {ceiling}",
                lambda spec=spec: rewrite(store, source, spec, engine=SparkEngine(spark), target=new_store()),  # type: ignore[misc]
                lambda: by_hand(spark, segments, f"{scratch}/{next(numbers)}"),
                label="PySpark read, repartition, write",
                budget=BUDGET,
            )
            for ceiling, spec in (
                (256, SHUFFLED),
                (128, RewriteSpec(parallelism=6)),
            )
        ]
        spark.stop()
    return lines
