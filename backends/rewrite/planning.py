"""From a checkpoint and a wish to tasks.

Theory of operation. Who gets what is decided once, by ``redistribution``: the plan of a rewrite *is* the plan of a
rescale, and each (operator, state, new subtask) for which that plan has rows becomes one task that reads its slices and
writes one segment. No row moves between tasks, so there is no shuffle.

Only a change of max parallelism moves rows, because it makes new key groups. For the operators concerned, the planner is
shown their keyed states (and keyed in-flight states) without rows and with the new max parallelism; it deals everything
else and refuses what a restore would refuse. What it was not shown is dealt here: *sources* read old key groups and hash,
one *target* per new subtask writes.

Nothing here opens a segment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import JobGraph, Operator, OperatorId, Status, shortened
from stateformat.model import Mode, RescaledFrom, State
from stateformat.reading import Checkpoint, ReadTask
from stateformat.redistribution import States, assemble, cut_keyed, plan_restore, read_handles, rescale
from stateformat.schema import MANIFEST_SCHEMA, SLICE_SCHEMA, has_key_groups

from .spec import RewriteSpec

SOURCE_BYTES = 256 * 2**20
"""A state has more sources than it had subtasks where they would read more than this each, as stored."""


class Place(NamedTuple):
    """Where a new segment belongs, under the new uid. ``subtask`` is None for coordinators."""

    operator: str
    state: str
    subtask: int | None


@dataclass(frozen=True)
class Move:
    """Rows that stay together: one task reads them and writes one segment. ``rows`` and ``bytes`` are as stored."""

    read: ReadTask
    place: Place
    rows: int
    bytes: int
    exact: bool
    """Whether as many rows come out: layers merge to fewer, and progress is gathered to a row per edge."""

    def __repr__(self) -> str:
        return f"Move({shortened(self.place.operator)}, {shortened(self.place.state)}, {self.rows} rows)"


@dataclass(frozen=True)
class Source:
    """Rows of some old key groups whose keys are dealt anew. Subtask *i* of the new owners is target ``first_target`` + i."""

    read: ReadTask
    operator: Operator
    first_target: int
    rows: int
    bytes: int
    exact: bool

    def __repr__(self) -> str:
        return f"Source({self.read.state!r}, {self.rows} rows)"


@dataclass(frozen=True)
class RewritePlan:
    """What will be published, and the tasks that write it. ``targets`` are numbered by ``Source.first_target``.

    ``graph``, ``states`` and ``rescaled_from`` are those of the new record. ``empty`` are places that report no rows.
    """

    graph: JobGraph
    states: tuple[State, ...]
    rescaled_from: RescaledFrom | None
    moves: tuple[Move, ...]
    sources: tuple[Source, ...]
    targets: tuple[Place, ...]
    empty: tuple[Place, ...]

    def __repr__(self) -> str:
        return f"RewritePlan({len(self.moves)} moves, {len(self.sources)} sources, {len(self.targets)} targets)"

    @property
    def rehashed(self) -> tuple[tuple[str, str], ...]:
        """The (operator, state) whose keys are dealt anew, in order."""
        return tuple(dict.fromkeys((target.operator, target.state) for target in self.targets))

    @property
    def rows(self) -> int:
        """How many rows will be written at most: those stored. Where layers merge, they are fewer."""
        return sum(move.rows for move in self.moves) + sum(source.rows for source in self.sources)


def plan_rewrite(checkpoint: Checkpoint, spec: RewriteSpec) -> RewritePlan:
    """Tasks for a rewrite. Metadata only.

    Raises ``InvalidInput`` for a wish that can never be right and ``RestoreRefused`` where a restore at the new
    parallelism would be refused.
    """
    graph = checkpoint.record.graph
    spec.check(graph)
    rehash = _rehashed_states(checkpoint, spec)
    view = _view(checkpoint, spec, rehash)
    topology = view.record.graph.at(spec.parallelism, per_operator=spec.per_operator)
    plan = plan_restore(view, topology)
    plan.check()
    dealt = rescale(view, plan)
    # Where nothing was dealt anew, everyone may go on from its own watermark; ``rescaled_from`` would forbid it.
    anew = bool(rehash) or any(
        dealt.graph.operator(operator.uid).parallelism != operator.parallelism
        or operator.status is Status.PARTIALLY_FINISHED
        for operator in graph.operators
    )
    names = _Names(spec)
    moves, empty = _moves(checkpoint, dealt.slices, names, rehash)
    sources, targets = _sources(checkpoint, dealt.graph, names, rehash)
    return RewritePlan(
        graph=names.graph(dealt.graph),
        states=tuple(names.state(state) for state in dealt.states),
        rescaled_from=names.former(dealt.rescaled_from if anew else checkpoint.record.rescaled_from),
        moves=moves,
        sources=sources,
        targets=targets,
        empty=empty,
    )


@dataclass(frozen=True)
class _Names:
    """The renames, applied to everything that holds a uid."""

    spec: RewriteSpec

    def uid(self, uid: str) -> OperatorId:
        return OperatorId(self.spec.renamed(uid))

    def graph(self, graph: JobGraph) -> JobGraph:
        return JobGraph(
            tuple(replace(operator, uid=self.uid(operator.uid)) for operator in graph.operators),
            tuple(replace(edge, source=self.uid(edge.source), target=self.uid(edge.target)) for edge in graph.edges),
        )

    def state(self, state: State) -> State:
        """A state keeps its older schemas, though nothing is written with them any more: they say what has become of columns."""
        return replace(state, operator=self.uid(state.operator))

    def former(self, former: RescaledFrom | None) -> RescaledFrom | None:
        if former is None:
            return None
        return replace(former, operators=tuple(replace(item, uid=self.uid(item.uid)) for item in former.operators))


def _rehashed_states(checkpoint: Checkpoint, spec: RewriteSpec) -> Mapping[tuple[str, str], State]:
    """States whose key groups change, by (operator, name)."""
    record = checkpoint.record
    found: dict[tuple[str, str], State] = {
        (state.operator, state.name): state
        for state in record.states
        if has_key_groups(state)
        and spec.max_parallelism not in (None, record.graph.operator(state.operator).max_parallelism)
        and record.graph.operator(state.operator).status is not Status.FULLY_FINISHED
    }
    for state in found.values():
        behind = [edge for edge in record.graph.inputs(state.operator) if not edge.partitioner.all_to_all]
        if state.mode is Mode.KEYED and behind:
            raise InvalidInput(
                f"state {state.name!r} of operator {state.operator!r} lies behind {behind[0].partitioner} edge "
                f"{behind[0].id!r}, which does not send by key: with another max parallelism its rows would lie where their "
                f"records do not come; keep max parallelism {record.graph.operator(state.operator).max_parallelism}",
                kind=ErrorKind.INVALID_GRAPH,
            )
    return found


def _view(checkpoint: Checkpoint, spec: RewriteSpec, rehash: Mapping[tuple[str, str], State]) -> Any:
    """The checkpoint as the planner is to see it: with the new max parallelism, and no rows where keys are dealt anew."""
    if spec.max_parallelism is None:
        return checkpoint
    wanted = spec.max_parallelism
    graph = checkpoint.record.graph
    changed = {
        operator.uid: replace(operator, max_parallelism=wanted)
        for operator in graph.operators
        if operator.status is not Status.FULLY_FINISHED or operator.parallelism <= wanted
    }
    record = replace(checkpoint.record, graph=graph.with_operators(changed))
    handles = checkpoint.handles
    if rehash:
        handles = _without_rows(handles, _handles_of(handles, rehash))
    return SimpleNamespace(record=record, handles=handles)


def _handles_of(handles: pa.Table, states: Iterable[tuple[str, str]]) -> pa.ChunkedArray:
    """Which manifest rows belong to these states, as booleans."""
    mask = None
    for operator, state in states:
        mine = pc.and_(pc.equal(handles["operator"], operator), pc.equal(handles["state"], state))
        mask = mine if mask is None else pc.or_(mask, mine)
    return mask


def _without_rows(handles: pa.Table, mask: pa.ChunkedArray) -> pa.Table:
    """The same manifest rows, those of the mask as handles of nothing (SPEC.md section 4.1)."""
    told = ("operator", "state", "mode", "subtask", "layer", "edge", "schema_id")
    columns = {}
    for name in handles.column_names:
        column = handles[name]
        if name not in told:
            nothing = None if MANIFEST_SCHEMA.field(name).nullable else 0
            column = pc.if_else(mask, pa.scalar(nothing, column.type), column)
        columns[name] = column
    return pa.table(columns, schema=handles.schema)


def _moves(
    checkpoint: Checkpoint, slices: pa.Table, names: _Names, rehash: Mapping[tuple[str, str], State]
) -> tuple[tuple[Move, ...], tuple[Place, ...]]:
    """A task for each (operator, state, subtask) with rows; the places of those without."""
    moves, empty = [], []
    for (operator, state, subtask), mine in _by_place(slices):
        place = Place(names.uid(operator), state, subtask)
        if (operator, state) in rehash:
            continue
        rows = pc.sum(mine["rows"]).as_py() or 0
        if rows == 0:
            if checkpoint.record.state(operator, state).mode is not Mode.COMMITTABLES:
                empty.append(place)
            continue
        mine = mine.filter(pc.greater(mine["rows"], 0))
        moves.append(
            Move(
                read=checkpoint.read_slices(mine),
                place=place,
                rows=rows,
                bytes=pc.sum(mine["bytes"]).as_py(),
                exact=_exact(checkpoint.record.state(operator, state), mine),
            )
        )
    return tuple(moves), tuple(empty)


def _exact(state: State, slices: pa.Table) -> bool:
    return state.mode is not Mode.PROGRESS and pc.max(slices["layer"]).as_py() == 0


def _by_place(slices: pa.Table) -> Iterator[tuple[tuple[str, str, int | None], pa.Table]]:
    """Runs of slices of one (operator, state, subtask). The table is sorted by them (``SLICE_SCHEMA``)."""
    slices = slices.combine_chunks()
    if not len(slices):
        return
    borders = np.zeros(len(slices), dtype=np.bool_)
    borders[0] = True
    for name in ("operator", "state", "subtask"):
        codes = pc.fill_null(slices[name].combine_chunks().dictionary_encode().indices, -1).to_numpy(
            zero_copy_only=False
        )
        borders[1:] |= codes[1:] != codes[:-1]
    starts = np.flatnonzero(borders).tolist()
    for start, end in zip(starts, [*starts[1:], len(slices)], strict=True):
        run = slices.slice(start, end - start)
        yield tuple(run[name][0].as_py() for name in ("operator", "state", "subtask")), run


def _sources(
    checkpoint: Checkpoint, graph: JobGraph, names: _Names, rehash: Mapping[tuple[str, str], State]
) -> tuple[tuple[Source, ...], tuple[Place, ...]]:
    """Sources and targets of the states whose keys are dealt anew. ``graph`` is the dealt one, with its old uids."""
    first_targets: dict[tuple[str, str], int] = {}
    targets: list[Place] = []
    for uid, name in rehash:
        first_targets[uid, name] = len(targets)
        targets += [Place(names.uid(uid), name, subtask) for subtask in range(graph.operator(uid).parallelism)]
    sources = [
        Source(
            read=checkpoint.read_slices(mine),
            operator=graph.operator(uid),
            first_target=first_targets[uid, name],
            rows=pc.sum(mine["rows"]).as_py(),
            bytes=pc.sum(mine["bytes"]).as_py(),
            exact=_exact(rehash[uid, name], mine),
        )
        for (uid, name, _), mine in _by_place(_cut_for_readers(checkpoint, rehash))
    ]
    return tuple(sources), tuple(targets)


def _cut_for_readers(checkpoint: Checkpoint, rehash: Mapping[tuple[str, str], State]) -> pa.Table:
    """Slices of the states whose keys are dealt anew, for as many readers as there were subtasks, or more where that is much.

    A key group and all its layers come to one reader, by the rule for keyed state at the readers' number.
    """
    if not rehash:
        return SLICE_SCHEMA.empty_table()
    ordered = sorted(checkpoint.record.states, key=lambda state: (state.operator, state.name))
    handles = read_handles(checkpoint.handles, ordered)
    size_bytes = np.bincount(handles.state, checkpoint.handles["size_bytes"].to_numpy(), len(ordered))
    operators = [checkpoint.record.graph.operator(state.operator) for state in ordered]
    takes_part = np.array([(state.operator, state.name) in rehash for state in ordered])
    parallelism = np.array([operator.parallelism for operator in operators])
    max_parallelism = np.array([operator.max_parallelism for operator in operators])
    readers = np.minimum(np.maximum(parallelism, size_bytes.astype(np.int64) // SOURCE_BYTES), max_parallelism)
    nobody = np.zeros(len(ordered), dtype=np.bool_)
    states = States(np.arange(len(ordered)), readers, max_parallelism, settled=nobody, undisturbed=nobody)
    return assemble(cut_keyed(handles.where(takes_part[handles.state]), states), checkpoint.handles, ordered)


__all__ = ["Move", "Place", "RewritePlan", "Source", "plan_rewrite"]
