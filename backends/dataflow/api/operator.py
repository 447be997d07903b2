"""What authors of operators and sinks write; a part of ``api``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

import pyarrow as pa

from stateformat import graph
from stateformat.errors import InvalidInput, InvalidState
from stateformat.graph import brief
from stateformat.states import Columns

from .states import Descriptor

if TYPE_CHECKING:
    from stateformat.publication import CommitPermit

    from ...state import Entries, KeyedList, KeyedMap, KeyedValue, SubtaskStates, TimerSet

Output: TypeAlias = "pa.RecordBatch | Iterable[pa.RecordBatch] | None"
"""What a hook emits: None, one batch, or an iterable of batches, usually a generator."""
Sender: TypeAlias = Callable[[int, bytes], None]
"""How a coordinator sends a message to a subtask."""


class OperatorContext:
    """What an operator may ask of its subtask. Valid from ``open`` to ``close``."""

    def __init__(
        self,
        operator: graph.Operator,
        subtask: int,
        states: SubtaskStates,
        send: Callable[[str, bytes], None],
        watermark: int,
        processing_time: Callable[[], int],
    ) -> None:
        """The runtime makes it, and keeps ``restored`` and ``watermark`` up to date."""
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
        """The event time that has been reached, µs; ``events.MIN_WATERMARK``: unknown."""
        self._states = states
        self._send = send if operator.coordinator else None
        self._processing_time = processing_time

    def __repr__(self) -> str:
        return brief(self, self.uid, f"subtask {self.subtask} of {self.parallelism}")

    @property
    def processing_time_us(self) -> int:
        """The wall-clock time, µs since 1970, UTC.

        One moment for all that a hook does; on Spark, for all that an epoch does, in each of its
        tries. It never goes back, also not behind what a restored checkpoint has seen.
        """
        return self._processing_time()

    def value_state(self, name: str) -> KeyedValue:
        """A declared :class:`~stateformat.backends.dataflow.api.states.ValueState`."""
        return self._states.value(name)

    def map_state(self, name: str) -> KeyedMap:
        """A declared ``MapState``."""
        return self._states.map(name)

    def list_state(self, name: str) -> KeyedList:
        """A declared ``ListState``."""
        return self._states.list(name)

    def timers(self, name: str) -> TimerSet:
        """A declared ``Timers``."""
        return self._states.timers(name)

    def entries(self, name: str) -> Entries:
        """A declared ``SplitList``, ``UnionList`` or ``BroadcastState``."""
        return self._states.entries(name)

    def send_to_coordinator(self, message: bytes) -> None:
        """Send to the operator's coordinator. With checkpoints, exactly once, as with states."""
        if self._send is None:
            raise InvalidInput(
                f"operator {self.uid!r} has no coordinator to send to; give it one (Operator.coordinator)"
            )
        self._send(self.uid, checked_message(f"operator {self.uid!r}", message))


def checked_message(who: str, message: object) -> bytes:
    """A message, as a checkpoint keeps it. ``InvalidState`` unless it is bytes."""
    if not isinstance(message, bytes):
        raise InvalidState(f"{who} sent {type(message).__name__}; a message is bytes, so encode it")
    return message


