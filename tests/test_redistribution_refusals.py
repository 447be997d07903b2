"""Every refusal by the rule that refuses, what the rule lets pass beside it, and that all of them are told at once."""

from __future__ import annotations

import pickle
from collections.abc import Iterable

import pytest

from stateformat.errors import DamagedCheckpoint, InvalidInput, RestoreRefused
from stateformat.graph import Edge, JobGraph, Operator
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.model import Field
from stateformat.redistribution import Action, RestorePlan, WarningCode, plan_restore
from tests.redistribution_cases import FakeCheckpoint, Part, checkpoint, deliver, edge, op, state


def codes(plan: RestorePlan) -> list[str]:
    return [refusal.code.value for refusal in plan.refusals]


def graph(*operators: Operator, edges: Iterable[Edge] = ()) -> JobGraph:
    return JobGraph(operators, tuple(edges))


def keyed(parallelism: int = 2, max_parallelism: int = 42, **rest: object) -> FakeCheckpoint:
    return checkpoint(
        [op("a", parallelism, max_parallelism, **rest)],
        [state("a", "k", "keyed")],
        [Part("a", "k", subtask, ()) for subtask in range(parallelism)],
    )


def stateless(parallelism: int = 2, max_parallelism: int = 42) -> FakeCheckpoint:
    return checkpoint([op("a", parallelism, max_parallelism)])


# Of one checkpoint.


def test_union_state_in_a_partially_finished_operator_is_refused() -> None:
    for status in ("finished", "finishing"):
        source = checkpoint(
            [op("a", 3, **{status: [1]})], [state("a", "u", "union")], [Part("a", "u", 0), Part("a", "u", 2)]
        )
        plan = plan_restore(source, source.record.graph.at(3))
        assert codes(plan) == ["union_partially_finished"]
        assert plan.refusals[0].details == {"state": "u", "done": 1, "parallelism": 3}


def test_union_state_in_a_fully_finished_operator_is_fine() -> None:
    source = checkpoint([op("a", 2, finished=[0, 1])], [state("a", "u", "union")])
    assert codes(plan_restore(source, source.record.graph.at(2))) == []


def test_handles_of_finished_subtasks_are_a_contradiction() -> None:
    source = checkpoint(
        [op("a", 3, finished=[0], finishing=[2])],
        [state("a", "e", "even_split")],
        [Part("a", "e", n) for n in range(3)],
    )
    plan = plan_restore(source, source.record.graph.at(3))
    assert codes(plan) == ["status_contradiction"]
    assert plan.refusals[0].details["subtasks"] == "0,2"


def test_state_of_a_fully_finished_operator_is_a_contradiction() -> None:
    source = checkpoint(
        [op("a", 1, finished=[0], coordinator=True)],
        [state("a", "k", "keyed"), state("a", "c", "coordinator")],
        [Part("a", "k", 0, ((1, "x"),)), Part("a", "c", None, ("x",))],
    )
    assert codes(plan_restore(source, source.record.graph.at(1))) == ["status_contradiction"] * 2


def test_handles_of_subtasks_that_do_not_exist_are_a_contradiction() -> None:
    source = checkpoint([op("a", 1)], [state("a", "e", "even_split")], [Part("a", "e", 0), Part("a", "e", 4)])
    plan = plan_restore(source, source.record.graph.at(1))
    assert codes(plan) == ["status_contradiction"]
    assert plan.refusals[0].details["subtasks"] == "4"


@pytest.mark.parametrize(("finished", "finishing"), [([0, 1], [1]), ([5], []), ([], [2])])
def test_statuses_that_contradict_each_other_are_refused(finished: list[int], finishing: list[int]) -> None:
    source = checkpoint([op("a", 2, finished=finished, finishing=finishing)])
    assert codes(plan_restore(source, source.record.graph.at(2))) == ["status_contradiction"]


