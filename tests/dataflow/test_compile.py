"""From dataflows to jobs: chains, edges, states, who sends to whom, and what is refused with which
words.

A dataflow shows its graph: as values, as JSON, as text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_type_hints

import pyarrow as pa
import pytest

import stateformat
import stateformat as sf
from stateformat.backends import dataflow as df
from stateformat.backends.connectors import CollectSink, MemorySource, RateSource
from stateformat.backends.dataflow import (
    BroadcastJoin,
    BroadcastState,
    Dataflow,
    EventTime,
    Loop,
    MapState,
    Operator,
    SplitList,
    Stream,
    Timers,
    UnionList,
    ValueState,
)
from stateformat.backends.dataflow.compile import Job, compile_job
from stateformat.backends.dataflow.flow import Input, Step
from stateformat.backends.dataflow.graph import graph_of, in_flight_name, states_of
from stateformat.backends.dataflow.operators.aggregate import Aggregate
from stateformat.backends.local import LocalRun, LocalRuntime, VirtualClock
from stateformat.errors import ErrorKind, InvalidInput
from stateformat.graph import Partitioner
from stateformat.model import Mode, Record
from stateformat.record import members_of
from stateformat.rules import check_graph, check_states
from tests.worlds.dataflow import ROWS, Bucket, Chunks, Coordinated, Pass, Stateful, job_of

KEY = {"key": pa.int64()}
KEY_FIELD = pa.field("key", pa.int64())
COUNT = ValueState("count", KEY, {"n": pa.int64()})


def chains(job: Job) -> dict[str, tuple[str, ...]]:
    return {vertex.id: vertex.operators for vertex in job.vertices}


# Chains -------------------------------------------------------------------------------------------


def tree() -> Dataflow:
    """A source with two chained consumers, one of which has two again, and a keyed one."""
    flow = Dataflow("tree", parallelism=2)
    source = flow.source(Chunks(), uid="source")
    left = source.apply(Pass(), uid="left")
    source.apply(Pass(), uid="right")
    left.apply(Pass(), uid="one")
    two = left.apply(Pass(), uid="two")
    two.key_by("key").apply(Stateful(COUNT), uid="keyed").apply(Bucket(), uid="sink")
    return flow


def test_forward_steps_join_the_chain_of_their_only_input_and_make_a_tree() -> None:
    job = job_of(tree())
    found = chains(job)
    assert {head: sorted(uids) for head, uids in found.items()} == {
        "source": ["left", "one", "right", "source", "two"],
        "keyed": ["keyed", "sink"],
    }
    assert found["source"].index("left") < found["source"].index("two")
    assert [edge.id for edge in job.vertex("source").outputs] == ["two->keyed.0"]
    assert job.vertex("source").is_source
    assert not job.vertex("keyed").is_source
    assert job.vertex_of("sink") is job.vertex("keyed")
    assert [edge.id for edge in job.vertex("keyed").inputs] == ["two->keyed.0"]
    assert {uid: job.graph.operator(uid).chain for uid in ("source", "right", "keyed", "sink")} == {
        "source": "source",
        "right": "source",
        "keyed": "keyed",
        "sink": "keyed",
    }


CONNECTED: dict[str, tuple[Callable[[Stream], Stream], bool]] = {
    "default": (lambda s: s.apply(Pass(), uid="x"), False),
    "forward": (lambda s: s.forward().apply(Pass(), uid="x"), False),
    "alone": (lambda s: s.apply(Pass(), uid="x", chain=False), True),
    "same max": (lambda s: s.apply(Pass(), uid="x", max_parallelism=128), False),
    "other max": (lambda s: s.apply(Pass(), uid="x", max_parallelism=256), True),
    "rebalance": (lambda s: s.rebalance().apply(Pass(), uid="x"), True),
    "rescale": (lambda s: s.rescale().apply(Pass(), uid="x"), True),
    "broadcast": (lambda s: s.broadcast().apply(Pass(), uid="x"), True),
    "hash": (lambda s: s.key_by("key").apply(Pass(), uid="x"), True),
    "size": (lambda s: s.apply(Pass(), uid="x", parallelism=3), True),
    "two": (lambda s: s.apply(Pass(), s, uid="x"), True),
    "coordinator": (lambda s: s.apply(Coordinated([]), uid="x"), True),
}


@pytest.mark.parametrize("name", CONNECTED)
def test_a_step_is_chained_where_nothing_speaks_against_it(name: str) -> None:
    connect, alone = CONNECTED[name]
    flow = Dataflow("job", parallelism=2)
    connect(flow.source(Chunks(), uid="source"))
    assert chains(job_of(flow)) == ({"source": ("source",), "x": ("x",)} if alone else {"source": ("source", "x")})


def test_a_step_that_is_in_no_chain_names_none() -> None:
    flow = Dataflow("job")
    flow.source(Chunks(), uid="source").apply(Pass(), uid="x", chain=False)
    assert [operator.chain for operator in graph_of(flow).operators] == [None, None]


def test_a_chain_that_a_plan_has_broken_up_is_laid_out_broken_up() -> None:
    flow = tree()
    graph = graph_of(flow)
    # Both of a status bear one name, as a plan leaves them, though what joined them is not among
    # them.
    names = {"left": "source/fully_finished", "source": "source/fully_finished"}
    names |= dict.fromkeys(("right", "one", "two"), "source/running")
    graph = graph.with_operators({uid: replace(graph.operator(uid), chain=name) for uid, name in names.items()})
    assert chains(compile_job(flow, graph, unaligned=False)) == {
        "source": ("source", "left"),
        "right": ("right",),
        "one": ("one",),
        "two": ("two",),
        "keyed": ("keyed", "sink"),
    }


def test_every_vertex_comes_behind_those_that_it_hears() -> None:
    flow = Dataflow("job", parallelism=2)
    late = flow.source(Chunks(), uid="z").apply(Pass(), uid="y", chain=False)
    flow.source(Chunks(), uid="a").rebalance().apply(Pass(), late.rebalance(), uid="b")
    order = [vertex.id for vertex in job_of(flow).vertices]
    assert order.index("z") < order.index("y") < order.index("b") > order.index("a")


# Loops --------------------------------------------------------------------------------------------


def looping(*, partition: Callable[..., Stream] = lambda loop: loop.stream()) -> Dataflow:
    flow = Dataflow("loop", parallelism=2)
    loop = flow.loop(ROWS)
    head = flow.source(Chunks(), uid="source").apply(Pass(), partition(loop), uid="head")
    body = head.apply(Pass(), uid="body")
    loop.close(body)
    body.apply(Bucket(), uid="sink")
    return flow


def test_the_head_of_a_loop_begins_a_chain_to_which_the_feedback_edge_returns() -> None:
    job = job_of(looping())
    assert chains(job) == {"source": ("source",), "head": ("head", "body", "sink")}
    head = job.vertex("head")
    assert [edge.id for edge in head.inputs] == ["source->head.0"]
    assert [(edge.id, edge.partitioner, edge.input) for edge in head.feedback] == [
        ("body->head.1", Partitioner.FORWARD, 1)
    ]
    assert head.outputs == head.feedback
    assert [state.name for state in job.states_of("head")] == ["progress", "in-flight body->head.1"]


def test_feedback_goes_as_the_loop_says() -> None:
    found = [
        job_of(looping(partition=lambda loop: loop.rebalance())),
        job_of(looping(partition=lambda loop: loop.key_by("key"))),
    ]
    assert [job.vertex("head").feedback[0].partitioner for job in found] == [Partitioner.REBALANCE, Partitioner.HASH]
    assert [job.states_of("head")[-1].key_columns for job in found] == [(), ("key",)]
    edge = found[1].vertex("head").feedback[0]
    assert not replace(found[1], unaligned=True).overtakable(edge)
    assert found[1].logged(edge)


def test_a_loop_that_the_head_closes_itself() -> None:
    flow = Dataflow("job")
    loop = flow.loop(ROWS)
    loop.close(flow.source(Chunks(), uid="s").apply(Pass(), loop.stream(), uid="head"))
    assert [edge.id for edge in job_of(flow).vertex("head").outputs] == ["head->head.1"]


# Numbers ------------------------------------------------------------------------------------------


def test_parallelism_is_the_dataflows_unless_something_nearer_says_other() -> None:
    flow = Dataflow("job", parallelism=2)
    source = flow.source(Chunks(), uid="source")
    source.apply(Pass(), uid="own", parallelism=3, max_parallelism=5)
    source.apply(Pass(), uid="plain")

    def sizes(**choices: int | Mapping[str, int]) -> dict[str, int]:
        return {operator.uid: operator.parallelism for operator in graph_of(flow, **choices).operators}

    assert sizes() == {"source": 2, "own": 3, "plain": 2}
    assert sizes(parallelism=4) == {"source": 4, "own": 3, "plain": 4}
    assert sizes(parallelism=4, per_operator={"own": 1, "source": 2}) == {"source": 2, "own": 1, "plain": 4}
    graph = graph_of(flow)
    assert [operator.max_parallelism for operator in graph.operators] == [None, 5, None]
    assert [operator.max_parallelism for operator in compile_job(flow, graph, unaligned=False).graph.operators] == [
        128,
        5,
        128,
    ]
    assert {operator.key_hash for operator in compile_job(flow, graph, unaligned=False).graph.operators} == {
        "spark-murmur3-seed42"
    }


def test_a_stream_rebalances_where_parallelisms_differ_and_nothing_is_said() -> None:
    flow = Dataflow("job", parallelism=2)
    flow.source(Chunks(), uid="source").apply(Pass(), uid="x", parallelism=3)
    assert [edge.partitioner for edge in graph_of(flow).edges] == [Partitioner.REBALANCE]
    assert [edge.partitioner for edge in graph_of(flow, per_operator={"x": 2}).edges] == [Partitioner.FORWARD]


W = [
    (2, 4, [[0], [0], [1], [1]]),
    (4, 2, [[0, 1], [2, 3]]),
    (3, 5, [[0], [0], [1], [1], [2]]),
    (5, 3, [[0], [1, 2], [3, 4]]),
    (3, 4, [[0], [0], [1], [2]]),
    (5, 2, [[0, 1], [2, 3, 4]]),
    (3, 3, [[0], [1], [2]]),
]
"""flink-rules 2.1: senders, receivers, which senders each receiver hears."""


def between(senders: int, receivers: int, connect: Callable[[Stream], Stream]) -> Job:
    flow = Dataflow("job", parallelism=senders)
    connect(flow.source(Chunks(), uid="s")).apply(Pass(), uid="t", parallelism=receivers, chain=False)
    return job_of(flow)


@pytest.mark.parametrize(("senders", "receivers", "heard"), W, ids=[f"W{number}" for number in range(1, 8)])
def test_rescale_joins_near_subtasks(senders: int, receivers: int, heard: list[list[int]]) -> None:
    job = between(senders, receivers, Stream.rescale)
    assert [[*job.senders("s->t.0", receiver)] for receiver in range(receivers)] == heard


def test_senders_and_receivers_are_two_sides_of_the_same_channels() -> None:
    for senders in range(1, 9):
        for receivers in range(1, 9):
            for connect in (Stream.rescale, Stream.broadcast, Stream.rebalance):
                job = between(senders, receivers, connect)
                one = {(s, r) for r in range(receivers) for s in job.senders("s->t.0", r)}
                assert one == {(s, r) for s in range(senders) for r in job.receivers("s->t.0", s)}
                assert {s for s, _ in one} == {*range(senders)}
                assert {r for _, r in one} == {*range(receivers)}
                assert connect is Stream.rescale or len(one) == senders * receivers
    forward = between(4, 4, Stream.forward)
    assert [[*forward.receivers("s->t.0", sender)] for sender in range(4)] == [[0], [1], [2], [3]]


# States -------------------------------------------------------------------------------------------


def test_states_are_those_declared_and_the_runtimes_own() -> None:
    flow = Dataflow("job", parallelism=2)
    source = flow.source(Chunks(), uid="source")
    keyed = source.key_by("key").apply(
        Stateful(COUNT, MapState("seen", KEY, pa.string(), {"n": pa.int64()}), Timers("ends", KEY)), uid="keyed"
    )
    keyed.rebalance().apply(Coordinated(), source.broadcast(), uid="led").apply(Bucket(), uid="sink")

    def found(unaligned: bool) -> dict[str, dict[str, Mode]]:
        job = job_of(flow, unaligned=unaligned)
        assert not check_graph(job.graph)
        assert not check_states(job.graph, job.states)
        return {uid: {state.name: state.mode for state in job.states_of(uid)} for uid in flow.steps}

    plain = {
        "source": {"splits": Mode.EVEN_SPLIT, "enumerator": Mode.COORDINATOR},
        "keyed": {"count": Mode.KEYED, "seen": Mode.KEYED, "ends": Mode.KEYED, "progress": Mode.PROGRESS},
        "led": {"progress": Mode.PROGRESS, "coordinator": Mode.COORDINATOR},
        "sink": {"progress": Mode.PROGRESS, "committables": Mode.COMMITTABLES},
    }
    assert found(False) == plain
    plain["keyed"]["in-flight source->keyed.0"] = plain["led"]["in-flight keyed->led.0"] = Mode.IN_FLIGHT
    assert found(True) == plain


def test_the_columns_of_the_runtimes_own_states() -> None:
    flow = Dataflow("job", parallelism=2)
    wide = pa.schema([("value", pa.int64()), ("key", pa.large_string()), ("at", pa.timestamp("us"))])
    flow.source(Chunks(wide), uid="s").key_by("key").apply(Coordinated(), uid="led")
    by_name = {state.name: state for state in job_of(flow, unaligned=True).states}

    def columns(name: str) -> list[tuple[str, object, bool]]:
        return [(item.name, item.type, item.nullable) for item in by_name[name].current.fields]

    assert columns("coordinator") == [
        ("what", "utf8", True),
        ("message_from", "int32", True),
        ("message", "binary", True),
    ]
    assert columns("splits") == [
        ("split_id", "utf8", False),
        ("payload", "binary", False),
        ("position", "int64", False),
        ("watermark", "int64", True),
    ]
    logged = in_flight_name("s->led.0")
    assert by_name[logged].key_columns == ("key",)
    assert columns(logged) == [("key", "utf8", True), ("value", "int64", True), ("at", "timestamp_us", True)]


def test_the_coordinator_flag_stands_where_there_is_a_coordinator() -> None:
    flow = Dataflow("job")
    flow.source(Chunks(), uid="s").apply(Coordinated(), uid="led").apply(Pass(), uid="plain")
    assert [operator.coordinator for operator in graph_of(flow).operators] == [True, True, False]


def saved_with(values: pa.Schema) -> tuple[Dataflow, Record]:
    """A record of a job whose keyed state had these values; only its states and graph mean
    anything.
    """
    flow = Dataflow("job")
    flow.source(Chunks(), uid="s").key_by("key").apply(Stateful(ValueState("count", KEY, values)), uid="keyed")
    job = job_of(flow)
    record = Record.__new__(Record)
    object.__setattr__(record, "states", job.states)
    object.__setattr__(record, "graph", job.graph)
    return flow, record


def test_states_go_on_from_the_saved_ones_by_the_names_of_their_fields() -> None:
    nested = pa.struct([pa.field("x", pa.int64(), nullable=False)])
    before = pa.schema([("a", pa.int64()), ("b", pa.int64()), ("c", pa.list_(nested))])
    after = pa.schema([("b", pa.int64()), ("new", pa.int64()), ("a", pa.int64()), ("c", pa.list_(nested))])
    _, record = saved_with(before)
    flow, _ = saved_with(after)
    ids = {item.name: item.id for item in record.by_state["keyed", "count"].current.fields}
    state = next(
        s for s in compile_job(flow, graph_of(flow), unaligned=False, previous=record).states if s.name == "count"
    )
    now = {item.name: item.id for item in state.current.fields}
    assert [item.name for item in state.current.fields] == ["key", "b", "new", "a", "c"]
    assert {name: now[name] for name in ids} == ids
    assert now["new"] not in ids.values()
    assert state.current.fields[-1].type == record.by_state["keyed", "count"].current.fields[-1].type
    assert len(state.schemas) == 2
    same, _ = saved_with(before)
    assert states_of(same, graph_of(same), unaligned=False, previous=record) == record.states


def test_a_state_of_another_sort_is_left_for_planning_to_refuse() -> None:
    _, record = saved_with(pa.schema([("n", pa.int64())]))
    flow = Dataflow("job")
    flow.source(Chunks(), uid="s").key_by("key").apply(Stateful(SplitList("count", KEY)), uid="keyed")
    state = next(s for s in states_of(flow, graph_of(flow), unaligned=False, previous=record) if s.name == "count")
    assert (state.mode, len(state.schemas)) == (Mode.EVEN_SPLIT, 1)


# What is refused ----------------------------------------------------------------------------------


def flow_with(
    operator: Operator, connect: Callable[[Stream], Stream] = lambda s: s, schema: pa.Schema = ROWS, **step: Any
) -> Dataflow:
    flow = Dataflow("job", parallelism=2)
    connect(flow.source(Chunks(schema), uid="s")).apply(operator, **{"uid": "op", **step})
    return flow


def with_loop(build: Callable[[Stream, Loop], object], schema: pa.Schema = ROWS) -> Dataflow:
    flow = Dataflow("job")
    loop = flow.loop(schema)
    build(flow.source(Chunks(schema), uid="s"), loop)
    return flow


def with_steps(**steps: tuple[Input, ...]) -> Dataflow:
    flow = flow_with(Pass())
    flow.steps |= {uid: Step(uid, Pass(), inputs, ROWS) for uid, inputs in steps.items()}
    return flow


def timed(kind: pa.DataType) -> Dataflow:
    flow = Dataflow("job")
    flow.source(Chunks(pa.schema([("at", kind)])), uid="s", event_time="at")
    return flow


class Taken(Coordinated):
    """Its coordinator has a column in which messages are kept."""

    def coordinator(self) -> Any:
        found = super().coordinator()
        found.columns = {"message": pa.string()}
        return found


def keyed(stream: Stream) -> Stream:
    return stream.key_by("key")


def counting(**keys: pa.DataType) -> Stateful:
    return Stateful(ValueState("count", keys, {"n": pa.int64()}))


HIDDEN = pa.schema([("key", pa.int64()), ("_hidden", pa.int64())])
UNHELD = pa.schema([("key", pa.int64()), ("value", pa.uint64())])
LISTS = pa.schema([("key", pa.list_(pa.int64())), ("value", pa.int64())])
OWN_NAMES = ("progress", "coordinator", "committables", "splits", "enumerator", "in-flight s->op.0")


def joining(way: Callable[[Stream], Stream]) -> Dataflow:
    flow = Dataflow("job", parallelism=2)
    table = way(flow.source(Chunks(), uid="table"))
    flow.source(Chunks(pa.schema([KEY_FIELD])), uid="s").apply(BroadcastJoin("key"), table, uid="named")
    return flow


REFUSED: list[tuple[str, Dataflow, str, dict[str, Any]]] = [
    ("no steps", Dataflow("job"), "dataflow 'job' has no steps", {}),
    ("open loop", with_loop(lambda s, loop: s.apply(Pass(), loop.stream(), uid="head")),
     "the loop into 'head' is not closed", {}),
    ("loop from beside", with_loop(lambda s, loop: (
        s.apply(Pass(), loop.stream(), uid="head"), loop.close(s.apply(Pass(), uid="beside")))),
     "closed by 'beside', which 'head' does not lead to", {"kind": ErrorKind.INVALID_GRAPH}),
    ("loop that enters twice", with_loop(lambda s, loop: loop.close(
        s.apply(Pass(), loop.stream(), uid="head").apply(Pass(), loop.stream(), uid="again"))),
     "one loop is an input of 'head' and of 'again'", {}),
    ("loop that is not last", with_loop(lambda s, loop: loop.close(
        s.flow.apply(Pass(), loop.stream(), s, uid="head"))), "input 1 of 'head' comes behind a loop", {}),
    ("nothing but a loop", with_loop(lambda s, loop: loop.close(
        s.flow.apply(Pass(), loop.stream(), uid="head"))), "operator 'head' has no input but loops", {}),
    ("cycle", with_steps(op=(Input("s", ROWS), Input("b", ROWS)), b=(Input("op", ROWS),)),
     "the dataflow has a cycle: .*op.*b.*Dataflow.loop", {"kind": ErrorKind.INVALID_GRAPH}),
    ("input that is no step", with_steps(a=(Input("nowhere", ROWS),)), "comes from 'nowhere', which is no step", {}),
    *((f"parallelism {wanted}", flow_with(Pass()), "parallelism.*'op'|'op'.*parallelism",
       {"kind": ErrorKind.INVALID_PARALLELISM, "per_operator": {"op": wanted}})
      for wanted in (0, -1, 40_000, True, 2.0)),
    ("parallelism of nobody", flow_with(Pass()), r"\['x'\].*It has s, op",
     {"kind": ErrorKind.UNKNOWN_OPERATOR, "per_operator": {"x": 1}}),
    ("parallelism above max", flow_with(Pass(), max_parallelism=4, parallelism=5),
     "parallelism 5 of operator 'op' is above its max parallelism 4", {}),
    ("forward between sizes", flow_with(Pass(), Stream.forward, parallelism=3),
     "'s' of parallelism 2 sends forward to 'op' of 3", {}),
    ("keyed state unkeyed", flow_with(Stateful(COUNT)), "keyed state 'count', but none of its inputs is keyed", {}),
    ("keyed state rebalanced", flow_with(Stateful(COUNT), Stream.rebalance), "none of its inputs is keyed", {}),
    *((f"key types {words}", flow_with(counting(**keys), keyed),
       rf"{words}.*input 0 is keyed by \['key'\].*int64", {"kind": ErrorKind.SCHEMA_MISMATCH})
      for keys, words in [({"key": pa.int32()}, "int32"), ({"a": pa.int64(), "b": pa.int64()}, "int64', 'int64"),
                          ({"k": pa.string()}, "string")]),
    ("key that cannot be hashed", flow_with(Pass(), keyed, LISTS), "input 0 of 'op': key column 'key' of type list",
     {"kind": ErrorKind.UNSUPPORTED_KEY_TYPE}),
    ("two states of a name", flow_with(Stateful(SplitList("a", KEY), UnionList("a", KEY))),
     "declares two states named 'a'", {}),
    *((f"state named {name}", flow_with(Stateful(SplitList(name, KEY))),
       f"state '{name}' of operator 'op' has a name of the runtime's own", {}) for name in OWN_NAMES),
    ("hidden column in flight", flow_with(Pass(), keyed, HIDDEN),
     r"edge 's->op.0', which is a hash edge of an unaligned job.*\['_hidden'\] begin with '_'", {"unaligned": True}),
    ("type in flight", flow_with(Pass(), Stream.rebalance, UNHELD), "edge 's->op.0'.*uint64",
     {"unaligned": True, "kind": ErrorKind.UNSUPPORTED_TYPE}),
    ("hidden column fed back", with_loop(lambda s, loop: loop.close(
        s.apply(Pass(), loop.stream(), uid="head")), HIDDEN), "which is a feedback edge, may become part", {}),
    ("column of messages", flow_with(Taken()), r"coordinator of 'op' has columns \['message'\]", {}),
    ("no event time", timed(pa.timestamp("ms")), r"event time 'at' of source 's' is timestamp\[ms\]", {}),
    *((f"join {name}", joining(way), r"'named' needs all of its input 1 .* 'table' sends it by .* broadcast", {})
      for name, way in [("forward", lambda s: s), ("rebalance", Stream.rebalance), ("hash", keyed)]),
]  # fmt: skip


@pytest.mark.parametrize(("flow", "words", "more"), [pytest.param(*case[1:], id=case[0]) for case in REFUSED])
def test_what_a_dataflow_may_not_look_like(flow: Dataflow, words: str, more: dict[str, Any]) -> None:
    kind = more.get("kind")
    with pytest.raises(InvalidInput, match=words) as caught:
        graph_of(flow, **{name: value for name, value in more.items() if name != "kind"})
    assert kind is None or caught.value.kind is kind


@pytest.mark.parametrize(
    "flow",
    [
        flow_with(Stateful(BroadcastState("rules", KEY), UnionList("all", KEY), SplitList("some", KEY))),
        flow_with(counting(person=pa.string()), lambda s: s.key_by("key"), pa.schema([("key", pa.large_string())])),
        flow_with(Pass(), keyed, HIDDEN),
        flow_with(Pass(), Stream.rebalance, UNHELD),
        *(timed(kind) for kind in (pa.int64(), pa.timestamp("us"), pa.timestamp("us", "UTC"))),
        joining(Stream.broadcast),
    ],
)
def test_what_a_dataflow_may_look_like(flow: Dataflow) -> None:
    graph_of(flow)


def test_what_is_never_in_flight_may_have_any_columns() -> None:
    graph_of(flow_with(Pass(), Stream.broadcast, HIDDEN), unaligned=True)


@pytest.mark.parametrize("out_of_order_us", [1e6, -1, None])
def test_how_far_records_are_out_of_order_is_a_whole_number_of_microseconds(out_of_order_us: Any) -> None:
    with pytest.raises(InvalidInput, match="whole number of microseconds"):
        EventTime("at", out_of_order_us)


def test_what_a_type_checker_knows_of_a_graph_lets_users_write_uids_as_text() -> None:
    of_operator, of_edge = get_type_hints(stateformat.Operator), get_type_hints(stateformat.Edge)
    assert (of_operator["uid"], of_edge["source"], of_edge["target"]) == (str, str, str)


def test_a_graph_of_another_dataflow() -> None:
    with pytest.raises(InvalidInput, match="the graph has operators s, op and dataflow 'tree' has source, left"):
        compile_job(tree(), graph_of(flow_with(Pass())), unaligned=False)


def test_a_vertex_that_is_not_there() -> None:
    job = job_of(tree())
    for look in (job.vertex, job.vertex_of):
        with pytest.raises(InvalidInput, match="no vertex of 'nobody'"):
            look("nobody")


def test_one_operator_at_two_places_learns_of_each_input_for_itself() -> None:
    flow, add = Dataflow("sums"), Aggregate("key", {"sum": ("v", "sum")})
    for uid, v in (("whole", pa.array([1, 2])), ("real", pa.array([0.5, 0.25]))):
        rows = flow.source(MemorySource(pa.table({"key": ["a", "a"], "v": v})), uid=f"{uid} in")
        rows.key_by("key").apply(add, uid=uid).apply(CollectSink(), uid=f"{uid} out", name=uid)
    sinks = {step.name: step.logic for step in flow.steps.values() if step.name}
    LocalRuntime(stateformat.open("memory://two-places")).run(flow)
    found = {name: sink.table()["sum"].to_pylist()[-1] for name, sink in sinks.items()}  # type: ignore[union-attr]
    assert found == {"whole": 3, "real": 0.75}


class PassOn(df.Operator):
    """Passes on what comes."""

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return inputs[0]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return batch


def ticks() -> df.Dataflow:
    flow = df.Dataflow("ticks", name="Ticks a shard", parallelism=2)
    rows = flow.source(RateSource(total=100, shards=4), uid="rows", name="All rows")
    counted = rows.key_by("shard").aggregate({"rows": ("*", "count")}, uid="counted")
    counted.apply(CollectSink(), uid="out", max_parallelism=16)
    return flow


TEXT = """\
Dataflow ticks (Ticks a shard): 3 operators, 6 states

