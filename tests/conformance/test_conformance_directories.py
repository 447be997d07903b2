"""A directory that grows, on both executors: no file is lost or repeated, and a checkpoint writes
only the newly assigned files.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.connectors import ParquetSource
from stateformat.backends.dataflow.graph import ENUMERATOR, ENUMERATOR_LOG
from stateformat.backends.runtime import RunDiscarded, driver
from stateformat.errors import InvalidInput, RestoreRefused
from tests.worlds.jobs import END, Earlier, GrowingFolder, OfNamesAlone
from tests.worlds.local import ROWS
from tests.worlds.stages import EVERYWHERE, Out, PlayedStage, other, to_end, until

BOTH = pytest.mark.parametrize("executor", ["local", "spark"])


class Folder(GrowingFolder):
    """A growing folder, read by a source that runs on both executors."""

    def flow(self, parallelism: int = 2, source: type[ParquetSource] = ParquetSource, out: Out | None = None) -> Any:
        flow = df.Dataflow("directory", parallelism=parallelism)
        files = flow.source(source(self.path, schema=ROWS, grows=True, until=END), uid="in")
        files.key_by("key").apply(out or self.out, uid="out")
        return flow


@pytest.fixture(autouse=True)
def _short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TAIL_ROWS", 4)


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
    assert (len(stage.state("in", ENUMERATOR)), folder.rows_of_log()) == (0, 9)
    run.close()
    with pytest.raises(RestoreRefused, match=ENUMERATOR_LOG):
        folder.begin(folder.flow(source=Earlier))
    folder.add(1)
    folder.end()
    to_end(folder.begin())
    folder.check()


@BOTH
def test_a_log_of_names_alone_goes_on_and_learns_sizes_and_times(stage: PlayedStage, executor: str) -> None:
    folder = Folder(stage, executor)
    folder.add(7)
    run = folder.begin(folder.flow(source=OfNamesAlone))
    folder.read(run)
    run.close()
    folder.add(1)
    run = folder.begin(folder.flow(3))
    folder.read(run)
    run.close()
    # The first listing saw all files: the log has those of the earlier release twice.
    assert folder.rows_of_log() == 7 + 8
    with (folder.path / "0-00003.parquet").open("ab") as file:
        file.write(b"more")
    folder.add(1)
    with pytest.raises((RunDiscarded, InvalidInput), match=r"0-00003\.parquet had"):
        folder.read(folder.begin(folder.flow(3)))


@BOTH
def test_a_copy_and_a_checkpoint_that_was_gone_back_to_know_their_own_files(stage: PlayedStage, executor: str) -> None:
    Folder(stage, executor).check_copy_and_rollback()


@pytest.mark.parametrize("parallelism", [2, 3])
def test_files_that_come_one_by_one_go_to_the_readers_in_turn_on_spark(stage: PlayedStage, parallelism: int) -> None:
    """A reader that got no file would hold back time. In process, chance decides who asks first."""
    folder = Folder(stage, "spark")
    flow = df.Dataflow("one by one", parallelism=parallelism)
    files = flow.source(ParquetSource(folder.path, schema=ROWS, grows=True, until=END), uid="in", event_time="at")
    files.apply(folder.out, uid="out")
    run = folder.begin(flow)
    for _ in range(4 * parallelism):
        folder.add(1)
        folder.read(run)
    # The event time of a file's row is the number of the file.
    assert run.progress().watermark == folder.files - parallelism
    folder.end()
    to_end(run)
    folder.check()
