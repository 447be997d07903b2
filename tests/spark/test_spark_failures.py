"""Whatever fails while a job runs on Spark, its output and states are as undisturbed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

import stateformat
from stateformat.backends.connectors import CollectSink
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.runtime import JobFailed, Progress
from stateformat.backends.spark.driver import epoch
from stateformat.backends.spark.driver.run import SparkRun
from stateformat.backends.spark.protocol.frames import EpochBroken
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.sessions import check
from stateformat.backends.spark.sources.offset_table import OffsetTable
from stateformat.backends.spark.sources.source import SparkSource
from stateformat.errors import InvalidInput, PublishConflict
from tests.spark.spark_failures import Place, every_segment_an_object, judge
from tests.worlds.spark import Stand

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
