"""What a subtask writes, in whatever process it runs.

The driver sends the :class:`WriteContext` of a checkpoint to the workers. A worker opens a
:class:`SnapshotWriter` for its subtask, writes its states, and sends the small :class:`Snapshot`
back. Every segment has a name of its own, so a worker that is killed, retried or run twice
overwrites nothing; ``gc`` deletes what no snapshot names. Workers never publish.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from .errors import ErrorKind, InvalidInput, InvalidState
from .graph import JobGraph, shortened
from .keys import DEFAULT_KEY_HASH, hash_keys, key_group_count, key_group_range, key_groups, subtask_of_key_group
from .manifest import handles_table
from .model import ON_TOP, PER_SUBTASK_MODES, AttemptId, CheckpointId, Handle, JobId, Mode, State
from .segments import SegmentPlace, WriteOptions, normalize_keys, write_segment
from .storage import Storage

RowData: TypeAlias = "pa.Table | pa.RecordBatch | Iterable[pa.RecordBatch]"


@dataclass(frozen=True)
class Snapshot:
    """What one subtask or coordinator reports to a checkpoint. Picklable; portable as bytes."""

    operator: str
    subtask: int | None
    """None for the coordinator."""
    handles: tuple[Handle, ...] = ()
    carried: tuple[str, ...] = ()
    """Keyed states whose layers in the parent stay below the new ones."""
    finishing: bool = False
    times: tuple[tuple[str, int], ...] = ()
    """For each state whose rows expire, its clock's time here (``State.ttl_now_us``)."""

    def __repr__(self) -> str:
        who = "coordinator" if self.subtask is None else f"subtask {self.subtask}"
        what = f"{len(self.handles)} handles, {len(self.carried)} carried"
        return f"Snapshot({shortened(self.operator)}, {who}, {what}{', finishing' if self.finishing else ''})"

    def to_bytes(self) -> bytes:
        """Return an Arrow IPC stream: the handles as a table, the rest as schema metadata."""
        facts = {
            "operator": self.operator,
            "subtask": self.subtask,
            "carried": self.carried,
            "finishing": self.finishing,
            "times": self.times,
        }
        table = handles_table(self.handles).replace_schema_metadata({"snapshot": json.dumps(facts)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        data: bytes = sink.getvalue().to_pybytes()
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> Snapshot:
        """Decode the bytes of :meth:`to_bytes`. Raises ``InvalidInput`` for other bytes."""
        try:
            table = pa.ipc.open_stream(data).read_all()
            facts = json.loads(table.schema.metadata[b"snapshot"])
            handles = tuple(Handle(**row) for row in table.to_pylist())
            times = tuple((name, now_us) for name, now_us in facts.get("times", ()))
            return cls(facts["operator"], facts["subtask"], handles, tuple(facts["carried"]), facts["finishing"], times)
        except (pa.ArrowException, OSError, ValueError, TypeError, KeyError) as error:
            raise InvalidInput(
                f"{len(data)} bytes are not a snapshot: {error}; send Snapshot.to_bytes() whole"
            ) from error


@dataclass(frozen=True)
class WriteContext:
    """What a worker needs to write snapshots of one checkpoint. Picklable."""

    storage: Storage
    job_id: JobId
    checkpoint_id: CheckpointId
    attempt_id: AttemptId
    graph: JobGraph
    states: tuple[State, ...]
    options: WriteOptions = field(default_factory=WriteOptions)

    def __repr__(self) -> str:
        uids = ", ".join(operator.uid for operator in self.graph.operators)
        return f"WriteContext(checkpoint {self.checkpoint_id} of {shortened(self.job_id)}, {shortened(uids, 40)})"

    def only(self, operator: str) -> WriteContext:
        """Return the context of one operator only, smaller to send to its workers."""
        return replace(
            self,
            graph=JobGraph((self.graph.operator(operator),)),
            states=tuple(state for state in self.states if state.operator == operator),
        )

    def owners(self, operator: str, state: str, rows: pa.Table | pa.RecordBatch) -> np.ndarray:
        """Return the subtask that owns each row of a keyed state, as int32 (SPEC.md section 5.3).

        ``rows`` has at least the key columns, as for :meth:`SnapshotWriter.write`. Raises
        ``InvalidInput`` for a state without keys, ``InvalidState`` for wrong key columns.
        """
        found = self.graph.operator(operator)
        declared = next((item for item in self.states if (item.operator, item.name) == (operator, state)), None)
        if declared is None or not declared.key_columns:
            raise InvalidInput(f"operator {operator!r} has no keyed state {state!r}", kind=ErrorKind.UNKNOWN_STATE)
        ceiling = key_group_count(found)
        keys = normalize_keys(rows, declared, where=f"state {state!r} of {operator!r}")
        hashes = hash_keys(keys, found.key_hash or DEFAULT_KEY_HASH)
        groups = key_groups(hashes, ceiling)
        owners: np.ndarray = subtask_of_key_group(groups, parallelism=found.parallelism, max_parallelism=ceiling)
        return owners

    def subtask(self, operator: str, subtask: int, *, finishing: bool = False) -> SnapshotWriter:
        """Return a writer for one subtask; if ``finishing``, for committables only.

        Raises ``InvalidInput`` for an unknown operator or subtask.
        """
        found = self.graph.operator(operator)
        if not 0 <= subtask < found.parallelism:
            raise InvalidInput(
                f"operator {operator!r} has subtasks 0 to {found.parallelism - 1}; there is no subtask {subtask}",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
        return SnapshotWriter(self, operator, subtask, finishing=finishing)

    def coordinator(self, operator: str, *, finished: bool = False) -> SnapshotWriter:
        """Return a writer for the coordinator; if ``finished``, for committables only.

        Raises ``InvalidInput`` for an unknown operator.
        """
        self.graph.operator(operator)
        return SnapshotWriter(self, operator, None, finishing=finished)


class SnapshotWriter:
    """Writes the states of one subtask or coordinator. Not thread-safe.

    Nothing is visible before the checkpoint is published. Each state is reported once; another
    report of it raises ``InvalidState``, an unknown name ``InvalidInput``.
    """

    def __init__(self, context: WriteContext, operator: str, subtask: int | None, *, finishing: bool) -> None:
        self._context = context
        self._operator = operator
        self._subtask = subtask
        self._finishing = finishing
        self._states: Mapping[str, State] = {s.name: s for s in context.states if s.operator == operator}
        self._handles: list[Handle] = []
        self._carried: list[str] = []
        self._written: set[str] = set()
        self._times: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"SnapshotWriter({self._where}, {len(self._handles)} handles, {len(self._carried)} carried)"

    def __enter__(self) -> SnapshotWriter:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.snapshot()

    @property
    def _where(self) -> str:
        return f"{self._operator!r} " + ("coordinator" if self._subtask is None else f"subtask {self._subtask}")

    def _claim(self, name: str) -> State:
        """Return the state, if this writer may still write it."""
        state = self._states.get(name)
        if state is None:
            raise InvalidInput(
                f"{self._where} has no state {name!r}; declared are {', '.join(sorted(self._states)) or 'none'}",
                kind=ErrorKind.UNKNOWN_STATE,
            )
        allowed = {Mode.COMMITTABLES} if self._finishing else {Mode.COMMITTABLES, *PER_SUBTASK_MODES}
        if self._subtask is None and not self._finishing:
            allowed = {Mode.COORDINATOR, Mode.COMMITTABLES}
        if state.mode not in allowed:
            why = "is finishing and contributes committables only" if self._finishing else f"writes no {state.mode}"
            raise InvalidState(f"{self._where} {why}; state {name!r} is {state.mode}", kind=ErrorKind.STATE_NOT_ALLOWED)
        if name in self._written:
            raise InvalidState(
                f"{self._where} writes state {name!r} twice; gather its rows and write once",
                kind=ErrorKind.STATE_NOT_ALLOWED,
            )
        self._written.add(name)
        return state

    def write(self, name: str, rows: RowData, *, delta: bool = False) -> Handle:
        """Write all rows of a state, or with ``delta`` a layer on top of the parent's.

        ``rows``: an Arrow table, a record batch or record batches, with the declared columns by
        name, in any order, and the format's own for the kind (SPEC.md section 5.1: ``_index``;
        ``_timestamp`` and ``_tag``; ``_sender`` …). Each row of a delta has ``_op``: 0
        (``UPSERT`` of ``schema``: this row, new or in place of the one with its row key), 1
        (``DELETE``: the row with this row key goes) or 2 (``CLEAR``: all rows of this key go; the
        other columns are null). Keyed rows may come in any order; if sorted by a column
        ``_key_group``, they need less memory. List-like modes keep the order. Raises
        ``InvalidState`` for rows that contradict the declaration or belong to another subtask.
        """
        state = self._claim(name)
        if delta and state.mode is not Mode.KEYED:
            raise InvalidState(f"state {name!r} is {state.mode}; only keyed state has layers")
        rows = _checked(rows, f"{self._where}, state {name!r}")
        context = self._context
        place = SegmentPlace(
            job_id=context.job_id,
            checkpoint_id=context.checkpoint_id,
            attempt_id=context.attempt_id,
            operator=context.graph.operator(self._operator),
            state=state,
            subtask=self._subtask,
            layer=1 if delta else 0,
            schema_id=state.current.id,
        )
        handle = write_segment(context.storage, place, rows, context.options)
        self._check_range(handle)
        if delta:
            self._carried.append(name)
            handle = handle._replace(layer=ON_TOP)
        # A delta or committables without rows need no handle; any other state does.
        if handle.rows or (not delta and state.mode is not Mode.COMMITTABLES):
            self._handles.append(handle)
        return handle

    def repeat(self, handle: Handle) -> None:
        """Report a state as an earlier snapshot of this run did, without writing it again.

        ``handle`` is what :meth:`write` returned then for the same subtask; else ``InvalidInput``.
        Its object must be the parent's, or under this checkpoint's id. Raises ``InvalidState`` for
        keyed state: use :meth:`carry`.
        """
        state = self._claim(handle.state)
        if (handle.operator, handle.subtask, handle.mode) != (self._operator, self._subtask, state.mode):
            raise InvalidInput(
                f"{self._where} cannot repeat a handle of {handle.mode} state {handle.state!r} of {handle.operator!r} "
                f"subtask {handle.subtask}; a subtask repeats what it has written itself"
            )
        if state.mode is Mode.KEYED:
            raise InvalidState(f"state {handle.state!r} is keyed; keyed state is carried")
        self._handles.append(handle)

    def _check_range(self, handle: Handle) -> None:
        """Refuse keyed rows that another subtask owns (SPEC.md section 5.3)."""
        operator = self._context.graph.operator(self._operator)
        ceiling, subtask = operator.max_parallelism, self._subtask
        if handle.mode != Mode.KEYED or ceiling is None or subtask is None:
            return
        if handle.first_group is None or handle.last_group is None:
            return
        first, last = key_group_range(subtask, parallelism=operator.parallelism, max_parallelism=ceiling)
        if handle.first_group < first or handle.last_group > last:
            raise InvalidState(
                f"{self._where} owns key groups {first} to {last}; its rows of state {handle.state!r} lie in "
                f"{handle.first_group} to {handle.last_group}. Route rows by WriteContext.owners",
                kind=ErrorKind.STATE_NOT_ALLOWED,
            )

    def carry(self, name: str) -> None:
        """Keep a keyed state as in the parent checkpoint, without writing it again.

        Raises ``InvalidState`` for a state that is not keyed.
        """
        if self._claim(name).mode is not Mode.KEYED:
            raise InvalidState(f"state {name!r} is {self._states[name].mode}; only keyed state is carried")
        self._carried.append(name)

    def empty(self, name: str) -> None:
        """Report a state without rows; it must be reported, too (SPEC.md section 4.6)."""
        state = self._claim(name)
        if state.mode is not Mode.COMMITTABLES:
            handle = Handle(self._operator, name, state.mode, self._subtask, 0, state.edge, state.current.id)
            self._handles.append(handle)

    def set_now(self, name: str, now_us: int) -> None:
        """Set the time in µs of the clock of a state whose rows expire (see ``Ttl``).

        The checkpoint has the lowest event time of its subtasks, or the latest processing time.
        Raises ``InvalidInput`` for a state whose rows do not expire.
        """
        if name not in self._states or self._states[name].ttl is None:
            raise InvalidInput(f"{self._where} has no state {name!r} whose rows expire", kind=ErrorKind.UNKNOWN_STATE)
        self._times[name] = now_us

    def snapshot(self) -> Snapshot:
        """Return the snapshot. Raises ``InvalidState`` if a declared state was not reported."""
        if self._finishing:
            due = set()
        elif self._subtask is None:
            due = {state.name for state in self._states.values() if state.mode is Mode.COORDINATOR}
        else:
            due = {state.name for state in self._states.values() if state.mode in PER_SUBTASK_MODES}
        missing = sorted(due - self._written)
        if missing:
            raise InvalidState(
                f"{self._where} has not reported {', '.join(map(repr, missing))}; write it, or say "
                f"empty({missing[0]!r})",
                kind=ErrorKind.STATE_MISSING,
                states=missing,
            )
        finishing = self._finishing and self._subtask is not None
        return Snapshot(
            self._operator,
            self._subtask,
            tuple(self._handles),
            tuple(self._carried),
            finishing=finishing,
            times=tuple(self._times.items()),
        )


def _checked(rows: RowData, where: str) -> pa.Table | Iterator[pa.RecordBatch]:
    """Return the rows as a table or a stream of batches. Raises ``InvalidInput``."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise _no_rows(where, rows)

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows:
            if not isinstance(batch, pa.RecordBatch):
                raise _no_rows(where, batch)
            yield batch

    return batches()


def _no_rows(where: str, found: object) -> InvalidInput:
    return InvalidInput(
        f"{where}: rows are an Arrow table, a record batch or record batches, not {type(found).__name__}; "
        "pa.table(...) makes one, and table.to_batches() makes batches"
    )


def snapshot_of(value: Snapshot | SnapshotWriter | bytes) -> Snapshot:
    """Return a snapshot from itself, its writer, or its bytes."""
    if isinstance(value, bytes):
        return Snapshot.from_bytes(value)
    if isinstance(value, SnapshotWriter):
        return value.snapshot()
    if not isinstance(value, Snapshot):
        raise InvalidInput(
            f"{value!r} is of type {type(value).__name__} and not a snapshot; give what SnapshotWriter.snapshot() "
            "returned, the writer itself, or Snapshot.to_bytes()"
        )
    return value
