"""What a user of the in-process executor meets: edges, chains, time, options, order, progress,
sentences.
"""

from __future__ import annotations

import contextlib
import io
import itertools
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

import stateformat as sf
from stateformat.backends import dataflow as df, local
from stateformat.backends.connectors import MemorySource
from stateformat.backends.dataflow import events as ev
from stateformat.errors import CheckpointError, InvalidInput
from tests.worlds.local import KEY, Bench, Count, Line, Out, Tap, Told, rows, settle, to_end, until


def passed(line: Line) -> list[list[int]]:
    """The values that each subtask of the operator was given, in order."""
    calls = [line.log.of(f"op/{subtask}", "process") for subtask in range(line.parallelism)]
    return [[int(value) for call in own for value in call.split(": ")[1].split()] for own in calls]


def routed(how: str, *, readers: int = 2, parallelism: int = 3) -> list[list[int]]:
    splits = [[rows(n) for n in range(start, 24, readers)] for start in range(readers)]
    line = Line(*splits, how=how, parallelism=parallelism)
    line.run(per_operator={"in": readers})
    return passed(line)


@pytest.mark.parametrize("how", ["rebalance", "broadcast", "key_by"])
def test_each_channel_keeps_its_order(how: str) -> None:
    for own, reader in itertools.product(routed(how), (0, 1)):
        mine = [value for value in own if value % 2 == reader]
        assert mine == sorted(mine)


@pytest.mark.parametrize("chain", [True, False])
def test_what_comes_out_does_not_depend_on_chains(chain: bool) -> None:
    bench = Bench()
    flow, out = df.Dataflow("job", parallelism=2), Out(bench.log)
    stream = flow.source(Tap([rows(1, 2)], [rows(3)]), uid="in")
    for uid in ("a", "b"):
        stream = stream.apply(Told(bench.log), uid=uid, chain=chain)
    stream.apply(out, uid="out", chain=chain)
    run = bench.begin(flow)
    assert len(run.tasks) == (2 if chain else 8)
    to_end(run)
    assert out.seen == [1, 2, 3]
    for uid in ("a", "b"):
        assert bench.log.of(f"{uid}/0") == ["open", "process 0: 1 2", "end_input 0", "finish", "complete", "close"]


class Later(df.SplitEnumerator):
    """Deals one split, and then answers that more may come, which takes a while by the clock."""

    columns = pa.schema([("n", pa.int64())])

    def __init__(self, clock: local.VirtualClock, takes_us: int = 0) -> None:
        self.clock = clock
        self.takes_us = takes_us
        self.asked = 0

    def next_split(self, subtask: int, parallelism: int) -> df.Split | df.NoSplit:
        self.asked += 1
        self.clock.wait_until(self.clock.now_us() + self.takes_us)
        return df.NoSplit.LATER if self.asked > 1 else df.Split("split-0", b"0")

    def snapshot(self) -> pa.Table:
        return self.columns.empty_table()

    def restore(self, rows: pa.Table) -> None:
        raise AssertionError(rows)


def test_time_goes_on_for_a_reader_that_may_get_further_splits_some_day() -> None:
    line = Line([rows(1, at=5), rows(2, at=7)], endless=True, timed=True)
    line.tap.enumerator = lambda: Later(line.bench.clock)  # type: ignore[method-assign]
    run = line.begin()
    settle(run, 60)
    assert run.tasks[ev.TaskId("op", 0)].watermark == 7


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("takes_us", [1_000, 10_000, 500_000])
def test_readers_ask_more_rarely_the_longer_an_answer_takes(takes_us: int, readers: int) -> None:
    line = Line([rows(1)], endless=True, parallelism=readers)
    clock = line.bench.clock
    later = Later(clock, takes_us)
    line.tap.enumerator = lambda: later  # type: ignore[method-assign]
    run, seconds = line.begin(), 20
    begun_us = clock.now_us()
    until(run, lambda: clock.now_us() >= begun_us + seconds * 1_000_000)
    # A fiftieth of the time; but each reader asks every two seconds, however long it takes.
    most = max(seconds * 1_000_000 / 50 / takes_us, readers * seconds / 2)
    assert seconds / 10 < later.asked <= 1.2 * most + 2 * readers


