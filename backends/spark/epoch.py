"""One epoch as one Spark job: a line of levels, and the reports that come out at its end.

Theory of operation. Whatever the shape of the dataflow, the job is one line: level, exchange, level, exchange. Nothing is computed
twice, nothing is cached, and there is one action. The DataFrame is built anew for each try, since Spark would not run the first
levels of the same one again. What Spark itself does about failures (a task runs again, a stage does) is not trusted to be consistent:
the tokens in the reports are (``mail.compare``).
"""

from __future__ import annotations

import logging
import pickle
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from backends.dataflow import events as ev
from backends.dataflow.compile import Vertex
from backends.dataflow.failures import FailsAgain
from backends.spark.feeds import Feed
from backends.spark.level import Level
from backends.spark.mail import DDL, Address, EpochBroken, compare
from backends.spark.reports import Report, Spec
from stateformat.errors import CheckpointError
from stateformat.model import AttemptId, CheckpointId

if TYPE_CHECKING:
    from pyspark import Broadcast
    from pyspark.sql import DataFrame, SparkSession

logger = logging.getLogger(__name__)

TRIES = 4
"""How often an epoch is run before the run is given up."""


def levels_of(vertices: Sequence[Vertex], finished: Iterable[str]) -> tuple[dict[str, int], int]:
    """The level of each vertex that runs: the longest way to it, feedback aside; and the last level, one more where there are loops."""
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
    """One epoch, ready to be run as often as need be: the same mail, the same ranges.

    ``live``: the runs for which workers keep what they have. ``specs``: of every task that takes part. ``feeds``: DataFrames that feed sources. ``description``: what Spark's UI shows.
    """

    spark: SparkSession
    run: str
    live: frozenset[str]
    setup: Broadcast[bytes]
    specs: Sequence[Spec]
    levels: Mapping[str, int]
    last_level: int
    heads: Sequence[ev.TaskId]
    checkpoint_id: CheckpointId
    attempt_id: AttemptId
    feeds: Sequence[Feed]
    description: str
    tries: int = 0

    def __call__(self) -> dict[ev.TaskId, Report]:
        """Run it, again where it breaks. Raises what broke it last, after :data:`TRIES`; ``FailsAgain`` at once for what another try
        cannot mend, and when code of the job's fails twice in the same way.
        """
        from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        before: str | None = None
        for left in range(TRIES - 1, -1, -1):
            self.tries += 1
            try:
                return self._once()
            except (PySparkException, Py4JJavaError, EpochBroken) as error:
                said = raised_in_python(error)
                if said is not None and (said == before or cannot_be_had(said)):
                    raise FailsAgain(said) from error
                if not left:
                    raise
                before = said
                logger.warning("%s is run again: %s", self.description, first_line(error))
        raise AssertionError

    def _once(self) -> dict[ev.TaskId, Report]:
        context = self.spark.sparkContext
        before = context.getLocalProperty("spark.job.description")
        context.setJobDescription(self.description)
        try:
            table = self._frame().toArrow()
        finally:
            context.setJobDescription(before)
        reports = [pickle.loads(payload.as_buffer()) for payload in table.column("payload")]  # noqa: S301 - from our workers
        return checked(reports, [spec.task for spec in self.specs])

    def _frame(self) -> DataFrame:
        by_level: dict[int, dict[int, list[Spec]]] = defaultdict(lambda: defaultdict(list))
        for spec in self.specs:
            by_level[self.levels[spec.task.vertex]][spec.task.subtask].append(spec)
        heads: dict[int, tuple[ev.TaskId, ...]] = defaultdict(tuple)
        for head in self.heads:
            heads[head.subtask] += (head,)
        slots = 1 + max(spec.task.subtask for spec in self.specs)
        if self.feeds:
            frame = self.feeds[0].frame(self.spark)
            for feed in self.feeds[1:]:
                frame = frame.union(feed.frame(self.spark))
            frame = frame.repartitionById(slots, "target")
        else:
            frame = self.spark.range(0, slots, 1, slots)
        for number in range(self.last_level + 1):
            level = Level(
                run=self.run,
                live=self.live,
                setup=self.setup,
                number=number,
                specs={slot: pickle.dumps(specs, protocol=5) for slot, specs in by_level[number].items()},
                heads=heads if number == self.last_level else {},
                checkpoint_id=self.checkpoint_id,
                attempt_id=self.attempt_id,
            )
            if number:
                frame = frame.repartitionById(slots, "target")
            frame = frame.mapInArrow(level, DDL)
        return frame.select("payload")


