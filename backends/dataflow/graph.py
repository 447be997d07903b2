"""Make the job graph of a dataflow: parallelism, partitioners, chains, and what is not allowed.

An operator joins the chain of the step before it if that is its only input, the edge is a forward
edge, ``chain`` is not False, and it has no coordinator. Several may join the same step, so chains
are trees. A chain has the uid of its first operator.

Operators have states that users declare, and the runtime's own:

======================  =============  ===========================================================
of                      name           what
======================  =============  ===========================================================
source                  `splits`       even split: :data:`SPLITS_SCHEMA`
source                  `enumerator`   coordinator: the enumerator's columns
enumerator with a log   `enumerator_log`
                                       even split, though only the driver writes and reads it: its
                                       ``log_columns``, in segments that one subtask has
operator with inputs    `progress`     progress, one row per edge
with a coordinator      `coordinator`  its columns, then those of :data:`MESSAGE_SCHEMA`
two-phase-commit sink   `committables` its ``committable_columns``
edge                    `in-flight …`  the edge's columns, its key first: feedback edges, and hash
                                       and rebalance edges when unaligned
======================  =============  ===========================================================

A program declares its states again at each start, and field ids follow names (SPEC.md section 5.7).
So a restore passes the record of the checkpoint as ``previous``: without it, a column inserted
before another would take that one's id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

import pyarrow as pa

from stateformat import model, states as declare
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import Edge, JobGraph, OperatorId, Partitioner, Status
from stateformat.keys import (
    MAX_PARALLELISM_LIMIT,
    check_key_types,
    check_parallelism,
    default_max_parallelism,
    key_group_count,
)
from stateformat.model import FieldType, Mode, Record, State
from stateformat.schema import arrow_type, make_fields
from stateformat.states import Changes, Columns, as_schema, column_name, evolve_state, new_state, split_drop

from .api import Operator, Source, TwoPhaseCommitSink
from .steps import Feedback, Input, Step, Steps

SPLITS: Final = "splits"
ENUMERATOR: Final = "enumerator"
ENUMERATOR_LOG: Final = "enumerator_log"
PROGRESS: Final = "progress"
COORDINATOR: Final = "coordinator"
COMMITTABLES: Final = "committables"
IN_FLIGHT: Final = "in-flight "
"""The prefix of the names of in-flight states; the id of the edge follows."""

SPLITS_SCHEMA: Final = pa.schema(
    [
        pa.field("split_id", pa.string(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("watermark", pa.int64()),
    ]
)
"""The splits of a reader: where to read next, and the event time (µs) reached."""

MESSAGE_SCHEMA: Final = pa.schema([pa.field("message_from", pa.int32()), pa.field("message", pa.binary())])
"""After a coordinator's own columns: messages of subtasks not yet delivered, one per row."""

_RESERVED: Final = (SPLITS, ENUMERATOR, PROGRESS, COORDINATOR, COMMITTABLES)


def in_flight_name(edge_id: str) -> str:
    """Return the name of the in-flight state of an edge."""
    return IN_FLIGHT + edge_id


def may_overtake(edge: Edge, *, unaligned: bool) -> bool:
    """Return whether barriers overtake the records of an edge."""
    return unaligned and not edge.feedback and edge.partitioner in (Partitioner.HASH, Partitioner.REBALANCE)


def states_of(
    flow: Steps,
    graph: JobGraph,
    *,
    unaligned: bool,
    previous: Record | None = None,
    drop: Collection[str] = (),
    finished: Collection[str] = (),
) -> tuple[State, ...]:
    """Return all states of a dataflow, in order of its steps.

    - ``graph``: the one of ``graph_of``, or a plan's.
    - ``previous``: the record of the checkpoint that is restored. A state that it has continues
      from there, its fields matched by name. One that cannot evolve starts empty: nothing of it is
      read.
    - ``drop``: columns that the run drops, ``UID/STATE.COLUMN``.
    - ``finished``: operators that have finished, besides those finished in ``previous``. Their
      coordinators and enumerators are not made, so their states are those of ``previous``.

    Raises ``InvalidInput`` for states that contradict each other, their edges or their earlier
    columns.
    """
    found = []
    for state, changes in _with_changes(flow, graph, previous, drop, unaligned=unaligned, finished=finished):
        saved = _predecessor(state, previous)
        try:
            found.append(new_state(state, changes) if saved is None else evolve_state(saved, state, changes).state)
        except InvalidState:
            found.append(new_state(state, changes))  # It was given up, or its operator has finished, or it was empty.
    return tuple(found)


