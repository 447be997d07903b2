"""State as DataFrames by ``spark.read.format("stateformat")``: from every place, of every type."""

from __future__ import annotations

import datetime
import json
import math
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql.datasource import DataSourceReader, EqualTo, IsNotNull

import stateformat
from stateformat.backends.spark.data_source import StateDataSource, reader as reader_module
from stateformat.backends.spark.data_source.reader import read_options, stream_of, with_keys_of
from stateformat.errors import InvalidInput
from stateformat.graph import JobGraph
from stateformat.inspecting import METADATA_TABLES, metadata_table
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.servers.fault_proxy import FaultProxy
from tests.servers.server import BUCKET, S3Server
from tests.spark.data_source_reads import read, sentence, table
from tests.worlds.data import NAMES, data_store, expected, expected_changes, same_rows
from tests.worlds.stores import Job, counts_job, operator, owned

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shop: layers, deletes, clears, inline state, a rescale, an evolved schema."""
    url = str(tmp_path_factory.mktemp("shop") / "store")
    data_store(url)
    return url


@pytest.fixture
def filtering(session: Any) -> Iterator[Any]:
    """The session with pushing filters down on."""
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield session
    session.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize(("operator", "state"), NAMES, ids=[f"{operator}-{state}" for operator, state in NAMES])
def test_every_state_has_the_rows_that_plain_python_gives(operator: str, state: str, session: Any, store: str) -> None:
    assert same_rows(table(read(session, store, operator, state)), expected(operator, state))


def test_a_state_is_found_by_the_name_of_its_operator_and_by_the_checkpoint(session: Any, store: str) -> None:
    for at in ({"checkpoint": 3}, {}):
        url = store if at else f"{store}@3"
        found = read(session, url, "Totals per user", "spent", columns="town, user", **at)
        assert found.columns == ["town", "user"]
        assert same_rows(table(found), expected("totals", "spent", 3).select(["user", "town"]))


def test_a_pin_is_found_by_its_name(session: Any, store: str, tmp_path: Path) -> None:
    own = shutil.copytree(store, tmp_path / "store")
    open_store(str(own)).pin(3, "before-fix")
    wanted = expected("totals", "spent", 3).select(["user", "town"])
    for url, at in ((f"{own}@before-fix", {}), (str(own), {"checkpoint": "before-fix"})):
        assert same_rows(table(read(session, url, "totals", "spent", columns="town, user", **at)), wanted)
    assert "no-such" in sentence(lambda: read(session, str(own), "totals", "spent", checkpoint="no-such"))


def test_sql_counts_joins_and_writes_as_of_any_table(session: Any, store: str, tmp_path: Path) -> None:
    spent, baskets = read(session, store, "totals", "spent"), read(session, store, "totals", "baskets")
    spent.createOrReplaceTempView("spent")
    baskets.createOrReplaceTempView("baskets")
    wanted = expected("totals", "spent")
    assert spent.count() == len(wanted)
    assert len(spent.limit(3).collect()) == 3
    query = "select count(*), sum(a.orders) from spent a join spent b on a.user <=> b.user join baskets c on a.user = c.user"
    users = {row["user"]: row["orders"] for row in wanted.to_pylist()}
    joined = [users[row["user"]] for row in expected("totals", "baskets").to_pylist() if row["user"] in users]
    joined = [n for n, row in zip(joined, joined, strict=True) if row is not None]
    [(count, total)] = session.sql(query).collect()
    assert (count, total) == (len(joined), sum(joined))
    spent.write.parquet(str(tmp_path / "out"))
    assert same_rows(table(session.read.parquet(str(tmp_path / "out"))), wanted)


KEYS = {
    "one": ("spent", {"user": "u0018"}, "user = 'u0018'"),
    "several": (
        "spent",
        [{"user": "u0018"}, {"user": "u0011"}, {"user": "nobody"}],
        "user in ('u0018', 'u0011', 'nobody')",
    ),
    "null": ("spent", {"user": None}, "user is null"),
    "null-safe": ("spent", {"user": None}, "user <=> null"),
    "map": ("baskets", {"user": "u0100"}, "user = 'u0100'"),
    "two columns": (
        "by_day",
        [{"user": "u0007", "day": "2026-03-02"}, {"user": "u0007", "day": "2026-03-01"}],
        "user = 'u0007' and day in (date'2026-03-02', date'2026-03-01')",
    ),
    "none": ("refunds", {"order": 3}, "order = 3"),
}


@pytest.mark.parametrize("case", KEYS)
def test_keys_are_found_by_an_option_and_by_a_filter_pushed_down_or_not(case: str, filtering: Any, store: str) -> None:
    state, key, condition = KEYS[case]
    keys = [tuple(one.values()) for one in (key if isinstance(key, list) else [key])]
    rows = expected("totals", state).to_pylist()
    names = [*(key[0] if isinstance(key, list) else key)]
    wanted = [row for row in rows if tuple(str(row[n]) if n == "day" else row[n] for n in names) in keys]
    assert wanted or case == "none"
    assert same_rows(table(read(filtering, store, "totals", state, key=json.dumps(key))), wanted)
    assert same_rows(table(read(filtering, store, "totals", state).where(condition)), wanted)
    whole = read(filtering, store, "totals", state, push_filters="true", partitions=12)
    pushed = whole.where(condition)
    assert same_rows(table(pushed), wanted)
    if case not in ("several", "none"):
        assert (
            pushed.rdd.getNumPartitions()
            < read(filtering, store, "totals", state, partitions=12).rdd.getNumPartitions()
        )
    filtering.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    assert same_rows(table(read(filtering, store, "totals", state).where(condition)), wanted)


def test_writing_is_refused_with_the_name_of_what_writes(session: Any, tmp_path: Path) -> None:
    frame = session.createDataFrame([(1,)], "n int")
    for mode in ("append", "overwrite"):
        written = frame.write.format("stateformat").mode(mode)
        assert "stateformat.backends.spark.bootstrap" in sentence(lambda to=written: to.save(str(tmp_path / "new")))


def test_a_view_made_in_sql_reads_a_state(session: Any, store: str) -> None:
    options = f"path '{store}', operator 'totals', state 'rates', columns 'currency'"
    session.sql(f"create or replace temporary view rates using stateformat options ({options})")
    assert sorted(session.sql("select * from rates").collect()) == [("CHF",), ("NOK",)]


def test_damage_that_a_task_finds_is_told_in_a_sentence(session: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    counts_job(keys=20_000).publish(store, None)
    frame = read(session, str(tmp_path / "store"), "counter", "counts")
    segment = next((tmp_path / "store" / "segments").rglob("*.parquet"))
    damaged = bytearray(segment.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    segment.write_bytes(damaged)
    told = sentence(frame.collect)
    assert segment.name in told
    assert "is damaged" in told


def test_what_one_query_filters_is_there_for_the_next_one(filtering: Any, store: str) -> None:
    # Spark 4.3 would read for all of these what it planned for the last filter.
    spent, rows = read(filtering, store, "totals", "spent"), expected("totals", "spent")
    one, other = spent.where("user = 'u0018'"), spent.where("user = 'u0011'")
    assert one.count() == 1
    assert spent.count() == len(rows)
    assert sorted(row.user for row in one.union(other).collect()) == ["u0011", "u0018"]
    assert spent.join(other, "user").count() == 1
    assert one.union(spent).count() == len(rows) + 1


@pytest.mark.parametrize(
    ("mended", "program", "option", "pushes"),
    [
        (True, True, None, True),
        (True, True, "false", False),
        (True, False, "true", False),
        (False, True, None, False),
        (False, True, "true", True),
        (False, False, None, False),
    ],
)
def test_filters_are_taken_where_spark_asks_and_keeps_queries_apart(
    mended: bool, program: bool, option: str | None, pushes: bool, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in the workers of Spark that plan a read.
    monkeypatch.setattr(reader_module, "SPARK_KEEPS_FILTERS_APART", mended)
    monkeypatch.setattr(reader_module, "_FILTERS_WORKER", "json" if program else "no.such.program")
    options = {"path": store, "operator": "totals", "state": "spent", "partitions": "4"}
    found = StateDataSource(options if option is None else {**options, "Push_Filters": option})
    reader = pickle.loads(pickle.dumps(found)).reader(found.schema())
    takes = type(reader).pushFilters is not DataSourceReader.pushFilters
    assert takes is pushes
    filters = [IsNotNull(("user",)), EqualTo(("user",), "u0018")]
    assert [*reader.pushFilters(filters)] == filters
    parts = reader.partitions()
    assert len(parts) == (1 if pushes else 4)
    sent = pickle.loads(pickle.dumps(reader))
    rows = sum(batch.num_rows for part in parts for batch in sent.read(pickle.loads(pickle.dumps(part))))
    assert rows == (1 if pushes else len(expected("totals", "spent")))


REFUSED = {
    "operator": ({"operator": "total", "state": "spent"}, "'total'"),
    "state": ({"operator": "totals", "state": "spend"}, "operator 'totals' has no state 'spend'; did you mean 'spent'"),
    "column": ({"columns": "user,town"}, "has no column 'town'"),
    "key of another type": ({"key": '{"user": 3}'}, "its key column 'user' is string, and 3 is int; give text"),
    "key of another column": ({"key": '{"usr": "a"}'}, "'usr' is none of its key columns; did you mean 'user'"),
    "key without keys": ({"operator": "orders", "state": "shards", "key": '{"shard": 3}'}, "union and has no keys"),
    "key no JSON": ({"key": '"u0018'}, "is not JSON"),
    "checkpoint": ({"checkpoint": 77}, "no checkpoint 77 of "),
    "checkpoint no id": ({"checkpoint": "-1"}, "the option checkpoint is '-1', not a checkpoint id"),
    "checkpoint no pin": ({"checkpoint": "newest"}, "there is no store at"),
    "option": ({"operater": "totals"}, "has no option 'operater'; did you mean 'operator'"),
    "storage option": ({"endpoint_url": "http://x"}, "endpoint_url"),
    "partitions": ({"partitions": 0}, "the option partitions is '0'"),
    "no state": ({"state": None}, "the option state is missing"),
    "no operator": ({"operator": None}, "the option operator is missing"),
    "two things": ({"table": "states"}, "the options table and operator cannot be combined"),
    "changes and key": ({"changes_from": 1, "key": "1"}, "changes_from and key cannot be combined"),
    "every alone": ({"every": "true"}, "every is given without changes_from"),
    "every what": ({"every": "yes", "changes_from": 1}, "the option every is 'yes'; it is true or false"),
    "columns": ({"columns": "["}, "no array of JSON"),
    "all and key": ({"checkpoint": "all", "key": "1"}, "a key is looked up in one checkpoint"),
    "table": (
        {"operator": None, "state": None, "table": "state"},
        "a store has no table 'state'; did you mean 'states'",
    ),
    "table's column": (
        {"operator": None, "state": None, "table": "states", "columns": "mode,mode"},
        "columns mode, mode of the table 'states' of metadata name one twice",
    ),
    "changes backwards": ({"changes_from": 5, "changes_to": 3}, "from checkpoint 5 to 3, which is older"),
    "changes of nothing": ({"state": "spend", "changes_from": 1}, "'spend'"),
    "changes from nowhere": ({"changes_from": 1, "changes_to": 70}, "no checkpoint 70"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_told_in_a_sentence_when_it_is_loaded(case: str, session: Any, store: str) -> None:
    options, words = REFUSED[case]
    told = sentence(lambda: read(session, store, **{"operator": "totals", "state": "spent", **options}))
    assert words in told


def test_an_address_that_leads_nowhere_is_told_in_a_sentence(session: Any, store: str, tmp_path: Path) -> None:
    with pytest.raises(AnalysisException):
        read(session, str(tmp_path / "none"), "totals", "spent")
    reader = session.read.format("stateformat").options(operator="totals", state="spent")
    cases = {
        "load() names no store": lambda: reader.load(),
        "several paths are given": lambda: reader.load([store, store]),
        "exists only in the process": lambda: reader.load("memory://here"),
        "no storage for foo://": lambda: reader.load("foo://host/store"),
        "ends in @3 and the option checkpoint is '2'": lambda: reader.option("checkpoint", 2).load(f"{store}@3"),
    }
    for words, call in cases.items():
        assert words in sentence(call)


@pytest.mark.parametrize("state", ["spent", "recent", "refunds"])
def test_changes_between_two_checkpoints_or_over_each(state: str, session: Any, store: str) -> None:
    whole = table(read(session, store, "totals", state, changes_from=1, partitions=3))
    assert same_rows(whole, pa.Table.from_pylist(expected_changes("totals", state, 1, 6), whole.schema))
    every = table(read(session, store, "totals", state, changes_from=4, changes_to=6, every="true"))
    wanted = [*expected_changes("totals", state, 4, 5), *expected_changes("totals", state, 5, 6)]
    assert same_rows(every, pa.Table.from_pylist(wanted, whole.schema))
    some = read(session, store, "totals", state, changes_from=5, columns="_change,_checkpoint_id")
    assert some.columns == ["_change", "_checkpoint_id"]
    assert some.count() == len(expected_changes("totals", state, 5, 6))


def test_a_state_in_all_checkpoints(session: Any, store: str) -> None:
    found = table(read(session, store, "totals", "spent", checkpoint="ALL", partitions=4))
    wanted = [
        {"_checkpoint_id": at, **row}
        for at in range(1, 7)
        for row in expected("totals", "spent", at, columns_of=6).to_pylist()
    ]
    assert same_rows(found, pa.Table.from_pylist(wanted, found.schema))


@pytest.mark.parametrize("name", METADATA_TABLES)
def test_metadata_as_tables_of_the_history_or_of_one_checkpoint(name: str, session: Any, store: str) -> None:
    wanted = metadata_table(open_store(store), name)
    found = read(session, store, table=name, partitions=2)
    assert [(field.name, field.nullable) for field in found.schema] == [(f.name, f.nullable) for f in wanted.schema]
    assert same_rows(table(found), wanted)
    one = read(session, f"{store}@5", table=name, columns="checkpoint_id")
    assert one.distinct().collect() == [(5,)]


def test_a_given_schema_chooses_columns_and_casts_nothing(session: Any, store: str) -> None:
    reader = session.read.format("stateformat").options(operator="totals", state="spent")
    found = table(reader.schema("city string, user string").load(store))
    assert same_rows(found, expected("totals", "spent").select(["user", "city"]))
    told = sentence(reader.schema("user string, orders int").load(store).collect)
    assert "the schema says that column 'orders' is int, and it is bigint" in told
    assert "'vip'" in sentence(reader.schema("vipp boolean").load(store).collect)


def test_a_frame_reads_the_checkpoint_that_it_was_made_of_until_it_has_expired(session: Any, tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    store = open_store(url)
    permit = counts_job(keys=20_000).publish(store, None)
    frame = read(session, url, "counter", "counts")
    counts_job(keys=20_009).publish(store, permit)
    assert [frame.count(), read(session, url, "counter", "counts").count()] == [20_000, 20_009]
    store.expire(keep=1)
    assert "has expired" in sentence(frame.collect)


GOLDEN = Path(__file__).parent.parent / "golden" / "v1-ttl"


def test_what_had_expired_is_read_where_an_option_asks_for_it(session: Any) -> None:
    url, expected = str(GOLDEN / "store"), json.loads((GOLDEN / "expected.json").read_text())
    live = table(read(session, url, "seen", "last"))
    assert sorted(live["user"].to_pylist()) == expected["live"]["2"]["last"]
    every = [row["user"] for key, rows in expected["rows"]["2"].items() if "/last/" in key for row in rows]
    assert len(every) > len(live)
    assert sorted(table(read(session, url, "seen", "last", with_expired="true"))["user"].to_pylist()) == sorted(every)
    for more, whole in (({"checkpoint": "all"}, 22), ({"changes_from": 1}, 4)):
        # Streams need no job of Spark.
        found = [stream_of(read_options(_options(url, more, flag))).table().num_rows for flag in ("false", "true")]
        assert found[0] != found[1]
        assert whole <= found[1]


def _options(url: str, more: dict[str, Any], with_expired: str) -> dict[str, str]:
    given = {"path": url, "operator": "seen", "state": "last", "with_expired": with_expired}
    return {**given, **{name: str(value) for name, value in more.items()}}


@pytest.mark.parametrize("columns", ["[" * 100_000, "[" * 100, "[1]", "[", "[]"])
def test_columns_that_are_none_are_a_sentence(columns: str) -> None:
    with pytest.raises(InvalidInput, match="the option columns is") as raised:
        read_options({"path": "store", "columns": columns})
    assert len(str(raised.value)) < 500


# ---- where the data source reads: S3, folders of Flink and of Spark, beside a user's own packages

LIST = "list-type&prefix"
FIXTURES = Path(__file__).resolve().parents[1] / "foreign" / "fixtures"


@pytest.fixture(scope="module")
def proxy(moto: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(moto) as made:
        yield made


@pytest.mark.s3
def test_a_store_on_s3_costs_few_requests(session: Any, moto: S3Server, proxy: FaultProxy) -> None:
    url = f"s3://{BUCKET}/data-source"
    data_store(url, **moto.options())
    options = {"endpoint_url": proxy.endpoint, "option.key": moto.key, "option.secret": moto.secret}
    proxy.reset()
    frame = read(session, url.replace("s3:", "s3a:"), "totals", "spent", **options)
    proxy.settle()
    loaded = Counter(request.kind for request in proxy.requests)
    assert loaded == {f"GET ?{LIST}": 2, "GET checkpoints": 1, "GET manifests": 1}
    proxy.reset()
    found = table(frame)
    proxy.settle()
    assert same_rows(found, expected("totals", "spent"))
    slices = stateformat.open(url, **moto.options()).open().state("totals", "spent").task.slices
    asked = Counter(request.kind for request in proxy.requests)
    assert set(asked) == {"GET segments"}  # the DataFrame knows what to read
    assert asked.total() <= len(slices)
    told = sentence(lambda: read(session, f"s3://{BUCKET}/nowhere", "totals", "spent", **options))
    assert f"s3://{BUCKET}/nowhere" in told


FOREIGN = {
    "flink": "flink-2.3.0/core-hashmap-canonical/savepoint",
    "spark": "spark-4.3.0/totals-with-crc/checkpoint",
}


@pytest.mark.parametrize("named", [True, False], ids=["named", "plain"])
@pytest.mark.parametrize("system", FOREIGN)
def test_folders_of_other_systems_are_read_as_our_own(system: str, named: bool, session: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / FOREIGN[system], tmp_path / "folder")
    checkpoint = stateformat.open(folder).open()
    assert checkpoint.states
    for state in checkpoint.states[:3]:
        url = f"{system}:{folder}" if named else str(folder)
        found = table(read(session, url, state.operator, state.name, partitions=3))
        assert same_rows(found, checkpoint.state(state).table())
    states = read(session, str(folder), table="states", checkpoint=checkpoint.id).collect()
    assert [(row.operator, row.state) for row in states] == [(one.operator, one.name) for one in checkpoint.states]
    assert "checkpoint 999" in sentence(lambda: read(session, f"{folder}@999", "x", "y"))


# ---- every type of the format, against Spark's own reading of the same rows as Parquet

UTC = datetime.UTC
MOMENT = datetime.datetime.fromisoformat("2026-03-29T01:59:59.999999")
ITEM = pa.struct([pa.field("name", pa.string()), pa.field("sizes", pa.list_(pa.int16()))])
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [True, False]),
    "int8": (pa.int8(), [-128, 127]),
    "int16": (pa.int16(), [-(2**15), 2**15 - 1]),
    "int32": (pa.int32(), [-(2**31), 2**31 - 1]),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1]),
    "float": (pa.float32(), [math.nan, -math.inf, 0.1]),
    "double": (pa.float64(), [math.nan, 5e-324, math.inf]),
    "utf8": (pa.string(), ["", "é\n\U0001f600"]),
    "binary": (pa.binary(), [b"", b"\x00\xff"]),
    "date32": (pa.date32(), [datetime.date(1, 1, 1), datetime.date(9999, 12, 31)]),
    "timestamp_us": (pa.timestamp("us"), [MOMENT, datetime.datetime.fromisoformat("1900-01-01")]),
    "timestamp_us_utc": (pa.timestamp("us", "UTC"), [MOMENT.replace(tzinfo=UTC)]),
    "decimal": (pa.decimal128(8, 2), [Decimal("-999999.99"), Decimal("0.05")]),
    "wide decimal": (pa.decimal128(38, 18), [Decimal("12345678901234567890.123456789012345678")]),
    "struct": (ITEM, [{"name": None, "sizes": [1, None]}, {"name": "x", "sizes": None}]),
    "list": (pa.list_(ITEM), [[], [None, {"name": "a", "sizes": []}]]),
    "map": (pa.map_(pa.string(), pa.decimal128(5, 1)), [[], [("k", Decimal("1.5")), ("n", None)]]),
}
SPARK = [
    "boolean",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "float",
    "double",
    "string",
    "binary",
    "date",
    "timestamp_ntz",
    "timestamp",
    "decimal(8,2)",
    "decimal(38,18)",
    "struct<name:string,sizes:array<smallint>>",
    "array<struct<name:string,sizes:array<smallint>>>",
    "map<string,decimal(5,1)>",
]


def published(url: str, job: Job) -> CheckpointStore:
    store = open_store(url)
    job.publish(store, None)
    return store


def test_every_type_is_what_spark_reads_of_the_same_rows_as_parquet(session: Any, tmp_path: Path) -> None:
    at = operator("all", 2)
    state = declare.value_state("all", "types", keys={"n": pa.int64()}, values={k: t for k, (t, _) in VALUES.items()})
    rows = [{"n": n, **{name: ([*values, None] * 4)[n] for name, (_, values) in VALUES.items()}} for n in range(4)]
    schema = pa.schema([("n", pa.int64()), *((name, kind) for name, (kind, _) in VALUES.items())])
    written = pa.Table.from_pylist(rows, schema)
    job = Job("types", JobGraph((at,)), (state,), {("all", "types"): lambda i: owned(written, ["n"], at, i)})
    store = published(str(tmp_path / "store"), job)
    pq.write_table(store.open().state("all", "types").table(), tmp_path / "exported.parquet")

    found = read(session, str(tmp_path / "store"), "all", "types")
    plain = session.read.parquet(str(tmp_path / "exported.parquet"))
    assert [column.dataType.simpleString() for column in found.schema] == ["bigint", *SPARK]
    assert found.schema == plain.schema
    assert same_rows(table(found), table(plain))
    assert same_rows(table(found), written)


KEYS_OF_EVERY_TYPE: dict[str, tuple[pa.DataType, list[Any], str, str]] = {
    "bool": (pa.bool_(), [True, False], "true", "k"),
    "int8": (pa.int8(), [-128, 127, None], "127", "k = 127"),
    "int64": (pa.int64(), [-(2**63), 2**63 - 1], str(2**63 - 1), f"k = {2**63 - 1}"),
    "float": (pa.float32(), [0.1, 0.5], "0.1", "k = float(0.1)"),
    "zero": (pa.float64(), [-0.0, 1.0], "0", "k = double(0)"),
    "nan": (pa.float64(), [math.nan, 1.0], '"NaN"', "k = double('NaN')"),
    "utf8": (pa.string(), ["a", "", None], '""', "k = ''"),
    "binary": (pa.binary(), [b"\x00\xff", b""], '"00ff"', "k = X'00ff'"),
    "date32": (pa.date32(), [datetime.date(1969, 12, 31)], '"1969-12-31"', "k = date'1969-12-31'"),
    "timestamp_us": (pa.timestamp("us"), [MOMENT], f'"{MOMENT.isoformat()}"', f"k = timestamp_ntz'{MOMENT}'"),
    "timestamp_us_utc": (
        pa.timestamp("us", "UTC"),
        [MOMENT.replace(tzinfo=UTC)],
        f'"{MOMENT.isoformat()}Z"',
        f"k = timestamp'{MOMENT}Z'",
    ),
    "decimal": (pa.decimal128(8, 2), [Decimal("0.05"), Decimal("1.00")], "1", "k = 1.00"),
    "struct": (
        pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.string())]),
        [{"a": 1, "b": "x"}, {"a": 1, "b": None}],
        '{"a": 1, "b": "x"}',
        "k = named_struct('a', 1, 'b', 'x')",
    ),
}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A state for each type of keys; each key and 40 of the same type make rows."""
    url, at = str(tmp_path_factory.mktemp("keys") / "store"), operator("keys", 2)
    states, tables = [], {}
    for name, (kind, values, _, _) in KEYS_OF_EVERY_TYPE.items():
        states.append(declare.value_state("keys", name, keys={"k": kind}, values={"v": pa.int64()}))
        tables[name] = pa.table({"k": pa.array(values, kind), "v": pa.array(range(len(values)), pa.int64())})
    rows = {("keys", name): lambda i, table=one: owned(table, ["k"], at, i) for name, one in tables.items()}
    published(url, Job("keys", JobGraph((at,)), tuple(states), rows))
    return url


