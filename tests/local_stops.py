"""The job that is stopped in tests of stopping, and what they ask of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, Descriptor, Output, Timers, ValueState
from stateformat.backends.dataflow.events import MAX_WATERMARK
from stateformat.backends.local import LocalRun
from stateformat.model import StopMode
from stateformat.requests import RequestOutcome
from tests.local_jobs import KEY, Count, Line, rows, settle, until_told

DRAIN, SUSPEND = StopMode.DRAIN, StopMode.NO_DRAIN
MODES = pytest.mark.parametrize("mode", [DRAIN, SUSPEND])
UNDISTURBED = sorted([*range(8), 2, 1002, 2002, 3002])
"""The output of :class:`Job` at its own end: its rows, and the count of each key."""


class Flushing(Count):
    """Counts by key; has a timer at the end of time, which emits nothing; passes rows on, and emits
    the counts at its end.
    """

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [ValueState("count", KEY, {"n": pa.int64()}), Timers("wake", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        super().process(batch, input)
        self.context.timers("wake").set_one((0,), MAX_WATERMARK)
        return batch

    def finish(self) -> Output:
        flushed = super().finish()
        return [rows(1000 * row["key"] + row["value"]) for batch in flushed or () for row in batch.to_pylist()]


class Job(Line):
    """A source, a counter by key, a sink; the source may have several subtasks."""

    def __init__(self, *splits: Sequence[pa.RecordBatch], **how: Any) -> None:
        super().__init__(*(splits or ([rows(n) for n in range(8)],)), op=Flushing, **how)

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> Dataflow:
        flow = Dataflow(job, parallelism=parallelism or self.parallelism)
        stream = flow.source(self.tap, uid="in", event_time="at").key_by("key")
        op = stream.apply(self.op, uid="op", parallelism=1, chain=False)
        op.apply(self.out, uid="out", parallelism=1, chain=False)
        return flow

    def processed(self, chunks: int = 3, **options: Any) -> LocalRun:
        """A run that has processed so many chunks of the first split, and is still."""
        self.tap.let(0, chunks)
        run = self.begin(**options)
        until_told(run, self.log, f"out/0 process 0: {chunks - 1}")
        settle(run, 60)
        self.log.clear()
        return run

    def saved_once(self) -> LocalRun:
        """A run with a checkpoint, and rows behind it."""
        run = self.processed(2)
        self.bench.checkpoint(run)
        self.let(run, 3)
        self.log.clear()
        return run

    def asked(self, run: LocalRun, mode: StopMode) -> str:
        """Ask in the store, so that there is an answer."""
        request = self.bench.store.request_stop(mode)
        run._requests.request_stop(request.id, mode, request.savepoint)
        return request.id

    def answer(self, request: str) -> tuple[RequestOutcome, str]:
        found = self.bench.store.request_answer(request)
        assert found is not None
        return found.outcome, found.message


def flushed(mode: StopMode) -> list[int]:
    """The output of a run that was stopped after three chunks."""
    return [0, 1, 1, 2, 1001, 2001] if mode is DRAIN else [0, 1, 2]
