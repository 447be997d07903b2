"""Failures of a job are the same on both executors, and the job recovers from them.

What a failure has cost is shown in the progress, the log, the records and `ckpt watch`. A job in
which nothing moves publishes nothing, so its history stays; on both executors.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.local import JobFailed
from stateformat.backends.runtime import JobOutcome, Progress, VirtualClock
from stateformat.backends.runtime.reports import FailureCost, cost_in
from stateformat.errors import CheckpointError
from stateformat.model import StopMode
from tests.ckpt.ckpt_runs import run as ckpt
from tests.worlds.jobs import SECOND_US, Line, Shares
from tests.worlds.local import rows
from tests.worlds.stages import (
    EVERYWHERE,
    ON_BOTH,
    Gated,
    Out,
    PlayedStage,
    batches,
    lose,
    other,
    stopped,
    to_end,
    until,
)


@pytest.fixture
def line(stage: PlayedStage, executor: str) -> Line:
    """Return the job."""
    return Line(stage, executor)


@EVERYWHERE
@pytest.mark.parametrize("call", ["op/0 row 7", "op/0 snapshot"])
def test_what_fails_once_makes_the_job_start_again_and_nothing_is_lost_or_twice(line: Line, call: str) -> None:
    line.calls.fails(call)
    assert line.run(checkpoint_rows=5).restarts == 1
    line.check()


@EVERYWHERE
@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("op/0 open", "open of 'op', subtask 0, failed: Boom: op/0 open"),
        ("op/0 row 3", "process of 'op', subtask 0, failed: Boom: op/0 row 3"),
        ("op/0 finish", "finish of 'op', subtask 0, failed: Boom: op/0 finish"),
        ("out commit", "commit of 'out' failed: Boom: out commit 1"),
    ],
)
def test_a_job_that_fails_too_often_says_where(line: Line, call: str, told: str) -> None:
    line.calls.fails(call)
    with pytest.raises(JobFailed, match=told):
        line.run(max_restarts=0)


@EVERYWHERE
def test_a_snapshot_that_fails_is_taken_again_as_often_as_the_job_tolerates(line: Line) -> None:
    run = line.begin(tolerable_failures=1)
    line.read(run, 4)
    before = line.stage.newest_id
    line.calls.fails("op/0 snapshot")
    line.read(run, 6)  # Published, so the next failure is not the second in a row.
    line.calls.fails("out/0 prepare")
    line.read(run, 8)
    line.end(run)
    line.check()
    assert line.stage.newest_id > before


@EVERYWHERE
def test_a_store_that_fails_while_a_checkpoint_is_published_costs_that_checkpoint_and_no_output(line: Line) -> None:
    run = line.begin(tolerable_failures=2)
    line.read(run, 4)
    for _ in range(2):
        line.stage.storage.order("write", "manifests/", "refuse")
    line.source.let(0, 8)
    until(run, lambda: not line.stage.storage.orders)
    line.read(run, 8)
    line.end(run)
    line.check()


@EVERYWHERE
@pytest.mark.parametrize("what", ["refuse", "lose"])
def test_a_publication_of_unknown_outcome_ends_the_run_and_is_settled_by_the_next(line: Line, what: str) -> None:
    run, storage = line.begin(), line.stage.storage
    line.read(run, 4)
    line.source.let(0, 8)
    storage.order("create", "checkpoints/", what)
    for verb in ("create", "read", "size", "list"):
        for _ in range(100):
            storage.order(verb, "checkpoints/", "refuse")
    with pytest.raises(CheckpointError):
        to_end(run)
    run.close()
    storage.orders.clear()
    assert line.out.values == [0, 1, 2, 3]
    assert line.run().restarts == 0
    line.check()


@EVERYWHERE
def test_what_a_sink_puts_off_is_committed_later_with_the_end_of_the_job_at_last(line: Line) -> None:
    line.out.later = [1, 1, 0, 1, 1]
    run = line.begin()
    line.read(run, 4)
    line.end(run)
    line.check()
    assert len(line.out.permits) >= 6


@EVERYWHERE
def test_what_was_prepared_and_not_committed_when_the_driver_was_lost_is_committed_by_the_other(line: Line) -> None:
    line.source.let(0, 4)
    line.out.later = [99] * 50
    lost = line.begin()
    until(lost, lambda: lost.rows_read == 4 and lost.published >= 2)
    lost.close()
    assert not line.out.seen
    line.out.later = []
    line.executor = other(line.executor)
    line.run(parallelism=3)
    line.check()


class Union:
    """A job with union state and three splits; sums what all subtasks have counted."""

    def __init__(self, stage: PlayedStage) -> None:
        splits = [batches(range(first, 60, 3), 4) for first in range(3)]
        self.source, self.out = Gated(stage.directory / "in", *splits, shut=True), Out()
        self.flow = Dataflow("union", parallelism=3)
        read = self.flow.source(self.source, uid="in")
        read.apply(Shares(stage.calls), uid="op", chain=False).apply(self.out, uid="out", chain=False)

    @property
    def counted(self) -> Counter[int]:
        """How many rows all subtasks have counted, by part."""
        found: Counter[int] = Counter()
        for part, count, _ in self.out.seen.elements():
            found[part] += count
        return found


COUNTED = Counter(value % 8 for value in range(60))


@EVERYWHERE
def test_union_state_is_shared_out_and_holds_checkpoints_up_while_some_have_ended(
    stage: PlayedStage, executor: str
) -> None:
    job = Union(stage)
    for split, few in enumerate((2, 3, 1)):
        job.source.let(split, few)
    run = stage.begin(executor, job.flow)
    until(run, lambda: run.rows_read == 24)
    lose(run, published=run.published + 1)
    assert sum(row["n"] for row in stage.state("op", "counts")) == 24

    run = stage.begin(executor, job.flow, parallelism=2)
    until(run, lambda: run.published >= 2)
    # One of the two ends, long before the other.
    job.source.let(0)
    job.source.let(1)
    until(run, lambda: "op/0 finish" in stage.calls.calls)
    newest = stage.newest_id
    for _ in range(2000 if executor == "local" else 4):
        run.step()
    assert stage.newest_id <= newest + 1
    assert {status for status, *_ in stage.statuses().values()} == {"running"}
    assert not job.counted
    job.source.let(2)
    assert to_end(run).restarts == 0
    assert job.counted == COUNTED


@EVERYWHERE
@pytest.mark.parametrize("mode", list(StopMode))
def test_a_stop_of_union_state_that_has_ended_in_part_is_refused_or_drains_it(
    stage: PlayedStage, executor: str, mode: StopMode
) -> None:
    job = Union(stage)
    job.source.let(0)
    run = stage.begin(executor, job.flow, requests_every_us=None)
    until(run, lambda: "op/0 finish" in stage.calls.calls and run.rows_read == 20)
    run.progress()
    run.request_stop(mode)
    if mode is StopMode.DRAIN:
        assert to_end(run).stop is not None
        assert job.counted == Counter(value % 8 for value in range(0, 60, 3))
        return
    refused = "the stop has failed, and the job goes on: some subtasks of operator 'op'"
    until(run, lambda: any(said.startswith(refused) for said in run.progress().warnings))
    job.source.let_all()
    assert to_end(run).stop is None
    assert job.counted == COUNTED


@EVERYWHERE
def test_state_that_is_given_up_begins_anew_and_all_else_goes_on(line: Line) -> None:
    line.source.let(0, 8)
    run = line.begin(requests_every_us=None)
    stopped(run, StopMode.NO_DRAIN, lambda: run.rows_read == 8)
    line.run(parallelism=3, drop=["count/totals"], resume=True)
    line.check(per_key=1)


@EVERYWHERE
def test_a_job_that_was_stopped_stays_so_until_it_is_told_to_go_on(line: Line) -> None:
    line.source.let(0, 4)
    run = line.begin(requests_every_us=None)
    outcome = stopped(run, StopMode.NO_DRAIN, lambda: run.rows_read == 4)
    again = line.run()
    assert (again.stop, again.checkpoint_id) == (outcome.stop, outcome.checkpoint_id)
    assert again.sentence.endswith("Run it with resume=True to go on")
    assert line.out.values == [0, 1, 2, 3]
    assert line.run(resume=True).stop is None
    line.check()


@EVERYWHERE
def test_a_failure_costs_the_time_and_the_rows_behind_the_newest_checkpoint(
    stage: PlayedStage, executor: str, caplog: pytest.LogCaptureFixture
) -> None:
    line = Line(stage, executor)
    shown: list[Progress] = []
    stage.calls.fails("op/0 row 7")
    pace: dict[str, Any] = {"checkpoint_rows": 4} if executor != "local" else {"checkpoint_interval_us": 30_000}
    with caplog.at_level(logging.INFO, "stateformat"):
        outcome = line.run(progress=shown.append, keep=None, **pace)
    line.check()
    assert isinstance(outcome, JobOutcome)
    assert outcome.restarts == 1
    cost = FailureCost(shown[-1].failures, shown[-1].lost_us, shown[-1].rows_again)
    assert cost.failures == 1
    assert cost.lost_us > 0 or executor == "spark"  # Spark's clock stands still here.
    assert 0 < cost.rows_again <= 12
    said = f"since it was started, {cost.words}"
    assert [record.message for record in caplog.records if "the job goes on from" in record.message] == [
        record.message for record in caplog.records if record.message.endswith(said)
    ]
    assert any(news.endswith(said) for progress in shown for news in progress.news)
    assert shown[-1].line().endswith(cost.words)
    records = stage.store.history()
    assert cost_in(dict(records[0].properties)).rows_again == cost.rows_again
    watched = ckpt("watch", stage.directory / "store", "--until-end", "--format", "json").out.splitlines()
    failed = [event for event in map(json.loads, watched) if event["event"] == "failed"]
    assert [event["message"].partition(" and ")[2] for event in failed] == [cost.words.partition(" and ")[2]]


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (FailureCost(), ""),
        (FailureCost(1, 3_400_000, 1), "1 failure cost 3.4 s and 1 row read again"),
        (FailureCost(1200, 50_000, 12_000), "1,200 failures cost 0.1 s and 12,000 rows read again"),
    ],
)
def test_the_cost_in_words_and_back_from_a_record(cost: FailureCost, words: str) -> None:
    assert cost.words == words
    assert cost_in(cost.properties) == cost


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", '{"failures":1}', "[" * 100_000),
        *(
            f'{{"failures":{told},"lost_us":1,"rows_again":1}}'
            for told in ('"x"', "Infinity", "true", "-1", "1e3", 1 << 60)
        ),
    ],
)
def test_a_record_that_tells_nonsense_tells_nothing(text: str) -> None:
    assert cost_in({"stateformat.failures": text}) == FailureCost()


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
