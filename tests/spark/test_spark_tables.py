"""Tables as sources of DataFrames: ranges that leave no row out, columns as declared."""

from __future__ import annotations

import datetime
import random
import re
from collections.abc import Callable
from decimal import Decimal
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import NoSplit
from stateformat.backends.spark.driver.exchanges import column_of
from stateformat.backends.spark.protocol import frames as mail
from stateformat.backends.spark.protocol.dataframe_input import DataFrameInput, InputEncoder
from stateformat.backends.spark.sources.arrow import arrow_schema_of, to_arrow
from stateformat.backends.spark.sources.offset_table import OffsetTable
from stateformat.backends.spark.sources.source import Range, SparkSource
from stateformat.errors import ErrorKind, InvalidInput
from tests.spark.spark_ranges import ROWS, Numbers, numbers, only_n, ranges, restored

pytestmark = pytest.mark.spark

UTC = datetime.UTC
WALL = datetime.datetime.fromisoformat


def table_of(spark: Any, offsets: pa.Array) -> Callable[[Any], Any]:
    frame = spark.createDataFrame(pa.table({"n": pa.array(range(len(offsets)), pa.int64()), "at": offsets}))
    return lambda spark: frame


DAYS = [datetime.date(1969, 12, 30) + datetime.timedelta(days=n // 2) for n in range(8)]
# In New York the clock went from two to three, and back from two to one.
WALLS = [WALL("2024-03-10T01:59:59.999999"), WALL("2024-03-10T02:30:00")] + [
    WALL("2024-11-03T01:30:00") + datetime.timedelta(microseconds=n // 2) for n in range(6)
]
TYPES = {
    "tinyint": pa.array([-128, -1, 0, 0, 1, 5, 5, 127], pa.int8()),
    "bigint": pa.array([-(2**63), -1, 0, 0, 1, 5, 5, 2**63 - 1], pa.int64()),
    "date": pa.array(DAYS, pa.date32()),
    "timestamp": pa.array([day.replace(tzinfo=UTC) for day in WALLS], pa.timestamp("us", "UTC")),
    "timestamp_ntz": pa.array(WALLS, pa.timestamp("us")),
    "string": pa.array(["", "9", "A", "A", "a", "é", "é", "\U0001f600"]),
    "decimal": pa.array([Decimal(n) for n in ("-10.00", "-9.00", "0.05", "0.05", "9.00", "10.00", "10.00", "123.45")]),
}


@pytest.mark.parametrize("kind", TYPES)
def test_offsets_of_every_type_part_a_table_exactly(kind: str, quick: Any) -> None:
    session = quick.newSession()
    table = OffsetTable(table_of(session, TYPES[kind]), "at", rows_per_epoch=3)
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    source = SparkSource(table, transform=only_n, schema=ROWS)
    enumerator, found = source.enumerator(), []
    while isinstance(part := enumerator.next_range(session), Range):
        found.append(numbers(session, part))
        enumerator = restored(source, enumerator.snapshot())
    assert part is NoSplit.NEVER
    assert [*chain(*found)] == list(range(8))
    same = TYPES[kind].to_pylist()
    assert all(same[part[-1]] != same[part[-1] + 1] for part in found[:-1])
    assert 2 <= len(found) <= 3


@pytest.mark.parametrize("options", [{"rows_per_epoch": 5}, {"step": 4}, {}], ids=["rows", "steps", "all"])
def test_every_row_of_a_table_that_grows_is_read_once(options: Any, quick: Any) -> None:
    draw = random.Random(len(str(options)))
    offsets: list[int] = []
    table = OffsetTable(
        lambda spark: table_of(spark, pa.array(offsets, pa.int64()))(spark), "at", grows=True, lag=3, **options
    )
    source = SparkSource(table, transform=only_n, schema=ROWS)
    enumerator, read = source.enumerator(), []
    for _ in range(4):
        top = max(offsets, default=0)
        # Behind the greatest by less than the lag, and far above.
        offsets += [max(1, top + draw.randrange(-2, 20)) for _ in range(draw.randrange(1, 6))]
        found = enumerator.next_range(quick)
        if isinstance(found, Range):
            read += numbers(quick, found)
        enumerator = restored(source, enumerator.snapshot())
    for found in ranges(quick, enumerator):
        read += numbers(quick, found)
    assert sorted(read) == [n for n, offset in enumerate(offsets) if offset <= max(offsets) - 3]


def test_a_table_ends_where_it_is_told_once_it_has_come_so_far(quick: Any) -> None:
    offsets = [3, 5]
    table = OffsetTable(lambda spark: table_of(spark, pa.array(offsets))(spark), "at", since=3, until=10)
    source = SparkSource(table, schema=pa.schema([("n", pa.int64()), ("at", pa.int64())]))
    enumerator = source.enumerator()
    assert numbers(quick, enumerator.next_range(quick)) == [1]
    assert enumerator.next_range(quick) is NoSplit.LATER
    offsets += [11, 9]
    assert numbers(quick, enumerator.next_range(quick)) == [3]
    assert enumerator.next_range(quick) is NoSplit.NEVER
    offsets[:] = [4, 20]
    late = source.enumerator()
    assert numbers(quick, late.next_range(quick)) == [0]
    assert late.next_range(quick) is NoSplit.NEVER


@pytest.mark.parametrize(("since", "offsets"), [(None, []), (3, []), (99, [1, 2])])
def test_a_table_of_nothing_has_ended(since: int | None, offsets: list[int], quick: Any) -> None:
    table = OffsetTable(table_of(quick, pa.array(offsets, pa.int64())), "at", since=since)
    assert SparkSource(table, spark=quick).enumerator().next_range(quick) is NoSplit.NEVER


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rows_per_epoch": 1, "step": 1}, "both say how much"),
        ({"rows_per_epoch": 0}, "rows_per_epoch is 0"),
        ({"until": 1, "grows": True}, "until=1"),
        ({"lag": 1}, "for a table that grows"),
        ({"since": "x"}, "since='x' is not an offset"),
        ({"since": 9, "until": 9}, "not below until=9"),
        ({"step": 0}, "step=0 cannot be counted"),
        ({"offset": "none"}, "has 0 columns of that name"),
        ({"offset": "price"}, "is of type double"),
        ({"offset": "gap"}, "1 rows of the table of offset 'gap' have no offset"),
    ],
)
def test_a_table_refuses_what_cannot_be_read_exactly(options: dict[str, Any], words: str, quick: Any) -> None:
    frame = quick.sql("select 1L as at, 1.5D as price, cast(null as bigint) as gap")
    read = lambda spark: frame  # noqa: E731
    with pytest.raises(InvalidInput, match=re.escape(words)):
        SparkSource(OffsetTable(read, **{"offset": "at", **options}), spark=quick).enumerator().next_range(quick)


EVERYTHING = """
    select timestamp'2024-03-10 07:00:00.000001Z' as instant, timestamp_ntz'2024-03-10 02:30:00' as wall,
    date'1969-12-31' as day, cast('-12345678901234567890.123' as decimal(38, 3)) as money, cast(1.5 as float) as f,
    -1.5D as d, cast(-1 as tinyint) as b, true as yes, 'é' as text, x'00ff' as bytes,
    array(timestamp'1960-01-01 00:00:00Z', null) as times, map('k', 1, 'l', null) as counts,
    named_struct('x', 1, 'at', timestamp'2024-11-03 05:30:00Z', 'inner', array('a')) as pair
"""
INSTANT = pa.timestamp("us", "UTC")
COLUMNS = pa.schema(
    [
        ("instant", INSTANT),
        ("wall", pa.timestamp("us")),
        ("day", pa.date32()),
        ("money", pa.decimal128(38, 3)),
        ("f", pa.float32()),
        ("d", pa.float64()),
        ("b", pa.int8()),
        pa.field("yes", pa.bool_(), nullable=False),
        ("text", pa.string()),
        ("bytes", pa.large_binary()),
        ("times", pa.list_(INSTANT)),
        ("counts", pa.map_(pa.string(), pa.int32())),
        ("pair", pa.struct([("x", pa.int32()), ("at", INSTANT), ("inner", pa.list_(pa.string()))])),
    ]
)
VALUES = {
    "instant": datetime.datetime(2024, 3, 10, 7, 0, 0, 1, UTC),
    "wall": WALL("2024-03-10T02:30:00"),
    "day": datetime.date(1969, 12, 31),
    "money": Decimal("-12345678901234567890.123"),
    "f": 1.5,
    "d": -1.5,
    "b": -1,
    "yes": True,
    "text": "é",
    "bytes": b"\x00\xff",
    "times": [datetime.datetime(1960, 1, 1, tzinfo=UTC), None],
    "counts": [("k", 1), ("l", None)],
    "pair": {"x": 1, "at": datetime.datetime(2024, 11, 3, 5, 30, tzinfo=UTC), "inner": ["a"]},
}


def arrived(spark: Any, found: Range, schema: pa.Schema) -> list[pa.RecordBatch]:
    """What the frames of a range hold."""
    sent = DataFrameInput(found, InputEncoder("in", 1, None, schema)).frame(spark)
    payloads = column_of(sent).collect()[1::2]
    frames = [mail.unpack(payload) for payload in payloads if mail.level_of(payload) == 0]
    elements: list[Any] = [element for frame in frames for _, element in mail.elements(*frame, {"rows of in": schema})]
    return [element.batch for element in elements]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York"])
def test_rows_arrive_in_exactly_the_declared_columns_whatever_the_session_says(zone: str, quick: Any) -> None:
    session = quick.newSession()
    session.conf.set("spark.sql.session.timeZone", zone)
    rows = session.sql(EVERYTHING)
    assert arrow_schema_of("rows", rows.schema).types[:2] == [INSTANT, pa.timestamp("us")]
    table = OffsetTable(lambda session: rows.select("*").withColumn("n", rows.b.cast("int")), "n")
    source = SparkSource(table, transform=lambda rows: rows.select(*reversed(COLUMNS.names)), schema=COLUMNS)
    (found,) = ranges(session, source.enumerator())
    (batch,) = arrived(session, found, COLUMNS)
    assert batch.schema.equals(COLUMNS, check_metadata=True)
    assert str(batch.schema) == str(COLUMNS)
    assert batch.to_pylist() == [VALUES]


def test_columns_are_called_what_they_are_called(quick: Any) -> None:
    called = pa.schema([(name, pa.int64()) for name in ("a.b", "a", "b`q", "*", "ä ö")])
    rows = quick.range(1, 2).selectExpr(
        *(f"id * {n} as `{name.replace('`', '``')}`" for n, name in enumerate(called.names))
    )
    (found,) = ranges(quick, SparkSource(OffsetTable(lambda session: rows, "a"), schema=called).enumerator())
    (batch,) = arrived(quick, found, called)
    assert batch.to_pylist() == [{"a.b": 0, "a": 1, "b`q": 2, "*": 3, "ä ö": 4}]


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"n": pa.string()}, "Column 'n' of Numbers is int64, and its source declares string. Cast it"),
        ({"n": INSTANT}, "is int64"),
        ({"n": pa.int64(), "more": pa.int64()}, "has columns ['n'], and its source declares ['n', 'more']"),
        ({"m": pa.int64()}, "Select those"),
    ],
)
def test_other_columns_than_declared_are_refused_before_anything_runs(declared: Any, words: str, quick: Any) -> None:
    found = SparkSource(Numbers([5]), schema=declared).enumerator().next_range(quick)
    assert isinstance(found, Range)
    with pytest.raises(InvalidInput, match=re.escape(words)) as caught:
        found.frame(quick)
    assert caught.value.kind is ErrorKind.SCHEMA_MISMATCH


