"""Rows of every type and nesting decode to the values that were encoded, and broken ones to valid
arrays or to an error that says what is wrong.
"""

from __future__ import annotations

import contextlib
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings, strategies as st
from spark_rows import Type, array_of, as_decimal, encode_row, map_of, struct_of

from stateformat.backends.foreign.byte_strings import ByteStrings
from stateformat.backends.foreign.spark.schemas import parse_struct
from stateformat.backends.foreign.spark.unsafe_row import decode_rows
from stateformat.errors import DamagedCheckpoint, UnsupportedFormat

INT64 = st.integers(-(2**63), 2**63 - 1)


def decimals(digits: int, scale: int) -> st.SearchStrategy[Any]:
    return st.integers(-(10**digits) + 1, 10**digits - 1).map(lambda unscaled: as_decimal(unscaled, scale))


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "boolean": st.booleans(),
    "byte": st.integers(-128, 127),
    "short": st.integers(-(2**15), 2**15 - 1),
    "integer": st.integers(-(2**31), 2**31 - 1),
    "long": INT64,
    "float": st.floats(width=32),
    "double": st.floats(),
    "string": st.text(max_size=20),
    "binary": st.binary(max_size=20),
    "date": st.integers(-(2**31), 2**31 - 1),
    "timestamp": INT64,
    "timestamp_ntz": INT64,
    "interval year to month": st.integers(-(2**31), 2**31 - 1),
    "interval day to second": INT64,
    "interval": st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(-(2**31), 2**31 - 1), INT64),
    "decimal(9,2)": decimals(9, 2),
    "decimal(18,0)": decimals(18, 0),
    "decimal(19,4)": decimals(19, 4),
    "decimal(38,38)": decimals(38, 38),
}


def types(depth: int) -> st.SearchStrategy[Type]:
    plain = st.sampled_from(list(VALUES))
    if not depth:
        return plain
    inner = types(depth - 1)
    structs = st.lists(inner, min_size=1, max_size=4).map(
        lambda kinds: struct_of(*((f"f{index}", kind) for index, kind in enumerate(kinds)))
    )
    return st.one_of(plain, structs, inner.map(array_of), st.builds(map_of, plain, inner))


def values(kind: Type, null: bool = True) -> st.SearchStrategy[Any]:
    if isinstance(kind, str):
        found = VALUES[kind]
    elif kind["type"] == "struct":
        found = st.tuples(*(values(field["type"]) for field in kind["fields"])).map(list)
    elif kind["type"] == "array":
        found = st.lists(values(kind["elementType"]), max_size=4)
    else:
        pair = st.tuples(values(kind["keyType"], null=False), values(kind["valueType"]))
        found = st.lists(pair, max_size=3)
    return st.one_of(found, st.none()) if null else found


def comparable(value: Any, kind: Type) -> Any:
    """An encoded value as ``simple`` gives what is decoded."""
    if value is None:
        return None
    if kind == "interval":
        return list(value)
    if isinstance(kind, str):
        return "NaN" if isinstance(value, float) and math.isnan(value) else value
    if kind["type"] == "struct":
        return [comparable(item, field["type"]) for item, field in zip(value, kind["fields"], strict=True)]
    if kind["type"] == "array":
        return [comparable(item, kind["elementType"]) for item in value]
    return [[comparable(k, kind["keyType"]), comparable(v, kind["valueType"])] for k, v in value]


def simple(column: pa.Array) -> list[Any]:
    """Decoded values: structs as lists, maps as lists of pairs, times as integers."""
    kind = column.type
    if pa.types.is_timestamp(kind):
        return column.cast(pa.int64()).to_pylist()
    if pa.types.is_date(kind):
        return column.cast(pa.int32()).to_pylist()
    if pa.types.is_struct(kind):
        fields = [simple(field) for field in column.flatten()]
        found: list[Any] = [list(row) for row in zip(*fields, strict=True)]
    elif pa.types.is_map(kind):
        pairs = [list(pair) for pair in zip(simple(column.keys), simple(column.items), strict=True)]
        found = _cut(pairs, column.offsets)
    elif pa.types.is_list(kind):
        found = _cut(simple(column.values), column.offsets)
    else:
        found = ["NaN" if isinstance(v, float) and math.isnan(v) else v for v in column.to_pylist()]
    return [value if valid else None for value, valid in zip(found, column.is_valid().to_pylist(), strict=True)]


def _cut(items: list[Any], offsets: pa.Array) -> list[Any]:
    bounds = offsets.to_pylist()
    return [items[first:last] for first, last in pairwise(bounds)]


def strings(rows: list[bytes], gap: bytes = b"") -> ByteStrings:
    lengths = np.array([len(row) for row in rows], np.int64)
    starts = np.cumsum(lengths + len(gap)) - lengths
    return ByteStrings(np.frombuffer(b"".join(gap + row for row in rows) + b"\x00", np.uint8), starts, lengths)


def decode(kinds: list[Type], rows: list[bytes], gap: bytes = b"") -> list[pa.Array]:
    fields = parse_struct(json.dumps(struct_of(*((f"c{i}", kind) for i, kind in enumerate(kinds)))), "schema")
    found = decode_rows(strings(rows, gap), fields, "7.delta")
    for column, item in zip(found, fields, strict=True):
        column.validate(full=True)
        assert column.type == item.type.arrow
        assert len(column) == len(rows)
    return found


