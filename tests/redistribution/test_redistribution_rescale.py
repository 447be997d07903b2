"""A rescaled checkpoint: what stands in it, and that restoring it is restoring the one that it came
from.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import product

import pytest

from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.graph import Status, SubtaskSet
from stateformat.manifest import cut_handles
from stateformat.model import PER_SUBTASK_MODES, FormerStatus, Mode
from stateformat.redistribution import RefusalCode, plan_restore, rescale
from stateformat.redistribution.rules import HandleRules, checkpoint_refusals
from stateformat.redistribution.tables import read_handles
from stateformat.schema import SLICE_SCHEMA
from tests.redistribution.redistribution_cases import (
    Delivered,
    FakeCheckpoint,
    Part,
    checkpoint,
    edge,
    graph,
    one,
    op,
    part,
    planned,
    published,
    restored,
    state,
)
from tests.redistribution.test_redistribution_rules import world


def rescaled(source: FakeCheckpoint, topology: int | dict[str, int]) -> FakeCheckpoint:
    return published(source, rescale(source, planned(source, topology)))


def rows_of(source: FakeCheckpoint, operator: str, name: str) -> list[object]:
    return [row for item in source.parts if (item.operator, item.state) == (operator, name) for row in item.rows]


SMALL = list(product(range(1, 6), range(1, 6)))


@pytest.mark.parametrize(("old", "new"), SMALL)
def test_restoring_at_the_parallelism_of_the_rescale_gives_what_the_plan_gave(old: int, new: int) -> None:
    source = world(old)
    direct, after = restored(source, new), restored(rescaled(source, new), new)
    for key in direct.keys() | after.keys():
        # A rescale shares progress out, so a restore merges it, whether or not the plan would have
        # kept it.
        assert after[key] == (rows_of(source, key[0], "p") if key[1] == "p" else direct[key])


@pytest.mark.parametrize(("old", "between"), SMALL)
def test_a_restore_after_a_rescale_loses_repeats_and_misplaces_nothing(old: int, between: int) -> None:
    source = world(old)
    middle = rescaled(source, between)
    for new in range(1, 6):
        direct, after = restored(source, new), restored(middle, new)
        modes = {(item.operator, item.name): item.mode for item in source.record.states}
        for key in direct.keys() | after.keys():
            operator, name, _ = key
            mode = modes[operator, name]
            if mode is Mode.KEYED or name == "fh":
                assert Counter(after[key]) == Counter(direct[key])
            elif mode in (Mode.UNION, Mode.COORDINATOR, Mode.COMMITTABLES):
                assert after[key] == direct[key]
            elif mode is Mode.BROADCAST:
                copies = [item.rows for item in source.parts if (item.operator, item.state) == (operator, name)]
                assert tuple(after.get(key, ())) in copies
            elif mode is Mode.PROGRESS:
                assert set(after[key]) <= set(rows_of(source, operator, name))
        # Lists are dealt by position, so the second deal may put an entry elsewhere; but all are
        # dealt, once.
        for operator, name in modes:
            if modes[operator, name] in (Mode.EVEN_SPLIT, Mode.IN_FLIGHT):
                assert everything(after, operator, name) == everything(direct, operator, name)


def everything(delivered: Delivered, operator: str, name: str) -> Counter:
    return Counter(row for key, rows in delivered.items() if key[:2] == (operator, name) for row in rows)


def test_one_list_is_dealt_twice_as_it_would_be_once() -> None:
    parts = [part(subtask, *(f"{subtask}.{n}" for n in range(subtask + 2))) for subtask in range(3)]
    source = one("even_split", op("a", 3), *parts)
    for between, new in product(range(1, 8), range(1, 8)):
        if 3 != between != new and new != 3:
            assert restored(rescaled(source, between), new) == restored(source, new)


@pytest.mark.parametrize(("old", "new"), SMALL)
def test_a_rescaled_checkpoint_is_one_that_the_format_allows(old: int, new: int) -> None:
    """SPEC 4.2, 4.6 and 6.4: order, a handle for everyone, union and progress with one subtask
    each.
    """
    source = world(old)
    result = rescale(source, planned(source, new))
    assert result.slices.schema.equals(SLICE_SCHEMA)
    pieces = result.slices.to_pylist()
    order = [(p["operator"], p["state"], -1 if p["subtask"] is None else p["subtask"], p["layer"]) for p in pieces]
    assert order == sorted(order)
    assert all((piece["subtask"] is None) == (piece["mode"] == "coordinator") for piece in pieces)
    after = published(source, result)
    operators = {operator.uid: operator for operator in after.record.graph.operators}
    reported = {(part.operator, part.state, part.subtask) for part in after.parts if part.layer == 0}
    for item in after.record.states:
        operator = operators[item.operator]
        if item.mode in PER_SUBTASK_MODES:
            running = range(new) if operator.status is Status.RUNNING else range(0)
            assert {s for o, n, s in reported if (o, n) == (item.operator, item.name)} == set(running)
        if item.mode in (Mode.UNION, Mode.PROGRESS):
            assert rows_of(after, item.operator, item.name) == rows_of(source, item.operator, item.name)
        if item.mode is Mode.COORDINATOR:
            handles = [part for part in after.parts if (part.operator, part.state) == (item.operator, item.name)]
            assert len(handles) == (operator.status is not Status.FULLY_FINISHED)
    # The handles are what the rows themselves say, and pass the rules of a planner.
    cut = cut_handles(source.handles, result.slices)
    columns = [
        "operator",
        "state",
        "mode",
        "subtask",
        "layer",
        "edge",
        "rows",
        "first_group",
        "last_group",
        "rows_per_group",
    ]
    assert cut.select(columns).equals(after.handles.select(columns))
    ordered = sorted(after.record.states, key=lambda item: (item.operator, item.name))
    found = HandleRules(after.record, ordered).refusals(read_handles(after.handles, ordered), range(len(ordered)))
    assert list(checkpoint_refusals(after.record, ordered, [found])) == []


CHAINS = [(3, 5, 2), (3, 5, 2, 4), (1, 4, 3), (2, 5, 3, 1), (4, 3, 5, 2, 2), (5, 2, 4, 3), (3, 4, 4, 1)]


def channels_caught(parallelism: int) -> FakeCheckpoint:
    """Two rebalance edges and a hash edge into one operator; a row is (group, (receiver, sender,
    seq)).
    """
    edges = [edge("in", "a", id="r"), edge("in", "a", id="s", input=1), edge("in", "a", "hash", id="h", input=2)]
    parts = []
    for on, receiver in product(edges, range(parallelism)):
        owned = [group for group in range(16) if group * parallelism // 16 == receiver]
        rows = [
            (owned[seq % len(owned)] if on.id == "h" else sender, (receiver, sender, seq))
            for sender in range(2)
            for seq in range(7 + receiver - 3 * sender)
        ]
        parts.append(Part("a", on.id, receiver, tuple(rows), foreign_before=5 - receiver))
    states = [state("a", on.id, "in_flight", on=on) for on in edges]
    return checkpoint([op("in", 2), op("a", parallelism)], states, parts, edges)


def cut_anew(source: FakeCheckpoint, parallelism: int) -> FakeCheckpoint:
    """A rescale as it is published: its handles go on naming the segments of its source."""
    result = rescale(source, planned(source, {"a": parallelism}))
    record = replace(source.record, graph=result.graph, states=result.states, rescaled_from=result.rescaled_from)
    return FakeCheckpoint(record, cut_handles(source.handles, result.slices), (), source.segments)


def standing(source: FakeCheckpoint) -> Delivered:
    """The rows of each subtask's handles, one handle after the other, as the manifest has them."""
    found: Delivered = defaultdict(list)
    for handle in source.handles.to_pylist():
        if handle["rows"]:
            rows = source.segments[handle["path"]][handle["row_start"] :][: handle["rows"]]
            found[handle["operator"], handle["state"], handle["subtask"]] += rows
    return dict(found)


