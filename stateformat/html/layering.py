"""Where the boxes of a layered drawing are placed, and where its lines bend.

Boxes are in layers below those that they take input from, with a maximum number side by side. A
line that passes layers bends at a point in each; lines to the same box share their points, or, if
one box feeds many, lines from the same box do, so a fan of a hundred lines is drawn as one. Pure:
numbers in, places out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias

Key: TypeAlias = "int | tuple[str, int, int]"
"""A box by its number, or a bend: of lines to (``t``) or from (``s``) a box, in a layer."""
_SWEEPS: Final = 6
BEND: Final = 18.0
"""The space that a bend takes beside boxes."""


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
