"""What a job starts from, and how many checkpoints it keeps if its user has not set that.

A store that the job begins keeps :data:`KEPT_BY_DEFAULT`. Every record of such a run says so in a
property, which restarts read. Any other store that holds more keeps all, since its user may rely on
every checkpoint. So does a store that began as a savepoint, which belongs to the user.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace

import stateformat as sf
from stateformat import errors as er
from stateformat.history import find_record, record_ids
from stateformat.model import KEEP_PROPERTY, CheckpointKind
from stateformat.publication import CommitPermit, CopyProgress
from stateformat.reading import Checkpoint
from stateformat.storage import checkpoint_address
from stateformat.store import CheckpointStore

from ..dataflow.flow import Dataflow
from .commits import check_places, sinks_of
from .options import KEPT_BY_DEFAULT, Keep, Options, Schedule
from .restore import plan_of

logger = logging.getLogger(__name__)

REPORT_EVERY_SECONDS = 10.0
"""How often a long copy reports its progress."""


def start(
    store: CheckpointStore, flow: Dataflow, options: Options, origin: Mapping[str, str] | None = None
) -> CommitPermit | None:
    """Return the newest checkpoint of the store, or one made from ``start_from``, or None.

    ``origin``: the properties that say who runs the job.

    Before anything is copied it raises ``InvalidInput`` for an unclaimed savepoint or a sink whose
    place another job writes to, ``JobMismatch`` for a savepoint of another job, ``RestoreRefused``
    for one that does not fit; then ``PublishConflict`` if another run began the store meanwhile.
    """
    permit = store.start(flow.job_id)
    if permit is not None:
        if permit.record.kind is CheckpointKind.SAVEPOINT and not options.claim:
            raise er.InvalidInput(
                f"{store.url} is a savepoint (checkpoint {permit.ref.checkpoint_id}), which is yours: a run would "
                f"publish there, and retention would delete it in time. Give the job a store of its own with "
                f"start_from={store.url!r}, or hand the savepoint over to it with claim=True",
                url=store.url,
            )
        if options.start_from is not None:
            logger.info("%s has checkpoints already, so start_from=%r is not read", store.url, options.start_from)
        return permit
    if options.start_from is None:
        return None
    if options.claim:
        raise er.InvalidInput(
            f"claim=True hands a savepoint over to a job that runs in it, and {store.url} is empty. Open the "
            "savepoint's own store for the job, or leave claim out: start_from alone copies the savepoint"
        )
    return _begin_from(
        store, flow, options, options.start_from, {**keep_properties(options.schedule), **(origin or {})}
    )


def _begin_from(
    store: CheckpointStore, flow: Dataflow, options: Options, address: str, properties: Mapping[str, str]
) -> CommitPermit:
    url, checkpoint_id = checkpoint_address(address)
    try:
        checkpoint = sf.open(url, **options.start_from_options).open(checkpoint_id)
    except er.NotFound as error:
        raise er.InvalidInput(f"start_from={address!r} names no checkpoint: {error}", kind=error.kind) from error
    if checkpoint.record.job_id != flow.job_id:
        raise er.JobMismatch(
            f"{checkpoint!r} is of job {checkpoint.record.job_id!r}, and the dataflow is job {flow.job_id!r}. Segments "
            "carry the job's id, so a job that starts from a savepoint keeps it: "
            f"Dataflow({checkpoint.record.job_id!r})",
            job_id=checkpoint.record.job_id,
        )
    plan_of(flow, checkpoint, options)
    try:
        check_places(sinks_of(flow), checkpoint.record, checkpoint.storage.url)
    except er.InvalidInput:
        # Another run of this job may have begun the store meanwhile, which is reported below.
        if store.start(flow.job_id) is None:
            raise
    try:
        permit = store.start_from(checkpoint, properties, _CopyReporter(checkpoint, store))
    except er.InvalidInput as error:
        if error.kind is not er.ErrorKind.STORE_NOT_EMPTY:
            raise
        raise er.PublishConflict(
            f"another run has begun {store.url} while {checkpoint!r} was copied there. Nothing of this run was "
            "published; if that other run is not wanted, stop it, and start again",
            kind=er.ErrorKind.PUBLISH_LOST,
        ) from error
    logger.info("%s begins with checkpoint %s, made from %r", store.url, permit.ref.checkpoint_id, checkpoint)
    return permit


class _CopyReporter:
    """Logs the progress of a copy now and then."""

    def __init__(self, checkpoint: Checkpoint, store: CheckpointStore) -> None:
        self._what = f"{checkpoint!r} to {store.url}"
        self._reported = time.monotonic()

    def __call__(self, now: CopyProgress) -> None:
        if now.objects_done == 0:
            logger.info("copying %s: %d objects, %d bytes", self._what, now.objects_total, now.bytes_total)
        elif time.monotonic() - self._reported >= REPORT_EVERY_SECONDS:
            self._reported = time.monotonic()
            logger.info("copied %d of %d bytes of %s", now.bytes_done, now.bytes_total, self._what)


def decide_keep(store: CheckpointStore, permit: CommitPermit | None, schedule: Schedule, *, claim: bool) -> Schedule:
    """The schedule for this start; ``keep`` is None, with a warning, if the default must not apply.

    ``claim``: a savepoint in the store was handed over to the job.
    """
    if schedule.keep is not Keep.DEFAULT or schedule.keep_for_us is not None:
        return schedule
    if permit is None or KEEP_PROPERTY in permit.record.properties:
        return schedule
    ids = record_ids(store.storage)
    why = ""
    if len(ids) > KEPT_BY_DEFAULT:
        why = "was begun without a limit"
    elif ids and not claim:
        try:
            oldest = find_record(store.storage, ids[0])
        except (er.DamagedCheckpoint, er.UnsupportedFormat):
            why = f"holds a record that cannot be read, {ids[0]}"
        else:
            if oldest is not None and oldest.kind is CheckpointKind.SAVEPOINT:
                why = f"began as a savepoint, checkpoint {ids[0]}, which is yours"
    if not why:
        return schedule
    logger.warning(
        "%s %s, so all of its %d checkpoints are kept until you say how many (keep, None or --keep all for all); "
        "`ckpt gc %s --keep %d --delete` removes all but the newest %d",
        *(store.url, why, len(ids), store.url, KEPT_BY_DEFAULT, KEPT_BY_DEFAULT),
    )
    return replace(schedule, keep=None)


def keep_count(schedule: Schedule) -> int | None:
    """Return how many checkpoints a run keeps; None: all. With an age alone, the newest."""
    if schedule.keep is Keep.DEFAULT:
        return KEPT_BY_DEFAULT
    return 1 if schedule.keep is None and schedule.keep_for_us is not None else schedule.keep


def keep_properties(schedule: Schedule) -> dict[str, str]:
    """Return the properties of every record that the run publishes."""
    # With an age alone, young checkpoints would be lost if a later run kept the default number.
    is_default = schedule.keep is Keep.DEFAULT and schedule.keep_for_us is None
    return {KEEP_PROPERTY: "default"} if is_default else {}
