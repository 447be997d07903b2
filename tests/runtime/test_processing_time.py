"""What operators see as wall-clock time: it never goes back, whoever sets the clock."""

from __future__ import annotations

import pytest

from stateformat.backends.local import VirtualClock
from stateformat.backends.runtime import VIRTUAL_ORIGIN_US, ProcessingTime, SystemClock


class Wall(VirtualClock):
    """A clock of which the wall is set by hand."""

    def __init__(self, wall_us: int) -> None:
        super().__init__()
        self.shown_us = wall_us

    def wall_us(self) -> int:
        return self.shown_us


@pytest.mark.parametrize(
    ("seen_us", "shown_us", "expected"),
    [
        pytest.param(0, [10, 20, 30], [10, 20, 30], id="as the wall"),
        pytest.param(0, [10, 5, 11], [10, 10, 11], id="the wall is set back"),
        pytest.param(15, [10, 14, 16], [15, 15, 16], id="a checkpoint has seen later times"),
    ],
)
def test_it_never_goes_back(seen_us: int, shown_us: list[int], expected: list[int]) -> None:
    clock = Wall(shown_us[0])
    time = ProcessingTime(clock, seen_us)
    found = []
    for shown in shown_us:
        clock.shown_us = shown
        found.append(time.advance())
    assert found == expected


def test_a_step_has_one_moment() -> None:
    clock = VirtualClock()
    time = ProcessingTime(clock)
    began = time.advance()
    clock.tick()
    assert time.now_us == began
    assert time.advance() == began + 1000


def test_a_virtual_clock_begins_at_the_same_moment_in_every_run() -> None:
    first, second = VirtualClock(), VirtualClock()
    first.wait_until(500)
    assert (first.wall_us(), second.wall_us()) == (VIRTUAL_ORIGIN_US + 500, VIRTUAL_ORIGIN_US)


def test_the_executors_clock_says_when_the_wall_will_show_a_time() -> None:
    clock = VirtualClock()
    clock.wait_until(700)
    time = ProcessingTime(clock)
    assert time.clock_at(VIRTUAL_ORIGIN_US + 1000) == 1000
    assert time.clock_at(VIRTUAL_ORIGIN_US) == 700


def test_the_systems_wall_shows_time_since_1970() -> None:
    assert SystemClock().wall_us() > 1_700_000_000_000_000
