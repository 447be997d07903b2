"""A full disk, Ctrl-C, another process at work: what is said is done."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.storage import MemoryStorage
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import CheckpointError
from stateformat.inspecting import own_states
from stateformat.model import StopMode
from stateformat.store import CheckpointStore, open as open_store
from stateformat.tools.ckpt.main import main
from tests import stores
from tests.advice.following import WIDE, complaints, copied, refusal_of, said
from tests.advice.sentences import HOLE
from tests.advice.world import FIXTURES, World
from tests.ckpt.ckpt_runs import run
from tests.local_jobs import to_end
from tests.local_stops import Job

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
