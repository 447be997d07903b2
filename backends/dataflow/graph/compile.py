"""Compile a dataflow to a job: vertices, edges with schemas, states, and who sends to whom.

A vertex is a chain of operators, which one task runs. There are three steps: ``graph_of`` returns
the graph of a first run, or the topology to restore a checkpoint into; the restore plan returns a
resolved topology, which may split chains; :func:`compile_job` makes a :class:`Job` of either.

``FORWARD`` connects subtask i to subtask i. ``RESCALE`` connects near ones, like Flink's POINTWISE:
with *s* senders and *r* receivers, receiver i hears senders ⌊i·s/r⌋ … ⌊(i+1)·s/r⌋ − 1 if s ≥ r,
else ⌊i·s/r⌋.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa

from stateformat import model
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Edge, JobGraph, OperatorId, Partitioner, SubtaskSet
from stateformat.keys import DEFAULT_KEY_HASH, key_group_count
from stateformat.model import Record, State

from ..api import Operator, Source
from ..steps import Step, Steps
from .job_graph import inputs_of, joins, steps_in_order
from .runtime_states import may_overtake, states_of


@dataclass(frozen=True)
class Vertex:
    """A chain of operators that run in one task, and its edges."""

    id: str
    """The uid of its first operator."""
    operators: tuple[str, ...]
    """Each after its input. All but the first have one input, inside the chain."""
    parallelism: int
    inputs: tuple[Edge, ...]
    """Edges from outside into the first operator, in order of input."""
    feedback: tuple[Edge, ...]
    """Feedback edges into the first operator."""
    outputs: tuple[Edge, ...]
    """Edges that leave the chain, including feedback edges."""
    is_source: bool


@dataclass(frozen=True, eq=False)
class Job:
    """A dataflow, compiled. Compared by identity."""

    flow: Steps
    graph: JobGraph
    """With every max parallelism and key hash."""
    states: tuple[State, ...]
    vertices: tuple[Vertex, ...]
    """In order of their edges, not counting feedback."""
    schemas: Mapping[str, pa.Schema]
    """The schema of every edge, by id."""
    unaligned: bool

    @cached_property
    def _by_id(self) -> Mapping[str, Vertex]:
        return {vertex.id: vertex for vertex in self.vertices}

    @cached_property
    def _by_uid(self) -> Mapping[str, Vertex]:
        return {uid: vertex for vertex in self.vertices for uid in vertex.operators}

    def vertex(self, id: str) -> Vertex:
        """Return the vertex with this first operator. Raises ``InvalidInput`` if there is none."""
        return self._found(self._by_id, id)

    def vertex_of(self, uid: str) -> Vertex:
        """Return the vertex of an operator. Raises ``InvalidInput`` if there is none."""
        return self._found(self._by_uid, uid)

    def _found(self, vertices: Mapping[str, Vertex], name: str) -> Vertex:
        if name not in vertices:
            raise InvalidInput(
                f"the job has no vertex of {name!r}; it has {', '.join(vertices)}", kind=ErrorKind.UNKNOWN_OPERATOR
            )
        return vertices[name]

    def step(self, uid: str) -> Step:
        """Return the step of the dataflow with this uid."""
        return self.flow.steps[uid]

    def logic(self, uid: str) -> Source | Operator:
        """Return the prototype of a source or operator."""
        return self.flow.steps[uid].logic

    def states_of(self, uid: str) -> tuple[State, ...]:
        """Return the states of an operator, including those of the runtime."""
        return tuple(state for state in self.states if state.operator == uid)

    def state(self, uid: str, name: str) -> State | None:
        """Return a state of an operator; None if it has none with that name."""
        return next((state for state in self.states_of(uid) if state.name == name), None)

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """Say which operators wait for an event time that comes only when the job is drained.

        The event time of an operator is that of its slowest input, so one source that never ends
        and has none is enough. Feedback edges carry no event time.
        """
        inputs, found = inputs_of(self.graph), []
        holding: dict[str, set[str]] = {}
        for uid in steps_in_order(self.graph):
            step = self.step(uid)
            if isinstance(step.logic, Source):
                holding[uid] = set() if step.logic.bounded or step.event_time is not None else {uid}
                continue
            holding[uid] = set().union(*(holding[edge.source] for edge in inputs[uid] if not edge.feedback))
            timers, rows = _by_event_time(self.states_of(uid))
            if holding[uid] and (timers or rows):
                found.append(_waits(uid, sorted(holding[uid]), timers, rows))
        return tuple(found)

    def overtakable(self, edge: Edge) -> bool:
        """Return whether barriers overtake the records of an edge."""
        return may_overtake(edge, unaligned=self.unaligned)

    def logged(self, edge: Edge) -> bool:
        """Return whether an edge has in-flight state: a checkpoint may contain its records."""
        return edge.feedback or self.overtakable(edge)

    def combined_schema(self, edge: Edge) -> pa.Schema | None:
        """Return the columns of combined rows of an edge; None if its rows are sent as they are.

        Rows that may become part of a checkpoint always are.
        """
        logic = self.logic(edge.target)
        if not isinstance(logic, Operator) or edge.partitioner is not Partitioner.HASH or self.logged(edge):
            return None
        return None if _hides_rows(type(logic)) else logic.combined_schema(edge.input)

    def senders(self, edge_id: str, receiver: int) -> range:
        """Return the subtasks of the edge's source that send to a subtask of its target."""
        edge = self.graph.by_edge[edge_id]
        senders, receivers = self._sizes(edge)
        if edge.partitioner.all_to_all:
            return range(senders)
        first = receiver * senders // receivers
        return range(first, max(first + 1, (receiver + 1) * senders // receivers))

    def receivers(self, edge_id: str, sender: int) -> range:
        """Return the subtasks of the edge's target that a subtask of its source sends to."""
        edge = self.graph.by_edge[edge_id]
        senders, receivers = self._sizes(edge)
        if edge.partitioner.all_to_all:
            return range(receivers)
        after = -(-(sender + 1) * receivers // senders)
        return range(min(after - 1, -(-sender * receivers // senders)), after)

    def _sizes(self, edge: Edge) -> tuple[int, int]:
        return self.graph.operator(edge.source).parallelism, self.graph.operator(edge.target).parallelism


def compile_job(
    flow: Steps,
    graph: JobGraph,
    *,
    unaligned: bool,
    previous: Record | None = None,
    drop: Collection[str] = (),
) -> Job:
    """Compile a dataflow by a graph: that of ``graph_of``, or after a restore the plan's topology.

    Chains are those of the graph. ``previous`` and ``drop``: see ``states_of``. Raises
    ``InvalidInput`` for a graph that is not the dataflow's.
    """
    if {operator.uid for operator in graph.operators} != set(flow.steps):
        raise InvalidInput(
            f"the graph has operators {', '.join(graph.by_uid)} and dataflow {flow.job_id!r} has "
            f"{', '.join(flow.steps)}. Make the graph with graph_of.",
            kind=ErrorKind.INVALID_GRAPH,
        )
    graph = graph.with_operators({operator.uid: _resolved(operator) for operator in graph.operators})
    return Job(
        flow=flow,
        graph=graph,
        states=states_of(flow, graph, unaligned=unaligned, previous=previous, drop=drop),
        vertices=_vertices(flow, graph),
        schemas={edge.id: flow.steps[edge.source].schema for edge in graph.edges},
        unaligned=unaligned,
    )


def _hides_rows(kind: type[Operator]) -> bool:
    """Return whether a subclass has its own ``process`` but inherits ``process_combined``.

    Combined rows would never reach that ``process``.
    """
    bases = kind.__mro__
    hooks = ("process", "process_combined")
    process, combined = (next(i for i, base in enumerate(bases) if hook in vars(base)) for hook in hooks)
    return process < combined and bases[combined] is not Operator


def _by_event_time(states: Iterable[State]) -> tuple[list[str], list[str]]:
    """Return the names of timers that fire by event time, and of states whose rows expire by it."""
    timers = [state.name for state in states if state.kind is model.Kind.TIMERS and state.clock == "event_time"]
    return timers, [state.name for state in states if state.ttl is not None and state.ttl.clock == "event_time"]


def _waits(uid: str, sources: Sequence[str], timers: Sequence[str], rows: Sequence[str]) -> str:
    named = ", ".join(map(repr, sources))
    what = [f"timers ({', '.join(timers)}) fire"] * bool(timers) + [f"rows ({', '.join(rows)}) expire"] * bool(rows)
    one = len(sources) == 1
    return (
        f"operator {uid!r} waits for event time, but source{'' if one else 's'} {named} "
        f"{'never ends and has' if one else 'never end and have'} no event_time: its {' and its '.join(what)} only "
        f"when the job is drained, and its state grows until then. Give the source{'' if one else 's'} event_time, or "
        "use processing time"
    )


def _resolved(operator: model.Operator) -> model.Operator:
    return replace(
        operator,
        max_parallelism=key_group_count(operator),
        key_hash=operator.key_hash or DEFAULT_KEY_HASH,
        finished=SubtaskSet(),
        finishing=SubtaskSet(),
    )


def _vertices(flow: Steps, graph: JobGraph) -> tuple[Vertex, ...]:
    inputs = inputs_of(graph)
    head_of: dict[OperatorId, str] = {}
    chains: dict[str, list[str]] = {}
    for uid in steps_in_order(graph):
        edges, chain = inputs.get(uid, []), graph.by_uid[uid].chain
        head: str = uid
        # The remains of a chain that was split may be apart, under one name.
        if chain is not None and joins(edges) and graph.by_uid[edges[0].source].chain == chain:
            head = head_of[edges[0].source]
        head_of[uid] = head
        chains.setdefault(head, []).append(uid)
    return tuple(
        Vertex(
            id=head,
            operators=tuple(uids),
            parallelism=graph.operator(head).parallelism,
            inputs=tuple(edge for edge in inputs.get(head, []) if not edge.feedback),
            feedback=tuple(edge for edge in inputs.get(head, []) if edge.feedback),
            # All edges go through channels but those to inner operators.
            outputs=tuple(edge for edge in graph.edges if edge.source in uids and edge.target not in uids[1:]),
            is_source=isinstance(flow.steps[head].logic, Source),
        )
        for head, uids in chains.items()
    )
