"""What fails while a job runs on Spark changes no output and no state, and its author is told."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow, Operator, Output
from stateformat.backends.dataflow.chained_operator import FailsAgain, OperatorError
from stateformat.backends.local import LocalRuntime, VirtualClock
from stateformat.backends.runtime import JobFailed, Progress, Runtime
from stateformat.backends.spark import epoch
from stateformat.backends.spark.epoch import is_import_error, raised_in_python
from stateformat.backends.spark.frames import EpochBroken
from stateformat.backends.spark.messages import RemoteError
from stateformat.backends.spark.offsets import OffsetTable
from stateformat.backends.spark.run import SparkRun
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.sessions import check
from stateformat.backends.spark.source import SparkSource
from stateformat.errors import InvalidInput, PublishConflict, StorageError
from tests.spark.spark_failures import Place, every_segment_an_object, judge
from tests.worlds.local import rows
from tests.worlds.spark import Stand
from tests.worlds.stages import Gated, Out

ROWS = 1200


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Where the job runs."""
    with every_segment_an_object():
        yield Place(tmp_path, ROWS)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """Spark, played in this process by two workers."""
    return Stand(monkeypatch, workers=2)


class OneByOne:
    """Gives an order after each checkpoint, so that each fault is in another epoch."""

    def __init__(self, place: Place, *faults: tuple[str, str, int]) -> None:
        self._place = place
        self._faults = list(faults)
        self._seen: int | None = None

    def __call__(self, progress: Progress) -> None:
        if progress.checkpoint_id != self._seen and self._faults and not self._place.orders.left:
            self._place.orders.give(*self._faults.pop(0))
        self._seen = progress.checkpoint_id

    @property
    def all_happened(self) -> bool:
        return not (self._faults or self._place.orders.left)


