"""``apply_per_key``: plain Python for each key, against what plain Python says of the same rows."""

from __future__ import annotations

import functools
import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.dataflow import ApplyPerKey, ListState, MapState, Timers, ValueState, events as ev
from stateformat.backends.dataflow.chained_operator import GatheredBatches, OperatorError
from stateformat.backends.dataflow.operators.per_key import operator as per_key
from stateformat.backends.dataflow.testing import OperatorHarness
from stateformat.errors import InvalidInput
from stateformat.ttl import Ttl

if TYPE_CHECKING:
    from urllib.parse import SplitResult as Hidden

SALES = pa.schema([("city", pa.string()), ("item", pa.string()), ("n", pa.int64())])
OUT = {"city": pa.string(), "n": pa.int64()}
N = {"n": pa.int64()}
EPOCH = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)
ROWS = [
    {"city": "Oslo", "item": "tea", "n": 3},
    {"city": "Rome", "item": "tea", "n": 1},
    {"city": "Oslo", "item": "ice", "n": 4},
]


def harness(fn: Callable[..., Any], key_by: Any = "city", schema: pa.Schema = SALES, **given: Any) -> OperatorHarness:
    """A harness of the operator with one subtask."""
    return OperatorHarness(ApplyPerKey(key_by, fn, **{"output": OUT, **given}), schema, key_by=key_by)


def counted(key: str, rows: list[tuple[Any, ...]], state: Any) -> tuple[str, int]:
    state.n = (state.n or 0) + sum(row[2] for row in rows)
    return key, state.n


def taken(driven: OperatorHarness) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in driven.take_output().to_pylist()]


def test_a_value_is_an_object_with_attributes() -> None:
    driven = harness(counted, state=N).push(ROWS)
    assert taken(driven) == [("Oslo", 7), ("Rome", 1)]
    assert taken(driven.push(ROWS[:1])) == [("Oslo", 10)]
    assert driven.state("state").to_pylist() == [{"city": "Oslo", "n": 10}, {"city": "Rome", "n": 1}]


def of_tuples(key: str, rows: list[tuple[str, str, int]]) -> list[tuple[str, int]]:
    return [(key, row[2]) for row in rows]


def of_numpy(key: str, rows: np.ndarray) -> Iterator[dict[str, Any]]:
    yield from ({"n": n, "city": key} for n in rows["n"])


def of_batch(key: str, rows: pa.RecordBatch) -> pa.RecordBatch:
    return rows.select(["n", "city"])


def of_table(key: str, rows: pa.Table) -> Iterator[pa.Table]:
    yield rows.select(["city", "n"]).slice(0, 1)
    yield (key, rows["n"][1].as_py()) if rows.num_rows > 1 else {"city": key, "n": -1}


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (of_tuples, [("Oslo", 3), ("Oslo", 4), ("Rome", 1)]),
        (of_numpy, [("Oslo", 3), ("Oslo", 4), ("Rome", 1)]),
        (of_batch, [("Oslo", 3), ("Oslo", 4), ("Rome", 1)]),
        (of_table, [("Oslo", 3), ("Oslo", 4), ("Rome", 1), ("Rome", -1)]),
        (lambda key, rows: (key, len(rows)), [("Oslo", 2), ("Rome", 1)]),
        (lambda key, rows: {"n": len(rows), "city": key}, [("Oslo", 2), ("Rome", 1)]),
        (lambda key, rows: ((key, row[2]) for row in rows), [("Oslo", 3), ("Oslo", 4), ("Rome", 1)]),
        (lambda key, rows: None, []),
        (lambda key, rows: [], []),
        (lambda key, rows, *others: (key, len(others)), [("Oslo", 2), ("Rome", 2)]),
        (lambda key, rows, factor=3: (key, factor * len(rows)), [("Oslo", 6), ("Rome", 3)]),
    ],
)
def test_rows_come_as_annotated_and_go_as_the_function_likes(
    fn: Callable[..., Any], expected: list[tuple[str, int]]
) -> None:
    assert taken(harness(fn, on_timer=lambda key, timestamp: None).push(ROWS)) == expected


def test_the_keys_are_values_or_tuples_and_stand_among_the_rows_too() -> None:
    seen: list[Any] = []
    harness(lambda key, rows: seen.append((key, rows)), key_by=["city", "item"], output=()).push(ROWS[:1])
    assert seen == [(("Oslo", "tea"), [("Oslo", "tea", 3)])]


class Sale(NamedTuple):
    n: int
    item: str


class Unsold(NamedTuple):
    price: int


def of_named(key: str, rows: list[Sale]) -> Iterator[tuple[str, int]]:
    yield from ((f"{key}-{row.item}", row.n) for row in rows)


def of_unknown(key: str, rows: Sequence[Unsold]) -> None:
    pass


def test_rows_are_of_a_class_that_names_some_columns() -> None:
    assert taken(harness(of_named).push(ROWS)) == [("Oslo-tea", 3), ("Oslo-ice", 4), ("Rome-tea", 1)]
    with pytest.raises(InvalidInput, match=r"Unsold of of_unknown needs the columns \['price'\], which its input does"):
        harness(of_unknown)


