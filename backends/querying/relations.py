"""What a query can read: every state as ``operator.state``, and tables of metadata.

DuckDB compares names without case: of names that differ only in case, all but the first get ``_2``,
``_3``, and a note says so. Creating these costs nothing: a state is opened by its first batch.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.inspecting import METADATA_TABLES, MetadataRows, StateRange, metadata_table
from stateformat.model import State, known_names
from stateformat.reading import Checkpoint
from stateformat.schema import row_schema
from stateformat.store import CheckpointStore
from stateformat.tables import ArrowStream

from .connection import RESERVED, folded, outside_quotes, quoted, told_apart, words_quoted
from .statement import TableName

SYSTEM_SCHEMAS: Final = ("information_schema", "main", "memory", "pg_catalog", "pg_temp", "system", "temp")
"""Schemas and catalogs that DuckDB itself has."""
CHECKPOINT_ID: Final = "_checkpoint_id"
NOTES: Final = 10
"""How many notes about names one query gets."""
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CATALOG: Final = "memory"
_MEANT: Final = 3
"""How many states of one name an error suggests, each of another operator."""

Pins = Mapping[str, Sequence[Any]]
"""The only values of columns that a query needs."""


class Source(ArrowStream):
    """Rows from which some columns and keys can be read alone."""

    @property
    def pinned(self) -> tuple[str, ...]:
        """Columns whose values can limit what is read."""
        return ()

    def part(self, columns: Sequence[str], pins: Pins) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Stream these columns. Rows that ``pins`` do not name may still be included."""
        return (batch.select(list(columns)) for batch in self.batches())


@dataclass(frozen=True)
class OneState(Source):
    """The rows of a state of one checkpoint; its manifest is read with the first batch."""

    checkpoint: Checkpoint
    state: State

    @property
    def schema(self) -> pa.Schema:
        """The columns that ``Checkpoint.state`` has. Reads nothing."""
        return row_schema(self.state)

    @property
    def pinned(self) -> tuple[str, ...]:
        """The key columns."""
        return self.state.key_columns

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows."""
        return self.checkpoint.state(self.state).batches()

    def part(self, columns: Sequence[str], pins: Pins) -> Iterator[pa.RecordBatch]:
        """Stream these columns; if all key columns are pinned, only the rows of these keys."""
        rows = self.checkpoint.state(self.state).select(columns)
        keys = self.state.key_columns
        if keys and all(name in pins for name in keys):
            rows = rows.at_keys(_product({name: pins[name] for name in keys}, self.schema))
        return rows.batches()


@dataclass(frozen=True)
class OverCheckpoints(Source):
    """The rows of a state in several checkpoints, oldest first."""

    rows: StateRange

    @property
    def schema(self) -> pa.Schema:
        """``_checkpoint_id``, and the columns in the newest checkpoint that has the state."""
        return self.rows.schema

    @property
    def pinned(self) -> tuple[str, ...]:
        """The checkpoint."""
        return (CHECKPOINT_ID,)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows."""
        return self.rows.batches()

    def part(self, columns: Sequence[str], pins: Pins) -> Iterator[pa.RecordBatch]:
        """Stream these columns, from the checkpoints in ``pins``."""
        rows = self.rows.select(columns)
        if CHECKPOINT_ID in pins:
            wanted = set(pins[CHECKPOINT_ID])
            rows = replace(rows, sources=tuple(one for one in rows.sources if one.checkpoint_id in wanted))
        return rows.batches()


