"""Run every test marked ``truth`` on the cores there are: ``python -m tests.truth [arguments of pytest]``.

Theory of operation. The longest tests are of two kinds. Most wait for a server, for a fault to pass or for a limit of time, and
leave cores idle; some do nothing but compute on a local store, and nobody looks at how long they take. So the files of
``BESIDE``, which are of the second kind, run in a second process of a lower priority: they get what the others leave, and
disturb no measured time. All other tests run as ever, new ones too. What the second process says comes after the first's, with
a table of its own; the exit status tells of both.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
BESIDE = (
    "tests/truth/test_truth_corruption.py",
    "tests/truth/test_truth_crashes.py",
    "tests/test_corruption.py",
    "tests/test_publish_protocol.py",
)
_POLITE = "import os, sys, pytest; os.nice(10); sys.exit(pytest.main(sys.argv[1:]))"


def main(arguments: list[str]) -> int:
    """0 if all tests of both processes passed."""
    chosen = ["-m", "truth", *arguments]
    with tempfile.TemporaryFile() as said:
        beside = subprocess.Popen(
            [sys.executable, "-c", _POLITE, *chosen, "-p", "no:cacheprovider", *BESIDE],
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            ignored = [f"--ignore={path}" for path in BESIDE]
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
            sys.stdout.write("\nBeside it, at a lower priority:\n\n")
            sys.stdout.flush()
            sys.stdout.buffer.write(said.read())
            sys.stdout.flush()
    return first or second


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
