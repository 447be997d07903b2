"""A harness for testing operators: one operator, driven by hand, with the machinery of a job.

::

    columns = {"city": pa.string(), "n": pa.int64()}
    harness = OperatorHarness(Totals(), columns, key_by="city", parallelism=2)
    harness.push([{"city": "Oslo", "n": 3}]).advance(1_000_000)
    assert harness.take_output().to_pylist() == [...]
    again = OperatorHarness.restore(harness.snapshot(), parallelism=3)

Every subtask of the operator lives in an
:class:`~stateformat.backends.dataflow.chain.OperatorChain`, as in both executors. Records
reach the subtasks by the routing of a real edge. Snapshots are checkpoints of the format, published
to a store in memory, and a restore is planned and read as that of a job is. Nothing runs between
calls.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import pyarrow as pa

from stateformat.errors import InvalidInput, InvalidState
from stateformat.graph import brief
from stateformat.model import Mode
from stateformat.schema import segment_schema
from stateformat.states import Columns, as_schema
from stateformat.store import CheckpointStore
from stateformat.tables import table_from_python

from ..runtime import VIRTUAL_ORIGIN_US, Options, clean, commit, pending_committables, restore, sinks_of
from ..storage import MemoryStorage
from . import events as ev
from .api import (
    NoSplit,
    Operator,
    OperatorContext,
    OperatorCoordinator,
    Source,
    Split,
    SplitEnumerator,
    TwoPhaseCommitSink,
    checked_message,
)
from .casting import cast_to_schema
from .chain import OperatorChain
from .chained_operator import Combiner, Guard, combiners_of
from .compile import Router
from .flow import Dataflow
from .graph import COMMITTABLES

__all__ = ["HarnessSnapshot", "OperatorHarness"]

KeyBy: TypeAlias = "str | Sequence[str] | Mapping[int, Sequence[str]]"
Rows: TypeAlias = "pa.RecordBatch | pa.Table | Iterable[Mapping[str, Any]]"

JOB: Final = "harness"
OUTPUT: Final = "harness-output"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class OperatorSetup:
    """An operator and how it is used in its dataflow."""

    prototype: Operator
    inputs: tuple[pa.Schema, ...]
    key_by: KeyBy
    parallelism: int
    max_parallelism: int | None
    uid: str


class _NoSplits(SplitEnumerator):
    columns = pa.schema([("split", pa.string())])

    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:  # noqa: ARG002
        return NoSplit.NEVER

    def snapshot(self) -> pa.Table:
        return as_schema(self.columns).empty_table()

    def restore(self, rows: pa.Table) -> None:
        pass


class _Hand(Source):
    """Stands for an input; nothing is read from it."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    @property
    def schema(self) -> pa.Schema:
        return self._schema

    def enumerator(self) -> SplitEnumerator:
        return _NoSplits()

    def read(self, split: Split, context: object) -> Any:  # noqa: ARG002
        return iter(())


class _Collect(Operator):
    """Stands behind the operator, so that what it emits goes somewhere."""

    def process(self, batch: pa.RecordBatch, input: int) -> None:
        pass


def flow_of(setup: OperatorSetup) -> Dataflow:
    """The dataflow of an operator alone."""
    flow = Dataflow(JOB)
    streams = []
    for number, schema in enumerate(setup.inputs):
        stream = flow.source(_Hand(schema), uid=f"harness-input-{number}")
        key_by = setup.key_by.get(number, ()) if isinstance(setup.key_by, Mapping) else setup.key_by
        columns = (key_by,) if isinstance(key_by, str) else tuple(key_by)
        if number in setup.prototype.broadcast_inputs:
            stream = stream.broadcast()
        else:
            stream = stream.key_by(*columns) if columns else stream.rebalance()
        streams.append(stream)
    stream = flow.apply(
        setup.prototype,
        *streams,
        uid=setup.uid,
        parallelism=setup.parallelism,
        max_parallelism=setup.max_parallelism,
        chain=False,
    )
    if not isinstance(setup.prototype, TwoPhaseCommitSink) and stream.schema.names:
        stream.rebalance().apply(_Collect(), uid=OUTPUT, chain=False)
    return flow


