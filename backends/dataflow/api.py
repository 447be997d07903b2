"""What authors of operators, sources and sinks write: states, operators, sinks, sources.

An operator declares its states. Columns are given as a ``pa.Schema``, a list of ``pa.field``, or a
mapping name → type. Keyed states are keyed by the columns of the operator's hash edge, in that
order and of those types; names may differ.

When columns change, their values in a checkpoint are handled as docs/dataflow.md says. All but keys
may change. Three arguments say how; they may stay in the program, for each acts only once:

- ``renames``, from old names to new ones;
- ``defaults``, from names of columns to their values, as text (SPEC.md section 3.7), in rows that
  are older than the column;
- ``drops``, the names of columns whose values are given up. Declared again, the column is a new
  one.

Rows of value, map and list state may expire: ``ttl=Ttl(30 * 86_400_000_000)`` lets a row live 30
days of event time after it was last written, entries and elements each for themselves. See
docs/dataflow.md for clocks, for reads that count, and for a ``ttl`` that is new, or goes.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import pyarrow as pa

import stateformat as sf
from stateformat import graph, states as declare
from stateformat.errors import InvalidInput, InvalidState
from stateformat.graph import brief
from stateformat.model import TimerClock
from stateformat.states import Changes, Columns, as_schema

if TYPE_CHECKING:
    from stateformat.publication import CommitPermit

    from ..state import Entries, KeyedList, KeyedMap, KeyedValue, SubtaskStates, TimerSet


Duration: TypeAlias = "int | datetime.timedelta"
"""A number of whole microseconds, or a timedelta."""


def microseconds(what: str, given: Duration) -> int:
    """Return a duration in µs. Raises ``InvalidInput`` for other values, and for less than 1."""
    if isinstance(given, datetime.timedelta):
        given = given // datetime.timedelta(microseconds=1)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise InvalidInput(
            f"{what} is {given!r}. Give whole microseconds, at least 1 (a minute is 60_000_000), or a "
            "datetime.timedelta."
        )
    return given


@dataclass(frozen=True, repr=False)
class Descriptor(ABC):
    """A declared state of an operator.

    ``renames``: new names of columns, by old. ``defaults``: by column, the value for rows older
    than the column, as text. ``drops``: columns to discard.
    """

    name: str
    renames: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    defaults: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    drops: Collection[str] = field(default=(), kw_only=True)

    def __repr__(self) -> str:
        return brief(self, self.name)

    @property
    def changes(self) -> Changes:
        """How columns have changed. Raises ``InvalidInput`` for what are not column names."""
        if isinstance(self.drops, (str, bytes)) or not all(isinstance(name, str) for name in self.drops):
            raise InvalidInput(f"drops is {self.drops!r}. It must be a list of names of columns.")
        if not isinstance(self.renames, Mapping):
            raise InvalidInput(
                f"renames is {self.renames!r}. It must be a mapping from old names of columns to new ones."
            )
        return Changes(dict(self.renames), frozenset(self.drops))

    @abstractmethod
    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""


@dataclass(frozen=True, repr=False)
class ValueState(Descriptor):
    """One row per key."""

    keys: Columns
    values: Columns
    ttl: sf.Ttl | None = field(default=None, kw_only=True)

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.value_state(
            operator, self.name, keys=self.keys, values=self.values, ttl=self.ttl, defaults=self.defaults
        )


@dataclass(frozen=True, repr=False)
class MapState(Descriptor):
    """A map per key: one row per key and ``_map_key``, which has the type ``map_key``."""

    keys: Columns
    map_key: pa.DataType
    values: Columns
    ttl: sf.Ttl | None = field(default=None, kw_only=True)

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.map_state(
            operator,
            self.name,
            keys=self.keys,
            map_key=self.map_key,
            values=self.values,
            ttl=self.ttl,
            defaults=self.defaults,
        )


@dataclass(frozen=True, repr=False)
class ListState(Descriptor):
    """A list of rows per key."""

    keys: Columns
    values: Columns
    ttl: sf.Ttl | None = field(default=None, kw_only=True)

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.list_state(
            operator, self.name, keys=self.keys, values=self.values, ttl=self.ttl, defaults=self.defaults
        )


@dataclass(frozen=True, repr=False)
class Timers(Descriptor):
    """Timers: the key, ``_timestamp`` (int64, µs), ``_tag`` (utf8), and values.

    ``clock``: what they fire by, ``event_time`` or ``processing_time``. Processing-time timers are
    due when the wall clock reaches ``_timestamp``, µs since 1970, UTC
    (``context.processing_time_us``). At the end of the input those that are not due do not fire.
    None fires after ``finish``, which may take the rest:
    ``context.timers(name).due(TIMESTAMP_MAX)``.
    """

    keys: Columns
    values: Columns = field(default=())
    clock: TimerClock = field(default="event_time", kw_only=True)

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.timers(
            operator, self.name, keys=self.keys, values=self.values, clock=self.clock, defaults=self.defaults
        )


@dataclass(frozen=True, repr=False)
class SplitList(Descriptor):
    """A list per subtask, split into contiguous chunks at another parallelism (even split)."""

    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.even_split_state(operator, self.name, columns=self.columns, defaults=self.defaults)


@dataclass(frozen=True, repr=False)
class UnionList(Descriptor):
    """A list per subtask; on restore every subtask gets all of them.

    No checkpoint can be taken while some subtasks of the operator have finished and others have
    not.
    """

    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.union_state(operator, self.name, columns=self.columns, defaults=self.defaults)


@dataclass(frozen=True, repr=False)
class BroadcastState(Descriptor):
    """Rows that are the same in every subtask: write only what all of them receive alike."""

    columns: Columns

    def declare(self, operator: str) -> sf.State:
        """The state as the format declares it."""
        return declare.broadcast_state(operator, self.name, columns=self.columns, defaults=self.defaults)


Output: TypeAlias = "pa.RecordBatch | Iterable[pa.RecordBatch] | None"
"""What a hook emits: None, one batch, or an iterable of batches, usually a generator."""
Sender: TypeAlias = Callable[[int, bytes], None]
"""How a coordinator sends a message to a subtask."""


class OperatorContext:
    """What an operator can get from its subtask. Valid from ``open`` to ``close``."""

    def __init__(
        self,
        operator: graph.Operator,
        subtask: int,
        states: SubtaskStates,
        send: Callable[[str, bytes], None],
        watermark: int,
        processing_time: Callable[[], int],
    ) -> None:
        """Called by the runtime, which keeps ``restored`` and ``watermark`` up to date."""
        self.uid: str = operator.uid
        """The operator's uid."""
        self.subtask = subtask
        """Which of the ``parallelism`` subtasks this is."""
        self.parallelism = operator.parallelism
        """How many subtasks there are."""
        self.max_parallelism: int = operator.max_parallelism or 0
        """How many key groups there are."""
        self.restored = False
        """Whether states were restored from a checkpoint."""
        self.watermark = watermark
        """The current event time, µs; ``events.MIN_WATERMARK`` if unknown."""
        self._states = states
        self._send = send if operator.coordinator else None
        self._processing_time = processing_time

    def __repr__(self) -> str:
        return brief(self, self.uid, f"subtask {self.subtask} of {self.parallelism}")

    @property
    def processing_time_us(self) -> int:
        """The wall-clock time, µs since 1970, UTC.

        It does not change during a call of a hook; on Spark, during an epoch and its retries. It
        never goes back, not even before the time of a restored checkpoint.
        """
        return self._processing_time()

    def value_state(self, name: str) -> KeyedValue:
        """Return a declared :class:`~stateformat.backends.dataflow.api.ValueState`."""
        return self._states.value(name)

    def map_state(self, name: str) -> KeyedMap:
        """Return a declared ``MapState``."""
        return self._states.map(name)

    def list_state(self, name: str) -> KeyedList:
        """Return a declared ``ListState``."""
        return self._states.list(name)

    def timers(self, name: str) -> TimerSet:
        """Return declared ``Timers``."""
        return self._states.timers(name)

    def entries(self, name: str) -> Entries:
        """Return a declared ``SplitList``, ``UnionList`` or ``BroadcastState``."""
        return self._states.entries(name)

    def send_to_coordinator(self, message: bytes) -> None:
        """Send a message to the operator's coordinator; exactly once, like state.

        Raises ``InvalidInput`` if there is no coordinator, and ``InvalidState`` unless it is bytes.
        """
        if self._send is None:
            raise InvalidInput(
                f"operator {self.uid!r} has no coordinator to send to; give it one (Operator.coordinator)"
            )
        self._send(self.uid, checked_message(f"operator {self.uid!r}", message))


