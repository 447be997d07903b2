"""The columns of a manifest that a plan needs, read in less time and memory than all of it.

Each row group is decoded and checked by itself, in two threads, and what a plan does not need is
freed. So a million handles are never in memory whole. Faults are only detected here;
``codec.decode_manifest`` then reports them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..model import ManifestRef, Mode
from ..schema import PLANNING_COLUMNS
from .codec import (
    PARQUET_ERRORS,
    PLANNING_SCHEMA,
    REPEATED_TEXTS,
    check_codes,
    check_file,
    decode_manifest,
    open_file,
    open_manifest,
    typed,
    verify_manifest,
)
from .columns import as_numpy
from .rules import broken_rules, first_unsorted

_COLUMNS: Final = (
    *("operator", "state", "subtask", "layer", "path", "row_start", "rows", "segment_rows", "size_bytes"),
    *("first_group", "last_group", "rows_per_group"),
)
_THREADS: Final = 2


def decode_outline(data: pa.Buffer, ref: ManifestRef) -> pa.Table:
    """Return the part of the manifest of a record that ``redistribution`` needs, verified.

    The rows are those of ``Manifest.handles``. Operators and states are dictionaries; paths are
    null except for in-flight records, whose order depends on them. Raises as ``decode_manifest``.
    """
    from concurrent.futures import ThreadPoolExecutor  # Needed only to plan, not to inspect.

    verify_manifest(data, ref)
    try:
        with open_manifest(data) as file:
            check_file(file, ref)
            metadata = file.metadata
        groups = range(metadata.num_row_groups)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="stateformat-outline") as pool:
            parts = list(pool.map(lambda number: _part(data, metadata, number), groups))
    except PARQUET_ERRORS:
        parts = []
    sound = [part for part in parts if part is not None]
    if not sound or len(sound) < len(parts) or _falls(sound):
        return decode_manifest(data, ref).handles
    return pa.concat_tables(sound)


def _part(data: pa.Buffer, metadata: Any, number: int) -> pa.Table | None:
    """Return the columns of a row group; None if something is wrong with it."""
    with open_file(data, read_dictionary=[*REPEATED_TEXTS], metadata=metadata) as file:
        read = file.read_row_group(number, columns=list(PLANNING_COLUMNS), use_threads=False)
    columns = {}
    for item in PLANNING_SCHEMA:
        columns[item.name] = column = read[item.name]
        if item.name in REPEATED_TEXTS:
            check_codes(column)
        else:
            columns[item.name] = typed(column, item.type)
    handles = pa.table(columns)
    if handles.num_rows != metadata.row_group(number).num_rows or not len(handles) or broken_rules(handles):
        return None
    moved = as_numpy(pc.equal(handles["mode"], Mode.IN_FLIGHT.value))
    columns["path"] = handles["path"].take(pa.array(np.arange(len(moved)), mask=~moved))
    kept = pa.table({name: columns[name] for name in _COLUMNS})
    del read, columns, handles
    # Otherwise Arrow keeps what this thread has freed.
    pa.default_memory_pool().release_unused()
    return kept


def _falls(parts: list[pa.Table]) -> bool:
    """Return whether some part begins with a handle that belongs before the end of the last one."""
    seams = (pa.concat_tables([one.slice(len(one) - 1), other.slice(0, 1)]) for one, other in pairwise(parts))
    return any(first_unsorted(seam) is not None for seam in seams)
