"""What an epoch costs of a directory that grows: with 50,000 files known, against 500.

One new file an epoch. Looking for it, the snapshot of the enumerator, and the checkpoint that is
published, into memory. The files are names: nothing is read of them. Beside the time of an epoch
stand the bytes that it writes: short segments lie in the manifest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import stateformat as sf
from benchmarks.measuring import Row, cost, duration, side_by_side
from stateformat.backends.connectors import DirectoryEnumerator
from stateformat.backends.dataflow import NoSplit, Split
from stateformat.backends.dataflow.graph import ENUMERATOR, ENUMERATOR_LOG
from stateformat.backends.runtime.logs import EnumeratorLogs
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore

MANY, FEW = 50_000, 500
EPOCHS, ROUNDS = 20, 9
SOURCE = Operator(OperatorId("in"), 1, None, coordinator=True)
_stores = count()


class Side:
    """A directory, its enumerator, and the store of the job."""

    def __init__(self, directory: Path, files: int) -> None:
        self.directory = directory
        self.files = 0
        directory.mkdir()
        self.enumerator = DirectoryEnumerator(str(directory), ".parquet", lambda path: [Split(path, b"")])
        self.logs = EnumeratorLogs(lambda _: None)
        self.logs.open("in", self.enumerator)
        self.storage = open_storage(f"memory://directory-{next(_stores)}")
        self.store = CheckpointStore(self.storage)
        self.parent: Any = None
        self.states = (
            sf.coordinator_state("in", ENUMERATOR, columns=DirectoryEnumerator.columns),
            sf.even_split_state("in", ENUMERATOR_LOG, columns=DirectoryEnumerator.log_columns),
        )
        self.epoch(files)

    def epoch(self, files: int = 1) -> None:
        for _ in range(files):
            os.close(os.open(self.directory / f"{self.files:08}.parquet", os.O_CREAT))
            self.files += 1
        while not isinstance(self.enumerator.next_split(0, 1), NoSplit):
            pass
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
        for _ in range(EPOCHS):
            self.epoch()

    def written(self) -> int:
        """The bytes that an epoch writes, on average."""
        before = {item.path for item in self.storage.list("")}
        self.epochs()
        new = sum(item.size_bytes for item in self.storage.list("") if item.path not in before)
        return new // EPOCHS


def measure(line: str = "") -> Iterator[Row]:
    what = f"an epoch with one new file, {MANY:,} files known, against {FEW:,}"
    if line not in what:
        return
    with tempfile.TemporaryDirectory() as folder:
        many, few = Side(Path(folder) / "many", MANY), Side(Path(folder) / "few", FEW)
        bytes_many, bytes_few = many.written(), few.written()
        mine, theirs = side_by_side(many.epochs, few.epochs, rounds=ROUNDS, measured=cost)
    texts = (
        f"{duration(mine.seconds / EPOCHS)}, {bytes_many:,} B",
        f"{FEW} files: {duration(theirs.seconds / EPOCHS)}, {bytes_few:,} B",
        f"{mine.seconds / theirs.seconds:.2f} ×",
    )
    yield Row(what, *texts, "", (mine.cpu, theirs.cpu))
