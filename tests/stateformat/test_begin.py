"""What is refused when a checkpoint begins, and what workers write into it; how values show
themselves.

Who must answer before a checkpoint is published: a lost snapshot is noticed, whatever it held, on
both executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.connectors import SqlSink
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.rewrite import RewriteSpec, plan_rewrite, rewrite
from stateformat.backends.rewrite.rewrite import ThreadEngine, publish_rescaled
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import Edge, JobGraph, Operator, OperatorId, Partitioner, SubtaskSet
from stateformat.model import Handle, State, StopMode
from stateformat.publication import CommitPermit, PendingCheckpoint, pending
from stateformat.redistribution import rescale
from stateformat.snapshot import Snapshot
from stateformat.states import declare, in_flight_state, value_state
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import validate
from tests.worlds import local as local_jobs, stages as conformance
from tests.worlds.spark import Ranges, RangeSource, Stand
from tests.worlds.stores import counts_job, edge, flights_store, operator, refused

A, B = Operator("a", 1), Operator("b", 2)
HASH, FORWARD, REBALANCE = Partitioner.HASH, Partitioner.FORWARD, Partitioner.REBALANCE
ENDED = SubtaskSet.all(1)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"begin-{id(request)}"
    yield f"memory://{name}"
    MemoryStorage.reset(name)


@pytest.fixture
def store(url: str) -> CheckpointStore:
    return sf.open(url)


def graph(*edges: Edge, operators: tuple[Operator, ...] = (A, B)) -> JobGraph:
    return JobGraph(operators, edges)


def begin(store: CheckpointStore, job: Any = None, **more: Any) -> pending.PendingCheckpoint:
    return store.begin(
        **{"job_id": "job", "graph": graph() if job is None else job, "states": (), "parent": None, **more}
    )


UNION = declare.union_state("b", "all", columns={"x": "int64"})
KEYED = declare.value_state("b", "sums", keys={"k": "int64"}, values={"n": "int64"})
REFUSED: list[tuple[JobGraph, tuple[State, ...], str]] = [
    (graph(Edge("e", "a", "zz")), (), "edge 'e' ends at operator 'zz', which the graph does not have"),
    (graph(operators=(A, A)), (), "operator uid 'a' is 2 times in the graph"),
    (graph(Edge("e", "a", "b"), Edge("e", "a", "b", input=1)), (), "edge id 'e' is 2 times in the graph"),
    (graph(operators=(replace(A, parallelism=9, max_parallelism=8),)), (), "parallelism 9 of operator 'a' is above its max"),
    (graph(operators=(replace(A, max_parallelism=0),)), (), "max parallelism 0 of operator 'a' is not between 1 and 32768"),
    (graph(operators=(replace(A, parallelism=0),)), (), "parallelism 0 is below 1"),
    (graph(operators=(replace(A, key_hash=""),)), (), "operator 'a' names no key hash"),
    (graph(Edge("e", "a", "b", FORWARD)), (), "forward edge 'e' joins operators of different parallelism: 'a' has 1, 'b' has 2"),
    (graph(operators=(replace(A, chain="x"), replace(B, chain="x"))), (), "chain 'x' joins operators of different parallelism: 'a' has 1, 'b' has 2"),
    (graph(Edge("e", "a", "b", HASH)), (), "hash edge 'e' has no key columns; name those by which it sends"),
    (graph(Edge("e", "a", "b"), Edge("f", "b", "a")), (), "the graph has a cycle without a feedback edge"),
    (graph(Edge("e", "a", "a")), (), "the graph has a cycle without a feedback edge: a → a"),
    (graph(operators=()), (), "the graph has no operators"),
    (graph(), (replace(KEYED, operator="zz"),), "state 'sums' of operator 'zz' belongs to an operator that the graph lacks"),
    (graph(), (KEYED, KEYED), "state 'sums' of operator 'b' is declared 2 times"),
    (graph(operators=(replace(B, finished=ENDED),)), (UNION,), "is union state, but subtasks 0 of 2 have finished"),
]  # fmt: skip


@pytest.mark.parametrize(("job", "states", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_job_that_could_never_be_published_does_not_begin(
    store: CheckpointStore, job: JobGraph, states: tuple[State, ...], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        begin(store, job, states=states)
    assert message in str(caught.value)


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: Operator("a", "2"), "the parallelism of operator 'a' is '2'; give an integer"),
    (lambda: Operator("a", True), "the parallelism of operator 'a' is True"),
    (lambda: Operator("a", 2, 8.0), "the max parallelism of operator 'a' is 8.0"),
    (lambda: Operator(7, 2), "the uid of an operator is text, not 7"),
    (lambda: Edge("e", "a", "b", "hsah"), "has partitioner 'hsah'; give one of forward, rescale, rebalance, hash, broadcast"),
    (lambda: Edge("e", "a", "b", HASH, 0, "word"), "the key columns of edge 'e' from 'a' to 'b' are str values; 'word' is of"),
    (lambda: Edge("e", A, "b"), "its id and the uids that it joins are text"),
    (lambda: Edge("e", "a", "b", input="0"), "the input of edge 'e' from 'a' to 'b' is '0'"),
    (lambda: JobGraph(A), "the operators of a job graph are Operator values; Operator('a', 1, running) is of type Operator"),
    (lambda: JobGraph((A,), ("a-b",)), "the edges of a job graph are Edge values; 'a-b' is of type str"),
    (lambda: sf.open(7), "7 is of type int; give a URL, or a path as text or pathlib.Path"),
    (lambda: sf.open(b"store"), "b'store' is of type bytes"),
    (lambda: sf.open(Path("s3://bucket/store")), "was a URL before it became a path"),
    (lambda: SqlSink(Path("totals.db"), "t"), "the URL of a SQL sink begins with 'no scheme'"),
    (lambda: SqlSink(7, "t"), "7 is of type int; give a URL"),
    (lambda: ThreadEngine(0), "0 threads rewrite nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_value_of_the_wrong_type_is_told_in_a_sentence(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        make()
    assert message in str(caught.value)


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"n": 1}}, "property 'n' is 1; names and values are text, so give '1'"),
    ({"properties": "n"}, "properties are of type str"),
    ({"job_id": ""}, "the job id is empty"),
    ({"job_id": 7}, "the job id is 7; give text"),
    ({"graph": (A, B)}, "the graph is of type tuple; give a JobGraph"),
    ({"states": KEYED}, "the states of a checkpoint are State values; State('b', 'sums', keyed value, 2 columns) is of"),
    ({"states": ["sums"]}, "'sums' is of type str"),
    ({"parent": 3}, "the parent is 3; give the permit of start() or publish()"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=[message for _, message in ARGUMENTS])
def test_a_wrong_argument_of_begin_is_told_in_a_sentence(
    store: CheckpointStore, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        begin(store, **arguments)
    assert message in str(caught.value)


def test_what_is_no_snapshot_is_told_in_a_sentence(store: CheckpointStore) -> None:
    begun: Any = begin(store)
    refused(InvalidInput, lambda: begun.add({}), r"\{\} is of type dict and not a snapshot")
    with pytest.raises(InvalidInput, match="handles are an Arrow table in the manifest's columns, not list"):
        begun.add_handles([])
    refused(InvalidInput, lambda: begun.mark_finished("a", 0), "the subtasks of 'a' are 0; give their indexes")


def test_numbers_of_numpy_and_names_of_partitioners_are_taken(store: CheckpointStore) -> None:
    job = JobGraph([Operator("a", np.int64(2))], [Edge("e", "a", "a", "hash", key_columns=["k"], feedback=True)])  # type: ignore[arg-type]
    assert job.edges[0].partitioner is HASH
    assert hash(job) == hash(JobGraph((Operator("a", 2),), (Edge("e", "a", "a", HASH, 0, ("k",), True),)))
    assert begin(store, job).publish().record.graph.operator("a").parallelism == 2
    assert validate(store).ok


def test_a_path_is_as_good_as_a_url(tmp_path: Path) -> None:
    store = sf.open(tmp_path / "store")
    assert begin(store).publish().ref.checkpoint_id == 1
    request = store.request_stop(StopMode.NO_DRAIN, tmp_path / "savepoint")
    assert request.savepoint == str(tmp_path / "savepoint")


@pytest.mark.parametrize("ended", [[0], [0, 1]], ids=["partially", "fully"])
def test_what_has_finished_behind_a_running_operator_is_not_published(store: CheckpointStore, ended: list[int]) -> None:
    both = JobGraph((Operator("a", 2, 8), Operator("b", 2, 8)), (Edge("e", "a", "b", HASH, key_columns=("k",)),))
    begun = begin(store, both)
    begun.mark_finished("b", ended)
    with pytest.raises(
        InvalidState, match=r"its predecessor 'a'.* is running and would have to be fully finished"
    ) as caught:
        begun.publish()
    assert caught.value.kind is ErrorKind.STATUS_CONTRADICTION
    assert not store.storage.list("manifests/")
    begun.mark_finished("a", [0, 1])
    begun.publish()
    assert validate(store, level="full").ok


def test_a_copy_goes_to_an_open_store(store: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = begin(store).publish().checkpoint()
    target: Any = tmp_path / "copy"
    refused(InvalidInput, lambda: store.copy(checkpoint, target), r"open it first, with stateformat.open\(url\)")
    assert store.copy(checkpoint, sf.open(target)).checkpoint_id == 1


def test_an_operator_that_has_fully_finished_keeps_its_parallelism_behind_a_forward_edge(
    store: CheckpointStore,
) -> None:
    """Whoever restores at another parallelism gives the graph without statuses, and marks what has
    finished afterwards.
    """
    both = JobGraph((Operator("a", 2, 8), Operator("b", 2, 8)), (Edge("e", "a", "b", FORWARD),))
    first = begin(store, both)
    first.mark_finished("a", [0, 1])
    wider = JobGraph((Operator("a", 2, 8), Operator("b", 4, 8)), both.edges)
    second = begin(store, wider, parent=first.publish())
    second.mark_finished("a", [0, 1])
    assert second.publish().record.graph.operator("b").parallelism == 4


def test_a_store_that_was_begun_without_a_writers_duties_is_still_rescaled_and_rolled_back(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr("stateformat.publication.pending.check_duties", lambda graph: ())
        permit = begin(store, graph(Edge("e", "a", "b", HASH))).publish()
        begin(store, graph(Edge("e", "a", "b", HASH)), parent=permit).publish()
    publish_rescaled(store.open(), store.open().graph.at(per_operator={"b": 3}), store=store)
    store.rollback(1)
    assert [str(record.kind) for record in store.history()] == ["rollback", "rescale", "checkpoint", "checkpoint"]
    assert validate(store, level="full").ok


def test_every_value_shows_itself_in_one_short_line(url: str) -> None:
    store = flights_store(url)
    checkpoint, permit = store.open(), store.start("flights-job")
    plan = checkpoint.plan_restore(checkpoint.graph.at(3))
    begun = begin(store, checkpoint.graph, job_id="flights-job", states=checkpoint.record.states, parent=permit)
    handles = tuple(Handle(**row) for row in checkpoint.manifest.full().to_pylist())
    rewritten = plan_rewrite(checkpoint, RewriteSpec(max_parallelism=64))
    task = checkpoint.restore(plan, "delays", 0)["sums"]
    wide = declare.value_state("b" * 300, "s" * 300, keys={"k": "int64"}, values={f"c{i}": "int64" for i in range(500)})
    many = JobGraph([Operator(f"operator-{i}", 4) for i in range(500)])
    values: list[object] = [
        store, checkpoint, checkpoint.manifest, permit, begun, begun.context, begun._draft, begun.outstanding[0], plan, task,
        rescale(checkpoint, plan), rewritten, *rewritten.moves, *rewritten.sources, *plan.operators, validate(store),
        begun.context.subtask("delays", 0), Snapshot("delays", 0, handles), *handles, wide, wide.current, many,
        replace(checkpoint.record, graph=many, job_id="j" * 300, states=(wide,) * 100),
        *checkpoint.record.states, *checkpoint.graph.operators, *checkpoint.graph.edges, checkpoint.graph, checkpoint.record,
        Edge("e" * 300, "a", "b", HASH, 0, tuple(f"column{i}" for i in range(100))), Operator("u" * 300, 4),
    ]  # fmt: skip
    for value in values:
        assert "\n" not in repr(value)
        assert len(repr(value)) <= 110, repr(value)
        assert any(kind.__name__ in repr(value) for kind in type(value).__mro__[:2])


# ---- what a worker writes
# -------------------------------------------------------------------------


@pytest.mark.parametrize("words", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_owners_are_those_of_the_rows_as_they_will_be_written(words: pa.DataType) -> None:
    state = value_state("o", "s", keys={"k": pa.int32(), "w": pa.string()}, values={"v": pa.int64()})
    graph = sf.JobGraph((operator("o", 3),), ())
    pending = sf.open(f"memory://owners-{words}").begin(job_id="j", graph=graph, states=[state], parent=None)
    numbers = pa.array(range(50), pa.int64())
    rows = pa.table({"k": numbers, "w": pa.array([f"w{i}" for i in range(50)]).cast(words), "v": numbers})
    owners = pending.context.owners("o", "s", rows)
    for subtask in range(3):
        with pending.context.subtask("o", subtask) as writer:
            writer.write("s", rows.filter(pa.array(owners == subtask)))
        pending.add(writer)
    assert pending.publish().ref.checkpoint_id == 1


def test_bytes_that_are_no_snapshot_are_refused_in_a_sentence() -> None:
    job = counts_job()
    pending = sf.open("memory://bytes").begin(job_id="j", graph=job.graph, states=job.states, parent=None)
    refused(sf.InvalidInput, lambda: pending.add(b"garbage"), "7 bytes are not a snapshot")


@pytest.mark.parametrize("partitioner", [sf.Partitioner.FORWARD, sf.Partitioner.RESCALE, sf.Partitioner.BROADCAST])
def test_records_in_flight_that_no_restore_could_give_back_are_not_published(partitioner: sf.Partitioner) -> None:
    graph = sf.JobGraph((operator("a", 1), operator("b", 1)), (edge("a", "b", partitioner),))
    state = in_flight_state("b", "flying", edge="a-b", columns={"v": pa.int64()})
    pending = sf.open(f"memory://flying-{partitioner}").begin(job_id="j", graph=graph, states=[state], parent=None)
    pending.add(pending.context.subtask("a", 0))
    zero = pa.array([0], pa.int32())
    with pending.context.subtask("b", 0) as writer:
        writer.write("flying", pa.table({"_sender": zero, "_receiver": zero, "_seq": [0], "v": [1]}))
    pending.add(writer)
    refused(sf.InvalidState, pending.publish, f"1 records in flight on {partitioner} edge")


def test_a_column_called_like_the_arrow_schema_is_a_column() -> None:
    state = value_state("o", "s", keys={"k": "int64"}, values={"ARROW:schema": "int64"})
    store = sf.open("memory://called-so")
    pending = store.begin(job_id="j", graph=sf.JobGraph((operator("o", 1),)), states=[state], parent=None)
    with pending.context.subtask("o", 0) as writer:
        writer.write("s", pa.table({"k": [1], "ARROW:schema": [7]}))
    pending.add(writer)
    assert pending.publish().checkpoint().read("o", "s").table()["ARROW:schema"].to_pylist() == [7]
    assert sf.validate(store, level="full").problems == ()


GRAPH = JobGraph((Operator(OperatorId("read"), 1), Operator(OperatorId("map"), 3), Operator(OperatorId("write"), 2)))
OFFSETS = declare.even_split_state("read", "offsets", columns={"at": pa.int64()})
PREPARED = declare.committables_state("write", "prepared", columns={"file": pa.string()})
STATES = (OFFSETS, PREPARED)


@pytest.fixture
def answers_url(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"answers-{request.node.name}"
    yield f"memory://{name}"
    MemoryStorage.reset(name)


@pytest.fixture
def answering(answers_url: str) -> CheckpointStore:
    return open_store(answers_url)


def begin_answering(
    store: CheckpointStore,
    parent: CommitPermit | None = None,
    *,
    states: Iterable[State] = STATES,
    graph: JobGraph = GRAPH,
) -> PendingCheckpoint:
    return store.begin(job_id="job", graph=graph, states=states, parent=parent)


def prepared(pending: PendingCheckpoint, subtask: int, *, finishing: bool = False) -> Snapshot:
    """The snapshot of a subtask of the sink that has prepared one file."""
    with pending.context.subtask("write", subtask, finishing=finishing) as writer:
        ids = {"_checkpoint_id": [pending.checkpoint_id], "_attempt_id": [pending.attempt_id]}
        writer.write("prepared", pa.table({"file": [f"part-{subtask}"], **ids}))
    return writer.snapshot()


def read(pending: PendingCheckpoint) -> Snapshot:
    with pending.context.subtask("read", 0) as writer:
        writer.write("offsets", pa.table({"at": [7]}))
    return writer.snapshot()


def told(pending: PendingCheckpoint) -> list[tuple[str, str, bool]]:
    return [(item.operator, str(item.subtasks), item.coordinator) for item in pending.outstanding]


def test_a_lost_snapshot_of_a_sink_is_not_published(answering: CheckpointStore) -> None:
    pending = begin_answering(answering)
    assert told(pending) == [("read", "0", False), ("write", "0-1", False)]
    pending.add(read(pending))
    pending.add(prepared(pending, 0))
    lost = prepared(pending, 1)
    assert told(pending) == [("write", "1", False)]
    with pytest.raises(InvalidState, match="no snapshot of subtasks 1 of 'write' has come") as caught:
        pending.publish()
    assert caught.value.kind is ErrorKind.SNAPSHOT_MISSING
    (problem,) = caught.value.details["problems"]
    assert (problem.kind, problem.operator, problem.subtask) == (ErrorKind.SNAPSHOT_MISSING, "write", 1)
    pending.add(lost)
    assert pending.outstanding == ()
    checkpoint = pending.publish().checkpoint()
    assert checkpoint.read("write", "prepared").table()["file"].to_pylist() == ["part-0", "part-1"]


def test_an_answer_without_committables_leaves_nothing_in_the_manifest(answering: CheckpointStore) -> None:
    pending = begin_answering(answering)
    pending.add(read(pending))
    with pending.context.subtask("write", 0) as writer:
        writer.empty("prepared")
    pending.add(writer)
    # Another writer may say it with a handle of no rows.
    nothing = Handle("write", "prepared", "committables", 1, 0, None, PREPARED.current.id)
    pending.add(Snapshot("write", 1, (nothing,)))
    checkpoint = pending.publish().checkpoint()
    assert checkpoint.handles["operator"].to_pylist() == ["read"]
    assert checkpoint.record.required_features == ()
    assert validate(answering, level="full").ok


def test_finished_subtasks_owe_nothing_and_finishing_ones_have_answered(answering: CheckpointStore) -> None:
    pending = begin_answering(answering)
    pending.mark_finished("read", [0])
    pending.mark_finished("write", [0])
    assert told(pending) == [("write", "1", False)]
    pending.add(prepared(pending, 1, finishing=True))
    assert pending.outstanding == ()
    assert pending.publish().record.graph.operator("write").finishing == SubtaskSet.of([1])
    pending = begin_answering(answering, answering.start("job"))
    pending.add(prepared(pending, 1, finishing=True))
    assert told(pending) == [("read", "0", False), ("write", "0", False)]


def test_an_operator_without_state_need_not_answer(answering: CheckpointStore) -> None:
    pending = begin_answering(answering, states=())
    assert pending.outstanding == ()
    assert pending.publish().record.totals.handles == 0


def test_a_coordinator_answers_for_itself(answering: CheckpointStore) -> None:
    graph = JobGraph((Operator(OperatorId("op"), 2, coordinator=True),))
    kept = declare.coordinator_state("op", "splits", columns={"path": pa.string()})
    pending = begin_answering(answering, graph=graph, states=[kept])
    assert told(pending) == [("op", "", True)]
    with pytest.raises(InvalidState, match="has 0 handles, not one"):
        pending.publish()
    with pending.context.coordinator("op") as writer:
        writer.write("splits", pa.table({"path": ["a"]}))
    pending.add(writer)
    assert pending.outstanding == ()
    pending.publish()
    pending = begin_answering(answering, answering.start("job"), graph=graph, states=[kept])
    pending.mark_finished("op", [0, 1])
    assert pending.outstanding == ()


def test_what_is_dealt_anew_by_its_handles_owes_no_snapshot(answers_url: str) -> None:
    answering = flights_store(answers_url)
    publish_rescaled(answering.open(), answering.open().graph.at(3), store=answering)
    rewrite(answering, answering.open())
    answering.rollback(2)
    assert [record.kind for record in answering.history(4)] == ["rollback", "rewrite", "rescale", "checkpoint"]
    assert validate(answering, level="full").ok


# Runtimes -----------------------------------------------------------------------------------------


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """Loses the first snapshot of a sink's subtask 1 that holds something; what was lost."""
    add, found = PendingCheckpoint.add, []

    def losing(self: PendingCheckpoint, snapshot: Snapshot) -> bool:
        if not found and (snapshot.operator, snapshot.subtask) == ("out", 1) and snapshot.handles:
            found.append(snapshot)
            return True
        return add(self, snapshot)

    monkeypatch.setattr(PendingCheckpoint, "add", losing)
    return found


