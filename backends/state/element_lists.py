"""The elements of each key, for maps and lists.

Theory of operation. An element knows the slot of its key, its *owner*, and the element of the same
key before it; the key knows the last one. The lists of all requested keys are walked at once. If
one list is so long that scanning all elements is cheaper, they are scanned. Deleted elements stay
in their lists until the store of elements closes its holes; then the lists are rebuilt.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .columns import Slots
from .rows import KeyedRows, Rows

_STEP_ELEMENTS: Final = 4096
"""One step of a walk takes about as long as scanning this many elements."""


class ElementLists:
    """Elements by key. A key is live while one of its elements is."""

    def __init__(self, keys: KeyedRows, elements: Rows) -> None:
        self._keys = keys
        self._elements = elements
        for store, names in ((keys, ("last", "links", "alive")), (elements, ("owner", "before"))):
            for name in names:
                store.add_array(name, np.int64)

    def start(self, keys: Slots) -> None:
        """Begin the lists of new keys, each given once."""
        self._keys.array("last")[keys] = -1
        self._keys.array("links")[keys] = 0
        self._keys.array("alive")[keys] = 0

    def link(self, elements: Slots, owners: Slots) -> None:
        """Append elements to the lists of their keys, in their order."""
        if not len(elements):
            return
        last, before = self._keys.array("last"), self._elements.array("before")
        order = np.argsort(owners, kind="stable")
        elements, owners = elements[order], owners[order]
        self._elements.array("owner")[elements] = owners
        begins = np.flatnonzero(np.concatenate([[True], owners[1:] != owners[:-1]]))
        before[elements[1:]] = elements[:-1]
        before[elements[begins]] = last[owners[begins]]
        counts = np.diff(begins, append=len(owners))
        last[owners[begins]] = elements[begins + counts - 1]
        self._keys.array("links")[owners[begins]] += counts
        self._keys.array("alive")[owners[begins]] += counts

    def of(self, keys: Slots) -> Slots:
        """Return the live elements of these keys, each given once, in any order."""
        live = self._elements.array("live")
        steps = int(self._keys.array("links")[keys].max(initial=0))
        if steps * _STEP_ELEMENTS > self._elements.used:
            wanted = np.zeros(self._keys.used, np.bool_)
            wanted[keys] = True
            used = self._elements.used
            return np.flatnonzero(wanted[self._elements.array("owner")[:used]] & live[:used])
        before, found = self._elements.array("before"), []
        at = self._keys.array("last")[keys]
        while len(at := at[at >= 0]):
            found.append(at)
            at = before[at]
        elements = np.concatenate(found) if found else np.zeros(0, np.int64)
        alive: Slots = elements[live[elements]]
        return alive

    def kill(self, elements: Slots) -> None:
        """Delete elements, and the keys that have none left; :meth:`tidy` then closes holes."""
        gone = self._elements.kill(elements)
        alive = self._keys.array("alive")
        owners, counts = np.unique(self._elements.array("owner")[gone], return_counts=True)
        alive[owners] -= counts
        self._keys.kill(owners[alive[owners] == 0])

    def tidy(self) -> None:
        """Close the holes of both stores at once if there are many: elements know the slots of
        keys.
        """
        if not self._elements.wasteful:
            return
        self._elements.compact()
        numbers = np.full(self._keys.used, -1)
        kept = self._keys.compact()
        numbers[kept] = np.arange(len(kept))
        owners = numbers[self._elements.array("owner")[: self._elements.used]]
        self.start(np.arange(self._keys.used))
        self.link(np.arange(self._elements.used), owners)
