"""Which rows of a keyed state have changed, and since when: the source of deltas.

Theory of operation. Time is counted in *versions*; the caller says when one begins. A slot has the
version of its last change and of its birth. A deleted row keeps its slot, which then has the
version of its death. So one scan finds what has changed since a version: live rows are upserts,
dead rows born before are deletes. When holes are closed, the row keys of the dead are *buried* in a
table, as far as a delta may need them. If a row key lives again, its younger row counts.

Rows taken from a layer (:meth:`Changes.taking`) get the version of that layer. Such a row may have
been in a lower layer, deleted and set again. So it has no birth: its death is always written, and
so are deletes of rows that are not here. Hence a layer may contain changes that are here already.

A delta on a layer is possible if all changes since its version are known: then the version is in
``_complete``. The layers of the restore count as one, and end below ``_floor``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat.errors import InvalidInput
from stateformat.model import State
from stateformat.schema import DELETE, KEY_GROUP, OP, UPSERT, segment_schema
from stateformat.segments import row_key_codes
from stateformat.snapshot import SnapshotWriter
from stateformat.states import UNKNOWN_MAX, Layer, layers_kept

from .columns import Mask, Slots
from .expiry import Expiry
from .rows import Rows, as_table, with_groups

BEFORE: Final = -(2**31)
"""The version of everything that existed before changes were tracked."""

_VERSIONS_MAX: Final = 2**31 - 2
_STAMPS: Final = ("born", "changed")
_BURIED_STAMPS: Final = ("_born", "_changed")


_Keys = Callable[[Slots], list[pa.Array]]
_Columns = Callable[[Slots | slice], list[pa.Array]]
_Groups = Callable[[Slots | slice], npt.NDArray[Any]]


class Changes:
    """The versions of the rows of one keyed state, and how it is written.

    ``segments.unique_keys``, ``groups`` and ``columns`` give, also for dead slots, the columns of
    the row key, the key groups, and the columns of a segment without ``_key_group``.
    """

    def __init__(self, state: State, rows: Rows, row_keys: _Keys, groups: _Groups, columns: _Columns) -> None:
        self.version: int | None = None
        """The version of current changes; None before :meth:`begin`."""
        self.rows = rows
        self._row_keys, self._groups, self._columns = row_keys, groups, columns
        self._delta_schema = segment_schema(state, delta=True)
        self._schema = pa.schema([field for field in self._delta_schema if field.name not in (KEY_GROUP.name, OP.name)])
        self._row_key = list(state.row_key)
        key_fields = [self._delta_schema.field(name) for name in self._row_key]
        self._key_schema = with_groups(pa.schema(key_fields))
        self._buried_schema = pa.schema([*self._key_schema, *(pa.field(name, pa.int32()) for name in _BURIED_STAMPS)])
        self._buried: list[pa.Table] = []
        """Row keys of dead rows whose slots are gone, with the versions of birth and death."""
        self._floor = 0
        self._complete: set[int] = set()
        self._latest = BEFORE
        self.is_taking = False
        """Whether current changes come from a layer (:meth:`taking`)."""
        self.expiry: Expiry | None = None
        """Which rows have expired, if they can."""
        self._is_unseen = False
        self._edited = False
        rows.changes = self

    def added(self, slots: slice) -> None:
        if self.version is None:
            self._edited = True
            return
        self.rows.array("changed")[slots] = self.version
        self.rows.array("born")[slots] = BEFORE if self.is_taking else self.version
        self._latest = max(self._latest, self.version)

    def touched(self, slots: Slots | slice) -> None:
        """These slots have new values, or were deleted."""
        if self._is_unseen:
            return
        if self.version is None:
            self._edited = True
            return
        self.rows.array("changed")[slots] = self.version
        if self.is_taking:
            self.rows.array("born")[slots] = BEFORE
        self._latest = max(self._latest, self.version)

    def closing(self) -> None:
        if self.version is None:
            return
        dead = np.flatnonzero(~self.rows.array("live")[: self.rows.used])
        born, died = self.rows.array("born")[dead], self.rows.array("changed")[dead]
        needed = self._needed(born, died)
        self._bury(self._keys_of(dead[needed]), born[needed], died[needed])

    def cleared(self) -> None:
        """Everything is gone, and what it was is unknown: the next snapshot is whole."""
        self._buried = []
        self._complete = set()
        self._edited = True

    def begin(self, version: int) -> None:
        """Give changes from now on this version, which is at least the last one."""
        if not max(0, self.version or 0) <= version <= _VERSIONS_MAX:
            raise InvalidInput(
                f"version {version} begins after version {self.version}; versions are 0 to {_VERSIONS_MAX} and never "
                "fall"
            )
        if self.version is None:
            for name in _STAMPS:
                self.rows.add_array(name, np.int32)
                self.rows.array(name)[:] = BEFORE
            self._floor = version
            self._complete = set() if self._edited else {version - 1}
            self._latest = version - 1
        self.version = version

    @contextmanager
    def taking(self, version: int) -> Iterator[None]:
        """Within the block, changes come from a layer of this version, or :data:`BEFORE`."""
        mine, edited = self.version, self._edited
        self.is_taking = True
        if mine is not None:
            self.version = version
        try:
            yield
        finally:
            self.version, self._edited, self.is_taking = mine, edited, False

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within the block, expired rows are removed: they need no delete, because they expire in
        every layer.
        """
        self._is_unseen = True
        try:
            yield
        finally:
            self._is_unseen = False

    def took(self, version: int, *, exactly: bool) -> None:
        """All of a layer is here. If not ``exactly``, it deleted unknown rows, so no delta may
        build on a lower layer.
        """
        if self.version is None:
            return
        self.version = max(self.version, version + 1)
        if exactly:
            self._complete.add(version)
        else:
            self._floor, self._complete, self._buried = version + 1, {version}, []

    def _needed(self, born: npt.NDArray[Any], died: npt.NDArray[Any]) -> Mask:
        """Return whether a delta may build on a version between birth and death, and so need the
        death.
        """
        sinces = np.sort(np.array([*self._complete], np.int64))
        return np.searchsorted(sinces, died) > np.searchsorted(sinces, born)

    def _keys_of(self, slots: Slots) -> pa.Table:
        def columns(some: Any) -> list[pa.Array]:
            return [pa.array(self._groups(some).astype(np.int32)), *self._row_keys(some)]

        return as_table(self._key_schema, columns, slots)

    def _bury(self, keys: pa.Table, born: Any, died: Any) -> None:
        if len(keys):
            stamps = [pa.array(np.asarray(stamp, np.int32)) for stamp in (born, died)]
            chunked = [pa.chunked_array([stamp]) for stamp in stamps]
            self._buried.append(pa.Table.from_arrays([*keys.columns, *chunked], schema=self._buried_schema))

    def bury_unknown(self, rows: pa.Table) -> None:
        """Remember deletes from a taken layer, of rows that are not here."""
        if self.version is not None:
            stamps = (np.full(len(rows), stamp, np.int32) for stamp in (BEFORE, self.version))
            self._bury(rows.select(self._key_schema.names).cast(self._key_schema), *stamps)

    def _buried_since(self, since: int) -> list[pa.Table]:
        found = []
        for table in self._buried:
            born, died = (table[name].to_numpy() for name in _BURIED_STAMPS)
            found.append(table.filter(pa.array((died > since) & (born <= since))))
        return found

    def _prune(self) -> None:
        if self._buried:
            table = pa.concat_tables(self._buried).combine_chunks()
            table = table.filter(pa.array(self._needed(*(table[name].to_numpy() for name in _BURIED_STAMPS))))
            self._buried = [table] if len(table) else []

    def _since(self, since: int) -> tuple[Slots, Slots]:
        """Return the live slots changed after a version, and the slots deleted since that existed
        before.
        """
        rows = self.rows
        slots = np.flatnonzero(rows.array("changed")[: rows.used] > since)
        alive = rows.array("live")[slots]
        dead = slots[~alive]
        return slots[alive], dead[rows.array("born")[dead] <= since]

    def _count_since(self, since: int) -> int:
        return sum(map(len, (*self._since(since), *self._buried_since(since))))

    def delta(self, since: int) -> pa.Table:
        """Return what has changed after a version, as a segment of a delta has it; no row key
        twice.
        """
        living, dead = self._since(since)
        buried = (table.select(self._key_schema.names) for table in self._buried_since(since))
        deletes = pa.concat_tables([self._keys_of(dead), *buried])
        upserts = self._upserts(living)
        if not len(deletes):
            return upserts
        # A row key may have died several times and live again, in a row that has changed since.
        both = pa.concat_tables([deletes.select(self._row_key), upserts.select(self._row_key)])
        codes = row_key_codes(both.columns)
        last = np.zeros(int(codes.max()) + 1, np.int64)
        last[codes] = np.arange(len(codes))
        deletes = deletes.take(pa.array(np.flatnonzero(last[codes[: len(deletes)]] == np.arange(len(deletes)))))
        return pa.concat_tables([self._as_deletes(deletes), upserts])

    def _upserts(self, slots: Slots) -> pa.Table:
        def columns(some: Slots | slice) -> list[pa.Array]:
            groups = self._groups(some).astype(np.int32)
            return [pa.array(groups), pa.array(np.full(len(groups), UPSERT, np.int8)), *self._columns(some)]

        return as_table(self._delta_schema, columns, slots)

    def _as_deletes(self, keys: pa.Table) -> pa.Table:
        columns = [
            pa.chunked_array([np.full(len(keys), DELETE, np.int8)], OP.type)
            if field.name == OP.name
            else keys[field.name]
            if field.name in keys.column_names
            else pa.chunked_array([pa.nulls(len(keys), field.type)])
            for field in self._delta_schema
        ]
        return pa.Table.from_arrays(columns, schema=self._delta_schema)

    def _sinces(self, layers: Sequence[Layer]) -> dict[int, int]:
        """Return, by how many of the layers stay, after which version they lack all changes."""
        known = [layer.version for layer in layers if layer.version is not None and layer.version >= self._floor]
        below = len(layers) - len(known)
        versions = [layer.version for layer in layers[below:]]
        if self.version is None or known != versions or sorted({*known}) != known or known[-1:] >= [self.version]:
            return {}
        sinces = dict(enumerate(known, below + 1))
        if below:
            sinces[below] = self._floor - 1
        return {number: since for number, since in sinces.items() if since in self._complete}

    def write(self, writer: SnapshotWriter, name: str, layers: Sequence[Layer] | None) -> int:
        """Write the state, whole or as a delta. Returns how many of the lowest ``layers`` stay."""
        sinces = self._sinces(layers or ())
        kept = 0
        if layers and len(layers) in sinces:
            if self._latest <= sinces[len(layers)]:
                writer.carry(name)
                self._end(None)
                return len(layers)
            if min(sinces) <= UNKNOWN_MAX:
                kept = layers_kept(layers, sinces, self._count_since, self.rows.count)
        if not kept:
            rows = self.whole()
            if rows is None:
                writer.empty(name)
            else:
                writer.write(name, rows)
        elif len(delta := self.delta(sinces[kept])):
            writer.write(name, delta, delta=True)
        else:
            writer.carry(name)
        self._end({number: since for number, since in sinces.items() if number <= kept})
        return kept

    def whole(self) -> pa.Table | None:
        """Return all rows as a segment has them, not sorted, valid until the next change; None if
        there are none.
        """

        def columns(some: Slots | slice) -> list[pa.Array]:
            return [pa.array(self._groups(some).astype(np.int32)), *self._columns(some)]

        if self.expiry is not None:
            self.expiry.sweep()
        slots = self.rows.live_slots()
        return as_table(with_groups(self._schema), columns, slots, view=True) if len(slots) else None

    def _end(self, sinces: Mapping[int, int] | None) -> None:
        """The version is written. ``sinces``: the versions to build on now; None: as before."""
        if self.version is None:
            return
        if sinces is not None:
            self._complete = {*sinces.values(), self.version}
            self._prune()
        # Changes made before the next version begins are not part of this one.
        self.version += 1

    @property
    def size_bytes(self) -> int:
        return sum(table.nbytes for table in self._buried)

    def facts(self) -> tuple[dict[str, Any], pa.Table]:
        """Return everything but rows and versions, for :meth:`recall`: a part for JSON, and the
        buried keys.
        """
        known = {
            "version": self.version,
            "floor": self._floor,
            "complete": sorted(self._complete),
            "latest": self._latest,
            "edited": self._edited,
        }
        return known, pa.concat_tables([self._buried_schema.empty_table(), *self._buried])

    def recall(self, known: Mapping[str, Any], buried: pa.Table) -> None:
        """Restore the :meth:`facts` of another state whose rows and versions are here."""
        self.version, self._floor, self._complete = known["version"], known["floor"], {*known["complete"]}
        self._latest, self._edited = known["latest"], known["edited"]
        self._buried = [buried.cast(self._buried_schema)] if len(buried) else []
