"""The plan as a value: what it says of operators, what it gives to whom, its text and its JSON.

What the graph demands of finished operators, chains among them; and that every refusal has its
test. A rescaled checkpoint: what stands in it, and that restoring it is restoring the one that it
came from.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.errors import ErrorKind, InvalidInput, RestoreRefused
from stateformat.graph import Status, SubtaskSet
from stateformat.manifest import cut_handles
from stateformat.model import PER_SUBTASK_MODES, FormerStatus, Mode
from stateformat.redistribution import (
    Action,
    OperatorPlan,
    RestorePlan,
    plan_restore,
    rescale,
)
from stateformat.redistribution.rules import check_state, checkpoint_refusals
from stateformat.redistribution.tables import read_handles
from stateformat.schema import SLICE_SCHEMA
from tests.redistribution import redistribution_cases
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


@cache
def pipeline() -> FakeCheckpoint:
    """A finished source, a partially finished mapper, a counter with every mode, and a finished
    sink beside it.
    """
    operators = [
        op("source", 2, finished=[0, 1], name="orders"),
        op("map", 3, finished=[0], coordinator=True),
        op("count", 2, 8),
        op("archive", 1, finishing=[0]),
    ]
    edges = [edge("source", "map", "rescale"), edge("map", "count", "hash"), edge("source", "archive")]
    states = [
        state("map", "offsets", "even_split"),
        state("map", "splits", "coordinator"),
        state("count", "sums", "keyed"),
        state("count", "rules", "broadcast"),
        state("count", "members", "union"),
        state("count", "watermarks", "progress"),
        state("count", "mail", "in_flight", on=edges[1]),
        state("archive", "files", "committables"),
    ]
    parts = [
        Part("map", "offsets", 1, ("o1", "o2", "o3")),
        Part("map", "offsets", 2, ("o4",)),
        Part("map", "splits", None, ("s",)),
        Part("count", "sums", 0, tuple((group, f"k{group}") for group in (0, 1, 1, 3))),
        Part("count", "sums", 1, ((5, "k5"),)),
        Part("count", "sums", 1, ((7, "k7"),), layer=1),
        *(Part("count", "rules", subtask, ("r1", "r2")) for subtask in (0, 1)),
        *(Part("count", "members", subtask, (f"m{subtask}",)) for subtask in (0, 1)),
        *(Part("count", "watermarks", subtask, (f"w{subtask}",)) for subtask in (0, 1)),
        Part("count", "mail", 0, ((2, "letter"),), foreign_before=1, foreign_after=1),
        Part("count", "mail", 1),
        Part("archive", "files", 0, ("file-1", "file-2")),
    ]
    return checkpoint(operators, states, parts, edges)


def plan_of(topology: int | dict[str, int] = 3) -> RestorePlan:
    return redistribution_cases.planned(pipeline(), topology)


def test_each_operator_is_told_what_becomes_of_it() -> None:
    source = pipeline()
    operators = *source.record.graph.at(3).operators[:3], op("fresh", 5, None)
    plan = plan_restore(source, graph(*operators, edges=source.record.graph.edges[:2]), drop=["archive"])
    plan.check()
    assert plan.operators == (
        OperatorPlan("source", "orders", Action.SKIP_FINISHED, 2, 2, 16, Status.FULLY_FINISHED, 0),
        OperatorPlan("map", "map", Action.START, 3, 3, 16, Status.PARTIALLY_FINISHED, 5),
        OperatorPlan("count", "count", Action.START, 2, 3, 8, Status.RUNNING, 15),
        OperatorPlan("fresh", "fresh", Action.NEW, 0, 5, 128, None, 0),
        OperatorPlan("archive", "archive", Action.DROPPED, 1, 0, 0, Status.FULLY_FINISHED, 2),
    )
    codes = [warning.code for warning in plan.warnings]
    assert codes == [ErrorKind.FINISHED_SUBTASKS_START, ErrorKind.STATE_DROPPED]
    assert plan.drop == ("archive",)


@pytest.mark.parametrize(("parallelism", "rows"), [(3, [2, 1, 1]), (2, [2, 2])], ids=["R25", "R26"])
def test_every_subtask_of_a_partially_finished_operator_starts(parallelism: int, rows: list[int]) -> None:
    plan = plan_of({"map": parallelism})
    assert plan.by_operator["map"].starts
    assert [sum(plan.slices_of("map", n)["rows"].to_pylist()) for n in range(parallelism)] == rows


def test_a_topology_that_still_says_finished_is_resolved_to_one_that_does_not() -> None:
    plan = plan_restore(pipeline(), pipeline().record.graph)
    assert [operator.status for operator in plan.topology.operators] == [Status.RUNNING] * 4
    assert plan.by_operator["source"].action is Action.SKIP_FINISHED


def test_slices_are_in_their_schema_and_order() -> None:
    slices = plan_of().slices
    assert slices.schema.equals(SLICE_SCHEMA)
    columns = slices.set_column(slices.column_names.index("subtask"), "subtask", pc.fill_null(slices["subtask"], -1))
    keys = [tuple(row.values()) for row in columns.select(["operator", "state", "subtask", "layer"]).to_pylist()]
    assert keys == sorted(keys)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_a_lookup_gives_what_a_scan_gives(parallelism: int) -> None:
    plan = plan_of(parallelism)
    for operator, subtask in product(["source", "map", "count", "archive", "nobody"], [None, *range(7)]):
        mine = pc.equal(plan.slices["subtask"], subtask) if subtask is not None else pc.is_null(plan.slices["subtask"])
        scanned = plan.slices.filter(pc.fill_null(pc.and_(pc.equal(plan.slices["operator"], operator), mine), False))
        assert plan.slices_of(operator, subtask).equals(scanned)
        for name in {"members", "sums", "files", "splits", "nothing", *scanned["state"].to_pylist()}:
            one = scanned.filter(pc.equal(scanned["state"], name))
            assert plan.slices_of(operator, subtask, name).equals(one)


def test_union_is_in_the_plan_once_however_many_read_it() -> None:
    for parallelism in (3, 8):
        plan = plan_of(parallelism)
        assert plan.assigned["mode"].to_pylist().count("union") == 2
        assert plan.slices["mode"].to_pylist().count("union") == 2 * parallelism


def test_the_driver_takes_coordinator_state_and_committables() -> None:
    plan = plan_of()
    assert plan.slices_of("map", None)["state"].to_pylist() == ["splits"]
    assert plan.slices_of("archive", None)["rows"].to_pylist() == [2]
    assert plan.committables.equals(plan.slices_of("archive", None))


def test_the_bytes_of_a_slice_are_its_share_of_the_segment() -> None:
    # One row of three in a segment of 300 bytes.
    mail = plan_of(2).slices_of("count", 0, "mail").to_pylist()[0]
    assert (mail["row_start"], mail["rows"], mail["bytes"]) == (1, 1, 100)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 8])
def test_the_load_adds_up_the_slices_of_every_subtask_that_starts(parallelism: int) -> None:
    plan = plan_of(parallelism)
    load = plan.load()
    started = list(product(["map", "count"], range(parallelism)))
    assert list(zip(load["operator"].to_pylist(), load["subtask"].to_pylist(), strict=True)) == started
    for name in ("rows", "bytes"):
        wanted = [sum(plan.slices_of(operator, subtask)[name].to_pylist()) for operator, subtask in started]
        assert load[name].to_pylist() == wanted
    assert load.schema.types == [pa.dictionary(pa.int32(), pa.string()), pa.int32(), pa.int64(), pa.int64()]


def test_json_gives_the_plan_back() -> None:
    loose = graph(op("map", 40, None, chain="c"), op("count", 3, 64, chain="c", pinned=True), op("new", 2, None))
    refused = plan_restore(pipeline(), loose)
    assert refused.refusals
    for plan in (plan_of(), refused, plan_restore(checkpoint([]), graph())):
        text = plan.to_json()
        again = RestorePlan.from_json(text)
        assert again == plan
        assert again.slices.equals(plan.slices)
        assert again.to_json() == text
    assert json.loads(plan_of().to_json())["slices"]["operator"][0] == "archive"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format":"other","version":1}', plan_of().to_json().replace('"start"', '"go"')]
)
def test_anything_else_is_no_plan(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a restore plan"):
        RestorePlan.from_json(text)


def test_the_text_tells_operators_numbers_refusals_and_warnings_in_eighty_columns() -> None:
    bad = graph(op("map", 40, None), op("count", 3, 64), op("a-very-long-uid-that-no-table-could-ever-hold", 2, None))
    text = plan_restore(pipeline(), bad).describe()
    assert all(len(line) <= 80 for line in text.splitlines())
    for words in ("REFUSED, for 5 reasons:", "parallelism 40", "[operator_missing]"):
        assert words in text
    good = plan_of(8)
    lines = good.describe().splitlines()
    assert lines[0] == "Restore of checkpoint 7 of job job"
    assert lines[1] == "operators: 2 started, 2 finished"
    count = next(line.split() for line in lines if line.startswith("count"))
    own = good.load().filter(pc.equal(good.load()["operator"], "count"))
    numbers = [pc.sum(own["rows"]), pc.sum(own["bytes"]), pc.max(own["rows"])]
    assert count == ["count", "start", "2", "->", "8", *map(str, numbers)]
    assert "To commit before anything starts: 2 rows of committables." in lines
    assert "REFUSED" not in good.describe()


def test_a_job_of_which_everything_is_finished_says_so() -> None:
    source = checkpoint([op("a", 2, finished=[0, 1])])
    assert "every operator is finished" in redistribution_cases.planned(source, 2).describe()


def test_a_plan_costs_no_more_for_more_state() -> None:
    source = one("keyed", op("a", 1, 4), part(0, (0, "x"), (3, "y")))
    column = source.handles.schema.get_field_index("size_bytes")
    huge = source.handles.set_column(column, source.handles.schema.field(column), pa.array([2**50]))
    plan = redistribution_cases.planned(FakeCheckpoint(source.record, huge, source.parts), 2)
    assert plan.slices["bytes"].to_pylist() == [2**49, 2**49]


def test_a_plan_opens_no_file() -> None:
    """Planning in an interpreter that refuses to open anything once all is imported."""
    code = """
