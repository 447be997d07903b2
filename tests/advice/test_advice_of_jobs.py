"""What is said to whoever asks a job for something is done, and there is no more to say.

A full disk, Ctrl-C, another process at work: what is said is done.
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from stateformat.backends.runtime.requests import Copy
from stateformat.backends.storage import MemoryStorage
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import CheckpointError
from stateformat.history import Follower
from stateformat.inspecting import own_states
from stateformat.model import Stop, StopMode
from stateformat.requests import RequestAnswer, RequestOutcome
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt.commands.running import watch
from stateformat.tools.ckpt.commands.running.asking import Attempt
from stateformat.tools.ckpt.main import main
from tests.advice.following import WIDE, complaints, copied, refusal_of, said
from tests.advice.sentences import HOLE, commands_in
from tests.advice.world import FIXTURES, World
from tests.ckpt.ckpt_runs import run
from tests.worlds import stores
from tests.worlds.local import Job, to_end
from tests.worlds.requests import EVERYTHING, OTHER, FakeRun, Steps

SHORT, LONG = 5.0, 600.0
"""Seconds that somebody waits."""
STOPPED = Stop(StopMode.NO_DRAIN, OTHER)


class Asked:
    """A store whose job is a fake, and what was said of it."""

    def __init__(self, folder: Path) -> None:
        self.store = stores.counts_store(str(folder / "store"))
        self.run = FakeRun(self.store)
        self.elsewhere = str(folder / "elsewhere")
        self.said: list[str] = []

    def stop(self, steps: Steps | None = None, *, mode: str = "no_drain", to: str | None = None, **more: Any) -> str:
        return self._ask("stop", {"mode": StopMode(mode)}, to, steps, **more)

    def save(self, steps: Steps | None = None, *, to: str | None = None, **more: Any) -> str:
        return self._ask("savepoint", {}, to, steps, **more)

    def rescale(self, steps: Steps | None = None, **more: Any) -> str:
        return self._ask("rescale", {"parallelism": 3, "operators": {}}, None, steps, **more)

    def _ask(
        self,
        kind: str,
        arguments: dict[str, Any],
        to: str | None,
        steps: Steps | None,
        *,
        seconds: float = SHORT,
        **more: Any,
    ) -> str:
        steps = steps or Steps()
        how = {"wait": steps.wait, "clock": steps.clock, "note": self.said.append, **more}
        found = Attempt(self.store, kind, arguments, to, open_store=open_store, **how).run(seconds)
        self.said.append(found.message)
        return found.outcome

    def resumed(self) -> FakeRun:
        """The job runs again, from its stop."""
        self.run = FakeRun(self.store)
        return self.run

    def rescaled(self) -> None:
        (request,) = self.store.requests()
        self.store.answer_request(RequestAnswer(request.id, RequestOutcome.RESCALED, "it goes on", 2))

    def copied(self, *, taken: bool) -> None:
        """Make a savepoint for a request, in a place that holds another one."""
        if taken:
            stores.counts_store(self.elsewhere)
        assert self.run.permit is not None
        request = self.store.request_savepoint(self.elsewhere)
        copy = Copy(self.store, self.run.permit, request, {})
        copy.make()
        self.said.append(copy.answer("the job goes on").message)

    def watched(self) -> None:
        """Watch a store with a record that is damaged."""
        (Path(self.store.url.removeprefix("file://")) / "checkpoints" / f"{1:020}.json").write_bytes(b"{")
        show = lambda document, _: self.said.append(document["message"]) if "message" in document else None  # noqa: E731
        watching = watch.Watching(self.store.url, Follower(self.store.storage), show)
        watching._look(first=True)

    def advised(self, text: str, **names: str) -> None:
        """Call the last command that a text names."""
        line = commands_in(text)[-1]
        words = [names.get(word, word) for word in line.split()]
        assert refusal_of(run(*words)) is None, line


class Told(NamedTuple):
    """A piece of a sentence, what makes somebody say it, and what is done then."""

    says: str
    asks: Callable[[Asked], object]
    then: Callable[[Asked, str], None]


def moved_away(job: Asked, text: str) -> None:
    """Make room where a savepoint was to be, and make it."""
    Path(job.elsewhere).rename(job.elsewhere + "-before")
    job.advised(text)
    assert open_store(job.elsewhere).open().record.ref == job.store.open().record.ref


def is_pinned(job: Asked, text: str) -> None:
    job.advised(text, NAME="kept")
    assert [pin.name for pin in job.store.pins()] == ["kept"]


def is_rescaled(job: Asked, _: str) -> None:
    assert run("rescale", job.store.url, "--parallelism", "3").status == 0
    assert {operator.parallelism for operator in job.store.open().graph.operators} == {3}


def is_copied(job: Asked, text: str) -> None:
    job.advised(text)
    assert open_store(job.elsewhere).open().record.ref == job.store.open().record.ref


def is_saved(job: Asked, text: str) -> None:
    is_copied(job, text)
    assert job.stop(to=job.elsewhere) == "stopped"


def ends(outcome: str, asked: Callable[[Asked], str]) -> Callable[[Asked, str], None]:
    """Ask again, and see how it ends."""

    def then(job: Asked, _: str) -> None:
        assert asked(job) == outcome, job.said

    return then


def ask_again_of_a_run(job: Asked) -> str:
    fake = job.resumed()
    fake.publish()
    return job.stop(Steps(at2=fake.stop), mode="drain")


TOLD = [
    Told(
        "makes the savepoint.",
        lambda job: (job.run.publish(stop=STOPPED), job.stop(to=job.elsewhere)),
        is_saved,
    ),
    Told(
        "Only a run can drain",
        lambda job: (job.run.publish(stop=STOPPED), job.stop(mode="drain")),
        ends("stopped", ask_again_of_a_run),
    ),
    Told(
        "If it was resumed a moment ago",
        lambda job: (job.run.publish(stop=STOPPED), job.stop()),
        ends("stopped", lambda job: job.stop(Steps(at2=job.resumed().stop), if_stopped=True)),
    ),
    Told(
        "so a run is alive, and may still",
        lambda job: job.stop(Steps(at3=job.run.publish)),
        ends("stopped", lambda job: job.stop(Steps(at40=job.resumed().stop), seconds=LONG)),
    ),
    Told(
        "so a run is alive, and may still",
        lambda job: job.save(Steps(at3=job.run.publish)),
        ends("saved", lambda job: job.save(Steps(at40=job.resumed().save), seconds=LONG)),
    ),
    Told(
        "so a run is alive, and may still",
        lambda job: job.rescale(Steps(at3=job.run.publish)),
        ends("rescaled", lambda job: job.rescale(Steps(at40=job.rescaled), seconds=LONG)),
    ),
    Told(
        "without --running its newest checkpoint is rescaled",
        lambda job: job.rescale(seconds=60),
        is_rescaled,
    ),
    Told(f"ckpt pin {HOLE} NAME", lambda job: (job.run.publish(finished=EVERYTHING), job.save()), is_pinned),
    Told(
        f"ckpt copy {HOLE} {HOLE}",
        lambda job: (job.run.publish(finished=EVERYTHING), job.save(to=job.elsewhere)),
        is_copied,
    ),
    Told("While the checkpoint is kept, `ckpt copy", lambda job: job.copied(taken=True), moved_away),
    Told(f"`ckpt repair {HOLE}` says what to do", Asked.watched, Asked.advised),
]


@pytest.mark.parametrize("told", TOLD, ids=lambda told: told.says[:40])
def test_what_is_advised_to_whoever_asks_a_job_is_done(told: Told, tmp_path: Path) -> None:
    job = Asked(tmp_path)
    told.asks(job)
    text = " ".join(job.said)
    found = [sentence for sentence, _ in complaints(text) if told.says in sentence.text]
    assert found, text
    job.said.clear()
    told.then(job, text)
    assert not [one for one, _ in complaints(" ".join(job.said)) if one in found], job.said


SAID = {
    "stop": "The stop stands: run `ckpt copy",
    "published": "shows whether its checkpoint was published before",
    "full": "; free some room there",
    "bug": "this is a bug in ckpt",
    "rows": "rows are too many to read here",
    "missing": f"{HOLE} is missing from {HOLE}; `ckpt validate {HOLE}` lists",
}
"""A piece of each sentence that is met here."""


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def expect(name: str, text: str) -> None:
    found = [sentence for sentence, _ in complaints(" ".join(text.split())) if SAID[name] in sentence.text]
    assert found, text


def test_the_copy_of_a_stop_that_found_no_room_is_made_once_there_is() -> None:
    job = Job()
    stopping = job.saved_once()
    MemoryStorage.reset("full")
    stores.counts_store("memory://full")
    stopping.request_stop(StopMode.NO_DRAIN, "memory://full")
    sentence = to_end(stopping).sentence
    expect("stop", sentence)
    MemoryStorage.reset("full")
    assert run(*sentence.split("`")[1].split()[1:]).status == 0
    assert open_store("memory://full").open().record.ref == job.bench.store.open().record.ref


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("after", [False, True])
def test_who_interrupts_a_publication_sees_in_the_history_whether_it_was_before(
    world: World, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    store = world["five"]
    text = interrupted(monkeypatch, after, lambda: run("rollback", f"{store}@2", COLUMNS=WIDE))
    expect("published", text)
    listed = run("history", store, "--format", "json").document["checkpoints"]
    assert listed[0]["checkpoint_id"] == (6 if after else 5)
    assert refusal_of(run("rollback", f"{store}@2")) is None
    found = run("gc", store, "--keep", "10", "--format", "json").document
    assert len(found["manifests"]) == (0 if after else 1), "what was written"


def interrupted(monkeypatch: pytest.MonkeyPatch, after: bool, call: Callable[[], Any]) -> str:
    """What a call says that is interrupted before, or after, it has created a record."""
    create = LocalStorage.create

    def stop(self: LocalStorage, path: str, data: bytes) -> Any:
        outcome = create(self, path, data) if after else None
        signal.raise_signal(signal.SIGINT)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "create", stop)
        found = call()
    assert found.status == 130
    return said(found)


def test_a_full_disk_is_left_for_another_or_freed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    full = world.folder / "full"
    full.mkdir()
    call = ("export", world["five"], "--operator", "counter", "--state", "counts", "--to")
    opened = Path.open

    def open_(self: Path, *more: Any, **how: Any) -> Any:
        if self.parent == full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(self, *more, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        expect("full", said(run(*call, full / "a.csv", COLUMNS=WIDE)))
        assert run(*call, world.folder / "a.csv").status == 0
    assert run(*call, full / "a.csv").status == 0


def test_the_output_that_a_bug_asks_for_says_where_it_is(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CheckpointStore, "survey", lambda *_: {}["nothing"])
    assert main(["history", world["five"]]) == 1
    told = capsys.readouterr().err
    expect("bug", told)
    assert "Traceback" not in told
    main(["history", world["five"], "--verbose"])
    assert "KeyError: 'nothing'" in capsys.readouterr().err.partition("Traceback")[2]


def test_rows_that_are_too_many_to_look_at_are_exported(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_states, "ROWS_MAX", 59)
    state = (world["flights"], "--operator", "delays", "--state", "wake")
    expect("rows", said(run("inspect", *state, COLUMNS=WIDE)))
    assert run("export", *state, "--to", world.folder / "a.csv").status == 0
    assert len((world.folder / "a.csv").read_text().splitlines()) == 61


def test_what_is_gone_from_a_folder_while_it_is_read_is_listed_by_a_validation(tmp_path: Path) -> None:
    folder = copied(FIXTURES / "spark-4.3.0/aggregate/checkpoint", tmp_path / "query")
    checkpoint = open_store(str(folder)).open()
    state = checkpoint.states[0]
    max(folder.glob("state/0/0/*.delta")).unlink()
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(state.operator, state.name).table()
    expect("missing", str(caught.value))
    found = run("validate", folder, "--format", "json")
    assert {problem["path"] for problem in found.document["problems"]} >= {caught.value.details["path"]}
