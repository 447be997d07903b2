"""Checkpoints of other shapes: many columns, many states, lists, texts that repeat.

Each is one keyed operator at parallelism 1 in a local store, by default options. The other side is
raw pyarrow of the same rows and columns, in the same order, the key group among them: *write* is
``pq.write_table(table, path, compression="lz4")``, a file for each state, against writing and
publishing a checkpoint; *restore* is ``pq.read_table`` of each file, against opening the checkpoint
and reading each state as a table; *stream* is ``ParquetFile.iter_batches``, against the same as
batches; *full validation* is held against ``pq.read_table`` as well.

Bytes of texts that repeat are held against ``pq.write_table(table, path)`` by pyarrow's defaults:
Snappy and dictionaries. ``python -m benchmarks shapes --line=lists`` measures one shape alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import stateformat as sf
from benchmarks.measuring import Row, compare
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.reading import rekey
from stateformat.states import value_state
from stateformat.validation import validate

MAX_PARALLELISM = 128
COLUMNS, COLUMN_ROWS = 500, 40_000
STATES, STATE_ROWS = 200, 25_000
LIST_ROWS, TEXT_ROWS = 500_000, 2_000_000
OPERATOR = sf.Operator("op", 1, MAX_PARALLELISM)


@dataclass(frozen=True)
class Shape:
    """States with their rows, in the order of segments."""

    states: dict[str, sf.State]
    tables: dict[str, pa.Table]


def shape(tables: dict[str, pa.Table]) -> Shape:
    """Value states of these tables, whose first column is the key."""
    states, clustered = {}, {}
    for name, table in tables.items():
        fields = {field.name: field.type for field in table.schema}
        keys = {"k": fields.pop("k")}
        states[name] = value_state("op", name, keys=keys, values=fields)
        clustered[name] = rekey(table, states[name], MAX_PARALLELISM, DEFAULT_KEY_HASH)
    return Shape(states, clustered)


def columns() -> Shape:
    rng = np.random.default_rng(0)
    values = {f"v{number}": rng.integers(0, 1 << 40, COLUMN_ROWS) for number in range(1, COLUMNS)}
    table = pa.table({"k": rng.permutation(COLUMN_ROWS), **values})
    return shape({"wide": table})


def states() -> Shape:
    rng = np.random.default_rng(0)
    tables = {
        f"s{number:03}": pa.table({"k": rng.permutation(STATE_ROWS), "v": rng.integers(0, 1 << 40, STATE_ROWS)})
        for number in range(STATES)
    }
    return shape(tables)


def lists() -> Shape:
    """Up to nine numbers a row, and up to four texts."""
    rng = np.random.default_rng(0)
    offsets = [np.append(0, np.cumsum(rng.integers(0, most, LIST_ROWS))).astype(np.int32) for most in (10, 5)]
    numbers = pa.array(rng.integers(0, 1 << 40, offsets[0][-1]))
    texts = pa.array(rng.integers(0, 1_000_000, offsets[1][-1])).cast(pa.string())
    table = {
        "k": pa.array(rng.permutation(LIST_ROWS)),
        "numbers": pa.ListArray.from_arrays(offsets[0], numbers),
        "texts": pa.ListArray.from_arrays(offsets[1], texts),
    }
    return shape({"lists": pa.table(table)})


def texts() -> Shape:
    """A status of 6, a country of 200 and a page of 5,000 different texts."""
    rng = np.random.default_rng(0)
    kinds = {
        "status": ["active", "suspended", "closed", "pending review", "blocked", "archived"],
        "country": [f"country number {number:03}" for number in range(200)],
        "page": [f"/shop/section-{number % 37}/article/{number:05}" for number in range(5000)],
    }
    columns = {
        name: pa.DictionaryArray.from_arrays(
            pa.array(rng.integers(0, len(words), TEXT_ROWS).astype(np.int32)), pa.array(words)
        ).cast(pa.string())
        for name, words in kinds.items()
    }
    table = pa.table({"k": rng.permutation(TEXT_ROWS), **columns})
    return shape({"texts": table})


class Written:
    """Both sides of a shape in a folder."""

    def __init__(self, made: Shape, folder: Path) -> None:
        self.shape, self.folder = made, folder
        self._numbers = count()
        self.store = self.publish()
        self.write_files()

    def publish(self) -> sf.CheckpointStore:
        """A new store with one checkpoint."""
        made = self.shape
        store = sf.open(str(self.folder / f"store-{next(self._numbers)}"), durable=False)
        graph, declared = sf.JobGraph((OPERATOR,)), [*made.states.values()]
        pending = store.begin(job_id="bench", graph=graph, states=declared, parent=None)
        with pending.context.subtask("op", 0) as writer:
            for name, table in made.tables.items():
                writer.write(name, table)
        pending.add(writer)
        pending.publish()
        return store

    def write_files(self) -> None:
        for name, table in self.shape.tables.items():
            pq.write_table(table, self._file(name), compression="lz4")

    def restore(self) -> None:
        self._restored(lambda rows: len(rows.table()))

    def stream(self) -> None:
        self._restored(lambda rows: sum(map(len, rows.batches())))

    def _restored(self, count_of: Callable[[sf.StateRows], int]) -> None:
        checkpoint = sf.open(self.store.url).open()
        for name, table in self.shape.tables.items():
            assert count_of(checkpoint.state("op", name)) == len(table)

    def read_files(self) -> None:
        for name in self.shape.tables:
            pq.read_table(self._file(name))

    def stream_files(self) -> None:
        for name in self.shape.tables:
            with pq.ParquetFile(self._file(name)) as file:
                sum(map(len, file.iter_batches()))

    def validate(self) -> None:
        report = validate(self.store.storage, level="full")
        assert report.ok, report

    def stored_bytes(self) -> int:
        return self.store.open().record.totals.bytes

    def default_bytes(self) -> int:
        """Of the other side by pyarrow's defaults."""
        total = 0
        for name, table in self.shape.tables.items():
            path = self.folder / f"{name}-default.parquet"
            pq.write_table(table, path)
            total += path.stat().st_size
        return total

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.parquet"


