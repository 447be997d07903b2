"""What the SQL sink asks of a database: one transaction that marks what it commits and inserts it.

Theory of operation. Beside the table lies ``stateformat_commits``, with a row (a *mark*) for each
staged object whose rows are in the table. A transaction inserts marks, skips objects whose mark is
there already, perhaps from another driver, and inserts the rows of the others. It is durable,
whatever the server's default. So a mark is there exactly if the rows are.

docs/sinks.md has the table of types. A row that a database refuses would fail the commit of its
checkpoint, and every repeat of it. So types are checked when the job is put together, and values in
the subtask, before anything is promised. The driver then converts whole columns. SQLite has no
times and decimals: it gets ISO 8601, which compares as times do, and all digits of a decimal, as
text.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import ErrorKind, InvalidInput, InvalidState, StorageError
from stateformat.storage import as_url

SQLITE: Final = "SQLite"
POSTGRESQL: Final = "PostgreSQL"

_DAYS: Final = (-719_162, 2_932_896)
"""0001-01-01 and 9999-12-31 in days since 1970."""
_DAY_US: Final = 86_400_000_000
_TIMES: Final = (_DAYS[0] * _DAY_US, (_DAYS[1] + 1) * _DAY_US - 1)


class SqlType(NamedTuple):
    """How a database declares a column."""

    declared: str
    also: tuple[str, ...] = ()
    """Other declarations, in a table that exists, that hold the same values."""


_INTEGERS: Final = {
    pa.int8(): SqlType("smallint", ("integer", "bigint", "numeric")),
    pa.int16(): SqlType("smallint", ("integer", "bigint", "numeric")),
    pa.int32(): SqlType("integer", ("bigint", "numeric")),
    pa.int64(): SqlType("bigint", ("numeric",)),
}
_PLAIN: Final[dict[pa.DataType, SqlType]] = {
    **_INTEGERS,
    pa.bool_(): SqlType("boolean"),
    pa.float32(): SqlType("real"),
    pa.float64(): SqlType("double precision"),
    pa.string(): SqlType("text", ("character varying",)),
    pa.binary(): SqlType("bytea"),
    pa.date32(): SqlType("date"),
    pa.timestamp("us"): SqlType("timestamp without time zone"),
    pa.timestamp("us", "UTC"): SqlType("timestamp with time zone"),
}
_TEXT: Final = SqlType("TEXT", ("BLOB",))
# Only the affinity of SQLite's declared types counts, and that of BLOB converts nothing.
_SQLITE: Final[dict[pa.DataType, SqlType]] = {
    **dict.fromkeys(_INTEGERS, SqlType("INTEGER", ("NUMERIC", "BLOB"))),
    pa.bool_(): SqlType("BOOLEAN", ("NUMERIC", "INTEGER", "BLOB")),
    pa.float32(): SqlType("REAL", ("BLOB",)),
    pa.float64(): SqlType("REAL", ("BLOB",)),
    pa.string(): _TEXT,
    pa.binary(): SqlType("BLOB"),
    pa.date32(): _TEXT,
    pa.timestamp("us"): _TEXT,
    pa.timestamp("us", "UTC"): _TEXT,
}


def sql_type(database: str, type_: pa.DataType) -> SqlType | None:
    """The column type for an Arrow type; None where there is none."""
    type_ = _small(type_)
    if pa.types.is_decimal128(type_) and 0 <= type_.scale <= type_.precision:
        return _TEXT if database == SQLITE else SqlType(f"numeric({type_.precision},{type_.scale})", ("numeric",))
    return (_SQLITE if database == SQLITE else _PLAIN).get(type_)


def _small(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(type_):
        return pa.string()
    return pa.binary() if pa.types.is_large_binary(type_) else type_


def check_columns(database: str, what: str, schema: pa.Schema, keys: Sequence[str]) -> None:
    """Raise ``InvalidInput`` where the database can have no table of these columns and this key."""
    if not len(schema):
        raise InvalidInput(f"{what} is given rows without columns, and a table has at least one. Select some")
    names = [name.lower() if database == SQLITE else name for name in schema.names]
    if len(set(names)) < len(names):
        raise InvalidInput(f"{what} is given columns {schema.names}, two of which {database} takes for one. Rename one")
    for name in schema.names:
        check_name(database, f"column {name!r} of {what}", name)
    for field in schema:
        if sql_type(database, field.type) is None:
            raise InvalidInput(
                f"column {field.name!r} of {what} is {field.type}, for which there is no {database} type. Cast it "
                "before the sink to one of bool, int8 to int64, float32, float64, string, binary, date32, "
                "timestamp[us] (without zone or UTC) or decimal128, or make columns of its parts",
                kind=ErrorKind.UNSUPPORTED_TYPE,
                column=field.name,
            )
    missing = [key for key in keys if key not in schema.names]
    if missing:
        raise InvalidInput(
            f"{what} has the key {list(keys)} and is given columns {schema.names}, which lack {missing[0]!r}. Add it"
        )
    for key in keys:
        if pa.types.is_floating(schema.field(key).type):
            raise InvalidInput(
                f"key column {key!r} of {what} is {schema.field(key).type}, whose rounding errors make no key. Cast it "
                "to a decimal",
                kind=ErrorKind.UNSUPPORTED_KEY_TYPE,
                column=key,
            )


def check_name(database: str, what: str, name: str) -> None:
    """Raise ``InvalidInput`` for a name that the database would cut, or not take."""
    if not name or "\0" in name or (database == POSTGRESQL and len(name.encode(errors="surrogatepass")) > 63):
        most = " of at most 63 bytes in UTF-8, which PostgreSQL would cut off" if database == POSTGRESQL else ""
        raise InvalidInput(f"{what} cannot have this name. It needs one without U+0000{most}")


def check_values(database: str, what: str, rows: pa.Table, keys: Sequence[str]) -> None:
    """Raise ``InvalidState`` for a value that the database would refuse, or change."""
    try:
        rows.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidState(
            f"{what} is given rows that are no valid Arrow data: {error}. Mend the operator that makes them"
        ) from error
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if column.null_count and (field.name in keys or not field.nullable):
            kind = "a key column" if field.name in keys else "declared without nulls"
            raise InvalidState(
                f"column {field.name!r} of {what} is {kind} and has {column.null_count} nulls in {rows.num_rows} rows. "
                "Drop or fill them before the sink",
                kind=ErrorKind.NULL_NOT_ALLOWED,
                column=field.name,
            )
        wrong, why = _wrong_values(database, column)
        if wrong is not None and pc.any(wrong).as_py():
            found = column.filter(wrong)
            first = _number(found)[0] if pa.types.is_temporal(field.type) else found[0]
            unit = " (in Arrow's unit since 1970)" if pa.types.is_temporal(field.type) else ""
            raise InvalidState(
                f"column {field.name!r} of {what} has {first.as_py()!r}{unit}, and {why}. Replace it before the sink",
                kind=ErrorKind.INVALID_ARGUMENT,
                column=field.name,
            )


def _wrong_values(database: str, column: pa.ChunkedArray) -> tuple[pa.ChunkedArray | None, str]:
    type_ = _small(column.type)
    if pa.types.is_floating(type_) and database == SQLITE:
        return pc.is_nan(column), "SQLite would make it a null"
    if pa.types.is_string(type_) and database == POSTGRESQL:
        return pc.match_substring(column, "\0"), "text in PostgreSQL holds no U+0000"
    if pa.types.is_date32(type_):
        return _outside(_number(column), _DAYS), "dates are those of the years 1 to 9999"
    if pa.types.is_timestamp(type_):
        return _outside(_number(column), _TIMES), "times are those of the years 1 to 9999"
    return None, ""


def _number(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64()).cast(pa.int64())


def _outside(numbers: pa.ChunkedArray, limits: tuple[int, int]) -> pa.ChunkedArray:
    return pc.or_(pc.less(numbers, limits[0]), pc.greater(numbers, limits[1]))


def last_of_each_key(rows: pa.Table, keys: Sequence[str]) -> pa.Table:
    """The last row of each key, in their order."""
    places = pa.array(np.arange(rows.num_rows), pa.int64())
    names = [f"key{number}" for number in range(len(keys))]
    keyed = pa.table([*(rows[key] for key in keys), places], names=[*names, "place"])
    last = keyed.group_by(names).aggregate([("place", "max")])["place_max"]
    return rows if len(last) == rows.num_rows else rows.take(last.take(pc.sort_indices(last)))


def as_sqlite(array: pa.Array) -> pa.Array:
    """A column as SQLite stores it: numbers, text or bytes."""
    type_ = array.type
    if pa.types.is_boolean(type_):
        return array.cast(pa.int8())
    if pa.types.is_timestamp(type_):
        return _time_text(array, "+00:00")
    if pa.types.is_date32(type_):
        return array.cast(pa.string())
    return _decimal_text(array) if pa.types.is_decimal128(type_) else array


def as_text(array: pa.Array) -> pa.Array:
    """A column as the text that PostgreSQL reads."""
    type_ = array.type
    if pa.types.is_timestamp(type_):
        return _time_text(array, "+00")
    if pa.types.is_decimal128(type_):
        return _decimal_text(array)
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_):
        return _hexadecimal(array)
    return array.cast(pa.large_string())


def _time_text(array: pa.Array, zone: str) -> pa.Array:
    text = array.cast(pa.int64()).cast(pa.timestamp("us")).cast(pa.string())
    return text if array.type.tz is None else _joined(text, zone)


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, "")


def _decimal_text(array: pa.Array) -> pa.Array:
    """All digits of decimals. Arrow's cast writes small ones with an exponent."""
    scale = array.type.scale
    whole = pa.Array.from_buffers(
        pa.decimal128(array.type.precision, 0), len(array), array.buffers(), offset=array.offset
    ).cast(pa.string())
    if not scale:
        return whole
    sign = pc.if_else(pc.starts_with(whole, "-"), "-", "")
    digits = pc.utf8_lpad(pc.utf8_ltrim(whole, "-"), scale + 1, "0")
    return _joined(sign, pc.utf8_slice_codeunits(digits, 0, -scale), ".", pc.utf8_slice_codeunits(digits, -scale))


