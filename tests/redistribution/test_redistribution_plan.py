"""The plan as a value: what it says of operators, what it gives to whom, its text and its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from itertools import product

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.errors import InvalidInput
from stateformat.graph import Status
from stateformat.redistribution import Action, OperatorPlan, RestorePlan, WarningCode, plan_restore
from stateformat.schema import SLICE_SCHEMA
from tests.redistribution import redistribution_cases
from tests.redistribution.redistribution_cases import (
    FakeCheckpoint,
    Part,
    checkpoint,
    edge,
    graph,
    one,
    op,
    part,
    state,
)


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


def planned(topology: int | dict[str, int] = 3) -> RestorePlan:
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
    assert codes == [WarningCode.FINISHED_SUBTASKS_START, WarningCode.STATE_DROPPED]
    assert plan.drop == ("archive",)


@pytest.mark.parametrize(("parallelism", "rows"), [(3, [2, 1, 1]), (2, [2, 2])], ids=["R25", "R26"])
def test_every_subtask_of_a_partially_finished_operator_starts(parallelism: int, rows: list[int]) -> None:
    plan = planned({"map": parallelism})
    assert plan.by_operator["map"].starts
    assert [sum(plan.slices_of("map", n)["rows"].to_pylist()) for n in range(parallelism)] == rows


def test_a_topology_that_still_says_finished_is_resolved_to_one_that_does_not() -> None:
    plan = plan_restore(pipeline(), pipeline().record.graph)
    assert [operator.status for operator in plan.topology.operators] == [Status.RUNNING] * 4
    assert plan.by_operator["source"].action is Action.SKIP_FINISHED


def test_slices_are_in_their_schema_and_order() -> None:
    slices = planned().slices
    assert slices.schema.equals(SLICE_SCHEMA)
    columns = slices.set_column(slices.column_names.index("subtask"), "subtask", pc.fill_null(slices["subtask"], -1))
    keys = [tuple(row.values()) for row in columns.select(["operator", "state", "subtask", "layer"]).to_pylist()]
    assert keys == sorted(keys)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
def test_a_lookup_gives_what_a_scan_gives(parallelism: int) -> None:
    plan = planned(parallelism)
    for operator, subtask in product(["source", "map", "count", "archive", "nobody"], [None, *range(7)]):
        mine = pc.equal(plan.slices["subtask"], subtask) if subtask is not None else pc.is_null(plan.slices["subtask"])
        scanned = plan.slices.filter(pc.fill_null(pc.and_(pc.equal(plan.slices["operator"], operator), mine), False))
        assert plan.slices_of(operator, subtask).equals(scanned)
        for name in {"members", "sums", "files", "splits", "nothing", *scanned["state"].to_pylist()}:
            one = scanned.filter(pc.equal(scanned["state"], name))
            assert plan.slices_of(operator, subtask, name).equals(one)


def test_union_is_in_the_plan_once_however_many_read_it() -> None:
    for parallelism in (3, 8):
        plan = planned(parallelism)
        assert plan.assigned["mode"].to_pylist().count("union") == 2
        assert plan.slices["mode"].to_pylist().count("union") == 2 * parallelism


def test_the_driver_takes_coordinator_state_and_committables() -> None:
    plan = planned()
    assert plan.slices_of("map", None)["state"].to_pylist() == ["splits"]
    assert plan.slices_of("archive", None)["rows"].to_pylist() == [2]
    assert plan.committables.equals(plan.slices_of("archive", None))


def test_the_bytes_of_a_slice_are_its_share_of_the_segment() -> None:
    # One row of three in a segment of 300 bytes.
    mail = planned(2).slices_of("count", 0, "mail").to_pylist()[0]
    assert (mail["row_start"], mail["rows"], mail["bytes"]) == (1, 1, 100)


@pytest.mark.parametrize("parallelism", [1, 2, 3, 8])
def test_the_load_adds_up_the_slices_of_every_subtask_that_starts(parallelism: int) -> None:
    plan = planned(parallelism)
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
    for plan in (planned(), refused, plan_restore(checkpoint([]), graph())):
        text = plan.to_json()
        again = RestorePlan.from_json(text)
        assert again == plan
        assert again.slices.equals(plan.slices)
        assert again.to_json() == text
    assert json.loads(planned().to_json())["slices"]["operator"][0] == "archive"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format":"other","version":1}', planned().to_json().replace('"start"', '"go"')]
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
    good = planned(8)
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
from tests.redistribution.test_redistribution_plan import pipeline
from stateformat.redistribution import plan_restore, rescale
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
