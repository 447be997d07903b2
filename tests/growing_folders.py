"""A directory that grows while a job reads it, for tests of both kinds of sources over one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import stateformat as sf
from stateformat.backends.dataflow.graph import ENUMERATOR_LOG
from stateformat.backends.runtime import Run
from tests.conformance import Out, to_end, until
from tests.local_jobs import rows
from tests.played_stage import PlayedStage

END = "_END"


class GrowingFolder(ABC):
    """Gets files, each of one row."""

    def __init__(self, stage: PlayedStage, executor: str) -> None:
        self.stage = stage
        self.executor = executor
        self.path = stage.directory / "grows"
        self.path.mkdir()
        self.out = Out()
        self.files = 0

    @abstractmethod
    def flow(self, parallelism: int = 2, *, out: Out | None = None) -> Any:
        """A job that reads the folder."""

    def stamp(self, file: Path, number: int) -> None:  # noqa: B027 - most need nothing
        """Set what else a file of this number has, before it appears."""

    def add(self, count: int) -> None:
        for number in range(self.files, self.files + count):
            hidden = self.path / f".{number}"
            pq.write_table(pa.Table.from_batches([rows(number)]), hidden)
            self.stamp(hidden, number)
            # Later files do not always sort behind earlier ones.
            hidden.rename(self.path / f"{number % 3}-{number:05}.parquet")
        self.files += count

    def end(self) -> None:
        (self.path / END).touch()

    def begin(self, flow: Any = None, executor: str | None = None, **options: Any) -> Run:
        return self.stage.begin(executor or self.executor, flow or self.flow(), **{"keep": None, **options})

    def read(self, run: Run) -> None:
        """Step a run until all files that are there are in its output."""
        until(run, lambda: self.out.values == [*range(self.files)])

    def segments(self) -> list[tuple[int, str]]:
        """Rows of each segment of the log, and its path."""
        handles = self.stage.store.open().handles
        mine = [row for row in handles.to_pylist() if row["state"] == ENUMERATOR_LOG and row["rows"]]
        return [(row["rows"], row["path"]) for row in mine]

    def rows_of_log(self) -> int:
        return sum(size for size, _ in self.segments())

    def check(self) -> None:
        assert self.out.values == [*range(self.files)], "each file once"
        assert not sf.validate(self.stage.store, level="full").problems

    def check_copy_and_rollback(self) -> None:
        """A copy of a checkpoint, and a job that went back to it, read what came behind it."""
        self.add(6)
        run = self.begin()
        self.read(run)
        then = self.stage.newest_id + 1
        until(run, lambda: self.stage.newest_id >= then)  # With nothing left to commit.
        self.add(5)
        self.read(run)
        run.close()
        copy = sf.open(str(self.stage.directory / "copy"))
        self.stage.store.copy(self.stage.store.open(then), copy)
        self.add(1)
        self.end()
        elsewhere = Out()
        begun = self.stage.at("elsewhere").begin(self.executor, self.flow(3, out=elsewhere), start_from=copy.url)
        to_end(begun)
        assert elsewhere.values == [*range(6, 12)]
        self.stage.store.rollback(then)
        again = Out()
        to_end(self.begin(self.flow(1, out=again)))
        assert again.values == [*range(6, 12)]
