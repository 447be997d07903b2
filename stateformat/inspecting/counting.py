"""What a comparison finds in a state's rows: how many differ, where, and whether their order does.

Counts are by change and key group, with a sample of the rows. A :class:`Pattern` says that changes
are in a few key groups, and not spread like the rows.

The entries of ``union`` and ``even_split`` state are one sequence over all subtasks. A rescale cuts
that of ``even_split`` state into chunks and may give the first one to another subtask than 0, so
its sequence may begin at another entry and wrap around at its end: it is *rotated*. Order is
checked only if both sides have the same entries. Metadata is enough if both consist of the same
rows of the same segments. Otherwise sums over the rows are compared: of their hashes times powers
of a number, which allows testing all rotations at once, in two passes with a few batches in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ..errors import CheckpointError
from ..graph import Operator
from ..keys import DEFAULT_KEY_HASH, key_group_count
from ..manifest import Ints, integers
from ..model import Mode, State
from ..schema import KEY_GROUP
from ..segments import groups_of_keys
from ..tables import copy_rows
from .comparing import Side, Step, row_runs, segment_codes
from .matching import CHANGE, row_hashes

MORE: Final = 0.2
"""How much greater the share of the changes must be than that of the rows …"""
TIMES: Final = 1.5
"""… and in each key group of a place, how many times that of the rows."""
WITHIN: Final = 0.5
"""The greatest share of the rows that is still a place."""
FEW: Final = 10
"""How many rows each key group is assumed to have in addition, so that a few rows make no
pattern.
"""
DISPERSION: Final = 3.0
"""How much more than by chance the counts must vary: the ratio of their variance to that of rows
which change at random.
"""


class Pattern(NamedTuple):
    """Key groups that have many of the changes, though they had few of the rows."""

    ranges: tuple[tuple[int, int], ...]
    changes: float
    """Their share of the changes, 0 to 1."""
    rows: float | None
    """Their share of the rows before; None if there were none, or they are not counted."""


def pattern_of(changes: Ints, rows: Ints | None) -> Pattern | None:
    """Return the key groups where the changes are; None if changes are spread like the rows.

    Args:
        changes: changed rows of each key group.
        rows: stored rows of each before the changes, since added rows do not explain why they were
            added there. None if unknown: then every group counts the same.
    """
    total = int(changes.sum())
    if not total or len(changes) < 2:
        return None
    weights = np.ones(len(changes), np.int64) if rows is None else rows + FEW
    share = weights / weights.sum()
    expected = total * share
    dispersion = float((((changes - expected) ** 2) / expected).sum()) / (len(changes) - 1)
    if dispersion <= DISPERSION:
        return None
    times = changes / expected
    order = np.argsort(-times, kind="stable")
    part, within = np.cumsum(changes[order]) / total, np.cumsum(share[order])
    # The groups that stand out most: with one more, the rows would grow by more than the changes.
    fit = (times[order] >= TIMES) & (within <= WITHIN)
    last = int(np.argmax(np.where(fit, part - within, 0.0)))
    if not fit[last] or part[last] - within[last] < MORE:
        return None
    chosen = np.sort(order[: last + 1])
    of_rows = None if rows is None or not rows.any() else float(rows[chosen].sum() / rows.sum())
    return Pattern(_ranges(chosen), float(part[last]), of_rows)


def _ranges(groups: Ints) -> tuple[tuple[int, int], ...]:
    begins = np.flatnonzero(np.append(True, np.diff(groups) > 1))
    ends = np.append(begins[1:], len(groups)) - 1
    return tuple(zip(groups[begins].tolist(), groups[ends].tolist(), strict=True))


SAME: Final = "same"
ROTATED: Final = "rotated"
OTHER: Final = "other"

_PRIME: Final = (1 << 31) - 1
_BASES: Final = (1_103_515_245, 1_966_080_511)
_ROTATIONS_MAX: Final = 64
_POSITIONS: Final = 1 << 40
_U = npt.NDArray[np.uint64]


def order_of(old: Side, new: Side, *, cyclic: bool) -> str:
    """Return ``same``, ``rotated`` (only if ``cyclic``) or ``other``, for sides with equal
    entries.
    """
    codes = segment_codes(old, new)
    if codes is not None:
        runs = (
            row_runs(old.handles, codes[0], new.handles, codes[1]),
            row_runs(new.handles, codes[1], old.handles, codes[0]),
        )
        first, second = (one.segment * _POSITIONS + one.start for one in runs)
        if np.array_equal(first, second):
            return SAME
        if cyclic and _is_rotation(first, second):
            return ROTATED
    return _order_of_rows(old, new, cyclic=cyclic)


def _is_rotation(first: Ints, second: Ints) -> bool:
    if len(first) != len(second):
        return False
    begins = np.flatnonzero(second == first[0])[:_ROTATIONS_MAX]
    return any(np.array_equal(first, np.roll(second, -begin)) for begin in begins.tolist())


def _order_of_rows(old: Side, new: Side, *, cyclic: bool) -> str:
    mine, theirs = _Sums(old), _Sums(new)
    if mine.rows == theirs.rows and mine.sums == theirs.sums:
        return SAME
    return ROTATED if cyclic and mine.rows == theirs.rows and theirs.turns_into(mine) else OTHER


class _Sums:
    """Sums over the rows of a side: each row's hash times a base to the power of its position."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self.rows = 0
        self.first: tuple[int, int] = (0, 0)
        self.sums: tuple[int, ...] = (0, 0)

        def add(place: int, hashes: tuple[_U, _U], powers: tuple[_U, _U]) -> bool:
            if not place:
                self.first = int(hashes[0][0]), int(hashes[1][0])
            self.rows = place + len(hashes[0])
            self.sums = tuple(
                (total + int((values * power % _PRIME).sum())) % _PRIME
                for total, values, power in zip(self.sums, hashes, powers, strict=True)
            )
            return False

        self._walk(add)

    def turns_into(self, other: _Sums) -> bool:
        """Return whether the rows, started at another one and wrapped around, equal those of
        ``other``.
        """
        below = [0, 0]
        whole = [pow(base, self.rows, _PRIME) - 1 for base in _BASES]

        def fits(_: int, hashes: tuple[_U, _U], powers: tuple[_U, _U]) -> bool:
            found = np.ones(len(hashes[0]), np.bool_)
            for which, (values, power) in enumerate(zip(hashes, powers, strict=True)):
                terms = np.cumsum(values * power % _PRIME)
                before = (np.concatenate([np.zeros(1, np.uint64), terms[:-1]]) + np.uint64(below[which])) % _PRIME
                below[which] = (below[which] + int(terms[-1])) % _PRIME
                # Rows before a position move to the end: times the base to the power of the row
                # count.
                turned = (np.uint64(self.sums[which]) + before * np.uint64(whole[which] % _PRIME)) % _PRIME
                found &= turned == np.uint64(other.sums[which]) * power % _PRIME
                found &= values == np.uint64(other.first[which])
            return bool(found.any())

        return self._walk(fits)

    def _walk(self, visit: Callable[[int, tuple[_U, _U], tuple[_U, _U]], bool]) -> bool:
        """Visit the rows, batch by batch, until a visit returns True."""
        place = 0
        powers = [np.ones(1, np.uint64) for _ in _BASES]
        for table in self._side.rows():
            if not len(table):
                continue
            powers = [_powers(base, known, len(table)) for base, known in zip(_BASES, powers, strict=True)]
            both = row_hashes(table.columns)
            low, high = (both & np.uint64(0xFFFFFFFF)) % _PRIME, (both >> np.uint64(32)) % _PRIME
            first, second = (
                known[: len(table)] * np.uint64(pow(base, place, _PRIME)) % _PRIME
                for base, known in zip(_BASES, powers, strict=True)
            )
            if visit(place, (low, high), (first, second)):
                return True
            place += len(table)
        return False


def _powers(base: int, known: _U, count: int) -> _U:
    """Return at least ``count`` powers of a number, from exponent 0 on, modulo the prime."""
    while len(known) < count:
        known = np.concatenate([known, known * np.uint64(pow(base, len(known), _PRIME)) % _PRIME])
    return known


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
