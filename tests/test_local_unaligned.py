"""Unaligned checkpoints: barriers overtake records, which are saved, redistributed and replayed in order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from backends.dataflow.api import Dataflow, Stream
from backends.dataflow.events import Channel, TaskId
from backends.local import LocalRun
from tests.local_jobs import Bench, Count, Out, Tap, Told, rows, settle, state_of, to_end, until


def step_only(run: LocalRun, uid: str, subtask: int = 0, steps: int = 1) -> None:
    """Let one task do so many things, and nobody else anything."""
    task = run.tasks[TaskId(uid, subtask)]
    for _ in range(steps):
        task.step(random.Random(0))


class Job:
    """in → op → out, where ``op`` gets nothing to do while the test fills its channels."""

    def __init__(self, bench: Bench, *splits: Any, how: str = "hash", parallelism: tuple[int, int] = (1, 1)) -> None:
        self.bench = bench
        self.tap = Tap(*(splits or ([rows(n) for n in range(6)],)))
        self.out = Out(bench.log)
        self.how = how
        self.parallelism = parallelism

    def flow(self) -> Dataflow:
        flow = Dataflow("job", parallelism=self.parallelism[1])
        stream = flow.source(self.tap, uid="in", parallelism=self.parallelism[0])
        routed = {
            "hash": lambda: stream.key_by("key"),
            "rebalance": stream.rebalance,
            "broadcast": stream.broadcast,
            "rescale": stream.rescale,
            "unspecified": lambda: stream,
        }
        taken: Stream = routed[self.how]()
        taken.apply(Told(self.bench.log), uid="op", chain=False).apply(self.out, uid="out", parallelism=1, chain=False)
        return flow

    def filled(self, batches: int = 6, readers: int = 1) -> LocalRun:
        """A run with so many batches in the channels into ``op``, of which none has been taken."""
        run = self.bench.begin(self.flow())
        until(run, lambda: not run.tasks[TaskId("in", 0)].idle_until_us or run.rows_read == 0)
        for reader in range(readers):
            task = run.tasks[TaskId("in", reader)]
            # The first looks ask for splits, which the driver gives.
            while run.rows_read < batches * (reader + 1):
                if task.ready(self.bench.clock.now_us()):
                    task.step(random.Random(0))
                else:
                    for item in range(len(run._driver.inbox)):
                        assert item >= 0
                        run._driver.step()
                    self.bench.clock.wait_until(self.bench.clock.now_us() + 5_000)
        return run


def in_flight(bench: Bench, edge: str = "in->op.0") -> list[dict[str, Any]]:
    """What the newest checkpoint holds of an edge."""
    found = [state for state in bench.newest.states if state.mode == "in_flight" and state.edge == edge]
    return bench.state(str(found[0].operator), found[0].name) if found else []


@pytest.mark.parametrize("how", ["hash", "rebalance"])
def test_a_barrier_overtakes_what_lies_in_hash_and_rebalance_channels_and_it_is_saved_in_order(how: str) -> None:
    bench = Bench(unaligned=True)
    run = Job(bench, how=how).filled()
    assert bench.log.of("op/0", "process") == []
    bench.checkpoint(run)
    saved = in_flight(bench)
    before = bench.log.of("op/0")
    processed = [int(call.split(": ")[1]) for call in before[: before.index("snapshot")] if call.startswith("process")]
    assert saved, "nothing was overtaken"
    in_order = sorted(saved, key=lambda row: row["_seq"])
    assert processed + [row["value"] for row in in_order] == list(range(6))
    assert {(row["_sender"], row["_receiver"]) for row in saved} == {(0, 0)}
    assert "in_flight" in bench.newest.required_features


@pytest.mark.parametrize(("how", "unaligned"), [("hash", False), ("broadcast", True), ("rescale", True)])
def test_nothing_is_overtaken_elsewhere(how: str, unaligned: bool) -> None:
    bench = Bench(unaligned=unaligned)
    run = Job(bench, how=how).filled()
    bench.checkpoint(run)
    assert in_flight(bench) == []
    before = bench.log.of("op/0")
    # The barrier has waited for its turn.
    assert before[: before.index("snapshot")] == ["open", *(f"process 0: {n}" for n in range(6))]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
@pytest.mark.parametrize("how", ["hash", "rebalance"])
def test_what_was_overtaken_is_replayed_first_once_and_in_order_at_any_parallelism(how: str, parallelism: int) -> None:
    bench = Bench(unaligned=True)
    splits = [[rows(n, key=n % 4) for n in range(start, 24, 2)] for start in (0, 1)]
    job = Job(bench, *splits, how=how, parallelism=(2, 2))
    run = job.filled(batches=6, readers=2)
    bench.checkpoint(run)
    saved = {row["value"] for row in in_flight(bench)}
    assert saved
    bench.log.clear()
    job.parallelism = (2, parallelism)
    run = bench.begin(job.flow())
    replayed = [call for call in bench.log.calls if call.startswith("op") and " process " in call]
    assert {int(value) for call in replayed for value in call.split(": ")[1].split()} == saved
    to_end(run)
    assert job.out.seen == list(range(24))
    if how == "hash":
        for key in range(4):
            for subtask in range(parallelism):
                calls = bench.log.of(f"op/{subtask}", "process")
                values = [int(value) for call in calls for value in call.split(": ")[1].split()]
                own = [value for value in values if value % 4 == key]
                assert own == sorted(own)


def test_a_default_edge_that_holds_records_stays_what_it_was_where_both_sides_become_of_one_size() -> None:
    bench = Bench(unaligned=True)
    job = Job(bench, how="unspecified", parallelism=(1, 2))
    run = job.filled()
    bench.checkpoint(run)
    assert in_flight(bench)
    job.parallelism = (1, 1)
    run = bench.begin(job.flow())
    to_end(run)
    assert job.out.seen == list(range(6))


def test_what_lies_in_a_channel_whose_sender_has_ended_is_not_lost() -> None:
    bench = Bench(unaligned=True)
    job = Job(bench)
    run = job.filled()
    step_only(run, "in", steps=1)
    assert state_of(run, "in") == "waiting"
    bench.due(run)
    until(run, lambda: bench.newest_id == 1)
    # Its logic has ended, and what it sent is on its way: the only place where it is.
    assert bench.status("in") == ([], [0])
    saved = [row["value"] for row in in_flight(bench)]
    assert saved
    bench.log.clear()
    job.parallelism = (1, 3)
    run = bench.begin(job.flow())
    assert {task.vertex for task in run.tasks} == {"op", "out"}
    to_end(run)
    assert job.out.seen == list(range(6))
    for subtask in range(3):
        assert bench.log.of(f"op/{subtask}", "end_input", "finish") == ["end_input 0", "finish"]


def test_a_sender_leaves_when_its_consumers_have_processed_its_data_and_not_before() -> None:
    bench = Bench(unaligned=True)
    job = Job(bench)
    run = job.filled()
    step_only(run, "in", steps=1)
    bench.due(run)
    until(run, lambda: bench.newest_id == 1 and run.in_flight is None)
    source = run.tasks[TaskId("in", 0)]
    while source.mail:
        step_only(run, "in")
    processed = len(bench.log.of("op/0", "process"))
    assert processed < 6
    assert not source.gone
    to_end(run)
    assert source.gone
    assert job.out.seen == list(range(6))


def test_a_task_whose_producers_have_left_is_triggered_itself_and_what_lies_before_it_is_in_the_checkpoint() -> None:
    bench = Bench(unaligned=True)
    flow, out = Dataflow("job"), Out(bench.log)
    fast, slow = Tap([rows(1), rows(2)]), Tap([rows(3)], shut=True)
    one = flow.source(fast, uid="fast").key_by("key")
    two = flow.source(slow, uid="slow").key_by("key")
    one.apply(Count(bench.log), two, uid="op").rebalance().apply(out, uid="out")
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "fast") == "waiting")
    bench.checkpoint(run)
    until(run, lambda: run.tasks[TaskId("fast", 0)].gone)
    # What the source sent last lies in front of the task now.
    until(run, lambda: not any(queue.elements for queue in run.tasks[TaskId("op", 0)].inputs.values()))
    bench.checkpoint(run)
    assert bench.status("fast") == ([0], [])
    slow.let(0)
    run = bench.begin(flow)
    to_end(run)
    assert out.seen == [1, 1, 1]


@pytest.mark.parametrize("seed", range(6))
def test_an_unaligned_job_that_is_killed_anywhere_comes_to_what_an_aligned_one_does(seed: int) -> None:
    bench = Bench(seed=seed, unaligned=True, checkpoint_interval_us=25_000)
    splits = [[rows(n, n + 1) for n in range(start, 80, 4)] for start in (0, 2)]
    job = Job(bench, *splits, how="rebalance" if seed % 2 else "hash", parallelism=(2, 2))
    for kill in range(4):
        run = bench.begin(job.flow(), seed=seed + kill, unaligned=kill != 2)
        settle(run, 40 + 30 * kill)
        job.parallelism = (1 + (kill + seed) % 3, 1 + kill % 3)
    bench.run(job.flow())
    assert job.out.seen == list(range(80))


def test_savepoints_and_the_barriers_of_ends_are_aligned() -> None:
    bench = Bench(unaligned=True)
    job = Job(bench)
    job.tap.let(0, 6)
    run = job.filled()
    run.request_stop(job.bench.options.get("mode", "no_drain"))
    to_end(run)
    assert bench.newest.stop is not None
    assert in_flight(bench) == []
    assert job.out.seen == list(range(6))


def test_records_are_saved_of_every_channel_in_the_order_of_that_channel() -> None:
    bench = Bench(unaligned=True)
    splits = [[rows(n) for n in range(0, 12, 2)], [rows(n) for n in range(1, 12, 2)]]
    job = Job(bench, *splits, how="rebalance", parallelism=(2, 1))
    run = job.filled(batches=4, readers=2)
    assert {channel for channel in run.tasks[TaskId("op", 0)].inputs} == {Channel("in->op.0", 0, 0), Channel("in->op.0", 1, 0)}
    bench.checkpoint(run)
    saved = in_flight(bench)
    for sender in (0, 1):
        mine = [row["value"] for row in sorted(saved, key=lambda row: row["_seq"]) if row["_sender"] == sender]
        assert mine == sorted(mine)
        assert all(value % 2 == sender for value in mine)
    assert saved
