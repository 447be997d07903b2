"""Spark's Python workers: how they start, and the copies that their tasks share."""

from __future__ import annotations

import gc
import io
import itertools
import os
import shutil
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import stateformat
from stateformat.backends import dataflow as df
from stateformat.backends.dataflow import Dataflow
from stateformat.backends.dataflow.events import TaskId
from stateformat.backends.spark import worker_process
from stateformat.backends.spark.run import SparkRun
from stateformat.backends.spark.task_cache import SharedCopies
from stateformat.backends.state import SubtaskStates
from stateformat.graph import JobGraph, Operator, OperatorId
from stateformat.states import declare
from tests.worlds.spark import Ranges, RangeSource, Stand
from tests.worlds.stages import Out


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that a daemon would call for each task, which answers what it reads."""
    module: Any = ModuleType("the_worker")
    module.main = lambda infile, outfile: outfile.write(infile.read(3))
    monkeypatch.setitem(sys.modules, "the_worker", module)
    monkeypatch.setattr(sys, "argv", ["daemon.py", "the_worker"])
    worker_process.settle.cache_clear()
    yield module
    worker_process.settle.cache_clear()
    gc.unfreeze()


def settled(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module behind :func:`~worker_process.settle`, in a worker that is used again."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    worker_process.settle()
    return worker


def answered(worker: Any, ours: socket.socket, theirs: socket.socket) -> bytes:
    with ours.makefile("rb") as infile, ours.makefile("wb") as outfile:
        theirs.sendall(b"one")
        worker.main(infile, outfile)
    return theirs.recv(3)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is nothing to ask for")
def test_a_worker_on_tcp_acknowledges_what_comes_at_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = socket.TCP_QUICKACK, socket.TCP_NODELAY
    found: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as theirs:
        ours, _ = server.accept()
        with ours:
            # As on a socket that has been used for a while.
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)
            before = worker.main

            def main(infile: Any, outfile: Any) -> None:
                found.extend(ours.getsockopt(socket.IPPROTO_TCP, name) for name in asks)
                before(infile, outfile)

            worker.main = main
            assert answered(settled(worker, monkeypatch), ours, theirs) == b"one"
    assert all(found)
    assert len(found) == 2


def test_a_worker_on_a_unix_socket_serves_as_before(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert answered(settled(worker, monkeypatch), ours, theirs) == b"one"


def test_a_worker_on_pipes_serves_as_before(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (task, asks), (result, answers) = os.pipe(), os.pipe()
    with os.fdopen(asks, "wb") as asked:
        asked.write(b"one")
    with os.fdopen(task, "rb") as infile, os.fdopen(answers, "wb") as outfile:
        settled(worker, monkeypatch).main(infile, outfile)
    with os.fdopen(result, "rb") as said:
        assert said.read() == b"one"


class InCycle:
    """What only a collection of garbage frees."""

    def __init__(self) -> None:
        self.itself = self


def served(worker: Any, what: Callable[[], None]) -> None:
    """A task, and the collection that the daemon makes after it."""
    with io.BytesIO() as infile, io.BytesIO() as outfile:
        worker.task = what
        worker.main(infile, outfile)
    gc.collect()


@pytest.fixture
def tasks(worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker that calls ``task``."""
    worker.main = lambda infile, outfile: worker.task()
    return settled(worker, monkeypatch)


def test_what_a_task_has_made_and_dropped_is_collected_after_it(tasks: Any) -> None:
    made: list[weakref.ref[InCycle]] = []
    for _ in range(3):
        served(tasks, lambda: made.append(weakref.ref(InCycle())))
        assert made[-1]() is None


def test_what_an_earlier_task_has_made_is_collected_when_everything_is_looked_at(tasks: Any) -> None:
    kept: list[InCycle] = []
    served(tasks, lambda: kept.append(InCycle()))
    seen = weakref.ref(kept[0])
    served(tasks, kept.clear)
    assert seen() is not None
    for _ in range(worker_process.LOOK_EVERY - 3):
        served(tasks, lambda: None)
    assert seen() is not None
    served(tasks, lambda: None)
    assert seen() is None


