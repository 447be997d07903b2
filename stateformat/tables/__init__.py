"""Arrow tables larger than memory; nothing here knows of state.

``pieces`` cuts and gathers them by bytes, ``prefetch`` reads ahead, ``spill`` sets rows aside on
disk, ``merging`` merges sorted streams. ``stream`` is what any Arrow tool can scan. ``showing``
converts rows for messages.
"""

from __future__ import annotations

from .merging import merge_sorted
from .pieces import (
    BATCH_BYTES,
    TAKEN_BYTES,
    copy_rows,
    cut,
    rebatch,
    release_memory_after,
    row_sizes,
    take_rows,
    take_table,
    with_schema,
)
from .prefetch import SizedCall, prefetch
from .showing import python_rows
from .spill import HELD_BYTES, Spill, buckets_of, split_by_bucket
from .stream import ArrowStream

__all__ = [
    "BATCH_BYTES",
    "HELD_BYTES",
    "TAKEN_BYTES",
    "ArrowStream",
    "SizedCall",
    "Spill",
    "buckets_of",
    "copy_rows",
    "cut",
    "merge_sorted",
    "prefetch",
    "python_rows",
    "rebatch",
    "release_memory_after",
    "row_sizes",
    "split_by_bucket",
    "take_rows",
    "take_table",
    "with_schema",
]
