"""Every type of the format in a DataFrame, against Spark's own reading of the same rows as Parquet;
and keys of every type, found by an option and by a filter.
"""

from __future__ import annotations

import datetime
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.datasource import EqualTo

from stateformat.backends.spark.data_source.filters import with_keys_of
from stateformat.graph import JobGraph
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from tests.spark.data_source_reads import read, sentence, table
from tests.worlds.data import same_rows
from tests.worlds.stores import Job, operator, owned

pytestmark = pytest.mark.spark

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


KEYS: dict[str, tuple[pa.DataType, list[Any], str, str]] = {
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
    for name, (kind, values, _, _) in KEYS.items():
        states.append(declare.value_state("keys", name, keys={"k": kind}, values={"v": pa.int64()}))
        tables[name] = pa.table({"k": pa.array(values, kind), "v": pa.array(range(len(values)), pa.int64())})
    rows = {("keys", name): lambda i, table=one: owned(table, ["k"], at, i) for name, one in tables.items()}
    published(url, Job("keys", JobGraph((at,)), tuple(states), rows))
    return url


@pytest.mark.parametrize("case", KEYS)
def test_a_key_of_any_type_is_found_by_the_option_and_by_a_filter(case: str, keyed: str, session: Any) -> None:
    _, _, text, condition = KEYS[case]
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


@pytest.mark.parametrize("case", KEYS)
def test_a_filter_on_a_key_becomes_a_key(case: str, keyed: str) -> None:
    # Spark filters again, so that rows too many are seen here only. Structs are left to Spark.
    rows = open_store(keyed).open().state("keys", case)
    value = next(value for value in KEYS[case][1] if value is not None)
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
