"""Sources, operators and sinks of a few lines, for tests of the runtime; what they do stands in
their names.

Jobs of a few words, with what planning and coordinating ask of a job and nothing else: no user
code, no schemas.

``tiny_job({"a": 2, "b": 3}, "a hash b", "b feedback a")`` has two vertices of one operator each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from stateformat.backends.dataflow import (
    Chunk,
    Dataflow,
    Descriptor,
    NoSplit,
    Operator,
    OperatorContext,
    OperatorCoordinator,
    Prepared,
    ReaderContext,
    Source,
    Split,
    SplitEnumerator,
    TwoPhaseCommitSink,
)
from stateformat.backends.dataflow.chain import OperatorChain
from stateformat.backends.dataflow.compile import Job, compile_job
from stateformat.backends.dataflow.events import TaskId
from stateformat.backends.dataflow.graph import graph_of
from stateformat.backends.runtime import VIRTUAL_ORIGIN_US
from stateformat.graph import Edge, OperatorId, Partitioner
from stateformat.model import State
from stateformat.states import union_state

ROWS = pa.schema([("key", pa.int64()), ("value", pa.int64())])


def rows(keys: Sequence[int], values: Sequence[int] | None = None) -> pa.RecordBatch:
    """A batch of ``ROWS``; without values, these are the keys."""
    return pa.record_batch([pa.array(keys, pa.int64()), pa.array(values or keys, pa.int64())], schema=ROWS)


class NoSplits(SplitEnumerator):
    """Has nothing to deal."""

    columns = pa.schema([("left", pa.string())])

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        return NoSplit.NEVER

    def snapshot(self) -> pa.Table:
        return self.columns.empty_table()

    def restore(self, rows: pa.Table) -> None:
        pass


class Chunks(Source):
    """Reads, of the split named x, the chunks of ``of[x]`` from the split's position on; None is
    nothing yet.
    """

    def __init__(
        self, schema: pa.Schema = ROWS, *, splits_per_reader: int | None = 1, **of: Sequence[pa.RecordBatch | None]
    ):
        self._schema = schema
        self.of = of
        self.splits_per_reader = splits_per_reader
        self.closed: list[str] = []

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def enumerator(self) -> SplitEnumerator:
        return NoSplits()

    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        try:
            for index, batch in enumerate(self.of[split.id]):
                if index >= split.position:
                    yield Chunk(batch, index + 1)
        finally:
            self.closed.append(split.id)


class Pass(Operator):
    """Emits what it is given, and tells ``log`` of every call."""

    def __init__(self, log: list[Any] | None = None, name: str = "", **outputs: Callable[[], Any]) -> None:
        self.log: list[Any] = [] if log is None else log
        self.name = name
        self.outputs = outputs

    def _told(self, *call: Any) -> Any:
        self.log.append((self.name, *call))
        return self.outputs.get(call[0], lambda: None)()

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self._told("open")

    def process(self, batch: pa.RecordBatch, input: int) -> Any:
        self.log.append((self.name, "process", input, batch.column(0).to_pylist()))
        return batch

    def receive(self, message: bytes) -> Any:
        return self._told("receive", message)

    def end_input(self, input: int) -> Any:
        return self._told("end_input", input)

    def finish(self) -> Any:
        return self._told("finish")

    def snapshot(self) -> None:
        self._told("snapshot")

    def checkpoint_complete(self) -> None:
        self._told("checkpoint_complete")

    def close(self) -> None:
        self._told("close")


class Stateful(Operator):
    """Passes on; has the states that it is given."""

    def __init__(self, *states: Descriptor) -> None:
        self._states = states

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        return self._states

    def process(self, batch: pa.RecordBatch, input: int) -> Any:
        return batch


class Coordinator(OperatorCoordinator):
    """Keeps nothing."""

    columns = pa.schema([pa.field("what", pa.string(), nullable=False)])

    def receive(self, subtask: int, message: bytes) -> None:
        pass

    def snapshot(self) -> pa.Table:
        return self.columns.empty_table()


class Coordinated(Pass):
    """Has a coordinator, and sends it what it is to receive."""

    def coordinator(self) -> OperatorCoordinator:
        return Coordinator()

    def process(self, batch: pa.RecordBatch, input: int) -> Any:
        self.context.send_to_coordinator(b"%d rows" % batch.num_rows)
        return batch


class Bucket(TwoPhaseCommitSink):
    """Prepares one committable with the sum of the values since the last; none where nothing
    came.
    """

    committable_columns = pa.schema([("total", pa.int64())])

    def open(self, context: OperatorContext) -> None:
        super().open(context)
        self.total = 0

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        self.total += int(np.sum(batch.column("value").to_numpy()))

    def prepare_commit(self, prepared: Prepared) -> pa.Table | None:
        total, self.total = self.total, 0
        return pa.table({"total": [total]}) if total else None

    def commit(self, permit: Any, committables: pa.Table) -> pa.Table | None:
        return None


@dataclass
class Collected:
    """What lies outside of a chain: keeps what leaves it."""

    emitted: list[tuple[str, pa.RecordBatch]] = field(default_factory=list)
    sent: list[tuple[str, bytes]] = field(default_factory=list)
    clock_us: int = 0

    def emit(self, edge_id: str, batch: pa.RecordBatch) -> None:
        self.emitted.append((edge_id, batch))

    def send(self, uid: str, message: bytes) -> None:
        self.sent.append((uid, message))

    def now_us(self) -> int:
        return self.clock_us

    def processing_time_us(self) -> int:
        return VIRTUAL_ORIGIN_US + self.clock_us

    def values(self, edge_id: str, column: str = "value") -> list[Any]:
        """The values that went along an edge."""
        return [value for edge, batch in self.emitted if edge == edge_id for value in batch.column(column).to_pylist()]


def job_of(flow: Dataflow, *, unaligned: bool = False, **sizes: int) -> Job:
    """A dataflow, compiled for a first run; ``sizes`` are parallelisms by uid."""
    return compile_job(flow, graph_of(flow, per_operator=sizes, unaligned=unaligned), unaligned=unaligned)


def opened(job: Job, vertex: str, subtask: int = 0, restored: Any = None) -> tuple[OperatorChain, Collected]:
    """An open chain, and what lies outside of it."""
    outside = Collected()
    chain = OperatorChain(job, job.vertex(vertex), subtask, outside)
    chain.open(restored)
    return chain, outside


@dataclass(frozen=True)
class TinyVertex:
    """A chain."""

    id: str
    operators: tuple[str, ...]
    parallelism: int
    inputs: tuple[Edge, ...]
    feedback: tuple[Edge, ...]


@dataclass(frozen=True)
class TinyJob:
    """A job."""

    vertices: tuple[TinyVertex, ...]
    states: tuple[State, ...] = ()
    unaligned: bool = False

    @property
    def tasks(self) -> list[TaskId]:
        """All tasks."""
        return [TaskId(vertex.id, subtask) for vertex in self.vertices for subtask in range(vertex.parallelism)]


def edge(text: str) -> Edge:
    """``"source partitioner target"``; the partitioner ``feedback`` is a hash edge that is fed
    back.
    """
    source, how, target = text.split()
    partitioner = Partitioner.HASH if how == "feedback" else Partitioner(how)
    return Edge(text, OperatorId(source), OperatorId(target), partitioner, feedback=how == "feedback")


def tiny_job(parallelism: dict[str, int], *edges: str, union: tuple[str, ...] = (), unaligned: bool = False) -> TinyJob:
    """Vertices in topological order.

    ``"a+x"`` is a chain of operators a and x, and edges name operators.
    """
    vertices = []
    for chain, count in parallelism.items():
        operators = tuple(chain.split("+"))
        into = [edge(text) for text in edges if text.split()[2] == operators[0]]
        inputs = tuple(one for one in into if not one.feedback)
        vertices.append(TinyVertex(operators[0], operators, count, inputs, tuple(one for one in into if one.feedback)))
    states = tuple(union_state(uid, "shared", columns={"v": "int64"}) for uid in union)
    return TinyJob(tuple(vertices), states, unaligned)
