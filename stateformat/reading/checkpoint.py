"""An open checkpoint: of a store, or of another system, which ``backends.foreign`` has.

Opening one of a store costs two small reads, whatever the size of the state: its record and
manifest are in memory, its segments are read on demand. Later reads are described by a table of
slices (``schema.SLICE_SCHEMA``): rows of segments, for one new subtask.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import DamagedCheckpoint, ErrorKind, InvalidInput
from ..graph import JobGraph, OperatorId, Status
from ..manifest import Manifest, carried_by_plan
from ..model import Capability, CheckpointId, Mode, Record, State
from ..storage import Storage
from .loading import load_manifest, load_outline

if TYPE_CHECKING:
    from stateformat.redistribution import Plannable, RestorePlan

    from ..findings import Finding
    from ..states import Layer
    from .rows import StateRows
    from .task import ReadTask
    from .whole_states import WholeStates


class Checkpoint(ABC):
    """A checkpoint: its record, what its states hold, and their rows. Thread-safe and picklable.

    ``CheckpointStore.open`` returns it, for a store and for the folder of another system.
    """

    capabilities: frozenset[Capability] = frozenset()
    system: str | None = None
    """What another system's checkpoint is, in words: "a Flink savepoint"; None for a store's."""
    query: str = ""
    """The address of a query of which `ckpt rescale` makes a copy that its system goes on from."""
    notes: tuple[Any, ...] = ()
    """What of another system's is renamed, opaque, refused or found elsewhere."""

    def __init__(self, storage: Storage, record: Record) -> None:
        self.storage = storage
        self.record = record

    def __repr__(self) -> str:
        return f"Checkpoint({self.storage.url}@{self.record.checkpoint_id})"

    def _repr_html_(self) -> str:
        """Return the job graph and states, for notebooks; reads the manifest but no segment."""
        import time

        from ..documents import checkpoint_document
        from ..pages.checkpoint import checkpoint_page
        from ..pages.html import notebook

        return notebook(
            f"Checkpoint {self.storage.url}@{self.id}",
            lambda: checkpoint_page(checkpoint_document(self), time.time_ns() // 1000),
        )

    @property
    def id(self) -> CheckpointId:
        """The checkpoint's id."""
        return self.record.checkpoint_id

    @property
    def graph(self) -> JobGraph:
        """The job graph, with the status of each operator."""
        return self.record.graph

    @property
    def states(self) -> tuple[State, ...]:
        """Every declared state."""
        return self.record.states

    @property
    @abstractmethod
    def handles(self) -> pa.Table:
        """The planning columns of the manifest: ``schema.MANIFEST_SCHEMA`` without ``inline``.

        May read data files of another system, to count rows.
        """

    @property
    def outline(self) -> pa.Table:
        """``handles``, but rows are null where another system's metadata does not count them."""
        return self.handles

    @property
    def counted(self) -> pa.Table:
        """``handles`` where counting reads few bytes, else ``outline``."""
        return self.outline

    @abstractmethod
    def read(self, operator: str, state: str, subtask: int | None = None) -> ReadTask:
        """Return a task that reads one state, or one subtask's part of it, as it was written.

        ``operator`` is a uid, or the name of one operator. Raises ``InvalidInput`` for an unknown
        operator or state, and ``DamagedCheckpoint`` if its declaration or handles are invalid.
        """

    @abstractmethod
    def task_of(self, state: State, slices: pa.Table) -> ReadTask:
        """Return a task for slices of ``handles``, all of one state; there may be none."""

    @abstractmethod
    def of_store(self, why: str) -> StoreCheckpoint:
        """Return this checkpoint as one of a store, whose segments others may refer to.

        Raises ``InvalidInput`` for another system's, which ``why`` says more about.
        """

    def planned_by(self, *, to_show: bool) -> Plannable:  # noqa: ARG002 - a store reads less to show
        """Return what :meth:`plan_restore` plans by."""
        return self

    def carried(self, plan: RestorePlan) -> pa.Table:
        """Return the keyed state that ``begin(carried=...)`` takes after a restore by ``plan``.

        These are the handles of all layers, in the columns of ``schema.MANIFEST_SCHEMA``, cut for
        the new subtasks; a subtask without rows has an empty handle. Opens no segment. Raises
        ``RestoreRefused`` if the plan has refusals, ``InvalidInput`` for one of another checkpoint.
        """
        own = self.of_store("whose files no checkpoint of ours refers to")
        plan.check(self.record.ref)
        states = [state for state in self.record.states if not plan.gives_up(state.operator, state.name)]
        started = {uid: operator.parallelism for uid, operator in plan.by_operator.items() if operator.starts}
        return carried_by_plan(own.manifest.full(), plan.assigned, states, started)

    def inline_bytes(self) -> int:
        """Return the bytes of the distinct inline segments, before the manifest compresses them."""
        return 0

    def with_expired(self) -> Self:
        """Return the same checkpoint, with rows that had expired shown too."""
        if all(state.ttl_now_us is None for state in self.states):
            return self
        found = copy(self)
        # Without a time, nothing has expired.
        states = tuple(replace(state, ttl_now_us=None) for state in self.states)
        found.record = replace(self.record, states=states)
        return found

    def operator_uid(self, given: str) -> str:
        """Return ``given`` if it is a uid, or the uid of the one operator with this name.

        Raises ``InvalidInput`` if no operator, or more than one, has this name.
        """
        # A damaged record may have a state of an operator that its graph lacks; reading reports it.
        if given in self.graph.by_uid or any(state.operator == given for state in self.states):
            return given
        uids = [operator.uid for operator in self.graph.operators if operator.name == given]
        if len(uids) == 1:
            return uids[0]
        if uids:
            message = f"{len(uids)} operators are named {given!r}; give the uid of one: {', '.join(uids)}"
        else:
            known = _known_operators(self.graph, given)
            message = f"checkpoint {self.id} has no operator {given!r}, by uid or by name; {known}"
        raise InvalidInput(message, kind=ErrorKind.UNKNOWN_OPERATOR, operator=given)

    def without_state(self, uid: str) -> str:
        """Say that an operator has no state left, as it has finished; empty if it may have some."""
        operator = self.graph.by_uid.get(OperatorId(uid))
        finished = operator is not None and operator.status is Status.FULLY_FINISHED
        return f"operator {uid!r} has finished; it has no state in checkpoint {self.id}" if finished else ""

    def state(self, operator: str | State, state: str | None = None) -> StateRows:
        """Return the rows of one state, for any Arrow tool: ``duckdb.sql("from rows")``.

        Takes an operator, by uid or by name, and the name of a state, or one of :attr:`states`.
        Raises as :meth:`read` does.
        """
        from .rows import StateRows

        given, name = (operator.operator, operator.name) if isinstance(operator, State) else (operator, state)
        if not isinstance(given, str) or not isinstance(name, str | None):
            raise InvalidInput(
                f"a state is named by {given!r} and {name!r}; give the operator and the state as text, or one of "
                "checkpoint.states",
                kind=ErrorKind.UNKNOWN_STATE,
            )
        uid = self.operator_uid(given)
        if name is None:
            names = [declared.name for declared in self.states if declared.operator == uid]
            raise InvalidInput(
                f"operator {uid!r} is given without a state; it has {', '.join(map(repr, names)) or 'none'}",
                kind=ErrorKind.UNKNOWN_STATE,
            )
        task = self.read(uid, name)
        if task.state.mode is Mode.BROADCAST:
            # Every subtask has the same rows; read those of the first that reported some.
            first = pc.min(task.slices["subtask"]).as_py()
            task = task if first is None else self.read(uid, name, first)
        return StateRows.of(task)

    def plan_restore(
        self, topology: JobGraph, *, states: Sequence[State] = (), drop: Collection[str] = (), to_show: bool = False
    ) -> RestorePlan:
        """Plan what each subtask in ``topology`` reads. Opens no segment.

        ``states``: what the new program declares; if empty, what the checkpoint has. ``drop``:
        what to discard: an operator that is gone (``uid``), a state (``uid/state``) or a column
        (``uid/state.column``). ``to_show``: the plan is only shown, not restored. Then most of the
        manifest is not kept, which needs a third of the memory.

        What does not fit is a refusal in the plan, which ``plan.check()`` raises. This method
        raises ``InvalidInput`` for a ``drop`` that names nothing, and ``DamagedCheckpoint`` for a
        manifest that contradicts its record.
        """
        from stateformat.redistribution import plan_restore

        return plan_restore(self.planned_by(to_show=to_show), topology, states=states, drop=drop)

    def restore(self, plan: RestorePlan, operator: str, subtask: int | None) -> Mapping[str, ReadTask]:
        """Return what one new subtask reads by a plan: a task for each state, by name.

        ``subtask`` None means the coordinator's state and the committables, which the driver reads.
        The result is empty for a new operator; one that has fully finished has committables only.

        Raises ``RestoreRefused`` if the plan has refusals, and ``InvalidInput`` for a plan of
        another checkpoint and for an operator or subtask that the topology does not have.
        """
        plan.check(self.record.ref)
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
                f"operator {operator!r} is planned at parallelism {parallelism}; it has no subtask {subtask}",
                kind=ErrorKind.INVALID_PARALLELISM,
            )
        tasks = {}
        for state in self.record.states:
            driver_owned = state.mode in (Mode.COORDINATOR, Mode.COMMITTABLES)
            if state.operator != operator or driver_owned is not (subtask is None):
                continue
            if finished and state.mode is not Mode.COMMITTABLES:
                continue
            tasks[state.name] = self.task_of(state, plan.slices_of(operator, subtask, state.name))
        return tasks

    def read_slices(self, slices: pa.Table) -> ReadTask:
        """Return a task for slices of one state (``schema.SLICE_SCHEMA``, at least one row)."""
        first = slices.slice(0, 1).to_pylist()[0]
        return self.task_of(self.record.state(first["operator"], first["state"]), slices)

    def record_for(self, state: State) -> Record:
        """Return what a worker needs of the record to read one state."""
        operator = self.record.graph.operator(state.operator)
        return replace(self.record, graph=JobGraph((operator,)), states=(state,), properties={})


