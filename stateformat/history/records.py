"""Reading the history of a store: which records are checkpoints, and which one is the newest.

Theory of operation (SPEC.md section 8.1). The newest checkpoint is the greatest id listed; the history is the newest and
what its parent links reach, as long as the record under the parent's id has the parent's attempt id. Any other record is
a *stray*, the remains of a publisher that was overtaken, and no checkpoint for anyone.

Between a listing and the reads that follow it, others publish, expire and withdraw. One fact makes reading safe without
locks: the greatest id never goes down, and the record under it is never replaced while it is the greatest. So whoever
decides something lists, reads what the decision rests on, and lists again; if the greatest id is the same, everything
that was read belongs to one instant's history, and otherwise the reading starts over. :func:`settled` is that rule, and
its only implementation: opening, restarting, rolling back and collecting garbage all go through it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from .. import paths as layout
from ..errors import (
    CheckpointError,
    CheckpointExpired,
    DamagedCheckpoint,
    ErrorKind,
    NotFound,
    StorageError,
    UnsupportedFormat,
)
from ..model import CheckpointId, ParentRef, Record
from ..reading import load_record
from ..storage import Storage, names, names_after

logger = logging.getLogger(__name__)

TRIES = 20
"""How often a reading starts over before it says that the history will not hold still."""

UNREADABLE: Final = (DamagedCheckpoint, UnsupportedFormat)
"""What reading a record raises where it stands and its bytes are no record that this version knows."""

T = TypeVar("T")
Ids = Sequence[CheckpointId]


class Moved(Exception):
    """Raised inside :func:`settled` by a decision that saw the history change under its hands: start over."""


@dataclass(frozen=True)
class History:
    """A reading of the history that held still.

    ``listed``: every id that has a record, ascending, strays too. ``chain``: the checkpoints, newest first, as far down
    as was asked for. ``ended_by``: why the chain could not be followed to its end (a damaged record, or one of a newer
    version, below the last of ``chain``; the newest itself where ``chain`` is empty); None where it ends by itself.
    """

    listed: tuple[CheckpointId, ...]
    chain: tuple[Record, ...]
    ended_by: CheckpointError | None = None


def record_ids(storage: Storage) -> list[CheckpointId]:
    """The ids of all records, ascending, by one listing. Names that are no record's are passed over."""
    found = (layout.record_id(path) for path in names(storage, layout.RECORDS))
    return sorted(checkpoint_id for checkpoint_id in found if checkpoint_id is not None)


def ids_from(storage: Storage, least: CheckpointId) -> list[CheckpointId]:
    """The ids of records from this one on, ascending, by one look (``storage.ListsNames``)."""
    before = layout.record_path(CheckpointId(least - 1))
    found = (layout.record_id(path) for path in names_after(storage, before))
    return sorted(checkpoint_id for checkpoint_id in found if checkpoint_id is not None)


def find_record(storage: Storage, checkpoint_id: CheckpointId) -> Record | None:
    """The record under an id, or None. Raises ``DamagedCheckpoint`` and ``UnsupportedFormat`` as ``load_record`` does."""
    try:
        return load_record(storage, checkpoint_id)
    except NotFound:
        return None


def is_there(storage: Storage, checkpoint_id: CheckpointId) -> bool:
    """Whether there is any record under an id, readable or not."""
    try:
        return find_record(storage, checkpoint_id) is not None
    except UNREADABLE:
        return True


def stands(storage: Storage, ref: ParentRef) -> bool:
    """Whether the record of exactly this attempt is there."""
    found = find_record(storage, ref.checkpoint_id)
    return found is not None and found.ref == ref


def same_newest(before: Ids, after: Ids) -> bool:
    """Whether two listings agree on the greatest id, so that what was read between them may be believed."""
    return before[-1:] == after[-1:]


