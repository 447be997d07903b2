"""Unaligned checkpoints: barriers overtake records, at once or later, which are saved and replayed
in order.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, Stream, events as ev
from stateformat.backends.local import LocalRun
from stateformat.backends.runtime import Worker
from stateformat.errors import RestoreRefused
from stateformat.model import StopMode
from tests.worlds.local import (
    INTERVAL_US,
    ROWS,
    Bench,
    Count,
    Line,
    Out,
    Tap,
    Told,
    begin_barrier,
    in_flight,
    open_mail,
    rows,
    settle,
    state_of,
    step_driver,
    to_end,
    until,
)

AFTER_US = 50_000
LATER = {"unaligned": True, "unaligned_after_us": AFTER_US}
TIMES = pytest.mark.parametrize("how_late", [{"unaligned": True}, LATER], ids=["at once", "later"])


class Job(Line):
    """in → op → out, where ``op`` gets nothing to do while the test fills its channels."""

    def __init__(self, *splits: Any, way: str = "hash", sizes: tuple[int, int] = (1, 1), **options: Any) -> None:
        super().__init__(*(splits or ([rows(n) for n in range(6)],)), **{"unaligned": True, **options})
        self.way, self.sizes = way, sizes

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> Dataflow:
        flow = Dataflow(job, parallelism=parallelism or self.sizes[1])
        stream = flow.source(self.tap, uid="in", parallelism=self.sizes[0])
        taken: Stream = stream.key_by("key") if self.way == "hash" else stream
        if self.way not in ("hash", "unspecified"):
            taken = getattr(stream, self.way)()
        taken.apply(self.op, uid="op", chain=False).apply(self.out, uid="out", parallelism=1, chain=False)
        return flow

    def filled(self, batches: int = 6, readers: int = 1, *, ended: bool = False) -> LocalRun:
        """A run with so many batches of each reader in the channels into ``op``, of which none has
        been taken.
        """
        run = self.begin()
        for reader in range(readers):
            task = run.tasks[ev.TaskId("in", reader)]
            while task.rows < batches or (ended and task.task.state.value != "waiting"):
                step_all(self.bench, run, [task])
        assert not [call for call in self.log.calls if call.startswith("op") and "process" in call]
        return run

    def replayed(self, parallelism: int = 1, **options: Any) -> list[int]:
        """The output of a run from the newest checkpoint to the end."""
        to_end(self.begin(parallelism, **options))
        return self.out.seen


def step_all(bench: Bench, run: LocalRun, tasks: Iterable[Worker]) -> None:
    """Let each of these tasks, those with mail, and the driver do one thing, and the other tasks
    nothing.
    """
    chosen = list(tasks)
    for task in run.tasks.values():
        if not task.gone and (task.mailbox or (task in chosen and task.ready(bench.clock.now_us()))):
            task.step(random.Random(0))
    if run._driver.inbox:
        run._driver.step()
    bench.clock.wait_until(bench.clock.now_us() + 5_000)


def overtake(bench: Bench, run: LocalRun, *idle: Worker) -> None:
    """Take a checkpoint while these tasks, by default ``op``, take nothing from their channels."""
    still = idle or tuple(task for task in run.tasks.values() if task.id.vertex != "out")
    before = bench.newest_id
    if run.in_flight is None:
        bench.clock.wait_until(bench.clock.now_us() + INTERVAL_US)
        begin_barrier(run)
    for _ in range(300):
        if bench.newest_id > before and run.in_flight is None:
            return
        run._begin_what_is_due()
        step_all(bench, run, [task for task in run.tasks.values() if task not in still])
    raise AssertionError(run.describe())


def values(found: list[dict[str, Any]]) -> list[int]:
    return [row["value"] for row in sorted(found, key=lambda row: row["_seq"])]


@TIMES
@pytest.mark.parametrize("way", ["hash", "rebalance"])
def test_a_barrier_overtakes_in_hash_and_rebalance_channels_when_its_time_has_come(
    way: str, how_late: dict[str, Any]
) -> None:
    job = Job(way=way, **how_late)
    run = job.filled()
    begin_barrier(run)
    begun_us = job.bench.clock.now_us()
    overtake(job.bench, run, run.tasks[ev.TaskId("op", 0)])
    assert (job.bench.clock.now_us() - begun_us >= AFTER_US) == (how_late == LATER)
    assert job.log.of("op/0") == ["open", "snapshot"]
    saved = in_flight(job.bench, "in->op.0")
    assert values(saved) == list(range(6))
    assert {(row["_sender"], row["_receiver"]) for row in saved} == {(0, 0)}
    assert "in_flight" in job.bench.newest.required_features
    assert job.replayed(3) == list(range(6))


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("hash", {"unaligned": False}),
        ("broadcast", {}),
        ("rescale", {}),
        ("broadcast", LATER),
        ("rescale", LATER),
        ("hash", {"unaligned_after_us": INTERVAL_US // 2}),
    ],
)
def test_a_barrier_overtakes_nothing_elsewhere_or_when_it_is_in_time(way: str, options: dict[str, Any]) -> None:
    job = Job(way=way, **options)
    run = job.filled()
    job.bench.checkpoint(run)
    assert in_flight(job.bench) == []
    before = job.log.of("op/0")
    # The barrier has waited for its turn.
    assert before[: before.index("snapshot")] == ["open", *(f"process 0: {n}" for n in range(6))]


@pytest.mark.parametrize("parallelism", [1, 2, 3, 5])
@pytest.mark.parametrize("way", ["hash", "rebalance"])
def test_what_was_overtaken_is_replayed_first_once_and_in_order_at_any_parallelism(way: str, parallelism: int) -> None:
    job = Job(*[[rows(n) for n in range(start, 24, 2)] for start in (0, 1)], way=way, sizes=(2, 2))
    run = job.filled(batches=6, readers=2)
    overtake(job.bench, run)
    found = in_flight(job.bench, "in->op.0")
    saved = {row["value"] for row in found}
    assert len(saved) == len(found) == 12
    for sender, receiver in {(row["_sender"], row["_receiver"]) for row in found}:
        mine = values([row for row in found if (row["_sender"], row["_receiver"]) == (sender, receiver)])
        assert mine == sorted(mine)
    job.log.clear()
    run = job.begin(parallelism)
    replayed = [call for call in job.log.calls if call.startswith("op") and " process " in call]
    assert {int(value) for call in replayed for value in call.split(": ")[1].split()} == saved
    to_end(run)
    assert job.out.seen == list(range(24))
    for key in range(4 if way == "hash" else 0):
        for subtask in range(parallelism):
            calls = job.log.of(f"op/{subtask}", "process")
            own = [int(value) for call in calls for value in call.split(": ")[1].split() if int(value) % 4 == key]
            assert own == sorted(own)


def test_what_comes_in_between_the_snapshot_and_the_barrier_of_its_channel_is_saved_too() -> None:
    bench = Bench(unaligned=True)
    taps, out = Tap([rows(0)], [rows(n) for n in (1, 3, 5, 7)]), Out(bench.log)
    flow = Dataflow("job", parallelism=2)
    middle = flow.source(taps, uid="in").apply(Told(bench.log), uid="mid", chain=False)
    middle.rebalance().apply(Told(bench.log), uid="op", parallelism=1).apply(out, uid="out", parallelism=1)
    run = bench.begin(flow)
    readers = [run.tasks[ev.TaskId("in", subtask)] for subtask in (0, 1)]
    while [reader.rows for reader in readers] != [1, 4]:
        step_all(bench, run, readers)
    begin_barrier(run)
    while not bench.log.of("op/0", "snapshot"):
        step_all(bench, run, [run.tasks[ev.TaskId("mid", 0)]])
    assert bench.log.of("mid/1", "process") == []
    while bench.newest_id == 0:
        step_all(bench, run, [run.tasks[ev.TaskId("mid", 1)]])
    assert not bench.log.of("op/0", "process")
    assert values([row for row in in_flight(bench, "mid->op.0") if row["_sender"] == 1]) == [1, 3, 5, 7]
    to_end(bench.begin(flow))
    assert out.seen == [0, 1, 3, 5, 7]


def test_a_default_edge_that_holds_records_stays_what_it_was_where_both_sides_become_of_one_size() -> None:
    job = Job(way="unspecified", sizes=(1, 2))
    overtake(job.bench, job.filled())
    assert len(in_flight(job.bench)) == 6
    assert job.replayed(1) == list(range(6))


def test_what_lies_in_a_channel_whose_sender_has_ended_is_not_lost() -> None:
    job = Job()
    overtake(job.bench, job.filled(ended=True))
    # Its logic has ended, and what it sent is on its way: the only place where it is.
    assert job.bench.status("in") == ([], [0])
    assert values(in_flight(job.bench)) == list(range(6))
    job.log.clear()
    run = job.begin(3)
    assert {task.vertex for task in run.tasks} == {"op", "out"}
    to_end(run)
    assert job.out.seen == list(range(6))
    for subtask in range(3):
        assert job.log.of(f"op/{subtask}", "end_input", "finish") == ["end_input 0", "finish"]


def test_a_sender_leaves_when_its_consumers_have_processed_its_data_and_not_before() -> None:
    job = Job()
    run = job.filled(ended=True)
    overtake(job.bench, run)
    source = run.tasks[ev.TaskId("in", 0)]
    open_mail(source)
    assert job.log.of("op/0", "process") == []
    assert not source.gone
    to_end(run)
    assert source.gone
    assert job.out.seen == list(range(6))


@pytest.mark.parametrize("seed", range(4))
def test_a_task_that_waits_and_takes_part_in_the_savepoint_of_a_stop_leaves_with_that_one(seed: int) -> None:
    job = Job(seed=seed)
    run = job.filled(ended=True)
    overtake(job.bench, run)
    source = run.tasks[ev.TaskId("in", 0)]
    open_mail(source)
    run.request_stop(StopMode.NO_DRAIN)
    until(run, lambda: source.snapshot_taken == 2)
    while job.bench.newest_id == 1:
        # An earlier checkpoint is complete and its data is processed by and by, but it has taken
        # part in this one.
        assert not source.gone
        assert run.step()
    to_end(run)
    assert source.gone
    assert job.out.seen == list(range(6))


def two_inputs(first: Tap, second: Tap, **options: Any) -> tuple[Bench, Dataflow, Out]:
    bench, flow = Bench(**options), Dataflow("job")
    out = Out(bench.log)
    one = flow.source(first, uid="one").key_by("key")
    op = one.apply(Count(bench.log), flow.source(second, uid="two").key_by("key"), uid="op")
    op.rebalance().apply(out, uid="out")
    return bench, flow, out


def read_by(bench: Bench, run: LocalRun, uid: str, count: int) -> None:
    """Let a source read so many rows, and the other tasks do nothing."""
    while run.tasks[ev.TaskId(uid, 0)].rows < count:
        step_all(bench, run, [run.tasks[ev.TaskId(uid, 0)]])


@TIMES
def test_a_task_one_of_whose_producers_has_left_takes_part_with_the_channels_that_are_open(
    how_late: dict[str, Any],
) -> None:
    slow = Tap([rows(3), rows(6)], shut=True)
    bench, flow, out = two_inputs(Tap([rows(1), rows(2)]), slow, **how_late)
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "one") == "waiting")
    bench.checkpoint(run)
    until(run, lambda: run.tasks[ev.TaskId("one", 0)].gone)
    slow.let(0, 2)
    read_by(bench, run, "two", 2)
    overtake(bench, run, run.tasks[ev.TaskId("op", 0)])
    assert bench.status("one") == ([0], [])
    assert {row["value"] for row in in_flight(bench, "two->op.1")} == {3, 6}
    assert in_flight(bench, "one->op.0") == []
    slow.let(0)
    to_end(bench.begin(flow))
    assert out.seen == [1, 1, 2]


def test_a_task_that_has_begun_to_align_saves_what_lies_in_the_channels_that_it_waits_for() -> None:
    quick, slow = Tap([rows(0)], shut=True), Tap([rows(n) for n in range(1, 6)], shut=True)
    bench, flow, out = two_inputs(quick, slow, **LATER)
    run = bench.begin(flow)
    op = run.tasks[ev.TaskId("op", 0)]
    slow.let(0, 5)
    read_by(bench, run, "two", 5)
    begin_barrier(run)
    (channel,) = [channel for channel in op.inputs if channel.edge == "one->op.0"]
    while not op.inputs[channel].elements:
        step_all(bench, run, [])
    while not op.task.is_blocked(channel):  # Now it aligns, and of the other channel it takes one batch at most.
        step_all(bench, run, [op])
    took = len(bench.log.of("op/0", "process"))
    assert took < 5
    overtake(bench, run, op)
    assert len(in_flight(bench, "two->op.1")) == 5 - took
    assert in_flight(bench, "one->op.0") == []
    quick.let(0)
    slow.let(0)
    to_end(bench.begin(flow, parallelism=2))
    assert out.seen == [1, 1, 2, 2]


@pytest.mark.parametrize("parallelism", [1, 3])
def test_a_direct_trigger_waits_for_what_lies_in_the_channels_and_saves_it_when_its_time_has_come(
    parallelism: int,
) -> None:
    job = Job(**LATER)
    bench, run = job.bench, job.filled(ended=True)
    op, source = run.tasks[ev.TaskId("op", 0)], run.tasks[ev.TaskId("in", 0)]
    overtake(bench, run, op)
    assert bench.status("in") == ([], [0])
    assert len(in_flight(bench)) == 6
    # The reader leaves while its consumer has taken nothing, as where data is acknowledged on
    # receipt.
    (channel,) = op.inputs
    run.confirm([channel])
    while not source.gone:
        step_all(bench, run, [source])
    begin_barrier(run)
    assert run.in_flight is not None
    assert set(run.in_flight.plan.trigger) == {ev.TaskId("op", 0)}
    overtake(bench, run, op)
    assert bench.status("in") == ([0], [])
    assert values(in_flight(bench)) == list(range(6))
    assert job.log.of("op/0", "process") == []
    assert job.replayed(parallelism) == list(range(6))


def test_a_late_barrier_that_was_aborted_does_not_end_the_log_of_an_unaligned_one() -> None:
    bench, flow = Bench(unaligned=True, tolerable_failures=3, checkpoint_interval_us=None), Dataflow("job")
    quick, slow = (
        flow.source(Tap([rows(10 * first + n) for n in range(3)], endless=True), uid=f"in{first}")
        .rebalance()
        .apply(Told(bench.log), uid=f"mid{first}", chain=False)
        .rebalance()
        for first in (0, 1)
    )
    op = flow.apply(Told(bench.log), quick, slow, uid="op", chain=False)
    op.apply(Out(bench.log), uid="out", chain=False)
    run = bench.begin(flow)
    in0, in1, mid0, mid1, op0, out0 = (
        run.tasks[ev.TaskId(uid, 0)] for uid in ("in0", "in1", "mid0", "mid1", "op", "out")
    )
    while in1.rows < 3:
        bench.clock.wait_until(bench.clock.now_us() + 10_000)
        in1.step(random.Random(0))
        step_driver(run)
    begin_barrier(run)
    open_mail(in1)
    step_driver(run, ev.TimedOut(1))
    begin_barrier(run)
    for task in (in0, mid0, op0):
        open_mail(task)
    assert bench.log.of("op/0") == ["open", "snapshot"]
    # It hears of the first barrier and of its end, and then passes on what it has.
    open_mail(mid1)
    assert bench.log.of("mid1/0", "process") == []
    for _ in range(3):
        mid1.step(random.Random(0))
    assert bench.log.of("mid1/0", "process") == [f"process 0: {n}" for n in (10, 11, 12)]
    while bench.newest_id == 0:
        for task in run.tasks.values():
            open_mail(task)
        if out0.ready(bench.clock.now_us()):
            out0.step(random.Random(0))
        step_driver(run)
    assert values(in_flight(bench, "mid1->op.1")) == [10, 11, 12]


def test_savepoints_and_the_barriers_of_ends_are_aligned() -> None:
    job = Job()
    job.tap.let(0, 6)
    run = job.filled()
    # The source holds, and the barrier waits behind what it has sent.
    run.request_stop(StopMode.NO_DRAIN)
    to_end(run)
    assert job.bench.newest.stop is not None
    assert in_flight(job.bench) == []
    assert job.out.seen == list(range(6))


class Narrow(Tap):
    """A later version of the source, whose rows lack a column."""

    schema = pa.schema([item for item in ROWS if item.name != "at"])  # type: ignore[assignment]


def test_columns_of_records_in_flight_do_not_go_in_silence() -> None:
    job = Job()
    overtake(job.bench, job.filled())
    (name,) = [state.name for state in job.bench.newest.states if (state.operator, state.mode) == ("op", "in_flight")]
    job.tap = Narrow([], endless=True)
    for unaligned in (True, False):
        with pytest.raises(RestoreRefused, match=f"has the column 'at' .*drop='op/{name}.at'"):
            job.begin(unaligned=unaligned)
    run = job.begin(drop=[f"op/{name}.at"])
    settle(run)
    assert job.log.of("op/0", "process") == ["process 0: 0 1 2 3 4 5"]
