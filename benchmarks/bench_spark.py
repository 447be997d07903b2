"""The Spark runtime against Structured Streaming, on the same files in the same run.

Each side has a process and a Spark session of its own; both are called in turn, and the other one
is idle then. Epochs of a side that is still warming up are left out, as many on both sides. Totals
are compared. Processor time is that of a side's process, its JVM and its workers.

``applyInPandasWithState`` makes some thousand rows a second, so it is left out from 200,000 rows an
epoch on; ``python -m benchmarks bench_spark --full`` leaves nothing out.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import stateformat as sf
from benchmarks import spark_flows as ours, structured_streaming as theirs
from benchmarks.measuring import Row, family, processor_seconds, seconds
from benchmarks.spark_input import FILES, Epoch, Written, lying_in, new_since, random_keys, write_epoch, write_input
from stateformat.backends.rewrite.rescale import publish_rescaled

Result = TypeVar("Result")

KEYS = 5_000_000
EPOCH_ROWS = 200_000
WARM_UP, MEASURED = 3, 5
"""Epochs of each side of a line."""
PER_KEY = ((100_000, 2_000), (100_000, 20_000), (100_000, 200_000), (KEYS, 20_000))
SLOW_ROWS = 200_000
"""From so many rows an epoch on, one of ``applyInPandasWithState`` takes minutes."""
AGGREGATE = ((100, 1), (100, 2_000), (100, 200_000), (100_000, 2_000), (100_000, 200_000), (100_000, 2_000_000))
"""Keys, and rows of an epoch."""
EMPTY_WARM_UP, EMPTY_PAIRS = 20, 150
RESUMES = 3
RESCALED = 6
SMALL_ROWS = 10_000
TEN_MILLION = 10_000_000


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


def rate(epochs: Iterable[Epoch]) -> float:
    return statistics.median(epoch.rows / epoch.seconds for epoch in epochs)


def _per_second(rows: float) -> str:
    return f"{rows / 1e6:.2f} M rows/s" if rows >= 1e5 else f"{rows:,.{0 if rows >= 100 else 1}f} rows/s"


def _faster(
    what: str,
    mine: Sequence[Epoch],
    label: str,
    other: Sequence[Epoch],
    budget: str,
    cpu: tuple[float, float] | None = None,
) -> Row:
    a, b = rate(mine), rate(other)
    return Row(what, _per_second(a), f"{label}: {_per_second(b)}", f"{a / b:.2f} ×", budget, cpu, faster=True)


def _per_epoch(written: Written, epochs: int) -> str:
    return f"{written.size_bytes / epochs / 1e6:.2f} MB in {written.files / epochs:.0f} files"


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
                yield _faster(what, own[WARM_UP:], label, epochs[WARM_UP:], goal, costs)


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
        _same(mine.call(ours.totals, store), other.call(theirs.totals, checkpoint))
        what = f"Spark runtime, `aggregate`, {keys:,} keys, {rows:,} row{'s' * (rows > 1)} an epoch"
        label = "native `groupBy().agg()`"
        yield _faster(what, a, label, b, "≥ 2 ×" if rows >= SLOW_ROWS else "≥ 1 ×", spent)
    yield _sizes(what, new_since(store, {}), label, new_since(checkpoint, {}), rounds * each)


def _sizes(what: str, mine: Written, label: str, other: Written, epochs: int) -> Row:
    ratio = f"{mine.size_bytes / other.size_bytes:.2f} × bytes, {mine.files / other.files:.2f} × files"
    return Row(
        f"{what}: checkpoint of an epoch", _per_epoch(mine, epochs), f"{label}: {_per_epoch(other, epochs)}", ratio, "–"
    )


def _same(mine: tuple[int, int, int], other: tuple[int, int, int]) -> None:
    assert mine == other, f"the two sides have computed different things: {mine} and {other}"


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


def five_million(mine: Side, other: Side, scratch: Path) -> list[Row]:
    """5M keys in the state: epochs on top, resuming, and going on with six subtasks."""
    folder, store, checkpoint = (str(scratch / f"large{end}") for end in ("", "-store", "-checkpoint"))
    write_epoch(folder, 0, np.random.default_rng(1).permutation(KEYS))
    mine.call(ours.begin, ours.vectorised, folder, store)
    mine.call(ours.epochs, store, 1)
    other.call(theirs.run, theirs.native, folder, checkpoint)
    before = lying_in(store), lying_in(checkpoint)
    # Structured Streaming makes a snapshot of a state with every tenth change or so; before, a
    # restart would replay all changes.
    count = 12
    for number in range(1, count + 1):
        write_epoch(folder, number, random_keys(number, rows=EPOCH_ROWS, keys=KEYS))
    a, a_cpu = mine.measured(ours.epochs, store, count)
    b, b_cpu = other.measured(theirs.run, theirs.native, folder, checkpoint)
    written = new_since(store, before[0]), new_since(checkpoint, before[1])
    mine.call(ours.end, store)

    def small(number: int) -> None:
        write_epoch(folder, number, random_keys(number, rows=SMALL_ROWS, keys=KEYS))

    pairs = []
    for number in range(count + 1, count + 1 + RESUMES):
        small(number)
        own = _resume(mine, folder, store, FILES)
        pairs.append((own, other.call(theirs.restart, theirs.native, folder, checkpoint)))
    resumed = [statistics.median(column) for column in zip(*pairs, strict=True)]
    small(count + 1 + RESUMES)
    publishing = seconds(lambda: _rescale(store))
    rescaled = publishing + _resume(mine, folder, store, RESCALED)
    repartition = other.call(theirs.repartition, checkpoint, RESCALED)
    restarted = other.call(theirs.restart, theirs.native, folder, checkpoint)
    _same(mine.call(ours.totals, store), other.call(theirs.totals, checkpoint))
    what, label = f"Spark runtime, `aggregate`, {KEYS:,} keys in the state", "native `groupBy().agg()`"
    lines = [
        _faster(f"{what}, {EPOCH_ROWS:,} rows an epoch", a[2:], label, b[2:], "≥ 2 ×", (a_cpu / count, b_cpu / count)),
        _sizes(f"{what}, {EPOCH_ROWS:,} rows an epoch", written[0], label, written[1], count),
        _times(f"{what}: resume, to the end of the first epoch", resumed[0], f"{label}, restart", resumed[1]),
    ]
    if repartition is None:
        return lines
    offline, again = "Spark's offline repartition", f"{what}: 4 → 6, to the end of the first epoch"
    return [
        *lines,
        _times(f"{what}: 4 → 6, published", publishing, offline, repartition),
        _times(again, rescaled, f"{offline} and restart", repartition + restarted),
    ]


def _times(what: str, mine: float, label: str, other: float) -> Row:
    return Row(what, f"{mine:.2f} s", f"{label}: {other:.2f} s", f"{mine / other:.3g} ×", "–")


def _resume(mine: Side, folder: str, store: str, parallelism: int) -> float:
    begun = mine.call(ours.begin, ours.vectorised, folder, store, parallelism)
    (first,) = mine.call(ours.epochs, store, 1)
    mine.call(ours.end, store)
    return begun + first.seconds


def _rescale(store: str) -> None:
    opened = sf.open(store, durable=False)
    source = opened.open()
    publish_rescaled(source, source.graph.at(RESCALED), store=opened)


def ten_million(side: Side, scratch: Path) -> list[Row]:
    folder, store = str(scratch / "huge"), str(scratch / "huge-store")
    seeds, pairs, warm_up = 5, 15, 6
    keys = np.random.default_rng(2).permutation(TEN_MILLION)
    for number, part in enumerate(np.split(keys, seeds)):
        write_epoch(folder, number, part)
    side.call(ours.begin, ours.vectorised, folder, store)
    side.call(ours.epochs, store, seeds)
    figures: list[tuple[float, float, int]] = []
    generator = np.random.default_rng(3)
    for number in range(seeds, seeds + warm_up + pairs):
        # A worker that has missed an epoch reads what it missed in the next one that it serves,
        # which may be an empty one.
        read = ours.bytes_read(store)
        nothing = side.call(ours.empty_epoch, store)
        write_epoch(folder, number, generator.choice(TEN_MILLION, SMALL_ROWS, replace=False))
        (some,) = side.call(ours.epochs, store, 1)
        figures.append((some.seconds, nothing.seconds, ours.bytes_read(store) - read))
    touches, empties, reads = zip(*figures[warm_up:], strict=True)
    memory = side.call(ours.peak_memory)
    side.call(ours.end, store)
    found, _, rows = side.call(ours.totals, store)
    assert (found, rows) == (TEN_MILLION, TEN_MILLION + SMALL_ROWS * (warm_up + pairs))
    a, b, read = statistics.median(touches), statistics.median(empties), statistics.mean(reads)
    # A key and its two accumulators.
    touched = SMALL_ROWS * 24
    what = f"Spark runtime, {TEN_MILLION:,} keys, an epoch that touches {SMALL_ROWS:,}"
    read_by, label = f"{read / 1e6:.2f} MB", f"bytes touched: {touched / 1e6:.2f} MB"
    peak, of = f"{memory / 2**30:.1f} GiB", "driver, Spark and its workers, each at its peak"
    return [
        Row(what, f"{a * 1000:.0f} ms", f"an empty epoch: {b * 1000:.0f} ms", f"{a / b:.2f} ×", "≤ 2 ×"),
        Row(
            f"{what}: bytes read, in the empty epoch before it too", read_by, label, f"{read / touched:.1f} ×", "≤ 10 ×"
        ),
        Row(f"{what}: peak memory", peak, of, "–", "≤ 24 GiB"),
    ]


def measure(full: bool = False) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-spark-") as folder, ExitStack() as stack:
        scratch = Path(folder)
        mine = stack.enter_context(Side(scratch / "ours.log"))
        yield from empty(mine, scratch)
        other = stack.enter_context(Side(scratch / "theirs.log"))
        yield from per_key(mine, other, scratch, full=full)
        yield from aggregates(mine, other, scratch)
        yield from five_million(mine, other, scratch)
        # A session of its own, so that the memory it takes is seen.
        for side in (mine, other):
            side.shutdown()
        yield from ten_million(stack.enter_context(Side(scratch / "huge.log")), scratch)
