"""Keyed state written by RocksDB: the table files of one subtask, as entries by key groups.

A column family is a state, of the same name. Keys and values are those of canonical savepoints:
keys begin with their key group. After a rescale, files hold keys of groups that other subtasks own:
only the handle's groups are read. The handle lists the live files, so no manifest is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..framing import damaged
from ..sst.blocks import ReadRange
from ..sst.merge import merged
from ..sst.table import Counter, Table, batches, open_table, read_run
from .layouts import Entries

RANGE_BYTES: Final = 1 << 24
"""How many stored bytes of key groups are read at once; one key group may have more."""


class TableSource(NamedTuple):
    """A table file of a handle."""

    path: str
    """The file, for people."""
    size: int
    read: ReadRange


@dataclass(frozen=True)
class Database:
    """The tables of one subtask, by column family. Picklable if their ``read`` is."""

    tables: Mapping[str, Sequence[Table]]
    prefix: int
    """How many bytes the key group's number takes in a key."""
    first_group: int
    last_group: int

    def stored_bytes(self, state: str) -> int:
        """Return the stored bytes of a state's data blocks."""
        return sum(table.stored_bytes for table in self.tables.get(state, ()))

    def entries(self, state: str, first_group: int | None = None, last_group: int | None = None) -> Iterator[Entries]:
        """Stream the entries of a state, by key group and key, some key groups at once.

        Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``. A state without a table has none.
        """
        first = self.first_group if first_group is None else max(first_group, self.first_group)
        last = self.last_group if last_group is None else min(last_group, self.last_group)
        tables = self.tables.get(state, ())
        if not tables or first > last:
            return
        for low, high in self._ranges(tables, first, last):
            keys, values = merged(tables, self._key(low), self._key(high + 1))
            if not len(keys):
                continue
            if int(keys.length.min()) < self.prefix:
                raise damaged(tables[0].path, f"a key of state {state!r} is shorter than the number of its key group")
            groups = keys.fixed(0, ">u2" if self.prefix == 2 else "u1").astype(np.int32)
            yield Entries(groups, keys, values)

    def group_entries(self, state: str) -> npt.NDArray[np.int64]:
        """Count a state's entries exactly, by key group from ``first_group`` on."""
        counts = np.zeros(self.last_group - self.first_group + 1, np.int64)
        for entries in self.entries(state):
            counts += np.bincount(entries.groups - self.first_group, minlength=len(counts))
        return counts

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read every block of every table, and compare its contents with the table's own counts.

        ``progress`` is called with the stored bytes read. Raises as :meth:`entries`.
        """
        for tables in self.tables.values():
            for table in tables:
                counted = Counter(table)
                for first, last in batches(table, RANGE_BYTES):
                    counted.add(read_run([(table, first, last)]).stamp)
                    if progress is not None:
                        progress(int(table.blocks.size[first:last].sum()))
                counted.compare()

    def _key(self, group: int) -> bytes | None:
        """Return the least key of a key group; None above all numbers."""
        return group.to_bytes(self.prefix, "big") if group < 1 << 8 * self.prefix else None

    def _ranges(self, tables: Sequence[Table], first: int, last: int) -> Iterator[tuple[int, int]]:
        """Cut key groups into ranges of about :data:`RANGE_BYTES`."""
        sizes = np.zeros(last - first + 1, np.int64)
        for table in tables:
            # A block counts for the group of the key that ends it, which is approximately where it
            # is.
            group = table.separator_prefixes(self.prefix)
            inside = (group >= first) & (group <= last)
            np.add.at(sizes, group[inside] - first, table.blocks.size[inside])
        ends = np.cumsum(sizes)
        low = first
        while low <= last:
            before = int(ends[low - first - 1]) if low > first else 0
            high = first + int(np.searchsorted(ends, before + RANGE_BYTES, "right")) - 1
            high = min(max(high, low), last)
            yield low, high
            low = high + 1


def open_database(sources: Iterable[TableSource], prefix: int, first_group: int, last_group: int) -> Database:
    """Open the table files of a handle (those among its files whose name ends in ``.sst``).

    Reads footers, properties and indexes. Raises ``DamagedCheckpoint`` and ``UnsupportedFormat``.
    """
    tables: dict[str, list[Table]] = {}
    for source in sources:
        table = open_table(source.read, source.size, source.path)
        family = table.properties.column_family
        if family is None:
            raise damaged(source.path, "its properties name no column family, which is the name of a state")
        tables.setdefault(family, []).append(table)
    return Database(tables, prefix, first_group, last_group)
