"""Epochs on Spark in this process (``spark_in_process``), and the frames of its tasks."""

from __future__ import annotations

import io
import itertools
import json
import random
import shutil
import sqlite3
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import s3fs

import stateformat
import stateformat as sf
from stateformat.backends.connectors import CollectSink, FileSink, MemorySource, RateSource, SqlSink
from stateformat.backends.connectors.sources.basic import ListEnumerator
from stateformat.backends.dataflow import Chunk, Dataflow, NoSplit, Source, Split, Stream, events as ev
from stateformat.backends.dataflow.chained_operator import OperatorError
from stateformat.backends.runtime import JobOutcome, SystemClock, VirtualClock
from stateformat.backends.spark import frames as feeds, frames as mail, messages as base
from stateformat.backends.spark.messages import read_task
from stateformat.backends.spark.run import SparkRun
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.source import Range
from stateformat.backends.spark.task_cache import TaskCache
from stateformat.errors import InvalidInput
from stateformat.model import StopMode
from stateformat.requests import RequestOutcome
from stateformat.tools.ckpt.commands.running.asking import Attempt
from stateformat.tools.jobs.run import main
from tests.servers.server import BUCKET, S3Server
from tests.worlds import spark as spark_in_process
from tests.worlds.jobs import Counting, Everything, Shares
from tests.worlds.local import ROWS, rows
from tests.worlds.spark import Ranges, RangeSource, Stand
from tests.worlds.stages import Calls, Gated, Out, Told, to_end as ended


