"""Rows that expire, against dictionaries that know when each row was last accessed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.state import (
    SubtaskStates,
    columns as parts_module,
    keyed_collections as chains_module,
    rows as store_module,
)
from stateformat.errors import InvalidInput
from stateformat.model import State
from stateformat.states import declare, delta_policy as folding
from stateformat.ttl import NO_TIME_US
from tests.state.layers_world import OPERATOR, Driver

INT = {"k": pa.int64()}
VALUES = {"n": pa.int64(), "note": pa.string()}
KEYS = range(12)
DURATION = 20
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.truth) for seed in range(1, 5))]
CLOCKS = ("event_time", "processing_time")
REFRESHES = ("write", "read_and_write")


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores grow, holes are closed and layers folded as if states were large."""
    monkeypatch.setattr(store_module, "HOLES_MIN", 3)
    monkeypatch.setattr(store_module, "_CAPACITY_MIN", 4)
    monkeypatch.setattr(parts_module, "_SQUEEZE_ROWS_MIN", 3)
    monkeypatch.setattr(chains_module, "_STEP_ELEMENTS", 1)
    monkeypatch.setattr(folding, "_LAYER_ROWS", 1)


def declared(ttl: sf.Ttl | None, values: dict[str, pa.DataType] = VALUES) -> tuple[State, ...]:
    return (
        declare.value_state("op", "value", keys=INT, values=values, ttl=ttl),
        declare.map_state("op", "map", keys=INT, map_key=pa.int64(), values=values, ttl=ttl),
        declare.list_state("op", "list", keys=INT, values=values, ttl=ttl),
        declare.timers("op", "timers", keys=INT),
    )


def batch(rows: list[dict[str, Any]], **kinds: pa.DataType) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, pa.schema(kinds))


class Model:
    """What is there: values and the time of the last access, by name of the state and row key.

    The place of an element in a list is the number of elements that ever came before it.
    """

    def __init__(self, ttl: sf.Ttl, chance: random.Random) -> None:
        self.ttl, self.chance = ttl, chance
        self.now: int | None = None if ttl.clock == "event_time" else 1_000
        self.rows: dict[str, dict[tuple[int, int], list[Any]]] = {"value": {}, "map": {}, "list": {}}
        self.came = 0

    def advance(self, by: int) -> None:
        self.now = (1_000 if self.now is None else self.now) + by
        for of_state in self.rows.values():
            for row in of_state.values():
                row[1] = self.now if row[1] is None else row[1]

    def alive(self, name: str, keys: set[int] | None = None) -> dict[tuple[int, int], dict[str, Any]]:
        return {
            at: values
            for at, (values, time) in self.rows[name].items()
            if (keys is None or at[0] in keys)
            and not (self.now is not None and time is not None and time + self.ttl.duration_us <= self.now)
        }

    def read(self, name: str, places: Any) -> None:
        for at in places if self.ttl.refresh == "read_and_write" else ():
            self.rows[name][at][1] = self.now

    def write(self, name: str, at: tuple[int, int], values: dict[str, Any]) -> None:
        self.rows[name][at] = [values, self.now]

    def values(self) -> dict[str, Any]:
        return {"n": self.chance.randrange(100), "note": self.chance.choice([None, "", "a note"])}


def tell(states: SubtaskStates, model: Model) -> SubtaskStates:
    if model.ttl.clock == "event_time":
        states.advance(event_time_us=NO_TIME_US * 2 if model.now is None else model.now, processing_time_us=5)
    else:
        states.advance(event_time_us=None, processing_time_us=model.now or 0)
    return states


