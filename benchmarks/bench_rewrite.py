"""``rewrite`` on Spark against a hand-written PySpark job: read, repartition, write.

5M (int64, int64) rows, 4 subtasks to 6: first with max parallelism 128 to 256, so every row is
hashed and shuffled as in the other job; then without, where nothing needs a shuffle.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row, compare
from benchmarks.scale_stores import publish_keyed
from stateformat.backends.rewrite import RewriteSpec, rewrite
from stateformat.backends.spark.rewrite import SparkEngine
from stateformat.backends.spark.sessions import local_session
from stateformat.store import CheckpointStore, open

ROWS = 5_000_000
SHUFFLED = RewriteSpec(parallelism=6, max_parallelism=256)
WARM_UPS = 4
BUDGET = "≤ 0.5 ×"


def by_hand(spark: Any, segments: str, target: str) -> None:
    spark.read.parquet(segments).repartition(6, "key").write.parquet(target)


def measure(rows: int = ROWS) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-rewrite-") as scratch:
        spark = local_session("bench rewrite", **{"spark.driver.memory": "4g"})
        numbers = itertools.count()

        def new_store() -> CheckpointStore:
            return open(f"{scratch}/{next(numbers)}", durable=False)  # Spark does not sync either

        store = new_store()
        generator = np.random.default_rng(1)
        data = pa.table({"key": generator.permutation(rows), "v": generator.integers(0, 10**6, rows)})
        publish_keyed(store, data, 4, options=None)
        source = store.open()
        segments = str(Path(scratch) / "0" / "segments" / f"{source.id:020d}")
        # The JVM compiles for a while; both sides are slower until it has, and not by the same
        # factor.
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
            for ceiling, spec in ((256, SHUFFLED), (128, RewriteSpec(parallelism=6)))
        ]
        spark.stop()
    return lines
