"""``ckpt run``: a dataflow in this process, with options and statuses of the program on Spark.

``ckpt run`` that is told to end (SIGTERM): a checkpoint first, in real processes.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends.runtime import JobFailed
from stateformat.errors import RestoreRefused, StorageError
from stateformat.tools.ckpt.commands.running import run as command
from stateformat.tools.ckpt.job_reports import Reporter
from tests.ckpt.ckpt_runs import CKPT, Run, conforms, document, run

JOB = """
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow, Operator

print("the module prints")


class Fails(Operator):
    def process(self, batch, input):
        raise ValueError("no such luck")


def flow(total, **rate):
    print("the function prints")
    flow = Dataflow("numbers", parallelism=2)
    numbers = flow.source(RateSource(total=total, shards=4, **rate), uid="numbers", event_time="at")
    shards = numbers.key_by("shard").aggregate({{"rows": ("*", "count")}}, emit="end", uid="shards")
    shards.apply(FileSink({directory!r}, durable=False), uid="counted")
    return flow


def few(spark=None):
    assert spark is None
    return flow(1000, rows_per_read=50)


def endless():
    return flow(None, rows_per_second=2000)


def failing():
    flow = Dataflow("failing", parallelism=1)
    flow.source(RateSource(total=10), uid="numbers").apply(Fails(), uid="unlucky")
    return flow


def on_spark(spark):
    raise AssertionError


def wrong():
    return 7


def broken():
    return 1 / 0


def leaves():
    raise SystemExit(7)
"""


class Place:
    """Where a test's job has its file, its store and its output."""

    def __init__(self, directory: Path) -> None:
        self.store, self.output = directory / "store", directory / "out"
        self.file = directory / f"job_{directory.name}.py"
        self.file.write_text(JOB.format(directory=str(self.output)))

    def job(self, function: str) -> str:
        return f"{self.file}:{function}"

    def counts(self) -> dict[int, int]:
        """The counts by shard, as committed."""
        table = pq.read_table(self.output)
        return dict(zip(table["shard"].to_pylist(), table["rows"].to_pylist(), strict=True))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made, path = Place(tmp_path), [*sys.path]
    yield made
    sys.modules.pop(made.file.stem, None)
    sys.path[:] = path


def ended(found: Run, sentence: str, status: int = 0) -> None:
    assert (found.status, " ".join(found.out.split())) == (status, sentence), found


def test_a_job_runs_to_its_end_and_says_so_when_it_is_run_again(place: Place) -> None:
    arguments = ("run", place.job("few"), place.store, "--rows-per-epoch", "300", "--parallelism", "3")
    found = run(*arguments)
    records = sf.open(place.store).history()
    newest = records[0].checkpoint_id
    assert newest > 2
    ended(found, f"the job has finished: every input has ended; its last checkpoint is {newest}")
    lines = [line for line in found.err.splitlines() if "prints" not in line]
    assert re.fullmatch(r"numbers: \d+\.\d s, 1,000 rows read, checkpoint \d+ \(.*", lines[-1])
    assert place.counts() == dict.fromkeys(range(4), 250)
    assert {operator.parallelism for operator in records[0].graph.operators} == {3}
    assert {record.properties["stateformat.program"] for record in records} == {f"{place.file.name}:few"}
    assert not any(name in record.properties for record in records for name in ("stateformat.host", "stateformat.user"))
    ended(
        run(*arguments),
        f"the job had finished: in checkpoint {newest} every operator has ended, and nothing was started",
    )


def test_what_the_jobs_code_prints_goes_to_standard_error(place: Place) -> None:
    found = run("run", place.job("few"), place.store)
    assert "prints" not in found.out
    assert {"the module prints", "the function prints"} <= {*found.err.splitlines()}


def test_progress_as_json_is_an_object_a_line_and_one_for_the_end(place: Place) -> None:
    found = run("run", place.job("few"), place.store, "--progress", "json", "--record-origin", COLUMNS="80")
    *lines, end = [json.loads(line) for line in found.out.splitlines()]
    for each in (*lines, end):
        conforms("progress", each)
    shown = [each for each in lines if each["kind"] != "Log"]
    assert {each["kind"] for each in shown} == {"Progress"}, lines
    assert shown[-1]["rows_read"] == 1000
    newest = sf.open(place.store).open().record
    assert end.pop("sentence").startswith("the job has finished")
    nothing = {"stop": None, "savepoint": None, "restarts": 0, "interrupted": False}
    assert end == {"kind": "JobOutcome", "checkpoint_id": newest.checkpoint_id, **nothing}
    assert "stateformat.host" in newest.properties


