"""Compile a dataflow to a job: vertices, edges with schemas, states, and who sends to whom.

A vertex is a chain of operators, which one task runs. There are three steps: ``graph_of`` returns
the graph of a first run, or the topology to restore a checkpoint into; the restore plan returns a
resolved topology, which may split chains; :func:`compile_job` makes a :class:`Job` of either.

``FORWARD`` connects subtask i to subtask i. ``RESCALE`` connects near ones, like Flink's POINTWISE:
with *s* senders and *r* receivers, receiver i hears senders ⌊i·s/r⌋ … ⌊(i+1)·s/r⌋ − 1 if s ≥ r,
else ⌊i·s/r⌋.

A :class:`Router` is the sending end of one edge in one subtask. On a hash edge every row goes to
the subtask that owns its key group (SPEC.md section 5.3). A restore cuts keyed state in the same
way, so a key and its state are always in one place. On rebalance and rescale edges, whole batches
go to the receivers in turn, large ones in pieces. Rows keep their order on every channel. A
router's choices depend only on its input.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stateformat import model
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Edge, JobGraph, OperatorId, Partitioner, SubtaskSet
from stateformat.keys import DEFAULT_KEY_HASH, hash_keys, key_group_count, key_groups, subtask_of_key_group
from stateformat.model import Record, State
from stateformat.pages.blocks import in_order
from stateformat.words import edge_of, field, label, mode_of, named, operator_of, plural

from .api import Operator, Source
from .graph import inputs_of, joins, may_overtake, reached, states_of, steps_in_order
from .steps import Step, Steps


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


PIECE_ROWS_MIN: Final = 16_384
"""Large batches are cut into pieces of at least so many rows, at most one for each receiver."""


class Router:
    """The sending end of an edge in one subtask. Not thread-safe."""

    def __init__(self, job: Job, edge: Edge, sender: int) -> None:
        self._receivers = job.receivers(edge.id, sender)
        self._turn = sender % len(self._receivers)
        self._key_columns = edge.key_columns
        self._partitioner = edge.partitioner
        target = job.graph.operator(edge.target)
        self._key_groups = key_group_count(target)
        self._key_hash = target.key_hash or DEFAULT_KEY_HASH
        owners = subtask_of_key_group(
            np.arange(self._key_groups), parallelism=target.parallelism, max_parallelism=self._key_groups
        )
        # The narrowest type: the fewer bytes, the faster the sort.
        self._owner_of_group = owners.astype(np.uint8 if target.parallelism <= 256 else np.uint16)

    def route(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        """Return the rows of a batch by receiver, without empty batches, in their order.

        Receivers of a hash edge ascend; on rebalance and rescale edges they come in turn.
        """
        if not batch.num_rows:
            return []
        receivers = self._receivers
        if self._partitioner is Partitioner.BROADCAST:
            return [(receiver, batch) for receiver in receivers]
        if len(receivers) == 1:
            return [(receivers[0], batch)]
        return self._by_key(batch) if self._partitioner is Partitioner.HASH else self._in_turn(batch)

    def owners(self, batch: pa.RecordBatch) -> npt.NDArray[Any]:
        """Return the receiver of each row of a hash edge's batch."""
        hashes = hash_keys([batch.column(name) for name in self._key_columns], self._key_hash)
        found: npt.NDArray[Any] = self._owner_of_group[key_groups(hashes, self._key_groups)]
        return found

    def _by_key(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        owners = self.owners(batch)
        counts = np.bincount(owners, minlength=len(self._receivers))
        present = np.flatnonzero(counts).tolist()
        if len(present) == 1:
            return [(present[0], batch)]
        # numpy sorts 8 and 16 bits by radix, stably.
        sorted_rows = batch.take(pa.array(np.argsort(owners, kind="stable")))
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        return [(receiver, sorted_rows.slice(starts[receiver], int(counts[receiver]))) for receiver in present]

    def _in_turn(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        receivers, turn = self._receivers, self._turn
        pieces = max(1, min(len(receivers), batch.num_rows // PIECE_ROWS_MIN))
        self._turn = (turn + pieces) % len(receivers)
        if pieces == 1:
            return [(receivers[turn], batch)]
        bounds = [batch.num_rows * piece // pieces for piece in range(pieces + 1)]
        return [
            (receivers[(turn + piece) % len(receivers)], batch.slice(bounds[piece], bounds[piece + 1] - bounds[piece]))
            for piece in range(pieces)
        ]


Json = Mapping[str, Any]
WIDTH: Final = 100


def described(document: Json) -> str:
    """Return the operators in order, each after its inputs, with its edges, states and columns."""
    return "\n".join(_lines(document))


def _lines(document: Json) -> Iterator[str]:
    operators = in_order(document["operators"], document["edges"])
    counts = f"{plural(len(operators), 'operator')}, {plural(len(document['states']), 'state')}"
    yield f"Dataflow {named(document['job_id'], document['job_name'])}: {counts}"
    inputs, states = _by(document["edges"], "to"), _by(document["states"], "operator")
    for operator in operators:
        yield ""
        yield f"{operator_of(operator)}: {_size(operator)}"
        yield from (f"  <- {edge_of(edge)}" for edge in inputs.get(operator["uid"], ()))
        yield from (line for state in states.get(operator["uid"], ()) for line in _state(state))
    for sentence in document["warnings"]:
        yield ""
        yield from textwrap.wrap(f"Warning: {label(sentence)}", WIDTH, break_on_hyphens=False)


def _by(members: list[Json], name: str) -> dict[str, list[Json]]:
    found: dict[str, list[Json]] = {}
    for member in members:
        found.setdefault(member[name], []).append(member)
    return found


def _size(operator: Json) -> str:
    facts = [plural(operator["parallelism"], "subtask"), f"max {operator['max_parallelism']}"]
    if operator.get("chain"):
        facts.append(f"chain {label(operator['chain'])}")
    if operator["coordinator"]:
        facts.append("coordinator")
    return ", ".join(facts)


def _state(state: Json) -> Iterator[str]:
    kind = mode_of(state)
    by = f" by {', '.join(map(label, state['key_columns']))}" if state["key_columns"] else ""
    columns = ", ".join(map(field, state["schemas"][-1]["fields"]))
    mode = f" ({kind.replace('_', ' ')}{by})" if kind != state["name"] else ""
    text = f"{label(state['name'])}{mode}{': ' if columns else ''}{columns}"
    yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False)
