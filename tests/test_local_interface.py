"""What a user of the in-process executor meets: edges, chains, options, order, progress, sentences."""

from __future__ import annotations

import contextlib
import io
import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends.connectors import CollectSink, MemorySource, RateSource
from stateformat.backends.dataflow import Dataflow, Descriptor, OperatorContext, Output, Timers, ValueState
from stateformat.backends.dataflow.events import TaskId
from stateformat.backends.dataflow.operators import Deduplicate, TumblingWindow
from stateformat.backends.local import (
    JobFailed,
    JobOutcome,
    LocalRuntime,
    Options,
    Progress,
    ProgressLine,
    RunDiscarded,
    VirtualClock,
)
from stateformat.errors import CheckpointError, InvalidInput, JobMismatch
from stateformat.model import StopMode
from tests.local_jobs import KEY, Bench, Count, Out, Tap, Told, rows, settle, to_end, until


def passed(bench: Bench, uid: str, parallelism: int) -> list[list[int]]:
    """The values that each subtask of an operator was given, in order."""
    return [
        [int(value) for call in bench.log.of(f"{uid}/{subtask}", "process") for value in call.split(": ")[1].split()]
        for subtask in range(parallelism)
    ]


def routed(bench: Bench, how: str, *, readers: int = 2, parallelism: int = 3) -> list[list[int]]:
    flow = Dataflow("job", parallelism=parallelism)
    splits = [[rows(n) for n in range(start, 24, readers)] for start in range(readers)]
    stream = flow.source(Tap(*splits), uid="in", parallelism=readers)
    taken = stream.key_by("key") if how == "key_by" else getattr(stream, how)()
    taken.apply(Told(bench.log), uid="op")
    bench.run(flow)
    return passed(bench, "op", parallelism)


# Edges -------------------------------------------------------------------------------------------------------------------


def test_a_key_is_always_given_to_the_same_subtask() -> None:
    given = routed(Bench(), "key_by")
    assert sorted(value for own in given for value in own) == list(range(24))
    keys = [{value % 4 for value in own} for own in given]
    assert sum(len(own) for own in keys) == len(set().union(*keys)) == 4


def test_rebalance_gives_batches_to_all_in_turn() -> None:
    given = routed(Bench(), "rebalance")
    assert sorted(value for own in given for value in own) == list(range(24))
    assert [len(own) for own in given] == [8, 8, 8]


def test_broadcast_gives_everything_to_everybody() -> None:
    for own in routed(Bench(), "broadcast"):
        assert sorted(own) == list(range(24))


def test_rescale_gives_batches_to_those_that_are_near() -> None:
    given = routed(Bench(), "rescale", readers=2, parallelism=4)
    assert sorted(value for own in given for value in own) == list(range(24))
    # Two receivers for each reader; even and odd values are the two readers'.
    assert [{value % 2 for value in own} for own in given] == [{0}, {0}, {1}, {1}]


def test_forward_stays_in_its_subtask() -> None:
    given = routed(Bench(), "forward", readers=3, parallelism=3)
    assert [sorted(own) for own in given] == [list(range(start, 24, 3)) for start in range(3)]


def test_each_channel_keeps_its_order() -> None:
    for how in ("rebalance", "broadcast", "key_by"):
        for own in routed(Bench(), how):
            for reader in (0, 1):
                mine = [value for value in own if value % 2 == reader]
                assert mine == sorted(mine)


@pytest.mark.parametrize("chain", [True, False])
def test_what_comes_out_does_not_depend_on_chains(chain: bool) -> None:
    bench = Bench()
    flow, out = Dataflow("job", parallelism=2), Out(bench.log)
    stream = flow.source(Tap([rows(1, 2)], [rows(3)]), uid="in")
    stream.apply(Told(bench.log), uid="a", chain=chain).apply(Told(bench.log), uid="b", chain=chain).apply(
        out, uid="out", chain=chain
    )
    run = bench.begin(flow)
    assert len(run.tasks) == (2 if chain else 8)
    to_end(run)
    assert out.seen == [1, 2, 3]
    for uid in ("a", "b"):
        assert bench.log.of(f"{uid}/0") == ["open", "process 0: 1 2", "end_input 0", "finish", "complete", "close"]


