"""What may be deleted: retention, garbage, and the one function that says what a manifest needs.

Theory of operation (SPEC.md section 9). An object is needed if a checkpoint names it, or a checkpoint that is about to be
published does. Nobody can see the latter, so three rules bound what it can name. A publisher refers to its parent's
objects and to its own; its own lie under an id above the newest, where nothing is touched. A rollback refers to an older
checkpoint's objects; it writes its manifest first and then looks whether that checkpoint's record is still there. And all
records that retention dooms are deleted before the first object is.

So garbage is found like this: list the records, read the manifest of every one, strays too; read the manifests that lie
under newest + 1, published or not; list again. Another newest: start over (``history.settled``). A record that cannot be
read, one whose manifest is missing or cannot be read, and a record that is proven to be lost (``survey``) end it without
deleting: what they need is unknown. (Of an unreadable record that was repaired every manifest under its id is kept.) What lies under ids up to the newest and
is named by nothing that was read, is garbage; no clock is asked. A dry run is the same plan, not carried out.

Temporary files and uploads go by the same rule: whoever still writes under an id up to the newest has lost, or has
published without what he is writing. He then fails to close his object, which nobody would have named.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from itertools import compress
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from .. import paths as layout
from ..errors import (
    CheckpointError,
    CheckpointExpired,
    DamagedCheckpoint,
    ErrorKind,
    InvalidInput,
    NotFound,
    StorageError,
)
from ..manifest import codes_of, first_uses, read_unpublished, take_rows
from ..model import AttemptId, CheckpointId, Record
from ..reading import load_manifest
from ..record import MANIFEST_BYTES_MAX
from ..storage import Leftover, ObjectInfo, Storage, TellsLeftovers
from .records import UNREADABLE, Ids, Moved, find_record, settled
from .survey import Downwards, record_lost, survey

logger = logging.getLogger(__name__)

REACHABLE_SCHEMA: Final = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("digest", pa.binary(16)),
        pa.field("inline", pa.bool_(), nullable=False),
    ]
)
"""Segments that handles need, one row per path; ``inline`` ones lie in the manifest and are no objects of the storage."""


def reachable(handles: pa.Table) -> pa.Table:
    """Every segment that these handles need (:data:`REACHABLE_SCHEMA`), in order of first mention.

    ``handles`` is a manifest's table. This is the one notion of "needed" that expiring, collecting garbage, publishing and
    copying share. Without the column ``inline`` every segment counts as an object, which is all that deleting asks. Size
    and digest are those of the first handle that names a path; that all of them agree is for ``validation`` to say.
    """
    columns = [name for name in REACHABLE_SCHEMA.names if name in handles.column_names]
    named = handles.select(columns).filter(pc.is_valid(handles["path"]))
    first = first_uses(codes_of(named["path"])[0])
    chosen = take_rows(named, pa.array(first))
    inline = pc.is_valid(chosen["inline"]) if "inline" in columns else pa.repeat(False, len(first))
    return pa.table([chosen["path"], chosen["size_bytes"], chosen["digest"], inline], schema=REACHABLE_SCHEMA)


@dataclass(frozen=True)
class Garbage:
    """What retention and orphans would free, or have freed.

    ``newest`` is the newest checkpoint that the plan rests on. ``records`` are those beyond retention, ``manifests`` and
    ``segments`` what nothing names then; each with its size in bytes, sorted by path. ``leftovers`` are temporary files
    and uploads of attempts that have ended, ``unfinished`` those that may belong to a live one: told and never deleted.
    ``stopped`` says why the search ended without an answer (then ``manifests``, ``segments`` and ``leftovers`` are
    empty); None where it did not. ``deleted``: carried out, not planned.
    """

    newest: CheckpointId | None = None
    records: tuple[ObjectInfo, ...] = ()
    manifests: tuple[ObjectInfo, ...] = ()
    segments: tuple[ObjectInfo, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    unfinished: tuple[Leftover, ...] = ()
    deleted: bool = False
    stopped: str | None = None

    @property
    def objects(self) -> tuple[ObjectInfo, ...]:
        """Every object that is deleted, in the order in which it is. Leftovers, which are none, go after them."""
        return (*self.records, *self.segments, *self.manifests)

    @property
    def size_bytes(self) -> int:
        """The bytes of all that is deleted, leftovers included."""
        return sum(item.size_bytes for item in self.objects) + sum(item.size_bytes for item in self.leftovers)


def collect_garbage(storage: Storage, *, delete: bool) -> Garbage:
    """Find what no record names, and delete it if asked to. ``NotFound`` where there is no store."""
    _require_store(storage)
    return _sweep(_find(storage, frozenset()), storage, delete=delete)


def expire(storage: Storage, keep: int, *, delete: bool = True) -> Garbage:
    """Delete the records with ids up to newest − ``keep``, strays among them, then collect garbage.

    Every doomed record goes before the first object: a crash in between leaves garbage, never a record that cannot be
    read. Nothing is deleted (``stopped`` says why) where the newest record cannot be read, since the older ones may be all
    that is left, or where a record that is to be kept was lost, since the older ones prove it. Raises ``InvalidInput`` for
    ``keep`` < 1 and ``NotFound`` where there is no store.
    """
    if keep < 1:
        raise InvalidInput(f"cannot keep {keep} checkpoints: at least 1, the newest, is always kept")
    _require_store(storage)
    listed = {layout.record_id(item.path): item for item in storage.list(layout.RECORDS)}
    ids = sorted(checkpoint_id for checkpoint_id in listed if checkpoint_id is not None)
    cut = ids[-1] - keep if ids else 0
    doomed = [checkpoint_id for checkpoint_id in ids if checkpoint_id <= cut]
    records = tuple(listed[checkpoint_id] for checkpoint_id in doomed)
    if doomed and (why := why_not_expire(storage, CheckpointId(cut))):
        return _sweep(
            Garbage(newest=ids[-1], unfinished=tuple(_leftovers(storage)), stopped=why), storage, delete=delete
        )
    if delete:
        remove_records(storage, records)
        return replace(_sweep(_find(storage, frozenset()), storage, delete=True), records=records, deleted=True)
    return replace(_find(storage, frozenset(doomed)), records=records)


def why_not_expire(storage: Storage, cut: CheckpointId) -> str | None:
    """Why the records up to this id must not be deleted; None where they may be.

    Looks at the newest, and for a lost record above the cut. A loss at or below it is no reason: time heals the store.
    """
    found = survey(storage, down_to=cut + 1)
    newest = found.listed[-1]
    if newest in found.unreadable:
        return f"no record is deleted, for the newest cannot be read: {found.unreadable[newest]}"
    lost = [ref for ref in found.lost if ref.checkpoint_id > cut]
    return f"no record is deleted, for the older ones prove a loss: {record_lost(storage, lost[0])}" if lost else None


def remove_records(storage: Storage, records: Iterable[ObjectInfo]) -> None:
    """Delete doomed records, the lowest id first and one after the other: a child never goes before its parent.

    Stops where one cannot be deleted. Whoever finds a gap rests on this order (``survey``).
    """
    for item in records:
        storage.delete([item.path])
        logger.info("expired %s of %s", item.path, storage.url)


def _require_store(storage: Storage) -> None:
    if not storage.exists():
        raise NotFound(f"there is no store at {storage.url}; check the address", kind=ErrorKind.STORE_NOT_FOUND)


@dataclass(frozen=True)
class _Needed:
    """What a settled reading of all manifests found: the newest, the paths of manifests and segments that are needed."""

    newest: CheckpointId
    manifests: frozenset[str]
    segments: pa.Array


def _find(storage: Storage, doomed: Collection[CheckpointId]) -> Garbage:
    """The plan: what nothing needs once the ``doomed`` records are gone. Changes nothing."""
    leftovers = _leftovers(storage)
    try:
        needed = settled(storage, lambda ids: _needed(storage, ids, doomed))
    except UNREADABLE as error:
        why = f"nothing is collected, for what is needed is unknown: {error}"
        return Garbage(unfinished=tuple(leftovers), stopped=why)
    if needed is None:
        why = f"{storage.url} has no checkpoint, so nothing says what is needed"
        return Garbage(unfinished=tuple(leftovers), stopped=why)
    ended = [_has_ended(item.path, needed.newest) for item in leftovers]
    segments = _below(storage.list(layout.SEGMENTS), needed.newest)
    unnamed = pc.invert(pc.is_in(pa.array([item.path for item in segments], pa.string()), value_set=needed.segments))
    manifests = _below(storage.list(layout.MANIFESTS), needed.newest)
    return Garbage(
        newest=needed.newest,
        manifests=tuple(item for item in manifests if item.path not in needed.manifests),
        segments=tuple(compress(segments, unnamed.to_pylist())),
        leftovers=tuple(compress(leftovers, ended)),
        unfinished=tuple(compress(leftovers, (not has_ended for has_ended in ended))),
    )


def _leftovers(storage: Storage) -> list[Leftover]:
    if not isinstance(storage, TellsLeftovers):
        return []
    try:
        return storage.leftovers()
    except StorageError as error:
        # Listing uploads takes a permission of its own on S3, without which retention has to work as well.
        logger.warning("what writers of %s left behind stays, for it cannot be listed: %s", storage.url, error)
        return []


def _below(items: Iterable[ObjectInfo], newest: CheckpointId) -> list[ObjectInfo]:
    """Objects under ids up to the newest. What lies above belongs to attempts that may still be published."""
    return [item for item in items if _is_below(item.path, newest)]


def _is_below(path: str, newest: CheckpointId) -> bool:
    owner = layout.owner_id(path)
    return owner is not None and owner <= newest


def _has_ended(path: str, newest: CheckpointId) -> bool:
    """Whether a leftover may go: of an attempt that has lost, or of a request that was made before the newest checkpoint.

    Whoever still writes such a request, or the answer to it, writes it again (``requests``).
    """
    asked = layout.asked_under(path)
    return _is_below(path, newest) or (asked is not None and asked < newest)


def _sweep(plan: Garbage, storage: Storage, *, delete: bool) -> Garbage:
    if plan.stopped:
        logger.warning("garbage of %s: %s", storage.url, plan.stopped)
        return plan
    if not delete:
        return plan
    storage.delete([item.path for item in plan.segments])
    storage.delete([item.path for item in plan.manifests])
    if plan.leftovers and isinstance(storage, TellsLeftovers):
        storage.discard(plan.leftovers)
    logger.info(
        "deleted %d objects and %d leftovers of %s, %d bytes",
        len(plan.objects),
        len(plan.leftovers),
        storage.url,
        plan.size_bytes,
    )
    return replace(plan, deleted=True)


def _needed(storage: Storage, ids: Ids, doomed: Collection[CheckpointId]) -> _Needed | None:
    """Everything that a record, or an attempt at newest + 1, names. None in a store without records."""
    if not ids:
        return None
    newest = ids[-1]
    manifests: set[str] = set()
    segments: list[pa.Array] = [pa.array([], pa.string())]
    order = Downwards()
    for checkpoint_id in reversed(ids):
        if checkpoint_id in doomed:
            continue
        try:
            found = _record_and_handles(storage, checkpoint_id)
        except _Unreadable as error:
            if not order.left_behind(checkpoint_id):
                raise error.cause from None
            # What it named is known to nobody, and a run that has opened it may still commit.
            order.read(checkpoint_id, error.cause)
            kept = manifests_under(storage, checkpoint_id)
            manifests.update(kept)
            segments.extend(_paths(_unpublished_handles(storage, path)) for path in kept)
            continue
        order.read(checkpoint_id, found and found[0])
        if found is None:
            missed(checkpoint_id, newest)
            continue
        manifests.add(found[0].manifest.path)
        segments.append(_paths(found[1]))
    if order.lost:
        raise record_lost(storage, order.lost[0])
    unpublished = manifests_under(storage, CheckpointId(newest + 1))
    segments.extend(_paths(_unpublished_handles(storage, path)) for path in unpublished)
    return _Needed(newest, frozenset(manifests), pc.unique(pa.concat_arrays(segments)))


def missed(checkpoint_id: CheckpointId, newest: CheckpointId) -> None:
    """Judge a record that was listed and is gone: an older one was expired by somebody else, which is fine.

    The newest is never expired, so there is a newer one, which may need what is about to be called garbage.
    """
    if checkpoint_id == newest:
        raise Moved


def _paths(handles: pa.Table) -> pa.Array:
    # Inline ones may be among them: they name no object of the storage, so that keeps nothing that should go.
    return reachable(handles)["path"].combine_chunks()


class _Unreadable(Exception):
    """A record that stands and cannot be read; its manifest was not looked for."""

    def __init__(self, cause: CheckpointError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def _record_and_handles(storage: Storage, checkpoint_id: CheckpointId) -> tuple[Record, pa.Table] | None:
    """The record under an id and its manifest; None where there is no record, which is looked at again if need be."""
    while True:
        try:
            record = find_record(storage, checkpoint_id)
        except UNREADABLE as error:
            raise _Unreadable(error) from error
        if record is None:
            return None
        try:
            return record, load_manifest(storage, record).handles
        except CheckpointExpired:
            # Gone, or another attempt has taken the id since we read it: look once more. Every turn of this loop means
            # that somebody has deleted and created the record in between, so it ends.
            logger.debug("record %s of %s went away while garbage was searched", checkpoint_id, storage.url)


def manifests_under(storage: Storage, checkpoint_id: CheckpointId) -> list[str]:
    """The manifests that lie under an id, of whatever attempts: some may be just about to be published."""
    prefix = layout.manifest_path(checkpoint_id, AttemptId("")).removesuffix(".parquet")
    return [item.path for item in storage.list(prefix)]


def _unpublished_handles(storage: Storage, path: str) -> pa.Table:
    """The handles of a manifest that no record vouches for yet. It is whole or absent, as every object is."""
    try:
        data = storage.read_range(path, 0, MANIFEST_BYTES_MAX + 1)
    except FileNotFoundError:
        # Deleted as garbage of an id that is not above the newest any more.
        raise Moved from None
    try:
        return read_unpublished(data, path).select(["path", "size_bytes", "digest"])
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(
            f"{path} in {storage.url} cannot be read ({error}), and may be just about to be published; if no run is "
            "writing to the store, delete that file",
            kind=ErrorKind.DAMAGED_MANIFEST,
            path=path,
        ) from error


__all__ = ["REACHABLE_SCHEMA", "Garbage", "collect_garbage", "expire", "reachable"]
