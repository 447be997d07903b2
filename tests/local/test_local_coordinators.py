"""Coordinators of operators: what they keep, what they receive exactly once, and what they say
behind the barrier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.dataflow import events as ev
from stateformat.backends.local import JobFailed, LocalRun, RunDiscarded
from stateformat.model import Mode, StopMode
from tests.worlds.local import (
    Bench,
    Line,
    Log,
    Tap,
    Told,
    begin_barrier,
    open_mail,
    rows,
    settle,
    state_of,
    step_driver,
    to_end,
    until,
    until_read,
    until_told,
)

ALL = sorted(map(str, [*range(4), *range(10, 14)]))


class Register(df.OperatorCoordinator):
    """Writes down what it receives.

    ``says``: what it sends to subtask 0 while it is snapshotted.
    """

    columns = pa.schema([pa.field("subtask", pa.int64()), pa.field("what", pa.string())])

    def __init__(self, log: Log, kept: list[list[tuple[int, str]]], says: str | None) -> None:
        self.log, self.says = log, says
        self.entries: list[tuple[int, str]] = []
        self.kept = kept

    def open(self, send: df.Sender) -> None:
        self.send = send
        self.kept.append(self.entries)
        self.log.tell("register", "open")

    def restore(self, rows: pa.Table) -> None:
        self.entries += [(row["subtask"], row["what"]) for row in rows.to_pylist()]
        self.log.tell("register", f"restore {len(self.entries)}")

    def receive(self, subtask: int, message: bytes) -> None:
        self.log.tell("register", f"receive {message.decode()}")
        self.entries.append((subtask, message.decode()))

    def snapshot(self) -> pa.Table:
        self.log.tell("register", "snapshot")
        if self.says:
            self.send(0, self.says.encode())
        return pa.Table.from_pylist([{"subtask": n, "what": what} for n, what in self.entries], self.columns)

    def checkpoint_complete(self) -> None:
        self.log.tell("register", "complete")


class Reports(Told):
    """Sends its coordinator the values of each batch, and that it has finished.

    Keeps what it receives.
    """

    def __init__(self, log: Log, says: str | None = None, kind: type[Register] | None = Register) -> None:
        super().__init__(log)
        self.kept: list[list[tuple[int, str]]] = []
        self.says, self.kind = says, kind

    def coordinator(self) -> df.OperatorCoordinator | None:
        return self.kind(self.log, self.kept, self.says) if self.kind else None

    def states(self, *inputs: pa.Schema) -> list[df.SplitList]:
        return [df.SplitList("told", {"word": pa.string()})]

    def receive(self, message: bytes) -> df.Output:
        self.context.entries("told").append(pa.record_batch({"word": [message.decode()]}))
        return super().receive(message)

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        for value in batch["value"].to_pylist():
            self.context.send_to_coordinator(str(value).encode())
        return super().process(batch, input)

    def finish(self) -> df.Output:
        self.context.send_to_coordinator(b"finished")
        return super().finish()


class Job(Line):
    def __init__(
        self, *splits: Any, says: str | None = None, kind: type[Register] | None = Register, **how: Any
    ) -> None:
        both = [rows(n) for n in range(4)], [rows(10 + n) for n in range(4)]
        options = {"how": "rebalance", "parallelism": 2, **how}
        super().__init__(*(splits or both), op=lambda log: Reports(log, says, kind), **options)

    @property
    def register(self) -> list[tuple[int, str]]:
        """What the newest coordinator has received."""
        kept: list[tuple[int, str]] = self.op.kept[-1]  # type: ignore[attr-defined]
        return kept

    def told(self) -> list[str]:
        return sorted(what for _, what in self.register if what != "finished")

    def saved(self) -> list[dict[str, Any]]:
        """The rows of the coordinator in the newest checkpoint."""
        (state,) = [
            state for state in self.bench.newest.states if (state.operator, state.mode) == ("op", "coordinator")
        ]
        return self.bench.state("op", state.name)


def test_what_subtasks_send_their_coordinator_is_in_the_checkpoint_and_comes_back_at_any_parallelism() -> None:
    job = Job(shut=True)
    run = job.begin()
    for split in (0, 1):
        job.tap.let(split, 2)
    until(run, lambda: len(job.register) == 4)
    job.bench.checkpoint(run)
    assert sorted(row["what"] for row in job.saved()) == ["0", "1", "10", "11"]
    job.log.clear()
    run = job.begin(3)
    first = job.log.calls[:3]
    assert first == ["out clean 1", "register open", "register restore 4"] or first[0].startswith("out commit")
    for split in (0, 1):
        job.tap.let(split)
    to_end(run)
    assert job.told() == ALL
    assert len(job.register) == len(ALL) + 3


def test_a_message_sent_between_the_trigger_and_the_snapshot_of_its_sender_is_in_the_checkpoint_and_comes_again() -> (
    None
):
    found = 0
    for seed in range(8):
        job = Job(seed=seed, requests_every_us=None)
        run = job.begin()
        until_read(run, 2)
        job.bench.due(run)
        until(run, lambda run=run: run.published == 1)
        saved = job.saved()
        logged = [row["message"].decode() for row in saved if row["message"] is not None]
        own = [row["what"] for row in saved if row["message"] is None]
        found += len(logged)
        assert not set(logged) & set(own)
        job.log.clear()
        to_end(job.begin(1 + seed % 3))
        again = job.log.of("register", "receive", "restore")
        # Its own first, then what was on its way, then whatever is new.
        assert again[: 1 + len(logged)] == [f"restore {len(own)}", *(f"receive {word}" for word in logged)]
        assert job.told() == ALL
    assert found, "no seed has tried it"


@pytest.mark.parametrize("seed", range(6))
def test_what_a_coordinator_says_while_a_checkpoint_is_in_flight_comes_behind_the_barrier(seed: int) -> None:
    job = Job(says="later", shut=True, seed=seed)
    run = job.begin()
    settle(run, 20)
    job.bench.checkpoint(run)
    until_told(run, job.log, "op/0 receive later")
    assert job.log.of("op/0", "snapshot", "receive") == ["snapshot", "receive later"]
    assert job.log.of("op/1", "receive") == []


def one(says: str | None, **options: Any) -> tuple[Job, LocalRun, Callable[[int, bytes], None]]:
    """A job of one subtask that is settled, and the sender of its coordinator."""
    job = Job([rows(1)], says=says, how="forward", parallelism=1, endless=True, checkpoint_interval_us=None, **options)
    run = job.begin()
    settle(run, 20)
    coordinator: Any = run._driver.coordinators["op"]
    return job, run, coordinator.send


def test_what_a_coordinator_said_behind_an_aborted_barrier_is_delivered_then_and_in_order() -> None:
    job, run, send = one("pending", tolerable_failures=3)
    begin_barrier(run)
    open_mail(run.tasks[ev.TaskId("op", 0)])
    assert job.log.of("op/0", "receive") == []
    step_driver(run, ev.TimedOut(1))
    send(0, b"after")
    settle(run, 20)
    assert job.log.of("op/0", "snapshot", "receive")[-2:] == ["receive pending", "receive after"]


def test_what_a_coordinator_said_before_its_snapshot_is_in_that_of_its_receiver() -> None:
    job, run, send = one("pending")
    send(0, b"before")
    begin_barrier(run)
    until(run, lambda: run.published == 1)
    assert [row["word"] for row in job.bench.state("op", "told")] == ["before"]
    settle(run, 20)
    begin_barrier(run)
    until(run, lambda: run.published == 2)
    assert [row["word"] for row in job.bench.state("op", "told")] == ["before", "pending"]


def test_a_coordinator_hears_of_completion_after_the_commit() -> None:
    job = Job(shut=True)
    run = job.begin()
    job.let(run, 1)
    job.bench.checkpoint(run)
    order = [call for call in job.log.calls if call in ("register snapshot", "out committed 1", "register complete")]
    assert order == ["register snapshot", "out committed 1", "register complete"]


def test_what_a_finished_subtask_said_outlives_it() -> None:
    job = Job([rows(0)], [rows(1), rows(2)], how="forward", shut=True)
    bench, run = job.bench, job.begin()
    job.tap.let(0)
    job.tap.let(1, 1)
    until(run, lambda: state_of(run, "op", 0) == "waiting" and len(job.register) == 3)
    bench.checkpoint(run)
    until(run, lambda: all(run.tasks[ev.TaskId(uid, 0)].gone for uid in ("in", "op", "out")))
    bench.checkpoint(run)
    assert bench.status("op") == ([0], [])
    run = job.begin(1)
    assert sorted(job.register) == [(0, "0"), (0, "finished"), (1, "1")]
    job.tap.let(1)
    to_end(run)
    assert sorted(word for _, word in job.register) == ["0", "1", "2", "finished", "finished"]


def test_the_state_of_a_coordinator_is_gone_when_its_operator_is_fully_finished() -> None:
    job = Job()
    job.run()
    assert job.bench.status("op") == ([], [0, 1])
    assert "coordinator" not in job.bench.store.open().handles["mode"].to_pylist()


def two_flows(bench: Bench, fast: Tap, op: Told, slow: Tap) -> df.Dataflow:
    flow = df.Dataflow("job")
    flow.source(fast, uid="fast").apply(op, uid="op", chain=False)
    flow.source(slow, uid="slow").apply(Told(bench.log), uid="other", chain=False)
    return flow


def test_no_coordinator_and_no_enumerator_is_made_for_what_has_finished() -> None:
    made: list[str] = []

    class Reporting(Reports):
        def coordinator(self) -> df.OperatorCoordinator | None:
            made.append("coordinator")
            return super().coordinator()

    class Counted(Tap):
        def enumerator(self) -> df.SplitEnumerator:
            made.append("enumerator")
            return super().enumerator()

    bench, slow = Bench(), Tap([rows(1)], shut=True)
    flow = two_flows(bench, Counted([rows(0)]), Reporting(bench.log), slow)
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "op") == "waiting")
    while bench.newest_id == 0 or bench.newest.graph.operator("op").status != "fully_finished":
        bench.checkpoint(run)
    assert set(made) == {"coordinator", "enumerator"}
    made.clear()
    run = bench.begin(flow)
    assert set(run._driver.enumerators) == {"slow"}
    slow.let(0)
    to_end(run)
    assert bench.run(flow).sentence.startswith("the job had finished")
    assert made == []
    coordinators = {str(state.operator) for state in bench.newest.states if state.mode is Mode.COORDINATOR}
    assert coordinators == {"fast", "slow", "op"}
    assert bench.newest.graph.operator("op").coordinator


def test_a_message_to_a_subtask_whose_logic_has_ended_is_lost_with_a_warning_that_comes_once() -> None:
    bench, slow = Bench(), Tap([rows(1)], shut=True)
    run = bench.begin(two_flows(bench, Tap([rows(0)]), Reports(bench.log, says="anyone?"), slow))
    until(run, lambda: state_of(run, "op") == "waiting")
    bench.checkpoint(run)
    settle(run, 60)
    bench.checkpoint(run)
    assert bench.log.of("op/0", "receive") == []
    (warning,) = run.progress().warnings
    assert warning.startswith("The coordinator of operator 'op' sent a message to subtask 0, whose input had ended")
    slow.let(0)
    to_end(run)


def test_a_coordinator_that_sends_after_a_stop_without_drain_loses_nothing() -> None:
    class Late(Register):
        def checkpoint_complete(self) -> None:
            self.send(0, b"anyone?")

    run = Job(kind=Late, shut=True, requests_every_us=None).begin()
    settle(run, 20)
    run.request_stop(StopMode.NO_DRAIN)
    to_end(run)
    assert run.progress().warnings == ()


@pytest.mark.parametrize("subtask", [-1, 2])
def test_a_coordinator_cannot_send_to_a_subtask_that_does_not_exist(subtask: int) -> None:
    class Astray(Register):
        def receive(self, _: int, message: bytes) -> None:
            self.send(subtask, message)

    with pytest.raises(JobFailed, match=f"sent to subtask {subtask}. The operator has subtasks 0 to 1 in this run"):
        Job(kind=Astray, max_restarts=0).run()


@pytest.mark.parametrize("what", ["open", "receive 0", "complete"])
def test_a_coordinator_that_fails_is_a_failure_of_the_job_and_the_job_starts_again(what: str) -> None:
    job = Job(checkpoint_interval_us=20_000)
    job.log.failing.append(f"register {what}")
    assert job.run().restarts == 1
    assert job.out.seen == [*range(4), *range(10, 14)]
    assert job.log.failing == []


def test_the_snapshot_of_a_coordinator_that_fails_is_a_failed_checkpoint() -> None:
    job = Job(shut=True, tolerable_failures=1)
    run = job.begin()
    job.log.failing += ["register snapshot"] * 2
    job.bench.due(run)
    until(run, lambda: run.in_flight is None)
    job.bench.due(run)
    with pytest.raises(RunDiscarded, match="the snapshot of a coordinator failed: that of operator 'op'"):
        settle(run)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "of the coordinator of 'op' returned NoneType. Return a table"),
        (pa.table({"m": [1]}), r"of the coordinator of 'op' returned columns \['m'\]; its columns are \['subtask', 'w"),
        (pa.table({"subtask": ["x"], "what": ["x"]}), "of the coordinator of 'op' returned other types than declared"),
    ],
)
def test_a_coordinator_that_returns_what_it_has_not_declared_fails_the_snapshot(found: Any, sentence: str) -> None:
    class Wrong(Register):
        def snapshot(self) -> Any:
            return found

    job = Job(kind=Wrong, endless=True)
    run = job.begin()
    with pytest.raises(RunDiscarded, match=sentence):
        job.bench.checkpoint(run)


def test_an_operator_without_a_coordinator_can_send_it_nothing() -> None:
    with pytest.raises(JobFailed, match="operator 'op' has no coordinator to send to; give it one"):
        Job(kind=None, max_restarts=0).run()
