"""``spark.read.format("stateformat")`` against the least that a Python data source can do.

5M (int64, int64) rows of a keyed state, summed by Spark. The other side is a data source of ten
lines, which yields the batches of the Parquet file that ``ckpt export`` writes of that state; it
has as many partitions, and batches as large. ``spark.read.parquet`` of that file stands beside.
Then one key of the 5M, by a filter that is pushed down, against reading all of them for it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from benchmarks.measuring import Row, compare
from benchmarks.scale_stores import publish_keyed
from stateformat.backends.spark import local_session, register_data_source
from stateformat.store import open

ROWS = 5_000_000
SUBTASKS = 4
BATCH_ROWS = 131_072
WARM_UPS = 3
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"


class ParquetBatches(DataSource):
    """The ten lines; ``parts`` is the number of partitions."""

    def schema(self) -> str:
        return "key bigint, v bigint"

    def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002 - Spark gives it
        return ParquetBatchesReader(self.options)


class ParquetBatchesReader(DataSourceReader):
    def __init__(self, options: Any) -> None:
        self.path, self.parts = options["path"], int(options["parts"])

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(part) for part in range(self.parts)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        file = pq.ParquetFile(self.path)
        first, last = (file.num_row_groups * part // self.parts for part in (partition.value, partition.value + 1))
        yield from file.iter_batches(BATCH_ROWS, row_groups=range(first, last))


def measure(rows: int = ROWS) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-data-source-") as scratch:
        url, exported = f"{scratch}/store", f"{scratch}/state.parquet"
        generator = np.random.default_rng(1)
        data = pa.table({"key": generator.permutation(rows), "v": generator.integers(0, 10**6, rows)})
        publish_keyed(open(url, durable=False), data, SUBTASKS, options=None)
        command = [
            sys.executable,
            "-m",
            "stateformat.tools.ckpt",
            "export",
            url,
            "--operator",
            "sums",
            "--state",
            "sum",
        ]
        subprocess.run([*command, "--to", exported], check=True, capture_output=True)
        spark = local_session("bench data source", **{"spark.driver.memory": "4g"})
        register_data_source(spark)
        spark.dataSource.register(ParquetBatches)
        reader = spark.read.format("stateformat").options(operator="sums", state="sum")
        state = reader.load(url)
        parts = state.rdd.getNumPartitions()
        ten_lines = spark.read.format("ParquetBatches").option("parts", parts).load(exported)
        plain = spark.read.parquet(exported)
        wanted = [(rows * (rows - 1) // 2, int(data["v"].to_numpy().sum()))]
        key, value = (int(data[name][rows // 2].as_py()) for name in ("key", "v"))

        def total(frame: Any) -> None:
            assert frame.selectExpr("sum(key)", "sum(v)").collect() == wanted

        def one_key(*, pushed: bool) -> None:
            # Spark 4.3 keeps what a DataFrame has planned with a filter: one for each query.
            spark.conf.set(PUSH_DOWN, str(pushed).lower())
            frame = reader.option("push_filters", "true").load(url)
            assert frame.where(f"key = {key}").collect() == [(key, value)]

        for _ in range(WARM_UPS):
            for frame in (state, ten_lines, plain):
                total(frame)
        what = f'`spark.read.format("stateformat")`, sum over {rows:,} rows, {parts} partitions'
        yield compare(
            what, lambda: total(state), lambda: total(ten_lines), label="data source of ten lines", budget="≤ 1.3 ×"
        )
        yield compare(
            f"{what}: against `spark.read.parquet` of the exported file",
            lambda: total(state),
            lambda: total(plain),
            label="`spark.read.parquet`",
            budget="–",
        )
        yield compare(
            f'`spark.read.format("stateformat")`, one key of {rows:,}, filter pushed down',
            lambda: one_key(pushed=True),
            lambda: one_key(pushed=False),
            label="not pushed down",
            budget="–",
        )
        spark.stop()