def batches_of(rows: Rows, schema: pa.Schema) -> list[pa.RecordBatch]:
    """Rows as batches of an input's schema. ``InvalidInput`` for other columns or types."""
    if isinstance(rows, pa.RecordBatch):
        rows = pa.Table.from_batches([rows])
    if not isinstance(rows, pa.Table):
        rows = table_from_python(rows, schema, "the rows")
    names = sorted({*rows.column_names} ^ {*schema.names})
    if names:
        raise InvalidInput(f"the rows differ from the input in the columns {names}; the input has {schema.names}")
    try:
        found: list[pa.RecordBatch] = rows.select(schema.names).cast(schema).to_batches()
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise InvalidInput(f"the rows do not have the types of the input, {schema.to_string()}: {error}") from error
    return found


def new_store(like: CheckpointStore | None) -> CheckpointStore:
    """A store in memory, gone with its last user; a copy of another one if that is given."""
    name = f"operator-harness-{next(_numbers)}"
    storage = MemoryStorage(name)
    if like is not None:
        for item in like.storage.list(""):
            storage.create(item.path, like.storage.read(item.path).to_pybytes())
    store = CheckpointStore(storage)
    weakref.finalize(store, MemoryStorage.reset, name)
    return store


@dataclass(frozen=True)
class HarnessSnapshot:
    """A published checkpoint of an operator, as :meth:`OperatorHarness.snapshot` returns it."""

    checkpoint_id: int
    _store: CheckpointStore = field(repr=False)
    _setup: OperatorSetup = field(repr=False)

    def state(self, name: str) -> pa.Table:
        """Return a state's rows in all subtasks, as stored (SPEC.md section 5.1)."""
        return self._store.open(self.checkpoint_id).read(self._setup.uid, name).table()

    @property
    def committables(self) -> pa.Table:
        """What the sink has to commit, with ``_checkpoint_id`` (int64), ``_attempt_id`` (utf8)."""
        return self.state(COMMITTABLES)


