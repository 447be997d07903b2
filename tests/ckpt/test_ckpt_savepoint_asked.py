"""``ckpt savepoint``: asking a job that goes on, and every way in which that ends. Runs are fakes,
and time is stepped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from stateformat.backends.storage import MemoryStorage
from stateformat.model import Stop, StopMode
from stateformat.requests import RequestAnswer, RequestOutcome
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt.asking import Attempt, draw, status_of
from stateformat.tools.ckpt.text import Look
from tests import stores
from tests.ckpt.asked_runs import EVERYTHING, OTHER, FakeRun, Steps, elsewhere, interrupted
from tests.ckpt.ckpt_runs import failure


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    name = f"saved-{uuid4().hex}"
    yield stores.counts_store(f"memory://{name}" if request.param == "memory" else str(tmp_path / "store"))
    MemoryStorage.reset(name)


@pytest.fixture
def at_work(store: CheckpointStore) -> FakeRun:
    return FakeRun(store)


def ask(
    store: CheckpointStore,
    steps: Steps | None = None,
    *,
    to: str | None = None,
    seconds: float = 60,
    note: Callable[[str], None] = lambda _: None,
) -> Any:
    """The document of a command that asked and waited, its page and exit status. No request is left
    behind, at no width is a line too long.
    """
    steps = steps or Steps()
    asking = Attempt(store, "savepoint", {}, to, open_store=open_store, wait=steps.wait, clock=steps.clock, note=note)
    result = asking.run(seconds)
    assert store.storage.list("requests/") == []
    document = asking.document(result)
    lines = list(draw("savepoint", document, Look()))
    assert max(map(len, lines)) <= 80
    return {**document, "page": " ".join(" ".join(lines).split()), "status": status_of("savepoint", document)}


def ended(found: Any) -> tuple[object, ...]:
    return found["outcome"], found["checkpoint_id"], found["answered"], found["status"]


def test_a_savepoint_is_reported_with_its_place(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, Steps(at3=at_work.save))
    assert ended(found) == ("saved", 2, True, 0)
    assert found["savepoint"] == f"{store.url}/savepoints/2-{found['request'][:8]}"
    assert open_store(found["savepoint"]).open().record.ref == store.open().record.ref
    assert found["page"].startswith("Savepoint of checkpoint 2 ")
    assert "the job goes on" in found["page"]


def test_it_is_put_where_it_is_wanted(store: CheckpointStore, at_work: FakeRun) -> None:
    there = elsewhere(store)
    assert ask(store, Steps(at1=at_work.save), to=there)["savepoint"] == there


def test_a_copy_that_fails_is_reported_with_the_reason(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, Steps(at1=lambda: at_work.save(copy=False)))
    assert ended(found) == ("failed", 2, True, 1)
    assert found["savepoint"] is None
    assert found["page"].startswith("The savepoint failed ")
    assert "no room" in found["page"]


@pytest.mark.parametrize(
    ("outcome", "title"),
    [
        ("failed", "The savepoint failed"),
        ("refused", "The savepoint was refused"),
        ("finished", "The job has finished"),
        ("missed", "No savepoint was made"),
        ("stopped", "No savepoint was made"),
        ("rescaled", "No savepoint was made"),
    ],
)
def test_whatever_is_answered_instead_is_reported_with_the_reason(
    store: CheckpointStore, outcome: str, title: str
) -> None:
    def answer() -> None:
        (request,) = store.requests()
        store.answer_request(RequestAnswer(request.id, RequestOutcome(outcome), "operator 'x' threw \x1b[2J"))

    found = ask(store, Steps(at2=answer))
    assert ended(found) == (outcome, None, True, 1)
    assert found["page"].startswith(title)
    assert "operator 'x' threw \\x1b[2J" in found["page"]


def test_a_job_that_has_finished_is_not_asked_and_what_needs_no_job_is_offered(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    at_work.publish(finished=EVERYTHING)
    steps = Steps()
    found = ask(store, steps)
    assert (ended(found), found["request"], steps.pauses) == (("finished", 2, False, 1), None, [])
    assert f"`ckpt pin {store.url}@2 NAME` makes a savepoint of its newest checkpoint" in found["message"]
    assert "`ckpt copy" in ask(store, to=elsewhere(store))["message"]


def test_a_job_that_ends_meanwhile_is_waited_for_since_it_still_copies(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    found = ask(store, Steps(at2=lambda: at_work.save(finished=EVERYTHING)))
    assert ended(found) == ("saved", 2, True, 0)


def test_a_stopped_job_may_have_been_resumed_so_it_is_asked(store: CheckpointStore, at_work: FakeRun) -> None:
    at_work.publish(stop=Stop(StopMode.NO_DRAIN, OTHER))
    notes: list[str] = []
    found = ask(store, seconds=12, note=notes.append)
    assert ended(found) == ("timed_out", None, False, 3)
    assert "Checkpoint 2 is a stop." in notes[0]
    assert ended(ask(store, Steps(at2=at_work.save))) == ("saved", 3, True, 0)


@pytest.mark.parametrize(
    ("publishes", "told"), [(False, "perhaps none is running: `ckpt pin"), (True, "so a run is alive")]
)
def test_on_timeout_the_request_is_withdrawn(
    store: CheckpointStore, at_work: FakeRun, publishes: bool, told: str
) -> None:
    found = ask(store, Steps(at3=at_work.publish) if publishes else Steps(), seconds=7.5)
    assert ended(found) == ("timed_out", None, False, 3)
    assert told in found["message"]
    assert "within 7.5 s, and the request was withdrawn" in found["message"]


def test_after_ten_seconds_of_silence_it_is_said_what_needs_no_running_job(store: CheckpointStore) -> None:
    notes: list[tuple[float, str]] = []
    steps = Steps()
    ask(store, steps, seconds=40, note=lambda text: notes.append((steps.now - 100, text)))
    ((at, text),) = notes
    assert 10 <= at <= 12
    assert text.startswith("No run has answered for 10 s.")
    assert f"press Ctrl-C: `ckpt pin {store.url}@1 NAME` makes" in text


# ---- the command itself


def test_interrupting_the_command_withdraws_the_request(counts: Path) -> None:
    assert "the request was withdrawn; a run that had begun with it may still make the savepoint" in interrupted(
        "savepoint", counts
    )


@pytest.mark.parametrize(
    ("to", "says"), [("store", "cannot hold its own savepoint"), ("taken", "holds a checkpoint already")]
)
def test_a_place_that_cannot_take_it_is_refused_before_the_job_is_asked(tmp_path: Path, to: str, says: str) -> None:
    for name in ("store", "taken"):
        stores.counts_store(str(tmp_path / name))
    found = failure("savepoint", tmp_path / "store", "--to", tmp_path / to, status=2)
    assert says in json.dumps(found)
    assert not (tmp_path / "store" / "requests").exists()
