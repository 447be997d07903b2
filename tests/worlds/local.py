"""Jobs for tests of the in-process executor: sources that a test opens, operators that write down
every call, a bench that steps; and the job that is stopped in tests of stopping.

What user code does goes into one :class:`Log`, in the order in which it happened, as words: ``op/0
process 0: 1 2`` says that subtask 0 of ``op`` was given the values 1 and 2 on its input 0. A test
can make any call fail, once, by the same words.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.connectors.sources.basic import ListEnumerator
from stateformat.backends.dataflow import Dataflow, Descriptor, Output, Timers, ValueState, events as ev
from stateformat.backends.dataflow.events import MAX_WATERMARK
from stateformat.backends.local import JobOutcome, LocalRun, LocalRuntime, VirtualClock
from stateformat.backends.runtime import Worker
from stateformat.backends.storage.memory import _STORES, MemoryStorage
from stateformat.errors import StorageError
from stateformat.model import Record, StopMode
from stateformat.publication import CommitPermit
from stateformat.requests import RequestOutcome
from stateformat.storage import CreateOutcome, Storage, open_storage
from stateformat.store import CheckpointStore

ROWS = pa.schema([("key", pa.int64()), ("value", pa.int64()), ("at", pa.int64())])
KEY = {"key": pa.int64()}
INTERVAL_US = 1_000_000_000_000
"""Longer than any test runs: a checkpoint begins when the bench says so."""
STEPS_MAX = 20_000


def rows(*values: int, key: int | None = None, at: int | None = None) -> pa.RecordBatch:
    """Rows of ``ROWS``: by default the key is the value modulo 4 and the event time the value."""
    return pa.record_batch(
        [
            pa.array([value % 4 if key is None else key for value in values], pa.int64()),
            pa.array(values, pa.int64()),
            pa.array([value if at is None else at for value in values], pa.int64()),
        ],
        schema=ROWS,
    )


def words(batch: pa.RecordBatch | pa.Table) -> str:
    """The values, as the log has them."""
    return " ".join(str(value) for value in batch["value"].to_pylist())


def time_word(timestamp: int) -> str:
    """An event time, as the log has it."""
    return "end" if timestamp == ev.MAX_WATERMARK else str(timestamp)


class Boom(Exception):
    """What user code raises here."""


class Log:
    """What user code was called for, in order.

    ``failing``: calls (or their beginnings) that raise the next time.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: list[str] = []

    def tell(self, who: str, call: str) -> None:
        told = f"{who} {call}"
        self.calls.append(told)
        for fail in self.failing:
            if told == fail or told.startswith(fail + " "):
                self.failing.remove(fail)
                raise Boom(told)

    def of(self, who: str, *kinds: str) -> list[str]:
        """The calls of one subtask; with ``kinds``, those alone."""
        own = [call.removeprefix(f"{who} ") for call in self.calls if call.startswith(f"{who} ")]
        return [call for call in own if not kinds or call.split()[0].rstrip(":") in kinds]

    def clear(self) -> None:
        """Forget."""
        self.calls.clear()


class Tap(df.Source):
    """Reads chunks that lie ready, as far as the test has let them: ``let(split, chunks)``, or all
    of it and the end.

    df.Split *n* is that of subtask *n* modulo the parallelism.
    """

    splits_per_reader = None

    def __init__(self, *splits: Sequence[pa.RecordBatch], shut: bool = False, endless: bool = False) -> None:
        self._chunks = splits
        self._let: dict[int, int | None] = dict.fromkeys(range(len(splits)), 0 if shut else None)
        self.bounded = not endless

    def let(self, split: int, chunks: int | None = None) -> None:
        """Let so many chunks of a split be read; None: all of them, and the end of the split."""
        self._let[split] = chunks

    @property
    def schema(self) -> pa.Schema:
        return ROWS

    def enumerator(self) -> df.SplitEnumerator:
        return ListEnumerator(
            lambda: [df.Split(f"split-{number}", str(number).encode()) for number in self._let], shared_out=True
        )

    def read(self, split: df.Split, context: df.ReaderContext) -> Iterator[df.Chunk]:
        number, position = int(split.payload), split.position
        while True:
            let, chunks = self._let[number], self._chunks[number]
            if position < len(chunks) and (let is None or position < let):
                position += 1
                yield df.Chunk(chunks[position - 1], position)
            elif position >= len(chunks) and let is None and self.bounded:
                return
            else:
                yield df.Chunk(None, position)


