"""A job that fails by order, and what must hold whatever happens to it.

The job reads a table, gives each record a *spot* at random (so that a record processed twice goes
two ways), keeps by key and by spot what it has seen, and writes files with three sinks. Its parts
look for orders: files in a directory, each carried out once, by whichever process removes it first.

:func:`judge` compares, by SQL over the input, the committed rows, and the states of every
checkpoint with the part of the input that its sources had read. It does not know how often the job
was killed.

Drivers that are killed are processes of their own on the Spark of the test (:class:`Drivers`).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat import validate
from stateformat.backends.connectors import FileSink, MemorySource
from stateformat.backends.dataflow import Dataflow, Operator, OperatorContext, Prepared, ValueState
from stateformat.backends.runtime import JobOutcome, VirtualClock, driver
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.errors import StorageError
from stateformat.graph import Status
from stateformat.model import Record
from stateformat.publication import CommitPermit
from stateformat.segments import WriteOptions
from stateformat.storage import CreateOutcome, Storage, open_storage
from stateformat.store import CheckpointStore
from tests.worlds.local import Boom

ROWS = 3000
KEYS = 50
SPOTS = 97
EPOCH_ROWS = 600
WINDOW_US = 1000
EVENTS = pa.schema([("id", pa.int64()), ("key", pa.int64()), ("value", pa.int64()), ("at", pa.int64())])
SPOTTED = EVENTS.append(pa.field("spot", pa.int64()))
AGGREGATES = {"n": ("*", "count"), "total": ("value", "sum")}
NO_INLINE = WriteOptions(check_unique=False, trust_key_groups=True, inline_bytes_max=0)
"""As drivers write, but every segment is an object: what is lost leaves a trace."""


def events(rows: int, parts: int) -> pa.Table:
    """The input, in parts of the same times."""
    number = np.arange(rows)
    columns = [number, number * 7919 % KEYS, number * 31 % 1009, number % (rows // parts) * 10]
    return pa.table([pa.array(column, pa.int64()) for column in columns], schema=EVENTS)


class Orders:
    """What is to go wrong, once each: ``give("seen.process", "kill")``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def give(self, place: str, what: str, times: int = 1) -> None:
        """The next times the job comes to this place: ``kill``, ``raise``, or another word."""
        for _ in range(times):
            (self.directory / f"{place}={what}={os.urandom(4).hex()}").touch()

    def take(self, place: str) -> str | None:
        """The order for a place, which is the caller's now; None without one."""
        for file in sorted(self.directory.iterdir()):
            if file.name.startswith(f"{place}="):
                with contextlib.suppress(FileNotFoundError):
                    file.unlink()
                    return file.name.split("=")[1]
        return None

    def obey(self, place: str) -> None:
        what = self.take(place)
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "kill-executor":
            of_worker = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
            os.kill(int(of_worker[1]), signal.SIGKILL)
            time.sleep(60)  # The worker goes with its executor.
        elif what is not None:
            raise Boom(f"{what} at {place}")

    @property
    def left(self) -> int:
        return len(list(self.directory.iterdir()))


VERBS = {
    **dict.fromkeys(("read", "read_range", "open_input"), "read"),
    **dict.fromkeys(("list", "names", "names_after"), "list"),
    "open_output": "write",
}


class Storm:
    """A storage that fails by order, in the ``driver`` or, once it was pickled, in a ``worker``.

    Orders: ``driver.read``, ``worker.write``, ``driver.list`` …; and ``driver.publish``, of the
    creation of a record: ``kill-before``, ``kill-after``, ``lose`` (the answer) or ``refuse``.
    """

    def __init__(self, inner: Storage, orders: Orders, where: str = "driver") -> None:
        self._inner = inner
        self._orders = orders
        self._where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return Storm, (self._inner, self._orders, "worker")

    def _ask(self, verb: str, path: str) -> None:
        if self._orders.take(f"{self._where}.{verb}") is not None:
            raise StorageError(f"{verb} of {path} fails: the store is down", path=path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self._inner, name)

        def asked(path: str, *more: Any) -> Any:
            self._ask(VERBS[name], path)
            return found(path, *more)

        return asked if name in VERBS else found

    def create(self, path: str, data: bytes) -> CreateOutcome:
        what = self._orders.take("driver.publish") if path.startswith("checkpoints/") else None
        if what == "kill-before":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "refuse":
            return CreateOutcome.UNKNOWN
        outcome = self._inner.create(path, data)
        if what == "kill-after":
            os.kill(os.getpid(), signal.SIGKILL)
        return CreateOutcome.UNKNOWN if what == "lose" else outcome


