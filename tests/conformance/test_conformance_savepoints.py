"""Savepoints of a job that goes on, on both executors: whatever happens to the job, the savepoint
is whole, and a job that starts from it has the same output.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.runtime import Run, SystemClock
from stateformat.errors import CheckpointError
from stateformat.model import StopMode
from stateformat.requests import RequestAnswer, RequestOutcome
from tests.conformance import Gated, Out, Told, batches, to_end, until
from tests.played_stage import EVERYWHERE, PlayedStage, other

ALL = [*range(24)]


class Saved:
    """A job with two splits, and the savepoint that is requested from it."""

    def __init__(self, stage: PlayedStage, executor: str) -> None:
        self.stage = stage
        self.executor = executor
        self.out = Out()
        self.source = Gated(stage.directory / "in", batches(range(0, 24, 2), 2), batches(range(1, 24, 2), 2))
        self.source.let(0, 2)
        self.source.let(1, 2)

    def flow(self, out: Out | None = None, parallelism: int = 2) -> Dataflow:
        flow = Dataflow("saved", parallelism=parallelism)
        rows_in = flow.source(self.source, uid="in", parallelism=2).key_by("key")
        rows_in.apply(Told(self.stage.calls), uid="op").apply(out or self.out, uid="out")
        return flow

    def begin(self, **options: Any) -> Run:
        options = {"clock": SystemClock(), "requests_every_us": 1, "keep": None, **options}
        if self.executor == "local":
            options.setdefault("checkpoint_interval_us", 20_000)
        return self.stage.begin(self.executor, self.flow(), **options)

    def asked(self, run: Run) -> str:
        """Request a savepoint once there is a store; return the request's id."""
        until(run, lambda: run.published >= 1 and run.rows_read == 8, steps=100_000)
        return self.stage.store.request_savepoint(self.stage.directory / "kept").id

    def answer(self, request: str) -> RequestAnswer | None:
        return self.stage.store.request_answer(request)

    def answered(self, run: Run, request: str) -> RequestAnswer:
        until(run, lambda: self.answer(request), steps=100_000)
        found = self.answer(request)
        assert found is not None
        return found

    def check(self, answer: RequestAnswer | None) -> None:
        """Check that the savepoint is whole, and that a job that starts from it commits what is
        missing, on the other executor and at another parallelism.
        """
        assert answer is not None
        assert answer.outcome is RequestOutcome.SAVED, answer
        kept = sf.open(str(answer.savepoint))
        assert not sf.validate(kept, level="full").problems
        assert kept.open().record.checkpoint_id == answer.checkpoint_id
        self.source.let_all()
        again, own = Out(), self.stage.store_at(f"file://{self.stage.directory / 'own'}")
        begun = self.stage.runtime(other(self.executor), store=own, start_from=str(answer.savepoint))
        begun.run(self.flow(again, parallelism=3))
        before = Counter(
            row[1]
            for (checkpoint_id, *_), some in self.out._committed.items()
            if checkpoint_id < (answer.checkpoint_id or 0)
            for row in some
        )
        assert sorted([*before.elements(), *again.values]) == ALL


@EVERYWHERE
def test_a_savepoint_leaves_the_job_as_it_is(stage: PlayedStage, executor: str) -> None:
    job = Saved(stage, executor)
    run = job.begin()
    answer = job.answered(run, job.asked(run))
    assert answer.message.endswith("; the job goes on")
    job.source.let_all()
    assert to_end(run, steps=100_000).stop is None
    assert job.out.values == ALL
    job.check(answer)


@EVERYWHERE
@pytest.mark.parametrize("mode", list(StopMode))
def test_a_savepoint_and_a_stop_at_once_are_both_had(stage: PlayedStage, executor: str, mode: StopMode) -> None:
    job = Saved(stage, executor)
    run = job.begin()
    saved, stopped = job.asked(run), stage.store.request_stop(mode)
    outcome = to_end(run, steps=100_000)
    assert outcome.stop is not None
    assert outcome.stop.request == stopped.id
    found = job.answer(stopped.id)
    assert found is not None
    assert found.outcome is RequestOutcome.STOPPED
    if mode is StopMode.NO_DRAIN:
        job.check(job.answer(saved))
    job.source.let_all()
    job.stage.run(other(executor), job.flow(), resume=True)
    assert job.out.values == (ALL if mode is StopMode.NO_DRAIN else [*range(8)])


@EVERYWHERE
def test_a_job_that_finishes_meanwhile_leaves_a_savepoint(stage: PlayedStage, executor: str) -> None:
    job = Saved(stage, executor)
    run = job.begin(requests_every_us=None)
    request = job.asked(run)
    job.source.let_all()
    outcome = to_end(run, steps=100_000)
    answer = job.answer(request)
    assert answer is not None
    assert (answer.outcome, answer.checkpoint_id) == (RequestOutcome.SAVED, outcome.checkpoint_id)
    assert answer.message.endswith("; the job has finished")


@pytest.mark.parametrize(
    ("executor", "steps"),
    [
        *(pytest.param("local", 9 * n, marks=[pytest.mark.truth] if n % 4 else []) for n in range(12)),
        *(pytest.param("spark", n, marks=[pytest.mark.truth] if n % 3 else []) for n in range(6)),
    ],
)
def test_a_driver_that_dies_at_any_step_leaves_the_savepoint_to_the_next(
    stage: PlayedStage, executor: str, steps: int
) -> None:
    job = Saved(stage, executor)
    run = job.begin()
    request = job.asked(run)
    for _ in range(steps):
        run.step()
    run.close()
    job.executor = other(executor)
    run = job.begin()
    answer = job.answered(run, request)
    job.source.let_all()
    to_end(run, steps=100_000)
    assert job.out.values == ALL
    job.check(answer)


@pytest.mark.parametrize(
    ("executor", "call"), [("local", "op/0 row"), ("spark", "op/0 row"), ("local", "op/0 snapshot")]
)
def test_what_user_code_raises_is_told_or_leaves_it_to_the_next_run(
    stage: PlayedStage, executor: str, call: str
) -> None:
    job = Saved(stage, executor)
    run = job.begin()
    request = job.asked(run)
    stage.calls.fails(call)
    job.source.let_all()
    with pytest.raises(CheckpointError):
        to_end(run, steps=100_000)
    run.close()
    stage.run(other(executor), job.flow())
    assert job.out.values == ALL
    answer = job.answer(request)
    assert answer is not None
    assert answer.outcome is (RequestOutcome.FAILED if "snap" in call else RequestOutcome.SAVED)
    if answer.outcome is RequestOutcome.FAILED:
        assert answer.message.startswith("the savepoint has failed, and the job starts again from its newest")
