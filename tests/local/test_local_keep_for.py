"""Jobs that keep what is young: ``keep_for_us`` beside ``keep``, by records of clocks that jump."""

from __future__ import annotations

import time
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.local import LocalRun
from stateformat.errors import InvalidInput
from stateformat.history import record_ids
from stateformat.model import KEEP_PROPERTY
from tests.local_jobs import Bench, to_end, until
from tests.local_stops import SUSPEND, Job

HOUR_US = 3600 * 10**6


class Wall:
    """The system's clock, as records tell it: so far on with each checkpoint."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_us: int) -> None:
        self.now_us, self.step_us = 1_000 * HOUR_US, step_us
        monkeypatch.setattr(time, "time_ns", lambda: self.now_us * 1000)


def publish(job: Job, wall: Wall, times: int, **options: Any) -> list[int]:
    """Let a run publish so often, one step after the other; which checkpoints are left."""
    bench, run = job.bench, job.begin(checkpoint_interval_us=1, requests_every_us=None, **options)
    for _ in range(times):
        before = bench.newest_id
        bench.due(run)
        until(run, lambda before=before: bench.newest_id > before)  # type: ignore[misc]
        until(run, lambda: run.in_flight is None)
        wall.now_us += wall.step_us
    return [int(number) for number in record_ids(bench.store.storage)]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        # Ten looks in the time: what is left is up to a tenth of it older.
        ({"keep": 1, "keep_for_us": 5 * HOUR_US}, 6),
        ({"keep": None, "keep_for_us": 5 * HOUR_US}, 6),
        ({"keep": 9, "keep_for_us": 5 * HOUR_US}, 9),
        ({"keep_for_us": 5 * HOUR_US}, 10),
        ({"keep": 2, "keep_for_us": 0}, 2),
        ({"keep": 2}, 2),
        ({"keep": None}, 14),
    ],
)
def test_what_is_younger_than_the_time_or_among_the_newest_is_kept(
    options: dict[str, Any], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, wall = Job(shut=True), Wall(monkeypatch, HOUR_US)
    found = publish(job, wall, 14, **options)
    assert found == [*range(found[-1] - left + 1, found[-1] + 1)]


@pytest.mark.parametrize("jump_us", [10**6 * HOUR_US, -500 * HOUR_US])
def test_a_clock_that_jumps_takes_no_more_than_the_number_allows(jump_us: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job, wall = Job(shut=True), Wall(monkeypatch, HOUR_US)
    before = publish(job, wall, 8, keep=4, keep_for_us=100 * HOUR_US)
    assert len(before) == 8
    wall.now_us += jump_us
    after = publish(job, wall, 2, keep=4, keep_for_us=100 * HOUR_US)
    assert after[-1] == before[-1] + 2
    assert len(after) == (4 if jump_us > 0 else 10)


def test_who_says_how_long_leaves_no_default_number_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    job, wall = Job(shut=True), Wall(monkeypatch, 1)
    assert len(publish(job, wall, 12, keep_for_us=HOUR_US)) == 12
    assert KEEP_PROPERTY not in job.bench.store.open().record.properties
    # A later run without it keeps all, and says so.
    assert len(publish(job, wall, 1)) == 13


def test_a_time_to_keep_is_a_whole_number() -> None:
    for wrong in (-1, 1.5, "7d"):
        with pytest.raises(InvalidInput, match="keep_for_us"):
            Bench("memory://bench").runtime(keep_for_us=wrong)


def test_a_job_begins_with_a_pin_by_its_name() -> None:
    job = Job()
    run = job.saved_once()
    store = sf.open(job.bench.store.url)
    pinned = store.pin(None, "before-fix").checkpoint_id
    run.request_stop(SUSPEND)
    to_end(run)
    again = Bench("memory://again")
    job.tap.let(0)
    going = again.runtime(start_from=f"{store.url}@before-fix").begin(job.flow())
    assert isinstance(going, LocalRun)
    to_end(going)
    assert min(record_ids(again.store.storage)) == pinned + 1
    store.unpin("before-fix")
