"""Timers of processing time on both executors: when they fire, and what becomes of them."""

from __future__ import annotations

import pytest

from stateformat.backends.dataflow import Dataflow
from stateformat.backends.runtime import VIRTUAL_ORIGIN_US, RunDiscarded, VirtualClock
from stateformat.errors import InvalidInput, RestoreRefused
from stateformat.model import StopMode
from tests.conformance import Gated, Out, lose, stopped, to_end, until
from tests.local_jobs import rows
from tests.played_stage import EVERYWHERE, ON_BOTH, PlayedStage, other
from tests.timer_jobs import SECOND_US, Losing, Reminders

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


def pace(executor: str, idle_us: int = SECOND_US // 2) -> dict[str, int]:
    """Return options of a job that often takes checkpoints and now and then looks for rows."""
    return {"checkpoint_interval_us": SECOND_US // 2, **({} if executor == "local" else {"idle_us": idle_us})}


def let(stage: PlayedStage, batches: int) -> None:
    (stage.directory / "in" / "0").write_text(str(batches))


@ON_BOTH
def test_they_fire_at_their_time_though_no_row_comes(stage: PlayedStage, executor: str) -> None:
    out, clock = Out(), VirtualClock()
    run = stage.begin(executor, reminders(stage, out), clock=clock, **pace(executor))
    let(stage, 2)
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
    let(stage, 1)
    run = stage.begin(executor, flow, clock=clock, **pace(executor, 3600 * SECOND_US))
    until(run, lambda: len(out.seen) == 1)
    assert fired(out)[1][0] == 1
    run.close()


@EVERYWHERE
@pytest.mark.parametrize("parallelism", [2, 3])
def test_they_outlive_the_run_and_time_does_not_go_back(stage: PlayedStage, executor: str, parallelism: int) -> None:
    out, clock = Out(), VirtualClock()
    clock.wait_until(LATE_US)
    flow = reminders(stage, out)
    run = stage.begin(executor, flow, clock=clock, keep=None, **pace(executor))
    let(stage, 3)
    until(run, lambda: run.rows_read == 4 and len(out.seen) >= 1)
    lose(run, published=run.published + 1)
    assert stage.newest.required_features[-1:] == ("processing_time_timers",)
    assert stage.newest.state("remind", "reminders").clock_now_us >= VIRTUAL_ORIGIN_US + LATE_US
    # The next machine's clock is behind: it stands still until it has caught up.
    again = stage.begin(
        other(executor),
        reminders(stage, out, parallelism=parallelism),
        clock=VirtualClock(),
        **pace(other(executor)),
    )
    until(again, lambda: 6 in fired(out))
    assert fired(out)[6][0] == 6
    assert all(now >= VIRTUAL_ORIGIN_US + LATE_US for _, now in fired(out).values())
    again.close()


@ON_BOTH
def test_those_not_due_at_the_end_do_not_fire(stage: PlayedStage, executor: str) -> None:
    out = Out()
    flow = reminders(stage, out)
    let(stage, 3)
    run = stage.begin(executor, flow, **pace(executor))
    until(run, lambda: 1 in fired(out))
    run.request_stop(StopMode.DRAIN)
    to_end(run)
    assert fired(out)[6][1] == 0, "the operator has seen what was left"


@ON_BOTH
def test_none_fires_behind_a_stop_and_all_do_when_the_job_goes_on(stage: PlayedStage, executor: str) -> None:
    out = Out()
    flow = reminders(stage, out)
    let(stage, 3)
    run = stage.begin(executor, flow, **pace(executor))
    stopped(run, StopMode.NO_DRAIN, lambda: run.rows_read == 4)
    assert 6 not in fired(out)
    again = stage.begin(executor, reminders(stage, out), resume=True, **pace(executor))
    until(again, lambda: 6 in fired(out))
    assert all(after >= value % 100 for value, (after, _) in fired(out).items())
    again.close()


def test_every_try_of_an_epoch_has_its_time(stage: PlayedStage) -> None:
    out, clock = Out(), VirtualClock()
    run = stage.begin("spark", reminders(stage, out), clock=clock, **pace("spark"))
    let(stage, 2)
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

    run = stage.begin(executor, flow(2), clock=clock, keep=None, **pace(executor))
    until(run, lambda: len(out.seen) >= 2)
    stage.calls.fails({"on_timer": "remind/0 fires", "prepare": "out/0 prepare", "process": "remind/1 fires"}[lost])
    with pytest.raises(RunDiscarded):
        until(run, lambda: len(out.seen) == len(values))
    run.close()
    again = stage.begin(other(executor), flow(3), clock=clock, **pace(other(executor)))
    until(again, lambda: len(out.seen) == len(values))
    assert sorted(row[1] for row in out.seen.elements()) == values
    again.close()


@pytest.mark.parametrize(("before", "after"), [("processing_time", "event_time"), ("event_time", "processing_time")])
def test_another_clock_is_another_state(stage: PlayedStage, before: str, after: str) -> None:
    run = stage.begin("local", reminders(stage, Out(), clock=before))
    let(stage, 1)
    lose(run, published=2)
    with pytest.raises(RestoreRefused, match=f"clock was {before} and would be {after}"):
        stage.begin("local", reminders(stage, Out(), clock=after))


def test_there_are_two_clocks(stage: PlayedStage) -> None:
    with pytest.raises(InvalidInput, match=r"'lunar'\. Choose 'event_time' or 'processing_time'"):
        stage.begin("local", reminders(stage, Out(), clock="lunar"))
