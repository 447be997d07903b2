"""The readers of record, manifest, segment and store, and of foreign files, under a fuzzer: no
crash, no hang, nothing imported, only errors of ours.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.targets import NAMES
from tests.tally import Tally

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 25
SLACK_SECONDS = 600
"""How much longer a loaded machine may take before a target counts as stuck. Hangs are detected by
the processor time of a run, in tests/fuzz/run.py.
"""
DONE = re.compile(r"Done (\d+) runs")


def begin(name: str, place: Path) -> subprocess.Popen[str]:
    """Fuzz one target in a separate process; what it finds is written to ``place``."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.run", name, str(SECONDS), "1", f"{place}/"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )


def last_read(place: Path, name: str) -> str:
    """Return the bytes that the target read last, in hexadecimal."""
    current = place / f"{name}-current"
    stored = current.read_bytes() if current.exists() else b"\0"
    return stored[1 : 1 + stored[0]].hex()


@pytest.mark.truth
@pytest.mark.timeout(3 * SLACK_SECONDS)
@pytest.mark.parametrize("pair", [NAMES[i : i + 2] for i in range(0, len(NAMES), 2)], ids=" and ".join)
def test_the_fuzzer_finds_nothing(pair: tuple[str, ...], tally: Tally, tmp_path: Path) -> None:
    how = "atheris" if importlib.util.find_spec("atheris") else "seeded bytes (no atheris here)"
    running = {name: begin(name, tmp_path) for name in pair}
    failed = {}
    for name, process in running.items():
        try:
            out, _ = process.communicate(timeout=SECONDS + SLACK_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            out = f"{process.communicate()[0]}\nstill running {SLACK_SECONDS} s after its end"
        done = DONE.search(out)
        wrong = int(process.returncode != 0 or done is None)
        tally.add(f"fuzz: {name}", tried=int(done[1]) if done else 0, wrong=wrong, note=f"by {how}, {SECONDS} s")
        if wrong:
            failed[name] = f"status {process.returncode}; last read: {last_read(tmp_path, name)}\n{out[-4000:]}"
    assert not failed, failed