@pytest.mark.parametrize("mode", ["keyed", "even_split", "union", "broadcast", "progress"])
def test_a_running_subtask_without_a_handle_is_refused(mode: str) -> None:
    source = checkpoint(
        [op("a", 4)], [state("a", "s", mode)], [Part("a", "s", 0), Part("a", "s", 2), Part("a", "s", 2)]
    )
    plan = plan_restore(source, source.record.graph.at(4))
    assert codes(plan) == ["handle_missing"]
    assert plan.refusals[0].details["subtasks"] == "1,3"


def test_a_delta_does_not_stand_for_the_base() -> None:
    source = checkpoint([op("a", 1)], [state("a", "k", "keyed")], [Part("a", "k", 0, ((1, "x"),), layer=1)])
    assert codes(plan_restore(source, source.record.graph.at(1))) == ["handle_missing"]


def test_a_coordinator_has_exactly_one_handle() -> None:
    for count, wanted in ((0, ["handle_missing"]), (1, []), (2, ["status_contradiction"])):
        source = checkpoint(
            [op("a", 1, coordinator=True)], [state("a", "c", "coordinator")], [Part("a", "c", None, ("x",))] * count
        )
        assert codes(plan_restore(source, source.record.graph.at(1))) == wanted


def test_committables_of_finished_subtasks_are_fine() -> None:
    source = checkpoint([op("a", 2, finished=[0])], [state("a", "x", "committables")], [Part("a", "x", 0, ("part",))])
    plan = plan_restore(source, source.record.graph.at(2))
    assert codes(plan) == []
    assert plan.committables["rows"].to_pylist() == [1]


# Numbers. X1 to X5 and X9 are rows of Flink's table of max parallelism.


def test_x1_the_same_max_parallelism_is_accepted() -> None:
    assert codes(plan_restore(keyed(), graph(op("a", 42, 42)))) == []


def test_x2_parallelism_above_max_parallelism_is_refused_also_when_it_is_adopted() -> None:
    for chosen in (None, 42):
        plan = plan_restore(keyed(), graph(op("a", 43, chosen)))
        assert codes(plan) == ["parallelism_above_max"]
        assert plan.refusals[0].details == {"parallelism": 43, "max_parallelism": 42, "adopted": chosen is None}
        assert "43" in plan.refusals[0].message
        assert "42" in plan.refusals[0].message


def test_parallelism_above_max_is_refused_without_state_and_for_new_operators() -> None:
    assert codes(plan_restore(stateless(), graph(op("a", 43, None)))) == ["parallelism_above_max"]
    assert codes(plan_restore(stateless(), graph(op("a", 2, None), op("new", 9, 8)))) == ["parallelism_above_max"]


def test_x3_a_derived_max_parallelism_adopts_the_saved_one() -> None:
    plan = plan_restore(keyed(), graph(op("a", 7, None), op("new", 7, None)))
    assert codes(plan) == []
    assert [operator.max_parallelism for operator in plan.topology.operators] == [42, 128]
    assert [operator.key_hash for operator in plan.topology.operators] == [DEFAULT_KEY_HASH] * 2


@pytest.mark.parametrize(("saved", "wanted"), [(42, 20), (13, 42)])
def test_x4_x5_a_chosen_max_parallelism_that_differs_is_refused_for_keyed_state(saved: int, wanted: int) -> None:
    plan = plan_restore(keyed(max_parallelism=saved), graph(op("a", 2, wanted)))
    assert codes(plan) == ["max_parallelism_changed"]
    assert plan.refusals[0].details == {"saved": saved, "wanted": wanted}


def test_a_chosen_max_parallelism_may_differ_where_there_are_no_keys() -> None:
    plan = plan_restore(stateless(), graph(op("a", 64, 64)))
    assert codes(plan) == []
    assert plan.topology.operators[0].max_parallelism == 64


def test_a_chosen_max_parallelism_that_differs_is_refused_for_keyed_records_in_flight() -> None:
    hashed = edge("in", "a", "hash")
    for rows, wanted in (((), []), (((3, "x"),), ["max_parallelism_changed"])):
        source = checkpoint(
            [op("in", 1), op("a", 1, 42)],
            [state("a", "f", "in_flight", on=hashed)],
            [Part("a", "f", 0, rows)],
            [hashed],
        )
        assert codes(plan_restore(source, graph(op("in", 1), op("a", 1, 64), edges=[hashed]))) == wanted


