"""What a page says, as values: a page is a list of blocks, made from a document.

What is shown is decided where blocks are made; ``text`` and ``html`` only draw them. Blocks hold
names as they stand in a checkpoint: what draws them makes them safe. Signs (``→``, ``·``, ``✗``)
are Unicode, and ``text`` has others for terminals without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from .. import words

Json = Mapping[str, Any]
Tone = Literal["", "name", "dim", "good", "some", "bad"]
ELLIPSIS: Final = "…"


@dataclass(frozen=True, slots=True)
class Said:
    """Text in a tone."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar in proportion to the greatest."""

    value: int | None
    top: int
    about: str = ""
    """What it shows, for whoever points at it."""


@dataclass(frozen=True, slots=True)
class Spark:
    """A small bar for each value; None is no value, such as that of a finished subtask."""

    values: Sequence[int | None]
    after: str = ""
    """Words beside it."""
    about: str = ""
    is_trend: bool = False
    """Whether the values follow each other in time."""


Cell: TypeAlias = "str | Said | Bar | Spark | tuple[Cell, ...] | None"
"""What stands on a line. A tuple is its parts, side by side; None is unknown."""


@dataclass(frozen=True, slots=True)
class Heading:
    """Begins a section."""

    title: Cell
    note: Cell = ""
    """Stands at the other end of the line."""
    tone: Tone = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values. Empty values are left out; a pair without a name goes on with the last."""

    pairs: Sequence[tuple[Cell, Cell]]


@dataclass(frozen=True, slots=True)
class Cards:
    """The figures that a reader wants first: title, figure, a few words about it."""

    cards: Sequence[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    title: str = ""
    right: bool = False
    """Whether it is aligned right, as numbers are."""
    optional: int = 0
    """On a narrow page the columns with the highest number are left out first; 0 always stays."""
    flexible: bool = False
    """Whether its cells may be cut."""
    wraps: bool = False
    """Whether its cells take several lines, if they must. Only the last column does."""
    whole: bool = False
    """Whether its words are never broken on a page that breaks others."""
    least: int = 0
    """The width that it has at least; without one it is left out where nothing stands in it."""
    narrow: Column | None = None
    """What it is on a narrow page."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table, and what belongs below it."""

    cells: Sequence[Cell]
    below: Sequence[Block] = ()
    group: str = ""
    """The title of this row and those after it that have the same."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a line of titles."""

    columns: Sequence[Column]
    rows: Sequence[Row | Sequence[Cell]]
    limit: int | None = None
    """How many rows are shown; the others are counted."""
    noun: str = ""
    hint: str = "--format json lists all"
    """How to see what is left out."""
    left: int = 0
    """Rows that exist besides these."""
    foot: Cell = ""
    opened: int = 0
    """How many rows show at first what is below them, on a page where a reader opens them."""
    titled: bool = True


@dataclass(frozen=True, slots=True)
class Values:
    """Rows of state or of an answer, with their columns; cut or one by one where they are wide."""

    columns: Sequence[Mapping[str, str]]
    """Name and type of those shown."""
    rows: Sequence[Json]
    signs: Sequence[str] = ()
    """What stands before each row."""


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph, or several, each behind its sign if there is one."""

    said: Cell | list[Cell]
    sign: str | list[str] = ""
    """One for each paragraph, or one for all."""
    tone: Tone = ""
    """Of the signs."""

    def lines(self) -> Iterator[tuple[Cell, str]]:
        """Yield each paragraph with its sign."""
        said = self.said if isinstance(self.said, list) else [self.said]
        yield from zip(said, [self.sign] * len(said) if isinstance(self.sign, str) else self.sign, strict=True)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong: its code and what it is about, where, which facts disagree, what to do."""

    code: str
    about: str
    message: str
    advice: str = ""
    where: Sequence[str] = ()
    tone: Tone = "bad"


@dataclass(frozen=True, slots=True)
class Under:
    """Blocks close to each other, below a title if there is one."""

    title: Cell
    blocks: Sequence[Block]
    top: bool = False
    """Whether the title is a heading."""


