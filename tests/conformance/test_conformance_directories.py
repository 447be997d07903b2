"""A directory that grows, on both executors: no file is lost or repeated, and a checkpoint writes
what is new of the files that were dealt.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import stateformat as sf
from stateformat.backends import dataflow as df
from stateformat.backends.connectors import ParquetSource
from stateformat.backends.dataflow.graph import ENUMERATOR, ENUMERATOR_LOG
from stateformat.backends.runtime import Run, RunDiscarded
from stateformat.backends.runtime.logs import enumerator_logs
from stateformat.errors import RestoreRefused
from tests.conformance import Out, to_end, until
from tests.directory_sources import Earlier
from tests.local_jobs import ROWS, rows
from tests.played_stage import EVERYWHERE, PlayedStage, other

END = "_END"


BOTH = pytest.mark.parametrize("executor", ["local", "spark"])


class Folder:
    """A directory that gets files, each of one row, and a job that reads it."""

    def __init__(self, stage: PlayedStage, executor: str) -> None:
        self.stage = stage
        self.executor = executor
        self.path = stage.directory / "grows"
        self.path.mkdir()
        self.out = Out()
        self.files = 0

    def add(self, count: int) -> None:
        for number in range(self.files, self.files + count):
            hidden = self.path / f".{number}"
            pq.write_table(pa.Table.from_batches([rows(number)]), hidden)
            # Later files do not always sort behind earlier ones.
            hidden.rename(self.path / f"{number % 3}-{number:05}.parquet")
        self.files += count

    def end(self) -> None:
        (self.path / END).touch()

    def flow(self, parallelism: int = 2, source: type[ParquetSource] = ParquetSource, out: Out | None = None) -> Any:
        flow = df.Dataflow("directory", parallelism=parallelism)
        files = flow.source(source(self.path, schema=ROWS, grows=True, until=END), uid="in")
        files.key_by("key").apply(out or self.out, uid="out")
        return flow

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

    def check(self) -> None:
        assert self.out.values == [*range(self.files)], "each file once"
        assert not sf.validate(self.stage.store, level="full").problems


@pytest.fixture(autouse=True)
def _short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enumerator_logs, "TAIL_ROWS", 4)


@BOTH
def test_a_checkpoint_has_a_short_state_and_a_log_in_few_segments(stage: PlayedStage, executor: str) -> None:
    folder = Folder(stage, executor)
    run = folder.begin()
    written = 0
    for count in (1, 2, 2, 9, 1, 30, 1, 1, 1, 1, 1):
        folder.add(count)
        before = folder.segments() if stage.newest_id else []
        folder.read(run)
        sizes = folder.segments()
        assert sum(size for size, _ in sizes) == folder.files
        assert len(sizes) <= 2 + math.log2(folder.files)
        assert not stage.state("in", ENUMERATOR), "every file was dealt whole"
        written += sum(size for size, _ in {*sizes} - {*before})
    assert written < folder.files * math.log2(folder.files)
    newest, sizes = stage.newest_id, folder.segments()
    until(run, lambda: stage.newest_id > newest + 2)
    assert folder.segments() == sizes, "what has not changed is named again"
    folder.end()
    to_end(run)
    folder.check()


@BOTH
@pytest.mark.parametrize("seed", range(3))
def test_no_file_is_lost_or_repeated_however_runs_end(stage: PlayedStage, executor: str, seed: int) -> None:
    draw = random.Random(seed)
    folder = Folder(stage, executor)
    for life in range(5):
        folder.add(draw.choice([0, 1, 3, 12]))
        where = other(executor) if life == 2 else executor
        flow = folder.flow(draw.randrange(1, 4))
        run = folder.begin(flow, where, seed=life, tolerable_failures=3)
        if draw.random() < 0.5:
            # One checkpoint fails: before its manifest, or with a segment of the log written.
            stage.storage.order("write", draw.choice(["manifests/", "segments/", "checkpoints/"]), "refuse")
        for _ in range(draw.randrange(20, 80) // (1 if executor == "local" else 10)):
            try:
                if not run.step():
                    break
            except RunDiscarded:
                break
            if draw.random() < 0.05:
                folder.add(1)
        run.close()
    stage.storage.orders.clear()
    folder.end()
    to_end(folder.begin())
    folder.check()


@EVERYWHERE
def test_checkpoints_of_earlier_releases_go_on_and_not_back(stage: PlayedStage, executor: str) -> None:
    folder = Folder(stage, executor)
    folder.add(7)
    run = folder.begin(folder.flow(source=Earlier))
    folder.read(run)
    run.close()
    assert len(stage.state("in", ENUMERATOR)) == 7
    folder.add(2)
    run = folder.begin(folder.flow(3))
    folder.read(run)
    assert (len(stage.state("in", ENUMERATOR)), sum(size for size, _ in folder.segments())) == (0, 9)
    run.close()
    with pytest.raises(RestoreRefused, match=ENUMERATOR_LOG):
        folder.begin(folder.flow(source=Earlier))
    folder.add(1)
    folder.end()
    to_end(folder.begin())
    folder.check()


@BOTH
def test_a_copy_and_a_checkpoint_that_was_gone_back_to_know_their_own_files(stage: PlayedStage, executor: str) -> None:
    folder = Folder(stage, executor)
    folder.add(6)
    run = folder.begin()
    folder.read(run)
    then = stage.newest_id + 1
    until(run, lambda: stage.newest_id >= then)  # With nothing left to commit.
    folder.add(5)
    folder.read(run)
    run.close()
    copy = sf.open(str(stage.directory / "copy"))
    stage.store.copy(stage.store.open(then), copy)
    folder.add(1)
    folder.end()
    elsewhere = Out()
    to_end(stage.at("elsewhere").begin(executor, folder.flow(3, out=elsewhere), start_from=copy.url))
    assert elsewhere.values == [*range(6, 12)]
    stage.store.rollback(then)
    again = Out()
    to_end(folder.begin(folder.flow(1, out=again)))
    assert again.values == [*range(6, 12)]
