"""Plans who reads what when a checkpoint is restored into a topology.

A plan is made from the record and the planning columns of the manifest, without opening a segment.
The rule of each mode turns the handles of many operators into slices in one pass. All rules are
checked, so a plan gives all reasons for a refusal at once; it still shows the slices of operators
whose numbers make sense.

A fully finished operator is not started, and only its committables remain. Every subtask of any
other operator is started, even if it had finished: what the running ones reported is distributed
among all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Final, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from stateformat.errors import ErrorKind
from stateformat.findings import Finding
from stateformat.graph import JobGraph, Partitioner, Status
from stateformat.keys import MAX_PARALLELISM_LIMIT
from stateformat.manifest import Ints, integers, spread
from stateformat.model import PER_SUBTASK_MODES, Capability, FormerStatus, Mode, Record, RescaledFrom, State
from stateformat.rules import saved_statuses
from stateformat.schema import SLICE_SCHEMA

from . import rules
from .columns import ColumnAction
from .modes import (
    copy_broadcast,
    cut_keyed,
    distribute_in_flight,
    in_segment_order,
    share_progress,
    share_union,
    split_evenly,
)
from .plan import Action, OperatorPlan, RestorePlan, operator_plans
from .rules import Match, StateHandles
from .tables import (
    EVERY,
    Block,
    Handles,
    Slices,
    States,
    assemble,
    blocks,
    read_handles,
    read_part,
    run_starts,
    state_numbers,
)

_T = TypeVar("_T")
_THREADS: Final = 2


class Plannable(Protocol):
    """A ``Checkpoint``, which this package may not import: a checkpoint opens files."""

    @property
    def record(self) -> Record: ...

    @property
    def handles(self) -> pa.Table: ...

    @property
    def capabilities(self) -> Collection[Capability]: ...

    @property
    def query(self) -> str: ...


def plan_restore(
    checkpoint: Plannable, topology: JobGraph, *, states: Sequence[State] = (), drop: Collection[str] = ()
) -> RestorePlan:
    """Plan the restore of a checkpoint into a topology.

    ``states``: what the new program declares; if empty, what the checkpoint has. An operator that
    declares any state must declare all its keyed, even-split, union and broadcast states that have
    rows, with all their columns by field id. ``drop``: what to discard: an operator that is gone
    (``uid``), a state (``uid/state``) or a column (``uid/state.column``).

    Raises ``InvalidInput`` for a ``drop`` that names nothing, and ``DamagedCheckpoint`` for a
    manifest that contradicts its record. Everything else is a refusal in the plan.
    """
    record = checkpoint.record
    ordered = sorted(record.states, key=lambda state: (state.operator, state.name))
    rules.check_owners(record, ordered)
    table = checkpoint.handles
    numbers = state_numbers(table, ordered)
    parts = [*blocks(numbers, ordered)]
    checked = _checked(record, ordered, table, numbers, parts)
    match = Match(
        record=record,
        topology=topology,
        statuses=saved_statuses(record.graph, record.rescaled_from),
        rows={(state.operator, state.name): found.rows for state, found in zip(ordered, checked, strict=True)},
        wanted={(state.operator, state.name): state for state in states},
        drop=frozenset((drop,) if isinstance(drop, str) else drop),
        foreign=Capability.CARRY not in checkpoint.capabilities,
        query=checkpoint.query,
    )
    rules.check_drop(match)
    beyond = tuple(found for found in rules.parallelism_refusals(match) if found.kind is ErrorKind.INVALID_PARALLELISM)
    if beyond:
        # Such numbers may not fit int64, and planning millions of subtasks takes minutes.
        return RestorePlan(record.ref, record.job_id, topology, (), SLICE_SCHEMA.empty_table(), beyond)
    resolved, unchained, pinned, broken = rules.unchain(_resolved(match), match.statuses)
    refusals = [
        *rules.checkpoint_refusals(record, ordered, checked),
        *rules.topology_refusals(topology, match.statuses),
        *rules.parallelism_refusals(match),
        *rules.key_refusals(match),
        *rules.state_refusals(match),
        *rules.in_flight_refusals(match),
        *rules.predecessor_refusals(topology, match.statuses),
        *pinned,
    ]
    operators = operator_plans(match, resolved)
    of_modes = _Rules(match, ordered, _state_arrays(match, ordered, operators))
    # All handles at once take more memory than the parts being worked on, even if these are read
    # again.
    tables = _in_threads(lambda part: of_modes.slices(read_part(table, ordered, numbers, part[1]), table), parts)
    return RestorePlan(
        source=record.ref,
        job_id=record.job_id,
        topology=resolved,
        operators=operators,
        assigned=pa.concat_tables(tables),
        refusals=tuple(refusals),
        warnings=(*broken, *_warnings(match)),
        unchained=unchained,
        drop=tuple(sorted([*match.drop_whole, *_columns_dropped(match)])),
        columns=tuple(plan for plans in match.columns.values() for plan in plans),
    )


def _checked(
    record: Record, ordered: Sequence[State], table: pa.Table, numbers: Ints, parts: Sequence[Block]
) -> list[StateHandles]:
    """Return what the manifest has of each state."""

    def check(part: Block) -> list[StateHandles]:
        states, bounds = part
        handles = read_part(table, ordered, numbers, bounds)
        ends = np.searchsorted(handles.state, np.arange(states.start, states.stop + 1)).tolist()
        return [
            rules.check_state(state, record.graph.operator(state.operator), handles.where(slice(*own)))
            for state, own in zip(ordered[states.start : states.stop], pairwise(ends), strict=True)
        ]

    return [*chain.from_iterable(_in_threads(check, parts))]


def _resolved(match: Match) -> JobGraph:
    saved, statuses = match.record.graph.by_uid, match.statuses
    operators = tuple(
        rules.resolve(operator, saved.get(operator.uid), finished=statuses.get(operator.uid) is Status.FULLY_FINISHED)
        for operator in match.topology.operators
    )
    return JobGraph(operators, match.topology.edges)


def _state_arrays(match: Match, ordered: Sequence[State], operators: Sequence[OperatorPlan]) -> States:
    saved = match.record.graph.by_uid
    settled = {
        plan.uid: plan.parallelism == plan.old_parallelism and saved[plan.uid].status is Status.RUNNING
        for plan in operators
        if plan.uid in saved
    }
    rescaled = match.record.rescaled_from is not None
    redistributed = [
        plan.uid for plan in operators if plan.action is Action.START and (rescaled or not settled[plan.uid])
    ]
    reached = rules.disturbed(match.topology, redistributed)
    parallelism = {plan.uid: _planned_parallelism(match, plan) for plan in operators if plan.uid in saved}
    rank = {uid: number for number, uid in enumerate(sorted({state.operator for state in ordered}))}
    uids = [state.operator for state in ordered]
    kept = np.array([not match.dropped(state) for state in ordered], dtype=np.bool_)
    return States(
        operator=np.array([rank[uid] for uid in uids], dtype=np.int64),
        parallelism=np.array([parallelism[uid] for uid in uids], dtype=np.int64) * kept,
        max_parallelism=np.array([saved[uid].max_parallelism or 0 for uid in uids], dtype=np.int64),
        settled=np.array([settled[uid] for uid in uids], dtype=np.bool_),
        undisturbed=np.array([uid not in reached for uid in uids], dtype=np.bool_),
    )


def _planned_parallelism(match: Match, plan: OperatorPlan) -> int:
    """Return 0 for an operator that is not started, or whose refused numbers fit no rule."""
    ceiling = match.record.graph.by_uid[plan.uid].max_parallelism or 0
    legal = 1 <= plan.parallelism <= MAX_PARALLELISM_LIMIT
    legal = legal and (plan.parallelism <= ceiling or not match.has_keys(plan.uid))
    return plan.parallelism if plan.action is Action.START and legal else 0


def _in_threads(rule: Callable[[Block], _T], parts: Sequence[Block]) -> list[_T]:
    """Apply a rule to every part, in threads: numpy and Arrow release the interpreter's lock."""
    if len(parts) == 1:
        return [rule(parts[0])]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stateformat-plan") as pool:
        return list(pool.map(rule, parts))


