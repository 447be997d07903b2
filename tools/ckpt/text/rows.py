"""Rows as a table of the page's width, or one below the other where they are too wide for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from stateformat import words
from stateformat.words import label

from . import render
from .render import Look

CELL_MIN: Final = 8
"""Where texts would get less room than this, rows are shown one below the other."""
TITLE_MIN: Final = 16
CUTTABLE: Final = ("binary", "list", "map", "string", "struct")
CELL_MAX: Final = 240
"""Columns of a value where rows are shown one below the other."""


def draw_rows(
    columns: Sequence[Mapping[str, str]],
    rows: Sequence[Mapping[str, Any]],
    look: Look,
    *,
    indent: str = "",
    signs: Sequence[str] = (),
) -> Iterator[str]:
    """A table; rows one below the other where it would be too wide.

    ``columns``: name and type of those shown. ``signs``: what stands before each row.
    """
    names = [column["name"] for column in columns]
    cells = [[words.cell(row[name]) for name in names] for row in rows]
    titles = [label(name) for name in names]
    types = [column["type"] for column in columns]
    margin = len(indent) + (3 if signs else 0)
    caps = _caps(types, titles, cells, look.width - margin)
    if caps:
        shown = [
            render.Column(render.shorten(title, cap, look), right=_is_number(kind))
            for title, kind, cap in zip(titles, types, caps, strict=True)
        ]
        body = [[render.shorten(cell, cap, look) for cell, cap in zip(row, caps, strict=True)] for row in cells]
        if signs:
            shown.insert(0, render.Column(""))
            body = [[sign, *row] for sign, row in zip(signs, body, strict=True)]
        yield from render.table(shown, body, look, indent=indent)
        return
    for i, row in enumerate(cells):
        yield indent + render.heading(signs[i] if signs else f"Row {i + 1:,}", look)
        shortened = [render.shorten(cell, CELL_MAX, look) for cell in row]
        yield from render.facts(zip(titles, shortened, strict=True), look, indent=indent + "  ")


def _caps(types: Sequence[str], titles: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """The greatest width of each column so that all fit; empty where they cannot.

    Only texts and nested values are cut, and titles: half a number says something else.
    """
    whole = [max([0, *(render.text_width(row[i]) for row in cells)]) for i in range(len(titles))]
    widths = [max(held, render.text_width(title)) for held, title in zip(whole, titles, strict=True)]
    cuttable = [kind.startswith(CUTTABLE) for kind in types]
    least = [
        min(wanted, CELL_MIN) if cut else max(held, min(wanted, TITLE_MIN))
        for wanted, held, cut in zip(widths, whole, cuttable, strict=True)
    ]
    left = width - 2 * (len(titles) - 1) - sum(least)
    if left < 0:
        return []
    # The narrowest first: what they do not need is for the others.
    caps = list(least)
    for done, i in enumerate(sorted(range(len(titles)), key=lambda i: widths[i] - least[i])):
        caps[i] += min(widths[i] - least[i], left // (len(titles) - done))
        left -= caps[i] - least[i]
    return caps


def _is_number(kind: str) -> bool:
    return kind.startswith(("int", "uint", "float", "double", "decimal", "halffloat"))
