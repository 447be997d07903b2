"""Inputs without rows hold back event time until they are idle; on both executors.

States expire alike on both executors: with crashes, at any parallelism, after a rollback. Timers of
processing time on both executors: when they fire, and what becomes of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.dataflow import Dataflow, EventTime, Stream
from stateformat.backends.runtime import VIRTUAL_ORIGIN_US, Run, RunDiscarded, VirtualClock
from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.model import StopMode
from stateformat.ttl import NO_TIME_US
from stateformat.validation import validate
from tests.worlds.jobs import LIVES_US, SECOND_US, ExpiringJob, Losing, Reminders, Union, said
from tests.worlds.local import ROWS, rows
from tests.worlds.spark import Ranges, RangeSource
from tests.worlds.stages import EVERYWHERE, ON_BOTH, Gated, Out, PlayedStage, lose, other, stopped, to_end, until

IDLE_AFTER = 3 * SECOND_US
WINDOW_US = 100


WARNING = (
    "Event time has not begun for 1 min: split 'split-0' of source 'in' has had no row, and others are at "
    "1970-01-01T00:00:00.000220Z. Windows and timers wait for it. If it may be without rows, give the source "
    "idle_after=."
)


def pace(executor: str) -> dict[str, int]:
    return {"checkpoint_interval_us": SECOND_US // 2, **({} if executor == "local" else {"idle_us": SECOND_US // 4})}


def let(place: Path, batches: int | str, split: int = 0) -> None:
    (place / str(split)).write_text(str(batches))


def windows(stage: PlayedStage, out: Out, *, readers: int, idle_after: int | None = IDLE_AFTER) -> Dataflow:
    """Return a job that reads two splits of one source, in one reader or two, into windows."""
    flow = Dataflow("idle", parallelism=2)
    early = [rows(n, key=1, at=n) for n in (10, 110, 1010)]
    late = [rows(n, key=2, at=n) for n in (20, 120, 220, 420, 1020)]
    source = Gated(stage.directory / "in", early, late, shut=True, endless=True)
    read = flow.source(source, uid="in", parallelism=readers, event_time=EventTime("at"), idle_after=idle_after)
    counted(read, out)
    return flow


def counted(stream: Stream, out: Out) -> None:
    stream.key_by("key").window(WINDOW_US, "at", {"n": ("*", "count")}, uid="window").apply(out, uid="out")


def ended(out: Out) -> set[tuple[int, int]]:
    """Return the keys and starts of windows that have ended."""
    return {(row[0], row[1]) for row in out.seen}


@EVERYWHERE
@pytest.mark.parametrize("readers", [1, 2])
def test_an_idle_split_holds_no_time_up_and_one_that_returns_does(
    stage: PlayedStage, executor: str, readers: int
) -> None:
    out, clock, place = Out(), VirtualClock(), stage.directory / "in"
    run = stage.begin(executor, windows(stage, out, readers=readers), clock=clock, **pace(executor))
    let(place, 1)
    let(place, 3, 1)
    until(run, lambda: run.rows_read == 4)
    begun_us = clock.now_us()
    assert not ended(out), "time is at 10"
    # First one split becomes idle, then the other: time is where the second split was.
    until(run, lambda: ended(out) == {(1, 0), (2, 0), (2, 100)})
    assert clock.now_us() - begun_us >= IDLE_AFTER - SECOND_US // 2
    until(run, lambda: clock.now_us() - begun_us > 2 * IDLE_AFTER)
    # It returns with a late row, and then holds back time.
    let(place, 2)
    until(run, lambda: run.late_rows == 1)
    let(place, 4, 1)
    until(run, lambda: run.rows_read == 6)
    held_us = clock.now_us()
    until(run, lambda: clock.now_us() - held_us > IDLE_AFTER // 3)
    assert (2, 200) not in ended(out), "the first was at 110 a while ago"
    until(run, lambda: (2, 200) in ended(out))
    run.close()


@ON_BOTH
def test_without_idle_after_time_waits_for_every_split(stage: PlayedStage, executor: str) -> None:
    out, clock, place = Out(), VirtualClock(), stage.directory / "in"
    run = stage.begin(executor, windows(stage, out, readers=2, idle_after=None), clock=clock, **pace(executor))
    let(place, 3, 1)
    until(run, lambda: run.rows_read == 3)
    until(run, lambda: clock.now_us() > 4 * IDLE_AFTER)
    assert not ended(out)
    run.close()


@ON_BOTH
def test_a_warning_names_the_split_for_which_time_waits(stage: PlayedStage, executor: str) -> None:
    out, clock, place, told = Out(), VirtualClock(SECOND_US), stage.directory / "in", []
    flow = windows(stage, out, readers=2, idle_after=None)
    options = {"checkpoint_interval_us": 10 * SECOND_US, **({} if executor == "local" else {"idle_us": 5 * SECOND_US})}
    run = stage.begin(executor, flow, clock=clock, **options)

    def after(us: int) -> list[str]:
        until(run, lambda: clock.now_us() > us)
        told.extend(run.progress().warnings)
        return told

    let(place, 3, 1)
    assert after(120 * SECOND_US) == [WARNING]
    let(place, 3)
    assert len(after(125 * SECOND_US)) == 1
    let(place, 5, 1)
    assert "Event time has stood at" not in "".join(after(150 * SECOND_US)), "it has not, for long"
    run.close()


@ON_BOTH
def test_a_reader_without_a_split_is_idle_too(stage: PlayedStage, executor: str) -> None:
    out = Out()
    run = stage.begin(executor, windows(stage, out, readers=3), **pace(executor))
    for split in (0, 1):
        let(stage.directory / "in", 3, split)
    until(run, lambda: {(1, 0), (2, 0), (1, 100), (2, 100)} <= ended(out))
    run.close()


@ON_BOTH
def test_time_does_not_go_back_when_an_idle_job_goes_on(stage: PlayedStage, executor: str) -> None:
    out, place = Out(), stage.directory / "in"
    run = stage.begin(executor, windows(stage, out, readers=2), keep=None, **pace(executor))
    let(place, 1)
    let(place, 3, 1)
    until(run, lambda: ended(out) == {(1, 0), (2, 0), (2, 100)})
    published = run.published
    until(run, lambda: run.published > published)
    run.close()
    again = stage.begin(executor, windows(stage, out, readers=2), keep=None, **pace(executor))
    let(place, 2)
    let(place, 3, 1)
    until(again, lambda: again.late_rows == 1)
    assert (1, 100) not in ended(out), "its window had ended before"
    again.close()


@ON_BOTH
def test_of_two_sources_the_idle_one_holds_no_time_up_and_the_job_ends(stage: PlayedStage, executor: str) -> None:
    out = Out()
    flow = Dataflow("two", parallelism=2)
    places = [stage.directory / name for name in ("one", "two")]
    batches = [[rows(n, key=k, at=n) for n in (10, 210, 410)] for k in (1, 2)]
    sources = [Gated(place, some, shut=True) for place, some in zip(places, batches, strict=True)]
    reads = [
        flow.source(source, uid=place.name, parallelism=1, event_time="at", idle_after=IDLE_AFTER)
        for source, place in zip(sources, places, strict=True)
    ]
    counted(reads[0].rebalance().apply(Union(), reads[1].rebalance(), uid="union"), out)
    run = stage.begin(executor, flow, **pace(executor))
    let(places[0], 3)
    until(run, lambda: ended(out) == {(1, 0), (1, 200)})
    sources[1].let(0)
    until(run, lambda: run.rows_read == 6)
    sources[0].let(0)
    outcome = to_end(run)
    assert outcome.restarts == 0
    assert ended(out) == {(1, 0), (1, 200), (1, 400), (2, 400)}
    assert run.late_rows == 2


def test_a_source_without_ranges_is_idle_on_spark(stage: PlayedStage) -> None:
    out, clock = Out(), VirtualClock()
    flow = Dataflow("ranges", parallelism=2)
    ranges = {name: Ranges([[[rows(k, key=k, at=at)] for at in (10, 110)]], grows=True) for k, name in enumerate("ab")}
    reads = [
        flow.source(RangeSource(each, schema=ROWS), uid=name, event_time="at", idle_after=IDLE_AFTER)
        for name, each in ranges.items()
    ]
    counted(reads[0].rebalance().apply(Union(), reads[1].rebalance(), uid="union"), out)
    run = stage.begin("spark", flow, clock=clock, **pace("spark"))
    until(run, lambda: ended(out) == {(0, 0), (1, 0)})
    until(run, lambda: clock.now_us() > IDLE_AFTER)
    ranges["a"].ranges.append([[rows(0, key=0, at=310)]])
    until(run, lambda: run.rows_read == 5)
    read_us = clock.now_us()
    until(run, lambda: (1, 100) in ended(out))
    assert clock.now_us() - read_us < IDLE_AFTER, "the other has been idle for a while"
    assert run.progress().watermark == 310
    # It returns, and holds back time at its own watermark.
    ranges["b"].ranges.append([[rows(1, key=1, at=320)]])
    ranges["a"].ranges.append([[rows(0, key=0, at=910)]])
    until(run, lambda: run.rows_read == 7)
    assert run.progress().watermark == 320
    assert (0, 300) not in ended(out)
    run.close()


@pytest.mark.parametrize(
    ("event_time", "idle_after", "said"),
    [
        (None, 5, "has idle_after but no event time"),
        ("at", 0, "0. Give whole microseconds"),
        ("at", 1.5, "1.5. Give whole"),
        ("at", True, "True. Give whole"),
    ],
)
def test_what_is_no_time_is_refused(tmp_path: Path, event_time: str | None, idle_after: int, said: str) -> None:
    source = Gated(tmp_path, [rows(1)])
    with pytest.raises(InvalidInput, match=said):
        Dataflow("refused").source(source, uid="in", event_time=event_time, idle_after=idle_after)


@ON_BOTH
def test_infinite_times_are_late_and_no_window_of_theirs_is_made_up(stage: PlayedStage, executor: str) -> None:
    source, out = Gated(stage.directory / "in", [rows(1, at=-(2**63)), rows(2, at=57), rows(3, at=2**63 - 1)]), Out()
    flow = Dataflow("infinite", parallelism=2)
    keyed = flow.source(source, uid="in", event_time="at").key_by("key")
    keyed.window(10, "at", {"n": ("value", "sum")}, uid="w").apply(out, uid="out")
    assert "2 late rows dropped" in stage.run(executor, flow).sentence
    assert out.seen == {(2, 50, 60, 2): 1}


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


LATE_US = 5 * SECOND_US


def reminders(stage: PlayedStage, out: Out, *, parallelism: int = 2, clock: str = "processing_time") -> Dataflow:
    """Return a job that sets timers for the rows that the test lets through."""
    flow = Dataflow("reminders", parallelism=parallelism)
    source = Gated(stage.directory / "in", [rows(1), rows(2, 103), rows(6), rows(4)], shut=True, endless=True)
    flow.source(source, uid="in", parallelism=1).key_by("key").apply(Reminders(clock), uid="remind").apply(
        out, uid="out"
    )
    return flow


def fired(out: Out) -> dict[int, tuple[int, int]]:
    """Return for each value the whole seconds after which its timer fired, and when it fired."""
    return {value: ((now - since) // SECOND_US, now) for _, value, since, now in out.seen.elements()}


def timers_pace(executor: str, idle_us: int = SECOND_US // 2) -> dict[str, int]:
    """Return options of a job that often takes checkpoints and now and then looks for rows."""
    return {"checkpoint_interval_us": SECOND_US // 2, **({} if executor == "local" else {"idle_us": idle_us})}


def let_in(stage: PlayedStage, batches: int) -> None:
    (stage.directory / "in" / "0").write_text(str(batches))


@ON_BOTH
def test_they_fire_at_their_time_though_no_row_comes(stage: PlayedStage, executor: str) -> None:
    out, clock = Out(), VirtualClock()
    run = stage.begin(executor, reminders(stage, out), clock=clock, **timers_pace(executor))
    let_in(stage, 2)
    until(run, lambda: len(out.seen) == 4)
    found = fired(out)
    assert {value: after for value, (after, _) in found.items()} == {1: 1, 2: 2, 103: 3}
    assert [row for row in out.seen if row[1] == 1 and row[0] == 3], "the third set another timer"
    assert clock.now_us() < 10 * SECOND_US
    run.close()


@ON_BOTH
def test_an_idle_job_wakes_for_them(stage: PlayedStage, executor: str) -> None:
    out, clock = Out(), VirtualClock()
    flow = reminders(stage, out)
    let_in(stage, 1)
    run = stage.begin(executor, flow, clock=clock, **timers_pace(executor, 3600 * SECOND_US))
    until(run, lambda: len(out.seen) == 1)
    assert fired(out)[1][0] == 1
    run.close()


@EVERYWHERE
@pytest.mark.parametrize("parallelism", [2, 3])
def test_they_outlive_the_run_and_time_does_not_go_back(stage: PlayedStage, executor: str, parallelism: int) -> None:
    out, clock = Out(), VirtualClock()
    clock.wait_until(LATE_US)
    flow = reminders(stage, out)
    run = stage.begin(executor, flow, clock=clock, keep=None, **timers_pace(executor))
    let_in(stage, 3)
    until(run, lambda: run.rows_read == 4 and len(out.seen) >= 1)
    lose(run, published=run.published + 1)
    assert stage.newest.required_features[-1:] == ("processing_time_timers",)
    assert stage.newest.state("remind", "reminders").clock_now_us >= VIRTUAL_ORIGIN_US + LATE_US
    # The next machine's clock is behind: it stands still until it has caught up.
    again = stage.begin(
        other(executor),
        reminders(stage, out, parallelism=parallelism),
        clock=VirtualClock(),
        **timers_pace(other(executor)),
    )
    until(again, lambda: 6 in fired(out))
    assert fired(out)[6][0] == 6
    assert all(now >= VIRTUAL_ORIGIN_US + LATE_US for _, now in fired(out).values())
    again.close()


@ON_BOTH
def test_those_not_due_at_the_end_do_not_fire(stage: PlayedStage, executor: str) -> None:
    out = Out()
    flow = reminders(stage, out)
    let_in(stage, 3)
    run = stage.begin(executor, flow, **timers_pace(executor))
    until(run, lambda: 1 in fired(out))
    run.request_stop(StopMode.DRAIN)
    to_end(run)
    assert fired(out)[6][1] == 0, "the operator has seen what was left"


@ON_BOTH
def test_none_fires_behind_a_stop_and_all_do_when_the_job_goes_on(stage: PlayedStage, executor: str) -> None:
    out = Out()
    flow = reminders(stage, out)
    let_in(stage, 3)
    run = stage.begin(executor, flow, **timers_pace(executor))
    stopped(run, StopMode.NO_DRAIN, lambda: run.rows_read == 4)
    assert 6 not in fired(out)
    again = stage.begin(executor, reminders(stage, out), resume=True, **timers_pace(executor))
    until(again, lambda: 6 in fired(out))
    assert all(after >= value % 100 for value, (after, _) in fired(out).items())
    again.close()


def test_every_try_of_an_epoch_has_its_time(stage: PlayedStage) -> None:
    out, clock = Out(), VirtualClock()
    run = stage.begin("spark", reminders(stage, out), clock=clock, **timers_pace("spark"))
    let_in(stage, 2)
    # Each try takes ten seconds, and the first three of every epoch are lost.
    tries: list[int] = []

    def lose_some() -> None:
        clock.wait_until(clock.now_us() + 10 * SECOND_US)
        tries.append(clock.now_us())
        stage.stand.breaks = 1 if len(tries) % 4 else 0

    stage.stand.spoil = lose_some
    until(run, lambda: len(out.seen) == 4)
    # An epoch may begin when the last try of the previous one has ended.
    between = {VIRTUAL_ORIGIN_US + at_us for number, at_us in enumerate(tries, 1) if number % 4}
    assert between.isdisjoint({since for _, _, since, _ in out.seen})
    assert between.isdisjoint({now for _, now in fired(out).values()})
    run.close()


@pytest.mark.parametrize("lost", ["on_timer", "prepare", "process"])
@ON_BOTH
def test_each_fires_once_though_the_run_is_lost_and_the_job_rescaled(
    stage: PlayedStage, executor: str, lost: str
) -> None:
    values = [*range(1, 9)]
    out, clock = Out(stage.calls), VirtualClock()

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("lost", parallelism=parallelism)
        source = Gated(stage.directory / "in", [rows(value) for value in values], endless=True)
        read = made.source(source, uid="in", parallelism=1).key_by("key")
        read.apply(Losing(stage.calls), uid="remind").rebalance().apply(out, uid="out", parallelism=1)
        return made

    run = stage.begin(executor, flow(2), clock=clock, keep=None, **timers_pace(executor))
    until(run, lambda: len(out.seen) >= 2)
    stage.calls.fails({"on_timer": "remind/0 fires", "prepare": "out/0 prepare", "process": "remind/1 fires"}[lost])
    with pytest.raises(RunDiscarded):
        until(run, lambda: len(out.seen) == len(values))
    run.close()
    again = stage.begin(other(executor), flow(3), clock=clock, **timers_pace(other(executor)))
    until(again, lambda: len(out.seen) == len(values))
    assert sorted(row[1] for row in out.seen.elements()) == values
    again.close()


@pytest.mark.parametrize(("before", "after"), [("processing_time", "event_time"), ("event_time", "processing_time")])
def test_another_clock_is_another_state(stage: PlayedStage, before: str, after: str) -> None:
    run = stage.begin("local", reminders(stage, Out(), clock=before))
    let_in(stage, 1)
    lose(run, published=2)
    with pytest.raises(RestoreRefused, match=f"clock was {before} and would be {after}"):
        stage.begin("local", reminders(stage, Out(), clock=after))


def test_there_are_two_clocks(stage: PlayedStage) -> None:
    with pytest.raises(InvalidInput, match=r"'lunar'\. Choose 'event_time' or 'processing_time'"):
        stage.begin("local", reminders(stage, Out(), clock="lunar"))
