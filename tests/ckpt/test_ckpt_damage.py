"""``ckpt`` on damaged stores: what ``validate`` calls it, what other commands say, and how
``repair`` mends it.

``ckpt repair`` where segments are lost: what it shows, what it puts back, what it says.

The situations of "The store at 3 a.m." (docs/night.md) are here.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import xxhash

from stateformat import repairing
from stateformat.backends.storage.local import LocalStorage
from stateformat.documents.checkpoint import given_up_told
from stateformat.errors import ErrorKind, StorageError
from stateformat.model import GIVEN_UP_PROPERTY
from stateformat.pages.checkpoint import checkpoint_page
from stateformat.segments import WriteOptions
from stateformat.store import open as open_store
from stateformat.tools.ckpt.text import Look, lines as drawn
from tests.ckpt.ckpt_runs import document, failure, fingerprint, page, run, words
from tests.worlds import stores

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


@pytest.fixture
def flights(tmp_path: Path) -> Path:
    """A checkpoint with something of everything, each segment an object, and the pin ``safe``."""
    store = open_store(str(tmp_path / "store"))
    stores.flights_job().publish(store, None, options=WriteOptions(inline_bytes_max=0))
    store.pin(1, "safe")
    return tmp_path / "store"


def lose(store: Path, pattern: str, *, flip: bool = False) -> Path:
    path = sorted(store.glob(f"segments/*/{pattern}"))[0]
    data = path.read_bytes()
    path.unlink()  # The pin may be a link to it.
    if flip:
        path.write_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
    return path


def test_what_is_lost_is_listed_and_nothing_is_changed(flights: Path) -> None:
    lose(flights, "delays-sums-1-*")
    lose(flights, "sink-prepared-1-*")
    before = fingerprint(flights)
    lost = document("repair", flights, status=1)["lost_segments"]
    assert (lost["checkpoint_id"], [each["missing"] for each in lost["segments"]]) == (1, [True, True])
    assert [(each["url"].rpartition("/")[2], each["segments"]) for each in lost["copies"]] == [("safe", 2)]
    assert [(each["state"], each["positions"]) for each in lost["states"]] == [("sums", False), ("prepared", False)]
    text = words("repair", flights, status=1)
    assert "start it with --drop delays/sums --drop sink/prepared, or" in text
    page("repair", flights, status=1, COLUMNS="60")
    assert fingerprint(flights) == before


def test_what_a_subtask_still_has_of_a_lost_state_is_exported(flights: Path, tmp_path: Path) -> None:
    lose(flights, "delays-sums-1-*")
    one = ("export", flights, "--operator", "delays", "--state", "sums", "--subtask")
    assert document(*one, 0, "--to", tmp_path / "sums.parquet")["rows"] > 0
    failure(*one, 1, "--to", tmp_path / "none.parquet", status=1)


def test_lost_segments_are_put_back_from_a_pin(flights: Path) -> None:
    before = fingerprint(flights)
    for pattern in ("planes-*", "delays-last-0-*"):
        lose(flights, pattern)
    done = document("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    assert (done["published"], len(done["put_back"])) == (False, 2)
    assert fingerprint(flights) == before
    assert document("validate", flights, "--level", "full")["ok"]
    assert words("repair", flights, "--restore-from", f"{flights}@safe").endswith("Nothing is wrong.")


def test_a_damaged_segment_is_put_back_once_it_is_moved_away(flights: Path) -> None:
    whole = fingerprint(flights)
    broken = lose(flights, "delays-last-0-*", flip=True)
    from_pin = ("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    assert "Move that object away and run this again" in failure(*from_pin, status=1)["message"]
    broken.unlink()
    assert len(document(*from_pin)["put_back"]) == 1
    assert fingerprint(flights) == whole


def test_without_positions_of_a_source_no_job_is_said_to_go_on(flights: Path) -> None:
    lose(flights, "planes-splits-0-*")
    text = words("repair", flights, status=1)
    assert "planes/splits holds positions of a source" in text
    assert "--drop" not in text


def test_what_is_found_nowhere_is_a_sentence(flights: Path, tmp_path: Path) -> None:
    lose(flights, "delays-sums-1-*")
    stores.counts_store(str(tmp_path / "empty"))
    before = fingerprint(flights)
    message = failure("repair", flights, "--restore-from", tmp_path / "empty", "--yes", status=1)["message"]
    assert "found nowhere" in message
    assert fingerprint(flights) == before


def test_where_more_than_segments_is_damaged_nothing_is_put_back(flights: Path) -> None:
    from_pin = ("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    lose(flights, "delays-sums-1-*")
    next(flights.glob("manifests/*")).unlink()
    assert document("repair", flights, status=1)["lost_segments"] is None
    assert "more than segments" in failure(*from_pin, status=1)["message"]
    next(flights.glob("checkpoints/*")).write_bytes(b"{")
    assert "cannot be read" in failure(*from_pin, status=1)["message"]


def test_a_place_is_a_whole_store_and_the_newest_may_be_named_by_its_id(flights: Path) -> None:
    assert "a whole store" in failure("repair", flights, "--restore-from", f"{flights}@1", status=2)["message"]
    lose(flights, "delays-sums-1-*")
    done = document("repair", f"{flights}@1", "--restore-from", f"{flights}@safe", "--yes")
    assert (done["checkpoint_id"], done["published"]) == (1, False)


def test_what_an_older_release_gave_up_is_shown(flights: Path) -> None:
    state = {"operator": "delays", "state": "sums", "effect": "forgotten", "rows": 10, "rows_besides": 4}
    told = {"checkpoint_id": 4, "attempt_id": "a" * 32, "scope": "rows", "rows": 14, "states": [state]}
    given_up = given_up_told({GIVEN_UP_PROPERTY: json.dumps(told)})
    assert given_up == {"checkpoint_id": 4, "rows": 14, "states": [state]}
    found = document("inspect", flights) | {"given_up": given_up}
    text = " ".join(" ".join(drawn(checkpoint_page(found, found["created_at_us"]), Look())).split())
    assert "given up 14 rows of checkpoint 4, whose segments were lost: delays/sums 14" in text


@pytest.mark.parametrize(
    "told",
    [
        "{",
        "[]",
        "null",
        '{"checkpoint_id":1,"rows":Infinity,"states":[]}',
        '{"checkpoint_id":1,"rows":1,"states":7}',
        '{"checkpoint_id":1,"rows":1,"states":[{"operator":"a"}]}',
        "[" * 5000,
        '{"checkpoint_id":1,"rows":' + "9" * 5000 + ',"states":[]}',
    ],
)
def test_a_property_that_is_not_ours_is_shown_as_it_is(told: str) -> None:
    assert given_up_told({GIVEN_UP_PROPERTY: told}) is None


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_repair_says_what_it_leaves(flights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose(flights, "delays-sums-1-*")

    def interrupt(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(repairing, "put_back", interrupt)
    found = run("repair", flights, "--restore-from", f"{flights}@safe", "--yes")
    assert found.status == 130
    assert "Run it again to go on" in found.err
    monkeypatch.undo()
    assert not document("repair", flights, "--restore-from", f"{flights}@safe", "--yes")["published"]
