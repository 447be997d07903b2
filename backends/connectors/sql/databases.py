"""What the SQL sink asks of a database: one transaction that marks what it commits and inserts it.

Theory of operation. Beside the table lies ``stateformat_commits``, with a row (a *mark*) for each staged object whose rows are
in the table. A commit is one transaction. It inserts the marks; where one is there already, or another driver inserts it and
comes first, its object is done; the rows of the others follow; then the transaction is committed, durably, whatever
the server's default. So a mark is there exactly if the rows are, and however many commit, once.

What a database has to do is the same for each: :class:`Transaction` names it, step by step, in the order of a commit.
"""

# ruff: noqa: S608 - the statements are made of names, which are quoted, and never of values
from __future__ import annotations

import contextlib
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, InvalidState, StorageError

from .types import SQLITE, SqlType, as_sqlite, check_name, sql_type
from .url import SqlUrl

MARKS: Final = "stateformat_commits"
BATCH_ROWS: Final = 65_536
"""So many rows are turned into what a driver takes at a time."""
_BUSY_SECONDS: Final = 60.0


class Mark(NamedTuple):
    """What is noted of an object when its rows are inserted; the first four are its key."""

    sink: str
    checkpoint_id: int
    attempt_id: str
    object: str
    rows: int


class Column(NamedTuple):
    """A column of a table as it is: its name, its type, and how the database writes that."""

    name: str
    type: str
    shown: str


class Transaction(ABC):
    """One transaction. Leaving the block of :meth:`Database.transaction` commits it, an exception undoes it."""

    @abstractmethod
    def make(self, schema: pa.Schema | None) -> None:
        """Have the marks, and the table if ``schema`` is given: made where it is missing, ``InvalidInput`` where it does not fit."""

    @abstractmethod
    def mark(self, marks: Sequence[Mark]) -> set[Mark]:
        """Insert marks; those that were not there before."""

    @abstractmethod
    def insert(self, rows: pa.Table) -> None:
        """Insert rows, or update those of the same key, of which ``rows`` has none twice."""

    @abstractmethod
    def expired(self, sink: str, seconds: float) -> list[Mark]:
        """Marks of a sink that are older than this, by the clock of the database."""

    @abstractmethod
    def forget(self, marks: Sequence[Mark]) -> None:
        """Remove marks."""


