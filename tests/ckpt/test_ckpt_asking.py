"""``ckpt stop``, ``ckpt savepoint`` and ``ckpt rescale --running``: asking a job, and every way in
which that ends. Runs are fakes, and time is stepped. What all three do is tried for each of them.
"""

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

from stateformat.backends.runtime import JobPaused
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import StorageError
from stateformat.model import RESCALE_PROPERTY, Stop, StopMode
from stateformat.requests import RequestAnswer, RequestOutcome
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt.commands.running.asking import Attempt, page as page_of, status_of
from stateformat.tools.ckpt.text import Look, lines as drawn
from tests.ckpt.ckpt_runs import conforms, document, failure, page
from tests.worlds import stores
from tests.worlds.local import Count, Line, rows
from tests.worlds.requests import EVERYTHING, OTHER, FakeRun, Steps, elsewhere, interrupted

DRAIN, NO_DRAIN = StopMode.DRAIN, StopMode.NO_DRAIN
WANTED: dict[str, dict[str, Any]] = {
    "stop": {"mode": NO_DRAIN},
    "savepoint": {},
    "rescale": {"parallelism": 3, "operators": {"count": 5}},
}
EACH = pytest.mark.parametrize("kind", WANTED)


@pytest.fixture
def store() -> Iterator[CheckpointStore]:
    name = f"asked-{uuid4().hex}"
    yield stores.counts_store(f"memory://{name}")
    MemoryStorage.reset(name)


@pytest.fixture
def at_work(store: CheckpointStore) -> FakeRun:
    return FakeRun(store)


def attempt(store: CheckpointStore, kind: str, steps: Steps, to: str | None = None, **how: Any) -> Attempt:
    wanted = {name: how.pop(name, value) for name, value in WANTED[kind].items()}
    return Attempt(store, kind, wanted, to, open_store=open_store, wait=steps.wait, clock=steps.clock, **how)


def ask(store: CheckpointStore, kind: str, steps: Steps | None = None, *, seconds: float = 60, **how: Any) -> Any:
    """Return the document of a command, its page, and ``ended``: outcome, checkpoint,
    whether a run answered, exit status. No request is left behind, and no line is too long.
    """
    steps = steps or Steps()
    shown: list[tuple[int, int]] = []
    asking = attempt(store, kind, steps, step=lambda done, total: shown.append((done, total)), **how)
    found = asking.document(asking.run(seconds))
    conforms(kind, found)
    assert store.storage.list("requests/") == []
    assert len(shown) == len(steps.pauses)
    assert shown == sorted(shown)
    lines = list(drawn(page_of(kind, found), Look()))
    assert max(map(len, lines)) <= 80
    ended = found["outcome"], found["checkpoint_id"], found["answered"], status_of(kind, found)
    return {**found, "page": " ".join(" ".join(lines).split()), "ended": ended}


def answers(store: CheckpointStore, outcome: str, message: str = "", *place: Any) -> Callable[[], object]:
    def answer() -> None:
        (request,) = store.requests()
        store.answer_request(RequestAnswer(request.id, RequestOutcome(outcome), message, *place))

    return answer


# ---- every kind of request -----------------------------------------------------------------------

ANSWERS: dict[str, dict[tuple[Any, ...], tuple[int, str]]] = {
    "stop": {
        ("failed",): (1, "The stop failed"),
        ("refused",): (1, "The stop was refused"),
        ("finished",): (0, "The job has finished"),
        ("missed",): (1, "The request came too late for its run"),
    },
    "savepoint": {
        ("failed",): (1, "The savepoint failed"),
        ("refused",): (1, "The savepoint was refused"),
        ("finished",): (1, "The job has finished"),
        ("missed",): (1, "No savepoint was made"),
        ("stopped",): (1, "No savepoint was made"),
        ("rescaled",): (1, "No savepoint was made"),
    },
    "rescale": {
        ("rescaled", 3, "memory://there"): (0, "Rescaled, with checkpoint 3"),
        ("rescaled",): (0, "Nothing to rescale"),
        ("rescaled", 3): (3, "Rescaled, with checkpoint 3"),
        ("failed", 2, "memory://there"): (1, "The rescale failed"),
        ("refused",): (1, "The rescale was refused"),
        ("finished", 2): (1, "The job has finished"),
        ("stopped", 2): (1, "The job has stopped"),
        ("missed",): (1, "The request came too late for its run"),
        ("saved",): (1, "The job was not rescaled"),
    },
}


