"""Running every reading command of ``ckpt`` on a store of any size, with what it took: seconds, and the peak of its memory."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ckpt_runs import CKPT


@dataclass(frozen=True)
class Took:
    """One call: exit status, standard output, standard error, wall-clock seconds, the peak of the process's memory."""

    status: int
    out: str
    err: str
    seconds: float
    peak_bytes: int

    @property
    def note(self) -> str:
        """In words."""
        return f"{self.seconds:.1f} s, {self.peak_bytes / 1e6:,.0f} MB"

    @property
    def document(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


def call(folder: Path, *arguments: object) -> Took:
    """Call ``ckpt`` and wait for it. Its output goes through files in ``folder``."""
    out, err = folder / "out", folder / "err"
    start = time.perf_counter()
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen([CKPT, *map(str, arguments)], stdout=stdout, stderr=stderr)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - start
    return Took(process.returncode, out.read_text(), err.read_text(), seconds, usage.ru_maxrss * 1024)