def settled(storage: Storage, decide: Callable[[Ids], T]) -> T:
    """What ``decide`` makes of the ids listed, once a second listing shows the same newest.

    ``decide`` reads and changes nothing; it is called again whenever the newest has changed meanwhile. It raises
    :class:`Moved` where an id that was listed is gone. An error that it raises counts only if the history held still:
    a restart that misses an object lists again before it calls that damage. Raises ``StorageError`` (kind
    ``HISTORY_UNSTABLE``) after :data:`TRIES` changes in a row.
    """
    before = record_ids(storage)
    for attempt in range(TRIES):
        if attempt:
            # Imported where it is rare: `ckpt inspect` comes by here, a cold process every time.
            from ..storage import stats_of

            stats_of(storage).event(history_restarts=1)
            logger.info("history of %s: the newest has changed; the reading starts over", storage.url)
        try:
            result = decide(before)
        except Moved:
            before = record_ids(storage)
            continue
        except CheckpointError:
            after = record_ids(storage)
            if same_newest(before, after):
                raise
            before = after
            continue
        after = record_ids(storage)
        if same_newest(before, after):
            return result
        before = after
    raise StorageError(
        f"the newest checkpoint of {storage.url} changed {TRIES} times in a row while the history was read, or a record "
        "that is listed cannot be found; try again, and check the storage if it stays so",
        kind=ErrorKind.HISTORY_UNSTABLE,
    )


def follow(
    storage: Storage,
    ids: Ids,
    *,
    down_to: CheckpointId | None = None,
    limit: int | None = None,
    known: dict[ParentRef, Record] | None = None,
) -> History:
    """The chain from the greatest of ``ids`` (not empty) along parents; stops at an id or a length.

    Below a repair the chain goes on at the checkpoint whose content it has (SPEC.md section 8.4).

    ``known`` keeps what was read before, for a reading that starts over: a record of an attempt never changes, so one
    that the new chain names and that is still listed is not fetched again. A record that cannot be read ends the chain
    and stands in ``ended_by``, the newest too. Call it inside :func:`settled`.
    """
    listed, present = tuple(ids), set(ids)
    known = {} if known is None else known
    try:
        newest = find_record(storage, listed[-1])
    except UNREADABLE as error:
        return History(listed, (), _of_newest(storage, listed[-1], error))
    if newest is None:
        raise Moved
    chain, ended_by = [newest], None
    while limit is None or len(chain) < limit:
        parent = chain[-1].link
        if parent is None or parent.checkpoint_id not in present:
            break
        if down_to is not None and parent.checkpoint_id < down_to:
            break
        try:
            found = known.get(parent) or find_record(storage, parent.checkpoint_id)
        except UNREADABLE as error:
            ended_by = error
            break
        if found is None or not is_link(found, parent):
            break
        chain.append(found)
    known.update((record.ref, record) for record in chain)
    return History(listed, tuple(chain), ended_by)


def is_link(found: Record, parent: ParentRef) -> bool:
    """Whether the record under the parent's id is the parent: of the attempt that the child names."""
    return found.ref == parent


def read_history(storage: Storage, *, down_to: CheckpointId | None = None, limit: int | None = None) -> History:
    """The history of a store, settled; an empty :class:`History` where there is no record."""
    known: dict[ParentRef, Record] = {}

    def decide(ids: Ids) -> History:
        return follow(storage, ids, down_to=down_to, limit=limit, known=known) if ids else History((), ())

    return settled(storage, decide)


def newest_record(storage: Storage) -> Record | None:
    """The record of the newest checkpoint, settled; None in a store without records. Never an older one instead.

    Raises ``DamagedCheckpoint`` and ``UnsupportedFormat`` where it cannot be read.
    """
    history = read_history(storage, limit=1)
    if history.ended_by is not None:
        raise history.ended_by
    return history.chain[0] if history.chain else None


def _of_newest(storage: Storage, checkpoint_id: CheckpointId, error: CheckpointError) -> CheckpointError:
    """The error for a newest record that cannot be read. Damage has a way out of its own; another version has not."""
    if not isinstance(error, DamagedCheckpoint):
        return error
    return DamagedCheckpoint(
        f"the newest checkpoint of {storage.url}, {checkpoint_id}, cannot be read, and no older one is taken in its place "
        f"unasked: {error.args[0]}",
        kind=error.kind,
        **error.details,
    )


