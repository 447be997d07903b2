"""What the SQL sink asks of a database: one transaction that marks what it commits and inserts it.

Theory of operation. Beside the table lies ``stateformat_commits``, with a row (a *mark*) for each
staged object whose rows are in the table. A transaction inserts marks, skips objects whose mark is
there already, perhaps from another driver, and inserts the rows of the others. It is durable,
whatever the server's default. So a mark is there exactly if the rows are.
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
"""How many rows are converted for the database's client at a time."""
_BUSY_SECONDS: Final = 60.0


class Mark(NamedTuple):
    """A row of the marks. The first four columns are its key."""

    sink: str
    checkpoint_id: int
    attempt_id: str
    object: str
    rows: int


class SqlColumn(NamedTuple):
    """A column of an existing table."""

    name: str
    type: str
    shown: str
    """The type as the database writes it."""


class Transaction(ABC):
    """The steps of one transaction, in the order of a commit."""

    @abstractmethod
    def make(self, schema: pa.Schema | None) -> None:
        """Make the marks, and with ``schema`` the table, unless they are there.

        ``InvalidInput`` for a table that does not fit.
        """

    @abstractmethod
    def mark(self, marks: Sequence[Mark]) -> set[Mark]:
        """Insert marks. Returns those that were not there before."""

    @abstractmethod
    def insert(self, rows: pa.Table) -> None:
        """Insert rows, or update those of the same key. No key is in ``rows`` twice."""

    @abstractmethod
    def expired(self, sink: str, seconds: float) -> list[Mark]:
        """Marks of a sink that are older than this, by the database's clock."""

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
        return ".".join(map(quoted, self.table))

    @property
    def marks(self) -> str:
        return ".".join(map(quoted, [*self.table[:-1], MARKS]))

    @abstractmethod
    def transaction(self) -> contextlib.AbstractContextManager[Transaction]:
        """Begin a transaction: leaving the block commits it, an exception undoes it.

        ``StorageError`` where the database fails, ``InvalidState`` for a row that it refuses.
        """

    def make_durable(self) -> None:  # noqa: B027 - a server has nothing to do
        """Return when a power failure undoes nothing that a transaction has committed or found."""

    def declaration(self, schema: pa.Schema) -> str:
        columns = [
            f"{quoted(field.name)} {self.type_of(field).declared}"
            + (" NOT NULL" if field.name in self.keys or not field.nullable else "")
            for field in schema
        ]
        if self.keys:
            columns.append(f"PRIMARY KEY ({listed(self.keys)})")
        return f"CREATE TABLE IF NOT EXISTS {self.name} ({', '.join(columns)})"

    def type_of(self, field: pa.Field) -> SqlType:
        """The column type of a field. ``InvalidInput`` where the database has none."""
        found = sql_type(self.kind, field.type)
        if found is None:
            raise InvalidInput(
                f"column {field.name!r} of {self.shown} is {field.type}, for which there is no {self.kind} type",
                kind=ErrorKind.UNSUPPORTED_TYPE,
            )
        return found

    def insertion(self, columns: Sequence[str], source: str) -> str:
        statement = f"INSERT INTO {self.name} ({listed(columns)}) {source}"
        if not self.keys:
            return statement
        others = [name for name in columns if name not in self.keys]
        changes = ", ".join(f"{quoted(name)} = excluded.{quoted(name)}" for name in others)
        return f"{statement} ON CONFLICT ({listed(self.keys)}) DO " + (f"UPDATE SET {changes}" if others else "NOTHING")

    def check_table(self, schema: pa.Schema, found: Sequence[SqlColumn]) -> None:
        """``InvalidInput`` where an existing table lacks the columns for these rows."""
        there = {column.name: column for column in found}
        for field in schema:
            type_, column = self.type_of(field), there.get(field.name)
            if column is None:
                raise InvalidInput(
                    f"{self.shown} has columns {list(there)}, and the sink's rows have {schema.names}: it lacks "
                    f"{field.name!r}. Add it (as {type_.declared}), or leave it out of the rows",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    column=field.name,
                )
            if not any(holds(column.type, declared) for declared in (type_.declared, *type_.also)):
                raise InvalidInput(
                    f"column {field.name!r} of {self.shown} is {column.shown}, and the sink's rows have {field.type}, "
                    f"which needs {' or '.join(dict.fromkeys((type_.declared, *type_.also)))}. Alter the column, or "
                    "cast before the sink",
                    kind=ErrorKind.SCHEMA_MISMATCH,
                    column=field.name,
                )

    def _line(self, error: Exception) -> str:
        return " ".join(self.url.without_secret(str(error)).split())

    def failed(self, error: Exception, kind: ErrorKind = ErrorKind.STORAGE_FAILED) -> StorageError:
        advice = "See that the database can be reached and written, and start the job again: it commits first"
        return StorageError(f"{self.shown}: {self._line(error)}. {advice} what is not committed", kind=kind)

    def broken(self, error: Exception) -> InvalidState:
        """The error for a row that a constraint refuses."""
        why = f"{self.shown} refuses rows that were prepared: {self._line(error)}"
        advice = "Drop the constraint, or remove what stands in its way, and start the job again: it commits them first"
        return InvalidState(f"{why}. {advice}", kind=ErrorKind.SCHEMA_MISMATCH)

    def no_table(self) -> InvalidInput:
        """The error for a view that takes no rows."""
        why = f"{self.shown} is a view that takes no such rows. Name the table behind it"
        return InvalidInput(why, kind=ErrorKind.SCHEMA_MISMATCH)

    def no_key(self, error: Exception) -> InvalidInput:
        """The error for a key without a unique constraint in the table."""
        why = f"{self.shown} has no unique constraint on the sink's key {list(self.keys)}: {self._line(error)}"
        return InvalidInput(f"{why}. Add one, or name the key that it has", kind=ErrorKind.SCHEMA_MISMATCH)


