"""One operator of a chain, in one subtask: its hooks, timers, states, and what it emits.

What user code raises is told with the place where it was raised. Small batches wait to be processed
as one, and rows may be combined before they are sent.

A snapshot of a two-phase-commit sink holds all committables that it has prepared and may not be
committed, each row with the checkpoint and attempt it was prepared for. So a published checkpoint
also carries what was prepared for checkpoints that were never published.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from stateformat.errors import CheckpointError, ErrorKind, InvalidState, OutcomeUnknown, StorageError
from stateformat.graph import Edge
from stateformat.model import Handle, Kind
from stateformat.snapshot import SnapshotWriter
from stateformat.states import Columns, as_schema
from stateformat.storage import REFUSALS

from ..state import SubtaskStates, TimerSet
from .api import Operator, OperatorContext, Prepared, TwoPhaseCommitSink
from .casting import cast_to_schema, columns_text
from .compile import Job
from .events import MAX_WATERMARK, MIN_WATERMARK
from .graph import COMMITTABLES, PROGRESS

if TYPE_CHECKING:
    from stateformat.reading import ReadTask


class OperatorError(CheckpointError):
    """A hook of an operator or source raised; ``__cause__`` is what it raised.

    The fault is in the user's code, or in what it met. An executor makes it a failure of the task.
    ``details`` has ``operator``, ``subtask`` (None: in the driver) and ``hook``.
    """

    default_kind = ErrorKind.OPERATOR_FAILED

    @classmethod
    def of(cls, error: BaseException, *, operator: str, subtask: int | None, hook: str) -> OperatorError:
        """Return the error of a hook. Raise it ``from`` what the hook raised."""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        place = "" if subtask is None else f", subtask {subtask},"
        message = f"{hook} of {operator!r}{place} failed: {said}"
        return cls(message, operator=operator, subtask=subtask, hook=hook)

    @property
    def operator(self) -> str:
        """The uid of the operator or source."""
        return str(self.details["operator"])

    @property
    def hook(self) -> str:
        """The name of the method that raised."""
        return str(self.details["hook"])


class Guard:
    """Turns what user code raises in a ``with`` into :class:`OperatorError`. Not thread-safe."""

    def __init__(self, operator: str, subtask: int | None) -> None:
        self._operator = operator
        self._subtask = subtask
        self._hook = ""

    def __call__(self, hook: str) -> Guard:
        """Guard a call of this hook."""
        self._hook = hook
        return self

    def __enter__(self) -> None:
        """Do nothing: no preparation is needed."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise the error with its place."""
        if isinstance(error, Exception):
            raise OperatorError.of(error, operator=self._operator, subtask=self._subtask, hook=self._hook) from error


class FailsAgain(CheckpointError):
    """Something failed and would fail again: another try cannot help."""

    default_kind = ErrorKind.OPERATOR_FAILED


