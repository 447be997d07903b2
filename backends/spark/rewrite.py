"""The engines that rewrite on Spark: :class:`SparkEngine` and :class:`SparkRepartition`.

Moves need no shuffle and run as one stage: ``spark.range`` makes one partition per task, which
holds one number, and the Python worker runs the task of that number. No row of state enters the
JVM. Small moves share a task, because any task costs some 50 ms.

Rehashing runs as two stages with one exchange between them. The exchange carries *frames*: the
numbers of a target and a source, and an Arrow record batch of some megabytes. So Spark's shuffle
moves bytes, which is about three times as fast as typed columns. ``repartitionById`` sends a frame
to the partition that its target names. Who writes a target reads its frames by source, so that a
task that runs twice reads the same.

The stages are functions for ``mapInArrow``, the same for every user of :class:`Stages`. Each
carries a list of pickled tasks, and a worker unpickles only its own. Workers publish nothing; the
driver collects one row per result. Spark takes the rows of exactly one attempt per task, even if
others were retried or ran twice; the segments of others are garbage. Our errors travel as JSON in
the message of an exception, because Spark keeps only the message (:func:`decode`).

Plain pickle sends a user's function by the name of its module. A worker may not have that module,
if it is a file in the driver's directory. So functions of such modules are sent by value, with what
they use from other modules that are not installed. Installed modules are sent by name.

The repartition of a Structured Streaming query is one such job. In its first stage, one task reads
partitions of a store, proves that their keys are where their hash says, and deals them out. No task
writes before all have read, so nothing is written for a checkpoint that is refused. A task that
runs twice writes the same bytes, and leaves a file that exists already.
"""

from __future__ import annotations

import heapq
import json
import pickle
import struct
import sys
import sysconfig
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

import stateformat.errors
from stateformat.errors import CheckpointError, ErrorKind, InvalidInput, StorageError
from stateformat.model import Handle
from stateformat.schema import KEY_GROUP
from stateformat.snapshot import WriteContext
from stateformat.storage import Storage
from stateformat.tables import Spill, cut

from ..foreign.spark.repartition.plan import RepartitionPlan, Source, Target, Unit
from ..foreign.spark.repartition.run import Progress, Result, deal, write_partition
from ..rewrite import RewritePlan, Seen, Transformation, run_plan
from ..tasks import Deal, Done, Note, Sized, Write
from .sessions import check, job_session, session
from .worker_process import settle

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Batches = Iterable[pa.RecordBatch]
Stage = Callable[[Batches], Iterator[pa.RecordBatch]]


FRAME_BYTES: Final = 4 * 2**20
"""A frame is an Arrow IPC record batch of about this size at most."""
FRAME_SCHEMA: Final = "target int, source int, noted long, payload binary"
_COMPRESSED: Final = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
RESULT_SCHEMA: Final = "result binary"
_MARK: Final = "stateformat-error:"


def map_items(function: Callable[[Any, Done], Any], tasks: Sequence[bytes], written: Any) -> Stage:
    """Turn rows (id long) into one row (result binary) per item of a task.

    Task *id* is a pickled list of items. The accumulator ``written`` counts for the progress shown
    to users.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        for number in ids(batches):
            # Our own driver pickled it for this job. Nothing from a store is ever unpickled.
            for item in pickle.loads(tasks[number]):  # noqa: S301
                yield _result(reported(function, item, written.add))

    return run


def deal_items(deal: Deal[Any], tasks: Sequence[bytes], read: Any) -> Stage:
    """Turn rows (id long) into frames.

    Task *id* is a pickled list of (number of the source, its bytes, item). A frame without rows has
    what was noted for a target. The accumulator ``read`` counts bytes.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        notes: dict[int, int] = defaultdict(int)

        def note(target: int, count: int) -> None:
            notes[target] += count

        for task in ids(batches):
            for source, size_bytes, item in pickle.loads(tasks[task]):  # noqa: S301
                dealt = deal(item, note)
                while (one := reported(next, dealt, None)) is not None:
                    yield from frames_of(source, *one)
                for target, count in notes.items():
                    yield _frame(target, source, count, pa.py_buffer(b""))
                notes.clear()
                read.add(size_bytes)

    return run


