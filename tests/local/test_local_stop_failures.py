"""What fails while a job is stopped: what comes of the stop, the job, and what was prepared."""

from __future__ import annotations

import pytest

from stateformat.backends.local import JobOutcome, LocalRun, LocalRuntime, RunDiscarded, VirtualClock
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointError
from stateformat.model import StopMode
from stateformat.requests import RequestOutcome
from tests import stores
from tests.local_jobs import rows, settle, to_end, until
from tests.local_stops import DRAIN, MODES, SUSPEND, UNDISTURBED, Job, flushed


def discarded(run: LocalRun) -> RunDiscarded:
    with pytest.raises(RunDiscarded) as raised:
        settle(run, 2000)
    return raised.value


def fail(job: Job, what: str) -> None:
    """Let a call of user code fail, or what publishing writes."""
    if what != "manifest":
        job.log.failing.append(what)
        return
    for verb, prefix in (("write", "manifests/"), ("write", "segments/"), ("create", "manifests/")):
        job.bench.storage.order(verb, prefix, "refuse")


@pytest.mark.parametrize(
    "what", ["op/0 finish", "op/0 end_input", "op/0 timers:", "out/0 finish", "out/0 prepare", "manifest"]
)
def test_what_fails_while_a_job_is_drained_discards_the_run_uncounted_and_the_job_starts_again(what: str) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    before = list(job.out.seen)
    fail(job, what)
    request = job.asked(run, DRAIN)
    error = discarded(run)
    assert not error.counted
    assert bench.newest_id == 1
    assert bench.newest.stop is None
    assert job.out.seen == before == [0, 1]
    outcome, message = job.answer(request)
    assert outcome is RequestOutcome.FAILED
    assert message.startswith("the stop has failed, and the job starts again from its newest checkpoint: ")
    bench.storage.orders.clear()
    job.tap.let(0)
    ended = job.run()
    assert (ended.stop, ended.restarts) == (None, 0)
    assert job.out.seen == UNDISTURBED


@pytest.mark.parametrize("what", ["op/0 snapshot", "out/0 prepare", "manifest"])
def test_what_fails_before_the_savepoint_of_a_stop_without_drain_leaves_the_job_as_if_nothing_had_been_asked(
    what: str,
) -> None:
    job = Job(tolerable_failures=0)
    bench, run = job.bench, job.saved_once()
    fail(job, what)
    request = job.asked(run, SUSPEND)
    until(run, lambda: bench.store.request_answer(request))
    bench.storage.orders.clear()
    outcome, message = job.answer(request)
    assert outcome is RequestOutcome.FAILED
    assert message.startswith("the stop has failed, and the job goes on: ")
    assert run.progress().warnings == (message,)
    job.tap.let(0)
    ended = to_end(run)
    assert ended.stop is None
    assert job.out.seen == UNDISTURBED
    assert bench.log.of("op/0", "open") == []
    assert bench.log.of("op/0", "end_input", "finish") == ["end_input 0", "finish"]


def test_a_stop_without_drain_that_takes_too_long_leaves_the_job_running() -> None:
    job = Job(timeout_us=5_000_000, requests_every_us=None)
    bench, run = job.bench, job.saved_once()
    request = job.asked(run, SUSPEND)
    until(run, lambda: run.in_flight is not None)
    bench.clock.wait_until(bench.clock.now_us() + 5_000_001)
    until(run, lambda: bench.store.request_answer(request))
    assert "took longer than allowed" in job.answer(request)[1]
    job.tap.let(0)
    assert to_end(run).stop is None
    assert job.out.seen == UNDISTURBED


@MODES
@pytest.mark.parametrize("what", ["op/0 complete", "out/0 complete", "out commit 2", "out committed 2", "op/0 close"])
def test_what_fails_behind_the_savepoint_leaves_the_stop_standing_and_a_restart_ends_it(
    mode: StopMode, what: str
) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    request = job.asked(run, mode)
    bench.log.failing.append(what)
    error = discarded(run)
    assert not error.counted
    assert bench.newest_id == 2
    assert bench.newest.stop is not None
    assert bench.store.request_answer(request) is None
    assert job.out.seen == ([0, 1] if what == "out commit 2" else flushed(mode))
    bench.log.clear()
    outcome = bench.runtime().begin(job.flow())
    assert isinstance(outcome, JobOutcome)
    assert outcome.stop is not None
    assert outcome.stop.request == request
    assert bench.log.calls == ["out commit 2", "out committed 2", "out clean 2"]
    assert job.out.seen == flushed(mode)
    assert job.answer(request)[0] is RequestOutcome.STOPPED


@MODES
def test_a_run_that_is_killed_between_the_publication_of_a_stop_and_its_commit_is_committed_and_ended_by_a_restart(
    mode: StopMode,
) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    request = job.asked(run, mode)
    until(run, lambda: bench.newest_id == 2)
    assert job.out.seen == [0, 1]
    outcome = job.run()
    assert outcome.stop is not None
    assert outcome.stop.request == request
    assert outcome.savepoint is not None
    assert job.out.seen == flushed(mode)
    assert job.answer(request)[0] is RequestOutcome.STOPPED


