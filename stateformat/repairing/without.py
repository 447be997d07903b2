"""A checkpoint's handles without those of lost segments, and what that gives up (SPEC.md 8.4).

A lost segment is given up as a whole. For keyed state its key groups are discarded in every layer,
because older layers alone would give values that were never current, and newer ones part of a
value. What remains passes the checks of every publication: if a subtask must have a handle, it gets
an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ..graph import Operator, SubtaskSet
from ..keys import MAX_PARALLELISM_LIMIT
from ..manifest import (
    Ints,
    Mask,
    before,
    cut_handles,
    handle_order,
    handle_rows,
    handles_table,
    integers,
    state_runs,
    take_rows,
)
from ..model import PER_SUBTASK_MODES, Handle, Mode, Record, State
from ..schema import SLICE_SCHEMA

Scope = Literal["rows", "keys"]
"""What is discarded with a lost key group: its rows in that state (``rows``), or in all keyed
states of the operator, so that its keys start afresh (``keys``).
"""
Effect = Literal["forgotten", "with_keys", "copied", "begins_anew", "output", "watermarks", "in_flight"]
"""What the loss means.

- ``forgotten``: entries, or the state of keys, are unknown;
- ``with_keys``: nothing of this state is lost, but it is discarded with the keys of another;
- ``copied``: another subtask's copy replaces it, so nothing is lost;
- ``begins_anew``: a coordinator has no state;
- ``output``: it is never committed, unless it was already;
- ``watermarks``: they are unknown until they advance;
- ``in_flight``: in-flight records do not arrive.
"""

_EFFECTS: Final[Mapping[Mode, Effect]] = {
    Mode.KEYED: "forgotten",
    Mode.EVEN_SPLIT: "forgotten",
    Mode.UNION: "forgotten",
    Mode.BROADCAST: "forgotten",
    Mode.COORDINATOR: "begins_anew",
    Mode.COMMITTABLES: "output",
    Mode.PROGRESS: "watermarks",
    Mode.IN_FLIGHT: "in_flight",
}
_DISPENSABLE: Final[frozenset[Effect]] = frozenset({"copied", "output", "watermarks", "in_flight"})
"""Effects that a source can tolerate; without its positions it would lose or repeat its input."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What is given up of one state. Rows are stored rows, as handles count them."""

    operator: str
    state: str
    mode: Mode
    effect: Effect
    segments: int
    """Lost segments of this state."""
    rows: int
    """Rows of lost segments; none for ``copied`` state."""
    rows_besides: int = 0
    """Rows of intact segments discarded with them: other layers, or the keys' other states."""
    rows_kept: int = 0
    """Rows of the state that remain."""
    subtasks: SubtaskSet = field(default_factory=SubtaskSet)
    key_groups: SubtaskSet = field(default_factory=SubtaskSet)
    """The key groups of keyed state; a set of numbers, like ``subtasks``."""
    delta_only: bool = False
    """Whether only layers above the base are lost."""
    needed: bool = False
    """Whether a run needs it: the positions of a source."""

    @property
    def all_rows(self) -> int:
        """All rows that are given up."""
        return self.rows + self.rows_besides


def without_lost(record: Record, handles: pa.Table, lost: Iterable[str], scope: Scope) -> tuple[pa.Table, list[Loss]]:
    """Return the handles without lost segments, and what is given up with them.

    ``handles``: a manifest's, with or without ``inline``. ``lost``: paths. The result is sorted as
    a manifest is.
    """
    gone = pc.fill_null(pc.is_in(handles["path"], value_set=pa.array(sorted(set(lost)), pa.string())), False)
    mask: Mask = gone.to_numpy()
    runs = {key: (start, stop) for key, start, stop in state_runs(handles)}
    touched = {key for key, (start, stop) in runs.items() if mask[start:stop].any()}
    groups = _lost_groups(record, handles, mask, runs, touched)
    if scope == "keys":
        by_operator: dict[str, Mask] = {}
        for (uid, _), mine in groups.items():
            by_operator[uid] = by_operator.get(uid, np.zeros(MAX_PARALLELISM_LIMIT, bool)) | mine
        for state in record.states:
            if state.mode is Mode.KEYED and state.operator in by_operator and (state.operator, state.name) in runs:
                groups[state.operator, state.name] = by_operator[state.operator]
    new, losses, stays = list[pa.Table](), list[Loss](), ~mask
    for key in sorted(touched | set(groups)):
        start, stop = runs[key]
        each = _State(record, record.state(*key), handles.slice(start, stop - start), mask[start:stop])
        found = each.without(groups.get(key))
        stays[start:stop] = found.stays
        new.append(found.new)
        if found.loss is not None:
            losses.append(found.loss)
    kept = np.append(stays, np.ones(sum(table.num_rows for table in new), bool))
    every, rows = pa.concat_tables([handles, *new]), np.flatnonzero(kept)
    small = take_rows(every.select(["operator", "state", "subtask", "layer"]), pa.array(rows))
    return take_rows(every, pa.array(rows[handle_order(small)])), losses


