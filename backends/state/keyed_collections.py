"""Keyed map and keyed list state: several rows per key.

Theory of operation. An element knows the slot of its key, its *owner*, and the element of the same
key before it; the key knows the last one. The lists of all requested keys are walked at once. If
one list is so long that scanning all elements is cheaper, they are scanned. Deleted elements stay
in their lists until the store of elements closes its holes; then the lists are rebuilt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.graph import Operator
from stateformat.model import State
from stateformat.segments import row_key_codes

from .columns import Mask, Slots, take_apart
from .expiry import Times
from .keyed_value import KeyedState, beside, check_lengths, one_row, one_values, spread
from .rows import KeyedRows, RowNormalizer, Rows, key_grouping, without

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


_INDEX_MAX: Final = 2**63 - 1


class _Collection(KeyedState):
    """The base of maps and lists."""

    def _open(self, operator: Operator, state: State, elements: Rows) -> None:
        key_count = len(self._keys.fields)
        self._key_rows = KeyedRows(self._keys.fields, key_count, key_grouping(operator, key_count))
        self._elements = elements
        self._lists = ElementLists(self._key_rows, elements)
        self._track(state, elements)
        self._expire(elements, self._lists.kill, self._lists.tidy)

    @property
    def key_count(self) -> int:
        """How many keys have elements."""
        if self.expiry is None:
            return self._key_rows.count
        return len(np.unique(self._elements.array("owner")[self._alive(self._elements.live_slots())]))

    @property
    def stores(self) -> list[Rows]:
        return [self._key_rows, self._elements]

    def get(self, keys: pa.RecordBatch) -> pa.RecordBatch:
        """Return all rows of these keys, each once, with the columns of :meth:`rows`.

        Ordered by the first position of their key in ``keys``, then by their order within the key.
        """
        return self.lookup(keys, distinct=True)[0]

    def lookup(self, keys: pa.RecordBatch, *, distinct: bool = False) -> tuple[pa.RecordBatch, Slots]:
        """Join: return the rows of the key of each row of ``keys``, and the number of that row
        (int64, ascending).

        A key that occurs twice in ``keys`` gives its rows twice, unless ``distinct``.
        """
        chosen, requests = self._joined(keys, distinct)
        return pa.RecordBatch.from_arrays(self._shown_columns(chosen), schema=self._shown), requests

    def _joined(self, keys: pa.RecordBatch, distinct: bool) -> tuple[Slots, Slots]:
        """Return what :meth:`lookup` returns, as slots."""
        slots = self._key_rows.find(self._keys.fit(keys))
        requests = np.flatnonzero(slots >= 0)
        owners, place = np.unique(slots[requests], return_inverse=True)
        elements = self._alive(self._lists.of(owners))
        elements = elements[self._order(elements)]
        if self.expiry is not None:
            self.expiry.read(elements)
        # Elements by owner, then in order; each requested key takes those of its owner.
        of_owner = np.searchsorted(owners, self._elements.array("owner")[elements])
        by_owner = np.argsort(of_owner, kind="stable")
        begins = np.searchsorted(of_owner[by_owner], np.arange(len(owners) + 1))
        if distinct:
            _, first = np.unique(place, return_index=True)
            keep = np.sort(first)
            requests, place = requests[keep], place[keep]
        counts = (begins[1:] - begins[:-1])[place]
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        chosen = elements[by_owner[np.repeat(begins[:-1][place], counts) + offsets]]
        return chosen, np.repeat(requests, counts)

    def _order(self, elements: Slots) -> Slots:
        return np.argsort(elements)

    def clear(self, keys: pa.RecordBatch) -> None:
        """Delete all rows of these keys; those without rows are ignored."""
        slots = self._key_rows.find(self._keys.fit(keys))
        self._lists.kill(self._lists.of(np.unique(slots[slots >= 0])))
        self._lists.tidy()

    def clear_keys(self, keys: pa.RecordBatch) -> None:
        self.clear(keys)

    def clear_one(self, *key: Any) -> None:
        """Delete all rows of one key, given as :meth:`get_one` takes it."""
        self.clear(one_row(self._keys, spread(key)))


class KeyedMap(_Collection):
    """Rows of values by key and ``_map_key`` (SPEC.md section 3.6, kind ``map``).

    Batches have key columns, ``_map_key`` and values; the entries of a key are in the order in
    which they came.
    """

    def __init__(self, operator: Operator, state: State) -> None:
        super().__init__(state)
        self._entries = self._keyed_rows(operator)
        self._open(operator, state, self._entries)
        if self.expiry is not None:
            self._entries.renew = self.expiry.renew

    def find(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Mask]:
        """Return the values at each key and ``_map_key``, in order, and whether there are any; null
        where not.
        """
        return self._values_at(self._seen(self._entries.find(self._row_keys.fit(rows))))

    def put(self, rows: pa.RecordBatch) -> None:
        """Set rows; of rows with the same key and ``_map_key`` the last one counts."""
        fitted = self._row_keys.fit(rows)
        values = self._values.fit(without(rows, self._row_keys.schema.names))
        if self.expiry is None:
            self._set(fitted, values, None)
            return
        self.expiry.make_room(len(rows))
        self.expiry.wrote(*self._set(fitted, values, None))

    def update(self, rows: pa.RecordBatch, combine: Callable[[pa.RecordBatch, Mask], pa.RecordBatch]) -> None:
        """Read, change and write the values at each key and ``_map_key`` with one search.

        See :meth:`.KeyedValue.update`.
        """
        fitted = self._row_keys.fit(rows)
        if self.expiry is not None:
            self.expiry.make_room(len(rows))
        slots = self._seen(self._entries.find(fitted))
        new = combine(*self._values_at(slots))
        check_lengths(len(rows), "the values", len(new))
        values = self._values.fit(new)
        added = 0
        if (slots < 0).any():
            slots, added = self._set(fitted, values, None)
        else:
            self._entries.put_rows(slots, values)
        if self.expiry is not None:
            self.expiry.wrote(slots, added)

    def pop(self, rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Mask]:
        """Return what :meth:`find` returns, and delete the entries found."""
        slots = self._seen(self._entries.find(self._row_keys.fit(rows)))
        found = self._values_at(slots)
        self._lists.kill(slots[slots >= 0])
        self._lists.tidy()
        return found

    def restore(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        fitted = self._row_keys.fit(rows)
        values = self._stored.fit(without(rows, self._row_keys.schema.names))
        self._set(fitted, values, groups)
        self._came(values)

    def _set(self, fitted: list[pa.Array], values: list[pa.Array], groups: Any) -> tuple[Slots, int]:
        """Return the slots of the entries, and how many are new."""
        slots, new = self._entries.ensure(fitted, groups)
        if len(new):
            keys = [column.take(pa.array(new)) for column in fitted[:-1]]
            owners, first = self._key_rows.ensure(keys, None if groups is None else groups[new])
            self._lists.start(owners[first])
            self._lists.link(slots[new], owners)
        self._entries.put_rows(slots, values)
        return slots, len(new)

    def delete(self, rows: pa.RecordBatch) -> None:
        """Delete entries by key and ``_map_key``; missing ones are ignored."""
        self.remove(rows)

    def remove(self, rows: pa.RecordBatch) -> Mask:
        slots = self._entries.find(self._row_keys.fit(rows))
        self._lists.kill(slots[slots >= 0])
        self._lists.tidy()
        return slots >= 0

    def get_one(self, *key: Any) -> dict[Any, dict[str, Any]]:
        """Return all entries of one key: values by ``_map_key``. ``key`` as for
        :meth:`KeyedValue.get_one`.

        A map key that is a struct is given as its items, in the declared order.
        """
        rows = self.get(one_row(self._keys, spread(key))).to_pylist()
        names = self._values.schema.names
        return {_hashable(row["_map_key"]): {name: row[name] for name in names} for row in rows}

    def find_one(self, key: Any, map_key: Any) -> dict[str, Any] | None:
        """Return the values of one entry, by column, or None. A key of several columns is a
        tuple.
        """
        values, found = self.find(one_row(self._row_keys, key, map_key))
        row: dict[str, Any] | None = values.to_pylist()[0] if found[0] else None
        return row

    def put_one(self, key: Any, map_key: Any, **values: Any) -> None:
        """Set one entry of one key; ``key`` as for :meth:`find_one`."""
        self.put(beside(one_row(self._row_keys, key, map_key), one_values(self._values, values)))

    def delete_one(self, key: Any, map_key: Any) -> None:
        """Delete one entry of one key; ``key`` as for :meth:`find_one`."""
        self.delete(one_row(self._row_keys, key, map_key))


class KeyedList(_Collection):
    """A list of rows per key (SPEC.md section 3.6, kind ``list``); it counts ``_index`` itself."""

    def __init__(self, operator: Operator, state: State) -> None:
        super().__init__(state)
        self._where = f"state {state.name!r} of {state.operator!r}"
        self._index = RowNormalizer(state, ["_index"], only=False)
        stored = [*self._index.schema.names, *self._stored.schema.names, *self._keys.schema.names]
        self._positions = [stored.index(name) for name in self._schema.names]
        self._open(operator, state, Rows([*self._index.fields, *self._stored.fields]))
        self._key_rows.add_array("next", np.int64)

    def last_access(self, keys: pa.RecordBatch) -> Times:
        """Return when each row that :meth:`lookup` returns was last accessed, µs; for rows that
        expire.
        """
        assert self.expiry is not None
        return self.expiry.accessed(self._joined(keys, distinct=False)[0])

    def append(self, keys: pa.RecordBatch, values: pa.RecordBatch, *, accessed: Times | None = None) -> None:
        """Append a row of values to the list of each key; a key may occur several times.

        ``accessed``, for rows that expire: when each was last accessed, if that was not now.
        """
        check_lengths(len(keys), "values", len(values))
        fitted, columns = self._keys.fit(keys), self._values.fit(values)
        if not len(keys):
            return
        if self.expiry is not None:
            self.expiry.make_room(len(keys))
        owners = self._owners(fitted, None)
        order = np.argsort(owners, kind="stable")
        ordered = owners[order]
        begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        counts = np.diff(begins, append=len(ordered))
        following = self._key_rows.array("next")
        indexes = np.empty(len(ordered), np.int64)
        indexes[order] = np.arange(len(ordered)) - np.repeat(begins - following[ordered[begins]], counts)
        following[ordered[begins]] += counts
        new = self._add(owners, [pa.array(indexes), *columns])
        if self.expiry is not None:
            self.expiry.wrote(new, len(owners), accessed)

    def _owners(self, keys: Sequence[pa.Array], groups: Any) -> Slots:
        owners, new = self._key_rows.ensure(keys, groups)
        self._lists.start(owners[new])
        self._key_rows.array("next")[owners[new]] = 0
        return owners

    def _add(self, owners: Slots, columns: Sequence[pa.Array]) -> slice:
        new = self._elements.add(len(owners))
        self._elements.put(new, [take_apart(column) for column in columns])
        self._lists.link(np.arange(new.start, new.stop), owners)
        return new

    def _order(self, elements: Slots) -> Slots:
        [index] = self._elements.get(elements, 0, 1)
        return np.lexsort([elements, index.to_numpy()])

    def _columns(self, slots: Slots | slice) -> list[pa.Array]:
        columns = [*self._elements.get(slots), *self._key_rows.get(self._elements.array("owner")[slots])]
        return [columns[position] for position in self._positions]

    def _row_keys_at(self, slots: Slots) -> list[pa.Array]:
        owners = self._elements.array("owner")[slots]
        return [*self._key_rows.get(owners), *self._elements.get(slots, 0, 1)]

    def _groups_at(self, slots: Slots | slice) -> Any:
        return self._key_rows.array("group")[self._elements.array("owner")[slots]]

    def _elements_at(self, rows: pa.RecordBatch) -> Slots:
        """Return the element with the key and ``_index`` of each row, −1 if there is none."""
        keys = self._key_rows.find(self._keys.fit(rows))
        [indexes] = self._index.fit(rows)
        elements = self._lists.of(np.unique(keys[keys >= 0]))
        [present] = self._elements.get(elements, 0, 1)
        owners = np.concatenate([self._elements.array("owner")[elements], keys])
        codes = row_key_codes([pa.array(owners), pa.chunked_array([present, indexes])])
        at = np.full(int(codes.max(initial=-1)) + 1, -1)
        at[codes[: len(elements)]] = elements
        return at[codes[len(elements) :]]

    def remove(self, rows: pa.RecordBatch) -> Mask:
        elements = self._elements_at(rows)
        self._lists.kill(elements[elements >= 0])
        self._lists.tidy()
        return elements >= 0

    def get_one(self, *key: Any) -> list[dict[str, Any]]:
        """Return the list of one key, in order; ``key`` as for :meth:`KeyedValue.get_one`."""
        rows = self.get(one_row(self._keys, spread(key))).to_pylist()
        return [{name: row[name] for name in self._values.schema.names} for row in rows]

    def append_one(self, key: Any, **values: Any) -> None:
        """Append one row of values to the list of one key; ``key`` as for
        :meth:`KeyedMap.find_one`.
        """
        self.append(one_row(self._keys, key), one_values(self._values, values))

    def restore(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        if not len(rows):
            return
        owners = self._owners(self._keys.fit(rows), groups)
        [indexes] = self._index.fit(rows)
        if indexes.to_numpy().max() == _INDEX_MAX:
            raise InvalidState(
                f"a list of {self._where} has an element with _index {_INDEX_MAX}, after which nothing can be "
                "appended. Rewrite the state with lower ones.",
                kind=ErrorKind.LIMIT_EXCEEDED,
            )
        # The next index is one above the greatest, and 0 if all are negative.
        np.maximum.at(self._key_rows.array("next"), owners, indexes.to_numpy() + 1)
        values = self._stored.fit(without(rows, [*self._keys.schema.names, "_index"]))
        self._add(owners, [indexes, *values])
        self._came(values)

    def replace(self, rows: pa.RecordBatch, groups: Any = None) -> None:
        elements = self._elements_at(rows)
        there = np.flatnonzero(elements >= 0)
        if len(there):
            values = self._stored.fit(without(rows.take(pa.array(there)), [*self._keys.schema.names, "_index"]))
            self._elements.put(elements[there], [take_apart(column) for column in values], 1)
            self._came(values)
        new = np.flatnonzero(elements < 0)
        self.restore(rows.take(pa.array(new)), None if groups is None else groups[new])


def _hashable(value: Any) -> Any:
    return tuple((name, _hashable(part)) for name, part in value.items()) if isinstance(value, Mapping) else value
