"""Keyed maps, lists and timers, against dictionaries: random histories, hashes that collide."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from stateformat.backends.state import KeyedList, KeyedMap, TimerSet
from stateformat.backends.state.keyed_value import beside
from stateformat.errors import InvalidState
from stateformat.states import declare
from tests.state.state_world import INT, INT_VALUE, NOON, OPERATOR, POOLS, batch, ints, spelt, timers_of


@pytest.mark.usefixtures("impatient", "weakened", "walked")
def test_a_map_state_is_a_dictionary_of_dictionaries() -> None:
    values = {"n": pa.int64(), "s": pa.string()}
    state = declare.map_state("op", "m", keys={"k": pa.string()}, map_key=pa.float64(), values=values)
    kept, chance = KeyedMap(OPERATOR, state), random.Random(9)
    oracle: dict[tuple[str | None, str], dict[str, Any]] = {}
    for step in range(90):
        count = chance.randrange(8)
        keys = [(chance.choice([None, "", "a", "b", "c"]), chance.choice(POOLS["double"][1])) for _ in range(count)]
        given = [{"n": step * 10 + i, "s": str(i) * i} for i in range(count)]
        row_keys = batch(k=(pa.string(), [key for key, _ in keys]), _map_key=(pa.float64(), [at for _, at in keys]))
        spelled = [(key, spelt(inner)) for key, inner in keys]
        action = chance.choice(["put", "put", "delete", "clear"] if step % 7 else ["clear"])
        if action == "put":
            columns = batch(n=(pa.int64(), [row["n"] for row in given]), s=(pa.string(), [row["s"] for row in given]))
            kept.put(beside(row_keys, columns))
            oracle |= dict(zip(spelled, given, strict=True))
        elif action == "delete":
            kept.delete(row_keys)
            oracle = {key: row for key, row in oracle.items() if key not in spelled}
        else:
            kept.clear(row_keys)
            oracle = {key: row for key, row in oracle.items() if key[0] not in {key for key, _ in keys}}
        assert len(kept) == len(oracle)
        assert kept.key_count == len({key for key, _ in oracle})
        asked = chance.sample([None, "", "a", "b", "zz"], 3)
        found = kept.get(batch(k=(pa.string(), asked))).to_pylist()
        wanted = [(*key, row["n"], row["s"]) for at in asked for key, row in oracle.items() if key[0] == at]
        assert [(row["k"], spelt(row["_map_key"]), row["n"], row["s"]) for row in found] == wanted
        entries, there = kept.find(row_keys)
        assert [row if here else None for row, here in zip(entries.to_pylist(), there, strict=True)] == [
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
