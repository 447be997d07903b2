"""One operator of a chain, in one subtask: its hooks, timers, states, and what it emits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from stateformat.errors import ErrorKind, InvalidState
from stateformat.model import Handle, Kind
from stateformat.snapshot import SnapshotWriter

from ...state import SubtaskStates, TimerSet
from ..api import Operator, OperatorContext, Prepared, TwoPhaseCommitSink
from ..casting import columns_text
from ..events import MAX_WATERMARK, MIN_WATERMARK
from ..graph import COMMITTABLES, PROGRESS, Job
from .committables import Committables
from .errors import Guard
from .gathered_batches import GatheredBatches

if TYPE_CHECKING:
    from stateformat.reading import ReadTask
TIMER_ROUNDS_MAX: Final = 1000
"""Most rounds of timers that set timers already due. Rounds that advance time do not count."""

_END: Final = object()
_PASSES: Final = {"watermark": "end", "processing_time_us": "go on"}
_COLUMNS: Final = pa.schema([("_edge", pa.string()), ("_watermark", pa.int64()), ("_ended", pa.bool_())])

InputProgress = tuple[str, int, bool]
"""An edge, its watermark (µs), and whether it has ended."""


class ReportedProgress(NamedTuple):
    """The progress of an operator's inputs in its last snapshot, and where that was written."""

    progress: tuple[InputProgress, ...]
    handle: Handle


class Emitter:
    """Passes on the batches of one source or operator: to inner operators, and into edges."""

    def __init__(self, uid: str, schema: pa.Schema) -> None:
        self.targets: list[Callable[[pa.RecordBatch], None]] = []
        """The outgoing edges, in the order of the graph's edges."""
        self.ended = False
        self._uid = uid
        self._schema = schema

    def emit(self, batch: pa.RecordBatch) -> None:
        """Pass a batch on, unless it is empty.

        Raises ``InvalidState``, the operator's fault, for anything but a batch of the declared
        schema, and for rows after ``finish``.
        """
        if not isinstance(batch, pa.RecordBatch):
            raise InvalidState(f"{self._uid!r} emitted {type(batch).__name__}; it emits record batches")
        if not batch.num_rows:
            return
        if self.ended:
            raise InvalidState(
                f"operator {self._uid!r} emitted {batch.num_rows} rows after finish. Emit what is left in finish.",
                kind=ErrorKind.STATUS_CONTRADICTION,
            )
        if not batch.schema.equals(self._schema):
            batch = self._with_declared_nulls(batch)
        for target in self.targets:
            target(batch)

    def _with_declared_nulls(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        # Often only the declaration says whether a column may be null.
        schema = batch.schema
        if (schema.names, schema.types) != (self._schema.names, self._schema.types):
            raise InvalidState(
                f"{self._uid!r} emitted columns {columns_text(schema)}; it declares {columns_text(self._schema)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
            )
        for item, column in zip(self._schema, batch.columns, strict=True):
            if column.null_count and not item.nullable:
                raise InvalidState(
                    f"{self._uid!r} emitted {column.null_count} nulls in column {item.name!r}, which it declares "
                    "without nulls. Fill them, or declare it nullable.",
                    kind=ErrorKind.NULL_NOT_ALLOWED,
                )
        return pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)


