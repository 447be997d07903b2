"""Structured Streaming's state read without Spark, against Spark's ``statestore`` source.

Both read the same checkpoints, which Spark wrote in one batch: 2M (long → long) keys and 1M
(string → string), in 4 partitions of the default store and of RocksDB. Ratios are of processor
time: Spark decodes in two threads, we in one. The last line is a re-deal of the default store.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import Row, duration, side_by_side
from stateformat.backends.foreign.spark import SparkSource
from stateformat.backends.foreign.spark.repartition import plan_repartition, repartition
from stateformat.backends.spark.sessions import local_session
from stateformat.storage import Storage, folder_of, open_storage

LONGS, STRINGS, PARTITIONS = 2_000_000, 1_000_000, 4
PROVIDERS = {
    "default store": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    "RocksDB store": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
BUDGETS = {
    ("default store", "long → long"): "≤ 0.10 ×",
    ("default store", "string → string"): "≤ 0.33 ×",
    ("RocksDB store", "long → long"): "≤ 0.50 ×",
    ("RocksDB store", "string → string"): "≤ 0.50 ×",
}
REDEAL_A_SECOND = 2_000_000


def write_input(root: Path, longs: int, strings: int) -> dict[str, tuple[str, str, int]]:
    """Write the rows of both queries; return folder, schema and number by what they are."""
    texts = [f"key-{number:x}-{'x' * (number % 17)}" for number in range(strings)]
    tables = {
        "long → long": pa.table({"k": pa.array(range(longs), pa.int64()), "v": pa.array(range(longs), pa.int64())}),
        "string → string": pa.table({"k": texts, "v": [text[::-1] for text in texts]}),
    }
    found = {}
    for number, (what, table) in enumerate(tables.items()):
        folder = root / f"input-{number}"
        folder.mkdir()
        pq.write_table(table, folder / "rows.parquet")
        kind = what.split(" ")[0]
        found[what] = (
            str(folder),
            f"k {kind if kind != 'long' else 'bigint'}, v {kind if kind != 'long' else 'bigint'}",
            len(table),
        )
    return found


def run_query(spark: Any, folder: str, schema: str, provider: str, checkpoint: str) -> None:
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", provider)
    rows = spark.readStream.schema(schema).parquet(folder)
    query = (
        rows.groupBy("k")
        .agg({"v": "max"})
        .writeStream.format("noop")
        .outputMode("update")
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def read_by_spark(spark: Any, checkpoint: str) -> None:
    spark.read.format("statestore").load(checkpoint).write.format("noop").mode("overwrite").save()


def opened(place: str) -> Storage:
    found = folder_of(open_storage(place))
    assert found is not None
    return found


def read_by_us(checkpoint: str, rows: int) -> None:
    source = SparkSource(opened(checkpoint))
    found = sum(len(batch) for part in source.parts for batch in source.read(part))
    assert found == rows, f"{found} rows of {rows}"


def compared(what: str, store: str, ours: Any, against: Any, rounds: int) -> Row:
    mine, theirs = side_by_side(ours, against, rounds=rounds)
    return Row(
        f"state of Spark, {what}, {store}, every row",
        duration(mine.cpu),
        f"Spark's `statestore` source: {duration(theirs.cpu)}",
        f"{mine.cpu / theirs.cpu:.3f} ×",
        BUDGETS[store, what.partition(", ")[2]],
        (mine.cpu, theirs.cpu),
    )


def measure(longs: int = LONGS, strings: int = STRINGS, rounds: int = 5) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-spark-state-") as scratch:
        spark = local_session(
            "bench spark state", **{"spark.driver.memory": "5g", "spark.sql.shuffle.partitions": str(PARTITIONS)}
        )
        rows = []
        inputs = write_input(Path(scratch), longs, strings)
        for number, ((store, provider), (what, (folder, schema, count))) in enumerate(
            itertools.product(PROVIDERS.items(), inputs.items())
        ):
            checkpoint = f"{scratch}/checkpoint-{number}"
            run_query(spark, folder, schema, provider, checkpoint)
            # The JVM compiles for a while.
            for _ in range(2):
                read_by_spark(spark, checkpoint)
            rows.append(
                compared(
                    f"{count:,} keys, {what}",
                    store,
                    lambda checkpoint=checkpoint, count=count: read_by_us(checkpoint, count),
                    lambda checkpoint=checkpoint: read_by_spark(spark, checkpoint),
                    rounds,
                )
            )
        spark.stop()
        rows.append(redealt(f"{scratch}/checkpoint-0", scratch, longs, rounds))
        return rows


def redealt(checkpoint: str, scratch: str, keys: int, rounds: int) -> Row:
    """Keys a processor second of a re-deal to another number of partitions."""
    numbers = itertools.count()

    def deal() -> None:
        target = opened(f"{scratch}/dealt-{next(numbers)}")
        repartition(opened(checkpoint), target, plan_repartition(opened(checkpoint), target.url, 12, None))

    mine, reading = side_by_side(deal, lambda: read_by_us(checkpoint, keys), rounds=rounds)
    speed = f"{keys / mine.cpu / 1e6:.1f} M keys a CPU second"
    budget = f"≥ {REDEAL_A_SECOND / 1e6:.0f} M a CPU second"
    against = f"reading them: {duration(reading.cpu)}"
    return Row(f"re-deal of {keys:,} keys, {PARTITIONS} → 12 partitions", speed, against, "–", budget)
