"""Checkpoints that come to nothing: who ended too early, who failed, what counts as a failure of the job, and what is refused."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, Descriptor, UnionList
from stateformat.backends.dataflow.chain import OperatorError
from stateformat.backends.dataflow.events import TaskId
from stateformat.backends.local import JobFailed, RunDiscarded
from stateformat.model import StopMode
from tests.local_jobs import Bench, Boom, Out, Tap, Told, rows, settle, state_of, to_end, until, until_told

Caplog = pytest.LogCaptureFixture


def one_sink(bench: Bench, tap: Tap) -> tuple[Dataflow, Out]:
    flow, out = Dataflow("job"), Out(bench.log)
    flow.source(tap, uid="in").apply(Told(bench.log), uid="op", chain=False).apply(out, uid="out", chain=False)
    return flow, out


def given_up(caplog: Caplog) -> list[str]:
    """Why checkpoints were given up."""
    told = [record.getMessage() for record in caplog.records]
    return [line.split(": ", 1)[1] for line in told if line.startswith("aborted the checkpoint")]


def test_a_task_that_ends_between_the_plan_and_its_trigger_makes_the_checkpoint_void_and_that_is_no_failure(
    caplog: Caplog,
) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(tolerable_failures=0)
    flow = Dataflow("job")
    out = Out(bench.log)
    fast, slow = Tap([rows(1)]), Tap([rows(2)], shut=True)
    flow.source(fast, uid="fast").apply(out, uid="out", chain=False)
    flow.source(slow, uid="slow").apply(Told(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "out") == "waiting")
    bench.due(run)
    fast_task = run.tasks[TaskId("fast", 0)]
    until(run, lambda: run.in_flight is None and fast_task.mailbox)
    # The next checkpoint is due before the coordinator hears that the source has left.
    bench.clock.wait_until(bench.clock.now_us() + 2 * bench.options["checkpoint_interval_us"])
    run.step()
    if not fast_task.gone:
        fast_task.step(random.Random(0))
    assert fast_task.gone
    until(run, lambda: given_up(caplog))
    assert given_up(caplog) == ["fast[0] ended before it had acknowledged"]
    assert run.outcome is None
    settle(run)
    bench.checkpoint(run)
    assert bench.status("fast") == ([0], [])
    slow.let(0)
    to_end(run)
    assert out.seen == [1]


def test_whatever_the_order_a_job_whose_tasks_end_while_checkpoints_begin_comes_to_its_end(caplog: Caplog) -> None:
    caplog.set_level(logging.INFO)
    reasons: list[str] = []
    for seed in range(15):
        bench = Bench(seed=seed, parallelism=2, checkpoint_interval_us=10_000, max_restarts=0)
        flow, out = one_sink(bench, Tap([rows(n) for n in range(6)], [rows(10)]))
        bench.run(flow)
        assert out.seen == [0, 1, 2, 3, 4, 5, 10]
        reasons += given_up(caplog)
        caplog.clear()
    assert reasons, "none of the seeds has tried it"
    assert all(reason.endswith("ended before it had acknowledged") for reason in reasons)


@pytest.mark.parametrize("hook", ["out/0 prepare", "op/0 snapshot"])
def test_a_snapshot_that_fails_is_a_failure_of_the_job(hook: str) -> None:
    bench = Bench(tolerable_failures=0)
    tap = Tap([rows(1), rows(2)], shut=True)
    flow, _out = one_sink(bench, tap)
    run = bench.begin(flow)
    bench.log.failing.append(hook)
    bench.due(run)
    with pytest.raises(RunDiscarded, match=r"the snapshot of (op|out)\[0\] failed: .*Boom") as raised:
        settle(run)
    assert raised.value.counted
    assert bench.newest_id == 0


def test_tolerated_failures_are_counted_in_a_row(caplog: Caplog) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(tolerable_failures=2)
    flow, _ = one_sink(bench, Tap([rows(1)], endless=True))
    run = bench.begin(flow)
    until(run, lambda: "out/0 process 0: 1" in bench.log.calls)
    for successes in range(3):
        for _ in range(2):
            bench.log.failing.append("op/0 snapshot")
            bench.due(run)
            until(run, lambda: run.in_flight is None)
        bench.checkpoint(run)
        assert bench.newest_id == successes + 1
    bench.log.failing += ["op/0 snapshot"] * 3
    for _ in range(2):
        bench.due(run)
        until(run, lambda: run.in_flight is None)
    bench.due(run)
    with pytest.raises(RunDiscarded):
        settle(run)
    assert len(given_up(caplog)) == 8


def test_what_a_sink_prepared_for_a_checkpoint_that_came_to_nothing_is_committed_with_the_next() -> None:
    bench = Bench(tolerable_failures=9)
    tap = Tap([rows(1), rows(2), rows(3)], shut=True)
    flow, out = one_sink(bench, tap)
    run = bench.begin(flow)
    for number in (1, 2):
        tap.let(0, number)
        until_told(run, bench.log, f"out/0 process 0: {number}")
        bench.storage.down = True
        bench.due(run)
        until(run, lambda: run.in_flight is None)
        bench.storage.down = False
    assert bench.log.of("out/0", "prepare") == ["prepare 1", "prepare 1"]
    tap.let(0, 3)
    until(run, lambda: "out/0 process 0: 3" in bench.log.calls)
    bench.checkpoint(run)
    assert out.seen == [1, 2, 3]
    # Each under what it was prepared under: three attempts at checkpoint 1.
    assert len({attempt for _, attempt, _ in out.committed}) == 3
    assert {checkpoint for checkpoint, _, _ in out.committed} == {1}
    tap.let(0)
    to_end(run)
    assert out.seen == [1, 2, 3]


def test_a_checkpoint_that_takes_too_long_is_given_up_and_counts(caplog: Caplog) -> None:
    caplog.set_level(logging.INFO)
    bench = Bench(tolerable_failures=1, timeout_us=5_000_000)
    flow, _ = one_sink(bench, Tap([rows(1)], endless=True))
    run = bench.begin(flow)
    settle(run)
    for _ in range(2):
        bench.due(run)
        bench.clock.wait_until(bench.clock.now_us() + 5_000_001)
        if not given_up(caplog):
            until(run, lambda: run.in_flight is None)
            assert given_up(caplog) == ["barrier 1 took longer than allowed"]
    with pytest.raises(RunDiscarded, match="barrier 2 took longer than allowed"):
        settle(run)
    assert bench.newest_id == 0


def test_a_checkpoint_that_was_published_is_not_too_late_any_more() -> None:
    bench = Bench(timeout_us=5_000_000)
    tap = Tap([rows(1)], shut=True)
    flow, out = one_sink(bench, tap)
    run = bench.begin(flow)
    bench.due(run)
    until(run, lambda: bench.newest_id == 1)
    bench.clock.wait_until(bench.clock.now_us() + 5_000_001)
    settle(run)
    tap.let(0)
    to_end(run)
    assert out.seen == [1]


def test_a_checkpoint_is_due_after_so_many_rows() -> None:
    bench = Bench(checkpoint_interval_us=None, checkpoint_rows=10)
    flow, out = one_sink(bench, Tap([rows(n) for n in range(50)]))
    run = bench.begin(flow)
    newest, read = 0, [0]
    while run.step():
        if run.in_flight is not None and run.in_flight.barrier.number > newest:
            newest = run.in_flight.barrier.number
            read.append(run.rows_read)
    assert len(read) >= 4
    # It begins a little after it is due, and the next is due so many rows after this one was: the last is the final one.
    assert all(count >= 10 * turn for turn, count in enumerate(read[:-1]))
    assert out.seen == list(range(50))


def test_a_checkpoint_is_due_after_so_much_time_since_the_last_was() -> None:
    bench = Bench(checkpoint_interval_us=100_000)
    flow, _ = one_sink(bench, Tap([rows(1)], endless=True))
    run = bench.begin(flow)
    until(run, lambda: bench.clock.now_us() > 1_050_000)
    assert 8 <= bench.newest_id <= 10


# Union state -------------------------------------------------------------------------------------------------------------


class Union(Told):
    """Keeps union state."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [UnionList("all", {"n": pa.int64()})]


