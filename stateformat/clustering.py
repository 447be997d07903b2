"""Rows sorted by group, a row group at a time (SPEC.md section 5.2).

Theory of operation. The order is stable, so it could be one sort and one gather; but a gather that jumps over a whole
column waits for memory at every value. So it is done in two passes, as a radix sort does it:

1. The rows are taken in chunks whose columns stay in the processor's cache. A chunk is sorted by group, by counting, and
   gathered in that order; chunks are independent, so two threads share them. A chunk now has a run of rows for each group.
2. A range of the result is, for each of its groups, the run of each chunk, one after another: copies of contiguous memory.
   Where groups are so many that runs have a few rows only, the rows of all groups of the range are copied chunk by chunk
   instead, and sorted once more, which is cheap because a range is as small as a row group.

The first pass holds a copy of what it gathers. Only fixed-width columns are gathered in it, and no more of them than
:data:`_COPIED_BYTES_MAX` a row; of any others it gathers the row numbers, and the second pass takes the rows by number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.ahead import ahead
from stateformat.hashing import hash_keys
from stateformat.key_groups import key_groups
from stateformat.model import Mode, State
from stateformat.pieces import take_rows
from stateformat.schema import KEY_GROUP, has_key_groups

Groups = npt.NDArray[np.int32]
"""The group of each row: 0 … 32767."""

CHUNK_ROWS: Final = 1 << 18
"""Rows of a chunk: with 8-byte values its arrays are 2 MB each."""
_COPIED_BYTES_MAX: Final = 16
# A copy of a run costs about as much as sorting and taking this many rows.
_RUN_ROWS_MIN: Final = 128
# For passes over one array of groups: short enough for what they allocate to stay in the cache.
_PASS_ROWS: Final = 1 << 16
# Arrow sorts a range of integers of this size by counting, stably, and a larger one by comparing.
_COUNTING_SORT_MAX: Final = 4095
_JOINED_BYTES_MAX: Final = 24 << 20
"""Columns in chunks are copied into one array each, which is faster to gather from, as long as they are no more than this."""
_SLICE_BYTES_MAX: Final = 256 << 20
"""A slice of more is put together in several chunks, since 32-bit offsets end at 2 GiB."""
# The type of numbers of a width in bytes.
_NUMBERS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

_Parts = Sequence[pa.Array]
"""What the first pass has gathered, in the order of a range: row numbers, values, bytes that say what is not null."""


def groups_of_keys(columns: Sequence[pa.ChunkedArray], max_parallelism: int, key_hash: str) -> Groups:
    """The key group of each row (SPEC.md section 5.3), hashed by two threads where there are many rows.

    Raises ``InvalidInput`` as ``hash_keys`` and ``key_groups`` do.
    """
    groups = np.empty(max(map(len, columns), default=0), np.int32)

    def fill(start: int) -> None:
        part = groups[start : start + CHUNK_ROWS]
        key_groups(hash_keys([c.slice(start, CHUNK_ROWS) for c in columns], key_hash), max_parallelism, out=part)

    calls = (partial(fill, start) for start in range(0, max(1, len(groups)), CHUNK_ROWS))
    with closing(ahead((call for call in calls), workers=2, depth=3)) as filled:
        deque(filled, 0)
    return groups


def is_clustered(table: pa.Table, state: State, groups: Groups) -> bool:
    """Whether the rows already stand in the order of a segment: by group; rows in flight by (group, _sender, _seq)."""
    if state.mode is not Mode.IN_FLIGHT:
        return is_ascending(groups)
    undecided = np.ones(max(0, len(groups) - 1), np.bool_)
    for column in (groups, *_sender_and_seq(table)):
        if (undecided & (column[1:] < column[:-1])).any():
            return False
        undecided &= column[1:] == column[:-1]
    return True


def clustered(table: pa.Table, state: State, groups: Groups) -> tuple[pa.Table | Clustered, npt.NDArray[np.int64]]:
    """The rows in the order of a segment, and how many each group from 0 on has.

    Keyed rows are ordered by ``groups`` and keep their order within one; rows in flight by (group, ``_sender``, ``_seq``).
    ``_key_group``, where the state has it, is the first column of the result; ``table`` may have it or not. A table whose
    rows are in order is not copied. Otherwise the result gives slices, which are put together as they are asked for.
    """
    if KEY_GROUP.name in table.column_names:
        table = table.drop_columns([KEY_GROUP.name])
    keyed = has_key_groups(state)
    if is_clustered(table, state, groups):
        if keyed:
            table = table.add_column(0, KEY_GROUP, pa.chunked_array([pa.array(groups, KEY_GROUP.type)]))
        return table, group_counts(groups)
    rows = np.lexsort(_sender_and_seq(table)[::-1]) if state.mode is Mode.IN_FLIGHT else None
    found = Clustered(table, groups if rows is None else groups[rows], rows, key_group=KEY_GROUP if keyed else None)
    return found, found.counts


def segment_order(table: pa.Table, state: State, groups: Groups) -> npt.NDArray[Any]:
    """The number of the row that stands at each place, in the order that :func:`clustered` makes."""
    if state.mode is not Mode.IN_FLIGHT:
        return np.argsort(groups.astype(np.uint16), kind="stable")
    return np.lexsort((*_sender_and_seq(table)[::-1], groups))


def _sender_and_seq(table: pa.Table) -> list[npt.NDArray[Any]]:
    return [one_array(table[name]).to_numpy() for name in ("_sender", "_seq")]


def is_ascending(numbers: npt.NDArray[Any]) -> bool:
    """Whether each is at least the one before it."""
    for start in range(0, len(numbers), _PASS_ROWS):
        window = numbers[start : start + _PASS_ROWS + 1]
        if not (window[1:] >= window[:-1]).all():
            return False
    return True


def group_counts(groups: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """How many rows each group from 0 on has."""
    if len(groups) > _PASS_ROWS and is_ascending(groups):
        return np.diff(np.searchsorted(groups, np.arange(int(groups[-1]) + 2)))
    counts = np.zeros(int(groups.max(initial=-1)) + 1, np.int64)
    for start in range(0, len(groups), _PASS_ROWS):
        # bincount widens what it counts; a chunk of that stays in the cache.
        counts += np.bincount(groups[start : start + _PASS_ROWS], minlength=len(counts))
    return counts


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """The column as one array, which is copied only if it has several chunks."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _order_by_group(groups: Groups) -> pa.Array:
    """The row numbers sorted by group; stable, and in time proportional to the rows."""
    if groups.max(initial=0) <= _COUNTING_SORT_MAX:
        return pc.array_sort_indices(pa.array(groups))
    # numpy sorts 16 bits by radix.
    return pa.array(np.argsort(groups.astype(np.uint16), kind="stable"))


