"""A query reads states: a locked DuckDB reaches no file, no setting and no extension.

Rows for which a condition is true.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from stateformat.backends.querying import Purge, query, where_rows
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tables import ArrowStream
from tests.ckpt.ckpt_runs import fingerprint
from tests.worlds import stores

SECRET = "open sesame"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and files that no query may read."""
    folder = tmp_path_factory.mktemp("locked")
    stores.counts_store(str(folder / "store"), keys=2)
    (folder / "secret.txt").write_text(SECRET)
    (folder / "secret.csv").write_text(f"word\n{SECRET}\n")
    (folder / "secret.json").write_text(json.dumps([{"word": SECRET}]))
    with duckdb.connect() as connection:
        connection.execute(f"copy (select '{SECRET}' as word) to '{folder}/secret.parquet'")
    with duckdb.connect(str(folder / "secret.duckdb")) as connection:
        connection.execute(f"create table t as select '{SECRET}' as word")
    return folder


@pytest.fixture(scope="module")
def store(place: Path) -> CheckpointStore:
    return open_store(str(place / "store"))


REFUSED = {
    "copy (select 1) to '{place}/out.csv'": "COPY is refused. ckpt sql reads",
    "with x as (copy (select 1) to '{place}/out.csv') from x": "file system operations are disabled",
    "explain analyze copy (select 1) to '{place}/out.csv'": "what is explained is no query",
    "export database '{place}/dump'": "EXPORT is refused",
    "attach '{place}/secret.duckdb' as s": "ATTACH is refused",
    "install httpfs": "LOAD is refused",
    "set enable_external_access = true": "SET is refused",
    "pragma temp_directory='{place}'": "SET is refused",
    "create table t as select 1": "CREATE is refused",
    "insert into counter.counts values ('a', 1)": "INSERT is refused",
    "drop view counter.counts": "DROP is refused",
    "select 1; drop view counter.counts": "the query holds 2 statements",
    "-- nothing": "the query holds no statement",
    "select $1": "parameters",
    "from '{place}/secret.parquet'": "files cannot be read here",
    "describe '{place}/secret.csv'": "files cannot be read here",
    "from read_csv('{place}/secret.csv')": "file system operations are disabled",
    "from read_json('{place}/secret.json')": "file system operations are disabled",
    "from read_parquet('{place}/secret.parquet')": "file system operations are disabled",
    "from read_text('{place}/secret.txt')": "file system operations are disabled",
    "from glob('{place}/*')": "file system operations are disabled",
    "from read_csv('https://example.invalid/x.csv')": "file system operations are disabled",
    "from enable_logging(storage = 'file', storage_path = '{place}/log')": "the configuration has been locked",
    "pivot counter.counts on word using count(*)": "PIVOT without the values",
    "select content from secret": "has no table 'secret'",
    "explain show tables": "leave EXPLAIN out",
    "show databases": "has no table",
    "select {": "syntax error",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_does_more_than_read_states_is_refused_and_touches_nothing(
    text: str, place: Path, store: CheckpointStore
) -> None:
    secret = [SECRET]  # noqa: F841 - no query sees it
    before = fingerprint(place)

    with pytest.raises(InvalidInput) as caught:
        query(store, text.replace("{place}", str(place))).table()

    assert REFUSED[text] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fingerprint(place) == before


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_nothing_is_no_query(text: str, store: CheckpointStore) -> None:
    with pytest.raises(InvalidInput, match="is empty"):
        query(store, text)


LET_IN = {
    "select 1": 1,
    "SELECT 1;": 1,
    "-- first\nselect 1 -- then\n;": 1,
    "with a as (select 1) from a": 1,
    "from range(3)": 3,
    "values (1), (2)": 2,
    "(select 1)": 1,
    "table counter.counts": 2,
    "describe counter.counts": 2,
    "desc counter.counts": 2,
    "describe select 1": 1,
    "summarize counter.counts": 2,
    "show tables": 5,
    "show all tables": 5,
    "show tables from counter": 5,
    "explain select * from counter.counts": 1,
    "EXPLAIN ANALYZE select * from counter.counts": 1,
    "explain\n  from counter.counts": 1,
    "pivot counter.counts on word in ('w0', 'w1') using sum(n)": 1,
    "unpivot counter.counts on n": 2,
    "from counter.counts a, counter.counts b": 4,
    "from memory.counter.counts": 2,
    'from "COUNTER"."Counts"': 2,
    "from information_schema.tables where table_schema = 'counter'": 1,
    "from duckdb_views() where schema_name = 'counter'": 1,
    "select * from counter.counts where exists (from checkpoints)": 2,
    "with checkpoints as (select 1 union all select 2 union all select 3) from checkpoints": 3,
    "select current_setting('threads')": 1,
    "select 'read_text(''/etc/passwd'')'": 1,
    "select 1 as copy, 2 as attach": 1,
    "select [x + 1 for x in [1, 2]]": 1,
    "select * from counter.counts using sample 100%": 2,
    "select * from counter.counts order by 1 limit 1": 1,
    "select unnest([1, 2, 3])": 3,
    "from json_each('[1, 2]')": 2,
}


@pytest.mark.parametrize("text", LET_IN)
def test_whatever_reads_is_let_in(text: str, store: CheckpointStore) -> None:
    assert len(query(store, text).table()) == LET_IN[text]


def test_a_duckdb_that_loses_rows_with_nan_is_refused(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duckdb, "__version__", "1.4.1")
    words = r"need DuckDB 2\.0 or newer, and 1\.4\.1 is installed, .* pip install --upgrade 'stateformat\[sql\]'"
    with pytest.raises(InvalidInput, match=words):
        query(store, "select 1")


UTC = dt.UTC


@dataclass(frozen=True)
class Rows(ArrowStream):
    """A table in batches."""

    rows: pa.Table
    batch_rows: int = 3

    @property
    def schema(self) -> pa.Schema:
        return self.rows.schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        yield from self.rows.to_batches(max_chunksize=self.batch_rows)


ROWS = pa.table(
    {
        "user": pa.array(["u1", "u2", None, "U2", "it's"], pa.string()),
        "n": pa.array([3, -1, 7, None, 10], pa.int64()),
        "N": pa.array([0.5, None, float("nan"), 2.0, -0.0], pa.float64()),
        "at": pa.array([dt.datetime(2024, 1, day, tzinfo=UTC) for day in range(1, 6)], pa.timestamp("ms", "UTC")),
        "nanos": pa.array([1, 2, 3, 4, 5], pa.timestamp("ns")),
        "day": pa.array([dt.date(2024, 1, day) for day in range(1, 6)], pa.date32()),
        "price": pa.array([decimal.Decimal(value) for value in ("1.10", "2.20", "3.30", "4.40", "5.50")]).cast(
            pa.decimal128(12, 2)
        ),
        "raw": pa.array([b"\x00\xff", b"", None, b"ab", b"cd"], pa.binary()),
        "point": pa.array([{"x": i, "tags": ["a"] * i} for i in range(5)]),
        "counts": pa.array([[("a", i)] for i in range(5)], pa.map_(pa.string(), pa.int32())),
        "select": pa.array([True, False, None, True, False]),
        "small": pa.array([1, 2, 3, 4, 5], pa.uint8()),
    }
)

CONDITIONS = {
    "n > 2": [0, 2, 4],
    "n > 2 and user is not null": [0, 4],
    "n > 2 or true": [0, 1, 2, 3, 4],
    "n is null": [3],
    "false": [],
    "null::boolean": [],
    "user = 'it''s'": [4],
    "user ilike 'u2'": [1, 3],
    "\"user\" in ('u1', 'u2')": [0, 1],
    "N_2 > 1": [2, 3],
    "\"at\" >= timestamptz '2024-01-04 00:00:00+00'": [3, 4],
    "day between date '2024-01-02' and date '2024-01-03'": [1, 2],
    "price = 2.2": [1],
    "raw = '\\xAB'::blob or raw = 'ab'::blob": [3],
    "point.x = 2": [2],
    "len(point.tags) >= 3": [3, 4],
    "counts['a'] = 1": [1],
    '"select"': [0, 3],
    'not "select" -- those that were not': [1, 4],
    "not select and 'select' != 'not'": [1, 4],
    "nanos < '1970-01-01 00:00:00.000000003'::timestamp_ns": [0, 1],
    "rows.small::int * 100 > 300": [3, 4],
    "case when n > 5 then user is null else false end": [2],
    "list_contains(list_transform([1, 2], lambda x: x + small), 3)": [0, 1],
    "n > 2) and (n < 9": [0, 2],
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_rows_for_which_a_condition_is_true_come_in_order_and_in_their_types(condition: str) -> None:
    chosen = where_rows(Rows(ROWS), condition)

    assert chosen.schema == ROWS.schema
    again = pickle.loads(pickle.dumps(chosen))
    for rows in (chosen.table(), again.table()):
        assert rows.schema == ROWS.schema
        assert rows.column("small").to_pylist() == [i + 1 for i in CONDITIONS[condition]]
        taken = ROWS.take(pa.array(CONDITIONS[condition], pa.int64()))
        assert repr(rows.to_pylist()) == repr(taken.to_pylist())


REFUSED_ROWS = {
    "": "it is empty",
    " \n": "it is empty",
    "n": "it is of type BIGINT",
    "n > 1, n < 2": "it is several values",
    "total > 1": "there is no column 'total'; it has 'user', 'n', 'N_2'",
    "usr = 'u1'": "there is no column 'usr'; did you mean 'user'?",
    "current_user = 'u1'": "there is no column 'current_user'; it has 'user'",
    "n >": "syntax error",
    "n > 1; select 1": 'syntax error at or near ";" at character 6',
    "1), (2": "syntax error",
    "true) from range(3) where (true": "syntax error",
    "true)) from range(3) where ((true": "more than one expression",
    "true)), ((true": "more than one expression",
    "true)) union all select ((true": "more than one expression",
    "true)) order by ((true": "more than one expression",
    "true)) limit ((1": "more than one expression",
    "true)) window w as (partition by (true": "syntax error",
    "true) window w as (order by n": "syntax error",
    "n in (select 1)": "subquery",
    "exists (from read_csv('/etc/passwd'))": "subquery",
    "n = $1": "parameter",
    "sum(n) > 1": "aggregate",
    "row_number() over () = 1": "window",
    "unnest([true, false])": "UNNEST",
    "columns('^(n|small)$') > 2": "several values",
    "read_text('/etc/passwd') = ''": "read_text",
    "getenv('HOME') = ''": "getenv",
    "/* n": "unterminated",
}


@pytest.mark.parametrize("condition", REFUSED_ROWS)
def test_what_is_no_condition_is_refused_before_anything_is_read(condition: str) -> None:
    class Unread(Rows):
        def batches(self) -> Iterator[pa.RecordBatch]:
            raise AssertionError("was read")

    with pytest.raises(InvalidInput, match="the condition") as caught:
        where_rows(Unread(ROWS), condition)

    assert REFUSED_ROWS[condition] in str(caught.value)
    assert "\n" not in str(caught.value).replace("\\n", "")


def test_a_value_that_the_condition_cannot_take_is_a_sentence_when_it_is_reached() -> None:
    chosen = where_rows(Rows(ROWS), "user::int > 3")

    with pytest.raises(InvalidInput, match="Could not convert string 'u1' to INT32"):
        chosen.table()


def test_a_column_that_the_stream_lacks_has_a_kind() -> None:
    with pytest.raises(InvalidInput) as caught:
        where_rows(Rows(ROWS), "total > 1")

    assert caught.value.kind is ErrorKind.SCHEMA_MISMATCH


def test_a_stream_without_rows_gives_none() -> None:
    assert where_rows(Rows(ROWS.slice(0, 0)), "n > 1").table().equals(ROWS.schema.empty_table())


def test_a_condition_is_checked_batch_by_batch() -> None:
    pulled = []

    class Watched(Rows):
        def batches(self) -> Iterator[pa.RecordBatch]:
            for batch in super().batches():
                pulled.append(batch.num_rows)
                yield batch

    batches = where_rows(Watched(ROWS, 2), "true").batches()

    next(batches)
    assert pulled == [2]
    batches.close()


def test_a_number_that_is_compared_with_text_is_named_with_the_condition_to_write() -> None:
    purge = Purge(("n = 1 and (k = 3 or K in (4, -5))",))
    with pytest.raises(InvalidInput, match=r"Column 'k' is text, and 3 is a number; write n = 1 and \(k = '3' or K in"):
        purge(pa.table({"k": ["key-5"], "n": [1]}))
