"""The engines that rewrite on Spark: :class:`SparkEngine` and :class:`SparkRepartition`.

Moves need no shuffle and run as one stage: ``spark.range`` makes one partition per task, which
holds one number, and the Python worker runs the task of that number. No row of state enters the
JVM. Small moves share a task, because any task costs some 50 ms.

Rehashing runs as two stages with one exchange between them. The exchange carries *frames*: the
number of a target and an Arrow record batch of some megabytes. So Spark's shuffle moves bytes,
which is about three times as fast as typed columns. ``repartitionById`` sends a frame to the
partition that its target names.

The stages are functions for ``mapInArrow``. Each carries a list of pickled tasks, and a worker
unpickles only its own. Workers publish nothing; the driver collects one row per segment
(``Snapshot.to_bytes``). Spark takes the rows of exactly one attempt per task, even if others were
retried or ran twice; the segments of others are garbage. Our errors travel as JSON in the message
of an exception, because Spark keeps only the message (:func:`decode`).

Plain pickle sends a user's function by the name of its module. A worker may not have that module,
if it is a file in the driver's directory. So functions of such modules are sent by value, with what
they use from other modules that are not installed. Installed modules are sent by name.

The repartition of a Structured Streaming query is one job, which runs the two functions that every
engine runs (``backends.foreign.spark.repartition``). In its first stage, one task per partition of
each store reads it, proves that its keys are where their hash says, and deals them out. After an
exchange, other tasks write. The exchange carries compressed pieces of files, not rows. No task
writes before all have read, so nothing is written for a checkpoint that is refused. A task that
runs twice sorts its pieces by source, writes the same bytes, and leaves a file that exists already.
"""

from __future__ import annotations

import heapq
import json
import pickle
import struct
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
import pyarrow as pa

import stateformat.errors
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError
from stateformat.model import Handle
from stateformat.schema import KEY_GROUP
from stateformat.snapshot import Snapshot, WriteContext
from stateformat.storage import Storage
from stateformat.tables import Spill, cut, split_by_bucket

from ..foreign.spark.repartition.plan import RepartitionPlan, Source, Target
from ..foreign.spark.repartition.run import Progress, Result, deal, write_partition
from ..rewrite import Move, Place, RehashSource, RewritePlan, Seen, Transformation, distribute, write_move, write_target
from .sessions import check, job_session, session
from .worker_process import settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Batches = Iterable[pa.RecordBatch]
Stage = Callable[[Batches], Iterator[pa.RecordBatch]]


FRAME_BYTES: Final = 4 * 2**20
"""A frame is an Arrow IPC record batch of about this size at most."""
FRAME_SCHEMA: Final = "target int, payload binary"
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
RESULT_SCHEMA: Final = "snapshot binary, rows_read long"
_READ: Final = b"rows_read"
"""In the metadata of a frame's schema: how many rows its source has read in total."""
_MARK: Final = "stateformat-error:"


def write_moves(tasks: Sequence[bytes], written: Any) -> Stage:
    """Turn rows (id long) into one row (snapshot binary, rows_read long) per place of a move.

    Task *id* is a pickled list of (context, move). The accumulator ``written`` counts rows for the
    progress shown to users.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        for number in ids(batches):
            # Our own driver pickled it for this job. Nothing from a store is ever unpickled.
            work: list[tuple[WriteContext, Move]] = pickle.loads(tasks[number])  # noqa: S301
            for context, move in work:
                read: list[int] = []
                handles = write_move(context, move, seen=read.append)
                while (handle := reported(next, handles, None)) is not None:
                    yield _result(_snapshot(handle), sum(read))
                    read.clear()
                written.add(move.rows)

    return run


def distribute_sources(tasks: Sequence[bytes]) -> Stage:
    """Turn rows (id long) into frames (target int, payload binary).

    Task *id* is a pickled list of sources. The last frame of a source has no rows: it tells the
    first target of its state how many were read.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        for number in ids(batches):
            work: list[RehashSource] = pickle.loads(tasks[number])  # noqa: S301
            for source in work:
                read: list[int] = []
                distributed = distribute(source, read.append)
                while (one := reported(next, distributed, None)) is not None:
                    target, batch = one
                    yield from frames_of(target, batch)
                said = pa.schema([], metadata={_READ: str(sum(read))})
                yield _framed(source.first_target, pa.RecordBatch.from_arrays([], schema=said))

    return run


