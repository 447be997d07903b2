"""Answers to messages sent before the end of the input are data, on both executors.

Loops stay within their bound: fed-back records go first, and a loop that grows fails.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from stateformat.backends.local import JobFailed
from stateformat.backends.runtime import Run
from stateformat.model import StopMode
from tests.worlds.jobs import AnswerJob, AnswerLoopJob, LapJob, hops_job, two_heads
from tests.worlds.stages import EVERYWHERE, EXECUTORS, ON_BOTH, PlayedStage, other, stopped, to_end, until

BOTH = pytest.mark.parametrize("executor", EXECUTORS)
DRAIN, SUSPEND = StopMode.DRAIN, StopMode.NO_DRAIN


@pytest.mark.parametrize(("executor", "seed"), [*(("local", seed) for seed in range(5)), ("spark", 0)])
def test_every_answer_comes_before_the_end_in_chains_too(stage: PlayedStage, executor: str, seed: int) -> None:
    job = AnswerJob(stage.directory)
    stage.run(executor, job.flow(), seed=seed)
    assert job.committed == job.expected
    for uid in ("op", "second"):
        for subtask in (0, 1):
            calls = stage.calls.of(f"{uid}/{subtask}", "process", "receive", "end_input", "finish")
            assert calls[-2:] == ["end_input 0", "finish"]
            assert calls.count("finish") == 1


@pytest.mark.spark
def test_every_answer_comes_before_the_end_on_a_cluster(stage: PlayedStage) -> None:
    job = AnswerJob(stage.directory, 4, trips=1)
    stage.run("cluster", job.flow(1))
    assert job.committed == job.expected


@BOTH
@pytest.mark.parametrize("call", ["op/0 receive 4", "op/1 end_input", "second/1 receive 3"])
def test_no_answer_is_lost_or_twice_where_the_job_starts_again(stage: PlayedStage, executor: str, call: str) -> None:
    job = AnswerJob(stage.directory)
    stage.calls.fails(call)
    checkpoints = {"checkpoint_interval_us": 3_000} if executor == "local" else {"checkpoint_rows": 4}
    assert stage.run(executor, job.flow(), **checkpoints).restarts == 1
    assert job.committed == job.expected


@BOTH
def test_no_answer_is_lost_wherever_the_driver_is_and_at_any_parallelism(stage: PlayedStage, executor: str) -> None:
    job = AnswerJob(stage.directory, 8, trips=3)
    often: dict[str, Any] = {"checkpoint_interval_us": 4_000} if executor == "local" else {"checkpoint_rows": 2}
    for lives in range(100):
        run = stage.runtime(executor, seed=lives, **often).begin(job.flow(1 + lives % 3))
        if not isinstance(run, Run):
            break
        for _ in range(40 + 10 * lives if executor == "local" else 1 + lives % 3):
            run.step()
        run.close()
    assert 4 < lives < 99
    assert job.committed == job.expected


@BOTH
def test_a_drain_waits_for_the_answers(stage: PlayedStage, executor: str) -> None:
    job = AnswerJob(stage.directory, shut=True)
    job.source.let(0, 6)
    job.source.let(1, 6)
    run = stage.begin(executor, job.flow(), requests_every_us=None)
    stopped(run, DRAIN, lambda: run.rows_read >= 11)
    out, more = job.committed
    assert len(out) == run.rows_read
    assert more == out


@BOTH
def test_a_stop_without_drain_keeps_the_answers_that_are_awaited(stage: PlayedStage, executor: str) -> None:
    for seed in range(2 if executor == "local" else 1):
        here = stage.at(str(seed))
        job = AnswerJob(here.directory, trips=6)
        run = here.begin(executor, job.flow(), requests_every_us=None, seed=seed)
        until(run, lambda run=run: run.rows_read == 12)
        if executor == "local":
            until(run, lambda run=run: "asking" in run.describe())
        run.request_stop(SUSPEND)
        assert to_end(run).stop is not None
        assert job.committed != job.expected
        here.run(other(executor), job.flow(3), resume=True)
        assert job.committed == job.expected


@pytest.mark.parametrize(("executor", "seed"), [*(("local", seed) for seed in range(4)), ("spark", 0)])
def test_a_loop_that_turns_by_answers_ends_when_none_is_to_come(stage: PlayedStage, executor: str, seed: int) -> None:
    job = AnswerLoopJob(stage.directory)
    stage.run(executor, job.flow(), seed=seed)
    assert job.out.values == job.expected


@BOTH
def test_answers_without_end_name_the_operator(
    stage: PlayedStage, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stateformat.backends.dataflow.task.ANSWER_ROUNDS_MAX", 5)
    job = AnswerJob(stage.directory, 2, trips=1_000_000)
    with pytest.raises(JobFailed, match="operator 'op' has sent messages to its coordinator for 5 rounds"):
        stage.run(executor, job.flow(), max_restarts=0)


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
