"""What a checkpoint may not contain, whatever it is restored into.

These are the rules that publishing enforces and ``ckpt validate`` reports (SPEC.md sections 3.4 and 4.6). A planner asks
them again because a plan for a checkpoint that contradicts itself would lose state without a word. Handles are looked at as
columns; only faults are looked at one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from stateformat.errors import DamagedCheckpoint, ErrorKind
from stateformat.graph import Operator, Status, SubtaskSet
from stateformat.model import PER_SUBTASK_MODES, Mode, Record, State
from stateformat.schema import has_key_groups

from ..tables import Flags, Handles, Ints, damaged
from .refusals import Refusal, RefusalCode

_VALIDATE = "`ckpt validate` lists everything that is wrong with the checkpoint; restore from another one"


def checkpoint_refusals(record: Record, states: Sequence[State], handles: Handles) -> Iterator[Refusal]:
    """Union state in a partially finished operator, statuses that contradict each other or the handles, absent handles.

    ``states`` are the record's in byte order, as in ``handles``.
    """
    for state in states:
        operator = record.graph.operator(state.operator)
        if state.mode is Mode.UNION and operator.status is Status.PARTIALLY_FINISHED:
            done = len(operator.finished) + len(operator.finishing)
            yield Refusal(
                RefusalCode.UNION_PARTIALLY_FINISHED,
                operator.uid,
                f"operator {operator.uid!r} has union state {state.name!r}, but {done} of its {operator.parallelism} "
                "subtasks are finished, and what they kept for all is gone",
                "restore from a checkpoint from before they finished, or keep that state in another mode",
                {"state": state.name, "done": done, "parallelism": operator.parallelism},
            )
    for operator in record.graph.operators:
        yield from _range_refusals(operator)
    yield from _handle_refusals(record, states, handles)


def check_owners(record: Record, states: Sequence[State]) -> None:
    """``DamagedCheckpoint`` for a state of an operator that the graph lacks: no rule here can say whose it is."""
    for state in states:
        if state.operator not in record.graph.by_uid:
            raise DamagedCheckpoint(
                f"state {state.name!r} of operator {state.operator!r} belongs to an operator that the graph of checkpoint "
                f"{record.checkpoint_id} lacks; `ckpt validate` lists everything that is wrong",
                kind=ErrorKind.UNKNOWN_OPERATOR,
                operator=state.operator,
                state=state.name,
            )


def check_groups(record: Record, states: Sequence[State], parts: Iterable[Handles]) -> None:
    """``DamagedCheckpoint`` for handles with key groups that are not their subtask's, or that two of a layer share.

    Either would give some rows to nobody or twice (SPEC.md sections 4.3 and 5.3), without a word. ``parts`` are all handles,
    some whole operators at a time.
    """
    keyed = np.array([has_key_groups(state) for state in states], dtype=np.bool_)
    operators = [record.graph.operator(state.operator) for state in states]
    parallelism = np.array([operator.parallelism for operator in operators], dtype=np.int64)
    ceiling = np.array([operator.max_parallelism or 0 for operator in operators], dtype=np.int64)
    for handles in parts:
        found = handles.where(keyed[handles.state] & (handles.rows > 0))
        _check_groups(found, parallelism[found.state], ceiling[found.state])


def _check_groups(found: Handles, parallelism: Ints, ceiling: Ints) -> None:
    """The same for such handles with rows, and the numbers of each one's operator."""
    first = -(-found.subtask * ceiling // parallelism)
    last = -(-(found.subtask + 1) * ceiling // parallelism) - 1
    # Subtasks and groups that do not exist are said elsewhere, in other words.
    exists = (found.subtask >= 0) & (found.subtask < parallelism) & (found.last_group < ceiling)
    foreign = np.flatnonzero(exists & ((found.first_group < first) | (found.last_group > last)))
    if len(foreign):
        at = int(foreign[0])
        raise damaged(
            int(found.number[at]),
            f"has key groups {found.first_group[at]} to {found.last_group[at]}, and its subtask {found.subtask[at]} owns "
            f"{first[at]} to {last[at]}",
        )
    beside = (found.state[1:] == found.state[:-1]) & (found.subtask[1:] == found.subtask[:-1])
    beside &= found.layer[1:] == found.layer[:-1]
    if not (beside & (found.first_group[1:] <= found.last_group[:-1])).any():
        return
    # Handles of one layer may stand in any order of groups.
    order = np.lexsort((found.first_group, found.layer, found.subtask, found.state))
    shared = beside & (found.first_group[order][1:] <= found.last_group[order][:-1])
    if shared.any():
        at = int(order[1:][shared][0])
        raise damaged(int(found.number[at]), "has key groups that another handle of its subtask and layer has too")


def _range_refusals(operator: Operator) -> Iterator[Refusal]:
    ranges = sorted((*operator.finished.ranges, *operator.finishing.ranges))
    disjoint = all(before[1] < after[0] for before, after in pairwise(ranges))
    within = all(0 <= first <= last < operator.parallelism for first, last in ranges)
    if not (disjoint and within):
        yield Refusal(
            RefusalCode.STATUS_CONTRADICTION,
            operator.uid,
            f"operator {operator.uid!r} has parallelism {operator.parallelism} and is said to be finished in "
            f"{operator.finished or 'none'} and finishing in {operator.finishing or 'none'}, which "
            + ("overlap" if within else "are not all subtasks of it"),
            _VALIDATE,
            {"finished": str(operator.finished), "finishing": str(operator.finishing)},
        )


def _done(record: Record) -> tuple[Flags, dict[str, int]]:
    """Which subtasks are finished or finishing, all operators in a row; where each operator begins."""
    starts: dict[str, int] = {}
    total = 0
    for operator in record.graph.operators:
        starts[operator.uid] = total
        total += max(operator.parallelism, 0)
    done = np.zeros(total, dtype=np.bool_)
    for operator in record.graph.operators:
        start = starts[operator.uid]
        for first, last in (*operator.finished.ranges, *operator.finishing.ranges):
            done[start + max(first, 0) : start + min(last + 1, operator.parallelism)] = True
    return done, starts


def _handle_refusals(record: Record, states: Sequence[State], handles: Handles) -> Iterator[Refusal]:
    done, starts = _done(record)
    operators = [record.graph.operator(state.operator) for state in states]
    parallelism = np.array([operator.parallelism for operator in operators], dtype=np.int64)
    start = np.array([starts[operator.uid] for operator in operators], dtype=np.int64)
    per_subtask = np.array([state.mode in PER_SUBTASK_MODES for state in states], dtype=np.bool_)
    # Masks, not copies of every column: nearly all handles are right.
    mine = per_subtask[handles.state]
    inside = mine & (handles.subtask >= 0) & (handles.subtask < parallelism[handles.state])
    yield from _unwanted(states, operators, handles.where(mine & ~inside), "are not subtasks of it")
    ended = inside.copy()
    ended[inside] = done[(start[handles.state] + handles.subtask)[inside]]
    yield from _unwanted(states, operators, handles.where(ended), "are finished or finishing")

    reporting = inside & ~ended & (handles.layer == 0)
    of_state, subtasks = handles.state[reporting], handles.subtask[reporting]
    new = np.ones(len(subtasks), dtype=np.bool_)
    new[1:] = (of_state[1:] != of_state[:-1]) | (subtasks[1:] != subtasks[:-1])
    found = np.bincount(of_state[new], minlength=len(states))
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(done)])
    running = parallelism - (ends[start + parallelism] - ends[start])
    for number in np.flatnonzero(per_subtask & (found < running)).tolist():
        operator = operators[number]
        has = np.zeros(operator.parallelism, dtype=np.bool_)
        has[subtasks[of_state == number]] = True
        own = done[start[number] : start[number] + operator.parallelism]
        yield _absent(states[number], np.flatnonzero(~has & ~own))
    yield from _coordinator_refusals(states, operators, handles)


