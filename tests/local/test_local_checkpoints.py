"""Checkpoints that come to nothing: who ended too early, what failed, what counts as a failure of
the job.
"""

from __future__ import annotations

import logging
import random

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, Descriptor, UnionList, events as ev
from stateformat.backends.dataflow.chain.errors import OperatorError
from stateformat.backends.local import JobFailed, LocalRun, RunDiscarded
from stateformat.model import StopMode
from tests.local_jobs import Bench, Boom, Line, Out, Tap, Told, rows, settle, state_of, to_end, until, until_told

Caplog = pytest.LogCaptureFixture


def aborted(caplog: Caplog) -> list[str]:
    """Why checkpoints were aborted."""
    told = [record.getMessage() for record in caplog.records]
    return [line.split(": ", 1)[1] for line in told if line.startswith("aborted the checkpoint")]


@pytest.fixture(autouse=True)
def _all_of_the_log(caplog: Caplog) -> None:
    caplog.set_level(logging.INFO)


def fail_one(line: Line, run: LocalRun) -> None:
    line.bench.due(run)
    until(run, lambda: run.in_flight is None)


def test_a_task_that_ends_between_the_plan_and_its_trigger_voids_the_checkpoint_and_that_is_no_failure(
    caplog: Caplog,
) -> None:
    bench = Bench(tolerable_failures=0)
    flow, out = Dataflow("job"), Out(bench.log)
    slow = Tap([rows(2)], shut=True)
    flow.source(Tap([rows(1)]), uid="fast").apply(out, uid="out", chain=False)
    flow.source(slow, uid="slow").apply(Told(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "out") == "waiting")
    bench.due(run)
    fast = run.tasks[ev.TaskId("fast", 0)]
    until(run, lambda: run.in_flight is None and fast.mailbox)
    # The next checkpoint is due before the coordinator hears that the source has left.
    bench.clock.wait_until(bench.clock.now_us() + 2 * bench.options["checkpoint_interval_us"])
    run.step()
    if not fast.gone:
        fast.step(random.Random(0))
    assert fast.gone
    until(run, lambda: aborted(caplog))
    assert aborted(caplog) == ["fast[0] ended before it had acknowledged"]
    assert run.outcome is None
    settle(run)
    bench.checkpoint(run)
    assert bench.status("fast") == ([0], [])
    slow.let(0)
    to_end(run)
    assert out.seen == [1]


def test_a_job_whose_tasks_end_while_checkpoints_begin_comes_to_its_end_in_any_order(caplog: Caplog) -> None:
    for seed in range(10):
        splits = [rows(n) for n in range(6)], [rows(10)]
        line = Line(*splits, parallelism=2, seed=seed, checkpoint_interval_us=10_000, max_restarts=0)
        line.run()
        assert line.out.seen == [0, 1, 2, 3, 4, 5, 10]
    reasons = aborted(caplog)
    assert reasons, "none of the seeds has tried it"
    assert all(reason.endswith("ended before it had acknowledged") for reason in reasons)


@pytest.mark.parametrize("hook", ["out/0 prepare", "op/0 snapshot"])
def test_a_snapshot_that_fails_is_a_failure_of_the_job(hook: str) -> None:
    line = Line(shut=True, tolerable_failures=0)
    run = line.begin()
    line.log.failing.append(hook)
    line.bench.due(run)
    with pytest.raises(RunDiscarded, match=r"the snapshot of (op|out)\[0\] failed: .*Boom") as raised:
        settle(run)
    assert raised.value.counted
    assert line.bench.newest_id == 0


def test_tolerated_failures_are_counted_in_a_row(caplog: Caplog) -> None:
    line = Line(endless=True, tolerable_failures=2)
    run = line.begin()
    until_told(run, line.log, "out/0 process 0: 1")
    for successes in range(3):
        for _ in range(2):
            line.log.failing.append("op/0 snapshot")
            fail_one(line, run)
        line.bench.checkpoint(run)
        assert line.bench.newest_id == successes + 1
    line.log.failing += ["op/0 snapshot"] * 3
    fail_one(line, run)
    fail_one(line, run)
    line.bench.due(run)
    with pytest.raises(RunDiscarded):
        settle(run)
    assert len(aborted(caplog)) == 8


