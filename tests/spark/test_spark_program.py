"""The program for spark-submit: what it prints, how it is stopped and goes on, with what status it
ends.

``spark-submit`` starts one process; everything else runs here, on the session of the tests. ``ckpt
stop``, in a thread, stops a job when it has reported its second epoch.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat import validate
from stateformat.model import CheckpointKind, StopMode
from stateformat.tools.ckpt.asking import Attempt
from stateformat.tools.ckpt.main import main as ckpt
from stateformat.tools.jobs.run import main
from tests.servers.server import BUCKET, S3Server
from tests.worlds.stores import counts_job

pytestmark = pytest.mark.spark

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PARALLELISM = 2
TOTAL = 20_000

JOB = """
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow, Operator


class Fails(Operator):
    def process(self, batch, input):
        raise ValueError("no such luck")


def flow(total, job_id="numbers"):
    flow = Dataflow(job_id, parallelism={parallelism})
    numbers = flow.source(RateSource(total=total, shards=4, rows_per_read=50), uid="numbers", event_time="at")
    numbers.apply(FileSink({directory!r}, durable=False), uid="all")
    shards = numbers.key_by("shard").aggregate({{"rows": ("*", "count")}}, emit="end", uid="shards")
    shards.apply(FileSink({directory!r} + "-shards", durable=False), uid="counted")
    return flow


def few():
    return flow(1000)


def many():
    return flow({total})


def failing(spark):
    assert spark.version
    flow = Dataflow("failing", parallelism=1)
    flow.source(RateSource(total=10), uid="numbers").apply(Fails(), uid="unlucky")
    return flow


def wrong():
    return 7


def broken():
    return 1 / 0


CONSTANT = 7
"""


class Place(NamedTuple):
    """Where a test's job has its file, its store and its output."""

    directory: Path

    @property
    def store(self) -> str:
        return str(self.directory / "store")

    @property
    def output(self) -> str:
        return str(self.directory / "out")

    def job(self, function: str) -> str:
        return f"{self.directory / f'job_{self.directory.name}.py'}:{function}"

    def numbers(self) -> tuple[int, int, int]:
        """How many rows are committed, how many of them differ, and their greatest number."""
        files = f"{self.output}/*.parquet"
        [found] = duckdb.sql(f"SELECT count(*), count(DISTINCT (shard, n)), max(n) FROM '{files}'").fetchall()
        return found

    def shards(self) -> dict[int, int]:
        """The counts by shard, as committed."""
        table = pq.read_table(self.output + "-shards")
        return dict(zip(table["shard"].to_pylist(), table["rows"].to_pylist(), strict=True))


@pytest.fixture
def place(tmp_path: Path, spark: Any) -> Iterator[Place]:
    """A job's place; Spark is there."""
    made = Place(tmp_path)
    text = JOB.format(directory=made.output, total=TOTAL, parallelism=PARALLELISM)
    Path(made.job("f").rpartition(":")[0]).write_text(text)
    yield made
    for name in ("job", "other"):
        sys.modules.pop(f"{name}_{tmp_path.name}", None)
    assert spark.range(1).count() == 1  # A session that was there before is left alone.


class Printed(io.StringIO):
    """Standard output of the program. With the store of a job, ``ckpt stop`` runs once two lines
    have come."""

    def __init__(self, stop: str = "", *, drain: bool = False, to: str | None = None, **options: str) -> None:
        super().__init__()
        self._stop, self._options = stop, options
        self._mode, self._to = StopMode.DRAIN if drain else StopMode.NO_DRAIN, to
        self._answers: list[dict[str, Any]] = []
        self._stopping: threading.Thread | None = None

    def write(self, text: str) -> int:
        count = super().write(text)
        if self._stop and self._stopping is None and self.getvalue().count("\n") >= 2:
            self._stopping = threading.Thread(target=self._ask)
            self._stopping.start()
        return count

    def _ask(self) -> None:
        open_store = partial(sf.open, **self._options)
        attempt = Attempt(open_store(self._stop), "stop", {"mode": self._mode}, self._to, open_store=open_store)
        self._answers.append(attempt.document(attempt.run(120)))

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]

    def stopped(self) -> dict[str, Any]:
        """What the command would print."""
        assert self._stopping is not None
        self._stopping.join(timeout=120)
        (answer,) = self._answers
        assert answer["outcome"] == "stopped"
        return answer


def run(monkeypatch: pytest.MonkeyPatch, printed: Printed, *arguments: str) -> Printed:
    """Run the program to a good end, with JSON on this output."""
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", printed)
        assert main([*arguments, "--progress", "json"]) == 0
    return printed


