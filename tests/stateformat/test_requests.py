"""What users ask of a running job: requests and their answers, on every storage.

The parallelism that a rescale asks for: what its record says, and what readers make of it.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import xxhash
from hypothesis import given, settings, strategies as st

from stateformat import paths as layout
from stateformat.backends.storage.local import LocalStorage
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import ErrorKind, InvalidInput, NotFound, OutcomeUnknown, StorageError, UnsupportedFormat
from stateformat.graph import SubtaskSet
from stateformat.model import RESCALE_PROPERTY, CheckpointKind, Record, Stop, StopMode
from stateformat.record import RecordFault
from stateformat.requests import (
    BYTES_MAX,
    JobRequest,
    RequestAnswer,
    RequestKind,
    RequestOutcome,
    asking_order,
    counts_for,
    decode_answer,
    decode_request,
    default_savepoint,
    encode_answer,
    encode_request,
)
from stateformat.rescaling import WantedParallelism, lasting_stop, rescale_of
from stateformat.storage import CreateOutcome
from stateformat.store import CheckpointStore
from tests.servers.server import BUCKET, S3Server
from tests.worlds import stores
from tests.worlds.stores import refused

ID = "0123456789abcdef" * 2


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    """A store with two checkpoints."""
    name = f"requests-{uuid4().hex}"
    url = f"memory://{name}" if request.param == "memory" else str(tmp_path / "store")
    yield CheckpointStore(stores.counts_store(url, checkpoints=2).storage, sleep=lambda seconds: None)
    MemoryStorage.reset(name)


def objects(store: CheckpointStore) -> list[str]:
    return [item.path for item in store.storage.list("requests/")]


def put(store: CheckpointStore, path: str, data: bytes) -> None:
    assert store.storage.create(path, data) is CreateOutcome.CREATED


# ---- from asking to the end ----------------------------------------------------------------------


def test_a_request_is_seen_answered_and_removed(store: CheckpointStore) -> None:
    asked = store.request_stop(StopMode.DRAIN)
    assert (asked.mode, asked.newest, asked.savepoint) == (StopMode.DRAIN, 2, None)
    assert re.fullmatch("[0-9a-f]{32}", asked.id)
    assert asked.created_at_us > 1_700_000_000_000_000
    assert store.requests() == [asked]
    assert store.request_answer(asked.id) is None
    answer = RequestAnswer(asked.id, RequestOutcome.STOPPED, "all is safe", 3, "file:///there")
    assert store.answer_request(answer)
    assert store.request_answer(asked.id) == answer
    assert store.requests() == [], "what has an answer is asked no more"
    store.withdraw_request(asked.id)
    assert objects(store) == []
    assert store.request_answer(asked.id) is None
    store.withdraw_request(asked.id)


def test_the_objects_are_what_the_specification_says(store: CheckpointStore) -> None:
    asked = store.request_stop(StopMode.NO_DRAIN, "s3://bucket/safe")
    store.answer_request(RequestAnswer(asked.id, RequestOutcome.FAILED, "the disk is full"))
    names = [f"requests/{2:020d}-{what}-{asked.id}.json" for what in ("answer", "stop")]
    assert objects(store) == names
    texts = [store.storage.read(name).to_pybytes() for name in names]
    for text in texts:
        body = text[:-46]
        assert text[-46:] == b',"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'
    answer, request = ({**json.loads(text), "digest": ""} for text in texts)
    assert answer == {
        "format": "stateformat-answer",
        "version": 1,
        "request": asked.id,
        "outcome": "failed",
        "message": "the disk is full",
        "digest": "",
    }
    assert request == {
        "format": "stateformat-request",
        "version": 1,
        "request": asked.id,
        "kind": "stop",
        "mode": "no_drain",
        "newest": 2,
        "savepoint": "s3://bucket/safe",
        "created_at_us": asked.created_at_us,
        "digest": "",
    }


@pytest.mark.parametrize("kind", ["stop", "savepoint", "rescale"])
def test_a_request_says_when_whoever_asks_has_given_up(store: CheckpointStore, kind: str) -> None:
    more = {"stop": [StopMode.DRAIN], "rescale": [3], "savepoint": []}[kind]
    ask = getattr(store, f"request_{kind}")
    waits, expires = ask(*more), ask(*more, timeout_us=5_000_000)
    assert waits.expires_at_us is None
    assert expires.expires_at_us == expires.created_at_us + 5_000_000
    assert {request.id: request for request in store.requests()} == {waits.id: waits, expires.id: expires}
    assert b"expires_at_us" not in store.storage.read(waits.path).to_pybytes()


def test_requests_come_in_the_order_of_the_checkpoints_that_they_were_made_at(store: CheckpointStore) -> None:
    made = [JobRequest(RequestKind.STOP, f"{99 - newest:032x}", newest, mode=StopMode.DRAIN) for newest in (0, 2, 10)]
    for request in reversed(made):
        put(store, layout.request_path(request.newest, request.id), encode_request(request))
    assert store.requests() == made


def test_looking_where_nobody_asks_is_one_listing(store: CheckpointStore) -> None:
    before = store.stats.copy()
    assert store.requests() == []
    assert {name: counts.calls for name, counts in store.stats.since(before).operations.items() if counts.calls} == {
        "list": 1
    }


def test_a_request_counts_for_runs_of_its_time_and_older_ones() -> None:
    request = JobRequest(RequestKind.STOP, ID, newest=5, mode=StopMode.DRAIN)
    assert [restored_from for restored_from in range(9) if counts_for(request, restored_from)] == [0, 1, 2, 3, 4, 5]
    first = JobRequest(RequestKind.STOP, ID, newest=0, mode=StopMode.DRAIN)
    assert counts_for(first, 0)
    assert not counts_for(first, 1)


def test_a_job_that_was_stopped_and_started_again_is_not_stopped_by_what_nobody_removed(store: CheckpointStore) -> None:
    permit = store.start("counts")
    asked = store.request_stop(StopMode.NO_DRAIN)
    stopped = stores.counts_job().publish(store, permit)
    again = store.start("counts")
    assert again is not None
    assert again.ref == stopped.ref
    assert permit is not None
    assert [counts_for(asked, held.ref.checkpoint_id) for held in (permit, again)] == [True, False]


def test_the_first_answer_stays(store: CheckpointStore) -> None:
    asked = store.request_stop(StopMode.DRAIN)
    assert store.answer_request(RequestAnswer(asked.id, RequestOutcome.STOPPED, "first", 3))
    assert not store.answer_request(RequestAnswer(asked.id, RequestOutcome.FAILED, "second"))
    assert store.request_answer(asked.id) == RequestAnswer(asked.id, RequestOutcome.STOPPED, "first", 3)


def test_a_request_that_was_taken_back_gets_no_answer(store: CheckpointStore) -> None:
    asked, other = store.request_stop(StopMode.DRAIN), store.request_stop(StopMode.NO_DRAIN)
    store.withdraw_request(asked.id)
    assert not store.answer_request(RequestAnswer(asked.id, RequestOutcome.STOPPED, "", 3))
    assert store.requests() == [other]
    assert len(objects(store)) == 1


def test_a_removal_that_stops_half_way_leaves_nothing_to_obey(store: CheckpointStore, monkeypatch: Any) -> None:
    asked = store.request_stop(StopMode.DRAIN)
    store.answer_request(RequestAnswer(asked.id, RequestOutcome.FAILED, "no"))
    deleted: list[str] = []
    inner = store.storage._inner  # type: ignore[attr-defined]
    delete = type(inner).delete

    def once(self: Any, paths: Any) -> None:
        if deleted:
            raise StorageError("the storage is gone")
        deleted.extend(paths)
        delete(self, paths)

    monkeypatch.setattr(type(inner), "delete", once)
    refused(StorageError, lambda: store.withdraw_request(asked.id))
    assert deleted == [layout.request_path(2, asked.id)]
    assert store.requests() == []


def test_there_is_nobody_to_ask_where_there_is_no_store(tmp_path: Path) -> None:
    store = CheckpointStore(LocalStorage(tmp_path / "nowhere"))
    with pytest.raises(NotFound, match="no store at") as found:
        store.request_stop(StopMode.DRAIN)
    assert found.value.kind is ErrorKind.STORE_NOT_FOUND
    assert not (tmp_path / "nowhere").exists()
    assert store.requests() == []


def test_a_job_may_be_asked_before_its_first_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(LocalStorage(tmp_path, durable=False))
    asked = store.request_stop(StopMode.DRAIN)
    assert asked.newest == 0
    assert store.requests() == [asked]


@pytest.mark.parametrize("savepoint", ["", "x" * 4097, "half \ud800"])
def test_a_savepoint_that_no_request_can_name_is_refused_before_anything_is_written(
    store: CheckpointStore, savepoint: str
) -> None:
    refused(InvalidInput, lambda: store.request_stop(StopMode.DRAIN, savepoint))
    assert objects(store) == []


def test_a_relative_path_is_that_of_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store").mkdir()
    store = CheckpointStore(LocalStorage(tmp_path / "store", durable=False))
    assert store.request_savepoint("mine/first").savepoint == f"{tmp_path}/mine/first"
    assert store.request_stop(StopMode.DRAIN, Path("second")).savepoint == f"{tmp_path}/second"
    assert store.request_savepoint(f"file://{tmp_path}/third").savepoint == f"file://{tmp_path}/third"


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("memory://x", "lies in the memory of one process"),
        ("{}", "lies in the store"),
        ("{}/", "lies in the store"),
        ("{}/backup", "lies in the store"),
        ("{}/savepoints", "lies in the store"),
        ("{}/segments/x", "lies in segments/"),
        ("{}/savepoints/../requests/x", "lies in requests/"),
    ],
)
def test_a_savepoint_where_none_can_be_is_refused_before_anything_is_asked(
    tmp_path: Path, place: str, told: str
) -> None:
    (tmp_path / "store").mkdir()
    store = CheckpointStore(LocalStorage(tmp_path / "store", durable=False))
    for text in (place.format(tmp_path / "store"), place.format(f"file://{tmp_path}/store")):
        refused(InvalidInput, lambda text=text: store.request_savepoint(text), told)
    assert objects(store) == []
    assert store.request_savepoint(tmp_path / "store" / "savepoints" / "mine").savepoint


def test_requests_are_no_part_of_checkpoints_copies_and_retention(store: CheckpointStore, tmp_path: Path) -> None:
    asked = store.request_stop(StopMode.DRAIN)
    copy = CheckpointStore(LocalStorage(tmp_path / "copy", durable=False))
    store.copy(store.open(), copy)
    assert copy.requests() == []
    store.expire(1)
    assert store.requests() == [asked]
    assert [record.checkpoint_id for record in store.history()] == [2]


# ---- savepoints ----------------------------------------------------------------------------------


def test_a_savepoint_lies_below_the_store_and_is_no_part_of_it(store: CheckpointStore) -> None:
    from stateformat.store import open as open_store

    before = [item for folder in ("checkpoints/", "manifests/", "segments/") for item in store.storage.list(folder)]
    request = JobRequest(RequestKind.STOP, ID, 2, mode=StopMode.DRAIN)
    url = request.savepoint_at(store.url, 2)
    assert url == f"{store.url}/savepoints/2-01234567"
    savepoint = open_store(url)
    store.copy(store.open(), savepoint)
    assert [record.kind for record in savepoint.history()] == ["savepoint"]
    after = [item for folder in ("checkpoints/", "manifests/", "segments/") for item in store.storage.list(folder)]
    assert after == before
    assert store.storage.list("") == before
    store.expire(1)
    assert savepoint.open().read("counter", "counts").table().num_rows == 20


def test_where_savepoints_go() -> None:
    assert default_savepoint("s3://bucket", 7, ID) == "s3://bucket/savepoints/7-01234567"
    assert default_savepoint("memory://a/b", 7, "") == "memory://a/b/savepoints/7"
    assert layout.savepoint_url("file:///", "x") == "file:///savepoints/x"
    assert (
        JobRequest(RequestKind.STOP, ID, 1, "memory://else", mode=StopMode.DRAIN).savepoint_at("memory://a", 7)
        == "memory://else"
    )


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a b", "ä", "x" * 201])
def test_a_savepoint_has_a_name_that_leads_nowhere_else(name: str) -> None:
    refused(InvalidInput, lambda: layout.savepoint_url("memory://a", name), "no name of a savepoint")


@pytest.mark.s3
def test_requests_work_on_s3_and_savepoints_below_a_store_are_no_part_of_it(moto: S3Server) -> None:
    from stateformat.store import open as open_store

    def opened(url: str) -> CheckpointStore:
        return open_store(url, **moto.options())

    store = opened(f"s3://{BUCKET}/{uuid4().hex}")
    refused(NotFound, lambda: store.request_stop(StopMode.DRAIN))
    permit = stores.counts_job().publish(store, None)
    asked = store.request_stop(StopMode.DRAIN)
    assert opened(store.url).requests() == [asked]
    store.copy(store.open(), opened(asked.savepoint_at(store.url, 1)))
    answer = RequestAnswer(asked.id, RequestOutcome.STOPPED, "", 1, asked.savepoint_at(store.url, 1))
    assert store.answer_request(answer)
    assert not store.answer_request(answer)
    assert store.request_answer(asked.id) == answer
    store.withdraw_request(asked.id)
    assert objects(store) == []
    assert [record.ref for record in store.history()] == [permit.ref]
    assert store.collect_garbage(delete=True).objects == ()
    assert opened(asked.savepoint_at(store.url, 1)).open().record.ref == permit.ref


# ---- what somebody else has written --------------------------------------------------------------


def sealed(members: dict[str, Any]) -> bytes:
    body = json.dumps(members, separators=(",", ":"))[:-1].encode()
    return body + f',"digest":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def plain(**changes: Any) -> dict[str, Any]:
    members = {
        "format": "stateformat-request",
        "version": 1,
        "request": ID,
        "kind": "stop",
        "mode": "drain",
        "newest": 2,
        "created_at_us": 5,
    }
    return {name: value for name, value in {**members, **changes}.items() if value is not ...}


DAMAGED = {
    "no JSON": b"stop, please",
    "empty object": b"{}\n",
    "no digest": json.dumps(plain()).encode(),
    "flipped": sealed(plain()).replace(b'"drain"', b'"drAin"'),
    "another request": sealed(plain(request="f" * 32)),
    "another newest": sealed(plain(newest=3)),
    "another kind": sealed(plain(kind="go")),
    "another mode": sealed(plain(mode="DRAIN")),
    "a mode that is no text": sealed(plain(mode=["drain"])),
    "no mode": sealed(plain(mode=...)),
    "newest below 0": sealed(plain(newest=-1)),
    "newest true": sealed(plain(newest=True)),
    "an empty savepoint": sealed(plain(savepoint="")),
    "a long savepoint": sealed(plain(savepoint="x" * 4097)),
    "null": sealed(plain(savepoint=None)),
    "null in what is unknown": sealed(plain(more=[None])),
    "a fraction": sealed(plain(more=1.5)),
    "twice": sealed(plain()).replace(b'"version":1', b'"version":1,"version":1'),
    "deep": b"[" * 5000,
    "a checkpoint's format": sealed(plain(format="stateformat")),
    "version 2": sealed({"format": "stateformat-request", "version": 2}),
    "version of a million digits": b'{"format":"stateformat-request","version":' + b"9" * 60_000 + b"}",
}


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _unreadable(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "directory": Path.mkdir,
    "directory with a pipe": lambda path: (path.mkdir(), os.mkfifo(path / "pipe")),
    "link to itself": lambda path: path.symlink_to(path),
    "link to a file that can be read": lambda path: path.symlink_to("/etc/passwd"),
    "link to a directory": lambda path: path.symlink_to("/"),
    "a terabyte": _huge,
    "unreadable": _unreadable,
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("name", [f"{2:020d}-stop-{ID}.json", f"{2:020d}-answer-{'f' * 32}.json", ".tmp-x", "zz"])
def test_whatever_lies_among_the_requests_stops_no_stop(
    tmp_path: Path, what: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(stores.counts_store(str(tmp_path), checkpoints=2).storage)
    (tmp_path / "requests").mkdir()
    ODD[what](tmp_path / "requests" / name)
    for _ in range(2):
        assert store.requests() == []
    asked = store.request_stop(StopMode.DRAIN)
    assert store.requests() == [asked]
    assert store.answer_request(RequestAnswer(asked.id, RequestOutcome.STOPPED, "", 3))
    found = store.request_answer(asked.id)
    assert found is not None
    assert found.outcome is RequestOutcome.STOPPED
    store.withdraw_request(asked.id)
    store.collect_garbage(delete=True)
    assert os.path.lexists(tmp_path / "requests" / name)
    told = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) <= 1
    if "pipe" in what or "link" in what:
        assert name in told[0].getMessage()


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_damaged_is_left_alone_and_told_once(
    store: CheckpointStore, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = layout.request_path(2, ID)
    put(store, path, DAMAGED[name])
    good = store.request_stop(StopMode.DRAIN)
    for _ in range(3):
        assert store.requests() == [good]
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert path in told[0]
    assert "is ignored" in told[0]
    assert path in objects(store)


def test_a_newer_version_says_to_upgrade(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    put(store, layout.request_path(2, ID), DAMAGED["version 2"])
    assert store.requests() == []
    assert "is of format version 2; this reader knows 1. Upgrade stateformat" in caplog.text
    refused(UnsupportedFormat, lambda: decode_request(DAMAGED["version 2"], 2, ID))


def test_members_of_nobody_s_list_are_ignored() -> None:
    found = decode_request(sealed(plain(command="rm", savepoint="memory://x", later={"a": [1]})), 2, ID)
    assert found == JobRequest(RequestKind.STOP, ID, 2, "memory://x", 5, mode=StopMode.DRAIN)


@pytest.mark.parametrize(
    "name", ["stop", "notes.txt", "sub/dir.json", f"{2:020d}-start-{ID}.json", f"2-stop-{ID}.json"]
)
def test_other_names_are_no_requests(store: CheckpointStore, name: str, caplog: pytest.LogCaptureFixture) -> None:
    put(store, f"requests/{name}", sealed(plain()))
    assert store.requests() == []
    assert "is ignored" in caplog.text
    assert not store.answer_request(RequestAnswer(ID, RequestOutcome.FAILED))


def test_a_request_of_gigabytes_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = stores.counts_store(str(tmp_path))
    (tmp_path / "requests").mkdir()
    with (tmp_path / layout.request_path(1, ID)).open("wb") as file:
        file.truncate(6 << 30)
    (tmp_path / layout.request_path(1, "a" * 32)).write_bytes(b"x" * (BYTES_MAX + 1))
    reads = store.stats["read_range"].calls
    assert store.requests() == []
    assert caplog.text.count("more than 65,535") == 2
    assert store.stats["read_range"].calls == reads


def test_of_very_many_requests_the_first_hundred_are_read(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(103):
        put(
            store,
            layout.request_path(2, f"{number:032x}"),
            encode_request(JobRequest(RequestKind.STOP, f"{number:032x}", 2, mode=StopMode.DRAIN)),
        )
    assert [int(request.id, 16) for request in store.requests()] == list(range(100))
    assert "holds 103 requests" in caplog.text


def test_an_answer_that_cannot_be_read_is_none(store: CheckpointStore, caplog: pytest.LogCaptureFixture) -> None:
    asked = store.request_stop(StopMode.DRAIN)
    answer = {"format": "stateformat-answer", "version": 1, "request": asked.id, "outcome": "perhaps", "message": ""}
    put(store, layout.answer_path(2, asked.id), sealed(answer))
    assert store.request_answer(asked.id) is None
    assert "not one of stopped, failed" in caplog.text
    assert store.requests() == [], "it has been dealt with, however"


def test_the_specification_lists_the_members_and_words_of_the_code() -> None:
    text = (Path(layout.__file__).parent / "SPEC.md").read_text()
    section = text[text.index("### 2.4") : text.index("## 3. Record")]
    rows = {line.split("|")[1].strip(" `"): line for line in section.splitlines() if line.startswith("| `")}
    assert re.findall(r"`(\w+)`", rows["outcome"])[1:] == list(RequestOutcome)
    assert re.findall(r"`(\w+)`", rows["mode"])[1:] == list(StopMode)
    request = encode_request(JobRequest(RequestKind.STOP, ID, 2, "memory://x", 5, 6, mode=StopMode.DRAIN))
    answer = encode_answer(RequestAnswer(ID, RequestOutcome.STOPPED, "", 2, "memory://x"))
    rescale = encode_request(JobRequest(RequestKind.RESCALE, ID, 2, parallelism=3, operators={"counts": 4}))
    told = {*re.findall(r"(?m)^\| `(\w+)`", section), "version", "digest"}
    assert {*json.loads(request), *json.loads(rescale), *json.loads(answer)} == told
    assert re.findall(r"(?m)^- `(\w+)`: ", section) == list(RequestKind)


def test_each_kind_is_asked_listed_and_answered_by_its_name(store: CheckpointStore) -> None:
    asked: list[JobRequest] = [
        store.request_savepoint("s3://bucket/there"),
        store.request_rescale(8, {"counts": 4}, "s3://bucket/there"),
        store.request_rescale(operators={"counts": 2}),
        store.request_stop(StopMode.DRAIN),
    ]
    names = [f"requests/{2:020d}-{what}.json" for what in (f"{one.kind}-{one.id}" for one in asked)]
    assert [one.path for one in asked] == names
    assert objects(store) == sorted(names)
    assert sorted(store.requests(), key=lambda one: one.path) == sorted(asked, key=lambda one: one.path)
    for one, outcome in zip(asked, RequestOutcome, strict=False):
        answer = RequestAnswer(one.id, outcome, "done", 3)
        assert store.answer_request(answer)
        assert store.request_answer(one.id) == answer
        store.withdraw_request(one.id)
    assert objects(store) == []


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (JobRequest(RequestKind.SAVEPOINT, ID, 2, "memory://x", 5), {"kind": "savepoint", "savepoint": "memory://x"}),
        (JobRequest(RequestKind.RESCALE, ID, 2, None, 5, parallelism=8), {"kind": "rescale", "parallelism": 8}),
        (
            JobRequest(RequestKind.RESCALE, ID, 2, None, 5, operators={"a": 1}),
            {"kind": "rescale", "operators": {"a": 1}},
        ),
    ],
)
def test_the_other_kinds_say_what_they_want_and_nothing_else(request_: JobRequest, said: dict[str, Any]) -> None:
    told = json.loads(encode_request(request_))
    common = {"format": "stateformat-request", "version": 1, "request": ID, "newest": 2, "created_at_us": 5}
    assert {name: value for name, value in told.items() if name != "digest"} == {**common, **said}
    assert decode_request(encode_request(request_), 2, ID, request_.kind) == request_


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"parallelism": 0},
        {"parallelism": 32_769},
        {"parallelism": "8"},
        {"operators": {}},
        {"operators": {"a": 0}},
        {"operators": {"a": True}},
        {"operators": [1]},
        {"parallelism": 8, "later": None},
    ],
)
def test_a_rescale_that_says_nothing_or_nonsense_is_refused(members: dict[str, Any]) -> None:
    with pytest.raises(RecordFault):
        decode_request(sealed(plain(kind="rescale", mode=..., **members)), 2, ID, "rescale")


def test_a_name_of_one_kind_does_not_hold_another() -> None:
    refused(RecordFault, lambda: decode_request(sealed(plain()), 2, ID, "savepoint"), "is 'stop', not 'savepoint'")


def test_a_rescale_to_nowhere_is_refused_before_anything_is_written(store: CheckpointStore) -> None:
    for wanted in ({}, {"parallelism": 0}, {"operators": {"a": 40_000}}):
        refused(InvalidInput, lambda wanted=wanted: store.request_rescale(**wanted), "cannot be written")
    assert objects(store) == []


def test_a_savepoint_is_asked_of_every_run_and_a_rescale_only_of_those_of_its_time() -> None:
    assert counts_for(JobRequest(RequestKind.SAVEPOINT, ID, 2), 9)
    assert not counts_for(JobRequest(RequestKind.RESCALE, ID, 2, parallelism=3), 3)


def test_what_leaves_the_most_open_goes_first() -> None:
    asked: list[JobRequest] = [
        JobRequest(RequestKind.RESCALE, "3" * 32, 2, created_at_us=1, parallelism=2),
        JobRequest(RequestKind.STOP, "2" * 32, 2, created_at_us=7, mode=StopMode.DRAIN),
        JobRequest(RequestKind.STOP, "1" * 32, 2, created_at_us=8, mode=StopMode.NO_DRAIN),
        JobRequest(RequestKind.SAVEPOINT, "4" * 32, 2, created_at_us=9),
    ]
    assert sorted(asked, key=asking_order) == asked[::-1]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
ids = st.integers(0, 2**128 - 1).map(lambda number: f"{number:032x}")


@settings(max_examples=100, deadline=None)
@given(ids, st.sampled_from(StopMode), st.integers(0, 2**53 - 1), st.none() | texts.filter(bool))
def test_requests_read_back_as_they_were(request_id: str, mode: StopMode, newest: int, savepoint: str | None) -> None:
    request = JobRequest(RequestKind.STOP, request_id, newest, savepoint, created_at_us=newest, mode=mode)
    assert decode_request(encode_request(request), newest, request_id) == request


@settings(max_examples=100, deadline=None)
@given(
    ids, st.sampled_from(RequestOutcome), texts, st.none() | st.integers(1, 2**53 - 1), st.none() | texts.filter(bool)
)
def test_answers_read_back_as_they_were(
    request_id: str, outcome: RequestOutcome, message: str, checkpoint_id: int | None, savepoint: str | None
) -> None:
    answer = RequestAnswer(request_id, outcome, message, checkpoint_id, savepoint)
    assert decode_answer(encode_answer(answer), request_id) == answer


def test_a_long_or_broken_message_is_cut_and_spelled_out() -> None:
    found = decode_answer(encode_answer(RequestAnswer(ID, RequestOutcome.FAILED, "half \ud800 " + "x" * 5000)), ID)
    assert len(found.message) == 2000
    assert found.message.startswith("half \\ud800 xxx")
    assert found.message.endswith("x…")


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_every_flipped_byte_is_noticed(place: int, mask: int) -> None:
    data = bytearray(encode_request(JobRequest(RequestKind.STOP, ID, 2, "memory://x", 5, mode=StopMode.DRAIN)))
    data[place % len(data)] ^= mask
    with pytest.raises((RecordFault, UnsupportedFormat)):
        decode_request(bytes(data), 2, ID)


# ---- a storage that fails ------------------------------------------------------------------------


class Faulty(MemoryStorage):
    """A memory storage whose creates under ``requests/`` go as the script says: what is done, and
    what is told.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.script: list[tuple[bool, CreateOutcome | StorageError]] = []

    def create(self, path: str, data: bytes) -> CreateOutcome:
        if not path.startswith("requests/") or not self.script:
            return super().create(path, data)
        done, told = self.script.pop(0)
        if done:
            super().create(path, data)
        if isinstance(told, StorageError):
            raise told
        return told