@dataclass(frozen=True, slots=True)
class Margin:
    """Blocks that stand at the margin."""

    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines that are laid out already."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Details:
    """Blocks that a reader opens, on a page where that is possible."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Chart:
    """A bar for each value, with its name; as many neighbors as needed share one. Values that
    follow each other in time are a line.
    """

    title: str
    values: Sequence[int | None]
    names: Sequence[str] = ()
    unit: Literal["count", "bytes", "us"] = "count"
    ends: tuple[str, str] = ("", "")
    marked: Sequence[bool] = ()
    at: int | None = None
    """The value that the page is about."""
    is_trend: bool = False
    legend: str = ""
    """What marked values are."""

    def text(self, value: int) -> str:
        """Return a value in words."""
        return words.elapsed(value / 1e6) if self.unit == "us" else measure(self.unit, value)


@dataclass(frozen=True, slots=True)
class Graph:
    """A job graph, as it stands in a record (SPEC.md sections 3.4 and 3.5)."""

    operators: Sequence[Json]
    """In topological order."""
    edges: Sequence[Json]
    notes: Mapping[str, str]
    """A few words on some operators, by uid."""
    limit: int | None = None
    """How many operators a page of text shows; the others are counted."""
    hint: str = ""


Block: TypeAlias = (
    "Heading | Facts | Cards | Table | Values | Note | Finding | Under | Margin | Lines | Details | Chart | Graph"
)
Page: TypeAlias = "Iterable[Block]"


def dotted(*parts: str) -> str:
    """Return the parts that are not empty, with dots between them."""
    return " · ".join(filter(None, parts))


IN_A_NOTEBOOK: ContextVar[bool] = ContextVar("in a notebook", default=False)
"""Whether the page has no command line beside it, so that options of ``ckpt`` help nobody."""


def more(left: int, noun: str = "", *, hint: str = "--format json lists all") -> str:
    """Say that a page leaves something out and how to see it; empty if it leaves nothing out."""
    if IN_A_NOTEBOOK.get() and hint.startswith(("--", "ckpt")):
        hint = ""
    what = words.plural(left, f"more {noun}", f"more {noun}s") if noun else f"{words.count(left)} more"
    return f"{ELLIPSIS} and {what}{hint and f' ({hint})'}" if left > 0 else ""


def some(items: Sequence[str], limit: int, noun: str = "") -> list[str]:
    """Return the first items, and as the last how many more there are."""
    return [*items[:limit], *([more(len(items) - limit, noun)] if len(items) > limit else [])]


def listed(name: str, items: Sequence[str], limit: int) -> list[tuple[str, str]]:
    """Return a fact of several lines: the first items, and how many more there are."""
    return [(name if i == 0 else "", text) for i, text in enumerate(some(items, limit))]


def measure(unit: str, value: int) -> str:
    """Return rows or bytes in words."""
    return words.size(value) if unit == "bytes" else words.count(value)


def uneven(ratio: float) -> str:
    """Return how far the greatest is from the mean; empty if it is nearly the mean."""
    return f"{ratio:.1f} × mean" if ratio >= 1.05 else ""


def plain(cell: Cell) -> str:
    """Return the words of a cell."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, tuple):
        return "".join(map(plain, cell))
    return cell.text if isinstance(cell, Said) else cell.after if isinstance(cell, Spark) else ""


def in_order(operators: Sequence[Json], edges: Sequence[Json]) -> list[Json]:
    """Return operators in topological order, ignoring feedback edges; ties are in order of
    definition.

    A graph with a cycle, which the format forbids, is still shown.
    """
    from heapq import heappop, heappush

    place = {operator["uid"]: i for i, operator in enumerate(operators)}
    sources: list[set[int]] = [set() for _ in operators]
    targets: list[set[int]] = [set() for _ in operators]
    for edge in edges:
        if not edge["feedback"] and edge["to"] in place and edge["from"] in place:
            sources[place[edge["to"]]].add(place[edge["from"]])
            targets[place[edge["from"]]].add(place[edge["to"]])
    ready = [i for i, waits_for in enumerate(sources) if not waits_for]
    rest = dict.fromkeys(range(len(operators)))
    ordered: list[Json] = []
    while rest:
        chosen = heappop(ready) if ready else next(iter(rest))
        if chosen not in rest:
            continue
        del rest[chosen]
        ordered.append(operators[chosen])
        for target in targets[chosen]:
            sources[target].discard(chosen)
            if not sources[target]:
                heappush(ready, target)
    return ordered
