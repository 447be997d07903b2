"""What every storage must do, one behaviour per test. Subclass, give it a fixture ``storage``, run pytest.

    class TestMyStorage(StorageConformance):
        @pytest.fixture
        def storage(self):
            yield MyStorage(...)        # empty, and nobody else's

``atomic_create = False`` runs the races one after the other, for test servers that check and store in two steps.
``unicode_url`` is the address of an empty store with letters beyond ASCII and a space in its name, or ``None``.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import CreateOutcome, ObjectInfo, Storage, open_storage

RECORD = "checkpoints/00000000000000000001.json"
SEGMENT = "segments/00000000000000000001/a-0001.parquet"
MISSING = "segments/00000000000000000009/none.parquet"
ILLEGAL = [
    "",
    "/etc/passwd",
    "segments",
    "segments/",
    "segments//x",
    "segments/../../x",
    "segments/./x",
    "../segments/x",
    "segments/.hidden",
    "other/x",
    "segments/a\\b",
    "segments/a\nb",
    "segments/a\0b",
]


def put(storage: Storage, path: str, data: bytes) -> None:
    """Write an object in one go."""
    with storage.open_output(path) as output:
        output.write(data)


def paths(storage: Storage, prefix: str) -> list[str]:
    """The paths that a listing shows."""
    return [info.path for info in storage.list(prefix)]


class StorageConformance:
    """The suite. ``storage`` is empty at the start of every test."""

    atomic_create = True
    race_threads = 16
    race_rounds = 25
    listing_rounds = 60

    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """With what :func:`open_storage` opens the URL again."""
        return {}

    @pytest.fixture
    def unicode_url(self) -> str:
        raise NotImplementedError

    # Reading what was written

    def test_is_a_storage(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)

    def test_what_was_written_is_read_at_once(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"state of one subtask")
        assert storage.read(SEGMENT).to_pybytes() == b"state of one subtask"
        assert storage.size(SEGMENT) == 20
        assert storage.list("") == [ObjectInfo(SEGMENT, 20)]

    def test_what_was_created_is_read_at_once(self, storage: Storage) -> None:
        assert storage.create(RECORD, b'{"id":1}\n') is CreateOutcome.CREATED
        assert storage.read(RECORD).to_pybytes() == b'{"id":1}\n'
        assert storage.list("checkpoints/") == [ObjectInfo(RECORD, 9)]

    def test_many_writes_make_one_object_in_their_order(self, storage: Storage) -> None:
        chunks = [bytes([number]) * (number * 37) for number in range(200)]
        with storage.open_output(SEGMENT) as output:
            counts = [output.write(chunk) for chunk in chunks]
        assert counts == [len(chunk) for chunk in chunks]
        assert storage.read(SEGMENT).to_pybytes() == b"".join(chunks)

    def test_a_buffer_may_be_reused_after_write_returns(self, storage: Storage) -> None:
        scratch = bytearray(b"first.")
        with storage.open_output(SEGMENT) as output:
            output.write(memoryview(scratch))
            scratch[:] = b"SECOND"
            output.write(memoryview(scratch))
        assert storage.read(SEGMENT).to_pybytes() == b"first.SECOND"

    def test_write_counts_bytes_and_not_elements(self, storage: Storage) -> None:
        with storage.open_output(SEGMENT) as output:
            assert output.write(memoryview(b"01234567").cast("I")) == 8
        assert storage.size(SEGMENT) == 8

    def test_an_object_without_bytes_can_be_written_and_read(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"")
        assert storage.size(SEGMENT) == 0
        assert storage.read(SEGMENT).to_pybytes() == b""
        assert storage.read_range(SEGMENT, 0, 10).to_pybytes() == b""

    def test_twenty_megabytes_come_back_the_same(self, storage: Storage) -> None:
        block = os.urandom(1 << 20)
        with storage.open_output(SEGMENT) as output:
            for _ in range(20):
                output.write(block)
        body = storage.read(SEGMENT)
        assert body.size == storage.size(SEGMENT) == 20 << 20
        assert hashlib.sha256(body).digest() == hashlib.sha256(block * 20).digest()
        assert storage.read_range(SEGMENT, (19 << 20) - 5, 10).to_pybytes() == block[-5:] + block[:5]

    @pytest.mark.parametrize(
        ("offset", "length", "expected"),
        [
            (0, 10, b"0123456789"),
            (0, 4, b"0123"),
            (3, 4, b"3456"),
            (8, 10, b"89"),
            (10, 1, b""),
            (99, 5, b""),
            (4, 0, b""),
        ],
    )
    def test_a_range_is_cut_at_the_end_and_never_padded(
        self, storage: Storage, offset: int, length: int, expected: bytes
    ) -> None:
        put(storage, SEGMENT, b"0123456789")
        assert storage.read_range(SEGMENT, offset, length).to_pybytes() == expected

    def test_a_negative_range_is_refused(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"0123456789")
        for offset, length in ((-1, 3), (3, -1)):
            with pytest.raises(InvalidInput, match="not negative"):
                storage.read_range(SEGMENT, offset, length)

    def test_an_input_is_seekable_and_parquet_reads_one_row_group_of_it(self, storage: Storage) -> None:
        table = pa.table({"key": pa.array(range(1000), pa.int64()), "value": pa.array([0.5] * 1000)})
        with storage.open_output(SEGMENT) as output:
            pq.write_table(table, pa.PythonFile(output, mode="w"), row_group_size=100)
        with storage.open_input(SEGMENT) as file:
            assert file.seekable()
            assert file.seek(-4, 2) == storage.size(SEGMENT) - 4
            assert file.read(4) == b"PAR1"
            assert pq.ParquetFile(file).read_row_group(7).equals(table.slice(700, 100))

    # Objects that are not there

    @pytest.mark.parametrize("verb", ["read", "read_range", "read_nothing", "size", "open_input"])
    @pytest.mark.parametrize("empty", [True, False])
    def test_a_missing_object_is_file_not_found(self, storage: Storage, verb: str, empty: bool) -> None:
        if not empty:
            put(storage, SEGMENT, b"another")
        calls: dict[str, Callable[[], object]] = {
            "read": lambda: storage.read(MISSING),
            "read_range": lambda: storage.read_range(MISSING, 0, 4),
            "read_nothing": lambda: storage.read_range(MISSING, 0, 0),
            "size": lambda: storage.size(MISSING),
            "open_input": lambda: storage.open_input(MISSING),
        }
        with pytest.raises(FileNotFoundError) as raised:
            calls[verb]()
        assert not isinstance(raised.value, StorageError)
        assert MISSING in str(raised.value)

    # Visible when whole, and not before

    def test_an_object_is_invisible_until_it_is_closed(self, storage: Storage) -> None:
        output = storage.open_output(SEGMENT)
        output.write(b"x" * 1000)
        assert storage.list("") == []
        with pytest.raises(FileNotFoundError):
            storage.read(SEGMENT)
        output.close()
        assert storage.read(SEGMENT).to_pybytes() == b"x" * 1000

    def test_abort_leaves_nothing(self, storage: Storage) -> None:
        output = storage.open_output(SEGMENT)
        output.write(b"x" * 1000)
        output.abort()
        output.abort()
        assert storage.list("") == []
        with pytest.raises(FileNotFoundError):
            storage.size(SEGMENT)

    def test_an_exception_in_the_block_leaves_nothing(self, storage: Storage) -> None:
        def fail_half_way() -> None:
            with storage.open_output(SEGMENT) as output:
                output.write(b"x" * 1000)
                raise KeyError("operator failed")

        with pytest.raises(KeyError, match="operator failed"):
            fail_half_way()
        assert storage.list("") == []

    def test_abort_after_close_does_not_take_the_object_back(self, storage: Storage) -> None:
        output = storage.open_output(SEGMENT)
        output.write(b"kept")
        output.close()
        output.close()
        output.abort()
        assert storage.read(SEGMENT).to_pybytes() == b"kept"

    def test_nothing_can_be_written_after_the_end(self, storage: Storage) -> None:
        output = storage.open_output(SEGMENT)
        output.close()
        with pytest.raises(InvalidInput, match="published before"):
            output.write(b"late")
        aborted = storage.open_output(MISSING)
        aborted.abort()
        with pytest.raises(InvalidInput, match="aborted before"):
            aborted.close()
        assert paths(storage, "") == [SEGMENT]

    def test_an_abort_inside_the_block_is_the_end_of_it(self, storage: Storage) -> None:
        with storage.open_output(SEGMENT) as output:
            output.write(b"x")
            output.abort()
        assert storage.list("") == []

    # Create if absent

    def test_a_second_create_conflicts_and_changes_nothing(self, storage: Storage) -> None:
        assert storage.create(RECORD, b"first") is CreateOutcome.CREATED
        assert storage.create(RECORD, b"second") is CreateOutcome.CONFLICT
        assert storage.create(RECORD, b"first") is CreateOutcome.CONFLICT
        assert storage.read(RECORD).to_pybytes() == b"first"

    def test_a_deleted_name_can_be_created_again(self, storage: Storage) -> None:
        assert storage.create(RECORD, b"first") is CreateOutcome.CREATED
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
            seen = set()
            while True:
                last = stop.is_set()
                for info in storage.list("checkpoints/"):
                    seen.add(storage.read(info.path).to_pybytes())
                if last:
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

    def test_an_empty_store_lists_nothing(self, storage: Storage) -> None:
        assert storage.list("") == storage.list("checkpoints/") == []

    def test_a_listing_is_fresh_every_time(self, storage: Storage, options: dict[str, Any]) -> None:
        other = open_storage(storage.url, **options)
        for number in range(5):
            assert storage.create(f"checkpoints/{number:020}.json", b"x") is CreateOutcome.CREATED
            assert len(storage.list("checkpoints/")) == len(other.list("checkpoints/")) == number + 1
        other.delete([RECORD])
        assert RECORD not in paths(storage, "")
        assert len(storage.list("checkpoints/")) == 4

    def test_a_listing_never_misses_what_stands_during_all_of_it(self, storage: Storage) -> None:
        # As expire does: a greater name is made before the lowest is removed, so there is always something greatest.
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
        put(storage, SEGMENT, b"x")
        storage.delete(iter([SEGMENT, SEGMENT]))
        storage.delete([SEGMENT])
        assert storage.list("") == []

    def test_one_illegal_path_stops_a_delete_before_it_begins(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"x")
        with pytest.raises(InvalidInput):
            storage.delete([SEGMENT, "segments/../../x"])
        assert paths(storage, "") == [SEGMENT]

    def test_a_directory_emptied_by_delete_can_be_written_again(self, storage: Storage) -> None:
        for round_number in range(3):
            put(storage, SEGMENT, b"%d" % round_number)
            assert storage.read(SEGMENT).to_pybytes() == b"%d" % round_number
            storage.delete([SEGMENT])
            assert storage.list("segments/") == []

    # Names

    @pytest.mark.parametrize("path", ILLEGAL)
    def test_an_illegal_path_is_refused_by_every_method(self, storage: Storage, path: str) -> None:
        calls = (
            lambda: storage.read(path),
            lambda: storage.read_range(path, 0, 1),
            lambda: storage.open_input(path),
            lambda: storage.size(path),
            lambda: storage.open_output(path),
            lambda: storage.create(path, b"x"),
            lambda: storage.delete([path]),
        )
        for call in calls:
            with pytest.raises(InvalidInput) as raised:
                call()
            assert raised.value.kind is ErrorKind.INVALID_PATH

    @pytest.mark.parametrize(
        "prefix", ["/", "../", "other/", "segments/../", "segments//x", "checkpoint/", "segments/.t"]
    )
    def test_a_prefix_that_no_object_can_have_is_refused(self, storage: Storage, prefix: str) -> None:
        with pytest.raises(InvalidInput) as raised:
            storage.list(prefix)
        assert raised.value.kind is ErrorKind.INVALID_PATH

    def test_object_names_may_have_any_letter_and_sign(self, storage: Storage) -> None:
        names = ["segments/1/größe é", "segments/1/日本", "segments/1/a+b=c&d?e#f%20g", "segments/1/x y"]
        for name in names:
            put(storage, name, name.encode())
        assert paths(storage, "segments/") == sorted(names)
        assert [storage.read(name).to_pybytes().decode() for name in names] == names
        storage.delete(names)
        assert storage.list("") == []

    def test_a_store_may_have_a_name_beyond_ascii(self, unicode_url: str, options: dict[str, Any]) -> None:
        storage = open_storage(unicode_url, **options)
        assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
        again = open_storage(storage.url, **options)
        assert again.read(RECORD).to_pybytes() == b"x"
        assert again.url == storage.url

    # Opening again

    def test_a_store_is_there_once_it_holds_an_object(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"x")
        assert storage.exists()

    def test_two_storages_of_one_url_see_the_same_objects(self, storage: Storage, options: dict[str, Any]) -> None:
        other = open_storage(storage.url, **options)
        put(storage, SEGMENT, b"x")
        assert other.read(SEGMENT).to_pybytes() == b"x"
        assert storage.create(RECORD, b"one") is CreateOutcome.CREATED
        assert other.create(RECORD, b"two") is CreateOutcome.CONFLICT

    def test_a_pickled_storage_goes_on_where_it_was(self, storage: Storage) -> None:
        put(storage, SEGMENT, b"before")
        copy = pickle.loads(pickle.dumps(storage))
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
