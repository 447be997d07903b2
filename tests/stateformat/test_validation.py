"""Validation: sound checkpoints have no problem, and every way to break one is found, named, and
kept apart from the rest.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stateformat
from stateformat import model
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointExpired, ErrorKind, NotFound, StorageError
from stateformat.findings import Finding, Report
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner, Status, SubtaskSet
from stateformat.manifest import handles_table
from stateformat.model import Field, FormerStatus, Handle, Kind, ParentRef, RescaledFrom, SchemaVersion, State
from stateformat.rules import check_content
from stateformat.segments import WriteOptions
from stateformat.states import declare
from stateformat.store import CheckpointStore
from stateformat.validation import validate, validator
from tests.forgery import Forger, get, put
from tests.worlds.stores import Job, counts_store, edge, flights_store, operator, owned

# ---- content: graph, states and handles ----------------------------------------------------------

A, B = OperatorId("a"), OperatorId("b")
HASH = "spark-murmur3-seed42"
GRAPH = JobGraph(
    (Operator(A, 2, 8, key_hash=HASH, chain="x"), Operator(B, 2, 8, key_hash=HASH, coordinator=True, chain="x")),
    (Edge("ab", A, B, Partitioner.HASH, 0, ("k",)), Edge("bb", B, B, Partitioner.REBALANCE, 1, feedback=True)),
)
KEYED = declare.value_state("b", "keyed", keys={"k": pa.int64()}, values={"v": pa.string()})
UNION = declare.union_state("a", "union", columns={"x": pa.int32()})
COORDINATOR = declare.coordinator_state("b", "boss", columns={"x": pa.int32()})
MAIL = declare.in_flight_state("b", "mail", edge="ab", keys={"k": pa.int64()}, columns={"v": pa.string()})
OUT = declare.committables_state("a", "out", columns={"file": pa.string()})
STATES = (UNION, OUT, COORDINATOR, KEYED, MAIL)


def full(state: State, subtask: int | None, groups: tuple[int, int] | None = None, **changes: Any) -> Handle:
    """A handle with one row per group, or four rows."""
    rows = groups[1] - groups[0] + 1 if groups else 4
    found = empty(state, subtask)._replace(
        path=f"segments/1/{state.operator}-{state.name}-{subtask}",
        rows=rows,
        segment_rows=rows,
        size_bytes=1000,
        uncompressed_bytes=2000,
        footer_bytes=500,
        digest=b"d" * 16,
        footer_digest=b"f" * 16,
    )
    if groups:
        found = found._replace(first_group=groups[0], last_group=groups[1], rows_per_group=[1] * rows)
    return found._replace(**changes)


def empty(state: State, subtask: int | None) -> Handle:
    return Handle(state.operator, state.name, state.mode.value, subtask, 0, state.edge, 1)


HANDLES = [
    full(OUT, 0),
    full(OUT, 7),
    full(UNION, 0),
    empty(UNION, 1),
    full(COORDINATOR, None),
    full(KEYED, 0, (0, 3)),
    full(KEYED, 1, (5, 6)),
    full(KEYED, 1, (7, 7), path="segments/1/more"),
    full(KEYED, 1, (4, 7), layer=1, path="segments/1/delta"),
    empty(MAIL, 0),
    full(MAIL, 1, (4, 5)),
]


def content(
    graph: JobGraph = GRAPH, states: tuple[State, ...] = STATES, handles: list[Handle] | None = None
) -> list[Finding]:
    return check_content(graph, states, handles_table(HANDLES if handles is None else handles))


def test_sound_content_has_no_problem_with_or_without_inline_bytes() -> None:
    assert content() == []
    assert check_content(GRAPH, STATES, handles_table(HANDLES).drop_columns(["inline"])) == []


def test_a_job_without_operators_or_states_is_sound() -> None:
    assert content(JobGraph(()), (), []) == []


def a(**changes: Any) -> JobGraph:
    return GRAPH.with_operators({A: replace(GRAPH.operator("a"), **changes)})


def b(**changes: Any) -> JobGraph:
    return GRAPH.with_operators({B: replace(GRAPH.operator("b"), **changes)})


def fed_back(graph: JobGraph) -> JobGraph:
    """The same with feedback edges alone, which set no rule for what has finished."""
    return replace(graph, edges=tuple(replace(edge, feedback=True) for edge in graph.edges))


def edges(*more: Edge) -> JobGraph:
    return replace(GRAPH, edges=(*GRAPH.edges, *more))


SET = SubtaskSet
GRAPHS: list[tuple[JobGraph, str, str]] = [
    (replace(GRAPH, operators=(*GRAPH.operators, GRAPH.operators[0])), "3.2", "operator uid 'a' is 2 times"),
    (edges(GRAPH.edges[0]), "3.2", "edge id 'ab' is 2 times"),
    (a(max_parallelism=None), "3.4", "max parallelism 0 of operator 'a' is not between 1 and 32768"),
    (a(max_parallelism=1), "3.4", "parallelism 2 of operator 'a' is above its max parallelism 1"),
    (a(max_parallelism=40_000), "3.4", "max parallelism 40000"),
    (a(key_hash=None), "3.4", "names no key hash"),
    (a(finishing=SET(((1, 2),))), "3.4", "the finishing subtasks of operator 'a' are [(1, 2)]"),
    (a(finished=SET(((0, 0), (1, 1)))), "3.4", "non-adjacent ranges"),
    (b(finished=SET(((1, 1),)), finishing=SET(((1, 1),))), "3.4", "subtasks 1 of operator 'b' are both finished"),
    (a(parallelism=3), "3.4", "chain 'x' joins operators of different parallelism: 'a' has 3, 'b' has 2"),
    (edges(Edge("ax", A, OperatorId("x"))), "3.5", "edge 'ax' ends at operator 'x'"),
    (edges(Edge("e", A, B, input=-1)), "3.5", "feeds input -1"),
    (edges(Edge("e", A, B, key_columns=("k",))), "3.5", "is rebalance and has key columns ['k']"),
    (replace(edges(Edge("e", A, B, Partitioner.FORWARD)), operators=(a(parallelism=3).operators[0], GRAPH.operators[1])), "3.5", "forward edge 'e' joins operators of different parallelism: 'a' has 3, 'b' has 2"),
    (edges(Edge("ba", B, A)), "3.5", "cycle without a feedback edge"),
    (edges(Edge("aa", A, A)), "3.5", "cycle without a feedback edge: a → a"),
]  # fmt: skip


@pytest.mark.parametrize(("graph", "clause", "message"), GRAPHS, ids=[message for *_, message in GRAPHS])
def test_each_rule_of_the_graph_is_kept(graph: JobGraph, clause: str, message: str) -> None:
    found = [problem for problem in content(graph) if message in problem.message]
    assert [problem.clause for problem in found] == [f"SPEC {clause}"]


def state(base: State, **changes: Any) -> tuple[State, ...]:
    return tuple(replace(base, **changes) if item is base else item for item in STATES)


def fields(*items: Field) -> dict[str, Any]:
    return {"schemas": (SchemaVersion(1, items),), "last_field_id": 9}


K, V = Field(1, "k", "int64"), Field(2, "v", "utf8")
TWO = (SchemaVersion(1, (K, V)), SchemaVersion(2, (K, replace(V, type="int8"))))
DECLARED: list[tuple[tuple[State, ...], str, str]] = [
    ((*STATES, UNION), "3.2", "state 'union' of operator 'a' is declared 2 times"),
    ((*STATES, replace(COORDINATOR, name="boss2")), "3.6", "operator 'b' has 2 states of mode coordinator"),
    ((*STATES, declare.progress_state("a", "p"), declare.progress_state("a", "q")), "3.6", "2 states of mode progress"),
    ((*STATES, replace(MAIL, name="mail2")), "3.6", "edge 'ab' has 2 in-flight states"),
    ((*STATES, replace(COORDINATOR, operator=A)), "3.6", "the operator has no coordinator"),
    ((*STATES, replace(UNION, operator=OperatorId("x"))), "3.6", "an operator that the graph lacks"),
    (state(MAIL, edge="nowhere"), "3.6", "on edge 'nowhere', which is not an edge into its operator"),
    (state(MAIL, key_columns=()), "3.6", "in flight on a hash edge and has key columns []"),
    (state(UNION, kind=Kind.VALUE), "3.6", "kinds are for keyed"),
    (state(KEYED, kind=None), "3.6", "kinds are for keyed"),
    (state(UNION, edge="ab"), "3.6", "is of mode union and names edge 'ab'"),
    (state(KEYED, key_columns=()), "3.6", "is keyed and has no key columns"),
    (state(UNION, key_columns=("x",)), "3.6", "is of mode union and has key columns"),
    (state(UNION, schemas=(SchemaVersion(2, UNION.current.fields), SchemaVersion(1, UNION.current.fields))), "3.6", "ids ascend from 1"),
    (state(KEYED, **fields(K, V, replace(V, id=3))), "3.6", "two fields of one name"),
    (state(KEYED, **fields(K, replace(V, name="_v"))), "3.6", "has fields ['_v'] in schema 1"),
    (state(KEYED, **fields(K, replace(V, name="_map_key"))), "3.6", "has fields ['_map_key'] in schema 1"),
    (state(KEYED, kind=Kind.MAP), "3.6", "has no field ['_map_key'] in schema 1"),
    (state(KEYED, **fields(V)), "3.6", "has no field ['k'] in schema 1"),
    (state(KEYED, **fields(K, replace(V, id=1))), "3.6", "has field ids [1, 1]"),
    (state(KEYED, **fields(K, Field(3, "s", ("list", replace(V, id=1))))), "3.6", "has field ids [1, 3, 1]"),
    (state(KEYED, **{**fields(K, V), "last_field_id": 1}), "3.6", "above its last_field_id 1"),
    (state(KEYED, **fields(replace(K, type=("list", V)), V)), "3.7", "key column 'k' of type list"),
    (state(KEYED, **fields(K, replace(V, type="tensor"))), "3.7", "unknown type 'tensor'"),
    (state(KEYED, **fields(K, replace(V, type="int8", default="many"))), "3.7", "'many' is no default for type int8"),
    (state(KEYED, schemas=TWO), "5.7", "column 'v' was utf8 and would be int8"),
]  # fmt: skip


@pytest.mark.parametrize(("states", "clause", "message"), DECLARED, ids=[message for *_, message in DECLARED])
def test_each_rule_of_states_is_kept(states: tuple[State, ...], clause: str, message: str) -> None:
    found = [problem for problem in content(states=states) if message in problem.message]
    assert [problem.clause for problem in found] == [f"SPEC {clause}"]


def swap(handle: Handle, *others: Handle) -> list[Handle]:
    """The handles with one replaced; the order is that of the format all the same."""
    assert handle in HANDLES
    return [one for old in HANDLES for one in (others if old is handle else (old,))]


OUT0, OUT7, UNION0, UNION1, BOSS, KEYED0, KEYED1, MORE, DELTA, MAIL0, MAIL1 = HANDLES
CASES: list[tuple[list[Handle], str, str, ErrorKind]] = [
    (swap(UNION0), "4.6", "state 'union' of operator 'a' has no handle of layer 0 for running subtasks 0;", ErrorKind.STATE_MISSING),
    (swap(KEYED0), "4.6", "for running subtasks 0;", ErrorKind.STATE_MISSING),
    ([h for h in HANDLES if h.state != "mail"], "4.6", "state 'mail' of operator 'b' has no handle of layer 0 for running subtasks 0-1", ErrorKind.STATE_MISSING),
    (swap(KEYED0, KEYED0._replace(layer=1)), "4.6", "no handle of layer 0 for running subtasks 0;", ErrorKind.STATE_MISSING),
    (swap(BOSS), "4.6", "is the coordinator's and has 0 handles", ErrorKind.STATE_MISSING),
    (swap(BOSS, BOSS, BOSS), "4.6", "is the coordinator's and has 2 handles", ErrorKind.STATE_NOT_ALLOWED),
    (swap(UNION1, UNION1, full(UNION, 2)), "4.1", "has handles of subtasks 2; its operator has 0 to 1", ErrorKind.INVALID_PARALLELISM),
    (swap(UNION0, UNION0._replace(state="who")), "4.1", "state 'who' of operator 'a'; there is no such state", ErrorKind.UNKNOWN_STATE),
    (swap(UNION0, UNION0._replace(operator="0")), "4.1", "of operator '0'; there is no such operator", ErrorKind.UNKNOWN_OPERATOR),
    (swap(UNION0, UNION0._replace(mode="even_split")), "4.1", "is union and has handles of ['even_split']", ErrorKind.SCHEMA_MISMATCH),
    (swap(UNION0, UNION0._replace(schema_id=3)), "4.1", "has handles of schemas [3]; its schemas are [1]", ErrorKind.SCHEMA_MISMATCH),
    (swap(MAIL0, MAIL0._replace(edge="bb")), "4.1", "is in flight on 'ab' and has handles of ['bb']", ErrorKind.SCHEMA_MISMATCH),
    (swap(KEYED0, full(KEYED, 0, (0, 4))), "5.3", "has key groups 0 to 4 at subtask 0, which owns 0 to 3", ErrorKind.STATE_NOT_ALLOWED),
    (swap(MAIL1, full(MAIL, 1, (3, 5))), "5.3", "has key groups 3 to 5 at subtask 1, which owns 4 to 7", ErrorKind.STATE_NOT_ALLOWED),
    (swap(MORE, full(KEYED, 1, (6, 7), path="segments/1/more")), "4.3", "has key group 6 in two handles of subtask 1, layer 0", ErrorKind.STATE_NOT_ALLOWED),
    (swap(UNION1, UNION1, UNION0), "4.2", "sorted", ErrorKind.DAMAGED_MANIFEST),
    (swap(UNION1, UNION1._replace(rows=1)), "4.1", "path is set where rows is not 0", ErrorKind.DAMAGED_MANIFEST),
    (swap(MORE, MORE._replace(path=KEYED1.path, size_bytes=999)), "4.1", "handles of one segment agree in size_bytes", ErrorKind.DAMAGED_MANIFEST),
    (swap(MORE, MORE._replace(path=KEYED0.path, digest=b"x" * 16)), "4.1", "handles of one segment agree in digest", ErrorKind.DAMAGED_MANIFEST),
    (swap(MAIL1, MAIL1._replace(path=KEYED1.path)), "5.6", "handles of one segment agree in state", ErrorKind.DAMAGED_MANIFEST),
    (swap(MORE, MORE._replace(path=KEYED1.path, inline=b"x")), "4.4", "handles of one segment agree in inline", ErrorKind.DAMAGED_MANIFEST),
    (swap(MORE, MORE._replace(path="segments/../x")), "2.2", "paths are legal", ErrorKind.INVALID_PATH),
]  # fmt: skip


@pytest.mark.parametrize(("handles", "clause", "message", "kind"), CASES, ids=[message for _, _, message, _ in CASES])
def test_each_rule_of_handles_is_kept(handles: list[Handle], clause: str, message: str, kind: ErrorKind) -> None:
    found = [problem for problem in content(handles=handles) if message in problem.message]
    assert [(problem.clause, problem.kind) for problem in found] == [(f"SPEC {clause}", kind)]
    assert found[0].operator
    assert found[0].state


def test_finished_and_finishing_subtasks_contribute_committables_and_nothing_else() -> None:
    without_union = [s for s in STATES if s is not UNION]
    handles = [h for h in HANDLES if h.state != "union"]
    ended = fed_back(b(finished=SET(((0, 0),))))
    found = check_content(ended, without_union, handles_table(handles))
    assert {(p.clause, p.state) for p in found} == {("SPEC 4.6", "keyed"), ("SPEC 4.6", "mail")}
    assert all("handles of subtasks 0, which are finished" in p.message for p in found)
    right = [h for h in handles if h.operator == "a" or h.subtask != 0]
    assert check_content(ended, without_union, handles_table(right)) == []
    waiting = fed_back(b(finishing=SET(((0, 0),))))
    assert check_content(waiting, without_union, handles_table(right)) == []
    assert "which are finishing" in check_content(waiting, without_union, handles_table(handles))[0].message


def test_a_fully_finished_operator_keeps_committables_at_most() -> None:
    over = a(finished=SET(((0, 0),)), finishing=SET(((1, 1),)))
    (found,) = content(over)
    assert (
        found.message == "state 'union' of operator 'a' is union and has 2 handles, but its operator is fully finished"
    )
    assert content(over, handles=[h for h in HANDLES if h.state != "union"]) == []
    boss = fed_back(b(finished=SET(((0, 1),))))
    left = [h for h in HANDLES if h.operator == "a"]
    assert content(boss, handles=left) == []
    assert [p.state for p in content(boss, handles=[*left, BOSS])] == ["boss"]


def test_union_state_of_a_partially_finished_operator_is_refused() -> None:
    part = a(finished=SET(((1, 1),)))
    found = content(part, handles=swap(UNION1))
    assert [(p.kind, p.operator, p.state) for p in found] == [(ErrorKind.UNION_PARTIALLY_FINISHED, "a", "union")]


def beside(one: Status, other: Status, partitioner: Partitioner, *, feedback: bool = False) -> JobGraph:
    """Two operators without state, a before b, of these statuses."""
    ended = {Status.RUNNING: SET(), Status.PARTIALLY_FINISHED: SET(((1, 1),)), Status.FULLY_FINISHED: SET(((0, 1),))}
    keys = ("k",) if partitioner is Partitioner.HASH else ()
    before, after = (
        Operator(A, 2, 8, key_hash=HASH, finished=ended[one]),
        Operator(B, 2, 8, key_hash=HASH, finishing=ended[other]),
    )
    return JobGraph((before, after), (Edge("ab", A, B, partitioner, 0, keys, feedback),))


@pytest.mark.parametrize("partitioner", list(Partitioner))
def test_finished_operators_behind_ones_that_have_not_finished_enough_are_told(partitioner: Partitioner) -> None:
    run, part, full = Status.RUNNING, Status.PARTIALLY_FINISHED, Status.FULLY_FINISHED
    right = {(one, run) for one in Status} | {(full, other) for other in Status}
    if not partitioner.all_to_all:
        right |= {(part, part)}
    for one, other in product(Status, Status):
        found = content(beside(one, other, partitioner), (), [])
        assert content(beside(one, other, partitioner, feedback=True), (), []) == []
        if (one, other) in right:
            assert found == []
        else:
            wanted = (ErrorKind.STATUS_CONTRADICTION, "SPEC 3.5", "b")
            assert [(p.kind, p.clause, p.operator) for p in found] == [wanted]
            assert "its predecessor 'a'" in found[0].message


def test_after_a_rescale_the_former_statuses_count() -> None:
    graph = beside(Status.RUNNING, Status.RUNNING, Partitioner.HASH)
    former = [FormerStatus(uid, 2, SET(((0, 0),)), SET()) for uid in (A, B)]
    for operators, told in (((), 0), (former[:1], 0), (former[1:], 1), (former, 1)):
        rescaled = RescaledFrom(ParentRef(model.CheckpointId(1), model.AttemptId("0" * 32)), tuple(operators))
        assert len(check_content(graph, (), handles_table([]), rescaled)) == told


def test_everything_is_found_at_once_and_nothing_raises() -> None:
    graph = replace(b(max_parallelism=None, key_hash=None), edges=(Edge("e", A, OperatorId("x"), input=-1),))
    states = (replace(KEYED, schemas=()), replace(KEYED, key_columns=()), MAIL)
    handles = [KEYED0._replace(rows_per_group=None, row_start=-1), KEYED1._replace(mode="magic"), UNION0, UNION0]
    found = content(graph, states, handles)
    assert len(found) > 10
    assert len(set(found)) == len(found)
    assert all(p.clause.startswith("SPEC ") and p.message and p.advice for p in found)


def test_a_problem_is_plain_values_too() -> None:
    (found,) = content(handles=swap(BOSS))
    assert found.to_json() == {
        "kind": "state_missing",
        "clause": "SPEC 4.6",
        "message": found.message,
        "advice": found.advice,
        "operator": "b",
        "state": "boss",
        "severity": "error",
    }
    assert str(found) == f"error: {found.message} (SPEC 4.6)"


# ---- stores --------------------------------------------------------------------------------------


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    name = request.node.name
    yield f"memory://{name}"
    MemoryStorage.reset(name)


def messages(report: Report) -> list[str]:
    return [problem.message for problem in report.problems]


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_sound_checkpoint_of_every_mode_has_no_problem(url: str, level: Any) -> None:
    store = flights_store(url)
    for checkpoint_id in (1, 2, None):
        steps: list[tuple[int, int]] = []
        report = validate(store, checkpoint_id, level=level, progress=lambda *step, to=steps: to.append(step))
        assert report.findings == ()
        assert report.ok
        assert report.checkpoint_id == (checkpoint_id or 2)
        record = store.open(checkpoint_id).record
        assert (report.counts.handles, report.counts.segments) == (record.totals.handles, record.totals.segments)
        assert report.counts.rows == (record.totals.rows if level == "full" else 0)
        assert {of for _, of in steps} == {record.totals.bytes}
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert (steps[0][0], steps[-1][0]) == (0, record.totals.bytes)


def test_segments_that_are_objects_cost_a_footer_in_quick_and_every_byte_in_full(url: str) -> None:
    store = objects(url)
    record = store.open().record
    outside = len(get(store.storage, "checkpoints/00000000000000000001.json")) + record.manifest.size_bytes
    quick, full_report = validate(store), validate(store, level="full")
    assert outside < quick.counts.bytes < outside + record.totals.bytes
    assert full_report.counts.bytes == outside + record.totals.bytes
    assert quick.ok
    assert full_report.ok


def test_a_store_or_checkpoint_that_is_not_there_is_not_found(url: str) -> None:
    with pytest.raises(NotFound) as caught:
        validate(stateformat.open(url))
    assert caught.value.kind is ErrorKind.STORE_NOT_FOUND
    store = counts_store(url, 3)
    with pytest.raises(NotFound, match="the newest is 3"):
        validate(store, 4)
    store.expire(1)
    with pytest.raises(CheckpointExpired):
        validate(store, 1)


def test_a_store_and_its_storage_are_both_taken(url: str) -> None:
    store = counts_store(url)
    assert validate(store.storage).ok
    assert validate(store.storage) == validate(store)


def test_a_stray_is_no_checkpoint_and_a_warning_for_others(url: str) -> None:
    store = counts_store(url, 3)
    forger = Forger(store.storage, 1)
    forger.seal(attempt_id="ab" * 16)
    (problem,) = validate(store, 1).problems
    assert (problem.clause, problem.kind) == ("SPEC 8.1", ErrorKind.CHECKPOINT_NOT_FOUND)
    assert "record 1 is a stray" in problem.message
    report = validate(store, level="full")
    assert report.ok
    assert [(w.severity, w.path) for w in report.warnings] == [("warning", f"checkpoints/{1:020d}.json")]


def test_another_attempt_in_the_place_of_a_record_that_was_lost_is_a_stray(url: str) -> None:
    store = counts_store(url, 3)
    Forger(store.storage, 2).seal(attempt_id="ab" * 16)
    for checkpoint_id, kinds in (
        (1, {ErrorKind.RECORD_LOST}),
        (2, {ErrorKind.RECORD_LOST, ErrorKind.CHECKPOINT_NOT_FOUND}),
        (3, {ErrorKind.RECORD_LOST}),
    ):
        assert {problem.kind for problem in validate(store, checkpoint_id, level="full").problems} == kinds


def test_damage_of_another_record_is_a_warning(url: str) -> None:
    store = counts_store(url, 3)
    put(store.storage, "checkpoints/00000000000000000002.json", b"{}")
    report = validate(store, level="full")
    assert report.ok
    assert [w.path for w in report.warnings] == ["checkpoints/00000000000000000002.json"]
    assert not validate(store, 2).ok


# ---- records and manifests -----------------------------------------------------------------------


def flipped(data: bytes, position: int, bits: int = 1) -> bytes:
    return data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]


def only(report: Report) -> Finding:
    assert len(report.problems) == 1, messages(report)
    return report.problems[0]


def test_a_newer_version_asks_for_an_upgrade(url: str) -> None:
    store = counts_store(url)
    Forger(store.storage, 1).seal(lambda members: members.update(version=2))
    problem = only(validate(store))
    assert (problem.kind, problem.advice) == (ErrorKind.UNSUPPORTED_VERSION, "upgrade stateformat")


def test_a_contradictory_status_names_the_operator(url: str) -> None:
    store = counts_store(url)
    Forger(store.storage, 1).seal(lambda members: members["operators"][1].update(status="fully_finished"))
    problem = only(validate(store))
    assert (problem.kind, problem.clause, problem.operator) == (ErrorKind.STATUS_CONTRADICTION, "SPEC 3.4", "counter")


def test_totals_and_features_are_those_of_the_manifest(url: str) -> None:
    store = counts_store(url)
    forger = Forger(store.storage, 1)
    forger.seal(totals=replace(forger.record.totals, rows=99), required_features=("layers",))
    found = validate(store).problems
    assert [(p.clause, p.kind) for p in found] == [
        ("SPEC 3.2", ErrorKind.DAMAGED_RECORD),
        ("SPEC 3.3", ErrorKind.DAMAGED_RECORD),
    ]
    assert "rows=99" in found[0].message
    assert "requires ['layers'], but the checkpoint uses []" in found[1].message


def test_wrong_handles_are_all_told_and_sound_segments_are_still_looked_at(url: str) -> None:
    store = objects(url)
    forger = Forger(store.storage, 1)
    at = forger.find("work", "sums", 1)
    forger.change(forger.find("work", "sums", 0), footer_bytes=3)
    forger.change(forger.find("work", "list", 0), path="segments/../../etc/passwd")
    forger.change(forger.find("work", "mail", 0), schema_id=9)
    store.storage.delete([str(forger.handles[at].path)])
    forger.seal()
    found = validate(store).problems
    assert [(p.kind, p.state, p.subtask) for p in found] == [
        (ErrorKind.DAMAGED_MANIFEST, "sums", 0),
        (ErrorKind.INVALID_PATH, "list", 0),
        (ErrorKind.SCHEMA_MISMATCH, "mail", None),
        (ErrorKind.OBJECT_MISSING, "sums", 1),
    ]


# ---- segments ------------------------------------------------------------------------------------

MAX = 16


def job() -> Job:
    """One operator of two subtasks with a state of every kind whose rows have rules."""
    work = Operator(OperatorId("work"), 2, MAX)
    graph = JobGraph(
        (operator("in", 2), work),
        (
            edge("in", "work", Partitioner.HASH, "k"),
            Edge("loop", work.uid, work.uid, Partitioner.REBALANCE, 1, feedback=True),
        ),
    )
    keys = {"k": pa.float64()}
    wanted = pa.schema([pa.field("v", pa.int64(), nullable=False), pa.field("s", pa.string())])
    table = pa.table({"k": np.arange(40) / 2, "v": np.arange(40), "s": [f"s{i}" for i in range(40)]})
    listed = pa.table({"k": np.arange(40) // 2 * 1.0, "_index": np.arange(40) % 2, "v": np.arange(40)})
    mail = pa.table(
        {
            "_sender": pa.array([0, 0, 1], pa.int32()),
            "_receiver": pa.array([0] * 3, pa.int32()),
            "_seq": [0, 1, 0],
            "k": [1.0, 2.0, 3.0],
        }
    )
    return Job(
        "checked",
        graph,
        (
            declare.value_state("work", "sums", keys=keys, values=wanted),
            declare.list_state("work", "list", keys=keys, values={"v": pa.int64()}),
            declare.in_flight_state("work", "mail", edge="in-work", keys=keys, columns={}),
            declare.in_flight_state("work", "loop", edge="loop", columns={"k": pa.float64()}),
            declare.committables_state("work", "out", columns={"file": pa.string()}),
            declare.union_state("work", "names", columns={"name": pa.string()}),
            declare.progress_state("work", "seen"),
        ),
        {
            ("work", "sums"): lambda i: owned(table, ["k"], work, i),
            ("work", "list"): lambda i: owned(listed, ["k"], work, i),
            ("work", "mail"): lambda i: owned(mail, ["k"], work, i),
            ("work", "loop"): lambda i: mail,
            ("work", "out"): lambda i: pa.table({"file": [f"f{i}"]}),
            ("work", "names"): lambda i: pa.table({"name": ["x", "y"]}),
            ("work", "seen"): lambda i: pa.table({"_edge": ["in-work", "loop"], "_watermark": [1, 2], "_ended": [True, False]}),
        },
    )  # fmt: skip


def objects(url: str, inline_bytes_max: int = 0) -> CheckpointStore:
    """A checkpoint of :func:`job`, whose segments are objects, or lie in the manifest up to a
    size.
    """
    store = stateformat.open(url)
    job().publish(store, None, options=WriteOptions(inline_bytes_max=inline_bytes_max))
    return store


INLINE = WriteOptions().inline_bytes_max


def test_missing_and_torn_segments_are_named_and_only_they(url: str) -> None:
    store = objects(url)
    forger = Forger(store.storage, 1)
    places = (forger.find("work", *at) for at in (("sums", 1), ("list", 0), ("out", 1)))
    gone, torn, grown = (forger.handles[at] for at in places)
    data = get(store.storage, str(torn.path))
    store.storage.delete([str(gone.path)])
    put(store.storage, str(torn.path), data[:-1])
    put(store.storage, str(grown.path), get(store.storage, str(grown.path)) + b"\0")
    for level in ("quick", "full"):
        found = {(p.path, p.kind, p.operator, p.state, p.subtask) for p in validate(store, level=level).problems}  # type: ignore[arg-type]
        assert found == {
            (gone.path, ErrorKind.OBJECT_MISSING, "work", "sums", 1),
            (torn.path, ErrorKind.OBJECT_SIZE_DIFFERS, "work", "list", 0),
            (grown.path, ErrorKind.OBJECT_SIZE_DIFFERS, "work", "out", 1),
        }


def test_a_flipped_byte_anywhere_in_a_segment_is_found_in_full_and_in_its_footer_also_in_quick(url: str) -> None:
    store = objects(url)
    forger = Forger(store.storage, 1)
    handle = forger.handles[forger.find("work", "sums", 0)]
    path, good = str(handle.path), get(store.storage, str(handle.path))
    for position in random.Random(3).sample(range(len(good)), 60):
        put(store.storage, path, flipped(good, position, 4))
        in_footer = position >= len(good) - handle.footer_bytes
        assert [p.path for p in validate(store).problems] == ([path] if in_footer else [])
        problem = only(validate(store, level="full"))
        assert (problem.path, problem.kind) == (path, ErrorKind.OBJECT_DIGEST_DIFFERS)
        assert "state 'sums' of operator 'work', subtask 0" in problem.message


@pytest.mark.parametrize("level", ["quick", "full"])
def test_inline_bytes_are_verified_whole_even_in_quick(url: str, level: Any) -> None:
    store = objects(url, INLINE)
    forger = Forger(store.storage, 1)
    at = forger.find("work", "sums", 0)
    data = bytearray(forger.bytes_of(at))
    data[20] ^= 1
    forger.set_bytes(at, bytes(data), vouched=False)
    forger.set_bytes(forger.find("work", "out", 1), b"short", vouched=False)
    forger.seal()
    found = validate(store, level=level).problems
    assert [(p.kind, p.state, p.subtask) for p in found] == [
        (ErrorKind.OBJECT_SIZE_DIFFERS, "out", 1),
        (ErrorKind.OBJECT_DIGEST_DIFFERS, "sums", 0),
    ]


def test_inline_bytes_without_a_path_or_differing_for_one_or_too_many_are_told(url: str) -> None:
    store = objects(url, INLINE)
    forger = Forger(store.storage, 1)
    at = forger.find("work", "names", 1)
    big = forger.find("work", "names", 0)
    forger.handles.insert(at + 1, forger.handles[at]._replace(inline=None))
    nothing = Handle("work", "names", "union", 1, 0, None, 1, inline=b"x")
    forger.handles.insert(at + 2, nothing)
    forger.change(big, inline=bytes(4 << 20))
    forger.seal()
    found = [(p.clause, p.message) for p in validate(store).problems]
    size = (4 << 20) + sum(len(h.inline) for i, h in enumerate(forger.handles) if h.inline and i != big)
    assert ("SPEC 4.4", f"{size:,} bytes are inline in the manifest; at most 4,194,304 may be") in found
    assert any(clause == "SPEC 4.1" and "inline is null where path is" in text for clause, text in found)
    assert any(clause == "SPEC 4.4" and "handles of one segment agree in inline" in text for clause, text in found)


def retyped(rows: pa.Table, name: str, values: Any, **field: Any) -> pa.Table:
    at = rows.schema.get_field_index(name)
    array = pa.array(values, field.pop("type", rows.schema.field(at).type))
    return rows.set_column(at, rows.schema.field(at).with_type(array.type), array)


def reorder(rows: pa.Table, indices: list[int]) -> pa.Table:
    return rows.take(pa.array(indices))


Change = Callable[[Forger, int], None]


def rows(change: Callable[[pa.Table], pa.Table], *, regroup: str = "", **options: Any) -> Change:
    """Other rows in the segment, under a handle that vouches for them."""

    def apply(forger: Forger, at: int) -> None:
        forger.set_rows(at, change(forger.table_of(at)), **options)
        if regroup:
            forger.regroup(at, regroup)

    return apply


def handle(**columns: Any) -> Change:
    return lambda forger, at: forger.change(at, **columns)


def swapped(table: pa.Table) -> pa.Table:
    return reorder(table, [len(table) - 1, *range(len(table) - 1)])


def first_again(name: str) -> Callable[[pa.Table], pa.Table]:
    """The first row twice (and so a row key twice, in order)."""
    return lambda table: reorder(table, [0, *range(len(table))])


def other_value(name: str, at: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        values = table[name].to_pylist()
        values[at] = value
        return retyped(table, name, values)

    return change


def no_footer(data: bytes) -> bytes:
    length = int.from_bytes(data[-8:-4], "little")
    return data[: -length - 8] + b"\xff" * length + data[-8:]


ROWS: list[tuple[str, Change, str, str]] = [
    ("sums", rows(other_value("k", 0, 77.5)), "5.3", "whose key hashes to"),
    ("sums", rows(lambda t: retyped(t, "_key_group", [0] * len(t)), regroup="_key_group"), "5.3", "whose key hashes to"),
    ("sums", rows(lambda t: retyped(t, "_key_group", [99] * len(t))), "5.3", "has _key_group 99 to 99; it is from 0 to 15"),
    ("sums", rows(swapped), "5.2", "is not sorted by _key_group"),
    ("sums", rows(first_again("k"), regroup="_key_group"), "5.3", "holds a row key twice"),
    ("list", rows(first_again("k"), regroup="_key_group"), "5.3", "holds a row key twice"),
    ("sums", rows(other_value("v", 1, None)), "5.1", "column 'v' is declared without nulls"),
    ("sums", rows(other_value("k", -1, -0.0)), "5.3", "holds -0.0"),
    ("sums", lambda f, at: f.change(at, rows_per_group=[f.handles[at].rows], last_group=f.handles[at].first_group), "4.3", "the handle of subtask 0 says"),
    ("sums", rows(lambda t: t, row_group_size=3), "5.5", "holds a part of a key group and more"),
    ("sums", rows(lambda t: t, compression="gzip"), "5.5", "by GZIP"),
    ("sums", rows(lambda t: t, use_dictionary=False, column_encoding={"s": "DELTA_BYTE_ARRAY"}), "5.5", "DELTA_BYTE_ARRAY"),
    ("sums", rows(lambda t: t, store_schema=True), "3.7", "carries an ARROW:schema"),
    ("sums", rows(lambda t: t.drop_columns(["s"])), "5.1", "has the columns ["),
    ("sums", rows(lambda t: retyped(t, "v", t["v"].cast(pa.int32()), type=pa.int32())), "5.1", "has the columns ["),
    ("sums", rows(lambda t: t.rename_columns(["_key_group", "k", "v", "other"])), "5.1", "has the columns ["),
    ("sums", rows(lambda t: retyped(t, "s", pa.array([b"\xff"] * len(t)).view(pa.string()))), "3.7", "not of their type"),
    ("sums", rows(lambda t: t.slice(1), recount=False), "4.1", "rows by its footer; the manifest says"),
    ("sums", handle(uncompressed_bytes=7), "4.1", "uncompressed bytes by its footer; the manifest says 7"),
    ("sums", lambda f, at: f.set_bytes(at, f.bytes_of(at)[:-4] + b"PAR2"), "4.1", "does not end in a Parquet footer"),
    ("sums", lambda f, at: f.set_bytes(at, no_footer(f.bytes_of(at))), "5.6", "has a footer that is not Parquet's"),
    ("sums", lambda f, at: f.set_bytes(at, b"PAR1" + b"\xee" * 60 + f.bytes_of(at)[64:]), "5.5", "cannot be decoded"),
    *[
        ("sums", rows(lambda t: t, said={name: value}), "5.6", message)
        for name, value, message in [
            ("version", "2", "version is '2'; here it is '1'"),
            ("job_id", "other", "job_id is 'other'; here it is 'checked'"),
            ("operator", None, "operator is absent; here it is 'work'"),
            ("state", "list", "state is 'list'"),
            ("schema_id", "4", "schema_id is '4'"),
            ("checkpoint_id", "2", "checkpoint_id is '2'; this is checkpoint 1"),
            ("checkpoint_id", "one", "checkpoint_id is 'one'"),
            ("checkpoint_id", "9" * 5000, "checkpoint_id is '999"),
            ("write_id", None, "has no write_id"),
        ]
    ],
    ("mail", rows(other_value("k", 0, 1e9)), "5.3", "whose key hashes to"),
    ("loop", rows(lambda t: reorder(t, [1, 0, 2])), "5.2", "is not sorted by (group, _sender, _seq)"),
    ("loop", rows(lambda t: reorder(t, [2, 0, 1])), "5.2", "is not sorted by (group, _sender, _seq)"),
    ("loop", handle(rows_per_group=[1, 2]), "4.3", "has 2 rows of group 0"),
    ("loop", rows(lambda t: reorder(t, [0, 1, 1, 2]), regroup="_sender"), "5.1", "holds record 1 of the channel from 0 to 0 twice"),
    ("loop", rows(other_value("_receiver", 2, 32768)), "5.1", "_receiver is 0 to 32768; it is a subtask, 0 to 32767"),
    ("mail", rows(other_value("_receiver", 0, -1)), "5.1", "it is a subtask, 0 to 32767"),
    ("mail", rows(other_value("_sender", 0, -1)), "5.1", "it is a subtask, 0 to 32767"),
    ("loop", rows(other_value("_receiver", 2, 55)), "5.1", "_receiver 55; the rows were caught by this checkpoint, where it is from 0 to 1"),
    ("loop", rows(other_value("_sender", 2, 2)), "5.1", "_sender 2; the rows were caught by this checkpoint, where it is from 0 to 1"),
    ("mail", rows(other_value("_receiver", 0, 2)), "5.1", "_receiver 2; the rows were caught"),
    ("seen", rows(first_again("_edge")), "6.2", "has the progress of edge 'in-work' twice"),
    ("out", rows(other_value("_checkpoint_id", 0, 2)), "5.1", "prepared under 2 to 2; this is checkpoint 1"),
    ("out", rows(other_value("_checkpoint_id", 0, 0)), "5.1", "_checkpoint_id is 0; ids of checkpoints begin with 1"),
    ("out", rows(other_value("_attempt_id", 0, "../../.ssh/" + "0" * 21)), "5.1", "_attempt_id is '../../.ssh/"),
    ("out", rows(other_value("_attempt_id", 0, "0123456789ABCDEF" * 2)), "5.1", "is 32 lower-case hexadecimal digits"),
    ("out", rows(other_value("_attempt_id", 0, "0" * 32 + "\n")), "5.1", "is 32 lower-case hexadecimal digits"),
]  # fmt: skip


@pytest.mark.parametrize("where", ["objects", "inline"])
@pytest.mark.parametrize(("name", "change", "clause", "message"), ROWS, ids=[f"{row[0]} {row[3]}" for row in ROWS])
def test_each_rule_of_segments_is_kept(
    url: str, where: str, name: str, change: Change, clause: str, message: str
) -> None:
    store = objects(url, 0 if where == "objects" else INLINE)
    forger = Forger(store.storage, 1)
    at = forger.find("work", name, 0)
    change(forger, at)
    forger.seal()
    found = validate(store, level="full").problems
    assert [p.clause for p in found if message in p.message] == [f"SPEC {clause}"], [p.message for p in found]
    assert {(p.operator, p.state, p.subtask) for p in found} == {("work", name, 0)}


def test_a_forged_rewrite_of_sound_rows_is_sound(url: str) -> None:
    # That the cases above fail for what they change, and not for how the test writes Parquet.
    store = objects(url)
    forger = Forger(store.storage, 1)
    for name in ("sums", "list", "mail", "loop", "out", "names"):
        at = forger.find("work", name, 0)
        forger.set_rows(at, forger.table_of(at), compression="snappy", data_page_version="2.0")
    forger.seal()
    report = validate(store, level="full")
    assert messages(report) == []
    assert report.counts.rows == forger.record.totals.rows


def test_forged_footers_are_problems_or_harmless_and_never_end_the_process(url: str) -> None:
    # Parquet's accessors of column chunks abort the interpreter on a footer that leaves a chunk
    # out.
    store = objects(url)
    forger = Forger(store.storage, 1)
    at = forger.find("work", "sums", 0)
    good, footer = forger.bytes_of(at), forger.handles[at].footer_bytes
    told = 0
    for position in range(len(good) - footer, len(good) - 8, 6):
        forger.set_bytes(at, flipped(good, position))
        forger.seal()
        report = validate(store, level="full")
        assert {problem.state for problem in report.problems} <= {"sums"}
        told += not report.ok
    assert told > footer // 16


def delta_store(url: str) -> tuple[CheckpointStore, Forger, int]:
    """Two checkpoints of :func:`job`, the second with a delta of ``sums`` for subtask 0: an upsert,
    a delete, a clear.
    """
    store = stateformat.open(url)
    options = WriteOptions(inline_bytes_max=0)
    first = job().publish(store, None, options=options)
    work = job().graph.operator("work")
    base = owned(pa.table({"k": np.arange(40) / 2}), ["k"], work, 0)["k"].to_pylist()

    def delta(subtask: int) -> pa.Table:
        mine = base[:3] if subtask == 0 else []
        return pa.table(
            {"k": pa.array(mine, pa.float64()), "_op": pa.array([0, 1, 2][: len(mine)], pa.int8()), "v": pa.array([5, None, None][: len(mine)], pa.int64()), "s": pa.nulls(len(mine), pa.string())}
        )  # fmt: skip

    job().publish(store, first, deltas={("work", "sums"): delta}, options=options)
    forger = Forger(store.storage, 2)
    return store, forger, forger.find("work", "sums", 0, 1)


@pytest.mark.parametrize(
    ("change", "clause", "message"),
    [
        (lambda t: retyped(t, "_op", [0, 1, 3]), "SPEC 5.4", "_op is 0 to 3"),
        (lambda t: retyped(t, "_op", [-1, 1, 2]), "SPEC 5.4", "_op is -1 to 2"),
        (lambda t: retyped(t, "v", [None, None, None]), "SPEC 5.1", "without nulls"),
        (lambda t: retyped(t, "s", ["x", "x", "x"]), "SPEC 5.4", "a clear (_op 2) holds a value in 's'"),
        (lambda t: t.drop_columns(["_op"]), "SPEC 5.1", "has the columns ["),
    ],
    ids=range(5),
)
def test_deltas_have_rules_of_their_own(url: str, change: Any, clause: str, message: str) -> None:
    store, forger, at = delta_store(url)
    assert validate(store, level="full").ok
    ordered = forger.table_of(at)
    by_op = sorted(range(3), key=lambda i: ordered["_op"][i].as_py())

    def in_order_of_ops(table: pa.Table) -> pa.Table:
        # The change speaks of upsert, delete, clear in this order; the segment is sorted by key
        # group.
        changed = change(reorder(table, by_op))
        return reorder(changed, [by_op.index(i) for i in range(3)])

    forger.set_rows(at, in_order_of_ops(ordered))
    forger.seal()
    problem = only(validate(store, level="full"))
    assert problem.clause == clause
    assert message in problem.message
    assert ", layer 1)" in problem.message


def test_an_unknown_key_hash_is_told_and_the_rest_is_still_checked(url: str) -> None:
    store = objects(url)
    forger = Forger(store.storage, 1)
    graph = forger.record.graph
    other = graph.with_operators({OperatorId("work"): replace(graph.operator("work"), key_hash="mine-v1")})
    forger.seal(graph=other)
    report = validate(store, level="full")
    assert report.problems == ()
    assert {p.kind for p in report.warnings} == {ErrorKind.UNKNOWN_KEY_HASH}
    assert all("'mine-v1'" in p.message for p in report.warnings)


# ---- storages that move or fail ------------------------------------------------------------------


class Tricky(MemoryStorage):
    """A memory storage in which something happens when segments are listed or a path is read."""

    def __init__(self, name: str, *, on_list: Callable[[], None] | None = None, broken: str = "") -> None:
        super().__init__(name)
        self._on_list = on_list
        self._broken = broken

    def list(self, prefix: str) -> list[Any]:
        if prefix == "segments/" and self._on_list:
            self._on_list()
        return super().list(prefix)

    def read(self, path: str) -> pa.Buffer:
        self._fail(path)
        return super().read(path)

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        self._fail(path)
        return super().read_range(path, offset, length)

    def _fail(self, path: str) -> None:
        if path == self._broken:
            raise StorageError(f"{path}: connection reset")


def test_a_checkpoint_that_expires_meanwhile_is_not_called_damaged(url: str) -> None:
    store = objects(url)

    def expire() -> None:
        everything = [item.path for prefix in ("checkpoints/", "segments/") for item in store.storage.list(prefix)]
        store.storage.delete(everything)

    problem = only(validate(Tricky(url.removeprefix("memory://"), on_list=expire)))
    assert (problem.kind, problem.clause) == (ErrorKind.CHECKPOINT_EXPIRED, "SPEC 7.3")


@pytest.mark.parametrize("level", ["quick", "full"])
def test_a_storage_that_fails_for_one_object_is_a_problem_of_that_object(url: str, level: Any) -> None:
    store = objects(url)
    forger = Forger(store.storage, 1)
    name = url.removeprefix("memory://")
    for path in (str(forger.handles[forger.find("work", "sums", 1)].path), forger.record.manifest.path, forger.path):
        problem = only(validate(Tricky(name, broken=path), level=level))
        assert problem.kind is ErrorKind.STORAGE_FAILED
        assert problem.path == path
        assert "connection reset" in problem.message


def test_a_large_segment_is_checked_in_bounded_pieces(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stateformat.validation import segments as validation_segments

    store = objects(url)
    for name, value in (("WHOLE_BYTES_MAX", 0), ("CHUNK_BYTES", 100), ("BATCH_ROWS", 3)):
        monkeypatch.setattr(validation_segments, name, value)
    sizes: list[int] = []
    real = MemoryStorage.read_range

    def spied(self: MemoryStorage, path: str, offset: int, length: int) -> pa.Buffer:
        sizes.append(length)
        return real(self, path, offset, length)

    monkeypatch.setattr(MemoryStorage, "read_range", spied)
    report = validate(store, level="full")
    assert report.findings == ()
    assert report.counts.rows == store.open().record.totals.rows
    assert sizes.count(100) > 50
    forger = Forger(store.storage, 1)
    at = forger.find("work", "loop", 0)
    forger.set_rows(at, reorder(forger.table_of(at), [2, 0, 1]))
    at = forger.find("work", "sums", 0)
    forger.set_rows(at, first_again("k")(forger.table_of(at)))
    forger.regroup(at)
    forger.seal()
    assert {p.clause for p in validate(store, level="full").problems} == {"SPEC 5.2", "SPEC 5.3"}


def test_a_store_whose_first_checkpoint_appears_meanwhile_is_validated(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(MemoryStorage("meanwhile"))
    listed = validator.record_ids

    def late(storage: Any) -> Any:
        ids = listed(storage)
        if not ids:
            counts_store(store.url)
        return ids

    monkeypatch.setattr(validator, "record_ids", late)
    assert validate(store).checkpoint_id == 1
