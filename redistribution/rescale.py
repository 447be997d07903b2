"""A checkpoint dealt out anew by a plan: which rows of which handle stand where in the manifest of the rescaled one.

Theory of operation. Rescaling changes who owns what and touches no segment, so the result is slices of the old manifest, which
``manifest.cut_handles`` turns into the new one (SPEC.md sections 4.6 and 6.4). Keyed, even-split, in-flight and broadcast
state stand where the plan puts them, in-flight parts of one segment in its order. Of union state and progress, which a restore gives to everyone, each handle must stand
with one subtask: the handles of old reporter *j* of *k* go to new subtask ⌊j·p/k⌋, which keeps their order. A running subtask that
gets nothing of a state gets an empty handle.

Fully finished operators stay as they are. Every other operator is running in all of its subtasks afterwards, and what it was
before is kept in ``rescaled_from``, for the rules of the graph. Restoring the result at the same parallelism gives every subtask
what the plan would have given it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import InvalidInput
from stateformat.graph import JobGraph, Operator, OperatorId, Status
from stateformat.model import PER_SUBTASK_MODES, FormerStatus, Mode, Record, RescaledFrom, State

from .in_flight import in_segment_order
from .operator_plan import Action
from .plan import RestorePlan
from .restore_plan import Plannable
from .tables import EVERY, Handles, Ints, Slices, assemble, blocks, read_handles, spread

_AS_PLANNED = (Mode.KEYED, Mode.EVEN_SPLIT, Mode.BROADCAST, Mode.COORDINATOR)
_DEALT_WHOLE = (Mode.UNION, Mode.PROGRESS)


@dataclass(frozen=True)
class Rescaled:
    """The content of a rescaled checkpoint.

    ``slices`` (``SLICE_SCHEMA``, in manifest order) name rows of the old manifest for subtasks of the new one. A slice
    of 0 rows is an empty handle of its state; its ``handle`` is some layer-0 handle of that state, for the columns that
    an empty handle has too. The subtask is null for coordinator state alone: committables keep the one that they had.
    """

    graph: JobGraph
    states: tuple[State, ...]
    slices: pa.Table
    rescaled_from: RescaledFrom

    def __repr__(self) -> str:
        return f"Rescaled(checkpoint {self.rescaled_from.source.checkpoint_id}, {self.slices.num_rows} slices)"


def rescale(checkpoint: Plannable, plan: RestorePlan) -> Rescaled:
    """Deal a checkpoint out anew by a plan that was made of it.

    Raises ``RestoreRefused`` where the plan refuses, and ``InvalidInput`` where it is another checkpoint's plan.
    """
    record = checkpoint.record
    if plan.source != record.ref:
        raise InvalidInput(
            f"the plan is for checkpoint {plan.source.checkpoint_id} of attempt {plan.source.attempt_id}, not for "
            f"{record.checkpoint_id} of attempt {record.attempt_id}; plan again"
        )
    plan.check()
    ordered = sorted(record.states, key=lambda state: (state.operator, state.name))
    handles = read_handles(checkpoint.handles, ordered)
    graph = _graph(record, plan)
    kept = np.array([_is_kept(state, plan) for state in ordered], dtype=np.bool_)
    modes = np.array([state.mode for state in ordered], dtype=object)
    parallelism = np.array(
        [graph.by_uid[state.operator].parallelism if keep else 0 for state, keep in zip(ordered, kept, strict=True)],
        dtype=np.int64,
    )
    as_planned, dealt_whole = (kept & np.isin(modes, chosen) for chosen in (_AS_PLANNED, _DEALT_WHOLE))
    in_flight, committables = (kept & (modes == mode) for mode in (Mode.IN_FLIGHT, Mode.COMMITTABLES))
    running = np.array(
        [graph.by_uid.get(state.operator, _GONE).status is Status.RUNNING for state in ordered], dtype=np.bool_
    )
    reporting = np.where(running & kept, parallelism, 0)
    # The plan is in the order of states as well, so each block of handles has a piece of it.
    planned_state = handles.state[plan.assigned["handle"].to_numpy()]
    tables = []
    for numbers, some in blocks(handles, ordered):
        first, last = np.searchsorted(planned_state, [numbers.start, numbers.stop]).tolist()
        planned = _planned(plan.assigned.slice(first, last - first), handles)
        whole = some.where(dealt_whole[some.state])
        stay = some.where(committables[some.state])
        dealt = Slices.concat(
            [
                planned.take(as_planned[planned.state]),
                in_segment_order(planned.take(in_flight[planned.state]), checkpoint.handles),
                Slices.whole(whole, _new_owner(whole, parallelism)),
                Slices.whole(stay, stay.subtask),
            ]
        )
        empties = _empties(ordered, some, dealt, np.where(np.isin(np.arange(len(ordered)), numbers), reporting, 0))
        tables.append(assemble(Slices.concat([dealt, empties]), checkpoint.handles, ordered))
    return Rescaled(
        graph=graph,
        states=tuple(state for state in record.states if _is_kept(state, plan)),
        slices=pa.concat_tables(tables),
        rescaled_from=RescaledFrom(record.ref, _former(record, graph)),
    )


_GONE = Operator(uid=OperatorId(""), parallelism=0)


def _is_kept(state: State, plan: RestorePlan) -> bool:
    """Whether a state still has a place: its operator is there, it is not given up, its edge or coordinator exists."""
    operator = plan.topology.by_uid.get(state.operator)
    if operator is None or f"{state.operator}/{state.name}" in plan.drop:
        return False
    if state.mode is Mode.IN_FLIGHT:
        edge = plan.topology.by_edge.get(state.edge or "")
        return edge is not None and edge.target == state.operator
    return state.mode is not Mode.COORDINATOR or operator.coordinator


def _graph(record: Record, plan: RestorePlan) -> JobGraph:
    """The plan's topology, all running; fully finished operators as they were saved."""
    operators = []
    for operator in plan.topology.operators:
        skipped = plan.by_operator[operator.uid].action is Action.SKIP_FINISHED
        shown = replace(record.graph.by_uid[operator.uid], chain=operator.chain) if skipped else operator
        operators.append(replace(shown, pinned=False))
    return JobGraph(tuple(operators), plan.topology.edges)