def require_records(storage: Storage, listed: Ids) -> None:
    """Raise ``NotFound`` (``STORE_NOT_FOUND``, ``STORE_EMPTY``) where no record is listed."""
    if listed:
        return
    if not storage.exists():
        raise NotFound(
            f"there is no store at {storage.url}; check the address, or run the job once",
            kind=ErrorKind.STORE_NOT_FOUND,
            url=storage.url,
        )
    if not storage.list(layout.MANIFESTS) and not storage.list(layout.SEGMENTS):
        raise NotFound(
            f"{storage.url} is no store of checkpoints: nothing lies in its {layout.RECORDS}, {layout.MANIFESTS} and "
            f"{layout.SEGMENTS}. Check the address; a job makes them with its first checkpoint",
            kind=ErrorKind.STORE_EMPTY,
            url=storage.url,
        )
    raise NotFound(
        f"the store {storage.url} holds no checkpoint; the job has not published one yet",
        kind=ErrorKind.STORE_EMPTY,
        url=storage.url,
    )


def chain_down_to(storage: Storage, checkpoint_id: CheckpointId) -> tuple[Record, ...]:
    """The checkpoints from the newest down to one of the history, both included, newest first.

    What is built on an older checkpoint must be reached from the newest. Raises ``NotFound`` (no store, no checkpoint, or
    the record under the id is a stray), ``CheckpointExpired`` (below the newest and no longer there), and what a damaged
    record on the way raises.
    """
    history = read_history(storage, down_to=checkpoint_id)
    require_records(storage, history.listed)
    if history.ended_by is not None:
        raise history.ended_by
    if history.chain[-1].checkpoint_id == checkpoint_id:
        return history.chain
    raise _not_reached(storage, checkpoint_id, history)


def record_of(storage: Storage, checkpoint_id: CheckpointId | None) -> Record:
    """The record of a checkpoint that is to be looked at, the newest where no id is given.

    An id needs its own record and nothing above it: where a damaged or lost record cuts it off from the newest, it is
    given all the same. A stray is not: every record above it could be read, and none leads to it. Raises as
    :func:`chain_down_to` does; damage only of the record that is asked for.
    """
    if checkpoint_id is None:
        history = read_history(storage, limit=1)
        require_records(storage, history.listed)
        if history.ended_by is not None:
            raise history.ended_by
        return history.chain[0]
    try:
        history = read_history(storage, down_to=checkpoint_id)
    except StorageError:
        # Something above may not be readable for want of rights, or by a disk that fails. That one decides nothing here.
        found = find_record(storage, checkpoint_id)
        if found is None:
            raise
        return found
    require_records(storage, history.listed)
    if history.chain and history.chain[-1].checkpoint_id == checkpoint_id:
        return history.chain[-1]
    found = find_record(storage, checkpoint_id) if checkpoint_id in history.listed else None
    if found is not None and (history.ended_by is not None or _is_cut_off(storage, found.ref)):
        return found
    raise _not_reached(storage, checkpoint_id, history)


def _is_cut_off(storage: Storage, ref: ParentRef) -> bool:
    """Whether a lost record stands between the newest and this checkpoint. Rare, so everything is read once more."""
    from .survey import survey

    return any(record.ref == ref for record in survey(storage).cut_off)


def _not_reached(storage: Storage, checkpoint_id: CheckpointId, history: History) -> CheckpointError:
    """The error for an id that no link from the newest reaches: never was, a stray, expired, or lost."""
    where, newest = f"checkpoint {checkpoint_id} of {storage.url}", history.listed[-1]
    if checkpoint_id > newest or checkpoint_id < 1:
        return NotFound(
            f"no {where}: the newest is {newest}; `ckpt history` lists what is there", checkpoint_id=checkpoint_id
        )
    from .survey import record_lost, survey

    found = survey(storage, down_to=checkpoint_id)
    if checkpoint_id in history.listed and is_there(storage, checkpoint_id):
        above = found.fault(storage)
        if above is not None and any(record.checkpoint_id == checkpoint_id for record in found.cut_off):
            return above
        return NotFound(
            f"{where} is a stray: no parent link from the newest, {newest}, reaches it, so it is no part of the history. "
            "It goes when retention reaches it",
            checkpoint_id=checkpoint_id,
        )
    lost = [ref for ref in found.lost if ref.checkpoint_id == checkpoint_id]
    if lost:
        return record_lost(storage, lost[0])
    oldest = found.checkpoints[-1].checkpoint_id if found.checkpoints else newest
    return CheckpointExpired(f"{where} has expired; the oldest that is left is {oldest}", checkpoint_id=checkpoint_id)
