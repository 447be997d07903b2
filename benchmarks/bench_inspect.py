"""`ckpt inspect` and `ckpt get` as cold processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import bench_data
from benchmarks.measuring import Row, compare

STORE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "v1" / "flights"


def _run(*command: str | Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def measure() -> Iterator[Row]:
    ckpt = Path(sys.executable).with_name("ckpt")
    yield compare(
        "`ckpt inspect` of a local checkpoint, cold process",
        lambda: _run(ckpt, "inspect", STORE),
        lambda: _run(sys.executable, "-c", "import pyarrow.parquet"),
        label="import pyarrow.parquet",
        budget="≤ 1.5 ×",
        rounds=15,
    )
    with tempfile.TemporaryDirectory() as folder:
        bench_data.states(folder)
        key = ("--operator", "op", "--state", "narrow", "--key", "4000003")
        yield compare(
            f"`ckpt get` of one key of {bench_data.ROWS:,} rows in three layers, cold process",
            lambda: _run(ckpt, "get", folder, *key),
            lambda: _run(ckpt, "inspect", folder),
            label="`ckpt inspect` of the same checkpoint",
            budget="≤ 1.5 ×",
            rounds=15,
        )
