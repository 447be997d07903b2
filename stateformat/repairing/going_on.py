"""Continuing from a checkpoint with lost segments: with what other places have, without the rest.

Nothing is deleted or overwritten. What is missing and found elsewhere is written again under its
own path; if something stays damaged or is given up, newest + 1 is published with the remaining
handles, as a rewrite of the newest, a rollback, or a repair (SPEC.md section 8.4). Just before
that, the lost segments are checked once more, since they may be back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..errors import CheckpointError, DamagedCheckpoint, ErrorKind, InvalidState, NotFound, PublishConflict
from ..history import newest_record
from ..manifest import with_spilled
from ..model import GIVEN_UP_PROPERTY, CheckpointId, CheckpointKind, Record
from ..publication import (
    CommitPermit,
    Diagnosis,
    Draft,
    PendingCheckpoint,
    Replaced,
    check_next_id,
    left_behind,
    ref_of_unreadable,
)
from ..reading import Checkpoint
from ..schema import MANIFEST_SCHEMA
from ..storage import Storage
from .elsewhere import Done, find, put_back
from .losing import Losses, given_up_text, lost_segments, still_lost
from .without import Loss, Scope

Progress = Callable[[int, int], None]
"""Called with the bytes read so far, and those to read."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GoneOn:
    """What :func:`go_on` has done."""

    again: tuple[str, ...]
    """Segments that were written again under their own paths."""
    moved: Mapping[str, str]
    """By path, the new path of each segment that stays damaged under its own."""
    given_up: tuple[Loss, ...]
    permit: CommitPermit | None
    """None if nothing had to be published: the checkpoint is intact again."""


def losses_of(storage: Storage, diagnosis: Diagnosis, source: int | None = None) -> Losses | None:
    """Return the lost segments of ``source``, by default the newest checkpoint, after a diagnosis.

    None if it is intact, if anything but segments is damaged, if it may be a stray, or if it is
    unknown what is damaged. Raises ``NotFound`` for a ``source`` that was not diagnosed.
    """
    newest = diagnosis.newest
    if source in (None, newest):
        record = diagnosis.found.chain[0] if diagnosis.fault is None and diagnosis.found.chain else None
        return None if record is None else lost_segments(storage, record, diagnosis.problems, diagnosis.level)
    way = diagnosis.chosen
    if way is None or way.record.checkpoint_id != source:
        raise NotFound(f"checkpoint {source} of {storage.url} was not diagnosed", checkpoint_id=source)
    if way.problems is None or not way.certain or diagnosis.undecided is not None:
        return None
    return lost_segments(storage, way.record, way.problems, diagnosis.level)