def with_union(bench: Bench, tap: Tap) -> tuple[Dataflow, Out]:
    flow, out = Dataflow("job", parallelism=2), Out(bench.log)
    flow.source(tap, uid="in").apply(Union(bench.log), uid="union", chain=False).apply(out, uid="out", chain=False)
    return flow, out


def test_union_state_that_may_keep_checkpoints_from_being_is_warned_of_when_the_job_starts() -> None:
    bench = Bench()
    flow, _ = with_union(bench, Tap([rows(1)], [rows(2)], shut=True))
    run = bench.begin(flow)
    (warning,) = run.progress().warnings
    assert warning.startswith("operator 'union' keeps union state and its subtasks may end long after one another")
    assert run.progress().warnings == ()


def test_no_checkpoint_is_taken_of_union_state_that_has_ended_in_part_and_the_third_refusal_warns() -> None:
    bench = Bench(tolerable_failures=0)
    tap = Tap([rows(1)], [rows(2)], shut=True)
    flow, out = with_union(bench, tap)
    run = bench.begin(flow)
    run.progress()
    bench.checkpoint(run)
    tap.let(0)
    until(run, lambda: state_of(run, "union", 0) == "waiting")
    settle(run)
    warned = []
    for _ in range(12):
        bench.clock.wait_until(bench.clock.now_us() + bench.options["checkpoint_interval_us"])
        settle(run, 60)
        warned.append(run.progress().warnings)
    assert bench.newest_id == 1
    told = {number: warnings[0] for number, warnings in enumerate(warned, 1) if warnings}
    assert list(told) == [3, 6, 12]
    assert told[3].startswith(
        "3 checkpoints in a row could not be taken, the last because some subtasks of operator 'union'"
    )
    assert state_of(run, "union", 1) == "running"
    tap.let(1)
    to_end(run)
    assert out.seen == [1, 2]
    assert bench.newest_id == 2


