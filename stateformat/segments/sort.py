"""Sort rows by group, one row group at a time (SPEC.md section 5.2).

Theory of operation. The sort is stable and has two passes, like a radix sort. First, rows are taken
in chunks that fit in the processor's cache; each is sorted and gathered, and has one run of rows
per group. Second, a range of the result copies, for each group, the run of every chunk; if runs are
short, it copies chunk by chunk and sorts again. The first pass gathers fixed-width columns up to
:data:`_COPIED_BYTES_MAX` per row, and row numbers for all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import ErrorKind, InvalidState
from ..keys import hash_keys, key_groups, normalize_key_column
from ..model import Mode, State
from ..schema import CLEAR, KEY_GROUP, OP, has_key_groups
from ..tables import Spill, buckets_of, merge_sorted, prefetch, python_rows, split_by_bucket, take_rows

Groups = npt.NDArray[np.int32]
"""The group of each row: 0 … 32767."""

CHUNK_ROWS: Final = 1 << 18
"""With 8-byte values the arrays of a chunk have 2 MB each."""
_COPIED_BYTES_MAX: Final = 16
# A copy of a run costs about as much as sorting and taking this many rows.
_RUN_ROWS_MIN: Final = 128
# For passes over one array of groups: short enough that what they allocate stays in the cache.
_PASS_ROWS: Final = 1 << 16
# Arrow sorts a range of integers of this size by counting, stably, and a larger one by comparing.
_COUNTING_SORT_MAX: Final = 4095
_JOINED_BYTES_MAX: Final = 24 << 20
"""Columns in chunks are joined up to this size: gathering from one array is faster."""
_SLICE_BYTES_MAX: Final = 256 << 20
"""A larger slice has several chunks, since 32-bit offsets end at 2 GiB."""
# The number type of each width in bytes.
_NUMBERS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}

_Parts = Sequence[pa.Array]
"""What the first pass gathered, in the order of a range: row numbers, values, validity bytes."""


def groups_of_keys(columns: Sequence[pa.ChunkedArray], max_parallelism: int, key_hash: str) -> Groups:
    """Return the key group of each row (SPEC.md section 5.3), hashed by two threads."""
    groups = np.empty(max(map(len, columns), default=0), np.int32)

    def fill(start: int) -> None:
        part = groups[start : start + CHUNK_ROWS]
        key_groups(hash_keys([c.slice(start, CHUNK_ROWS) for c in columns], key_hash), max_parallelism, out=part)

    calls = (partial(fill, start) for start in range(0, max(1, len(groups)), CHUNK_ROWS))
    with closing(prefetch(calls, workers=2, depth=3)) as filled:
        deque(filled, 0)
    return groups


def is_clustered(table: pa.Table, state: State, groups: Groups) -> bool:
    """Return whether rows are in segment order: by group; in flight by (group, _sender, _seq)."""
    if state.mode is not Mode.IN_FLIGHT:
        return is_ascending(groups)
    undecided = np.ones(max(0, len(groups) - 1), np.bool_)
    for column in (groups, *_sender_and_seq(table)):
        if (undecided & (column[1:] < column[:-1])).any():
            return False
        undecided &= column[1:] == column[:-1]
    return True


def clustered(table: pa.Table, state: State, groups: Groups) -> tuple[pa.Table | Clustered, npt.NDArray[np.int64]]:
    """Return the rows in segment order, and the row count of each group from 0 on.

    Rows of one group keep their order; those in flight are by (group, ``_sender``, ``_seq``).
    ``_key_group`` comes first if the state has it. A table in order is not copied.
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
    """Return the row numbers in the order that :func:`clustered` makes."""
    if state.mode is Mode.IN_FLIGHT:
        return np.lexsort((*_sender_and_seq(table)[::-1], groups))
    # numpy sorts 16 bits by radix.
    return np.argsort(groups.astype(np.uint16), kind="stable")


def _sender_and_seq(table: pa.Table) -> list[npt.NDArray[Any]]:
    return [one_array(table[name]).to_numpy() for name in ("_sender", "_seq")]


