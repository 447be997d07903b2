"""``apply_per_key`` on both executors gives what plain Python gives, despite crashes, stops and
rescales.
"""

from __future__ import annotations

import pytest

from stateformat.errors import CheckpointError
from stateformat.model import StopMode
from tests.conformance import lose, stopped
from tests.conformance_per_key import CallsOfEpochs, PerKeyJob, expected
from tests.played_stage import EVERYWHERE, ON_BOTH, PlayedStage, other


@EVERYWHERE
def test_every_kind_of_state_and_timers_give_the_same(stage: PlayedStage, executor: str) -> None:
    job = PerKeyJob(stage)
    stage.run(executor, job.flow(3), checkpoint_rows=20)
    assert job.out.seen == expected()


@ON_BOTH
def test_a_function_that_raised_goes_on_from_the_checkpoint(stage: PlayedStage, executor: str) -> None:
    job = PerKeyJob(stage)
    job.calls.fails("value 33")
    outcome = stage.run(executor, job.flow(2), checkpoint_rows=10)
    assert outcome.restarts == 1
    assert job.out.seen == expected()


@ON_BOTH
def test_what_raises_again_ends_the_job_with_the_key(stage: PlayedStage, executor: str) -> None:
    job = PerKeyJob(stage)
    for _ in range(3):
        job.calls.fails("value 33")
    with pytest.raises(CheckpointError, match="of key 1 raised Boom: value 33"):
        stage.run(executor, job.flow(2), checkpoint_rows=10, max_restarts=0)


@pytest.mark.parametrize("first", ["local", "spark"])
def test_it_goes_to_the_other_executor_and_back_at_other_parallelisms(stage: PlayedStage, first: str) -> None:
    job = PerKeyJob(stage, shut=True)
    job.source.let(0, 4)
    run = stage.begin(first, job.flow(4))
    stopped(run, StopMode.NO_DRAIN, lambda: run.rows_read == 20)

    job.source.let(0, 8)
    lost = stage.begin(other(first), job.flow(6), resume=True, checkpoint_rows=10)
    lose(lost, published=2)

    job.source.let(0)
    stage.run(first, job.flow(3), checkpoint_rows=10, resume=True)
    assert job.out.seen == expected()


def test_on_spark_a_key_is_called_once_in_an_epoch(stage: PlayedStage) -> None:
    job = CallsOfEpochs(stage)
    stage.run("spark", job.flow())
    assert job.out.values == [*range(40)]
    assert sorted(stage.calls.calls) == [f"fn key {key}" for key in range(4)]
