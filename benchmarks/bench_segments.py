"""Writing and restoring keyed state against plain Parquet of the same rows, bytes read, and memory.

5M (int64, int64) rows in one local store, by default options. The other side is
``pq.write_table(table, path, compression="lz4")`` of the same rows and columns (the key group is
one), and reading that file. Nothing is synced unless the line says so. ``python -m
benchmarks.bench_segments PATH`` reads a state as a stream and prints its peak of memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import Row, compare, peak_bytes
from benchmarks.scale_stores import Metered
from stateformat.backends.storage.local import LocalStorage
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.keys import DEFAULT_KEY_HASH, range_bounds
from stateformat.manifest import Manifest, handles_table
from stateformat.model import (
    AttemptId,
    CheckpointId,
    CheckpointKind,
    Handle,
    JobId,
    ManifestRef,
    Record,
    Totals,
)
from stateformat.reading import rekey
from stateformat.reading.scan import SliceReader
from stateformat.schema import MANIFEST_SCHEMA, SLICE_SCHEMA
from stateformat.segments import SegmentPlace, WriteOptions, write_segment
from stateformat.states import declare

ROWS = 5_000_000
LARGE_ROWS = 128_000_000
MAX_PARALLELISM = 128
STATE = declare.value_state("op", "counts", keys={"k": pa.int64()}, values={"v": pa.int64()})
OPERATOR = Operator(OperatorId("op"), 1, MAX_PARALLELISM, key_hash="spark-murmur3-seed42")
RECORD = Record(
    checkpoint_id=CheckpointId(1),
    attempt_id=AttemptId("0" * 32),
    kind=CheckpointKind.CHECKPOINT,
    job_id=JobId("job"),
    graph=JobGraph((OPERATOR,)),
    states=(STATE,),
    manifest=ManifestRef("manifests/m.parquet", 0, "", 0),
    totals=Totals(),
    created_at_us=0,
)
DEFAULT, FAST = WriteOptions(), WriteOptions(check_unique=False, trust_key_groups=True)
UNCHECKED = "key groups and unique keys not verified"


def place(layer: int = 0) -> SegmentPlace:
    return SegmentPlace(RECORD.job_id, RECORD.checkpoint_id, RECORD.attempt_id, OPERATOR, STATE, 0, layer, 1)


def rows(count: int = ROWS) -> pa.Table:
    rng = np.random.default_rng(0)
    return pa.table({"k": rng.permutation(count).astype(np.int64), "v": rng.integers(0, 1 << 40, count)})


def slices_of(handles: list[Handle], groups: tuple[int, int] = (0, MAX_PARALLELISM - 1)) -> pa.Table:
    found = []
    for number, handle in enumerate(handles):
        counts = np.asarray(handle.rows_per_group)
        numbers = np.arange(len(counts)) + (handle.first_group or 0)
        before, mine = numbers < groups[0], (numbers >= groups[0]) & (numbers <= groups[1])
        if counts[mine].sum():
            start, count = int(counts[before].sum()), int(counts[mine].sum())
            found.append(("op", "counts", "keyed", 0, handle.layer, number, start, count, *groups, 0))
    columns = zip(*found, strict=True)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SLICE_SCHEMA, strict=True)], schema=SLICE_SCHEMA)


def restore(storage: LocalStorage, handles: list[Handle], slices: pa.Table) -> Iterator[pa.RecordBatch]:
    return SliceReader(storage, RECORD, Manifest(handles_table(handles)), slices).batches()


def write_rows(storage: LocalStorage, table: pa.Table) -> list[Row]:
    clustered = rekey(table, STATE, MAX_PARALLELISM, DEFAULT_KEY_HASH)
    synced = LocalStorage(_root(storage))

    def ours(data: pa.Table, options: WriteOptions = DEFAULT, to: LocalStorage = storage) -> None:
        handle = write_segment(to, place(), data, options)
        to.delete([handle.path or ""])

    def reference(sync: bool = False) -> None:
        path = _reference(storage, clustered)
        if sync:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        path.unlink()

    label = "pq.write_table"
    written = partial(compare, against=reference, label=label)
    return [
        written("write 5M clustered rows", lambda: ours(clustered), budget="≤ 1.3 ×"),
        written("write 5M unordered rows", lambda: ours(table), budget="≤ 2 ×"),
        compare(
            "write 5M clustered rows, synced as a store does by default",
            lambda: ours(clustered, to=synced),
            lambda: reference(sync=True),
            label=f"{label} and fsync",
            budget="–",
        ),
        written(f"write 5M clustered rows, {UNCHECKED}", lambda: ours(clustered, FAST), budget="–"),
        written(f"write 5M unordered rows, {UNCHECKED}", lambda: ours(table, FAST), budget="–"),
    ]


def _root(storage: LocalStorage) -> str:
    return storage.url.removeprefix("file://")


def _reference(storage: LocalStorage, table: pa.Table) -> Path:
    path = Path(_root(storage)) / "reference.parquet"
    pq.write_table(table, path, compression="lz4")
    return path


def restore_rows(storage: LocalStorage, table: pa.Table) -> list[Row]:
    """Restoring the same rows; and with a delta of a fiftieth of them on top."""
    base = write_segment(storage, place(), table, DEFAULT)
    path = _reference(storage, rekey(table, STATE, MAX_PARALLELISM, DEFAULT_KEY_HASH))
    delta = table.slice(0, len(table) // 50).append_column("_op", pa.array(np.zeros(len(table) // 50, np.int8)))
    layers = [base, write_segment(storage, place(1), delta, DEFAULT)]
    one, both = slices_of([base]), slices_of(layers)
    read = partial(compare, against=lambda: pq.read_table(path), label="pq.read_table")
    found = [
        read("restore 5M rows", lambda: list(restore(storage, [base], one)), budget="≤ 1.10 ×"),
        read("restore 5M rows under a delta of 100,000", lambda: list(restore(storage, layers, both)), budget="–"),
    ]
    path.unlink()
    storage.delete([handle.path or "" for handle in layers])
    return found


def restore_bytes(storage: LocalStorage, table: pa.Table) -> list[Row]:
    """Bytes that six new subtasks read of what four have written, against the data's."""
    clustered = rekey(table, STATE, MAX_PARALLELISM, DEFAULT_KEY_HASH)
    groups = clustered["_key_group"].to_numpy()
    handles = []
    for first, end in pairwise(range_bounds(4, MAX_PARALLELISM)):
        start, stop = np.searchsorted(groups, [first, end])
        handles.append(write_segment(storage, place(), clustered.slice(start, stop - start), FAST))
    counting = Metered(_root(storage), f"{_root(storage)}/reads")
    restored = 0
    for first, end in pairwise(range_bounds(6, MAX_PARALLELISM).tolist()):
        restored += sum(map(len, restore(counting, handles, slices_of(handles, (first, end - 1)))))
    assert restored == len(table)
    bytes_read = counting.bytes_read()
    data_bytes = sum(handle.size_bytes - handle.footer_bytes for handle in handles)
    storage.delete([handle.path or "" for handle in handles])
    return [
        Row(
            "bytes read to restore 5M rows at 4 → 6",
            f"{bytes_read / 1e6:.1f} MB",
            f"their data: {data_bytes / 1e6:.1f} MB",
            f"{bytes_read / data_bytes:.3f} ×",
            "≤ 1.05 ×",
        )
    ]


