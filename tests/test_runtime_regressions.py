"""What went wrong once in the runtime, and must not again: one test for each, named by what holds now."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import stateformat as sf
from backends.dataflow.api import Dataflow
from backends.local import LocalRuntime
from backends.local.worker import Worker
from stateformat.checkpoint import ReadTask
from stateformat.errors import InvalidInput
from stateformat.model import Mode
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
