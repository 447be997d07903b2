"""Which rows of two sides differ, in bounded memory, and when two values are equal.

Both sides are streams of tables with the same columns. If they are small, they are compared at
once; larger ones are split into buckets that are compared one by one.

Values are compared by their bits, nested ones too; all NaNs are equal. Unlike in keys, 0.0 and -0.0
are two values. The entries of a map are compared in their order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..keys import hash_keys, mixed_hashes, normalize_key_column
from ..manifest import Ints
from ..schema import KEY_GROUP
from ..segments import one_array, row_key_codes
from ..tables import HELD_BYTES, Spill, split_by_bucket, take_table

CHANGE: Final = pa.field("_change", pa.string(), nullable=False)
"""The column that says what happened to a row: insert, delete, update_before or update_after."""
CHANGES: Final = ("insert", "delete", "update_before", "update_after")
INSERT, DELETE, BEFORE, AFTER = range(4)

_BUCKETS: Final = 128
_LEVELS_MAX: Final = 4
_SIDE_BYTES: Final = HELD_BYTES // 2
"""The two sides share the limit on what may be held."""
_FLOATS: Final = {pa.float32(): (pa.int32(), np.float32, np.int32), pa.float64(): (pa.int64(), np.float64, np.int64)}
_PRIME: Final = np.uint64(0x9E3779B97F4A7C15)
_Mask = npt.NDArray[np.bool_]
_Hashes = npt.NDArray[np.uint64]


def differences(
    old: Iterable[pa.Table], new: Iterable[pa.Table], row_key: Sequence[str], *, by_group: bool = False, level: int = 0
) -> Generator[pa.Table, None, None]:
    """Yield the rows that differ, with :data:`CHANGE` as last column. ``old`` is read first.

    A ``row_key`` occurs at most once on each side; the two rows of an update are adjacent. Without
    one, each row is in the difference as often as one side has it more. ``by_group``: rows that are
    compared at once are returned by key group, which is the same on both sides for equal keys.
    """
    streams = iter(old), iter(new)
    held = [_first_of(stream) for stream in streams]
    (before, before_ends), (after, after_ends) = held
    if not before:
        yield from (_as(INSERT, table) for table in chain(after, streams[1]))
    elif not after:
        yield from (_as(DELETE, table) for table in chain(before, streams[0]))
    elif (before_ends and after_ends) or level >= _LEVELS_MAX:
        tables = [pa.concat_tables([*some, *rest]) for (some, _), rest in zip(held, streams, strict=True)]
        yield _changed(tables[0], tables[1], row_key, by_group=by_group)
    else:
        with Spill[tuple[int, int]]() as spill:
            for number, (some, _) in enumerate(held):
                for table in chain(some, streams[number]):
                    columns = [table[name] for name in row_key or table.column_names]
                    for bucket, rows in split_by_bucket(table, value_buckets(columns, _BUCKETS, level)):
                        spill.add((bucket, number), rows)
                some.clear()
            for bucket in range(_BUCKETS):
                sides = [
                    (pa.Table.from_batches([batch]) for batch in spill.read((bucket, number))) for number in (0, 1)
                ]
                with closing(differences(sides[0], sides[1], row_key, by_group=by_group, level=level + 1)) as found:
                    yield from found


def _first_of(tables: Iterator[pa.Table]) -> tuple[list[pa.Table], bool]:
    """Return the first tables that have rows, some megabytes, and whether these are all."""
    held: list[pa.Table] = []
    size_bytes = 0
    for table in tables:
        if len(table):
            held.append(table)
            if size_bytes >= _SIDE_BYTES:
                return held, False
            size_bytes += table.nbytes
    return held, True


def _changed(old: pa.Table, new: pa.Table, row_key: Sequence[str], *, by_group: bool) -> pa.Table:
    first = second = np.zeros(0, np.int64)
    both = pa.concat_tables([old, new])
    if row_key:
        first, second = _matched(_arrays(old, row_key), _arrays(new, row_key))
        gone, fresh = np.ones(len(old), np.bool_), np.ones(len(new), np.bool_)
        gone[first], fresh[second] = False, False
        values = [name for name in old.column_names if name not in (*row_key, KEY_GROUP.name)]
        differ = ~_equal_rows(_arrays(old, values), _arrays(new, values), first, second)
        first, second = first[differ], second[differ]
    else:
        codes = value_codes(both.columns)
        gone, fresh = surplus(codes[: len(old)], codes[len(old) :])
    rows = [np.flatnonzero(gone), first, second + len(old), np.flatnonzero(fresh) + len(old)]
    changes = np.repeat(np.array([DELETE, BEFORE, AFTER, INSERT], np.int8), [len(part) for part in rows])
    # Deleted rows come first; both rows of an update are at the place of the later one.
    places = np.concatenate([rows[0] - len(old), 2 * rows[2], 2 * rows[2] + 1, 2 * rows[3]])
    chosen = np.concatenate(rows)
    order = np.argsort(places, kind="stable")
    table = take_table(both, chosen[order]).append_column(CHANGE, _words(changes[order]))
    if not by_group:
        return table
    groups = one_array(table[KEY_GROUP.name]).to_numpy()
    return table if (groups[1:] >= groups[:-1]).all() else take_table(table, np.argsort(groups, kind="stable"))


def _arrays(table: pa.Table, names: Sequence[str]) -> list[pa.Array]:
    return [one_array(table[name]) for name in names]


def _matched(old: Sequence[pa.Array], new: Sequence[pa.Array]) -> tuple[Ints, Ints]:
    """Return the positions of rows with equal keys on both sides, in the order of ``new``."""
    before, after = ([normalize_key_column(key) for key in keys] for keys in (old, new))
    old_count, new_count = len(before[0]), len(after[0])
    if old_count == new_count and all(equal_values(*pair).all() for pair in zip(before, after, strict=True)):
        # The same keys in the same order, as after most rewrites.
        return np.arange(new_count), np.arange(new_count)
    # A table of one old row a bucket finds almost all. Arrow's takes twice as long, for the others.
    bits = min(24, (4 * old_count).bit_length())
    buckets = [mixed_hashes(hash_keys(keys)) >> np.uint32(32 - bits) for keys in (before, after)]
    in_bucket = np.full(1 << bits, -1, np.int32)
    in_bucket[buckets[0]] = np.arange(old_count, dtype=np.int32)
    match = in_bucket[buckets[1]].astype(np.int64)
    second = np.flatnonzero(match >= 0)
    second = second[~_equal_rows(before, after, match[second], second)]
    match[second] = -1
    missed = np.ones(old_count, np.bool_)
    missed[match[match >= 0]] = False
    first, second = np.flatnonzero(missed), np.flatnonzero(match < 0)
    if len(first) and len(second):
        rest = [(_taken(mine, first), _taken(theirs, second)) for mine, theirs in zip(before, after, strict=True)]
        codes = row_key_codes([pa.chunked_array(pair) for pair in rest])
        position = np.full(int(codes.max()) + 1, -1, np.int64)
        position[codes[: len(first)]] = first
        match[second] = position[codes[len(first) :]]
    second = np.flatnonzero(match >= 0)
    return match[second], second


def _equal_rows(old: Sequence[pa.Array], new: Sequence[pa.Array], first: Ints, second: Ints) -> _Mask:
    equal = np.ones(len(first), np.bool_)
    for before, after in zip(old, new, strict=True):
        equal &= equal_values(_taken(before, first), _taken(after, second))
    return equal


def _taken(array: pa.Array, rows: Ints) -> pa.Array:
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
        return array.slice(int(rows[0]), len(rows))
    return pc.take(array, pa.array(rows), boundscheck=False)


def _as(change: int, table: pa.Table) -> pa.Table:
    return table.append_column(CHANGE, _words(np.full(len(table), change, np.int8)))


def _words(changes: npt.NDArray[np.int8]) -> pa.Array:
    return pc.take(pa.array(CHANGES), pa.array(changes))


def surplus(first: Ints, second: Ints) -> tuple[_Mask, _Mask]:
    """Return masks of the codes that each side has more often than the other: of a code, the last
    ones.
    """
    count = 1 + int(max(first.max(initial=-1), second.max(initial=-1)))
    return (
        _occurrence(first) >= np.bincount(second, minlength=count)[first],
        _occurrence(second) >= np.bincount(first, minlength=count)[second],
    )


def _occurrence(codes: Ints) -> Ints:
    """Return how many rows before each one have its code."""
    order = np.argsort(codes, kind="stable")
    found = np.empty(len(codes), np.int64)
    found[order] = places_of(codes[order])
    return found


def places_of(groups: Ints) -> Ints:
    """Return how many entries before each one are of its group; ``groups`` ascend."""
    place = np.arange(len(groups))
    begins = np.append(True, groups[1:] != groups[:-1])[: len(groups)]
    return place - np.maximum.accumulate(np.where(begins, place, 0))


def equal_values(left: pa.Array, right: pa.Array) -> _Mask:
    """Return whether each value of one array equals that of another, of the same type and
    length.
    """
    if pa.types.is_nested(left.type):
        codes = value_codes([pa.chunked_array([left, right])])
        found: _Mask = codes[: len(left)] == codes[len(left) :]
        return found
    left, right = _comparable(left), _comparable(right)
    if not (left.null_count or right.null_count):
        return _mask(pc.equal(left, right))
    both_null = pc.and_(pc.is_null(left), pc.is_null(right))
    return _mask(pc.or_(pc.fill_null(pc.equal(left, right), False), both_null))


def value_codes(columns: Sequence[pa.ChunkedArray]) -> Ints:
    """Return a number per row, equal exactly for rows with equal values in all ``columns``."""
    return row_key_codes([_comparable(one_array(column)) for column in columns])


def value_buckets(columns: Sequence[pa.ChunkedArray], count: int, level: int) -> Ints:
    """Return one of ``count`` buckets for each row, by its values and the ``level``; for any
    type. Equal keys have equal buckets too.
    """
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashes = hashes * _PRIME + _hashes(one_array(column))
    folded = (hashes ^ (hashes >> np.uint64(32))).astype(np.uint32).view(np.int32)
    return (mixed_hashes(folded, level).astype(np.int64) * count) >> 32


def row_hashes(columns: Sequence[pa.ChunkedArray]) -> _Hashes:
    """Return a 64-bit hash of each row, equal for rows with equal values; for any type."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        array = one_array(column)
        hashes = hashes * _PRIME + _hashes(_bits(array) if array.type in _FLOATS else array)
    # Spread over all bits: a single column of numbers has a 32-bit hash.
    hashes *= np.uint64(0x9FB21C651E98DF25)
    return hashes ^ (hashes >> np.uint64(28))


