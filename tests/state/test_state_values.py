"""The running state of a subtask against dictionaries: every key type, random histories, hashes that collide.

The oracle keeps Python values under a key written as text, so that null, NaN and zero are told apart as SPEC.md section 5.3
says and by nothing that the code under test does.
"""

from __future__ import annotations

import datetime
import decimal
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.state import (
    Entries,
    KeyedList,
    KeyedMap,
    KeyedValue,
    TimerSet,
    columns as parts_module,
    element_lists as chains_module,
    index as index_module,
    rows as store_module,
    timers as timers_module,
)
from stateformat.backends.state.index import SlotIndex, hash_raws
from stateformat.errors import InvalidInput, InvalidState
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


VALUES = {
    "n": pa.int64(),
    "s": pa.string(),
    "l": pa.list_(pa.int32()),
    "t": pa.struct([("x", pa.bool_()), ("y", pa.map_(pa.string(), pa.int8()))]),
}


def some_values(chance: random.Random, rows: int) -> list[dict[str, Any]]:
    return [
        {
            "n": chance.choice([None, 0, chance.randrange(-99, 99)]),
            "s": chance.choice([None, "", "x" * chance.randrange(9)]),
            "l": chance.choice([None, [], [1, None], [chance.randrange(9)]]),
            "t": chance.choice([None, {"x": None, "y": None}, {"x": True, "y": [("a", 1), ("b", None)]}]),
        }
        for _ in range(rows)
    ]


def pick_keys(chance: random.Random, pools: list[list[Any]], rows: int) -> list[tuple[Any, ...]]:
    return [tuple(chance.choice(pool) for pool in pools) for _ in range(rows)]


def key_batch(kinds: list[pa.DataType], keys: list[tuple[Any, ...]]) -> pa.RecordBatch:
    """Keys as a batch that is a slice of a longer one, as batches often are."""
    columns = [pa.array([None, *(key[i] for key in keys), None], kind) for i, kind in enumerate(kinds)]
    return pa.RecordBatch.from_arrays(columns, [f"k{i}" for i in range(len(kinds))]).slice(1, len(keys))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "names", [*([name] for name in POOLS), ["utf8", "int64"], ["bool", "struct", "date32"]], ids="+".join
)
def test_a_value_state_is_a_dictionary_of_its_keys(names: list[str]) -> None:
    kinds, pools = [POOLS[name][0] for name in names], [POOLS[name][1] for name in names]
    kept, oracle = value_of(VALUES, {f"k{i}": kind for i, kind in enumerate(kinds)}), {}
    chance = random.Random("+".join(names))
    for _ in range(60):
        keys = pick_keys(chance, pools, chance.randrange(12))
        rows = some_values(chance, len(keys))
        if chance.random() < 0.6:
            kept.put(key_batch(kinds, keys), pa.RecordBatch.from_pylist(rows, pa.schema(list(VALUES.items()))))
            for key, row in zip(keys, rows, strict=True):
                oracle[spelt(list(key))] = row
        else:
            kept.delete(key_batch(kinds, keys))
            for key in keys:
                oracle.pop(spelt(list(key)), None)
        asked = pick_keys(chance, pools, 10)
        values, found = kept.get(key_batch(kinds, asked))
        wanted = [oracle.get(spelt(list(key))) for key in asked]
        assert found.tolist() == [row is not None for row in wanted]
        assert values.to_pylist() == [row or dict.fromkeys(VALUES) for row in wanted]
        assert values.validate(full=True) is None
        assert len(kept) == len(oracle)
    # A dictionary keeps the order in which keys came, and so does the state.
    assert [{name: row[name] for name in VALUES} for row in kept.rows().to_pylist()] == [*oracle.values()]