class Database(ABC):
    """A table in a database. Opens a connection for each transaction, and holds none."""

    kind: str

    def __init__(self, url: SqlUrl, table: str, keys: Sequence[str], durable: bool) -> None:
        self.url = url
        self.keys = tuple(keys)
        self.durable = durable
        self.table = table.split(".")
        for part in self.table:
            check_name(self.kind, f"table {table!r}", part)
        self.shown = f"table {table!r} in {url}"

    @property
    def name(self) -> str:
        """The table's name, for statements."""
        return ".".join(map(quoted, self.table))

    @property
    def marks(self) -> str:
        """The name of the table of marks, in the same schema."""
        return ".".join(map(quoted, [*self.table[:-1], MARKS]))

    @abstractmethod
    def transaction(self) -> contextlib.AbstractContextManager[Transaction]:
        """Begin one. What the database refuses is ``StorageError``, a row that breaks a constraint ``InvalidState``."""

    def make_durable(self) -> None:  # noqa: B027 - a server has nothing to do
        """Return when a power failure undoes nothing that a transaction has committed or found. A server does so itself."""

    def declaration(self, schema: pa.Schema) -> str:
        """The statement that makes the table."""
        columns = [
            f"{quoted(field.name)} {self.type_of(field).declared}"
            + (" NOT NULL" if field.name in self.keys or not field.nullable else "")
            for field in schema
        ]
        if self.keys:
            columns.append(f"PRIMARY KEY ({listed(self.keys)})")
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({', '.join(columns)})"

    def type_of(self, field: pa.Field) -> SqlType:
        """The column type of a field, which has one: that was checked when the job was put together."""
        found = sql_type(self.kind, field.type)
        if found is None:
            raise InvalidInput(
                f"column {field.name!r} of {self.shown} is {field.type}, for which there is no {self.kind} type",
                kind=ErrorKind.UNSUPPORTED_TYPE,
            )
        return found

    def insertion(self, columns: Sequence[str], source: str) -> str:
        """The statement that inserts what ``source`` says, or updates by the key."""
        statement = f"INSERT INTO {self.name} ({listed(columns)}) {source}"
        if not self.keys:
            return statement
        others = [name for name in columns if name not in self.keys]
        changes = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in others)
        return f"{statement} ON CONFLICT ({listed(self.keys)}) DO " + (f"UPDATE SET {changes}" if others else "NOTHING")

    def check_table(self, schema: pa.Schema, found: Sequence[Column]) -> None:
        """``InvalidInput`` where a table that is there has not the columns for these rows."""
        there = {column.name: column for column in found}
        for field in schema:
            type_, column = self.type_of(field), there.get(field.name)
            if column is None:
                raise InvalidInput(
                    f"{self.shown} has columns {list(there)}, and the sink's rows have {schema.names}; there is no "
                    f"{field.name!r}. Add it (as {type_.declared}), or leave it out of the rows",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    column=field.name,
                )
            if not any(holds(column.type, declared) for declared in (type_.declared, *type_.also)):
                raise InvalidInput(
                    f"column {field.name!r} of {self.shown} is {column.shown}, and the sink's rows have {field.type}, which needs "
                    f"{' or '.join(dict.fromkeys((type_.declared, *type_.also)))}; alter the column, or cast before the sink",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    column=field.name,
                )

    def _said(self, error: Exception) -> str:
        """What a database says, in one line."""
        return " ".join(self.url.without_secret(str(error)).split())

    def failed(self, error: Exception, kind: ErrorKind = ErrorKind.STORAGE_FAILED) -> StorageError:
        """The database would not."""
        return StorageError(
            f"{self.shown}: {self._said(error)}; see that the database can be reached and written, "
            "and start the job again: it commits first what is not committed",
            kind=kind,
        )

    def broken(self, error: Exception) -> InvalidState:
        """A constraint that somebody has put on the table refuses a row."""
        return InvalidState(
            f"{self.shown} refuses rows that were prepared: {self._said(error)}; drop the constraint, "
            "or remove what stands in its way, and start the job again: it commits them first",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )

    def no_key(self, error: Exception) -> InvalidInput:
        """The key is none in the table."""
        return InvalidInput(
            f"{self.shown} has no unique constraint on the sink's key {list(self.keys)}: "
            f"{self._said(error)}; add one, or name the key that it has",
            kind=ErrorKind.SCHEMA_MISMATCH,
        )


