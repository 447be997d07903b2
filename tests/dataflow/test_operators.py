"""The ready-made operators, each against what plain Python says of the same rows."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterable
from decimal import Decimal, localcontext
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import Dataflow, Operator, events as ev
from stateformat.backends.dataflow.chained_operator import OperatorError
from stateformat.backends.dataflow.operators import window
from stateformat.backends.dataflow.operators.aggregate import Aggregate
from stateformat.backends.dataflow.operators.deduplicate import Deduplicate
from stateformat.backends.dataflow.operators.join import BroadcastJoin
from stateformat.backends.dataflow.operators.row_steps import Filter, Map, Select
from stateformat.backends.dataflow.operators.window import TumblingWindow
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.errors import InvalidInput
from stateformat.states import as_schema

KEYED = pa.schema([("k", pa.int64()), ("v", pa.int64())])
AGGREGATES = {
    "rows": ("*", "count"),
    "values": ("v", "count"),
    "total": ("v", "sum"),
    "least": ("v", "min"),
    "first": ("s", "min"),
    "last": ("s", "max"),
    "average": ("v", "mean"),
}


def driven_by(operator: Operator, *inputs: pa.Schema) -> OperatorHarness:
    """A harness whose first input is keyed by what the operator's states are keyed by."""
    operator.output_schema(*inputs)
    keyed = [as_schema(state.keys).names for state in operator.states(*inputs) if hasattr(state, "keys")]
    return OperatorHarness(operator, *inputs, key_by={0: keyed[0]} if keyed else {})


def again(harness: OperatorHarness) -> OperatorHarness:
    """Another one that goes on from a snapshot; what came out stays behind."""
    return OperatorHarness.restore(harness.snapshot())


def rows_of(table: pa.Table | Iterable[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    """Rows as tuples, sorted as text."""
    table = table if isinstance(table, pa.Table) else pa.Table.from_batches(list(table))
    return sorted(zip(*(column.to_pylist() for column in table.columns), strict=True), key=repr)


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


# Map, Filter, Select ------------------------------------------------------------------------------


def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.record_batch({"double": pc.multiply(batch["v"], 2)})


def test_a_map_learns_its_columns_by_calling_the_function_on_nothing() -> None:
    table = some_rows(20, 3, 1)
    driven = driven_by(Map(doubled), table.schema)
    assert driven.output.schema == pa.schema([("double", pa.int64())])
    values = driven.push(table).take_output()["double"].to_pylist()
    assert values == [None if value is None else 2 * value for value in table["v"].to_pylist()]


def test_a_map_whose_function_fails_on_nothing_is_told_to_be_given_a_schema() -> None:
    def first_value(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"first": pa.array([batch["v"][0].as_py()], pa.int64())})

    table = some_rows(3, 1, 2)
    with pytest.raises(InvalidInput, match="Give Map the schema"):
        driven_by(Map(first_value), table.schema)
    driven = driven_by(Map(first_value, {"first": pa.int64()}), table.schema)
    assert driven.push(table).take_output().to_pylist() == [{"first": table["v"][0].as_py()}]


def test_a_map_that_returns_other_columns_than_it_said_is_refused() -> None:
    def fickle(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"x": pa.array([1] * len(batch), pa.int64() if len(batch) else pa.int32())})

    driven = driven_by(Map(fickle), some_rows(3, 1, 2).schema)
    told = r"returned the columns x int64 and should return x int32\. Cast them, or give Map the schema\.$"
    with pytest.raises(OperatorError, match=told):
        driven.push(some_rows(3, 1, 2))


def test_a_map_that_may_return_nulls_where_it_said_there_are_none_is_told_so() -> None:
    schema = pa.schema([pa.field("x", pa.int32(), nullable=False), pa.field("y", pa.int32())])
    driven = driven_by(
        Map(lambda batch: pa.record_batch({"x": batch["v"], "y": batch["v"]}), schema), some_rows(3, 1, 2).schema
    )
    told = "the columns x int32, y int32 and should return x int32 not null, y int32"
    with pytest.raises(OperatorError, match=told):
        driven.push(some_rows(3, 1, 2))


