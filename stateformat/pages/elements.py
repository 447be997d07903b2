"""Elements of HTML and SVG as values: text is always escaped, and attributes are always quoted.

Markup cannot be passed as text. Text goes through :func:`stateformat.words.label` first, so
characters that would reverse or hide neighboring text are spelled out. Only the style sheet, a
constant, is written as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Final, TypeAlias

from .. import words
from .style import STYLE

_NAME: Final = re.compile(r"[a-z][A-Za-z0-9-]*")
_TAGS: Final = frozenset(
    (
        *("abbr", "body", "code", "dd", "details", "div", "dl", "dt", "figcaption", "figure", "footer"),
        *("h1", "h2", "h3", "header", "main", "meta", "p", "section", "small", "span", "strong", "summary"),
        *("table", "tbody", "td", "th", "thead", "title", "tr"),
        *("circle", "g", "path", "polygon", "rect", "svg", "text"),
    )
)
"""Every tag used in drawing. None of them runs or loads anything."""
_EMPTY: Final = "meta"
_DRAWN: Final = frozenset(("circle", "path", "polygon", "rect"))
_LOADING: Final = ("href", "src", "srcset", "style", "action", "formaction", "background", "data", "poster")
"""Attributes that no element has: they would load something, or be code."""
Node: TypeAlias = "Element | str | int | float | None"
"""A part of a page. Text and numbers are text; None adds nothing."""
Children: TypeAlias = "Node | Iterable[Children]"


@dataclass(frozen=True, slots=True)
class Element:
    """An element; :func:`element` makes it."""

    tag: str
    attributes: tuple[tuple[str, str], ...]
    children: tuple[Node, ...]

    def __str__(self) -> str:
        return "".join(markup(self))


def element(tag: str, *children: Children, **attributes: str | float | bool | None) -> Element:
    """Return an element.

    - ``children``: elements, text, numbers, or iterables of them; None adds nothing.
    - ``attributes``: a trailing ``_`` is removed (``class_``), other ``_`` become ``-``. None and
      False leave an attribute out; True is the bare attribute.

    Raises ``ValueError`` for a tag or attribute that none of stateformat's pages has.
    """
    if tag not in _TAGS:
        raise ValueError(f"no page has an element {tag!r}")
    named = []
    for given, value in attributes.items():
        name = given.removesuffix("_").replace("_", "-")
        if not _NAME.fullmatch(name) or name.startswith("on") or name in _LOADING:
            raise ValueError(f"no element has an attribute {name!r}")
        if value is not None and value is not False:
            named.append((name, "" if value is True else _number(value) if isinstance(value, float) else str(value)))
    return Element(tag, tuple(named), tuple(_flat(children)))


e = element


def _flat(children: Iterable[Children]) -> Iterator[Node]:
    for child in children:
        if child is None or isinstance(child, (Element, str, int, float)):
            yield child
        else:
            yield from _flat(child)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def markup(node: Node) -> Iterator[str]:
    """Return a node as pieces of HTML."""
    if node is None:
        return
    if not isinstance(node, Element):
        yield escape(words.label(_number(node) if isinstance(node, float) else node))
        return
    yield f"<{node.tag}"
    for name, value in node.attributes:
        yield f' {name}="{escape(words.label(value))}"' if value else f" {name}"
    if node.tag in _DRAWN and not node.children:
        yield "/>"
        return
    yield ">"
    if node.tag == _EMPTY:
        return
    for child in node.children:
        yield from markup(child)
    yield f"</{node.tag}>"


GENERATOR: Final = "stateformat report"
"""What a page says it was made by, so that a later one may replace it."""
POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""What a browser lets a page do: only use its own style sheet."""


def document(title: str, *body: Children) -> Iterator[str]:
    """Return a page that needs nothing else, as pieces of HTML."""
    yield "<!DOCTYPE html>\n"
    yield '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    yield from markup(e("meta", name="generator", content=GENERATOR))
    yield from markup(e("meta", http_equiv="Content-Security-Policy", content=POLICY))
    yield from markup(e("meta", name="viewport", content="width=device-width, initial-scale=1"))
    yield from markup(e("meta", name="color-scheme", content="light dark"))
    yield from markup(e("meta", name="referrer", content="no-referrer"))
    yield from markup(e("title", title))
    yield f"\n<style>{STYLE}</style>\n</head>\n"
    yield from markup(e("body", *body, class_="sf"))
    yield "\n</html>\n"


def fragment(*body: Children) -> str:
    """Return a part of another page, such as a notebook, with its own style."""
    pieces = ['<div class="sf"><style>', STYLE, "</style>"]
    for node in _flat(body):
        pieces.extend(markup(node))
    return "".join([*pieces, "</div>"])
