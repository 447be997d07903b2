"""Copies a checkpoint into another store, and rolls a store back to an older one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import pyarrow.compute as pc
import xxhash

from .. import paths as layout
from ..errors import DamagedCheckpoint, ErrorKind, InvalidInput, JobMismatch, PublishConflict, StorageError
from ..formats import refuse_foreign
from ..history import chain_down_to, newest_record, reachable, record_ids
from ..model import CheckpointId, CheckpointKind, Record
from ..reading import Checkpoint, StoreCheckpoint, load_manifest, missing_object
from ..record import encode_record
from ..storage import Link, Storage, check_outside, open_storage, read_input, stores_around
from .pending import Draft, PendingCheckpoint, require_empty
from .protocol import CommitPermit, Step, conflict, create_record

# ---- objects -------------------------------------------------------------------------------------
#
# Bring the objects of a checkpoint into another store: by links if the storage can, else copies.
#
# Every object keeps its path and bytes, and an object already there and correct is kept, so
# repeating an interrupted copy completes it. Objects are verified while they are copied. An object
# linked on the same disk is read and verified too: that costs less than a copy, and whoever keeps a
# checkpoint relies on it. For an object that a server copied by itself, only the size is checked:
# reading it would cost all that the server saved. The server is responsible for the bytes, and
# every reader verifies them as always.


CHUNK_BYTES = 4 * 2**20
STREAMS = 8
"""How many objects are copied at once; each takes one chunk of memory."""


class CopyProgress(NamedTuple):
    """How many objects and bytes a copy has completed, and how many there are."""

    objects_done: int
    objects_total: int
    bytes_done: int
    bytes_total: int
    bytes_shared: int = 0
    """The bytes of links: the storage keeps them once, for both stores."""
    bytes_by_server: int = 0
    """The bytes that the server has copied by itself."""


Progress = Callable[[CopyProgress], None]


class _Was(Enum):
    """How an object came to be in the target."""

    KEPT = "kept"
    COPIED = "copied"
    LINKED = "linked"
    COPIED_BY_SERVER = "copied by the server"


class _Object(NamedTuple):
    path: str
    size_bytes: int
    digest: bytes


def check_segments(checkpoint: Checkpoint) -> StoreCheckpoint:
    """Raise ``InvalidInput`` for another system's checkpoint, which has no segments to copy."""
    return checkpoint.of_store("which is copied as the folder that it is (cp -r)")


def check_place(checkpoint: Checkpoint, target: Storage) -> None:
    """Refuse a target in a folder of another store, whose garbage collection would delete it."""
    check_segments(checkpoint)
    check_outside(target.url, checkpoint.storage.url)
    for url in stores_around(target.url):
        if open_storage(url).names(layout.RECORDS):
            check_outside(target.url, url)


def copy_objects(checkpoint: Checkpoint, target: Storage, *, progress: Progress | None = None) -> None:
    """Copy every segment that a checkpoint needs; one already there and correct is kept.

    Raises ``InvalidInput`` for a target in a folder that belongs to a store, ``CheckpointExpired``,
    ``DamagedCheckpoint`` and ``StorageError``.
    """
    check_place(checkpoint, target)
    needed = reachable(check_segments(checkpoint).manifest.full())
    stored = needed.filter(pc.invert(needed["inline"])).select(["path", "size_bytes", "digest"])
    _bring(checkpoint, target, [_Object(*row.values()) for row in stored.to_pylist()], layout.SEGMENTS, progress)


def copy_manifest(checkpoint: Checkpoint, target: Storage) -> None:
    """Copy the checkpoint's manifest to the target. Raises as :func:`copy_objects`."""
    path, size_bytes, digest = (getattr(checkpoint.record.manifest, name) for name in ("path", "size_bytes", "digest"))
    _bring(checkpoint, target, [_Object(path, size_bytes, bytes.fromhex(digest))], layout.MANIFESTS, None)