def of_named_beside_hidden(key: str, rows: list[Sale], state: Hidden) -> list[tuple[str, int]]:
    return [(key, row.n) for row in rows]


def of_named_among_more(factor: int, key: str, rows: list[Sale]) -> list[tuple[str, int]]:
    return [(key, factor * row.n) for row in rows]


def of_hidden_values(key: str, rows: list[tuple[Hidden, ...]]) -> list[tuple[str, int]]:
    return [(key, row[2]) for row in rows]


def of_hidden(key: str, rows: list[Hidden]) -> None:
    pass


def test_names_of_other_annotations_need_no_value() -> None:
    expected = [("Oslo", 3), ("Oslo", 4), ("Rome", 1)]
    assert taken(harness(of_named_beside_hidden, state=N).push(ROWS)) == expected
    assert taken(harness(of_hidden_values).push(ROWS)) == expected
    thrice = functools.partial(functools.partial(of_named_among_more), 3)
    assert taken(harness(thrice).push(ROWS)) == [(city, 3 * n) for city, n in expected]


def test_a_class_of_rows_without_a_value_is_refused() -> None:
    class Local(NamedTuple):
        n: int

    def of_local(key: str, rows: Sequence[Local]) -> None:
        pass

    for fn, text in ((of_local, r"Sequence\[Local\]"), (of_hidden, r"list\[Hidden\]")):
        with pytest.raises(
            InvalidInput, match=f"{fn.__qualname__} are annotated as {text}, and not all of these names"
        ):
            harness(fn)

    def of_captured(key: str, rows: Sequence[Local]) -> list[tuple[str, int]]:
        return [(key, Local(row.n).n) for row in rows]

    assert taken(harness(of_captured).push(ROWS)) == [("Oslo", 3), ("Oslo", 4), ("Rome", 1)]