class Told(df.Operator):
    """Passes on what it is given, and tells the log of every call.

    ``emits``: what hooks emit, by name.
    """

    def __init__(self, log: Log, **emits: Callable[[Told], df.Output]) -> None:
        self.log = log
        self.emits = emits

    def tell(self, call: str) -> None:
        self.log.tell(f"{self.context.uid}/{self.context.subtask}", call)

    def emit(self, hook: str) -> df.Output:
        return self.emits[hook](self) if hook in self.emits else None

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        self.tell("open")

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        self.tell(f"process {input}: {words(batch)}")
        return batch

    def on_timer(self, timers: pa.RecordBatch, name: str) -> df.Output:
        at = ", ".join(time_word(time) for time in timers["_timestamp"].to_pylist())
        self.tell(f"timers: {at}")
        return self.emit("on_timer")

    def receive(self, message: bytes) -> df.Output:
        self.tell(f"receive {message.decode()}")
        return self.emit("receive")

    def end_input(self, input: int) -> df.Output:
        self.tell(f"end_input {input}")
        return self.emit("end_input")

    def finish(self) -> df.Output:
        self.tell("finish")
        return self.emit("finish")

    def snapshot(self) -> None:
        self.tell("snapshot")

    def checkpoint_complete(self) -> None:
        self.tell("complete")

    def close(self) -> None:
        self.tell("close")


class Count(Told):
    """Counts the rows of each key in keyed state, and emits the counts when it finishes."""

    def states(self, *inputs: pa.Schema) -> Sequence[df.Descriptor]:
        return [df.ValueState("count", KEY, {"n": pa.int64()})]

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        self.tell(f"process {input}: {words(batch)}")
        state = self.context.value_state("count")
        for key in batch["key"].to_pylist():
            old = state.get_one(key)
            state.put_one((key,), n=old["n"] + 1 if old else 1)
        return None

    def finish(self) -> df.Output:
        self.tell("finish")
        found = self.context.value_state("count").rows().to_pylist()
        return [rows(row["n"], key=row["key"], at=0) for row in found]


class Out(df.TwoPhaseCommitSink, Told):
    """A sink whose committables are the values; ``seen`` is what everybody can see, with
    multiplicity.

    A commit that fails ``after`` has done its work. ``later``: so many committables are to be tried
    again next time.
    """

    committable_columns = pa.schema([("values", pa.string()), ("number", pa.int64())])

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.committed: dict[tuple[Any, ...], list[int]] = {}
        self.permits: list[CommitPermit] = []
        self.later: list[int] = []

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        return pa.schema([])

    def open(self, context: df.OperatorContext) -> None:
        self.values: list[int] = []
        self.number = 0
        super().open(context)

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.tell(f"process {input}: {words(batch)}")
        self.values += batch["value"].to_pylist()

    def prepare_commit(self, prepared: df.Prepared) -> pa.Table | None:
        self.tell(f"prepare {prepared.checkpoint_id}")
        values, self.values = self.values, []
        if not values:
            return None
        self.number += 1
        place = self.number * 1000 + self.context.subtask
        return pa.table({"values": [" ".join(map(str, values))], "number": [place]})

    def commit(self, permit: CommitPermit, committables: pa.Table) -> pa.Table | None:
        self.log.tell("out", f"commit {permit.ref.checkpoint_id}")
        self.permits.append(permit)
        put_off = self.later.pop(0) if self.later else 0
        now = committables.slice(put_off)
        for row in now.to_pylist():
            place = (row["_checkpoint_id"], row["_attempt_id"], row["number"])
            self.committed[place] = [int(value) for value in row["values"].split()]
        self.log.tell("out", f"committed {permit.ref.checkpoint_id}")
        return committables.slice(0, put_off) if put_off else None

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None) -> None:
        self.log.tell("out", f"clean {newest_id}")

    @property
    def seen(self) -> list[int]:
        """All that is visible, in order of value."""
        return sorted(value for values in self.committed.values() for value in values)


