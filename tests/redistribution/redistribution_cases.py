"""Checkpoints made of explicit rows, so that a test sees every single row move.

A row is any hashable value. A :class:`Part` is a handle with its rows: pairs (group, row) where the
mode has groups. :func:`checkpoint` lays each part into a segment of its own, :func:`planned` plans
a restore, :func:`deliver` reads its slices.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from stateformat import model
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner, SubtaskSet
from stateformat.manifest import handles_table
from stateformat.model import Capability, Field, Handle, Kind, Mode, Record, RescaledFrom, State
from stateformat.redistribution import RestorePlan, plan_restore
from stateformat.schema import PLANNING_COLUMNS

Row = Any
FOREIGN = "a row of somebody else"


@dataclass(frozen=True)
class Part:
    """One handle: ``rows`` are values, or (group, value) for keyed and in-flight state."""

    operator: str
    state: str
    subtask: int | None
    rows: tuple[Row, ...] = ()
    layer: int = 0
    foreign_before: int = 0
    foreign_after: int = 0


@dataclass(frozen=True)
class FakeCheckpoint:
    """What ``plan_restore`` reads; the parts in manifest order; the segments as lists of rows."""

    record: Record
    handles: pa.Table
    parts: tuple[Part, ...]
    segments: dict[str, list[Hashable]] = field(default_factory=dict)
    capabilities: Collection[Capability] = tuple(Capability)
    query: str = ""


def op(uid: str, parallelism: int = 2, max_parallelism: int | None = 16, **rest: Any) -> Operator:
    """An operator; ``finished`` and ``finishing`` may be any iterables of subtasks."""
    for name in ("finished", "finishing"):
        if name in rest:
            rest[name] = SubtaskSet.of(rest[name])
    return Operator(uid=OperatorId(uid), parallelism=parallelism, max_parallelism=max_parallelism, **rest)


def edge(source: str, target: str, partitioner: str = "rebalance", **rest: Any) -> Edge:
    """An edge whose id is ``source->target`` unless given."""
    rest.setdefault("id", f"{source}->{target}")
    if partitioner == "hash":
        rest.setdefault("key_columns", ("k",))
    return Edge(source=OperatorId(source), target=OperatorId(target), partitioner=Partitioner(partitioner), **rest)


def state(
    operator: str, name: str, mode: str, *, on: Edge | None = None, fields: Sequence[Field] | None = None
) -> State:
    """A state with an int64 key where its mode has keys, and an int64 value."""
    keyed = mode == "keyed" or (on is not None and on.partitioner is Partitioner.HASH)
    fields = fields or (Field(1, "k", "int64"), Field(2, "v", "int64"))
    return State(
        operator=OperatorId(operator),
        name=name,
        mode=Mode(mode),
        schemas=(model.SchemaVersion(1, tuple(fields)),),
        kind=Kind.VALUE if mode == "keyed" else None,
        key_columns=("k",) if keyed else (),
        edge=on.id if on else None,
        last_field_id=max(item.id for item in fields),
    )


def graph(*operators: Operator, edges: Iterable[Edge] = ()) -> JobGraph:
    return JobGraph(operators, tuple(edges))


def checkpoint(
    operators: Iterable[Operator],
    states: Iterable[State] = (),
    parts: Iterable[Part] = (),
    edges: Iterable[Edge] = (),
    *,
    checkpoint_id: int = 7,
    rescaled_from: RescaledFrom | None = None,
) -> FakeCheckpoint:
    """A checkpoint of these parts. Rows with groups are sorted by group; parts of equal rank keep
    their order.
    """
    states = tuple(states)
    by_name = {(item.operator, item.name): item for item in states}
    ordered = sorted(
        parts, key=lambda part: (part.operator, part.state, -1 if part.subtask is None else part.subtask, part.layer)
    )
    segments: dict[str, list[Hashable]] = {}
    handles = []
    settled = []
    for number, part in enumerate(ordered):
        declared = by_name[(OperatorId(part.operator), part.state)]
        grouped = declared.mode in (Mode.KEYED, Mode.IN_FLIGHT)
        rows = tuple(sorted(part.rows, key=lambda row: row[0])) if grouped else part.rows
        settled.append(replace(part, rows=rows))
        path = f"segments/{number}"
        if rows:
            before, after = [FOREIGN] * part.foreign_before, [FOREIGN] * part.foreign_after
            segments[path] = [*before, *rows, *after]
        handles.append(_handle(declared, part, rows, path, len(segments.get(path, ())), part.foreign_before))
    record = Record(
        checkpoint_id=model.CheckpointId(checkpoint_id),
        attempt_id=model.AttemptId(f"{checkpoint_id:032x}"),
        kind=model.CheckpointKind.CHECKPOINT,
        job_id=model.JobId("job"),
        graph=JobGraph(tuple(operators), tuple(edges)),
        states=states,
        manifest=model.ManifestRef("manifests/m", 1, "0" * 32, 1),
        totals=model.Totals(),
        created_at_us=0,
        rescaled_from=rescaled_from,
    )
    return FakeCheckpoint(record, handles_table(handles).select(PLANNING_COLUMNS), tuple(settled), segments)


def _handle(declared: State, part: Part, rows: Sequence[Row], path: str, segment_rows: int, row_start: int) -> Handle:
    empty = Handle(
        part.operator, part.state, declared.mode.value, part.subtask, part.layer, declared.edge, declared.current.id
    )
    if not rows:
        return empty
    handle = empty._replace(
        path=path, row_start=row_start, rows=len(rows), segment_rows=segment_rows, size_bytes=segment_rows * 100
    )
    if declared.mode in (Mode.KEYED, Mode.IN_FLIGHT):
        counts = Counter(group for group, _ in rows)
        first, last = min(counts), max(counts)
        handle = handle._replace(
            first_group=first, last_group=last, rows_per_group=[counts[group] for group in range(first, last + 1)]
        )
    return handle


def one(mode: str, operator: Operator, *parts: Part) -> FakeCheckpoint:
    """A checkpoint of one operator ``a`` with one state ``s``."""
    return checkpoint([operator], [state("a", "s", mode)], parts)


def part(subtask: int | None, *rows: Row, **rest: Any) -> Part:
    return Part("a", "s", subtask, rows, **rest)


def planned(
    source: FakeCheckpoint,
    topology: JobGraph | int | dict[str, int],
    *codes: str,
    details: object = None,
    **options: Any,
) -> RestorePlan:
    """Plan a restore, at another parallelism where ``topology`` is numbers; it is refused for these
    reasons alone.
    """
    at = source.record.graph.at
    if not isinstance(topology, JobGraph):
        topology = at(topology) if isinstance(topology, int) else at(per_operator=topology)
    plan = plan_restore(source, topology, **options)
    assert [refusal.code.value for refusal in plan.refusals] == list(codes)
    if details is not None:
        assert plan.refusals[0].details == details
    return plan


Delivered = dict[tuple[str, str, int | None], list[Row]]


def deliver(source: FakeCheckpoint, slices: pa.Table) -> Delivered:
    """The rows of slices, by (operator, state, subtask), in the order in which they are read.

    Checks on the way that a slice is within its handle, is not empty, and has the first and last
    group that it says.
    """
    paths, starts = source.handles["path"].to_pylist(), source.handles["row_start"].to_pylist()
    rows, names = source.handles["rows"].to_pylist(), source.handles["state"].to_pylist()
    owners, layers = source.handles["operator"].to_pylist(), source.handles["layer"].to_pylist()
    found: Delivered = defaultdict(list)
    for piece in slices.to_pylist():
        handle = piece["handle"]
        assert (piece["operator"], piece["state"], piece["layer"]) == (owners[handle], names[handle], layers[handle])
        start, count = piece["row_start"], piece["rows"]
        assert starts[handle] <= start < start + count <= starts[handle] + rows[handle]
        got = source.segments[paths[handle]][start : start + count]
        assert FOREIGN not in got
        if piece["first_group"] is not None:
            assert (piece["first_group"], piece["last_group"]) == (got[0][0], got[-1][0])
        found[piece["operator"], piece["state"], piece["subtask"]] += got
    return dict(found)


def restored(source: FakeCheckpoint, topology: JobGraph | int | dict[str, int]) -> Delivered:
    """What every new subtask reads; nothing is refused."""
    return deliver(source, planned(source, topology).slices)


def published(source: FakeCheckpoint, rescaled: Any) -> FakeCheckpoint:
    """The checkpoint that a rescale describes, made of the rows themselves, row by row."""
    paths = source.handles["path"].to_pylist()
    parts = []
    for piece in rescaled.slices.to_pylist():
        start, count = piece["row_start"], piece["rows"]
        got = source.segments[paths[piece["handle"]]][start : start + count] if count else ()
        parts.append(Part(piece["operator"], piece["state"], piece["subtask"], tuple(got), piece["layer"]))
    return checkpoint(
        rescaled.graph.operators,
        rescaled.states,
        parts,
        rescaled.graph.edges,
        checkpoint_id=source.record.checkpoint_id + 1,
        rescaled_from=rescaled.rescaled_from,
    )
