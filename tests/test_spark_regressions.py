"""What the Spark runtime once did wrong, each as a history that runs in this process (``spark_in_process``)."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import stateformat
from stateformat.backends.connectors import MemorySource
from stateformat.backends.connectors.sources import ListEnumerator
from stateformat.backends.dataflow import Chunk, Dataflow, NoSplit, Source, Split
from stateformat.backends.dataflow.chain import OperatorError
from stateformat.backends.runtime import SystemClock, VirtualClock
from stateformat.backends.spark.driver import SparkRun
from stateformat.backends.spark.protocol import DataFrameInput, InputEncoder, read_task, restore_point as base
from stateformat.backends.spark.protocol.frames import REPORT, elements, unpack
from stateformat.backends.spark.sources import Range
from stateformat.errors import InvalidInput
from stateformat.model import StopMode
from stateformat.stop_requests import StopOutcome
from stateformat.store import CheckpointStore
from tests import spark_in_process
from tests.conformance import Calls, Gated, Out, Told
from tests.conformance_jobs import Counting, Everything
from tests.local_jobs import ROWS, rows
from tests.spark_in_process import Ranges, RangeSource, Stand


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """One worker."""
    return Stand(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """On disk, since what is written travels."""
    return stateformat.open(f"file://{tmp_path / 'store'}", durable=False)


def to_end(run: SparkRun, steps: int = 50) -> None:
    """Step a run to its end."""
    while run.step():
        steps -= 1
        assert steps, "it does not end"


def test_a_source_of_dataframes_that_is_drained_while_a_range_is_read_ends_behind_the_range(
    stand: Stand, store: CheckpointStore
) -> None:
    out = Out()
    ranges = [[[rows(n, n + 1)], [rows(n + 2)]] for n in range(0, 30, 3)]
    flow = Dataflow("job", parallelism=2)
    source = flow.source(RangeSource(Ranges(ranges, grows=True), schema=ROWS), uid="in")
    source.key_by("key").apply(out, uid="out")
    run = stand.begin(store, flow)
    run.step()
    run.request_stop(StopMode.DRAIN)  # The range of the next epoch is fixed before anybody hears of it.
    to_end(run)
    assert run.outcome is not None
    assert run.outcome.stop is not None
    assert out.values == list(range(6))


def test_what_the_last_task_of_an_epoch_tells_its_coordinator_is_in_the_checkpoint(
    stand: Stand, store: CheckpointStore, tmp_path: Path
) -> None:
    flow = Dataflow("job", parallelism=2)
    source = Gated(tmp_path / "in", [rows(n) for n in range(10)], [rows(n) for n in range(10)], endless=True)
    flow.source(source, uid="in").key_by("key").apply(Counting(Calls(tmp_path)), uid="op").apply(Out(), uid="out")
    run = stand.begin(store, flow)
    run.step()
    run.close()
    assert (run.published, run.rows_read) == (1, 20)
    again = stand.begin(store, flow)
    assert again._driver.coordinators["op"].count == 20  # type: ignore[attr-defined]


def test_who_asked_for_a_stop_is_told_that_it_failed_with_the_run(
    stand: Stand, store: CheckpointStore, tmp_path: Path
) -> None:
    calls = Calls(tmp_path)
    flow = Dataflow("job", parallelism=1)
    source = Gated(tmp_path / "in", [rows(n) for n in range(9)], endless=True)
    source.let(0, 3)
    flow.source(source, uid="in").key_by("key").apply(Told(calls), uid="op").apply(Out(), uid="out")
    run = stand.begin(store, flow, requests_every_us=1, idle_us=10)
    run.step()
    asked = store.request_stop(StopMode.DRAIN)
    calls.fails("op/0 finish")
    with pytest.raises(stateformat.CheckpointError, match="finish"):
        to_end(run)
    answer = store.stop_answer(asked.id)
    assert answer is not None
    assert answer.outcome is StopOutcome.FAILED


def test_a_batch_without_event_times_does_not_hide_those_before(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> None:
    schema = pa.schema([("at", pa.int64())])
    batches = [pa.record_batch([pa.array(at, pa.int64())], schema=schema) for at in ([5, 7], [None, None])]
    sent = list(InputEncoder("in", 1, "at", schema)(iter(batches)))
    frames = [unpack(batch["payload"][0].as_buffer()) for batch in sent if batch["level"][0].as_py() != REPORT]
    found = [element for head, rest in frames for _, element in elements(head, rest, {"rows of in": schema})]
    assert [element.timestamp for element in found if hasattr(element, "timestamp")] == [7]


def test_states_that_the_local_disk_has_lost_are_read_from_the_store(
    stand: Stand, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = tmp_path / "local"
    local.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(local))
    out = Out()
    flow = Dataflow("job", parallelism=1)
    source = Gated(tmp_path / "in", [rows(n) for n in range(6)], shut=True)
    source.let(0, 3)
    read = flow.source(source, uid="in").key_by("key")
    read.aggregate({"n": ("*", "count")}, emit="end", uid="sums").apply(out, uid="out")
    run = stand.begin(store, flow, cache_bytes=0)
    run.step()
    lost = list(local.iterdir())
    assert lost
    for directory in lost:
        shutil.rmtree(directory)
    source.let_all()
    to_end(run)
    assert sum(row[1] for row in out.seen.elements()) == 6


def test_an_activation_that_was_written_twice_in_an_epoch_is_begun_anew(
    stand: Stand, store: CheckpointStore, tmp_path: Path
) -> None:
    calls = Calls(tmp_path)
    out = Out()
    flow = Dataflow("job", parallelism=1)
    source = Gated(tmp_path / "in", [rows(n) for n in range(6)], shut=True)
    table = Gated(tmp_path / "table", [rows(100)], shut=True)
    one = flow.source(source, uid="in", event_time="at").key_by("key")
    two = flow.source(table, uid="table", event_time="at").broadcast()
    states = one.apply(Everything(calls), two, uid="op")
    states.map(lambda batch: batch, uid="same").apply(Out(calls), uid="told")
    states.apply(out, uid="out", chain=False)
    run = stand.begin(store, flow, tolerable_failures=3)
    source.let(0, 2)
    calls.fails("told/0 prepare")
    run.step()
    assert run.published == 0
    source.let_all()
    table.let_all()
    to_end(run)
    assert sum(1 for row in out.seen.elements() if row[0] == "list") == 6


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


def test_a_split_that_comes_while_nothing_is_there_is_read_in_the_next_epoch(
    stand: Stand, store: CheckpointStore
) -> None:
    flow = Dataflow("job", parallelism=1)
    flow.source(_Growing(), uid="in").key_by("key").apply(Out(), uid="out")
    run = stand.begin(store, flow)
    run.step()
    _Later.ready.append(Split("a", b""))
    run.step()
    assert run.rows_read == 1


def test_a_stop_that_is_asked_for_while_a_loop_is_turned_to_its_end_is_heard(
    stand: Stand, store: CheckpointStore, tmp_path: Path
) -> None:
    calls = Calls(tmp_path)
    flow = Dataflow("job", parallelism=1)
    loop = flow.loop(ROWS)
    stream = flow.source(Gated(tmp_path / "in", [rows(1)]), uid="in").key_by("key")
    lap = stream.apply(Told(calls), loop.key_by("key"), uid="head").map(lambda batch: batch, uid="lap")
    loop.close(lap)
    lap.apply(Out(), uid="out", chain=False)
    # No wait is between two barriers of a loop that drains: the clock goes on by itself.
    run = stand.begin(store, flow, clock=SystemClock(), requests_every_us=1, loop_rounds_max=1000)
    for _ in range(5):
        run.step()
    assert run.in_flight is not None, "the next turn has begun already"
    store.request_stop(StopMode.NO_DRAIN)
    to_end(run)
    assert run.outcome is not None
    assert run.outcome.stop is not None


class _Down(Told):
    """Counts values down, and lets those above 0 pass."""

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        less = batch.set_column(1, ROWS.field("value"), pc.subtract(batch["value"], 1))
        return less.filter(pc.greater(less["value"], 0))


def test_one_task_feeds_the_head_of_a_loop_from_the_front_and_from_behind(
    stand: Stand, store: CheckpointStore, tmp_path: Path
) -> None:
    calls, out = Calls(tmp_path), Out()
    flow = Dataflow("job", parallelism=2)
    outer, inner = flow.loop(ROWS), flow.loop(ROWS)
    stream = flow.source(Gated(tmp_path / "in", [rows(4)]), uid="in").key_by("key")
    first = stream.apply(_Down(calls), outer.key_by("key"), uid="first")
    head = first.key_by("value").apply(_Down(calls), inner.key_by("key"), uid="head")
    inner.close(first)
    outer.close(head)
    head.apply(out, uid="out", chain=False)
    to_end(stand.begin(store, flow))
    # What leaves "first" reaches "head" twice, and what leaves "head" comes back to "first": 4 gives two 2s, each of these ends.
    assert out.values == [2, 2]


def test_an_epoch_in_which_nothing_comes_writes_nothing_for_operators_and_reads_nothing_of_them(
    monkeypatch: pytest.MonkeyPatch, store: CheckpointStore
) -> None:
    """Small states were written whole each time, and read by every worker that had not written them."""
    stand = Stand(monkeypatch, workers=2)
    read = Counter[str]()

    def reading(context: Any, uid: str, *more: Any) -> Any:
        read[uid] += 1
        return read_task(context, uid, *more)

    monkeypatch.setattr(base, "read_task", reading)
    flow = Dataflow("job", parallelism=2)
    source = flow.source(RangeSource(Ranges([[[rows(1, 2)], [rows(3)]]], grows=True), schema=ROWS), uid="in")
    source.key_by("key").aggregate({"n": ("*", "count")}, uid="count").rebalance().apply(Out(), uid="out")
    run = stand.begin(store, flow)
    while run.published < 12:
        run.step()
    read.clear()
    stand.opened.clear()
    before = store.open().handles.to_pylist()
    while run.published < 24:
        run.step()
    paths = [
        {row["path"] for row in handles if row["operator"] in ("count", "out")}
        for handles in (before, store.open().handles.to_pylist())
    ]
    assert paths[0] == paths[1]
    assert {"count:progress", "out:progress"} <= {f"{row['operator']}:{row['state']}" for row in before}
    assert stand.opened["caught_up"] > 10
    assert set(read) <= {"in"}


def test_epochs_begin_so_far_apart_as_was_asked_and_a_stop_waits_for_none(stand: Stand, store: CheckpointStore) -> None:
    clock, out, begun = VirtualClock(), Out(), []
    stand.spoil = lambda: begun.append(clock.now_us())
    flow = Dataflow("job")
    source = flow.source(RangeSource(Ranges([[[rows(n)]] for n in range(9)], grows=True), schema=ROWS), uid="in")
    source.key_by("key").apply(out, uid="out")
    run = stand.begin(store, flow, clock=clock, least_epoch_us=30_000_000)
    while run.published < 4:
        run.step()
    assert {after - before for before, after in pairwise(begun)} == {30_000_000}
    run.request_stop(StopMode.DRAIN)
    at = clock.now_us()
    to_end(run)
    assert len(begun) > 4
    assert clock.now_us() < at + 1_000_000
    assert run.outcome is not None


def test_who_cannot_be_pickled_is_named(stand: Stand, store: CheckpointStore) -> None:
    flow, lock = Dataflow("job"), threading.Lock()
    flow.source(MemorySource([rows(1)]), uid="in").map(lambda batch: (lock, batch)[1], uid="locked")
    with pytest.raises(InvalidInput, match="'locked' goes to Spark's workers and cannot be pickled: TypeError"):
        stand.begin(store, flow).step()


def test_what_the_code_of_a_source_raises_for_a_range_is_told_with_its_name() -> None:
    feed = DataFrameInput(Range(lambda spark: {}["at"], "range 1"), InputEncoder("in", 1, None, ROWS))  # type: ignore[typeddict-item]
    with pytest.raises(OperatorError, match="the range of 'in' failed: KeyError: 'at'"):
        feed.frame(None)  # type: ignore[arg-type]


def test_a_run_ends_as_it_does_though_the_session_is_gone(
    stand: Stand, store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def gone(broadcast: Any) -> None:
        raise RuntimeError("Cannot call methods on a stopped SparkContext")

    monkeypatch.setattr(spark_in_process._Broadcast, "destroy", gone)
    flow = Dataflow("job")
    flow.source(MemorySource([rows(1)]), uid="in").apply(out := Out(), uid="out")
    to_end(stand.begin(store, flow))
    assert out.values == [1]
    assert "could not be destroyed: RuntimeError: Cannot call" in caplog.text


def test_a_stop_is_heard_while_an_idle_job_waits(stand: Stand, store: CheckpointStore) -> None:
    clock = VirtualClock()
    flow = Dataflow("job")
    source = flow.source(RangeSource(Ranges([[[rows(1)]]], grows=True), schema=ROWS), uid="in")
    source.key_by("key").apply(Out(), uid="out")
    run = stand.begin(store, flow, clock=clock, idle_us=3_600_000_000, requests_every_us=1)
    while clock.now_us() < 10_000_000:
        run.step()
    asked, at = store.request_stop(StopMode.DRAIN), clock.now_us()
    to_end(run)
    assert clock.now_us() < at + 10_000_000
    answer = store.stop_answer(asked.id)
    assert answer is not None
    assert answer.outcome is StopOutcome.STOPPED
