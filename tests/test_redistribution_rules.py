"""Every mode's rule: against an oracle in small worlds, all of them; and case by case, where Flink's rules are ours."""

from __future__ import annotations

import random
from functools import cache
from itertools import product

import pytest

from stateformat.graph import Status
from stateformat.redistribution import RestorePlan, plan_restore
from tests.redistribution_cases import FakeCheckpoint, Part, checkpoint, deliver, edge, op, state
from tests.redistribution_oracle import expected

MAX = 13
"""Not a multiple of any parallelism but 1 and 13, so ranges are as uneven as they get."""
SOURCE = op("source", 3, 16, finished=range(3))


@cache
def world(parallelism: int) -> FakeCheckpoint:
    """One operator for every set of finished subtasks, each with states of all modes and in-flight records of all kinds."""
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
    plan = plan_restore(source, source.record.graph.at(new))
    plan.check()
    running = {operator.uid for operator in source.record.graph.operators if operator.status is Status.RUNNING}
    wanted = expected(
        source,
        {operator.uid: operator.parallelism for operator in plan.topology.operators},
        progress_stays=lambda uid: old == new and uid in running,
    )
    assert deliver(source, plan.slices) == wanted


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_even_split_evens_out_over_all_states_of_an_operator(old: int, new: int) -> None:
    source = world(old)
    load: dict[tuple[str, int], int] = {}
    for piece in plan_restore(source, source.record.graph.at(new)).slices.to_pylist():
        if piece["mode"] == "even_split":
            at = piece["operator"], piece["subtask"]
            load[at] = load.get(at, 0) + piece["rows"]
    for operator in source.record.graph.operators:
        kept = old == new and operator.status is Status.RUNNING
        if operator.uid != "source" and operator.status is not Status.FULLY_FINISHED and not kept:
            counts = [load.get((operator.uid, subtask), 0) for subtask in range(new)]
            assert max(counts) - min(counts) <= 1


def entries(name: str, counts: list[int], *, uid: str = "a") -> list[Part]:
    """One part per subtask with so many entries, numbered through; None for a finished subtask would be no part."""
    parts, first = [], 0
    for subtask, count in enumerate(counts):
        parts.append(Part(uid, name, subtask, tuple(f"{name}{number}" for number in range(first, first + count))))
        first += count
    return parts


def split(lists: dict[str, list[int]], new: int, **rest: object) -> dict[str, list[list[str]]]:
    old = len(next(iter(lists.values())))
    source = checkpoint(
        [op("a", old, 64, **rest)],
        [state("a", name, "even_split") for name in lists],
        [part for name, counts in lists.items() for part in entries(name, counts)],
    )
    got = deliver(source, plan_restore(source, source.record.graph.at(new)).slices)
    return {name: [got.get(("a", name, subtask), []) for subtask in range(new)] for name in lists}


# Flink's RoundRobinOperatorStateRepartitioner, with names whose order in a hash map is that of the alphabet.
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
    # 5 entries over 3 leave 2 over, so the longer chunk of b, which is its first, goes to subtask 2.
    assert dealt["b"] == [["b2"], ["b3"], ["b0", "b1"]]


def test_even_split_takes_names_in_the_order_of_their_bytes() -> None:
    assert [len(hand) for hand in split({"é": [1, 0], "z": [1, 0], "Z": [1, 0]}, 3)["é"]] == [0, 0, 1]


def test_even_split_at_unchanged_parallelism_stays_uneven() -> None:
    assert [len(hand) for hand in split({"a": [5, 0, 1]}, 3)["a"]] == [5, 0, 1]


def test_even_split_is_dealt_again_at_unchanged_parallelism_when_a_subtask_has_finished() -> None:
    source = checkpoint(
        [op("a", 3, finished=[1])],
        [state("a", "e", "even_split")],
        [Part("a", "e", 0, ("0", "1", "2", "3", "4")), Part("a", "e", 2, ("5",))],
    )
    got = deliver(source, plan_restore(source, source.record.graph.at(3)).slices)
    assert got == {("a", "e", 0): ["0", "1"], ("a", "e", 1): ["2", "3"], ("a", "e", 2): ["4", "5"]}


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
    return checkpoint(
        [op("a", old, max_parallelism)],
        [state("a", "k", "keyed")],
        [Part("a", "k", subtask, tuple(rows)) for subtask, rows in enumerate(owned)],
    )