@pytest.mark.usefixtures("impatient", "weakened")
def test_keys_whose_hashes_collide_are_told_apart() -> None:
    kept, oracle = value_of(INT_VALUE, {"a": pa.int64(), "b": pa.string()}), {}
    chance = random.Random(5)
    for step in range(80):
        keys = [(chance.randrange(12), chance.choice("uvwxyz")) for _ in range(chance.randrange(30))]
        columns = batch(a=(pa.int64(), [a for a, _ in keys]), b=(pa.string(), [b for _, b in keys]))
        if step % 3 == 2:
            kept.delete(columns)
            for key in keys:
                oracle.pop(key, None)
        else:
            kept.put(columns, ints(n=[step * 100 + i for i in range(len(keys))]))
            oracle |= {key: step * 100 + i for i, key in enumerate(keys)}
        assert [((row["a"], row["b"]), row["n"]) for row in kept.rows().to_pylist()] == [*oracle.items()]


def test_a_full_table_whose_hashes_are_all_the_last_one_wraps_around() -> None:
    index, hashes = SlotIndex(), np.full(700, 2**64 - 1, np.uint64)
    index.build(hashes, np.arange(700), more=1)
    asked = np.array([0, 350, 699])
    found = index.find(hashes[:3], lambda slots, rows: slots == asked[slice(None) if rows is None else rows])
    assert found.tolist() == [0, 350, 699]
    index.remove(hashes[:1], np.array([350]))
    found = index.find(hashes[:3], lambda slots, rows: slots == asked[slice(None) if rows is None else rows])
    assert found.tolist() == [0, -1, 699]


def test_many_keys_come_and_go_and_the_memory_of_the_dead_is_given_back() -> None:
    kept = value_of({"s": pa.string()})
    for start in range(0, 200_000, 10_000):
        keys = np.arange(start, start + 10_000)
        kept.put(pa.record_batch({"k": keys}), pa.record_batch({"s": [str(key) for key in keys]}))
        kept.delete(pa.record_batch({"k": keys - 20_000}))
    assert len(kept) == 20_000
    assert kept.rows()["k"].to_pylist() == [*range(180_000, 200_000)]
    assert kept.rows()["s"].to_pylist() == [str(key) for key in range(180_000, 200_000)]
    assert kept._store.capacity <= 131_072


def test_what_lies_under_a_null_is_no_part_of_a_key() -> None:
    state = declare.value_state(
        "op", "v", keys={"a": pa.int64(), "b": pa.struct([("c", pa.int64())])}, values=INT_VALUE
    )
    kept = KeyedValue(OPERATOR, state)
    for number in range(3):
        garbage = [None, pa.py_buffer(np.array([number, number]))]
        under = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\0"), garbage[1]])
        inside = pa.Array.from_buffers(pa.int64(), 2, garbage)
        struct = pa.Array.from_buffers(pa.struct([("c", pa.int64())]), 2, [pa.py_buffer(b"\0")], children=[inside])
        kept.put(pa.record_batch({"a": under, "b": struct}), ints(n=[number, number]))
    assert kept.rows().to_pylist() == [{"a": None, "b": None, "n": 2}]


def test_strings_and_lists_that_are_overwritten_do_not_pile_up() -> None:
    kept = value_of({"s": pa.string(), "l": pa.list_(pa.int64())})
    keys = ints(k=[*range(100)])
    for number in range(100):
        kept.put(keys, pa.record_batch({"s": [f"{number}-{key}" for key in range(100)], "l": [[number]] * 100}))
    text, nested = kept._store.buffers[1][1], kept._store.buffers[2][0]
    assert isinstance(text, parts_module.BytesBuffer)
    assert isinstance(nested, parts_module.NestedBuffer)
    # Ten thousand values were put; a hundred are pointed at, and a thousand more may wait to be squeezed out.
    assert text._rows <= 1300
    assert nested._rows <= 1300
    assert kept.rows().to_pylist() == [{"k": key, "s": f"99-{key}", "l": [99]} for key in range(100)]


