"""Operators, sinks and coordinators hear of checkpoints that are given up, on both executors."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from stateformat.backends.dataflow import Dataflow, OperatorCoordinator
from stateformat.backends.dataflow.operators.row_steps import Filter
from stateformat.backends.local import JobFailed
from tests.conformance import EXECUTORS, Calls, Gated, Out, Told, batches, to_end, until
from tests.conformance_answers import Echoes
from tests.conformance_jobs import laps
from tests.local_jobs import ROWS
from tests.played_stage import PlayedStage

BOTH = pytest.mark.parametrize("executor", EXECUTORS)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedStage:
    """Where a job runs."""
    return PlayedStage(tmp_path, monkeypatch)


class Hears(Told):
    """Tells of outcomes too."""

    def checkpoint_complete(self) -> None:
        self.tell("complete")

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.tell(f"aborted {checkpoint_id}")


class HearsLap(Hears):
    """The body of a loop."""

    def process(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch:
        return batch.set_column(1, ROWS.field("value"), pc.subtract(batch["value"], 1))


class Keeper(Echoes):
    """A coordinator that tells of outcomes."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def snapshot(self) -> pa.Table:
        self.calls.tell("keeper", "snapshot")
        return super().snapshot()

    def checkpoint_complete(self) -> None:
        self.calls.tell("keeper", "complete")

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        self.calls.tell("keeper", f"aborted {checkpoint_id}")


class Kept(Hears):
    """Has a coordinator."""

    def coordinator(self) -> OperatorCoordinator:
        return Keeper(self.calls)


class HearingOut(Out):
    """A sink that tells of outcomes."""

    def checkpoint_complete(self) -> None:
        assert self.calls is not None
        self.calls.tell("out/0", "complete")

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        assert self.calls is not None
        self.calls.tell("out/0", f"aborted {checkpoint_id}")


class Line:
    """in -> one -> two in a chain, then kept, then the sink."""

    def __init__(self, stage: PlayedStage) -> None:
        self.source = Gated(stage.directory / "in", batches(range(8), 1), shut=True)
        self.out = HearingOut(stage.calls)
        self.flow = Dataflow("line", parallelism=1)
        one = self.flow.source(self.source, uid="in").apply(Hears(stage.calls), uid="one")
        kept = one.apply(Hears(stage.calls), uid="two").apply(Kept(stage.calls), uid="kept")
        kept.apply(self.out, uid="out", chain=False)


OUTCOMES = ("snapshot", "prepare", "complete", "aborted")


@BOTH
def test_a_checkpoint_that_cannot_be_published_is_aborted_for_all_that_took_part(
    stage: PlayedStage, executor: str
) -> None:
    line = Line(stage)
    run = stage.begin(executor, line.flow, tolerable_failures=1)
    line.source.let(0, 4)
    until(run, lambda: line.out.values == [0, 1, 2, 3])
    next_id = stage.newest_id + 1
    stage.calls.clear()
    stage.storage.order("write", "manifests/", "refuse")
    line.source.let(0, 6)
    until(run, lambda: line.out.values == [*range(6)])
    line.source.let(0)
    to_end(run)
    assert line.out.values == [*range(8)]
    for who in ("one/0", "two/0", "kept/0", "out/0", "keeper"):
        calls = stage.calls.of(who, *OUTCOMES)
        asked = "prepare" if who == "out/0" else "snapshot"
        at = next(n for n, call in enumerate(calls) if call.startswith("aborted"))
        assert calls[at] == f"aborted {stage_id(calls, at, next_id)}"
        assert calls[at - 1] == asked, "between the snapshot and the next"
        assert [call for call in calls if call.startswith("aborted")] == [calls[at]]
        assert calls[at + 1 : at + 3] in ([asked, "complete"], [asked])


def stage_id(calls: list[str], at: int, next_id: int) -> int:
    """The id of the checkpoint that was aborted: those that were complete before it count."""
    return next_id + calls[:at].count("complete") - (calls[0] == "complete")


