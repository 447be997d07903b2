"""Lost segments that another store still has: savepoints and other copies keep paths and bytes.

An object is trusted only by its size and digest. Nothing is overwritten: a missing object is
written again under its path, and for a damaged one the bytes get a new path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import xxhash

from .. import paths as layout
from ..errors import StorageError
from ..model import CheckpointId, new_write_id
from ..pins import pins
from ..storage import HoldsSavepoints, Storage, make_durable, read_input, reads_at_once
from .losing import LostSegment

CHUNK_BYTES = 4 * 2**20
Done = Callable[[int], None]
"""Called with the number of bytes read."""


def savepoints_of(storage: Storage) -> list[Storage]:
    """Return the savepoints below a store, the one with the newest checkpoint first."""
    if not isinstance(storage, HoldsSavepoints):
        return []
    found = [one for one in pins(storage) if one.record is not None]
    found.sort(key=lambda one: one.record.checkpoint_id if one.record is not None else 0, reverse=True)
    return [storage.savepoint(one.name) for one in found]


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


def find(segments: Sequence[LostSegment], places: Sequence[Storage], done: Done) -> dict[str, Storage]:
    """Return by path the first place that has each segment, byte for byte.

    Reads what it finds. Raises ``StorageError`` if a place does not respond.
    """
    with ThreadPoolExecutor(max((reads_at_once(place) for place in places), default=1)) as pool:
        found = pool.map(lambda each: (each.path, _place_of(each, places, done)), segments)
        return {path: place for path, place in found if place is not None}


def _place_of(segment: LostSegment, places: Sequence[Storage], done: Done) -> Storage | None:
    return next((place for place in places if _has(place, segment, done)), None)


def _has(place: Storage, segment: LostSegment, done: Done) -> bool:
    digest, size_bytes = xxhash.xxh3_128(), 0
    try:
        with closing(place.open_input(segment.path)) as source:
            # An object that is longer is wrong already.
            while size_bytes <= segment.size_bytes and (chunk := read_input(place, source, CHUNK_BYTES)):
                digest.update(chunk)
                size_bytes += len(chunk)
                done(len(chunk))
    except FileNotFoundError:
        return False
    return size_bytes == segment.size_bytes and digest.digest() == segment.digest


def put_back(
    storage: Storage, segments: Sequence[LostSegment], places: Mapping[str, Storage], newest: CheckpointId
) -> tuple[list[str], dict[str, str]]:
    """Copy segments into a store from the places that have them.

    Returns the paths that were written again, and for the paths of damaged ones the new paths,
    under newest + 1. Raises ``StorageError``, also if the bytes turn out to be wrong.
    """
    again, moved = list[str](), dict[str, str]()
    for segment in segments:
        if segment.path not in places:
            continue
        path = segment.path
        if segment.is_there:
            label = path.rpartition("/")[2].rpartition("-")[0]
            path = moved[segment.path] = layout.segment_path(CheckpointId(newest + 1), new_write_id(), label=label)
        else:
            again.append(path)
        _copy(places[segment.path], storage, segment, path)
    make_durable(storage, [*again, *moved.values()])
    return again, moved


def _copy(place: Storage, storage: Storage, segment: LostSegment, path: str) -> None:
    digest = xxhash.xxh3_128()
    try:
        with closing(place.open_input(segment.path)) as source, storage.open_output(path) as output:
            while chunk := read_input(place, source, CHUNK_BYTES):
                digest.update(chunk)
                output.write(chunk)
            if digest.digest() != segment.digest:
                raise StorageError(
                    f"{segment.path} in {place.url} has changed while it was copied; nothing was put back for it",
                    path=segment.path,
                )
    except FileNotFoundError as error:
        raise StorageError(
            f"{segment.path} is not in {place.url} any more; nothing was put back for it", path=segment.path
        ) from error