def test_a_large_first_value_is_not_copied_for_new_keys_when_the_overwritten_are_squeezed_out() -> None:
    kept = value_of({"s": pa.string(), "l": pa.list_(pa.int64())})

    def put(keys: range, characters: int) -> None:
        values = {"s": ["x" * characters] * len(keys), "l": [[1] * characters] * len(keys)}
        kept.put(ints(k=[*keys]), pa.record_batch(values))

    put(range(1), 10_000)
    for _ in range(12):
        put(range(1, 101), 1)
    put(range(1, 121), 1)
    text, nested = kept._store.buffers[1][1], kept._store.buffers[2][0]
    assert isinstance(text, parts_module.BytesBuffer)
    assert isinstance(nested, parts_module.NestedBuffer)
    assert text._rows == nested._rows == 101 + 120
    assert int(text._offsets[text._rows]) < 11_000
    assert sum(len(array.flatten()) for array in nested._arrays) < 11_000
    assert {key: len(row["l"]) for key in range(121) if (row := kept.get_one(key))} == {
        0: 10_000,
        **dict.fromkeys(range(1, 121), 1),
    }


def test_rows_whose_strings_no_array_holds_together_come_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = value_of({"s": pa.string()})
    keys = [*range(100)]
    kept.put(ints(k=keys), pa.record_batch({"s": ["x" * (key % 7) for key in keys]}))
    right = parts_module.put_together

    def narrow(kind: pa.DataType, raws: Iterator[Any], found: Any = None, hidden: Any = None) -> pa.Array:
        made = right(kind, raws, found, hidden)
        if pa.types.is_string(kind) and pc.sum(pc.binary_length(made)).as_py() > 30:
            raise pa.ArrowInvalid("input array too large")
        return made

    monkeypatch.setattr(parts_module, "put_together", narrow)
    for table in (kept.rows(), kept.changes.whole().select(["k", "s"])):
        assert table.to_pylist() == [{"k": key, "s": "x" * (key % 7)} for key in keys]
    kept.put(ints(k=[50]), pa.record_batch({"s": ["x" * 31]}))
    with pytest.raises(pa.ArrowInvalid, match="too large"):
        kept.rows()


def test_of_rows_with_the_same_key_the_last_one_counts() -> None:
    kept = value_of()
    kept.put(ints(k=[7, 8, 7, 9, 8, 7]), ints(n=[1, 2, 3, 4, 5, 6]))
    assert kept.rows().to_pylist() == [{"k": 7, "n": 6}, {"k": 8, "n": 5}, {"k": 9, "n": 4}]
    kept.put(ints(k=[9, 7, 9]), ints(n=[10, 11, 12]))
    assert kept.rows()["n"].to_pylist() == [11, 5, 12]


def test_one_key_at_a_time() -> None:
    kept = value_of({"n": pa.int64(), "s": pa.string()}, {"a": pa.string(), "b": pa.int32()})
    kept.put_one(("x", None), n=1)
    assert kept.get_one("x", None) == {"n": 1, "s": None}
    assert kept.get_one("x", 0) is None
    kept.delete_one("x", None)
    assert kept.get_one("x", None) is None
    with pytest.raises(InvalidInput, match="'x' is no key of"):
        kept.get_one("x")
    with pytest.raises(InvalidInput, match="are no value columns"):
        kept.put_one(("x", 1), m=1)


def test_a_state_of_keys_only_knows_which_are_there() -> None:
    kept = value_of({})
    kept.put_one((1,))
    kept.put_one((2,))
    kept.put_one((1,))
    assert kept.get(ints(k=[2, 3, 1]))[1].tolist() == [True, False, True]
    assert kept.rows().to_pylist() == [{"k": 1}, {"k": 2}]


AGGREGATES = {
    "total": pa.int64(),
    "low": pa.float64(),
    "high": pa.int32(),
    "rows": pa.int64(),
    "seen": pa.int64(),
    "note": pa.string(),
}
HOW = {"total": "sum", "low": "min", "high": "max", "rows": "count", "seen": "count"}


