"""Which states the operators of a dataflow have: what users declare, and what the runtime keeps of its own.

======================  ============  =====================================================================================
of                      name          what
======================  ============  =====================================================================================
source                  `splits`      even split: ``split_id`` utf8, ``payload`` binary, ``position`` int64, ``watermark`` int64 (nullable)
source                  `enumerator`  coordinator: the enumerator's columns
operator with inputs    `progress`    progress, one row per edge
with a coordinator      `coordinator` its columns, then ``message_from`` int32 and ``message`` binary, which are null in rows of its own
two-phase-commit sink   `committables` its ``committable_columns``
edge                    `in-flight …` the edge's columns, those of its key first: feedback edges, and hash and rebalance when unaligned
======================  ============  =====================================================================================

A program declares its states anew each time it is started, and field ids follow names (SPEC.md section 5.7). So whoever
restores gives the record of the checkpoint as ``previous``: without it a column that was put before another would be taken for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

import stateformat as sf
from backends.dataflow.api import Dataflow, Operator, Source, Step, TwoPhaseCommitSink
from stateformat.declare import Columns, as_schema
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.evolution import evolve
from stateformat.model import Edge, Field, FieldType, JobGraph, Mode, Partitioner, Record, State, Status
from stateformat.schema import arrow_type, children, make_fields

SPLITS: Final = "splits"
ENUMERATOR: Final = "enumerator"
PROGRESS: Final = "progress"
COORDINATOR: Final = "coordinator"
COMMITTABLES: Final = "committables"
IN_FLIGHT: Final = "in-flight "
"""What the name of an edge's in-flight state begins with; the id of the edge follows."""