@pytest.mark.parametrize(
    ("kind", "answer", "status", "title"),
    [(kind, answer, *told) for kind, answered in ANSWERS.items() for answer, told in answered.items()],
)
def test_what_is_answered_is_reported_with_the_reason(
    store: CheckpointStore, kind: str, answer: tuple[Any, ...], status: int, title: str
) -> None:
    outcome, *place = answer
    found = ask(store, kind, Steps(at2=answers(store, outcome, "operator 'x' threw \x1b[2J", *place)))
    assert found["ended"] == (outcome, *(place[:1] or [None]), True, status)
    assert found["page"].startswith(title)
    assert "operator 'x' threw \\x1b[2J" in found["page"]
    if kind == "rescale":
        assert f"{found['request']}, parallelism 3, 'count' at 5" in found["page"]
        assert (found["parallelism"], found["operators"]) == (3, [{"uid": "count", "parallelism": 5}])


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("stop", 0, f"by request {OTHER}"),
        ("savepoint", 1, "`ckpt pin STORE@2 NAME` makes a savepoint of its newest checkpoint"),
        ("rescale", 1, "there is nothing to rescale"),
    ],
)
def test_a_job_that_has_ended_is_not_asked(
    store: CheckpointStore, at_work: FakeRun, kind: str, status: int, words: str
) -> None:
    at_work.publish(finished=EVERYTHING, stop=Stop(DRAIN, OTHER) if kind == "stop" else None)
    steps, before = Steps(), store.stats.copy()
    found = ask(store, kind, steps)
    assert (found["ended"], found["request"], steps.pauses) == (("finished", 2, False, status), None, [])
    assert words.replace("STORE", store.url) in found["message"]
    assert store.stats.since(before)["create"].calls == 0


@EACH
@pytest.mark.parametrize(("publishes", "told"), [(False, "perhaps none is running"), (True, "so a run is alive")])
def test_on_timeout_the_request_is_withdrawn(
    store: CheckpointStore, at_work: FakeRun, kind: str, publishes: bool, told: str
) -> None:
    found = ask(store, kind, Steps(at3=at_work.publish) if publishes else Steps(), seconds=7.5)
    assert found["ended"] == ("timed_out", None, False, 3)
    assert told in found["message"]
    assert "within 7.5 s, and the request was withdrawn" in found["message"]
    assert ("`ckpt pin" in found["message"]) is (kind == "savepoint" and not publishes)
    assert found["waited_seconds"] == 7.5


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("stop", ""),
        ("savepoint", "press Ctrl-C: `ckpt pin STORE@1 NAME` makes"),
        ("rescale", "without --running its newest checkpoint is rescaled"),
    ],
)
def test_after_ten_seconds_of_silence_the_command_asks_whether_the_job_runs(
    store: CheckpointStore, kind: str, advice: str
) -> None:
    notes: list[tuple[float, str]] = []
    steps = Steps()
    ask(store, kind, steps, seconds=40, note=lambda text: notes.append((steps.now - 100, text)))
    ((at, text),) = notes
    assert 10 <= at <= 12
    assert text.startswith("No run has answered for 10 s.")
    assert advice.replace("STORE", store.url) in text


