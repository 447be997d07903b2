"""Run the tests on the cores there are, in two processes: ``python -m tests.side_by_side fast|truth
[arguments of pytest]``.

Theory of operation. One process of pytest uses little more than one core: most tests wait now and
then, for Spark, a server, a fault to pass. So some files run *beside* the others, in a process of
their own: of the fast tests those that need Spark, which is started once then, and some that
compute; of those marked ``truth`` those that do nothing but compute on a local store, at a lower
priority, so that they get what the others leave and disturb no measured time. All other files run
as ever, new ones too. What the process beside says comes after the first's, with a table of its
own; the exit status tells of both.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Suite(NamedTuple):
    """Which tests are chosen, which files of them run beside the others, and how much lower their
    priority is.
    """

    marked: str
    beside: Sequence[str]
    nice: int


SUITES = {
    "fast": Suite(
        "not truth",
        (
            "tests/conformance",
            "tests/foreign",
            "tests/packaging",
            "tests/rewrite",
            "tests/spark",
            "tests/ckpt/test_ckpt_writing.py",
            "tests/local/test_local_checkpoints.py",
            "tests/stateformat/test_hashing_spark.py",
            "tests/stateformat/test_publish_protocol.py",
            "tests/stateformat/test_retention.py",
            "tests/simulation",
        ),
        0,
    ),
    "truth": Suite(
        "truth",
        (
            "tests/corruption/test_corruption.py",
            "tests/stateformat/test_publish_protocol.py",
            "tests/truth/test_truth_corruption.py",
            "tests/crashes/test_crashes.py",
            "tests/truth/test_truth_crashes.py",
            "tests/foreign/test_proved_imports.py",
            "tests/stateformat/test_diff_checkpoints.py",
            "tests/stateformat/test_inspecting_changes.py",
            "tests/stateformat/test_limits_of_writing.py",
            "tests/stateformat/test_repair_protocol.py",
            "tests/stateformat/test_repairing.py",
            "tests/stateformat/test_ttl_reading.py",
            "tests/dataflow",
            "tests/local",
            "tests/simulation",
            "tests/state",
        ),
        10,
    ),
}
_BESIDE = "import os, sys, pytest; os.nice(int(sys.argv[1])); sys.exit(pytest.main(sys.argv[2:]))"


def main(arguments: list[str]) -> int:
    """0 if all tests of both processes passed."""
    suite, rest = SUITES[arguments[0]], arguments[1:]
    chosen = ["-m", suite.marked, *rest]
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen(
            [sys.executable, "-c", _BESIDE, str(suite.nice), *chosen, "-p", "no:cacheprovider", *suite.beside],
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            ignored = [f"--ignore={path}" for path in suite.beside]
            first = subprocess.run(
                [sys.executable, "-m", "pytest", *chosen, *ignored], cwd=ROOT, check=False
            ).returncode
            second = beside.wait()
        finally:
            if beside.poll() is None:
                # As by the keyboard: it ends what it has begun.
                beside.send_signal(signal.SIGINT)
                beside.wait()
            said.seek(0)
            sys.stdout.write("\nBeside it:\n\n")
            sys.stdout.flush()
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
    return first or second


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
