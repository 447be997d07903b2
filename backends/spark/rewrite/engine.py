"""The driver's side of the rewrite on Spark.

Theory of operation. What needs no shuffle is one stage: ``spark.range`` gives as many partitions as there are tasks, each
partition one number, and the Python worker runs the task of that number. No row of state enters the JVM. Small moves
share a task, because a task costs some 40 ms whatever it does.

What is dealt anew is two stages with one exchange between them. What crosses it are *frames*, rows of a target's number and
an Arrow record batch of some megabytes: Spark's shuffle moves bytes and never sees a row of state, which is about three
times as fast as typed columns. ``repartitionById`` sends each frame to the partition that its target names.

Workers publish nothing. The driver collects one row for each segment; Spark sees to it that there is one, whatever ran twice.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from backends.rewrite.planning import Move, RewritePlan
from backends.spark.rewrite.executor import (
    FRAME_SCHEMA,
    RESULT_SCHEMA,
    deal_sources,
    decode,
    write_moves,
    write_targets,
)
from backends.spark.session import check, session
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import Handle
from stateformat.snapshot import Snapshot, WriteContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASKS_PER_CORE = 2
"""So many moves' tasks for each core: enough to even out, few enough not to pay for."""
WATCH_S = 0.5
"""How often progress is told while a job runs. Spark knows of a task when it ends."""
TASK_BYTES = 256 * 2**20
"""More tasks than that where they would read more than this each."""


@dataclass(frozen=True)
class SparkEngine:
    """Runs the tasks of a rewrite as Spark jobs of ``spark``; None is the active session, or a local one.

    On a cluster every executor must reach the store under the driver's address and have this package installed
    (``backends.spark.session`` says how).
    """

    spark: SparkSession | None = None

    def run(self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None]) -> list[Handle]:
        """A handle for each move, and for each target that rows were dealt to."""
        if context.storage.url.startswith("memory:"):
            raise InvalidInput(
                f"{context.storage.url} exists in this process only, Spark's workers are others; use the engine local",
                kind=ErrorKind.INVALID_URL,
            )
        spark = check(self.spark) if self.spark else session("ckpt rewrite")
        handles = []
        if plan.moves:
            bins = _bins(plan.moves, spark.sparkContext.defaultParallelism * TASKS_PER_CORE)
            tasks = [_pickled([(context.only(move.place.operator), move) for move in chosen]) for chosen in bins]
            written = spark.sparkContext.accumulator(0)
            results = _numbers(spark, len(tasks)).mapInArrow(write_moves(tasks, written), RESULT_SCHEMA)
            handles += _collected(results, written, done)
        if plan.sources:
            sources = [_pickled(source) for source in plan.sources]
            targets = [_pickled((context.only(place.operator), place)) for place in plan.targets]
            frames = _numbers(spark, len(sources)).mapInArrow(deal_sources(sources), FRAME_SCHEMA)
            written = spark.sparkContext.accumulator(0)
            dealt = frames.repartitionById(len(targets), "target")
            handles += _collected(dealt.mapInArrow(write_targets(targets, written), RESULT_SCHEMA), written, done)
        return handles


def _bins(moves: Sequence[Move], count: int) -> list[list[Move]]:
    """The moves in about ``count`` groups of like size, the largest dealt out first."""
    total = sum(move.bytes for move in moves)
    count = min(len(moves), max(1, count, -(-total // TASK_BYTES)))
    bins: list[tuple[int, list[Move]]] = [(0, []) for _ in range(count)]
    for move in sorted(moves, key=lambda move: -move.bytes):
        smallest = min(range(count), key=lambda number: (bins[number][0], len(bins[number][1])))
        size, chosen = bins[smallest]
        bins[smallest] = (size + move.bytes, [*chosen, move])
    return [chosen for _, chosen in bins if chosen]


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
    done(len(handles) - told[0])
    return handles


__all__ = ["SparkEngine"]
