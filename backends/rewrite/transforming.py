"""What a user may request of a rewrite, and a function applied to the rows of a state.

The function takes and returns an Arrow table. It is called once with no rows while the rewrite is
planned, and the columns it then returns are the columns of the state. Afterwards it is called for
every piece of the state, in any order and on any worker, and a task that runs again calls it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import JobGraph, Operator
from stateformat.keys import DEFAULT_KEY_HASH, MAX_PARALLELISM_LIMIT, check_key_types, key_group_count, key_hash
from stateformat.model import FieldType, Kind, Mode, State, known_names
from stateformat.schema import KEY_GROUP, arrow_type, children, make_fields, nesting, segment_schema
from stateformat.segments import WriteOptions, clustered, groups_of_keys, normalize_rows, row_key_codes
from stateformat.states import rewritten, type_text
from stateformat.tables import BATCH_BYTES, cut, python_rows
from stateformat.ttl import TTL_COLUMN


@dataclass(frozen=True)
class Transform:
    """A function that is applied to all rows of a state; without a function, columns are only
    renamed.
    """

    function: Callable[[Any], Any] | None = None
    """Takes a ``pa.Table`` and returns one (or a DataFrame that supports Arrow). It is called once
    with no rows, then with each piece of the state, up to 16 MiB, on any worker and maybe again:
    its result must depend only on its argument. A piece has the columns of the state's current
    schema and those of its kind (``_map_key``, ``_index``, ``_timestamp``, ``_tag``), layers
    merged.
    """
    renames: Mapping[str, str] = field(default_factory=dict)
    """New names of columns by their old ones; the columns keep their field ids. Columns that the
    function has not renamed itself are renamed after it.
    """
    rekey: bool = False
    """Whether keys change, so that rows are assigned to key groups and subtasks anew."""
    name: str = ""
    """What messages call the function; by default its own name."""

    @property
    def label(self) -> str:
        """What messages call the function."""
        if self.name or self.function is None:
            return self.name or "a renaming of columns"
        name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
        return f"{self.function.__module__}:{name}"


@dataclass(frozen=True)
class RewriteSpec:
    """What the checkpoint is to be afterwards. Anything not given stays as it is.

    In any case layers are merged, every row has its state's current schema, and each state of each
    subtask is one segment.
    """

    parallelism: int | None = None
    """For every operator that is not fully finished."""
    per_operator: Mapping[str, int] = field(default_factory=dict)
    """Parallelism by uid; takes precedence over ``parallelism``."""
    max_parallelism: int | None = None
    """For every operator: keys are hashed to key groups anew. A fully finished operator whose
    parallelism is greater keeps its own max parallelism, which no longer has a meaning.
    """
    renames: Mapping[str, str] = field(default_factory=dict)
    """Old uid to new uid. Edges and states follow."""
    states: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """New names of states, by their old uid and name."""
    columns: Mapping[tuple[str, str], Mapping[str, str]] = field(default_factory=dict)
    """By old uid and name of a state, new names of columns by their old ones. ``column.field``
    names a field of a struct, which becomes a column of its own."""
    transforms: Mapping[tuple[str, str], Transform] = field(default_factory=dict)
    """Functions applied to the rows of states, by their old uid and name."""
    key_hash: str | None = None
    """For every operator: the name of the function that hashes its keys, to key groups anew."""
    verify_keys: bool = False
    """Whether to compare the key group of each row with that of its key, if the hash is known.
    stateformat's own reader has done so already; for other systems' checkpoints nothing has.
    """
    options: WriteOptions = field(default_factory=WriteOptions)
    """Codec, encoding and row groups of the new segments."""

    def check(self, graph: JobGraph) -> None:
        """Raise ``InvalidInput`` for values that are never right; the planner checks the rest."""
        if self.max_parallelism is not None and not 1 <= self.max_parallelism <= MAX_PARALLELISM_LIMIT:
            raise InvalidInput(
                f"max parallelism {self.max_parallelism} is not within 1 to {MAX_PARALLELISM_LIMIT}; choose another",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
        if self.key_hash is not None:
            key_hash(self.key_hash)
        for uid in (*self.per_operator, *self.renames):
            graph.operator(uid)
        after = [self.renamed(operator.uid) for operator in graph.operators]
        twice = sorted({uid for uid in after if after.count(uid) > 1})
        if self.renames and (twice or not all(after)):
            raise InvalidInput(
                f"after the renames two operators would be called {twice[0]!r}; uids are unique"
                if twice
                else "an operator cannot have an empty name; give a uid",
                kind=ErrorKind.INVALID_GRAPH,
            )

    def renamed(self, uid: str) -> str:
        """Return the uid that an operator will have."""
        return self.renames.get(uid, uid)


_REFUSED: Final[Mapping[Mode, str]] = {
    Mode.COMMITTABLES: "its rows say what a sink has prepared and must commit as it is",
    Mode.IN_FLIGHT: "its rows are records on their way between two operators",
    Mode.PROGRESS: "its rows are the watermarks of the runtime",
}
_TEXT_MAX: Final = 500
_ROWS_MAX: Final = 1 << 18


class ColumnChange(NamedTuple):
    """What happened to a column."""

    column: str | None
    """Its name afterwards; None if it is gone."""
    was: str | None
    """Its name before; None if it is new."""
    change: str
    """``kept``, ``renamed``, ``widened``, ``retyped`` (a new column under an old name), ``added``
    or ``dropped``."""
    type: str | None
    type_was: str | None


@dataclass(frozen=True)
class Transformation:
    """Rows of a state as its function makes them. Picklable if the function is."""

    before: State
    state: State
    """What the rows become."""
    transform: Transform
    returns: pa.Schema
    """The columns that the function returned for no rows, after the renames."""
    operator: Operator | None = None
    """The operator whose key groups the rows get; None without keys, and if keys are hashed anew
    later.
    """

    @property
    def rekeys(self) -> bool:
        """Whether rows may get other keys."""
        return self.transform.rekey

    def apply(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the function returns: in segment order if they have key groups.

        Raises ``InvalidInput`` if the function raises, and for rows that the state cannot hold.
        """
        rows = _visible(batch)
        piece = f"{len(rows)} rows of {_where(self.before)}{self._first_key(rows)}"
        made = _called(self.transform, self.before, rows, piece)
        self._check_columns(made, piece)
        try:
            kept = normalize_rows(
                made,
                self.state,
                schema_id=self.state.current.id,
                delta=False,
                where=f"what {self.transform.label} made of {piece}",
            )
        except InvalidState as error:
            raise InvalidInput(str(error), kind=error.kind, **error.details) from error
        if self.state.mode is Mode.KEYED and not self.transform.rekey:
            self._check_keys(rows, kept, piece)
        if self.operator is not None:
            keys = [kept[name] for name in self.state.key_columns]
            groups = groups_of_keys(keys, key_group_count(self.operator), self.operator.key_hash or DEFAULT_KEY_HASH)
            kept = clustered(kept, self.state, groups)[0].slice(0, len(kept))
        for part in cut(kept, _ROWS_MAX, BATCH_BYTES):
            yield from part.combine_chunks().to_batches()

    def columns(self) -> tuple[ColumnChange, ...]:
        """Return what happened to every column: those of the state now, then those that are
        gone.
        """
        return tuple(_changes(self.before, self.state, self.transform.renames))

    def _first_key(self, rows: pa.Table) -> str:
        if not self.before.key_columns:
            return ""
        return f" (first key {python_rows(rows.select(list(self.before.key_columns)).slice(0, 1))[0]!r})"

    def _check_columns(self, made: pa.Table, piece: str) -> None:
        """Raise ``InvalidInput`` if a piece has other columns than were returned for no rows."""
        wanted, given = self.returns, made.schema
        same = len(given) == len(wanted) and set(given.names) == set(wanted.names)
        wrong = [item.name for item in given if item.name in wanted.names and not _fits(item, wanted.field(item.name))]
        if same and not wrong:
            return
        before, after = (f"{name} {wanted.field(name).type}" for name in wrong[:1]), given
        said = ", ".join(before) if same else ", ".join(wanted.names)
        now = f"{wrong[0]} {after.field(wrong[0]).type}" if same else ", ".join(given.names)
        raise InvalidInput(
            f"{self.transform.label} returned {now} for {piece}, but {said} for no rows; "
            "it must return the same columns with the same types each time",
            kind=ErrorKind.SCHEMA_MISMATCH,
            operator=self.before.operator,
            state=self.before.name,
        )

    def _check_keys(self, rows: pa.Table, made: pa.Table, piece: str) -> None:
        """Raise ``InvalidInput`` for a key that the piece did not have."""
        own = [made[name] for name in self.state.key_columns]
        given = [rows[name] for name in self.before.key_columns]
        if len(made) == len(rows) and all(map(pa.ChunkedArray.equals, own, given)):
            return
        codes = row_key_codes([pa.chunked_array([*a.chunks, *b.chunks]) for a, b in zip(given, own, strict=True)])
        moved = np.flatnonzero(~np.isin(codes[len(rows) :], codes[: len(rows)]))
        if len(moved):
            key = python_rows(made.select(list(self.state.key_columns)).slice(int(moved[0]), 1))[0]
            raise InvalidInput(
                f"{self.transform.label} changed keys: of {piece}, {len(moved)} came back with a key that none of them "
                f"had, {key!r} first. Rows of another key belong to another key group, maybe of another subtask: hash "
                "them again with rekey=True (`--rekey`)",
                kind=ErrorKind.TRANSFORM_FAILED,
                operator=self.before.operator,
                state=self.before.name,
                key=key,
                rows=len(moved),
            )


