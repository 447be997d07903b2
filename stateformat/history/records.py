"""Reading the history of a store: which records are checkpoints, and which one is the newest.

Others publish, expire and withdraw while a reader works. Reading is safe without locks because the
greatest id never goes down, and its record is never replaced while it is the greatest (SPEC.md
section 8.1): :func:`read_until_stable` lists, reads, lists again, and starts over if the newest
has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from .. import paths as layout
from ..errors import (
    REPAIR_ADVICE,
    CheckpointError,
    CheckpointExpired,
    DamagedCheckpoint,
    ErrorKind,
    NotFound,
    StorageError,
    UnsupportedFormat,
)
from ..formats import foreign_checkpoints, only_read
from ..graph import brief
from ..model import AttemptId, CheckpointId, ParentRef, Record
from ..reading import load_record
from ..storage import Storage, stats_of
from .below import place_around, places_below

logger = logging.getLogger(__name__)

TRIES = 20
"""How often a read starts over before it gives up."""

UNREADABLE: Final = (DamagedCheckpoint, UnsupportedFormat)
"""Raised for a record that exists, but whose bytes are not a record this version can read."""

NO_RECORDS: Final = (ErrorKind.STORE_NOT_FOUND, ErrorKind.STORE_EMPTY)
"""Kinds of ``NotFound`` for a store without any record."""

_WHERE: Final = "check the address; a job makes a store with its first checkpoint"

T = TypeVar("T")
Ids = Sequence[CheckpointId]


class HistoryChanged(Exception):
    """A reader inside :func:`read_until_stable` saw the history change."""


@dataclass(frozen=True)
class History:
    """The history of a store at one instant."""

    listed: tuple[CheckpointId, ...]
    """Every id that has a record, strays too, ascending."""
    chain: tuple[Record, ...]
    """The checkpoints, newest first, as far down as the caller asked."""
    ended_by: CheckpointError | None = None
    """Why the record below ``chain`` (the newest, if empty) cannot be read; None if it can."""


def record_ids(storage: Storage) -> list[CheckpointId]:
    """Return the ids of all records, ascending, by one listing. Other names are ignored."""
    try:
        return _ids(storage.names(layout.RECORDS))
    except StorageError as error:
        # A file in a checkpoint is no folder.
        inside = place_around(storage) if error.kind is ErrorKind.STORAGE_REFUSED else ""
        if not inside:
            raise
        raise StorageError(f"{error}; {inside}", kind=error.kind, **error.details) from error


def ids_from(storage: Storage, least: CheckpointId) -> list[CheckpointId]:
    """Return the ids of records from this one on, ascending, by one request."""
    return _ids(storage.names_after(layout.record_path(CheckpointId(least - 1))))


def _ids(paths: Iterable[str]) -> list[CheckpointId]:
    found = map(layout.record_id, paths)
    return sorted(checkpoint_id for checkpoint_id in found if checkpoint_id is not None)


def find_record(storage: Storage, checkpoint_id: CheckpointId) -> Record | None:
    """Return the record under an id, or None. Raises :data:`UNREADABLE`."""
    try:
        return load_record(storage, checkpoint_id)
    except NotFound:
        return None


def record_exists(storage: Storage, ref: ParentRef) -> bool:
    """Return whether the record of this id and attempt exists."""
    found = find_record(storage, ref.checkpoint_id)
    return found is not None and found.ref == ref


def same_newest(before: Ids, after: Ids) -> bool:
    """Return whether two listings agree on the greatest id."""
    return before[-1:] == after[-1:]


def read_until_stable(storage: Storage, read: Callable[[Ids], T]) -> T:
    """Return what ``read`` returns for the listed ids, once a second listing has the same newest.

    ``read`` is called again when the newest has changed, or when it raises
    :class:`HistoryChanged`. Any other error it raises counts only if the newest has not changed.
    Raises ``StorageError`` (kind ``HISTORY_UNSTABLE``) after :data:`TRIES` changes.
    """
    before = record_ids(storage)
    for attempt in range(TRIES):
        if attempt:
            stats_of(storage).event(history_restarts=1)
            logger.info("history of %s: the newest has changed; the reading starts over", storage.url)
        try:
            result = read(before)
        except HistoryChanged:
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
        f"the newest checkpoint of {storage.url} changed {TRIES} times in a row while the history was read, or a "
        "record that is listed cannot be found; try again, and check the storage if it stays so",
        kind=ErrorKind.HISTORY_UNSTABLE,
    )


def read_history(storage: Storage, *, down_to: int = 0, limit: int | None = None) -> History:
    """Return the history of a store along parent links, down to an id or a length; maybe empty."""
    known: dict[ParentRef, Record] = {}  # for a read that starts over

    def read(ids: Ids) -> History:
        listed, present = tuple(ids), set(ids)
        if not ids:
            return History((), ())
        try:
            newest = find_record(storage, listed[-1])
        except UNREADABLE as error:
            return History(listed, (), _of_newest(storage, listed[-1], error))
        if newest is None:
            raise HistoryChanged
        chain, ended_by = [newest], None
        while limit is None or len(chain) < limit:
            parent = chain[-1].link
            if parent is None or parent.checkpoint_id not in present or parent.checkpoint_id < down_to:
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

    return read_until_stable(storage, read)


def is_link(found: Record, parent: ParentRef) -> bool:
    """Return whether the record under the parent's id has the attempt that the child names."""
    return found.ref == parent


