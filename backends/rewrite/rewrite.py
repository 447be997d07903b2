"""``rewrite``: plan, let an engine write, publish, and prove that nothing is lost.

The driver begins a checkpoint, whose id and attempt are in the names of all new objects. The engine
runs the tasks. The driver compares their counts with the plan, and publishes. A failure before that
leaves the store as it was, except for some segments that nothing refers to.

The functions of a task need only their arguments, which are small and can be pickled; their only
effect is on the storage. A task that runs twice writes one more segment, which nothing refers to
(``gc`` finds it), so an engine may repeat tasks freely if it takes one result per place.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, InvalidState
from stateformat.graph import JobGraph, Operator
from stateformat.inspecting import CheckpointDiff, Renames, prove_checkpoints
from stateformat.keys import range_bounds
from stateformat.manifest import cut_handles, handles_table
from stateformat.model import CheckpointKind, Handle, Mode, Record, State
from stateformat.publication import CommitPermit, PendingCheckpoint, check_segments
from stateformat.reading import Checkpoint, rekey
from stateformat.redistribution import Rescaled, rescale
from stateformat.rescaling import lasting_stop
from stateformat.segments import SegmentPlace, WriteOptions, write_segment, write_unsorted
from stateformat.snapshot import WriteContext
from stateformat.store import CheckpointStore
from stateformat.tables import Spill

from ..tasks import Done, Note, Sized, Tasks, Workers
from .planning import Move, Names, Place, RehashSource, RewritePlan, Transformed, plan_rewrite, shaped
from .transforming import RewriteSpec, Transformation

Seen: TypeAlias = Callable[[Place, int], None]
"""Called with a place of a state and how many rows of the state were read for it."""

DISTRIBUTE_BYTES: Final = 8 * 2**20
"""How many bytes of rows a source hashes and sorts at once."""


def _ignore(rows: int) -> None:
    pass


def write_move(context: WriteContext, move: Move, done: Done = _ignore, seen: Done = _ignore) -> Iterator[Handle]:
    """Read what belongs to one place, merged and in the current schema, and write it, and its
    copies if any.

    ``seen`` is called with the rows read. Holds a row group and a few batches in memory; rows that
    are written several times wait in a temporary file.
    """
    batches = counted(shaped(move.read, move.shape, move.written_by, seen), done)
    options = _options(context, check_unique=isinstance(move.shape, Transformation))
    if not move.copies:
        yield write_segment(context.storage, segment_place(context, move.place), batches, options)
        return
    with Spill[int]() as rows:
        for batch in batches:
            rows.add(0, pa.Table.from_batches([batch]))
        for place in (move.place, *move.copies):
            yield write_segment(context.storage, segment_place(context, place), rows.read(0), options)


def distribute(source: RehashSource, seen: Done = _ignore) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read a source and hash its keys: yields batches of rows, each with the number of its target.
    ``seen`` is called with the rows read.

    Columns: ``segment_schema`` of the state as it will be. Within a batch rows ascend by the new
    ``_key_group``; rows of one key group keep their order. Holds :data:`DISTRIBUTE_BYTES` of rows
    at a time.
    """
    operator = source.operator
    state = source.read.state if source.shape is None else source.shape.state
    for rows in gathered(shaped(source.read, source.shape, source.written_by, seen), DISTRIBUTE_BYTES):
        for subtask, batch in by_owner(rows, state, operator):
            yield source.first_target + subtask, batch


