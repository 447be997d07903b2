"""What tasks of many workers read whole, and ten jobs in one session of Spark against one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import spark_flows as ours
from benchmarks.measuring import Row
from benchmarks.spark_input import Epoch, write_input
from benchmarks.spark_sides import Side, rate, sides

WORKERS = ((16, 1), (64, 1), (128, 1), (128, 8))
"""Workers in all, and executors, all on one host."""
JOBS = 10
KEYS, ROWS = 100_000, 20_000
ROUNDS, EACH = 3, 8
"""Rounds, of which the first warms up, and epochs of each job in a round."""


def whole_reads(line: str) -> Iterator[Row]:
    """The share of tasks that read their whole state, with a stand-in for Spark."""
    import pytest

    from tests.spark.test_spark_workers import EPOCHS, WARM_UP, Job

    for workers, executors in WORKERS:
        on = f"{workers} workers" + (f" of {executors} executors on one host" if executors > 1 else "")
        what = f"Spark runtime, whole reads of state, {on}"
        if line not in what:
            continue
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
            job = Job(patch, Path(folder), workers, executors)
            run = job.begin()
            job.warm(run)
            while run.published < WARM_UP + EPOCHS:
                run.step()
            share = job.whole_reads()
            run.close()
        yield Row(what, f"{share * 100:.1f} %", f"tasks with keyed state, {EPOCHS} epochs of a stand-in", "–", "≤ 5 %")


def ten_jobs(many: Side, one: Side, scratch: Path) -> Row:
    """Epochs of ten jobs in turn against as many of one job in a session of its own."""
    count = ROUNDS * EACH * JOBS
    folder = write_input(scratch / "rows", count, rows=ROWS, keys=KEYS)
    stores = [str(scratch / f"store-{number}") for number in range(JOBS)]
    alone = str(scratch / "alone")
    for side, some in ((many, stores), (one, [alone])):
        for store in some:
            side.call(ours.begin, ours.vectorised, folder, store)
    a: list[Epoch] = []
    b: list[Epoch] = []
    spent = 0.0, 0.0
    for number in range(ROUNDS):
        mine, mine_cpu = many.measured(ours.in_turn, stores, EACH)
        other, other_cpu = one.measured(ours.in_turn, [alone], EACH * JOBS)
        if number:
            a, b = a + mine, b + other
            spent = spent[0] + mine_cpu, spent[1] + other_cpu
    for side, some in ((many, stores), (one, [alone])):
        for store in some:
            side.call(ours.end, store)
    cpu = spent[0] / len(a), spent[1] / len(b)
    mine_ms, other_ms = (ROWS / rate(epochs) * 1000 for epochs in (a, b))
    label = f"one job in a session of its own: {other_ms:.0f} ms"
    return Row(TEN_JOBS, f"{mine_ms:.0f} ms", label, f"{mine_ms / other_ms:.2f} ×", "≤ 1.1 ×", cpu)


TEN_JOBS = f"Spark runtime, an epoch of each of {JOBS} jobs in one session, {KEYS:,} keys, {ROWS:,} rows"


def measure(line: str = "") -> Iterator[Row]:
    yield from whole_reads(line)
    if line in TEN_JOBS:
        with sides() as (many, one, scratch):
            yield ten_jobs(many, one, scratch)