def plan_transformation(state: State, transform: Transform, operator: str, name: str) -> Transformation:
    """Call the function with no rows, and return what it makes of the state.

    ``operator`` and ``name`` are the new names of operator and state. Raises ``InvalidInput`` for a
    state whose rows are not the user's, if the function raises, and for columns that no state has.
    """
    if state.mode in _REFUSED:
        raise InvalidInput(
            f"{_where(state)} is {state.mode} and cannot be transformed: {_REFUSED[state.mode]}",
            kind=ErrorKind.STATE_NOT_ALLOWED,
        )
    if transform.rekey and state.mode is not Mode.KEYED:
        raise InvalidInput(f"{_where(state)} is {state.mode} and has no keys to hash again; leave rekey=True out")
    columns = [item.name for item in state.current.fields]
    for old in transform.renames:
        if old not in columns:
            raise InvalidInput(
                f"{_where(state)} has no column {old!r} to be renamed; {known_names(columns, old)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
    seen = _visible(segment_schema(state).empty_table())
    made = _called(transform, state, seen, f"no rows of {_where(state)}, by which its columns are found")
    own = {item.name for item in segment_schema(state)} - set(columns)
    returns = pa.schema([_plain(item, state, transform) for item in made.schema])
    _check_returned(state, transform, returns, own)
    fields = pa.schema([item for item in returns if item.name not in own])
    try:
        after = rewritten(state, fields, renames=transform.renames)
        check_key_types([fields.field(key) for key in (*after.key_columns, *_map_key(state))])
    except InvalidInput as error:
        message = f"{transform.label} cannot be applied to {_where(state)}: {error}"
        raise InvalidInput(message, kind=error.kind, **error.details) from error
    _check_keys_stay(state, after, transform)
    _check_times_stay(state, after, transform)
    after = replace(after, operator=operator, name=name)
    return Transformation(state, after, transform, returns)


def _where(state: State) -> str:
    return f"state {state.name!r} of operator {state.operator!r}"


def _map_key(state: State) -> tuple[str, ...]:
    return ("_map_key",) if state.kind is Kind.MAP else ()


def _visible(rows: pa.RecordBatch | pa.Table) -> pa.Table:
    """Return rows as a user's function sees them: without key groups and field ids."""
    names = [name for name in rows.schema.names if name != KEY_GROUP.name]
    schema = pa.schema([rows.schema.field(name).remove_metadata() for name in names])
    return pa.Table.from_arrays([rows.column(name) for name in names], schema=schema)


def _called(transform: Transform, state: State, rows: pa.Table, piece: str) -> pa.Table:
    """Return the function's result, as a table with the renamed columns."""
    if transform.function is None:
        return rows.rename_columns([transform.renames.get(name, name) for name in rows.column_names])
    try:
        made = transform.function(rows)
        table = _table(made)
    except InvalidInput as error:
        if "condition" not in error.details:
            raise
        message = f"{_where(state)}: {error}. Nothing was published"
        raise InvalidInput(message, kind=error.kind, operator=state.operator, state=state.name) from error
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())[:_TEXT_MAX]
        raised = f"{type(error).__name__}: {text}" if text else type(error).__name__
        advice = "" if len(rows) else "; let it take a table without rows too"
        raise InvalidInput(
            f"{transform.label} raised {raised}, called with {piece}. Nothing was published{advice}",
            kind=ErrorKind.TRANSFORM_FAILED,
            operator=state.operator,
            state=state.name,
            raised=type(error).__name__,
        ) from error
    if table is None:
        given = "nothing" if made is None else f"an object of type {type(made).__name__}"
        raise InvalidInput(
            f"{transform.label} returned {given}, called with {piece}; it must return an Arrow table",
            kind=ErrorKind.TRANSFORM_FAILED,
            operator=state.operator,
            state=state.name,
        )
    late = {old: new for old, new in transform.renames.items() if new not in table.column_names}
    return table.rename_columns([late.get(name, name) for name in table.column_names]) if late else table


