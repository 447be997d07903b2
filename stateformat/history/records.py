"""Reading the history of a store: which records are checkpoints, and which one is the newest.

Others publish, expire and withdraw while a reader works. Reading is safe without locks because the
greatest id never goes down, and its record is never replaced while it is the greatest (SPEC.md
section 8.1): :func:`read_until_stable` lists, reads, lists again, and starts over if the newest
has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

from .. import paths as layout
from ..errors import CheckpointError, DamagedCheckpoint, ErrorKind, NotFound, StorageError, UnsupportedFormat
from ..formats import foreign_checkpoints, only_read
from ..model import CheckpointId, ParentRef, Record
from ..reading import load_record
from ..storage import Storage, stats_of

logger = logging.getLogger(__name__)

_LOOKED_INTO: Final = 200
"""Folders in one that is no store which are looked into, for the error that names them."""
_SHOWN: Final = 5

TRIES = 20
"""How often a read starts over before it gives up."""

UNREADABLE: Final = (DamagedCheckpoint, UnsupportedFormat)
"""Raised for a record that exists, but whose bytes are not a record this version can read."""

NO_RECORDS: Final = (ErrorKind.STORE_NOT_FOUND, ErrorKind.STORE_EMPTY)
"""Kinds of ``NotFound`` for a store without any record."""

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
    return _ids(storage.names(layout.RECORDS))


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


def _below(storage: Storage) -> str:
    """Return which folders in this one hold checkpoints, as a sentence; empty for none."""
    found = []
    folder = storage.folder()
    for name, inside in islice(folder.folders() if folder is not None else (), _LOOKED_INTO):
        with suppress(CheckpointError):
            there = foreign_checkpoints(inside)
            if there is not None or any(map(layout.record_id, inside.names(layout.RECORDS))):
                found.append((name, "a store" if there is None else there.system))
    if not found:
        return ""
    shown = [f"{name} ({what})" for name, what in found[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    url = f"{storage.url.rstrip('/')}/{found[0][0]}"
    there_is, one = ("are", "one of them") if len(found) > 1 else ("is", "that")
    return f"In it {there_is} {', '.join(shown)}{more}. Give {one}: `ckpt inspect {url}`"


def no_records(storage: Storage) -> NotFound:
    """Return the error for a store without records (``STORE_NOT_FOUND``, ``STORE_EMPTY``)."""
    if not storage.exists():
        return NotFound(
            f"there is no store at {storage.url}; check the address, or run the job once",
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
        return NotFound(
            f"{storage.url} is no store of checkpoints: nothing lies in its {layout.RECORDS}, {layout.MANIFESTS} and "
            f"{layout.SEGMENTS}, nor what makes a folder of Flink's (`_metadata`) or of a Spark query (`offsets/`). "
            f"{_below(storage) or 'Check the address; a job makes a store with its first checkpoint'}",
            kind=ErrorKind.STORE_EMPTY,
            url=storage.url,
        )
    return NotFound(
        f"the store {storage.url} holds no checkpoint; the job has not published one yet",
        kind=ErrorKind.STORE_EMPTY,
        url=storage.url,
    )
