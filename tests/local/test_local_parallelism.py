"""What parallelism counts at a start: what the program says, else what the checkpoint says."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.dataflow.graph.job_graph import parallelism_of
from stateformat.backends.local import LocalRun
from stateformat.errors import InvalidInput
from stateformat.model import Record
from tests.dataflow_fakes import Chunks, Pass
from tests.local_jobs import Bench, Count, Line, Tap, rows, to_end, until


class Spread(Line):
    """A source that does not end, a counter by key and a sink; ``job.steps``: what steps say."""

    def __init__(self, **options: Any) -> None:
        super().__init__([rows(n) for n in range(8)], op=Count, parallelism=None, **options)
        self.steps: dict[str, int] = {}

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> df.Dataflow:
        flow = df.Dataflow(job, parallelism=parallelism or self.parallelism)
        stream = flow.source(self.tap, uid="in", parallelism=self.steps.get("in"))
        counted = stream.key_by("key").apply(self.op, uid="op", parallelism=self.steps.get("op"))
        counted.apply(self.out, uid="out", chain=False, parallelism=self.steps.get("out"))
        return flow

    def after_a_checkpoint(self, **options: Any) -> Record:
        """The newest checkpoint, after a run that was left behind."""
        run = self.begin(**options)
        self.tap.let(0, 2)
        return self.bench.checkpoint(run)


def sizes(run: LocalRun | Record) -> dict[str, int]:
    graph = run.job.graph if isinstance(run, LocalRun) else run.graph
    return {operator.uid: operator.parallelism for operator in graph.operators}


CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "nothing is said, so the record counts": ({}, {"in": 1, "op": 3, "out": 2}),
    "of one operator alone": ({"options": {"per_operator": {"out": 4}}}, {"in": 1, "op": 3, "out": 4}),
    "of every operator": ({"options": {"parallelism": 2}}, {"in": 2, "op": 2, "out": 2}),
    "by the dataflow": ({"flow": 1}, {"in": 1, "op": 1, "out": 1}),
    "by a step": ({"steps": {"op": 2}}, {"in": 1, "op": 2, "out": 2}),
    "by a step and the options": ({"steps": {"op": 1}, "options": {"parallelism": 4}}, {"in": 4, "op": 1, "out": 4}),
}


@pytest.mark.parametrize(("said", "found"), CASES.values(), ids=CASES)
def test_what_the_program_says_counts_and_else_the_record(said: dict[str, Any], found: dict[str, int]) -> None:
    job = Spread()
    assert sizes(job.after_a_checkpoint(per_operator={"op": 3, "out": 2})) == {"in": 1, "op": 3, "out": 2}
    job.steps = said.get("steps", {})
    assert sizes(job.bench.begin(job.flow(said.get("flow")), **said.get("options", {}))) == found


def test_a_first_run_of_which_nothing_is_said_has_one_subtask_of_each_operator() -> None:
    assert set(sizes(Spread().begin()).values()) == {1}


def test_the_record_counts_for_a_job_that_begins_with_a_savepoint_and_for_restarts() -> None:
    job = Spread()
    job.after_a_checkpoint(parallelism=3)
    job.bench.options["start_from"] = job.bench.store.url
    job.bench = Bench("memory://moved", **job.bench.options)
    run = job.begin()
    assert set(sizes(run).values()) == {3}
    job.bench.checkpoint(run)
    assert set(sizes(job.begin()).values()) == {3}


def test_no_row_is_lost_at_the_records_parallelism() -> None:
    job = Spread()
    job.after_a_checkpoint(parallelism=3)
    job.tap.let(0)
    to_end(job.begin())
    assert job.out.seen == [2, 2, 2, 2]
    assert {operator.parallelism for operator in job.bench.newest.graph.operators} == {3}


def test_a_start_at_another_parallelism_says_so_once_and_a_start_at_the_records_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Spread()
    job.after_a_checkpoint(parallelism=3)
    caplog.set_level(logging.WARNING)
    job.begin()
    job.begin(parallelism=3)
    assert not caplog.messages
    job.begin(parallelism=2, per_operator={"op": 1})
    (said,) = caplog.messages
    assert said == (
        "job 'job': the program sets another parallelism than checkpoint 1, and the program takes precedence: "
        "'in', 'out' at 2, not 3; 'op' at 1, not 3"
    )


def test_a_new_step_takes_the_parallelism_that_the_silent_ones_share() -> None:
    job = Spread()
    record = job.after_a_checkpoint(parallelism=3)
    flow = job.flow()
    flow.source(Chunks(), uid="new").apply(Pass(), uid="other", parallelism=5)
    assert parallelism_of(flow, previous=record) == {"in": 3, "op": 3, "out": 3, "new": 3, "other": 5}
    mixed = job.after_a_checkpoint(per_operator={"op": 2})
    assert parallelism_of(flow, previous=mixed)["new"] == 1
    assert parallelism_of(flow, per_operator={"op": 3}, previous=mixed)["new"] == 3


class TwoInputs(Line):
    """A source that ends and one that does not, both forward into one operator."""

    def __init__(self) -> None:
        super().__init__([rows(1)], [rows(3)], parallelism=None, endless=True)
        self.ending = Tap([rows(2)])

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> df.Dataflow:
        flow = df.Dataflow(job, parallelism=parallelism)
        other = flow.source(self.ending, uid="ends").forward()
        flow.source(self.tap, uid="goes on").forward().apply(self.op, other, uid="op").apply(self.out, uid="out")
        return flow


def test_a_finished_operator_keeps_its_parallelism_behind_a_forward_edge_whatever_the_others_do() -> None:
    job = TwoInputs()
    run = job.begin(2)
    until(run, lambda: job.bench.checkpoint(run) and job.bench.status("ends")[0] == [0, 1])
    again = job.begin(per_operator={"goes on": 3, "op": 3, "out": 3})
    assert sizes(again) == {"ends": 2, "goes on": 3, "op": 3, "out": 3}
    with pytest.raises(InvalidInput, match="sends forward"):
        TwoInputs().begin(per_operator={"goes on": 3, "op": 3, "out": 3})
