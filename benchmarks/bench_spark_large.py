"""Large states on Spark: epochs, resuming, and going on with six subtasks."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import stateformat as sf
from benchmarks import spark_flows as ours, structured_streaming as theirs
from benchmarks.measuring import Row, seconds
from benchmarks.spark_input import FILES, lying_in, new_since, random_keys, write_epoch
from benchmarks.spark_sides import NATIVE, Side, faster, same, sides, sizes, times
from stateformat.backends.rewrite.rewrite import publish_rescaled

KEYS = 5_000_000
EPOCH_ROWS = 200_000
RESUMES = 3
RESCALED = 6
SMALL_ROWS = 10_000
TEN_MILLION = 10_000_000
_FIVE = f"Spark runtime, `aggregate`, {KEYS:,} keys in the state"
_TEN = f"Spark runtime, {TEN_MILLION:,} keys, an epoch that touches {SMALL_ROWS:,}"
FIVE = (
    f"{_FIVE}, {EPOCH_ROWS:,} rows an epoch",
    f"{_FIVE}, {EPOCH_ROWS:,} rows an epoch: checkpoint of an epoch",
    f"{_FIVE}: resume, to the end of the first epoch",
    f"{_FIVE}: 4 → 6, published",
    f"{_FIVE}: 4 → 6, to the end of the first epoch",
)
TEN = (_TEN, f"{_TEN}: bytes read, in the empty epoch before it too", f"{_TEN}: peak memory")
"""The lines of either state, which are measured together."""


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
    same(mine.call(ours.totals, store), other.call(theirs.totals, checkpoint))
    epochs, _, resume, published, again = FIVE
    lines = [
        faster(epochs, a[2:], NATIVE, b[2:], "≥ 2 ×", (a_cpu / count, b_cpu / count)),
        sizes(epochs, written[0], NATIVE, written[1], count),
        times(resume, resumed[0], f"{NATIVE}, restart", resumed[1]),
    ]
    if repartition is None:
        return lines
    offline = "Spark's offline repartition"
    return [
        *lines,
        times(published, publishing, offline, repartition),
        times(again, rescaled, f"{offline} and restart", repartition + restarted),
    ]


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
    what, bytes_read, peak_memory = TEN
    read_by, label = f"{read / 1e6:.2f} MB", f"bytes touched: {touched / 1e6:.2f} MB"
    peak, of = f"{memory / 2**30:.1f} GiB", "driver, Spark and its workers, each at its peak"
    return [
        Row(what, f"{a * 1000:.0f} ms", f"an empty epoch: {b * 1000:.0f} ms", f"{a / b:.2f} ×", "≤ 2 ×"),
        Row(bytes_read, read_by, label, f"{read / touched:.1f} ×", "≤ 10 ×"),
        Row(peak_memory, peak, of, "–", "≤ 24 GiB"),
    ]


def measure(line: str = "") -> Iterator[Row]:
    if any(line in name for name in FIVE):
        with sides() as (mine, other, scratch):
            yield from five_million(mine, other, scratch)
    if any(line in name for name in TEN):
        # A session of its own, so that the memory it takes is seen.
        with tempfile.TemporaryDirectory(prefix="bench-spark-") as folder, Side(Path(folder) / "huge.log") as side:
            yield from ten_million(side, Path(folder))
