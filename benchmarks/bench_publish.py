"""Publishing into a store that keeps many checkpoints: what is left to grow are two listings of their names."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

import stateformat as sf
from benchmarks.measuring import Row, compare
from stateformat.model import CheckpointId
from stateformat.paths import record_path
from stateformat.record import encode_record

GRAPH = sf.JobGraph((sf.Operator("sums", 1, 128),))
STATE = sf.value_state("sums", "sum", keys={"key": pa.int64()}, values={"sum": pa.int64()})
ROWS = pa.table({"key": np.arange(1000), "sum": np.arange(1000)})
MANY, FEW = 10_000, 5


def publish(store: sf.CheckpointStore, parent: sf.CommitPermit | None) -> sf.CommitPermit:
    """Publish a checkpoint of a thousand rows."""
    pending = store.begin(job_id="bench", graph=GRAPH, states=[STATE], parent=parent)
    with pending.context.subtask("sums", 0) as writer:
        writer.write("sum", ROWS)
    pending.add(writer)
    return pending.publish()


def publisher(folder: Path, kept: int) -> Callable[[], None]:
    """What publishes one more checkpoint into a store that has ``kept`` records, all of the same state."""
    store = sf.open(str(folder), durable=False)
    publish(store, None)
    first = store.open().record
    for number in range(2, kept + 1):
        (folder / record_path(CheckpointId(number))).write_bytes(
            encode_record(replace(first, checkpoint_id=CheckpointId(number)))
        )
    newest = [store.start("bench")]

    def once() -> None:
        newest[0] = publish(store, newest[0])

    return once


def measure() -> list[Row]:
    """One row."""
    with tempfile.TemporaryDirectory(prefix="bench-publish-") as folder:
        many, few = (publisher(Path(folder) / str(kept), kept) for kept in (MANY, FEW))
        label = f"with {FEW}"
        what = f"publish with {MANY:,} records kept"
        return [compare(what, many, few, label=label, budget="≤ 1.6 ×", rounds=41)]
