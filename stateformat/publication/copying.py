"""Copies of a checkpoint in another store, and rollback to an older checkpoint.

A savepoint (SPEC.md section 10) has every object under the same path with the same bytes, digests
verified, and a record of another kind. Repeating an interrupted copy completes it. A rollback
(section 8.3) copies no bytes: it publishes newest + 1 with the handles of an older checkpoint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..errors import ErrorKind, InvalidInput, JobMismatch, PublishConflict
from ..formats import refuse_foreign
from ..history import chain_down_to, newest_record, record_ids
from ..model import CheckpointId, CheckpointKind, Record
from ..reading import Checkpoint, load_manifest
from ..record import encode_record
from ..storage import Storage
from .copied_objects import Progress, check_place, copy_manifest, copy_objects
from .pending import Draft, PendingCheckpoint, require_empty
from .protocol import CommitPermit, Step, conflict, create_record

logger = logging.getLogger(__name__)


def copy(
    checkpoint: Checkpoint,
    target: Storage,
    *,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Record:
    """Make ``target`` a self-contained copy of one checkpoint (kind ``savepoint``).

    It may be repeated after any failure, and on a complete target. Raises ``InvalidInput`` for a
    target that holds another checkpoint (kind ``STORE_NOT_EMPTY``) or lies in the source's folders,
    ``JobMismatch``, ``CheckpointExpired`` or ``DamagedCheckpoint`` for the source,
    ``StorageError`` and ``OutcomeUnknown``.
    """
    start = time.perf_counter()
    record = checkpoint.record
    if target.url == checkpoint.storage.url:
        raise InvalidInput(f"cannot copy {checkpoint!r} into its own store; give another address", url=target.url)
    check_place(checkpoint, target)
    _check_target(record, target)
    copy_objects(checkpoint, target, progress=progress)
    copy_manifest(checkpoint, target)
    # Only the kind changes, so that two copies of one checkpoint have the same bytes.
    savepoint = replace(record, kind=CheckpointKind.SAVEPOINT)
    ending = create_record(target, savepoint.ref, encode_record(savepoint), sleep=sleep)
    if ending.step is not Step.PERMITTED:
        raise conflict(target, savepoint, ending)
    what, took_s = f"checkpoint {record.checkpoint_id} of {checkpoint.storage.url}", time.perf_counter() - start
    logger.info("copied %s to %s: %s; copying took %.3f s", what, target.url, record.totals, took_s)
    return savepoint


def _check_target(record: Record, target: Storage) -> None:
    there = newest_record(target)
    if there is None:
        refuse_foreign(target)
        return
    if there.job_id != record.job_id:
        raise JobMismatch(
            f"{target.url} belongs to job {there.job_id!r}, and the checkpoint to job {record.job_id!r}; copy it "
            "elsewhere",
            job_id=there.job_id,
        )
    if there.ref != record.ref or len(record_ids(target)) > 1:
        raise InvalidInput(
            f"{target.url} holds checkpoint {there.checkpoint_id} (attempt {there.attempt_id}), so checkpoint "
            f"{record.checkpoint_id} (attempt {record.attempt_id}) cannot be copied there; a copy is a store of its "
            "own",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=target.url,
        )


def begin_from(
    checkpoint: Checkpoint,
    target: Storage,
    *,
    properties: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CommitPermit:
    """Begin the history of an empty store with the content of another store's checkpoint.

    Copies the segments, then publishes checkpoint id + 1 with the checkpoint as its parent: same
    job, graph, states and handles; no ``stop``, kind ``checkpoint``. It may be repeated. Raises
    ``InvalidInput`` (kind ``STORE_NOT_EMPTY``), and what :func:`copy` and ``publish`` raise.
    """
    check_place(checkpoint, target)
    require_empty(target)
    draft = Draft.with_content(checkpoint.record, parent=checkpoint, properties=properties or {})
    pending = PendingCheckpoint(target, draft, sleep=sleep)
    copy_objects(checkpoint, target, progress=progress)
    pending.add_handles(checkpoint.manifest.full())
    return pending.publish()


def left_behind(ids: Sequence[CheckpointId]) -> str:
    """Return what a rollback or repair means for the output, as a sentence. ``ids`` ascend."""
    return (
        f"left behind: {', '.join(map(str, ids))}. What these checkpoints have committed, or still commit, stays in "
        "the output; sinks will see their input again"
    )


def rollback(
    storage: Storage,
    checkpoint_id: CheckpointId,
    *,
    newest: CheckpointId | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CommitPermit:
    """Publish the content of an older checkpoint again; ``notes`` name those left behind.

    The new checkpoint has the older one's graph, states and handles, no ``stop``, kind
    ``rollback``, and the newest as its parent. ``newest`` is the id that must be the newest; None:
    any. Raises ``NotFound`` (unknown, or a stray), ``CheckpointExpired`` (before, or during this
    call), ``InvalidInput`` for the newest itself, ``PublishConflict`` where another checkpoint
    than ``newest`` is the newest, ``JobMismatch``, and what ``publish`` raises.
    """
    *left, source = chain_down_to(storage, checkpoint_id)
    if not left:
        raise InvalidInput(f"checkpoint {checkpoint_id} is the newest of {storage.url}; there is nothing to roll back")
    if newest is not None and left[0].checkpoint_id != newest:
        raise PublishConflict(
            f"{newest} is not the newest checkpoint of {storage.url} any more: {left[0].checkpoint_id} was published "
            "meanwhile. Nothing was changed; look again before you leave it behind",
            kind=ErrorKind.PUBLISH_LOST,
            checkpoint_id=newest,
            newest=left[0].checkpoint_id,
        )
    if source.job_id != left[0].job_id:
        raise JobMismatch(
            f"checkpoint {checkpoint_id} of {storage.url} is of job {source.job_id!r}, and the newest, "
            f"{left[0].checkpoint_id}, of job {left[0].job_id!r}; a store belongs to one job",
            job_id=left[0].job_id,
        )
    note = left_behind([record.checkpoint_id for record in reversed(left)])
    handles = load_manifest(storage, source).full()
    draft = Draft.with_content(
        source,
        parent=Checkpoint(storage, left[0], bound_to_run=True),
        kind=CheckpointKind.ROLLBACK,
        source=source.ref,
        properties=source.lasting_properties,
        notes=(note,),
    )
    pending = PendingCheckpoint(storage, draft, sleep=sleep)
    pending.add_handles(handles)
    found = pending.publish()
    logger.warning("rolled %s back to checkpoint %s as %s; %s", storage.url, checkpoint_id, pending.checkpoint_id, note)
    return found
