"""The second phase of sinks: after a publication, before a start, and at the end of a job."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from stateformat.errors import DamagedCheckpoint, InvalidInput, InvalidState, StorageError, UnsupportedFormat
from stateformat.history import Wanted, carried_committables
from stateformat.model import CheckpointKind, Record
from stateformat.publication import CommitPermit
from stateformat.store import CheckpointStore

from ..dataflow.api import TwoPhaseCommitSink
from ..dataflow.chained_operator import Guard, OperatorError
from ..dataflow.compile import Job
from ..dataflow.graph import COMMITTABLES
from ..dataflow.steps import Steps
from .clock import Clock
from .reports import RunDiscarded

logger = logging.getLogger(__name__)

COMMIT_TRIES = 10
COMMIT_WAIT_US = 1_000_000
"""How often, and after how long, a sink retries what it has put off when the job ends."""


def sinks_of(flow: Steps) -> dict[str, TwoPhaseCommitSink]:
    """Return the sinks of a dataflow by uid: the prototypes, which commit."""
    return {uid: step.logic for uid, step in flow.steps.items() if isinstance(step.logic, TwoPhaseCommitSink)}


def pending_committables(permit: CommitPermit | None, job: Job, sinks: Iterable[str]) -> dict[str, pa.Table]:
    """Return these sinks' committables in a checkpoint, by uid, as the job declares them."""
    if permit is None or "committables" not in permit.record.required_features:
        return {}
    found = {}
    for uid in sinks:
        declared = job.state(uid, COMMITTABLES)
        if declared is not None and (uid, COMMITTABLES) in permit.record.by_state:
            rows = permit.checkpoint().read(uid, COMMITTABLES).table(as_schema=declared.current)
            if rows.num_rows:
                found[uid] = rows
    return found


def commit(
    permit: CommitPermit, sinks: Mapping[str, TwoPhaseCommitSink], rows_of: Mapping[str, pa.Table]
) -> dict[str, pa.Table]:
    """Let the sinks commit the rows of a published checkpoint; return what they put off, by uid.

    The same rows may come twice. Raises ``DamagedCheckpoint`` for rows that a sink cannot have
    prepared, before any commits, and ``OperatorError`` for what a sink raises.
    """
    for uid, rows in rows_of.items():
        _check(uid, sinks[uid], rows, renamed=_may_be_renamed(permit.record, rows))
    again: dict[str, pa.Table] = {}
    for uid, rows in rows_of.items():
        with Guard(uid, None)("commit"):
            left = sinks[uid].commit(permit, rows)
            if left is not None and (not isinstance(left, pa.Table) or left.column_names != rows.column_names):
                raise InvalidState(
                    f"it returned {type(left).__name__} that is not rows of what it was given, and not None"
                )
        if left is not None and left.num_rows:
            again[uid] = left
    return again


def _may_be_renamed(record: Record, rows: pa.Table) -> bool:
    """Whether the sink may have been renamed; not if the publishing run prepared some rows."""
    if record.kind is not CheckpointKind.CHECKPOINT:
        return True
    # A checkpoint made from another store's has the same kind, but no rows of its own attempt.
    own = pc.equal(rows["_attempt_id"], record.attempt_id)
    return not pc.any(own).as_py()


def check_places(sinks: Mapping[str, TwoPhaseCommitSink], source: Record, url: str) -> None:
    """Refuse to begin a job from ``source`` if another job writes to the place of a sink.

    Called before the job's own store has a checkpoint, so nothing of the job itself can be
    prepared. Raises ``InvalidInput`` for a sink with output prepared for later checkpoints than
    ``source``. Sinks that cannot say what is prepared are not checked.
    """
    for uid, sink in sinks.items():
        with Guard(uid, None)("prepared_attempts"):
            attempts = sink.prepared_attempts(uid)
        latest = max((each for each in attempts or () if each.checkpoint_id > source.checkpoint_id), default=None)
        if latest is not None:
            raise InvalidInput(
                f"the place of sink {uid!r} holds output that was prepared for checkpoint {latest.checkpoint_id} "
                f"(attempt {latest.attempt_id}), and the job is to begin after checkpoint {source.checkpoint_id} of "
                f"{url}. Another job that goes on from that checkpoint writes there, or did before it crashed. Two "
                "jobs must not share a place: give the sink another one, and leave to the other job what it has "
                f"still to commit: drop={f'{uid}/{COMMITTABLES}'!r}. If the other job has ended for good, remove what "
                "it has left instead (docs/sinks.md says where), and start again.",
                operator=uid,
                checkpoint_id=latest.checkpoint_id,
            )


