"""The order in which a job graph is shown. The input is the graph from a record, as parsed JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

Json = Mapping[str, Any]


def in_order(operators: Sequence[Json], edges: Sequence[Json]) -> list[Json]:
    """Return operators in topological order, ignoring feedback edges; ties are in order of
    definition.

    A graph with a cycle, which the format forbids, is still shown.
    """
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
