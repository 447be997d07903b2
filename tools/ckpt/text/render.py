"""Pieces of text pages: numbers, bars, tables. Pure: values and a :class:`Look` in, lines out.

What comes from a checkpoint goes through :func:`label` first: a stranger's text must neither break
a line nor steer a terminal.
"""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from stateformat import words

WIDTH_MIN: Final = 60
WIDTH_DEFAULT: Final = 80
"""Columns of a page whose output has no known width."""
WIDTH_MAX: Final = 120
NARROW: Final = 72
"""Pages with fewer columns use shorter titles."""
_WRAPPED_MAX: Final = 4_000
"""Characters of one text: fifty lines."""

_BARS: Final = "▁▂▃▄▅▆▇█"
_BARS_ASCII: Final = "12345678"
_GLYPHS: Final = {
    "full": ("●", "#"),
    "part": ("◐", "+"),
    "none": ("○", "o"),
    "left_arrow": ("←", "<-"),
    "arrow": ("→", "->"),
    "loop": ("↺", "loop"),
    "dot": ("·", "."),
    "fail": ("✗", "x"),
    "good": ("✓", "ok"),
    "times": ("×", "x"),
    "ellipsis": ("…", "~"),
}
_COLORS: Final[Mapping[str, Mapping[str, Any]]] = {
    "plain": {},
    "title": {"bold": True},
    "name": {"bold": True},
    "dim": {"dim": True},
    "finished": {"fg": "green"},
    "partial": {"fg": "yellow"},
    "problem": {"fg": "red"},
    "bar": {"fg": "cyan"},
}


@dataclass(frozen=True)
class Look:
    """How a page may look: its columns, and whether the output takes Unicode and colors."""

    width: int = WIDTH_DEFAULT
    unicode: bool = True
    color: bool = False

    def __getitem__(self, glyph: str) -> str:
        return _GLYPHS[glyph][0 if self.unicode else 1]

    def paint(self, text: str, role: str) -> str:
        """The text in the color of its role."""
        return click.style(text, **_COLORS[role]) if self.color and text else text

    def dotted(self, *parts: str) -> str:
        """The parts that are not empty, with dots between them."""
        return f" {self['dot']} ".join(filter(None, parts))


def text_width(text: str) -> int:
    """Columns that a text takes on a terminal. Colors take none, wide characters take two."""
    plain = click.unstyle(text)
    if plain.isascii():
        return len(plain)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in plain
    )


def pad(text: str, width: int, *, right: bool = False) -> str:
    """The text filled with spaces to a width; ``right`` aligns it right, as numbers are."""
    space = " " * (width - text_width(text))
    return space + text if right else text + space


def shorten(text: str, width: int, look: Look) -> str:
    """The text (without colors), cut to a width with an ellipsis."""
    if text_width(text) <= width:
        return text
    kept = ""
    for char in text:
        if text_width(kept + char) > width - len(look["ellipsis"]):
            break
        kept += char
    return kept + look["ellipsis"]


def more(left: int, look: Look, noun: str = "", *, hint: str = "--format json lists all") -> str:
    """Says that a page leaves something out and how to see it; empty if it leaves nothing out."""
    what = words.plural(left, f"more {noun}", f"more {noun}s") if noun else f"{words.count(left)} more"
    return f"{look['ellipsis']} and {what} ({hint})" if left > 0 else ""