class Operator(ABC):
    """A step of a dataflow. Only :meth:`process` must be overridden.

    Order of calls in a subtask: ``open``; ``process``, ``on_timer`` and ``receive`` in any order;
    ``end_input`` once for each input; ``finish`` when every input has ended; ``close``.
    ``snapshot`` comes between any two of them before ``finish``.

    A subtask may be closed after any snapshot, and another begins from it with ``open``. So
    ``close`` does not mean that the job ends: ``finish`` does. A subtask whose logic has ended adds
    nothing to later checkpoints but what a sink has still to commit. When all subtasks have ended,
    none is run again.
    """

    context: OperatorContext
    broadcast_inputs: ClassVar[tuple[int, ...]] = ()
    """Inputs that every subtask must see whole. A dataflow must broadcast them."""

    gathered_bytes: ClassVar[int] = 0
    """Up to so many bytes of batches of one input may be joined into one for :meth:`process`.

    An executor does so only where it delays nothing: time, ends, messages and snapshots come behind
    the rows that came before them.
    """

    late_records: int = 0
    """How many records this subtask has dropped as late. The job's progress shows the sum."""

    def __repr__(self) -> str:
        return brief(self)

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        """The states that it keeps. ``inputs``: the schema of each input."""
        return ()

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """The schema of what it emits. The first input's, unless overridden."""
        return inputs[0]

    def coordinator(self) -> OperatorCoordinator | None:
        """A new coordinator for all subtasks together, if there is to be one.

        Called to learn its columns when a job is compiled, and once for each run; not for an
        operator that has finished. An operator with a coordinator begins a chain of its own.
        """
        return None

    def open(self, context: OperatorContext) -> None:
        """Begin in a subtask; states are restored already. An override calls this first."""
        self.context = context

    @abstractmethod
    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        """Process a batch of an input."""

    def combined_schema(self, input: int) -> pa.Schema | None:
        """The columns of combined rows of an input: those it is keyed by, and what is kept of the
        rest. None, the default: its rows are never combined. Called after :meth:`states`.
        """
        return None

    def combine(self, batch: pa.RecordBatch, input: int) -> pa.RecordBatch | None:
        """Combine rows of an input before they are sent, so that fewer are; None: send them as they
        are.

        Called in the tasks that send to this operator, on a copy that is never opened. An executor
        may call it for any rows, or never, so results must not depend on which rows were combined.
        Returns rows of :meth:`combined_schema`.
        """
        return None

    def process_combined(self, batch: pa.RecordBatch, input: int) -> Output:
        """Process combined rows. They may come from several calls of :meth:`combine`, so a key may
        be in more than one of them.
        """
        raise InvalidState(f"{self!r} combines rows and has no process_combined. Give it one.")

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        """Timers of one declared set are due, in order of ``_timestamp``. They have been removed.

        Columns: the key, ``_timestamp``, ``_tag``, and the values. Timers set here that are due
        fire next.
        """
        return None

    def receive(self, message: bytes) -> Output:
        """A message of the operator's coordinator.

        What the coordinator sends while it handles a message that this subtask sent before its last
        input ended comes before that input's ``end_input``. So do answers to what ``receive``
        itself sends; the job fails when that goes on for 1,000 rounds.
        """
        return None

    def end_input(self, input: int) -> Output:
        """No batch of this input follows. Once per input in any history that is published."""
        return None

    def finish(self) -> Output:
        """Every input has ended: emit what is held back. Nothing may be emitted afterwards."""
        return None

    def snapshot(self) -> None:
        """A checkpoint is about to be taken: put into states what lies elsewhere."""

    def checkpoint_complete(self) -> None:
        """The last snapshot is part of a published checkpoint. May be missed after a failure."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint of the last :meth:`snapshot` (or ``prepare_commit``) will not be
        published.

        Flink's ``notifyCheckpointAborted``: release what was set aside for the snapshot. Nothing
        else is to be undone: states go on as they are, and what a sink has prepared becomes part of
        the next checkpoint, which takes the same id. What it raises is a failure of the job.

        Never called after :meth:`checkpoint_complete` of the same snapshot, nor where the subtask
        had not been asked for its snapshot, nor when the run is given up.
        """

    def close(self) -> None:
        """Release files and connections. Never rely on it: a lost process closes nothing."""