def _lost_groups(
    record: Record,
    handles: pa.Table,
    mask: Mask,
    runs: Mapping[tuple[str, str], tuple[int, int]],
    touched: Iterable[tuple[str, str]],
) -> dict[tuple[str, str], Mask]:
    """Return by keyed state the key groups that have rows in a lost segment."""
    found = {}
    for key in touched:
        if record.state(*key).mode is Mode.KEYED:
            start, stop = runs[key]
            mine = handles.slice(start, stop - start).filter(pa.array(mask[start:stop]))
            _, group, counts = handle_rows(mine).spread()
            found[key] = np.zeros(MAX_PARALLELISM_LIMIT, bool)
            found[key][group[counts > 0]] = True
    return found


class _Left(NamedTuple):
    """What remains of a state."""

    stays: Mask
    """Which of its handles stay as they are."""
    new: pa.Table
    """Handles that replace others."""
    loss: Loss | None
    """What is given up; None if nothing of the state is."""


@dataclass
class _State:
    """The handles of one state; ``gone`` marks those of lost segments."""

    record: Record
    state: State
    handles: pa.Table
    gone: Mask

    @property
    def operator(self) -> Operator:
        return self.record.graph.operator(self.state.operator)

    def without(self, groups: Mask | None) -> _Left:
        """Return what remains of the state, and what is given up."""
        stays, besides = ~self.gone, 0
        effect: Effect | None = None
        new = self.handles.slice(0, 0)
        if groups is not None:
            hit, new, besides = _without_groups(self.handles, self.gone, groups)
            stays &= ~hit
        elif self.state.mode is Mode.BROADCAST:
            stays, new = self._copied()
            effect = "copied" if new.num_rows else None
        elif self.state.mode is Mode.COORDINATOR:
            stays[:] = False
        rows_kept = int(integers(self.handles["rows"])[stays].sum()) + _rows(new)
        loss = self._loss(besides=besides, groups=groups, effect=effect, rows_kept=rows_kept)
        return _Left(stays, pa.concat_tables([new, self._answers(stays, new)]), loss)

    def _loss(self, *, besides: int, groups: Mask | None, effect: Effect | None, rows_kept: int) -> Loss | None:
        lost = self.handles.filter(pa.array(self.gone))
        if not lost.num_rows and not besides:
            return None
        found = effect or ("with_keys" if not lost.num_rows else _EFFECTS[self.state.mode])
        is_source = not self.record.graph.inputs(self.state.operator)
        subtasks = lost["subtask"].drop_null().unique().to_pylist()
        return Loss(
            operator=str(self.state.operator),
            state=self.state.name,
            mode=self.state.mode,
            effect=found,
            segments=pc.count_distinct(lost["path"]).as_py(),
            rows=0 if found == "copied" else _rows(lost),
            rows_besides=besides,
            rows_kept=rows_kept,
            subtasks=SubtaskSet.of(subtasks),
            key_groups=SubtaskSet() if groups is None else SubtaskSet.of(np.flatnonzero(groups).tolist()),
            delta_only=bool(lost.num_rows) and pc.min(lost["layer"]).as_py() > 0,
            needed=is_source and found not in _DISPENSABLE,
        )

    def _answers(self, stays: Mask, new: pa.Table) -> pa.Table:
        """Return the handles without rows that the state must have (SPEC.md 4.6)."""
        owing: list[int | None] = []
        if self.state.mode is Mode.COORDINATOR:
            owing = [None]
        elif self.state.mode in PER_SUBTASK_MODES:
            missing = np.ones(self.operator.parallelism, bool)
            missing[list(self.operator.done)] = False
            subtask, base = integers(self.handles["subtask"]), integers(self.handles["layer"]) == 0
            missing[subtask[stays & base]] = False
            missing[integers(new["subtask"])[integers(new["layer"]) == 0]] = False
            owing = list(np.flatnonzero(missing).tolist())
        state = self.state
        blank = Handle(state.operator, state.name, state.mode.value, None, 0, state.edge, state.current.id)
        empty = handles_table(blank._replace(subtask=subtask) for subtask in owing)
        return empty.select(self.handles.column_names).cast(self.handles.schema)

    def _copied(self) -> tuple[Mask, pa.Table]:
        """Return what remains of a broadcast state, and whole copies where a subtask's copy is
        lost.
        """
        subtask = integers(self.handles["subtask"])
        broken = np.unique(subtask[self.gone])
        donors = np.setdiff1d(subtask, broken)
        if not len(donors):
            return ~self.gone, self.handles.slice(0, 0)
        copy = self.handles.filter(pa.array(subtask == donors[0]))
        at = copy.schema.get_field_index("subtask")
        copies = [
            copy.set_column(at, copy.schema.field(at), pa.array([number] * copy.num_rows, pa.int32()))
            for number in broken.tolist()
        ]
        return ~np.isin(subtask, broken), pa.concat_tables(copies)