class Line:
    """A bench, and a job of three tasks on it: ``in`` → ``op`` → ``out``.

    Change its attributes between two runs.
    """

    def __init__(
        self,
        *splits: Sequence[pa.RecordBatch],
        op: Callable[[Log], df.Operator] | None = None,
        how: str = "forward",
        timed: bool = False,
        parallelism: int | None = 1,
        shut: bool = False,
        endless: bool = False,
        **options: Any,
    ) -> None:
        self.bench = Bench(**options)
        self.log = self.bench.log
        self.tap = Tap(*(splits or ([rows(1)],)), shut=shut, endless=endless)
        self.op = (op or Told)(self.log)
        self.out = Out(self.log)
        self.how, self.timed, self.parallelism = how, timed, parallelism

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> df.Dataflow:
        flow = df.Dataflow(job, parallelism=parallelism or self.parallelism)
        stream = flow.source(self.tap, uid="in", event_time="at" if self.timed else None)
        sent = stream.key_by("key") if self.how == "key_by" else getattr(stream, self.how)()
        sent.apply(self.op, uid="op", chain=False).apply(self.out, uid="out", chain=False)
        return flow

    def begin(self, parallelism: int | None = None, **options: Any) -> LocalRun:
        """Begin a run that does not end at once."""
        return self.bench.begin(self.flow(parallelism), **options)

    def run(self, parallelism: int | None = None, **options: Any) -> JobOutcome:
        """Run to the end, with restarts."""
        return self.bench.run(self.flow(parallelism), **options)

    def let(self, run: LocalRun, chunks: int, split: int = 0) -> None:
        """Let so many chunks of a split be read, and the sink have the last of them."""
        self.tap.let(split, chunks)
        last = words(self.tap._chunks[split][chunks - 1])
        until(
            run,
            lambda: any(call.startswith("out/") and call.endswith(f" process 0: {last}") for call in self.log.calls),
        )


class Bench:
    """A store, a virtual clock, a log; begins runs and steps them.

    ``storage``: what the store is written through.
    """

    def __init__(self, url: str = "memory://bench", **options: Any) -> None:
        if url.startswith("memory://"):
            name = url.removeprefix("memory://")
            for stale in [stale for stale in _STORES if stale == name or stale.startswith(f"{name}/")]:
                MemoryStorage.reset(stale)
        self.storage = Faulty(open_storage(url))
        self.store = CheckpointStore(self.storage, sleep=lambda _: None)
        self.clock = VirtualClock()
        self.log = Log()
        self.options: dict[str, Any] = {"checkpoint_interval_us": INTERVAL_US, **options}
        self.progress: list[Any] = []

    def runtime(self, **options: Any) -> LocalRuntime:
        """A runtime with the bench's options, and these."""
        return LocalRuntime(self.store, clock=self.clock, progress=self.progress.append, **{**self.options, **options})

    def begin(self, flow: df.Dataflow, **options: Any) -> LocalRun:
        """Begin a run that does not end at once."""
        run = self.runtime(**options).begin(flow)
        assert isinstance(run, LocalRun), run
        return run

    def run(self, flow: df.Dataflow, **options: Any) -> JobOutcome:
        """Run to the end, with restarts."""
        return self.runtime(**options).run(flow)

    def checkpoint(self, run: LocalRun) -> Record:
        """Let a checkpoint begin and be published, and everybody be told."""
        before = self.newest_id
        self.due(run)
        until(run, lambda: self.newest_id > before and run.in_flight is None)
        until(run, lambda: not any(worker.mailbox for worker in run.tasks.values()))
        return self.newest

    def due(self, run: LocalRun) -> None:
        """Let a checkpoint begin."""
        self.clock.wait_until(self.clock.now_us() + INTERVAL_US)
        until(run, lambda: run.in_flight is not None)

    @property
    def newest_id(self) -> int:
        """The id of the newest checkpoint; 0 for none."""
        return max((int(item.path[-25:-5]) for item in self.storage.inner.list("checkpoints/")), default=0)

    @property
    def newest(self) -> Record:
        """The newest checkpoint."""
        return self.store.open().record

    def status(self, uid: str) -> tuple[list[int], list[int]]:
        """Of the newest checkpoint: which subtasks had finished, and which were finishing."""
        operator = self.newest.graph.operator(uid)
        return list(operator.finished), list(operator.finishing)

    def state(self, uid: str, name: str) -> list[dict[str, Any]]:
        """The rows of a state in the newest checkpoint."""
        found: list[dict[str, Any]] = self.store.open().read(uid, name).table().to_pylist()
        return found