def test_parallelism_beyond_both_the_saved_max_and_a_chosen_one_is_told_and_not_cut() -> None:
    source = checkpoint([op("a", 1, 42)], [state("a", "k", "keyed")], [Part("a", "k", 0, ((41, "x"),))])
    plan = plan_restore(source, graph(op("a", 100, 128)))
    assert codes(plan) == ["max_parallelism_changed"]
    assert plan.slices.num_rows == 0


@pytest.mark.parametrize(
    ("parallelism", "max_parallelism"), [(0, None), (-1, None), (32_769, None), (2, 0), (2, 32_769)]
)
def test_x9_numbers_outside_the_range_are_refused(parallelism: int, max_parallelism: int | None) -> None:
    assert codes(plan_restore(stateless(), graph(op("a", parallelism, max_parallelism)))) == ["invalid_parallelism"]


def test_numbers_mean_nothing_to_a_fully_finished_operator() -> None:
    source = keyed(finished=[0, 1])
    source = checkpoint(source.record.graph.operators, source.record.states)
    for wanted in (op("a", 50, None), op("a", 50, 20), op("a", 2, 64)):
        plan = plan_restore(source, graph(wanted))
        assert codes(plan) == []
        assert plan.by_operator["a"].action is Action.SKIP_FINISHED
        assert plan.topology.operators[0].parallelism <= (plan.topology.operators[0].max_parallelism or 0)


def test_another_key_hash_is_refused_where_there_are_keys() -> None:
    wanted = graph(op("a", 2, None, key_hash="other"))
    plan = plan_restore(keyed(), wanted)
    assert codes(plan) == ["key_hash_changed"]
    assert plan.refusals[0].details == {"saved": DEFAULT_KEY_HASH, "wanted": "other"}
    assert codes(plan_restore(stateless(), wanted)) == []
    assert codes(plan_restore(keyed(key_hash="other"), wanted)) == []
    assert plan_restore(keyed(key_hash="other"), graph(op("a", 2, None))).topology.operators[0].key_hash == "other"


@pytest.mark.parametrize("partitioner", ["forward", "rescale", "hash", "rebalance", "broadcast"])
def test_keyed_state_behind_a_pointwise_edge_cannot_be_rescaled(partitioner: str) -> None:
    source = keyed()
    pointwise = partitioner in ("forward", "rescale")
    edges = [edge("in", "a", partitioner), edge("a", "a", "forward", id="loop", feedback=True)]
    more = plan_restore(source, graph(op("in", 3, None), op("a", 3, None), edges=edges))
    assert codes(more) == (["keyed_behind_pointwise"] if pointwise else [])
    same = plan_restore(source, graph(op("in", 2, None), op("a", 2, None), edges=edges))
    assert codes(same) == []


# The topology by itself.


def test_a_topology_that_is_no_graph_is_refused() -> None:
    source = stateless()
    assert codes(plan_restore(source, graph(op("a", 2, None), op("a", 2, None)))) == ["invalid_topology"]
    lost = graph(op("a", 2, None), edges=[edge("nobody", "a")])
    assert codes(plan_restore(source, lost)) == ["invalid_topology"]
    twice = graph(op("a", 2, None), op("b", 2, None), edges=[edge("a", "b")] * 2)
    assert codes(plan_restore(source, twice)) == ["invalid_topology"]
    loop = [edge("a", "b"), edge("b", "a")]
    (refusal,) = plan_restore(source, graph(op("a", 2, None), op("b", 2, None), edges=loop)).refusals
    assert refusal.code.value == "invalid_topology"
    assert "cycle without a feedback edge: a → b → a" in refusal.message or "b → a → b" in refusal.message
    fed_back = [edge("a", "b"), edge("b", "a", feedback=True)]
    assert codes(plan_restore(source, graph(op("a", 2, None), op("b", 2, None), edges=fed_back))) == []