def test_an_instant_is_no_wall_clock_time(quick: Any) -> None:
    rows = quick.sql("select timestamp_ntz'2024-01-01 00:00:00' as at, 1 as n")
    source = SparkSource(OffsetTable(lambda spark: rows, "n"), schema={"at": INSTANT, "n": pa.int32()})
    words = "is timestamp[us], and its source declares timestamp[us, tz=UTC]"
    with pytest.raises(InvalidInput, match=re.escape(words)):
        next(ranges(quick, source.enumerator())).frame(quick)


def not_null(name: str) -> pa.Field:
    return pa.field(name, pa.int64(), nullable=False)


@pytest.mark.parametrize(
    ("field", "loose", "values", "words"),
    [
        (not_null("c"), pa.int64(), [1, None], "'c' has 1 nulls among 2"),
        (
            pa.field("c", pa.struct([not_null("x")])),
            pa.struct([("x", pa.int64())]),
            [None, {"x": 1}, {"x": None}],
            "'c.x' has 1 nulls among 2",
        ),
        (
            pa.field("c", pa.list_(not_null("item"))),
            pa.list_(pa.int64()),
            [None, [1], [2, None]],
            "'c.item' has 1 nulls",
        ),
        (
            pa.field("c", pa.map_(pa.string(), not_null("value"))),
            pa.map_(pa.string(), pa.int64()),
            [None, [("a", 1)], [("b", None)]],
            "'c.value' has 1 nulls",
        ),
    ],
    ids=["column", "struct", "list", "map"],
)
def test_a_null_where_none_is_declared_is_refused(field: pa.Field, loose: Any, values: list[Any], words: str) -> None:
    given, schema = pa.record_batch({"c": pa.array(values, loose)}), pa.schema([field])
    with pytest.raises(InvalidInput, match=words) as caught:
        to_arrow(given, schema)
    assert caught.value.kind is ErrorKind.NULL_NOT_ALLOWED
    assert to_arrow(given.slice(0, len(values) - 1), schema).schema == schema
