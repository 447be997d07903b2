"""Segments are opened several at a time where reads wait, in the order of the rows, and one at a time where they do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Barrier, Lock
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import CheckpointError
from stateformat.reading import ReadTask
from tests.stores import counts_job

SEGMENTS, TOGETHER = 12, 4


class Waiting(LocalStorage):
    """Counts the reads that are under way, and where a barrier is given, ends none before so many have begun."""

    def __init__(self, root: str, barrier: Barrier | None = None) -> None:
        super().__init__(root, durable=False)
        self.barrier = barrier
        self.lock = Lock()
        self.now = self.most = 0

    def read_range(self, path: str, offset: int, length: int) -> pa.Buffer:
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            if self.barrier is not None:
                self.barrier.wait(60)
            return super().read_range(path, offset, length)
        finally:
            with self.lock:
                self.now -= 1


class WaitingTogether(Waiting):
    reads_at_once = TOGETHER


@pytest.fixture
def task(tmp_path: Path) -> ReadTask:
    store = sf.open(str(tmp_path), durable=False)
    job = counts_job(parallelism=SEGMENTS, keys=400)
    job.publish(store, None, options=sf.WriteOptions(inline_bytes_max=0))
    return store.open().read("counter", "counts")


def read(task: ReadTask, storage: Any) -> pa.Table:
    return replace(task, storage=storage).table()


def test_so_many_segments_are_opened_at_a_time_as_the_storage_says(task: ReadTask, tmp_path: Path) -> None:
    # Of all twelve, so each time four have to come together: with fewer at a time the barrier would break.
    storage = WaitingTogether(str(tmp_path), Barrier(TOGETHER))
    assert read(task, storage).equals(task.table())
    assert storage.most == TOGETHER


def test_a_storage_that_says_nothing_is_read_one_at_a_time(task: ReadTask, tmp_path: Path) -> None:
    storage = Waiting(str(tmp_path))
    assert read(task, storage).equals(task.table())
    assert storage.most == 1


def test_an_object_that_is_missing_ends_the_rows_before_its_own_and_leaves_no_read_under_way(
    task: ReadTask, tmp_path: Path
) -> None:
    paths, whole = task.handles["path"].to_pylist(), task.table()
    (tmp_path / paths[5]).unlink()
    storage = WaitingTogether(str(tmp_path))
    rows = replace(task, storage=storage).batches(batch_rows=1)
    seen = []
    with pytest.raises(CheckpointError, match=paths[5]):
        seen.extend(rows)
    assert len(seen) <= sum(task.handles["rows"].to_pylist()[:5])
    assert pa.Table.from_batches(seen, whole.schema).equals(whole.slice(0, len(seen)))
    assert storage.now == 0
