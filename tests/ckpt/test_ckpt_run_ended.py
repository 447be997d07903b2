"""``ckpt run`` that is told to end (SIGTERM): a checkpoint first, in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import stateformat as sf
from tests.ckpt.ckpt_runs import CKPT

JOB = """
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


class Place:
    """Where a job runs."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.store = directory, directory / "store"
        self.file = directory / f"ended_{directory.name}.py"
        self.file.write_text(JOB.format(here=str(directory)))

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
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def ended(program: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    out, err = program.communicate(timeout=120)
    assert "Traceback" not in out + err, err
    return program.returncode, json.loads(out.splitlines()[-1]), err


def test_it_takes_a_checkpoint_and_ends_with_status_0_and_goes_on_without_any_option(place: Place) -> None:
    with place.program("--seconds-per-epoch", "3600") as program:
        program.send_signal(signal.SIGTERM)
        status, outcome, _ = ended(program)
    assert (status, outcome["interrupted"], outcome["checkpoint_id"]) == (0, True, 1)
    newest = sf.open(place.store).open().record
    assert (newest.checkpoint_id, newest.stop) == (1, None)
    committed = place.numbers()
    assert committed
    assert len(committed) == len({*committed})
    with place.program("--seconds-per-epoch", "3600") as program:
        program.send_signal(signal.SIGTERM)
        assert ended(program)[0] == 0
    again = place.numbers()
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
    place: Place, options: tuple[str, ...], signals: int, said: str
) -> None:
    (place.directory / "stuck").touch()
    with place.program(*options, stuck=True) as program:
        for _ in range(signals):
            program.send_signal(signal.SIGTERM)
            if signals > 1:
                # The kernel keeps one of a kind: the second is sent when the first was taken.
                while _is_pending(program.pid):
                    os.sched_yield()
        status, document, err = ended(program)
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