def test_what_a_sink_prepared_for_a_checkpoint_that_came_to_nothing_is_committed_with_the_next() -> None:
    line = Line([rows(1), rows(2), rows(3)], shut=True, tolerable_failures=9)
    run = line.begin()
    for number in (1, 2):
        line.let(run, number)
        line.bench.storage.down = True
        fail_one(line, run)
        line.bench.storage.down = False
    assert line.log.of("out/0", "prepare") == ["prepare 1", "prepare 1"]
    line.let(run, 3)
    line.bench.checkpoint(run)
    assert line.out.seen == [1, 2, 3]
    # Each under what it was prepared under: three attempts at checkpoint 1.
    assert len({attempt for _, attempt, _ in line.out.committed}) == 3
    assert {checkpoint for checkpoint, _, _ in line.out.committed} == {1}
    line.tap.let(0)
    to_end(run)
    assert line.out.seen == [1, 2, 3]


def test_a_checkpoint_that_takes_too_long_is_aborted_and_counts(caplog: Caplog) -> None:
    line = Line(endless=True, tolerable_failures=1, timeout_us=5_000_000)
    run = line.begin()
    settle(run)
    for _ in range(2):
        line.bench.due(run)
        line.bench.clock.wait_until(line.bench.clock.now_us() + 5_000_001)
        if not aborted(caplog):
            until(run, lambda: run.in_flight is None)
            assert aborted(caplog) == ["barrier 1 took longer than allowed"]
    with pytest.raises(RunDiscarded, match="barrier 2 took longer than allowed"):
        settle(run)
    assert line.bench.newest_id == 0


def test_a_checkpoint_that_was_published_does_not_time_out() -> None:
    line = Line(shut=True, timeout_us=5_000_000)
    run = line.begin()
    line.bench.due(run)
    until(run, lambda: line.bench.newest_id == 1)
    line.bench.clock.wait_until(line.bench.clock.now_us() + 5_000_001)
    settle(run)
    line.tap.let(0)
    to_end(run)
    assert line.out.seen == [1]


def test_a_checkpoint_is_due_after_so_many_rows() -> None:
    line = Line([rows(n) for n in range(50)], checkpoint_interval_us=None, checkpoint_rows=10)
    run = line.begin()
    newest, read = 0, [0]
    while run.step():
        if run.in_flight is not None and run.in_flight.barrier.number > newest:
            newest = run.in_flight.barrier.number
            read.append(run.rows_read)
    assert len(read) >= 4
    # The last is the final one. Each begins a little after it is due.
    assert all(count >= 10 * turn for turn, count in enumerate(read[:-1]))
    assert line.out.seen == list(range(50))


def test_a_checkpoint_is_due_after_so_much_time_since_the_last_was() -> None:
    line = Line(endless=True, checkpoint_interval_us=100_000)
    run = line.begin()
    until(run, lambda: line.bench.clock.now_us() > 1_050_000)
    assert 8 <= line.bench.newest_id <= 10


class Union(Told):
    """Has union state."""

    def states(self, *inputs: pa.Schema) -> list[Descriptor]:
        return [UnionList("all", {"n": pa.int64()})]


def test_union_state_that_may_prevent_checkpoints_is_warned_of_when_the_job_starts() -> None:
    run = Line([rows(1)], [rows(2)], op=Union, shut=True, parallelism=2).begin()
    (warning,) = run.progress().warnings
    assert warning.startswith("operator 'op' keeps union state and its subtasks may end long after one another")
    assert run.progress().warnings == ()


def test_no_checkpoint_is_taken_of_union_state_that_has_ended_in_part_and_the_third_refusal_warns() -> None:
    line = Line([rows(1)], [rows(2)], op=Union, shut=True, parallelism=2, tolerable_failures=0)
    bench, run = line.bench, line.begin()
    run.progress()
    bench.checkpoint(run)
    line.tap.let(0)
    until(run, lambda: state_of(run, "op", 0) == "waiting")
    settle(run)
    warned: dict[int, str] = {}
    for number in range(1, 13):
        bench.clock.wait_until(bench.clock.now_us() + bench.options["checkpoint_interval_us"])
        settle(run, 60)
        if warnings := run.progress().warnings:
            warned[number] = warnings[0]
    assert bench.newest_id == 1
    assert list(warned) == [3, 6, 12]
    assert warned[3].startswith("3 checkpoints in a row could not be taken, the last because some subtasks of operator")
    assert state_of(run, "op", 1) == "running"
    line.tap.let(1)
    to_end(run)
    assert line.out.seen == [1, 2]
    assert bench.newest_id == 2


