"""The rewrite on Spark: the driver's side.

Moves need no shuffle and run as one stage: ``spark.range`` makes one partition per task, which
holds one number, and the Python worker runs the task of that number. No row of state enters the
JVM. Small moves share a task, because any task costs some 50 ms.

Rehashing runs as two stages with one exchange between them. The exchange carries *frames*: the
number of a target and an Arrow record batch of some megabytes. So Spark's shuffle moves bytes,
which is about three times as fast as typed columns. ``repartitionById`` sends a frame to the
partition that its target names.

Workers publish nothing. The driver collects one row per segment. Spark guarantees exactly one, even
if a task runs twice.
"""

from __future__ import annotations

import heapq
import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import Handle
from stateformat.snapshot import Snapshot, WriteContext

from ...rewrite import Move, Place, RehashSource, RewritePlan, Seen
from ..sessions import check, job_session, session
from . import executor
from .shipping import with_shipped_functions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TASK_BYTES: Final = 64 * 2**20
"""If a task would have more stored state than this, there are more tasks than cores."""
WATCH_S: Final = 0.5
"""How often progress is reported while a job runs."""

Work = TypeVar("Work", Move, RehashSource)


@dataclass(frozen=True)
class SparkEngine:
    """Runs the tasks of a rewrite on ``spark``, by default the active or a local session.

    On a cluster every executor must reach the store at the driver's address and have this package
    installed (``stateformat.backends.spark.sessions`` says how).
    """

    spark: SparkSession | None = None

    def run(self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None], seen: Seen) -> list[Handle]:
        """Return a handle for each place of a move, and for each target with rows."""
        reads = [*(move.read for move in plan.moves), *(source.read for source in plan.sources)]
        for url in {context.storage.url, *(read.storage.url for read in reads)}:
            check_reachable(url)
        spark = job_session(check(self.spark) if self.spark else session("ckpt rewrite"))
        cores = spark.sparkContext.defaultParallelism
        handles = []
        plan = with_shipped_functions(plan)
        if plan.moves:
            tasks = [
                _pickled([(context.only(move.place.operator), move) for move in chosen])
                for chosen in evened(plan.moves, cores)
            ]
            written = spark.sparkContext.accumulator(0)
            write = executor.write_moves(tasks, written)
            results = _numbers(spark, len(tasks)).mapInArrow(write, executor.RESULT_SCHEMA)
            handles += _collect(results, written, done, seen)
        if plan.sources:
            sources = [_pickled(chosen) for chosen in evened(plan.sources, cores)]
            targets = [
                _pickled((context.only(place.operator), place, plan.is_transformed(place))) for place in plan.targets
            ]
            read = executor.distribute_sources(sources)
            frames = _numbers(spark, len(sources)).mapInArrow(read, executor.FRAME_SCHEMA)
            # Spark takes the target modulo the number of partitions. The frames of a partition wait
            # in a temporary file of its worker.
            size = sum(source.bytes for source in plan.sources)
            shuffled = frames.repartitionById(task_count(len(targets), size, cores), "target")
            written = spark.sparkContext.accumulator(0)
            write = executor.write_targets(targets, written)
            handles += _collect(shuffled.mapInArrow(write, executor.RESULT_SCHEMA), written, done, seen)
        return handles


def check_reachable(url: str) -> None:
    """Raise ``InvalidInput`` for a storage that Spark's workers cannot open."""
    if url.startswith("memory:"):
        raise InvalidInput(
            f"{url} exists only in this process, not in Spark's workers; use the engine local",
            kind=ErrorKind.INVALID_URL,
        )


def task_count(units: int, size_bytes: int, cores: int) -> int:
    """Return one task per core, more if tasks would have too many bytes, at most one per unit."""
    return min(units, max(cores, -(-size_bytes // TASK_BYTES)))


def evened(units: Sequence[Work], cores: int) -> list[list[Work]]:
    """Group moves or sources by task, in similar sizes. The largest are assigned first."""
    count = task_count(len(units), sum(unit.bytes for unit in units), cores)
    groups: list[list[Work]] = [[] for _ in range(count)]
    smallest = [(0, 0, number) for number in range(count)]
    for unit in sorted(units, key=lambda unit: -unit.bytes):
        size, members, number = heapq.heappop(smallest)
        groups[number].append(unit)
        heapq.heappush(smallest, (size + unit.bytes, members + 1, number))
    return groups


def _pickled(task: Any) -> bytes:
    return pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL)


def _numbers(spark: SparkSession, count: int) -> DataFrame:
    """Return the numbers 0 … count − 1, each in its own partition."""
    return spark.range(0, count, 1, numPartitions=count)


def _collect(results: DataFrame, written: Any, done: Callable[[int], None], seen: Seen) -> list[Handle]:
    """Run the job and return its handles. ``done`` gets row counts, in the end the exact total."""
    handles = []
    rows, counted = collect(results, written, done)
    for row in rows:
        (handle,) = Snapshot.from_bytes(bytes(row.snapshot)).handles
        seen(Place(handle.operator, handle.state, handle.subtask), row.rows_read)
        handles.append(handle)
    done(max(0, sum(handle.rows for handle in handles) - counted))
    return handles


def collect(results: DataFrame, written: Any, done: Callable[[int], None]) -> tuple[list[Any], int]:
    """Run a job. Return its rows, and how many rows of state were passed to ``done``.

    While the job runs, ``done`` gets each increase of the accumulator ``written``. Raises the error
    of a failed task.
    """
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    ended = threading.Event()
    counted = [0]

    def watch() -> None:
        while not ended.wait(WATCH_S):
            now = written.value
            done(now - counted[0])
            counted[0] = now

    watching = threading.Thread(target=watch, name="rewrite-progress", daemon=True)
    watching.start()
    try:
        rows = results.collect()
    except (PySparkException, Py4JJavaError) as error:
        raise executor.decode(str(error)) from error
    finally:
        ended.set()
        watching.join()
    return rows, counted[0]
