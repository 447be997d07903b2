"""A plain Python function of each key on Spark against Structured Streaming's two.

The function is ``fold`` on both sides. ``applyInPandasWithState`` makes some thousand rows a
second, so it is left out from 200,000 rows an epoch on; ``python -m benchmarks spark_per_key
--full`` leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import spark_flows as ours, structured_streaming as theirs
from benchmarks.measuring import Row
from benchmarks.spark_input import write_input
from benchmarks.spark_sides import SLOW_ROWS, Side, faster, sides

WARM_UP, MEASURED = 3, 5
"""Epochs of each side of a line."""
SMALL = 2_000, 15, 15
"""Up to so many rows an epoch is little but latency: as many epochs warm up, and are measured."""
PER_KEY = ((100_000, 2_000), (100_000, 20_000), (100_000, 200_000), (5_000_000, 20_000))
"""Keys, and rows of an epoch."""
THEIRS = (
    (theirs.transform_rows, "transformWithState with rows", "≥ 3 ×"),
    (theirs.apply_in_pandas, "applyInPandasWithState", "≥ 10 ×"),
)


def per_key(mine: Side, other: Side, scratch: Path, *, full: bool, line: str) -> Iterator[Row]:
    """The same function for each key: ``apply_per_key`` against both of theirs.

    Processor time is that of whole runs, their begin and warm-up included.
    """
    mine.call(ours.start)
    other.call(theirs.start)
    for keys, rows in PER_KEY:
        what = f"Spark runtime, plain function of a key, {keys:,} keys, {rows:,} rows an epoch"
        if line not in what:
            continue
        warm_up, measured = SMALL[1:] if rows <= SMALL[0] else (WARM_UP, MEASURED)
        count = warm_up + measured
        root = scratch / f"per-key-{keys}-{rows}"
        folder, store = write_input(root, count, rows=rows, keys=keys), f"{root}-store"
        own, own_cpu = mine.measured(ours.run, ours.per_key, folder, store, count)
        expected = mine.call(ours.totals, store)
        assert expected[2] == rows * count, f"{expected[2]} of {rows * count} rows are in the totals"
        for query, label, budget in THEIRS:
            if query is theirs.apply_in_pandas and rows >= SLOW_ROWS and not full:
                continue
            epochs, cpu = other.measured(theirs.run, query, folder, f"{root}-{label}")
            assert [epoch.rows for epoch in epochs] == [rows] * count
            costs = own_cpu / count, cpu / count
            yield faster(what, own[warm_up:], label, epochs[warm_up:], budget, costs)


def measure(full: bool = False, line: str = "") -> Iterator[Row]:
    with sides() as (mine, other, scratch):
        yield from per_key(mine, other, scratch, full=full, line=line)
