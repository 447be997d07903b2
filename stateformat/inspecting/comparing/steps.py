"""What is read of two sides, step by step, and how its rows are compared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ...manifest import Ints, integers
from ...model import Field, Mode, SchemaVersion, State
from ...reading import Keys, Overlay, ReadTask, evolve_table
from ...schema import KEY_GROUP, children
from ...tables import Spill, prefetch
from .rows import differences

Tables = Generator[pa.Table, None, None]
NOTHING_SEEN: Final = -(2**63)
"""The watermark of an input from which nothing has been seen."""
CHUNK_BYTES: Final = 4 << 20
"""About how many bytes of each side are compared at once."""
_ALL: Final = 1 << 31


class RowShape(Protocol):
    """Converts rows of a state to rows of the state that it becomes. Picklable."""

    @property
    def state(self) -> State: ...

    @property
    def apply(self) -> Callable[[pa.RecordBatch], Iterator[pa.RecordBatch]]: ...


@dataclass(frozen=True)
class Side:
    """What is read of one state of one checkpoint. Picklable."""

    task: ReadTask
    schema: SchemaVersion
    """The columns that are compared, with the same names and types on both sides, in the field ids
    of the state (or of what ``shape`` converts it to).
    """
    layout: object = None
    """Sides with equal layouts have equal key groups for equal keys; None: unknown."""
    shape: RowShape | None = None
    """Applied to the rows before they are compared."""
    edge_by_edge: bool = False
    """For progress: an input from which nothing has been seen is left out (SPEC.md section 6.2)."""
    seen: Callable[[int], None] | None = None
    """Called with the row count of each table that :meth:`rows` yields."""

    @property
    def handles(self) -> pa.Table:
        """The handles that are read."""
        return self.task.handles

    @property
    def stored_bytes(self) -> int:
        """About how many stored bytes are read."""
        return self.task.stored_bytes

    @property
    def hides(self) -> bool:
        """Whether expired rows are left out: then equal bytes need not mean equal rows."""
        return self.task.state.ttl_now_us is not None and self.task.state.ttl is not None

    def of(self, task: ReadTask) -> Side:
        """Return the same for another part of the state."""
        return replace(self, task=task)

    def rows(self) -> Tables:
        """Stream the rows, with ``_key_group`` if they are identified by key."""
        if not self.task.slices.num_rows:
            return
        state = self.task.state
        batches = self.task.batches(as_schema=None if self.shape else self.schema)
        for batch in batches:
            for shaped in (batch,) if self.shape is None else self.shape.apply(batch):
                table = pa.Table.from_batches([shaped])
                if self.shape is not None:
                    table = evolve_table(table, self.shape.state.current, self.schema)
                if state.mode is Mode.IN_FLIGHT and KEY_GROUP.name in table.column_names:
                    table = table.drop_columns([KEY_GROUP.name])
                if self.edge_by_edge:
                    seen = pc.or_(table["_ended"], pc.greater(table["_watermark"], NOTHING_SEEN))
                    table = table.filter(seen)
                if self.seen is not None:
                    self.seen(len(table))
                yield table

    def layers(self) -> list[pa.Table]:
        """Return the layers of keyed state, lowest first."""
        found = self.task.layers(as_schema=self.schema)
        return [pa.Table.from_batches(batches) for _, batches in found]

    def readings(self) -> Mapping[int, object]:
        """How rows are converted to those compared, by schema id: if equal, equal bytes mean equal
        rows.
        """
        state = self.task.state
        return {
            schema.id: tuple(
                (item.name, _reading({old.id: old for old in schema.fields}, item)) for item in self.schema.fields
            )
            for schema in state.schemas
        }


def _reading(known: Mapping[int, Field], item: Field) -> object:
    old = known.get(item.id)
    if old is None:
        return item.type if isinstance(item.type, str) else item.type[0], item.default
    if isinstance(old.type, str) or isinstance(item.type, str):
        return old.name, old.type, item.type
    inner = {one.id: one for one in children(old)}
    return old.name, old.type[0], tuple((one.name, _reading(inner, one)) for one in children(item))


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

    ``row_key``: what identifies a row; empty for rows without a key. ``grouped``: both sides come
    by ``_key_group``, and equal keys have equal groups.
    """

    old: Side | None
    new: Side | None
    row_key: tuple[str, ...]
    grouped: bool
    size_bytes: int = 0

    def changes(self) -> Tables:
        """See :meth:`Step.changes`; by key group if ``grouped``."""
        with closing(_rows(self.old)) as old, closing(_rows(self.new)) as new:
            parts = _by_groups(old, new) if self.grouped else iter([(old, new, False)])
            large: list[tuple[Iterator[pa.Table], Iterator[pa.Table]]] = []

            def calls() -> Generator[Callable[[], list[pa.Table]], None, None]:
                for mine, theirs, fits in parts:
                    if not fits:
                        large.append((mine, theirs))
                        return
                    yield partial(self._compared, [*mine], [*theirs])

            while True:
                with closing(prefetch(calls(), workers=2, depth=2)) as compared:
                    for tables in compared:
                        yield from tables
                if not large:
                    return
                with closing(differences(*large.pop(), self.row_key, by_group=self.grouped)) as found:
                    yield from found

    def _compared(self, old: list[pa.Table], new: list[pa.Table]) -> list[pa.Table]:
        return list(differences(old, new, self.row_key, by_group=True))