class Spot(Operator):
    """Gives each record a spot at random."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return SPOTTED

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        self._orders.obey("spot.process")
        spots = np.random.default_rng().integers(0, SPOTS, batch.num_rows)
        return pa.record_batch([*batch.columns, pa.array(spots, pa.int64())], schema=SPOTTED)

    def snapshot(self) -> None:
        self._orders.obey("spot.snapshot")


class Seen(Operator):
    """Counts by spot what it passes on."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders

    def states(self, *inputs: pa.Schema) -> list[ValueState]:
        return [ValueState("seen", {"spot": pa.int64()}, {"times": pa.int64(), "ids": pa.int64()})]

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._orders.obey("seen.open")

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        self._orders.obey("seen.process")
        self._orders.obey(f"seen.process.{self.context.subtask}")
        found = pa.table(batch).group_by("spot").aggregate([("id", "count"), ("id", "sum")]).combine_chunks()
        state = self.context.value_state("seen")
        keys = found.select(["spot"]).to_batches()[0]
        before, _ = state.get(keys)
        counts = [
            pc.add(found[column].combine_chunks(), pc.fill_null(before[name], 0))
            for name, column in (("times", "id_count"), ("ids", "id_sum"))
        ]
        state.put(keys, pa.record_batch(counts, names=["times", "ids"]))
        return batch

    def snapshot(self) -> None:
        self._orders.obey("seen.snapshot")


