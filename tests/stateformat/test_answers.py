"""Who must answer before a checkpoint is published: a lost snapshot is noticed, whatever it held,
on both executors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow
from stateformat.backends.rewrite import rewrite
from stateformat.backends.rewrite.rescale import publish_rescaled
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import ErrorKind, InvalidState
from stateformat.graph import JobGraph, Operator, OperatorId, SubtaskSet
from stateformat.model import Handle, State
from stateformat.publication import CommitPermit, PendingCheckpoint
from stateformat.snapshot import Snapshot
from stateformat.states import declare
from stateformat.store import CheckpointStore, open as open_store
from stateformat.validation import validate
from tests import conformance, local_jobs
from tests.spark_in_process import Ranges, RangeSource, Stand
from tests.stores import flights_store

GRAPH = JobGraph((Operator(OperatorId("read"), 1), Operator(OperatorId("map"), 3), Operator(OperatorId("write"), 2)))
OFFSETS = declare.even_split_state("read", "offsets", columns={"at": pa.int64()})
PREPARED = declare.committables_state("write", "prepared", columns={"file": pa.string()})
STATES = (OFFSETS, PREPARED)


@pytest.fixture
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"answers-{request.node.name}"
    yield f"memory://{name}"
    MemoryStorage.reset(name)


@pytest.fixture
def store(url: str) -> CheckpointStore:
    return open_store(url)


def begin(
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


def test_a_lost_snapshot_of_a_sink_is_not_published(store: CheckpointStore) -> None:
    pending = begin(store)
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


def test_an_answer_without_committables_leaves_nothing_in_the_manifest(store: CheckpointStore) -> None:
    pending = begin(store)
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
    assert validate(store, level="full").ok


def test_finished_subtasks_owe_nothing_and_finishing_ones_have_answered(store: CheckpointStore) -> None:
    pending = begin(store)
    pending.mark_finished("read", [0])
    pending.mark_finished("write", [0])
    assert told(pending) == [("write", "1", False)]
    pending.add(prepared(pending, 1, finishing=True))
    assert pending.outstanding == ()
    assert pending.publish().record.graph.operator("write").finishing == SubtaskSet.of([1])
    pending = begin(store, store.start("job"))
    pending.add(prepared(pending, 1, finishing=True))
    assert told(pending) == [("read", "0", False), ("write", "0", False)]


def test_an_operator_without_state_need_not_answer(store: CheckpointStore) -> None:
    pending = begin(store, states=())
    assert pending.outstanding == ()
    assert pending.publish().record.totals.handles == 0


def test_a_coordinator_answers_for_itself(store: CheckpointStore) -> None:
    graph = JobGraph((Operator(OperatorId("op"), 2, coordinator=True),))
    kept = declare.coordinator_state("op", "splits", columns={"path": pa.string()})
    pending = begin(store, graph=graph, states=[kept])
    assert told(pending) == [("op", "", True)]
    with pytest.raises(InvalidState, match="has 0 handles, not one"):
        pending.publish()
    with pending.context.coordinator("op") as writer:
        writer.write("splits", pa.table({"path": ["a"]}))
    pending.add(writer)
    assert pending.outstanding == ()
    pending.publish()
    pending = begin(store, store.start("job"), graph=graph, states=[kept])
    pending.mark_finished("op", [0, 1])
    assert pending.outstanding == ()


def test_what_is_dealt_anew_by_its_handles_owes_no_snapshot(url: str) -> None:
    store = flights_store(url)
    publish_rescaled(store.open(), store.open().graph.at(3), store=store)
    rewrite(store, store.open())
    store.rollback(2)
    assert [record.kind for record in store.history(4)] == ["rollback", "rewrite", "rescale", "checkpoint"]
    assert validate(store, level="full").ok


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
    store = open_store(f"file://{tmp_path / 'store'}", durable=False)
    outcome = Stand(monkeypatch).runtime(store).run(flow)
    assert len(lost) == 1
    assert outcome.restarts == 1
    assert sorted(out.values) == list(range(30))
