"""A program: bootstrap a stream larger than memory should hold. Prints MB above the start.

``python -m tests.truth.bootstrap_shapes SHAPE FOLDER``
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stateformat.backends import dataflow as df
from stateformat.backends.bootstrap import Rows, bootstrap
from stateformat.backends.connectors import MemorySource
from stateformat.errors import InvalidState
from stateformat.store import open as open_store

ROWS, BATCH = 30_000_000, 500_000
KEY, VALUE = {"k": pa.int64()}, {"v": pa.int64()}


class Keeper(df.Operator):
    """A state for each shape."""

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        return [
            df.ValueState("value", KEY, VALUE),
            df.ValueState("text", KEY, {"v": pa.string()}),
            df.ListState("list", KEY, VALUE),
            df.UnionList("union", VALUE),
            df.BroadcastState("broadcast", VALUE),
        ]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return None


def stream(make: Callable[[int, int], dict[str, Any]], rows: int = ROWS, batch: int = BATCH) -> pa.RecordBatchReader:
    """Generate rows in batches: ``make`` gets the number of the first row and the count."""
    first = pa.record_batch(make(0, 1))
    parts = (pa.record_batch(make(at, min(batch, rows - at))) for at in range(0, rows, batch))
    return pa.RecordBatchReader.from_batches(first.schema, parts)


def spread(first: int, count: int) -> Any:
    """Return numbers in no order, each once."""
    return np.arange(first, first + count, dtype=np.int64) * 2654435761 % 2**40


def numbers(first: int, count: int) -> Any:
    return np.arange(first, first + count, dtype=np.int64)


def one(first: int, count: int) -> Any:
    """One key."""
    return np.zeros(count, np.int64)


SHAPES: dict[str, tuple[str, Callable[[], Any]]] = {
    "narrow": ("value", lambda: stream(lambda i, n: {"k": spread(i, n), "v": numbers(i, n)})),
    "wide": ("text", lambda: stream(lambda i, n: {"k": numbers(i, n), "v": ["x" * 100_000] * n}, 20_000, 200)),
    "last": ("value", lambda: Rows(stream(lambda i, n: {"k": spread(i, n) % 10_000_000, "v": numbers(i, n), "at":
             numbers(i, n)}), "at", "last")),
    "last of one key": ("value", lambda: Rows(stream(lambda i, n: {"k": one(i, n), "v": numbers(i, n), "at":
                        numbers(i, n)}), "at", "last")),
    "one key": ("value", lambda: stream(lambda i, n: {"k": one(i, n), "v": numbers(i, n)})),
    "list of one key": ("list", lambda: stream(lambda i, n: {"k": one(i, n), "v": numbers(i, n)})),
    "list in order": ("list", lambda: Rows(stream(lambda i, n: {"k": one(i, n), "v": numbers(i, n), "at":
                      spread(i, n)}), "at")),
    "union": ("union", lambda: stream(lambda i, n: {"v": numbers(i, n)})),
    "broadcast": ("broadcast", lambda: stream(lambda i, n: {"v": numbers(i, n)}, ROWS // 2)),
}  # fmt: skip


def flow() -> df.Dataflow:
    made = df.Dataflow("memory", parallelism=4)
    rows = made.source(MemorySource(pa.schema(KEY).empty_table()), uid="rows")
    rows.key_by("k").apply(Keeper(), uid="keeper")
    return made


def peak_mb() -> float:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def main() -> None:
    shape, folder = sys.argv[1:]
    bootstrap("memory://warm", flow(), {"keeper/value": pa.table({"k": [1], "v": [2]})})
    start = peak_mb()
    state, make = SHAPES[shape]
    try:
        bootstrap(open_store(folder, durable=False), flow(), {f"keeper/{state}": make()})
    except InvalidState as error:
        print(error)
    print(round(peak_mb() - start))


if __name__ == "__main__":
    main()
