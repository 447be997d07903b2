"""What went wrong once in the runtime, and must not again: one test for each, named by what holds now."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.dataflow import (
    Dataflow,
    NoSplit,
    Operator,
    OperatorCoordinator,
    Prepared,
    Sender,
    Split,
    SplitEnumerator,
    SplitList,
    TwoPhaseCommitSink,
)
from stateformat.backends.dataflow.events import CheckpointDue, TaskId, TimedOut
from stateformat.backends.local import JobFailed, LocalRun, LocalRuntime, RunDiscarded
from stateformat.backends.runtime import Worker
from stateformat.errors import InvalidInput
from stateformat.model import Mode, StopMode
from stateformat.publication import CommitPermit
from stateformat.reading import ReadTask
from stateformat.stop_requests import StopOutcome
from tests.local_jobs import Bench, Count, Out, Tap, Told, rows, settle, to_end, until


def counting(bench: Bench, tap: Tap, parallelism: int = 1) -> tuple[Dataflow, Out]:
    """A count of each key, emitted at the end."""
    out = Out(bench.log)
    flow = Dataflow("job", parallelism=parallelism)
    counts = flow.source(tap, uid="in", event_time="at").key_by("key").apply(Count(bench.log), uid="count", chain=False)
    counts.apply(out, uid="out", chain=False)
    return flow, out


def passing(bench: Bench, tap: Tap) -> Dataflow:
    """The same without the count."""
    flow = Dataflow("job")
    passed = flow.source(tap, uid="in", event_time="at").apply(Told(bench.log), uid="op", chain=False)
    passed.apply(Out(bench.log), uid="out", chain=False)
    return flow


def begun(bench: Bench) -> None:
    """A run that is lost after two checkpoints."""
    flow, _ = counting(bench, Tap([rows(n) for n in range(20)], endless=True))
    run = bench.begin(flow)
    until(run, lambda: run.published >= 2)


def by_rows() -> Bench:
    return Bench(checkpoint_rows=2, checkpoint_interval_us=None)


def test_state_that_is_given_up_at_the_start_is_not_given_up_again_when_the_job_starts_again() -> None:
    bench = by_rows()
    begun(bench)
    given_up = sum(row["n"] for row in bench.state("count", "count"))
    bench.log.failing.append("count/0 process 0: 17")
    flow, out = counting(bench, Tap([rows(n) for n in range(20)]))
    assert bench.run(flow, drop=("count/count",)).restarts == 1
    assert sum(out.seen) == 20 - given_up


def test_an_operator_that_is_given_up_at_the_start_does_not_keep_the_job_from_starting_again() -> None:
    bench = by_rows()
    begun(bench)
    bench.log.failing.append("op/0 process 0: 17")
    outcome = bench.run(passing(bench, Tap([rows(n) for n in range(20)])), drop=("count",))
    assert outcome.restarts == 1


def test_what_is_given_up_may_be_named_without_a_list() -> None:
    bench = by_rows()
    begun(bench)
    assert bench.run(passing(bench, Tap([rows(n) for n in range(20)])), drop="count").restarts == 0


def test_operators_of_a_run_that_is_given_up_are_closed_before_the_next_one_opens() -> None:
    bench = Bench()
    flow, out = counting(bench, Tap([rows(1), rows(2)]))
    bench.log.failing += ["count/0 process 0: 2", "count/0 close"]
    assert bench.run(flow).restarts == 1
    assert bench.log.failing == [], "that of the operator which raises too"
    for who in ("count/0", "out/0"):
        assert bench.log.of(who, "open", "close") == ["open", "close", "open", "close"]
    assert out.seen == [1, 1]


def test_operators_that_were_opened_are_closed_where_another_cannot_open() -> None:
    bench = Bench()
    flow, _ = counting(bench, Tap([rows(1)]), parallelism=2)
    bench.log.failing.append("out/1 open")
    assert bench.run(flow).restarts == 1
    for who in ("count/0", "count/1", "out/0"):
        assert bench.log.of(who, "open", "close") == ["open", "close", "open", "close"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("checkpoint_interval_us", 0),
        ("checkpoint_rows", 0),
        ("timeout_us", -1),
        ("requests_every_us", 0),
        ("tolerable_failures", -1),
        ("keep", "x"),
        ("loop_rounds_max", 0),
        ("max_restarts", -1),
        ("restart_delay_us", -1),
        ("seed", "x"),
        ("schedule", 3),
    ],
)
def test_an_option_that_means_nothing_is_refused_with_a_sentence_before_anything_begins(
    option: str, value: Any
) -> None:
    with pytest.raises(InvalidInput, match=f"^{option} is {value!r}; it is a "):
        LocalRuntime(sf.open("memory://options"), **{option: value})


def test_a_url_in_the_place_of_a_store_is_refused_with_a_sentence() -> None:
    url: Any = "memory://options"
    with pytest.raises(InvalidInput, match=r"the store is 'memory://options'; open it first: stateformat.open\(url\)"):
        LocalRuntime(url)


def test_a_step_asks_few_tasks_whether_they_are_ready_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = itertools.count()
    ready = Worker.ready
    monkeypatch.setattr(Worker, "ready", lambda self, now: (next(asked), ready(self, now))[1])
    bench = Bench()
    flow, out = counting(bench, Tap(*[[rows(n)] for n in range(40)]), parallelism=40)
    run = bench.begin(flow)
    steps = 0
    while run.step():
        steps += 1
    assert sum(out.seen) == 40
    assert len(run.tasks) == 120
    assert next(asked) < 5 * steps


def test_readers_that_wait_for_the_clock_are_asked_again_when_it_has_come() -> None:
    bench = Bench()
    tap = Tap([rows(1)], [rows(2)], [rows(3)], shut=True)
    flow, out = counting(bench, tap, parallelism=3)
    run = bench.begin(flow)
    settle(run, 500)
    assert run.rows_read == 0
    for split in range(3):
        tap.let(split)
    to_end(run)
    assert sum(out.seen) == 3


def test_what_all_subtasks_are_given_alike_is_read_once_at_another_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    taps = [[rows(n)] for n in range(6)]
    run = bench.begin(counting(bench, Tap(*taps, endless=True), parallelism=6)[0])
    bench.checkpoint(run)
    read: list[str] = []
    batches = ReadTask.batches

    def counted(task: ReadTask, **options: Any) -> Any:
        if task.state.mode is Mode.PROGRESS:
            read.append(str(task.state.operator))
        return batches(task, **options)

    monkeypatch.setattr(ReadTask, "batches", counted)
    flow, out = counting(bench, Tap(*taps), parallelism=4)
    run = bench.begin(flow)
    assert sorted(read) == ["count", "out"]
    to_end(run)
    assert sum(out.seen) == 6


class Kept(OperatorCoordinator):
    """Keeps what the test says."""

    columns = pa.schema([("n", pa.int64())])

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def receive(self, subtask: int, message: bytes) -> None:
        """Nothing is sent."""

    def snapshot(self) -> Any:
        return self.kept


class Keeping(Told):
    """An operator with such a coordinator."""

    def __init__(self, log: Any, kept: Any) -> None:
        super().__init__(log)
        self.kept = kept

    def coordinator(self) -> OperatorCoordinator:
        return Kept(self.kept)


@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        (None, "of the coordinator of 'op' returned NoneType; it returns a table"),
        (pa.table({"m": [1]}), r"of the coordinator of 'op' returned columns \['m'\]; its columns are \['n'\]"),
        (pa.table({"n": ["x"]}), "of the coordinator of 'op' returned other types than declared"),
    ],
)
def test_a_coordinator_that_keeps_what_it_has_not_declared_fails_the_snapshot_with_a_sentence(
    kept: Any, sentence: str
) -> None:
    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)], endless=True), uid="in").apply(Keeping(bench.log, kept), uid="op", chain=False)
    run = bench.begin(flow)
    with pytest.raises(RunDiscarded, match=sentence):
        bench.checkpoint(run)


class Returning(Out):
    """A sink whose commit returns what the test says."""

    returned: Any = None

    def commit(self, permit: CommitPermit, committables: pa.Table) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [[1], pa.table({"q": [1]})])
def test_a_commit_that_returns_what_is_no_committable_fails_with_a_sentence(returned: Any) -> None:
    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    sink = Returning(bench.log)
    sink.returned = returned
    flow.source(Tap([rows(1)]), uid="in").apply(sink, uid="out", chain=False)
    with pytest.raises(JobFailed, match=r"commit of 'out' failed: .*it returned .* not rows of what it was given"):
        bench.run(flow)


def test_what_is_no_source_and_no_operator_is_refused_where_it_is_written() -> None:
    flow = Dataflow("job")
    wrong: Any = Tap
    with pytest.raises(InvalidInput, match=r"source 'in' is .*Tap.*\. Give an instance of a Source"):
        flow.source(wrong, uid="in")
    stream = flow.source(Tap([rows(1)]), uid="in")
    wrong = Told
    with pytest.raises(InvalidInput, match=r"operator 'op' is .*Told.*\. Give an instance of an Operator"):
        stream.apply(wrong, uid="op")


class Dealing(Tap):
    """A source that reads, or deals out, what it should not."""

    def __init__(self, *, split: object = None, chunk: object = None) -> None:
        super().__init__([rows(1)])
        self.split, self.chunk = split, chunk

    def enumerator(self) -> SplitEnumerator:
        enumerator = super().enumerator()
        if self.split is not None:
            enumerator.next_split = lambda *_: self.split  # type: ignore[method-assign, assignment]
        return enumerator

    def read(self, split: Split, context: Any) -> Any:
        return super().read(split, context) if self.chunk is None else iter([self.chunk])


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Dealing(split="x"), "source 'in' failed: next_split returned str; it returns a Split or NoSplit"),
        (Dealing(chunk=rows(1)), "read of source 'in' gave RecordBatch; it gives a Chunk"),
    ],
)
def test_a_source_that_gives_something_else_fails_with_a_sentence_that_names_it(source: Tap, sentence: str) -> None:
    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    flow.source(source, uid="in").apply(Told(bench.log), uid="op", chain=False)
    with pytest.raises(JobFailed, match=sentence):
        bench.run(flow)


def test_the_state_of_a_task_that_has_ended_is_not_held_while_the_job_goes_on() -> None:
    bench = Bench()
    flow = Dataflow("job")
    flow.source(Tap([rows(1)]), uid="table").key_by("key").apply(Count(bench.log), uid="count", chain=False)
    flow.source(Tap([rows(2)], endless=True), uid="stream").apply(Told(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    count = run.tasks[TaskId("count", 0)]
    state = weakref.ref(count.operators)
    until(run, lambda: count.task.state.value == "waiting")
    bench.checkpoint(run)
    until(run, lambda: count.gone)
    gc.collect()
    assert state() is None
    bench.checkpoint(run)
    assert bench.newest.graph.operator("count").status == "fully_finished"


class WithoutProcess(Operator):
    """Forgets to override it."""


class WithoutCommit(TwoPhaseCommitSink):
    """Forgets to override it."""

    committable_columns = pa.schema([("n", pa.int64())])

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        """Nothing."""

    def prepare_commit(self, prepared: Prepared) -> None:
        """Nothing."""


@pytest.mark.parametrize(("what", "hook"), [(WithoutProcess, "process"), (WithoutCommit, "commit")])
def test_an_operator_without_a_hook_that_it_must_have_is_refused_and_does_not_drop_everything(
    what: Any, hook: str
) -> None:
    with pytest.raises(TypeError, match=f"abstract method '?{hook}"):
        what()


def begin_barrier(run: LocalRun) -> None:
    """Let a checkpoint begin, or what the driver has to do first be done."""
    run._driver.inbox.append(CheckpointDue())
    while run._driver.inbox:
        run._driver.step()


def give_up_barrier(run: LocalRun, number: int) -> None:
    run._driver.inbox.append(TimedOut(number))
    while run._driver.inbox:
        run._driver.step()


def open_mail(worker: Worker, count: int | None = None) -> None:
    """Let a task open so many of its letters, or all of them, and do nothing else."""
    for _ in range(len(worker.mailbox) if count is None else count):
        worker.step(random.Random(0))


def test_a_late_barrier_that_was_given_up_does_not_end_the_log_of_an_unaligned_one() -> None:
    bench = Bench(unaligned=True, tolerable_failures=3, checkpoint_interval_us=None)
    out = Out(bench.log)

    def flow() -> Dataflow:
        made = Dataflow("job")
        quick, slow = (
            made.source(Tap([rows(10 * first + n) for n in range(3)], endless=True), uid=f"in{first}")
            .rebalance()
            .apply(Told(bench.log), uid=f"mid{first}", chain=False)
            .rebalance()
            for first in (0, 1)
        )
        made.apply(Told(bench.log), quick, slow, uid="op", chain=False).apply(out, uid="out", chain=False)
        return made

    run = bench.begin(flow())
    quick, slow, quick_mid, slow_mid, op = (run.tasks[TaskId(uid, 0)] for uid in ("in0", "in1", "mid0", "mid1", "op"))
    while slow.rows < 3:
        bench.clock.wait_until(bench.clock.now_us() + 10_000)
        slow.step(random.Random(0))
        while run._driver.inbox:
            run._driver.step()
    begin_barrier(run)
    open_mail(slow)
    give_up_barrier(run, 1)
    begin_barrier(run)
    for task in (quick, quick_mid, op):
        open_mail(task)
    assert bench.log.of("op/0") == ["open", "snapshot"]
    # It hears of the first barrier and of its end, and then passes on what it has.
    open_mail(slow_mid)
    assert bench.log.of("mid1/0", "process") == []
    for _ in range(3):
        slow_mid.step(random.Random(0))
    assert bench.log.of("mid1/0", "process") == [f"process 0: {n}" for n in (10, 11, 12)]
    while bench.newest_id == 0:
        for task in run.tasks.values():
            open_mail(task)
        for name in ("op", "out"):
            worker = run.tasks[TaskId(name, 0)]
            if name == "out" and worker.ready(bench.clock.now_us()):
                worker.step(random.Random(0))
        while run._driver.inbox:
            run._driver.step()
    assert [row["value"] for row in bench.state("op", "in-flight mid1->op.1")] == [10, 11, 12]


class Speaking(Kept):
    """Says a word while it is snapshotted, and the same when it is told one."""

    def __init__(self) -> None:
        super().__init__(pa.table({"n": [1]}))

    def open(self, send: Sender) -> None:
        self.send = send

    def snapshot(self) -> Any:
        self.send(0, b"pending")
        return super().snapshot()


class Listening(Told):
    """An operator with such a coordinator; ``opened`` counts them."""

    opened = 0

    def coordinator(self) -> OperatorCoordinator:
        found = Speaking()
        begin = found.open

        def counted(send: Sender) -> None:
            self.opened += 1
            begin(send)

        found.open = counted  # type: ignore[method-assign]
        return found


def test_what_a_coordinator_said_behind_a_barrier_that_was_given_up_is_delivered_then_and_in_order() -> None:
    bench = Bench(tolerable_failures=3, checkpoint_interval_us=None)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)], endless=True), uid="in").apply(Listening(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    settle(run, 20)
    begin_barrier(run)
    op = run.tasks[TaskId("op", 0)]
    open_mail(op)
    assert bench.log.of("op/0", "receive") == []
    give_up_barrier(run, 1)
    run._driver.coordinators["op"].send(0, b"after")  # type: ignore[attr-defined]
    settle(run, 20)
    assert bench.log.of("op/0", "snapshot", "receive") == ["receive pending", "receive after"]


class Learning(Listening):
    """Keeps what it is told."""

    def states(self, *inputs: pa.Schema) -> list[SplitList]:
        return [SplitList("told", {"word": pa.string()})]

    def receive(self, message: bytes) -> None:
        self.context.entries("told").append(pa.record_batch({"word": [message.decode()]}))


def test_what_a_coordinator_said_before_its_snapshot_is_in_that_of_whoever_it_told() -> None:
    bench = Bench(checkpoint_interval_us=None)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)], endless=True), uid="in").apply(Learning(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    settle(run, 20)
    run._driver.coordinators["op"].send(0, b"before")  # type: ignore[attr-defined]
    begin_barrier(run)
    until(run, lambda: run.published == 1)
    assert [row["word"] for row in bench.state("op", "told")] == ["before"]
    settle(run, 20)
    begin_barrier(run)
    until(run, lambda: run.published == 2)
    assert [row["word"] for row in bench.state("op", "told")] == ["before", "pending"]


def test_the_coordinator_of_an_operator_that_has_finished_is_not_begun_again() -> None:
    bench = Bench()
    op = Listening(bench.log)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)]), uid="table").apply(op, uid="op", chain=False)
    flow.source(Tap([rows(2)], endless=True), uid="stream").apply(Told(bench.log), uid="other", chain=False)
    run = bench.begin(flow)
    while bench.newest_id == 0 or bench.newest.graph.operator("op").status != "fully_finished":
        bench.checkpoint(run)
    assert op.opened == 1
    run = bench.begin(flow)
    bench.checkpoint(run)
    assert op.opened == 1
    assert set(run._driver.enumerators) == {"stream"}


class Waiting(SplitEnumerator):
    """Deals one split, and says for ever that there may be others."""

    columns = pa.schema([("n", pa.int64())])

    def __init__(self) -> None:
        self.dealt = False

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        dealt, self.dealt = self.dealt, True
        return NoSplit.LATER if dealt else Split("split-0", b"0")

    def snapshot(self) -> pa.Table:
        return pa.table({"n": pa.array([], pa.int64())})

    def restore(self, rows: pa.Table) -> None:
        """Nothing."""


class Awaited(Tap):
    """Holds as many splits as it is given."""

    def enumerator(self) -> SplitEnumerator:
        return Waiting()


def test_time_goes_on_for_a_reader_that_may_be_given_further_splits_some_day() -> None:
    bench = Bench()
    flow = Dataflow("job")
    source = Awaited([rows(1, at=5), rows(2, at=7)], endless=True)
    flow.source(source, uid="in", event_time="at").apply(Told(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    settle(run, 60)
    assert run.tasks[TaskId("op", 0)].watermark == 7


def test_who_asks_for_a_stop_when_all_that_is_left_is_to_leave_is_told_that_the_job_has_finished() -> None:
    bench = Bench(requests_every_us=None)
    flow, _ = counting(bench, Tap([rows(1)]))
    run = bench.begin(flow)
    until(run, lambda: bench.newest_id > 0 and run.in_flight is None)
    request = bench.store.request_stop(StopMode.DRAIN)
    run._stop_service.request_stop(request.id, request.mode, request.savepoint)
    outcome = to_end(run)
    assert outcome.stop is None
    answer = bench.store.stop_answer(request.id)
    assert answer is not None
    assert (answer.outcome, answer.message) == (StopOutcome.FINISHED, outcome.sentence)
