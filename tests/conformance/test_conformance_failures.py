"""What goes wrong in a job goes wrong alike on both executors, and comes right: user code, snapshots, the store, sinks, union state."""

from __future__ import annotations

import pytest

from stateformat.backends.dataflow import Dataflow
from stateformat.backends.dataflow.operators import Aggregate
from stateformat.backends.local import JobFailed
from stateformat.errors import CheckpointError
from stateformat.model import StopMode
from tests.conformance import Gated, Out, Told, batches, lose, to_end, until
from tests.conformance_jobs import Shares
from tests.played_stage import EVERYWHERE, PlayedStage, other

DRAIN, SUSPEND = StopMode.DRAIN, StopMode.NO_DRAIN


class Line:
    """in → op → out, each in tasks of its own, read by one reader. ``op`` counts by key, and tells at its end."""

    def __init__(self, stage: PlayedStage, count: int = 12, *, shut: bool = True) -> None:
        self.source = Gated(stage.directory / "in", batches(range(count), 1), shut=shut)
        self.calls = stage.calls
        self.out = Out(stage.calls)
        self.totals = Out()

    def flow(self, parallelism: int = 2) -> Dataflow:
        flow = Dataflow("line", parallelism=parallelism)
        read = flow.source(self.source, uid="in", parallelism=1)
        told = read.apply(Told(self.calls), uid="op", parallelism=1, chain=False)
        told.apply(self.out, uid="out", parallelism=1, chain=False)
        totals = told.key_by("key").apply(Aggregate("key", {"n": ("*", "count")}, emit="end"), uid="count")
        totals.apply(self.totals, uid="totals")
        return flow


@EVERYWHERE
def test_user_code_that_fails_once_makes_the_job_start_again_and_nothing_is_lost_or_twice(
    stage: PlayedStage, executor: str
) -> None:
    line = Line(stage, shut=False)
    stage.calls.fails("op/0 row 7")
    outcome = stage.run(executor, line.flow(), checkpoint_rows=5)
    assert outcome.restarts == 1
    assert line.out.values == [*range(12)]
    assert sorted(line.totals.seen.elements()) == [(key, 3) for key in range(4)]


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
def test_a_job_that_fails_too_often_says_where(stage: PlayedStage, executor: str, call: str, told: str) -> None:
    line = Line(stage, 4, shut=False)
    stage.calls.fails(call)
    with pytest.raises(JobFailed, match=told):
        stage.run(executor, line.flow(), max_restarts=0)


@EVERYWHERE
def test_a_snapshot_that_fails_is_taken_again_as_often_as_the_job_tolerates(stage: PlayedStage, executor: str) -> None:
    line = Line(stage)
    run = stage.begin(executor, line.flow(), tolerable_failures=1)
    line.source.let(0, 4)
    until(run, lambda: line.out.values == [0, 1, 2, 3])
    before = stage.newest_id
    stage.calls.fails("op/0 snapshot")
    line.source.let(0, 6)
    until(run, lambda: line.out.values == [*range(6)])  # Published, so the next failure is not the second in a row.
    stage.calls.fails("out/0 prepare")
    line.source.let(0, 8)
    until(run, lambda: line.out.values == [*range(8)])
    line.source.let(0)
    assert to_end(run).restarts == 0
    assert line.out.values == [*range(12)]
    assert stage.newest_id > before
    assert sorted(line.totals.seen.elements()) == [(key, 3) for key in range(4)]


@EVERYWHERE
def test_a_snapshot_that_the_job_does_not_tolerate_makes_it_start_again(stage: PlayedStage, executor: str) -> None:
    line = Line(stage, shut=False)
    stage.calls.fails("op/0 snapshot")
    assert stage.run(executor, line.flow(), checkpoint_rows=5).restarts == 1
    assert line.out.values == [*range(12)]


@EVERYWHERE
def test_a_store_that_fails_while_a_checkpoint_is_published_costs_that_checkpoint_and_no_output(
    stage: PlayedStage, executor: str
) -> None:
    line = Line(stage)
    run = stage.begin(executor, line.flow(), tolerable_failures=2)
    line.source.let(0, 4)
    until(run, lambda: line.out.values == [0, 1, 2, 3])
    line.source.let(0, 8)
    stage.storage.order("write", "manifests/", "refuse")
    stage.storage.order("write", "manifests/", "refuse")
    until(run, lambda: not stage.storage.orders)
    until(run, lambda: line.out.values == [*range(8)])
    line.source.let(0)
    assert to_end(run).restarts == 0
    assert line.out.values == [*range(12)]
    assert sorted(line.totals.seen.elements()) == [(key, 3) for key in range(4)]


@EVERYWHERE
@pytest.mark.parametrize("what", ["refuse", "lose"])
def test_a_publication_of_which_nobody_knows_the_outcome_ends_the_run_and_is_settled_by_the_next(
    stage: PlayedStage, executor: str, what: str
) -> None:
    line = Line(stage)
    line.source.let(0, 4)
    run = stage.begin(executor, line.flow())
    until(run, lambda: line.out.values == [0, 1, 2, 3])
    line.source.let(0, 8)
    stage.storage.order("create", "checkpoints/", what)
    for verb in ("create", "read", "size", "list"):
        for _ in range(100):
            stage.storage.order(verb, "checkpoints/", "refuse")
    with pytest.raises(CheckpointError):
        to_end(run)
    run.close()
    stage.storage.orders.clear()
    assert line.out.values == [0, 1, 2, 3]
    line.source.let(0)
    assert stage.run(executor, line.flow()).restarts == 0
    assert line.out.values == [*range(12)]


