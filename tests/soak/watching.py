"""Whether a job grows: its memory, the objects in its store, and what its work costs."""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.measuring import family, processor_seconds

WARM_UP_S = 20.0
"""A process that has just begun imports, compiles and fills its caches."""


SAMPLES_MIN = 30
"""Samples that a quarter needs for meaningful medians: a minute of a warm process."""


class Sample(NamedTuple):
    """A job at one moment."""

    at_s: float
    """Since the soak began."""
    age_s: float
    """Since its process began."""
    memory_bytes: int
    """Resident, of the process and all below it."""
    objects: int
    """Files in its store."""
    prepared: int
    """Files that its sinks have prepared and not committed."""
    checkpoint_id: int
    taken_s: float
    """When the newest checkpoint was taken, by the clock."""
    processor_s: float
    """Of the process and all below it."""


def sample(folder: Path, pid: int, *, at_s: float, age_s: float) -> Sample:
    pids = family(pid)
    # Unfinished files have other names. Any file may be gone at the next look; ``walk`` skips it.
    records = {int(path.stem): path for path in (folder / "store" / "checkpoints").glob("[0-9]*.json")}
    newest = max(records, default=0)
    return Sample(
        at_s=at_s,
        age_s=age_s,
        memory_bytes=sum(map(_resident, pids)),
        objects=sum(len(names) for _, _, names in os.walk(folder / "store")),
        prepared=sum(name.endswith(".prepared") for _, _, names in os.walk(folder / "out") for name in names),
        checkpoint_id=newest,
        taken_s=json.loads(records[newest].read_text())["created_at_us"] / 1e6 if newest else 0,
        processor_s=processor_seconds(*pids),
    )


def _resident(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:")]
    return 1024 * int(found[0]) if found else 0


class Growth(NamedTuple):
    """One figure in the second and in the last quarter of a soak."""

    what: str
    before: float
    after: float
    slack: float = math.inf
    """How much the later figure may exceed 1.25 times the earlier. Infinite: only shown."""

    @property
    def is_flat(self) -> bool:
        return self.after <= 1.25 * self.before + self.slack

    def __str__(self) -> str:
        judged = "" if self.is_flat else ": it grows"
        if self.slack == math.inf:
            judged = " (it depends on what else the machine does, so it is not judged)"
        return f"{self.what}: {self.before:,.1f}, later {self.after:,.1f}{judged}"


def growth(samples: Sequence[Sample], *, samples_min: int = SAMPLES_MIN) -> list[Growth]:
    """Compare the second quarter of the soak with the last, for processes that are warm.

    Empty if either has fewer samples than ``samples_min``.
    """
    warm = [each for each in samples if each.age_s >= WARM_UP_S]
    quarters = [_quarter(warm, samples[-1].at_s, number) for number in (1, 3)]
    if min(map(len, quarters)) < samples_min:
        return []

    def figure(what: str, of: Callable[[Sequence[Sample]], float], *slack: float) -> Growth:
        before, after = map(of, quarters)
        return Growth(what, before, after, *slack)

    return [
        figure("memory, MB", lambda some: statistics.median(each.memory_bytes for each in some) / 1e6, 30),
        figure("objects of the store", lambda some: statistics.median(each.objects for each in some), 10),
        figure("prepared files", lambda some: statistics.median(each.prepared for each in some), 10),
        # Orders come at the same rate all the time. A busy machine takes fewer checkpoints of more
        # orders each, so the cost of a checkpoint would say more of the machine than of the job.
        figure("processor time in a second, ms", lambda some: _rate_ms(some, "processor_s", "at_s"), 20),
        figure("from one checkpoint to the next, ms", lambda some: _rate_ms(some, "taken_s", "checkpoint_id")),
    ]


def _quarter(samples: Sequence[Sample], end_s: float, number: int) -> list[Sample]:
    return [each for each in samples if number <= 4 * each.at_s / end_s <= number + 1]


def _rate_ms(samples: Sequence[Sample], time: str, unit: str) -> float:
    """Return the median of the time between two samples per unit between them, ms."""
    rates = [
        1000 * (getattr(after, time) - getattr(before, time)) / (getattr(after, unit) - getattr(before, unit))
        for before, after in itertools.pairwise(samples)
        if after.age_s > before.age_s
        and after.checkpoint_id > before.checkpoint_id
        and after.processor_s >= before.processor_s
    ]
    return statistics.median(rates) if rates else 0.0