def test_the_end_alone_can_be_json(place: Place) -> None:
    assert document("run", place.job("few"), place.store, "--progress", "none")["checkpoint_id"] >= 1


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (
            "missing",
            "has no function 'missing'; its functions are: broken, endless, failing, few, flow, leaves, on_spark",
        ),
        ("wrong", ":wrong returned int; it must return a Dataflow"),
        ("broken", ":broken raised ZeroDivisionError: division by zero"),
        ("leaves", ":leaves raised SystemExit: 7"),
        ("on_spark", "so it is made for Spark: run it with `spark-submit tools/jobs/run.py`"),
    ],
)
def test_a_function_that_makes_no_dataflow_is_misuse(place: Place, function: str, says: str) -> None:
    raised = function in ("broken", "leaves")
    found = run("run", place.job(function), place.store, traces=raised)
    assert (found.status, found.out) == (2, "")
    assert says in found.err.splitlines()[-1]
    assert ("return 1 / 0" in found.err) == (function == "broken")
    assert "loading.py" not in found.err
    assert not place.store.exists()


@pytest.mark.parametrize(
    ("job", "says"),
    [
        ("flights", "'flights' names no function; give a file or module and a function, as in flights.py:flights"),
        ("nowhere/flights.py:flights", "there is no file 'nowhere/flights.py', seen from "),
        ("not_there_at_all:flights", "there is no module 'not_there_at_all' in "),
    ],
)
def test_a_job_that_is_not_there_is_misuse(place: Place, job: str, says: str) -> None:
    found = run("run", job, place.store)
    assert (found.status, found.out) == (2, "")
    assert says in found.err


@pytest.mark.parametrize("option", ["--idle-seconds", "--least-seconds-per-epoch"])
def test_options_that_mean_something_on_spark_alone_are_none_here(place: Place, option: str) -> None:
    found = run("run", place.job("few"), place.store, option, "1")
    assert found.status == 2
    assert f"No such option {option!r}" in found.err.replace("'" + option + "'", repr(option))


def test_a_job_that_fails_ends_with_status_1_and_the_frames_of_its_own_code(place: Place) -> None:
    arguments = ("run", place.job("failing"), place.store, "--max-restarts", "0")
    says = "process of 'unlucky', subtask 0, failed: ValueError: no such luck. What it has published stands"
    found = run(*arguments, traces=True)
    assert (found.status, found.out) == (1, "")
    assert says in found.err.splitlines()[-1]
    assert 'raise ValueError("no such luck")' in found.err
    assert "\nerror: job 'failing': process of 'unlucky'" in found.err
    frames = re.findall(r'^  File "(.*)", line', found.err, re.MULTILINE)
    assert frames == [str(place.file)]
    whole = run(*arguments, "-v", traces=True).err
    assert len(re.findall(r'^  File "', whole, re.MULTILINE)) > 3
    found = run(*arguments, "--progress", "json", traces=True, COLUMNS="80")
    *log, end = [json.loads(line) for line in found.out.splitlines()]
    assert {each["kind"] for each in log} <= {"Log", "Progress"}
    assert (end["kind"], end["error"]["kind"], end["error"]["exit_status"]) == ("Failure", "job_failed", 1)
    assert says in end["error"]["message"]


def test_a_store_of_another_job_is_refused_with_status_1_and_a_place_that_is_none_with_3(
    place: Place, counts: Path
) -> None:
    found = run("run", place.job("few"), counts)
    assert found.status == 1
    assert "belongs to job 'counts'" in found.err
    place.output.write_text("a file")
    assert run("run", place.job("few"), place.output).status == 3


def test_each_reason_of_a_refusal_is_a_line_and_a_strangers_text_breaks_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reporter = Reporter("text", "ckpt")
    assert reporter.failure(RestoreRefused("2 reasons:\n- one, give drop='a/b'\n- two")) == 1
    assert capsys.readouterr().err == "ckpt: 2 reasons:\n- one, give --drop 'a/b'\n- two\n"
    assert reporter.failure(JobFailed("it said\nckpt: fine")) == 1
    assert capsys.readouterr().err == "ckpt: it said\\nckpt: fine\n"


