"""Python values in columns of a declared type: none becomes another one.

The calls of keyed states for one key: one shape of a key everywhere, and keys of other subtasks
refused. Keys in sentences, where Python has no objects for their dates and times. What a text
names, where uids, states and columns have slashes and dots themselves.
"""

from __future__ import annotations

import datetime
import datetime as dt
import random
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.rewrite import RewriteSpec, Transform, rewrite
from stateformat.backends.state import KeyedValue, SubtaskStates
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.keys import hash_keys, key_groups, subtask_of_key_group
from stateformat.segments import cast_kept
from stateformat.states import Named, declare, labels_of, named, split_drop, value_state
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tables import CONVERSION_ERRORS, from_python, python_rows, table_from_python
from tests.worlds.stores import Job, counts_job, operator, refused

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


N = {"n": pa.int64()}
OPERATOR = Operator(OperatorId("op"), 1, 128)
KEYS = ({"k": pa.string()}, {"a": pa.string(), "b": pa.string()})
MAKE: dict[str, Any] = {
    "value": declare.value_state,
    "map": partial(declare.map_state, map_key=pa.string()),
    "list": declare.list_state,
    "timers": declare.timers,
}
PUT: dict[str, Callable[[Any, Any], None]] = {
    "value": lambda kept, key: kept.put_one(key, n=1),
    "map": lambda kept, key: kept.put_one(key, "m", n=1),
    "list": lambda kept, key: kept.append_one(key, n=1),
    "timers": lambda kept, key: kept.set_one(key, 5, n=1),
}
DELETE: dict[str, Callable[[Any, Any], None]] = {
    "value": lambda kept, key: kept.delete_one(key),
    "map": lambda kept, key: kept.delete_one(key, "m"),
    "list": lambda kept, key: kept.clear_one(key),
    "timers": lambda kept, key: kept.delete_one(key, 5),
}


def states() -> SubtaskStates:
    """States of every kind, by one key column and by two: value1, value2, map1 …"""
    made = [make("op", f"{name}{len(keys)}", keys=keys, values=N) for keys in KEYS for name, make in MAKE.items()]
    return SubtaskStates(OPERATOR, 0, made)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("columns", "key", "stored"),
    [
        (1, "a", ("a",)),
        (1, "abc", ("abc",)),
        (1, "", ("",)),
        (1, None, (None,)),
        (1, ("abc",), ("abc",)),
        (1, ["abc"], ("abc",)),
        (2, ("a", "b"), ("a", "b")),
        (2, ["a", None], ("a", None)),
    ],
)
def test_every_call_takes_a_key_in_the_same_shape(name: str, columns: int, key: Any, stored: tuple[Any, ...]) -> None:
    kept: Any = states().all[f"{name}{columns}"]
    PUT[name](kept, key)
    assert [tuple(row[column] for column in KEYS[columns - 1]) for row in kept.rows().to_pylist()] == [stored]
    DELETE[name](kept, key)
    assert not len(kept)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(
    ("columns", "key", "sentence"),
    [
        (2, "ab", r"'ab' is no key of \['a', 'b'\]; the key has 2 columns: give a tuple"),
        (2, b"ab", "b'ab' is no key of"),
        (2, {"a": "x", "b": "y"}, "give a tuple"),
        (2, {"a", "b"}, "give a tuple"),
        (2, 7, "7 is no key of"),
        (2, ("a",), "has 1 values and the key 2"),
        (1, ("a", "b"), "has 2 values and the key 1"),
        (1, (), "has 0 values and the key 1"),
        (1, 7, "7 is no value of key column 'k'"),
        (1, {"k": "a"}, "is no value of key column 'k'"),
    ],
)
def test_what_is_no_key_is_refused_alike_by_every_call(name: str, columns: int, key: Any, sentence: str) -> None:
    kept: Any = states().all[f"{name}{columns}"]
    for call in (PUT[name], DELETE[name]):
        with pytest.raises(InvalidInput, match=sentence):
            call(kept, key)
    assert not len(kept)


def test_reading_takes_a_key_as_one_argument_or_its_values_as_several() -> None:
    every = states()
    value, entries, rows = every.value("value2"), every.map("map2"), every.list("list2")
    for name, kept in (("value", value), ("map", entries), ("list", rows)):
        PUT[name](kept, ("a", "b"))
    assert value.get_one("a", "b") == value.get_one(("a", "b")) == {"n": 1}
    assert entries.get_one("a", "b") == entries.get_one(("a", "b")) == {"m": {"n": 1}}
    assert rows.get_one("a", "b") == rows.get_one(("a", "b")) == [{"n": 1}]
    with pytest.raises(InvalidInput, match="give a tuple"):
        value.get_one("ab")
    value.delete_one("a", "b")
    rows.clear_one("a", "b")
    assert (len(value), len(rows)) == (0, 0)


