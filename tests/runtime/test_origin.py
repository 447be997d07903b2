"""Who wrote a checkpoint: what records say of their program, and what they keep to themselves."""

from __future__ import annotations

import getpass
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

import stateformat as sf
from stateformat.backends import dataflow as df, origin
from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.local import LocalRuntime
from stateformat.backends.origin import Program, code_of, origin_properties, program_of
from stateformat.backends.storage import MemoryStorage
from stateformat.errors import InvalidInput
from stateformat.model import ORIGIN_PROPERTIES

JOB = "def flow():\n    return 1\n"


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    origin._code.cache_clear()
    yield
    origin._code.cache_clear()


@pytest.fixture
def url() -> Iterator[str]:
    name = f"origin-{uuid4().hex}"
    yield f"memory://{name}"
    for each in (name, f"{name}-copy", f"{name}-next"):
        MemoryStorage.reset(each)


def git(folder: Path, *command: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A work tree with one commit, of one program."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/flights.py").write_text(JOB)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    git(tmp_path, "tag", "v1")
    return tmp_path


def flow() -> df.Dataflow:
    made = df.Dataflow("numbers", parallelism=1)
    made.source(RateSource(total=10), uid="numbers").apply(CollectSink(), uid="all")
    return made


def said(record: Any) -> dict[str, str]:
    return {
        name.removeprefix("stateformat."): text for name, text in record.properties.items() if name in ORIGIN_PROPERTIES
    }


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("/home/me/flights.py:flights", "flights.py:flights"),
        ("flights.py", "flights.py"),
        ("/home/me/daily.ipynb", "daily.ipynb"),
        ("acme.jobs:flights", "acme.jobs:flights"),
        ("acme.jobs", "acme.jobs"),
    ],
)
def test_a_program_is_named_without_its_folder(given: str, name: str) -> None:
    assert program_of(given) == Program(name)


@pytest.mark.parametrize(
    ("main", "program"),
    [
        ({"__file__": "/home/me/flights.py"}, Program("flights.py", "/home/me/flights.py")),
        ({"__file__": "/x/acme/__main__.py", "name": "acme.__main__"}, Program("acme", "/x/acme/__main__.py")),
        ({"__file__": "/x/acme/job.py", "name": "acme.job"}, Program("acme.job", "/x/acme/job.py")),
        ({"__file__": "<stdin>"}, None),
        ({}, None),
    ],
)
def test_by_default_the_program_is_what_the_process_was_started_with(
    main: dict[str, str], program: Program | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("__main__")
    module.__dict__.update({name: value for name, value in main.items() if name != "name"})
    module.__spec__ = SimpleNamespace(name=main["name"]) if "name" in main else None  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", module)
    assert program_of(None) == program
    assert ("stateformat.program" in origin_properties(None)) is (program is not None)


def test_the_version_is_the_commit_and_says_if_the_work_tree_differs(repository: Path) -> None:
    file = repository / "jobs/flights.py"
    program = Program("flights.py", str(file))
    commit = git(repository, "rev-parse", "HEAD")
    assert code_of(program) == commit
    (repository / "notes.txt").write_text("known to nobody")
    origin._code.cache_clear()
    assert code_of(program) == commit
    file.write_text(JOB + "# changed\n")
    assert code_of(program) == commit, "a process asks once"
    origin._code.cache_clear()
    assert code_of(program) == f"{commit}-dirty"


def test_a_file_that_git_does_not_know_has_no_version(repository: Path) -> None:
    (repository / "scratch.py").write_text(JOB)
    assert code_of(Program("scratch.py", str(repository / "scratch.py"))) is None


def test_outside_of_a_repository_and_without_a_commit_there_is_no_version(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    program = Program("job.py", str(tmp_path / "job.py"))
    assert code_of(program) is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    origin._code.cache_clear()
    assert code_of(program) is None


@pytest.mark.parametrize("fault", ["no git", "too slow"])
def test_without_git_or_with_a_slow_one_there_is_no_version(
    fault: str, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **how: Any) -> None:
        assert how["timeout"] <= 1
        raise FileNotFoundError("git") if fault == "no git" else subprocess.TimeoutExpired(command, how["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    assert code_of(Program("flights.py", str(repository / "jobs/flights.py"))) is None


def test_git_is_asked_without_a_lock_in_the_programs_own_repository(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    git(elsewhere, "init", "-q")
    ran = elsewhere / "ran"
    git(repository, "config", "core.fsmonitor", f"touch {ran};")
    commit = git(repository, "-c", "core.fsmonitor=false", "rev-parse", "HEAD")
    ran.unlink(missing_ok=True)
    monkeypatch.setenv("GIT_DIR", str(elsewhere / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(elsewhere))
    (repository / ".git/index.lock").touch()
    assert code_of(Program("flights.py", str(repository / "jobs/flights.py"))) == commit
    assert not ran.exists()


def test_an_installed_package_has_its_version() -> None:
    assert code_of(Program("pytest:main", pytest.__file__)) == f"pytest {pytest.__version__}"


def test_every_record_of_a_run_says_its_program_and_neither_host_nor_user_unasked(url: str) -> None:
    LocalRuntime(sf.open(url), program="/home/me/numbers.py:flow", checkpoint_rows=3).run(flow())
    records = sf.open(url).history()
    assert len(records) > 1
    assert {tuple(said(record).items()) for record in records} == {(("program", "numbers.py:flow"),)}
    assert not any("/home/me" in text for record in records for text in record.properties.values())


def test_host_and_user_are_said_when_asked_for(url: str) -> None:
    LocalRuntime(sf.open(url), program="numbers", origin=True).run(flow())
    assert said(sf.open(url).open().record) == {
        "program": "numbers",
        "host": socket.gethostname(),
        "user": getpass.getuser(),
    }


def test_savepoints_keep_who_wrote_them_and_rollbacks_and_starts_do_not(url: str) -> None:
    store = sf.open(url)
    LocalRuntime(store, program="first", checkpoint_rows=3).run(flow())
    oldest = store.history()[-1]
    copy = sf.open(f"{url}-copy")
    store.copy(store.open(oldest.checkpoint_id), copy)
    assert said(copy.open().record) == {"program": "first"}
    store.rollback(oldest.checkpoint_id)
    assert said(store.open().record) == {}
    LocalRuntime(sf.open(f"{url}-next"), program="second", start_from=f"{url}-copy").run(flow())
    assert {said(record)["program"] for record in sf.open(f"{url}-next").history()} == {"second"}


def test_a_name_that_is_no_text_is_recorded_as_far_as_it_is(url: str) -> None:
    LocalRuntime(sf.open(url), program="ca\udce9f.py" + "x" * 1000).run(flow())
    program = said(sf.open(url).open().record)["program"]
    assert program.startswith("ca?f.py")
    assert len(program) == origin.LONGEST


@pytest.mark.parametrize("options", [{"program": ""}, {"program": 7}, {"origin": "yes"}])
def test_what_is_no_program_and_no_answer_is_refused(options: dict[str, Any], url: str) -> None:
    with pytest.raises(InvalidInput, match=f"{next(iter(options))} is "):
        LocalRuntime(sf.open(url), **options)
