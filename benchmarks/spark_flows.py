"""Our side of the Spark benchmarks: dataflows over the same files, run epoch by epoch.

A run is stepped by hand, and an epoch is what lies between two publications. The sink takes its rows and throws them away, as ``noop``
does on the other side; nothing is synced.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import stateformat as sf
from benchmarks.measuring import family
from benchmarks.spark_input import FILES, Epoch, fold
from stateformat.backends.connectors import ParquetSource
from stateformat.backends.dataflow import (
    Dataflow,
    NoSplit,
    Operator,
    Prepared,
    Split,
    SplitEnumerator,
    Stream,
    TwoPhaseCommitSink,
    ValueState,
)
from stateformat.backends.runtime import Run
from stateformat.backends.spark.sessions import job_session, local_session
from stateformat.backends.storage.local import LocalStorage

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from stateformat.publication import CommitPermit

KEY = pa.schema([("k", pa.int64())])
TOTALS = pa.schema([("total", pa.int64()), ("n", pa.int64())])
BATCH_ROWS = 262_144
CONF = {"spark.driver.memory": "5g"}
OPTIONS = {"checkpoint_interval_us": 3_600_000_000, "idle_us": 0}
"""An epoch ends when nothing is left to read, and the next one begins at once."""

READS = ".reads"

Flow = Callable[[str, int], Dataflow]


class Epochs(ParquetSource):
    """The files of a folder, one to each reader in an epoch; nothing where there are no more, for ever."""

    def __init__(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])
        super().__init__(folder, schema=schema, batch_rows=BATCH_ROWS, grows=True)
        self._folder = folder

    def enumerator(self) -> SplitEnumerator:
        """Deals an epoch at a time."""
        return EpochEnumerator(self._folder)


class EpochEnumerator(SplitEnumerator):
    """Deals the files of epoch 0, then, behind a checkpoint in which all of them were dealt, those of epoch 1."""

    columns = pa.schema(
        [pa.field("epoch", pa.int64(), nullable=False), pa.field("dealt", pa.list_(pa.int64()), nullable=False)]
    )

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._epoch = 0
        self._dealt: set[int] = set()

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        """The file of this reader, where it is there."""
        for part in range(subtask, FILES, parallelism):
            path = self._folder / f"epoch-{self._epoch:05d}-{part}.parquet"
            if part not in self._dealt and path.exists():
                self._dealt.add(part)
                return Split(path.name, json.dumps({"path": str(path), "size_bytes": path.stat().st_size}).encode())
        return NoSplit.LATER

    def snapshot(self) -> pa.Table:
        """The epoch, and what of it was dealt."""
        if len(self._dealt) == FILES:
            self._epoch, self._dealt = self._epoch + 1, set()
        return pa.table({"epoch": [self._epoch], "dealt": [sorted(self._dealt)]}, schema=self.columns)

    def restore(self, rows: pa.Table) -> None:
        """Go on there."""
        row = rows.to_pylist()[0]
        self._epoch, self._dealt = row["epoch"], set(row["dealt"])


class PerKey(Operator):
    """Sum and count by key with :func:`~benchmarks.spark_input.fold`, called once for each key of a batch."""

    def states(self, *inputs: pa.Schema) -> list[ValueState]:  # noqa: ARG002
        """``totals``."""
        return [ValueState("totals", KEY, TOTALS)]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:  # noqa: ARG002
        """Key and totals."""
        return pa.schema([*KEY, *TOTALS])

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002
        """Group a batch; one search of the state for all its keys, one call for each, one write."""
        if not batch.num_rows:
            return None
        keys, values = (batch.column(name).to_numpy() for name in ("k", "v"))
        order = np.argsort(keys, kind="stable")
        distinct, begins = np.unique(keys[order], return_index=True)
        runs = np.split(values[order], begins[1:])
        columns = pa.RecordBatch.from_arrays([pa.array(distinct)], schema=KEY)
        state = self.context.value_state("totals")
        old, _ = state.get(columns)
        before = (old[name].fill_null(0).to_numpy().tolist() for name in TOTALS.names)
        after = [fold(total, count, run) for total, count, run in zip(*before, runs, strict=True)]
        totals, counts = (pa.array(column, pa.int64()) for column in zip(*after, strict=True))
        state.put(columns, pa.RecordBatch.from_arrays([totals, counts], schema=TOTALS))
        return pa.RecordBatch.from_arrays([columns["k"], totals, counts], ["k", "total", "n"])


class PlainPerKey(PerKey):
    """The same as one writes it who thinks of one key: its rows are put together, and its state is read and written alone."""

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:  # noqa: ARG002
        """``get_one``, :func:`~benchmarks.spark_input.fold` and ``put_one`` for each key."""
        if not batch.num_rows:
            return None
        grouped: dict[int, list[int]] = {}
        for key, value in zip(batch["k"].to_pylist(), batch["v"].to_pylist(), strict=True):
            grouped.setdefault(key, []).append(value)
        state = self.context.value_state("totals")
        rows = []
        for key, values in grouped.items():
            old = state.get_one(key) or {"total": 0, "n": 0}
            total, count = fold(old["total"], old["n"], np.array(values))
            state.put_one((key,), total=total, n=count)
            rows.append({"k": key, "total": total, "n": count})
        return pa.RecordBatch.from_pylist(rows, schema=self.output_schema())


class Discard(TwoPhaseCommitSink):
    """Takes rows and has nothing to commit."""

    committable_columns = pa.schema([("rows", pa.int64())])

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        """Nothing."""

    def prepare_commit(self, prepared: Prepared) -> None:
        """Nothing."""

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:
        """Nothing."""


# The flows -----------------------------------------------------------------------------------------------------------------------


def _rows(name: str, folder: str, parallelism: int) -> Stream:
    return Dataflow(name, parallelism=parallelism).source(Epochs(folder), uid="rows").key_by("k")


def per_key(folder: str, parallelism: int = FILES) -> Dataflow:
    """The per-key function. Two levels: the sink is chained to the operator."""
    return _rows("per-key", folder, parallelism).apply(PerKey(), uid="totals").apply(Discard(), uid="out").flow


def plain_per_key(folder: str, parallelism: int = FILES) -> Dataflow:
    """The same function, called as its author writes it who does not vectorise."""
    return _rows("plain", folder, parallelism).apply(PlainPerKey(), uid="totals").apply(Discard(), uid="out").flow


def vectorised(folder: str, parallelism: int = FILES) -> Dataflow:
    """The same by :class:`~stateformat.backends.dataflow.operators.aggregate.Aggregate`."""
    totals = _rows("vectorised", folder, parallelism).aggregate(
        {"total": ("v", "sum"), "n": ("*", "count")}, uid="totals"
    )
    return totals.apply(Discard(), uid="out").flow


def three_levels(folder: str, parallelism: int = FILES) -> Dataflow:
    """Source, keyed operator and sink with an exchange between each two."""
    totals = _rows("three-levels", folder, parallelism).aggregate(
        {"total": ("v", "sum"), "n": ("*", "count")}, uid="totals"
    )
    return totals.rebalance().apply(Discard(), uid="out").flow


# Running, in a process of its own -------------------------------------------------------------------------------------------------

_RUNS: dict[str, Run] = {}
"""The runs of this process, by the address of their store."""


def session() -> SparkSession:
    """A session for these flows, on all cores."""
    return local_session("bench spark runtime", **CONF)


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
    """Go on for so many publications that have rows; what is published before the first row comes counts with the next."""
    return [_epoch(_RUNS[store], least=1) for _ in range(count)]


def empty_epoch(store: str) -> Epoch:
    """Go on to the next publication, which has no rows."""
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
    """Give a run up."""
    _RUNS.pop(store).close()


class Metered(LocalStorage):
    """Local storage that writes down, for whichever process reads, how many bytes it has read."""

    def __init__(self, root: str, log: str) -> None:
        super().__init__(root, durable=False)
        self._given = root, log

    def __reduce__(self) -> tuple[Any, ...]:
        return Metered, self._given

    def _count(self, data: pa.Buffer) -> pa.Buffer:
        with open(self._given[1], "a") as log:  # noqa: PTH123
            log.write(f"{len(data)}\n")
        return data

    def read(self, path: str) -> pa.Buffer:
        """Counted."""
        return self._count(super().read(path))

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        """Counted. Segments and manifests are read by this alone."""
        return self._count(super().read_range(path, offset, length))


def bytes_read(store: str) -> int:
    """What has been read from a store until now, by the driver and by all workers."""
    log = Path(store + READS)
    return sum(int(line) for line in log.read_text().split()) if log.exists() else 0


def totals(store: str) -> tuple[int, int, int]:
    """Keys, sum of totals, and sum of counts that the newest checkpoint holds."""
    keys = total = count = 0
    for batch in sf.open(store).open().read("totals", "totals").batches():
        # Key group, key, and the two accumulators, whatever their names are.
        totals, counts = batch.columns[-2:]
        keys += batch.num_rows
        total += pc.sum(totals).as_py()
        count += pc.sum(counts).as_py()
    return keys, total, count


# The job to which an empty epoch is compared -----------------------------------------------------------------------------------------


def identity(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What comes."""
    yield from batches


def trivial_job() -> float:
    """Seconds that a job of three identities with two shuffles takes, on four rows, built and run as an epoch is."""
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


def in_turn(store: str, pairs: int) -> list[tuple[float, float]]:
    """Seconds of an empty epoch and of the trivial job, in turn."""
    return [(empty_epoch(store).seconds, trivial_job()) for _ in range(pairs)]


def peak_memory() -> int:
    """Bytes: the sum of what this process and all below it (Spark, its workers) had at most, each at its own time."""
    sum_bytes = 0
    for pid in family(os.getpid()):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        sum_bytes += int(fields.get("VmHWM", "0 kB").split()[0]) * 1024
    return sum_bytes
