"""What operators, states and columns are called after a rewrite, and rows in their new columns.

A field of a struct may become a column of its own. What remains of the struct stays where it was,
followed by the columns extracted from it, in the order of its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.keys import DEFAULT_KEY_HASH, hash_keys, key_group_count
from stateformat.model import Field, Mode, Record, RescaledFrom, SchemaVersion, State, known_names
from stateformat.reading import ReadTask
from stateformat.schema import KEY_GROUP, arrow_type, children, make_fields, segment_schema
from stateformat.segments import groups_of_keys
from stateformat.tables import python_rows

from .spec import RewriteSpec
from .transforming import Transformation, plan_transformation

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
