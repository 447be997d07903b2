"""The program for ``spark-submit``: what it prints, how it ends, and what stands beside it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
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
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from stateformat.tools.ckpt.commands.running.asking import Attempt
from stateformat.tools.ckpt.main import main as ckpt
from stateformat.tools.jobs.run import main
from tests.ckpt.ckpt_runs import conforms
from tests.rewrite import rewrite_jobs as jobs
from tests.servers.server import BUCKET, S3Server
from tests.worlds.stores import counts_job

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


@pytest.mark.spark
def test_a_job_runs_to_its_end_with_a_line_for_each_checkpoint_and_says_so_when_it_is_run_again(
    place: Place, capsys: pytest.CaptureFixture[str], spark: Any
) -> None:
    arguments = [place.job("few"), place.store, "--rows-per-epoch", "400", "--parallelism", "3"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert re.fullmatch(
        r"numbers: epoch 1, [1-9]\d* rows in \d+\.\d s, checkpoint 1 \(\d+ rows, \+\d+\.\d KiB\), "
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


@pytest.mark.spark
def test_json_is_an_object_for_each_epoch_and_one_for_the_end(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (place.job("few"), place.store, "--rows-per-epoch", "300", "--record-origin")
    *epochs, end = run(monkeypatch, Printed(), *arguments).objects
    for each in (*epochs, end):
        conforms("progress", each)
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


# ---- Stops


@pytest.mark.spark
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


@pytest.mark.spark
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


@pytest.mark.spark
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


@pytest.mark.spark
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


@pytest.mark.spark
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


@pytest.mark.spark
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


@pytest.mark.spark
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


@pytest.mark.spark
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


@pytest.mark.spark
def test_a_store_that_cannot_be_reached_ends_with_status_3(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    Path(place.store).write_text("a file")
    assert main([place.job("few"), place.store, "--max-restarts", "0"]) == 3
    assert place.store in capsys.readouterr().err


# ---- the program for spark-submit that is told to end: who gets the signal, and what comes of it

ENDLESS_JOB = """
import os

from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow


def announced(rows):
    try:
        pipe = os.open({pipe!r}, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # Nobody listens.
        return rows
    with open(pipe, "wb") as out:
        out.write(b"!")
    return rows


def endless():
    flow = Dataflow("numbers", parallelism=2)
    source = RateSource(shards=4, rows_per_second=2000)
    numbers = flow.source(source, uid="numbers", event_time="at").map(announced, uid="announced")
    shards = numbers.key_by("shard").aggregate({{"rows": ("*", "count")}}, emit="updates", uid="shards")
    shards.apply(FileSink({out!r}, durable=False), uid="counted")
    return flow
"""
SUBMIT = (str(BIN / "spark-submit"), "--master", "local[2]")
PYTHON = (sys.executable,)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)


def kill_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.parametrize(
    ("command", "end"), [(SUBMIT, kill), (PYTHON, kill_group)], ids=["spark-submit", "a group of python"]
)
def test_whoever_gets_the_signal_the_epoch_is_finished_and_the_status_is_0(
    tmp_path: Path, command: tuple[str, ...], end: Any
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "ended.py").write_text(ENDLESS_JOB.format(out=str(tmp_path / "out"), pipe=str(pipe)))
    program = str(ROOT / "tools" / "jobs" / "run.py")
    options = ("--progress", "json", "--seconds-per-epoch", "1")
    with subprocess.Popen(
        [*command, program, f"{tmp_path / 'ended.py'}:endless", str(tmp_path / "store"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as running:
        try:
            assert running.stdout is not None
            next(line for line in running.stdout if '"checkpoint_id": 2,' in line)
            with pipe.open("rb", buffering=0) as announcements:
                # Rows of a later checkpoint are being read: the signal finds an epoch under way.
                assert announcements.read(1) == b"!"
                end(running)
                lines = running.communicate(timeout=120)[0].splitlines()
        finally:
            running.kill()
    outcome = json.loads(lines[-1])
    assert (running.returncode, outcome["interrupted"]) == (0, True)
    newest = sf.open(tmp_path / "store").open().record
    assert (newest.checkpoint_id, newest.stop) == (outcome["checkpoint_id"], None)
    assert newest.checkpoint_id >= 3, outcome


# ---- ``ckpt`` and Spark jobs run beside packages of our names, and say if Java is missing

CKPT = Path(sys.executable).with_name("ckpt")
OURS = ("tools", "backends", "redistribution", "stateformat", "tests", "examples")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder with packages of our names that cannot be imported; two stores beside it."""
    here = tmp_path / "project"
    for name in OURS:
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(f"raise ImportError('the wrong {name} was imported')\n")
    for store in ("store", "other"):
        jobs.publish(CheckpointStore(open_storage(str(tmp_path / store))))
    return here


def start(cwd: Path, *command: Any, **environment: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYSPARK_PYTHON", "PYTHONSAFEPATH")}
    words = [str(word) for word in command]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=cwd, env=kept | environment, stdout=pipe, stderr=pipe, text=True)


def check_rewritten(process: subprocess.Popen[str]) -> None:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert json.loads(out)["checkpoint_id"] == 2
    assert "wrong" not in errors


def test_ckpt_runs_beside_folders_of_the_same_names(elsewhere: Path) -> None:
    check_rewritten(start(elsewhere, CKPT, "rewrite", "../store", "--parallelism", "2", "--format", "json"))


@pytest.mark.spark
@pytest.mark.truth
def test_spark_runs_beside_folders_of_the_same_names_by_ckpt_and_by_spark_submit(elsewhere: Path) -> None:
    submit = Path(sys.executable).with_name("spark-submit")
    program = ROOT / "tools" / "jobs" / "rewrite.py"
    # spark-submit starts the driver with the python on PATH, as it does in an activated
    # environment.
    path = f"{submit.parent}{os.pathsep}{os.environ['PATH']}"
    ckpt = [CKPT, "rewrite", "../store", "--engine", "spark", "--max-parallelism", "32"]
    job = [submit, "--master", "local[2]", program, "../other", "--parallelism", "2"]
    # Both at once: each spends most of its time starting a JVM.
    both = [start(elsewhere, *ckpt, "--format", "json"), start(elsewhere, *job, "--format", "json", PATH=path)]
    for process in both:
        check_rewritten(process)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"PATH": "/nowhere", "JAVA_HOME": ""}, "Spark needs Java 17"),
        ({"JAVA_HOME": "/nowhere"}, "/nowhere, which has no bin/java"),
    ],
)
def test_without_java_one_sentence_says_so(environment: dict[str, str], words: str, elsewhere: Path) -> None:
    process = start(elsewhere, CKPT, "rewrite", "../store", "--engine", "spark", **environment)
    errors = process.communicate()[1]
    assert process.returncode == 2
    assert words in errors
    assert "Traceback" not in errors


