"""``ckpt`` and Spark jobs run beside packages of our names, and say if Java is missing."""

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
