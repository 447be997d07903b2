"""The invariants of a checkpoint's content (SPEC.md 3.4 to 4.6): graph, states, handles.

The same function checks a checkpoint before it is published and after it is read. Handles are
sorted, so the handles of a state are one run of rows, checked at once by operations on whole
arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import ErrorKind
from ..graph import JobGraph, Operator, OperatorId, Partitioner, Status, SubtaskSet
from ..keys import check_parallelism, range_bounds
from ..manifest import Ints, Mask, handle_faults, integers, runs, sharing_faults, sort_handles, state_runs, texts
from ..model import PER_SUBTASK_MODES, Mode, RescaledFrom, State
from ..problems import Problem, ordered
from ..schema import has_key_groups
from .graph import check_graph, check_states, check_statuses

_NOT_ALLOWED = ErrorKind.STATE_NOT_ALLOWED


def check_content(
    graph: JobGraph, states: Sequence[State], handles: pa.Table, rescaled_from: RescaledFrom | None = None
) -> list[Problem]:
    """Return every problem of a checkpoint's content; none means that it may be published.

    ``handles`` is a manifest's table, with or without ``inline``. Sizes of inline segments are not
    checked here: the manifest's writer does it. Never raises.
    """
    problems = [*check_graph(graph), *check_statuses(graph, rescaled_from), *check_states(graph, states)]
    problems += [
        Problem(fault.kind, fault.clause, fault.describe(handles), **_named(handles, fault.row))
        for fault in (*handle_faults(handles), *sharing_faults(handles))
    ]
    # The other checks need these columns.
    if not any(handles[name].null_count for name in ("operator", "state", "mode", "layer", "schema_id", "rows")):
        problems += check_handles(graph, states, handles)
    return list(ordered(problems))


def _named(handles: pa.Table, row: int) -> dict[str, Any]:
    try:
        found = handles.select(["operator", "state", "subtask"]).slice(row, 1).to_pylist()[0]
    except UnicodeDecodeError:
        return {}
    return {"operator": found["operator"] or "", "state": found["state"] or "", "subtask": found["subtask"]}


def check_handles(graph: JobGraph, states: Sequence[State], handles: pa.Table) -> Iterator[Problem]:
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
            yield Problem(kind, "SPEC 4.1", message, operator=key[0], state=key[1])
            continue
        seen.add(key)
        yield from checks.problems(state, start, stop)
    for key, state in declared.items():
        if key not in seen:
            yield from checks.problems(state, 0, 0)


def _on_wrong_edge(graph: JobGraph, state: State, rows: int) -> Iterator[Problem]:
    """Report records in flight on an edge where barriers never overtake records (section 3.6)."""
    edge = graph.by_edge.get(state.edge or "")
    if not rows or edge is None or edge.feedback or edge.partitioner in (Partitioner.HASH, Partitioner.REBALANCE):
        return
    message = (
        f"state {state.name!r} of operator {state.operator!r} holds {rows:,} records in flight on {edge.partitioner} "
        f"edge {edge.id!r}; only hash, rebalance and feedback edges may hold any"
    )
    yield Problem(_NOT_ALLOWED, "SPEC 3.6", message, operator=state.operator, state=state.name)


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

    def problems(self, state: State, start: int, stop: int) -> Iterator[Problem]:
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

    def problem(self, kind: ErrorKind, clause: str, what: str, subtask: int | None = None) -> Problem:
        message = f"state {self.state.name!r} of operator {self.operator.uid!r} {what}"
        owner = None if subtask is None else int(subtask)
        return Problem(kind, clause, message, operator=self.operator.uid, state=self.state.name, subtask=owner)

    def problems(self) -> Iterator[Problem]:
        if len(self.rows):
            yield from self._declared()
            yield from self._owners()
        yield from self._present()
        if has_key_groups(self.state) and self.rows.any():
            yield from self._groups()

    def _declared(self) -> Iterator[Problem]:
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

    def _owners(self) -> Iterator[Problem]:
        operator, mode = self.operator, self.state.mode
        if mode is Mode.COMMITTABLES:
            return
        if operator.status is Status.FULLY_FINISHED:
            what = f"is {mode} and has {len(self.rows)} handles, but its operator is fully finished"
            yield self.problem(_NOT_ALLOWED, "SPEC 4.6", what)
            return
        if mode is Mode.COORDINATOR:
            return
        for subtasks, what in ((operator.finished, "finished"), (operator.finishing, "finishing")):
            if subtasks and (mine := _within(self.subtask, subtasks)).any():
                found = SubtaskSet.of(np.unique(self.subtask[mine]).tolist())
                message = f"has handles of subtasks {found}, which are {what} and may contribute committables only"
                yield self.problem(_NOT_ALLOWED, "SPEC 4.6", message, found.ranges[0][0])
        beyond = self.subtask >= operator.parallelism
        if beyond.any():
            found = SubtaskSet.of(np.unique(self.subtask[beyond]).tolist())
            message = f"has handles of subtasks {found}; its operator has 0 to {operator.parallelism - 1}"
            yield self.problem(ErrorKind.INVALID_PARALLELISM, "SPEC 4.1", message, found.ranges[0][0])

    def _present(self) -> Iterator[Problem]:
        operator, mode = self.operator, self.state.mode
        if mode is Mode.COORDINATOR and operator.status is not Status.FULLY_FINISHED and len(self.rows) != 1:
            kind = _NOT_ALLOWED if len(self.rows) else ErrorKind.STATE_MISSING
            what = f"is the coordinator's and has {len(self.rows)} handles, not one"
            yield self.problem(kind, "SPEC 4.6", what)
        if mode not in PER_SUBTASK_MODES or not 1 <= operator.parallelism <= 2**15:
            return
        missing = np.ones(operator.parallelism, bool)
        for first, last in (*operator.finished.ranges, *operator.finishing.ranges):
            missing[max(first, 0) : max(last + 1, 0)] = False
        missing[self.subtask[(self.layer == 0) & (self.subtask >= 0) & (self.subtask < len(missing))]] = False
        if missing.any():
            found = SubtaskSet.of(np.flatnonzero(missing).tolist())
            what = f"has no handle of layer 0 for running subtasks {found}; each reports one, even with 0 rows"
            yield self.problem(ErrorKind.STATE_MISSING, "SPEC 4.6", what, found.ranges[0][0])

    def _groups(self) -> Iterator[Problem]:
        """Check that key groups are with their owner (5.3) and in one handle of a layer (4.3)."""
        operator = self.operator
        grouped = (self.rows > 0) & (self.first >= 0) & (self.last >= self.first)
        grouped &= (self.subtask >= 0) & (self.subtask < operator.parallelism)
        subtask, layer, first, last = (column[grouped] for column in (self.subtask, self.layer, self.first, self.last))
        if not len(subtask):
            return
        try:
            check_parallelism(operator.parallelism, operator.max_parallelism or 0)
        except ValueError:
            return  # The check of the operator reports this.
        bounds = range_bounds(operator.parallelism, operator.max_parallelism or 0)
        outside = (first < bounds[subtask]) | (last >= bounds[subtask + 1])
        if outside.any():
            at = int(outside.argmax())
            i = int(subtask[at])
            what = (
                f"has key groups {first[at]} to {last[at]} at subtask {i}, which owns {bounds[i]} to "
                f"{bounds[i + 1] - 1} ({int(outside.sum())} such handles)"
            )
            yield self.problem(_NOT_ALLOWED, "SPEC 5.3", what, i)
        if len(subtask) < 2:
            return
        order = np.lexsort((first, layer, subtask))
        subtask, layer, first, last = (column[order] for column in (subtask, layer, first, last))
        together = (subtask[1:] == subtask[:-1]) & (layer[1:] == layer[:-1])
        overlap = together & (first[1:] <= last[:-1])
        if overlap.any():
            at = int(overlap.argmax())
            what = (
                f"has key group {first[at + 1]} in two handles of subtask {subtask[at]}, layer {layer[at]}"
                f" ({int(overlap.sum())} such pairs)"
            )
            yield self.problem(_NOT_ALLOWED, "SPEC 4.3", what, int(subtask[at]))


def _within(values: Ints, subtasks: SubtaskSet) -> Mask:
    found = np.zeros(len(values), bool)
    for first, last in subtasks.ranges:
        found |= (values >= first) & (values <= last)
    return found