def is_ascending(numbers: npt.NDArray[Any]) -> bool:
    """Return whether no number is less than the one before it."""
    for start in range(0, len(numbers), _PASS_ROWS):
        window = numbers[start : start + _PASS_ROWS + 1]
        if not (window[1:] >= window[:-1]).all():
            return False
    return True


def group_counts(groups: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the number of rows of each group from 0 on."""
    if len(groups) > _PASS_ROWS and is_ascending(groups):
        return np.diff(np.searchsorted(groups, np.arange(int(groups[-1]) + 2)))
    counts = np.zeros(int(groups.max(initial=-1)) + 1, np.int64)
    for start in range(0, len(groups), _PASS_ROWS):
        # bincount widens its input; a chunk of that stays in the cache.
        counts += np.bincount(groups[start : start + _PASS_ROWS], minlength=len(counts))
    return counts


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Return the column as one array; copied if it has several chunks."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _order_by_group(groups: Groups) -> pa.Array:
    if groups.max(initial=0) <= _COUNTING_SORT_MAX:
        return pc.array_sort_indices(pa.array(groups))
    return pa.array(np.argsort(groups.astype(np.uint16), kind="stable"))


class Clustered:
    """A table sorted by group, read in slices by one thread at a time.

    ``groups`` are those of the chosen ``rows`` (None: all). ``key_group`` adds the groups as a
    first column.
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
        # Row numbers are the first part if a column is taken by them.
        self._numbered = len(self._copied) < table.num_columns
        self._number_type = np.uint32 if len(table) < 1 << 32 else np.uint64
        self._group_count = int(groups.max(initial=0)) + 1
        calls = (partial(self._gather, groups, rows, start) for start in range(0, len(groups), CHUNK_ROWS))
        with closing(prefetch(calls, workers=2, depth=3)) as made:
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
            # A group that is wanted only in part may be large: only whole groups are sorted again.
            stop = start + length
            whole_from = int(self._ends[first]) if low else start
            whole_to = stop if stop == self._ends[last] else int(self._ends[last - 1])
            borders = pairwise([start, whole_from, whole_to, stop])
            return pa.concat_tables(self.slice(begin, end - begin) for begin, end in borders)
        else:
            parts = self._sorted_runs(begins, ends)
        columns = [taker(parts) for taker in self._takers]
        if self._has_key_group:
            counts = np.diff(np.clip(self._ends[first : last + 1] - before, low, high), prepend=low)
            columns.insert(0, pa.array(np.repeat(np.arange(first, last + 1, dtype=np.int32), counts)))
        return pa.Table.from_arrays(columns, schema=self._schema)

    def _runs(self, begins: npt.NDArray[Any], ends: npt.NDArray[Any], low: int, high: int) -> _Parts:
        """Return rows low … high − 1 of the runs, by group, then chunk, the axes of ``begins``."""
        group_count, chunk_count = begins.shape
        if chunk_count == 1:
            # Its runs are contiguous.
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
        group_count, chunk_count = begins.shape
        groups = np.repeat(np.tile(np.arange(group_count, dtype=np.int32), chunk_count), (ends - begins).T.ravel())
        order = _order_by_group(groups)
        parts = self._runs(begins[:1], ends[-1:], 0, len(groups))
        return [pc.take(part, order, boundscheck=False) for part in parts]

    def _gather(self, groups: Groups, rows: npt.NDArray[Any] | None, start: int) -> tuple[npt.NDArray[Any], _Parts]:
        """Make the first pass over the chunk from row ``start``; return run bounds and parts."""
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
        """Choose the columns to gather; return how each column is made from parts of a slice."""
        room = _COPIED_BYTES_MAX if copies else 0
        chosen = []
        for width in map(_width_bytes, table.columns):
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
    """Return the bytes of a fixed-width value with its validity; 0 for any other column."""
    try:
        width, rest = divmod(column.type.bit_width, 8)
    except ValueError:
        return 0
    return 0 if rest or pa.types.is_nested(column.type) else width + (column.null_count > 0)


def _view(array: pa.Array) -> npt.NDArray[Any]:
    width = array.type.bit_width // 8
    return np.frombuffer(array.buffers()[1], _NUMBERS[width], len(array), array.offset * width)


def _concat(arrays: Sequence[npt.NDArray[Any]], length: int) -> pa.Buffer:
    # Arrow keeps this memory for the next buffer; numpy would allocate it from the system again.
    data = pa.allocate_buffer(length * arrays[0].itemsize)
    np.concatenate(arrays, out=np.frombuffer(data, arrays[0].dtype))
    return data


# Arrow gathers values with nulls many times slower than others: values and validity go separately.


def _plain(array: pa.Array, nulls: bool) -> _Parts:
    if not nulls:
        return [array]
    values = pa.Array.from_buffers(array.type, len(array), [None, array.buffers()[1]], 0, array.offset)
    return [values, array.is_valid().cast(pa.uint8())]


def _from_parts(position: int, nulls: bool, parts: _Parts) -> pa.Array:
    return _with_validity(parts[position], parts[position + 1]) if nulls else parts[position]


def _with_validity(values: pa.Array, valid: pa.Array) -> pa.Array:
    """Return the values with nulls where ``valid`` (uint8) is 0."""
    start, width = values.offset, values.type.bit_width // 8
    bits = np.packbits(valid.to_numpy(), bitorder="little")
    data = values.buffers()[1].slice(start * width, len(values) * width)
    return pa.Array.from_buffers(values.type, len(values), [pa.py_buffer(bits), data])


def _by_number(column: pa.ChunkedArray, *, joins: bool) -> Callable[[_Parts], pa.Array]:
    if column.num_chunks > 1 and not joins:
        return lambda parts: take_rows(column, parts[0].to_numpy())
    arrays = _plain(one_array(column), nulls=bool(_width_bytes(column) and column.null_count))

    def take(parts: _Parts) -> pa.Array:
        taken = [pc.take(array, parts[0], boundscheck=False) for array in arrays]
        return _with_validity(*taken) if len(taken) > 1 else taken[0]

    return take


# ---- external sort -------------------------------------------------------------------------------
#
# Sort a stream of unordered rows in bounded memory, by merging runs (SPEC.md 5.2).


_PIECE_BYTES: Final = 256 << 10
_RUNS_MAX: Final = 32
"""Runs merged at a time; more are first merged into fewer."""
_SLICE_BYTES: Final = 8 << 20
RUN_BYTES: Final = 64 << 20
"""The rows of one run, which are sorted in memory."""


class SortedRuns:
    """Takes tables in any order and returns all rows in segment order. Close it afterwards.

    ``then`` names integer columns without nulls by which rows of one group are ordered too; the
    rows of each table already are.
    """

    def __init__(self, state: State, then: Sequence[str] = ()) -> None:
        self._state = state
        self._keys = [KEY_GROUP.name] if has_key_groups(state) else []
        if state.mode is Mode.IN_FLIGHT:
            self._keys += ["_sender", "_seq"]
        self._keys += then
        self._spill: Spill[int] = Spill(_PIECE_BYTES)
        self.count = 0
        """The number of runs."""

    def add(self, rows: pa.Table, groups: Groups) -> None:
        """Set a run aside. Rows have the columns of a segment, with or without ``_key_group``."""
        ordered, _ = clustered(rows, self._state, groups)
        step = max(1, _SLICE_BYTES * len(rows) // max(1, rows.nbytes))
        for start in range(0, len(rows), step):
            self._spill.add(self.count, ordered.slice(start, min(step, len(rows) - start)))
        self.count += 1

    def merged(self) -> Iterator[pa.Table]:
        """Return all rows, sorted, a few megabytes at a time."""
        return self._merge(self._spill, range(self.count))

    def close(self) -> None:
        self._spill.close()

    def _merge(self, spill: Spill[int], runs: range) -> Iterator[pa.Table]:
        if len(runs) <= _RUNS_MAX:
            streams = [(pa.Table.from_batches([batch]) for batch in spill.read(run)) for run in runs]
            yield from merge_sorted(streams, self._keys)
            return
        starts = range(0, len(runs), _RUNS_MAX)
        with Spill[int](_PIECE_BYTES) as longer:
            for run, start in enumerate(starts):
                for rows in self._merge(spill, runs[start : start + _RUNS_MAX]):
                    longer.add(run, rows)
            yield from self._merge(longer, range(len(starts)))


# ---- unique keys ---------------------------------------------------------------------------------
#
# Row keys as numbers, and the check that each row key occurs once (SPEC.md section 5.3).


_CODES_MAX: Final = 2**62
KEYS_BYTES_MAX: Final = 32 << 20
"""Row keys of one key group that take more are set aside in a file."""
REPEATED_SHOWN: Final = 3
"""How many repeated row keys an error names."""
_BUCKETS: Final = 64
_BUCKET_BYTES_MAX: Final = 8 << 20
"""A bucket is larger only if one key has very many rows, or one key group very many keys."""
# Values of these types are equal exactly if these integers are.
_PLAIN_TYPES: Final = {
    **dict.fromkeys((pa.int8(), pa.int16(), pa.int32(), pa.date32()), pa.int32()),
    **dict.fromkeys((pa.int64(), pa.timestamp("us"), pa.timestamp("us", tz="UTC")), pa.int64()),
}


def row_key_codes(columns: Sequence[Any]) -> npt.NDArray[np.int64]:
    """Return a number per row, equal exactly for rows equal in all ``columns``; from 0, no gaps."""
    codes, count, dense = _column_codes(columns[0])
    for column in columns[1:]:
        more, more_count, _ = _column_codes(column)
        codes, count, dense = *_combine(codes, count, more, more_count), False
    return codes if dense else _dense(codes)[0]


def _dense(codes: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int]:
    encoded = pa.array(codes).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), len(encoded.dictionary)


def _combine(codes: Any, count: int, more: Any, more_count: int) -> tuple[npt.NDArray[np.int64], int]:
    if count * more_count > _CODES_MAX:
        # Two counts of distinct values, each at most the row count, have a product that fits again.
        codes, count = _dense(codes)
    return codes * more_count + more, count * more_count


def _column_codes(column: Any) -> tuple[npt.NDArray[np.int64], int, bool]:
    """Return the codes, a number above all of them, and whether they have no gaps."""
    if isinstance(column, pa.ChunkedArray):
        # Arrow does not unify the dictionaries of several chunks if they hold nulls.
        column = one_array(column)
    if pa.types.is_struct(column.type):
        # Flattening hides what is under a null struct; the validity distinguishes it from a struct
        # of nulls.
        codes, count = column.is_valid().cast(pa.int8()).to_numpy(zero_copy_only=False).astype(np.int64), 2
        for child in column.flatten():
            more, more_count, _ = _column_codes(child)
            codes, count = _combine(codes, count, more, more_count)
        return codes, count, False
    encoded = pc.dictionary_encode(normalize_key_column(column), null_encoding="encode")
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), max(1, len(encoded.dictionary)), True


