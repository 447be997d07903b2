"""Drawings as inline SVG: charts, and a job graph as boxes in layers.

Each value is a shape with its text as a tooltip. Shapes stretch with the page; text is HTML beside
them, so it is as large as all other text on every screen. In a job graph operators of a chain share
a box; whether an operator is fully or partly finished is shown by color, by shape (a ring, half a
disc, a disc; solid or broken lines), and in words.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias

from .. import words
from .blocks import Chart, Json, Spark
from .elements import Element, element as e

BARS_MAX: Final = 256
"""With more values, neighbors share a bar, which shows the greatest of them."""
_HEIGHT: Final = 100
_PITCH: Final = 10


def chart(found: Chart) -> Element:
    """Return a figure with one vertical bar for each value, or a line over an area for a trend;
    marked ones have another color, which is told below.
    """
    known = [value for value in found.values if value is not None]
    top = max(known, default=0)
    told = None if found.at is None else found.values[found.at]
    bars, width = (_line if found.is_trend else _bars)(found, top)
    extent = f"{words.plural(len(known), 'value')} from {found.text(min(known))} to {found.text(top)}" if known else ""
    shape = e(
        "svg",
        e("title", f"{found.title}: {extent or 'nothing is known'}"),
        bars,
        class_="plot",
        viewBox=f"0 0 {width} {_HEIGHT}",
        preserveAspectRatio="none",
        role="img",
    )
    stated = None if told is None else e("strong", found.text(told))
    most = e("div", f"up to {found.text(top)}" if known else "", class_="axis")
    foot = e("div", (e("span", text) for text in found.ends), class_="axis")
    legend = e(
        "div", e("svg", e("rect", class_="e", width=9, height=9), width=9, height=9), found.legend, class_="legend"
    )
    is_marked = found.legend and any(found.marked)
    return e(
        "figure", e("figcaption", e("span", found.title), stated), most, shape, foot, legend if is_marked else None
    )


def _shared(found: Chart) -> Iterator[tuple[range, int, int | None]]:
    """Yield, for at most :data:`BARS_MAX` places, which values share it, and the greatest of them
    with its number.
    """
    values = found.values
    count = min(len(values), BARS_MAX)
    for i in range(count):
        chosen = range(len(values) * i // count, len(values) * (i + 1) // count)
        number = max(chosen, key=lambda one: -1 if (value := values[one]) is None else value)
        yield chosen, number, values[number]


def _line(found: Chart, top: int) -> tuple[list[Element], int]:
    """Return a line over an area, with a mark for the value that is told; a gap where one is
    unknown.
    """
    runs: list[list[str]] = [[]]
    at, tooltips, width = [], [], _PITCH
    for i, (chosen, number, value) in enumerate(_shared(found)):
        if value is None:
            runs.append([])
            continue
        x, y, width = i * _PITCH, 96 - 92 * value / top if top > 0 else 96.0, max(_PITCH, i * _PITCH)
        runs[-1].append(f"{x} {y:.1f}")
        # Within the drawing: a place is as wide as the half of it that lies there.
        is_end = i == min(len(found.values), BARS_MAX) - 1
        tooltips.append(_hit(found, number, value, max(0, x - _PITCH // 2), _PITCH // 2 if is_end else _PITCH))
        if found.at in chosen:
            at = [e("path", class_="at", d=f"M{x} {y:.1f}v.01")]
    lines = [run if len(run) > 1 else run * 2 for run in runs if run]
    areas = "".join(f"M{run[0].split()[0]} {_HEIGHT}L{' '.join(run)} {run[-1].split()[0]} {_HEIGHT}z" for run in lines)
    trace = "".join(f"M{' '.join(run)}" for run in lines)
    return [e("path", class_="area", d=areas), e("path", class_="trace", d=trace), *at, *tooltips], width


def _hit(found: Chart, number: int, value: int, x: int, width: int = _PITCH) -> Element:
    """Return where a pointer is told a value."""
    name = found.names[number] if found.names else number
    return e("rect", e("title", f"{name}: {found.text(value)}"), class_="hit", x=x, width=width, height=_HEIGHT)


def _bars(found: Chart, top: int) -> tuple[list[Element], int]:
    """Return the bars, and their total width in units of the drawing."""
    slots = [*_shared(found)]
    # A few bars do not grow as wide as the page.
    broad = 0.8 * _PITCH * min(1.0, max(len(slots), 2) / 12)
    paths: dict[str, list[str]] = {}
    tooltips = []
    for i, (chosen, number, value) in enumerate(slots):
        if value is None:
            continue
        height = max(1.5, _HEIGHT * value / top) if top > 0 and value > 0 else 1.0
        is_hot = any(found.marked[one] for one in chosen if found.marked)
        tone = "z" if value <= 0 else "e" if is_hot else "n" if found.at in chosen else "b"
        left = i * _PITCH + (_PITCH - broad) / 2
        paths.setdefault(tone, []).append(f"M{left:g} {_HEIGHT}v{-height:.1f}h{broad:g}v{height:.1f}z")
        tooltips.append(_hit(found, number, value, i * _PITCH))
    shapes = [e("path", class_=tone, d="".join(parts)) for tone, parts in paths.items()]
    return [*shapes, *tooltips], max(1, len(slots)) * _PITCH


def spark(cell: Spark) -> Element:
    """Return bars as high as text, or a line for a trend."""
    points = [(i, value) for i, value in enumerate(cell.values) if value is not None]
    top = max((value for _, value in points), default=0) or 1
    step = 96 / max(1, len(cell.values) - cell.is_trend)
    if cell.is_trend:
        path = "L".join(f"{i * step:.1f} {20 - 18 * value / top:.1f}" for i, value in points)
        shape = e("path", class_="trace", d=f"M{path}") if len(points) > 1 else None
    else:
        heights = [(i * step, max(1, 20 * value / top)) for i, value in points]
        bars = "".join(f"M{x:.1f} 22v{-high:.1f}h{0.8 * step:.2f}v{high:.1f}z" for x, high in heights)
        shape = e("path", class_="b", d=bars) if bars else None
    values = ", ".join("none" if value is None else f"{value:,}" for value in cell.values[:64])
    return e("svg", e("title", cell.about or values), shape, class_="spark", viewBox="0 0 96 22", role="img")


def share(value: int, top: int, about: str) -> Element:
    """Return a horizontal bar, in proportion to the greatest."""
    part = 100 * value / top if top > 0 else 0
    return e(
        "svg",
        e("title", about or f"{value:,}"),
        e("rect", class_="b", x=0, y=0, width=f"{max(part, 1.0 if value > 0 else 0):.1f}%", height=8, rx=4),
        class_="share",
        role="img",
    )


def disc(status: str, x: float, y: float) -> list[Element]:
    """Return the mark of a status for a drawing, around a point."""
    tone = {"fully_finished": "finished", "partially_finished": "partly"}.get(status, "")
    half = e("path", class_="half", d=f"M{x} {y - 4.5} a4.5 4.5 0 0 0 0 9 z") if tone == "partly" else None
    return [part for part in (half, e("circle", class_=f"mark {tone}".rstrip(), cx=x, cy=y, r=4.5)) if part]


# ---- the job graph


Key: TypeAlias = "int | tuple[str, int, int]"
"""A box by its number, or a bend: of lines to (``t``) or from (``s``) a box, in a layer."""
_Between = tuple[tuple[int, int], Json]
_LINE: Final = 34
_GAP: Final = 46
_MARGIN: Final = 6
_LOOP: Final = 12.0
DRAWN_MAX: Final = 300
"""Operators in a drawing; a larger graph is a table."""
NARROW_MAX: Final = 80
"""Operators in the drawing for narrow screens; a larger one is the same on all screens."""
_SWEEPS: Final = 6
BEND: Final = 18.0
"""The space that a bend takes beside boxes."""


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


def drawn(operators: Sequence[Json], edges: Sequence[Json], notes: Mapping[str, str]) -> list[Element]:
    """Return the drawing for wide and for narrow screens, and its legend; none of a large graph."""
    if len(operators) > DRAWN_MAX:
        return []
    sizes = (_WIDE, _NARROW) if len(operators) <= NARROW_MAX else (_ONLY,)
    drawings = [e("div", _svg(operators, edges, size, notes), class_=size.name) for size in sizes]
    return [*drawings, _key(operators, edges)]


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
        yield e("path", e("title", f"{words.edge_of(edge)} to {edge['to']}"), class_=f"edge {kind}", d=" ".join(path))
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
        yield e("path", e("title", f"{words.edge_of(edge)} to {edge['to']}"), class_="edge feedback", d=path)
        yield e("polygon", class_="tip feedback", points=_tip(to_x, to_y))


def _key(operators: Sequence[Json], edges: Sequence[Json]) -> Element:
    """Return what marks and lines mean, for those in the drawing."""
    names = {"running": "running", "partially_finished": "partly finished", "fully_finished": "finished"}
    there = {operator["status"] for operator in operators}
    marks = [
        e("span", e("svg", disc(status, 7, 7), width=14, height=14, viewBox="0 0 14 14"), name)
        for status, name in names.items()
        if status in there
    ]
    kinds = dict.fromkeys("feedback" if edge["feedback"] else edge["partitioner"] for edge in edges)
    lines = [
        e("span", e("svg", e("path", class_=f"edge {kind}", d="M0 5 H34"), width=34, height=10), kind) for kind in kinds
    ]
    return e("div", marks, lines, class_="key")


# ---- where boxes stand, and where lines bend


@dataclass(slots=True)
class Layering:
    """Where everything is placed. ``x`` are centers, from 0 on; layers are numbered downwards."""

    layers: list[list[Key]]
    x: dict[Key, float] = field(default_factory=dict)
    lines: dict[tuple[int, int], list[Key]] = field(default_factory=dict)
    """Each edge as the bends on its way."""
    width: float = 0

    def layer_of(self) -> dict[int, int]:
        """Return the layer of each box."""
        return {key: i for i, layer in enumerate(self.layers) for key in layer if isinstance(key, int)}


def layered(count: int, edges: Sequence[tuple[int, int]], *, side_by_side: int, box: float) -> Layering:
    """Return places for ``count`` boxes of one width.

    ``edges`` lead from a box to one with a higher number, which makes cycles impossible: the caller
    leaves out edges that lead back.
    """
    targets: dict[int, list[int]] = defaultdict(list)
    sources: dict[int, list[int]] = defaultdict(list)
    for source, target in dict.fromkeys(edges):
        targets[source].append(target)
        sources[target].append(source)
    place = _layers(count, sources, targets, side_by_side)
    found = Layering([[] for _ in range(max(place, default=-1) + 1)])
    for number in range(count):
        found.layers[place[number]].append(number)
    neighbors: dict[Key, list[Key]] = defaultdict(list)
    for source, target in dict.fromkeys(edges):
        by = ("s", source) if len(targets[source]) > len(sources[target]) else ("t", target)
        way: list[Key] = [(*by, layer) for layer in range(place[source] + 1, place[target])]
        for bend in way:
            layer = found.layers[bend[2]]  # type: ignore[index]
            if bend not in neighbors:
                layer.append(bend)
        found.lines[source, target] = way
        ends: list[Key] = [source, *way, target]
        for upper, lower in pairwise(ends):
            neighbors[upper].append(lower)
            neighbors[lower].append(upper)
    _order(found.layers, neighbors)
    _spread(found, neighbors, box)
    return found


def _layers(
    count: int, sources: Mapping[int, Sequence[int]], targets: Mapping[int, Sequence[int]], side_by_side: int
) -> list[int]:
    """Return the layer of each box: below its inputs, and at most ``side_by_side`` in one.

    Sources that only feed something far below move down to it, so their lines stay short.
    """
    place = [0] * count
    for number in range(count):
        place[number] = max((place[before] + 1 for before in sources.get(number, ())), default=0)
    for number in reversed(range(count)):
        below = [place[after] for after in targets.get(number, ())]
        if below and not sources.get(number):
            place[number] = max(place[number], min(below) - 1)
    taken: dict[int, int] = defaultdict(int)
    for number in sorted(range(count), key=lambda one: (place[one], one)):
        place[number] = max([place[number], *(place[before] + 1 for before in sources.get(number, ()))])
        while taken[place[number]] >= side_by_side:
            place[number] += 1
        taken[place[number]] += 1
    used = {layer: i for i, layer in enumerate(sorted(set(place)))}
    return [used[layer] for layer in place]


def _order(layers: list[list[Key]], neighbors: Mapping[Key, Sequence[Key]]) -> None:
    """Sort each layer by where its neighbors above, then below, are; a few times."""
    at: dict[Key, float] = {key: i for layer in layers for i, key in enumerate(layer)}
    level = {key: number for number, layer in enumerate(layers) for key in layer}
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for number in range(len(layers)) if down else reversed(range(len(layers))):
            beside = number - 1 if down else number + 1

            def middle(key: Key, beside: int = beside) -> float:
                near = [at[other] for other in neighbors.get(key, ()) if level[other] == beside]
                return sum(near) / len(near) if near else at[key]

            layers[number].sort(key=middle)
            at.update((key, i) for i, key in enumerate(layers[number]))


def _spread(found: Layering, neighbors: Mapping[Key, Sequence[Key]], box: float) -> None:
    """Give everything its ``x``: near the center of its neighbors, without overlaps."""
    room = {key: box + BEND if isinstance(key, int) else BEND for layer in found.layers for key in layer}
    for layer in found.layers:
        total = sum(room[key] for key in layer)
        x = -total / 2
        for key in layer:
            found.x[key] = x + room[key] / 2
            x += room[key]
    for _ in range(_SWEEPS):
        for layer in found.layers:
            wanted = []
            for key in layer:
                near = [found.x[other] for other in neighbors.get(key, ())]
                wanted.append(sum(near) / len(near) if near else found.x[key])
            for key, x in zip(layer, _apart(wanted, [room[key] for key in layer]), strict=True):
                found.x[key] = x
    left = min((found.x[key] - room[key] / 2 for layer in found.layers for key in layer), default=0.0)
    for key in found.x:
        found.x[key] -= left
    found.width = max((found.x[key] + room[key] / 2 for layer in found.layers for key in layer), default=0.0)


def _apart(wanted: Sequence[float], room: Sequence[float]) -> list[float]:
    """Return the places nearest to those wanted (least squares) that keep order and distance."""
    # With the distances subtracted, the places only have to ascend: pool neighbors that would not.
    offsets, offset = [], 0.0
    for i, own in enumerate(room):
        offset += (room[i - 1] + own) / 2 if i else 0.0
        offsets.append(offset)
    pools: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=True):
        total, number = want - offset, 1
        while pools and pools[-1][0] / pools[-1][1] > total / number:
            before = pools.pop()
            total, number = total + before[0], number + before[1]
        pools.append((total, number))
    places = [total / number for total, number in pools for _ in range(number)]
    return [place + offset for place, offset in zip(places, offsets, strict=True)]
