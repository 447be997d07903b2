"""What an epoch of Spark costs in which nothing comes, or one row."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import spark_flows as ours
from benchmarks.measuring import Row
from benchmarks.spark_sides import Side, sides

EMPTY_WARM_UP, EMPTY_PAIRS = 20, 150


def empty(mine: Side, scratch: Path) -> list[Row]:
    """An epoch in which nothing comes, against the smallest job of as many exchanges."""
    folder, store = str(scratch / "empty"), str(scratch / "empty-store")
    mine.call(ours.begin, ours.three_levels, folder, store)
    mine.call(ours.in_turn, store, EMPTY_WARM_UP)
    pairs = mine.call(ours.in_turn, store, EMPTY_PAIRS)
    mine.call(ours.end, store)
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    what = f"Spark runtime, empty epoch of source → keyed → sink, {EMPTY_PAIRS} warm epochs"
    label = "trivial job of three identity `mapInArrow`, two shuffles"
    return [Row(what, f"{a * 1000:.0f} ms", f"{label}: {b * 1000:.0f} ms", f"{a / b:.2f} ×", "≤ 1.1 ×")]


def measure() -> Iterator[Row]:
    with sides() as (mine, _, scratch):
        yield from empty(mine, scratch)
