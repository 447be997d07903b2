"""Steps of a comparison: what is read of both sides, and how its rows are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from ...reading import Keys, Overlay, merge_layers
from ...schema import KEY_GROUP
from ...tables import Spill, copy_rows, prefetch
from .differing import ByKey, Comparison, differences
from .sides import Side, Tables

CHUNK_BYTES: Final = 8 << 20
"""About how many bytes of both sides together are compared at once."""
_JOINED_BYTES: Final = 4 << 20


class Step(ABC):
    """A part of a comparison. Picklable."""

    size_bytes: int
    """About how many stored bytes are read."""

    @abstractmethod
    def changes(self) -> Tables:
        """Yield the rows that differ, in the columns in which they are compared, with
        ``_change``.
        """


@dataclass(frozen=True)
class ByStreams(Step):
    """All rows of both sides, compared as two whole streams, or some key groups at a time.

    ``grouped``: both sides come by ``_key_group``, and equal keys have equal groups.
    """

    old: Side | None
    new: Side | None
    comparison: Comparison
    grouped: bool
    size_bytes: int = 0

    def changes(self) -> Tables:
        """See :meth:`Step.changes`; by key group if ``grouped``."""
        with closing(_rows(self.old)) as old, closing(_rows(self.new)) as new:
            if not self.grouped:
                yield from differences(old, new, self.comparison)
                return
            first, second = _Head(old), _Head(new)
            while not (first.is_done and second.is_done):
                with closing(prefetch(self._chunks(first, second), workers=2, depth=2)) as compared:
                    for tables in compared:
                        yield from tables
                group = min(first.first_group, second.first_group)
                if group < _ALL:
                    # Not even one group fits: it is compared while it is read.
                    pair = first.stream(group), second.stream(group)
                    with closing(differences(*pair, self.comparison)) as large:
                        yield from large

    def _chunks(self, first: _Head, second: _Head) -> Generator[Callable[[], list[pa.Table]], None, None]:
        """Yield calls that each compare some key groups, until the next one does not fit, or the
        end.
        """
        while True:
            _fill(first, second)
            ready = min(first.complete_before, second.complete_before)
            whole = [*first.take_before(ready)], [*second.take_before(ready)]
            if not (whole[0] or whole[1]):
                return
            yield partial(_compared, *whole, self.comparison)


def _compared(old: list[pa.Table], new: list[pa.Table], comparison: Comparison) -> list[pa.Table]:
    return list(differences(old, new, comparison))


def _rows(side: Side | None) -> Tables:
    if side is not None:
        yield from side.rows()


@dataclass(frozen=True)
class ByLayers(Step):
    """Key groups that begin with the same layers on both sides, or that are small.

    Only rows that the layers above name, or whose key they clear, can differ: those layers are
    held, and the common rows are streamed past them. ``common``: the layers that both sides have,
    maybe none; ``old`` and ``new``: the layers above them on each side.
    """

    common: Side | None
    old: Side | None
    new: Side | None
    keys: Keys
    size_bytes: int = 0

    def changes(self) -> Tables:
        """See :meth:`Step.changes`."""
        above = [[] if side is None else side.layers() for side in (self.old, self.new)]
        comparison = ByKey(tuple(self.keys.row_key))
        if self.common is None:
            merged = [[self._merged(layers)] if layers else [] for layers in above]
            yield from differences(merged[0], merged[1], comparison)
            return
        named = Overlay([*above[0], *above[1]], self.keys)
        # A clear may affect any number of rows.
        with Spill[int]() as touched:
            with closing(_rows(self.common)) as rows:
                suspects = (table.filter(pa.array(named.may_touch(table))) for table in rows)
                for table in _joined(suspects):
                    touched.add(0, table.filter(pa.array(named.touches(table))))
            both = all(above)
            sides = [
                _standing(touched, Overlay(layers, self.keys) if both else named if layers else None)
                for layers in above
            ]
            yield from differences(sides[0], sides[1], comparison)

    def _merged(self, layers: Sequence[pa.Table]) -> pa.Table:
        return merge_layers(layers, self.keys.row_key, self.keys.key_columns, includes_base=True)


def _standing(below: Spill[int], above: Overlay | None) -> Iterator[pa.Table]:
    """Yield the rows that remain."""
    for table in _joined(pa.Table.from_batches([batch]) for batch in below.read(0)):
        yield table if above is None else table.filter(pa.array(~above.touches(table)))
    if above is not None:
        yield above.upserts


def _joined(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows in tables of some megabytes."""
    held: list[pa.Table] = []
    size_bytes = 0
    for table in tables:
        if len(table):
            held.append(table)
            size_bytes += table.nbytes
        if size_bytes >= _JOINED_BYTES:
            yield pa.concat_tables(held)
            held, size_bytes = [], 0
    if held:
        yield pa.concat_tables(held)


_ALL: Final = 1 << 31


class _Head:
    """The next rows of a stream by ``_key_group``."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self._held: list[tuple[pa.Table, np.ndarray]] = []
        self.size_bytes = 0
        self._ended = False
        self._last = -1

    @property
    def is_done(self) -> bool:
        return self._ended and not self._held

    @property
    def complete_before(self) -> int:
        """All rows of groups below this one are held."""
        return _ALL if self._ended else self._last

    @property
    def first_group(self) -> int:
        return int(self._held[0][1][0]) if self._held else _ALL

    def read(self) -> None:
        table = next(self._tables, None)
        if table is None:
            self._ended = True
            return
        if len(table):
            groups = table[KEY_GROUP.name].combine_chunks().to_numpy()
            self._held.append((table, groups))
            self.size_bytes += table.nbytes
            self._last = int(groups[-1])

    def take_before(self, group: int) -> Iterator[pa.Table]:
        """Remove and yield the rows of lower groups."""
        while self._held:
            table, groups = self._held[0]
            stop = int(np.searchsorted(groups, group))
            if not stop:
                return
            self.size_bytes -= table.nbytes
            if stop < len(table):
                rest = copy_rows(table.slice(stop)) if 2 * stop > len(table) else table.slice(stop)
                self._held[0] = rest, groups[stop:]
                self.size_bytes += rest.nbytes
                yield table.slice(0, stop)
                return
            del self._held[0]
            yield table

    def stream(self, group: int) -> Iterator[pa.Table]:
        """Remove and yield the rows up to this group, reading on as far as it goes."""
        while True:
            yield from self.take_before(group + 1)
            if self._held or self._ended:
                return
            self.read()


def _fill(first: _Head, second: _Head) -> None:
    """Read on, on the side that is behind, until enough is held."""
    while first.size_bytes + second.size_bytes < CHUNK_BYTES:
        behind = first if first.complete_before <= second.complete_before else second
        if behind.complete_before == _ALL:
            return
        behind.read()
