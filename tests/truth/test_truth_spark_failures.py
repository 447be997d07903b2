"""Drivers and executors of Spark that are killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.spark.spark_failures import Drivers, Place, judge
from tests.tally import Tally

pytestmark = [pytest.mark.spark, pytest.mark.truth, pytest.mark.timeout(1200)]

SEEDS, KILLS_EACH = 5, 5
POINTS = ("kill-before", "kill-after", "commit", "committed")
"""Where drivers die: before a record is created, after it, half committed, committed."""
HITS = ("seen.process.2", "records-out.prepared.2")
"""Where an executor is killed: a late task of the second level, and of the last."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def drivers(spark: Any) -> Drivers:
    """Drivers in processes of their own."""
    return Drivers(spark)


@pytest.fixture(scope="module")
def epoch_s(drivers: Drivers, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Return how long an epoch takes on this machine, when everything is warm."""
    for name in ("cold", "warm"):
        place = Place(tmp_path_factory.mktemp(name))
        process = drivers.start(place)
        began = time.monotonic()
        process.join(240)
        assert process.exitcode == 0
    return (time.monotonic() - began) / judge(place).checkpoints


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_driver_that_is_killed_at_any_instant_is_as_if_it_had_not_been(
    drivers: Drivers, epoch_s: float, tmp_path: Path, tally: Tally, seed: int
) -> None:
    rng, killed, jobs = random.Random(seed), 0, 0
    while killed < KILLS_EACH:
        jobs += 1
        place = Place(tmp_path / str(jobs))
        before = killed
        while killed < KILLS_EACH and drivers.kill(place, rng.uniform(0, 2 * epoch_s)):
            killed += 1
        with tally.trying("spark: driver killed at a random instant", tried=killed - before):
            assert (place.directory / "ended").exists() or drivers.run(place) == 0
            judge(place)
        assert jobs <= KILLS_EACH, "drivers end before they can be killed"


def test_a_driver_that_is_killed_around_a_publication_or_a_commit_is_as_if_it_had_not_been(
    drivers: Drivers, tmp_path: Path, tally: Tally
) -> None:
    place = Place(tmp_path)
    for number in range(40):
        point = POINTS[number % len(POINTS)]
        order = (point, "kill") if point.startswith("commit") else ("driver.publish", point)
        place.orders.give(*order)
        if drivers.run(place) == 0:
            break
        assert not place.orders.left
    else:
        raise AssertionError("the job comes to no end")
    assert number >= 8
    with tally.trying("spark: driver killed around a publication or a commit", tried=number):
        judge(place)


@pytest.mark.parametrize("compare", ["true", "false"])
def test_an_executor_that_is_lost_with_what_others_have_read_is_noticed(
    tmp_path: Path, tally: Tally, compare: str
) -> None:
    program = [sys.executable, "-m", "tests.spark.spark_executors", str(tmp_path), compare, *HITS]
    said = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=True).stdout
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert all(each["happened"] for each in found)
    mixed = [each for each in found if each["wrong"] is not None]
    if compare == "false":
        assert mixed, "nothing would have gone wrong, so nothing was shown"
        return
    assert len(found) == len(HITS)
    with tally.trying("spark: executor killed", tried=len(found)):
        assert not mixed
        assert any("attempt" in line for each in found for line in each["told"])