class RowKeyCheck:
    """Raises ``InvalidState`` (DUPLICATE_ROW_KEY) for row keys that occur on several rows.

    It does so once :data:`REPEATED_SHOWN` are known, or at the end. In a delta, clears count
    separately from upserts and deletes.
    """

    def __init__(self, state: State, where: str) -> None:
        self._row_key = list(state.row_key)
        self._where = where
        self._group = -1
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spill: Spill[int] | None = None
        self._repeated: list[tuple[dict[str, Any], int]] = []

    def add(self, rows: pa.Table) -> None:
        """Take the next rows, in segment order, with ``_key_group``."""
        if not len(rows):
            return
        names = [*self._row_key, *([OP.name] if OP.name in rows.column_names else [])]
        groups = one_array(rows[KEY_GROUP.name]).to_numpy()
        keys = rows.select(names)
        first, last = int(groups[0]), int(groups[-1])
        # The group that is held may continue in these rows, and their last group in the next.
        border = int(np.searchsorted(groups, self._group, "right")) if first == self._group else 0
        start = int(np.searchsorted(groups, last))
        if self._group == last:
            self._hold(keys)
            return
        if self._spill is None:
            # Small groups are cheaper to check together.
            self._check([*self._held, keys.slice(0, start)])
        else:
            self._hold(keys.slice(0, border))
            self._check_spilled(self._spill)
            self._check([keys.slice(border, start - border)])
        self._group, self._held, self._held_bytes = last, [], 0
        self._hold(keys.slice(start))

    def finish(self) -> None:
        if self._spill is None:
            self._check(self._held)
        else:
            self._check_spilled(self._spill)
        self._held = []
        if self._repeated:
            raise self._refusal()

    def _hold(self, keys: pa.Table) -> None:
        self._held.append(keys)
        self._held_bytes += keys.nbytes
        if self._held_bytes > KEYS_BYTES_MAX:
            self._spill = self._spill or Spill()
            self._set_aside(self._spill)

    def _set_aside(self, spill: Spill[int]) -> None:
        for keys in self._held:
            for bucket, chosen in split_by_bucket(
                keys, buckets_of([keys[name] for name in self._row_key], _BUCKETS, 0)
            ):
                spill.add(bucket, chosen)
        self._held, self._held_bytes = [], 0

    def _check_spilled(self, spill: Spill[int]) -> None:
        self._set_aside(spill)
        with spill:
            for bucket in range(_BUCKETS):
                self._check_bucket(spill.read(bucket))
        self._spill = None

    def _check_bucket(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Check a bucket. One key on very many rows is found among the first of them."""
        parts: list[pa.Table] = []
        size_bytes = 0
        for batch in batches:
            parts.append(pa.Table.from_batches([batch]))
            size_bytes += batch.nbytes
            if size_bytes - batch.nbytes < _BUCKET_BYTES_MAX <= size_bytes:
                self._check(parts)
                if self._repeated:
                    raise self._refusal(at_least=True)
        self._check(parts)

    def _check(self, parts: list[pa.Table]) -> None:
        rows = pa.concat_tables(parts) if parts else None
        if rows is None or len(rows) < 2:
            return
        columns = [rows[name] for name in self._row_key]
        if OP.name in rows.column_names:
            columns.append(pc.equal(rows[OP.name], CLEAR))
        suspects = _possible_duplicates(columns)
        if suspects is None:
            return
        rows = rows.take(pa.array(suspects))
        codes = row_key_codes([column.take(pa.array(suspects)) for column in columns])
        _, first, counts = np.unique(codes, return_index=True, return_counts=True)
        for found in np.flatnonzero(counts > 1)[: REPEATED_SHOWN - len(self._repeated)].tolist():
            key = python_rows(rows.select(self._row_key).slice(int(first[found]), 1))[0]
            self._repeated.append((key, int(counts[found])))
        if len(self._repeated) == REPEATED_SHOWN:
            raise self._refusal()

    def _refusal(self, *, at_least: bool = False) -> InvalidState:
        (key, count), *more = self._repeated
        others = "".join(f", {other!r} on {times}" for other, times in more)
        found = f"at least {count}" if at_least else f"{count}"
        return InvalidState(
            f"{self._where}: row key {key!r} stands on {found} rows{others}, and may appear only once in "
            "one write; keep the row that counts",
            kind=ErrorKind.DUPLICATE_ROW_KEY,
            row_key=key,
            row_keys=[one for one, _ in self._repeated],
            row_counts=[f"at least {count}" if at_least else str(count) for _, count in self._repeated],
        )


def _possible_duplicates(columns: Sequence[pa.ChunkedArray]) -> npt.NDArray[np.int64] | None:
    """Return rows that include every duplicate; None if there is none."""
    only = columns[0]
    if len(columns) == 1 and only.type in _PLAIN_TYPES and only.null_count == 0:
        numbers = only.cast(_PLAIN_TYPES[only.type]).to_numpy()
    else:
        numbers = hash_keys(columns)
    ordered = np.sort(numbers)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return None
    # A table of 16 bits finds their rows without sorting the row numbers; a few others match too
    # and are also compared.
    marked = np.zeros(1 << 16, np.bool_)
    marked[repeated & 0xFFFF] = True
    suspects: npt.NDArray[np.int64] = np.flatnonzero(marked[numbers & 0xFFFF])
    return suspects
