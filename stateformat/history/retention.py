"""What still needs a checkpoint, and deleting what nothing needs (SPEC.md section 10)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Final, NamedTuple

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
from ..graph import brief
from ..manifest import codes_of, decode_manifest, first_uses, manifest_ref, read_manifest, take_rows
from ..model import AttemptId, CheckpointId, ParentRef, Record, SchemaVersion
from ..reading import StoreCheckpoint, load_columns
from ..record import MANIFEST_BYTES_MAX
from ..storage import Leftover, ObjectInfo, Storage
from .records import (
    UNREADABLE,
    HistoryChanged,
    Ids,
    LossDetector,
    find_record,
    ids_from,
    read_until_stable,
    record_ids,
    record_lost,
    survey,
)

# ---- what follows a checkpoint -------------------------------------------------------------------
#
# Follow a store: return its checkpoints as they appear.
#
# Each look is one listing, and each record is read once.


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


# ---- committables --------------------------------------------------------------------------------
#
# The committables that may still be committed: of every record, and of attempts about to publish.
#
# Sinks clean up when a run begins, and keep what garbage collection keeps (``retention``): a second
# rollback may go back to a checkpoint whose committables the newest does not carry.


class Wanted(NamedTuple):
    """Which committables of an operator to read."""

    down_to: int
    """The lowest checkpoint id."""
    schema: SchemaVersion


def carried_committables(storage: Storage, state: str, wanted: Mapping[str, Wanted]) -> dict[str, list[pa.Table]]:
    """Return the rows of the committables ``state`` by uid, one table for each checkpoint with any.

    Columns: ``_checkpoint_id``, ``_attempt_id``, then those of the wanted schema. Tables may repeat
    rows. No checkpoint below an id carries what was prepared under that id, so none is read.
    Raises what reading records, manifests and segments raises, and ``InvalidState`` if the
    committables cannot evolve to the schema.
    """
    if not wanted:
        return {}
    return read_until_stable(storage, lambda ids: _carried(storage, ids, state, wanted))


def _carried(storage: Storage, ids: Ids, state: str, wanted: Mapping[str, Wanted]) -> dict[str, list[pa.Table]]:
    found: dict[str, list[pa.Table]] = {uid: [] for uid in wanted}
    least = min(each.down_to for each in wanted.values())
    for checkpoint in _checkpoints(storage, ids, least):
        for uid, rows in _rows(checkpoint, state, wanted):
            found[uid].append(rows)
    return found


def _checkpoints(storage: Storage, ids: Ids, least: int) -> Iterator[StoreCheckpoint]:
    """Yield the checkpoints from an id on, then the manifests under newest + 1."""
    newest: Record | None = None
    for checkpoint_id in ids:
        if checkpoint_id < least:
            continue
        record = find_record(storage, checkpoint_id)
        if record is None:
            check_expired(checkpoint_id, ids[-1])
            continue
        newest = record
        yield StoreCheckpoint(storage, record)
    if newest is None:
        return
    features = (*newest.required_features, "committables")
    unpublished = replace(newest, checkpoint_id=CheckpointId(newest.checkpoint_id + 1), required_features=features)
    for path in manifests_under(storage, unpublished.checkpoint_id):
        data = read_unpublished_bytes(storage, path)
        ref = manifest_ref(path, data)
        yield StoreCheckpoint(storage, replace(unpublished, manifest=ref), manifest=decode_manifest(data, ref))


def _rows(checkpoint: StoreCheckpoint, state: str, wanted: Mapping[str, Wanted]) -> Iterator[tuple[str, pa.Table]]:
    if "committables" not in checkpoint.record.required_features:
        return
    try:
        for uid, (down_to, schema) in wanted.items():
            if checkpoint.id >= down_to and (uid, state) in checkpoint.record.by_state:
                rows = checkpoint.read(uid, state).table(as_schema=schema)
                if rows.num_rows:
                    yield uid, rows
    except CheckpointExpired:
        raise HistoryChanged from None


# ---- retention -----------------------------------------------------------------------------------
#
# What may be deleted: retention, garbage, and the function that says what a manifest needs.
#
# An object under an id up to the newest is garbage if no record (strays included) names it, and no
# manifest under newest + 1 does (SPEC.md section 9). The search starts over if the newest changes.
# It ends without deleting if a record or manifest is unreadable or a record is proven to be lost;
# but for an unreadable record that was repaired, every manifest under its id is kept. Temporary
# files and uploads follow the same rule. The clock decides nothing but how far expiry by age goes.


logger = logging.getLogger(__name__)

REACHABLE_SCHEMA: Final = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("digest", pa.binary(16)),
        pa.field("inline", pa.bool_(), nullable=False),
    ]
)
"""Segments that handles need, one row per path; ``inline`` ones are in the manifest."""


def reachable(handles: pa.Table) -> pa.Table:
    """Return every segment that a manifest's handles need (:data:`REACHABLE_SCHEMA`).

    They are in order of first mention, with the size and digest of the first handle that names the
    path. Without the column ``inline`` every segment counts as an object.
    """
    columns = [name for name in REACHABLE_SCHEMA.names if name in handles.column_names]
    first = first_uses(codes_of(handles["path"])[0])
    chosen = take_rows(handles.select(columns), pa.array(first))
    inline = pc.is_valid(chosen["inline"]) if "inline" in columns else pa.repeat(False, len(first))
    return pa.table([chosen["path"], chosen["size_bytes"], chosen["digest"], inline], schema=REACHABLE_SCHEMA)


@dataclass(frozen=True, repr=False)
class Garbage:
    """What deleting would free, or has freed; each object with its size, sorted by path."""

    newest: CheckpointId | None = None
    """The newest checkpoint when the search ended."""
    records: tuple[ObjectInfo, ...] = ()
    """Records beyond retention."""
    manifests: tuple[ObjectInfo, ...] = ()
    segments: tuple[ObjectInfo, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    """Temporary files and uploads of attempts that have ended."""
    unfinished: tuple[Leftover, ...] = ()
    """Temporary files and uploads of attempts that may be running; never deleted."""
    deleted: bool = False
    """Whether the objects were deleted, not only found."""
    stopped: str | None = None
    """Why the search ended without an answer (then ``manifests``, ``segments``, ``leftovers`` are
    empty); None if it did not."""

    def __repr__(self) -> str:
        what = "deleted" if self.deleted else "found"
        return brief(self, f"{len(self.objects) + len(self.leftovers)} {what}", f"{self.size_bytes:,} bytes")

    @property
    def objects(self) -> tuple[ObjectInfo, ...]:
        """Every object to delete, in order of deletion; leftovers are deleted after them."""
        return (*self.records, *self.segments, *self.manifests)

    @property
    def size_bytes(self) -> int:
        """The bytes of all objects and leftovers to delete."""
        return sum(item.size_bytes for item in self.objects) + sum(item.size_bytes for item in self.leftovers)


class Uses(NamedTuple):
    """The record under an id, and the segments it needs."""

    record: Record | CheckpointError | None
    """The record, or why it cannot be read, or None."""
    segments: pa.Array | None
    """The paths of the segments that its manifest names; None without a record."""


Read = Callable[[Storage, CheckpointId], Uses]


def read_uses(storage: Storage, checkpoint_id: CheckpointId) -> Uses:
    """Read a record and its manifest. Raises for a manifest that cannot be read."""
    record, named = record_and_columns(storage, checkpoint_id, ("path",))
    return Uses(record, None if named is None else pc.unique(named["path"]))


_REMEMBERED_BYTES: Final = 16 << 20


class RememberedUses:
    """Reads uses (:data:`Read`). A record's manifest never changes, so it is read only once.

    A run expires a checkpoint each time it publishes one, and keeps most of the others.
    """

    def __init__(self) -> None:
        self._segments: dict[ParentRef, pa.Array] = {}

    def __call__(self, storage: Storage, checkpoint_id: CheckpointId) -> Uses:
        """As :func:`read_uses`, for one store."""
        try:
            record = find_record(storage, checkpoint_id)
        except UNREADABLE as error:
            return Uses(error, None)
        known = None if record is None else self._segments.get(record.ref)
        if known is not None:
            return Uses(record, known)
        found = read_uses(storage, checkpoint_id)
        if isinstance(found.record, Record) and found.segments is not None:
            if sum(segments.nbytes for segments in self._segments.values()) > _REMEMBERED_BYTES:
                self._segments.clear()
            self._segments[found.record.ref] = found.segments
        return found


def collect_garbage(storage: Storage, *, delete: bool, read: Read = read_uses) -> Garbage:
    """Find what no record names, and delete it if ``delete`` is set. Raises ``NotFound``.

    ``read`` is for callers that do not delete and have already read the manifests.
    """
    _require_store(storage)
    return _sweep(_find(storage, frozenset(), read), storage, delete=delete)


def expire(
    storage: Storage,
    keep: int | None = None,
    *,
    older_than_us: int | None = None,
    now_us: int | None = None,
    delete: bool = True,
    read: Read = read_uses,
) -> Garbage:
    """Delete the records with ids up to newest − ``keep``, strays among them, then collect garbage.

    ``older_than_us``: only those published that long before ``now_us``, by default the time of this
    computer (:func:`cut_by_age`); never more than without it. With an age alone, all but the newest
    may go. All expired records are deleted before the first object, so a crash in between leaves
    only garbage. Nothing is deleted (``stopped`` says why) if the newest record cannot be read or a
    record to keep was lost.
    Raises ``InvalidInput`` for ``keep`` < 1 and a negative age, and ``NotFound``.
    """
    if keep is None and older_than_us is None:
        raise InvalidInput("expire takes how many checkpoints to keep, or for how long: keep=10, older_than_us=…")
    keep = 1 if keep is None else keep
    if keep < 1:
        raise InvalidInput(f"cannot keep {keep} checkpoints: at least 1, the newest, is always kept")
    if older_than_us is not None and older_than_us < 0:
        raise InvalidInput(f"checkpoints cannot be kept for {older_than_us} µs; give an age of 0 or more")
    _require_store(storage)
    listed = {layout.record_id(item.path): item for item in storage.list(layout.RECORDS)}
    ids = sorted(checkpoint_id for checkpoint_id in listed if checkpoint_id is not None)
    cut = ids[-1] - keep if ids else 0
    if older_than_us is not None:
        now_us = time.time_ns() // 1000 if now_us is None else now_us
        cut = cut_by_age(storage, [found for found in ids if found <= cut], now_us - older_than_us, now_us)
    doomed = [checkpoint_id for checkpoint_id in ids if checkpoint_id <= cut]
    records = tuple(listed[checkpoint_id] for checkpoint_id in doomed)
    if doomed and (why := why_not_expire(storage, CheckpointId(cut))):
        stopped = Garbage(newest=ids[-1], unfinished=tuple(_leftovers(storage)), stopped=why)
        return _sweep(stopped, storage, delete=delete)
    if delete:
        remove_records(storage, records)
        return replace(_sweep(_find(storage, frozenset(), read), storage, delete=True), records=records, deleted=True)
    return replace(_find(storage, frozenset(doomed), read), records=records)


def cut_by_age(storage: Storage, ids: Ids, before_us: int, now_us: int) -> int:
    """Return the highest of these ids up to which records are older than ``before_us``; 0: none is.

    The ids ascend; the search ends at the first record published later. The time in a record is
    for information only (SPEC.md section 3.2). A record that cannot be read, or whose time is in
    the future because its clock was wrong, decides nothing: it goes with the next one that does,
    since it was published before that one. Reads one record more than are old.
    """
    cut = 0
    for checkpoint_id in ids:
        try:
            record = find_record(storage, checkpoint_id)
        except UNREADABLE:
            continue
        if record is None or record.created_at_us > now_us:
            continue
        if record.created_at_us >= before_us:
            break
        cut = checkpoint_id
    return cut


def why_not_expire(storage: Storage, cut: CheckpointId) -> str | None:
    """Return why the records up to this id must not be deleted; None if they may be."""
    found = survey(storage, down_to=cut + 1)
    newest = found.listed[-1]
    if newest in found.unreadable:
        return f"no record is deleted, because the newest cannot be read: {found.unreadable[newest]}"
    lost = [ref for ref in found.lost if ref.checkpoint_id > cut]
    return f"no record is deleted, because one was lost: {record_lost(storage, lost[0])}" if lost else None


def remove_records(storage: Storage, records: Iterable[ObjectInfo]) -> None:
    """Delete records one by one, lowest id first; the proof that records were lost needs it."""
    for item in records:
        storage.delete([item.path])
        logger.info("expired %s of %s", item.path, storage.url)


def _require_store(storage: Storage) -> None:
    if not storage.exists():
        raise NotFound(f"there is no store at {storage.url}; check the address", kind=ErrorKind.STORE_NOT_FOUND)


class _Needed(NamedTuple):
    """The paths of all needed manifests and segments, at one instant."""

    newest: CheckpointId
    manifests: frozenset[str]
    segments: pa.Array


def _find(storage: Storage, doomed: Collection[CheckpointId], read: Read) -> Garbage:
    """Return what nothing needs once the ``doomed`` records are gone. Changes nothing."""
    leftovers = _leftovers(storage)
    try:
        needed = read_until_stable(storage, lambda ids: _needed(storage, ids, doomed, read))
    except UNREADABLE as error:
        why = f"nothing is collected, because what is needed is unknown: {error}"
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
    try:
        return storage.leftovers()
    except StorageError as error:
        # Listing uploads on S3 requires a permission that retention does not need.
        logger.warning("what writers of %s left behind was kept, because it cannot be listed: %s", storage.url, error)
        return []


def _below(items: Iterable[ObjectInfo], newest: CheckpointId) -> list[ObjectInfo]:
    """Return the objects under ids up to the newest; those above may still be published."""
    return [item for item in items if _is_below(item.path, newest)]


def _is_below(path: str, newest: CheckpointId) -> bool:
    owner = layout.owner_id(path)
    return owner is not None and owner <= newest


def _has_ended(path: str, newest: CheckpointId) -> bool:
    """Return whether a leftover belongs to an attempt or request from before the newest."""
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
    if plan.leftovers:
        storage.discard(plan.leftovers)
    what = f"{len(plan.objects)} objects and {len(plan.leftovers)} leftovers"
    logger.info("deleted %s of %s, %d bytes", what, storage.url, plan.size_bytes)
    return replace(plan, deleted=True)


def _needed(storage: Storage, ids: Ids, doomed: Collection[CheckpointId], read: Read) -> _Needed | None:
    """Return all that a record, or an attempt at newest + 1, names. None without records."""
    if not ids:
        return None
    newest = ids[-1]
    manifests: set[str] = set()
    segments: list[pa.Array] = [pa.array([], pa.string())]
    losses = LossDetector()
    for checkpoint_id in reversed(ids):
        if checkpoint_id in doomed:
            continue
        found, named = read(storage, checkpoint_id)
        if isinstance(found, CheckpointError) and not losses.left_behind(checkpoint_id):
            raise found
        losses.read(checkpoint_id, found)
        if found is None:
            check_expired(checkpoint_id, newest)
        elif isinstance(found, CheckpointError):
            # It is unknown what it named, and a run that has opened it may still commit.
            kept = manifests_under(storage, checkpoint_id)
            manifests.update(kept)
            segments.extend(_unpublished_segments(storage, path) for path in kept)
        else:
            manifests.add(found.manifest.path)
            segments.append(named)
    if losses.lost:
        raise record_lost(storage, losses.lost[0])
    unpublished = manifests_under(storage, CheckpointId(newest + 1))
    segments.extend(_unpublished_segments(storage, path) for path in unpublished)
    return _Needed(newest, frozenset(manifests), pc.unique(pa.concat_arrays(segments)))


def check_expired(checkpoint_id: CheckpointId, newest: CheckpointId) -> None:
    """Raise ``HistoryChanged`` if the record that is gone is the newest, which never expires."""
    if checkpoint_id == newest:
        raise HistoryChanged


def record_and_columns(
    storage: Storage, checkpoint_id: CheckpointId, names: Sequence[str]
) -> tuple[Record | CheckpointError | None, pa.Table | None]:
    """Return the record under an id, or why it cannot be read, or None; and columns of its
    manifest.
    """
    while True:
        try:
            record = find_record(storage, checkpoint_id)
        except UNREADABLE as error:
            return error, None
        if record is None:
            return None, None
        try:
            return record, load_columns(storage, record, names)
        except CheckpointExpired:
            # The record is gone, or another attempt has taken the id: read again.
            logger.debug("record %s of %s was removed during the search for garbage", checkpoint_id, storage.url)


def manifests_under(storage: Storage, checkpoint_id: CheckpointId) -> list[str]:
    """Return the paths of the manifests under an id, of all attempts, published or not."""
    prefix = layout.manifest_path(checkpoint_id, AttemptId("")).removesuffix(".parquet")
    return [item.path for item in storage.list(prefix)]


def _unpublished_segments(storage: Storage, path: str) -> pa.Array:
    """Return the paths of segments that a manifest without a record needs."""
    data = read_unpublished_bytes(storage, path)
    try:
        handles = read_manifest(data, manifest_ref(path, data)).handles.select(["path", "size_bytes", "digest"])
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(
            f"{path} in {storage.url} cannot be read ({error}), and may be just about to be published; if no run is "
            "writing to the store, delete that file",
            kind=ErrorKind.DAMAGED_MANIFEST,
            path=path,
        ) from error
    return reachable(handles)["path"].combine_chunks()


def read_unpublished_bytes(storage: Storage, path: str) -> pa.Buffer:
    """Return a manifest without a record. Raises ``HistoryChanged`` if it was collected."""
    try:
        return storage.read_range(path, 0, MANIFEST_BYTES_MAX + 1)
    except FileNotFoundError:
        raise HistoryChanged from None
