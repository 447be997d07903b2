"""Pins: savepoints under a name below a store, and ``STORE@NAME``, their address."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

import stateformat as sf
from stateformat import pins
from stateformat.errors import CheckpointExpired, DamagedCheckpoint, ErrorKind, InvalidInput, NotFound, StorageError
from stateformat.model import CheckpointKind
from stateformat.segments import WriteOptions
from stateformat.storage import Storage, instrumented, split_name
from stateformat.store import CheckpointStore
from tests import stores


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointStore:
    """Checkpoints 1 to 4 of one job; nothing is inline."""
    url = str(tmp_path / "store") if request.param == "file" else f"memory://{uuid4().hex}/store"
    found = stores.counts_store(url)
    job = stores.counts_job()
    for _ in range(3):
        job.publish(found, found.start(job.job_id), options=WriteOptions(inline_bytes_max=0))
    return found


@pytest.fixture
def local(tmp_path: Path) -> CheckpointStore:
    return stores.counts_store(str(tmp_path / "store"), checkpoints=3)


def bytes_of(storage: Storage) -> dict[str, bytes]:
    return {item.path: storage.read(item.path).to_pybytes() for item in storage.list("")}


def rows(checkpoint: sf.Checkpoint) -> list[dict[str, object]]:
    return sorted(checkpoint.read("counter", "counts").table().to_pylist(), key=str)


# Pins ---------------------------------------------------------------------------------------------


def test_a_pin_is_a_savepoint_that_outlives_its_checkpoint(store: CheckpointStore) -> None:
    before, content = bytes_of(store.storage), rows(store.open(2))
    record = store.pin(2, "before-fix")
    assert (record.checkpoint_id, record.kind, record.ref) == (2, CheckpointKind.SAVEPOINT, store.open(2).record.ref)
    assert bytes_of(store.storage) == before
    (held,) = store.pins()
    assert (held.name, held.record, held.is_claimed) == ("before-fix", record, False)
    store.expire(1)
    with pytest.raises(CheckpointExpired):
        store.open(2)
    pinned = sf.open(f"{store.url}@before-fix")
    assert pinned.url == held.url == f"{store.url}/savepoints/before-fix"
    assert rows(pinned.open()) == rows(pinned.open(2)) == rows(sf.open(f"{store.url}@before-fix").open()) == content
    assert sf.validate(pinned.storage, level="full").problems == ()
    assert sf.validate(store.storage, level="full").problems == ()


def test_pinning_twice_changes_nothing_and_another_checkpoint_is_refused_with_both_ids(store: CheckpointStore) -> None:
    first = pins.pin(store.open(2), "p")
    again = pins.pin(store.open(2), "p")
    assert (first.made, again.made, first.record) == (True, False, again.record)
    with pytest.raises(
        InvalidInput, match=r"(?s)'p' is taken.* holds savepoint 2 .* checkpoint 3 .* not pinned"
    ) as caught:
        store.pin(3, "p")
    assert caught.value.kind is ErrorKind.STORE_NOT_EMPTY
    assert store.pin(None, "newest").checkpoint_id == 4
    assert [one.name for one in store.pins()] == ["newest", "p"]


@pytest.mark.parametrize("name", ["", "42", "4x", "-x", ".x", "_x", "a/b", "a b", "ä", "x" * 201, "a@b", "a\n"])
def test_a_name_that_could_not_be_an_address_is_refused(name: str, local: CheckpointStore) -> None:
    with pytest.raises(InvalidInput, match="no name for a pin"):
        local.pin(1, name)
    assert local.pins() == []


def test_what_is_no_checkpoint_cannot_be_pinned(store: CheckpointStore) -> None:
    with pytest.raises(NotFound):
        store.pin(9, "p")
    store.expire(2)
    with pytest.raises(CheckpointExpired):
        store.pin(1, "p")
    lost = next(item.path for item in store.storage.list("segments/00000000000000000003"))
    store.storage.delete([lost])
    with pytest.raises(DamagedCheckpoint, match="segments/"):
        store.pin(3, "p")
    assert store.pins() == []
    # What the failed pin had copied is removed by name.
    store.pin(4, "q")
    assert pins.unpin(store.storage, "q") is not None


class Interrupted(Exception):
    """Raised in place of a process that dies."""


def test_an_interrupted_pin_is_no_checkpoint_and_is_completed_by_repeating_it(store: CheckpointStore) -> None:
    def die(now: object) -> None:
        if now.objects_done == 1:  # type: ignore[attr-defined]
            raise Interrupted

    with pytest.raises(Interrupted):
        store.pin(2, "p", progress=die)
    assert store.pins() == []
    assert store.pin(2, "p").checkpoint_id == 2
    assert rows(sf.open(f"{store.url}@p").open()) == rows(store.open(2))
    with pytest.raises(Interrupted):
        store.pin(3, "q", progress=die)
    assert pins.unpin(store.storage, "q") is None
    with pytest.raises(NotFound, match="no savepoint 'q'; it has p"):
        store.unpin("q")


# Unpin --------------------------------------------------------------------------------------------


def test_unpin_removes_the_savepoint_and_nothing_else(store: CheckpointStore) -> None:
    before = bytes_of(store.storage)
    store.pin(2, "a")
    store.pin(3, "b")
    store.unpin("a")
    assert [one.name for one in store.pins()] == ["b"]
    assert bytes_of(store.storage) == before
    assert rows(sf.open(f"{store.url}@b").open()) == rows(store.open(3))
    store.unpin("b")
    assert store.pins() == []
    assert store.storage.savepoints() == []  # type: ignore[attr-defined]


def test_a_savepoint_in_which_a_job_has_gone_on_is_the_jobs(store: CheckpointStore) -> None:
    store.pin(2, "p")
    job, claimed = stores.counts_job(), sf.open(f"{store.url}@p")
    job.publish(claimed, claimed.start(job.job_id))
    before = bytes_of(claimed.storage)
    (held,) = store.pins()
    assert (held.is_claimed, held.checkpoints) == (True, 2)
    with pytest.raises(InvalidInput, match=r"a job has gone on in it \(2 checkpoints, the newest is checkpoint 3"):
        store.unpin("p")
    claimed.expire(1)
    before = bytes_of(claimed.storage)
    with pytest.raises(InvalidInput, match=r"a job has gone on in it \(checkpoint 3"):
        store.unpin("p")
    with pytest.raises(InvalidInput, match="'p' is taken"):
        store.pin(2, "p")
    assert bytes_of(claimed.storage) == before


def test_a_savepoint_that_cannot_be_read_is_listed_and_kept(local: CheckpointStore, tmp_path: Path) -> None:
    local.pin(2, "p")
    (record,) = (tmp_path / "store/savepoints/p/checkpoints").iterdir()
    record.write_bytes(record.read_bytes().replace(b"counts", b"cOunts"))
    (held,) = local.pins()
    assert held.record is None
    assert held.fault is not None
    with pytest.raises(InvalidInput, match="nothing was deleted"):
        local.unpin("p")
    assert record.exists()


def test_what_a_user_put_into_a_pin_stays(local: CheckpointStore, tmp_path: Path) -> None:
    local.pin(2, "p")
    note = tmp_path / "store/savepoints/p/note.txt"
    note.write_text("mine")
    local.unpin("p")
    assert [path for path in (tmp_path / "store/savepoints").rglob("*") if path.is_file()] == [note]


@pytest.mark.parametrize("link", ["savepoints", "savepoints/p", "savepoints/p/segments"])
def test_unpin_follows_no_link_out_of_the_store(link: str, local: CheckpointStore, tmp_path: Path) -> None:
    local.pin(2, "p")
    place, elsewhere = tmp_path / "store" / link, tmp_path / "elsewhere"
    place.rename(elsewhere) if place.exists() else elsewhere.mkdir()
    place.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    with pytest.raises(StorageError, match="is a symbolic link"):
        local.unpin("p")
    assert sorted(elsewhere.rglob("*")) == before


# Addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("s", ("s", None)),
        ("s@p", ("s", "p")),
        ("s@before-fix_1.x", ("s", "before-fix_1.x")),
        ("s@42-0a1b2c3d", ("s", "42-0a1b2c3d")),
        ("s@7", ("s@7", None)),
        ("s@p/", ("s@p/", None)),
        ("s@p/store", ("s@p/store", None)),
        ("a@b@c", ("a@b", "c")),
        ("s@-p", ("s@-p", None)),
        ("s@.p", ("s@.p", None)),
        ("s@", ("s@", None)),
        ("@p", ("@p", None)),
        ("s@a b", ("s@a b", None)),
        ("s@" + "x" * 201, ("s@" + "x" * 201, None)),
        ("/data/me@host", ("/data/me", "host")),
        ("file:///data/s@p", ("file:///data/s", "p")),
        ("memory://s@p", ("memory://s", "p")),
        ("s3://bucket/s@p", ("s3://bucket/s", "p")),
        ("s3://bucket/a@b/store", ("s3://bucket/a@b/store", None)),
        ("s3://bucket/@p", ("s3://bucket/", "p")),
        ("s3://bucket@p", ("s3://bucket@p", None)),
        ("s3://KEY:SECRET@bucket", ("s3://KEY:SECRET@bucket", None)),
    ],
)
def test_an_address_ends_in_a_name_or_does_not(address: str, parts: tuple[str, str | None]) -> None:
    assert split_name(address) == parts


@pytest.fixture
def pinned(local: CheckpointStore) -> str:
    local.pin(2, "p")
    return local.url


def test_a_place_whose_own_name_ends_so_goes_first(pinned: str, tmp_path: Path) -> None:
    assert sf.open(f"{pinned}@p").open().id == 2
    # Empty: a job may make a store there only under an address with a final slash.
    (tmp_path / "store@p").mkdir()
    assert sf.open(f"{pinned}@p").open().id == 2
    stores.counts_store(str(tmp_path / "store@p") + "/")
    assert sf.open(str(tmp_path / "store@p")).open().id == 1
    assert sf.open(str(tmp_path / "store@p") + "/").open().id == 1
    assert sf.open(f"{pinned}/savepoints/p").open().id == 2


def test_a_query_of_spark_whose_folder_ends_so_goes_first(pinned: str, tmp_path: Path) -> None:
    query = tmp_path / "store@p"
    for folder in ("offsets", "commits"):
        (query / folder).mkdir(parents=True)
        (query / folder / "0").write_text("v1\n{}")
    assert pins.open_address(str(query)).url.endswith("store%40p")


@pytest.mark.parametrize("name", ["none", "p@2", "7"])
def test_a_name_that_is_no_savepoints_is_a_place(name: str, pinned: str, tmp_path: Path) -> None:
    place = str(tmp_path / f"store@{name}")
    assert sf.open(place).url == f"file://{tmp_path}/store%40{name}".replace("p@2", "p%402")
    stores.counts_store(place)
    assert sf.open(place).open().id == 1


@pytest.mark.parametrize("blocked", ["a file", "another's folder"])
def test_a_place_is_no_pin_where_the_other_cannot_be_one(
    blocked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocked == "a file":
        (tmp_path / "me").write_text("a file")
    else:
        from stateformat.backends.storage.local import LocalStorage

        def refused(_: object, folder: str) -> list[str]:
            raise StorageError(f"cannot list {folder}", kind=ErrorKind.STORAGE_REFUSED)

        monkeypatch.setattr(LocalStorage, "names", refused)
    assert pins.open_address(tmp_path / "me@host").url == f"file://{tmp_path}/me%40host"


def test_only_an_address_that_ends_in_a_name_costs_a_look(pinned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from stateformat.backends.storage.local import LocalStorage

    listed: list[str] = []
    names = LocalStorage.names

    def counted(self: LocalStorage, folder: str) -> list[str]:
        listed.append(self.url)
        return names(self, folder)

    monkeypatch.setattr(LocalStorage, "names", counted)
    sf.open(pinned)
    sf.open(f"{pinned}/")
    assert listed == []
    sf.open(f"{pinned}@other")
    assert len(listed) == 1
    sf.open(f"{pinned}@p")
    assert len(listed) == 3


def test_a_store_begins_with_a_pin(pinned: str, tmp_path: Path) -> None:
    empty = sf.open(str(tmp_path / "empty"))
    assert empty.start_from(sf.open(f"{pinned}@p").open()).record.checkpoint_id == 3


def test_a_storage_that_holds_no_savepoints_has_none_and_says_so(local: CheckpointStore) -> None:
    class Bare:
        """The nine methods of a storage, and no more."""

        def __init__(self, inner: Storage) -> None:
            for name in (
                "exists",
                "read",
                "read_range",
                "open_input",
                "size",
                "open_output",
                "create",
                "list",
                "delete",
            ):
                setattr(self, name, getattr(inner, name))
            self.url = inner.url

    bare = CheckpointStore(instrumented(Bare(local.storage)))
    assert bare.pins() == []
    with pytest.raises(InvalidInput, match="keeps no savepoints below a store"):
        bare.pin(1, "p")