def test_accumulating_is_what_a_loop_does() -> None:
    kept = value_of(AGGREGATES)
    oracle: dict[int, dict[str, Any]] = {}
    chance = random.Random(3)
    for _ in range(40):
        count = chance.randrange(1, 20)
        rows = [
            {
                "k": chance.randrange(15),
                "total": chance.choice([None, chance.randrange(99)]),
                "low": chance.choice([None, math.nan, chance.uniform(-9, 9)]),
                "high": chance.choice([None, chance.randrange(-99, 99)]),
                "seen": chance.choice([None, 1]),
            }
            for _ in range(count)
        ]
        given = pa.RecordBatch.from_pylist(
            rows, pa.schema([("k", pa.int64()), *((n, AGGREGATES[n]) for n in ("total", "low", "high", "seen"))])
        )
        kept.add(given.select(["k"]), given.drop_columns(["k"]), HOW)
        for row in rows:
            old = oracle.setdefault(
                row["k"], {"total": None, "low": None, "high": None, "rows": 0, "seen": 0, "note": None}
            )
            old["rows"] += 1
            old["seen"] += row["seen"] is not None
            if row["total"] is not None:
                old["total"] = (old["total"] or 0) + row["total"]
            if row["high"] is not None:
                old["high"] = row["high"] if old["high"] is None else max(old["high"], row["high"])
            if row["low"] is not None and (old["low"] is None or math.isnan(old["low"]) or row["low"] < old["low"]):
                old["low"] = row["low"]
    found = {row.pop("k"): {name: spelt(part) for name, part in row.items()} for row in kept.rows().to_pylist()}
    assert found == {key: {name: spelt(part) for name, part in row.items()} for key, row in oracle.items()}


def test_accumulating_goes_on_from_what_was_put() -> None:
    kept = value_of(AGGREGATES)
    kept.put(
        ints(k=[1, 2]),
        pa.record_batch({"total": pa.array([5, None]), "low": [None, 2.0], "rows": [3, None], "note": ["a", "b"]}),
    )
    kept.add(
        ints(k=[2, 1, 3]),
        pa.record_batch({"total": pa.array([7, 7, None]), "low": [9.0, 8.0, None]}),
        {"total": "sum", "low": "min", "rows": "count"},
    )
    assert [tuple(row[name] for name in ("k", "total", "low", "rows", "note")) for row in kept.rows().to_pylist()] == [
        (1, 12, 8.0, 4, "a"),
        (2, 7, 2.0, 1, "b"),
        (3, None, None, 1, None),
    ]


@pytest.mark.parametrize(
    ("column", "how"), [("note", "sum"), ("note", "max"), ("low", "count"), ("k", "sum"), ("total", "mean")]
)
def test_what_cannot_be_accumulated_is_refused_and_changes_nothing(column: str, how: str) -> None:
    kept = value_of(AGGREGATES)
    with pytest.raises(InvalidInput, match=column):
        kept.add(ints(k=[1]), ints(k=[1]), {column: how})
    assert len(kept) == 0


@pytest.mark.parametrize("how", [{"m": "sum"}, {"n": "count"}, {"n": "sum", "m": "max"}])
def test_accumulating_leaves_no_null_where_the_declaration_has_none(how: dict[str, str]) -> None:
    fields = [pa.field("n", pa.int64(), nullable=False), pa.field("m", pa.int64(), nullable=False)]
    kept = value_of(fields)
    with pytest.raises(InvalidInput, match="holds no nulls"):
        kept.add(ints(k=[1, 2]), ints(n=[1, 1], m=[1, None]), how)
    assert len(kept) == 0
    kept.add(ints(k=[1, 1]), ints(n=[1, None], m=[1, 2]), {"n": "count", "m": "sum"})
    assert kept.rows().to_pylist() == [{"k": 1, "n": 1, "m": 3}]