def test_forward_edges_and_chains_demand_one_parallelism() -> None:
    source = checkpoint([op("a", 2), op("b", 2)])
    for chain, edges in (("c", []), (None, [edge("a", "b", "forward")])):
        wanted = graph(op("a", 2, None, chain=chain), op("b", 3, None, chain=chain), edges=edges)
        plan = plan_restore(source, wanted)
        assert codes(plan) == ["parallelism_differs"]
        assert plan.refusals[0].details == {"parallelism": [2, 3], "operators": ["a", "b"]}


def test_a_forward_edge_from_a_fully_finished_operator_demands_nothing() -> None:
    source = checkpoint([op("a", 2, finished=[0, 1]), op("b", 2)], edges=[edge("a", "b", "forward")])
    assert codes(plan_restore(source, source.record.graph.at(5))) == []


# States.


def gone(rows: tuple[str, ...] = ("x",), mode: str = "even_split") -> FakeCheckpoint:
    return checkpoint(
        [op("a", 1), op("gone", 1, coordinator=mode == "coordinator")],
        [state("gone", "s", mode)],
        [Part("gone", "s", None if mode == "coordinator" else 0, rows)],
    )


@pytest.mark.parametrize("mode", ["even_split", "coordinator", "committables", "union"])
def test_state_of_a_missing_operator_is_refused_unless_it_is_dropped(mode: str) -> None:
    wanted = graph(op("a", 1, None))
    plan = plan_restore(gone(mode=mode), wanted)
    assert codes(plan) == ["operator_missing"]
    assert plan.refusals[0].details == {"states": ["s"], "rows": 1}
    for drop in ({"gone"}, {"gone/s"}):
        plan = plan_restore(gone(mode=mode), wanted, drop=drop)
        assert codes(plan) == []
        assert plan.slices.num_rows == 0
        assert plan.by_operator["gone"].action is Action.DROPPED
        assert [warning.code for warning in plan.warnings] == [WarningCode.STATE_DROPPED]


@pytest.mark.parametrize(("rows", "mode"), [((), "even_split"), (("x",), "progress")])
def test_a_missing_operator_that_keeps_nothing_may_go(rows: tuple[str, ...], mode: str) -> None:
    plan = plan_restore(gone(rows, mode), graph(op("a", 1, None)))
    assert codes(plan) == []
    assert plan.slices.num_rows == 0
    assert plan.by_operator["gone"].action is Action.DROPPED


def test_a_missing_operator_that_is_fully_finished_may_go_without_its_committables_only() -> None:
    finished = [op("a", 1), op("sink", 1, finished=[0])]
    wanted = graph(op("a", 1, None))
    assert codes(plan_restore(checkpoint(finished), wanted)) == []
    source = checkpoint(finished, [state("sink", "x", "committables")], [Part("sink", "x", 0, ("part",))])
    assert codes(plan_restore(source, wanted)) == ["operator_missing"]


def test_what_is_dropped_must_be_there_and_its_operator_gone() -> None:
    for drop, topology in (("nothing", graph(op("a", 1, None))), ("a", graph(op("a", 1, None))), ("gone/t", graph())):
        with pytest.raises(InvalidInput, match=drop):
            plan_restore(gone(), topology, drop=[drop])


def two_states() -> FakeCheckpoint:
    return checkpoint(
        [op("a", 1)],
        [state("a", "s", "even_split"), state("a", "t", "even_split"), state("a", "p", "progress")],
        [Part("a", "s", 0, ("s",)), Part("a", "t", 0, ("t",)), Part("a", "p", 0, ("p",))],
    )


def test_a_state_that_the_operator_declares_no_more_is_refused_unless_it_is_dropped() -> None:
    source, declared = two_states(), [state("a", "s", "even_split")]
    plan = plan_restore(source, source.record.graph.at(), states=declared)
    assert codes(plan) == ["state_missing"]
    assert plan.refusals[0].details == {"state": "t", "mode": "even_split", "rows": 1}
    plan = plan_restore(source, source.record.graph.at(), states=declared, drop=["a/t"])
    assert codes(plan) == []
    assert deliver(source, plan.slices) == {("a", "s", 0): ["s"], ("a", "p", 0): ["p"]}