class Clustered:
    """A table sorted by group, given out in slices; by one thread at a time.

    ``groups``: the group of each row. ``rows``: the numbers of those rows of the table that are wanted, in the order that
    they keep within a group; then ``groups`` has the groups of these. None: all rows. ``key_group``: a first
    column that the table lacks, with the groups.
    """

    def __init__(
        self,
        table: pa.Table,
        groups: Groups,
        rows: npt.NDArray[Any] | None = None,
        *,
        key_group: pa.Field | None = None,
    ) -> None:
        self._has_key_group = key_group is not None
        self._slice_rows_max = max(1, _SLICE_BYTES_MAX * len(table) // max(1, table.nbytes))
        self._schema = pa.schema([key_group, *table.schema]) if self._has_key_group else table.schema
        self._copied: list[pa.ChunkedArray] = []
        self._takers = self._plan(table, rows is None)
        # Row numbers are the first part, where a column is taken by them.
        self._numbered = len(self._copied) < table.num_columns
        self._number_type = np.uint32 if len(table) < 1 << 32 else np.uint64
        self._group_count = int(groups.max(initial=0)) + 1
        calls = (partial(self._gather, groups, rows, start) for start in range(0, len(groups), CHUNK_ROWS))
        with closing(ahead((call for call in calls), workers=2, depth=3)) as made:
            chunks = list(made)
        # Where the run of each group begins in each chunk; then where the last ones end.
        cuts = np.array([cuts for cuts, _ in chunks], np.int32).reshape(-1, self._group_count + 1)
        self._cuts = np.ascontiguousarray(cuts.T)
        # For each part, one array of each chunk.
        self._parts = [[_view(part) for part in parts] for parts in zip(*(parts for _, parts in chunks), strict=True)]
        self._types = [part.type for part in chunks[0][1]] if chunks else []
        self.counts: npt.NDArray[np.int64] = np.diff(self._cuts.sum(1, dtype=np.int64))
        """Rows of each group from 0 on."""
        self._ends = np.cumsum(self.counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def slice(self, start: int, length: int) -> pa.Table:
        """The rows that stand at ``start`` … ``start`` + ``length`` − 1 in the new order."""
        if not length:
            return self._schema.empty_table()
        if length > self._slice_rows_max:
            starts = range(start, start + length, self._slice_rows_max)
            pieces = (self.slice(at, min(self._slice_rows_max, start + length - at)) for at in starts)
            return pa.concat_tables(pieces)
        first = int(np.searchsorted(self._ends, start, "right"))
        last = int(np.searchsorted(self._ends, start + length, "left"))
        before = int(self._ends[first] - self.counts[first])
        low, high = start - before, start - before + length
        begins, ends = self._cuts[first : last + 1], self._cuts[first + 1 : last + 2]
        if begins.size * _RUN_ROWS_MIN <= length or first == last or begins.shape[1] == 1:
            parts = self._runs(begins, ends, low, high)
        elif low or high < self._ends[last] - before:
            # A group of which only a part is wanted may be large: only whole ones are sorted again.
            stops = [start, start - low + int(self.counts[first]) if low else start]
            stops += [
                start + length if high == self._ends[last] - before else int(self._ends[last - 1]),
                start + length,
            ]
            return pa.concat_tables(self.slice(begin, end - begin) for begin, end in pairwise(stops))
        else:
            parts = self._sorted_runs(begins, ends)
        columns = [taker(parts) for taker in self._takers]
        if self._has_key_group:
            counts = np.diff(np.clip(self._ends[first : last + 1] - before, low, high), prepend=low)
            columns.insert(0, pa.array(np.repeat(np.arange(first, last + 1, dtype=np.int32), counts)))
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _runs(self, begins: npt.NDArray[Any], ends: npt.NDArray[Any], low: int, high: int) -> _Parts:
        """Rows low … high − 1 of the runs, by group and then by chunk: the axes of ``begins`` and ``ends``."""
        group_count, chunk_count = begins.shape
        if chunk_count == 1:
            # Its runs lie one after another.
            chunks, firsts, stops = [0], [int(begins[0, 0]) + low], [int(begins[0, 0]) + high]
        else:
            after = np.cumsum(ends - begins).reshape(begins.shape)
            chunks = [*range(chunk_count)] * group_count
            firsts = (begins + np.maximum(low - after + ends - begins, 0)).ravel().tolist()
            stops = (ends - np.maximum(after - high, 0)).ravel().tolist()
        made = []
        for part, kind in zip(self._parts, self._types, strict=True):
            runs = [part[c][first:stop] for c, first, stop in zip(chunks, firsts, stops, strict=True) if first < stop]
            data = pa.py_buffer(runs[0]) if len(runs) == 1 else _concat(runs, high - low)
            made.append(pa.Array.from_buffers(kind, high - low, [None, data]))
        return made

    def _sorted_runs(self, begins: npt.NDArray[Any], ends: npt.NDArray[Any]) -> _Parts:
        """All rows of the runs, where runs are short: copied in the order of the chunks, and sorted again."""
        group_count, chunk_count = begins.shape
        groups = np.repeat(np.tile(np.arange(group_count, dtype=np.int32), chunk_count), (ends - begins).T.ravel())
        order = _order_by_group(groups)
        parts = self._runs(begins[:1], ends[-1:], 0, len(groups))
        return [pc.take(part, order, boundscheck=False) for part in parts]

    def _gather(self, groups: Groups, rows: npt.NDArray[Any] | None, start: int) -> tuple[npt.NDArray[Any], _Parts]:
        """The first pass over the chunk of rows from ``start`` on: where its runs begin and end, and its parts."""
        groups = groups[start : start + CHUNK_ROWS]
        order = _order_by_group(groups)
        parts = []
        if self._numbered:
            numbers = order.to_numpy() if rows is None else rows[start:][order.to_numpy()]
            numbers = numbers.astype(self._number_type)
            parts.append(pa.array(numbers + self._number_type(start) if rows is None else numbers))
        for column in self._copied:
            # A slice of a chunk or two; more than one is rare.
            array = one_array(column.slice(start, CHUNK_ROWS))
            parts += [pc.take(part, order, boundscheck=False) for part in _plain(array, bool(column.null_count))]
        if self._group_count * _RUN_ROWS_MIN < len(groups):
            cuts = np.searchsorted(groups, np.arange(self._group_count + 1), sorter=order.to_numpy().view(np.int64))
        else:
            cuts = np.concatenate([[0], np.cumsum(np.bincount(groups, minlength=self._group_count))])
        return cuts.astype(np.int32), parts

    def _plan(self, table: pa.Table, copies: bool) -> list[Callable[[_Parts], pa.Array]]:
        """How each column is made of the parts of a slice; and which columns the first pass gathers."""
        widths = [_width_bytes(column) for column in table.columns]
        room = _COPIED_BYTES_MAX if copies else 0
        chosen = []
        for width in widths:
            chosen.append(0 < width <= room)
            room -= width if chosen[-1] else 0
        position = 0 if all(chosen) else 1
        takers: list[Callable[[_Parts], pa.Array]] = []
        room = _JOINED_BYTES_MAX
        for column, copied in zip(table.columns, chosen, strict=True):
            if not copied:
                room -= column.nbytes if column.num_chunks > 1 else 0
                takers.append(_by_number(column, joins=room >= 0))
                continue
            self._copied.append(column)
            takers.append(partial(_from_parts, position, bool(column.null_count)))
            position += 2 if column.null_count else 1
        return takers


def _width_bytes(column: pa.ChunkedArray) -> int:
    """Bytes of a value in a fixed-width column, and of its validity in one with nulls; 0 for any other column."""
    try:
        width, rest = divmod(column.type.bit_width, 8)
    except ValueError:
        return 0
    return 0 if rest or pa.types.is_nested(column.type) else width + (column.null_count > 0)


def _view(array: pa.Array) -> npt.NDArray[Any]:
    """The values of a fixed-width array without nulls, as numbers of their width."""
    width = array.type.bit_width // 8
    return np.frombuffer(array.buffers()[1], _NUMBERS[width], len(array), array.offset * width)


def _concat(arrays: Sequence[npt.NDArray[Any]], length: int) -> pa.Buffer:
    # In memory that Arrow keeps for the next one; numpy's would come anew from the system, page by page.
    data = pa.allocate_buffer(length * arrays[0].itemsize)
    np.concatenate(arrays, out=np.frombuffer(data, arrays[0].dtype))
    return data


# Arrow gathers values with nulls many times slower than values without: values and validity go separately.


def _plain(array: pa.Array, nulls: bool) -> _Parts:
    if not nulls:
        return [array]
    values = pa.Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], 0, array.offset)
    return [values, array.is_valid().cast(pa.uint8())]


