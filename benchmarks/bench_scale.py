"""What grows with the number of handles, what with the bytes of the state, and how: linear or better (docs/scale.md).

Handles: 1,000 to a million, a thousand subtasks to an operator, on a local store (``scale_stores.many_handles``). Bytes: 1 MB to
1 GB of one keyed state in four segments. Everything is measured in processes of its own, so that the peak of the memory is
that of one action; ``python -m benchmarks.bench_scale URL ACTION ROUNDS`` is what they run. The ratio is that of the cost per
handle, or per byte, at the largest size against a tenth of it; for what reads metadata alone the plain ratio of the times.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final, NamedTuple

import stateformat as sf
from benchmarks import plots
from benchmarks.measuring import Row, seconds
from benchmarks.scale_stores import many_bytes, many_handles, publish_rescaled
from stateformat.validation import validate
from tools.ckpt.describe import Holdings, record_document

SUBTASKS: Final = 1000
OPERATORS: Final = (1, 10, 100, 1000)
STATE_BYTES: Final = (10**6, 10**7, 10**8, 10**9)
BY_HANDLES: Final = ("open", "inspect", "plan", "validate quick", "rescale")
METADATA: Final = ("inspect", "plan", "rescale")
BY_BYTES: Final = ("restore", "validate full")
PICTURE: Final = Path(__file__).parent.parent / "docs" / "scale.png"


class Point(NamedTuple):
    """One action at one size: the best time of some rounds, and the peak of the memory of its process."""

    action: str
    size: int
    seconds: float
    peak_bytes: int


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
        return checkpoint.plan_restore(checkpoint.graph.at(_others(checkpoint)))

    def rescaled() -> None:
        checkpoint = opened()
        target = sf.open(str(scratch / str(next(numbers))), durable=False)
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
    """Another parallelism, by a fifth greater or so."""
    parallelism = checkpoint.graph.operators[0].parallelism
    return parallelism + max(1, parallelism // 5)


def observe(url: str, action: str, rounds: int) -> tuple[float, int]:
    """The best time of some rounds after a first one, and the peak of this process's memory in bytes."""
    with tempfile.TemporaryDirectory(prefix="bench-scale-to-") as scratch:
        act = actions(sf.open(url, durable=False), Path(scratch))[action]
        best = min(seconds(act) for _ in range(rounds + 1))
    # Of this process alone: what getrusage says begins with the memory of the process that started it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return best, int(status["VmHWM"].split()[0]) * 1024


def _point(store: sf.CheckpointStore, action: str, size: int, rounds: int) -> Point:
    command = [sys.executable, "-m", "benchmarks.bench_scale", store.url, action, str(rounds)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Point(action, size, *json.loads(done.stdout))


def by_handles(folder: Path) -> list[Point]:
    """Every action at every number of handles."""
    points = []
    for operators in OPERATORS:
        store = many_handles(folder / f"handles-{operators}", operators, SUBTASKS)
        handles = store.open().record.totals.handles
        points += [_point(store, action, handles, 2 if operators > 100 else 5) for action in BY_HANDLES]
    return points


def by_bytes(folder: Path) -> list[Point]:
    """Every action at every size of the state, as it is stored."""
    points = []
    for state_bytes in STATE_BYTES:
        store = many_bytes(folder / f"bytes-{state_bytes}", state_bytes)
        stored = store.open().record.totals.bytes
        points += [_point(store, action, stored, 15) for action in METADATA]
        points += [_point(store, action, stored, 2 if state_bytes > 10**8 else 5) for action in BY_BYTES]
    return points


def _row(points: list[Point], action: str, unit: str, *, flat: bool) -> Row:
    """The largest size against a tenth of it, per handle or byte; or, where nothing should grow, against the smallest."""
    own = [point for point in points if point.action == action]
    last, before = own[-1], own[0 if flat else -2]
    ratio = last.seconds / before.seconds / (1 if flat else last.size / before.size)
    return Row(
        f"{action}, {plots.magnitude(last.size)} {unit}",
        f"{last.seconds * 1000:.0f} ms, {last.peak_bytes / 1e6:.0f} MB of memory",
        f"{plots.magnitude(before.size)} {unit}: {before.seconds * 1000:.0f} ms",
        f"{ratio:.2f} × {'' if flat else f'per {unit[:-1]}'}".rstrip(),
        "≤ 1.2 ×",
    )


def measure() -> list[Row]:
    """A row for each action; the points are kept for :func:`save`."""
    with tempfile.TemporaryDirectory(prefix="bench-scale-") as folder:
        measured["handles"] = by_handles(Path(folder))
        measured["bytes"] = by_bytes(Path(folder))
    return [
        *(_row(measured["handles"], action, "handles", flat=False) for action in BY_HANDLES),
        *(_row(measured["bytes"], action, "bytes", flat=True) for action in METADATA),
        *(_row(measured["bytes"], action, "bytes", flat=False) for action in BY_BYTES),
    ]


def save() -> str:
    """Draw the points of the last run, and say where the picture is."""
    plots.draw(measured["handles"], measured["bytes"], PICTURE)
    return f"The picture in docs/{PICTURE.name} is from this run."


if __name__ == "__main__":
    print(json.dumps(observe(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
