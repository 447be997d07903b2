"""Lost segments that another store still has: savepoints and other copies keep paths and bytes.

An object is trusted only by its size and digest. Nothing is overwritten: a missing object is
written again under its path, and a damaged one has to be moved away first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Lock

import xxhash

from .. import paths as layout
from ..errors import DamagedCheckpoint, ErrorKind, StorageError
from ..pins import pins
from ..storage import Storage, read_input
from .losing import Losses, LostSegment

_CHUNK_BYTES = 4 * 2**20
logger = logging.getLogger(__name__)


def savepoints_of(storage: Storage) -> list[Storage]:
    """Return the savepoints below a store, the one with the newest checkpoint first."""
    found = [(one.record.checkpoint_id, one.name) for one in pins(storage) if one.record is not None]
    return [storage.savepoint(name) for _, name in sorted(found, key=lambda each: -each[0])]


def listed_in(segments: Sequence[LostSegment], places: Iterable[Storage]) -> dict[str, list[str]]:
    """Return the paths that each place, by its URL, has with the right size.

    Lists each place once. A place that cannot be listed has none.
    """
    wanted, found = {each.path: each.size_bytes for each in segments}, {}
    for place in places:
        try:
            there = place.list(layout.SEGMENTS)
        except StorageError:
            continue
        mine = [item.path for item in there if wanted.get(item.path) == item.size_bytes]
        if mine:
            found[place.url] = sorted(mine)
    return found


def put_back(
    storage: Storage,
    losses: Losses,
    places: Sequence[Storage],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Write the missing segments again, from the first of ``places`` that has each, byte for byte.

    Returns their paths: the checkpoint is whole again. ``progress`` is called with the bytes
    copied, and those to copy. Raises ``StorageError`` if a place does not respond, and
    ``DamagedCheckpoint`` if a segment is found nowhere, or stands damaged under its path; the
    others were put back then.
    """
    missing = [each for each in losses.segments if not each.is_there]
    lock, done, total = Lock(), [0], sum(each.size_bytes for each in missing)

    def one(segment: LostSegment) -> bool:
        found = any(_copied(place, storage, segment) for place in places)
        with lock:
            done[0] += segment.size_bytes
            if progress is not None:
                progress(done[0], total)
        return found

    with ThreadPoolExecutor(max((place.reads_at_once for place in places), default=1)) as pool:
        found = list(pool.map(one, missing))
    again = [each.path for each, is_found in zip(missing, found, strict=True) if is_found]
    storage.make_durable(again)
    number = losses.record.checkpoint_id
    logger.warning("put %d of %d segments of checkpoint %d back into %s", len(again), len(missing), number, storage.url)
    if len(again) < len(losses.segments):
        raise _still_lost(storage, losses, again, places)
    return again


def _copied(place: Storage, storage: Storage, segment: LostSegment) -> bool:
    """Copy a segment, unless the place has none with these bytes."""
    digest, size_bytes = xxhash.xxh3_128(), 0
    try:
        with closing(place.open_input(segment.path)) as source, storage.open_output(segment.path) as output:
            # An object that is longer is wrong already.
            while size_bytes <= segment.size_bytes and (chunk := read_input(place, source, _CHUNK_BYTES)):
                digest.update(chunk)
                size_bytes += len(chunk)
                output.write(chunk)
            if digest.digest() != segment.digest:
                raise _OtherBytes  # So the output is discarded.
    except (FileNotFoundError, _OtherBytes):
        return False
    return True


class _OtherBytes(Exception):
    """A place has other bytes under the path of a segment."""


def _still_lost(storage: Storage, losses: Losses, again: Sequence[str], places: Sequence[Storage]) -> DamagedCheckpoint:
    first = next(each for each in losses.segments if each.path not in set(again))
    number, put = losses.record.checkpoint_id, f"{len(again)} of {len(losses.segments)}"
    if first.is_there and listed_in([first], places):
        return DamagedCheckpoint(
            f"put {put} lost segments of checkpoint {number} of {storage.url} back: {first.path} is damaged, and "
            "nothing is overwritten. Move that object away and run this again, and it is put back as well",
            kind=ErrorKind.DAMAGED_SEGMENT,
            path=first.path,
        )
    return DamagedCheckpoint(
        f"put {put} lost segments of checkpoint {number} of {storage.url} back: {first.path} is found nowhere. `ckpt "
        "repair` lists the other ways out",
        kind=ErrorKind.OBJECT_MISSING,
        path=first.path,
    )