def stream_memory(storage: LocalStorage, count: int = LARGE_ROWS) -> list[Row]:
    batch_rows = 1 << 17

    def batches() -> Iterator[pa.RecordBatch]:
        rng = np.random.default_rng(0)
        for start in range(0, count, batch_rows):
            numbers = np.arange(start, min(start + batch_rows, count))
            groups = pa.array((numbers * MAX_PARALLELISM // count).astype(np.int32))
            yield pa.record_batch({"_key_group": groups, "k": numbers, "v": rng.integers(0, 1 << 40, len(numbers))})

    handle = write_segment(storage, place(), batches(), FAST)
    root = Path(_root(storage))
    pq.write_table(handles_table([handle]), root / "handles.parquet")
    command = [sys.executable, "-m", "benchmarks.bench_segments", str(root)]
    peak = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    storage.delete([handle.path or ""])
    return [Row("peak memory of restoring 2 GB as a stream", f"{peak / 1e6:.0f} MB", "–", "–", "≤ 400 MB")]


def read_as_stream(root: str) -> int:
    """Read all rows under ``root`` as a stream; the peak of this process's memory in bytes."""
    fields = pq.read_table(f"{root}/handles.parquet", schema=MANIFEST_SCHEMA).to_pylist()
    handles = [Handle(**row) for row in fields]
    total = sum(map(len, restore(LocalStorage(root), handles, slices_of(handles))))
    assert total == sum(handle.rows for handle in handles)
    return peak_bytes()


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-segments-") as folder:
        storage = LocalStorage(folder, durable=False)
        table = rows()
        return [
            *write_rows(storage, table),
            *restore_rows(storage, table),
            *restore_bytes(storage, table),
            *stream_memory(storage),
        ]


if __name__ == "__main__":
    print(read_as_stream(sys.argv[1]))
