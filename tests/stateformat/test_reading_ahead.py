"""Segments are opened several at a time where the storage says that reads wait, in the order of the
rows.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Barrier, Lock

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.storage.local import LocalStorage
from stateformat.errors import CheckpointError
from stateformat.reading import ReadTask
from stateformat.segments import WriteOptions
from tests.stores import counts_job

SEGMENTS, TOGETHER = 12, 4


class Waiting(LocalStorage):
    """Counts the reads under way; with a barrier it ends none before so many have begun."""

    def __init__(self, root: Path, reads_at_once: int | None, barrier: Barrier | None = None) -> None:
        super().__init__(str(root), durable=False)
        if reads_at_once is not None:
            self.reads_at_once = reads_at_once
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


@pytest.fixture
def task(tmp_path: Path) -> ReadTask:
    store = sf.open(str(tmp_path), durable=False)
    job = counts_job(parallelism=SEGMENTS, keys=400)
    job.publish(store, None, options=WriteOptions(inline_bytes_max=0))
    return store.open().read("counter", "counts")


@pytest.mark.parametrize("together", [TOGETHER, None])
def test_so_many_segments_are_opened_at_a_time_as_the_storage_says(
    task: ReadTask, tmp_path: Path, together: int | None
) -> None:
    # Of twelve, four have to come together each time: with fewer the barrier would break.
    storage = Waiting(tmp_path, together, Barrier(together) if together else None)
    assert replace(task, storage=storage).table().equals(task.table())
    assert storage.most == (together or 1)


def test_an_object_that_is_missing_ends_the_rows_before_its_own_and_leaves_no_read_under_way(
    task: ReadTask, tmp_path: Path
) -> None:
    paths, whole = task.handles["path"].to_pylist(), task.table()
    (tmp_path / paths[5]).unlink()
    storage = Waiting(tmp_path, TOGETHER)
    seen: list[pa.RecordBatch] = []
    with pytest.raises(CheckpointError, match=paths[5]):
        seen.extend(replace(task, storage=storage).batches(batch_rows=1))
    assert len(seen) <= sum(task.handles["rows"].to_pylist()[:5])
    assert pa.Table.from_batches(seen, whole.schema).equals(whole.slice(0, len(seen)))
    assert storage.now == 0
