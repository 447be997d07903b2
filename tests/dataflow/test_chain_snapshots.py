"""What chains put into checkpoints and take from them, at any parallelism: states, progress,
splits, committables, records in flight.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, Split, Stream, events as ev
from stateformat.backends.dataflow.chain import OperatorChain, in_flight_batches
from stateformat.backends.dataflow.compile import Job, Router, compile_job
from stateformat.backends.dataflow.graph import graph_of, in_flight_name, states_of
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import ErrorKind, InvalidState
from stateformat.model import Mode
from stateformat.publication import CommitPermit
from stateformat.store import CheckpointStore
from stateformat.validation import validate
from tests.worlds.dataflow import ROWS, Bucket, Chunks, Collected, Pass, job_of, opened, rows

KEY = {"key": pa.int64()}
Tasks = Mapping[tuple[str, int], tuple[OperatorChain, Collected]]


@pytest.fixture
def store() -> Iterator[CheckpointStore]:
    MemoryStorage.reset("chains")
    yield CheckpointStore(MemoryStorage("chains"))
    MemoryStorage.reset("chains")


def started(job: Job, restored: Callable[[str, int], Any] = lambda uid, subtask: {}) -> Tasks:
    """Every task of a job, open."""
    return {
        (vertex.id, subtask): opened(job, vertex.id, subtask, {uid: restored(uid, subtask) for uid in vertex.operators})
        for vertex in job.vertices
        for subtask in range(vertex.parallelism)
    }


def command(number: int, *, finishing: bool = False, watermarks: Any = None, ended: Any = None) -> ev.Snapshot:
    return ev.Snapshot(ev.Barrier(number), finishing=finishing, watermarks=watermarks or {}, ended=ended or {})


def publish(
    store: CheckpointStore,
    job: Job,
    tasks: Tasks,
    parent: CommitPermit | None = None,
    *,
    number: int = 1,
    logged: Iterable[tuple[ev.Channel, pa.RecordBatch]] = (),
    finishing: Sequence[str] = (),
    **facts: Any,
) -> CommitPermit:
    """Take a checkpoint of all tasks: ``logged`` is what lies in channels."""
    pending = store.begin(job_id=job.flow.job_id, graph=job.graph, states=job.states, parent=parent)
    for (vertex, subtask), (chain, _) in tasks.items():
        snapshot = chain.snapshot(command(number, finishing=vertex in finishing, **facts), pending.context)
        for channel, batch in logged:
            if (job.graph.by_edge[channel.edge].target, channel.receiver) == (vertex, subtask):
                snapshot.log(channel, batch)
        for each in snapshot.close():
            pending.add(each)
    for state in job.states:
        if state.mode is Mode.COORDINATOR and job.vertex_of(state.operator).id not in finishing:
            writer = pending.context.coordinator(state.operator)
            writer.empty(state.name)
            pending.add(writer.snapshot())
    return pending.publish()


def restarted(
    flow: Dataflow, permit: CommitPermit, parallelism: int, *, unaligned: bool = False
) -> tuple[Job, Tasks, Any]:
    """The job at another parallelism, gone on from a checkpoint; and who reads what."""
    checkpoint = permit.checkpoint()
    assert not validate(checkpoint.storage, level="full").findings
    graph = graph_of(flow, parallelism=parallelism, unaligned=unaligned)
    plan = checkpoint.plan_restore(graph, states=states_of(flow, graph, unaligned=unaligned, previous=permit.record))
    plan.check()
    job = compile_job(flow, plan.topology, unaligned=unaligned, previous=permit.record)

    def restored(uid: str, subtask: int) -> Any:
        return checkpoint.restore(plan, uid, subtask)

    return job, started(job, restored), restored


def push(job: Job, tasks: Tasks, edge_id: str, batch: pa.RecordBatch, sender: int = 0) -> None:
    """Send a batch along an edge, to the tasks that it is for."""
    edge = job.graph.by_edge[edge_id]
    for receiver, part in Router(job, edge, sender).route(batch):
        tasks[edge.target, receiver][0].process(edge_id, part)


def emitted(tasks: Tasks, edge: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for _, outside in tasks.values():
        found += zip(outside.values(edge, "key"), outside.values(edge), strict=True)
    return sorted(found)


def test_progress_tells_of_each_input_and_for_inner_operators_of_the_chain(store: CheckpointStore) -> None:
    flow = Dataflow("job", parallelism=2)
    source = flow.source(Chunks(), uid="source")
    source.rebalance().apply(Pass(), source.broadcast(), uid="head").apply(Pass(), uid="inner")
    job = job_of(flow)
    tasks = started(job)
    for subtask in range(2):
        tasks["head", subtask][0].advance_watermark(7)
    permit = None
    for number, (ended, inner) in enumerate([((False, True), False), ((True, True), True)], 1):
        permit = publish(
            store,
            job,
            tasks,
            permit,
            number=number,
            watermarks={"source->head.0": 7, "source->head.1": ev.MAX_WATERMARK},
            ended={"source->head.0": ended[0], "source->head.1": ended[1]},
        )
        read = permit.checkpoint().read
        assert read("head", "progress", 1).table().to_pylist() == [
            {"_edge": "source->head.0", "_watermark": 7, "_ended": ended[0]},
            {"_edge": "source->head.1", "_watermark": ev.MAX_WATERMARK, "_ended": ended[1]},
        ]
        assert read("inner", "progress", 0).table().to_pylist() == [
            {"_edge": "head->inner.0", "_watermark": 7, "_ended": inner}
        ]
    assert permit is not None
    _, tasks, _ = restarted(flow, permit, 3)
    members = [tasks["head", subtask][0].operators for subtask in range(3)]
    assert [{uid: member.context.watermark for uid, member in found.items()} for found in members] == [
        {"head": 7, "inner": 7}
    ] * 3


def test_progress_that_is_as_it_was_is_written_once(store: CheckpointStore) -> None:
    flow = Dataflow("job", parallelism=2)
    flow.source(Chunks(), uid="source").rebalance().apply(Pass(), uid="head").apply(Pass(), uid="inner")
    job = job_of(flow)
    tasks, permit, lay = started(job), None, []
    edge = job.vertex("head").inputs[0].id
    for number, watermark in enumerate([1, 1, 1, 2, 2], 1):
        permit = publish(store, job, tasks, permit, number=number, watermarks={edge: watermark})
        handles = permit.checkpoint().handles.to_pylist()
        lay.append({(row["operator"], row["subtask"]): row["path"] for row in handles if row["state"] == "progress"})
        found = permit.checkpoint().read("head", "progress").table()["_watermark"].to_pylist()
        assert found == [watermark], "one row for both subtasks: the least"
    assert lay[0] == lay[1] == lay[2]
    assert lay[3] == lay[4]
    assert {key for key in lay[0] if lay[0][key] != lay[3][key]} == {("head", 0), ("head", 1)}
    assert not validate(store, level="full").findings


def test_behind_a_source_that_reads_on_no_input_has_ended(store: CheckpointStore) -> None:
    flow = Dataflow("job")
    flow.source(Chunks(), uid="source").apply(Pass(), uid="inner")
    job = job_of(flow)
    tasks = started(job)
    tasks["source", 0][0].advance_watermark(9)
    permit = publish(store, job, tasks)
    assert permit.checkpoint().read("inner", "progress", 0).table().to_pylist() == [
        {"_edge": "source->inner.0", "_watermark": 9, "_ended": False}
    ]


def test_a_head_to_which_the_end_of_time_had_come_knows_it_when_it_comes_back(store: CheckpointStore) -> None:
    flow = Dataflow("job")
    loop = flow.loop(ROWS)
    loop.close(
        flow.source(Chunks(), uid="s")
        .apply(Pass(), loop.rebalance(), uid="head")
        .apply(Pass(), uid="tail", chain=False)
    )
    job = job_of(flow)
    permit = publish(
        store,
        job,
        started(job),
        watermarks={"s->head.0": ev.MAX_WATERMARK, "head->tail.0": 3},
        ended={"s->head.0": True},
    )
    _, tasks, _ = restarted(flow, permit, 1)
    found = {uid: tasks[uid, 0][0].operators[uid].logic.context.watermark for uid in ("head", "tail")}
    assert found == {"head": ev.MAX_WATERMARK, "tail": 3}


def test_an_operator_that_the_checkpoint_does_not_know_begins_anew(store: CheckpointStore) -> None:
    def flow_of(*uids: str) -> Dataflow:
        flow = Dataflow("job")
        stream = flow.source(Chunks(), uid="source")
        for uid in uids:
            stream = stream.apply(Pass(), uid=uid)
        return flow

    flow = flow_of("a")
    job = job_of(flow)
    permit = publish(store, job, started(job))
    _, tasks, _ = restarted(flow_of("a", "b"), permit, 1)
    members = tasks["source", 0][0].operators
    assert {uid: member.logic.context.restored for uid, member in members.items()} == {"a": True, "b": False}


# Hooks --------------------------------------------------------------------------------------------


def test_hooks_of_snapshots_come_once_and_only_for_snapshots(store: CheckpointStore) -> None:
    log: list[Any] = []
    flow = Dataflow("job")
    flow.source(Chunks(), uid="source").apply(Pass(log, "a"), uid="a").apply(Pass(log, "b"), uid="b")
    job = job_of(flow)
    tasks = started(job)
    chain = tasks["source", 0][0]
    log.clear()
    permit = publish(store, job, tasks, number=3)
    assert log == [("a", "snapshot"), ("b", "snapshot")]
    for number in (2, 4, 3, 3):
        chain.notify_complete(number)
    assert log[2:] == [("a", "checkpoint_complete"), ("b", "checkpoint_complete")]
    log.clear()
    context = store.begin(job_id="job", graph=job.graph, states=job.states, parent=permit).context
    for number in (5, 6):
        chain.snapshot(command(number), context)
    chain.notify_complete(5)
    assert log == [("a", "snapshot"), ("b", "snapshot")] * 2
    log.clear()
    permit = publish(store, job, tasks, permit, number=7)
    chain.notify_aborted(7)
    chain.notify_complete(7)
    chain.finish()
    log.clear()
    publish(store, job, tasks, permit, number=8, finishing=["source"])
    assert log == []
    chain.notify_complete(8)
    assert log == [("a", "checkpoint_complete"), ("b", "checkpoint_complete")]


# Committables -------------------------------------------------------------------------------------


def test_committables_stay_under_their_own_ids_until_a_snapshot_that_held_them_is_complete(
    store: CheckpointStore,
) -> None:
    flow = Dataflow("job")
    flow.source(Chunks(), uid="source").rebalance().apply(Pass(), uid="before").apply(Bucket(), uid="sink")
    job = job_of(flow)
    chain, _ = opened(job, "before")
    parent: CommitPermit | None = None
    attempts: list[str] = []

    def taken(number: int, *, finishing: bool = False, empty: bool = False) -> list[tuple[int, int, str]]:
        pending = store.begin(job_id="job", graph=job.graph, states=job.states, parent=parent)
        attempts.append(pending.attempt_id)
        by_uid = {
            each.operator: each
            for each in chain.snapshot(command(number, finishing=finishing), pending.context).close()
        }
        found = [handle for handle in by_uid["sink"].handles if handle.state == "committables"]
        assert len(found) == (0 if empty else 1)
        if empty:
            return []
        pending.add(by_uid["sink"])
        table = _rows_of(found[0])
        return list(
            zip(
                table["total"].to_pylist(),
                table["_checkpoint_id"].to_pylist(),
                table["_attempt_id"].to_pylist(),
                strict=True,
            )
        )

    process = lambda value: chain.process("source->before.0", rows([0], [value]))  # noqa: E731
    process(5)
    first = taken(1)
    assert first == [(5, 1, attempts[0])]
    chain.notify_aborted(1)
    assert taken(2) == first
    # A round of loops was complete, and a checkpoint in which this task had no part.
    for number in (1, 3):
        chain.notify_complete(number)
    process(6)
    assert taken(4) == [*first, (6, 1, attempts[2])]
    process(7)
    chain.notify_complete(4)
    chain.finish()
    assert taken(5, finishing=True) == [(7, 1, attempts[3])]
    assert taken(6, finishing=True) == [(7, 1, attempts[3])]
    chain.notify_complete(6)
    assert taken(7, finishing=True, empty=True) == []


def test_completion_lets_go_of_what_its_snapshot_held_and_nothing_younger(store: CheckpointStore) -> None:
    flow = Dataflow("job")
    flow.source(Chunks(), uid="source").rebalance().apply(Bucket(), uid="sink", chain=False)
    job = job_of(flow)
    chain, _ = opened(job, "sink")
    context = store.begin(job_id="job", graph=job.graph, states=job.states, parent=None).context
    for number in (1, 2):
        chain.process("source->sink.0", rows([0], [number]))
        chain.snapshot(command(number), context)
    chain.notify_complete(1)
    [snapshot] = chain.snapshot(command(3), context).close()
    [handle] = [handle for handle in snapshot.handles if handle.state == "committables"]
    assert _rows_of(handle)["total"].to_pylist() == [2]


def _rows_of(handle: Any) -> pa.Table:
    """The rows of a small segment, which its handle holds itself."""
    import pyarrow.parquet as pq

    return pq.read_table(pa.BufferReader(handle.inline))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (7, "prepare_commit of 'sink' returned int"),
        (pa.table({"sum": [1]}), r"returned columns \['sum'\]; its committable_columns are \['total'\]"),
        (pa.table({"total": ["x"]}), "returned other types than declared"),
    ],
)
def test_committables_that_were_not_declared_are_refused(store: CheckpointStore, returned: Any, message: str) -> None:
    class Odd(Bucket):
        def prepare_commit(self, prepared: Any) -> Any:
            return returned

    flow = Dataflow("job")
    flow.source(Chunks(), uid="source").apply(Odd(), uid="sink")
    job = job_of(flow)
    chain, _ = opened(job, "source")
    pending = store.begin(job_id="job", graph=job.graph, states=job.states, parent=None)
    with pytest.raises(InvalidState, match=message):
        chain.snapshot(command(1), pending.context)


# Splits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_splits_go_on_where_they_were_read_to(store: CheckpointStore, parallelism: int) -> None:
    of = {f"split{number}": [rows([10 * number + index]) for index in range(5)] for number in range(4)}
    flow = Dataflow("job", parallelism=2)
    flow.source(Chunks(splits_per_reader=2, **of), uid="source", event_time="value").rebalance().apply(
        Pass(), uid="far"
    )
    job = job_of(flow)
    tasks = started(job)
    for number in range(4):
        tasks["source", number % 2][0].assign(Split(f"split{number}", b"p%d" % number))
    for subtask, reads in ((0, 4), (1, 5)):
        for _ in range(reads):
            tasks["source", subtask][0].read()
    before = [value for key, value in emitted(tasks, "source->far.0")]
    assert sorted(before) == [0, 1, 10, 11, 12, 20, 21, 30, 31]
    permit = publish(store, job, tasks)
    splits = pa.concat_tables([permit.checkpoint().read("source", "splits", subtask).table() for subtask in range(2)])
    assert sorted(splits.to_pylist(), key=lambda row: row["split_id"]) == [
        {"split_id": f"split{number}", "payload": b"p%d" % number, "position": position, "watermark": watermark}
        for number, position, watermark in ((0, 2, 1), (1, 3, 12), (2, 2, 21), (3, 2, 31))
    ]
    _, tasks, _ = restarted(flow, permit, parallelism)
    reading = None
    for subtask in range(parallelism):
        assert tasks["source", subtask][0].read().watermark is not None
        for _ in range(20):
            reading = tasks["source", subtask][0].read()
        assert reading is not None
        assert (reading.ended, reading.wants_split) == (False, True)
    after = [value for _, value in emitted(tasks, "source->far.0")]
    assert sorted(before + after) == sorted(
        value for number in range(4) for value in range(10 * number, 10 * number + 5)
    )


# In flight ----------------------------------------------------------------------------------------


def unaligned(connect: Callable[[Stream], Stream]) -> Dataflow:
    flow = Dataflow("job", parallelism=2)
    wide = pa.schema([("value", pa.int64()), ("key", pa.large_string()), ("tags", pa.list_(pa.string()))])
    connect(flow.source(Chunks(wide), uid="s")).apply(Pass(), uid="t")
    return flow


def records(schema: pa.Schema, values: Sequence[int]) -> pa.RecordBatch:
    columns = [
        pa.array(values),
        pa.array([f"k{value % 5}" for value in values]),
        pa.array([["a"] * (value % 3) for value in values]),
    ]
    return pa.record_batch(
        [column.cast(item.type) for column, item in zip(columns, schema, strict=True)], schema=schema
    )


@pytest.mark.parametrize("parallelism", [1, 2, 3])
@pytest.mark.parametrize("connect", [lambda s: s.key_by("key"), Stream.rebalance], ids=["hash", "rebalance"])
def test_records_in_flight_come_back_in_the_order_of_their_channels(
    store: CheckpointStore, connect: Callable[[Stream], Stream], parallelism: int
) -> None:
    flow = unaligned(connect)
    job = job_of(flow, unaligned=True)
    edge = job.graph.edges[0]
    schema = job.schemas[edge.id]
    logged: list[tuple[ev.Channel, pa.RecordBatch]] = []
    sent: dict[int, list[int]] = defaultdict(list)
    for turn in range(6):
        for sender in range(2):
            values = [1000 * sender + 10 * turn + index for index in range(7)][::-1]
            for receiver, part in (
                Router(job, edge, sender + turn).route(records(schema, values))
                if edge.key_columns
                else [(turn % 2, records(schema, values))]
            ):
                logged.append((ev.Channel(edge.id, sender, receiver), part))
            sent[sender] += values
    permit = publish(store, job, started(job), logged=logged)
    job, _, restored = restarted(flow, permit, parallelism, unaligned=True)
    arrived: Counter[int] = Counter()
    for subtask in range(parallelism):
        task = restored("t", subtask)[in_flight_name(edge.id)]
        assert task.state.edge == edge.id
        by_channel: dict[tuple[int, str], list[int]] = defaultdict(list)
        for batch in in_flight_batches(task, schema):
            assert batch.schema == schema
            for row in batch.to_pylist():
                arrived[row["value"]] += 1
                assert (row["key"], row["tags"]) == (f"k{row['value'] % 5}", ["a"] * (row["value"] % 3))
                by_channel[row["value"] // 1000, row["key"]].append(row["value"])
            if edge.key_columns:
                assert {receiver for receiver, _ in Router(job, job.graph.edges[0], 0).route(batch)} == {subtask}
        for (sender, key), values in by_channel.items():
            if edge.key_columns:
                assert values == [value for value in sent[sender] if f"k{value % 5}" == key]
    assert arrived == Counter(value for values in sent.values() for value in values)


def test_records_of_a_sender_are_taken_by_their_channel_and_number(store: CheckpointStore) -> None:
    flow = unaligned(Stream.rebalance)
    job = job_of(flow, unaligned=True)
    edge, schema = job.graph.edges[0], job.schemas["s->t.0"]
    logged = [
        (ev.Channel(edge.id, sender, receiver), records(schema, [100 * sender + 10 * receiver + n]))
        for n in range(3)
        for sender in (1, 0)
        for receiver in (1, 0)
    ]
    permit = publish(store, job, started(job), logged=logged)
    _, _, restored = restarted(flow, permit, 1, unaligned=True)
    batches = in_flight_batches(restored("t", 0)[in_flight_name(edge.id)], schema)
    found = [value for batch in batches for value in batch.column("value").to_pylist()]
    assert found == [0, 1, 2, 10, 11, 12, 100, 101, 102, 110, 111, 112]


def test_columns_that_an_edge_got_since_are_null_in_what_was_in_flight(store: CheckpointStore) -> None:
    flow = unaligned(Stream.rebalance)
    job = job_of(flow, unaligned=True)
    schema = job.schemas["s->t.0"]
    permit = publish(store, job, started(job), logged=[(ev.Channel("s->t.0", 0, 0), records(schema, [4]))])
    task = permit.checkpoint().read("t", in_flight_name("s->t.0"))
    now = pa.schema([("new", pa.bool_()), ("value", pa.int64())])
    assert [batch.to_pylist() for batch in in_flight_batches(task, now)] == [[{"new": None, "value": 4}]]
    with pytest.raises(InvalidState, match=r"in flight on edge 's->t.0' cannot become") as caught:
        [*in_flight_batches(task, pa.schema([("tags", pa.int64())]))]
    assert caught.value.kind is ErrorKind.SCHEMA_MISMATCH


def test_feedback_is_logged_aligned_or_not_and_nothing_else_is(store: CheckpointStore) -> None:
    flow = Dataflow("job", parallelism=2)
    loop = flow.loop(ROWS)
    head = flow.source(Chunks(), uid="s").key_by("key").apply(Pass(), loop.key_by("key"), uid="head")
    loop.close(head.apply(Pass(), uid="body"))
    job = job_of(flow)
    edge = job.graph.by_edge["body->head.1"]
    routed = Router(job, edge, 1).route(rows([4, 4, 8], [1, 2, 3]))
    permit = publish(
        store, job, started(job), logged=[(ev.Channel(edge.id, 1, receiver), part) for receiver, part in routed]
    )
    _, _, restored = restarted(flow, permit, 3)
    found = [
        batch.to_pylist()
        for n in range(3)
        for batch in in_flight_batches(restored("head", n)[in_flight_name("body->head.1")], ROWS)
    ]
    assert sorted((row["key"], row["value"]) for batch in found for row in batch) == [(4, 1), (4, 2), (8, 3)]
    chain, _ = opened(job, "head")
    context = store.begin(job_id="job", graph=job.graph, states=job.states, parent=None).context
    with pytest.raises(InvalidState, match=r"records of edge 's->head.0' cannot become part of this snapshot"):
        chain.snapshot(command(1), context).log(ev.Channel("s->head.0", 0, 0), rows([1]))
    chain.finish()
    with pytest.raises(InvalidState, match=r"records of edge 'body->head.1' cannot become part"):
        chain.snapshot(command(2, finishing=True), context).log(ev.Channel("body->head.1", 0, 0), rows([1]))
