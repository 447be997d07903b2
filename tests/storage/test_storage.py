"""The memory and the local storage: the suite of every storage, and what only these two must do."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stateformat.backends.storage import local, local_tree as directory_tree, memory
from stateformat.backends.storage.local import LocalStorage
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.backends.storage.testing import StorageConformance
from stateformat.backends.storage.testing.objects import RECORD, SEGMENT, paths, put
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import REFUSALS, CreateOutcome, Storage, open_storage
from stateformat.store import CheckpointStore
from tests.stores import counts_job, counts_store


class TestMemoryStorage(StorageConformance):
    @pytest.fixture
    def storage(self) -> Iterator[Storage]:
        MemoryStorage.reset("conformance")
        yield MemoryStorage("conformance")
        MemoryStorage.reset("conformance")

    @pytest.fixture
    def unicode_url(self) -> Iterator[str]:
        yield "memory://prüfung eins"
        MemoryStorage.reset("prüfung eins")


class TestLocalStorage(StorageConformance):
    listing_rounds = 400

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "store")

    @pytest.fixture
    def unicode_url(self, tmp_path: Path) -> str:
        return str(tmp_path / "prüfung 100% eins#zwei?")


class TestLocalStorageWithoutSync(TestLocalStorage):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return LocalStorage(tmp_path / "store", durable=False)

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        return {"durable": False}


# Memory


def test_memory_stores_of_different_names_are_apart() -> None:
    one, other = MemoryStorage("apart/one"), MemoryStorage("apart/other")
    try:
        put(one, SEGMENT, b"x")
        assert one.exists()
        assert not other.exists()
        assert other.list("") == []
    finally:
        MemoryStorage.reset("apart/one")


def test_reset_forgets_a_memory_store() -> None:
    storage = MemoryStorage("forgotten")
    put(storage, SEGMENT, b"x")
    MemoryStorage.reset("forgotten")
    assert not storage.exists()
    with pytest.raises(FileNotFoundError):
        storage.read(SEGMENT)


def test_a_memory_store_needs_a_name() -> None:
    for url in ("memory://", "memory:///"):
        with pytest.raises(InvalidInput) as raised:
            open_storage(url)
        assert raised.value.kind is ErrorKind.INVALID_URL


def test_a_memory_store_does_not_travel_to_another_process() -> None:
    pickled = pickle.dumps(MemoryStorage("here"))
    code = f"import pickle; pickle.loads({pickled!r})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode != 0
    assert "memory://here lives in process" in child.stderr


@pytest.mark.parametrize("make", [lambda path: MemoryStorage(path), lambda path: LocalStorage(path)])
def test_an_output_never_overwrites_an_object(make: Any, tmp_path: Path) -> None:
    storage = make(str(tmp_path))
    put(storage, SEGMENT, b"first")
    with pytest.raises(StorageError, match="exists already"):
        put(storage, SEGMENT, b"second")
    assert storage.read(SEGMENT).to_pybytes() == b"first"
    assert storage.create(SEGMENT, b"third") is CreateOutcome.CONFLICT
    MemoryStorage.reset(str(tmp_path))


# Addresses of local stores


def test_paths_and_file_urls_name_the_same_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    urls = [
        f"{tmp_path}/a b",
        f"{tmp_path}/x/../a b/",
        "a b",
        "~/a b",
        f"file://{tmp_path}/a%20b",
        f"file://localhost{tmp_path}/a%20b",
        f"file:{tmp_path}/a%20b",
    ]
    assert {open_storage(url).url for url in urls} == {f"file://{tmp_path}/a%20b"}


def test_a_percent_sign_in_a_plain_path_is_a_percent_sign(tmp_path: Path) -> None:
    storage = open_storage(f"{tmp_path}/a%20b")
    put(storage, SEGMENT, b"x")
    assert (tmp_path / "a%20b" / SEGMENT).read_bytes() == b"x"
    assert storage.url == f"file://{tmp_path}/a%2520b"


@pytest.mark.parametrize("url", ["file://data/store", "file://", "file:///a%00b", "~no-such-user-here/x"])
def test_an_address_that_is_no_path_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_storage(url)
    assert raised.value.kind is ErrorKind.INVALID_URL


def test_durable_is_true_or_false() -> None:
    with pytest.raises(InvalidInput, match="'no'"):
        open_storage("/tmp/store", durable="no")


def test_a_pickled_local_storage_keeps_its_path_and_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("relative", durable=False)
    pickled = pickle.dumps(storage)
    monkeypatch.chdir("/")
    assert repr(pickle.loads(pickled)) == repr(storage) == f"LocalStorage('{tmp_path}/relative', durable=False)"


def test_a_local_store_exists_when_its_directory_does(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    assert not storage.exists()
    assert storage.list("") == []
    storage.delete([SEGMENT])
    assert not storage.exists()
    (tmp_path / "store").mkdir()
    assert storage.exists()


def test_a_file_in_the_place_of_a_store_is_told(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"")
    storage = LocalStorage(tmp_path / "store")
    for call in (storage.exists, lambda: storage.create(RECORD, b"x"), lambda: storage.open_output(SEGMENT)):
        with pytest.raises(StorageError, match="it is a file, and a store is a directory"):
            call()


# Links and other things that are no objects


def plant_link(store: Path, link: str, target: Path) -> None:
    (store / link).parent.mkdir(parents=True, exist_ok=True)
    (store / link).symlink_to(target)


@pytest.mark.parametrize("link", [SEGMENT, "segments/00000000000000000001", "segments"])
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_in_a_store_is_never_followed(tmp_path: Path, link: str, dangling: bool) -> None:
    outside = tmp_path / "outside"
    if not dangling:
        inside = outside / SEGMENT[len(link) + 1 :] if link != SEGMENT else outside
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.write_bytes(b"secret")
    storage = LocalStorage(tmp_path / "store")
    plant_link(tmp_path / "store", link, outside)
    calls: list[Any] = [
        lambda: storage.read(SEGMENT),
        lambda: storage.read_range(SEGMENT, 0, 1),
        lambda: storage.size(SEGMENT),
        lambda: storage.open_input(SEGMENT),
        lambda: storage.list("segments/"),
        lambda: storage.list(""),
    ]
    if link != SEGMENT:
        calls += [lambda: storage.create(SEGMENT, b"x"), lambda: storage.open_output(SEGMENT)]
        calls += [lambda: storage.delete([SEGMENT])]
    for call in calls:
        with pytest.raises(StorageError, match=f"{link} is a symbolic link") as raised:
            call()
        assert raised.value.kind is ErrorKind.INVALID_PATH
    assert dangling or inside.read_bytes() == b"secret"


def test_creating_where_a_link_stands_is_a_conflict_and_writes_nothing(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    storage = LocalStorage(tmp_path / "store")
    plant_link(tmp_path / "store", RECORD, outside)
    assert storage.create(RECORD, b"x") is CreateOutcome.CONFLICT
    assert not outside.exists()


def test_the_root_of_a_store_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "disk")
    storage = LocalStorage(tmp_path / "store")
    put(storage, SEGMENT, b"x")
    assert (tmp_path / "disk" / SEGMENT).read_bytes() == b"x"


def test_a_pipe_or_a_directory_in_the_place_of_an_object_is_told_and_not_waited_for(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "segments/1").mkdir(parents=True)
    os.mkfifo(tmp_path / "segments/1/pipe")
    (tmp_path / "segments/1/directory").mkdir()
    for name in ("pipe", "directory"):
        for call in (storage.read, storage.size, storage.open_input):
            with pytest.raises(StorageError, match="something else stands where"):
                call(f"segments/1/{name}")
    with pytest.raises(StorageError, match="segments/1/pipe"):
        storage.list("segments/")
    with pytest.raises(StorageError, match="cannot delete from segments/1"):
        storage.delete(["segments/1/directory"])


def test_a_directory_in_the_place_of_the_newest_record_is_told_and_not_passed_over(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert storage.create(f"checkpoints/{1:020d}.json", b"{}")
    (tmp_path / f"checkpoints/{2:020d}.json").mkdir()
    with pytest.raises(StorageError, match=r"something else stands where .*0002\.json.* Remove it"):
        storage.list("checkpoints/")


def test_a_file_in_the_place_of_a_directory_is_told(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "segments").write_bytes(b"")
    for call in (
        lambda: storage.read(SEGMENT),
        lambda: storage.open_output(SEGMENT),
        lambda: storage.list("segments/"),
        lambda: storage.list(""),
    ):
        with pytest.raises(StorageError, match=r"something else stands where .* Remove it"):
            call()


def test_what_lies_beside_the_directories_of_the_format_is_not_listed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, SEGMENT, b"x")
    put(LocalStorage(tmp_path / "savepoints/first"), SEGMENT, b"y")
    (tmp_path / "README").write_bytes(b"mine")
    (tmp_path / "segments/.nfs0001").write_bytes(b"x")
    (tmp_path / "segments/back\\slash").write_bytes(b"x")
    (tmp_path / "segments/line\nfeed").write_bytes(b"x")
    assert paths(storage, "") == [SEGMENT]


# Crashes and failures


def test_a_leftover_temporary_file_is_told_and_not_listed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, SEGMENT, b"x")
    (tmp_path / "segments/00000000000000000001/.tmp-0123").write_bytes(b"torn")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.tmp-4567").write_bytes(b"")
    (tmp_path / "checkpoints/.other").write_bytes(b"")
    assert paths(storage, "") == [SEGMENT]
    found = [(info.name, info.size_bytes) for info in storage.leftovers()]
    assert found == [("checkpoints/.tmp-4567", 0), ("segments/00000000000000000001/.tmp-0123", 4)]


def test_an_open_output_is_a_leftover_until_it_ends(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    with storage.open_output(SEGMENT) as output:
        output.write(b"x")
        assert [info.path for info in storage.leftovers()] == [SEGMENT]
    assert storage.leftovers() == []
    storage.open_output("segments/1/x").abort()
    storage.create(SEGMENT, b"conflict")
    assert storage.leftovers() == []
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a-0001.parquet"]


def crash_before(step: str, root: str) -> None:
    """Run in a child: die without a word just before one step of writing an object."""
    real_fsync = os.fsync

    def die(*arguments: Any, **_: Any) -> None:
        if step == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode):
            return real_fsync(arguments[0])
        os._exit(9)

    setattr(os, step, die)
    put(LocalStorage(root), SEGMENT, b"whole")


@pytest.mark.parametrize(("step", "visible"), [("fsync", False), ("link", False), ("unlink", True)])
def test_a_crash_leaves_a_whole_object_or_none(tmp_path: Path, step: str, visible: bool) -> None:
    code = f"import tests.storage.test_storage as t; t.crash_before({step!r}, {str(tmp_path)!r})"
    child = subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[2])
    assert child.returncode == 9
    storage = LocalStorage(tmp_path)
    assert (SEGMENT in paths(storage, "")) is visible
    if visible:
        assert storage.read(SEGMENT).to_pybytes() == b"whole"
    assert len(storage.leftovers()) == 1


class SystemCalls:
    """Notes the calls that matter for durability, with names instead of descriptors, and makes them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.log: list[str] = []
        self._root = root
        self._fsync, self._link, self._mkdir = os.fsync, os.link, os.mkdir
        monkeypatch.setattr(os, "fsync", self._noting_fsync)
        monkeypatch.setattr(os, "link", self._noting_link)
        monkeypatch.setattr(os, "mkdir", self._noting_mkdir)

    def _name(self, descriptor: int) -> str:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return "file"
        return os.path.relpath(path, self._root)

    def _noting_fsync(self, descriptor: int) -> None:
        self.log.append(f"sync {self._name(descriptor)}")
        self._fsync(descriptor)

    def _noting_link(self, source: str, target: str, **kwargs: Any) -> None:
        self.log.append(f"link {target}")
        self._link(source, target, **kwargs)

    def _noting_mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        self._mkdir(path, mode, dir_fd=dir_fd)
        self.log.append(f"mkdir {Path(path).name}")


