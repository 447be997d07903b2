"""What tests of running state share: key types with their edge cases, keys as text, hashes made
weak.

Keys are compared as text, so null, NaN and zero are told apart as SPEC.md section 5.3 says, and by
no code under test.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.state import (
    KeyedValue,
    TimerSet,
    columns as parts_module,
    keyed_collections as chains_module,
    rows as store_module,
    timers as timers_module,
)
from stateformat.backends.state.index import hash_raws
from stateformat.graph import Operator, OperatorId
from stateformat.states import declare

OPERATOR = Operator(OperatorId("op"), 1, 128)
INT = {"k": pa.int64()}
INT_VALUE = {"n": pa.int64()}
DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12)  # noqa: DTZ001 - the type has no time zone

POOLS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "bool": (pa.bool_(), [None, True, False]),
    "int8": (pa.int8(), [None, 0, 1, -1, 127, -128]),
    "int16": (pa.int16(), [None, 0, 1, -1, 2**15 - 1, -(2**15)]),
    "int32": (pa.int32(), [None, 0, 1, -1, 2**31 - 1, -(2**31)]),
    "int64": (pa.int64(), [None, *range(-20, 20), 2**63 - 1, -(2**63)]),
    "date32": (pa.date32(), [None, DAY, datetime.date(1969, 12, 31), datetime.date(1970, 1, 1)]),
    "timestamp": (pa.timestamp("us"), [None, NOON, NOON + datetime.timedelta(microseconds=1)]),
    "float": (pa.float32(), [None, 0.0, -0.0, math.nan, -math.nan, 1.5, math.inf, -math.inf]),
    "double": (pa.float64(), [None, 0.0, -0.0, math.nan, -math.nan, 1.5, math.inf, -math.inf]),
    "utf8": (pa.string(), [None, "", "a", "b", "ab", "äöü", "a much longer string than the others"]),
    "binary": (pa.binary(), [None, b"", b"\0", b"\0\0", b"\xff", b"a"]),
    "decimal": (pa.decimal128(10, 2), [None, *map(decimal.Decimal, ("0.00", "1.50", "-1.50", "99999999.99"))]),
    "decimal38": (pa.decimal128(38, 0), [None, *map(decimal.Decimal, (0, 1, 2**64, 2**64 + 1, -(2**64), -1))]),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string()), ("d", pa.float64())]))]),
        [
            None,
            {"a": None, "b": None},
            {"a": None, "b": {"c": None, "d": None}},
            {"a": 1, "b": {"c": "", "d": -0.0}},
            {"a": 1, "b": {"c": "", "d": 0.0}},
            {"a": 1, "b": {"c": None, "d": math.nan}},
        ],
    ),
}


def spelt(value: Any) -> str:
    """A key value as text: equal exactly for keys that are the same."""
    if isinstance(value, float):
        return "nan" if math.isnan(value) else repr(value + 0.0)
    if isinstance(value, list):
        return ",".join(map(spelt, value))
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{spelt(part)}" for name, part in value.items()) + "}"
    return repr(value)


def batch(**columns: tuple[pa.DataType, list[Any]]) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(values, kind) for name, (kind, values) in columns.items()})


def ints(**columns: list[Any]) -> pa.RecordBatch:
    return batch(**{name: (pa.int64(), values) for name, values in columns.items()})


def value_of(values: Any = INT_VALUE, keys: Any = INT) -> KeyedValue:
    return KeyedValue(OPERATOR, declare.value_state("op", "v", keys=keys, values=values))


def timers_of(values: Any = ()) -> TimerSet:
    return TimerSet(OPERATOR, declare.timers("op", "t", keys=INT, values=dict(values)))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holes are closed, arenas squeezed and horizons set as if stores were large."""
    monkeypatch.setattr(store_module, "HOLES_MIN", 3)
    monkeypatch.setattr(parts_module, "_SQUEEZE_ROWS_MIN", 3)
    monkeypatch.setattr(parts_module, "_ARRAYS_MAX", 2)
    monkeypatch.setattr(timers_module, "_NEAR_MIN", 3)
    monkeypatch.setattr(timers_module, "_NEAR_SHARE", 4)


@pytest.fixture(params=[0, 4096], ids=["chains are walked", "elements are looked at"])
def walked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements of keys are found in one way or the other, whatever is cheaper."""
    monkeypatch.setattr(chains_module, "_STEP_ELEMENTS", request.param)


WEAK: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "strong": lambda hashes: hashes,
    "four hashes": lambda hashes: hashes & np.uint64(3 << 62),
    "one hash at the end of the table": lambda hashes: hashes | np.uint64(2**64 - 1),
    "places collide and tags do not": lambda hashes: hashes & np.uint64(0x7FFFFFFF),
}


@pytest.fixture(params=WEAK)
def weakened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash of the index made as weak as it can be: keys are told apart by what they are."""
    weak = WEAK[request.param]
    monkeypatch.setattr(store_module, "hash_raws", lambda raws, rows: weak(hash_raws(raws, rows)))