def test_an_undeclared_state_is_refused_with_a_sentence() -> None:
    class Wrong(Count):
        def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
            return [df.ValueState("sum", KEY, {"n": pa.int64()})]

    with pytest.raises(local.JobFailed, match=r"'op'.*'count'"):
        Line(op=Wrong, how="key_by", max_restarts=0).run()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        *(
            ({option: value}, f"^{option} is {value!r}; it is a ")
            for option, value in {
                "checkpoint_interval_us": 0,
                "checkpoint_rows": 0,
                "timeout_us": -1,
                "requests_every_us": 0,
                "tolerable_failures": -1,
                "keep": "x",
                "loop_rounds_max": 0,
                "max_restarts": -1,
                "restart_delay_us": -1,
                "seed": "x",
                "schedule": 3,
            }.items()
        ),
        ({"interval": 5}, "there is no option 'interval'; there are checkpoint_interval_us, checkpoint_rows"),
        ({"resume": "no"}, "resume is 'no'; it is True or False"),
        ({"unaligned": 1}, "unaligned is 1; it is True or False"),
        ({"claim": None}, "claim is None; it is True or False"),
        ({"drop": 5}, "drop is 5; it is a list of names"),
        ({"drop": ["op", 5]}, r"drop is \['op', 5\]; it is a list of names, each 'operator', 'operator/state' or"),
        ({"unaligned_after_us": 5}, "unaligned_after_us is 5, but the job is aligned"),
        ({"unaligned": True, "unaligned_after_us": -1}, "unaligned_after_us is -1; it is a whole number, at least 0"),
    ],
)
def test_an_option_that_means_nothing_is_refused_before_anything_runs(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        local.LocalRuntime(sf.open("memory://options"), **options)


def test_a_url_in_the_place_of_a_store_is_refused_with_a_sentence() -> None:
    url: Any = "memory://options"
    with pytest.raises(InvalidInput, match=r"the store is 'memory://options'; open it first: stateformat.open\(url\)"):
        local.LocalRuntime(url)


def test_options_can_be_given_as_one_value() -> None:
    runtime = local.LocalRuntime(sf.open("memory://options"), parallelism=3, seed=7)
    assert runtime.options == local.Options(parallelism=3, seed=7)


def test_a_job_in_which_no_task_can_do_anything_says_what_each_of_them_is_doing() -> None:
    line = Line(checkpoint_interval_us=None, timeout_us=None, requests_every_us=None)
    run = line.begin()
    until(run, lambda: run.in_flight is not None)
    for worker in run.tasks.values():
        worker.mailbox.clear()
        for queue in worker.inputs.values():
            queue.elements.clear()
    with pytest.raises(CheckpointError, match=r"job 'job' cannot go on: no task can do anything. .*op\[0\]: waiting"):
        settle(run)


def test_a_task_that_is_killed_takes_its_run_with_it() -> None:
    run = Line(endless=True).begin()
    settle(run, 20)
    run.tasks[ev.TaskId("op", 0)].fail(RuntimeError("the machine is gone"))
    with pytest.raises(local.RunDiscarded, match=r"op\[0\]: the machine is gone") as raised:
        settle(run)
    assert raised.value.counted


def happened(seed: int) -> tuple[list[str], list[Any], list[int]]:
    splits = [[rows(n) for n in range(start, 20, 2)] for start in (0, 1)]
    line = Line(*splits, op=Count, how="key_by", parallelism=2, seed=seed, checkpoint_interval_us=15_000)
    line.run()
    history = [
        (record.checkpoint_id, record.totals.rows, [operator.status for operator in record.graph.operators])
        for record in line.bench.store.history()
    ]
    return line.log.calls, history, line.out.seen


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    first, again, other = happened(5), happened(5), happened(6)
    assert first == again
    assert first[0] != other[0]
    assert first[2] == other[2]


def test_so_many_checkpoints_are_kept() -> None:
    line = Line([rows(n) for n in range(30)], checkpoint_interval_us=10_000, keep=2)
    line.run()
    newest = line.bench.newest_id
    assert newest > 4
    assert [record.checkpoint_id for record in line.bench.store.history()] == [newest, newest - 1]


def test_progress_is_shown_while_the_job_runs_and_at_its_end() -> None:
    splits = [[rows(n, n + 1) for n in range(start, 200, 4)] for start in (0, 2)]
    line = Line(*splits, op=Count, how="key_by", timed=True, parallelism=2, checkpoint_interval_us=200_000)
    line.bench.clock = local.VirtualClock(5_000)
    line.run()
    shown: list[local.Progress] = line.bench.progress
    assert len(shown) >= 3
    assert [progress.rows_read for progress in shown] == sorted(progress.rows_read for progress in shown)
    assert all(after.elapsed_us - before.elapsed_us >= 500_000 for before, after in itertools.pairwise(shown[:-1]))
    last = shown[-1]
    assert (last.rows_read, last.running, last.finished) == (200, 0, 6)
    assert last.checkpoint_id == line.bench.newest_id
    assert shown[0].job_id == "job"


progress = partial(
    local.Progress,
    job_id="job",
    elapsed_us=12_340_000,
    rows_read=1_234_567,
    state_rows=1000,
    state_bytes=2_500_000,
    running=4,
    watermark=5,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_that_changes_on_a_terminal_with_warnings_above_it() -> None:
    terminal = Terminal()
    line = local.ProgressLine(terminal)
    line(progress(checkpoint_id=3, finished=0))
    line(progress(checkpoint_id=3, finished=0, warnings=("look out",)))
    line.end()
    written = terminal.getvalue()
    assert written.startswith("\r\x1b[Kjob: 12.3 s, 1,234,567 rows read, checkpoint 3 (1,000 rows, 2.4 MiB), 4 tasks")
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

    flow, terminal = df.Dataflow("job"), Terminal()
    flow.source(MemorySource(pa.table({"n": [1]})), uid="in").map(look, uid="look")
    store = sf.open(f"memory://leaves-the-line-{fails}")
    with pytest.raises(local.JobFailed) if fails else contextlib.nullcontext():
        local.LocalRuntime(store, progress=local.ProgressLine(terminal), max_restarts=0).run(flow)
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_progress_is_a_line_for_each_checkpoint_elsewhere() -> None:
    file = io.StringIO()
    line = local.ProgressLine(file)
    for number in (None, None, 1, 1, 2):
        line(progress(checkpoint_id=number, finished=2, warnings=("look out",) if number == 2 else ()))
    line.end()
    one, two = (
        f"job: 12.3 s, 1,234,567 rows read, checkpoint {number} (1,000 rows, 2.4 MiB), 4 tasks run, 2 finished"
        for number in (1, 2)
    )
    assert file.getvalue().splitlines() == [one, "warning: look out", two]