def by_owner(rows: pa.Table, state: State, operator: Operator) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the rows of a keyed state by the subtask that owns their key group, ascending.

    ``rows`` has at least the key columns. Batches have ``_key_group`` first and ascend by it.
    """
    if operator.max_parallelism is None or operator.key_hash is None:
        raise InvalidInput(f"operator {operator.uid!r} has no max parallelism or key hash; a published one has both")
    bounds = np.asarray(range_bounds(operator.parallelism, operator.max_parallelism))
    clustered = rekey(rows, state, operator.max_parallelism, operator.key_hash).combine_chunks()
    borders = np.searchsorted(clustered["_key_group"].to_numpy(), bounds)
    for subtask, (start, end) in enumerate(pairwise(borders.tolist())):
        for batch in clustered.slice(start, end - start).to_batches():
            yield subtask, batch


def gathered(batches: Iterable[pa.RecordBatch], size_bytes: int) -> Iterator[pa.Table]:
    """Yield batches as tables of at least ``size_bytes`` each, except the last."""
    waiting: list[pa.RecordBatch] = []
    waiting_bytes = 0
    for batch in batches:
        waiting.append(batch)
        waiting_bytes += batch.nbytes
        if waiting_bytes >= size_bytes:
            yield pa.Table.from_batches(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def write_target(
    context: WriteContext,
    place: Place,
    batches: Iterable[pa.RecordBatch],
    done: Done = _ignore,
    *,
    check_unique: bool = False,
) -> Handle:
    """Write what all sources distributed to one place, in bounded memory.

    ``batches`` are those of :func:`distribute` in any order, all with ``_key_group`` or all
    without. The writer sorts keyed rows by key group, and in-flight records by key group, sender
    and sequence number. With ``check_unique`` row keys that occur in several rows raise
    ``InvalidState``, which names three of them; otherwise they are known to be unique.
    """
    options = _options(context, check_unique=check_unique)
    return write_unsorted(context.storage, segment_place(context, place), counted(batches, done), options)


def counted(batches: Iterable[pa.RecordBatch], done: Done) -> Iterator[pa.RecordBatch]:
    """Yield batches; ``done`` gets the rows of each once it is taken."""
    for batch in batches:
        yield batch
        done(batch.num_rows)


def segment_place(context: WriteContext, place: Place) -> SegmentPlace:
    """Return where the segment of a place is written, at the current schema of its state."""
    state = next(item for item in context.states if (item.operator, item.name) == (place.operator, place.state))
    return SegmentPlace(
        job_id=context.job_id,
        checkpoint_id=context.checkpoint_id,
        attempt_id=context.attempt_id,
        operator=context.graph.operator(place.operator),
        state=state,
        subtask=place.subtask,
        layer=0,
        schema_id=state.current.id,
    )


def _options(context: WriteContext, *, check_unique: bool = False) -> WriteOptions:
    # The reader verified the key groups, or they have just been computed. Row keys were unique in
    # each layer, and merging layers keeps them so; a function may not.
    return replace(context.options, check_unique=check_unique, trust_key_groups=True)


def run_plan(tasks: Tasks, context: WriteContext, plan: RewritePlan, done: Done, seen: Seen) -> list[Handle]:
    """Return a handle for each place of a move and each target with rows, in any order."""
    moves = [(move.bytes, (context.only(move.place.operator), move)) for move in plan.moves]
    handles = []
    for place, read, written in tasks.map(_moved, moves, done):
        seen(place, read)
        handles += written
    groups: dict[int, list[Sized[RehashSource]]] = defaultdict(list)
    for source in plan.sources:
        groups[source.first_target].append((source.bytes, source))
    targets = [(context.only(place.operator), place, plan.is_transformed(place)) for place in plan.targets]
    for place, read, handle in tasks.exchange(_dealt, groups.values(), _written, targets, done):
        seen(place, read)
        handles.append(handle)
    return handles


def _moved(given: tuple[WriteContext, Move], done: Done) -> tuple[Place, int, list[Handle]]:
    context, move = given
    read: list[int] = []
    handles = list(write_move(context, move, done, read.append))
    return move.place, sum(read), handles


def _dealt(source: RehashSource, note: Note) -> Iterator[tuple[int, pa.RecordBatch]]:
    return distribute(source, partial(note, source.first_target))


def _written(
    given: tuple[WriteContext, Place, bool], rows: Iterator[pa.RecordBatch], read: int, done: Done
) -> tuple[Place, int, Handle]:
    context, place, check_unique = given
    return place, read, write_target(context, place, rows, done, check_unique=check_unique)


@dataclass(frozen=True)
class ThreadEngine:
    """Runs tasks on ``threads`` threads; None is one for each processor."""

    threads: int | None = None

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InvalidInput(f"{self.threads} threads rewrite nothing; give at least 1, or None for all processors")

    def run(self, context: WriteContext, plan: RewritePlan, done: Done, seen: Seen) -> list[Handle]:
        """Return a handle for each place of a move and each target, in any order."""
        with Workers(self.threads) as workers:
            return run_plan(workers, context, plan, done, seen)


def publish_rescaled(
    checkpoint: Checkpoint,
    topology: JobGraph,
    *,
    store: CheckpointStore,
    target: CheckpointStore | None = None,
    progress: Callable[[Any], None] | None = None,
) -> CommitPermit:
    """Publish the checkpoint at a topology: as the newest of ``store``, or in an empty ``target``.

    Opens no segment; into a target it copies the segments, and ``progress`` is called with
    ``CopyProgress``. Raises ``RestoreRefused`` with every reason why the topology does not fit,
    ``PublishConflict`` if the checkpoint is no longer the newest of its store, and what publishing
    raises.
    """
    plan = checkpoint.plan_restore(topology)
    plan.check()
    rescaled = rescale(checkpoint, plan)
    del plan  # For a million handles, plan and slices are some hundred megabytes each.
    pending = begin_again(
        target or store,
        checkpoint,
        rescaled,
        kind=CheckpointKind.RESCALE,
        parent=store.permit_of(checkpoint) if target is None else checkpoint,
    )
    if target is not None:
        target.adopt_objects(checkpoint, progress)
    pending.add_handles(cut_handles(check_segments(checkpoint).manifest.full(), rescaled.slices))
    del rescaled
    return pending.publish()


def begin_again(
    store: CheckpointStore, checkpoint: Checkpoint, plan: Rescaled | RewritePlan, **more: Any
) -> PendingCheckpoint:
    """Begin a checkpoint that has the content of another, with the plan's graph and states."""
    record = checkpoint.record
    return store.begin(
        job_id=record.job_id,
        job_name=record.job_name,
        graph=plan.graph,
        states=plan.states,
        source=record.ref,
        rescaled_from=plan.rescaled_from,
        stop=lasting_stop(record),
        properties=record.lasting_properties,
        **more,
    )


