"""The short table of the README: what users ask first, from the rows of docs/benchmarks.md."""

from __future__ import annotations

import itertools
import re
from typing import NamedTuple

BEGIN, END = "<!-- asked:begin -->\n", "<!-- asked:end -->"
_ALTERNATIVES = re.compile(r"\{(.*?)\}")
_MARK = re.compile(r" ?(\*\*missed[^*]*\*\*)")


class Asked(NamedTuple):
    """A line: what it says, and whose figures stand in it, one behind the other.

    In names of rows ``{a|b}`` stands for either. ``against``: of rows with one name, those that are
    measured against this.
    """

    what: str
    rows: tuple[str, ...]
    against: str = ""

    @property
    def names(self) -> list[str]:
        """The names of its rows, in order."""
        found = []
        for pattern in self.rows:
            text = _ALTERNATIVES.sub("{}", pattern)
            choices = [each.split("|") for each in _ALTERNATIVES.findall(pattern)]
            found += [text.format(*chosen) for chosen in itertools.product(*choices)]
        return found


ASKED = (
    Asked(
        "on Spark, a function of a key: 100k keys, 2k, 20k, 200k rows an epoch",
        ("Spark runtime, plain function of a key, 100,000 keys, {2,000|20,000|200,000} rows an epoch",),
        "transformWithState with rows",
    ),
    Asked(
        "on Spark, `aggregate`: 100, 100k, 5M keys with 2k rows an epoch; the same with 2M",
        tuple(
            f"Spark runtime, `aggregate`, {{100|100,000|5,000,000}} keys, {rows} rows an epoch"
            for rows in ("2,000", "2,000,000")
        ),
    ),
    Asked(
        "on Spark, resume with 5M keys, to the end of the first epoch",
        ("Spark runtime, `aggregate`, 5,000,000 keys in the state: resume, to the end of the first epoch",),
    ),
    Asked("metadata-only rescale 4 → 6 of 5M rows", ("metadata-only rescale 4 → 6 of 5M rows",)),
    Asked("`ckpt inspect`, cold process", ("`ckpt inspect` of a local checkpoint, cold process",)),
)


class _Cells(NamedTuple):
    what: str
    ours: str
    against: str
    ratio: str
    cpu: str
    budget: str

    @property
    def figure(self) -> str:
        """Its ratio, or its own figure if it has none; and its mark."""
        mark = _MARK.search(self.budget)
        return f"{self.ours if self.ratio == '–' else self.ratio}{f' {mark[1]}' if mark else ''}"


def rows_of(page: str) -> list[_Cells]:
    """The rows of all tables of a page."""
    rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if line[:2] == "| ")
    return [_Cells(*cells) for cells in rows if len(cells) == len(_Cells._fields)]


def line(asked: Asked, page: list[_Cells]) -> str:
    """Its line, from the rows of the page. Those that were never measured are left out."""
    rows = [row for name in asked.names for row in page if row.what == name and row.against.startswith(asked.against)]
    against = ", ".join(dict.fromkeys(row.against.partition(": ")[0] for row in rows))
    budgets = ", ".join(dict.fromkeys(_MARK.sub("", row.budget) for row in rows))
    return f"| {asked.what} | {against} | {' · '.join(row.figure for row in rows)} | {budgets} |"


def with_table(readme: str, page: str) -> str:
    """The README with its short table, from the page."""
    rows = rows_of(page)
    lines = ["| what | against | ratio | goal |", "|---|---|---|---|", *(line(asked, rows) for asked in ASKED)]
    head, begin, rest = readme.partition(BEGIN)
    return head + begin + "\n".join(lines) + "\n" + rest[rest.index(END) :]