SPLITS_SCHEMA: Final = pa.schema(
    [
        pa.field("split_id", pa.string(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("position", pa.int64(), nullable=False),
        pa.field("watermark", pa.int64()),
    ]
)
"""The splits that a reader holds, each with where it is read next and the event time (µs) that it has come to."""

MESSAGE_SCHEMA: Final = pa.schema([pa.field("message_from", pa.int32()), pa.field("message", pa.binary())])
"""Behind a coordinator's own columns: messages of subtasks that were under way, one a row."""

_RESERVED: Final = (SPLITS, ENUMERATOR, PROGRESS, COORDINATOR, COMMITTABLES)


def in_flight_name(edge_id: str) -> str:
    """The name of the in-flight state of an edge."""
    return IN_FLIGHT + edge_id


def may_overtake(edge: Edge, *, unaligned: bool) -> bool:
    """Whether barriers overtake the records of an edge."""
    return unaligned and not edge.feedback and edge.partitioner in (Partitioner.HASH, Partitioner.REBALANCE)


def states_of(
    flow: Dataflow,
    graph: JobGraph,
    *,
    unaligned: bool,
    previous: Record | None = None,
    planned: bool = True,
    finished: Collection[str] = (),
) -> tuple[State, ...]:
    """Every state of a dataflow, in order of its steps. ``graph`` is that of ``graph_of``, or a plan's topology.

    ``previous``: the record of the checkpoint that is restored; a state that it has goes on from there, its fields matched
    by name. One that cannot evolve: ``planned`` False, as for a plan, which refuses it if anything of it is to be read; True, when
    nothing is, it begins anew. ``finished``: operators that have finished, besides those that ``previous`` says; their coordinators
    and enumerators are not made, so their states are those of ``previous``. Raises ``InvalidInput`` for states that contradict each other or their edges.
    """
    saved = previous.by_state if previous is not None else {}
    over = finished_in(previous) | frozenset(finished)
    found: dict[tuple[str, str], State] = {}
    for step in flow.steps.values():
        edges = [edge for edge in graph.edges if edge.target == step.uid]
        ended = step.uid in over
        kept = [saved[step.uid, name] for name in (ENUMERATOR, COORDINATOR) if ended and (step.uid, name) in saved]
        for state in (*kept, *_declared(step, edges, unaligned=unaligned, ended=ended)):
            key = (state.operator, state.name)
            if key in found:
                raise InvalidInput(f"operator {step.uid!r} declares two states named {state.name!r}; rename one")
            found[key] = _evolved(state, saved.get(key), planned=planned)
    return tuple(found.values())


def finished_in(previous: Record | None) -> frozenset[str]:
    """The uids of the operators that have finished in a checkpoint."""
    operators = previous.graph.operators if previous is not None else ()
    return frozenset(operator.uid for operator in operators if operator.status is Status.FULLY_FINISHED)


def _declared(step: Step, edges: list[Edge], *, unaligned: bool, ended: bool) -> Iterator[State]:
    uid, logic = step.uid, step.logic
    if isinstance(logic, Source):
        yield sf.even_split_state(uid, SPLITS, columns=SPLITS_SCHEMA)
        if not ended:
            yield sf.coordinator_state(uid, ENUMERATOR, columns=_columns(uid, "enumerator", logic.enumerator()))
        return
    _check_broadcast(step, logic, edges)
    for state in _own(step, logic):
        if state.mode is Mode.KEYED:
            _check_keys(state, step, edges)
        yield state
    yield sf.progress_state(uid, PROGRESS)
    coordinator = None if ended else logic.coordinator()
    if coordinator is not None:
        columns = as_schema(_columns(uid, "coordinator", coordinator))
        yield sf.coordinator_state(uid, COORDINATOR, columns=_with_messages(uid, columns))
    if isinstance(logic, TwoPhaseCommitSink):
        if getattr(logic, "committable_columns", None) is None:
            raise InvalidInput(f"sink {uid!r} has no committable_columns; say what prepare_commit returns")
        yield sf.committables_state(uid, COMMITTABLES, columns=logic.committable_columns)
    for edge in edges:
        if edge.feedback or may_overtake(edge, unaligned=unaligned):
            yield _in_flight(edge, step.inputs[edge.input].schema)


def _columns(uid: str, hook: str, made: object) -> Columns:
    """The columns of what keeps rows in the driver."""
    columns: Columns | None = getattr(made, "columns", None)
    if columns is None:
        raise InvalidInput(
            f"{hook}() of {uid!r} returned {type(made).__name__}, which has no columns; it says there what its snapshot returns"
        )
    return columns


def _own(step: Step, logic: Operator) -> Iterator[State]:
    declared: object = logic.states(*(item.schema for item in step.inputs))
    descriptors: list[Any] = list(declared) if isinstance(declared, Iterable) else [None]
    wrong = [item for item in descriptors if not hasattr(item, "declare")]
    if wrong:
        raise InvalidInput(
            f"states() of operator {step.uid!r} returned {declared!r}; it returns a list of what dataflow.descriptors has, empty "
            "for none"
        )
    for descriptor in descriptors:
        if descriptor.name in _RESERVED or descriptor.name.startswith(IN_FLIGHT):
            raise InvalidInput(
                f"state {descriptor.name!r} of operator {step.uid!r} has a name of the runtime's own ({', '.join(_RESERVED)}, "
                f"and those that begin with {IN_FLIGHT!r}); rename it"
            )
        try:
            state = descriptor.declare(step.uid)
        except InvalidInput as error:
            raise InvalidInput(
                f"state {descriptor.name!r} of operator {step.uid!r} cannot be declared: {error}",
                kind=error.kind,
                operator=step.uid,
                state=descriptor.name,
            ) from error
        yield state


def _with_messages(uid: str, columns: pa.Schema) -> pa.Schema:
    taken = sorted({*columns.names} & {*MESSAGE_SCHEMA.names})
    if taken:
        raise InvalidInput(f"the coordinator of {uid!r} has columns {taken}, in which messages are kept; rename them")
    # Rows with a message hold null in the coordinator's own columns.
    return pa.schema([*(item.with_nullable(True) for item in columns), *MESSAGE_SCHEMA])


def _in_flight(edge: Edge, schema: pa.Schema) -> State:
    wrong = [name for name in schema.names if name.startswith("_")]
    why = "is a feedback edge" if edge.feedback else f"is a {edge.partitioner} edge of an unaligned job"
    what = f"records of edge {edge.id!r}, which {why}, may become part of a checkpoint"
    if wrong:
        raise InvalidInput(f"{what}; their columns {wrong} begin with '_', as the format's own do: rename them")
    keys = pa.schema([schema.field(name) for name in edge.key_columns])
    rest = pa.schema([item for item in schema if item.name not in edge.key_columns])
    try:
        return sf.in_flight_state(edge.target, in_flight_name(edge.id), edge=edge.id, columns=rest, keys=keys)
    except InvalidInput as error:
        raise InvalidInput(f"{what}: {error}", kind=error.kind, edge=edge.id) from error


def _check_broadcast(step: Step, logic: Operator, edges: Iterable[Edge]) -> None:
    """What every subtask must see whole must reach every subtask: sent otherwise, rows would be missed without a word."""
    for edge in edges:
        if edge.input in logic.broadcast_inputs and edge.partitioner is not Partitioner.BROADCAST:
            raise InvalidInput(
                f"operator {step.uid!r} needs all of its input {edge.input} in every subtask, but {edge.source!r} sends it by "
                f"{edge.partitioner}; call broadcast on that stream",
                operator=step.uid,
            )


def _check_keys(state: State, step: Step, edges: Iterable[Edge]) -> None:
    """Keyed state must be keyed as the records come: by columns of the same types in the same order."""
    hashed = [edge for edge in edges if edge.partitioner is Partitioner.HASH]
    if not hashed:
        raise InvalidInput(
            f"operator {step.uid!r} declares keyed state {state.name!r}, but none of its inputs is keyed, so the records of a "
            "key may be in any subtask; call key_by on the stream before it",
            operator=step.uid,
        )
    own = [item.type for item in state.current.fields if item.name in state.key_columns]
    for edge in hashed:
        schema = step.inputs[edge.input].schema
        keys = pa.schema([schema.field(name) for name in edge.key_columns])
        if _key_types(keys) != own:
            wanted = [str(arrow_type(kind)) for kind in own]
            raise InvalidInput(
                f"keyed state {state.name!r} of operator {step.uid!r} has keys {list(state.key_columns)} of types {wanted}, and "
                f"input {edge.input} is keyed by {keys.names} of types {[str(item.type) for item in keys]}; they hash apart, so "
                "declare the state with the types of the input, or cast the columns of the input",
                kind=ErrorKind.SCHEMA_MISMATCH,
                operator=step.uid,
            )


def _key_types(keys: pa.Schema) -> list[FieldType]:
    # Under other names than in the state; ids are given alike, since keys come first there.
    return [item.type for item in make_fields(keys, defaults={})[0]]


def _evolved(state: State, saved: State | None, *, planned: bool) -> State:
    """The state as what has become of the saved one. Where it is another sort of state, planning refuses it."""
    if saved is None:
        return state
    shape = (state.mode, state.kind, state.key_columns, state.edge)
    if (saved.mode, saved.kind, saved.key_columns, saved.edge) != shape:
        return state
    try:
        return evolve(saved, pa.schema([_arrow(item) for item in state.current.fields]), check=planned)
    except InvalidState:
        return state  # It was given up, or its operator has finished, or it was empty.


def _arrow(item: Field) -> pa.Field:
    """The field as it was declared, nullable or not, nested ones too."""
    if isinstance(item.type, str):
        dtype = arrow_type(item.type)
    else:
        # Only the type that it is: a map of what a struct has may be none, for its keys would be null.
        make: Mapping[str, Callable[..., pa.DataType]] = {
            "struct": lambda *inner: pa.struct(inner),
            "list": pa.list_,
            "map": pa.map_,
        }
        dtype = make[item.type[0]](*(_arrow(child) for child in children(item)))
    return pa.field(item.name, dtype, nullable=item.nullable)


__all__ = [
    "COMMITTABLES",
    "COORDINATOR",
    "ENUMERATOR",
    "MESSAGE_SCHEMA",
    "PROGRESS",
    "SPLITS",
    "SPLITS_SCHEMA",
    "finished_in",
    "in_flight_name",
    "may_overtake",
    "states_of",
]
