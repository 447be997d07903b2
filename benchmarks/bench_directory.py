"""What an epoch costs of a directory that grows: with 50,000 files known, against 500.

One new file an epoch, of ``ParquetSource`` and the like, and of Spark's ``DirectoryFrames``.
Looking for it, the snapshot of the enumerator, and the checkpoint that is published, into memory.
The files are names: nothing is read of them, and there is no Spark. Beside the time of an epoch
stand the bytes that it writes: short segments lie in the manifest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.measuring import Row, cost, duration, side_by_side
from stateformat.backends.connectors import DirectoryEnumerator
from stateformat.backends.dataflow import NoSplit, Split, SplitEnumerator
from stateformat.backends.dataflow.graph import ENUMERATOR, ENUMERATOR_LOG
from stateformat.backends.runtime.driver import EnumeratorLogs
from stateformat.backends.spark.files import DirectoryFrames
from stateformat.backends.spark.source import Range, RangeEnumerator, SparkSource
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.states import coordinator_state, even_split_state
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore

MANY, FEW = 50_000, 500
ROUNDS = 9
SOURCE = Operator(OperatorId("in"), 1, None, coordinator=True)
_stores = count()


class Side:
    """A directory, its enumerator, and the store of the job."""

    count = 20
    """How many epochs are measured at a time."""

    def __init__(self, directory: Path, files: int) -> None:
        self.directory = directory
        self.files = 0
        directory.mkdir()
        self.enumerator = self.made()
        self.logs = EnumeratorLogs(lambda _: None)
        self.logs.open("in", self.enumerator)
        self.storage = open_storage(f"memory://directory-{next(_stores)}")
        self.store = CheckpointStore(self.storage)
        self.parent: Any = None
        self.states = (
            coordinator_state("in", ENUMERATOR, columns=self.enumerator.columns),
            even_split_state("in", ENUMERATOR_LOG, columns=self.enumerator.log_columns or {}),
        )
        self.epoch(files)

    def made(self) -> SplitEnumerator:
        return DirectoryEnumerator(str(self.directory), ".parquet", lambda path: [Split(path, b"")])

    def look(self) -> None:
        """Until nothing is there."""
        while not isinstance(self.enumerator.next_split(0, 1), NoSplit):
            pass

    def epoch(self, files: int = 1) -> None:
        for _ in range(files):
            os.close(os.open(self.directory / f"{self.files:08}.parquet", os.O_CREAT))
            self.files += 1
        self.look()
        checkpoint = self.store.begin(job_id="bench", graph=JobGraph((SOURCE,)), states=self.states, parent=self.parent)
        rows = self.enumerator.snapshot()
        self.logs.take({"in": self.enumerator})
        with checkpoint.context.coordinator("in") as driver:
            driver.write(ENUMERATOR, rows)
        with checkpoint.context.subtask("in", 0) as reader:
            reader.empty(ENUMERATOR_LOG)
        checkpoint.add(driver)
        checkpoint.add(reader)
        self.logs.write(checkpoint, ())
        self.parent = checkpoint.publish()
        self.logs.published()

    def epochs(self) -> None:
        for _ in range(self.count):
            self.epoch()

    def written(self) -> int:
        """The bytes that an epoch writes, on average."""
        before = {item.path for item in self.storage.list("")}
        self.epochs()
        new = sum(item.size_bytes for item in self.storage.list("") if item.path not in before)
        return new // self.count


class Files(DirectoryFrames):
    """On a local disk, which Spark need not name."""

    def _address(self, spark: object) -> str:  # noqa: ARG002 - there is none
        return f"file:{self._path}"


class FramesSide(Side):
    """The same, as Spark's source looks and keeps it."""

    count = 5

    def made(self) -> SplitEnumerator:
        files = Files(str(self.directory), schema="n bigint", grows=True, window=None)
        return SparkSource(files, schema={"n": pa.int64()}).enumerator()

    def look(self) -> None:
        """Once, as an epoch does."""
        assert isinstance(self.enumerator, RangeEnumerator)
        assert isinstance(self.enumerator.next_range(None), Range)  # type: ignore[arg-type]


LINES: tuple[tuple[str, type[Side], int], ...] = (
    (f"an epoch with one new file, {MANY:,} files known, against {FEW:,}", Side, ROUNDS),
    (f"an epoch of DirectoryFrames with one new file, {MANY:,} files known, against {FEW:,}", FramesSide, 3),
)


def measure(line: str = "") -> Iterator[Row]:
    for what, side, rounds in LINES:
        if line not in what:
            continue
        with tempfile.TemporaryDirectory() as folder:
            many, few = side(Path(folder) / "many", MANY), side(Path(folder) / "few", FEW)
            bytes_many, bytes_few = many.written(), few.written()
            mine, theirs = side_by_side(many.epochs, few.epochs, rounds=rounds, measured=cost)
        texts = (
            f"{duration(mine.seconds / side.count)}, {bytes_many:,} B",
            f"{FEW} files: {duration(theirs.seconds / side.count)}, {bytes_few:,} B",
            f"{mine.seconds / theirs.seconds:.2f} ×",
        )
        yield Row(what, *texts, "", (mine.cpu, theirs.cpu))
