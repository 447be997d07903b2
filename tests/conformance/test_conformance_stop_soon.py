"""A job that is told to stop soon, as by SIGTERM: an ordinary checkpoint, and nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import pytest

from stateformat.backends.runtime import GraceExceeded, JobOutcome, VirtualClock
from stateformat.model import StopMode
from stateformat.requests import RequestOutcome
from tests.conformance import to_end, until
from tests.conformance_jobs import LapJob, Line, every_operator, hops_job
from tests.played_stage import EVERYWHERE, ON_BOTH, PlayedStage, other


@pytest.fixture
def line(stage: PlayedStage, executor: str) -> Line:
    """Return the job."""
    return Line(stage, executor)


@ON_BOTH
def test_it_commits_what_it_has_read_and_goes_on_without_any_option(line: Line) -> None:
    run = line.begin(**({"checkpoint_interval_us": None} if line.executor == "local" else {}))
    line.source.let(0, 5)
    until(run, lambda: run.rows_read == 5)
    run.stop_soon()
    outcome = to_end(run)
    assert outcome.interrupted
    assert outcome.stop is None
    assert outcome.checkpoint_id == line.stage.newest_id
    assert line.stage.newest.stop is None
    assert "is published and committed" in outcome.sentence
    assert line.out.values == [*range(5)]
    line.executor = other(line.executor)
    assert line.run(parallelism=3).interrupted is False
    line.check()


@EVERYWHERE
@pytest.mark.parametrize("job", [every_operator, hops_job])
def test_told_again_and_again_at_any_step_nothing_is_lost_or_repeated(
    stage: PlayedStage, executor: str, job: Any
) -> None:
    case = job(2) if job is every_operator else job()
    choose = random.Random(7)
    told = 0
    for _ in range(60):
        # Like a program that is started again: events have a different order each time.
        runtime = stage.runtime(executor, checkpoint_rows=60, seed=told)
        run = runtime.begin(case.flow())
        if isinstance(run, JobOutcome):
            break
        longest = 40 * (told + 1) if executor == "local" else told + 1
        steps = choose.randint(1, longest)
        while steps and run.step():
            steps -= 1
        run.stop_soon()
        outcome = to_end(run)
        told += outcome.interrupted
        if not outcome.interrupted:
            break
    assert told > 1
    assert case.outs() == case.expected


@ON_BOTH
def test_told_before_it_begins_it_commits_what_the_last_run_left_and_reads_nothing(line: Line) -> None:
    run = line.begin()
    line.read(run, 4)
    run.close()
    newest = line.stage.newest_id
    runtime = line.stage.runtime(line.executor)
    runtime.stop_soon()
    line.source.let(0)
    outcome = runtime.run(line.flow())
    assert (outcome.interrupted, outcome.checkpoint_id) == (True, newest)
    assert outcome.sentence.endswith("nothing was read after it. The next start goes on from it, without any option")
    assert runtime.run(line.flow()).interrupted is False
    line.check()


@ON_BOTH
def test_told_before_its_first_checkpoint_exists_it_says_that_there_is_none(line: Line) -> None:
    runtime = line.stage.runtime(line.executor)
    runtime.stop_soon()
    outcome = runtime.run(line.flow())
    assert (outcome.interrupted, outcome.checkpoint_id, line.stage.newest_id) == (True, None, 0)
    assert "begins anew" in outcome.sentence


@ON_BOTH
def test_when_grace_is_over_it_ends_at_once_and_names_the_newest_checkpoint(line: Line) -> None:
    run = line.begin()
    line.read(run, 4)
    newest = line.stage.newest_id
    run.stop_soon(grace=0)
    with pytest.raises(GraceExceeded, match=rf"within 0 s, .* the newest is {newest}") as caught:
        to_end(run)
    assert caught.value.details["checkpoint_id"] == newest
    run.close()
    line.run()
    line.check()


@ON_BOTH
def test_the_end_of_a_job_and_a_stop_that_is_under_way_come_first(line: Line) -> None:
    run = line.begin()
    line.read(run, 4)
    run.request_stop(StopMode.DRAIN)
    run.step()
    run.stop_soon()
    outcome = to_end(run)
    assert (outcome.interrupted, outcome.stop is not None) == (False, True)


@ON_BOTH
def test_a_savepoint_that_was_asked_for_is_made_before_the_end(line: Line) -> None:
    run = line.begin()
    line.read(run, 4)
    request = run.request_savepoint()
    run.stop_soon()
    assert to_end(run).interrupted
    answer = run.request_answer(request)
    assert answer is not None
    assert (answer.outcome, answer.savepoint is None) == (RequestOutcome.SAVED, False)
    line.run()
    line.check()


@ON_BOTH
def test_a_job_that_fails_while_it_stops_ends_at_its_newest_checkpoint_and_loses_nothing(line: Line) -> None:
    def progress(_: object) -> None:
        if line.stage.newest_id >= 2 and not runtime._soon.is_asked:
            line.stage.storage.order("create", "checkpoints/", "refuse")
            runtime.stop_soon()

    # A progress after every third step.
    clock = VirtualClock(us_per_event=200_000)
    runtime = line.stage.runtime(line.executor, checkpoint_rows=2, progress=progress, clock=clock)
    line.source.let(0)
    outcome = runtime.run(line.flow())
    assert outcome.interrupted
    assert outcome.checkpoint_id == line.stage.newest_id
    line.run()
    line.check()


@ON_BOTH
def test_what_goes_round_a_loop_is_kept(stage: PlayedStage, executor: str) -> None:
    job = LapJob(stage.directory, spins=True)
    run = stage.begin(executor, job.flow(2, 3))
    until(run, lambda: run.rows_read == 12)
    run.stop_soon()
    assert to_end(run).interrupted
    assert stage.in_flight() == 12
    job.spins.unlink()
    stage.run(other(executor), job.flow(3, 2))
    assert job.out.values == job.expected
