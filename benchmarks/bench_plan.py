"""Opening a checkpoint of a million handles and planning a restore, against reading its manifest.

Opening is all of it but the request: digest, footer, pages, every rule on every row, as
``explain-restore`` does it, which keeps what a plan needs. Publishing is the rules once more,
references, encoding, manifest and record written to a local store.

1,000 operators of 1,000 subtasks with one state each, planned for 1,200 subtasks: all keyed (33 key
groups a handle, so that nearly every handle is cut), and mixed: 6 in 11 keyed, the others one of
each other mode. Each handle has a segment of its own, with digests and a path that do not compress.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import stateformat as sf
from benchmarks import scale_stores
from benchmarks.measuring import Row, compare
from stateformat.graph import JobGraph, OperatorId
from stateformat.keys import range_bounds
from stateformat.manifest import Manifest, decode_outline, encode_manifest, manifest_ref
from stateformat.model import AttemptId, CheckpointId, CheckpointKind, JobId, ManifestRef, Mode, Record, Totals
from stateformat.redistribution import plan_restore
from stateformat.schema import MANIFEST_SCHEMA, PLANNING_COLUMNS

MAX_PARALLELISM = 32_768
OPERATORS, SUBTASKS, NEW_SUBTASKS = 1000, 1000, 1200
ROUNDS = 3


def checkpoint(operators: int, subtasks: int, *, keyed_only: bool) -> SimpleNamespace:
    """A record and a manifest's planning columns; digests and paths do not compress."""
    modes = [Mode.KEYED if keyed_only else scale_stores.mode_of(number) for number in range(operators)]
    states = tuple(scale_stores.declare(number, mode) for number, mode in enumerate(modes))
    chain = scale_stores.graph(operators, subtasks, MAX_PARALLELISM)
    loops = {state.edge for state in states}
    uids = [operator.uid for operator in chain.operators]
    record = Record(
        CheckpointId(1),
        AttemptId("0" * 32),
        CheckpointKind.CHECKPOINT,
        JobId("bench"),
        JobGraph(chain.operators, tuple(edge for edge in chain.edges if edge.id in loops)),
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
    many = np.repeat(keyed, lengths)
    group_rows = random.integers(1, 2000, len(many))
    group_rows[~many] = 1 + group_rows[~many] % 2
    ends = np.cumsum(lengths)
    sums = np.append(0, np.cumsum(group_rows))
    rows = np.where(grouped, sums[ends] - sums[ends - lengths], 1000)
    offsets = pa.array(np.append(0, ends).astype(np.int32))
    digests = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(random.bytes(16 * count))])
    rank = pa.array(np.repeat(np.arange(len(uids), dtype=np.int32), subtasks))
    zero = np.zeros(count, np.int64)
    written = random.bytes(16 * count).hex()
    prefix = f"segments/{1:020}/"
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
        "path": pa.array([f"{prefix}{written[at : at + 32]}.parquet" for at in range(0, 32 * count, 32)]),
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
    """Opening and planning against reading the same bytes; and publishing them."""
    found = []
    for keyed_only in (True, False):
        source = checkpoint(OPERATORS, SUBTASKS, keyed_only=keyed_only)
        full = Manifest(source.handles).full()
        stored = encode_manifest(full)
        record = replace(source.record, manifest=manifest_ref("manifests/x", stored))
        topology = record.graph.at(NEW_SUBTASKS)

        def read(stored: pa.Buffer = stored) -> pa.Table:
            return pq.read_table(
                pa.BufferReader(stored), columns=list(PLANNING_COLUMNS), page_checksum_verification=True
            )

        def planned(record: Record = record, stored: pa.Buffer = stored, topology: JobGraph = topology) -> None:
            handles = decode_outline(stored, record.manifest)
            plan_restore(SimpleNamespace(record=record, handles=handles), topology).check()

        what = f"of one million handles, {'all keyed' if keyed_only else 'mixed'}"
        found.append(
            compare(f"open and plan a rescale {what}", planned, read, label="reading", budget="≤ 2.5 ×", rounds=ROUNDS)
        )
        if not keyed_only:
            with tempfile.TemporaryDirectory() as folder:
                act = partial(publish, Path(folder), count(), record, full)
                found.append(compare(f"publish a checkpoint {what}", act, read, label="reading", budget="–", rounds=2))
    return found


def publish(folder: Path, numbers: Iterator[int], record: Record, handles: pa.Table) -> None:
    """Publish handles as the first checkpoint of a new local store."""
    store = sf.open(str(folder / str(next(numbers))), durable=False)
    pending = store.begin(job_id=record.job_id, graph=record.graph, states=record.states, parent=None)
    pending.add_handles(handles)
    pending.publish()