def write_targets(write: Write[Any, Any], targets: Sequence[bytes], written: Any) -> Stage:
    """Turn frames into one row (result binary) per target that has any.

    The frames of a partition wait in a temporary file. ``targets`` are pickled. The accumulator
    ``written`` counts for users.
    """

    def run(batches: Batches) -> Iterator[pa.RecordBatch]:
        settle()
        noted: dict[int, int] = defaultdict(int)
        frames: Spill[tuple[int, int]] = Spill()
        with frames:
            for row in (batch.slice(at, 1) for batch in batches for at in range(batch.num_rows)):
                target, source, count = (row[at][0].as_py() for at in range(3))
                noted[target] += count
                frames.add((target, source), pa.Table.from_batches([row.select(["payload"])]))
            places = sorted(frames.sizes)
            for target in sorted(noted):
                rows = (batch for place in places if place[0] == target for batch in _unframed(frames.read(place)))
                given = pickle.loads(targets[target])  # noqa: S301
                yield _result(reported(write, given, rows, noted[target], written.add))

    return run


def _unframed(frames: Batches) -> Iterator[pa.RecordBatch]:
    for batch in frames:
        for payload in batch["payload"]:
            if payload.as_buffer().size:
                yield from pa.ipc.open_stream(payload.as_buffer())


def ids(batches: Batches) -> Iterator[int]:
    """Yield the numbers of a partition's tasks, from the column ``id``."""
    for batch in batches:
        yield from batch["id"].to_pylist()