# ---- What it prints


def test_a_job_runs_to_its_end_with_a_line_for_each_checkpoint_and_says_so_when_it_is_run_again(
    place: Place, capsys: pytest.CaptureFixture[str], spark: Any
) -> None:
    arguments = [place.job("few"), place.store, "--rows-per-epoch", "400", "--parallelism", "3"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert re.fullmatch(
        r"numbers: epoch 1, [1-9]\d* rows in \d+\.\d s, checkpoint 1 \(\d+ rows, \+\d+\.\d kB\), "
        r"\d+ tasks(, \d+ finished)?",
        lines[0],
    )
    shown = [re.search(r"epoch (\d+), (\d+) rows .* checkpoint (\d+) ", line) for line in lines]
    epochs = [tuple(int(each) for each in line.groups()) for line in shown if line]
    assert len(epochs) == len(lines)
    assert sum(rows for _, rows, _ in epochs) == 1000
    assert out == f"the job has finished: every input has ended; its last checkpoint is {epochs[-1][2]}\n"
    assert place.numbers()[:2] == (1000, 1000)
    assert sum(place.shards().values()) == 1000
    assert {operator.parallelism for operator in sf.open(place.store).open().graph.operators} == {3}
    said = [record.properties for record in sf.open(place.store).history()]
    assert {each["stateformat.program"] for each in said} == {Path(place.job("few")).name}
    assert {each["stateformat.spark_application"] for each in said} == {spark.sparkContext.applicationId}
    assert not any("stateformat.host" in each or "stateformat.user" in each for each in said)

    assert main(arguments) == 0
    assert capsys.readouterr().out == (
        f"the job had finished: in checkpoint {epochs[-1][2]} every operator has ended, and nothing was started\n"
    )
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    described = [jobs.apply(index).description() for index in range(jobs.size())]
    names = {each.get() for each in described if each.isDefined()}
    assert {f"numbers: epoch {epoch}, checkpoint {checkpoint}" for epoch, _, checkpoint in epochs} <= names


def test_json_is_an_object_for_each_epoch_and_one_for_the_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (place.job("few"), place.store, "--rows-per-epoch", "300", "--record-origin")
    *epochs, end = run(monkeypatch, Printed(), *arguments).objects
    assert [epoch["epoch"] for epoch in epochs] == [*range(1, len(epochs) + 1)]
    assert {epoch["kind"] for epoch in epochs} == {"EpochProgress"}
    assert sum(epoch["rows_epoch"] for epoch in epochs) == epochs[-1]["rows_read"] == 1000
    assert max(epoch["rows_epoch"] for epoch in epochs) <= 2 * 300
    for epoch in epochs[:-1]:
        assert min(epoch["spark_us"], epoch["planning_us"], epoch["publish_us"], epoch["written_bytes"]) > 0
        assert epoch["kept"] + epoch["caught_up"] + epoch["restored"] <= epoch["running"] + epoch["finished"]
    assert (epochs[-1]["running"], epochs[-1]["finished"] > 0) == (0, True)
    newest = sf.open(place.store).open().record
    assert (epochs[-1]["checkpoint_id"], epochs[-1]["state_rows"]) == (newest.checkpoint_id, newest.totals.rows)
    assert newest.properties["stateformat.host"] == socket.gethostname()
    assert end.pop("sentence").startswith("the job has finished")
    nothing = {"stop": None, "savepoint": None, "restarts": 0, "interrupted": False}
    assert end == {"kind": "JobOutcome", "checkpoint_id": newest.checkpoint_id, **nothing}
    documented = (ROOT / "docs" / "json.md").read_text().partition("# Progress")[2]
    assert {*epochs[0], *end} <= {*re.findall(r"`(\w+)`", documented)}


# ---- Stops


def test_a_job_is_stopped_by_its_store_and_goes_on_from_the_savepoint_or_where_it_was_at_another_parallelism(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    arguments = [place.job("many"), place.store, "--keep", "2"]
    printed = run(monkeypatch, Printed(place.store), *arguments, "--rows-per-epoch", "200")
    answer, end = printed.stopped(), printed.objects[-1]
    store = sf.open(place.store)
    newest = store.open().record
    assert (end["checkpoint_id"], end["savepoint"]) == (newest.checkpoint_id, answer["savepoint"])
    assert end["stop"] == {"mode": "no_drain", "request": answer["request"]}
    # Two checkpoints are kept, and they are whole: what they took from older ones has not gone with
    # them.
    assert [each.checkpoint_id for each in store.history()] == [newest.checkpoint_id, newest.checkpoint_id - 1]
    assert not any(validate(store, each.checkpoint_id, level="full").problems for each in store.history())
    read = place.numbers()
    assert read[0] == read[1] == printed.objects[-2]["rows_read"] < TOTAL
    assert not Path(place.output + "-shards").exists() or not place.shards()

    again = run(monkeypatch, Printed(), *arguments).objects
    assert again[-1]["sentence"].endswith(". Run it with --resume to go on")
    assert place.numbers() == read

    savepoint = sf.open(end["savepoint"])
    before = {item.path: savepoint.storage.read(item.path).to_pybytes() for item in savepoint.storage.list("")}
    assert main([place.job("many"), end["savepoint"], "--progress", "none"]) == 2
    assert f"--from '{end['savepoint']}', or hand the savepoint over to it with --claim" in capsys.readouterr().err
    own = str(place.directory / "own")
    moved = [place.job("many"), own, "--from", end["savepoint"], "--progress", "none", "--parallelism", "3"]
    assert main(moved) == 0
    assert f"copying Checkpoint({end['savepoint']}@{newest.checkpoint_id})" in caplog.text
    assert place.numbers()[:2] == (TOTAL, TOTAL)
    assert sum(place.shards().values()) == TOTAL
    assert {operator.parallelism for operator in sf.open(own).open().graph.operators} == {3}
    assert len(sf.open(own).history()) <= 10
    assert {item.path: savepoint.storage.read(item.path).to_pybytes() for item in savepoint.storage.list("")} == before
    assert savepoint.open().record.kind is CheckpointKind.SAVEPOINT
    assert main(moved) == 0
    assert main([place.job("many"), str(place.directory / "none"), "--from", own + "-nowhere", "--keep", "all"]) == 2
    assert "names no checkpoint: there is no store" in capsys.readouterr().err


def test_resume_goes_on_behind_a_stop_and_drain_ends_it_for_good(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [place.job("many"), place.store, "--rows-per-epoch", "200"]
    run(monkeypatch, Printed(place.store), *arguments).stopped()
    first = place.numbers()[0]
    another = place.job("many").replace("job_", "other_")
    text = Path(place.job("").rpartition(":")[0]).read_text()
    Path(another.rpartition(":")[0]).write_text(text.replace('uid="shards"', 'uid="by shard"'))
    assert main([another, place.store, "--resume"]) == 1
    assert "--drop 'shards'" in capsys.readouterr().err
    target = sf.open(str(place.directory / "drained")).url
    drained = run(
        monkeypatch, Printed(place.store, drain=True, to=target), *arguments, "--resume", "--parallelism", "1"
    )
    assert drained.stopped()["savepoint"] == target
    last, end = drained.objects[-2:]
    assert end["stop"]["mode"] == "drain"
    assert sf.open(target).open().record.stop.mode is StopMode.DRAIN  # type: ignore[union-attr]
    rows, different, _ = place.numbers()
    assert first < rows == different == first + last["rows_read"] < TOTAL
    assert sum(place.shards().values()) == rows
    again = run(monkeypatch, Printed(), *arguments, "--resume").objects
    assert [each["kind"] for each in again] == ["JobOutcome"]


@pytest.mark.truth
def test_spark_submit_runs_it_and_a_stop_with_drain_ends_it(place: Place) -> None:
    command = [str(BIN / "spark-submit"), "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
    command += ["--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.driver.bindAddress=127.0.0.1"]
    command += [str(ROOT / "tools" / "jobs" / "run.py"), place.job("many"), place.store]
    command += ["--rows-per-epoch", "200", "--progress", "json"]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=place.directory
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        log = program.stderr
        noise: list[str] = []
        reading = threading.Thread(target=lambda: noise.extend(log))
        reading.start()
        printed = Printed(place.store, drain=True)
        for line in program.stdout:
            printed.write(line)
        reading.join()
    assert program.returncode == 0, noise
    answer = printed.stopped()
    *epochs, end = printed.objects
    assert {epoch["kind"] for epoch in epochs} == {"EpochProgress"}
    assert end["stop"] == {"mode": "drain", "request": answer["request"]}
    assert place.numbers()[:2] == (epochs[-1]["rows_read"],) * 2
    assert sum(place.shards().values()) == epochs[-1]["rows_read"]
    # Nobody has configured the log: behind the start, no line of it for an epoch.
    assert not [line for line in noise if " INFO " in line and "SparkContext" not in line]


@pytest.mark.s3
def test_a_store_on_s3_has_its_options_in_workers_and_for_its_savepoint(
    place: Place, moto: S3Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"s3://{BUCKET}/{place.directory.name}"
    credentials = {"endpoint_url": moto.endpoint, "key": moto.key, "secret": moto.secret}
    options = ["--endpoint-url", moto.endpoint, "--option", f"key={moto.key}", "--option", f"secret={moto.secret}"]
    stopping = Printed(url, **credentials)
    printed = run(monkeypatch, stopping, place.job("many"), url, *options, "--rows-per-epoch", "200")
    savepoint = printed.stopped()["savepoint"]
    assert savepoint == printed.objects[-1]["savepoint"]
    assert savepoint.startswith(f"{url}/savepoints/")
    assert validate(sf.open(savepoint, **credentials), level="full").ok
    assert place.numbers()[0] == printed.objects[-2]["rows_read"]
    assert main([place.job("many"), "s3://no-such-bucket/store", *options, "--max-restarts", "0"]) == 3
    assert "no-such-bucket" in capsys.readouterr().err.splitlines()[-1]


# ---- Before it is started


def test_a_function_that_takes_a_session_is_given_one_to_explain_its_restore(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    store = sf.open(place.store)
    counts_job().publish(store, None)
    found = ckpt(["explain-restore", place.store, "--flow", place.job("failing"), "--drop", "counter"])
    out, err = capsys.readouterr()
    assert found == 1
    assert "job_mismatch" in out
    assert "takes a SparkSession" in err
    assert ckpt(["explain-restore", place.store, "--flow", place.job("few"), "--drop", "counter"]) == 1
    assert "SparkSession" not in capsys.readouterr().err


# ---- Statuses


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("missing", "has no function 'missing'; its functions are: broken, failing, few, flow, many, wrong"),
        ("CONSTANT", "has no function 'CONSTANT'"),
        ("wrong", ":wrong returned int; it must return a Dataflow"),
        ("broken", ":broken raised ZeroDivisionError: division by zero"),
    ],
)
def test_a_function_that_makes_no_dataflow_is_misuse(
    place: Place, capsys: pytest.CaptureFixture[str], function: str, says: str
) -> None:
    assert main([place.job(function), place.store]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err.splitlines()[-1]
    assert ("return 1 / 0" in err) == (function == "broken")
    assert "run.py" not in err


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("flights", "'flights' names no function; give a file or module and a function, as in flights.py:flights"),
        ("flights.py:", "names no function"),
        ("nowhere/flights.py:flights", "there is no file 'nowhere/flights.py', seen from "),
        ("not_there_at_all:flights", "there is no module 'not_there_at_all' in "),
        ("not_there_at_all.jobs:flights", "there is no module 'not_there_at_all' in "),
        ("json.py:flow", "would replace the module 'json'"),
        ("a.b.py:flow", "has a dot"),
        ("job_that_imports.py:flow", "'helpers_of_this_job'; install it, or give it to spark-submit: --py-files"),
    ],
)
@pytest.mark.usefixtures("spark")
def test_a_job_that_cannot_be_imported_is_misuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str, says: str
) -> None:
    for name in ("json", "a.b", "job_that_imports"):
        (tmp_path / f"{name}.py").write_text(
            "import helpers_of_this_job\n" if "imports" in name else "def flow(): ...\n"
        )
    monkeypatch.chdir(tmp_path)
    assert main([job, str(tmp_path / "store")]) == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
    assert hasattr(sys.modules["json"], "dumps")
    sys.modules.pop("job_that_imports", None)


def test_a_job_that_fails_ends_with_status_1_and_the_name_of_the_operator(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [place.job("failing"), place.store, "--max-restarts", "0"]
    assert main(arguments) == 1
    says = "process of 'unlucky', subtask 0, failed: ValueError: no such luck. What it has published stands"
    assert says in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdout", printed := Printed())
    assert main([*arguments, "--progress", "json"]) == 1
    error = printed.objects[-1]["error"]
    assert (printed.objects[-1]["kind"], error["kind"], error["exit_status"]) == ("Failure", "job_failed", 1)
    assert says in error["message"]


def test_a_store_that_cannot_be_reached_ends_with_status_3(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    Path(place.store).write_text("a file")
    assert main([place.job("few"), place.store, "--max-restarts", "0"]) == 3
    assert place.store in capsys.readouterr().err