def out_of_order(delivered: Delivered) -> list[tuple[object, ...]]:
    """Every channel, and on the hash edge every key group of one, of which a subtask reads a later
    record first.
    """
    found = []
    for (_, name, subtask), rows in delivered.items():
        seen: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for group, (receiver, sender, seq) in rows:
            seen[(receiver, sender, group) if name == "h" else (receiver, sender)].append(seq)
        found += [(name, subtask, channel, seqs) for channel, seqs in seen.items() if seqs != sorted(seqs)]
    return found


@pytest.mark.parametrize("chain", CHAINS)
def test_channels_keep_their_order_through_any_number_of_rescales(chain: tuple[int, ...]) -> None:
    source = after = channels_caught(chain[0])
    for parallelism in chain[1:]:
        after = cut_anew(after, parallelism)
        assert out_of_order(standing(after)) == []
        for name in ("r", "s", "h"):
            assert everything(standing(after), "a", name) == everything(standing(source), "a", name)
        assert restored(after, {}) == standing(after)
        for new in range(1, 8):
            delivered = restored(after, {"a": new})
            assert out_of_order(delivered) == []
            for name in ("r", "s", "h"):
                assert everything(delivered, "a", name) == everything(standing(source), "a", name)


def test_fully_finished_stays_so_with_its_numbers_and_committables() -> None:
    source = checkpoint(
        [op("in", 2, 4, finished=[0, 1]), op("sink", 3, 5, finished=[0], finishing=[1, 2], pinned=True)],
        [state("sink", "x", "committables"), state("sink", "k", "keyed")],
        [Part("sink", "x", 2, ("part",))],
        [edge("in", "sink")],
    )
    after = rescaled(source, {"sink": 9, "in": 7})
    assert [(item.parallelism, item.max_parallelism) for item in after.record.graph.operators] == [(2, 4), (3, 5)]
    assert after.record.graph.operators[1].finishing == SubtaskSet.of([1, 2])
    assert not after.record.graph.operators[1].pinned
    assert after.parts == (Part("sink", "x", 2, ("part",)),)
    assert len(after.record.states) == 2


