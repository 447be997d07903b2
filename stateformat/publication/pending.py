"""A pending checkpoint, from its beginning to its permit.

First what is checked when it begins, then which snapshots it still lacks, then the checkpoint.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .. import __version__, manifest as manifests, model, paths as layout
from ..errors import CheckpointExpired, DamagedCheckpoint, ErrorKind, InvalidInput, InvalidState, PublishConflict
from ..findings import Finding, all_messages
from ..formats import refuse_foreign
from ..graph import JobGraph, Operator, OperatorId, Status, SubtaskSet, all_of
from ..history import find_record, record_exists, record_ids
from ..keys import DEFAULT_KEY_HASH, key_group_count
from ..manifest import BATCH_ROWS
from ..model import RESERVED_PROPERTIES, RUN_PROPERTIES, Mode, ParentRef, Record, State
from ..reading import StoreCheckpoint, load_manifest
from ..record import encode_record, optional_features, required_features
from ..rules import check_content, check_duties, check_graph, check_states
from ..segments import WriteOptions
from ..snapshot import Snapshot, SnapshotWriter, WriteContext, snapshot_of
from ..states import warn_of_layers
from ..storage import Storage
from ..ttl import clock_us
from .protocol import CommitPermit, Step, check_present, conflict, create_record, permit

# ---- what a beginning demands --------------------------------------------------------------------
#
# Check a checkpoint when it begins, before any state is written.


def check_arguments(
    graph: JobGraph,
    states: Iterable[State],
    job_id: str,
    job_name: str,
    properties: Mapping[str, str],
    *,
    is_new: bool,
) -> tuple[State, ...]:
    """Return the states as a tuple. Raises ``InvalidInput`` for an argument of the wrong type."""
    if not isinstance(graph, JobGraph):
        raise InvalidInput(
            f"the graph is of type {type(graph).__name__}; give a JobGraph", kind=ErrorKind.INVALID_GRAPH
        )
    for what, text in (("job id", job_id), ("job name", job_name)):
        if not isinstance(text, str):
            raise InvalidInput(f"the {what} is {text!r}; give text")
    if not job_id:
        raise InvalidInput("the job id is empty; a store belongs to one job, by its id")
    if not isinstance(properties, Mapping):
        raise InvalidInput(f"properties are of type {type(properties).__name__}; give a mapping of text to text")
    for name, value in properties.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidInput(f"property {name!r} is {value!r}; names and values are text, so give {str(value)!r}")
        if is_new and name.startswith(RESERVED_PROPERTIES) and name not in RUN_PROPERTIES:
            raise InvalidInput(
                f"property {name!r} begins with {RESERVED_PROPERTIES!r}, which the format keeps for itself; choose "
                "another name"
            )
    return all_of(State, states, "the states of a checkpoint")


def check_beginning(graph: JobGraph, states: Sequence[State], parent: JobGraph | None, *, is_new: bool) -> None:
    """Raise ``InvalidInput`` with every fault of a complete graph and its states."""
    known = _with_finished(graph, parent)
    problems = [*check_graph(known), *check_states(known, states), *(check_duties(graph) if is_new else ())]
    if problems:
        raise InvalidInput(
            f"no checkpoint can begin with this job: {all_messages(problems)}",
            kind=problems[0].kind,
            problems=tuple(problems),
        )


def _with_finished(graph: JobGraph, parent: JobGraph | None) -> JobGraph:
    """Return the graph with the operators that had fully finished in ``parent`` finished."""
    changed = {}
    for before in parent.operators if parent else ():
        operator = graph.by_uid.get(before.uid)
        if operator is not None and operator.parallelism > 0 and before.status is Status.FULLY_FINISHED:
            ended = SubtaskSet.all(operator.parallelism)
            changed[operator.uid] = replace(operator, finished=ended, finishing=SubtaskSet())
    return graph.with_operators(changed)


# ---- snapshots that are missing ------------------------------------------------------------------
#
# The graph of a pending checkpoint, and the snapshots it still lacks: pure functions.


Finished = Mapping[str, SubtaskSet]
Snapshots = Mapping[tuple[str, int | None], Snapshot]


def complete_graph(graph: JobGraph, parent: JobGraph | None) -> JobGraph:
    """Return the graph with missing values taken from the parent, else from the defaults."""
    before = parent.by_uid if parent else {}
    changed = {}
    for operator in graph.operators:
        saved = before.get(operator.uid)
        ceiling, key_hash = operator.max_parallelism, operator.key_hash
        if ceiling is None:
            ceiling = saved.max_parallelism if saved else key_group_count(operator)
        if key_hash is None:
            key_hash = saved.key_hash if saved else DEFAULT_KEY_HASH
        changed[operator.uid] = replace(operator, max_parallelism=ceiling, key_hash=key_hash, pinned=False)
    return graph.with_operators(changed)


def graph_with_statuses(graph: JobGraph, finished: Finished, snapshots: Snapshots) -> JobGraph:
    """Return the graph with finished and finishing subtasks. Raises ``InvalidState``."""
    reported, waiting = _reported(snapshots)
    changed = {}
    for operator in graph.operators:
        uid = operator.uid
        ended = operator.finished | finished.get(uid, SubtaskSet())
        ending = operator.finishing | SubtaskSet.of(waiting[uid])
        for one, other, subtasks in (
            ("has finished", "is finishing", _common(ended, ending)),
            ("has finished", "has reported a snapshot of a running one", _common(ended, reported[uid])),
            ("is finishing", "has reported a snapshot of a running one", _common(ending, reported[uid])),
        ):
            if subtasks:
                raise InvalidState(
                    f"subtask {subtasks} of {uid!r} {one}, as the checkpoint was told, and also {other}; one is wrong",
                    kind=ErrorKind.STATUS_CONTRADICTION,
                    operator=uid,
                )
        changed[uid] = replace(operator, finished=ended, finishing=ending)
    return graph.with_operators(changed)


def _reported(snapshots: Snapshots) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the subtasks by operator that have reported as running, and as finishing."""
    running: dict[str, list[int]] = defaultdict(list)
    finishing: dict[str, list[int]] = defaultdict(list)
    for (uid, subtask), snapshot in snapshots.items():
        if subtask is not None:
            (finishing if snapshot.finishing else running)[uid].append(subtask)
    return running, finishing