def go_on(
    storage: Storage,
    diagnosis: Diagnosis,
    losses: Losses,
    *,
    places: Sequence[Storage] = (),
    give_up: Scope | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> GoneOn:
    """Put back the lost segments that ``places`` have, and give up the rest if ``give_up`` is set.

    ``give_up``: what is discarded with a lost key group; None: give up nothing. ``progress`` is
    called with the bytes read from ``places``, and those to read.

    Raises ``DamagedCheckpoint`` if nothing may be given up and a segment was not found: then
    nothing was written. Raises ``InvalidState`` if something that a run needs is lost,
    ``PublishConflict`` if the newest has changed or a segment is back, and what ``publish`` raises.
    """
    found = find(losses.segments, places, _meter(losses, progress)) if places else {}
    missing = [each for each in losses.segments if each.path not in found]
    if missing and give_up is None:
        raise DamagedCheckpoint(
            f"{len(missing)} of {len(losses.segments)} lost segments of checkpoint {losses.record.checkpoint_id} of "
            f"{storage.url} are found nowhere, {missing[0].path} first; nothing was put back. `ckpt repair` says what "
            "going on without them would lose",
            kind=ErrorKind.OBJECT_MISSING,
            path=missing[0].path,
        )
    handles, given = losses.without(give_up or "rows", found)
    _check_needed(losses.record, given)
    changed = sorted({each.path for each in losses.segments} - still_lost(storage, losses))
    if changed:
        raise PublishConflict(
            f"segment {changed[0]} of {storage.url} is whole now; it was not a moment ago. Nothing was changed; look "
            "again with `ckpt repair`",
            kind=ErrorKind.OVERTAKEN,
            path=changed[0],
        )
    _check_newest(storage, diagnosis)
    again, moved = put_back(storage, losses.segments, found, diagnosis.newest)
    if not moved and not given:
        number = losses.record.checkpoint_id
        logger.warning("put %d segments back into %s; checkpoint %d is whole", len(again), storage.url, number)
        return GoneOn(tuple(again), moved, (), None)
    pending = _pending(storage, diagnosis, losses, given, give_up, sleep)
    pending.add_handles(with_spilled(_plain(handles), moved) if moved else handles)
    permit = pending.publish()
    what = f"checkpoint {pending.checkpoint_id} has the content of {losses.record.checkpoint_id}"
    logger.warning("repaired %s: %s, without %s", storage.url, what, given_up_words(given))
    return GoneOn(tuple(again), moved, tuple(given), permit)


def _meter(losses: Losses, progress: Progress | None) -> Done:
    """Return a callback that counts the bytes read from other places."""
    lock, done, total = Lock(), [0], sum(each.size_bytes for each in losses.segments)

    def read(size_bytes: int) -> None:
        with lock:
            done[0] = min(done[0] + size_bytes, total)
            if progress is not None:
                progress(done[0], total)

    return read


def why_not(storage: Storage, diagnosis: Diagnosis) -> CheckpointError:
    """Return the error for a damaged newest checkpoint that cannot be repaired or continued."""
    newest = diagnosis.newest
    if diagnosis.undecided is not None:
        return diagnosis.fault or DamagedCheckpoint(
            f"checkpoint {newest} of {storage.url} may be whole, so nothing was changed: {diagnosis.undecided}"
        )
    if diagnosis.fault is not None:
        return DamagedCheckpoint(
            f"the record of checkpoint {newest} of {storage.url} cannot be read, so what it would lose is unknown; "
            "name an older checkpoint (STORE@ID), or go back (`ckpt repair`)",
            kind=diagnosis.fault.kind,
        )
    other = next(each for each in diagnosis.problems if not each.path.startswith(layout.SEGMENTS))
    return DamagedCheckpoint(
        f"checkpoint {newest} of {storage.url} has lost more than segments, so what is left of it is unknown: "
        f"{other.message}. Go back to a whole one (`ckpt repair`)",
        kind=other.kind,
        path=other.path,
    )


def _plain(handles: pa.Table) -> pa.Table:
    at = handles.schema.get_field_index("path")
    return handles.set_column(at, MANIFEST_SCHEMA.field("path"), pc.cast(handles["path"], pa.string()))


def given_up_words(given: Sequence[Loss]) -> str:
    """Return what was given up, in a few words, for the log."""
    counted = [loss for loss in given if loss.effect != "copied"]
    rows = sum(loss.all_rows for loss in counted)
    return f"{rows:,} rows of {len(counted)} states" if counted else "losing anything"


def _check_needed(record: Record, given: Sequence[Loss]) -> None:
    needed = [loss for loss in given if loss.needed]
    if needed:
        raise InvalidState(
            f"state {needed[0].state!r} of operator {needed[0].operator!r} cannot be given up: it holds the positions "
            f"of a source, and without them input would be lost or read again. Nothing was published; go back to a "
            f"checkpoint before {record.checkpoint_id}, or put the segment back (`ckpt repair --restore-from URL`)",
            kind=ErrorKind.STATE_MISSING,
            operator=needed[0].operator,
            state=needed[0].state,
        )


def _check_newest(storage: Storage, diagnosis: Diagnosis) -> None:
    if diagnosis.fault is not None or not diagnosis.found.chain:
        return
    newest = newest_record(storage)
    if newest is None or newest.ref != diagnosis.found.chain[0].ref:
        now = newest.checkpoint_id if newest is not None else "gone"
        raise PublishConflict(
            f"{diagnosis.newest} is not the newest checkpoint of {storage.url} any more, which is {now}; nothing was "
            "changed. Look again with `ckpt repair`",
            kind=ErrorKind.PUBLISH_LOST,
            checkpoint_id=diagnosis.newest,
        )


def _pending(
    storage: Storage,
    diagnosis: Diagnosis,
    losses: Losses,
    given: Sequence[Loss],
    scope: Scope | None,
    sleep: Callable[[float], None],
) -> PendingCheckpoint:
    """Begin newest + 1 with a checkpoint's content, over it, over newer ones, or over damage."""
    record, chain, newest = losses.record, diagnosis.found.chain, diagnosis.newest
    check_next_id(storage, newest)
    properties = dict(record.lasting_properties)
    if any(loss.effect != "copied" for loss in given):
        properties[GIVEN_UP_PROPERTY] = given_up_text(losses, given, scope or "rows")
    notes = []
    if record.checkpoint_id != newest:
        after = sorted(each for each in diagnosis.found.listed if each > record.checkpoint_id)
        notes.append(left_behind([CheckpointId(each) for each in after]))
    if record in chain:
        kind = CheckpointKind.REWRITE if record is chain[0] else CheckpointKind.ROLLBACK
        over = Checkpoint(storage, chain[0], bound_to_run=True)
        draft = Draft.with_content(
            record, parent=over, kind=kind, source=record.ref, properties=properties, notes=tuple(notes)
        )
    else:
        was = ref_of_unreadable(storage, newest) if diagnosis.fault is not None else chain[0].ref
        properties |= diagnosis.properties
        draft = Draft.with_content(
            record,
            kind=CheckpointKind.ROLLBACK,
            source=record.ref,
            properties=properties,
            replaced=Replaced(newest, was),
            notes=tuple(notes),
        )
    return PendingCheckpoint(storage, draft, sleep=sleep)
