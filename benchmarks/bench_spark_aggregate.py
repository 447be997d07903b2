"""``aggregate`` on Spark against native aggregation, by keys and rows of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import spark_flows as ours, structured_streaming as theirs
from benchmarks.measuring import Row
from benchmarks.spark_input import Epoch, new_since, random_keys, write_epoch
from benchmarks.spark_sides import NATIVE, SLOW_ROWS, Side, faster, same, sides, sizes

AGGREGATE = ((100, 1), (100, 2_000), (100, 200_000), (100_000, 2_000), (100_000, 200_000), (100_000, 2_000_000))
"""Keys, and rows of an epoch."""


def aggregates(mine: Side, other: Side, scratch: Path) -> Iterator[Row]:
    """Our aggregate against Spark's; and what checkpoints write where epochs are largest."""
    for keys, rows in AGGREGATE:
        folder, store, checkpoint = (
            str(scratch / f"aggregate-{keys}-{rows}{end}") for end in ("", "-store", "-checkpoint")
        )
        Path(folder).mkdir()
        mine.call(ours.begin, ours.vectorised, folder, store)
        a: list[Epoch] = []
        b: list[Epoch] = []
        spent = 0.0, 0.0
        rounds, each = 3, 4
        for number in range(rounds):
            for epoch in range(number * each, (number + 1) * each):
                write_epoch(folder, epoch, random_keys(epoch, rows=rows, keys=keys))
            # The first round warms up. The first batch of a query that begins again reads the
            # state: it is left out.
            own, own_cpu = mine.measured(ours.epochs, store, each)
            others, other_cpu = other.measured(theirs.run, theirs.native, folder, checkpoint)
            if number:
                a, b = a + own[1:], b + others[1:]
                spent = spent[0] + own_cpu / each / (rounds - 1), spent[1] + other_cpu / each / (rounds - 1)
        mine.call(ours.end, store)
        same(mine.call(ours.totals, store), other.call(theirs.totals, checkpoint))
        what = f"Spark runtime, `aggregate`, {keys:,} keys, {rows:,} row{'s' * (rows > 1)} an epoch"
        yield faster(what, a, NATIVE, b, "≥ 2 ×" if rows >= SLOW_ROWS else "≥ 1 ×", spent)
    yield sizes(what, new_since(store, {}), NATIVE, new_since(checkpoint, {}), rounds * each)


def measure() -> Iterator[Row]:
    with sides() as (mine, other, scratch):
        yield from aggregates(mine, other, scratch)
