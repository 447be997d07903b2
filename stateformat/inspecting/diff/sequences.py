"""Whether both sides of list-like state have their entries in the same order.

The entries of ``union`` and ``even_split`` state are one sequence over all subtasks. A rescale cuts
that of ``even_split`` state into chunks and may give the first one to another subtask than 0, so
its sequence may begin at another entry and wrap around at its end: it is *rotated*.

Checked only if both sides have the same entries. Metadata is enough if both consist of the same
rows of the same segments. Otherwise sums over the rows are compared: of their hashes times powers
of a number, which allows testing all rotations at once, in two passes with a few batches in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from ...manifest import Ints
from ..comparing import Side, row_hashes, row_runs, segment_codes

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