def test_one_entry_of_a_map_is_looked_up_by_its_map_key() -> None:
    kept = states().map("map1")
    kept.put_one("Oslo", "x", n=1)
    kept.put_one("Oslo", "y", n=2)
    assert kept.find_one("Oslo", "y") == kept.find_one(("Oslo",), "y") == {"n": 2}
    assert kept.find_one("Oslo", "z") is None
    assert kept.find_one("Rome", "x") is None


def test_a_key_of_dates_and_of_structs_is_a_value_too() -> None:
    day, struct = datetime.date(2024, 2, 29), pa.struct([("a", pa.int32())])
    for kind, key in ((pa.date32(), day), (struct, {"a": 1}), (pa.binary(), b"ab")):
        kept = KeyedValue(OPERATOR, declare.value_state("op", "v", keys={"k": kind}, values=N))
        kept.put_one(key, n=3)
        assert kept.get_one(key) == kept.get_one((key,)) == {"n": 3}


# Keys of other subtasks
# --------------------------------------------------------------------------------------------------


def owner_of(number: int) -> int:
    group = key_groups(hash_keys([pa.array([number])]), 128)
    return int(subtask_of_key_group(group, parallelism=2, max_parallelism=128)[0])


MINE = next(number for number in range(99) if owner_of(number) == 1)
FOREIGN = next(number for number in range(99) if owner_of(number) == 0)


def batch(**columns: list[int]) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(values, pa.int64()) for name, values in columns.items()})


@pytest.mark.parametrize(
    ("state", "call"),
    [
        ("v", lambda s: s.value("v").put_one(FOREIGN, n=1)),
        ("v", lambda s: s.value("v").put(batch(k=[MINE, FOREIGN]), batch(n=[1, 2]))),
        ("v", lambda s: s.value("v").update(batch(k=[MINE, FOREIGN]), lambda old, _: old)),
        ("v", lambda s: s.value("v").add(batch(k=[FOREIGN]), batch(n=[1]), {"n": "sum"})),
        ("m", lambda s: s.map("m").put_one(FOREIGN, 1, n=1)),
        ("l", lambda s: s.list("l").append_one(FOREIGN, n=1)),
        ("t", lambda s: s.timers("t").set_one(FOREIGN, 5)),
    ],
)
def test_a_key_of_another_subtask_is_refused_where_it_is_put(state: str, call: Callable[[SubtaskStates], None]) -> None:
    keys = {"k": pa.int64()}
    declared = [
        declare.value_state("op", "v", keys=keys, values=N),
        declare.map_state("op", "m", keys=keys, map_key=pa.int64(), values=N),
        declare.list_state("op", "l", keys=keys, values=N),
        declare.timers("op", "t", keys=keys),
    ]
    subtask = SubtaskStates(Operator(OperatorId("op"), 2, 128), 1, declared)
    subtask.own_keys([("user",), ("customer",), ("user",)])
    sentence = (
        rf"operator 'op' puts key {FOREIGN} \(k\) into state '{state}' in subtask 1.*belongs to subtask 0"
        r".*key_by\('user'\) and key_by\('customer'\):"
    )
    with pytest.raises(InvalidState, match=sentence) as caught:
        call(subtask)
    assert caught.value.kind is ErrorKind.STATE_NOT_ALLOWED
    # Nothing has changed, and the key is refused again.
    assert not len(subtask.all[state])
    with pytest.raises(InvalidState, match=f"key {FOREIGN} "):
        call(subtask)
    subtask.value("v").put_one(MINE, n=7)
    assert subtask.value("v").get_one(MINE) == {"n": 7}


FAR = pa.array([-3_650_000, 3_650_000], pa.int32()).cast(pa.date32())
TIMES = pa.array([5, 9000 * 365 * 86_400_000_000], pa.int64()).cast(pa.timestamp("us", "UTC"))
FAR_KEYS = pa.table({"day": FAR, "at": pa.StructArray.from_arrays([TIMES, pa.array([1, None])], ["t", "n"])})
DAYS = ["-8024-08-22", "11963-05-13"]
STATE = declare.value_state("counter", "counts", keys={"day": pa.date32()}, values={"n": pa.int64()})
ROWS = pa.table({"day": FAR, "n": [1, 2]})


@pytest.mark.parametrize(
    "rows", [FAR_KEYS, FAR_KEYS.combine_chunks().to_batches()[0], pa.concat_tables([FAR_KEYS, FAR_KEYS[:0]])]
)
def test_times_that_python_lacks_are_text(rows: pa.Table | pa.RecordBatch) -> None:
    assert python_rows(rows) == [
        {"day": DAYS[0], "at": {"t": "1970-01-01 00:00:00.000005Z", "n": 1}},
        {"day": DAYS[1], "at": {"t": "10964-01-10 00:00:00.000000Z", "n": None}},
    ]
    assert python_rows(rows.select([])) == rows.select([]).to_pylist()


