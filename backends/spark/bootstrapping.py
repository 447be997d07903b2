"""``bootstrap`` for Spark DataFrames: rows go from worker to worker, never to the driver.

Each state is one job of two stages. In the first, the rows of a partition are converted to the
state's columns and assigned to subtasks; the exchange carries frames, as in a rewrite. In the
second, each subtask writes one segment. The driver collects one row per segment. If a task runs
twice, nothing refers to the extra segments.
"""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.segments import WriteOptions
from stateformat.snapshot import WriteContext
from stateformat.store import CheckpointStore

from .. import bootstrap as local
from ..bootstrap import Bootstrapped, OnDuplicate, StateInput, Written
from ..dataflow.flow import Dataflow
from ..rewrite import DISTRIBUTE_BYTES, gathered
from .arrow import arrow_schema_of
from .rewrite import FRAME_SCHEMA, Batches, Stage, Stages, check_reachable, frames_of, reported
from .sessions import check, job_session
from .worker_process import settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTITION_ROWS: Final = 1 << 40
"""More rows than any partition has. Its sequence numbers begin at a multiple of this."""


def bootstrap(
    store: CheckpointStore | str | os.PathLike[str],
    flow: Dataflow,
    states: Mapping[str, Any],
    *,
    parallelism: int | None = None,
    per_operator: Mapping[str, int] | None = None,
    positions: Mapping[str, Any] | None = None,
    order_by: str | None = None,
    on_duplicate: OnDuplicate = "refuse",
    properties: Mapping[str, str] | None = None,
    options: WriteOptions | None = None,
    progress: Callable[[str, int], None] | None = None,
) -> Bootstrapped:
    """``stateformat.backends.bootstrap.bootstrap``, but rows may also be Spark DataFrames.

    Example::

        history = spark.read.parquet("history/").groupBy("user").agg(F.sum("n").alias("total"))
        bootstrap("s3://bucket/store", flow, {"totals/totals": history}, parallelism=8)

    Spark writes DataFrames, and reads each once. Without ``order_by``, list entries are in the
    order of the partitions. Every executor must reach the store at the driver's address and have
    this package installed (see ``stateformat.backends.spark.sessions``).
    """
    return local.bootstrap(
        store,
        flow,
        states,
        parallelism=parallelism,
        per_operator=per_operator,
        positions=positions,
        order_by=order_by,
        on_duplicate=on_duplicate,
        properties=properties,
        options=options,
        engine=_SparkEngine(),
        progress=progress,
    )


@dataclass(frozen=True)
class _SparkEngine:
    """Writes DataFrames on Spark, and everything else in this process."""

    others: local.ThreadEngine = local.ThreadEngine()  # noqa: RUF009 - it has no state

    def schema(self, where: str, rows: Any) -> tuple[pa.Schema, Any]:
        """Return the Arrow columns of a DataFrame, and the DataFrame."""
        if not _is_frame(rows):
            return self.others.schema(where, rows)
        check(rows.sparkSession)
        if rows.isStreaming:
            raise InvalidInput(f"{where} are a streaming DataFrame. Give one that ends, as of spark.read")
        return arrow_schema_of(where, rows.schema), rows

    def write(self, context: WriteContext, input: StateInput, rows: Any, done: Callable[[int], None]) -> list[Written]:
        """Run the job of one state."""
        if not _is_frame(rows):
            return self.others.write(context, input, rows, done)
        check_reachable(context.storage.url)
        frame = _in_job_session(rows)
        context = context.only(input.state.operator)
        frames = frame.mapInArrow(deal_rows(pickle.dumps(input)), FRAME_SCHEMA)
        write = partial(local.write_place, context, input)
        subtasks = range(input.operator.parallelism)
        return Stages(frame.sparkSession).gather(frames, _bytes_of(frame), write, subtasks, done)


def _is_frame(rows: Any) -> bool:
    return type(rows).__module__.startswith("pyspark.sql") and hasattr(rows, "mapInArrow")


def _in_job_session(frame: DataFrame) -> DataFrame:
    """Return the same rows in a session with our settings. The user's session stays as it is."""
    name = f"stateformat_{uuid.uuid4().hex}"
    spark = frame.sparkSession
    frame.createTempView(name)
    try:
        return job_session(spark).table(name)
    finally:
        spark.catalog.dropTempView(name)


def _bytes_of(frame: DataFrame) -> int:
    """Return about how many bytes a DataFrame has; 0 if Spark does not know."""
    found = int(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())
    return found if found < 1 << 50 else 0


def deal_rows(task: bytes) -> Stage:
    """Turn a partition's rows into frames. ``task``: pickled input."""

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        settle()
        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        given: StateInput = pickle.loads(task)  # noqa: S301
        first = partition * PARTITION_ROWS
        for turn, rows in enumerate(gathered(batches, DISTRIBUTE_BYTES), partition):
            if len(rows):
                table = reported(local.conformed, rows, given, first)
                for target, batch in local.deal(table, given, turn):
                    yield from frames_of(partition, target, batch)
                first += len(rows)

    return run