@pytest.mark.parametrize("mode", list(StopMode))
def test_a_stop_of_union_state_that_has_ended_in_part_is_refused_or_drains_it(mode: StopMode) -> None:
    bench = Bench(requests_every_us=None)
    tap = Tap([rows(1)], [rows(2), rows(3)], shut=True)
    flow, out = with_union(bench, tap)
    run = bench.begin(flow)
    tap.let(0)
    tap.let(1, 1)
    until(run, lambda: state_of(run, "union", 0) == "waiting" and run.rows_read == 2)
    settle(run)
    run.progress()
    run.request_stop(mode)
    if mode is StopMode.NO_DRAIN:
        settle(run)
        (warning,) = run.progress().warnings
        assert warning.startswith("the stop has failed, and the job goes on: some subtasks of operator 'union'")
        tap.let(1)
        assert to_end(run).stop is None
        assert out.seen == [1, 2, 3]
    else:
        assert to_end(run).stop is not None
        assert out.seen == [1, 2]


def test_a_failed_publication_is_tolerated_as_far_as_the_job_says_and_the_job_goes_on() -> None:
    bench = Bench(tolerable_failures=1)
    tap = Tap([rows(1)], shut=True)
    flow, out = one_sink(bench, tap)
    run = bench.begin(flow)
    for _ in range(3):
        bench.storage.order("write", "segments/", "refuse")
        bench.storage.order("write", "manifests/", "refuse")
        bench.due(run)
        until(run, lambda: run.in_flight is None)
        bench.storage.orders.clear()
        bench.checkpoint(run)
    tap.let(0)
    to_end(run)
    assert out.seen == [1]


def test_too_many_failures_fail_the_job_with_the_last_as_the_cause() -> None:
    bench = Bench(max_restarts=2)
    flow, _ = one_sink(bench, Tap([rows(1)]))
    bench.log.failing += ["op/0 open", "op/0 process 0: 1", "op/0 finish"]
    with pytest.raises(
        JobFailed,
        match=r"job 'job' failed 3 times within a few checkpoints, and 2 restarts are allowed; .*'op'.*Boom",
    ) as raised:
        bench.run(flow)
    assert isinstance(raised.value.__cause__, OperatorError)
    assert isinstance(raised.value.__cause__.__cause__, Boom)


def test_a_job_that_fails_less_often_starts_again_and_says_how_often() -> None:
    bench = Bench(max_restarts=2)
    flow, out = one_sink(bench, Tap([rows(1)], [rows(2)]))
    bench.log.failing += ["op/0 process 0: 1", "op/0 finish"]
    outcome = bench.run(flow)
    assert outcome.restarts == 2
    assert out.seen == [1, 2]


@pytest.mark.parametrize(("rows_apart", "fails"), [(150, False), (3, True)])
def test_failures_with_ten_checkpoints_in_between_do_not_add_up_and_with_one_they_do(
    rows_apart: int, fails: bool
) -> None:
    bench = Bench(max_restarts=1, checkpoint_rows=1, checkpoint_interval_us=None)
    flow, out = one_sink(bench, Tap([rows(n) for n in range(400)]))
    bench.log.failing += [f"op/0 process 0: {10 + rows_apart * n}" for n in range(3)]
    if fails:
        with pytest.raises(JobFailed, match="failed 2 times within a few checkpoints"):
            bench.run(flow)
        return
    outcome = bench.run(flow)
    assert bench.log.failing == []
    assert outcome.restarts == 3
    assert out.seen == list(range(400))
