"""`ckpt inspect` as a cold process, against one that imports pyarrow.parquet only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.measuring import Row, compare

STORE = Path(__file__).resolve().parent.parent / "tests" / "golden" / "v1" / "flights"


def _run(*command: str | Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def measure() -> list[Row]:
    ckpt = Path(sys.executable).with_name("ckpt")
    return [
        compare(
            "`ckpt inspect` of a local checkpoint, cold process",
            lambda: _run(ckpt, "inspect", STORE),
            lambda: _run(sys.executable, "-c", "import pyarrow.parquet"),
            label="import pyarrow.parquet",
            budget="≤ 1.5 ×",
            rounds=15,
        )
    ]
