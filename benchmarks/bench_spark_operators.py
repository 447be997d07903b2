"""Windows, duplicates and a join with a bounded table on Spark against the same of its own.

Both sides read the same files. Windows are given when they end, and no row is late. The first row
of a key passes. The table of the join is read once by ours and kept as state; Spark reads it in
each batch. ``docs/moving-from-structured-streaming.md`` has a test that compares the outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import spark_flows as ours, structured_streaming as theirs
from benchmarks.measuring import Row
from benchmarks.spark_input import write_input
from benchmarks.spark_sides import Side, faster, sides

KEYS = 100_000
SIZES = (2_000, 200_000)
"""Rows of an epoch."""
WARM_UP, MEASURED = 4, 8


class Work(NamedTuple):
    """An operator on both sides, and what the other one is called."""

    name: str
    flow: ours.Flow
    query: theirs.Query
    label: str
    timed: bool = False


def _works(table: str) -> tuple[Work, ...]:
    return (
        Work("tumbling window", ours.windows, theirs.windows, "`groupBy(window())`", timed=True),
        Work("`deduplicate`", ours.duplicates, theirs.duplicates, "`dropDuplicates`"),
        Work(f"join with a table of {KEYS:,} rows", ours.joined(table), theirs.joined(table), "`join`"),
    )


def operators(mine: Side, other: Side, scratch: Path, line: str) -> Iterator[Row]:
    """Processor time is that of whole runs, their begin and warm-up included."""
    count, table = WARM_UP + MEASURED, str(scratch / "table.parquet")
    pq.write_table(pa.table({"k": np.arange(KEYS), "name": np.arange(KEYS) % 1000}), table)
    mine.call(ours.start)
    other.call(theirs.start)
    for number, work in enumerate(_works(table)):
        for rows in SIZES:
            what = f"Spark runtime, {work.name}, {KEYS:,} keys, {rows:,} rows an epoch"
            if line not in what:
                continue
            root = scratch / f"{number}-{rows}"
            folder = write_input(root, count, rows=rows, keys=KEYS, timed=work.timed)
            store, checkpoint = f"{root}-store", f"{root}-checkpoint"
            own, own_cpu = mine.measured(ours.run, work.flow, folder, store, count)
            columns = theirs.TIMED if work.timed else theirs.ROWS
            epochs, cpu = other.measured(theirs.run, work.query, folder, checkpoint, columns, "append")
            assert [epoch.rows for epoch in epochs] == [rows] * count, epochs
            if work.flow is ours.duplicates:
                found, expected = mine.call(ours.keys, store), other.call(theirs.keys, checkpoint)
                assert found == expected, f"the two sides have seen {found} and {expected} keys"
            costs = own_cpu / count, cpu / count
            yield faster(what, own[WARM_UP:], work.label, epochs[WARM_UP:], "≥ 1 ×", costs)


def measure(line: str = "") -> Iterator[Row]:
    with sides() as (mine, other, scratch):
        yield from operators(mine, other, scratch, line)
