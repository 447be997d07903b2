"""Who gets what when a checkpoint is restored into a topology: :func:`plan_restore` makes a ``RestorePlan``.

Theory of operation. A plan is metadata: it is made from the record and the planning columns of the manifest and opens no
segment, so it costs the same for a megabyte and a terabyte. Handles become arrays once, the rule of each mode turns all
handles of that mode, of many operators, into slices in one pass, and every rule that refuses is asked, so a plan names all
reasons at once. A plan that refuses still shows the slices of those operators whose numbers make sense; ``RestorePlan.check``
is what stands between it and a restore.

Fully finished operators are not started at any parallelism, and their committables are all that is left of them. Every subtask
of any other operator is started, also those that had finished: what the running ones reported is dealt out among all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

import numpy as np
import pyarrow as pa

from stateformat.graph import JobGraph, OperatorId, Partitioner, Status
from stateformat.keys import MAX_PARALLELISM_LIMIT
from stateformat.model import Mode, Record, State
from stateformat.rules import saved_statuses
from stateformat.schema import SLICE_SCHEMA

from .broadcast import copy_broadcast
from .columns import ColumnAction
from .even_split import split_evenly
from .in_flight import deal_in_flight, in_segment_order
from .keyed import cut_keyed
from .operator_plan import Action, OperatorPlan, operator_plans
from .plan import RestorePlan
from .progress import share_progress
from .rules import (
    Match,
    PlanWarning,
    RefusalCode,
    WarningCode,
    check_drop,
    check_groups,
    check_owners,
    checkpoint_refusals,
    disturbed,
    in_flight_refusals,
    key_refusals,
    parallelism_refusals,
    predecessor_refusals,
    resolve,
    state_refusals,
    topology_refusals,
    unchain,
)
from .tables import EVERY, Handles, Ints, Slices, States, assemble, blocks, read_handles
from .union import share_union

_THREADS: Final = 2


class Plannable(Protocol):
    """What a plan is made from: a ``stateformat`` Checkpoint, or anything with its record and planning columns."""

    @property
    def record(self) -> Record:
        """The publication record."""

    @property
    def handles(self) -> pa.Table:
        """The manifest's planning columns (``schema.PLANNING_COLUMNS``), in its order."""


def plan_restore(
    checkpoint: Plannable, topology: JobGraph, *, states: Sequence[State] = (), drop: Collection[str] = ()
) -> RestorePlan:
    """Plan the restore of a checkpoint into a topology.

    ``states`` are those that the new program declares; empty means: whatever the checkpoint has. Where an operator declares
    any, its saved keyed, even-split, union and broadcast states with rows must be among them, and a column that the checkpoint has
    must be in their newest schemas, by its field id. ``drop`` gives up state, by the uid of an operator that is gone, as
    ``uid/state``, or a column as ``uid/state.column``; one that has gone before needs no more giving up. Raises ``InvalidInput``
    for an entry of ``drop`` that names nothing, or a column that the state never had, and ``DamagedCheckpoint`` for a manifest that contradicts its record; all else is a refusal in the plan.
    """
    record = checkpoint.record
    ordered = sorted(record.states, key=lambda state: (state.operator, state.name))
    check_owners(record, ordered)
    handles = read_handles(checkpoint.handles, ordered)
    check_groups(record, ordered, (some for _, some in blocks(handles, ordered)))
    rows = np.zeros(len(ordered), dtype=np.int64)
    np.add.at(rows, handles.state, handles.rows)
    match = Match(
        record=record,
        topology=topology,
        statuses=saved_statuses(record.graph, record.rescaled_from),
        rows={(state.operator, state.name): count for state, count in zip(ordered, rows.tolist(), strict=True)},
        wanted={(state.operator, state.name): state for state in states},
        drop=frozenset((drop,) if isinstance(drop, str) else drop),
    )
    check_drop(match)
    beyond = tuple(found for found in parallelism_refusals(match) if found.code is RefusalCode.INVALID_PARALLELISM)
    if beyond:
        # Planning millions of subtasks, only to refuse them, takes minutes; numbers beyond int64 fit in no array.
        return RestorePlan(record.ref, record.job_id, topology, (), SLICE_SCHEMA.empty_table(), beyond)
    resolved, unchained, pinned, broken = unchain(_resolved(match), match.statuses)
    refusals = [
        *checkpoint_refusals(record, ordered, handles),
        *topology_refusals(topology, match.statuses),
        *parallelism_refusals(match),
        *key_refusals(match),
        *state_refusals(match),
        *in_flight_refusals(match),
        *predecessor_refusals(topology, match.statuses),
        *pinned,
    ]
    operators = operator_plans(match, resolved)
    rules = _Rules(match, ordered, _state_arrays(match, ordered, operators))
    dealt = _in_threads(
        lambda some: rules.slices(some, checkpoint.handles), [some for _, some in blocks(handles, ordered)]
    )
    return RestorePlan(
        source=record.ref,
        job_id=record.job_id,
        topology=resolved,
        operators=operators,
        assigned=pa.concat_tables(dealt),
        refusals=tuple(refusals),
        warnings=(*broken, *_warnings(match)),
        unchained=unchained,
        drop=tuple(sorted([*match.drop_whole, *_columns_dropped(match)])),
        columns=tuple(plan for plans in match.columns.values() for plan in plans),
    )


