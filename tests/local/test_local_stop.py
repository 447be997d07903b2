"""Stop with a savepoint, drained and not: the order of calls, and whenever it is asked.

What fails while a job is stopped: what comes of the stop, the job, and what was prepared.
"""

from __future__ import annotations

from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import JobOutcome, LocalRun, LocalRuntime, RunDiscarded, VirtualClock
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointError
from stateformat.model import StopMode
from stateformat.paths import request_path
from stateformat.requests import JobRequest, RequestKind, RequestOutcome, encode_request
from stateformat.storage import CreateOutcome
from tests.worlds import stores
from tests.worlds.local import (
    DRAIN,
    MODES,
    SUSPEND,
    UNDISTURBED,
    Bench,
    Flushing,
    Job,
    Out,
    Tap,
    flushed,
    rows,
    settle,
    state_of,
    to_end,
    until,
)


def test_a_job_that_is_drained_flushes_everything_before_its_savepoint_and_ends_finished() -> None:
    job = Job()
    bench, run = job.bench, job.processed()
    request = run.request_stop(DRAIN)
    outcome = to_end(run)
    assert bench.log.of("op/0") == ["timers: end", "end_input 0", "finish", "complete", "close"]
    assert bench.log.of("out/0") == [
        *(f"process 0: {1000 * key + 1}" for key in (0, 1, 2)),
        *("end_input 0", "finish", "prepare 1", "complete", "close"),
    ]
    assert job.out.seen == flushed(DRAIN)
    assert outcome.stop is not None
    assert (outcome.stop.mode, outcome.stop.request) == (DRAIN, request)
    assert outcome.checkpoint_id == bench.newest_id == 1
    assert bench.newest.stop == outcome.stop


def test_a_job_that_is_not_drained_takes_its_savepoint_commits_and_ends_finished_with_nothing_flushed() -> None:
    job = Job()
    bench, run = job.bench, job.processed()
    request = run.request_stop(SUSPEND)
    outcome = to_end(run)
    assert bench.log.of("op/0") == ["snapshot", "complete", "close"]
    assert bench.log.of("out/0") == ["snapshot", "prepare 1", "complete", "close"]
    order = [call for call in bench.log.calls if call.split()[1] in ("prepare", "committed", "complete", "close")]
    assert order.index("out/0 prepare 1") < order.index("out committed 1") < order.index("out/0 complete")
    assert job.out.seen == [0, 1, 2]
    assert outcome.stop is not None
    assert (outcome.stop.mode, outcome.stop.request) == (SUSPEND, request)
    assert "(no drain) at checkpoint 1, savepoint memory://bench/savepoints/" in outcome.sentence


def test_the_savepoint_is_a_store_of_its_own_that_holds_the_checkpoint() -> None:
    MemoryStorage.reset("elsewhere/of-mine")
    job = Job()
    bench, run = job.bench, job.processed()
    run.request_stop(SUSPEND, "memory://elsewhere/of-mine")
    outcome = to_end(run)
    assert outcome.savepoint == "memory://elsewhere/of-mine"
    kept = sf.open(outcome.savepoint).open()
    assert kept.record.stop == bench.newest.stop
    assert kept.read("op", "count").table().to_pylist() == bench.state("op", "count")


def test_after_a_drain_a_restart_opens_nothing() -> None:
    job = Job()
    bench, run = job.bench, job.processed()
    run.request_stop(DRAIN)
    first = to_end(run)
    for resume in (False, True):
        bench.log.clear()
        job.parallelism = 2
        outcome = bench.runtime(resume=resume).begin(job.flow())
        assert isinstance(outcome, JobOutcome)
        assert (outcome.stop, outcome.savepoint) == (first.stop, first.savepoint)
        assert outcome.checkpoint_id == first.checkpoint_id
        assert not [call for call in bench.log.calls if "/" in call]