def check(states: SubtaskStates, model: Model) -> None:
    """Look at everything, which is no access."""
    for name, kept in (("value", states.value("value")), ("map", states.map("map")), ("list", states.list("list"))):
        rows = kept.rows().to_pylist()
        alive = model.alive(name)
        if name == "value":
            assert {(row["k"], 0): {column: row[column] for column in VALUES} for row in rows} == alive
        elif name == "map":
            assert {(row["k"], row["_map_key"]): {column: row[column] for column in VALUES} for row in rows} == alive
        else:
            rows.sort(key=lambda row: (row["k"], row["_index"]))
            expected = [(at[0], values) for at, values in sorted(alive.items())]
            assert [(row["k"], {column: row[column] for column in VALUES}) for row in rows] == expected
        assert len(kept) == len(alive) == len(rows)
    for kept in (states.map("map"), states.list("list")):
        assert kept.key_count == len({at[0] for at in model.alive("map" if kept is states.map("map") else "list")})


def change(states: SubtaskStates, model: Model) -> None:
    """A call, of both alike; what it returns is compared."""
    chance = model.chance
    keys = [chance.choice(KEYS) for _ in range(chance.randrange(1, 6))]
    given = batch([{"k": key} for key in keys], k=pa.int64())
    new = [model.values() for _ in keys]
    values = batch(new, **VALUES)
    call = chance.choice([value_calls, value_calls, map_calls, list_calls])
    call(states, model, chance.randrange(8), keys, given, new, values)


def value_calls(
    states: SubtaskStates, model: Model, which: int, keys: list[int], given: Any, new: Any, values: Any
) -> None:
    kept, alive = states.value("value"), model.alive("value")
    expected = [alive.get((key, 0)) for key in keys]
    if which == 0:
        kept.delete(given)
        for key in keys:
            model.rows["value"].pop((key, 0), None)
    elif which == 1:
        found, there = kept.get(given)
        assert [row if is_there else None for row, is_there in zip(found.to_pylist(), there, strict=True)] == expected
        assert kept.get_one(keys[0]) == expected[0]
        model.read("value", [(key, 0) for key in keys if (key, 0) in alive])
    elif which == 2:
        kept.add(given, values.select(["n"]), {"n": "sum"})
        for key, row in zip(keys, new, strict=True):
            before = model.alive("value").get((key, 0), {"n": 0, "note": None})
            model.write("value", (key, 0), {**before, "n": before["n"] + row["n"]})
    elif which == 3:

        def combine(old: pa.RecordBatch, found: Any) -> pa.RecordBatch:
            assert [row if there else None for row, there in zip(old.to_pylist(), found, strict=True)] == expected
            return values

        kept.update(given, combine)
        for key, row in zip(keys, new, strict=True):
            model.write("value", (key, 0), row)
    else:
        kept.put(given, values)
        for key, row in zip(keys, new, strict=True):
            model.write("value", (key, 0), row)


def map_calls(
    states: SubtaskStates, model: Model, which: int, keys: list[int], given: Any, new: Any, values: Any
) -> None:
    kept, alive = states.map("map"), model.alive("map")
    places = [(key, model.chance.randrange(3)) for key in keys]
    kinds = {"k": pa.int64(), "_map_key": pa.int64()}
    rows = [{"k": key, "_map_key": number} for key, number in places]
    if which == 0:
        kept.clear(given)
        model.rows["map"] = {at: row for at, row in model.rows["map"].items() if at[0] not in keys}
    elif which == 1:
        kept.delete(batch(rows, **kinds))
        for at in places:
            model.rows["map"].pop(at, None)
    elif which == 2:
        found, there = kept.find(batch(rows, **kinds))
        answers = [row if is_there else None for row, is_there in zip(found.to_pylist(), there, strict=True)]
        assert answers == [alive.get(at) for at in places]
        model.read("map", [at for at in places if at in alive])
    elif which == 3:
        found, there = kept.pop(batch(rows[:1], **kinds))
        assert [*found.to_pylist(), *there] == [alive.get(places[0]) or {"n": None, "note": None}, places[0] in alive]
        model.rows["map"].pop(places[0], None)
    elif which == 4:

        def combine(old: pa.RecordBatch, found: Any) -> pa.RecordBatch:
            answers = [row if there else None for row, there in zip(old.to_pylist(), found, strict=True)]
            assert answers == [alive.get(at) for at in places]
            return values

        kept.update(batch(rows, **kinds), combine)
        for at, value in zip(places, new, strict=True):
            model.write("map", at, value)
    elif which == 5:
        mine = model.alive("map", {keys[0]})
        assert kept.get_one(keys[0]) == {number: row for (_, number), row in mine.items()}
        model.read("map", mine)
    else:
        kept.put(batch([{**row, **value} for row, value in zip(rows, new, strict=True)], **kinds, **VALUES))
        for at, value in zip(places, new, strict=True):
            model.write("map", at, value)


