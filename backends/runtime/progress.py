"""What a running job shows of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, TextIO

from ..dataflow.events import MAX_WATERMARK, MIN_WATERMARK


@dataclass(frozen=True)
class Progress:
    """A job at one moment.

    ``rows_read``: by all sources in this run. ``checkpoint_id``: the newest published, None before the first. ``state_rows`` and
    ``state_bytes``: what it holds. ``running`` and ``finished``: tasks. ``watermarks``: by uid of each source the least of its tasks,
    µs; None for a source without event time, or before any is known. ``watermark``: the least of all sources with event time; None
    while one of them is not known, or where there is none. ``late_rows``: what operators have dropped as late since the job began.
    ``elapsed_us``: by the executor's clock, since the run began. ``warnings``: what came since the last time.
    """

    job_id: str
    elapsed_us: int
    rows_read: int
    checkpoint_id: int | None
    state_rows: int
    state_bytes: int
    running: int
    finished: int
    watermark: int | None
    watermarks: Mapping[str, int | None] = field(default_factory=dict)
    late_rows: int = 0
    warnings: tuple[str, ...] = ()

    def line(self) -> str:
        """In one line."""
        checkpoint = "no checkpoint yet" if self.checkpoint_id is None else f"checkpoint {self.checkpoint_id}"
        ended = f", {self.finished} finished" if self.finished else ""
        return (
            f"{self.job_id}: {self.elapsed_us / 1e6:.1f} s, {self.rows_read:,} rows read, {checkpoint} "
            f"({self.state_rows:,} rows, {self.state_bytes / 1e6:.1f} MB), {self.running} tasks run{ended}{self._late}"
        )

    @property
    def _late(self) -> str:
        return f", {late_words(self.late_rows)}" if self.late_rows else ""

    @property
    def has_watermark(self) -> bool:
        """Whether event time is known and has not ended."""
        return self.watermark is not None and MIN_WATERMARK < self.watermark < MAX_WATERMARK


@dataclass(frozen=True)
class EpochProgress(Progress):
    """A job behind an epoch that Spark has run.

    ``epoch``: its number in this run, from 1. ``rows_epoch``: rows that sources have read in it. ``sent_bytes``: frames between tasks.
    ``written_bytes``: segments of its checkpoint that are new. ``kept``, ``caught_up``, ``restored``: how many tasks found their state in
    their worker, found an older one there, or read it. ``tries``: how often the epoch was run. Durations in µs: ``planning_us`` before
    Spark's job, ``spark_us``, ``publish_us``, ``commit_us`` of sinks.
    """

    epoch: int = 0
    rows_epoch: int = 0
    sent_bytes: int = 0
    written_bytes: int = 0
    kept: int = 0
    caught_up: int = 0
    restored: int = 0
    tries: int = 1
    planning_us: int = 0
    spark_us: int = 0
    publish_us: int = 0
    commit_us: int = 0

    def line(self) -> str:
        """In one line."""
        checkpoint = "no checkpoint" if self.checkpoint_id is None else f"checkpoint {self.checkpoint_id}"
        ended = f", {self.finished} finished" if self.finished else ""
        tasks = "task" if self.running == 1 else "tasks"
        took = (self.planning_us + self.spark_us + self.publish_us + self.commit_us) / 1e6
        return (
            f"{self.job_id}: epoch {self.epoch}, {self.rows_epoch:,} rows in {took:.1f} s, {checkpoint} "
            f"({self.state_rows:,} rows, +{_size(self.written_bytes)}), {self.running} {tasks}{ended}{self._late}"
        )


def late_words(count: int) -> str:
    """Rows that were dropped as late, in words."""
    return f"{count:,} late {'row' if count == 1 else 'rows'} dropped"


def _size(size_bytes: int) -> str:
    """As a person reads it."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} B"


class ProgressLog:
    """Writes progress as JSON lines, an object for each, with all fields (docs/json.md)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, progress: Progress) -> None:
        """Write it."""
        self._stream.write(json.dumps({"kind": type(progress).__name__, **asdict(progress)}) + "\n")
        self._stream.flush()


COLUMNS: Final = 78
"""So long is a line on a terminal at most."""


class ProgressLine:
    """Writes progress to a terminal: one line that changes, and warnings above it. Elsewhere a line per checkpoint."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._shown: int | None = None

    def __call__(self, progress: Progress) -> None:
        """Show it."""
        for warning in progress.warnings:
            self._stream.write(("\r\x1b[K" if self._live else "") + f"warning: {warning}\n")
        if self._live:
            line = progress.line()
            self._stream.write("\r\x1b[K" + (line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"))
        elif progress.checkpoint_id != self._shown:
            self._stream.write(progress.line() + "\n")
        self._shown = progress.checkpoint_id
        self._stream.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