def _former(record: Record, graph: JobGraph) -> tuple[FormerStatus, ...]:
    """Statuses that running subtasks hide: of this checkpoint, and those that an earlier rescale has handed on."""
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
    """Slices of a plan as arrays; ``handles`` are all of the manifest."""

    def column(name: str) -> Ints:
        values: Ints = pc.fill_null(assigned[name], -1).to_numpy().astype(np.int64, copy=False)
        return values

    columns = {name: column(name) for name in Slices.__dataclass_fields__ if name != "state"}
    return Slices(state=handles.state[columns["handle"]], **columns)


def _new_owner(handles: Handles, parallelism: Ints) -> Ints:
    """For each handle the new subtask of its old reporter: reporter *j* of *k* goes to ⌊j·p/k⌋."""
    if not len(handles):
        return handles.state
    opens = np.append(True, (handles.state[1:] != handles.state[:-1]) | (handles.subtask[1:] != handles.subtask[:-1]))
    reporter = np.cumsum(opens) - 1
    reporters = np.bincount(handles.state[opens], minlength=len(parallelism))
    nth = reporter - (np.cumsum(reporters) - reporters)[handles.state]
    owner: Ints = nth * parallelism[handles.state] // reporters[handles.state]
    return owner


def _empties(states: Sequence[State], handles: Handles, dealt: Slices, parallelism: Ints) -> Slices:
    """An empty slice for each subtask, or coordinator, that has no slice of layer 0 of a state of its operator."""
    per_subtask = np.array([state.mode in PER_SUBTASK_MODES for state in states], dtype=np.bool_)
    coordinator = np.array([state.mode is Mode.COORDINATOR for state in states], dtype=np.bool_)
    # A coordinator is one place of its own, with the subtask EVERY.
    places = np.where(per_subtask, parallelism, np.where(coordinator, np.minimum(parallelism, 1), 0))
    state, nth = spread(places)
    start = np.cumsum(places) - places
    held = np.zeros(len(state), dtype=np.bool_)
    filled = (dealt.layer == 0) & (places[dealt.state] > 0)
    held[start[dealt.state[filled]] + np.maximum(dealt.subtask[filled], 0)] = True
    empty = np.flatnonzero(~held)
    # The first handle of a state in manifest order is one of layer 0: every running subtask has one.
    first = np.searchsorted(handles.state, state[empty])
    none = np.full(len(empty), -1)
    zero = np.zeros(len(empty), dtype=np.int64)
    part = Slices.part(handles, first, subtask=0, row_start=zero, rows=zero, first_group=none, last_group=none)
    return part.to(np.where(coordinator[state[empty]], EVERY, nth[empty]))
