"""Peak memory of reading, writing, merging, rewriting, validating and exporting 2 GB, whatever the rows and key groups are like.

Every line is a process of its own, so that nothing else counts: it imports what it needs, notes its memory, does the work, and
prints how far its peak was above. ``python -m benchmarks.bench_memory ACTION SHAPE FOLDER`` is that process. Shapes:

- ``narrow``: 100M rows of two int64 columns.
- ``wide``: 20,000 rows of 100 kB of bytes that do not compress; and a delta of 1 % of them.
- ``skewed``: half of the rows are empty, one in a thousand has 2 MB.
- ``hot``: a map of one key with 10M entries under three deltas of 1 %, so one key group has them all (240 MB).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.measuring import Row
from stateformat.errors import CheckpointError
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.model import State
from stateformat.snapshot import SnapshotWriter
from stateformat.states import map_state, value_state
from stateformat.store import open as open_store

BUDGET_MB = 400
SHAPES = ("narrow", "wide", "skewed", "hot")
NARROW_ROWS, WIDE_ROWS, SKEWED_ROWS, HOT_ROWS = 100_000_000, 20_000, 1_000_000, 10_000_000
WIDE_BYTES, SKEWED_BYTES = 100_000, 2_000_000
OPERATOR = Operator(OperatorId("op"), 1, 128)
STATES: dict[str, State] = {
    "narrow": value_state("op", "state", keys={"k": pa.int64()}, values={"v": pa.int64()}),
    "wide": value_state("op", "state", keys={"k": pa.int64()}, values={"v": pa.binary()}),
    "skewed": value_state("op", "state", keys={"k": pa.int64()}, values={"v": pa.binary()}),
    "hot": map_state("op", "state", keys={"k": pa.int64()}, map_key=pa.int64(), values={"v": pa.int64()}),
}


def peak_bytes() -> int:
    """The most memory that this process has had: getrusage would begin with that of the process that started it."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def random_values(sizes: np.ndarray, seed: int) -> pa.Array:
    """Binary values of these lengths that do not compress."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    data = np.random.default_rng(seed).bytes(int(offsets[-1]))
    return pa.Array.from_buffers(pa.binary(), len(sizes), [None, pa.py_buffer(offsets), pa.py_buffer(data)])


def batches(shape: str, share: float = 1) -> Iterator[pa.RecordBatch]:
    """The rows in no order, or the first ``share`` of them with other values."""
    seed = int(share * 100)
    count = int({"narrow": NARROW_ROWS, "wide": WIDE_ROWS, "skewed": SKEWED_ROWS, "hot": HOT_ROWS}[shape] * share)
    step = {"narrow": 1 << 18, "wide": 100, "skewed": 1000, "hot": 1 << 18}[shape]
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
    """As rows of a delta."""
    for batch in rows:
        yield batch.append_column("_op", pa.array(np.zeros(len(batch), np.int8)))


def publish(folder: str, shape: str, *, delta: float | None = None) -> None:
    """Publish the next checkpoint: all rows, or a delta of a share of them."""
    store = open_store(folder, durable=False)
    parent = store.start("bench")
    pending = store.begin(job_id="bench", graph=JobGraph((OPERATOR,)), states=[STATES[shape]], parent=parent)
    with pending.context.subtask("op", 0) as writer:
        writer_of(writer, shape, delta)
    pending.add(writer)
    pending.publish()


def writer_of(writer: SnapshotWriter, shape: str, delta: float | None) -> None:
    """Write the rows as a stream."""
    if delta is None:
        writer.write("state", batches(shape))
    else:
        writer.write("state", with_op(batches(shape, delta)), delta=True)


def write(folder: str, shape: str) -> None:
    """The rows as a stream in no order, with all checks."""
    publish(folder, shape)


def read(folder: str, shape: str) -> None:
    """All rows as a stream."""
    rows = sum(len(batch) for batch in open_store(folder).open().read("op", "state").batches())
    assert rows == {"narrow": NARROW_ROWS, "wide": WIDE_ROWS, "skewed": SKEWED_ROWS, "hot": HOT_ROWS}[shape], rows


def validate(folder: str, _: str) -> None:
    """``validate --level full``."""
    from stateformat.tools.ckpt.main import main

    assert main(["validate", folder, "--level", "full"]) == 0


def compact(folder: str, _: str) -> None:
    """A rewrite in threads that merges the layers."""
    rewritten(folder, None)


def rehash(folder: str, _: str) -> None:
    """A rewrite in threads that deals every key anew."""
    rewritten(folder, 256)


def rewritten(folder: str, max_parallelism: int | None) -> None:
    """Rewrite into an empty store."""
    from stateformat.backends.rewrite import RewriteSpec, rewrite

    store = open_store(folder, durable=False)
    with tempfile.TemporaryDirectory(dir=folder) as target:
        spec = RewriteSpec(max_parallelism=max_parallelism)
        rewrite(store, store.open(), spec, target=open_store(target, durable=False))


def export(folder: str, _: str) -> None:
    """``ckpt export`` to Parquet."""
    exported(folder, "parquet")


def export_lines(folder: str, _: str) -> None:
    """``ckpt export`` to JSON lines."""
    exported(folder, "jsonl")


def exported(folder: str, suffix: str) -> None:
    """Export into a file beside the store, and remove it."""
    from stateformat.tools.ckpt.main import main

    target = Path(folder) / f"rows.{suffix}"
    arguments = ["export", folder, "--operator", "op", "--state", "state", "--to", str(target)]
    assert main(arguments) == 0
    target.unlink()


ACTIONS: dict[str, Callable[[str, str], None]] = {
    "write": write,
    "read": read,
    "validate": validate,
    "compact": compact,
    "rehash": rehash,
    "export": export,
    "export_lines": export_lines,
}
MERGED = {"read": "read, layers merged", "compact": "rewrite, layers merged", "rehash": "rewrite, keys dealt anew"}


def measured(action: str, folder: str, shape: str) -> tuple[float, float]:
    """Megabytes above the start, and seconds, of an action in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_memory", action, shape, folder]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(found[-2]), float(found[-1])


def measure(shapes: tuple[str, ...] = SHAPES) -> Iterator[Row]:
    """A line for every shape and action."""
    for shape in shapes:
        with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
            yield line(shape, "write", folder)
            if shape == "hot":
                yield line(shape, "read", folder)
            for number in range(3 if shape == "hot" else 1 if shape == "wide" else 0):
                publish(folder, shape, delta=0.01 + number / 1e6)
            for action in [*ACTIONS][1:]:
                yield line(shape, action, folder, merged=shape in ("hot", "wide"))


def line(shape: str, action: str, folder: str, *, merged: bool = False) -> Row:
    """One line of the table."""
    above, taken = measured(action, folder, shape)
    what = MERGED.get(action, action) if merged or action == "rehash" else action
    return Row(
        f"peak memory above the start: {shape}, {what}",
        f"{above:.0f} MB",
        f"{taken:.1f} s",
        "–",
        f"≤ {BUDGET_MB} MB",
    )


if __name__ == "__main__":
    import time

    _, action, shape, folder = sys.argv
    if action == "export" or action == "export_lines":
        import stateformat.tools.ckpt.commands.export
    import stateformat.backends.rewrite
    import stateformat.reading.scan
    import stateformat.segments.write  # noqa: F401

    begin, start = peak_bytes(), time.perf_counter()
    try:
        ACTIONS[action](folder, shape)
    except CheckpointError as error:
        sys.exit(f"{action} of {shape}: {error}")
    print(f"{(peak_bytes() - begin) / 1e6:.0f} {time.perf_counter() - start:.2f}")
