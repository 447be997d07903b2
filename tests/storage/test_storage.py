"""What each storage guarantees, the page that says so, and a storage of somebody else."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
import re
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from stateformat.backends.storage import LocalStorage, MemoryStorage, local, local_tree, memory
from stateformat.backends.storage.testing import StorageConformance
from stateformat.backends.storage.testing.objects import RECORD, SEGMENT, paths, put
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import REFUSALS, CreateOutcome, Look, ObjectInfo, Storage, instrumented, open_storage, whole
from stateformat.store import CheckpointStore
from tests.worlds.stores import counts_job, counts_store

Patch = pytest.MonkeyPatch


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
    listing_rounds = 200

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


@pytest.fixture
def here(tmp_path: Path) -> LocalStorage:
    """A storage in ``tmp_path``."""
    return LocalStorage(tmp_path)


def test_both_factories_are_what_the_entry_points_name() -> None:
    assert isinstance(memory.from_url("memory://x", {}), Storage)
    assert isinstance(local.from_url("/tmp/x", {}), Storage)


# Memory


def test_memory_stores_of_different_names_are_apart_and_can_be_forgotten() -> None:
    one, other = MemoryStorage("apart/one"), MemoryStorage("apart/other")
    put(one, SEGMENT, b"x")
    assert (one.exists(), other.exists(), other.list("")) == (True, False, [])
    MemoryStorage.reset("apart/one")
    assert not one.exists()
    with pytest.raises(FileNotFoundError):
        one.read(SEGMENT)


def test_a_memory_store_does_not_travel_to_another_process() -> None:
    pickled = pickle.dumps(MemoryStorage("here"))
    code = f"import pickle; pickle.loads({pickled!r})"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode != 0
    assert "memory://here lives in process" in child.stderr


@pytest.mark.parametrize("make", [MemoryStorage, LocalStorage])
def test_an_output_never_overwrites_an_object(make: Any, tmp_path: Path) -> None:
    storage = make(str(tmp_path))
    put(storage, SEGMENT, b"first")
    with pytest.raises(StorageError, match="exists already"):
        put(storage, SEGMENT, b"second")
    assert storage.read(SEGMENT).to_pybytes() == b"first"
    assert storage.create(SEGMENT, b"third") is CreateOutcome.CONFLICT
    MemoryStorage.reset(str(tmp_path))


# Addresses


def test_paths_and_file_urls_name_the_same_store(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    plain = (f"{tmp_path}/a b", f"{tmp_path}/x/../a b/", "a b", "~/a b")
    urls = (f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a%20b", f"file:{tmp_path}/a%20b")
    assert {open_storage(url).url for url in (*plain, *urls)} == {f"file://{tmp_path}/a%20b"}


def test_a_percent_sign_in_a_plain_path_is_a_percent_sign(tmp_path: Path) -> None:
    storage = open_storage(f"{tmp_path}/a%20b")
    put(storage, SEGMENT, b"x")
    assert (tmp_path / "a%20b" / SEGMENT).read_bytes() == b"x"
    assert storage.url == f"file://{tmp_path}/a%2520b"


BAD = ["file://data/store", "file://", "file:///a%00b", "~no-such-user-here/x", "memory://", "memory:///"]


@pytest.mark.parametrize("url", BAD)
def test_an_address_that_names_no_store_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_storage(url)
    assert raised.value.kind is ErrorKind.INVALID_URL


def test_durable_is_true_or_false() -> None:
    with pytest.raises(InvalidInput, match="'no'"):
        open_storage("/tmp/store", durable="no")


def test_a_pickled_local_storage_keeps_its_path_and_option(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = open_storage("relative", durable=False)
    pickled = pickle.dumps(storage)
    monkeypatch.chdir("/")
    assert repr(pickle.loads(pickled)) == repr(storage) == f"LocalStorage('{tmp_path}/relative', durable=False)"


def test_a_local_store_exists_when_its_directory_does(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "store")
    assert storage.list("") == []
    storage.delete([SEGMENT])
    assert not storage.exists()
    (tmp_path / "store").mkdir()
    assert storage.exists()


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
    calls: list[Callable[[], object]] = [
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
    put(LocalStorage(tmp_path / "store"), SEGMENT, b"x")
    assert (tmp_path / "disk" / SEGMENT).read_bytes() == b"x"


def read(path: str) -> Callable[[Storage], object]:
    return lambda storage: storage.read(path)


IN_THE_WAY: dict[str, tuple[Callable[[Path], object], str, list[Callable[[Storage], object]]]] = {
    "file for the store": (
        lambda root: root.write_bytes(b""),
        "it is no directory, and a store is one",
        [
            lambda storage: storage.exists(),
            lambda storage: storage.create(RECORD, b"x"),
            lambda storage: storage.open_output(SEGMENT),
        ],
    ),
    "pipe for an object": (
        lambda root: os.mkfifo(root / "segments/1/a"),
        "something else stands where",
        [read("segments/1/a"), lambda storage: storage.size("segments/1/a"), lambda storage: storage.list("segments/")],
    ),
    "folder for an object": (
        lambda root: (root / "segments/1/a").mkdir(),
        "something else stands where",
        [read("segments/1/a"), lambda storage: storage.open_input("segments/1/a")],
    ),
    "folder for an object to delete": (
        lambda root: (root / "segments/1/a").mkdir(),
        "cannot delete from segments/1",
        [lambda storage: storage.delete(["segments/1/a"])],
    ),
    "folder for the newest record": (
        lambda root: (root / f"checkpoints/{2:020d}.json").mkdir(parents=True),
        r"something else stands where .*0002\.json.* Move it out of the store",
        [lambda storage: storage.list("checkpoints/")],
    ),
    "file for a folder": (
        lambda root: (root / "manifests").write_bytes(b""),
        r"something else stands where .* Move it out of the store",
        [
            read("manifests/x"),
            lambda storage: storage.open_output("manifests/x"),
            lambda storage: storage.list("manifests/"),
            lambda storage: storage.list(""),
        ],
    ),
}


@pytest.mark.parametrize("case", IN_THE_WAY)
def test_something_else_in_the_place_of_a_file_or_folder_is_told(tmp_path: Path, case: str) -> None:
    plant, words, calls = IN_THE_WAY[case]
    root = tmp_path / "store"
    if case != "file for the store":
        (root / "segments/1").mkdir(parents=True)
    plant(root)
    for call in calls:
        with pytest.raises(StorageError, match=words):
            call(LocalStorage(root))


def test_what_lies_beside_the_directories_of_the_format_is_not_listed(here: LocalStorage, tmp_path: Path) -> None:
    put(here, SEGMENT, b"x")
    put(LocalStorage(tmp_path / "savepoints/first"), SEGMENT, b"y")
    for name in ("README", "segments/.nfs0001", "segments/back\\slash", "segments/line\nfeed"):
        (tmp_path / name).write_bytes(b"x")
    assert paths(here, "") == [SEGMENT]


# Crashes and failures


def test_temporary_files_are_told_and_not_listed(here: LocalStorage, tmp_path: Path) -> None:
    put(here, SEGMENT, b"x")
    (tmp_path / "segments/00000000000000000001/.tmp-0123").write_bytes(b"torn")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.tmp-4567").write_bytes(b"")
    (tmp_path / "checkpoints/.other").write_bytes(b"")
    assert paths(here, "") == [SEGMENT]
    found = [(info.name, info.size_bytes) for info in here.leftovers()]
    assert found == [("checkpoints/.tmp-4567", 0), ("segments/00000000000000000001/.tmp-0123", 4)]


def test_an_open_output_is_a_leftover_until_it_ends(here: LocalStorage, tmp_path: Path) -> None:
    with here.open_output(SEGMENT) as output:
        output.write(b"x")
        assert [info.path for info in here.leftovers()] == [SEGMENT]
    assert here.leftovers() == []
    here.open_output("segments/1/x").abort()
    here.create(SEGMENT, b"conflict")
    assert here.leftovers() == []
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["a-0001.parquet"]


@pytest.fixture
def calls(monkeypatch: Patch, tmp_path: Path) -> list[str]:
    """The calls that matter for durability, with names instead of descriptors."""
    log: list[str] = []
    fsync, link, mkdir = os.fsync, os.link, os.mkdir

    def noting_fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        log.append(f"sync {'file' if is_file else os.path.relpath(path, tmp_path)}")
        fsync(descriptor)

    def noting_link(source: str, target: str, **kwargs: Any) -> None:
        log.append(f"link {target}")
        link(source, target, **kwargs)

    def noting_mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        mkdir(path, mode, dir_fd=dir_fd)
        log.append(f"mkdir {Path(path).name}")

    for name, fake in (("fsync", noting_fsync), ("link", noting_link), ("mkdir", noting_mkdir)):
        monkeypatch.setattr(os, name, fake)
    return log


def test_everything_is_synced_before_the_name_that_leads_to_it(tmp_path: Path, calls: list[str]) -> None:
    storage = LocalStorage(tmp_path / "new/store")
    put(storage, "segments/1/a", b"x")
    made = ["sync ..", "mkdir new", "sync .", "mkdir store", "sync new", "mkdir segments", "sync new/store"]
    made += ["mkdir 1", "sync new/store/segments"]
    assert calls == [*made, "sync file", "link a", "sync new/store/segments/1"]
    calls.clear()
    put(storage, "segments/1/b", b"x")
    assert calls == ["sync file", "link b", "sync new/store/segments/1"]


def test_a_directory_that_another_process_made_is_synced_once_too(tmp_path: Path, calls: list[str]) -> None:
    (tmp_path / "store/checkpoints").mkdir(parents=True)
    calls.clear()
    storage = LocalStorage(tmp_path / "store")
    assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
    assert calls == ["sync .", "sync store", "sync file", f"link {RECORD[12:]}", "sync store/checkpoints"]
    calls.clear()
    storage.delete([RECORD, "checkpoints/2"])
    assert calls == ["sync store/checkpoints"]


def test_nothing_is_synced_when_durable_is_off(tmp_path: Path, calls: list[str]) -> None:
    storage = LocalStorage(tmp_path, durable=False)
    put(storage, SEGMENT, b"x")
    storage.create(RECORD, b"x")
    storage.delete([SEGMENT, RECORD])
    assert [call for call in calls if not call.startswith("mkdir")] == ["link a-0001.parquet", f"link {RECORD[12:]}"]


def failing(number: int) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("call", "code", "words", "kind"),
    [
        ("fsync", errno.ENOSPC, r"No space left on device.*Free some", ErrorKind.STORAGE_REFUSED),
        ("link", errno.EOPNOTSUPP, "does not support hard links", ErrorKind.STORAGE_UNSUITABLE),
    ],
)
def test_what_fails_before_the_link_is_told_and_leaves_nothing(
    here: LocalStorage, monkeypatch: Patch, call: str, code: int, words: str, kind: ErrorKind
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        for write in (put, LocalStorage.create):
            with pytest.raises(StorageError, match=words) as raised:
                write(here, RECORD, b"x")
            assert raised.value.kind is kind
    assert here.list("") == here.leftovers() == []


def test_a_write_that_failed_can_not_be_published_with_a_hole(here: LocalStorage) -> None:
    class FullDisk:
        write = failing(errno.ENOSPC)

        def close(self) -> None:
            pass

    output: Any = here.open_output(SEGMENT)
    output.write(b"first")
    output._file.close()
    output._file = FullDisk()
    with pytest.raises(StorageError, match="No space left"):
        output.write(b"second")
    with pytest.raises(InvalidInput, match="aborted before"):
        output.close()
    assert here.list("") == here.leftovers() == []


def test_a_failed_last_sync_says_that_the_object_is_visible(here: LocalStorage, monkeypatch: Patch) -> None:
    here.create(RECORD, b"first of its directory")
    real = os.fsync

    def fail_on_directories(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, os.strerror(5))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fail_on_directories)
    with pytest.raises(StorageError, match="may not survive a power failure") as raised:
        here.create("checkpoints/2", b"x")
    assert raised.value.details["visible"] is True
    assert paths(here, "checkpoints/") == [RECORD, "checkpoints/2"]
    assert here.leftovers() == []


@pytest.mark.parametrize("call", ["open", "link", "fsync"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=os.strerror)
def test_of_what_fails_before_the_link_it_is_told_whether_it_would_fail_again(
    here: LocalStorage, monkeypatch: Patch, call: str, code: int
) -> None:
    here.create(RECORD, b"first of its directory")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(code))
        with pytest.raises(StorageError, match=os.strerror(code)) as raised:
            here.create("checkpoints/2", b"x")
    assert (raised.value.kind in REFUSALS) is (code != errno.EIO)
    assert "visible" not in raised.value.details
    assert paths(here, "") == [RECORD]


def test_a_permission_error_of_the_system_is_told(here: LocalStorage, monkeypatch: Patch) -> None:
    put(here, SEGMENT, b"x")
    monkeypatch.setattr(os, "open", failing(13))
    with pytest.raises(StorageError, match=r"cannot read .*not permitted .*Check the owner and mode"):
        here.read(SEGMENT)


# Listings while something changes


def scans_of(monkeypatch: Patch, *scans: str) -> list[str]:
    """Replaces scans of a directory by these, a letter a name; the last repeats. The scans done."""
    done: list[str] = []

    def scan(*_: Any, **__: Any) -> list[tuple[str, bool]]:
        done.append(scans[min(len(done), len(scans) - 1)])
        return [(name, False) for name in done[-1]]

    monkeypatch.setattr(local_tree.DirectoryTree, "_scan", scan)
    return done


@pytest.mark.parametrize(
    ("there", "scans", "count"),
    [
        ("123", ("12", "1", "123", "123", "1"), 4),  # until two scans agree
        (
            "13",
            ("12", "12", "13", "13"),
            4,
        ),  # 2, which is gone, was the greatest: without it 1 would be, though 3 stands
    ],
)
def test_a_directory_is_scanned_until_two_scans_agree_on_what_stands(
    here: LocalStorage, monkeypatch: Patch, there: str, scans: tuple[str, ...], count: int
) -> None:
    expected = [f"checkpoints/{name}" for name in there]
    for name in expected:
        put(here, name, b"x")
    done = scans_of(monkeypatch, *scans)
    assert paths(here, "checkpoints/") == expected
    assert len(done) == count


def test_a_directory_that_never_holds_still_is_told(here: LocalStorage, monkeypatch: Patch) -> None:
    put(here, RECORD, b"x")
    scans_of(monkeypatch, *(chr(256 + number) for number in range(2000)))
    with pytest.raises(StorageError, match="changed during each of 1000 scans") as raised:
        here.list("checkpoints/")
    assert raised.value.kind is ErrorKind.HISTORY_UNSTABLE


def test_names_are_scanned_once_more_instead_of_looked_at(here: LocalStorage, monkeypatch: Patch) -> None:
    put(here, RECORD, b"x")
    done = scans_of(monkeypatch, "12", "12", "13", "13", "13")
    monkeypatch.setattr(local_tree, "_size", lambda name, directory: pytest.fail("a name needs no look at its file"))
    assert here.names("checkpoints/") == ["checkpoints/1", "checkpoints/3"]
    assert len(done) == 5


@pytest.mark.parametrize("kept", [3, 20])
def test_publishing_looks_at_no_record_that_is_kept(tmp_path: Path, monkeypatch: Patch, kept: int) -> None:
    store = counts_store(str(tmp_path), checkpoints=kept)
    looks = []
    monkeypatch.setattr(local_tree, "_size", lambda name, directory: looks.append(name) or 0)
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


def test_deleting_the_last_segment_removes_its_directory_only(here: LocalStorage, tmp_path: Path) -> None:
    for name in ("segments/1/a", "segments/2/a", "segments/2/b", RECORD):
        put(here, name, b"x")
    here.delete(["segments/1/a", "segments/2/a", RECORD])
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert found == ["checkpoints", "segments", "segments/2", "segments/2/b"]


def test_writers_survive_that_their_empty_directory_is_removed(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path, durable=False)

    def write(number: int) -> None:
        for turn in range(40):
            put(storage, f"segments/1/{number}-{turn}", b"x")
            storage.delete([f"segments/1/{number}-{turn}"])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, range(2))) == [None, None]
    assert storage.list("") == []


def compete(job: tuple[str, int, int]) -> list[bool]:
    """Run in a child: try to create every record; which were won."""
    root, runner, rounds = job
    storage = LocalStorage(root)
    body = b"%d" % runner * 100
    return [storage.create(f"checkpoints/{number:020}", body) is CreateOutcome.CREATED for number in range(rounds)]


def test_of_eight_processes_exactly_one_creates_each_record(here: LocalStorage, tmp_path: Path) -> None:
    rounds = 60
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["stateformat.backends.storage.local", "tests.storage.test_storage"])
    with context.Pool(8) as pool:
        won = pool.map(compete, [(str(tmp_path), runner, rounds) for runner in range(8)], chunksize=1)
        pool.close()
        pool.join()
    for number, outcomes in enumerate(zip(*won, strict=True)):
        assert outcomes.count(True) == 1
        assert here.read(f"checkpoints/{number:020}").to_pybytes() == b"%d" % outcomes.index(True) * 100
    assert len(here.list("checkpoints/")) == rounds
    assert here.leftovers() == []


# ---- the storage that ``docs/storages.md`` shows passes the suite as the page runs it

PAGE = Path(__file__).resolve().parents[2] / "docs" / "storages.md"


def test_the_storage_of_the_guide_passes_the_suite(tmp_path: Path) -> None:
    text = PAGE.read_text()
    blocks = dict(re.findall(r"```(python|toml|py)\n(.*?)```", text, re.DOTALL))
    (tmp_path / "sqlite_storage.py").write_text(blocks["python"])
    # As long as the page has it, the races prove no more here than a few rounds.
    few = "\n    race_threads, race_rounds, listing_rounds = 8, 3, 8\n"
    (tmp_path / "test_sqlite_storage.py").write_text(blocks["py"] + few)
    registered = re.fullmatch(r'\[project\.entry-points\."(.*)"\]\n(.*)\n', blocks["toml"])
    assert registered is not None
    package = tmp_path / "sqlite_storage-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: sqlite_storage\nVersion: 1.0\n")
    entry = registered[2].replace('"', "")
    (package / "entry_points.txt").write_text(f"[{registered[1]}]\n{entry}\n")
    run = ["-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *run, "test_sqlite_storage.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d\d passed", done.stdout, re.MULTILINE), done.stdout


# ---- What stands in front of a storage of any class


class Bare:
    """A storage of a class of its own, with folders that are of it too."""

    def __init__(self, url: str) -> None:
        self.url, self.asked = url, [""]

    def list(self, prefix: str) -> list[ObjectInfo]:
        return [
            ObjectInfo(path, 1) for path in ("segments/1/a", "segments/1/b/c", "segments/2") if path.startswith(prefix)
        ]

    def read(self, path: str) -> pa.Buffer:
        self.asked.append(path)
        return pa.py_buffer(b"0123")

    def folder(self) -> Bare:
        return Bare(f"{self.url}/folder")

    def look(self) -> Look:
        return Look({"in": cast("Storage", Bare(f"{self.url}/in"))}, {})

    def above(self) -> Bare:
        return Bare("bare://x/above")

    def savepoint(self, name: str) -> Bare:
        return Bare(f"{self.url}/savepoints/{name}")

    create = delete = exists = open_output = read


@pytest.mark.parametrize("front", [whole, instrumented], ids=["whole", "counted"])
def test_folders_and_savepoints_of_a_bare_storage_are_whole_storages(front: Callable[[Any], Storage]) -> None:
    storage = front(whole(Bare("bare://x")))
    folder = storage.folder()
    assert folder is not None
    for inside, url in (
        (folder, "folder"),
        (storage.savepoint("a"), "savepoints/a"),
        (folder.look().folders["in"], "folder/in"),
        (folder.above(), "above"),
    ):
        assert isinstance(inside, Storage)
        assert inside.url == f"bare://x/{url}"
        assert inside.leftovers() == []


def test_methods_in_front_of_a_storage_take_keywords() -> None:
    storage = instrumented(whole(Bare("bare://x")))
    assert bytes(storage.read_range(path="segments/1/a", offset=1, length=2)) == b"12"
    assert [item.path for item in storage.list(prefix="segments/2")] == ["segments/2"]
    with pytest.raises(TypeError, match="argument: 'path'"):
        storage.read(paht="segments/1/a")


def test_names_of_a_folder_are_only_those_directly_in_it() -> None:
    storage = whole(Bare("bare://x"))
    assert storage.names("segments/1/") == ["segments/1/a"]
    assert storage.names_after("segments/1/A") == ["segments/1/a"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("s3://bucket/a", "this is an address: open it with open_storage"),
        (Path("/a"), "this is an address"),
        (None, "NoneType is no storage: it has no create, delete, exists, list, open_output, read, url"),
        (type("Half", (Bare,), {"delete": property()})("x"), "Half is no storage: it has no delete"),
    ],
    ids=["a URL", "a path", "nothing", "half"],
)
def test_what_is_no_storage_is_refused_by_what_it_lacks(given: Any, sentence: str) -> None:
    for take in (whole, CheckpointStore):
        with pytest.raises(InvalidInput, match=sentence):
            take(given)


@pytest.mark.filterwarnings("ignore:stateformat.storage:DeprecationWarning")
def test_a_class_may_have_former_protocols_beside_storage() -> None:
    import stateformat.storage as module

    names = ("HasFolder", "HoldsSavepoints", "LinksObjects", "ListsNames")
    names += ("MakesDurable", "ReadsAtOnce", "SharesBytes", "TellsLeftovers")
    former = [getattr(module, name) for name in names]
    made = type("Made", (MemoryStorage, *former), {})("former")
    assert all(isinstance(made, each) and isinstance(MemoryStorage("other"), each) for each in former)


# ---- A storage of another package, written against ``stateformat.storage`` of 0.1, works unchanged

STORAGE = """
from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import (
    REFUSALS, TOP_LEVEL, CreateOutcome, Leftover, ListsNames, MakesDurable, ObjectInfo, OutputObject, ReadsAtOnce,
    Storage, TellsLeftovers, as_url, check_path, is_object_name, is_object_path, make_durable, names, names_after,
    open_storage, reads_at_once,
)
import errno
import pyarrow as pa

