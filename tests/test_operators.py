"""The ready-made operators, each against what plain Python says of the same rows."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from backends.dataflow.events import MAX_WATERMARK
from backends.dataflow.operators import (
    Aggregate,
    BroadcastJoin,
    Deduplicate,
    Filter,
    Map,
    Select,
    TumblingWindow,
)
from stateformat.errors import InvalidInput, InvalidState
from tests.operator_harness import Driven, rows_of

AGGREGATES = {
    "rows": ("*", "count"),
    "values": ("v", "count"),
    "total": ("v", "sum"),
    "least": ("v", "min"),
    "first": ("s", "min"),
    "last": ("s", "max"),
    "average": ("v", "mean"),
}


def some_rows(count: int, keys: int, seed: int) -> pa.Table:
    """Rows with nulls and letters of many bytes in every column."""
    draw = random.Random(seed)
    return pa.table(
        {
            "k": pa.array(
                [draw.choice([None, *(f"ключ {n}" for n in range(keys))]) for _ in range(count)], pa.string()
            ),
            "v": pa.array([draw.choice([None, draw.randrange(-50, 50)]) for _ in range(count)], pa.int32()),
            "s": pa.array([draw.choice([None, "ä", "b", "日本", "z"]) for _ in range(count)], pa.string()),
            "t": pa.array([draw.randrange(-5000, 5000) for _ in range(count)], pa.int64()).view(pa.timestamp("us")),
        }
    )


def aggregates_of(rows: list[dict[str, Any]]) -> tuple[Any, ...]:
    """What AGGREGATES say of some rows."""
    values = [row["v"] for row in rows if row["v"] is not None]
    texts = [row["s"].encode() for row in rows if row["s"] is not None]
    return (
        len(rows),
        len(values),
        sum(values) if values else None,
        min(values, default=None),
        min(texts).decode() if texts else None,
        max(texts).decode() if texts else None,
        sum(values) / len(values) if values else None,
    )


def grouped(table: pa.Table, key: Any) -> dict[Any, list[dict[str, Any]]]:
    groups: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        groups[key(row)].append(row)
    return groups


def chunks(table: pa.Table, rows: int) -> list[pa.RecordBatch]:
    return table.combine_chunks().to_batches(max_chunksize=rows)


# Map, Filter, Select ------------------------------------------------------------------------------------------------------


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"double": pc.multiply(batch["v"], 2)})


def test_a_map_learns_its_columns_by_calling_the_function_on_nothing() -> None:
    table = some_rows(20, 3, 1)
    driven = Driven(Map(doubled), table.schema)
    assert driven.schema == pa.schema([("double", pa.int64())])
    values = driven.give(table).taken()["double"].to_pylist()
    assert values == [None if value is None else 2 * value for value in table["v"].to_pylist()]


def test_a_map_whose_function_fails_on_nothing_is_told_to_be_given_a_schema() -> None:
    def first_value(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"first": pa.array([batch["v"][0].as_py()], pa.int64())})

    table = some_rows(3, 1, 2)
    with pytest.raises(InvalidInput, match="give Map the schema"):
        Driven(Map(first_value), table.schema)
    driven = Driven(Map(first_value, {"first": pa.int64()}), table.schema)
    assert driven.give(table).taken().to_pylist() == [{"first": table["v"][0].as_py()}]


def test_a_map_that_returns_other_columns_than_it_said_is_refused() -> None:
    def fickle(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"x": pa.array([1] * len(batch), pa.int64() if len(batch) else pa.int32())})

    driven = Driven(Map(fickle), some_rows(3, 1, 2).schema)
    with pytest.raises(InvalidState, match="int64"):
        driven.give(some_rows(3, 1, 2))


@pytest.mark.parametrize("predicate", [pc.field("v") > 3, lambda batch: pc.greater(batch["v"], 3)])
def test_a_filter_keeps_the_rows_for_which_its_predicate_is_true(predicate: Any) -> None:
    table = some_rows(50, 3, 3)
    kept = Driven(Filter(predicate), table.schema).give(table).taken().to_pylist()
    assert kept == [row for row in table.to_pylist() if row["v"] is not None and row["v"] > 3]


def test_a_filter_of_a_column_that_is_not_there_is_refused_when_the_dataflow_is_built() -> None:
    with pytest.raises(InvalidInput, match="does not fit the columns k, v, s, t"):
        Driven(Filter(pc.field("w") > 3), some_rows(1, 1, 0).schema)


def test_a_selection_orders_and_renames() -> None:
    table = some_rows(9, 2, 4)
    driven = Driven(Select("v", {"key": "k"}), table.schema).give(table)
    assert driven.taken().to_pylist() == [{"v": row["v"], "key": row["k"]} for row in table.to_pylist()]
    with pytest.raises(InvalidInput, match="'nowhere'"):
        Driven(Select("nowhere"), table.schema)


# Aggregate ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "gathered"), [(1, 1000), (7, 20), (7, 1), (1000, 1000)])
def test_an_aggregate_emits_at_the_end_what_python_says_of_all_rows(
    rows: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("backends.dataflow.operators.aggregate._GATHERED_ROWS_MAX", gathered)
    table = some_rows(400, 11, 5)
    driven = Driven(Aggregate("k", AGGREGATES, emit="end"), table.schema)
    for batch in chunks(table, rows):
        driven.give(batch)
    assert driven.taken().num_rows == 0
    expected = [(key, *aggregates_of(group)) for key, group in grouped(table, lambda row: row["k"]).items()]
    assert rows_of(driven.end().taken()) == sorted(expected, key=repr)


def test_an_aggregate_emits_the_totals_of_the_keys_of_each_batch() -> None:
    table = some_rows(60, 4, 6)
    driven = Driven(Aggregate("k", AGGREGATES), table.schema)
    seen = 0
    for batch in chunks(table, 13):
        seen += batch.num_rows
        groups = grouped(table.slice(0, seen), lambda row: row["k"])
        expected = [(key, *aggregates_of(groups[key])) for key in set(batch["k"].to_pylist())]
        assert rows_of(driven.give(batch).taken()) == sorted(expected, key=repr)
    assert driven.end().taken().num_rows == 0


def test_an_aggregate_goes_on_from_a_snapshot() -> None:
    table = some_rows(200, 5, 7)
    driven = Driven(Aggregate("k", AGGREGATES, emit="end"), table.schema)
    for batch in chunks(table, 20):
        driven = driven.give(batch).again()
    whole = Driven(Aggregate("k", AGGREGATES, emit="end"), table.schema).give(table)
    assert rows_of(driven.end().taken()) == rows_of(whole.end().taken())


def test_keys_that_are_equal_in_the_format_are_one_key() -> None:
    keys = pa.array([0.0, -0.0, math.nan, -math.nan, None, None])
    table = pa.table({"x": keys, "y": pa.array([{"a": 1}, {"a": 1}, None, None, {"a": None}, {"a": None}])})
    for names, expected in (("x", [2, 2, 2]), ("y", [2, 2, 2]), (["y", "x"], [2, 2, 2])):
        driven = Driven(Aggregate(names, {"rows": ("*", "count")}, emit="end"), table.schema)
        assert driven.give(table).end().taken()["rows"].to_pylist() == expected


def test_sums_have_types_that_hold_them() -> None:
    table = pa.table(
        {
            "k": ["a", "a", "b"],
            "small": pa.array([127, 127, None], pa.int8()),
            "unsigned": pa.array([2**32 - 1, 2**32 - 1, 1], pa.uint32()),
            "real": pa.array([0.5, 0.25, None], pa.float32()),
            "money": pa.array([Decimal("9.99"), Decimal("0.02"), None], pa.decimal128(5, 2)),
        }
    )
    names = ["small", "unsigned", "real", "money"]
    driven = Driven(Aggregate("k", {f"{name}_sum": (name, "sum") for name in names}), table.schema)
    assert driven.schema.types == [pa.string(), pa.int64(), pa.int64(), pa.float64(), pa.decimal128(38, 2)]
    driven.give(table).taken()
    a, b = driven.give(table).taken().to_pylist()
    assert list(a.values()) == ["a", 508, 2 * (2**33 - 2), 1.5, Decimal("20.02")]
    assert list(b.values()) == ["b", None, 2, None, None]


def test_sums_of_unsigned_integers_wrap_around_as_those_of_others() -> None:
    table = pa.table({"k": ["a", "a"], "v": pa.array([2**63, 5], pa.uint64())})
    driven = Driven(Aggregate("k", {"sum": ("v", "sum")}), table.schema)
    assert driven.give(table).taken()["sum"].to_pylist() == [5 - 2**63]


@pytest.mark.parametrize(
    ("aggregates", "sentence"),
    [
        ({}, "at least one"),
        ({"x": ("v", "median")}, "median"),
        ({"x": ("*", "sum")}, "rows"),
        ({"x": ("s", "sum")}, "no 'sum' of column 's', which is string"),
        ({"x": ("w", "sum")}, r"\['w'\]"),
        ({"k": ("v", "sum")}, "other names"),
    ],
)
def test_what_cannot_be_aggregated_is_refused_when_the_dataflow_is_built(aggregates: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        Driven(Aggregate("k", aggregates), some_rows(1, 1, 0).schema)


def test_empty_batches_change_nothing() -> None:
    nothing = some_rows(0, 1, 0)
    empty = pa.RecordBatch.from_arrays([pa.array([], field.type) for field in nothing.schema], schema=nothing.schema)
    for operator in (
        Aggregate("k", AGGREGATES),
        Aggregate("k", AGGREGATES, emit="end"),
        Deduplicate("k"),
        TumblingWindow("k", 10, "t", AGGREGATES),
        Filter(pc.field("v") > 1),
        Map(doubled),
    ):
        assert Driven(operator, nothing.schema).give(empty).again().give(empty).end().taken().num_rows == 0


# TumblingWindow -----------------------------------------------------------------------------------------------------------


def windows_of(table: pa.Table, size: int) -> list[tuple[Any, ...]]:
    stamped = table.append_column("us", table["t"].cast(pa.int64()))
    groups = grouped(stamped, lambda row: (row["k"], math.floor(row["us"] / size) * size))
    return sorted(((key, at, at + size, *aggregates_of(group)) for (key, at), group in groups.items()), key=repr)


def plain_windows(table: pa.Table) -> list[tuple[Any, ...]]:
    times = {name: table[name].cast(pa.int64()) for name in ("window_start", "window_end")}
    columns = [times.get(name, table[name]) for name in table.column_names]
    return rows_of(pa.table(columns, table.column_names))


@pytest.mark.parametrize("rows", [1, 17, 1000])
def test_windows_have_the_rows_that_lie_in_them_and_are_emitted_once(rows: int) -> None:
    table = some_rows(60 if rows == 1 else 300, 4, 8)
    driven = Driven(TumblingWindow("k", 700, "t", AGGREGATES), table.schema)
    for batch in chunks(table, rows):
        driven = driven.give(batch).again()
    assert plain_windows(driven.end().taken()) == windows_of(table, 700)
    snapshot = driven.snapshot()
    assert (snapshot["windows"].num_rows, snapshot["ends"].num_rows) == (0, 0)


def at(*times: int) -> pa.Table:
    return pa.table({"k": pa.array(["a"] * len(times), pa.string()), "t": pa.array(times, pa.int64())})


def test_a_window_is_emitted_when_no_record_of_it_can_follow_and_not_before() -> None:
    driven = Driven(TumblingWindow("k", 10, "t", {"rows": ("*", "count")}), at().schema)
    assert driven.give(at(0, 9, 10)).advance(9).taken().num_rows == 0
    # Watermark 9 says that nothing below 9 follows; 9 may.
    assert driven.give(at(9)).advance(10).taken().to_pylist() == [
        {"k": "a", "window_start": 0, "window_end": 10, "rows": 3}
    ]
    assert driven.end().taken()["window_start"].to_pylist() == [10]


def test_windows_before_1970_begin_below_their_records() -> None:
    driven = Driven(TumblingWindow("k", 10, "t", {"rows": ("*", "count")}), at().schema)
    assert driven.give(at(-1, -10, -11)).end().taken()["window_start"].to_pylist() == [-20, -10]


def test_late_records_are_dropped_and_counted_across_restores() -> None:
    driven = Driven(TumblingWindow("k", 10, "t", {"rows": ("*", "count")}, lateness_us=5), at().schema)
    driven.give(at(3)).advance(14)
    assert driven.give(at(4)).taken().num_rows == 0
    assert driven.advance(15).taken()["rows"].to_pylist() == [2]
    driven.give(at(5, 6, 12)).advance(16)
    again = driven.again()
    again.context.watermark = 16
    again.give(at(9, 10)).give(pa.table({"k": ["a"], "t": pa.array([None], pa.int64())}))
    assert again.end().taken()["rows"].to_pylist() == [2]
    assert again.snapshot()["dropped"].to_pylist() == [{"late_records": 3, "untimed_records": 1}]


def test_counts_of_late_records_survive_another_parallelism() -> None:
    window = TumblingWindow("k", 10, "t", {"rows": ("*", "count")})
    counted = {"dropped": pa.table({"late_records": [2, 3], "untimed_records": [0, 1]})}
    merged = Driven(window, at().schema, restored=counted)
    fresh = Driven(window, at().schema, subtask=1, parallelism=2, restored={})
    totals = [driven.snapshot()["dropped"].to_pylist() for driven in (merged, fresh)]
    assert totals == [[{"late_records": 5, "untimed_records": 1}], [{"late_records": 0, "untimed_records": 0}]]


def test_after_the_end_of_time_everything_is_late() -> None:
    driven = Driven(TumblingWindow("k", 10, "t", {"rows": ("*", "count")}), at().schema).advance(MAX_WATERMARK)
    driven.give(at(2**62))
    assert driven.operator.late_records == 1  # type: ignore[attr-defined]
    assert driven.end().taken().num_rows == 0


# Deduplicate --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 9, 1000])
def test_the_first_row_of_each_key_passes_and_no_other(rows: int) -> None:
    table = some_rows(60 if rows == 1 else 300, 30, 9)
    driven = Driven(Deduplicate(["k", "s"]), table.schema)
    passed = []
    for batch in chunks(table, rows):
        passed += driven.give(batch).taken().to_pylist()
        driven = driven.again()
    firsts = [group[0] for group in grouped(table, lambda row: (row["k"], row["s"])).values()]
    assert passed == firsts


# BroadcastJoin ------------------------------------------------------------------------------------------------------------

PLANES = pa.table({"tail": ["N1", "N2", "ключ 1", None], "seats": [10, 20, 30, 40], "note": ["a", None, "c", "d"]})
FLIGHTS = pa.table({"k": ["N1", None, "N9", "ключ 1", "N2", "N1"], "n": [0, 1, 2, 3, 4, 5]})


def test_a_stream_waits_for_the_table_and_is_joined_in_order() -> None:
    join = BroadcastJoin({"k": "tail"}, columns=["seats"])
    driven = Driven(join, FLIGHTS.schema, PLANES.schema)
    driven.give(FLIGHTS.slice(0, 4)).again().give(PLANES, 1)
    assert driven.taken().num_rows == 0
    driven.give(PLANES, 1)
    waiting = driven.again()
    waiting.end_input(1)
    assert rows_of(waiting.taken()) == rows_of(pa.table({"k": ["N1", "ключ 1"], "n": [0, 3], "seats": [10, 30]}))
    # The end of the table is not told again, and is known.
    after = waiting.again()
    assert waiting.snapshot()["held"].num_rows == 0
    after.give(FLIGHTS.slice(4))
    assert after.taken().to_pylist() == [{"k": "N2", "n": 4, "seats": 20}, {"k": "N1", "n": 5, "seats": 10}]
    assert after.end(0).taken().num_rows == 0


def test_a_left_join_keeps_rows_without_a_partner_and_null_has_none() -> None:
    driven = Driven(BroadcastJoin({"k": "tail"}, how="left"), FLIGHTS.schema, PLANES.schema)
    driven.give(PLANES, 1).end_input(1).give(FLIGHTS)
    planes = {row["tail"]: row for row in PLANES.to_pylist() if row["tail"] is not None}
    nobody = {"seats": None, "note": None}
    assert driven.taken().to_pylist() == [
        {**row, **{name: planes.get(row["k"], nobody)[name] for name in nobody}} for row in FLIGHTS.to_pylist()
    ]


def test_without_waiting_a_row_is_joined_with_what_is_known() -> None:
    driven = Driven(BroadcastJoin({"k": "tail"}, columns=["seats"], wait=False), FLIGHTS.schema, PLANES.schema)
    assert list(driven.states) == ["table"]
    assert driven.give(PLANES.slice(0, 1), 1).give(FLIGHTS).taken()["n"].to_pylist() == [0, 5]
    driven = driven.give(PLANES.slice(1), 1).again()
    assert driven.give(FLIGHTS).end(1, 0).taken()["n"].to_pylist() == [0, 3, 4, 5]


def test_of_table_rows_with_equal_keys_the_last_one_counts() -> None:
    more = pa.table({"tail": ["N1", "N1"], "seats": [11, 12], "note": ["x", "y"]})
    driven = Driven(BroadcastJoin({"k": "tail"}, wait=False), FLIGHTS.schema, PLANES.schema)
    driven.give(PLANES, 1).give(FLIGHTS.slice(0, 1)).give(more, 1).give(FLIGHTS.slice(5))
    assert driven.taken()["seats"].to_pylist() == [10, 12]
    # One row a key is kept, and none that has no key.
    assert sorted(driven.snapshot()["table"]["seats"].to_pylist()) == [12, 20, 30]


def test_a_join_on_two_columns_compares_both() -> None:
    stream = pa.table({"a": ["x", "x", None, "y"], "b": [1, 2, 1, 1]})
    table = pa.table({"a": ["x", "y", None], "b": [1, 1, 1], "c": ["x1", "y1", "?"]})
    for how, expected in (("inner", ["x1", "y1"]), ("left", ["x1", None, None, "y1"])):
        driven = Driven(BroadcastJoin(["a", "b"], how=how), stream.schema, table.schema)
        driven.give(stream).give(table, 1).end_input(1)
        assert driven.taken()["c"].to_pylist() == expected


@pytest.mark.parametrize("rows", [32_768, 32_769])
def test_a_join_with_a_small_table_and_with_a_large_one_is_the_same(rows: int) -> None:
    keys = pa.array([None, 0.0, math.nan, *range(1, rows)], pa.float64())
    table = pa.table({"x": keys, "text": [f"é{number}" for number in range(rows + 2)]})
    stream = pa.table({"x": [-0.0, None, -math.nan, float(rows), rows - 1.0]})
    for how, expected in (("inner", ["é1", "é2", f"é{rows + 1}"]), ("left", ["é1", None, "é2", None, f"é{rows + 1}"])):
        driven = Driven(BroadcastJoin("x", how=how), stream.schema, table.schema)
        driven.give(table.slice(0, 2), 1).give(table.slice(2), 1).end_input(1)
        assert driven.give(stream).taken()["text"].to_pylist() == expected
        assert driven.again().give(stream).taken()["text"].to_pylist() == expected


@pytest.mark.parametrize("key", ["k", ["k", "n"]])
def test_a_join_that_adds_no_column_keeps_the_rows_with_a_partner(key: Any) -> None:
    driven = Driven(BroadcastJoin(key, columns=[]), FLIGHTS.schema, FLIGHTS.schema)
    driven.give(FLIGHTS.slice(0, 3), 1).end_input(1).give(FLIGHTS)
    assert driven.schema == FLIGHTS.schema
    assert driven.taken()["n"].to_pylist() == ([0, 2, 5] if key == "k" else [0, 2])


def test_a_join_with_an_empty_table_has_no_partners() -> None:
    driven = Driven(BroadcastJoin({"k": "tail"}, how="left"), FLIGHTS.schema, PLANES.schema)
    assert driven.give(FLIGHTS).end_input(1).taken()["seats"].null_count == FLIGHTS.num_rows


def test_a_join_of_what_does_not_fit_is_refused_when_the_dataflow_is_built() -> None:
    numbers = pa.table({"k": [1], "seats": [1]})
    with pytest.raises(InvalidInput, match="which is string"):
        Driven(BroadcastJoin("k"), FLIGHTS.schema, numbers.schema)
    with pytest.raises(InvalidInput, match="both have"):
        Driven(BroadcastJoin({"n": "seats"}), FLIGHTS.schema, numbers.schema)
    with pytest.raises(InvalidInput, match="two inputs"):
        Driven(BroadcastJoin("k"), FLIGHTS.schema)
    for columns in (["k"], ["seats", "seats"]):
        with pytest.raises(InvalidInput, match="more than once"):
            Driven(BroadcastJoin({"n": "k"}, columns=columns), pa.schema({"n": pa.int64()}), numbers.schema)
