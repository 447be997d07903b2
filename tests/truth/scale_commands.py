"""Runs a command of ``ckpt`` and measures its processor time and the peak of its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ckpt.ckpt_runs import CKPT


@dataclass(frozen=True)
class Took:
    """One call: its exit status and output, its processor time in seconds (which a busy machine
    hardly changes), and the peak of its memory.
    """

    status: int
    out: str
    err: str
    seconds: float
    peak_bytes: int

    @property
    def note(self) -> str:
        return f"{self.seconds:.1f} s, {self.peak_bytes / 1e6:,.0f} MB"

    @property
    def document(self) -> Any:
        return json.loads(self.out)


_LAUNCHER = """
import json, os, sys
out, err, answer, *command = sys.argv[1:]
flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
actions = [(os.POSIX_SPAWN_OPEN, number, path, flags, 0o600) for number, path in ((1, out), (2, err))]
process = os.posix_spawn(command[0], command, os.environ, file_actions=actions)
_, status, usage = os.wait4(process, 0)
with open(answer, "w") as file:
    seconds = usage.ru_utime + usage.ru_stime
    json.dump([os.waitstatus_to_exitcode(status), seconds, usage.ru_maxrss * 1024], file)
"""
"""A small process between tests and command: a child's peak includes what its parent held."""


def call(folder: Path, *arguments: object) -> Took:
    """Call ``ckpt`` and wait for it. Its output goes through files in ``folder``."""
    out, err, answer = folder / "out", folder / "err", folder / "answer"
    subprocess.run([sys.executable, "-S", "-c", _LAUNCHER, out, err, answer, CKPT, *map(str, arguments)], check=True)
    status, seconds, peak_bytes = json.loads(answer.read_text())
    return Took(status, out.read_text(), err.read_text(), seconds, peak_bytes)