def _resolved(match: Match) -> JobGraph:
    graph = match.record.graph
    return JobGraph(
        tuple(
            resolve(
                operator,
                graph.by_uid.get(operator.uid),
                finished=match.statuses.get(operator.uid) is Status.FULLY_FINISHED,
            )
            for operator in match.topology.operators
        ),
        match.topology.edges,
    )


def _state_arrays(match: Match, ordered: Sequence[State], operators: Sequence[OperatorPlan]) -> States:
    """The numbers of each state's operator; a new parallelism of 0 keeps it out of every rule."""
    plans = {plan.uid: plan for plan in operators}
    uids = sorted({state.operator for state in ordered})
    rank = {uid: number for number, uid in enumerate(uids)}
    rescaled = match.record.rescaled_from is not None
    old = {uid: match.record.graph.operator(uid) for uid in uids}
    settled = {
        uid: plans[uid].parallelism == saved.parallelism and saved.status is Status.RUNNING
        for uid, saved in old.items()
    }
    anew = [
        plan.uid
        for plan in operators
        if plan.action is Action.START
        and (
            rescaled
            or plan.parallelism != plan.old_parallelism
            or match.record.graph.by_uid[plan.uid].status is not Status.RUNNING
        )
    ]
    reached = disturbed(match.topology, anew)

    def column(values: Mapping[OperatorId, int]) -> Ints:
        return np.array([values[state.operator] for state in ordered], dtype=np.int64)

    # Refused numbers may be such that no rule makes sense of them: those operators are left out.
    started = {
        uid: plans[uid].action is Action.START
        and 1 <= plans[uid].parallelism <= MAX_PARALLELISM_LIMIT
        and (plans[uid].parallelism <= (saved.max_parallelism or 0) or not match.has_keys(uid))
        for uid, saved in old.items()
    }
    kept = np.array([not match.dropped(state) for state in ordered], dtype=np.bool_)
    return States(
        operator=column(rank),
        parallelism=column({uid: plans[uid].parallelism if started[uid] else 0 for uid in uids}) * kept,
        max_parallelism=column({uid: saved.max_parallelism or 0 for uid, saved in old.items()}),
        settled=column(settled).astype(np.bool_),
        undisturbed=column({uid: uid not in reached for uid in uids}).astype(np.bool_),
    )


def _in_threads(rule: Callable[[Handles], pa.Table], parts: Sequence[Handles]) -> list[pa.Table]:
    """A rule on every part, in order; on several at a time where there are several: numpy and Arrow let go of the lock."""
    if len(parts) == 1:
        return [rule(parts[0])]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="stateformat-plan") as pool:
        return list(pool.map(rule, parts))


class _Rules:
    """The rule of each mode, for handles of whole operators; ``ordered`` are the states in byte order."""

    def __init__(self, match: Match, ordered: Sequence[State], states: States) -> None:
        self._ordered = ordered
        self._states = states
        modes = np.array([state.mode for state in ordered], dtype=object)
        known = np.array(
            [not match.dropped(state) and state.operator in match.topology.by_uid for state in ordered], dtype=np.bool_
        )
        in_plan = states.parallelism > 0
        self._takes_part = {mode: (modes == mode) & (known if mode is Mode.COMMITTABLES else in_plan) for mode in Mode}
        partitioners = np.array([_partitioner(match.record, state) for state in ordered], dtype=object)
        self._by_key, self._stays = partitioners == Partitioner.HASH, partitioners == Partitioner.BROADCAST

    def slices(self, handles: Handles, table: pa.Table) -> pa.Table:
        """Who reads what of these handles; ``table`` is the manifest."""
        states = self._states

        def of(mode: Mode) -> Handles:
            return handles.where(self._takes_part[mode][handles.state])

        in_flight = deal_in_flight(of(Mode.IN_FLIGHT), states, by_key=self._by_key, stays=self._stays)
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
    """The columns that are given up here; not those that had gone before."""
    return [
        f"{plan.operator}/{plan.state}.{plan.saved}"
        for plans in match.columns.values()
        for plan in plans
        if plan.action is ColumnAction.DROPPED
    ]


def _warnings(match: Match) -> Iterator[PlanWarning]:
    for operator, saved in match.restarted:
        if saved.status is Status.PARTIALLY_FINISHED:
            done = len(saved.finished) + len(saved.finishing)
            yield PlanWarning(
                WarningCode.FINISHED_SUBTASKS_START,
                operator.uid,
                f"operator {operator.uid!r} was partially finished ({done} of {saved.parallelism} subtasks); all its "
                "subtasks start, and share what the running ones reported",
            )
    for state in match.record.states:
        if match.dropped(state) and match.rows_of(state):
            yield PlanWarning(
                WarningCode.STATE_DROPPED,
                state.operator,
                f"{state.mode} state {state.name!r} of operator {state.operator!r} with {match.rows_of(state)} rows is "
                "given up, as asked",
            )
        for plan in match.columns.get((state.operator, state.name), ()):
            if plan.action is ColumnAction.DROPPED and match.rows_of(state):
                yield PlanWarning(
                    WarningCode.COLUMN_DROPPED,
                    state.operator,
                    f"column {plan.saved!r} of {state.mode} state {state.name!r} of operator {state.operator!r} with "
                    f"{match.rows_of(state)} rows is given up, as asked",
                )


__all__ = ["Plannable", "RestorePlan", "plan_restore"]
