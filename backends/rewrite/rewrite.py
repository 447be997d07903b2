"""``rewrite``: plan, let an engine write, publish.

Theory of operation. The driver begins a checkpoint, whose id and attempt are in the names of all that is written; the
engine runs the tasks, wherever; the driver counts what they report against the plan, and publishes. Whatever fails before
the end leaves the store as it was, with some segments that nothing names.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from stateformat.errors import DamagedCheckpoint, ErrorKind, InvalidInput
from stateformat.manifest import handles_table
from stateformat.model import CheckpointKind, Handle, Record
from stateformat.publication import CommitPermit
from stateformat.reading import Checkpoint
from stateformat.snapshot import WriteContext
from stateformat.store import CheckpointStore

from .planning import Place, RewritePlan, plan_rewrite
from .spec import RewriteSpec
from .threads import ThreadEngine

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Told (segments written, segments in all), from any thread."""


class Engine(Protocol):
    """What runs the tasks of a plan."""

    def run(self, context: WriteContext, plan: RewritePlan, done: Callable[[int], None]) -> Iterable[Handle]:
        """One handle for each move, and one for each target that any rows were dealt to."""
        ...


@dataclass(frozen=True)
class Rewritten:
    """The checkpoint that was published, and what it took: segments (inline ones among them), rows, bytes written."""

    permit: CommitPermit
    segments: int
    rows: int
    bytes: int
    rehashed: tuple[tuple[str, str], ...]

    @property
    def record(self) -> Record:
        """The record of the new checkpoint."""
        return self.permit.record


def rewrite(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    spec: RewriteSpec | None = None,
    *,
    engine: Literal["local", "spark"] | Engine = "local",
    target: CheckpointStore | None = None,
    progress: Progress | None = None,
) -> Rewritten:
    """Write all data of a checkpoint anew, and publish it as the newest of ``store``, or in ``target``, an empty store.

    In its own store ``checkpoint`` must be the newest. ``engine``: threads, the active Spark session (or a local one), or an
    object. Raises ``InvalidInput``, ``RestoreRefused`` (a restore at the new parallelism would be refused),
    ``DamagedCheckpoint``, ``PublishConflict`` where it is not the newest or no longer, and what else
    ``PendingCheckpoint.publish`` raises. In all cases the checkpoint stays as it was.
    """
    spec = spec or RewriteSpec()
    destination = target or store
    record = checkpoint.record
    plan = plan_rewrite(checkpoint, spec)
    runner = _engine(engine)
    pending = destination.begin(
        job_id=record.job_id,
        job_name=record.job_name,
        graph=plan.graph,
        states=plan.states,
        parent=_parent(store, checkpoint, target),
        kind=CheckpointKind.REWRITE,
        source=record.ref,
        rescaled_from=plan.rescaled_from,
        stop=record.stop,
        properties=record.lasting_properties,
        options=spec.options,
    )
    counter = _Counter(progress, plan.rows)
    handles = list(runner.run(pending.context, plan, counter))
    check_counts(plan, handles)
    counter.finish()
    handles += _nothing(plan, handles)
    pending.add_handles(handles_table(handles))
    permit = pending.publish()
    written = [handle for handle in handles if handle.rows]
    return Rewritten(
        permit,
        segments=len(written),
        rows=sum(handle.rows for handle in written),
        bytes=sum(handle.size_bytes for handle in written),
        rehashed=plan.rehashed,
    )


def _parent(store: CheckpointStore, checkpoint: Checkpoint, target: CheckpointStore | None) -> Any:
    """What the new checkpoint is built on; ``InvalidInput`` for a target that is not empty, before anything is written."""
    if target is None:
        return store.permit_of(checkpoint)
    there = target.start(checkpoint.record.job_id)
    if there is not None:
        raise InvalidInput(
            f"{target.url} holds checkpoint {there.record.checkpoint_id}; a rewritten checkpoint goes to an empty store, or "
            "to its own",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=target.url,
        )
    return checkpoint


def _engine(engine: str | Engine) -> Engine:
    if engine == "local":
        return ThreadEngine()
    if engine == "spark":
        from ..spark.rewrite import SparkEngine

        return SparkEngine()
    if isinstance(engine, str):
        raise InvalidInput(f"no engine {engine!r}; engines are local and spark")
    return engine


class _Counter:
    """Adds up what tasks report, from any thread."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._sum = progress or (lambda _done, _total: None), total, 0
        self._lock = threading.Lock()
        self._progress(0, total)

    def __call__(self, rows: int) -> None:
        with self._lock:
            self._sum += rows
            self._progress(min(self._sum, self._total), self._total)

    def finish(self) -> None:
        """Everything is written, fewer rows than there were where layers have been merged."""
        self._progress(self._total, self._total)


def check_counts(plan: RewritePlan, handles: Iterable[Handle]) -> None:
    """Every row that was to be written has been, once: by state, against the manifest that was read.

    Where layers merge, or progress is gathered, fewer rows come out than are stored, so that is a bound only.
    """
    written: dict[tuple[str, str], int] = defaultdict(int)
    stored: dict[tuple[str, str], int] = defaultdict(int)
    merged: set[tuple[str, str]] = set()
    for handle in handles:
        written[handle.operator, handle.state] += handle.rows
    for move in plan.moves:
        stored[move.place.operator, move.place.state] += move.rows
        merged |= set() if move.exact else {(move.place.operator, move.place.state)}
    for source in plan.sources:
        place = plan.targets[source.first_target]
        stored[place.operator, place.state] += source.rows
        merged |= set() if source.exact else {(place.operator, place.state)}
    for name in written.keys() | stored.keys():
        if written[name] != stored[name] and not (name in merged and written[name] < stored[name]):
            raise DamagedCheckpoint(
                f"the rewrite of state {name[1]!r} of {name[0]!r} wrote {written[name]} rows where {stored[name]} were to be "
                "read; nothing was published. `ckpt validate --level full` shows whether the checkpoint is whole"
            )


def _nothing(plan: RewritePlan, handles: Iterable[Handle]) -> list[Handle]:
    """Handles of the places that report no rows: those planned so, and targets that nothing was dealt to."""
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


__all__ = ["Engine", "Progress", "Rewritten", "check_counts", "rewrite"]
