"""States expire alike on both executors: with crashes, at any parallelism, after a rollback."""

from __future__ import annotations

from typing import Any

import pytest

from stateformat.backends.local import VirtualClock
from stateformat.backends.runtime import Run
from stateformat.model import StopMode
from stateformat.ttl import NO_TIME_US
from stateformat.validation import validate
from tests.conformance import lose, stopped, to_end, until
from tests.expiring_jobs import LIVES_US, ExpiringJob, said
from tests.played_stage import EVERYWHERE, ON_BOTH, PlayedStage, other


def primed(stage: PlayedStage, job: ExpiringJob, run: Run) -> Run:
    """Step a run until it has a watermark, and return it."""
    waiting = job.primed(lambda: stage.newest_id)
    until(run, lambda: next(waiting, True))
    return run


@ON_BOTH
@pytest.mark.parametrize("parallelism", [1, 3])
def test_what_is_known_of_a_key_depends_on_the_rows_alone(stage: PlayedStage, executor: str, parallelism: int) -> None:
    job = ExpiringJob(stage.directory)
    run = primed(stage, job, stage.begin(executor, job.flow(parallelism)))
    job.stream.let(0, 13)
    until(run, lambda: len(job.once.seen) > 6)
    job.stream.let(0)
    to_end(run)
    job.check(restarted=False)


@EVERYWHERE
def test_crashes_and_a_lost_driver_change_nothing(stage: PlayedStage, executor: str) -> None:
    job = ExpiringJob(stage.directory, seed=2)
    run = primed(stage, job, stage.begin(executor, job.flow(2)))
    job.stream.let(0, 9)
    lose(run, published=run.published + 1)
    job.stream.let(0)
    # Only one of the two subtasks gets each row.
    for call in ("op/0 snapshot", *(f"op/{subtask} row {row}" for subtask in (0, 1) for row in (33, 41, 50))):
        job.calls.fails(call)
    executor = other(executor) if executor != "cluster" else executor
    outcome = stage.run(executor, job.flow(2), checkpoint_rows=5, max_restarts=9)
    assert outcome.restarts
    job.check()


@ON_BOTH
def test_a_rollback_and_another_parallelism_find_what_had_not_expired_then(stage: PlayedStage, executor: str) -> None:
    job = ExpiringJob(stage.directory, seed=4)
    run = primed(stage, job, stage.begin(executor, job.flow(2), keep=None))
    job.stream.let(0, 8)
    stopped(run, StopMode.NO_DRAIN, lambda: len(job.out.seen) > 40)
    before, seen = stage.newest_id, (job.out.seen, job.once.seen)
    job.stream.let(0, 16)
    run = stage.begin(executor, job.flow(3), keep=None, resume=True)
    stopped(run, StopMode.NO_DRAIN, lambda: len(job.out.seen) > 100)
    stage.store.rollback(before)

    # What was committed in between stays in the sink, and everything comes a second time.
    twice = job.out.seen - seen[0], job.once.seen - seen[1]
    job.out._committed = {place: rows for place, rows in job.out._committed.items() if place[0] <= before}
    job.once._committed = {place: rows for place, rows in job.once._committed.items() if place[0] <= before}
    job.stream.let(0)
    stage.run(other(executor) if executor != "cluster" else executor, job.flow(5), resume=True)
    job.check()
    assert twice[0]
    assert not twice[1] - job.expected_once
    assert not validate(stage.store.storage, level="full").findings


@ON_BOTH
def test_a_checkpoint_says_what_time_it_was_and_hides_what_had_expired(stage: PlayedStage, executor: str) -> None:
    job = ExpiringJob(stage.directory, seed=5)
    run = stage.begin(executor, job.flow(2), keep=None)
    until(run, lambda: stage.newest_id > 1)
    states = {state.name: state for state in stage.newest.states if state.operator == "op"}
    assert states["list"].ttl_now_us == NO_TIME_US
    job.stream.let(0, 12)
    stopped(run, StopMode.NO_DRAIN, lambda: max((row[1] for row in job.out.seen), default=0) >= _last(job, 12))
    states = {state.name: state for state in stage.newest.states if state.operator == "op"}
    now = max(batch["at"][0].as_py() for batch in job.batches[:12])
    assert {states[name].ttl_now_us for name in ("written", "read", "map", "list")} == {now}
    assert states["timers"].ttl is None
    times = [row["ttl_last_access"] for row in stage.state("op", "list")]
    assert times
    assert all(int(time.timestamp()) == 0 for time in times)
    assert all(time.microsecond + LIVES_US > now for time in times)


def _last(job: ExpiringJob, count: int) -> int:
    return max(value for batch in job.batches[:count] for value in batch["value"].to_pylist())