def test_everything_is_synced_before_the_name_that_leads_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = SystemCalls(monkeypatch, tmp_path)
    storage = LocalStorage(tmp_path / "new/store")
    put(storage, "segments/1/a", b"x")
    assert calls.log == [
        "sync ..",
        "mkdir new",
        "sync .",
        "mkdir store",
        "sync new",
        "mkdir segments",
        "sync new/store",
        "mkdir 1",
        "sync new/store/segments",
        "sync file",
        "link a",
        "sync new/store/segments/1",
    ]
    calls.log.clear()
    put(storage, "segments/1/b", b"x")
    assert calls.log == ["sync file", "link b", "sync new/store/segments/1"]


def test_a_directory_that_somebody_else_made_is_synced_once_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store/checkpoints").mkdir(parents=True)
    calls = SystemCalls(monkeypatch, tmp_path)
    storage = LocalStorage(tmp_path / "store")
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    assert calls.log == ["sync .", "sync store", "sync file", f"link {RECORD[12:]}", "sync store/checkpoints"]
    calls.log.clear()
    storage.delete([RECORD, "checkpoints/2"])
    assert calls.log == ["sync store/checkpoints"]


def test_nothing_is_synced_when_durable_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = SystemCalls(monkeypatch, tmp_path)
    storage = LocalStorage(tmp_path / "store", durable=False)
    put(storage, SEGMENT, b"x")
    storage.create(RECORD, b"x")
    storage.delete([SEGMENT, RECORD])
    assert [call for call in calls.log if call.startswith("sync")] == []
    assert [call for call in calls.log if call.startswith("link")] == ["link a-0001.parquet", f"link {RECORD[12:]}"]


