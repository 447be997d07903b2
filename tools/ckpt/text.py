"""Draws blocks as lines on a terminal.

All text goes through :meth:`Look.text`: a stranger's must neither break a line nor steer a
terminal, and a terminal without Unicode gets other signs.
"""

from __future__ import annotations

import json
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from stateformat import words
from stateformat.pages.blocks import (
    ELLIPSIS,
    Bar,
    Block,
    Cards,
    Cell,
    Chart,
    Column,
    Details,
    Facts,
    Finding,
    Graph,
    Heading,
    Json,
    Lines,
    Margin,
    Note,
    Page,
    Row,
    Said,
    Spark,
    Table,
    Tone,
    Under,
    Values,
    dotted,
    more,
    plain,
)

WIDTH_MIN: Final = 60
WIDTH_DEFAULT: Final = 80
"""Columns of a page whose output has no known width."""
WIDTH_MAX: Final = 120
NARROW: Final = 72
"""Pages with fewer columns use shorter titles."""
LANES_MAX: Final = 10
"""With more lanes than this side by side, a graph has only the marks."""
_WRAPPED_MAX: Final = 4_000
"""Characters of one text: fifty lines."""
_BAR_MAX: Final = 24
_DRAWN_MIN: Final = 6
_FLEXIBLE_MIN: Final = 8
_CELL_MIN: Final = 8
"""Where texts would get less room than this, rows are shown one below the other."""
_TITLE_MIN: Final = 16
_CELL_MAX: Final = 240
"""Columns of a value where rows are shown one below the other."""
_CUTTABLE: Final = ("binary", "list", "map", "string", "struct")
_NUMBERS: Final = ("int", "uint", "float", "double", "decimal", "halffloat")

_ESCAPE: Final = re.compile(r"(\x1b\[[\d;]*m)")
_SIGN: Final = re.compile(r"[/._=&?,:;-](?=[^/._=&?,:;-])")
"""Where a long word, such as a path, may be broken."""
_RESET: Final = "\x1b[0m"
_BARS: Final = "▁▂▃▄▅▆▇█"
_BARS_ASCII: Final = "12345678"
_SIGNS: Final = {"←": "<-", "→": "->", "↺": "loop", "✓": "ok", "≤": "<=", "…": "..."}
_ASCII: Final = str.maketrans(dict(zip("●◐○·✗×–−█│─├┴┼┬╯╮", "#+o.xx--#|-++++'.", strict=True)) | _SIGNS)
_STRAIGHT: Final = str.maketrans("├┬╮┼─", "││││ ")
_COLORS: Final[Mapping[Tone, Mapping[str, Any]]] = {
    "": {},
    "name": {"bold": True},
    "dim": {"dim": True},
    "good": {"fg": "green"},
    "some": {"fg": "yellow"},
    "bad": {"fg": "red"},
}
_STATUS: Final[Mapping[str, tuple[str, Tone]]] = {
    "fully_finished": ("●", "good"),
    "partially_finished": ("◐", "some"),
    "running": ("○", ""),
}


@dataclass(frozen=True)
class Look:
    """How a page may look: its columns, and whether the output takes Unicode and colors."""

    width: int = WIDTH_DEFAULT
    unicode: bool = True
    color: bool = False

    def text(self, text: object) -> str:
        """Return text that is safe to print here."""
        safe = words.label(text)
        return safe if self.unicode else safe.translate(_ASCII)

    def paint(self, text: str, tone: Tone) -> str:
        """Return the text in its color."""
        return click.style(text, **_COLORS[tone]) if self.color and text and tone else text


def lines(page: Page, look: Look) -> Iterator[str]:
    """Return a page, line by line."""
    drawing = _Drawing(look)
    yield from drawing.page(page)
    if drawing.has_cut:
        yield ""
        said = f"{ELLIPSIS} marks values that are cut (--format json has them whole)"
        yield from drawing.paragraph(look.text(said), "  ")


