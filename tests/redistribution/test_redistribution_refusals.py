"""Each reason to refuse a restore, and what is close to it and accepted."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, RestoreRefused
from stateformat.graph import Edge, JobGraph, Operator
from stateformat.keys import DEFAULT_KEY_HASH
from stateformat.model import Field, Kind
from stateformat.redistribution import Action, plan_restore
from tests.redistribution.redistribution_cases import (
    FakeCheckpoint,
    Part,
    checkpoint,
    deliver,
    edge,
    graph,
    one,
    op,
    part,
    planned,
    state,
)


def keyed(parallelism: int = 2, max_parallelism: int = 42, **rest: object) -> FakeCheckpoint:
    parts = [Part("a", "k", subtask, ()) for subtask in range(parallelism)]
    return checkpoint([op("a", parallelism, max_parallelism, **rest)], [state("a", "k", "keyed")], parts)


def stateless() -> FakeCheckpoint:
    return checkpoint([op("a", 2, 42)])


# Of one checkpoint.

CONTRADICTION, MISSING = "status_contradiction", "handle_missing"
OF_CHECKPOINT = {
    "union, a subtask finished": (one("union", op("a", 3, finished=[1]), part(0), part(2)), 3, "union_partially_finished"),
    "union, a subtask finishing": (one("union", op("a", 3, finishing=[1]), part(0), part(2)), 3, "union_partially_finished"),
    "union, all finished": (one("union", op("a", 2, finished=[0, 1])), 2, None),
    "handles of finished subtasks": (
        one("even_split", op("a", 3, finished=[0], finishing=[2]), *map(part, range(3))), 3, CONTRADICTION
    ),
    "keyed state of a finished operator": (one("keyed", op("a", 1, finished=[0]), part(0, (1, "x"))), 1, CONTRADICTION),
    "a finished coordinator": (one("coordinator", op("a", 1, finished=[0], coordinator=True), part(None, "x")), 1, CONTRADICTION),
    "a subtask that does not exist": (one("even_split", op("a", 1), part(0), part(4)), 1, CONTRADICTION),
    "finished and finishing": (checkpoint([op("a", 2, finished=[0, 1], finishing=[1])]), 2, CONTRADICTION),
    "finished beyond": (checkpoint([op("a", 2, finished=[5])]), 2, CONTRADICTION),
    "finishing beyond": (checkpoint([op("a", 2, finishing=[2])]), 2, CONTRADICTION),
    "a delta without a base": (one("keyed", op("a", 1), part(0, (1, "x"), layer=1)), 1, MISSING),
    "no handle of a coordinator": (one("coordinator", op("a", 1, coordinator=True)), 1, MISSING),
    "one handle of a coordinator": (one("coordinator", op("a", 1, coordinator=True), part(None, "x")), 1, None),
    "two of a coordinator": (
        one("coordinator", op("a", 1, coordinator=True), part(None, "x"), part(None, "x")), 1, CONTRADICTION
    ),
    **{
        f"no handle of a running subtask, {mode}": (one(mode, op("a", 4), part(0), part(2), part(2)), 4, MISSING)
        for mode in ("keyed", "even_split", "union", "broadcast", "progress")
    },
}  # fmt: skip
OF_CHECKPOINT_DETAILS = {
    "union, a subtask finished": {"state": "s", "done": 1, "parallelism": 3},
    "handles of finished subtasks": {"state": "s", "subtasks": "0,2"},
    "a subtask that does not exist": {"state": "s", "subtasks": "4"},
    "no handle of a running subtask, keyed": {"state": "s", "subtasks": "1,3"},
}


@pytest.mark.parametrize("name", OF_CHECKPOINT)
def test_a_checkpoint_that_contradicts_itself_is_refused(name: str) -> None:
    source, parallelism, code = OF_CHECKPOINT[name]
    planned(source, parallelism, *([code] if code else []), details=OF_CHECKPOINT_DETAILS.get(name))


def test_committables_of_finished_subtasks_are_fine() -> None:
    plan = planned(one("committables", op("a", 2, finished=[0]), part(0, "file")), 2)
    assert plan.committables["rows"].to_pylist() == [1]


# Numbers. X1 to X5 and X9 are rows of Flink's table of max parallelism.

INVALID, ABOVE, MAX_CHANGED = "invalid_parallelism", "parallelism_above_max", "max_parallelism_changed"
NUMBERS = [
    ("X1, the same", keyed(), [op("a", 42, 42)], (), None),
    ("X2, above the adopted max", keyed(), [op("a", 43, None)], (ABOVE,), {"parallelism": 43, "max_parallelism": 42, "adopted": True}),
    ("X2, above the chosen max", keyed(), [op("a", 43, 42)], (ABOVE,), {"parallelism": 43, "max_parallelism": 42, "adopted": False}),
    ("above, without state", stateless(), [op("a", 43, None)], (ABOVE,), None),
    ("above, a new operator", stateless(), [op("a", 2, None), op("new", 9, 8)], (ABOVE,), None),
    ("X4, a smaller max", keyed(max_parallelism=42), [op("a", 2, 20)], (MAX_CHANGED,), {"saved": 42, "wanted": 20}),
    ("X5, a larger max", keyed(max_parallelism=13), [op("a", 2, 42)], (MAX_CHANGED,), {"saved": 13, "wanted": 42}),
    ("another max without keys", stateless(), [op("a", 64, 64)], (), None),
    ("X9, zero", stateless(), [op("a", 0, None)], (INVALID,), None),
    ("X9, negative", stateless(), [op("a", -1, None)], (INVALID,), None),
    ("X9, too many", stateless(), [op("a", 32_769, None)], (INVALID,), None),
    ("X9, max of zero", stateless(), [op("a", 2, 0)], (INVALID,), None),
    ("X9, max too large", stateless(), [op("a", 2, 32_769)], (INVALID,), None),
    ("another key hash", keyed(), [op("a", 2, None, key_hash="other")], ("key_hash_changed",), {"saved": DEFAULT_KEY_HASH, "wanted": "other"}),
    ("another key hash without keys", stateless(), [op("a", 2, None, key_hash="other")], (), None),
    ("the same key hash", keyed(key_hash="other"), [op("a", 2, None, key_hash="other")], (), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "wanted", "codes", "details"), [row[1:] for row in NUMBERS], ids=[row[0] for row in NUMBERS]
)
def test_numbers_and_key_hashes(
    source: FakeCheckpoint, wanted: list[Operator], codes: tuple[str, ...], details: object
) -> None:
    plan = planned(source, graph(*wanted), *codes, details=details)
    if codes == (ABOVE,) and details:
        assert "43" in plan.refusals[0].message
        assert "42" in plan.refusals[0].message
    if not codes:
        assert [found.max_parallelism for found in plan.topology.operators] == [wanted[0].max_parallelism or 42]


def test_x3_a_derived_max_parallelism_and_key_hash_are_adopted() -> None:
    plan = planned(keyed(), graph(op("a", 7, None), op("new", 7, None)))
    assert [operator.max_parallelism for operator in plan.topology.operators] == [42, 128]
    assert [operator.key_hash for operator in plan.topology.operators] == [DEFAULT_KEY_HASH] * 2
    assert planned(keyed(key_hash="other"), graph(op("a", 2, None))).topology.operators[0].key_hash == "other"


@pytest.mark.parametrize(("rows", "codes"), [((), ()), (((3, "x"),), (MAX_CHANGED,))])
def test_another_max_parallelism_is_refused_for_keyed_records_in_flight(rows: Any, codes: tuple[str, ...]) -> None:
    hashed = edge("in", "a", "hash")
    operators, states = [op("in", 1), op("a", 1, 42)], [state("a", "s", "in_flight", on=hashed)]
    source = checkpoint(operators, states, [part(0, *rows)], [hashed])
    planned(source, graph(op("in", 1), op("a", 1, 64), edges=[hashed]), *codes)


def test_parallelism_beyond_both_the_saved_max_and_a_chosen_one_is_refused_and_not_cut() -> None:
    plan = planned(one("keyed", op("a", 1, 42), part(0, (41, "x"))), graph(op("a", 100, 128)), MAX_CHANGED)
    assert plan.slices.num_rows == 0


@pytest.mark.parametrize("wanted", [op("a", 50, None), op("a", 50, 20), op("a", 2, 64)], ids=str)
def test_numbers_mean_nothing_to_a_fully_finished_operator(wanted: Operator) -> None:
    plan = planned(one("keyed", op("a", 2, 42, finished=[0, 1])), graph(wanted))
    assert plan.by_operator["a"].action is Action.SKIP_FINISHED
    assert plan.topology.operators[0].parallelism <= (plan.topology.operators[0].max_parallelism or 0)


@pytest.mark.parametrize("partitioner", ["forward", "rescale", "hash", "rebalance", "broadcast"])
def test_keyed_state_behind_a_pointwise_edge_cannot_be_rescaled(partitioner: str) -> None:
    edges = [edge("in", "a", partitioner), edge("a", "a", "forward", id="loop", feedback=True)]
    codes = ["keyed_behind_pointwise"] if partitioner in ("forward", "rescale") else []
    for parallelism in (1, 3):
        planned(keyed(), graph(op("in", parallelism, None), op("a", parallelism, None), edges=edges), *codes)
    planned(keyed(), graph(op("in", 2, None), op("a", 2, None), edges=edges))


# The topology by itself.


@pytest.mark.parametrize(
    ("operators", "edges", "message"),
    [
        ("aa", [], "'a' is twice"),
        (["", ""], [], "operator '' is twice"),
        ("a", [edge("nobody", "a")], "joins operator 'nobody'"),
        ("ab", [edge("a", "b")] * 2, "edge 'a->b' is twice"),
        (
            "ab",
            [edge("a", "b"), edge("b", "a")],
            "the topology has a cycle without a feedback edge: (a → b → a|b → a → b)",
        ),
        ("ab", [edge("a", "b"), edge("b", "a", feedback=True)], None),
    ],
)
def test_a_topology_that_is_no_graph_is_refused(
    operators: str | list[str], edges: list[Edge], message: str | None
) -> None:
    topology = graph(*(op(uid, 2, None) for uid in operators), edges=edges)
    plan = planned(stateless(), topology, *(["invalid_topology"] if message else []))
    if message:
        with pytest.raises(RestoreRefused, match=message):
            plan.check()


@pytest.mark.parametrize(("chain", "edges"), [("c", []), (None, [edge("a", "b", "forward")])])
def test_forward_edges_and_chains_demand_one_parallelism(chain: str | None, edges: list[Edge]) -> None:
    wanted = graph(op("a", 2, None, chain=chain), op("b", 3, None, chain=chain), edges=edges)
    details = {"parallelism": [2, 3], "operators": ["a", "b"]}
    planned(checkpoint([op("a", 2), op("b", 2)]), wanted, "parallelism_differs", details=details)


def test_a_forward_edge_from_a_fully_finished_operator_demands_nothing() -> None:
    planned(checkpoint([op("a", 2, finished=[0, 1]), op("b", 2)], edges=[edge("a", "b", "forward")]), 5)


# States.

A = graph(op("a", 1, None))


def gone(rows: tuple[str, ...] = ("x",), mode: str = "even_split") -> FakeCheckpoint:
    coordinator = mode == "coordinator"
    operators = [op("a", 1), op("gone", 1, coordinator=coordinator)]
    return checkpoint(operators, [state("gone", "s", mode)], [Part("gone", "s", None if coordinator else 0, rows)])


@pytest.mark.parametrize("mode", ["even_split", "coordinator", "committables", "union"])
def test_state_of_a_missing_operator_is_refused_unless_it_is_dropped(mode: str) -> None:
    planned(gone(mode=mode), A, "operator_missing", details={"states": ["s"], "rows": 1})
    for drop in ({"gone"}, {"gone/s"}):
        plan = planned(gone(mode=mode), A, drop=drop)
        assert plan.slices.num_rows == 0
        assert plan.by_operator["gone"].action is Action.DROPPED
        assert [warning.code for warning in plan.warnings] == [ErrorKind.STATE_DROPPED]


@pytest.mark.parametrize(("rows", "mode"), [((), "even_split"), (("x",), "progress")])
def test_a_missing_operator_that_keeps_nothing_may_go(rows: tuple[str, ...], mode: str) -> None:
    plan = planned(gone(rows, mode), A)
    assert plan.slices.num_rows == 0
    assert plan.by_operator["gone"].action is Action.DROPPED


def test_a_missing_operator_that_is_fully_finished_may_go_without_its_committables_only() -> None:
    finished = [op("a", 1), op("sink", 1, finished=[0])]
    planned(checkpoint(finished), A)
    committables = state("sink", "x", "committables")
    planned(checkpoint(finished, [committables], [Part("sink", "x", 0, ("file",))]), A, "operator_missing")


@pytest.mark.parametrize(("drop", "topology"), [("nothing", A), ("a", A), ("gone/t", graph())])
def test_what_is_dropped_must_be_there_and_its_operator_gone(drop: str, topology: JobGraph) -> None:
    with pytest.raises(InvalidInput, match=drop):
        plan_restore(gone(), topology, drop=[drop])


@pytest.mark.parametrize("column", ["k", "_map_key"])
def test_a_key_column_is_never_dropped(column: str) -> None:
    fields = [Field(1, "k", "int64"), Field(2, "_map_key", "int64"), Field(3, "v", "int64")]
    declared = replace(state("a", "s", "keyed", fields=fields), kind=Kind.MAP)
    with pytest.raises(InvalidInput, match=f"column '{column}' is a key of state 's'"):
        planned(checkpoint([op("a", 1)], [declared], [part(0)]), 1, drop=[f"a/s.{column}"])


S, T = state("a", "s", "even_split"), state("a", "t", "even_split")


def two_states() -> FakeCheckpoint:
    parts = [Part("a", "s", 0, ("s",)), Part("a", "t", 0, ("t",)), Part("a", "p", 0, ("p",))]
    return checkpoint([op("a", 1)], [S, T, state("a", "p", "progress")], parts)


def test_a_state_that_the_operator_declares_no_more_is_refused_unless_it_is_dropped() -> None:
    source = two_states()
    planned(source, 1, "state_missing", states=[S], details={"state": "t", "mode": "even_split", "rows": 1})
    plan = planned(source, 1, states=[S], drop=["a/t"])
    assert deliver(source, plan.slices) == {("a", "s", 0): ["s"], ("a", "p", 0): ["p"]}


@pytest.mark.parametrize("finished", [[], [0]])
def test_committables_can_be_given_up_of_an_operator_that_stays(finished: list[int]) -> None:
    source = one("committables", op("a", 1, finished=finished), part(0, "file"))
    assert planned(source, 1).committables.num_rows == 1
    assert planned(source, 1, drop=["a/s"]).committables.num_rows == 0


def test_an_operator_that_declares_nothing_has_whatever_was_saved() -> None:
    source = two_states()
    assert len(deliver(source, planned(source, 1, states=[state("other", "s", "even_split")]).slices)) == 3


def test_coordinator_state_without_a_coordinator_is_refused() -> None:
    source = one("coordinator", op("a", 1, coordinator=True), part(None, "x"))
    planned(source, A, "state_missing")
    planned(source, A, drop=["a/s"])


def columns(*kinds: tuple[str, str], mode: str = "even_split") -> Any:
    fields = [Field(number, name, kind) for number, (name, kind) in enumerate(kinds, 1)]
    return state("a", "s", mode, fields=fields)


@pytest.mark.parametrize("narrower", ["utf8", "int32", "double"])
def test_a_schema_that_cannot_evolve_is_refused(narrower: str) -> None:
    faults = [f"column 'v' was int64 and would be {narrower}, which is no widening"]
    wanted = columns(("k", "int64"), ("v", narrower))
    planned(two_states(), 1, "schema_cannot_evolve", states=[wanted, T], details={"state": "s", "faults": faults})
    planned(two_states(), 1, states=[columns(("k", "int64"), ("w", "int64"), ("n", "utf8")), T])
    planned(two_states(), 1, "schema_cannot_evolve", states=[state("a", "s", "union"), T])


def test_committables_of_a_fully_finished_operator_must_be_readable() -> None:
    source = one("committables", op("a", 1, finished=[0]), part(0, "file"))
    other = columns(("k", "utf8"), ("v", "int64"), mode="committables")
    planned(source, 1, "schema_cannot_evolve", states=[other])
    planned(source, 1, states=[state("a", "s", "committables")])


# Records in flight.

E = edge("in", "a", id="e")
HASHED = edge("in", "a", "hash", id="e")
ALLOWED_NONE = "in_flight_not_allowed"
IN_FLIGHT = [
    *((edge("in", "a", kind), 2, [edge("in", "a", kind)], ALLOWED_NONE) for kind in ("forward", "rescale", "broadcast")),
    (E, 2, [], "in_flight_edge_missing"),
    (E, 2, [edge("a", "in", id="e")], "in_flight_edge_missing"),
    (HASHED, 2, [E], "in_flight_edge_changed"),
    (HASHED, 2, [edge("in", "a", "hash", id="e", key_columns=("other",))], "in_flight_edge_changed"),
    (edge("in", "a", "broadcast", feedback=True), 3, [edge("in", "a", "broadcast", feedback=True)], "in_flight_broadcast"),
    (edge("in", "a", "broadcast", feedback=True), 2, [edge("in", "a", "broadcast", feedback=True)], None),
]  # fmt: skip


@pytest.mark.parametrize(("before", "parallelism", "after", "code"), IN_FLIGHT)
def test_records_in_flight_go_where_they_were_sent_or_are_refused(
    before: Edge, parallelism: int, after: list[Edge], code: str | None
) -> None:
    topology = graph(op("in", parallelism, None), op("a", parallelism, None), edges=after)
    states = [state("a", "s", "in_flight", on=before)]

    def flying(*rows: Any) -> FakeCheckpoint:
        return checkpoint([op("in", 2), op("a", 2)], states, [part(0, *rows), part(1)], [before])

    planned(flying((0, "x")), topology, *([code] if code else []))
    planned(flying((0, "x")), topology, drop=["a/s"])
    planned(flying(), topology)


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
    assert {refusal.code.value for refusal in plan.refusals} == {
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


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("state", "other", "does not declare"),
        ("last_group", 7, "groups 0 to 7"),
        ("first_group", None, "no groups"),
        ("rows_per_group", [1, 0, 0, 5], "has 2 rows, but its groups have 6"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_damage(column: str, value: object, message: str) -> None:
    source = one("keyed", op("a", 1, 4), part(0, (0, "x"), (3, "y")))
    at = source.handles.schema.get_field_index(column)
    field = source.handles.schema.field(at)
    handles = source.handles.set_column(at, field, pa.array([value], field.type))
    with pytest.raises(DamagedCheckpoint, match=message):
        planned(FakeCheckpoint(source.record, handles, source.parts, source.segments), 2)


X, Y = (1, "x"), (2, "y")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (one("keyed", op("a", 1, 4), part(0, (4, "x"))), "has key group 4, but the max parallelism"),
        (one("keyed", op("a", 2, 4), part(0, Y), part(1)), "has key groups 2 to 2, but its subtask 0 owns 0 to 1"),
        (one("keyed", op("a", 1, 4), part(0, X, Y), part(0, Y)), "shares key groups with another handle"),
        (one("keyed", op("a", 1, 4), part(0, Y), part(0, X), part(0, Y, layer=1)), None),
    ],
    ids=range(4),
)
def test_key_groups_that_lie_where_they_must_not_are_damage(source: FakeCheckpoint, message: str | None) -> None:
    with pytest.raises(DamagedCheckpoint, match=message) if message else nullcontext():
        planned(source, 2)
