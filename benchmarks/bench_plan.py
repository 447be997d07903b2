"""Planning a restore of a million handles against reading the manifest's planning columns.

1,000 operators of 1,000 subtasks with one state each, 8 in 10 keyed (33 key groups a handle, max parallelism 32,768), the others
even-split, broadcast and in-flight. They are planned for 1,200 subtasks. Budget: opening and planning at most 3 × reading. Run
as ``python benchmarks/bench_plan.py [operators] [subtasks] [new subtasks]``; prints medians of five.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from redistribution import plan_restore, rescale
from stateformat.key_groups import range_bounds
from stateformat.model import (
    AttemptId,
    CheckpointId,
    CheckpointKind,
    Edge,
    Field,
    JobGraph,
    JobId,
    Kind,
    ManifestRef,
    Mode,
    Operator,
    OperatorId,
    Partitioner,
    Record,
    SchemaVersion,
    State,
    Totals,
)
from stateformat.schema import MANIFEST_SCHEMA, PLANNING_COLUMNS

MAX_PARALLELISM = 32_768
MODES = [Mode.KEYED] * 8 + [Mode.EVEN_SPLIT, Mode.BROADCAST, Mode.IN_FLIGHT]
FIELDS = (SchemaVersion(1, (Field(1, "k", "int64"), Field(2, "v", "int64"))),)


def checkpoint(operators: int, subtasks: int, *, keyed_only: bool) -> SimpleNamespace:
    """A record and the planning columns of a manifest, with digests and paths that do not compress."""
    uids = [OperatorId(f"operator-{number:04}") for number in range(operators)]
    modes = [Mode.KEYED if keyed_only else MODES[number % len(MODES)] for number in range(operators)]
    edges = [
        Edge(f"loop-{uid}", uid, uid, Partitioner.REBALANCE, feedback=True)
        for uid, mode in zip(uids, modes, strict=True)
        if mode is Mode.IN_FLIGHT
    ]
    states = tuple(
        State(
            uid,
            "state",
            mode,
            FIELDS,
            Kind.VALUE if mode is Mode.KEYED else None,
            ("k",) if mode is Mode.KEYED else (),
            f"loop-{uid}" if mode is Mode.IN_FLIGHT else None,
            2,
        )
        for uid, mode in zip(uids, modes, strict=True)
    )
    record = Record(
        CheckpointId(1),
        AttemptId("0" * 32),
        CheckpointKind.CHECKPOINT,
        JobId("bench"),
        JobGraph(tuple(Operator(uid, subtasks, MAX_PARALLELISM) for uid in uids), tuple(edges)),
        states,
        ManifestRef("manifests/x", 1, "0" * 32, 1),
        Totals(),
        0,
    )
    return SimpleNamespace(record=record, handles=manifest(uids, modes, subtasks))


def manifest(uids: list[OperatorId], modes: list[Mode], subtasks: int) -> pa.Table:
    random = np.random.default_rng(0)
    count = len(uids) * subtasks
    bounds = range_bounds(subtasks, MAX_PARALLELISM)
    keyed = np.repeat([mode is Mode.KEYED for mode in modes], subtasks)
    grouped = keyed | np.repeat([mode is Mode.IN_FLIGHT for mode in modes], subtasks)
    first = np.where(keyed, np.tile(bounds[:-1], len(uids)), 0)
    last = np.where(keyed, np.tile(bounds[1:] - 1, len(uids)), 3)
    lengths = np.where(grouped, last - first + 1, 0)
    group_rows = random.integers(1, 2000, lengths.sum())
    ends = np.cumsum(lengths)
    sums = np.append(0, np.cumsum(group_rows))
    rows = np.where(grouped, sums[ends] - sums[ends - lengths], 1000)
    offsets = pa.array(np.append(0, ends).astype(np.int32))
    digests = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(random.bytes(16 * count))])
    rank = pa.array(np.repeat(np.arange(len(uids), dtype=np.int32), subtasks))
    zero = np.zeros(count, np.int64)
    written = random.bytes(16 * count).hex()
    columns: dict[str, Any] = {
        "operator": pa.DictionaryArray.from_arrays(rank, pa.array(uids)).cast(pa.string()),
        "state": pa.array(["state"] * count),
        "mode": pa.DictionaryArray.from_arrays(rank, pa.array([mode.value for mode in modes])).cast(pa.string()),
        "subtask": np.tile(np.arange(subtasks, dtype=np.int32), len(uids)),
        "layer": zero.astype(np.int32),
        "edge": pa.nulls(count, pa.string()),
        "schema_id": zero.astype(np.int32) + 1,
        "path": pa.array([f"segments/{1:020}/{written[32 * at : 32 * at + 32]}.parquet" for at in range(count)]),
        "row_start": zero,
        "rows": rows,
        "segment_rows": rows,
        "size_bytes": rows * 16,
        "uncompressed_bytes": rows * 20,
        "footer_bytes": zero.astype(np.int32) + 2000,
        "digest": digests,
        "footer_digest": digests,
        "first_group": pa.array(first.astype(np.int32), mask=~grouped),
        "last_group": pa.array(last.astype(np.int32), mask=~grouped),
        "rows_per_group": pa.ListArray.from_arrays(offsets, pa.array(group_rows), mask=pa.array(~grouped)).cast(
            MANIFEST_SCHEMA.field("rows_per_group").type
        ),
    }
    schema = pa.schema([MANIFEST_SCHEMA.field(name) for name in PLANNING_COLUMNS])
    return pa.table([columns[name] for name in PLANNING_COLUMNS], schema=schema)


def median_seconds(work: Callable[[], object]) -> float:
    """Median of five runs."""
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main(operators: int = 1000, subtasks: int = 1000, new: int = 1200) -> None:
    """Print the ratios."""
    for keyed_only in (False, True):
        source = checkpoint(operators, subtasks, keyed_only=keyed_only)
        sink = pa.BufferOutputStream()
        pq.write_table(source.handles, sink, compression="zstd", row_group_size=131_072, write_page_checksum=True)
        stored = sink.getvalue()

        def read(stored: pa.Buffer = stored) -> pa.Table:
            return pq.read_table(pa.BufferReader(stored), columns=list(PLANNING_COLUMNS), page_checksum_verification=True)

        source.handles = read()
        topology = source.record.graph.at(new)
        plan = plan_restore(source, topology)
        plan.check()
        reading = median_seconds(read)
        planning = median_seconds(lambda source=source, topology=topology: plan_restore(source, topology))
        dealing = median_seconds(lambda source=source, plan=plan: rescale(source, plan))
        print(
            f"{'all keyed' if keyed_only else 'mixed'}: {source.handles.num_rows:,} handles, manifest {stored.size / 1e6:.0f} MB, "
            f"{plan.assigned.num_rows:,} slices: read {reading:.3f} s, plan {planning:.3f} s, rescale {dealing:.3f} s, "
            f"read + plan = {(reading + planning) / reading:.2f} x read (budget 3)"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