def _table(made: Any) -> pa.Table | None:
    """Return a table, a batch, or a DataFrame that supports Arrow, as a table; None for anything
    else.
    """
    if isinstance(made, pa.RecordBatch):
        return pa.Table.from_batches([made])
    if not isinstance(made, pa.Table) and hasattr(made, "__arrow_c_stream__"):
        made = pa.table(made)
    return made.replace_schema_metadata() if isinstance(made, pa.Table) else None


def _plain(item: pa.Field, state: State, transform: Transform) -> pa.Field:
    """Return a returned column in a type that fields have: no dictionary, and nulls of the old
    type.
    """
    kind = _held(item.type)
    if pa.types.is_null(kind):
        formerly = {new: old for old, new in transform.renames.items()}.get(item.name, item.name)
        known = segment_schema(state)
        if formerly not in known.names:
            raise InvalidInput(
                f"{transform.label} returned column {item.name!r} of no type (null) for no rows of {_where(state)}; "
                "give it the type that it shall have",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                column=item.name,
            )
        kind = known.field(formerly).type
    return pa.field(item.name, kind, nullable=item.nullable)


def _held(kind: Any) -> Any:
    """Return the type that the format has in place of a dictionary, a view or a fixed size."""
    is_ = pa.types
    if is_.is_dictionary(kind):
        return _held(kind.value_type)
    if is_.is_string_view(kind):
        return pa.string()
    if is_.is_binary_view(kind) or is_.is_fixed_size_binary(kind):
        return pa.binary()
    if is_.is_struct(kind):
        return pa.struct([inner.with_type(_held(inner.type)) for inner in kind])
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_held(kind.value_type)))
    return kind