def test_committables_can_be_given_up_of_an_operator_that_stays() -> None:
    for finished in ([], [0]):
        source = checkpoint(
            [op("a", 1, finished=finished)], [state("a", "x", "committables")], [Part("a", "x", 0, ("f",))]
        )
        topology = source.record.graph.at()
        assert plan_restore(source, topology).committables.num_rows == 1
        assert plan_restore(source, topology, drop=["a/x"]).committables.num_rows == 0


def test_an_operator_that_declares_nothing_has_whatever_was_saved() -> None:
    source = two_states()
    plan = plan_restore(source, source.record.graph.at(), states=[state("other", "s", "even_split")])
    assert codes(plan) == []
    assert len(deliver(source, plan.slices)) == 3


def test_coordinator_state_without_a_coordinator_is_refused() -> None:
    source = checkpoint(
        [op("a", 1, coordinator=True)], [state("a", "c", "coordinator")], [Part("a", "c", None, ("x",))]
    )
    assert codes(plan_restore(source, graph(op("a", 1, None)))) == ["state_missing"]
    assert codes(plan_restore(source, graph(op("a", 1, None)), drop=["a/c"])) == []


def test_a_schema_that_cannot_evolve_is_refused() -> None:
    source = two_states()
    widened = state("a", "s", "even_split", fields=[Field(1, "k", "int64"), Field(2, "v", "utf8")])
    plan = plan_restore(source, source.record.graph.at(), states=[widened, state("a", "t", "even_split")])
    assert codes(plan) == ["schema_cannot_evolve"]
    assert plan.refusals[0].details["faults"] == ["column 'v' was int64 and would be utf8, which is no widening"]
    grown = state(
        "a", "s", "even_split", fields=[Field(1, "k", "int64"), Field(2, "w", "int64"), Field(3, "n", "utf8")]
    )
    assert codes(plan_restore(source, source.record.graph.at(), states=[grown, state("a", "t", "even_split")])) == []


def test_another_mode_is_a_schema_that_cannot_evolve() -> None:
    source = two_states()
    declared = [state("a", "s", "union"), state("a", "t", "even_split")]
    assert codes(plan_restore(source, source.record.graph.at(), states=declared)) == ["schema_cannot_evolve"]


def test_committables_of_a_fully_finished_operator_must_be_readable() -> None:
    source = checkpoint([op("a", 1, finished=[0])], [state("a", "x", "committables")], [Part("a", "x", 0, ("part",))])
    other = state("a", "x", "committables", fields=[Field(1, "k", "utf8"), Field(2, "v", "int64")])
    assert codes(plan_restore(source, source.record.graph.at(), states=[other])) == ["schema_cannot_evolve"]
    assert codes(plan_restore(source, source.record.graph.at(), states=[state("a", "x", "committables")])) == []


# Records in flight.


def flying(before: Edge, rows: tuple = ((0, "x"),)) -> FakeCheckpoint:
    operators = [op("in", 2), op("a", 2)]
    return checkpoint(
        operators, [state("a", "f", "in_flight", on=before)], [Part("a", "f", 0, rows), Part("a", "f", 1)], [before]
    )


@pytest.mark.parametrize("partitioner", ["forward", "rescale", "broadcast"])
def test_records_in_flight_on_edges_that_may_hold_none_are_refused(partitioner: str) -> None:
    source = flying(edge("in", "a", partitioner))
    assert codes(plan_restore(source, source.record.graph.at(2))) == ["in_flight_not_allowed"]
    source = flying(edge("in", "a", partitioner), ())
    assert codes(plan_restore(source, source.record.graph.at(2))) == []


