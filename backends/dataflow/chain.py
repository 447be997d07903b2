"""One chain of operators in one subtask; executors use it to carry out the commands of a task.

An :class:`OperatorChain` serves one subtask from ``open`` to ``close``. It decides nothing and
opens nothing: it reads states through the tasks of a restore plan, writes them through the context
of a checkpoint, and sends what leaves the chain to a :class:`ChainOutput`. Within the chain, a
batch is passed on by a call: the next operators process what one emits before it is asked for more.
So between two calls the chain holds nothing half-processed, and a snapshot shows one moment.

Time and ends go down the chain: an operator fires its timers, and ends, before those after it do.

In-flight records are logged into a snapshot, and restored from one. A snapshot has one in-flight
state per edge whose records may become part of it. The logged records of a channel are numbered
(``_seq``), so they can be restored in that order at any parallelism (SPEC.md section 5.1).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput, InvalidState
from stateformat.graph import Edge
from stateformat.snapshot import Snapshot, SnapshotWriter
from stateformat.tables import BATCH_BYTES, cut, take_table

from ..state import SubtaskStates
from . import events as ev
from .api import NoSplit, Operator, Prepared, Source, Split
from .chained_operator import ChainedOperator, Emitter, InputProgress, ReportedProgress
from .compile import Job, Vertex
from .events import Channel
from .graph import ENUMERATOR_LOG, SPLITS, in_flight_name
from .source_reader import ReadResult, SourceReader

if TYPE_CHECKING:
    from stateformat.reading import ReadTask
    from stateformat.snapshot import SnapshotWriter, WriteContext


BATCH_ROWS: Final = 65_536
_ORDER: Final = ("_sender", "_receiver", "_seq")


class OpenSnapshot:
    """The snapshot of one task: its states are written, but in-flight records may still come.

    ``writers`` are those of the chain's operators, in order; ``logged`` the edges that have an
    in-flight state, none if the task is finishing. It may be dropped without :meth:`close`.
    """

    def __init__(self, writers: Sequence[SnapshotWriter], logged: Sequence[Edge]) -> None:
        self._writers = writers
        self._logs = {edge.id: InFlightLog() for edge in logged}

    def log(self, channel: Channel, batch: pa.RecordBatch) -> None:
        """Log a batch of a channel. Raises ``InvalidState`` for an edge without in-flight state."""
        log = self._logs.get(channel.edge)
        if log is None:
            raise InvalidState(
                f"records of edge {channel.edge!r} cannot become part of this snapshot; those of "
                f"{sorted(self._logs) or 'no edge'} may",
                kind=ErrorKind.STATE_NOT_ALLOWED,
            )
        log.add(channel, batch)

    def close(self) -> list[Snapshot]:
        """Write what was logged; return one snapshot per operator of the chain. Call it once."""
        for edge_id, log in self._logs.items():
            rows = log.rows()
            if rows is None:
                self._writers[0].empty(in_flight_name(edge_id))
            else:
                self._writers[0].write(in_flight_name(edge_id), rows)
        return [writer.snapshot() for writer in self._writers]


class InFlightLog:
    """The records logged from the channels of one edge into one subtask, for one snapshot."""

    def __init__(self) -> None:
        self._batches: list[pa.RecordBatch] = []
        self._next: dict[Channel, int] = defaultdict(int)

    def add(self, channel: Channel, batch: pa.RecordBatch) -> None:
        """Append a batch to what was logged of this channel."""
        rows = batch.num_rows
        if not rows:
            return
        first = self._next[channel]
        self._next[channel] = first + rows
        own = [
            pa.repeat(pa.scalar(channel.sender, pa.int32()), rows),
            pa.repeat(pa.scalar(channel.receiver, pa.int32()), rows),
            pa.array(np.arange(first, first + rows)),
        ]
        self._batches.append(pa.RecordBatch.from_arrays([*own, *batch.columns], names=[*_ORDER, *batch.schema.names]))

    def rows(self) -> pa.Table | None:
        """``_sender``, ``_receiver``, ``_seq``, then the edge's columns; None if empty."""
        return pa.Table.from_batches(self._batches) if self._batches else None


