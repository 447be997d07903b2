"""From keys to slots: a hash table in numpy, searched and filled for a whole batch at a time.

Theory of operation. Open addressing with linear probing. An entry is one int64: 31 bits of the
key's hash, the *tag*, above 32 bits of the slot. A probe reads one word and compares keys only
where the tag agrees. The high bits of the hash say where a search begins. All rows of a batch take
a step at once; those that are done drop out.

Entering works by claims. Every row at an empty entry writes its own claim there, then all read
back. A row that reads its own claim has won the place; one that reads the claim of an equal key
shares it; the others go one step on. Equal keys take the same steps, so they meet.

Removed entries become tombstones, over which searches walk, until the table is built anew. Building
needs no claims: by hash, an entry's place is its own or the one after its predecessor.
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

_EMPTY: Final = np.int64(-1)
_TOMBSTONE: Final = np.int64(-2)
_SLOT: Final = np.int64(0xFFFFFFFF)
_TAG: Final = np.uint64(0x7FFFFFFF)
_BITS_MIN: Final = 10
# The table is built anew above the first load, so large that it is below the second.
_LOAD_MAX: Final = 0.6
_LOAD_BUILT: Final = 0.45
_PIECE_ENTRIES: Final = 1 << 16
_NULL: Final = 0x9E3779B97F4A7C15
_HASH_OF_EMPTY: Final = hash_keys([pa.array([b""], pa.large_binary())]).view(np.uint32)[0]


def spread(hashes: Hashes) -> Hashes:
    """The finisher of splitmix64, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        hashes ^= hashes >> np.uint64(shift)
        hashes *= np.uint64(factor)
    hashes ^= hashes >> np.uint64(31)
    return hashes


