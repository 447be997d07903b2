"""The in-process executor against the Arrow kernels that it calls: a bounded job over Parquet, and the same in a loop.

Both sides read the same files in the same batches, derive a column, filter, sum and count by key, and write the result as
Parquet. The job does it as a dataflow: a source with splits, a map and a filter chained to it, a hash edge, a keyed aggregate
with state, a two-phase-commit file sink, and checkpoints while it runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import stateformat as sf
from backends.connectors import FileSink, ParquetSource
from backends.dataflow.api import Dataflow
from backends.dataflow.operators import Aggregate, Filter, Map
from backends.local import LocalRuntime
from benchmarks.measuring import Row, compare

ROWS, FILES, KEYS, BATCH_ROWS = 5_000_000, 4, 100_000, 65_536


def _inputs(folder: Path) -> list[str]:
    random = np.random.default_rng(7)
    paths = []
    for number in range(FILES):
        count = ROWS // FILES
        table = pa.table(
            {
                "key": random.integers(0, KEYS, count),
                "price": random.random(count) * 100,
                "quantity": random.integers(1, 10, count),
            }
        )
        paths.append(str(folder / f"part-{number}.parquet"))
        pq.write_table(table, paths[-1], compression="lz4")
    return paths


def _with_amount(batch: pa.RecordBatch) -> pa.RecordBatch:
    amount = pc.multiply(batch["price"], pc.cast(batch["quantity"], pa.float64()))
    return pa.RecordBatch.from_arrays([batch["key"], amount], ["key", "amount"])


WANTED = pc.field("amount") > 50.0


def _job(paths: list[str], out: Path, parallelism: int) -> Dataflow:
    flow = Dataflow("bench", parallelism=parallelism)
    rows = flow.source(ParquetSource(paths, batch_rows=BATCH_ROWS), uid="rows")
    large = rows.apply(Map(_with_amount), uid="amounts").apply(Filter(WANTED), uid="large")
    totals = large.key_by("key").apply(
        Aggregate("key", {"total": ("amount", "sum"), "n": ("*", "count")}, emit="end"), uid="totals"
    )
    totals.apply(FileSink(str(out), durable=False), uid="out")
    return flow


def _batches(paths: list[str]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        yield from pq.ParquetFile(path).iter_batches(BATCH_ROWS)


def _loop(paths: list[str], out: Path) -> None:
    """The kernels alone: every batch is grouped, and the groups are merged when they have become as many as there are rows in 16."""
    groups: list[pa.Table] = []
    sums = [("amount", "sum"), ("amount", "count")]
    for batch in _batches(paths):
        large = _with_amount(batch).filter(WANTED)
        grouped = pa.Table.from_batches([large]).group_by("key", use_threads=False).aggregate(sums)
        groups.append(grouped)
        if len(groups) == 16:
            groups = [_merged(groups)]
    pq.write_table(_merged(groups), out, compression="lz4")


def _merged(groups: list[pa.Table]) -> pa.Table:
    sums = [("amount_sum", "sum"), ("amount_count", "sum")]
    merged = pa.concat_tables(groups).group_by("key", use_threads=False).aggregate(sums)
    return merged.rename_columns(["key", "amount_sum", "amount_count"])


def measure() -> list[Row]:
    """The rows of the table."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        paths = _inputs(folder)
        times = iter(range(10**6))
        for parallelism in (1, 4):

            def job(parallelism: int = parallelism) -> None:
                number = next(times)
                store = sf.open(str(folder / f"store-{number}"), durable=False)
                runtime = LocalRuntime(store, checkpoint_rows=ROWS // 4, checkpoint_interval_us=None)
                runtime.run(_job(paths, folder / f"out-{number}", parallelism))

            rows.append(
                compare(
                    f"bounded job over Parquet, {ROWS:,} rows, {KEYS:,} keys, 4 checkpoints, parallelism {parallelism}",
                    job,
                    lambda: _loop(paths, folder / f"loop-{next(times)}.parquet"),
                    label="the same Arrow kernels in a loop",
                    budget="≤ 2 ×",
                )
            )
    return rows