class Sink(FileSink):
    """A file sink that fails by order: ``<uid>.prepared``, ``commit`` (half), ``committed``."""

    def __init__(self, directory: Path, orders: Orders) -> None:
        super().__init__(directory, rows_per_file=100, durable=False)
        self._orders = orders

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:
        table = super().prepare_commit(prepared)
        if table is not None:
            self._orders.obey(f"{self.context.uid}.prepared")
            self._orders.obey(f"{self.context.uid}.prepared.{self.context.subtask}")
        return table

    def commit(self, permit: CommitPermit, committables: pa.Table) -> None:
        super().commit(permit, committables.slice(0, committables.num_rows // 2))
        self._orders.obey("commit")
        super().commit(permit, committables.slice(committables.num_rows // 2))
        self._orders.obey("committed")


class Place:
    """Where one job runs: its store, its output, its orders."""

    def __init__(self, directory: Path, rows: int = ROWS, parallelism: int = 2) -> None:
        self.directory = directory
        self.rows = rows
        self.parallelism = parallelism
        self.orders = Orders(directory / "orders")
        self.url = f"file://{directory / 'store'}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.directory, self.rows, self.parallelism)

    @property
    def events(self) -> pa.Table:
        return events(self.rows, self.parallelism)

    @property
    def store(self) -> CheckpointStore:
        """A store that fails by order, and does not wait."""
        return CheckpointStore(Storm(open_storage(self.url), self.orders), sleep=lambda _: None)

    def flow(self) -> Dataflow:
        """Three levels: source and spots; states by spot and by key; the sink of the records."""
        flow = Dataflow("failures", parallelism=self.parallelism)
        source = MemorySource(self.events, splits=self.parallelism, batch_rows=50)
        read = flow.source(source, uid="events", event_time="at").apply(Spot(self.orders), uid="spot")
        by_key = read.key_by("key")
        totals = by_key.aggregate(AGGREGATES, emit="end", uid="totals")
        totals.apply(self._sink("totals"), uid="totals-out")
        by_key.window(WINDOW_US, "at", AGGREGATES, uid="windows").apply(self._sink("windows"), uid="windows-out")
        seen = read.key_by("spot").apply(Seen(self.orders), uid="seen")
        seen.rebalance().apply(self._sink("records"), uid="records-out")
        return flow

    def _sink(self, name: str) -> Sink:
        return Sink(self.directory / name, self.orders)

    def runtime(self, spark: Any, **options: Any) -> SparkRuntime:
        """A runtime that does not wait, and keeps all that attempts have written."""
        options = {"clock": VirtualClock(), "checkpoint_rows": EPOCH_ROWS, "keep": None, **options}
        return SparkRuntime(spark, options.pop("store", self.store), **options)

    def run(self, spark: Any, **options: Any) -> JobOutcome:
        return self.runtime(spark, **options).run(self.flow())

    def committed(self, name: str) -> pa.Table | None:
        files = sorted((self.directory / name).glob("*.parquet"))
        return pa.concat_tables([pa.parquet.read_table(file) for file in files]) if files else None


class Judged(NamedTuple):
    """How much :func:`judge` has looked at."""

    checkpoints: int
    states: int
    garbage: int


def judge(place: Place) -> Judged:
    """Check an ended job: output and states of each checkpoint to the row, and what is garbage."""
    store = CheckpointStore(open_storage(place.url))
    table = {"events": place.events, "records": place.committed("records")}
    _same(table["records"].select(EVENTS.names), table["events"], "records")
    window = f'"at" // {WINDOW_US}'
    for name, columns, by in (
        ("totals", "key", "key"),
        ("windows", f"key, {window} * {WINDOW_US}, ({window} + 1) * {WINDOW_US}", f"key, {window}"),
    ):
        wanted = f"select {columns}, count(*), sum(value)::bigint from events group by {by}"
        _same(place.committed(name), _sql(wanted, table), name)
    states = 0
    history = store.history()
    for record in history:
        report = validate(store, record.checkpoint_id, level="full")
        assert not report.problems, [str(found) for found in report.problems]
        states += _judge_states(place, store, record, table)
    return Judged(len(history), states, _judge_garbage(store))


def _judge_states(place: Place, store: CheckpointStore, record: Record, table: dict[str, Any]) -> int:
    """Check the states of the operators that were running; how many."""
    checkpoint = store.open(record.checkpoint_id)
    status = {str(operator.uid): operator for operator in record.graph.operators}
    part_rows = place.rows // place.parallelism
    read = {f"part-{number:05d}": part_rows for number in range(place.parallelism)}
    if status["events"].status is not Status.FULLY_FINISHED:
        held = checkpoint.read("events", "splits").table().to_pylist()
        left = checkpoint.read("events", "enumerator").table().to_pylist()
        read |= {row["id"]: 0 for row in left if row["message"] is None}
        read |= {row["split_id"]: row["position"] for row in held}
    parts = " or ".join(
        f"id // {part_rows} = {int(name[-5:])} and id % {part_rows} < {count}" for name, count in read.items()
    )
    looked_at = 0
    for uid, sql in (
        ("totals", f"select key, count(*), sum(value)::bigint from events where {parts} group by key"),
        ("seen", f"select spot, count(*), sum(id)::bigint from records where {parts} group by spot"),
    ):
        operator = status[uid]
        if operator.status is Status.RUNNING and not (operator.finished or operator.finishing):
            what = f"state {uid} of checkpoint {record.checkpoint_id}, where {parts}"
            _same(checkpoint.read(uid, uid).table().drop_columns("_key_group"), _sql(sql, table), what)
            looked_at += 1
    return looked_at


def _judge_garbage(store: CheckpointStore) -> int:
    """Check that exactly what no checkpoint names is garbage; how many objects."""
    named: set[str] = set()
    for record in store.history():
        named |= set(store.open(record.checkpoint_id).handles["path"].to_pylist()) | {record.manifest.path}
        named.add(f"checkpoints/{record.checkpoint_id:020d}.json")
    newest = store.open().id
    there = _objects(store)
    garbage = {path for path in there if int(path.split("/")[1][:20]) <= newest} - named
    found = store.collect_garbage(delete=True)
    assert found.stopped is None
    assert {item.path for item in found.objects} == garbage
    assert _objects(store) == there - garbage
    assert named - {None, ""} <= there - garbage, sorted(named - there)
    return len(found.objects)


def _objects(store: CheckpointStore) -> set[str]:
    return {item.path for top in ("checkpoints/", "manifests/", "segments/") for item in store.storage.list(top)}


def _sql(query: str, tables: dict[str, Any]) -> pa.Table:
    with duckdb.connect() as connection:
        for name, table in tables.items():
            connection.register(name, table)
        return connection.sql(query).to_arrow_table()


def _same(found: pa.Table | None, wanted: pa.Table, what: str) -> None:
    """Check that two tables have the same rows, in any order."""
    assert found is not None, f"{what}: nothing is there"
    rows = [Counter(zip(*(column.to_pylist() for column in table.columns), strict=True)) for table in (found, wanted)]
    missing, more = rows[1] - rows[0], rows[0] - rows[1]
    assert rows[0] == rows[1], (
        f"{what}: {missing.total()} rows are missing, {[*missing][:3]}, {more.total()} are too many, {[*more][:3]}"
    )


def attach(port: int, secret: str) -> Any:
    """The Spark of another process, for a driver in this one."""
    os.environ |= {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    # The server of forks may be older than the session, whose fixture sets it.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    gateway: Any = launch_gateway()
    active = gateway.jvm.org.apache.spark.SparkContext.getOrCreate()
    context = gateway.jvm.org.apache.spark.api.java.JavaSparkContext(active)
    return SparkSession(SparkContext(gateway=gateway, jsc=context, conf=SparkConf(_jconf=context.getConf())))


def drive(place: Place, port: int, secret: str, options: dict[str, Any]) -> None:
    """A driver in a process of its own. Leaves files: ``began``, and ``ended`` at its end."""
    logging.disable(logging.WARNING)
    driver._OPTIONS = NO_INLINE
    spark = attach(port, secret)
    (place.directory / "began").touch()
    place.run(spark, **options)
    (place.directory / "ended").touch()
    os._exit(0)  # The Spark is not ours to stop.


class Drivers:
    """Starts drivers on a Spark."""

    def __init__(self, spark: Any) -> None:
        gateway = spark.sparkContext._gateway
        self._address = (gateway.gateway_parameters.port, gateway.gateway_parameters.auth_token)
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(
            ["tests.spark.spark_failures", "pyspark.sql.session", "pyspark.sql.dataframe"]
        )

    def start(self, place: Place, **options: Any) -> BaseProcess:
        began = place.directory / "began"
        began.unlink(missing_ok=True)
        process = self._processes.Process(target=drive, args=(place, *self._address, options), daemon=True)
        process.start()
        self._wait(process, began.exists)
        return process

    def _wait(self, process: BaseProcess, happened: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not happened() and process.is_alive():
            assert time.monotonic() < end, "a driver does not begin"
            time.sleep(0.005)

    def run(self, place: Place, **options: Any) -> int:
        """Run one until it ends, or is killed by an order; its exit code."""
        process = self.start(place, **options)
        process.join(240)
        code = process.exitcode
        assert code is not None, "a driver does not end"
        return code

    def kill(self, place: Place, after_s: float, **options: Any) -> bool:
        """Start one and kill it so long after it began. Whether it lived until then."""
        process = self.start(place, **options)
        process.join(after_s)
        process.kill()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
        return process.exitcode != 0


@contextlib.contextmanager
def every_segment_an_object() -> Iterator[None]:
    """Within the block drivers of this process put no segment into a manifest."""
    before = driver._OPTIONS
    driver._OPTIONS = NO_INLINE
    try:
        yield
    finally:
        driver._OPTIONS = before