def failing(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(28))
        with pytest.raises(StorageError, match=r"No space left on device.*Free some"):
            put(storage, SEGMENT, b"x")
        with pytest.raises(StorageError, match="No space left"):
            storage.create(RECORD, b"x")
    assert storage.list("") == storage.leftovers() == []


def test_a_write_that_failed_can_not_be_published_with_a_hole(tmp_path: Path) -> None:
    class FullDisk:
        def write(self, data: Any) -> int:
            raise OSError(28, os.strerror(28))

        def close(self) -> None:
            pass

    storage = LocalStorage(tmp_path)
    output: Any = storage.open_output(SEGMENT)
    output.write(b"first")
    output._file.close()
    output._file = FullDisk()
    with pytest.raises(StorageError, match="No space left"):
        output.write(b"second")
    with pytest.raises(InvalidInput, match="aborted before"):
        output.close()
    assert storage.list("") == storage.leftovers() == []


def test_a_file_system_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    monkeypatch.setattr(os, "link", failing(95))
    for call in (lambda: storage.create(RECORD, b"x"), lambda: put(storage, SEGMENT, b"x")):
        with pytest.raises(StorageError, match="no hard links") as raised:
            call()
        assert raised.value.kind is ErrorKind.STORAGE_UNSUITABLE
    assert storage.list("") == storage.leftovers() == []


