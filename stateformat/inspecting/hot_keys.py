"""The keys of a state with most rows or bytes, exactly, in bounded memory.

Theory of operation. Rows come in batches; each batch is summed up by key at once, so a hot key is
one line per batch, however many rows it has. stateformat's rows come by key group, and a key has
only one: when there are too many sums, those of all groups but the last are complete, and only the
greatest of them are kept. Sums of one large group, and of other systems' rows, which come in any
order, are set aside in buckets by key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ..manifest import integers
from ..model import Kind
from ..reading import StateRows, Wanted
from ..schema import KEY_GROUP, row_schema
from ..segments import row_key_codes
from ..tables import HELD_BYTES, Spill, buckets_of, row_sizes, split_by_bucket, take_table

ROWS: Final = "_rows"
BYTES: Final = "_bytes"
_BUCKETS: Final = 128
_LEVELS_MAX: Final = 4
Seen = Callable[[int], None]


class HotKeys(NamedTuple):
    """The greatest keys of a state, and sums over all of them."""

    keys: pa.Table
    """The key columns, ``_key_group``, ``_rows`` and ``_bytes``; the greatest first."""
    key_count: int
    """How many keys there are in total."""
    rows: int
    size_bytes: int


def even_keys(rows: StateRows, by: str) -> int | None:
    """Return how many ``rows`` or ``bytes`` every key has; None if keys differ. Reads nothing.

    A key of a value state has one row, and if no column varies in width, every key has the same
    number of bytes.
    """
    if rows.state.kind is not Kind.VALUE:
        return None
    width, varies = row_sizes(row_schema(rows.state).empty_table().columns)
    return 1 if by == ROWS else None if varies is not None else width


def hot_keys(rows: StateRows, by: str, limit: int, *, by_group: bool, seen: Seen | None = None) -> HotKeys:
    """Return the ``limit`` keys with most rows (``by`` is ``ROWS``) or bytes (``BYTES``).

    Bytes are those of the values, as Arrow has them in memory; values are read only for ``BYTES``,
    and only columns that vary in width. ``by_group``: the rows come by key group, as stateformat's
    do. ``seen`` is called with how many rows have been read. Of keys with equal counts, the first
    ones are returned.

    Reading raises as ``ReadTask.batches`` does.
    """
    state = rows.state
    schema = row_schema(state)
    keys = [*state.key_columns]
    varying = [field.name for field in schema if row_sizes(pa.schema([field]).empty_table().columns)[1] is not None]
    fixed = row_sizes(schema.empty_table().columns)[0]
    sized = varying if by == BYTES else []
    names = [KEY_GROUP.name, *dict.fromkeys([*keys, *sized])]
    totals = _Totals(keys, by, limit, by_group=by_group, is_unique=state.kind is Kind.VALUE)
    done = 0
    for batch in rows.task.batches(wanted=Wanted(tuple(names))):
        table = pa.Table.from_batches([batch])
        more = row_sizes(table.select(sized).columns)[1] if sized else None
        size_bytes = np.full(len(table), fixed, np.int64) if more is None else more + fixed
        totals.add(
            table.select([KEY_GROUP.name, *keys])
            .append_column(ROWS, pa.array(np.ones(len(table), np.int64)))
            .append_column(BYTES, pa.array(size_bytes))
        )
        done += len(table)
        if seen is not None:
            seen(done)
    return totals.finish()


@dataclass
class _Totals:
    """Sums by key."""

    keys: list[str]
    by: str
    limit: int
    by_group: bool
    is_unique: bool = False
    """Whether a key has one row."""
    level: int = 0

    def __post_init__(self) -> None:
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spill: Spill[int] | None = None
        self._greatest: pa.Table | None = None
        self._count = self._rows = self._bytes = 0

    def add(self, table: pa.Table) -> None:
        """Add rows with sums of their own."""
        if not len(table):
            return
        if self.is_unique:
            self._complete(table)
            return
        summed = self._summed(table)
        self._held.append(summed)
        self._held_bytes += summed.nbytes
        if self._held_bytes > HELD_BYTES:
            self._compact()

    def finish(self) -> HotKeys:
        """All rows have been added."""
        if self._spill is None:
            if self._held:
                self._complete(self._summed(pa.concat_tables(self._held)))
        else:
            with self._spill as spill:
                self._set_aside(spill)
                for bucket in sorted(spill.sizes):
                    self._take_over(pa.Table.from_batches([batch]) for batch in spill.read(bucket))
        found = self._greatest
        if found is None:
            names = [*self.keys, KEY_GROUP.name, ROWS, BYTES]
            found = pa.table({name: pa.array([], pa.int64()) for name in names})
        return HotKeys(found, self._count, self._rows, self._bytes)

    def _compact(self) -> None:
        last = integers(self._held[-1][KEY_GROUP.name])[-1]
        summed = self._summed(pa.concat_tables(self._held))
        if self.by_group and self._spill is None:
            # The last group may continue.
            whole = integers(summed[KEY_GROUP.name]) != last
            self._complete(summed.filter(pa.array(whole)))
            summed = summed.filter(pa.array(~whole))
        self._held, self._held_bytes = [summed], summed.nbytes
        if self._held_bytes > HELD_BYTES // 2 and self.level < _LEVELS_MAX:
            self._spill = self._spill or Spill[int]()
            self._set_aside(self._spill)

    def _set_aside(self, spill: Spill[int]) -> None:
        for table in self._held:
            numbers = buckets_of([table[name] for name in self.keys], _BUCKETS, self.level)
            for bucket, rows in split_by_bucket(table, numbers):
                spill.add(bucket, rows)
        self._held, self._held_bytes = [], 0

    def _take_over(self, tables: Iterable[pa.Table]) -> None:
        """Add the sums of a bucket."""
        inner = _Totals(self.keys, self.by, self.limit, by_group=False, level=self.level + 1)
        for table in tables:
            inner.add(table)
        found = inner.finish()
        self._keep(found.keys)
        self._count += found.key_count
        self._rows += found.rows
        self._bytes += found.size_bytes

    def _complete(self, summed: pa.Table) -> None:
        """Add sums of keys that do not come again."""
        if not len(summed):
            return
        self._count += len(summed)
        self._rows += int(integers(summed[ROWS]).sum())
        self._bytes += int(integers(summed[BYTES]).sum())
        self._keep(take_table(summed, self._order(summed)))

    def _keep(self, found: pa.Table) -> None:
        both = found if self._greatest is None else pa.concat_tables([self._greatest, found])
        self._greatest = take_table(both, self._order(both))

    def _order(self, summed: pa.Table) -> npt.NDArray[np.int64]:
        """Return the positions of the greatest."""
        values = integers(summed[self.by])
        if len(values) > 4 * self.limit:
            least = np.partition(values, len(values) - self.limit)[len(values) - self.limit]
            some = np.flatnonzero(values >= least)
        else:
            some = np.arange(len(values))
        order: npt.NDArray[np.int64] = some[np.argsort(-values[some], kind="stable")][: self.limit]
        return order

    def _summed(self, table: pa.Table) -> pa.Table:
        """Return one row per key."""
        codes = row_key_codes([table[name] for name in self.keys])
        count = int(codes.max(initial=-1)) + 1
        if count == len(table):
            return table
        first = np.full(count, -1, np.int64)
        first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
        one = take_table(table.select([KEY_GROUP.name, *self.keys]), first)
        for name in (ROWS, BYTES):
            sums = np.bincount(codes, integers(table[name]), minlength=count)
            one = one.append_column(name, pa.array(sums.astype(np.int64)))
        return one