def checked(reports: Iterable[Any], tasks: Sequence[ev.TaskId]) -> dict[ev.TaskId, Report]:
    """The reports by task, if they fit together; raises :class:`EpochBroken` if not.

    Where a task has failed, others may lack what it would have sent: then they need not.
    """
    by_task: dict[ev.TaskId, Report] = {}
    feeds: dict[str, Any] = {}
    for report in reports:
        known: dict[Any, Any] = by_task if isinstance(report, Report) else feeds
        name = report.task if isinstance(report, Report) else report.name
        if name in known:
            raise EpochBroken(f"{name} has reported twice")
        known[name] = report
    if any(report.failure for report in by_task.values()):
        return by_task
    missing = [task for task in tasks if task not in by_task]
    if missing:
        raise EpochBroken(f"{len(missing)} tasks have not reported, {missing[0]} first")
    senders: list[tuple[Address, Any]] = [*by_task.items(), *feeds.items()]
    compare(
        {name: (report.token, report.sent) for name, report in senders},
        {task: report.consumed for task, report in by_task.items()},
    )
    return by_task


def first_line(error: Exception) -> str:
    """What an error says in a line: one of Spark that Python has raised in a worker, what that says itself; one of other code of the
    job's, what it is, too.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    kind = "" if isinstance(error, (CheckpointError, PySparkException, Py4JError)) else f"{type(error).__name__}: "
    lines = [line.removeprefix(": ") for line in str(error).splitlines() if line.strip() and not _says_nothing(line)]
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            said = next((line for line in lines[number + 1 :] if not line.startswith(" ")), line)
            return said[:500]
    if lines and lines[0].startswith("\tat "):
        # What the JVM threw in the end was no more than a wrapper. A file that cannot be read is named by one cause, and why by another.
        causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
        told = [cause for number, cause in enumerate(causes) if not any(cause in other for other in causes[:number])]
        return "; ".join(told or lines)[:500]
    return f"{kind}{lines[0]}"[:500] if lines else type(error).__name__


_PASSING: Final = frozenset(
    {
        *(
            "EpochBroken",
            "StorageError",
            "OutcomeUnknown",
            "CheckpointExpired",
            "MemoryError",
            "EOFError",
            "OSError",
            "TimeoutError",
        ),
        *(
            "ConnectionError",
            "ConnectionResetError",
            "ConnectionRefusedError",
            "ConnectionAbortedError",
            "BrokenPipeError",
        ),
        *("OperationalError", "InterfaceError"),
    }
)
"""What code that runs in a worker may raise by bad luck."""


def raised_in_python(error: Exception) -> str | None:
    """What Python code raised in a worker, type and message; None where a worker or the JVM failed, or it may be bad luck."""
    if "Traceback (most recent call last)" not in str(error):
        return None
    said = first_line(error)
    return None if _type_of(said) in _PASSING else said


def cannot_be_had(said: str) -> bool:
    """Whether what Python raised says that something cannot be imported or unpickled."""
    kinds = {"ImportError", "ModuleNotFoundError", "PicklingError", "UnpicklingError"}
    return _type_of(said) in kinds or "Can't get attribute" in said


def _type_of(said: str) -> str:
    return said.partition(":")[0].strip().rpartition(".")[2]


def _says_nothing(line: str) -> bool:
    """Whether it is what Py4J says before the JVM's own words, or the JVM of having waited."""
    return line.startswith("An error occurred while calling ") or line.strip().endswith(
        "Exception thrown in awaitResult:"
    )


__all__ = ["TRIES", "EpochJob", "checked", "first_line", "levels_of"]
