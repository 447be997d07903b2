"""What authors of operators and sinks write; a part of ``api``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, TypeAlias

import pyarrow as pa

from stateformat.states import Columns

from .states import Descriptor

if TYPE_CHECKING:
    from stateformat.publication import CommitPermit

    from ...state import Entries, KeyedList, KeyedMap, KeyedValue, TimerSet

Output: TypeAlias = "pa.RecordBatch | Iterable[pa.RecordBatch] | None"
"""What a hook emits, in order: nothing, one batch, or several. A generator is annotated as ``Iterator[pa.RecordBatch]``."""


class OperatorContext(Protocol):
    """What an operator may ask of the subtask that it runs in. Valid from ``open`` to ``close``."""

    @property
    def uid(self) -> str:
        """The operator's uid."""

    @property
    def subtask(self) -> int:
        """Which of the ``parallelism`` subtasks this is."""

    @property
    def parallelism(self) -> int:
        """How many there are."""

    @property
    def max_parallelism(self) -> int:
        """How many key groups there are."""

    @property
    def restored(self) -> bool:
        """Whether states were restored from a checkpoint."""

    @property
    def watermark(self) -> int:
        """How far event time has come, µs; ``events.MIN_WATERMARK`` where nothing is known."""

    def value_state(self, name: str) -> KeyedValue:
        """A declared :class:`~stateformat.backends.dataflow.api.states.ValueState`."""

    def map_state(self, name: str) -> KeyedMap:
        """A declared ``MapState``."""

    def list_state(self, name: str) -> KeyedList:
        """A declared ``ListState``."""

    def timers(self, name: str) -> TimerSet:
        """A declared ``Timers``."""

    def entries(self, name: str) -> Entries:
        """A declared ``SplitList``, ``UnionList`` or ``BroadcastState``."""

    def send_to_coordinator(self, message: bytes) -> None:
        """Send to the operator's coordinator. Exactly once, with checkpoints as with states."""


