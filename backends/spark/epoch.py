"""One epoch as one Spark job: a line of levels, and the reports at its end.

Nothing is computed twice, nothing is cached, and there is one action. Each try builds new RDDs,
since Spark would not run the first levels of the old ones again.

The exchange between two levels is built from parts of PySpark's ``partitionBy``, which itself
pickles lists of pairs, and holds ten pairs for each partition before it sends any; our payloads may
be megabytes each. Here each payload is sent at once, without pickling.
"""

from __future__ import annotations

import logging
import pickle
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from stateformat.errors import CheckpointError, InvalidInput

from ..dataflow import events as ev
from ..dataflow.chained_operator import FailsAgain
from ..dataflow.compile import Vertex
from . import frames
from .frames import DataFrameInput, EpochBroken
from .messages import Epoch, Setup, Spec, TaskReport
from .task_run import Level

if TYPE_CHECKING:
    from pyspark import Broadcast, SparkContext
    from pyspark.core.rdd import RDD
    from pyspark.sql import DataFrame, SparkSession


def nothing(context: SparkContext, partitions: int) -> RDD[bytes]:
    """Return an RDD with this many empty partitions."""
    return _of_bytes(context._jsc.parallelize([], partitions), context)


def column_of(frame: DataFrame) -> RDD[bytes]:
    """Return the single binary column of a DataFrame. Spark analyses and plans it here."""
    context = frame.sparkSession.sparkContext
    assert context._jvm is not None
    binary = context._jvm.org.apache.spark.sql.Encoders.BINARY()
    return _of_bytes(getattr(frame._jdf, "as")(binary).javaRDD(), context)


def transformed(rdd: RDD[bytes], function: Callable[[int, Iterator[bytes]], Iterator[bytes]]) -> RDD[bytes]:
    """Apply a function to each partition's number and payloads."""
    made: Any = rdd.mapPartitionsWithIndex(function)
    made._bypass_serializer = True
    return made


def exchanged(rdd: RDD[bytes], partitions: int) -> RDD[bytes]:
    """Send the payloads of ``frames.keyed`` to the partitions given before each."""
    jvm: Any = rdd.context._jvm
    pairs = jvm.PairwiseRDD(rdd._jrdd.rdd()).asJavaPairRDD()
    there = pairs.partitionBy(jvm.PythonPartitioner(partitions, 0))
    return _of_bytes(jvm.PythonRDD.valueOfPair(there), rdd.context)


def _of_bytes(jrdd: Any, context: SparkContext) -> RDD[bytes]:
    from pyspark.core.rdd import RDD
    from pyspark.serializers import NoOpSerializer

    return RDD(jrdd, context, NoOpSerializer())


logger = logging.getLogger(__name__)

TRIES = 4
"""How often an epoch is tried before the run is discarded."""


def levels_of(vertices: Sequence[Vertex], finished: Iterable[str]) -> tuple[dict[str, int], int]:
    """Return the level of each running vertex, its longest distance from a source; and the last.

    Feedback edges do not count, but a job with loops has one more level at the end.
    """
    gone = set(finished)
    level: dict[str, int] = {}
    vertex_of = {uid: vertex.id for vertex in vertices for uid in vertex.operators}
    for vertex in vertices:  # In order of their edges.
        if vertex.id not in gone:
            before = [level[vertex_of[edge.source]] for edge in vertex.inputs if vertex_of[edge.source] in level]
            level[vertex.id] = max(before, default=-1) + 1
    loops = any(vertex.feedback for vertex in vertices if vertex.id not in gone)
    return level, max(level.values(), default=0) + (1 if loops else 0)


@dataclass
class EpochJob:
    """One epoch, with the same mail and ranges in each try. See :class:`Level`."""

    spark: SparkSession
    setup: Setup
    broadcast: Broadcast[bytes]
    epoch: Epoch
    specs: Sequence[Spec]
    inputs: Sequence[DataFrameInput]
    description: str
    is_over: Callable[[], bool] = lambda: False
    """Whether there is no time for another try."""
    tries: int = 0
    lost_us: int = 0
    """The total time of failed tries."""

    def __call__(self) -> dict[ev.TaskId, TaskReport]:
        """Run it up to :data:`TRIES` times. Return the reports, or raise what broke the last try.

        Raises ``FailsAgain`` if the job's code fails twice in the same way or cannot be imported.
        """
        from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        before: str | None = None
        for left in range(TRIES - 1, -1, -1):
            self.tries += 1
            begun = time.perf_counter()
            try:
                return self._once()
            except InvalidInput as error:
                # Of a range: its files changed, or its columns.
                raise FailsAgain(str(error)) from error
            except (PySparkException, Py4JJavaError, EpochBroken) as error:
                raised = raised_in_python(error) or refused_by_spark(error)
                if raised is not None and (raised == before or is_import_error(raised) or is_refusal(raised)):
                    raise FailsAgain(raised) from error
                if not left or self.is_over():
                    raise
                before = raised
                self.lost_us += int(1e6 * (time.perf_counter() - begun))
                logger.warning("%s is run again: %s", self.description, first_line(error))
        raise AssertionError

    def _once(self) -> dict[ev.TaskId, TaskReport]:
        context = self.spark.sparkContext
        before = context.getLocalProperty("spark.job.description")
        context.setJobDescription(self.description)
        try:
            sent = self._rdd().collect()[1::2]  # Without their slots.
        finally:
            context.setJobDescription(before)
        for each in self.inputs:
            each.range.check(self.spark)
        return checked(map(frames.unpack_report, sent), [spec.task for spec in self.specs])

    def _rdd(self) -> RDD[bytes]:
        if self.inputs:
            frame = self.inputs[0].frame(self.spark)
            for each in self.inputs[1:]:
                frame = frame.union(each.frame(self.spark))
            rdd = exchanged(column_of(frame), self.slots)
        else:
            rdd = nothing(self.spark.sparkContext, self.slots)
        for level in self.levels():
            rdd = transformed(exchanged(rdd, self.slots) if level.number else rdd, level)
        return rdd

    @property
    def slots(self) -> int:
        return 1 + max(spec.task.subtask for spec in self.specs)

    def levels(self) -> Iterator[Level]:
        """Yield the levels in order. Each but the first reads what the one before it sent."""
        by_level: dict[int, dict[int, list[Spec]]] = defaultdict(lambda: defaultdict(list))
        heads: dict[int, tuple[ev.TaskId, ...]] = defaultdict(tuple)
        for spec in self.specs:
            by_level[self.setup.levels[spec.task.vertex]][spec.task.subtask].append(spec)
            if self.setup.job.vertex(spec.task.vertex).feedback:
                heads[spec.task.subtask] += (spec.task,)
        for number in range(self.setup.last_level + 1):
            yield Level(
                run=self.setup.run,
                setup=self.broadcast,
                epoch=self.epoch,
                number=number,
                specs={slot: pickle.dumps(specs, protocol=5) for slot, specs in by_level[number].items()},
                heads=heads if number == self.setup.last_level else {},
            )


