"""What a read reads: an Arrow stream that is planned once, and split for Spark's tasks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Final

import pyarrow.compute as pc

from stateformat.formats import open_folder, split_format
from stateformat.reading import StateRows, keys_from_json
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore

from .options import ReadOptions

Readable = StateRows
PART_BYTES_MAX: Final = 64 * 2**20
"""There are more partitions than cores if one would have more stored state than this."""
PART_BYTES_MIN: Final = 4 * 2**20
"""There are fewer partitions than cores if one would have less than this."""


def open_store(options: ReadOptions) -> CheckpointStore:
    """Return the store of a read. Reads nothing."""
    form, place = split_format(options.url)
    outside = partial(open_folder, options=options.storage) if options.allow_outside else None
    return CheckpointStore(open_storage(place, **options.storage), format=form, outside=outside)


def stream_of(options: ReadOptions) -> Readable:
    """Plan a read: find the checkpoint, and which slices are read. Picklable.

    Raises ``InvalidInput`` for an operator, state, column or key that the checkpoint does not have,
    ``NotFound``, and whatever a damaged checkpoint raises.
    """
    assert options.operator is not None
    rows = open_store(options).open(options.checkpoint).state(options.operator, options.state)
    if options.key is not None:
        rows = rows.at_keys(keys_from_json(rows.state, options.key, many=True))
    return rows if options.columns is None else rows.select(options.columns)


def parts_of(stream: Readable, asked: int | None) -> Sequence[Readable]:
    """Split a stream for tasks: as many as ``asked``, else one for each core or 64 MiB."""
    return stream.split(asked or part_count(pc.sum(stream.task.slices["bytes"]).as_py() or 0))


def part_count(size_bytes: int) -> int:
    """Tasks for so much stored state. Workers know nothing of the session but the machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(-(-size_bytes // PART_BYTES_MAX), min(cores, size_bytes // PART_BYTES_MIN), 1)
