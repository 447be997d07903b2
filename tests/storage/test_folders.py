"""Folders that are no stores of ours: files of any name, read as they are, on every storage."""

from __future__ import annotations

import pickle
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from stateformat.errors import ErrorKind, InvalidInput
from stateformat.storage import Storage, folder_of, instrumented, open_storage
from tests.servers.server import BUCKET, S3Server

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
    found = folder_of(storage)
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
    folder = folder_of(local(tmp_path / "folder"))
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
    folder = folder_of(storage)
    assert folder is not None
    folder.read("_metadata")
    assert storage.stats.operations["read"].calls == 1


def test_a_storage_of_objects_only_has_no_folder() -> None:
    assert folder_of(open_storage(f"memory://{uuid.uuid4().hex}")) is None