@pytest.mark.truth
@pytest.mark.spark
def test_workers_that_die_and_attempts_that_fail_after_they_wrote_change_nothing(place: Place, spark: Any) -> None:
    faults = OneByOne(
        place, ("seen.process", "kill", 1), ("records-out.prepared", "kill", 1), ("seen.snapshot", "kill", 1)
    )
    outcome = place.run(spark, progress=faults, checkpoint_rows=ROWS // 5)
    assert faults.all_happened
    assert outcome.restarts == 0, "Spark, or the epoch, tries again: no failure of the job"
    judged = judge(place)
    assert judged.states >= 4
    assert judged.garbage > 0, "what dead attempts have written"


@pytest.mark.spark
def test_what_fails_in_real_workers_makes_the_job_start_again(place: Place, spark: Any) -> None:
    faults = OneByOne(place, ("seen.snapshot", "raise", 1), ("worker.write", "down", 1))
    outcome = place.run(spark, progress=faults, max_restarts=4, checkpoint_rows=ROWS // 4)
    assert faults.all_happened
    assert outcome.restarts >= 2
    judge(place)


def test_what_user_code_raises_makes_the_job_start_again(place: Place, stand: Stand) -> None:
    faults = OneByOne(place, ("spot.process", "raise", 1), ("seen.snapshot", "raise", 1), ("seen.open", "raise", 1))
    place.orders.give("seen.process", "raise")
    outcome = place.run(stand, progress=faults, max_restarts=4, checkpoint_rows=ROWS // 5)
    assert outcome.restarts >= 3
    judge(place)


@pytest.mark.parametrize("tolerable", [0, 3])
def test_a_store_that_is_down_for_a_while_is_waited_for(place: Place, stand: Stand, tolerable: int) -> None:
    place.orders.give("driver.publish", "lose")
    place.orders.give("worker.read", "down", 2)  # It reads when the job starts again.
    faults = OneByOne(
        place,
        ("worker.write", "down", 2),
        ("driver.write", "down", 2),
        ("driver.list", "down", 1),
        ("driver.publish", "refuse", 1),
    )
    outcome = place.run(
        stand, progress=faults, max_restarts=10, tolerable_failures=tolerable, checkpoint_rows=ROWS // 12
    )
    assert faults.all_happened
    assert outcome.restarts > 0
    assert judge(place).garbage > 0


def test_a_job_that_fails_again_and_again_says_where_and_goes_on_when_it_is_mended(place: Place, stand: Stand) -> None:
    run = place.runtime(stand).begin(place.flow())
    assert run.step()
    run.close()
    place.orders.give("seen.process.1", "raise", 2)
    with pytest.raises(
        JobFailed, match=r"failed twice in the same way.*process of 'seen', subtask 1, failed: Boom: raise at seen"
    ):
        place.run(stand, max_restarts=2)
    place.run(stand)
    judge(place)


def test_of_two_drivers_one_goes_on(place: Place, stand: Stand) -> None:
    first, second = (place.runtime(stand).begin(place.flow()) for _ in range(2))
    assert isinstance(first, SparkRun)
    assert first.step()
    with pytest.raises(PublishConflict):
        second.step()
    second.close()
    newer = place.runtime(stand).begin(place.flow())
    assert newer.step()
    committed = place.committed("records")
    with pytest.raises(PublishConflict):
        first.step()
    first.close()
    assert place.committed("records") == committed, "whoever is beaten commits nothing"
    while newer.step():
        pass
    judge(place)


@pytest.mark.spark
def test_an_epoch_whose_reports_do_not_fit_together_is_run_again(
    place: Place, spark: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def checked(reports: Any, tasks: Any) -> Any:
        nonlocal calls
        calls += 1
        reports = list(reports)
        if calls in (2, 3):
            report = next(report for report in reports if getattr(report, "consumed", None))
            sender = next(iter(report.consumed))
            report.consumed[sender] = (os.urandom(16), report.consumed[sender][1])
        return real(reports, tasks)

    real = epoch.checked
    monkeypatch.setattr(epoch, "checked", checked)
    with caplog.at_level(logging.WARNING, epoch.__name__):
        outcome = place.run(spark, checkpoint_rows=ROWS // 2)
    assert [record.message.count("of another attempt") for record in caplog.records] == [1, 1]
    assert outcome.restarts == 0
    assert judge(place).garbage > 0, "what the tries that do not count have written"


JVM = "An error occurred while calling o592.getResult.\n: org.apache.spark.SparkException: "


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Py4JError(JVM + "Job aborted\n\tat org.apache"), "org.apache.spark.SparkException: Job aborted"),
        (
            Py4JError(
                JVM + "Exception thrown in awaitResult: \n\tat org.apache.spark\n"
                "Caused by: SparkException: Encountered error while reading file a.parquet.\n\tat org\n"
                "Caused by: RuntimeException: it is no Parquet file\n\t... 1 more\n"
                "Caused by: RuntimeException: it is no\n"
            ),
            "SparkException: Encountered error while reading file a.parquet.; RuntimeException: it is no Parquet file",
        ),
        (KeyError("at"), "KeyError: 'at'"),
        (ValueError(), "ValueError"),
        (EpochBroken("two tokens"), "two tokens"),
        (EpochBroken("a file a\u2028b\x0bc is gone"), "a file a\u2028b\x0bc is gone"),
    ],
    ids=["of Spark", "causes in the JVM", "other code", "without words", "ours", "ends of lines for some"],
)
def test_an_error_is_told_in_one_line(error: Exception, line: str) -> None:
    assert epoch.first_line(error) == line


@pytest.mark.spark
def test_a_job_runs_in_a_session_that_knows_what_the_users_session_knows(tmp_path: Path, spark: Any) -> None:
    session = spark.newSession()
    # It would change the columns of our exchanges.
    session.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    runtime = SparkRuntime(session, stateformat.open(f"file://{tmp_path}", durable=False), max_restarts=0)
    session.udf.register("twice", lambda text: 2 * text, "string")
    table = OffsetTable(lambda session: session.range(3).selectExpr("id", "twice(string(id)) as text"), "id")
    flow = Dataflow("job", parallelism=2)
    source = SparkSource(table, schema={"id": pa.int64(), "text": pa.string()})
    flow.source(source, uid="in").apply(out := CollectSink(), uid="out")
    spark.sparkContext.setJobDescription("what the user does")
    try:
        runtime.run(flow)
        assert spark.sparkContext.getLocalProperty("spark.job.description") == "what the user does"
    finally:
        spark.sparkContext.setJobDescription(None)
    assert sorted(out.table()["text"].to_pylist()) == ["00", "11", "22"]


@pytest.mark.parametrize("given", [None, "local[2]"])
def test_what_is_no_session_is_refused_with_a_sentence(given: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="is not a session of Spark Classic"):
        SparkRuntime(given, stateformat.open(f"file://{tmp_path}", durable=False))


@pytest.mark.parametrize("how", ["stopped", "its JVM is gone"])
def test_a_session_that_has_been_stopped_is_refused_with_a_sentence(how: str) -> None:
    def gone() -> None:
        raise Py4JError("Answer from Java side is empty")

    ended = object.__new__(SparkSession)
    ended._sc = SimpleNamespace(appName="job", _jsc=None if how == "stopped" else SimpleNamespace(sc=gone))
    with pytest.raises(InvalidInput, match=r"The session of 'job' has been stopped\. Make another"):
        check(ended)


# ---- what a job's own code raises is reported with its author's frames


class Twisted(Exception):
    """Can be pickled, and not be read again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class OperationalError(Exception):
    """As drivers of databases have it."""


class Broken(Operator):
    """Raises for the value 3, some times; a file counts them, since Spark's workers are other
    processes."""

    def __init__(self, notes: Path, error: type[BaseException], message: tuple[str, ...], times: int) -> None:
        self.notes, self.error, self.message, self.times = notes, error, message, times

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        self._deep_in_the_authors_code(batch)
        return batch

    def _deep_in_the_authors_code(self, batch: pa.RecordBatch) -> None:
        tries = len(self.notes.read_text()) if self.notes.exists() else 0
        if 3 in batch["value"].to_pylist() and tries < self.times:
            self.notes.write_text("x" * (tries + 1))
            raise self.error(*self.message)


class Job:
    """in → broken → out, on one of the executors."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, executor: str) -> None:
        self.directory = directory
        self.stand = Stand(monkeypatch) if executor == "spark" else None
        self.store = stateformat.open(f"file://{directory / 'store'}", durable=False)
        self.out = Out()

    def run(self, error: type[BaseException], *message: str, times: int = 100, **options: Any) -> Any:
        flow = Dataflow("job", parallelism=1)
        source = flow.source(Gated(self.directory / "in", [rows(n) for n in range(6)]), uid="in")
        source.apply(Broken(self.directory / "notes", error, message, times), uid="broken").apply(self.out, uid="out")
        return self.runtime(**options).run(flow)

    def runtime(self, **options: Any) -> Runtime[Any]:
        options = {"restart_delay_us": 0, **options}
        if self.stand is not None:
            return self.stand.runtime(self.store, **options)
        return LocalRuntime(self.store, clock=VirtualClock(), checkpoint_interval_us=None, **options)

    @property
    def tries(self) -> int:
        return len((self.directory / "notes").read_text())


@pytest.fixture(params=["local", "spark"])
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Job:
    """On both executors, Spark's played in this process."""
    return Job(tmp_path, monkeypatch, request.param)


def causes(error: BaseException) -> Iterator[BaseException]:
    while error.__cause__ is not None:
        error = error.__cause__
        yield error


def test_a_bug_is_reported_with_its_authors_frames_and_not_tried_again_and_again(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(JobFailed, match="failed twice in the same way with no checkpoint in between") as raised:
        job.run(KeyError, "b")
    operator_error, bug, *_ = causes(raised.value)
    assert isinstance(operator_error, OperatorError)
    assert (operator_error.operator, operator_error.details["subtask"], operator_error.hook) == ("broken", 0, "process")
    assert "process of 'broken', subtask 0, failed: KeyError: 'b'" in str(raised.value)
    assert str(raised.value).endswith(". What it has published stands: fix the cause and run it again")
    assert "in[0]" not in str(raised.value), "the head of the chain has nothing to do with it"
    assert isinstance(bug, KeyError)
    assert "_deep_in_the_authors_code" in "".join(traceback.format_exception(raised.value))
    assert job.tries == 2
    [record] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "_deep_in_the_authors_code" in caplog.text
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("error", "message", "tries"),
    [
        (Twisted, ("this", "that"), 2),
        (FileNotFoundError, ("no such file",), 2),
        (ModuleNotFoundError, ("No module named 'nowhere'",), 1),
        (ConnectionResetError, ("by peer",), 4),
        (StorageError, ("the storage is down",), 4),
        (OperationalError, ("server closed the connection",), 4),
        (MemoryError, ("too much",), 4),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_bad_luck_is_tried_as_often_as_may_be_and_what_is_not_is_not(
    job: Job, error: type[BaseException], message: tuple[str, ...], tries: int
) -> None:
    with pytest.raises(JobFailed) as raised:
        job.run(error, *message, max_restarts=3)
    assert job.tries == tries
    found = [type(cause) for cause in causes(raised.value)]
    assert found[:2] == [OperatorError, RemoteError if error is Twisted and job.stand else error]
    assert str(error(*message)) in str(raised.value)


def test_the_same_bad_luck_that_passes_costs_nothing(job: Job) -> None:
    assert job.run(ConnectionResetError, "by peer", times=3, max_restarts=3).restarts == 3
    assert job.out.values == [*range(6)]


class BadSource(MemorySource):
    """Its enumerator raises."""

    def enumerator(self) -> Any:
        made = super().enumerator()

        def raises(*_: object) -> None:
            raise KeyError("no split")

        made.next_split = raises  # type: ignore[method-assign, assignment]
        return made


def test_what_an_enumerator_raises_is_reported_with_its_frames(job: Job) -> None:
    flow = Dataflow("job", parallelism=1)
    flow.source(BadSource(pa.table({"n": [1]})), uid="in").apply(Out(), uid="out")
    with pytest.raises(JobFailed, match="the enumerator of source 'in' failed") as raised:
        job.runtime().run(flow)
    assert [type(cause) for cause in causes(raised.value)] == [OperatorError, KeyError]
    assert "in raises" in "".join(traceback.format_exception(raised.value))


# ---- Spark


def test_a_job_that_workers_cannot_have_fails_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(tmp_path, monkeypatch, "spark")

    cannot_be_imported = b"cmy_job\nStep\n."  # The pickle of ``my_job.Step``.
    monkeypatch.setattr(Stand, "broadcast", lambda stand, value: type("Sent", (), {"value": cannot_be_imported}))
    monkeypatch.setattr(SparkRun, "close", lambda run: None)
    with pytest.raises(JobFailed, match=r"retrying cannot help: .*ModuleNotFoundError: No module named 'my_job'"):
        job.run(KeyError, "never")
    assert "starts again" not in caplog.text


@pytest.mark.parametrize(
    ("message", "kept", "for_good"),
    [
        ("ModuleNotFoundError: No module named 'x'", True, True),
        ("AttributeError: Can't get attribute 'F' on <module '__main__'>", True, True),
        ("ValueError: invalid literal", True, False),
        ("stateformat.backends.spark.frames.EpochBroken: a gap", False, False),
        ("stateformat.errors.StorageError: down", False, False),
        ("ConnectionResetError: by peer", False, False),
    ],
)
def test_what_python_raises_in_spark_is_classified(message: str, kept: bool, for_good: bool) -> None:
    trace = f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n    f()\n{message}'
    assert (raised_in_python(RuntimeError(f"Job aborted.\n{trace}\n\n\tat java")) is not None) == kept
    assert is_import_error(message) == for_good
    assert raised_in_python(RuntimeError("ExecutorLostFailure")) is None


@pytest.mark.spark
def test_a_module_that_real_workers_cannot_import_fails_the_job_in_one_try(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "only_in_the_driver.py").write_text(
        "from stateformat.backends.dataflow import Operator\n"
        "class Away(Operator):\n    def process(self, batch, input):\n        return batch\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    away = importlib.import_module("only_in_the_driver").Away()
    flow = Dataflow("job", parallelism=1)
    flow.source(MemorySource(pa.table({"n": [1, 2]})), uid="in").apply(away, uid="op").apply(Out(), uid="out")
    store = stateformat.open(f"file://{tmp_path / 'store'}", durable=False)
    try:
        with pytest.raises(JobFailed, match=r"retrying cannot help.*only_in_the_driver") as raised:
            SparkRuntime(spark, store).run(flow)
    finally:
        sys.modules.pop("only_in_the_driver")
    assert any(isinstance(cause, FailsAgain) for cause in causes(raised.value))
    assert "starts again" not in caplog.text


# ---- Several jobs in one session


def test_workers_keep_the_states_of_all_jobs_that_run_and_let_go_of_those_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand = Stand(monkeypatch)
    runs = []
    for number in range(4):
        flow = Dataflow(f"job-{number}", parallelism=1)
        source = Gated(tmp_path / f"in-{number}", [rows(n) for n in range(50)], endless=True)
        flow.source(source, uid="in").key_by("key").apply(Out(), uid="out")
        store = stateformat.open(f"file://{tmp_path / f'store-{number}'}", durable=False)
        runs.append(stand.begin(store, flow, checkpoint_rows=2))
    tasks = 2
    for _ in range(5):
        for run in runs:
            assert run.step()
    assert stand.opened["restored"] == len(runs) * tasks, "each task was opened once, in its first epoch"
    assert stand.opened["kept"] == 4 * len(runs) * tasks
    for run in runs[:3]:
        run.close()
    assert runs[3].step()
    assert set(stand.setups[0]) == {runs[3]._id}
    assert {key[0] for key in stand.caches[0]._tasks} == {runs[3]._id}