STORES = {}


def from_url(url, options):
    if set(options) - {"shout"}:
        raise InvalidInput("unknown options", kind=ErrorKind.INVALID_ARGUMENT)
    return Attic(url, **options)


class Attic:
    reads_at_once = 3

    def __init__(self, url, shout=False):
        self.url, self.objects, self.durable = url, STORES.setdefault(url, {}), []

    def exists(self):
        return bool(self.objects)

    def read(self, path):
        if check_path(path) not in self.objects:
            raise FileNotFoundError(errno.ENOENT, "nothing in the attic", path)
        return pa.py_buffer(self.objects[path])

    def read_range(self, path, offset, length):
        return self.read(path)[offset : offset + length]

    def open_input(self, path):
        return pa.BufferReader(self.read(path))

    def size(self, path):
        return self.read(path).size

    def open_output(self, path):
        return Output(self, check_path(path))

    def create(self, path, data):
        if check_path(path) in self.objects:
            return CreateOutcome.CONFLICT
        self.objects[path] = bytes(data)
        return CreateOutcome.CREATED

    def list(self, prefix):
        return sorted(ObjectInfo(path, len(data)) for path, data in self.objects.items() if path.startswith(prefix))

    def delete(self, paths):
        for path in paths:
            self.objects.pop(check_path(path), None)

    def names(self, folder):
        return [item.path for item in self.list(folder)]

    def names_after(self, path):
        return [name for name in self.names(path[: path.rindex("/") + 1]) if name > path]

    def leftovers(self):
        return [Leftover("segments/1/x", 5, "box")]

    def discard(self, leftovers):
        self.discarded = [item.name for item in leftovers]

    def make_durable(self, paths):
        self.durable += paths