def _check_returned(state: State, transform: Transform, returns: pa.Schema, own: set[str]) -> None:
    """Raise ``InvalidInput`` unless all columns that make a row of this kind are there."""
    names = returns.names
    own = own - {KEY_GROUP.name}
    keys = [transform.renames.get(key, key) for key in state.key_columns]
    missing = [name for name in (*keys, *_map_key(state), *sorted(own)) if name not in names]
    what = ""
    if missing:
        kind = f"a {state.kind}" if state.kind else f"{state.mode} state"
        what = f"without column {missing[0]!r}, which every row of {kind} has"
        if missing[0] in keys:
            what = (
                f"without key column {missing[0]!r}; where it has another name, say so with renames (`--rename-column`)"
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        what = f"with two columns {twice[0]!r}; give them different names"
    reserved = [name for name in names if (not name or name.startswith("_")) and name not in (*own, *_map_key(state))]
    if reserved:
        what = f"with a column {reserved[0]!r}; names are not empty, and those beginning with '_' belong to the format"
    if what:
        raise InvalidInput(
            f"{transform.label} returned columns {', '.join(names) or 'none'} for no rows of {_where(state)}: {what}",
            kind=ErrorKind.SCHEMA_MISMATCH,
            operator=state.operator,
            state=state.name,
        )


def _check_keys_stay(before: State, after: State, transform: Transform) -> None:
    """Raise ``InvalidInput`` if a key column has another type although keys are not hashed anew."""
    old = {item.name: item for item in before.current.fields}
    new = {item.name: item for item in after.current.fields}
    for was, name in zip(before.key_columns, after.key_columns, strict=True):
        types = type_text(old[was].type), type_text(new[name].type)
        if types[0] != types[1] and not transform.rekey:
            raise InvalidInput(
                f"key column {name!r} of {_where(before)} is {types[0]}, and {transform.label} returned {types[1]}: "
                "keys of another type lie in other key groups. Hash the rows again with rekey=True (`--rekey`)",
                kind=ErrorKind.SCHEMA_MISMATCH,
                column=name,
            )


def _check_times_stay(before: State, after: State, transform: Transform) -> None:
    """Raise ``InvalidInput`` if the time by which rows expire would be another column."""
    made = {item.name for item in after.current.fields}
    if before.ttl is None or after.ttl is not None:
        return
    now = transform.renames.get(TTL_COLUMN, TTL_COLUMN)
    if now in made:
        what = f"renames it to {now!r}" if now != TTL_COLUMN else "makes it a column of another type"
        raise InvalidInput(
            f"column {TTL_COLUMN!r} of {_where(before)} says when its rows expire, and {transform.label} {what}. Keep "
            "it as it is; or return no such column, and the rows that live now do not expire any more",
            kind=ErrorKind.SCHEMA_MISMATCH,
            operator=before.operator,
            state=before.name,
            column=TTL_COLUMN,
        )


def _fits(given: pa.Field, wanted: pa.Field) -> bool:
    """Return whether a column of a piece has the type that was returned for no rows."""
    if pa.types.is_null(given.type) or given.type == wanted.type:
        return True
    try:
        return _shape(pa.field("c", _held(given.type))) == _shape(pa.field("c", wanted.type))
    except InvalidInput:
        return False


def _shape(item: pa.Field) -> FieldType:
    """Return the type of a column without ids and nullability."""
    (made,), _ = make_fields(pa.schema([item]), defaults={})

    def bare(kind: Any) -> Any:
        if isinstance(kind.type, str):
            return replace(kind, id=0, nullable=True)
        return replace(kind, id=0, nullable=True, type=nesting(kind.type, tuple(map(bare, children(kind)))))

    found: FieldType = bare(made).type
    return found


def _changes(before: State, after: State, renames: Mapping[str, str]) -> Iterator[ColumnChange]:
    formerly = {new: old for old, new in renames.items()}
    old = {item.id: item for item in before.current.fields}
    names = {item.name: item for item in before.current.fields}
    gone = {item.id for item in before.current.fields} - {item.id for item in after.current.fields}
    for item in after.current.fields:
        now = str(arrow_type(item.type))
        was = old.get(item.id)
        replaced = names.get(formerly.get(item.name, item.name))
        if was is not None:
            then = str(arrow_type(was.type))
            change = "renamed" if was.name != item.name else "kept" if then == now else "widened"
            yield ColumnChange(item.name, was.name, change, now, then)
        elif replaced is not None and replaced.id in gone:
            gone.remove(replaced.id)
            yield ColumnChange(item.name, replaced.name, "retyped", now, str(arrow_type(replaced.type)))
        else:
            yield ColumnChange(item.name, None, "added", now, None)
    for item in before.current.fields:
        if item.id in gone:
            yield ColumnChange(None, item.name, "dropped", None, str(arrow_type(item.type)))