@pytest.fixture
def faulty() -> Iterator[tuple[CheckpointStore, Faulty, list[float]]]:
    name = f"faulty-{uuid4().hex}"
    stores.counts_store(f"memory://{name}")
    storage, slept = Faulty(name), list[float]()
    yield CheckpointStore(storage, sleep=slept.append), storage, slept
    MemoryStorage.reset(name)


LOST = StorageError("no answer")
GONE = StorageError("gc took it", removed=True)


@pytest.mark.parametrize(
    ("script", "pauses"),
    [
        ([(True, CreateOutcome.UNKNOWN)], 0),
        ([(True, CreateOutcome.CONFLICT)], 0),
        ([(False, CreateOutcome.UNKNOWN)], 1),
        ([(False, LOST), (True, LOST)], 2),
        ([(False, GONE), (False, GONE), (False, GONE), (False, GONE)], 4),
    ],
)
def test_an_answer_that_is_lost_is_asked_for_again(
    faulty: tuple[CheckpointStore, Faulty, list[float]], script: list[Any], pauses: int
) -> None:
    store, storage, slept = faulty
    storage.script = list(script)
    asked = store.request_stop(StopMode.DRAIN)
    assert store.requests() == [asked]
    assert len(slept) == pauses
    storage.script = list(script)
    assert store.answer_request(RequestAnswer(asked.id, RequestOutcome.FAILED, "no"))
    assert store.request_answer(asked.id) == RequestAnswer(asked.id, RequestOutcome.FAILED, "no")
    assert not storage.script


