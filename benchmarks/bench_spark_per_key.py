"""A function of each key on Spark against Structured Streaming's two.

``applyInPandasWithState`` makes some thousand rows a second, so it is left out from 200,000 rows an
epoch on; ``python -m benchmarks spark_per_key --full`` leaves nothing out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks import spark_flows as ours, structured_streaming as theirs
from benchmarks.measuring import Row
from benchmarks.spark_input import write_input
from benchmarks.spark_sides import SLOW_ROWS, Side, faster, sides

KEYS = 5_000_000
WARM_UP, MEASURED = 3, 5
"""Epochs of each side of a line."""
PER_KEY = ((100_000, 2_000), (100_000, 20_000), (100_000, 200_000), (KEYS, 20_000))
"""Keys, and rows of an epoch."""


def per_key(mine: Side, other: Side, scratch: Path, *, full: bool) -> Iterator[Row]:
    """The same function for each key: ours plain and vectorised, against both of theirs."""
    other.call(theirs.start)
    for keys, rows in PER_KEY:
        count = WARM_UP + MEASURED
        root = scratch / f"per-key-{keys}-{rows}"
        folder = write_input(root, count, rows=rows, keys=keys)
        found = {}
        for name, flow in (("plain", ours.plain_per_key), ("vectorised", ours.per_key)):
            store = f"{root}-{name}"
            mine.call(ours.begin, flow, folder, store)
            found[name] = mine.measured(ours.epochs, store, count)
            mine.call(ours.end, store)
            expected = mine.call(ours.totals, store)
            assert expected[2] == rows * count, f"{expected[2]} of {rows * count} rows are in the totals"
        for query, label, budget in (
            (theirs.transform_rows, "transformWithState with rows", "≥ 3 ×"),
            (theirs.apply_in_pandas, "applyInPandasWithState", "≥ 10 ×"),
        ):
            if query is theirs.apply_in_pandas and rows >= SLOW_ROWS and not full:
                continue
            epochs, cpu = other.measured(theirs.run, query, folder, f"{root}-{label}")
            assert [epoch.rows for epoch in epochs] == [rows] * count
            for name, (own, own_cpu) in found.items():
                what = f"Spark runtime, {name} function of a key, {keys:,} keys, {rows:,} rows an epoch"
                costs = own_cpu / count, cpu / count
                goal = budget if name == "plain" else "–"
                yield faster(what, own[WARM_UP:], label, epochs[WARM_UP:], goal, costs)


def measure(full: bool = False) -> Iterator[Row]:
    with sides() as (mine, other, scratch):
        yield from per_key(mine, other, scratch, full=full)