class SqliteDatabase(Database):
    """A table in a SQLite file."""

    kind = SQLITE

    def __init__(self, url: SqlUrl, table: str, keys: Sequence[str], durable: bool) -> None:
        super().__init__(url, table, keys, durable)
        if len(self.table) > 1:
            raise InvalidInput(f"{self.shown} has a point in its name, and SQLite has no schemas. Rename it")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[Transaction]:
        try:
            connection = self.connect()
        except sqlite3.Error as error:
            raise self.failed(error) from error
        try:
            # EXTRA syncs the directory after the journal has gone: its return would undo the
            # commit.
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
        """Sync the directory: a process may have died between its commit and that sync."""
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
        return sqlite3.connect(self.url.path, timeout=_BUSY_SECONDS, isolation_level=None)


class _SqliteTransaction(Transaction):
    def __init__(self, database: SqliteDatabase, connection: Any) -> None:
        self._database = database
        self._connection = connection

    def make(self, schema: pa.Schema | None) -> None:
        self._connection.execute(
            f"CREATE TABLE IF NOT EXISTS {self._database.marks} (sink TEXT NOT NULL, checkpoint_id INTEGER NOT NULL, "
            "attempt_id TEXT NOT NULL, object TEXT NOT NULL, rows INTEGER NOT NULL, committed_at INTEGER NOT NULL, "
            "PRIMARY KEY (sink, checkpoint_id, attempt_id, object)) WITHOUT ROWID"
        )
        self._connection.execute(
            f"CREATE INDEX IF NOT EXISTS {quoted(MARKS + '_at')} ON {self._database.marks} (sink, committed_at)"
        )
        if schema is None:
            return
        self._connection.execute(self._database.declaration(schema))
        found = self._connection.execute(f"PRAGMA table_xinfo({self._database.name})").fetchall()
        # Generated columns cannot be inserted.
        self._database.check_table(
            schema, [SqlColumn(row[1], _affinity(row[2]), row[2]) for row in found if row[6] == 0]
        )
        try:
            self._connection.execute(f"EXPLAIN {self._statement(schema.names)}", [None] * len(schema))
        except sqlite3.OperationalError as error:
            query = "SELECT 1 FROM sqlite_master WHERE type = 'view' AND lower(name) = lower(?)"
            if self._connection.execute(query, self._database.table).fetchone():
                raise self._database.no_table() from error
            raise self._database.no_key(error) from error

    def _statement(self, columns: Sequence[str]) -> str:
        return self._database.insertion(columns, f"VALUES ({', '.join('?' * len(columns))})")

    def mark(self, marks: Sequence[Mark]) -> set[Mark]:
        statement = (
            f"INSERT INTO {self._database.marks} (sink, checkpoint_id, attempt_id, object, rows, committed_at) "
            "VALUES (?, ?, ?, ?, ?, CAST(strftime('%s', 'now') AS INTEGER)) ON CONFLICT DO NOTHING"
        )
        return {mark for mark in marks if self._connection.execute(statement, mark).rowcount}

    def insert(self, rows: pa.Table) -> None:
        statement = self._statement(rows.column_names)
        for batch in rows.to_batches(max_chunksize=BATCH_ROWS):
            # The client takes rows only; they are made and taken in C.
            columns = [as_sqlite(column).to_pylist() for column in batch.columns]
            self._connection.executemany(statement, zip(*columns, strict=True))

    def expired(self, sink: str, seconds: float) -> list[Mark]:
        rows = self._connection.execute(
            f"SELECT sink, checkpoint_id, attempt_id, object, rows FROM {self._database.marks} "
            "WHERE sink = ? AND committed_at < CAST(strftime('%s', 'now') AS INTEGER) - ?",
            (sink, seconds),
        )
        return [Mark(*row) for row in rows]

    def forget(self, marks: Sequence[Mark]) -> None:
        self._connection.executemany(
            f"DELETE FROM {self._database.marks} "
            "WHERE sink = ? AND checkpoint_id = ? AND attempt_id = ? AND object = ?",
            [mark[:4] for mark in marks],
        )


def quoted(name: str) -> str:
    """A name, quoted for a statement."""
    return '"' + name.replace('"', '""') + '"'


def listed(names: Sequence[str]) -> str:
    """Names, quoted for a statement."""
    return ", ".join(map(quoted, names))


def holds(there: str, declared: str) -> bool:
    """Whether a column of type ``there`` holds every value of a declared type."""
    if there.startswith("numeric(") and declared.startswith("numeric("):
        (precision, scale), (needed, after) = (
            [int(number) for number in text[8:-1].split(",")] for text in (there, declared)
        )
        return scale >= after and precision - scale >= needed - after
    return there == declared


def _affinity(declared: str) -> str:
    """The affinity of a declared type, by SQLite's rules; BOOLEAN stands for itself."""
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
