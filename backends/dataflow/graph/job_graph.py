"""Make the job graph of a dataflow: parallelism, partitioners, chains, and what is not allowed.

An operator joins the chain of the step before it if that is its only input, the edge is a forward
edge, ``chain`` is not False, and it has no coordinator. Several may join the same step, so chains
are trees. A chain has the uid of its first operator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Final

import pyarrow as pa

from stateformat import model
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Edge, JobGraph, OperatorId, Partitioner
from stateformat.keys import (
    MAX_PARALLELISM_LIMIT,
    check_key_types,
    check_parallelism,
    default_max_parallelism,
    key_group_count,
)
from stateformat.model import Record

from ..api import Operator, Source
from ..steps import Feedback, Input, Step, Steps
from .runtime_states import finished_in, states_of

DEFAULT_PARALLELISM: Final = 1
"""The default if neither the program nor a record says anything about an operator."""


def graph_of(
    flow: Steps,
    *,
    parallelism: int | None = None,
    per_operator: Mapping[str, int] | None = None,
    unaligned: bool = False,
    rebalanced: Collection[str] = (),
    previous: Record | None = None,
) -> JobGraph:
    """Return the graph of a dataflow, as a topology to restore into or to start from.

    - ``parallelism`` replaces the dataflow's. A step's own overrides it, and ``per_operator`` (by
      uid) overrides that. If none of them is given, the record's counts; see
      :func:`parallelism_of`. Max parallelism is derived unless the user gave it.
    - ``rebalanced``: edges that hold records in flight. They cannot become forward edges only
      because both sides have the same parallelism now.
    - ``previous``: the record of the checkpoint to restore. An operator that has finished there is
      not asked for a coordinator.

    Ids of edges are ``source->target.input``. Raises ``InvalidInput`` for whatever is wrong with
    the dataflow, its states included.
    """
    per_operator = per_operator or {}
    _check_steps(flow, per_operator)
    sizes = parallelism_of(flow, parallelism=parallelism, per_operator=per_operator, previous=previous)
    finished = finished_in(previous)
    operators = {}
    for uid, step in flow.steps.items():
        wanted = sizes[uid]
        _check_numbers(uid, wanted, step.max_parallelism)
        if previous is not None and uid in finished:
            coordinator = previous.graph.operator(uid).coordinator
        else:
            coordinator = isinstance(step.logic, Source) or step.logic.coordinator() is not None
        operators[uid] = model.Operator(
            OperatorId(uid), wanted, step.max_parallelism, name=step.name, coordinator=coordinator
        )
    edges = tuple(_edges(flow, operators, rebalanced, finished))
    _check_edge_ids(edges)
    graph = JobGraph(tuple(operators.values()), edges)
    order = steps_in_order(graph)
    _check_loops(flow, graph)
    chains = _chains(flow, graph, order)
    graph = graph.with_operators({uid: replace(graph.by_uid[uid], chain=chain) for uid, chain in chains.items()})
    states_of(flow, graph, unaligned=unaligned, finished=finished)
    return graph


def parallelism_of(
    flow: Steps,
    *,
    parallelism: int | None = None,
    per_operator: Mapping[str, int] | None = None,
    previous: Record | None = None,
) -> dict[str, int]:
    """Return the parallelism of each operator by uid, unchecked, from the program or the record.

    The program gives it, in this order: ``per_operator``, the step, ``parallelism``, the dataflow.
    An operator without any of these keeps the parallelism it has in ``previous``. One that is not
    there takes the number that all such operators have in common, else 1.
    """
    default = flow.parallelism if parallelism is None else parallelism
    near = {uid: step.parallelism for uid, step in flow.steps.items()} | dict(per_operator or {})
    said = {uid: default if own is None else own for uid, own in near.items()}
    known = previous.graph.by_uid if previous is not None else {}
    recorded = {uid: known[OperatorId(uid)].parallelism for uid, own in said.items() if own is None and uid in known}
    going_on = {number for uid, number in recorded.items() if uid not in finished_in(previous)}
    common = going_on.pop() if len(going_on) == 1 else DEFAULT_PARALLELISM
    return {uid: recorded.get(uid, common) if own is None else own for uid, own in said.items()}


def steps_in_order(graph: JobGraph) -> list[OperatorId]:
    """Return the uids, each after its inputs, feedback aside. Raises ``InvalidInput`` if cyclic."""
    sorter: TopologicalSorter[OperatorId] = TopologicalSorter({operator.uid: () for operator in graph.operators})
    for edge in graph.edges:
        if not edge.feedback:
            sorter.add(edge.target, edge.source)
    try:
        return list(sorter.static_order())
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        raise InvalidInput(
            f"the dataflow has a cycle: {circle}. Feed records back through a loop (Dataflow.loop).",
            kind=ErrorKind.INVALID_GRAPH,
        ) from error


def joins(edges: list[Edge]) -> bool:
    """Return whether an operator with these inputs may follow another one in a chain."""
    return len(edges) == 1 and not edges[0].feedback and edges[0].partitioner is Partitioner.FORWARD


def inputs_of(graph: JobGraph) -> dict[str, list[Edge]]:
    """Return the edges by target, including feedback edges, in order of their input."""
    found: dict[str, list[Edge]] = defaultdict(list)
    for edge in sorted(graph.edges, key=lambda edge: edge.input):
        found[edge.target].append(edge)
    return found


def reached(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    """Return all nodes that can be reached from one, itself included."""
    found, waiting = {start}, [start]
    while waiting:
        fresh = targets.get(waiting.pop(), set()) - found
        found |= fresh
        waiting += fresh
    return found


def _check_steps(flow: Steps, per_operator: Mapping[str, int]) -> None:
    if not flow.steps:
        raise InvalidInput(f"dataflow {flow.job_id!r} has no steps. Begin with flow.source(...).")
    unknown = sorted(set(per_operator) - set(flow.steps))
    if unknown:
        raise InvalidInput(
            f"a parallelism is given for {unknown}, which dataflow {flow.job_id!r} does not have. It has "
            f"{', '.join(flow.steps)}.",
            kind=ErrorKind.UNKNOWN_OPERATOR,
        )
    for step in flow.steps.values():
        _check_source(step)
        _check_inputs(flow, step)


def _check_source(step: Step) -> None:
    room = step.logic.splits_per_reader if isinstance(step.logic, Source) else None
    if room is not None and (isinstance(room, bool) or not isinstance(room, int) or room < 1):
        raise InvalidInput(
            f"source {step.uid!r} has splits_per_reader {room!r}, so nothing would be read. Give a whole number, at "
            "least 1, or None."
        )
    if step.event_time is None:
        return
    found = step.schema.field(step.event_time.column).type
    if not (found == pa.int64() or (pa.types.is_timestamp(found) and found.unit == "us")):
        raise InvalidInput(
            f"event time {step.event_time.column!r} of source {step.uid!r} is {found}. Cast it to timestamp[us], or to "
            "int64 in microseconds."
        )


def _check_inputs(flow: Steps, step: Step) -> None:
    fed_back = False
    for index, item in enumerate(step.inputs):
        if isinstance(item.source, Feedback):
            fed_back = True
            if item.source.tail is None:
                raise InvalidInput(f"the loop into {step.uid!r} is not closed. Call close(stream) on it.")
        elif fed_back:
            raise InvalidInput(
                f"input {index} of {step.uid!r} comes behind a loop. Loops are the last inputs of a step."
            )
        if _source(item) not in flow.steps:
            raise InvalidInput(
                f"input {index} of {step.uid!r} comes from {_source(item)!r}, which is no step of the dataflow"
            )
        if item.partitioner is Partitioner.HASH:
            try:
                check_key_types([item.schema.field(name) for name in item.key_columns])
            except InvalidInput as error:
                raise InvalidInput(f"input {index} of {step.uid!r}: {error}", kind=error.kind) from error
    if isinstance(step.logic, Operator) and all(isinstance(item.source, Feedback) for item in step.inputs):
        raise InvalidInput(
            f"operator {step.uid!r} has no input but loops, so nothing begins. Give it another one first."
        )


def _source(item: Input) -> str:
    return (item.source.tail or "") if isinstance(item.source, Feedback) else item.source


def _check_numbers(uid: str, parallelism: object, max_parallelism: object) -> None:
    for number in (parallelism, max_parallelism):
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise InvalidInput(
                f"{number!r} is no parallelism of operator {uid!r}. Give an integer.",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
    if not isinstance(parallelism, int):
        raise InvalidInput(
            f"operator {uid!r} has no parallelism. Give it, or the dataflow's.", kind=ErrorKind.INVALID_PARALLELISM
        )
    default = default_max_parallelism(min(max(1, parallelism), MAX_PARALLELISM_LIMIT))
    check_parallelism(parallelism, max_parallelism if isinstance(max_parallelism, int) else default, operator=uid)


def _edges(
    flow: Steps, operators: Mapping[str, model.Operator], rebalanced: Collection[str], finished: Collection[str]
) -> Iterator[Edge]:
    for uid, step in flow.steps.items():
        for index, item in enumerate(step.inputs):
            source = _source(item)
            sizes = operators[source].parallelism, operators[uid].parallelism
            forwards = sizes[0] == sizes[1] and f"{source}->{uid}.{index}" not in rebalanced
            partitioner = item.partitioner or (Partitioner.FORWARD if forwards else Partitioner.REBALANCE)
            # A finished operator keeps its parallelism whatever the others do: it gets no records.
            flows = source not in finished and uid not in finished
            if partitioner is Partitioner.FORWARD and sizes[0] != sizes[1] and flows:
                raise InvalidInput(
                    f"{source!r} of parallelism {sizes[0]} sends forward to {uid!r} of {sizes[1]}. Give them one "
                    "parallelism, or let the stream rebalance.",
                    kind=ErrorKind.INVALID_GRAPH,
                )
            yield Edge(
                f"{source}->{uid}.{index}",
                OperatorId(source),
                OperatorId(uid),
                partitioner,
                input=index,
                key_columns=item.key_columns,
                feedback=isinstance(item.source, Feedback),
            )


def _check_edge_ids(edges: Collection[Edge]) -> None:
    """Check that edge ids are distinct: uids with an arrow in them may give one id twice."""
    first: dict[str, Edge] = {}
    for edge in edges:
        other = first.setdefault(edge.id, edge)
        if other is not edge:
            raise InvalidInput(
                f"the edges from {other.source!r} to {other.target!r} and from {edge.source!r} to {edge.target!r} "
                f"would both be named {edge.id!r}. Give one of these steps another uid.",
                kind=ErrorKind.INVALID_GRAPH,
            )


def _check_loops(flow: Steps, graph: JobGraph) -> None:
    heads: dict[int, str] = {}
    targets: dict[str, set[str]] = defaultdict(set)
    for edge in graph.edges:
        targets[edge.source].add(edge.target)
    for uid, step in flow.steps.items():
        for item in step.inputs:
            if not isinstance(item.source, Feedback):
                continue
            other = heads.setdefault(id(item.source), uid)
            if other != uid or sum(each.source is item.source for each in step.inputs) > 1:
                raise InvalidInput(f"one loop is an input of {other!r} and of {uid!r}. Open a loop for each input.")
            if _source(item) not in reached(uid, targets):
                raise InvalidInput(
                    f"the loop into {uid!r} is closed by {_source(item)!r}, which {uid!r} does not lead to, so it is "
                    "no loop. Use the stream itself as input.",
                    kind=ErrorKind.INVALID_GRAPH,
                )


def _chains(flow: Steps, graph: JobGraph, order: list[OperatorId]) -> dict[OperatorId, str]:
    """Return the chain of every operator that shares one."""
    inputs = inputs_of(graph)
    head_of: dict[OperatorId, str] = {}
    chains: dict[str, list[OperatorId]] = defaultdict(list)
    for uid in order:
        edges = inputs.get(uid, [])
        # An operator with a coordinator waits for answers before its input ends: whatever is before
        # it in a chain would have ended.
        together = (
            joins(edges)
            and flow.steps[uid].chain
            and not graph.by_uid[uid].coordinator
            and key_group_count(graph.operator(uid)) == key_group_count(graph.operator(edges[0].source))
        )
        head_of[uid] = head_of[edges[0].source] if together else uid
        chains[head_of[uid]].append(uid)
    return {uid: head for head, uids in chains.items() if len(uids) > 1 for uid in uids}
