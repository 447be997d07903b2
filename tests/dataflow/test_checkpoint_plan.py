"""The checkpoint plan, against the rule taken literally: pairs of tasks, no arrays, no shortcuts.

Operators, sinks and coordinators hear of checkpoints that are given up, on both executors.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings, strategies as st

from stateformat.backends.dataflow import Dataflow, OperatorCoordinator, events as ev
from stateformat.backends.dataflow.compile import loops_of
from stateformat.backends.dataflow.operators.row_steps import Filter
from stateformat.backends.dataflow.task_tracker import make_plan
from stateformat.backends.local import JobFailed
from stateformat.errors import InvalidInput
from stateformat.graph import Partitioner
from tests.worlds.dataflow import TinyJob, tiny_job
from tests.worlds.jobs import Echoes, laps
from tests.worlds.local import ROWS
from tests.worlds.stages import EXECUTORS, Calls, Gated, Out, PlayedStage, Told, batches, to_end, until

EVERY = {"forward", "rescale", "rebalance", "hash", "broadcast"}


def tasks(*names: str) -> set[ev.TaskId]:
    """``"a0"`` is subtask 0 of a."""
    return {ev.TaskId(name[0], int(name[1:])) for name in names}


def plan_of(job: TinyJob, *ended: str) -> ev.CheckpointPlan:
    running = {vertex.id: np.ones(vertex.parallelism, np.bool_) for vertex in job.vertices}
    for task in tasks(*ended):
        running[task.vertex][task.subtask] = False
    return make_plan(job, running)


def connected(partitioner: Partitioner, producer: int, upstream: int, consumer: int, downstream: int) -> bool:
    """Whether two subtasks are joined, by the two rules of POINTWISE as they are written down, one
    from each side.
    """
    if partitioner.all_to_all:
        return True
    if upstream >= downstream:
        return consumer * upstream // downstream <= producer < (consumer + 1) * upstream // downstream
    return -(-producer * downstream // upstream) <= consumer < -(-(producer + 1) * downstream // upstream)


def literal_plan(job: TinyJob, running: set[ev.TaskId]) -> tuple[set[ev.TaskId], set[ev.TaskId], set[str]]:
    """Trigger, finished and fully finished."""
    parallelism = {vertex.id: vertex.parallelism for vertex in job.vertices}
    fed = {
        ev.TaskId(vertex.id, consumer)
        for vertex in job.vertices
        for edge in vertex.inputs
        for consumer in range(vertex.parallelism)
        for source, producer in running
        if source == edge.source
        and connected(edge.partitioner, producer, parallelism[source], consumer, vertex.parallelism)
    }
    return running - fed, set(job.tasks) - running, set(parallelism) - {task.vertex for task in running}


def test_when_all_run_the_sources_are_triggered_and_all_are_waited_for() -> None:
    job = tiny_job({"a": 2, "b": 3, "c": 3}, "a hash b", "b forward c")
    plan = plan_of(job)
    assert plan.trigger == tasks("a0", "a1")
    assert plan.wait == set(job.tasks)
    assert plan.finished == set()
    assert plan.fully_finished == frozenset()


MIXED = tiny_job({"a": 2, "b": 2, "c": 2}, "a forward c", "b broadcast c")
TWO_INPUTS = tiny_job({"a": 2, "b": 2, "c": 2}, "a forward c", "b forward c")
LOOP = tiny_job({"a": 1, "h": 2, "t": 2}, "a hash h", "h forward t", "t feedback h")
CHAINS = tiny_job({"a+x": 2, "b+y": 2, "c": 2}, "x forward b", "y forward c")


@pytest.mark.parametrize(
    ("job", "ended", "trigger", "fully_finished"),
    [
        (tiny_job({"a": 2, "b": 3}, "a hash b"), "a0 a1", "b0 b1 b2", "a"),
        (tiny_job({"a": 2, "b": 3}, "a hash b"), "a0", "a1", ""),
        (tiny_job({"a": 3, "b": 3}, "a forward b"), "a1", "a0 a2 b1", ""),
        (tiny_job({"a": 3, "b": 3}, "a forward b"), "a1 b1", "a0 a2", ""),
        (TWO_INPUTS, "a0 b1", "a1 b0", ""),
        (TWO_INPUTS, "a0 b0", "a1 b1 c0", ""),
        (MIXED, "a0 b0", "a1 b1", ""),
        (MIXED, "a0 b0 b1", "a1 c0", "b"),
        # Reports come in any order: c says that it has ended before a does.
        (tiny_job({"a": 1, "b": 1, "c": 1}, "a forward b", "b forward c"), "b0", "a0 c0", "b"),
        (LOOP, "", "a0", ""),
        (LOOP, "a0", "h0 h1", "a"),
        (CHAINS, "", "a0 a1", ""),
        (CHAINS, "a0", "a1 b0", ""),
        (tiny_job({"a": 1, "b": 2}, "a hash b"), "a0 b0 b1", "", "a b"),
        # A fully finished vertex may keep a parallelism that no longer fits.
        (tiny_job({"a": 2, "b": 5}, "a forward b"), "a0 a1", "b0 b1 b2 b3 b4", "a"),
    ],
)
def test_roots_are_tasks_with_nothing_in_front_of_them(
    job: TinyJob, ended: str, trigger: str, fully_finished: str
) -> None:
    plan = plan_of(job, *ended.split())
    assert plan.trigger == tasks(*trigger.split())
    assert plan.wait == set(job.tasks) - tasks(*ended.split())
    assert plan.finished == tasks(*ended.split())
    assert plan.fully_finished == set(fully_finished.split())


def producers(upstream: int, downstream: int) -> list[set[int]]:
    """Who sends to each subtask behind a POINTWISE edge: a producer that alone runs makes its
    consumers no roots.
    """
    job = tiny_job({"a": upstream, "b": downstream}, "a rescale b")
    found: list[set[int]] = [set() for _ in range(downstream)]
    for producer in range(upstream):
        running = {"a": np.arange(upstream) == producer, "b": np.ones(downstream, np.bool_)}
        roots = make_plan(job, running).trigger.masks["b"]
        for consumer in np.flatnonzero(~roots):
            found[consumer].add(producer)
    return found


@pytest.mark.parametrize(
    ("upstream", "downstream", "expected"),
    [
        (2, 4, [{0}, {0}, {1}, {1}]),
        (4, 2, [{0, 1}, {2, 3}]),
        (3, 5, [{0}, {0}, {1}, {1}, {2}]),
        (5, 3, [{0}, {1, 2}, {3, 4}]),
        (3, 4, [{0}, {0}, {1}, {2}]),
        (5, 2, [{0, 1}, {2, 3, 4}]),
        (3, 3, [{0}, {1}, {2}]),
    ],
    ids=["W1", "W2", "W3", "W4", "W5", "W6", "W7"],
)
def test_pointwise_producers(upstream: int, downstream: int, expected: list[set[int]]) -> None:
    assert producers(upstream, downstream) == expected


def test_pointwise_producers_are_those_of_both_written_rules() -> None:
    for upstream in range(1, 11):
        for downstream in range(1, 11):
            assert producers(upstream, downstream) == [
                {one for one in range(upstream) if connected(Partitioner.RESCALE, one, upstream, consumer, downstream)}
                for consumer in range(downstream)
            ]


@st.composite
def jobs_and_running(draw: st.DrawFn) -> tuple[TinyJob, set[ev.TaskId]]:
    names = "abcde"[: draw(st.integers(1, 5))]
    parallelism = {name: draw(st.integers(1, 5)) for name in names}
    pairs = [(source, target) for source in names for target in names if source < target]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=6)) if pairs else []
    edges = [f"{source} {draw(st.sampled_from(sorted(EVERY - {'forward'})))} {target}" for source, target in chosen]
    job = tiny_job(parallelism, *edges)
    return job, {task for task in job.tasks if draw(st.booleans())}


@settings(max_examples=200, deadline=None)
@given(jobs_and_running())
def test_the_plan_is_the_rule_taken_literally(case: tuple[TinyJob, set[ev.TaskId]]) -> None:
    job, running = case
    plan = plan_of(job, *(f"{task.vertex}{task.subtask}" for task in set(job.tasks) - running))
    trigger, finished, fully_finished = literal_plan(job, running)
    assert set(plan.trigger) == trigger
    assert set(plan.wait) == running
    assert set(plan.finished) == finished
    assert plan.fully_finished == fully_finished


def test_a_plan_does_not_change_when_tasks_end_later() -> None:
    job = tiny_job({"a": 2})
    running: dict[str, ev.Mask] = {"a": np.ones(2, np.bool_)}
    plan = make_plan(job, running)
    running["a"][0] = False
    assert plan.trigger == tasks("a0", "a1")
    assert plan.wait == tasks("a0", "a1")
    with pytest.raises(ValueError, match="read-only"):
        plan.wait.masks["a"][0] = False


def test_a_task_set_is_a_set() -> None:
    some = ev.TaskSet({"a": np.array([True, False]), "b": np.array([False, True, True])})
    assert list(some) == [ev.TaskId("a", 0), ev.TaskId("b", 1), ev.TaskId("b", 2)]
    assert len(some) == 3
    assert ev.TaskId("a", 0) in some
    assert ev.TaskId("a", 1) not in some
    assert ev.TaskId("b", -1) not in some
    assert ev.TaskId("a", 2) not in some
    assert ev.TaskId("z", 0) not in some
    assert "a" not in some
    assert some == tasks("a0", "b1", "b2")
    assert some != tasks("a0", "b1")
    assert hash(some) == hash(frozenset(tasks("a0", "b1", "b2")))
    assert some - tasks("a0") == tasks("b1", "b2")
    assert repr(some) == "TaskSet({a[0], b[1], b[2]})"


def test_all_to_all_pairs_are_never_enumerated() -> None:
    # 250,000 by 250,000 pairs would take hours.
    job = tiny_job({"a": 250_000, "b": 250_000, "c": 250_000, "d": 250_000}, "a hash b", "b hash c", "c rescale d")
    running = {vertex.id: np.arange(250_000) % 2 == 0 for vertex in job.vertices}
    running["a"][:] = False
    start = time.perf_counter()
    plan = make_plan(job, running)
    assert time.perf_counter() - start < 5
    assert len(plan.trigger) == 125_000
    assert len(plan.wait) == 375_000


# Loops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallelism", "edges", "loops"),
    [
        ({"a": 1, "h": 2, "m": 1, "t": 2, "z": 1},
         ["a hash h", "h hash m", "m hash t", "t feedback h", "t hash z"], [{"h", "m", "t"}]),
        ({"a": 1, "h+t": 2}, ["a hash h", "t feedback h"], [{"h"}]),
        ({"h": 1, "g": 1}, ["h feedback h", "h hash g", "g feedback g"], [{"h"}, {"g"}]),
        ({"h": 1, "g": 1, "t": 1}, ["h hash g", "g feedback g", "g hash t", "t feedback h"], [{"h", "g", "t"}]),
        ({"h": 1, "s": 1, "t": 1}, ["h hash s", "s hash t", "s feedback h", "t feedback s"], [{"h", "s", "t"}]),
        ({"a": 1, "b": 1}, ["a hash b"], []),
    ],
    ids=["one", "of one vertex", "in a row", "in a loop", "with a shared vertex", "none"],
)  # fmt: skip
def test_a_loop_is_all_that_records_can_go_round(
    parallelism: dict[str, int], edges: list[str], loops: list[set[str]]
) -> None:
    assert loops_of(tiny_job(parallelism, *edges).vertices) == loops


def test_a_feedback_edge_that_closes_no_loop_is_refused() -> None:
    job = tiny_job({"a": 1, "b": 1, "h": 1}, "a hash h", "b feedback h")
    with pytest.raises(InvalidInput, match="'b feedback h' closes no loop: 'b' does not come behind 'h'"):
        loops_of(job.vertices)


def test_long_chains_do_not_exhaust_the_stack() -> None:
    names = [f"v{number:05}" for number in range(1500)]
    edges = [f"{one} hash {two}" for one, two in pairwise(names)]
    assert loops_of(tiny_job(dict.fromkeys(names, 1), *edges, "v00001 feedback v00000").vertices) == [
        {"v00000", "v00001"}
    ]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_loops_are_those_of_reachability_taken_literally(data: st.DataObject) -> None:
    names = "abcdef"[: data.draw(st.integers(1, 6))]
    forward = [f"{x} hash {y}" for x in names for y in names if x < y and data.draw(st.booleans())]
    reach = {(x, x) for x in names} | {(text[0], text[-1]) for text in forward}
    for middle in names:
        reach |= {(x, y) for x in names for y in names if (x, middle) in reach and (middle, y) in reach}
    back = [f"{x} feedback {y}" for x in names for y in names if (y, x) in reach and data.draw(st.booleans())]
    job = tiny_job(dict.fromkeys(names, 1), *forward, *back)
    both = reach | {(text[0], text[-1]) for text in back}
    for middle in names:
        both |= {(x, y) for x in names for y in names if (x, middle) in both and (middle, y) in both}
    literal = {frozenset(y for y in names if (x[-1], y) in both and (y, x[-1]) in both) for x in back}
    found = loops_of(job.vertices)
    assert set(found) == literal
    assert len(found) == len(literal)


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
