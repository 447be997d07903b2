"""Jobs that are fed and killed for minutes, lose and repeat nothing."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from stateformat.backends.connectors import FileSink, MemorySource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import JobOutcome
from stateformat.model import StopMode
from tests.soak import answers, feeding, watching
from tests.soak.__main__ import soak
from tests.spark.spark_failures import Drivers, Place, judge
from tests.tally import Tally
from tests.worlds.jobs import LapJob, StateJob, every_operator, hops_job, two_heads
from tests.worlds.stages import EXECUTORS, Stage, batches

pytestmark = [pytest.mark.truth, pytest.mark.spark]
OBJECTS_MAX = 80
"""For a store that keeps ten checkpoints: three objects each, and the layers below them."""
MEMORY_MAX_MB = {"local": 600, "spark": 4_000}
"""About twice what the processes of a job use."""
LEAK_MAX_MB = 50
"""In three quarters of a minute. The memory of a job in process stays within 20 MB."""


@pytest.mark.timeout(1500)
def test_a_job_that_is_fed_and_killed_loses_and_repeats_nothing_and_its_store_stays_small(
    tmp_path: Path, tally: Tally
) -> None:
    for job in soak(tmp_path, minutes=1.5, kill_every_s=25):
        with tally.trying(f"soak: killed on {job.executor}", tried=job.kills):
            assert job.kills >= 2
            assert answers.differences(job.folder) == dict.fromkeys(answers.EXPECTED, 0)
            assert max(sample.objects for sample in job.samples) <= OBJECTS_MAX
            assert max(sample.prepared for sample in job.samples) <= OBJECTS_MAX
            assert max(sample.memory_bytes for sample in job.samples) / 1e6 <= MEMORY_MAX_MB[job.executor]


@pytest.mark.timeout(1500)
def test_a_job_in_process_that_is_not_killed_leaks_nothing_and_a_quiet_source_holds_nothing_up(
    tmp_path: Path,
) -> None:
    [job] = soak(tmp_path, minutes=1.5, executors=["local"], kill_every_s=math.inf)
    assert answers.differences(job.folder) == dict.fromkeys(answers.EXPECTED, 0)
    memory, objects, prepared, *_ = watching.growth(job.samples, samples_min=8)
    assert memory.after <= memory.before + LEAK_MAX_MB
    assert objects.is_flat
    assert prepared.is_flat
    windows_written_at = {path.stat().st_mtime // 5 for path in (job.folder / "out" / "windows").glob("*.parquet")}
    assert len(windows_written_at) >= 3


@pytest.mark.timeout(1500)
def test_what_grows_from_the_second_quarter_of_a_soak_to_the_last_is_told() -> None:
    def sample(at_s: int, *, memory: int, objects: int, processor_s: float) -> watching.Sample:
        return watching.Sample(at_s, 100 + at_s, memory, objects, 0, at_s, at_s**2, processor_s)

    flat = [
        sample(at_s, memory=200_000_000 + at_s, objects=30 + at_s % 5, processor_s=at_s / 100) for at_s in range(160)
    ]
    assert [figure.what for figure in watching.growth(flat) if not figure.is_flat] == []
    growing = [sample(at_s, memory=2_000_000 * at_s, objects=at_s, processor_s=at_s**2 / 1000) for at_s in range(160)]
    told = [figure.what for figure in watching.growth(growing) if not figure.is_flat]
    assert told == ["memory, MB", "objects of the store", "processor time in a second, ms"]


@pytest.mark.timeout(1500)
def test_an_order_that_is_fed_twice_and_one_that_is_lost_are_both_told(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    feeding.prepare(tmp_path)
    for number in range(2):
        pq.write_table(feeding.orders_of(number), tmp_path / "orders" / f"{number}.parquet")
    with answers.database(tmp_path) as known:
        tables = {name: known.sql(query).to_arrow_table() for name, query in answers.EXPECTED.items()}
    for name, table in tables.items():
        (tmp_path / "out" / name).mkdir()
        pq.write_table(table, tmp_path / "out" / name / "part.parquet")
    assert answers.differences(tmp_path) == dict.fromkeys(tables, 0)
    pq.write_table(tables["windows"].slice(1), tmp_path / "out" / "windows" / "part.parquet")
    pq.write_table(tables["laps"].slice(0, 1), tmp_path / "out" / "laps" / "again.parquet")
    assert answers.differences(tmp_path) == {name: int(name in ("windows", "laps")) for name in tables}


# ---- drivers and executors of Spark that are killed

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


@pytest.mark.timeout(1200)
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


@pytest.mark.timeout(1200)
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


@pytest.mark.timeout(1200)
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


# ---- jobs that move from executor to executor, lost or stopped, each time at another parallelism

WORDS = {
    "lost at once": "lost with its driver right after a checkpoint",
    "lost": "lost with its driver later",
    "ended": "goes to its end",
}


@pytest.fixture
def stage(tmp_path: Path, request: pytest.FixtureRequest) -> Stage:
    """Where a job runs; Spark is started when it is needed."""
    return Stage(tmp_path, lambda: request.getfixturevalue("spark"))


class Wandering:
    """Runs a job in legs, each made by ``flow(parallelism)``. The last goes to the end."""

    def __init__(self, stage: Stage, seed: int, tally: Tally, **options: Any) -> None:
        self.stage = stage
        self.choose = random.Random(seed)
        self.tally = tally
        self.options = options
        self.told: list[str] = []

    def go(self, flow: Callable[[int], Dataflow], legs: int = 5) -> int:
        """Run the legs; return the parallelism of the last one."""
        executor, parallelism = self.choose.choice(EXECUTORS), 0
        for leg in range(legs):
            parallelism = self.choose.choice([n for n in (1, 2, 3, 4, 5) if n != parallelism])
            if self._leg(executor, flow(parallelism), last=leg == legs - 1):
                break
            executor = EXECUTORS[1 - EXECUTORS.index(executor)]
        return parallelism

    def _leg(self, executor: str, flow: Dataflow, *, last: bool) -> bool:
        how = "ended" if last else self.choose.choice(["lost at once", "lost", "lost", "stopped"])
        run = self.stage.runtime(executor, resume=True, requests_every_us=None, **self.options).begin(flow)
        if isinstance(run, JobOutcome):
            return True  # The leg before had already come to the end.
        published = self.choose.randint(1, 3)
        going = True
        while going and (last or run.published < published):
            going = run.step()
        if going and how == "stopped":
            run.request_stop(StopMode.NO_DRAIN)
            while run.step():
                pass
            assert run.outcome is not None
            going = run.outcome.stop is not None
            how = "stopped" if going else "ended"
        elif going and how == "lost":
            for _ in range(1 if executor == "spark" else self.choose.randint(1, 80)):
                going = going and run.step()
        if going:
            run.close()
        what = how if going or how == "stopped" else "goes to its end"
        self.tally.add(f"a job on {executor} {WORDS.get(what, what)}", tried=1, wrong=0)
        return not going


@pytest.mark.parametrize("seed", range(5))
def test_every_ready_made_operator_gives_the_same_wherever_it_was(stage: Stage, seed: int, tally: Tally) -> None:
    case = every_operator(3)

    def flow(parallelism: int) -> Dataflow:
        made = case.flow()
        made.parallelism = parallelism
        return made

    Wandering(stage, seed, tally, checkpoint_rows=10).go(flow)
    assert case.outs() == case.expected


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_of_state_comes_along(stage: Stage, seed: int, tally: Tally) -> None:
    job = StateJob(stage.directory, range(80), shut=False)
    parallelism = Wandering(stage, 100 + seed, tally, checkpoint_rows=8).go(job.flow)
    seen = Counter({row: count for row, count in job.out.seen.items() if row[0] != "broadcast"})
    expected = Counter({row: count for row, count in job.expected(parallelism).items() if row[0] != "broadcast"})
    assert seen == expected
    tables = Counter({row[1:]: count for row, count in job.out.seen.items() if row[0] == "broadcast"})
    # A subtask that ended before the job moved on has emitted its copy already.
    assert {value for _, value in tables} == {100, 200}


@pytest.mark.parametrize("seed", range(3))
def test_loops_turn_on_wherever_they_are(stage: Stage, seed: int, tally: Tally) -> None:
    for number, case in enumerate((hops_job(seed), two_heads(3))):
        here = Stage(stage.directory / str(number), stage.spark)

        def flow(parallelism: int, case: Any = case) -> Dataflow:
            made: Dataflow = case.flow()
            made.parallelism = parallelism
            return made

        Wandering(here, 200 + seed, tally, checkpoint_interval_us=20_000).go(flow, legs=3)
        assert case.outs() == case.expected
    laps = LapJob(stage.directory / "laps", late=True)
    Wandering(Stage(stage.directory / "laps", stage.spark), 300 + seed, tally, checkpoint_interval_us=20_000).go(
        lambda parallelism: laps.flow(parallelism, 2), legs=3
    )
    assert laps.out.values == laps.expected


def test_files_are_there_once_wherever_they_were_written(stage: Stage, tally: Tally) -> None:
    folder = stage.directory / "out"

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("files", parallelism=parallelism)
        read = made.source(MemorySource(batches(range(200), 10), splits=4, batch_rows=10), uid="in")
        read.key_by("key").apply(FileSink(folder), uid="out")
        return made

    Wandering(stage, 7, tally, checkpoint_rows=10).go(flow)
    assert sorted(ds.dataset(folder, format="parquet").to_table()["value"].to_pylist()) == [*range(200)]
