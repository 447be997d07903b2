"""A checkpoint in the making: snapshots come in, a record and a permit come out.

Theory of operation. The driver begins from the checkpoint that it holds, so id and parent are fixed before anything is
written, and are never looked up. Workers write segments; their snapshots arrive here in any order, from any thread, some
of them twice. Publishing puts the handles together (what is carried from the parent stays underneath, what was written
lies on top), checks them against the format, writes the manifest, and hands the record to ``publication``.

What a checkpoint may refer to is what makes deleting safe (SPEC.md sections 8.2 and 9): its own objects, and those that
its parent refers to (or, for a rollback or rewrite, its source). That is checked here, once more, for every publication.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..assembly import (
    Outstanding,
    carried_handles,
    carried_keys,
    graph_with_statuses,
    moved_out,
    on_top,
    outstanding,
    resolved_graph,
)
from ..errors import (
    CheckpointExpired,
    DamagedCheckpoint,
    ErrorKind,
    InvalidInput,
    InvalidState,
    PublishConflict,
)
from ..graph import JobGraph, Operator, SubtaskSet
from ..history import find_record, record_ids, stands
from ..manifest import (
    BATCH_ROWS,
    Manifest,
    encode_manifest,
    handles_table,
    manifest_ref,
    sort_handles,
    spill_inline,
    totals,
)
from ..model import (
    AttemptId,
    CheckpointId,
    ManifestRef,
    Mode,
    ParentRef,
    Record,
    new_attempt_id,
    new_write_id,
)
from ..problems import Problem
from ..reading import Checkpoint, load_manifest
from ..record import encode_record, required_features
from ..rules import check_content
from ..snapshot import Snapshot, SnapshotWriter, WriteContext, snapshot_of
from ..states import warn_of_layers
from ..storage import Storage
from .draft import Draft
from .presence import check_present
from .protocol import At, CommitPermit, conflict, create_record, permit

logger = logging.getLogger(__name__)

_CHUNKS_MAX: Final = 8


class PendingCheckpoint:
    """A checkpoint that has begun. Thread-safe. It publishes once; abandoning it needs no call.

    ``checkpoint_id`` and ``attempt_id`` are fixed from the beginning: committables are prepared under them.
    """

    def __init__(self, storage: Storage, draft: Draft, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._storage = storage
        self._draft = replace(draft, graph=resolved_graph(draft.graph, draft.parent.graph if draft.parent else None))
        self._sleep = sleep
        self._lock = threading.Lock()
        self._published = False
        self._snapshots: dict[tuple[str, int | None], Snapshot] = {}
        self._tables: list[pa.Table] = []
        self._finished: dict[str, SubtaskSet] = defaultdict(SubtaskSet)
        self._finishing: dict[str, SubtaskSet] = defaultdict(SubtaskSet)
        before = draft.over.checkpoint_id if draft.over else draft.parent.id if draft.parent else 0
        self.checkpoint_id = CheckpointId(before + 1)
        self.attempt_id: AttemptId = new_attempt_id()

    def __repr__(self) -> str:
        return f"PendingCheckpoint({self._storage.url}@{self.checkpoint_id}, attempt {self.attempt_id})"

    @property
    def ref(self) -> ParentRef:
        """What it will be known as once it is published."""
        return ParentRef(self.checkpoint_id, self.attempt_id)

    @property
    def graph(self) -> JobGraph:
        """The job graph with every max parallelism and key hash filled in."""
        return self._draft.graph

    @property
    def context(self) -> WriteContext:
        """What workers need in order to write their snapshots. Picklable."""
        draft = self._draft
        return WriteContext(
            self._storage, draft.job_id, self.checkpoint_id, self.attempt_id, draft.graph, draft.states, draft.options
        )

    @property
    def outstanding(self) -> tuple[Outstanding, ...]:
        """The operators whose snapshots are missing, in the order of the graph; empty when ``publish`` waits for none.

        A running subtask owes a snapshot when its operator declares a state that subtasks write, committables included.
        A coordinator owes one when it declares a state of its own. Finished and finishing subtasks, and subtasks of an
        operator without state, owe nothing. After :meth:`add_handles` nothing is owed: those handles are everything.
        """
        with self._lock:
            return self._outstanding()

    def _outstanding(self) -> tuple[Outstanding, ...]:
        if self._tables:
            return ()
        draft = self._draft
        return tuple(outstanding(draft.graph, draft.states, self._finished, self._finishing, self._snapshots))

    def add(self, snapshot: Snapshot | SnapshotWriter | bytes) -> bool:
        """Take the snapshot of a subtask or coordinator. False: that one is there already, and this one is ignored.

        A snapshot that is ``finishing`` marks its subtask so. Raises ``InvalidInput`` for an operator that the graph
        lacks and for what is no snapshot, ``InvalidState`` for a subtask outside of its parallelism.
        """
        taken = snapshot_of(snapshot)
        operator = self._draft.graph.operator(taken.operator)
        if taken.subtask is not None:
            _check_subtasks(operator, (taken.subtask,))
        with self._lock:
            self._check_unpublished()
            return self._snapshots.setdefault((taken.operator, taken.subtask), taken) is taken

    def add_handles(self, handles: pa.Table) -> None:
        """Take handles as they are, in the manifest's columns with ``inline``: what a rescale or a rewrite has made.

        They are the state of every subtask, so ``publish`` waits for no snapshot after them.
        """
        if not isinstance(handles, pa.Table):
            raise InvalidInput(f"handles are an Arrow table in the manifest's columns, not {type(handles).__name__}")
        with self._lock:
            self._check_unpublished()
            self._tables.append(handles)

    def mark_finished(self, operator: str, subtasks: Iterable[int]) -> None:
        """Say that these subtasks had ended before this checkpoint: they report nothing."""
        self._mark(self._finished, operator, subtasks)

    def mark_finishing(self, operator: str, subtasks: Iterable[int]) -> None:
        """Say that the logic of these subtasks has ended and that they wait: they report committables at most."""
        self._mark(self._finishing, operator, subtasks)

    def _mark(self, marks: dict[str, SubtaskSet], operator: str, subtasks: Iterable[int]) -> None:
        try:
            found = SubtaskSet.of(subtasks)
        except TypeError as error:
            raise InvalidInput(
                f"the subtasks of {operator!r} are {subtasks!r}; give their indexes, as [0, 2]"
            ) from error
        _check_subtasks(self._draft.graph.operator(operator), found)
        with self._lock:
            self._check_unpublished()
            marks[operator] = marks[operator] | found

    def _check_unpublished(self) -> None:
        if self._published:
            raise InvalidInput(f"{self!r} has been published or has failed at it; begin another one")

    def publish(self) -> CommitPermit:
        """Make the checkpoint exist, and prove it.

        Nothing is written until the content is right, so ``InvalidState`` (with every problem in ``details``) leaves
        it unpublished and it may be mended. After that it is spent. Raises ``PublishConflict`` where another run has
        published (``details["published"]``: whether ours stays in the history), ``OutcomeUnknown`` where the storage
        will not say, ``StorageError`` where it refuses (then nothing is published), ``CheckpointExpired`` where the
        source has gone, ``JobMismatch`` in another job's store. In none of these cases may anything be
        committed; a restart reads the truth.
        """
        start = time.perf_counter()
        with self._lock:
            self._check_unpublished()
            graph = self._graph()
            handles = self._handles()
            self._check(graph, handles)
            self._published = True
        handles = self._spilled(handles)
        manifest = self._write_manifest(handles)
        record = self._record(graph, handles, manifest)
        self._look_before_creating()
        ending = create_record(self._storage, record.ref, encode_record(record), sleep=self._sleep)
        if ending.at is not At.PERMITTED:
            raise conflict(self._storage, record, ending)
        logger.info(
            "published checkpoint %s of %s: %d rows, %d segments, %d bytes; publishing took %.3f s",
            self.checkpoint_id,
            self._storage.url,
            record.totals.rows,
            record.totals.segments,
            record.totals.bytes,
            time.perf_counter() - start,
        )
        warn_of_layers(handles)
        return permit(self._storage, record, notes=self._draft.notes, manifest=Manifest(handles))

    def _graph(self) -> JobGraph:
        return graph_with_statuses(self._draft.graph, self._finished, self._finishing, self._snapshots)

    def _handles(self) -> pa.Table:
        """All handles, sorted: what was written, and what is carried underneath it."""
        own = handles_table(handle for snapshot in self._snapshots.values() for handle in snapshot.handles)
        carried = self._draft.carried
        underneath = {
            (uid, state): carried_handles(
                self._parents_handles(uid) if carried is None else carried, uid, state, subtasks
            )
            for (uid, state), subtasks in carried_keys(self._snapshots).items()
        }
        handles = pa.concat_tables([*underneath.values(), on_top(own, underneath), *self._tables])
        if handles["path"].num_chunks > _CHUNKS_MAX + handles.num_rows // BATCH_ROWS:
            # What each checkpoint put on top would stay a chunk of its own, and every rule looks at each chunk.
            handles = handles.combine_chunks()
        # Empty committables only say that a subtask has answered, which is of no use to a reader.
        says_nothing = pc.and_(pc.equal(handles["mode"], Mode.COMMITTABLES.value), pc.equal(handles["rows"], 0))
        return sort_handles(handles.filter(pc.invert(says_nothing)) if pc.any(says_nothing).as_py() else handles)

    def _parents_handles(self, uid: str) -> pa.Table:
        parent, operator = self._draft.parent, self._draft.graph.operator(uid)
        before = parent.graph.by_uid.get(operator.uid) if parent else None
        shape = (operator.parallelism, operator.max_parallelism)
        if parent is None or before is None or (before.parallelism, before.max_parallelism) != shape:
            was = f"{before.parallelism} of {before.max_parallelism}" if before else "absent"
            raise InvalidState(
                f"operator {uid!r} carries state, at parallelism {shape[0]} of {shape[1]}, and was {was} in the parent; "
                "begin with carried=Checkpoint.carried(plan), its handles as the restore plan cuts them, or write the state whole",
                kind=ErrorKind.STATE_NOT_ALLOWED,
                operator=uid,
            )
        return self._of_parent(parent).full()

    def _of_parent(self, parent: Checkpoint) -> Manifest:
        try:
            return parent.manifest
        except CheckpointExpired as error:
            # Only a newer checkpoint makes the parent expire: this run has been overtaken.
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
                f"checkpoint {self.checkpoint_id} cannot be published: "
                + "; ".join(dict.fromkeys(problem.message for problem in problems)),
                kind=union if union in kinds else kinds[0],
                problems=tuple(problems),
            )
        self._check_references(handles)

    def _check_references(self, handles: pa.Table) -> None:
        """Refuse a path that is neither our own nor the parent's nor the source's: nothing would protect it."""
        own = self._own_prefix
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
        for table in self._referable():
            unknown = unknown.filter(pc.invert(pc.is_in(unknown, value_set=table["path"])))
            if not len(unknown):
                break
        if len(unknown):
            raise InvalidState(
                f"checkpoint {self.checkpoint_id} would refer to {len(unknown)} segments that neither it nor its parent "
                f"owns, {unknown[0].as_py()} first; garbage collection would delete them. Write them again",
                kind=ErrorKind.STATE_NOT_ALLOWED,
                path=unknown[0].as_py(),
            )
        source = self._draft.source
        if source is not None:
            self._check_present(handles, paths, source)

    def _check_present(self, handles: pa.Table, paths: pa.Array, source: ParentRef) -> None:
        """Refuse a source whose segments are not all there: what is derived from it could not be read."""
        try:
            check_present(self._storage, handles, paths, source.checkpoint_id)
        except DamagedCheckpoint as error:
            parent = self._draft.parent
            if parent is not None and parent.storage.url == self._storage.url and not stands(self._storage, source):
                raise self._source_gone(source) from error
            raise

    @property
    def _own_prefix(self) -> str:
        return layout.segment_path(self.checkpoint_id, new_write_id(), label="").rpartition("/")[0] + "/"

    def _referable(self) -> Iterator[pa.Table]:
        """The manifests whose objects this checkpoint may refer to.

        The source's comes first: a rollback away from a checkpoint whose manifest is damaged needs no other.
        """
        parent, source = self._draft.parent, self._draft.source
        if source is not None and (parent is None or source != parent.record.ref):
            storage = parent.storage if parent is not None else self._storage
            record = find_record(storage, source.checkpoint_id)
            if record is None or record.ref != source:
                raise self._source_gone(source)
            yield load_manifest(storage, record).handles
        if parent is not None:
            yield self._of_parent(parent).handles

    def _spilled(self, handles: pa.Table) -> pa.Table:
        """Write the largest inline segments as objects of our own until the rest is small enough for a manifest."""
        new_paths = {}
        for path in spill_inline(handles):
            row = handles.slice(pc.index(handles["path"], path).as_py(), 1)
            label = f"{row['operator'][0].as_py()}-{row['state'][0].as_py()}"
            # A name of our own, even for what the parent kept inline: an attempt that is tried again, or a rival, spills
            # the same bytes, and no name is written twice.
            new_paths[path] = layout.segment_path(self.checkpoint_id, new_write_id(), label=label)
            with self._storage.open_output(new_paths[path]) as output:
                output.write(row["inline"][0].as_buffer())
        return moved_out(handles, new_paths) if new_paths else handles

    def _write_manifest(self, handles: pa.Table) -> ManifestRef:
        data = encode_manifest(handles)
        path = layout.manifest_path(self.checkpoint_id, self.attempt_id)
        with self._storage.open_output(path) as output:
            output.write(memoryview(data))
        return manifest_ref(path, data)

    def _record(self, graph: JobGraph, handles: pa.Table, manifest: ManifestRef) -> Record:
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
            totals=totals(handles),
            created_at_us=time.time_ns() // 1000,
            writer=_writer(),
            parent=draft.over.ref if draft.over else draft.parent.record.ref if draft.parent else None,
            content_of=draft.source if draft.over else None,
            stop=draft.stop,
            rescaled_from=draft.rescaled_from,
            properties=dict(draft.properties),
            required_features=required_features(graph, draft.states, handles, draft.rescaled_from),
        )

    def set_property(self, name: str, value: str) -> None:
        """Add a property to the record, or replace it, before :meth:`publish`."""
        self._draft = replace(self._draft, properties={**self._draft.properties, name: value})

    def _look_before_creating(self) -> None:
        """What must hold once the manifest is there and the record is not: SPEC.md sections 8.3 and 10."""
        parent, source = self._draft.parent, self._draft.source
        if parent is not None and parent.storage.url != self._storage.url:
            require_empty(self._storage)
        elif source is not None and not stands(self._storage, source):
            # From here on the source's objects are safe: whoever removes its record reads our manifest before it
            # collects, because the manifest was there before we looked.
            raise self._source_gone(source)

    def _source_gone(self, source: ParentRef) -> CheckpointExpired:
        return CheckpointExpired(
            f"checkpoint {source.checkpoint_id} (attempt {source.attempt_id}), whose content checkpoint "
            f"{self.checkpoint_id} was to have, has expired meanwhile; nothing was published",
            checkpoint_id=source.checkpoint_id,
        )


def _unanswered(missing: Outstanding) -> Problem:
    message = (
        f"no snapshot of {missing} has come; what it wrote, or prepared to commit, would be lost. Add it, or mark the "
        "subtask as finished if it is"
    )
    at = missing.subtasks.ranges[0][0] if missing.subtasks else None
    return Problem(ErrorKind.SNAPSHOT_MISSING, "SPEC 4.6", message, operator=missing.operator, subtask=at)


@cache
def _writer() -> str:
    """Who writes, for people. Asking for the version parses a file, which takes as long as writing a small manifest."""
    return f"stateformat {metadata.version('stateformat')}"


def require_empty(storage: Storage) -> None:
    """Refuse a store that holds any record: what comes from another store begins a history, and continues none."""
    ids = record_ids(storage)
    if ids:
        raise InvalidInput(
            f"{storage.url} is not empty: it holds checkpoint {ids[-1]}; give another store's checkpoint a store of its own",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=storage.url,
        )


def _check_subtasks(operator: Operator, subtasks: Iterable[int]) -> None:
    wrong = [subtask for subtask in subtasks if not 0 <= subtask < operator.parallelism]
    if wrong:
        raise InvalidState(
            f"operator {operator.uid!r} has subtasks 0 to {operator.parallelism - 1}; there is no subtask {wrong[0]}",
            kind=ErrorKind.INVALID_PARALLELISM,
            operator=operator.uid,
        )


__all__ = ["Draft", "Outstanding", "PendingCheckpoint", "require_empty"]