_OF_PICKLES: Final = frozenset({"PicklingError", "UnpicklingError"})
_OF_FILES: Final = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_OF_DATABASES: Final = frozenset({"OperationalError", "InterfaceError"})
"""What database drivers raise for a lost connection (PEP 249)."""
_OUTSIDE: Final = frozenset({"commit", "clean"})
"""Hooks that talk to another system, whose errors may be of any type."""
_OF_CODE: Final = (TypeError, AttributeError, NameError, AssertionError, LookupError, ArithmeticError)
"""What a fault in the code raises. Errors of a storage or database are never among these."""
_CHAIN_MAX: Final = 16


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was raised from, and so on."""
    found: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def is_for_good(error: BaseException) -> bool:
    """Return whether trying again cannot help.

    Something cannot be imported or pickled, or a storage refuses: there is no permission, no
    bucket, no such request.
    """
    return any(
        isinstance(one, FailsAgain | ImportError) or _is_named(one, _OF_PICKLES) or _is_refusal(one)
        for one in chain_of(error)
    )


def may_pass(error: BaseException) -> bool:
    """Return whether another try may help.

    The cause was the storage, the network, memory, or a sink's system.
    """
    raised = next((one for one in chain_of(error) if not isinstance(one, OperatorError)), error)
    if isinstance(raised, (*_OF_CODE, *_OF_FILES)) and not isinstance(raised, CheckpointError):
        return False
    return any(
        isinstance(one, StorageError | OutcomeUnknown | MemoryError)
        or (isinstance(one, OSError) and not isinstance(one, _OF_FILES))
        or (isinstance(one, OperatorError) and one.hook in _OUTSIDE)
        or _is_named(one, _OF_DATABASES)
        for one in chain_of(error)
    )


def _is_refusal(error: BaseException) -> bool:
    # A full disk may have room later.
    full = isinstance(error.__cause__, OSError) and error.__cause__.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, StorageError) and error.kind in REFUSALS and not full


def _is_named(error: BaseException, names: frozenset[str]) -> bool:
    return any(base.__name__ in names for base in type(error).__mro__)


def signature(error: BaseException) -> tuple[str, ...]:
    """Return the operator, and the type and message of what it raised: equal for equal failures."""
    operator = next((one.operator for one in chain_of(error) if isinstance(one, OperatorError)), "")
    raised = [one for one in chain_of(error) if not isinstance(one, OperatorError)]
    one = raised[0] if raised else error
    return (operator, f"{type(one).__module__}.{type(one).__qualname__}", str(one))


class GatheredBatches:
    """Batches of one input, up to ``limit_bytes``; with 0 each is passed on as it comes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._input = 0

    def add(self, batch: pa.RecordBatch, input: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Take a batch; yield what to process now, with its input, in order."""
        if not self._limit_bytes:
            yield batch, input
            return
        size_bytes = batch.nbytes
        if self._held and (input != self._input or self._held_bytes + size_bytes > self._limit_bytes):
            yield from self.flush()
        self._held.append(batch)
        self._held_bytes += size_bytes
        self._input = input

    def flush(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield what is held as one batch, if anything is."""
        held, self._held, self._held_bytes = self._held, [], 0
        if held:
            yield held[0] if len(held) == 1 else pa.concat_batches(held), self._input


class Combiner:
    """The sending end of an edge whose rows may be combined.

    ``schema``: that of combined rows.
    """

    def __init__(self, logic: Operator, edge: Edge, schema: pa.Schema) -> None:
        self.schema = schema
        self._logic = logic
        self._edge = edge
        self._guard = Guard(edge.target, None)

    def combine(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the rows of a batch, combined; None if it is better to send them as they are."""
        with self._guard("combine"):
            combined = self._logic.combine(batch, self._edge.input)
        if combined is not None and not combined.schema.equals(self.schema):
            raise InvalidState(
                f"operator {self._edge.target!r} combined rows into columns {columns_text(combined.schema)}; it "
                f"declares {columns_text(self.schema)}",
                kind=ErrorKind.SCHEMA_MISMATCH,
                operator=self._edge.target,
            )
        return combined


def combiners_of(job: Job, edges: Iterable[Edge]) -> dict[str, Combiner]:
    """Return the combiners of edges whose rows may be combined, by edge id."""
    found = {}
    for edge in edges:
        logic, schema = job.logic(edge.target), job.combined_schema(edge)
        if isinstance(logic, Operator) and schema is not None:
            found[edge.id] = Combiner(logic, edge, schema)
    return found


class Committables:
    """The outstanding committables of one subtask of a sink, oldest first."""

    def __init__(self, uid: str, columns: Columns) -> None:
        self._uid = uid
        self._schema = as_schema(columns)
        self._outstanding: list[tuple[int, pa.Table]] = []

    def add(self, number: int, prepared: Prepared, rows: pa.Table | pa.RecordBatch | None) -> None:
        """Keep what ``prepare_commit`` returned in the snapshot of a barrier.

        Raises ``InvalidState`` for columns that are not declared.
        """
        if rows is None:
            return
        table = cast_to_schema(f"prepare_commit of {self._uid!r}", rows, self._schema, declared="committable_columns")
        if table.num_rows:
            ids = pa.repeat(pa.scalar(prepared.checkpoint_id, pa.int64()), table.num_rows)
            attempts = pa.repeat(pa.scalar(prepared.attempt_id, pa.string()), table.num_rows)
            table = table.append_column("_checkpoint_id", ids).append_column("_attempt_id", attempts)
            self._outstanding.append((number, table))

    def rows(self) -> pa.Table | None:
        """Return the declared columns, ``_checkpoint_id`` and ``_attempt_id``; None if empty."""
        tables = [table for _, table in self._outstanding]
        return pa.concat_tables(tables) if tables else None

    def clear(self) -> None:
        """Forget all committables."""
        self._outstanding.clear()

    def complete(self, number: int) -> None:
        """Forget what a barrier's snapshot held: it has been published and committed."""
        self._outstanding = [(when, table) for when, table in self._outstanding if when > number]


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
