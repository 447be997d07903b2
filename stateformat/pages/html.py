"""Draws blocks as HTML: a page of its own, or a part of a notebook's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from .. import words
from . import drawings
from .blocks import (
    IN_A_NOTEBOOK,
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
    in_order,
    more,
    plain,
)
from .elements import Children, Element, Node, document, element as e, fragment

_NAME_MAX: Final = 100
_TEXT_MAX: Final = 1_000
"""Characters of a name, and of a fact or paragraph; a tooltip has more."""
_TONES: Final[dict[Tone, str]] = {
    "name": "strong",
    "dim": "quiet",
    "good": "badge good",
    "some": "badge some",
    "bad": "badge bad",
}

LISTED_MAX: Final = 300
"""Operators in a table."""


def notebook(title: str, make: Callable[[], Page]) -> str:
    """Return what a notebook shows of a value.

    A notebook shows nothing for a value whose ``_repr_html_`` raises: here an empty or damaged
    store becomes a sentence.
    """
    before = IN_A_NOTEBOOK.set(True)
    try:
        return fragment(draw(make()))
    except Exception as error:
        return fragment(e("h2", short(title)), e("p", words.sentence(str(error) or type(error).__name__)))
    finally:
        IN_A_NOTEBOOK.reset(before)


def whole_page(title: str, head: Page, main: Page, foot: str) -> Iterator[str]:
    """Return a page of its own: its top, then sections, each with its heading."""
    sections: list[list[Block]] = []
    for block in main:
        if not sections or isinstance(block, Heading):
            sections.append([block])
        else:
            sections[-1].append(block)
    yield from document(
        words.label(title)[:160],
        e("header", draw(head, tag="h1")),
        e("main", (e("section", draw(section), class_=_alarm(section[0])) for section in sections)),
        e("footer", foot),
    )


def _alarm(block: Block) -> str | None:
    return "alarm" if isinstance(block, Heading) and block.tone == "bad" else None


def short(text: str, length: int = _NAME_MAX) -> Node:
    """Return a name, cut in the middle if it is very long, with the full name as a tooltip."""
    safe = words.label(text)
    if len(safe) <= length:
        return safe
    return e("abbr", f"{safe[: length - length // 4 - 1]}…{safe[-(length // 4) :]}", title=safe[:1000])


def draw(page: Page, tag: str = "h2") -> list[Element]:
    """Return blocks as elements. ``tag`` is for headings. Charts stand side by side."""
    drawn: list[Element] = []
    for is_chart, blocks in groupby(page, lambda block: isinstance(block, Chart)):
        elements = [part for block in blocks for part in _block(block, tag)]
        drawn += [e("div", elements, class_="charts")] if is_chart else elements
    return drawn


def _block(block: Block, tag: str) -> Iterator[Element]:
    match block:
        case Heading():
            note = e("span", inline(block.note), class_="quiet") if plain(block.note) else None
            yield e("div", e(tag, inline(block.title)), note, class_="row spread")
        case Facts():
            yield _facts(block.pairs)
        case Cards():
            cards = (
                e("div", e("span", title), e("strong", value), e("small", about) if about else None, class_="card")
                for title, value, about in block.cards
            )
            yield e("div", cards, class_="cards")
        case Table():
            yield from _table(block)
        case Values():
            yield from _table(_values(block))
        case Note():
            for said, sign in block.lines():
                yield e("p", (inline(Said(sign, block.tone)), " ") if sign else None, inline(said, _TEXT_MAX))
        case Finding():
            yield e(
                "div",
                e("h3", inline(Said(block.code, block.tone)), " ", short(block.about)) if block.code else None,
                e("p", words.sentence(block.message)),
                e("p", short(", ".join(block.where), 300), class_="quiet") if block.where else None,
                e("p", words.sentence(block.advice), class_="quiet") if block.advice else None,
            )
        case Under():
            title = e("h2" if block.top else "h3", inline(block.title)) if plain(block.title) else None
            yield e("div", title, draw(block.blocks))
        case Margin():
            yield from draw(block.blocks)
        case Lines():
            yield from (e("p", e("code", line)) for line in block.lines)
        case Details():
            yield e("details", e("summary", block.title), e("div", draw(block.blocks), class_="inside"))
        case Chart():
            yield drawings.chart(block)
        case Graph():
            yield draw_graph(block.operators, block.edges, block.notes)


def inline(cell: Cell, length: int = _NAME_MAX) -> Children:
    """Return what stands on a line."""
    match cell:
        case tuple():
            return [inline(part, length) for part in cell]
        case Said():
            tone = _TONES.get(cell.tone)
            text = short(cell.text, length) if cell.tone in ("", "name", "dim") else words.label(cell.text)
            return e("strong", text) if tone == "strong" else e("span", text, class_=tone) if tone else text
        case Bar():
            return drawings.share(cell.value or 0, cell.top, cell.about)
        case Spark():
            return [drawings.spark(cell), " ", cell.after]
        case None:
            return None
    return short(cell, length)


def _facts(pairs: Sequence[tuple[Cell, Cell]]) -> Element:
    """Return names and values; a pair without a value is left out."""
    return e(
        "dl",
        (
            (e("dt", inline(name)), e("dd", inline(value, _TEXT_MAX)))
            for name, value in pairs
            if plain(value) or not isinstance(value, str)
        ),
    )


def _table(table: Table) -> Iterator[Element]:
    """Yield a table, or lines that open where something belongs below them; then what is left out.

    On a narrow screen each row is a block, with the titles beside the cells.
    """
    rows = [row if isinstance(row, Row) else Row(row) for row in table.rows]
    shown = rows[: table.limit]
    if any(row.below for row in shown):
        titles = e("div", (e("span", column.title) for column in table.columns), class_=f"{_grid(table)} titles")
        yield e("div", titles, _lines(table, shown), class_="states")
    else:
        # A column of which nothing is known is left out.
        known = [
            i
            for i, column in enumerate(table.columns)
            if column.least or not shown or any(row.cells[i] not in (None, "") for row in shown)
        ]
        columns = [table.columns[i] for i in known]
        cells = [Row([row.cells[i] for i in known]) for row in shown]
        heads = (e("th", column.title, scope="col", class_=_look(column)) for column in columns)
        yield e("table", e("thead", e("tr", heads)), e("tbody", _rows(columns, cells)), class_="stack")
    left = len(rows) - len(shown) + table.left
    if left > 0:
        yield e("p", more(left, table.noun, hint=table.hint), class_="quiet")
    if plain(table.foot):
        yield e("p", inline(table.foot), class_="quiet")


def _look(column: Column) -> str | None:
    return "r" if column.right else "k" if column.whole else None


def _rows(columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[Element]:
    for row in rows:
        yield e(
            "tr",
            (
                e("td", inline(cell), class_=_look(column), data_label=column.title)
                for column, cell in zip(columns, row.cells, strict=True)
            ),
        )


def _grid(table: Table) -> str:
    return {7: "line", 6: "line six"}.get(len(table.columns), "line few")


def _lines(table: Table, rows: Sequence[Row]) -> Iterator[Element]:
    """Yield each row as a line; what is below it shows when a reader opens it."""
    group = ""
    for i, row in enumerate(rows):
        if row.group and row.group != group:
            group = row.group
            yield e("p", short(group), class_="group")
        cells = (
            e("span", inline(cell), data_label=column.title, class_="name" if j == 0 else _look(column))
            for j, (column, cell) in enumerate(zip(table.columns, row.cells, strict=True))
        )
        inside = e("div", draw(row.below), class_="inside")
        yield e("details", e("summary", e("div", cells, class_=_grid(table))), inside, open=i < table.opened)


def _values(block: Values) -> Table:
    columns = [
        Column(column["name"], right=column["type"].startswith(("int", "uint", "float", "double")), least=1)
        for column in block.columns
    ]
    rows: list[list[Cell]] = [[words.cell(row[column["name"]]) for column in block.columns] for row in block.rows]
    if block.signs:
        columns.insert(0, Column())
        rows = [[sign, *row] for sign, row in zip(block.signs, rows, strict=True)]
    return Table(columns, rows)


def draw_graph(operators: Sequence[Json], edges: Sequence[Json], notes: Mapping[str, str]) -> Element:
    """Return the drawing of a job graph, and the same content in words."""
    ordered = in_order(operators, edges)
    drawing, listed = drawings.drawn(ordered, edges, notes), _words(ordered, edges)
    title = "Operators and edges in words"
    return e("div", drawing, draw([Details(title, [listed])] if drawing else [listed]))


def _words(ordered: Sequence[Json], edges: Sequence[Json]) -> Table:
    inputs: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        inputs[edge["to"]].append(words.edge_of(edge))
    columns = [
        Column("operator"),
        Column("subtasks", right=True),
        Column("key groups", right=True),
        Column("status"),
        Column("takes input from"),
    ]
    rows: list[list[Cell]] = [
        [
            words.operator_of(operator),
            words.count(operator["parallelism"]),
            words.count(operator["max_parallelism"]),
            words.status_of(operator),
            tuple("; " * (i > 0) + one for i, one in enumerate(inputs[operator["uid"]])) or None,
        ]
        for operator in ordered[:LISTED_MAX]
    ]
    left = len(ordered) - len(rows)
    return Table(columns, rows, noun="operator", hint="ckpt inspect --format json lists all", left=left)