def newest_record(storage: Storage) -> Record | None:
    """Return the record of the newest checkpoint, or None. Raises :data:`UNREADABLE`."""
    history = read_history(storage, limit=1)
    if history.ended_by is not None:
        raise history.ended_by
    return history.chain[0] if history.chain else None


def _of_newest(storage: Storage, checkpoint_id: CheckpointId, error: CheckpointError) -> CheckpointError:
    """Return the error for a newest record that cannot be read."""
    if not isinstance(error, DamagedCheckpoint):
        return error
    return DamagedCheckpoint(
        f"the newest checkpoint of {storage.url}, {checkpoint_id}, cannot be read, and no older one is used in its "
        f"place automatically: {error.args[0]}",
        kind=error.kind,
        **error.details,
    )


def require_records(storage: Storage, listed: Ids) -> None:
    """Raise ``NotFound`` (``STORE_NOT_FOUND``, ``STORE_EMPTY``) if no record is listed."""
    if not listed:
        raise no_records(storage)


def no_records(storage: Storage) -> NotFound:
    """Return the error for a store without records (``STORE_NOT_FOUND``, ``STORE_EMPTY``)."""
    if not storage.exists():
        return NotFound(
            f"there is no store at {storage.url}; {place_around(storage) or 'check the address, or run the job once'}",
            kind=ErrorKind.STORE_NOT_FOUND,
            url=storage.url,
        )
    found = foreign_checkpoints(storage)
    if found is not None:
        return NotFound(
            only_read(storage.url, found.system, "not a store"),
            kind=ErrorKind.STORE_EMPTY,
            url=storage.url,
        )
    if not storage.list(layout.MANIFESTS) and not storage.list(layout.SEGMENTS):
        folder = storage.folder()
        below = None if folder is None else places_below(folder)
        there = f"{below}" if below else place_around(storage) or _WHERE
        if below is not None and below.left_out and not below:
            which = "A folder below it was" if below.left_out == 1 else f"{below.left_out} folders below it were"
            there = f"{which} not looked into; give one further down"
        there = there[0].upper() + there[1:]
        return NotFound(
            f"{storage.url} is no store of checkpoints: nothing lies in its {layout.RECORDS}, {layout.MANIFESTS} and "
            f"{layout.SEGMENTS}, nor what makes a folder of Flink's (`_metadata`) or of a Spark query (`offsets/`). "
            f"{there}",
            kind=ErrorKind.STORE_EMPTY,
            url=storage.url,
            **({"below": below} if below else {}),
        )
    return NotFound(
        f"the store {storage.url} holds no checkpoint; the job has not published one yet",
        kind=ErrorKind.STORE_EMPTY,
        url=storage.url,
    )


# ---- surveys -------------------------------------------------------------------------------------
#
# All records of a store, read from the newest down: history, damage, lost records and strays.
#
# A record was lost if a link leads to it, it is missing, and *afterwards* a record below it is read
# that another record names as its parent (SPEC.md section 8.4): retention deletes the lowest first,
# and no record names a stray. :class:`LossDetector` implements this rule.


class LossDetector:
    """Proves losses while records are read from the highest id to the lowest, one request each."""

    def __init__(self) -> None:
        self.lost: list[ParentRef] = []
        self._linked: set[ParentRef] = set()
        self._parents: set[ParentRef] = set()
        self._gaps: list[ParentRef] = []
        self._left_behind = range(0)

    def in_doubt(self, least: int) -> bool:
        """Return whether a record from this id on is missing, and not yet proven to be lost."""
        return any(ref.checkpoint_id >= least for ref in (*self._gaps, *self._linked))

    def left_behind(self, checkpoint_id: CheckpointId) -> bool:
        """Return whether the next record to read lies between a repair and its source."""
        return checkpoint_id in self._left_behind

    def read(self, checkpoint_id: CheckpointId, found: Record | CheckpointError | None) -> None:
        """Take what is under the next lower id: a record, why it cannot be read, or None."""
        passed = {ref for ref in self._linked if ref.checkpoint_id > checkpoint_id}
        self._gaps += sorted(passed, reverse=True)
        self._linked -= passed
        if isinstance(found, CheckpointError):
            # It exists, and may be the one that its child names.
            self._linked -= {ref for ref in self._linked if ref.checkpoint_id == checkpoint_id}
        elif found is not None:
            self._linked.discard(found.ref)
            if found.ref in self._parents:
                self.lost += self._gaps
                self._gaps.clear()
            # No record is missing between a repair and its source.
            if not self.left_behind(checkpoint_id):
                if found.link is not None:
                    self._linked.add(found.link)
                if found.content_of is not None:
                    self._left_behind = range(found.content_of.checkpoint_id + 1, checkpoint_id)
            if found.parent is not None:
                self._parents.add(found.parent)


