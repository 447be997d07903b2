"""What every storage must do, one behavior per test. docs/storages.md shows how to run it.

``ObjectConformance`` tests what one writer sees; this class adds tests with several. No test uses
the storage's internals, and none needs more than a few seconds. ``atomic_create = False`` runs the
races one after the other, for test servers that check and store in two steps (never for a storage
that runs publish to).
"""

from __future__ import annotations

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest

from stateformat.errors import InvalidInput, StorageError
from stateformat.storage import (
    CreateOutcome,
    Leftover,
    Link,
    ObjectInfo,
    Storage,
    open_storage,
    whole,
)

from .objects import MISSING, RECORD, SEGMENT, ObjectConformance, paths, put

__all__ = ["MISSING", "RECORD", "SEGMENT", "StorageConformance", "paths", "put"]


def leftovers(storage: Storage) -> list[Leftover]:
    """Return objects that were begun and not ended; none for a storage that cannot list them."""
    return whole(storage).leftovers()


def can(storage: Storage, operation: str) -> bool:
    """Return whether a storage does more than the default."""
    return getattr(type(storage), operation, None) not in (None, getattr(Storage, operation))


class StorageConformance(ObjectConformance):
    """The suite. ``storage`` is empty at the start of every test."""

    atomic_create = True
    race_threads = 16
    race_rounds = 25
    listing_rounds = 60

    # Names alone

    def test_names_are_those_of_a_listing_and_names_after_the_greater_ones(self, storage: Storage) -> None:
        records = [f"checkpoints/{number:020}.json" for number in (1, 2, 9, 10, 11)]
        for path in (*records, f"manifests/{11:020}-x.parquet", SEGMENT):
            put(storage, path, b"x")
        assert whole(storage).names("checkpoints/") == records
        assert whole(storage).names("requests/") == []
        for i, record in enumerate(records):
            assert whole(storage).names_after(record) == records[i + 1 :]
        assert whole(storage).names_after(f"checkpoints/{0:020}.json") == records
        assert whole(storage).names_after("requests/x") == []

    # Create if absent

    def test_a_second_create_conflicts_and_changes_nothing(self, storage: Storage) -> None:
        assert storage.create(RECORD, b"first") is CreateOutcome.CREATED
        assert storage.create(RECORD, b"second") is CreateOutcome.CONFLICT
        assert storage.create(RECORD, b"first") is CreateOutcome.CONFLICT
        assert storage.read(RECORD).to_pybytes() == b"first"
        storage.delete([RECORD])
        assert storage.create(RECORD, b"second") is CreateOutcome.CREATED
        assert storage.read(RECORD).to_pybytes() == b"second"

    def test_exactly_one_of_many_creates_wins_and_its_body_stays(self, storage: Storage) -> None:
        barrier = Barrier(self.race_threads)

        def compete(round_number: int, runner: int) -> CreateOutcome:
            if self.atomic_create:
                barrier.wait(timeout=60)
            return storage.create(f"checkpoints/{round_number:020}.json", b"%d" % runner * 500)

        with ThreadPoolExecutor(self.race_threads if self.atomic_create else 1) as pool:
            for round_number in range(self.race_rounds):
                outcomes = list(pool.map(compete, [round_number] * self.race_threads, range(self.race_threads)))
                winners = [runner for runner, outcome in enumerate(outcomes) if outcome is CreateOutcome.CREATED]
                assert len(winners) == 1
                assert outcomes.count(CreateOutcome.CONFLICT) == self.race_threads - 1
                body = storage.read(f"checkpoints/{round_number:020}.json").to_pybytes()
                assert body == b"%d" % winners[0] * 500
        assert len(storage.list("checkpoints/")) == self.race_rounds

    def test_a_reader_sees_a_created_object_whole_or_not_at_all(self, storage: Storage) -> None:
        body, stop = os.urandom(200_000), Event()

        def look() -> set[bytes]:
            seen, last = set(), False
            while not last:
                last = stop.is_set()
                seen |= {storage.read(info.path).to_pybytes() for info in storage.list("checkpoints/")}
            return seen

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(look) for _ in range(2)]
            try:
                outcomes = {storage.create(f"checkpoints/{number:020}.json", body) for number in range(20)}
            finally:
                stop.set()
            assert outcomes == {CreateOutcome.CREATED}
            assert [reader.result() for reader in readers] == [{body}, {body}]

    @pytest.mark.parametrize("size_bytes", [0, 5 * 2**20])
    def test_what_cannot_be_created_in_one_request_is_refused(self, storage: Storage, size_bytes: int) -> None:
        with pytest.raises(InvalidInput, match=f"{size_bytes} bytes"):
            storage.create(RECORD, bytes(size_bytes))
        assert paths(storage, "checkpoints/") == []

    def test_the_largest_body_that_can_be_created_comes_back(self, storage: Storage) -> None:
        body = os.urandom(5 * 2**20 - 1)
        assert storage.create(RECORD, body) is CreateOutcome.CREATED
        assert storage.read(RECORD).to_pybytes() == body

    # Listing

    def test_a_listing_is_sorted_and_holds_what_begins_with_the_prefix(self, storage: Storage) -> None:
        assert storage.list("") == storage.list("checkpoints/") == []
        names = ["segments/2/b", "segments/10/a", "segments/1/z", "segments/1/a", "manifests/1-x", "segments/1a/q"]
        for number, name in enumerate(names):
            put(storage, name, bytes(number))
        assert storage.list("segments/") == [
            ("segments/1/a", 3),
            ("segments/1/z", 2),
            ("segments/10/a", 1),
            ("segments/1a/q", 5),
            ("segments/2/b", 0),
        ]
        assert paths(storage, "") == sorted(names)
        assert paths(storage, "segments/1") == ["segments/1/a", "segments/1/z", "segments/10/a", "segments/1a/q"]
        assert paths(storage, "segments/1/") == ["segments/1/a", "segments/1/z"]
        assert paths(storage, "segments/1/z") == ["segments/1/z"]
        assert paths(storage, "se") == [name for name in sorted(names) if name.startswith("se")]
        assert paths(storage, "checkpoints/") == paths(storage, "segments/1/zz") == paths(storage, "segments/3/") == []

    def test_a_listing_is_fresh_every_time(self, storage: Storage, options: dict[str, Any]) -> None:
        other = open_storage(storage.url, **options)
        for number in range(5):
            assert storage.create(f"checkpoints/{number:020}.json", b"x") is CreateOutcome.CREATED
            assert len(storage.list("checkpoints/")) == len(other.list("checkpoints/")) == number + 1
        other.delete([RECORD])
        assert RECORD not in paths(storage, "")
        assert len(storage.list("checkpoints/")) == 4

    def test_a_listing_never_misses_what_stands_during_all_of_it(self, storage: Storage) -> None:
        # As expire does: a greater name is made before the lowest is removed.
        stop = Event()
        created = [-1]

        def look() -> list[tuple[int, int]]:
            seen = []
            while not stop.is_set():
                newest = created[0]
                listed = paths(storage, "checkpoints/")
                greatest = int(listed[-1][12:32]) if listed else -1
                seen.append((newest, greatest))
            return seen

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(look)
            try:
                for number in range(self.listing_rounds):
                    storage.create(f"checkpoints/{number:020}.json", b"x")
                    created[0] = number
                    if number >= 2:
                        storage.delete([f"checkpoints/{number - 2:020}.json"])
            finally:
                stop.set()
            seen = reader.result()
        assert seen
        assert [pair for pair in seen if pair[1] < pair[0]] == []

    # Deleting

    def test_delete_removes_what_it_names_and_nothing_else(self, storage: Storage) -> None:
        for name in ("segments/1/a", "segments/1/b", "segments/2/a", "segments/2/ab", RECORD):
            put(storage, name, b"x")
        storage.delete(["segments/1/a", "segments/1/b", "segments/2/a", "segments/7/never"])
        assert paths(storage, "") == [RECORD, "segments/2/ab"]

    def test_deleting_what_is_gone_is_fine(self, storage: Storage) -> None:
        storage.delete([MISSING, RECORD])
        storage.delete([])
        for body in (b"x", b"y"):
            put(storage, SEGMENT, body)
            assert storage.read(SEGMENT).to_pybytes() == body
            storage.delete(iter([SEGMENT, SEGMENT]))
            storage.delete([SEGMENT])
            assert storage.list("") == []

    def test_one_illegal_path_stops_a_delete_before_it_begins(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"x")
        with pytest.raises(InvalidInput):
            storage.delete([SEGMENT, "segments/../../x"])
        assert paths(storage, "") == [SEGMENT]

    # What was begun and not ended

    def test_what_ends_as_it_should_leaves_nothing_over(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"published")
        storage.open_output(MISSING).abort()
        storage.create(RECORD, b"x")
        storage.create(RECORD, b"y")
        assert leftovers(storage) == []
        assert paths(storage, "") == [RECORD, SEGMENT]

    def test_what_was_begun_and_not_ended_is_told_and_can_be_discarded(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"published")
        output = storage.open_output(MISSING)
        output.write(bytes(20 << 20))
        found = leftovers(storage)
        # An object kept in memory is not visible; this one is, if it is sent in parts.
        assert [item.path for item in found] in ([], [MISSING])
        assert storage.list("") == [ObjectInfo(SEGMENT, 9)]
        if found:
            for _ in range(2):
                storage.discard(found)
            assert storage.leftovers() == []
            with pytest.raises(StorageError, match=MISSING):
                output.close()
        output.abort()
        assert storage.list("") == [ObjectInfo(SEGMENT, 9)]

    # Savepoints below the store

    def test_savepoints_below_a_store_are_listed_reached_and_removed(
        self, storage: Storage, options: dict[str, Any]
    ) -> None:
        if not can(storage, "savepoint"):
            return
        assert storage.savepoints() == []
        put(storage, SEGMENT, b"own")
        for name in ("b", "a-1.x"):
            there = storage.savepoint(name)
            assert there.url == f"{storage.url}/savepoints/{name}"
            assert there.create(RECORD, b"record") is CreateOutcome.CREATED
            put(there, SEGMENT, b"theirs")
        assert storage.savepoints() == ["a-1.x", "b"]
        assert paths(open_storage(f"{storage.url}/savepoints/b", **options), "") == [RECORD, SEGMENT]
        assert paths(storage, "") == [SEGMENT]
        for _ in range(2):
            storage.remove_savepoint("b")
            assert storage.savepoints() == ["a-1.x"]
            assert paths(storage.savepoint("b"), "") == []
        assert paths(storage.savepoint("a-1.x"), "") == [RECORD, SEGMENT]
        assert paths(storage, "") == [SEGMENT]
        for name in ("", "..", "a/b", ".a", "a\0"):
            with pytest.raises(InvalidInput):
                storage.savepoint(name)

    # Links

    def test_a_link_is_the_whole_object_under_a_second_name(self, storage: Storage, options: dict[str, Any]) -> None:
        if not can(storage, "link_from"):
            return
        other = open_storage(f"{storage.url}-linked", **options)
        large = f"segments/{1:020}/large"
        bodies = {SEGMENT: b"state", large: os.urandom(1_000_000), f"manifests/{1:020}-x.parquet": b"x"}
        for path, body in bodies.items():
            put(storage, path, body)
            link = other.link_from(storage, path, len(body))
            assert isinstance(link, Link)
            assert other.read(path).to_pybytes() == body
        other.make_durable(bodies)
        assert other.list("") == storage.list("")
        assert leftovers(other) == []
        with pytest.raises(FileNotFoundError):
            other.link_from(storage, MISSING, 5)
        for path in ("segments/../x", "other/x"):
            with pytest.raises(InvalidInput):
                other.link_from(storage, path, 5)
        # Each store deletes its own name, and the other keeps the object.
        storage.delete([SEGMENT])
        assert other.read(SEGMENT).to_pybytes() == b"state"
        other.delete(bodies)
        assert storage.read(large).to_pybytes() == bodies[large]
        assert paths(other, "") == []

    # Opening again

    def test_two_storages_of_one_url_see_the_same_objects(self, storage: Storage, options: dict[str, Any]) -> None:
        other = open_storage(storage.url, **options)
        put(storage, SEGMENT, b"x")
        assert other.read(SEGMENT).to_pybytes() == b"x"
        assert storage.create(RECORD, b"one") is CreateOutcome.CREATED
        assert other.create(RECORD, b"two") is CreateOutcome.CONFLICT

    def test_a_pickled_storage_goes_on_where_it_was(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"before")
        copy = pickle.loads(pickle.dumps(storage))  # noqa: S301 - our own bytes
        assert copy.url == storage.url
        assert copy.read(SEGMENT).to_pybytes() == b"before"
        put(copy, "segments/2/after", b"after")
        assert storage.read("segments/2/after").to_pybytes() == b"after"

    def test_an_unknown_option_is_refused(self, storage: Storage, options: dict[str, Any]) -> None:
        with pytest.raises(InvalidInput, match="endpoint_ulr"):
            open_storage(storage.url, **options, endpoint_ulr="http://localhost")

    def test_many_readers_and_writers_do_not_disturb_each_other(self, storage: Storage) -> None:
        def work(worker: int) -> bool:
            name = f"segments/{worker % 3}/{worker}"
            body = b"%d" % worker * 10_000
            put(storage, name, body)
            whole = storage.read(name).to_pybytes() == body
            with storage.open_input(name) as file:
                same = file.read() == body
            return whole and same and storage.read_range(name, 3, 9).to_pybytes() == body[3:12]

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(32))) == [True] * 32
        assert len(storage.list("segments/")) == 32