def test_update_reads_and_writes_with_one_call_and_a_failure_changes_nothing() -> None:
    kept = value_of()
    kept.put(ints(k=[1]), ints(n=[10]))

    def double(old: pa.RecordBatch, found: np.ndarray) -> pa.RecordBatch:
        return ints(n=[row["n"] * 2 if there else -1 for row, there in zip(old.to_pylist(), found, strict=True)])

    kept.update(ints(k=[2, 1]), double)
    assert kept.rows().to_pylist() == [{"k": 1, "n": 20}, {"k": 2, "n": -1}]
    with pytest.raises(ZeroDivisionError):
        kept.update(ints(k=[3]), lambda old, found: 1 // 0)
    assert len(kept) == 2


WRONG: dict[str, tuple[pa.RecordBatch, pa.RecordBatch]] = {
    "missing": (ints(x=[1]), ints(n=[1])),
    "unknown": (ints(k=[1]), ints(n=[1], x=[2])),
    "should be": (batch(k=(pa.string(), ["1"])), ints(n=[1])),
    "nulls": (ints(k=[1]), ints(n=[None])),
    "as many": (ints(k=[1, 2]), ints(n=[1])),
}


@pytest.mark.parametrize("what", WRONG)
def test_columns_that_contradict_the_declaration_are_refused_and_change_nothing(what: str) -> None:
    kept = value_of([pa.field("n", pa.int64(), nullable=False)])
    with pytest.raises(InvalidInput, match=what):
        kept.put(*WRONG[what])
    assert len(kept) == 0


def test_a_hash_that_nobody_registered_is_refused_before_there_is_a_state() -> None:
    with pytest.raises(InvalidInput, match="unknown key hash"):
        KeyedValue(
            Operator(OperatorId("op"), 1, 128, key_hash="nobody"), declare.value_state("op", "v", keys=INT, values={})
        )


def test_more_keys_than_an_index_holds_are_refused_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SLOTS_MAX", 2000)
    kept = value_of({})
    kept.put_one((1,))
    with pytest.raises(InvalidState, match=r"would have 2001 row keys, and 2000 is the most\. Raise the parallelism"):
        kept.add(ints(k=[*range(2001)]), ints(x=[0] * 2001), {})
    assert kept.rows().to_pylist() == [{"k": 1}]


def test_columns_of_narrower_types_and_without_nullable_ones_are_taken() -> None:
    kept = value_of({"n": pa.int64(), "s": pa.string()})
    kept.put(batch(more=(pa.bool_(), [True]), k=(pa.int8(), [5])), batch(s=(pa.large_string(), ["x"])))
    assert kept.rows().to_pylist() == [{"k": 5, "n": None, "s": "x"}]


@pytest.mark.usefixtures("impatient", "weakened", "walked")
def test_a_map_state_is_a_dictionary_of_dictionaries() -> None:
    state = declare.map_state(
        "op", "m", keys={"k": pa.string()}, map_key=pa.float64(), values={"n": pa.int64(), "s": pa.string()}
    )
    kept = KeyedMap(OPERATOR, state)
    oracle: dict[tuple[str | None, str], dict[str, Any]] = {}
    chance = random.Random(9)
    for step in range(90):
        count = chance.randrange(8)
        keys = [(chance.choice([None, "", "a", "b", "c"]), chance.choice(POOLS["double"][1])) for _ in range(count)]
        row_keys = batch(
            k=(pa.string(), [key for key, _ in keys]), _map_key=(pa.float64(), [inner for _, inner in keys])
        )
        spelled = [(key, spelt(inner)) for key, inner in keys]
        action = chance.choice(["put", "put", "delete", "clear"] if step % 7 else ["clear"])
        if action == "put":
            values = {"n": [step * 10 + i for i in range(count)], "s": [str(i) * i for i in range(count)]}
            kept.put(
                row_keys.append_column("n", pa.array(values["n"], pa.int64())).append_column(
                    "s", pa.array(values["s"], pa.string())
                )
            )
            oracle |= {key: {"n": values["n"][i], "s": values["s"][i]} for i, key in enumerate(spelled)}
        elif action == "delete":
            kept.delete(row_keys)
            oracle = {key: row for key, row in oracle.items() if key not in spelled}
        else:
            kept.clear(row_keys)
            oracle = {key: row for key, row in oracle.items() if key[0] not in {key for key, _ in keys}}
        assert len(kept) == len(oracle)
        assert kept.key_count == len({key for key, _ in oracle})
        asked = chance.sample([None, "", "a", "b", "zz"], 3)
        rows = kept.get(batch(k=(pa.string(), asked))).to_pylist()
        assert [(row["k"], spelt(row["_map_key"]), row["n"], row["s"]) for row in rows] == [
            (*key, row["n"], row["s"]) for wanted in asked for key, row in oracle.items() if key[0] == wanted
        ]
        values, found = kept.find(row_keys)
        assert [row if there else None for row, there in zip(values.to_pylist(), found, strict=True)] == [
            oracle.get(key) for key in spelled
        ]


def test_one_entry_of_a_map_at_a_time() -> None:
    state = declare.map_state("op", "m", keys=INT, map_key=pa.struct([("a", pa.int8())]), values={"n": pa.int64()})
    kept = KeyedMap(OPERATOR, state)
    kept.put_one((1,), {"a": 5}, n=50)
    kept.put_one((1,), {"a": None}, n=60)
    kept.put_one((1,), None, n=70)
    assert kept.get_one(1) == {(("a", 5),): {"n": 50}, (("a", None),): {"n": 60}, None: {"n": 70}}
    kept.delete_one((1,), {"a": 5})
    assert [*kept.get_one(1)] == [(("a", None),), None]
    kept.clear_one(1)
    assert kept.get_one(1) == {}


@pytest.mark.usefixtures("impatient", "weakened", "walked")
def test_a_list_state_is_a_dictionary_of_lists() -> None:
    state = declare.list_state("op", "l", keys={"k": pa.int32()}, values={"n": pa.int64(), "s": pa.string()})
    kept = KeyedList(OPERATOR, state)
    oracle: dict[int | None, list[dict[str, Any]]] = {}
    chance = random.Random(11)
    for step in range(110):
        keys = [chance.choice([None, *range(6)]) for _ in range(chance.randrange(9))]
        columns = batch(k=(pa.int32(), keys))
        if chance.random() < 0.75:
            rows = [{"n": step * 10 + i, "s": "s" * i} for i in range(len(keys))]
            kept.append(
                columns, pa.RecordBatch.from_pylist(rows, pa.schema({"n": pa.int64(), "s": pa.string()}.items()))
            )
            for key, row in zip(keys, rows, strict=True):
                oracle.setdefault(key, []).append(row)
        else:
            kept.clear(columns.slice(0, 2))
            for key in keys[:2]:
                oracle.pop(key, None)
        asked = [chance.choice([None, *range(7)]) for _ in range(4)]
        rows = kept.get(batch(k=(pa.int32(), asked))).to_pylist()
        wanted = [(key, row) for key in dict.fromkeys(asked) for row in oracle.get(key, [])]
        assert [(row["k"], {"n": row["n"], "s": row["s"]}) for row in rows] == wanted
        joined, numbers = kept.lookup(batch(k=(pa.int32(), asked)))
        assert [(i, row["n"]) for i, row in zip(numbers.tolist(), joined.to_pylist(), strict=True)] == [
            (i, row["n"]) for i, key in enumerate(asked) for row in oracle.get(key, [])
        ]
        assert len(kept) == sum(map(len, oracle.values()))
        assert kept.key_count == len(oracle)
    indexes = [(row["k"], row["_index"]) for row in kept.rows().to_pylist()]
    assert len(set(indexes)) == len(indexes)


def test_one_list_at_a_time() -> None:
    kept = KeyedList(OPERATOR, declare.list_state("op", "l", keys=INT, values=INT_VALUE))
    for number in range(5):
        kept.append_one((number % 2,), n=number)
    assert kept.get_one(0) == [{"n": 0}, {"n": 2}, {"n": 4}]
    kept.clear_one(0)
    kept.append_one((0,), n=9)
    assert (kept.get_one(0), kept.get_one(1), kept.get_one(2)) == ([{"n": 9}], [{"n": 1}, {"n": 3}], [])


def test_a_long_list_among_many_elements_is_found_by_a_look_at_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeyedList(OPERATOR, declare.list_state("op", "l", keys=INT, values=INT_VALUE))
    for number in range(100):
        kept.append(ints(k=[*range(100, 120), 7]), ints(n=[number] * 21))
    links = kept._key_rows.array("links")[: kept.key_count]
    assert links.tolist() == [100] * 21
    # A hundred steps cost more than a look at 2100 elements: what is before whom is not asked.
    monkeypatch.setitem(kept._elements.arrays, "before", None)
    assert [row["n"] for row in kept.get_one(7)] == [*range(100)]


def timer_rows(timers: TimerSet) -> list[tuple[Any, ...]]:
    return [(row["k"], row["_timestamp"], row["_tag"], row["n"]) for row in timers.rows().to_pylist()]


@pytest.mark.usefixtures("impatient", "weakened")
def test_timers_are_given_when_they_are_due_once_and_by_time() -> None:
    timers = timers_of(INT_VALUE)
    oracle: dict[tuple[int, int, str], int] = {}
    chance, now = random.Random(2), 0
    for step in range(130):
        rows = [
            (chance.randrange(5), now + chance.randrange(-3, 60), chance.choice(["", "", "x"]))
            for _ in range(chance.randrange(6))
        ]
        keys = batch(
            k=(pa.int64(), [row[0] for row in rows]),
            _timestamp=(pa.int64(), [row[1] for row in rows]),
            _tag=(pa.string(), [row[2] for row in rows]),
        )
        if chance.random() < 0.7:
            timers.set(keys.append_column("n", pa.array([step] * len(rows), pa.int64())))
            oracle |= dict.fromkeys(rows, step)
        else:
            timers.delete(keys)
            oracle = {key: n for key, n in oracle.items() if key not in rows}
        if chance.random() < 0.4:
            now += chance.randrange(8)
            due = timers.due(now)
            fired = {key: n for key, n in oracle.items() if key[1] <= now}
            oracle = {key: n for key, n in oracle.items() if key[1] > now}
            given = [] if due is None else [(r["k"], r["_timestamp"], r["_tag"], r["n"]) for r in due.to_pylist()]
            assert (due is None) is (not fired)
            assert sorted(given) == sorted((*key, n) for key, n in fired.items())
            assert [row[1] for row in given] == sorted(row[1] for row in given)
        assert timers.next_timestamp() == min((key[1] for key in oracle), default=None)
        assert timer_rows(timers) == [(*key, n) for key, n in oracle.items()]
    assert timers.due(2**63 - 1) is not None
    assert (len(timers), timers.next_timestamp(), timers.due(2**63 - 1)) == (0, None, None)


def test_the_order_of_timers_of_one_time_does_not_depend_on_when_they_were_set() -> None:
    rows = batch(
        k=(pa.int64(), [*range(50)] * 2),
        _timestamp=(pa.int64(), [5] * 100),
        _tag=(pa.string(), ["a"] * 50 + ["b"] * 50),
    )
    orders = []
    for seed in range(3):
        timers = timers_of()
        shuffled = random.Random(seed).sample(range(100), 100)
        for start in range(0, 100, 30):
            timers.set(rows.take(pa.array(shuffled[start : start + 30])))
        due = timers.due(5)
        assert due is not None
        orders.append([(row["k"], row["_tag"]) for row in due.to_pylist()])
    assert len(orders[0]) == 100
    assert orders[0] == orders[1] == orders[2]


def test_a_timer_without_tag_has_the_empty_one_and_none_without_time_is_taken() -> None:
    timers = timers_of()
    timers.set(ints(k=[1, 1], _timestamp=[5, 5]))
    timers.set_one((2,), 4)
    timers.delete_one((2,), 4, "other")
    assert timers.rows().to_pylist() == [
        {"_timestamp": 5, "_tag": "", "k": 1},
        {"_timestamp": 4, "_tag": "", "k": 2},
    ]
    with pytest.raises(InvalidState, match="_timestamp"):
        timers.set(ints(k=[1], _timestamp=[None]))
    timers.delete_one((2,), 4)
    assert (len(timers), timers.next_timestamp(), timers.due(4)) == (1, 5, None)


def test_the_time_of_a_timer_may_be_a_timestamp_of_any_unit() -> None:
    timers = timers_of()
    for number, unit in enumerate(("s", "ms", "us")):
        times = pa.array([NOON], pa.timestamp(unit))
        timers.set(ints(k=[number]).append_column("_timestamp", times))
    assert timers.rows()["_timestamp"].to_pylist() == [1_709_208_000_000_000] * 3
    with pytest.raises(InvalidState, match="_timestamp"):
        timers.set(batch(k=(pa.int64(), [1]), _timestamp=(pa.string(), ["noon"])))


def test_many_timers_fire_little_by_little_and_few_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    timers = timers_of()
    count = 100_000
    timers.set(pa.record_batch({"k": np.arange(count), "_timestamp": np.random.default_rng(1).permutation(count)}))
    looked_at: list[int] = []
    nearest = TimerSet._nearest

    def counting(self: TimerSet, watermark: int) -> np.ndarray:
        slots = nearest(self, watermark)
        looked_at.append(len(slots))
        return slots

    monkeypatch.setattr(TimerSet, "_nearest", counting)
    fired = [due["_timestamp"].to_pylist() for now in range(0, count, 500) if (due := timers.due(now)) is not None]
    assert [time for times in fired for time in times] == [*range(count - 499)]
    # 200 watermarks that look at every timer would look at ten million of them, twice.
    assert sum(looked_at) < 3_000_000


def test_entries_keep_their_order() -> None:
    state = declare.union_state(
        "op", "u", columns=[pa.field("a", pa.int64(), nullable=False), pa.field("s", pa.string())]
    )
    entries = Entries(state)
    assert entries.rows().schema.names == ["a", "s"]
    for number in range(200):
        entries.append(ints(a=[number]))
    entries.append_one(a=-1, s="x")
    assert entries.rows()["a"].to_pylist() == [*range(200), -1]
    assert entries.rows()["a"].num_chunks < 100
    with pytest.raises(InvalidState, match="nulls"):
        entries.append(ints(a=[None]))
    with pytest.raises(InvalidInput, match="no columns"):
        entries.append_one(b=1)
    entries.replace(pa.table({"a": [5, 4], "s": ["p", None]}))
    assert entries.rows().to_pylist() == [{"a": 5, "s": "p"}, {"a": 4, "s": None}]
    entries.clear()
    assert len(entries) == 0


def histories() -> Iterator[list[tuple[int, ...]]]:
    for seed in range(3):
        chance = random.Random(seed)
        yield [tuple(chance.randrange(40) for _ in range(chance.randrange(1, 20))) for _ in range(20)]


def test_the_same_history_gives_the_same_order_however_it_is_cut_into_batches() -> None:
    for history in histories():
        tables = []
        for cut in (1, 1000):
            kept = value_of()
            keys = [key for part in history for key in part]
            for start in range(0, len(keys), cut):
                part = keys[start : start + cut]
                kept.put(ints(k=part), ints(n=part))
            tables.append(kept.rows().to_pylist())
        assert tables[0] == tables[1]
        assert [row["k"] for row in tables[0]] == [*dict.fromkeys(keys)]
