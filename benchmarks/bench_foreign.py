"""State of other systems, read and written: processor time against the engines' own.

Spark: one million keys in four partitions, after one large batch and a small one. Ours is every
partition as Arrow; against it is Spark's own ``statestore`` source, warm, with the ``noop`` sink:
the same rows, none kept. The ratio is of processor time of all processes; times are by the clock.
Flink: canonical savepoints of one keyed state, as Arrow; entries a CPU second.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.flink_state import LISTED, write_savepoint
from benchmarks.measuring import Cost, Row, cost, duration, own_cost
from stateformat.backends.foreign.flink import FlinkSource
from stateformat.backends.foreign.spark.repartition.plan import plan_repartition
from stateformat.backends.foreign.spark.repartition.run import repartition
from stateformat.backends.foreign.spark.source import SparkSource
from stateformat.backends.spark.sessions import local_session
from stateformat.storage import Storage, open_storage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEYS, PARTITIONS, TARGETS = 1_000_000, 4, 12
ROUNDS = 5
PROVIDERS = {"HDFS-backed": "HDFSBackedStateStoreProvider", "RocksDB": "RocksDBStateStoreProvider"}
BUDGETS = {
    ("HDFS-backed", "long → long"): "≥ 10 ×",
    ("HDFS-backed", "string → string"): "≥ 3 ×",
    ("RocksDB", "long → long"): "≥ 2 ×",
    ("RocksDB", "string → string"): "≥ 2 ×",
}

FLINK_BUDGETS = {
    "long → long": (4_000_000, "≥ 10 M entries a CPU second"),
    "string → string": (1_000_000, "≥ 1.5 M entries a CPU second"),
    "string → POJO of five fields": (1_000_000, "≥ 0.3 M entries a CPU second"),
    LISTED: (1_000_000, "≥ 0.5 M entries a CPU second"),
}


def rows(kind: str, count: int) -> pa.Table:
    rng = np.random.default_rng(0)
    keys = pa.array(rng.permutation(KEYS)[:count])
    values = pa.array(rng.integers(0, 1 << 40, count))
    if kind == "long → long":
        return pa.table({"k": keys, "v": values})
    # Texts of several lengths, about 10 and 30 bytes long.
    names, texts = (
        pc.binary_join_element_wise(before, numbers.cast(pa.string()), "")
        for before, numbers in (("key-", keys), ("value of a key: ", values))
    )
    return pa.table({"k": names, "v": texts})


def store(spark: SparkSession, provider: str, kind: str, folder: Path) -> Path:
    """A query's checkpoint with the greatest value of every key."""
    session = spark.newSession()
    for name, value in {
        "spark.sql.shuffle.partitions": PARTITIONS,
        "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state."
        + PROVIDERS[provider],
    }.items():
        session.conf.set(name, value)
    data, checkpoint = folder / "data", folder / "checkpoint"
    data.mkdir(parents=True)
    schema = "k long, v long" if kind == "long → long" else "k string, v string"
    for number, count in enumerate((KEYS, KEYS // 20)):
        pq.write_table(rows(kind, count), data / f"{number}.parquet")
        greatest = session.readStream.schema(schema).parquet(str(data)).groupBy("k").agg({"v": "max"})
        writer = greatest.writeStream.outputMode("update").option("checkpointLocation", str(checkpoint))
        writer.format("noop").trigger(availableNow=True).start().awaitTermination()
    shutil.rmtree(data)
    return checkpoint


def folder_at(path: Path) -> Storage:
    found = open_storage(str(path)).folder()
    assert found is not None
    return found


def read(checkpoint: Path) -> None:
    source = SparkSource(folder_at(checkpoint))
    count = sum(len(batch) for part in source.parts for batch in source.read(part))
    assert count == KEYS, f"{count} of {KEYS} keys were read"


def reading(spark: SparkSession, checkpoint: Path, provider: str, kind: str) -> Row:
    source = spark.read.format("statestore")

    def theirs() -> Cost:
        return cost(lambda: source.load(str(checkpoint)).write.format("noop").mode("overwrite").save())

    pairs = [(own_cost(lambda: read(checkpoint)), theirs()) for _ in range(ROUNDS + 1)][1:]
    mine, other = (Cost(*map(median, zip(*costs, strict=True))) for costs in zip(*pairs, strict=True))
    return Row(
        f"Spark's {provider} store read, {KEYS:,} keys, {kind}",
        duration(mine.seconds),
        f"`statestore` source: {duration(other.seconds)}",
        f"{other.cpu / mine.cpu:.2f} ×",
        BUDGETS[provider, kind],
        (mine.cpu, other.cpu),
        faster=True,
    )


def dealing(checkpoint: Path, provider: str, kind: str) -> Row:
    """Dealt anew, with every check; best of some, as what others do only adds."""

    def deal() -> None:
        with tempfile.TemporaryDirectory(dir=checkpoint.parent) as folder:
            target = folder_at(Path(folder) / "target")
            there = folder_at(checkpoint)
            repartition(there, target, plan_repartition(there, target.url, TARGETS))

    taken = min(own_cost(deal).cpu for _ in range(ROUNDS))
    what = f"Spark's {provider} store dealt anew, {PARTITIONS} → {TARGETS}, {KEYS:,} keys, {kind}"
    return Row(what, f"{KEYS / taken / 1e6:.2f} M keys a CPU second", "–", "–", "≥ 2 M keys a CPU second")


def canonical(kind: str, folder: Path) -> Row:
    """A canonical savepoint of Flink's; best of three, as what others do only adds."""
    count, budget = FLINK_BUDGETS[kind]
    write_savepoint(folder, kind, count)

    def read() -> None:
        source = FlinkSource(folder_at(folder))
        found = sum(len(batch) for part in source.parts for batch in source.read(part))
        assert found == count, f"{found} of {count} entries were read"

    taken = min(cost(read).cpu for _ in range(3))
    what = f"Flink's canonical savepoint read, {count:,} entries, {kind}"
    return Row(what, f"{count / taken / 1e6:.2f} M entries a CPU second", "–", "–", budget)


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        for number, kind in enumerate(FLINK_BUDGETS):
            yield canonical(kind, Path(scratch) / str(number))
    spark = local_session("bench foreign state", **{"spark.driver.memory": "5g", "spark.sql.ansi.enabled": "false"})
    try:
        with tempfile.TemporaryDirectory() as scratch:
            for number, (provider, kind) in enumerate(BUDGETS):
                checkpoint = store(spark, provider, kind, Path(scratch) / str(number))
                yield reading(spark, checkpoint, provider, kind)
                yield dealing(checkpoint, provider, kind)
                shutil.rmtree(checkpoint.parent)
    finally:
        spark.stop()
