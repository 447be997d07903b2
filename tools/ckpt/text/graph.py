"""The job graph as text: operators from top to bottom, edges as lanes to the left of their names.

A lane is one open edge, from its source down to its target, where all lanes of the target join.
Lines that meet are a fan-in, lines that part a fan-out, and a straight line is a chain::

    ●      planes
    │ ◐    flights
    ├─╯
    ○      delays     ← planes hash by tailnum, flights hash by tailnum

Feedback edges would tangle the lanes, so they are described in words. The input is the job graph as
it stands in a record (SPEC.md sections 3.4 and 3.5), as parsed JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from stateformat.documents import in_order
from stateformat.words import edge_of, label, operator_of, plural, ranges, status_of

from .render import Look, pad, shorten, text_width, wrap

_ASCII = str.maketrans("│─├┴┼┬╯╮", "|-++++'.")
LANES_MAX: Final = 10
"""With more lanes than this side by side, only the marks are drawn."""

Json = Mapping[str, Any]
_ROLES: Final = {"fully_finished": "finished", "partially_finished": "partial"}


def mark(operator: Json, look: Look) -> str:
    """A disc that fills as the operator's subtasks finish."""
    glyph = {"fully_finished": "full", "partially_finished": "part"}.get(operator["status"], "none")
    return look.paint(look[glyph], _ROLES.get(operator["status"], "plain"))


def edge_text(edge: Json, look: Look) -> str:
    """An incoming edge: its source, and how records choose their channel."""
    return (f"{look['loop']} " if edge["feedback"] else "") + edge_of(edge)


class _Lanes:
    """The lanes at one line: each column leads to one target, or is free."""

    def __init__(self) -> None:
        self.targets: list[str | None] = []
        self.widest = 0

    def column_of(self, uid: str) -> tuple[int, list[int]]:
        """The operator's column, and the other lanes that join it there."""
        columns = [i for i, target in enumerate(self.targets) if target == uid]
        if not columns:
            if None not in self.targets:
                self.targets.append(None)
            columns = [self.targets.index(None)]
        return columns[0], columns[1:]

    def row(self, marks: Mapping[int, str], *, across: tuple[int, int] | None = None) -> str:
        """One line: marks at their columns, other lanes go down, ``across`` joins two columns."""
        self.widest = max(self.widest, len(self.targets))
        line = ""
        for i, target in enumerate(self.targets):
            inside = across is not None and across[0] < i < across[1]
            down = "┼" if inside else "│"
            line += marks.get(i, down if target is not None else "─" if inside else " ")
            line += "─" if across is not None and across[0] <= i < across[1] else " "
        return line

    def join(self, column: int, others: Sequence[int]) -> str:
        """The line at which other lanes end in this one."""
        marks = {column: "├", **dict.fromkeys(others, "┴"), others[-1]: "╯"}
        line = self.row(marks, across=(column, others[-1]))
        for other in others:
            self.targets[other] = None
        return line

    def part(self, column: int, targets: Sequence[str]) -> str | None:
        """Give each target a lane, the first this column; returns the line where they part."""
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


def draw(operators: Sequence[Json], edges: Sequence[Json], look: Look) -> list[str]:
    """The graph as a table with lanes; below each operator its edges in words."""
    ordered = in_order(operators, edges)
    gutters = _gutters(ordered, edges)
    gutter_width = max((text_width(line) for lines in gutters for line in lines), default=2)
    max_width = max([3, *(len(str(operator["max_parallelism"])) for operator in ordered)])
    numbers = f"{'subtasks':>8}  {'max':>{max_width}}  "
    wanted = max([8, *(text_width(operator_of(operator)) for operator in ordered)])
    status_width = max([6, *(len(status_of(operator)) for operator in ordered)])
    free = look.width - 2 - gutter_width - 2 - len(numbers)
    name_width = min(wanted, max(free - status_width, free // 2))
    status_width = free - name_width
    titles = pad("", 2 + gutter_width) + pad("operator", name_width) + f"  {numbers}status"
    lines = [look.paint(titles, "dim")]
    for operator, (above, own, below) in zip(ordered, gutters, strict=True):
        if above:
            lines.append("  " + _glyphs(above, look).rstrip())
        lane = "  " + pad(_lane(operator, own, look), gutter_width)
        name = pad(look.paint(shorten(operator_of(operator), name_width, look), "name"), name_width)
        figures = f"  {operator['parallelism']:>8}  {operator['max_parallelism']:>{max_width}}  "
        status = shorten(status_of(operator), status_width, look)
        lines.append(lane + name + figures + look.paint(status, _ROLES.get(operator["status"], "plain")))
        words = _words(operator, edges, look, look.width - 2 - gutter_width - 2)
        for i, text in enumerate(words or ([""] if below.strip(" │") else [])):
            lane = below if i == 0 else below.translate(_STRAIGHT)
            lines.append(("  " + pad(_glyphs(lane, look), gutter_width) + "  " + look.paint(text, "dim")).rstrip())
    return lines


_STRAIGHT = str.maketrans("├┬╮┼─", "││││ ")


def _gutters(ordered: Sequence[Json], edges: Sequence[Json]) -> list[tuple[str, str, str]]:
    """Per operator the lanes above it (or none), beside it (``*`` is its place) and below it."""
    place = {operator["uid"]: i for i, operator in enumerate(ordered)}
    lanes = _Lanes()
    lines = []
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
        lines.append((above, own, parting or lanes.row({})))
    if lanes.widest > LANES_MAX:
        return [("", "* ", "")] * len(ordered)
    return lines


def _glyphs(lanes: str, look: Look) -> str:
    return look.paint(lanes if look.unicode else lanes.translate(_ASCII), "dim")


def _lane(operator: Json, own: str, look: Look) -> str:
    before, _, after = own.partition("*")
    return (_glyphs(before, look) if before else "") + mark(operator, look) + (_glyphs(after, look) if after else "")


def _words(operator: Json, edges: Sequence[Json], look: Look, width: int) -> list[str]:
    """What lanes and figures leave out: finishing subtasks, edges, chain, coordinator."""
    sources = [edge_text(edge, look) for edge in edges if edge["to"] == operator["uid"]]
    facts = []
    if operator["finishing"] and not status_of(operator).endswith(f"finishing: {ranges(operator['finishing'])}"):
        facts.append(f"finishing: {ranges(operator['finishing'])}")
    if sources:
        facts.append(f"{look['left_arrow']} " + ", ".join(sources))
    if operator.get("chain"):
        facts.append(f"chain {label(operator['chain'])}")
    if operator["coordinator"]:
        facts.append("coordinator")
    return wrap(look.dotted(*facts), width) if facts else []


def summary(operators: Sequence[Json]) -> str:
    """How much of the graph has finished, in one line."""
    full = sum(operator["status"] == "fully_finished" for operator in operators)
    part = sum(operator["status"] == "partially_finished" for operator in operators)
    parts = [plural(len(operators), "operator"), f"{full} finished" if full else "", f"{part} partly" if part else ""]
    return ", ".join(filter(None, parts))
