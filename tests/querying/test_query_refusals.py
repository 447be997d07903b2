"""A query can read states, and nothing else, whatever is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import duckdb
import pytest

from stateformat.backends.querying import query
from stateformat.backends.querying.connection import locked
from stateformat.backends.querying.statement import REFUSED_FUNCTIONS, TABLE_FUNCTIONS
from stateformat.errors import InvalidInput
from stateformat.store import CheckpointStore, open as open_store
from tests import stores
from tests.ckpt.ckpt_runs import fingerprint

SECRET = "open sesame"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store and files that no query may read."""
    folder = tmp_path_factory.mktemp("hostile")
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


HOSTILE = """
copy (select 1) to '{place}/out.csv'
copy counter.counts to '{place}/out.parquet' (format parquet)
copy counter.counts from '{place}/secret.csv'
copy (select 1) to '/dev/stdout'
export database '{place}/dump'
import database '{place}/dump'
attach '{place}/secret.duckdb' as s
attach ':memory:' as s
detach memory
use temp
install httpfs
load httpfs
load '{place}/evil.duckdb_extension'
force install json
update extensions
set enable_external_access = true
set memory_limit = '1TB'
set global temp_directory = '{place}'
set lock_configuration = false
reset enable_external_access
set variable x = 1
pragma enable_external_access
pragma database_list
pragma temp_directory='{place}'
pragma version
call pragma_version()
call enable_logging(storage_path = '{place}/log')
checkpoint
force checkpoint
vacuum
analyze
create table t as select 1
create or replace table t as from '{place}/secret.csv'
create temp table t (a int)
create view v as select 1
create or replace view counter.counts as select 0
create schema s
create macro m() as 1
create function m() as table select 1
create type mood as enum ('a')
create sequence s
create secret s (type s3, key_id 'a', secret 'b')
create persistent secret s (type s3, key_id 'a', secret 'b')
drop view counter.counts
drop secret s
alter view counter.counts rename to x
comment on view counter.counts is 'x'
insert into counter.counts values ('a', 1)
insert into counter.counts select * from counter.counts
update counter.counts set n = 0
delete from counter.counts
truncate counter.counts
merge into counter.counts using counter.counts b on true when matched then delete
begin
commit
rollback
prepare p as select 1
execute p
deallocate p
explain copy (select 1) to '{place}/out.csv'
explain analyze copy (select 1) to '{place}/out.csv'
explain analyze create table t as select 1
explain (analyze) copy (select 1) to '{place}/out.csv'
explain explain select 1
explain set memory_limit = '1GB'
/* a */ explain analyze delete from counter.counts
explain select * from read_text('{place}/secret.txt')
explain analyze from '{place}/secret.parquet'
from '{place}/secret.parquet'
from '{place}/secret.csv'
from '{place}/secret.json'
from '{place}/secret.duckdb'
from "{place}/secret.csv"
select * from '{place}/*.csv'
select * from read_csv('{place}/secret.csv')
select * from read_csv_auto('{place}/secret.csv')
select * from read_parquet('{place}/secret.parquet')
select * from parquet_scan('{place}/secret.parquet')
select * from parquet_metadata('{place}/secret.parquet')
select * from read_json('{place}/secret.json')
select * from read_json_auto('{place}/secret.json')
select * from read_ndjson_objects('{place}/secret.json')
select * from read_text('{place}/secret.txt')
select * from read_blob('{place}/secret.txt')
select * from glob('{place}/*')
select * from sniff_csv('{place}/secret.csv')
select * from main.read_text('{place}/secret.txt')
select * from system.main.read_text('{place}/secret.txt')
select (select content from read_text('{place}/secret.txt'))
select * from counter.counts where exists (from read_text('{place}/secret.txt'))
with a as (from read_text('{place}/secret.txt')) select * from a
with recursive a as (select 1 union all from read_text('{place}/secret.txt')) from a
select * from counter.counts, lateral (from read_text(word))
select * from counter.counts union all select content, 1 from read_text('{place}/secret.txt')
select unnest([1]) from glob('{place}/*')
describe from '{place}/secret.parquet'
describe '{place}/secret.parquet'
summarize '{place}/secret.csv'
summarize from read_csv('{place}/secret.csv')
show '{place}/secret.csv'
pivot '{place}/secret.csv' on word in ('a') using count(*)
pivot counter.counts on word using count(*)
unpivot '{place}/secret.csv' on word
from 'https://example.invalid/x.parquet'
from 's3://bucket/x.parquet'
from read_csv('https://example.invalid/x.csv')
from 'http://example.invalid/x.json'
from 'hf://datasets/x/y.parquet'
select * from sqlite_scan('{place}/secret.db', 't')
select * from postgres_scan('', '', '')
select * from query('select 1')
select * from query('copy (select 1) to ''{place}/out.csv''')
select * from query_table('counter.counts')
select * from query_table('{place}/secret.csv')
select * from query_table(['{place}/secret.csv'])
select json_execute_serialized_sql(json_serialize_sql('select 1'))
from json_execute_serialized_sql(json_serialize_sql('select 1'))
pragma json_execute_serialized_sql('x')
from enable_logging(storage = 'file', storage_path = '{place}/log')
from enable_profiling(save_location = '{place}/profile')
from truncate_duckdb_logs()
from duckdb_logs()
from duckdb_secrets()
from duckdb_settings()
from duckdb_extensions()
from duckdb_databases()
from which_secret('s3://x', 's3')
from checkpoint()
from force_checkpoint()
from import_database('{place}')
from copy_database('a', 'b')
from pragma_storage_info('t')
from pragma_version()
from add_parquet_key('a', 'b')
from arrow_scan(1, 2, 3)
from arrow_scan(1::pointer, 2::pointer, 3::pointer)
from arrow_scan_dumb(1, 2, 3)
from pandas_scan(1)
from python_map_function((select 1), 1, 2)
from seq_scan('t')
from read_duckdb('{place}/secret.duckdb')
select getenv('HOME')
select write_log('x')
select sleep_ms(1)
select nextval('s')
select content from secret
from place
from store
from duckdb_python_variable
from "_rows of counter.counts"
from temp.main."_rows of counter.counts"
from pg_temp.x
from system.x
from duckdb_logs
from duckdb_secrets
select * from counter.counts at (version => 1)
select 1; select 2
select 1; copy (select 1) to '{place}/out.csv'
; ; copy (select 1) to '{place}/out.csv'
select 1 /* ; */; drop view counter.counts --
-- select 1
/* nothing */
;
select ?
select $1
select $name
select * from counter.counts where word = :w
select 1 as "a\0b" from '{place}/secret.csv'
show databases
show schemas
show variables
show memory_limit
from (show databases)
from (show tables)
explain show tables
.read {place}/secret.txt
.shell cat {place}/secret.txt
\\copy x
ckpt history
select {{
""".strip("\n").split("\n")


