"""Keys that users name: each type in Python, as JSON and as a table, and what is no such key."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.model import State
from stateformat.reading import key_table, keys_from_json
from stateformat.states import declare
from tests.stores import flights_store, refused

NOON = datetime.datetime.fromisoformat("2026-11-22T12:00:00.000250")
UTC = datetime.UTC
PAIR = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.binary())])


def keyed(**keys: Any) -> State:
    return declare.value_state("op", "counts", keys=keys, values={"v": pa.int64()})


# Type, the value in Python, JSON texts that mean it.
VALUES: list[tuple[Any, Any, tuple[str, ...]]] = [
    (pa.bool_(), True, ("true",)),
    (pa.int8(), -128, ("-128",)),
    (pa.int64(), 2**63 - 1, ("9223372036854775807",)),
    (pa.float64(), 1.5, ("1.5", "15e-1")),
    (pa.float64(), 2, ("2", "2.0")),
    (pa.float64(), math.inf, ('"Infinity"', "Infinity")),
    (pa.float32(), 0.1, ("0.1",)),
    (pa.string(), "ä\n", ('"ä\\n"',)),
    (pa.binary(), b"\x00\xff", ('"00ff"', '"00FF"')),
    (pa.date32(), datetime.date(2026, 11, 22), ('"2026-11-22"',)),
    (pa.timestamp("us"), NOON, ('"2026-11-22T12:00:00.000250"', '"2026-11-22 12:00:00.00025"')),
    (
        pa.timestamp("us", tz="UTC"),
        NOON.replace(tzinfo=UTC),
        ('"2026-11-22T12:00:00.00025Z"', '"2026-11-22T13:00:00.00025+01:00"'),
    ),
    (pa.decimal128(20, 2), Decimal("12.30"), ('"12.30"', "12.30", "12.3", '"12.3"')),
    (pa.decimal128(20, 2), 12, ("12", '"12"')),
    (PAIR, {"a": 1, "b": None}, ('{"a": 1, "b": null}', '{"k": {"a": 1, "b": null}}')),
    (pa.int32(), None, ("null", "[null]")),
]


@pytest.mark.parametrize(("kind", "value", "texts"), VALUES, ids=lambda item: repr(item)[:30])
def test_a_key_is_the_same_in_python_as_a_table_and_as_json(kind: Any, value: Any, texts: tuple[str, ...]) -> None:
    state = keyed(k=kind)
    wanted = pa.table({"k": pa.array([value], kind)})
    found = key_table(state, {"k": value})
    assert [field.type for field in found.schema] == [kind]
    for same in (found, key_table(state, [{"k": value}]), key_table(state, wanted)):
        assert same.to_pylist() == wanted.to_pylist()
    for text in texts:
        assert keys_from_json(state, text).to_pylist() == wanted.to_pylist()
        assert keys_from_json(state, f"[{text}]", many=True).to_pylist() in (wanted.to_pylist(), [{"k": None}])


def test_json_names_several_columns_by_object_or_array_and_several_keys_in_a_list() -> None:
    state = keyed(user=pa.string(), day=pa.date32())
    one = {"user": "u1", "day": datetime.date(2026, 1, 2)}
    for text in ('{"day": "2026-01-02", "user": "u1"}', '["u1", "2026-01-02"]'):
        assert keys_from_json(state, text).to_pylist() == [one]
        assert keys_from_json(state, f'[{text}, ["u2", null]]', many=True).to_pylist() == [
            one,
            {"user": "u2", "day": None},
        ]
    assert keys_from_json(state, {"user": "u1", "day": "2026-01-02"}).to_pylist() == [one]
    assert keys_from_json(state, "[]", many=True).num_rows == 0
    assert key_table(state, []).schema.names == ["user", "day"]


def test_keys_are_normalized_as_stored_ones_are() -> None:
    found = key_table(keyed(k=pa.float64()), [{"k": -0.0}, {"k": -math.nan}])
    assert found["k"].combine_chunks().buffers()[1].to_pybytes() == np.array([0.0, math.nan]).tobytes()


def test_a_table_of_keys_may_have_types_whose_values_are_kept() -> None:
    found = key_table(keyed(k=pa.int32()), pa.table({"k": pa.array([1, 2], pa.int64())}))
    assert found.schema.field("k").type == pa.int32()
    assert found["k"].to_pylist() == [1, 2]


@pytest.mark.parametrize(
    "keys",
    [
        pl.DataFrame({"k": ["a", None]}),
        pd.DataFrame({"k": ["a", None]}),
        duckdb.sql("from (values ('a'), (null)) t(k)"),
    ],
    ids=["polars", "pandas", "duckdb"],
)
def test_keys_are_tables_of_any_library_that_speaks_arrow(keys: Any) -> None:
    found = key_table(keyed(k=pa.string()), keys)
    assert found.schema == pa.schema([pa.field("k", pa.string())])
    assert found.to_pylist() == [{"k": "a"}, {"k": None}]


LARGE = pa.table({"k": pa.array([2**31], pa.int64())})
# Type, how the key is given, words of the error.
REFUSED: list[tuple[Any, Callable[[State], Any], str]] = [
    (pa.int32(), lambda s: key_table(s, {"k": "7"}), "'k' is int32, and '7' is str; give an integer from -2147483648"),
    (pa.int32(), lambda s: key_table(s, {"k": True}), "'k' is int32, and True is bool"),
    (pa.int32(), lambda s: key_table(s, {"k": 7.0}), "'k' is int32, and 7.0 is float"),
    (pa.int32(), lambda s: key_table(s, {"k": 2**31}), "'k' is int32, and 2147483648 is int; give an integer from"),
    (pa.int32(), lambda s: key_table(s, LARGE), "column 'k' is int64, and not every value of it is a int32"),
    (pa.int32(), lambda s: key_table(s, pa.table({"k": ["7"]})), "column 'k' is string and should be int32"),
    (pa.int32(), lambda s: key_table(s, pa.table({"x": [7]})), "'x' is none of its key columns; it has 'k'"),
    (pa.int32(), lambda s: key_table(s, {"K": 7}), "'K' is none of its key columns"),
    (pa.int32(), lambda s: key_table(s, {"k": 7, "v": 1}), "'v' is none of its key columns"),
    (pa.int32(), lambda s: key_table(s, {}), "the key has no value for key column 'k'"),
    (pa.int32(), lambda s: key_table(s, 7), r"7 is no key; give a value for each of k \(int32\): \{'k': …\}"),  # type: ignore[arg-type]
    (pa.int32(), lambda s: key_table(s, "k"), "'k' is no key"),  # type: ignore[arg-type]
    (pa.int32(), lambda s: key_table(s, pl.Series([7])), "is no key; give a value for each of k"),
    (pa.int32(), lambda s: key_table(s, [7]), "7 is no key"),  # type: ignore[list-item]
    (pa.int32(), lambda s: keys_from_json(s, "1.5"), "'k' is int32, and Decimal..1.5.. is Decimal; give an integer"),
    (
        pa.int32(),
        lambda s: keys_from_json(s, "{k: 1}"),
        'is not JSON .* write text in double quotes: "{k: 1}"$',
    ),
    (pa.int32(), lambda s: keys_from_json(s, "[1, 2]"), "has 2 values; give one for each of k .int32."),
    (pa.int32(), lambda s: keys_from_json(s, '{"k": 1, "k": 2}'), "names a member twice"),
    (pa.int32(), lambda s: keys_from_json(s, '{"u": 1}'), "'u' is none of its key columns"),
    (pa.string(), lambda s: keys_from_json(s, "u17"), "'u17' is not JSON"),
    (pa.string(), lambda s: keys_from_json(s, "17"), "'k' is string, and 17 is int; give text"),
    (pa.string(), lambda s: key_table(s, {"k": "\ud800"}), "'k' is string, and a value is not"),
    (pa.bool_(), lambda s: key_table(s, {"k": 1}), "'k' is bool, and 1 is int; give true or false"),
    (pa.float32(), lambda s: key_table(s, {"k": 1e39}), "give a number that a float holds"),
    (pa.float64(), lambda s: key_table(s, {"k": 2**53 + 1}), "give a number that a double holds exactly"),
    (pa.float64(), lambda s: keys_from_json(s, '"1.5"'), "'k' is double, and '1.5' is str; give a number"),
    (pa.binary(), lambda s: key_table(s, {"k": "00"}), "'k' is binary, and '00' is str; give bytes"),
    (pa.binary(), lambda s: keys_from_json(s, '"0g"'), "'0g' is str; give hexadecimal text"),
    (pa.binary(), lambda s: keys_from_json(s, "7"), "7 is int; give hexadecimal text"),
    (pa.date32(), lambda s: key_table(s, {"k": NOON}), "'k' is date32.day., and datetime.* give a date"),
    (pa.date32(), lambda s: keys_from_json(s, '"2026-13-01"'), 'give a date, like "2026-11-22"'),
    (pa.timestamp("us"), lambda s: key_table(s, {"k": NOON.replace(tzinfo=UTC)}), "give a time without a time zone"),
    (pa.timestamp("us", tz="UTC"), lambda s: keys_from_json(s, '"2026-11-22T12:00:00"'), "a time with a time zone"),
    (pa.timestamp("us"), lambda s: keys_from_json(s, '"2026-11-22T12:00:00.1234567"'), "give a time, like"),
    (pa.decimal128(4, 2), lambda s: key_table(s, {"k": Decimal("1.234")}), "4 digits, 2 of them behind the point"),
    (pa.decimal128(4, 2), lambda s: key_table(s, {"k": 1.5}), "1.5 is float; give a decimal"),
    (pa.decimal128(4, 2), lambda s: keys_from_json(s, '"NaN"'), "4 digits, 2 of them behind the point"),
    (PAIR, lambda s: key_table(s, {"k": {"a": 1}}), "give an object of a, b"),
    (PAIR, lambda s: key_table(s, {"k": {"a": "1", "b": None}}), "give an integer"),
]


@pytest.mark.parametrize(("kind", "call", "words"), REFUSED, ids=lambda item: item if isinstance(item, str) else "")
def test_what_is_no_key_is_refused_with_both_sides(kind: Any, call: Callable[[State], Any], words: str) -> None:
    error = refused(InvalidInput, lambda: call(keyed(k=kind)), words)
    assert "state 'counts' of 'op'" in str(error)


def test_a_state_without_keys_has_no_key() -> None:
    state = declare.union_state("op", "offsets", columns={"v": pa.int64()})
    refused(InvalidInput, lambda: keys_from_json(state, "7"), "it is union and has no keys; read its rows without")


# ---- operators by name ---------------------------------------------------------------------------


def test_an_operator_is_found_by_uid_and_by_name() -> None:
    checkpoint = flights_store("memory://rows-names").open()
    assert checkpoint.operator_uid("delays") == checkpoint.operator_uid("Delays per plane") == "delays"
    wanted = checkpoint.state("delays", "sums").table()
    assert checkpoint.state("Delays per plane", "sums").table().equals(wanted)
    assert checkpoint.read("Delays per plane", "sums").state.operator == "delays"
    words = "checkpoint 2 has no operator 'delay', by uid or by name; did you mean 'delays'. It has planes, "
    for read in (checkpoint.state, checkpoint.read):
        refused(InvalidInput, lambda read=read: read("delay", "sums"), words)  # type: ignore[misc]


@pytest.mark.parametrize("asked", [(None, "sums"), (7, "sums"), ("delays", 7)])
def test_a_state_is_asked_for_by_text(asked: tuple[Any, Any]) -> None:
    checkpoint = flights_store(f"memory://rows-asked-{asked[0]}").open()
    words = f"a state is named by {asked[0]!r} and {asked[1]!r}; give the operator and the state as text"
    refused(InvalidInput, lambda: checkpoint.state(*asked), words, ErrorKind.UNKNOWN_STATE)