def until(run: LocalRun, happened: Callable[[], object], steps: int = STEPS_MAX) -> None:
    """Step a run until something has happened.

    Its checkpoints are published though nothing moves.
    """
    for _ in range(steps):
        if happened():
            return
        run._coordinator._moved |= True
        assert run.step(), f"the job has ended before: {run.outcome}"
    raise AssertionError(f"it did not happen in {steps} steps: {run.describe()}")


def until_read(run: LocalRun, count: int) -> None:
    """Step a run until its sources have read so many rows."""
    until(run, lambda: run.rows_read == count)


def until_told(run: LocalRun, log: Log, *calls: str) -> None:
    """Step a run until these calls were made."""
    until(run, lambda: set(calls) <= set(log.calls))


def settle(run: LocalRun, steps: int = 300) -> None:
    """Let everything happen that happens without anybody's help."""
    for _ in range(steps):
        run.step()


def to_end(run: LocalRun, steps: int = STEPS_MAX) -> JobOutcome:
    """Step a run to its end."""
    for _ in range(steps):
        if not run.step():
            assert run.outcome is not None
            return run.outcome
    raise AssertionError(f"no end after {steps} steps: {run.describe()}")


def state_of(run: LocalRun, uid: str, subtask: int = 0) -> str:
    """Where a task is in its life."""
    return run.tasks[ev.TaskId(uid, subtask)].task.state.value


def step_driver(run: LocalRun, *events: ev.CoordinatorEvent) -> None:
    """Let the driver handle these events and all that is in its inbox, and the tasks do nothing."""
    run._driver.inbox.extend(events)
    while run._driver.inbox:
        run._driver.step()


def begin_barrier(run: LocalRun) -> None:
    """Let a checkpoint begin, and the tasks do nothing."""
    step_driver(run, ev.CheckpointDue())


def open_mail(worker: Worker) -> None:
    """Let a task open all its mail, and do nothing else."""
    for _ in range(len(worker.mailbox)):
        worker.step(random.Random(0))


def in_flight(bench: Bench, edge: str | None = None) -> list[dict[str, Any]]:
    """The in-flight rows of the newest checkpoint, or those of an edge."""
    states = [state for state in bench.newest.states if state.mode == "in_flight" and edge in (None, state.edge)]
    return [row for state in states for row in bench.state(str(state.operator), state.name)]