@EVERYWHERE
def test_what_a_sink_puts_off_is_committed_later_with_the_end_of_the_job_at_last(
    stage: PlayedStage, executor: str
) -> None:
    line = Line(stage)
    line.out.later = [1, 1, 0, 1, 1]
    run = stage.begin(executor, line.flow())
    line.source.let(0, 4)
    until(run, lambda: line.out.values == [0, 1, 2, 3])
    line.source.let(0)
    to_end(run)
    assert line.out.values == [*range(12)]
    assert len(line.out.permits) >= 6


@EVERYWHERE
def test_what_was_prepared_and_not_committed_when_the_driver_was_lost_is_committed_by_the_other(
    stage: PlayedStage, executor: str
) -> None:
    line = Line(stage)
    line.source.let(0, 4)
    line.out.later = [99] * 50
    lost = stage.begin(executor, line.flow())
    until(lost, lambda: lost.rows_read == 4 and lost.published >= 2)
    lost.close()
    assert line.out.values == []
    assert not line.out.seen
    line.out.later = []
    line.source.let(0)
    stage.run(other(executor), line.flow(3))
    assert line.out.values == [*range(12)]


def with_union(stage: PlayedStage, out: Out, parallelism: int) -> tuple[Gated, Dataflow]:
    source = Gated(stage.directory / "in", *[batches(range(first, 60, 3), 4) for first in range(3)], shut=True)
    flow = Dataflow("union", parallelism=parallelism)
    read = flow.source(source, uid="in")
    read.apply(Shares(stage.calls), uid="op", chain=False).apply(out, uid="out", chain=False)
    return source, flow


def counted(out: Out) -> dict[int, int]:
    """By part, how many rows were counted by all."""
    found: dict[int, int] = {}
    for key, value, _ in out.seen.elements():
        found[key] = found.get(key, 0) + value
    return found


COUNTED = {part: sum(1 for value in range(60) if value % 8 == part) for part in range(8)}


@EVERYWHERE
def test_union_state_is_shared_out_at_a_restore_and_no_checkpoint_is_taken_while_some_have_finished(
    stage: PlayedStage, executor: str
) -> None:
    out = Out()
    source, flow = with_union(stage, out, 3)
    for split, few in enumerate((2, 3, 1)):
        source.let(split, few)
    run = stage.begin(executor, flow)
    until(run, lambda: run.rows_read == 24)
    lose(run, published=run.published + 1)
    assert sum(row["n"] for row in stage.state("op", "counts")) == 24

    run = stage.begin(executor, flow, parallelism=2)
    until(run, lambda: run.published >= 2)
    newest = stage.newest_id
    # One of the two ends, long before the other.
    source.let(0)
    source.let(1)
    until(run, lambda: "op/0 finish" in stage.calls.calls)
    newest = stage.newest_id
    for _ in range(2000 if executor == "local" else 4):
        run.step()
    assert stage.newest_id <= newest + 1
    assert {status for status, *_ in stage.statuses().values()} == {"running"}
    assert counted(out) == {}
    source.let(2)
    assert to_end(run).restarts == 0
    assert counted(out) == COUNTED


@EVERYWHERE
def test_a_stop_without_drain_is_refused_while_union_state_has_ended_in_part_and_the_job_goes_on(
    stage: PlayedStage, executor: str
) -> None:
    out = Out()
    source, flow = with_union(stage, out, 3)
    source.let(0)
    run = stage.begin(executor, flow, requests_every_us=None)
    until(run, lambda: "op/0 finish" in stage.calls.calls and run.rows_read == 20)
    run.progress()
    run.request_stop(SUSPEND)
    until(run, lambda: any("the stop has failed" in said for said in run.progress().warnings))
    source.let_all()
    assert to_end(run).stop is None
    assert counted(out) == COUNTED


@EVERYWHERE
def test_state_that_is_given_up_begins_anew_and_all_else_goes_on(stage: PlayedStage, executor: str) -> None:
    line = Line(stage)
    line.source.let(0, 8)
    run = stage.begin(executor, line.flow(), requests_every_us=None)
    until(run, lambda: run.rows_read == 8)
    run.request_stop(SUSPEND)
    to_end(run)
    line.source.let(0)
    stage.run(executor, line.flow(3), drop=["count/totals"], resume=True)
    assert line.out.values == [*range(12)]
    assert sorted(line.totals.seen.elements()) == [(key, 1) for key in range(4)]


@EVERYWHERE
def test_a_job_that_was_stopped_stays_so_until_it_is_told_to_go_on(stage: PlayedStage, executor: str) -> None:
    line = Line(stage)
    line.source.let(0, 4)
    run = stage.begin(executor, line.flow(), requests_every_us=None)
    until(run, lambda: run.rows_read == 4)
    run.request_stop(SUSPEND)
    stopped = to_end(run)
    line.source.let(0)
    again = stage.run(executor, line.flow())
    assert (again.stop, again.checkpoint_id) == (stopped.stop, stopped.checkpoint_id)
    assert again.sentence.endswith("Run it with resume=True to go on")
    assert line.out.values == [0, 1, 2, 3]
    assert stage.run(executor, line.flow(), resume=True).stop is None
    assert line.out.values == [*range(12)]