class _Rules:
    def __init__(self, match: Match, ordered: Sequence[State], states: States) -> None:
        self._ordered = ordered
        self._states = states
        modes = np.array([state.mode for state in ordered], dtype=object)
        in_topology = [not match.dropped(state) and state.operator in match.topology.by_uid for state in ordered]
        known = np.array(in_topology, dtype=np.bool_)
        in_plan = states.parallelism > 0
        self._takes_part = {mode: (modes == mode) & (known if mode is Mode.COMMITTABLES else in_plan) for mode in Mode}
        partitioners = np.array([_partitioner(match.record, state) for state in ordered], dtype=object)
        self._by_key, self._stays = partitioners == Partitioner.HASH, partitioners == Partitioner.BROADCAST

    def slices(self, handles: Handles, table: pa.Table) -> pa.Table:
        """Return who reads what of these handles; ``table`` is the manifest."""
        states = self._states

        def of(mode: Mode) -> Handles:
            return handles.where(self._takes_part[mode][handles.state])

        in_flight = distribute_in_flight(of(Mode.IN_FLIGHT), states, by_key=self._by_key, stays=self._stays)
        found = [
            cut_keyed(of(Mode.KEYED), states),
            split_evenly(of(Mode.EVEN_SPLIT), states),
            share_union(of(Mode.UNION)),
            copy_broadcast(of(Mode.BROADCAST), states),
            share_progress(of(Mode.PROGRESS), states),
            in_segment_order(in_flight, table),
            Slices.whole(of(Mode.COORDINATOR), EVERY),
            Slices.whole(of(Mode.COMMITTABLES), EVERY),
        ]
        return assemble(Slices.concat(found), table, self._ordered)