@pytest.mark.parametrize("mode", list(StopMode))
def test_a_stop_of_union_state_that_has_ended_in_part_is_refused_or_drains_it(mode: StopMode) -> None:
    line = Line([rows(1)], [rows(2), rows(3)], op=Union, shut=True, parallelism=2, requests_every_us=None)
    run = line.begin()
    line.tap.let(0)
    line.tap.let(1, 1)
    until(run, lambda: state_of(run, "op", 0) == "waiting" and run.rows_read == 2)
    settle(run)
    run.progress()
    run.request_stop(mode)
    if mode is StopMode.NO_DRAIN:
        settle(run)
        (warning,) = run.progress().warnings
        assert warning.startswith("the stop has failed, and the job goes on: some subtasks of operator 'op'")
        line.tap.let(1)
    assert (to_end(run).stop is None) == (mode is StopMode.NO_DRAIN)
    assert line.out.seen == ([1, 2, 3] if mode is StopMode.NO_DRAIN else [1, 2])


def test_a_failed_publication_is_tolerated_and_the_job_goes_on() -> None:
    line = Line(shut=True, tolerable_failures=1)
    run = line.begin()
    for _ in range(3):
        line.bench.storage.order("write", "segments/", "refuse")
        line.bench.storage.order("write", "manifests/", "refuse")
        fail_one(line, run)
        line.bench.storage.orders.clear()
        line.bench.checkpoint(run)
    line.tap.let(0)
    to_end(run)
    assert line.out.seen == [1]


def test_too_many_failures_fail_the_job_with_the_last_as_the_cause() -> None:
    line = Line(max_restarts=2)
    line.log.failing += ["op/0 open", "op/0 process 0: 1", "op/0 finish"]
    sentence = r"job 'job' failed 3 times within a few checkpoints, and 2 restarts are allowed; .*'op'.*Boom"
    with pytest.raises(JobFailed, match=sentence) as raised:
        line.run()
    assert isinstance(raised.value.__cause__, OperatorError)
    assert isinstance(raised.value.__cause__.__cause__, Boom)


def test_a_job_that_fails_less_often_starts_again_and_says_how_often(caplog: Caplog) -> None:
    line = Line([rows(1)], [rows(2)], max_restarts=2)
    line.log.failing += ["op/0 process 0: 1", "op/0 finish"]
    assert line.run().restarts == 2
    assert line.out.seen == [1, 2]
    assert caplog.text.count("job 'job' starts again from its newest checkpoint: ") == 2


@pytest.mark.parametrize(("rows_apart", "fails"), [(50, False), (3, True)])
def test_failures_with_ten_checkpoints_in_between_do_not_add_up_and_with_one_they_do(
    rows_apart: int, fails: bool
) -> None:
    line = Line([rows(n) for n in range(130)], max_restarts=1, checkpoint_rows=1, checkpoint_interval_us=None)
    line.log.failing += [f"op/0 process 0: {10 + rows_apart * n}" for n in range(3)]
    if fails:
        with pytest.raises(JobFailed, match="failed 2 times within a few checkpoints"):
            line.run()
        return
    assert line.run().restarts == 3
    assert line.log.failing == []
    assert line.out.seen == list(range(130))


@pytest.mark.parametrize(("failing", "opened"), [("op/0 process 0: 2", "op/0"), ("out/1 open", "op/1")])
def test_operators_that_were_opened_are_closed_before_the_next_run_opens(failing: str, opened: str) -> None:
    line = Line([rows(1), rows(2)], parallelism=2)
    line.log.failing += [failing, f"{opened} close"]
    assert line.run().restarts == 1
    assert line.log.failing == [], "one that raises while it is closed is closed too"
    for who in (opened, "op/0", "out/0"):
        assert line.log.of(who, "open", "close") == ["open", "close", "open", "close"]
    assert line.out.seen == [1, 2]
