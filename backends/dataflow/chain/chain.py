"""One chain of operators, running in one subtask: what every executor carries the commands of a task out with.

Theory of operation. An activation serves one subtask from :meth:`OperatorChain.open` to :meth:`OperatorChain.close`. It decides nothing
and opens nothing: states are read through the tasks of a restore plan and written through the context of a checkpoint, both of
which it is handed, and what leaves the chain goes to ``ChainOutput``. Within the chain a batch is a call: what an operator emits is
processed by the next ones, and so on to the leaves, before the operator is asked for more. So between two calls of an
activation nothing is under way in it, and a snapshot is of one moment.

Time and ends go down the chain in its order: an operator fires its timers, and ends, before the ones behind it do, whose
``end_input`` and ``finish`` follow what it emitted last.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidInput

from ...state import SubtaskStates
from .. import events
from ..api import NoSplit, Operator, Prepared, Source, Split
from ..graph import SPLITS, Job, Vertex
from .chained_operator import ChainedOperator, Emitter, InputProgress, ReportedProgress
from .in_flight import in_flight_batches
from .open_snapshot import OpenSnapshot
from .source_reader import ReadResult, SourceReader

if TYPE_CHECKING:
    from stateformat.reading import ReadTask
    from stateformat.snapshot import SnapshotWriter, WriteContext

    from ...state import SubtaskStates


class ChainOutput(Protocol):
    """What an activation reaches of the executor that it runs in."""

    def emit(self, edge_id: str, batch: pa.RecordBatch) -> None:
        """Send a batch, in the schema of the edge and not empty, along an edge that leaves the chain."""

    def send(self, uid: str, message: bytes) -> None:
        """Send to an operator's coordinator."""

    def now_us(self) -> int:
        """The executor's clock, µs."""