def test_a_map_may_return_what_other_tools_have_and_its_columns_are_made_plain() -> None:
    texts = ["a", None, "bé"]
    made = {
        "view": pa.array(texts, pa.string_view()),
        "large": pa.array(texts, pa.large_string()),
        "words": pa.array(texts).dictionary_encode(),
        "runs": pc.run_end_encode(pa.array(texts)),
        "all": pa.array([["x"], None, []], pa.large_list(pa.string_view())),
        "at": pa.array([0, None, 1000], pa.timestamp("ns")),
        "bytes": pa.array([b"1", None, b""], pa.binary_view()),
    }
    plain = [pa.string()] * 4 + [pa.list_(pa.string()), pa.timestamp("us"), pa.binary()]
    harness = driven_by(Map(lambda batch: pa.record_batch({n: v[: len(batch)] for n, v in made.items()})), KEYED)
    given = pa.table({"k": [1, 2, 3], "v": [1, 2, 3]}, schema=KEYED)
    found = harness.push(given).take_output()
    assert found.schema.types == plain
    assert found.to_pydict() == {name: [None if v is None else v.as_py() for v in made[name]] for name in made}


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (pa.array([1], pa.timestamp("ns")), "column 'x' of what the function of a map returned is timestamp.ns."),
        (pa.array([b"\xff"]).view(pa.string()), "column 'x' of what the function of a map returned holds text that is"),
    ],
)
def test_a_map_that_returns_a_value_that_no_plain_column_holds_is_refused(column: pa.Array, told: str) -> None:
    harness = driven_by(Map(lambda batch: pa.record_batch([column[: len(batch)]], ["x"])), KEYED)
    with pytest.raises(OperatorError, match=told):
        harness.push(pa.table({"k": [1], "v": [1]}, schema=KEYED))


@pytest.mark.parametrize("schema", [None, {"at": pa.timestamp("ns")}])
def test_a_map_keeps_times_finer_than_a_microsecond_that_its_input_or_schema_has(schema: Any) -> None:
    given = pa.table({"at": pa.array([1001, None], pa.timestamp("ns"))})
    for rows in (given, given.slice(1)):
        found = driven_by(Map(lambda batch: batch, schema), given.schema).push(rows).take_output()
        assert found.schema == given.schema
        assert found.equals(rows)
    named = driven_by(Map(lambda batch: batch.rename_columns(["as"])), given.schema)
    with pytest.raises(OperatorError, match=r"column 'as' of what the function of a map returned is timestamp\[ns\]"):
        named.push(given)


def test_a_map_that_tells_no_type_or_one_name_twice_is_refused_when_the_job_is_built() -> None:
    with pytest.raises(InvalidInput, match=r"returned column 'x' without a type\. Give Map the schema"):
        driven_by(Map(lambda batch: pa.record_batch({"x": pa.array([None] * len(batch))})), KEYED)
    # What it advises. A batch of nulls alone then fits.
    harness = driven_by(Map(lambda batch: pa.record_batch({"x": [None] * len(batch)}), {"x": pa.int8()}), KEYED)
    given = pa.table({"k": [1], "v": [1]}, schema=KEYED)
    assert harness.push(given).take_output().to_pylist() == [{"x": None}]
    rows = Dataflow("twice").source(MemorySource(given), uid="rows")
    with pytest.raises(InvalidInput, match="of operator 'm' has 2 columns named 'k'"):
        rows.map(lambda batch: pa.record_batch([batch["k"], batch["v"]], ["k", "k"]), uid="m")


@pytest.mark.parametrize("predicate", [pc.field("v") > 3, lambda batch: pc.greater(batch["v"], 3)])
def test_a_filter_keeps_the_rows_for_which_its_predicate_is_true(predicate: Any) -> None:
    table = some_rows(50, 3, 3)
    kept = driven_by(Filter(predicate), table.schema).push(table).take_output().to_pylist()
    assert kept == [row for row in table.to_pylist() if row["v"] is not None and row["v"] > 3]


def test_a_filter_of_a_column_that_is_not_there_is_refused_when_the_dataflow_is_built() -> None:
    with pytest.raises(InvalidInput, match="does not fit the columns k, v, s, t"):
        driven_by(Filter(pc.field("w") > 3), some_rows(1, 1, 0).schema)


