"""``ckpt stop``: asking a job to stop, and what is told of each way in which that ends. Runs here are fakes, and time is stepped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import StorageError
from stateformat.model import Stop, StopMode
from stateformat.publication import CommitPermit
from stateformat.stop_requests import StopAnswer, StopOutcome, StopRequest, counts_for
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt.commands import stop as command
from stateformat.tools.ckpt.text import Look
from tests import stores
from tests.ckpt_runs import document, failure, page

JOB = stores.counts_job()
EVERYTHING = {operator.uid: range(operator.parallelism) for operator in JOB.graph.operators}


class FakeRun:
    """A run of the counts job, as far as requests are concerned: it looks at them when it is told to."""

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self.permit = store.start("counts")
        self.restored_from = self.permit.ref.checkpoint_id if self.permit else 0

    def publish(self, **more: Any) -> CommitPermit:
        self.permit = JOB.publish(self.store, self.permit, **more)
        return self.permit

    def asked(self) -> StopRequest | None:
        """The first request that counts; those made for earlier runs are answered so."""
        for request in self.store.stop_requests():
            if counts_for(request, self.restored_from):
                return request
            self.store.answer_stop(StopAnswer(request.id, StopOutcome.MISSED, "the job runs again from a newer one"))
        return None

    def stop(self, *, copy: bool = True, answer: bool = True) -> None:
        """Stop by the first request that counts, or do nothing; with what a crash in between leaves out."""
        request = self.asked()
        if request is None:
            return
        record = self.publish(stop=Stop(request.mode, request.id)).record
        url = request.savepoint_at(self.store.url, record.checkpoint_id)
        if copy:
            self.store.copy(self.store.open(), open_store(url))
        if answer:
            told = "" if copy else "the savepoint could not be written: no room."
            self.store.answer_stop(
                StopAnswer(request.id, StopOutcome.STOPPED, told, record.checkpoint_id, url if copy else None)
            )

    def tell(self, outcome: StopOutcome, message: str) -> None:
        request = self.asked()
        assert request is not None
        self.store.answer_stop(StopAnswer(request.id, outcome, message))


class Steps:
    """A clock that goes on only while somebody waits; what happens at a step is scripted by the number of the wait."""

    def __init__(self, **script: Callable[[], object]) -> None:
        self.now = 100.0
        self.pauses: list[float] = []
        self.script = {int(name.removeprefix("at")): event for name, event in script.items()}

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds
        self.pauses.append(seconds)
        event = self.script.get(len(self.pauses))
        if event is not None:
            event()


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    name = f"stopped-{uuid4().hex}"
    yield stores.counts_store(f"memory://{name}" if request.param == "memory" else str(tmp_path / "store"))
    MemoryStorage.reset(name)


def attempt(store: CheckpointStore, steps: Steps, mode: str, to: str | None = None, **how: Any) -> command.StopAttempt:
    return command.StopAttempt(
        store, StopMode(mode), to, open_store=open_store, wait=steps.wait, clock=steps.clock, **how
    )


def ask(
    store: CheckpointStore,
    steps: Steps,
    *,
    mode: str = "no_drain",
    to: str | None = None,
    seconds: float = 60,
    if_stopped: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Any:
    """The document of a command that has asked and waited; no request is left behind."""
    shown: list[tuple[int, int]] = []
    asking = attempt(store, steps, mode, to, step=lambda done, total: shown.append((done, total)), note=note)
    told = asking.run(seconds, if_stopped=if_stopped)
    assert store.storage.list("requests/") == []
    assert len(shown) == len(steps.pauses)
    assert shown == sorted(shown)
    document = asking.document(told)
    lines = list(command.draw(document, Look()))
    assert max(map(len, lines)) <= 80
    document["page"] = " ".join(" ".join(lines).split())
    return document


def test_a_job_that_stops_is_told_with_its_savepoint(store: CheckpointStore) -> None:
    run = FakeRun(store)
    found = ask(store, Steps(at3=run.stop))
    assert (found["outcome"], found["checkpoint_id"], found["answered"], found["mode"]) == (
        "stopped",
        2,
        True,
        "no_drain",
    )
    assert found["savepoint"] == f"{store.url}/savepoints/2-{found['request'][:8]}"
    assert command.status_of(found) == 0
    record = store.open().record
    assert record.stop == Stop(StopMode.NO_DRAIN, found["request"])
    assert open_store(found["savepoint"]).open().record.ref == record.ref
    assert found["page"].startswith("Stopped at checkpoint 2 ")
    assert "no drain" in found["page"]
    assert "Started again to resume" in found["page"]


def test_a_job_can_be_drained_and_its_savepoint_put_elsewhere(store: CheckpointStore) -> None:
    there = f"memory://there-{uuid4().hex}"
    found = ask(store, Steps(at1=FakeRun(store).stop), mode="drain", to=there)
    assert (found["savepoint"], found["mode"]) == (there, "drain")
    assert open_store(there).open().record.stop == Stop(StopMode.DRAIN, found["request"])
    assert "The job has ended for good." in found["page"]


@pytest.mark.parametrize("outcome", ["failed", "refused", "finished", "missed"])
def test_a_stop_that_does_not_come_about_is_told_with_the_reason(store: CheckpointStore, outcome: str) -> None:
    run = FakeRun(store)
    found = ask(store, Steps(at2=lambda: run.tell(StopOutcome(outcome), "operator 'x' threw \x1b[2J")))
    assert (found["outcome"], found["checkpoint_id"], found["savepoint"]) == (outcome, None, None)
    assert command.status_of(found) == (0 if outcome == "finished" else 1)
    assert found["page"].startswith(command.TITLES[outcome])
    assert "operator 'x' threw \\x1b[2J" in found["page"]


def test_a_run_that_restored_from_a_newer_checkpoint_is_not_stopped(store: CheckpointStore) -> None:
    first = FakeRun(store)
    found = ask(store, Steps(at1=first.publish, at2=lambda: FakeRun(store).stop()))
    assert found["outcome"] == "missed"
    assert store.open().record.stop is None


def test_a_stop_whose_copy_failed_stands_and_says_how_to_copy(store: CheckpointStore) -> None:
    run = FakeRun(store)
    found = ask(store, Steps(at1=lambda: run.stop(copy=False)))
    assert (found["outcome"], found["checkpoint_id"], found["savepoint"]) == ("stopped", 2, None)
    assert "no room. The stop stands;" in found["message"]
    assert f"ckpt copy {store.url}@2 URL" in found["message"]
    assert command.status_of(found) == 3


@pytest.mark.parametrize("copy", [True, False])
def test_a_run_that_died_before_it_answered_is_told_from_the_record(store: CheckpointStore, copy: bool) -> None:
    run = FakeRun(store)
    steps = Steps(at4=lambda: run.stop(copy=copy, answer=False))
    found = ask(store, steps)
    assert (found["outcome"], found["checkpoint_id"], found["answered"]) == ("stopped", 2, False)
    assert sum(steps.pauses) == pytest.approx(60), "the run may be copying still, so it is waited for"
    assert "The stop stands" in found["message"]
    assert (found["savepoint"] is not None) is copy
    assert ("The savepoint is complete." in found["message"]) is copy
    assert ("ckpt copy" in found["message"]) is not copy
    assert command.status_of(found) == (0 if copy else 3)


def test_a_job_that_ends_by_itself_is_told_at_once(store: CheckpointStore) -> None:
    run = FakeRun(store)
    steps = Steps(at2=lambda: run.publish(finished=EVERYTHING))
    found = ask(store, steps)
    assert (found["outcome"], found["checkpoint_id"], found["answered"]) == ("finished", 2, False)
    assert len(steps.pauses) == 2
    assert command.status_of(found) == 0
    assert "without having been asked" in found["message"]


def test_a_job_that_has_ended_is_not_asked(store: CheckpointStore) -> None:
    FakeRun(store).publish(finished=EVERYTHING, stop=Stop(StopMode.DRAIN, "f" * 32))
    steps, before = Steps(), store.stats.copy()
    found = ask(store, steps)
    assert (found["outcome"], found["request"], steps.pauses) == ("finished", None, [])
    assert f"by request {'f' * 32}" in found["message"]
    assert command.status_of(found) == 0
    assert store.stats.since(before)["create"].calls == 0


def test_a_job_that_is_drained_by_another_request_has_ended_too(store: CheckpointStore) -> None:
    run = FakeRun(store)
    found = ask(store, Steps(at1=lambda: run.publish(finished=EVERYTHING, stop=Stop(StopMode.DRAIN, "f" * 32))))
    assert found["outcome"] == "finished"


def test_a_drain_that_finishes_everything_is_a_stop_and_no_end_of_its_own(store: CheckpointStore) -> None:
    run = FakeRun(store)

    def drain() -> None:
        request = run.asked()
        assert request is not None
        run.publish(finished=EVERYTHING, stop=Stop(request.mode, request.id))

    def answer() -> None:
        request = run.asked()
        assert request is not None
        store.answer_stop(StopAnswer(request.id, StopOutcome.STOPPED, "", 2, "memory://there"))

    found = ask(store, Steps(at2=drain, at5=answer), mode="drain")
    assert (found["outcome"], found["savepoint"], found["answered"]) == ("stopped", "memory://there", True)


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (lambda run: None, "perhaps none is running"),
        (lambda run: run.publish(), "so a run is alive"),
    ],
)
def test_when_the_time_is_up_the_request_is_withdrawn(store: CheckpointStore, event: Any, told: str) -> None:
    run = FakeRun(store)
    steps = Steps(at3=lambda: event(run))
    found = ask(store, steps, seconds=7.5)
    assert (found["outcome"], found["checkpoint_id"], found["answered"]) == ("timed_out", None, False)
    assert told in found["message"]
    assert "within 7.5 s, and the request was withdrawn" in found["message"]
    assert found["waited_seconds"] == 7.5
    assert command.status_of(found) == 3
    assert run.asked() is None


def test_a_stop_by_another_request_is_told_when_nobody_answers(store: CheckpointStore) -> None:
    run = FakeRun(store)
    found = ask(store, Steps(at3=lambda: run.publish(stop=Stop(StopMode.NO_DRAIN, "f" * 32))), seconds=7.5)
    assert (found["outcome"], found["checkpoint_id"], found["answered"]) == ("stopped", 2, False)
    assert f"by request {'f' * 32}" in found["message"]


@pytest.mark.parametrize(
    ("was", "mode", "outcome", "status", "words"),
    [
        ("no_drain", "no_drain", "stopped", 0, "has published nothing since"),
        ("drain", "no_drain", "stopped", 0, "stopped (drain) at checkpoint 2"),
        ("drain", "drain", "stopped", 0, "stopped (drain) at checkpoint 2"),
        (
            "no_drain",
            "drain",
            "not_drained",
            1,
            "start the job again so that it goes on (resume=True, --resume), then ask",
        ),
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_a_job_that_has_stopped_before_is_told_at_once_and_not_asked(
    store: CheckpointStore, was: str, mode: str, outcome: str, status: int, words: str, copied: bool
) -> None:
    FakeRun(store).publish(stop=Stop(StopMode(was), "f" * 32))
    url = f"{store.url}/savepoints/2-ffffffff"
    if copied:
        store.copy(store.open(), open_store(url))
    steps, before = Steps(), store.stats.copy()
    found = ask(store, steps, mode=mode)
    assert (found["outcome"], found["checkpoint_id"], found["request"], steps.pauses) == (outcome, 2, None, [])
    assert words in found["message"]
    assert found["savepoint"] == (url if copied else None)
    assert command.status_of(found) == status
    assert store.stats.since(before)["create"].calls == 0


@pytest.mark.parametrize("finished", [False, True])
def test_a_savepoint_that_is_wanted_of_a_job_that_has_ended_is_told_how_to_make(
    store: CheckpointStore, finished: bool
) -> None:
    there = f"memory://there-{uuid4().hex}"
    how: dict[str, Any] = {"finished": EVERYTHING} if finished else {"stop": Stop(StopMode.NO_DRAIN, "f" * 32)}
    FakeRun(store).publish(**how)
    found = ask(store, Steps(), to=there)
    assert (found["outcome"], found["savepoint"], command.status_of(found)) == ("not_saved", None, 1)
    assert f"`ckpt copy {store.url}@2 {there}` makes the savepoint." in found["message"]
    store.copy(store.open(), open_store(there))
    again = ask(store, Steps(), to=there)
    assert (again["savepoint"], command.status_of(again)) == (there, 0)


def test_a_job_that_was_resumed_and_has_not_published_yet_can_be_asked_all_the_same(store: CheckpointStore) -> None:
    FakeRun(store).publish(stop=Stop(StopMode.NO_DRAIN, "f" * 32))
    found = ask(store, Steps(at2=FakeRun(store).stop), if_stopped=True)
    assert (found["outcome"], found["checkpoint_id"], found["answered"]) == ("stopped", 3, True)
    assert command.status_of(found) == 0


def test_a_drain_that_another_request_to_stop_comes_before_is_no_drain(store: CheckpointStore) -> None:
    run = FakeRun(store)

    def stop() -> None:
        drain = run.asked()
        assert drain is not None
        run.publish(stop=Stop(StopMode.NO_DRAIN, "f" * 32))
        store.answer_stop(StopAnswer(drain.id, StopOutcome.STOPPED, "the job has stopped (no drain)", 2, "memory://x"))

    found = ask(store, Steps(at1=stop), mode="drain")
    assert (found["outcome"], found["checkpoint_id"], command.status_of(found)) == ("not_drained", 2, 1)
    assert "The job has ended for good" not in found["page"]


def test_after_ten_seconds_of_silence_the_command_asks_whether_the_job_runs(store: CheckpointStore) -> None:
    notes: list[tuple[float, str]] = []
    steps = Steps()
    ask(store, steps, seconds=40, note=lambda text: notes.append((steps.now - 100, text)))
    ((at, text),) = notes
    assert 10 <= at <= 12
    assert text.startswith("No run has answered for 10 s.")


def test_a_stop_that_is_published_while_the_request_is_withdrawn_is_told(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, withdraw = FakeRun(store), store.withdraw_stop

    def late(request_id: str) -> None:
        run.stop()
        withdraw(request_id)

    monkeypatch.setattr(store, "withdraw_stop", late)
    found = ask(store, Steps(), seconds=1)
    assert (found["outcome"], found["checkpoint_id"]) == ("stopped", 2)
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
    before = store.stats.copy()
    steps = Steps()
    ask(store, steps, seconds=10)
    reads = store.stats.since(before)
    assert len(steps.pauses) > 8
    assert reads["list"].calls <= 2 * len(steps.pauses) + 10
    assert reads["read_range"].calls + reads["read"].calls <= 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("gone")])
def test_the_request_is_withdrawn_whatever_happens(store: CheckpointStore, error: BaseException) -> None:
    def fail() -> None:
        raise error

    steps = Steps(at2=fail)
    asking = attempt(store, steps, "drain")
    with pytest.raises(type(error)):
        asking.run(60)
    assert asking.request is not None
    assert store.storage.list("requests/") == []


def test_a_request_that_cannot_be_removed_is_named(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(request_id: str) -> None:
        raise StorageError("no right to delete")

    monkeypatch.setattr(store, "withdraw_stop", refuse)
    run, steps = FakeRun(store), Steps()
    steps.script[1] = run.stop
    told = attempt(store, steps, "drain").run(60)
    assert told.outcome == "stopped"
    assert told.message.startswith("The request could not be removed (no right to delete): delete requests/")


# ---- the command itself ----------------------------------------------------------------------------------------------


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
    assert document("inspect", tmp_path / "safe")["stop"] == {"mode": "drain", "request": found["request"]}
    assert f"drain (request {found['request']})" in " ".join(page("inspect", tmp_path / "store").split())
    assert store.storage.list("requests/") == []


def test_the_command_says_that_nobody_answers(tmp_path: Path) -> None:
    stores.counts_store(str(tmp_path / "store"))
    text = page("stop", tmp_path / "store", "--timeout", 0, status=3)
    assert text.startswith("No run has answered\n")
    assert "savepoint  none" in text
    assert list((tmp_path / "store/requests").iterdir()) == []


def test_interrupting_the_command_withdraws_the_request(tmp_path: Path) -> None:
    stores.counts_store(str(tmp_path / "store"))
    folder = tmp_path / "store/requests"
    # Whoever runs the tests in the background may have had interrupts ignored, which children inherit.
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from stateformat.tools.ckpt.main import main; sys.exit(main())"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", code, "stop", tmp_path / "store", "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        while running.poll() is None and not list(folder.glob("*-stop-*")):
            threading.Event().wait(0.02)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    finally:
        running.kill()
        running.wait()
    assert running.returncode == 130
    assert json.loads(out)["error"]["kind"] == "interrupted"
    assert b"the request was withdrawn" in err
    assert list(folder.iterdir()) == []


def test_what_cannot_be_asked_is_refused_before_anybody_is(tmp_path: Path) -> None:
    store, full = tmp_path / "store", tmp_path / "full"
    stores.counts_store(str(store))
    stores.counts_store(str(full))
    assert failure("stop", store, "--to", full, status=2)["kind"] == "store_not_empty"
    assert "its own savepoint" in failure("stop", store, "--to", store, status=2)["message"]
    assert failure("stop", tmp_path / "nowhere", status=3)["kind"] == "store_not_found"
    assert not (tmp_path / "nowhere").exists()
    assert failure("stop", f"{store}@1", status=2)["kind"] == "usage"
    assert failure("stop", store, "--timeout", -1, status=2)["kind"] == "usage"
    assert not (store / "requests").exists()
