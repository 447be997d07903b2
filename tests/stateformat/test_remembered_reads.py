"""A storage that remembers what was read in some folders, and nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from stateformat.backends.storage import LocalStorage
from stateformat.storage import instrumented, remembered, stats_of

SEGMENT, RECORD = "segments/1/a.parquet", "checkpoints/1.json"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    storage = LocalStorage(tmp_path, durable=False)
    for path in (SEGMENT, RECORD):
        storage.create(path, bytes(range(100)))
    return str(tmp_path)


def test_a_part_of_a_segment_is_read_once_and_anything_else_each_time(folder: str) -> None:
    counted = instrumented(LocalStorage(folder))
    storage = remembered(counted)
    for _ in range(3):
        assert storage.read_range(SEGMENT, 10, 5).to_pybytes() == bytes(range(10, 15))
        assert storage.read_range(RECORD, 0, 2).to_pybytes() == b"\0\1"
    assert stats_of(counted)["read_range"].calls == 1 + 3
    assert storage.read_range(SEGMENT, 10, 6).to_pybytes() == bytes(range(10, 16)), "another part"
    assert stats_of(counted)["read_range"].calls == 1 + 3 + 1


def test_an_object_that_was_read_to_its_end_answers_for_each_of_its_beginnings(folder: str) -> None:
    counted = instrumented(LocalStorage(folder))
    storage = remembered(counted, ("checkpoints/",))
    for length in (1000, 100, 7, 2000):
        assert storage.read_range(RECORD, 0, length).to_pybytes() == bytes(range(min(length, 100)))
    assert stats_of(counted)["read_range"].calls == 1


def test_what_was_read_longest_ago_is_forgotten_first_and_what_is_too_large_at_once(folder: str) -> None:
    counted = instrumented(LocalStorage(folder))
    storage = remembered(counted, most_bytes=20)

    def reads(offset: int) -> int:
        before = stats_of(counted)["read_range"].calls
        assert storage.read_range(SEGMENT, offset, 8).to_pybytes() == bytes(range(offset, offset + 8))
        return stats_of(counted)["read_range"].calls - before

    assert [reads(offset) for offset in (0, 8, 0, 16, 0, 8)] == [1, 1, 0, 1, 0, 1]
    assert storage.read_range(SEGMENT, 0, 21).size == 21
    assert [reads(offset) for offset in (0, 8)] == [0, 0], "it has pushed nothing out"


def test_a_copy_is_the_storage_itself(folder: str) -> None:
    storage = remembered(LocalStorage(folder))
    assert storage.url == LocalStorage(folder).url
    assert type(pickle.loads(pickle.dumps(storage))) is LocalStorage
    with pytest.raises(FileNotFoundError):
        storage.read_range("segments/1/none.parquet", 0, 1)