class OperatorCoordinator(ABC):
    """One per operator, in the driver: for what must outlive a subtask, or only one may decide.

    A subtask receives what :meth:`receive` sends in answer to its message. Other messages to a
    subtask whose last input has ended are lost, and the job warns once. So answer the sender, and
    at once.

    When its operator is fully finished, its state is gone and it is not begun again.
    """

    columns: Columns
    """The columns of what :meth:`snapshot` returns."""

    def __repr__(self) -> str:
        return brief(self)

    def open(self, send: Sender) -> None:
        """Begin. ``send(subtask, message)`` reaches that subtask's ``receive``.

        It arrives behind the barrier of a checkpoint in flight. ``send`` raises ``InvalidState``
        for a subtask that the operator does not have in this run.
        """

    def restore(self, rows: pa.Table) -> None:
        """Take back what :meth:`snapshot` gave, whatever the parallelism is now."""

    @abstractmethod
    def receive(self, subtask: int, message: bytes) -> None:
        """A message of a subtask.

        One that was on its way at a checkpoint is given again after a restore, as from subtask
        ``subtask % parallelism`` where there are fewer subtasks than before.
        """

    @abstractmethod
    def snapshot(self) -> pa.Table:
        """All that it keeps, in its columns."""

    def checkpoint_complete(self) -> None:
        """The last snapshot is part of a published checkpoint."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint of the last snapshot will not be published. See ``Operator``."""


class Prepared(NamedTuple):
    """Under what a sink prepares its output."""

    checkpoint_id: int
    attempt_id: str


class TwoPhaseCommitSink(Operator):
    """A sink of which nothing is visible before its checkpoint is published.

    ``prepare_commit`` is called in every snapshot, those behind ``finish`` too. The rows it returns
    become part of the checkpoint. When that is published, ``commit`` is called on the prototype, in
    the driver, with the rows of all subtasks. It must be idempotent: after a failure it is called
    again with the same rows, and it may come late.
    """

    committable_columns: Columns

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Nothing is emitted."""
        return pa.schema([])

    @abstractmethod
    def prepare_commit(self, prepared: Prepared) -> pa.Table | pa.RecordBatch | None:
        """End what was written since the last call, so that a commit can fail for outside reasons
        only.

        Returns rows of ``committable_columns``.
        """

    @abstractmethod
    def commit(self, permit: CommitPermit, committables: pa.Table) -> pa.Table | None:
        """Make it visible.

        ``committables`` has the declared columns, and the ``_checkpoint_id`` and ``_attempt_id``
        under which each row was prepared. Returns rows to try again at the next checkpoint. What it
        raises is a failure of the job.
        """

    def check_committables(self, uid: str, committables: pa.Table, *, renamed: bool = False) -> None:
        """Raise ``DamagedCheckpoint`` for rows that the sink ``uid`` cannot have prepared.

        A row that names a file, a table or a transaction is data: who can write to the store can
        write any name into it. So compare each name with those that ``prepare_commit`` makes for
        that uid, checkpoint id and attempt id. ``renamed``: rows may have another uid, from before
        a rename of the operator.

        Called on the prototype, in the driver, before every ``commit``. When one sink refuses, no
        sink commits anything. By default every row is accepted.
        """

    def prepared_attempts(self, uid: str) -> Collection[Prepared] | None:
        """The ids under which output of the sink ``uid`` lies prepared, and not committed, in its
        place.

        None, the default: unknown. Then every start reads the committables of all checkpoints of
        the store for :meth:`clean`, and a second job that writes to the same place goes unnoticed.
        Called on the prototype, in the driver, before :meth:`clean`, and before a job begins from
        another store's checkpoint.
        """
        return None

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None) -> object:
        """Remove what earlier runs of the sink ``uid`` prepared and no checkpoint holds.

        Remove only what was prepared under checkpoint ids up to ``newest_id``, for another run may
        be about to publish greater ones; and only what is not ``carried``, for a rollback goes back
        to an older checkpoint. ``carried``: the rows of all checkpoints of the store that may still
        be started from, some of them twice, or None. ``newest_id`` is 0 where there is no
        checkpoint, or one cannot be read: then nothing may go.

        Called on the prototype, in the driver, when a run begins: after ``commit``, before any
        ``open``.
        """
        return None
