"""``aggregate`` on Spark against native aggregation, by keys and rows of an epoch."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks import spark_flows as ours, structured_streaming as theirs
from benchmarks.measuring import Row
from benchmarks.spark_input import Epoch, new_since, random_keys, write_epoch
from benchmarks.spark_sides import NATIVE, SLOW_ROWS, Side, faster, same, sides, sizes

MANY = 5_000_000
"""So many keys are all in the state before anything is measured."""
AGGREGATE = tuple((keys, rows) for keys in (100, 100_000, MANY) for rows in (2_000, 200_000, 2_000_000))
"""Keys, and rows of an epoch. ``bench_spark_large`` has the one that is left out here."""
ELSEWHERE = MANY, 200_000
SIZED = 100_000, 2_000_000
ROUNDS = 3
"""The first one warms up."""
SMALL_EACH = 15
"""Epochs of a round where they are small, and all that is measured is latency."""


def aggregates(mine: Side, other: Side, scratch: Path, line: str) -> Iterator[Row]:
    """Our aggregate against Spark's; and what checkpoints write where epochs are largest."""
    for keys, rows in AGGREGATE:
        what = f"Spark runtime, `aggregate`, {keys:,} keys, {rows:,} rows an epoch"
        if (keys, rows) == ELSEWHERE or line not in what:
            continue
        root = scratch / f"aggregate-{keys}-{rows}"
        yield from one(mine, other, root, what, keys, rows)
        shutil.rmtree(root)


def one(mine: Side, other: Side, root: Path, what: str, keys: int, rows: int) -> Iterator[Row]:
    folder, store, checkpoint = (str(root / name) for name in ("rows", "store", "checkpoint"))
    Path(folder).mkdir(parents=True)
    each = 3 if rows > SLOW_ROWS else 4 if rows == SLOW_ROWS else SMALL_EACH
    a: list[Epoch] = []
    b: list[Epoch] = []
    spent, first = (0.0, 0.0), 0
    mine.call(ours.begin, ours.vectorised, folder, store)
    if keys == MANY:
        write_epoch(folder, 0, np.random.default_rng(1).permutation(keys))
        mine.call(ours.epochs, store, 1)
        other.call(theirs.run, theirs.native, folder, checkpoint)
        first = 1
    for number in range(ROUNDS):
        for epoch in range(first + number * each, first + (number + 1) * each):
            write_epoch(folder, epoch, random_keys(epoch, rows=rows, keys=keys))
        # The first round warms up. The first batch of a query that begins again reads the state:
        # it is left out.
        own, own_cpu = mine.measured(ours.epochs, store, each)
        others, other_cpu = other.measured(theirs.run, theirs.native, folder, checkpoint)
        if number:
            a, b = a + own[1:], b + others[1:]
            spent = spent[0] + own_cpu / each / (ROUNDS - 1), spent[1] + other_cpu / each / (ROUNDS - 1)
    mine.call(ours.end, store)
    same(mine.call(ours.totals, store), other.call(theirs.totals, checkpoint))
    yield faster(what, a, NATIVE, b, "≥ 2 ×" if rows >= SLOW_ROWS else "≥ 1 ×", spent)
    if (keys, rows) == SIZED:
        yield sizes(what, new_since(store, {}), NATIVE, new_since(checkpoint, {}), ROUNDS * each)


def measure(line: str = "") -> Iterator[Row]:
    with sides() as (mine, other, scratch):
        yield from aggregates(mine, other, scratch, line)
