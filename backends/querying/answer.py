"""A query over the state of a store, and its answer.

Tables are registered as pyarrow datasets, whose batches are made as DuckDB asks for them: only the
columns and rows that it needs. Which keys these have is known before: from the filters in the plan
of the query.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.model import CheckpointId
from stateformat.store import CheckpointStore
from stateformat.tables import ArrowStream

from .connection import MEMORY_BYTES, duckdb_module, first_line, locked, quoted, told_apart
from .relations import Pins, Relation, Relations
from .statement import Statement, parse, query_error

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from .relations import Pins, Relation

    Used = Sequence[tuple[Relation, str | None]]
    from duckdb import DuckDBPyRelation

    from stateformat.reading import Checkpoint


_PINS_MAX: Final = 1000
"""If there are more keys than these, all rows are read and DuckDB looks for the keys."""
_COLUMN: Final = re.compile(r'(?:^|")(\d+)\.\d+(?:$|")', re.MULTILINE)
_PIN: Final = re.compile(r'\("(\d+)\.(\d+)" (?:= (.*)|IN \((.*)\))\)', re.DOTALL)
"""A filter of a plan that only names values of a column."""


class Scans:
    """The scans of one run of a query: what they have read, what went wrong, whether to
    continue.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.errors: list[Exception] = []
        self.stopped = False

    def watch(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Count rows; keep an error, because DuckDB passes on only its text."""
        try:
            for batch in batches:
                if self.stopped:
                    return
                self.rows += batch.num_rows
                yield batch
        except Exception as error:
            self.errors.append(error)
            raise


class Scanned(ds.Dataset):  # type: ignore[misc]
    """The rows of a relation, by the names that a query uses.

    ``pins``: the only values of columns, by the names of the state, that a scan with a filter asks
    for.
    """

    def __init__(self, relation: Relation, scans: Scans, pins: Pins) -> None:
        self._relation = relation
        self._scans = scans
        self._pins = pins

    @property
    def schema(self) -> pa.Schema:
        """All columns."""
        return _renamed(self._relation, self._relation.names)

    def scanner(self, columns: list[str] | None = None, filter: pc.Expression | None = None, **_: Any) -> _Scan:
        """Return what DuckDB reads: these columns of the rows for which the filter is true."""
        schema = self.schema
        chosen = schema.names if columns is None else columns
        batches = self._scans.watch(self._batches(chosen, filter))
        return _Scan(pa.schema([schema.field(name) for name in chosen]), batches)

    def _batches(self, columns: Sequence[str], condition: pc.Expression | None) -> Iterator[pa.RecordBatch]:
        pins = {} if condition is None else self._pins
        if not all(pins.values()):
            return
        names = dict(zip(self._relation.names, self._relation.source.schema.names, strict=True))
        read = [name for name in names if name in columns or _may_use(condition, name)]
        own = [names[name] for name in read]
        source = self._relation.source
        whole = own == source.schema.names and not pins
        for batch in source.batches() if whole else source.part(own, pins):
            table = pa.Table.from_arrays([batch[name] for name in own], names=read)
            yield from (table if condition is None else table.filter(condition)).select(columns).to_batches()


def _may_use(condition: pc.Expression | None, name: str) -> bool:
    """Return whether a name stands in the text of a condition, which has no list of its columns."""
    return condition is not None and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", str(condition)) is not None


class _Scan:
    """What DuckDB needs of pyarrow's ``Scanner``."""

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self.projected_schema = schema
        self._batches = batches

    def to_reader(self) -> pa.RecordBatchReader:
        """Return the rows."""
        return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches)


def register(connection: DuckDBPyConnection, used: Used, scans: Scans, pins: Mapping[int, Pins]) -> None:
    """Make relations views: of a state in the schema of its operator, in another one, or ("") in
    none.
    """
    for number, (relation, schema) in enumerate(used):
        rows = Scanned(relation, scans, pins.get(number, {}))
        _view(connection, relation, schema, rows, relation.names)