def test_an_operator_with_several_consumers_gives_each_of_them_everything() -> None:
    bench = Bench()
    flow, outs = Dataflow("job"), [Out(bench.log) for _ in range(3)]
    stream = flow.source(Tap([rows(1, 2), rows(3)]), uid="in").apply(Told(bench.log), uid="op")
    for number, out in enumerate(outs):
        stream.apply(out, uid=f"out{number}", chain=number != 1)
    bench.run(flow)
    assert [out.seen for out in outs] == [[1, 2, 3]] * 3


def test_an_operator_reads_inputs_of_different_schemas() -> None:
    seen: list[tuple[int, list[str]]] = []

    class Two(Told):
        def process(self, batch: pa.RecordBatch, input: int) -> Output:
            seen.append((input, batch.schema.names))
            return None

    bench = Bench()
    flow = Dataflow("job")
    other = flow.source(MemorySource(pa.table({"name": ["a"]})), uid="names")
    flow.source(Tap([rows(1)]), uid="in").apply(Two(bench.log), other, uid="op")
    bench.run(flow)
    assert sorted(seen) == [(0, ["key", "value", "at"]), (1, ["name"])]


# Time --------------------------------------------------------------------------------------------------------------------


def test_timers_fire_in_order_of_time_when_event_time_has_passed_them() -> None:
    class Wakes(Told):
        def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
            return [Timers("wake", KEY)]

        def process(self, batch: pa.RecordBatch, input: int) -> Output:
            for value in batch["value"].to_pylist():
                self.context.timers("wake").set_one((value % 4,), value + 10)
            return super().process(batch, input)

    bench = Bench()
    flow = Dataflow("job")
    tap = Tap([rows(5, 1, 3, at=3), rows(30), rows(31)], shut=True)
    flow.source(tap, uid="in", event_time="at").key_by("key").apply(Wakes(bench.log), uid="op")
    run = bench.begin(flow)
    tap.let(0, 1)
    settle(run)
    assert bench.log.of("op/0", "timers") == []
    tap.let(0, 2)
    until(run, lambda: bench.log.of("op/0", "timers"))
    assert bench.log.of("op/0", "timers") == ["timers: 11, 13, 15"]
    tap.let(0)
    to_end(run)
    assert bench.log.of("op/0", "timers") == ["timers: 11, 13, 15", "timers: 40, 41"]


def test_the_time_of_a_task_is_the_least_of_its_inputs() -> None:
    seen: list[int] = []

    class Watch(Told):
        def process(self, batch: pa.RecordBatch, input: int) -> Output:
            seen.append(self.context.watermark)
            return super().process(batch, input)

    bench = Bench()
    flow = Dataflow("job")
    slow, fast = Tap([rows(10), rows(20), rows(21)], shut=True), Tap([rows(1000), rows(2000)], shut=True)
    one = flow.source(slow, uid="one", event_time="at").rebalance()
    two = flow.source(fast, uid="two", event_time="at").rebalance()
    one.apply(Watch(bench.log), two, uid="op")
    run = bench.begin(flow)
    for tap, chunks in ((slow, 1), (fast, 1), (slow, 2), (fast, 2), (slow, 3)):
        tap.let(0, chunks)
        settle(run, 60)
    assert seen[2:] == [10, 20, 20]
    assert max(seen) == 20
    assert seen == sorted(seen)