def list_calls(
    states: SubtaskStates, model: Model, which: int, keys: list[int], given: Any, new: Any, values: Any
) -> None:
    kept = states.list("list")
    if which == 0:
        kept.clear(given)
        model.rows["list"] = {at: row for at, row in model.rows["list"].items() if at[0] not in keys}
    elif which < 3:
        mine = {at: row for at, row in sorted(model.alive("list").items()) if at[0] in keys}
        rows, requests = kept.lookup(given)
        expected = [(i, row) for i, key in enumerate(keys) for at, row in mine.items() if at[0] == key]
        names = rows.select([*VALUES]).to_pylist()
        assert [*zip(requests.tolist(), names, strict=True)] == expected
        model.read("list", mine)
    else:
        kept.append(given, values)
        for key, row in zip(keys, new, strict=True):
            model.came += 1
            model.write("list", (key, model.came), row)


@pytest.mark.parametrize("refresh", REFRESHES)
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_workers_that_take_turns_hold_what_has_not_expired(
    seed: int, clock: Any, refresh: Any, hasty: None, tmp_path: Path
) -> None:
    model = Model(sf.Ttl(DURATION, clock, refresh), random.Random(f"{seed} {clock} {refresh}"))
    chance, driver = model.chance, Driver(declared(model.ttl))
    workers: list[tuple[int, SubtaskStates | Path]] = []
    deltas = 0
    for version in range(1, 20):
        if workers and chance.random() < 0.8:
            known, states = workers.pop(chance.randrange(len(workers)))
            if isinstance(states, Path):
                folder, states = states, SubtaskStates(OPERATOR, 0, driver.states)
                states.load(folder)
            states.catch_up(*driver.newer(known))
            states.begin(version)
        else:
            states = driver.restored(version)
        check(tell(states, model), model)
        for _ in range(chance.choice([0, 3, 12])):
            change(states, model)
            if version > 2 and chance.random() < 0.3:
                model.advance(chance.choice([0, 1, 5, DURATION]))
                tell(states, model)
        check(states, model)
        states.layers = driver.layers
        driver.epoch(version, lambda writer, _, states=states: states.snapshot(writer))
        deltas += sum(kept > 0 for kept in states.layers_kept.values())
        check(states, model)
        check(tell(driver.restored(), model), model)
        stored = driver.checkpoint.read("op", "value").table().to_pylist()
        assert sorted((row["k"], 0) for row in stored) == sorted(model.alive("value"))
        if chance.random() < 0.3:
            states.save(tmp_path / str(version))
            workers.append((version, tmp_path / str(version)))
        else:
            workers.append((version, states))
    assert deltas > 5


# One thing at a time ------------------------------------------------------------------------------


def value_of(ttl: sf.Ttl | None = None, values: Any = None) -> tuple[Driver, SubtaskStates]:
    made = declare.value_state("op", "v", keys=INT, values={"n": pa.int64()} if values is None else values, ttl=ttl)
    driver = Driver((made,))
    return driver, driver.restored(1)


def put(states: SubtaskStates, keys: Any, n: int = 0) -> None:
    given = pa.record_batch({"k": pa.array([*keys], pa.int64())})
    states.value("v").put(given, pa.record_batch({"n": pa.array([n] * len(given), pa.int64())}))


def at(states: SubtaskStates, event_time_us: int) -> None:
    states.advance(event_time_us=event_time_us, processing_time_us=0)


def publish(driver: Driver, states: SubtaskStates, version: int) -> dict[str, int]:
    states.layers = driver.layers
    return driver.epoch(version, lambda writer, _: states.snapshot(writer))


