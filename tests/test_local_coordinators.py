"""Coordinators of operators: what they keep, what they are told exactly once, and what they say behind the barrier."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends.dataflow import Dataflow, OperatorCoordinator, Output, Sender, SplitEnumerator
from stateformat.backends.dataflow.events import TaskId
from stateformat.backends.local import JobFailed, LocalRun, RunDiscarded
from stateformat.model import Mode, StopMode
from tests.local_jobs import Bench, Log, Out, Tap, Told, rows, settle, state_of, to_end, until, until_read, until_told


class Register(OperatorCoordinator):
    """Writes down what it is told. ``says``: what it sends to subtask 0 while it is snapshotted."""

    columns = pa.schema([pa.field("subtask", pa.int64()), pa.field("what", pa.string())])

    def __init__(self, log: Log, kept: list[list[tuple[int, str]]], says: str | None) -> None:
        self.log, self.says = log, says
        self.entries: list[tuple[int, str]] = []
        self.kept = kept

    def open(self, send: Sender) -> None:
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
        return pa.table(
            {"subtask": [subtask for subtask, _ in self.entries], "what": [what for _, what in self.entries]},
            self.columns,
        )

    def checkpoint_complete(self) -> None:
        self.log.tell("register", "complete")


class Reports(Told):
    """Tells its coordinator the values of each batch, and that it has finished."""

    def __init__(self, log: Log, says: str | None = None) -> None:
        super().__init__(log)
        self.kept: list[list[tuple[int, str]]] = []
        self.says = says

    def coordinator(self) -> OperatorCoordinator:
        return Register(self.log, self.kept, self.says)

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        for value in batch["value"].to_pylist():
            self.context.send_to_coordinator(str(value).encode())
        return super().process(batch, input)

    def finish(self) -> Output:
        self.context.send_to_coordinator(b"finished")
        return super().finish()


class Job:
    def __init__(self, bench: Bench, *splits: Any, says: str | None = None, shut: bool = False) -> None:
        self.tap = Tap(*(splits or ([rows(n) for n in range(4)], [rows(10 + n) for n in range(4)])), shut=shut)
        self.op = Reports(bench.log, says)
        self.out = Out(bench.log)
        self.parallelism = 2

    def flow(self) -> Dataflow:
        flow = Dataflow("job", parallelism=self.parallelism)
        stream = flow.source(self.tap, uid="in").rebalance().apply(self.op, uid="op")
        stream.apply(self.out, uid="out", chain=False)
        return flow

    @property
    def register(self) -> list[tuple[int, str]]:
        """What the newest coordinator has been told."""
        return self.op.kept[-1]

    def told(self) -> list[str]:
        return sorted(what for _, what in self.register)


def coordinator_state(bench: Bench) -> list[dict[str, Any]]:
    """The rows that the newest checkpoint holds for the coordinator of ``op``."""
    (state,) = [state for state in bench.newest.states if state.operator == "op" and state.mode == "coordinator"]
    return bench.state("op", state.name)


def until_published(bench: Bench, run: LocalRun, checkpoint_id: int) -> None:
    until(run, lambda: bench.newest_id == checkpoint_id)


def test_what_subtasks_tell_their_coordinator_is_kept_in_the_checkpoint_and_comes_back_at_any_parallelism() -> None:
    bench = Bench()
    job = Job(bench, shut=True)
    job.tap.let(0, 2)
    job.tap.let(1, 2)
    run = bench.begin(job.flow())
    until(run, lambda: len(job.register) == 4)
    bench.checkpoint(run)
    assert sorted(row["what"] for row in coordinator_state(bench)) == ["0", "1", "10", "11"]
    job.parallelism = 3
    bench.log.clear()
    run = bench.begin(job.flow())
    assert bench.log.calls[:3] == ["out clean 1", "register open", "register restore 4"] or bench.log.calls[
        0
    ].startswith("out commit")
    job.tap.let(0)
    job.tap.let(1)
    to_end(run)
    expected = sorted([*map(str, range(4)), *map(str, range(10, 14)), *["finished"] * 3])
    assert job.told() == expected


def test_a_message_sent_between_the_trigger_and_the_snapshot_of_its_sender_is_in_the_checkpoint_and_given_again() -> (
    None
):
    found = 0
    for seed in range(8):
        bench = Bench(seed=seed, requests_every_us=None)
        job = Job(bench)
        run = bench.begin(job.flow())
        until_read(run, 2)
        bench.due(run)
        until_published(bench, run, 1)
        rows_kept = coordinator_state(bench)
        logged = [row["message"].decode() for row in rows_kept if row["message"] is not None]
        own = [row["what"] for row in rows_kept if row["message"] is None]
        found += len(logged)
        assert not set(logged) & set(own)
        bench.log.clear()
        job.parallelism = 1 + seed % 3
        to_end(bench.begin(job.flow()))
        again = bench.log.of("register", "receive", "restore")
        # Its own first, then what was on its way, then whatever is new.
        assert again[: 1 + len(logged)] == [f"restore {len(own)}", *(f"receive {word}" for word in logged)]
        values = [word for word in job.told() if word != "finished"]
        assert values == sorted(map(str, [*range(4), *range(10, 14)]))
    assert found, "no seed has tried it"


@pytest.mark.parametrize("seed", range(4))
def test_messages_are_told_exactly_once_wherever_the_run_is_killed(seed: int) -> None:
    bench = Bench(checkpoint_interval_us=15_000)
    job = Job(bench)
    for kill in range(5):
        begun = bench.runtime(seed=seed * 10 + kill).begin(job.flow())
        for _ in range(25 + 12 * kill):
            if not getattr(begun, "step", lambda: False)():
                break
        job.parallelism = 1 + (kill + seed) % 3
    bench.run(job.flow())
    assert [word for word in job.told() if word != "finished"] == sorted(map(str, [*range(4), *range(10, 14)]))
    assert job.out.seen == [*range(4), *range(10, 14)]


def test_what_a_coordinator_says_while_a_checkpoint_is_pending_comes_behind_the_barrier() -> None:
    for seed in range(6):
        bench = Bench(seed=seed)
        job = Job(bench, says="later", shut=True)
        run = bench.begin(job.flow())
        settle(run, 20)
        bench.checkpoint(run)
        until_told(run, bench.log, "op/0 receive later")
        assert bench.log.of("op/0", "snapshot", "receive") == ["snapshot", "receive later"]
        assert bench.log.of("op/1", "receive") == []


def test_a_coordinator_is_told_of_completion_after_the_commit() -> None:
    bench = Bench()
    job = Job(bench, shut=True)
    run = bench.begin(job.flow())
    job.tap.let(0, 1)
    until(run, lambda: "out/0 process 0: 0" in bench.log.calls or "out/1 process 0: 0" in bench.log.calls)
    bench.checkpoint(run)
    order = [call for call in bench.log.calls if call in ("register snapshot", "out committed 1", "register complete")]
    assert order == ["register snapshot", "out committed 1", "register complete"]


def test_what_a_finished_subtask_said_outlives_it() -> None:
    bench = Bench()
    tap = Tap([rows(0)], [rows(1), rows(2)], shut=True)
    op, out = Reports(bench.log), Out(bench.log)

    def flow(parallelism: int) -> Dataflow:
        made = Dataflow("job", parallelism=parallelism)
        made.source(tap, uid="in").apply(op, uid="op", chain=False).apply(out, uid="out", chain=False)
        return made

    run = bench.begin(flow(2))
    tap.let(0)
    tap.let(1, 1)
    until(run, lambda: state_of(run, "op", 0) == "waiting" and len(op.kept[-1]) == 3)
    bench.checkpoint(run)
    until(run, lambda: all(run.tasks[TaskId(uid, 0)].gone for uid in ("in", "op", "out")))
    bench.checkpoint(run)
    assert bench.status("op") == ([0], [])
    run = bench.begin(flow(1))
    assert sorted(op.kept[-1]) == [(0, "0"), (0, "finished"), (1, "1")]
    tap.let(1)
    to_end(run)
    assert sorted(word for _, word in op.kept[-1]) == ["0", "1", "2", "finished", "finished"]


def test_the_state_of_a_coordinator_is_gone_when_its_operator_is_fully_finished() -> None:
    bench = Bench()
    job = Job(bench)
    bench.run(job.flow())
    assert bench.status("op") == ([], [0, 1])
    handles = bench.store.open().handles
    assert "coordinator" not in handles["mode"].to_pylist()


def test_no_coordinator_and_no_enumerator_is_made_for_what_has_finished() -> None:
    made: list[str] = []

    class Reporting(Reports):
        def coordinator(self) -> OperatorCoordinator:
            made.append("coordinator")
            return super().coordinator()

    class Counted(Tap):
        def enumerator(self) -> SplitEnumerator:
            made.append("enumerator")
            return super().enumerator()

    bench = Bench()
    fast, slow = Counted([rows(0)]), Tap([rows(1)], shut=True)
    flow = Dataflow("job")
    flow.source(fast, uid="fast").apply(Reporting(bench.log), uid="op")
    flow.source(slow, uid="slow").apply(Told(bench.log), uid="other")
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "op") == "waiting")
    bench.checkpoint(run)
    assert set(made) == {"coordinator", "enumerator"}
    made.clear()
    run = bench.begin(flow)
    slow.let(0)
    to_end(run)
    assert bench.run(flow).sentence.startswith("the job had finished")
    assert made == []
    coordinators = {str(state.operator) for state in bench.newest.states if state.mode is Mode.COORDINATOR}
    assert coordinators == {"fast", "slow", "op"}
    assert bench.newest.graph.operator("op").coordinator


def test_a_message_to_a_subtask_whose_logic_has_ended_is_lost_with_a_warning_that_comes_once() -> None:
    bench = Bench()
    fast, slow = Tap([rows(0)]), Tap([rows(1)], shut=True)
    flow = Dataflow("job")
    flow.source(fast, uid="fast").apply(Reports(bench.log, says="anyone?"), uid="op", chain=False)
    flow.source(slow, uid="slow").apply(Told(bench.log), uid="other", chain=False)
    run = bench.begin(flow)
    until(run, lambda: state_of(run, "op") == "waiting")
    bench.checkpoint(run)
    settle(run, 60)
    bench.checkpoint(run)
    assert bench.log.of("op/0", "receive") == []
    assert [warning[:78] for warning in run.progress().warnings] == [
        "The coordinator of operator 'op' sent a message to subtask 0, whose input had "
    ]
    slow.let(0)
    to_end(run)


def test_a_coordinator_that_sends_after_a_stop_without_drain_loses_nothing() -> None:
    class Late(Register):
        def checkpoint_complete(self) -> None:
            self.send(0, b"anyone?")

    class Reporting(Reports):
        def coordinator(self) -> OperatorCoordinator:
            return Late(self.log, self.kept, None)

    bench = Bench(requests_every_us=None)
    job = Job(bench, shut=True)
    job.op = Reporting(bench.log)
    run = bench.begin(job.flow())
    settle(run, 20)
    run.request_stop(StopMode.NO_DRAIN)
    to_end(run)
    assert run.progress().warnings == ()


@pytest.mark.parametrize("subtask", [-1, 2])
def test_a_coordinator_cannot_send_to_a_subtask_that_there_is_not(subtask: int) -> None:
    class Astray(Register):
        def receive(self, _: int, message: bytes) -> None:
            self.send(subtask, message)

    class Reporting(Reports):
        def coordinator(self) -> OperatorCoordinator:
            return Astray(self.log, self.kept, None)

    bench = Bench(max_restarts=0)
    job = Job(bench)
    job.op = Reporting(bench.log)
    with pytest.raises(JobFailed, match=f"sent to subtask {subtask}. The operator has subtasks 0 to 1 in this run"):
        bench.run(job.flow())


@pytest.mark.parametrize("what", ["open", "receive 0", "complete"])
def test_a_coordinator_that_fails_is_a_failure_of_the_job_and_the_job_starts_again(what: str) -> None:
    bench = Bench()
    job = Job(bench)
    bench.log.failing.append(f"register {what}")
    outcome = bench.run(job.flow(), checkpoint_interval_us=20_000)
    assert outcome.restarts == 1
    assert job.out.seen == [*range(4), *range(10, 14)]
    assert bench.log.failing == []


def test_the_snapshot_of_a_coordinator_that_fails_is_a_failed_checkpoint() -> None:
    bench = Bench(tolerable_failures=1)
    job = Job(bench, shut=True)
    run = bench.begin(job.flow())
    bench.log.failing += ["register snapshot"] * 2
    bench.due(run)
    until(run, lambda: run.in_flight is None)
    bench.due(run)
    with pytest.raises(RunDiscarded, match="the snapshot of a coordinator failed: that of operator 'op'"):
        settle(run)


def test_an_operator_without_a_coordinator_can_send_it_nothing() -> None:
    class Alone(Reports):
        def coordinator(self) -> None:  # type: ignore[override]
            return None

    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    flow.source(Tap([rows(0)]), uid="in").apply(Alone(bench.log), uid="op")
    with pytest.raises(JobFailed, match="operator 'op' has no coordinator to send to; give it one"):
        bench.run(flow)