def _bring(
    checkpoint: Checkpoint, target: Storage, objects: Sequence[_Object], folder: str, progress: Progress | None
) -> None:
    """Link or copy objects of one folder, several at once, and make them durable."""
    done = CopyProgress(0, len(objects), 0, sum(item.size_bytes for item in objects))
    if progress is not None:
        progress(done)
    there = {found.path for found in target.list(folder)} if objects else set()
    by_server: list[_Object] = []
    with ThreadPoolExecutor(min(STREAMS, len(objects)) or 1, thread_name_prefix="copy") as pool:
        running = {
            pool.submit(_bring_one, checkpoint, target, item, stands=item.path in there): item for item in objects
        }
        try:
            for future in as_completed(running):
                item, was = running[future], future.result()
                by_server += [item] if was is _Was.COPIED_BY_SERVER else []
                done = done._replace(
                    objects_done=done.objects_done + 1,
                    bytes_done=done.bytes_done + item.size_bytes,
                    bytes_shared=done.bytes_shared + item.size_bytes * (was is _Was.LINKED),
                    bytes_by_server=done.bytes_by_server + item.size_bytes * (was is _Was.COPIED_BY_SERVER),
                )
                if progress is not None:
                    progress(done)
        finally:
            for future in running:
                future.cancel()
    if by_server:
        _check_sizes(checkpoint, target, by_server, {found.path: found.size_bytes for found in target.list(folder)})
    # A kept object may be from a copy that died before it was durable; a link is not durable yet.
    target.make_durable([item.path for item in objects])


def _bring_one(checkpoint: Checkpoint, target: Storage, item: _Object, *, stands: bool) -> _Was:
    """Link or copy one object. ``stands``: a listing has shown it in the target."""
    if stands and _holds(target, item):
        return _Was.KEPT
    try:
        link = target.link_from(checkpoint.storage, item.path, item.size_bytes)
        if link is not None:
            return _linked(checkpoint, target, item) if link is Link.SHARED else _Was.COPIED_BY_SERVER
        source = checkpoint.storage.open_input(item.path)
    except FileNotFoundError as error:
        raise missing_object(checkpoint.storage, checkpoint.record, item.path) from error
    except StorageError:
        if not _holds(target, item):
            raise
        return _Was.KEPT
    digest, size_bytes = xxhash.xxh3_128(), 0
    try:
        with closing(source), target.open_output(item.path) as output:
            for chunk in _chunks(source, checkpoint.storage):
                digest.update(chunk)
                size_bytes += len(chunk)
                if size_bytes > item.size_bytes:
                    break  # It is already too large.
                output.write(chunk)
            _check(checkpoint, item, size_bytes, digest)
    except StorageError:
        # Another copy of the same checkpoint may have written the same object in the meantime.
        if not _holds(target, item):
            raise
        return _Was.KEPT
    return _Was.COPIED


def _linked(checkpoint: Checkpoint, target: Storage, item: _Object) -> _Was:
    """Verify a link by its bytes; a wrong one is removed."""
    try:
        _check(checkpoint, item, *_content(target, item))
    except DamagedCheckpoint:
        target.delete([item.path])
        raise
    return _Was.LINKED


def _check(checkpoint: Checkpoint, item: _Object, size_bytes: int, digest: xxhash.xxh3_128 | None) -> None:
    """Raise ``DamagedCheckpoint`` unless an object of the source is as its checkpoint says.

    ``digest`` is None if the bytes were not read: then only the size counts.
    """
    if size_bytes == item.size_bytes and (digest is None or digest.digest() == item.digest):
        return
    least = "at least " if size_bytes > item.size_bytes else ""
    had = f"{least}{size_bytes} bytes" + ("" if digest is None else f" with digest {digest.hexdigest()}")
    raise DamagedCheckpoint(
        f"{item.path} in {checkpoint.storage.url} has {had}; its checkpoint says {item.size_bytes} with "
        f"{item.digest.hex()}. It was not copied; `ckpt validate` lists everything that is wrong",
        kind=ErrorKind.OBJECT_DIGEST_DIFFERS,
        path=item.path,
    )