def write_targets(tasks: Sequence[bytes], written: Any) -> Stage:
    """Turn frames into one row (snapshot binary, rows_read long) per target that has any.

    Task *target* is a pickled (context, place, whether row keys must be compared). The accumulator
    ``written`` counts rows.
    """

    def write(target: int, rows: Batches) -> bytes:
        context, place, check_unique = pickle.loads(tasks[target])  # noqa: S301
        handle = reported(partial(write_target, check_unique=check_unique), context, place, rows)
        written.add(handle.rows)
        return _snapshot(handle)

    return gather_targets(write)


def gather_targets(write: Callable[[int, Batches], bytes]) -> Stage:
    """Turn frames into one row (snapshot binary, rows_read long) per target that has any.

    ``write`` takes a target and the rows of all its frames, which wait in a temporary file, and
    returns the snapshot.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        frames: Spill[int] = Spill()
        with frames:
            for batch in batches:
                rows = pa.Table.from_batches([batch])
                for target, payloads in split_by_bucket(
                    rows.select(["payload"]), rows["target"].to_numpy().astype(np.int64)
                ):
                    frames.add(target, payloads)
            for target in sorted(frames.sizes):
                read: list[int] = []
                data = write(target, _unframed(frames.read(target), read.append))
                yield _result(data, sum(read))

    return run


def _unframed(frames: Batches, seen: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    for batch in frames:
        for payload in batch["payload"]:
            stream = pa.ipc.open_stream(payload.as_buffer())
            read = (stream.schema.metadata or {}).get(_READ)
            if read is None:
                yield from stream
            else:
                seen(int(read))


def ids(batches: Batches) -> Iterator[int]:
    """Yield the numbers of a partition's tasks, from the column ``id``."""
    for batch in batches:
        yield from batch["id"].to_pylist()


def frames_of(target: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the frames that carry a batch to a target.

    They leave out the key group: hashing the keys again costs less than carrying it.
    """
    for part in cut(batch, batch.num_rows, FRAME_BYTES):
        kept = [name for name in part.schema.names if name != KEY_GROUP.name]
        yield _framed(target, part.select(kept))


def _framed(target: int, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a frame: one row with the target, and the batch as a compressed Arrow IPC stream.

    The JVM processes every byte of a frame several times, so compression pays off.
    """
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_COMPRESSED) as stream:
        stream.write_batch(batch)
    payload = sink.getvalue()
    # Built on the buffer itself, so that megabytes are not copied into a Python object.
    bounds = pa.py_buffer(struct.pack("ii", 0, payload.size))
    made = pa.Array.from_buffers(pa.binary(), 1, [None, bounds, payload])
    return pa.record_batch([pa.array([target], pa.int32()), made], ["target", "payload"])


def _snapshot(handle: Handle) -> bytes:
    return Snapshot(handle.operator, handle.subtask, (handle,)).to_bytes()


def _result(snapshot: bytes, rows_read: int) -> pa.RecordBatch:
    columns = [pa.array([snapshot], pa.binary()), pa.array([rows_read], pa.int64())]
    return pa.record_batch(columns, names=["snapshot", "rows_read"])


