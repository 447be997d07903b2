"""The table that `make test-truth` prints: kind of fault, how often tried, noticed, wrong.

A test that tries many faults adds a line for each kind, and asserts like any other test. The table
is for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Line(NamedTuple):
    """One kind of fault. ``noticed`` is None if there is nothing to notice (a race has a winner,
    but no damage).
    """

    kind: str
    tried: int
    noticed: int | None
    wrong: int
    note: str


class Tally:
    """What a run of tests has tried so far, in the order of first mention."""

    def __init__(self) -> None:
        self._lines: dict[str, Line] = {}

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The arguments of ``add`` for every kind, which a process may send to another."""
        return [line._asdict() for line in self._lines.values()]

    def add(self, kind: str, *, tried: int, wrong: int, noticed: int | None = None, note: str = "") -> None:
        """Count faults of a kind; numbers of one kind add up."""
        before = self._lines.get(kind, Line(kind, 0, None, 0, ""))
        both = [count for count in (before.noticed, noticed) if count is not None]
        self._lines[kind] = Line(
            kind, before.tried + tried, sum(both) if both else None, before.wrong + wrong, note or before.note
        )

    @contextmanager
    def trying(self, kind: str, *, tried: int = 1) -> Iterator[None]:
        """Count what the block tries; if it raises, count one as wrong."""
        try:
            yield
        except BaseException:
            self.add(kind, tried=tried, wrong=1)
            raise
        self.add(kind, tried=tried, wrong=0)

    def skip(self, kind: str, why: str) -> None:
        """Record that a kind was not tried here, and why."""
        self._lines[kind] = Line(kind, 0, None, 0, f"skipped: {why}")

    def table(self) -> list[str]:
        """Return the lines of the table; none if nothing was counted."""
        return list(_rows(self._lines.values())) if self._lines else []


def _rows(lines: Iterable[Line]) -> Iterable[str]:
    cells = [("kind of fault", "tried", "noticed", "wrong", "")]
    for line in lines:
        noticed = "-" if line.noticed is None else f"{line.noticed:,}"
        cells.append((line.kind, f"{line.tried:,}", noticed, f"{line.wrong:,}", line.note))
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    for row in cells:
        numbers = "  ".join(cell.rjust(width) for cell, width in zip(row[1:4], widths[1:], strict=True))
        yield f"{row[0].ljust(widths[0])}  {numbers}  {row[4]}".rstrip()