class World:
    """A store on disk, Spark played by one worker, and calls of user code."""

    def __init__(self, directory: Path, stand: Stand) -> None:
        self.directory = directory
        self.stand = stand
        self.store = stateformat.open(f"file://{directory / 'store'}", durable=False)
        self.calls = Calls(directory)

    def begin(self, flow: Dataflow, **options: Any) -> SparkRun:
        return self.stand.begin(self.store, flow, **options)

    def answer(self, request: str) -> RequestOutcome:
        found = self.store.request_answer(request)
        assert found is not None
        return found.outcome


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Where a job runs."""
    return World(tmp_path, Stand(monkeypatch))


def to_end(run: SparkRun) -> JobOutcome:
    """Step a run to its end, in fifty epochs at most."""
    return ended(run, steps=50)


def growing(flow: Dataflow, *ranges: list[list[pa.RecordBatch]]) -> Stream:
    """A source of these ranges, which goes on, by key."""
    return flow.source(RangeSource(Ranges(list(ranges), grows=True), schema=ROWS), uid="in").key_by("key")


def test_a_source_of_dataframes_that_is_drained_while_a_range_is_read_ends_behind_the_range(world: World) -> None:
    flow = Dataflow("job", parallelism=2)
    growing(flow, *([[rows(n, n + 1)], [rows(n + 2)]] for n in range(0, 30, 3))).apply(out := Out(), uid="out")
    run = world.begin(flow)
    run.step()
    run.request_stop(StopMode.DRAIN)  # The range of the next epoch is fixed before the source hears of it.
    assert to_end(run).stop is not None
    assert out.values == list(range(6))


def test_a_batch_without_event_times_does_not_hide_those_before(world: World) -> None:
    schema = pa.schema([("at", pa.int64())])
    batches = [pa.record_batch([pa.array(at, pa.int64())], schema=schema) for at in ([5, 7], [3], [None, None])]
    sent = list(feeds.InputEncoder("in", 1, "at", schema)(iter(batches)))
    payloads = [part for batch in sent for part in batch["part"].to_pylist()[1::2]]
    frames = [mail.unpack(payload) for payload in payloads if mail.level_of(payload) == 0]
    found = [element for frame in frames for _, element in mail.elements(*frame, {"rows of in": schema})]
    assert [element.timestamp for element in found if hasattr(element, "timestamp")] == [7]


def test_what_the_code_of_a_source_raises_for_a_range_is_told_with_its_name() -> None:
    broken = Range(lambda spark: {}["at"], "range 1")  # type: ignore[typeddict-item]
    with pytest.raises(OperatorError, match="the range of 'in' failed: KeyError: 'at'"):
        feeds.DataFrameInput(broken, feeds.InputEncoder("in", 1, None, ROWS)).frame(None)  # type: ignore[arg-type]


class _Later(ListEnumerator):
    """Has a split when the test lets it."""

    ready: list[Split] = []  # noqa: RUF012 - of all copies

    def __init__(self) -> None:
        super().__init__(list)

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        return self.ready.pop() if self.ready else NoSplit.LATER


class _Growing(Source):
    schema = ROWS
    bounded = False

    def enumerator(self) -> _Later:
        return _Later()

    def read(self, split: Split, context: Any) -> Iterator[Chunk]:
        yield Chunk(rows(1), 1)


def test_a_split_that_comes_while_nothing_is_there_is_read_in_the_next_epoch(world: World) -> None:
    flow = Dataflow("job", parallelism=1)
    flow.source(_Growing(), uid="in").key_by("key").apply(Out(), uid="out")
    run = world.begin(flow)
    run.step()
    _Later.ready.append(Split("a", b""))
    run.step()
    assert run.rows_read == 1


def test_sums_of_rows_that_were_added_up_in_many_batches_on_their_way_are_those_of_the_rows(world: World) -> None:
    numbers = range(1, 2001)
    table = pa.table({"k": [f"k{n % 7}" for n in numbers], "n": [*numbers]})
    flow = Dataflow("sums", parallelism=2)
    keyed = flow.source(MemorySource(table, batch_rows=30, splits=3), uid="in").key_by("k")
    wanted = {"rows": ("*", "count"), "sum": ("n", "sum"), "least": ("n", "min"), "mean": ("n", "mean")}
    keyed.aggregate(wanted, emit="end", uid="sums").apply(out := CollectSink(), uid="out")
    to_end(world.begin(flow))
    of_keys = [[n for n in numbers if n % 7 == k] for k in range(7)]
    assert sorted(out.table().to_pylist(), key=str) == [
        {"k": f"k{k}", "rows": len(some), "sum": sum(some), "least": min(some), "mean": sum(some) / len(some)}
        for k, some in enumerate(of_keys)
    ]


def test_what_the_last_task_of_an_epoch_tells_its_coordinator_is_in_the_checkpoint(world: World) -> None:
    flow = Dataflow("job", parallelism=2)
    source = Gated(world.directory / "in", [rows(n) for n in range(10)], [rows(n) for n in range(10)], endless=True)
    flow.source(source, uid="in").key_by("key").apply(Counting(world.calls), uid="op").apply(Out(), uid="out")
    run = world.begin(flow)
    run.step()
    run.close()
    assert (run.published, run.rows_read) == (1, 20)
    again = world.begin(flow)
    assert again._driver.coordinators["op"].count == 20  # type: ignore[attr-defined]


def test_states_lost_on_the_local_disk_are_read_from_the_store(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    local = world.directory / "local"
    local.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(local))
    out = Out()
    flow = Dataflow("job", parallelism=1)
    source = Gated(world.directory / "in", [rows(n) for n in range(6)], shut=True)
    source.let(0, 3)
    read = flow.source(source, uid="in").key_by("key")
    read.aggregate({"n": ("*", "count")}, emit="end", uid="sums").apply(out, uid="out")
    run = world.begin(flow, cache_bytes=0)
    run.step()
    lost = list(local.iterdir())
    assert lost
    for directory in lost:
        shutil.rmtree(directory)
    source.let_all()
    to_end(run)
    assert sum(row[1] for row in out.seen.elements()) == 6


def test_a_chain_that_was_written_twice_in_an_epoch_is_begun_anew(world: World) -> None:
    out = Out()
    flow = Dataflow("job", parallelism=1)
    source = Gated(world.directory / "in", [rows(n) for n in range(6)], shut=True)
    table = Gated(world.directory / "table", [rows(100)], shut=True)
    one = flow.source(source, uid="in", event_time="at").key_by("key")
    two = flow.source(table, uid="table", event_time="at").broadcast()
    states = one.apply(Everything(world.calls), two, uid="op")
    states.map(lambda batch: batch, uid="same").apply(Out(world.calls), uid="told")
    states.apply(out, uid="out", chain=False)
    run = world.begin(flow, tolerable_failures=3)
    source.let(0, 2)
    world.calls.fails("told/0 prepare")
    run.step()
    assert run.published == 0
    source.let_all()
    table.let_all()
    to_end(run)
    assert sum(1 for row in out.seen.elements() if row[0] == "list") == 6


def test_operators_with_union_state_go_from_worker_to_worker_as_they_are(world: World) -> None:
    world.stand.caches += [TaskCache(), TaskCache()]
    world.stand.setups += [{}, {}]
    flow, out = Dataflow("job", parallelism=2), Out()
    ranges = Ranges([[[rows(*range(n, n + 8))], [rows(*range(n, n + 8))]] for n in range(0, 80, 8)])
    read = flow.source(RangeSource(ranges, schema=ROWS), uid="in")
    read.apply(Shares(world.calls), uid="op", chain=False).apply(out, uid="out")
    to_end(world.begin(flow))
    assert world.stand.opened["restored"] + world.stand.opened["caught_up"] > 10
    counted = Counter[int]()
    for part, count, _ in out.seen.elements():
        counted[part] += count
    assert counted == dict.fromkeys(range(8), 20)


def test_an_empty_epoch_writes_and_reads_nothing_of_operators(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.stand.caches.append(TaskCache())
    world.stand.setups.append({})
    read = Counter[str]()

    def reading(context: Any, uid: str, *more: Any) -> Any:
        read[uid] += 1
        return read_task(context, uid, *more)

    monkeypatch.setattr(base, "read_task", reading)
    flow = Dataflow("job", parallelism=2)
    counts = growing(flow, [[rows(1, 2)], [rows(3)]]).aggregate({"n": ("*", "count")}, uid="count")
    counts.rebalance().apply(Out(), uid="out")
    run = world.begin(flow)
    while run.published < 12:
        run._coordinator._moved = True  # Else an empty epoch is not published.
        run.step()
    read.clear()
    world.stand.opened.clear()
    before = world.store.open().handles.to_pylist()
    while run.published < 24:
        run._coordinator._moved = True
        run.step()
    after = world.store.open().handles.to_pylist()
    paths = [{row["path"] for row in found if row["operator"] in ("count", "out")} for found in (before, after)]
    assert paths[0] == paths[1]
    assert {"count:progress", "out:progress"} <= {f"{row['operator']}:{row['state']}" for row in before}
    assert world.stand.opened["caught_up"] > 10
    assert set(read) <= {"in"}


class _Down(Told):
    """Counts values down, and lets those above 0 pass."""

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        less = batch.set_column(1, ROWS.field("value"), pc.subtract(batch["value"], 1))
        return less.filter(pc.greater(less["value"], 0))


def test_one_task_feeds_the_head_of_a_loop_from_the_front_and_from_behind(world: World) -> None:
    flow, out = Dataflow("job", parallelism=2), Out()
    outer, inner = flow.loop(ROWS), flow.loop(ROWS)
    stream = flow.source(MemorySource([rows(4)]), uid="in").key_by("key")
    first = stream.apply(_Down(world.calls), outer.key_by("key"), uid="first")
    head = first.key_by("value").apply(_Down(world.calls), inner.key_by("key"), uid="head")
    inner.close(first)
    outer.close(head)
    head.apply(out, uid="out", chain=False)
    to_end(world.begin(flow))
    # What leaves "first" reaches "head" twice, and what leaves "head" comes back to "first": 4
    # gives two 2s, each of these ends.
    assert out.values == [2, 2]


def test_a_stop_that_is_asked_for_while_a_loop_is_turned_to_its_end_is_heard(world: World) -> None:
    flow = Dataflow("job", parallelism=1)
    loop = flow.loop(ROWS)
    stream = flow.source(MemorySource([rows(1)]), uid="in").key_by("key")
    lap = stream.apply(Told(world.calls), loop.key_by("key"), uid="head").map(lambda batch: batch, uid="lap")
    loop.close(lap)
    lap.apply(Out(), uid="out", chain=False)
    # No wait is between two barriers of a loop that drains: the clock goes on by itself.
    run = world.begin(flow, clock=SystemClock(), requests_every_us=1, loop_rounds_max=1000)
    for _ in range(5):
        run.step()
    assert run.in_flight is not None, "the next turn has begun already"
    world.store.request_stop(StopMode.NO_DRAIN)
    assert to_end(run).stop is not None


def test_who_asked_for_a_stop_is_told_that_it_failed_with_the_run(world: World) -> None:
    flow = Dataflow("job", parallelism=1)
    source = Gated(world.directory / "in", [rows(n) for n in range(9)], endless=True)
    source.let(0, 3)
    flow.source(source, uid="in").key_by("key").apply(Told(world.calls), uid="op").apply(Out(), uid="out")
    run = world.begin(flow, requests_every_us=1, idle_us=10)
    run.step()
    asked = world.store.request_stop(StopMode.DRAIN)
    world.calls.fails("op/0 finish")
    with pytest.raises(stateformat.CheckpointError, match="finish"):
        to_end(run)
    assert world.answer(asked.id) is RequestOutcome.FAILED


def test_a_savepoint_is_the_checkpoint_of_the_next_epoch_and_epochs_go_on(world: World) -> None:
    clock, flow = VirtualClock(us_per_work=10**12), Dataflow("job")
    growing(flow, *([[rows(n)]] for n in range(9))).apply(out := Out(), uid="out")
    run = world.begin(flow, clock=clock, requests_every_us=1, keep=1)
    run.step()
    asked = world.store.request_savepoint()
    direct = run.request_savepoint(world.directory.joinpath("own"))
    clock.wait_until(clock.now_us() + 1)
    while run.published < 5:
        run.step()
    assert world.store.request_answer(asked.id) is None, "it is copied while epochs go on"
    assert [record.checkpoint_id for record in world.store.history()] == [5, 4, 3, 2]
    clock.wait_until(2 * 10**12)
    run.step()
    assert run._requests._savepoints._copies == []
    for answer in (world.store.request_answer(asked.id), run.request_answer(direct)):
        assert answer is not None
        assert (answer.outcome, answer.checkpoint_id) == (RequestOutcome.SAVED, 2)
        kept = stateformat.open(str(answer.savepoint))
        assert (kept.open().record.checkpoint_id, not stateformat.validate(kept, level="full").problems) == (2, True)
    run.request_stop(StopMode.DRAIN)
    to_end(run)
    assert out.values == list(range(run.rows_read))


@pytest.mark.parametrize("outcome", [RequestOutcome.SAVED, RequestOutcome.STOPPED])
def test_a_request_is_heard_while_an_idle_job_waits(world: World, outcome: RequestOutcome) -> None:
    clock, flow = VirtualClock(), Dataflow("job")
    growing(flow, [[rows(1)]]).apply(Out(), uid="out")
    run = world.begin(flow, clock=clock, idle_us=3_600_000_000, requests_every_us=1)
    while clock.now_us() < 10_000_000:
        run.step()
    store, at = world.store, clock.now_us()
    asked = store.request_savepoint() if outcome is RequestOutcome.SAVED else store.request_stop(StopMode.DRAIN)
    while store.request_answer(asked.id) is None:
        run.step()
    assert clock.now_us() < at + 10_000_000
    assert world.answer(asked.id) is outcome


def test_epochs_begin_so_far_apart_as_was_asked_and_a_stop_waits_for_none(world: World) -> None:
    clock, flow, begun = VirtualClock(), Dataflow("job"), []
    world.stand.spoil = lambda: begun.append(clock.now_us())
    growing(flow, *([[rows(n)]] for n in range(9))).apply(Out(), uid="out")
    run = world.begin(flow, clock=clock, least_epoch_us=30_000_000)
    while run.published < 4:
        run.step()
    assert {after - before for before, after in pairwise(begun)} == {30_000_000}
    run.request_stop(StopMode.DRAIN)
    at = clock.now_us()
    to_end(run)
    assert len(begun) > 4
    assert clock.now_us() < at + 1_000_000


def test_who_cannot_be_pickled_is_named(world: World) -> None:
    flow, lock = Dataflow("job"), threading.Lock()
    flow.source(MemorySource([rows(1)]), uid="in").map(lambda batch: (lock, batch)[1], uid="locked")
    with pytest.raises(InvalidInput, match="'locked' goes to Spark's workers and cannot be pickled: TypeError"):
        world.begin(flow).step()


def test_a_run_ends_as_it_does_though_the_session_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(broadcast: Any) -> None:
        raise RuntimeError("Cannot call methods on a stopped SparkContext")

    monkeypatch.setattr(spark_in_process._Broadcast, "destroy", gone)
    flow = Dataflow("job")
    flow.source(MemorySource([rows(1)]), uid="in").apply(out := Out(), uid="out")
    to_end(world.begin(flow))
    assert out.values == [1]
    assert "could not be destroyed: RuntimeError: Cannot call" in caplog.text


# ---- frames between tasks: none lost, none twice, none of two attempts, in order

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
SCHEMAS = {"a": SCHEMA, "b": SCHEMA}
SENDER, RECEIVER, ANOTHER = ev.TaskId("up", 0), ev.TaskId("down", 3), ev.TaskId("down", 1)
ONE, TWO = b"one attempt", b"another one"
A, B = ev.Channel("a", 0, 3), ev.Channel("b", 0, 3)


def records(*numbers: int, width: int = 3) -> ev.Records:
    texts = ["x" * width] * len(numbers)
    return ev.Records(pa.record_batch([pa.array(numbers, pa.int64()), pa.array(texts)], schema=SCHEMA))


def payloads(sent: Iterator[mail.Sent]) -> list[bytes]:
    return [payload for _, payload in sent]


def heard(frames: Sequence[bytes]) -> list[tuple[ev.Channel, Any]]:
    """What a receiver hears: of records their numbers, joined; else the element."""
    found: list[tuple[ev.Channel, Any]] = []
    inbox = mail.Inbox(RECEIVER)
    for frame in frames:
        for header, rest in inbox.take(*mail.unpack(frame)):
            for where, element in mail.elements(header, rest, SCHEMAS):
                if not isinstance(element, ev.Records):
                    found.append((where, element))
                elif found and found[-1][0] == where and isinstance(found[-1][1], list):
                    found[-1][1].extend(element.batch["n"].to_pylist())
                else:
                    found.append((where, element.batch["n"].to_pylist()))
    inbox.check()
    return found


def sent(*elements: tuple[ev.Channel, ev.Element], flush_every: int = 1000) -> tuple[mail.Outbox, list[bytes]]:
    outbox, frames = mail.Outbox(SENDER, ONE), []
    for number, (where, element) in enumerate(elements, start=1):
        outbox.put(RECEIVER, 2, where, element)
        if number % flush_every == 0:
            frames += payloads(outbox.flush())
    return outbox, frames + payloads(outbox.flush())


def test_elements_of_several_channels_are_heard_in_the_order_in_which_they_were_sent() -> None:
    barrier, end = ev.Barrier(4), ev.EndOfData(drain=True)
    others = [(B, barrier), (A, barrier), (B, end), (B, ev.EndOfPartition())]
    _, frames = sent((A, records(1, 2)), (B, records(10)), (A, ev.Watermark(5)), (A, records(3)), *others)
    assert len(frames) == 1
    assert heard(frames) == [(A, [1, 2]), (B, [10]), (A, ev.Watermark(5)), (A, [3]), *others]


def test_small_batches_that_follow_one_another_on_a_channel_travel_as_one() -> None:
    _, frames = sent(*((A, records(n)) for n in range(100)), (B, records(7)), (A, records(100)))
    header, rest = mail.unpack(frames[0])
    assert header.entries == ((A, 1), (B, 1), (A, 1))
    first = next(iter(mail.elements(header, rest, SCHEMAS)))[1]
    assert isinstance(first, ev.Records)
    assert first.batch["n"].to_pylist() == list(range(100))
    assert heard(frames) == [(A, list(range(100))), (B, [7]), (A, [100])]


def test_nothing_is_put_together_over_what_stands_between() -> None:
    _, frames = sent((A, records(1)), (A, ev.Watermark(1)), (A, records(2)), (A, ev.Barrier(1)))
    assert heard(frames) == [(A, [1]), (A, ev.Watermark(1)), (A, [2]), (A, ev.Barrier(1))]


def test_a_large_batch_is_cut_into_frames_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "FRAME_BYTES_MAX", 10_000)
    outbox, frames = sent((A, records(*range(1000), width=100)), (A, ev.Barrier(1)))
    assert len(frames) >= 11
    assert max(len(frame) for frame in frames) < 12_000
    assert heard(frames) == [(A, list(range(1000))), (A, ev.Barrier(1))]
    assert (outbox.sent, outbox.sent_bytes) == ({RECEIVER: len(frames)}, sum(len(frame) for frame in frames))


def test_a_row_that_is_larger_than_a_frame_travels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "FRAME_BYTES_MAX", 1000)
    _, frames = sent((A, records(1, 2, 3, width=5000)))
    assert len(frames) == 3
    assert heard(frames) == [(A, [1, 2, 3])]


def test_an_outbox_is_large_when_much_waits_and_not_when_it_was_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "_FLUSH_BYTES", 10_000)
    outbox = mail.Outbox(SENDER, ONE)
    outbox.put(RECEIVER, 1, A, records(1, width=4000))
    outbox.put(RECEIVER, 1, A, ev.Watermark(1))
    large = [outbox.is_large]
    outbox.put(ANOTHER, 1, A, records(1, width=7000))
    large.append(outbox.is_large)
    list(outbox.flush())
    assert [*large, outbox.is_large] == [False, True, False]
    assert list(outbox.flush()) == []


def test_each_receiver_has_frames_of_its_own_with_its_slot_and_level() -> None:
    outbox = mail.Outbox(SENDER, ONE)
    outbox.put(RECEIVER, 2, A, records(1))
    outbox.put(ANOTHER, 5, B, ev.Barrier(1))
    found = {(slot, mail.level_of(payload)) for slot, payload in outbox.flush()}
    assert found == {(3, 2), (1, 5)}
    assert outbox.sent == {RECEIVER: 1, ANOTHER: 1}


def test_a_slice_is_sent_without_what_it_was_cut_from() -> None:
    outbox, frames = sent((A, ev.Records(records(*range(10_000)).batch.slice(5000, 2))))
    assert heard(frames) == [(A, [5000, 5001])]
    assert outbox.sent_bytes < 5000


@pytest.mark.parametrize("seed", range(5))
def test_frames_are_heard_in_order_however_they_come(seed: int) -> None:
    _, frames = sent(*((A, ev.Watermark(n) if n % 3 else records(n)) for n in range(30)), flush_every=2)
    assert len(frames) == 15
    random.Random(seed).shuffle(frames)
    assert heard(frames) == [(A, ev.Watermark(n) if n % 3 else [n]) for n in range(30)]


def take(inbox: mail.Inbox, number: int, *, token: bytes = ONE, sender: mail.Address = SENDER) -> list[int]:
    """Take one frame in; the numbers of those that can be read now."""
    header = mail.Header(sender, RECEIVER, token, number, ((A, ev.Watermark(number)),))
    frame = mail.unpack(mail.pack(1, header, ()))
    return [header.number for header, _ in inbox.take(*frame)]


def test_a_frame_that_waits_for_one_before_it_is_not_read_and_its_absence_is_told() -> None:
    inbox = mail.Inbox(RECEIVER)
    assert [take(inbox, 2), take(inbox, 0)] == [[], [0]]
    with pytest.raises(mail.EpochBroken, match=r"down\[3\] misses a frame of up\[0\] before number 2"):
        inbox.check()
    assert take(inbox, 1) == [1, 2]
    inbox.check()
    assert inbox.consumed == {SENDER: (ONE, 3)}


@pytest.mark.parametrize(
    ("before", "number", "token", "words"),
    [
        ((0, 2), 0, ONE, r"got frame 0 of up\[0\] twice"),
        ((0, 2), 2, ONE, r"got frame 2 of up\[0\] twice"),
        ((0,), 1, TWO, r"two attempts of up\[0\]"),
        ((1,), 0, TWO, r"two attempts of up\[0\]"),
    ],
    ids=["read", "waiting", "another attempt", "another attempt before what waits"],
)
def test_a_frame_of_another_attempt_is_refused(before: Sequence[int], number: int, token: bytes, words: str) -> None:
    inbox = mail.Inbox(RECEIVER)
    for each in before:
        take(inbox, each)
    with pytest.raises(mail.EpochBroken, match=words):
        take(inbox, number, token=token)


def test_senders_are_counted_apart() -> None:
    inbox = mail.Inbox(RECEIVER)
    senders: dict[mail.Address, bytes] = {SENDER: ONE, ANOTHER: TWO, "rows, partition 0": ONE}
    for sender, number in itertools.product(senders, (0, 1)):
        assert take(inbox, number, token=senders[sender], sender=sender) == [number]
    assert inbox.consumed == {sender: (token, 2) for sender, token in senders.items()}


def test_an_epoch_is_whole_when_everything_that_was_sent_was_consumed() -> None:
    mail.compare(
        {SENDER: (ONE, {RECEIVER: 2, ANOTHER: 1}), "rows": (TWO, {RECEIVER: 1}), RECEIVER: (TWO, {})},
        {RECEIVER: {SENDER: (ONE, 2), "rows": (TWO, 1)}, ANOTHER: {SENDER: (ONE, 1)}, SENDER: {}},
    )


@pytest.mark.parametrize(
    ("consumed", "words"),
    [
        ({}, "which consumed nothing"),
        ({SENDER: (ONE, 1)}, "which consumed 1 frames$"),
        ({SENDER: (ONE, 3)}, "which consumed 3 frames$"),
        ({SENDER: (TWO, 2)}, "which consumed 2 frames of another attempt"),
        ({SENDER: (ONE, 2), ANOTHER: (ONE, 1)}, r"down\[3\] consumed frames of down\[1\], which reports none"),
    ],
)
def test_an_epoch_is_broken_where_what_was_consumed_is_not_what_was_sent(consumed: Any, words: str) -> None:
    with pytest.raises(mail.EpochBroken, match=words):
        mail.compare({SENDER: (ONE, {RECEIVER: 2}), RECEIVER: (TWO, {}), ANOTHER: (TWO, {})}, {RECEIVER: consumed})


def test_what_an_exchange_carries_stands_behind_its_slot_as_a_long_of_java() -> None:
    sent = [(3, b"frame"), (2**31 - 1, b"")]
    assert [*mail.keyed(sent)] == [struct.pack(">q", 3), b"frame", struct.pack(">q", 2**31 - 1), b""]


def test_a_report_is_read_at_no_level() -> None:
    report = mail.pack_report({"what": "all is well"})
    assert mail.level_of(report) == mail.REPORT
    assert mail.unpack_report(report) == {"what": "all is well"}


@pytest.mark.parametrize("name", ["a", "a name of another length"])
def test_batches_lie_aligned_in_what_came(name: str) -> None:
    outbox = mail.Outbox(ev.TaskId(name, 0), ONE)
    outbox.put(RECEIVER, 2, A, records(*range(5)))
    (payload,) = payloads(outbox.flush())
    ((_, element),) = mail.elements(*mail.unpack(payload), SCHEMAS)
    assert isinstance(element, ev.Records)
    start = pa.py_buffer(payload).address
    for column in element.batch.columns:
        for buffer in filter(None, column.buffers()):
            assert buffer.address % 8 == 0
            assert start <= buffer.address < start + len(payload)


# ---- A job of the program for spark-submit is rescaled while it runs, in the same Spark session

TOTAL = 3_000
JOB = """
from stateformat.backends.connectors import FileSink, RateSource
from stateformat.backends.dataflow import Dataflow


