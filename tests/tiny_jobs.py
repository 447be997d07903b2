"""Jobs of a few words, with what planning and coordinating ask of a job and nothing else: no user
code, no schemas.

``tiny_job({"a": 2, "b": 3}, "a hash b", "b feedback a")`` has two vertices of one operator each.
"""

from __future__ import annotations

from dataclasses import dataclass

from stateformat.backends.dataflow.events import TaskId
from stateformat.graph import Edge, OperatorId, Partitioner
from stateformat.model import State
from stateformat.states import union_state


@dataclass(frozen=True)
class TinyVertex:
    """A chain."""

    id: str
    operators: tuple[str, ...]
    parallelism: int
    inputs: tuple[Edge, ...]
    feedback: tuple[Edge, ...]


@dataclass(frozen=True)
class TinyJob:
    """A job."""

    vertices: tuple[TinyVertex, ...]
    states: tuple[State, ...] = ()
    unaligned: bool = False

    @property
    def tasks(self) -> list[TaskId]:
        """All tasks."""
        return [TaskId(vertex.id, subtask) for vertex in self.vertices for subtask in range(vertex.parallelism)]


def edge(text: str) -> Edge:
    """``"source partitioner target"``; the partitioner ``feedback`` is a hash edge that is fed
    back.
    """
    source, how, target = text.split()
    partitioner = Partitioner.HASH if how == "feedback" else Partitioner(how)
    return Edge(text, OperatorId(source), OperatorId(target), partitioner, feedback=how == "feedback")


def tiny_job(parallelism: dict[str, int], *edges: str, union: tuple[str, ...] = (), unaligned: bool = False) -> TinyJob:
    """Vertices in topological order.

    ``"a+x"`` is a chain of operators a and x, and edges name operators.
    """
    vertices = []
    for chain, count in parallelism.items():
        operators = tuple(chain.split("+"))
        into = [edge(text) for text in edges if text.split()[2] == operators[0]]
        inputs = tuple(one for one in into if not one.feedback)
        vertices.append(TinyVertex(operators[0], operators, count, inputs, tuple(one for one in into if one.feedback)))
    states = tuple(union_state(uid, "shared", columns={"v": "int64"}) for uid in union)
    return TinyJob(tuple(vertices), states, unaligned)