def test_what_was_written_before_any_time_lives_from_the_first_one_on() -> None:
    _, states = value_of(sf.Ttl(10))
    put(states, [1])
    at(states, 5_000)
    put(states, [2])
    for now, there in ((5_009, 2), (5_010, 0)):
        at(states, now)
        assert len(states.value("v")) == there


def test_time_never_goes_back() -> None:
    _, states = value_of(sf.Ttl(10))
    at(states, 100)
    put(states, [1])
    at(states, 110)
    at(states, 105)
    assert states.value("v").get_one(1) is None


def test_a_refresh_by_reading_is_a_change_and_the_first_of_a_moment_only() -> None:
    driver, states = value_of(sf.Ttl(100, "event_time", "read_and_write"))
    at(states, 1)
    put(states, range(5_000))
    assert publish(driver, states, 1) == {"v": 5_000}
    states.begin(2)
    at(states, 50)
    for _ in range(2):
        states.value("v").get(pa.record_batch({"k": pa.array(range(10), pa.int64())}))
    assert publish(driver, states, 2) == {"v": 10}
    again = driver.restored(3)
    at(again, 120)
    assert sorted(again.value("v").rows()["k"].to_pylist()) == [*range(10)]
    # Nothing is read and nothing written: nothing is stored.
    assert publish(driver, again, 3) == {"v": 0}


def test_what_expires_is_no_change_and_goes_with_the_next_base() -> None:
    driver, states = value_of(sf.Ttl(100))
    at(states, 0)
    put(states, range(5_000))
    publish(driver, states, 1)
    states.begin(2)
    at(states, 90)
    put(states, range(100))
    at(states, 100)
    assert len(states.value("v")) == 100
    assert publish(driver, states, 2) == {"v": 100}
    states.begin(3)
    put(states, range(10_000, 13_000))
    assert publish(driver, states, 3) == {"v": 3_100}
    assert [layer.rows for layer in driver.layers["v"]] == [3_100]


def test_a_store_drops_what_has_expired_rather_than_to_grow() -> None:
    _, states = value_of(sf.Ttl(100))
    store = states.value("v").changes.rows
    for step in range(400):
        at(states, step * 10)
        put(states, range(step * 100, step * 100 + 100))
        assert len(states.value("v")) == min(1_000, 100 * step + 100)
    assert store.capacity <= 4_096


def test_values_that_have_no_columns_change_by_their_times() -> None:
    driver, states = value_of(sf.Ttl(100, "event_time", "read_and_write"), {})
    keys = pa.record_batch({"k": pa.array(range(2_000), pa.int64())})
    nothing = pa.RecordBatch.from_struct_array(pa.StructArray.from_buffers(pa.struct([]), 2_000, [None]))
    at(states, 1)
    states.value("v").put(keys, nothing)
    publish(driver, states, 1)
    states.begin(2)
    at(states, 60)
    states.value("v").put(keys.slice(0, 3), nothing.slice(0, 3))
    assert publish(driver, states, 2) == {"v": 3}
    assert driver.restored().value("v").rows().schema.names == ["k"]


@pytest.mark.parametrize("names", [["ttl_last_access"], ["n", "ttl_last_access"]])
def test_the_time_of_the_last_access_is_not_for_operators(names: list[str]) -> None:
    _, states = value_of(sf.Ttl(100))
    kept, keys = states.value("v"), pa.record_batch({"k": [1]})
    at(states, 1)
    put(states, [1], 5)
    assert kept.get(keys)[0].schema.names == ["n"]
    assert kept.rows().schema.names == ["k", "n"]
    with pytest.raises(sf.InvalidState, match="unknown"):
        kept.put(keys, pa.record_batch({name: pa.array([1], pa.int64()) for name in names}))


# Event times of rows ------------------------------------------------------------------------------