def states_to_plan(
    flow: Steps,
    graph: JobGraph,
    *,
    unaligned: bool,
    previous: Record,
    drop: Collection[str] = (),
    logged: Collection[str] = (),
) -> tuple[tuple[State, ...], list[str], list[str]]:
    """Return what ``plan_restore`` takes: states, the whole states in ``drop``, dropped columns.

    The states are those of :func:`states_of`, except those that cannot evolve, which the plan
    refuses. Columns are named as in ``previous``. ``logged``: the edges whose in-flight records the
    checkpoint holds, whether or not barriers overtake them now. Raises as :func:`states_of`.
    """
    declared = list(_with_changes(flow, graph, previous, drop, unaligned=unaligned, logged=logged))
    found: list[State] = []
    columns: list[str] = []
    for state, changes in declared:
        saved = _predecessor(state, previous)
        if saved is None:
            found.append(state)
            continue
        went_on = evolve_state(saved, state, changes, check=False)
        found.append(went_on.state)
        columns += [column_name(saved, name) for name in went_on.dropped]
    states = [state for state, _ in declared]
    # What one side calls a state may be a column of the other.
    split_drop(drop, [*previous.states, *states], previous.graph.by_uid)
    whole, _ = split_drop(drop, states)
    return tuple(found), whole, columns


def _with_changes(
    flow: Steps,
    graph: JobGraph,
    previous: Record | None,
    drop: Collection[str],
    *,
    unaligned: bool,
    finished: Collection[str] = (),
    logged: Collection[str] = (),
) -> Iterator[tuple[State, Changes]]:
    """Yield the states as declared, with the changes of columns by the program and ``drop``."""
    saved = previous.by_state if previous is not None else {}
    over = finished_in(previous) | frozenset(finished)
    found: dict[tuple[str, str], tuple[State, Changes]] = {}
    for step in flow.steps.values():
        edges = [edge for edge in graph.edges if edge.target == step.uid]
        ended = step.uid in over
        of_driver = (ENUMERATOR, ENUMERATOR_LOG, COORDINATOR) if ended else ()
        kept = [saved[step.uid, name] for name in of_driver if (step.uid, name) in saved]
        declared = _declared(step, edges, unaligned=unaligned, ended=ended, logged=logged)
        for state, changes in (*((state, Changes()) for state in kept), *declared):
            key = (state.operator, state.name)
            if key in found:
                raise InvalidInput(f"operator {step.uid!r} declares two states named {state.name!r}. Rename one.")
            found[key] = (state, changes)
    _, columns = split_drop(drop, [state for state, _ in found.values()])
    for key, (state, changes) in found.items():
        yield state, replace(changes, drops=changes.drops | columns.get(key, frozenset()))


def _predecessor(state: State, previous: Record | None) -> State | None:
    """Return the saved state that continues as this one; None if it was of another sort."""
    saved = None if previous is None else previous.by_state.get((state.operator, state.name))
    if saved is None or (saved.mode, saved.kind, saved.clock, saved.key_columns, saved.edge) != (
        state.mode,
        state.kind,
        state.clock,
        state.key_columns,
        state.edge,
    ):
        return None
    return saved


def finished_in(previous: Record | None) -> frozenset[str]:
    """Return the uids of the operators that have finished in a checkpoint."""
    operators = previous.graph.operators if previous is not None else ()
    return frozenset(operator.uid for operator in operators if operator.status is Status.FULLY_FINISHED)


def _declared(
    step: Step, edges: list[Edge], *, unaligned: bool, ended: bool, logged: Collection[str]
) -> Iterator[tuple[State, Changes]]:
    logic = step.logic
    if not isinstance(logic, Source):
        _check_broadcast(step, logic, edges)
        for state, changes in _own(step, logic):
            if state.mode is Mode.KEYED:
                _check_keys(state, step, edges)
            yield state, changes
    for state in _of_the_runtime(step, edges, unaligned=unaligned, ended=ended, logged=logged):
        yield state, Changes()


def _of_the_runtime(
    step: Step, edges: list[Edge], *, unaligned: bool, ended: bool, logged: Collection[str]
) -> Iterator[State]:
    uid, logic = step.uid, step.logic
    if isinstance(logic, Source):
        yield declare.even_split_state(uid, SPLITS, columns=SPLITS_SCHEMA)
        if not ended:
            enumerator = logic.enumerator()
            yield declare.coordinator_state(uid, ENUMERATOR, columns=_columns(uid, "enumerator", enumerator))
            if enumerator.log_columns is not None:
                yield declare.even_split_state(uid, ENUMERATOR_LOG, columns=enumerator.log_columns)
        return
    yield declare.progress_state(uid, PROGRESS)
    coordinator = None if ended else logic.coordinator()
    if coordinator is not None:
        columns = as_schema(_columns(uid, "coordinator", coordinator))
        yield declare.coordinator_state(uid, COORDINATOR, columns=_with_messages(uid, columns))
    if isinstance(logic, TwoPhaseCommitSink):
        if getattr(logic, "committable_columns", None) is None:
            raise InvalidInput(f"sink {uid!r} has no committable_columns. Say what prepare_commit returns.")
        yield declare.committables_state(uid, COMMITTABLES, columns=logic.committable_columns)
    for edge in edges:
        if edge.feedback or may_overtake(edge, unaligned=unaligned) or edge.id in logged:
            yield _in_flight(edge, step.inputs[edge.input].schema)


