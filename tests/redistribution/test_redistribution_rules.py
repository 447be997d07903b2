"""Every mode's rule: against an oracle in small worlds, all of them; and case by case, where
Flink's rules are ours.

A fully finished operator keeps the parallelism that it had, whatever its neighbours are rescaled
to. Beyond small worlds: any parallelism, layers, many handles a subtask, segments shared with
others; and many states.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import stateformat as sf
from stateformat.graph import Status
from stateformat.keys import key_group_range
from stateformat.redistribution import RestorePlan, rescale
from stateformat.states import even_split_state
from tests.redistribution.redistribution_cases import (
    FakeCheckpoint,
    Part,
    checkpoint,
    deliver,
    edge,
    one,
    op,
    part,
    planned,
    published,
    restored,
    state,
)
from tests.redistribution.redistribution_oracle import expected
from tests.worlds.stores import rescale_newest

MAX = 13
"""Not a multiple of any parallelism but 1 and 13, so ranges are as uneven as they get."""
SOURCE = op("source", 3, 16, finished=range(3))


@cache
def world(parallelism: int) -> FakeCheckpoint:
    """One operator for every set of finished subtasks, each with states and in-flight records of
    all kinds.
    """
    deal = random.Random(parallelism)
    operators, states, parts, edges = [SOURCE], [], [], []
    for done in product((False, True), repeat=parallelism):
        finished = [subtask for subtask, is_done in enumerate(done) if is_done]
        uid = "op" + "".join("F" if is_done else "r" for is_done in done)
        operator = op(uid, parallelism, MAX, finished=finished[::2], finishing=finished[1::2], coordinator=True)
        operators.append(operator)
        hashed, balanced = edge("source", uid, "hash", id=f"{uid}.h"), edge("source", uid, id=f"{uid}.r", input=1)
        loop = edge(uid, uid, "rebalance", id=f"{uid}.loop", feedback=True)
        edges += [hashed, balanced, loop]
        declared = [
            *(state(uid, name, "keyed") for name in ("k1", "k2")),
            *(state(uid, name, "even_split") for name in ("e1", "e2", "e3")),
            state(uid, "b", "broadcast"),
            state(uid, "p", "progress"),
            state(uid, "fh", "in_flight", on=hashed),
            state(uid, "fr", "in_flight", on=balanced),
            state(uid, "fl", "in_flight", on=loop),
            *([] if finished else [state(uid, "u", "union")]),
        ]
        coordinator, committables = state(uid, "c", "coordinator"), state(uid, "x", "committables")
        states += [*declared, coordinator, committables]
        for item, subtask in product(declared, range(parallelism)):
            if done[subtask]:
                continue
            tokens = [f"{item.name}{subtask}.{number}" for number in range(deal.randrange(4))]
            if item.mode == "keyed" or item.name == "fh":
                owned = [group for group in range(MAX) if group * parallelism // MAX == subtask]
                tokens = [(deal.choice(owned), token) for token in tokens]
            elif item.mode == "in_flight":
                tokens = [(deal.randrange(3), token) for token in tokens]
            parts.append(Part(uid, item.name, subtask, tuple(tokens), foreign_before=deal.randrange(3)))
        if operator.status is not Status.FULLY_FINISHED:
            parts.append(Part(uid, "c", None, ("c",)))
        parts.append(Part(uid, "x", parallelism + 5, (f"x{uid}",)))
    return checkpoint(operators, states, parts, edges)


PAIRS = list(product(range(1, 9), range(1, 9)))


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_every_row_goes_where_the_oracle_says_for_every_set_of_finished_subtasks(old: int, new: int) -> None:
    source = world(old)
    plan = planned(source, new)
    running = {operator.uid for operator in source.record.graph.operators if operator.status is Status.RUNNING}
    parallelism = {operator.uid: operator.parallelism for operator in plan.topology.operators}
    wanted = expected(source, parallelism, progress_stays=lambda uid: old == new and uid in running)
    assert deliver(source, plan.slices) == wanted
    # Even-split state evens out over all states of an operator.
    load: dict[tuple[str, int], int] = {}
    for piece in plan.slices.to_pylist():
        if piece["mode"] == "even_split":
            at = piece["operator"], piece["subtask"]
            load[at] = load.get(at, 0) + piece["rows"]
    for operator in source.record.graph.operators:
        kept = old == new and operator.status is Status.RUNNING
        if operator.uid != "source" and operator.status is not Status.FULLY_FINISHED and not kept:
            counts = [load.get((operator.uid, subtask), 0) for subtask in range(new)]
            assert max(counts) - min(counts) <= 1


def entries(name: str, counts: list[int], *, uid: str = "a") -> list[Part]:
    """One part per subtask with so many entries, numbered through."""
    parts, first = [], 0
    for subtask, count in enumerate(counts):
        parts.append(Part(uid, name, subtask, tuple(f"{name}{number}" for number in range(first, first + count))))
        first += count
    return parts


def split(lists: dict[str, list[int]], new: int) -> dict[str, list[list[str]]]:
    old = len(next(iter(lists.values())))
    parts = [part for name, counts in lists.items() for part in entries(name, counts)]
    got = restored(checkpoint([op("a", old, 64)], [state("a", name, "even_split") for name in lists], parts), new)
    return {name: [got.get(("a", name, subtask), []) for subtask in range(new)] for name in lists}


# Flink's RoundRobinOperatorStateRepartitioner, with names whose order in a hash map is that of the
# alphabet.
@pytest.mark.parametrize(
    ("lists", "new", "wanted"),
    [
        ({"a": [5, 5]}, 3, {"a": [4, 3, 3]}),
        ({"a": [4]}, 2, {"a": [2, 2]}),
        ({"a": [1, 1]}, 3, {"a": [1, 1, 0]}),
        ({"a": [1, 1], "b": [1, 1]}, 3, {"a": [1, 1, 0], "b": [1, 0, 1]}),
        ({"a": [2, 2], "b": [2, 2], "c": [2, 2]}, 3, {"a": [2, 1, 1], "b": [1, 2, 1], "c": [1, 1, 2]}),
        ({"a": [0, 3, 0]}, 2, {"a": [2, 1]}),
        ({"a": [0, 0]}, 4, {"a": [0, 0, 0, 0]}),
        # Unchanged parallelism stays uneven.
        ({"a": [5, 0, 1]}, 3, {"a": [5, 0, 1]}),
        # Names are in the order of their bytes.
        ({"é": [1, 0], "z": [1, 0], "Z": [1, 0]}, 3, {"é": [0, 0, 1], "z": [0, 1, 0], "Z": [1, 0, 0]}),
        (
            {"t1": [7], "t2": [3], "t3": [4], "t4": [1]},
            4,
            {"t1": [2, 2, 2, 1], "t2": [1, 1, 0, 1], "t3": [1] * 4, "t4": [0, 0, 1, 0]},
        ),
    ],
)
def test_even_split_deals_as_flinks_repartitioner_where_the_order_of_names_is_the_same(
    lists: dict[str, list[int]], new: int, wanted: dict[str, list[int]]
) -> None:
    dealt = split(lists, new)
    assert {name: [len(hand) for hand in hands] for name, hands in dealt.items()} == wanted


def test_even_split_chunks_are_contiguous_and_begin_at_the_running_start() -> None:
    dealt = split({"a": [3, 2], "b": [4, 0]}, 3)
    assert dealt["a"] == [["a0", "a1"], ["a2", "a3"], ["a4"]]
    # 5 entries over 3 leave 2 over, so the longer chunk of b, which is its first, goes to subtask
    # 2.
    assert dealt["b"] == [["b2"], ["b3"], ["b0", "b1"]]


def test_even_split_is_dealt_again_at_unchanged_parallelism_when_a_subtask_has_finished() -> None:
    source = one("even_split", op("a", 3, finished=[1]), part(0, *"01234"), part(2, "5"))
    assert list(restored(source, 3).values()) == [["0", "1"], ["2", "3"], ["4", "5"]]


# Flink's mapper RANGE (its channel state, 32768 key groups) is the cut of key groups.
RANGES = [
    (2, 3, "[0][0,1][1]"),
    (3, 2, "[0,1][1,2]"),
    (3, 4, "[0][0,1][1,2][2]"),
    (3, 7, "[0][0][0,1][1][1,2][2][2]"),
    (5, 3, "[0,1][1,2,3][3,4]"),
    (4, 4, "[0][1][2][3]"),
    (10, 4, "[0,1,2][2,3,4][5,6,7][7,8,9]"),
    (1, 5, "[0][0][0][0][0]"),
    (10, 2, "[0,1,2,3,4][5,6,7,8,9]"),
]


def dense(old: int, max_parallelism: int) -> FakeCheckpoint:
    owned: list[list[tuple[int, int]]] = [[] for _ in range(old)]
    for group in range(max_parallelism):
        owned[group * old // max_parallelism].append((group, group))
    return one("keyed", op("a", old, max_parallelism), *(part(subtask, *rows) for subtask, rows in enumerate(owned)))


@pytest.mark.parametrize(("old", "new", "wanted"), RANGES)
def test_keyed_state_comes_from_the_old_subtasks_whose_ranges_meet_the_new(old: int, new: int, wanted: str) -> None:
    plan = planned(dense(old, 32_768), new)
    sources = "".join(
        f"[{','.join(str(handle) for handle in plan.slices_of('a', subtask)['handle'].to_pylist())}]"
        for subtask in range(new)
    )
    assert sources == wanted


def cuts(plan: RestorePlan, *columns: str) -> list[tuple[int, ...]]:
    return [tuple(piece.values()) for piece in plan.slices.select(["subtask", *columns]).to_pylist()]


def test_a_handle_is_cut_to_its_groups_with_rows() -> None:
    plan = planned(one("keyed", op("a", 1, 10), part(0, *((group, group) for group in (1, 1, 4, 8)))), 5)
    found = cuts(plan, "row_start", "rows", "first_group", "last_group")
    assert found == [(0, 0, 2, 1, 1), (2, 2, 1, 4, 4), (4, 3, 1, 8, 8)]


def test_long_stretches_without_rows_are_trimmed_from_both_ends() -> None:
    groups = (3, 30, 31, 200, 201, 400, 990)
    source = one("keyed", op("a", 1, 1000), part(0, *((group, group) for group in groups)))
    plan = planned(source, 4)
    assert cuts(plan, "rows", "first_group", "last_group") == [(0, 5, 3, 201), (1, 1, 400, 400), (3, 1, 990, 990)]
    assert len(deliver(source, plan.slices)) == 3


def test_all_layers_are_cut_alike_and_come_lowest_first() -> None:
    source = one(
        "keyed",
        op("a", 2, 8),
        part(0, (0, "base"), (3, "base")),
        part(0, (3, "first"), layer=1),
        part(0, (0, "second"), (3, "second"), layer=2),
        part(1, (7, "base")),
        part(1, (4, "first"), layer=1),
    )
    assert planned(source, 1).slices_of("a", 0)["layer"].to_pylist() == [0, 0, 1, 1, 2]
    assert restored(source, 4) == {
        ("a", "s", 0): [(0, "base"), (0, "second")],
        ("a", "s", 1): [(3, "base"), (3, "first"), (3, "second")],
        ("a", "s", 2): [(4, "first")],
        ("a", "s", 3): [(7, "base")],
    }


COPIES = {1: ("1",), 3: ("3",)}


@pytest.mark.parametrize(
    ("old", "new", "copies", "wanted"),
    [
        (4, 4, COPIES, ["1", "1", "1", "3"]),
        (4, 6, COPIES, ["1", "1", "1", "3", "1", "3"]),
        (4, 1, COPIES, ["1"]),
        (2, 3, {0: (), 1: ("1",)}, ["", "1", ""]),
    ],
)
def test_broadcast_gives_every_subtask_one_copy_its_own_where_there_is_one(
    old: int, new: int, copies: dict[int, tuple[str, ...]], wanted: list[str]
) -> None:
    finished = [subtask for subtask in range(old) if subtask not in copies]
    source = one("broadcast", op("a", old, finished=finished), *(part(at, *rows) for at, rows in copies.items()))
    got = restored(source, new)
    assert ["".join(got.get(("a", "s", subtask), [])) for subtask in range(new)] == wanted


def test_two_broadcast_handles_of_one_reporter_are_one_copy() -> None:
    got = restored(one("broadcast", op("a", 2), part(0, "one"), part(0, "two"), part(1, "one", "two")), 3)
    assert list(got.values()) == [["one", "two"]] * 3


def pipeline(partitioner: str, **upstream: object) -> FakeCheckpoint:
    """in -(partitioner)-> out, both at 2, out with progress."""
    parts = [Part("out", "p", 0, ("0",)), Part("out", "p", 1, ("1",))]
    states, edges = [state("out", "p", "progress")], [edge("in", "out", partitioner)]
    return checkpoint([op("in", 2, **upstream), op("out", 2)], states, parts, edges)


KEPT, SHARED = [["0"], ["1"]], [["0", "1"]] * 2


@pytest.mark.parametrize(
    ("source", "topology", "wanted"),
    [
        (pipeline("rebalance"), 2, KEPT),
        (pipeline("rebalance"), 3, [["0", "1"]] * 3),
        (pipeline("rebalance"), {"out": 1}, [["0", "1"]]),
        # A point-to-point producer was dealt anew, or has partly finished.
        (pipeline("rescale"), {"in": 4}, SHARED),
        (pipeline("forward", finished=[1]), 2, SHARED),
        # An all-to-all producer was dealt anew; a producer has finished.
        (pipeline("hash"), {"in": 4}, KEPT),
        (pipeline("forward", finished=[0, 1]), {}, KEPT),
        (one("progress", op("a", 3, finished=[0]), part(1, "1"), part(2, "2")), 3, [["1", "2"]] * 3),
    ],
)
def test_progress_is_kept_where_nothing_is_dealt_anew_and_shared_otherwise(
    source: FakeCheckpoint, topology: int | dict[str, int], wanted: list[list[str]]
) -> None:
    assert list(restored(source, topology).values()) == wanted


def in_flight(partitioner: str, old: int, rows: dict[int, tuple], **rest: object) -> FakeCheckpoint:
    """A loop of operator ``a`` with these records on it."""
    loop = edge("a", "a", partitioner, id="e", feedback=True)
    return checkpoint(
        [op("a", old, **rest)],
        [state("a", "s", "in_flight", on=loop)],
        [part(at, *of) for at, of in rows.items()],
        [loop],
    )


def test_a_channel_is_cut_into_contiguous_chunks_the_longer_first() -> None:
    rows = {0: tuple((0, number) for number in range(5)), 1: tuple((1, number) for number in range(2))}
    # Channel 0 -> 0 has 5 records, 2 over 3 subtasks, so channel 1 -> 1 begins at subtask 2.
    wanted = [[(0, 0), (0, 1), (1, 1)], [(0, 2), (0, 3)], [(0, 4), (1, 0)]]
    assert list(restored(in_flight("rebalance", 2, rows), 3).values()) == wanted


def test_a_part_of_a_channel_names_its_sender_alone() -> None:
    rows = tuple((sender, number) for sender in (0, 2) for number in range(2))
    plan = planned(in_flight("rebalance", 1, {0: rows}), 2)
    found = cuts(plan, "row_start", "rows", "first_group", "last_group")
    assert found == [(0, 0, 1, 0, 0), (0, 2, 1, 2, 2), (1, 1, 1, 0, 0), (1, 3, 1, 2, 2)]


@pytest.mark.parametrize("partitioner", ["rebalance", "forward", "rescale", "broadcast"])
def test_in_flight_records_stay_where_the_receivers_do(partitioner: str) -> None:
    rows = {0: ((0, "x"), (1, "y"), (1, "z")), 1: ()}
    assert restored(in_flight(partitioner, 2, rows), 2) == {("a", "s", 0): list(rows[0])}


def test_what_a_broadcast_loop_sent_stays_with_those_who_still_listen() -> None:
    rows = [(2, "x"), (2, "y")]
    source = in_flight("broadcast", 3, {0: tuple(rows), 2: tuple(rows)}, finished=[1])
    assert restored(source, 3) == {("a", "s", 0): rows, ("a", "s", 2): rows}


def test_in_flight_records_of_a_hash_edge_follow_their_key_group() -> None:
    rows = {0: ((0, "a"), (7, "b")), 1: ((8, "c"), (15, "d"))}
    wanted = [[(0, "a")], [(7, "b")], [(8, "c")], [(15, "d")]]
    assert list(restored(in_flight("hash", 2, rows), 4).values()) == wanted


def test_union_gives_everyone_everything_old_subtasks_in_order() -> None:
    source = checkpoint([op("a", 3)], [state("a", "u", "union")], entries("u", [2, 0, 1]))
    assert list(restored(source, 2).values()) == [["u0", "u1", "u2"]] * 2


def test_a_fully_finished_operator_gets_nothing_and_its_committables_are_listed() -> None:
    source = checkpoint(
        [op("sink", 2, finished=[0], finishing=[1], coordinator=True)],
        [state("sink", "k", "keyed"), state("sink", "x", "committables"), state("sink", "c", "coordinator")],
        [Part("sink", "x", 1, ("part-1",)), Part("sink", "x", 0, ("part-0",))],
    )
    plan = planned(source, {"sink": 5})
    assert deliver(source, plan.slices) == {("sink", "x", None): ["part-0", "part-1"]}
    assert plan.committables.equals(plan.slices)


def test_the_coordinator_gets_its_state_whole_at_any_parallelism() -> None:
    source = one("coordinator", op("a", 2, finished=[1], coordinator=True), part(None, "splits"))
    assert restored(source, 7) == {("a", "s", None): ["splits"]}


STATE = even_split_state("map", "buffer", columns={"n": pa.int64()})


def publish(store: sf.CheckpointStore, chain: str | None) -> sf.CommitPermit:
    graph = sf.JobGraph(
        (sf.Operator("source", 3, 8, chain=chain), sf.Operator("map", 3, 8, chain=chain)),
        (sf.Edge("e", "source", "map", sf.Partitioner.FORWARD),),
    )
    pending = store.begin(job_id="job", graph=graph, states=[STATE], parent=None)
    pending.mark_finished("source", range(3))
    for subtask in range(3):
        with pending.context.subtask("map", subtask) as writer:
            writer.write("buffer", pa.table({"n": [subtask]}))
        pending.add(writer)
    return pending.publish()


@pytest.mark.parametrize("chain", [None, "c"])
@pytest.mark.parametrize("parallelism", [1, 2, 5])
def test_what_follows_a_finished_source_over_a_forward_edge_is_rescaled_alone(
    parallelism: int, chain: str | None
) -> None:
    store = sf.open(f"memory://finished-edges-{parallelism}-{chain}")
    publish(store, chain)
    rescale_newest(store, parallelism)

    rescaled = store.open()
    assert rescaled.graph.operator("source").parallelism == 3
    assert rescaled.graph.operator("source").status is sf.Status.FULLY_FINISHED
    assert rescaled.graph.operator("map").parallelism == parallelism
    assert rescaled.read("map", "buffer").table()["n"].to_pylist() == [0, 1, 2]
    assert sf.validate(store.storage, level="full").ok
    rescaled.plan_restore(rescaled.graph.at(4)).check()


RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def operators(draw: Any, uid: str) -> tuple[Any, list[Any], list[Part], list[Any]]:
    """An operator with its states, parts and edges. Key groups lie where their subtask is, as the
    format demands.
    """
    ceiling = draw(st.integers(1, 300))
    parallelism = draw(st.integers(1, min(ceiling, 24)))
    done = draw(st.sets(st.integers(0, parallelism - 1), max_size=parallelism - 1)) if draw(st.booleans()) else set()
    operator = op(uid, parallelism, ceiling, finished=done)
    names = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=3)
    modes = st.sampled_from(["keyed", "even_split", "broadcast", "progress", "hashed", "balanced"])
    wanted = draw(st.dictionaries(names, modes, max_size=4))
    if list(wanted.values()).count("progress") > 1:
        wanted = {name: mode for name, mode in wanted.items() if mode != "progress"}
    states, parts, edges = [], [], []
    for name, mode in wanted.items():
        on = None
        if mode in ("hashed", "balanced"):
            on = edge(uid, uid, "hash" if mode == "hashed" else "rebalance", id=f"{uid}{name}", feedback=True)
            edges.append(on)
        declared = state(uid, name, "in_flight" if on else mode, on=on)
        states.append(declared)
        for subtask in range(parallelism):
            if subtask in done:
                continue
            layers = draw(st.integers(1, 3)) if mode == "keyed" else 1
            pieces = draw(st.integers(1, 2)) if mode in ("even_split", "broadcast") else 1
            for layer in range(layers):
                for piece in range(pieces):
                    tokens = [f"{name}/{subtask}/{layer}/{piece}/{n}" for n in range(draw(st.integers(0, 9)))]
                    if mode in ("keyed", "hashed"):
                        first, last = key_group_range(subtask, parallelism=parallelism, max_parallelism=ceiling)
                        tokens = [(draw(st.integers(first, last)), token) for token in tokens]
                    elif mode == "balanced":
                        tokens = [(draw(st.integers(0, 40)), token) for token in tokens]
                    before, after = draw(st.integers(0, 5)), draw(st.integers(0, 5))
                    parts.append(Part(uid, name, subtask, tuple(tokens), layer, before, after))
    return operator, states, parts, edges


@st.composite
def checkpoints(draw: Any) -> FakeCheckpoint:
    uids = draw(st.lists(st.sampled_from(["a", "B", "é", "a/b", "z9"]), min_size=1, max_size=3, unique=True))
    drawn = [draw(operators(uid)) for uid in uids]
    return checkpoint(
        [operator for operator, *_ in drawn],
        [item for _, states, _, _ in drawn for item in states],
        [part for _, _, parts, _ in drawn for part in parts],
        [item for *_, edges in drawn for item in edges],
    )


def topology(data: Any, source: FakeCheckpoint) -> dict[str, int]:
    return {
        operator.uid: data.draw(st.integers(1, min(operator.max_parallelism or 1, 60)))
        for operator in source.record.graph.operators
    }


@RELAXED
@given(source=checkpoints(), data=st.data())
def test_every_row_goes_where_the_oracle_says(source: FakeCheckpoint, data: Any) -> None:
    chosen = topology(data, source)
    plan = planned(source, chosen)
    kept = {
        operator.uid
        for operator in source.record.graph.operators
        if operator.status is Status.RUNNING and chosen[operator.uid] == operator.parallelism
    }
    assert deliver(source, plan.slices) == expected(source, chosen, progress_stays=lambda uid: uid in kept)
    assert RestorePlan.from_json(plan.to_json()) == plan


@RELAXED
@given(source=checkpoints(), data=st.data())
def test_a_rescale_keeps_every_row_and_restores_to_the_plan(source: FakeCheckpoint, data: Any) -> None:
    plan = planned(source, topology(data, source))
    after = published(source, rescale(source, plan))

    def unshared(delivered: dict[Any, Any]) -> dict[Any, Any]:
        shared = {(item.operator, item.name) for item in source.record.states if item.mode == "progress"}
        return {key: rows for key, rows in delivered.items() if key[:2] not in shared}

    assert unshared(restored(after, {})) == unshared(deliver(source, plan.slices))
    copied = {(item.operator, item.name) for item in source.record.states if item.mode == "broadcast"}
    assert rows_of(after, copied) == rows_of(source, copied)


def rows_of(source: FakeCheckpoint, left_out: set[tuple[str, str]]) -> Counter[Any]:
    return Counter(row for part in source.parts if (part.operator, part.state) not in left_out for row in part.rows)