import sys
from stateformat.redistribution import plan_restore, rescale
from tests.redistribution.test_redistribution_plan import pipeline
source = pipeline()
topology = source.record.graph.at(3)
plan_restore(source, topology)  # so that whatever is imported late is there
def refuse(event, arguments):
    if event == "open":
        raise AssertionError(arguments)
sys.addaudithook(refuse)
plan = plan_restore(source, topology)
rescale(source, plan)
print(plan.describe()[:7])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("Restore", "")


RUNNING: list[int] = []
PARTIAL = [1]
FULL = [0, 1]
NEW = None
ALL_TO_ALL, POINTWISE = ("rebalance", "hash", "broadcast"), ("forward", "rescale")
FULLY, PARTIALLY = ["fully_finished_predecessor"], ["partially_finished_predecessor"]


@pytest.mark.parametrize(
    ("predecessor", "operator", "partitioners", "codes"),
    [
        # Flink's tables of finished operators.
        *((FULL, FULL, [name], []) for name in (*ALL_TO_ALL, *POINTWISE)),
        *(
            (before, FULL, [name], FULLY)
            for before, name in product((PARTIAL, RUNNING, NEW), (*ALL_TO_ALL, *POINTWISE))
        ),
        *((FULL, PARTIAL, [name], []) for name in (*ALL_TO_ALL, *POINTWISE)),
        *((before, PARTIAL, [name], PARTIALLY) for before, name in product((PARTIAL, RUNNING, NEW), ALL_TO_ALL)),
        *((PARTIAL, PARTIAL, [name], []) for name in POINTWISE),
        *((before, PARTIAL, [name], PARTIALLY) for before, name in product((RUNNING, NEW), POINTWISE)),
        *((before, RUNNING, ["hash", "forward"], []) for before in (FULL, PARTIAL, RUNNING, NEW)),
        # Of two edges from one predecessor the all-to-all one decides.
        (PARTIAL, PARTIAL, ["forward", "hash"], PARTIALLY),
        (PARTIAL, PARTIAL, ["forward", "rescale"], []),
    ],
)
def test_finished_operators_want_finished_predecessors(
    predecessor: list[int] | None, operator: list[int], partitioners: list[str], codes: list[str]
) -> None:
    edges = [edge("in", "a", name, id=f"e{number}") for number, name in enumerate(partitioners)]
    saved = [op("a", 2, finished=operator)] + ([] if predecessor is NEW else [op("in", 2, finished=predecessor)])
    planned(checkpoint(saved), graph(op("in", 2, None), op("a", 2, None), edges=edges), *codes)