def test_an_unbounded_rate_source_is_windowed_until_the_job_is_stopped() -> None:
    bench = Bench(checkpoint_interval_us=500_000)
    out = CollectSink()
    flow = Dataflow("job", parallelism=2)
    ticks = flow.source(RateSource(rows_per_second=100, shards=2, step_us=10_000), uid="ticks", event_time="at")
    ticks.key_by("shard").apply(TumblingWindow("shard", 100_000, "at", {"n": ("*", "count")}), uid="window").apply(
        out, uid="out"
    )
    run = bench.begin(flow)
    until(run, lambda: out.table().num_rows >= 6)
    assert set(out.table()["n"].to_pylist()) == {10}
    run.request_stop(StopMode.DRAIN)
    to_end(run)
    assert sum(out.table()["n"].to_pylist()) == run.rows_read


# Operators are copies, state is declared -----------------------------------------------------------------------------------


def test_every_subtask_works_on_a_copy_of_its_own() -> None:
    class Own(Told):
        def open(self, context: OperatorContext) -> None:
            super().open(context)
            self.mine: list[int] = []

        def process(self, batch: pa.RecordBatch, input: int) -> Output:
            self.mine += batch["value"].to_pylist()
            self.tell(f"process {input}: " + " ".join(map(str, self.mine)))
            return None

    bench = Bench(parallelism=2)
    flow = Dataflow("job")
    prototype = Own(bench.log)
    flow.source(Tap([rows(1), rows(3)], [rows(2)]), uid="in").apply(prototype, uid="op")
    bench.run(flow)
    assert passed(bench, "op", 2) == [[1, 1, 3], [2]]
    assert not hasattr(prototype, "mine")


def test_an_undeclared_state_is_refused_with_a_sentence() -> None:
    class Wrong(Count):
        def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
            return [ValueState("sum", KEY, {"n": pa.int64()})]

    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)]), uid="in").key_by("key").apply(Wrong(bench.log), uid="op")
    with pytest.raises(JobFailed, match=r"'op'.*'count'"):
        bench.run(flow)


def test_keyed_state_of_a_batch_of_keys_is_read_and_written_at_once() -> None:
    bench = Bench()
    out = CollectSink()
    flow = Dataflow("job", parallelism=2)
    twice = [rows(1, 2, 3, 1, 2), rows(3, 4, 1)]
    flow.source(Tap(twice), uid="in").key_by("value").apply(Deduplicate("value"), uid="once").apply(out, uid="out")
    bench.run(flow)
    assert sorted(out.table()["value"].to_pylist()) == [1, 2, 3, 4]


# Sentences ---------------------------------------------------------------------------------------------------------------


def test_an_option_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(
        InvalidInput, match="there is no option 'interval'; there are checkpoint_interval_us, checkpoint_rows"
    ):
        Bench().runtime(interval=5)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"resume": "no"}, "resume is 'no'; it is True or False"),
        ({"unaligned": 1}, "unaligned is 1; it is True or False"),
        ({"claim": None}, "claim is None; it is True or False"),
        ({"drop": 5}, "drop is 5; it is a list of names"),
        ({"drop": ["op", 5]}, r"drop is \['op', 5\]; it is a list of names, each 'operator', 'operator/state' or"),
    ],
)
def test_an_option_of_another_type_is_refused_before_anything_runs(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        Bench().runtime(**options)


def test_options_can_be_given_as_one_value() -> None:
    options = Options(parallelism=3, seed=7)
    runtime = LocalRuntime(sf.open("memory://options"), parallelism=3, seed=7)
    assert runtime.options == options


@pytest.mark.parametrize(
    ("call", "hook"),
    [
        ("op/0 open", "open"),
        ("op/0 process 0: 1", "process"),
        ("op/0 end_input 0", "end_input"),
        ("op/0 finish", "finish"),
    ],
)
def test_whatever_an_operator_raises_is_told_with_its_name_subtask_and_hook(call: str, hook: str) -> None:
    bench = Bench(max_restarts=0)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)]), uid="in").apply(Told(bench.log), uid="op")
    bench.log.failing.append(call)
    with pytest.raises(JobFailed, match=rf"{hook} of 'op', subtask 0, failed: Boom: {call}"):
        bench.run(flow)


