"""Copies by links on a local disk, and the folders of a store."""

from __future__ import annotations

import errno
import os
import pickle
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stateformat as sf
from stateformat.backends.storage import LocalStorage, object_clients, s3
from stateformat.backends.storage.testing.objects import SEGMENT, paths, put
from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, StorageError
from stateformat.pins import pin
from stateformat.publication import CopyProgress
from stateformat.storage import Link, Storage, instrumented, open_storage
from stateformat.store import CheckpointStore
from tests.servers.server import BUCKET, S3Server
from tests.storage.linking import a_large_object_is_copied_in_parts, counted_store, pinned_by_the_server

# A directory


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return counted_store(str(tmp_path / "store"))


def segments(folder: Path) -> dict[str, os.stat_result]:
    return {str(path.relative_to(folder)): path.stat() for path in sorted((folder / "segments").rglob("*.parquet"))}


def test_a_pin_takes_no_room_on_the_same_disk(store: CheckpointStore, tmp_path: Path) -> None:
    told: list[CopyProgress] = []
    store.pin(2, "p", progress=told.append)
    mine, theirs = segments(tmp_path / "store"), segments(tmp_path / "store/savepoints/p")
    assert theirs
    assert all(os.path.samestat(mine[path], status) for path, status in theirs.items())
    assert told[-1].bytes_shared == told[-1].bytes_total == sum(status.st_size for status in theirs.values())
    assert store.stats["link_from"].objects == len(theirs) + 1
    assert sf.validate(sf.open(f"{store.url}@p").storage, level="full").ok
    store.expire(1)
    assert sf.validate(sf.open(f"{store.url}@p").storage, level="full").ok
    store.unpin("p")
    assert sf.validate(store.storage, level="full").ok


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP], ids=os.strerror)
def test_where_no_link_can_be_made_the_bytes_are_copied(
    number: int, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def refuse(source: str, *given: Any, **more: Any) -> None:
        # A new file gets its name by a link in its own directory.
        if more["src_dir_fd"] != more["dst_dir_fd"]:
            raise OSError(number, os.strerror(number))
        link(source, *given, **more)

    monkeypatch.setattr(os, "link", refuse)
    told: list[CopyProgress] = []
    store.pin(2, "p", progress=told.append)
    assert (told[-1].bytes_shared, told[-1].bytes_done) == (0, told[-1].bytes_total)
    mine, theirs = segments(tmp_path / "store"), segments(tmp_path / "store/savepoints/p")
    assert not any(os.path.samestat(mine[path], status) for path, status in theirs.items())
    assert sf.validate(sf.open(f"{store.url}@p").storage, level="full").ok


@pytest.mark.parametrize("harm", ["one bit", "shorter", "longer"])
def test_what_is_linked_is_verified_and_taken_back(harm: str, store: CheckpointStore, tmp_path: Path) -> None:
    path = next(iter((tmp_path / "store/segments").rglob("*.parquet")))
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes({"one bit": bytes(body), "shorter": bytes(body[:-1]), "longer": bytes(body) + b"x"}[harm])
    owner = int(path.parent.name)
    with pytest.raises(DamagedCheckpoint, match="It was not copied"):
        store.pin(owner, "p")
    assert store.pins() == []
    assert str(path.relative_to(tmp_path / "store")) not in paths(store.storage.savepoint("p"), "segments/")  # type: ignore[attr-defined]


def test_a_file_that_another_process_removes_while_it_is_linked_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")
    put(source, SEGMENT, b"x")
    link = os.link

    def late(*args: Any, **options: Any) -> None:
        source.delete([SEGMENT])
        link(*args, **options)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(FileNotFoundError, match=r"a-0001\.parquet"):
        target.link_from(source, SEGMENT, 1)
    assert paths(target, "") == []


def test_a_link_of_another_name_a_link_in_the_way_and_a_taken_name_are_told(tmp_path: Path) -> None:
    source, target = LocalStorage(tmp_path / "a"), LocalStorage(tmp_path / "b")
    put(source, SEGMENT, b"x")
    put(target, SEGMENT, b"y")
    with pytest.raises(StorageError, match=r"a-0001\.parquet"):
        target.link_from(source, SEGMENT, 1)
    assert target.read(SEGMENT).to_pybytes() == b"y"
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    planted = tmp_path / "a" / "segments/1/planted"
    planted.parent.mkdir(parents=True)
    planted.symlink_to(outside)
    with pytest.raises(StorageError, match="is a symbolic link"):
        target.link_from(source, "segments/1/planted", 6)
    assert paths(target, "") == [SEGMENT]


def test_a_link_is_durable_before_anything_relies_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = counted_store(str(tmp_path / "store"))
    done: list[str] = []
    link, sync = os.link, os.fsync

    def place_of(descriptor: int) -> Path:
        return Path(f"/proc/self/fd/{descriptor}").readlink()

    def linked(name: str, other: str, **more: Any) -> None:
        done.append(f"link {place_of(more['dst_dir_fd'])}/{other}")
        link(name, other, **more)

    def synced(descriptor: int) -> None:
        done.append(f"sync {place_of(descriptor)}")
        sync(descriptor)

    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(os, "fsync", synced)
    source.pin(2, "p")
    (record,) = (step for step in done if step.startswith("link") and "/checkpoints/" in step)
    before = done[: done.index(record)]
    places = {step.removeprefix("link ").rpartition("/")[0] for step in before if step.startswith("link")}
    assert len(places) >= 2
    for place in places:
        last = max(i for i, step in enumerate(before) if step.startswith(f"link {place}/"))
        assert f"sync {place}" in before[last:], place


def test_two_storages_of_different_kinds_copy(store: CheckpointStore) -> None:
    memory = open_storage(f"memory://{uuid.uuid4().hex}")
    path = paths(store.storage, "segments/")[0]
    assert memory.link_from(store.storage, path, 1) is None
    assert store.storage.link_from(memory, path, 1) is None
    assert pin(store.open(2), "p").made
    target = sf.open(memory.url)
    assert store.copy(store.open(2), target).checkpoint_id == 2


# A server


@pytest.mark.s3
def test_a_pin_is_copied_by_the_server_and_no_byte_passes_here(moto: S3Server) -> None:
    pinned_by_the_server(moto)


@pytest.mark.s3
def test_a_large_object_is_copied_by_the_server_in_parts(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    a_large_object_is_copied_in_parts(moto, monkeypatch)


@pytest.fixture
def remote(moto: S3Server) -> CheckpointStore:
    return counted_store(f"s3://{BUCKET}/{uuid.uuid4().hex}/store", **moto.options())


@pytest.mark.s3
def test_a_server_that_copies_nothing_gets_the_bytes(
    remote: CheckpointStore, monkeypatch: pytest.MonkeyPatch, moto: S3Server
) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr("obstore.copy", refuse)
    monkeypatch.setattr(object_clients, "_PAUSE_SECONDS", 0.0)
    told: list[CopyProgress] = []
    remote.pin(2, "p", progress=told.append)
    assert (told[-1].bytes_by_server, told[-1].bytes_done) == (0, told[-1].bytes_total)
    assert sf.validate(sf.open(f"{remote.url}@p", **moto.options()).storage, level="full").ok


@pytest.mark.s3
def test_what_the_server_has_copied_is_held_against_its_size_and_taken_back(
    remote: CheckpointStore, moto: S3Server
) -> None:
    path = paths(remote.storage, "segments/")[0]
    key = f"{remote.url.removeprefix(f's3://{BUCKET}/')}/{path}"
    body = moto.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    moto.client.put_object(Bucket=BUCKET, Key=key, Body=body[:-1])
    owner = int(path.split("/")[1])
    with pytest.raises(DamagedCheckpoint, match=f"has {len(body) - 1} bytes; its checkpoint says {len(body)}"):
        remote.pin(owner, "p")
    assert remote.pins() == []
    assert path not in paths(remote.storage.savepoint("p"), "segments/")  # type: ignore[attr-defined]
    moto.client.delete_object(Bucket=BUCKET, Key=key)
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        remote.pin(owner, "q")


@pytest.mark.s3
@pytest.mark.parametrize("other", ["endpoint", "credentials"])
def test_another_server_or_other_credentials_are_not_asked_to_copy(other: str, moto: S3Server) -> None:
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    first = open_storage(f"{url}/a", **moto.options())
    put(first, SEGMENT, b"x")
    changed = {"endpoint_url": moto.endpoint.replace("127.0.0.1", "localhost")} if other == "endpoint" else {"key": "x"}
    second: Storage = open_storage(f"{url}/b", **{**moto.options(), **changed})
    assert second.link_from(first, SEGMENT, 1) is None
    same = open_storage(f"{url}/b", **moto.options())
    assert same.link_from(first, SEGMENT, 1) is Link.COPIED
    assert s3.COPIED_AT_ONCE_BYTES <= 5 * 2**30


# ---- folders that are no stores of ours: files of any name, read as they are, on every storage

FILES = {"_metadata": b"m", "state/0/1/1.delta": b"delta", "state/0/1/.1.delta.crc": b"c", "offsets/0": b"v1\n"}


def local(tmp_path: Path) -> Storage:
    for path, data in FILES.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    return open_storage(tmp_path)


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return local(tmp_path)
    moto: S3Server = request.getfixturevalue("moto")
    prefix = f"folders/{uuid.uuid4().hex}"
    for path, data in FILES.items():
        moto.client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path}", Body=data)
    return open_storage(f"s3://{BUCKET}/{prefix}", **moto.options())


@pytest.fixture
def folder(storage: Storage) -> Storage:
    found = storage.folder()
    assert found is not None
    return found


def test_a_folder_lists_and_reads_files_of_any_name(folder: Storage) -> None:
    assert {item.path: item.size_bytes for item in folder.list("")} == {name: len(data) for name, data in FILES.items()}
    assert [item.path for item in folder.list("state/0/1/1")] == ["state/0/1/1.delta"]
    assert folder.list("nothing/") == []
    for path, data in FILES.items():
        assert folder.read(path).to_pybytes() == data
        assert folder.size(path) == len(data)
    assert folder.read_range("state/0/1/1.delta", 1, 3).to_pybytes() == b"elt"
    assert folder.open_input("_metadata").read() == b"m"
    with pytest.raises(FileNotFoundError):
        folder.read("state/0/1/2.delta")


def test_a_folder_is_picklable_and_reading_it_writes_nothing(folder: Storage) -> None:
    assert pickle.loads(pickle.dumps(folder)).list("") == folder.list("")
    assert len(folder.list("")) == len(FILES)


def test_a_folder_takes_new_files_of_any_name(folder: Storage) -> None:
    with folder.open_output("state/0/2/1.delta") as output:
        output.write(b"new")
    assert folder.read("state/0/2/1.delta").to_pybytes() == b"new"


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a//b", "a/./b", "", "a/", "a\0b"])
def test_no_path_leaves_the_folder(folder: Storage, path: str) -> None:
    calls: tuple[Callable[[str], object], ...] = (folder.read, folder.size, folder.open_input, folder.open_output)
    for call in calls:
        with pytest.raises(InvalidInput, match="leaves its folder") as caught:
            call(path)
        assert caught.value.kind is ErrorKind.INVALID_PATH


def test_links_in_a_local_folder_are_neither_listed_nor_followed(tmp_path: Path) -> None:
    folder = local(tmp_path / "folder").folder()
    assert folder is not None
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "folder/link").symlink_to(tmp_path / "secret")
    (tmp_path / "folder/links").symlink_to(tmp_path)
    assert len(folder.list("")) == len(FILES)
    for path in ("link", "links/secret"):
        with pytest.raises(Exception, match="symbolic link"):
            folder.read(path)


def test_what_a_folder_reads_is_counted(tmp_path: Path) -> None:
    storage = instrumented(local(tmp_path))
    folder = storage.folder()
    assert folder is not None
    folder.read("_metadata")
    assert storage.stats.operations["read"].calls == 1


def test_a_storage_of_objects_only_has_no_folder() -> None:
    assert open_storage(f"memory://{uuid.uuid4().hex}").folder() is None