@BOTH
def test_an_operator_that_has_failed_in_its_snapshot_hears_of_it_where_it_goes_on(
    stage: PlayedStage, executor: str
) -> None:
    line = Line(stage)
    line.source.let(0, 4)
    run = stage.begin(executor, line.flow, tolerable_failures=1)
    until(run, lambda: line.out.values == [0, 1, 2, 3])
    stage.calls.clear()
    stage.calls.fails("two/0 snapshot")
    line.source.let(0, 6)
    until(run, lambda: line.out.values == [*range(6)])
    line.source.let(0)
    to_end(run)
    assert line.out.values == [*range(8)]
    aborted = {who for who in ("one/0", "two/0", "kept/0", "keeper") if stage.calls.of(who, "aborted")}
    # On Spark the activation of a snapshot that failed has ended, and what comes after did take its
    # own.
    assert aborted >= ({"one/0", "two/0", "keeper"} if executor == "local" else {"kept/0", "keeper"})


@BOTH
def test_a_hook_that_raises_is_a_failure_of_the_job(stage: PlayedStage, executor: str) -> None:
    line = Line(stage)
    run = stage.begin(executor, line.flow, tolerable_failures=1)
    line.source.let(0)
    stage.storage.order("write", "manifests/", "refuse")
    stage.calls.fails("one/0 aborted")
    with pytest.raises(Exception, match="checkpoint_aborted of 'one', subtask 0, failed: Boom"):
        to_end(run)
    run.close()
    assert stage.run(executor, line.flow).restarts == 0
    assert line.out.values == [*range(8)]


@BOTH
def test_the_coordinator_that_raises_is_a_failure_of_the_job(stage: PlayedStage, executor: str) -> None:
    line = Line(stage)
    line.source.let(0)
    stage.storage.order("write", "manifests/", "refuse")
    stage.calls.fails("keeper aborted")
    with pytest.raises(JobFailed, match="the coordinator of operator 'kept' failed: keeper aborted 1"):
        stage.run(executor, line.flow, tolerable_failures=1, max_restarts=0)


@BOTH
def test_tasks_of_a_loop_hear_of_it_too(stage: PlayedStage, executor: str) -> None:
    source = Gated(stage.directory / "in", [laps([n], left=3) for n in range(4)], shut=True)
    out = Out()
    flow = Dataflow("laps", parallelism=1)
    loop = flow.loop(ROWS)
    head = flow.source(source, uid="in").key_by("key").apply(Hears(stage.calls), loop.key_by("key"), uid="head")
    lap = head.rebalance().apply(HearsLap(stage.calls), uid="body")
    loop.close(lap.apply(Filter(lambda batch: pc.greater(batch["value"], 0)), uid="again"))
    lap.apply(Filter(lambda batch: pc.less_equal(batch["value"], 0)), uid="done").apply(out, uid="out")
    stage.storage.order("write", "manifests/", "refuse")
    run = stage.begin(executor, flow, tolerable_failures=1)
    until(run, lambda: not stage.storage.orders and run.published)
    source.let_all()
    to_end(run)
    assert sorted(key for key, _, _ in out.seen.elements()) == [0, 1, 2, 3]
    for who in ("head/0", "body/0"):
        assert stage.calls.of(who, "snapshot", "aborted")[:3] == ["snapshot", "aborted 1", "snapshot"]


def test_a_task_that_was_not_asked_for_its_snapshot_hears_nothing(stage: PlayedStage) -> None:
    line = Line(stage)
    # The barrier is in the source's task when the time is over.
    run = stage.begin("local", line.flow, checkpoint_interval_us=1_000, timeout_us=1, tolerable_failures=10_000)
    until(run, lambda: len(stage.calls.of("one/0", "aborted")) > 5)
    assert len(stage.calls.of("kept/0", "aborted")) <= len(stage.calls.of("kept/0", "snapshot"))
    for who in ("one/0", "kept/0"):
        calls = stage.calls.of(who, "snapshot", "aborted", "complete")
        assert all(call == "snapshot" for call in calls[::2])
    run.close()