def _by_groups(old: Tables, new: Tables) -> Iterator[tuple[Iterator[pa.Table], Iterator[pa.Table], bool]]:
    """Yield both sides of some key groups at a time, to be read before the next ones, and whether
    they may be held.
    """
    first, second = _ByGroup(old), _ByGroup(new)
    while True:
        first.hold()
        second.hold()
        lowest, complete = min(first.lowest, second.lowest), min(first.complete, second.complete)
        # If not even one group fits, it is compared while it is read.
        last = max(lowest, complete)
        if last == _ALL and not (first.held or second.held):
            return
        yield first.until(last), second.until(last), complete >= lowest


class _ByGroup:
    """A stream by ``_key_group``, read some key groups at a time."""

    def __init__(self, tables: Iterator[pa.Table]) -> None:
        self._tables = tables
        self.held: deque[tuple[pa.Table, Ints]] = deque()
        self.complete = -1
        """The last key group of which all rows are held."""

    @property
    def lowest(self) -> int:
        """The first key group of which rows are held."""
        return int(self.held[0][1][0]) if self.held else _ALL

    def hold(self) -> None:
        """Read on until enough is held."""
        while self.complete < _ALL and sum(table.nbytes for table, _ in self.held) < CHUNK_BYTES:
            self._read()

    def until(self, last: int) -> Iterator[pa.Table]:
        """Remove and yield the rows of key groups up to this one, reading on as far as it goes."""
        while self.held and self.lowest <= last:
            table, groups = self.held.popleft()
            stop = int(np.searchsorted(groups, last, "right"))
            if stop < len(table):
                self.held.appendleft((table.slice(stop), groups[stop:]))
            yield table.slice(0, stop)
            while not self.held and self.complete < _ALL:
                self._read()

    def _read(self) -> None:
        table = next(self._tables, None)
        if table is None:
            self.complete = _ALL
        elif len(table):
            groups = integers(table[KEY_GROUP.name])
            self.held.append((table, groups))
            self.complete = int(groups[-1]) - 1


def _rows(side: Side | None) -> Tables:
    if side is not None:
        yield from side.rows()


@dataclass(frozen=True)
class ByLayers(Step):
    """Key groups that begin with the same layers on both sides.

    Only rows that the layers above name, or whose key they clear, can differ: those layers are
    held, and the common rows are streamed past them. ``common``: the layers that both sides have;
    ``old`` and ``new``: the layers above them on each side.
    """

    common: Side
    old: Side | None
    new: Side | None
    keys: Keys
    size_bytes: int = 0

    def changes(self) -> Tables:
        """See :meth:`Step.changes`."""
        above = [[] if side is None else side.layers() for side in (self.old, self.new)]
        named = Overlay([*above[0], *above[1]], self.keys)
        # A clear may affect any number of rows.
        with Spill[int]() as touched:
            with closing(self.common.rows()) as rows:
                suspects = (table.filter(pa.array(named.may_touch(table))) for table in rows)
                for table in _joined(suspects):
                    touched.add(0, table.filter(pa.array(named.touches(table))))
            both = all(above)
            sides = [
                _standing(touched, Overlay(layers, self.keys) if both else named if layers else None)
                for layers in above
            ]
            yield from differences(sides[0], sides[1], self.keys.row_key, by_group=True)


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
        if size_bytes >= CHUNK_BYTES:
            yield pa.concat_tables(held)
            held, size_bytes = [], 0
    if held:
        yield pa.concat_tables(held)