@dataclass(frozen=True)
class Metadata(Source):
    """A table of ``stateformat.inspecting`` about all checkpoints of the history."""

    store: CheckpointStore
    name: str

    @property
    def schema(self) -> pa.Schema:
        """Its columns. Reads nothing."""
        return METADATA_TABLES[self.name]

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Stream the rows, newest checkpoint first."""
        if self.name in ("checkpoints", "operators"):
            yield from metadata_table(self.store, self.name).to_batches()
            return
        yield from MetadataRows.of(self.name, self.store.checkpoints()).batches()


def _product(values: Pins, schema: pa.Schema) -> pa.Table:
    """Return every combination of values of columns."""
    arrays = {name: pa.array(list(dict.fromkeys(some)), schema.field(name).type) for name, some in values.items()}
    count = 1
    for array in arrays.values():
        count *= len(array)
    columns, each = {}, count
    for name, array in arrays.items():
        each //= max(1, len(array))
        numbers = [i for i in range(len(array)) for _ in range(each)]
        columns[name] = pc.take(array, pa.array(numbers * (count // max(1, len(numbers))), pa.int64()))
    return pa.table(columns)


@dataclass(frozen=True)
class Relation:
    """A table of a query: its name there, and its rows."""

    schema_name: str
    """Empty for a table of metadata."""
    name: str
    state: State | None
    make: Callable[[], Source]

    @property
    def sql_name(self) -> str:
        """The name as a query writes it, quoted if necessary."""
        return ".".join(plain_or_quoted(part) for part in (self.schema_name, self.name) if part)

    @cached_property
    def source(self) -> Source:
        """Its rows. Raises ``InvalidInput`` for states that cannot be combined."""
        return self.make()

    @cached_property
    def names(self) -> list[str]:
        """The columns as a query names them."""
        return told_apart(self.source.schema.names)

    @property
    def notes(self) -> list[str]:
        """What the user must know about the names of its columns."""
        renamed = zip(self.source.schema.names, self.names, strict=True)
        return [_note(f"column {old!r} of {self.sql_name}", new) for old, new in renamed if old != new]


class Relations:
    """The tables of a query, by name."""

    def __init__(
        self,
        checkpoints: Sequence[Checkpoint],
        relations: Sequence[Relation],
        aliases: Mapping[str, str],
        notes: Sequence[str],
    ) -> None:
        self.checkpoints = tuple(checkpoints)
        """The checkpoints that the states belong to."""
        self.all = tuple(relations)
        self.notes = tuple(notes)
        """What the user must know about the names of operators and states."""
        self._aliases = aliases
        self._by_name = {(folded(one.schema_name), folded(one.name)): one for one in relations}
        alone = Counter(folded(one.name) for one in relations)
        self._alone = {folded(one.name): one for one in relations if alone[folded(one.name)] == 1}
        """The tables by their own names, where only one has it."""

    @classmethod
    def of_checkpoint(cls, store: CheckpointStore, checkpoint: Checkpoint) -> Relations:
        """Return the states of one checkpoint, and the metadata of its store. Reads nothing."""
        names = {one.uid: one.name for one in checkpoint.graph.operators}
        return cls._of(
            [checkpoint],
            store,
            checkpoint.states,
            names,
            lambda state: OneState(checkpoint, state),
        )

    @classmethod
    def of_history(cls, store: CheckpointStore, *, with_expired: bool = False) -> Relations:
        """Return the states of all checkpoints, with ``_checkpoint_id``. Reads the history."""
        checkpoints = store.checkpoints()
        states: dict[tuple[str, str], State] = {}
        names: dict[str, str] = {}
        for one in checkpoints:
            for state in one.states:
                states.setdefault((state.operator, state.name), state)
            for operator in one.graph.operators:
                names.setdefault(operator.uid, operator.name)
        return cls._of(
            checkpoints,
            store,
            tuple(states.values()),
            names,
            lambda state: OverCheckpoints(
                StateRange.of(checkpoints, state.operator, state.name, with_expired=with_expired)
            ),
        )

    @classmethod
    def _of(
        cls,
        checkpoints: Sequence[Checkpoint],
        store: CheckpointStore,
        states: Sequence[State],
        operator_names: Mapping[str, str],
        source: Callable[[State], Source],
    ) -> Relations:
        notes: list[str] = []
        found = [Relation("", name, None, lambda name=name: Metadata(store, name)) for name in METADATA_TABLES]  # type: ignore[misc]
        by_operator: dict[str, list[State]] = {}
        for state in states:
            by_operator.setdefault(state.operator, []).append(state)
        schemas = told_apart(list(by_operator), SYSTEM_SCHEMAS)
        for (uid, own), schema in zip(by_operator.items(), schemas, strict=True):
            if schema != uid:
                notes.append(_note(f"operator {uid!r}", schema))
            names = told_apart([state.name for state in own])
            for state, name in zip(own, names, strict=True):
                if name != state.name:
                    notes.append(_note(f"state {state.name!r} of {uid!r}", name))
                found.append(Relation(schema, name, state, lambda state=state: source(state)))  # type: ignore[misc]
        given = [operator_names.get(uid, uid) for uid in by_operator]
        aliases = {
            folded(name): schema
            for name, schema in zip(given, schemas, strict=True)
            if name and given.count(name) == 1 and folded(name) not in SYSTEM_SCHEMAS
        }
        return cls(checkpoints, found, aliases, notes)

    def find(self, table: TableName) -> Relation:
        """Return the table that a query names; an operator by its uid or its name, or by neither
        where only one has such a state.

        Raises ``InvalidInput`` for one that does not exist.
        """
        schema, name = folded(table.schema), folded(table.name)
        if folded(table.catalog) in ("", _CATALOG):
            if not schema and name in self._alone:
                return self._alone[name]
            for known in (schema, folded(self._aliases.get(schema, schema))):
                if (known, name) in self._by_name:
                    return self._by_name[known, name]
        what = f"checkpoint {self.checkpoints[0].id}" if len(self.checkpoints) == 1 else "the history"
        names = [one.sql_name for one in self.all]
        same = [repr(one.sql_name) for one in self.all if folded(one.name) == name]
        if not table.schema and re.search(r"[/\\.*]", table.name):
            hint = "files cannot be read here"
        elif 0 < len(same) <= _MEANT:
            hint = f"did you mean {' or '.join(same)}?"
        else:
            hint = known_names(names, str(table))
        raise InvalidInput(f"{what} has no table {str(table)!r}; {hint}", kind=ErrorKind.UNKNOWN_STATE)

    def alias_of(self, table: TableName) -> str | None:
        """Return the operator's name that a query uses for a table, if it is not the table's
        schema; "" for none.
        """
        schema = folded(table.schema)
        if not schema and folded(table.name) in self._alone:
            return ""
        own = (schema, folded(table.name)) in self._by_name
        return table.schema if table.schema and not own and schema in self._aliases else None

    def quoted_in(self, sql: str) -> Iterator[str]:
        """Yield a query with more and more of the names quoted that SQL does not take as they are
        shown: of tables after FROM and JOIN, of words before a dot, of columns.
        """
        written: dict[str, str] = {}
        for one in filter(lambda one: one.state is not None, self.all):
            aliases = [name for name, schema in self._aliases.items() if schema == one.schema_name]
            for place in (one.schema_name, *aliases, *([""] if folded(one.name) in self._alone else [])):
                parts = [part for part in (place, one.name) if part]
                written.setdefault(folded(".".join(parts)), ".".join(map(plain_or_quoted, parts)))
        names = sorted((name for name, quoted in written.items() if name != folded(quoted)), key=len, reverse=True)
        if names:
            table = re.compile(
                rf"(\b(?:from|join)\s+|,\s*)({'|'.join(map(re.escape, names))})(?![\w.-])", re.IGNORECASE
            )
            sql = outside_quotes(sql, table, lambda found: found[1] + written[folded(found[2])])
            yield sql
        words = {folded(name) for one in self.all if one.state is not None for name in (one.name, *_columns(one))}
        yield from words_quoted(sql, words)

    def listing(self) -> pa.Table:
        """Return the answer to SHOW TABLES: every table, by the name that a query gives it."""
        return pa.table(
            {
                "name": pa.array([one.sql_name for one in self.all], pa.string()),
                "mode": pa.array([one.state.mode.value if one.state else "metadata" for one in self.all], pa.string()),
                "columns": pa.array([one.names for one in self.all], pa.list_(pa.string())),
            }
        )


def _columns(relation: Relation) -> Sequence[str]:
    assert relation.state is not None
    return [one.name for one in row_schema(relation.state)]


def _note(what: str, name: str) -> str:
    return f"{what} is {plain_or_quoted(name)} here: DuckDB compares names without case, and that one was taken"


def plain_or_quoted(name: str) -> str:
    """Return a name as a query writes it."""
    return name if _PLAIN.fullmatch(name) and folded(name) not in RESERVED else quoted(name)
