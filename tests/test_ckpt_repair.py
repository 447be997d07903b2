"""``ckpt repair`` and what else a person meets at a damaged store: each situation of "The store at 3 a.m." in docs/cli.md."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import ErrorKind, StorageError
from stateformat.segments import WriteOptions
from stateformat.tools.ckpt.main import main
from tests import stores

RECORD = "checkpoints/{:020d}.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints 2 to 6; no segment is inline."""
    root = tmp_path_factory.mktemp("whole") / "store"
    store, job = stores.counts_store(str(root)), stores.counts_job()
    for _ in range(5):
        job.publish(store, store.start(job.job_id), options=WriteOptions(inline_bytes_max=0))
    store.expire(5)
    return root


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


@pytest.fixture
def ckpt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Run a command on a terminal of 80 columns: its status, and all that it prints."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        told = capsys.readouterr()
        assert told.out[:1] == "{" or all(len(line) <= 80 for line in told.out.splitlines()), told.out
        return status, told.out + told.err

    return run


Run = Callable[..., tuple[int, str]]


def damage_record(store: Path, number: int) -> None:
    (store / RECORD.format(number)).write_text("{")


def one(store: Path, pattern: str) -> Path:
    return sorted(store.glob(pattern))[0]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))


def put_in_a_stray(store: Path) -> None:
    """What a backup of another time may bring back: a record above all others, whose parent is nowhere."""
    body = (store / RECORD.format(6)).read_bytes()[:-46]
    body = body.replace(b'"checkpoint_id":6,', b'"checkpoint_id":10,', 1)
    body = body.replace(b'"parent":{"checkpoint_id":5', b'"parent":{"checkpoint_id":9')
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    (store / RECORD.format(10)).write_bytes(body + b',"digest":"' + digest + b'"}\n')


@pytest.mark.parametrize(
    ("break_it", "level", "told"),
    [
        pytest.param(lambda store: damage_record(store, 6), "quick", "is not JSON", id="record"),
        pytest.param(lambda store: one(store, "manifests/*6-*").unlink(), "quick", "not in the store", id="manifest"),
        pytest.param(lambda store: one(store, "segments/*6/*").unlink(), "quick", "not in the store", id="segment"),
        pytest.param(lambda store: flip(one(store, "segments/*6/*")), "full", "its digest is", id="flipped"),
    ],
)
def test_a_newest_that_cannot_be_run_from_is_mended_by_what_the_page_says(
    store: Path, ckpt: Run, break_it: Callable[[Path], None], level: str, told: str
) -> None:
    break_it(store)
    before = {path: path.read_bytes() for path in store.rglob("*") if path.is_file()}
    status, page = ckpt("repair", store, "--level", level)
    assert (status, "cannot be run from" in page, told in page.replace("\n    ", " ")) == (1, True, True)
    assert {path: path.read_bytes() for path in store.rglob("*") if path.is_file()} == before, "nothing was changed"
    # The very command that the page advises.
    words = " ".join(page.split())
    advised = words[words.index("`ckpt repair") + 1 :].split("`")[0].split()[1:]
    assert advised[-1] == "--yes"
    status, page = ckpt(*advised)
    assert (status, "Published checkpoint 7" in page, "Left behind: 6." in page) == (0, True, True)
    status, page = ckpt("repair", store)
    assert (status, "Nothing is wrong" in page) == (0, True)
    assert ckpt("validate", store, "--level", "full")[0] == 0
    assert {path: path.read_bytes() for path in before} == before


def test_a_record_in_the_middle_that_is_gone_needs_nothing_and_hides_nothing(store: Path, ckpt: Run) -> None:
    (store / RECORD.format(4)).unlink()
    status, page = ckpt("history", store)
    assert status == 1
    assert [line.split()[:2] for line in page.splitlines() if line.strip()[:1].isdigit()] == [
        ["6", "checkpoint"],
        ["5", "checkpoint"],
        ["4", "lost"],
        ["3", "checkpoint"],
        ["2", "checkpoint"],
    ]
    status, page = ckpt("repair", store)
    assert (status, "Nothing has to be done" in " ".join(page.split())) == (1, True)
    assert "by hand" not in page, "one record is missing, however far above it the newest is"
    assert ckpt("inspect", f"{store}@3")[0] == 0
    assert ckpt("copy", f"{store}@3", store.parent / "copy")[0] == 0
    assert ckpt("gc", store, "--keep", 3, "--delete")[0] == 1
    assert ckpt("rollback", f"{store}@3")[0] == 1
    assert ckpt("repair", f"{store}@3", "--yes")[0] == 0
    assert ckpt("history", store)[0] == 0


