"""Checkpoints that a broken or hostile writer would make: any content, under digests that are
right.

A :class:`Forger` takes a checkpoint apart (record, handles, segments), lets a test change what it
likes, and seals it again. It writes manifests and segments with pyarrow alone, so nothing that the
library refuses to write is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from stateformat import paths as layout
from stateformat.manifest import handles_table, manifest_ref, totals
from stateformat.model import CheckpointId, Handle, Record
from stateformat.record import decode_record, members_of, required_features
from stateformat.storage import Storage


def put(storage: Storage, path: str, data: bytes) -> None:
    storage.delete([path])
    with storage.open_output(path) as output:
        output.write(data)


def get(storage: Storage, path: str) -> bytes:
    data: bytes = storage.read(path).to_pybytes()
    return data


def seal(members: Mapping[str, Any]) -> bytes:
    """A record's bytes with a right digest, around any members."""
    body = json.dumps(members, ensure_ascii=False, separators=(",", ":"))[:-1]
    return f'{body},"digest":"{xxhash.xxh3_128_hexdigest(body.encode())}"}}\n'.encode()


class Forger:
    """The checkpoint ``checkpoint_id`` of a store, in parts. Call :meth:`seal` when everything is
    as wrong as it should be.
    """

    def __init__(self, storage: Storage, checkpoint_id: int) -> None:
        self.storage = storage
        self.path = layout.record_path(CheckpointId(checkpoint_id))
        self.record: Record = decode_record(get(storage, self.path))
        data = storage.read(self.record.manifest.path)
        self.handles = [Handle(**row) for row in pq.read_table(pa.BufferReader(data)).to_pylist()]

    def find(self, operator: str, state: str, subtask: int | None = 0, layer: int = 0) -> int:
        wanted = (operator, state, subtask, layer)
        return next(
            i for i, h in enumerate(self.handles) if (h.operator, h.state, h.subtask, h.layer) == wanted and h.rows
        )

    def change(self, at: int, **columns: Any) -> None:
        self.handles[at] = self.handles[at]._replace(**columns)

    def bytes_of(self, at: int) -> bytes:
        handle = self.handles[at]
        return handle.inline if handle.inline is not None else get(self.storage, str(handle.path))

    def table_of(self, at: int) -> pa.Table:
        return pq.read_table(pa.BufferReader(self.bytes_of(at)))

    def set_bytes(self, at: int, data: bytes, *, vouched: bool = True) -> None:
        """Other bytes in the segment of a handle; ``vouched``: the handle says their sizes and
        digests.
        """
        handle = self.handles[at]
        if handle.inline is not None:
            self.change(at, inline=data)
        else:
            put(self.storage, str(handle.path), data)
        if vouched:
            footer = int.from_bytes(data[-8:-4], "little") + 8
            self.change(
                at,
                size_bytes=len(data),
                digest=xxhash.xxh3_128_digest(data),
                footer_bytes=footer,
                footer_digest=xxhash.xxh3_128_digest(data[-footer:]),
            )

    def set_rows(
        self,
        at: int,
        rows: pa.Table,
        *,
        said: Mapping[str, str | None] | None = None,
        recount: bool = True,
        **options: Any,
    ) -> None:
        """Other rows in the segment of a handle. ``said``: other entries of the footer;
        ``recount``: in its counts too.
        """
        old = pq.read_metadata(pa.BufferReader(self.bytes_of(at))).metadata
        entries = {key.decode(): value.decode() for key, value in old.items()}
        for name, value in (said or {}).items():
            entries.pop(f"stateformat.{name}", None)
            if value is not None:
                entries[f"stateformat.{name}"] = value
        sink = pa.BufferOutputStream()
        options = {"write_page_checksum": True, "store_schema": False, "compression": "none", **options}
        row_group_size = options.pop("row_group_size", None)
        with pq.ParquetWriter(sink, rows.schema, **options) as writer:
            writer.write_table(rows, row_group_size=row_group_size)
            writer.add_key_value_metadata(entries)
        data = sink.getvalue().to_pybytes()
        self.set_bytes(at, data)
        found = pq.read_metadata(pa.BufferReader(data))
        uncompressed = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
        self.change(at, uncompressed_bytes=uncompressed)
        if recount:
            self.change(at, rows=rows.num_rows, segment_rows=rows.num_rows)

    def regroup(self, at: int, column: str = "_key_group") -> None:
        """Let a handle say the groups that its rows have."""
        found = [int(value) for value in self.table_of(at)[column].to_pylist()]
        counts = [found.count(group) for group in range(min(found), max(found) + 1)]
        self.change(at, first_group=min(found), last_group=max(found), rows_per_group=counts)

    def seal(self, members: Callable[[dict[str, Any]], None] | None = None, **changes: Any) -> None:
        """Write manifest and record anew. ``changes`` go into the record as a value, ``members``
        into its JSON.
        """
        table = handles_table(self.handles)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True, store_schema=False)
        data = sink.getvalue()
        ref = manifest_ref(self.record.manifest.path, data)
        put(self.storage, ref.path, data.to_pybytes())
        features = required_features(self.record.graph, self.record.states, table, self.record.rescaled_from)
        changes = {"manifest": ref, "totals": totals(table), "required_features": features, **changes}
        record = replace(self.record, **changes)
        found = {"format": "stateformat", "version": 1, **members_of(record)}
        if members:
            members(found)
        put(self.storage, self.path, seal(found))
