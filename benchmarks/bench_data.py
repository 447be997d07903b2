"""State as data: a key, some columns, and a query over merged rows, warm.

One state of 5M (int64, int64) rows with two deltas on top, and one of 1M rows of twelve columns, in
a local store by default options. ``python -m benchmarks.bench_data`` prints the lines alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import Row, compare
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.keys import hash_keys, key_groups, subtask_of_key_group
from stateformat.reading import StateRows
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store

ROWS = 5_000_000
WIDE_ROWS = 1_000_000
PARALLELISM, MAX_PARALLELISM = 4, 128
OPERATOR = Operator(OperatorId("op"), PARALLELISM, MAX_PARALLELISM)
NARROW = declare.value_state("op", "narrow", keys={"k": pa.int64()}, values={"v": pa.int64()})
VALUES = [f"v{number}" for number in range(11)]
WIDE = declare.value_state("op", "wide", keys={"k": pa.int64()}, values=dict.fromkeys(VALUES, pa.int64()))


def numbers(count: int, names: list[str], seed: int, step: int = 1) -> pa.Table:
    rng = np.random.default_rng(seed)
    keys = rng.permutation(np.arange(0, count * step, step, dtype=np.int64))
    return pa.table({"k": keys, **{name: rng.integers(0, 1 << 40, count) for name in names}})


def publish(store: CheckpointStore, parent: Any, tables: dict[str, pa.Table], *, delta: bool) -> Any:
    """Write one checkpoint of both states, whole or with a layer on top."""
    pending = store.begin(job_id="bench", graph=JobGraph((OPERATOR,)), states=(NARROW, WIDE), parent=parent)
    for subtask in range(PARALLELISM):
        with pending.context.subtask("op", subtask) as writer:
            for name, table in tables.items():
                groups = key_groups(hash_keys([table["k"]]), MAX_PARALLELISM)
                owner = subtask_of_key_group(groups, parallelism=PARALLELISM, max_parallelism=MAX_PARALLELISM)
                writer.write(name, table.filter(pa.array(owner == subtask)), delta=delta)
        pending.add(writer)
    return pending.publish()


def states(folder: str) -> tuple[StateRows, StateRows]:
    """The narrow state, a base and two deltas of a fiftieth of its rows; and the wide one."""
    store = open_store(folder, durable=False)
    base = {"narrow": numbers(ROWS, ["v"], 0), "wide": numbers(WIDE_ROWS, VALUES, 1)}
    permit = publish(store, None, base, delta=False)
    for seed in (2, 3):
        narrow, wide = numbers(ROWS // 50, ["v"], seed, 7 * seed), base["wide"].slice(0, 0)
        layers = [table.append_column("_op", pa.array(np.zeros(len(table), np.int8))) for table in (narrow, wide)]
        permit = publish(store, permit, dict(zip(base, layers, strict=True)), delta=True)
    checkpoint = store.open()
    return checkpoint.state("op", "narrow"), checkpoint.state("op", "wide")


def measure() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        narrow, wide = states(folder)
        key = pa.array([4_000_003], pa.int64())
        yield compare(
            f"one key of {ROWS:,} rows in three layers",
            lambda: narrow.at_keys({"k": 4_000_003}).table(),
            lambda: narrow.table().filter(pa.compute.is_in(pa.compute.field("k"), key)),
            label="a full scan, filtered",
            budget="≤ 0.1 ×",
        )
        yield compare(
            f"2 of 12 columns of {WIDE_ROWS:,} rows",
            lambda: drain(wide.select(["k", "v7"])),
            lambda: drain(wide),
            label="all columns",
            budget="≤ 0.5 ×",
        )
        path = Path(folder) / "exported.parquet"
        pq.write_table(narrow.table(), path, compression="lz4")
        yield compare(
            f"DuckDB, sum over {ROWS:,} rows merged from three layers",
            lambda: total("select sum(v), count(*) from given", narrow),
            lambda: total(f"select sum(v), count(*) from '{path}'", None),
            label="the same over the exported Parquet file",
            budget="–",
        )
        yield compare(
            f"DuckDB, sum over one column of {WIDE_ROWS:,} rows of 12, selected",
            lambda: total("select sum(v7), count(*) from given", wide.select(["v7"])),
            lambda: total("select sum(v7), count(*) from given", wide),
            label="all columns given to DuckDB",
            budget="–",
        )


def drain(rows: StateRows) -> int:
    return sum(batch.num_rows for batch in rows.batches())


def total(query: str, given: StateRows | None) -> Any:
    with duckdb.connect() as connection:
        if given is not None:
            connection.register("given", given)
        return connection.execute(query).fetchall()


if __name__ == "__main__":
    for row in measure():
        print(row.what, row.ours, row.against, row.ratio, row.cpu_text, row.budget, row.mark, sep=" | ")
