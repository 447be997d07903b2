"""How the benchmarks measure: two functions in turn, medians of five, the ratio."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple


class Row(NamedTuple):
    """A line of the table. All texts, ready to print."""

    what: str
    ours: str
    against: str
    ratio: str
    budget: str


def seconds(action: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def side_by_side(ours: Callable[[], object], against: Callable[[], object], *, rounds: int = 5) -> tuple[float, float]:
    """Medians of both, run in turn A B A B … after one warm-up each."""
    ours()
    against()
    pairs = [(seconds(ours), seconds(against)) for _ in range(rounds)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


def compare(
    what: str, ours: Callable[[], object], against: Callable[[], object], *, label: str, budget: str, rounds: int = 5
) -> Row:
    """A row of two times and their ratio."""
    mine, theirs = side_by_side(ours, against, rounds=rounds)
    return Row(what, f"{mine * 1000:.0f} ms", f"{label}: {theirs * 1000:.0f} ms", f"{mine / theirs:.2f} ×", budget)