def test_another_jobs_store_is_refused() -> None:
    bench = Bench()
    for job in ("job", "other"):
        flow = Dataflow(job)
        flow.source(Tap([rows(1)]), uid="in").apply(Told(bench.log), uid="op")
        if job == "job":
            bench.run(flow)
            continue
        with pytest.raises(JobMismatch, match="belongs to job 'job'"):
            bench.run(flow)


def test_a_job_in_which_nobody_can_do_anything_says_what_everybody_is_at() -> None:
    bench = Bench(checkpoint_interval_us=None, timeout_us=None, requests_every_us=None)
    flow = Dataflow("job")
    flow.source(Tap([rows(1)]), uid="in").apply(Told(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    until(run, lambda: run.in_flight is not None)
    for worker in run.tasks.values():
        worker.mailbox.clear()
        for queue in worker.inputs.values():
            queue.elements.clear()
    with pytest.raises(CheckpointError, match=r"job 'job' cannot go on: no task can do anything. .*op\[0\]: waiting"):
        settle(run)


def test_a_task_that_is_killed_takes_its_run_with_it() -> None:
    bench = Bench()
    flow = Dataflow("job")
    flow.source(Tap([rows(1)], endless=True), uid="in").apply(Told(bench.log), uid="op", chain=False)
    run = bench.begin(flow)
    settle(run, 20)
    run.tasks[TaskId("op", 0)].fail(RuntimeError("the machine is gone"))
    with pytest.raises(RunDiscarded, match=r"op\[0\]: the machine is gone") as raised:
        settle(run)
    assert raised.value.counted


# Order, checkpoints, progress --------------------------------------------------------------------------------------------


def happened(seed: int) -> tuple[list[str], list[Any], list[int]]:
    bench = Bench(seed=seed, checkpoint_interval_us=15_000)
    flow, out = Dataflow("job", parallelism=2), Out(bench.log)
    splits = [[rows(n) for n in range(start, 20, 2)] for start in (0, 1)]
    flow.source(Tap(*splits), uid="in").key_by("key").apply(Count(bench.log), uid="op").apply(
        out, uid="out", chain=False
    )
    bench.run(flow)
    history = [
        (record.checkpoint_id, record.totals.rows, [operator.status for operator in record.graph.operators])
        for record in bench.store.history()
    ]
    return bench.log.calls, history, out.seen


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again, other = happened(5), happened(5), happened(6)
    assert first == again
    assert first[0] != other[0]
    assert first[2] == other[2]


def test_so_many_checkpoints_are_kept() -> None:
    bench = Bench(checkpoint_interval_us=10_000, keep=2)
    flow, out = Dataflow("job"), Out(bench.log)
    flow.source(Tap([rows(n) for n in range(30)]), uid="in").apply(out, uid="out", chain=False)
    bench.run(flow)
    assert bench.newest_id > 4
    assert [record.checkpoint_id for record in bench.store.history()] == [bench.newest_id, bench.newest_id - 1]


def test_progress_is_shown_while_the_job_runs_and_at_its_end() -> None:
    bench = Bench(checkpoint_interval_us=200_000)
    bench.clock = VirtualClock(5_000)
    flow, out = Dataflow("job", parallelism=2), Out(bench.log)
    splits = [[rows(n, n + 1) for n in range(start, 200, 4)] for start in (0, 2)]
    flow.source(Tap(*splits), uid="in", event_time="at").key_by("key").apply(Count(bench.log), uid="op").apply(
        out, uid="out"
    )
    bench.run(flow)
    shown: list[Progress] = bench.progress
    assert len(shown) >= 3
    assert [progress.rows_read for progress in shown] == sorted(progress.rows_read for progress in shown)
    gaps = [after.elapsed_us - before.elapsed_us for before, after in itertools.pairwise(shown[:-1])]
    assert all(gap >= 500_000 for gap in gaps)
    last = shown[-1]
    assert (last.rows_read, last.running, last.finished) == (200, 0, 4)
    assert last.checkpoint_id == bench.newest_id
    middle = shown[0]
    assert middle.job_id == "job"


def progress(**more: Any) -> Progress:
    known = {
        "job_id": "job",
        "elapsed_us": 12_340_000,
        "rows_read": 1_234_567,
        "checkpoint_id": 3,
        "state_rows": 1000,
        "state_bytes": 2_500_000,
        "running": 4,
        "finished": 0,
        "watermark": 5,
    }
    return Progress(**{**known, **more})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_changes_on_a_terminal_with_warnings_above_it() -> None:
    terminal = Terminal()
    line = ProgressLine(terminal)
    line(progress())
    line(progress(checkpoint_id=3, warnings=("look out",)))
    line.end()
    written = terminal.getvalue()
    assert written.startswith("\r\x1b[Kjob: 12.3 s, 1,234,567 rows read, checkpoint 3 (1,000 rows, 2.5 MB), 4 tasks")
    assert written.count("\n") == 1
    assert "\r\x1b[Kwarning: look out\n" in written
    assert written.endswith("\r\x1b[K")
    assert all(len(part) <= 81 for part in written.replace("\r\x1b[K", "\n").split("\n"))


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_the_line_before_anybody_else_writes_to_the_terminal(fails: bool) -> None:
    def look(batch: pa.RecordBatch) -> pa.RecordBatch:
        if fails and len(batch):
            raise ValueError("no")
        return batch

    flow, terminal = Dataflow("job"), Terminal()
    flow.source(MemorySource(pa.table({"n": [1]})), uid="in").map(look, uid="look")
    store = sf.open(f"memory://leaves-the-line-{fails}")
    with pytest.raises(JobFailed) if fails else contextlib.nullcontext():
        LocalRuntime(store, progress=ProgressLine(terminal), max_restarts=0).run(flow)
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_progress_is_a_line_for_each_checkpoint_elsewhere() -> None:
    file = io.StringIO()
    line = ProgressLine(file)
    for checkpoint_id in (None, None, 1, 1, 2):
        line(progress(checkpoint_id=checkpoint_id, finished=2, warnings=("look out",) if checkpoint_id == 2 else ()))
    line.end()
    assert file.getvalue().splitlines() == [
        f"job: 12.3 s, 1,234,567 rows read, checkpoint {number} (1,000 rows, 2.5 MB), 4 tasks run, 2 finished"
        if number != "look"
        else "warning: look out"
        for number in (1, "look", 2)
    ]


def test_a_restart_is_told_to_the_log_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    flow = Dataflow("job")
    flow.source(Tap([rows(1)]), uid="in").apply(Told(bench.log), uid="op")
    bench.log.failing.append("op/0 finish")
    with caplog.at_level(logging.WARNING):
        outcome = bench.run(flow)
    assert outcome.restarts == 1
    told = [record.getMessage() for record in caplog.records]
    assert [line for line in told if line.startswith("job 'job' starts again from its newest checkpoint: ")]


@pytest.mark.parametrize("bounded", [True, False])
def test_a_job_whose_sources_end_while_others_go_on_reads_everything_once(bounded: bool) -> None:
    bench = Bench(checkpoint_interval_us=20_000)
    flow, out = Dataflow("job", parallelism=2), Out(bench.log)
    short = flow.source(Tap([rows(1)], [rows(2)]), uid="short").rebalance()
    long = flow.source(Tap([rows(n) for n in range(10, 40)], endless=not bounded), uid="long").rebalance()
    short.apply(Told(bench.log), long, uid="op").apply(out, uid="out")
    run = bench.begin(flow)
    if not bounded:
        until(run, lambda: run.rows_read == 32 and len(out.seen) == 32)
        run.request_stop(StopMode.DRAIN)
    outcome = to_end(run)
    assert isinstance(outcome, JobOutcome)
    assert Counter(out.seen) == Counter([1, 2, *range(10, 40)])