@MODES
def test_a_publication_of_a_stop_whose_answer_is_lost_is_read_back(mode: StopMode) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    job.asked(run, mode)
    bench.storage.order("create", "checkpoints/", "lose")
    outcome = to_end(run)
    assert outcome.checkpoint_id == 2
    assert outcome.stop is not None
    assert job.out.seen == flushed(mode)


@MODES
@pytest.mark.parametrize("done", [False, True])
def test_a_publication_of_which_nobody_knows_is_settled_by_the_restart(mode: StopMode, done: bool) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    request = job.asked(run, mode)
    bench.storage.order("create", "checkpoints/", "lose" if done else "refuse")
    for _ in range(200):
        for verb in ("create", "read", "size", "list"):
            bench.storage.order(verb, "checkpoints/", "refuse")
    with pytest.raises(CheckpointError):
        settle(run, 2000)
    bench.storage.orders.clear()
    assert job.out.seen == [0, 1]
    job.tap.let(0)
    outcome = job.run(requests_every_us=None)
    if done:
        assert outcome.stop is not None
        assert outcome.stop.request == request
        assert job.out.seen == flushed(mode)
    else:
        assert outcome.stop is None
        assert job.out.seen == UNDISTURBED


@MODES
def test_a_copy_that_fails_changes_nothing_of_the_stop_and_says_what_to_do(mode: StopMode) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    # A store that holds something is no place for a savepoint.
    MemoryStorage.reset("full")
    stores.counts_store("memory://full")
    run.request_stop(mode, "memory://full")
    outcome = to_end(run)
    assert outcome.stop is not None
    assert outcome.savepoint is None
    assert "its copy to memory://full failed: " in outcome.sentence
    assert outcome.sentence.endswith("The stop stands: run `ckpt copy memory://bench@2 memory://full`")
    assert job.out.seen == flushed(mode)
    assert bench.newest.stop is not None
    again = bench.runtime().begin(job.flow())
    assert isinstance(again, JobOutcome)


def test_a_task_that_fails_while_a_stop_without_drain_is_saved_is_a_failure_of_the_job() -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    request = job.asked(run, SUSPEND)
    until(run, lambda: run.in_flight is not None)
    next(iter(run.tasks.values())).fail(RuntimeError("it was killed"))
    error = discarded(run)
    assert error.counted
    assert job.answer(request)[0] is RequestOutcome.FAILED
    assert bench.newest_id == 1


@pytest.mark.parametrize("seed", range(10))
def test_a_stop_at_any_moment_is_a_stop_or_the_end(seed: int) -> None:
    splits = [[rows(n) for n in range(0, 24, 2)], [rows(n) for n in range(1, 24, 2)]]
    job = Job(*splits, parallelism=2, seed=seed, checkpoint_interval_us=30_000)
    for turn in range(12):
        begun = job.bench.runtime(seed=seed + turn, resume=True).begin(job.flow())
        if isinstance(begun, JobOutcome):
            break
        settled = 10 + 13 * turn + seed
        for _ in range(settled):
            if not begun.step():
                break
        if begun.outcome is None:
            begun.request_stop(SUSPEND)
            to_end(begun)
        job.parallelism = 1 + (seed + turn) % 3
    else:
        raise AssertionError("it does not come to an end")
    assert job.out.seen == sorted([*range(24), *(1000 * key + 6 for key in range(4))])


@pytest.mark.parametrize("stops", [1, 2])
def test_going_on_after_a_stop_does_not_mean_going_on_after_the_next_one(stops: int) -> None:
    job = Job()
    bench, run = job.bench, job.processed(2)
    if stops == 2:
        run.request_stop(SUSPEND)
        to_end(run)
    else:
        bench.checkpoint(run)
    job.tap.let(0, 4)
    bench.log.failing.append("out commit 2")
    bench.clock = VirtualClock(10_000)
    asked_for: list[str] = []
    shown: list[object] = []

    def ask(progress: object) -> None:
        shown.append(progress)
        assert len(shown) < 200, "the job goes on and on"
        if not asked_for:
            asked_for.append(bench.store.request_stop(SUSPEND).id)

    runtime = LocalRuntime(bench.store, clock=bench.clock, progress=ask, checkpoint_interval_us=None, resume=True)
    outcome = runtime.run(job.flow())
    # Its commit failed after it was published, so the job started again, and found it.
    assert outcome.restarts == 1
    assert outcome.stop is not None
    assert outcome.stop.request == asked_for[0]
    assert job.out.seen == [0, 1, 2, 3]
    job.tap.let(0)
    assert runtime.run(job.flow()).stop is None
    assert job.out.seen == UNDISTURBED