def frames_of(source: int, target: int, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield the frames that carry a batch of a source to a target, as compressed Arrow IPC streams.

    They leave out the key group: hashing the keys again costs less than carrying it. The JVM
    processes every byte of a frame several times, so compression pays off.
    """
    for part in cut(batch, batch.num_rows, FRAME_BYTES):
        kept = part.select([name for name in part.schema.names if name != KEY_GROUP.name])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, kept.schema, options=_COMPRESSED) as stream:
            stream.write_batch(kept)
        yield _frame(target, source, 0, sink.getvalue())


def _frame(target: int, source: int, noted: int, payload: pa.Buffer) -> pa.RecordBatch:
    # Built on the buffer itself, so that megabytes are not copied into a Python object.
    bounds = pa.py_buffer(struct.pack("ii", 0, payload.size))
    made = pa.Array.from_buffers(pa.binary(), 1, [None, bounds, payload])
    numbers = [pa.array([target], pa.int32()), pa.array([source], pa.int32()), pa.array([noted], pa.int64())]
    return pa.record_batch([*numbers, made], ["target", "source", "noted", "payload"])


def _result(result: Any) -> pa.RecordBatch:
    return pa.record_batch([pa.array([_pickled(result)], pa.binary())], names=["result"])


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


def with_shipped_edits(plan: RepartitionPlan) -> RepartitionPlan:
    """Return the plan of a query's copy with functions that any worker can load."""
    units = {}
    for unit in plan.units:
        edits = dict(unit.edits)
        for at, edit in edits.items():
            made = edit.function
            if isinstance(made, Transformation) and made.transform.function is not None:
                function = Shipped(_by_value(made.transform.function, made.transform.label))
                transform = replace(made.transform, function=function, name=made.transform.label)
                edits[at] = replace(edit, function=replace(made, transform=transform))
        units[unit.number] = replace(unit, edits=edits)
    sources = tuple(source._replace(unit=units[source.unit.number]) for source in plan.sources)
    return replace(plan, units=tuple(units.values()), sources=sources)


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

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class SparkEngine:
    """Runs the tasks of a rewrite on ``spark``, by default the active or a local session.

    On a cluster every executor must reach the store at the driver's address and have this package
    installed (``stateformat.backends.spark.sessions`` says how).
    """

    spark: SparkSession | None = None

    def run(self, context: WriteContext, plan: RewritePlan, done: Done, seen: Seen) -> list[Handle]:
        """Return a handle for each place of a move, and for each target with rows."""
        reads = [*(move.read for move in plan.moves), *(source.read for source in plan.sources)]
        for url in {context.storage.url, *(read.storage.url for read in reads)}:
            check_reachable(url)
        stages = Stages(job_session(check(self.spark) if self.spark else session("ckpt rewrite")))
        return run_plan(stages, context, with_shipped_functions(plan), done, seen)


@dataclass(frozen=True)
class Stages:
    """Runs functions on items in the stages of a Spark job (``backends.tasks.Tasks``)."""

    spark: SparkSession

    def map(self, function: Callable[[I, Done], R], items: Sequence[Sized[I]], done: Done) -> list[R]:
        """Return the result of every item, in any order."""
        if not items:
            return []
        tasks = [_pickled([item for _, item in task]) for task in evened(items, self._cores)]
        written = _Counted(self.spark, done)
        return collect(
            self._numbers(len(tasks)).mapInArrow(map_items(function, tasks, written.sum), RESULT_SCHEMA), written
        )

    def exchange(
        self,
        deal: Deal[I],
        groups: Iterable[Sequence[Sized[I]]],
        write: Write[T, R],
        targets: Sequence[T],
        done: Done,
        read: Done = lambda _: None,
    ) -> list[R]:
        """Deal all groups out in one stage, and write in another. ``read`` gets bytes read."""
        items = [item for group in groups for item in group]
        if not items:
            return []
        numbered = [(size, (number, size, item)) for number, (size, item) in enumerate(items)]
        tasks = [_pickled([item for _, item in task]) for task in evened(numbered, self._cores)]
        seen = _Counted(self.spark, read)
        frames = self._numbers(len(tasks)).mapInArrow(deal_items(deal, tasks, seen.sum), FRAME_SCHEMA)
        return self.gather(frames, sum(size for size, _ in items), write, targets, done, seen)

    def gather(
        self,
        frames: DataFrame,
        size_bytes: int,
        write: Write[T, R],
        targets: Sequence[T],
        done: Done,
        *more: _Counted,
    ) -> list[R]:
        """Send frames to their targets, and write each target that has any."""
        # Spark takes the target modulo the number of partitions.
        shuffled = frames.repartitionById(task_count(len(targets), size_bytes, self._cores), "target")
        written = _Counted(self.spark, done)
        stage = write_targets(write, [_pickled(target) for target in targets], written.sum)
        return collect(shuffled.mapInArrow(stage, RESULT_SCHEMA), *more, written)

    @property
    def _cores(self) -> int:
        return int(self.spark.sparkContext.defaultParallelism)

    def _numbers(self, count: int) -> DataFrame:
        """Return the numbers 0 … count − 1, each in its own partition."""
        return self.spark.range(0, count, 1, numPartitions=count)


class _Counted:
    """A sum to which tasks add. ``done`` gets each increase."""

    def __init__(self, spark: SparkSession, done: Done) -> None:
        self.sum = spark.sparkContext.accumulator(0)
        self._done, self._told = done, 0

    def tell(self) -> None:
        now = self.sum.value
        if now != self._told:
            self._done(now - self._told)
            self._told = now


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


def evened(units: Sequence[Sized[I]], cores: int) -> list[list[Sized[I]]]:
    """Group items by task, in similar sizes. The largest are assigned first."""
    count = task_count(len(units), sum(size for size, _ in units), cores)
    groups: list[list[Sized[I]]] = [[] for _ in range(count)]
    smallest = [(0, 0, number) for number in range(count)]
    for unit in sorted(units, key=lambda unit: -unit[0]):
        size, members, number = heapq.heappop(smallest)
        groups[number].append(unit)
        heapq.heappush(smallest, (size + unit[0], members + 1, number))
    return groups


def _pickled(task: Any) -> bytes:
    return pickle.dumps(task, protocol=pickle.HIGHEST_PROTOCOL)


def collect(results: DataFrame, *counted: _Counted) -> list[Any]:
    """Run a job and return its results. Progress is told now and then, and in the end.

    Raises the error of a failed task.
    """
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(WATCH_S):
            tell()

    def tell() -> None:
        for one in counted:
            one.tell()

    watching = threading.Thread(target=watch, name="rewrite-progress", daemon=True)
    watching.start()
    try:
        rows = results.collect()
    except (PySparkException, Py4JJavaError) as error:
        raise decode(str(error)) from error
    finally:
        ended.set()
        watching.join()
    tell()
    # Our own workers pickled them in this job. Nothing from a store is ever unpickled.
    return [pickle.loads(bytes(row.result)) for row in rows]  # noqa: S301


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
        stages = Stages(job_session(check(self.spark) if self.spark else session("ckpt rescale")))
        plan = with_shipped_edits(plan)
        proven()
        targets = list(plan.targets())
        order = {one: number for number, one in enumerate(targets)}
        return stages.exchange(
            partial(_deal_source, folder, order),
            [[(source.size_bytes, source) for source in plan.sources]],
            partial(_write_partition, target, plan.units),
            targets,
            _summed(progress, "writing", len(targets)),
            _summed(progress, "reading", plan.size_bytes),
        )


def _summed(progress: Progress, what: str, whole: int) -> Done:
    done = 0

    def more(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, whole)

    return more


def _deal_source(
    folder: Storage, order: dict[Target, int], source: Source, note: Note
) -> Iterator[tuple[int, pa.RecordBatch]]:
    for piece in deal(folder, source):
        note(order[piece.target], piece.keys)
        yield order[piece.target], piece.rows
    # Every target is written, also without entries: one source announces it.
    unit = source.unit
    for partition in range(source.partition, unit.targets, unit.before if unit.keyed else 1):
        note(order[Target(unit.number, partition)], 0)


def _write_partition(
    folder: Storage, units: Sequence[Unit], target: Target, pieces: Batches, keys: int, done: Done
) -> Result:
    written = write_partition(folder, units[target.unit], target.partition, pieces, keys)
    done(1)
    return Result(target, keys, *written)
