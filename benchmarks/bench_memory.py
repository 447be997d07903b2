"""Peak memory of reading, writing, merging, rewriting, validating and exporting 1 GB.

Every line is a process of its own, ``python -m benchmarks.bench_memory ACTION SHAPE FOLDER``: it
imports what it needs, notes its memory, does the work, and prints how far its peak was above.
``python -m benchmarks memory --line=wide`` measures one shape. Shapes:

- ``narrow``: 50M rows of two int64 columns.
- ``wide``: 10,000 rows of 100 kB of bytes that do not compress; and a delta of 1 % of them.
- ``skewed``: half of the rows are empty, one in a thousand has 2 MB.
- ``hot``: a map of one key with 5M entries under three deltas of 1 % (120 MB).

With ``--full`` there are twice as many rows. What is bounded is so for either.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.measuring import Row, peak_bytes
from stateformat.errors import CheckpointError
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.model import State
from stateformat.states import map_state, value_state
from stateformat.store import open as open_store

BUDGET_MB = 400
SHAPES = ("narrow", "wide", "skewed", "hot")
TIMES = "BENCH_MEMORY_TIMES"
"""How many times as many rows there are, for the processes of the lines."""
_ROWS = {"narrow": 50_000_000, "wide": 10_000, "skewed": 500_000, "hot": 5_000_000}
ROWS = {shape: rows * int(os.environ.get(TIMES, "1")) for shape, rows in _ROWS.items()}
BATCH_ROWS = {"narrow": 1 << 18, "wide": 100, "skewed": 1000, "hot": 1 << 18}
WIDE_BYTES, SKEWED_BYTES = 100_000, 2_000_000
OPERATOR = Operator(OperatorId("op"), 1, 128)
STATES: dict[str, State] = {
    "narrow": value_state("op", "state", keys={"k": pa.int64()}, values={"v": pa.int64()}),
    "wide": value_state("op", "state", keys={"k": pa.int64()}, values={"v": pa.binary()}),
    "skewed": value_state("op", "state", keys={"k": pa.int64()}, values={"v": pa.binary()}),
    "hot": map_state("op", "state", keys={"k": pa.int64()}, map_key=pa.int64(), values={"v": pa.int64()}),
}


def random_values(sizes: np.ndarray, seed: int) -> pa.Array:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    data = np.random.default_rng(seed).bytes(int(offsets[-1]))
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def batches(shape: str, share: float = 1) -> Iterator[pa.RecordBatch]:
    seed = int(share * 100)
    count = int(ROWS[shape] * share)
    step = BATCH_ROWS[shape]
    for start in range(0, count, step):
        numbers = np.arange(start, min(start + step, count))
        rng = np.random.default_rng(start + seed)
        if shape == "wide":
            yield pa.record_batch({"k": numbers, "v": random_values(np.full(len(numbers), WIDE_BYTES), start + seed)})
        elif shape == "skewed":
            sizes = np.where(numbers % 1000 == 7, SKEWED_BYTES, np.where(numbers % 2, 20, 0))
            yield pa.record_batch({"k": numbers, "v": random_values(sizes, start + seed)})
        elif shape == "narrow":
            yield pa.record_batch({"k": numbers, "v": rng.integers(0, 1 << 40, len(numbers))})
        else:
            values = rng.integers(0, 1 << 40, len(numbers))
            yield pa.record_batch({"k": np.zeros(len(numbers), np.int64), "_map_key": numbers, "v": values})


def with_op(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in rows:
        yield batch.append_column("_op", pa.array(np.zeros(len(batch), np.int8)))


def publish(folder: str, shape: str, *, delta: float | None = None) -> None:
    store = open_store(folder, durable=False)
    parent = store.start("bench")
    pending = store.begin(job_id="bench", graph=JobGraph((OPERATOR,)), states=[STATES[shape]], parent=parent)
    with pending.context.subtask("op", 0) as writer:
        if delta is None:
            writer.write("state", batches(shape))
        else:
            writer.write("state", with_op(batches(shape, delta)), delta=True)
    pending.add(writer)
    pending.publish()


def read(folder: str, shape: str) -> None:
    rows = sum(len(batch) for batch in open_store(folder).open().read("op", "state").batches())
    assert rows == ROWS[shape], rows


def select(folder: str, shape: str) -> None:
    """One column, through the Arrow C stream."""
    rows = open_store(folder).open().state("op", "state").select(["k"])
    count = sum(len(batch) for batch in pa.RecordBatchReader.from_stream(rows))
    assert count == ROWS[shape], count


def one_key(folder: str, shape: str) -> None:
    rows = open_store(folder).open().state("op", "state").at_keys({"k": 0})
    count = sum(len(batch) for batch in rows.batches())
    assert count == (ROWS[shape] if shape == "hot" else 1), count


def validate(folder: str, _: str) -> None:
    from stateformat.tools.ckpt.main import main

    assert main(["validate", folder, "--level", "full"]) == 0


def changes(folder: str, _: str) -> None:
    store = open_store(folder)
    newest = store.open().id
    assert sum(len(batch) for batch in store.changes("op", "state", 1, newest).batches())


def diff(folder: str, _: str) -> None:
    from stateformat.inspecting import diff_checkpoints

    store = open_store(folder)
    found = diff_checkpoints(store.open(1), store.open())
    assert not found.same


def marked(rows: pa.Table) -> pa.Table:
    """What a user's function may do: drop rows, and add a column."""
    rows = rows.filter(pc.not_equal(rows["k"], -1))
    return rows.append_column("mark", pa.array(np.zeros(len(rows), np.int64)))


