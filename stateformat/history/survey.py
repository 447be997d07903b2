"""The whole of ``checkpoints/``, read downwards: what is history, what is damaged, what was lost, what is a stray.

Theory of operation (SPEC.md section 8.4). Retention deletes records lowest first, and a stray is named by no record. So a
missing record proves nothing by itself: it may have expired, and what stands beneath it may be a stray. But if record *i*
is linked to and missing, and *afterwards* a record beneath *i* is read that another record names as its parent, then *i*
did not expire: it was lost. The order counts. A record beneath that was read, or listed, before the gap was seen may be one
that an expire at work was just about to delete. :class:`Downwards` is that rule; everybody who reads many records passes
them through it, from the greatest id to the least.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .. import paths as layout
from ..errors import REPAIR_ADVICE, CheckpointError, DamagedCheckpoint, ErrorKind
from ..model import AttemptId, CheckpointId, ParentRef, Record
from ..storage import Storage
from .records import UNREADABLE, Ids, Moved, find_record, is_link, settled


class Downwards:
    """Proves losses while records are read from the greatest id to the least, each by a request of its own."""

    def __init__(self) -> None:
        self.lost: list[ParentRef] = []
        self._linked: set[ParentRef] = set()
        self._parents: set[ParentRef] = set()
        self._gaps: list[ParentRef] = []
        self._left_behind = range(0)

    def in_doubt(self, least: int) -> bool:
        """Whether a record from this id on is missing, and was not proven to be lost. Asked before one beneath is read."""
        return any(ref.checkpoint_id >= least for ref in (*self._gaps, *self._linked))

    def left_behind(self, checkpoint_id: CheckpointId) -> bool:
        """Whether the record of this id, the next to be read, stands between a repair and its source."""
        return checkpoint_id in self._left_behind

    def read(self, checkpoint_id: CheckpointId, found: Record | CheckpointError | None) -> None:
        """Take what the record under the next lower id is: the record, why it cannot be read, or None: not there."""
        passed = {ref for ref in self._linked if ref.checkpoint_id > checkpoint_id}
        self._gaps += sorted(passed, reverse=True)
        self._linked -= passed
        if isinstance(found, CheckpointError):
            # It stands. Whether it is the one that its child names cannot be told.
            self._linked -= {ref for ref in self._linked if ref.checkpoint_id == checkpoint_id}
        elif found is not None:
            self._linked.discard(found.ref)
            if found.ref in self._parents:
                self.lost += self._gaps
                self._gaps.clear()
            # What a repair has left behind, between itself and its source, is no history: nothing is missed there.
            # That holds of a repair that a later repair has left behind as well.
            if not self.left_behind(checkpoint_id):
                if found.link is not None:
                    self._linked.add(found.link)
                if found.content_of is not None:
                    self._left_behind = range(found.content_of.checkpoint_id + 1, checkpoint_id)
            if found.parent is not None:
                self._parents.add(found.parent)


@dataclass(frozen=True)
class Survey:
    """A reading of all records, or of the upper ones, that held still. Sequences of records are newest first.

    ``listed``: every id that has a record, ascending. ``chain``: the history from the newest, as far as it can be followed.
    ``cut_off``: checkpoints beneath a record that is damaged or lost, as far as links reach from the highest whole one.
    ``certain``: those of both that are checkpoints for certain; any other may be a stray that stands alone.
    ``unreadable``: why, by id, strays too; ``damaged``: those of them that interrupt the history.
    ``lost``: records that are proven to be lost. ``strays``: all other records; attempt ``""`` where one is unreadable.
    """

    listed: tuple[CheckpointId, ...] = ()
    chain: tuple[Record, ...] = ()
    cut_off: tuple[Record, ...] = ()
    certain: frozenset[ParentRef] = frozenset()
    unreadable: Mapping[CheckpointId, CheckpointError] = field(default_factory=dict)
    damaged: tuple[CheckpointId, ...] = ()
    lost: tuple[ParentRef, ...] = ()
    strays: tuple[ParentRef, ...] = ()

    @property
    def checkpoints(self) -> tuple[Record, ...]:
        """The history, and what is cut off from it."""
        return (*self.chain, *self.cut_off)

    def fault(self, storage: Storage) -> CheckpointError | None:
        """The error for the uppermost record that is damaged or lost; None where the history is whole."""
        damaged = self.damaged[0] if self.damaged else 0
        if self.lost and self.lost[0].checkpoint_id > damaged:
            return record_lost(storage, self.lost[0])
        return self.unreadable[self.damaged[0]] if self.damaged else None


def record_lost(storage: Storage, ref: ParentRef) -> DamagedCheckpoint:
    """The error for a record that is proven to be lost."""
    path = layout.record_path(ref.checkpoint_id)
    return DamagedCheckpoint(
        f"the record of checkpoint {ref.checkpoint_id} ({path} in {storage.url}) was lost: a later checkpoint names it, and "
        f"older ones, which retention removes first, still stand{REPAIR_ADVICE}",
        kind=ErrorKind.RECORD_LOST,
        path=path,
        checkpoint_id=ref.checkpoint_id,
        attempt_id=ref.attempt_id,
    )


def survey(storage: Storage, *, down_to: int = 1, limit: int | None = None) -> Survey:
    """Read the records once, from the newest down; one request each.

    ``down_to``: nothing beneath this id is read, unless to learn whether a record above it was lost. ``limit``: reading
    ends when so many checkpoints were found; what it left out is in none of the sequences. Empty where there is no record.
    Raises ``StorageError``.
    """
    return settled(storage, lambda ids: _survey(storage, ids, down_to, limit))


def _survey(storage: Storage, ids: Ids, down_to: int, limit: int | None) -> Survey:
    found = Survey(tuple(ids))
    order, records, unreadable = Downwards(), dict[CheckpointId, Record](), dict[CheckpointId, CheckpointError]()
    for checkpoint_id in reversed(ids):
        if checkpoint_id < down_to and not order.in_doubt(down_to):
            break
        if limit is not None and len(records) >= limit:
            found = _sorted_out(found.listed, records, unreadable, order)
            if len(found.checkpoints) >= limit:
                break
        try:
            record = find_record(storage, checkpoint_id)
        except UNREADABLE as error:
            unreadable[checkpoint_id] = error
            order.read(checkpoint_id, error)
            continue
        order.read(checkpoint_id, record)
        if record is not None:
            records[checkpoint_id] = record
        elif checkpoint_id == ids[-1]:
            raise Moved
    return _sorted_out(found.listed, records, unreadable, order)


def _sorted_out(
    listed: tuple[CheckpointId, ...],
    records: Mapping[CheckpointId, Record],
    unreadable: Mapping[CheckpointId, CheckpointError],
    order: Downwards,
) -> Survey:
    """What the records that were read, newest first, are to each other."""
    if not listed:
        return Survey()
    chain, cut_off, damaged = list[Record](), list[Record](), list[CheckpointId]()
    to, current, wanted = chain, records.get(listed[-1]), listed[-1]
    while True:
        if current is None:
            # Interrupted: it goes on at the highest record beneath that can be read.
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
        if current is None and wanted not in unreadable and link not in order.lost:
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
        lost=tuple(sorted(order.lost, reverse=True)),
        strays=tuple(sorted(strays)),
    )


def _certain(chain: list[Record], records: Mapping[CheckpointId, Record]) -> frozenset[ParentRef]:
    """What is a checkpoint for certain: reached from the newest; named by another record; or above its own parent.

    Expire takes the parent first, and nobody names a stray. A parent was read after its child. A repair, whose parent cannot
    be read, is as certain as the checkpoint whose content it has.
    """
    there = {record.ref for record in records.values()}
    named = {record.parent for record in records.values() if record.parent is not None}
    above = {record.ref for record in records.values() if record.parent in there}
    known = {record.ref for record in chain} | (named & there) | above
    return frozenset(known | {record.ref for record in records.values() if record.content_of in known})


__all__ = ["Downwards", "Survey", "record_lost", "survey"]
