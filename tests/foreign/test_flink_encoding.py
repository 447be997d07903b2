"""Values to Flink's bytes and back: what is written reads as it was, and at the edges it is the
bytes that are known from Flink.
"""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.foreign.byte_strings import from_arrow
from stateformat.backends.foreign.flink.binary_rows import RowData
from stateformat.backends.foreign.flink.compound import (
    Characters,
    Either,
    Enumeration,
    ListOf,
    MapOf,
    MaskedList,
    Nullable,
    Octets,
    Pojo,
    Row,
    Sequential,
)
from stateformat.backends.foreign.flink.lanes import Serializer
from stateformat.backends.foreign.flink.scalars import (
    BigDecimal,
    BigInteger,
    Character,
    LocalDate,
    LocalDateTime,
    LocalTime,
    Milliseconds,
    Moment,
    Number,
    Text,
)
from stateformat.backends.foreign.flink.sql_types import Logical, decimal, list_of, map_of, row, timestamp
from stateformat.backends.foreign.flink.writing.values import encode
from stateformat.errors import InvalidInput, UnsupportedFormat

LONG = Number(">i8", pa.int64(), "Long")
INT = Number(">i4", pa.int32(), "Integer")
SHAPE = Pojo("Shape", ["area"], [LONG])
CIRCLE = Pojo("Circle", ["area", "radius"], [LONG, INT])
SQUARE = Pojo("Square", ["area", "text"], [LONG, Text()])
BIGINT, TEXT = Logical("number", pa.int64(), "<i8"), Logical("text", pa.string())
BYTE, BOOL = Logical("number", pa.int8(), "<i1"), Logical("bool", pa.bool_())


def known(kind: Logical | None) -> Logical:
    assert kind is not None
    return kind


def sql_row(*kinds: Logical | None) -> RowData:
    return RowData(row([f"f{i}" for i in range(len(kinds))], [known(kind) for kind in kinds]))


