"""``ckpt stop``: asking a job to stop, and every way in which that ends. Runs here are fakes, and
time is stepped."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from stateformat.backends.storage import MemoryStorage
from stateformat.errors import StorageError
from stateformat.model import Stop, StopMode
from stateformat.requests import RequestOutcome
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt.asking import TITLES, Attempt, draw, status_of
from stateformat.tools.ckpt.text import Look
from tests import stores
from tests.ckpt.asked_runs import EVERYTHING, OTHER, FakeRun, Steps, elsewhere, interrupted
from tests.ckpt.ckpt_runs import document, failure, page


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    name = f"stopped-{uuid4().hex}"
    yield stores.counts_store(f"memory://{name}" if request.param == "memory" else str(tmp_path / "store"))
    MemoryStorage.reset(name)


@pytest.fixture
def at_work(store: CheckpointStore) -> FakeRun:
    return FakeRun(store)


def attempt(store: CheckpointStore, steps: Steps, mode: str, to: str | None = None, **how: Any) -> Attempt:
    arguments = {"mode": StopMode(mode)}
    return Attempt(store, "stop", arguments, to, open_store=open_store, wait=steps.wait, clock=steps.clock, **how)


def ask(
    store: CheckpointStore,
    steps: Steps | None = None,
    *,
    mode: str = "no_drain",
    to: str | None = None,
    seconds: float = 60,
    if_stopped: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Any:
    """The document of a command that asked and waited, its page and exit status. No request is left
    behind."""
    steps = steps or Steps()
    shown: list[tuple[int, int]] = []
    asking = attempt(
        store, steps, mode, to, step=lambda done, total: shown.append((done, total)), note=note, if_stopped=if_stopped
    )
    result = asking.run(seconds)
    assert store.storage.list("requests/") == []
    assert len(shown) == len(steps.pauses)
    assert shown == sorted(shown)
    document = asking.document(result)
    lines = list(draw("stop", document, Look()))
    assert max(map(len, lines)) <= 80
    return {**document, "page": " ".join(" ".join(lines).split()), "status": status_of("stop", document)}


def ended(found: Any) -> tuple[object, ...]:
    return found["outcome"], found["checkpoint_id"], found["answered"], found["status"]


def test_a_job_that_stops_is_reported_with_its_savepoint(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, Steps(at3=at_work.stop))
    assert ended(found) == ("stopped", 2, True, 0)
    assert found["mode"] == "no_drain"
    assert found["savepoint"] == f"{store.url}/savepoints/2-{found['request'][:8]}"
    record = store.open().record
    assert record.stop == Stop(StopMode.NO_DRAIN, found["request"])
    assert open_store(found["savepoint"]).open().record.ref == record.ref
    assert found["page"].startswith("Stopped at checkpoint 2 ")
    assert "no drain" in found["page"]
    assert "Started again to resume" in found["page"]


def test_a_job_can_be_drained_and_its_savepoint_put_elsewhere(store: CheckpointStore, at_work: FakeRun) -> None:
    there = elsewhere(store)
    found = ask(store, Steps(at1=at_work.stop), mode="drain", to=there)
    assert (found["savepoint"], found["mode"]) == (there, "drain")
    assert open_store(there).open().record.stop == Stop(StopMode.DRAIN, found["request"])
    assert "The job has ended for good." in found["page"]


@pytest.mark.parametrize("outcome", ["failed", "refused", "finished", "missed"])
def test_a_stop_that_does_not_come_about_is_reported_with_the_reason(
    store: CheckpointStore, at_work: FakeRun, outcome: str
) -> None:
    found = ask(store, Steps(at2=lambda: at_work.answer(RequestOutcome(outcome), "operator 'x' threw \x1b[2J")))
    assert ended(found) == (outcome, None, True, 0 if outcome == "finished" else 1)
    assert found["savepoint"] is None
    assert found["page"].startswith(TITLES.get(outcome, f"The stop {'was ' * (outcome == 'refused')}{outcome}"))
    assert "operator 'x' threw \\x1b[2J" in found["page"]


def test_a_run_that_restored_from_a_newer_checkpoint_is_not_stopped(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, Steps(at1=at_work.publish, at2=lambda: FakeRun(store).stop()))
    assert found["outcome"] == "missed"
    assert store.open().record.stop is None


def test_a_stop_whose_copy_failed_stands_and_says_how_to_copy(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, Steps(at1=lambda: at_work.stop(copy=False)))
    assert ended(found) == ("stopped", 2, True, 3)
    assert found["savepoint"] is None
    assert "no room. The stop stands;" in found["message"]
    assert f"ckpt copy {store.url}@2 URL" in found["message"]


@pytest.mark.parametrize("copy", [True, False])
def test_a_run_that_died_before_it_answered_is_reported_from_the_record(
    store: CheckpointStore, at_work: FakeRun, copy: bool
) -> None:
    steps = Steps(at4=lambda: at_work.stop(copy=copy, answer=False))
    found = ask(store, steps)
    assert ended(found) == ("stopped", 2, False, 0 if copy else 3)
    assert sum(steps.pauses) == pytest.approx(60), "the run may be copying still, so it is waited for"
    assert "The stop stands" in found["message"]
    assert (found["savepoint"] is not None) is copy
    assert ("The savepoint is complete." in found["message"]) is copy
    assert ("ckpt copy" in found["message"]) is not copy


def test_a_job_that_ends_by_itself_is_reported_at_once(store: CheckpointStore, at_work: FakeRun) -> None:
    steps = Steps(at2=lambda: at_work.publish(finished=EVERYTHING))
    found = ask(store, steps)
    assert ended(found) == ("finished", 2, False, 0)
    assert len(steps.pauses) == 2
    assert "without having been asked" in found["message"]


def test_a_job_that_has_ended_is_not_asked(store: CheckpointStore, at_work: FakeRun) -> None:
    at_work.publish(finished=EVERYTHING, stop=Stop(StopMode.DRAIN, OTHER))
    steps, before = Steps(), store.stats.copy()
    found = ask(store, steps)
    assert (ended(found), found["request"], steps.pauses) == (("finished", 2, False, 0), None, [])
    assert f"by request {OTHER}" in found["message"]
    assert store.stats.since(before)["create"].calls == 0


def test_a_job_that_is_drained_by_another_request_has_ended_too(store: CheckpointStore, at_work: FakeRun) -> None:
    drained = Steps(at1=lambda: at_work.publish(finished=EVERYTHING, stop=Stop(StopMode.DRAIN, OTHER)))
    assert ask(store, drained)["outcome"] == "finished"


def test_a_drain_that_finishes_everything_is_a_stop_and_no_end_of_its_own(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    steps = Steps(
        at2=lambda: at_work.stop(copy=False, answer=False, finished=EVERYTHING),
        at5=lambda: at_work.answer(RequestOutcome.STOPPED, "", 2, "memory://there"),
    )
    found = ask(store, steps, mode="drain")
    assert (found["outcome"], found["savepoint"], found["answered"]) == ("stopped", "memory://there", True)


@pytest.mark.parametrize(("publishes", "told"), [(False, "perhaps none is running"), (True, "so a run is alive")])
def test_on_timeout_the_request_is_withdrawn(
    store: CheckpointStore, at_work: FakeRun, publishes: bool, told: str
) -> None:
    found = ask(store, Steps(at3=at_work.publish) if publishes else Steps(), seconds=7.5)
    assert ended(found) == ("timed_out", None, False, 3)
    assert told in found["message"]
    assert "within 7.5 s, and the request was withdrawn" in found["message"]
    assert found["waited_seconds"] == 7.5
    assert at_work.asked() is None


def test_a_stop_by_another_request_is_reported_if_nobody_answers(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, Steps(at3=lambda: at_work.publish(stop=Stop(StopMode.NO_DRAIN, OTHER))), seconds=7.5)
    assert ended(found)[:3] == ("stopped", 2, False)
    assert f"by request {OTHER}" in found["message"]


@pytest.mark.parametrize(
    ("was", "mode", "outcome", "status", "words"),
    [
        ("no_drain", "no_drain", "stopped", 0, "has published nothing since"),
        ("drain", "no_drain", "stopped", 0, "stopped (drain) at checkpoint 2"),
        ("drain", "drain", "stopped", 0, "stopped (drain) at checkpoint 2"),
        ("no_drain", "drain", "not_drained", 1, "so that it goes on (resume=True, --resume), then ask"),
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_a_job_that_has_stopped_before_is_not_asked(
    store: CheckpointStore, at_work: FakeRun, was: str, mode: str, outcome: str, status: int, words: str, copied: bool
) -> None:
    at_work.publish(stop=Stop(StopMode(was), OTHER))
    url = f"{store.url}/savepoints/2-ffffffff"
    if copied:
        store.copy(store.open(), open_store(url))
    steps, before = Steps(), store.stats.copy()
    found = ask(store, steps, mode=mode)
    assert (ended(found), found["request"], steps.pauses) == ((outcome, 2, False, status), None, [])
    assert words in found["message"]
    assert found["savepoint"] == (url if copied else None)
    assert store.stats.since(before)["create"].calls == 0


@pytest.mark.parametrize("how", [{"finished": EVERYTHING}, {"stop": Stop(StopMode.NO_DRAIN, OTHER)}])
def test_a_savepoint_that_is_wanted_of_a_job_that_has_ended_is_advised(
    store: CheckpointStore, at_work: FakeRun, how: dict[str, Any]
) -> None:
    there = elsewhere(store)
    at_work.publish(**how)
    found = ask(store, to=there)
    assert (found["outcome"], found["savepoint"], found["status"]) == ("not_saved", None, 1)
    assert f"`ckpt copy {store.url}@2 {there}` makes the savepoint." in found["message"]
    store.copy(store.open(), open_store(there))
    again = ask(store, to=there)
    assert (again["savepoint"], again["status"]) == (there, 0)


def test_a_job_that_was_resumed_and_has_not_published_yet_can_be_asked_all_the_same(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    at_work.publish(stop=Stop(StopMode.NO_DRAIN, OTHER))
    assert ended(ask(store, Steps(at2=FakeRun(store).stop), if_stopped=True)) == ("stopped", 3, True, 0)


def test_a_drain_that_another_request_to_stop_comes_before_is_no_drain(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    def stop() -> None:
        at_work.publish(stop=Stop(StopMode.NO_DRAIN, OTHER))
        at_work.answer(RequestOutcome.STOPPED, "the job has stopped (no drain)", 2, "memory://x")

    found = ask(store, Steps(at1=stop), mode="drain")
    assert ended(found) == ("not_drained", 2, True, 1)
    assert "The job has ended for good" not in found["page"]


def test_after_ten_seconds_of_silence_the_command_asks_whether_the_job_runs(store: CheckpointStore) -> None:
    notes: list[tuple[float, str]] = []
    steps = Steps()
    ask(store, steps, seconds=40, note=lambda text: notes.append((steps.now - 100, text)))
    ((at, text),) = notes
    assert 10 <= at <= 12
    assert text.startswith("No run has answered for 10 s.")


def test_a_stop_that_is_published_while_the_request_is_withdrawn_is_reported(
    store: CheckpointStore, at_work: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdraw = store.withdraw_request

    def late(request_id: str) -> None:
        at_work.stop()
        withdraw(request_id)

    monkeypatch.setattr(store, "withdraw_request", late)
    found = ask(store, seconds=1)
    assert ended(found)[:2] == ("stopped", 2)
    assert found["savepoint"] is not None


def test_the_pauses_grow_up_to_two_seconds_and_end_with_the_time(store: CheckpointStore) -> None:
    steps = Steps()
    ask(store, steps, seconds=30)
    assert steps.pauses[0] == 0.05
    assert steps.pauses[:-1] == sorted(steps.pauses[:-1])
    assert steps.pauses[-2] == 2.0
    assert sum(steps.pauses) == pytest.approx(30)
    at_once = Steps()
    assert ask(store, at_once, seconds=0)["outcome"] == "timed_out"
    assert at_once.pauses == []


def test_waiting_reads_no_record_again_that_has_not_changed(store: CheckpointStore) -> None:
    steps, before = Steps(), store.stats.copy()
    ask(store, steps, seconds=10)
    reads = store.stats.since(before)
    assert len(steps.pauses) > 8
    assert reads["list"].calls <= 2 * len(steps.pauses) + 10
    assert reads["read_range"].calls + reads["read"].calls <= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("gone")])
def test_the_request_is_withdrawn_whatever_happens(store: CheckpointStore, error: BaseException) -> None:
    def fail() -> None:
        raise error

    asking = attempt(store, Steps(at2=fail), "drain")
    with pytest.raises(type(error)):
        asking.run(60)
    assert asking.request is not None
    assert store.storage.list("requests/") == []


def test_a_request_that_cannot_be_removed_is_named(
    store: CheckpointStore, at_work: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request_id: str) -> None:
        raise StorageError("no right to delete")

    monkeypatch.setattr(store, "withdraw_request", refuse)
    result = attempt(store, Steps(at1=at_work.stop), "drain").run(60)
    assert result.outcome == "stopped"
    assert result.message.startswith("The request could not be removed (no right to delete): delete requests/")


# ---- the command itself


def test_the_command_stops_a_job_in_another_process(tmp_path: Path) -> None:
    store = stores.counts_store(str(tmp_path / "store"))
    run, over = FakeRun(store), threading.Event()

    def look() -> None:
        while run.asked() is None and not over.wait(0.02):
            pass
        run.stop()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        found = document("stop", tmp_path / "store", "--drain", "--to", tmp_path / "safe")
    finally:
        over.set()
        thread.join()
    assert (found["outcome"], found["checkpoint_id"], found["mode"]) == ("stopped", 2, "drain")
    assert found["savepoint"] == open_store(str(tmp_path / "safe")).url
    assert document("inspect", tmp_path / "safe")["stop"] == {
        "mode": "drain",
        "request": found["request"],
        "goes_on_at": None,
    }
    assert f"stopped (drain), request {found['request']}" in " ".join(page("inspect", tmp_path / "store").split())
    assert store.storage.list("requests/") == []


def test_the_command_says_that_nobody_answers(counts: Path) -> None:
    text = page("stop", counts, "--timeout", 0, status=3)
    assert text.startswith("No run has answered\n")
    assert "savepoint  none" in text
    assert list((counts / "requests").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_command_withdraws_the_request(counts: Path, number: signal.Signals) -> None:
    said = interrupted("stop", counts, number)
    assert "the request was withdrawn; a run that had begun to stop by it may still do so" in said
    assert number is signal.SIGINT or number.name in said


def test_a_command_that_cannot_withdraw_leaves_a_request_that_expires_when_it_would_have_given_up(
    counts: Path,
) -> None:
    child = subprocess.Popen([sys.executable, "-m", "stateformat.tools.ckpt", "stop", str(counts), "--timeout", "7"])
    store = open_store(str(counts))
    try:
        while not store.requests():
            assert child.poll() is None
            threading.Event().wait(0.02)
    finally:
        child.kill()
        child.wait()
    (left,) = store.requests()
    assert left.expires_at_us == left.created_at_us + 7_000_000


def test_what_cannot_be_asked_is_refused_before_anybody_is(counts: Path, flights: Path) -> None:
    assert failure("stop", counts, "--to", flights, status=2)["kind"] == "store_not_empty"
    assert "its own savepoint" in failure("stop", counts, "--to", counts, status=2)["message"]
    assert failure("stop", f"{counts}@1", status=2)["kind"] == "usage"
    assert not (counts / "requests").exists()