def _coordinator_refusals(
    states: Sequence[State], operators: Sequence[Operator], handles: Handles
) -> Iterator[Refusal]:
    counts = np.bincount(handles.state, minlength=len(states)).tolist()
    for state, operator, count in zip(states, operators, counts, strict=True):
        if state.mode is not Mode.COORDINATOR:
            continue
        wanted = 0 if operator.status is Status.FULLY_FINISHED else 1
        if count != wanted:
            yield Refusal(
                RefusalCode.HANDLE_MISSING if count < wanted else RefusalCode.STATUS_CONTRADICTION,
                operator.uid,
                f"operator {operator.uid!r} is {operator.status.replace('_', ' ')} and has {count} handles of its "
                f"coordinator's state {state.name!r}, not {wanted}",
                _VALIDATE,
                {"state": state.name, "handles": count},
            )


def _unwanted(states: Sequence[State], operators: Sequence[Operator], handles: Handles, why: str) -> Iterator[Refusal]:
    for number in np.unique(handles.state).tolist():
        named = SubtaskSet.of(handles.subtask[handles.state == number].tolist())
        yield Refusal(
            RefusalCode.STATUS_CONTRADICTION,
            operators[number].uid,
            f"operator {operators[number].uid!r} of parallelism {operators[number].parallelism} has {states[number].mode} "
            f"state {states[number].name!r} of subtasks {named}, which {why}",
            _VALIDATE,
            {"state": states[number].name, "subtasks": str(named)},
        )


def _absent(state: State, missing: Ints) -> Refusal:
    named = SubtaskSet.of(missing.tolist())
    return Refusal(
        RefusalCode.HANDLE_MISSING,
        state.operator,
        f"operator {state.operator!r} has no handle of {state.mode} state {state.name!r} for its running subtasks {named}; "
        "absence is damage, since empty state has handles too",
        _VALIDATE,
        {"state": state.name, "subtasks": str(named)},
    )