class Faulty(Storage):
    """A storage that does what the test has ordered, for the next request of its kind:
    ``order("create", "checkpoints/", "lose")``.

    ``refuse``: nothing is done, and an error told (of a create: unknown). ``lose``: it is done, and
    an error told. ``down``: every request fails until :meth:`mend`.
    """

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.orders: list[tuple[str, str, str]] = []
        self.down = False

    def order(self, verb: str, prefix: str, what: str) -> None:
        """What becomes of the next request for a path that begins so."""
        self.orders.append((verb, prefix, what))

    def _ask(self, verb: str, path: str, carry_out: Callable[[], Any]) -> Any:
        found = next((order for order in self.orders if order[0] == verb and path.startswith(order[1])), None)
        if found is None and not self.down:
            return carry_out()
        if found is not None:
            self.orders.remove(found)
            if found[2] == "lose":
                carry_out()
        if verb == "create":
            return CreateOutcome.UNKNOWN
        raise StorageError(f"{verb} of {path} was ordered to fail", path=path)

    @property
    def url(self) -> str:
        return self.inner.url

    def exists(self) -> bool:
        return self.inner.exists()

    def read(self, path: str) -> Any:
        return self._ask("read", path, lambda: self.inner.read(path))

    def read_range(self, path: str, offset: int, length: int) -> Any:
        return self._ask("read", path, lambda: self.inner.read_range(path, offset, length))

    def open_input(self, path: str) -> Any:
        return self._ask("read", path, lambda: self.inner.open_input(path))

    def size(self, path: str) -> int:
        size: int = self._ask("size", path, lambda: self.inner.size(path))
        return size

    def open_output(self, path: str) -> Any:
        return self._ask("write", path, lambda: self.inner.open_output(path))

    def create(self, path: str, data: bytes) -> Any:
        return self._ask("create", path, lambda: self.inner.create(path, data))

    def list(self, prefix: str) -> Any:
        return self._ask("list", prefix, lambda: self.inner.list(prefix))

    def delete(self, paths: Iterable[str]) -> None:
        self.inner.delete(paths)


DRAIN, SUSPEND = StopMode.DRAIN, StopMode.NO_DRAIN
MODES = pytest.mark.parametrize("mode", [DRAIN, SUSPEND])
UNDISTURBED = sorted([*range(8), 2, 1002, 2002, 3002])
"""The output of :class:`Job` at its own end: its rows, and the count of each key."""


class Flushing(Count):
    """Counts by key; has a timer at the end of time, which emits nothing; passes rows on, and emits
    the counts at its end.
    """

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return [ValueState("count", KEY, {"n": pa.int64()}), Timers("wake", KEY)]

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        super().process(batch, input)
        self.context.timers("wake").set_one((0,), MAX_WATERMARK)
        return batch

    def finish(self) -> Output:
        flushed = super().finish()
        return [rows(1000 * row["key"] + row["value"]) for batch in flushed or () for row in batch.to_pylist()]


class Job(Line):
    """A source, a counter by key, a sink; the source may have several subtasks."""

    def __init__(self, *splits: Sequence[pa.RecordBatch], **how: Any) -> None:
        super().__init__(*(splits or ([rows(n) for n in range(8)],)), op=Flushing, **how)

    def flow(self, parallelism: int | None = None, *, job: str = "job") -> Dataflow:
        flow = Dataflow(job, parallelism=parallelism or self.parallelism)
        stream = flow.source(self.tap, uid="in", event_time="at").key_by("key")
        op = stream.apply(self.op, uid="op", parallelism=1, chain=False)
        op.apply(self.out, uid="out", parallelism=1, chain=False)
        return flow

    def processed(self, chunks: int = 3, **options: Any) -> LocalRun:
        """A run that has processed so many chunks of the first split, and is still."""
        self.tap.let(0, chunks)
        run = self.begin(**options)
        until_told(run, self.log, f"out/0 process 0: {chunks - 1}")
        settle(run, 60)
        self.log.clear()
        return run

    def saved_once(self) -> LocalRun:
        """A run with a checkpoint, and rows behind it."""
        run = self.processed(2)
        self.bench.checkpoint(run)
        self.let(run, 3)
        self.log.clear()
        return run

    def asked(self, run: LocalRun, mode: StopMode) -> str:
        """Ask in the store, so that there is an answer."""
        request = self.bench.store.request_stop(mode)
        run._requests.request_stop(request.id, mode, request.savepoint)
        return request.id

    def answer(self, request: str) -> tuple[RequestOutcome, str]:
        found = self.bench.store.request_answer(request)
        assert found is not None
        return found.outcome, found.message


def flushed(mode: StopMode) -> list[int]:
    """The output of a run that was stopped after three chunks."""
    return [0, 1, 1, 2, 1001, 2001] if mode is DRAIN else [0, 1, 2]
