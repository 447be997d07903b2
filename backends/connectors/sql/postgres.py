"""A table in PostgreSQL, through psycopg 3.

Rows go in by COPY, as CSV that Arrow writes from whole columns, so no value becomes a Python
object. To update by a key they go through a temporary table of the transaction.
"""

# ruff: noqa: S608 - the statements are made of names, which are quoted, and never of values
from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv

from stateformat.errors import ErrorKind, InvalidInput

from . import databases as sql
from .databases import MARKS, POSTGRESQL, Mark, SqlColumn, SqlUrl, as_text, listed, quoted

_MAKING: Final = 0x73746174
"""The advisory lock for making tables: two sessions that make one table at once fail."""
_INCOMING: Final = "stateformat_incoming"
_LIMITS: Final = (
    "SELECT set_config('idle_in_transaction_session_timeout', '300000', true), "
    "set_config('tcp_keepalives_idle', '60', false), set_config('tcp_keepalives_interval', '10', false), "
    "set_config('tcp_keepalives_count', '6', false)"
)
"""So that a driver whose machine is gone does not keep the next one waiting at its marks."""
_DURABLE: Final = (
    "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
)
_CSV: Final = csv.WriteOptions(include_header=False, quoting_style="all_valid")


class PostgresDatabase(sql.Database):
    """A table in PostgreSQL. ``InvalidInput`` where psycopg is missing."""

    kind = POSTGRESQL

    def __init__(self, url: SqlUrl, table: str, keys: Sequence[str], durable: bool) -> None:
        super().__init__(url, table, keys, durable)
        if len(self.table) > 2:
            raise InvalidInput(
                f"{self.shown}: the name has {len(self.table)} parts. Give a table, or a schema and a table"
            )
        if find_spec("psycopg") is None:
            raise InvalidInput(
                f"{url} needs psycopg, which is not installed: pip install 'stateformat[postgres]'",
                kind=ErrorKind.MISSING_DEPENDENCY,
            )

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sql.Transaction]:
        psycopg = import_module("psycopg")
        refused = (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidAuthorizationSpecification)
        try:
            with self.connect() as connection, connection.transaction():
                connection.execute(_LIMITS)
                if self.durable:
                    # Staged objects go after the commit, so a power failure must not undo it.
                    connection.execute(_DURABLE)
                yield _PostgresTransaction(self, connection)
        except psycopg.errors.IntegrityError as error:
            raise self.broken(error) from _cause(error)
        except refused as error:
            raise self.failed(error, ErrorKind.STORAGE_REFUSED) from _cause(error)
        except psycopg.Error as error:
            raise self.failed(error) from _cause(error)

    def connect(self) -> Any:
        return import_module("psycopg").connect(self.url.full, autocommit=True, client_encoding="UTF8")


def _cause(error: Exception) -> Exception | None:
    """The error as a cause; None for one of connecting, which may show the password."""
    return error if getattr(error, "sqlstate", None) else None