@pytest.mark.parametrize(("cause", "status"), [(ValueError("no"), 1), (StorageError("gone"), 3), (OSError("full"), 3)])
def test_a_job_that_failed_for_its_storage_ends_with_status_3(
    cause: Exception, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = JobFailed("job 'a' failed")
    failed.__cause__ = cause
    assert Reporter("text", "ckpt").failure(failed) == status
    assert capsys.readouterr().err == "ckpt: job 'a' failed\n"


@pytest.mark.parametrize("form", ["text", "json"])
def test_ctrl_c_ends_it_with_the_newest_checkpoint_from_which_it_goes_on(place: Place, form: str) -> None:
    # The interpreter that runs the tests may ignore the signal, as a script's background job does.
    started = [str(CKPT), "run", place.job("endless"), str(place.store), "--seconds-per-epoch", "0.02"]
    with subprocess.Popen(
        [*started, "--progress", form],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    ) as program:
        stream: Any = program.stdout if form == "json" else program.stderr
        for line in stream:
            if re.search(r'checkpoint \d+ |"checkpoint_id": \d', line):
                break
        program.send_signal(signal.SIGINT)
        rest, err = program.communicate(timeout=60)
    assert program.returncode == 130
    newest = sf.open(place.store).open().id
    said = f"interrupted; the newest checkpoint is {newest}; run again, the job goes on from it"
    text = err if form == "json" else rest + err
    assert f"ckpt: {said}" in text.splitlines()[-1]
    assert "Traceback" not in rest + err
    if form == "json":
        assert json.loads(rest.splitlines()[-1])["error"]["message"] == said


def test_a_job_interrupted_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    assert "no checkpoint was published" in command._left_behind(sf.open(str(tmp_path / "store")))


def test_both_programs_have_the_same_options_but_those_that_mean_nothing_to_the_other() -> None:
    from stateformat.tools.jobs.run import command as on_spark

    def names(made: click.Command) -> set[str]:
        return {name for one in made.params for name in one.opts}

    ours = names(command.run)
    assert names(on_spark) - ours == {"store", "--idle-seconds", "--least-seconds-per-epoch"}
    assert ours - names(on_spark) == {"address", "--unaligned", "--format", "-v", "--verbose"}


def test_misuse_of_the_program_for_spark_ends_with_status_2_before_spark_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from stateformat.tools.jobs.run import main

    assert main(["jobs.py:flow", "store", "--keep", "none"]) == 2
    assert "'none' is not a number of checkpoints" in capsys.readouterr().err


ENDLESS = """
import pathlib, time
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow, Operator

HERE = pathlib.Path({here!r})


class Stuck(Operator):
    def process(self, batch, input):
        if (HERE / "stuck").exists():
            print("stuck", flush=True)
            while True:
                time.sleep(0.01)
        return batch


def endless():
    flow = Dataflow("numbers", parallelism=2)
    read = flow.source(RateSource(total=None, rows_per_second=2_000), uid="numbers")
    read.apply(Stuck(), uid="stuck").apply(FileSink(str(HERE / "out"), durable=False), uid="all")
    return flow
"""


class EndlessPlace:
    """Where a job runs."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.store = directory, directory / "store"
        self.file = directory / f"ended_{directory.name}.py"
        self.file.write_text(ENDLESS.format(here=str(directory)))

    @contextmanager
    def program(self, *options: str, stuck: bool = False) -> Iterator[subprocess.Popen[Any]]:
        """The program, of which the first line of progress has been read, or that it is stuck."""
        started = [str(CKPT), "run", f"{self.file}:endless", str(self.store), "--progress", "json", *options]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as running:
            try:
                first = running.stdout.readline()
                assert ("stuck" if stuck else '{"kind": "Progress"') in first
                yield running
            finally:
                running.kill()

    def numbers(self) -> list[Any]:
        table = pq.read_table(self.directory / "out")
        return sorted(zip(table["shard"].to_pylist(), table["n"].to_pylist(), strict=True))


@pytest.fixture
def endless(tmp_path: Path) -> EndlessPlace:
    return EndlessPlace(tmp_path)


def how_it_ended(program: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    out, err = program.communicate(timeout=120)
    assert "Traceback" not in out + err, err
    return program.returncode, json.loads(out.splitlines()[-1]), err


def test_it_takes_a_checkpoint_and_ends_with_status_0_and_goes_on_without_any_option(endless: EndlessPlace) -> None:
    with endless.program("--seconds-per-epoch", "3600") as program:
        program.send_signal(signal.SIGTERM)
        status, outcome, _ = how_it_ended(program)
    assert (status, outcome["interrupted"], outcome["checkpoint_id"]) == (0, True, 1)
    newest = sf.open(endless.store).open().record
    assert (newest.checkpoint_id, newest.stop) == (1, None)
    committed = endless.numbers()
    assert committed
    assert len(committed) == len({*committed})
    with endless.program("--seconds-per-epoch", "3600") as program:
        program.send_signal(signal.SIGTERM)
        assert how_it_ended(program)[0] == 0
    again = endless.numbers()
    assert len(again) == len({*again}) > len(committed)
    assert {*committed} < {*again}


@pytest.mark.parametrize(
    ("options", "signals", "said"),
    [
        (("--grace-seconds", "0.1"), 1, "0.1 s were not enough for a checkpoint"),
        ((), 2, "the job was asked to end twice"),
    ],
)
def test_a_step_that_hangs_ends_with_grace_or_with_a_second_signal_and_status_143(
    endless: EndlessPlace, options: tuple[str, ...], signals: int, said: str
) -> None:
    (endless.directory / "stuck").touch()
    with endless.program(*options, stuck=True) as program:
        for _ in range(signals):
            program.send_signal(signal.SIGTERM)
            if signals > 1:
                # The kernel keeps one of a kind: the second is sent when the first was taken.
                while _is_pending(program.pid):
                    os.sched_yield()
        status, document, err = how_it_ended(program)
    assert status == 143
    assert document["kind"] == "Failure"
    assert document["error"]["kind"] == "time_is_up"
    assert said in document["error"]["message"]
    assert "there is no checkpoint, and the next start begins anew" in document["error"]["message"]
    assert err.splitlines()[-1] == f"ckpt: {document['error']['message']}"


def _is_pending(pid: int) -> bool:
    """Whether a SIGTERM waits to be handled by a process."""
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    waiting = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return bool(waiting >> (signal.SIGTERM - 1) & 1)