def _check(uid: str, sink: TwoPhaseCommitSink, rows: pa.Table, *, renamed: bool) -> None:
    """Let a sink refuse rows as ``DamagedCheckpoint``. Other errors are the sink's own fault."""
    try:
        sink.check_committables(uid, rows, renamed=renamed)
    except DamagedCheckpoint:
        raise
    except Exception as error:
        raise OperatorError.of(error, operator=uid, subtask=None, hook="check_committables") from error


def clean(
    store: CheckpointStore,
    permit: CommitPermit | None,
    job: Job,
    sinks: Mapping[str, TwoPhaseCommitSink],
    carried: Mapping[str, pa.Table],
) -> None:
    """Let the sinks remove prepared output that no checkpoint of the store carries.

    ``carried``: the committables of the newest checkpoint, by uid. Others are read only where a
    sink may have prepared output up to the newest id. If one cannot be read, a warning says so and
    nothing is removed. Raises ``OperatorError`` for what a sink raises.
    """
    newest_id = permit.ref.checkpoint_id if permit else 0
    wanted = {}
    for uid, sink in sinks.items():
        declared = job.state(uid, COMMITTABLES)
        if newest_id and declared is not None and type(sink).clean is not TwoPhaseCommitSink.clean:
            with Guard(uid, None)("prepared_attempts"):
                attempts = sink.prepared_attempts(uid)
            ids = [1] if attempts is None else [each.checkpoint_id for each in attempts]
            if min(ids, default=newest_id + 1) <= newest_id:
                wanted[uid] = Wanted(min(ids), declared.current)
    try:
        others = carried_committables(store.storage, COMMITTABLES, wanted)
        for uid, tables in others.items():
            for rows in tables:
                _check(uid, sinks[uid], rows, renamed=True)
    except (DamagedCheckpoint, UnsupportedFormat, InvalidState, StorageError) as error:
        logger.warning(
            "sinks %s keep what earlier runs prepared, since it is unknown what the checkpoints of %s carry: %s",
            ", ".join(map(repr, wanted)),
            store.url,
            error,
        )
        others = None
    for uid, sink in sinks.items():
        tables = [carried[uid]] if uid in carried else []
        known = others is not None or uid not in wanted
        tables += (others or {}).get(uid, [])
        with Guard(uid, None)("clean"):
            kept = pa.concat_tables(tables) if tables else None
            sink.clean(uid, newest_id if known else 0, kept)


def commit_rest(
    permit: CommitPermit,
    sinks: Mapping[str, TwoPhaseCommitSink],
    left: Mapping[str, pa.Table],
    clock: Clock,
    until_us: int | None = None,
) -> Mapping[str, pa.Table]:
    """Commit what sinks have put off until it is done, since no checkpoint follows.

    Returns what is left when the clock reaches ``until_us``; without it, nothing is left. Raises
    ``RunDiscarded`` after too many tries, ``OperatorError`` for what a sink raises.
    """
    for _ in range(COMMIT_TRIES):
        if not left or (until_us is not None and clock.now_us() + COMMIT_WAIT_US > until_us):
            return left
        clock.wait_until(clock.now_us() + COMMIT_WAIT_US)
        left = commit(permit, sinks, left)
    if left:
        uid, rows = next(iter(left.items()))
        raise RunDiscarded(
            f"sink {uid!r} has put off {rows.num_rows} committables of checkpoint {permit.ref.checkpoint_id} for "
            f"{COMMIT_TRIES} times, and the job ends with it; they stay in the checkpoint, and the next start tries "
            "again",
            counted=True,
        )
    return left


def left_words(left: Mapping[str, pa.Table]) -> str:
    """Return what sinks have put off, as the end of a sentence; empty if nothing."""
    rows = sum(table.num_rows for table in left.values())
    names = ", ".join(map(repr, left))
    return f"sink {names} has put off {rows} committables, which the next start commits" if rows else ""