def test_a_snapshot_of_a_sink_lost_in_process_costs_a_restart_and_no_row(lost: list[Snapshot]) -> None:
    bench = local_jobs.Bench(checkpoint_interval_us=20_000)
    out = local_jobs.Out(bench.log)
    flow = Dataflow("job", parallelism=2)
    source = flow.source(local_jobs.Tap([local_jobs.rows(n) for n in range(30)]), uid="in")
    source.rebalance().apply(out, uid="out")
    outcome = bench.run(flow)
    assert len(lost) == 1
    assert outcome.restarts == 1
    assert out.seen == list(range(30))


def test_a_snapshot_of_a_sink_lost_on_spark_costs_a_restart_and_no_row(
    lost: list[Snapshot], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = conformance.Out()
    ranges = [[[local_jobs.rows(n, n + 1)], [local_jobs.rows(n + 2)]] for n in range(0, 30, 3)]
    flow = Dataflow("job", parallelism=2)
    source = flow.source(RangeSource(Ranges(ranges), schema=local_jobs.ROWS), uid="in")
    source.key_by("key").apply(out, uid="out")
    answering = open_store(f"file://{tmp_path / 'store'}", durable=False)
    outcome = Stand(monkeypatch).runtime(answering).run(flow)
    assert len(lost) == 1
    assert outcome.restarts == 1
    assert sorted(out.values) == list(range(30))