class Output:
    closed = False

    def __init__(self, storage, path):
        self.storage, self.path, self.parts = storage, path, []

    def write(self, data):
        self.parts.append(bytes(data))
        return len(self.parts[-1])

    def flush(self):
        pass

    def close(self):
        if not self.closed:
            self.closed = True
            if self.storage.create(self.path, b"".join(self.parts)) is CreateOutcome.CONFLICT:
                raise StorageError(f"{self.path} is taken")

    def abort(self):
        self.closed = True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.abort() if exc[0] else self.close()
"""
MOVED = "stateformat.storage"
"""With what the warnings of names that leave begin."""
PROGRAM = """
import attic
import stateformat as sf
from stateformat.backends.connectors import CollectSink, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import LocalRuntime
from stateformat.storage import names, names_after, make_durable, open_storage, reads_at_once

storage = open_storage("attic://one", shout=True)
for protocol in (attic.Storage, attic.ListsNames, attic.MakesDurable, attic.TellsLeftovers, attic.ReadsAtOnce):
    assert isinstance(storage, protocol), protocol
assert isinstance(storage.open_output("segments/1/x"), object) and reads_at_once(storage) == 3
assert attic.TOP_LEVEL and attic.REFUSALS and attic.is_object_name("a") and attic.is_object_path("segments/1/a")
assert attic.as_url("attic://one") == "attic://one"
make_durable(storage, ["segments/1/a"])
assert storage.durable == ["segments/1/a"]

out = CollectSink()
flow = Dataflow("job", parallelism=2)
numbers = flow.source(RateSource(rows_per_read=10, total=40, shards=2), uid="in", event_time="at")
numbers.key_by("shard").aggregate({"n": ("n", "sum")}, emit="end", uid="sums").apply(out, uid="out")
store = sf.open("attic://one")
LocalRuntime(store, checkpoint_interval_us=None, checkpoint_rows=10).run(flow)
assert sorted(out.table()["n"].to_pylist()) == [190, 190]
assert store.history(), "a store of checkpoints"
records = names(storage, "checkpoints/")
assert len(records) > 1 and names_after(storage, records[0]) == records[1:]
print("done")
"""


def test_a_storage_of_another_package_is_found_and_runs_a_job_unchanged(tmp_path: Path) -> None:
    (tmp_path / "attic.py").write_text(STORAGE)
    package = tmp_path / "attic-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: attic\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[stateformat.storages]\nattic = attic:from_url\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{textwrap.dedent(PROGRAM)}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", f"ignore:{MOVED}:DeprecationWarning", "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