def _mask(found: Any) -> _Mask:
    mask: _Mask = found.to_numpy(zero_copy_only=False)
    return mask


def _bits(array: pa.Array) -> pa.Array:
    """Return the bits of floats as integers."""
    kind, floats, integers = _FLOATS[array.type]
    values = pc.fill_null(array, 0).to_numpy(zero_copy_only=False)
    bits = values.view(integers)
    odd = np.isnan(values)
    if odd.any():
        bits = np.where(odd, np.array(np.nan, floats).view(integers), bits)
    return pa.array(bits, kind, mask=_mask(array.is_null()) if array.null_count else None)


def _comparable(array: pa.Array) -> pa.Array:
    """Return the values as keys that are equal if these are: floats as integers, lists as bytes."""
    kind = array.type
    if kind in _FLOATS:
        return _bits(array)
    if pa.types.is_struct(kind):
        children = [_comparable(child) for child in array.flatten()]
        fields = [pa.field(str(number), child.type) for number, child in enumerate(children)]
        valid = pa.py_buffer(np.packbits(_mask(array.is_valid()), bitorder="little"))
        return pa.Array.from_buffers(pa.struct(fields), len(array), [valid], -1, children=children)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        entries = _as_list(array)
        codes = row_key_codes([_comparable(entries.flatten())]) if len(entries) else np.zeros(0, np.int64)
        ends = 8 * np.cumsum(_lengths(entries))
        offsets = pa.py_buffer(np.concatenate([np.zeros(1, np.int64), ends]))
        valid = pa.py_buffer(np.packbits(_mask(array.is_valid()), bitorder="little"))
        return pa.Array.from_buffers(pa.large_binary(), len(array), [valid, offsets, pa.py_buffer(codes)])
    return array