def test_a_damaged_record_in_the_middle_is_shown_in_its_place(store: Path, ckpt: Run) -> None:
    damage_record(store, 4)
    status, page = ckpt("history", store, "--format", "json")
    found = json.loads(page)
    assert status == 1
    assert [entry["checkpoint_id"] for entry in found["checkpoints"]] == [6, 5]
    assert [entry["checkpoint_id"] for entry in found["cut_off"]] == [3, 2]
    assert [(entry["checkpoint_id"], entry["kind"]) for entry in found["damaged"]] == [(4, "damaged_record")]
    assert ckpt("explain-restore", f"{store}@3", "--parallelism", 3)[0] == 0


def test_a_stray_above_the_newest_is_gone_back_from(store: Path, ckpt: Run) -> None:
    put_in_a_stray(store)
    status, page = ckpt("repair", store)
    assert (status, "by hand or from a backup, go back to 6" in " ".join(page.split())) == (1, True)
    status, page = ckpt("repair", f"{store}@6", "--yes")
    assert (status, "Published checkpoint 11" in page) == (0, True)
    status, page = ckpt("history", store)
    assert (status, "1 stray, no checkpoint: 10" in page) == (0, True)


def test_a_store_of_one_damaged_record_names_ways_that_are_there(tmp_path: Path, ckpt: Run) -> None:
    store = tmp_path / "one"
    stores.counts_store(str(store))
    damage_record(store, 1)
    for arguments in (["repair", store], ["repair", store, "--yes"]):
        status, told = ckpt(*arguments)
        assert status == 1
        assert "with an empty store" in " ".join(told.split())
        assert "listed" not in told
        assert "lists" not in told


def test_a_higher_one_that_stands_alone_is_offered_and_not_taken(store: Path, ckpt: Run) -> None:
    damage_record(store, 4)
    damage_record(store, 6)
    status, told = ckpt("repair", store)
    words = " ".join(told.split())
    assert (status, "publishes checkpoint 7 with the content of 3." in words) == (1, True)
    assert "Checkpoint 5 is whole as well and would repeat less. But it stands alone" in words
    status, told = ckpt("repair", f"{store}@5", "--yes")
    assert (status, "Left behind: 6." in told) == (0, True)


def test_no_room_ends_in_a_sentence_and_changes_nothing(
    store: Path, ckpt: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage_record(store, 6)

    def full(*_: Any) -> None:
        raise StorageError("no room is left; free some", kind=ErrorKind.STORAGE_REFUSED)

    monkeypatch.setattr(LocalStorage, "open_output", full)
    before = sorted(store.rglob("*"))
    status, page = ckpt("repair", store, "--yes")
    assert (status, "no room is left" in page) == (3, True)
    assert sorted(store.rglob("*")) == before


def test_no_rights_are_no_damage(store: Path, ckpt: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open
    newest = RECORD.format(6).rpartition("/")[2]

    def denied(path: Any, *more: Any, **how: Any) -> int:
        if path == newest:
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *more, **how)

    monkeypatch.setattr(os, "open", denied)
    for arguments in (("history", store), ("repair", store), ("repair", store, "--yes")):
        status, page = ckpt(*arguments)
        assert (status, "Check the owner and mode" in page) == (3, True)
    assert ckpt("inspect", f"{store}@5")[0] == 0


def test_gc_and_what_starts_from_the_newest_name_the_way_out(store: Path, ckpt: Run) -> None:
    damage_record(store, 6)
    for arguments in (
        ("inspect", store),
        ("rescale", store, "--parallelism", 3),
        ("rollback", f"{store}@4"),
        ("gc", store),
        ("gc", store, "--keep", 1, "--delete"),
    ):
        status, page = ckpt(*arguments)
        assert (status, "ckpt repair" in " ".join(page.split())) == (1, True), arguments
    assert ckpt("rescale", f"{store}@5", "--parallelism", 3, "--to", store.parent / "other")[0] == 0


def test_what_nothing_is_wrong_with_is_left_alone(store: Path, ckpt: Run) -> None:
    assert ckpt("repair", store) == ckpt("repair", store, "--yes")
    status, page = ckpt("repair", f"{store}@4", "--yes")
    assert (status, "ckpt rollback" in page) == (2, True)
    assert ckpt("repair", f"{store}@9")[0] == 3
    assert ckpt("repair", store.parent / "nowhere")[0] == 3