def text_width(text: str) -> int:
    """Return the columns of a text on a terminal. Colors take none, wide characters take two."""
    bare = click.unstyle(text)
    if bare.isascii():
        return len(bare)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in bare
    )


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Fill the text with spaces to a width; ``right`` aligns it right, as numbers are."""
    space = " " * (width - text_width(text))
    return space + text if right else text + space


def shorten(text: str, width: int, ellipsis: str = ELLIPSIS) -> str:
    """Cut the text to a width, with an ellipsis."""
    if text_width(text) <= width:
        return text
    kept = ""
    for char in click.unstyle(text):
        if text_width(kept + char) > width - len(ellipsis):
            break
        kept += char
    return _painted_as(text, [kept])[0] + ellipsis


def wrap(text: str, width: int) -> list[str]:
    """Return the text on lines of at most ``width`` columns; longer words (paths) are broken behind
    a sign where there is one.

    A text that would fill pages is cut, and the last line says how much is left out.
    """
    width = max(width, 20)
    bare = click.unstyle(text)
    if len(bare) > _WRAPPED_MAX:
        bare = f"{bare[:_WRAPPED_MAX]} (and {words.count(len(bare) - _WRAPPED_MAX)} more characters)"
    found = _Wrapper(width, break_on_hyphens=False).wrap(bare) or [""]
    # textwrap counts characters, which is wrong for those that take two columns.
    found = found if all(text_width(line) <= width for line in found) else _wrap_wide(bare, width)
    return _painted_as(text, found)


def hanging(line: str, width: int) -> list[str]:
    """Return a line on several, each of which begins with the spaces that it begins with."""
    indent = line[: len(line) - len(line.lstrip(" "))]
    return (
        [indent + part for part in wrap(line.lstrip(" "), width - len(indent))] if text_width(line) > width else [line]
    )


class _Wrapper(textwrap.TextWrapper):
    """Breaks a word that is longer than a line behind the last of its signs that fits."""

    def _handle_long_word(self, reversed_chunks: list[str], cur_line: list[str], cur_len: int, width: int) -> None:
        word, room = reversed_chunks[-1], max(1, width - cur_len)
        signs = [match.end() for match in _SIGN.finditer(word, 0, room)]
        if not signs and cur_line:
            return  # The word goes to the next line.
        end = signs[-1] if signs else room
        cur_line.append(word[:end])
        reversed_chunks[-1] = word[end:]


def _painted_as(text: str, parts: list[str]) -> list[str]:
    """Return parts of the text, in its order, in the colors that they have there; each is complete,
    so that none runs on into what comes after it.
    """
    if _ESCAPE.search(text) is None:
        return parts
    style, source = "", []
    for piece in _ESCAPE.split(text):
        if _ESCAPE.fullmatch(piece):
            style = "" if piece == _RESET else style + piece
        else:
            source += [(char, style) for char in piece]
    at, painted = 0, []
    for part in parts:
        line, current = "", ""
        for char in part:
            # Between lines, spaces were left out.
            while at < len(source) and source[at][0] != char and source[at][0].isspace():
                at += 1
            wanted = source[at][1] if at < len(source) and source[at][0] == char else ""
            at += 1
            if wanted != current:
                line += (_RESET if current else "") + wanted
                current = wanted
            line += char
        painted.append(line + (_RESET if current else ""))
    return painted


def _wrap_wide(text: str, width: int) -> list[str]:
    found: list[str] = []
    line = ""
    for word in text.split():
        room = text_width(line) + 1 if line else 0
        if room + text_width(word) <= width:
            line = f"{line} {word}" if line else word
            continue
        if line and (text_width(word) <= width or room == width):
            found.append(line)
            line = ""
        elif line:
            line += " "
        for char in word:
            if text_width(line + char) > width:
                found.append(line.rstrip())
                line = ""
            line += char
    return [*found, line]


def spark(values: Sequence[int | None], look: Look, *, width: int) -> str:
    """Return one bar per value, in proportion to the greatest: 0 is a dot, None a dash.

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
            return "-" if value < 0 else look.text("·")
        return glyphs[(value * 8 + top - 1) // top - 1]

    return click.style("".join(map(glyph, steps)), fg="cyan") if look.color and steps else "".join(map(glyph, steps))


def bar(value: int, top: int, look: Look, *, width: int) -> str:
    """Return a bar in proportion to the greatest value; in Unicode to an eighth of a column."""
    if value <= 0 or top <= 0:
        return ""
    eighths = max(1, round(value * width * 8 / top))
    whole, rest = divmod(eighths, 8)
    text = "█" * whole + (" ▏▎▍▌▋▊▉"[rest] if rest else "") if look.unicode else "#" * max(1, whole)
    return click.style(text, fg="cyan") if look.color else text


class _Drawing:
    """One page being drawn."""

    def __init__(self, look: Look) -> None:
        self.look = look
        self.is_narrow = look.width < NARROW
        self.has_cut = False

    def page(self, blocks: Page, indent: str = "  ") -> Iterator[str]:
        """Draw blocks with an empty line between them."""
        for i, block in enumerate(blocks):
            if i:
                yield ""
            yield from self.block(block, indent)

    def block(self, block: Block, indent: str) -> Iterator[str]:
        """Draw a block: its lines begin with the indent."""
        look = self.look
        match block:
            case Heading():
                title, note = self.inline(block.title, tone="name"), self.inline(block.note, tone="dim")
                space = look.width - text_width(title) - text_width(note)
                yield title + (" " * max(2, space) + note if note else "")
            case Facts():
                yield from self.facts(block.pairs, indent)
            case Margin():
                yield from self.page(block.blocks, "")
            case Lines():
                yield from map(look.text, block.lines)
            case Cards():
                pairs = [(title, ", ".join(filter(None, (value, about)))) for title, value, about in block.cards]
                yield from self.facts(pairs, indent)
            case Table():
                yield from self.table(block, indent)
            case Values():
                yield from self.values(block, indent)
            case Note():
                for said, sign in block.lines():
                    before = f"{look.paint(look.text(sign), block.tone)} " if sign else ""
                    yield from self.paragraph(self.inline(said), indent, before)
            case Finding():
                yield from self.finding(block, indent)
            case Under(top=True):
                yield from wrap(self.inline(block.title, tone="name"), look.width)
                yield from self.close(block.blocks, indent)
            case Under() | Details():
                title = self.inline(block.title)
                if title:
                    yield from (indent + part for part in wrap(title, look.width - len(indent)))
                yield from self.close(block.blocks, indent + "  " * bool(title))
            case Chart():
                title = f"{look.text(block.title)}  " if block.title else ""
                room = min(64, look.width - len(indent) - 4 - text_width(title))
                yield f"{indent}{title}{spark(block.values, look, width=room)}"
            case Graph():
                yield from self.graph(block)
                if left := more(
                    len(block.operators) - (block.limit or len(block.operators)), "operator", hint=block.hint
                ):
                    yield ""
                    yield from self.paragraph(look.text(left), indent)

    def close(self, blocks: Page, indent: str) -> Iterator[str]:
        """Draw blocks with nothing between them."""
        for block in blocks:
            yield from self.block(block, indent)

    def inline(self, cell: Cell, room: int = _BAR_MAX, *, tone: Tone = "") -> str:
        """Draw what stands on a line; ``room`` is for bars."""
        match cell:
            case tuple():
                return "".join(self.inline(part, room, tone=tone) for part in cell)
            case Said():
                return self.look.paint(self.look.text(cell.text), cell.tone)
            case Bar():
                return bar(cell.value or 0, cell.top, self.look, width=room)
            case Spark():
                after = f"  {self.look.text(cell.after)}" if cell.after else ""
                return spark(cell.values, self.look, width=room) + after
        return self.look.paint(self.look.text("-" if cell is None else cell), tone)

    def paragraph(self, text: str, indent: str, sign: str = "") -> Iterator[str]:
        """Draw wrapped text behind a sign."""
        margin = indent + " " * text_width(sign)
        for i, part in enumerate(wrap(text, self.look.width - len(margin))):
            yield (indent + sign if i == 0 else margin) + part

    def facts(self, pairs: Iterable[tuple[Cell, Cell]], indent: str, width: int = 0) -> Iterator[str]:
        """Draw ``name  value`` lines; values wrap under themselves."""
        shown = [(self.inline(name, tone="dim"), self.inline(value)) for name, value in pairs if plain(value)]
        names = max([width, *(text_width(name) for name, _ in shown)])
        for name, value in shown:
            margin = " " * (names + 2)
            for i, part in enumerate(wrap(value, self.look.width - len(indent) - names - 2)):
                yield indent + (f"{pad(name, names)}  " if i == 0 else margin) + part

    def finding(self, block: Finding, indent: str) -> Iterator[str]:
        """Draw a finding: its code, where it is, what disagrees, what to do."""
        look, inner = self.look, indent + "  " * bool(block.code)
        if block.code:
            sign = look.text("✗" if block.tone == "bad" else "·")
            code = look.text(block.code)
            about = shorten(
                look.text(block.about),
                look.width - len(indent) - len(sign) - len(code) - 3,
                look.text(ELLIPSIS),
            )
            yield f"{indent}{look.paint(sign, block.tone)} {look.paint(code, block.tone)}  {about}".rstrip()
        for line in block.where:
            yield from (inner + look.paint(part, "dim") for part in wrap(look.text(line), look.width - len(inner)))
        yield from self.paragraph(look.text(words.sentence(block.message)), inner)
        if block.advice:
            yield from self.paragraph(look.text(words.sentence(block.advice)), inner, look.text("→ "))

    def table(self, table: Table, indent: str) -> Iterator[str]:
        """Draw a table. One that is too wide loses optional columns, then flexible ones are cut."""
        look = self.look
        columns = [column.narrow or column if self.is_narrow else column for column in table.columns]
        all_rows = [row if isinstance(row, Row) else Row(row) for row in table.rows]
        rows = all_rows[: table.limit]
        is_grouped = any(row.group for row in rows)
        indent += "  " * is_grouped
        titles = [look.text(column.title) if table.titled else "" for column in columns]
        laid = _Laid(self, columns, titles, rows, look.width - len(indent))
        if any(titles):
            yield indent + look.paint(laid.titles().rstrip(), "dim")
        group, is_spaced = None, any(_stands_apart(block) for row in rows for block in row.below)
        for i, row in enumerate(rows):
            if is_grouped and row.group != group:
                group = row.group
                yield from (
                    indent[2:] + look.paint(part, "name")
                    for part in wrap(look.text(group), look.width - len(indent) + 2)
                )
            yield from (indent + line for line in laid.lines(i))
            yield from self.below(row.below, indent + "  ", laid.second_column - 4)
            if is_spaced and i < len(rows) - 1:
                yield ""
        left = len(all_rows) - len(rows) + table.left
        if left > 0:
            yield from self.paragraph(look.text(more(left, table.noun, hint=table.hint)), indent)
        if plain(table.foot):
            yield indent + self.inline(table.foot)

    def below(self, blocks: Sequence[Block], indent: str, names: int) -> Iterator[str]:
        """Draw what belongs to a row; facts are aligned with its second cell."""
        for i, block in enumerate(blocks):
            if i or _stands_apart(block):
                yield ""
            if isinstance(block, Facts):
                yield from self.facts(block.pairs, indent, names)
            else:
                yield from self.block(block, indent)

    def values(self, block: Values, indent: str) -> Iterator[str]:
        """Draw rows as a table, or one below the other where it would be too wide."""
        look, signs = self.look, block.signs
        names = [column["name"] for column in block.columns]
        types = [column["type"] for column in block.columns]
        cells = [[look.text(words.cell(row[name])) for name in names] for row in block.rows]
        titles = list(map(look.text, names))
        caps = _caps(types, titles, cells, look.width - len(indent) - (3 if signs else 0))
        if not caps:
            for i, row in enumerate(cells):
                yield indent + look.paint(signs[i] if signs else f"Row {i + 1:,}", "name")
                # An empty text stands in quotes: of a fact without a value no line is drawn.
                shown = [self.cut(cell if cell.strip() else json.dumps(cell), _CELL_MAX) for cell in row]
                yield from self.facts(zip(titles, shown, strict=True), indent + "  ")
            return
        columns = [
            Column(shorten(title, cap, look.text(ELLIPSIS)), right=kind.startswith(_NUMBERS), least=1)
            for title, kind, cap in zip(titles, types, caps, strict=True)
        ]
        body: list[list[Cell]] = [[self.cut(cell, cap) for cell, cap in zip(row, caps, strict=True)] for row in cells]
        if signs:
            columns.insert(0, Column())
            body = [[sign, *row] for sign, row in zip(signs, body, strict=True)]
        yield from self.table(Table(columns, body), indent)

    def cut(self, text: str, width: int) -> str:
        """Cut a value, and remember it."""
        short = shorten(text, width, self.look.text(ELLIPSIS))
        self.has_cut |= short != text
        return short

    def graph(self, graph: Graph) -> Iterator[str]:
        """Draw operators from top to bottom, edges as lanes to the left of their names.

        A lane is one open edge, from its source down to its target, where all lanes of the target
        join. Lines that meet are a fan-in, lines that part a fan-out, a straight line is a chain::

            ●      planes
            │ ◐    flights
            ├─╯
            ○      delays     ← planes hash by tailnum, flights hash by tailnum

        Feedback edges would tangle the lanes, so they are described in words.
        """
        look, ordered = self.look, graph.operators[: graph.limit]
        gutters = _gutters(ordered, graph.edges)
        gutter_width = max((text_width(line) for drawn in gutters for line in drawn), default=2)
        max_width = max([3, *(len(str(operator["max_parallelism"])) for operator in ordered)])
        numbers = f"{'subtasks':>8}  {'max':>{max_width}}  "
        names = [look.text(words.operator_of(operator)) for operator in ordered]
        status_width = max([6, *(len(words.status_of(operator)) for operator in ordered)])
        free = look.width - 2 - gutter_width - 2 - len(numbers)
        name_width = min(max([8, *map(text_width, names)]), max(free - status_width, free // 2))
        yield look.paint(pad("", 2 + gutter_width) + pad("operator", name_width) + f"  {numbers}status", "dim")
        for operator, name, (above, own, below) in zip(ordered, names, gutters, strict=True):
            if above:
                yield "  " + self.lanes(above.rstrip())
            sign, tone = _STATUS.get(operator["status"], ("○", ""))
            before, _, after = own.partition("*")
            lane = self.lanes(before) + look.paint(look.text(sign), tone) + self.lanes(after)
            shown = look.paint(shorten(name, name_width, look.text(ELLIPSIS)), "name")
            figures = f"  {operator['parallelism']:>8}  {operator['max_parallelism']:>{max_width}}  "
            status = shorten(words.status_of(operator), free - name_width, look.text(ELLIPSIS))
            yield f"  {pad(lane, gutter_width)}{pad(shown, name_width)}{figures}{look.paint(status, tone)}"
            said = _edges_in_words(operator, graph.edges)
            told = wrap(look.text(said), look.width - gutter_width - 4) if said else [""] * bool(below.strip(" │"))
            for i, text in enumerate(told):
                lane = self.lanes(below if i == 0 else below.translate(_STRAIGHT))
                yield f"  {pad(lane, gutter_width)}  {look.paint(text, 'dim')}".rstrip()

    def lanes(self, lanes: str) -> str:
        """Draw the lanes of a line."""
        return self.look.paint(self.look.text(lanes), "dim")


def _stands_apart(block: Block) -> bool:
    """Whether a block below a row has an empty line before it: one with titles, or of its own."""
    return not isinstance(block, Facts) and not (isinstance(block, Table) and not block.titled)


class _Laid:
    """A table with its cells drawn, and its columns as wide as they will be."""

    def __init__(
        self, drawing: _Drawing, columns: Sequence[Column], titles: Sequence[str], rows: Sequence[Row], width: int
    ) -> None:
        self._columns, ellipsis = columns, drawing.look.text(ELLIPSIS)
        every = range(len(columns))
        # A column in which nothing stands is left out, but where more rows will come.
        self._kept = kept = [
            i
            for i in every
            if not i or columns[i].least or not rows or any(row.cells[i] not in (None, "") for row in rows)
        ]
        drawn = [i for i in kept if any(_is_drawn(row.cells[i]) for row in rows)]
        self._body = body = [
            ["" if _is_drawn(cell) else drawing.inline("" if cell is None else cell) for cell in row.cells]
            for row in rows
        ]
        self._titles = titles
        widths = [
            max([columns[i].least, text_width(self._titles[i]), *(text_width(row[i]) for row in body)]) for i in every
        ]
        self._widths = widths
        # Bars take what is left; the words after them do not.
        after = {i: [plain(row.cells[i]) for row in rows if _is_drawn(row.cells[i])] for i in drawn}
        rest = {i: max(2 + len(text) if text else 0 for text in after[i]) for i in drawn}
        most = {i: max(0, *(_bars_of(row.cells[i]) for row in rows)) for i in drawn}
        needed = {i: min(most[i], _DRAWN_MIN) + rest[i] for i in drawn}
        for i in drawn:
            widths[i] = max(widths[i], needed[i])
        wrapped = next((i for i in kept if columns[i].wraps), None)

        def too_wide() -> int:
            return sum(widths[i] for i in kept) + 2 * (len(kept) - 1) - width

        while too_wide() > 0 and any(columns[i].optional for i in kept):
            kept.remove(max(kept, key=lambda i: (columns[i].optional, i)))
        for i in sorted((i for i in kept if columns[i].flexible), key=lambda i: -widths[i]):
            least = max(columns[i].least, text_width(self._titles[i]), min(widths[i], _FLEXIBLE_MIN), needed.get(i, 0))
            widths[i] = max(least, widths[i] - max(0, too_wide()))
            for row in body:
                row[i] = shorten(row[i].rstrip(), widths[i], ellipsis)
        for i in drawn:
            room = min(most[i], max(_DRAWN_MIN, widths[i] - rest[i] - too_wide()), _cap(rows, i, drawing.look))
            for shown, line in zip(rows, body, strict=True):
                line[i] = drawing.inline(shown.cells[i], room) if _is_drawn(shown.cells[i]) else line[i]
            widths[i] = max([text_width(self._titles[i]), *(text_width(line[i]) for line in body)])
        if wrapped is not None:
            widths[wrapped] = max(20, widths[wrapped] - too_wide())
        self._wrapped = wrapped
        self.second_column = widths[kept[0]] + 2 if kept else 0

    def titles(self) -> str:
        """Return the line of titles."""
        return self._line(self._titles)

    def lines(self, number: int) -> Iterator[str]:
        """Return a row: one line, but for cells that wrap."""
        row, last = self._body[number], self._wrapped
        if last is None:
            yield self._line(row).rstrip()
            return
        first, *others = wrap(row[last], self._widths[last])
        head = self._line([*row[:last], ""])
        yield (head + first).rstrip()
        yield from (" " * text_width(head) + other for other in others)

    def _line(self, cells: Sequence[str]) -> str:
        columns = self._columns
        return "  ".join(
            pad(cells[i], self._widths[i] if i != self._wrapped else 0, right=columns[i].right) for i in self._kept
        )


def _is_drawn(cell: Cell) -> bool:
    return any(map(_is_drawn, cell)) if isinstance(cell, tuple) else isinstance(cell, (Bar, Spark))


def _bars_of(cell: Cell) -> int:
    """Return the columns that a bar would fill."""
    if isinstance(cell, tuple):
        return max(map(_bars_of, cell), default=0)
    return len(cell.values) if isinstance(cell, Spark) else _BAR_MAX if isinstance(cell, Bar) else 0


def _cap(rows: Sequence[Row], place: int, look: Look) -> int:
    """Return the most columns of the bars of a column."""
    only_bars = all(isinstance(row.cells[place], Bar) for row in rows)
    return _BAR_MAX if only_bars else max(_DRAWN_MIN, 16 + (look.width - WIDTH_DEFAULT) // 2)


def _caps(types: Sequence[str], titles: Sequence[str], cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the greatest width of each column so that all fit; empty where they cannot.

    Only texts and nested values are cut, and titles: half a number says something else.
    """
    whole = [max([0, *(text_width(row[i]) for row in cells)]) for i in range(len(titles))]
    widths = [max(held, text_width(title)) for held, title in zip(whole, titles, strict=True)]
    cuttable = [kind.startswith(_CUTTABLE) for kind in types]
    least = [
        min(wanted, _CELL_MIN) if cut else max(held, min(wanted, _TITLE_MIN))
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


class _Lanes:
    """The lanes at one line: each column leads to one target, or is free."""

    def __init__(self) -> None:
        self.targets: list[str | None] = []
        self.widest = 0

    def column_of(self, uid: str) -> tuple[int, list[int]]:
        """Return the operator's column, and the other lanes that join it there."""
        columns = [i for i, target in enumerate(self.targets) if target == uid]
        if not columns:
            if None not in self.targets:
                self.targets.append(None)
            columns = [self.targets.index(None)]
        return columns[0], columns[1:]

    def row(self, marks: Mapping[int, str], *, across: tuple[int, int] | None = None) -> str:
        """Return one line: marks at their columns, other lanes go down, ``across`` joins two."""
        self.widest = max(self.widest, len(self.targets))
        line = ""
        for i, target in enumerate(self.targets):
            inside = across is not None and across[0] < i < across[1]
            down = "┼" if inside else "│"
            line += marks.get(i, down if target is not None else "─" if inside else " ")
            line += "─" if across is not None and across[0] <= i < across[1] else " "
        return line

    def join(self, column: int, others: Sequence[int]) -> str:
        """Return the line at which other lanes end in this one."""
        marks = {column: "├", **dict.fromkeys(others, "┴"), others[-1]: "╯"}
        line = self.row(marks, across=(column, others[-1]))
        for other in others:
            self.targets[other] = None
        return line

    def part(self, column: int, targets: Sequence[str]) -> str | None:
        """Give each target a lane, the first this column; return the line where they part."""
        self.targets[column] = targets[0] if targets else None
        opened = []
        for target in targets[1:]:
            free = [i for i, taken in enumerate(self.targets) if taken is None and i > column]
            if not free:
                self.targets.append(None)
                free = [len(self.targets) - 1]
            self.targets[free[0]] = target
            opened.append(free[0])
        if not opened:
            while self.targets and self.targets[-1] is None:
                self.targets.pop()
            return None
        opened.sort()
        return self.row({column: "├", **dict.fromkeys(opened, "┬"), opened[-1]: "╮"}, across=(column, opened[-1]))


def _gutters(ordered: Sequence[Json], edges: Sequence[Json]) -> list[tuple[str, str, str]]:
    """Return per operator the lanes above it (or none), beside it (``*``: its place), below it."""
    place = {operator["uid"]: i for i, operator in enumerate(ordered)}
    lanes = _Lanes()
    found = []
    for operator in ordered:
        uid = operator["uid"]
        column, others = lanes.column_of(uid)
        above = lanes.join(column, others) if others else ""
        own = lanes.row({column: "*"})
        targets = [
            edge["to"]
            for edge in edges
            if edge["from"] == uid and not edge["feedback"] and place.get(edge["to"], -1) > place[uid]
        ]
        parting = lanes.part(column, list(dict.fromkeys(targets)))
        found.append((above, own, parting or lanes.row({})))
    return found if lanes.widest <= LANES_MAX else [("", "* ", "")] * len(ordered)


def _edges_in_words(operator: Json, edges: Sequence[Json]) -> str:
    """Return what lanes and figures leave out: finishing subtasks, edges, chain, coordinator."""
    sources = [
        ("↺ " if edge["feedback"] else "") + words.edge_of(edge) for edge in edges if edge["to"] == operator["uid"]
    ]
    finishing = f"finishing: {words.ranges(operator['finishing'])}" if operator["finishing"] else ""
    return dotted(
        "" if words.status_of(operator).endswith(finishing) else finishing,
        f"← {', '.join(sources)}" if sources else "",
        f"chain {operator['chain']}" if operator.get("chain") else "",
        "coordinator" if operator["coordinator"] else "",
    )