class SqliteDatabase(Database):
    """A table in a SQLite file."""

    kind = SQLITE

    def __init__(self, url: SqlUrl, table: str, keys: Sequence[str], durable: bool) -> None:
        super().__init__(url, table, keys, durable)
        if len(self.table) > 1:
            raise InvalidInput(f"{self.shown} has a point in its name; SQLite has no schemas")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Begin one that alone may write."""
        try:
            connection = self.connect()
        except sqlite3.Error as error:
            raise self.failed(error) from error
        try:
            # EXTRA syncs the directory after the journal has gone, whose return would undo the transaction.
            connection.execute(f"PRAGMA synchronous = {'EXTRA' if self.durable else 'OFF'}")
            connection.execute("BEGIN IMMEDIATE")
            yield _SqliteTransaction(self, connection)
            connection.execute("COMMIT")
        except sqlite3.IntegrityError as error:
            raise self.broken(error) from error
        except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
            raise self.failed(error) from error
        finally:
            # Closing undoes what was not committed.
            connection.close()

    def make_durable(self) -> None:
        """Sync the directory: a process may have died between the end of its transaction and that sync."""
        if not self.durable:
            return
        try:
            # The journal lies beside the file itself, wherever links to it lie.
            descriptor = os.open(Path(self.url.path).resolve().parent, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self.failed(error) from error

    def connect(self) -> Any:
        """A connection that begins transactions when it is told."""
        return sqlite3.connect(self.url.path, timeout=_BUSY_SECONDS, isolation_level=None)


class _SqliteTransaction(Transaction):
    def __init__(self, database: SqliteDatabase, connection: Any) -> None:
        self._of = database
        self._connection = connection

    def make(self, schema: pa.Schema | None) -> None:
        self._connection.execute(
            f"CREATE TABLE IF NOT EXISTS {self._of.marks} (sink TEXT NOT NULL, checkpoint_id INTEGER NOT NULL, "
            "attempt_id TEXT NOT NULL, object TEXT NOT NULL, rows INTEGER NOT NULL, committed_at INTEGER NOT NULL, "
            "PRIMARY KEY (sink, checkpoint_id, attempt_id, object)) WITHOUT ROWID"
        )
        self._connection.execute(
            f"CREATE INDEX IF NOT EXISTS {quoted(MARKS + '_at')} ON {self._of.marks} (sink, committed_at)"
        )
        if schema is None:
            return
        self._connection.execute(self._of.declaration(schema))
        found = self._connection.execute(f"PRAGMA table_xinfo({self._of.name})").fetchall()
        # Generated columns cannot be inserted.
        self._of.check_table(schema, [Column(row[1], _affinity(row[2]), row[2]) for row in found if row[6] == 0])
        if self._of.keys:
            try:
                self._connection.execute(f"EXPLAIN {self._statement(schema.names)}", [None] * len(schema))
            except sqlite3.OperationalError as error:
                raise self._of.no_key(error) from error

    def _statement(self, columns: Sequence[str]) -> str:
        return self._of.insertion(columns, f"VALUES ({', '.join('?' * len(columns))})")

    def mark(self, marks: Sequence[Mark]) -> set[Mark]:
        statement = (
            f"INSERT INTO {self._of.marks} (sink, checkpoint_id, attempt_id, object, rows, committed_at) "
            "VALUES (?, ?, ?, ?, ?, CAST(strftime('%s', 'now') AS INTEGER)) ON CONFLICT DO NOTHING"
        )
        return {mark for mark in marks if self._connection.execute(statement, mark).rowcount}

    def insert(self, rows: pa.Table) -> None:
        statement = self._statement(rows.column_names)
        for batch in rows.to_batches(max_chunksize=BATCH_ROWS):
            # Rows are made and taken in C; the driver knows no other way.
            columns = [as_sqlite(column).to_pylist() for column in batch.columns]
            self._connection.executemany(statement, zip(*columns, strict=True))

    def expired(self, sink: str, seconds: float) -> list[Mark]:
        rows = self._connection.execute(
            f"SELECT sink, checkpoint_id, attempt_id, object, rows FROM {self._of.marks} "
            "WHERE sink = ? AND committed_at < CAST(strftime('%s', 'now') AS INTEGER) - ?",
            (sink, seconds),
        )
        return [Mark(*row) for row in rows]

    def forget(self, marks: Sequence[Mark]) -> None:
        self._connection.executemany(
            f"DELETE FROM {self._of.marks} WHERE sink = ? AND checkpoint_id = ? AND attempt_id = ? AND object = ?",
            [mark[:4] for mark in marks],
        )


def quoted(name: str) -> str:
    """A name as SQL has it, whatever is in it."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Sequence[str]) -> str:
    """Names, for a statement."""
    return ", ".join(map(quoted, names))


def holds(there: str, declared: str) -> bool:
    """Whether a column of the type ``there`` holds every value of a declared one; numerics with more digits do."""
    if there.startswith("numeric(") and declared.startswith("numeric("):
        (precision, scale), (needed, after) = (
            [int(number) for number in text[8:-1].split(",")] for text in (there, declared)
        )
        return scale >= after and precision - scale >= needed - after
    return there == declared


def _affinity(declared: str) -> str:
    """What SQLite makes of a declared type, by its documented rules; BOOLEAN stands for itself."""
    upper = declared.upper()
    for affinity, words in (
        ("INTEGER", ("INT",)),
        ("TEXT", ("CHAR", "CLOB", "TEXT")),
        ("BLOB", ("BLOB",)),
        ("REAL", ("REAL", "FLOA", "DOUB")),
    ):
        if any(word in upper for word in words):
            return affinity
    if not upper or upper == "BOOLEAN":
        return upper or "BLOB"
    return "NUMERIC"


__all__ = ["MARKS", "Column", "Database", "Mark", "SqliteDatabase", "Transaction", "listed", "quoted"]
