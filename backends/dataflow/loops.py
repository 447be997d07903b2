"""Which vertices turn together: the loops of a job.

A loop is a strongly connected component of the graph of vertices with feedback edges counted: records can come from any of its
vertices to any other and back. Loops within a loop, and loops that share a vertex, are one: none of them is quiet before all
are. Its heads are the vertices that a feedback edge enters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from backends.dataflow.compile import Vertex
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import Edge


def loops_of(vertices: Sequence[Vertex]) -> list[frozenset[str]]:
    """The ids of the vertices of each loop, in the order of their first vertices.

    Raises ``InvalidInput`` where a feedback edge does not close a loop: its records would go on after its head was found quiet.
    """
    vertex_of = {uid: vertex.id for vertex in vertices for uid in vertex.operators}

    def sources(edges: Iterable[Edge]) -> list[str]:
        return [vertex_of[edge.source] for edge in edges]

    before = {vertex.id: sources((*vertex.inputs, *vertex.feedback)) for vertex in vertices}
    component = _components(before)
    for vertex in vertices:
        for edge in vertex.feedback:
            tail = vertex_of[edge.source]
            if component[tail] != component[vertex.id]:
                raise InvalidInput(
                    f"feedback edge {edge.id!r} closes no loop: {edge.source!r} does not come behind {edge.target!r}. Close "
                    "the loop with an operator behind its head",
                    kind=ErrorKind.INVALID_GRAPH,
                    operator=edge.target,
                )
    found: dict[int, set[str]] = {component[vertex.id]: set() for vertex in vertices if vertex.feedback}
    order: list[int] = []
    for vertex in vertices:
        number = component[vertex.id]
        if number in found:
            found[number].add(vertex.id)
            order.append(number)
    return [frozenset(found[number]) for number in dict.fromkeys(order)]


def _components(before: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The number of the strongly connected component of each node (Kosaraju, without recursion: chains may be long)."""
    after: dict[str, list[str]] = {node: [] for node in before}
    for node, predecessors in before.items():
        for predecessor in predecessors:
            after[predecessor].append(node)
    component: dict[str, int] = {}
    for root in reversed(_by_finishing_time(after)):
        if root not in component:
            number, stack = len(component), [root]
            while stack:
                node = stack.pop()
                if node not in component:
                    component[node] = number
                    stack += before[node]
    return component


def _by_finishing_time(after: Mapping[str, Sequence[str]]) -> list[str]:
    """Nodes in the order in which a depth-first walk leaves them."""
    seen: set[str] = set()
    left: list[str] = []
    for root in after:
        stack = [] if root in seen else [(root, iter(after[root]))]
        seen.add(root)
        while stack:
            node, successors = stack[-1]
            following = next((successor for successor in successors if successor not in seen), None)
            if following is None:
                left.append(node)
                stack.pop()
            else:
                seen.add(following)
                stack.append((following, iter(after[following])))
    return left
