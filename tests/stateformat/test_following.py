"""Following a store: what has come since the last look, each record read once, a listing a look."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from stateformat import paths
from stateformat.backends.storage import MemoryStorage
from stateformat.errors import StorageError
from stateformat.history import Came, Follower, Passed, Seen, Unreadable, Withdrawn
from stateformat.history.following import FIRST
from stateformat.model import CheckpointId
from stateformat.publication import CommitPermit
from stateformat.storage import Storage, instrumented, open_storage
from stateformat.store import open as open_store
from tests import stores
from tests.servers.server import BUCKET, S3Server

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
