"""From a checkpoint and a spec to the tasks of a rewrite: names, and who gets what.

A field of a struct may become a column of its own. What remains of the struct stays where it was,
followed by the columns extracted from it, in the order of its fields.

``redistribution`` alone decides who gets what: the plan of a rewrite *is* the plan of a rescale.
Each (operator, state, new subtask) with rows becomes one task, a *move*, that reads its slices and
writes one segment. Rows do not move between tasks, so there is no shuffle.

Only two things move rows: a change of max parallelism, because it makes new key groups, and a
transform that changes keys. Then the planner gets the affected keyed states (and keyed in-flight
states) without rows and with the new max parallelism; it plans the rest and refuses what a restore
would refuse. The rows it did not get are rehashed: *sources* read old key groups and hash, and one
*target* per new subtask writes.

Nothing here opens a segment.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.graph import JobGraph, Operator, OperatorId, Status, shortened
from stateformat.keys import DEFAULT_KEY_HASH, hash_keys, key_group_count
from stateformat.model import Capability, Field, Mode, Record, RescaledFrom, SchemaVersion, State, known_names
from stateformat.reading import Checkpoint, ReadTask
from stateformat.redistribution import Plannable, States, assemble, cut_keyed, plan_restore, read_handles, rescale
from stateformat.schema import (
    KEY_GROUP,
    MANIFEST_SCHEMA,
    SLICE_SCHEMA,
    arrow_type,
    children,
    has_key_groups,
    make_fields,
    segment_schema,
)
from stateformat.segments import groups_of_keys
from stateformat.tables import python_rows

from .transforming import ColumnChange, RewriteSpec, Transformation, plan_transformation

Path = tuple[str, ...]
"""A column, or a field in it: names from the outermost to the innermost."""


@dataclass(frozen=True)
class Reshape:
    """Converts rows of a state to rows of the state that it becomes. Picklable."""

    state: State
    """What the rows become."""
    paths: tuple[Path, ...]
    """Where each of its fields is taken from, in the order of the fields."""
    without: Mapping[str, frozenset[str]]
    """By column, the fields that became columns and are removed from it."""

    def apply(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows in the new columns. Raises ``InvalidInput`` for null structs if a field of
        them becomes a key column.
        """
        schema = segment_schema(self.state)
        own = [name for name in schema.names if name not in {item.name for item in self.state.current.fields}]
        columns = [batch.column(name) for name in own if name in batch.schema.names]
        fields = [schema.field(name) for name in own if name in batch.schema.names]
        for item, path in zip(self.state.current.fields, self.paths, strict=True):
            column = batch.column(path[0])
            if len(path) > 1 and item.name in self.state.key_columns and column.null_count:
                raise InvalidInput(
                    f"column {path[0]!r} of state {self.state.name!r} holds null, so its field {path[1]!r} cannot "
                    "become a key column: two keys would be one. Keep the struct",
                    kind=ErrorKind.NULL_NOT_ALLOWED,
                    state=self.state.name,
                )
            for name in path[1:]:
                column = pc.struct_field(column, name)
            if path[0] in self.without and len(path) == 1:
                column = _without(column, self.without[path[0]])
            fields.append(schema.field(item.name))
            columns.append(column if column.type == fields[-1].type else column.cast(fields[-1].type))
        yield pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _without(column: pa.Array, names: frozenset[str]) -> pa.Array:
    """Return a struct without some of its fields."""
    kept = [item for item in column.type if item.name not in names]
    parts = [pc.struct_field(column, item.name) for item in kept]
    mask = column.is_null() if column.null_count else None
    return pa.StructArray.from_arrays(parts, fields=kept, mask=mask)


Shape: TypeAlias = Reshape | Transformation
"""Converts rows of a state to rows of the state that it becomes."""


