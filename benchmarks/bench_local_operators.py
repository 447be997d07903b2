"""Keyed operators in process against the Arrow kernels that a user calls in a loop, batch by batch.

Both sides take the same batches from memory and throw their output away: totals of each key of a
batch as updates, tumbling windows when they end, the first row of each key. The loop keeps tables:
it puts the batch beside them and groups anew (``group_by``), or looks the batch up in them
(``is_in``). Keys are numbers, dense and at random over 64 bits, and text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import stateformat as sf
from benchmarks.measuring import Row, compare
from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import Dataflow, Operator
from stateformat.backends.dataflow.operators.aggregate import Aggregate
from stateformat.backends.dataflow.operators.deduplicate import Deduplicate
from stateformat.backends.dataflow.operators.window import TumblingWindow
from stateformat.backends.local import LocalRuntime

LABEL, BUDGET = "Arrow kernels in a loop", "≤ 3 ×"
WINDOWS = 8
_SECOND_US = 1_000_000
_MIX = 0x9E3779B97F4A7C15


class Size(NamedTuple):
    """How many keys there are, and what comes: every key once, then keys by chance."""

    keys: int
    batch_rows: int
    batches: int
    kind: str = "dense"
    """Keys count from 0; ``spread``: over 64 bits; ``text``: of eleven characters."""

    def __str__(self) -> str:
        kinds = {"dense": "keys", "spread": "keys over 64 bits", "text": "keys of text"}
        return f"{self.keys:,} {kinds[self.kind]}, batches of {self.batch_rows:,} rows"


SIZES = (
    Size(100_000, 65_536, 40),
    Size(5_000_000, 1_000_000, 7),
    Size(100_000, 65_536, 40, "spread"),
    Size(100_000, 65_536, 40, "text"),
)


def _rows(size: Size) -> pa.Table:
    """Every key once, in no order, then keys by chance; time goes on with the rows."""
    random = np.random.default_rng(3)
    count = size.batch_rows * size.batches
    numbers = np.concatenate([random.permutation(size.keys), random.integers(0, size.keys, count - size.keys)])
    keys = pa.array(numbers)
    if size.kind == "spread":
        keys = pa.array((numbers.astype(np.uint64) * np.uint64(_MIX)).view(np.int64))
    elif size.kind == "text":
        keys = pc.binary_join_element_wise("k", pc.utf8_lpad(keys.cast(pa.string()), 10, "0"), "")
    times = np.arange(count) * (WINDOWS * _SECOND_US) // count
    return pa.table({"key": keys, "value": random.integers(0, 100, count), "time": pa.array(times, pa.timestamp("us"))})


def _totals(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch | pa.Table]:
    merges = [("value_sum", "sum"), ("value_count", "sum")]
    names = ["key", "value_sum", "value_count"]
    totals: pa.Table | None = None
    for batch in batches:
        new = pa.Table.from_batches([batch]).group_by("key", use_threads=False)
        grouped = new.aggregate([("value", "sum"), ("value", "count")])
        both = grouped if totals is None else pa.concat_tables([grouped, totals])
        totals = both.group_by("key", use_threads=False).aggregate(merges).rename_columns(names)
        yield totals.slice(0, grouped.num_rows)  # Groups stand in the order of their first rows.


def _windows(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.Table]:
    merges = [("value_sum", "sum"), ("value_count", "sum")]
    names = ["key", "start", "value_sum", "value_count"]
    pending: list[pa.Table] = []
    least = 0
    for batch in batches:
        times = batch.column("time").view(pa.int64())
        starts = pc.multiply(pc.divide(times, _SECOND_US), _SECOND_US)
        table = pa.Table.from_arrays([batch.column("key"), starts, batch.column("value")], ["key", "start", "value"])
        grouped = table.group_by(["key", "start"], use_threads=False)
        pending.append(grouped.aggregate([("value", "sum"), ("value", "count")]))
        watermark = pc.max(times).as_py()
        if watermark >= least + _SECOND_US:
            whole = pa.concat_tables(pending).group_by(["key", "start"], use_threads=False)
            merged = whole.aggregate(merges).rename_columns(names)
            least = watermark // _SECOND_US * _SECOND_US
            ended = pc.less(merged["start"], least)
            yield merged.filter(ended)
            pending = [merged.filter(pc.invert(ended))]
    yield pa.concat_tables(pending).group_by(["key", "start"], use_threads=False).aggregate(merges)


def _first_rows(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.Table]:
    seen: pa.ChunkedArray | None = None
    for batch in batches:
        numbered = pa.Table.from_batches([batch]).append_column("row", pa.array(np.arange(batch.num_rows)))
        first = numbered.group_by("key", use_threads=False).aggregate([("row", "min")])["row_min"]
        once = batch.take(first.combine_chunks())
        if seen is not None:
            once = once.filter(pc.invert(pc.is_in(once.column("key"), value_set=seen)))
        seen = pa.chunked_array([*(seen.chunks if seen is not None else ()), once.column("key")])
        yield once


def _operators() -> dict[str, tuple[Callable[[], Operator], Callable[..., Iterator[object]]]]:
    sums = {"total": ("value", "sum"), "n": ("value", "count")}
    return {
        "aggregate with updates": (lambda: Aggregate("key", sums), _totals),
        "tumbling windows": (lambda: TumblingWindow("key", _SECOND_US, "time", sums), _windows),
        "deduplicate": (lambda: Deduplicate("key"), _first_rows),
    }


def measure(line: str = "") -> Iterator[Row]:
    times = iter(range(10**6))
    with tempfile.TemporaryDirectory() as scratch:
        for size in SIZES:
            for name, (operator, loop) in _operators().items():
                what = f"in process, {name}, {size}"
                if line not in what:
                    continue
                rows = _rows(size)
                batches = rows.combine_chunks().to_batches(max_chunksize=size.batch_rows)

                def job(rows: pa.Table = rows, size: Size = size, operator: Callable[[], Operator] = operator) -> None:
                    flow = Dataflow("operators", parallelism=1)
                    source = MemorySource(rows, batch_rows=size.batch_rows)
                    flow.source(source, uid="rows", event_time="time").key_by("key").apply(operator(), uid="keyed")
                    LocalRuntime(sf.open(str(Path(scratch) / str(next(times))), durable=False)).run(flow)

                def by_hand(
                    batches: list[pa.RecordBatch] = batches, loop: Callable[..., Iterator[object]] = loop
                ) -> None:
                    for _ in loop(batches):
                        pass

                budget = BUDGET if size.kind == "dense" else ""
                yield compare(what, job, by_hand, label=LABEL, budget=budget, rounds=3)