def _common(one: SubtaskSet, other: Iterable[int]) -> SubtaskSet:
    return SubtaskSet.of(set(one).intersection(other)) if one else one


class Outstanding(NamedTuple):
    """The subtasks of an operator, and perhaps its coordinator, whose snapshots are missing."""

    operator: OperatorId
    subtasks: SubtaskSet
    coordinator: bool = False

    def __str__(self) -> str:
        who = [f"subtasks {self.subtasks}"] if self.subtasks else []
        who += ["the coordinator"] if self.coordinator else []
        return f"{' and '.join(who)} of {self.operator!r}"


def outstanding(
    graph: JobGraph, states: Iterable[State], finished: Finished, snapshots: Snapshots
) -> Iterator[Outstanding]:
    """Yield the operators whose snapshots are missing (``PendingCheckpoint.outstanding``)."""
    modes: dict[str, set[Mode]] = defaultdict(set)
    for state in states:
        modes[state.operator].add(state.mode)
    running, waiting = _reported(snapshots)
    for operator in graph.operators:
        uid = operator.uid
        if not modes[uid]:
            continue
        owes = np.ones(operator.parallelism, np.bool_)
        for ended in (operator.finished, operator.finishing, finished.get(uid, SubtaskSet())):
            for first, last in ended.ranges:
                owes[first : last + 1] = False
        owes[waiting[uid]] = False
        coordinator = Mode.COORDINATOR in modes[uid] and bool(owes.any()) and (uid, None) not in snapshots
        owes[running[uid]] = False
        missing = SubtaskSet.of(np.flatnonzero(owes).tolist() if modes[uid] - {Mode.COORDINATOR} else ())
        if missing or coordinator:
            yield Outstanding(uid, missing, coordinator)


