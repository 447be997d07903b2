"""A query reads states: a locked DuckDB reaches no file, no setting and no extension."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

from stateformat.backends.querying import query
from stateformat.errors import InvalidInput
from stateformat.store import CheckpointStore, open as open_store
from tests import stores
from tests.ckpt.ckpt_runs import fingerprint

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
