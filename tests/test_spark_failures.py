"""Whatever fails while a job runs on Spark: it goes on, and its output and its states are those of an undisturbed run."""

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
from stateformat.backends.spark.driver import SparkRun, epoch
from stateformat.backends.spark.protocol import EpochBroken
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.sessions import check
from stateformat.backends.spark.sources import SparkSource
from stateformat.backends.spark.sources.offset_table import OffsetTable
from stateformat.errors import InvalidInput, PublishConflict
from tests.spark_failures import Place, every_segment_an_object, judge

pytestmark = pytest.mark.spark

ROWS = 2400


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Where the job runs."""
    with every_segment_an_object():
        yield Place(tmp_path, ROWS)


class OneByOne:
    """Gives an order after each checkpoint, until there is none left: faults in different epochs, and none when there is another.

    Each may cost an epoch, or more: the job must have some to spare.
    """

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
        """Whether every order was carried out."""
        return not (self._faults or self._place.orders.left)


def test_workers_that_die_and_attempts_that_fail_after_they_wrote_change_nothing(place: Place, spark: Any) -> None:
    faults = OneByOne(
        place, ("seen.process", "kill", 1), ("records-out.prepared", "kill", 1), ("seen.snapshot", "kill", 1)
    )
    outcome = place.run(spark, progress=faults, checkpoint_rows=ROWS // 8)
    assert faults.all_happened
    assert outcome.restarts == 0, "Spark, or the epoch, tries again: no failure of the job"
    judged = judge(place)
    assert judged.states >= 4
    assert judged.garbage > 0, "what dead attempts have written"


def test_what_user_code_raises_makes_the_job_start_again(place: Place, spark: Any) -> None:
    faults = OneByOne(place, ("spot.process", "raise", 1), ("seen.snapshot", "raise", 1), ("seen.open", "raise", 1))
    place.orders.give("seen.process", "raise")
    outcome = place.run(spark, progress=faults, max_restarts=4)
    assert outcome.restarts >= 3
    judge(place)


@pytest.mark.parametrize("tolerable", [0, 3])
def test_a_store_that_is_down_for_a_while_is_waited_for(place: Place, spark: Any, tolerable: int) -> None:
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
        spark, progress=faults, max_restarts=10, tolerable_failures=tolerable, checkpoint_rows=ROWS // 24
    )
    assert faults.all_happened
    assert outcome.restarts > 0
    assert judge(place).garbage > 0


def test_a_job_that_fails_again_and_again_says_where_and_goes_on_when_it_is_mended(place: Place, spark: Any) -> None:
    run = place.runtime(spark).begin(place.flow())
    assert run.step()
    run.close()
    place.orders.give("seen.process.1", "raise", 2)
    with pytest.raises(
        JobFailed, match=r"failed twice in the same way.*process of 'seen', subtask 1, failed: Boom: raise at seen"
    ):
        place.run(spark, max_restarts=2)
    place.run(spark)
    judge(place)


def test_of_two_drivers_one_goes_on(place: Place, spark: Any) -> None:
    first, second = (place.runtime(spark).begin(place.flow()) for _ in range(2))
    assert isinstance(first, SparkRun)
    assert first.step()
    with pytest.raises(PublishConflict):
        second.step()
    second.close()
    newer = place.runtime(spark).begin(place.flow())
    assert newer.step()
    committed = place.committed("records")
    with pytest.raises(PublishConflict):
        first.step()
    first.close()
    assert place.committed("records") == committed, "whoever is beaten commits nothing"
    while newer.step():
        pass
    judge(place)


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
    with caplog.at_level(logging.WARNING, "stateformat.backends.spark.driver.epoch"):
        outcome = place.run(spark)
    assert [record.message.count("of another attempt") for record in caplog.records] == [1, 1]
    assert outcome.restarts == 0
    assert judge(place).garbage > 0, "what the tries that do not count have written"


def test_why_an_epoch_is_run_again_is_told_in_the_words_of_spark() -> None:
    said = "An error occurred while calling o592.getResult.\n: org.apache.spark.SparkException: Job aborted\n\tat org.apache"
    assert epoch.first_line(Py4JError(said)) == "org.apache.spark.SparkException: Job aborted"


def test_of_an_error_in_the_jvm_the_causes_are_told_and_not_that_somebody_waited() -> None:
    said = (
        "An error occurred while calling o1.getResult.\n: org.apache.spark.SparkException: Exception thrown in awaitResult: \n"
        "\tat org.apache.spark\nCaused by: SparkException: Encountered error while reading file a.parquet.\n\tat org\n"
        "Caused by: RuntimeException: it is no Parquet file\n\t... 1 more\nCaused by: RuntimeException: it is no\n"
    )
    told = "SparkException: Encountered error while reading file a.parquet.; RuntimeException: it is no Parquet file"
    assert epoch.first_line(Py4JError(said)) == told


def test_an_error_of_other_code_is_told_with_what_it_is() -> None:
    assert epoch.first_line(KeyError("at")) == "KeyError: 'at'"
    assert epoch.first_line(ValueError()) == "ValueError"
    assert epoch.first_line(EpochBroken("two tokens")) == "two tokens"


def test_a_job_runs_in_a_session_that_knows_what_the_users_session_knows_when_it_begins(
    tmp_path: Path, spark: Any
) -> None:
    session = spark.newSession()
    # It would change the columns of our exchanges.
    session.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    runtime = SparkRuntime(session, stateformat.open(f"file://{tmp_path}", durable=False), max_restarts=0)
    session.udf.register("twice", lambda text: 2 * text, "string")
    table = OffsetTable(lambda session: session.range(3).selectExpr("id", "twice(string(id)) as text"), "id")
    flow = Dataflow("job", parallelism=2)
    flow.source(SparkSource(table, schema={"id": pa.int64(), "text": pa.string()}), uid="in").apply(
        out := CollectSink(), uid="out"
    )
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
    with pytest.raises(InvalidInput, match="has been stopped"):
        check(ended)