def carried_keys(snapshots: Snapshots) -> dict[tuple[str, str], list[int | None]]:
    """Return the subtasks that carry each (operator, state)."""
    carrying: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for snapshot in snapshots.values():
        for state in snapshot.carried:
            carrying[snapshot.operator, state].append(snapshot.subtask)
    return carrying


# ---- pending checkpoints -------------------------------------------------------------------------
#
# A pending checkpoint: it takes snapshots, and publishes a record for a permit.
#
# Its id and parent are fixed when it begins. Snapshots arrive in any order, from any thread, some
# of them twice. Publishing collects the handles, checks them, writes the manifest, and passes the
# record to ``protocol``. A checkpoint may refer only to its own objects and to those of its parent
# and source (SPEC.md sections 8.2 and 9); every publication checks that, and deletion relies on it.


logger = logging.getLogger(__name__)

_CHUNKS_MAX: Final = 8


class Replaced(NamedTuple):
    """The damaged newest checkpoint that a repair replaces; ``ref`` is None if it is unknown."""

    checkpoint_id: model.CheckpointId
    ref: ParentRef | None


@dataclass(frozen=True)
class Draft:
    """What is known of a checkpoint when it begins."""

    job_id: model.JobId
    graph: JobGraph
    states: tuple[State, ...]
    parent: StoreCheckpoint | None = None
    """The parent, maybe in another store; None for the first of a job and for a repair."""
    job_name: str = ""
    kind: model.CheckpointKind = model.CheckpointKind.CHECKPOINT
    source: ParentRef | None = None
    """The checkpoint whose content this one has; it must still exist when the record is created."""
    rescaled_from: model.RescaledFrom | None = None
    stop: model.Stop | None = None
    properties: Mapping[str, str] = field(default_factory=dict)
    options: WriteOptions = field(default_factory=WriteOptions)
    carried: pa.Table | None = None
    """Handles to carry instead of the parent's, in the manifest's columns."""
    replaced: Replaced | None = None
    """Set only for a repair."""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Draft({self.kind} of job {self.job_id!r} after {self.parent!r})"

    @classmethod
    def with_content(cls, record: Record, **rest: Any) -> Draft:
        """Return the draft of a checkpoint with the content of another one."""
        return cls(
            record.job_id,
            record.graph,
            record.states,
            job_name=record.job_name,
            rescaled_from=record.rescaled_from,
            **rest,
        )