class Operator(ABC):
    """A step of a dataflow. Override what is needed; every hook but :meth:`process` may stay away.

    Order of calls in a subtask: ``open``; ``process``, ``on_timer``, ``receive`` in any order; ``end_input`` once for each input;
    ``finish`` when every input has ended, after which nothing is emitted; ``close``. ``snapshot`` comes between any two of
    them before ``finish``. An activation may end after any snapshot and another begin from it with ``open``, so ``close`` says
    nothing about the end of the job: ``finish`` does. A subtask whose logic has ended contributes nothing to later
    checkpoints but what a sink has still to commit, and is not run again once all of its operator have ended.
    """

    context: OperatorContext
    broadcast_inputs: ClassVar[tuple[int, ...]] = ()
    """Inputs that every subtask must see whole; a dataflow that sends one of them otherwise than by ``broadcast`` is refused."""

    late_records: int = 0
    """How many records this subtask has dropped because they came too late. An operator that drops any counts them here; the
    progress of the job shows the sum of all.
    """

    def states(self, *inputs: pa.Schema) -> Sequence[Descriptor]:
        """The states that it keeps. ``inputs``: the schema of each input."""
        return ()

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """The schema of what it emits. The first input's, unless overridden."""
        return inputs[0]

    def coordinator(self) -> OperatorCoordinator | None:
        """A new coordinator for all subtasks together, where there is to be one.

        Called to learn its columns when a job is laid out, and once for each run. Not called for an operator that has finished. An
        operator with a coordinator begins a chain of its own.
        """
        return None

    def open(self, context: OperatorContext) -> None:
        """Begin an activation; states are restored already. An override calls this first."""
        self.context = context

    @abstractmethod
    def process(self, batch: pa.RecordBatch, input: int) -> Output:
        """Process a batch of an input."""

    def on_timer(self, timers: pa.RecordBatch, name: str) -> Output:
        """Timers of one declared set are due, in order of ``_timestamp``: key columns, ``_timestamp``, ``_tag``, and the columns of
        the user's. They have been removed. Timers that this sets and that are due already fire next.
        """
        return None

    def receive(self, message: bytes) -> Output:
        """A message of the operator's coordinator.

        What the coordinator sends while it handles a message that this subtask sent before its last input ended comes before that
        input's ``end_input``, answers to what ``receive`` itself sends included. A job fails in which this goes on for 1,000 rounds.
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
        """The last snapshot is part of a published checkpoint. May be missed after a failure, or when its activation has ended."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint for which :meth:`snapshot` (or ``prepare_commit``) was called last will not be published.

        ``checkpoint_id`` is the id that it would have had; the next checkpoint takes the same id. States go on as they are, and what
        a sink has prepared becomes part of the next checkpoint, so there is nothing to undo. Use it to release what was set aside
        for the snapshot. Never called after :meth:`checkpoint_complete` of the same snapshot. Not called where the subtask had not
        been asked for its snapshot yet, and not when the whole run is given up: then another activation begins from the newest
        checkpoint. What it raises is a failure of the job. (Flink: ``notifyCheckpointAborted``.)
        """

    def close(self) -> None:
        """End an activation: release files and connections. Never relied upon; a lost process closes nothing."""


Sender: TypeAlias = Callable[[int, bytes], None]
"""How a coordinator sends a message to a subtask."""


class OperatorCoordinator(ABC):
    """One per operator, in the process of the driver: for what must outlive a finished subtask, and for what only one may decide.

    A subtask receives whatever :meth:`receive` sends to it for a message of its own. A message to a subtask whose last input has
    ended is lost otherwise, and the job warns once. So answer the sender, and answer at once.

    Its state is gone when its operator is fully finished, and it is not begun again then.
    """

    columns: Columns
    """The columns of what :meth:`snapshot` returns."""

    def open(self, send: Sender) -> None:
        """Begin. ``send(subtask, message)`` reaches that subtask's ``receive``, behind the barrier of a pending checkpoint. It raises
        ``InvalidState`` for a subtask that the operator does not have in this run.
        """

    def restore(self, rows: pa.Table) -> None:
        """Take back what :meth:`snapshot` gave, whatever the parallelism is now."""

    @abstractmethod
    def receive(self, subtask: int, message: bytes) -> None:
        """A message of a subtask. One that was on its way at a checkpoint is given again after a restore, as from subtask
        ``subtask % parallelism`` where there are fewer subtasks than before.
        """

    @abstractmethod
    def snapshot(self) -> pa.Table:
        """All that it keeps, in its columns."""

    def checkpoint_complete(self) -> None:
        """The last snapshot is part of a published checkpoint."""

    def checkpoint_aborted(self, checkpoint_id: int) -> None:
        """The checkpoint of the last snapshot, which would have had this id, will not be published. As ``Operator.checkpoint_aborted``."""


class Prepared(NamedTuple):
    """Under what a sink prepares its output."""

    checkpoint_id: int
    attempt_id: str


class TwoPhaseCommitSink(Operator):
    """A sink of which nothing is visible before its checkpoint is published.

    ``prepare_commit`` is called in every snapshot, those behind ``finish`` too. What it returns (rows of
    ``committable_columns``) becomes part of the checkpoint. When that is published, ``commit`` is called on the prototype, in the
    driver, with all subtasks' rows and ``_checkpoint_id`` and ``_attempt_id``, under which each was prepared. It must do nothing
    where it has been done: after a failure it is called again with the same rows, and it may come late.
    """

    committable_columns: Columns

    def output_schema(self, *inputs: pa.Schema) -> pa.Schema:
        """Nothing is emitted."""
        return pa.schema([])

    @abstractmethod
    def prepare_commit(self, prepared: Prepared) -> pa.Table | pa.RecordBatch | None:
        """End what was written since the last call such that a commit cannot fail for any reason that lies in it."""

    @abstractmethod
    def commit(self, permit: CommitPermit, committables: pa.Table) -> pa.Table | None:
        """Make it visible. Returns rows to try again at the next checkpoint; raises for a failure of the job."""

    def check_committables(self, uid: str, committables: pa.Table, *, renamed: bool = False) -> None:
        """Raise ``DamagedCheckpoint`` for rows that the sink ``uid`` cannot have prepared under the ids in the row.

        A row that names a file, a table or a transaction is data: whoever can write to the store can write any name into
        it. So compare each name with those that ``prepare_commit`` makes for that uid, checkpoint id and attempt id.
        Called on the prototype, in the driver, before every ``commit``. When one sink refuses, no sink commits anything.
        ``renamed``: the checkpoint may come from before a rename of the operator, so rows may have another uid. By default
        every row is accepted.
        """

    def prepared_attempts(self, uid: str) -> Collection[Prepared] | None:
        """Under which checkpoint and attempt ids output of the sink ``uid`` lies prepared, and not committed, in its place.

        None, the default: unknown. Then every start reads the committables of all checkpoints of the store for
        :meth:`clean`, and nobody notices a second job that writes to the same place. Called on the prototype, in the
        driver, before :meth:`clean`, and before a job begins from another store's checkpoint.
        """
        return None

    def clean(self, uid: str, newest_id: int, carried: pa.Table | None) -> object:
        """Remove what earlier runs of the sink ``uid`` prepared and no checkpoint holds.

        Only what was prepared under checkpoint ids up to ``newest_id`` may go, and only what is not ``carried``: another
        run may be about to publish greater ids, and a rollback goes back to an older checkpoint. ``carried`` has the rows
        of all checkpoints of the store that may still be started from, some of them twice, or is None. ``newest_id`` is 0
        where there is no checkpoint, and where one cannot be read: then nothing that was prepared may go. Called on the
        prototype, in the driver, when a run begins: after ``commit``, before anything has opened.
        """
        return None
