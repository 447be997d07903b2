"""The log of an enumerator, which stores the names that a position remembers.

Each *move* of the position adds rows for the names it changed: a name with its new number or text,
or with neither if the name was removed. A name's row of the latest move counts. So a checkpoint
writes only what has changed. When most rows are outdated, the log is rewritten with only the
current names. A run that restored outdated rows rewrites it first.
"""

from __future__ import annotations

import pyarrow as pa

from ...connectors.sources.enumerators import not_null
from .offsets import Position

SPARE_ROWS = 512
"""How many outdated rows are tolerated in any case, besides one for each name."""


def is_remembered(name: str) -> bool:
    """Return whether a name is stored in the log, if the position has one."""
    return not name.startswith("/")


class PositionLog:
    """The log of one source, and its current names."""

    columns = pa.schema(
        [*not_null(move=pa.int64(), name=pa.string()), pa.field("number", pa.int64()), pa.field("text", pa.string())]
    )

    def __init__(self) -> None:
        self.known: dict[str, int | str] = {}
        """The names and values according to the rows returned or restored so far."""
        self.is_whole = False
        """Whether the rows returned last are the whole log, which replaces all earlier rows."""
        self._rows = 0
        self._move = 0
        self._at: Position | None = None
        self._overtaken = False

    def restore(self, rows: pa.Table) -> None:
        """Load all rows, in any order."""
        names, numbers, texts = (rows.sort_by("move")[name].to_pylist() for name in self.columns.names[1:])
        said = zip(names, numbers, texts, strict=True)
        found = {name: text if number is None else number for name, number, text in said}
        self.known = {name: value for name, value in found.items() if value is not None}
        self._rows, self._overtaken = len(names), len(names) > len(self.known)
        self._move = max(rows["move"].to_pylist(), default=0)

    def rows_for(self, position: Position | None) -> pa.Table:
        """Return the rows to add for a position, or the whole log if :attr:`is_whole` is set."""
        self.is_whole = False
        if position is None or position is self._at:
            return self.columns.empty_table()
        now = {name: value for name, value in position.items() if is_remembered(name)}
        changed: dict[str, int | str | None] = {name: now[name] for name in now if self.known.get(name) != now[name]}
        changed |= dict.fromkeys(self.known.keys() - now.keys())
        self.is_whole = self._overtaken or self._rows + len(changed) > 2 * len(now) + SPARE_ROWS
        written = now if self.is_whole else changed
        self._rows = len(written) if self.is_whole else self._rows + len(written)
        self._move += 1
        self.known, self._at, self._overtaken = now, position, False
        return pa.table({"move": pa.repeat(self._move, len(written)), **columns_of(written)}, schema=self.columns)


def columns_of(values: Position | dict[str, int | str | None]) -> dict[str, list[int | str | None]]:
    """Return names with their numbers or texts, by column."""
    return {
        "name": [*values],
        "number": [value if isinstance(value, int) else None for value in values.values()],
        "text": [value if isinstance(value, str) else None for value in values.values()],
    }