def test_a_failed_last_sync_says_that_the_object_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    storage.create(RECORD, b"first of its directory")
    real = os.fsync

    def fail_on_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, os.strerror(5))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_on_directories)
    with pytest.raises(StorageError, match="may not survive a power failure") as raised:
        storage.create("checkpoints/2", b"x")
    assert raised.value.details["visible"] is True
    assert paths(storage, "checkpoints/") == [RECORD, "checkpoints/2"]
    assert storage.leftovers() == []


@pytest.mark.parametrize("call", ["open", "link", "fsync"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=os.strerror)
def test_of_what_fails_before_the_link_it_is_told_whether_it_would_fail_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    storage = LocalStorage(tmp_path)
    storage.create(RECORD, b"first of its directory")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        with pytest.raises(StorageError, match=os.strerror(code)) as raised:
            storage.create("checkpoints/2", b"x")
    assert (raised.value.kind in REFUSALS) is (code != errno.EIO)
    assert "visible" not in raised.value.details
    assert paths(storage, "") == [RECORD]


def test_a_permission_error_of_the_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, SEGMENT, b"x")
    monkeypatch.setattr(os, "open", failing(13))
    with pytest.raises(StorageError, match=r"cannot read .*not permitted .*Check the owner and mode"):
        storage.read(SEGMENT)


# Listings while something changes


class ScansOf:
    """Replaces a directory's scan by a list of what successive scans see; the last repeats."""

    def __init__(self, scans: list[list[str]]) -> None:
        self.scans = scans
        self.count = 0

    def __call__(self, *_: Any, **__: Any) -> list[tuple[str, bool]]:
        seen = self.scans[min(self.count, len(self.scans) - 1)]
        self.count += 1
        return [(name, False) for name in seen]


def test_a_directory_is_scanned_until_two_scans_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    for name in ("1", "2", "3"):
        put(storage, f"checkpoints/{name}", b"x")
    scans = ScansOf([["1", "2"], ["1"], ["1", "2", "3"], ["1", "2", "3"], ["1"]])
    monkeypatch.setattr(directory_tree.DirectoryTree, "_scan", scans)
    assert paths(storage, "checkpoints/") == ["checkpoints/1", "checkpoints/2", "checkpoints/3"]
    assert scans.count == 4