def in_flight_batches(task: ReadTask, edge_schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the records of an edge that a new subtask gets, each channel in the order sent.

    Columns that the edge did not have when they were logged are null. Raises ``InvalidState`` if
    its columns have other types now. All of the records are in memory at once.
    """
    table = task.table()
    order = [table[name].to_numpy() for name in _ORDER]
    if not _ascends(order):
        table = take_table(table, np.lexsort(order[::-1]))
    for batch in _cast_to_edge(table, edge_schema, str(task.state.edge)).to_batches():
        if batch.num_rows:
            yield from cut(batch, BATCH_ROWS, BATCH_BYTES)


def _ascends(columns: list[np.ndarray]) -> bool:
    undecided = np.ones(max(0, len(columns[0]) - 1), np.bool_)
    for column in columns:
        if (undecided & (column[1:] < column[:-1])).any():
            return False
        undecided &= column[1:] == column[:-1]
    return True


def _cast_to_edge(table: pa.Table, schema: pa.Schema, edge: str) -> pa.Table:
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    try:
        return pa.table(columns, names=schema.names).cast(schema)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidState(
            f"records in flight on edge {edge!r} cannot become what the edge has now: {error}. Take an aligned "
            "checkpoint before its columns change, so that they arrive.",
            kind=ErrorKind.SCHEMA_MISMATCH,
        ) from error


class ChainOutput(Protocol):
    """What a chain calls on its executor."""

    def emit(self, edge_id: str, batch: pa.RecordBatch) -> None:
        """Send a batch, not empty, in the schema of the edge, along an edge out of the chain."""

    def send(self, uid: str, message: bytes) -> None:
        """Send to an operator's coordinator."""

    def now_us(self) -> int:
        """Return the executor's clock, µs."""

    def processing_time_us(self) -> int:
        """Return ``OperatorContext.processing_time_us`` of the current step or epoch."""


class OperatorChain:
    """The operators of one vertex in one subtask. Not thread-safe.

    ``states``: those of operators that are already restored. ``gathers``: batches may wait for
    others until :meth:`flush`, which the executor calls before a snapshot.

    Errors of user code are raised as ``OperatorError`` with their cause. An operator that breaks
    the rules of ``Operator`` (columns other than declared, rows after ``finish``, timers without
    end) raises ``InvalidState`` with its name. Either way the chain is lost: close it, and begin
    another from a checkpoint.
    """

    def __init__(
        self,
        job: Job,
        vertex: Vertex,
        subtask: int,
        output: ChainOutput,
        states: Mapping[str, SubtaskStates] | None = None,
        *,
        gathers: bool = False,
    ) -> None:
        self._job = job
        self._vertex = vertex
        self._subtask = subtask
        self._taken: set[int] = set()
        self._asked: dict[int, int] = {}
        """Barriers whose outcome is unknown, and their checkpoint ids; failed snapshots too."""
        uids = vertex.operators[1:] if vertex.is_source else vertex.operators
        states = states or {}
        self.operators: Mapping[str, ChainedOperator] = {
            uid: ChainedOperator(
                job, uid, subtask, output.send, output.processing_time_us, states.get(uid), gathers=gathers
            )
            for uid in uids
        }
        """The operators by uid, in the order of the chain, without a source."""
        self._is_timed = any(operator.is_timed for operator in self.operators.values())
        self._reader: SourceReader | None = None
        self._head: ChainedOperator | None = None
        emitters = {uid: operator.emitter for uid, operator in self.operators.items()}
        if vertex.is_source:
            emitters[vertex.id] = Emitter(vertex.id, job.step(vertex.id).schema)
            self._reader = self._make_reader(emitters[vertex.id], output)
        else:
            self._head = self.operators[vertex.id]
        self._input_of = {edge.id: edge.input for edge in (*vertex.inputs, *vertex.feedback)}
        leaving = {edge.id for edge in vertex.outputs}
        for edge in job.graph.edges:
            if edge.id in leaving:
                emitters[edge.source].targets.append(partial(output.emit, edge.id))
            elif edge.source in emitters:
                emitters[edge.source].targets.append(self.operators[edge.target].process)

    def _make_reader(self, emitter: Emitter, output: ChainOutput) -> SourceReader:
        step, source = self._job.step(self._vertex.id), copy.copy(self._job.logic(self._vertex.id))
        assert isinstance(source, Source)
        return SourceReader(
            step.uid,
            source,
            step.event_time,
            self._subtask,
            output.now_us,
            emitter.emit,
            idle_after_us=step.idle_after,
            processing_time=output.processing_time_us,
        )

    @property
    def states(self) -> Mapping[str, SubtaskStates]:
        """The states of the operators, by uid; a source keeps none."""
        return {uid: operator.states for uid, operator in self.operators.items()}

    @property
    def _first(self) -> ChainedOperator:
        if self._head is None:
            raise InvalidInput(f"vertex {self._vertex.id!r} begins with a source, which has no inputs")
        return self._head

    @property
    def _source(self) -> SourceReader:
        if self._reader is None:
            raise InvalidInput(f"vertex {self._vertex.id!r} begins with an operator and reads no source")
        return self._reader

    @property
    def late_records(self) -> int:
        """How many records its operators have counted as late and dropped."""
        return sum(operator.logic.late_records for operator in self.operators.values())

    def open(
        self,
        restored: Mapping[str, Mapping[str, ReadTask]] | None,
        *,
        taken: int | None = None,
        taken_id: int = 0,
        going_on: Mapping[str, Operator] | None = None,
        reported: Mapping[str, ReportedProgress] | None = None,
    ) -> None:
        """Restore states and begin.

        ``restored``: what ``Checkpoint.restore`` returns, by uid and state; None on a first run. An
        operator that is missing is new.

        The others are for a chain that continues within a run, from the snapshot of barrier
        ``taken``, for the checkpoint ``taken_id``: operators that were opened before, and the
        progress that they wrote.
        """
        if taken is not None:
            self._taken.add(taken)
            self._asked[taken] = taken_id
        restored = restored or {}
        splits = restored.get(self._vertex.id, {}).get(SPLITS)
        if self._reader is not None:
            self._reader.open()
            if splits is not None:
                self._reader.restore(splits.table())
        for uid, operator in self.operators.items():
            operator.open(restored.get(uid, {}), (going_on or {}).get(uid), (reported or {}).get(uid))

    # Data, time, ends -----------------------------------------------------------------------------

    def process(self, edge_id: str, batch: pa.RecordBatch, *, combined: bool = False) -> None:
        """Process a batch, or combined rows, of an edge into the chain (maybe a feedback edge)."""
        self._first.process(batch, self._input_of[edge_id], combined=combined)

    def flush(self) -> None:
        """Process what operators have held back, so that nothing is left inside the chain."""
        for operator in self.operators.values():
            operator.flush()

    def advance_watermark(self, timestamp: int, *, ending: bool = False) -> None:
        """Fire the timers up to ``timestamp`` (µs), operator by operator.

        If the logic is ``ending``, fire only the first operator's; :meth:`finish` fires the others.
        """
        for operator in self.operators.values():
            if not ending or operator is self._head:
                operator.advance_watermark(timestamp)

    @property
    def is_timed(self) -> bool:
        """Whether it may have timers of processing time."""
        return self._is_timed

    def next_timer_us(self, *, exactly: bool = False) -> int:
        """When the first timer of processing time is due; ``MAX_WATERMARK`` if there is none.

        Without ``exactly`` it is a lower bound, which costs nothing.
        """
        due = (operator.next_timer_us(exactly=exactly) for operator in self.operators.values())
        return min(due, default=ev.MAX_WATERMARK)

    @property
    def wakes_at_us(self) -> int | None:
        """The processing time at which a timer is due or the reader becomes idle; None: neither."""
        due_us = self.next_timer_us(exactly=True) if self._is_timed else ev.MAX_WATERMARK
        idle_at_us = None if self._reader is None else self._reader.idle_at_us
        found = min(due_us, ev.MAX_WATERMARK if idle_at_us is None else idle_at_us)
        return None if found == ev.MAX_WATERMARK else found

    def fire_timers(self) -> None:
        """Fire the timers of processing time that are due, operator by operator."""
        for operator in self.operators.values():
            operator.fire_timers()

    def end_input(self, input: int) -> None:
        """End an input of the first operator."""
        self._first.end_input(input)

    def finish(self) -> None:
        """End every operator, first to last.

        Time and input of an inner operator end when the one before it has finished, so what is
        emitted at an end is never late.
        """
        for operator in self.operators.values():
            if operator is not self._head:
                operator.advance_watermark(ev.MAX_WATERMARK)
                operator.end_input(0)
            operator.finish()

    def receive(self, uid: str, message: bytes) -> None:
        """Give an operator a message from its coordinator."""
        if uid not in self.operators:
            raise InvalidInput(
                f"vertex {self._vertex.id!r} runs no operator {uid!r} that takes messages; it runs "
                f"{', '.join(self.operators) or 'none'}",
                kind=ErrorKind.UNKNOWN_OPERATOR,
            )
        self.operators[uid].receive(message)

    # Sources --------------------------------------------------------------------------------------

    def read(self) -> ReadResult:
        """Read one chunk of one split, and process it."""
        return self._source.read()

    @property
    def reader(self) -> SourceReader | None:
        """The reader of a source."""
        return self._reader

    def assign(self, split: Split | NoSplit) -> None:
        """Take the enumerator's answer."""
        self._source.assign(split)

    # Snapshots ------------------------------------------------------------------------------------

    def snapshot(self, command: ev.Snapshot, context: WriteContext) -> OpenSnapshot:
        """Write the states of every operator, as of now.

        If this raises, the chain is as before: what sinks have prepared becomes part of the next
        snapshot.
        """
        number, finishing = command.barrier.number, command.finishing
        prepared = Prepared(context.checkpoint_id, context.attempt_id)
        self._asked[number] = context.checkpoint_id
        writers = {uid: context.subtask(uid, self._subtask, finishing=finishing) for uid in self._vertex.operators}
        if self._reader is not None and not finishing:
            self._write_splits(self._reader, writers[self._vertex.id])
        for uid, operator in self.operators.items():
            progress = None if finishing else self._progress(operator, command)
            operator.snapshot(writers[uid], number, prepared, progress)
        self._taken.add(number)
        edges = () if finishing else (*self._vertex.inputs, *self._vertex.feedback)
        return OpenSnapshot(list(writers.values()), [edge for edge in edges if self._job.logged(edge)])

    def _write_splits(self, reader: SourceReader, writer: SnapshotWriter) -> None:
        rows = reader.rows()
        if rows.num_rows:
            writer.write(SPLITS, rows)
        else:
            writer.empty(SPLITS)
        if self._job.state(self._vertex.id, ENUMERATOR_LOG) is not None:
            writer.empty(ENUMERATOR_LOG)  # The driver adds the rows.

    def _progress(self, operator: ChainedOperator, command: ev.Snapshot) -> tuple[InputProgress, ...]:
        """Return the progress of each input; an inner operator's ends with the chain's."""
        if operator is self._head:
            return tuple(
                (edge.id, command.watermarks.get(edge.id, ev.MIN_WATERMARK), command.ended.get(edge.id, False))
                for edge in self._vertex.inputs
            )
        # A source that has ended takes no snapshot but a finishing one.
        ended = self._head is not None and all(command.ended.get(edge.id, False) for edge in self._vertex.inputs)
        return tuple((edge.id, operator.context.watermark, ended) for edge in self._job.graph.inputs(operator.uid))

    def notify_complete(self, number: int) -> None:
        """Note that a barrier's checkpoint is published and committed, if it had a snapshot."""
        if number not in self._taken:
            return
        newest = number == max(self._taken)
        self._forget(number)
        for operator in self.operators.values():
            operator.complete(number, newest=newest)

    def notify_aborted(self, number: int) -> None:
        """Note that the checkpoints of barriers up to this one will never exist."""
        void = [checkpoint_id for asked, checkpoint_id in sorted(self._asked.items()) if asked <= number]
        self._forget(number)
        for checkpoint_id in void:
            for operator in self.operators.values():
                operator.abort(checkpoint_id)

    def _forget(self, number: int) -> None:
        self._taken = {taken for taken in self._taken if taken > number}
        self._asked = {asked: checkpoint_id for asked, checkpoint_id in self._asked.items() if asked > number}

    def hand_over(self) -> None:
        """Forget what sinks have prepared: the caller makes it part of the next checkpoint."""
        for operator in self.operators.values():
            operator.hand_over()

    def close(self) -> None:
        """Close the reader and every operator; then raise the first error."""
        closes = [operator.close for operator in self.operators.values()]
        if self._reader is not None:
            closes.insert(0, self._reader.close)
        failures = []
        for close in closes:
            try:
                close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
