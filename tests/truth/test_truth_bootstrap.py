"""A bootstrap of streams larger than memory should hold takes little memory; a process each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.bench_memory import BUDGET_MB
from tests.truth.bootstrap_shapes import SHAPES

pytestmark = pytest.mark.truth
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_bootstrap_takes_little_memory(tmp_path: Path, shape: str) -> None:
    command = [sys.executable, "-m", "tests.truth.bootstrap_shapes", shape, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    *said, above_mb = ended.stdout.splitlines()
    assert bool(said) is (shape == "one key")
    # A busy machine returns memory later, so it gets 10 % more.
    assert int(above_mb) <= 1.1 * BUDGET_MB