def spark(values: Sequence[int | None], look: Look, *, width: int) -> str:
    """One bar per value, in proportion to the greatest: 0 is a dot, None (no such value) a dash.

    If there are more values than columns, neighbors share a bar, which shows the greatest of them.
    """
    steps = [-1 if value is None else value for value in values]
    if len(steps) > width:
        bounds = [len(steps) * i // width for i in range(width + 1)]
        steps = [max(steps[bounds[i] : bounds[i + 1]]) for i in range(width)]
    glyphs = _BARS if look.unicode else _BARS_ASCII
    top = max(steps, default=0)

    def glyph(value: int) -> str:
        if value <= 0:
            return "-" if value < 0 else look["dot"]
        return glyphs[(value * 8 + top - 1) // top - 1]

    return look.paint("".join(map(glyph, steps)), "bar")


def bar(value: int, top: int, look: Look, *, width: int) -> str:
    """A horizontal bar in proportion to the greatest value; in Unicode to an eighth of a column."""
    if value <= 0 or top <= 0:
        return ""
    eighths = max(1, round(value * width * 8 / top))
    if not look.unicode:
        return look.paint("#" * max(1, eighths // 8), "bar")
    whole, rest = divmod(eighths, 8)
    return look.paint("█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else ""), "bar")


def uneven(ratio: float, look: Look) -> str:
    """How far the greatest is from the mean, after two spaces; empty if it is nearly the mean."""
    return f"  {ratio:.1f} {look['times']} mean" if ratio >= 1.05 else ""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    right: bool = False
    optional: int = 0
    """On a narrow page the columns with the highest number are left out first; 0 always stays."""
    flexible: bool = False
    """Whether its cells may be cut."""


def table(columns: Sequence[Column], rows: Iterable[Sequence[str]], look: Look, *, indent: str = "  ") -> list[str]:
    """Aligned columns under a line of titles.

    If that is too wide, it leaves out optional columns, then cuts flexible ones.
    """
    body = [list(row) for row in rows]
    kept = list(range(len(columns)))
    widths = [
        max([text_width(column.title), *(text_width(row[i]) for row in body)]) for i, column in enumerate(columns)
    ]

    def too_wide() -> int:
        return text_width(indent) + sum(widths[i] for i in kept) + 2 * (len(kept) - 1) - look.width

    while too_wide() > 0 and any(columns[i].optional for i in kept):
        kept.remove(max(kept, key=lambda i: (columns[i].optional, i)))
    for i in sorted((i for i in kept if columns[i].flexible), key=lambda i: -widths[i]):
        widths[i] = max(len(columns[i].title), widths[i] - max(0, too_wide()))
        for row in body:
            row[i] = shorten(row[i].rstrip(), widths[i], look)
    titles = "  ".join(pad(columns[i].title, widths[i], right=columns[i].right) for i in kept).rstrip()
    lines = [indent + look.paint(titles, "dim")] if any(column.title for column in columns) else []
    lines += [
        (indent + "  ".join(pad(row[i], widths[i], right=columns[i].right) for i in kept)).rstrip() for row in body
    ]
    return lines


def facts(pairs: Iterable[tuple[str, str]], look: Look, *, indent: str = "  ", name_width: int = 0) -> list[str]:
    """``name  value`` lines; values wrap under themselves, empty ones are left out."""
    shown = [(name, value) for name, value in pairs if value]
    width = max([name_width, *(len(name) for name, _ in shown)], default=0)
    lines = []
    for name, value in shown:
        head = indent + look.paint(pad(name, width), "dim") + "  "
        for i, part in enumerate(wrap(value, look.width - len(indent) - width - 2)):
            lines.append((head if i == 0 else " " * (len(indent) + width + 2)) + part)
    return lines


def heading(title: str, look: Look, note: str = "") -> str:
    """A section's title, and a note at the right margin."""
    space = look.width - text_width(title) - text_width(note)
    return look.paint(title, "title") + (" " * max(2, space) + look.paint(note, "dim") if note else "")


def page_head(title: str, pairs: Iterable[tuple[str, str]], look: Look) -> Iterator[str]:
    """The first lines of every page: its title, an empty line, facts."""
    yield heading(title, look)
    yield ""
    yield from facts(pairs, look)


def wrap(text: str, width: int) -> list[str]:
    """The text on lines of at most ``width`` columns; longer words (paths) are broken.

    A text that would fill pages is cut, and the last line says how much is left out.
    """
    width = max(width, 20)
    if len(text) > _WRAPPED_MAX:
        text = f"{text[:_WRAPPED_MAX]} (and {words.count(len(text) - _WRAPPED_MAX)} more characters)"
    lines = textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    # textwrap counts characters, which is wrong for those that take two columns.
    return lines if all(text_width(line) <= width for line in lines) else _wrap_wide(text, width)


def _wrap_wide(text: str, width: int) -> list[str]:
    lines: list[str] = []
    line = ""
    for word in text.split():
        room = text_width(line) + 1 if line else 0
        if room + text_width(word) <= width:
            line = f"{line} {word}" if line else word
            continue
        if line and (text_width(word) <= width or room == width):
            lines.append(line)
            line = ""
        elif line:
            line += " "
        for char in word:
            if text_width(line + char) > width:
                lines.append(line.rstrip())
                line = ""
            line += char
    return [*lines, line]


def paragraph(text: str, look: Look, *, indent: str = "  ", first: str | None = None) -> list[str]:
    """Wrapped text; ``first``, as wide as the indent, replaces it on the first line."""
    lines = wrap(text, look.width - text_width(indent))
    return [(first if first is not None and i == 0 else indent) + line for i, line in enumerate(lines)]


def explanation(message: str, advice: str, look: Look) -> Iterator[str]:
    """Below the title of a problem or refusal: what is wrong, then what to do."""
    yield from paragraph(words.sentence(message), look, indent="    ")
    if not advice:
        return
    arrow = f"    {look['arrow']} "
    yield from paragraph(words.sentence(advice), look, indent=" " * len(arrow), first=arrow)
