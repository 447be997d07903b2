"""Savepoints of a job that goes on, on both executors: whatever happens to the job, the savepoint
is whole, and a job that starts from it has the same output.

Jobs on both executors that are rescaled while they run: the output is always the same. A job that
is told to stop soon, as by SIGTERM: an ordinary checkpoint, and nothing is lost.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.runtime import GraceExceeded, JobOutcome, JobPaused, Progress, Run, SystemClock, VirtualClock
from stateformat.errors import CheckpointError
from stateformat.model import StopMode
from stateformat.requests import RequestAnswer, RequestOutcome
from tests.worlds.jobs import ExpiringJob, LapJob, Line, StateJob, every_operator, hops_job
from tests.worlds.stages import EVERYWHERE, ON_BOTH, Gated, Out, PlayedStage, Told, batches, other, to_end, until

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


@pytest.fixture
def soon_line(stage: PlayedStage, executor: str) -> Line:
    """Return the job."""
    return Line(stage, executor)


@ON_BOTH
def test_it_commits_what_it_has_read_and_goes_on_without_any_option(soon_line: Line) -> None:
    run = soon_line.begin(**({"checkpoint_interval_us": None} if soon_line.executor == "local" else {}))
    soon_line.source.let(0, 5)
    until(run, lambda: run.rows_read == 5)
    run.stop_soon()
    outcome = to_end(run)
    assert outcome.interrupted
    assert outcome.stop is None
    assert outcome.checkpoint_id == soon_line.stage.newest_id
    assert soon_line.stage.newest.stop is None
    assert "is published and committed" in outcome.sentence
    assert soon_line.out.values == [*range(5)]
    soon_line.executor = other(soon_line.executor)
    assert soon_line.run(parallelism=3).interrupted is False
    soon_line.check()


@EVERYWHERE
@pytest.mark.parametrize("job", [every_operator, hops_job])
def test_told_again_and_again_at_any_step_nothing_is_lost_or_repeated(
    stage: PlayedStage, executor: str, job: Any
) -> None:
    case = job(2) if job is every_operator else job()
    choose = random.Random(7)
    told = 0
    for _ in range(60):
        # Like a program that is started again: events have a different order each time.
        runtime = stage.runtime(executor, checkpoint_rows=60, seed=told)
        run = runtime.begin(case.flow())
        if isinstance(run, JobOutcome):
            break
        longest = 40 * (told + 1) if executor == "local" else told + 1
        steps = choose.randint(1, longest)
        while steps and run.step():
            steps -= 1
        run.stop_soon()
        outcome = to_end(run)
        told += outcome.interrupted
        if not outcome.interrupted:
            break
    assert told > 1
    assert case.outs() == case.expected


@ON_BOTH
def test_told_before_it_begins_it_commits_what_the_last_run_left_and_reads_nothing(soon_line: Line) -> None:
    run = soon_line.begin()
    soon_line.read(run, 4)
    run.close()
    newest = soon_line.stage.newest_id
    runtime = soon_line.stage.runtime(soon_line.executor)
    runtime.stop_soon()
    soon_line.source.let(0)
    outcome = runtime.run(soon_line.flow())
    assert (outcome.interrupted, outcome.checkpoint_id) == (True, newest)
    assert outcome.sentence.endswith("nothing was read after it. The next start goes on from it, without any option")
    assert runtime.run(soon_line.flow()).interrupted is False
    soon_line.check()


@ON_BOTH
def test_told_before_its_first_checkpoint_exists_it_says_that_there_is_none(soon_line: Line) -> None:
    runtime = soon_line.stage.runtime(soon_line.executor)
    runtime.stop_soon()
    outcome = runtime.run(soon_line.flow())
    assert (outcome.interrupted, outcome.checkpoint_id, soon_line.stage.newest_id) == (True, None, 0)
    assert "begins anew" in outcome.sentence


@ON_BOTH
def test_when_grace_is_over_it_ends_at_once_and_names_the_newest_checkpoint(soon_line: Line) -> None:
    run = soon_line.begin()
    soon_line.read(run, 4)
    newest = soon_line.stage.newest_id
    run.stop_soon(grace=0)
    with pytest.raises(GraceExceeded, match=rf"within 0 s, .* the newest is {newest}") as caught:
        to_end(run)
    assert caught.value.details["checkpoint_id"] == newest
    run.close()
    soon_line.run()
    soon_line.check()


@ON_BOTH
def test_the_end_of_a_job_and_a_stop_that_is_under_way_come_first(soon_line: Line) -> None:
    run = soon_line.begin()
    soon_line.read(run, 4)
    run.request_stop(StopMode.DRAIN)
    run.step()
    run.stop_soon()
    outcome = to_end(run)
    assert (outcome.interrupted, outcome.stop is not None) == (False, True)


@ON_BOTH
def test_a_savepoint_that_was_asked_for_is_made_before_the_end(soon_line: Line) -> None:
    run = soon_line.begin()
    soon_line.read(run, 4)
    request = run.request_savepoint()
    run.stop_soon()
    assert to_end(run).interrupted
    answer = run.request_answer(request)
    assert answer is not None
    assert (answer.outcome, answer.savepoint is None) == (RequestOutcome.SAVED, False)
    soon_line.run()
    soon_line.check()


@ON_BOTH
def test_a_job_that_fails_while_it_stops_ends_at_its_newest_checkpoint_and_loses_nothing(soon_line: Line) -> None:
    def progress(_: object) -> None:
        if soon_line.stage.newest_id >= 2 and not runtime._soon.is_asked:
            soon_line.stage.storage.order("create", "checkpoints/", "refuse")
            runtime.stop_soon()

    # A progress after every third step.
    clock = VirtualClock(us_per_event=200_000)
    runtime = soon_line.stage.runtime(soon_line.executor, checkpoint_rows=2, progress=progress, clock=clock)
    soon_line.source.let(0)
    outcome = runtime.run(soon_line.flow())
    assert outcome.interrupted
    assert outcome.checkpoint_id == soon_line.stage.newest_id
    soon_line.run()
    soon_line.check()


@ON_BOTH
def test_what_goes_round_a_loop_is_kept(stage: PlayedStage, executor: str) -> None:
    job = LapJob(stage.directory, spins=True)
    run = stage.begin(executor, job.flow(2, 3))
    until(run, lambda: run.rows_read == 12)
    run.stop_soon()
    assert to_end(run).interrupted
    assert stage.in_flight() == 12
    job.spins.unlink()
    stage.run(other(executor), job.flow(3, 2))
    assert job.out.values == job.expected