def check_provable(spec: RewriteSpec) -> None:
    """Raise ``InvalidInput`` for a rewrite that changes rows on purpose, by a function."""
    changed = [transform.label for transform in spec.transforms.values() if transform.function is not None]
    if changed:
        raise InvalidInput(
            f"{changed[0]} changes rows, so there is nothing to prove; rewrite without the proof, and look at what "
            "became of them with `ckpt diff`"
        )


def prove_rewrite(
    source: Checkpoint,
    result: Checkpoint,
    spec: RewriteSpec,
    *,
    apart: frozenset[str] = frozenset(),
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointDiff:
    """Compare a checkpoint with the result of its rewrite; ``same`` if nothing was lost.

    What the spec renames is not a difference. ``apart``: operators that the result has in addition.
    Raises ``InvalidInput`` as :func:`check_provable`, and as ``diff_checkpoints``.
    """
    check_provable(spec)
    renames = _renames(source.record, spec, apart)
    return prove_checkpoints(source, result, renames=renames, progress=progress)


def _renames(record: Record, spec: RewriteSpec, apart: frozenset[str]) -> Renames:
    names = Names.planned(spec, record, ())
    shapes = {(state.operator, state.name): names.shape(state) for state in record.states}
    return Renames(
        operators={old: str(names.uid(old)) for old in spec.renames},
        states={(state.operator, state.name): names.state(state) for state in record.states},
        shapes={place: shape for place, shape in shapes.items() if shape is not None},
        apart=apart,
    )


Progress = Callable[[int, int], None]
"""Called with the rows written and the rows to write, from any thread."""


class Engine(Protocol):
    """Runs the tasks of a plan."""

    def run(self, context: WriteContext, plan: RewritePlan, done: Done, seen: Seen) -> Iterable[Handle]:
        """Return a handle for each place of a move, and each target with rows, in any order.

        Calls ``done`` with numbers of rows as they are written, from any thread; and ``seen`` with
        a place of a state and numbers of rows of that state that were read, from this thread. Each
        row counts once, even if a task ran twice.
        """
        ...


class TransformedRows(NamedTuple):
    """What a function made of a state."""

    state: Transformed
    read: int
    """Rows of the state before: with layers merged; for broadcast state, of one copy."""
    written: int
    """Rows afterwards, counted in the same way."""


@dataclass(frozen=True)
class Rewritten:
    """The published checkpoint, and what was written: segments (also inline ones), rows, bytes."""

    permit: CommitPermit
    segments: int
    rows: int
    bytes: int
    rehashed: tuple[tuple[str, str], ...]
    """The (operator, state) pairs whose keys were hashed anew."""
    transformed: tuple[TransformedRows, ...] = ()

    @property
    def record(self) -> Record:
        """The record of the new checkpoint."""
        return self.permit.record


def rewrite(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    spec: RewriteSpec | None = None,
    *,
    engine: Engine | None = None,
    target: CheckpointStore | None = None,
    progress: Progress | None = None,
) -> Rewritten:
    """Write all data of a checkpoint anew; publish it as the newest of ``store``, or in ``target``.

    The tasks run in threads, unless an ``engine`` is given; the target must be empty. Raises
    ``InvalidInput``, ``DamagedCheckpoint``, ``RestoreRefused`` (a restore at the new parallelism
    would be refused), ``PublishConflict`` (in its own store, the checkpoint is not the newest), and
    what else ``PendingCheckpoint.publish`` raises. The checkpoint itself is never changed.
    """
    if isinstance(engine, str):
        raise InvalidInput(f"engine {engine!r} is not an engine; give a ThreadEngine or a SparkEngine")
    spec = spec or RewriteSpec()
    plan = plan_rewrite(checkpoint, spec)
    parent = _parent(store, checkpoint, target)
    pending = begin_again(
        target or store, checkpoint, plan, kind=CheckpointKind.REWRITE, parent=parent, options=spec.options
    )
    return carry_out(pending, plan, engine, progress)


def carry_out(
    pending: PendingCheckpoint, plan: RewritePlan, engine: Engine | None = None, progress: Progress | None = None
) -> Rewritten:
    """Write the content of a checkpoint that has begun, by a plan, and publish it.

    The checkpoint has the graph and the states of the plan. Raises as :func:`rewrite`.
    """
    counter = _Counter(progress, plan.rows)
    read: dict[tuple[str, str], int] = defaultdict(int)

    def seen(place: Place, rows: int) -> None:
        read[place.operator, place.state] += rows

    try:
        handles = list((engine or ThreadEngine()).run(pending.context, plan, counter, seen))
    except InvalidState as error:
        if error.kind is not ErrorKind.DUPLICATE_ROW_KEY or not plan.transformed:
            raise
        names = ", ".join(dict.fromkeys(one.function for one in plan.transformed))
        raise InvalidInput(
            f"after {names}, {error}. Nothing was published", kind=error.kind, **error.details
        ) from error
    check_counts(plan, handles)
    counter.finish()
    handles += _without_rows(plan, handles)
    pending.add_handles(handles_table(handles))
    permit = pending.publish()
    written = [handle for handle in handles if handle.rows]
    return Rewritten(
        permit,
        segments=len(written),
        rows=sum(handle.rows for handle in written),
        bytes=sum(handle.size_bytes for handle in written),
        rehashed=plan.rehashed,
        transformed=tuple(
            TransformedRows(one, read[one.operator, one.state], _rows_of(plan, one, written))
            for one in plan.transformed
        ),
    )


def _rows_of(plan: RewritePlan, state: Transformed, handles: Iterable[Handle]) -> int:
    """Return the rows written of a state, for broadcast state of one copy."""
    rows = [handle.rows for handle in handles if (handle.operator, handle.state) == (state.operator, state.state)]
    mode = next(one.mode for one in plan.states if (one.operator, one.name) == (state.operator, state.state))
    return max(rows, default=0) if mode is Mode.BROADCAST else sum(rows)


def _parent(store: CheckpointStore, checkpoint: Checkpoint, target: CheckpointStore | None) -> Any:
    """Return the parent of the new checkpoint; ``InvalidInput`` for a target that is not empty."""
    if target is None:
        return store.permit_of(checkpoint)
    there = target.start(checkpoint.record.job_id)
    if there is not None:
        raise InvalidInput(
            f"{target.url} holds checkpoint {there.record.checkpoint_id}; a rewritten checkpoint goes to an empty "
            "store, or to its own",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=target.url,
        )
    return checkpoint


class _Counter:
    """Adds up the rows that tasks report, from any thread."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._sum = progress or (lambda _done, _total: None), total, 0
        self._lock = threading.Lock()
        self._progress(0, total)

    def __call__(self, rows: int) -> None:
        with self._lock:
            self._sum += rows
            self._progress(min(self._sum, self._total), self._total)

    def finish(self) -> None:
        """Everything is written. If layers merged, that was fewer rows than were stored."""
        self._progress(self._total, self._total)


def check_counts(plan: RewritePlan, handles: Iterable[Handle]) -> None:
    """Raise ``DamagedCheckpoint`` unless each state has as many new rows as stored ones.

    If layers merge, or progress is gathered, the stored rows are only an upper bound. A function
    may return any number.
    """
    written: dict[tuple[str, str], int] = defaultdict(int)
    stored: dict[tuple[str, str], int] = defaultdict(int)
    merged: set[tuple[str, str]] = set()
    for handle in handles:
        written[handle.operator, handle.state] += handle.rows
    tasks: list[tuple[Move | RehashSource, Place]] = [(move, move.place) for move in plan.moves]
    tasks += [(source, plan.targets[source.first_target]) for source in plan.sources]
    for task, place in tasks:
        stored[place.operator, place.state] += task.rows
        if not task.exact:
            merged.add((place.operator, place.state))
    for name in (written.keys() | stored.keys()) - {one[:2] for one in plan.transformed}:
        if written[name] != stored[name] and not (name in merged and written[name] < stored[name]):
            raise DamagedCheckpoint(
                f"the rewrite of state {name[1]!r} of {name[0]!r} wrote {written[name]} rows, but {stored[name]} are "
                "stored; nothing was published"
            )


def _without_rows(plan: RewritePlan, handles: Iterable[Handle]) -> list[Handle]:
    """Return handles of the places without rows: those planned so, and targets that got none."""
    reported = {Place(handle.operator, handle.state, handle.subtask) for handle in handles}
    states = {(state.operator, state.name): state for state in plan.states}
    found = []
    for place in (*plan.empty, *plan.targets):
        if place not in reported:
            state = states[place.operator, place.state]
            found.append(
                Handle(place.operator, place.state, state.mode, place.subtask, 0, state.edge, state.current.id)
            )
    return found
