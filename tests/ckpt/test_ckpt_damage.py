"""``ckpt`` on damaged stores: what ``validate`` calls it, what other commands say, and how
``repair`` mends it.

The situations of "The store at 3 a.m." (docs/night.md) are here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import ErrorKind, StorageError
from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from tests import stores
from tests.ckpt.ckpt_runs import document, failure, fingerprint, run, words

RECORD = "checkpoints/{:020d}.json"
FIRST = RECORD.format(1)
Damage = Callable[[Path], None]


def forged(**members: Any) -> Damage:
    """A record as a faulty writer would make it, with a digest that is right; a function changes a
    member."""

    def do(store: Path) -> None:
        values = json.loads((store / FIRST).read_bytes())
        del values["digest"]
        for name, value in members.items():
            values[name] = value(values[name]) if callable(value) else value
        body = json.dumps(values, ensure_ascii=False, separators=(",", ":"))[:-1].encode()
        (store / FIRST).write_bytes(body + b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n')

    return do


def list_key(states: Any) -> Any:
    states[0]["schemas"][0]["fields"][0]["type"] = {
        "list": {"id": 9, "name": "element", "type": "utf8", "nullable": True}
    }
    return states


def one(store: Path, pattern: str) -> Path:
    return sorted(store.glob(pattern))[0]


def rewritten(pattern: str, change: Callable[[bytes], bytes]) -> Damage:
    def do(store: Path) -> None:
        path = one(store, pattern)
        path.write_bytes(change(path.read_bytes()))

    return do


def removed(pattern: str) -> Damage:
    return lambda store: one(store, pattern).unlink()


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]


def swapped(store: Path) -> None:
    first, second = sorted(store.glob("segments/*/*"))
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def linked(store: Path) -> None:
    path, moved = one(store, "segments/*/*"), store.parent / "elsewhere.parquet"
    path.rename(moved)
    path.symlink_to(moved)


SEGMENT = "segments/*/*"
DAMAGES: dict[str, tuple[Damage, set[str], str]] = {
    "newer version": (forged(version=2), {"unsupported_version"}, "Upgrade"),
    "unknown feature": (forged(required_features=["telepathy"]), {"unsupported_feature"}, "telepathy"),
    "path that leaves": (
        forged(manifest=lambda manifest: {**manifest, "path": "manifests/../../secret"}),
        {"invalid_path"},
        "secret",
    ),
    "altered record": (
        rewritten(FIRST, lambda data: data.replace(b'"counts"', b'"counth"', 1)),
        {"object_digest_differs"},
        FIRST,
    ),
    "cut record": (rewritten(FIRST, lambda data: data[:100]), {"damaged_record"}, FIRST),
    "cut manifest": (
        rewritten("manifests/*", lambda data: data[:-30]),
        {"object_size_differs", "damaged_manifest"},
        "manifests/",
    ),
    "missing manifest": (removed("manifests/*"), {"object_missing"}, "manifests/"),
}
"""Damages that keep a checkpoint from being opened: how, what ``validate`` may call it, a word of
the sentence."""
IN_SEGMENTS: dict[str, tuple[Damage, set[str], str]] = {
    "unsupported key": (forged(states=list_key), {"unsupported_key_type", "unsupported_type"}, "word"),
    "missing segment": (removed(SEGMENT), {"object_missing"}, "segments/"),
    "short segment": (rewritten(SEGMENT, lambda data: data[:-10]), {"object_size_differs"}, "segments/"),
    "swapped segments": (
        swapped,
        {"object_digest_differs", "object_size_differs", "damaged_segment"},
        "segments/",
    ),
    "altered segment": (rewritten(SEGMENT, flipped(60)), {"object_digest_differs", "damaged_segment"}, "segments/"),
    "linked segment": (linked, {"invalid_path", "storage_failed"}, "symbolic link"),
}


@pytest.mark.parametrize("name", DAMAGES | IN_SEGMENTS)
def test_damage_is_a_problem_with_a_clause_and_never_a_trace(name: str, whole: Path, tmp_path: Path) -> None:
    damage, kinds, word = (DAMAGES | IN_SEGMENTS)[name]
    damage(whole)
    before = fingerprint(whole)
    problems = document("validate", whole, "--level", "full", status=1)["problems"]
    assert {problem["kind"] for problem in problems} & kinds
    assert all(problem["clause"].startswith("SPEC ") and problem["advice"] for problem in problems)
    assert any(word in problem["message"] for problem in problems)
    command: tuple[object, ...] = ("inspect", whole)
    if name in IN_SEGMENTS:
        command = ("export", whole, "--operator", "counter", "--state", "counts", "--to", tmp_path / "x.jsonl")
    error = failure(*command, status=3 if damage is linked else 1)
    assert error["kind"] not in ("", "internal_error")
    assert word in error["message"]
    assert not (tmp_path / "x.jsonl").exists()
    assert fingerprint(whole) == before


def test_duplicate_row_keys_are_found(tmp_path: Path) -> None:
    job = stores.counts_job()

    def twice(subtask: int) -> pa.Table:
        rows = job.rows["counter", "counts"](subtask)
        return pa.concat_tables([rows, rows])

    doubled = stores.Job(job.job_id, job.graph, job.states, {("counter", "counts"): twice})
    doubled.publish(open_store(str(tmp_path)), None, options=WriteOptions(check_unique=False))
    assert document("validate", tmp_path)["ok"]
    problems = document("validate", tmp_path, "--level", "full", status=1)["problems"]
    assert {problem["kind"] for problem in problems} == {"duplicate_row_key"}
    assert {problem["subtask"] for problem in problems} == {0, 1}


def test_a_folder_in_place_of_a_record_is_not_passed_over(whole: Path) -> None:
    (whole / FIRST).unlink()
    (whole / FIRST).mkdir()
    assert failure("inspect", whole, status=3)["kind"] == "storage_refused"


@pytest.mark.parametrize("damage", [removed("segments/*1/*"), rewritten("segments/*1/*", lambda data: data[:-1])])
@pytest.mark.parametrize(
    "command", ["rescale --parallelism 3", "rescale --parallelism 3 --to {}", "rewrite", "rollback", "copy {}"]
)
def test_nothing_is_made_of_a_checkpoint_of_which_a_segment_is_not_there(
    tmp_path: Path, command: str, damage: Damage
) -> None:
    store, there = tmp_path / "store", tmp_path / "there"
    name, *options = command.format(there).split()
    opened, options_ = open_store(store), WriteOptions(inline_bytes_max=0)
    permit = None
    for _ in range(2 if name == "rollback" else 1):
        permit = stores.counts_job().publish(opened, permit, options=options_)
    segment = one(store, "segments/*1/*").name
    damage(store)
    error = failure(name, f"{store}@1" if name in ("rollback", "copy") else store, *options, status=1)
    assert segment in error["message"]
    assert error["kind"] in ("object_missing", "object_size_differs", "object_digest_differs")
    assert len(list((store / "checkpoints").iterdir())) == (2 if name == "rollback" else 1)
    assert not list(there.glob("checkpoints/*"))


# ---- repair


def damage_record(store: Path, number: int) -> None:
    (store / RECORD.format(number)).write_text("{")


def put_in_a_stray(store: Path) -> None:
    """A record above all others whose parent is nowhere, as a backup of another time may bring it
    back."""
    body = (store / RECORD.format(6)).read_bytes()[:-46]
    body = body.replace(b'"checkpoint_id":6,', b'"checkpoint_id":10,', 1)
    body = body.replace(b'"parent":{"checkpoint_id":5', b'"parent":{"checkpoint_id":9')
    digest = xxhash.xxh3_128_hexdigest(body).encode()
    (store / RECORD.format(10)).write_bytes(body + b',"digest":"' + digest + b'"}\n')


@pytest.mark.parametrize(
    ("damage", "level", "told"),
    [
        pytest.param(lambda store: damage_record(store, 6), "quick", "is not JSON", id="record"),
        pytest.param(removed("manifests/*6-*"), "quick", "not in the store", id="manifest"),
        pytest.param(removed("segments/*6/*"), "quick", "not in the store", id="segment"),
        pytest.param(rewritten("segments/*6/*", flipped(200)), "full", "its digest is", id="flipped"),
    ],
)
def test_a_newest_that_cannot_be_run_from_is_mended_by_what_the_page_says(
    five: Path, damage: Damage, level: str, told: str
) -> None:
    damage(five)
    before = fingerprint(five)
    page = words("repair", five, "--level", level, status=1, COLUMNS="200")
    assert "cannot be run from" in page
    assert told in page
    assert fingerprint(five) == before, "nothing was changed"
    advised = page[page.index("`ckpt repair") + 1 :].split("`")[0].split()[1:]
    assert advised[-1] == "--yes"
    mended = words(*advised)
    assert "Published checkpoint 7" in mended
    assert "Left behind: 6." in mended
    assert "Nothing is wrong" in words("repair", five)
    assert document("validate", five, "--level", "full")["ok"]
    assert before.items() <= fingerprint(five).items()


def test_a_record_in_the_middle_that_is_gone_needs_nothing_and_hides_nothing(five: Path) -> None:
    (five / RECORD.format(4)).unlink()
    rows = run("history", five).out.splitlines()
    assert [line.split()[:2] for line in rows if line.strip()[:1].isdigit()] == [
        [number, "lost" if number == "4" else "checkpoint"] for number in "65432"
    ]
    page = words("repair", five, status=1)
    assert "There is nothing to do" in page
    assert "by hand" not in page, "one record is missing, however far above it the newest is"
    for status, command in (
        *((1, "history {}"), (0, "inspect {}@3"), (0, "copy {}@3 {}-copy"), (1, "gc {} --keep 3 --delete")),
        *((1, "rollback {}@3"), (0, "repair {}@3 --yes"), (0, "history {}")),
    ):
        assert run(*command.replace("{}", str(five)).split()).status == status, command


def test_a_damaged_record_in_the_middle_is_shown_in_its_place(five: Path) -> None:
    damage_record(five, 4)
    found = document("history", five, status=1)
    assert [entry["checkpoint_id"] for entry in found["checkpoints"]] == [6, 5]
    assert [entry["checkpoint_id"] for entry in found["cut_off"]] == [3, 2]
    assert [(entry["checkpoint_id"], entry["kind"]) for entry in found["damaged"]] == [(4, "damaged_record")]
    assert run("explain-restore", f"{five}@3", "--parallelism", 3).status == 0


def test_a_stray_above_the_newest_is_gone_back_from(five: Path) -> None:
    put_in_a_stray(five)
    assert "by hand or from a backup, go back to 6" in words("repair", five, status=1)
    assert "Published checkpoint 11" in words("repair", f"{five}@6", "--yes")
    assert "1 stray, no checkpoint: 10" in words("history", five)


@pytest.mark.parametrize("options", [(), ("--yes",)])
def test_a_store_of_one_damaged_record_names_ways_that_are_there(counts: Path, options: tuple[str, ...]) -> None:
    damage_record(counts, 1)
    page = words("repair", counts, *options, status=1)
    assert "with an empty store" in page
    assert "listed" not in page
    assert "lists" not in page


def test_a_higher_one_that_stands_alone_is_offered_and_not_taken(five: Path) -> None:
    damage_record(five, 4)
    damage_record(five, 6)
    page = words("repair", five, status=1)
    assert "publishes checkpoint 7 with the content of 3." in page
    assert "Checkpoint 5 is whole as well and would repeat less. But it stands alone" in page
    assert "Left behind: 6." in words("repair", f"{five}@5", "--yes")


def test_no_room_ends_in_a_sentence_and_changes_nothing(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage_record(five, 6)

    def full(*_: Any) -> None:
        raise StorageError("no room is left; free some", kind=ErrorKind.STORAGE_REFUSED)

    monkeypatch.setattr(LocalStorage, "open_output", full)
    before = sorted(five.rglob("*"))
    assert "no room is left" in words("repair", five, "--yes", status=3)
    assert sorted(five.rglob("*")) == before


def test_no_rights_are_no_damage(five: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, newest = os.open, Path(RECORD.format(6)).name

    def denied(path: Any, *more: Any, **how: Any) -> int:
        if path == newest:
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *more, **how)

    monkeypatch.setattr(os, "open", denied)
    for command in (("history", five), ("repair", five), ("repair", five, "--yes")):
        assert "Check the owner and mode" in words(*command, status=3)
    assert run("inspect", f"{five}@5").status == 0


def test_gc_and_what_starts_from_the_newest_name_the_way_out(five: Path) -> None:
    damage_record(five, 6)
    for command in ("inspect {}", "rescale {} --parallelism 3", "rollback {}@4", "gc {}", "gc {} --keep 1 --delete"):
        assert "ckpt repair" in words(*command.format(five).split(), status=1), command
    assert run("rescale", f"{five}@5", "--parallelism", 3, "--to", five.parent / "other").status == 0


def test_what_nothing_is_wrong_with_is_left_alone(five: Path) -> None:
    assert run("repair", five) == run("repair", five, "--yes")
    assert "ckpt rollback" in words("repair", f"{five}@4", "--yes", status=2)
    assert run("repair", f"{five}@9").status == 3
    assert run("repair", five.parent / "nowhere").status == 3


def test_all_checkpoints_are_validated_and_the_newest_whole_is_found(five: Path) -> None:
    whole = document("validate", five, "--all", "--level", "full")
    assert (whole["ok"], whole["newest_whole"], len(whole["checkpoints"])) == (True, 6, 5)
    assert run("validate", five, "--newest-whole").status == 0
    for checkpoint_id in (6, 5):
        rewritten(f"segments/{checkpoint_id:020d}/*-0-*", flipped(60))(five)
    assert document("validate", five, "--all")["ok"]
    found = document("validate", five, "--all", "--level", "full", status=1)
    assert [each["standing"] for each in found["checkpoints"]] == ["damaged"] * 2 + ["whole"] * 3
    assert [problem["checkpoints"] for problem in found["problems"]] == [[[6, 6]], [[5, 5]]]
    found = document("validate", five, "--newest-whole", "--level", "full", status=1)
    assert (found["newest"], found["newest_whole"], len(found["checkpoints"])) == (6, 4, 3)
    for manifest in five.glob("manifests/*"):
        manifest.unlink()
    assert document("validate", five, "--newest-whole", status=3)["newest_whole"] is None
    assert "No checkpoint is whole." in words("validate", five, "--newest-whole", status=3)


def test_questions_about_a_store_name_no_checkpoint(five: Path) -> None:
    for options in (["--all"], ["--newest-whole"]):
        assert "Leave @5 out" in failure("validate", f"{five}@5", *options, status=2)["message"]
    assert "Leave one out" in failure("validate", five, "--all", "--newest-whole", status=2)["message"]


def test_all_checkpoints_of_another_system_are_validated() -> None:
    fixtures = Path(__file__).parents[1] / "foreign/fixtures"
    for name in ("flink-1.20.5/brief-hashmap-native/savepoint", "spark-4.0.5/aggregate/checkpoint"):
        folder = fixtures / name
        found = document("validate", folder, "--all")
        assert found["ok"]
        assert found["newest_whole"] == found["newest"] == found["checkpoints"][0]["checkpoint_id"]
        assert document("validate", folder, "--newest-whole")["newest_whole"] == found["newest"]


def test_savepoints_below_the_store_are_validated_too_and_are_what_is_left(five: Path) -> None:
    store = open_store(str(five))
    store.pin(5, "early")
    store.pin(6, "late")
    found = document("validate", five, "--all", "--level", "full")
    assert [(each["name"], each["checkpoint_id"], each["ok"]) for each in found["savepoints"]] == [
        ("late", 6, True),
        ("early", 5, True),
    ]
    assert document("validate", five, "--newest-whole")["savepoints"] == []
    one(five, "savepoints/late/segments/*/*").unlink()
    found = document("validate", five, "--all", status=1)
    assert (found["problems"], [len(each["problems"]) for each in found["savepoints"]]) == ([], [1, 0])
    for manifest in five.glob("manifests/*"):
        manifest.unlink()
    found = document("validate", five, "--newest-whole", status=3)
    assert [(each["name"], each["ok"]) for each in found["savepoints"]] == [("late", False), ("early", True)]
    assert "The savepoint early of checkpoint 5 is whole" in words("validate", five, "--newest-whole", status=3)
