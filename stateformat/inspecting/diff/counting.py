"""What the steps of a comparison find: counts of rows by change and key group, and a sample of
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...errors import CheckpointError
from ...graph import Operator
from ...keys import DEFAULT_KEY_HASH, key_group_count
from ...manifest import Ints, integers
from ...model import Mode, State
from ...schema import KEY_GROUP
from ...segments import groups_of_keys
from ...tables import copy_rows
from ..comparing import CHANGE, Step

SAMPLE_ROWS: Final = 20
"""How many rows of each kind are kept, unless the caller says otherwise."""
_SAMPLE_BYTES: Final = 8 << 20

ADDED, REMOVED, BEFORE, AFTER = "insert", "delete", "update_before", "update_after"


class GroupCounts(NamedTuple):
    """Changed rows by key group, of the later checkpoint's numbering."""

    added: Ints
    removed: Ints
    changed: Ints

    @property
    def total(self) -> Ints:
        """All changes of each group."""
        return self.added + self.removed + self.changed


class Sample(NamedTuple):
    """Some of the rows that differ; ``before`` and ``after`` correspond row by row."""

    added: pa.Table | None
    removed: pa.Table | None
    before: pa.Table | None
    after: pa.Table | None


class Counted(NamedTuple):
    """The rows of a state that differ."""

    added: int
    removed: int
    changed: int
    groups: GroupCounts | None
    """None if there are no keys, or if key groups cannot be computed."""
    sample: Sample
    read_bytes: int
    """About how many stored bytes were read."""


def counted(
    steps: Iterable[Step],
    state: State,
    after: Operator | None,
    *,
    rehash: bool,
    rows: int,
    read: Callable[[int], None],
) -> Counted:
    """Run the steps.

    Args:
        steps: what :func:`planned` returned.
        state: how rows are identified.
        after: the operator whose key groups are counted; None for none.
        rehash: whether ``_key_group`` of some rows is in another numbering.
        rows: how many rows of each kind to keep.
        read: called with the stored bytes of each step when it is done.
    """
    groups = _Groups(state, after, rehash=rehash)
    kept = {change: _Kept(rows) for change in (ADDED, REMOVED, BEFORE, AFTER)}
    totals = dict.fromkeys(kept, 0)
    read_bytes = 0
    for step in steps:
        with closing(step.changes()) as tables:
            for table in tables:
                if not len(table):
                    continue
                changes = table[CHANGE.name]
                for found in changes.value_counts().to_pylist():
                    change, count = found["values"], found["counts"]
                    totals[change] += count
                    if kept[change].wants_more or (groups.counts is not None and change != BEFORE):
                        of_kind = table if count == len(table) else table.filter(pc.equal(changes, change))
                        groups.add(change, of_kind)
                        kept[change].add(of_kind)
        read_bytes += step.size_bytes
        read(step.size_bytes)
    return Counted(
        totals[ADDED],
        totals[REMOVED],
        totals[AFTER],
        groups.found(),
        Sample(*(kept[change].table() for change in (ADDED, REMOVED, BEFORE, AFTER))),
        read_bytes,
    )


class _Kept:
    """The first rows of a kind."""

    def __init__(self, rows: int) -> None:
        self._left = rows
        self._bytes = _SAMPLE_BYTES
        self._tables: list[pa.Table] = []

    @property
    def wants_more(self) -> bool:
        return self._left > 0 and self._bytes > 0

    def add(self, table: pa.Table) -> None:
        if self.wants_more:
            # A slice would keep the whole table alive.
            some = copy_rows(table.slice(0, self._left))
            self._tables.append(some)
            self._left -= len(some)
            self._bytes -= some.nbytes

    def table(self) -> pa.Table | None:
        if not self._tables:
            return None
        table = pa.concat_tables(self._tables)
        return table.drop_columns([name for name in (CHANGE.name, KEY_GROUP.name) if name in table.column_names])


class _Groups:
    """Counts by key group."""

    def __init__(self, state: State, after: Operator | None, *, rehash: bool) -> None:
        self._state = state
        self._operator = after
        self._rehash = rehash
        self.counts: dict[str, Ints] | None = None
        if after is not None and state.mode is Mode.KEYED:
            self.counts = {change: np.zeros(key_group_count(after), np.int64) for change in (ADDED, REMOVED, AFTER)}

    def add(self, change: str, table: pa.Table) -> None:
        if self.counts is None or change == BEFORE:
            return
        found = self._of(table)
        if found is None or found.max(initial=0) >= len(self.counts[change]):
            self.counts = None
        else:
            self.counts[change] += np.bincount(found, minlength=len(self.counts[change]))

    def _of(self, table: pa.Table) -> Ints | None:
        if not self._rehash:
            return integers(table[KEY_GROUP.name])
        assert self._operator is not None
        keys = [table[name] for name in self._state.key_columns]
        name = self._operator.key_hash or DEFAULT_KEY_HASH
        try:
            return groups_of_keys(keys, key_group_count(self._operator), name).astype(np.int64)
        except CheckpointError:
            return None

    def found(self) -> GroupCounts | None:
        if self.counts is None:
            return None
        return GroupCounts(self.counts[ADDED], self.counts[REMOVED], self.counts[AFTER])