def _as_list(array: pa.Array) -> pa.Array:
    """Return a map as a list of its entries; a list as it is."""
    if not pa.types.is_map(array.type):
        return array
    entries = pa.StructArray.from_arrays([array.keys, array.items], names=["key", "value"])
    buffers = array.buffers()[:2]
    return pa.Array.from_buffers(pa.list_(entries.type), len(array), buffers, -1, array.offset, children=[entries])


def _lengths(lists: pa.Array) -> npt.NDArray[np.int64]:
    lengths: npt.NDArray[np.int64] = (
        pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return lengths


def _hashes(array: pa.Array) -> _Hashes:
    kind = array.type
    valid = _mask(array.is_valid()).astype(np.uint64)
    found: _Hashes
    if pa.types.is_struct(kind):
        found = valid
        for child in array.flatten():
            found = found * _PRIME + _hashes(child)
        return found
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        entries = _as_list(array)
        lengths = _lengths(entries)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        place = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
        values = (_hashes(entries.flatten()) + _PRIME) * (2 * place.astype(np.uint64) + np.uint64(1))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values, dtype=np.uint64)])
        found = sums[ends[1:]] - sums[ends[:-1]]
        found *= _PRIME
        found += lengths.astype(np.uint64) * np.uint64(2) + valid
        return found
    found = hash_keys([array]).view(np.uint32).astype(np.uint64)
    return found