@pytest.mark.parametrize("case", KEYS_OF_EVERY_TYPE)
def test_a_key_of_any_type_is_found_by_the_option_and_by_a_filter(case: str, keyed: str, session: Any) -> None:
    _, _, text, condition = KEYS_OF_EVERY_TYPE[case]
    frame = read(session, keyed, "keys", case)
    session.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    wanted = table(frame.where(condition))
    assert len(wanted) == 1
    assert same_rows(table(read(session, keyed, "keys", case, key=text)), wanted)
    session.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        pushed = read(session, keyed, "keys", case, push_filters="true")
        assert same_rows(table(pushed.where(condition)), wanted)
    finally:
        session.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.mark.parametrize("case", KEYS_OF_EVERY_TYPE)
def test_a_filter_on_a_key_becomes_a_key(case: str, keyed: str) -> None:
    # Spark filters again, so that rows too many are seen here only. Structs are left to Spark.
    rows = open_store(keyed).open().state("keys", case)
    value = next(value for value in KEYS_OF_EVERY_TYPE[case][1] if value is not None)
    found = with_keys_of(rows, [EqualTo(("k",), value)])
    assert len(found.table()) == (len(rows.table()) if case == "struct" else 1)
    assert with_keys_of(rows, [EqualTo(("v",), 0)]) is rows


def test_columns_that_differ_in_case_only_are_named_one_by_one(session: Any, tmp_path: Path) -> None:
    at = operator("case", 1)
    state = declare.value_state("case", "both", keys={"k": pa.int64()}, values={"a": pa.int64(), "A": pa.string()})
    rows = pa.table({"k": pa.array([1], pa.int64()), "a": pa.array([2], pa.int64()), "A": ["three"]})
    published(str(tmp_path / "store"), Job("case", JobGraph((at,)), (state,), {("case", "both"): lambda _: rows}))
    told = sentence(lambda: read(session, str(tmp_path / "store"), "case", "both"))
    assert "columns 'a' and 'A' differ in case only" in told
    found = read(session, str(tmp_path / "store"), "case", "both", columns=json.dumps(["k", "A"]))
    assert found.collect() == [(1, "three")]