def test_a_request_of_which_nobody_knows_is_taken_back(faulty: tuple[CheckpointStore, Faulty, list[float]]) -> None:
    store, storage, slept = faulty
    storage.script = [(number == 4, LOST) for number in range(5)]
    refused(OutcomeUnknown, lambda: store.request_stop(StopMode.DRAIN), "no answer")
    assert len(slept) == 4
    assert objects(store) == []


def test_a_refusal_is_told_at_once(faulty: tuple[CheckpointStore, Faulty, list[float]]) -> None:
    store, storage, slept = faulty
    storage.script = [(False, StorageError("no right", kind=ErrorKind.STORAGE_REFUSED))]
    refused(StorageError, lambda: store.request_stop(StopMode.DRAIN), "no right")
    assert slept == []


def test_gc_removes_what_dead_writers_of_requests_left_behind(tmp_path: Path) -> None:
    store = stores.counts_store(str(tmp_path), checkpoints=2)
    paths = [
        layout.request_path(0, ID),
        layout.answer_path(1, ID),
        layout.request_path(2, ID),
        layout.answer_path(2, ID),
    ]
    outputs = [store.storage.open_output(path) for path in paths]
    found = store.collect_garbage(delete=True)
    assert [item.path for item in found.leftovers] == paths[:2]
    assert [item.path for item in found.unfinished] == sorted(paths[2:])
    for output in outputs:
        output.abort()


