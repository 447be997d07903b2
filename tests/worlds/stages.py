"""What tests of both executors share: a place for jobs, sources with gates, and calls of user code.

User code may run in other processes than the test, so the test speaks with it through files: a
source reads as far as a file says, and every call becomes a line of another. Committed output is in
the sinks of the dataflow, which commit in the test's process. On a :class:`PlayedStage` Spark is
played in this process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from stateformat.backends import dataflow as df
from stateformat.backends.connectors.sources.basic import ListEnumerator
from stateformat.backends.local import JobOutcome, LocalRuntime, VirtualClock
from stateformat.backends.runtime import Run, Runtime
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.model import Mode, Record, StopMode
from stateformat.publication import CommitPermit
from stateformat.storage import open_storage
from stateformat.store import CheckpointStore
from tests.worlds import local as local_jobs
from tests.worlds.local import ROWS, Boom, Faulty, rows
from tests.worlds.spark import Stand

EXECUTORS = ("local", "spark")
STEPS_MAX = 20_000


class Calls(local_jobs.Log):
    """What user code of all processes was called for, in order."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "calls"
        self._orders = directory / "orders"
        self._orders.mkdir(parents=True, exist_ok=True)

    def tell(self, who: str, call: str) -> None:
        with self._file.open("a") as file:
            file.write(f"{who} {call}\n")
        self.obey(f"{who} {call}")

    def obey(self, told: str) -> None:
        for order in sorted(self._orders.iterdir()):
            wanted = bytes.fromhex(order.name).decode()
            if told == wanted or told.startswith(wanted + " "):
                order.unlink()
                raise Boom(told)

    def fails(self, call: str) -> None:
        """Let the next call that is, or begins with, these words raise."""
        (self._orders / call.encode().hex()).touch()

    @property
    def calls(self) -> list[str]:  # type: ignore[override]
        return self._file.read_text().splitlines() if self._file.exists() else []

    def clear(self) -> None:
        self._file.unlink(missing_ok=True)


class Gated(df.Source):
    """Batches that are read as far as the test lets them. Subtasks have the splits in turn."""

    splits_per_reader = None

    def __init__(
        self, directory: Path, *splits: Sequence[pa.RecordBatch], shut: bool = False, endless: bool = False
    ) -> None:
        self._directory = directory
        self._splits = splits
        self.bounded = not endless
        directory.mkdir(parents=True, exist_ok=True)
        for number in range(len(splits)):
            self.let(number, 0 if shut else None)

    def let(self, split: int, batches: int | None = None) -> None:
        """Let so many batches of a split be read; None: all of them, and the end of the split."""
        written = self._directory / f"{split}.new"
        written.write_text("all" if batches is None else str(batches))
        written.replace(self._directory / str(split))

    def let_all(self) -> None:
        for number in range(len(self._splits)):
            self.let(number)

    @property
    def schema(self) -> pa.Schema:
        return self._splits[0][0].schema if self._splits and self._splits[0] else ROWS

    def enumerator(self) -> df.SplitEnumerator:
        return ListEnumerator(
            lambda: [df.Split(f"split-{number}", str(number).encode()) for number in range(len(self._splits))],
            shared_out=True,
        )

    def read(self, split: df.Split, context: df.ReaderContext) -> Iterator[df.Chunk]:
        batches, position = self._splits[int(split.payload)], split.position
        while True:
            let = (self._directory / split.payload.decode()).read_text()
            if position < len(batches) and (let == "all" or position < int(let)):
                position += 1
                yield df.Chunk(batches[position - 1], position)
            elif position >= len(batches) and let == "all" and self.bounded:
                return
            else:
                yield df.Chunk(None, position)


class Told(local_jobs.Told):
    """Passes rows on, and tells of every call. ``emits``: what hooks emit, by name."""

    def __init__(self, calls: Calls, **emits: Callable[[Any], df.Output]) -> None:
        super().__init__(calls, **emits)
        self.calls = calls

    def process(self, batch: pa.RecordBatch, input: int) -> df.Output:
        super().process(batch, input)
        for value in batch["value"].to_pylist():
            # However rows are put together into batches, a row comes once.
            self.calls.obey(f"{self.context.uid}/{self.context.subtask} row {value}")
        return batch


