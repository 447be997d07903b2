"""Writes the golden checkpoints of the current format version: run once per version, kept for ever.

``make golden`` writes ``tests/golden/v1/`` anew. Do that before a release only: afterwards the files are what older
writers left behind, and ``test_golden`` proves on every run that they are still read. Each store has beside it
``expected.json``: the rows of every state as plain values, written down when the checkpoint was made.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import stateformat as sf  # noqa: E402
from stores import flights_job, flights_store, rescale_newest  # noqa: E402

VERSION = HERE / "v1"


def plain(value: Any) -> Any:
    """A value as JSON has it: bytes as hexadecimal, the rest as it is."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value if isinstance(value, (str, int, float, bool)) or value is None else str(value)


def rows_of(checkpoint: sf.Checkpoint) -> dict[str, list[Any]]:
    """Every state's rows by ``operator/state/subtask``, in stored order, keyed ones sorted by their text."""
    found: dict[str, list[Any]] = {}
    for state in checkpoint.states:
        parallelism = checkpoint.graph.operator(state.operator).parallelism
        subtasks = [None] if state.mode in (sf.Mode.COORDINATOR, sf.Mode.COMMITTABLES) else range(parallelism)
        for subtask in subtasks:
            rows = [plain(row) for row in checkpoint.read(state.operator, state.name, subtask).table().to_pylist()]
            if state.mode is sf.Mode.KEYED:
                rows.sort(key=lambda row: json.dumps(row, sort_keys=True))
            found[f"{state.operator}/{state.name}/{'-' if subtask is None else subtask}"] = rows
    return found


def main() -> None:
    """Write every golden store and what is expected of it."""
    shutil.rmtree(VERSION, ignore_errors=True)
    flights_store(str(VERSION / "flights"))
    flights_store(str(VERSION / "rescaled"))
    rescale_newest(sf.open(str(VERSION / "rescaled")), 3)
    large = sf.WriteOptions(inline_bytes_max=0, codec="zstd", encoding="plain")
    stopped = sf.open(str(VERSION / "stopped"))
    flights_job().publish(
        stopped, None, options=large, stop=sf.Stop(sf.StopMode.DRAIN, "request-1"), properties={"why": "golden"}
    )
    for folder in sorted(VERSION.iterdir()):
        store = sf.open(str(folder))
        expected = {str(record.checkpoint_id): rows_of(store.open(record.checkpoint_id)) for record in store.history()}
        (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