def sql_rows(*rows: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Rows by position; the last value is the kind."""
    return [{f"f{i}": value for i, value in enumerate(one[:-1])} | {"row_kind": one[-1]} for one in rows]


CASES: dict[str, tuple[Serializer, list[Any]]] = {
    "text": (Text(), ["", None, "a", "x" * 126, "x" * 127, "y" * 20_000, "nul \0", "\u00e9", "\u20ac" * 200, "\U0001f600b"]),
    "string value": (Text(nullable=False), ["", "abc", "\u20ac"]),
    "character": (Character(), ["a", "\u20ac"]),
    "characters": (Characters(), ["", "ab\u20ac", "\U0001f600"]),
    "octets": (Octets(), [b"", b"\0\xff", b"x" * 300]),
    "whole numbers": (BigInteger(), ["0", "1", "10", "-1", "127", "128", "-128", "-129", str(2**200), str(-(2**300)), None, "9" * 5000]),
    "decimal numbers": (BigDecimal(), ["0", "0.00", "1E+3", "-1.50", "1", None, "123456789012345678901234567890.5", "1E-400"]),
    "dates": (LocalDate(), [dt.date(1, 1, 1), dt.date(1970, 1, 1), dt.date(2024, 2, 29), None, dt.date(9999, 12, 31)]),
    "times of day": (LocalTime(), [0, 86_399_999_999_999, None, 3_723_000_000_001]),
    "dates and times": (LocalDateTime(), [{"date": dt.date(2000, 1, 2), "nanos": 5}, None]),
    "milliseconds": (Milliseconds(), [dt.datetime(1969, 1, 1, tzinfo=dt.UTC), None]),
    "instants": (Moment(millis=False), [{"seconds": -5, "nanos": 999_999_999}, None]),
    "SQL timestamps of JDBC": (Moment(millis=True), [{"seconds": -5, "nanos": 123_000_000}, None]),
    "enums": (Enumeration("Colour", ["RED", "GREEN"]), ["GREEN", "RED"]),
    "nullable": (Nullable(LONG, 0), [1, None]),
    "padded": (Nullable(INT, 4), [None, 7]),
    "either": (Either(LONG, Text()), [{"left": 1, "right": None}, {"left": None, "right": "r"}]),
    "lists": (ListOf(ListOf(Text())), [[], [[]], [["a", None], ["b"]]]),
    "arrays": (ListOf(INT, flagged=True), [[1, None], [], [None]]),
    "linked lists": (MaskedList(INT), [[1, None, 3, 4, 5, 6, 7, 8, None], [], [None]]),
    "maps": (MapOf(Text(), LONG), [[("a", 1), ("", None)], []]),
    "maps with null keys": (MapOf(Text(), LONG, nullable_keys=True), [[{"key": None, "value": 1}], []]),
    "tuples": (Sequential(("a", "b"), (LONG, Text())), [{"a": 1, "b": None}]),
    "rows": (Row([LONG, Text()], kinds=True), [{"f0": None, "f1": "x", "row_kind": "-U"}, {"f0": 1, "f1": None, "row_kind": "+I"}]),
    "rows of old": (Row([LONG] * 9, kinds=False), [{f"f{i}": None if i == 8 else i for i in range(9)}]),
    "POJOs": (Pojo("P", ["a", "b"], [LONG, ListOf(Text())]), [{"a": None, "b": ["x"]}, None, {"a": 1, "b": None}]),
    "subclasses": (
        Pojo("Shape", ["area"], [LONG], [("Circle", CIRCLE)], {"Square": SQUARE}),
        [
            {"class": "Shape", "area": 1, "radius": None, "text": None},
            {"class": "Circle", "area": None, "radius": 2, "text": None},
            None,
            {"class": "Square", "area": 3, "radius": None, "text": "t"},
        ],
    ),
    "SQL rows": (
        sql_row(BIGINT, TEXT, decimal(30, 3), timestamp(9), timestamp(3), decimal(10, 2), BOOL, BYTE),
        sql_rows(
            (1, "seven c", Decimal("-1.500"), {"timestamp": 946_684_800_000_001, "nanos": 9}, -315_619_200_000_000, Decimal("1.25"), True, -1, "+I"),
            (None, None, None, None, None, None, None, None, "-D"),
            (-1, "more than seven", Decimal("9" * 27), None, None, Decimal("-0.01"), False, 127, "+U"),
        ),
    ),
    "SQL rows of 70 columns": (sql_row(*[BIGINT] * 70), sql_rows((*[None if i % 3 else i for i in range(70)], "+I"))),
    "nested SQL": (
        sql_row(list_of(BYTE), map_of(TEXT, list_of(TEXT)), row(["f0"], [TEXT])),
        sql_rows(
            ([1, None, 3], [("a longer key", ["x", None, "longer than a word"]), ("", [])], {"f0": "inside of a row"}, "+I"),
            ([], [], None, "+I"),
            (None, None, {"f0": None}, "+I"),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_encoded_is_decoded_as_it_was(name: str) -> None:
    serializer, values = CASES[name]
    array = pa.array(values, serializer.arrow_type)
    for given in (array, array.slice(1), array.slice(0, 0), pa.concat_arrays([array, array])):
        found = encode(serializer, given)
        assert found.type == pa.binary()
        assert found.null_count == 0
        assert serializer.read_all(from_arrow(found)).equals(given)


def test_bytes_are_those_of_flink() -> None:
    def hexes(serializer: Serializer, *values: Any) -> list[str]:
        return [one.hex() for one in encode(serializer, pa.array(values, serializer.arrow_type)).to_pylist()]

    assert hexes(Text(), None, "", "ab", "\u20ac") == ["00", "01", "036162", "02ac41"]
    assert hexes(BigInteger(), None, "0", "10", "128") == ["00000000", "00000001", "00000003", "000000060080"]
    assert hexes(BigDecimal(), "1.28") == ["00000006008000000002"]
    assert hexes(Nullable(INT, 4), None, 1) == ["0100000000", "0000000001"]
    # A group aggregation's key (STRING, INT) of Flink 2.3.
    key = RowData(row(["f0", "f1"], [TEXT, Logical("number", pa.int32(), "<i4")]), as_key=True)
    assert hexes(key, {"f0": "key-3", "f1": 3}) == [
        "00000018" + "00" * 8 + b"key-3".hex() + "000085" + "0300000000000000"
    ]


REFUSED: dict[str, tuple[Serializer, list[Any], str]] = {
    "a null number": (LONG, [1, None], "has no form for null"),
    "a null list": (ListOf(LONG), [None], "has no form for null"),
    "an unknown constant": (Enumeration("Colour", ["RED"]), ["BLUE"], "'BLUE' is no constant of Colour"),
    "an unknown class": (
        Pojo("Shape", ["area"], [LONG], [("Circle", CIRCLE)]),
        [{"class": "Cube", "area": 1, "radius": 1}],
        "class 'Cube', which the state's serializer does not know",
    ),
    "no number": (BigDecimal(), ["1.5", "one"], "'one' is no number as Java writes it"),
    "both of two": (Either(LONG, LONG), [{"left": 1, "right": 1}], "each value has exactly one"),
    "two characters": (Character(), ["ab"], "is one UTF-16 unit"),
    "microseconds": (Milliseconds(), [dt.datetime(2000, 1, 1, microsecond=1, tzinfo=dt.UTC)], "round them first"),
    "a day of 25 hours": (LocalTime(), [90_000_000_000_000], "beyond 24 hours"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_flink_cannot_hold_is_refused(name: str) -> None:
    serializer, values, said = REFUSED[name]
    with pytest.raises(InvalidInput, match=said):
        encode(serializer, pa.array(values, serializer.arrow_type))


def test_a_serializer_that_is_derived_from_a_known_one_is_not_taken_for_it() -> None:
    class Backwards(Text):
        """Not as Flink writes text."""

    with pytest.raises(UnsupportedFormat, match="values of Backwards are read from Flink, and not written"):
        encode(Backwards(), pa.array(["a"]))


def test_many_values_are_encoded_as_each_alone() -> None:
    random = np.random.default_rng(12)
    sizes = random.integers(0, 40, 500)
    letters = np.array(list("ab\u00e9\u20ac\U0001f600\0"))
    texts = ["".join(letters[random.integers(0, len(letters), size)]) for size in sizes]
    serializer = ListOf(Text())
    array = pa.array([texts[i : i + i % 7] for i in range(500)], serializer.arrow_type)
    alone = [encode(serializer, array.slice(i, 1))[0].as_py() for i in range(len(array))]
    assert encode(serializer, array).to_pylist() == alone
