"""Where row groups of a segment end, and how columns may be stored (SPEC.md sections 5.5 and 7.4).

A row group holds whole key groups up to a number of rows, or a part of one larger key group. A file
has at most 1,024: readers parse the footer whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidState
from ..schema import KEY_GROUP

ROW_GROUPS_MAX: Final = 1024
ROW_GROUP_BYTES: Final = 8 << 20
"""A row group of large rows has fewer of them, up to this size …"""
_COLUMN_BYTES: Final = 128 << 10
"""… or up to this for each of many columns, …"""
_ROW_GROUP_BYTES_MAX: Final = 64 << 20
"""… but no more than this."""
SPLIT_BYTES: Final = 16 << 20
"""A row group that takes more is cut again, except in tables of many columns (SPEC.md 7.4)."""
CODECS: Final = frozenset({"UNCOMPRESSED", "LZ4", "LZ4_RAW", "ZSTD", "SNAPPY"})
"""What readers accept, by pyarrow's names."""
ENCODINGS: Final = frozenset({"PLAIN", "RLE", "RLE_DICTIONARY", "PLAIN_DICTIONARY", "BIT_PACKED"}) | {
    "BYTE_STREAM_SPLIT",
    "DELTA_BINARY_PACKED",
    "DELTA_LENGTH_BYTE_ARRAY",
}
PARQUET_ERRORS: Final = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError)
"""What pyarrow raises for a damaged file."""
_STEADY: Final = 512
_STEP: Final = 64