class Out(df.TwoPhaseCommitSink):
    """A sink whose committables are the rows, as text."""

    committable_columns = pa.schema([("rows", pa.string()), ("number", pa.int64())])

    def __init__(self, calls: Calls | None = None) -> None:
        self.calls = calls
        self.later: list[int] = []
        """How many committables are put off, of one commit after the other."""
        self._committed: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        self.permits: list[CommitPermit] = []

    def __getstate__(self) -> dict[str, Any]:
        # What was committed is the driver's: copies in subtasks have none of it.
        return {"calls": self.calls, "later": [], "_committed": {}, "permits": []}

    def open(self, context: df.OperatorContext) -> None:
        super().open(context)
        self.held: list[tuple[Any, ...]] = []

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.held += [tuple(row.values()) for row in batch.to_pylist()]

    def prepare_commit(self, prepared: df.Prepared) -> pa.Table | None:
        if self.calls is not None:
            self.calls.tell(f"{self.context.uid}/{self.context.subtask}", "prepare")
        held, self.held = self.held, []
        if not held:
            return None
        return pa.table({"rows": [repr(held)], "number": pa.array([self.context.subtask], pa.int64())})

    def commit(self, permit: CommitPermit, committables: pa.Table) -> pa.Table | None:
        if self.calls is not None:
            self.calls.tell("out", f"commit {permit.ref.checkpoint_id}")
        self.permits.append(permit)
        put_off = self.later.pop(0) if self.later else 0
        for row in committables.slice(put_off).to_pylist():
            place = (row["_checkpoint_id"], row["_attempt_id"], row["number"])
            self._committed[place] = list(eval(row["rows"]))
        return committables.slice(0, put_off) if put_off else None

    @property
    def seen(self) -> Counter[tuple[Any, ...]]:
        return Counter(row for some in self._committed.values() for row in some)

    @property
    def values(self) -> list[Any]:
        """The column ``value`` of rows of ``ROWS``, in order of value."""
        return sorted(row[1] for row in self.seen.elements())


