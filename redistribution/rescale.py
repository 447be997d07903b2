"""Rescales a checkpoint by a plan: which rows of which handle each new subtask owns.

Segments are not touched: the result is slices of the old manifest, from which ``manifest.slicing``
makes the new one (SPEC.md sections 4.6 and 6.4). Keyed, even-split, in-flight and broadcast state
go where the plan puts them. Union state and progress, which a restore gives to every subtask, have
one owner per handle: the handles of old reporter *j* of *k* go to new subtask ⌊j·p/k⌋. A running
subtask that gets nothing of a state gets an empty handle.

Fully finished operators stay as they are. Every other operator is running in all its subtasks;
``rescaled_from`` keeps its status for the rules of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa

from stateformat.graph import JobGraph, Status
from stateformat.manifest import Ints, integers, spread
from stateformat.model import PER_SUBTASK_MODES, FormerStatus, Mode, Record, RescaledFrom, State

from .in_flight import in_segment_order
from .operator_plan import Action
from .plan import RestorePlan
from .restore_plan import Plannable
from .tables import EVERY, Handles, Slices, assemble, blocks, read_handles, run_starts

_AS_PLANNED = (Mode.KEYED, Mode.EVEN_SPLIT, Mode.BROADCAST, Mode.COORDINATOR)
_SHARED = (Mode.UNION, Mode.PROGRESS)


@dataclass(frozen=True)
class Rescaled:
    """The content of a rescaled checkpoint."""

    graph: JobGraph
    states: tuple[State, ...]
    slices: pa.Table
    """``SLICE_SCHEMA``, in manifest order: rows of the old manifest for new subtasks.

    A slice of 0 rows is an empty handle; its ``handle`` is any layer-0 handle of the state.
    """
    rescaled_from: RescaledFrom

    def __repr__(self) -> str:
        return f"Rescaled(checkpoint {self.rescaled_from.source.checkpoint_id}, {self.slices.num_rows} slices)"


def rescale(checkpoint: Plannable, plan: RestorePlan) -> Rescaled:
    """Distribute a checkpoint to new subtasks by a plan made from it.

    Raises ``RestoreRefused`` if the plan refuses, and ``InvalidInput`` for a plan made from another
    checkpoint.
    """
    record = checkpoint.record
    plan.check(record.ref)
    ordered = sorted(record.states, key=lambda state: (state.operator, state.name))
    handles = read_handles(checkpoint.handles, ordered)
    graph = _graph(record, plan)
    kept = np.array([_is_kept(state, plan) for state in ordered], dtype=np.bool_)
    modes = np.array([state.mode for state in ordered], dtype=object)
    numbers_of = [
        graph.by_uid[state.operator].parallelism if keep else 0 for state, keep in zip(ordered, kept, strict=True)
    ]
    parallelism = np.array(numbers_of, dtype=np.int64)
    as_planned, shared = (kept & np.isin(modes, chosen) for chosen in (_AS_PLANNED, _SHARED))
    in_flight, committables = (kept & (modes == mode) for mode in (Mode.IN_FLIGHT, Mode.COMMITTABLES))
    running = [
        keep and graph.by_uid[state.operator].status is Status.RUNNING
        for state, keep in zip(ordered, kept, strict=True)
    ]
    reporting = np.where(running, parallelism, 0)
    # The plan is in the order of states too, so each block of handles has one part of it.
    planned_state = handles.state[plan.assigned["handle"].to_numpy()]
    tables = []
    for numbers, bounds in blocks(handles.state, ordered):
        some = handles.part(*bounds)
        first, last = np.searchsorted(planned_state, [numbers.start, numbers.stop]).tolist()
        planned = _planned(plan.assigned.slice(first, last - first), handles)
        whole = some.where(shared[some.state])
        stay = some.where(committables[some.state])
        filled = Slices.concat(
            [
                planned.take(as_planned[planned.state]),
                in_segment_order(planned.take(in_flight[planned.state]), checkpoint.handles),
                Slices.whole(whole, _new_owner(whole, parallelism)),
                Slices.whole(stay, stay.subtask),
            ]
        )
        empties = _empties(ordered, some, filled, np.where(np.isin(np.arange(len(ordered)), numbers), reporting, 0))
        tables.append(assemble(Slices.concat([filled, empties]), checkpoint.handles, ordered))
    return Rescaled(
        graph=graph,
        states=tuple(state for state in record.states if _is_kept(state, plan)),
        slices=pa.concat_tables(tables),
        rescaled_from=RescaledFrom(record.ref, _former(record, graph)),
    )


def _is_kept(state: State, plan: RestorePlan) -> bool:
    """Return whether a state is not given up and its operator, edge or coordinator exists."""
    operator = plan.topology.by_uid.get(state.operator)
    if operator is None or plan.gives_up(state.operator, state.name):
        return False
    if state.mode is Mode.IN_FLIGHT:
        edge = plan.topology.by_edge.get(state.edge or "")
        return edge is not None and edge.target == state.operator
    return state.mode is not Mode.COORDINATOR or operator.coordinator


def _graph(record: Record, plan: RestorePlan) -> JobGraph:
    operators = []
    for operator in plan.topology.operators:
        skipped = plan.by_operator[operator.uid].action is Action.SKIP_FINISHED
        shown = replace(record.graph.by_uid[operator.uid], chain=operator.chain) if skipped else operator
        operators.append(replace(shown, pinned=False))
    return JobGraph(tuple(operators), plan.topology.edges)


def _former(record: Record, graph: JobGraph) -> tuple[FormerStatus, ...]:
    """Return the statuses before this and earlier rescales, which the graph now hides."""
    earlier = {former.uid: former for former in record.rescaled_from.operators} if record.rescaled_from else {}
    found = []
    for operator in record.graph.operators:
        if operator.uid not in graph.by_uid:
            continue
        if operator.status is Status.PARTIALLY_FINISHED:
            found.append(FormerStatus(operator.uid, operator.parallelism, operator.finished, operator.finishing))
        elif operator.status is Status.RUNNING and operator.uid in earlier:
            found.append(earlier[operator.uid])
    return tuple(found)


def _planned(assigned: pa.Table, handles: Handles) -> Slices:
    columns = {item.name: integers(assigned[item.name]) for item in fields(Slices) if item.name != "state"}
    return Slices(state=handles.state[columns["handle"]], **columns)


def _new_owner(handles: Handles, parallelism: Ints) -> Ints:
    """Return the new subtask of each handle: those of reporter *j* of *k* go to ⌊j·p/k⌋."""
    if not len(handles):
        return handles.state
    opens = run_starts(handles.state, handles.subtask)
    reporter = np.cumsum(opens) - 1
    reporters = np.bincount(handles.state[opens], minlength=len(parallelism))
    nth = reporter - (np.cumsum(reporters) - reporters)[handles.state]
    owner: Ints = nth * parallelism[handles.state] // reporters[handles.state]
    return owner


def _empties(states: Sequence[State], handles: Handles, filled: Slices, parallelism: Ints) -> Slices:
    """Return empty slices for subtasks and coordinators without a slice of a state's layer 0."""
    per_subtask = np.array([state.mode in PER_SUBTASK_MODES for state in states], dtype=np.bool_)
    coordinator = np.array([state.mode is Mode.COORDINATOR for state in states], dtype=np.bool_)
    # A coordinator is one more place, with the subtask EVERY.
    places = np.where(per_subtask, parallelism, np.where(coordinator, np.minimum(parallelism, 1), 0))
    state, nth = spread(places)
    start = np.cumsum(places) - places
    has_slice = np.zeros(len(state), dtype=np.bool_)
    base = filled.take((filled.layer == 0) & (places[filled.state] > 0))
    has_slice[start[base.state] + np.maximum(base.subtask, 0)] = True
    empty = np.flatnonzero(~has_slice)
    # The first handle of a state is of layer 0: every running subtask has one.
    first = np.searchsorted(handles.state, state[empty])
    none = np.full(len(empty), -1)
    zero = np.zeros(len(empty), dtype=np.int64)
    subtask = np.where(coordinator[state[empty]], EVERY, nth[empty])
    return Slices.part(handles, first, subtask, row_start=zero, rows=zero, first_group=none, last_group=none)