EVERY_TYPE = pa.schema(
    [
        ("k", pa.int32()),
        ("flag", pa.bool_()),
        ("small", pa.int8()),
        ("real", pa.float64()),
        ("at", pa.timestamp("us")),
        ("zoned", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("money", pa.decimal128(9, 2)),
        ("several", pa.list_(pa.int64())),
        ("both", pa.struct([("a", pa.int64()), ("b", pa.string())])),
    ]
)


@pytest.mark.parametrize("nulls", [False, True])
def test_every_type_goes_through_rows_state_and_output_unchanged(nulls: bool) -> None:
    moment = EPOCH + timedelta(days=19_782, microseconds=5)
    rows = pa.Table.from_pylist(
        [
            {
                "k": k,
                "flag": bool(k % 2),
                "small": k,
                "real": k / 3,
                "at": moment,
                "zoned": moment.replace(tzinfo=UTC),
                "day": moment.date(),
                "text": f"é{k}",
                "raw": bytes([k]),
                "money": pa.scalar(f"{k}.25").cast(pa.decimal128(9, 2)).as_py(),
                "several": [k, k],
                "both": {"a": k, "b": None},
            }
            for k in range(5)
        ]
        + ([{"k": 9}] if nulls else []),
        schema=EVERY_TYPE,
    )
    values = pa.schema(list(EVERY_TYPE)[1:])

    def kept(key: int, rows: list[tuple[Any, ...]], state: Any) -> Iterator[tuple[Any, ...]]:
        if state:
            yield key, *(getattr(state, name) for name in values.names)
        for name, value in zip(values.names, rows[0][1:], strict=True):
            setattr(state, name, value)

    driven = harness(kept, "k", EVERY_TYPE, state=values, output=EVERY_TYPE).push(rows)
    assert not taken(driven)
    assert driven.push(rows).take_output().equals(rows.slice(0, 5))

    arrays: dict[int, dict[str, Any]] = {}

    def as_numpy(key: int, rows: np.ndarray) -> None:
        arrays[key] = {name: rows[name][0] for name in values.names}

    harness(as_numpy, "k", EVERY_TYPE, output=()).push(rows)
    assert arrays[3]["at"] == np.datetime64(moment)
    assert arrays[3]["several"] == [3, 3]
    assert (arrays[3]["small"], arrays[3]["text"], arrays[3]["raw"]) == (3, "é3", b"\3")
    given: list[Any] = []

    def in_numpy(key: int, rows: np.ndarray, state: Any) -> Iterator[tuple[Any, ...]]:
        for name in values.names:
            given.append(getattr(state.one, name))
            setattr(state.one, name, rows[name][0])
        state.two[rows["at"][0]] = rows["zoned"][0], rows["day"][0]
        state.three.append(rows["day"].max())
        yield key, *(rows[name][0] for name in values.names)

    states = [
        ValueState("one", (), values),
        MapState("two", (), pa.timestamp("us"), {"zoned": pa.timestamp("us", "UTC"), "day": pa.date32()}),
        ListState("three", (), {"day": pa.date32()}),
    ]
    driven = harness(in_numpy, "k", EVERY_TYPE, state=states, output=EVERY_TYPE)
    # Null and NaN of floats are one in numpy.
    expected = rows.set_column(3, "real", pc.fill_null(rows["real"], float("nan")))
    found = driven.push(rows).take_output().to_pylist()
    assert repr(found) == repr(expected.to_pylist())
    assert repr(driven.push(rows).take_output().to_pylist()) == repr(expected.to_pylist())
    assert driven.state("one").num_rows == rows.num_rows
    assert repr(given[len(given) // 2 :]) == repr([row[name] for row in expected.to_pylist() for name in values.names])
    assert driven.state("two").select(["_map_key", "zoned", "day"]).to_pylist() == [
        {"_map_key": row["at"], "zoned": row["zoned"], "day": row["day"]} for row in rows.to_pylist()
    ]
    assert driven.state("three")["day"].to_pylist() == rows["day"].to_pylist() * 2
    if nulls:
        assert (arrays[9]["small"], arrays[9]["flag"], arrays[9]["text"]) == (None, None, None)
        assert np.isnan(arrays[9]["real"])
        assert np.isnat(arrays[9]["at"])


def moments(*values: Any) -> list[Any]:
    """What becomes of these in a column of moments in UTC."""
    field = {"at": pa.timestamp("us", "UTC")}
    driven = harness(lambda key, rows: [(value,) for value in values], output=field).push(ROWS[:1])
    return driven.take_output()["at"].cast(pa.int64()).to_pylist()


def test_moments_of_numpy_are_those_of_any_unit_among_others() -> None:
    second = datetime.fromtimestamp(1, UTC)
    nat = np.datetime64("NaT", "us")
    assert moments(np.datetime64(5, "us"), second, None, nat) == [5, 1_000_000, None, None]
    assert moments(np.datetime64(5_000, "ns"), np.datetime64(1, "D")) == [5, 86_400_000_000]
    assert moments(nat) == [None]
    for wrong in (np.datetime64(5_001, "ns"), np.datetime64(1 << 40, "D")):
        with pytest.raises(OperatorError, match=r"of key 'Oslo' gave np.datetime64.* its output, which is timestamp"):
            moments(np.datetime64(5, "us"), wrong)


def test_a_timer_is_set_by_a_moment_of_numpy() -> None:
    def latest(key: str, rows: np.ndarray, state: Any, timers: Any) -> None:
        timers.set(rows["at"].max())
        timers.set(np.datetime64(1, "D"))
        timers.delete(np.datetime64(86_400, "s"))

    driven = harness(latest, schema=AT, on_timer=lambda key, timestamp: (key, timestamp))
    driven.push([at("Oslo", 0, 5), at("Oslo", 0, 7)])
    assert taken(driven.advance(ev.MAX_WATERMARK)) == [("Oslo", 7)]
    for wrong in (np.datetime64("NaT", "us"), np.datetime64(1 << 40, "D"), np.datetime64(5, "ns")):
        driven = harness(lambda key, rows, state, timers, wrong=wrong: timers.set(wrong), on_timer=over)
        with pytest.raises(OperatorError, match=r"a timer at np.datetime64\(.*\)\. Give whole microseconds"):
            driven.push(ROWS)


FAR = pa.array([5, 1 << 62], pa.timestamp("us"))


def test_a_time_that_python_does_not_have_is_said_with_its_key_and_column() -> None:
    said = "a time outside of the years 1 to 9999, 4611686018427387904 as timestamp[us], in"
    rows = pa.table({"city": ["Oslo", "Rome"], "n": [1, 2], "at": FAR})
    many = pa.array([[5], [1 << 62]], pa.list_(pa.timestamp("us")))

    def push(fn: Callable[..., Any], rows: pa.Table, key: str = "city", **given: Any) -> str:
        driven = harness(fn, key, rows.schema, **{"output": (), **given})
        with pytest.raises(OperatorError) as caught:
            driven.push(rows).push(rows)
        return str(caught.value)

    found = push(lambda key, rows: None, rows)
    assert f"of key 'Rome' has a row with {said} column 'at'. Annotate its rows as pa.RecordBatch" in found
    found = push(lambda key, rows: None, rows.set_column(2, "many", many))
    assert "of key 'Rome' has a row with a time outside of the years 1 to 9999, in column 'many'." in found
    found = push(lambda key, rows: None, rows, "at")
    assert f"<lambda> cannot be called: a key has {said} column 'at'. Cast the column to int64 before key_by." in found

    def keeps(key: str, rows: np.ndarray, state: Any) -> None:
        state.at = rows["at"][0]

    kept = "of key 'Rome' set 'at' of state 'state' to np.datetime64('148108-07-06T14:00:27.387904'), which Python's"
    assert kept in push(keeps, rows, state={"at": pa.timestamp("us")})

    def keeps_many(key: str, rows: pa.RecordBatch, state: Any) -> None:
        state["x"] = rows["many"].to_numpy(zero_copy_only=False)[0]

    states = MapState("held", (), pa.string(), {"many": many.type})
    found = push(keeps_many, rows.set_column(2, "many", many), state=states)
    assert "of key 'Rome' has a time outside of the years 1 to 9999, in 'many' of state 'held'." in found


def test_rows_in_numpy_or_arrow_have_any_time() -> None:
    def later(key: str, rows: np.ndarray) -> Any:
        yield key, rows["at"][0]

    rows = pa.table({"city": ["Oslo", "Rome"], "at": FAR})
    output = harness(later, schema=rows.schema, output=rows.schema).push(rows).take_output()
    assert output["at"].cast(pa.int64()).to_pylist() == [5, 1 << 62]


def test_an_attribute_that_is_deleted_is_none() -> None:
    def deletes(key: str, rows: list[Any], state: Any) -> None:
        match rows[0][1]:
            case "set":
                state.one.n, state.two["x"] = 1, 1
            case "value":
                del state.one.n
            case "map":
                del state.two

    states = [ValueState("one", (), N), MapState("two", (), pa.string(), N)]
    driven = harness(deletes, state=states, output=())

    def step(what: str) -> tuple[int, int]:
        driven.push([{"city": city, "item": what, "n": 1} for city in ("Oslo", "Rome")])
        return driven.state("one").num_rows, driven.state("two").num_rows

    assert [step("set"), step("value"), step("map")] == [(2, 2), (0, 2), (0, 0)]


def test_a_state_goes_by_clear_and_by_none_and_one_of_nulls_is_none() -> None:
    def steps(key: str, rows: list[tuple[Any, ...]], state: Any) -> None:
        match rows[0][1]:
            case "set":
                state.one.n, state.two["x"], state.three = rows[0][2], rows[0][2], [1, 2]
            case "clear":
                state.one.clear(), state.two.clear(), state.three.clear()
            case "none":
                state.one = state.two = state.three = None
            case "null":
                state.one.n = None

    driven = harness(
        steps,
        state=[ValueState("one", (), N), MapState("two", CITY, pa.string(), N), ListState("three", (), N)],
        output=(),
    )

    def step(city: str, what: str) -> list[int]:
        driven.push([{"city": city, "item": what, "n": 1}])
        return [driven.state(name).num_rows for name in ("one", "two", "three")]

    assert step("Oslo", "set") == [1, 1, 2]
    assert step("Rome", "set") == [2, 2, 4]
    assert step("Oslo", "clear") == [1, 1, 2]
    assert step("Rome", "none") == [0, 0, 0]
    assert step("Rome", "set") == [1, 1, 2]
    assert step("Rome", "null") == [0, 1, 2]


CITY = {"city": pa.string()}


@pytest.mark.parametrize("seed", range(4))
def test_maps_and_lists_are_those_of_python(seed: int) -> None:
    """A random walk over dicts and lists, beside one in plain dicts."""
    choose = random.Random(seed)
    maps: dict[str, dict[str, Any]] = defaultdict(dict)
    lists: dict[str, list[Any]] = defaultdict(list)

    def change(found: Any, held: list[Any], n: int) -> None:
        match n % 6:
            case 0:
                found[f"i{n}"] = (n, None)
            case 1:
                found["same"] = (n, "x")
                held.append((n, "b"))
            case 2:
                found.pop("same", None)
                held.extend([(n, "c"), (n, None)])
            case 3:
                held[:1] = [(n, "d")]
            case 4 if held:
                held.pop()
            case 5 if n % 18 == 5:
                found.clear(), held.clear()

    def walked(key: str, rows: list[tuple[Any, ...]], state: Any) -> None:
        for _, _, n in rows:
            change(state.items, state.held, n)

    values = {"n": pa.int64(), "s": pa.string()}
    driven = harness(
        walked, state=[MapState("items", (), pa.string(), values), ListState("held", (), values)], output=()
    )
    for _ in range(12):
        rows = [{"city": choose.choice("abcde"), "item": "", "n": choose.randrange(60)} for _ in range(9)]
        for row in rows:
            change(maps[row["city"]], lists[row["city"]], row["n"])
        driven.push(rows)
        if choose.random() < 0.3:
            driven = OperatorHarness.restore(driven.snapshot(), parallelism=choose.choice([1, 2, 3]))
        found: Any = defaultdict(dict)
        for row in driven.state("items").to_pylist():
            found[row["city"]][row["_map_key"]] = (row["n"], row["s"])
        assert found == {key: value for key, value in maps.items() if value}
        listed: Any = defaultdict(list)
        for row in sorted(driven.state("held").to_pylist(), key=lambda row: (row["city"], row["_index"])):
            listed[row["city"]].append((row["n"], row["s"]))
        assert listed == {key: value for key, value in lists.items() if value}


def test_what_lies_in_a_nested_value_may_be_changed_in_place() -> None:
    def gathered(key: str, rows: list[tuple[Any, ...]], state: Any) -> None:
        state.one.all = state.one.all or []
        state.one.all.append(rows[0][2])
        state.two.setdefault("x", []).append(rows[0][2])
        if not state.three:
            state.three.append([])
        state.three[0].append(rows[0][2])

    many = {"all": pa.list_(pa.int64())}
    states = [ValueState("one", (), many), MapState("two", (), pa.string(), many), ListState("three", (), many)]
    driven = harness(gathered, state=states, output=()).push(ROWS[:1]).push(ROWS[2:])
    assert [driven.state(name)["all"].to_pylist() for name in ("one", "two", "three")] == [[[3, 4]]] * 3


def test_only_what_has_changed_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    driven = harness(lambda key, rows, state: setattr(state, "n", rows[0][2]), state=N, output=()).push(ROWS)
    put: list[Any] = []
    state = driven._chains[0].operators["operator"].states.value("state")
    kept = state.put
    monkeypatch.setattr(state, "put", lambda keys, values: (put.append(keys["city"].to_pylist()), kept(keys, values)))
    driven.push(ROWS[:2])
    assert put == []
    driven.push([ROWS[1], {"city": "Bonn", "item": "", "n": 0}, {"city": "Oslo", "item": "", "n": 9}])
    assert put == [["Bonn", "Oslo"]]


AT = pa.schema([("city", pa.string()), ("n", pa.int64()), ("at", pa.timestamp("us"))])


def session(key: str, rows: list[tuple[Any, ...]], state: Any, timers: Any) -> None:
    for _, n, at in rows:
        if state:
            timers.delete(state.end)
        us = (at - EPOCH).microseconds
        state.end, state.n = us + 10, (state.n or 0) + n
        timers.set(state.end)


def over(key: str, timestamp: int, state: Any) -> Iterator[tuple[str, int]]:
    assert timestamp == state.end
    yield key, state.n
    state.clear()


def at(city: str, n: int, us: int) -> dict[str, Any]:
    return {"city": city, "n": n, "at": EPOCH + timedelta(microseconds=us)}


def test_timers_fire_for_their_key_in_event_time() -> None:
    driven = harness(
        session, schema=AT, state={"end": pa.int64(), "n": pa.int64()}, timers="event_time", on_timer=over
    ).push([at("Oslo", 1, 0), at("Oslo", 2, 5), at("Rome", 9, 30)])
    assert (taken(driven.advance(14)), taken(driven.advance(15))) == ([], [("Oslo", 3)])
    assert driven.state("state").num_rows == 1
    driven = OperatorHarness.restore(driven.snapshot())
    assert taken(driven.advance(ev.MAX_WATERMARK)) == [("Rome", 9)]
    assert not driven.state("timers").num_rows


class Alarms:
    """A function and its timers in one object."""

    def __call__(self, key: str, rows: list[tuple[Any, ...]], state: Any, timers: Any) -> None:
        for moment in (40, 10, 20, 30, 20):
            timers.set(moment)
        timers.set(EPOCH + timedelta(microseconds=50))
        timers.delete(40)

    def on_timer(self, key: str, timestamp: int, state: Any, timers: Any) -> tuple[str, int]:
        if timestamp == 10:
            timers.delete(20)
            timers.delete(30)
            timers.set(30)
            timers.set(60)
        return key, timestamp


@pytest.mark.parametrize("pieces", [False, True])
def test_a_timer_may_set_and_delete_those_that_are_due_with_it(pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr(per_key, "PIECE_ROWS", 2)
    driven = harness(Alarms(), schema=AT).push([at(city, 0, 0) for city in "abc"]).advance(100)
    assert sorted(taken(driven)) == [(city, moment) for city in "abc" for moment in (10, 30, 50, 60)]


def test_the_rows_of_a_key_come_in_pieces_in_order_and_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_key, "PIECE_ROWS", 4)
    seen = defaultdict(list)
    rows = [{"city": "ab"[n % 3 == 0], "item": "", "n": n} for n in range(50)]
    driven = harness(lambda key, rows: seen[key].append([row[2] for row in rows]), output=())
    driven.push(pa.Table.from_pylist(rows, schema=SALES)).push(pa.Table.from_pylist([], schema=SALES))
    assert all(all(pieces) for pieces in seen.values())
    assert {key: [n for piece in pieces for n in piece] for key, pieces in seen.items()} == {
        city: [row["n"] for row in rows if row["city"] == city] for city in "ab"
    }
    assert max(map(len, seen.values())) > 5


def test_a_function_may_yield_more_than_memory_should_hold_at_once() -> None:
    def many(key: str, rows: list[tuple[Any, ...]]) -> Iterator[tuple[str, int]]:
        yield from ((key, n) for n in range(200_000))

    output = harness(many).push(ROWS).output
    assert max(len(chunk) for chunk in output["n"].chunks) <= 2 * 65_536
    assert output.num_rows == 400_000
    assert pc.sum(output["n"]).as_py() == 2 * sum(range(200_000))


TABLE = pa.table({"city": ["x", "y"], "n": [1, 2]})


@pytest.mark.parametrize(
    "many",
    [
        lambda key, made: (made() for _ in range(5)),
        lambda key, made: (made() if n % 3 else (key, n) for n in range(9)),
        lambda key, made: (made().to_batches()[0] if n > 3 else {"city": key, "n": n} for n in range(9)),
        lambda key, made: made(),
        lambda key, made: [made()],
        lambda key, made: [(key, 0), made(), (key, 1)],
    ],
)
def test_a_table_goes_out_before_the_next_one_is_made(many: Callable[..., Any]) -> None:
    events: list[str] = []

    def made() -> pa.Table:
        events.append("made")
        return TABLE

    driven = harness(lambda key, rows: many(key, made))
    cities = [str(n) for n in range(4)]
    rows = pa.record_batch({"city": cities, "item": cities, "n": [0] * 4}, SALES)
    total = 0
    for batch in driven.operator().process(rows, 0):
        total += len(batch)
        if batch["city"][0].as_py() == "x":
            events.append("out")
    made_in_all = events.count("made")
    assert events == ["made", "out"] * made_in_all
    gathered: list[Any] = []
    for city in cities:
        given = many(city, lambda: TABLE)
        gathered.extend([given] if isinstance(given, pa.Table) else given)
    assert total == sum(len(one) if isinstance(one, pa.Table | pa.RecordBatch) else 1 for one in gathered)


@pytest.mark.parametrize("keys", [3, 70_000, 200_000])
def test_grouping_keeps_the_order_of_rows_and_of_first_rows(keys: int) -> None:
    rows = pa.table({"k": np.random.default_rng(1).integers(0, keys, 150_000), "n": np.arange(150_000)})
    seen: dict[int, list[int]] = {}
    harness(lambda key, rows: seen.__setitem__(key, [n for _, n in rows]), "k", rows.schema, output=()).push(rows)
    expected: dict[int, list[int]] = {}
    for key, n in zip(rows["k"].to_pylist(), rows["n"].to_pylist(), strict=True):
        expected.setdefault(key, []).append(n)
    assert list(seen.items()) == list(expected.items())


def boom(key: str, rows: list[tuple[Any, ...]]) -> Iterator[tuple[str, int]]:
    yield key, 1
    if key == "Rome":
        raise KeyError("b")


def stops(key: str, rows: list[tuple[Any, ...]]) -> tuple[str, int]:
    return key, next(iter([] if key == "Rome" else [1]))


def rome(wrong: Any) -> Callable[..., Any]:
    """A function that gives this for Rome."""

    def gives(key: str, rows: Any) -> Any:
        return wrong if key == "Rome" else [(key, 1), (key, 2)]

    return gives


def sets(**values: Any) -> Callable[..., Any]:
    """A function that changes the state of Rome so."""

    def changes(key: str, rows: Any, state: Any) -> None:
        for name, value in values.items():
            setattr(state, name, value if key == "Rome" else getattr(state, name))

    return changes


CITY_FIELD, N_FIELD = [pa.field("city", pa.string())], [pa.field("n", pa.int64(), nullable=False)]
NULLS = pa.table({"city": ["Rome"], "n": pa.array([None], pa.int64())})
MANY = {"n": pa.list_(pa.int8())}
LISTS = [ListState("three", (), MANY), MapState("two", (), pa.string(), MANY)]
NESTED = [*CITY_FIELD, pa.field("n", pa.list_(pa.int32()))]
STRICT = pa.schema([*N_FIELD, pa.field("s", pa.string())])
SEVERAL = [ValueState("one", (), N), MapState("two", (), pa.string(), STRICT), ListState("three", (), N)]


@pytest.mark.parametrize(
    ("fn", "given", "said"),
    [
        (boom, {}, "boom of key 'Rome' raised KeyError: 'b'"),
        (stops, {}, "stops of key 'Rome' raised StopIteration. Give next() a default."),
        (rome(7), {}, "of key 'Rome' returned int. Return or yield tuples, dicts or an Arrow table of the output"),
        (rome("Rome"), {}, "returned str."),
        (rome([7]), {}, "of key 'Rome' gave int as a row. Give tuples, dicts"),
        (rome(("Rome",)), {}, "of key 'Rome' gave a row of 1 values, ('Rome',). Its output has 2 columns, city string"),
        (rome(("Rome", 1.5)), {}, "of key 'Rome' gave 1.5 in column 'n' of its output, which is int64: 1.5 is no"),
        (rome(("Rome", "x")), {}, "of key 'Rome' gave 'x' in column 'n' of its output, which is int64"),
        (rome(("Rome", 1 << 63)), {}, "in column 'n' of its output, which is int64"),
        (rome({"city": "Rome"}), {}, "of key 'Rome' gave a dict of city. The columns of its output are city, n."),
        (rome({"city": "Rome", "m": 1}), {}, "of key 'Rome' gave a dict of city, m."),
        (rome(pa.table({"city": ["Rome"]})), {}, "of key 'Rome' gave a table of city string. Its output is city str"),
        (rome(pa.table({"city": ["Rome"], "n": ["x"]})), {}, "gave a table of other types than its output"),
        (
            rome(pa.table({"city": ["Rome"], "n": [1e300]})),
            {"output": [*CITY_FIELD, pa.field("n", pa.float32())]},
            "column 'n', double: 1e+300 is no float",
        ),
        (rome(("Rome", None)), {"output": [*CITY_FIELD, *N_FIELD]}, "of key 'Rome' gave None in column 'n' of its"),
        (rome(NULLS), {"output": [*CITY_FIELD, *N_FIELD]}, "of key 'Rome' gave None in column 'n' of its output"),
        (rome(("Rome", [1, 2.5])), {"output": NESTED}, "in column 'n' of its output, which is list<item"),
        (sets(n="x"), {"state": N}, "of key 'Rome' set 'n' of state 'state' to 'x', which is int64"),
        (
            sets(n=[1, 2.5]),
            {"state": {"n": pa.list_(pa.int32())}},
            "set 'n' of state 'state' to [1, 2.5], which is list",
        ),
        (sets(n={"bb": 1}), {"state": {"n": pa.struct({"b": pa.int64()})}}, "'bb' is no field of struct<b: int64>"),
        (sets(n=1e300), {"state": {"n": pa.float32()}}, "set 'n' of state 'state' to 1e+300, which is float"),
        (
            sets(three=[[2.5]]),
            {"state": LISTS},
            "set 'n' of state 'three' to [2.5], which is list<item: int8>: 2.5 is no",
        ),
        (
            sets(two={"a": [2.5]}),
            {"state": LISTS},
            "set 'n' of state 'two' to [2.5], which is list<item: int8>: 2.5 is",
        ),
        (sets(n="x" * 9_999), {"state": N}, "of key 'Rome' set 'n' of state 'state' to 'xxx"),
        (rome(("Rome", "x" * 9_999)), {}, "of key 'Rome' gave 'xxx"),
        (sets(two={"a": "x" * 9_999}), {"state": SEVERAL}, "of key 'Rome' put 'xxx"),
        (sets(m=1), {"state": N}, "raised AttributeError"),
        (sets(s="x"), {"state": STRICT}, "of key 'Rome' left 'n' of state 'state' None, which is declared without"),
        (sets(one=1), {"state": SEVERAL}, "set state 'one' to int. Keep the object, and set its attributes, or set"),
        (sets(two=[1]), {"state": SEVERAL}, "set state 'two' to list. Keep a dict, or set None."),
        (sets(two={"a": 1}), {"state": SEVERAL}, "put 1 into state 'two'. Put tuples of its 2 columns, n, s."),
        (sets(two={"a": (None, "")}), {"state": SEVERAL}, "left 'n' of state 'two' None"),
        (sets(two={1: (1, "")}), {"state": SEVERAL}, "set '_map_key' of state 'two' to 1, which is string"),
        (sets(three=(1,)), {"state": SEVERAL}, "set state 'three' to tuple. Keep a list, or set None."),
        (sets(three=[1, "x"]), {"state": SEVERAL}, "set 'n' of state 'three' to 'x', which is int64"),
    ],
)
def test_what_is_wrong_is_said_with_the_key(fn: Callable[..., Any], given: dict[str, Any], said: str) -> None:
    driven = harness(fn, **given)
    with pytest.raises(OperatorError) as caught:
        driven.push([{"city": city, "item": "", "n": 1} for city in ("Bonn", "Rome", "Oslo")])
    assert said in str(caught.value)
    assert "process of 'operator', subtask 0, failed: PerKeyError: " in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_timer_that_raises_is_said_with_the_key_and_has_its_cause() -> None:
    def wrong(key: str, timestamp: int) -> None:
        raise ZeroDivisionError

    driven = harness(lambda key, rows, state, timers: timers.set(1.5), on_timer=wrong)
    with pytest.raises(OperatorError, match=r"a timer at 1\.5\. Give whole microseconds"):
        driven.push(ROWS)
    driven = harness(lambda key, rows, state, timers: timers.set(1), on_timer=wrong).push(ROWS)
    with pytest.raises(OperatorError, match="of key 'Oslo' raised ZeroDivisionError") as caught:
        driven.advance(1)
    assert isinstance(caught.value.__cause__.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fn": 7}, "fn of apply_per_key is 7. Give a function (key, rows, state, timers)."),
        ({"fn": lambda key: None}, "takes (key). It is called with (key, rows, state, timers)"),
        ({"fn": lambda key, rows, state, timers, more: None}, "takes (key, rows, state, timers, more)"),
        ({"fn": lambda key, rows, *, wanted: None}, "takes (key, rows, *, wanted)"),
        ({"fn": lambda key, rows, state, timers: None}, "takes timers, but there is no function to call"),
        ({"fn": lambda key, rows: None, "state": N}, "state is declared, and"),
        ({"timers": "event_time"}, "there is no function to call. Give on_timer=."),
        ({"timers": "noon", "on_timer": lambda key, timestamp: None}, "timers is 'noon'. Give 'event_time'"),
        ({"state": {"class": pa.int64()}}, "column 'class' of state 'state' cannot be an attribute"),
        ({"state": {"clear": pa.int64()}}, "column 'clear'"),
        ({"state": [ValueState("a b", (), N)]}, "state 'a b' cannot be an attribute"),
        ({"state": Timers("t", CITY)}, "state 't' of apply_per_key is a Timers."),
        ({"state": []}, "state 'state' of apply_per_key has no columns. Name at least one."),
        ({"state": ListState("held", (), {})}, "state 'held' of apply_per_key has no columns"),
    ],
)
def test_what_cannot_work_is_refused_when_the_dataflow_is_built(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ApplyPerKey("city", **{"fn": counted, "output": OUT, **given})
    assert said in str(caught.value)


def test_rows_of_another_kind_are_refused() -> None:
    def by_dict(key: str, rows: dict[str, int]) -> None:
        pass

    with pytest.raises(
        InvalidInput, match=r"the rows of .*by_dict are annotated as dict\[.*pa\.RecordBatch, pa\.Table"
    ):
        ApplyPerKey("city", by_dict)

    def by_lists(key: str, rows: list[list[int]]) -> None:
        pass

    with pytest.raises(InvalidInput, match=r"the rows of .*by_lists are annotated as list\[list\[int\]\], which"):
        ApplyPerKey("city", by_lists)


def test_timers_of_processing_time_go_by_the_clock_on_the_wall() -> None:
    seen: list[int] = []

    def minute(key: str, rows: list[tuple[Any, ...]], state: Any, timers: Any) -> None:
        seen.append(timers.processing_time_us)
        timers.set(timers.processing_time_us + 60)

    driven = harness(minute, timers="processing_time", on_timer=lambda key, timestamp: (key, timestamp)).push(ROWS)
    begin = seen[0]
    assert taken(driven.advance(ev.MAX_WATERMARK - 1).advance_processing_time(begin + 59)) == []
    assert sorted(taken(driven.advance_processing_time(begin + 60))) == [("Oslo", begin + 60), ("Rome", begin + 60)]


@pytest.mark.parametrize("refresh", ["write", "read_and_write"])
def test_what_is_set_lives_on_also_to_the_same_value(refresh: Any) -> None:
    ttl = Ttl(10, refresh=refresh)

    def steps(key: str, rows: list[tuple[Any, ...]], state: Any) -> tuple[str, int]:
        found = sum(bool(one) for one in (state.one, state.two, state.three))
        match rows[0][1]:
            case "new":
                state.one.n, state.two["x"], state.two["y"] = 7, 7, 8
                state.three.append(7)
            case "same":
                state.one.n = state.one.n
                state.two["x"] = state.two["x"]
        return key, found + 10 * len(state.two)

    states = [
        ValueState("one", (), N, ttl=ttl),
        MapState("two", (), pa.string(), N, ttl=ttl),
        ListState("three", (), N, ttl=ttl),
    ]
    driven = harness(steps, state=states).advance(0)

    def step(what: str) -> int:
        driven.push([{"city": "Oslo", "item": what, "n": 1}])
        return int(taken(driven)[0][1])

    assert step("new") == 20
    driven.advance(6)
    assert step("same") == 23
    driven.advance(12)
    # Of three, the value and one of two entries were set again; reading has refreshed them all.
    assert step("look") == (12 if refresh == "write" else 23)
    driven.advance(18)
    assert step("look") == (0 if refresh == "write" else 23)
    driven.advance(29)
    assert step("look") == 0


def test_batches_are_joined_up_to_a_size_and_one_input_at_a_time() -> None:
    gathered = GatheredBatches(100)
    batches = [pa.record_batch({"n": pa.array([n, n], pa.int64())}) for n in range(8)]
    inputs = [0, 0, 0, 1, 1, 0, 0, 0]

    def plain(found: Iterator[tuple[pa.RecordBatch, int]]) -> list[tuple[list[int], int]]:
        return [(batch["n"].to_pylist(), number) for batch, number in found]

    seen = [plain(gathered.add(batch, number)) for batch, number in zip(batches, inputs, strict=True)]
    assert seen == [[], [], [], [([0, 0, 1, 1, 2, 2], 0)], [], [([3, 3, 4, 4], 1)], [], []]
    assert plain(gathered.flush()) == [([5, 5, 6, 6, 7, 7], 0)]
    assert plain(gathered.flush()) == []
    large = pa.record_batch({"n": pa.array(range(20), pa.int64())})
    assert plain(gathered.add(batches[0], 0)) == []
    assert plain(gathered.add(large, 0)) == [([0, 0], 0)]
    assert plain(gathered.add(large, 0)) == [([*range(20)], 0)]
    assert plain(GatheredBatches(0).add(batches[1], 2)) == [([1, 1], 2)]


def test_the_collector_of_python_is_as_before_when_a_piece_is_done() -> None:
    before = gc.get_threshold()
    within: list[Any] = []

    def notes(key: str, rows: list[tuple[Any, ...]]) -> None:
        within.append(gc.get_threshold())
        if key == "Rome":
            raise KeyError

    with pytest.raises(OperatorError):
        harness(notes, output=()).push(ROWS)
    assert within == [(100_000, 50, 1000)] * 2
    assert gc.get_threshold() == before