@pytest.mark.parametrize("text", HOSTILE)
def test_what_does_more_than_read_states_is_refused_and_touches_nothing(
    text: str, place: Path, store: CheckpointStore
) -> None:
    secret = "a variable of Python"  # noqa: F841 - no query sees it
    before = fingerprint(place)

    with pytest.raises(InvalidInput) as caught:
        query(store, text.replace("{place}", str(place)).replace("{{", "{").replace("\\0", "\0")).table()

    sentence = str(caught.value)
    assert SECRET not in sentence
    assert "\n" not in sentence
    assert 20 < len(sentence) < 900
    assert fingerprint(place) == before


@pytest.mark.parametrize(
    ("verb", "body"),
    [
        ("COPY", "copy (select 1) to '{place}/out.csv'"),
        ("INSERT", "insert into counter.counts values ('a', 1) returning *"),
        ("UPDATE", "update counter.counts set n = 0 returning *"),
        ("DELETE", "delete from counter.counts returning *"),
    ],
)
def test_what_writes_inside_a_query_is_refused_by_name(
    store: CheckpointStore, place: Path, verb: str, body: str
) -> None:
    text = f"with x as ({body.format(place=place)}) select 1"
    stores.refused(InvalidInput, lambda: query(store, text).table(), f"^{verb} inside a query is refused")
    assert not (place / "out.csv").exists()


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


def test_every_function_that_a_from_clause_may_call_was_chosen() -> None:
    """Of all table functions of the installed DuckDB, those that are let in open nothing."""
    with locked() as connection:
        rows = connection.execute(
            "select distinct function_name from duckdb_functions() where function_type in ('table', 'table_macro')"
        ).fetchall()
    known = {str(name) for (name,) in rows}

    assert known >= TABLE_FUNCTIONS
    opens = re.compile("read|scan|glob|sniff|parquet|query|pragma|log|secret|extension|database|checkpoint|enable|set")
    assert not {name for name in TABLE_FUNCTIONS if opens.search(name)}
    assert {"read_csv", "read_text", "glob", "query", "enable_logging"} <= known - TABLE_FUNCTIONS
    assert REFUSED_FUNCTIONS.isdisjoint(TABLE_FUNCTIONS)


LOCKED = {
    "set memory_limit = '1TB'": "locked",
    "set enable_external_access = true": "Cannot",
    "reset lock_configuration": "locked",
    "copy (select 1) to '{place}/out.csv'": "disabled",
    "from read_text('{place}/secret.txt')": "disabled",
    "from '{place}/secret.csv'": "disabled",
    "from glob('{place}/*')": "disabled",
    "attach '{place}/secret.duckdb' as s": "disabled",
    "install httpfs": "disabled",
    "load httpfs": "disabled",
    "from read_csv('https://example.invalid/x.csv')": "disabled",
    "create persistent secret s (type s3)": "disabled",
    "from secret": "does not exist",
}


@pytest.mark.parametrize("text", LOCKED)
def test_the_connection_is_locked_even_where_the_statement_is_let_in(text: str, place: Path) -> None:
    """The second line of defense: DuckDB itself refuses."""
    secret = [SECRET]  # noqa: F841 - no statement sees it
    before = fingerprint(place)

    with locked() as connection, pytest.raises(duckdb.Error, match=LOCKED[text]):
        connection.execute(text.replace("{place}", str(place))).fetchall()

    assert fingerprint(place) == before