def _check_sizes(checkpoint: Checkpoint, target: Storage, items: Sequence[_Object], sizes: Mapping[str, int]) -> None:
    """Remove what a server copied with a size other than the checkpoint's, and raise."""
    wrong = [item for item in items if sizes.get(item.path) != item.size_bytes]
    if wrong:
        target.delete([item.path for item in wrong])
        _check(checkpoint, wrong[0], sizes.get(wrong[0].path, 0), None)


def _holds(target: Storage, item: _Object) -> bool:
    """Return whether the target has the object. Raises ``DamagedCheckpoint`` if it differs."""
    try:
        size_bytes = target.size(item.path)
        if size_bytes == item.size_bytes:
            size_bytes, digest = _content(target, item)
            if (size_bytes, digest.digest()) == (item.size_bytes, item.digest):
                return True
    except FileNotFoundError:
        return False
    raise DamagedCheckpoint(
        f"{item.path} stands in {target.url} with other bytes ({size_bytes}) than the checkpoint's "
        f"({item.size_bytes}); delete it there and copy again",
        kind=ErrorKind.OBJECT_DIGEST_DIFFERS,
        path=item.path,
    )


def _content(storage: Storage, item: _Object) -> tuple[int, xxhash.xxh3_128]:
    """Return the size and digest of an object; read no more than its expected length."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    with closing(storage.open_input(item.path)) as file:
        for chunk in _chunks(file, storage):
            digest.update(chunk)
            size_bytes += len(chunk)
            if size_bytes > item.size_bytes:
                break
    return size_bytes, digest


def _chunks(source: Any, storage: Storage) -> Iterator[bytes]:
    """Yield the bytes of a file; ``read_input`` counts them in the storage's stats."""
    while chunk := read_input(storage, source, CHUNK_BYTES):
        yield chunk


# ---- checkpoints ---------------------------------------------------------------------------------
#
# Copies of a checkpoint in another store, and rollback to an older checkpoint.
#
# A savepoint (SPEC.md section 10) has every object under the same path with the same bytes, digests
# verified, and a record of another kind. Repeating an interrupted copy completes it. A rollback
# (section 8.3) copies no bytes: it publishes newest + 1 with the handles of an older checkpoint.


logger = logging.getLogger(__name__)


