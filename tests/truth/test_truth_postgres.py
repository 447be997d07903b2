"""The SQL sink on a real PostgreSQL server: the suite for every database, and server faults."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import SqlSink
from stateformat.errors import ErrorKind, InvalidInput, InvalidState, StorageError
from tests.connectors.sink_steps import PERMIT, SCHEMA, prepared, prepared_of, subtask_of
from tests.connectors.sql_suite import SqlSuite, Stepping, Steps
from tests.servers import postgres
from tests.servers.postgres import PostgresServer
from tests.tally import Tally

pytestmark = [pytest.mark.truth, pytest.mark.timeout(300)]

SECRET = "s3cret/@:%"


@pytest.fixture(scope="module")
def server(tally: Tally) -> Iterator[PostgresServer]:
    """A server for this file; without one the tests are skipped and the table says so."""
    why = postgres.available()
    if why:
        tally.skip("real PostgreSQL server", why)
        pytest.skip(f"no real PostgreSQL server: {why}")
    with postgres.running_postgres() as running:
        yield running


@pytest.fixture
def url(server: PostgresServer) -> str:
    """The database, empty."""
    server.execute(
        *("SET lock_timeout = '10s'", "DROP SCHEMA IF EXISTS other CASCADE", "DROP SCHEMA public CASCADE"),
        *("CREATE SCHEMA public", "GRANT USAGE ON SCHEMA public TO PUBLIC"),
    )
    return server.url


class TestPostgres(SqlSuite):
    """PostgreSQL, read through plain statements."""

    @pytest.fixture(autouse=True)
    def use(self, server: PostgresServer) -> None:
        self.server = server

    def execute(self, *statements: str) -> list[Any]:
        return self.server.execute("SET timezone = 'UTC'", *statements)

    def as_read(self, type_: pa.DataType, value: Any) -> Any:
        return value

    def make_older(self, condition: str, days: float) -> str:
        return f"UPDATE stateformat_commits SET committed_at = committed_at - interval '{days} days' WHERE {condition}"

    def test_columns_have_the_types_of_the_database_and_the_key_is_one(self) -> None:
        schema = pa.schema(
            [
                pa.field("n", pa.int16(), nullable=False),
                pa.field("price", pa.decimal128(12, 2)),
                pa.field("at", pa.timestamp("us", "UTC")),
            ]
        )
        self.make(schema=schema, key=["at", "n"]).clean("out", 0)
        found = self.execute(
            "SELECT attname, format_type(atttypid, atttypmod), attnotnull FROM pg_attribute WHERE attrelid = "
            "'t'::regclass AND attnum > 0",
        )
        assert found == [
            ("n", "smallint", True),
            ("price", "numeric(12,2)", False),
            ("at", "timestamp with time zone", True),
        ]
        index = "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 't'::regclass"
        assert self.execute(index) == [("PRIMARY KEY (at, n)",)]

    @pytest.mark.parametrize("key", [(), "n"])
    def test_a_number_that_is_none_is_one_here(self, key: Any) -> None:
        schema = pa.schema([("n", pa.int32()), ("x", pa.float64()), ("y", pa.float32())])
        sink = self.make(schema=schema, key=key)
        batch = pa.record_batch([[1, 2], [float("nan"), None], [None, float("nan")]], schema=schema)
        sink.commit(PERMIT, prepared_of(sink, batch))
        assert self.execute("SELECT n, x::text, y::text FROM t ORDER BY n") == [(1, "NaN", None), (2, None, "NaN")]

    def test_a_column_of_one_null_and_one_empty_text(self) -> None:
        schema = pa.schema([("c", pa.string())])
        sink = self.make(schema=schema)
        sink.commit(PERMIT, prepared_of(sink, pa.record_batch([[None, "", "\\."]], schema=schema)))
        assert sorted(self.execute("SELECT c IS NULL, c FROM t")) == [(False, ""), (False, "\\."), (True, None)]

    def test_wider_columns_of_somebody_elses_table_take_the_rows_and_narrower_do_not(self) -> None:
        schema = pa.schema([("a", pa.int32()), ("b", pa.decimal128(5, 2)), ("c", pa.string())])
        sink = self.make(schema=schema)
        for columns in (
            "a bigint, b numeric, c varchar",
            "a numeric, b numeric(6,3), c text",
            "a int, b numeric(5,2), c text",
        ):
            self.execute("DROP TABLE IF EXISTS t", f"CREATE TABLE t ({columns})")
            sink.clean("out", 0)
        for columns in (
            *("a smallint, b numeric, c text", "a int, b numeric(5,1), c text", "a int, b numeric(5,3), c text"),
            *("a int, b numeric, c varchar(9)", "a int, b numeric, c text GENERATED ALWAYS AS ('x') STORED"),
        ):
            self.execute("DROP TABLE IF EXISTS t", f"CREATE TABLE t ({columns})")
            with pytest.raises(InvalidInput, match="table 't'") as error:
                sink.clean("out", 0)
            assert error.value.kind is ErrorKind.SCHEMA_MISMATCH

    def test_a_table_in_a_schema_has_its_marks_beside_it(self) -> None:
        self.execute("CREATE SCHEMA other")
        sink = self.make("other.t", key="n")
        sink.commit(PERMIT, prepared_of(sink, 1))
        assert self.execute("SELECT n FROM other.t") == [(1,)]
        assert len(self.execute("SELECT * FROM other.stateformat_commits")) == 1
        assert self.execute("SELECT to_regclass('public.stateformat_commits')") == [(None,)]

    def test_text_with_a_null_character_is_refused_before_it_is_promised(self) -> None:
        opened = subtask_of(self.make())
        opened.process(pa.record_batch([[1], ["a\0b"]], schema=SCHEMA), 0)
        with pytest.raises(InvalidState, match=r"column 'text' .* holds no U"):
            prepared(opened)

    def test_a_server_that_ends_the_connection_at_any_step_undoes_the_commit(self, tally: Tally) -> None:
        told: list[str] = []
        for step in range(1, 100):
            self.execute("DROP TABLE IF EXISTS t, stateformat_commits")
            sink = self.make(key="n")
            table = prepared_of(sink, 1, 2)
            sink.clean("out", 0)
            steps = Steps(step)
            connect = sink._database.connect  # type: ignore[attr-defined]

            def begin(connect: Any = connect, steps: Steps = steps) -> Any:
                connection = connect()
                pid = connection.info.backend_pid

                def end() -> None:
                    steps.count += 1
                    if steps.count == steps.crash_at:
                        self.server.execute(f"SELECT pg_terminate_backend({pid}, 5000)")

                return Stepping(connection, end)

            sink._database.connect = begin  # type: ignore[attr-defined]
            try:
                sink.commit(PERMIT, table)
            except StorageError as error:
                told.append(str(error))
                assert self.seen() == []
                sink.commit(PERMIT, table)
            assert self.seen() == [1, 2]
            if steps.count < step:
                break
        assert len(told) > 10
        assert all("start the job again" in text for text in told)
        tally.add("PostgreSQL ends the connection in a commit", tried=len(told), noticed=len(told), wrong=0)

    def test_a_driver_that_is_killed_while_it_commits_leaves_nothing_and_hinders_nobody(self) -> None:
        sink = self.make()
        sink.clean("out", 0)
        table = prepared_of(sink, 1, 2)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        driver = context.Process(target=commit_and_stop, args=(self.url, str(self.tmp_path / "staging"), table, theirs))
        driver.start()
        try:
            assert ours.poll(60)
            assert ours.recv() == "inserted"
            assert self.seen() == []
        finally:
            assert driver.pid is not None
            os.kill(driver.pid, signal.SIGKILL)
            driver.join(30)
        sink.commit(PERMIT, table)
        assert self.seen() == [1, 2]

    def test_what_was_committed_is_durable_whatever_the_servers_default(self) -> None:
        told = []
        for durable in (True, False):
            url = f"{self.url}&options=-c%20synchronous_commit%3Doff"
            sink = SqlSink(url, "t", staging=self.tmp_path / "staging", durable=durable)
            with sink._database.transaction() as transaction:
                told += transaction._execute("SHOW synchronous_commit").fetchall()  # type: ignore[attr-defined]
        assert told == [("on",), ("off",)]

    def test_a_password_that_is_wrong_is_told_without_it(self, server: PostgresServer) -> None:
        self.execute(f"DROP ROLE IF EXISTS me; CREATE ROLE me LOGIN PASSWORD '{SECRET}'")
        right = SqlSink(server.url_with_password("me", SECRET), "t", staging=self.tmp_path / "staging")
        table = prepared_of(right, 1)
        with pytest.raises(StorageError, match="permission denied") as refused:
            right.commit(PERMIT, table)
        assert refused.value.kind is ErrorKind.STORAGE_REFUSED
        self.execute("GRANT ALL ON SCHEMA public TO me")
        right.commit(PERMIT, table)
        assert self.seen() == [1]
        wrong = SqlSink(server.url_with_password("me", SECRET + "x"), "t", staging=self.tmp_path / "staging")
        with pytest.raises(StorageError, match="password authentication failed") as error:
            wrong.commit(PERMIT, table)
        for told in (refused.value, error.value):
            assert "s3cret" not in str(told)
            assert str(wrong._database.url) in str(told)
        self.execute("DROP OWNED BY me; DROP ROLE me")

    def test_a_server_that_is_not_there_is_told(self) -> None:
        sink = SqlSink("postgresql://me:s3cret@127.0.0.1:1/data", "t", staging=self.tmp_path)
        with pytest.raises(StorageError, match=r"table 't' in postgresql://me@127.0.0.1:1/data: .*refused") as error:
            sink.commit(PERMIT, prepared_of(sink, 1))
        assert "s3cret" not in str(error.value)


def commit_and_stop(url: str, staging: str, table: pa.Table, pipe: Any) -> None:
    """A driver that has inserted everything, and is killed before it says so."""
    sink = SqlSink(url, "t", staging=staging)
    sink._forget = lambda *_: (pipe.send("inserted"), pipe.recv())  # type: ignore[assignment, method-assign, return-value]
    sink.commit(PERMIT, table)