# ---- A function of a module beside the program is found by Spark's workers, which it cannot shadow

MINE = """
import pyarrow as pa

def double(key, rows, state):
    return [{"shard": key, "m": 2 * row[1]} for row in rows]

def plus_one(n):
    return n + 1
"""
MAIN = """
import sys
import pyarrow as pa
import stateformat
from pyspark.sql.functions import udf
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.spark import SparkOptions, SparkRuntime, session
from mine import double, plus_one

spark = session()
print("udf", spark.range(3).select(udf(plus_one, "long")("id")).agg({"plus_one(id)": "sum"}).first()[0])
flow = Dataflow("own", parallelism=2)
rows = flow.source(RateSource(total=20, shards=2), uid="rows").key_by("shard")
doubled = rows.apply_per_key(double, output={"shard": pa.int32(), "m": pa.int64()}, uid="doubled")
doubled.apply(FileSink(sys.argv[1] + "/out", durable=False), uid="out")
print(SparkRuntime(spark, stateformat.open(sys.argv[1] + "/store")).run(flow).sentence)
import pyarrow.dataset as ds
print("sum", sum(ds.dataset(sys.argv[1] + "/out", format="parquet").to_table()["m"].to_pylist()))
"""


@pytest.mark.spark
@pytest.mark.truth
@pytest.mark.parametrize("submit", [False, True])
def test_a_function_of_a_module_beside_the_program_runs_and_folders_of_our_names_shadow_nothing(
    tmp_path: Path, submit: bool
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for place in (project, elsewhere):
        for name in ("tools", "backends", "stateformat", "pyarrow"):
            if place is elsewhere or name in ("tools", "backends"):  # What lies beside a program shadows in its driver.
                (place / name).mkdir(parents=True)
                (place / name / "__init__.py").write_text(f"raise ImportError('the wrong {name} was imported')\n")
    (project / "mine.py").write_text(MINE)
    (project / "main.py").write_text(MAIN)
    binaries = Path(sys.executable).parent
    words = [binaries / "spark-submit", "--master", "local[2]"] if submit else [sys.executable]
    kept = {name: value for name, value in os.environ.items() if name not in ("PYSPARK_PYTHON", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [*map(str, words), str(project / "main.py"), str(tmp_path)],
        cwd=elsewhere,
        env=kept | {"PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "udf 6" in done.stdout
    assert "sum 180" in done.stdout
