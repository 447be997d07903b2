"""The loops of a job: which vertices send records to each other in a cycle."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stateformat.errors import ErrorKind, InvalidInput

from .compile import Vertex
from .job_graph import reached


def loops_of(vertices: Sequence[Vertex]) -> list[frozenset[str]]:
    """Return the vertices of each loop, by id, in the order of the loops' first vertices.

    A loop is a strongly connected component, with feedback edges included. So nested loops, and
    loops that share a vertex, are one: none of them is quiet before all are. Its heads are the
    vertices that a feedback edge enters. Raises ``InvalidInput`` for a feedback edge that closes no
    loop: its records would continue after its head was found quiet.
    """
    vertex_of = {uid: vertex.id for vertex in vertices for uid in vertex.operators}
    before: dict[str, set[str]] = defaultdict(set)
    after: dict[str, set[str]] = defaultdict(set)
    for vertex in vertices:
        for edge in (*vertex.inputs, *vertex.feedback):
            before[vertex.id].add(vertex_of[edge.source])
            after[vertex_of[edge.source]].add(vertex.id)
    # Apart from feedback edges, vertices are in order of their edges: the first of a loop is a
    # head.
    found: dict[str, frozenset[str]] = {}
    for vertex in vertices:
        if vertex.feedback and vertex.id not in found:
            loop = frozenset(reached(vertex.id, after) & reached(vertex.id, before))
            found |= dict.fromkeys(loop, loop)
        for edge in vertex.feedback:
            if vertex_of[edge.source] not in found[vertex.id]:
                raise InvalidInput(
                    f"feedback edge {edge.id!r} closes no loop: {edge.source!r} does not come behind "
                    f"{edge.target!r}. Close the loop with an operator behind its head.",
                    kind=ErrorKind.INVALID_GRAPH,
                    operator=edge.target,
                )
    return list(dict.fromkeys(found.values()))
