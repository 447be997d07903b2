"""``rewrite``: plan, let an engine write, publish.

The driver begins a checkpoint, whose id and attempt are in the names of all new objects. The engine
runs the tasks. The driver compares their counts with the plan, and publishes. A failure before that
leaves the store as it was, except for some segments that nothing refers to.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput, InvalidState
from stateformat.manifest import handles_table
from stateformat.model import CheckpointKind, Handle, Mode, Record
from stateformat.publication import CommitPermit, PendingCheckpoint
from stateformat.reading import Checkpoint
from stateformat.snapshot import WriteContext
from stateformat.store import CheckpointStore

from .planning import Move, Place, RehashSource, RewritePlan, Transformed, plan_rewrite
from .rescale import begin_again
from .spec import RewriteSpec
from .threads import ThreadEngine
from .work import Seen

Progress = Callable[[int, int], None]
"""Called with the rows written and the rows to write, from any thread."""


class Engine(Protocol):
    """Runs the tasks of a plan."""

    def run(
        self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None], seen: Seen
    ) -> Iterable[Handle]:
        """Return a handle for each place of a move, and each target with rows, in any order.

        Calls ``done`` with numbers of rows as they are written, from any thread; and ``seen`` with
        a place of a state and numbers of rows of that state that were read. Each row counts once,
        even if a task ran twice.
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
    rows = _RowsRead()
    try:
        handles = list((engine or ThreadEngine()).run(pending.context, plan, counter, rows))
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
            TransformedRows(one, rows.read[one.operator, one.state], _rows_of(plan, one, written))
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


class _RowsRead:
    """Adds up the rows read of each state, from any thread."""

    def __init__(self) -> None:
        self.read: dict[tuple[str, str], int] = defaultdict(int)
        self._lock = threading.Lock()

    def __call__(self, place: Place, rows: int) -> None:
        with self._lock:
            self.read[place.operator, place.state] += rows


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
