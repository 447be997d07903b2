"""The readers of record, manifest, segment and store under a fuzzer: no crash, no hang, nothing imported, only errors of ours."""

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
SECONDS = 60
DONE = re.compile(r"Done (\d+) runs")


def begin(name: str, place: Path) -> subprocess.Popen[str]:
    """Fuzz one target in a process of its own; what it finds is written to ``place``."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.run", name, str(SECONDS), "1", f"{place}/"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )


@pytest.mark.truth
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pair", [NAMES[:2], NAMES[2:]], ids=" and ".join)
def test_the_fuzzer_finds_nothing(pair: tuple[str, ...], tally: Tally, tmp_path: Path) -> None:
    how = "atheris" if importlib.util.find_spec("atheris") else "seeded bytes (no atheris here)"
    running = {name: begin(name, tmp_path) for name in pair}
    failed = {}
    for name, process in running.items():
        try:
            out, _ = process.communicate(timeout=SECONDS + 120)
        finally:
            process.kill()
            process.wait()
        done = DONE.search(out)
        wrong = int(process.returncode != 0 or done is None)
        tally.add(f"fuzz: {name}", tried=int(done[1]) if done else 0, wrong=wrong, note=f"by {how}, {SECONDS} s")
        if wrong:
            failed[name] = out[-4000:]
    assert not failed, failed
