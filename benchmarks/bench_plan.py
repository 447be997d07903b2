"""Opening a checkpoint of a million handles and planning a restore, against reading its manifest's planning columns.

Opening is all that it is in use but for the request: digest, footer, pages, every rule on every row.

1,000 operators of 1,000 subtasks with one state each, planned for 1,200 subtasks: all keyed (33 key groups a handle, max
parallelism 32,768, so that nearly every handle is cut), and mixed: 6 in 11 keyed, the others one of each other mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measuring import Row, compare
from redistribution import plan_restore, rescale
from stateformat.key_groups import range_bounds
from stateformat.manifest import Manifest, decode_manifest, encode_manifest, manifest_ref, totals
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
from stateformat.validation import check_content

MAX_PARALLELISM = 32_768
MODES = [Mode.KEYED] * 6 + [Mode.EVEN_SPLIT, Mode.BROADCAST, Mode.IN_FLIGHT, Mode.UNION, Mode.PROGRESS]
OPERATORS, SUBTASKS, NEW_SUBTASKS = 1000, 1000, 1200
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
    in_flight = np.repeat([mode is Mode.IN_FLIGHT for mode in modes], subtasks)
    grouped = keyed | in_flight
    first = np.where(keyed, np.tile(bounds[:-1], len(uids)), 0)
    last = np.where(keyed, np.tile(bounds[1:] - 1, len(uids)), 3)
    lengths = np.where(grouped, last - first + 1, 0)
    # Channels hold a record or two, key groups some.
    group_rows = random.integers(1, np.repeat(np.where(keyed, 2000, 3), lengths))
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
        "edge": pa.DictionaryArray.from_arrays(
            pa.array(np.repeat(np.arange(len(uids), dtype=np.int32), subtasks), mask=~in_flight),
            pa.array([f"loop-{uid}" for uid in uids]),
        ).cast(pa.string()),
        "schema_id": zero.astype(np.int32) + 1,
        "path": pa.array([f"segments/{1:020}/{written[32 * at : 32 * at + 32]}.parquet" for at in range(count)]),
        "row_start": zero,
        "rows": rows,
        "segment_rows": rows,
        "size_bytes": rows * 16 + 3000,
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


def measure() -> list[Row]:
    """Opening (bytes to verified handles) and planning against reading the same bytes; and with dealing out; and publishing."""
    found = []
    for keyed_only in (True, False):
        source = checkpoint(OPERATORS, SUBTASKS, keyed_only=keyed_only)
        full = Manifest(source.handles).full()
        stored = encode_manifest(full)
        record = replace(source.record, manifest=manifest_ref("manifests/x", stored))

        def read(stored: pa.Buffer = stored) -> pa.Table:
            return pq.read_table(
                pa.BufferReader(stored), columns=list(PLANNING_COLUMNS), page_checksum_verification=True
            )

        def opened(record: Record = record, stored: pa.Buffer = stored) -> SimpleNamespace:
            return SimpleNamespace(record=record, handles=decode_manifest(stored, record.manifest).handles)

        topology = record.graph.at(NEW_SUBTASKS)
        plan_restore(opened(), topology).check()

        def deal(opened: Callable[[], SimpleNamespace] = opened, topology: JobGraph = topology) -> None:
            checkpoint = opened()
            rescale(checkpoint, plan_restore(checkpoint, topology))

        def judge(record: Record = record, full: pa.Table = full) -> None:
            check_content(record.graph, record.states, full)
            encode_manifest(full)
            totals(full)

        what = f"of one million handles, {'all keyed' if keyed_only else 'mixed'}"
        planned = lambda opened=opened, topology=topology: plan_restore(opened(), topology)  # noqa: E731
        found += [
            compare(f"open and plan a rescale {what}", planned, read, label="reading", budget="≤ 3 ×"),
            compare(f"open, plan and deal a rescale {what}", deal, read, label="reading", budget="–"),
            compare(f"check and encode a manifest {what}", judge, read, label="reading", budget="–"),
        ]
    return found
