"""Pieces of pages: tables, facts, badges, sections that open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .. import words
from .elements import Children, Element, Node, element as e

DASH: Final = "–"
"""Shown for what is unknown."""
SHOWN: Final = 40
"""Rows of a list on a page; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    """Whether it is aligned right, as numbers are."""
    whole: bool = False
    """Whether it holds short words that are not broken."""

    @property
    def look(self) -> str | None:
        """Its class in the style sheet."""
        return "r" if self.right else "k" if self.whole else None


def table(columns: Sequence[Column], rows: Iterable[Sequence[Node]], *, caption: str = "") -> Element:
    """Return a table. On a narrow screen each row is a block, with the titles beside the cells."""
    titles = (e("th", column.title, scope="col", class_=column.look) for column in columns)
    return e(
        "table",
        e("caption", caption) if caption else None,
        e("thead", e("tr", titles)),
        e("tbody", (_row(columns, row) for row in rows)),
        class_="stack",
    )


def _row(columns: Sequence[Column], cells: Sequence[Node]) -> Element:
    return e(
        "tr",
        (
            e("td", DASH if cell is None else cell, class_=column.look, data_label=column.title)
            for column, cell in zip(columns, cells, strict=True)
        ),
    )


def facts(pairs: Iterable[tuple[str, Node]]) -> Element:
    """Return names and values; a pair without a value is left out."""
    return e("dl", ((e("dt", name), e("dd", value)) for name, value in pairs if value not in (None, "")))


def badge(text: str, tone: str = "") -> Element:
    """Return a word in a rounded box. ``tone``: ``good``, ``some`` or ``bad``."""
    return e("span", text, class_=f"badge {tone}".rstrip())


def opening(summary: Children, *inside: Children, is_open: bool = False) -> Element:
    """Return a section that a reader opens to see more."""
    return e("details", e("summary", summary), e("div", inside, class_="inside"), open=is_open)


def card(title: str, value: Children, about: Children = None) -> Element:
    """Return one of the figures at the top of a page."""
    return e("div", e("span", title), e("strong", value), e("small", about) if about else None, class_="card")


def more(left: int, noun: str, hint: str = "") -> Element | None:
    """Return how many are left out, and where to find all; None if nothing is left out."""
    if left <= 0:
        return None
    return e("p", f"… and {words.plural(left, f'more {noun}', f'more {noun}s')}{hint and f' ({hint})'}", class_="quiet")


def short(text: str, length: int = 80) -> Node:
    """Return a name, cut in the middle if it is very long, with the full name as a tooltip."""
    safe = words.label(text)
    if len(safe) <= length:
        return safe
    return e("abbr", f"{safe[: length - length // 4 - 1]}…{safe[-(length // 4) :]}", title=safe[:1000])


def state_name(operator: str, name: str, length: int = 40) -> Node:
    """Return a state by its operator and name."""
    return e("span", short(operator, length), " / ", e("strong", short(name, length)))


def mode_of(state: Mapping[str, Any]) -> str:
    """Return a state's mode and kind in words."""
    return words.mode_of(state).replace("_", " ")