@EACH
@pytest.mark.parametrize("error", [KeyboardInterrupt(), StorageError("gone")])
def test_the_request_is_withdrawn_whatever_happens(store: CheckpointStore, kind: str, error: BaseException) -> None:
    def fail() -> None:
        raise error

    asking = attempt(store, kind, Steps(at2=fail))
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
    result = attempt(store, "stop", Steps(at1=at_work.stop)).run(60)
    assert result.outcome == "stopped"
    assert result.message.startswith("The request could not be removed (no right to delete): delete requests/")


def test_the_pauses_grow_up_to_two_seconds_and_end_with_the_time(store: CheckpointStore) -> None:
    steps = Steps()
    ask(store, "stop", steps, seconds=30)
    assert steps.pauses[0] == 0.05
    assert steps.pauses[:-1] == sorted(steps.pauses[:-1])
    assert steps.pauses[-2] == 2.0
    assert sum(steps.pauses) == pytest.approx(30)
    at_once = Steps()
    assert ask(store, "stop", at_once, seconds=0)["outcome"] == "timed_out"
    assert at_once.pauses == []


def test_waiting_reads_no_record_again_that_has_not_changed(store: CheckpointStore) -> None:
    steps, before = Steps(), store.stats.copy()
    ask(store, "stop", steps, seconds=10)
    reads = store.stats.since(before)
    assert len(steps.pauses) > 8
    assert reads["list"].calls <= 2 * len(steps.pauses) + 10
    assert reads["read_range"].calls + reads["read"].calls <= 1


# ---- a stop --------------------------------------------------------------------------------------


def test_a_job_that_stops_is_reported_with_its_savepoint(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, "stop", Steps(at3=at_work.stop))
    assert found["ended"] == ("stopped", 2, True, 0)
    assert found["mode"] == "no_drain"
    assert found["savepoint"] == f"{store.url}/savepoints/2-{found['request'][:8]}"
    record = store.open().record
    assert record.stop == Stop(NO_DRAIN, found["request"])
    assert open_store(found["savepoint"]).open().record.ref == record.ref
    assert found["page"].startswith("Stopped at checkpoint 2 ")
    assert "no drain" in found["page"]
    assert "Started again to resume" in found["page"]


def test_a_job_can_be_drained_and_its_savepoint_put_elsewhere(store: CheckpointStore, at_work: FakeRun) -> None:
    there = elsewhere(store)
    found = ask(store, "stop", Steps(at1=at_work.stop), mode=DRAIN, to=there)
    assert (found["savepoint"], found["mode"]) == (there, "drain")
    assert open_store(there).open().record.stop == Stop(DRAIN, found["request"])
    assert "The job has ended for good." in found["page"]


def test_a_run_that_restored_from_a_newer_checkpoint_is_not_stopped(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, "stop", Steps(at1=at_work.publish, at2=lambda: FakeRun(store).stop()))
    assert found["outcome"] == "missed"
    assert store.open().record.stop is None


def test_a_stop_whose_copy_failed_stands_and_says_how_to_copy(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, "stop", Steps(at1=lambda: at_work.stop(copy=False)))
    assert found["ended"] == ("stopped", 2, True, 3)
    assert found["savepoint"] is None
    assert "no room. The stop stands;" in found["message"]
    assert f"ckpt copy {store.url}@2 URL" in found["message"]


@pytest.mark.parametrize("copy", [True, False])
def test_a_run_that_died_before_it_answered_is_reported_from_the_record(
    store: CheckpointStore, at_work: FakeRun, copy: bool
) -> None:
    steps = Steps(at4=lambda: at_work.stop(copy=copy, answer=False))
    found = ask(store, "stop", steps)
    assert found["ended"] == ("stopped", 2, False, 0 if copy else 3)
    assert sum(steps.pauses) == pytest.approx(60), "the run may be copying still, so it is waited for"
    assert "The stop stands" in found["message"]
    assert (found["savepoint"] is not None) is copy
    assert ("The savepoint is complete." in found["message"]) is copy
    assert ("ckpt copy" in found["message"]) is not copy


