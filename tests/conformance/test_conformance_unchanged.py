"""A job in which nothing moves publishes nothing, so its history stays; on both executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.runtime import VirtualClock
from stateformat.model import StopMode
from tests.conformance import Gated, Out, to_end, until
from tests.local_jobs import rows
from tests.played_stage import ON_BOTH, PlayedStage
from tests.timer_jobs import SECOND_US

PACE = {"local": {}, "spark": {"idle_us": SECOND_US // 2}}
LONG_US = 60 * SECOND_US


class Wide(df.Operator):
    """Passes rows on; its state is written whole each time, into a segment of its own."""

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [df.BroadcastState("wide", {"text": pa.string()})]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return inputs[0]

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        if not context.restored:
            context.entries("wide").append(pa.table({"text": [f"{n:x}" * 50 for n in range(1_000)]}))

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        return batch


class Idle:
    """A job that counts rows by key; its clock runs only where nothing is to do."""

    def __init__(self, stage: PlayedStage, executor: str, **options: Any) -> None:
        self.stage, self.out, self.clock = stage, Out(), VirtualClock(1_000)
        self.source = Gated(stage.directory / "in", [rows(n, key=n % 2, at=n) for n in range(6)], shut=True)
        flow = Dataflow("idle", parallelism=2)
        wide = flow.source(self.source, uid="in", event_time="at").apply(Wide(), uid="wide")
        counted = wide.key_by("key").aggregate({"n": ("*", "count")}, uid="counted")
        counted.apply(self.out, uid="out")
        how = {"checkpoint_interval_us": SECOND_US, "keep": 3, **PACE[executor], **options}
        self.run = stage.begin(executor, flow, clock=self.clock, **how)

    @property
    def newest(self) -> int:
        return max((record.checkpoint_id for record in self.stage.store.history()), default=0)

    def pass_time(self, us: int = LONG_US) -> int:
        """Let time pass; return the newest checkpoint."""
        end_us = self.clock.now_us() + us
        until(self.run, lambda: self.clock.now_us() >= end_us, 100_000, still=True)
        return self.newest

    def segments(self) -> int:
        return len(self.stage.store.storage.list("segments/"))


@ON_BOTH
def test_an_idle_job_publishes_nothing_and_leaves_nothing_behind(stage: PlayedStage, executor: str) -> None:
    job = Idle(stage, executor)
    job.source.let(0, 3)
    still, objects = job.pass_time(), job.segments()
    assert still >= 1
    assert job.pass_time() == still
    assert job.segments() <= objects + 4, "what was not published does not pile up"
    job.source.let(0, 4)
    assert still < job.pass_time() <= still + 2, "rows, and then what the sinks have committed"
    job.source.let(0)
    to_end(job.run)
    last = {row[0]: row[1] for row in job.out.seen}
    assert last == {0: 3, 1: 3}


@ON_BOTH
@pytest.mark.parametrize("what", ["savepoint", "stop", "drain"])
def test_an_idle_job_takes_a_checkpoint_for_who_asks(stage: PlayedStage, executor: str, what: str) -> None:
    job = Idle(stage, executor, requests_every_us=SECOND_US)
    job.source.let(0, 3)
    still = job.pass_time()
    store = stage.store
    if what == "savepoint":
        asked = store.request_savepoint().id
        until(job.run, lambda: store.request_answer(asked) is not None, 100_000, still=True)
        job.run.close()
    else:
        asked = store.request_stop(StopMode.DRAIN if what == "drain" else StopMode.NO_DRAIN).id
        assert to_end(job.run).stop is not None
    answer = store.request_answer(asked)
    assert answer is not None
    assert answer.checkpoint_id is not None
    assert answer.checkpoint_id > still
    assert answer.savepoint is not None


@ON_BOTH
def test_a_job_that_starts_again_publishes_once_and_goes_on_exactly(stage: PlayedStage, executor: str) -> None:
    job = Idle(stage, executor)
    job.source.let(0, 3)
    still = job.pass_time()
    job.run.close()
    again = Idle(stage, executor)
    again.source.let(0, 3)
    assert still < again.pass_time() <= still + 2
    again.source.let(0)
    to_end(again.run)
    assert {row[0]: row[1] for row in again.out.seen} == {0: 3, 1: 3}
