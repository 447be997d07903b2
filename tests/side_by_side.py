"""Run the tests in two processes: ``python -m tests.side_by_side fast|truth [pytest arguments]``.

Theory of operation. One pytest process uses little more than one core, because most tests wait now
and then: for Spark, a server, or the end of a fault. So some test files run *beside* the others, in
a second process. Of the fast tests these are the files that need Spark, so that it is started only
once, and some that compute. Of the tests marked ``truth`` they are the files that only compute on a
local store. Those run at a lower priority, so that they use only idle time and do not disturb
measured times. All other files, including new ones, run in the first process.

A process that has finished its own files goes on with those of the other, from the last one
backwards, until the two meet. Both collect all tests, and a process claims a test file by creating
a file for it. The output of the second process is printed after that of the first, with its own
table. The exit status covers both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Suite(NamedTuple):
    """Which tests are chosen, which of their files run beside the others, and at how much lower
    priority.
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
_PART = "import sys; from tests.side_by_side import run_part; sys.exit(run_part(*sys.argv[1:]))"


class Shared:
    """A plugin of pytest: this process runs the files that it is first to claim."""

    def __init__(self, claims: Path, beside: Sequence[str], *, is_beside: bool) -> None:
        self._claims, self._is_beside = claims, is_beside
        self._beside = [ROOT / path for path in beside]
        self._claimed: dict[Path, bool] = {}

    def _place(self, path: Path) -> int | None:
        """Return a file's position in the list of those that run beside; None: not in it."""
        return next((number for number, folder in enumerate(self._beside) if path.is_relative_to(folder)), None)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Order the files: own ones first, then those of the other process, from the last back."""
        files: dict[Path, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        first = [path for path in files if self._place(path) is None]
        beside = sorted(files.keys() - set(first), key=lambda path: (self._place(path), path))
        own, other = (beside, first) if self._is_beside else (first, beside)
        items[:] = [item for path in [*own, *reversed(other)] for item in files[path]]

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Skip a test whose file the other process has claimed."""
        if item.path not in self._claimed:
            self._claimed[item.path] = self._claim(item.path)
        return None if self._claimed[item.path] else True

    def _claim(self, path: Path) -> bool:
        try:
            (self._claims / str(path.relative_to(ROOT)).replace(os.sep, ":")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def run_part(name: str, part: str, claims: str, *rest: str) -> int:
    """Run one of the two processes; return pytest's exit status."""
    suite, is_beside = SUITES[name], part == "beside"
    how = ["-m", suite.marked, "--durations=25", "--durations-min=5", *rest]
    if is_beside:
        os.nice(suite.nice)
        how += ["-p", "no:cacheprovider"]
    return pytest.main(how, plugins=[Shared(Path(claims), suite.beside, is_beside=is_beside)])


def main(arguments: list[str]) -> int:
    """Return 0 if all tests of both processes passed."""
    name, *rest = arguments
    with tempfile.TemporaryFile() as said, tempfile.TemporaryDirectory() as claims:

        def command(part: str) -> list[str]:
            return [sys.executable, "-c", _PART, name, part, claims, *rest]

        beside = subprocess.Popen(command("beside"), cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        try:
            first = subprocess.run(command("first"), cwd=ROOT, check=False).returncode
            second = beside.wait()
        finally:
            if beside.poll() is None:
                # As from the keyboard, so that it ends what it has started.
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
