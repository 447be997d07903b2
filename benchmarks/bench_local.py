"""The in-process executor against the Arrow kernels that it calls: a bounded job over Parquet.

Both sides read the same files in the same batches, derive a column, filter, sum and count by key,
and write Parquet. The job has a source with splits, a map and a filter chained to it, a hash edge,
a keyed aggregate, a two-phase-commit file sink, and checkpoints while it runs.

Two more: 1,000 rows at parallelism 256 against 8, and a checkpoint a second where 1,000 of a
million keys change, against none.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import stateformat as sf
from benchmarks.measuring import Row, compare
from stateformat.backends.connectors import FileSink, ParquetSource
from stateformat.backends.connectors.sources.basic import ListEnumerator
from stateformat.backends.dataflow import Chunk, Dataflow, ReaderContext, Source, Split
from stateformat.backends.dataflow.operators.aggregate import Aggregate
from stateformat.backends.dataflow.operators.row_steps import Filter, Map
from stateformat.backends.local import LocalRuntime

ROWS, FILES, KEYS, BATCH_ROWS = 5_000_000, 4, 100_000, 65_536


def _inputs(folder: Path) -> list[str]:
    random = np.random.default_rng(7)
    paths = []
    for number in range(FILES):
        count = ROWS // FILES
        table = pa.table(
            {
                "key": random.integers(0, KEYS, count),
                "price": random.random(count) * 100,
                "quantity": random.integers(1, 10, count),
            }
        )
        paths.append(str(folder / f"part-{number}.parquet"))
        pq.write_table(table, paths[-1], compression="lz4")
    return paths


def _with_amount(batch: pa.RecordBatch) -> pa.RecordBatch:
    amount = pc.multiply(batch["price"], pc.cast(batch["quantity"], pa.float64()))
    return pa.RecordBatch.from_arrays([batch["key"], amount], ["key", "amount"])


WANTED = pc.field("amount") > 50.0


def _job(paths: list[str], out: Path, parallelism: int) -> Dataflow:
    flow = Dataflow("bench", parallelism=parallelism)
    rows = flow.source(ParquetSource(paths, batch_rows=BATCH_ROWS), uid="rows")
    large = rows.apply(Map(_with_amount), uid="amounts").apply(Filter(WANTED), uid="large")
    totals = large.key_by("key").apply(
        Aggregate("key", {"total": ("amount", "sum"), "n": ("*", "count")}, emit="end"), uid="totals"
    )
    totals.apply(FileSink(str(out), durable=False), uid="out")
    return flow


def _batches(paths: list[str]) -> Iterator[pa.RecordBatch]:
    for path in paths:
        yield from pq.ParquetFile(path).iter_batches(BATCH_ROWS)


def _loop(paths: list[str], out: Path) -> None:
    groups: list[pa.Table] = []
    sums = [("amount", "sum"), ("amount", "count")]
    for batch in _batches(paths):
        large = _with_amount(batch).filter(WANTED)
        grouped = pa.Table.from_batches([large]).group_by("key", use_threads=False).aggregate(sums)
        groups.append(grouped)
        if len(groups) == 16:
            groups = [_merged(groups)]
    pq.write_table(_merged(groups), out, compression="lz4")


def _merged(groups: list[pa.Table]) -> pa.Table:
    sums = [("amount_sum", "sum"), ("amount_count", "sum")]
    merged = pa.concat_tables(groups).group_by("key", use_threads=False).aggregate(sums)
    return merged.rename_columns(["key", "amount_sum", "amount_count"])


WIDE_ROWS = 1000
STATE_KEYS, HOT_KEYS, HOT_BATCHES, CHANGED_BYTES = 1_000_000, 1000, 6000, 16
"""Keys of the state, those that change, their batches, bytes of a key and its total."""
DELTAS = 40
WIDE = f"in process, {WIDE_ROWS:,} rows, parallelism 256"
CHECKPOINTS = f"in process, {HOT_KEYS:,} of {STATE_KEYS:,} keys changed, a checkpoint a second"
DELTA = f"in process, {HOT_KEYS:,} of {STATE_KEYS:,} keys changed, bytes of a checkpoint a key"


class _Batches(Source):
    """Batches that lie in memory."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        self._batches = batches

    @property
    def schema(self) -> pa.Schema:
        return self._batches[0].schema

    def enumerator(self) -> ListEnumerator:
        return ListEnumerator(lambda: [Split("all", b"")])

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:  # noqa: ARG002
        for number in range(split.position, len(self._batches)):
            yield Chunk(self._batches[number], number + 1)