def test_who_wrote_while_gc_took_it_writes_it_again(tmp_path: Path) -> None:
    class Busy(LocalStorage):
        """Another run publishes and collects garbage while an answer is being written, once."""

        def create(self, path: str, data: bytes) -> CreateOutcome:
            if "-answer-" in path and not self.taken:
                self.taken = True
                with self.open_output(path) as output:
                    output.write(data)
                    assert len(CheckpointStore(LocalStorage(tmp_path)).collect_garbage(delete=True).leftovers) == 1
            return super().create(path, data)

        taken = False

    store = stores.counts_store(str(tmp_path))
    asked = store.request_stop(StopMode.DRAIN)
    stores.counts_job().publish(store, store.start("counts"))
    answer = RequestAnswer(asked.id, RequestOutcome.MISSED, "too late")
    assert CheckpointStore(Busy(tmp_path), sleep=lambda seconds: None).answer_request(answer)
    assert store.request_answer(asked.id) == answer


def test_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        JobRequest(RequestKind.STOP, ID, 1, mode=StopMode.DRAIN).newest = 2  # type: ignore[misc]


@pytest.mark.parametrize("kind", RequestKind)
def test_the_classes_of_the_last_release_make_requests_and_warn(kind: RequestKind) -> None:
    import stateformat.requests as door

    name = f"{kind.value.capitalize()}Request"
    with pytest.warns(
        DeprecationWarning, match=rf"requests\.{name} leaves in 0\.3: write JobRequest\(RequestKind\.{kind.name}, "
    ):
        made = getattr(door, name)("0" * 32, 7, "file:///elsewhere", 1)
    assert {made} == {JobRequest(kind, "0" * 32, 7, "file:///elsewhere", 1)}
    with pytest.raises(AttributeError, match="no attribute 'PauseRequest'"):
        _ = door.PauseRequest  # type: ignore[attr-defined]


