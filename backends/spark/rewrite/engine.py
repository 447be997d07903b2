"""The driver's side of the rewrite on Spark.

Theory of operation. What needs no shuffle is one stage: ``spark.range`` gives as many partitions as there are tasks, each
partition one number, and the Python worker runs the task of that number. No row of state enters the JVM. Small moves
share a task, because a task costs some 50 ms whatever it does.

What is dealt anew is two stages with one exchange between them. What crosses it are *frames*, rows of a target's number and
an Arrow record batch of some megabytes: Spark's shuffle moves bytes and never sees a row of state, which is about three
times as fast as typed columns. ``repartitionById`` sends each frame to the partition that its target names.

Workers publish nothing. The driver collects one row for each segment; Spark sees to it that there is one, whatever ran twice.
"""

from __future__ import annotations

import heapq
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import Handle
from stateformat.snapshot import Snapshot, WriteContext

from ...rewrite import Move, RewritePlan, Source
from ..sessions import check, job_session, session
from .executor import FRAME_SCHEMA, RESULT_SCHEMA, deal_sources, decode, write_moves, write_targets

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASK_BYTES = 64 * 2**20
"""How much stored state a task takes before there are more tasks than cores. Every task costs some 50 ms."""
WATCH_S = 0.5
"""How often progress is told while a job runs. Spark knows of a task when it ends."""

Work = TypeVar("Work", Move, Source)


@dataclass(frozen=True)
class SparkEngine:
    """Runs the tasks of a rewrite as Spark jobs of ``spark``; None is the active session, or a local one.

    On a cluster every executor must reach the store under the driver's address and have this package installed
    (``stateformat.backends.spark.sessions`` says how).
    """

    spark: SparkSession | None = None

    def run(self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None]) -> list[Handle]:
        """A handle for each move, and for each target that rows were dealt to."""
        reads = [*(move.read for move in plan.moves), *(source.read for source in plan.sources)]
        for url in {context.storage.url, *(read.storage.url for read in reads)}:
            if url.startswith("memory:"):
                raise InvalidInput(
                    f"{url} exists in this process only, Spark's workers are others; use the engine local",
                    kind=ErrorKind.INVALID_URL,
                )
        spark = job_session(check(self.spark) if self.spark else session("ckpt rewrite"))
        cores = spark.sparkContext.defaultParallelism
        handles = []
        if plan.moves:
            work = [
                [(context.only(move.place.operator), move) for move in chosen] for chosen in evened(plan.moves, cores)
            ]
            tasks = [_pickled(task) for task in work]
            written = spark.sparkContext.accumulator(0)
            results = _numbers(spark, len(tasks)).mapInArrow(write_moves(tasks, written), RESULT_SCHEMA)
            handles += _collected(results, written, done)
        if plan.sources:
            sources = [_pickled(chosen) for chosen in evened(plan.sources, cores)]
            targets = [_pickled((context.only(place.operator), place)) for place in plan.targets]
            frames = _numbers(spark, len(sources)).mapInArrow(deal_sources(sources), FRAME_SCHEMA)
            # Spark takes the target modulo the number of partitions. A partition's targets wait in a temporary file of its worker.
            size = sum(source.bytes for source in plan.sources)
            dealt = frames.repartitionById(task_count(len(targets), size, cores), "target")
            written = spark.sparkContext.accumulator(0)
            handles += _collected(dealt.mapInArrow(write_targets(targets, written), RESULT_SCHEMA), written, done)
        return handles


def task_count(units: int, size_bytes: int, cores: int) -> int:
    """How many tasks for so many units of work: one for each core, more where a task would take too much."""
    return min(units, max(cores, -(-size_bytes // TASK_BYTES)))


def evened(units: Sequence[Work], cores: int) -> list[list[Work]]:
    """Moves or sources in groups of like size, one for each task: the largest are dealt out first."""
    count = task_count(len(units), sum(unit.bytes for unit in units), cores)
    groups: list[list[Work]] = [[] for _ in range(count)]
    smallest = [(0, 0, number) for number in range(count)]
    for unit in sorted(units, key=lambda unit: -unit.bytes):
        size, held, number = heapq.heappop(smallest)
        groups[number].append(unit)
        heapq.heappush(smallest, (size + unit.bytes, held + 1, number))
    return groups


def _pickled(task: Any) -> bytes:
    return pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL)


def _numbers(spark: SparkSession, count: int) -> DataFrame:
    """The numbers 0 … count − 1, each in a partition of its own."""
    return spark.range(0, count, 1, numPartitions=count)


def _collected(results: DataFrame, written: Any, done: Callable[[int], None]) -> list[Handle]:
    """Run the job. ``done`` is told meanwhile what ``written``, an accumulator, has come to, and the truth at the end."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    ended = threading.Event()
    told = [0]

    def watch() -> None:
        while not ended.wait(WATCH_S):
            now = written.value
            done(now - told[0])
            told[0] = now

    watching = threading.Thread(target=watch, name="rewrite-progress", daemon=True)
    watching.start()
    try:
        rows = results.collect()
    except (PySparkException, Py4JJavaError) as error:
        raise decode(str(error)) from error
    finally:
        ended.set()
        watching.join()
    handles = [handle for row in rows for handle in Snapshot.from_bytes(bytes(row.snapshot)).handles]
    done(max(0, sum(handle.rows for handle in handles) - told[0]))
    return handles


__all__ = ["SparkEngine"]
