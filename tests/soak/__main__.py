"""``python -m tests.soak --minutes 60``: a job with every operator on both executors, fed for an
hour, and killed once a minute, every second time by SIGTERM. Its output must equal what SQL makes
of the same files, and nothing may grow: memory, objects, what its work costs. The exit status
is 0 only then.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tests.soak import answers, feeding, watching

ROOT = Path(__file__).resolve().parents[2]
EXECUTORS = ("local", "spark")
SAMPLES_EVERY_S = 2.0
FILES_EVERY_S = 1.0
ENDS_WITHIN_S = 900.0
TERMINATED_WITHIN_S = 120.0


class SoakFailed(Exception):
    """A job has ended in another way than it should."""


class Soaked:
    """A job in a process of its own, which is killed and begins again."""

    def __init__(self, executor: str, folder: Path) -> None:
        self.executor = executor
        self.folder = folder
        self.kills = 0
        self.samples: list[watching.Sample] = []
        feeding.prepare(folder)
        self._begin()

    def _begin(self) -> None:
        command = [sys.executable, "-m", "tests.soak.job", self.executor, str(self.folder)]
        # A group of its own: a kill hits Spark's JVM and workers, too.
        with (self.folder / "job.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
            )
        self._begun_s = time.monotonic()

    def kill(self) -> None:
        """End the process as a power failure does, or, every second time, as a machine that is
        drained: by SIGTERM. Then begin again.
        """
        if self.kills % 2:
            self._terminate()
        self.end()
        self.kills += 1
        self._begin()

    def _terminate(self) -> None:
        self.process.terminate()
        try:
            status = self.process.wait(TERMINATED_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.fail(f"has not ended {TERMINATED_WITHIN_S:.0f} s behind SIGTERM")
        # A process that has just begun has no handler yet, and a slow one uses up its grace.
        if status not in (0, -signal.SIGTERM, 128 + signal.SIGTERM):
            self.fail(f"was told to end and has exit status {status}")

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def look(self, at_s: float) -> None:
        """Take a sample. ``SoakFailed`` if the job has failed."""
        if self.process.poll() not in (None, 0):
            self.fail(f"has ended with exit status {self.process.returncode}")
        age_s = time.monotonic() - self._begun_s
        self.samples.append(watching.sample(self.folder, self.process.pid, at_s=at_s, age_s=age_s))

    def fail(self, why: str) -> NoReturn:
        lines = (self.folder / "job.log").read_text(errors="replace").splitlines()[-20:]
        raise SoakFailed("\n".join([f"the job on {self.executor} {why}; its log ends so:", *lines]))


def soak(
    folder: Path, *, minutes: float, executors: Sequence[str] = EXECUTORS, kill_every_s: float = 60, seed: int = 0
) -> list[Soaked]:
    """Feed a job on each executor, kill each now and then, and let all come to their end."""
    chosen = random.Random(seed)
    jobs = [Soaked(executor, folder / executor) for executor in executors]
    feeder = feeding.Feeder([job.folder for job in jobs], every_s=FILES_EVERY_S)
    begun_s = time.monotonic()
    next_kill_s = {job.executor: kill_every_s * chosen.uniform(0.5, 1.5) for job in jobs}
    try:
        feeder.start()
        while (at_s := time.monotonic() - begun_s) < 60 * minutes:
            for job in jobs:
                job.look(at_s)
                if at_s >= next_kill_s[job.executor]:
                    next_kill_s[job.executor] += kill_every_s * chosen.uniform(0.5, 1.5)
                    job.kill()
            time.sleep(SAMPLES_EVERY_S)
        feeder.end()
        for job in jobs:
            try:
                job.process.wait(ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                job.fail(f"has not ended {ENDS_WITHIN_S:.0f} s behind its input")
            job.look(time.monotonic() - begun_s)
    finally:
        feeder.end()
        for job in jobs:
            job.end()
    return jobs


def report(job: Soaked) -> bool:
    """Print what a soak has come to; whether no row is wrong and nothing grows."""
    newest, files = job.samples[-1].checkpoint_id, len(list((job.folder / "orders").glob("*.parquet")))
    print(f"\n{job.executor}: {files * feeding.ROWS:,} orders, {newest} checkpoints, killed {job.kills} times")
    different = answers.differences(job.folder)
    for name, rows in different.items():
        print(f"  {name}: {rows} rows differ from SQL over the same files")
    found = watching.growth(job.samples)
    for figure in found:
        print(f"  {figure}")
    if not found:
        print("  too short to say whether anything grows")
    return not any(different.values()) and all(figure.is_flat for figure in found)


def main() -> int:
    """Exit status 1 if rows differ or something grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="how long the jobs are fed")
    parser.add_argument("--executor", choices=EXECUTORS, action="append", help="both by default")
    parser.add_argument("--kill-every-s", type=float, default=60, help="seconds between two kills of a job, about")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        try:
            jobs = soak(
                Path(folder),
                minutes=chosen.minutes,
                executors=chosen.executor or EXECUTORS,
                kill_every_s=chosen.kill_every_s,
                seed=chosen.seed,
            )
        except SoakFailed as failed:
            raise SystemExit(f"{failed}") from None
        good = [report(job) for job in jobs]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