@pytest.mark.parametrize(("old", "new", "wanted"), RANGES)
def test_keyed_state_comes_from_the_old_subtasks_whose_ranges_meet_the_new(old: int, new: int, wanted: str) -> None:
    source = dense(old, 32_768)
    plan = plan_restore(source, source.record.graph.at(new))
    sources = "".join(
        f"[{','.join(str(handle) for handle in plan.slices_of('a', subtask)['handle'].to_pylist())}]"
        for subtask in range(new)
    )
    assert sources == wanted


def test_a_handle_is_cut_to_its_groups_with_rows() -> None:
    source = checkpoint(
        [op("a", 1, 10)],
        [state("a", "k", "keyed")],
        [Part("a", "k", 0, tuple((group, group) for group in (1, 1, 4, 8)))],
    )
    plan = plan_restore(source, source.record.graph.at(5))
    cut = plan.slices.select(["subtask", "row_start", "rows", "first_group", "last_group"]).to_pylist()
    assert [tuple(piece.values()) for piece in cut] == [(0, 0, 2, 1, 1), (2, 2, 1, 4, 4), (4, 3, 1, 8, 8)]


def test_long_stretches_without_rows_are_trimmed_from_both_ends() -> None:
    groups = (3, 30, 31, 200, 201, 400, 990)
    source = checkpoint(
        [op("a", 1, 1000)], [state("a", "k", "keyed")], [Part("a", "k", 0, tuple((group, group) for group in groups))]
    )
    plan = plan_restore(source, source.record.graph.at(4))
    cut = plan.slices.select(["subtask", "rows", "first_group", "last_group"]).to_pylist()
    assert [tuple(piece.values()) for piece in cut] == [(0, 5, 3, 201), (1, 1, 400, 400), (3, 1, 990, 990)]
    assert len(deliver(source, plan.slices)) == 3


def test_all_layers_are_cut_alike_and_come_lowest_first() -> None:
    source = checkpoint(
        [op("a", 2, 8)],
        [state("a", "k", "keyed")],
        [
            Part("a", "k", 0, ((0, "base"), (3, "base"))),
            Part("a", "k", 0, ((3, "first"),), layer=1),
            Part("a", "k", 0, ((0, "second"), (3, "second")), layer=2),
            Part("a", "k", 1, ((7, "base"),)),
            Part("a", "k", 1, ((4, "first"),), layer=1),
        ],
    )
    plan = plan_restore(source, source.record.graph.at(1))
    assert plan.slices_of("a", 0)["layer"].to_pylist() == [0, 0, 1, 1, 2]
    assert deliver(source, plan_restore(source, source.record.graph.at(4)).slices) == {
        ("a", "k", 0): [(0, "base"), (0, "second")],
        ("a", "k", 1): [(3, "base"), (3, "first"), (3, "second")],
        ("a", "k", 2): [(4, "first")],
        ("a", "k", 3): [(7, "base")],
    }


def broadcast(old: int, new: int, reporting: dict[int, tuple[str, ...]]) -> list[list[str]]:
    finished = [subtask for subtask in range(old) if subtask not in reporting]
    source = checkpoint(
        [op("a", old, finished=finished)],
        [state("a", "b", "broadcast")],
        [Part("a", "b", subtask, rows) for subtask, rows in reporting.items()],
    )
    got = deliver(source, plan_restore(source, source.record.graph.at(new)).slices)
    return [got.get(("a", "b", subtask), []) for subtask in range(new)]