def reported(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run a function. Turn one of our errors into an error that :func:`decode` understands."""
    try:
        return function(*arguments)
    except CheckpointError as error:
        facts = {"class": type(error).__name__, "kind": error.kind, "message": str(error)}
        raise RuntimeError(f"{_MARK}{json.dumps(facts)}") from error


def decode(message: str) -> CheckpointError:
    """Return the error of a worker from Spark's message; if it is not ours, a ``StorageError``."""
    for line in message.split("\n"):
        _, mark, text = line.partition(_MARK)
        if mark:
            facts, _ = json.JSONDecoder().raw_decode(text)
            found = getattr(stateformat.errors, facts["class"], None)
            if isinstance(found, type) and issubclass(found, CheckpointError):
                return found(facts["message"], kind=ErrorKind(facts["kind"]))
    last = next((line for line in reversed(message.split("\n")) if line.strip()), "no reason given")
    return StorageError(f"a Spark task failed, nothing was published: {last.strip()}")


_INSTALLED: Final = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Shipped:
    """A function that was pickled by value. A worker loads it once."""

    data: bytes

    def __call__(self, rows: Any) -> Any:
        """Call the function."""
        return _loaded(self.data)(rows)


@lru_cache(maxsize=16)
def _loaded(data: bytes) -> Any:
    # Our own driver pickled it for this job. Nothing from a store is ever unpickled.
    return pickle.loads(data)  # noqa: S301


def with_shipped_functions(plan: RewritePlan) -> RewritePlan:
    """Return the plan with functions that any worker can load.

    Raises ``InvalidInput`` for a function that uses something that cannot be sent.
    """
    known: dict[tuple[str, str], Transformation] = {}

    def shipped(shape: Any) -> Any:
        if not isinstance(shape, Transformation) or shape.transform.function is None:
            return shape
        place = shape.state.operator, shape.state.name
        if place not in known:
            transform = shape.transform
            function = Shipped(_by_value(transform.function, transform.label))
            known[place] = replace(shape, transform=replace(transform, function=function, name=transform.label))
        return known[place]

    return replace(
        plan,
        moves=tuple(replace(move, shape=shipped(move.shape)) for move in plan.moves),
        sources=tuple(replace(source, shape=shipped(source.shape)) for source in plan.sources),
    )


def _by_value(function: Any, label: str) -> bytes:
    from pyspark import cloudpickle

    own = set(_own_modules()) - set(cloudpickle.list_registry_pickle_by_value())
    for name in own:
        cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        data: bytes = cloudpickle.dumps(function)
    except Exception as error:
        raise InvalidInput(
            f"{label} cannot be sent to Spark's workers: {type(error).__name__}: {error}. Open files, connections and "
            "locks inside of the function, not beside it",
            kind=ErrorKind.TRANSFORM_FAILED,
        ) from error
    finally:
        for name in own:
            cloudpickle.unregister_pickle_by_value(sys.modules[name])
    return data


def _own_modules() -> Iterator[str]:
    """Names of the imported modules that are Python files, neither installed nor part of Python."""
    paths = sysconfig.get_paths()
    installed = tuple(f"{Path(paths[name]).resolve()}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "none").resolve()
        if file.suffix != ".py" or _INSTALLED & set(file.parts) or str(file).startswith(installed):
            continue
        if getattr(module, "__name__", None) == name and name.partition(".")[0] not in ("stateformat", "__main__"):
            yield name


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
            write = write_moves(tasks, written)
            results = _numbers(spark, len(tasks)).mapInArrow(write, RESULT_SCHEMA)
            handles += _handles_of(results, written, done, seen)
        if plan.sources:
            sources = [_pickled(chosen) for chosen in evened(plan.sources, cores)]
            targets = [
                _pickled((context.only(place.operator), place, plan.is_transformed(place))) for place in plan.targets
            ]
            read = distribute_sources(sources)
            frames = _numbers(spark, len(sources)).mapInArrow(read, FRAME_SCHEMA)
            # Spark takes the target modulo the number of partitions. The frames of a partition wait
            # in a temporary file of its worker.
            size = sum(source.bytes for source in plan.sources)
            shuffled = frames.repartitionById(task_count(len(targets), size, cores), "target")
            written = spark.sparkContext.accumulator(0)
            write = write_targets(targets, written)
            handles += _handles_of(shuffled.mapInArrow(write, RESULT_SCHEMA), written, done, seen)
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


def _handles_of(results: DataFrame, written: Any, done: Callable[[int], None], seen: Seen) -> list[Handle]:
    """Run the job and return its handles. ``done`` gets row counts, in the end the exact total."""
    handles = []
    rows, counted = collect_counted(results, written, done)
    for row in rows:
        (handle,) = Snapshot.from_bytes(bytes(row.snapshot)).handles
        seen(Place(handle.operator, handle.state, handle.subtask), row.rows_read)
        handles.append(handle)
    done(max(0, sum(handle.rows for handle in handles) - counted))
    return handles


def collect(results: DataFrame, told: Callable[[], None]) -> list[Any]:
    """Run a job and return its rows. ``told`` is called now and then while it runs, for progress.

    Raises the error of a failed task.
    """
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_S):
            told()

    watching = threading.Thread(target=watch, name="rewrite-progress", daemon=True)
    watching.start()
    try:
        rows: list[Any] = results.collect()
    except (PySparkException, Py4JJavaError) as error:
        raise decode(str(error)) from error
    finally:
        ended.set()
        watching.join()
    return rows


def collect_counted(results: DataFrame, written: Any, done: Callable[[int], None]) -> tuple[list[Any], int]:
    """Run a job. Return its rows, and how many rows of state were passed to ``done``.

    While the job runs, ``done`` gets each increase of the accumulator ``written``.
    """
    counted = 0

    def told() -> None:
        nonlocal counted
        now = written.value
        done(now - counted)
        counted = now

    return collect(results, told), counted


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
        write = write_partitions(pickle.dumps((target, plan.units)), targets, written)

        def told() -> None:
            if written.value:
                progress("writing", written.value, len(targets))
            else:
                progress("reading", seen.value, plan.size_bytes)

        rows = collect(pieces.repartitionById(count, "target").mapInArrow(write, WRITTEN_SCHEMA), told)
        told()
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


def write_partitions(work: bytes, targets: Sequence[Target], written: Any) -> Stage:
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
