"""Where one row group of a segment ends and the next begins, and how its columns may be stored (SPEC.md section 5.5).

A row group holds whole groups up to a number of rows, or a part of one larger group, so that a range of groups is read as
a range of row groups. There are at most 1,024 in a file, because readers parse the footer whole: a table whose size is
known gets larger row groups from the start, a stream gets larger ones the longer it grows. A row group is the least that a
reader decodes, so one whose rows turn out to take much more memory than others is cut once more (section 7.4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..errors import ErrorKind, InvalidState
from ..schema import KEY_GROUP

ROW_GROUPS_MAX: Final = 1024
ROW_GROUP_BYTES: Final = 8 << 20
"""Rows that are large come in fewer per row group, so that one row group is read in little memory …"""
_COLUMN_BYTES: Final = 128 << 10
"""… but a column of a table of many has so much of a row group, …"""
_ROW_GROUP_BYTES_MAX: Final = 64 << 20
"""… up to this."""
SPLIT_BYTES: Final = 16 << 20
"""A row group that takes more is cut once more, unless the table has many columns: below what readers take in any case
(SPEC.md section 7.4)."""
CODECS: Final = frozenset({"UNCOMPRESSED", "LZ4", "LZ4_RAW", "ZSTD", "SNAPPY"})
"""What readers accept, as pyarrow names it."""
ENCODINGS: Final = frozenset(
    {
        "PLAIN",
        "RLE",
        "RLE_DICTIONARY",
        "PLAIN_DICTIONARY",
        "BIT_PACKED",
        "BYTE_STREAM_SPLIT",
        "DELTA_BINARY_PACKED",
        "DELTA_LENGTH_BYTE_ARRAY",
    }
)
PARQUET_ERRORS: Final = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, OverflowError)
"""What pyarrow raises for a file that is damaged."""
_STEADY: Final = 512
_STEP: Final = 64


def row_limit(row_group_rows: int, row_count: int, size_bytes: int, columns: int = 1) -> int:
    """How many rows a row group may hold: ``row_group_rows``, or fewer if rows are as large as these are on average."""
    bytes_max = row_group_bytes(columns)
    if size_bytes <= bytes_max or not row_count:
        return row_group_rows
    return max(1, min(row_group_rows, bytes_max * row_count // size_bytes))


def row_group_bytes(columns: int) -> int:
    """How many bytes of rows a row group has at most, where it has several rows."""
    return min(max(ROW_GROUP_BYTES, _COLUMN_BYTES * columns), _ROW_GROUP_BYTES_MAX)


def split_bytes(columns: int) -> int:
    """What a row group may take before it is cut once more; half more than the average at least."""
    return max(SPLIT_BYTES, row_group_bytes(columns) * 3 // 2)


def grown_limit(limit: int, written: int) -> int:
    """The limit for the next row group of a stream of which ``written`` are written: doubled every 64 beyond 512."""
    return limit << max(0, (written - _STEADY) // _STEP + 1)


def split_groups(counts: npt.NDArray[Any], limit: int, *, begun: bool = False) -> list[int]:
    """Cut rows into row groups: the numbers of the rows at which they end; the last is the number of all rows.

    ``counts``: rows of each group, in order; zeros are fine. ``begun``: earlier row groups hold a part of the first group,
    so that it shares none with the next.
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
    """The same for all rows of a segment, at most 1,024 row groups: with a higher limit where need be."""
    stops = split_groups(counts, limit)
    while len(stops) > ROW_GROUPS_MAX:
        limit *= 2
        stops = split_groups(counts, limit)
    return stops


def split_sizes(
    stops: Sequence[int], counts: npt.NDArray[Any], sizes: npt.NDArray[np.int64], limit: int
) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Cut the row groups that have more than ``limit`` bytes once more: where they end, and where each row ends in bytes.

    ``stops`` and ``counts`` as :func:`split_table` has them; ``sizes``: the bytes of each row. At most 1,024 row groups come
    out, with a higher limit where need be.
    """
    ends = np.concatenate([[0], np.cumsum(sizes)])
    borders = np.cumsum(counts)
    cut = [stop for start, stop in pairwise([0, *stops]) for stop in _halves(start, stop, borders, ends, limit)]
    while len(cut) > max(ROW_GROUPS_MAX, len(stops)):
        limit *= 2
        cut = [stop for start, stop in pairwise([0, *stops]) for stop in _halves(start, stop, borders, ends, limit)]
    return cut, ends


def _halves(start: int, stop: int, borders: npt.NDArray[Any], ends: npt.NDArray[np.int64], limit: int) -> Iterator[int]:
    """Where the parts of rows start … stop − 1 end: between groups if there are several, so that none shares a row group."""
    if stop - start < 2 or ends[stop] - ends[start] <= limit:
        yield stop
        return
    middle = int(np.searchsorted(ends, (ends[start] + ends[stop]) // 2))
    middle = min(max(middle, start + 1), stop - 1)
    inside = borders[np.searchsorted(borders, start, "right") : np.searchsorted(borders, stop, "left")]
    if len(inside):
        middle = int(inside[np.abs(inside - middle).argmin()])
    yield from _halves(start, middle, borders, ends, limit)
    yield from _halves(middle, stop, borders, ends, limit)


def decoded_bytes_of(rows: pa.Table) -> int:
    """What rows take in memory as a reader counts it: Parquet has no values of fixed width below 4 bytes, but booleans."""
    size_bytes = rows.nbytes
    for field in rows.schema:
        kind = field.type
        if pa.types.is_boolean(kind):
            size_bytes += len(rows)
        elif pa.types.is_primitive(kind) and kind.bit_width < 32:
            size_bytes += len(rows) * (4 - kind.bit_width // 8)
    return int(size_bytes)


def split_large(rows: pa.Table, limit: int) -> Iterator[tuple[pa.Table, int]]:
    """A row group and what its rows take in memory; halved, and again, as long as they take more than ``limit`` and are many.

    Row limits follow from the average row. Between key groups if there are several, so that none shares a row group.
    """
    size_bytes = decoded_bytes_of(rows)
    if size_bytes <= limit or len(rows) < 2:
        yield rows, size_bytes
        return
    middle = len(rows) // 2
    if KEY_GROUP.name in rows.column_names:
        groups = rows[KEY_GROUP.name].combine_chunks().to_numpy()
        ends = np.flatnonzero(np.diff(groups)) + 1
        if len(ends):
            middle = int(ends[np.abs(ends - middle).argmin()])
    yield from split_large(rows.slice(0, middle), limit)
    yield from split_large(rows.slice(middle), limit)


def stop_batches(stops: Sequence[int], amount: int, at: Sequence[int] | None = None) -> Iterator[Sequence[int]]:
    """``stops`` in pieces of at least ``amount`` rows, but the last; each begins where the one before it ends.

    ``at``: where each of the stops is in bytes; then ``amount`` is of bytes.
    """
    places = stops if at is None else at
    first = 0
    while first + 1 < len(stops):
        last = min(bisect_left(places, places[first] + amount, first + 1), len(stops) - 1)
        yield stops[first : last + 1]
        first = last


def check_row_groups(written: int, where: str) -> None:
    """Refuse a row group that would be one too many; ``InvalidState`` of kind LIMIT_EXCEEDED."""
    if written >= ROW_GROUPS_MAX:
        raise InvalidState(
            f"{where}: its rows fill more than {ROW_GROUPS_MAX} row groups, which is all that a segment may have; "
            "raise row_group_rows, or the parallelism of the operator",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
