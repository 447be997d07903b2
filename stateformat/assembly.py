"""From the parts of a checkpoint to its graph and its handles: pure functions over values and Arrow tables.

``pending`` gathers the parts and carries out what follows; nothing here reads or writes. Tables are in the manifest's
columns (``schema.MANIFEST_SCHEMA``, with ``inline``); loops go over states and subtasks, never over handles.
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

Marks = Mapping[str, SubtaskSet]
Snapshots = Mapping[tuple[str, int | None], Snapshot]


def resolved_graph(graph: JobGraph, parent: JobGraph | None) -> JobGraph:
    """The graph of a record: what a topology leaves open is the parent's, else the default."""
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


def graph_with_statuses(graph: JobGraph, finished: Marks, finishing: Marks, snapshots: Snapshots) -> JobGraph:
    """The graph with what has finished and is finishing: by the graph itself, by marks, and by what snapshots say.

    Raises ``InvalidState`` (kind ``STATUS_CONTRADICTION``) where a subtask is two things at once.
    """
    reported: dict[str, list[int]] = {operator.uid: [] for operator in graph.operators}
    waiting: dict[str, list[int]] = {operator.uid: [] for operator in graph.operators}
    for (uid, subtask), snapshot in snapshots.items():
        if subtask is not None:
            (waiting if snapshot.finishing else reported)[uid].append(subtask)
    nobody = SubtaskSet()
    changed = {}
    for operator in graph.operators:
        uid = operator.uid
        ended = operator.finished | finished.get(uid, nobody)
        ending = operator.finishing | finishing.get(uid, nobody) | SubtaskSet.of(waiting[uid])
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


def _common(one: SubtaskSet, other: Iterable[int]) -> SubtaskSet:
    return SubtaskSet.of(set(one).intersection(other)) if one else one


class Outstanding(NamedTuple):
    """An operator whose snapshots a checkpoint still waits for: of these subtasks, and of its coordinator or not."""

    operator: OperatorId
    subtasks: SubtaskSet
    coordinator: bool = False

    def __str__(self) -> str:
        who = [f"subtasks {self.subtasks}"] if self.subtasks else []
        who += ["the coordinator"] if self.coordinator else []
        return f"{' and '.join(who)} of {self.operator!r}"


def outstanding(
    graph: JobGraph, states: Iterable[State], finished: Marks, finishing: Marks, snapshots: Snapshots
) -> Iterator[Outstanding]:
    """The operators that have not answered in full, in the order of the graph.

    A running subtask owes a snapshot when its operator declares a state that subtasks write, committables included. A
    coordinator owes one when it declares a state and its operator has not fully finished.
    """
    modes: dict[str, set[Mode]] = defaultdict(set)
    for state in states:
        modes[state.operator].add(state.mode)
    running: dict[str, list[int]] = defaultdict(list)
    waiting: dict[str, list[int]] = defaultdict(list)
    for (uid, subtask), snapshot in snapshots.items():
        if subtask is not None:
            (waiting if snapshot.finishing else running)[uid].append(subtask)
    nobody = SubtaskSet()
    for operator in graph.operators:
        uid = operator.uid
        if not modes[uid]:
            continue
        owes = np.ones(operator.parallelism, np.bool_)
        for ended in (operator.finished, operator.finishing, finished.get(uid, nobody), finishing.get(uid, nobody)):
            for first, last in ended.ranges:
                owes[first : last + 1] = False
        owes[waiting[uid]] = False
        coordinator = Mode.COORDINATOR in modes[uid] and bool(owes.any()) and (uid, None) not in snapshots
        owes[running[uid]] = False
        missing = SubtaskSet.of(np.flatnonzero(owes).tolist() if modes[uid] - {Mode.COORDINATOR} else ())
        if missing or coordinator:
            yield Outstanding(uid, missing, coordinator)


def carried_keys(snapshots: Snapshots) -> dict[tuple[str, str], list[int | None]]:
    """Which subtasks carry which (operator, state), by what their snapshots say."""
    wanted: dict[tuple[str, str], list[int | None]] = {}
    for snapshot in snapshots.values():
        for state in snapshot.carried:
            wanted.setdefault((snapshot.operator, state), []).append(snapshot.subtask)
    return wanted


def carried_handles(table: pa.Table, operator: str, state: str, subtasks: list[int | None]) -> pa.Table:
    """The rows of ``table`` for one state and these subtasks, in order. Raises ``InvalidState`` where one has none."""
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
    """Keyed handles cut by the slices of a restore plan, and an empty one of layer 0 wherever a subtask has none.

    ``handles`` is the whole manifest, ``parallelism`` that of the operators which are started. The slices leave out what has
    no rows; whoever carries says of every subtask what it has, if only that it is nothing (SPEC.md section 4.6).
    """
    keyed = [state for state in states if state.mode is Mode.KEYED and state.operator in parallelism]
    wanted = slices.filter(pc.equal(slices["mode"], Mode.KEYED.value))
    bases = wanted.filter(pc.equal(wanted["layer"], 0))
    empty: list[Handle] = []
    for state in keyed:
        mine = pc.and_(pc.equal(bases["operator"], state.operator), pc.equal(bases["state"], state.name))
        held = np.zeros(parallelism[state.operator], np.bool_)
        held[bases["subtask"].filter(mine).to_numpy()] = True
        blank = Handle(state.operator, state.name, state.mode, None, 0, None, state.current.id)
        empty += [blank._replace(subtask=subtask) for subtask in np.flatnonzero(~held).tolist()]
    return pa.concat_tables([cut_handles(handles, wanted), handles_table(empty)])


def on_top(own: pa.Table, underneath: Mapping[tuple[str, str], pa.Table]) -> pa.Table:
    """``own`` with every layer :data:`ON_TOP` replaced by one above the highest that its subtask carries.

    Raises ``InvalidState`` for a delta of a state that is not carried: it would have nothing underneath.
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


def moved_out(handles: pa.Table, new_paths: Mapping[str, str]) -> pa.Table:
    """``handles`` with the inline bytes of some paths gone, and those paths renamed to where their objects now are."""
    at = pc.index_in(handles["path"], value_set=pa.array(list(new_paths), pa.string()), skip_nulls=True)
    moved = pc.is_valid(at)
    names = pa.array(list(new_paths.values()), pa.string()).take(at.combine_chunks())
    path = pc.if_else(moved, names, handles["path"].combine_chunks())
    inline = pc.if_else(moved, pa.scalar(None, pa.binary()), handles["inline"].cast(pa.binary()))
    schema = handles.schema
    handles = handles.set_column(schema.get_field_index("path"), MANIFEST_SCHEMA.field("path"), path)
    return handles.set_column(schema.get_field_index("inline"), MANIFEST_SCHEMA.field("inline"), inline)