def copy(
    checkpoint: Checkpoint,
    target: Storage,
    *,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Record:
    """Make ``target`` a self-contained copy of one checkpoint (kind ``savepoint``).

    It may be repeated after any failure, and on a complete target. Raises ``InvalidInput`` for a
    target that holds another checkpoint (kind ``STORE_NOT_EMPTY``) or lies in the source's folders,
    ``JobMismatch``, ``CheckpointExpired`` or ``DamagedCheckpoint`` for the source,
    ``StorageError`` and ``OutcomeUnknown``.
    """
    start = time.perf_counter()
    record = checkpoint.record
    if target.url == checkpoint.storage.url:
        raise InvalidInput(f"cannot copy {checkpoint!r} into its own store; give another address", url=target.url)
    check_place(checkpoint, target)
    _check_target(record, target)
    copy_objects(checkpoint, target, progress=progress)
    copy_manifest(checkpoint, target)
    # Only the kind changes, so that two copies of one checkpoint have the same bytes.
    savepoint = replace(record, kind=CheckpointKind.SAVEPOINT)
    ending = create_record(target, savepoint.ref, encode_record(savepoint), sleep=sleep)
    if ending.step is not Step.PERMITTED:
        raise conflict(target, savepoint, ending)
    what, took_s = f"checkpoint {record.checkpoint_id} of {checkpoint.storage.url}", time.perf_counter() - start
    logger.info("copied %s to %s: %s; copying took %.3f s", what, target.url, record.totals, took_s)
    return savepoint


def _check_target(record: Record, target: Storage) -> None:
    there = newest_record(target)
    if there is None:
        refuse_foreign(target)
        return
    if there.job_id != record.job_id:
        raise JobMismatch(
            f"{target.url} belongs to job {there.job_id!r}, and the checkpoint to job {record.job_id!r}; copy it "
            "elsewhere",
            job_id=there.job_id,
        )
    if there.ref != record.ref or len(record_ids(target)) > 1:
        raise InvalidInput(
            f"{target.url} holds checkpoint {there.checkpoint_id} (attempt {there.attempt_id}), so checkpoint "
            f"{record.checkpoint_id} (attempt {record.attempt_id}) cannot be copied there; a copy is a store of its "
            "own",
            kind=ErrorKind.STORE_NOT_EMPTY,
            url=target.url,
        )


def begin_from(
    checkpoint: Checkpoint,
    target: Storage,
    *,
    properties: Mapping[str, str] | None = None,
    progress: Progress | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CommitPermit:
    """Begin the history of an empty store with the content of another store's checkpoint.

    Copies the segments, then publishes checkpoint id + 1 with the checkpoint as its parent: same
    job, graph, states and handles; no ``stop``, kind ``checkpoint``. It may be repeated. Raises
    ``InvalidInput`` (kind ``STORE_NOT_EMPTY``), and what :func:`copy` and ``publish`` raise.
    """
    check_place(checkpoint, target)
    require_empty(target)
    draft = Draft.with_content(checkpoint.record, parent=checkpoint, properties=properties or {})
    pending = PendingCheckpoint(target, draft, sleep=sleep)
    copy_objects(checkpoint, target, progress=progress)
    pending.add_handles(check_segments(checkpoint).manifest.full())
    return pending.publish()


def left_behind(ids: Sequence[CheckpointId]) -> str:
    """Return what a rollback or repair means for the output, as a sentence. ``ids`` ascend."""
    return (
        f"left behind: {', '.join(map(str, ids))}. What these checkpoints have committed, or still commit, stays in "
        "the output; sinks will see their input again"
    )


def rollback(
    storage: Storage,
    checkpoint_id: CheckpointId,
    *,
    newest: CheckpointId | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> CommitPermit:
    """Publish the content of an older checkpoint again; ``notes`` name those left behind.

    The new checkpoint has the older one's graph, states and handles, no ``stop``, kind
    ``rollback``, and the newest as its parent. ``newest`` is the id that must be the newest; None:
    any. Raises ``NotFound`` (unknown, or a stray), ``CheckpointExpired`` (before, or during this
    call), ``InvalidInput`` for the newest itself, ``PublishConflict`` where another checkpoint
    than ``newest`` is the newest, ``JobMismatch``, and what ``publish`` raises.
    """
    *left, source = chain_down_to(storage, checkpoint_id)
    if not left:
        raise InvalidInput(f"checkpoint {checkpoint_id} is the newest of {storage.url}; there is nothing to roll back")
    if newest is not None and left[0].checkpoint_id != newest:
        raise PublishConflict(
            f"{newest} is not the newest checkpoint of {storage.url} any more: {left[0].checkpoint_id} was published "
            "meanwhile. Nothing was changed; look again before you leave it behind",
            kind=ErrorKind.PUBLISH_LOST,
            checkpoint_id=newest,
            newest=left[0].checkpoint_id,
        )
    if source.job_id != left[0].job_id:
        raise JobMismatch(
            f"checkpoint {checkpoint_id} of {storage.url} is of job {source.job_id!r}, and the newest, "
            f"{left[0].checkpoint_id}, of job {left[0].job_id!r}; a store belongs to one job",
            job_id=left[0].job_id,
        )
    note = left_behind([record.checkpoint_id for record in reversed(left)])
    handles = load_manifest(storage, source).full()
    draft = Draft.with_content(
        source,
        parent=StoreCheckpoint(storage, left[0], bound_to_run=True),
        kind=CheckpointKind.ROLLBACK,
        source=source.ref,
        properties=source.lasting_properties,
        notes=(note,),
    )
    pending = PendingCheckpoint(storage, draft, sleep=sleep)
    pending.add_handles(handles)
    found = pending.publish()
    logger.warning("rolled %s back to checkpoint %s as %s; %s", storage.url, checkpoint_id, pending.checkpoint_id, note)
    return found
