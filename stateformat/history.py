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
from typing import TypeVar

from stateformat import layout
from stateformat.checkpoint import load_record
from stateformat.errors import (
    CheckpointError,
    CheckpointExpired,
    DamagedCheckpoint,
    ErrorKind,
    NotFound,
    StorageError,
    UnsupportedFormat,
)
from stateformat.model import AttemptId, CheckpointId, ParentRef, Record
from stateformat.storage import Storage

logger = logging.getLogger(__name__)

TRIES = 20
"""How often a reading starts over before it says that the history will not hold still."""

T = TypeVar("T")
Ids = Sequence[CheckpointId]


class Moved(Exception):
    """Raised inside :func:`settled` by a decision that saw the history change under its hands: start over."""


@dataclass(frozen=True)
class History:
    """A reading of the history that held still.

    ``listed``: every id that has a record, ascending, strays too. ``chain``: the checkpoints, newest first, as far down
    as was asked for. ``ended_by``: why the chain could not be followed to its end (a damaged record, or one of a newer
    version, below the last of ``chain``); None where it ends by itself.
    """

    listed: tuple[CheckpointId, ...]
    chain: tuple[Record, ...]
    ended_by: CheckpointError | None = None


def record_ids(storage: Storage) -> list[CheckpointId]:
    """The ids of all records, ascending, by one listing. Names that are no record's are passed over."""
    found = (layout.record_id(item.path) for item in storage.list(layout.RECORDS))
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
    except (DamagedCheckpoint, UnsupportedFormat):
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
            from stateformat.stats import stats_of

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

    ``known`` keeps what was read before, for a reading that starts over: a record of an attempt never changes, so one
    that the new chain names and that is still listed is not fetched again. Raises what reading the newest raises; a
    fault further down ends the chain and stands in ``ended_by``. Call it inside :func:`settled`.
    """
    listed, present = tuple(ids), set(ids)
    known = {} if known is None else known
    newest = find_record(storage, listed[-1])
    if newest is None:
        raise Moved
    chain, ended_by = [newest], None
    while limit is None or len(chain) < limit:
        parent = chain[-1].parent
        if parent is None or parent.checkpoint_id not in present:
            break
        if down_to is not None and parent.checkpoint_id < down_to:
            break
        try:
            found = known.get(parent) or find_record(storage, parent.checkpoint_id)
        except (DamagedCheckpoint, UnsupportedFormat) as error:
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
    """The record of the newest checkpoint, settled; None in a store without records. Never an older one instead."""
    chain = read_history(storage, limit=1).chain
    return chain[0] if chain else None


def require_records(storage: Storage, history: History) -> History:
    """The history, if it has a checkpoint; ``NotFound`` (``STORE_NOT_FOUND``, ``STORE_EMPTY``) with a sentence if not."""
    if history.chain:
        return history
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


def chain_down_to(storage: Storage, checkpoint_id: CheckpointId | None) -> tuple[Record, ...]:
    """The checkpoints from the newest down to one of the history, both included, newest first; None is the newest.

    Raises ``NotFound`` (no store, no checkpoint, or the record under the id is a stray), ``CheckpointExpired`` (below
    the newest and no longer there), and what a damaged record on the way raises.
    """
    if checkpoint_id is None:
        return require_records(storage, read_history(storage, limit=1)).chain
    history = require_records(storage, read_history(storage, down_to=checkpoint_id))
    oldest = history.chain[-1].checkpoint_id
    if oldest == checkpoint_id:
        return history.chain
    where, newest = f"checkpoint {checkpoint_id} of {storage.url}", history.chain[0].checkpoint_id
    if checkpoint_id > newest or checkpoint_id < 1:
        raise NotFound(
            f"no {where}: the newest is {newest}; `ckpt history` lists what is there", checkpoint_id=checkpoint_id
        )
    if history.ended_by is not None:
        raise history.ended_by
    if checkpoint_id in history.listed and is_there(storage, checkpoint_id):
        raise NotFound(
            f"{where} is a stray: no parent link from the newest, {newest}, reaches it, so it is no part of the history. "
            "It goes when retention reaches it",
            checkpoint_id=checkpoint_id,
        )
    raise CheckpointExpired(f"{where} has expired; the oldest that is left is {oldest}", checkpoint_id=checkpoint_id)


def stray_refs(storage: Storage) -> list[ParentRef]:
    """Records that are no checkpoints, by id, ascending. A stray that cannot be read has an empty attempt id."""

    def decide(ids: Ids) -> list[ParentRef]:
        if not ids:
            return []
        history = follow(storage, ids)
        if history.ended_by is not None:
            raise history.ended_by
        reached = {record.checkpoint_id for record in history.chain}
        found = (_stray(storage, checkpoint_id) for checkpoint_id in ids if checkpoint_id not in reached)
        return [ref for ref in found if ref is not None]

    return settled(storage, decide)


def _stray(storage: Storage, checkpoint_id: CheckpointId) -> ParentRef | None:
    try:
        found = find_record(storage, checkpoint_id)
    except (DamagedCheckpoint, UnsupportedFormat):
        return ParentRef(checkpoint_id, AttemptId(""))
    return found.ref if found is not None else None