def _from_parts(position: int, nulls: bool, parts: _Parts) -> pa.Array:
    values = parts[position]
    if not nulls:
        return values
    bits = np.packbits(parts[position + 1].to_numpy(), bitorder="little")
    # The bits begin with the first of these values, wherever in its buffer that is.
    return _with_validity(values, bits)


def _with_validity(values: pa.Array, bits: npt.NDArray[np.uint8]) -> pa.Array:
    start, width = values.offset, values.type.bit_width // 8
    data = values.buffers()[1].slice(start * width, len(values) * width)
    return pa.Array.from_buffers(values.type, len(values), [pa.py_buffer(bits), data])


def _by_number(column: pa.ChunkedArray, *, joins: bool) -> Callable[[_Parts], pa.Array]:
    """Takes the rows of a column whose numbers are the first part; ``joins``: chunks may be put together for it."""
    if column.num_chunks > 1 and not joins:
        return lambda parts: take_rows(column, parts[0].to_numpy())
    if _width_bytes(column) and column.null_count:
        values, valid = _plain(one_array(column), nulls=True)
        return lambda parts: _with_validity(
            pc.take(values, parts[0], boundscheck=False),
            np.packbits(pc.take(valid, parts[0], boundscheck=False).to_numpy(), bitorder="little"),
        )
    array = one_array(column)
    return lambda parts: pc.take(array, parts[0], boundscheck=False)
