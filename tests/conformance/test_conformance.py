"""The same dataflows on both executors give the same result."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.connectors import CollectSink, FileSink, MemorySource, RateSource
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.runtime import SystemClock
from stateformat.errors import CheckpointError
from stateformat.model import StopMode
from tests.forgery import Forger
from tests.worlds.jobs import Counting, LapJob, StateJob, Who, every_operator, hops_job, two_heads
from tests.worlds.local import rows
from tests.worlds.stages import (
    EVERYWHERE,
    Gated,
    Out,
    PlayedStage,
    Told,
    batches,
    lose,
    other,
    plain,
    stopped,
    to_end,
    until,
)

DRAIN, SUSPEND = StopMode.DRAIN, StopMode.NO_DRAIN


REAL = pytest.param("cluster", 3, marks=[pytest.mark.spark, pytest.mark.truth])


@pytest.mark.parametrize(("executor", "parallelism"), [("local", 1), ("local", 3), ("spark", 3), REAL])
def test_every_ready_made_operator_gives_the_same(stage: PlayedStage, executor: str, parallelism: int) -> None:
    case = every_operator(parallelism)
    stage.run(executor, case.flow(), checkpoint_rows=60)
    assert case.outs() == case.expected


@EVERYWHERE
def test_hops_over_routes_are_those_of_a_breadth_first_search(stage: PlayedStage, executor: str) -> None:
    case = hops_job()
    stage.run(executor, case.flow())
    assert case.outs() == case.expected


@EVERYWHERE
def test_a_loop_within_a_loop_turns_until_it_is_empty(stage: PlayedStage, executor: str) -> None:
    case = two_heads(2)
    stage.run(executor, case.flow())
    assert case.outs() == case.expected


@EVERYWHERE
@pytest.mark.parametrize("chain", [True, False])
def test_every_edge_leads_to_the_same_subtasks(stage: PlayedStage, executor: str, chain: bool) -> None:
    outs = {uid: Out() for uid in ("forward", "rescale", "rebalance", "broadcast", "hash", "both")}
    source = Gated(stage.directory / "in", batches(range(0, 24, 2), 2), batches(range(1, 24, 2), 2))

    flow = Dataflow("edges", parallelism=2)
    read = flow.source(source, uid="in")
    who = {
        "forward": read.forward().apply(Who(stage.calls), uid="to forward", chain=chain),
        "rescale": read.rescale().apply(Who(stage.calls), uid="to rescale", parallelism=4),
        "rebalance": read.rebalance().apply(Who(stage.calls), uid="to rebalance", parallelism=3),
        "broadcast": read.broadcast().apply(Who(stage.calls), uid="to broadcast", parallelism=3),
        "hash": read.key_by("value").apply(Who(stage.calls), uid="to hash", parallelism=3),
    }
    who["both"] = (
        who["hash"].rebalance().apply(Told(stage.calls), who["forward"].rebalance(), uid="to both", chain=chain)
    )
    for uid, stream in who.items():
        stream.apply(outs[uid], uid=uid, chain=chain)
    stage.run(executor, flow)

    given: dict[str, dict[int, list[int]]] = {uid: defaultdict(list) for uid in outs}
    for uid, out in outs.items():
        for subtask, value, _ in out.seen.elements():
            given[uid][subtask].append(value)
    even, odd = [*range(0, 24, 2)], [*range(1, 24, 2)]
    assert sorted_lists(given["forward"]) == {0: even, 1: odd}
    parities = {subtask: {value % 2 for value in own} for subtask, own in given["rescale"].items()}
    assert parities == {0: {0}, 1: {0}, 2: {1}, 3: {1}}
    assert sorted_lists(given["broadcast"]) == {subtask: [*range(24)] for subtask in range(3)}
    for uid in ("rescale", "rebalance", "hash"):
        assert sorted(value for own in given[uid].values() for value in own) == [*range(24)]
    assert Counter(row[1] for row in outs["both"].seen.elements()) == Counter([*range(24)] * 2)
    assert sorted_lists(given["hash"]) == OWNED
    assert len(stage.newest.graph.operators) == 13


OWNED = {
    0: [1, 2, 7, 9, 12, 20],
    1: [4, 6, 8, 13, 19, 21],
    2: [0, 3, 5, 10, 11, 14, 15, 16, 17, 18, 22, 23],
}
"""Which of the keys 0 to 23 (int64, 128 key groups) each of three subtasks owns."""


def sorted_lists(given: dict[int, list[int]]) -> dict[int, list[int]]:
    return {subtask: sorted(own) for subtask, own in sorted(given.items())}


@EVERYWHERE
def test_each_end_is_told_once_and_in_order_though_one_input_ends_early(stage: PlayedStage, executor: str) -> None:
    short = Gated(stage.directory / "short", [rows(1), rows(2)])
    long = Gated(stage.directory / "long", batches(range(10, 20), 1), shut=True, endless=True)
    out = Out()
    flow = Dataflow("ends", parallelism=2)
    one = flow.source(short, uid="short", parallelism=1).rebalance()
    two = flow.source(long, uid="long", parallelism=1).rebalance()
    emits = {
        "end_input": lambda op: rows(100 + op.context.subtask),
        "finish": lambda op: rows(200 + op.context.subtask),
    }
    one.apply(Told(stage.calls, **emits), two, uid="op").apply(out, uid="out", chain=False)

    run = stage.begin(executor, flow, requests_every_us=None)
    long.let(0, 1)
    until(run, lambda: {100, 101, 1, 2, 10} <= set(out.values))
    until(run, lambda: stage.statuses()["short"][0] == "fully_finished")
    long.let(0, 10)
    stopped(run, DRAIN, lambda: set(range(10, 20)) <= set(out.values))
    assert out.values == [1, 2, *range(10, 20), 100, 100, 101, 101, 200, 201]
    for subtask in (0, 1):
        calls = stage.calls.of(f"op/{subtask}", "process", "end_input", "finish")
        ends = [call for call in calls if not call.startswith("process")]
        assert ends == ["end_input 0", "end_input 1", "finish"]
        assert not [call for call in calls[calls.index("end_input 0") :] if call.startswith("process 0")]
        assert calls[-2:] == ["end_input 1", "finish"]


def ended_in_part(stage: PlayedStage, out: Out) -> tuple[Gated, Dataflow]:
    """Return a job with two readers, each with its own forward line to an operator and a sink."""
    source = Gated(stage.directory / "in", batches(range(0, 12, 2), 2), batches(range(1, 12, 2), 2), shut=True)
    flow = Dataflow("in part", parallelism=2)
    flow.source(source, uid="in").apply(Told(stage.calls), uid="op", chain=False).apply(out, uid="out", chain=False)
    return source, flow


def has_ended_in_part(stage: PlayedStage, out: Out) -> bool:
    """Return whether the first line has finished, and four rows have come from the other."""
    return len(out.values) == 10 and stage.statuses()["out"][1] == [0]


def test_a_partially_finished_operator_is_recorded_alike_and_goes_on_elsewhere(stage: PlayedStage) -> None:
    found: dict[str, Any] = {}
    for executor in ("local", "spark"):
        here = stage.at(executor)
        out = Out()
        source, flow = ended_in_part(here, out)
        source.let(0)
        source.let(1, 2)
        run = here.begin(executor, flow)
        until(run, partial(has_ended_in_part, here, out))
        found[executor] = here.statuses()
        run.close()
        source.let_all()
        flow.parallelism = 3
        here.run(other(executor), flow)
        assert out.values == [*range(12)]
        assert {status for status, _, _ in here.statuses().values()} == {"fully_finished"}
    assert found["spark"] == found["local"]
    assert found["local"]["op"] == ("partially_finished", [0], [])


@pytest.mark.parametrize(
    "first", ["local", "spark", pytest.param("cluster", marks=[pytest.mark.spark, pytest.mark.truth])]
)
def test_every_kind_of_state_goes_to_the_other_executor_and_back(stage: PlayedStage, first: str) -> None:
    job = StateJob(stage.directory, range(60))
    job.table.let(0, 2)
    job.stream.let(0, 4)
    run = stage.begin(first, job.flow(4))
    stopped(run, SUSPEND, lambda: run.rows_read == 22)

    job.stream.let(0, 8)
    lost = stage.begin(other(first), job.flow(6), resume=True, checkpoint_rows=10)
    lose(lost, published=2)

    job.stream.let(0)
    job.table.let(0)
    stage.run(first, job.flow(3), checkpoint_rows=10, resume=True)
    assert job.out.seen == job.expected(3)


def test_records_that_an_unaligned_barrier_has_overtaken_come_first_on_spark(stage: PlayedStage) -> None:
    out = Out()
    source = Gated(stage.directory / "in", batches(range(0, 80, 2), 2), batches(range(1, 80, 2), 2))

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("overtaken", parallelism=parallelism)
        told = made.source(source, uid="in").key_by("key").apply(Told(stage.calls), uid="op")
        told.key_by("value").apply(out, uid="out")
        return made

    run = stage.begin("local", flow(2), unaligned=True, checkpoint_interval_us=20_000)
    until(run, lambda: stage.newest_id and stage.in_flight() > 3)
    run.close()
    stage.run("spark", flow(3))
    assert out.values == [*range(80)]


@EVERYWHERE
@pytest.mark.parametrize("late", [False, True])
def test_a_loop_is_stopped_while_it_turns_and_turns_on_elsewhere(stage: PlayedStage, executor: str, late: bool) -> None:
    job = LapJob(stage.directory, spins=True, late=late)
    run = stage.begin(executor, job.flow(2, 3), requests_every_us=None)
    stopped(run, SUSPEND, lambda: run.rows_read == 12)
    assert stage.in_flight() == 12
    assert job.out.values == []
    assert not [call for call in job.calls.calls if "end_input" in call or "finish" in call]
    job.spins.unlink()
    stage.run(other(executor), job.flow(3, 2), resume=True)
    assert job.out.values == job.expected


@EVERYWHERE
def test_a_loop_is_drained_with_what_its_timers_send_round(stage: PlayedStage, executor: str) -> None:
    job = LapJob(stage.directory, spins=True, late=True)
    job.source.let(0, 6)
    run = stage.begin(executor, job.flow(2, 2), requests_every_us=None)
    until(run, lambda: run.rows_read == 12)
    job.spins.unlink()
    run.request_stop(DRAIN)
    assert to_end(run).stop is not None
    assert job.out.values == job.expected
    assert stage.in_flight() == 0
    assert {status for status, _, _ in stage.statuses().values()} == {"fully_finished"}


@EVERYWHERE
def test_messages_arrive_once_across_a_restore(stage: PlayedStage, executor: str) -> None:
    out = Out()
    source = Gated(stage.directory / "in", *[batches(range(60), 6)] * 4, shut=True)

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("messages", parallelism=parallelism)
        made.source(source, uid="in", parallelism=2).apply(Counting(stage.calls), uid="op", chain=False).apply(
            out, uid="out", parallelism=1, chain=False
        )
        return made

    for split in range(4):
        source.let(split, 6)
    run = stage.begin(executor, flow(2), requests_every_us=None)
    stopped(run, SUSPEND, lambda: run.rows_read == 144 and out.values == [100])
    for split in range(4):
        source.let(split, 10)
    run = stage.begin(other(executor), flow(3), requests_every_us=None, resume=True)
    stopped(run, DRAIN, lambda: out.values == [100, 200])
    assert out.values == [100, 200]
    assert stage.statuses()["op"][0] == "fully_finished"


@EVERYWHERE
@pytest.mark.parametrize("mode", [DRAIN, SUSPEND])
def test_the_savepoint_of_an_endless_job_goes_on_with_the_other(
    stage: PlayedStage, executor: str, mode: StopMode
) -> None:
    out = CollectSink()

    def flow(total: int | None, parallelism: int) -> Dataflow:
        made = Dataflow("ticks", parallelism=parallelism)
        source = RateSource(rows_per_read=50, shards=3, step_us=10, total=total)
        ticks = made.source(source, uid="ticks", parallelism=2, event_time="at")
        counts = ticks.key_by("shard").window(1000, "at", {"n": ("*", "count")}, uid="window")
        counts.apply(out, uid="out")
        return made

    run = stage.begin(executor, flow(None, 2), checkpoint_rows=300, requests_every_us=1, clock=SystemClock())
    until(run, lambda: run.published >= 1)
    request = stage.store.request_stop(mode)
    outcome = to_end(run)
    assert outcome.stop is not None
    assert (outcome.stop.mode, outcome.stop.request) == (mode, request.id)
    counted = sum(out.table()["n"].to_pylist())
    answer = stage.store.request_answer(request.id)
    assert answer is not None
    assert (str(answer.outcome), answer.savepoint) == ("stopped", outcome.savepoint)
    if mode is DRAIN:
        assert counted == run.rows_read
        return
    assert counted < run.rows_read
    own = stage.store_at(f"{outcome.savepoint}-goes-on")
    again = stage.begin(
        other(executor),
        flow(None, 3),
        store=own,
        start_from=outcome.savepoint,
        checkpoint_rows=300,
        requests_every_us=None,
    )
    assert own.open().record.parent == stage.store_at(outcome.savepoint).open().record.ref
    stopped(again, DRAIN, lambda: again.published >= 1)
    assert sum(out.table()["n"].to_pylist()) == run.rows_read + again.rows_read
    shards = Counter(row[:2] for row in plain(out.table()).elements())
    assert set(shards.values()) == {1}, "a window was emitted twice"


@EVERYWHERE
def test_a_job_of_which_everything_has_finished_is_not_run_again(stage: PlayedStage, executor: str) -> None:
    out = Out()
    source, flow = ended_in_part(stage, out)
    source.let_all()
    first = stage.run(executor, flow)
    again = stage.run(other(executor), flow, parallelism=3)
    assert (first.checkpoint_id, again.checkpoint_id) == (stage.newest_id, stage.newest_id)
    assert again.sentence.startswith("the job had finished")
    assert out.values == [*range(12)]


@EVERYWHERE
def test_names_that_no_sink_has_made_are_refused_before_anything_runs(stage: PlayedStage, executor: str) -> None:
    flow = Dataflow("forged")
    rows_in = flow.source(MemorySource(pa.table({"n": [1, 2, 3]})), uid="in")
    rows_in.apply(FileSink(stage.directory / "out", durable=False), uid="out")
    stage.run("local", flow)
    (stage.directory / "victim").write_text("mine")
    forger = Forger(stage.storage, stage.newest_id)
    at = forger.find("out", "committables")
    rows_of = forger.table_of(at)
    for column, name in (("pending", "../victim"), ("path", "../stolen")):
        place = rows_of.schema.get_field_index(column)
        rows_of = rows_of.set_column(place, rows_of.schema.field(place), pa.array([name]))
    forger.set_rows(at, rows_of)
    forger.seal()
    with pytest.raises(CheckpointError, match=r"sink 'out'.*'\.\./stolen' as 'path'.*Nothing was committed or removed"):
        stage.run(executor, flow, max_restarts=0)
    assert (stage.directory / "victim").read_text() == "mine"
    assert not (stage.directory / "stolen").exists()
