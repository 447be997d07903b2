"""Follow a store: return its checkpoints as they appear.

Each look is one listing, and each record is read once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from ..errors import CheckpointError
from ..model import CheckpointId, ParentRef, Record
from ..storage import Storage
from .records import UNREADABLE, find_record, ids_from, record_ids

FIRST: Final = 5
"""How many existing checkpoints the first look reads."""


class Came(NamedTuple):
    """A checkpoint was published."""

    record: Record
    before: Record | None
    """The checkpoint before it, if it was read; None for the first one seen."""
    is_new: bool
    """Whether it appeared after the first look."""


class Unreadable(NamedTuple):
    """A record cannot be read."""

    checkpoint_id: CheckpointId
    error: CheckpointError


class Passed(NamedTuple):
    """Records that had expired before a look could read them."""

    first: CheckpointId
    last: CheckpointId


class Withdrawn(NamedTuple):
    """A record seen earlier is not a checkpoint: another run's has replaced it, or none has."""

    ref: ParentRef


Seen = Came | Unreadable | Passed | Withdrawn


class Follower:
    """Follows the checkpoints of a store. The store need not exist yet."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known = CheckpointId(0)
        """The greatest id seen, readable or not."""
        self._looked = False
        self.newest: Record | None = None
        """The newest checkpoint that could be read."""

    def look(self) -> list[Seen]:
        """Return what is new since the last look, oldest first.

        Raises ``StorageError`` if nothing could be read; the next look tries again.
        """
        if not self._known:
            listed = record_ids(self._storage)
            found = listed if self._looked else listed[-FIRST:]
        else:
            listed = ids_from(self._storage, self._known)
            found = [checkpoint_id for checkpoint_id in listed if checkpoint_id > self._known]
        seen = list(self._gone(listed))
        try:
            for one in self._read(found):
                seen.append(one)  # noqa: PERF402 - what was read before an error is seen
        except (CheckpointError, OSError):
            if not seen:
                raise
        self._looked = True
        return seen

    def _gone(self, listed: list[CheckpointId]) -> Iterator[Seen]:
        """The newest never expires: if it is missing, and none is greater, its run took it back."""
        if not self._known or listed:
            return
        beneath = 0
        if self.newest is not None and self.newest.checkpoint_id == self._known:
            yield Withdrawn(self.newest.ref)
            beneath = self._known - 1
        # If nothing is below it either, the store was emptied and starts over.
        self._known, self.newest = CheckpointId(beneath), None

    def _read(self, found: list[CheckpointId]) -> Iterator[Seen]:
        for checkpoint_id in found:
            try:
                record = find_record(self._storage, checkpoint_id)
            except UNREADABLE as error:
                yield from self._passed(checkpoint_id)
                yield Unreadable(checkpoint_id, error)
                self._known = checkpoint_id
                continue
            if record is None:
                continue  # Expired or withdrawn since the listing: the next look or record tells.
            yield from self._passed(checkpoint_id)
            before = self.newest
            if before is not None and record.parent is not None and _replaced(before.ref, record.parent):
                yield Withdrawn(before.ref)
                before = None
            yield Came(record, before, self._looked)
            self._known, self.newest = checkpoint_id, record

    def _passed(self, checkpoint_id: CheckpointId) -> Iterator[Seen]:
        if self._looked and self._known and checkpoint_id > self._known + 1:
            yield Passed(CheckpointId(self._known + 1), CheckpointId(checkpoint_id - 1))


def _replaced(seen: ParentRef, named: ParentRef) -> bool:
    """Return whether a child names an attempt other than the one seen under that id."""
    return seen.checkpoint_id == named.checkpoint_id and seen != named
