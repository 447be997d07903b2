"""What differs between two checkpoints of 5M rows of which 1 % changed, against DuckDB.

The state is that of ``bench_data``: (int64, int64) in a local store by default options. Once the
changes are a delta on top of what the earlier checkpoint has, once everything is written anew. The
other side exports both checkpoints once, and then lets DuckDB read both files and count over a full
outer join. ``python -m benchmarks.bench_diff`` prints the lines alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bench_data import NARROW, ROWS, WIDE, numbers, publish
from benchmarks.measuring import Row, compare
from stateformat.inspecting import diff_checkpoints
from stateformat.reading import Checkpoint, StoreCheckpoint
from stateformat.store import CheckpointStore, open as open_store

CHANGED = ROWS // 100
SQL = """
    select count(*) filter (o.k is null), count(*) filter (n.k is null),
           count(*) filter (o.k is not null and n.k is not null and o.v is distinct from n.v)
    from '{}' o full outer join '{}' n on o.k = n.k
"""


def checkpoints(folder: str) -> dict[str, tuple[Checkpoint, Checkpoint]]:
    """Before and after, by how the changes were written."""
    base = numbers(ROWS, ["v"], 0)
    rng = np.random.default_rng(1)
    rows = np.sort(rng.choice(ROWS, CHANGED, replace=False))
    changed = pa.table({"k": base["k"].take(pa.array(rows)), "v": rng.integers(0, 1 << 40, CHANGED)})
    values = base["v"].to_numpy().copy()
    values[rows] = changed["v"].to_numpy()
    # In another order: that of the keys is nobody's promise.
    whole = pa.table({"k": base["k"], "v": values}).take(pa.array(rng.permutation(ROWS)))
    upserts = changed.append_column("_op", pa.array(np.zeros(CHANGED, np.int8)))
    wide = pa.table({name: pa.array([], pa.int64()) for name in WIDE_COLUMNS})
    found = {}
    for how, table in (("a delta", upserts), ("written anew", whole)):
        store: CheckpointStore = open_store(f"{folder}/{how}", durable=False)
        permit = publish(store, None, {"narrow": base, "wide": wide}, delta=False)
        delta = how == "a delta"
        none = wide.append_column("_op", pa.array([], pa.int8())) if delta else wide
        publish(store, permit, {"narrow": table, "wide": none}, delta=delta)
        found[how] = store.open(1), store.open(2)
    return found


WIDE_COLUMNS = [field.name for field in WIDE.current.fields]


def ours(before: Checkpoint, after: Checkpoint) -> tuple[int, int, int]:
    """Open both anew, as ``ckpt diff`` does, and compare."""
    ends = (StoreCheckpoint(one.storage, one.record) for one in (before, after))
    found = diff_checkpoints(*ends, rows=0)
    [state] = [one.counted for one in found.states if one.name == NARROW.name]
    assert state is not None
    return state.added, state.removed, state.changed


def duck(before: Path, after: Path) -> tuple[int, int, int]:
    with duckdb.connect() as connection:
        found: tuple[int, int, int] = connection.execute(SQL.format(before, after)).fetchall()[0]
        return found


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        for how, (before, after) in checkpoints(folder).items():
            files = []
            for number, checkpoint in enumerate((before, after)):
                files.append(Path(folder) / f"{number}.parquet")
                pq.write_table(checkpoint.state("op", "narrow").table(), files[-1], compression="lz4")
            assert ours(before, after) == duck(*files) == (0, 0, CHANGED)
            yield compare(
                f"`ckpt diff` of {ROWS:,} rows, 1 % changed, {how}",
                lambda before=before, after=after: ours(before, after),  # type: ignore[misc]
                lambda files=files: duck(*files),  # type: ignore[misc]
                label="DuckDB reading both, full outer join",
                budget="≤ 1 ×",
            )


if __name__ == "__main__":
    for row in measure():
        print(row.what, row.ours, row.against, row.ratio, row.cpu_text, row.budget, row.mark, sep=" | ")
