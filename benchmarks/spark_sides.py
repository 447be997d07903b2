"""The two sides of a Spark benchmark, and how their lines are written.

Each side has a process and a Spark session of its own; both are called in turn, and the other one
is idle then. Epochs of a side that is still warming up are left out, as many on both sides. Totals
are compared. Processor time is that of a side's process, its JVM and its workers.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.measuring import Row, family, processor_seconds
from benchmarks.spark_input import Epoch, Written

Result = TypeVar("Result")

NATIVE = "native `groupBy().agg()`"
SLOW_ROWS = 200_000
"""From so many rows an epoch on, budgets are those of large epochs."""


class Side(ProcessPoolExecutor):
    """A process with a Spark session of its own. Its output goes to a file."""

    def __init__(self, log: Path) -> None:
        super().__init__(
            1, mp_context=multiprocessing.get_context("spawn"), initializer=_redirect, initargs=(str(log),)
        )

    def call(self, function: Callable[..., Result], *given: Any) -> Result:
        return self.submit(function, *given).result()

    def measured(self, function: Callable[..., Result], *given: Any) -> tuple[Result, float]:
        """Call a function there; its result, and processor seconds there and in all below."""
        pid = self.call(os.getpid)
        before = processor_seconds(*family(pid))
        result = self.call(function, *given)
        return result, processor_seconds(*family(pid)) - before


def _redirect(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


@contextmanager
def sides() -> Iterator[tuple[Side, Side, Path]]:
    """Our side, the other one, and a directory; all are gone behind the block."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-spark-") as folder,
        Side(Path(folder) / "ours.log") as mine,
        Side(Path(folder) / "theirs.log") as other,
    ):
        yield mine, other, Path(folder)


def rate(epochs: Iterable[Epoch]) -> float:
    return statistics.median(epoch.rows / epoch.seconds for epoch in epochs)


def per_second(rows: float) -> str:
    return f"{rows / 1e6:.2f} M rows/s" if rows >= 1e5 else f"{rows:,.{0 if rows >= 100 else 1}f} rows/s"


def faster(
    what: str,
    mine: Sequence[Epoch],
    label: str,
    other: Sequence[Epoch],
    budget: str,
    cpu: tuple[float, float] | None = None,
) -> Row:
    a, b = rate(mine), rate(other)
    if cpu is not None and min(cpu) <= 0:
        cpu = None  # Spark has ended a process of workers meanwhile, and its time is lost.
    return Row(what, per_second(a), f"{label}: {per_second(b)}", f"{a / b:.2f} ×", budget, cpu, faster=True)


def per_epoch(written: Written, epochs: int) -> str:
    return f"{written.size_bytes / epochs / 1e6:.2f} MB in {written.files / epochs:.0f} files"


def sizes(what: str, mine: Written, label: str, other: Written, epochs: int) -> Row:
    ratio = f"{mine.size_bytes / other.size_bytes:.2f} × bytes, {mine.files / other.files:.2f} × files"
    return Row(
        f"{what}: checkpoint of an epoch", per_epoch(mine, epochs), f"{label}: {per_epoch(other, epochs)}", ratio, "–"
    )


def times(what: str, mine: float, label: str, other: float) -> Row:
    return Row(what, f"{mine:.2f} s", f"{label}: {other:.2f} s", f"{mine / other:.3g} ×", "–")


def same(mine: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    assert mine == other, f"the two sides have computed different things: {mine} and {other}"