class ChainedOperator:
    """An operator's copy in one subtask, with its watermark and states.

    ``send`` sends to its coordinator; ``processing_time`` returns the wall-clock time. ``states``:
    those that are already restored.
    """

    def __init__(
        self,
        job: Job,
        uid: str,
        subtask: int,
        send: Callable[[str, bytes], None],
        processing_time: Callable[[], int],
        states: SubtaskStates | None = None,
        *,
        gathers: bool = False,
    ) -> None:
        prototype = job.logic(uid)
        assert isinstance(prototype, Operator)
        operator = job.graph.operator(uid)
        self.uid = uid
        self.logic: Operator = copy.copy(prototype)
        self.emitter = Emitter(uid, job.step(uid).schema)
        self.states = states or SubtaskStates(operator, subtask, job.states_of(uid))
        self._restores = states is None
        self._inputs = job.graph.inputs(uid)
        self.context = OperatorContext(operator, subtask, self.states, send, MIN_WATERMARK, processing_time)
        self._guard = Guard(uid, subtask)
        timers = [(state, self.states.timers(state.name)) for state in job.states_of(uid) if state.kind is Kind.TIMERS]
        self._timers = [(state.name, kept) for state, kept in timers if state.clock == "event_time"]
        self._wall_timers = [(state.name, kept) for state, kept in timers if state.clock == "processing_time"]
        self.reported: ReportedProgress | None = None
        self._gathered = GatheredBatches(self.logic.gathered_bytes if gathers else 0)
        self._committables: Committables | None = None
        if isinstance(self.logic, TwoPhaseCommitSink):
            self._committables = Committables(uid, self.logic.committable_columns)

    def open(
        self, tasks: Mapping[str, ReadTask], logic: Operator | None = None, reported: ReportedProgress | None = None
    ) -> None:
        """Restore states, and open the operator.

        ``logic``: an operator that was opened elsewhere in the same run and continues here.
        ``reported``: the progress that it wrote last.
        """
        self.context.restored = bool(tasks)
        self.reported = reported
        if self._restores:
            self.states.restore(tasks)
        self.states.own_keys([edge.key_columns for edge in self._inputs if edge.key_columns])
        if reported is not None:
            self.context.watermark = self._restored_watermark(reported.progress)
        elif PROGRESS in tasks:
            rows = tasks[PROGRESS].table()
            columns = [rows[name].to_pylist() for name in _COLUMNS.names]
            self.context.watermark = self._restored_watermark(zip(*columns, strict=True))
        if logic is None:
            self._call("open", self.context)
        else:
            self.logic = logic

    def _tell_time(self) -> None:
        """Set the time of states whose rows expire."""
        if self.states.expire:
            # MAX_WATERMARK is not a real time: what timers and ``finish`` read must not expire.
            watermark = self.context.watermark
            event_time_us = None if watermark == MAX_WATERMARK else watermark
            self.states.advance(event_time_us=event_time_us, processing_time_us=self.context.processing_time_us)

    def _restored_watermark(self, progress: Iterable[InputProgress]) -> int:
        # After rescaling there is a row for each old subtask: the lowest watermark counts.
        found: dict[str, int] = {}
        for edge, watermark, _ in progress:
            found[edge] = min(found.get(edge, watermark), watermark)
        # The progress of a loop head that holds back the end of time does not contain it
        # (``Task.progress``).
        return min(found.get(edge.id, MIN_WATERMARK) for edge in self._inputs)

    # What comes in --------------------------------------------------------------------------------

    def process(self, batch: pa.RecordBatch, input: int = 0, *, combined: bool = False) -> None:
        """Process a batch, or hold it back to process it with others."""
        if combined:
            self.flush()
            self._run("process_combined", batch, input)
            return
        for joined, of_input in self._gathered.add(batch, input):
            self._run("process", joined, of_input)

    def flush(self) -> None:
        """Process what is held back."""
        for joined, of_input in self._gathered.flush():
            self._run("process", joined, of_input)

    def receive(self, message: bytes) -> None:
        """Pass it a message from its coordinator."""
        self.flush()
        self._run("receive", message)

    def end_input(self, input: int) -> None:
        """End an input."""
        self.flush()
        self._run("end_input", input)

    def finish(self) -> None:
        """Finish; it may emit nothing afterwards."""
        self.flush()
        self._deliver("finish", self._call("finish"))
        self.emitter.ended = True

    def advance_watermark(self, timestamp: int) -> None:
        """Advance event time, never back: fire timers that are due, and those that these set."""
        self.flush()
        self.context.watermark = max(self.context.watermark, timestamp)
        self._tell_time()
        self._fire()

    @property
    def is_timed(self) -> bool:
        """Whether it may have timers of processing time."""
        return bool(self._wall_timers)

    def next_timer_us(self, *, exactly: bool = False) -> int:
        """When the first timer of processing time is due; ``MAX_WATERMARK`` if there is none.

        Without ``exactly`` it is a lower bound, which costs nothing.
        """
        found = [timers.next_timestamp() if exactly else timers.not_before for _, timers in self._wall_timers]
        return min((time for time in found if time is not None), default=MAX_WATERMARK)

    def fire_timers(self) -> None:
        """Fire the timers of processing time that are due, and those that these set."""
        self.flush()
        if self._wall_timers and not self.emitter.ended:
            self._fire_until(self._wall_timers, self.context.processing_time_us, "processing_time_us")
            self._fire_at_end()

    def _run(self, hook: str, *arguments: Any) -> None:
        self._deliver(hook, self._call(hook, *arguments))
        self._fire_at_end()

    def _fire_at_end(self) -> None:
        if self.context.watermark == MAX_WATERMARK and not self.emitter.ended:
            # No watermark follows the end of time, so a timer set now would never fire.
            self._fire()

    def _fire(self) -> None:
        self._fire_until(self._timers, self.context.watermark, "watermark")

    def _fire_until(self, of_clock: Sequence[tuple[str, TimerSet]], now: int, clock: str) -> None:
        rounds, earliest = 0, MIN_WATERMARK - 1
        while of_clock:
            first = None
            for name, timers in of_clock:
                batch = timers.due(now)
                if batch is not None:
                    time = batch.column("_timestamp")[0].as_py()
                    first = time if first is None else min(first, time)
                    self._deliver("on_timer", self._call("on_timer", batch, name))
            if first is None:
                return
            rounds = 1 if first > earliest and now != MAX_WATERMARK else rounds + 1
            earliest = max(first, earliest)
            if rounds > TIMER_ROUNDS_MAX:
                raise InvalidState(
                    f"timers of operator {self.uid!r} have set timers that were due for {TIMER_ROUNDS_MAX} rounds, at "
                    f"{clock} {now}. A timer that keeps setting itself never lets time {_PASSES[clock]}: stop at "
                    f"context.{clock}.",
                    kind=ErrorKind.LIMIT_EXCEEDED,
                    operator=self.uid,
                )

    def _call(self, hook: str, *arguments: Any) -> Any:
        self._tell_time()
        with self._guard(hook):
            return getattr(self.logic, hook)(*arguments)

    def _deliver(self, hook: str, output: Any) -> None:
        """Pass on what a hook returned, each batch before the next one is requested."""
        if output is None:
            return
        if isinstance(output, pa.RecordBatch):
            self.emitter.emit(output)
            return
        if not isinstance(output, Iterable) or isinstance(output, pa.Table | str | bytes):
            raise InvalidState(
                f"{hook} of operator {self.uid!r} returned {type(output).__name__}; hooks return None, a record batch, "
                "or an iterable of record batches (table.to_batches() makes some)"
            )
        with self._guard(hook):
            batches = iter(output)
        while True:
            with self._guard(hook):
                batch = next(batches, _END)
            if batch is _END:
                return
            self.emitter.emit(batch)

    # Snapshots ------------------------------------------------------------------------------------

    def snapshot(
        self, writer: SnapshotWriter, number: int, prepared: Prepared, progress: tuple[InputProgress, ...] | None
    ) -> None:
        """Write its states; if its logic has ended (``progress`` None), committables only."""
        if progress is not None:
            self._call("snapshot")
        if self._committables is not None:
            self._committables.add(number, prepared, self._call("prepare_commit", prepared))
            rows = self._committables.rows()
            if rows is None:
                writer.empty(COMMITTABLES)
            else:
                writer.write(COMMITTABLES, rows)
        if progress is not None:
            self.states.snapshot(writer)
            self._write_progress(writer, progress)

    def _write_progress(self, writer: SnapshotWriter, progress: tuple[InputProgress, ...]) -> None:
        """Write the progress of its inputs, or repeat the last handle if it is unchanged."""
        if self.reported is not None and self.reported.progress == progress:
            writer.repeat(self.reported.handle)
            return
        columns = zip(*progress, strict=True)
        rows = [pa.array(column, field.type) for column, field in zip(columns, _COLUMNS, strict=True)]
        self.reported = ReportedProgress(progress, writer.write(PROGRESS, pa.table(rows, schema=_COLUMNS)))

    def complete(self, number: int, *, newest: bool) -> None:
        """Note that a barrier's snapshot, maybe the ``newest``, is published and committed."""
        if self._committables is not None:
            self._committables.complete(number)
        if newest:
            self._call("checkpoint_complete")

    def abort(self, checkpoint_id: int) -> None:
        """Note that a snapshot's checkpoint will not be published."""
        self._call("checkpoint_aborted", checkpoint_id)

    def hand_over(self) -> None:
        """Forget what its sink has prepared: the caller makes it part of the next checkpoint."""
        if self._committables is not None:
            self._committables.clear()

    def close(self) -> None:
        """Close the operator, so that it releases what it holds."""
        self._call("close")