def checked(reports: Iterable[Any], tasks: Sequence[ev.TaskId]) -> dict[ev.TaskId, TaskReport]:
    """Return the reports by task.

    Raises ``EpochBroken`` if one came twice, and, unless a task failed, if any are missing or do
    not agree.
    """
    by_task: dict[ev.TaskId, TaskReport] = {}
    of_inputs: dict[str, Any] = {}
    for report in reports:
        is_task = isinstance(report, TaskReport)
        known: dict[Any, Any] = by_task if is_task else of_inputs
        name = report.task if is_task else report.name
        if name in known:
            raise EpochBroken(f"{name} has reported twice")
        known[name] = report
    if any(report.failure for report in by_task.values()):
        return by_task
    missing = [task for task in tasks if task not in by_task]
    if missing:
        raise EpochBroken(f"{len(missing)} tasks have not reported, {missing[0]} first")
    senders: list[tuple[frames.Address, Any]] = [*by_task.items(), *of_inputs.items()]
    frames.compare(
        {name: (report.token, report.sent) for name, report in senders},
        {task: report.consumed for task, report in by_task.items()},
    )
    return by_task


def first_line(error: Exception) -> str:
    """Return an error in one line: what a Python worker raised, if that is the cause."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    kind = "" if isinstance(error, (CheckpointError, PySparkException, Py4JError)) else f"{type(error).__name__}: "
    lines = [line.removeprefix(": ") for line in str(error).split("\n") if line.strip() and not _is_wrapper(line)]
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            return next((line for line in lines[number + 1 :] if not line.startswith(" ")), line)[:500]
    if lines and lines[0].startswith("\tat "):
        # The JVM's outermost exception only wraps others: one cause names a file that cannot be
        # read, another says why.
        causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
        own = [cause for number, cause in enumerate(causes) if not any(cause in other for other in causes[:number])]
        return "; ".join(own or lines)[:500]
    return f"{kind}{lines[0]}"[:500] if lines else type(error).__name__


def _is_wrapper(line: str) -> bool:
    """Return whether a line is a preamble of Py4J, or the JVM's "thrown in awaitResult"."""
    return line.startswith("An error occurred while calling ") or line.strip().endswith(
        "Exception thrown in awaitResult:"
    )


_PASSING: Final = (
    *("EpochBroken", "StorageError", "OutcomeUnknown", "CheckpointExpired", "OperationalError", "InterfaceError"),
    *("MemoryError", "EOFError", "OSError", "TimeoutError", "BrokenPipeError", "ConnectionError"),
    *("ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
)


def raised_in_python(error: Exception) -> str | None:
    """Return type and message of what Python raised in a worker; None if another try may help."""
    if "Traceback (most recent call last)" not in str(error):
        return None
    raised = first_line(error)
    return None if _type_of(raised) in _PASSING else raised


def refused_by_spark(error: Exception) -> str | None:
    """Return why Spark's analysis, or a storage, refuses a plan; None if another try may help."""
    from pyspark.errors import AnalysisException, ParseException

    said = first_line(error)
    return said if isinstance(error, AnalysisException | ParseException) or is_refusal(str(error)) else None


def is_refusal(said: str) -> bool:
    """Return whether a storage refuses access: no permission, no bucket, no such file system."""
    return re.search(_REFUSALS, said) is not None


_REFUSALS: Final = (
    r"\b(AccessDeniedException|AccessControlException|NoSuchBucket|UnknownStoreException|"
    r"UnsupportedFileSystemException|NoAuthWithAWSException|InvalidAccessKeyId|SignatureDoesNotMatch)\b"
)
"""Errors of Hadoop's file systems for which another try cannot help."""


def is_import_error(raised: str) -> bool:
    """Return whether an error of Python says that something cannot be imported or unpickled."""
    kinds = {"ImportError", "ModuleNotFoundError", "PicklingError", "UnpicklingError"}
    return _type_of(raised) in kinds or "Can't get attribute" in raised


def _type_of(raised: str) -> str:
    return raised.partition(":")[0].strip().rpartition(".")[2]