class Stage:
    """A place for one job: store, files, runtimes of both executors. ``spark`` makes a session."""

    def __init__(self, directory: Path, spark: Callable[[], Any]) -> None:
        self.directory = directory
        self.calls = Calls(directory)
        self.storage = Faulty(open_storage(f"file://{directory / 'store'}"))
        self.store = CheckpointStore(self.storage, sleep=_no_wait)
        self.spark = spark

    def runtime(self, executor: str, **options: Any) -> Runtime[Any]:
        """A runtime of this executor that does not wait."""
        options = {"clock": VirtualClock(), **options}
        if executor == "local":
            if "checkpoint_rows" not in options:
                options.setdefault("checkpoint_interval_us", 100_000)
            return LocalRuntime(options.pop("store", self.store), **options)
        return SparkRuntime(self.spark(), options.pop("store", self.store), **options)

    def run(self, executor: str, flow: df.Dataflow, **options: Any) -> JobOutcome:
        return self.runtime(executor, **options).run(flow)

    def begin(self, executor: str, flow: df.Dataflow, **options: Any) -> Run:
        run = self.runtime(executor, **options).begin(flow)
        assert isinstance(run, Run), run
        return run

    def store_at(self, url: str | None) -> CheckpointStore:
        assert url is not None
        return CheckpointStore(open_storage(url), sleep=_no_wait)

    @property
    def newest_id(self) -> int:
        """The id of the newest checkpoint; 0 for none."""
        return max((int(item.path[-25:-5]) for item in self.storage.inner.list("checkpoints/")), default=0)

    @property
    def newest(self) -> Record:
        return self.store.open().record

    def statuses(self) -> dict[str, tuple[str, list[int], list[int]]]:
        """By operator of the newest checkpoint: status, finished and finishing subtasks."""
        return {
            str(operator.uid): (str(operator.status), list(operator.finished), list(operator.finishing))
            for operator in self.newest.graph.operators
        }

    def state(self, uid: str, name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.store.open().read(uid, name).table().to_pylist()
        return found

    def in_flight(self) -> int:
        """How many rows the newest checkpoint holds of channels and loops."""
        states = [state for state in self.newest.states if state.mode is Mode.IN_FLIGHT]
        return sum(len(self.state(str(state.operator), state.name)) for state in states)


def _no_wait(_: float) -> None:
    pass


def until(run: Run, happened: Callable[[], object], steps: int = STEPS_MAX, *, still: bool = False) -> None:
    """Step a run until something has happened.

    Its checkpoints are published though nothing moves, unless ``still``.
    """
    for _ in range(steps):
        if happened():
            return
        run._coordinator._moved |= not still
        assert run.step(), f"the job has ended before: {run.outcome}"
    raise AssertionError(f"it did not happen in {steps} steps")


def to_end(run: Run, steps: int = STEPS_MAX) -> JobOutcome:
    """Step a run to its end."""
    for _ in range(steps):
        if not run.step():
            assert run.outcome is not None
            return run.outcome
    raise AssertionError(f"no end after {steps} steps")


def stopped(run: Run, mode: StopMode, when: Callable[[], object]) -> JobOutcome:
    """Step a run until something has happened, and stop it there."""
    until(run, when)
    run.request_stop(mode)
    outcome = to_end(run)
    assert outcome.stop is not None
    return outcome


def lose(run: Run, *, published: int) -> None:
    """Let a run publish so many checkpoints, go on a little, and be lost with its driver."""
    until(run, lambda: run.published >= published)
    run.step()
    run.close()


def batches(values: Iterable[int], size: int) -> list[pa.RecordBatch]:
    """Rows of ``ROWS`` in batches of so many."""
    known = list(values)
    return [rows(*known[start : start + size]) for start in range(0, len(known), size)]


def plain(table: pa.Table) -> Counter[tuple[Any, ...]]:
    """The rows of a table, whatever their order."""
    return Counter(tuple(row.values()) for row in table.to_pylist())


class Case(NamedTuple):
    """A job; what its sinks have committed, by uid; and what they have to commit."""

    flow: Callable[[], df.Dataflow]
    outs: Callable[[], dict[str, Counter[tuple[Any, ...]]]]
    expected: dict[str, Counter[tuple[Any, ...]]]


EVERYWHERE = pytest.mark.parametrize(
    "executor", ["local", "spark", pytest.param("cluster", marks=[pytest.mark.spark, pytest.mark.truth])]
)
"""Runs a test on both executors, and among the truth tests on a real Spark."""
ON_BOTH = pytest.mark.parametrize("executor", ["local", "spark"])
"""Where a real Spark adds nothing to what another test of the same says on it."""


def other(executor: str) -> str:
    """Another executor, for a job to go on."""
    return "spark" if executor == "local" else "local"


class PlayedStage(Stage):
    """A place for one job. ``spark`` is played by ``stand``, ``cluster`` is a real Spark."""

    def __init__(self, directory: Path, monkeypatch: Any, cluster: Callable[[], Any] | None = None) -> None:
        super().__init__(directory, cluster or (lambda: None))
        self._monkeypatch = monkeypatch
        self._stand: Stand | None = None

    @property
    def stand(self) -> Stand:
        """What plays Spark, in place of every Spark of the test, once it was asked for."""
        if self._stand is None:
            self._stand = Stand(self._monkeypatch, workers=2)
        return self._stand

    def at(self, name: str) -> PlayedStage:
        """A stage in a directory below, on the same stand."""
        made = PlayedStage(self.directory / name, self._monkeypatch, self.spark)
        made._stand = self._stand
        return made

    def runtime(self, executor: str, **options: Any) -> Any:
        """A runtime of this executor."""
        if executor == "spark":
            return self.stand.runtime(options.pop("store", self.store), **options)
        return super().runtime("spark" if executor == "cluster" else executor, **options)
