"""From keys to slots: a hash table in numpy, searched and filled for a whole batch at a time.

Theory of operation. Open addressing with linear probing. An entry is one word: the 31 high bits of
the key's hash, the *tag*, a zero, and 32 bits of the slot. A probe reads one word and compares keys
only if the tag agrees. The highest bits of the hash determine where a search begins, so entries
sorted as numbers are in the order of the table. All rows of a piece take a step at once; those that
are done drop out.

Keys are entered by claims. Every row at an empty entry writes its own claim there, then all read
back. A row that reads its own claim has won the place; one that reads the claim of an equal key
shares it; the others go one step further. Equal keys take the same steps, so they meet.

Removed entries become tombstones, which searches pass over, until the table is rebuilt. Rebuilding
needs no claims: entries are sorted, and each one's place is its own or the one after its
predecessor. numpy sorts whole words several times as fast as it computes a sort order. A few
searches can use the sorted entries directly, so entries get their places only when more is searched
for, or a key is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.keys import hash_keys

from .columns import Mask, Raw, Slots

Hashes = npt.NDArray[np.uint64]

SLOTS_MAX: Final = 1 << 31

_NONE: Final = np.int64(-1)
# No entries: real entries have a zero above the slot.
_EMPTY: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
_TOMBSTONE: Final = np.uint64(0xFFFFFFFFFFFFFFFE)
_SLOT: Final = np.uint64(0xFFFFFFFF)
_TAG: Final = np.uint64(0xFFFFFFFE00000000)
_BITS_MIN: Final = 10
# Above the first load, the table is rebuilt so large that it is below the second.
_LOAD_MAX: Final = 0.6
_LOAD_BUILT: Final = 0.45
_SEARCHED_SHARE: Final = 8
"""Searching for an eighth as many keys as there are entries costs as much as placing the
entries.
"""
_PIECE_ENTRIES: Final = 1 << 16
_PIECE_ROWS: Final = 1 << 14
_NULL: Final = 0x9E3779B97F4A7C15
_HASH_OF_EMPTY: Final = hash_keys([pa.array([b""], pa.large_binary())]).view(np.uint32)[0]


def spread(hashes: Hashes) -> Hashes:
    """The finisher of splitmix64, in place, in pieces that stay in the cache."""
    for start in range(0, len(hashes), _PIECE_ROWS):
        piece = hashes[start : start + _PIECE_ROWS]
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            piece ^= piece >> np.uint64(shift)
            piece *= np.uint64(factor)
        piece ^= piece >> np.uint64(31)
    return hashes


def hash_raws(raws: Sequence[Raw], rows: int) -> Hashes:
    """Return a 64-bit hash of each row of a raw form.

    Equal rows have equal hashes; a hash is never used outside this process.
    """
    hashes = np.zeros(rows, np.uint64)
    begun = False
    for number, raw in enumerate(raws):
        if raw is None:
            continue
        is_bytes = not isinstance(raw, np.ndarray)
        if not is_bytes and raw.dtype == np.bool_:
            # Mostly validity, which must hash as None if everything is valid.
            hashes += np.where(raw, np.uint64(0), np.uint64(_NULL * (number + 1) & (1 << 64) - 1))
            continue
        if begun:
            spread(hashes)
        begun = True
        if is_bytes:
            # Empty strings do not count, so a column of them, such as the tags of timers, costs
            # nothing.
            if _has_bytes(raw):
                hashes += hash_keys([raw]).view(np.uint32) - _HASH_OF_EMPTY
        elif raw.dtype.itemsize == 16:
            words = raw.view(np.uint64).reshape(-1, 2)
            hashes += spread(words[:, 1].copy())
            hashes += words[:, 0]
        elif raw.dtype.kind == "f":
            hashes += raw.view(np.uint64 if raw.dtype.itemsize == 8 else np.uint32)
        else:
            hashes += raw.astype(np.int64, copy=False).view(np.uint64)
    return spread(hashes)


def _has_bytes(raw: Any) -> bool:
    offsets = np.frombuffer(raw.buffers()[1], np.int64, len(raw) + 1, 8 * raw.offset)
    return bool(offsets[-1] > offsets[0])


class SlotIndex:
    """Which slot a key has. Knows hashes and slots; its caller compares keys."""

    def __init__(self) -> None:
        self._allocate(_BITS_MIN)

    def _allocate(self, bits: int) -> None:
        self._table: Hashes = np.full(1 << bits, _EMPTY)
        self._sorted: Hashes | None = None
        """The entries that have no places yet."""
        self._budget = self._room = 0
        """How many more keys may be searched for in the sorted entries; how many the table is to
        hold.
        """
        self._mask = np.int64((1 << bits) - 1)
        self._shift = np.uint64(64 - bits)
        self.taken = 0
        """Entries that are not empty, including tombstones."""

    def find(self, hashes: Hashes, same: Callable[[Slots, Slots | slice], Any]) -> Slots:
        """Return the slot of each key, −1 if it has none.

        ``same(slots, rows)`` compares keys in slots with rows, pair by pair; it may return just
        True if all are equal.
        """
        found = np.full(len(hashes), _NONE)
        if self._sorted is not None and len(hashes) <= self._budget:
            self._budget -= len(hashes)
            _find_sorted(self._sorted, hashes & _TAG, same, found)
            return found
        self.place()
        for start in range(0, len(hashes), _PIECE_ENTRIES):
            self._find(hashes, slice(start, min(len(hashes), start + _PIECE_ENTRIES)), same, found)
        return found

    def _find(self, hashes: Hashes, piece: slice, same: Callable[[Slots, Slots | slice], Any], found: Slots) -> None:
        rows: Slots | slice = piece
        tags = hashes[piece] & _TAG
        places = (tags >> self._shift).view(np.int64)
        while len(places):
            entries = self._table[places]
            hits = (entries ^ tags) <= _SLOT
            candidates = np.flatnonzero(hits)
            if len(candidates):
                everything = len(candidates) == len(hits)
                slots = ((entries if everything else entries[candidates]) & _SLOT).view(np.int64)
                mine = rows if everything else _chosen(rows, candidates)
                equal = same(slots, mine)
                if equal is True or equal.all():
                    found[mine] = slots
                    if everything:
                        return
                else:
                    found[_chosen(mine, np.flatnonzero(equal))] = slots[equal]
                    hits[candidates] = equal
            walking = np.flatnonzero(~hits & (entries != _EMPTY))
            rows = _chosen(rows, walking)
            places, tags = (places[walking] + 1) & self._mask, tags[walking]

    def enter(self, hashes: Hashes, first: int, same: Callable[[Slots, Slots], Mask]) -> tuple[Slots, Slots]:
        """Enter keys that are not in the index, some perhaps several times; there must be room for
        them.

        ``same(left, right)`` compares rows. Returns the first row of each key, ascending, which get
        the slots from ``first`` on, and the slot of every row.
        """
        self.place()
        table = self._table
        tags = hashes & _TAG
        places = (tags >> self._shift).view(np.int64)
        count = len(hashes)
        owners, won_at = np.full(count, _NONE), np.full(count, _NONE)
        rows = np.arange(count)
        claims = tags | (rows + first).view(np.uint64)
        while len(rows):
            # Backwards, so that the first row of a key wins the place, and keys keep their order.
            free = np.flatnonzero(table[places] == _EMPTY)[::-1]
            table[places[free]] = claims[free]
            entries = table[places]
            won = entries == claims
            winners = rows[won]
            won_at[winners] = places[won]
            owners[winners] = winners
            # An older entry is of another key. A tombstone's slot belongs to no row.
            others = (entries & _SLOT).view(np.int64) - first
            rivals = np.flatnonzero(~won & ((entries ^ claims) <= _SLOT) & (others >= 0) & (others < count))
            equal = rivals[same(rows[rivals], others[rivals])] if len(rivals) else rivals
            owners[rows[equal]] = others[equal]
            won[equal] = True
            walking = np.flatnonzero(~won)
            rows, claims, places = rows[walking], claims[walking], (places[walking] + 1) & self._mask
        chosen = np.flatnonzero(won_at >= 0)
        self.taken += len(chosen)
        if len(chosen) == count:
            return chosen, owners + first
        numbers = np.empty(count, np.int64)
        numbers[chosen] = np.arange(first, first + len(chosen))
        table[won_at[chosen]] = tags[chosen] | numbers[chosen].view(np.uint64)
        return chosen, numbers[owners]

    @property
    def size_bytes(self) -> int:
        return self._table.nbytes + (0 if self._sorted is None else self._sorted.nbytes)

    def export_array(self) -> Hashes:
        """Return what :meth:`import_array` takes."""
        self.place()
        return self._table

    def import_array(self, table: Hashes, taken: int) -> None:
        self._table, self.taken, self._sorted = table, taken, None
        self._mask = np.int64(len(table) - 1)
        self._shift = np.uint64(65 - len(table).bit_length())

    def remove(self, hashes: Hashes, slots: Slots) -> None:
        self.place()
        entries = hashes & _TAG
        places = (entries >> self._shift).view(np.int64)
        entries |= slots.view(np.uint64)
        while len(places):
            here = self._table[places] == entries
            self._table[places[here]] = _TOMBSTONE
            walking = np.flatnonzero(~here)
            places, entries = (places[walking] + 1) & self._mask, entries[walking]

    def is_full(self, more: int) -> bool:
        """Return whether the table must be rebuilt before ``more`` keys are entered."""
        if self._sorted is not None:
            self._room = len(self._sorted) + more
            self.place()
        return self.taken + more > _LOAD_MAX * len(self._table)

    def build(self, hashes: Hashes, slots: Slots | range, *, more: int = 0) -> bool:
        """Hold exactly these slots, with room for ``more``. Returns whether all hashes differ.

        ``hashes``: by slot. A range begins with 0. Raises ``InvalidState`` for more than 2³¹ slots.
        """
        highest = len(slots) - 1 if isinstance(slots, range) else int(slots.max(initial=-1))
        if len(slots) + more > SLOTS_MAX or (len(slots) and highest + more >= SLOTS_MAX):
            raise InvalidState(
                f"a state of one subtask would have {len(slots) + more} row keys, and {SLOTS_MAX} is the most. Raise "
                "the parallelism of the operator.",
                kind=ErrorKind.LIMIT_EXCEEDED,
            )
        if isinstance(slots, range):
            entries = _numbered(hashes[: len(slots)])
        else:
            entries = hashes[slots]
            entries &= _TAG
            entries |= slots.view(np.uint64)
        entries.sort()
        self._allocate(_BITS_MIN)
        self._sorted, self._room, self._budget = entries, len(entries) + more, len(entries) // _SEARCHED_SHARE
        return _are_different(hashes, entries)

    def place(self) -> None:
        """Give sorted entries their places in a table."""
        entries = self._sorted
        if entries is None:
            return
        self._allocate(max(_BITS_MIN, int(self._room / _LOAD_BUILT).bit_length()))
        self.taken = len(entries)
        # In pieces that stay in the cache: allocating for every step over everything costs more.
        table, size, highest = self._table, len(self._table), -len(entries)
        behind = []
        for start in range(0, len(entries), _PIECE_ENTRIES):
            piece = entries[start : start + _PIECE_ENTRIES]
            numbers = np.arange(start, start + len(piece))
            shifts = (piece >> self._shift).view(np.int64)
            shifts -= numbers
            np.maximum(np.maximum.accumulate(shifts, out=shifts), highest, out=shifts)
            highest = int(shifts[-1])
            shifts += numbers
            inside = len(piece) if shifts[-1] < size else int(np.searchsorted(shifts, size))
            table[shifts[:inside]] = piece[:inside]
            behind.append(piece[inside:])
        # Entries that would be beyond the end go to the first empty places at the beginning.
        rest = np.concatenate(behind) if behind else entries
        if len(rest):
            empty = np.flatnonzero(table[: 4 * len(entries) + 16] == _EMPTY)[: len(rest)]
            table[empty] = rest


def _find_sorted(entries: Hashes, tags: Hashes, same: Callable[[Slots, Slots | slice], Any], found: Slots) -> None:
    """Do what :meth:`SlotIndex.find` does, in sorted entries: those with one tag are neighbors."""
    rows = np.argsort(tags)
    tags = tags[rows]
    places = np.searchsorted(entries, tags)
    while len(rows):
        inside = places < len(entries)
        inside[inside] = (entries[places[inside]] ^ tags[inside]) <= _SLOT
        rows, places, tags = rows[inside], places[inside], tags[inside]
        if not len(rows):
            return
        slots = (entries[places] & _SLOT).view(np.int64)
        equal = np.broadcast_to(same(slots, rows), len(rows))
        found[rows[equal]] = slots[equal]
        rows, places, tags = rows[~equal], places[~equal] + 1, tags[~equal]


def _numbered(hashes: Hashes) -> Hashes:
    """Return the entry of every slot, computed in pieces that stay in the cache."""
    entries = np.empty(len(hashes), np.uint64)
    numbers = np.arange(min(len(hashes), _PIECE_ENTRIES), dtype=np.uint64)
    for start in range(0, len(hashes), _PIECE_ENTRIES):
        piece = entries[start : start + _PIECE_ENTRIES]
        np.bitwise_and(hashes[start : start + _PIECE_ENTRIES], _TAG, out=piece)
        piece |= numbers[: len(piece)]
        numbers += np.uint64(_PIECE_ENTRIES)
    return entries


def _are_different(hashes: Hashes, entries: Hashes) -> bool:
    """Return whether no hash occurs twice in sorted entries; those with one tag are neighbors."""
    found = [np.empty(0, np.int64)]
    for start in range(0, len(entries), _PIECE_ENTRIES):
        # The next piece's first entry is the neighbor of this one's last.
        piece = entries[start : start + _PIECE_ENTRIES + 1]
        found.append(np.flatnonzero((piece[1:] ^ piece[:-1]) <= _SLOT) + start)
    alike = np.concatenate(found)
    if not len(alike):
        return True
    slots = (entries[np.concatenate([alike, alike + 1])] & _SLOT).view(np.int64)
    suspects = np.sort(hashes[np.unique(slots)])
    return not bool((suspects[1:] == suspects[:-1]).any())


def _chosen(rows: Slots | slice, which: Slots) -> Slots:
    """Return some of the rows, which are ascending numbers or a slice."""
    return which + rows.start if isinstance(rows, slice) else rows[which]
