"""What ``apply_per_key`` writes of a state that a function has changed, and when that expires."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import ApplyPerKey, ListState, MapState, ValueState
from stateformat.backends.dataflow.operators.per_key.kept import places_before
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.ttl import Ttl

ROWS = pa.schema([("k", pa.string()), ("n", pa.int64()), ("x", pa.float64())])
N, X = {"n": pa.int64()}, {"x": pa.float64()}
TWO = {"n": pa.int64(), "s": pa.string()}
MANY = {"many": pa.list_(pa.float64())}
EPOCH = pa.scalar(0, pa.timestamp("us")).as_py()


def harness(fn: Callable[..., Any], state: Any) -> OperatorHarness:
    return OperatorHarness(ApplyPerKey("k", fn, state=state), ROWS, key_by="k")


def stored(driven: OperatorHarness, name: str) -> list[tuple[Any, int]]:
    """The elements of a list and when each was last accessed."""
    rows = sorted(driven.snapshot().state(name).to_pylist(), key=lambda row: row["_index"])
    return [(row["n"], int((row["ttl_last_access"] - EPOCH).total_seconds() * 1e6 + 0.5)) for row in rows]


def appending_or(change: Callable[[list[Any]], Any]) -> Callable[..., None]:
    """A function that appends ``n``, and changes the list where that is 0."""

    def appends(key: str, rows: list[Any], state: Any) -> None:
        if rows[0][1]:
            state.append(rows[0][1])
        else:
            change(state)

    return appends


def times_after(change: Callable[[list[Any]], Any], refresh: Any = "write") -> list[tuple[Any, int]]:
    """Of 1, 2 and 3, written then, after a change at 8."""
    ttl = Ttl(10, refresh=refresh)
    driven = harness(appending_or(change), ListState("held", (), N, ttl=ttl))
    for now in (1, 2, 3):
        driven.advance(now).push([{"k": "a", "n": now}])
    return stored(driven.advance(8).push([{"k": "a", "n": 0}]), "held")


def _set(place: Any, value: Any) -> Callable[[list[Any]], None]:
    return lambda held: held.__setitem__(place, value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda held: held.pop(0), [(2, 2), (3, 3)]),
        (lambda held: held.pop(1), [(1, 1), (3, 3)]),
        (lambda held: held.pop(), [(1, 1), (2, 2)]),
        (lambda held: held.append(9), [(1, 1), (2, 2), (3, 3), (9, 8)]),
        (lambda held: held.insert(0, 9), [(9, 8), (1, 1), (2, 2), (3, 3)]),
        (lambda held: held.insert(1, 3), [(1, 1), (3, 8), (2, 2), (3, 3)]),
        (_set(1, 9), [(1, 1), (9, 8), (3, 3)]),
        (_set(1, 2), [(1, 1), (2, 2), (3, 3)]),
        (lambda held: held.__setitem__(slice(None), [*held, 9][-3:]), [(2, 2), (3, 3), (9, 8)]),
        (lambda held: held.__setitem__(slice(None), [one for one in held if one % 2]), [(1, 1), (3, 3)]),
        (lambda held: held.__setitem__(slice(None), [1.0, 3.0, 9.0]), [(1, 1), (3, 3), (9, 8)]),
        # What is put elsewhere is written: the least recently used stand in front.
        (lambda held: held.append(held.pop(0)), [(2, 2), (3, 3), (1, 8)]),
        (lambda held: held.insert(0, held.pop()), [(3, 8), (1, 1), (2, 2)]),
    ],
)
def test_what_stays_in_a_list_keeps_its_time(change: Callable[[list[Any]], Any], expected: list[Any]) -> None:
    assert times_after(change) == expected
    assert times_after(change, "read_and_write") == [(n, 8) for n, _ in expected]


def test_of_equal_elements_those_that_were_written_last_stay() -> None:
    driven = harness(appending_or(lambda held: held.pop(0)), ListState("held", (), N, ttl=Ttl(10)))
    driven.advance(1).push([{"k": "a", "n": 7}]).advance(5).push([{"k": "a", "n": 7}])
    assert stored(driven.advance(9).push([{"k": "a", "n": 0}]), "held") == [(7, 5)]


@pytest.mark.parametrize("seed", range(3))
def test_a_list_whose_elements_come_and_go_expires_element_by_element(seed: int) -> None:
    """A random walk beside a list of values with their times; no value stands twice."""
    choose = random.Random(seed)
    held: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}

    def change(elements: list[Any], what: str, new: Any) -> None:
        place = choose_place[0] % (len(elements) + 1)
        match what:
            case "append":
                elements.append(new)
            case "insert":
                elements.insert(place, new)
            case "slide":
                elements[:] = [*elements, new][-4:]
            case "drop":
                del elements[place : place + 1]
            case "filter":
                elements[:] = elements[::2]

    choose_place, what = [0], [""]
    now = 0
    driven = harness(
        lambda key, rows, state: change(state, what[0], (rows[0][1], "s")), ListState("held", (), TWO, ttl=Ttl(12))
    )
    for step in range(80):
        now += choose.randrange(3)
        driven.advance(now)
        key, what[0] = choose.choice("ab"), choose.choice(["append", "insert", "slide", "drop", "filter"])
        choose_place[0] = choose.randrange(8)
        held = {name: [one for one in elements if now < one[1] + 12] for name, elements in held.items()}
        change(held[key], what[0], (step, now))
        driven.push([{"k": key, "n": step}])
        found: dict[str, list[Any]] = {"a": [], "b": []}
        for row in sorted(driven.snapshot().state("held").to_pylist(), key=lambda row: row["_index"]):
            found[row["k"]].append((row["n"], (row["ttl_last_access"] - EPOCH).microseconds))
        assert found == held
        if choose.random() < 0.1:
            driven = OperatorHarness.restore(driven.snapshot(), parallelism=choose.choice([1, 2]))


def test_the_time_of_what_was_written_before_event_time_began_begins_with_it() -> None:
    driven = harness(appending_or(lambda held: held.pop(0)), ListState("held", (), N, ttl=Ttl(10)))
    driven.push([{"k": "a", "n": 1}]).push([{"k": "a", "n": 2}]).push([{"k": "a", "n": 0}])
    assert stored(driven.advance(5), "held") == [(2, 5)]


def test_equal_entries_in_another_dict_or_list_are_the_same() -> None:
    ttl = Ttl(10)

    def replaced(key: str, rows: list[Any], state: Any) -> None:
        if rows[0][1]:
            state.map, state.list, state.value.n = {"x": 1, "y": rows[0][1]}, [1, rows[0][1]], 1

    states = [
        MapState("map", (), pa.string(), N, ttl=ttl),
        ListState("list", (), N, ttl=ttl),
        ValueState("value", (), N, ttl=ttl),
    ]
    driven = harness(replaced, states)
    driven.advance(1).push([{"k": "a", "n": 5}]).advance(6).push([{"k": "a", "n": 7}])
    driven.advance(12).push([{"k": "a", "n": 0}])
    found = [driven.state(name)["n"].to_pylist() for name in ("map", "list", "value")]
    assert found == [[7], [7], [1]]


def longest(old: list[int], new: list[int]) -> int:
    """How many elements can stay, by trying all."""
    for count in range(min(len(old), len(new)), 0, -1):
        if set(combinations(old, count)) & set(combinations(new, count)):
            return count
    return 0


@pytest.mark.parametrize("seed", range(3))
def test_all_that_can_stay_is_found_of_lists_that_lost_some_and_grew_at_one_end(seed: int) -> None:
    choose = random.Random(seed)
    for _ in range(150):
        old = [choose.randrange(5) for _ in range(choose.randrange(7))]
        kept = [one for one in old if choose.random() < 0.6]
        added = [choose.randrange(5) for _ in range(choose.randrange(3))]
        new = choose.choice([kept, [*kept, *(one + 10 for one in added)], [*(one + 10 for one in added), *kept]])
        places = places_before(old, new)
        assert len(places) == len(new)
        stays = [place for place in places if place >= 0]
        assert stays == sorted(set(stays))
        assert all(place < 0 or old[place] == one for place, one in zip(places, new, strict=True))
        assert len(stays) == longest(old, new)


def test_minus_zero_takes_the_place_of_zero_and_nan_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = float("nan")

    def puts(key: str, rows: list[Any], state: Any) -> None:
        x = rows[0][2]
        state.map["z"], state.list[:], state.both["z"] = x, [1.0, x], (1, x)
        state.value.many, state.nested["z"], state.lists[:] = [x], [x], [[x]]

    both = {"n": pa.int64(), "x": pa.float64()}
    states = [
        MapState("map", (), pa.string(), X),
        ListState("list", (), X),
        MapState("both", (), pa.string(), both),
        ValueState("value", (), MANY),
        MapState("nested", (), pa.string(), MANY),
        ListState("lists", (), MANY),
    ]
    driven = harness(puts, states)

    def now(x: float) -> list[str]:
        driven.push([{"k": "a", "x": x}])
        columns = {"map": "x", "list": "x", "both": "x", "value": "many", "nested": "many", "lists": "many"}
        return [repr(driven.state(name)[column].to_pylist()[-1]) for name, column in columns.items()]

    for x in (0.0, -0.0, 0.0, 2.0, -0.0, nan):
        assert now(x) == [repr(x)] * 3 + [repr([x])] * 3
    held = driven._chains[0].operators["operator"].states
    value = held.value("value")
    monkeypatch.setattr(value, "put", None)
    now(nan)