def planned_pins(connection: DuckDBPyConnection, used: Used, text: str) -> Mapping[int, Pins]:
    """Return the values that key columns have in all scans of a relation, by its number.

    They stand in DuckDB's plan of the query over empty tables, whose columns are called
    ``relation.column``, by numbers.
    """
    if not any(relation.source.pinned for relation, _ in used):
        return {}
    for number, (relation, schema) in enumerate(used):
        names = [f"{number}.{i}" for i in range(len(relation.names))]
        _view(connection, relation, schema, ds.dataset(_renamed(relation, names).empty_table()), names)
    try:
        plan = json.loads(connection.execute(f"explain (format json)\n{text}").fetchall()[0][1])
    except (duckdb_module().Error, ValueError, RecursionError):
        return {}
    found: dict[int, Pins] = {}
    pending = list(plan)
    while pending:
        node = pending.pop()
        pending += node["children"]
        filters, columns = (_listed(node["extra_info"].get(name, [])) for name in ("Filters", "Projections"))
        # A scan without a filter, which may get one while the query runs, asks for any value.
        for number in {int(one) for one in _COLUMN.findall("\n".join([*filters, *columns]))} & {*range(len(used))}:
            pins = _pins(connection, used[number][0], number, filters)
            before = found.get(number)
            if before is not None:
                pins = {name: [*before[name], *values] for name, values in pins.items() if name in before}
            found[number] = pins
    return found


def _listed(said: str | Sequence[str]) -> Sequence[str]:
    """What a plan says of one or several things."""
    return [said] if isinstance(said, str) else said


def _pins(connection: DuckDBPyConnection, relation: Relation, number: int, filters: Sequence[str]) -> Pins:
    """Return the values of columns that the filters of one scan let through."""
    pins: dict[str, list[Any]] = {}
    for match in filter(None, map(_PIN.fullmatch, filters)):
        if int(match[1]) != number:
            continue
        column = relation.source.schema.field(int(match[2]))
        values = _values(connection, match[3] or match[4], column.type)
        if column.name in relation.source.pinned and values is not None:
            pins[column.name] = [one for one in pins.get(column.name, values) if one in values]
    return pins


def _values(connection: DuckDBPyConnection, text: str, kind: pa.DataType) -> list[Any] | None:
    """Return values that a plan shows as SQL; None if DuckDB's equality of their type is not that
    of keys.
    """
    if not (kind in (pa.string(), pa.binary(), pa.bool_(), pa.date32()) or pa.types.is_integer(kind)):
        return None
    try:
        rows = connection.execute(f"select unnest([{text}])").fetchall()
        values: list[Any] = pa.array([value for (value,) in rows], kind).to_pylist()
    except (duckdb_module().Error, pa.ArrowException):
        return None
    return values if len(values) <= _PINS_MAX and None not in values else None


def _view(
    connection: DuckDBPyConnection, relation: Relation, schema: str | None, rows: ds.Dataset, names: Sequence[str]
) -> None:
    hidden = f"_rows of {relation.sql_name}"
    connection.register(hidden, rows)
    place = quoted(relation.name)
    schema = relation.schema_name if schema is None else schema
    if schema:
        named = quoted(schema)
        connection.execute(f"create schema if not exists {named}")
        place = f"{named}.{place}"
    columns = ", ".join(f"{quoted(name)} as {quoted(own)}" for name, own in zip(names, relation.names, strict=True))
    connection.execute(f"create or replace view {place} as select {columns} from {quoted(hidden)}")  # noqa: S608 - quoted


def _renamed(relation: Relation, names: Sequence[str]) -> pa.Schema:
    return pa.schema([field.with_name(name) for field, name in zip(relation.source.schema, names, strict=True)])


BATCH_ROWS: Final = 2048
"""Rows in a batch of an answer: they may have 100 kB each."""
WAIT_SECONDS: Final = 0.2
_EXPLAINED: Final = pa.schema([("explain_key", pa.string()), ("explain_value", pa.string())])
_AS_TEXT: Final = re.compile(
    r"\b(BIGNUM|BIT|GEOMETRY|INTERVAL|TIME WITH TIME ZONE|TIME_NS|UHUGEINT|UNION|UUID|VARIANT|VARINT)\b"
)
"""Types of DuckDB that Arrow, or the format, does not have."""


