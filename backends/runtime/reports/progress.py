"""The progress that a running job shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, TextIO

from stateformat.graph import brief

from .cost import FailureCost


@dataclass(frozen=True)
class Progress:
    """The state of a job at one moment."""

    job_id: str
    elapsed_us: int
    """The time since the run began, by the executor's clock."""
    rows_read: int
    """The rows that all sources have read in this run."""
    checkpoint_id: int | None
    """The newest published checkpoint; None before the first."""
    state_rows: int
    """The rows of state in that checkpoint."""
    state_bytes: int
    running: int
    """The number of running tasks."""
    finished: int
    """The number of finished tasks."""
    watermark: int | None
    """The lowest of all sources with event time, µs; None while one is unknown, or without any."""
    watermarks: Mapping[str, int | None] = field(default_factory=dict)
    """By uid of a source, the lowest watermark of its tasks, µs.

    None without event time, or before it is known.
    """
    late_rows: int = 0
    """The late rows that operators have dropped since the job began."""
    warnings: tuple[str, ...] = ()
    """The warnings since the last progress."""
    news: tuple[str, ...] = ()
    """What happened to the job since the last progress, such as a rescale."""
    parallelism: int = 0
    """The highest of all operators."""
    failures: int = 0
    """Runs and attempts of epochs that failed since the program started."""
    lost_us: int = 0
    """The time lost by these failures."""
    rows_again: int = 0
    """Rows that had to be read again because of them, as far as known."""

    def line(self) -> str:
        checkpoint = "no checkpoint yet" if self.checkpoint_id is None else f"checkpoint {self.checkpoint_id}"
        return (
            f"{self.job_id}: {self.elapsed_us / 1e6:.1f} s, {self.rows_read:,} rows read, {checkpoint} "
            f"({self.state_rows:,} rows, {self.state_bytes / 1e6:.1f} MB), {self.running} tasks run{self._rest}"
        )

    @property
    def _rest(self) -> str:
        ended = f", {self.finished} finished" if self.finished else ""
        cost = FailureCost(self.failures, self.lost_us, self.rows_again).words
        late = late_words(self.late_rows) if self.late_rows else ""
        return ended + "".join(f", {each}" for each in (late, cost) if each)


@dataclass(frozen=True)
class EpochProgress(Progress):
    """A job after an epoch on Spark."""

    epoch: int = 0
    """The number of the epoch in this run, from 1."""
    rows_epoch: int = 0
    """Rows that sources have read in it."""
    sent_bytes: int = 0
    """Bytes of frames between tasks."""
    written_bytes: int = 0
    """Bytes of new segments in its checkpoint."""
    kept: int = 0
    """Tasks that found their state in their worker."""
    caught_up: int = 0
    """Tasks that found an older state there."""
    restored: int = 0
    """Tasks that read their state."""
    tries: int = 1
    """How often the epoch was run."""
    planning_us: int = 0
    """Before Spark's job."""
    spark_us: int = 0
    publish_us: int = 0
    commit_us: int = 0

    def line(self) -> str:
        checkpoint = "no checkpoint" if self.checkpoint_id is None else f"checkpoint {self.checkpoint_id}"
        tasks = "task" if self.running == 1 else "tasks"
        took = (self.planning_us + self.spark_us + self.publish_us + self.commit_us) / 1e6
        return (
            f"{self.job_id}: epoch {self.epoch}, {self.rows_epoch:,} rows in {took:.1f} s, {checkpoint} "
            f"({self.state_rows:,} rows, +{_size(self.written_bytes)}), {self.running} {tasks}{self._rest}"
        )


def late_words(count: int) -> str:
    """Return the number of late rows in words."""
    return f"{count:,} late {'row' if count == 1 else 'rows'} dropped"


def _size(size_bytes: int) -> str:
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"


class ProgressLog:
    """Writes progress as JSON lines with all fields (docs/json.md)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, progress: Progress) -> None:
        self._stream.write(json.dumps({"kind": type(progress).__name__, **asdict(progress)}) + "\n")
        self._stream.flush()


COLUMNS: Final = 78
"""The longest line on a terminal."""


class ProgressLine:
    """Writes progress: on a terminal one changing line, elsewhere a line per checkpoint."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._shown: int | None = None

    def __repr__(self) -> str:
        return brief(self)

    def __call__(self, progress: Progress) -> None:
        start = "\r\x1b[K" if self._live else ""
        for warning in progress.warnings:
            self._stream.write(f"{start}warning: {warning}\n")
        for sentence in progress.news:
            self._stream.write(f"{start}{progress.job_id}: {sentence}\n")
        if self._live:
            line = progress.line()
            self._stream.write("\r\x1b[K" + (line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"))
        elif progress.checkpoint_id != self._shown:
            self._stream.write(progress.line() + "\n")
        self._shown = progress.checkpoint_id
        self._stream.flush()

    def end(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
