"""A directory that grows, read by a source that runs on both executors and by DataFrames on a
simulated Spark: no file is lost or repeated, and a checkpoint writes only the new files.
"""

from __future__ import annotations

import datetime
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import AnalysisException

from stateformat.backends import dataflow as df
from stateformat.backends.bootstrap import bootstrap
from stateformat.backends.connectors import ParquetSource
from stateformat.backends.dataflow.chained_operator import is_for_good
from stateformat.backends.dataflow.graph import ENUMERATOR, ENUMERATOR_LOG
from stateformat.backends.runtime import RunDiscarded, driver
from stateformat.backends.spark import source
from stateformat.backends.spark.files import DirectoryFrames
from stateformat.errors import InvalidInput, RestoreRefused
from tests.worlds.jobs import END, Earlier, GrowingFolder, OfNamesAlone
from tests.worlds.local import ROWS, rows
from tests.worlds.spark import RangeSource
from tests.worlds.stages import EVERYWHERE, ON_BOTH, Out, PlayedStage, other, to_end, until

NOON_S = 1_700_000_000
WINDOW_S = 10


class Files(GrowingFolder):
    """A growing folder, read by a source that runs on both executors."""

    def flow(self, parallelism: int = 2, source: type[ParquetSource] = ParquetSource, out: Out | None = None) -> Any:
        flow = df.Dataflow("directory", parallelism=parallelism)
        files = flow.source(source(self.path, schema=ROWS, grows=True, until=END), uid="in")
        files.key_by("key").apply(out or self.out, uid="out")
        return flow


class PlayedFiles(DirectoryFrames):
    """Files that are read in this process, each as a partition of Spark."""

    def _address(self, spark: Any) -> str:
        return f"file:{self._path}"

    def _schema(self, spark: Any) -> Any:
        return None

    def _reader(self, spark: Any) -> Any:
        return self

    def schema(self, _: Any) -> PlayedFiles:
        return self

    def load(self, addresses: Sequence[str]) -> list[list[pa.RecordBatch]]:
        return [pq.read_table(address.removeprefix("file:")).to_batches() for address in addresses]

    def sample(self, spark: Any) -> Any:
        return []