def query(
    store: CheckpointStore,
    sql: str,
    *,
    checkpoint_id: int | None = None,
    all_checkpoints: bool = False,
    with_expired: bool = False,
) -> Answer:
    """Return the answer to a query over the states of a checkpoint, by default the newest.

    A state is ``operator.state``, by the uid of the operator, or by its name where only one has it;
    ``checkpoints``, ``operators``, ``states`` and ``handles`` are about all checkpoints.

    Args:
        store: where the checkpoints are.
        sql: one statement of DuckDB's SQL that reads: SELECT, WITH, FROM, VALUES, DESCRIBE,
            SUMMARIZE, SHOW TABLES, EXPLAIN.
        checkpoint_id: the checkpoint.
        all_checkpoints: every state has the rows of all checkpoints, with ``_checkpoint_id``.
        with_expired: also rows that had expired at their checkpoint.

    Reads the record, and binds the query; data is read by scanning the answer. Raises
    ``InvalidInput`` for what is no such statement, names what there is not, or where DuckDB is not
    installed; and as ``CheckpointStore.open``.
    """
    if all_checkpoints:
        return Answer.to(Relations.of_history(store, with_expired=with_expired), sql)
    checkpoint = store.open(None if checkpoint_id is None else CheckpointId(checkpoint_id))
    checkpoint = checkpoint.with_expired() if with_expired else checkpoint
    return Answer.to(Relations.of_checkpoint(store, checkpoint), sql)


@dataclass(frozen=True)
class _Run:
    """One execution: DuckDB's relation, not yet run, and the scans that it will make."""

    connection: DuckDBPyConnection
    relation: DuckDBPyRelation
    scans: Scans


@dataclass(frozen=True)
class Answer(ArrowStream):
    """The answer to a query. Each scan runs the query anew, in bounded memory.

    Scanning raises ``InvalidInput`` for errors that show only then (a cast that fails),
    ``StorageError`` if rows cannot be set aside, and what reading the states raises.
    """

    relations: Relations
    statement: Statement
    used: tuple[tuple[Relation, str | None], ...]
    columns: pa.Schema
    notes: tuple[str, ...]
    """What the user must know about names: sentences."""
    on_rows: Callable[[int], None] | None = field(default=None, compare=False)
    """Called from time to time with the number of rows read from states."""

    @classmethod
    def to(cls, relations: Relations, sql: str) -> Answer:
        """Return the answer to a query; see :func:`query` for what is raised."""
        with locked() as connection:
            statement = parse(connection, sql, relations.quoted_in(sql))
            # By what was found, not by its name: "a.b".c and a."b.c" read the same without quotes.
            chosen = [(relations.find(table), relations.alias_of(table)) for table in statement.tables]
            if statement.sees_catalog:
                chosen = [*((one, None) for one in relations.all), *chosen]
            notes = [*relations.notes, *(note for one in dict.fromkeys(one for one, _ in chosen) for note in one.notes)]
            if len(relations.checkpoints) == 1 and not statement.sees_catalog:
                uids = dict.fromkeys(one.state.operator for one, _ in chosen if one.state is not None)
                notes += filter(None, map(relations.checkpoints[0].without_state, uids))
            answer = cls(relations, statement, tuple(chosen), pa.schema([]), tuple(notes))
            return cls(relations, statement, tuple(chosen), answer._bound(connection), tuple(notes))

    @property
    def schema(self) -> pa.Schema:
        """The columns of every batch. Reads nothing."""
        return self.columns

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        """The checkpoints whose states are queried, newest first."""
        return self.relations.checkpoints

    def watched(self, on_rows: Callable[[int], None]) -> Answer:
        """Return the same answer, whose scans report from time to time how many rows they have
        read.
        """
        return replace(self, on_rows=on_rows)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Run the query, and stream its rows."""
        if self.statement.lists_tables:
            yield from self.relations.listing().to_batches()
            return
        with locked() as connection:
            run = self._prepared(connection, planned_pins(connection, self.used, self.statement.text))
            if self.statement.explain:
                relation = connection.sql(f"{self.statement.explain}\n{self.statement.text}")
                run = replace(run, relation=relation)
            try:
                yield from self._streamed(run)
            except duckdb_module().Error as error:
                raise _scan_error(error, run.scans, self.statement.text) from None

    def _bound(self, connection: DuckDBPyConnection) -> pa.Schema:
        """Return the columns of the answer."""
        if self.statement.lists_tables:
            return self.relations.listing().schema
        try:
            relation = self._prepared(connection, {}).relation
            # DuckDB plans no scan for a query that is limited to no rows.
            schema = relation.limit(0).to_arrow_table().schema
        except duckdb_module().Error as error:
            raise self._placed(connection, error) from None
        if self.statement.explain:
            return _EXPLAINED
        names = told_apart(list(relation.columns), fold=str)
        return pa.schema([pa.field(name, _plain(one.type)) for name, one in zip(names, schema, strict=True)])

    def _placed(self, connection: DuckDBPyConnection, error: Exception) -> InvalidInput:
        """Return what is wrong with the query, and where, which DuckDB's relations do not say."""
        text = self.statement.text
        try:
            connection.execute(f"explain\n{text}").fetchall()
        except duckdb_module().Error as again:
            return query_error(again, text, lines_before=1)
        return query_error(error, text)

    def _prepared(self, connection: DuckDBPyConnection, pins: Mapping[int, Pins]) -> _Run:
        """Return the query, bound; for an EXPLAIN, the query that is explained."""
        scans = Scans()
        register(connection, self.used, scans, pins)
        relation = connection.sql(self.statement.text)
        types = [re.sub(r'"[^"]*"', "", str(kind)) for kind in relation.types]
        if any(map(_AS_TEXT.search, types)):
            names = told_apart(list(relation.columns), fold=str)
            shown = [
                f"#{i}::varchar as {quoted(name)}" if _AS_TEXT.search(kind) else f"#{i} as {quoted(name)}"
                for i, (name, kind) in enumerate(zip(names, types, strict=True), 1)
            ]
            relation = relation.project(", ".join(shown))
        return _Run(connection, relation, scans)

    def _streamed(self, run: _Run) -> Iterator[pa.RecordBatch]:
        """Yield the rows, pulled by a thread of its own: the calling thread handles Ctrl-C and ends
        the query.
        """
        results: Queue[pa.RecordBatch | BaseException | None] = Queue(2)
        worker = Thread(target=_pull, args=(run, results), name="stateformat-sql", daemon=True)
        worker.start()
        try:
            while True:
                try:
                    found = results.get(timeout=WAIT_SECONDS)
                except Empty:
                    found = pa.RecordBatch.from_pylist([], self.columns)
                if self.on_rows is not None:
                    self.on_rows(run.scans.rows)
                if found is None:
                    return
                if isinstance(found, BaseException):
                    raise found
                if found.num_rows:
                    yield _as_plain(found, self.columns)
        finally:
            run.scans.stopped = True
            if worker.is_alive():
                run.connection.interrupt()
            while worker.is_alive():
                _emptied(results)
                worker.join(0.01)