def test_equal_keys_are_refused_by_name(tmp_path: Path) -> None:
    twice = pa.concat_tables([ROWS, ROWS])
    job = replace(counts_job(parallelism=1), states=(STATE,), rows={("counter", "counts"): lambda _: twice})
    error = refused(
        InvalidState, lambda: job.publish(open_store(str(tmp_path)), None), kind=ErrorKind.DUPLICATE_ROW_KEY
    )
    assert all(day in str(error) for day in DAYS)


def failing(rows: pa.Table) -> pa.Table:
    if len(rows):
        raise ValueError("no")
    return rows


def moving(rows: pa.Table) -> pa.Table:
    days = [day + 1 for day in rows["day"].cast(pa.int32()).to_pylist()]
    return rows.set_column(0, "day", pa.array(days, pa.int32()).cast(pa.date32()))


@pytest.mark.parametrize(("function", "said"), [(failing, "first key {'day': '"), (moving, "changed keys: of ")])
def test_a_function_that_fails_is_told_of_with_the_key(
    tmp_path: Path, function: Callable[[pa.Table], pa.Table], said: str
) -> None:
    store = open_store(str(tmp_path))
    job = replace(counts_job(parallelism=1), states=(STATE,), rows={("counter", "counts"): lambda _: ROWS})
    job.publish(store, None)
    spec = RewriteSpec(transforms={("counter", "counts"): Transform(function)})
    refused(InvalidInput, lambda: rewrite(store, store.open(), spec), said)


LONG = pa.int64()


def _state(uid: str, name: str, *columns: str) -> sf.State:
    return value_state(uid, name, keys={"k": LONG}, values=dict.fromkeys(columns or ("v",), LONG))


def _operator(uid: str, name: str = "") -> Operator:
    return Operator(OperatorId(uid), 1, 128, name=name)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("a", Named("a")),
        ("a/s", Named("a", "s")),
        ("a/s.v", Named("a", "s", "v")),
        ("a/s.t", Named("a", "s.t")),
        ("a/s.t.v", Named("a", "s.t", "v")),
        ("a/s.w", Named("a", "s", "w")),
        ("a/s.t.w", Named("a", "s.t", "w")),
        ("Sums/s", Named("a", "s")),
        ("b", Named("b")),
        ("b/s", None),
        ("none", None),
    ],
)
def test_a_text_names_an_operator_a_state_or_a_column(text: str, meant: Named | None) -> None:
    labels = labels_of([_operator("a", "Sums"), _operator("b", "twice"), _operator("c", "twice")])
    assert named(text, [_state("a", "s"), _state("a", "s.t")], labels) == meant
    assert named("twice", [], labels) is None


@pytest.mark.parametrize(
    ("text", "states", "uids", "first", "second"),
    [
        (
            "a/b/c",
            [_state("a", "b/c"), _state("a/b", "c")],
            [],
            "state 'b/c' of operator 'a'",
            "state 'c' of operator 'a/b'",
        ),
        ("a/b", [_state("a", "b")], ["a/b"], "operator 'a/b'", "state 'b' of operator 'a'"),
        (
            "a/s.v",
            [_state("a", "s"), _state("a", "s.v")],
            [],
            "column 'v' of state 's' of operator 'a'",
            "state 's.v' of operator 'a'",
        ),
        (
            "a/b/c.v",
            [_state("a", "b/c"), _state("a/b", "c")],
            [],
            "column 'v' of state 'b/c' of operator 'a'",
            "column 'v' of state 'c' of operator 'a/b'",
        ),
    ],
)
def test_what_may_be_two_things_is_refused_with_both(
    text: str, states: list[sf.State], uids: list[str], first: str, second: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        split_drop([text], states, uids)
    assert repr(text) in str(caught.value)
    assert first in str(caught.value)
    assert second in str(caught.value)


def _published(url: str, *states: sf.State) -> sf.Checkpoint:
    rows = {(state.operator, state.name): lambda _: pa.table({"k": pa.array([1], LONG), "v": [2]}) for state in states}
    graph = JobGraph(tuple(operator(uid, 1) for uid in dict.fromkeys(state.operator for state in states)))
    store = CheckpointStore(open_store(url).storage)
    Job("names", graph, states, rows).publish(store, None)
    return store.open()


def test_drop_is_split_into_columns_and_what_goes_as_a_whole() -> None:
    states = [_state("op", "s"), _state("op", "s.t"), _state("op", "t")]
    assert split_drop(["op", "op/s", "op/s.t", "op/s.v", "op/t.a.b", "other/s.v"], states) == (
        ["op", "op/s", "op/s.t", "other/s.v"],
        {("op", "s"): {"v"}, ("op", "t"): {"a.b"}},
    )


def test_a_restore_does_not_guess_which_state_is_given_up() -> None:
    checkpoint = _published("memory://names-states", _state("a", "b/c"), _state("a/b", "c"))
    with pytest.raises(InvalidInput, match=r"'a/b/c' may be state 'b/c' of operator 'a' or state 'c'"):
        checkpoint.plan_restore(checkpoint.graph, drop=["a/b/c"])
    assert checkpoint.plan_restore(checkpoint.graph).drop == ()
