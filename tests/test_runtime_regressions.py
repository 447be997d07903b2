"""What went wrong once in the runtime, and must not again: one test for each, named by what holds now."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from backends.dataflow.api import Dataflow, OperatorCoordinator, Split, SplitEnumerator
from backends.dataflow.events import TaskId
from backends.local import JobFailed, LocalRuntime, RunDiscarded
from backends.local.worker import Worker
from stateformat.checkpoint import ReadTask
from stateformat.errors import InvalidInput
from stateformat.model import Mode
from stateformat.publication import CommitPermit
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
    with pytest.raises(InvalidInput, match=r"source 'in' is .*Tap.*; give an instance of a Source"):
        flow.source(wrong, uid="in")
    stream = flow.source(Tap([rows(1)]), uid="in")
    wrong = Told
    with pytest.raises(InvalidInput, match=r"operator 'op' is .*Told.*; give an instance of an Operator"):
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
