"""The program for spark-submit that is told to end: who gets the signal, and what comes of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stateformat as sf

pytestmark = [pytest.mark.spark, pytest.mark.truth]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
JOB = """
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


@pytest.mark.parametrize(
    ("command", "end"), [(SUBMIT, kill), (PYTHON, kill_group)], ids=["spark-submit", "a group of python"]
)
def test_whoever_gets_the_signal_the_epoch_is_finished_and_the_status_is_0(
    tmp_path: Path, command: tuple[str, ...], end: Any
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "ended.py").write_text(JOB.format(out=str(tmp_path / "out"), pipe=str(pipe)))
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
