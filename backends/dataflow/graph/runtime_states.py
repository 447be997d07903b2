"""The states of a dataflow's operators: those that users declare, and the runtime's own.

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

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from stateformat import states as declare
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import Edge, JobGraph, Partitioner, Status
from stateformat.model import FieldType, Mode, Record, State
from stateformat.schema import arrow_type, make_fields
from stateformat.states import Changes, Columns, as_schema, column_name, evolve_state, new_state, split_drop

from ..api import Operator, Source, TwoPhaseCommitSink
from ..steps import Step, Steps

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