def test_broadcast_gives_every_subtask_one_copy_its_own_where_there_is_one() -> None:
    reporting = {1: ("from 1",), 3: ("from 3",)}
    assert broadcast(4, 4, reporting) == [["from 1"], ["from 1"], ["from 1"], ["from 3"]]
    assert broadcast(4, 6, reporting) == [["from 1"], ["from 1"], ["from 1"], ["from 3"], ["from 1"], ["from 3"]]
    assert broadcast(4, 1, reporting) == [["from 1"]]


def test_an_empty_broadcast_copy_is_a_copy() -> None:
    assert broadcast(2, 3, {0: (), 1: ("from 1",)}) == [[], ["from 1"], []]


def test_two_broadcast_handles_of_one_reporter_are_one_copy() -> None:
    source = checkpoint(
        [op("a", 2)],
        [state("a", "b", "broadcast")],
        [Part("a", "b", 0, ("one",)), Part("a", "b", 0, ("two",)), Part("a", "b", 1, ("one", "two"))],
    )
    got = deliver(source, plan_restore(source, source.record.graph.at(3)).slices)
    assert [got["a", "b", subtask] for subtask in range(3)] == [["one", "two"]] * 3


def progress(source: FakeCheckpoint, parallelism: int | None, uid: str, **chosen: int) -> list[list[str]]:
    plan = plan_restore(source, source.record.graph.at(parallelism, per_operator=chosen))
    got = deliver(source, plan.slices)
    return [got[uid, "p", subtask] for subtask in range(plan.by_operator[uid].parallelism)]


def pipeline(partitioner: str, **upstream: object) -> FakeCheckpoint:
    """in -(partitioner)-> out, both at 2, out with progress."""
    return checkpoint(
        [op("in", 2, **upstream), op("out", 2)],
        [state("out", "p", "progress")],
        [Part("out", "p", 0, ("0",)), Part("out", "p", 1, ("1",))],
        [edge("in", "out", partitioner)],
    )


def test_progress_is_kept_where_nothing_changes_and_shared_at_another_parallelism() -> None:
    source = pipeline("rebalance")
    assert progress(source, 2, "out") == [["0"], ["1"]]
    assert progress(source, 3, "out") == [["0", "1"]] * 3
    assert progress(source, None, "out", out=1) == [["0", "1"]]


def test_progress_is_shared_in_a_partially_finished_operator() -> None:
    source = checkpoint(
        [op("a", 3, finished=[0])],
        [state("a", "p", "progress")],
        [Part("a", "p", 1, ("1",)), Part("a", "p", 2, ("2",))],
    )
    assert progress(source, 3, "a") == [["1", "2"]] * 3


def test_progress_is_shared_where_a_point_to_point_producer_was_dealt_anew() -> None:
    assert progress(pipeline("rescale"), None, "out", **{"in": 4}) == [["0", "1"]] * 2
    assert progress(pipeline("forward", finished=[1]), 2, "out") == [["0", "1"]] * 2


def test_progress_is_kept_where_an_all_to_all_producer_was_dealt_anew() -> None:
    assert progress(pipeline("hash"), None, "out", **{"in": 4}) == [["0"], ["1"]]


def test_progress_is_kept_behind_a_producer_that_is_fully_finished() -> None:
    assert progress(pipeline("forward", finished=[0, 1]), None, "out") == [["0"], ["1"]]


def in_flight(partitioner: str, old: int, new: int, rows: dict[int, tuple], **rest: object) -> list[list]:
    loop = edge("a", "a", partitioner, id="e", **rest)
    source = checkpoint(
        [op("a", old)],
        [state("a", "f", "in_flight", on=loop)],
        [Part("a", "f", subtask, rows.get(subtask, ())) for subtask in range(old)],
        [loop],
    )
    plan = plan_restore(source, source.record.graph.at(new))
    plan.check()
    got = deliver(source, plan.slices)
    return [got.get(("a", "f", subtask), []) for subtask in range(new)]