def test_a_row_may_bring_its_own_event_time() -> None:
    _, states = value_of(sf.Ttl(100))
    kept = states.value("v")
    one, three = pa.record_batch({"k": [1]}), pa.record_batch({"k": [1, 2, 1]})
    values = pa.record_batch({"n": [1, 2, 3]})
    kept.put(three, values, at=pa.array([50, 20, 40], pa.timestamp("us")))
    at(states, 30)
    for event_time, there in ((30, True), (149, True), (150, False)):
        assert kept.get(one, at=pa.array([event_time]))[1].tolist() == [there]
    for now, alive in ((119, {1, 2}), (120, {1}), (149, {1}), (150, set())):
        at(states, now)
        assert {*kept.rows()["k"].to_pylist()} == alive
        # A time before the watermark does not bring back what has expired.
        assert kept.get(one, at=pa.array([0]))[1].tolist() == [1 in alive]


def test_a_row_that_is_written_with_an_earlier_time_keeps_the_later_one() -> None:
    _, states = value_of(sf.Ttl(100))
    kept, one = states.value("v"), pa.record_batch({"k": [1]})
    for event_time in (50, 10):
        kept.put(one, pa.record_batch({"n": [event_time]}), at=pa.array([event_time]))
    at(states, 149)
    assert kept.get_one(1) == {"n": 10}


@pytest.mark.parametrize(
    ("clock", "times"),
    [
        ("event_time", pa.array([None], pa.int64())),
        ("event_time", pa.array([1.5])),
        ("event_time", pa.array([1, 2])),
        ("processing_time", pa.array([1])),
        (None, pa.array([1])),
    ],
)
def test_other_event_times_of_rows_are_refused(clock: Any, times: pa.Array) -> None:
    _, states = value_of(None if clock is None else sf.Ttl(5, clock))
    for call in (
        lambda kept, key: kept.get(key, at=times),
        lambda kept, key: kept.put(key, pa.record_batch({"n": [1]}), at=times),
    ):
        with pytest.raises(InvalidInput):
            call(states.value("v"), pa.record_batch({"k": [1]}))
    assert len(states.value("v")) == 0


# A ttl that is new, other, or gone ----------------------------------------------------------------


def going_on(driver: Driver, ttl: sf.Ttl | None, version: int) -> SubtaskStates:
    """A program that declares another ttl goes on from the newest checkpoint."""
    saved = driver.checkpoint.record.states[0]
    wanted = declare.value_state("op", "v", keys=INT, values={"n": pa.int64()}, ttl=ttl)
    changes = sf.states.Changes(drops=frozenset({"ttl_last_access"})) if ttl is None else sf.states.Changes()
    driver.states = (sf.states.evolve_state(saved, wanted, changes).state,)
    return driver.restored(version)


def test_a_ttl_that_is_new_counts_from_the_restore_on() -> None:
    driver, states = value_of()
    put(states, range(100))
    publish(driver, states, 1)
    states = going_on(driver, sf.Ttl(10), 2)
    at(states, 1_000)
    put(states, [5])
    # All have a time now, and the next ones who restore find it.
    assert publish(driver, states, 2) == {"v": 100}
    again = driver.restored(3)
    for now, there in ((1_009, 100), (1_010, 0)):
        at(again, now)
        assert len(again.value("v")) == there


@pytest.mark.parametrize(("ttl", "written"), [(sf.Ttl(1_000), 100), (None, 100), (sf.Ttl(15), 0)])
def test_what_had_expired_does_not_come_back_when_rows_live_longer(ttl: sf.Ttl | None, written: int) -> None:
    driver, states = value_of(sf.Ttl(20))
    at(states, 0)
    put(states, range(5_000))
    at(states, 15)
    put(states, range(100))
    at(states, 21)
    publish(driver, states, 1)
    driver.chain["v"] = driver.chain["v"][:]
    states = going_on(driver, ttl, 2)
    assert len(states.value("v")) == 100
    assert publish(driver, states, 2) == {"v": written}
    assert len(driver.restored().value("v")) == 100
    if written:
        assert np.sum([layer.rows for layer in driver.layers["v"]]) == 100
