"""What the tests of the data path share: places to write to, handles as slices, storages that count
and that lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from stateformat import model as m
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.manifest import Manifest, handles_table
from stateformat.reading.scan import SliceReader
from stateformat.schema import SLICE_SCHEMA, segment_schema
from stateformat.segments import SegmentPlace, WriteOptions, write_segment
from stateformat.storage import Storage

ATTEMPT = m.AttemptId("0123456789abcdef" * 2)
OBJECTS = WriteOptions(inline_bytes_max=0)
"""Nothing inline, so that every segment is an object that a test can damage."""


def operator(parallelism: int = 1, max_parallelism: int = 128) -> Operator:
    return Operator(OperatorId("op"), parallelism, max_parallelism, key_hash="spark-murmur3-seed42")


def place(state: m.State, *, subtask: int | None = 0, layer: int = 0, checkpoint: int = 7, **of: Any) -> SegmentPlace:
    return SegmentPlace(
        job_id=m.JobId("job"),
        checkpoint_id=m.CheckpointId(checkpoint),
        attempt_id=ATTEMPT,
        operator=of.get("operator") or operator(),
        state=state,
        subtask=subtask,
        layer=layer,
        schema_id=of.get("schema_id") or state.current.id,
    )


def record(state: m.State, checkpoint: int = 7) -> m.Record:
    return m.Record(
        checkpoint_id=m.CheckpointId(checkpoint),
        attempt_id=ATTEMPT,
        kind=m.CheckpointKind.CHECKPOINT,
        job_id=m.JobId("job"),
        graph=JobGraph((operator(),)),
        states=(state,),
        manifest=m.ManifestRef("manifests/m.parquet", 0, "", 0),
        totals=m.Totals(),
        created_at_us=0,
    )


def table(state: m.State, rows: Sequence[dict[str, Any]], *, delta: bool = False) -> pa.Table:
    """Rows as a table with the types of the state's segment; columns that no row has are left
    out.
    """
    schema = segment_schema(state, delta=delta)
    return pa.table(
        {
            name: pa.array([row.get(name) for row in rows], schema.field(name).type)
            for name in schema.names
            if rows and name in {n for row in rows for n in row}
        }
    )


def write(
    storage: Storage,
    state: m.State,
    data: pa.Table | Iterable[pa.RecordBatch] | Sequence[dict[str, Any]],
    options: WriteOptions = OBJECTS,
    **of: Any,
) -> m.Handle:
    if isinstance(data, list):
        data = table(state, data, delta=of.get("layer", 0) > 0)
    return write_segment(storage, place(state, **of), data, options)


def whole_slices(handles: Sequence[m.Handle]) -> pa.Table:
    return slices([(number, handle, handle.row_start, handle.rows) for number, handle in enumerate(handles)])


def slices(chosen: Iterable[tuple[int, m.Handle, int, int]]) -> pa.Table:
    """Slices as (handle number, handle, first row, rows), with the groups that these rows have."""
    found = []
    for number, handle, start, rows in chosen:
        groups = [
            group
            for group, count in enumerate(handle.rows_per_group or [], handle.first_group or 0)
            for _ in range(count)
        ][start - handle.row_start :][:rows]
        found.append(
            {
                "operator": handle.operator,
                "state": handle.state,
                "mode": handle.mode,
                "subtask": handle.subtask,
                "layer": handle.layer,
                "handle": number,
                "row_start": start,
                "rows": rows,
                "first_group": groups[0] if groups else None,
                "last_group": groups[-1] if groups else None,
                "bytes": 0,
            }
        )
    return pa.Table.from_pylist(found, schema=SLICE_SCHEMA)


def read(
    storage: Storage,
    state: m.State,
    handles: Sequence[m.Handle],
    chosen: pa.Table | None = None,
    *,
    as_schema: m.SchemaVersion | None = None,
    **options: Any,
) -> pa.Table:
    slices = whole_slices(handles) if chosen is None else chosen
    found = list(
        SliceReader(storage, record(state), Manifest(handles_table(handles)), slices, as_schema).batches(**options)
    )
    return pa.Table.from_batches(found) if found else segment_schema(state).empty_table()


class CountingStorage(MemoryStorage):
    """Counts the bytes that are read, and lets a test change an object in place."""

    def __init__(self, name: str) -> None:
        MemoryStorage.reset(name)
        super().__init__(name)
        self.bytes_read = 0
        self.reads = 0
        self.changed: dict[str, bytes] = {}

    def read(self, path: str) -> pa.Buffer:
        data = pa.py_buffer(self.changed[path]) if path in self.changed else super().read(path)
        return self._counted(data)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        if path not in self.changed:
            return self._counted(super().read_range(path, offset, length))
        return self._counted(pa.py_buffer(self.changed[path][offset : offset + length]))

    def open_input(self, path: str) -> Any:
        raise AssertionError("segments are read by ranges, so that what is fetched is known")

    def _counted(self, data: pa.Buffer) -> pa.Buffer:
        self.bytes_read += data.size
        self.reads += 1
        return data

    def bytes_of(self, path: str) -> bytes:
        return super().read(path).to_pybytes()
