"""Two-phase-commit sinks on Spark: workers prepare, the driver commits."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import s3fs

import stateformat as sf
from stateformat.backends.connectors import FileSink, RateSource, SqlSink
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.spark.runtime import SparkRuntime
from tests.servers.server import BUCKET, S3Server


def test_files_on_s3_and_rows_of_a_database_are_committed(moto: S3Server, spark: Any, tmp_path: Path) -> None:
    credentials = moto.options()
    place = f"{BUCKET}/{tmp_path.name}"
    flow = Dataflow("rows", parallelism=2)
    ticks = flow.source(RateSource(total=9_000, shards=4), uid="ticks")
    ticks.apply(FileSink(f"s3://{place}/out", **credentials), uid="files")
    totals = ticks.key_by("shard").aggregate({"rows": ("*", "count")}, emit="end", uid="totals")
    totals.apply(SqlSink(f"sqlite:///{tmp_path}/totals.db", "totals"), uid="table")
    store = sf.open(f"s3://{place}/store", **credentials)

    outcome = SparkRuntime(spark, store, checkpoint_rows=4_000).run(flow)

    assert outcome.checkpoint_id is not None
    assert outcome.checkpoint_id >= 3
    files = s3fs.S3FileSystem(**credentials, skip_instance_cache=True, use_listings_cache=False)
    tables = [
        pq.read_table(files.open(path), columns=["shard", "n"]) for path in files.glob(f"{place}/out/**/*.parquet")
    ]
    assert len(tables) > 1
    assert sorted(tuple(row.values()) for table in tables for row in table.to_pylist()) == [
        (shard, n) for shard in range(4) for n in range(2_250)
    ]
    with sqlite3.connect(tmp_path / "totals.db") as database:
        assert database.execute("SELECT shard, rows FROM totals ORDER BY shard").fetchall() == [
            (n, 2_250) for n in range(4)
        ]
    database.close()
