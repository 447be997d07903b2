"""Jobs that move from executor to executor, lost or stopped, each time at another parallelism."""

from __future__ import annotations

import random
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
from tests.tally import Tally
from tests.worlds.jobs import LapJob, StateJob, every_operator, hops_job, two_heads
from tests.worlds.stages import EXECUTORS, Stage, batches

pytestmark = [pytest.mark.truth, pytest.mark.spark]

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
