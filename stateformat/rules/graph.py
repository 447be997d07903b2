"""The invariants of operators, edges and states by themselves (SPEC.md sections 3.4 to 3.7).

Every function here returns the problems it finds, and never raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeVar

import pyarrow as pa

from ..errors import ErrorKind, InvalidInput
from ..graph import Edge, JobGraph, Operator, Partitioner, Status, SubtaskSet
from ..keys import check_key_types, check_parallelism
from ..model import Field, Kind, Mode, RescaledFrom, State
from ..problems import ADVICE_BEFORE, Problem
from ..schema import MAX_NESTING, arrow_field, children, default_scalar
from ..states import evolution_faults
from ..ttl import TTL_COLUMN
from .statuses import Unequal, cycle, saved_statuses, unequal_parallelism, unfit_predecessors

_T = TypeVar("_T")

_STATUS = ErrorKind.STATUS_CONTRADICTION
_GRAPH = ErrorKind.INVALID_GRAPH
_SCHEMA = ErrorKind.SCHEMA_MISMATCH


def check_graph(graph: JobGraph) -> list[Problem]:
    """Check operators and edges (sections 3.4 and 3.5)."""
    problems = []
    for uid, count in _repeated(operator.uid for operator in graph.operators):
        problems.append(
            Problem(_GRAPH, "SPEC 3.2", f"operator uid {uid!r} is {count} times in the graph", operator=uid)
        )
    for edge_id, count in _repeated(edge.id for edge in graph.edges):
        problems.append(Problem(_GRAPH, "SPEC 3.2", f"edge id {edge_id!r} is {count} times in the graph"))
    for operator in graph.operators:
        problems += _operator(operator)
    for edge in graph.edges:
        problems += _edge(edge, graph)
    statuses = {operator.uid: operator.status for operator in graph.operators}
    problems += [_unequal(found) for found in unequal_parallelism(graph, statuses)]
    circle = cycle(graph)
    if circle:
        message = f"the graph has a cycle without a feedback edge: {' → '.join(circle)}"
        problems.append(Problem(_GRAPH, "SPEC 3.5", message))
    return problems


def _repeated(values: Iterable[_T]) -> Iterator[tuple[_T, int]]:
    return ((value, count) for value, count in Counter(values).items() if count > 1)


def check_statuses(graph: JobGraph, rescaled_from: RescaledFrom | None) -> list[Problem]:
    """Check that the predecessors of finished operators have finished enough (section 3.5)."""
    statuses = saved_statuses(graph, rescaled_from)
    return [
        Problem(_STATUS, "SPEC 3.5", str(unfit), ADVICE_BEFORE, operator=unfit.operator.uid)
        for unfit in unfit_predecessors(graph, statuses)
    ]


def _operator(operator: Operator) -> Iterator[Problem]:
    uid = operator.uid
    if not uid:
        yield Problem(_GRAPH, "SPEC 3.4", "an operator has an empty uid")
    try:
        check_parallelism(operator.parallelism, operator.max_parallelism or 0, operator=uid)
    except InvalidInput as error:
        yield Problem(ErrorKind.INVALID_PARALLELISM, "SPEC 3.4", str(error), operator=uid)
    if not operator.key_hash:
        yield Problem(_GRAPH, "SPEC 3.4", f"operator {uid!r} names no key hash", operator=uid)
    for name, subtasks in (("finished", operator.finished), ("finishing", operator.finishing)):
        if not _legal_ranges(subtasks, operator.parallelism):
            message = (
                f"the {name} subtasks of operator {uid!r} are {list(subtasks.ranges)}, which are not sorted, disjoint, "
                f"non-adjacent ranges within 0 to {operator.parallelism - 1}"
            )
            yield Problem(_STATUS, "SPEC 3.4", message, operator=uid)
    if operator.finished and operator.finishing:
        both = SubtaskSet.of({*operator.finished} & {*operator.finishing})
        if both:
            message = f"subtasks {both} of operator {uid!r} are both finished and finishing"
            yield Problem(_STATUS, "SPEC 3.4", message, operator=uid)


def _legal_ranges(subtasks: SubtaskSet, parallelism: int) -> bool:
    after = 0
    for first, last in subtasks.ranges:
        if not after <= first <= last < parallelism:
            return False
        after = last + 2
    return True


def _unequal(found: Unequal) -> Problem:
    clause = "SPEC 3.5" if found.what.startswith("forward") else "SPEC 3.4"
    return Problem(_GRAPH, clause, str(found), operator=found.members[-1].uid)


def _edge(edge: Edge, graph: JobGraph) -> Iterator[Problem]:
    ends = [graph.by_uid.get(uid) for uid in (edge.source, edge.target)]
    for uid, end in zip((edge.source, edge.target), ends, strict=True):
        if end is None:
            message = f"edge {edge.id!r} ends at operator {uid!r}, which the graph does not have"
            yield Problem(ErrorKind.UNKNOWN_OPERATOR, "SPEC 3.5", message, operator=uid)
    if not edge.id:
        yield Problem(_GRAPH, "SPEC 3.5", f"the edge from {edge.source!r} to {edge.target!r} has an empty id")
    if edge.input < 0:
        yield Problem(_GRAPH, "SPEC 3.5", f"edge {edge.id!r} feeds input {edge.input}; inputs are from 0")
    if edge.key_columns and edge.partitioner is not Partitioner.HASH:
        message = f"edge {edge.id!r} is {edge.partitioner} and has key columns {list(edge.key_columns)}"
        yield Problem(_GRAPH, "SPEC 3.5", message)


# ---- states --------------------------------------------------------------------------------------


def check_states(graph: JobGraph, states: Sequence[State]) -> list[Problem]:
    """Check states and their schemas (sections 3.6 and 3.7)."""
    problems = []
    for (uid, name), count in _repeated((state.operator, state.name) for state in states):
        message = f"state {name!r} of operator {uid!r} is declared {count} times"
        problems.append(Problem(ErrorKind.INVALID_ARGUMENT, "SPEC 3.2", message, operator=uid, state=name))
    single = (Mode.COORDINATOR, Mode.PROGRESS)
    for (uid, mode), count in _repeated((state.operator, state.mode) for state in states if state.mode in single):
        message = f"operator {uid!r} has {count} states of mode {mode}; at most one is allowed"
        problems.append(Problem(ErrorKind.STATE_NOT_ALLOWED, "SPEC 3.6", message, operator=uid))
    for edge, count in _repeated(state.edge for state in states if state.mode is Mode.IN_FLIGHT):
        message = f"edge {edge!r} has {count} in-flight states; at most one is allowed"
        problems.append(Problem(ErrorKind.STATE_NOT_ALLOWED, "SPEC 3.6", message))
    for state in states:
        problems += _in_graph(state, graph)
        problems += _alone(state)
    return problems


def _problem(state: State, kind: ErrorKind, clause: str, what: str) -> Problem:
    message = f"state {state.name!r} of operator {state.operator!r} {what}"
    return Problem(kind, clause, message, operator=state.operator, state=state.name)


def _in_graph(state: State, graph: JobGraph) -> Iterator[Problem]:
    operator = graph.by_uid.get(state.operator)
    if operator is None:
        yield _problem(state, ErrorKind.UNKNOWN_OPERATOR, "SPEC 3.6", "belongs to an operator that the graph lacks")
    elif state.mode is Mode.COORDINATOR and not operator.coordinator:
        what = "is of mode coordinator, but the operator has no coordinator"
        yield _problem(state, ErrorKind.STATE_NOT_ALLOWED, "SPEC 3.6", what)
    elif state.mode is Mode.UNION and operator.status is Status.PARTIALLY_FINISHED:
        done = f"subtasks {operator.done} of {operator.parallelism} have finished"
        what = f"is union state, but {done}: their entries are lost"
        found = _problem(state, ErrorKind.UNION_PARTIALLY_FINISHED, "SPEC 4.6", what)
        yield replace(found, advice=ADVICE_BEFORE)
    if state.mode is not Mode.IN_FLIGHT or state.edge is None:
        return
    edge = graph.by_edge.get(state.edge)
    if edge is None or edge.target != state.operator:
        what = f"holds records in flight on edge {state.edge!r}, which is not an edge into its operator"
        yield _problem(state, _GRAPH, "SPEC 3.6", what)
    elif (edge.partitioner is Partitioner.HASH) is not bool(state.key_columns):
        what = f"is in flight on a {edge.partitioner} edge and has key columns {list(state.key_columns)}"
        yield _problem(state, _SCHEMA, "SPEC 3.6", what)


@lru_cache(maxsize=4096)
def _alone(state: State) -> tuple[Problem, ...]:
    """Check a state without its graph. Cached, because every checkpoint has the same states."""
    return tuple(_declaration(state)) + tuple(_schemas(state))


def _declaration(state: State) -> Iterator[Problem]:
    if not state.name:
        yield _problem(state, ErrorKind.INVALID_ARGUMENT, "SPEC 3.6", "has an empty name")
    if (state.kind is not None) is not (state.mode is Mode.KEYED):
        what = f"is of mode {state.mode} and kind {state.kind}; kinds are for keyed"
        yield _problem(state, _SCHEMA, "SPEC 3.6", what)
    if state.clock != "event_time" and state.kind is not Kind.TIMERS:
        what = f"is of mode {state.mode} and kind {state.kind} and has the clock {state.clock}, which only timers have"
        yield _problem(state, _SCHEMA, "SPEC 6.6", what)
    if (state.edge is not None) is not (state.mode is Mode.IN_FLIGHT):
        yield _problem(state, _SCHEMA, "SPEC 3.6", f"is of mode {state.mode} and names edge {state.edge!r}")
    if state.mode is Mode.KEYED and not state.key_columns:
        yield _problem(state, _SCHEMA, "SPEC 3.6", "is keyed and has no key columns")
    if state.key_columns and state.mode not in (Mode.KEYED, Mode.IN_FLIGHT):
        yield _problem(state, _SCHEMA, "SPEC 3.6", f"is of mode {state.mode} and has key columns")
    if len(set(state.key_columns)) != len(state.key_columns):
        yield _problem(state, _SCHEMA, "SPEC 3.6", f"has a key column twice: {list(state.key_columns)}")
    if state.mode is Mode.PROGRESS and any(schema.fields for schema in state.schemas):
        yield _problem(state, _SCHEMA, "SPEC 5.1", "is progress and has fields; its columns are the format's own")
    yield from _ttl(state)
    ids = [schema.id for schema in state.schemas]
    if not ids or ids[0] < 1 or ids != sorted(set(ids)):
        yield _problem(state, _SCHEMA, "SPEC 3.6", f"has schemas {ids}; ids ascend from 1 or above")


def _ttl(state: State) -> Iterator[Problem]:
    if state.ttl is None:
        return
    times = state.ttl_field
    if state.kind not in (Kind.VALUE, Kind.MAP, Kind.LIST):
        what = f"has a ttl and is of mode {state.mode} and kind {state.kind}; rows of values, maps and lists expire"
        yield _problem(state, _SCHEMA, "SPEC 6.5", what)
    if times is None or times.type != "timestamp_us" or times.nullable or TTL_COLUMN in state.key_columns:
        what = f"has a ttl and no value column {TTL_COLUMN!r} of type timestamp_us without nulls"
        yield _problem(state, _SCHEMA, "SPEC 6.5", what)


def _schemas(state: State) -> Iterator[Problem]:
    map_key = ["_map_key"] if state.kind is Kind.MAP else []
    key = [*state.key_columns, *map_key]
    for schema in state.schemas:
        names = [item.name for item in schema.fields]
        where = f"schema {schema.id}"
        if len(set(names)) != len(names):
            yield _problem(state, _SCHEMA, "SPEC 3.6", f"has two fields of one name in {where}: {names}")
        wrong = [name for name in names if not name or (name.startswith("_") and name not in map_key)]
        if wrong:
            what = f"has fields {wrong} in {where}; such names belong to the format"
            yield _problem(state, _SCHEMA, "SPEC 3.6", what)
        missing = [name for name in key if name not in names]
        if missing:
            yield _problem(state, _SCHEMA, "SPEC 3.6", f"has no field {missing} in {where}, which is part of its key")
        ids = [item.id for item in _nested(schema.fields)]
        if len(set(ids)) != len(ids) or min(ids, default=1) < 1:
            yield _problem(state, _SCHEMA, "SPEC 3.6", f"has field ids {ids} in {where}; they are from 1 and unique")
        if max(ids, default=0) > state.last_field_id:
            what = f"has field id {max(ids)} in {where}, above its last_field_id {state.last_field_id}"
            yield _problem(state, _SCHEMA, "SPEC 3.6", what)
        yield from _types(state, schema.fields, key)
    if len(state.schemas) > 1:
        older = replace(state, schemas=state.schemas[:-1])
        for fault in _evolution(older, state):
            yield _problem(state, ErrorKind.SCHEMA_CANNOT_EVOLVE, "SPEC 5.7", f"cannot read its older schemas: {fault}")


def _types(state: State, fields: Sequence[Field], key: Sequence[str]) -> Iterator[Problem]:
    for item in fields:
        try:
            column = arrow_field(item)
            if item.name in key:
                check_key_types([column])
            if item.default is not None:
                default_scalar(item.default, item.type)
            yield from _nesting(state, item, item.name)
        except (InvalidInput, pa.ArrowException) as error:
            kind = error.kind if isinstance(error, InvalidInput) else ErrorKind.UNSUPPORTED_TYPE
            yield _problem(state, kind, "SPEC 3.7", f"has a field {item.name!r} that the format cannot hold: {error}")


def _nesting(state: State, item: Field, path: str, depth: int = 0) -> Iterator[Problem]:
    inner = children(item)
    if inner and depth >= MAX_NESTING:
        yield _problem(state, _SCHEMA, "SPEC 3.7", f"has a field {path!r} nested deeper than {MAX_NESTING}")
        return
    names = [child.name for child in inner]
    if len(set(names)) != len(names):
        yield _problem(state, _SCHEMA, "SPEC 3.6", f"has two fields of one name in {path!r}: {names}")
    for child in inner:
        if child.default is not None:
            yield _problem(state, _SCHEMA, "SPEC 3.6", f"has a default in the nested field {path}.{child.name}")
        yield from _nesting(state, child, f"{path}.{child.name}", depth + 1)


def _nested(fields: Iterable[Field]) -> Iterator[Field]:
    for item in fields:
        yield item
        yield from _nested(children(item))


def _evolution(older: State, state: State) -> list[str]:
    try:
        return evolution_faults(older, state)
    except InvalidInput:
        return []  # A type that does not exist; _types reports it.