def test_a_selection_orders_and_renames() -> None:
    table = some_rows(9, 2, 4)
    driven = driven_by(Select("v", {"key": "k"}), table.schema).push(table)
    assert driven.take_output().to_pylist() == [{"v": row["v"], "key": row["k"]} for row in table.to_pylist()]
    with pytest.raises(InvalidInput, match="'nowhere'"):
        driven_by(Select("nowhere"), table.schema)


# Aggregate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "gathered"), [(1, 1000), (7, 20), (7, 1), (1000, 1000)])
def test_an_aggregate_emits_at_the_end_what_python_says_of_all_rows(
    rows: int, gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateformat.backends.dataflow.operators.aggregate._GATHERED_ROWS_MAX", gathered)
    table = some_rows(400, 11, 5)
    driven = driven_by(Aggregate("k", AGGREGATES, emit="end"), table.schema)
    for batch in chunks(table, rows):
        driven.push(batch)
    assert driven.take_output().num_rows == 0
    expected = [(key, *aggregates_of(group)) for key, group in grouped(table, lambda row: row["k"]).items()]
    assert rows_of(driven.finish().take_output()) == sorted(expected, key=repr)


def test_an_aggregate_emits_the_totals_of_the_keys_of_each_batch() -> None:
    table = some_rows(60, 4, 6)
    driven = driven_by(Aggregate("k", AGGREGATES), table.schema)
    seen = 0
    for batch in chunks(table, 13):
        seen += batch.num_rows
        groups = grouped(table.slice(0, seen), lambda row: row["k"])
        expected = [(key, *aggregates_of(groups[key])) for key in set(batch["k"].to_pylist())]
        assert rows_of(driven.push(batch).take_output()) == sorted(expected, key=repr)
    assert driven.finish().take_output().num_rows == 0


def test_an_aggregate_goes_on_from_a_snapshot() -> None:
    table = some_rows(200, 5, 7)
    driven = driven_by(Aggregate("k", AGGREGATES, emit="end"), table.schema)
    for batch in chunks(table, 20):
        driven = again(driven.push(batch))
    whole = driven_by(Aggregate("k", AGGREGATES, emit="end"), table.schema).push(table)
    assert rows_of(driven.finish().take_output()) == rows_of(whole.finish().take_output())


def test_keys_that_are_equal_in_the_format_are_one_key() -> None:
    keys = pa.array([0.0, -0.0, math.nan, -math.nan, None, None])
    table = pa.table({"x": keys, "y": pa.array([{"a": 1}, {"a": 1}, None, None, {"a": None}, {"a": None}])})
    for names, expected in (("x", [2, 2, 2]), ("y", [2, 2, 2]), (["y", "x"], [2, 2, 2])):
        driven = driven_by(Aggregate(names, {"rows": ("*", "count")}, emit="end"), table.schema)
        assert driven.push(table).finish().take_output()["rows"].to_pylist() == expected


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
    driven = driven_by(Aggregate("k", {f"{name}_sum": (name, "sum") for name in names}), table.schema)
    assert driven.output.schema.types == [pa.string(), pa.int64(), pa.int64(), pa.float64(), pa.decimal128(38, 2)]
    driven.push(table).take_output()
    a, b = driven.push(table).take_output().to_pylist()
    assert list(a.values()) == ["a", 508, 2 * (2**33 - 2), 1.5, Decimal("20.02")]
    assert list(b.values()) == ["b", None, 2, None, None]


def pushed(operator: Operator, table: pa.Table, rows: int, *, restored: bool = False) -> pa.Table:
    """What comes out of an operator in the end, if it is given so many rows at once."""
    driven = driven_by(operator, table.schema)
    for batch in chunks(table, rows):
        driven.push(batch)
        driven = again(driven) if restored else driven
    return driven.finish().take_output()


CENT = Decimal("0.01")
NINES, ALMOST = Decimal("9" * 36 + ".99"), Decimal("9" * 36 + ".98")
LIMITS: list[tuple[pa.DataType, list[Any], list[Any]]] = [
    (pa.int64(), [2**62, 2**62 - 1, None], [2**62, 2**62]),
    (pa.int64(), [-(2**62)] * 2, [-(2**62), -(2**62), -1]),
    (pa.int64(), [2**63 - 1], [2**63 - 1] * 8),
    (pa.uint64(), [2**63 - 5, 4], [2**63 - 5, 5]),
    (pa.uint64(), [2**63 - 1, 0], [2**64 - 1, 2**64 - 1, 2]),
    (pa.decimal128(38, 2), [ALMOST, CENT, None], [NINES, CENT]),
    (pa.decimal128(38, 2), [ALMOST.copy_negate(), -CENT], [NINES.copy_negate()] * 4),
]


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize(("kind", "fits", "leaves"), LIMITS)
def test_a_sum_that_does_not_fit_fails_whatever_the_batches_are(
    kind: pa.DataType, fits: list[Any], leaves: list[Any], rows: int
) -> None:
    with localcontext(prec=99):
        total = sum(filter(None, fits))
    for values, expected in ((fits, total), (leaves, None)):
        count = len(values)
        table = pa.table({"k": ["a"] * count, "v": pa.array(values, kind), "t": pa.array([1] * count, pa.int64())})
        for operator in (
            Aggregate("k", {"total": ("v", "sum")}, emit="end"),
            TumblingWindow("k", 10, "t", {"total": ("v", "sum")}),
        ):
            if expected is not None:
                assert pushed(operator, table, rows)["total"].to_pylist() == [expected]
                continue
            with pytest.raises(
                OperatorError, match=r"the sum 'total' of column 'v' does not fit into .* Cast the column"
            ):
                pushed(operator, table, rows)


def test_a_mean_of_decimals_is_refused_where_their_sum_has_more_digits() -> None:
    table = pa.table({"k": ["a"] * 2, "v": pa.array([NINES] * 2, pa.decimal128(38, 2))})
    for rows in (1, 2):
        with pytest.raises(OperatorError, match=r"of column 'v' does not fit into decimal128\(38, 2\)\. Cast"):
            pushed(Aggregate("k", {"mean": ("v", "mean")}, emit="end"), table, rows)


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()])
@pytest.mark.parametrize("rows", [1, 7, 500])
def test_a_mean_of_large_integers_is_that_of_python(kind: pa.DataType, rows: int) -> None:
    draw = random.Random(rows)
    least = 0 if kind == pa.uint64() else -(2**63)
    near = [2**63 - 1, 1_790_000_000_000_000_000, least, least + 1, None, 5]
    few = min(300, 40 * rows)
    values = [draw.choice(near) if draw.random() < 0.9 else draw.randrange(2**62) for _ in range(few)]
    values += [near[0]] * few
    count = len(values)
    keys = [draw.choice("abc") for _ in range(few)] + ["d"] * few
    table = pa.table({"k": keys, "v": pa.array(values, kind), "t": pa.array([1] * count, pa.int64())})
    expected = {}
    for key in "abcd":
        some = [value for at, value in zip(keys, values, strict=True) if at == key and value is not None]
        expected[key] = sum(some) / len(some)
    for operator in (
        Aggregate("k", {"mean": ("v", "mean")}, emit="end"),
        TumblingWindow("k", 10, "t", {"mean": ("v", "mean")}),
    ):
        for restored in (False, True):
            found = pushed(operator, table, rows, restored=restored)
            means = dict(zip(found["k"].to_pylist(), found["mean"].to_pylist(), strict=True))
            assert means == pytest.approx(expected, rel=1e-15)


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
        driven_by(Aggregate("k", aggregates), some_rows(1, 1, 0).schema)


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
        assert again(driven_by(operator, nothing.schema).push(empty)).push(empty).finish().take_output().num_rows == 0


