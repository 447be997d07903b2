"""Rows in segment order, compared with Python's own stable sort."""

from __future__ import annotations

import datetime
import decimal
import random
import threading
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st

from stateformat.schema import KEY_GROUP
from stateformat.segments import Clustered, clustered, groups_of_keys, sort as clustering
from stateformat.segments.row_groups import stop_batches
from stateformat.segments.sort import group_counts, is_ascending
from stateformat.states import declare

STATE = declare.value_state("op", "counts", keys={"k": pa.int64()}, values={"v": pa.int64()})
FLIGHT = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()}, keys={"k": pa.int64()})
REBALANCED = declare.in_flight_state("op", "flight", edge="e", columns={"v": pa.int64()})

EPOCH = datetime.datetime(2000, 1, 1)  # noqa: DTZ001 - the type has no time zone
TYPES: dict[str, tuple[Any, Any]] = {
    "int8": (pa.int8(), lambda n: n % 256 - 128),
    "int16": (pa.int16(), lambda n: n % 60_000 - 30_000),
    "int32": (pa.int32(), lambda n: n * 31),
    "int64": (pa.int64(), lambda n: n << 30),
    "float": (pa.float32(), lambda n: n / 2),
    "double": (pa.float64(), lambda n: n / 3),
    "bool": (pa.bool_(), lambda n: n % 3 == 0),
    "date32": (pa.date32(), lambda n: datetime.date(1970, 1, 1) + datetime.timedelta(days=n % 9999)),
    "timestamp": (pa.timestamp("us"), lambda n: EPOCH + datetime.timedelta(microseconds=n)),
    "decimal": (pa.decimal128(38, 2), lambda n: decimal.Decimal(n * 10**20) / 100),
    "utf8": (pa.string(), lambda n: f"row {n}" * (n % 4)),
    "binary": (pa.binary(), lambda n: bytes([n % 256]) * (n % 5)),
    "struct": (pa.struct([("a", pa.int64()), ("b", pa.string())]), lambda n: {"a": n, "b": str(n) if n % 2 else None}),
    "list": (pa.list_(pa.int32()), lambda n: list(range(n % 4))),
    "map": (pa.map_(pa.string(), pa.int64()), lambda n: [(str(n), n)]),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that few rows are many chunks, with short runs and long ones."""
    monkeypatch.setattr(clustering, "CHUNK_ROWS", 64)
    monkeypatch.setattr(clustering, "_RUN_ROWS_MIN", 4)


def column(name: str, rows: int, *, nulls: bool, chunks: int) -> pa.ChunkedArray:
    """Values of a type, cut into chunks that begin in the middle of their buffers."""
    kind, make = TYPES[name]
    values = [None if nulls and number % 5 == 2 else make(number) for number in range(rows)]
    whole = pa.array([make(7), make(8), make(9), *values, make(7)], kind).slice(3, rows)
    bounds = [rows * chunk // chunks for chunk in range(chunks + 1)]
    return pa.chunked_array([whole.slice(low, high - low) for low, high in pairwise(bounds)], type=kind)


def skewed(rows: int, group_count: int, seed: int = 1) -> np.ndarray[Any, Any]:
    """Groups of all sizes: one has half of the rows, and many have one row or none."""
    draw = random.Random(seed)
    groups = [draw.randrange(group_count) if draw.random() < 0.5 else group_count // 3 for _ in range(rows)]
    return np.array(groups, np.int32)


def expected(table: pa.Table, groups: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    rows = [{"_key_group": group, **row} for group, row in zip(groups.tolist(), table.to_pylist(), strict=True)]
    return sorted(rows, key=lambda row: row["_key_group"])


def check(table: pa.Table, groups: np.ndarray[Any, Any], step: int = 50) -> None:
    """Whole, and in slices that begin and end anywhere, the rows are those of a stable sort."""
    due = expected(table, groups)
    found, counts = clustered(table, STATE, groups)
    assert found.slice(0, len(table)).to_pylist() == due
    assert Counter(groups.tolist()) == {group: count for group, count in enumerate(counts.tolist()) if count}
    for start in range(0, len(table), step):
        part = found.slice(start, min(step, len(table) - start))
        part.validate(full=True)
        assert part.to_pylist() == due[start : start + step]


@pytest.mark.parametrize("chunks", [1, 7])
@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_ordered_as_a_stable_sort_orders_it(name: str, nulls: bool, chunks: int) -> None:
    values = column(name, 300, nulls=nulls, chunks=chunks)
    check(pa.table({"k": column("int64", 300, nulls=False, chunks=1), "v": values}), skewed(300, 128))


@pytest.mark.parametrize("group_count", [1, 2, 7, 128, 5000, 32768])
def test_any_number_of_groups_is_ordered(group_count: int) -> None:
    names = ("int64", "utf8", "double")
    table = pa.table({name: column(name, 1000, nulls=name == "double", chunks=3) for name in names})
    before = threading.active_count()
    check(table, skewed(1000, group_count), step=333)
    check(table, np.arange(1000, dtype=np.int32)[::-1] % group_count, step=90)
    assert threading.active_count() == before, "a thread is left"


@pytest.mark.parametrize("rows", [1, 2, 63, 64, 65, 127, 128, 129, 192, 193])
def test_sizes_around_chunks_are_ordered(rows: int) -> None:
    table = pa.table({name: column(name, rows, nulls=False, chunks=1) for name in ("int32", "int16", "binary")})
    for group_count in (1, 3, 40):
        check(table, skewed(rows, group_count, seed=rows), step=17)


def test_columns_beyond_what_is_copied_are_taken_by_number() -> None:
    names = ["int64", "decimal", "int8", "timestamp", "bool", "int32"]
    table = pa.table({f"{i} {name}": column(name, 400, nulls=i % 2 == 1, chunks=i + 1) for i, name in enumerate(names)})
    check(table, skewed(400, 30))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_any_table_is_ordered_as_a_stable_sort_orders_it(data: Any) -> None:
    rows = data.draw(st.integers(1, 300), label="rows")
    names = data.draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=4), label="types")
    columns = [
        column(name, rows, nulls=data.draw(st.booleans()), chunks=data.draw(st.integers(1, 5))) for name in names
    ]
    group_count = data.draw(st.sampled_from([1, 2, 7, 128, 32768]), label="groups")
    groups = skewed(rows, group_count, data.draw(st.integers(0, 9)))
    check(pa.table(columns, [str(i) for i in range(len(names))]), groups, step=data.draw(st.integers(1, 100)))


def test_chosen_rows_keep_the_order_in_which_they_are_chosen() -> None:
    table = pa.table({name: column(name, 300, nulls=False, chunks=4) for name in ("int64", "utf8")})
    rows = np.array(random.Random(3).sample(range(300), 200))
    groups = skewed(200, 9)
    found = Clustered(table, groups, rows, key_group=KEY_GROUP)
    assert len(found) == 200
    assert found.slice(0, 200).to_pylist() == expected(table.take(pa.array(rows)), groups)
    assert Clustered(table, groups[:0], rows[:0], key_group=KEY_GROUP).slice(0, 0).to_pylist() == []


@pytest.mark.parametrize("state", [FLIGHT, REBALANCED])
def test_rows_in_flight_are_ordered_by_group_sender_and_sequence(state: Any) -> None:
    draw = random.Random(5)
    rows = [(draw.randrange(4), draw.randrange(1000), number) for number in range(400)]
    sender, seq, v = (pa.array(values) for values in zip(*rows, strict=True))
    table = pa.table({"_sender": sender.cast(pa.int32()), "_seq": seq, "v": v})
    groups = skewed(400, 12) if state is FLIGHT else table["_sender"].to_numpy()
    found, counts = clustered(table, state, groups)
    due = sorted(zip(groups.tolist(), rows, strict=True))
    part = found.slice(0, 400)
    assert [tuple(row.values()) for row in part.select(["_sender", "_seq", "v"]).to_pylist()] == [r for _, r in due]
    assert part.column_names == ([KEY_GROUP.name] if state is FLIGHT else []) + ["_sender", "_seq", "v"]
    assert part[0].to_pylist() == [group for group, _ in due]
    assert counts.tolist() == [Counter(groups.tolist())[group] for group in range(int(groups.max()) + 1)]
    again, _ = clustered(part, state, np.array([group for group, _ in due], np.int32))
    assert isinstance(again, pa.Table)


def test_rows_in_order_are_not_copied() -> None:
    table = pa.table({"k": pa.array(range(200)), "v": pa.array(range(200))})
    found, counts = clustered(table, STATE, np.arange(200, dtype=np.int32) // 70)
    assert isinstance(found, pa.Table)
    assert found["v"].chunk(0).buffers()[1].address == table["v"].chunk(0).buffers()[1].address
    assert counts.tolist() == [70, 70, 60]


@pytest.mark.parametrize("rows", [0, 1, 2, 65_535, 65_536, 65_537, 200_000])
def test_order_and_counts_are_right_around_the_length_of_a_pass(rows: int) -> None:
    numbers = np.arange(rows, dtype=np.int32) // 3
    assert is_ascending(numbers)
    assert group_counts(numbers).tolist() == [min(3, rows - 3 * group) for group in range(-(-rows // 3))]
    for at in {1, rows // 2, 65_535, 65_536, rows - 1}:
        if 3 <= at < rows:
            fallen = numbers.copy()
            fallen[at] = 0
            assert not is_ascending(fallen)
            assert group_counts(fallen)[0] == 4


def test_keys_are_hashed_in_chunks_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [column("utf8", 1000, nulls=True, chunks=3), column("int64", 1000, nulls=False, chunks=1)]
    found = groups_of_keys(keys, 1000, "spark-murmur3-seed42")
    monkeypatch.setattr(clustering, "CHUNK_ROWS", 10_000)
    assert found.tolist() == groups_of_keys(keys, 1000, "spark-murmur3-seed42").tolist()
    assert len(set(found.tolist())) > 500


def test_stops_are_cut_into_spans_that_overlap_in_one() -> None:
    assert list(stop_batches([0, 5, 9, 30, 31, 32], 10)) == [[0, 5, 9, 30], [30, 31, 32]]
    assert list(stop_batches([0, 5], 1)) == [[0, 5]]
    assert list(stop_batches([0, 5, 9, 30], 1)) == [[0, 5], [5, 9], [9, 30]]