def _hexadecimal(array: pa.Array) -> pa.Array:
    """Bytes as ``\\x`` and two digits for each."""
    array = array.cast(pa.large_binary())
    if not len(array):
        return pa.array([], pa.large_string())
    offsets = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    first, last = int(offsets[0]), int(offsets[-1])
    data = array.buffers()[2]
    digits = b"" if data is None else memoryview(data)[first:last].hex().encode()
    digits_of = pa.LargeStringArray.from_buffers(len(array), pa.py_buffer((offsets - first) * 2), pa.py_buffer(digits))
    prefix, nothing = (pa.scalar(text, pa.large_string()) for text in ("\\x", ""))
    return pc.if_else(pc.is_valid(array), pc.binary_join_element_wise(prefix, digits_of, nothing), None)


_SECRET: Final = ("password", "sslpassword")
_SCHEMES: Final = ("sqlite", "postgresql", "postgres")


class SqlUrl:
    """``sqlite:///relative.db``, ``sqlite:////absolute.db``, ``postgresql://user:password@host/data?…``.

    Its ``str`` and its pickle have no password: after a pickle, libpq finds it elsewhere
    (``PGPASSWORD``, ``~/.pgpass``). Raises ``InvalidInput``, which shows no password either.
    """

    def __init__(self, url: str) -> None:
        url = as_url(url)
        scheme, separator, rest = url.partition("://")
        if not separator or scheme not in _SCHEMES:
            raise InvalidInput(
                f"the URL of a SQL sink begins with {scheme[:20] + separator if separator else 'no scheme'!r}. Give "
                "sqlite:///path.db or postgresql://user@host/database",
                kind=ErrorKind.UNKNOWN_SCHEME if separator else ErrorKind.INVALID_URL,
            )
        self.is_sqlite = scheme == "sqlite"
        self._secrets: tuple[str, ...] = ()
        if self.is_sqlite:
            self.path = os.path.abspath(rest[1:])  # noqa: PTH100 - text in, text out
            if not rest.startswith("/") or rest in ("/", "/:memory:"):
                raise InvalidInput(
                    f"{url} names no file. Give sqlite:///relative.db or sqlite:////absolute.db; a database in memory "
                    "would be gone with its first transaction",
                    kind=ErrorKind.INVALID_URL,
                )
            self.full = self._shown = f"sqlite:///{self.path}"
        else:
            self.path = ""
            self.full = url
            self._shown = self._without_password(url)

    def _without_password(self, url: str) -> str:
        try:
            parts = urlsplit(url)
            user, at, place = parts.netloc.rpartition("@")
            query = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
            # An unencoded password ends at its first slash or other mark of a URL; the rest would
            # show.
            strange = bool(parts.fragment) or "@" in user + parts.path + parts.query
        except ValueError:
            strange = True
        if strange:
            # The message does not even say where: that may be in the password.
            raise InvalidInput(
                "the postgresql:// URL of a SQL sink cannot be read. Write user and password in percent encoding "
                "(urllib.parse.quote(password, safe=''))",
                kind=ErrorKind.INVALID_URL,
            ) from None
        name, _, password = user.partition(":")
        secrets = [unquote(password), *(value for key, value in query if key in _SECRET)]
        self._secrets = tuple({text for secret in secrets if secret for text in (secret, quote(secret, safe=""))})
        kept = urlencode([(key, value) for key, value in query if key not in _SECRET], quote_via=quote, safe="/")
        return f"{parts.scheme}://{name}{at}{place}{parts.path}" + (f"?{kept}" if kept else "")

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return f"SqlUrl({self._shown!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (SqlUrl, (self._shown,))

    def __deepcopy__(self, memo: object) -> SqlUrl:
        # A copy in this process may keep the password.
        return self

    def without_secret(self, text: str) -> str:
        """A text of the database's client, without the password."""
        for secret in sorted(self._secrets, key=len, reverse=True):
            text = text.replace(secret, "***")
        return text


# ruff: noqa: S608 - the statements are made of names, which are quoted, and never of values


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