def _totals(batches: Sequence[pa.RecordBatch], parallelism: int) -> Dataflow:
    flow = Dataflow("totals", parallelism=parallelism)
    keyed = flow.source(_Batches(batches), uid="rows").key_by("key")
    keyed.apply(Aggregate("key", {"total": ("value", "sum")}, emit="end"), uid="totals")
    return flow


def _values(keys: np.ndarray) -> pa.RecordBatch:
    return pa.record_batch({"key": keys.astype(np.int64), "value": np.ones(len(keys), np.int64)})


def _all_keys() -> list[pa.RecordBatch]:
    return [_values(part) for part in np.array_split(np.arange(STATE_KEYS), STATE_KEYS // BATCH_ROWS + 1)]


def _wide(folder: Path, times: Iterator[int]) -> Row:
    batches = [_values(np.arange(WIDE_ROWS) % 100)]

    def job(parallelism: int) -> None:
        store = sf.open(str(folder / f"wide-{next(times)}"), durable=False)
        LocalRuntime(store, checkpoint_interval_us=None).run(_totals(batches, parallelism))

    label = "itself at parallelism 8"
    return compare(WIDE, lambda: job(256), lambda: job(8), label=label, budget="≤ 30 ×", rounds=3)


def _checkpoints(folder: Path, times: Iterator[int]) -> list[Row]:
    random = np.random.default_rng(11)
    hot = [random.choice(STATE_KEYS, HOT_KEYS, replace=False) for _ in range(8)]
    busy = [_values(random.choice(keys, BATCH_ROWS)) for keys in hot]
    batches = [*_all_keys(), *(batch for batch in busy for _ in range(HOT_BATCHES // len(busy)))]

    def job(interval_us: int | None) -> None:
        store = sf.open(str(folder / f"state-{next(times)}"), durable=False)
        LocalRuntime(store, checkpoint_interval_us=interval_us).run(_totals(batches, 1))

    label = "without checkpoints but the last"
    with_them, without = (lambda: job(1_000_000)), (lambda: job(None))
    cost = compare(CHECKPOINTS, with_them, without, label=label, budget="≤ 1.1 ×")
    written = _bytes_of_a_delta(folder / f"state-{next(times)}", random) / HOT_KEYS
    ratio = written / CHANGED_BYTES
    against = f"a key and its total: {CHANGED_BYTES} B"
    return [cost, Row(DELTA, f"{written:.0f} B", against, f"{ratio:.1f} ×", "≤ 20 ×")]


def _bytes_of_a_delta(store: Path, random: np.random.Generator) -> float:
    """What a checkpoint behind the first writes on average: segments and manifest."""
    few = [_values(random.choice(STATE_KEYS, HOT_KEYS, replace=False)) for _ in range(DELTAS)]
    options = {"checkpoint_interval_us": None, "checkpoint_rows": HOT_KEYS, "keep": None}
    LocalRuntime(sf.open(str(store), durable=False), **options).run(_totals([*_all_keys(), *few], 1))
    sizes = {
        path: path.stat().st_size for kind in ("segments", "manifests") for path in (store / kind).rglob("*.parquet")
    }
    newest = sorted(path.name[:20] for path in (store / "manifests").iterdir())[-DELTAS:-1]
    return sum(size for path, size in sizes.items() if {path.name[:20], path.parent.name} & {*newest}) / len(newest)


def _bounded(folder: Path, times: Iterator[int], line: str) -> Iterator[Row]:
    what = f"bounded job over Parquet, {ROWS:,} rows, {KEYS:,} keys, 4 checkpoints, parallelism "
    wanted = [parallelism for parallelism in (1, 4) if line in f"{what}{parallelism}"]
    paths = _inputs(folder) if wanted else []
    for parallelism in wanted:

        def job(parallelism: int = parallelism) -> None:
            number = next(times)
            store = sf.open(str(folder / f"store-{number}"), durable=False)
            runtime = LocalRuntime(store, checkpoint_rows=ROWS // 4, checkpoint_interval_us=None)
            runtime.run(_job(paths, folder / f"out-{number}", parallelism))

        def loop() -> None:
            _loop(paths, folder / f"loop-{next(times)}.parquet")

        yield compare(f"{what}{parallelism}", job, loop, label="the same Arrow kernels in a loop", budget="≤ 3 ×")


def measure(line: str = "") -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        times = iter(range(10**6))
        yield from _bounded(folder, times, line)
        if line in WIDE:
            yield _wide(folder, times)
        if any(line in what for what in (CHECKPOINTS, DELTA)):
            yield from _checkpoints(folder, times)
