"""The calls of keyed states for one key: one shape of a key everywhere, and keys of other subtasks
refused.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.state import KeyedValue, SubtaskStates
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import Operator, OperatorId
from stateformat.keys import hash_keys, key_groups, subtask_of_key_group
from stateformat.states import declare

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