def hash_raws(raws: Sequence[Raw], rows: int) -> Hashes:
    """A 64-bit hash of each row of a raw form.

    Equal rows have equal hashes; it never leaves this process.
    """
    hashes = np.zeros(rows, np.uint64)
    begun = False
    for number, raw in enumerate(raws):
        if raw is None:
            continue
        is_bytes = not isinstance(raw, np.ndarray)
        if not is_bytes and raw.dtype == np.bool_:
            # Mostly validity, which must not count where all is valid, as if it were None.
            hashes += np.where(raw, np.uint64(0), np.uint64(_NULL * (number + 1) & (1 << 64) - 1))
            continue
        if begun:
            spread(hashes)
        begun = True
        if is_bytes:
            # Empty strings do not count, so a column of them, such as the tags of timers, is free.
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
        self.table = np.full(1 << bits, _EMPTY)
        """The entries."""
        self._mask = np.int64((1 << bits) - 1)
        self._shift = np.uint64(64 - bits)
        self.taken = 0
        """Entries that are not empty, including tombstones."""

    def _start(self, hashes: Hashes) -> tuple[Slots, Slots]:
        """Where the search for each hash begins, and its tag shifted into place."""
        return (hashes >> self._shift).view(np.int64), ((hashes & _TAG) << np.uint64(32)).view(np.int64)

    def find(self, hashes: Hashes, same: Callable[[Slots, Slots | None], Any]) -> Slots:
        """The slot of each key, −1 where it has none.

        ``same(slots, rows)`` compares keys in slots with rows, pair by pair; None: all rows.
        """
        found = np.full(len(hashes), _EMPTY)
        places, tags = self._start(hashes)
        rows: Slots | None = None
        while len(places):
            entries = self.table[places]
            hits = (entries ^ tags) >> 32 == 0
            candidates = np.flatnonzero(hits)
            everything = len(candidates) == len(hits)
            slots = (entries if everything else entries[candidates]) & _SLOT
            mine = rows if everything else (candidates if rows is None else rows[candidates])
            equal = same(slots, mine) if len(candidates) else False
            if equal is True or np.all(equal):
                found[slice(None) if mine is None else mine] = slots
            elif len(candidates):
                found[np.flatnonzero(equal) if mine is None else mine[equal]] = slots[equal]
                hits[candidates] = equal
            walking = np.flatnonzero(~hits & (entries != _EMPTY))
            rows = walking if rows is None else rows[walking]
            places, tags = (places[walking] + 1) & self._mask, tags[walking]
        return found

    def enter(self, hashes: Hashes, first: int, same: Callable[[Slots, Slots], Mask]) -> tuple[Slots, Slots]:
        """Enter keys that are not there, some perhaps several times; there is room for them.

        ``same(left, right)`` compares rows. Returns the first row of each key, ascending, which get
        the slots from ``first`` on, and the slot of every row.
        """
        places, tags = self._start(hashes)
        count = len(hashes)
        owners, won_at = np.full(count, _EMPTY), np.full(count, _EMPTY)
        rows = np.arange(count)
        while len(rows):
            claims = tags[rows] | (rows + first)
            # Backwards, so that the first row of a key wins the place, and keys keep their order.
            free = np.flatnonzero(self.table[places] == _EMPTY)[::-1]
            self.table[places[free]] = claims[free]
            entries = self.table[places]
            won = entries == claims
            won_at[rows[won]] = places[won]
            owners[rows[won]] = rows[won]
            # An older entry is of another key. A tombstone has no tag.
            others = (entries & _SLOT) - first
            rivals = np.flatnonzero(~won & ((entries ^ claims) >> 32 == 0) & (others >= 0))
            equal = rivals[same(rows[rivals], others[rivals])] if len(rivals) else rivals
            owners[rows[equal]] = others[equal]
            won[equal] = True
            walking = np.flatnonzero(~won)
            rows, places = rows[walking], (places[walking] + 1) & self._mask
        chosen = np.flatnonzero(won_at >= 0)
        self.taken += len(chosen)
        if len(chosen) == count:
            return chosen, owners + first
        numbers = np.empty(count, np.int64)
        numbers[chosen] = np.arange(first, first + len(chosen))
        self.table[won_at[chosen]] = tags[chosen] | numbers[chosen]
        return chosen, numbers[owners]

    def import_arrays(self, table: Slots, taken: int) -> None:
        self.table, self.taken = table, taken
        self._mask = np.int64(len(table) - 1)
        self._shift = np.uint64(65 - len(table).bit_length())

    def remove(self, hashes: Hashes, slots: Slots) -> None:
        places, tags = self._start(hashes)
        entries = tags | slots
        while len(places):
            here = self.table[places] == entries
            self.table[places[here]] = _TOMBSTONE
            walking = np.flatnonzero(~here)
            places, entries = (places[walking] + 1) & self._mask, entries[walking]

    def is_full(self, more: int) -> bool:
        """Whether the table must be built anew before ``more`` keys are entered."""
        return self.taken + more > _LOAD_MAX * len(self.table)

    def build(self, hashes: Hashes, slots: Slots, *, more: int = 0) -> bool:
        """Hold exactly these slots, with room for ``more``; returns whether all hashes differ.

        Raises ``InvalidState`` for more than 2³¹ slots.
        """
        if len(slots) + more > SLOTS_MAX or (len(slots) and int(slots.max()) + more >= SLOTS_MAX):
            raise InvalidState(
                f"a state of one subtask would have {len(slots) + more} row keys, and {SLOTS_MAX} is the most. Raise "
                "the parallelism of the operator.",
                kind=ErrorKind.LIMIT_EXCEEDED,
            )
        self._allocate(max(_BITS_MIN, int((len(slots) + more) / _LOAD_BUILT).bit_length()))
        # In pieces that stay in the cache: allocating for every step over everything costs more.
        order = np.argsort(hashes)
        size, highest, previous, different = len(self.table), -len(order), None, True
        behind = []
        for start in range(0, len(order), _PIECE_ENTRIES):
            piece = order[start : start + _PIECE_ENTRIES]
            sorted_hashes = hashes[piece]
            starts, tags = self._start(sorted_hashes)
            entries = tags | slots[piece]
            numbers = np.arange(start, start + len(piece))
            shifts = np.maximum(np.maximum.accumulate(starts - numbers), highest)
            highest = int(shifts[-1])
            places = shifts + numbers
            inside = int(np.searchsorted(places, size))
            self.table[places[:inside]] = entries[:inside]
            behind.append(entries[inside:])
            equal = (sorted_hashes[1:] == sorted_hashes[:-1]).any() or sorted_hashes[0] == previous
            different, previous = different and not equal, sorted_hashes[-1]
        # What would stand behind the end goes to the first empty places at the beginning.
        rest = np.concatenate(behind) if behind else order
        if len(rest):
            empty = np.flatnonzero(self.table[: 4 * len(order) + 16] == _EMPTY)[: len(rest)]
            self.table[empty] = rest
        self.taken = len(order)
        return different