@dataclass(frozen=True, repr=False)
class Survey:
    """All records of a store, or the upper ones, at one instant. Records are newest first."""

    listed: tuple[CheckpointId, ...] = ()
    """Every id that has a record, ascending."""
    chain: tuple[Record, ...] = ()
    """The history from the newest, as far as links reach."""
    cut_off: tuple[Record, ...] = ()
    """Checkpoints below a damaged or lost record, linked to the highest whole one there."""
    certain: frozenset[ParentRef] = frozenset()
    """Those of ``checkpoints`` that are certainly checkpoints; any other may be a stray."""
    unreadable: Mapping[CheckpointId, CheckpointError] = field(default_factory=dict)
    """Why a record cannot be read, by id, strays too."""
    damaged: tuple[CheckpointId, ...] = ()
    """Those of ``unreadable`` that interrupt the history."""
    lost: tuple[ParentRef, ...] = ()
    """Records that are proven to be lost."""
    strays: tuple[ParentRef, ...] = ()
    """All other records; attempt ``""`` if one is unreadable."""

    def __repr__(self) -> str:
        return brief(
            self,
            f"{len(self.listed)} records",
            f"{len(self.checkpoints)} checkpoints",
            f"{len(self.damaged)} damaged",
            f"{len(self.lost)} lost",
        )

    @property
    def checkpoints(self) -> tuple[Record, ...]:
        """The history, and the checkpoints that are cut off from it."""
        return (*self.chain, *self.cut_off)

    def fault(self, storage: Storage) -> CheckpointError | None:
        """Return the error for the highest damaged or lost record, or None."""
        damaged = self.damaged[0] if self.damaged else 0
        if self.lost and self.lost[0].checkpoint_id > damaged:
            return record_lost(storage, self.lost[0])
        return self.unreadable[self.damaged[0]] if self.damaged else None


def record_lost(storage: Storage, ref: ParentRef) -> DamagedCheckpoint:
    """Return the error for a record that is proven to be lost."""
    path = layout.record_path(ref.checkpoint_id)
    return DamagedCheckpoint(
        f"the record of checkpoint {ref.checkpoint_id} ({path} in {storage.url}) was lost: a later checkpoint names "
        f"it, and older ones, which retention removes first, still stand{REPAIR_ADVICE}",
        kind=ErrorKind.RECORD_LOST,
        path=path,
        checkpoint_id=ref.checkpoint_id,
        attempt_id=ref.attempt_id,
    )


def survey(storage: Storage, *, down_to: int = 1, limit: int | None = None) -> Survey:
    """Read all records once, from the newest down, one request each.

    ``down_to``: read nothing below this id, except to learn whether a record above it was lost.
    ``limit``: read only this many checkpoints. The result is empty if there is no record. Raises
    ``StorageError``.
    """
    return read_until_stable(storage, lambda ids: _survey(storage, ids, down_to, limit))


def _survey(storage: Storage, ids: Ids, down_to: int, limit: int | None) -> Survey:
    listed = tuple(ids)
    losses, records, unreadable = LossDetector(), dict[CheckpointId, Record](), dict[CheckpointId, CheckpointError]()
    for checkpoint_id in reversed(ids):
        if checkpoint_id < down_to and not losses.in_doubt(down_to):
            break
        if limit is not None and len(records) >= limit:
            found = _classify(listed, records, unreadable, losses)
            if len(found.checkpoints) >= limit:
                return found
        try:
            record = find_record(storage, checkpoint_id)
        except UNREADABLE as error:
            unreadable[checkpoint_id] = error
            losses.read(checkpoint_id, error)
            continue
        losses.read(checkpoint_id, record)
        if record is not None:
            records[checkpoint_id] = record
        elif checkpoint_id == ids[-1]:
            raise HistoryChanged
    return _classify(listed, records, unreadable, losses)


