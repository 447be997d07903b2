"""A Flink savepoint goes on as a job in this process.

    python examples/flink_savepoint_moves.py [--fixture DIR] [--store DIR]

The savepoint is one of the fixtures of the tests, which Flink 2.3 wrote: for each word it has a
count and a sum, a tuple in an aggregating state.

1. ``ckpt import`` makes a checkpoint of it. The tuple's fields become the columns that our operator
   declares, and what the new job has no use for is left out.
2. The job goes on: it counts more words, and prints the totals of the busiest.
3. They must be what Flink said of the savepoint, and what was added. The exit status is 0 only if
   not one total differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import pyarrow as pa

import stateformat
from stateformat.backends.connectors import CollectSink, MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.tools.ckpt.main import main as ckpt

FIXTURE = Path(__file__).resolve().parent.parent / "tests/foreign/fixtures/flink-2.3.0/core-hashmap-canonical"
MORE = pa.table({"word": ["key-5", "key-5", "key-9", "a new word"], "amount": [1.5, 2.5, 0.25, 8.0]})
NAMES = {
    "by-string": "totals",
    "by-string/mean": "by-string/totals",
    "by-string/mean.key": "word",
    "by-string/mean.value.f0": "rows",
    "by-string/mean.value.f1": "sum",
}

Totals = dict[str, tuple[int, float]]
"""By word: how many rows, and their sum."""


def imported(savepoint: Path, store: Path) -> int:
    """Import the one state that the dataflow goes on with; the exit status."""
    others = stateformat.open(savepoint).open()
    drop = [operator.uid for operator in others.graph.operators if operator.uid != "by-string"]
    drop += [f"by-string/{one.name}" for one in others.states if one.operator == "by-string" and one.name != "mean"]
    options = [part for old, new in NAMES.items() for part in ("--map", f"{old}={new}")]
    options += [part for name in drop for part in ("--drop", name)]
    return ckpt(["import", str(savepoint), "--to", str(store), "--job-id", "words", *options])


def dataflow(out: CollectSink, parallelism: int) -> Dataflow:
    """Counts and sums by word."""
    flow = Dataflow("words", parallelism=parallelism)
    words = flow.source(MemorySource(MORE), uid="words")
    totals = {"rows": ("*", "count"), "sum": ("amount", "sum")}
    words.key_by("word").aggregate(totals, emit="end", uid="totals").apply(out, uid="out")
    return flow


def wanted(expected: Path) -> Totals:
    """What Flink said of the savepoint, and what came since."""
    found: Totals = {}
    for line in expected.read_text().splitlines():
        entry = json.loads(line)
        if (entry["operator"], entry["state"]) == ("by-string", "mean"):
            found[entry["key"]] = (entry["value"]["f0"], entry["value"]["f1"])
    for row in MORE.to_pylist():
        count, total = found.get(row["word"], (0, 0.0))
        found[row["word"]] = (count + 1, total + row["amount"])
    return found


def move(savepoint: Path, expected: Path, store: Path, parallelism: int = 3) -> bool:
    """All three steps; whether the totals are right."""
    if imported(savepoint, store):
        return False
    out = CollectSink()
    print(LocalRuntime(stateformat.open(store)).run(dataflow(out, parallelism)).sentence)
    rows = out.table().sort_by([("sum", "descending")]).to_pylist()
    for row in rows[:3]:
        print(f"{row['word']!r}: {row['rows']} rows, {row['sum']} in all")
    right = {row["word"]: (row["rows"], row["sum"]) for row in rows} == wanted(expected)
    print(f"the totals of {len(rows)} words are {'those of Flink and what was added' if right else 'WRONG'}")
    return right


def main() -> int:
    """Run it, in a store that is removed, or in one that stays."""
    parser = argparse.ArgumentParser(description="A Flink savepoint goes on as a job in this process.")
    parser.add_argument("--fixture", type=Path, default=FIXTURE, help="a folder with savepoint/ and expected.jsonl")
    parser.add_argument("--store", type=Path, help="where the checkpoints go, which stay")
    given = parser.parse_args()
    savepoint, expected = given.fixture / "savepoint", given.fixture / "expected.jsonl"
    if given.store is not None:
        return 0 if move(savepoint, expected, given.store) else 1
    with tempfile.TemporaryDirectory() as folder:
        return 0 if move(savepoint, expected, Path(folder) / "store") else 1


if __name__ == "__main__":
    sys.exit(main())
