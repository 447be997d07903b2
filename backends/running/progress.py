"""What a running job shows of itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO

from backends.dataflow.events import MAX_WATERMARK, MIN_WATERMARK


@dataclass(frozen=True)
class Progress:
    """A job at one moment.

    ``rows_read``: by all sources in this run. ``checkpoint_id``: the newest published, None before the first. ``state_rows`` and
    ``state_bytes``: what it holds. ``running`` and ``finished``: tasks. ``watermark``: the least of all tasks that run, µs.
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
    watermark: int
    warnings: tuple[str, ...] = ()

    def line(self) -> str:
        """In one line."""
        checkpoint = "no checkpoint yet" if self.checkpoint_id is None else f"checkpoint {self.checkpoint_id}"
        ended = f", {self.finished} finished" if self.finished else ""
        return (
            f"{self.job_id}: {self.elapsed_us / 1e6:.1f} s, {self.rows_read:,} rows read, {checkpoint} "
            f"({self.state_rows:,} rows, {self.state_bytes / 1e6:.1f} MB), {self.running} tasks run{ended}"
        )

    @property
    def has_watermark(self) -> bool:
        """Whether event time is known and has not ended."""
        return MIN_WATERMARK < self.watermark < MAX_WATERMARK


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
            self._stream.write("\r\x1b[K" + progress.line()[:78])
        elif progress.checkpoint_id != self._shown:
            self._stream.write(progress.line() + "\n")
        self._shown = progress.checkpoint_id
        self._stream.flush()

    def end(self) -> None:
        """Leave the line."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