STOP = Stop(StopMode.NO_DRAIN, 32 * "a")
WANTED = WantedParallelism(4, {"counts": 2})


@pytest.fixture
def counts() -> CheckpointStore:
    MemoryStorage.reset("rescale-requests")
    return stores.counts_store("memory://rescale-requests")


@pytest.fixture
def record(counts: CheckpointStore) -> Record:
    """A record of a stop for a rescale."""
    return replace(counts.open().record, stop=STOP, properties={RESCALE_PROPERTY: WANTED.encode()})


@pytest.mark.parametrize("wanted", [WANTED, WantedParallelism(4), WantedParallelism(None, {"a b": 1, "c": 32768})])
def test_what_is_written_is_read_back(wanted: WantedParallelism) -> None:
    assert WantedParallelism.decode(wanted.encode()) == wanted


REFUSED = [
    "",
    "[]",
    "4",
    "{",
    '{"parallelism":0}',
    '{"parallelism":true}',
    '{"parallelism":32769}',
    '{"operators":[1]}',
]
REFUSED += ['{"parallelism":"4"}', '{"operators":{"a":null}}', '{"operators":{"a":1.5}}', 40_000 * "["]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:30])
def test_what_no_run_has_written_makes_an_ordinary_stop(record: Record, text: str) -> None:
    odd = replace(record, properties={RESCALE_PROPERTY: text})
    assert rescale_of(odd) is None
    assert lasting_stop(odd) == STOP


