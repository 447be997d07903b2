"""One segment: the Parquet file of state rows (SPEC.md section 5).

For writing, read ``write``, ``normalize``, ``sort`` and ``row_groups``; for reading, ``reader``.
"""

from __future__ import annotations

from .normalize import cast_kept, check_text, keeps_values, kept, normalize_keys, normalize_rows, plain_type
from .reader import PIECE_ROWS_MAX, SegmentReader
from .row_groups import CODECS, ENCODINGS, PARQUET_ERRORS, ROW_GROUPS_MAX
from .sort import (
    REPEATED_SHOWN,
    Clustered,
    RowKeyCheck,
    SortedRuns,
    clustered,
    groups_of_keys,
    is_clustered,
    one_array,
    row_key_codes,
)
from .write import SegmentPlace, WriteOptions, write_segment, write_unsorted

__all__ = [
    "CODECS",
    "ENCODINGS",
    "PARQUET_ERRORS",
    "PIECE_ROWS_MAX",
    "REPEATED_SHOWN",
    "ROW_GROUPS_MAX",
    "Clustered",
    "RowKeyCheck",
    "SegmentPlace",
    "SegmentReader",
    "SortedRuns",
    "WriteOptions",
    "cast_kept",
    "check_text",
    "clustered",
    "groups_of_keys",
    "is_clustered",
    "keeps_values",
    "kept",
    "normalize_keys",
    "normalize_rows",
    "one_array",
    "plain_type",
    "row_key_codes",
    "write_segment",
    "write_unsorted",
]
