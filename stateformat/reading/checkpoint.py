"""An open checkpoint: its record and manifest in memory, its segments read on demand.

Theory of operation. Opening costs two small reads whatever the size of the state. What is read afterwards is always a
table of *slices* (``schema.SLICE_SCHEMA``): rows of segments, for one new subtask. A :class:`ReadTask` is a few slices
with the handles that they need and nothing else; it is picklable and small, and is what a driver sends to a worker.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..errors import (
    REPAIR_ADVICE,
    CheckpointExpired,
    DamagedCheckpoint,
    ErrorKind,
    InvalidInput,
    NotFound,
)
from ..graph import JobGraph, OperatorId, Status, shortened
from ..manifest import Manifest, decode_manifest, read_manifest
from ..model import CheckpointId, Mode, Record, SchemaVersion, State
from ..record import RECORD_BYTES_MAX, decode_record
from ..schema import SLICE_SCHEMA, segment_schema
from ..storage import Storage

if TYPE_CHECKING:
    # For type checkers alone: the format finds its planner by an entry point and imports nothing above it.
    from stateformat.redistribution import RestorePlan

    from ..states import Layer


def load_record(storage: Storage, checkpoint_id: CheckpointId) -> Record:
    """The record under an id, verified (SPEC.md section 7.1). ``NotFound`` where there is none."""
    path = layout.record_path(checkpoint_id)
    try:
        data = storage.read_range(path, 0, RECORD_BYTES_MAX + 1)
    except FileNotFoundError as error:
        raise NotFound(
            f"no checkpoint {checkpoint_id} in {storage.url}; `ckpt history {storage.url}` lists what is there",
            checkpoint_id=checkpoint_id,
        ) from error
    record = decode_record(data.to_pybytes(), path=path)
    if record.checkpoint_id != checkpoint_id:
        raise DamagedCheckpoint(
            f"{path} in {storage.url} is the record of checkpoint {record.checkpoint_id}, not of {checkpoint_id}; "
            f"an object lies under another's name{REPAIR_ADVICE}",
            kind=ErrorKind.DAMAGED_RECORD,
            path=path,
        )
    return record


def missing_object(storage: Storage, record: Record, path: str, *, held: bool = False) -> Exception:
    """The error for an object of this checkpoint that is not there: expired or damaged (SPEC.md section 7.3).

    ``held``: a run goes on from it as from the newest. If it is the newest no more, the run has been overtaken and starts
    over, whatever stands under the record's name (a create may land once more after its id has expired).
    """
    try:
        now = load_record(storage, record.checkpoint_id)
        gone = now.attempt_id != record.attempt_id
    except NotFound:
        gone = True
    if not gone and held:
        gone = storage.list(layout.RECORDS)[-1].path > layout.record_path(record.checkpoint_id)
    if gone:
        return CheckpointExpired(
            f"checkpoint {record.checkpoint_id} in {storage.url} has expired while it was read ({path} is gone); "
            "open the newest",
            checkpoint_id=record.checkpoint_id,
        )
    return DamagedCheckpoint(
        f"{path} is missing from {storage.url}, though checkpoint {record.checkpoint_id} stands and names it; "
        f"`ckpt validate {storage.url}@{record.checkpoint_id}` lists everything that is wrong",
        kind=ErrorKind.OBJECT_MISSING,
        path=path,
    )


def load_manifest(storage: Storage, record: Record, *, held: bool = False) -> Manifest:
    """The manifest of a record, verified (SPEC.md section 7.1); ``held`` as in :func:`missing_object`."""
    try:
        data = read_manifest(storage, record.manifest)
    except FileNotFoundError as error:
        raise missing_object(storage, record, record.manifest.path, held=held) from error
    return decode_manifest(data, record.manifest)


@dataclass(frozen=True)
class ReadTask:
    """Slices of one state with the handles that they need: what one worker reads. Picklable and small."""

    storage: Storage
    record: Record
    handles: pa.Table
    slices: pa.Table
    held: bool = False

    def __repr__(self) -> str:
        place = f"{self.storage.url}@{self.record.checkpoint_id}"
        return f"ReadTask({shortened(place, 40)}, {self.state!r}, {self.slices.num_rows} slices)"

    @property
    def state(self) -> State:
        """The state that is read."""
        return self.record.states[0]

    def batches(self, *, as_schema: SchemaVersion | None = None, batch_rows: int = 131_072) -> Iterator[pa.RecordBatch]:
        """The rows, merged and evolved to the current schema (or ``as_schema``), as a stream.

        Columns: ``schema.segment_schema`` of the state: the format's own (``_key_group`` first for keyed state; no
        ``_op``), then the fields. Order: keyed by ``_key_group``, list-like modes in entry order. Raises
        ``DamagedCheckpoint`` or ``CheckpointExpired``, never gives wrong rows.
        """
        from .scan import read_slices

        with self._reading():
            yield from read_slices(
                self.storage,
                self.record,
                Manifest(self.handles),
                self.slices,
                as_schema=as_schema,
                batch_rows=batch_rows,
            )

    def layers(self, *, as_schema: SchemaVersion | None = None) -> Iterator[tuple[int, Iterator[pa.RecordBatch]]]:
        """The layers of a keyed state that have rows, lowest first, as they were written: the number of each, and its rows.

        Columns and order as :meth:`batches` has them; above layer 0 ``_op`` comes second (SPEC.md section 5.4). Take the rows of
        a layer before the next one. Raises as :meth:`batches`, and ``InvalidInput`` for a state that has no layers.
        """
        from .scan import read_layers

        with self._reading():
            found = read_layers(self.storage, self.record, Manifest(self.handles), self.slices, as_schema=as_schema)
            for layer, batches in found:
                yield layer, self._read(batches)

    def _read(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with self._reading():
            yield from batches

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Tells an object that has expired from one that is missing."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._missing(str(error.filename or error)) from error
        except DamagedCheckpoint as error:
            if error.kind is not ErrorKind.OBJECT_MISSING:
                raise
            raise self._missing(str(error.details.get("path", ""))) from error

    def _missing(self, path: str) -> Exception:
        return missing_object(self.storage, self.record, path, held=self.held)

    def table(self, *, as_schema: SchemaVersion | None = None) -> pa.Table:
        """The same as one table."""
        schema = segment_schema(
            replace(self.state, schemas=(*self.state.schemas[:-1], as_schema)) if as_schema else self.state
        )
        return pa.Table.from_batches(self.batches(as_schema=as_schema), schema=schema)


class Checkpoint:
    """A published checkpoint of a store. Thread-safe and picklable. Made by ``CheckpointStore.open`` and by permits.

    ``manifest`` is given where it is in memory already, by whoever has just published it; ``held`` says that a run builds
    on this checkpoint as on the newest.
    """

    def __init__(
        self, storage: Storage, record: Record, *, manifest: Manifest | None = None, held: bool = False
    ) -> None:
        self.storage = storage
        self.record = record
        self.held = held
        self._manifest = manifest
        self._reading = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self.storage, self.record, self.held))

    def __repr__(self) -> str:
        return f"Checkpoint({self.storage.url}@{self.record.checkpoint_id})"

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's id."""
        return self.record.checkpoint_id

    @property
    def graph(self) -> JobGraph:
        """The job graph, with what is finished."""
        return self.record.graph

    @property
    def states(self) -> tuple[State, ...]:
        """Every declared state."""
        return self.record.states

    @property
    def manifest(self) -> Manifest:
        """All handles; read and verified at first use."""
        # A lock of its own: that of functools.cached_property is shared by all checkpoints on Python 3.11.
        with self._reading:
            if self._manifest is None:
                self._manifest = load_manifest(self.storage, self.record, held=self.held)
            return self._manifest

    def lend_manifest(self, other: Checkpoint) -> None:
        """Give the same checkpoint, opened once more, the manifest that was read here, if any was: it is not read twice."""
        with self._reading:
            manifest = self._manifest
        if manifest is not None and other.record.manifest == self.record.manifest:
            with other._reading:
                other._manifest = manifest

    @property
    def handles(self) -> pa.Table:
        """The planning columns of the manifest (``schema.MANIFEST_SCHEMA`` without ``inline``), in its order."""
        return self.manifest.handles

    def read(self, operator: str, state: str, subtask: int | None = None) -> ReadTask:
        """Everything stored of one state, or of one subtask's part of it, as it was written."""
        declared = self.record.state(operator, state)
        handles = self.handles
        mine = pc.and_(pc.equal(handles["operator"], operator), pc.equal(handles["state"], state))
        self._check_sound(declared, handles.filter(mine))
        if subtask is not None:
            mine = pc.and_(mine, pc.fill_null(pc.equal(handles["subtask"], subtask), False))
        indices = pc.indices_nonzero(pc.and_(mine, pc.greater(handles["rows"], 0)))
        return self._task(declared, whole_slices(handles, indices))

    def layers(self, operator: str, state: str, subtask: int) -> tuple[Layer, ...]:
        """The layers of a subtask's part of a keyed state, lowest first: rows and stored bytes of each, ``version`` None.

        Layers without rows are left out. ``InvalidInput`` for a state that the checkpoint does not have.
        """
        from ..states import Layer

        slices = self.read(operator, state, subtask).slices
        sums = slices.group_by("layer").aggregate([("rows", "sum"), ("bytes", "sum")]).sort_by("layer")
        columns = (sums["rows_sum"].to_pylist(), sums["bytes_sum"].to_pylist())
        return tuple(Layer(None, rows, size_bytes) for rows, size_bytes in zip(*columns, strict=True))

    def should_fold(self, operator: str, state: str, subtask: int, *, rows: int) -> bool:
        """Whether the next checkpoint should have this keyed state whole rather than as a delta of ``rows`` rows.

        True where the deltas would come to half of the base, where there are 16 of them already, and where the state has no
        rows yet. Every layer costs each read and each publish; a state that is written whole starts again with one.
        """
        from ..states import should_fold

        return should_fold(self.layers(operator, state, subtask), rows)

    def plan_restore(
        self, topology: JobGraph, *, states: Sequence[State] = (), drop: Collection[str] = ()
    ) -> RestorePlan:
        """Who gets what in ``topology``: a ``redistribution.RestorePlan``, which opens no segment and can be printed.

        ``states`` are those that the new program declares; none: whatever the checkpoint has. ``drop`` names what is given
        up: an operator that is gone (``uid``), a state (``uid/state``), or a column (``uid/state.column``). What does not
        fit is a refusal in the plan, which ``plan.check()`` raises.

        Raises ``InvalidInput``, the caller's fault, for a ``drop`` that names nothing, ``DamagedCheckpoint`` for a manifest
        that contradicts its record.
        """
        from stateformat.redistribution import plan_restore

        return plan_restore(self, topology, states=states, drop=drop)

    def restore(self, plan: RestorePlan, operator: str, subtask: int | None) -> Mapping[str, ReadTask]:
        """What one new subtask gets by a plan: for every state of its operator a task to read it, by state name.

        ``subtask`` None is the coordinator (and the committables, which the driver commits before anything starts).
        Empty for an operator that is not started, being fully finished, and for one that the checkpoint does not know.
        Raises ``RestoreRefused`` when the plan refuses, ``InvalidInput`` for a plan of another checkpoint, and for an
        operator or subtask that the topology does not have.
        """
        self._check_plan(plan)
        saved = self.record.graph.by_uid.get(OperatorId(operator))
        if operator not in plan.by_operator:
            raise InvalidInput(
                f"neither the checkpoint nor the topology has an operator {operator!r}; planned are "
                f"{', '.join(plan.by_operator) or 'none'}",
                kind=ErrorKind.UNKNOWN_OPERATOR,
            )
        parallelism = plan.by_operator[operator].parallelism
        finished = saved is not None and saved.status is Status.FULLY_FINISHED
        if subtask is not None and not (0 <= subtask < parallelism or finished):
            raise InvalidInput(
                f"operator {operator!r} is planned at parallelism {parallelism}; there is no subtask {subtask}",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
        tasks = {}
        for state in self.record.states:
            driver_owned = state.mode in (Mode.COORDINATOR, Mode.COMMITTABLES)
            if state.operator != operator or driver_owned is not (subtask is None):
                continue
            if finished and state.mode is not Mode.COMMITTABLES:
                continue
            tasks[state.name] = self._task(state, plan.slices_of(operator, subtask, state.name))
        return tasks

    def carried(self, plan: RestorePlan) -> pa.Table:
        """What ``begin(carried=...)`` takes after a restore by ``plan``: the keyed state, cut for its new subtasks.

        Handles in the manifest's columns with ``inline``, all layers of them; a subtask without rows has an empty one. No
        segment is opened. Raises as :meth:`restore` does, and whatever reading the manifest raises.
        """
        from ..assembly import carried_by_plan

        self._check_plan(plan)
        states = [
            state
            for state in self.record.states
            if not {state.operator, f"{state.operator}/{state.name}"} & {*plan.drop}
        ]
        started = {uid: operator.parallelism for uid, operator in plan.by_operator.items() if operator.starts}
        return carried_by_plan(self.manifest.full(), plan.assigned, states, started)

    def _check_plan(self, plan: RestorePlan) -> None:
        if plan.source != self.record.ref:
            raise InvalidInput(
                f"the plan is for checkpoint {plan.source.checkpoint_id} of attempt {plan.source.attempt_id}, not for "
                f"{self!r} of attempt {self.record.attempt_id}; plan again"
            )
        plan.check()

    def read_slices(self, slices: pa.Table) -> ReadTask:
        """A task for any slices of one state (``schema.SLICE_SCHEMA``, at least one row)."""
        first = slices.slice(0, 1).to_pylist()[0]
        return self._task(self.record.state(first["operator"], first["state"]), slices)

    def _check_sound(self, state: State, handles: pa.Table | None = None) -> None:
        """``DamagedCheckpoint`` for a declaration or handles by which some rows would be read wrong, twice or not at all."""
        from ..rules import check_handles, check_states

        problems = check_states(self.record.graph, (state,))
        if handles is not None:
            problems += check_handles(self.record.graph, (state,), handles)
        if problems:
            raise DamagedCheckpoint(
                f"{'; '.join(problem.message for problem in problems[:4])}; `ckpt validate {self.storage.url}@{self.id}` "
                "lists everything that is wrong",
                kind=problems[0].kind,
                operator=state.operator,
                state=state.name,
            )

    def _task(self, state: State, slices: pa.Table) -> ReadTask:
        """Only what the slices name: their handles, renumbered, and one operator and state of the record."""
        self._check_sound(state)
        used, renumbered = _renumber(slices["handle"])
        handles = self.manifest.rows(used)
        column = slices.schema.get_field_index("handle")
        operator = self.record.graph.operator(state.operator)
        record = replace(self.record, graph=JobGraph((operator,)), states=(state,), properties={})
        return ReadTask(self.storage, record, handles, slices.set_column(column, "handle", renumbered), self.held)


def _reopened(storage: Storage, record: Record, held: bool) -> Checkpoint:
    return Checkpoint(storage, record, held=held)


def _renumber(handles: pa.ChunkedArray) -> tuple[pa.Array, pa.Array]:
    """The distinct handle numbers, in order of first use, and each slice's position among them."""
    encoded = pc.dictionary_encode(handles).combine_chunks()
    return encoded.dictionary, encoded.indices.cast(pa.int64())


def whole_slices(handles: pa.Table, indices: pa.Array) -> pa.Table:
    """Slices that are whole handles, for their own subtasks."""
    chosen = handles.take(indices)
    share = pc.divide(pc.cast(chosen["rows"], pa.float64()), pc.cast(chosen["segment_rows"], pa.float64()))
    stored = pc.cast(pc.round(pc.multiply(share, pc.cast(chosen["size_bytes"], pa.float64()))), pa.int64())
    return pa.table(
        [
            chosen[name]
            if name in chosen.column_names
            else (pc.cast(indices, pa.int64()) if name == "handle" else stored)
            for name in SLICE_SCHEMA.names
        ],
        schema=SLICE_SCHEMA,
    )


__all__ = ["Checkpoint", "ReadTask", "load_manifest", "load_record", "missing_object", "whole_slices"]
