"""What a job's own code raises is reported with its author's frames; what would fail again is not
tried again."""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import stateformat
from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import Dataflow, Operator, Output
from stateformat.backends.dataflow.chain.errors import FailsAgain, OperatorError
from stateformat.backends.local import JobFailed, LocalRuntime, VirtualClock
from stateformat.backends.runtime import Runtime
from stateformat.backends.spark.driver.epoch import is_import_error, raised_in_python
from stateformat.backends.spark.driver.run import SparkRun
from stateformat.backends.spark.protocol.remote_errors import RemoteError
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.errors import StorageError
from tests.worlds.local import rows
from tests.worlds.spark import Stand
from tests.worlds.stages import Gated, Out


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
        ("stateformat.backends.spark.protocol.frames.EpochBroken: a gap", False, False),
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