class Wall(VirtualClock):
    """A wall clock that is set by hand."""

    def __init__(self, wall_us: int) -> None:
        super().__init__()
        self.set_us = wall_us

    def wall_us(self) -> int:
        return self.set_us


@ON_BOTH
def test_what_expires_in_processing_time_does_so_while_the_job_stands_still(stage: PlayedStage, executor: str) -> None:
    job = ExpiringJob(stage.directory, seed=6)
    options: dict[str, Any] = {"clock": "processing_time", "lives_us": 10**9}
    start_us = 1_800_000_000_000_000
    moments: list[int] = []
    # If the wall clock is behind the time of the checkpoint, time stands still.
    for after_us in (0, -(10**12), 10**9):
        moments += [start_us + max(after_us, 0)] * 5
        job.stream.let(0, len(moments))
        run = stage.begin(executor, job.flow(2, **options), resume=True, clock=Wall(start_us + after_us))
        read = _last(job, len(moments))
        stopped(run, StopMode.NO_DRAIN, lambda read=read: max((row[1] for row in job.out.seen), default=0) >= read)
        seen = {state.ttl_now_us for state in stage.newest.states if state.operator == "op" and state.ttl}
        assert seen == {moments[-1]}
        executor = other(executor) if executor != "cluster" else executor
    times = {number: us for b, us in zip(job.batches, moments, strict=False) for number in b["value"].to_pylist()}
    expected = said(job.batches[: len(moments)], times, 10**9)
    for kind in ("written", "read", "map", "list"):
        assert {row for row in job.out.seen if row[0] == kind} == {row for row in expected if row[0] == kind}


@ON_BOTH
@pytest.mark.parametrize("seed", range(3))
def test_what_expires_in_processing_time_does_so_alike_with_crashes_and_a_lost_driver(
    stage: PlayedStage, executor: str, seed: int
) -> None:
    # A restart waits for a second, so some rows expire meanwhile and others do not.
    job, clock, lives_us = ExpiringJob(stage.directory, seed=seed), VirtualClock(us_per_event=50_000), 3_000_000
    flow = job.flow(2, clock="processing_time", lives_us=lives_us)
    run = stage.begin(executor, flow, clock=clock)
    job.stream.let(0, 9)
    until(run, lambda: len(job.out.seen) > 20)
    lose(run, published=run.published + 1)
    job.stream.let(0)
    for call in ("op/0 snapshot", *(f"op/{subtask} row {row}" for subtask in (0, 1) for row in (25, 33, 41, 50))):
        job.calls.fails(call)
    assert stage.run(other(executor), flow, clock=clock, checkpoint_rows=5, max_restarts=9).restarts
    job.check(lives_us=lives_us)
    # Some had expired, some had not.
    for other_us in (1, 10**12):
        assert said(job.batches, job.times, other_us) - job.out.seen


@ON_BOTH
@pytest.mark.parametrize(
    "clocks",
    [(None, "event_time", "processing_time", None, "event_time"), ("processing_time", "event_time", None)],
    ids=["to processing time", "to event time"],
)
def test_rows_go_on_under_another_clock_from_its_own_time(
    stage: PlayedStage, executor: str, clocks: tuple[str | None, ...]
) -> None:
    job = ExpiringJob(stage.directory, seed=7)
    wall_us, lives_us = 1_800_000_000_000_000, 10**9
    for number, clock in enumerate(clocks, 1):
        job.stream.let(0, 4 * number)
        options: dict[str, Any] = {"drops": ["ttl_last_access"]} if any(clocks[: number - 1]) else {}
        flow = job.flow(2, clock=clock, lives_us=lives_us, **options)
        run = stage.begin(executor, flow, resume=True, clock=Wall(wall_us))
        read = _last(job, 4 * number)
        stopped(run, StopMode.NO_DRAIN, lambda read=read: max((row[1] for row in job.out.seen), default=0) >= read)
        event_us = max(batch["at"][0].as_py() for batch in job.batches[: 4 * number])
        now_us = {None: None, "event_time": event_us, "processing_time": wall_us}[clock]
        assert {state.ttl_now_us for state in stage.newest.states if state.name in ("written", "list")} == {now_us}
        executor = other(executor) if executor != "cluster" else executor
    passed = job.batches[: 4 * len(clocks)]
    # No row is old enough to expire by either clock.
    expected = said(passed, {value: 0 for batch in passed for value in batch["value"].to_pylist()})
    for kind in ("written", "read", "map", "list"):
        assert {row for row in job.out.seen if row[0] == kind} == {row for row in expected if row[0] == kind}
