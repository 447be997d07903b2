"""What is wrong with a store or a command line is told in a sentence, with its exit status, and changes nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from tests import stores
from tests.ckpt_runs import document, failure, fingerprint, run

RECORD = f"checkpoints/{1:020d}.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint whose segments are objects."""
    folder = tmp_path_factory.mktemp("bad") / "store"
    stores.counts_job(keys=50).publish(open_store(str(folder)), None, options=WriteOptions(inline_bytes_max=0))
    return folder


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "store"))


def forge(store: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the record as a faulty writer would, with a digest that is right again."""
    path = store / RECORD
    members = json.loads(path.read_bytes())
    del members["digest"]
    change(members)
    body = json.dumps(members, ensure_ascii=False, separators=(",", ":"))[:-1].encode()
    path.write_bytes(body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')


def segments(store: Path) -> list[Path]:
    return sorted((store / "segments").rglob("*.parquet"))


def newer_version(store: Path) -> None:
    forge(store, lambda members: members.update(version=2))


def unknown_feature(store: Path) -> None:
    forge(store, lambda members: members.update(required_features=["telepathy"]))


def path_that_leaves(store: Path) -> None:
    forge(store, lambda members: members["manifest"].update(path="manifests/../../secret"))


def unsupported_key(store: Path) -> None:
    def change(members: dict[str, Any]) -> None:
        field = members["states"][0]["schemas"][0]["fields"][0]
        field["type"] = {"list": {"id": 9, "name": "element", "type": "utf8", "nullable": True}}

    forge(store, change)


def altered_record(store: Path) -> None:
    path = store / RECORD
    path.write_bytes(path.read_bytes().replace(b'"counts"', b'"counth"', 1))


def cut_record(store: Path) -> None:
    path = store / RECORD
    path.write_bytes(path.read_bytes()[:100])


def cut_manifest(store: Path) -> None:
    path = next((store / "manifests").iterdir())
    path.write_bytes(path.read_bytes()[:-30])


def missing_manifest(store: Path) -> None:
    next((store / "manifests").iterdir()).unlink()


def missing_segment(store: Path) -> None:
    segments(store)[0].unlink()


def short_segment(store: Path) -> None:
    path = segments(store)[0]
    path.write_bytes(path.read_bytes()[:-10])


def swapped_segments(store: Path) -> None:
    first, second = segments(store)
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def altered_segment(store: Path) -> None:
    data = bytearray(segments(store)[0].read_bytes())
    data[60] ^= 0x10
    segments(store)[0].write_bytes(data)


def linked_segment(store: Path) -> None:
    path = segments(store)[0]
    moved = store.parent / "elsewhere.parquet"
    path.rename(moved)
    path.symlink_to(moved)


@dataclass(frozen=True)
class Damage:
    """A way to be broken, the problem kinds that ``validate`` may call it, and a word of the sentence."""

    done: Callable[[Path], None]
    kinds: tuple[str, ...]
    word: str
    unopenable: bool = True
    status: int = 1


DAMAGES = [
    Damage(newer_version, ("unsupported_version",), "Upgrade"),
    Damage(unknown_feature, ("unsupported_feature",), "telepathy"),
    Damage(path_that_leaves, ("invalid_path",), "secret"),
    Damage(altered_record, ("object_digest_differs",), RECORD),
    Damage(cut_record, ("damaged_record",), RECORD),
    Damage(cut_manifest, ("object_size_differs", "damaged_manifest"), "manifests/"),
    Damage(missing_manifest, ("object_missing",), "manifests/"),
    Damage(unsupported_key, ("unsupported_key_type", "unsupported_type"), "word", unopenable=False),
    Damage(missing_segment, ("object_missing",), "segments/", unopenable=False),
    Damage(short_segment, ("object_size_differs",), "segments/", unopenable=False),
    Damage(
        swapped_segments,
        ("object_digest_differs", "object_size_differs", "damaged_segment"),
        "segments/",
        unopenable=False,
    ),
    Damage(altered_segment, ("object_digest_differs", "damaged_segment"), "segments/", unopenable=False),
    Damage(linked_segment, ("invalid_path", "storage_failed"), "symbolic link", unopenable=False, status=3),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.done.__name__)
def test_damage_is_a_problem_with_a_clause_and_never_a_trace(damage: Damage, store: Path, tmp_path: Path) -> None:
    damage.done(store)
    before = fingerprint(store)
    found = document("validate", store, "--level", "full", status=1)
    assert found["problems"]
    assert {problem["kind"] for problem in found["problems"]} & set(damage.kinds)
    assert all(problem["clause"].startswith("SPEC ") and problem["advice"] for problem in found["problems"])
    assert any(damage.word in problem["message"] for problem in found["problems"])
    command: tuple[object, ...] = ("inspect", store)
    if not damage.unopenable:
        command = ("export", store, "--operator", "counter", "--state", "counts", "--to", tmp_path / "x.jsonl")
    error = failure(*command, status=damage.status)
    assert error["kind"] not in ("", "internal_error")
    assert damage.word in error["message"]
    assert not (tmp_path / "x.jsonl").exists()
    assert fingerprint(store) == before


def test_duplicate_row_keys_are_found(tmp_path: Path) -> None:
    store, job = tmp_path / "store", stores.counts_job()

    def twice(subtask: int) -> pa.Table:
        rows = job.rows["counter", "counts"](subtask)
        return pa.concat_tables([rows, rows])

    forged = stores.Job(job.job_id, job.graph, job.states, {("counter", "counts"): twice})
    forged.publish(open_store(str(store)), None, options=WriteOptions(check_unique=False))
    before = fingerprint(store)
    assert document("validate", store)["ok"]
    found = document("validate", store, "--level", "full", status=1)
    assert {problem["kind"] for problem in found["problems"]} == {"duplicate_row_key"}
    assert {problem["subtask"] for problem in found["problems"]} == {0, 1}
    assert fingerprint(store) == before


def test_a_store_that_is_not_there_is_not_found_and_not_made(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    for command in (
        ("history",),
        ("inspect",),
        ("validate",),
        ("explain-restore",),
        ("rescale", "--parallelism", 2),
        ("rewrite",),
        ("gc", "--delete"),
        ("export", "--operator", "a", "--state", "b", "--to", tmp_path / "x.csv"),
    ):
        error = failure(command[0], nowhere, *command[1:], status=3)
        assert error["kind"] == "store_not_found"
        assert str(nowhere) in error["message"]
    assert failure("rollback", f"{nowhere}@1", status=3)["kind"] == "store_not_found"
    assert failure("copy", nowhere, tmp_path / "target", status=3)["kind"] == "store_not_found"
    assert list(tmp_path.iterdir()) == []


def test_an_empty_store_is_not_found_either(tmp_path: Path) -> None:
    for command in ("history", "inspect", "validate", "gc"):
        assert failure(command, tmp_path, status=3)["kind"] in ("store_empty", "store_not_found")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_there_is_not_found(store: Path) -> None:
    error = failure("inspect", f"{store}@9", status=3)
    assert error["kind"] == "checkpoint_not_found"
    assert "9" in error["message"]


def test_an_expired_checkpoint_says_that_it_has_expired(tmp_path: Path) -> None:
    store = tmp_path / "store"
    stores.counts_store(str(store), checkpoints=3)
    assert run("gc", store, "--keep", 1, "--delete").status == 0
    assert failure("inspect", f"{store}@1", status=3)["kind"] == "checkpoint_expired"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("rescale", "--parallelism", "0"), "x>=1"),
        (("rescale", "--operator-parallelism", "counter=0"), "counter=0"),
        (("explain-restore", "--parallelism", "-3"), "x>=1"),
        (("rewrite", "--max-parallelism", "40000"), "32768"),
        (("explain-restore", "--operator-parallelism", "nope=2"), "nope"),
        (("explain-restore", "--drop", "nope"), "nope"),
        (("inspect", "--state", "nope"), "it has 'counts'"),
        (("gc", "--keep", "0"), "x>=1"),
        (("inspect", "--rows", "many"), "not a valid integer"),
        (("validate", "--level", "deep"), "quick"),
        (("inspect", "--unknown"), "--unknown"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_misuse_is_told_and_changes_nothing(store: Path, command: tuple[str, ...], told: str) -> None:
    before = fingerprint(store)
    error = failure(command[0], store, *command[1:], status=2)
    assert told in error["message"]
    assert fingerprint(store) == before


def test_a_scheme_that_no_storage_serves_is_misuse() -> None:
    error = failure("history", "gopher://host/store", status=2)
    assert error["kind"] == "unknown_scheme"
    assert "file" in error["message"]


def test_a_command_that_does_not_exist_is_misuse() -> None:
    assert failure("inspekt", "x", status=2)["kind"] == "usage"


def test_without_arguments_there_is_help_and_the_status_of_misuse() -> None:
    found = run()
    assert found.status == 2
    assert found.err.startswith("Usage: ckpt ")


def test_a_folder_in_the_place_of_a_record_is_told_and_not_passed_over(store: Path) -> None:
    record = store / RECORD
    record.unlink()
    record.mkdir()
    assert failure("inspect", store, status=3)["kind"] == "storage_refused"


def test_verbose_tells_what_is_done_on_standard_error(store: Path) -> None:
    quiet, loud = run("rescale", store, "--parallelism", 1), run("rescale", store, "--parallelism", 2, "--verbose")
    assert quiet.err == ""
    assert "published checkpoint 3" in loud.err