def test_a_job_goes_on_only_from_the_stop_itself(record: Record) -> None:
    assert (rescale_of(record), lasting_stop(record)) == (WANTED, None)
    for kind in set(CheckpointKind) - {CheckpointKind.CHECKPOINT}:
        assert rescale_of(replace(record, kind=kind)) is None
    drained = Stop(StopMode.DRAIN, STOP.request)
    assert lasting_stop(replace(record, stop=drained)) == drained
    assert rescale_of(replace(record, stop=None)) is None
    assert lasting_stop(replace(record, properties={})) == STOP


def test_operators_that_have_finished_have_no_part_in_it(record: Record) -> None:
    graph = record.graph
    first = graph.operators[0]
    finished = graph.with_operators({first.uid: replace(first, finished=SubtaskSet.of(range(first.parallelism)))})
    assert set(WantedParallelism(7).of(graph).values()) == {7}
    assert WantedParallelism(7).of(finished).keys() == {one.uid for one in graph.operators} - {first.uid}
    kept = WantedParallelism(None, {first.uid: 9}).of(graph)
    assert kept == {one.uid: 9 if one.uid == first.uid else one.parallelism for one in graph.operators}


def test_it_is_told_in_few_words() -> None:
    assert WantedParallelism(4, {"x\n": 1}).describe() == "parallelism 4, 'x\\\\n' at 1"
    many = WantedParallelism(None, {f"op{number}": 1 for number in range(9)}).describe()
    assert many.endswith("'op4' at 1, 4 more")


def test_a_run_may_name_the_property_and_nobody_another_reserved_one(counts: CheckpointStore) -> None:
    job = stores.counts_job()
    permit = job.publish(counts, counts.start("counts"), stop=STOP, properties={RESCALE_PROPERTY: WANTED.encode()})
    assert rescale_of(permit.record) == WANTED
    with pytest.raises(InvalidInput, match="keeps for itself"):
        job.publish(counts, permit, properties={"stateformat.other": "x"})
