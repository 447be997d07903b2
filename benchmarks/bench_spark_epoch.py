"""What an epoch of Spark costs in which nothing comes, or one row."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

from benchmarks import spark_flows as ours, structured_streaming as theirs
from benchmarks.measuring import Row, duration
from benchmarks.spark_input import Epoch, random_keys, write_epoch
from benchmarks.spark_sides import NATIVE, Side, same, sides

EMPTY_WARM_UP, EMPTY_PAIRS = 20, 60
EMPTY = f"Spark runtime, empty epoch of source → keyed → sink, {EMPTY_PAIRS} warm epochs"
ONE_ROW = "Spark runtime, `aggregate`, 100 keys, 1 row an epoch"
ROUNDS, EACH = 6, 20
"""Rounds, of which the first two warm up, and epochs of each side in a round."""


def empty(mine: Side, scratch: Path) -> Row:
    """An epoch in which nothing comes, against the smallest job of as many exchanges."""
    folder, store = str(scratch / "empty"), str(scratch / "empty-store")
    mine.call(ours.begin, ours.three_levels, folder, store)
    mine.call(ours.beside_trivial_jobs, store, EMPTY_WARM_UP)
    pairs = mine.call(ours.beside_trivial_jobs, store, EMPTY_PAIRS)
    mine.call(ours.end, store)
    a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
    label = "trivial job of three identity `mapInArrow`, two shuffles"
    return Row(EMPTY, duration(a), f"{label}: {duration(b)}", f"{a / b:.2f} ×", "≤ 1.1 ×")


def one_row(mine: Side, other: Side, scratch: Path) -> Row:
    """An epoch of one row against a batch of one row, through one shuffle on either side."""
    folder, store, checkpoint = (str(scratch / f"one{end}") for end in ("", "-store", "-checkpoint"))
    Path(folder).mkdir()
    mine.call(ours.begin, ours.vectorised, folder, store)
    a: list[Epoch] = []
    b: list[Epoch] = []
    spent = 0.0, 0.0
    for number in range(ROUNDS):
        for epoch in range(number * EACH, (number + 1) * EACH):
            write_epoch(folder, epoch, random_keys(epoch, rows=1, keys=100))
        own, own_cpu = mine.measured(ours.epochs, store, EACH)
        others, other_cpu = other.measured(theirs.run, theirs.native, folder, checkpoint)
        if number > 1:
            # The first batch of a query that begins again reads the state: it is left out.
            a, b = a + own[1:], b + others[1:]
            spent = spent[0] + own_cpu, spent[1] + other_cpu
    mine.call(ours.end, store)
    same(mine.call(ours.totals, store), other.call(theirs.totals, checkpoint))
    mine_s, other_s = (statistics.median(epoch.seconds for epoch in epochs) for epochs in (a, b))
    epochs_each = (ROUNDS - 2) * EACH
    cpu = spent[0] / epochs_each, spent[1] / epochs_each
    label = f"{NATIVE}, a batch of one row"
    return Row(ONE_ROW, duration(mine_s), f"{label}: {duration(other_s)}", f"{mine_s / other_s:.2f} ×", "≤ 1 ×", cpu)


def measure(line: str = "") -> Iterator[Row]:
    with sides() as (mine, other, scratch):
        if line in ONE_ROW:
            yield one_row(mine, other, scratch)
        if line in EMPTY:
            yield empty(mine, scratch)
