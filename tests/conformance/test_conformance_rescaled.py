"""Jobs on both executors that are rescaled while they run: the output is always the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stateformat.backends.dataflow import Dataflow
from stateformat.backends.runtime import JobOutcome, JobPaused, Progress, Run, SystemClock
from stateformat.requests import RequestAnswer, RequestOutcome
from tests.conformance import Gated, Out, Told, batches, until
from tests.conformance_jobs import LapJob, StateJob
from tests.expiring_jobs import ExpiringJob
from tests.played_stage import EVERYWHERE, PlayedStage

RESCALED, FAILED = RequestOutcome.RESCALED, RequestOutcome.FAILED


class Played:
    """A running job, and a script that makes requests: it goes on after each progress."""

    def __init__(self, stage: PlayedStage, executor: str) -> None:
        self.stage, self.executor = stage, executor
        self.answers: list[RequestAnswer] = []
        self.outcome: JobOutcome | None = None

    def run(self, flow: Dataflow, script: Iterator[object], **options: Any) -> JobOutcome:
        def show(_: Progress) -> None:
            next(script, None)

        # On Spark only idle epochs would advance a virtual clock.
        pace: dict[str, Any] = {"clock": SystemClock(), "idle_us": 1, "requests_every_us": 1}
        if self.executor == "local":
            pace = {"checkpoint_interval_us": 1_000_000, "requests_every_us": 200_000}
        options = {**pace, "progress": show, "max_restarts": 0, "keep": None, **options}
        return self.stage.run(self.executor, flow, **options)

    def rescaled(self, parallelism: int | None = None, **operators: int) -> Iterator[object]:
        """Request a rescale, and wait for the answer."""
        store = self.stage.store
        while not self.stage.newest_id:
            yield
        request = store.request_rescale(parallelism, operators).id
        for _ in range(400):
            answer = store.request_answer(request)
            if answer is not None:
                self.answers.append(answer)
                return
            yield
        raise AssertionError("no answer")

    def sizes(self, answer: RequestAnswer) -> dict[str, int]:
        graph = self.stage.store.open(answer.checkpoint_id).graph
        return {operator.uid: operator.parallelism for operator in graph.operators}


@EVERYWHERE
def test_every_kind_of_state_goes_up_and_down_while_the_job_runs(stage: PlayedStage, executor: str) -> None:
    job = StateJob(stage.directory, range(60))
    played = Played(stage, executor)

    def script() -> Iterator[object]:
        job.table.let(0, 2)
        job.stream.let(0, 4)
        yield from played.rescaled(None, op=5)
        job.stream.let(0, 8)
        yield
        yield from played.rescaled(None, op=2, out=3)
        job.stream.let(0)
        job.table.let(0)

    outcome = played.run(job.flow(3), script())
    assert [answer.outcome for answer in played.answers] == [RESCALED, RESCALED]
    assert [played.sizes(answer)["op"] for answer in played.answers] == [5, 2]
    assert job.out.seen == job.expected(2)
    assert (outcome.restarts, outcome.stop) == (0, None)


@EVERYWHERE
def test_rows_that_expire_do_so_at_the_same_moment_whatever_the_parallelism(stage: PlayedStage, executor: str) -> None:
    job = ExpiringJob(stage.directory, seed=3)
    played = Played(stage, executor)

    def script() -> Iterator[object]:
        yield from job.primed(lambda: stage.newest_id)
        job.stream.let(0, 8)
        yield from played.rescaled(None, op=5, once=1)
        job.stream.let(0, 15)
        yield
        yield from played.rescaled(None, op=1, once=4)
        job.stream.let(0)

    played.run(job.flow(3), script())
    assert [answer.outcome for answer in played.answers] == [RESCALED, RESCALED]
    job.check()


@EVERYWHERE
def test_finished_operators_stay_and_the_others_are_rescaled(stage: PlayedStage, executor: str) -> None:
    job = StateJob(stage.directory, range(60))
    played = Played(stage, executor)

    def script() -> Iterator[object]:
        job.table.let(0)
        job.stream.let(0, 4)
        while not stage.newest_id or stage.statuses()["table"][0] != "fully_finished":
            yield
        yield from played.rescaled(None, table=2)
        yield from played.rescaled(4, **{"in": 1})
        job.stream.let(0)

    played.run(job.flow(2), script())
    assert [answer.outcome for answer in played.answers] == [RequestOutcome.REFUSED, RESCALED]
    assert "operator 'table' has finished" in played.answers[0].message
    assert played.sizes(played.answers[1]) == {"in": 1, "table": 1, "op": 4, "out": 4}
    assert job.out.seen == job.expected(4)


@EVERYWHERE
def test_a_loop_is_rescaled_while_it_turns(stage: PlayedStage, executor: str) -> None:
    job = LapJob(stage.directory, spins=True)
    played = Played(stage, executor)

    def script() -> Iterator[object]:
        while not stage.newest_id or stage.in_flight() < 12:
            yield
        yield from played.rescaled(None, head=3, body=2)
        job.spins.unlink()

    played.run(job.flow(2, 3), script())
    assert [answer.outcome for answer in played.answers] == [RESCALED]
    assert stage.store.open((played.answers[0].checkpoint_id or 0) - 1).record.stop is not None
    assert job.out.values == job.expected


def test_an_unaligned_job_is_rescaled_with_records_in_its_channels(stage: PlayedStage) -> None:
    out = Out()
    source = Gated(stage.directory / "in", batches(range(0, 80, 2), 2), batches(range(1, 80, 2), 2), shut=True)
    played = Played(stage, "local")
    flow = Dataflow("overtaken", parallelism=2)
    told = flow.source(source, uid="in").key_by("key").apply(Told(stage.calls), uid="op")
    told.key_by("value").apply(out, uid="out")

    def script() -> Iterator[object]:
        source.let(0, 20)
        source.let(1, 20)
        yield from played.rescaled(3)
        source.let_all()

    played.run(flow, script(), unaligned=True, checkpoint_interval_us=20_000)
    assert [answer.outcome for answer in played.answers] == [RESCALED]
    assert out.values == [*range(80)]


@EVERYWHERE
def test_a_start_that_fails_at_the_new_parallelism_is_no_failure_of_the_job(stage: PlayedStage, executor: str) -> None:
    played, flow, source, out = line(stage, executor)

    def script() -> Iterator[object]:
        source.let(0, 4)
        while not stage.newest_id:
            yield
        stage.calls.fails("op/2 open")
        yield from played.rescaled(3)
        yield from played.rescaled(2)
        source.let_all()

    outcome = played.run(flow, script())
    assert [answer.outcome for answer in played.answers] == [FAILED, RESCALED]
    assert "so it goes on at the old one" in played.answers[0].message
    assert "Boom" in played.answers[0].message
    assert (outcome.restarts, out.values) == (0, [*range(40)])


def line(stage: PlayedStage, executor: str) -> tuple[Played, Dataflow, Gated, Out]:
    source = Gated(stage.directory / "in", batches(range(40), 4), shut=True)
    out = Out()
    flow = Dataflow("line")
    told = flow.source(source, uid="in").key_by("key").apply(Told(stage.calls), uid="op")
    told.apply(out, uid="out", chain=False)
    return Played(stage, executor), flow, source, out


@EVERYWHERE
@pytest.mark.parametrize("steps", [1, 5, *(pytest.param(at, marks=pytest.mark.truth) for at in (0, 2, 3, 8))])
def test_a_driver_that_dies_on_the_way_leaves_a_job_that_goes_on_by_itself(
    stage: PlayedStage, executor: str, steps: int
) -> None:
    _, flow, source, out = line(stage, executor)
    source.let(0, 4)
    options: dict[str, Any] = {"requests_every_us": 1, "checkpoint_rows": 4, "clock": SystemClock(), "keep": None}
    if executor != "local":
        options["idle_us"] = 1
    run = stage.begin(executor, flow, **options)
    until(run, lambda: stage.newest_id)
    request = stage.store.request_rescale(3).id
    runs = [run]

    def step() -> None:
        if not runs[-1].step():
            assert isinstance(runs[-1].outcome, JobPaused)
            begun = stage.runtime(executor, **options).begin(flow)
            assert isinstance(begun, Run)
            runs.append(begun)

    # On Spark a step is an epoch; on the local executor it is a small part of one.
    times = steps if executor != "local" else 40 * steps
    for _ in range(times):
        step()
    runs[-1].close()
    source.let_all()
    stage.run(executor, flow, **options)
    answer = stage.store.request_answer(request)
    assert answer is not None
    assert answer.outcome in (RESCALED, RequestOutcome.FINISHED, RequestOutcome.MISSED)
    if answer.outcome is RESCALED:
        assert stage.store.open(answer.checkpoint_id).graph.operator("op").parallelism == 3
    assert out.values == [*range(40)]