@st.composite
def tables(draw: st.DrawFn, depth: int = 2) -> tuple[list[Type], list[list[Any]]]:
    kinds = draw(st.lists(types(depth), min_size=1, max_size=4))
    row = st.tuples(*(values(kind) for kind in kinds)).map(list)
    return kinds, draw(st.lists(row, min_size=1, max_size=5))


@given(tables(), st.sampled_from([b"", b"\x07\x07\x07\x07", b"\x00"]))
@settings(max_examples=250, deadline=None)
def test_rows_decode_to_what_was_encoded(table: tuple[list[Type], list[list[Any]]], gap: bytes) -> None:
    kinds, rows = table
    found = decode(kinds, [encode_row(row, kinds) for row in rows], gap)
    for index, (kind, column) in enumerate(zip(kinds, found, strict=True)):
        assert simple(column) == [comparable(row[index], kind) for row in rows]


@given(tables(depth=1), st.data())
@settings(max_examples=250, deadline=None)
def test_a_row_with_a_wrong_byte_is_some_row_or_an_error(
    table: tuple[list[Type], list[list[Any]]], data: st.DataObject
) -> None:
    kinds, rows = table
    encoded = [encode_row(row, kinds) for row in rows]
    broken = bytearray(encoded[0])
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.sampled_from([0, 1, 7, 8, 127, 128, 255]))
    if data.draw(st.booleans()):
        broken = broken[: data.draw(st.integers(0, len(broken)))]
    with contextlib.suppress(DamagedCheckpoint):
        decode(kinds, [bytes(broken), *encoded[1:]])


def test_more_than_64_fields_have_two_words_of_null_bits() -> None:
    kinds = ["integer"] * 130
    rows = [[None if (index + row) % 3 == 0 else index for index in range(130)] for row in range(4)]
    found = decode(kinds, [encode_row(row, kinds) for row in rows])
    assert [list(row) for row in zip(*(column.to_pylist() for column in found), strict=True)] == rows


def test_a_row_of_no_fields_and_no_rows_at_all() -> None:
    assert decode([], [b""]) == []
    assert [len(column) for column in decode(["long", array_of("string")], [])] == [0, 0]


def test_void_has_no_values_and_takes_its_word() -> None:
    fields = parse_struct(json.dumps(struct_of(("nothing", "void"), ("n", "long"))), "schema")
    rows = strings([encode_row([None, 5], ["long", "long"])])
    assert [column.to_pylist() for column in decode_rows(rows, fields, "x")] == [[None], [5]]


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("long", bytes(8), "has 8 bytes, and 1 fields take 16"),
        ("string", bytes(8) + (16 << 32 | 9).to_bytes(8, "little") + bytes(8), "points to 9 bytes at 16, and has 24"),
        ("string", bytes(8) + (16 << 32 | 1).to_bytes(8, "little") + b"\xff" + bytes(7), "not UTF-8"),
        ("decimal(3,0)", bytes(8) + (1000).to_bytes(8, "little"), "more than 3 digits"),
        ("decimal(20,0)", bytes(8) + (16 << 32 | 17).to_bytes(8, "little") + bytes(24), "more than 16"),
        ("decimal(20,0)", bytes(8) + (16 << 32).to_bytes(8, "little") + bytes(16), "no bytes"),
        (array_of("long"), bytes(8) + (16 << 32 | 8).to_bytes(8, "little") + b"\xff" * 8, "more items"),
        (array_of("long"), bytes(8) + (16 << 32 | 8).to_bytes(8, "little") + (9).to_bytes(8, "little"), "more items"),
        (array_of("long"), bytes(8) + (16 << 32 | 4).to_bytes(8, "little") + bytes(8), "less than the 8"),
        (map_of("long", "long"), bytes(8) + (16 << 32 | 8).to_bytes(8, "little") + b"\x09" + bytes(7), "more bytes"),
        (struct_of(("a", "long")), bytes(8) + (16 << 32 | 8).to_bytes(8, "little") + bytes(8), "has 8 bytes"),
        ("interval", bytes(8) + (16 << 32 | 8).to_bytes(8, "little") + bytes(8), "an interval of 8 bytes"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(kind: Type, row: bytes, message: str) -> None:
    with pytest.raises(DamagedCheckpoint, match=message):
        decode([kind], [row])


def test_arrays_that_all_point_to_one_place_take_no_memory() -> None:
    # 4,000 items that each claim the same 32 KiB would be 131 MB of text.
    count = 4000
    head = count.to_bytes(8, "little") + bytes(8 * ((count + 63) // 64))
    size = len(head) + 8 * count + 32_768
    word = ((size - 32_768) << 32 | 32_768).to_bytes(8, "little")
    array = head + word * count + b"x" * 32_768
    row = bytes(8) + (16 << 32 | len(array)).to_bytes(8, "little") + array
    with pytest.raises(DamagedCheckpoint, match="lie over one another"):
        decode([array_of("string")], [row])


@pytest.mark.parametrize("kind", ["geometry", "decimal(39,0)", {"type": "cube"}, {"type": "struct", "fields": 3}, 7])
def test_a_type_that_is_not_known_is_named(kind: Type) -> None:
    with pytest.raises((UnsupportedFormat, DamagedCheckpoint), match="schema"):
        parse_struct(json.dumps(struct_of(("a", kind))), "schema")


def test_a_type_nested_without_end_is_refused() -> None:
    kind: Type = "long"
    for _ in range(60):
        kind = array_of(kind)
    with pytest.raises(UnsupportedFormat, match="nested deeper"):
        parse_struct(json.dumps(struct_of(("a", kind))), "schema")
