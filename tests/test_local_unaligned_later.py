"""Barriers that begin aligned and overtake after a time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.dataflow import Dataflow
from stateformat.backends.dataflow.events import CheckpointDue, TaskId
from stateformat.backends.dataflow.operators import Filter, Map
from stateformat.backends.local import LocalRun, LocalRuntime
from stateformat.backends.runtime import Worker
from stateformat.errors import InvalidInput
from tests.local_jobs import INTERVAL_US, ROWS, Bench, Count, Out, Tap, Told, rows, settle, state_of, to_end, until
from tests.test_local_unaligned import Job, in_flight, step_all

AFTER_US = 50_000


def bench_of(**options: Any) -> Bench:
    """A bench whose barriers overtake after ``AFTER_US``."""
    return Bench(**{"unaligned": True, "unaligned_after_us": AFTER_US, **options})


def begin(bench: Bench, run: LocalRun) -> None:
    """Let a checkpoint begin; nobody else does anything."""
    bench.clock.wait_until(bench.clock.now_us() + INTERVAL_US)
    run._driver.inbox.append(CheckpointDue())
    run._driver.step()
    assert run.in_flight is not None


def wait(bench: Bench, run: LocalRun, *idle: Worker) -> None:
    """Let the checkpoint be published while these tasks take nothing of their channels but their mail."""
    before = bench.newest_id
    for _ in range(300):
        if bench.newest_id > before and run.in_flight is None:
            return
        run._begin_what_is_due()
        step_all(bench, run, [task for task in run.tasks.values() if task not in idle])
    raise AssertionError(run.describe())


@pytest.mark.parametrize("how", ["hash", "rebalance"])
@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_barrier_that_lies_behind_data_overtakes_when_its_time_has_come_and_not_before(
    how: str, parallelism: int
) -> None:
    bench = bench_of()
    job = Job(bench, how=how)
    run = job.filled()
    op = run.tasks[TaskId("op", 0)]
    begin(bench, run)
    begun_us = bench.clock.now_us()
    wait(bench, run, op)
    assert bench.clock.now_us() - begun_us >= AFTER_US
    assert bench.log.of("op/0") == ["open", "snapshot"]
    assert [row["value"] for row in sorted(in_flight(bench), key=lambda row: row["_seq"])] == list(range(6))
    job.parallelism = (1, parallelism)
    to_end(bench.begin(job.flow()))
    assert job.out.seen == list(range(6))


def test_a_barrier_that_comes_through_in_time_overtakes_nothing() -> None:
    bench = bench_of(unaligned_after_us=INTERVAL_US // 2)
    run = Job(bench).filled()
    bench.checkpoint(run)
    assert in_flight(bench) == []
    calls = bench.log.of("op/0")
    assert calls[: calls.index("snapshot")] == ["open", *(f"process 0: {n}" for n in range(6))]


@pytest.mark.parametrize("how", ["broadcast", "rescale"])
def test_other_edges_are_never_overtaken(how: str) -> None:
    bench = bench_of()
    run = Job(bench, how=how).filled()
    bench.checkpoint(run)
    assert in_flight(bench) == []


def test_a_task_that_has_begun_to_align_saves_what_lies_in_the_channels_that_it_waits_for() -> None:
    bench = bench_of()
    flow, out = Dataflow("job", parallelism=1), Out(bench.log)
    quick, slow = Tap([rows(0)], shut=True), Tap([rows(n) for n in range(1, 6)], shut=True)
    one = flow.source(quick, uid="quick").key_by("key")
    two = flow.source(slow, uid="slow").key_by("key")
    one.apply(Count(bench.log), two, uid="op").rebalance().apply(out, uid="out")
    run = bench.begin(flow)
    op = run.tasks[TaskId("op", 0)]
    slow.let(0, 5)
    while run.tasks[TaskId("slow", 0)].rows < 5:
        step_all(bench, run, [run.tasks[TaskId("slow", 0)]])
    begin(bench, run)
    (channel,) = [channel for channel in op.inputs if channel.edge == "quick->op.0"]
    while not op.inputs[channel].elements:
        step_all(bench, run, [])
    while not op.task.is_blocked(channel):  # Now it aligns, and of the other channel it takes one batch at most.
        step_all(bench, run, [op])
    took = len(bench.log.of("op/0", "process"))
    assert took < 5
    wait(bench, run, op)
    assert len(in_flight(bench, "slow->op.1")) == 5 - took
    assert in_flight(bench, "quick->op.0") == []
    quick.let(0)
    slow.let(0)
    to_end(bench.begin(flow, parallelism=2))
    assert out.seen == [1, 1, 2, 2]


def test_a_task_whose_inputs_have_ended_in_part_saves_what_lies_in_the_others() -> None:
    bench = bench_of()
    flow, out = Dataflow("job"), Out(bench.log)
    fast, slow = Tap([rows(1), rows(2)]), Tap([rows(3), rows(6)], shut=True)
    one = flow.source(fast, uid="fast").key_by("key")
    two = flow.source(slow, uid="slow").key_by("key")
    one.apply(Count(bench.log), two, uid="op").rebalance().apply(out, uid="out")
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "fast") == "waiting")
    bench.checkpoint(run)
    until(run, lambda: run.tasks[TaskId("fast", 0)].gone)
    slow.let(0, 2)
    while run.tasks[TaskId("slow", 0)].rows < 2:
        step_all(bench, run, [run.tasks[TaskId("slow", 0)]])
    begin(bench, run)
    wait(bench, run, run.tasks[TaskId("op", 0)])
    assert bench.status("fast") == ([0], [])
    assert {row["value"] for row in in_flight(bench, "slow->op.1")} == {3, 6}
    slow.let(0)
    to_end(bench.begin(flow))
    assert out.seen == [1, 1, 2]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_direct_trigger_waits_for_what_lies_in_the_channels_and_saves_it_when_its_time_has_come(
    parallelism: int,
) -> None:
    # The reader is gone while the second of its consumers has taken nothing: told so by hand, as an executor may where data is
    # acknowledged on receipt.
    bench = bench_of()
    job = Job(bench, how="hash")
    run = job.filled(ended=True)
    op, source = run.tasks[TaskId("op", 0)], run.tasks[TaskId("in", 0)]
    begin(bench, run)
    wait(bench, run, op)
    assert bench.status("in") == ([], [0])
    assert len(in_flight(bench)) == 6
    (channel,) = op.inputs
    run.confirm(channel)
    while not source.gone:
        step_all(bench, run, [source])
    begin(bench, run)
    assert run.in_flight is not None
    assert set(run.in_flight.plan.trigger) == {TaskId("op", 0)}
    wait(bench, run, op)
    assert bench.status("in") == ([0], [])
    assert sorted(row["value"] for row in in_flight(bench)) == list(range(6))
    assert bench.log.of("op/0", "process") == []
    job.parallelism = (1, parallelism)
    to_end(bench.begin(job.flow()))
    assert job.out.seen == list(range(6))


@pytest.mark.parametrize("seed", range(6))
def test_a_job_that_is_killed_anywhere_comes_to_what_an_aligned_one_does(seed: int) -> None:
    after_us = (0, 2_000, 8_000)[seed % 3]
    bench = Bench(seed=seed, unaligned=True, unaligned_after_us=after_us, checkpoint_interval_us=25_000)
    splits = [[rows(n, n + 1) for n in range(start, 80, 4)] for start in (0, 2)]
    job = Job(bench, *splits, how="rebalance" if seed % 2 else "hash", parallelism=(2, 2))
    for kill in range(4):
        run = bench.begin(job.flow(), seed=seed + kill)
        settle(run, 40 + 30 * kill)
        job.parallelism = (1 + (kill + seed) % 3, 1 + kill % 3)
    bench.run(job.flow())
    assert job.out.seen == list(range(80))


@pytest.mark.parametrize("seed", range(4))
def test_a_loop_whose_barriers_overtake_late_turns_and_ends(seed: int) -> None:
    bench = Bench(seed=seed, unaligned=True, unaligned_after_us=(0, 3_000)[seed % 2], checkpoint_interval_us=15_000)
    flow, out = Dataflow("loop", parallelism=2), Out(bench.log)
    loop = flow.loop(ROWS)

    def less(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.set_column(2, ROWS.field("at"), pc.subtract(batch["at"], 1))

    head = flow.source(Tap([rows(n, at=3) for n in range(12)]), uid="in", parallelism=1).key_by("key")
    body = head.apply(Told(bench.log), loop.key_by("key"), uid="head").rebalance().apply(Map(less), uid="body")
    loop.close(body.apply(Filter(lambda batch: pc.greater(batch["at"], 0)), uid="again"))
    body.apply(Filter(lambda batch: pc.less_equal(batch["at"], 0)), uid="done").apply(out, uid="out", parallelism=1)
    for kill in range(3):
        settle(bench.begin(flow, seed=seed + kill), 60 + 40 * kill)
    bench.run(flow)
    assert out.seen == list(range(12))


def test_the_option_needs_an_unaligned_job() -> None:
    store = Bench().store
    with pytest.raises(InvalidInput, match="unaligned_after_us is 5, but the job is aligned"):
        LocalRuntime(store, unaligned_after_us=5)
    with pytest.raises(InvalidInput, match="unaligned_after_us is -1; it is a whole number, at least 0"):
        LocalRuntime(store, unaligned=True, unaligned_after_us=-1)