def test_a_directory_that_never_holds_still_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, RECORD, b"x")
    monkeypatch.setattr(directory_tree.DirectoryTree, "_scan", ScansOf([[str(number)] for number in range(2000)]))
    with pytest.raises(StorageError, match="changed during each of 1000 scans") as raised:
        storage.list("checkpoints/")
    assert raised.value.kind is ErrorKind.HISTORY_UNSTABLE


def test_a_scan_is_void_if_one_of_its_objects_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 was the greatest and has gone; leaving it out would say that 1 is the greatest, though 3 stands.
    storage = LocalStorage(tmp_path)
    for name in ("1", "3"):
        put(storage, f"checkpoints/{name}", b"x")
    scans = ScansOf([["1", "2"], ["1", "2"], ["1", "3"], ["1", "3"]])
    monkeypatch.setattr(directory_tree.DirectoryTree, "_scan", scans)
    assert paths(storage, "checkpoints/") == ["checkpoints/1", "checkpoints/3"]
    assert scans.count == 4


def test_names_are_scanned_once_more_instead_of_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, RECORD, b"x")
    scans = ScansOf([["1", "2"], ["1", "2"], ["1", "3"], ["1", "3"], ["1", "3"]])
    monkeypatch.setattr(directory_tree.DirectoryTree, "_scan", scans)
    monkeypatch.setattr(
        directory_tree, "_size", lambda name, directory: pytest.fail("a name needs no look at its file")
    )
    assert storage.names("checkpoints/") == ["checkpoints/1", "checkpoints/3"]
    assert scans.count == 5


@pytest.mark.parametrize("kept", [3, 40])
def test_publishing_looks_at_no_record_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int) -> None:
    store = counts_store(str(tmp_path), checkpoints=kept)
    looks = []
    monkeypatch.setattr(directory_tree, "_size", lambda name, directory: looks.append(name) or 0)
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: looks.append("names") or listed(path))
    job = counts_job()
    permit = store.start(job.job_id)
    looks.clear()
    job.publish(store, permit)
    assert looks == ["names", "names"], "two scans for names greater than its own"


def test_a_history_reads_every_record_once(tmp_path: Path) -> None:
    counts_store(str(tmp_path), checkpoints=6)
    store = CheckpointStore(LocalStorage(tmp_path))
    assert len(store.survey().chain) == 6
    assert store.stats["read_range"].calls == 6


def test_deleting_the_last_segment_removes_its_directory_only(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for name in ("segments/1/a", "segments/2/a", "segments/2/b", RECORD):
        put(storage, name, b"x")
    storage.delete(["segments/1/a", "segments/2/a", RECORD])
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "checkpoints",
        "segments",
        "segments/2",
        "segments/2/b",
    ]


def test_writers_survive_that_their_empty_directory_is_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, durable=False)

    def write(number: int) -> None:
        for turn in range(40):
            put(storage, f"segments/1/{number}-{turn}", b"x")
            storage.delete([f"segments/1/{number}-{turn}"])

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(write, number) for number in range(2)]:
            future.result()
    assert storage.list("") == []


# Many processes


def compete(job: tuple[str, int, int]) -> list[bool]:
    """Run in a child: try to create every record; tells which were won."""
    root, runner, rounds = job
    storage = LocalStorage(root)
    body = b"%d" % runner * 100
    return [storage.create(f"checkpoints/{number:020}", body) is CreateOutcome.CREATED for number in range(rounds)]


def test_of_eight_processes_exactly_one_creates_each_record(tmp_path: Path) -> None:
    rounds = 100
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stateformat.backends.storage.local", "tests.storage.test_storage"])
    with context.Pool(8) as pool:
        won = pool.map(compete, [(str(tmp_path), runner, rounds) for runner in range(8)], chunksize=1)
        pool.close()
        pool.join()
    storage = LocalStorage(tmp_path)
    for number, outcomes in enumerate(zip(*won, strict=True)):
        assert outcomes.count(True) == 1
        winner = outcomes.index(True)
        assert storage.read(f"checkpoints/{number:020}").to_pybytes() == b"%d" % winner * 100
    assert len(storage.list("checkpoints/")) == rounds
    assert storage.leftovers() == []


def test_both_factories_are_what_the_entry_points_name() -> None:
    assert isinstance(memory.from_url("memory://x", {}), Storage)
    assert isinstance(local.from_url("/tmp/x", {}), Storage)
