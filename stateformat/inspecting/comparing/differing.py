"""Which rows of two sides differ, in bounded memory.

Both sides are streams of tables with the same columns. If they are small, they are compared at
once; larger ones are split into buckets that are compared one by one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ...keys import hash_keys, mixed_hashes, normalize_key_column
from ...manifest import Ints
from ...schema import KEY_GROUP
from ...segments import one_array, row_key_codes
from ...tables import HELD_BYTES, Spill, buckets_of, split_by_bucket, take_table
from .matching import surplus
from .values import equal_values, value_buckets, value_codes

CHANGE: Final = pa.field("_change", pa.string(), nullable=False)
"""The column that says what happened to a row: insert, delete, update_before or update_after."""
CHANGES: Final = ("insert", "delete", "update_before", "update_after")
INSERT, DELETE, BEFORE, AFTER = range(4)

_BUCKETS: Final = 128
_LEVELS_MAX: Final = 4
_SMALL_ROWS: Final = 4096
_FEW_ROWS: Final = 256
_COPIED_BYTES: Final = 4 << 20
_SIDE_BYTES: Final = HELD_BYTES // 2
"""The two sides share the limit on what may be held."""


class Comparison(ABC):
    """How rows of two sides are compared."""

    @abstractmethod
    def changed(self, old: pa.Table, new: pa.Table) -> pa.Table:
        """Return the rows that differ, with :data:`CHANGE` as last column."""

    @abstractmethod
    def buckets(self, rows: pa.Table, count: int, level: int) -> Ints:
        """Return one of ``count`` buckets for each row; rows to be compared with each other get the
        same.
        """


@dataclass(frozen=True)
class ByKey(Comparison):
    """Rows with a row key, which occurs at most once on each side."""

    row_key: tuple[str, ...]
    by_group: bool = True
    """Whether equal keys have equal key groups on both sides."""

    def changed(self, old: pa.Table, new: pa.Table) -> pa.Table:
        """See :meth:`Comparison.changed`; by key group, the two rows of an update adjacent."""
        if not (len(old) and len(new)):
            return _as_changes(old, new)
        first, second = self._matched(old, new)
        gone, fresh = np.ones(len(old), np.bool_), np.ones(len(new), np.bool_)
        gone[first], fresh[second] = False, False
        differ = ~self._equal(old, new, first, second)
        before, after = first[differ], second[differ]
        rows = [np.flatnonzero(gone), before, after + len(old), np.flatnonzero(fresh) + len(old)]
        changes = np.repeat(np.array([DELETE, BEFORE, AFTER, INSERT], np.int8), [len(part) for part in rows])
        # Deleted rows come first; both rows of an update are at the place of the later one.
        places = np.concatenate([rows[0] - len(old), 2 * rows[2], 2 * rows[2] + 1, 2 * rows[3]])
        chosen = np.concatenate(rows)
        order = np.argsort(places, kind="stable")
        table = take_table(pa.concat_tables([old, new]), chosen[order])
        made = _with_changes(table, changes[order])
        if not self.by_group or not len(table):
            return made
        groups = one_array(table[KEY_GROUP.name]).to_numpy()
        return made if (groups[1:] >= groups[:-1]).all() else take_table(made, np.argsort(groups, kind="stable"))

    def _matched(self, old: pa.Table, new: pa.Table) -> tuple[Ints, Ints]:
        """Return the positions of rows with equal keys on both sides, in the order of ``new``."""
        before, after = (
            [normalize_key_column(one_array(table[name])) for name in self.row_key] for table in (old, new)
        )
        if _are_aligned(before, after):
            return np.arange(len(new)), np.arange(len(new))
        match = np.full(len(new), -1, np.int64)
        if min(len(old), len(new)) < _SMALL_ROWS:
            _match_by_codes(before, after, np.arange(len(old)), np.arange(len(new)), match)
        else:
            _match_by_hash(before, after, match)
        second = np.flatnonzero(match >= 0)
        return match[second], second

    def _equal(self, old: pa.Table, new: pa.Table, first: Ints, second: Ints) -> npt.NDArray[np.bool_]:
        equal = np.ones(len(first), np.bool_)
        # Both sides are in memory; copies of them are small.
        step = max(1, _COPIED_BYTES * len(old) // max(1, old.nbytes))
        for name in old.column_names:
            if name in self.row_key or name == KEY_GROUP.name:
                continue
            before, after = one_array(old[name]), one_array(new[name])
            for start in range(0, len(first), step):
                part = slice(start, start + step)
                equal[part] &= equal_values(_taken(before, first[part]), _taken(after, second[part]))
        return equal

    def buckets(self, rows: pa.Table, count: int, level: int) -> Ints:
        """By the hash of the row key."""
        return buckets_of([rows[name] for name in self.row_key], count, level)


@dataclass(frozen=True)
class ByRow(Comparison):
    """Rows without a key: each is in the difference as often as one side has it more."""

    def changed(self, old: pa.Table, new: pa.Table) -> pa.Table:
        """See :meth:`Comparison.changed`; deletes first."""
        if not (len(old) and len(new)):
            return _as_changes(old, new)
        codes = value_codes(pa.concat_tables([old, new]).columns)
        gone, fresh = surplus(codes[: len(old)], codes[len(old) :])
        return _as_changes(take_table(old, np.flatnonzero(gone)), take_table(new, np.flatnonzero(fresh)))

    def buckets(self, rows: pa.Table, count: int, level: int) -> Ints:
        """By the hash of all columns."""
        return value_buckets(rows.columns, count, level)


def differences(
    old: Iterable[pa.Table], new: Iterable[pa.Table], comparison: Comparison, level: int = 0
) -> Generator[pa.Table, None, None]:
    """Yield the rows that differ, with :data:`CHANGE` as last column. ``old`` is read first."""
    first, second = _Side(old), _Side(new)
    first.hold()
    second.hold()
    if first.is_empty and not second.is_empty:
        yield from (_all(table, INSERT) for table in second)
    elif second.is_empty and not first.is_empty:
        yield from (_all(table, DELETE) for table in first)
    elif (first.ended and second.ended) or level >= _LEVELS_MAX:
        both = [*first], [*second]
        if both[0] and both[1]:
            yield comparison.changed(pa.concat_tables(both[0]), pa.concat_tables(both[1]))
    else:
        with Spill[tuple[int, int]]() as spill:
            for number, side in enumerate((first, second)):
                for table in side:
                    for bucket, rows in split_by_bucket(table, comparison.buckets(table, _BUCKETS, level)):
                        spill.add((bucket, number), rows)
            for bucket in range(_BUCKETS):
                stored = _stored(spill, (bucket, 0)), _stored(spill, (bucket, 1))
                with closing(differences(stored[0], stored[1], comparison, level + 1)) as tables:
                    yield from tables


def _stored(spill: Spill[tuple[int, int]], bucket: tuple[int, int]) -> Iterator[pa.Table]:
    return (pa.Table.from_batches([batch]) for batch in spill.read(bucket))


class _Side:
    """A stream that is read once; :meth:`hold` reads its first megabytes."""

    def __init__(self, tables: Iterable[pa.Table]) -> None:
        self._tables = iter(tables)
        self._held: list[pa.Table] = []
        self.ended = False

    def hold(self) -> None:
        size_bytes = 0
        while size_bytes < _SIDE_BYTES:
            table = next(self._tables, None)
            if table is None:
                self.ended = True
                break
            if len(table):
                self._held.append(table)
                size_bytes += table.nbytes

    @property
    def is_empty(self) -> bool:
        return self.ended and not self._held

    def __iter__(self) -> Iterator[pa.Table]:
        while self._held:
            yield self._held.pop(0)  # The caller may be done with one before it takes the next.
        yield from self._tables


def _are_aligned(old: Sequence[pa.Array], new: Sequence[pa.Array]) -> bool:
    """Return whether both sides have the same keys in the same order, as after most rewrites."""
    if len(old[0]) != len(new[0]):
        return False
    for rows in (_FEW_ROWS, len(old[0])):
        parts = (
            equal_values(before.slice(0, rows), after.slice(0, rows)) for before, after in zip(old, new, strict=True)
        )
        if not all(found.all() for found in parts):
            return False
    return True


def _match_by_hash(old: Sequence[pa.Array], new: Sequence[pa.Array], match: Ints) -> None:
    """Set ``match`` to the old row of each new one with an equal key.

    A hash table holds one old row per bucket; rows that do not find theirs are matched by codes.
    """
    bits = min(24, (4 * len(old[0])).bit_length())
    buckets = [mixed_hashes(hash_keys(keys)) >> np.uint32(32 - bits) for keys in (old, new)]
    in_bucket = np.full(1 << bits, -1, np.int32)
    in_bucket[buckets[0]] = np.arange(len(old[0]), dtype=np.int32)
    found = in_bucket[buckets[1]].astype(np.int64)
    second = np.flatnonzero(found >= 0)
    first = found[second]
    equal = np.ones(len(second), np.bool_)
    for before, after in zip(old, new, strict=True):
        equal &= equal_values(_taken(before, first), _taken(after, second))
    match[second[equal]] = first[equal]
    missed = np.ones(len(old[0]), np.bool_)
    missed[first[equal]] = False
    _match_by_codes(old, new, np.flatnonzero(missed), np.flatnonzero(match < 0), match)


def _match_by_codes(
    old: Sequence[pa.Array], new: Sequence[pa.Array], old_rows: Ints, new_rows: Ints, match: Ints
) -> None:
    """Set ``match`` for some of the rows."""
    if not (len(old_rows) and len(new_rows)):
        return
    keys = zip(old, new, strict=True)
    codes = row_key_codes(
        [pa.chunked_array([_taken(before, old_rows), _taken(after, new_rows)]) for before, after in keys]
    )
    position = np.full(int(codes.max()) + 1, -1, np.int64)
    position[codes[: len(old_rows)]] = old_rows
    match[new_rows] = position[codes[len(old_rows) :]]


def _taken(array: pa.Array, rows: Ints) -> pa.Array:
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1 and (rows[1:] > rows[:-1]).all():
        return array.slice(int(rows[0]), len(rows))
    return pc.take(array, pa.array(rows), boundscheck=False)


def _as_changes(old: pa.Table, new: pa.Table) -> pa.Table:
    return pa.concat_tables([_all(old, DELETE), _all(new, INSERT)])


def _all(table: pa.Table, change: int) -> pa.Table:
    return _with_changes(table, np.full(len(table), change, np.int8))


def _with_changes(table: pa.Table, changes: npt.NDArray[np.int8]) -> pa.Table:
    column = pc.take(pa.array(CHANGES), pa.array(changes))
    return table.append_column(CHANGE, column)