def _columns(uid: str, hook: str, made: object) -> Columns:
    """Return the columns of an enumerator or coordinator."""
    columns: Columns | None = getattr(made, "columns", None)
    if columns is None:
        raise InvalidInput(
            f"{hook}() of {uid!r} returned {type(made).__name__}, which has no columns. Say there what its snapshot "
            "returns."
        )
    return columns


def _own(step: Step, logic: Operator) -> Iterator[tuple[State, Changes]]:
    declared: object = logic.states(*(item.schema for item in step.inputs))
    descriptors: list[Any] = list(declared) if isinstance(declared, Iterable) else [None]
    wrong = [item for item in descriptors if not hasattr(item, "declare")]
    if wrong:
        raise InvalidInput(
            f"states() of operator {step.uid!r} returned {declared!r}. Return a list of what dataflow.descriptors has, "
            "empty for none."
        )
    for descriptor in descriptors:
        if descriptor.name in _RESERVED or descriptor.name.startswith(IN_FLIGHT):
            raise InvalidInput(
                f"state {descriptor.name!r} of operator {step.uid!r} has a name of the runtime's own "
                f"({', '.join(_RESERVED)}, and those that begin with {IN_FLIGHT!r}). Rename it."
            )
        try:
            state = descriptor.declare(step.uid)
            changes = getattr(descriptor, "changes", Changes())
        except InvalidInput as error:
            raise InvalidInput(
                f"state {descriptor.name!r} of operator {step.uid!r} cannot be declared: {error}",
                kind=error.kind,
                operator=step.uid,
                state=descriptor.name,
            ) from error
        yield state, changes


def _with_messages(uid: str, columns: pa.Schema) -> pa.Schema:
    taken = sorted({*columns.names} & {*MESSAGE_SCHEMA.names})
    if taken:
        raise InvalidInput(f"the coordinator of {uid!r} has columns {taken}, in which messages are kept. Rename them.")
    # Rows with a message hold null in the coordinator's own columns.
    return pa.schema([*(item.with_nullable(True) for item in columns), *MESSAGE_SCHEMA])


def _in_flight(edge: Edge, schema: pa.Schema) -> State:
    wrong = [name for name in schema.names if name.startswith("_")]
    why = "is a feedback edge" if edge.feedback else f"is a {edge.partitioner} edge of an unaligned job"
    what = f"records of edge {edge.id!r}, which {why}, may become part of a checkpoint"
    if wrong:
        raise InvalidInput(f"{what}; their columns {wrong} begin with '_', as the format's own do. Rename them.")
    keys = pa.schema([schema.field(name) for name in edge.key_columns])
    rest = pa.schema([item for item in schema if item.name not in edge.key_columns])
    try:
        return declare.in_flight_state(edge.target, in_flight_name(edge.id), edge=edge.id, columns=rest, keys=keys)
    except InvalidInput as error:
        raise InvalidInput(f"{what}: {error}", kind=error.kind, edge=edge.id) from error


def _check_broadcast(step: Step, logic: Operator, edges: Iterable[Edge]) -> None:
    """Check broadcast inputs: sent otherwise, some subtasks would silently miss rows."""
    for edge in edges:
        if edge.input in logic.broadcast_inputs and edge.partitioner is not Partitioner.BROADCAST:
            raise InvalidInput(
                f"operator {step.uid!r} needs all of its input {edge.input} in every subtask, but {edge.source!r} "
                f"sends it by {edge.partitioner}. Call broadcast on that stream.",
                operator=step.uid,
            )


def _check_keys(state: State, step: Step, edges: Iterable[Edge]) -> None:
    """Check that a state's key columns have the types of the input's, in the same order."""
    hashed = [edge for edge in edges if edge.partitioner is Partitioner.HASH]
    if not hashed:
        raise InvalidInput(
            f"operator {step.uid!r} declares keyed state {state.name!r}, but none of its inputs is keyed, so the "
            "records of a key may be in any subtask. Call key_by on the stream before it.",
            operator=step.uid,
        )
    own = [item.type for item in state.current.fields if item.name in state.key_columns]
    for edge in hashed:
        schema = step.inputs[edge.input].schema
        keys = pa.schema([schema.field(name) for name in edge.key_columns])
        if _key_types(keys) != own:
            wanted = [str(arrow_type(kind)) for kind in own]
            raise InvalidInput(
                f"keyed state {state.name!r} of operator {step.uid!r} has keys {list(state.key_columns)} of types "
                f"{wanted}, and input {edge.input} is keyed by {keys.names} of types "
                f"{[str(item.type) for item in keys]}, which hash to others. Declare the state with the types of the "
                "input, or cast the columns of the input.",
                kind=ErrorKind.SCHEMA_MISMATCH,
                operator=step.uid,
            )


def _key_types(keys: pa.Schema) -> list[FieldType]:
    # Under other names than in the state; ids are given alike, since keys come first there.
    return [item.type for item in make_fields(keys, defaults={})[0]]


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
