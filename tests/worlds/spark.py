"""Spark's part of an epoch, played in this process: histories of the Spark runtime in milliseconds.

:class:`Stand` stands for the session. It carries what a level sends to the next one by hand. Every
slot of every level is run by one of some *workers*, drawn at random, each with a cache of its own;
frames come in any order that a shuffle may give. A test can break epochs, which the runtime then
runs again. Rows come from :class:`Ranges`, as batches by Spark partition.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyspark

from stateformat.backends.dataflow.operators import aggregate
from stateformat.backends.runtime import Runtime, VirtualClock
from stateformat.backends.spark import epoch, frames as mail, runtime, task_run
from stateformat.backends.spark.epoch import EpochJob, checked
from stateformat.backends.spark.frames import EpochBroken
from stateformat.backends.spark.messages import TaskReport
from stateformat.backends.spark.offsets import Offsets, Position
from stateformat.backends.spark.run import SparkRun
from stateformat.backends.spark.runtime import SparkRuntime
from stateformat.backends.spark.sessions import SparkOptions
from stateformat.backends.spark.source import SparkSource
from stateformat.backends.spark.task_cache import SharedCopies, TaskCache
from stateformat.store import CheckpointStore


class _Broadcast:
    def __init__(self, value: bytes) -> None:
        self.value = value

    def destroy(self) -> None:
        pass


class Stand:
    """In place of a session."""

    applicationId = "local-played"  # noqa: N815 - Spark's name

    def __init__(self, monkeypatch: Any, *, workers: int = 1, seed: int = 0, disks: Sequence[Path] = ()) -> None:
        """``disks``: one local directory for each executor, of which each has as many workers."""
        self.choose = random.Random(seed)
        shared = [SharedCopies(disks[number * len(disks) // workers]) if disks else None for number in range(workers)]
        self.caches = [TaskCache(each) for each in shared]
        self.setups: list[dict[str, Any]] = [{} for _ in range(workers)]
        self.breaks = 0
        """How many tries of epochs are yet to be broken."""
        self.spoil: Callable[[], object] = lambda: None
        """Called before each try."""
        self.opened: dict[str, int] = defaultdict(int)
        self.opened_of: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        """By vertex, how its tasks got their chains."""
        self.partition = 0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(EpochJob, "_once", lambda job: self._run(job))
        monkeypatch.setattr(epoch.logger, "warning", lambda *_: None)
        monkeypatch.setattr(runtime, "check", lambda spark: spark)
        monkeypatch.setattr(runtime, "job_session", lambda spark: spark)
        # Tests have few rows: some of their batches are combined, others are not.
        monkeypatch.setattr(aggregate, "_COMBINED_ROWS_MIN", 3)
        monkeypatch.setattr(aggregate, "_ROWS_PER_KEY_MIN", 1)
        context = type("Context", (), {"partitionId": lambda _: self.partition})
        monkeypatch.setattr(pyspark, "TaskContext", type("TaskContext", (), {"get": staticmethod(lambda: context())}))

    @property
    def sparkContext(self) -> Stand:  # noqa: N802 - Spark's name
        return self

    def broadcast(self, value: bytes) -> _Broadcast:
        return _Broadcast(value)

    def addJobTag(self, tag: str) -> None:  # noqa: N802 - Spark's name
        pass

    removeJobTag = addJobTag  # noqa: N815 - Spark's name

    def runtime(self, store: CheckpointStore, **options: Any) -> SparkRuntime:
        made = object.__new__(SparkRuntime)
        options = {"clock": VirtualClock(), "idle_us": 0, "restart_delay_us": 0, **options}
        Runtime.__init__(made, store, **options)
        assert isinstance(made.options, SparkOptions)
        made._spark = self
        return made

    def begin(self, store: CheckpointStore, flow: Any, **options: Any) -> SparkRun:
        run = self.runtime(store, **options).begin(flow)
        assert isinstance(run, SparkRun), run
        return run

    def _run(self, job: EpochJob) -> dict[Any, TaskReport]:
        self.spoil()
        sent = self._fed(job)
        for each in job.levels():
            received = enumerate(self._exchanged(job.slots, sent))
            sent = [self._slot(each, slot, payloads) for slot, payloads in received]
        for feed in job.inputs:
            feed.range.check(None)  # type: ignore[arg-type]
        reports = (mail.unpack_report(payload) for some in sent for payload in some[1::2])
        found = checked(reports, [spec.task for spec in job.specs])
        if self.breaks:
            self.breaks -= 1
            raise EpochBroken("a test says so")
        for report in found.values():
            self.opened[report.opened] += 1
            self.opened_of[report.task.vertex][report.opened] += 1
        return found

    def _slot(self, one: task_run.Level, slot: int, payloads: Sequence[bytes]) -> list[bytes]:
        worker = self.choose.randrange(len(self.caches))
        self._monkeypatch.setattr(task_run, "WORKER_CACHE", self.caches[worker])
        self._monkeypatch.setattr(task_run, "_SETUPS", self.setups[worker])
        return list(one(slot, iter(payloads)))

    def _fed(self, job: EpochJob) -> list[list[bytes]]:
        sent = []
        for feed in job.inputs:
            partitions: Any = feed.range.frame(None)  # type: ignore[arg-type]
            for self.partition, batches in enumerate(partitions):
                parts = feed.encoder(iter(batches))
                sent.append([part for batch in parts for part in batch["part"].to_pylist()])
        return sent

    def _exchanged(self, slots: int, sent: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
        """As Spark does it: what goes to a slot comes in any order."""
        received: list[list[bytes]] = [[] for _ in range(slots)]
        for parts in sent:
            for slot, payload in zip(parts[::2], parts[1::2], strict=True):
                received[int.from_bytes(slot, "big")].append(payload)
        for payloads in received:
            self.choose.shuffle(payloads)
        return received


class Ranges(Offsets):
    """Ranges of rows: of each, its batches by Spark partition."""

    def __init__(self, ranges: list[list[list[pa.RecordBatch]]], *, grows: bool = False) -> None:
        self.ranges = ranges
        self.bounded = not grows

    def sample(self, spark: Any) -> Any:
        raise AssertionError("its source has a schema")

    def first(self, spark: Any) -> Position:
        return {"read": 0}

    def latest(self, spark: Any, position: Position) -> Position:
        return {"read": min(int(position["read"]) + 1, len(self.ranges))}

    def frame(self, spark: Any, start: Position, stop: Position) -> Any:
        return self.ranges[int(start["read"])]

    def ended(self, position: Position) -> bool:
        return self.bounded and position["read"] == len(self.ranges)


class RangeSource(SparkSource):
    """A source of :class:`Ranges`, whose rows are no DataFrames."""

    def _conforming(self, rows: Any) -> Any:
        return rows