def test_all_subtasks_run_afterwards_and_former_statuses_are_kept() -> None:
    source = checkpoint([op("a", 3, finished=[0], finishing=[2]), op("b", 2), op("c", 1, finished=[0])])
    first = rescaled(source, 5)
    assert first.record.rescaled_from is not None
    assert first.record.rescaled_from.source == source.record.ref
    former = FormerStatus("a", 3, SubtaskSet.of([0]), SubtaskSet.of([2]))
    assert first.record.rescaled_from.operators == (former,)
    statuses = [operator.status for operator in first.record.graph.operators]
    assert statuses == [Status.RUNNING, Status.RUNNING, Status.FULLY_FINISHED]
    second = rescaled(first, 2)
    assert second.record.rescaled_from is not None
    assert second.record.rescaled_from.source == first.record.ref
    assert second.record.rescaled_from.operators == (former,)
    gone = planned(second, graph(op("b", 2, None)))
    assert rescale(second, gone).rescaled_from.operators == ()


def parts_of(source: FakeCheckpoint) -> list[tuple[object, ...]]:
    return [(item.subtask, item.layer, item.rows) for item in source.parts]


def test_a_subtask_with_nothing_gets_an_empty_handle_of_layer_0() -> None:
    source = one("keyed", op("a", 1, 4), part(0, (0, "base")), part(0, (3, "delta"), layer=1))
    assert parts_of(rescaled(source, 2)) == [(0, 0, ((0, "base"),)), (1, 0, ()), (1, 1, ((3, "delta"),))]


def test_a_coordinator_with_nothing_keeps_its_empty_handle() -> None:
    source = one("coordinator", op("a", 1, coordinator=True), part(None))
    assert parts_of(rescaled(source, 3)) == [(None, 0, ())]


def test_union_and_progress_go_in_order_to_as_many_subtasks_as_there_are() -> None:
    source = one("union", op("a", 4), *(part(n, f"u{n}") for n in range(4)))
    wanted = [(0, 0, ("u0",)), (0, 0, ("u1",)), (1, 0, ("u2",)), (1, 0, ("u3",))]
    assert parts_of(rescaled(source, 2)) == wanted
    assert [item.subtask for item in rescaled(source, 6).parts if item.rows] == [0, 1, 3, 4]


def test_states_without_a_place_are_left_out() -> None:
    loop = edge("a", "a", id="loop", feedback=True)
    source = checkpoint(
        [op("a", 1, coordinator=True), op("gone", 1)],
        [
            state("a", "f", "in_flight", on=loop),
            state("a", "c", "coordinator"),
            *(state("a", name, "even_split") for name in ("e", "old")),
            state("gone", "e", "even_split"),
        ],
        [Part("a", "f", 0), Part("a", "c", None), Part("a", "e", 0), Part("a", "old", 0, ("x",)), Part("gone", "e", 0)],
        [loop],
    )
    result = rescale(source, planned(source, graph(op("a", 2, None)), drop=["a/old"]))
    assert [item.name for item in result.states] == ["e"]
    pieces = [(piece["state"], piece["subtask"], piece["rows"]) for piece in result.slices.to_pylist()]
    assert pieces == [("e", 0, 0), ("e", 1, 0)]


def test_a_plan_that_refuses_or_is_anothers_rescales_nothing() -> None:
    source = checkpoint([op("a", 1, 4)])
    with pytest.raises(RestoreRefused, match="parallelism 9") as raised:
        rescale(source, plan_restore(source, source.record.graph.at(9)))
    assert [refusal.code for refusal in raised.value.refusals] == [RefusalCode.PARALLELISM_ABOVE_MAX]
    other = checkpoint([op("a", 1, 4)], checkpoint_id=8)
    with pytest.raises(InvalidInput, match="plan is for checkpoint 8"):
        rescale(source, plan_restore(other, other.record.graph.at(1)))
