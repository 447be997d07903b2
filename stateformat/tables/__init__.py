"""Arrow tables larger than memory; nothing here knows of state.

``pieces`` cuts and gathers them by bytes, ``prefetch`` reads ahead, ``spill`` sets rows aside on
disk, ``merging`` merges sorted streams. ``stream`` is what any Arrow tool can scan. ``values``
makes columns of Python values, ``showing`` converts rows for messages.
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
from .values import CONVERSION_ERRORS, from_python, number_of, table_from_python

__all__ = [
    "BATCH_BYTES",
    "CONVERSION_ERRORS",
    "HELD_BYTES",
    "TAKEN_BYTES",
    "ArrowStream",
    "SizedCall",
    "Spill",
    "buckets_of",
    "copy_rows",
    "cut",
    "from_python",
    "merge_sorted",
    "number_of",
    "prefetch",
    "python_rows",
    "rebatch",
    "release_memory_after",
    "row_sizes",
    "split_by_bucket",
    "table_from_python",
    "take_rows",
    "take_table",
    "with_schema",
]
