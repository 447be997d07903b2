"""Pins: savepoints under a name below a store, and ``STORE@NAME``, their address.

A store that begins with the content of another store's checkpoint, and jobs that start from a
savepoint. Following a store: what has come since the last look, each record read once, a listing a
look.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

import stateformat as sf
from stateformat import paths, pins
from stateformat.backends.storage.memory import MemoryStorage
from stateformat.errors import CheckpointExpired, DamagedCheckpoint, ErrorKind, InvalidInput, NotFound, StorageError
from stateformat.history import Came, Follower, Passed, Seen, Unreadable, Withdrawn
from stateformat.history.retention import FIRST
from stateformat.model import CheckpointId, CheckpointKind, Stop, StopMode
from stateformat.publication import CommitPermit
from stateformat.segments import WriteOptions
from stateformat.storage import (
    Storage,
    check_no_secrets,
    checkpoint_address,
    instrumented,
    open_storage,
    split_id,
    split_name,
    without_secrets,
)
from stateformat.store import CheckpointStore, open as open_store
from tests.golden.make_golden import rows_of
from tests.servers.server import BUCKET, S3Server
from tests.stateformat.test_golden import GOLDEN
from tests.worlds import stores


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


@pytest.fixture
def empty() -> Iterator[CheckpointStore]:
    name = f"empty-{uuid4().hex}"
    yield sf.open(f"memory://{name}")
    MemoryStorage.reset(name)


# The library --------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_store_begins_with_any_checkpoint_of_another_one_which_is_only_read(
    folder: Path, empty: CheckpointStore
) -> None:
    source = sf.open(str(folder))
    before = bytes_of(source.storage)
    checkpoint = source.open()
    permit = empty.start_from(checkpoint)
    record, old = permit.record, checkpoint.record
    assert (record.checkpoint_id, record.parent, record.job_id) == (old.checkpoint_id + 1, old.ref, old.job_id)
    assert (record.kind, record.stop, record.properties) == (CheckpointKind.CHECKPOINT, None, {})
    assert (record.graph, record.states, record.rescaled_from) == (old.graph, old.states, old.rescaled_from)
    assert rows_of(empty.open()) == rows_of(checkpoint)
    assert sf.validate(empty.storage, level="full").problems == ()
    assert bytes_of(source.storage) == before
    assert empty.collect_garbage(delete=False).objects == ()


def test_what_an_interrupted_beginning_left_is_used_or_collected(tmp_path: Path) -> None:
    source = stores.counts_store(str(tmp_path / "source"), checkpoints=2, keys=20_000)
    whole = sf.open(str(tmp_path / "whole"))
    whole.start_from(source.open())
    copied = [item.path for item in whole.storage.list("segments/")]
    assert copied
    (manifest,) = (item.path for item in whole.storage.list("manifests/"))
    for stands in (copied[:1], copied, [*copied, manifest]):
        broken = sf.open(str(tmp_path / f"broken-{len(stands)}"))
        for path in stands:
            with broken.storage.open_output(path) as output:
                output.write(whole.storage.read(path))
        permit = broken.start_from(source.open())
        assert sorted(broken.open().read("counter", "counts").table().to_pylist(), key=str) == sorted(
            source.open().read("counter", "counts").table().to_pylist(), key=str
        )
        garbage = broken.collect_garbage(delete=True)
        assert [item.path for item in garbage.objects] == [path for path in stands if path == manifest]
        assert sf.validate(broken.storage, level="full").problems == ()
        assert permit.ref.checkpoint_id == 3


def test_of_two_beginnings_of_one_store_one_wins_and_the_other_copies_nothing_over_it(empty: CheckpointStore) -> None:
    first, second = (stores.counts_store(f"memory://source-{uuid4().hex}") for _ in range(2))
    won = empty.start_from(first.open())
    with pytest.raises(InvalidInput, match="is not empty: it holds checkpoint 2") as caught:
        empty.start_from(second.open())
    assert caught.value.kind is ErrorKind.STORE_NOT_EMPTY
    assert empty.open().record.ref == won.ref


def test_a_stop_is_left_behind(empty: CheckpointStore) -> None:
    source = sf.open(f"memory://source-{uuid4().hex}")
    stores.counts_job().publish(source, None, stop=Stop(StopMode.NO_DRAIN, "f" * 32))
    savepoint = sf.open(f"memory://savepoint-{uuid4().hex}")
    source.copy(source.open(), savepoint)
    assert savepoint.open().record.stop is not None
    assert empty.start_from(savepoint.open()).record.stop is None


# Addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://KEY:SECRET@bucket/x", "s3://***@bucket/x"),
        ("s3://KEY:SEC/RET@bucket/x", "s3://***@bucket/x"),
        ("s3://KEY:SEC/RE/T@bucket", "s3://***@bucket"),
        ("s3://KEY:SECRET", "s3://***@"),
        ("gs://SECRET@bucket", "gs://***@bucket"),
        ("az://place/x?sig=SECRET", "az://place/x?***"),
        ("az://place/x#SECRET", "az://place/x?***"),
        ("https://u:SECRET@host:80/x?y=SECRET", "https://***@host:80/x?***"),
        ("s3://bucket/x@y", None),
        ("s3://bucket", None),
        ("http://[::1]:80/x", None),
        ("file:///a@b?c#d", None),
        ("memory://a@b", None),
        ("/plain:path/a@b?c", None),
        ("relative", None),
    ],
)
def test_a_url_is_shown_without_what_may_be_a_secret_and_refused_where_it_would_be_kept(
    url: str, shown: str | None
) -> None:
    assert without_secrets(url) == (shown or url)
    if shown is None:
        check_no_secrets(url, "the URL")
        return
    with pytest.raises(InvalidInput, match="the URL is more than an address") as caught:
        check_no_secrets(url, "the URL")
    assert "SEC" not in str(caught.value)
    assert "SEC" not in str(caught.value.details)


@pytest.mark.parametrize(
    ("address", "parts"),
    [("s", ("s", None)), ("s@7", ("s", 7)), ("s@7/", ("s@7/", None)), ("a@b", ("a@b", None)), ("a@b@3", ("a@b", 3))],
)
def test_an_address_ends_in_an_id_or_names_the_newest(address: str, parts: tuple[str, int | None]) -> None:
    assert checkpoint_address(address) == parts
    assert split_id(address)[0] == parts[0]


@pytest.mark.parametrize("address", ["", " ", "@3", "s@0", f"s@{2**53}", "s@" + "9" * 5000])
def test_an_address_that_names_nothing_is_refused(address: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        checkpoint_address(address)
    assert len(str(caught.value)) < 200


JOB = stores.counts_job()


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    name = f"followed-{uuid.uuid4().hex}"
    yield f"memory://{name}" if request.param == "memory" else str(tmp_path / "store")
    MemoryStorage.reset(name)


class World:
    """A store, a run that publishes in it, and who follows it."""

    def __init__(self, url: str, **options: object) -> None:
        self.store = open_store(url, **options)
        self.permit: CommitPermit | None = None
        self.storage = instrumented(open_storage(url, **options))
        self.follower = Follower(self.storage)

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self.permit = JOB.publish(self.store, self.permit)

    def remove(self, checkpoint_id: int) -> None:
        self.store.storage.delete([paths.record_path(CheckpointId(checkpoint_id))])

    def look(self) -> list[str]:
        return [told(one) for one in self.follower.look()]

    def requests(self) -> dict[str, int]:
        """The requests since the last call."""
        before = getattr(self, "_before", {})
        now = {name: counts.calls for name, counts in self.storage.stats.operations.items()}  # type: ignore[attr-defined]
        self._before = now
        return {name: calls - before.get(name, 0) for name, calls in now.items() if calls > before.get(name, 0)}


def told(seen: Seen) -> str:
    if isinstance(seen, Came):
        before = seen.before.checkpoint_id if seen.before else None
        return f"{seen.record.checkpoint_id} after {before}{' new' if seen.is_new else ''}"
    if isinstance(seen, Unreadable):
        return f"{seen.checkpoint_id} unreadable"
    if isinstance(seen, Passed):
        return f"{seen.first} to {seen.last} passed"
    assert isinstance(seen, Withdrawn)
    return f"{seen.ref.checkpoint_id} withdrawn"


@pytest.fixture
def world(url: str) -> World:
    return World(url)


def test_a_store_need_not_exist_yet(world: World) -> None:
    assert world.look() == world.look() == []
    world.publish(2)
    assert world.look() == ["1 after None new", "2 after 1 new"]


def test_the_first_look_has_the_newest_that_are_there_and_later_ones_what_has_come(world: World) -> None:
    world.publish(FIRST + 2)
    assert world.look() == ["3 after None", "4 after 3", "5 after 4", "6 after 5", "7 after 6"]
    assert world.look() == []
    world.publish(2)
    assert world.look() == ["8 after 7 new", "9 after 8 new"]
    assert world.follower.newest is not None
    assert world.follower.newest.checkpoint_id == 9


def test_what_expired_between_two_looks_is_passed_over_and_said(world: World) -> None:
    world.publish()
    world.look()
    world.publish(6)
    world.store.expire(2)
    assert world.look() == ["2 to 5 passed", "6 after 1 new", "7 after 6 new"]


def test_a_damaged_record_is_said_once_and_what_comes_after_it_is_followed(world: World) -> None:
    world.publish()
    world.look()
    world.publish()
    path = paths.record_path(CheckpointId(2))
    world.store.storage.delete([path])
    world.store.storage.create(path, b"{")
    assert world.look() == ["2 unreadable"]
    assert world.look() == []
    world.publish()
    assert world.look() == ["3 after 1 new"]


def test_a_record_that_its_run_took_back_was_no_checkpoint(world: World) -> None:
    world.publish(3)
    world.look()
    world.remove(3)
    assert world.look() == ["3 withdrawn"]
    assert world.look() == []
    world.permit = world.store.start(JOB.job_id)
    world.publish()
    assert world.look() == ["3 after None new"]


def test_a_record_in_whose_place_another_attempt_came_was_no_checkpoint(world: World) -> None:
    world.publish(3)
    world.look()
    world.remove(3)
    world.permit = world.store.start(JOB.job_id)
    world.publish(2)
    assert world.look() == ["3 withdrawn", "4 after None new"]


def test_a_store_that_is_emptied_begins_anew(tmp_path: Path) -> None:
    world = World(str(tmp_path / "store"))
    world.publish()
    world.look()
    shutil.rmtree(tmp_path / "store")
    assert world.look() == ["1 withdrawn"]
    assert world.look() == []
    world = World(str(tmp_path / "store"))
    world.publish()
    assert world.look() == ["1 after None"]


def test_an_error_of_the_storage_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.publish()
    world.look()
    world.publish(3)
    reads, whole = [0], type(world.storage).read_range

    def read_range(self: Storage, *arguments: object, **more: object) -> object:
        reads[0] += 1
        if reads[0] in (2, 3):
            raise StorageError("gone for a moment")
        return whole(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(type(world.storage), "read_range", read_range)
    assert world.look() == ["2 after 1 new"]
    with pytest.raises(StorageError, match="gone for a moment"):
        world.look()
    assert world.look() == ["3 after 2 new", "4 after 3 new"]


def test_a_rollback_a_rescale_and_a_savepoint_are_seen_like_any_other(world: World) -> None:
    world.publish(2)
    world.look()
    world.store.rollback(1)
    stores.rescale_newest(world.store, 4)
    assert world.look() == ["3 after 2 new", "4 after 3 new"]


@pytest.mark.s3
def test_on_s3_a_look_is_one_listing_and_a_record_one_request(moto: S3Server) -> None:
    world = World(f"s3://{BUCKET}/{uuid.uuid4().hex}/store", **moto.options())
    world.publish(7)
    world.requests()
    assert len(world.look()) == FIRST
    assert world.requests() == {"list": 1, "read_range": FIRST}
    for _ in range(3):
        assert world.look() == []
    assert world.requests() == {"list": 3}
    world.publish(2)
    assert len(world.look()) == 2
    assert world.requests() == {"list": 1, "read_range": 2}


def test_many_records_are_not_read_to_begin_with(url: str) -> None:
    world = World(url)
    world.publish()
    record = world.store.storage.read(paths.record_path(CheckpointId(1)))
    for number in range(2, 200):
        world.store.storage.create(paths.record_path(CheckpointId(number)), bytes(record))
    world.requests()
    world.follower.look()
    assert sum(world.requests().values()) <= FIRST + 2