class OperatorHarness:
    """All subtasks of one operator, driven by hand. Methods that drive it return the harness.

    - ``inputs``: the columns of each input, by position.
    - ``key_by``: the key columns of every input that is not broadcast, or a mapping from the number
      of an input to its key columns.
    - ``subtask``: the only one that :meth:`push` gives rows to and :meth:`state` shows; None: all
      of them, as the edges route the rows.

    An exception of the operator is raised as the cause of an ``OperatorError``; the harness is
    unusable then. ``coordinator`` is the operator's coordinator, or None.
    """

    def __init__(
        self,
        operator: Operator,
        *inputs: Columns,
        key_by: KeyBy = (),
        parallelism: int = 1,
        max_parallelism: int | None = None,
        subtask: int | None = None,
        uid: str = "operator",
    ) -> None:
        schemas = tuple(as_schema(columns) for columns in inputs)
        self._begin(OperatorSetup(operator, schemas, key_by, parallelism, max_parallelism, uid), subtask, None, ())

    def __repr__(self) -> str:
        return brief(self, str(self._vertex.id))

    @classmethod
    def restore(
        cls,
        snapshot: HarnessSnapshot,
        operator: Operator | None = None,
        *inputs: Columns,
        parallelism: int | None = None,
        subtask: int | None = None,
        drop: Collection[str] = (),
    ) -> OperatorHarness:
        """Return a harness that continues from a snapshot, which may be restored again.

        ``operator`` and ``inputs`` are those of the new version of the program, by default the
        snapshot's. ``drop``: state to discard, as for a runtime. A sink commits what the snapshot
        holds before it opens, perhaps again. Raises ``RestoreRefused`` if the state does not fit
        the operator.
        """
        setup = snapshot._setup
        if operator is not None:
            setup = replace(setup, prototype=operator)
        if inputs:
            setup = replace(setup, inputs=tuple(as_schema(columns) for columns in inputs))
        setup = replace(setup, parallelism=parallelism or setup.parallelism)
        harness = cls.__new__(cls)
        harness._begin(setup, subtask, snapshot._store, drop)
        return harness

    def _begin(
        self, setup: OperatorSetup, subtask: int | None, saved: CheckpointStore | None, drop: Collection[str]
    ) -> None:
        if subtask is not None and not 0 <= subtask < setup.parallelism:
            raise InvalidInput(f"there is no subtask {subtask} at parallelism {setup.parallelism}")
        self._setup, self._subtask = setup, subtask
        self._store = new_store(saved)
        self._permit = None if saved is None else self._store.start(JOB)
        flow = flow_of(setup)
        restored = restore(flow, self._permit, Options(per_operator={setup.uid: setup.parallelism}, drop=drop))
        if setup.uid in restored.finished:
            raise InvalidInput(
                f"operator {setup.uid!r} had finished when the snapshot was taken; nothing is left to run"
            )
        self._job, self._sinks = restored.job, sinks_of(flow)
        self._vertex = self._job.vertex(setup.uid)
        self._edges = {edge.input: edge for edge in self._vertex.inputs}
        self._routers = {number: Router(self._job, edge, 0) for number, edge in self._edges.items()}
        self._watermarks = dict.fromkeys(self._edges, ev.MIN_WATERMARK)
        self._ended: set[int] = set()
        self._finished = False
        self._emitted: list[pa.RecordBatch] = []
        self._mail: deque[tuple[int | None, int, bytes]] = deque()
        self._number = 0
        self._processing_time_us = VIRTUAL_ORIGIN_US
        self.messages: list[tuple[int, bytes]] = []
        """What subtasks have sent to the coordinator, as subtask and message, in order."""
        carried = pending_committables(self._permit, self._job, [] if COMMITTABLES in drop else self._sinks)
        self._put_off: dict[str, pa.Table] = {}
        if self._permit is not None:
            self._put_off = commit(self._permit, self._sinks, carried)
        clean(self._store, self._permit, self._job, self._sinks, carried)
        self._open_coordinator(restored.coordinators.get(setup.uid))
        self._chains = [
            OperatorChain(self._job, self._vertex, number, _Output(self, number)) for number in range(setup.parallelism)
        ]
        for number, chain in enumerate(self._chains):
            watermarks, ended = restored.progress(self._vertex, number)
            for of_input, edge in self._edges.items():
                self._watermarks[of_input] = max(self._watermarks[of_input], watermarks.get(edge.id, ev.MIN_WATERMARK))
                if edge.id in ended:
                    self._ended.add(of_input)
            chain.open(restored.states(self._vertex, number) or None)
        self._deliver()

    # What is given --------------------------------------------------------------------------------

    def push(
        self, rows: Rows, input: int = 0, *, subtask: int | None = None, combined: bool = False
    ) -> OperatorHarness:
        """Give rows to an input: a record batch, a table, or dictionaries.

        They go to ``subtask``, or where the edge routes them. ``combined``: ``combine`` is called
        for each half of a batch, and what it returns is processed as one batch.
        """
        if input in self._ended:
            raise InvalidInput(f"input {input} of operator {self._setup.uid!r} has ended; nothing follows")
        chosen = self._subtask if subtask is None else subtask
        edge = self._edge(input)
        combiner = combiners_of(self._job, [edge]).get(edge.id) if combined else None
        for batch in batches_of(rows, self._setup.inputs[input]):
            for sent, is_combined in [(batch, False)] if combiner is None else _in_halves(batch, combiner):
                parts = self._routers[input].route(sent) if chosen is None else [(chosen, sent)]
                for number, part in parts:
                    self._of(number).process(edge.id, part, combined=is_combined)
                    self._deliver()
        return self

    def advance(self, timestamp: int, input: int | None = None) -> OperatorHarness:
        """Advance event time to ``timestamp`` (µs), on one input or on all; due timers fire.

        The operator's watermark is the lowest of its inputs that have not ended.
        """
        for number in self._edges if input is None else [self._edge(input).input]:
            self._watermarks[number] = max(self._watermarks[number], timestamp)
        self._advance()
        return self

    def _advance(self) -> None:
        open_inputs = [number for number in self._edges if number not in self._ended]
        if open_inputs:
            timestamp = min(self._watermarks[number] for number in open_inputs)
            for chain in self._chains:
                chain.advance_watermark(timestamp)
                self._deliver()

    def advance_processing_time(self, time_us: int) -> OperatorHarness:
        """Advance processing time to ``time_us``, µs since 1970, never back; due timers fire.

        A harness starts on 1 January 2026, UTC.
        """
        self._processing_time_us = max(self._processing_time_us, time_us)
        if not self._finished:
            for chain in self._chains:
                chain.fire_timers()
                self._deliver()
        return self

    def end_input(self, input: int = 0) -> OperatorHarness:
        """End an input in every subtask. Before the last one ends, event time does."""
        self._edge(input)
        if input in self._ended:
            raise InvalidInput(f"input {input} of operator {self._setup.uid!r} has ended already")
        self._ended.add(input)
        last = self._ended.issuperset(self._edges)
        for chain in self._chains:
            if last:
                chain.advance_watermark(ev.MAX_WATERMARK, ending=True)
                self._deliver()
            chain.end_input(input)
            self._deliver()
        self._advance()
        return self

    def finish(self) -> OperatorHarness:
        """End the inputs that are still open, and finish every subtask."""
        for number in self._edges:
            if number not in self._ended:
                self.end_input(number)
        for chain in self._chains:
            chain.finish()
        self._finished = True
        return self

    def receive(self, message: bytes, subtask: int = 0) -> OperatorHarness:
        """Give a subtask a message, as its coordinator would."""
        self._of(subtask).receive(self._setup.uid, message)
        self._deliver()
        return self

    # What is shown --------------------------------------------------------------------------------

    @property
    def output(self) -> pa.Table:
        """What all subtasks have emitted since :meth:`take_output`, in order."""
        return pa.Table.from_batches(self._emitted, self._job.step(self._setup.uid).schema)

    def take_output(self) -> pa.Table:
        """Return :attr:`output` and empty it."""
        taken = self.output
        self._emitted = []
        return taken

    def state(self, name: str, subtask: int | None = None) -> pa.Table:
        """Return a state's current rows, in one subtask or all. ``InvalidInput`` if unknown."""
        chosen = self._subtask if subtask is None else subtask
        found = []
        for number in range(self._setup.parallelism) if chosen is None else [chosen]:
            states = self._of(number).states[self._setup.uid].all
            if name not in states:
                raise InvalidInput(
                    f"operator {self._setup.uid!r} has no state {name!r}; it has {', '.join(states) or 'none'}"
                )
            found.append(states[name].rows())
        return pa.concat_tables(found)

    def context(self, subtask: int = 0) -> OperatorContext:
        """Return the context of the operator in a subtask."""
        return self._of(subtask).operators[self._setup.uid].context

    def operator(self, subtask: int = 0) -> Operator:
        """Return the copy of the operator that runs in a subtask."""
        return self._of(subtask).operators[self._setup.uid].logic

    # Checkpoints ----------------------------------------------------------------------------------

    def snapshot(self) -> HarnessSnapshot:
        """Take and publish a checkpoint, commit what sinks prepared, and notify the operator."""
        self._number += 1
        pending = self._store.begin(job_id=JOB, graph=self._job.graph, states=self._job.states, parent=self._permit)
        kept = None if self.coordinator is None else self._coordinator_rows(self.coordinator)
        for snapshot in self._subtasks(pending.context):
            pending.add(snapshot)
        self._add_driver_states(pending, kept)
        self._permit = pending.publish()
        self._put_off = commit(self._permit, self._sinks, pending_committables(self._permit, self._job, self._sinks))
        for chain in self._chains:
            chain.notify_complete(self._number)
        if self.coordinator is not None:
            self.coordinator.checkpoint_complete()
        self._deliver()
        return HarnessSnapshot(int(self._permit.ref.checkpoint_id), new_store(self._store), self._setup)

    def abort_snapshot(self) -> OperatorHarness:
        """Take a checkpoint that is not published, and call ``checkpoint_aborted``."""
        self._number += 1
        pending = self._store.begin(job_id=JOB, graph=self._job.graph, states=self._job.states, parent=self._permit)
        if self.coordinator is not None:
            self._coordinator_rows(self.coordinator)
        self._subtasks(pending.context)
        for chain in self._chains:
            chain.notify_aborted(self._number)
        if self.coordinator is not None:
            self.coordinator.checkpoint_aborted(pending.context.checkpoint_id)
        self._deliver()
        return self

    def _subtasks(self, context: Any) -> list[Any]:
        """The snapshots of the operator, and of its neighbors, which keep nothing."""
        found = []
        watermarks = {
            edge.id: ev.MAX_WATERMARK if number in self._ended else self._watermarks[number]
            for number, edge in self._edges.items()
        }
        ended = {edge.id: number in self._ended for number, edge in self._edges.items()}
        command = ev.Snapshot(ev.Barrier(self._number), self._finished, watermarks, ended)
        for chain in self._chains:
            found += chain.snapshot(command, context).close()
        for operator in self._job.graph.operators:
            if operator.uid == self._setup.uid:
                continue
            finishing = self._finished and operator.uid != OUTPUT
            for subtask in range(operator.parallelism):
                writer = context.subtask(operator.uid, subtask, finishing=finishing)
                for state in () if finishing else self._job.states_of(operator.uid):
                    if state.mode not in (Mode.COORDINATOR, Mode.COMMITTABLES):
                        writer.empty(state.name)
                found.append(writer.snapshot())
        return found

    def _add_driver_states(self, pending: Any, kept: pa.Table | None) -> None:
        uid = self._setup.uid
        for operator in self._job.graph.operators:
            done = self._finished and operator.uid != OUTPUT
            retries = self._put_off.get(operator.uid)
            states = [state for state in self._job.states_of(operator.uid) if state.mode is Mode.COORDINATOR]
            if (done or not states) and retries is None:
                continue
            writer = pending.context.coordinator(operator.uid, finished=done)
            for state in () if done else states:
                if operator.uid != uid or kept is None:
                    writer.empty(state.name)
                    continue
                schema = segment_schema(state)
                rows = kept
                for name in schema.names:
                    if name not in rows.column_names:
                        rows = rows.append_column(schema.field(name), pa.nulls(len(rows), schema.field(name).type))
                writer.write(state.name, rows.select(schema.names).cast(schema))
            if retries is not None:
                writer.write(COMMITTABLES, retries)
            pending.add(writer)

    # Coordinators ---------------------------------------------------------------------------------

    def _open_coordinator(self, rows: pa.Table | None) -> None:
        self.coordinator: OperatorCoordinator | None = self._setup.prototype.coordinator()
        """The coordinator of the operator, or None."""
        if self.coordinator is not None:
            with Guard(self._setup.uid, None)("the coordinator"):
                self.coordinator.open(self._send)
                if rows is not None:
                    self.coordinator.restore(rows.drop_columns(["message_from", "message"]))

    def _coordinator_rows(self, coordinator: OperatorCoordinator) -> pa.Table:
        what = f"snapshot of the coordinator of {self._setup.uid!r}"
        with Guard(self._setup.uid, None)("snapshot of the coordinator"):
            return cast_to_schema(what, coordinator.snapshot(), as_schema(coordinator.columns))

    def _send(self, subtask: int, message: bytes) -> None:
        checked_message(f"the coordinator of operator {self._setup.uid!r}", message)
        if not 0 <= subtask < self._setup.parallelism:
            raise InvalidState(
                f"the coordinator of operator {self._setup.uid!r} sent to subtask {subtask}. The operator has "
                f"subtasks 0 to {self._setup.parallelism - 1}."
            )
        self._mail.append((subtask, subtask, message))

    def _hear(self, subtask: int, message: bytes) -> None:
        self.messages.append((subtask, message))
        self._mail.append((None, subtask, message))

    def _deliver(self) -> None:
        """Deliver messages between subtasks and the coordinator until none is left."""
        while self._mail:
            receiver, sender, message = self._mail.popleft()
            if receiver is not None:
                self._chains[receiver].receive(self._setup.uid, message)
            elif self.coordinator is not None:
                with Guard(self._setup.uid, None)("the coordinator"):
                    self.coordinator.receive(sender, message)

    def _edge(self, input: int) -> Any:
        if input not in self._edges:
            raise InvalidInput(
                f"operator {self._setup.uid!r} has no input {input}; it has {len(self._edges)}, from 0 on"
            )
        return self._edges[input]

    def _of(self, subtask: int) -> OperatorChain:
        if not 0 <= subtask < self._setup.parallelism:
            last = self._setup.parallelism - 1
            raise InvalidInput(f"operator {self._setup.uid!r} has subtasks 0 to {last}; there is no subtask {subtask}")
        return self._chains[subtask]

    def close(self) -> None:
        """Close the operator in every subtask."""
        for chain in self._chains:
            chain.close()

    def __enter__(self) -> OperatorHarness:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # What an operator raises when it is closed must not hide what went wrong before.
        with nullcontext() if error is None else suppress(Exception):
            self.close()


class _Output:
    """Collects what a chain emits and sends."""

    def __init__(self, harness: OperatorHarness, subtask: int) -> None:
        self._harness, self._subtask = harness, subtask

    def emit(self, edge_id: str, batch: pa.RecordBatch) -> None:  # noqa: ARG002 - there is one edge
        self._harness._emitted.append(batch)

    def send(self, uid: str, message: bytes) -> None:  # noqa: ARG002 - there is one operator
        self._harness._hear(self._subtask, message)

    def now_us(self) -> int:
        return 0

    def processing_time_us(self) -> int:
        return self._harness._processing_time_us


def _in_halves(batch: pa.RecordBatch, combiner: Combiner) -> Iterator[tuple[pa.RecordBatch, bool]]:
    """Halves of a batch that are sent as they are, and what came of the others, as one batch."""
    half = len(batch) // 2
    combined = []
    for rows in (batch.slice(0, half), batch.slice(half)):
        found = combiner.combine(rows)
        if found is None:
            yield rows, False
        else:
            combined.append(found)
    if combined:
        yield pa.concat_batches(combined), True