def _pull(run: _Run, results: Queue[Any]) -> None:
    """Run a query; put its batches into a queue, and at last None or the error."""
    end: BaseException | None = None
    try:
        relation = run.relation
        # DuckDB 1.4 renamed the method.
        reader = (
            relation.to_arrow_reader(BATCH_ROWS)
            if hasattr(relation, "to_arrow_reader")
            else relation.fetch_arrow_reader(BATCH_ROWS)
        )
        for batch in reader:
            if run.scans.stopped:
                break
            results.put(batch)
    except Exception as error:
        end = error
    results.put(end)


def _emptied(results: Queue[Any]) -> None:
    """Make room, so that the thread that fills the queue can end."""
    try:
        while True:
            results.get_nowait()
    except Empty:
        return


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of a column of an answer: one that states have too, or a time."""
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _plain(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", _plain(kind.value_type)))
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz else kind


def _as_plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [
        column if column.type.equals(one.type) else column.cast(one.type)
        for column, one in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _scan_error(error: Exception, scans: Scans, text: str) -> Exception:
    """Return what went wrong in a run: what reading a state raised, or DuckDB's error."""
    duckdb = duckdb_module()
    if scans.errors:
        return scans.errors[0]
    if isinstance(error, duckdb.OutOfMemoryException):
        return InvalidInput(
            f"the query needs more than the {MEMORY_BYTES >> 20} MiB of memory that it gets: {first_line(error)}. Let "
            "it keep fewer rows at once, or write the states with `ckpt export`",
            kind=ErrorKind.LIMIT_EXCEEDED,
        )
    if isinstance(error, duckdb.IOException):
        return StorageError(
            f"rows of the query could not be spilled to disk: {first_line(error)}; let TMPDIR name a directory with "
            "more room",
            kind=ErrorKind.STORAGE_FAILED,
        )
    return query_error(error, text)