class OperatorChain:
    """The operators of one vertex in one subtask. Not thread-safe. ``states``: those of operators that have been restored already.

    What user code raises comes out as ``OperatorError`` with its cause; an operator that breaks the rules of ``api.Operator``
    (other columns than declared, rows after ``finish``, timers without end) as ``InvalidState`` that names it. Either way the
    activation is lost: close it, and begin another from a checkpoint.
    """

    def __init__(
        self,
        job: Job,
        vertex: Vertex,
        subtask: int,
        outside: ChainOutput,
        states: Mapping[str, SubtaskStates] | None = None,
    ) -> None:
        self._job = job
        self._vertex = vertex
        self._subtask = subtask
        self._taken: set[int] = set()
        self._asked: dict[int, int] = {}
        """Barriers of which the outcome is not known, with the ids of their checkpoints: those in ``_taken``, and of failed snapshots."""
        uids = vertex.operators[1:] if vertex.is_source else vertex.operators
        states = states or {}
        self._operators = {uid: ChainedOperator(job, uid, subtask, outside.send, states.get(uid)) for uid in uids}
        self._reader: SourceReader | None = None
        self._head: ChainedOperator | None = None
        emitters = {uid: member.emitter for uid, member in self._operators.items()}
        if vertex.is_source:
            self._reader = self._make_reader(emitters, outside)
        else:
            self._head = self._operators[vertex.id]
        self._input_of = {edge.id: edge.input for edge in (*vertex.inputs, *vertex.feedback)}
        leaving = {edge.id for edge in vertex.outputs}
        for edge in job.graph.edges:
            if edge.id in leaving:
                emitters[edge.source].targets.append(partial(outside.emit, edge.id))
            elif edge.source in emitters:
                emitters[edge.source].targets.append(self._operators[edge.target].process)

    def _make_reader(self, emitters: dict[str, Emitter], outside: ChainOutput) -> SourceReader:
        uid = self._vertex.id
        step, source = self._job.step(uid), copy.copy(self._job.logic(uid))
        assert isinstance(source, Source)
        emitters[uid] = Emitter(uid, step.schema)
        return SourceReader(uid, source, step.event_time, self._subtask, outside.now_us, emitters[uid].emit)

    @property
    def states(self) -> Mapping[str, SubtaskStates]:
        """By uid the states of the operators; a source keeps none."""
        return {uid: member.states for uid, member in self._operators.items()}

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
    def operators(self) -> Mapping[str, ChainedOperator]:
        """The operators, by uid, in the order of the chain."""
        return self._operators

    @property
    def late_records(self) -> int:
        """How many records its operators have dropped as late, as they count them."""
        return sum(member.logic.late_records for member in self._operators.values())

    def open(
        self,
        restored: Mapping[str, Mapping[str, ReadTask]] | None,
        *,
        taken: int | None = None,
        taken_id: int = 0,
        going_on: Mapping[str, Operator] | None = None,
        reported: Mapping[str, ReportedProgress] | None = None,
    ) -> None:
        """Restore states and begin. ``restored``: by uid and state, what ``Checkpoint.restore`` gives; None on a first run.

        States of the runtime's other parts may be among them. An operator that is missing from it is new. ``taken``: it goes on
        within a run, from the snapshot of this barrier, which an activation before it took for the checkpoint ``taken_id``. ``going_on``: operators that were opened
        in that one; ``reported``: the progress of its inputs that it wrote last, by uid, which is not read then.
        """
        if taken is not None:
            self._taken.add(taken)
            self._asked[taken] = taken_id
        restored = restored or {}
        splits = restored.get(self._vertex.id, {}).get(SPLITS)
        if self._reader is not None and splits is not None:
            self._reader.restore(splits.table())
        for uid, member in self._operators.items():
            member.open(restored.get(uid, {}), (going_on or {}).get(uid), (reported or {}).get(uid))

    # Data, time, ends ----------------------------------------------------------------------------------------------------

    def process(self, edge_id: str, batch: pa.RecordBatch) -> None:
        """Process a batch of an edge into the chain, of feedback too."""
        self._first.process(batch, self._input_of[edge_id])

    def advance_watermark(self, timestamp: int, *, ending: bool = False) -> None:
        """Time has come to ``timestamp`` (µs): fire the timers up to it, operator by operator; of the first one alone where the
        logic is ``ending`` (the others follow in :meth:`finish`).
        """
        for member in self._operators.values():
            if not ending or member is self._head:
                member.advance_watermark(timestamp)

    def end_input(self, input: int) -> None:
        """An input of the first operator has ended."""
        self._first.end_input(input)

    def finish(self) -> None:
        """End every operator, first to last: for an inner one time and its input end when the one before has finished, so nothing
        that is emitted at an end comes too late for anybody.
        """
        for member in self._operators.values():
            if member is not self._head:
                member.advance_watermark(events.MAX_WATERMARK)
                member.end_input(0)
            member.finish()

    def receive(self, uid: str, message: bytes) -> None:
        """Give an operator a message of its coordinator."""
        if uid not in self._operators:
            raise InvalidInput(
                f"vertex {self._vertex.id!r} runs no operator {uid!r} that takes messages; it runs "
                f"{', '.join(self._operators) or 'none'}",
                kind=ErrorKind.UNKNOWN_OPERATOR,
            )
        self._operators[uid].receive(message)

    # Sources -------------------------------------------------------------------------------------------------------------

    def read(self) -> ReadResult:
        """Read one chunk of one split that is held, and let the chain process it."""
        return self._source.read()

    def give(self, split: Split | NoSplit) -> None:
        """Take what the enumerator answered."""
        self._source.give(split)

    # Snapshots -----------------------------------------------------------------------------------------------------------

    def snapshot(self, command: events.Snapshot, context: WriteContext) -> OpenSnapshot:
        """Write the states of every operator, as of now; what is then logged into it, and :meth:`OpenSnapshot.close`, end it.

        Whatever is raised, the activation goes on as it was: what sinks have prepared is part of the next snapshot.
        """
        number, finishing = command.barrier.number, command.finishing
        prepared = Prepared(context.checkpoint_id, context.attempt_id)
        self._asked[number] = context.checkpoint_id
        writers = {uid: context.subtask(uid, self._subtask, finishing=finishing) for uid in self._vertex.operators}
        if self._reader is not None and not finishing:
            self._write_splits(self._reader, writers[self._vertex.id])
        for uid, member in self._operators.items():
            progress = None if finishing else self._progress(member, command)
            member.snapshot(writers[uid], number, prepared, progress)
        self._taken.add(number)
        edges = () if finishing else (*self._vertex.inputs, *self._vertex.feedback)
        return OpenSnapshot(list(writers.values()), [edge for edge in edges if self._job.logged(edge)])

    def _write_splits(self, reader: SourceReader, writer: SnapshotWriter) -> None:
        rows = reader.rows()
        if rows.num_rows:
            writer.write(SPLITS, rows)
        else:
            writer.empty(SPLITS)

    def _progress(self, member: ChainedOperator, command: events.Snapshot) -> tuple[InputProgress, ...]:
        """Per input: how far event time has come, and whether it has ended; for inner members as for the whole chain."""
        if member is self._head:
            return tuple(
                (edge.id, command.watermarks.get(edge.id, events.MIN_WATERMARK), command.ended.get(edge.id, False))
                for edge in self._vertex.inputs
            )
        # A source that has ended takes no snapshot but a finishing one.
        ended = self._head is not None and all(command.ended.get(edge.id, False) for edge in self._vertex.inputs)
        return tuple((edge.id, member.watermark, ended) for edge in self._job.graph.inputs(member.uid))

    def notify_complete(self, number: int) -> None:
        """The checkpoint of a barrier is published and its sinks have committed. Nothing for a barrier without a snapshot."""
        if number not in self._taken:
            return
        newest = number == max(self._taken)
        self._forget(number)
        for member in self._operators.values():
            member.complete(number, newest=newest)

    def notify_aborted(self, number: int) -> None:
        """The checkpoints of barriers up to this one will never be. What sinks prepared for them waits for the next."""
        void = [checkpoint_id for asked, checkpoint_id in sorted(self._asked.items()) if asked <= number]
        self._forget(number)
        for checkpoint_id in void:
            for member in self._operators.values():
                member.abort(checkpoint_id)

    def _forget(self, number: int) -> None:
        self._taken = {taken for taken in self._taken if taken > number}
        self._asked = {asked: checkpoint_id for asked, checkpoint_id in self._asked.items() if asked > number}

    def hand_over(self) -> None:
        """What sinks have prepared is the caller's from here on: it makes it part of the next checkpoint that is published."""
        for member in self._operators.values():
            member.hand_over()

    def close(self) -> None:
        """Release what operators and readers hold, of all of them; raises the first failure."""
        closes = [member.close for member in self._operators.values()]
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


__all__ = ["ChainOutput", "OpenSnapshot", "OperatorChain", "ReadResult", "in_flight_batches"]
