"""Jobs whose output is what a coordinator answers, with what has to come out."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.backends.dataflow import Dataflow, OperatorCoordinator, Output
from stateformat.backends.dataflow.operators.row_steps import Filter, Map
from tests.conformance import Calls, Gated, Out, Told, batches
from tests.conformance_jobs import CountingCoordinator, laps
from tests.local_jobs import ROWS, rows


class Echoes(CountingCoordinator):
    """Sends every message back to its sender, and counts them."""

    def receive(self, subtask: int, message: bytes) -> None:
        self.count += 1
        self.send(subtask, message)


class Asks(Told):
    """Sends every value to its coordinator ``trips`` times, and emits it at last."""

    def __init__(self, calls: Calls, trips: int = 1) -> None:
        super().__init__(calls)
        self.trips = trips

    def coordinator(self) -> OperatorCoordinator:
        return Echoes()

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        super().process(batch, input)
        for value in batch["value"].to_pylist():
            self.context.send_to_coordinator(f"{value} {self.trips}".encode())
        return None

    def receive(self, message: bytes) -> Output:
        super().receive(message)
        value, trips = map(int, message.split())
        if trips > 1:
            self.context.send_to_coordinator(f"{value} {trips - 1}".encode())
            return None
        return rows(value)


class AsksLap(Told):
    """The body of a loop: takes one lap off a row when its coordinator has answered."""

    def coordinator(self) -> OperatorCoordinator:
        return Echoes()

    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        for row in batch.to_pylist():
            self.context.send_to_coordinator(f"{row['key']} {row['value']}".encode())
        return None

    def receive(self, message: bytes) -> Output:
        key, left = map(int, message.split())
        return laps([key], left - 1)


class AnswerJob:
    """in → op → out, and op → second → more: both operators ask, in chains."""

    def __init__(self, directory: Path, count: int = 12, *, trips: int = 2, shut: bool = False) -> None:
        self.calls = Calls(directory)
        self.trips = trips
        self.count = count
        halves = [batches(range(start, count, 2), 1) for start in (0, 1)]
        self.source = Gated(directory / "in", *halves, shut=shut)
        self.out, self.more = Out(), Out()

    def flow(self, parallelism: int = 2) -> Dataflow:
        made = Dataflow("answers", parallelism=parallelism)
        op = made.source(self.source, uid="in").apply(Asks(self.calls, self.trips), uid="op")
        op.apply(self.out, uid="out")
        op.apply(Asks(self.calls, 1), uid="second").apply(self.more, uid="more", parallelism=1)
        return made

    @property
    def committed(self) -> tuple[list[int], list[int]]:
        return self.out.values, self.more.values

    @property
    def expected(self) -> tuple[list[int], list[int]]:
        return [*range(self.count)], [*range(self.count)]


class AnswerLoopJob:
    """in → head → body → (again → head) and (done → out). Answers turn rows round."""

    def __init__(self, directory: Path) -> None:
        self.calls = Calls(directory)
        self.source = Gated(directory / "laps", [laps([n, n + 10], left=1 + n % 3) for n in range(4)])
        self.out = Out()

    def flow(self, parallelism: int = 2) -> Dataflow:
        made = Dataflow("answered laps", parallelism=parallelism)
        loop = made.loop(ROWS)
        stream = made.source(self.source, uid="in", parallelism=1).key_by("key")
        head = stream.apply(Told(self.calls), loop.key_by("key"), uid="head")
        lap = head.rebalance().apply(AsksLap(self.calls), uid="body")
        loop.close(lap.apply(Filter(lambda batch: pc.greater(batch["value"], 0)), uid="again"))
        done = lap.apply(Filter(lambda batch: pc.less_equal(batch["value"], 0)), uid="done")
        named = done.apply(Map(lambda batch: batch.set_column(1, ROWS.field("value"), batch["key"])), uid="named")
        named.apply(self.out, uid="out", parallelism=1)
        return made

    @property
    def expected(self) -> list[int]:
        return sorted([*range(4), *range(10, 14)])