def shaped(
    read: ReadTask, shape: Shape | None, written_by: Operator | None, seen: Callable[[int], None] = lambda _: None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task in their new columns. ``seen`` gets the row count of each batch
    read.

    With ``written_by``, the operator as it was, each row's key group is compared with that of its
    key: ``DamagedCheckpoint`` names the first that differs.
    """
    for batch in read.batches():
        seen(batch.num_rows)
        if written_by is not None and KEY_GROUP.name in batch.schema.names:
            _check_key_groups(batch, read.state, written_by)
        yield from (batch,) if shape is None else shape.apply(batch)


def is_hashable(state: State, operator: Operator) -> bool:
    """Return whether this process can hash the keys of a state of an operator."""
    schema = segment_schema(state)
    columns = [pa.chunked_array([], schema.field(name).type) for name in state.key_columns]
    try:
        hash_keys(columns, operator.key_hash or DEFAULT_KEY_HASH)
    except InvalidInput:
        return False
    return True


def _check_key_groups(batch: pa.RecordBatch, state: State, operator: Operator) -> None:
    count, hashed_by = key_group_count(operator), operator.key_hash or ""
    columns = [pa.chunked_array([batch.column(name)]) for name in state.key_columns]
    computed = groups_of_keys(columns, count, hashed_by)
    stored = batch.column(KEY_GROUP.name).to_numpy()
    if not np.array_equal(computed, stored):
        row = int(np.argmax(computed != stored))
        key = python_rows(batch.select(list(state.key_columns)).slice(row, 1))[0]
        raise DamagedCheckpoint(
            f"key {key!r} of state {state.name!r} of operator {state.operator!r} lies in key group {stored[row]}, but "
            f"its hash ({hashed_by}) puts it in {computed[row]} of {count}: files were exchanged or damaged, or keys "
            "of this type are hashed otherwise; `ckpt validate --level full` shows every such place",
            operator=state.operator,
            state=state.name,
            stored=int(stored[row]),
            computed=int(computed[row]),
        )


@dataclass(frozen=True)
class Names:
    """The renames of a spec, applied to everything that contains a name."""

    spec: RewriteSpec
    transformations: Mapping[tuple[str, str], Transformation] = field(default_factory=dict)
    """For the transformed states, by their old uid and name."""

    @classmethod
    def planned(cls, spec: RewriteSpec, record: Record, rehashed: Container[tuple[str, str]]) -> Names:
        """Return the names for a rewrite of a checkpoint; calls its transforms with no rows."""
        names = cls(spec)
        names.check_states(record)
        found = {}
        for (uid, name), transform in spec.transforms.items():
            state = record.state(uid, name)
            if (uid, name) in spec.columns:
                raise InvalidInput(
                    f"state {name!r} of operator {uid!r} has both a transform and new names of columns; give the names "
                    "as renames of the transform"
                )
            made = plan_transformation(state, transform, names.uid(uid), names.state_name(uid, name))
            if state.mode is Mode.KEYED and (uid, name) not in rehashed:
                made = replace(made, operator=record.graph.operator(uid))
            found[uid, name] = made
        return cls(spec, found)

    def uid(self, uid: str) -> OperatorId:
        """Return the uid that an operator will have."""
        return OperatorId(self.spec.renamed(uid))

    def state_name(self, uid: str, name: str) -> str:
        """Return the name that a state will have, by its old uid and name."""
        return self.spec.states.get((uid, name), name)

    def graph(self, graph: JobGraph) -> JobGraph:
        """Return the graph with the new uids."""
        return JobGraph(
            tuple(replace(operator, uid=self.uid(operator.uid)) for operator in graph.operators),
            tuple(replace(edge, source=self.uid(edge.source), target=self.uid(edge.target)) for edge in graph.edges),
        )

    def state(self, state: State) -> State:
        """Return the state under its new names, with its older schemas if its columns stay.

        No row has an older schema, but these contain the columns' history.
        """
        shape = self.shape(state)
        if shape is not None:
            return shape.state
        return replace(state, operator=self.uid(state.operator), name=self.state_name(state.operator, state.name))

    def former(self, former: RescaledFrom | None) -> RescaledFrom | None:
        """Return what a rescale recorded (``rescaled_from``), with the new uids."""
        if former is None:
            return None
        return replace(former, operators=tuple(replace(item, uid=self.uid(item.uid)) for item in former.operators))

    def shape(self, state: State) -> Shape | None:
        """Return how the rows of a state are converted; None if its columns stay as they are."""
        return self.transformations.get((state.operator, state.name)) or self._reshape(state)

    def _reshape(self, state: State) -> Reshape | None:
        renames = self.spec.columns.get((state.operator, state.name))
        if not renames:
            return None
        wanted = {column_path(state, given): new for given, new in renames.items()}
        without = {
            column: frozenset(path[1] for path in wanted if path[0] == column and len(path) > 1)
            for column in {path[0] for path in wanted if len(path) > 1}
        }
        columns: list[tuple[str, Path, pa.DataType]] = []
        keys: list[str] = []
        for item in state.current.fields:
            made = list(_columns_of(item, wanted, without.get(item.name, frozenset())))
            columns += made
            keys += [name for name, _, _ in made if item.name in state.key_columns]
        fields, last = make_fields(pa.schema([pa.field(name, kind) for name, _, kind in columns]), defaults={})
        _check_columns(state, [name for name, _, _ in columns])
        changed = replace(
            state,
            operator=self.uid(state.operator),
            name=self.state_name(state.operator, state.name),
            schemas=(SchemaVersion(1, fields),),
            key_columns=tuple(keys),
            last_field_id=last,
        )
        return Reshape(changed, tuple(path for _, path, _ in columns), without)

    def check_states(self, record: Record) -> None:
        """Raise ``InvalidInput`` for renames of what does not exist, or to what exists already."""
        for uid, name in (*self.spec.states, *self.spec.columns):
            self.shape(record.state(uid, name))
        after = [(state.operator, self.state_name(state.operator, state.name)) for state in record.states]
        twice = sorted({place for place in after if after.count(place) > 1})
        if self.spec.states and (twice or not all(name for _, name in after)):
            raise InvalidInput(
                f"after the renames operator {twice[0][0]!r} would have two states {twice[0][1]!r}; give them "
                "different names"
                if twice
                else "a state cannot have an empty name; give a name"
            )


def _columns_of(
    item: Field, wanted: Mapping[Path, str], hoisted: frozenset[str]
) -> Iterator[tuple[str, Path, pa.DataType]]:
    """Yield the columns that a column becomes: name, where it is taken from, type."""
    inner = [child for child in children(item) if child.name not in hoisted]
    if not hoisted:
        yield wanted.get((item.name,), item.name), (item.name,), arrow_type(item.type)
    elif inner:
        yield wanted.get((item.name,), item.name), (item.name,), arrow_type(("struct", tuple(inner)))
    for child in children(item):
        if child.name in hoisted:
            path = (item.name, child.name)
            yield wanted[path], path, arrow_type(child.type)


def column_path(state: State, given: str) -> Path:
    """Return the column, or field of a column, that a user named; ``InvalidInput`` if there is
    none.
    """
    columns = {item.name: item for item in state.current.fields}
    where = f"state {state.name!r} of operator {state.operator!r}"
    if given in columns:
        path: Path = (given,)
    else:
        name, item = max(
            ((name, item) for name, item in columns.items() if given.startswith(f"{name}.")),
            key=lambda one: len(one[0]),
            default=(given, None),
        )
        fields = [child.name for child in children(item)] if item is not None and item.type[0] == "struct" else []
        field = given[len(name) + 1 :]
        if field not in fields:
            names = [f"{name}.{each}" for each in fields] or list(columns)
            raise InvalidInput(
                f"{where} has no column {given!r}; {known_names(names, given)}", kind=ErrorKind.SCHEMA_MISMATCH
            )
        path = (name, field)
    if path[0].startswith("_"):
        raise InvalidInput(f"column {path[0]!r} of {where} belongs to the format and keeps its name")
    return path


def _check_columns(state: State, names: Sequence[str]) -> None:
    where: Any = f"state {state.name!r} of operator {state.operator!r}"
    for name in names:
        if names.count(name) > 1:
            raise InvalidInput(f"{where} would have two columns {name!r}; give them different names", column=name)
        if not name or (name.startswith("_") and name != "_map_key"):
            raise InvalidInput(
                f"{where} would have a column {name!r}: names are not empty, and those beginning with '_' belong to "
                "the format",
                column=name,
            )


SOURCE_BYTES: Final = 256 * 2**20
"""How many stored bytes a source reads at most: larger states get more sources than subtasks."""


class Place(NamedTuple):
    """Where a new segment belongs."""

    operator: str
    """The new uid."""
    state: str
    subtask: int | None
    """None for a coordinator."""


@dataclass(frozen=True)
class Move:
    """Rows that stay together: one task reads them and writes one segment."""

    read: ReadTask
    place: Place
    rows: int
    """Stored rows."""
    bytes: int
    """Stored bytes."""
    exact: bool
    """Whether the same number of rows is written. Merging layers and gathering progress reduces it,
    and a function may return any number.
    """
    shape: Shape | None = None
    written_by: Operator | None = None
    """The operator as it was, if each key group is to be compared with that of its key."""
    copies: tuple[Place, ...] = ()
    """Other places that get the same rows: a function sees only one copy of broadcast state."""

    def __repr__(self) -> str:
        return f"Move({shortened(self.place.operator)}, {shortened(self.place.state)}, {self.rows} rows)"


@dataclass(frozen=True)
class RehashSource:
    """Rows of some old key groups whose keys are hashed anew."""

    read: ReadTask
    operator: Operator
    first_target: int
    """The target of the new subtask 0; subtask *i* has ``first_target`` + i."""
    rows: int
    bytes: int
    exact: bool
    shape: Shape | None = None
    written_by: Operator | None = None
    """As in a :class:`Move`."""

    def __repr__(self) -> str:
        return f"RehashSource({self.read.state!r}, {self.rows} rows)"


class Transformed(NamedTuple):
    """What a function makes of a state, by the new names of both."""

    operator: str
    state: str
    function: str
    """What messages call it."""
    rekeyed: bool
    columns: tuple[ColumnChange, ...]


@dataclass(frozen=True)
class RewritePlan:
    """What will be published, and the tasks that write it."""

    graph: JobGraph
    """Of the new record, as are ``states`` and ``rescaled_from``."""
    states: tuple[State, ...]
    rescaled_from: RescaledFrom | None
    moves: tuple[Move, ...]
    sources: tuple[RehashSource, ...]
    targets: tuple[Place, ...]
    """The places that sources write to, by number."""
    empty: tuple[Place, ...]
    """Places that report no rows."""
    transformed: tuple[Transformed, ...] = ()

    def __repr__(self) -> str:
        return f"RewritePlan({len(self.moves)} moves, {len(self.sources)} sources, {len(self.targets)} targets)"

    @property
    def rehashed(self) -> tuple[tuple[str, str], ...]:
        """The (operator, state) pairs whose keys are hashed anew, in order, by their new names."""
        return tuple(dict.fromkeys((target.operator, target.state) for target in self.targets))

    def is_transformed(self, place: Place) -> bool:
        """Return whether a function makes the rows of a place."""
        return any(one[:2] == place[:2] for one in self.transformed)

    @property
    def rows(self) -> int:
        """The stored rows: the number that will be written, or more if layers merge."""
        return sum(move.rows for move in self.moves) + sum(source.rows for source in self.sources)


def plan_rewrite(checkpoint: Checkpoint, spec: RewriteSpec) -> RewritePlan:
    """Plan a rewrite, from metadata alone.

    Raises ``InvalidInput`` for a spec that is invalid, in general or for this checkpoint, and
    ``RestoreRefused`` if a restore at the new parallelism would be refused.
    """
    graph = checkpoint.record.graph
    spec.check(graph)
    if spec.transforms:
        checkpoint.of_store("whose state cannot be transformed")  # Before any function is called.
    rehash = _rehashed_states(checkpoint, spec)
    names = Names.planned(spec, checkpoint.record, rehash)
    view = _view_for_planner(checkpoint, spec, rehash)
    topology = view.record.graph.at(spec.parallelism, per_operator=spec.per_operator)
    plan = plan_restore(view, topology)
    plan.check()
    rescaled = rescale(view, plan)
    # If nothing moved, each subtask may continue from its own watermark; ``rescaled_from`` would
    # forbid it.
    moved = bool(rehash) or any(
        rescaled.graph.operator(operator.uid).parallelism != operator.parallelism
        or operator.status is Status.PARTIALLY_FINISHED
        for operator in graph.operators
    )
    moves, empty = _moves(checkpoint, rescaled.slices, names, rehash)
    sources, targets = _sources(checkpoint, rescaled.graph, names, rehash)
    return RewritePlan(
        graph=names.graph(rescaled.graph),
        states=tuple(names.state(state) for state in rescaled.states),
        rescaled_from=names.former(rescaled.rescaled_from if moved else checkpoint.record.rescaled_from),
        moves=moves,
        sources=sources,
        targets=targets,
        empty=empty,
        transformed=tuple(_transformed(names)),
    )


def _transformed(names: Names) -> Iterator[Transformed]:
    for one in names.transformations.values():
        yield Transformed(one.state.operator, one.state.name, one.transform.label, one.transform.rekey, one.columns())


def _rehashed_states(checkpoint: Checkpoint, spec: RewriteSpec) -> Mapping[tuple[str, str], State]:
    """Return the states whose rows change their key groups, by (operator, name)."""
    graph = checkpoint.record.graph
    found: dict[tuple[str, str], State] = {}
    for state in checkpoint.record.states:
        operator = graph.operator(state.operator)
        changes = spec.max_parallelism not in (None, operator.max_parallelism)
        changes = changes or spec.key_hash not in (None, operator.key_hash)
        transform = spec.transforms.get((state.operator, state.name))
        moves = changes or (transform is not None and transform.rekey)
        if not moves or not has_key_groups(state) or operator.status is Status.FULLY_FINISHED:
            continue
        unkeyed = [edge for edge in graph.inputs(state.operator) if not edge.partitioner.all_to_all]
        if changes and state.mode is Mode.KEYED and unkeyed:
            raise InvalidInput(
                f"state {state.name!r} of operator {state.operator!r} is behind {unkeyed[0].partitioner} edge "
                f"{unkeyed[0].id!r}, which does not send by key. With other key groups its rows would be where "
                f"their records do not arrive: keep max parallelism {operator.max_parallelism} and {operator.key_hash}",
                kind=ErrorKind.INVALID_GRAPH,
            )
        found[state.operator, state.name] = state
    return found


@dataclass(frozen=True)
class _View:
    """A checkpoint, as a plan sees it (``Plannable``)."""

    record: Record
    handles: pa.Table
    capabilities: frozenset[Capability]
    query: str


def _view_for_planner(checkpoint: Checkpoint, spec: RewriteSpec, rehash: Mapping[tuple[str, str], State]) -> Plannable:
    """Return the checkpoint with the new key groups, and without rows of rehashed states."""
    if spec.max_parallelism is None and spec.key_hash is None and not rehash:
        return checkpoint
    graph = checkpoint.record.graph
    changed = {}
    for operator in graph.operators:
        wanted = spec.max_parallelism or operator.max_parallelism
        if operator.status is Status.FULLY_FINISHED and wanted is not None and operator.parallelism > wanted:
            wanted = operator.max_parallelism
        changed[operator.uid] = replace(operator, max_parallelism=wanted, key_hash=spec.key_hash or operator.key_hash)
    record = replace(checkpoint.record, graph=graph.with_operators(changed))
    handles = _without_rows(checkpoint.handles, rehash)
    return _View(record, handles, checkpoint.capabilities, checkpoint.query)


def _without_rows(handles: pa.Table, states: Iterable[tuple[str, str]]) -> pa.Table:
    """Return the same manifest rows; those of some states become handles without rows (SPEC.md
    section 4.1).
    """
    mask = None
    for operator, state in states:
        mine = pc.and_(pc.equal(handles["operator"], operator), pc.equal(handles["state"], state))
        mask = mine if mask is None else pc.or_(mask, mine)
    if mask is None:
        return handles
    kept = ("operator", "state", "mode", "subtask", "layer", "edge", "schema_id")
    columns = {}
    for name in handles.column_names:
        column = handles[name]
        if name not in kept:
            nothing = None if MANIFEST_SCHEMA.field(name).nullable else 0
            column = pc.if_else(mask, pa.scalar(nothing, column.type), column)
        columns[name] = column
    return pa.table(columns, schema=handles.schema)


def _moves(
    checkpoint: Checkpoint, slices: pa.Table, names: Names, rehash: Mapping[tuple[str, str], State]
) -> tuple[tuple[Move, ...], tuple[Place, ...]]:
    """Return a task for each (operator, state, subtask) with rows, and the places of those
    without.
    """
    moves: list[Move] = []
    empty: list[Place] = []
    for (operator, name, subtask), mine in _by_place(slices):
        if (operator, name) in rehash:
            continue
        place = Place(names.uid(operator), names.state_name(operator, name), subtask)
        state = checkpoint.record.state(operator, name)
        mine = mine.filter(pc.greater(mine["rows"], 0))
        copied = state.mode is Mode.BROADCAST and (operator, name) in names.transformations
        if copied and moves and moves[-1].place[:2] == place[:2]:
            moves[-1] = replace(moves[-1], copies=(*moves[-1].copies, place))
        elif len(mine):
            moves.append(Move(_task(checkpoint, names, mine), place, **_facts(checkpoint, names, state, mine)))
        elif state.mode is not Mode.COMMITTABLES:
            empty.append(place)
    return tuple(moves), tuple(empty)


def _task(checkpoint: Checkpoint, names: Names, slices: pa.Table) -> ReadTask:
    """Return the task that reads the slices: expired rows too, unless they would come back to
    life.
    """
    task = checkpoint.read_slices(slices)
    becomes = names.state(task.state)
    return task if task.state.ttl is not None and becomes.ttl is None else task.with_expired()


def _facts(checkpoint: Checkpoint, names: Names, state: State, slices: pa.Table) -> dict[str, Any]:
    operator = checkpoint.graph.operator(state.operator)
    shape = names.shape(state)
    wanted = names.spec.verify_keys or isinstance(shape, Transformation)
    verified = wanted and has_key_groups(state) and is_hashable(state, operator)
    return {
        "shape": shape,
        "written_by": operator if verified else None,
        "rows": pc.sum(slices["rows"]).as_py(),
        "bytes": pc.sum(slices["bytes"]).as_py(),
        "exact": state.mode is not Mode.PROGRESS and pc.max(slices["layer"]).as_py() == 0,
    }


def _by_place(slices: pa.Table) -> Iterator[tuple[tuple[str, str, int | None], pa.Table]]:
    """Yield slices by (operator, state, subtask), by which the table is sorted
    (``SLICE_SCHEMA``).
    """
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
    checkpoint: Checkpoint, graph: JobGraph, names: Names, rehash: Mapping[tuple[str, str], State]
) -> tuple[tuple[RehashSource, ...], tuple[Place, ...]]:
    """Return sources and targets of the rehashed states. ``graph`` is the rescaled one, with old
    uids.
    """
    first_targets: dict[tuple[str, str], int] = {}
    targets: list[Place] = []
    for uid, name in rehash:
        first_targets[uid, name] = len(targets)
        targets += [
            Place(names.uid(uid), names.state_name(uid, name), subtask)
            for subtask in range(graph.operator(uid).parallelism)
        ]
    sources = [
        RehashSource(
            read=_task(checkpoint, names, mine),
            operator=graph.operator(uid),
            first_target=first_targets[uid, name],
            **_facts(checkpoint, names, rehash[uid, name], mine),
        )
        for (uid, name, _), mine in _by_place(_cut_for_readers(checkpoint, rehash))
    ]
    return tuple(sources), tuple(targets)


def _cut_for_readers(checkpoint: Checkpoint, rehash: Mapping[tuple[str, str], State]) -> pa.Table:
    """Return slices of the rehashed states for their readers: one per subtask, more for large
    states.

    Uses the rule for keyed state, with readers as subtasks: a key group with all its layers has one
    reader.
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
    none = np.zeros(len(ordered), dtype=np.bool_)
    states = States(np.arange(len(ordered)), readers, max_parallelism, settled=none, undisturbed=none)
    return assemble(cut_keyed(handles.where(takes_part[handles.state]), states), checkpoint.handles, ordered)