def test_records_in_flight_on_an_edge_that_is_gone_or_leads_elsewhere_are_refused() -> None:
    before = edge("in", "a", id="e")
    operators = (op("in", 2, None), op("a", 2, None))
    for edges in ([], [edge("a", "in", id="e")]):
        plan = plan_restore(flying(before), graph(*operators, edges=edges))
        assert codes(plan) == ["in_flight_edge_missing"]
        assert codes(plan_restore(flying(before, ()), graph(*operators, edges=edges))) == []
        assert codes(plan_restore(flying(before), graph(*operators, edges=edges), drop=["a/f"])) == []


def test_records_in_flight_on_an_edge_that_has_changed_are_refused() -> None:
    operators = (op("in", 2, None), op("a", 2, None))
    before = edge("in", "a", "hash", id="e")
    for after in (edge("in", "a", id="e"), edge("in", "a", "hash", id="e", key_columns=("other",))):
        plan = plan_restore(flying(before), graph(*operators, edges=[after]))
        assert codes(plan) == ["in_flight_edge_changed"]
        assert codes(plan_restore(flying(before, ()), graph(*operators, edges=[after]))) == []


def test_records_in_a_broadcast_loop_do_not_change_their_parallelism() -> None:
    source = flying(edge("in", "a", "broadcast", feedback=True))
    assert codes(plan_restore(source, source.record.graph.at(2))) == []
    assert codes(plan_restore(source, source.record.graph.at(3))) == ["in_flight_broadcast"]
    source = flying(edge("in", "a", "broadcast", feedback=True), ())
    assert codes(plan_restore(source, source.record.graph.at(3))) == []


# All at once.


def test_every_reason_is_told_at_once_and_check_raises_them_all() -> None:
    hashed = edge("in", "a", "hash")
    source = checkpoint(
        [op("in", 2), op("a", 2, 42, finished=[1]), op("gone", 1)],
        [state("a", "k", "keyed"), state("a", "u", "union"), state("gone", "s", "even_split")],
        [Part("a", "k", 0, ((3, "x"),)), Part("a", "u", 0), Part("gone", "s", 0, ("y",))],
        [hashed],
    )
    plan = plan_restore(source, graph(op("in", 2, None), op("a", 50, 64, key_hash="other"), edges=[hashed]))
    assert set(codes(plan)) == {
        "union_partially_finished",
        "max_parallelism_changed",
        "key_hash_changed",
        "operator_missing",
        "partially_finished_predecessor",
    }
    with pytest.raises(RestoreRefused) as raised:
        plan.check()
    assert raised.value.refusals == plan.refusals
    for refusal in plan.refusals:
        assert refusal.message in str(raised.value)
        assert refusal.advice in str(raised.value)
        assert repr(refusal.operator) in refusal.message
    assert pickle.loads(pickle.dumps(raised.value)).refusals == plan.refusals


# Damage is no refusal.


def damaged(column: str, values: list[object]) -> FakeCheckpoint:
    source = checkpoint([op("a", 1, 4)], [state("a", "k", "keyed")], [Part("a", "k", 0, ((0, "x"), (3, "y")))])
    at = source.handles.schema.get_field_index(column)
    field = source.handles.schema.field(at)
    import pyarrow as pa

    handles = source.handles.set_column(at, field, pa.array(values, field.type))
    return FakeCheckpoint(source.record, handles, source.parts, source.segments)


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ("state", ["other"], "does not declare"),
        ("last_group", [7], "groups 0 to 7"),
        ("first_group", [None], "no groups"),
        ("rows_per_group", [[1, 0, 0, 5]], "has 2 rows, but its groups have 6"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_damage(column: str, values: list[object], told: str) -> None:
    source = damaged(column, values)
    with pytest.raises(DamagedCheckpoint, match=told):
        plan_restore(source, source.record.graph.at(2))


def test_a_key_group_beyond_the_max_parallelism_is_damage() -> None:
    source = checkpoint([op("a", 1, 4)], [state("a", "k", "keyed")], [Part("a", "k", 0, ((4, "x"),))])
    with pytest.raises(DamagedCheckpoint, match="key group 4"):
        plan_restore(source, source.record.graph.at(2))