class StoreCheckpoint(Checkpoint):
    """A published checkpoint of a store.

    ``CheckpointStore.open`` and permits return it. ``manifest``: pass it if it is already in
    memory. ``bound_to_run``: whether a run resumes from this checkpoint as the newest.
    """

    capabilities = frozenset(Capability)

    def __init__(
        self, storage: Storage, record: Record, *, manifest: Manifest | None = None, bound_to_run: bool = False
    ) -> None:
        super().__init__(storage, record)
        self.bound_to_run = bound_to_run
        self._manifest = manifest
        self._reading = Lock()
        self._found_whole: WholeStates | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(StoreCheckpoint, bound_to_run=self.bound_to_run), (self.storage, self.record)

    @property
    def manifest(self) -> Manifest:
        """All handles, read and verified at first use."""
        # Not cached_property: on Python 3.11 all checkpoints would share one lock.
        with self._reading:
            if self._manifest is None:
                self._manifest = load_manifest(self.storage, self.record, bound_to_run=self.bound_to_run)
            return self._manifest

    @property
    def _whole(self) -> WholeStates:
        """What reads whole states."""
        if self._found_whole is None:
            from .whole_states import WholeStates

            self._found_whole = WholeStates(self.graph, self.manifest)
        return self._found_whole

    def lend_manifest(self, other: StoreCheckpoint) -> None:
        """Pass the manifest read here to ``other``, the same checkpoint opened again."""
        with self._reading:
            manifest = self._manifest
        if manifest is not None and other.record.manifest == self.record.manifest:
            with other._reading:
                other._manifest = manifest

    def with_expired(self) -> Self:
        """See ``Checkpoint.with_expired``; the manifest is not read again."""
        found = super().with_expired()
        self.lend_manifest(found)
        return found

    @property
    def handles(self) -> pa.Table:
        """See ``Checkpoint.handles``."""
        return self.manifest.handles

    def inline_bytes(self) -> int:
        """See ``Checkpoint.inline_bytes``."""
        return self.manifest.inline_bytes()

    def of_store(self, why: str) -> StoreCheckpoint:  # noqa: ARG002 - what another system's says
        """Return this checkpoint."""
        return self

    def read(self, operator: str, state: str, subtask: int | None = None) -> ReadTask:
        """See ``Checkpoint.read``."""
        from .task import SegmentTask  # Inspecting a checkpoint reads no rows.

        operator = self.operator_uid(operator)
        declared = self.record.state(operator, state)
        whole = self._whole.of(declared)
        self._check_sound(declared, whole.problems())
        handles, slices, values = whole.read(subtask)
        return SegmentTask(self.storage, self.record_for(declared), handles, slices, self.bound_to_run, values)

    def layers(self, operator: str, state: str, subtask: int) -> tuple[Layer, ...]:
        """Return the layers of a subtask's part of a keyed state, lowest first.

        Each has its rows and stored bytes; its ``version`` is None. Layers without rows are left
        out. Raises as :meth:`read` does.
        """
        from ..states import Layer

        slices = self.read(operator, state, subtask).slices
        sums = slices.group_by("layer").aggregate([("rows", "sum"), ("bytes", "sum")]).sort_by("layer")
        columns = (sums["rows_sum"].to_pylist(), sums["bytes_sum"].to_pylist())
        return tuple(Layer(None, rows, size_bytes) for rows, size_bytes in zip(*columns, strict=True))

    def should_fold(self, operator: str, state: str, subtask: int, *, rows: int) -> bool:
        """Return whether to write this keyed state whole next, not as a delta of ``rows`` rows.

        True if the deltas would reach half the size of the base, if there are 16 of them already,
        or if the state has no rows yet.
        """
        from ..states import should_fold

        return should_fold(self.layers(operator, state, subtask), rows)

    def planned_by(self, *, to_show: bool) -> Plannable:
        """Return what a plan needs; without the rest of the manifest if it is only shown."""
        with self._reading:
            if self._manifest is not None or not to_show:
                return self
        return _Outline(self.record, load_outline(self.storage, self.record, bound_to_run=self.bound_to_run))

    def _check_sound(self, state: State, of_handles: Iterable[Finding] = ()) -> None:
        """Raise ``DamagedCheckpoint`` for a declaration or handles that would give wrong rows."""
        from ..rules import check_states

        problems = [*check_states(self.record.graph, (state,)), *of_handles]
        if problems:
            faults = "; ".join(problem.message for problem in problems[:4])
            raise DamagedCheckpoint(
                f"{faults}; `ckpt validate {self.storage.url}@{self.id}` lists everything that is wrong",
                kind=problems[0].kind,
                operator=state.operator,
                state=state.name,
            )

    def task_of(self, state: State, slices: pa.Table) -> ReadTask:
        """See ``Checkpoint.task_of``."""
        from .task import SegmentTask

        self._check_sound(state)
        numbers = pc.dictionary_encode(slices["handle"]).combine_chunks()
        handles = self.manifest.rows(numbers.dictionary)
        column = slices.schema.get_field_index("handle")
        slices = slices.set_column(column, "handle", numbers.indices.cast(pa.int64()))
        return SegmentTask(self.storage, self.record_for(state), handles, slices, self.bound_to_run)


@dataclass(frozen=True)
class _Outline:
    """What the rules of redistribution need; see ``manifest.decode_outline``."""

    record: Record
    handles: pa.Table
    capabilities = StoreCheckpoint.capabilities
    query: ClassVar = ""


_OPERATORS_LISTED: Final = 20


def _known_operators(graph: JobGraph, given: str) -> str:
    """Return the end of a sentence: which operators there are, and which was probably meant."""
    from difflib import get_close_matches

    uids = {text: one.uid for one in graph.operators for text in (one.name, one.uid) if text}
    close = get_close_matches(given, uids, n=1)
    meant = f"did you mean {uids[close[0]]!r}? It" if close else "it"
    listed = ", ".join(
        one.uid if one.name in ("", one.uid) else f"{one.uid} ({one.name})"
        for one in graph.operators[:_OPERATORS_LISTED]
    )
    left = len(graph.operators) - _OPERATORS_LISTED
    return f"{meant} has {listed or 'none'}{f' and {left:,} more' if left > 0 else ''}"
