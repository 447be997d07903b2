"""Unaligned checkpoints: barriers overtake records, which are saved, redistributed and replayed in order."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, Stream
from stateformat.backends.dataflow.events import TaskId
from stateformat.backends.local import LocalRun
from stateformat.backends.runtime import Worker
from stateformat.errors import RestoreRefused
from stateformat.model import StopMode
from tests.local_jobs import INTERVAL_US, ROWS, Bench, Count, Out, Tap, Told, rows, settle, state_of, to_end, until


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

    def filled(self, batches: int = 6, readers: int = 1, *, ended: bool = False) -> LocalRun:
        """A run with so many batches of each reader in the channels into ``op``, of which none has been taken."""
        run = self.bench.begin(self.flow())
        for reader in range(readers):
            task = run.tasks[TaskId("in", reader)]
            while task.rows < batches or (ended and task.task.state.value != "waiting"):
                step_all(self.bench, run, [task])
        assert not [call for call in self.bench.log.calls if call.startswith("op") and "process" in call]
        return run


def step_all(bench: Bench, run: LocalRun, tasks: Iterable[Worker]) -> None:
    """Let each of these tasks, and whoever has mail, and the driver do one thing, and nobody else anything."""
    chosen = list(tasks)
    for task in run.tasks.values():
        if not task.gone and (task.mailbox or (task in chosen and task.ready(bench.clock.now_us()))):
            task.step(random.Random(0))
    if run._driver.inbox:
        run._driver.step()
    bench.clock.wait_until(bench.clock.now_us() + 5_000)


def overtake(bench: Bench, run: LocalRun) -> None:
    """Take a checkpoint while ``op`` processes nothing of what lies before it."""
    before = bench.newest_id
    bench.clock.wait_until(bench.clock.now_us() + INTERVAL_US)
    run._begin_what_is_due()
    for _ in range(200):
        if bench.newest_id > before and run.in_flight is None:
            return
        step_all(bench, run, [task for task in run.tasks.values() if task.id.vertex == "out"])
    raise AssertionError(run.describe())


def in_flight(bench: Bench, edge: str = "in->op.0") -> list[dict[str, Any]]:
    """What the newest checkpoint holds of an edge."""
    found = [state for state in bench.newest.states if state.mode == "in_flight" and state.edge == edge]
    return bench.state(str(found[0].operator), found[0].name) if found else []


@pytest.mark.parametrize("how", ["hash", "rebalance"])
def test_a_barrier_overtakes_what_lies_in_hash_and_rebalance_channels_and_it_is_saved_in_order(how: str) -> None:
    bench = Bench(unaligned=True)
    run = Job(bench, how=how).filled()
    overtake(bench, run)
    assert bench.log.of("op/0") == ["open", "snapshot"]
    saved = in_flight(bench)
    assert [row["value"] for row in sorted(saved, key=lambda row: row["_seq"])] == list(range(6))
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
    overtake(bench, run)
    saved = {row["value"] for row in in_flight(bench)}
    assert len(saved) == 12
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


def test_what_comes_in_between_the_snapshot_and_the_barrier_of_its_channel_is_saved_too() -> None:
    bench = Bench(unaligned=True)
    taps = Tap([rows(0)], [rows(n) for n in (1, 3, 5, 7)])
    out = Out(bench.log)

    def flow() -> Dataflow:
        made = Dataflow("job", parallelism=2)
        middle = made.source(taps, uid="in").apply(Told(bench.log), uid="mid", chain=False)
        middle.rebalance().apply(Told(bench.log), uid="op", parallelism=1).apply(out, uid="out", parallelism=1)
        return made

    run = bench.begin(flow())
    readers = [run.tasks[TaskId("in", subtask)] for subtask in (0, 1)]
    while [reader.rows for reader in readers] != [1, 4]:
        step_all(bench, run, readers)
    quick, slow, op = (run.tasks[TaskId(uid, subtask)] for uid, subtask in (("mid", 0), ("mid", 1), ("op", 0)))
    bench.clock.wait_until(bench.clock.now_us() + INTERVAL_US)
    run._begin_what_is_due()
    while not bench.log.of("op/0", "snapshot"):
        step_all(bench, run, [quick])
    assert bench.log.of("mid/1", "process") == []
    while bench.newest_id == 0:
        step_all(bench, run, [slow])
    assert not bench.log.of("op/0", "process")
    assert op.inputs
    assert [row["value"] for row in in_flight(bench, "mid->op.0") if row["_sender"] == 1] == [1, 3, 5, 7]
    to_end(bench.begin(flow()))
    assert out.seen == [0, 1, 3, 5, 7]


def test_a_default_edge_that_holds_records_stays_what_it_was_where_both_sides_become_of_one_size() -> None:
    bench = Bench(unaligned=True)
    job = Job(bench, how="unspecified", parallelism=(1, 2))
    run = job.filled()
    overtake(bench, run)
    assert len(in_flight(bench)) == 6
    job.parallelism = (1, 1)
    run = bench.begin(job.flow())
    to_end(run)
    assert job.out.seen == list(range(6))


def test_what_lies_in_a_channel_whose_sender_has_ended_is_not_lost() -> None:
    bench = Bench(unaligned=True)
    job = Job(bench)
    run = job.filled(ended=True)
    overtake(bench, run)
    # Its logic has ended, and what it sent is on its way: the only place where it is.
    assert bench.status("in") == ([], [0])
    assert sorted(row["value"] for row in in_flight(bench)) == list(range(6))
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
    run = job.filled(ended=True)
    overtake(bench, run)
    source = run.tasks[TaskId("in", 0)]
    while source.mailbox:
        source.step(random.Random(0))
    assert bench.log.of("op/0", "process") == []
    assert not source.gone
    to_end(run)
    assert source.gone
    assert job.out.seen == list(range(6))


@pytest.mark.parametrize("seed", range(4))
def test_a_task_that_waits_and_takes_part_in_the_savepoint_of_a_stop_leaves_with_that_one(seed: int) -> None:
    bench = Bench(unaligned=True, seed=seed)
    job = Job(bench)
    run = job.filled(ended=True)
    overtake(bench, run)
    source = run.tasks[TaskId("in", 0)]
    while source.mailbox:
        source.step(random.Random(0))
    run.request_stop(StopMode.NO_DRAIN)
    until(run, lambda: source.snapshot_taken == 2)
    while bench.newest_id == 1:
        # An earlier checkpoint is complete and its data is processed by and by, but it has taken part in this one.
        assert not source.gone
        assert run.step()
    to_end(run)
    assert source.gone
    assert job.out.seen == list(range(6))


def test_a_task_one_of_whose_producers_has_left_takes_part_with_the_channels_that_are_open() -> None:
    bench = Bench(unaligned=True)
    flow, out = Dataflow("job"), Out(bench.log)
    fast, slow = Tap([rows(1), rows(2)]), Tap([rows(3), rows(6)], shut=True)
    one = flow.source(fast, uid="fast").key_by("key")
    two = flow.source(slow, uid="slow").key_by("key")
    one.apply(Count(bench.log), two, uid="op").rebalance().apply(out, uid="out")
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "fast") == "waiting")
    bench.checkpoint(run)
    until(run, lambda: run.tasks[TaskId("fast", 0)].gone)
    slow.let(0, 2)
    while run.tasks[TaskId("slow", 0)].rows < 2:
        step_all(bench, run, [run.tasks[TaskId("slow", 0)]])
    overtake(bench, run)
    assert bench.status("fast") == ([0], [])
    assert {row["value"] for row in in_flight(bench, "slow->op.1")} == {3, 6}
    assert in_flight(bench, "fast->op.0") == []
    slow.let(0)
    run = bench.begin(flow)
    to_end(run)
    assert out.seen == [1, 1, 2]


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
    # The source holds, and the barrier waits behind what it has sent.
    run.request_stop(StopMode.NO_DRAIN)
    to_end(run)
    assert bench.newest.stop is not None
    assert in_flight(bench) == []
    assert job.out.seen == list(range(6))


def test_records_are_saved_of_every_channel_in_the_order_of_that_channel() -> None:
    bench = Bench(unaligned=True)
    splits = [[rows(n) for n in range(0, 12, 2)], [rows(n) for n in range(1, 12, 2)]]
    job = Job(bench, *splits, how="rebalance", parallelism=(2, 1))
    run = job.filled(batches=4, readers=2)
    overtake(bench, run)
    saved = sorted(in_flight(bench), key=lambda row: row["_seq"])
    for sender in (0, 1):
        mine = [row["value"] for row in saved if row["_sender"] == sender]
        assert mine == [sender, sender + 2, sender + 4, sender + 6]


class Narrow(Tap):
    """A later version of the source, whose rows lack a column."""

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([item for item in ROWS if item.name != "at"])


def test_columns_of_records_in_flight_do_not_go_in_silence() -> None:
    bench = Bench(unaligned=True)
    job = Job(bench)
    overtake(bench, job.filled())
    (name,) = [state.name for state in bench.newest.states if state.mode == "in_flight" and state.operator == "op"]

    job.tap = Narrow([], endless=True)
    for unaligned in (True, False):
        with pytest.raises(RestoreRefused, match=f"has the column 'at' .*drop='op/{name}.at'"):
            bench.begin(job.flow(), unaligned=unaligned)
    run = bench.begin(job.flow(), drop=[f"op/{name}.at"])
    settle(run)
    assert bench.log.of("op/0", "process") == ["process 0: 0 1 2 3 4 5"]
