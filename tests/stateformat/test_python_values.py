"""Python values in columns of a declared type: none becomes another one."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.errors import InvalidInput
from stateformat.segments import cast_kept
from stateformat.tables import CONVERSION_ERRORS, from_python, table_from_python

INT, FLOAT = pa.int32(), pa.float32()
PAIR = pa.struct([("a", INT), ("b", pa.string())])
NOON = dt.datetime.fromisoformat("2024-02-29T12:00")
BROKEN = [
    (2.5, INT),
    (Decimal("2.5"), INT),
    (np.float64(2.5), INT),
    (1 << 31, INT),
    (-1, pa.uint8()),
    (1e300, FLOAT),
    (-1e300, FLOAT),
    (1e300, pa.float16()),
    (2049, pa.float16()),
    ((1 << 24) + 1, FLOAT),
    (NOON.replace(microsecond=999), pa.timestamp("ms", "Europe/Berlin")),
    ((1 << 53) + 1, pa.float64()),
    (5.5, pa.timestamp("us")),
    (np.datetime64("2024-02-29T12:00:00.000000001"), pa.timestamp("us")),
    (NOON.replace(microsecond=1), pa.timestamp("ms")),
    (NOON, pa.date32()),
    (dt.time(1, 2, 3, 4), pa.time32("s")),
    (dt.timedelta(microseconds=1), pa.duration("ms")),
    (Decimal("1.234"), pa.decimal128(5, 2)),
    ({"a": 1, "bb": "x"}, PAIR),
    ({"a": 2.5}, PAIR),
    ((2.5, "x"), PAIR),
    ([("a", 2.5), ("b", "x")], PAIR),
    ("ab", pa.list_(pa.string())),
    (b"ab", pa.list_(pa.int64())),
    (2.5, pa.dictionary(pa.int8(), INT)),
]
RIGHT = [
    (2.0, INT, 2),
    (np.int64(3), INT, 3),
    (float("inf"), FLOAT, float("inf")),
    (0.1, FLOAT, float(np.float32(0.1))),
    (7, pa.timestamp("us"), dt.datetime.fromisoformat("1970-01-01T00:00:00.000007")),
    (NOON, pa.timestamp("s"), NOON),
    (NOON.replace(microsecond=999_000), pa.timestamp("ms"), NOON.replace(microsecond=999_000)),
    (1 << 24, FLOAT, float(1 << 24)),
    (NOON.replace(hour=0), pa.date32(), NOON.date()),
    (np.datetime64("2024-02-29"), pa.timestamp("us", None), NOON.replace(hour=0)),
    ({"a": 1}, PAIR, {"a": 1, "b": None}),
    ((1, "x"), PAIR, {"a": 1, "b": "x"}),
    ([("a", 1), ("b", "x")], PAIR, {"a": 1, "b": "x"}),
    (np.array([1.0, 2.0]), pa.list_(INT), [1, 2]),
    (range(3), pa.list_(INT), [0, 1, 2]),
]
NESTS = {
    "alone": (lambda kind: kind, lambda value: value),
    "list": (pa.list_, lambda value: [value, None]),
    "large list": (pa.large_list, lambda value: [None, value]),
    "pair": (lambda kind: pa.list_(kind, 2), lambda value: (value, None)),
    "struct": (lambda kind: pa.struct([("x", kind)]), lambda value: {"x": value}),
    "map": (lambda kind: pa.map_(pa.string(), kind), lambda value: {"k": value}),
    "pairs": (lambda kind: pa.map_(pa.string(), kind), lambda value: [("k", value)]),
    "entries": (lambda kind: pa.map_(pa.string(), kind), lambda value: [{"key": "k", "value": value}]),
}


@pytest.mark.parametrize("inner", NESTS)
@pytest.mark.parametrize("outer", NESTS)
def test_a_value_that_a_type_does_not_hold_is_refused_at_any_depth(outer: str, inner: str) -> None:
    (kind_of, of), (nested_kind, nested) = NESTS[outer], NESTS[inner]
    for value, kind in BROKEN:
        for values in ([value], [None, value]):
            with pytest.raises(CONVERSION_ERRORS):
                from_python([of(nested(one)) for one in values], kind_of(nested_kind(kind)))
    for value, kind, expected in RIGHT:
        # Nested moments are those that Arrow takes; numpy's have no place in a struct.
        if isinstance(value, np.datetime64) and (outer, inner) != ("alone", "alone"):
            continue
        whole = kind_of(nested_kind(kind))
        found = from_python([of(nested(value)), None, of(nested(None))], whole)
        assert found.equals(pa.array([of(nested(expected)), None, of(nested(None))], whole))


def test_what_is_wrong_is_named() -> None:
    for value, kind, said in (
        ([1, 2.5], pa.list_(INT), "2.5 is no int32"),
        ({"a": 1, "bb": 2}, PAIR, "'bb' is no field of struct<a: int32, b: string>"),
        ([1e300], pa.list_(FLOAT), "1e.300 is no float"),
    ):
        with pytest.raises(pa.ArrowInvalid, match=said):
            from_python([value], kind)


def _random_kind(choose: random.Random, depth: int) -> pa.DataType:
    if depth == 0 or choose.random() < 0.3:
        return choose.choice([pa.int8(), pa.int64(), pa.float64(), pa.string(), pa.date32(), pa.timestamp("us")])
    within = [_random_kind(choose, depth - 1) for _ in range(2)]
    return choose.choice(
        [pa.list_(within[0]), pa.map_(pa.int8(), within[0]), pa.struct(list(zip("ab", within, strict=True)))]
    )


def _random_value(choose: random.Random, kind: pa.DataType) -> Any:
    if choose.random() < 0.2:
        return None
    if pa.types.is_struct(kind):
        return {item.name: _random_value(choose, item.type) for item in kind}
    if pa.types.is_map(kind):
        return [(number, _random_value(choose, kind.item_type)) for number in range(choose.randrange(3))]
    if pa.types.is_list(kind):
        return [_random_value(choose, kind.value_type) for _ in range(choose.randrange(3))]
    day = dt.date(2024, 1, 1 + choose.randrange(20))
    of: dict[pa.DataType, Any] = {
        pa.int8(): choose.randrange(-128, 128),
        pa.int64(): choose.randrange(-(1 << 63), 1 << 63),
        pa.float64(): choose.choice([0.5, float("inf"), 1e300]),
        pa.string(): choose.choice(["", "é"]),
        pa.date32(): day,
        pa.timestamp("us"): dt.datetime.combine(day, dt.time(1, 2, 3, choose.randrange(10**6))),
    }
    return of[kind]


@pytest.mark.parametrize("seed", range(30))
def test_what_goes_in_comes_out(seed: int) -> None:
    choose = random.Random(seed)
    kind = _random_kind(choose, 3)
    values = [_random_value(choose, kind) for _ in range(20)]
    assert from_python(values, kind).to_pylist() == values


def test_rows_are_refused_with_their_column() -> None:
    schema = pa.schema([("n", INT), ("s", pa.string())])
    rows: list[dict[str, Any]] = [{"n": 1}, {"s": "x", "n": None}]
    assert table_from_python(iter(rows), schema, "it").to_pylist() == [{"n": 1, "s": None}, {"n": None, "s": "x"}]
    assert table_from_python([], schema, "it") == schema.empty_table()
    with pytest.raises(InvalidInput, match=r"it: column 'n' is int32, and a value is not: 2\.5 is no int32"):
        table_from_python([{"n": 2.5}], schema, "it")
    with pytest.raises(InvalidInput, match=r"it: \['m'\] are no columns; those are \['n', 's'\]"):
        table_from_python([{"m": 1}], schema, "it")


PLUS = pa.struct([("a", pa.float64()), ("b", pa.string())])


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array([1.0, None, 1e300]), FLOAT),
        (pa.chunked_array([[[1.0], None], [[2.0, -1e300]]]), pa.list_(FLOAT)),
        (pa.array([[("a", 1e300)], None], pa.map_(pa.string(), pa.float64())), pa.map_(pa.string(), FLOAT)),
        (pa.array([{"a": 1, "bb": "x"}]), PLUS),
        (pa.array([1, None], pa.timestamp("us")), pa.date32()),
        (pa.array([86_400_000_001], pa.timestamp("us")), pa.time64("us")),
        (pa.array([1 << 62], pa.timestamp("us")), pa.date32()),
        (pa.array([0.16]), pa.decimal128(5, 1)),
        (pa.array([5]), pa.bool_()),
        (pa.array(["07"]), pa.int64()),
        (pa.array([2.5]), pa.int64()),
        (pa.array([Decimal("1.26")]), pa.decimal128(5, 1)),
    ],
    ids=str,
)
def test_a_cast_that_would_change_a_value_is_refused(column: Any, kind: pa.DataType) -> None:
    with pytest.raises(pa.ArrowException):
        cast_kept(column, kind)


@pytest.mark.parametrize(
    ("column", "kind", "wanted"),
    [
        (pa.array([0.5, None, float("inf"), -0.0]), FLOAT, [0.5, None, float("inf"), -0.0]),
        (pa.array([0.1]), FLOAT, [float(np.float32(0.1))]),
        (pa.chunked_array([[1], [None]], pa.int64()), pa.float64(), [1.0, None]),
        (pa.array([{"a": 1}, None]), PLUS, [{"a": 1.0, "b": None}, None]),
        (pa.array([[1, 2], None, []], pa.list_(pa.int64()))[1:], pa.list_(FLOAT), [None, []]),
        (pa.array([86_400_000_000, None], pa.timestamp("us")), pa.date32(), [dt.date(1970, 1, 2), None]),
        (pa.array([True, None]), pa.int64(), [1, None]),
        (pa.array(["7"]), pa.int64(), [7]),
        (pa.array([None]), PLUS, [None]),
    ],
    ids=str,
)
def test_a_cast_that_keeps_every_value_is_made(column: Any, kind: pa.DataType, wanted: list[Any]) -> None:
    made = cast_kept(column, kind)
    assert (made.type, made.to_pylist()) == (kind, wanted)
