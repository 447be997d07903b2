"""Our side of the Spark benchmarks: dataflows over the same files, run epoch by epoch.

A run is stepped by hand, and an epoch is what lies between two publications. The sink throws its
rows away, as ``noop`` does on the other side; nothing is synced.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

import stateformat as sf
from benchmarks.measuring import family, peak_bytes
from benchmarks.scale_stores import Metered
from benchmarks.spark_input import FILES, WINDOW_US, Epoch, fold
from stateformat.backends import dataflow as df
from stateformat.backends.connectors import ParquetSource
from stateformat.backends.runtime import Run
from stateformat.backends.spark.sessions import job_session, local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stateformat.publication import CommitPermit

KEY = pa.schema([("k", pa.int64())])
ROWS = KEY.append(pa.field("v", pa.int64()))
TIMED = ROWS.append(pa.field("at", pa.timestamp("us", "UTC")))
TOTALS = pa.schema([("total", pa.int64()), ("n", pa.int64())])
BATCH_ROWS = 262_144
CONF = {"spark.driver.memory": "5g"}
OPTIONS = {"checkpoint_interval_us": 3_600_000_000, "idle_us": 0}
"""An epoch ends when nothing is left to read, and the next one begins at once."""

READS = ".reads"

Flow = Callable[[str, int], df.Dataflow]


class Epochs(ParquetSource):
    """The files of a folder for ever, one to each reader in an epoch."""

    def __init__(self, folder: str, schema: pa.Schema = ROWS) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        super().__init__(folder, schema=schema, batch_rows=BATCH_ROWS, grows=True)
        self._folder = folder

    def enumerator(self) -> df.SplitEnumerator:
        return EpochEnumerator(self._folder)


class EpochEnumerator(df.SplitEnumerator):
    """Gives the files of epoch 0; behind the checkpoint that has all, those of epoch 1; and on."""

    columns = pa.schema(
        [pa.field("epoch", pa.int64(), nullable=False), pa.field("dealt", pa.list_(pa.int64()), nullable=False)]
    )

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._epoch = 0
        self._dealt: set[int] = set()

    def next_split(self, subtask: int, parallelism: int) -> df.Split | df.NoSplit:
        for part in range(subtask, FILES, parallelism):
            path = self._folder / f"epoch-{self._epoch:05d}-{part}.parquet"
            if part not in self._dealt and path.exists():
                self._dealt.add(part)
                return df.Split(path.name, json.dumps({"path": str(path), "size_bytes": path.stat().st_size}).encode())
        return df.NoSplit.LATER

    def snapshot(self) -> pa.Table:
        if len(self._dealt) == FILES:
            self._epoch, self._dealt = self._epoch + 1, set()
        return pa.table({"epoch": [self._epoch], "dealt": [sorted(self._dealt)]}, schema=self.columns)

    def restore(self, rows: pa.Table) -> None:
        row = rows.to_pylist()[0]
        self._epoch, self._dealt = row["epoch"], set(row["dealt"])


def per_key_totals(key: int, rows: list[tuple[int, int]], state: Any) -> tuple[int, int, int]:
    """Sum and count of a key with :func:`~benchmarks.spark_input.fold`."""
    state.total, state.n = fold(state.total or 0, state.n or 0, [value for _, value in rows])
    return key, state.total, state.n


class Discard(df.TwoPhaseCommitSink):
    """Takes rows and has nothing to commit."""

    committable_columns = pa.schema([("rows", pa.int64())])

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        pass

    def prepare_commit(self, prepared: df.Prepared) -> None:
        pass

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:
        pass


def _rows(name: str, folder: str, parallelism: int) -> df.Stream:
    return df.Dataflow(name, parallelism=parallelism).source(Epochs(folder), uid="rows").key_by("k")


def per_key(folder: str, parallelism: int = FILES) -> df.Dataflow:
    """Plain Python for each key: ``apply_per_key``."""
    totals = _rows("per-key", folder, parallelism).apply_per_key(
        per_key_totals, state=df.ValueState("totals", (), TOTALS), output=pa.schema([*KEY, *TOTALS]), uid="totals"
    )
    return totals.apply(Discard(), uid="out").flow


def vectorised(folder: str, parallelism: int = FILES) -> df.Dataflow:
    """The same by :class:`~stateformat.backends.dataflow.operators.aggregate.Aggregate`."""
    totals = _rows("vectorised", folder, parallelism).aggregate(
        {"total": ("v", "sum"), "n": ("*", "count")}, uid="totals"
    )
    return totals.apply(Discard(), uid="out").flow


def three_levels(folder: str, parallelism: int = FILES) -> df.Dataflow:
    totals = _rows("three-levels", folder, parallelism).aggregate(
        {"total": ("v", "sum"), "n": ("*", "count")}, uid="totals"
    )
    return totals.rebalance().apply(Discard(), uid="out").flow


def windows(folder: str, parallelism: int = FILES) -> df.Dataflow:
    """Totals of tumbling windows, each given when the watermark has reached its end."""
    flow = df.Dataflow("windows", parallelism=parallelism)
    late = df.EventTime("at", out_of_order_us=WINDOW_US // 2)
    rows = flow.source(Epochs(folder, TIMED), uid="rows", event_time=late).key_by("k")
    totals = rows.window(WINDOW_US, "at", {"total": ("v", "sum"), "n": ("*", "count")}, uid="windows")
    return totals.apply(Discard(), uid="out").flow


def duplicates(folder: str, parallelism: int = FILES) -> df.Dataflow:
    first = _rows("duplicates", folder, parallelism).deduplicate(uid="first")
    return first.apply(Discard(), uid="out").flow


def joined(table: str) -> Flow:
    """Rows with the columns of a table, which is read once and kept."""
    return partial(_joined, table)


def _joined(table: str, folder: str, parallelism: int = FILES) -> df.Dataflow:
    flow = df.Dataflow("joined", parallelism=parallelism)
    kept = flow.source(ParquetSource(table), uid="table").broadcast()
    rows = flow.source(Epochs(folder), uid="rows")
    return rows.apply(df.BroadcastJoin("k"), kept, uid="join").apply(Discard(), uid="out").flow


_RUNS: dict[str, Run] = {}
"""The runs of this process, by the address of their store."""


def session() -> SparkSession:
    return local_session("bench spark runtime", **CONF)


def start() -> None:
    session()


def begin(flow: Flow, folder: str, store: str, parallelism: int = FILES) -> float:
    """Begin a run on what its store holds. Seconds that it took; the first epoch has not begun."""
    from stateformat.backends.spark.runtime import SparkRuntime

    spark = session()
    start = time.perf_counter()
    runtime = SparkRuntime(spark, sf.CheckpointStore(Metered(store, store + READS)), **OPTIONS)
    run = runtime.begin(flow(folder, parallelism))
    assert isinstance(run, Run), run
    _RUNS[store] = run
    return time.perf_counter() - start


def epochs(store: str, count: int) -> list[Epoch]:
    """Go on for so many publications with rows; one without rows counts with the next."""
    return [_epoch(_RUNS[store], least=1) for _ in range(count)]


def in_turn(stores: Sequence[str], count: int) -> list[Epoch]:
    """So many epochs of each of several runs, one after the other."""
    return [_epoch(_RUNS[store], least=1) for _ in range(count) for store in stores]


def run(flow: Flow, folder: str, store: str, count: int) -> list[Epoch]:
    """A whole run of so many epochs with rows, its begin and end included."""
    begin(flow, folder, store)
    found = epochs(store, count)
    end(store)
    return found


def empty_epoch(store: str) -> Epoch:
    found = _epoch(_RUNS[store], least=0)
    assert not found.rows, "rows were left to read"
    return found


def _epoch(run: Run, least: int) -> Epoch:
    published, read, start = run.published, run.progress().rows_read, time.perf_counter()
    while run.published == published or run.progress().rows_read < read + least:
        assert run.step(), "the job has ended"
    took = time.perf_counter() - start
    return Epoch(run.progress().rows_read - read, took)


def end(store: str) -> None:
    _RUNS.pop(store).close()


def bytes_read(store: str) -> int:
    return Metered(store, store + READS).bytes_read()


def keys(store: str) -> int:
    """How many keys the operator ``first`` has seen."""
    return sf.open(store).open().read("first", "seen").table().num_rows


def totals(store: str) -> tuple[int, int, int]:
    keys = total = count = 0
    for batch in sf.open(store).open().read("totals", "totals").batches():
        # Key group, key, and the two accumulators, whatever their names are.
        totals, counts = batch.columns[-2:]
        keys += batch.num_rows
        total += pc.sum(totals).as_py()
        count += pc.sum(counts).as_py()
    return keys, total, count


def identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def trivial_job() -> float:
    """Seconds of a job of three identities with two shuffles, built and run as an epoch is."""
    from pyspark.sql import functions

    spark = job_session(session())
    start = time.perf_counter()
    rows = spark.range(FILES, numPartitions=FILES).select(
        functions.col("id").cast("int").alias("target"),
        functions.lit(0).alias("level"),
        functions.lit(b"frame").alias("payload"),
    )
    ddl = "target int, level int, payload binary"
    for level in range(3):
        rows = (rows.repartitionById(FILES, "target") if level else rows).mapInArrow(identity, ddl)
    found = rows.collect()
    assert len(found) == FILES
    return time.perf_counter() - start


def beside_trivial_jobs(store: str, pairs: int) -> list[tuple[float, float]]:
    return [(empty_epoch(store).seconds, trivial_job()) for _ in range(pairs)]


def peak_memory() -> int:
    """The sum of what this process and all below it (Spark, its workers) had at most, in bytes."""
    sum_bytes = 0
    for pid in family(os.getpid()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            sum_bytes += peak_bytes(pid)
    return sum_bytes