def row_limit(row_group_rows: int, row_count: int, size_bytes: int, columns: int = 1) -> int:
    """Return how many rows a row group may hold: ``row_group_rows``, or fewer large rows."""
    bytes_max = row_group_bytes(columns)
    if size_bytes <= bytes_max or not row_count:
        return row_group_rows
    return max(1, min(row_group_rows, bytes_max * row_count // size_bytes))


def row_group_bytes(columns: int) -> int:
    """Return how many bytes a row group of several rows may have."""
    return min(max(ROW_GROUP_BYTES, _COLUMN_BYTES * columns), _ROW_GROUP_BYTES_MAX)


def split_bytes(columns: int) -> int:
    """Return the bytes beyond which a row group is cut again: at least 1.5 times the average."""
    return max(SPLIT_BYTES, row_group_bytes(columns) * 3 // 2)


def grown_limit(limit: int, written: int) -> int:
    """Return a stream's row limit after ``written`` row groups: doubled every 64 beyond 512."""
    return limit << max(0, (written - _STEADY) // _STEP + 1)


def split_groups(counts: npt.NDArray[Any], limit: int, *, begun: bool = False) -> list[int]:
    """Return the row numbers at which row groups end; the last is the row count.

    ``counts`` are the rows of each key group. ``begun``: earlier row groups hold a part of the
    first key group.
    """
    ends = np.cumsum(counts[counts > 0])
    stops: list[int] = []
    start = group = 0
    while group < len(ends):
        fitting = 0 if begun else int(np.searchsorted(ends, start + limit, "right")) - group
        if fitting:
            group += fitting
            start = int(ends[group - 1])
            stops.append(start)
            continue
        end = int(ends[group])
        stops += [*range(start + limit, end, limit), end]
        start, group, begun = end, group + 1, False
    return stops


def split_table(counts: npt.NDArray[Any], limit: int) -> list[int]:
    """Return the same for all rows of a segment: at most 1,024 row groups.

    The limit is raised if needed.
    """
    while len(stops := split_groups(counts, limit)) > ROW_GROUPS_MAX:
        limit *= 2
    return stops


def split_sizes(
    stops: Sequence[int], counts: npt.NDArray[Any], sizes: npt.NDArray[np.int64], limit: int
) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Cut row groups of over ``limit`` bytes again.

    Returns where row groups end, and where each row ends in bytes.
    """
    ends = np.concatenate([[0], np.cumsum(sizes)])
    borders = np.cumsum(counts)
    while True:
        cut = [stop for start, stop in pairwise([0, *stops]) for stop in _halves(start, stop, borders, ends, limit)]
        if len(cut) <= max(ROW_GROUPS_MAX, len(stops)):
            return cut, ends
        limit *= 2


def _halves(start: int, stop: int, borders: npt.NDArray[Any], ends: npt.NDArray[np.int64], limit: int) -> Iterator[int]:
    """Yield where parts of rows start … stop − 1 end, between key groups if there are several."""
    if stop - start < 2 or ends[stop] - ends[start] <= limit:
        yield stop
        return
    middle = int(np.searchsorted(ends, (ends[start] + ends[stop]) // 2))
    inside = borders[np.searchsorted(borders, start, "right") : np.searchsorted(borders, stop, "left")]
    middle = _nearest(inside, min(max(middle, start + 1), stop - 1))
    yield from _halves(start, middle, borders, ends, limit)
    yield from _halves(middle, stop, borders, ends, limit)


def decoded_bytes_of(rows: pa.Table) -> int:
    """Return the memory of rows as readers count it: Parquet has no number below 4 bytes."""
    size_bytes = rows.nbytes
    for field in rows.schema:
        kind = field.type
        if pa.types.is_boolean(kind):
            size_bytes += len(rows)
        elif pa.types.is_primitive(kind) and kind.bit_width < 32:
            size_bytes += len(rows) * (4 - kind.bit_width // 8)
    return int(size_bytes)


def split_large(rows: pa.Table, limit: int) -> Iterator[tuple[pa.Table, int]]:
    """Yield a row group and its memory, halved to ``limit``, between key groups if possible."""
    size_bytes = decoded_bytes_of(rows)
    if size_bytes <= limit or len(rows) < 2:
        yield rows, size_bytes
        return
    middle = len(rows) // 2
    if KEY_GROUP.name in rows.column_names:
        groups = rows[KEY_GROUP.name].combine_chunks().to_numpy()
        middle = _nearest(np.flatnonzero(np.diff(groups)) + 1, middle)
    yield from split_large(rows.slice(0, middle), limit)
    yield from split_large(rows.slice(middle), limit)


def _nearest(borders: npt.NDArray[Any], row: int) -> int:
    """Return the border nearest to a row; the row itself if there is none."""
    return int(borders[np.abs(borders - row).argmin()]) if len(borders) else row


def stop_batches(stops: Sequence[int], amount: int, at: Sequence[int] | None = None) -> Iterator[Sequence[int]]:
    """Yield ``stops`` in batches of ``amount`` rows, or bytes by ``at``, that overlap in one."""
    places = stops if at is None else at
    first = 0
    while first + 1 < len(stops):
        last = min(bisect_left(places, places[first] + amount, first + 1), len(stops) - 1)
        yield stops[first : last + 1]
        first = last


def check_row_groups(written: int, where: str) -> None:
    """Raise ``InvalidState`` (LIMIT_EXCEEDED) if another row group would be one too many."""
    if written >= ROW_GROUPS_MAX:
        raise InvalidState(
            f"{where}: its rows fill more than {ROW_GROUPS_MAX} row groups, which is all that a segment may have; "
            "raise row_group_rows, or the parallelism of the operator",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )


# ---- dictionaries --------------------------------------------------------------------------------
#
# Choose the texts of a segment that are stored by a dictionary (SPEC.md sections 5.5 and 7.4).
#
# Each row group has its own dictionary. It pays if many rows share few texts. Before a reader
# decodes one, it assumes that every row has the longest text; if that would be too much, the texts
# are stored one by one.


_FIRST_ROWS: Final = 1024
_ROWS: Final = 32_768
_ROWS_MIN: Final = 64
# The first rows show whether all texts differ: many of these rows would be equal if a row group had
# only a quarter as many different texts as rows.
_DIFFERENT_MAX, _PAYS_MAX = 0.95, 0.25
# Every reader accepts 128 MiB for a row group (SPEC.md section 7.4): for the longest texts, and for
# everything as it is in memory.
_LONGEST_BYTES_MAX: Final = 24 << 20
_TAKEN_BYTES_MAX: Final = 64 << 20


def paths_that_pay(rows: pa.Table) -> frozenset[str]:
    """Return the Parquet paths of texts in ``rows``, a row group, that repeat often enough."""
    leaves = [leaf for column in _columns(rows) for leaf in _leaves(*column)]
    # Arrow takes encodings by path, and two leaves may have one path.
    count = Counter(path for path, _ in leaves)
    return frozenset(path for path, values in leaves if count[path] == 1 and _is_text(values.type) and _pays(values))


def are_readable(rows: pa.Table, paths: Collection[str], taken: int) -> bool:
    """Return whether readers accept a row group of ``taken`` bytes with these dictionaries."""
    if taken > _TAKEN_BYTES_MAX:
        return False
    longest_bytes = 0
    for name, column in _columns(rows):
        if any(path == name or path.startswith(f"{name}.") for path in paths):
            for path, values in _leaves(name, column):
                if path in paths:
                    longest_bytes += (pc.max(pc.binary_length(values)).as_py() or 0) * len(values)
    return longest_bytes <= _LONGEST_BYTES_MAX


def _columns(rows: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        if _is_text(column.type) or pa.types.is_nested(column.type):
            yield name, column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))


def _leaves(path: str, values: pa.Array) -> Iterator[tuple[str, pa.Array]]:
    """Yield the Parquet path and the values of each leaf of a column."""
    kind = values.type
    if pa.types.is_struct(kind):
        for number in range(kind.num_fields):
            yield from _leaves(f"{path}.{kind.field(number).name}", values.field(number))
    elif pa.types.is_map(kind):
        offsets = values.offsets
        start, stop = (offsets[0].as_py(), offsets[-1].as_py()) if len(values) else (0, 0)
        for name, of_map in (("key", values.keys), ("value", values.items)):
            yield from _leaves(f"{path}.key_value.{name}", of_map.slice(start, stop - start))
    elif pa.types.is_list(kind):
        yield from _leaves(f"{path}.list.element", values.flatten())
    else:
        yield path, values


def _pays(values: pa.Array) -> bool:
    first = values.slice(0, _FIRST_ROWS)
    present = len(first) - first.null_count
    if present < _ROWS_MIN or pc.count_distinct(first).as_py() > _DIFFERENT_MAX * present:
        return False
    some = values.slice(0, _ROWS)
    return bool(pc.count_distinct(some).as_py() <= _PAYS_MAX * (len(some) - some.null_count))
