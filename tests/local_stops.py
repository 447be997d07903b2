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
from stateformat.stop_requests import StopOutcome
from tests.local_jobs import KEY, Bench, Count, Out, Tap, rows, settle, until

DRAIN, SUSPEND = StopMode.DRAIN, StopMode.NO_DRAIN
MODES = pytest.mark.parametrize("mode", [DRAIN, SUSPEND])


class Flushing(Count):
    """Counts by key; has a timer at the end of time, which emits nothing; passes rows on, and emits the counts at its end."""

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [ValueState("count", KEY, {"n": pa.int64()}), Timers("wake", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        super().process(batch, input)
        self.context.timers("wake").set_one((0,), MAX_WATERMARK)
        return batch

    def finish(self) -> Output:
        flushed = super().finish()
        return [rows(1000 * row["key"] + row["value"]) for batch in flushed or () for row in batch.to_pylist()]


class Job:
    """A source of two splits, a counter by key, a sink; each in tasks of its own."""

    def __init__(self, bench: Bench, *splits: Sequence[pa.RecordBatch], parallelism: int = 1, **how: Any) -> None:
        self.bench = bench
        self.tap = Tap(*(splits or ([rows(n) for n in range(8)],)), **how)
        self.out = Out(bench.log)
        self.parallelism = parallelism

    def flow(self) -> Dataflow:
        flow = Dataflow("job", parallelism=self.parallelism)
        stream = flow.source(self.tap, uid="in", event_time="at").key_by("key")
        stream.apply(Flushing(self.bench.log), uid="op", parallelism=1, chain=False).apply(
            self.out, uid="out", parallelism=1, chain=False
        )
        return flow

    def begin(self, chunks: int = 3, **options: Any) -> LocalRun:
        """Run until so many chunks of the first split are processed and all is still."""
        self.tap.let(0, chunks)
        run = self.bench.begin(self.flow(), **options)
        until(run, lambda: f"out/0 process 0: {chunks - 1}" in self.bench.log.calls)
        settle(run, 60)
        self.bench.log.clear()
        return run


def answer(bench: Bench, request: str) -> tuple[StopOutcome, str]:
    found = bench.store.stop_answer(request)
    assert found is not None
    return found.outcome, found.message


def asked(bench: Bench, run: LocalRun, mode: StopMode) -> str:
    """Ask in the store, so that there is an answer."""
    request = bench.store.request_stop(mode)
    run._stop_service.request_stop(request.id, mode, request.savepoint)
    return request.id


def saved_once(bench: Bench, job: Job) -> LocalRun:
    """A run with a checkpoint, and rows behind it."""
    run = job.begin(2)
    bench.checkpoint(run)
    job.tap.let(0, 3)
    until(run, lambda: "out/0 process 0: 2" in bench.log.calls)
    bench.log.clear()
    return run


def flushed(mode: StopMode) -> list[int]:
    return [0, 1, 1, 2, 1001, 2001] if mode is DRAIN else [0, 1, 2]
