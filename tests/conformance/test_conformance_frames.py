"""DataFrames of a directory that grows, on a simulated Spark: a checkpoint writes only new files of
those that it remembers, old ones are forgotten, and no file is lost or repeated.
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
from stateformat.backends.dataflow.chained_operator import is_for_good
from stateformat.backends.dataflow.graph import ENUMERATOR, ENUMERATOR_LOG
from stateformat.backends.runtime import RunDiscarded, driver
from stateformat.backends.spark import source
from stateformat.backends.spark.files import DirectoryFrames
from stateformat.errors import InvalidInput, RestoreRefused
from tests.worlds.jobs import END, GrowingFolder
from tests.worlds.local import ROWS, rows
from tests.worlds.spark import RangeSource
from tests.worlds.stages import Out, PlayedStage, to_end, until

NOON_S = 1_700_000_000
WINDOW_S = 10


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


class Folder(GrowingFolder):
    """A growing folder whose files are each a second newer than the one before."""

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


@pytest.fixture
def folder(stage: PlayedStage, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setattr(driver, "TAIL_ROWS", 4)
    monkeypatch.setattr(source, "SPARE_ROWS", 4)
    return Folder(stage, "spark")


def test_a_checkpoint_writes_the_files_that_are_new(folder: Folder) -> None:
    run = folder.begin()
    written = 0
    for count in (1, 2, 2, 9, 1, 30, 1, 1, 1, 1, 1):
        folder.add(count)
        before = folder.segments() if folder.stage.newest_id else []
        folder.read(run)
        sizes = folder.segments()
        assert folder.rows_of_log() == folder.files
        assert len(sizes) <= 2 + math.log2(folder.files)
        assert len(folder.stage.state("in", ENUMERATOR)) == 1, "how many ranges were read"
        written += sum(size for size, _ in {*sizes} - {*before})
    assert written < folder.files * math.log2(folder.files)
    newest, sizes = folder.stage.newest_id, folder.segments()
    until(run, lambda: folder.stage.newest_id > newest + 2)
    assert folder.segments() == sizes, "what has not changed is named again"
    folder.end()
    to_end(run)
    folder.check()


def test_what_the_window_forgets_leaves_the_log_and_stays_forgotten(folder: Folder) -> None:
    flow = folder.flow(window_s=WINDOW_S)
    run = folder.begin(flow)
    for step in range(30):
        folder.add(3)
        folder.read(run)
        remembered = WINDOW_S + 1 + 3
        assert folder.rows_of_log() <= 2 * remembered + 4
        assert len(folder.segments()) <= 2 + math.log2(2 * remembered)
        if step == 15:
            # A new run writes only the files that it remembers.
            run.close()
            run = folder.begin(flow)
            until(run, lambda: folder.rows_of_log() == WINDOW_S + 1)
    position = {row["name"]: row["number"] for row in folder.stage.state("in", ENUMERATOR)}
    assert position == {None: 30, "/floor": 1000 * (NOON_S + 89 - WINDOW_S), "/forgotten": 90 - WINDOW_S - 1}
    folder.end()
    to_end(run)
    folder.check()


@pytest.mark.parametrize("seed", range(3))
def test_no_file_is_lost_or_repeated_however_runs_end(folder: Folder, seed: int) -> None:
    draw = random.Random(seed)
    for life in range(6):
        folder.add(draw.choice([0, 1, 3, 12]))
        flow = folder.flow(draw.randrange(1, 4), window_s=draw.choice([None, WINDOW_S]))
        run = folder.begin(flow, seed=life, tolerable_failures=3)
        if draw.random() < 0.5:
            folder.stage.storage.order("write", draw.choice(["manifests/", "segments/", "checkpoints/"]), "refuse")
        for _ in range(draw.randrange(2, 9)):
            try:
                if not run.step():
                    break
            except RunDiscarded:
                break
            if draw.random() < 0.3:
                folder.add(2)
        run.close()
    folder.stage.storage.orders.clear()
    folder.end()
    to_end(folder.begin())
    folder.check()


@pytest.mark.parametrize("window_s", [None, WINDOW_S])
def test_checkpoints_of_earlier_releases_go_on_and_not_back(folder: Folder, window_s: int | None) -> None:
    folder.add(17)
    run = folder.begin(folder.flow(files=Forgetful, window_s=window_s))
    folder.read(run)
    run.close()
    known = len([row for row in folder.stage.state("in", ENUMERATOR) if row["text"] is not None])
    assert known == (17 if window_s is None else WINDOW_S + 1)
    folder.add(2)
    run = folder.begin(folder.flow(3, window_s=window_s))
    folder.read(run)
    assert not [row for row in folder.stage.state("in", ENUMERATOR) if row["text"] is not None]
    assert folder.rows_of_log() >= known
    run.close()
    with pytest.raises(RestoreRefused, match=ENUMERATOR_LOG):
        folder.begin(folder.flow(files=Forgetful))
    folder.add(1)
    folder.end()
    to_end(folder.begin(folder.flow(window_s=window_s)))
    folder.check()


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
    folder: Folder, restart: bool, name: str, age_s: int, words: str | None
) -> None:
    folder.add(20)
    flow = folder.flow(window_s=WINDOW_S)
    run = folder.begin(flow)
    folder.read(run)
    folder.add(1)
    folder.read(run)
    if restart:
        run.close()
        run = folder.begin(flow)
    pq.write_table(pa.Table.from_batches([rows(77)]), folder.path / ".hidden")
    os.utime(folder.path / ".hidden", (0, NOON_S + age_s))
    (folder.path / ".hidden").rename(folder.path / name)
    if words is None:
        until(run, lambda: folder.out.values == [*range(21), 77])
        run.close()
        return
    with pytest.raises(RunDiscarded, match=words) as caught:
        to_end(run)
    assert is_for_good(caught.value.__cause__ or caught.value), "another try cannot help"
    run.close()
    assert folder.out.values == [*range(21)]


class Touched(PlayedFiles):
    """Somebody writes to each file after it was listed, as Spark begins to read it."""

    def load(self, addresses: Sequence[str]) -> list[list[pa.RecordBatch]]:
        found = super().load(addresses)
        for address in addresses:
            with Path(address.removeprefix("file:")).open("ab") as file:
                file.write(b"more")
        return found


def test_an_epoch_whose_files_change_while_they_are_read_publishes_nothing(folder: Folder) -> None:
    folder.add(3)
    run = folder.begin(folder.flow(files=Touched))
    with pytest.raises(RunDiscarded, match=r"File '0-00000\.parquet' of .* had .* bytes of .* and has") as caught:
        to_end(run)
    assert is_for_good(caught.value.__cause__ or caught.value), "another try cannot help"
    run.close()
    assert not folder.stage.newest_id


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
    folder: Folder, error: Exception, for_good: bool
) -> None:
    run = folder.begin(folder.flow(files=type("Gone", (Lost,), {"error": error})))
    with pytest.raises(RunDiscarded, match="source 'in' has no next range: ") as caught:
        to_end(run)
    assert is_for_good(caught.value.__cause__ or caught.value) is for_good
    run.close()


def test_a_job_that_begins_behind_a_position_remembers_its_files(folder: Folder) -> None:
    folder.add(8)
    offsets = folder.source()._offsets
    assert offsets is not None
    position: Any = {}
    while (then := offsets.latest(None, position)) != position:  # type: ignore[arg-type]
        position = then
    bootstrap(folder.stage.store, folder.flow(), {}, positions={"in": position})
    assert len(folder.stage.state("in", ENUMERATOR)) == 1 + 8
    folder.add(3)
    run = folder.begin()
    until(run, lambda: folder.out.values == [8, 9, 10])
    assert (len(folder.stage.state("in", ENUMERATOR)), folder.rows_of_log()) == (1, 11)
    run.close()
    folder.end()
    to_end(folder.begin())
    assert folder.out.values == [8, 9, 10]


def test_a_copy_and_a_checkpoint_that_was_gone_back_to_know_their_own_files(folder: Folder) -> None:
    folder.check_copy_and_rollback()