class _PostgresTransaction(sql.Transaction):
    def __init__(self, database: PostgresDatabase, connection: Any) -> None:
        self._database = database
        self._connection = connection
        self._incoming: tuple[str, ...] | None = None
        # In a statement with parameters a percent sign is written twice.
        self._marks = database.marks.replace("%", "%%")

    def _execute(self, statement: str, parameters: Sequence[Any] | None = None) -> Any:
        return self._connection.execute(statement, parameters)

    def make(self, schema: pa.Schema | None) -> None:
        if not self._exists(self._database.marks) or (schema is not None and not self._exists(self._database.name)):
            self._execute("SELECT pg_advisory_xact_lock(%s)", [_MAKING])
            self._execute(
                f"CREATE TABLE IF NOT EXISTS {self._database.marks} (sink text NOT NULL, checkpoint_id bigint NOT "
                "NULL, attempt_id text NOT NULL, object text NOT NULL, rows bigint NOT NULL, "
                "committed_at timestamp with time zone NOT NULL DEFAULT now(), "
                "PRIMARY KEY (sink, checkpoint_id, attempt_id, object))"
            )
            index = quoted(f"{MARKS}_at")
            self._execute(f"CREATE INDEX IF NOT EXISTS {index} ON {self._database.marks} (sink, committed_at)")
            if schema is not None:
                self._execute(self._database.declaration(schema))
        if schema is not None:
            self._check(schema)

    def _exists(self, name: str) -> bool:
        return self._execute("SELECT to_regclass(%s)", [name]).fetchone()[0] is not None

    def _check(self, schema: pa.Schema) -> None:
        found = self._execute(
            "SELECT attname, format_type(atttypid, NULL), format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped AND attgenerated = ''",
            [self._database.name],
        ).fetchall()
        # With its length or precision: a shorter text, time or numeric is another type.
        self._database.check_table(schema, [SqlColumn(name, shown, shown) for name, _, shown in found])
        # COPY takes no view without a trigger, whether INSERT does or not.
        (takes,) = self._execute(
            "SELECT pg_relation_is_updatable(c.oid, true) & 8 > 0 AND (%s OR c.relkind <> 'v' OR EXISTS (SELECT FROM "
            "pg_trigger t WHERE t.tgrelid = c.oid AND t.tgtype & 68 = 68)) FROM pg_class c WHERE c.oid = "
            "to_regclass(%s)",
            [bool(self._database.keys), self._database.name],
        ).fetchone()
        if not takes:
            raise self._database.no_table()
        if self._database.keys:
            no_such_constraint = import_module("psycopg").errors.InvalidColumnReference
            columns = ", ".join(f"NULL::{self._database.type_of(field).declared}" for field in schema)
            try:
                self._execute("EXPLAIN " + self._database.insertion(schema.names, f"SELECT {columns} WHERE false"))
            except no_such_constraint as error:
                raise self._database.no_key(error) from error

    def mark(self, marks: Sequence[Mark]) -> set[Mark]:
        # All drivers insert in the same order, so that none deadlocks with another.
        columns = [list(values) for values in zip(*sorted(marks), strict=True)]
        rows = self._execute(
            f"INSERT INTO {self._marks} (sink, checkpoint_id, attempt_id, object, rows) "
            "SELECT * FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::text[], %s::bigint[]) "
            "ON CONFLICT DO NOTHING RETURNING sink, checkpoint_id, attempt_id, object, rows",
            columns,
        )
        return {Mark(*row) for row in rows}

    def insert(self, rows: pa.Table) -> None:
        columns = listed(rows.column_names)
        if not self._database.keys:
            self._copy(f"{self._database.name} ({columns})", rows)
            return
        self._make_incoming(rows.schema)
        self._copy(f"{_INCOMING} ({columns})", rows)
        self._execute(self._database.insertion(rows.column_names, f"SELECT {columns} FROM pg_temp.{_INCOMING}"))

    def _make_incoming(self, schema: pa.Schema) -> None:
        wanted = tuple(f"{quoted(field.name)} {self._database.type_of(field).declared}" for field in schema)
        if wanted == self._incoming:
            self._execute(f"TRUNCATE pg_temp.{_INCOMING}")
            return
        if self._incoming is not None:
            self._execute(f"DROP TABLE pg_temp.{_INCOMING}")
        self._execute(f"CREATE TEMPORARY TABLE {_INCOMING} ({', '.join(wanted)}) ON COMMIT DROP")
        self._incoming = wanted

    def _copy(self, place: str, rows: pa.Table) -> None:
        # A quoted empty field is an empty text, an unquoted one is null, as Arrow writes them.
        with self._connection.cursor() as cursor, cursor.copy(f"COPY {place} FROM STDIN (FORMAT csv)") as copy:
            for batch in rows.to_batches(max_chunksize=sql.BATCH_ROWS):
                text = pa.RecordBatch.from_arrays(list(map(as_text, batch.columns)), batch.schema.names)
                out = pa.BufferOutputStream()
                csv.write_csv(text, out, _CSV)
                copy.write(memoryview(out.getvalue()))

    def expired(self, sink: str, seconds: float) -> list[Mark]:
        rows = self._execute(
            f"SELECT sink, checkpoint_id, attempt_id, object, rows FROM {self._marks} "
            "WHERE sink = %s AND committed_at < now() - make_interval(secs => %s)",
            [sink, seconds],
        )
        return [Mark(*row) for row in rows]

    def forget(self, marks: Sequence[Mark]) -> None:
        columns = [list(values) for values in zip(*(mark[:4] for mark in marks), strict=True)]
        self._execute(
            f"DELETE FROM {self._marks} WHERE (sink, checkpoint_id, attempt_id, object) IN "
            "(SELECT * FROM unnest(%s::text[], %s::bigint[], %s::text[], %s::text[]))",
            columns,
        )