def checked_message(who: str, message: object) -> bytes:
    """Return a message as a checkpoint keeps it. Raises ``InvalidState`` unless it is bytes."""
    if not isinstance(message, bytes):
        raise InvalidState(f"{who} sent {type(message).__name__}; a message is bytes, so encode it")
    return message


class Operator(ABC):
    """A step of a dataflow. Only :meth:`process` must be overridden.

    Order of calls in a subtask: ``open``; ``process``, ``on_timer`` and ``receive`` in any order;
    ``end_input`` once for each input; ``finish`` when every input has ended; ``close``.
    ``snapshot`` comes between any two of them before ``finish``.

    A subtask may be closed after any snapshot, and another started from it with ``open``. So
    ``close`` does not mean that the job ends: ``finish`` does. After ``finish``, a subtask adds
    nothing to later checkpoints except what a sink still has to commit. When all subtasks have
    finished, none is run again.
    """

    context: OperatorContext
    broadcast_inputs: ClassVar[tuple[int, ...]] = ()
    """Inputs that every subtask must see in full. A dataflow must broadcast them."""

    gathered_bytes: ClassVar[int] = 0
    """How many bytes of batches of one input may be joined into one batch for :meth:`process`.

    An executor joins batches only if this delays nothing: time, ends, messages and snapshots still
    come after the rows that came before them.
    """

    places: Collection[str] = ()
    """The directories or URLs of a sink's output: the job makes no savepoint there."""

    late_records: int = 0
    """How many late records this subtask has dropped. The job's progress shows the sum."""

    def __repr__(self) -> str:
        return brief(self)

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        """Return the states it keeps, by default none. ``inputs``: the schema of each input."""
        return ()

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Return the schema of what it emits: the first input's, unless overridden."""
        return inputs[0]

    def coordinator(self) -> OperatorCoordinator | None:
        """Return a new coordinator for all subtasks together, or None for no coordinator.

        Called to learn its columns when a job is compiled, and once for each run; not for an
        operator that has finished. An operator with a coordinator starts a new chain.
        """
        return None

    def open(self, context: OperatorContext) -> None:
        """Start a subtask; states are already restored. An override must call this first."""
        self.context = context

    @abstractmethod
    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        """Process a batch of an input."""

    def combined_schema(self, input: int) -> pa.Schema | None:
        """Return the columns of an input's combined rows: its key columns, and what is kept of the
        rest. None, the default: rows are never combined. Called after :meth:`states`.
        """
        return None

    def combine(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:
        """Combine rows of an input before they are sent, to send fewer.

        Returns rows of :meth:`combined_schema`, or None to send the batch as it is. Called in the
        tasks that send to this operator, on a copy that is never opened. An executor may call it
        for any rows, or never, so results must not depend on which rows were combined.
        """
        return None

    def process_combined(self, batch: pa.RecordBatch, input: int) -> Output:
        """Process combined rows. They may come from several calls of :meth:`combine`, so several
        rows may have the same key.
        """
        raise InvalidState(f"{self!r} combines rows and has no process_combined. Give it one.")

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        """Handle due timers of one declared set, in order of ``_timestamp``. They are removed.

        Columns: the key, ``_timestamp`` (int64, µs), ``_tag`` (utf8), and the values. Timers set
        here that are already due fire next.
        """
        return None

    def receive(self, message: bytes) -> Output:
        """Handle a message from the operator's coordinator.

        What the coordinator sends while it handles a message that this subtask sent before its last
        input ended arrives before that input's ``end_input``. So do answers to what ``receive``
        itself sends; the job fails if that continues for 1,000 rounds.
        """
        return None

    def end_input(self, input: int) -> Output:
        """Handle the end of an input: no batch of it follows.

        Called once per input in any history that is published.
        """
        return None

    def finish(self) -> Output:
        """Emit what is held back: every input has ended. Nothing may be emitted afterwards."""
        return None

    def snapshot(self) -> None:
        """Put into states what is kept elsewhere: a checkpoint is about to be taken."""

    def checkpoint_complete(self) -> None:
        """The last snapshot is in a published checkpoint. A failure may skip this call."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint of the last :meth:`snapshot` (or ``prepare_commit``) will not be
        published.

        Like Flink's ``notifyCheckpointAborted``: release what was set aside for the snapshot. Undo
        nothing else: states continue as they are, and what a sink has prepared becomes part of the
        next checkpoint, which takes the same id. An exception here fails the job.

        Never called after :meth:`checkpoint_complete` for the same snapshot, nor if the subtask was
        not asked for its snapshot, nor when the run is given up.
        """

    def close(self) -> None:
        """Release files and connections. Do not rely on it: a process that dies closes nothing."""


class OperatorCoordinator(ABC):
    """One per operator, in the driver: for what must outlive a subtask, or be decided only once.

    A subtask receives what :meth:`receive` sends in answer to its message. Other messages to
    a subtask whose last input has ended are lost, and the job warns once. So answer the sender, and
    answer immediately.

    When its operator is fully finished, its state is dropped and it is not started again.
    """

    columns: Columns
    """The columns of what :meth:`snapshot` returns."""

    def __repr__(self) -> str:
        return brief(self)

    def open(self, send: Sender) -> None:
        """Start. ``send(subtask, message)`` calls that subtask's ``receive``.

        The message arrives after the barrier of a checkpoint in flight. ``send`` raises
        ``InvalidState`` for a subtask that the operator does not have in this run.
        """

    def restore(self, rows: pa.Table) -> None:
        """Restore what :meth:`snapshot` returned, whatever the parallelism is now."""

    @abstractmethod
    def receive(self, subtask: int, message: bytes) -> None:
        """Handle a message from a subtask.

        A message in flight at a checkpoint is delivered again after a restore, as from subtask
        ``subtask % parallelism`` if there are fewer subtasks than before.
        """

    @abstractmethod
    def snapshot(self) -> pa.Table:
        """Return everything that it keeps, in the columns :attr:`columns`."""

    def checkpoint_complete(self) -> None:
        """The last snapshot is in a published checkpoint."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint of the last snapshot will not be published. See
        :meth:`Operator.checkpoint_aborted`.
        """


class Prepared(NamedTuple):
    """The ids of the checkpoint and attempt under which a sink prepares its output."""

    checkpoint_id: int
    attempt_id: str


class TwoPhaseCommitSink(Operator):
    """A sink whose output becomes visible only after its checkpoint is published.

    ``prepare_commit`` is called in every snapshot, after ``finish`` too. The rows it returns become
    part of the checkpoint. When that is published, ``commit`` is called on the prototype, in the
    driver, with the rows of all subtasks. It must be idempotent: after a failure it is called again
    with the same rows, and it may be called late.
    """

    committable_columns: Columns

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Nothing is emitted."""
        return pa.schema([])

    @abstractmethod
    def prepare_commit(self, prepared: Prepared) -> pa.Table | pa.RecordBatch | None:
        """Prepare what was written since the last call, so that only external causes can make the
        commit fail.

        Returns rows of ``committable_columns``, or None for no rows.
        """

    @abstractmethod
    def commit(self, permit: CommitPermit, committables: pa.Table) -> pa.Table | None:
        """Make the prepared output visible.

        ``committables`` has the declared columns, and the ``_checkpoint_id`` (int64) and
        ``_attempt_id`` (utf8) under which each row was prepared. Returns rows to try again at the
        next checkpoint, or None. An exception here fails the job.
        """

    def check_committables(self, uid: str, committables: pa.Table, *, renamed: bool = False) -> None:
        """Raise ``DamagedCheckpoint`` for rows that the sink ``uid`` cannot have prepared.

        A row that names a file, a table or a transaction is data: anyone who can write to the store
        can write any name into it. So compare each name with those that ``prepare_commit`` makes
        for that uid, checkpoint id and attempt id. ``renamed``: rows may have another uid, from
        before a rename of the operator.

        Called on the prototype, in the driver, before every ``commit``. When one sink refuses, no
        sink commits anything. By default every row is accepted.
        """

    def prepared_attempts(self, uid: str) -> Collection[Prepared] | None:
        """Return the ids under which output of the sink ``uid`` is prepared at its destination and
        not committed.

        None, the default: unknown. Then every start reads the committables of all checkpoints of
        the store for :meth:`clean`, and a second job that writes to the same destination goes
        unnoticed. Called on the prototype, in the driver, before :meth:`clean`, and before a job
        begins from another store's checkpoint.
        """
        return None

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None) -> object:
        """Remove what earlier runs of the sink ``uid`` prepared and no checkpoint holds.

        Remove only what was prepared under checkpoint ids up to ``newest_id``, because another run
        may be about to publish higher ones; and only what is not in ``carried``, because a rollback
        returns to an older checkpoint. ``carried``: the rows of all checkpoints of the store that a
        run may still start from, some of them twice, or None. ``newest_id`` is 0 if there is no
        checkpoint, or one cannot be read: then remove nothing.

        Called on the prototype, in the driver, when a run begins: after ``commit``, before any
        ``open``.
        """
        return None


@dataclass(frozen=True)
class EventTime:
    """The column with the event time (timestamp[us], or int64 in µs)."""

    column: str
    out_of_order_us: int = 0
    """By how much records may be out of order, µs."""

    def __post_init__(self) -> None:
        """Raises ``InvalidInput`` unless ``out_of_order_us`` is a whole number, at least 0."""
        late = self.out_of_order_us
        if isinstance(late, bool) or not isinstance(late, int) or not 0 <= late < 1 << 62:
            raise InvalidInput(
                f"event time {self.column!r} is out of order by {late!r}. Give a whole number of microseconds, at "
                "least 0."
            )


class Split(NamedTuple):
    """A part of a source that one reader reads. What ``payload`` means is up to the source."""

    id: str
    payload: bytes
    position: int = 0
    """Where to read next; 0 is the beginning."""


class NoSplit(Enum):
    """Why a reader gets no split."""

    LATER = "later"
    """There may be a split later: the enumerator is asked again."""
    NEVER = "never"
    """No more splits will come: the reader's input ends when its splits do."""


class SplitEnumerator(ABC):
    """Finds the splits of a source and assigns them to readers.

    There is one per source, in the driver; every checkpoint holds its state.
    """

    columns: Columns
    """The columns of what :meth:`snapshot` returns."""
    log_columns: Columns | None = None
    """The columns of its log: rows that it keeps for as long as the job lives. None: no log.

    Every checkpoint writes the whole snapshot, but only the new rows of the log. So what grows
    without bound belongs in the log.
    """
    log_is_anew: bool = False
    """Whether :meth:`logged` last returned the whole log, which replaces all earlier rows.

    For a log whose rows are mostly no longer needed.
    """

    def __repr__(self) -> str:
        return brief(self)

    @abstractmethod
    def next_split(self, subtask: int, parallelism: int) -> Split | NoSplit:
        """Return a split for this reader, whose checkpoints hold it from now on."""

    @abstractmethod
    def snapshot(self) -> pa.Table:
        """Return the splits that are not assigned yet, and everything else it keeps."""

    @abstractmethod
    def restore(self, rows: pa.Table) -> None:
        """Restore what :meth:`snapshot` returned."""

    def logged(self) -> pa.Table:
        """Return the new rows of its log: all since the last call.

        Called after each :meth:`snapshot`. The rows are kept even if that checkpoint fails.
        """
        return as_schema(self.log_columns or {}).empty_table()

    def restore_log(self, rows: pa.Table) -> None:
        """Restore all rows of its log, in any order. Called before :meth:`restore`."""


class StartingPoint(NamedTuple):
    """Where a source begins in a new job: what its enumerator and readers would have kept."""

    enumerator: pa.Table
    """Rows as :meth:`SplitEnumerator.snapshot` returns them."""
    splits: tuple[Split, ...]
    """The splits that readers hold, each with its position. Split n goes to subtask n modulo the
    parallelism."""
    description: str
    """What it begins after, as the end of a sentence."""


class ReaderContext:
    """What :meth:`Source.read` can know about its reader."""

    def __init__(self, subtask: int, clock: Callable[[], int]) -> None:
        self.subtask = subtask
        """The reader's subtask."""
        self._clock = clock

    def __repr__(self) -> str:
        return brief(self, f"subtask {self.subtask}")

    @property
    def now_us(self) -> int:
        """The executor's clock, in µs. Do not use it for what must be reproducible."""
        return self._clock()


class Chunk(NamedTuple):
    """One result of :meth:`Source.read`."""

    batch: pa.RecordBatch | None
    """The rows; None if nothing is there yet."""
    position: int
    """The position in the split after these rows."""
    newest_us: int | None = None
    """An event time, in µs, that the source has reached, apart from the rows."""


class Source(ABC):
    """Where records come from: an enumerator that assigns splits, and readers that read them."""

    bounded: bool = True
    """Whether the source ends by itself."""
    splits_per_reader: int | None = 1
    """How many splits a reader reads in turn; None: as many as it gets."""
    read_by: str | None = None
    """The name of the only runtime that can read it; others refuse to start. None: any can."""
    places: Collection[str] = ()
    """The directories or URLs of which it reads everything: the job makes no savepoint there."""
    unordered: bool = False
    """Whether the rows of a split come in any order. Event time does not advance within one."""

    def __repr__(self) -> str:
        return brief(self)

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of the rows."""

    @abstractmethod
    def enumerator(self) -> SplitEnumerator:
        """Return a new enumerator."""

    @abstractmethod
    def read(self, split: Split, context: ReaderContext) -> Iterator[Chunk]:
        """Read from ``split.position`` to the end of the split.

        The same position must yield the same rows again, in any reader.
        """

    def behind(self, position: Any) -> StartingPoint:
        """Return where the source begins if everything up to a position was read elsewhere.

        Each source defines what a position is. Raises ``InvalidInput`` for an invalid one, and by
        default always.
        """
        raise InvalidInput(
            f"{type(self).__name__} cannot begin behind a position ({position!r} is given). Leave its position out, "
            "and let it read what the history does not cover; or define its method behind."
        )