def test_a_process_that_is_no_worker_stays_as_it_is(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_REUSE_WORKER", raising=False)
    before = worker.main
    worker_process.settle()
    assert worker.main is before


# ---- what all workers of a host share on its disk, so that few tasks read their whole state

COLUMNS = pa.schema([("key", pa.int64()), ("value", pa.int64())])
KEYS, EPOCH_ROWS, WARM_UP, EPOCHS = 2_000, 40, 10, 40
LARGE = 1 << 40
TASK = TaskId("op", 0)


def _pairs(table: pa.Table) -> dict[int, int]:
    return dict(zip(table["key"].to_pylist(), table.columns[-1].to_pylist(), strict=True))


class Job:
    """Sums of random keys in small epochs, over many workers of which none serves a task often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path, workers: int, executors: int) -> None:
        generator = np.random.default_rng(1)
        first = pa.array(np.arange(KEYS))
        keys = [pa.array(generator.integers(0, KEYS, EPOCH_ROWS)) for _ in range(WARM_UP + EPOCHS)]
        batches = [
            pa.record_batch([some, pa.array(np.ones(len(some), int))], schema=COLUMNS) for some in (first, *keys)
        ]
        self.rows = pa.Table.from_batches(batches)
        self.copies = directory / "executor-1" / "stateformat-copies"
        self.disks = [directory / "executor-1" / f"blockmgr-{number}" for number in range(executors)]
        self.stand = Stand(monkeypatch, workers=workers, seed=3, disks=self.disks)
        self.store = stateformat.open(f"file://{directory / 'store'}", durable=False)
        self.flow = Dataflow("job", parallelism=2)
        source = self.flow.source(RangeSource(Ranges([[[batch]] for batch in batches]), schema=COLUMNS), uid="in")
        sums = source.key_by("key").aggregate({"total": ("value", "sum")}, emit="end", uid="sums")
        sums.apply(Out(), uid="out")

    def begin(self, **options: Any) -> SparkRun:
        return self.stand.begin(self.store, self.flow, **options)

    def warm(self, run: SparkRun) -> None:
        while run.published <= WARM_UP:
            run.step()
        self.stand.opened_of.clear()

    def check(self, epochs: int) -> None:
        """Every key has the sum of its rows, ``EPOCH_ROWS`` in an epoch but the first."""
        found = self.store.open().read("sums", "totals").table()
        expected = self.rows.slice(0, KEYS + (epochs - 1) * EPOCH_ROWS).group_by("key").aggregate([("value", "sum")])
        assert _pairs(found) == _pairs(expected)

    def whole_reads(self) -> float:
        """Of the tasks with keyed state, the share of those that have read all of it."""
        opened = self.stand.opened_of["sums"]
        return opened["restored"] / sum(opened.values())


@pytest.mark.parametrize(("workers", "executors"), [(16, 1), (128, 1), (128, 8)])
def test_few_tasks_read_their_whole_state_however_many_workers_and_executors_there_are(
    workers: int, executors: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(monkeypatch, tmp_path, workers, executors)
    run = job.begin()
    job.warm(run)
    while run.published < WARM_UP + EPOCHS:
        run.step()
    assert job.whole_reads() <= 0.05
    job.check(WARM_UP + EPOCHS)
    run.close()


def _spoiled(folder: Path, found: list[Path]) -> None:
    for path in found:
        path.write_bytes(b"")


def _removed(folder: Path, found: list[Path]) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _unfinished(folder: Path, found: list[Path]) -> None:
    for copy in {path.parent.parent for path in found}:
        copy.rename(copy.with_name(f".{copy.name}"))


def _renamed(folder: Path, found: list[Path]) -> None:
    for copy in {path.parent.parent for path in found}:
        copy.rename(copy.with_name(f"{copy.name}-of-somebody"))


@pytest.mark.parametrize("damage", [_spoiled, _removed, _unfinished, _renamed])
def test_copies_that_are_lost_or_spoiled_are_read_from_the_store(
    damage: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(monkeypatch, tmp_path, workers=16, executors=1)
    run = job.begin()

    def spoil() -> None:
        damage(job.copies, [path for path in job.copies.rglob("*") if path.is_file()])

    job.stand.spoil = spoil
    for _ in range(12):
        run.step()
    assert job.stand.opened_of["sums"]["restored"] > 5
    job.check(run.published)
    run.close()


def test_epochs_that_are_run_again_leave_copies_that_nobody_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job = Job(monkeypatch, tmp_path, workers=16, executors=1)
    run = job.begin()
    tries = itertools.count()
    job.stand.spoil = lambda: setattr(job.stand, "breaks", next(tries) % 2)
    for _ in range(20):
        run.step()
    job.check(run.published)
    folders = [found for found in job.copies.glob("*/*") if any(found.iterdir())]
    assert folders
    assert all(len(list(folder.iterdir())) <= 6 for folder in folders)
    run.close()


def states(rows: int) -> SubtaskStates:
    operator = Operator(OperatorId("op"), 1, 128)
    of = declare.value_state("op", "sum", keys={"key": pa.int64()}, values={"n": pa.int64()})
    made = SubtaskStates(JobGraph((operator,)).operator("op"), 0, [of])
    numbers = pa.array(range(rows), pa.int64())
    made.value("sum").put(pa.record_batch({"key": numbers}), pa.record_batch({"n": numbers}))
    return made


def added(shared: SharedCopies, token: bytes, version: int, *, run: str = "run", subtask: int = 0, **more: Any) -> bool:
    options = {"tokens": {}, "limit_bytes": LARGE, **more}
    return shared.add(run, TaskId("op", subtask), (token, version), {"op": states(100)}, **options)


def test_the_newest_copy_with_a_token_that_counts_is_found(tmp_path: Path) -> None:
    shared = SharedCopies(tmp_path)
    assert shared.find("run", TASK, {b"1": 1}) is None
    for version, token in enumerate((b"1", b"2", b"3"), start=1):
        assert added(shared, token, version, tokens={b"1": 1, b"2": 2})
    found = shared.find("run", TASK, {b"1": 1, b"2": 2})
    assert found is not None
    assert (found.token, found.version) == (b"2", 2)
    assert shared.find("run", TASK, {b"1": 1}) is None
    assert shared.find("run", TaskId("op", 1), {b"2": 2}) is None
    assert shared.find("another", TASK, {b"2": 2}) is None


def test_copies_take_no_more_than_the_limit_and_the_least_recently_used_go(tmp_path: Path) -> None:
    shared = SharedCopies(tmp_path)
    size = sum(path.stat().st_size for path in _one(tmp_path / "one").rglob("*") if path.is_file())
    limit = states(100).size_bytes + 2 * size
    for subtask in range(6):
        assert added(shared, b"token", 1, subtask=subtask, limit_bytes=limit)
    files = [path for path in tmp_path.glob("stateformat-copies/**/*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= limit
    assert shared.find("run", TaskId("op", 5), {b"token": 1}) is not None
    assert shared.find("run", TASK, {b"token": 1}) is None
    assert not added(shared, b"token", 2, limit_bytes=10)


@pytest.mark.parametrize("application", ["application_17_0001", "executor-0a1b"])
def test_executors_of_an_application_on_a_host_share_a_directory_that_is_theirs_alone(
    application: str, tmp_path: Path
) -> None:
    first, second = (SharedCopies(tmp_path / application / name) for name in ("blockmgr-1", "blockmgr-2"))
    assert added(first, b"token", 1)
    assert second.find("run", TASK, {b"token": 1}) == first.find("run", TASK, {b"token": 1}) is not None
    common = tmp_path / application / "stateformat-copies"
    assert common.stat().st_mode & 0o777 == 0o700


def _readable(common: Path) -> None:
    common.mkdir(parents=True)
    common.chmod(0o755)


def _link(common: Path) -> None:
    common.parent.mkdir()
    elsewhere = common.parent.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    common.symlink_to(elsewhere)


def _file(common: Path) -> None:
    common.parent.mkdir()
    common.touch()


@pytest.mark.parametrize("made", [_readable, _link, _file, None])
def test_a_directory_that_others_may_use_and_one_of_no_application_are_not_shared(made: Any, tmp_path: Path) -> None:
    parent = tmp_path / ("executor-1" if made else "tmp")
    if made:
        made(parent / "stateformat-copies")
    first, second = (SharedCopies(parent / name) for name in ("blockmgr-1", "blockmgr-2"))
    assert added(first, b"token", 1)
    assert first.find("run", TASK, {b"token": 1}) is not None
    assert second.find("run", TASK, {b"token": 1}) is None


def _one(folder: Path) -> Path:
    added(SharedCopies(folder), b"token", 1)
    return folder


def test_what_other_runs_have_left_is_removed_and_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = SharedCopies(tmp_path)
    added(shared, b"token", 1, run="old")
    added(shared, b"token", 1, run="new")
    shared.drop_others({"new"})
    assert [found.name for found in (tmp_path / "stateformat-copies").iterdir()] == ["new"]

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(SubtaskStates, "save", full)
    assert not added(shared, b"token", 1, run="full")
    assert list((tmp_path / "stateformat-copies" / "full").rglob("*.*")) == []


class Remembers(df.Operator):
    """Keeps keys for 10 µs, asks its coordinator, and puts out at the end what it knows then."""

    class Coordinator(df.OperatorCoordinator):
        """Answers, so that the task lives on when all input has ended."""

        columns = pa.schema([("n", pa.int64())])

        def open(self, send: Callable[[int, bytes], None]) -> None:
            self.send = send

        def receive(self, subtask: int, message: bytes) -> None:
            self.send(subtask, message)

        def snapshot(self) -> pa.Table:
            return self.columns.empty_table()

    def states(self, *inputs: pa.Schema) -> list[df.Descriptor]:
        return [df.ValueState("known", {"key": pa.int64()}, {"value": pa.int64()}, ttl=stateformat.Ttl(10))]

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return COLUMNS

    def coordinator(self) -> df.OperatorCoordinator:
        return self.Coordinator()

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.context.value_state("known").put(batch.select(["key"]), batch.select(["value"]))
        self.context.send_to_coordinator(b"how are you")

    def finish(self) -> df.Output:
        return self.context.value_state("known").rows().select(COLUMNS.names).to_batches()


@pytest.mark.parametrize(
    ("workers", "cache_bytes", "opened"),
    [(1, 2 << 30, "kept"), (1, 0, "caught_up"), (6, 2 << 30, "restored")],
    ids=["in memory", "on the disk", "in the store"],
)
def test_rows_that_have_expired_stay_so_wherever_the_state_comes_from_when_all_input_has_ended(
    workers: int, cache_bytes: int, opened: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def rows(keys: range, at_us: int) -> pa.RecordBatch:
        return pa.record_batch([pa.array(keys), pa.array([at_us] * len(keys))], schema=COLUMNS)

    # A state this large is written as a base and deltas.
    batches = [rows(range(100, 3_100), 1_000), *(rows(range(at, at + 1), at) for at in (1_005, 2_000, 2_001, 2_002))]
    stand, out = Stand(monkeypatch, workers=workers, seed=1), Out()
    flow = Dataflow("job", parallelism=1)
    source = RangeSource(Ranges([[[batch]] for batch in batches]), schema=COLUMNS)
    stream = flow.source(source, uid="in", event_time="value").key_by("key")
    stream.apply(Remembers(), uid="op").apply(out, uid="out", chain=False)
    run = stand.begin(stateformat.open(f"file://{tmp_path}", durable=False), flow, cache_bytes=cache_bytes)
    while run.step():
        pass
    # The last row was never followed by a watermark; the one before it counts from the watermark.
    assert sorted(row[0] for row in out.seen.elements()) == [2_001, 2_002]
    assert stand.opened_of["op"][opened]