class PendingCheckpoint:
    """A checkpoint that has begun. Thread-safe. Publish it once; dropping it needs no call."""

    def __init__(self, storage: Storage, draft: Draft, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._storage = storage
        before = draft.parent.graph if draft.parent else None
        self._draft = replace(draft, graph=complete_graph(draft.graph, before))
        self._sleep = sleep
        self._lock = threading.Lock()
        self._published = False
        self._snapshots: dict[tuple[str, int | None], Snapshot] = {}
        self._tables: list[pa.Table] = []
        self._finished: dict[str, SubtaskSet] = defaultdict(SubtaskSet)
        newest = draft.replaced.checkpoint_id if draft.replaced else draft.parent.id if draft.parent else 0
        self.checkpoint_id = model.CheckpointId(newest + 1)
        self.attempt_id: model.AttemptId = model.new_attempt_id()

    def __repr__(self) -> str:
        return f"PendingCheckpoint({self._storage.url}@{self.checkpoint_id}, attempt {self.attempt_id})"

    @property
    def ref(self) -> ParentRef:
        """The id and attempt by which others name it once it is published."""
        return ParentRef(self.checkpoint_id, self.attempt_id)

    @property
    def graph(self) -> JobGraph:
        """The job graph with every max parallelism and key hash filled in."""
        return self._draft.graph

    @property
    def context(self) -> WriteContext:
        """What workers need to write their snapshots. Picklable."""
        draft = self._draft
        return WriteContext(
            self._storage, draft.job_id, self.checkpoint_id, self.attempt_id, draft.graph, draft.states, draft.options
        )

    @property
    def outstanding(self) -> tuple[Outstanding, ...]:
        """The operators with missing snapshots, in the order of the graph.

        A running subtask owes one if its operator has state that subtasks write, a coordinator if
        it has state and its operator has not fully finished. After :meth:`add_handles`: none.
        """
        with self._lock:
            return self._outstanding()

    def _outstanding(self) -> tuple[Outstanding, ...]:
        if self._tables:
            return ()
        draft = self._draft
        return tuple(outstanding(draft.graph, draft.states, self._finished, self._snapshots))

    def add(self, snapshot: Snapshot | SnapshotWriter | bytes) -> bool:
        """Take the snapshot of a subtask or coordinator; return False if there is one already.

        A ``finishing`` snapshot marks its subtask as finishing. Raises ``InvalidInput`` for an
        operator that the graph lacks and for a value that is no snapshot, ``InvalidState`` for a
        subtask outside the parallelism.
        """
        taken = snapshot_of(snapshot)
        operator = self._draft.graph.operator(taken.operator)
        if taken.subtask is not None:
            _check_subtasks(operator, (taken.subtask,))
        with self._lock:
            self._check_unpublished()
            return self._snapshots.setdefault((taken.operator, taken.subtask), taken) is taken

    def add_handles(self, handles: pa.Table) -> None:
        """Take the handles of every subtask, in the columns of ``schema.MANIFEST_SCHEMA``."""
        if not isinstance(handles, pa.Table):
            raise InvalidInput(f"handles are an Arrow table in the manifest's columns, not {type(handles).__name__}")
        with self._lock:
            self._check_unpublished()
            self._tables.append(handles)

    def mark_finished(self, operator: str, subtasks: Iterable[int]) -> None:
        """Mark subtasks that ended before this checkpoint: they report nothing."""
        try:
            found = SubtaskSet.of(subtasks)
        except TypeError as error:
            raise InvalidInput(
                f"the subtasks of {operator!r} are {subtasks!r}; give their indexes, as [0, 2]"
            ) from error
        _check_subtasks(self._draft.graph.operator(operator), found)
        with self._lock:
            self._check_unpublished()
            self._finished[operator] |= found

    def set_property(self, name: str, value: str) -> None:
        """Set a property of the record, before :meth:`publish`."""
        self._draft = replace(self._draft, properties={**self._draft.properties, name: value})

    def set_now(
        self, operator: str, *, event_time_us: int | None = None, processing_time_us: int | None = None
    ) -> None:
        """Set the time of an operator in µs, before :meth:`publish`.

        Event time is the lowest watermark of its subtasks. Readers hide rows that had expired by
        then, and processing time continues from there. Snapshots may set times too
        (``SnapshotWriter.set_now``): their lowest event time then counts instead, and the latest
        processing time of all. A state without a time keeps the one it was declared with, which is
        that of the checkpoint it comes from.
        """
        self._draft.graph.operator(operator)
        times = {"event_time": event_time_us, "processing_time": processing_time_us}
        states = list(self._draft.states)
        for i, state in enumerate(states):
            now_us = times[state.ttl.clock] if state.ttl and state.operator == operator else None
            if now_us is not None:
                states[i] = replace(state, ttl_now_us=clock_us(now_us))
            elif state.clock == "processing_time" and state.operator == operator and processing_time_us is not None:
                states[i] = replace(state, clock_now_us=clock_us(processing_time_us))
        self._draft = replace(self._draft, states=tuple(states))

    def _check_unpublished(self) -> None:
        if self._published:
            raise InvalidInput(f"{self!r} was already published, or failed to publish; begin another one")

    def written(self) -> set[str]:
        """Return the paths of the segments that snapshots have written under this id."""
        own = layout.segment_path(self.checkpoint_id, model.new_write_id(), label="").rpartition("/")[0] + "/"
        with self._lock:
            handles = [handle for snapshot in self._snapshots.values() for handle in snapshot.handles]
        return {str(handle.path) for handle in handles if handle.inline is None and str(handle.path).startswith(own)}

    def publish(self) -> CommitPermit:
        """Publish the checkpoint, and return the permit that proves it.

        The content is checked before anything is written: after ``InvalidState`` (every problem in
        ``details``) the caller may correct it and publish again. After any other error, commit
        nothing and restart; this object cannot publish again. Raises ``PublishConflict`` (another
        run has published; ``details["published"]`` tells whether this checkpoint stays in the
        history), ``OutcomeUnknown`` (the storage did not answer), ``StorageError`` (it refused;
        nothing is published), ``CheckpointExpired`` (the source is gone), ``JobMismatch``.
        """
        start = time.perf_counter()
        with self._lock:
            self._check_unpublished()
            self._draft = replace(self._draft, states=_with_times(self._draft.states, self._snapshots.values()))
            graph = graph_with_statuses(self._draft.graph, self._finished, self._snapshots)
            handles = self._handles()
            self._check(graph, handles)
            self._published = True
        handles = self._spilled(handles)
        manifest = self._write_manifest(handles)
        record = self._record(graph, handles, manifest)
        self._check_before_creating()
        ending = create_record(self._storage, record.ref, encode_record(record), sleep=self._sleep)
        if ending.step is not Step.PERMITTED:
            raise conflict(self._storage, record, ending)
        what, took_s = f"checkpoint {self.checkpoint_id} of {self._storage.url}", time.perf_counter() - start
        logger.info("published %s: %s; publishing took %.3f s", what, record.totals, took_s)
        warn_of_layers(handles)
        return permit(self._storage, record, notes=self._draft.notes, manifest=manifests.Manifest(handles))

    def _handles(self) -> pa.Table:
        """Return all handles, written and carried, sorted."""
        own = manifests.handles_table(handle for snapshot in self._snapshots.values() for handle in snapshot.handles)
        carried = self._draft.carried
        underneath = {
            (uid, state): manifests.carried_handles(
                self._handles_of_parent(uid) if carried is None else carried, uid, state, subtasks
            )
            for (uid, state), subtasks in carried_keys(self._snapshots).items()
        }
        handles = pa.concat_tables([*underneath.values(), manifests.place_on_top(own, underneath), *self._tables])
        if handles["path"].num_chunks > _CHUNKS_MAX + handles.num_rows // BATCH_ROWS:
            # Otherwise every checkpoint adds chunks, and every rule visits every chunk.
            handles = handles.combine_chunks()
        # Empty committables only say that a subtask has answered.
        useless = pc.and_(pc.equal(handles["mode"], Mode.COMMITTABLES.value), pc.equal(handles["rows"], 0))
        return manifests.sort_handles(handles.filter(pc.invert(useless)) if pc.any(useless).as_py() else handles)

    def _handles_of_parent(self, uid: str) -> pa.Table:
        parent, operator = self._draft.parent, self._draft.graph.operator(uid)
        before = parent.graph.by_uid.get(operator.uid) if parent else None
        shape = (operator.parallelism, operator.max_parallelism)
        if parent is None or before is None or (before.parallelism, before.max_parallelism) != shape:
            was = f"{before.parallelism} of {before.max_parallelism}" if before else "absent"
            raise InvalidState(
                f"operator {uid!r} carries state, at parallelism {shape[0]} of {shape[1]}, and was {was} in the "
                "parent; begin with carried=Checkpoint.carried(plan), its handles as the restore plan cuts them, or "
                "write the state whole",
                kind=ErrorKind.STATE_NOT_ALLOWED,
                operator=uid,
            )
        return self._manifest_of(parent).full()

    def _manifest_of(self, parent: StoreCheckpoint) -> manifests.Manifest:
        try:
            return parent.manifest
        except CheckpointExpired as error:
            # A parent expires only after another run has published.
            raise PublishConflict(
                f"checkpoint {self.checkpoint_id} of {self._storage.url} was overtaken: its parent, {parent.id}, has "
                "expired. Commit nothing and stop; a restart goes on from the newest",
                kind=ErrorKind.OVERTAKEN,
                checkpoint_id=self.checkpoint_id,
                attempt_id=self.attempt_id,
                published=False,
            ) from error

    def _check(self, graph: JobGraph, handles: pa.Table) -> None:
        found = check_content(graph, self._draft.states, handles, self._draft.rescaled_from)
        problems = [problem for problem in found if problem.severity == "error"]
        named = {problem.operator for problem in problems if problem.kind is ErrorKind.STATE_MISSING}
        problems += [_unanswered(missing) for missing in self._outstanding() if missing.operator not in named]
        if problems:
            kinds = [problem.kind for problem in problems]
            union = ErrorKind.UNION_PARTIALLY_FINISHED
            raise InvalidState(
                f"checkpoint {self.checkpoint_id} cannot be published: " + all_messages(problems),
                kind=union if union in kinds else kinds[0],
                problems=tuple(problems),
            )
        self._check_references(handles)

    def _check_references(self, handles: pa.Table) -> None:
        """Refuse segments that belong neither to this checkpoint nor to its parent or source."""
        own = layout.segment_path(self.checkpoint_id, model.new_write_id(), label="").rpartition("/")[0] + "/"
        foreign = [
            pc.unique(
                batch["path"].filter(
                    pc.and_(pc.is_null(batch["inline"]), pc.invert(pc.starts_with(batch["path"], own)))
                )
            )
            for batch in handles.select(["path", "inline"]).to_batches(max_chunksize=BATCH_ROWS)
        ]
        paths = pc.unique(pa.chunked_array(foreign, pa.string()))
        if not len(paths):
            return
        unknown = paths
        for table in self._protected():
            unknown = unknown.filter(pc.invert(pc.is_in(unknown, value_set=table["path"])))
            if not len(unknown):
                break
        if len(unknown):
            raise InvalidState(
                f"checkpoint {self.checkpoint_id} would refer to {len(unknown)} segments that neither it nor its "
                f"parent owns, {unknown[0].as_py()} first; garbage collection would delete them. Write them again",
                kind=ErrorKind.STATE_NOT_ALLOWED,
                path=unknown[0].as_py(),
            )
        source = self._draft.source
        if source is not None:
            self._check_present(handles, paths, source)

    def _check_present(self, handles: pa.Table, paths: pa.Array, source: ParentRef) -> None:
        """Refuse a source whose segments are not all there."""
        try:
            check_present(self._storage, handles, paths, source.checkpoint_id)
        except DamagedCheckpoint as error:
            parent = self._draft.parent
            if (
                parent is not None
                and parent.storage.url == self._storage.url
                and not record_exists(self._storage, source)
            ):
                raise self._source_gone(source) from error
            raise

    def _protected(self) -> Iterator[pa.Table]:
        """Yield the handles whose objects this checkpoint may refer to, the source's first."""
        parent, source = self._draft.parent, self._draft.source
        if source is not None and (parent is None or source != parent.record.ref):
            storage = parent.storage if parent is not None else self._storage
            record = find_record(storage, source.checkpoint_id)
            if record is None or record.ref != source:
                raise self._source_gone(source)
            yield load_manifest(storage, record).handles
        if parent is not None:
            yield self._manifest_of(parent).handles

    def _spilled(self, handles: pa.Table) -> pa.Table:
        """Write the largest inline segments as objects until the rest fits into a manifest."""
        if not (spilled := manifests.spill_inline(handles)):
            return handles
        rows = pc.index_in(pa.array(spilled, pa.string()), value_set=handles["path"].combine_chunks())
        found = handles.take(rows)
        # New names even for what the parent kept inline: a rival may spill the same bytes.
        names = [
            layout.segment_path(self.checkpoint_id, model.new_write_id(), label=f"{operator}-{state}")
            for operator, state in zip(found["operator"].to_pylist(), found["state"].to_pylist(), strict=True)
        ]

        def write(name: str, data: pa.Buffer) -> None:
            with self._storage.open_output(name) as output:
                output.write(data)

        with ThreadPoolExecutor(max(1, min(len(names), self._storage.reads_at_once))) as pool:
            list(pool.map(write, names, (value.as_buffer() for value in found["inline"])))
        return manifests.with_spilled(handles, dict(zip(spilled, names, strict=True)))

    def _write_manifest(self, handles: pa.Table) -> model.ManifestRef:
        data = manifests.encode_manifest(handles)
        path = layout.manifest_path(self.checkpoint_id, self.attempt_id)
        with self._storage.open_output(path) as output:
            output.write(memoryview(data))
        return manifests.manifest_ref(path, data)

    def _record(self, graph: JobGraph, handles: pa.Table, manifest: model.ManifestRef) -> Record:
        draft = self._draft
        return Record(
            checkpoint_id=self.checkpoint_id,
            attempt_id=self.attempt_id,
            kind=draft.kind,
            job_id=draft.job_id,
            job_name=draft.job_name,
            graph=graph,
            states=draft.states,
            manifest=manifest,
            totals=manifests.totals(handles),
            created_at_us=time.time_ns() // 1000,
            writer=_writer(),
            parent=draft.replaced.ref if draft.replaced else draft.parent.record.ref if draft.parent else None,
            content_of=draft.source if draft.replaced else None,
            stop=draft.stop,
            rescaled_from=draft.rescaled_from,
            properties=dict(draft.properties),
            required_features=required_features(graph, draft.states, handles, draft.rescaled_from),
            optional_features=optional_features(draft.states),
        )

    def _check_before_creating(self) -> None:
        """Check what must hold between manifest and record: SPEC.md sections 8.3 and 10."""
        parent, source = self._draft.parent, self._draft.source
        if parent is not None and parent.storage.url != self._storage.url:
            require_empty(self._storage)
        elif source is not None and not record_exists(self._storage, source):
            # If it had existed, its objects would be safe: gc reads our manifest, written before.
            raise self._source_gone(source)

    def _source_gone(self, source: ParentRef) -> CheckpointExpired:
        return CheckpointExpired(
            f"checkpoint {source.checkpoint_id} (attempt {source.attempt_id}), whose content checkpoint "
            f"{self.checkpoint_id} was to have, has expired meanwhile; nothing was published",
            checkpoint_id=source.checkpoint_id,
        )


def _with_times(states: tuple[State, ...], snapshots: Iterable[Snapshot]) -> tuple[State, ...]:
    """Return the states with the times in the snapshots: the lowest event time.

    For processing time it is the latest: a subtask may have dropped what had expired by then.
    """
    said: dict[tuple[str, str], list[int]] = {}
    for snapshot in snapshots:
        for name, now_us in snapshot.times:
            said.setdefault((snapshot.operator, name), []).append(now_us)
    return tuple(_with_time(state, said.get((state.operator, state.name), ())) for state in states)


def _with_time(state: State, said: Sequence[int]) -> State:
    if not said:
        return state
    if state.by_processing_time:
        now_us = max(said) if state.ttl_now_us is None else max(*said, state.ttl_now_us)
    else:
        now_us = min(said)
    return replace(state, ttl_now_us=clock_us(now_us))


def _unanswered(missing: Outstanding) -> Finding:
    message = (
        f"no snapshot of {missing} has come; what it wrote, or prepared to commit, would be lost. Add it, or mark the "
        "subtask as finished if it is"
    )
    at = missing.subtasks.ranges[0][0] if missing.subtasks else None
    return Finding(ErrorKind.SNAPSHOT_MISSING, "SPEC 4.6", message, operator=missing.operator, subtask=at)


def _writer() -> str:
    """Return the writer's name and version, for people."""
    return f"stateformat {__version__}"


def require_empty(storage: Storage) -> None:
    """Refuse a store that holds any record: another store's checkpoint can only begin a history."""
    ids = record_ids(storage)
    if ids:
        raise InvalidInput(
            f"{storage.url} is not empty: it holds checkpoint {ids[-1]}; give another store's checkpoint a store of "
            "its own",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=storage.url,
        )
    refuse_foreign(storage)


def _check_subtasks(operator: Operator, subtasks: Iterable[int]) -> None:
    wrong = [subtask for subtask in subtasks if not 0 <= subtask < operator.parallelism]
    if wrong:
        raise InvalidState(
            f"operator {operator.uid!r} has subtasks 0 to {operator.parallelism - 1}; there is no subtask {wrong[0]}",
            kind=ErrorKind.INVALID_PARALLELISM,
            operator=operator.uid,
        )