def test_a_channel_is_cut_into_contiguous_chunks_the_longer_first() -> None:
    rows = {0: tuple((0, number) for number in range(5)), 1: tuple((1, number) for number in range(2))}
    # Channel 0 -> 0 has 5 records, 2 over 3 subtasks, so channel 1 -> 1 begins at subtask 2.
    assert in_flight("rebalance", 2, 3, rows, feedback=True) == [
        [(0, 0), (0, 1), (1, 1)],
        [(0, 2), (0, 3)],
        [(0, 4), (1, 0)],
    ]


def test_a_part_of_a_channel_names_its_sender_alone() -> None:
    loop = edge("a", "a", "rebalance", id="e", feedback=True)
    rows = tuple((sender, number) for sender in (0, 2) for number in range(2))
    source = checkpoint([op("a", 1)], [state("a", "f", "in_flight", on=loop)], [Part("a", "f", 0, rows)], [loop])
    plan = plan_restore(source, source.record.graph.at(2))
    cut = plan.slices.select(["subtask", "row_start", "rows", "first_group", "last_group"]).to_pylist()
    assert [tuple(piece.values()) for piece in cut] == [
        (0, 0, 1, 0, 0),
        (0, 2, 1, 2, 2),
        (1, 1, 1, 0, 0),
        (1, 3, 1, 2, 2),
    ]


@pytest.mark.parametrize("partitioner", ["rebalance", "forward", "rescale", "broadcast"])
def test_in_flight_records_stay_where_the_receivers_do(partitioner: str) -> None:
    rows = {0: ((0, "x"), (1, "y"), (1, "z")), 1: ()}
    assert in_flight(partitioner, 2, 2, rows, feedback=True) == [list(rows[0]), []]


def test_what_a_broadcast_loop_sent_stays_with_those_who_still_listen() -> None:
    loop = edge("a", "a", "broadcast", id="e", feedback=True)
    source = checkpoint(
        [op("a", 3, finished=[1])],
        [state("a", "f", "in_flight", on=loop)],
        [Part("a", "f", 0, ((2, "x"), (2, "y"))), Part("a", "f", 2, ((2, "x"), (2, "y")))],
        [loop],
    )
    got = deliver(source, plan_restore(source, source.record.graph.at(3)).slices)
    assert got == {("a", "f", 0): [(2, "x"), (2, "y")], ("a", "f", 2): [(2, "x"), (2, "y")]}


def test_in_flight_records_of_a_hash_edge_follow_their_key_group() -> None:
    rows = {0: ((0, "a"), (7, "b")), 1: ((8, "c"), (15, "d"))}
    assert in_flight("hash", 2, 4, rows, feedback=True) == [[(0, "a")], [(7, "b")], [(8, "c")], [(15, "d")]]


def test_union_gives_everyone_everything_old_subtasks_in_order() -> None:
    source = checkpoint([op("a", 3)], [state("a", "u", "union")], entries("u", [2, 0, 1]))
    got = deliver(source, plan_restore(source, source.record.graph.at(2)).slices)
    assert got == {("a", "u", 0): ["u0", "u1", "u2"], ("a", "u", 1): ["u0", "u1", "u2"]}


def test_a_fully_finished_operator_gets_nothing_and_its_committables_are_listed() -> None:
    source = checkpoint(
        [op("sink", 2, finished=[0], finishing=[1], coordinator=True)],
        [state("sink", "k", "keyed"), state("sink", "x", "committables"), state("sink", "c", "coordinator")],
        [Part("sink", "x", 1, ("part-1",)), Part("sink", "x", 0, ("part-0",))],
    )
    plan: RestorePlan = plan_restore(source, source.record.graph.at(per_operator={"sink": 5}))
    plan.check()
    assert deliver(source, plan.slices) == {("sink", "x", None): ["part-0", "part-1"]}
    assert plan.committables.equals(plan.slices)


def test_the_coordinator_gets_its_state_whole_at_any_parallelism() -> None:
    source = checkpoint(
        [op("a", 2, finished=[1], coordinator=True)],
        [state("a", "c", "coordinator")],
        [Part("a", "c", None, ("splits",))],
    )
    assert deliver(source, plan_restore(source, source.record.graph.at(7)).slices) == {("a", "c", None): ["splits"]}