# TumblingWindow -----------------------------------------------------------------------------------


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
    table = some_rows(30 if rows == 1 else 300, 4, 8)
    driven = driven_by(TumblingWindow("k", 700, "t", AGGREGATES), table.schema)
    for batch in chunks(table, rows):
        driven = again(driven.push(batch))
    assert plain_windows(driven.finish().take_output()) == windows_of(table, 700)
    assert (driven.state("windows").num_rows, driven.state("ends").num_rows) == (0, 0)


@pytest.mark.parametrize("restored_after", [1, 2, 7, 1000])
@pytest.mark.parametrize("many", [3, 100], ids=["batches of many windows go into the state", "all is gathered"])
def test_windows_are_the_same_however_much_is_gathered(
    many: int, restored_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(window, "_GATHERED_MAX", many)
    monkeypatch.setattr(window, "_ROWS_MIN", 6)
    monkeypatch.setattr(window, "_PIECES_MAX", 4)
    table = some_rows(300, 4, 8)
    driven = driven_by(TumblingWindow("k", 700, "t", AGGREGATES), table.schema)
    for number, batch in enumerate(chunks(table, 9), 1):
        driven = driven.push(batch)
        driven = again(driven) if number % restored_after == 0 else driven
    found = driven.finish().take_output()
    assert plain_windows(found) == windows_of(table, 700)
    assert found["window_start"].to_pylist() == sorted(found["window_start"].to_pylist())


def at(*times: int) -> pa.Table:
    return pa.table({"k": pa.array(["a"] * len(times), pa.string()), "t": pa.array(times, pa.int64())})


def test_a_window_is_emitted_when_no_record_of_it_can_follow_and_not_before() -> None:
    driven = driven_by(TumblingWindow("k", 10, "t", {"rows": ("*", "count")}), at().schema)
    assert driven.push(at(0, 9, 10)).advance(9).take_output().num_rows == 0
    # Watermark 9 says that nothing below 9 follows; 9 may.
    assert driven.push(at(9)).advance(10).take_output().to_pylist() == [
        {"k": "a", "window_start": 0, "window_end": 10, "rows": 3}
    ]
    # Another 9 is late now, however little.
    assert driven.push(at(9)).finish().take_output()["window_start"].to_pylist() == [10]


def test_windows_before_1970_begin_below_their_records() -> None:
    driven = driven_by(TumblingWindow("k", 10, "t", {"rows": ("*", "count")}), at().schema)
    assert driven.push(at(-1, -10, -11)).finish().take_output()["window_start"].to_pylist() == [-20, -10]


def test_late_records_are_dropped_and_counted_across_restores() -> None:
    driven = driven_by(TumblingWindow("k", 10, "t", {"rows": ("*", "count")}, lateness_us=5), at().schema)
    driven.push(at(3)).advance(14)
    assert driven.push(at(4)).take_output().num_rows == 0
    assert driven.advance(15).take_output()["rows"].to_pylist() == [2]
    driven.push(at(5, 6, 12)).advance(16)
    later = OperatorHarness.restore(driven.snapshot())
    assert later.context().watermark == 16
    later.push(at(9, 10)).push(pa.table({"k": ["a"], "t": pa.array([None], pa.int64())}))
    assert later.snapshot().state("dropped").to_pylist() == [{"late_records": 3, "untimed_records": 1}]
    assert later.finish().take_output()["rows"].to_pylist() == [2]


def test_counts_of_late_records_survive_another_parallelism() -> None:
    counting = TumblingWindow("k", 10, "t", {"rows": ("*", "count")})
    untimed = pa.table({"k": ["a"], "t": pa.array([None], pa.int64())})
    before = OperatorHarness(counting, at().schema, key_by="k", parallelism=2).advance(100)
    before.push(at(1, 2), subtask=0).push(at(1, 2, 3), subtask=1).push(untimed, subtask=1)
    for parallelism in (1, 3):
        dropped = OperatorHarness.restore(before.snapshot(), parallelism=parallelism).snapshot().state("dropped")
        assert len(dropped) == parallelism
        assert (pc.sum(dropped["late_records"]).as_py(), pc.sum(dropped["untimed_records"]).as_py()) == (5, 1)


def test_after_the_end_of_time_everything_is_late() -> None:
    driven = driven_by(TumblingWindow("k", 10, "t", {"rows": ("*", "count")}), at().schema).advance(ev.MAX_WATERMARK)
    driven.push(at(2**62))
    assert driven.operator().late_records == 1
    assert driven.finish().take_output().num_rows == 0


@pytest.mark.parametrize("lateness_us", [0, 3])
@pytest.mark.parametrize("size_us", [1, 10, 7_000_000, 2**62])
def test_times_at_the_ends_of_int64_get_their_window_or_are_late(size_us: int, lateness_us: int) -> None:
    least, greatest = -(2**63), 2**63 - 1
    times = [*range(least, least + 25), least + size_us, least + 2 * size_us, 0, None]
    times += [greatest - 2 * size_us - 5, greatest - size_us - 4, *range(greatest - 24, greatest + 1)]
    for together in (True, False):
        operator = TumblingWindow("k", size_us, "t", {"rows": ("*", "count")}, lateness_us=lateness_us)
        driven = driven_by(operator, at().schema)
        for some in [times] if together else [[one] for one in times]:
            driven.push(at(*some))
        dropped = driven.operator()
        assert isinstance(dropped, TumblingWindow)
        late, untimed = dropped.late_records, dropped.untimed_records
        found = plain_windows(driven.finish().take_output())
        assert untimed == 1
        assert sum(rows for _, _, _, rows in found) + late == len(times) - 1
        expected: dict[int, int] = defaultdict(int)
        for time in filter(lambda time: time is not None, times):
            start = time // size_us * size_us
            if start - size_us >= least and start + 2 * size_us + lateness_us <= greatest:
                expected[start] += 1
        shown = {start: rows for _, start, _, rows in found}
        assert {start: shown.get(start) for start in expected} == expected
        for _, start, end, _ in found:
            assert end == start + size_us
            assert start % size_us == 0


# Deduplicate --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 9, 1000])
def test_the_first_row_of_each_key_passes_and_no_other(rows: int) -> None:
    table = some_rows(30 if rows == 1 else 300, 30, 9)
    driven = driven_by(Deduplicate(["k", "s"]), table.schema)
    passed = []
    for batch in chunks(table, rows):
        passed += driven.push(batch).take_output().to_pylist()
        driven = again(driven)
    firsts = [group[0] for group in grouped(table, lambda row: (row["k"], row["s"])).values()]
    assert passed == firsts


# BroadcastJoin ------------------------------------------------------------------------------------

PLANES = pa.table({"tail": ["N1", "N2", "ключ 1", None], "seats": [10, 20, 30, 40], "note": ["a", None, "c", "d"]})
FLIGHTS = pa.table({"k": ["N1", None, "N9", "ключ 1", "N2", "N1"], "n": [0, 1, 2, 3, 4, 5]})


def test_a_stream_waits_for_the_table_and_is_joined_in_order() -> None:
    join = BroadcastJoin({"k": "tail"}, columns=["seats"])
    driven = driven_by(join, FLIGHTS.schema, PLANES.schema)
    again(driven.push(FLIGHTS.slice(0, 4))).push(PLANES, 1)
    assert driven.take_output().num_rows == 0
    driven.push(PLANES, 1)
    waiting = again(driven)
    waiting.end_input(1)
    assert rows_of(waiting.take_output()) == rows_of(pa.table({"k": ["N1", "ключ 1"], "n": [0, 3], "seats": [10, 30]}))
    # The end of the table is not told again, and is known.
    after = again(waiting)
    assert waiting.state("held").num_rows == 0
    after.push(FLIGHTS.slice(4))
    assert after.take_output().to_pylist() == [{"k": "N2", "n": 4, "seats": 20}, {"k": "N1", "n": 5, "seats": 10}]
    assert after.finish().take_output().num_rows == 0


def test_a_left_join_keeps_rows_without_a_partner_and_null_has_none() -> None:
    driven = driven_by(BroadcastJoin({"k": "tail"}, how="left"), FLIGHTS.schema, PLANES.schema)
    driven.push(PLANES, 1).end_input(1).push(FLIGHTS)
    planes = {row["tail"]: row for row in PLANES.to_pylist() if row["tail"] is not None}
    nobody = {"seats": None, "note": None}
    assert driven.take_output().to_pylist() == [
        {**row, **{name: planes.get(row["k"], nobody)[name] for name in nobody}} for row in FLIGHTS.to_pylist()
    ]


def test_without_waiting_a_row_is_joined_with_what_is_known() -> None:
    driven = driven_by(BroadcastJoin({"k": "tail"}, columns=["seats"], wait=False), FLIGHTS.schema, PLANES.schema)
    with pytest.raises(InvalidInput, match="it has table"):
        driven.state("held")
    assert driven.push(PLANES.slice(0, 1), 1).push(FLIGHTS).take_output()["n"].to_pylist() == [0, 5]
    driven = again(driven.push(PLANES.slice(1), 1))
    assert driven.push(FLIGHTS).end_input(1).finish().take_output()["n"].to_pylist() == [0, 3, 4, 5]


def test_of_table_rows_with_equal_keys_the_last_one_counts() -> None:
    more = pa.table({"tail": ["N1", "N1"], "seats": [11, 12], "note": ["x", "y"]})
    driven = driven_by(BroadcastJoin({"k": "tail"}, wait=False), FLIGHTS.schema, PLANES.schema)
    driven.push(PLANES, 1).push(FLIGHTS.slice(0, 1)).push(more, 1).push(FLIGHTS.slice(5))
    assert driven.take_output()["seats"].to_pylist() == [10, 12]
    # One row a key is kept, and none that has no key.
    assert sorted(driven.snapshot().state("table")["seats"].to_pylist()) == [12, 20, 30]


def test_a_join_on_two_columns_compares_both() -> None:
    stream = pa.table({"a": ["x", "x", None, "y"], "b": [1, 2, 1, 1]})
    table = pa.table({"a": ["x", "y", None], "b": [1, 1, 1], "c": ["x1", "y1", "?"]})
    for how, expected in (("inner", ["x1", "y1"]), ("left", ["x1", None, None, "y1"])):
        driven = driven_by(BroadcastJoin(["a", "b"], how=how), stream.schema, table.schema)
        driven.push(stream).push(table, 1).end_input(1)
        assert driven.take_output()["c"].to_pylist() == expected


@pytest.mark.parametrize("rows", [32_768, 32_769])
def test_a_join_with_a_small_table_and_with_a_large_one_is_the_same(rows: int) -> None:
    keys = pa.array([None, 0.0, math.nan, *range(1, rows)], pa.float64())
    table = pa.table({"x": keys, "text": [f"é{number}" for number in range(rows + 2)]})
    stream = pa.table({"x": [-0.0, None, -math.nan, float(rows), rows - 1.0]})
    for how, expected in (("inner", ["é1", "é2", f"é{rows + 1}"]), ("left", ["é1", None, "é2", None, f"é{rows + 1}"])):
        driven = driven_by(BroadcastJoin("x", how=how), stream.schema, table.schema)
        driven.push(table.slice(0, 2), 1).push(table.slice(2), 1).end_input(1)
        assert driven.push(stream).take_output()["text"].to_pylist() == expected
        assert again(driven).push(stream).take_output()["text"].to_pylist() == expected


@pytest.mark.parametrize("key", ["k", ["k", "n"]])
def test_a_join_that_adds_no_column_keeps_the_rows_with_a_partner(key: Any) -> None:
    driven = driven_by(BroadcastJoin(key, columns=[]), FLIGHTS.schema, FLIGHTS.schema)
    driven.push(FLIGHTS.slice(0, 3), 1).end_input(1).push(FLIGHTS)
    assert driven.output.schema == FLIGHTS.schema
    assert driven.take_output()["n"].to_pylist() == ([0, 2, 5] if key == "k" else [0, 2])


def test_a_join_with_an_empty_table_has_no_partners() -> None:
    driven = driven_by(BroadcastJoin({"k": "tail"}, how="left"), FLIGHTS.schema, PLANES.schema)
    assert driven.push(FLIGHTS).end_input(1).take_output()["seats"].null_count == FLIGHTS.num_rows


def test_a_join_of_what_does_not_fit_is_refused_when_the_dataflow_is_built() -> None:
    numbers = pa.table({"k": [1], "seats": [1]})
    with pytest.raises(InvalidInput, match="which is string"):
        driven_by(BroadcastJoin("k"), FLIGHTS.schema, numbers.schema)
    with pytest.raises(InvalidInput, match="both have"):
        driven_by(BroadcastJoin({"n": "seats"}), FLIGHTS.schema, numbers.schema)
    with pytest.raises(InvalidInput, match="two inputs"):
        driven_by(BroadcastJoin("k"), FLIGHTS.schema)
    for columns in (["k"], ["seats", "seats"]):
        with pytest.raises(InvalidInput, match="more than once"):
            driven_by(BroadcastJoin({"n": "k"}, columns=columns), pa.schema({"n": pa.int64()}), numbers.schema)


@pytest.mark.parametrize("size_us", [1e6, 0, "1"])
def test_the_size_of_a_window_is_a_whole_number_of_microseconds(size_us: Any) -> None:
    with pytest.raises(InvalidInput, match="whole numbers"):
        TumblingWindow("carrier", size_us, "at", {"n": ("*", "count")})
