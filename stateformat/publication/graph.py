"""The graph of a pending checkpoint, and the snapshots it still lacks: pure functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..errors import ErrorKind, InvalidState
from ..graph import JobGraph, OperatorId, SubtaskSet
from ..keys import DEFAULT_KEY_HASH, key_group_count
from ..model import Mode, State
from ..snapshot import Snapshot

Finished = Mapping[str, SubtaskSet]
Snapshots = Mapping[tuple[str, int | None], Snapshot]


def complete_graph(graph: JobGraph, parent: JobGraph | None) -> JobGraph:
    """Return the graph with missing values taken from the parent, else from the defaults."""
    before = parent.by_uid if parent else {}
    changed = {}
    for operator in graph.operators:
        saved = before.get(operator.uid)
        ceiling, key_hash = operator.max_parallelism, operator.key_hash
        if ceiling is None:
            ceiling = saved.max_parallelism if saved else key_group_count(operator)
        if key_hash is None:
            key_hash = saved.key_hash if saved else DEFAULT_KEY_HASH
        changed[operator.uid] = replace(operator, max_parallelism=ceiling, key_hash=key_hash, pinned=False)
    return graph.with_operators(changed)


def graph_with_statuses(graph: JobGraph, finished: Finished, snapshots: Snapshots) -> JobGraph:
    """Return the graph with finished and finishing subtasks. Raises ``InvalidState``."""
    reported, waiting = _reported(snapshots)
    changed = {}
    for operator in graph.operators:
        uid = operator.uid
        ended = operator.finished | finished.get(uid, SubtaskSet())
        ending = operator.finishing | SubtaskSet.of(waiting[uid])
        for one, other, subtasks in (
            ("has finished", "is finishing", _common(ended, ending)),
            ("has finished", "has reported a snapshot of a running one", _common(ended, reported[uid])),
            ("is finishing", "has reported a snapshot of a running one", _common(ending, reported[uid])),
        ):
            if subtasks:
                raise InvalidState(
                    f"subtask {subtasks} of {uid!r} {one}, as the checkpoint was told, and also {other}; one is wrong",
                    kind=ErrorKind.STATUS_CONTRADICTION,
                    operator=uid,
                )
        changed[uid] = replace(operator, finished=ended, finishing=ending)
    return graph.with_operators(changed)


def _reported(snapshots: Snapshots) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the subtasks by operator that have reported as running, and as finishing."""
    running: dict[str, list[int]] = defaultdict(list)
    finishing: dict[str, list[int]] = defaultdict(list)
    for (uid, subtask), snapshot in snapshots.items():
        if subtask is not None:
            (finishing if snapshot.finishing else running)[uid].append(subtask)
    return running, finishing


def _common(one: SubtaskSet, other: Iterable[int]) -> SubtaskSet:
    return SubtaskSet.of(set(one).intersection(other)) if one else one


class Outstanding(NamedTuple):
    """The subtasks of an operator, and perhaps its coordinator, whose snapshots are missing."""

    operator: OperatorId
    subtasks: SubtaskSet
    coordinator: bool = False

    def __str__(self) -> str:
        who = [f"subtasks {self.subtasks}"] if self.subtasks else []
        who += ["the coordinator"] if self.coordinator else []
        return f"{' and '.join(who)} of {self.operator!r}"


def outstanding(
    graph: JobGraph, states: Iterable[State], finished: Finished, snapshots: Snapshots
) -> Iterator[Outstanding]:
    """Yield the operators whose snapshots are missing (``PendingCheckpoint.outstanding``)."""
    modes: dict[str, set[Mode]] = defaultdict(set)
    for state in states:
        modes[state.operator].add(state.mode)
    running, waiting = _reported(snapshots)
    for operator in graph.operators:
        uid = operator.uid
        if not modes[uid]:
            continue
        owes = np.ones(operator.parallelism, np.bool_)
        for ended in (operator.finished, operator.finishing, finished.get(uid, SubtaskSet())):
            for first, last in ended.ranges:
                owes[first : last + 1] = False
        owes[waiting[uid]] = False
        coordinator = Mode.COORDINATOR in modes[uid] and bool(owes.any()) and (uid, None) not in snapshots
        owes[running[uid]] = False
        missing = SubtaskSet.of(np.flatnonzero(owes).tolist() if modes[uid] - {Mode.COORDINATOR} else ())
        if missing or coordinator:
            yield Outstanding(uid, missing, coordinator)


def carried_keys(snapshots: Snapshots) -> dict[tuple[str, str], list[int | None]]:
    """Return the subtasks that carry each (operator, state)."""
    carrying: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for snapshot in snapshots.values():
        for state in snapshot.carried:
            carrying[snapshot.operator, state].append(snapshot.subtask)
    return carrying