@pytest.mark.parametrize("stop", [None, Stop(DRAIN, OTHER)])
def test_a_job_that_ends_by_itself_or_another_request_is_reported_at_once(
    store: CheckpointStore, at_work: FakeRun, stop: Stop | None
) -> None:
    steps = Steps(at2=lambda: at_work.publish(finished=EVERYTHING, stop=stop))
    found = ask(store, "stop", steps)
    assert found["ended"] == ("finished", 2, False, 0)
    assert len(steps.pauses) == 2
    assert ("without having been asked" in found["message"]) is (stop is None)


def test_a_drain_that_finishes_everything_is_a_stop_and_no_end_of_its_own(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    steps = Steps(
        at2=lambda: at_work.stop(copy=False, answer=False, finished=EVERYTHING),
        at5=answers(store, "stopped", "", 2, "memory://there"),
    )
    found = ask(store, "stop", steps, mode=DRAIN)
    assert (found["outcome"], found["savepoint"], found["answered"]) == ("stopped", "memory://there", True)


def test_a_stop_by_another_request_is_reported_if_nobody_answers(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, "stop", Steps(at3=lambda: at_work.publish(stop=Stop(NO_DRAIN, OTHER))), seconds=7.5)
    assert found["ended"][:3] == ("stopped", 2, False)
    assert f"by request {OTHER}" in found["message"]


@pytest.mark.parametrize(
    ("was", "mode", "outcome", "status", "words"),
    [
        (NO_DRAIN, NO_DRAIN, "stopped", 0, "has published nothing since"),
        (DRAIN, NO_DRAIN, "stopped", 0, "stopped (drain) at checkpoint 2"),
        (DRAIN, DRAIN, "stopped", 0, "stopped (drain) at checkpoint 2"),
        (NO_DRAIN, DRAIN, "not_drained", 1, "so that it goes on (resume=True, --resume), then ask"),
    ],
)
@pytest.mark.parametrize("copied", [False, True])
def test_a_job_that_has_stopped_before_is_not_asked(
    store: CheckpointStore,
    at_work: FakeRun,
    was: StopMode,
    mode: StopMode,
    outcome: str,
    status: int,
    words: str,
    copied: bool,
) -> None:
    at_work.publish(stop=Stop(was, OTHER))
    url = f"{store.url}/savepoints/2-ffffffff"
    if copied:
        store.copy(store.open(), open_store(url))
    steps, before = Steps(), store.stats.copy()
    found = ask(store, "stop", steps, mode=mode)
    assert (found["ended"], found["request"], steps.pauses) == ((outcome, 2, False, status), None, [])
    assert words in found["message"]
    assert found["savepoint"] == (url if copied else None)
    assert store.stats.since(before)["create"].calls == 0


@pytest.mark.parametrize("how", [{"finished": EVERYTHING}, {"stop": Stop(NO_DRAIN, OTHER)}])
def test_a_savepoint_that_is_wanted_of_a_job_that_has_ended_is_advised(
    store: CheckpointStore, at_work: FakeRun, how: dict[str, Any]
) -> None:
    there = elsewhere(store)
    at_work.publish(**how)
    found = ask(store, "stop", to=there)
    assert (found["ended"][0], found["savepoint"], found["ended"][-1]) == ("not_saved", None, 1)
    assert f"`ckpt copy {store.url}@2 {there}` makes the savepoint." in found["message"]
    store.copy(store.open(), open_store(there))
    again = ask(store, "stop", to=there)
    assert (again["savepoint"], again["ended"][-1]) == (there, 0)


def test_a_job_that_was_resumed_and_has_not_published_yet_can_be_asked_all_the_same(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    at_work.publish(stop=Stop(NO_DRAIN, OTHER))
    found = ask(store, "stop", Steps(at2=FakeRun(store).stop), if_stopped=True)
    assert found["ended"] == ("stopped", 3, True, 0)


def test_a_drain_that_another_request_to_stop_comes_before_is_no_drain(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    def stop() -> None:
        at_work.publish(stop=Stop(NO_DRAIN, OTHER))
        at_work.answer(RequestOutcome.STOPPED, "the job has stopped (no drain)", 2, "memory://x")

    found = ask(store, "stop", Steps(at1=stop), mode=DRAIN)
    assert found["ended"] == ("not_drained", 2, True, 1)
    assert "The job has ended for good" not in found["page"]


def test_a_stop_that_is_published_while_the_request_is_withdrawn_is_reported(
    store: CheckpointStore, at_work: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    withdraw = store.withdraw_request

    def late(request_id: str) -> None:
        at_work.stop()
        withdraw(request_id)

    monkeypatch.setattr(store, "withdraw_request", late)
    found = ask(store, "stop", seconds=1)
    assert found["ended"][:2] == ("stopped", 2)
    assert found["savepoint"] is not None


# ---- a savepoint ---------------------------------------------------------------------------------


def test_a_savepoint_is_reported_with_its_place(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, "savepoint", Steps(at3=at_work.save))
    assert found["ended"] == ("saved", 2, True, 0)
    assert found["savepoint"] == f"{store.url}/savepoints/2-{found['request'][:8]}"
    assert open_store(found["savepoint"]).open().record.ref == store.open().record.ref
    assert found["page"].startswith("Savepoint of checkpoint 2 ")
    assert "the job goes on" in found["page"]
    there = elsewhere(store)
    assert ask(store, "savepoint", Steps(at1=at_work.save), to=there)["savepoint"] == there


def test_a_copy_that_fails_is_reported_with_the_reason(store: CheckpointStore, at_work: FakeRun) -> None:
    found = ask(store, "savepoint", Steps(at1=lambda: at_work.save(copy=False)))
    assert found["ended"] == ("failed", 2, True, 1)
    assert found["savepoint"] is None
    assert "no room" in found["page"]


def test_of_a_job_that_has_finished_a_copy_elsewhere_is_offered(store: CheckpointStore, at_work: FakeRun) -> None:
    at_work.publish(finished=EVERYTHING)
    assert "`ckpt copy" in ask(store, "savepoint", to=elsewhere(store))["message"]


def test_a_job_that_ends_meanwhile_is_waited_for_since_it_still_copies(
    store: CheckpointStore, at_work: FakeRun
) -> None:
    found = ask(store, "savepoint", Steps(at2=lambda: at_work.save(finished=EVERYTHING)))
    assert found["ended"] == ("saved", 2, True, 0)


def test_a_stopped_job_may_have_been_resumed_so_it_is_asked(store: CheckpointStore, at_work: FakeRun) -> None:
    at_work.publish(stop=Stop(NO_DRAIN, OTHER))
    notes: list[str] = []
    assert ask(store, "savepoint", seconds=12, note=notes.append)["ended"] == ("timed_out", None, False, 3)
    assert "Checkpoint 2 is a stop." in notes[0]
    assert ask(store, "savepoint", Steps(at2=at_work.save))["ended"] == ("saved", 3, True, 0)


# ---- a rescale -----------------------------------------------------------------------------------


def stops(store: CheckpointStore, at_work: FakeRun) -> None:
    (request,) = store.requests()
    at_work.publish(stop=Stop(NO_DRAIN, request.id), properties={RESCALE_PROPERTY: request.wanted.encode()})


def test_what_a_run_that_died_has_done_is_told_by_its_records(store: CheckpointStore, at_work: FakeRun) -> None:
    stopped = ask(store, "rescale", Steps(at2=lambda: stops(store, at_work)))
    assert (stopped["ended"][0], stopped["ended"][-1]) == ("timed_out", 3)
    assert "checkpoint 2 is the stop of this rescale" in stopped["message"]
    steps = Steps()
    asking = attempt(store, "stop", steps)
    assert asking.run(5).outcome == "timed_out"
    assert asking.request is not None, "a job that stopped only to be rescaled is asked to stop"
    at_work.publish()

    def goes_on() -> None:
        stops(store, at_work)
        at_work.publish()

    found = ask(store, "rescale", Steps(at2=goes_on), parallelism=5, operators={})
    assert (found["outcome"], found["ended"][2:]) == ("failed", (False, 1))
    assert "gone on at another parallelism than was asked for" in found["message"]
    same = {operator.uid: operator.parallelism for operator in store.open().graph.operators}
    found = ask(store, "rescale", Steps(at2=goes_on), parallelism=None, operators=same)
    assert (found["outcome"], found["ended"][2:]) == ("rescaled", (False, 0))


# ---- the commands themselves ---------------------------------------------------------------------


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


def test_a_real_job_is_rescaled_by_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Line([rows(n) for n in range(4)], op=Count, how="key_by", parallelism=None, shut=True)
    job.tap.let(0, 2)
    runs = [job.begin()]
    job.bench.checkpoint(runs[0])
    monkeypatch.setattr("stateformat.tools.ckpt.commands.running.asking.PAUSE_SECONDS", 1e-9)
    monkeypatch.setattr("stateformat.tools.ckpt.commands.running.asking.PAUSE_GROWTH", 1.0)
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


def test_the_command_says_that_nobody_answers(counts: Path) -> None:
    text = page("stop", counts, "--timeout", 0, status=3)
    assert text.startswith("No run has answered\n")
    assert "savepoint  none" in text
    assert list((counts / "requests").iterdir()) == []


@pytest.mark.parametrize(
    ("command", "number", "told"),
    [
        ("savepoint", signal.SIGINT, "begun with it may still make the savepoint"),
        *(("stop", number, "begun to stop by it may still do so") for number in (signal.SIGINT, signal.SIGHUP)),
        ("stop", signal.SIGTERM, "begun to stop by it may still do so"),
    ],
)
def test_a_signal_to_the_command_withdraws_the_request(
    counts: Path, command: str, number: signal.Signals, told: str
) -> None:
    said = interrupted(command, counts, number)
    assert f"the request was withdrawn; a run that had {told}" in said
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


NOT_ASKED: dict[str, tuple[list[str], str]] = {
    "a stop into another store": (["stop", "STORE", "--to", "TAKEN"], "store_not_empty"),
    "a stop into its own store": (["stop", "STORE", "--to", "STORE"], "its own savepoint"),
    "a stop of one checkpoint": (["stop", "STORE@1"], "usage"),
    "a savepoint in its own store": (["savepoint", "STORE", "--to", "STORE"], "cannot hold its own savepoint"),
    "a savepoint in another": (["savepoint", "STORE", "--to", "TAKEN"], "holds a checkpoint already"),
    "a rescale of one checkpoint": (["rescale", "STORE@1", "--running", "--parallelism", "2"], "leave @1 out"),
    "a rescale to no number": (["rescale", "STORE", "--running"], "give --parallelism"),
    "a rescale by options of Spark queries": (
        ["rescale", "STORE", "--running", "--parallelism", "2", "--engine", "spark"],
        "--engine",
    ),
}


@pytest.mark.parametrize(("arguments", "said"), NOT_ASKED.values(), ids=NOT_ASKED)
def test_what_cannot_be_asked_is_refused_before_anybody_is(
    counts: Path, flights: Path, arguments: list[str], said: str
) -> None:
    places = [text.replace("STORE", str(counts)).replace("TAKEN", str(flights)) for text in arguments]
    assert said in json.dumps(failure(*places, status=2))
    assert not (counts / "requests").exists()


def test_a_dry_run_shows_the_plan_and_asks_nobody(counts: Path) -> None:
    assert "count" in page("rescale", counts, "--running", "--parallelism", "2", "--dry-run")
    assert not (counts / "requests").exists()
