"""A job graph as a drawing: boxes in layers from top to bottom, and lines between them.

Operators of a chain share a box. Whether an operator is fully or partly finished is shown by color,
by shape (a ring, half a disc, a disc; solid or broken lines), and in words. The input is the graph
from a record (SPEC.md sections 3.4 and 3.5), as parsed JSON.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .. import words
from ..documents import in_order
from .charts import disc, status_mark
from .elements import Element, element as e
from .layering import Key, Layering, layered
from .pieces import Column, more, opening, short, table

Json = Mapping[str, Any]
_Between = tuple[tuple[int, int], Json]
_LINE: Final = 34
_GAP: Final = 46
_MARGIN: Final = 6
_LOOP: Final = 12.0
DRAWN_MAX: Final = 300
"""Operators in a drawing; a larger graph is a table."""
NARROW_MAX: Final = 80
"""Operators in the drawing for narrow screens; a larger one is the same on all screens."""
LISTED_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class _Drawing:
    """One size of the drawing: how many boxes side by side, their width, letters of a name."""

    side_by_side: int
    box: float
    letters: int
    name: str


_WIDE: Final = _Drawing(4, 196, 24, "graph wide")
_ONLY: Final = _Drawing(4, 196, 24, "graph")
_NARROW: Final = _Drawing(2, 140, 15, "graph narrow")


def draw_graph(operators: Sequence[Json], edges: Sequence[Json], *, note: Mapping[str, str] | None = None) -> Element:
    """Return the drawing for wide and for narrow screens, its legend, and the same content in
    words.

    ``note`` has a few words on some operators, by uid: how much their state takes.
    """
    ordered = in_order(operators, edges)
    drawn = len(ordered) <= DRAWN_MAX
    sizes = () if not drawn else (_WIDE, _NARROW) if len(ordered) <= NARROW_MAX else (_ONLY,)
    return e(
        "div",
        (e("div", _svg(ordered, edges, size, note or {}), class_=size.name) for size in sizes),
        _key(ordered, edges) if drawn else None,
        opening(
            f"All {words.plural(len(ordered), 'operator')} and their edges in words",
            _words(ordered, edges),
            is_open=not drawn,
        ),
    )


def boxes(ordered: Sequence[Json], edges: Sequence[Json]) -> list[list[Json]]:
    """Return operators grouped by box: a chain is one box if forward edges join its members."""
    box_of: dict[str, int] = {}
    found: list[list[Json]] = []
    forward = {
        (edge["from"], edge["to"]) for edge in edges if edge["partitioner"] == "forward" and not edge["feedback"]
    }
    inputs: dict[str, int] = {}
    for edge in edges:
        inputs[edge["to"]] = inputs.get(edge["to"], 0) + 1
    for operator in ordered:
        uid, chain = operator["uid"], operator.get("chain")
        before = [
            number
            for number, members in enumerate(found)
            if chain and members[-1].get("chain") == chain and (members[-1]["uid"], uid) in forward
        ]
        if before and inputs.get(uid, 0) == 1:
            found[before[0]].append(operator)
            box_of[uid] = before[0]
        else:
            box_of[uid] = len(found)
            found.append([operator])
    return found


def _svg(ordered: Sequence[Json], edges: Sequence[Json], size: _Drawing, note: Mapping[str, str]) -> Element:
    groups = boxes(ordered, edges)
    box_of = {operator["uid"]: i for i, members in enumerate(groups) for operator in members}
    ahead: list[_Between] = []
    back: list[_Between] = []
    for edge in edges:
        source, target = box_of.get(edge["from"]), box_of.get(edge["to"])
        if source is None or target is None or (source == target and not edge["feedback"]):
            continue
        (back if edge["feedback"] or source >= target else ahead).append(((source, target), edge))
    places = layered(len(groups), [ends for ends, _ in ahead], side_by_side=size.side_by_side, box=size.box)
    # Feedback lines go around below the last layer and above the first.
    room = _LOOP if back else 0
    tops, height = _tops(places, groups, room)
    right = places.width + _MARGIN
    parts = [
        *_edges(places, groups, tops, ahead, size),
        *_loops(places, groups, tops, back, size, right),
        *(_box(members, places.x[i] + _MARGIN - size.box / 2, tops[i], size, note) for i, members in enumerate(groups)),
    ]
    width = right + _MARGIN + (34 + 8 * min(len(back), 6) if back else 0)
    return e(
        "svg",
        e("title", f"The job graph: {words.plural(len(ordered), 'operator')}, {words.plural(len(edges), 'edge')}"),
        parts,
        viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=round(width),
        height=round(height),
        role="img",
    )


def _box_height(members: Sequence[Json]) -> float:
    return _LINE * len(members) + 8


def _tops(places: Layering, groups: Sequence[Sequence[Json]], room: float) -> tuple[dict[int, float], float]:
    """Return the top of each box, and the height of the drawing."""
    tops: dict[int, float] = {}
    y = _MARGIN + room
    for layer in places.layers:
        own = [key for key in layer if isinstance(key, int)]
        tops.update(dict.fromkeys(own, y))
        y += max((_box_height(groups[key]) for key in own), default=0.0) + _GAP
    return tops, y - _GAP + _MARGIN + room


def _box(members: Sequence[Json], left: float, top: float, size: _Drawing, note: Mapping[str, str]) -> Element:
    tones = {"fully_finished": "finished", "partially_finished": "partly"}
    found = {tones.get(operator["status"], "") for operator in members}
    tone = found.pop() if len(found) == 1 else ""
    lines = []
    for i, operator in enumerate(members):
        y = top + 4 + i * _LINE
        uid = operator["uid"]
        status = words.status_of(operator)
        partly = operator["status"] == "partially_finished"
        about = status if partly else f"{operator['parallelism']} × {status}"
        if note.get(uid) and size is not _NARROW:
            about += f" · {note[uid]}"
        full = (
            f"{words.named(operator['name'] or uid, uid)}: {words.plural(operator['parallelism'], 'subtask')}, {status}"
        )
        if note.get(uid):
            full += f", {note[uid]}"
        lines.append(
            e(
                "g",
                e("title", full),
                disc(operator["status"], left + 15, y + 12),
                e("text", _cut(operator["name"] or uid, size.letters), x=left + 27, y=y + 16),
                e("text", _cut(about, size.letters + 5), class_="q", x=left + 27, y=y + 30),
            )
        )
    return e(
        "g",
        e(
            "rect",
            class_=f"op {tone}".rstrip(),
            x=left,
            y=top,
            width=size.box,
            height=_box_height(members),
            rx=7,
        ),
        lines,
    )


def _cut(text: str, length: int) -> str:
    safe = words.label(text)
    return safe if len(safe) <= length else f"{safe[: length - 1]}…"


def _edges(
    places: Layering,
    groups: Sequence[Sequence[Json]],
    tops: Mapping[int, float],
    ahead: Sequence[_Between],
    size: _Drawing,
) -> Iterator[Element]:
    """Lines go down; at the box they lead to, each ends at a place of its own."""
    layer_tops = [min(tops[key] for key in layer if isinstance(key, int)) for layer in places.layers]
    bottoms = [
        max(tops[key] + _box_height(groups[key]) for key in layer if isinstance(key, int)) for layer in places.layers
    ]
    inputs = Counter(target for (_, target), _ in ahead)
    for (source, target), edge in ahead:
        way: list[Key] = places.lines[source, target]
        x, y = places.x[source] + _MARGIN, tops[source] + _box_height(groups[source])
        path = [f"M{x:.1f} {y:.1f}"]
        for bend in way:
            layer = bend[2]  # type: ignore[index]
            next_x = places.x[bend] + _MARGIN
            path.append(_curve(x, y, next_x, layer_tops[layer]))
            x, y = next_x, bottoms[layer]
            path.append(f"V{y:.1f}")
        end_x, end_y = places.x[target] + _MARGIN, tops[target] - 5
        path.append(_curve(x, y, end_x, end_y))
        kind = edge["partitioner"]
        yield e("path", e("title", edge_words(edge)), class_=f"edge {kind}", d=" ".join(path))
        yield e("polygon", class_="tip", points=_tip(end_x, end_y + 5))
        if inputs[target] == 1 and edge["key_columns"]:
            text = _cut(f"by {', '.join(edge['key_columns'])}", size.letters)
            # On the side that the line does not come from.
            left = x > end_x + 1
            side = {"x": end_x - 7 if left else end_x + 7, "text_anchor": "end" if left else None}
            yield e("text", text, class_="e", y=end_y - 4, **side)


def _curve(x: float, y: float, to_x: float, to_y: float) -> str:
    if abs(x - to_x) < 0.5:
        return f"V{to_y:.1f}"
    middle = (y + to_y) / 2
    return f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}"


def _tip(x: float, y: float) -> str:
    return f"{x:.1f},{y:.1f} {x - 4:.1f},{y - 7:.1f} {x + 4:.1f},{y - 7:.1f}"


def _loops(
    places: Layering,
    groups: Sequence[Sequence[Json]],
    tops: Mapping[int, float],
    back: Sequence[_Between],
    size: _Drawing,
    right: float,
) -> Iterator[Element]:
    """Feedback leaves a box at the bottom and enters one at the top, around all others."""
    bottom = {
        key: tops[key] + max(_box_height(groups[one]) for one in layer if isinstance(one, int))
        for layer in places.layers
        for key in layer
        if isinstance(key, int)
    }
    for number, ((source, target), edge) in enumerate(back):
        x, y = places.x[source] + _MARGIN + size.box / 4, tops[source] + _box_height(groups[source])
        to_x, to_y = places.x[target] + _MARGIN + size.box / 4, tops[target]
        below, above, out = bottom[source] + 11, to_y - 14, right + 8 + 8 * (number % 6)
        path = f"M{x:.1f} {y:.1f} V{below - 6:.1f} q0 6 6 6 H{out - 6:.1f} q6 0 6 -6"
        path += f" V{above + 6:.1f} q0 -6 -6 -6 H{to_x + 6:.1f} q-6 0 -6 6 V{to_y - 5:.1f}"
        yield e("path", e("title", edge_words(edge)), class_="edge feedback", d=path)
        yield e("polygon", class_="tip feedback", points=_tip(to_x, to_y))


def edge_words(edge: Json) -> str:
    """Return an edge in words: its ends, and how records choose their channel."""
    by = f" by {', '.join(map(words.label, edge['key_columns']))}" if edge["key_columns"] else ""
    loop = ", feedback" if edge["feedback"] else ""
    return f"{words.label(edge['from'])} to {words.label(edge['to'])}: {edge['partitioner']}{by}{loop}"


def _key(operators: Sequence[Json], edges: Sequence[Json]) -> Element:
    """Return what marks and lines mean, for those in the drawing."""
    names = {"running": "running", "partially_finished": "partly finished", "fully_finished": "finished"}
    there = {operator["status"] for operator in operators}
    marks = (e("span", status_mark(status), name) for status, name in names.items() if status in there)
    kinds = dict.fromkeys(edge["partitioner"] for edge in edges if not edge["feedback"])
    lines = [(kind, kind) for kind in kinds]
    if any(edge["feedback"] for edge in edges):
        lines.append(("feedback", "feedback"))
    drawn = (
        e("span", e("svg", e("path", class_=f"edge {kind}", d="M0 5 H34"), width=34, height=10), name)
        for kind, name in lines
    )
    return e("div", marks, drawn, class_="key")


def _words(ordered: Sequence[Json], edges: Sequence[Json]) -> list[Element | None]:
    inputs: dict[str, list[Json]] = {}
    for edge in edges:
        inputs.setdefault(edge["to"], []).append(edge)
    columns = [
        Column("operator"),
        Column("subtasks", right=True),
        Column("key groups", right=True),
        Column("status"),
        Column("takes input from"),
    ]
    rows = (
        (
            short(words.named(operator["name"] or operator["uid"], operator["uid"])),
            words.count(operator["parallelism"]),
            words.count(operator["max_parallelism"]),
            words.status_of(operator),
            short("; ".join(map(_input, inputs.get(operator["uid"], ()))) or "–", 400),
        )
        for operator in ordered[:LISTED_MAX]
    )
    return [table(columns, rows), more(len(ordered) - LISTED_MAX, "operator", "ckpt inspect --format json lists all")]


def _input(edge: Json) -> str:
    by = f" by {', '.join(edge['key_columns'])}" if edge["key_columns"] else ""
    return f"{edge['from']} ({edge['partitioner']}{by}{', feedback' if edge['feedback'] else ''})"