def rows_of(name: str, line: str, rounds: int) -> Iterator[Row]:
    """The lines of a shape in whose names ``line`` stands."""
    sides = (
        ("write", Written.publish, Written.write_files, "pq.write_table", "≤ 2 ×"),
        ("restore", Written.restore, Written.read_files, "pq.read_table", "≤ 2 ×"),
        ("stream", Written.stream, Written.stream_files, "iter_batches", "≤ 2 ×"),
        ("full validation", Written.validate, Written.read_files, "pq.read_table", "≤ 4 ×"),
    )
    title, make = SHAPES[name]
    wanted = [side for side in sides if line in f"{title}: {side[0]}"]
    sized = name == "texts" and line in f"{title}: bytes"
    if not (wanted or sized):
        return
    with tempfile.TemporaryDirectory(prefix="bench-shapes-") as folder:
        written = Written(make(), Path(folder))
        for action, ours, theirs, label, budget in wanted:
            both = partial(ours, written), partial(theirs, written)
            yield compare(f"{title}: {action}", *both, label=label, budget=budget, rounds=rounds)
        if sized:
            mine, other = written.stored_bytes(), written.default_bytes()
            figures = (
                f"{mine / 1e6:.1f} MB",
                f"pq.write_table's defaults: {other / 1e6:.1f} MB",
                f"{mine / other:.2f} ×",
            )
            yield Row(f"{title}: bytes", *figures, "≤ 1 ×")


SHAPES: dict[str, tuple[str, Callable[[], Shape]]] = {
    "columns": (f"{COLUMNS} columns of {COLUMN_ROWS:,} rows", columns),
    "states": (f"{STATES} states of {STATE_ROWS:,} rows", states),
    "lists": (f"{LIST_ROWS:,} rows of two lists", lists),
    "texts": (f"{TEXT_ROWS:,} rows of three texts that repeat", texts),
}


def measure(line: str = "", rounds: int = 5) -> Iterator[Row]:
    for name in SHAPES:
        yield from rows_of(name, line, rounds)
