"""``ckpt`` and Spark jobs run from a directory that has ``tools/`` and ``backends/`` of its own, and without Java they say so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from tests.rewrite import rewrite_jobs as jobs

ROOT = Path(__file__).resolve().parents[2]
CKPT = Path(sys.executable).with_name("ckpt")
OURS = ("tools", "backends", "redistribution", "stateformat", "tests", "examples")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A directory with packages under all of our names, which cannot be imported; and a store beside it."""
    here = tmp_path / "project"
    for name in OURS:
        (here / name).mkdir(parents=True)
        (here / name / "__init__.py").write_text(f"raise ImportError('the wrong {name} was imported')\n")
    jobs.publish(CheckpointStore(open_storage(str(tmp_path / "store"))))
    return here


def run(command: list[Any], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYSPARK_PYTHON", "PYTHONSAFEPATH")}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False
    )


def test_ckpt_runs_beside_folders_of_the_same_names(elsewhere: Path) -> None:
    done = run([CKPT, "rewrite", "../store", "--parallelism", "2", "--format", "json"], elsewhere)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoint_id"] == 2


@pytest.mark.spark
def test_ckpt_rewrites_on_spark_beside_folders_of_the_same_names(elsewhere: Path) -> None:
    command = [CKPT, "rewrite", "../store", "--engine", "spark", "--max-parallelism", "32", "--format", "json"]
    done = run(command, elsewhere)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoint_id"] == 2
    assert "wrong" not in done.stderr


@pytest.mark.spark
def test_the_job_runs_under_spark_submit_beside_folders_of_the_same_names(elsewhere: Path) -> None:
    submit = Path(sys.executable).with_name("spark-submit")
    program = ROOT / "tools" / "jobs" / "rewrite.py"
    # spark-submit starts the driver with the python on PATH, as it does in an activated environment.
    path = f"{submit.parent}{os.pathsep}{os.environ['PATH']}"
    done = run(
        [submit, "--master", "local[2]", program, "../store", "--parallelism", "2", "--format", "json"],
        elsewhere,
        PATH=path,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["checkpoint_id"] == 2


def test_without_java_one_sentence_says_so(elsewhere: Path) -> None:
    done = run([CKPT, "rewrite", "../store", "--engine", "spark"], elsewhere, PATH="/nowhere", JAVA_HOME="")
    assert done.returncode == 2
    assert "Spark needs Java 17" in done.stderr
    assert "Traceback" not in done.stderr
    done = run([CKPT, "rewrite", "../store", "--engine", "spark"], elsewhere, JAVA_HOME="/nowhere")
    assert "/nowhere, which has no bin/java" in done.stderr
