"""A repartition of a Structured Streaming checkpoint on Spark, for state that outgrows one machine.

One job runs the two functions that every engine runs (``backends.foreign.spark.repartition``). In
its first stage, one task per partition of each store reads it, proves that its keys are where their
hash says, and deals them out. After an exchange, other tasks write. The exchange carries compressed
pieces of files, not rows. No task writes before all have read, so nothing is written for a
checkpoint that is refused.

A task that runs twice sorts its pieces by source, writes the same bytes, and leaves a file that
exists already.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from stateformat.storage import Storage
from stateformat.tables import Spill

from ...foreign.spark.repartition.plan import RepartitionPlan, Source, Target
from ...foreign.spark.repartition.run import Progress, Result, deal, write_partition
from ..sessions import check, job_session, session
from ..worker_process import settle
from .engine import WATCH_S, check_reachable, task_count
from .executor import Stage, decode, ids, reported

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PIECE_SCHEMA: Final = "target int, source int, keys long, payload binary"
WRITTEN_SCHEMA: Final = "target int, keys long, files long, size_bytes long"
_WRITTEN: Final = pa.schema(
    [("target", pa.int32()), ("keys", pa.int64()), ("files", pa.int64()), ("size_bytes", pa.int64())]
)
_PIECE: Final = pa.schema(
    [("target", pa.int32()), ("source", pa.int32()), ("keys", pa.int64()), ("payload", pa.binary())]
)


@dataclass(frozen=True)
class SparkRepartition:
    """Reads and writes the state in tasks of ``spark``, by default the active or a local session.

    Every executor must reach both folders at the driver's addresses and have this package
    installed (``stateformat.backends.spark.sessions`` says how).
    """

    spark: SparkSession | None = None

    def run(
        self, plan: RepartitionPlan, folder: Storage, target: Storage, proven: Callable[[], None], progress: Progress
    ) -> list[Result]:
        """Call ``proven``, then read, prove and write in one job. See ``repartition.Engine``."""
        for url in (folder.url, target.url):
            check_reachable(url)
        spark = job_session(check(self.spark) if self.spark else session("ckpt rescale"))
        proven()
        targets = list(plan.targets())
        order = {one: number for number, one in enumerate(targets)}
        tasks = [pickle.dumps((folder, source)) for source in plan.sources]
        numbers = spark.range(0, len(tasks), 1, numPartitions=len(tasks))
        seen, written = spark.sparkContext.accumulator(0), spark.sparkContext.accumulator(0)
        pieces = numbers.mapInArrow(deal_sources(tasks, order, seen), PIECE_SCHEMA)
        count = task_count(len(targets), plan.size_bytes, spark.sparkContext.defaultParallelism)
        write = write_targets(pickle.dumps((target, plan.units)), targets, written)

        def told() -> None:
            if written.value:
                progress("writing", written.value, len(targets))
            else:
                progress("reading", seen.value, plan.size_bytes)

        rows = _collect(pieces.repartitionById(count, "target").mapInArrow(write, WRITTEN_SCHEMA), told)
        return [Result(targets[row.target], row.keys, row.files, row.size_bytes) for row in rows]


def deal_sources(tasks: Sequence[bytes], order: dict[Target, int], seen: Any) -> Stage:
    """Turn rows (id long) into pieces. Every target gets at least an empty one.

    Task *id* is a pickled (folder, source). The accumulator ``seen`` counts stored bytes read.
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        for number in ids(batches):
            # Our own driver pickled it for this job. Nothing from a store is ever unpickled.
            folder, source = pickle.loads(tasks[number])  # noqa: S301
            dealt = deal(folder, source)
            while (piece := reported(next, dealt, None)) is not None:
                yield _piece(order[piece.target], number, piece.keys, _packed(piece.rows))
            for target in _own(source):
                yield _piece(order[target], number, 0, b"")
            seen.add(source.size_bytes)

    return run


def _own(source: Source) -> Iterator[Target]:
    """Yield the targets that this source announces. Each is announced by only one source."""
    unit = source.unit
    for partition in range(source.partition, unit.targets, unit.before if unit.keyed else 1):
        yield Target(unit.number, partition)


def write_targets(work: bytes, targets: Sequence[Target], written: Any) -> Stage:
    """Turn pieces into one row (target, keys, files, size_bytes) per target.

    ``work`` is a pickled (folder, units). The accumulator ``written`` counts targets written.
    """

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle()
        folder, units = pickle.loads(work)  # noqa: S301
        waiting: Spill[tuple[int, int]] = Spill()
        keys: dict[int, dict[int, int]] = {}
        with waiting:
            for batch in batches:
                for target, source, count, payload in zip(*(column.to_pylist() for column in batch), strict=True):
                    counts = keys.setdefault(target, {})
                    counts[source] = counts.get(source, 0) + count
                    if payload:
                        waiting.add((target, source), pa.table({"payload": pa.array([payload], pa.binary())}))
            for number, counts in sorted(keys.items()):
                one = targets[number]
                unit, pieces = units[one.unit], _unpacked(waiting, number, sorted(counts))
                found = reported(write_partition, folder, unit, one.partition, pieces, sum(counts.values()))
                yield pa.record_batch([[number], [sum(counts.values())], *([one] for one in found)], schema=_WRITTEN)
                written.add(1)

    return run


def _piece(target: int, source: int, keys: int, payload: bytes) -> pa.RecordBatch:
    return pa.record_batch([[target], [source], [keys], [payload]], schema=_PIECE)


def _unpacked(waiting: Spill[tuple[int, int]], target: int, sources: Sequence[int]) -> Iterator[pa.RecordBatch]:
    for source in sources:
        for batch in waiting.read((target, source)):
            for payload in batch["payload"]:
                yield from pa.ipc.open_stream(payload.as_buffer())


def _packed(rows: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_batch(rows)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _collect(results: DataFrame, told: Callable[[], None]) -> list[Any]:
    """Run a job and return its rows. Call ``told`` now and then, and at the end, for progress."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_S):
            told()

    watching = threading.Thread(target=watch, name="repartition-progress", daemon=True)
    watching.start()
    try:
        found: list[Any] = results.collect()
    except (PySparkException, Py4JJavaError) as error:
        raise decode(str(error)) from error
    finally:
        ended.set()
        watching.join()
    told()
    return found
