"""A running job is rescaled: it stops with a savepoint and goes on at the new parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends import dataflow as df
from stateformat.backends.local import JobOutcome, LocalRuntime, Progress, ProgressLine, VirtualClock
from stateformat.backends.rewrite import publish_rescaled
from stateformat.backends.runtime import JobPaused
from stateformat.model import RESCALE_PROPERTY, StopMode
from stateformat.requests import JobRequest, RequestAnswer, RequestKind, RequestOutcome, encode_request
from stateformat.rescaling import WantedParallelism, rescale_of
from tests.worlds.local import Count, Line, rows, to_end

COUNTS = [3, 3, 3, 3]
"""What the job commits: the rows of each key."""


class Job(Line):
    """Two splits, a counter by key, and a sink. ``run`` plays a script beside the running job."""

    def __init__(self, **options: Any) -> None:
        splits = [[rows(n) for n in range(12) if n % 2 == split] for split in (0, 1)]
        super().__init__(*splits, op=Breaking, parallelism=None, shut=True, **options)
        self.bench.clock = VirtualClock(20_000)
        self.said: dict[str, int] = {}
        self.forward = False
        self.shown: list[Progress] = []

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> df.Dataflow:
        flow = df.Dataflow(job, parallelism=parallelism or self.parallelism)
        stream = flow.source(self.tap, uid="in", parallelism=self.said.get("in"))
        counted = stream.key_by("key").apply(self.op, uid="op", parallelism=self.said.get("op"), max_parallelism=8)
        (counted.forward() if self.forward else counted).apply(self.out, uid="out", chain=False)
        return flow

    def play(self, script: Iterator[object], **options: Any) -> JobOutcome:
        """Run to the end. The script goes on whenever the job shows progress, and what it yields is
        ignored; at its end all input may be read.
        """

        def show(progress: Progress) -> None:
            self.shown.append(progress)
            try:
                next(script)
            except StopIteration:
                self.tap.let(0)
                self.tap.let(1)

        bench = self.bench
        chosen = {**bench.options, "max_restarts": 0, "checkpoint_interval_us": 2_000_000, **options}
        return LocalRuntime(bench.store, clock=bench.clock, progress=show, **chosen).run(self.flow())

    def let_both(self, chunks: int) -> None:
        self.tap.let(0, chunks)
        self.tap.let(1, chunks)

    def ask(self, parallelism: int | None = None, **operators: int) -> str:
        return self.bench.store.request_rescale(parallelism, operators).id

    def answer(self, request: str) -> RequestAnswer | None:
        return self.bench.store.request_answer(request)

    def begun(self, chunks: int = 3) -> Iterator[object]:
        """Let some rows be read, until a checkpoint was taken."""
        self.let_both(chunks)
        while not self.bench.newest_id:
            yield

    def waits_for(self, request: str, turns: int = 60) -> Iterator[object]:
        for _ in range(turns):
            if self.answer(request) is not None:
                return
            yield
        raise AssertionError("no answer")

    def sizes(self, checkpoint_id: int | None = None) -> list[int]:
        """The parallelism of the three operators in a checkpoint."""
        return [operator.parallelism for operator in self.bench.store.open(checkpoint_id).graph.operators]


class Breaking(Count):
    """Fails in ``open`` where it has so many subtasks, or once in ``process``."""

    opens_not_at: int | None = None
    processes_not_at: int | None = None

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        if context.parallelism == type(self).opens_not_at:
            raise RuntimeError(f"no room for {context.parallelism}")

    def process(self, batch: Any, input: int) -> df.Output:
        if self.context.parallelism == type(self).processes_not_at:
            type(self).processes_not_at = None
            raise RuntimeError(f"no memory for {self.context.parallelism}")
        return super().process(batch, input) if input == 0 else None


@pytest.fixture(autouse=True)
def unbroken() -> Iterator[None]:
    yield
    Breaking.opens_not_at = Breaking.processes_not_at = None


def test_a_running_job_goes_on_at_the_new_parallelism_in_the_same_process_and_answers() -> None:
    job = Job()
    outcome, answer = rescaled(job, 3, out=2)
    assert answer.outcome is RequestOutcome.RESCALED
    first = answer.checkpoint_id
    assert first is not None
    stopped = job.bench.store.open(first - 1).record
    assert stopped.stop == sf.Stop(StopMode.NO_DRAIN, answer.request)
    assert WantedParallelism.decode(stopped.properties[RESCALE_PROPERTY]) == WantedParallelism(3, {"out": 2})
    assert (job.sizes(first - 1), job.sizes(first)) == ([1, 1, 1], [3, 3, 2])
    assert RESCALE_PROPERTY not in job.bench.store.open(first).record.properties
    assert answer.savepoint is not None
    assert sf.open(answer.savepoint).open().id == first - 1
    assert "'in', 'op' at 3, not 1; 'out' at 2, not 1" in answer.message
    assert (job.out.seen, outcome.restarts, outcome.stop) == (COUNTS, 0, None)
    assert [news for progress in job.shown for news in progress.news] == [answer.message]
    assert {progress.parallelism for progress in job.shown} == {1, 3}
    shown = StringIO()
    line = ProgressLine(shown)
    for progress in job.shown:
        line(progress)
    assert f"job: {answer.message}\n" in shown.getvalue().splitlines(keepends=True)


def test_the_answer_says_what_the_next_start_of_a_program_with_numbers_of_its_own_sets_back() -> None:
    job = Job()
    job.said = {"op": 1}
    _, answer = rescaled(job, 3)
    assert (
        ". The program sets its parallelism, so its next start goes back ('op' at 1, not 3). Leave the number out of "
        "the program, and a start keeps that of the checkpoint; or give the new one at each start (--parallelism, "
        "--operator-parallelism)"
    ) in answer.message
    without = Job()
    assert "goes back" not in rescaled(without, 3)[1].message
    assert without.sizes() == [3, 3, 3]


def rescaled(job: Job, parallelism: int | None = None, **operators: int) -> tuple[JobOutcome, RequestAnswer]:
    """Run a job, ask for this, and let it end after it was answered."""
    asked: list[str] = []

    def script() -> Iterator[object]:
        yield from job.begun()
        asked.append(job.ask(parallelism, **operators))
        yield from job.waits_for(asked[0])

    outcome = job.play(script())
    answer = job.answer(asked[0])
    assert answer is not None
    return outcome, answer


def stops(job: Job) -> list[int]:
    """The checkpoints at which the job has stopped."""
    return [record.checkpoint_id for record in job.bench.store.history() if record.stop is not None]


REFUSED = {
    "above the max parallelism": ({"parallelism": 9}, "parallelism 9 of operator 'op' is above its max parallelism 8"),
    "of an operator that is not there": ({"operators": {"opp": 2}}, "no operator 'opp'; did you mean 'op'?"),
    "inside the store": ({"parallelism": 2, "savepoint": "memory://bench/checkpoints"}, "memory://bench"),
}


@pytest.mark.parametrize(("wanted", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_a_start_would_refuse_is_refused_before_anything_stops(wanted: dict[str, Any], sentence: str) -> None:
    job = Job()
    asked: list[str] = []

    def script() -> Iterator[object]:
        yield from job.begun()
        # As another program would write it: the library refuses some of this before it asks.
        request = JobRequest(RequestKind.RESCALE, 32 * "a", job.bench.newest_id, **{"parallelism": None, **wanted})
        job.bench.storage.create(request.path, encode_request(request))
        asked.append(request.id)
        yield from job.waits_for(request.id)

    job.play(script())
    answer = job.answer(asked[0])
    assert answer is not None
    assert answer.outcome is RequestOutcome.REFUSED
    assert sentence in answer.message
    assert (stops(job), job.out.seen) == ([], COUNTS)


def test_one_end_of_a_forward_edge_cannot_be_rescaled_alone() -> None:
    job = Job()
    job.forward = True
    _, answer = rescaled(job, None, out=2)
    assert answer.outcome is RequestOutcome.REFUSED
    assert "'op' of parallelism 1 sends forward to 'out' of 2" in answer.message
    assert (stops(job), job.out.seen) == ([], COUNTS)


def test_a_request_without_effect_is_answered_at_once_and_nothing_stops() -> None:
    job = Job()
    _, answer = rescaled(job, 1)
    assert answer == RequestAnswer(
        answer.request,
        RequestOutcome.RESCALED,
        "the job runs at parallelism 1 already, so it was not stopped",
    )
    assert stops(job) == []


@pytest.mark.parametrize("fails", ["opens_not_at", "processes_not_at"])
def test_a_start_that_fails_at_the_new_parallelism_goes_on_at_the_old_one_and_says_so(fails: str) -> None:
    job = Job()
    setattr(Breaking, fails, 3)
    asked: list[str] = []

    def script() -> Iterator[object]:
        yield from job.begun()
        asked.append(job.ask(3))
        while not stops(job):
            yield
        job.let_both(5)
        yield from job.waits_for(asked[0])

    outcome = job.play(script())
    answer = job.answer(asked[0])
    assert answer is not None
    assert answer.outcome is RequestOutcome.FAILED
    assert "could not start at the new parallelism ('in', 'op', 'out' at 3, not 1)" in answer.message
    assert " for 3" in answer.message
    assert (answer.checkpoint_id, answer.savepoint is None) == (stops(job)[0], False)
    assert (outcome.restarts, job.out.seen, job.sizes()) == (0, COUNTS, [1, 1, 1])


def test_a_failure_after_the_first_checkpoint_is_one_of_the_job_which_stays_at_the_new_parallelism() -> None:
    job = Job()
    job.said = {"op": 1}
    asked: list[str] = []

    def script() -> Iterator[object]:
        yield from job.begun()
        asked.append(job.ask(3))
        yield from job.waits_for(asked[0])
        Breaking.processes_not_at = 3

    outcome = job.play(script(), max_restarts=1)
    answer = job.answer(asked[0])
    assert answer is not None
    assert answer.outcome is RequestOutcome.RESCALED
    assert outcome.restarts == 1
    assert (job.out.seen, job.sizes()) == (COUNTS, [3, 3, 3])


def test_requests_made_while_a_job_is_rescaled_are_obeyed_in_order_at_the_new_parallelism() -> None:
    job = Job()
    asked: list[str] = []

    def script() -> Iterator[object]:
        yield from job.begun()
        asked.extend([job.ask(3), job.ask(2, out=3), job.bench.store.request_stop(StopMode.NO_DRAIN).id])
        yield from job.waits_for(asked[2])

    # A stop that is there from the beginning comes first, and no rescale has any use then.
    outcome = job.play(script())
    answers = [job.answer(request) for request in asked]
    assert [answer and answer.outcome for answer in answers] == [RequestOutcome.STOPPED] * 3
    assert outcome.stop is not None

    def later() -> Iterator[object]:
        yield
        asked[:] = [job.ask(3)]
        while job.bench.newest.stop is None or job.bench.newest.stop.request != asked[0]:
            yield
        asked.append(job.ask(2, out=3))
        yield from job.waits_for(asked[1])
        asked.append(job.bench.store.request_stop(StopMode.NO_DRAIN).id)
        yield from job.waits_for(asked[2])

    job.let_both(4)
    job.play(later(), resume=True)
    found = [job.answer(request) for request in asked]
    assert [answer and answer.outcome for answer in found] == [
        RequestOutcome.RESCALED,
        RequestOutcome.RESCALED,
        RequestOutcome.STOPPED,
    ]
    assert job.sizes() == [2, 2, 3]


def test_whoever_starts_after_the_stop_goes_on_at_the_new_parallelism_whatever_the_program_says() -> None:
    job = Job()
    run = job.begin(2)
    job.let_both(3)
    job.bench.checkpoint(run)
    request = job.ask(3)
    outcome = to_end(run)
    assert isinstance(outcome, JobPaused)
    again = job.begin(2)
    assert {vertex.parallelism for vertex in again.job.vertices} == {3}
    job.bench.checkpoint(again)
    answer = job.answer(request)
    assert answer is not None
    assert answer.outcome is RequestOutcome.RESCALED
    assert answer.savepoint is not None
    # At the start after that the program counts again.
    assert {vertex.parallelism for vertex in job.begin(2).job.vertices} == {2}


def test_the_copy_of_a_rescales_stop_is_an_ordinary_savepoint_and_a_rescale_in_place_ends_the_wish() -> None:
    job = Job()
    run = job.begin()
    job.let_both(3)
    job.bench.checkpoint(run)
    job.ask(3)
    to_end(run)
    newest = job.bench.store.open()
    assert rescale_of(newest.record) == WantedParallelism(3)
    permit = publish_rescaled(newest, newest.graph.at(2), store=job.bench.store)
    assert (permit.record.stop, rescale_of(permit.record)) == (None, None)
    assert {vertex.parallelism for vertex in job.begin().job.vertices} == {2}


def test_a_copy_that_fails_keeps_no_job_from_its_new_parallelism() -> None:
    job = Job()
    asked: list[str] = []

    def script() -> Iterator[object]:
        yield from job.begun()
        asked.append(job.bench.store.request_rescale(3, None, "nowhere://taken").id)
        yield from job.waits_for(asked[0])

    job.play(script())
    answer = job.answer(asked[0])
    assert answer is not None
    assert (answer.outcome, answer.savepoint) == (RequestOutcome.RESCALED, None)
    assert "its copy to nowhere://taken failed" in answer.message
