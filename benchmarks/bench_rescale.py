"""Rescaling is metadata: it costs the same whatever the size of the state."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

import stateformat as sf
from benchmarks.measuring import Row, compare
from benchmarks.scale_stores import publish_keyed, publish_rescaled, sharing_segments


def _publish(folder: Path, rows: int) -> sf.CheckpointStore:
    store = sf.open(str(folder), durable=False)
    publish_keyed(store, pa.table({"key": np.arange(rows), "sum": np.arange(rows)}), 4)
    return store


def _rescaler(store: sf.CheckpointStore, spare: Path) -> Callable[[], None]:
    times = iter(range(10**6))

    def rescale_once() -> None:
        publish_rescaled(store, store.open(), 6, sharing_segments(store, spare / str(next(times))))

    return rescale_once


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        large = _rescaler(_publish(root / "large", 5_000_000), root / "to-large")
        small = _rescaler(_publish(root / "small", 50_000), root / "to-small")
        what, label = "metadata-only rescale 4 → 6 of 5M rows", "the same of 50k rows"
        return [compare(what, large, small, label=label, budget="≤ 1.1 ×", rounds=41)]
