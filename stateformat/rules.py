"""The rules of a checkpoint that need no file (SPEC.md sections 3.4 to 5.3), each written once.

``begin`` and ``publish`` raise what they find, ``validate`` lists it, and a restore refuses for it
in words of its own (``redistribution.rules``). Nothing here raises. First come the rules of a
graph, then those of states, then those that compare handles with both.

Statuses are an argument, because a plan checks a topology with the statuses of a checkpoint; an
operator without one is new and runs. All rules of finished operators ignore feedback edges.

Handles are sorted, so the handles of a state are one run of rows, checked at once by operations on
whole arrays.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from .errors import ErrorKind, InvalidInput
from .findings import ADVICE_BEFORE, Finding, ordered
from .graph import Edge, JobGraph, Operator, OperatorId, Partitioner, Status, SubtaskSet
from .keys import MAX_PARALLELISM_LIMIT, check_key_types, check_parallelism, range_bounds
from .manifest import Ints, handle_faults, integers, runs, sharing_faults, sort_handles, state_runs, texts
from .model import PER_SUBTASK_MODES, Field, Kind, Mode, RescaledFrom, State
from .schema import MAX_NESTING, arrow_field, children, default_scalar, has_key_groups
from .states import evolution_faults
from .ttl import TTL_COLUMN

_T = TypeVar("_T")

_STATUS = ErrorKind.STATUS_CONTRADICTION
_GRAPH = ErrorKind.INVALID_GRAPH
_SCHEMA = ErrorKind.SCHEMA_MISMATCH
_NOT_ALLOWED = ErrorKind.STATE_NOT_ALLOWED


def check_content(
    graph: JobGraph, states: Sequence[State], handles: pa.Table, rescaled_from: RescaledFrom | None = None
) -> list[Finding]:
    """Return everything that is wrong with a checkpoint's content; nothing: it may be published.

    ``handles`` is a manifest's table, with or without ``inline``. Sizes of inline segments are not
    checked here: the manifest's writer does it.
    """
    found = [*check_graph(graph), *_statuses(graph, rescaled_from), *check_states(graph, states)]
    found += [*handle_faults(handles), *sharing_faults(handles)]
    # The other checks need these columns.
    if not any(handles[name].null_count for name in ("operator", "state", "mode", "layer", "schema_id", "rows")):
        found += _handles(graph, states, handles)
    return list(ordered(found))


# ---- graph ---------------------------------------------------------------------------------------


def check_graph(graph: JobGraph) -> list[Finding]:
    """Check operators and edges (sections 3.4 and 3.5)."""
    found = [*repeated_names(graph)]
    for operator in graph.operators:
        found += _operator(operator)
    for edge in graph.edges:
        found += [*missing_ends(edge, graph), *_edge(edge)]
    statuses = {operator.uid: operator.status for operator in graph.operators}
    return [*found, *unequal_parallelism(graph, statuses), *cycles(graph)]


def check_duties(graph: JobGraph) -> Iterator[Finding]:
    """Check what binds only the writer of a new checkpoint (section 3.5).

    Older checkpoints that break it can still be read, rescaled and rolled back.
    """
    if not graph.operators:
        yield Finding(_GRAPH, "SPEC 3.4", "the graph has no operators; a job has at least one")
    for edge in graph.edges:
        if edge.partitioner is Partitioner.HASH and not edge.key_columns:
            message = f"hash edge {edge.id!r} has no key columns; name those by which it sends"
            yield Finding(_GRAPH, "SPEC 3.5", message, operator=edge.target)


def _statuses(graph: JobGraph, rescaled_from: RescaledFrom | None) -> Iterator[Finding]:
    return unfit_predecessors(graph, saved_statuses(graph, rescaled_from))


def repeated_names(graph: JobGraph) -> Iterator[Finding]:
    """Find uids of operators and ids of edges that several have."""
    for uid, count in _repeated(operator.uid for operator in graph.operators):
        message = f"operator uid {uid!r} is {count} times in the graph"
        yield Finding(_GRAPH, "SPEC 3.2", message, operator=uid, details={"uid": uid})
    for edge_id, count in _repeated(edge.id for edge in graph.edges):
        message = f"edge id {edge_id!r} is {count} times in the graph"
        yield Finding(_GRAPH, "SPEC 3.2", message, details={"edge": edge_id})


def _repeated(values: Iterable[_T]) -> Iterator[tuple[_T, int]]:
    return ((value, count) for value, count in Counter(values).items() if count > 1)


def missing_ends(edge: Edge, graph: JobGraph) -> Iterator[Finding]:
    """Find the ends of an edge that are no operators of the graph."""
    for uid in (edge.source, edge.target):
        if uid not in graph.by_uid:
            message = f"edge {edge.id!r} ends at operator {uid!r}, which the graph does not have"
            details = {"edge": edge.id, "missing": uid}
            yield Finding(ErrorKind.UNKNOWN_OPERATOR, "SPEC 3.5", message, operator=uid, details=details)


def cycles(graph: JobGraph, what: str = "the graph") -> Iterator[Finding]:
    """Find one cycle without a feedback edge."""
    upstream = {target: {edge.source for edge in edges} for target, edges in inputs_by_target(graph).items()}
    try:
        TopologicalSorter(upstream).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        message = f"{what} has a cycle without a feedback edge: {' → '.join(circle)}"
        yield Finding(_GRAPH, "SPEC 3.5", message, details={"cycle": circle})


def unequal_parallelism(graph: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Finding]:
    """Find forward edges and chains of started operators that differ in parallelism."""
    for edge in graph.edges:
        ends = [graph.by_uid[uid] for uid in (edge.source, edge.target) if uid in graph.by_uid]
        if edge.partitioner is Partitioner.FORWARD and len(ends) == 2:
            yield from _unequal(f"forward edge {edge.id!r}", "SPEC 3.5", ends, statuses)
    for chain, members in chains(graph).items():
        yield from _unequal(f"chain {chain!r}", "SPEC 3.4", members, statuses)


def _unequal(what: str, clause: str, members: Sequence[Operator], statuses: Mapping[str, Status]) -> Iterator[Finding]:
    # Nothing flows into or out of operators that are not started.
    started = [operator for operator in members if statuses.get(operator.uid) is not Status.FULLY_FINISHED]
    if len({operator.parallelism for operator in started}) > 1:
        numbers = ", ".join(f"{operator.uid!r} has {operator.parallelism}" for operator in started)
        by_uid = {str(operator.uid): operator.parallelism for operator in started}
        details = {"parallelism": [*by_uid.values()], "operators": [*by_uid]}
        message = f"{what} joins operators of different parallelism: {numbers}"
        yield Finding(_GRAPH, clause, message, operator=started[-1].uid, details=details)


def saved_statuses(graph: JobGraph, rescaled_from: RescaledFrom | None) -> dict[str, Status]:
    """Return the status of every operator by uid: before a rescale, if that says more."""
    # After a rescale all subtasks of a partially finished operator run again (section 6.4).
    statuses: dict[str, Status] = {operator.uid: operator.status for operator in graph.operators}
    for former in rescaled_from.operators if rescaled_from else ():
        if statuses.get(former.uid) is Status.RUNNING and (former.finished or former.finishing):
            statuses[former.uid] = Status.PARTIALLY_FINISHED
    return statuses


def inputs_by_target(graph: JobGraph) -> dict[str, list[Edge]]:
    """Return the edges by their target, without feedback edges."""
    inputs: dict[str, list[Edge]] = defaultdict(list)
    for edge in graph.edges:
        if not edge.feedback:
            inputs[edge.target].append(edge)
    return inputs


def chains(graph: JobGraph) -> dict[str, list[Operator]]:
    """Return the operators of each chain."""
    found: dict[str, list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        if operator.chain is not None:
            found[operator.chain].append(operator)
    return found


def unfit_predecessors(graph: JobGraph, statuses: Mapping[str, Status]) -> Iterator[Finding]:
    """Find finished operators whose predecessors have not finished enough (FLIP-147).

    Every predecessor of a fully finished operator must be fully finished. So must those of a
    partially finished one over an ALL_TO_ALL edge; over POINTWISE edges alone a predecessor needs
    at least one finished subtask.
    """
    inputs = inputs_by_target(graph)
    for operator in graph.operators:
        status = statuses.get(operator.uid, Status.RUNNING)
        if status is Status.RUNNING:
            continue
        joining: dict[str, bool] = {}
        for edge in inputs.get(operator.uid, ()):
            joining[edge.source] = joining.get(edge.source, False) or edge.partitioner.all_to_all
        for source, all_to_all in joining.items():
            found = statuses.get(source)
            enough = found is Status.FULLY_FINISHED or (
                status is Status.PARTIALLY_FINISHED and not all_to_all and found is Status.PARTIALLY_FINISHED
            )
            if not enough:
                yield _unfit(operator, status, source, found, all_to_all=all_to_all)


def _unfit(operator: Operator, status: Status, source: str, found: Status | None, *, all_to_all: bool) -> Finding:
    is_what = "is new" if found is None else f"is {found.replace('_', ' ')}"
    full = status is Status.FULLY_FINISHED
    wanted = "fully finished" if full or all_to_all else "partially finished at least"
    over = "" if full else f", over {'an ALL_TO_ALL edge' if all_to_all else 'POINTWISE edges'}"
    message = (
        f"operator {operator.uid!r} is {status.replace('_', ' ')}, but its predecessor {source!r}{over} {is_what} and "
        f"would have to be {wanted}"
    )
    details = {
        "status": status.value,
        "predecessor": source,
        "predecessor_status": "new" if found is None else found.value,
        "all_to_all": all_to_all,
    }
    return Finding(_STATUS, "SPEC 3.5", message, ADVICE_BEFORE, operator=operator.uid, details=details)


def _operator(operator: Operator) -> Iterator[Finding]:
    uid = operator.uid
    if not uid:
        yield Finding(_GRAPH, "SPEC 3.4", "an operator has an empty uid")
    try:
        check_parallelism(operator.parallelism, operator.max_parallelism or 0, operator=uid)
    except InvalidInput as error:
        yield Finding(ErrorKind.INVALID_PARALLELISM, "SPEC 3.4", str(error), operator=uid)
    if not operator.key_hash:
        yield Finding(_GRAPH, "SPEC 3.4", f"operator {uid!r} names no key hash", operator=uid)
    for name, subtasks in (("finished", operator.finished), ("finishing", operator.finishing)):
        if not _legal_ranges(subtasks, operator.parallelism):
            message = (
                f"the {name} subtasks of operator {uid!r} are {list(subtasks.ranges)}, which are not sorted, disjoint, "
                f"non-adjacent ranges within 0 to {operator.parallelism - 1}"
            )
            yield Finding(_STATUS, "SPEC 3.4", message, operator=uid)
    if operator.finished and operator.finishing:
        both = SubtaskSet.of({*operator.finished} & {*operator.finishing})
        if both:
            message = f"subtasks {both} of operator {uid!r} are both finished and finishing"
            yield Finding(_STATUS, "SPEC 3.4", message, operator=uid)


def _legal_ranges(subtasks: SubtaskSet, parallelism: int) -> bool:
    after = 0
    for first, last in subtasks.ranges:
        if not after <= first <= last < parallelism:
            return False
        after = last + 2
    return True


def _edge(edge: Edge) -> Iterator[Finding]:
    if not edge.id:
        yield Finding(_GRAPH, "SPEC 3.5", f"the edge from {edge.source!r} to {edge.target!r} has an empty id")
    if edge.input < 0:
        yield Finding(_GRAPH, "SPEC 3.5", f"edge {edge.id!r} feeds input {edge.input}; inputs are from 0")
    if edge.key_columns and edge.partitioner is not Partitioner.HASH:
        message = f"edge {edge.id!r} is {edge.partitioner} and has key columns {list(edge.key_columns)}"
        yield Finding(_GRAPH, "SPEC 3.5", message)


# ---- states --------------------------------------------------------------------------------------


def check_states(graph: JobGraph, states: Sequence[State]) -> list[Finding]:
    """Check states and their schemas (sections 3.6 and 3.7)."""
    problems = []
    for (uid, name), count in _repeated((state.operator, state.name) for state in states):
        message = f"state {name!r} of operator {uid!r} is declared {count} times"
        problems.append(Finding(ErrorKind.INVALID_ARGUMENT, "SPEC 3.2", message, operator=uid, state=name))
    single = (Mode.COORDINATOR, Mode.PROGRESS)
    for (uid, mode), count in _repeated((state.operator, state.mode) for state in states if state.mode in single):
        message = f"operator {uid!r} has {count} states of mode {mode}; at most one is allowed"
        problems.append(Finding(ErrorKind.STATE_NOT_ALLOWED, "SPEC 3.6", message, operator=uid))
    for edge, count in _repeated(state.edge for state in states if state.mode is Mode.IN_FLIGHT):
        message = f"edge {edge!r} has {count} in-flight states; at most one is allowed"
        problems.append(Finding(ErrorKind.STATE_NOT_ALLOWED, "SPEC 3.6", message))
    for state in states:
        problems += _in_graph(state, graph)
        problems += _alone(state)
    return problems


def _problem(state: State, kind: ErrorKind, clause: str, what: str) -> Finding:
    message = f"state {state.name!r} of operator {state.operator!r} {what}"
    return Finding(kind, clause, message, operator=state.operator, state=state.name)


def _in_graph(state: State, graph: JobGraph) -> Iterator[Finding]:
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
def _alone(state: State) -> tuple[Finding, ...]:
    """Check a state without its graph. Cached, because every checkpoint has the same states."""
    return tuple(_declaration(state)) + tuple(_schemas(state))


def _declaration(state: State) -> Iterator[Finding]:
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


def _ttl(state: State) -> Iterator[Finding]:
    if state.ttl is None:
        return
    times = state.ttl_field
    if state.kind not in (Kind.VALUE, Kind.MAP, Kind.LIST):
        what = f"has a ttl and is of mode {state.mode} and kind {state.kind}; rows of values, maps and lists expire"
        yield _problem(state, _SCHEMA, "SPEC 6.5", what)
    if times is None or times.type != "timestamp_us" or times.nullable or TTL_COLUMN in state.key_columns:
        what = f"has a ttl and no value column {TTL_COLUMN!r} of type timestamp_us without nulls"
        yield _problem(state, _SCHEMA, "SPEC 6.5", what)


def _schemas(state: State) -> Iterator[Finding]:
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


def _types(state: State, fields: Sequence[Field], key: Sequence[str]) -> Iterator[Finding]:
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


def _nesting(state: State, item: Field, path: str, depth: int = 0) -> Iterator[Finding]:
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


# ---- handles -------------------------------------------------------------------------------------


def _handles(graph: JobGraph, states: Sequence[State], handles: pa.Table) -> Iterator[Finding]:
    """Compare handles with the graph and the states (sections 3.6, 4.3, 4.6 and 5.3)."""
    checks = HandleChecks(graph, sort_handles(handles))
    declared: dict[tuple[str, str], State] = {(state.operator, state.name): state for state in states}
    seen = set()
    for key, start, stop in state_runs(checks.handles):
        state, operator = declared.get(key), graph.by_uid.get(OperatorId(key[0]))
        if state is None or operator is None:
            known = "state" if operator is not None else "operator"
            kind = ErrorKind.UNKNOWN_STATE if operator is not None else ErrorKind.UNKNOWN_OPERATOR
            message = f"{stop - start} handles name state {key[1]!r} of operator {key[0]!r}; there is no such {known}"
            yield Finding(kind, "SPEC 4.1", message, operator=key[0], state=key[1])
            continue
        seen.add(key)
        yield from checks.problems(state, start, stop)
    for key, state in declared.items():
        if key not in seen:
            yield from checks.problems(state, 0, 0)


def _on_wrong_edge(graph: JobGraph, state: State, rows: int) -> Iterator[Finding]:
    """Report records in flight on an edge where barriers never overtake records (section 3.6)."""
    edge = graph.by_edge.get(state.edge or "")
    if not rows or edge is None or edge.feedback or edge.partitioner in (Partitioner.HASH, Partitioner.REBALANCE):
        return
    message = (
        f"state {state.name!r} of operator {state.operator!r} holds {rows:,} records in flight on {edge.partitioner} "
        f"edge {edge.id!r}; only hash, rebalance and feedback edges may hold any"
    )
    yield Finding(_NOT_ALLOWED, "SPEC 3.6", message, operator=state.operator, state=state.name)


class HandleChecks:
    """Compares handles, which are sorted, with graph and states, a state at a time.

    Their columns are converted once for all states.
    """

    def __init__(self, graph: JobGraph, handles: pa.Table) -> None:
        self.graph, self.handles = graph, handles
        names = ("subtask", "layer", "rows", "schema_id", "first_group", "last_group")
        self.numbers = {name: integers(handles[name]) for name in names}
        modes, starts = runs(handles["mode"])
        self.mode_starts, self.modes = starts, texts(modes)

    def problems(self, state: State, start: int, stop: int) -> Iterator[Finding]:
        """Check the handles of a state, rows ``start`` … ``stop`` − 1, if its operator is known."""
        operator = self.graph.by_uid.get(state.operator)
        if operator is None:
            return
        if state.mode is Mode.IN_FLIGHT:
            yield from _on_wrong_edge(self.graph, state, int(self.numbers["rows"][start:stop].sum()))
        yield from _StateHandles(operator, state, self, start, stop).problems()

    def modes_of(self, start: int, stop: int) -> set[str]:
        first = int(np.searchsorted(self.mode_starts, start, side="right")) - 1
        return set(self.modes[first : int(np.searchsorted(self.mode_starts, stop))])


class _StateHandles:
    """Checks the handles of one state: the rows ``start`` … ``stop - 1`` of all."""

    def __init__(self, operator: Operator, state: State, columns: HandleChecks, start: int, stop: int) -> None:
        self.operator = operator
        self.state = state
        self.columns = columns
        self.bounds = start, stop
        self.subtask, self.layer, self.rows, self.schema_id, self.first, self.last = (
            column[start:stop] for column in columns.numbers.values()
        )

    def problem(self, kind: ErrorKind, clause: str, what: str, subtask: int | None = None) -> Finding:
        message = f"state {self.state.name!r} of operator {self.operator.uid!r} {what}"
        owner = None if subtask is None else int(subtask)
        return Finding(kind, clause, message, operator=self.operator.uid, state=self.state.name, subtask=owner)

    def problems(self) -> Iterator[Finding]:
        if len(self.rows):
            yield from self._declared()
            yield from self._owners()
        yield from self._present()
        if has_key_groups(self.state) and self.rows.any():
            yield from self._groups()

    def _declared(self) -> Iterator[Finding]:
        state, (start, stop) = self.state, self.bounds
        modes = self.columns.modes_of(start, stop) - {state.mode.value}
        if modes:
            what = f"is {state.mode} and has handles of {sorted(modes)}"
            yield self.problem(ErrorKind.SCHEMA_MISMATCH, "SPEC 4.1", what)
        if state.mode is Mode.IN_FLIGHT:
            edges = {*runs(self.columns.handles["edge"].slice(start, stop - start))[0].to_pylist()} - {state.edge}
            if edges:
                what = f"is in flight on {state.edge!r} and has handles of {sorted(map(str, edges))}"
                yield self.problem(ErrorKind.SCHEMA_MISMATCH, "SPEC 4.1", what)
        if (self.schema_id != state.current.id).any():
            unknown = set(np.unique(self.schema_id).tolist()) - set(state.by_schema_id)
            if unknown:
                what = f"has handles of schemas {sorted(unknown)}; its schemas are {list(state.by_schema_id)}"
                yield self.problem(ErrorKind.SCHEMA_MISMATCH, "SPEC 4.1", what)

    @cached_property
    def reporters(self) -> Reporters:
        return reporters(self.operator, self.subtask, self.layer)

    def _owners(self) -> Iterator[Finding]:
        operator, mode = self.operator, self.state.mode
        if mode is Mode.COMMITTABLES:
            return
        if operator.status is Status.FULLY_FINISHED:
            what = f"is {mode} and has {len(self.rows)} handles, but its operator is fully finished"
            yield self.problem(_NOT_ALLOWED, "SPEC 4.6", what)
            return
        if mode is Mode.COORDINATOR:
            return
        outside, ended, _ = self.reporters
        for subtasks, what in ((operator.finished, "finished"), (operator.finishing, "finishing")):
            found = subtasks & ended
            if found:
                message = f"has handles of subtasks {found}, which are {what} and may contribute committables only"
                yield self.problem(_NOT_ALLOWED, "SPEC 4.6", message, found.ranges[0][0])
        beyond = SubtaskSet.of(subtask for subtask in outside if subtask >= 0)
        if beyond:
            message = f"has handles of subtasks {beyond}; its operator has 0 to {operator.parallelism - 1}"
            yield self.problem(ErrorKind.INVALID_PARALLELISM, "SPEC 4.1", message, beyond.ranges[0][0])

    def _present(self) -> Iterator[Finding]:
        operator, mode = self.operator, self.state.mode
        if mode is Mode.COORDINATOR and operator.status is not Status.FULLY_FINISHED and len(self.rows) != 1:
            kind = _NOT_ALLOWED if len(self.rows) else ErrorKind.STATE_MISSING
            what = f"is the coordinator's and has {len(self.rows)} handles, not one"
            yield self.problem(kind, "SPEC 4.6", what)
        found = self.reporters.missing
        if mode in PER_SUBTASK_MODES and found:
            what = f"has no handle of layer 0 for running subtasks {found}; each reports one, even with 0 rows"
            yield self.problem(ErrorKind.STATE_MISSING, "SPEC 4.6", what, found.ranges[0][0])

    def _groups(self) -> Iterator[Finding]:
        grouped = np.flatnonzero((self.rows > 0) & (self.first >= 0) & (self.last >= self.first))
        subtask, layer, first, last = (column[grouped] for column in (self.subtask, self.layer, self.first, self.last))
        moved, shared = misplaced_groups(self.operator, subtask, layer, first, last)
        if len(moved):
            at = int(moved[0])
            i = int(subtask[at])
            low, high = owned_groups(self.operator, i)
            what = (
                f"has key groups {first[at]} to {last[at]} at subtask {i}, which owns {low} to {high} ({len(moved)} "
                "such handles)"
            )
            yield self.problem(_NOT_ALLOWED, "SPEC 5.3", what, i)
        if len(shared):
            at = int(shared[0])
            what = (
                f"has key group {first[at]} in two handles of subtask {subtask[at]}, layer {layer[at]} ({len(shared)} "
                "such pairs)"
            )
            yield self.problem(_NOT_ALLOWED, "SPEC 4.3", what, int(subtask[at]))


class Reporters(NamedTuple):
    """Which subtasks have handles of a state, against those that owe one (section 4.6)."""

    outside: SubtaskSet
    """Those that have some, though the operator has no such subtasks."""
    ended: SubtaskSet
    """Those that have some, though they are finished or finishing."""
    missing: SubtaskSet
    """Those that run and have none of layer 0."""


def reporters(operator: Operator, subtask: Ints, layer: Ints) -> Reporters:
    """Return which subtasks have handles of a state; ``subtask`` and ``layer`` are the handles'."""
    count = min(max(operator.parallelism, 0), MAX_PARALLELISM_LIMIT)
    inside = (subtask >= 0) & (subtask < count)
    reporting, based, done = (np.zeros(count, np.bool_) for _ in range(3))
    reporting[subtask[inside]] = True
    based[subtask[inside & (layer == 0)]] = True
    for first, last in (*operator.finished.ranges, *operator.finishing.ranges):
        done[max(first, 0) : max(last + 1, 0)] = True
    legal = count == operator.parallelism
    return Reporters(
        SubtaskSet.of(subtask[~inside].tolist()),
        SubtaskSet.of(np.flatnonzero(reporting & done).tolist()),
        SubtaskSet.of(np.flatnonzero(~based & ~done).tolist() if legal else ()),
    )