def _classify(
    listed: tuple[CheckpointId, ...],
    records: Mapping[CheckpointId, Record],
    unreadable: Mapping[CheckpointId, CheckpointError],
    losses: LossDetector,
) -> Survey:
    """Sort the records read, newest first, into history, damage, losses and strays."""
    if not listed:
        return Survey()
    chain, cut_off, damaged = list[Record](), list[Record](), list[CheckpointId]()
    to, current, wanted = chain, records.get(listed[-1]), listed[-1]
    while True:
        if current is None:
            # Interrupted: go on at the highest record below that can be read.
            to = cut_off
            current = next((record for checkpoint_id, record in records.items() if checkpoint_id < wanted), None)
            beneath = current.checkpoint_id if current is not None else 0
            damaged += [checkpoint_id for checkpoint_id in unreadable if beneath < checkpoint_id <= wanted]
            if current is None:
                break
        to.append(current)
        link = current.link
        if link is None:
            break
        wanted, current = link.checkpoint_id, records.get(link.checkpoint_id)
        if current is not None and not is_link(current, link):
            current = None
        if current is None and wanted not in unreadable and link not in losses.lost:
            break
    reached = {record.ref for record in (*chain, *cut_off)}
    strays = [record.ref for record in records.values() if record.ref not in reached]
    strays += [ParentRef(checkpoint_id, AttemptId("")) for checkpoint_id in unreadable if checkpoint_id not in damaged]
    return Survey(
        listed=listed,
        chain=tuple(chain),
        cut_off=tuple(cut_off),
        certain=_certain(chain, records),
        unreadable=dict(unreadable),
        damaged=tuple(damaged),
        lost=tuple(sorted(losses.lost, reverse=True)),
        strays=tuple(sorted(strays)),
    )


def _certain(chain: list[Record], records: Mapping[CheckpointId, Record]) -> frozenset[ParentRef]:
    """Return what is certainly a checkpoint: in the chain, named, or above its parent."""
    there = {record.ref for record in records.values()}
    named = {record.parent for record in records.values() if record.parent is not None}
    above = {record.ref for record in records.values() if record.parent in there}
    known = {record.ref for record in chain} | (named & there) | above
    return frozenset(known | {record.ref for record in records.values() if record.content_of in known})


def chain_down_to(storage: Storage, checkpoint_id: CheckpointId) -> tuple[Record, ...]:
    """Return the checkpoints from the newest down to this one. Raises if it is not there."""
    history = read_history(storage, down_to=checkpoint_id)
    require_records(storage, history.listed)
    if history.ended_by is not None:
        raise history.ended_by
    if history.chain[-1].checkpoint_id == checkpoint_id:
        return history.chain
    raise _not_reached(storage, checkpoint_id, history)


def record_of(storage: Storage, checkpoint_id: CheckpointId | None) -> Record:
    """Return the record to look at, by default the newest; damage above it does not matter."""
    if checkpoint_id is None:
        newest = newest_record(storage)
        if newest is None:
            raise no_records(storage)
        return newest
    try:
        history = read_history(storage, down_to=checkpoint_id)
    except StorageError:
        # The storage may fail to read a record above this one, which does not matter.
        found = find_record(storage, checkpoint_id)
        if found is None:
            raise
        return found
    require_records(storage, history.listed)
    if history.chain and history.chain[-1].checkpoint_id == checkpoint_id:
        return history.chain[-1]
    found = find_record(storage, checkpoint_id) if checkpoint_id in history.listed else None
    if found is not None and (history.ended_by is not None or found in survey(storage).cut_off):
        return found
    raise _not_reached(storage, checkpoint_id, history)


def _not_reached(storage: Storage, checkpoint_id: CheckpointId, history: History) -> CheckpointError:
    """Return the error for an id that no chain of links from the newest reaches."""
    where, newest = f"checkpoint {checkpoint_id} of {storage.url}", history.listed[-1]
    if checkpoint_id > newest or checkpoint_id < 1:
        return NotFound(
            f"no {where}: the newest is {newest}; `ckpt history` lists what is there", checkpoint_id=checkpoint_id
        )
    found = survey(storage, down_to=checkpoint_id)
    if checkpoint_id in history.listed and _has_record(storage, checkpoint_id):
        above = found.fault(storage)
        if above is not None and any(record.checkpoint_id == checkpoint_id for record in found.cut_off):
            return above
        return NotFound(
            f"{where} is a stray: no parent link from the newest, {newest}, reaches it, so it is no part of the "
            "history. It goes when retention reaches it",
            checkpoint_id=checkpoint_id,
        )
    lost = [ref for ref in found.lost if ref.checkpoint_id == checkpoint_id]
    if lost:
        return record_lost(storage, lost[0])
    oldest = found.checkpoints[-1].checkpoint_id if found.checkpoints else newest
    return CheckpointExpired(f"{where} has expired; the oldest that is left is {oldest}", checkpoint_id=checkpoint_id)


def _has_record(storage: Storage, checkpoint_id: CheckpointId) -> bool:
    """Return whether there is a record under an id, readable or not."""
    try:
        return find_record(storage, checkpoint_id) is not None
    except UNREADABLE:
        return True
