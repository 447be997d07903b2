"""``ckpt rescale --running``: asking a job that goes on, and every way in which that ends. The job
is a fake, or a small one of this process; time is stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest

from stateformat.backends.runtime import JobPaused
from stateformat.backends.storage import MemoryStorage
from stateformat.model import RESCALE_PROPERTY, Stop, StopMode
from stateformat.requests import JobRequest, RequestAnswer, RequestKind, RequestOutcome
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt.asking import Attempt, draw, status_of
from stateformat.tools.ckpt.text import Look
from tests import stores
from tests.ckpt.asked_runs import EVERYTHING, FakeRun, Steps
from tests.ckpt.ckpt_runs import document, failure, page
from tests.local_jobs import Count, Line, rows


@pytest.fixture
def store() -> Iterator[CheckpointStore]:
    name = f"rescaled-{uuid4().hex}"
    yield stores.counts_store(f"memory://{name}")
    MemoryStorage.reset(name)


@pytest.fixture
def at_work(store: CheckpointStore) -> FakeRun:
    return FakeRun(store)


def ask(
    store: CheckpointStore,
    steps: Steps | None = None,
    *,
    seconds: float = 60,
    note: Callable[[str], None] = lambda _: None,
    parallelism: int | None = 3,
    **operators: int,
) -> Any:
    """The document of a command that asked and waited, its page and exit status. No request is left
    behind, and no line is too long.
    """
    steps = steps or Steps()
    asking = Attempt(
        store,
        "rescale",
        {"parallelism": parallelism, "operators": operators},
        None,
        open_store=open_store,
        wait=steps.wait,
        clock=steps.clock,
        note=note,
    )
    result = asking.run(seconds)
    assert store.storage.list("requests/") == []
    found = asking.document(result)
    lines = list(draw("rescale", found, Look()))
    assert max(map(len, lines)) <= 80
    return {**found, "page": " ".join(" ".join(lines).split()), "status": status_of("rescale", found)}


def asked(store: CheckpointStore) -> JobRequest:
    (request,) = store.requests()
    assert request.kind is RequestKind.RESCALE
    return request


def answers(store: CheckpointStore, outcome: str, message: str = "why", *place: Any) -> Callable[[], object]:
    return lambda: store.answer_request(RequestAnswer(asked(store).id, RequestOutcome(outcome), message, *place))


OUTCOMES: dict[str, tuple[tuple[Any, ...], int, str]] = {
    "goes on at the new parallelism": (("rescaled", "why", 3, "memory://there"), 0, "Rescaled, with checkpoint 3"),
    "runs there already": (("rescaled", "why"), 0, "Nothing to rescale"),
    "goes on without a savepoint": (("rescaled", "why", 3), 3, "Rescaled, with checkpoint 3"),
    "goes on at the old one": (("failed", "why", 2, "memory://there"), 1, "The rescale failed"),
    "refuses": (("refused",), 1, "The rescale was refused"),
    "has finished": (("finished", "why", 2), 1, "The job has finished"),
    "has stopped": (("stopped", "why", 2), 1, "The job has stopped"),
    "has begun anew": (("missed",), 1, "The request came too late for its run"),
    "says what nobody expects": (("saved", "op \x1b[2J"), 1, "The job was not rescaled"),
}


@pytest.mark.parametrize(("answer", "status", "title"), OUTCOMES.values(), ids=OUTCOMES)
def test_what_the_job_answers_is_reported(store: CheckpointStore, answer: Any, status: int, title: str) -> None:
    found = ask(store, Steps(at2=answers(store, *answer)), count=5)
    assert (found["outcome"], found["status"], found["answered"]) == (answer[0], status, True)
    assert found["page"].startswith(title)
    assert f"{found['request']}, parallelism 3, 'count' at 5" in found["page"]
    assert "\x1b" not in found["page"]
    assert (found["parallelism"], found["operators"]) == (3, [{"uid": "count", "parallelism": 5}])


def test_a_job_that_has_finished_is_not_asked(store: CheckpointStore, at_work: FakeRun) -> None:
    at_work.publish(finished=EVERYTHING)
    found = ask(store)
    assert (found["outcome"], found["request"], found["status"]) == ("finished", None, 1)
    assert "there is nothing to rescale" in found["message"]


def test_nobody_answers_and_after_ten_seconds_it_is_asked_whether_the_job_runs(store: CheckpointStore) -> None:
    notes: list[str] = []
    found = ask(store, note=notes.append)
    assert (found["outcome"], found["status"]) == ("timed_out", 3)
    assert "perhaps none is running" in found["message"]
    (note,) = notes
    assert note.startswith("No run has answered for 10 s. ")
    assert "without --running its newest checkpoint is rescaled" in note


def stops(store: CheckpointStore, at_work: FakeRun) -> None:
    request = asked(store)
    wanted = {RESCALE_PROPERTY: request.wanted.encode()}
    at_work.publish(stop=Stop(StopMode.NO_DRAIN, request.id), properties=wanted)


def test_what_a_run_that_died_has_done_is_told_by_its_records(store: CheckpointStore, at_work: FakeRun) -> None:
    stopped = ask(store, Steps(at2=lambda: stops(store, at_work)))
    assert (stopped["outcome"], stopped["status"]) == ("timed_out", 3)
    assert "checkpoint 2 is the stop of this rescale" in stopped["message"]
    at_work.publish()

    def goes_on() -> None:
        stops(store, at_work)
        at_work.publish()

    found = ask(store, Steps(at2=goes_on), parallelism=5)
    assert (found["outcome"], found["status"], found["answered"]) == ("failed", 1, False)
    assert "gone on at another parallelism than was asked for" in found["message"]
    same = {operator.uid: operator.parallelism for operator in store.open().graph.operators}
    found = ask(store, Steps(at2=goes_on), parallelism=None, **same)
    assert (found["outcome"], found["status"], found["answered"]) == ("rescaled", 0, False)


def test_ckpt_stop_asks_a_job_that_stopped_only_to_be_rescaled(store: CheckpointStore, at_work: FakeRun) -> None:
    ask(store, Steps(at2=lambda: stops(store, at_work)))
    steps = Steps()
    arguments = {"mode": StopMode.NO_DRAIN}
    attempt = Attempt(store, "stop", arguments, None, open_store=open_store, wait=steps.wait, clock=steps.clock)
    result = attempt.run(5)
    assert attempt.request is not None
    assert result.outcome == "timed_out"


def test_a_real_job_is_rescaled_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Line([rows(n) for n in range(4)], op=Count, how="key_by", parallelism=None, shut=True)
    job.tap.let(0, 2)
    runs = [job.begin()]
    job.bench.checkpoint(runs[0])
    monkeypatch.setattr("stateformat.tools.ckpt.asking.PAUSE_SECONDS", 1e-9)
    monkeypatch.setattr("stateformat.tools.ckpt.asking.PAUSE_GROWTH", 1.0)
    polled = CheckpointStore.request_answer

    def look(self: CheckpointStore, request_id: str) -> RequestAnswer | None:
        # The job goes on while the command looks for its answer.
        for _ in range(20):
            if not runs[-1].step() and isinstance(runs[-1].outcome, JobPaused):
                runs.append(job.begin())
        job.bench.clock.wait_until(job.bench.clock.now_us() + 10**12)
        return polled(self, request_id)

    monkeypatch.setattr(CheckpointStore, "request_answer", look)
    found = document("rescale", "memory://bench", "--running", "--operator-parallelism", "op=3")
    assert (found["outcome"], found["operators"]) == ("rescaled", [{"uid": "op", "parallelism": 3}])
    assert job.bench.store.open(found["checkpoint_id"]).graph.operator("op").parallelism == 3


MISUSED = {
    "an id": (["STORE@1", "--running", "--parallelism", "2"], "leave @1 out"),
    "no number": (["STORE", "--running"], "give --parallelism"),
    "options of Spark queries": (["STORE", "--running", "--parallelism", "2", "--engine", "spark"], "--engine"),
}


@pytest.mark.parametrize(("arguments", "sentence"), MISUSED.values(), ids=MISUSED)
def test_misuse_is_told_and_nobody_is_asked(store: CheckpointStore, arguments: list[str], sentence: str) -> None:
    arguments[0] = arguments[0].replace("STORE", store.url)
    assert sentence in str(failure("rescale", *arguments, status=2))
    assert store.storage.list("requests/") == []


def test_a_dry_run_shows_the_plan_and_asks_nobody(store: CheckpointStore) -> None:
    shown = page("rescale", store.url, "--running", "--parallelism", "2", "--dry-run")
    assert "count" in shown
    assert store.storage.list("requests/") == []