def misplaced_groups(operator: Operator, subtask: Ints, layer: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return the handles with groups of another subtask (5.3), and those that share one (4.3).

    The columns are those of handles with rows. Two handles of one subtask and layer may not have
    the same group; the second is returned.
    """
    count, none = operator.parallelism, np.zeros(0, np.int64)
    try:
        bounds = range_bounds(count, operator.max_parallelism or 0)
    except InvalidInput:
        return none, none  # The check of the operator reports this.
    known = np.flatnonzero((subtask >= 0) & (subtask < count))
    if len(known) < len(subtask):
        subtask, layer, first, last = (column[known] for column in (subtask, layer, first, last))
    moved = known[(first < bounds[subtask]) | (last >= bounds[subtask + 1])]
    together = (subtask[1:] == subtask[:-1]) & (layer[1:] == layer[:-1])
    if not (together & (first[1:] <= last[:-1])).any():
        # Handles come by subtask and layer, and mostly by group too: sorting a million is slow.
        return moved, none
    order = np.lexsort((first, layer, subtask))
    before, after = order[:-1], order[1:]
    together = (subtask[after] == subtask[before]) & (layer[after] == layer[before])
    return moved, known[after[together & (first[after] <= last[before])]]


def owned_groups(operator: Operator, subtask: int) -> tuple[int, int]:
    """Return the first and last key group of a subtask."""
    bounds = range_bounds(operator.parallelism, operator.max_parallelism or 0)
    return int(bounds[subtask]), int(bounds[subtask + 1]) - 1