@pytest.mark.parametrize("unaligned", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_nothing_happens_behind_the_barrier_of_a_stop_without_drain_and_the_job_goes_on_as_if_undisturbed(
    seed: int, unaligned: bool
) -> None:
    splits = [[rows(n) for n in range(0, 40, 2)], [rows(n) for n in range(1, 40, 2)]]
    job = Job(*splits, parallelism=2, seed=seed, unaligned=unaligned)
    bench, run = job.bench, job.begin()
    settle(run, 30 + 20 * seed)
    run.request_stop(SUSPEND)
    outcome = to_end(run)
    assert outcome.stop is not None
    for who in ("op/0", "out/0"):
        calls = bench.log.of(who)
        behind = calls[calls.index("snapshot") + 1 :]
        assert [call for call in behind if not call.startswith("prepare")] == ["complete", "close"], who
    read = run.rows_read
    assert 0 < read < 40
    assert len(job.out.seen) == read
    job.parallelism = 3
    job.run(resume=True, seed=seed)
    assert job.out.seen == sorted([*range(40), *(1000 * key + 10 for key in range(4))])


@MODES
def test_a_stop_that_is_asked_while_a_checkpoint_is_pending_comes_behind_it(mode: StopMode) -> None:
    job = Job()
    bench, run = job.bench, job.processed()
    bench.due(run)
    run.request_stop(mode)
    assert run.in_flight is not None
    outcome = to_end(run)
    assert outcome.checkpoint_id == 2
    records = bench.store.history()
    assert [record.stop is not None for record in records] == [True, False]
    assert bench.log.of("out/0", "prepare") == ["prepare 1", "prepare 2"]
    assert job.out.seen == flushed(mode)


@MODES
def test_a_stop_that_is_asked_while_some_tasks_wait_for_their_last_checkpoint_ends_them_with_the_savepoint(
    mode: StopMode,
) -> None:
    bench = Bench()
    flow, fast, slow = Dataflow("job"), Out(bench.log), Out(bench.log)
    taps = Tap([rows(1)], shut=True), Tap([rows(2), rows(3)], shut=True)
    flow.source(taps[0], uid="a").apply(fast, uid="fast", chain=False)
    flow.source(taps[1], uid="b").apply(slow, uid="slow", chain=False)
    run = bench.begin(flow)
    taps[0].let(0)
    taps[1].let(0, 1)
    until(run, lambda: state_of(run, "fast") == "waiting" and bench.log.of("slow/0", "process"))
    bench.log.clear()
    run.request_stop(mode)
    outcome = to_end(run)
    assert outcome.checkpoint_id == 1
    assert bench.log.of("fast/0") == ["prepare 1", "complete", "close"]
    ended = ["end_input 0", "finish", "prepare 1"] if mode is DRAIN else ["snapshot", "prepare 1"]
    assert bench.log.of("slow/0") == [*ended, "complete", "close"]
    assert (fast.seen, slow.seen) == ([1], [2])
    assert bench.status("fast") == ([], [0])
    assert bench.status("slow") == ([], [0] if mode is DRAIN else [])


def test_a_stop_that_is_asked_when_the_final_checkpoint_is_under_way_finds_the_job_at_its_own_end() -> None:
    job = Job()
    bench = job.bench
    job.tap.let(0)
    run = job.begin()
    until(run, lambda: run.in_flight is not None)
    run.request_stop(DRAIN)
    outcome = to_end(run)
    # The final checkpoint was under way: it ends the job, and the stop has nothing left to stop.
    assert outcome.checkpoint_id == bench.newest_id == 1
    assert outcome.stop is None
    assert job.out.seen == UNDISTURBED


def two_inputs(bench: Bench, first: Tap, second: Tap) -> tuple[Dataflow, Out]:
    flow, out = Dataflow("job"), Out(bench.log)
    two = flow.source(second, uid="two", event_time="at").key_by("key")
    one = flow.source(first, uid="one", event_time="at").key_by("key")
    one.apply(Flushing(bench.log), two, uid="op").apply(out, uid="out", chain=False)
    return flow, out


@pytest.mark.parametrize("ended", [0, 1])
@pytest.mark.parametrize("gone", [False, True])
def test_a_stop_that_comes_last_to_an_input_gate_of_which_the_rest_has_ended_is_not_lost(
    ended: int, gone: bool
) -> None:
    bench = Bench()
    taps = Tap([rows(1)], shut=True), Tap([rows(2)], shut=True)
    flow, out = two_inputs(bench, *taps)
    run = bench.begin(flow)
    taps[ended].let(0)
    until(run, lambda: bench.log.of("op/0", "end_input"))
    if gone:
        bench.checkpoint(run)
        settle(run, 60)
    bench.log.clear()
    run.request_stop(SUSPEND)
    outcome = to_end(run)
    assert outcome.stop is not None
    assert bench.log.of("op/0") == ["snapshot", "complete", "close"]
    assert bench.log.of("out/0", "end_input", "finish") == []
    bench.log.clear()
    taps[1 - ended].let(0)
    bench.run(flow, resume=True)
    other = 1 - ended
    assert bench.log.of("op/0", "timers", "end_input", "finish") == ["timers: end", f"end_input {other}", "finish"]
    # One row of each input, and the count of its key.
    assert out.seen == [1, 2, 1001, 2001]


@pytest.mark.parametrize("seed", range(8))
def test_a_stop_that_comes_over_all_inputs_ends_nobody_as_if_it_were_drained(seed: int) -> None:
    bench = Bench(seed=seed)
    taps = Tap([rows(1), rows(3)], endless=True), Tap([rows(2)], endless=True)
    flow, out = two_inputs(bench, *taps)
    run = bench.begin(flow)
    settle(run, 20 + seed * 5)
    run.request_stop(SUSPEND)
    to_end(run)
    assert bench.log.of("op/0", "timers", "end_input", "finish") == []
    assert bench.log.of("op/0")[-2:] == ["complete", "close"]
    assert len(out.seen) == run.rows_read


@MODES
def test_a_second_request_is_told_that_the_job_stops_already(mode: StopMode) -> None:
    job = Job()
    bench, run = job.bench, job.saved_once()
    first = run.request_stop(mode)
    second = bench.store.request_stop(SUSPEND).id
    bench.clock.wait_until(bench.clock.now_us() + 2_000_000)
    outcome = to_end(run)
    assert outcome.stop is not None
    assert outcome.stop.request == first
    told, message = job.answer(second)
    # Asked while the job was stopping, or seen only when it had stopped: either way it is told what
    # has happened.
    assert told in (RequestOutcome.FAILED, RequestOutcome.STOPPED)
    assert "the job stops already" in message or "the job has stopped" in message


def test_the_same_request_twice_is_one() -> None:
    job = Job()
    bench, run = job.bench, job.processed()
    bench.checkpoint(run)
    request = bench.store.request_stop(SUSPEND)
    run._requests.request_stop(request.id, request.mode, None)
    run._requests.request_stop(request.id, request.mode, None)
    to_end(run)
    assert job.answer(request.id)[0] is RequestOutcome.STOPPED


@pytest.mark.parametrize(
    ("asked", "obeyed"),
    [
        ({"1": (DRAIN, 1), "2": (SUSPEND, 9)}, "2"),
        ({"1": (SUSPEND, 9), "2": (DRAIN, 1)}, "1"),
        ({"1": (SUSPEND, 7), "2": (SUSPEND, 6)}, "2"),
        ({"1": (DRAIN, 7), "2": (DRAIN, 6)}, "2"),
        ({"1": (DRAIN, 7), "2": (DRAIN, 7)}, "1"),
    ],
)
def test_of_requests_seen_at_once_no_drain_goes_first_then_the_earlier_then_the_lesser_name(
    asked: dict[str, tuple[StopMode, int]], obeyed: str
) -> None:
    job = Job()
    bench, run = job.bench, job.processed()
    for digit, (mode, at_us) in asked.items():
        request = JobRequest(RequestKind.STOP, digit * 32, 0, created_at_us=at_us, mode=mode)
        bench.storage.create(request_path(0, request.id), encode_request(request))
    outcome = to_end(run)
    assert outcome.stop is not None
    assert (outcome.stop.request, outcome.stop.mode) == (obeyed * 32, asked[obeyed][0])


def test_a_request_does_not_count_for_a_run_that_went_on_from_a_later_checkpoint() -> None:
    job = Job(requests_every_us=None)
    bench, run = job.bench, job.processed()
    bench.checkpoint(run)
    request = bench.store.request_stop(SUSPEND)
    bench.checkpoint(run)
    job.tap.let(0)
    outcome = job.run(requests_every_us=1_000)
    assert outcome.stop is None
    outcome, message = job.answer(request.id)
    assert outcome is RequestOutcome.MISSED
    assert message.startswith(
        "the run that was asked when checkpoint 1 was the newest has ended; this one went on from"
    )
    assert message.endswith("checkpoint 2. Ask again")


def left_behind(job: Job, kind: RequestKind, **members: Any) -> JobRequest:
    """A request whose asker was killed, and has given up long before the clock of runs begins."""
    request = JobRequest(kind, "e" * 32, job.bench.newest_id, None, 1_000_000, 5_000_000, **members)
    assert job.bench.store.storage.create(request.path, encode_request(request)) is CreateOutcome.CREATED
    return request


def test_a_request_that_expired_before_the_run_began_is_not_obeyed_and_the_run_says_which_and_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    request = left_behind(job, RequestKind.STOP, mode=SUSPEND)
    job.tap.let(0)
    outcome = job.run()
    assert outcome.stop is None
    found, message = job.answer(request.id)
    assert found is RequestOutcome.MISSED
    assert message == (
        "a request (stop) made at 1970-01-01T00:00:01Z, before this run began, has expired: whoever asked gave up by "
        "1970-01-01T00:00:05Z, and this machine's clock says 2026-01-01T00:00:00Z. It is not obeyed; ask again"
    )
    assert message in caplog.text


def test_a_request_that_appears_while_a_job_runs_counts_whatever_the_clocks_say() -> None:
    job = Job()
    run = job.processed()
    job.bench.checkpoint(run)
    request = left_behind(job, RequestKind.STOP, mode=SUSPEND)
    outcome = to_end(run)
    assert outcome.stop is not None
    assert outcome.stop.request == request.id


def test_a_run_says_that_it_obeys_a_request_of_before_its_begin() -> None:
    job = Job()
    bench, run = job.bench, job.processed()
    bench.checkpoint(run)
    request = bench.store.request_stop(SUSPEND, timeout_us=60_000_000)
    run = job.begin()
    to_end(run)
    assert any(
        said.startswith("obeying a request (stop) made at ") and said.endswith(", before this run began")
        for said in run.progress().news
    )
    assert job.answer(request.id)[0] is RequestOutcome.STOPPED


def test_a_savepoint_that_nobody_waits_for_is_not_made_of_a_job_that_had_finished() -> None:
    job = Job()
    job.tap.let(0)
    job.run()
    request = left_behind(job, RequestKind.SAVEPOINT)
    job.run()
    assert job.answer(request.id)[0] is RequestOutcome.MISSED


def test_who_asks_a_job_to_stop_that_ends_by_itself_is_told_so() -> None:
    job = Job(requests_every_us=None)
    bench, run = job.bench, job.processed()
    bench.checkpoint(run)
    request = bench.store.request_stop(SUSPEND)
    job.tap.let(0)
    outcome = to_end(run)
    assert outcome.stop is None
    assert job.answer(request.id) == (RequestOutcome.FINISHED, outcome.sentence)


def test_requests_that_cannot_be_read_are_looked_for_again() -> None:
    job = Job()
    bench, run = job.bench, job.processed()
    bench.checkpoint(run)
    request = bench.store.request_stop(SUSPEND)
    for _ in range(3):
        bench.storage.order("list", "requests/", "refuse")
    outcome = to_end(run)
    assert outcome.stop is not None
    assert outcome.stop.request == request.id


def test_who_asks_for_a_stop_when_all_that_is_left_is_to_leave_learns_that_the_job_has_finished() -> None:
    job = Job([rows(1)], requests_every_us=None)
    run = job.begin()
    until(run, lambda: job.bench.newest_id > 0 and run.in_flight is None)
    request = job.asked(run, DRAIN)
    outcome = to_end(run)
    assert outcome.stop is None
    assert job.answer(request) == (RequestOutcome.FINISHED, outcome.sentence)


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
