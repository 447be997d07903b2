"""What a read reads: a stream that is planned once, and split for Spark's tasks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.formats import open_folder, split_format
from stateformat.inspecting import METADATA_TABLES, StateChanges, StateRange, metadata_table
from stateformat.model import Record, known_names
from stateformat.reading import Checkpoint, StateRows, keys_from_json
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from stateformat.tables import ArrowStream

from .options import ReadOptions

PART_BYTES_MAX: Final = 64 * 2**20
"""There are more partitions than cores if one would have more stored state than this."""
PART_BYTES_MIN: Final = 4 * 2**20
"""There are fewer partitions than cores if one would have less than this."""


@dataclass(frozen=True)
class MetadataRows(ArrowStream):
    """A table of metadata of these checkpoints, one of which is in memory at a time. Picklable."""

    name: str
    checkpoints: tuple[Checkpoint, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, name: str, checkpoints: Sequence[Checkpoint]) -> MetadataRows:
        """Return all columns."""
        return cls(name, tuple(checkpoints), tuple(METADATA_TABLES[name].names))

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch."""
        return pa.schema([METADATA_TABLES[self.name].field(name) for name in self.columns])

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows, in the order of the checkpoints."""
        for checkpoint in self.checkpoints:
            yield from metadata_table(_Only(checkpoint), self.name).select(self.columns).to_batches()

    def select(self, columns: Sequence[str]) -> MetadataRows:
        """Return the same rows with these columns. ``InvalidInput`` for one that is not there."""
        known = METADATA_TABLES[self.name].names
        for number, name in enumerate(columns):
            if name not in known or name in columns[:number]:
                why = "is named twice" if name in known else f"is not in it; {known_names(known, name)}"
                raise InvalidInput(
                    f"the table {self.name!r} of metadata: column {name!r} {why}", kind=ErrorKind.SCHEMA_MISMATCH
                )
        return replace(self, columns=tuple(columns))

    def split(self, parts: int) -> list[MetadataRows]:
        """Return the same rows in up to ``parts`` parts."""
        share = max(1, -(-len(self.checkpoints) // parts))
        starts = range(0, len(self.checkpoints), share)
        return [replace(self, checkpoints=self.checkpoints[start : start + share]) for start in starts] or [self]


@dataclass(frozen=True)
class _Only:
    """A store of one checkpoint."""

    checkpoint: Checkpoint

    def history(self) -> list[Record]:
        return [self.checkpoint.record]

    def checkpoints(self, ids: Sequence[int] | None = None) -> list[Checkpoint]:  # noqa: ARG002 - it has one
        return [self.checkpoint]


Readable = StateRows | StateRange | StateChanges | MetadataRows


def open_store(options: ReadOptions) -> CheckpointStore:
    """Return the store of a read. Reads nothing."""
    form, place = split_format(options.url)
    outside = partial(open_folder, options=options.storage) if options.allow_outside else None
    return CheckpointStore(open_storage(place, **options.storage), format=form, outside=outside)


def stream_of(options: ReadOptions) -> Readable:
    """Find the checkpoints of a read, and what of them is read. Picklable.

    Raises ``InvalidInput`` for a table, operator, state, column or key that is not there,
    ``NotFound``, and whatever a damaged checkpoint raises.
    """
    found = _whole(open_store(options), options)
    if options.key is not None:
        assert isinstance(found, StateRows)
        found = found.at_keys(keys_from_json(found.state, options.key, many=True))
    return found if options.columns is None else found.select(options.columns)


def _whole(store: CheckpointStore, options: ReadOptions) -> Readable:
    if options.table is not None:
        if options.table not in METADATA_TABLES:
            raise InvalidInput(
                f"a store has no table {options.table!r}; {known_names([*METADATA_TABLES], options.table)}"
            )
        ids = None if options.checkpoint is None else [options.checkpoint]
        return MetadataRows.of(options.table, store.checkpoints(ids))
    assert options.operator is not None
    assert options.state is not None
    if options.changes is not None:
        start, end = options.changes
        last = store.open().id if end is None else end
        return store.changes(options.operator, options.state, start, last, every=options.every)
    if options.all_checkpoints:
        return store.states_over(options.operator, options.state)
    return store.open(options.checkpoint).state(options.operator, options.state)


def parts_of(stream: Readable, asked: int | None) -> Sequence[Readable]:
    """Split a stream for tasks: as many as ``asked``, else one for each core or 64 MiB."""
    return stream.split(asked or part_count(stored_bytes(stream)))


def stored_bytes(stream: Readable) -> int:
    """Return about how much a stream reads."""
    if isinstance(stream, MetadataRows):
        return sum(one.record.manifest.size_bytes for one in stream.checkpoints) if stream.name == "handles" else 0
    if isinstance(stream, StateRows):
        return pc.sum(stream.task.slices["bytes"]).as_py() or 0
    return stream.stored_bytes


def part_count(size_bytes: int) -> int:
    """Tasks for so much stored state. Workers know nothing of the session but the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(-(-size_bytes // PART_BYTES_MAX), min(cores, size_bytes // PART_BYTES_MIN), 1)
