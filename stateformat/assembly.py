"""From the parts of a checkpoint to its graph and its handles: pure functions.

Tables are in the manifest's columns (``schema.MANIFEST_SCHEMA``, with ``inline``). Loops go over
states and subtasks, never over handles.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .errors import ErrorKind, InvalidState
from .graph import JobGraph, OperatorId, SubtaskSet
from .keys import DEFAULT_KEY_HASH, key_group_count
from .manifest import cut_handles, handles_table
from .model import Handle, Mode, State
from .schema import MANIFEST_SCHEMA
from .snapshot import ON_TOP, Snapshot

Finished = Mapping[str, SubtaskSet]
Snapshots = Mapping[tuple[str, int | None], Snapshot]


def complete_graph(graph: JobGraph, parent: JobGraph | None) -> JobGraph:
    """Return the graph of a record: what a topology leaves open is the parent's, else the default."""
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
    """Return the graph with every subtask that is finished (by graph or mark) or finishing.

    Raises ``InvalidState`` (kind ``STATUS_CONTRADICTION``) where a subtask has two statuses.
    """
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
    """Yield the operators whose snapshots are missing, in the order of the graph.

    A running subtask owes a snapshot when its operator declares a state that subtasks write,
    committables included. A coordinator owes one when it declares a state and its operator has not
    fully finished.
    """
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


def carried_handles(table: pa.Table, operator: str, state: str, subtasks: list[int | None]) -> pa.Table:
    """Return the rows of one state and these subtasks. Raises ``InvalidState`` where one has none."""
    mine = pc.and_(pc.equal(table["operator"], operator), pc.equal(table["state"], state))
    found = table.filter(pc.and_(mine, pc.is_in(table["subtask"], value_set=pa.array(subtasks, pa.int32()))))
    missing = set(subtasks) - set(pc.unique(found["subtask"]).to_pylist())
    if missing:
        raise InvalidState(
            f"subtask {SubtaskSet.of(i for i in missing if i is not None) or 'of the coordinator'} of {operator!r} carries "
            f"state {state!r}, but what the run holds has no handle of it; write the state whole",
            kind=ErrorKind.STATE_MISSING,
            operator=operator,
            state=state,
        )
    return found.select(MANIFEST_SCHEMA.names).cast(MANIFEST_SCHEMA)


def carried_by_plan(
    handles: pa.Table, slices: pa.Table, states: Iterable[State], parallelism: Mapping[str, int]
) -> pa.Table:
    """Return keyed handles cut by a restore plan's slices, with an empty one where a subtask has none.

    ``handles`` is the whole manifest, ``parallelism`` that of the operators to start. Slices leave
    out what has no rows, but every subtask must report each state (SPEC.md section 4.6).
    """
    keyed = [state for state in states if state.mode is Mode.KEYED and state.operator in parallelism]
    wanted = slices.filter(pc.equal(slices["mode"], Mode.KEYED.value))
    bases = wanted.filter(pc.equal(wanted["layer"], 0))
    empty: list[Handle] = []
    for state in keyed:
        mine = pc.and_(pc.equal(bases["operator"], state.operator), pc.equal(bases["state"], state.name))
        has_base = np.zeros(parallelism[state.operator], np.bool_)
        has_base[bases["subtask"].filter(mine).to_numpy()] = True
        blank = Handle(state.operator, state.name, state.mode, None, 0, None, state.current.id)
        empty += [blank._replace(subtask=subtask) for subtask in np.flatnonzero(~has_base).tolist()]
    return pa.concat_tables([cut_handles(handles, wanted), handles_table(empty)])


def place_on_top(own: pa.Table, underneath: Mapping[tuple[str, str], pa.Table]) -> pa.Table:
    """Return ``own`` with each layer :data:`ON_TOP` set to one above the highest layer carried.

    Raises ``InvalidState`` for a delta of a state that its subtask does not carry.
    """
    pending = pc.equal(own["layer"], ON_TOP)
    if not pc.any(pending).as_py():
        return own
    layers = own["layer"].to_numpy().copy()
    subtasks = pc.fill_null(own["subtask"], -1).to_numpy()
    for (operator, state), table in underneath.items():
        mine = pc.and_(pc.and_(pending, pc.equal(own["operator"], operator)), pc.equal(own["state"], state))
        rows = np.flatnonzero(mine.to_numpy())
        below = pc.fill_null(table["subtask"], -1).to_numpy()
        highest = np.full(1 + max(below.max(initial=-1), subtasks[rows].max(initial=-1)) + 1, -1, np.int32)
        np.maximum.at(highest, below + 1, table["layer"].to_numpy())
        layers[rows] = highest[subtasks[rows] + 1] + 1
    if (layers == ON_TOP).any():
        row = own.slice(int(np.flatnonzero(layers == ON_TOP)[0]), 1).to_pylist()[0]
        raise InvalidState(
            f"subtask {row['subtask']} of {row['operator']!r} has written a delta of state {row['state']!r} but carries "
            "nothing underneath it; name the state as carried, or write it whole",
            kind=ErrorKind.STATE_NOT_ALLOWED,
        )
    return own.set_column(own.schema.get_field_index("layer"), MANIFEST_SCHEMA.field("layer"), pa.array(layers))


def with_spilled(handles: pa.Table, new_paths: Mapping[str, str]) -> pa.Table:
    """Return ``handles`` with some inline segments removed and their paths replaced by new ones."""
    at = pc.index_in(handles["path"], value_set=pa.array(list(new_paths), pa.string()), skip_nulls=True)
    moved = pc.is_valid(at)
    names = pa.array(list(new_paths.values()), pa.string()).take(at.combine_chunks())
    path = pc.if_else(moved, names, handles["path"].combine_chunks())
    inline = pc.if_else(moved, pa.scalar(None, pa.binary()), handles["inline"].cast(pa.binary()))
    schema = handles.schema
    handles = handles.set_column(schema.get_field_index("path"), MANIFEST_SCHEMA.field("path"), path)
    return handles.set_column(schema.get_field_index("inline"), MANIFEST_SCHEMA.field("inline"), inline)