class Forgetful(PlayedFiles):
    """As in earlier releases: each checkpoint has the whole position."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.remembers = False


class Frames(GrowingFolder):
    """A growing folder, read as DataFrames; each file is a second newer than the one before."""

    def stamp(self, file: Path, number: int) -> None:
        os.utime(file, (0, NOON_S + number))

    def source(self, files: type[DirectoryFrames] = PlayedFiles, window_s: float | None = None) -> RangeSource:
        window = None if window_s is None else datetime.timedelta(seconds=window_s)
        offsets = files(str(self.path), schema="", grows=True, until=END, files_per_epoch=5, window=window)
        return RangeSource(offsets, schema=ROWS)

    def flow(self, parallelism: int = 2, out: Out | None = None, **options: Any) -> Any:
        flow = df.Dataflow("directory", parallelism=parallelism)
        flow.source(self.source(**options), uid="in").key_by("key").apply(out or self.out, uid="out")
        return flow


@pytest.fixture(autouse=True)
def _short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "TAIL_ROWS", 4)
    monkeypatch.setattr(source, "SPARE_ROWS", 4)


@pytest.fixture
def frames(stage: PlayedStage) -> Frames:
    return Frames(stage, "spark")


@pytest.fixture(params=["local", "spark", "frames"])
def folder(stage: PlayedStage, request: pytest.FixtureRequest) -> Files | Frames:
    """A folder that is read in each of the ways."""
    return Frames(stage, "spark") if request.param == "frames" else Files(stage, request.param)


def test_a_checkpoint_writes_the_files_that_are_new_into_a_log_of_few_segments(folder: Files | Frames) -> None:
    run, stage = folder.begin(), folder.stage
    written = 0
    for count in (1, 2, 2, 9, 1, 30, 1, 1, 1, 1, 1):
        folder.add(count)
        before = folder.segments() if stage.newest_id else []
        folder.read(run)
        sizes = folder.segments()
        assert folder.rows_of_log() == folder.files
        assert len(sizes) <= 2 + math.log2(folder.files)
        # Every file was dealt whole; of frames, how many ranges were read.
        assert len(stage.state("in", ENUMERATOR)) == isinstance(folder, Frames)
        written += sum(size for size, _ in {*sizes} - {*before})
    assert written < folder.files * math.log2(folder.files)
    newest, sizes = stage.newest_id, folder.segments()
    until(run, lambda: stage.newest_id > newest + 2)
    assert folder.segments() == sizes, "what has not changed is named again"
    folder.end()
    to_end(run)
    folder.check()


@pytest.mark.parametrize("seed", range(3))
def test_no_file_is_lost_or_repeated_however_runs_end(folder: Files | Frames, seed: int) -> None:
    draw, executor = random.Random(seed), folder.executor
    # An epoch is many steps of a run in process.
    steps, added = (1, 0.05) if executor == "local" else (10, 0.3)
    for life in range(6):
        folder.add(draw.choice([0, 1, 3, 12]))
        options = {"window_s": draw.choice([None, WINDOW_S])} if isinstance(folder, Frames) else {}
        flow = folder.flow(draw.randrange(1, 4), **options)
        where = other(executor) if life == 2 and isinstance(folder, Files) else executor
        run = folder.begin(flow, where, seed=life, tolerable_failures=3)
        if draw.random() < 0.5:
            # One checkpoint fails: before its manifest, or with a segment of the log written.
            folder.stage.storage.order("write", draw.choice(["manifests/", "segments/", "checkpoints/"]), "refuse")
        for _ in range(draw.randrange(20, 90) // steps):
            try:
                if not run.step():
                    break
            except RunDiscarded:
                break
            if draw.random() < added:
                folder.add(1)
        run.close()
    folder.stage.storage.orders.clear()
    folder.end()
    to_end(folder.begin())
    folder.check()


def test_a_copy_and_a_checkpoint_that_was_gone_back_to_know_their_own_files(folder: Files | Frames) -> None:
    folder.check_copy_and_rollback()


@EVERYWHERE
def test_checkpoints_of_earlier_releases_go_on_and_not_back(stage: PlayedStage, executor: str) -> None:
    folder = Files(stage, executor)
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


@ON_BOTH
def test_a_log_of_names_alone_goes_on_and_learns_sizes_and_times(stage: PlayedStage, executor: str) -> None:
    folder = Files(stage, executor)
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


@pytest.mark.parametrize("parallelism", [2, 3])
def test_files_that_come_one_by_one_go_to_the_readers_in_turn_on_spark(stage: PlayedStage, parallelism: int) -> None:
    """A reader that got no file would hold back time. In process, chance decides who asks first."""
    folder = Files(stage, "spark")
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


# DataFrames of a directory: a window of what is remembered


def test_what_the_window_forgets_leaves_the_log_and_stays_forgotten(frames: Frames) -> None:
    flow = frames.flow(window_s=WINDOW_S)
    run = frames.begin(flow)
    for step in range(30):
        frames.add(3)
        frames.read(run)
        remembered = WINDOW_S + 1 + 3
        assert frames.rows_of_log() <= 2 * remembered + 4
        assert len(frames.segments()) <= 2 + math.log2(2 * remembered)
        if step == 15:
            # A new run writes only the files that it remembers.
            run.close()
            run = frames.begin(flow)
            until(run, lambda: frames.rows_of_log() == WINDOW_S + 1)
    position = {row["name"]: row["number"] for row in frames.stage.state("in", ENUMERATOR)}
    assert position == {None: 30, "/floor": 1000 * (NOON_S + 89 - WINDOW_S), "/forgotten": 90 - WINDOW_S - 1}
    frames.end()
    to_end(run)
    frames.check()


@pytest.mark.parametrize("window_s", [None, WINDOW_S])
def test_checkpoints_of_earlier_releases_with_whole_positions_go_on_and_not_back(
    frames: Frames, window_s: int | None
) -> None:
    frames.add(17)
    run = frames.begin(frames.flow(files=Forgetful, window_s=window_s))
    frames.read(run)
    run.close()
    known = len([row for row in frames.stage.state("in", ENUMERATOR) if row["text"] is not None])
    assert known == (17 if window_s is None else WINDOW_S + 1)
    frames.add(2)
    run = frames.begin(frames.flow(3, window_s=window_s))
    frames.read(run)
    assert not [row for row in frames.stage.state("in", ENUMERATOR) if row["text"] is not None]
    assert frames.rows_of_log() >= known
    run.close()
    with pytest.raises(RestoreRefused, match=ENUMERATOR_LOG):
        frames.begin(frames.flow(files=Forgetful))
    frames.add(1)
    frames.end()
    to_end(frames.begin(frames.flow(window_s=window_s)))
    frames.check()


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("name", "age_s", "words"),
    [
        ("1-00019.parquet", 25, r"'1-00019\.parquet' .* had"),
        ("late.parquet", 2, "came later than the window of 0:00:10 allows"),
        ("in-time.parquet", 12, None),
    ],
)
def test_what_the_log_remembers_is_refused_when_it_changes_and_so_is_what_comes_too_late(
    frames: Frames, restart: bool, name: str, age_s: int, words: str | None
) -> None:
    frames.add(20)
    flow = frames.flow(window_s=WINDOW_S)
    run = frames.begin(flow)
    frames.read(run)
    frames.add(1)
    frames.read(run)
    if restart:
        run.close()
        run = frames.begin(flow)
    pq.write_table(pa.Table.from_batches([rows(77)]), frames.path / ".hidden")
    os.utime(frames.path / ".hidden", (0, NOON_S + age_s))
    (frames.path / ".hidden").rename(frames.path / name)
    if words is None:
        until(run, lambda: frames.out.values == [*range(21), 77])
        run.close()
        return
    with pytest.raises(RunDiscarded, match=words) as caught:
        to_end(run)
    assert is_for_good(caught.value.__cause__ or caught.value), "another try cannot help"
    run.close()
    assert frames.out.values == [*range(21)]


class Touched(PlayedFiles):
    """Somebody writes to each file after it was listed, as Spark begins to read it."""

    def load(self, addresses: Sequence[str]) -> list[list[pa.RecordBatch]]:
        found = super().load(addresses)
        for address in addresses:
            with Path(address.removeprefix("file:")).open("ab") as file:
                file.write(b"more")
        return found


def test_an_epoch_whose_files_change_while_they_are_read_publishes_nothing(frames: Frames) -> None:
    frames.add(3)
    run = frames.begin(frames.flow(files=Touched))
    with pytest.raises(RunDiscarded, match=r"File '0-00000\.parquet' of .* had .* bytes of .* and has") as caught:
        to_end(run)
    assert is_for_good(caught.value.__cause__ or caught.value), "another try cannot help"
    run.close()
    assert not frames.stage.newest_id


class Lost(PlayedFiles):
    """What the driver asks for next is not there."""

    error: Exception

    def latest(self, spark: Any, position: Any) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "for_good"),
    [
        (InvalidInput("no such range"), True),
        (AnalysisException("[TABLE_OR_VIEW_NOT_FOUND] orders"), True),
        (ConnectionResetError("the broker is away"), False),
    ],
)
def test_what_the_driver_cannot_read_is_tried_again_only_if_that_may_help(
    frames: Frames, error: Exception, for_good: bool
) -> None:
    run = frames.begin(frames.flow(files=type("Gone", (Lost,), {"error": error})))
    with pytest.raises(RunDiscarded, match="source 'in' has no next range: ") as caught:
        to_end(run)
    assert is_for_good(caught.value.__cause__ or caught.value) is for_good
    run.close()


def test_a_job_that_begins_behind_a_position_remembers_its_files(frames: Frames) -> None:
    frames.add(8)
    offsets = frames.source()._offsets
    assert offsets is not None
    position: Any = {}
    while (then := offsets.latest(None, position)) != position:  # type: ignore[arg-type]
        position = then
    bootstrap(frames.stage.store, frames.flow(), {}, positions={"in": position})
    assert len(frames.stage.state("in", ENUMERATOR)) == 1 + 8
    frames.add(3)
    run = frames.begin()
    until(run, lambda: frames.out.values == [8, 9, 10])
    assert (len(frames.stage.state("in", ENUMERATOR)), frames.rows_of_log()) == (1, 11)
    run.close()
    frames.end()
    to_end(frames.begin())
    assert frames.out.values == [8, 9, 10]