def numbers():
    flow = Dataflow("numbers", parallelism=2)
    numbers = flow.source(RateSource(total={total}, shards=4, rows_per_read=25), uid="numbers", event_time="at")
    numbers.apply(FileSink({directory!r}, durable=False), uid="all")
    shards = numbers.key_by("shard").aggregate({{"rows": ("*", "count")}}, emit="end", uid="shards")
    shards.apply(FileSink({directory!r} + "-shards", durable=False), uid="counted")
    return flow
"""


class Printed(io.StringIO):
    """Standard output of the program: after two lines the job is asked to go on at three."""

    def __init__(self, store: str) -> None:
        super().__init__()
        self._store = store
        self.answers: list[dict[str, Any]] = []
        self.asking: threading.Thread | None = None

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.asking is None and self.getvalue().count("\n") >= 2:
            self.asking = threading.Thread(target=self._ask)
            self.asking.start()
        return count

    def _ask(self) -> None:
        attempt = Attempt(
            sf.open(self._store),
            "rescale",
            {"parallelism": 3, "operators": {"counted": 1}},
            None,
            open_store=sf.open,
        )
        self.answers.append(attempt.document(attempt.run(120)))

    @property
    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]


@pytest.mark.spark
def test_a_job_goes_on_at_another_parallelism_in_its_session_and_commits_every_row_once(
    tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, store = str(tmp_path / "out"), str(tmp_path / "store")
    job = tmp_path / f"job_{tmp_path.name}.py"
    job.write_text(JOB.format(directory=output, total=TOTAL))
    printed = Printed(store)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", printed)
        arguments = [f"{job}:numbers", store, "--rows-per-epoch", "200", "--keep", "all", "--progress", "json"]
        assert main(arguments) == 0
    sys.modules.pop(job.stem, None)

    assert printed.asking is not None
    printed.asking.join(timeout=120)
    (answer,) = printed.answers
    assert answer["outcome"] == "rescaled", answer
    *epochs, end = printed.objects
    assert [news for epoch in epochs for news in epoch["news"]] == [answer["message"]]
    assert [epoch["parallelism"] for epoch in epochs] == sorted(epoch["parallelism"] for epoch in epochs)
    assert {epoch["parallelism"] for epoch in epochs} == {2, 3}
    assert (end["restarts"], end["stop"]) == (0, None)

    records = {record.checkpoint_id: record for record in sf.open(store).history()}
    first = records[answer["checkpoint_id"]]
    assert {operator.uid: operator.parallelism for operator in first.graph.operators} == {
        "numbers": 3,
        "all": 3,
        "shards": 3,
        "counted": 1,
    }
    assert sf.open(answer["savepoint"]).open().id == first.checkpoint_id - 1
    assert {record.properties["stateformat.spark_application"] for record in records.values()} == {
        spark.sparkContext.applicationId
    }
    [found] = duckdb.sql(f"SELECT count(*), count(DISTINCT (shard, n)) FROM '{output}/*.parquet'").fetchall()
    assert found == (TOTAL, TOTAL)
    [counted] = duckdb.sql(f"SELECT count(*), sum(\"rows\") FROM '{output}-shards/*.parquet'").fetchall()
    assert counted == (4, TOTAL)


# ---- two-phase-commit sinks on Spark: workers prepare, the driver commits


def test_files_on_s3_and_rows_of_a_database_are_committed(moto: S3Server, spark: Any, tmp_path: Path) -> None:
    credentials = moto.options()
    place = f"{BUCKET}/{tmp_path.name}"
    flow = Dataflow("rows", parallelism=2)
    ticks = flow.source(RateSource(total=9_000, shards=4), uid="ticks")
    ticks.apply(FileSink(f"s3://{place}/out", **credentials), uid="files")
    totals = ticks.key_by("shard").aggregate({"rows": ("*", "count")}, emit="end", uid="totals")
    totals.apply(SqlSink(f"sqlite:///{tmp_path}/totals.db", "totals"), uid="table")
    store = sf.open(f"s3://{place}/store", **credentials)

    outcome = SparkRuntime(spark, store, checkpoint_rows=4_000).run(flow)

    assert outcome.checkpoint_id is not None
    assert outcome.checkpoint_id >= 3
    files = s3fs.S3FileSystem(**credentials, skip_instance_cache=True, use_listings_cache=False)
    tables = [
        pq.read_table(files.open(path), columns=["shard", "n"]) for path in files.glob(f"{place}/out/**/*.parquet")
    ]
    assert len(tables) > 1
    assert sorted(tuple(row.values()) for table in tables for row in table.to_pylist()) == [
        (shard, n) for shard in range(4) for n in range(2_250)
    ]
    with sqlite3.connect(tmp_path / "totals.db") as database:
        assert database.execute("SELECT shard, rows FROM totals ORDER BY shard").fetchall() == [
            (n, 2_250) for n in range(4)
        ]
    database.close()
