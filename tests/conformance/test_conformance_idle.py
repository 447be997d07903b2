"""Inputs without rows hold back event time until they are idle; on both executors."""

from __future__ import annotations

from pathlib import Path

import pytest

from stateformat.backends.dataflow import Dataflow, EventTime, Stream
from stateformat.backends.runtime import VirtualClock
from stateformat.errors import InvalidInput
from tests.conformance import Gated, Out, to_end, until
from tests.local_jobs import ROWS, rows
from tests.played_stage import EVERYWHERE, ON_BOTH, PlayedStage
from tests.spark_in_process import Ranges, RangeSource
from tests.timer_jobs import SECOND_US, Union

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
