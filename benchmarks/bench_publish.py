"""Publishing into a store with many checkpoints: only two listings of names grow."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

import stateformat as sf
from benchmarks.measuring import Row, compare
from benchmarks.scale_stores import publish_keyed
from stateformat.model import CheckpointId
from stateformat.paths import record_path
from stateformat.record import encode_record

ROWS = pa.table({"key": np.arange(1000), "sum": np.arange(1000)})
MANY, FEW = 10_000, 5


def publisher(folder: Path, kept: int) -> Callable[[], None]:
    """Publishes one more checkpoint into a store that has ``kept`` records."""
    store = sf.open(str(folder), durable=False)
    publish_keyed(store, ROWS, 1, options=None)
    first = store.open().record
    for number in range(2, kept + 1):
        record = replace(first, checkpoint_id=CheckpointId(number))
        (folder / record_path(record.checkpoint_id)).write_bytes(encode_record(record))
    newest = [store.start("bench")]

    def once() -> None:
        newest[0] = publish_keyed(store, ROWS, 1, parent=newest[0], options=None)

    return once


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-publish-") as folder:
        many, few = (publisher(Path(folder) / str(kept), kept) for kept in (MANY, FEW))
        what = f"publish with {MANY:,} records kept"
        return [compare(what, many, few, label=f"with {FEW}", budget="≤ 1.6 ×", rounds=41)]
