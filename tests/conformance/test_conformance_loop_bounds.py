"""Loops stay within their bound: fed-back records go first, and a loop that grows fails."""

from __future__ import annotations

import re

import pytest

from stateformat.backends.local import JobFailed
from tests.conformance import to_end, until
from tests.conformance_jobs import LapJob, hops_job, two_heads
from tests.played_stage import EVERYWHERE, ON_BOTH, PlayedStage


@ON_BOTH
@pytest.mark.parametrize("bytes_max", [20_000, 60_000])
def test_loops_that_always_press_come_to_their_end_without_a_deadlock(
    stage: PlayedStage, executor: str, bytes_max: int
) -> None:
    for name, case in (("hops", hops_job()), ("two", two_heads(2))):
        stage.at(name).run(executor, case.flow(), loop_bytes_max=bytes_max)
        assert case.outs() == case.expected


@EVERYWHERE
def test_a_loop_that_holds_too_much_fails_at_once_with_a_sentence(stage: PlayedStage, executor: str) -> None:
    job = LapJob(stage.directory, spins=True)
    said = "bytes of records wait in the loop of operator 'head'"
    with pytest.raises(JobFailed, match=re.escape(said)) as caught:
        stage.run(executor, job.flow(2, 3), loop_bytes_max=1000)
    assert "retrying cannot help" in str(caught.value)
    assert "raise loop_bytes_max" in str(caught.value)
    job.spins.unlink()
    stage.run(executor, job.flow(2, 3))
    assert job.out.values == job.expected


@pytest.mark.parametrize("executor", ["spark"])
def test_no_source_reads_while_a_loop_is_half_full(stage: PlayedStage, executor: str) -> None:
    job = LapJob(stage.directory, spins=True)
    job.source.let(0, 1)
    run = stage.begin(executor, job.flow(1, 1), loop_bytes_max=2000, requests_every_us=None)
    until(run, lambda: run.rows_read == 2)
    job.source.let(0)
    for _ in range(6):
        run.step()
    assert run.rows_read == 2
    run.stop_soon()
    assert to_end(run).interrupted
    job.spins.unlink()
    stage.run("local", job.flow(2, 3))
    assert job.out.values == job.expected