def test_finishing_counts_as_finished() -> None:
    wanted = graph(op("in", 2, None), op("a", 2, None), edges=[edge("in", "a", "forward")])
    planned(checkpoint([op("in", 2, finishing=[0]), op("a", 2, finishing=[0])]), wanted)
    planned(checkpoint([op("in", 2, finishing=[0], finished=[1]), op("a", 2, finishing=[0, 1])]), wanted)


def test_feedback_edges_count_for_nothing() -> None:
    edges = [edge("body", "head", feedback=True), edge("head", "body")]
    planned(checkpoint([op("head", 2, finished=FULL), op("body", 2)], edges=edges), 2)


def test_the_edges_are_those_of_the_new_topology() -> None:
    source = checkpoint([op("in", 2), op("a", 2, finished=FULL)], edges=[edge("in", "a")])
    planned(source, graph(op("in", 2, None), op("a", 2, None)))


def test_after_a_rescale_the_former_statuses_count() -> None:
    operators = [op("in", 2, finished=PARTIAL), op("a", 2, finished=PARTIAL)]
    source = checkpoint(operators, edges=[edge("in", "a", "forward")])
    rescaled = published(source, rescale(source, planned(source, 3)))
    assert all(not operator.finished for operator in rescaled.record.graph.operators)
    planned(rescaled, 2)
    pair = op("in", 2, None), op("a", 2, None)
    planned(rescaled, graph(*pair, edges=[edge("in", "a", "hash")]), *PARTIALLY)
    planned(rescaled, graph(*pair, op("new", 2, None), edges=[edge("new", "a", "forward")]), *PARTIALLY)


