"""The first half of the suite of every storage: objects written, read, missing, named."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stateformat.errors import ErrorKind, InvalidInput, StorageError
from stateformat.storage import CreateOutcome, ObjectInfo, Storage, open_storage

RECORD: Final = "checkpoints/00000000000000000001.json"
SEGMENT: Final = "segments/00000000000000000001/a-0001.parquet"
MISSING: Final = "segments/00000000000000000009/none.parquet"
ILLEGAL: Final = (
    *("", "/etc/passwd", "segments", "segments/", "segments//x", "segments/../../x", "segments/./x", "../segments/x"),
    *("segments/.hidden", "other/x", "segments/a\\b", "segments/a\nb", "segments/a\0b"),
)


def put(storage: Storage, path: str, data: bytes) -> None:
    """Write an object in one call."""
    with storage.open_output(path) as output:
        output.write(data)


def paths(storage: Storage, prefix: str) -> list[str]:
    """Return the paths that a listing shows."""
    return [info.path for info in storage.list(prefix)]


class ObjectConformance:
    """What one writer sees. ``storage`` is empty at the start of every test."""

    @pytest.fixture
    def storage(self) -> Storage:
        """Return an empty storage, new for each test. Every subclass overrides it."""
        pytest.fail("give the class a fixture `storage` that yields an empty storage")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """Return the options with which :func:`open_storage` opens the URL again."""
        return {}

    @pytest.fixture
    def unicode_url(self) -> str | None:
        """Return the address of an empty store with a space and non-ASCII letters; None for
        none.
        """
        return None

    # Reading what was written

    def test_what_was_written_is_read_at_once(self, storage: Storage) -> None:
        assert isinstance(storage, Storage)
        put(storage, SEGMENT, b"state of one subtask")
        assert storage.read(SEGMENT).to_pybytes() == b"state of one subtask"
        assert storage.size(SEGMENT) == 20
        assert storage.list("") == [ObjectInfo(SEGMENT, 20)]
        assert storage.exists()

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

    def test_a_buffer_may_be_reused_after_write_returns_which_counts_bytes(self, storage: Storage) -> None:
        scratch = bytearray(b"first.")
        with storage.open_output(SEGMENT) as output:
            output.write(memoryview(scratch))
            scratch[:] = b"SECOND"
            output.write(memoryview(scratch))
            assert output.write(memoryview(b"01234567").cast("I")) == 8
        assert storage.read(SEGMENT).to_pybytes() == b"first.SECOND01234567"

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

    def test_a_range_is_cut_at_the_end_and_never_padded(self, storage: Storage) -> None:
        data = b"0123456789"
        put(storage, SEGMENT, data)
        for offset, length in ((0, 10), (0, 4), (3, 4), (8, 10), (10, 1), (99, 5), (4, 0)):
            found = storage.read_range(SEGMENT, offset, length).to_pybytes()
            assert found == data[offset : offset + length], (offset, length)

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

    @pytest.mark.parametrize("empty", [True, False])
    def test_a_missing_object_is_file_not_found(self, storage: Storage, empty: bool) -> None:
        if not empty:
            put(storage, SEGMENT, b"another")
        calls: tuple[Callable[[], object], ...] = (
            lambda: storage.read(MISSING),
            lambda: storage.read_range(MISSING, 0, 4),
            lambda: storage.read_range(MISSING, 0, 0),
            lambda: storage.size(MISSING),
            lambda: storage.open_input(MISSING),
        )
        for call in calls:
            with pytest.raises(FileNotFoundError) as raised:
                call()
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
        with storage.open_output(SEGMENT) as output:
            output.write(b"x")
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

    def test_an_object_has_one_end(self, storage: Storage) -> None:
        output = storage.open_output(SEGMENT)
        output.write(b"kept")
        output.close()
        output.close()
        output.abort()
        with pytest.raises(InvalidInput, match="published before"):
            output.write(b"late")
        aborted = storage.open_output(MISSING)
        aborted.abort()
        with pytest.raises(InvalidInput, match="aborted before"):
            aborted.close()
        assert paths(storage, "") == [SEGMENT]
        assert storage.read(SEGMENT).to_pybytes() == b"kept"

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

    def test_a_prefix_that_no_object_can_have_is_refused(self, storage: Storage) -> None:
        for prefix in ("/", "../", "other/", "segments/../", "segments//x", "checkpoint/", "segments/.t"):
            with pytest.raises(InvalidInput) as raised:
                storage.list(prefix)
            assert raised.value.kind is ErrorKind.INVALID_PATH, prefix

    def test_object_names_may_have_any_letter_and_sign(self, storage: Storage) -> None:
        names = ["segments/1/größe é", "segments/1/日本", "segments/1/a+b=c&d?e#f%20g", "segments/1/x y"]
        for name in names:
            put(storage, name, name.encode())
        assert paths(storage, "segments/") == sorted(names)
        assert [storage.read(name).to_pybytes().decode() for name in names] == names
        storage.delete(names)
        assert storage.list("") == []

    def test_a_store_may_have_a_name_beyond_ascii(self, unicode_url: str | None, options: dict[str, Any]) -> None:
        if unicode_url is None:
            pytest.skip("this storage has no names beyond ASCII")
        storage = open_storage(unicode_url, **options)
        assert storage.create(RECORD, b"x") is CreateOutcome.CREATED
        again = open_storage(storage.url, **options)
        assert again.read(RECORD).to_pybytes() == b"x"
        assert again.url == storage.url