def rewritten(max_parallelism: int | None, function: Any = None) -> Callable[[str, str], None]:
    """A rewrite in threads into an empty store; keys are hashed anew if it is given, and a function
    applied.
    """

    def action(folder: str, _: str) -> None:
        from stateformat.backends.rewrite import RewriteSpec, Transform, rewrite

        store = open_store(folder, durable=False)
        with tempfile.TemporaryDirectory(dir=folder) as target:
            transforms = {("op", "state"): Transform(function)} if function else {}
            spec = RewriteSpec(max_parallelism=max_parallelism, transforms=transforms)
            rewrite(store, store.open(), spec, target=open_store(target, durable=False))

    return action


def exported(suffix: str) -> Callable[[str, str], None]:

    def action(folder: str, _: str) -> None:
        from stateformat.tools.ckpt.main import main

        target = Path(folder) / f"rows.{suffix}"
        assert main(["export", folder, "--operator", "op", "--state", "state", "--to", str(target)]) == 0
        target.unlink()

    return action


def exported_table(file_format: str) -> Callable[[str, str], None]:
    """A table of Iceberg or Delta, in files of up to 128 MiB."""

    def action(folder: str, _: str) -> None:
        from stateformat.tools.ckpt.main import main

        with tempfile.TemporaryDirectory(dir=folder) as target:
            state = ["--operator", "op", "--state", "state", "--as", file_format, "--to", target]
            assert main(["export", folder, *state]) == 0

    return action


ACTIONS: dict[str, Callable[[str, str], None]] = {
    "write": publish,
    "read": read,
    "select": select,
    "one_key": one_key,
    "validate": validate,
    "compact": rewritten(None),
    "rehash": rewritten(256),
    "transform": rewritten(None, marked),
    "export": exported("parquet"),
    "export_lines": exported("jsonl"),
    "changes": changes,
    "diff": diff,
    "iceberg": exported_table("iceberg"),
    "delta": exported_table("delta"),
}
DELTAS = {
    f"delta-{number}": lambda folder, shape, share=0.01 + number / 1e6: publish(folder, shape, delta=share)
    for number in range(3)
}
MERGED = {
    "read": "read, layers merged",
    "select": "one column, layers merged",
    "one_key": "one key, layers merged",
    "compact": "rewrite, layers merged",
    "rehash": "rewrite, keys dealt anew",
    "transform": "rewrite with a function, layers merged",
    "changes": "changes since checkpoint 1",
    "diff": "diff against checkpoint 1",
}


def measured(action: str, folder: str, shape: str) -> tuple[float, float]:
    """Megabytes above the start, and seconds, of an action in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_memory", action, shape, folder]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(found[-2]), float(found[-1])


def measure(full: bool = False, line: str = "") -> Iterator[Row]:
    if full:
        os.environ[TIMES] = "2"
    for shape in [shape for shape in SHAPES if shape in line] or SHAPES:
        with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
            yield peak_of(shape, "write", folder)
            if shape == "hot":
                yield peak_of(shape, "read", folder)
            for number in range(3 if shape == "hot" else 1 if shape == "wide" else 0):
                measured(f"delta-{number}", folder, shape)
            layered = shape in ("hot", "wide")
            for action in [
                name for name in ACTIONS if name != "write" and (layered or name not in ("changes", "diff"))
            ]:
                yield peak_of(shape, action, folder, merged=layered)


def peak_of(shape: str, action: str, folder: str, *, merged: bool = False) -> Row:
    above, taken = measured(action, folder, shape)
    what = MERGED.get(action, action) if merged or action == "rehash" else action
    title = f"peak memory above the start: {shape}, {what}"
    return Row(title, f"{above:.0f} MB", f"{taken:.1f} s", "–", f"≤ {BUDGET_MB} MB")


if __name__ == "__main__":
    import time

    _, action, shape, folder = sys.argv
    if action in ("export", "export_lines", "iceberg", "delta"):
        import stateformat.tools.ckpt.commands.looking.export
    if action == "iceberg":
        import stateformat.backends.exporting.iceberg
    if action == "delta":
        import stateformat.backends.exporting.delta
    import stateformat.backends.rewrite
    import stateformat.inspecting.diff
    import stateformat.inspecting.over_time
    import stateformat.reading.scan
    import stateformat.segments.write  # noqa: F401

    begin, start = peak_bytes(), time.perf_counter()
    try:
        (ACTIONS | DELTAS)[action](folder, shape)
    except CheckpointError as error:
        sys.exit(f"{action} of {shape}: {error}")
    print(f"{(peak_bytes() - begin) / 1e6:.0f} {time.perf_counter() - start:.2f}")