def _without_groups(handles: pa.Table, gone: Mask, groups: Mask) -> tuple[Mask, pa.Table, int]:
    """Cut key groups out of those handles of a state that are not ``gone``.

    Returns which handles are cut, what remains of them, and how many rows were removed.
    """
    first, last = integers(handles["first_group"]), integers(handles["last_group"])
    among = before(groups.astype(np.int64))
    near = np.flatnonzero(~gone & (first >= 0) & (among[np.maximum(last, 0) + 1] > among[np.maximum(first, 0)]))
    hit = np.zeros(handles.num_rows, bool)
    some = take_rows(handles, pa.array(near))
    rows = handle_rows(some)
    owner, group, counts = rows.spread()
    doomed = groups[group]
    touched = np.bincount(owner, doomed & (counts > 0), len(near)) > 0
    if not touched.any():
        return hit, handles.slice(0, 0), 0
    hit[near[touched]] = True
    # Runs of groups that remain, within one handle.
    sums = before(counts)[:-1]
    begins = np.append(True, owner[1:] != owner[:-1])
    opens = ~doomed & (begins | np.append(True, doomed[:-1]))
    run = np.cumsum(opens) - 1
    stays, firsts = np.flatnonzero(~doomed & touched[owner]), np.flatnonzero(opens & touched[owner])
    held = np.bincount(run[stays], counts[stays], run.max(initial=-1) + 1).astype(np.int64)[run[firsts]]
    lasts = np.maximum.reduceat(stays, np.searchsorted(stays, firsts)) if len(firsts) else firsts
    filled = held > 0
    firsts, lasts, held = firsts[filled], lasts[filled], held[filled]
    mine = owner[firsts]
    start = rows.row_start[mine] + sums[firsts] - sums[np.flatnonzero(begins)][mine]
    cut = cut_handles(some, _slices(some, mine, start, held, group[firsts], group[lasts]))
    return hit, cut, int(integers(some["rows"])[touched].sum()) - int(held.sum())


def _slices(handles: pa.Table, mine: Ints, start: Ints, rows: Ints, first: Ints, last: Ints) -> pa.Table:
    named = take_rows(handles.select(["operator", "state", "mode", "subtask", "layer"]), pa.array(mine))
    columns = {name: named[name] for name in named.column_names}
    columns |= {
        "handle": pa.array(mine, pa.int64()),
        "row_start": pa.array(start, pa.int64()),
        "rows": pa.array(rows, pa.int64()),
        "first_group": pa.array(first, pa.int32()),
        "last_group": pa.array(last, pa.int32()),
        "bytes": pa.array(np.zeros(len(mine), np.int64)),
    }
    return pa.table([columns[name] for name in SLICE_SCHEMA.names], schema=SLICE_SCHEMA)


def _rows(handles: pa.Table) -> int:
    return int(pc.sum(handles["rows"]).as_py() or 0)
