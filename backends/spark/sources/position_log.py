"""What a position remembers, as the log of an enumerator has it.

A row is a name and what a move has made of it: its number or its text, or neither, if the name is
gone. Of a name's rows that of the latest move counts. So a checkpoint writes what a move has
changed. When most rows have been overtaken, all that is remembered is written anew, and so it is by
a run that begins.
"""

from __future__ import annotations

import pyarrow as pa

from ...connectors.sources import not_null
from .offsets import Position

SPARE_ROWS = 512
"""How many rows that were overtaken do not matter, beside one for each name."""


def is_remembered(name: str) -> bool:
    """Return whether a name lies in the log, of a position that remembers."""
    return not name.startswith("/")


class PositionLog:
    """The log of one source, and what it says."""

    columns = pa.schema(
        [*not_null(move=pa.int64(), name=pa.string()), pa.field("number", pa.int64()), pa.field("text", pa.string())]
    )

    def __init__(self) -> None:
        self.known: dict[str, int | str] = {}
        """What the rows say that were given out or restored."""
        self.is_whole = False
        """Whether the rows that were given out last are the whole log, in place of all before."""
        self._rows = 0
        self._move = 0
        self._at: Position | None = None
        self._overtaken = False

    def restore(self, rows: pa.Table) -> None:
        """Take back all rows, in any order."""
        names, numbers, texts = (rows.sort_by("move")[name].to_pylist() for name in self.columns.names[1:])
        said = zip(names, numbers, texts, strict=True)
        found = {name: text if number is None else number for name, number, text in said}
        self.known = {name: value for name, value in found.items() if value is not None}
        self._rows, self._overtaken = len(names), len(names) > len(self.known)
        self._move = max(rows["move"].to_pylist(), default=0)

    def rows_for(self, position: Position | None) -> pa.Table:
        """The rows that the log gains with a position, or, with :attr:`is_whole`, all anew."""
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
    """Names with their numbers or texts, by column."""
    return {
        "name": [*values],
        "number": [value if isinstance(value, int) else None for value in values.values()],
        "text": [value if isinstance(value, str) else None for value in values.values()],
    }
