"""The SQL sink on SQLite: the suite of every database, and SQLite's own, URLs, staging places.

Ready-made sources, operators and sinks together, in jobs that are lost and run again.
"""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import pickle
import random
import sqlite3
import uuid
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import stateformat as sf
from stateformat.backends.connectors import (
    CollectSink,
    CsvSource,
    FileSink,
    MemorySource,
    ParquetSource,
    RateSource,
    SqlSink,
)
from stateformat.backends.connectors.sql.databases import SqlUrl
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.dataflow.operators.join import BroadcastJoin
from stateformat.backends.local import LocalRuntime
from stateformat.backends.runtime import JobOutcome, RunDiscarded
from stateformat.errors import ErrorKind, InvalidInput, InvalidState, StorageError
from tests.connectors.sink_steps import PERMIT, SCHEMA, batch_of, prepared, prepared_of, subtask_of
from tests.connectors.sql_suite import SqlSuite
from tests.servers.server import BUCKET, S3Server

SECRET = "p@ss/w:rd%"
QUOTED = "p%40ss%2Fw%3Ard%25"


def path_of(url: str) -> str:
    return url.removeprefix("sqlite:///")


class TestSqlite(SqlSuite):
    """SQLite, read by the library that Python has, in connections of their own."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"sqlite:///{tmp_path}/data.db"

    def execute(self, *statements: str) -> list[Any]:
        connection = sqlite3.connect(path_of(self.url))
        try:
            for statement in statements:
                found = connection.execute(statement).fetchall()
            connection.commit()
            return found
        finally:
            connection.close()

    def as_read(self, type_: pa.DataType, value: Any) -> Any:
        if isinstance(value, bool):
            return int(value)
        if isinstance(value, dt.datetime):
            return value.isoformat(" ", "microseconds")
        if isinstance(value, dt.date):
            return value.isoformat()
        return format(value, "f") if isinstance(value, decimal.Decimal) else value

    def quick(self, connection: Any) -> Any:
        connection.execute("PRAGMA journal_mode = MEMORY")
        return connection

    def make_older(self, condition: str, days: float) -> str:
        return f"UPDATE stateformat_commits SET committed_at = committed_at - {days} * 86400 WHERE {condition}"


def test_a_number_that_is_none_is_not_made_null_behind_ones_back(tmp_path: Path) -> None:
    opened = subtask_of(SqlSink(f"sqlite:///{tmp_path}/data.db", "t"))
    opened.process(pa.record_batch({"c": [1.0, float("nan")]}), 0)
    with pytest.raises(InvalidState, match=r"column 'c' .* has nan, and SQLite would make it a null"):
        prepared(opened)


def test_columns_that_sqlite_takes_for_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="two of which SQLite takes for one"):
        SqlSink(f"sqlite:///{tmp_path}/data.db", "t").output_schema(pa.schema([("a", pa.int8()), ("A", pa.int8())]))


def test_a_database_that_somebody_else_writes_is_waited_for_and_then_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateformat.backends.connectors.sql.databases._BUSY_SECONDS", 0.01)
    url = f"sqlite:///{tmp_path}/data.db"
    sink = SqlSink(url, "t")
    table = prepared_of(sink, 1)
    other = sqlite3.connect(path_of(url), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageError, match=r"table 't' in sqlite:///.*database is locked. .*start the job again"):
        sink.commit(PERMIT, table)
    other.close()
    sink.commit(PERMIT, table)


def test_what_is_there_and_is_no_database_is_told(tmp_path: Path) -> None:
    (tmp_path / "data.db").write_bytes(b"no database" * 100)
    sink = SqlSink(f"sqlite:///{tmp_path}/data.db", "t")
    sink.output_schema(SCHEMA)
    with pytest.raises(StorageError, match="not a database"):
        sink.clean("out", 0)
    with pytest.raises(StorageError, match="unable to open"):
        SqlSink(f"sqlite:///{tmp_path}/nowhere/data.db", "t").commit(PERMIT, prepared_of(sink, 1))


def test_what_is_committed_is_durable_before_the_objects_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    sink = SqlSink(f"sqlite:///{tmp_path}/data.db", "t")
    sink.output_schema(SCHEMA)
    table = prepared_of(sink, 1)
    connect, remove = sink._database.connect, sink._staging.remove  # type: ignore[attr-defined]

    def traced() -> Any:
        connection = connect()
        connection.set_trace_callback(told.append)
        return connection

    monkeypatch.setattr(sink._database, "connect", traced)
    synced = sink._database.make_durable
    monkeypatch.setattr(sink._database, "make_durable", lambda: (told.append("sync"), synced()))
    monkeypatch.setattr(sink._staging, "remove", lambda names: (told.append("remove"), remove(names)))
    sink.commit(PERMIT, table)
    words = [statement.split("(")[0].strip() for statement in told]
    assert words[0] == "PRAGMA synchronous = EXTRA"
    assert words.count("COMMIT") == words.count("BEGIN IMMEDIATE") == 1
    assert words.index('INSERT INTO "stateformat_commits"') < words.index('INSERT INTO "t"') < words.index("COMMIT")
    assert words[-3:] == ["COMMIT", "sync", "remove"]
    connection = sqlite3.connect(tmp_path / "data.db")
    assert connection.execute("SELECT n FROM t").fetchall() == [(1,)]
    connection.close()
    assert (tmp_path / "data.db-staging" / "out").is_dir()


def test_prepared_rows_are_synced_before_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    sink = SqlSink(f"sqlite:///{tmp_path}/data.db", "t", object_bytes=1)
    directory = sink._staging  # type: ignore[attr-defined]
    for name in ("sync_file", "rename", "sync"):
        call = getattr(directory, name)
        monkeypatch.setattr(directory, name, lambda *names, call=call, name=name: (told.append(name), call(*names))[1])
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    assert told == ["sync_file", "rename", "sync"]
    prepared(opened)
    assert told[3:] == ["rename", "sync"]


def test_closing_throws_away_what_no_checkpoint_holds(tmp_path: Path) -> None:
    opened = subtask_of(SqlSink(f"sqlite:///{tmp_path}/data.db", "t", object_bytes=1))
    opened.process(batch_of(1), 0)
    held = prepared(opened)
    opened.process(batch_of(2), 0)
    assert len(list((tmp_path / "data.db-staging" / "out").iterdir())) == 2
    opened.close()
    assert [path.name for path in (tmp_path / "data.db-staging" / "out").iterdir()] == [
        held["object"][0].as_py().removeprefix("out/")
    ]


class Elsewhere(MemoryFileSystem):
    """A filesystem that only fsspec knows."""

    protocol = "elsewhere"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("elsewhere://"))


def test_rows_are_staged_on_any_file_system_of_fsspec(tmp_path: Path) -> None:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    name = uuid.uuid4().hex
    url = f"sqlite:///{tmp_path}/data.db"
    sink = SqlSink(url, "t", staging=f"elsewhere://{name}", object_bytes=1)
    system, folder = fsspec.filesystem("elsewhere"), f"/{name}/out"
    assert sink.clean("out", 1) == []
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    opened.process(batch_of(2), 0)
    table = prepared(opened, 2)
    assert sorted(system.ls(folder, detail=False)) == [f"/{name}/{path}" for path in table["object"].to_pylist()]
    old = prepared_of(sink, 5)
    assert sink.clean("out", 1) == old["object"].to_pylist()
    for _ in range(2):
        sink.commit(PERMIT, table)
        connection = sqlite3.connect(tmp_path / "data.db")
        assert connection.execute("SELECT n FROM t ORDER BY n").fetchall() == [(1,), (2,)]
        connection.close()
    assert system.find("/") == []
    with pytest.raises(StorageError, match=f"{old['object'][0].as_py()} .*is not there"):
        sink.commit(PERMIT, old)


def test_rows_are_not_staged_where_only_a_store_could_lie(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="takes only the objects of stores"):
        SqlSink(f"sqlite:///{tmp_path}/data.db", "t", staging="memory://here")


def test_rows_are_staged_on_an_object_store_with_the_options_of_a_store(tmp_path: Path, moto: S3Server) -> None:
    place, options = f"s3a://{BUCKET}/{uuid.uuid4().hex}", moto.options()
    sink = SqlSink(f"sqlite:///{tmp_path}/data.db", "t", staging=place, staging_options=options)
    staging = sink._staging  # type: ignore[attr-defined]
    staging.put("out/a", b"rows")
    staging.rename("out/a", "out/b")
    assert (staging.read("out/a"), staging.read("out/b")) == (None, b"rows")
    assert (staging.names("out"), staging.names("none")) == (["b"], [])
    with pytest.raises(StorageError, match=f"out/a in s3://{BUCKET}/.* is gone"):
        staging.rename("out/a", "out/c")


def test_a_staging_place_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no storage for nonsense://"):
        SqlSink(f"sqlite:///{tmp_path}/data.db", "t", staging="nonsense://place")
    (tmp_path / "file").write_text("")
    opened = subtask_of(SqlSink(f"sqlite:///{tmp_path}/data.db", "t", staging=f"file://{tmp_path}/file"))
    opened.process(batch_of(1), 0)
    with pytest.raises(StorageError, match="cannot make"):
        prepared(opened)


# URLs and secrets


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{QUOTED}@host:5432/data",
        f"postgres://me@host/data?sslmode=require&password={QUOTED}",
        f"postgresql://me:{QUOTED}@/data?host=/tmp&sslpassword={QUOTED}",
    ],
)
def test_a_password_is_in_nothing_that_is_shown_or_sent(url: str, tmp_path: Path) -> None:
    sink = SqlSink(url, "t", staging=tmp_path)
    assert sink._database.url.full == url
    for text in (str(sink._database.url), repr(sink._database.url), sink._database.shown, repr(vars(sink))):
        assert SECRET not in text
        assert QUOTED not in text
    sent = pickle.dumps(sink)
    assert SECRET.encode() not in sent
    assert QUOTED.encode() not in sent
    assert pickle.loads(sent)._database.url.full == str(sink._database.url)
    # What stays in the process may connect.
    assert copy.deepcopy(sink)._database.url.full == copy.copy(sink)._database.url.full == url
    assert sink._database.url.without_secret(f"no {SECRET} and no {QUOTED}") == "no *** and no ***"
    opened = subtask_of(sink)
    opened.process(batch_of(1), 0)
    assert SECRET not in str(prepared(opened).to_pylist())


def test_a_url_without_a_password_is_shown_as_it_is() -> None:
    for url in ("postgresql:///data?host=/tmp&port=5433", "postgresql://me@[::1]:5432/data", "postgresql://a,b/data"):
        assert str(SqlUrl(url)) == SqlUrl(url).full == url


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{SECRET}@host/data",
        f"postgresql://me:x@{SECRET}@host/d",
        f"postgresql://h/d?password={SECRET}#x",
    ],
)
def test_a_url_that_cannot_be_read_is_refused_without_showing_it(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="percent encoding") as error:
        SqlSink(url, "t", staging=tmp_path)
    assert error.value.kind is ErrorKind.INVALID_URL
    assert "ss/w" not in str(error.value)
    assert error.value.__cause__ is None


@pytest.mark.parametrize(
    "url", ["sqlite://", "sqlite:///", "sqlite://data.db", "sqlite:///:memory:", "data.db", "mysql://h/d"]
)
def test_a_url_of_nothing_that_can_be_written_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="sqlite:///"):
        SqlSink(url, "t")


def test_a_relative_sqlite_url_is_relative_and_one_with_four_slashes_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert SqlUrl("sqlite:///data.db").path == str(tmp_path / "data.db")
    assert SqlUrl("sqlite:////a/data.db").path == "/a/data.db"
    assert pickle.loads(pickle.dumps(SqlUrl("sqlite:///data.db"))).path == str(tmp_path / "data.db")


def test_what_a_sink_cannot_be_is_told_where_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, told in (
        ({"marks_days": 0}, "marks_days is 0"),
        ({"object_bytes": 0}, "object_bytes is 0"),
        ({"table": "a.b"}, "SQLite has no schemas"),
        ({"table": ""}, "needs one"),
        ({"url": "postgresql://h/d"}, "no staging place"),
        ({"url": "postgresql://h/d", "staging": "x", "table": "a.b.c"}, "has 3 parts"),
        ({"url": "postgresql://h/d", "staging": "x", "table": "a" * 64}, "63 bytes"),
    ):
        with pytest.raises(InvalidInput, match=told):
            SqlSink(**{"url": f"sqlite:///{tmp_path}/data.db", "table": "t", **options})  # type: ignore[arg-type]
    monkeypatch.setattr("stateformat.backends.connectors.sql.postgres.find_spec", lambda name: None)
    with pytest.raises(InvalidInput, match=r"stateformat\[postgres\]") as error:
        SqlSink("postgresql://h/d", "t", staging=tmp_path)
    assert error.value.kind is ErrorKind.MISSING_DEPENDENCY


ROWS, KEYS, WINDOW_US = 4_000, 7, 250_000


def with_key(batch: pa.RecordBatch) -> pa.RecordBatch:
    n = batch["n"]
    return batch.append_column("key", pc.subtract(n, pc.multiply(pc.divide(n, KEYS), KEYS)))


def ticks_job(directory: Path, collected: CollectSink, shards: int) -> Dataflow:
    """Ticks, counted by key and window, named by a table; windows collected, totals in files."""
    flow = Dataflow("ticks", parallelism=2)
    ticks = flow.source(RateSource(rows_per_read=100, total=ROWS, shards=shards), uid="ticks", event_time="at")
    names = flow.source(
        MemorySource(pa.table({"number": range(KEYS), "name": [f"é{key}" for key in range(KEYS)]}), splits=3),
        uid="names",
    )
    keyed = ticks.map(with_key, uid="keyed").filter(pc.field("key") > 0, uid="some").key_by("key")
    windows = keyed.window(WINDOW_US, "at", {"rows": ("*", "count"), "last": ("n", "max")}, uid="windows")
    named = windows.apply(BroadcastJoin({"key": "number"}), names.broadcast(), uid="named")
    named.apply(collected, uid="collected")
    totals = named.key_by("name").aggregate({"rows": ("rows", "sum")}, emit="end", uid="totals")
    totals.apply(FileSink(directory / "totals", durable=False), uid="out")
    return flow


def expected_windows(shards: int) -> list[dict[str, Any]]:
    """By arithmetic: row n of each shard is at n milliseconds."""
    found: dict[tuple[int, int], list[int]] = {}
    for shard in range(shards):
        for n in range(ROWS // shards + (shard < ROWS % shards)):
            if n % KEYS:
                found.setdefault((n % KEYS, n * 1000 // WINDOW_US * WINDOW_US), []).append(n)
    return [
        {"key": key, "window_start": at, "rows": len(numbers), "last": max(numbers), "name": f"é{key}"}
        for (key, at), numbers in sorted(found.items())
    ]


def collected_windows(sink: CollectSink) -> list[dict[str, Any]]:
    table = sink.table().drop_columns("window_end")
    times = table["window_start"].cast(pa.int64())
    table = table.set_column(table.schema.get_field_index("window_start"), "window_start", times)
    return table.sort_by([("key", "ascending"), ("window_start", "ascending")]).to_pylist()


def runtime(directory: Path, **options: Any) -> LocalRuntime:
    store = sf.open(str(directory / "store"), durable=False)
    return LocalRuntime(store, checkpoint_interval_us=None, checkpoint_rows=600, **options)


@pytest.mark.parametrize(("shards", "parallelism"), [(1, 1), (4, 1), (4, 3), (3, 4)])
def test_a_job_over_ticks_gives_what_arithmetic_says(tmp_path: Path, shards: int, parallelism: int) -> None:
    sink = CollectSink()
    flow = ticks_job(tmp_path, sink, shards)
    runtime(tmp_path, parallelism=parallelism, seed=shards).run(flow)
    assert collected_windows(sink) == expected_windows(shards)


class CollectsLargeText(CollectSink):
    """A sink of release 0.1, which kept large types, in a process that is lost as it commits."""

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        super().process(batch.cast(pa.schema({"n": pa.int64(), "text": pa.large_string()})), input)

    def commit(self, permit: Any, committables: pa.Table) -> None:
        raise KeyboardInterrupt


def test_rows_that_release_0_1_prepared_with_large_text_are_collected_with_the_types_of_today(tmp_path: Path) -> None:
    def flow(sink: CollectSink) -> Dataflow:
        made = Dataflow("job", parallelism=1)
        rows = pa.table({"n": range(1000), "text": [str(n) for n in range(1000)]})
        made.source(MemorySource(rows, batch_rows=100), uid="rows").apply(sink, uid="out")
        return made

    with pytest.raises(KeyboardInterrupt):
        runtime(tmp_path).run(flow(CollectsLargeText()))
    sink = CollectSink()
    runtime(tmp_path).run(flow(sink))
    assert sink.table().schema == pa.schema({"n": pa.int64(), "text": pa.string()})
    assert sink.table()["text"].to_pylist() == [str(n) for n in range(1000)]


def files_job(directory: Path) -> Dataflow:
    """Flights of files that go on appearing, each once, with the seats of its plane."""
    flow = Dataflow("files")
    schema = {"id": pa.int64(), "tail": pa.string()}
    flights = flow.source(ParquetSource(directory / "in", schema=schema, grows=True, until="_END"), uid="flights")
    planes = flow.source(CsvSource(directory / "planes.csv"), uid="planes")
    once = flights.key_by("id").deduplicate(uid="once")
    seated = once.apply(BroadcastJoin({"tail": "tail"}, how="left"), planes.broadcast(), uid="seated")
    picked = seated.select("id", {"places": "seats"}, uid="picked")
    picked.apply(FileSink(directory / "out", durable=False, rows_per_file=30), uid="out")
    return flow


def test_a_job_over_files_that_appear_while_it_is_lost_and_run_again_writes_each_row_once(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "planes.csv").write_text("tail,seats\nN0,10\nN1,20\n")
    draw = random.Random(7)
    written = 0
    for life in range(200):
        run = runtime(tmp_path, parallelism=draw.randrange(1, 4), seed=life).begin(files_job(tmp_path))
        if isinstance(run, JobOutcome):
            break
        for _ in range(draw.randrange(20, 400)):
            if written < 8 and draw.random() < 0.02:
                # Every flight is in two files.
                ids = [50 * (written // 2) + n for n in range(50)]
                table = pa.table({"id": ids, "tail": [None if i % 5 == 0 else f"N{i % 3}" for i in ids]})
                pq.write_table(table, tmp_path / ".new")
                (tmp_path / ".new").rename(tmp_path / "in" / f"{written % 2}-{written}.parquet")
                written += 1
            elif written == 8:
                (tmp_path / "in" / "_END").touch()
            try:
                if not run.step():
                    break
            except RunDiscarded:
                break
    assert life > 2
    rows = sorted((row["id"], row["places"]) for row in pq.read_table(tmp_path / "out").to_pylist())
    seats = {0: 10, 1: 20}
    assert rows == [(i, None if i % 5 == 0 else seats.get(i % 3)) for i in range(200)]