def chain(pinned: bool, *finished: list[int], codes: tuple[str, ...] = ()) -> RestorePlan:
    names = "abcd"[: len(finished)]
    edges = [edge(source, target, "forward") for source, target in pairwise(names)]
    source = checkpoint([op(name, 2, finished=done) for name, done in zip(names, finished, strict=True)], edges=edges)
    operators = [op(name, 2, None, chain="c", pinned=pinned and name == "b") for name in names]
    return planned(source, graph(*operators, edges=edges), *codes)


def test_a_chain_whose_operators_differ_in_status_is_broken_up_with_a_warning() -> None:
    plan = chain(False, FULL, FULL, PARTIAL, RUNNING)
    assert plan.unchained == ("c",)
    assert plan.warnings[0].code is ErrorKind.UNCHAINED
    # What has one status stays together, under a name of its own.
    assert [operator.chain for operator in plan.topology.operators] == ["c/fully_finished"] * 2 + [None, None]


@pytest.mark.parametrize(
    ("statuses", "codes"),
    [((FULL, FULL), ()), ((PARTIAL, PARTIAL), ()), ((RUNNING, RUNNING), ()), ((FULL, RUNNING), ("chain_pinned",))],
)
def test_a_chain_of_one_status_stays_whole_and_a_pinned_one_is_refused(
    statuses: tuple[list[int], ...], codes: tuple[str, ...]
) -> None:
    plan = chain(True, *statuses, codes=codes)
    assert plan.unchained == ()
    assert [operator.chain for operator in plan.topology.operators] == ["c", "c"]


def test_every_code_is_refused_by_some_test() -> None:
    tests = Path(__file__).resolve().parent.parent
    names = (Path(__file__).name, "test_redistribution_refusals.py", "test_local_states.py")
    text = "".join(next(tests.rglob(name)).read_text() for name in names)
    section = (tests.parent / "docs/redistribution.md").read_text().partition("## Refusals")[2].partition("\n## ")[0]
    codes = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert {*codes} <= {*ErrorKind}
    assert [code for code in codes if f'"{code}"' not in text] == []
    assert len(codes) == 21


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
    handles = read_handles(after.handles, ordered)
    found = [
        check_state(state, after.record.graph.operator(state.operator), handles.where(handles.state == number))
        for number, state in enumerate(ordered)
    ]
    assert list(checkpoint_refusals(after.record, ordered, found)) == []


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
    assert [refusal.code for refusal in raised.value.refusals] == [ErrorKind.PARALLELISM_ABOVE_MAX]
    assert [refusal.to_json() for refusal in raised.value.refusals] == [str(raised.value.refusals[0])]
    other = checkpoint([op("a", 1, 4)], checkpoint_id=8)
    with pytest.raises(InvalidInput, match="plan is for checkpoint 8"):
        rescale(source, plan_restore(other, other.record.graph.at(1)))
