"""Rescaling is metadata: it costs the same whatever the size of the state."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

import stateformat as sf
from benchmarks.measuring import Row, compare
from benchmarks.scale_stores import publish_rescaled, sharing_segments

PARALLELISM, GROUPS = 4, 128
GRAPH = sf.JobGraph((sf.Operator("sums", PARALLELISM, GROUPS),))
STATE = sf.value_state("sums", "sum", keys={"key": pa.int64()}, values={"sum": pa.int64()})
OPTIONS = sf.WriteOptions(inline_bytes_max=0, check_unique=False)


def _publish(folder: Path, rows: int) -> sf.CheckpointStore:
    store = sf.open(str(folder), durable=False)
    pending = store.begin(job_id="bench", graph=GRAPH, states=[STATE], parent=None, options=OPTIONS)
    table = pa.table({"key": np.arange(rows), "sum": np.arange(rows)})
    owners = pending.context.owners("sums", "sum", table)
    for subtask in range(PARALLELISM):
        with pending.context.subtask("sums", subtask) as writer:
            writer.write("sum", table.filter(pa.array(owners == subtask)))
        pending.add(writer)
    pending.publish()
    return store


def _rescaler(store: sf.CheckpointStore, spare: Path) -> Callable[[], None]:
    """Everything that a rescale of the newest does but for the last record, which goes to a store of its own each time."""
    times = iter(range(10**6))

    def rescale_once() -> None:
        publish_rescaled(store, store.open(), 6, sharing_segments(store, spare / str(next(times))))

    return rescale_once


def measure() -> list[Row]:
    """One row: 5M rows of state against 50k."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        large = _rescaler(_publish(root / "large", 5_000_000), root / "to-large")
        small = _rescaler(_publish(root / "small", 50_000), root / "to-small")
        return [
            compare(
                "metadata-only rescale 4 → 6 of 5M rows",
                large,
                small,
                label="the same of 50k rows",
                budget="≤ 1.1 ×",
                rounds=41,
            )
        ]
