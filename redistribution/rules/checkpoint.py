"""What a checkpoint may not contain, whatever it is restored into (SPEC.md sections 3.4 and 4.6).

Publishing enforces these rules and ``ckpt validate`` reports them. A planner checks them again,
because a plan for a checkpoint that contradicts itself would lose state silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from stateformat.errors import DamagedCheckpoint, ErrorKind
from stateformat.graph import Operator, Status, SubtaskSet
from stateformat.manifest import Ints, Mask, before
from stateformat.model import PER_SUBTASK_MODES, Mode, Record, State
from stateformat.schema import has_key_groups

from ..tables import Handles, damaged, run_starts
from .refusals import Refusal, RefusalCode

_VALIDATE = "`ckpt validate` lists everything that is wrong with the checkpoint; restore from another one"


class Found(NamedTuple):
    """What is wrong with the handles of some states, rule by rule."""

    outside: list[Refusal]
    ended: list[Refusal]
    absent: list[Refusal]
    coordinator: list[Refusal]


def checkpoint_refusals(record: Record, states: Sequence[State], found: Sequence[Found]) -> Iterator[Refusal]:
    """Refuse union state of finished subtasks, contradicting statuses, and missing handles.

    ``states`` are the record's in byte order; ``found`` is what :class:`HandleRules` found for
    each.
    """
    for state in states:
        operator = record.graph.operator(state.operator)
        if state.mode is Mode.UNION and operator.status is Status.PARTIALLY_FINISHED:
            done = len(operator.finished) + len(operator.finishing)
            message = (
                f"operator {operator.uid!r} has union state {state.name!r}, but {done} of its {operator.parallelism} "
                "subtasks are finished, and their entries are lost"
            )
            advice = "restore from a checkpoint from before they finished, or keep that state in another mode"
            details = {"state": state.name, "done": done, "parallelism": operator.parallelism}
            yield Refusal(RefusalCode.UNION_PARTIALLY_FINISHED, operator.uid, message, advice, details)
    for operator in record.graph.operators:
        yield from _range_refusals(operator)
    for of_one_rule in zip(*found, strict=True):
        yield from chain.from_iterable(of_one_rule)


def check_owners(record: Record, states: Sequence[State]) -> None:
    """Raise ``DamagedCheckpoint`` for a state whose operator is not in the graph."""
    for state in states:
        if state.operator not in record.graph.by_uid:
            raise DamagedCheckpoint(
                f"state {state.name!r} of operator {state.operator!r} belongs to an operator that the graph of "
                f"checkpoint {record.checkpoint_id} lacks; `ckpt validate` lists everything that is wrong",
                kind=ErrorKind.UNKNOWN_OPERATOR,
                operator=state.operator,
                state=state.name,
            )


def _check_groups(found: Handles, parallelism: Ints, ceiling: Ints) -> None:
    """Check handles with rows and key groups, given the numbers of each handle's operator."""
    first = -(-found.subtask * ceiling // parallelism)
    last = -(-(found.subtask + 1) * ceiling // parallelism) - 1
    # Other rules refuse subtasks and groups that do not exist.
    exists = (found.subtask >= 0) & (found.subtask < parallelism) & (found.last_group < ceiling)
    foreign = np.flatnonzero(exists & ((found.first_group < first) | (found.last_group > last)))
    if len(foreign):
        at = int(foreign[0])
        groups = f"{found.first_group[at]} to {found.last_group[at]}"
        what = f"has key groups {groups}, but its subtask {found.subtask[at]} owns {first[at]} to {last[at]}"
        raise damaged(int(found.number[at]), what)
    beside = ~run_starts(found.state, found.subtask, found.layer)[1:]
    if not (beside & (found.first_group[1:] <= found.last_group[:-1])).any():
        return
    # Handles of one layer may come in any order of groups.
    order = np.lexsort((found.first_group, found.layer, found.subtask, found.state))
    shared = beside & (found.first_group[order][1:] <= found.last_group[order][:-1])
    if shared.any():
        at = int(order[1:][shared][0])
        raise damaged(int(found.number[at]), "shares key groups with another handle of its subtask and layer")


def _range_refusals(operator: Operator) -> Iterator[Refusal]:
    ranges = sorted((*operator.finished.ranges, *operator.finishing.ranges))
    disjoint = all(one[1] < other[0] for one, other in pairwise(ranges))
    within = all(0 <= first <= last < operator.parallelism for first, last in ranges)
    if not (disjoint and within):
        message = (
            f"operator {operator.uid!r} has parallelism {operator.parallelism} and is said to be finished in "
            f"{operator.finished or 'none'} and finishing in {operator.finishing or 'none'}, which "
            + ("overlap" if within else "are not all subtasks of it")
        )
        details = {"finished": str(operator.finished), "finishing": str(operator.finishing)}
        yield Refusal(RefusalCode.STATUS_CONTRADICTION, operator.uid, message, _VALIDATE, details)


def _done(record: Record) -> tuple[Mask, dict[str, int]]:
    """Return which subtasks are finished or finishing, and where those of each operator begin."""
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


class HandleRules:
    """Rules of handles, applied to some whole operators at a time. Thread-safe."""

    def __init__(self, record: Record, states: Sequence[State]) -> None:
        self._states = states
        self._operators = [record.graph.operator(state.operator) for state in states]
        self._keyed = np.array([has_key_groups(state) for state in states], dtype=np.bool_)
        self._per_subtask = np.array([state.mode in PER_SUBTASK_MODES for state in states], dtype=np.bool_)
        self._parallelism = np.array([operator.parallelism for operator in self._operators], dtype=np.int64)
        self._ceiling = np.array([operator.max_parallelism or 0 for operator in self._operators], dtype=np.int64)
        self._done, starts = _done(record)
        self._start = np.array([starts[operator.uid] for operator in self._operators], dtype=np.int64)
        ends = before(self._done.astype(np.int64))
        self._running = self._parallelism - (ends[self._start + self._parallelism] - ends[self._start])

    def check_groups(self, handles: Handles) -> None:
        """Raise ``DamagedCheckpoint`` for groups of another subtask, or in two handles of a layer.

        Either would silently lose or duplicate rows (SPEC.md sections 4.3 and 5.3).
        """
        found = handles.where(self._keyed[handles.state] & (handles.rows > 0))
        _check_groups(found, self._parallelism[found.state], self._ceiling[found.state])

    def refusals(self, handles: Handles, numbers: range) -> Found:
        """Return the refusals for all handles of the states ``numbers``."""
        mine = self._per_subtask[handles.state]
        inside = mine & (handles.subtask >= 0) & (handles.subtask < self._parallelism[handles.state])
        outside = [*self._unwanted(handles.where(mine & ~inside), "are not subtasks of it")]
        ended = inside.copy()
        ended[inside] = self._done[(self._start[handles.state] + handles.subtask)[inside]]
        over = [*self._unwanted(handles.where(ended), "are finished or finishing")]
        reporting = inside & ~ended & (handles.layer == 0)
        of_state, subtasks = handles.state[reporting], handles.subtask[reporting]
        return Found(
            outside, over, [*self._absent(of_state, subtasks, numbers)], [*self._coordinator(handles, numbers)]
        )

    def _absent(self, of_state: Ints, subtasks: Ints, numbers: range) -> Iterator[Refusal]:
        reporters = np.bincount(of_state[run_starts(of_state, subtasks)], minlength=len(self._states))
        lacking = self._per_subtask & (reporters < self._running)
        for number in (np.flatnonzero(lacking[numbers.start : numbers.stop]) + numbers.start).tolist():
            parallelism, start = self._operators[number].parallelism, self._start[number]
            has = np.zeros(parallelism, dtype=np.bool_)
            has[subtasks[of_state == number]] = True
            yield _absent(self._states[number], np.flatnonzero(~has & ~self._done[start : start + parallelism]))

    def _coordinator(self, handles: Handles, numbers: range) -> Iterator[Refusal]:
        counts = np.bincount(handles.state, minlength=len(self._states)).tolist()
        for number in numbers:
            state, operator, count = self._states[number], self._operators[number], counts[number]
            if state.mode is not Mode.COORDINATOR:
                continue
            wanted = 0 if operator.status is Status.FULLY_FINISHED else 1
            if count != wanted:
                code = RefusalCode.HANDLE_MISSING if count < wanted else RefusalCode.STATUS_CONTRADICTION
                message = (
                    f"operator {operator.uid!r} is {operator.status.replace('_', ' ')} and has {count} handles of its "
                    f"coordinator's state {state.name!r}, not {wanted}"
                )
                yield Refusal(code, operator.uid, message, _VALIDATE, {"state": state.name, "handles": count})

    def _unwanted(self, handles: Handles, why: str) -> Iterator[Refusal]:
        for number in np.unique(handles.state).tolist():
            state, operator = self._states[number], self._operators[number]
            named = SubtaskSet.of(handles.subtask[handles.state == number].tolist())
            message = (
                f"operator {operator.uid!r} of parallelism {operator.parallelism} has {state.mode} state "
                f"{state.name!r} of subtasks {named}, which {why}"
            )
            details = {"state": state.name, "subtasks": str(named)}
            yield Refusal(RefusalCode.STATUS_CONTRADICTION, operator.uid, message, _VALIDATE, details)


def _absent(state: State, missing: Ints) -> Refusal:
    named = SubtaskSet.of(missing.tolist())
    message = (
        f"operator {state.operator!r} has no handle of {state.mode} state {state.name!r} for its running subtasks "
        f"{named}; that is damage, since empty state has handles too"
    )
    details = {"state": state.name, "subtasks": str(named)}
    return Refusal(RefusalCode.HANDLE_MISSING, state.operator, message, _VALIDATE, details)