All rows (rows): 2 subtasks, max 128, coordinator
  splits (even split): split_id utf8 not null, payload binary not null, position int64 not null,
      watermark int64
  enumerator (coordinator): number int64 not null, id utf8 not null, payload binary not null

counted: 2 subtasks, max 128
  <- rows hash by shard
  totals (keyed value by shard): shard int32, rows int64
  progress

out: 2 subtasks, max 16
  <- counted forward
  progress
  committables: uid utf8 not null, subtask int32 not null, number int64 not null, payload binary not
      null"""


def test_the_graph_is_that_of_the_first_checkpoint_of_a_run() -> None:
    store = sf.open("memory://described")
    LocalRuntime(store, clock=VirtualClock()).run(ticks())
    record = store.history()[-1]
    graph = ticks().graph()
    assert [operator.uid for operator in graph.operators] == [operator.uid for operator in record.graph.operators]
    assert graph.edges == record.graph.edges
    document, members = ticks().document(), members_of(record)
    assert (document["job_id"], document["job_name"]) == ("ticks", "Ticks a shard")
    assert document["states"] == members["states"]
    assert document["edges"] == members["edges"]
    status = {"status", "finished", "finishing"}
    for own, there in zip(document["operators"], members["operators"], strict=True):
        assert {name: own[name] for name in {*own} - status} == {name: there[name] for name in {*there} - status}
        assert (own["status"], own["finished"], own["finishing"]) == ("running", (), ())


def test_options_are_those_of_a_start() -> None:
    graph = ticks().graph(parallelism=3, per_operator={"out": 4})
    assert {operator.uid: operator.parallelism for operator in graph.operators} == {
        "rows": 3,
        "counted": 3,
        "out": 4,
    }
    states = {state["name"] for state in ticks().document(unaligned=True)["states"]}
    assert "in-flight rows->counted.0" in states


def test_the_text_names_operators_edges_and_columns() -> None:
    assert ticks().describe() == TEXT


def test_a_feedback_edge_says_so_and_stands_with_its_state() -> None:
    flow = df.Dataflow("turns", parallelism=1)
    rows = flow.source(RateSource(total=4), uid="rows")
    loop = flow.loop(rows.schema)
    head = flow.apply(PassOn(), rows, loop.key_by("shard"), uid="head")
    loop.close(head.filter(lambda batch: pa.array([False] * len(batch), pa.bool_()), uid="again"))
    lines = flow.describe().splitlines()
    assert "  <- again hash by shard (feedback)" in lines
    assert any(line.startswith("  in-flight again->head.1 (in flight by shard): shard int32") for line in lines)


TIMELESS = (
    "operator 'w' waits for event time, but source 'a' never ends and has no event_time: its timers (ends) fire only "
    "when the job is drained, and its state grows until then. Give the source event_time, or use processing time"
)


def waits(total: int | None, event_time: str | None = None, **more: int | None) -> df.Dataflow:
    """A window behind a source ``a``, and behind others that ``more`` names, with their rows."""
    flow = df.Dataflow("waits", parallelism=1)
    stream = flow.source(RateSource(total=total), uid="a", event_time=event_time)
    others = [flow.source(RateSource(total=rows), uid=uid) for uid, rows in more.items()]
    joined = stream.apply(PassOn(), *others, uid="between")
    joined.key_by("shard").window(1_000_000, "at", {"n": ("*", "count")}, uid="w")
    return flow


def test_what_waits_for_event_time_that_never_comes_is_named_with_its_source() -> None:
    (said,) = waits(None).document()["warnings"]
    assert said == TIMELESS
    assert " ".join(waits(None).describe().split()).endswith(f"Warning: {TIMELESS}")
    two = waits(None, table=None).document()["warnings"]
    assert "sources 'a', 'table' never end and have no event_time" in two[0]


def test_rows_that_live_for_a_time_of_events_wait_too() -> None:
    flow = df.Dataflow("expiring", parallelism=1)
    stream = flow.source(RateSource(), uid="a").key_by("shard")
    stream.deduplicate(within=1_000_000, time="at", uid="by event time")
    stream.deduplicate(within=1_000_000, uid="by processing time")
    (said,) = flow.document()["warnings"]
    assert said.startswith("operator 'by event time' waits for event time")
    assert "its rows (seen) expire only when" in said


@pytest.mark.parametrize("flow", [waits(9), waits(None, "at"), waits(None, "at", table=9), ticks()])
def test_an_input_that_ends_or_has_event_time_is_no_reason_to_warn(flow: df.Dataflow) -> None:
    assert flow.document()["warnings"] == []
    assert "Warning" not in flow.describe()


def test_one_source_without_event_time_holds_up_the_others() -> None:
    (said,) = waits(None, "at", table=None).document()["warnings"]
    assert "source 'table' never ends and has no event_time" in said


def test_a_job_says_it_once_however_often_its_run_starts_again() -> None:
    runtime = LocalRuntime(sf.open("memory://timeless"), clock=VirtualClock())
    run = runtime.begin(waits(None))
    assert isinstance(run, LocalRun)
    assert run.progress().warnings == (TIMELESS,)
    again = runtime._begin_run(waits(None))
    assert isinstance(again, LocalRun)
    assert again.progress().warnings == ()


def test_what_is_wrong_with_a_dataflow_is_said_when_it_is_looked_at() -> None:
    flow = df.Dataflow("nothing")
    for look in (flow.graph, flow.document, flow.describe):
        with pytest.raises(InvalidInput, match="has no steps"):
            look()


def test_strangers_names_break_no_line() -> None:
    flow = df.Dataflow("odd\njob")
    flow.source(RateSource(total=1), uid="a\x1b[1mb").apply(CollectSink(), uid="out")
    assert "Dataflow odd\\njob: " in flow.describe()
    assert "\x1b" not in flow.describe()


def test_a_dataflow_is_short_where_python_shows_it() -> None:
    assert repr(ticks()) == "Dataflow('ticks', 3 steps, parallelism 2)"
    assert len(repr(df.Dataflow("x" * 1000))) < 120
