"""What grows with the number of handles, what with the bytes of the state, and how (docs/scale.md).

Handles: 1,000 to a million, a thousand subtasks to an operator, on a local store. Bytes: 1 MB to
1 GB of one keyed state in four segments. Everything is measured in processes of its own, at the
largest size one for each action; ``python -m benchmarks.bench_scale URL ACTION …`` is such a one.

A million of anything costs more for each than what fits the processor's cache; reading the
manifest's planning columns by pyarrow alone grows so too. So it is measured in turn with every
action. The ratio for handles is how many times reading an action takes at the largest size, against
a tenth of it. For bytes it is the cost per byte; for what reads metadata alone, the plain ratio.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

import stateformat as sf
from benchmarks import plots
from benchmarks.measuring import Row, peak_bytes, seconds
from benchmarks.plots import Point
from benchmarks.scale_stores import many_bytes, many_handles, publish_rescaled, sharing_segments
from stateformat.documents import Holdings, record_document
from stateformat.schema import PLANNING_COLUMNS
from stateformat.validation import validate

SUBTASKS: Final = 1000
OPERATORS: Final = (1, 10, 100, 1000)
STATE_BYTES: Final = (10**6, 10**7, 10**8, 10**9)
BY_HANDLES: Final = ("open", "inspect", "plan", "validate quick", "rescale")
METADATA: Final = ("inspect", "plan", "rescale")
BY_BYTES: Final = ("restore", "validate full")
ROUNDS_MIN, ROUNDS_MAX, SECONDS = 3, 15, 0.5
PICTURE: Final = Path(__file__).parent.parent / "docs" / "scale.png"


measured: dict[str, list[Point]] = {}
"""The points of the last run, by what was varied: ``handles`` and ``bytes``."""


def actions(store: sf.CheckpointStore, scratch: Path) -> dict[str, Callable[[], object]]:
    """What is measured, by name. Each begins with nothing of the checkpoint in memory."""
    numbers = count()

    def opened() -> sf.Checkpoint:
        return store.open()

    def inspected() -> object:
        checkpoint = opened()
        declared = record_document(store.url, checkpoint.record)["states"]
        holdings = Holdings(checkpoint.record, checkpoint.handles)
        return [holdings.document(*pair) for pair in zip(checkpoint.states, declared, strict=True)]

    def planned() -> object:
        checkpoint = opened()
        return checkpoint.plan_restore(checkpoint.graph.at(_others(checkpoint)), to_show=True)

    def rescaled() -> None:
        checkpoint = opened()
        target = sharing_segments(store, scratch / str(next(numbers)))
        publish_rescaled(store, checkpoint, _others(checkpoint), target)

    def restored() -> int:
        checkpoint = opened()
        return sum(
            len(batch) for state in checkpoint.states for batch in checkpoint.read(state.operator, state.name).batches()
        )

    return {
        "open": lambda: opened().handles,
        "inspect": inspected,
        "plan": planned,
        "rescale": rescaled,
        "restore": restored,
        "validate quick": lambda: validate(store.storage, level="quick"),
        "validate full": lambda: validate(store.storage, level="full"),
    }


def _others(checkpoint: sf.Checkpoint) -> int:
    parallelism = checkpoint.graph.operators[0].parallelism
    return parallelism + max(1, parallelism // 5)


def observe(url: str, names: list[str]) -> list[tuple[float, float, int]]:
    """Of each action: its best time, that of reading, and the peak of this process's memory."""
    store = sf.open(url, durable=False)

    def reading() -> None:
        record = store.open().record
        data = pa.BufferReader(store.storage.read(record.manifest.path))
        pq.read_table(data, columns=list(PLANNING_COLUMNS), page_checksum_verification=True)

    found = []
    with tempfile.TemporaryDirectory(prefix="bench-scale-to-") as scratch:
        known = actions(store, Path(scratch))
        for name in names:
            times: list[tuple[float, float]] = []
            while len(times) < ROUNDS_MIN or (len(times) < ROUNDS_MAX and sum(map(sum, times)) < SECONDS):
                times.append((seconds(known[name]), seconds(reading)))
            best = (min(column) for column in zip(*times, strict=True))
            found.append((*best, peak_bytes()))
    return found


def _points(store: sf.CheckpointStore, names: Sequence[str], size: int, *, apart: bool) -> list[Point]:
    points = []
    for group in [[name] for name in names] if apart else [names]:
        command = [sys.executable, "-m", "benchmarks.bench_scale", store.url, *group]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        points += [Point(name, size, *found) for name, found in zip(group, json.loads(done.stdout), strict=True)]
    return points


def by_handles(folder: Path) -> list[Point]:
    points = []
    for operators in OPERATORS:
        store = many_handles(folder / f"handles-{operators}", operators, SUBTASKS)
        handles = store.open().record.totals.handles
        points += _points(store, BY_HANDLES, handles, apart=operators == OPERATORS[-1])
    return points


def by_bytes(folder: Path) -> list[Point]:
    points = []
    for state_bytes in STATE_BYTES:
        store = many_bytes(folder / f"bytes-{state_bytes}", state_bytes)
        stored = store.open().record.totals.bytes
        points += _points(store, (*METADATA, *BY_BYTES), stored, apart=state_bytes == STATE_BYTES[-1])
    return points


def _of_handles(points: list[Point], action: str) -> Row:
    """The largest number of handles against a tenth of it, each beside reading as many."""
    before, last = [point for point in points if point.action == action][-2:]
    ratios = [point.seconds / point.reading for point in (before, last)]
    return Row(
        f"{action}, {plots.magnitude(last.size)} handles",
        f"{last.seconds * 1000:.0f} ms, {ratios[1]:.1f} × reading; {last.peak_bytes / 1e6:.0f} MB of memory",
        f"{plots.magnitude(before.size)} handles: {before.seconds * 1000:.0f} ms, {ratios[0]:.1f} × reading",
        f"{ratios[1] / ratios[0]:.2f} ×",
        "≤ 1.2 ×",
    )


def _of_bytes(points: list[Point], action: str, *, flat: bool) -> Row:
    """The largest state against a tenth of it, per byte; if ``flat``, against the smallest."""
    own = [point for point in points if point.action == action]
    last, before = own[-1], own[0 if flat else -2]
    ratio = last.seconds / before.seconds / (1 if flat else last.size / before.size)
    return Row(
        f"{action}, {plots.magnitude(last.size)} bytes",
        f"{last.seconds * 1000:.0f} ms, {last.peak_bytes / 1e6:.0f} MB of memory",
        f"{plots.magnitude(before.size)} bytes: {before.seconds * 1000:.0f} ms",
        f"{ratio:.2f} × {'' if flat else 'per byte'}".rstrip(),
        "≤ 1.2 ×",
    )


def measure() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        measured["handles"] = by_handles(Path(folder))
        measured["bytes"] = by_bytes(Path(folder))
    return [
        *(_of_handles(measured["handles"], action) for action in BY_HANDLES),
        *(_of_bytes(measured["bytes"], action, flat=True) for action in METADATA),
        *(_of_bytes(measured["bytes"], action, flat=False) for action in BY_BYTES),
    ]


def save() -> str:
    plots.draw(measured["handles"], measured["bytes"], PICTURE)
    return f"The picture in docs/{PICTURE.name} is from this run."


if __name__ == "__main__":
    print(json.dumps(observe(sys.argv[1], sys.argv[2:])))
