"""How the benchmarks measure: two functions in turn, medians, ratios by clock and CPU."""

from __future__ import annotations

import os
import re
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MISSED, MISSED_BY_CPU = "**missed**", "**missed by CPU**"
_LIMIT = re.compile(r"([≤≥]) ([\d.]+)")
_TICKS = os.sysconf("SC_CLK_TCK")


class Cost(NamedTuple):
    """Seconds by the clock, and processor seconds of this process and all below it."""

    seconds: float
    cpu: float


class Row(NamedTuple):
    """A line of the table, as texts; and the processor seconds of both sides, if measured."""

    what: str
    ours: str
    against: str
    ratio: str
    budget: str
    cpu: tuple[float, float] | None = None
    faster: bool = False
    """Whether the ratio says how many times as fast we are; else, how many times as long."""

    @property
    def cpu_text(self) -> str:
        if self.cpu is None:
            return "–"
        return f"{duration(self.cpu[0])} : {duration(self.cpu[1])} = {self._cpu_ratio():.2f} ×"

    @property
    def mark(self) -> str:
        """Whether a budget is missed: by the clock, or by more than half by CPU alone."""
        limit = _LIMIT.match(self.budget)
        if limit is None:
            return ""
        measured = self.ratio if self.ratio != "–" else self.ours
        if _misses(float(measured.split()[0].replace(",", "")), limit, 1):
            return MISSED
        return MISSED_BY_CPU if self.cpu is not None and _misses(self._cpu_ratio(), limit, 1.5) else ""

    def _cpu_ratio(self) -> float:
        mine, theirs = self.cpu or (0, 0)
        return theirs / mine if self.faster else mine / theirs


def _misses(value: float, limit: re.Match[str], slack: float) -> bool:
    return value > float(limit[2]) * slack if limit[1] == "≤" else value < float(limit[2]) / slack


def duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def family(pid: int) -> list[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def processor_seconds(*pids: int) -> float:
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def peak_bytes(pid: int | str = "self") -> int:
    """The most memory of a process by itself: ``getrusage`` begins with its parent's."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status.get("VmHWM", "0 kB").split()[0]) * 1024


def own_cost(action: Callable[[], object]) -> Cost:
    """Without what is below this process: a server that it has started, or a JVM."""
    begun = time.process_time()
    return Cost(seconds(action), time.process_time() - begun)


def cost(action: Callable[[], object]) -> Cost:
    others, ended, own = _running_below(), _ended_below(), time.process_time()
    taken = seconds(action)
    own, ended, others = time.process_time() - own, _ended_below() - ended, _running_below() - others
    return Cost(taken, own + ended + others)


def _running_below() -> float:
    return processor_seconds(*family(os.getpid())[1:])


def _ended_below() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def side_by_side(
    ours: Callable[[], object],
    against: Callable[[], object],
    *,
    rounds: int = 5,
    measured: Callable[[Callable[[], object]], Cost] = cost,
) -> tuple[Cost, Cost]:
    ours()
    against()
    mine, theirs = zip(*((measured(ours), measured(against)) for _ in range(rounds)), strict=True)
    return _medians(mine), _medians(theirs)


def _medians(costs: tuple[Cost, ...]) -> Cost:
    return Cost(*map(statistics.median, zip(*costs, strict=True)))


def compare(
    what: str,
    ours: Callable[[], object],
    against: Callable[[], object],
    *,
    label: str,
    budget: str,
    rounds: int = 5,
    measured: Callable[[Callable[[], object]], Cost] = cost,
) -> Row:
    mine, theirs = side_by_side(ours, against, rounds=rounds, measured=measured)
    texts = duration(mine.seconds), f"{label}: {duration(theirs.seconds)}", f"{mine.seconds / theirs.seconds:.2f} ×"
    return Row(what, *texts, budget, (mine.cpu, theirs.cpu))