def _partitioner(record: Record, state: State) -> Partitioner | None:
    edge = record.graph.by_edge.get(state.edge or "")
    return edge.partitioner if edge else None


def _columns_dropped(match: Match) -> list[str]:
    """Return the columns that are given up now, without those that were gone before."""
    return [
        f"{plan.operator}/{plan.state}.{plan.saved}"
        for plans in match.columns.values()
        for plan in plans
        if plan.action is ColumnAction.DROPPED
    ]


def _warnings(match: Match) -> Iterator[Finding]:
    for operator, saved in match.restarted:
        if saved.status is Status.PARTIALLY_FINISHED:
            done = len(saved.finished) + len(saved.finishing)
            message = (
                f"operator {operator.uid!r} was partially finished ({done} of {saved.parallelism} subtasks); all its "
                "subtasks start, and share what the running ones reported"
            )
            yield rules.warning(ErrorKind.FINISHED_SUBTASKS_START, operator.uid, message)
    for state in match.record.states:
        rows = match.rows_of(state)
        if not rows:
            continue
        where = f"{state.mode} state {state.name!r} of operator {state.operator!r} with {rows} rows"
        if match.dropped(state):
            yield rules.warning(ErrorKind.STATE_DROPPED, state.operator, f"{where} is given up, as asked")
        for plan in match.columns.get((state.operator, state.name), ()):
            if plan.action is ColumnAction.DROPPED:
                message = f"column {plan.saved!r} of {where} is given up, as asked"
                yield rules.warning(ErrorKind.COLUMN_DROPPED, state.operator, message)


# ---- rescale -------------------------------------------------------------------------------------
#
# Rescales a checkpoint by a plan: which rows of which handle each new subtask owns.
#
# Segments are not touched: the result is slices of the old manifest, from which
# ``manifest.table`` makes the new one (SPEC.md sections 4.6 and 6.4). Keyed, even-split,
# in-flight and broadcast state go where the plan puts them. Union state and progress, which a
# restore gives to every subtask, have one owner per handle: the handles of old reporter *j* of *k*
# go to new subtask ⌊j·p/k⌋. A running subtask that gets nothing of a state gets an empty handle.
#
# Fully finished operators stay as they are. Every other operator is running in all its subtasks;
# ``rescaled_from`` keeps its status for the rules of the graph.


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
